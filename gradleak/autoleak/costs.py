"""What a defense costs: the accuracy of a finished training under it, beside that of the same training without one."""

import json
import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from gradleak import errors
from gradleak.federated.training import UNSETTLED, gained, unsettled
from gradleak.frontier import WRONG

SAME = ('model', 'dataset', 'init', 'weights')  # of the training and of the task that its costs are for
_OF_A_DEFENSE = ('defense', 'defense_text')


class _Ended(NamedTuple):
  """A finished training: its settings, its last row, `gradleak.frontier.Trained.wrong`, and `training.unsettled`."""

  config: dict
  last: dict
  wrong: list | None
  unsettled: float


Cost = tuple[float, str] | tuple[float, str, tuple[float, float]]


def of_training(workdir: Any, task: Mapping[str, Any]) -> dict[str, Cost]:
  """Returns defense -> (percentage points of test accuracy that it costs, how this was measured), of launch/train.py.

  The 95 % interval of the points is a third element where the number of test samples is known; it is by these alone,
  and compares the models sample by sample where both trainings hold what they classify wrongly.

  A defense that makes the model more accurate has a negative cost. The figure is of one seed.

  Args:
    workdir: the work directory of a finished launch/train.py with `none` among its defenses.
    task: of the entries that get the costs: they are of the same model, dataset, and init or file of weights.

  Raises:
    UsageError: if the folder holds no such training, it is not finished, or of another task.
  """
  found = _trainings(workdir)
  bare = found['none']
  for part in SAME:
    if bare.config.get(part) != task.get(part):
      raise errors.UsageError(
        f'the trainings in {workdir} have {part} {bare.config.get(part)}, the entries {task.get(part)}: costs are of '
        'one task'
      )
  shared = _shared(bare.config)
  for label, one in found.items():
    if _shared(one.config) != shared:
      raise errors.UsageError(f'the training under {label} in {workdir} has other settings than the one under none')
  return {label: _cost(bare, one) for label, one in found.items() if label != 'none'}


def _cost(bare: _Ended, one: _Ended) -> Cost:
  """Returns what a defense costs beside the undefended training."""
  reached, last = bare.last['accuracy'], one.last
  points = round(100 * (reached - last['accuracy']), 2)
  source = (
    f'one training of {_described(bare.config)}: {100 * last["accuracy"]:.1f} % of the {_tested(last)}test samples'
    f'{_early(one.config, last)}, undefended {100 * reached:.1f} %{_still(bare, one)}'
  )
  lost = gained(bare.last, bare.wrong, last, one.wrong)
  if lost is None:
    return points, source
  low, high = (round(100 * bound, 2) for bound in (lost.low, lost.high))
  by = 'test samples that one of the two models alone classifies wrongly' if lost.pairs else 'number of test samples'
  chance = f' (difference {low:+.1f} to {high:+.1f} points, by the {by})'.replace('-', '−')
  return points, source + chance, (low, high)


def _still(bare: _Ended, one: _Ended) -> str:
  """Returns, where accuracy had not settled, by how much it still changed."""
  most = max(bare.unsettled, one.unsettled)
  if most < UNSETTLED:
    return ''
  return f', not settled: up to {most:.1f} points between two measurements in the last quarter of the training'


def task_of(workdir: Any) -> dict[str, Any]:
  """Returns the task of the trainings in a folder, with `SAME` as keys; raises `UsageError` as `of_training` does."""
  config = _trainings(workdir)['none'].config
  return {part: config.get(part) for part in SAME}


def _trainings(workdir: Any) -> dict[str, _Ended]:
  """Returns {defense: its training} of a folder, with 'none' among them; raises `UsageError` as `of_training` does."""
  folder = errors.check_path('costs', workdir)
  found: dict[str, _Ended] = {}
  for path in sorted(folder.glob('*/config.json')):
    try:
      config = json.loads(path.read_text('utf-8'))
      rows = [json.loads(line) for line in (path.parent / 'rounds.jsonl').read_text('utf-8').splitlines()]
      last = rows[-1]
      ended = _Ended(config, last, _wrong(path.parent / WRONG), unsettled(rows))
      done, label = last['round'] == config['rounds'] or _spent(config, path.parent), config['defense']
    except (OSError, ValueError, LookupError, TypeError) as error:
      raise errors.UsageError(f'{path.parent} is not of launch/train.py, or damaged ({error})') from error
    if not done or last.get('accuracy') is None:
      raise errors.UsageError(f'the training in {path.parent} is not finished: give its command again')
    found[label] = ended
  if 'none' not in found:
    raise errors.UsageError(f'{folder} holds no training without a defense: give launch/train.py none, too')
  return found


def _wrong(path: pathlib.Path) -> list[int] | None:
  """Returns the numbers in a file of `gradleak.frontier.WRONG`, None if there is none; raises what JSON raises."""
  if not path.exists():
    return None
  numbers = json.loads(path.read_text('utf-8'))
  if not isinstance(numbers, list) or not all(isinstance(number, int) for number in numbers):
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
  local = '' if config['share'] == 'gradient' else f' after {config["local_epochs"]} local epochs'
  start = f' from the weights of {config["weights"]}' if config.get('weights') else ''
  return (
    f'{config["rounds"]} rounds{start}, {config["per_round"]} of {config["clients"]} clients each '
    f'({config["partition"]}), which share the {config["share"]}{local}, all under the defense, seed {config["seed"]}'
  )
