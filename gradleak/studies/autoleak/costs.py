"""What a defense costs: the accuracy of a finished training under it, beside that of the same training without one."""

import math
import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from gradleak.core import errors
from gradleak.core.storage import check_sealed, damaged, read_json, read_json_lines
from gradleak.federated.chance import at_chance, counted
from gradleak.federated.training import UNSETTLED, gained, unsettled
from gradleak.studies.frontier import LENGTHS, RESULT, TRAININGS, WRONG

# What a training and the task of its costs have in common; the second ones, and `start_of`, where both say them.
SAME, SAID = ('model', 'dataset', 'init', 'weights'), ('image_shape', 'num_classes', 'loss')
START = 'start_fingerprint'
_AGAIN = 'restore it, or remove the folder and give the command of launch/train.py again'
_OF_A_DEFENSE = ('defense', 'defense_text', 'defense_version', 'epsilon')


class _Ended(NamedTuple):
  """A finished training: its settings, its last row, `frontier.Trained`'s two lists, and `training.unsettled`."""

  config: dict
  last: dict
  wrong: list | None
  lengths: list | None
  unsettled: float

  @property
  def noun(self) -> str:
    """See `gradleak.federated.chance.counted`."""
    return counted(self.config)

  @property
  def at_chance(self) -> str:
    """See `gradleak.federated.chance.at_chance`."""
    return at_chance(self.last, self.config.get('num_classes'), self.noun)


class Cost(NamedTuple):
  """What a defense costs.

  Attributes:
    points: of test accuracy, in percentage points.
    source: where this figure is from.
    interval: (low, high), its 95 % interval, or None. It is by the test samples alone, and compares the models sample
      by sample where both trainings hold what they classify wrongly.
    at_chance: why the model under the defense is at chance, '' where it is not or that is not known.
    text: of the defense that was trained under, whatever its label; '' where that is not known.
  """

  points: float
  source: str
  interval: tuple[float, float] | None = None
  at_chance: str = ''
  text: str = ''


def of_training(workdir: Any, task: Mapping[str, Any]) -> dict[str, Cost]:
  """Returns defense -> the `Cost` of test accuracy that launch/train.py measured.

  A defense that makes the model more accurate has a negative cost. The figure is of one seed.

  Args:
    workdir: the work directory of a finished launch/train.py with `none` among its defenses.
    task: of the entries that get the costs: they are of the same model, dataset, and init or file of weights, and of
      samples of the same shape, classes and loss. Files of one name have the same weights, where both are known.

  Raises:
    UsageError: if the folder holds no such training, it is not finished, or of another task, or if the undefended model
      is at chance: there is nothing that a defense could cost.
  """
  found = _trainings(workdir)
  bare = found['none']
  if why := bare.at_chance:
    raise errors.UsageError(f'the undefended model in {workdir} is at chance ({why}): no cost can be stated')
  told = {part: value for part, value in task.items() if part != START}
  wanted = dict.fromkeys(SAME) | told | _started(task)
  for part, trained in _task(bare.config).items():
    if wanted.get(part, trained) != trained:
      ours, theirs = f'{part} {trained}', wanted[part]
      if part == START:
        ours, theirs = f'other weights in a file of the name {bare.config["weights"]}', 'others'
      raise errors.UsageError(f'the trainings in {workdir} have {ours}, the entries {theirs}: costs are of one task')
  shared = _shared(bare.config)
  for label, one in found.items():
    if _shared(one.config) != shared:
      raise errors.UsageError(f'the training under {label} in {workdir} has other settings than the one under none')
  return {label: _cost(bare, one) for label, one in found.items() if label != 'none'}


def _cost(bare: _Ended, one: _Ended) -> Cost:
  """Returns what a defense costs beside the undefended training."""
  reached, last = bare.last['accuracy'], one.last
  without = 'with that noise and no defense' if bare.config.get('server_noise') else 'undefended'
  points = round(100 * (reached - last['accuracy']), 2)
  source = (
    f'one training of {_described(bare.config)}: {100 * last["accuracy"]:.1f} % of the {_tested(last)}test {one.noun}'
    f'{_early(one.config, last)}{_lost(one)}, {without} {100 * reached:.1f} %{_still(bare, one)}'
  )
  lengths, text = one.lengths if one.lengths == bare.lengths else None, one.config.get('defense_text', '')
  lost = gained(bare.last, bare.wrong, last, one.wrong, lengths=lengths, noun=one.noun)
  if lost is None:
    return Cost(points, source, None, one.at_chance, text)
  low, high = math.floor(round(1e4 * lost.low, 6)) / 100, math.ceil(round(1e4 * lost.high, 6)) / 100  # outwards
  by = 'test {} that one of the two models alone classifies wrongly' if lost.pairs else 'number of test {}'
  chance = f' (difference {low:+.1f} to {high:+.1f} points, by the {by.format(one.noun)})'.replace('-', '−')
  return Cost(points, source + chance, (low, high), one.at_chance, text)


def _lost(one: _Ended) -> str:
  return f', which is chance ({one.at_chance})' if one.at_chance else ''


def _still(bare: _Ended, one: _Ended) -> str:
  """Returns, where accuracy had not settled, by how much it still changed."""
  most = max(bare.unsettled, one.unsettled)
  if most < UNSETTLED:
    return ''
  return f', not settled: up to {most:.1f} points between two measurements in the last quarter of the training'


def verified(workdir: Any) -> bool:
  """Returns whether all trainings in a folder have digests; those of earlier versions have none."""
  folder = errors.check_path('costs', workdir)
  return all((folder / name / RESULT).exists() for name in _folders(folder).values())


def task_of(workdir: Any) -> dict[str, Any]:
  """Returns the task of the trainings in a folder, what has to be the same; raises `UsageError` as `of_training`."""
  return _task(_trainings(workdir)['none'].config)


def task_of_entry(entry: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the task of an entry of a leaderboard, in the parts that `task_of` has."""
  known = {f'{part}_fingerprint': value for part, value in entry['fingerprints'].items()}
  return _task({**entry['task'], **entry['task']['more'], **known})


def alike(task: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
  """Returns whether two tasks of `task_of` or `task_of_entry` are the same in all that both of them say."""
  return all(other.get(part, value) == value for part, value in task.items())


def start_of(config: Mapping[str, Any]) -> str | None:
  """Returns the fingerprint of the weights of a file that a run starts from; None where they are drawn, or not known.

  After a round before the audit, they are those that clients were sent before. In float64 they have other bits.
  """
  if not config.get('weights') or config.get('precision') == 'float64':
    return None
  known = {0: 'weights_fingerprint', 1: 'previous_fingerprint'}.get(config.get('rounds_before', 0), '')
  return config.get(START) or config.get(known)


def _task(config: Mapping[str, Any]) -> dict[str, Any]:
  same = {part: config.get(part) for part in SAME}
  return same | {part: config[part] for part in SAID if part in config} | _started(config)


def _started(config: Mapping[str, Any]) -> dict[str, str]:
  """Returns `start_of` by its name, nothing where it is not known."""
  start = start_of(config)
  return {} if start is None else {START: start}


def _trainings(workdir: Any) -> dict[str, _Ended]:
  """Returns {defense: its training} of a folder, with 'none' among them; raises `UsageError` as `of_training` does."""
  folder = errors.check_path('costs', workdir)
  found: dict[str, _Ended] = {}
  for label, name in _folders(folder).items():
    place = folder / name
    check_sealed(place / RESULT, _AGAIN)
    try:
      config = read_json(place / 'config.json', _AGAIN, dict)
      rows = read_json_lines(place / 'rounds.jsonl', _AGAIN)
      last = rows[-1]
      ended = _Ended(config, last, _numbers(place / WRONG), _numbers(place / LENGTHS), unsettled(rows))
      done, same = last['round'] == config['rounds'] or _spent(config, place), config['defense'] == label
    except (OSError, ValueError, LookupError, TypeError) as error:
      raise errors.UsageError(f'{place} is not of launch/train.py, or damaged ({error})') from error
    if not same:
      raise errors.UsageError(f'{place} holds the training under {config["defense"]}, expected that under {label}')
    if not done or last.get('accuracy') is None:
      raise errors.UsageError(f'the training in {place} is not finished: give its command again')
    found[label] = ended
  if 'none' not in found:
    raise errors.UsageError(f'{folder} holds no training without a defense: give launch/train.py none, too')
  return found


def _folders(workdir: pathlib.Path) -> dict[str, str]:
  """Returns {defense: the folder of its training} of a finished launch/train.py; its other folders are audits."""
  path = workdir / TRAININGS
  try:
    folders = read_json(path, _AGAIN, dict)
  except FileNotFoundError:
    raise errors.UsageError(
      f'there is no {path}: give the command of launch/train.py again, which writes it when its trainings are finished'
    ) from None
  if not all(isinstance(name, str) for name in folders.values()):
    raise damaged(path, 'a folder in it is no text', _AGAIN)
  return folders


def _numbers(path: pathlib.Path) -> list[int] | None:
  """Returns the whole numbers in a file, None if there is none; raises what JSON raises."""
  if not path.exists():
    return None
  numbers = read_json(path, _AGAIN, list)
  if not all(isinstance(number, int) for number in numbers):
    raise ValueError(f'{path.name} holds no list of numbers')
  return numbers


def _tested(last: Mapping[str, Any]) -> str:
  return f'{last["tested"]:,} ' if 'tested' in last else ''


def _spent(config: Mapping[str, Any], folder: pathlib.Path) -> bool:
  """Returns whether the ε budget ended a training: what its defense adds to a round is measured after the last one."""
  return config.get('budget') is not None and (folder / 'split.json').exists()


def _early(config: Mapping[str, Any], last: Mapping[str, Any]) -> str:
  ended = last['round'] < config['rounds']
  return f' after {last["round"]} rounds, when its ε budget was spent' if ended else ''


def _shared(config: Mapping[str, Any]) -> dict[str, Any]:
  return {name: value for name, value in config.items() if name not in _OF_A_DEFENSE}


def _described(config: Mapping[str, Any]) -> str:
  epochs = config.get('local_epochs') or 1
  local = '' if config['share'] == 'gradient' else f' after {epochs} local epoch{"s" if epochs > 1 else ""}'
  start = f' from the weights of {config["weights"]}' if config.get('weights') else ''
  parted = f' ({config["partition"]})' if config.get('partition') else ''
  seed = f', seed {config["seed"]}' if config.get('seed') is not None else ''
  return (
    f'{config["rounds"]} rounds{start}, {config["per_round"]} of {config["clients"]} clients each{parted}, which share '
    f'the {config["share"]}{local}{_served(config)}, all under the defense{seed}'
  )


def _served(config: Mapping[str, Any]) -> str:
  """Returns how the server steps, in words, where it does not add the mean update as it is."""
  name, rate, momentum, tau = (config.get(f'server{part}') for part in ('', '_learning_rate', '_momentum', '_tau'))
  given = [f'noise of multiplier {config["server_noise"]:g}'] if config.get('server_noise') else []
  if name not in (None, 'sgd') or rate not in (None, 1.0) or momentum:
    given.append(f'{name} of rate {rate:g}')
    given += [f'momentum {momentum:g}'] if momentum else []
    given += [f'τ {tau:g}'] if name == 'adam' and tau else []
  return f' to a server with {" and ".join(given)}' if given else ''
