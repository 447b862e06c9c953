"""What a defense costs: the accuracy of a finished training under it, beside that of the same training without one."""

import json
import pathlib
from collections.abc import Mapping
from typing import Any

from gradleak import errors
from gradleak.metrics.statistics import difference_interval

SAME = ('model', 'dataset', 'init', 'weights')  # of the training and of the task that its costs are for
_OF_A_DEFENSE = ('defense', 'defense_text')


Cost = tuple[float, str] | tuple[float, str, tuple[float, float]]


def of_training(workdir: Any, task: Mapping[str, Any]) -> dict[str, Cost]:
  """Returns defense -> (percentage points of test accuracy that it costs, how this was measured), of launch/train.py.

  The 95 % interval of the points is a third element where the number of test samples is known; it is by these alone.

  A defense that makes the model more accurate has a negative cost. The figure is of one seed.

  Args:
    workdir: the work directory of a finished launch/train.py with `none` among its defenses.
    task: of the entries that get the costs: they are of the same model, dataset, and init or file of weights.

  Raises:
    UsageError: if the folder holds no such training, it is not finished, or of another task.
  """
  folder = errors.check_path('costs', workdir)
  found: dict[str, tuple[dict, dict]] = {}
  for path in sorted(folder.glob('*/config.json')):
    try:
      config = json.loads(path.read_text('utf-8'))
      last = json.loads((path.parent / 'rounds.jsonl').read_text('utf-8').splitlines()[-1])
      done, label = last['round'] == config['rounds'] or _ended(config, path.parent), config['defense']
    except (OSError, ValueError, LookupError, TypeError) as error:
      raise errors.UsageError(f'{path.parent} is not of launch/train.py, or damaged ({error})') from error
    if not done or last.get('accuracy') is None:
      raise errors.UsageError(f'the training in {path.parent} is not finished: give its command again')
    found[label] = config, last
  if 'none' not in found:
    raise errors.UsageError(f'{folder} holds no training without a defense: give launch/train.py none, too')
  undefended, reached = found['none'][0], found['none'][1]['accuracy']
  for part in SAME:
    if undefended.get(part) != task.get(part):
      raise errors.UsageError(
        f'the trainings in {folder} have {part} {undefended.get(part)}, the entries {task.get(part)}: costs are of one '
        'task'
      )
  shared = _shared(undefended)
  for label, (config, _) in found.items():
    if _shared(config) != shared:
      raise errors.UsageError(f'the training under {label} in {folder} has other settings than the one under none')
  bare = found['none'][1]

  def cost(config: Mapping[str, Any], last: Mapping[str, Any]) -> Cost:
    points = round(100 * (reached - last['accuracy']), 2)
    interval = _interval(bare, last)
    source = (
      f'one training of {_described(undefended)}: {100 * last["accuracy"]:.1f} % of the '
      f'{_tested(last)}test samples{_early(config, last)}, undefended {100 * reached:.1f} %'
    )
    if interval is None:
      return points, source
    low, high = interval
    chance = f' (difference {low:+.1f} to {high:+.1f} points, by the number of test samples)'.replace('-', '−')
    return points, source + chance, interval

  return {label: cost(*of) for label, of in found.items() if label != 'none'}


def _tested(last: Mapping[str, Any]) -> str:
  return f'{last["tested"]:,} ' if 'tested' in last else ''


def _interval(undefended: Mapping[str, Any], last: Mapping[str, Any]) -> tuple[float, float] | None:
  """Returns the 95 % interval of the points, by the test samples alone; None where these are not counted."""
  if 'tested' not in last or 'tested' not in undefended:
    return None
  counts = [count for one in (undefended, last) for count in (round(one['accuracy'] * one['tested']), one['tested'])]
  _, low, high = difference_interval(*counts)
  return round(100 * low, 2), round(100 * high, 2)


def _ended(config: Mapping[str, Any], folder: pathlib.Path) -> bool:
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
    f'({config["partition"]}), which share the {config["share"]}{local}, seed {config["seed"]}'
  )
