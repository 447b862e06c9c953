"""The settings of an audit that are no objects."""

import dataclasses
from typing import Any

from gradleak.attacks import labels as label_rules
from gradleak.audit.verdict import LEVELS, RECOVERED
from gradleak.core.settings import setting
from gradleak.metrics import perceptual
from gradleak.threat import knowledge as grants

KNOWLEDGE = ('non-adaptive', 'adaptive', 'both')
LABELS = ('auto', *grants.LABELS, *label_rules.RULES)
_ATTACKER: dict[str, Any] = {'group': 'attacker'}
_RUN: dict[str, Any] = {'group': 'run'}
COUNT: dict[str, Any] = {'low': 1, 'high': 10**6, 'integer': True}


@dataclasses.dataclass(frozen=True)
class AuditSettings:
  """The settings of an audit that are no objects; each is a keyword argument of `audit` and a flag of the programs."""

  batch_size: int = setting(1, 'Samples behind one upload.', **_RUN, **COUNT)
  restarts: int = setting(1, 'Starts per trial; the least matching distance is chosen.', **_ATTACKER, **COUNT)
  steps: int | None = setting(
    None,
    'Steps of searches that do not set their own, not of trainings before (programs: 0 for as published).',
    **_ATTACKER,
    **COUNT,
  )
  labels: str = setting(
    'auto',
    f'auto (as published), known, inferred, optimised, or a label rule: {", ".join(label_rules.RULES)}.',
    **_ATTACKER,
    choices=LABELS,
  )
  controls: int = setting(64, 'Null-gradient runs per attack that define success.', **_RUN, **COUNT)
  knowledge: str = setting(
    'both',
    'non-adaptive: attackers take what was sent for a gradient; adaptive: they know the defense; both: side by side.',
    **_ATTACKER,
    choices=KNOWLEDGE,
  )
  rounds: int = setting(
    1, 'Uploads of the same samples on the same model that an adaptive attacker averages or sums.', **_ATTACKER, **COUNT
  )
  adaptive_attacks: tuple[str, ...] | None = setting(
    None, 'Names of the adaptive attacks to try; all by default.', **_ATTACKER
  )
  decide: float | None = setting(
    None,
    'Share of uploads. The trials of a defense stop once its attackers surely recover a larger, or a smaller, one.',
    **_RUN,
    low=1e-3,
    high=1 - 1e-3,
  )
  within: float | None = setting(
    None,
    'Half-width. The trials of a defense stop once the share of uploads that its attackers recover is known to that.',
    **_RUN,
    low=0.01,
    high=0.5,
  )
  level: str = setting(
    RECOVERED[-1], 'With decide or within: the verdict that counts, or a stronger one.', **_RUN, choices=LEVELS
  )
  error_rate: float = setting(
    0.05, 'With decide or within: how often the answer on a defense may be wrong.', **_RUN, low=1e-6, high=0.5
  )
  lpips_backbone: str = setting(
    'alex',
    'Network of LPIPS: alex (AlexNet), vgg (VGG-16) or squeeze (SqueezeNet 1.1).',
    **_RUN,
    choices=perceptual.BACKBONES,
  )
  lpips_weights: str | None = setting(
    None, "File of torchvision's weights of that network; without it there is no LPIPS.", **_RUN
  )
  lpips_heads: str | None = setting(None, "File of LPIPS's own weights for it (version 0.1).", **_RUN)

  @property
  def sequential(self) -> bool:
    """Whether the trials of a defense stop once a question is decided."""
    return self.decide is not None or self.within is not None
