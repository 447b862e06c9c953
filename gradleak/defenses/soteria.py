"""Soteria (Sun et al., CVPR 2021): prunes the most revealing features of the last dense layer's input."""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import optax

from gradleak.core import errors, trees
from gradleak.core.settings import Choice, Fraction
from gradleak.core.trees import Tree
from gradleak.defenses.base import require_argument, require_batch
from gradleak.defenses.compression import largest
from gradleak.defenses.defense import Context, defense
from gradleak.models.masked import masked
from gradleak.models.model import Model, require

VARIANTS = ('paper', 'code', 'code_shifted')


@defense(
  place='step',
  citation='Sun et al.: Soteria: Provable Defense against Privacy Leakage in Federated Learning. CVPR 2021.',
  arguments=lambda context, settings: (context.client.model,),
  moves=True,
  sparsifies='zeros',
  gradients=lambda context, settings: _num_features(context),
  idle=lambda settings: settings['rate'] == 0,
)
def soteria(
  model: Model | None = None, *, rate: Fraction, variant: Annotated[str, Choice(VARIANTS)] = 'paper'
) -> optax.GradientTransformationExtraArgs:
  r"""Soteria, a defense of the step chain: zeroes the last dense kernel's gradient at ⌊rate·F⌋ features.

  r [F] is the input of the last dense layer and x the image. The paper prunes the features with the largest ‖r_i
  (∂r_i/∂x)⁻¹‖. The "inverse" of a vector is its pseudo-inverse, so this is |r_i| / ‖∂r_i/∂x‖₂. The published code
  prunes the smallest |‖∂r_i/∂x‖₂ / r_i|, the reciprocal: for one image the same features, except for

    dead units (r_i = 0 and ∂r_i/∂x = 0), where the score 0/0 counts as 0: 'paper' prunes them last, which has
      no effect since their gradient is zero; 'code' prunes them first.
    'code_shifted', which divides by r_i + 0.1, as the code for ConvNet does.

  A feature with r_i ≠ 0 and ∂r_i/∂x = 0 is pruned first by all variants. The scores of several images are summed with
  `weights=`, as in the code (in 'code' with their signs). Among equal scores the first are pruned: the count is exact.

  The representation is taken in eval mode, for any mode of the client's training. So there is no dropout, and BatchNorm
  has the running statistics of `variables=`. Without `variables=` it has those of a fresh network. An attacker may
  leave the kernel out (`defended_kernel` finds it) or read the pruned features from its zeros.

  Formula:
    \text{score}_i = \sum_{n=1}^{N} \frac{|r_i(x_n)|}{\lVert \partial r_i / \partial x_n \rVert_2}, \quad
    \frac{\partial \ell}{\partial W_i} \leftarrow 0 \text{ for the } \lfloor \text{rate} \cdot F \rfloor \text{ largest}

  Args:
    model: a `Model` that offers `features`.
    rate: the fraction of the features that are pruned; 0 is the identity.
    variant: 'paper', 'code' or 'code_shifted'.

  Its update needs `params` and `batch=`; it uses the parameters in `variables=` where that is given.

  Raises (update too):
    UsageError: for a model without features, a missing argument, or where the
      last layer's kernel cannot be identified.
  """
  features = None if model is None else require(model, 'features')

  def update(
    updates: Tree,
    state: optax.OptState,
    params: Tree = None,
    *,
    batch: tuple | None = None,
    weights: jax.Array | None = None,
    variables: Mapping | None = None,
    **extra: Any,
  ) -> tuple[Tree, optax.OptState]:
    del extra
    made_for = require_argument('soteria', 'model', model)
    samples, targets = require_batch('soteria', batch, params)
    weights = jnp.ones(samples.shape[:1], jnp.float32) if weights is None else weights
    variables = {'params': params} if variables is None else variables
    kept = _kept(features, variant, rate, variables, samples, weights)
    path = defended_kernel(made_for, updates, kept.size, targets.shape[-1], samples.shape[1:])

    def dropped(keys: tuple, u: jax.Array) -> jax.Array:
      if trees.path_names(keys) != path:
        return u
      # For a square kernel the shape is ambiguous: Flax's order, inputs first.
      mask = kept.reshape((-1, 1) if u.shape[0] == kept.size else (1, -1))
      return jnp.where(mask, u, jnp.zeros_like(u))

    return jax.tree_util.tree_map_with_path(dropped, updates), state

  return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def defended_kernel(
  model: Model, tree: Tree, num_features: int, num_classes: int, sample_shape: Any = None
) -> tuple[str, ...]:
  """Returns the path of the kernel that Soteria prunes: what an adaptive attacker leaves out.

  It is the one tensor of shape [num_features, num_classes] or [num_classes, num_features]. Among several it is the last
  in the forward order of `model.layers`, if the model offers that and `sample_shape` is given.

  Args:
    model: the `Model`.
    tree: its parameters, or anything shaped like them.
    num_features: length of its representation.
    num_classes: number of its logits.
    sample_shape: (H, W, C), or None.

  Raises:
    UsageError: if no tensor fits, or several do.
  """
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  fitting = [
    trees.path_names(keys) for keys, leaf in leaves if sorted(leaf.shape) == sorted((num_features, num_classes))
  ]
  if len(fitting) > 1 and model.layers is not None and sample_shape is not None:
    ordered = [path for layer in model.layers(sample_shape) for path in layer.paths if path in fitting]
    fitting = ordered[-1:] or fitting
  if len(fitting) != 1:
    found = ' and '.join('/'.join(path) for path in fitting) or 'none'
    raise errors.UsageError(
      f'soteria looks for the last dense kernel of the model {model.name!r}, one tensor of {num_features} features by '
      f'{num_classes} classes, and found {found}'
      + ('; give layers=… to gradleak.models.from_functions' if len(fitting) > 1 else '')
    )
  return fitting[0]


def _num_features(context: Context) -> int:
  """Returns F, of each of which there is a backward pass; 0 of a model that offers none."""
  features = context.client.model.features
  if features is None:
    return 0
  image = jax.ShapeDtypeStruct((1, *context.sample_shape), jnp.float32)
  return math.prod(jax.eval_shape(features, context.variables, image).shape)


@functools.partial(jax.jit, static_argnums=(0, 1))  # a loop outside of jit is compiled at each call
@masked(None)
def _kept(
  features: Callable, variant: str, rate: float, variables: Mapping, samples: jax.Array, weights: jax.Array
) -> jax.Array:
  """Returns the mask [F] of the features that are not pruned. It is piecewise constant, without derivatives."""
  variables, samples = jax.tree.map(
    lambda x: x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x,
    jax.lax.stop_gradient((variables, samples)),
  )
  representation, sensitivity = _sensitivity(functools.partial(features, variables), samples)
  weights = jax.lax.stop_gradient(weights).reshape(-1, 1)

  def summed(scores: jax.Array) -> jax.Array:
    return jnp.sum(jnp.where(weights > 0, weights * scores, jnp.zeros_like(scores)), axis=0)

  if variant == 'paper':
    order = -summed(_ratio(jnp.abs(representation), sensitivity))
  else:
    shift = jnp.float32(0.1 if variant == 'code_shifted' else 0.0)
    order = jnp.abs(summed(_ratio(sensitivity, representation + shift)))
  rank = jnp.argsort(jnp.argsort(order))  # distinct, so that ties do not change the count
  return largest(rank.astype(jnp.float32), rate)


def _sensitivity(features: Callable, samples: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Returns r [N, F] and ‖∂r_i/∂x‖₂ of each image [N, F], by one backward pass per feature; image after image."""
  together = 4 if jax.default_backend() == 'cpu' else 32  # features, of one image: on more, a CPU waits for memory

  def of_image(image: jax.Array) -> tuple[jax.Array, jax.Array]:
    representation, pull_back = jax.vjp(features, image[None])

    def norm(feature: jax.Array) -> jax.Array:
      (gradient,) = pull_back(jnp.zeros_like(representation).at[:, feature].set(1))
      return jnp.linalg.norm(gradient)

    each = jnp.arange(representation.shape[1], dtype=jnp.int32)
    return representation[0], jax.lax.map(norm, each, batch_size=together)

  return jax.lax.map(of_image, samples)


def _ratio(numerator: jax.Array, denominator: jax.Array) -> jax.Array:
  """Returns numerator / denominator with 0/0 = 0 and x/0 = ∞."""
  zero = denominator == 0
  at_zero = jnp.where(numerator == 0, jnp.zeros_like(numerator), jnp.full_like(numerator, jnp.inf))
  return jnp.where(zero, at_zero, numerator / jnp.where(zero, jnp.ones_like(denominator), denominator))
