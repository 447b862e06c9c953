"""DP-SGD by Opacus: seen while a client trains in this process, and named as the defense that simulates it.

Opacus is not imported here: without it, no client uses it.
"""

import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from gradleak.defenses import Defense, dpsgd

_FLAT = (  # optimizers that clip the whole gradient of a sample, by one constant bound
  'DPOptimizer', 'DPOptimizerFastGradientClipping', 'DistributedDPOptimizer',
)  # fmt: skip


class Step(NamedTuple):
  """One step of DP-SGD.

  Attributes:
    optimizer: the name of its class in Opacus.
    norm, noise: the bound on a sample's gradient, a number or one for each layer, and the noise multiplier.
    divisor: the number of samples by which the sum is divided, None where it is not.
    rate: the probability with which each sample is in a batch, 1.0 without Poisson sampling.
    samples: of its batch, None where the optimizer does not hold their gradients.
  """

  optimizer: str
  norm: Any
  noise: float
  divisor: int | None
  rate: float
  samples: int | None


@contextlib.contextmanager
def watched(steps: list[Step]) -> Iterator[None]:
  """Appends each `Step` that an optimizer of Opacus takes meanwhile, if Opacus was imported before."""
  optimizers = sys.modules.get('opacus.optimizers')
  samplers = sys.modules.get('opacus.utils.uniform_sampler')
  if optimizers is None or samplers is None:
    yield
    return
  rates = [1.0]

  def scale_grad(optimizer: Any) -> None:
    divisor = optimizer.expected_batch_size if optimizer.loss_reduction == 'mean' else None
    kind, norm, noise = type(optimizer).__name__, optimizer.max_grad_norm, float(optimizer.noise_multiplier)
    steps.append(Step(kind, norm, noise, divisor, rates[-1], _samples(optimizer)))
    scale(optimizer)

  def batches(sampler: Any) -> Iterator:
    rates.append(float(sampler.sample_rate))
    return drawn(sampler)

  optimizer, sampler = optimizers.DPOptimizer, samplers.UniformWithReplacementSampler
  scale, drawn = optimizer.scale_grad, sampler.__iter__
  optimizer.scale_grad, sampler.__iter__ = scale_grad, batches
  try:
    yield
  finally:
    optimizer.scale_grad, sampler.__iter__ = scale, drawn


def _samples(optimizer: Any) -> int | None:
  try:
    return len(optimizer.grad_samples[0])
  except (AttributeError, TypeError, ValueError, IndexError):  # ghost clipping has no gradient of a single sample
    return None


def defense_of(steps: Sequence[Step]) -> tuple[Defense | None, str]:
  """Returns (the defense that simulates the steps of a client, a sentence): (None, '') for a client without Opacus.

  The defense is None as well where no setting of `dpsgd` simulates them; the sentence says why.
  """
  if not steps:
    return None, ''
  first = steps[0]
  why = ''
  if other := [step.optimizer for step in steps if step.optimizer not in _FLAT]:
    why = f'{other[0]} has a bound for each layer, or one that changes'
  elif any((step.norm, step.noise) != (first.norm, first.noise) for step in steps):
    why = 'norm or noise change from step to step'
  elif first.divisor is None:
    why = "the sum is not divided by the number of samples: loss_reduction='sum'"
  elif (rate := min(step.rate for step in steps)) < 1:
    why = f'batches are drawn by Poisson sampling at a rate of {rate:.3g}: make one batch of all samples'
  elif any(step.samples not in (None, step.divisor) for step in steps):
    sizes = ', '.join(str(size) for size in sorted({step.samples for step in steps if step.samples is not None}))
    why = f'the sum is divided by {first.divisor}, and batches have {sizes} samples'
  if why:
    return None, f'The client trains by DP-SGD of Opacus, which is not simulated: {why}.'
  found = dpsgd(norm=float(first.norm), noise=first.noise)
  return found, f'The client trains by DP-SGD of Opacus: {found}.'
