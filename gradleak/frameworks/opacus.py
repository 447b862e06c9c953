"""DP-SGD by Opacus: seen while a client trains in this process, and named as the defense that simulates it.

Opacus is not imported here: without it, no client uses it.
"""

import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from gradleak.defenses import Defense, dpsgd

# Optimizers that clip the whole gradient of a sample, by one constant bound.
_FLAT = ('DPOptimizer', 'DPOptimizerFastGradientClipping', 'DistributedDPOptimizer')
_OTHERS = ('AdaClipDPOptimizer', 'DPPerLayerOptimizer', 'SimpleDistributedPerLayerOptimizer')
_GHOSTS = 'opacus.grad_sample.grad_sample_module_fast_gradient_clipping'


class Step(NamedTuple):
  """One step of DP-SGD.

  Attributes:
    optimizer: the name of its class in Opacus.
    norm, noise: the bound on a sample's gradient, a number or one for each layer, and the noise multiplier.
    divisor: the number of samples by which the sum is divided, over all batches that it is accumulated from; None where
      it is not.
    rate: the probability with which each sample is in a batch, 1.0 without Poisson sampling.
    samples: of its batch, of all parts of one that is cut to save memory; None where they cannot be counted.
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
  ghosts = getattr(sys.modules.get(_GHOSTS), 'GradSampleModuleFastGradientClipping', None)
  rates, clipped = [1.0], list[int | None]()

  def scale_grad(optimizer: Any) -> None:
    mean = optimizer.loss_reduction == 'mean'
    divisor = optimizer.expected_batch_size * optimizer.accumulated_iterations if mean else None
    kind, norm, noise = type(optimizer).__name__, optimizer.max_grad_norm, float(optimizer.noise_multiplier)
    samples = None if None in clipped else sum(one or 0 for one in clipped) or _samples(optimizer)
    clipped.clear()
    steps.append(Step(kind, norm, noise, divisor, rates[-1], samples))
    scale(optimizer)

  def clip_and_accumulate(optimizer: Any) -> None:  # once for each part of a batch that is cut to save memory
    clipped.append(_samples(optimizer))
    clip(optimizer)

  def get_clipping_coef(module: Any) -> Any:  # ghost clipping: a factor for each sample in place of its gradient
    found = factors(module)
    clipped.append(len(found))
    return found

  def batches(sampler: Any) -> Iterator:
    rates.append(float(sampler.sample_rate))
    return drawn(sampler)

  optimizer, sampler = optimizers.DPOptimizer, samplers.UniformWithReplacementSampler
  scale, clip, drawn = optimizer.scale_grad, optimizer.clip_and_accumulate, sampler.__iter__
  optimizer.scale_grad, optimizer.clip_and_accumulate, sampler.__iter__ = scale_grad, clip_and_accumulate, batches
  if ghosts is not None:
    factors, ghosts.get_clipping_coef = ghosts.get_clipping_coef, get_clipping_coef
  try:
    yield
  finally:
    optimizer.scale_grad, optimizer.clip_and_accumulate, sampler.__iter__ = scale, clip, drawn
    if ghosts is not None:
      ghosts.get_clipping_coef = factors


def _samples(optimizer: Any) -> int | None:
  try:
    return len(optimizer.grad_samples[0])
  except (AttributeError, TypeError, ValueError, IndexError):  # it holds no gradients of single samples
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
    known = 'has a bound for each layer, or one that changes' if other[0] in _OTHERS else 'is not known'
    why = f'{other[0]} {known}'
  elif any((step.norm, step.noise) != (first.norm, first.noise) for step in steps):
    why = 'norm or noise change from step to step'
  elif first.divisor is None:
    why = "the sum is not divided by the number of samples: loss_reduction='sum'"
  elif (rate := min(step.rate for step in steps)) < 1:
    why = f'batches are drawn by Poisson sampling at a rate of {rate:.3g}: make one batch of all samples'
  elif any(step.samples is None for step in steps):
    why = 'the samples of its batches cannot be counted'
  elif any(step.samples != step.divisor for step in steps):
    sizes = ', '.join(str(size) for size in sorted({step.samples or 0 for step in steps}))
    why = f'the sum is divided by {first.divisor}, and batches have {sizes} samples'
  if why:
    return None, f'The client trains by DP-SGD of Opacus, which is not simulated: {why}.'
  found = dpsgd(norm=float(first.norm), noise=first.noise)
  return found, f'The client trains by DP-SGD of Opacus: {found}.'
