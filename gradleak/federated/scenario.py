"""What is audited: a client with its model, weights and private samples."""

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from gradleak import data
from gradleak.core import errors, settings
from gradleak.core.trees import Tree
from gradleak.defenses.defense import Context
from gradleak.federated import Client, ClientSettings, heads
from gradleak.federated.targets import CLASSES, SAMPLES
from gradleak.modalities import IMAGES, Modality
from gradleak.models import Model
from gradleak.models.model import (
  check_apply,
  check_finite,
  check_model,
  check_parameters,
  check_variables,
  initial,
  outputs_shape,
)

_LOOKED_AT = 4000  # of the images that are given, for a gallery of at most 1,001 of a kind


class Scenario(NamedTuple):
  """A client, the global model it was sent, and the private samples it may train on.

  Attributes:
    client: how it trains and what it shares; its defenses are replaced by those audited.
    variables: the global model's.
    images: float32 [N, H, W, C] in [0, 1]; trial t audits the t-th batch of them.
    labels: what the client's loss takes: class indices, int32 [N], by default; else floats, see `losses.Loss.targets`.
    settings: what identifies all this in a result: plain JSON values.
    gallery: different images among which an original is to be found, private and public ones among them or not.
    public: (images, labels) that everyone holds, the attacker too, or None.
    previous: variables of the model that clients were sent before this one, or None.
  """

  client: Client
  variables: dict
  images: np.ndarray
  labels: np.ndarray
  settings: dict
  gallery: data.Candidates
  public: tuple | None = None
  previous: dict | None = None

  @property
  def classes(self) -> np.ndarray:
    """The class of each sample, int32 [N]; 0 where its target is no class."""
    return classes_of(self.labels, self.client)

  @property
  def context(self) -> Context:
    """What defenses are made for."""
    return Context(self.client, self.variables, self.images.shape[1:], self.public, self.previous)

  def trained(self, variables: Mapping, previous: Mapping | None = None) -> 'Scenario':
    """Returns the same with other weights of the model, and those that clients were sent before.

    Raises:
      UsageError: for variables of another model, or that are not finite.
    """
    shape = self.images.shape[1:]
    for one in (variables, *([] if previous is None else [previous])):
      check_variables(self.client.model, one, shape)
      check_finite(f'the weights of {self.client.model.name!r}', one)
    known = {name: value for name, value in self.settings.items() if name != 'previous_fingerprint'}
    return self._replace(
      variables=dict(variables),
      previous=None if previous is None else dict(previous),
      settings={**known, **_fingerprints(weights=variables, previous=previous)},
    )


def scenario(
  model: Model,
  images: Any,
  labels: Any,
  *,
  key: Any = None,
  variables: Mapping | None = None,
  num_classes: int | None = None,
  dataset: str = 'custom',
  client: ClientSettings | Client | None = None,
  public: tuple | None = None,
  previous: Mapping | None = None,
  gallery: Any = None,
  notes: Mapping[str, Any] | None = None,
  modality: Modality = IMAGES,
  **changes: Any,
) -> Scenario:
  """Returns the `Scenario` of a model and private samples.

  Where JAX has float64 enabled, weights and images are float64, and so is all that follows from them.

  Args:
    model: a `Model`; wrap a network of your own by `models.from_flax` or `models.from_functions`.
    images: floats [N, H, W, C] in [0, 1].
    labels: integers [N], or what else the loss takes: probabilities of classes [N, classes], flags [N, outputs] of 0
      and 1, values [N, outputs], or a class for each pixel [N, H, W].
    key: initialises the model, where no `variables` are given.
    variables: the model's weights, e.g. trained ones, {'params': …} and with BatchNorm {'batch_stats': …}.
    num_classes: the number of outputs; by default as many as the model returns.
    dataset: how results call the data.
    client: `ClientSettings`, or a `Client` of this model; settings may also be given one by one, as keyword arguments:
      loss, share, local_epochs, local_batch_size, learning_rate, momentum, weight_decay, batch_norm.
    public: (images, labels) that everyone holds, apart from the private ones: what GradDefense measures its risk on,
      and what an attacker may start from.
    previous: variables of the model that the clients were sent before this one (FFL's estimate of the global gradient).
    gallery: real images of the same kind, among which an original is to be found, private ones among them or not:
      floats [G, H, W, C] in [0, 1], 100 or better 1,001 of them; or (images, labels); or `gradleak.data.Candidates`,
      which may have several kinds. By default the images that are given here. The first 4,000 count, and public ones.
    modality: what a sample is, a `gradleak.modalities.Modality`; that of a `Client` where one is given.
    notes: anything else that should be recorded with the results, plain JSON values by name.

  Raises:
    UsageError: for images or labels that do not fit; for a model that does not take them, does not follow `batch_norm`,
      has one logit, or returns probabilities to a loss on logits; for variables of another model, or that are not
      finite; and for a setting that a client does not have.
  """
  check_model(model)
  kind = client.modality if isinstance(client, Client) else modality
  images, double = _checked_samples(kind, images), jax.config.jax_enable_x64
  image_shape = images.shape[1:]
  variables = _checked_variables(model, variables, key, image_shape)
  num_classes = _checked_classes(model, variables, image_shape, num_classes)
  client, recorded = _client(client, changes, model, num_classes, kind)
  check = functools.partial(client.targets, outputs=outputs_shape(model, variables, image_shape))
  images, labels = data.pair('the samples', (images, labels), check=kind.check, check_targets=check)
  heads.check_client(client, variables, image_shape)
  public = _checked_public(kind, public, image_shape, client, check)
  previous = _checked_previous(model, previous, image_shape)
  classes = classes_of(labels, client)
  given = _checked_gallery(kind, (images, classes) if gallery is None else gallery, image_shape, num_classes)
  known = None if public is None else (public[0], classes_of(public[1], client))
  found, composition = _candidates(kind, given, classes, known)
  described = {
    'dataset': errors.check_text('dataset', dataset),
    'model': errors.check_text('the name of the model', model.name),
    **errors.check_json('notes', {} if notes is None else notes),
    'num_classes': num_classes,
    'image_shape': list(image_shape),
    **recorded,
    **kind.describe(images),
    **({} if kind is IMAGES else {'modality': kind.name}),
    'batch_norm': client.batch_norm if variables.get('batch_stats') else 'none',
    **_fingerprints(data=(images, labels), weights=variables, public=public, previous=previous, gallery=found.images),
    **({'precision': 'float64'} if double else {}),
    'gallery': composition,
  }
  floating = np.float64 if double else np.float32
  images, labels = kind.cast(images, floating), client.loss.targets.kept(labels, floating)
  return Scenario(client, dict(variables), images, labels, described, found, public, previous)


def classes_of(labels: np.ndarray, client: Client) -> np.ndarray:
  """Returns the class of each sample, int32 [N]: the most probable one; 0 where its target is no class.

  Args:
    labels: as the loss takes them.
    client: the client.
  """
  labels = np.asarray(labels)
  if client.loss.targets not in (CLASSES, SAMPLES):
    return np.zeros(len(labels), np.int32)
  if np.issubdtype(labels.dtype, np.floating):
    labels = labels.argmax(axis=-1)
  return labels.astype(np.int32) if labels.ndim == 1 else np.zeros(len(labels), np.int32)


def _checked_samples(kind: Modality, images: Any) -> np.ndarray:
  """Returns samples as an array; raises `UsageError` for what are none."""
  try:
    kind.check(images)
  except errors.UsageError as error:
    raise errors.UsageError(f'the samples: {error}') from error
  return np.asarray(images)


def _checked_variables(model: Model, variables: Mapping | None, key: Any, image_shape: tuple[int, ...]) -> Mapping:
  """Returns the variables given, or initial ones; float64 where JAX has it enabled."""
  if variables is None:
    if key is None:
      raise errors.UsageError("give the model's variables=…, or a key=… to initialise them")
    variables = initial(model, errors.check_key('key', key, traced=False), image_shape)
  else:
    check_variables(model, variables, image_shape)
  check_finite(f'the weights of {model.name!r}', variables)
  if jax.config.jax_enable_x64:
    variables = optax.tree.cast(variables, np.float64)
  check_apply(model, variables, image_shape)
  check_parameters(model, variables)
  return variables


def _checked_classes(model: Model, variables: Mapping, image_shape: tuple[int, ...], num_classes: int | None) -> int:
  """Returns the number of classes, which is that of the model's logits."""
  returned = outputs_shape(model, variables, image_shape)[-1]
  if num_classes and num_classes != returned:
    if returned == 1:
      raise heads.one_logit(model.name)
    raise errors.UsageError(f'the model {model.name!r} has {returned} logits, the data {num_classes} classes')
  return returned


def _checked_previous(model: Model, previous: Mapping | None, image_shape: tuple[int, ...]) -> dict | None:
  if previous is None:
    return None
  check_finite('the weights of the previous model', previous)
  try:
    check_variables(model, previous, image_shape)
  except errors.UsageError as error:
    raise errors.UsageError(f'the previous model has other parameters than the current one: {error}') from error
  return dict(previous)


def _fingerprints(**trees: Tree) -> dict[str, str]:
  """Returns the fingerprint of each tree that there is."""
  return {f'{name}_fingerprint': fingerprint(tree) for name, tree in trees.items() if tree is not None}


def _client(
  client: ClientSettings | Client | None, changes: dict, model: Model, num_classes: int, kind: Modality
) -> tuple[Client, dict[str, Any]]:
  """Returns the undefended client, and what a result records of it."""
  if isinstance(client, Client):
    if changes:
      raise errors.UsageError(f'{", ".join(changes)}: a Client has settings of its own, give either')
    if client.model != model or client.num_classes != num_classes:
      raise errors.UsageError(
        f'the client trains {client.model.name!r} with {client.num_classes} classes, the scenario has {model.name!r} '
        f'with {num_classes}'
      )
    local = {'local_epochs': client.epochs, 'local_batch_size': client.batch_size}
    recorded = {'loss': str(client.loss), 'share': client.share, **(local if client.share == 'delta' else {})}
    return client.undefended(), recorded
  given = settings.replaced(ClientSettings() if client is None else client, 'gradleak.scenario', **changes)
  return dataclasses.replace(given.client(model, num_classes), modality=kind), given.recorded()


def _checked_public(
  kind: Modality, public: tuple | None, image_shape: tuple, client: Client, check: Callable
) -> tuple | None:
  """Returns public images and labels as they are kept."""
  if public is None:
    return None
  images, labels = data.pair('public', public, None, image_shape, kind.check, check)
  return kind.cast(images), client.loss.targets.kept(labels)


def _candidates(
  kind: Modality, given: data.Candidates, private: np.ndarray, public: tuple | None
) -> tuple[data.Candidates, dict]:
  """Returns the gallery, and what it is made of, plain JSON, see `report.wording.gallery`.

  It has as many different images of each kind as ranks are counted over, none of them flat.

  Args:
    kind: the modality.
    given: the images that are given for it; a label of −1 is unknown.
    private: the labels of the private images, which decide what kinds there are to be.
    public: (images, labels) that everyone holds, or None; they count, too.
  """
  images, labels = kind.cast(given.images), given.labels.astype(np.int32)
  seen: set[bytes] = set()
  if public is not None:
    images, labels = np.concatenate([images, public[0]]), np.concatenate([labels, public[1]])
    seen = {image.tobytes() for image in public[0]}
  wanted = np.unique(private)
  kinds = [np.flatnonzero(labels == label) for label in wanted] if given.by_class else [np.arange(len(labels))]
  chosen = np.concatenate([places[kind.distinct(images[places])] for places in kinds])
  flat = {one.tobytes() for places in kinds for one in images[places][kind.flat(images[places])]}
  other = {one.tobytes(): label for one, label in zip(images, labels, strict=True) if label not in wanted}
  composition = {
    'by_class': given.by_class,
    'images': _counted(given, labels[chosen]),
    'left_out': _counted(given, np.asarray(list(other.values()) if given.by_class else [], int)),
    'flat': len(flat),
    'public': sum(image.tobytes() in seen for image in images[chosen]),
  }
  return given._replace(images=images[chosen], labels=labels[chosen]), composition


def _counted(given: data.Candidates, labels: np.ndarray) -> dict[str, int]:
  """Returns {name of the class: its images}, 'unlabelled' for those whose class is not known."""
  found, counts = np.unique(labels, return_counts=True)
  return {
    'unlabelled' if label < 0 else given.named(int(label)): int(count)
    for label, count in zip(found, counts, strict=True)
  }


def _checked_gallery(kind: Modality, gallery: Any, image_shape: tuple, num_classes: int) -> data.Candidates:
  """Returns the gallery; images that are given alone are of one kind, and their classes are not known."""
  given = data.Candidates(*gallery) if type(gallery) is tuple and len(gallery) == 2 else gallery
  labelled = isinstance(given, data.Candidates)
  images = errors.host_array('gallery', given.images if labelled else given)
  labels = np.full(images.shape[:1], -1)
  if labelled:
    labels = errors.host_array('the labels of the gallery', given.labels)
  if images.shape[1:] != image_shape or not np.issubdtype(images.dtype, np.integer if kind.integral else np.floating):
    expected = f'{"integers" if kind.integral else "floats"} [G, {", ".join(map(str, image_shape))}]'
    raise errors.UsageError(f'the gallery is {images.dtype} of shape {images.shape}, expected {expected}')
  if images.size:
    try:
      kind.check(images)
    except errors.UsageError as error:
      raise errors.UsageError(f'the gallery: {error}') from error
  if labelled:
    if labels.shape != images.shape[:1] or not np.issubdtype(labels.dtype, np.integer):
      raise errors.UsageError(
        f'the labels of the gallery are {labels.dtype} of shape {labels.shape}, expected {len(images)} integers'
      )
    data.check_classes(labels, num_classes)
  return data.Candidates(images[:_LOOKED_AT], labels[:_LOOKED_AT], *(given[2:] if labelled else ()))


def fingerprint(tree: Tree) -> str:
  """Returns 16 hexadecimal digits of the SHA-256 of all arrays in a tree; raises `UsageError` for traced ones."""
  errors.refuse_traced('the scenario', tree)
  digest = hashlib.sha256()
  for leaf in jax.tree.leaves(tree):
    array = np.ascontiguousarray(leaf)
    digest.update(f'{array.dtype}{array.shape}'.encode())
    digest.update(array.tobytes())
  return digest.hexdigest()[:16]
