"""What is audited: a client with its model, weights and private samples."""

import hashlib
from typing import NamedTuple

import jax
import numpy as np

from gradleak import data, errors
from gradleak.federated import LOSSES, Client
from gradleak.models import Model


class Scenario(NamedTuple):
  """A client, the global model it was sent, and the private samples it may train on.

  Attributes:
    client: how it trains and what it shares; its defenses are replaced by those audited.
    variables: the global model's.
    images: float32 [N, H, W, C] in [0, 1]; trial t audits the t-th batch of them.
    labels: int32 [N].
    settings: what identifies all this in a result: plain JSON values.
    public: (images, labels) that everyone holds, the attacker too, or None.
    previous: variables of the model that clients were sent before this one, or None.
  """

  client: Client
  variables: dict
  images: np.ndarray
  labels: np.ndarray
  settings: dict
  public: tuple | None = None
  previous: dict | None = None


def scenario(
  model,
  images,
  labels,
  *,
  key=None,
  variables=None,
  num_classes=None,
  dataset='custom',
  loss='cross_entropy',
  share='gradient',
  local_epochs=1,
  local_batch_size=None,
  learning_rate=0.1,
  batch_norm='train',
  public=None,
  previous=None,
  **settings,
):
  """Returns the `Scenario` of a model and private samples.

  Where JAX has float64 enabled, weights and images are float64, and so is all that follows from them.

  Args:
    model: a `Model`; wrap a network of your own by `models.from_flax` or `models.from_functions`.
    images: floats [N, H, W, C] in [0, 1].
    labels: integers [N].
    key: initialises the model, where no `variables` are given.
    variables: the model's weights, e.g. trained ones.
    num_classes: the number of logits; by default as many as the model returns.
    dataset: how results call the data.
    loss: 'cross_entropy' or 'squared_error'.
    share: 'gradient' (one step on the batch) or 'delta' (local SGD).
    local_epochs, local_batch_size, learning_rate: local SGD of 'delta' clients.
    batch_norm: 'train' or 'eval', see `Client`.
    public: (images, labels) that everyone holds, apart from the private ones: what GradDefense measures its risk on,
      and what an attacker may start from.
    previous: variables of the model that the clients were sent before this one (FFL's estimate of the global gradient).
    **settings: anything else that should be recorded with the results.

  Raises:
    UsageError: for images or labels that do not fit, or a model that does not take them.
  """
  import optax

  if not isinstance(model, Model):
    raise errors.UsageError(
      f'the model is a {type(model).__name__}, expected a gradleak Model: wrap it by '
      'gradleak.models.from_flax or from_functions'
    )
  if loss not in LOSSES:
    raise errors.unknown('loss', loss, LOSSES)
  errors.check_number('learning_rate', learning_rate, low=1e-12, finite=True)
  images, labels = np.asarray(images), np.asarray(labels)
  data.validate(images, labels, num_classes)
  image_shape, double = images.shape[1:], jax.config.jax_enable_x64
  if variables is None:
    if key is None:
      raise errors.UsageError("give the model's variables=…, or a key=… to initialise them")
    variables = model.init(key, image_shape)
  if double:
    variables = optax.tree.cast(variables, np.float64)
  logits = jax.eval_shape(lambda v: model.apply(v, images[:1].astype(np.float32), False, None)[0], variables)
  if logits.ndim != 2 or logits.shape[0] != 1:
    raise errors.UsageError(f'the model {model.name!r} returns {logits.shape} for one image, expected [1, classes]')
  num_classes = num_classes or logits.shape[1]
  if logits.shape[1] != num_classes:
    raise errors.UsageError(f'the model {model.name!r} has {logits.shape[1]} logits, the data {num_classes} classes')
  data.validate(images, labels, num_classes)
  if public is not None:
    public = np.asarray(public[0], np.float32), np.asarray(public[1], np.int32)
    data.validate(*public, num_classes)
    if public[0].shape[1:] != image_shape:
      raise errors.UsageError(f'public images are {public[0].shape[1:]}, the private ones {image_shape}')
  if previous is not None and jax.tree.structure(previous) != jax.tree.structure(variables):
    raise errors.UsageError('the previous model has other parameters than the current one')
  client = Client(
    model,
    num_classes,
    LOSSES[loss],
    share,
    optax.sgd(learning_rate),
    epochs=local_epochs,
    batch_size=local_batch_size,
    batch_norm=batch_norm,
  )
  local = {'local_epochs': local_epochs, 'local_batch_size': local_batch_size, 'learning_rate': learning_rate}
  return Scenario(
    client,
    variables,
    images.astype(np.float64 if double else np.float32),
    labels.astype(np.int32),
    {
      'dataset': dataset,
      'model': model.name,
      **settings,
      'num_classes': num_classes,
      'image_shape': list(image_shape),
      'loss': loss,
      'share': share,
      **(local if share == 'delta' else {}),
      'batch_norm': batch_norm if variables.get('batch_stats') else 'none',
      'data_fingerprint': fingerprint((images, labels)),
      'weights_fingerprint': fingerprint(variables),
      **({'precision': 'float64'} if double else {}),
      **({} if public is None else {'public_fingerprint': fingerprint(public)}),
      **({} if previous is None else {'previous_fingerprint': fingerprint(previous)}),
    },
    public,
    previous,
  )


def fingerprint(tree):
  """Returns 16 hexadecimal digits of the SHA-256 of all arrays in a tree."""
  digest = hashlib.sha256()
  for leaf in jax.tree.leaves(tree):
    array = np.ascontiguousarray(leaf)
    digest.update(f'{array.dtype}{array.shape}'.encode())
    digest.update(array.tobytes())
  return digest.hexdigest()[:16]
