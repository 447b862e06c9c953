"""What an attacker holds for likely of images, without any data: smoothness, batch statistics, agreement.

Each prior is a pure function of dummy images [N, H, W, C], zero where they are as expected.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from gradleak.core import errors, trees

_FEATURES = 96  # of the random convolution, as published


def total_variation(images: jax.Array) -> jax.Array:
  """Returns the anisotropic total variation, mean |∂x/∂row| + mean |∂x/∂column|; images [N, H, W, C].

  Along a side of one pixel there is no difference, and nothing is added.
  """
  rows, columns = images[:, 1:] - images[:, :-1], images[:, :, 1:] - images[:, :, :-1]
  return sum((jnp.mean(jnp.abs(x)) for x in (rows, columns) if x.size), jnp.zeros((), images.dtype))


def batch_statistics(apply: Callable[..., Any], variables: Mapping, images: jax.Array) -> jax.Array:
  """Returns Σ_l ‖μ_l − BN mean‖ + ‖σ²_l − BN var‖ over the BatchNorm layers (GradInversion, Yin et al. 2021, eq. 9).

  After a pass the running averages are m of the old ones and 1 − m of the batch's: their change shows the batch. The
  momentum m of each layer is what a pass of zeros leaves of running averages of 1.

  Args:
    apply: of the model.
    variables: the model's, with the running averages that are expected.
    images: [N, H, W, C].

  Raises:
    UsageError: for a model without BatchNorm.
  """
  if not jax.tree.leaves(variables.get('batch_stats', {})):
    raise errors.UsageError('the prior on batch statistics needs a model with BatchNorm')
  _, after = apply(variables, images, True, None)
  changes = trees.subtract(after, variables['batch_stats'])
  pairs = zip(jax.tree.leaves(changes), _momenta(apply, variables, images), strict=True)
  return jnp.sum(jnp.stack([trees.norm(change) / (1 - momentum) for change, momentum in pairs]))


def _momenta(apply: Callable[..., Any], variables: Mapping, images: jax.Array) -> list[float]:
  """Returns the momentum of each of the running averages, in the order of leaves, by shapes alone."""

  def nothing(tree: Any) -> Any:
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), tree)

  @jax.jit
  def kept() -> Any:
    zeros = nothing(variables)
    ones = {**zeros, 'batch_stats': jax.tree.map(jnp.ones_like, zeros['batch_stats'])}
    first, second = (apply(old, nothing(images), True, None)[1] for old in (ones, zeros))
    return jax.tree.map(lambda a, b: jnp.mean(a - b), first, second)

  with jax.ensure_compile_time_eval():
    return [float(momentum) for momentum in jax.tree.leaves(kept())]


def disagreement(images: jax.Array) -> jax.Array:
  """Returns the mean squared distance from the mean over several starts of the same images, [starts, N, H, W, C].

  GradInversion's group consistency (Yin et al. 2021, eq. 11) with the pixel mean as the consensus, after each start is
  shifted by whole pixels to where it correlates best with it.
  """
  consensus = jax.lax.stop_gradient(jnp.mean(images, axis=0))
  shifted = jax.vmap(lambda start: registered(consensus, start))(jax.lax.stop_gradient(images))
  consensus = jnp.mean(shifted, axis=0)
  targets = jax.vmap(lambda start: registered(start, consensus))(jax.lax.stop_gradient(images))
  return jnp.mean(jnp.square(images - targets))


def registered(fixed: jax.Array, moving: jax.Array) -> jax.Array:
  """Returns `moving`, each image shifted (cyclically) by the whole pixels at which it correlates best with `fixed`.

  By phase correlation: the largest value of the inverse transform of the normalised cross-power spectrum.

  Args:
    fixed, moving: [N, H, W, C].
  """

  def one(fixed: jax.Array, moving: jax.Array) -> jax.Array:
    spectrum = jnp.fft.fft2(fixed, axes=(0, 1)) * jnp.conj(jnp.fft.fft2(moving, axes=(0, 1)))
    spectrum = jnp.sum(spectrum, axis=-1)
    size = jnp.abs(spectrum)
    surface = jnp.fft.ifft2(spectrum / jnp.where(size > 0, size, jnp.ones_like(size)).astype(spectrum.dtype)).real
    row, column = jnp.divmod(jnp.argmax(surface), surface.shape[1])
    return jnp.roll(moving, (row, column), axis=(0, 1))

  return jax.vmap(one)(fixed, moving)


def disorder(images: jax.Array) -> jax.Array:
  """Returns how far the epochs' dummy samples [epochs, N, H, W, C] are from being the same ones in another order.

  Dimitrov et al. (2022, section 4.2): the maximum over an epoch's images of a random 3×3 convolution does not depend on
  their order; the mean squared difference of two epochs', over all pairs.
  """
  channels = images.shape[-1]
  kernel = jax.random.normal(jax.random.key(0), (3, 3, channels, _FEATURES), images.dtype) / jnp.sqrt(9.0 * channels)

  def features(epoch: jax.Array) -> jax.Array:
    found = jax.lax.conv_general_dilated(epoch, kernel, (1, 1), 'SAME', dimension_numbers=('NHWC', 'HWIO', 'NHWC'))
    return jnp.max(found, axis=0)

  of_epochs = jax.vmap(features)(images)
  pairs = jnp.square(of_epochs[:, None] - of_epochs[None])
  count = images.shape[0]
  return jnp.sum(jnp.mean(pairs, axis=(2, 3, 4))) / max(1, count * (count - 1))
