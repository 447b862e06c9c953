"""APRIL: reads the image from the gradient of a vision transformer's position embedding, by one linear system.

Each token is `E_p = x_p W + b + pos_p`, so that `∂ℓ/∂pos_p = ∂ℓ/∂E_p = δ_p` for a single sample. So the gradient of the
position embedding is the gradient that arrives at every token. Lu et al. (APRIL: Finding the Achilles' Heel on Privacy
for Vision Transformers, CVPR 2022) use it to solve for the input of the first attention. They take the gradients of its
queries, keys and values. This needs a network in which neither LayerNorm nor a residual stands between embedding and
attention. In networks with LayerNorm first, as all of ours, the same leak is read one layer earlier. The embedding's
gradient is

  ∂ℓ/∂W = Σ_p x_pᵀ δ_p = Xᵀ Δ,

with all δ_p known, so that Xᵀ = ∂ℓ/∂W · Δ⁺, the patches themselves. This is exact where the rows of Δ are linearly
independent, which needs at least as many features per token as patches. For a deficient Δ the solution of least norm is
returned. A factor cancels: the delta of one plain step on one sample does as well.
"""

import jax
import jax.numpy as jnp

from gradleak.attacks import base
from gradleak.attacks.dense import Entry, probed
from gradleak.core import errors, trees
from gradleak.core.reuse import reusable
from gradleak.core.settings import Fraction
from gradleak.core.trees import Tree
from gradleak.federated import Client
from gradleak.models.model import Model, require
from gradleak.threat import Observation

_POSITION = 'pos_embed'  # timm's name
_DETERMINED = 1e-4  # least singular value of Δ over the largest, from which rounding leaves the values of patches
CITATION = (
  "Lu, Zhang, Zhao, He, Cheng: APRIL: Finding the Achilles' Heel on Privacy for Vision Transformers. CVPR 2022."
)


def patches_of(kernel_gradient: jax.Array, position_gradient: jax.Array, rcond: float | jax.Array = 1e-6) -> jax.Array:
  """Returns the patches [P, in] of a single sample.

  Args:
    kernel_gradient: of the dense layer on each patch, [in, width].
    position_gradient: of the position embedding's rows that belong to patches, [P, width].
    rcond: singular values of the second below this fraction of the largest are taken for zero.
  """
  exact = jax.lax.Precision.HIGHEST
  left, values, right = jnp.linalg.svd(position_gradient, full_matrices=False)  # Δ = U S Vᵀ
  kept = (values > jnp.asarray(rcond, values.dtype) * values[0]) & (values > 0)
  inverse = jnp.where(kept, 1 / jnp.where(kept, values, jnp.ones_like(values)), jnp.zeros_like(values))
  projected = jnp.matmul(kernel_gradient, right.T, precision=exact) * inverse.reshape(1, -1)
  return jnp.matmul(left, projected.T, precision=exact)


def embedding(client: Client, observation: Observation) -> tuple[tuple[str, ...], tuple[str, ...], int]:
  """Returns (path of the kernel of the dense layer on patches, path of the position embedding, side of a patch).

  Raises:
    UsageError: for a network without position embedding, or whose first layer is not dense on square patches.
  """
  errors.check_image_batch('the attack april', observation.batch_shape)
  _, height, width, channels = observation.batch_shape
  layers = require(client.model, 'layers')(observation.batch_shape[1:])
  position = next((path for layer in layers for path in layer.paths if path[-1] == _POSITION), None)
  if position is None:
    raise errors.UsageError(
      f'the attack april reads the gradient of a position embedding, and {client.model.name} has no parameter '
      f'{_POSITION}: take a vision transformer, such as vit_tiny'
    )
  kernel = next(path for layer in layers for path in layer.paths if trees.get(observation.update, path).ndim == 2)
  size, features = trees.get(observation.update, kernel).shape
  tokens, across = trees.get(observation.update, position).shape[-2:]
  side = round((size / channels) ** 0.5)
  patches = (height // side) * (width // side) if side else 0
  if side * side * channels != size or height % side or width % side or features != across or tokens < patches:
    raise errors.UsageError(
      'the attack april reads a dense layer on square patches and an embedding of the position of each, and the first '
      f'layer of {client.model.name} takes {size} values to {features} features, beside {tokens} positions of {across}'
    )
  return kernel, position, side


@base.attack(citation=CITATION)
def april(client: Client, *, rcond: Fraction = 1e-6) -> base.Attack:
  r"""APRIL's leak (Lu et al. 2022) on vision transformers with LayerNorm first: the patches, in closed form.

  The attack reads one sample. For a batch, or for several local steps, Δ is the mean over samples and steps, and the
  returned image is a mixture of theirs. It returns no labels. Where the model normalises its pixels, or holds such a
  normalisation, what the embedding sees is scaled back: x σ + μ.

  Formula:
    \frac{\partial \ell}{\partial W} = X^\top \Delta, \quad \Delta = \frac{\partial \ell}{\partial \text{pos}}, \quad
    X^\top = \frac{\partial \ell}{\partial W} \Delta^+

  Args:
    client: the `Client` whose model is attacked.
    rcond: singular values of the position embedding's gradient below this fraction of the largest are taken for zero:
      larger under noise.

  Raises:
    UsageError: when run, for a network without position embedding, whose first layer is not dense on square patches,
      or whose patches are in another order than that of rows, columns and channels; for a client that shares no
      position embedding or first layer.
  """

  def read(observation: Observation) -> tuple[jax.Array, None]:
    kernel, position, side = embedding(client, observation)
    shape = observation.batch_shape[1:]
    found = _image(observation.update, shape, kernel, position, side, rcond)
    entry = _entry(client.model, shape, kernel, position, side)
    if not entry.in_order:
      raise errors.UsageError(
        f'the model {client.model.name!r} does not pass its patches on value by value, patches and the pixels of each '
        'in the order of rows, columns and channels: what this attack reads would be taken for other pixels'
      )
    if entry.normalised is not None:
      mean, std = (jnp.asarray(values, found.dtype).reshape(found.shape) for values in entry.normalised)
      found = jnp.where(found.any(), found * std + mean, found)  # zeros are no answer, and the mean would be one
    return found, None

  def check(observation: Observation) -> None:
    base.require_sent('april', client, observation, embedding(client, observation)[:2])

  return base.closed_form(read, check=check)


def _image(
  update: Tree,
  shape: tuple[int, ...],
  kernel: tuple[str, ...],
  position: tuple[str, ...],
  side: int,
  rcond: float | jax.Array,
) -> jax.Array:
  """Returns what entered the embedding [1, H, W, C], its patches in their places."""
  height, width, channels = shape
  rows, columns = height // side, width // side
  behind = _behind(update, position, rows * columns)
  found = patches_of(trees.get(update, kernel), behind, rcond).reshape(rows, columns, side, side, channels)
  return found.transpose(0, 2, 1, 3, 4).reshape(1, *shape)


def _behind(update: Tree, position: tuple[str, ...], patches: int) -> jax.Array:
  """Returns the gradient of the rows of the position embedding that belong to patches, [P, width]."""
  positions = trees.get(update, position)
  return positions.reshape(-1, positions.shape[-1])[-patches:]  # the class token stands first


@reusable(32)
def _entry(
  model: Model, shape: tuple[int, ...], kernel: tuple[str, ...], position: tuple[str, ...], side: int
) -> Entry:
  """Returns what a network passes on to its embedding, see `dense.probed`; its word where Δ does not determine it."""
  patches = (shape[0] // side) * (shape[1] // side)

  def read(gradient: Tree) -> jax.Array:
    behind = _behind(gradient, position, patches)
    values = jnp.linalg.svd(behind, compute_uv=False)
    determined = (values[-1] > _DETERMINED * values[0]) & (patches <= behind.shape[1])
    found = _image(gradient, shape, kernel, position, side, 1e-6)
    return jnp.where(determined, found, jnp.zeros_like(found))

  return probed(model, shape, read)
