"""What a model is to an attack or a defense: a NamedTuple of pure functions."""

import inspect
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from gradleak import errors
from gradleak.trees import Layer


class Model(NamedTuple):
  """A network as pure functions. Images are float32 [N, H, W, C] in [0, 1]; normalisation belongs to the model.

  Attributes:
    name: how results call it.
    init: (key, image_shape) -> variables, a dict with 'params' and, with BatchNorm, 'batch_stats'. image_shape is
      (H, W, C).
    apply: (variables, images, train, key) -> (logits [N, classes], new batch_stats). `train` has BatchNorm use the
      batch's statistics; dropout is on only where a `key` is given, so that nobody has it silently.
    features: (variables, images) -> the input of the last dense layer [N, features], or None if unknown.
    layers: image_shape -> the layers in forward order, a tuple of `Layer`, or None if unknown.
    penalised: as `apply`, with a third output: what the model itself adds to the loss of each example [N]. None where
      it adds nothing.
  """

  name: str
  init: Callable
  apply: Callable
  features: Callable | None = None
  layers: Callable | None = None
  penalised: Callable | None = None


def per_example_loss(model, loss, variables, images, labels, train=False, key=None):
  """Returns (loss of each example [N], with what the model adds to it, new batch_stats).

  Args:
    model: a `Model`.
    loss: (logits, label probabilities) -> loss per example.
    variables, images, train, key: as `Model.apply` takes them.
    labels: probabilities [N, classes].
  """
  if model.penalised is None:
    logits, batch_stats = model.apply(variables, images, train, key)
    return loss(logits, labels), batch_stats
  logits, batch_stats, penalty = model.penalised(variables, images, train, key)
  return loss(logits, labels) + penalty, batch_stats


def require(model, what):
  """Returns the model's function `what` ('features' or 'layers'), or raises `UsageError` naming what lacks."""
  function = getattr(model, what)
  if function is None:
    raise errors.UsageError(
      f'the model {model.name!r} does not offer {what!r}, which this method needs: '
      f'give {what}=… to gradleak.models.from_functions'
    )
  return function


def from_flax(module, name=None, *, mean=None, std=None):
  """Returns the `Model` of a Flax Linen module.

  Args:
    module: a Linen module called as `module(images)` or `module(images, train=…)`.
    name: how results call it; the class name by default.
    mean, std: optional per-channel normalisation of the images in [0, 1], sequences of C floats.

  Layers are found by calling the module once on shapes alone: every submodule that owns a parameter of two or more
  dimensions starts a layer, and those with vectors only (norms) belong to the layer before.
  """
  parameters = inspect.signature(module.__call__).parameters
  takes_train = 'train' in parameters

  def normalise(images):
    if mean is None:
      return images
    centre, scale = (jnp.asarray(values, images.dtype).reshape(1, 1, 1, -1) for values in (mean, std))
    return (images - centre) / scale

  def call(variables, images, train, key, watch=None):
    def intercept(next_function, args, kwargs, context):
      if key is None and isinstance(context.module, nn.Dropout):
        return args[0] if args else kwargs['inputs']
      if watch is not None and context.method_name == '__call__':
        watch(context.module, args)
      return next_function(*args, **kwargs)

    options = {'train': train} if takes_train else {}
    rngs = {} if key is None else {'dropout': key}
    with nn.intercept_methods(intercept):
      return module.apply(variables, normalise(images), rngs=rngs, mutable=['batch_stats'], **options)

  def init(key, image_shape):
    images = jnp.zeros((1, *image_shape), jnp.float32)
    options = {'train': False} if takes_train else {}
    return dict(module.init(key, normalise(images), **options))

  def apply(variables, images, train=False, key=None):
    logits, changed = call(variables, images, train, key)
    return logits, changed.get('batch_stats', variables.get('batch_stats', {}))

  def modules_called(image_shape):
    """Paths of the modules that own parameters, in forward order, with their parameter names and dimensions."""
    found = {}

    def watch(called, args):
      del args
      own = called.variables.get('params', {})
      own = {key: value for key, value in own.items() if hasattr(value, 'ndim')}
      if own:
        found.setdefault(called.path, {key: value.ndim for key, value in own.items()})

    def trace(key):
      variables = init(key, image_shape)
      return call(variables, jnp.zeros((1, *image_shape), jnp.float32), False, None, watch)

    jax.eval_shape(trace, jax.random.key(0))
    return found

  def layers(image_shape):
    grouped = []
    for path, own in modules_called(image_shape).items():
      names = sorted(own, key=lambda parameter: (-own[parameter], parameter))
      paths = tuple((*path, parameter) for parameter in names)
      if max(own.values()) > 1 or not grouped:
        grouped.append(['/'.join(path) or 'root', paths])
      else:
        grouped[-1][1] += paths
    return tuple(Layer(*layer) for layer in grouped)

  def features(variables, images):
    inputs = []

    def watch(called, args):
      own = called.variables.get('params', {})
      kernel = own.get('kernel')
      if args and getattr(kernel, 'ndim', 0) == 2 and args[0].ndim == 2:
        inputs.append(args[0])

    call(variables, images, False, None, watch)
    if not inputs:
      raise errors.UsageError(f'the model {name or type(module).__name__!r} has no dense layer to take features from')
    return inputs[-1]

  return Model(name or type(module).__name__.lower(), init, apply, features, layers)


def from_functions(init, apply, name='custom', *, features=None, layers=None):
  """Returns the `Model` of plain functions (plain JAX, Haiku, Equinox or NNX through split and merge).

  Args:
    init: (key, image_shape) -> params, any pytree.
    apply: (params, images) -> logits [N, classes].
    name: how results call it.
    features: optional, (params, images) -> the input of the last dense layer.
    layers: optional sequence of `gradleak.trees.Layer` in forward order.
  """

  def init_variables(key, image_shape):
    return {'params': init(key, image_shape)}

  def apply_variables(variables, images, train=False, key=None):
    del train, key
    return apply(variables['params'], images), {}

  features_of = None if features is None else lambda variables, images: features(variables['params'], images)
  layers_of = None if layers is None else lambda image_shape: tuple(layers)
  return Model(name, init_variables, apply_variables, features_of, layers_of)
