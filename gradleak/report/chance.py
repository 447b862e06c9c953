"""Models at chance: which they are, what they do not show, and why they may be there."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from gradleak.federated import ClientSettings
from gradleak.report.formatting import listed
from gradleak.report.words import Finding, found


def findings(entries: Sequence[Mapping[str, Any]], config: Mapping[str, Any]) -> list[Finding]:
  """Returns what is found of models at chance.

  Args:
    entries: `frontier.entries`.
    config: the settings of the training, named as the flags of launch/train.py; missing ones are left out.
  """
  made = []
  for one in entries:
    why = one['at_chance']
    if why and one['defense'] == 'none':
      made += [found('training.base_at_chance', why=f'{why[0].upper()}{why[1:]}'), _cause(one, config)]
    elif why:
      made.append(found('training.at_chance', defenses=[one['defense']], why=why))
  return made


def _cause(base: Mapping[str, Any], config: Mapping[str, Any]) -> Finding:
  """Returns why the undefended model may be at chance, by the settings of its training."""
  if base['loss'] is not None and not math.isfinite(base['loss']):
    return found('training.loss')
  causes, rate = [], config.get('learning_rate')
  if rate is not None and config.get('share') == 'delta':
    causes.append(f'the learning rate ({rate:g}{_momentum(rate, config.get("momentum") or 0.0)})')
  if config.get('server_learning_rate') is not None:
    causes.append(f'the rate of the server ({config["server_learning_rate"]:g})')
  if config.get('init'):
    causes.append(f'the initial weights (init={config["init"]})')
  causes.append(f'the number of rounds ({base["rounds"]})')
  return found('training.cause', causes=listed(causes, 'or'))


def _momentum(rate: float, momentum: float) -> str:
  """Returns how far momentum moves the weights at a rate, and its default."""
  if not momentum:
    return ''
  if momentum == 1:
    return ' with momentum 1, which never stops'
  usual = ClientSettings(momentum=momentum).rate
  default = f'; its default is {usual:.3g}' if rate > usual else ''
  return f' with momentum {momentum:g}, which moves as far as {rate / (1 - momentum):.3g} without{default}'
