"""PRECODE: a variational bottleneck before the classifier (Scheliga, Mäder & Seeland, WACV 2022)."""

import math
import zlib
from collections.abc import Callable
from typing import Annotated, Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from gradleak.core import errors, trees
from gradleak.core.reuse import reusable
from gradleak.core.settings import NonNegative, Range, ranged
from gradleak.core.trees import Layer, Tree
from gradleak.models import layers
from gradleak.models.model import ImageShape, Model, require

_NAME, BETA = 'precode', 1e-3
CITATION = 'Scheliga, Mäder, Seeland: PRECODE – A Generic Model Extension to Prevent Deep Gradient Leakage. WACV 2022.'


def kl_bits(mean: jax.Array, std: jax.Array) -> jax.Array:
  """Returns KL(N(mean, std²) ‖ N(0, 1)) summed over the last axis, in bits, as in the published code.

  Args:
    mean, std: float32 [N, size], std ≥ 0; the logarithm is of at least the smallest normal float.
  """
  log_std = jnp.log(jnp.maximum(std, jnp.finfo(std.dtype).tiny))
  return 0.5 * jnp.sum(mean**2 + std**2 - 2 * log_std - 1, axis=-1) / math.log(2)


def encode(params: Tree, inputs: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Returns (mean, std), each [N, size], of the code of `inputs` [N, features]: a dense layer, softplus for std."""
  mean, std = jnp.split(_dense(params['encoder'], inputs), 2, axis=-1)
  return mean, jax.nn.softplus(std)


def _dense(params: Tree, inputs: jax.Array) -> jax.Array:
  return inputs @ params['kernel'] + params['bias'].reshape(1, -1)


def _init_dense(key: jax.Array, inputs: int, outputs: int) -> dict[str, jax.Array]:
  initialise = layers.initialiser('default')(inputs)
  kernel, bias = jax.random.split(key)
  return {'kernel': initialise(kernel, (inputs, outputs)), 'bias': initialise(bias, (outputs,))}


@ranged
@reusable(128)
def precode(model: Model, *, size: Annotated[int, Range(1, 65_536)] = 256, beta: NonNegative = BETA) -> Model:
  r"""Returns `model` with a variational bottleneck before its last dense layer.

  The features f of a sample become D(z), z = μ + σ·ε with ε ~ N(0, I), where (μ, σ) = E(f). Encoder E
  (features -> 2·size) and decoder D (size -> features) are dense layers with PyTorch's initialisation (U(±1/√fan_in)),
  independent of the model's `init`. The loss of each example gains beta · KL(N(μ, σ²) ‖ N(0, I)) in bits.

  Like dropout, ε is drawn only if `apply` is given a `key`; without one z = μ. The attacker does not know ε, which is
  meant to make gradient matching fail. But E is a dense layer with a bias. So f of a single sample can be computed from
  its gradient in closed form, for any ε (Balunović et al. 2022; `gradleak.attacks.dense.first_dense_input`).

  Formula:
    z = \mu + \sigma \odot \varepsilon, \; (\mu, \sigma) = E(f), \quad L + \text{beta} \cdot
    \text{KL}(\mathcal{N}(\mu, \sigma^2) \,\Vert\, \mathcal{N}(0, I))

  Args:
    model: a `Model` made by `from_flax` whose last layer is dense.
    size: the dimension of z; the published code's default is 256.
    beta: weight of the KL term, 1e-3 in the published code.

  Raises:
    UsageError: for a model of tokens; at `init`, for one whose last layer is not dense.
  """
  if model.takes_ids:
    raise errors.UsageError(f'precode takes a network of images or rows, and {model.name!r} takes tokens')

  def last_dense(sample_shape: ImageShape) -> tuple[str, ...]:
    return require(model, 'layers')(sample_shape)[-1].paths[0]

  def init(key: jax.Array, sample_shape: ImageShape) -> Tree:
    variables = model.init(key, sample_shape)
    params = variables['params']
    kernel = trees.get(params, last_dense(sample_shape))
    if _NAME in params:
      raise errors.UsageError(f'the model {model.name!r} has a bottleneck already')
    if kernel.ndim != 2:
      raise errors.UsageError(
        f'precode needs a model that ends in a dense layer, and {model.name!r} does not end in one'
      )
    features = kernel.shape[0]
    encoder, decoder = jax.random.split(jax.random.fold_in(key, zlib.crc32(_NAME.encode())))
    bottleneck = {'encoder': _init_dense(encoder, features, 2 * size), 'decoder': _init_dense(decoder, size, features)}
    return {**variables, 'params': {**params, _NAME: bottleneck}}

  def run(variables: Tree, samples: jax.Array, train: bool, key: jax.Array | None) -> tuple[jax.Array, Tree, tuple]:
    return _run(model, last_dense(samples.shape[1:])[:-1], variables, samples, train, key)

  def apply(
    variables: Tree, samples: jax.Array, train: bool = False, key: jax.Array | None = None
  ) -> tuple[jax.Array, Tree]:
    return run(variables, samples, train, key)[:2]

  def penalised(
    variables: Tree, samples: jax.Array, train: bool = False, key: jax.Array | None = None
  ) -> tuple[jax.Array, Tree, jax.Array]:
    logits, batch_stats, (_, kl) = run(variables, samples, train, key)
    return logits, batch_stats, jnp.asarray(beta, kl.dtype) * kl

  def features(variables: Tree, samples: jax.Array) -> jax.Array:
    return run(variables, samples, False, None)[2][0]

  def all_layers(sample_shape: ImageShape) -> tuple[Layer, ...]:
    *before, last = require(model, 'layers')(sample_shape)
    own = [
      Layer(f'{_NAME}/{part}', tuple((_NAME, part, name) for name in ('kernel', 'bias')))
      for part in ('encoder', 'decoder')
    ]
    return (*before, *own, last)

  return model._replace(
    name=f'{model.name}+{_NAME}',
    init=init,
    apply=apply,
    features=features,
    layers=all_layers,
    penalised=penalised,
    citations=(*model.citations, CITATION),
    layout=None,  # the bottleneck has no tensors of PyTorch
  ).built_in(model.named and beta == BETA)  # the size is seen in the weights


def _run(
  model: Model, path: tuple[str, ...], variables: Tree, samples: jax.Array, train: bool, key: jax.Array | None
) -> tuple[jax.Array, Tree, tuple[jax.Array, jax.Array]]:
  """Applies a model with a bottleneck before its dense layer at `path`.

  Returns:
    (logits, new batch_stats, (D(z) [N, features], KL in bits [N])).
  """
  params = dict(variables['params'])
  bottleneck = params.pop(_NAME)
  passed = []

  def intercept(next_function: Callable, args: tuple, kwargs: dict, context: Any) -> Any:
    if context.module.path != path or context.method_name != '__call__':
      return next_function(*args, **kwargs)
    (inputs,) = (*args, *kwargs.values())
    mean, std = encode(bottleneck, inputs)
    code = mean
    if key is not None:
      code += std * jax.random.normal(jax.random.fold_in(key, zlib.crc32(_NAME.encode())), mean.shape, mean.dtype)
    decoded = _dense(bottleneck['decoder'], code)
    passed.append((decoded, kl_bits(mean, std)))
    return next_function(decoded)

  with nn.intercept_methods(intercept):
    logits, batch_stats = model.apply({**variables, 'params': params}, samples, train, key)
  if len(passed) != 1:
    raise errors.UsageError(
      f'precode needs a Flax network that calls its last dense layer once; {model.name!r} calls '
      f'{"/".join(path)!r} {len(passed)} times'
    )
  return logits, batch_stats, passed[0]
