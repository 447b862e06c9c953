"""What is audited: a client with its model, weights and private samples."""

import collections
import dataclasses
import functools
import hashlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from gradleak import data
from gradleak.core import errors, settings, trees
from gradleak.core.trees import Tree
from gradleak.defenses.defense import Context
from gradleak.federated import Client, ClientSettings, heads
from gradleak.federated.augmentation import AUGMENTATIONS
from gradleak.federated.behaviour import FUNCTIONS, behaviour
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

_LOOKED_AT = 4000  # of the samples that are given, for a gallery of at most 1,001 of a kind


class Scenario(NamedTuple):
  """A client, the global model it was sent, and the private samples it may train on.

  Attributes:
    client: how it trains and what it shares; its defenses are replaced by those audited.
    variables: the global model's.
    samples: [N, …]; trial t audits the t-th batch of them.
    targets: what the client's loss takes: class indices, int32 [N], by default; else floats, see `losses.Loss.targets`.
    settings: what identifies all this in a result: plain JSON values.
    gallery: different samples among which an original is to be found, private and public ones among them or not.
    public: (samples, targets) that everyone holds, the attacker too, or None.
    previous: variables of the model that clients were sent before this one, or None.
    local: the `ClientSettings` that describe the client; None where a `Client` was given.
    drawn: whether the weights were drawn, and nobody has trained them.
    shared: how many others have the same sample and label, int [N]: who finds such a sample does not know whose it is.
      Labels count where all are known and part of the loss. None for nobody.
    alike: how many others have the same sample, whatever its label, int [N]: for who does not know labels, or None.
  """

  client: Client
  variables: dict
  samples: np.ndarray
  targets: np.ndarray
  settings: dict
  gallery: data.Candidates
  public: tuple | None = None
  previous: dict | None = None
  local: ClientSettings | None = None
  drawn: bool = False
  shared: np.ndarray | None = None
  alike: np.ndarray | None = None

  @property
  def classes(self) -> np.ndarray:
    """The class of each sample, int32 [N]; 0 where its target is no class."""
    return classes_of(self.targets, self.client)

  @property
  def one_class(self) -> bool:
    """Whether the target of each sample is one class, or probabilities of classes: not a class for each position."""
    floating = np.issubdtype(self.targets.dtype, np.floating)
    return self.client.loss.targets is CLASSES and self.targets.ndim == 1 + floating

  @property
  def context(self) -> Context:
    """What defenses are made for."""
    return Context(self.client, self.variables, self.samples.shape[1:], self.public, self.previous)

  def trained(self, variables: Mapping, previous: Mapping | None = None) -> 'Scenario':
    """Returns the same with other weights of the model, and those that clients were sent before.

    Raises:
      UsageError: for variables of another model, or that are not finite.
    """
    model, shape = self.client.model, self.samples.shape[1:]
    check_variables(model, variables, shape)
    variables = trees.arrays(variables)
    check_finite(f'the weights of {model.name!r}', variables)
    before = _checked_previous(model, previous, shape)
    known = {name: value for name, value in self.settings.items() if name != 'previous_fingerprint'}
    told = _fingerprints(weights=variables, previous=before)
    return self._replace(variables=dict(variables), previous=before, settings={**known, **told}, drawn=False)

  def noted(self, notes: Mapping[str, Any]) -> 'Scenario':
    """Returns the same, with more that is recorded with results, plain JSON by name, such as {'seed': 0}.

    Raises:
      UsageError: for what is no JSON, or no mapping.
    """
    return self._replace(settings={**self.settings, **errors.check_json('notes', notes)})

  def of(self, places: slice, local: ClientSettings) -> 'Scenario':
    """Returns the same with some of its samples, and with a client of other settings; the gallery stays.

    Raises:
      UsageError: for settings that do not fit the model or the targets.
    """
    shape, samples, targets = self.samples.shape[1:], self.samples[places], self.targets[places]
    made = local.client(self.client.model, self.client.num_classes)
    client = dataclasses.replace(made, modality=self.client.modality)
    client.targets(targets, len(samples), outputs=outputs_shape(client.model, self.variables, shape))
    heads.check_client(client, self.variables, shape)
    own = {field.name for field in dataclasses.fields(local)}
    known = {name: value for name, value in self.settings.items() if name not in own}
    described = {**local.recorded(), **_batch_norm(client, self.variables), **_fingerprints(data=(samples, targets))}
    shared, alike = (None if each is None else each[places] for each in (self.shared, self.alike))
    changed = self._replace(client=client, samples=samples, targets=targets, local=local, shared=shared, alike=alike)
    return changed._replace(settings={**known, **described})._with_behaviour()

  def _with_behaviour(self) -> 'Scenario':
    """Returns the same, whose settings have the fingerprints of functions that nothing else describes."""
    told = behaviour(self.client, self.variables, self.samples, self.targets, self.local is not None)
    known = {name: value for name, value in self.settings.items() if name not in FUNCTIONS}
    return self._replace(settings={**known, **told})

  def check_steps(self, num_samples: int) -> None:
    """Raises `UsageError` where local training on so many samples takes no step, for want of batches to accumulate."""
    if self.local is None or self.local.accumulate == 1:
      return
    needed, batches = self.local.accumulate, self.client.num_steps(num_samples)
    if batches < needed:
      raise errors.UsageError(
        f'accumulate is {needed}, and local training on {num_samples} {self.client.modality.noun[num_samples > 1]} has '
        f'{batches} batch{"es" * (batches > 1)}: no step is taken, and the delta is zero'
      )

  def described_by(self, what: str) -> ClientSettings:
    """Returns the `ClientSettings`; raises `UsageError` where a `Client` was given, naming what needs them."""
    if self.local is None:
      raise errors.UsageError(
        f'{what} needs a scenario whose client is described by ClientSettings, and this one was given a Client'
      )
    return self.local


def scenario(
  model: Model,
  samples: Any,
  targets: Any,
  *,
  key: Any = None,
  variables: Mapping | None = None,
  dataset: str = 'custom',
  client: ClientSettings | Client | None = None,
  public: tuple | None = None,
  gallery: Any = None,
  modality: Modality = IMAGES,
  **changes: Any,
) -> Scenario:
  """Returns the `Scenario` of a model and private samples.

  What else is to be recorded with results is added by `Scenario.noted`, and the weights that clients were sent before
  these by `Scenario.trained`.

  Where JAX has float64 enabled, weights and samples are float64, and so is all that follows from them.

  Args:
    model: a `Model`; wrap a network of your own by `models.from_flax` or `models.from_functions`.
    samples: [N, …] as the modality takes them: images are floats [N, H, W, C] in [0, 1].
    targets: integers [N], or what else the loss takes: probabilities of classes [N, classes], flags [N, outputs] of 0
      and 1, values [N, outputs], or a class for each pixel [N, H, W].
    key: initialises the model, where no `variables` are given.
    variables: the model's weights, e.g. trained ones, {'params': …} and with BatchNorm {'batch_stats': …}.
    dataset: how results call the data.
    client: `ClientSettings`, or a `Client` of this model; settings may also be given one by one, as keyword arguments:
      loss, share, local_epochs, local_batch_size, learning_rate, momentum, weight_decay, batch_norm.
    public: (samples, targets) that everyone holds, apart from the private ones: what GradDefense measures its risk on,
      and what an attacker may start from.
    gallery: real samples of the same kind, among which an original is to be found, private ones among them or not:
      floats [G, H, W, C] in [0, 1], 100 or better 1,001 of them; or (samples, targets); or `gradleak.data.Candidates`,
      which may have several kinds. By default the samples that are given here. The first 4,000 count, and public ones.
    modality: what a sample is, a `gradleak.modalities.Modality`; that of a `Client` where one is given.

  Raises:
    UsageError: for samples or targets that do not fit; for a model that does not take them, does not follow
      `batch_norm`, has one logit, or returns probabilities to a loss on logits; for variables of another model, or that
      are not finite; for a setting that a client does not have; and for a `Client` with defenses.
  """
  check_model(model)
  kind = client.modality if isinstance(client, Client) else modality
  samples, double = _checked_samples(kind, samples), jax.config.jax_enable_x64
  sample_shape = samples.shape[1:]
  drawn = variables is None
  variables = _checked_variables(model, variables, key, sample_shape)
  outputs = outputs_shape(model, variables, sample_shape)
  num_classes = outputs[-1]
  client, recorded, local = _client(client, changes, model, num_classes, kind)
  check = functools.partial(client.targets, outputs=outputs)
  samples, targets = data.pair('the samples', (samples, targets), check=kind.check, check_targets=check)
  _check_head(client, variables, samples, outputs)
  public = _checked_public(kind, public, sample_shape, client, check)
  classes = classes_of(targets, client)
  given = _checked_gallery(kind, (samples, classes) if gallery is None else gallery, sample_shape, num_classes)
  known = None if public is None else (public[0], classes_of(public[1], client))
  kept, composition = _candidates(kind, given, classes, known)
  shared, alike = _shared((kind.cast(samples), classes), given._replace(samples=kind.cast(given.samples)), client)
  if shared.any():
    composition['shared'] = int(np.count_nonzero(shared))
  described = {
    'dataset': errors.check_text('dataset', dataset),
    'model': errors.check_text('the name of the model', model.name),
    'num_classes': num_classes,
    'image_shape': list(sample_shape),
    **recorded,
    **kind.recorded(samples),
    **_batch_norm(client, variables),
    **_fingerprints(data=(samples, targets), weights=variables, public=public, gallery=kept.samples),
    **({'precision': 'float64'} if double else {}),
    'gallery': composition,
  }
  floating = np.float64 if double else np.float32
  samples, targets = kind.cast(samples, floating), client.loss.targets.kept(targets, floating)
  return Scenario(
    client, dict(variables), samples, targets, described, kept, public, None, local, drawn, shared, alike
  )._with_behaviour()


def _batch_norm(client: Client, variables: Mapping) -> dict[str, str]:
  return {'batch_norm': client.batch_norm if variables.get('batch_stats') else 'none'}


def classes_of(targets: np.ndarray, client: Client) -> np.ndarray:
  """Returns the class of each sample, int32 [N]: the most probable one; 0 where its target is no class.

  Args:
    targets: as the loss takes them.
    client: the client.
  """
  targets = np.asarray(targets)
  if client.loss.targets not in (CLASSES, SAMPLES):
    return np.zeros(len(targets), np.int32)
  if np.issubdtype(targets.dtype, np.floating):
    targets = targets.argmax(axis=-1)
  return targets.astype(np.int32) if targets.ndim == 1 else np.zeros(len(targets), np.int32)


def _checked_samples(kind: Modality, samples: Any) -> np.ndarray:
  """Returns samples as an array; raises `UsageError` for what are none."""
  try:
    kind.check(samples)
  except errors.UsageError as error:
    raise errors.UsageError(f'the samples: {error}') from error
  return np.asarray(samples)


def _check_head(client: Client, variables: Mapping, samples: np.ndarray, outputs: tuple[int, ...]) -> None:
  """Raises `UsageError` for outputs that do not suit the loss, and for tokens that the model does not know."""
  model, kind = client.model, client.modality
  kind.check_model(model)
  if model.vocabulary is not None and samples.max() >= model.vocabulary:
    raise errors.UsageError(
      f'the {kind.noun[1]} have the token {samples.max()}, and {model.name!r} embeds {model.vocabulary}: it is of '
      'another tokeniser'
    )
  if client.loss.own:
    targets = jax.eval_shape(lambda tokens: client.loss.of_samples(tokens, kind, model.vocabulary)[1], samples[:1])
    made = targets.shape[1:]
    if made != outputs:
      raise errors.UsageError(
        f'{client.loss} predicts one of {made[-1]} tokens at {made[0]} places, and {model.name!r} has outputs of shape '
        f'{outputs}: it is of another tokeniser or length, or has another head'
      )
  heads.check_client(client, variables, samples.shape[1:])


def _checked_variables(model: Model, variables: Mapping | None, key: Any, sample_shape: tuple[int, ...]) -> Mapping:
  """Returns the variables given, or initial ones; float64 where JAX has it enabled."""
  if variables is None:
    if key is None:
      raise errors.UsageError("give the model's variables=…, or a key=… to initialise them")
    variables = initial(model, errors.check_key('key', key, traced=False), sample_shape)
  else:
    check_variables(model, variables, sample_shape)
    variables = trees.arrays(variables)
  check_finite(f'the weights of {model.name!r}', variables)
  if jax.config.jax_enable_x64:
    variables = optax.tree.cast(variables, np.float64)
  check_apply(model, variables, sample_shape)
  check_parameters(model, variables)
  return variables


def _checked_previous(model: Model, previous: Mapping | None, sample_shape: tuple[int, ...]) -> dict | None:
  if previous is None:
    return None
  check_finite('the weights of the previous model', previous)
  try:
    check_variables(model, previous, sample_shape)
  except errors.UsageError as error:
    raise errors.UsageError(f'the previous model has other parameters than the current one: {error}') from error
  return dict(trees.arrays(previous))


def _fingerprints(**trees: Tree) -> dict[str, str]:
  """Returns the fingerprint of each tree that there is."""
  return {f'{name}_fingerprint': fingerprint(tree) for name, tree in trees.items() if tree is not None}


def _client(
  client: ClientSettings | Client | None, changes: dict, model: Model, num_classes: int, kind: Modality
) -> tuple[Client, dict[str, Any], ClientSettings | None]:
  """Returns the undefended client, what a result records of it, and the settings that describe it, if any do."""
  if isinstance(client, Client):
    if changes:
      raise errors.UsageError(f'{", ".join(changes)}: a Client has settings of its own, give either')
    if client.model != model or client.num_classes != num_classes:
      raise errors.UsageError(
        f'the client trains {client.model.name!r} with {client.num_classes} classes, the scenario has {model.name!r} '
        f'with {num_classes}'
      )
    bare = client.undefended()
    own = {name: getattr(client, name) for name in ('step', 'upload', 'transform')}
    defended = [name for name, given in own.items() if given != getattr(bare, name) and getattr(given, 'stages', True)]
    if defended:
      raise errors.UsageError(
        f'the client has a defense of its own ({", ".join(defended)}), and the client of a scenario has none: give it '
        'as a defense of the audit, with gradleak.defenses.wrap(…, place=…) where it is no Defense'
      )
    return bare, _recorded(client), None
  given = settings.replaced(ClientSettings() if client is None else client, 'gradleak.scenario', **changes)
  return dataclasses.replace(given.client(model, num_classes), modality=kind), given.recorded(), given


def _recorded(client: Client) -> dict[str, Any]:
  """Returns what a result records of a `Client`, plain JSON, named as `ClientSettings`; of rarer fields what is set."""
  names = {function: name for name, function in AUGMENTATIONS.items()}

  def rare(one: Client) -> dict[str, Any]:
    trained = {
      'sample_order': 'shuffled' if one.shuffled else 'fixed',
      'order': None if one.order is None else [list(epoch) for epoch in one.order],
      'last_batch': 'dropped' if one.drop_last else 'kept',
      'remat': one.remat,
    }
    return {
      'augment': names.get(one.augment, 'own'),
      'precision': one.precision,
      'frozen': list(one.frozen),
      'private': list(one.private),
      'cohort': one.cohort,
      **(trained if client.share == 'delta' else {}),
    }

  usual = rare(Client(client.model, client.num_classes, client.loss))
  local = {'local_epochs': client.epochs, 'local_batch_size': client.batch_size} if client.share == 'delta' else {}
  found = {name: value for name, value in rare(client).items() if value != usual[name]}
  return {'loss': str(client.loss), 'share': client.share, **local, **found}


def _checked_public(
  kind: Modality, public: tuple | None, sample_shape: tuple, client: Client, check: Callable
) -> tuple | None:
  """Returns public samples and targets as they are kept."""
  if public is None:
    return None
  samples, targets = data.pair('public', public, None, sample_shape, kind.check, check, kind.noun)
  return kind.cast(samples), client.loss.targets.kept(targets)


def _candidates(
  kind: Modality, given: data.Candidates, private: np.ndarray, public: tuple | None
) -> tuple[data.Candidates, dict]:
  """Returns the gallery, and what it is made of, plain JSON, see `report.wording.gallery`.

  It has as many different samples of each kind as ranks are counted over, none of them flat.

  Args:
    kind: the modality.
    given: the samples that are given for it; a label of −1 is unknown.
    private: the labels of the private samples, which decide what kinds there are to be.
    public: (samples, targets) that everyone holds, or None; they count, too.
  """
  samples, targets = kind.cast(given.samples), given.targets.astype(np.int32)
  seen: set[bytes] = set()
  if public is not None:
    samples, targets = np.concatenate([samples, public[0]]), np.concatenate([targets, public[1]])
    seen = {image.tobytes() for image in public[0]}
  wanted = np.unique(private)
  kinds = [np.flatnonzero(targets == label) for label in wanted] if given.by_class else [np.arange(len(targets))]
  chosen = np.concatenate([places[kind.distinct(samples[places])] for places in kinds])
  flat = {one.tobytes() for places in kinds for one in samples[places][kind.flat(samples[places])]}
  other = {one.tobytes(): label for one, label in zip(samples, targets, strict=True) if label not in wanted}
  composition = {
    'by_class': given.by_class,
    'images': _counted(given, targets[chosen]),
    'left_out': _counted(given, np.asarray(list(other.values()) if given.by_class else [], int)),
    'flat': len(flat),
    'public': sum(image.tobytes() in seen for image in samples[chosen]),
  }
  return given._replace(samples=samples[chosen], targets=targets[chosen]), composition


def _shared(
  private: tuple[np.ndarray, np.ndarray], listed: data.Candidates, client: Client
) -> tuple[np.ndarray, np.ndarray]:
  """Returns how many others of a list have each private sample, int [N]: with its label, if that counts; and at all.

  Private samples that repeat each other beside one in the list may be several uploads of one person.
  """
  labelled = bool(np.all(listed.targets >= 0)) and (listed.by_class or not client.loss.own)

  def names(samples: np.ndarray, labels: np.ndarray, labelled: bool) -> Iterator[tuple]:
    return ((sample.tobytes(), int(label) * labelled) for sample, label in zip(samples, labels, strict=True))

  def counted(labelled: bool) -> np.ndarray:
    own = list(names(*private, labelled))
    asked = set(own)
    counts = collections.Counter(one for one in names(*listed[:2], labelled) if one in asked)
    return np.asarray([max(0, counts[one] - 1) for one in own])

  return counted(labelled), counted(False)


def _counted(given: data.Candidates, targets: np.ndarray) -> dict[str, int]:
  """Returns {name of the class: its samples}, 'unlabelled' for those whose class is not known."""
  found, counts = np.unique(targets, return_counts=True)
  return {
    'unlabelled' if label < 0 else given.named(int(label)): int(count)
    for label, count in zip(found, counts, strict=True)
  }


def _checked_gallery(kind: Modality, gallery: Any, sample_shape: tuple, num_classes: int) -> data.Candidates:
  """Returns the gallery; samples that are given alone are of one kind, and their classes are not known."""
  given = data.Candidates(*gallery) if type(gallery) is tuple and len(gallery) == 2 else gallery
  labelled = isinstance(given, data.Candidates)
  samples = errors.host_array('gallery', given.samples if labelled else given)
  targets = np.full(samples.shape[:1], -1)
  if labelled:
    targets = errors.host_array('the labels of the gallery', given.targets)
  if samples.shape[1:] != sample_shape or not np.issubdtype(
    samples.dtype, np.integer if kind.integral else np.floating
  ):
    expected = f'{"integers" if kind.integral else "floats"} [G, {", ".join(map(str, sample_shape))}]'
    raise errors.UsageError(f'the gallery is {samples.dtype} of shape {samples.shape}, expected {expected}')
  if samples.size:
    try:
      kind.check(samples)
    except errors.UsageError as error:
      raise errors.UsageError(f'the gallery: {error}') from error
  if labelled:
    if targets.shape != samples.shape[:1] or not np.issubdtype(targets.dtype, np.integer):
      raise errors.UsageError(
        f'the labels of the gallery are {targets.dtype} of shape {targets.shape}, expected {len(samples)} integers'
      )
    data.check_classes(targets, num_classes, kind.noun[0])
  return data.Candidates(samples[:_LOOKED_AT], targets[:_LOOKED_AT], *(given[2:] if labelled else ()))


def fingerprint(tree: Tree) -> str:
  """Returns 16 hexadecimal digits of the SHA-256 of all arrays in a tree; raises `UsageError` for traced ones."""
  errors.refuse_traced('the scenario', tree)
  digest = hashlib.sha256()
  for leaf in jax.tree.leaves(tree):
    array = np.ascontiguousarray(leaf)
    digest.update(f'{array.dtype}{array.shape}'.encode())
    digest.update(array.tobytes())
  return digest.hexdigest()[:16]
