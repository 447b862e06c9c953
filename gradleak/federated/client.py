"""A client: local training on private samples, and what it uploads.

The victim and the attacker's simulation of it run the same code; they differ only in the fields of `Client`.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gradleak.core import errors, trees
from gradleak.core.methods import accepted
from gradleak.core.promotion import promoting
from gradleak.core.settings import Choice, Count, Range, check_fields
from gradleak.core.trees import Tree
from gradleak.federated import heads
from gradleak.federated.augmentation import AUGMENTATIONS
from gradleak.federated.losses import Loss, as_loss, cross_entropy
from gradleak.modalities import IMAGES, Modality
from gradleak.models import Model, mixing
from gradleak.models.masked import masked
from gradleak.models.model import check_mode, check_model, check_variables, has_init, per_example_loss

PRECISIONS = ('float32', 'bfloat16')
_MANY_STEPS = 16  # of local training, beyond which the attacker recomputes them
COSTLY = 10  # `extra_gradients` from which on its uploads take long

NO_DEFENSE = optax.identity()  # one object, so that clients without a defense are equal
DEFAULT_OPTIMIZER = optax.sgd(0.1)  # likewise


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Upload:
  """What a client sends.

  Attributes:
    update: the gradient, or the delta θ_T − θ_0, a tree shaped like the parameters.
    mask: boolean masks, a tree of the same structure; a scalar where a whole tensor is sent or dropped.
    num_samples: number of private samples behind it, an int32 scalar.
  """

  update: Tree
  mask: Tree
  num_samples: jax.Array


@dataclasses.dataclass(frozen=True)
class Client:
  """How a client trains and what it uploads.

  The step chain receives gradient and parameters, and these extra arguments. `key=` is a key, `batch=` holds samples
  and targets as probabilities, and `weights=` those of the examples (0 for padding). `variables=` holds the current
  parameters and batch statistics. `position=` has the number of the epoch and of the batch in it, both from 1 on.

  Attributes:
    model: the network.
    num_classes: number of outputs: of classes, or what else the loss compares.
    loss: a `losses.Loss`, to which the model may add its own (`Model.penalised`); or a function (logits, label
      probabilities) -> loss per example, see `losses.wrap`.
    share: 'gradient' (FedSGD: the gradient of one step on all samples) or 'delta' (FedAvg: θ_T − θ_0).
    optimizer: the local optimizer of 'delta' clients, any optax transformation; plain SGD of rate 0.1 by default.
    step: the defense on the gradient of each local step, before the local optimizer.
    upload: the defense on the update before it is sent.
    transform: the defense on the samples, (key, samples, targets as probabilities) -> those to train on instead; None
      for none. One that mixes samples also takes `weights=`, those of `participate`.
    epochs: passes over the samples, in their order.
    batch_size: samples per local step; None takes all. A smaller last batch is averaged over what it holds.
    drop_last: whether a smaller last batch is left out of each epoch instead.
    batch_norm: 'train' (batch statistics, as real clients do) or 'eval' (running ones, as older attacks assumed).
    remat: recompute local steps in the attacker's backward pass, in blocks of about √T of T steps, so that memory grows
      with √T; None for from 16 steps on.
    augment: (key, samples) -> samples, applied to each local batch of a client that has a key; None for none.
    shuffled: whether each epoch takes the samples in a new order; in their own where there is no key.
    order: the order of the samples in each epoch, a permutation for each; None where `shuffled` tells it.
    precision: dtype of the forward and backward pass, 'float32' or 'bfloat16'; parameters and updates keep their own.
    frozen: what is neither trained nor shared: modules in the parameters, by their paths ('block/conv', as PyTorch's
      'block.conv') or by a name that all of them have; or layers, by names that are no modules'. A norm that follows a
      module is not in it.
    private: likewise, of those that are trained and not shared (FedBN, FedPer). Whoever simulates the client takes
      their weights from `variables`, too: an attacker is granted them.
    cohort: clients whose mean update the server sees (secure aggregation); each has an equal part of the samples.
    extra_gradients: how many gradients its defenses compute of each sample, beside its own.
    modality: what a sample is.
  """

  model: Model
  num_classes: Count
  loss: Loss = dataclasses.field(default_factory=cross_entropy)
  share: Annotated[str, Choice(('gradient', 'delta'))] = 'gradient'
  optimizer: optax.GradientTransformation = DEFAULT_OPTIMIZER
  step: optax.GradientTransformation = NO_DEFENSE
  upload: optax.GradientTransformation = NO_DEFENSE
  transform: Callable[..., tuple[jax.Array, jax.Array]] | None = None
  epochs: Count = 1
  batch_size: Annotated[int | None, Range(1)] = None
  drop_last: bool = False
  batch_norm: Annotated[str, Choice(('train', 'eval'))] = 'train'
  remat: bool | None = None
  augment: Callable[[jax.Array, jax.Array], jax.Array] | None = None
  shuffled: bool = False
  order: tuple[tuple[int, ...], ...] | None = None
  precision: Annotated[str, Choice(PRECISIONS)] = 'float32'
  frozen: tuple[str, ...] = ()
  private: tuple[str, ...] = ()
  cohort: Count = 1
  extra_gradients: Annotated[int, Range(0)] = 0
  modality: Modality = IMAGES

  def __post_init__(self) -> None:
    check_model(self.model)
    check_fields(self)
    for name in ('optimizer', 'step', 'upload'):
      errors.check_instance(name, getattr(self, name), optax.GradientTransformation, 'an optax transformation')
    object.__setattr__(self, 'loss', as_loss(self.loss))
    if self.num_classes == 1 and self.loss.activation == 'softmax':
      raise heads.one_logit(self.model.name)
    of_images = [name for name, one in AUGMENTATIONS.items() if one is not None and one is self.augment]
    if of_images and self.modality.axes != IMAGES.axes:
      raise errors.UsageError(
        f'augment is {of_images[0]!r}, which moves pixels, and {self.modality.noun[1]} have none: leave it at none'
      )
    if self.transform is not None:
      errors.check_function('transform', self.transform, 3)
    if self.order is not None:
      object.__setattr__(self, 'order', _checked_order(self.order, self.shuffled, self.epochs))
    both = set(self.frozen) & set(self.private)
    if both:
      raise errors.UsageError(f'the layer {min(both)} is frozen and private: what is not trained is not private')
    if self.share == 'gradient' and self.epochs != 1:
      raise errors.UsageError(
        f"a client that shares its gradient takes one step, got epochs={self.epochs}; share='delta' takes several"
      )

  def targets(self, targets: Any, count: int, outputs: tuple[int, ...] | None = None, dtype: Any = float) -> jax.Array:
    """Returns targets as the floats that the loss compares outputs with.

    Args:
      targets: as the loss takes them.
      count: number of samples.
      outputs: shape of what the model returns for one sample; None where it is not known.
      dtype: of what is made of whole numbers.

    Raises:
      UsageError: for labels that the loss does not take, or of another shape than the outputs.
    """
    kind = self.loss.targets
    targets = kind.checked(targets, count, self.num_classes, self.modality.noun[0])
    found = kind.encode(targets, self.num_classes, jnp.result_type(dtype))
    if outputs is not None and not self.loss.own:
      kind.check_shape(targets, outputs)
    return found

  def num_steps(self, num_samples: int) -> int:
    """Returns the number of local steps on `num_samples` samples; raises `UsageError` for none of them."""
    num_samples = int(errors.check_number('number of samples', num_samples, low=1, integer=True))
    if num_samples % self.cohort:
      raise errors.UsageError(f'{num_samples} samples cannot be divided evenly among {self.cohort} clients')
    num_samples //= self.cohort
    size = self.batch_size or num_samples
    if self.drop_last and num_samples < size:
      raise errors.UsageError(f'{num_samples} samples do not fill one batch of {size}, and the last batch is dropped')
    return self.epochs * (num_samples // size if self.drop_last else -(-num_samples // size))

  def undefended(self) -> 'Client':
    """Returns the same client without its defenses: what a non-adaptive attacker simulates."""
    return dataclasses.replace(self, step=NO_DEFENSE, upload=NO_DEFENSE, transform=None, extra_gradients=0)

  def of_one_gradient(self) -> 'Client':
    """Returns the undefended client of one step: its update is the gradient of what it is given."""
    return dataclasses.replace(self.undefended(), share='gradient', epochs=1, batch_size=None, order=None, cohort=1)

  @property
  def network(self) -> Model:
    """The model, whose pass is in `precision`."""
    return _in_precision(self.model, self.precision)

  @property
  def sends_gradient(self) -> bool:
    """Whether the upload is the plain gradient of all samples, without defenses."""
    plain = self.step is NO_DEFENSE and self.upload is NO_DEFENSE and self.transform is None
    return self.share == 'gradient' and plain and self.cohort == 1

  def gradient(self, variables: Mapping, samples: jax.Array, targets: jax.Array) -> Tree:
    """Returns the gradient of the mean loss of samples, without dropout and defenses; arguments as `local_update`'s."""
    plain = self.undefended()
    samples, targets = plain.transformed(None, samples, targets)
    weights = jnp.ones(samples.shape[:1], targets.dtype)
    return plain._defended_gradient(None, variables, plain._init_step(variables), samples, targets, weights)[0]

  def local_update(self, key: jax.Array | None, variables: Mapping, samples: jax.Array, targets: jax.Array) -> Upload:
    """Trains on the samples and returns the `Upload`. Pure; `variables` are not changed.

    Args:
      key: drives dropout and the defenses' noise; None switches dropout off (and random defenses raise).
      variables: the global model's.
      samples: [N, …] as the modality takes them; floats of the precision of the variables.
      targets: what the loss takes: class indices, integer [N], or probabilities, float32 [N, classes], by default.

    Raises:
      UsageError: for anything else, variables of another model, and what `participate` refuses.
    """
    return self.participate(key, variables, samples, targets)[0]

  def participate(
    self,
    key: jax.Array | None,
    variables: Mapping,
    samples: jax.Array,
    targets: jax.Array,
    weights: jax.Array | None = None,
    state: Any = None,
  ) -> tuple[Upload, Any, Tree]:
    """Trains like `local_update` in one of many rounds; returns (`Upload`, state, new batch statistics).

    Args:
      key, variables, samples, targets: see `local_update`.
      weights: of the examples, 1 or, for padding, 0, float32 [N]; None means no padding. A batch of only padding is no
        step. BatchNorm of Flax Linen and of PyTorch leaves padding out of its statistics; a network of one's own asks
        `models.masked.counted`.
      state: the upload chain's state after this client's last participation; None at its first.

    Raises:
      UsageError: if the arguments do not fit the model or each other, a shared gradient would take several steps, the
        network does not follow `batch_norm`, or it mixes the samples of a batch, and padding would count.
    """
    key = None if key is None else errors.check_key('key', key)
    samples, targets = self._samples(samples, targets)
    if has_init(self.model, self._shape(samples)):  # a model made by hand may have none
      check_variables(self.model, variables, self._shape(samples))
    check_mode(self.model, variables, self._shape(samples), self.batch_norm)
    if self.cohort > 1:
      return self._together(key, variables, samples, targets, weights, state)
    samples, targets = self.transformed(key, samples, targets, weights)
    padded = weights is not None
    if weights is not None:
      self._check_padding(variables, samples, targets, weights)
      count = jnp.sum(weights).astype(jnp.int32)
    else:
      count, weights = jnp.asarray(samples.shape[0], jnp.int32), jnp.ones(samples.shape[:1], targets.dtype)
    steps = self.num_steps(samples.shape[0])
    if self.share == 'gradient':
      if steps != 1:
        raise errors.UsageError(
          f'a gradient is shared after one step, but {samples.shape[0]} samples in batches of '
          f'{self.batch_size} make {steps}'
        )
      update, batch_stats, step_state = self._defended_gradient(
        key, variables, self._init_step(variables), samples, targets, weights, filled=padded
      )
      passed = _joint_mask(step_state, update)
    else:
      update, batch_stats, passed = self._train(key, variables, samples, targets, weights, steps, padded)
    upload, state = self._send(key, variables['params'], update, passed, state, samples, targets, count)
    return upload, state, batch_stats

  def in_turn(
    self, keys: jax.Array, variables: Mapping, samples: jax.Array, targets: jax.Array, each: Mapping | None = None
  ) -> Upload:
    """Returns the `Upload`s of its first rounds, [R, …]; a program of many rounds is no larger than of two.

    Args:
      keys: of the rounds, [R].
      variables, samples, targets: see `local_update`; they are the same in each round.
      each: collections of the variables that differ between rounds, leaves [R, …].

    Raises:
      UsageError: as `participate` does.
    """

    def participate(state: Any, own: tuple[jax.Array, Mapping]) -> tuple[Any, Upload]:
      key, differing = own
      upload, state, _ = self.participate(key, {**variables, **differing}, samples, targets, None, state)
      return state, upload

    own = keys, each or {}
    state, first = participate(None, jax.tree.map(lambda x: x[0], own))
    if len(keys) == 1:
      return jax.tree.map(lambda x: x[jnp.newaxis], first)
    _, others = jax.lax.scan(participate, state, jax.tree.map(lambda x: x[1:], own))
    return jax.tree.map(lambda one, more: jnp.concatenate([one[jnp.newaxis], more]), first, others)

  def _check_padding(self, variables: Mapping, samples: jax.Array, targets: jax.Array, weights: jax.Array) -> None:
    """Raises `UsageError` where padding would change the gradient of the samples."""
    size = self.batch_size or samples.shape[0]
    if self.fills_batches or (not isinstance(weights, jax.core.Tracer) and np.all(np.asarray(weights) > 0)):
      return
    if mixing.mixes(self, variables, samples, targets, size, max(1, size // 2)):
      way = (
        'give all clients as many samples as each other'
        if self.share == 'gradient' or self.batch_size is None
        else "give each client a multiple of its batch size, or set last_batch='dropped'"
      )
      raise errors.UsageError(
        f'the model {self.model.name!r} mixes the samples of a batch, so that those which only fill a batch would '
        f'change the gradient of the others: {way}'
      )

  @property
  def fills_batches(self) -> bool:
    """Whether it takes no step on a batch that its samples do not fill."""
    return self.drop_last and self.share == 'delta' and self.batch_size is not None

  def _together(
    self,
    key: jax.Array | None,
    variables: Mapping,
    samples: jax.Array,
    targets: jax.Array,
    weights: jax.Array | None,
    state: Any,
  ) -> tuple[Upload, Any, Tree]:
    """Returns what secure aggregation shows of the cohort: the mean of its updates; arguments as `participate`'s."""
    if weights is not None:
      raise errors.UsageError(
        'samples of a cohort are divided evenly, and padding is not: leave cohort at 1 in training'
      )

    def one(member: Client, key: Any, samples: Any, targets: Any, state: Any) -> tuple[Upload, Any, Tree]:
      return member.participate(key, variables, samples, targets, None, state)

    uploads, state, batch_stats = self._of_members(one, key, samples, targets, state)
    mean = functools.partial(jax.tree.map, functools.partial(jnp.mean, axis=0))
    mask = jax.tree.map(lambda x: jnp.any(x, axis=0), uploads.mask)
    return Upload(mean(uploads.update), mask, jnp.sum(uploads.num_samples)), state, mean(batch_stats)

  def _of_members(self, one: Callable, key: Any, samples: jax.Array, targets: jax.Array, state: Any = None) -> Any:
    """Returns (member, its key, samples, targets and state) -> anything of each member of the cohort, [cohort, …]."""
    self.num_steps(samples.shape[0])  # raises for what cannot be divided
    member = dataclasses.replace(self, cohort=1)
    split = [x.reshape(self.cohort, -1, *x.shape[1:]) for x in (samples, targets)]
    keys = None if key is None else jax.random.split(key, self.cohort)
    axes = (None if key is None else 0, 0, 0, None if state is None else 0)
    return jax.vmap(functools.partial(one, member), axes)(keys, *split, state)

  def transformed(
    self, key: jax.Array | None, samples: jax.Array, targets: jax.Array, weights: jax.Array | None = None
  ) -> tuple[jax.Array, jax.Array]:
    """Returns the samples that the client trains on in place of these, and what the loss compares with.

    Args:
      key: as `local_update` takes it.
      samples, targets: [N, …], and class indices or probabilities.
      weights: as `participate` takes them.
    """
    samples, targets = self._samples(samples, targets)
    if self.transform is not None and self.cohort > 1:
      found = self._of_members(lambda member, *given: member.transformed(*given[:3]), key, samples, targets)
      return jax.tree.map(jnp.concatenate, found)
    if self.transform is not None:
      samples, targets = jnp.asarray(samples), jnp.asarray(targets)  # a scenario holds those of NumPy
      key = None if key is None else jax.random.fold_in(key, 4)
      samples, targets = self.transform(key, samples, targets, **accepted(self.transform, weights=weights))
      if weights is not None and len(samples) != len(weights):
        raise errors.UsageError(
          f'a defense on the samples makes {len(samples)} of {len(weights)}, of which some are padding: clients of '
          'unequal sizes need one that keeps their number'
        )
    if self.loss.own and targets.ndim == 2:  # else they are made of these samples already
      return self.loss.of_samples(samples, self.modality, self.model.vocabulary)
    return samples, targets

  def _samples(self, samples: Any, targets: Any) -> tuple[jax.Array, jax.Array]:
    """Returns the samples, targets as probabilities; raises `UsageError` for what are none. Pixels are not checked."""
    samples, targets = errors.as_array('samples', samples), errors.as_array('targets', targets)
    self.modality.check_batch(samples)
    floating = samples.dtype if jnp.issubdtype(samples.dtype, jnp.floating) else float
    return samples, self.targets(targets, samples.shape[0], dtype=floating)

  def _shape(self, samples: jax.Array) -> tuple[int, ...]:
    """Returns the shape of one sample, also where a search moves something else in its place."""
    return samples.shape[1 : 1 + self.modality.axes]

  def _init_step(self, variables: Mapping) -> Any:
    return optax.with_extra_args_support(self.step).init(variables['params'])

  def _defended_gradient(
    self,
    key: jax.Array | None,
    variables: Mapping,
    state: Any,
    samples: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
    position: tuple = (1, 1),
    filled: bool = False,
  ) -> tuple[Tree, Tree, Any]:
    """Returns the step chain's output, the new batch statistics and the chain's new state.

    Args:
      key, variables, samples, targets, weights: see `participate`.
      state: of the step chain.
      position: numbers of the epoch and of the batch in it.
      filled: whether weights may be 0.
    """
    params = variables['params']
    dropout, noise = (None, None) if key is None else (jax.random.fold_in(key, 0), jax.random.fold_in(key, 1))
    if self.augment is not None and key is not None:
      samples = self.augment(jax.random.fold_in(key, 5), samples)

    def mean_loss(params: Tree) -> tuple[jax.Array, Tree]:
      losses, batch_stats = per_example_loss(
        self.network,
        self.loss,
        {**variables, 'params': params},
        samples,
        targets,
        self.batch_norm == 'train',
        dropout,
      )
      return self.loss.reduced(losses, targets, weights), batch_stats

    chain = optax.with_extra_args_support(self.step)
    with masked(weights if filled else None):  # of the loss, and of a defense that runs the network
      gradient, batch_stats = jax.grad(mean_loss, has_aux=True)(params)
      trained = self.trained_layers(params, self._shape(samples)) if self.frozen else None
      gradient = gradient if trained is None else trees.masked(gradient, trained)
      gradient, state = chain.update(
        gradient,
        state,
        params,
        key=noise,
        batch=(samples, targets),
        weights=weights,
        variables=variables,
        position=position,
      )
      if trained is not None:  # else the optimizer would clip by the noise of a defense on what it does not move
        gradient = trees.masked(gradient, trained)
    return gradient, batch_stats, state

  def held(self, params: Tree, sample_shape: tuple[int, ...]) -> Tree:
    """Returns the parameters, through which frozen layers have a gradient of zero."""
    if not self.frozen:
      return params
    trained = self.trained_layers(params, sample_shape)
    return jax.tree.map(lambda p, t: jnp.where(t, p, jax.lax.stop_gradient(p)), params, trained)

  def trained_layers(self, params: Tree, sample_shape: tuple[int, ...]) -> Tree:
    """Returns a tree of booleans: whether a parameter is trained.

    Raises:
      UsageError: for a frozen layer that the model does not have, or if none is left.
    """
    return self._but(self._paths('frozen', params, sample_shape), params)

  def shared_layers(self, params: Tree, sample_shape: tuple[int, ...]) -> Tree:
    """Returns a tree of booleans: whether a parameter is trained and shared; raises as `trained_layers` does."""
    return self._but(self.kept_paths(params, sample_shape), params)

  def kept_paths(self, params: Tree, sample_shape: tuple[int, ...]) -> frozenset[tuple[str, ...]]:
    """Returns the paths of the parameters that are frozen or private; raises as `trained_layers` does."""
    found = self._paths('frozen', params, sample_shape) | self._paths('private', params, sample_shape)
    if found and found.issuperset(trees.path_names(path) for path, _ in jax.tree.leaves_with_path(params)):
      raise errors.UsageError('all layers are frozen or private: there is nothing to share')
    return found

  def _but(self, paths: frozenset[tuple[str, ...]], params: Tree) -> Tree:
    """Returns a tree of booleans: whether a parameter has none of these paths."""
    return jax.tree.map_with_path(lambda path, leaf: jnp.asarray(trees.path_names(path) not in paths), params)

  def _paths(self, which: str, params: Tree, sample_shape: tuple[int, ...]) -> frozenset[tuple[str, ...]]:
    """Returns the paths of the parameters in the layers that a field names."""
    names = getattr(self, which)
    paths = [trees.path_names(path) for path, _ in jax.tree.leaves_with_path(params)] if names else []
    layers = self.model.layers(sample_shape) if names and self.model.layers is not None else ()
    found = frozenset[tuple[str, ...]]().union(*(_named(which, name, paths, layers) for name in names))
    if names and found.issuperset(paths):
      raise errors.UsageError(f'all layers are {which}: there is nothing to share')
    return found

  def _train(
    self,
    key: jax.Array | None,
    variables: Mapping,
    samples: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
    steps: int,
    padded: bool,
  ) -> tuple[Tree, Tree, Tree]:
    """Runs local SGD and returns (θ_T − θ_0, the last batch statistics, a mask of what a step's chain let pass)."""
    size = self.batch_size or samples.shape[0]
    per_epoch = steps // self.epochs
    used = per_epoch * size
    padding = max(0, used - samples.shape[0])
    left = size - padding  # in the last batch of an epoch
    mixed = not padded and mixing.mixes(self, variables, samples, targets, size, left)

    def batched(x: jax.Array) -> jax.Array:
      more = [x[:used], jnp.repeat(x[-1:], padding, axis=0)]  # and no zeros, on which a gradient may not be finite
      return jnp.concatenate(more).reshape(per_epoch, size, *x.shape[1:])

    def batches(samples: jax.Array, targets: jax.Array, weights: jax.Array) -> tuple[jax.Array, ...]:
      counted = jnp.arange(per_epoch * size).reshape(per_epoch, size) < len(samples)
      return batched(samples), batched(targets), batched(weights) * counted.astype(weights.dtype)

    ordered = tuple(map(jnp.asarray, (samples, targets, weights)))
    data = batches(*ordered)
    optimizer = promoting(self.optimizer)
    orders = None if self.order is None else self._orders(samples.shape[0], padded)

    def one_step(carry: tuple, index: jax.Array) -> tuple[tuple, None]:
      params, batch_stats, state, optimizer_state, passed = carry
      step_key = None if key is None else jax.random.fold_in(jax.random.fold_in(key, 2), index)
      current = {**variables, 'params': params}
      if variables.get('batch_stats'):
        current['batch_stats'] = batch_stats
      if self.order is not None:
        order = trees.take(orders, index // per_epoch)
        batch = trees.take(batches(*(x[order] for x in ordered)), index % per_epoch)
      elif self.shuffled and key is not None:
        order = jax.random.permutation(jax.random.fold_in(jax.random.fold_in(key, 6), index // per_epoch), len(samples))
        if padded:  # it stays behind the samples, which fill no more batches than they need
          order = order[jnp.argsort(weights[order] == 0, stable=True)]
        batch = trees.take(batches(*(x[order] for x in ordered)), index % per_epoch)
      else:
        batch = trees.take(data, index % per_epoch)
      position = index // per_epoch + 1, index % per_epoch + 1

      def step(batch: tuple, filled: bool = False) -> tuple[Tree, Tree, Any]:
        samples, targets, weights = batch
        return self._defended_gradient(step_key, current, state, samples, targets, weights, position, filled)

      if mixed:  # the last batch is as small as it is, which takes a program of its own
        last = index % per_epoch == per_epoch - 1
        gradient, batch_stats, state = jax.lax.cond(
          last, lambda: step(trees.take(batch, slice(left))), lambda: step(batch)
        )
      else:
        gradient, batch_stats, state = step(batch, filled=padded or padding > 0)
      updates, optimizer_state = optimizer.update(gradient, optimizer_state, params)
      if self.frozen:  # neither weight decay nor the noise of a defense moves them
        updates = trees.masked(updates, self.trained_layers(params, self._shape(samples)))
      if passed is not None:
        passed = jax.tree.map(jnp.logical_or, passed, _joint_mask(state, params))
      stepped = optax.apply_updates(params, updates), batch_stats, state, optimizer_state, passed
      if padded:
        filled = (jnp.all if self.fills_batches else jnp.any)(batch[2] > 0)
        stepped = jax.tree.map(functools.partial(jnp.where, filled), stepped, carry)
      return stepped, None

    params = variables['params']
    state = self._init_step(variables)
    passed = trees.zeros_like(_joint_mask(state, params)) if optax.tree.get_all_with_path(state, 'mask') else None
    start = (params, variables.get('batch_stats', {}), state, optimizer.init(params), passed)
    # Optimizer states may hold weakly typed leaves, which a scan's carry rejects.
    start = jax.tree.map(lambda x: jnp.asarray(x, x.dtype), start)
    remat = steps >= _MANY_STEPS if self.remat is None else self.remat
    trained, batch_stats, _, _, passed = _scan(one_step, start, steps, remat)
    return trees.subtract(trained, params), batch_stats, _joint_mask((), params) if passed is None else passed

  def _orders(self, count: int, padded: bool) -> jax.Array:
    """Returns the order of the samples in each epoch, int32 [epochs, N]."""
    assert self.order is not None
    if padded or any(len(one) != count for one in self.order):
      raise errors.UsageError(
        f'the order is of {len(self.order[0])} samples, and the client has {count}{", some of them padding" * padded}'
      )
    return jnp.asarray(self.order, jnp.int32)

  def _send(
    self,
    key: jax.Array | None,
    params: Tree,
    update: Tree,
    passed: Tree,
    state: Any,
    samples: jax.Array,
    targets: jax.Array,
    count: jax.Array,
  ) -> tuple[Upload, Any]:
    """Applies the upload chain to what is shared, then its masks and that of what the step chain let `passed`."""
    noise = None if key is None else jax.random.fold_in(key, 3)
    chain = optax.with_extra_args_support(self.upload)
    state = chain.init(params) if state is None else state
    if self.frozen or self.private:
      shared = self.shared_layers(params, self._shape(samples))
      update, passed = trees.masked(update, shared), jax.tree.map(jnp.logical_and, shared, passed)
    update, state = chain.update(update, state, params, key=noise, batch=(samples, targets))
    mask = jax.tree.map(jnp.logical_and, passed, _joint_mask(state, update))
    return Upload(trees.masked(update, mask), mask, count), state


def _named(which: str, name: str, paths: list[tuple[str, ...]], layers: Sequence[trees.Layer]) -> set[tuple[str, ...]]:
  """Returns the paths of the parameters that a name is of, see `Client.frozen`; raises `UsageError` for none."""
  modules = {path[:length] for path in paths for length in range(1, len(path))}
  own = tuple(name.replace('.', '/').strip('/').split('/'))
  called = {module for module in modules if module[-1] == name}
  if own in modules:
    if called - {own}:
      others = ', '.join(sorted('/'.join(module) for module in called - {own}))
      raise errors.UsageError(
        f'the {which} layer {name!r} is the name of several modules: write /{name} for that which is in no other, and '
        f'/{name} with the paths of the others for all ({others})'
      )
    return {path for path in paths if path[: len(own)] == own}
  of_layer = [set(layer.paths) for layer in layers if layer.name == name]
  if not of_layer and not called:
    known = {layer.name for layer in layers} | {'/'.join(module) for module in modules}
    raise errors.unknown(f'{which} layer', name, known)
  return of_layer[0] if of_layer else {path for path in paths if name in path[:-1]}


def _checked_order(given: Any, shuffled: bool, epochs: int) -> tuple[tuple[int, ...], ...]:
  """Returns an order of samples as tuples; raises `UsageError` for anything but a permutation for each epoch."""
  try:
    found = tuple(tuple(int(place) for place in one) for one in given)
  except (TypeError, ValueError):
    found = ()
  if len(found) != epochs or any(sorted(one) != list(range(len(found[0]))) for one in found):
    raise errors.UsageError(
      f'the order of the samples is {errors.shown(given)}, expected a permutation of their numbers from 0 on for each '
      f'of {epochs} epochs'
    )
  if shuffled:
    raise errors.UsageError('the order of the samples is given, and they are to be shuffled: leave one of the two out')
  return found


def _joint_mask(state: Any, like: Tree) -> Tree:
  """Returns a tree of booleans: what all trees `mask` in a chain's state let pass."""
  mask = jax.tree.map(lambda x: jnp.ones((), bool), like)
  for _, found in optax.tree.get_all_with_path(state, 'mask'):
    mask = jax.tree.map(jnp.logical_and, mask, _checked_mask(found, mask))
  return mask


def _checked_mask(found: Tree, like: Tree) -> Tree:
  """Returns a tree `mask` of a defense's state, checked: a user's own state may call something else so."""
  leaves = jax.tree.leaves(found)
  if jax.tree.structure(found) != jax.tree.structure(like) or any(jnp.asarray(x).dtype != bool for x in leaves):
    raise errors.UsageError(
      "a defense has a state with a field 'mask' that is no tree of booleans like the parameters: by this name, states "
      'say which entries are sent; call another thing by another name'
    )
  return found


def _scan(one_step: Callable, start: tuple, steps: int, remat: bool) -> tuple:
  """Returns the carry after `steps` calls of one_step(carry, index).

  With `remat` a backward pass keeps the carry of every √T-th of T steps, and recomputes one block at a time.
  """
  if not remat:
    return jax.lax.scan(one_step, start, jnp.arange(steps, dtype=jnp.int32))[0]
  size = max(1, math.isqrt(steps))
  inner = jax.checkpoint(one_step, prevent_cse=False)

  @functools.partial(jax.checkpoint, prevent_cse=False)
  def block(carry: tuple, first: jax.Array) -> tuple[tuple, None]:
    return jax.lax.scan(inner, carry, first + jnp.arange(size, dtype=jnp.int32))

  whole = steps // size * size
  carry, _ = jax.lax.scan(block, start, jnp.arange(0, whole, size, dtype=jnp.int32))
  if whole < steps:
    carry, _ = jax.lax.scan(inner, carry, jnp.arange(whole, steps, dtype=jnp.int32))
  return carry


@functools.lru_cache(maxsize=64)
def _in_precision(model: Model, precision: str) -> Model:
  """Returns the model whose pass is in this dtype; logits are float32, and running statistics keep their own."""
  if precision == 'float32':
    return model
  low = jnp.dtype(precision)

  def cast(tree: Tree, dtype: Any) -> Tree:
    return jax.tree.map(lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree)

  def pass_through(function: Callable) -> Callable:
    def run(variables: Tree, samples: jax.Array, *options: Any) -> tuple:
      with jax.numpy_dtype_promotion('standard'):  # norms compute their statistics in float32
        kept = {name: tree if name == 'batch_stats' else cast(tree, low) for name, tree in variables.items()}
        found = function(kept, cast(samples, low), *options)
      return cast(found, jnp.float32)

    return run

  return model._replace(
    apply=pass_through(model.apply), penalised=None if model.penalised is None else pass_through(model.penalised)
  )
