"""Fidel on convolutional networks: features that neurons give away, decoded (Enthoven & Al-Ars 2021, figure 7)."""

from collections.abc import Mapping
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np

from gradleak.attacks import base
from gradleak.attacks import decoder as decoders
from gradleak.attacks.dense import check_sees_once, first_dense_layer
from gradleak.attacks.fidel import CITATION, partial_reconstructions
from gradleak.core import errors, trees
from gradleak.core.settings import Choice, Range
from gradleak.core.trees import Tree
from gradleak.federated import Client
from gradleak.models import Model, flattening
from gradleak.models.model import ImageShape, require
from gradleak.threat import Observation


def _made(settings: Mapping[str, Any], sample_shape: ImageShape) -> decoders.Decoder:
  chosen, steps = settings['decoder'], settings['steps']
  return decoders.REGISTRY[chosen](sample_shape, **({'steps': steps} if steps else {}))


def _check(model: Model, sample_shape: ImageShape, params: Tree) -> None:
  """Raises `UsageError` if no convolution stands before the first dense layer, or its input cannot be read."""
  layers = require(model, 'layers')(sample_shape)
  kernel, bias = first_dense_layer(layers, params)
  if kernel in layers[0].paths:
    raise errors.UsageError(
      'no convolution stands before the first dense layer: the attack fidel reads such a network without a decoder'
    )
  check_sees_once(model, sample_shape, kernel, bias)


def _maps(model: Model, variables: Tree, sample_shape: ImageShape, inputs: jax.Array) -> jax.Array:
  """Returns inputs of the first dense layer, [M, in], as the maps [M, h, w, channels] that were flattened.

  Raises:
    UsageError: if they are no maps of one layer, or the order in which the network flattens them is not known.
  """
  kernel, _ = first_dense_layer(require(model, 'layers')(sample_shape), variables['params'])
  unknown = flattening.Order(0, None, 'its product with a value of the network is not found')
  order = flattening.orders(model, variables, sample_shape).get(kernel, unknown)
  problem = order.problem or ('they are no maps of one layer' if order.maps is None else '')
  if problem:
    raise errors.UsageError(
      f'the decoder takes maps, and the order in which {model.name!r} flattens them is not known: {problem}'
    )
  if order.places is not None:
    inputs = inputs[:, np.argsort(order.places)]  # channels first, as a network has them that flattens so
  *sides, channels = order.maps  # type: ignore[misc]
  return inputs.reshape(len(inputs), channels, *sides).transpose(0, 2, 3, 1)


def _learned(key: jax.Array, scenario: Any, settings: Mapping[str, Any], batch_size: int) -> Tree:
  """Returns the weights of the decoder, trained on the features of the public images."""
  del batch_size
  model, variables = scenario.client.model, scenario.variables
  images = jnp.asarray(scenario.public[0])
  shape = images.shape[1:]
  _check(model, shape, variables['params'])  # raises before anything is computed
  inputs = jax.jit(lambda images: decoders.dense_inputs(model, variables, images))(images)
  return _made(settings, shape).fit(key, _maps(model, variables, shape, inputs), images)


@base.attack(citation=CITATION, prepare=_learned)
def fidel_decoder(
  client: Client, *, decoder: Annotated[str, Choice(decoders.REGISTRY)] = 'windows', steps: Annotated[int, Range(0)] = 0
) -> base.Attack:
  r"""Fidel on a network with convolutions before its first dense layer: one decoded image per neuron.

  The decoder is trained once, on the public images of the scenario, at the weights that the client received. Neurons
  with the largest bias gradient come first. A neuron without features, as one that was not sent, gives a black image.
  It returns no labels.

  Formula:
    \hat{x}_j = D(\Delta W_j / \Delta b_j) \text{ for each neuron } j

  Args:
    client: the `Client` whose model is attacked.
    decoder: 'windows' (ours), or the paper's 'table_iii' or 'table_iv', see `gradleak.attacks.decoder`.
    steps: of the decoder's training; 0 for its own number.

  Raises:
    UsageError: when run, for a model without convolutions before its first dense layer, a client that does not share
      this layer, features that the decoder cannot take or whose order is not known, or a scenario without public
      images.
  """
  settings = {'decoder': decoder, 'steps': steps}

  def check(observation: Observation) -> None:
    shape = observation.batch_shape[1:]
    _check(client.model, shape, observation.update)
    paths = first_dense_layer(require(client.model, 'layers')(shape), observation.update)
    base.require_sent('fidel_decoder', client, observation, paths)

  def read(observation: Observation) -> tuple[jax.Array, None]:
    shape = observation.batch_shape[1:]
    found = first_dense_layer(require(client.model, 'layers')(shape), observation.update)
    kernel, shares = (trees.get(observation.update, path) for path in found)
    inputs, alive = partial_reconstructions(kernel, shares)
    order = jnp.lexsort((-jnp.abs(shares), ~alive))
    features = _maps(client.model, observation.variables, shape, inputs[order])
    images = _made(settings, shape).decode(observation.prepared, features)
    told = inputs[order].any(axis=1).reshape(-1, 1, 1, 1)  # features of zero say nothing, and decode to an image
    return jnp.where(told, images, jnp.zeros_like(images)), None

  return base.closed_form(read, check=check, auxiliary_data=True)
