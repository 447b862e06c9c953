"""PRECODE: a variational bottleneck in front of the classifier (Scheliga, Mäder & Seeland, WACV 2022)."""

import math
import zlib

import jax
import jax.numpy as jnp
from flax import linen as nn

from gradleak import errors, trees
from gradleak.models import layers
from gradleak.models.model import Model, require
from gradleak.trees import Layer

_NAME = 'precode'


def kl_bits(mean, std):
  """Returns KL(N(mean, std²) ‖ N(0, 1)) summed over the last axis, in bits as the published code counts it.

  Args:
    mean, std: float32 [N, size], std ≥ 0; one that has underflowed to 0 counts as the least normal float.
  """
  log_std = jnp.log(jnp.maximum(std, jnp.finfo(std.dtype).tiny))
  return 0.5 * jnp.sum(mean**2 + std**2 - 2 * log_std - 1, axis=-1) / math.log(2)


def encode(params, inputs):
  """Returns (mean, std), each [N, size], of the code of `inputs` [N, features]: a dense layer, std by softplus."""
  mean, std = jnp.split(_dense(params['encoder'], inputs), 2, axis=-1)
  return mean, jax.nn.softplus(std)


def _dense(params, inputs):
  return inputs @ params['kernel'] + params['bias'].reshape(1, -1)


def _init_dense(key, inputs, outputs):
  initialise = layers.initialiser('default')(inputs)
  kernel, bias = jax.random.split(key)
  return {'kernel': initialise(kernel, (inputs, outputs)), 'bias': initialise(bias, (outputs,))}


def precode(model, *, size: int = 256, beta: float = 1e-3):
  """Returns `model` with a variational bottleneck in front of its last dense layer.

  The features f of a sample become D(z), z = μ + σ·ε with ε ~ N(0, I), where (μ, σ) = E(f); encoder E
  (features -> 2·size) and decoder D (size -> features) are dense layers that start as PyTorch's do (U(±1/√fan_in)),
  whatever the model's own `init`. The loss of each example gains beta · KL(N(μ, σ²) ‖ N(0, I)) in bits.

  Like dropout, ε is drawn only where `apply` is given a `key`; without one z = μ. The attacker, who does not know ε,
  is meant to fail by it. But E is a dense layer with a bias, so that one sample's f can be read from its gradient in
  closed form, whatever ε was (Balunović et al. 2022; `gradleak.attacks.closed_form.first_dense_input`).

  Args:
    model: a `Model` by `from_flax` whose last layer is dense; of a user's own as well.
    size: the dimension of z; the published code's default is 256.
    beta: weight of the KL term, 1e-3 in the published code.

  Raises:
    UsageError: for a size below 1 or a negative beta; at `init`, for a model whose last layer is not dense.
  """
  errors.check_number('precode(size)', size, low=1, high=65_536, integer=True)
  errors.check_number('precode(beta)', beta, low=0, finite=True)

  def last_dense(image_shape):
    return require(model, 'layers')(image_shape)[-1].paths[0]

  def init(key, image_shape):
    variables = model.init(key, image_shape)
    params = variables['params']
    kernel = trees.get(params, last_dense(image_shape))
    if _NAME in params:
      raise errors.UsageError(f'the model {model.name!r} has a bottleneck already')
    if kernel.ndim != 2:
      raise errors.UsageError(f'precode stands in front of a dense layer, and {model.name!r} does not end in one')
    features = kernel.shape[0]
    encoder, decoder = jax.random.split(jax.random.fold_in(key, zlib.crc32(_NAME.encode())))
    bottleneck = {'encoder': _init_dense(encoder, features, 2 * size), 'decoder': _init_dense(decoder, size, features)}
    return {**variables, 'params': {**params, _NAME: bottleneck}}

  def run(variables, images, train, key):
    """Returns (logits, new batch_stats, (D(z) [N, features], KL in bits [N]))."""
    params = dict(variables['params'])
    bottleneck = params.pop(_NAME)
    path = last_dense(images.shape[1:])[:-1]
    passed = []

    def intercept(next_function, args, kwargs, context):
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
      logits, batch_stats = model.apply({**variables, 'params': params}, images, train, key)
    if len(passed) != 1:
      raise errors.UsageError(
        f'precode stands in front of the last dense layer of a Flax network; {model.name!r} calls '
        f'{"/".join(path)!r} {len(passed)} times'
      )
    return logits, batch_stats, passed[0]

  def apply(variables, images, train=False, key=None):
    return run(variables, images, train, key)[:2]

  def penalised(variables, images, train=False, key=None):
    logits, batch_stats, (_, kl) = run(variables, images, train, key)
    return logits, batch_stats, jnp.asarray(beta, kl.dtype) * kl

  def features(variables, images):
    return run(variables, images, False, None)[2][0]

  def all_layers(image_shape):
    *before, last = require(model, 'layers')(image_shape)
    own = [
      Layer(f'{_NAME}/{part}', tuple((_NAME, part, name) for name in ('kernel', 'bias')))
      for part in ('encoder', 'decoder')
    ]
    return (*before, *own, last)

  return Model(f'{model.name}+{_NAME}', init, apply, features, all_layers, penalised)
