"""Models at chance, in sentences: which they are, what they do not show, and why they may be there."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from gradleak.federated import ClientSettings
from gradleak.report.formatting import listed


def sentences(found: Sequence[Mapping[str, Any]], config: Mapping[str, Any]) -> list[str]:
  """Returns what is said of models at chance; names stand in backticks.

  Args:
    found: `frontier.entries`.
    config: the settings of the training, named as the flags of launch/train.py; missing ones are left out.
  """
  said = []
  for one in found:
    why = one['at_chance']
    if why and one['defense'] == 'none':
      said.append(f'The undefended model is at chance: no cost can be stated. {why[0].upper()}{why[1:]}.')
      said.append(_cause(one, config))
    elif why:
      said.append(f'The model under `{one["defense"]}` is at chance: {why}.')
  return said


def _cause(base: Mapping[str, Any], config: Mapping[str, Any]) -> str:
  """Returns why the undefended model may be at chance, by the settings of its training."""
  if base['loss'] is not None and not math.isfinite(base['loss']):
    return 'Its training diverged, as its loss is not finite: choose a smaller learning rate.'
  causes, rate = [], config.get('learning_rate')
  if rate is not None and config.get('share') == 'delta':
    causes.append(f'the learning rate ({rate:g}{_momentum(rate, config.get("momentum") or 0.0)})')
  if config.get('server_learning_rate') is not None:
    causes.append(f'the rate of the server ({config["server_learning_rate"]:g})')
  if config.get('init'):
    causes.append(f'the initial weights (init={config["init"]})')
  causes.append(f'the number of rounds ({base["rounds"]})')
  return f'The cause may be {listed(causes, "or")}.'


def _momentum(rate: float, momentum: float) -> str:
  """Returns how far momentum moves the weights at a rate, and its default."""
  if not momentum:
    return ''
  if momentum == 1:
    return ' with momentum 1, which never stops'
  usual = ClientSettings(momentum=momentum).rate
  default = f'; its default is {usual:.3g}' if rate > usual else ''
  return f' with momentum {momentum:g}, which moves as far as {rate / (1 - momentum):.3g} without{default}'
