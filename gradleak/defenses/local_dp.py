"""Flower's client mod LocalDpMod: clipping, and noise for an ε that the user states."""

import math
from typing import Annotated

import jax.numpy as jnp
import optax

from gradleak.core.settings import NonNegative, Positive, Range
from gradleak.defenses.defense import SENSITIVITIES, Context, Mechanism, Noise, Settings, defense
from gradleak.defenses.differential_privacy import Budget, clip_and_perturb

Delta = Annotated[float, Range(1e-37, 1 - 1e-12)]  # 1.25 / δ is a number of float32


def _stddev(settings: Settings) -> float:
  return settings['sensitivity'] * math.sqrt(2 * math.log(1.25 / settings['delta'])) / settings['epsilon']


def _mechanism(settings: Settings, clipped_to: float | None, position: int) -> Mechanism | None:
  del position
  norm = min(settings['norm'], math.inf if clipped_to is None else clipped_to)
  return Mechanism(_stddev(settings) / norm, 'client') if settings['sensitivity'] and math.isfinite(norm) else None


def _stated(context: Context, settings: Settings) -> str:
  """Returns why the ε that is stated does not hold, where it does not."""
  del context
  needed = SENSITIVITIES['replace one'] * settings['norm']
  if settings['sensitivity'] < needed:
    return (
      f'the stated ε = {settings["epsilon"]:g} is for a sensitivity of {settings["sensitivity"]:g}, and what is '
      f'clipped to {settings["norm"]:g} has {needed:g}'
    )
  return '' if settings['epsilon'] <= 1 else 'the rule that gives the noise is proved for ε ≤ 1 alone'


@defense(
  place='upload',
  citation='Dwork, Roth: The Algorithmic Foundations of Differential Privacy. 2014, theorem A.1; as LocalDpMod of '
  'Flower 1.42.',
  published='LocalDpMod',
  random=True,
  noise=Noise(lambda settings, context, count: _stddev(settings) ** 2),
  clips=lambda settings: settings['norm'],
  mechanism=_mechanism,
  post_processing=True,
  remark=_stated,
  idle=lambda settings: settings['sensitivity'] == 0 and math.isinf(settings['norm']),
)
def local_dp(
  *, norm: Positive, sensitivity: NonNegative, epsilon: Budget, delta: Delta
) -> optax.GradientTransformationExtraArgs:
  r"""Clips the update, then adds the Gaussian noise that theorem A.1 gives for a sensitivity, an ε and a δ.

  The mod does not check the sensitivity against the clipping norm. An update that is clipped to S moves by up to 2·S,
  so a stated ε needs a sensitivity of 2·S. FLIP, a medical platform, ships
  `local_dp(norm=1,sensitivity=1e-4,epsilon=10,delta=1e-5)` (its pull request 833). That is noise of 4.8e-5: after a
  local step at the rate 0.01, eight of eight faces were recognisable. The ε in results here follows from the noise over
  the clipping norm, and not from what is stated.

  Formula:
    \Delta' = \Delta \cdot \min(1, S / \lVert \Delta \rVert_2) + n, \quad n \sim \mathcal{N}(0, \sigma^2 I), \quad
    \sigma = s \sqrt{2 \ln(1.25 / \delta)} / \varepsilon, \quad S = \text{norm}, \; s = \text{sensitivity}

  Args:
    norm: the bound on the norm over all tensors together; infinity does not clip. An update whose norm is no finite
      number counts as zeros, as in `clip`.
    sensitivity: s; 0 adds no noise.
    epsilon: the ε that is stated; the theorem holds for ε ≤ 1.
    delta: δ.

  Raises (from its update):
    UsageError: without `key=`.
  """
  log = jnp.log(1.25 / jnp.asarray(delta, jnp.float32))
  stddev = jnp.asarray(sensitivity, jnp.float32) * jnp.sqrt(2 * log) / jnp.asarray(epsilon, jnp.float32)
  return clip_and_perturb('local_dp', norm, stddev)
