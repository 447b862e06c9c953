"""Federated training: rounds in which chosen clients train and the server averages (McMahan et al. 2017).

In FedSGD the clients upload gradients, in FedAvg deltas. The clients are those that attacks are run on.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gradleak import data
from gradleak.core import errors, trees
from gradleak.core.promotion import promoting
from gradleak.core.reuse import reusable
from gradleak.core.settings import Choice, Count, Fraction, NonNegative, Range, check_fields, ranged
from gradleak.core.trees import Tree
from gradleak.data.partition import check as check_partition
from gradleak.data.partition import generator_of
from gradleak.defenses.defense import Defense, check_mean, check_order
from gradleak.defenses.differential_privacy import aggregate_client_dp
from gradleak.engine import driver
from gradleak.engine.groups import Layout
from gradleak.federated.client import NO_DEFENSE, Client, Upload
from gradleak.federated.losses import Loss, cross_entropy, not_zero
from gradleak.federated.server import layer_average
from gradleak.federated.targets import CLASSES, SAMPLES
from gradleak.models import Model, check_variables
from gradleak.models.model import check_logits, check_model, outputs_shape

WEIGHTINGS = ('samples', 'equal')


@dataclasses.dataclass(frozen=True)
class Federation:
  """The clients, their data, and how the server averages.

  Attributes:
    client: how each client trains, its defenses included.
    samples: [N, …] of all clients together.
    targets: what the client's loss takes: classes, int32 [N], by default.
    partition: an array of indices into them for each client.
    per_round: clients that are drawn for a round.
    server: optax optimizer of the global model, on the mean gradient, or the negative of the mean delta: SGD of rate 1
      is FedAvg, Adam is FedAdam (Reddi et al. 2021) with Adam's correction of the bias.
    chain: defenses at the server, on the mean upload before its optimizer; they receive `key=`, `num_clients=` and
      `weights=`, float32 [K] with sum 1: the clients' portions of the mean, 0 for those that did not answer. Without
      `server_noise` they also receive `uploads=`, those of the mean, [K, …].
    weighting: the weight of an upload: 'samples' (the number behind it) or 'equal'.
    server_noise: Geyer's noise multiplier; above 0, `defenses.differential_privacy.aggregate_client_dp` computes the
      mean, with equal weights and 0 for what was not sent.
    drop_out: probability that a drawn client does not answer. The state of its upload chain stays that of its last
      answer: `fragmentation` then compares with the model that it received for that.
    defended: the clients under `client`'s defenses, the others train without; None means all of them.
    bits: what a defended client sends of a tensor, floats [K, …] -> the bits of its code, [K]; None for those of its
      type. It is `Defense.bits`.
    group_size: clients per compiled pass; changes speed, and the last bits. None takes `default_group_size`.
  """

  client: Client
  samples: np.ndarray
  targets: np.ndarray
  partition: Sequence[np.ndarray]
  per_round: Count
  server: optax.GradientTransformation = dataclasses.field(default_factory=lambda: optax.sgd(1.0))
  chain: optax.GradientTransformation = NO_DEFENSE
  weighting: Annotated[str, Choice(WEIGHTINGS)] = 'samples'
  server_noise: NonNegative = 0.0
  drop_out: Fraction = 0.0
  defended: tuple[int, ...] | None = None
  bits: Callable[[Any], Any] | None = None
  group_size: Annotated[int | None, Range(1)] = None

  def __post_init__(self) -> None:
    errors.check_instance('client', self.client, Client, 'a gradleak.Client')
    self.client.modality.check(self.samples)
    self.client.targets(self.targets, len(self.samples))
    if self.client.private:
      raise errors.UsageError('private layers are not kept from round to round in a training: leave them shared')
    if self.client.cohort > 1:
      raise errors.UsageError(
        f'cohort is {self.client.cohort}, which would divide the samples of each client; in a training the server '
        'averages the uploads of a round in any case: leave it at 1'
      )
    check_partition(self.partition, len(self.samples))
    if self.client.fills_batches:
      self.client.num_steps(max(map(len, self.partition)))  # raises where nobody takes a step
    check_fields(self)
    if isinstance(self.chain, Defense):
      check_order(self.chain)
      check_mean(self.chain, self.server_noise)
    errors.check_number('per_round', self.per_round, low=1, high=len(self.partition), integer=True)
    if self.defended is not None and not isinstance(self.defended, tuple | list):
      raise errors.UsageError(f'defended is {errors.shown(self.defended)}, expected the numbers of clients')
    for client in self.defended or ():
      errors.check_number('defended client', client, low=0, high=len(self.partition) - 1, integer=True)

  @functools.cached_property
  def layers(self) -> tuple[trees.Layer, ...] | None:
    """The model's layers, or None if it does not offer them."""
    offered = self.client.model.layers
    return None if offered is None else offered(self.samples.shape[1:])

  @property
  def at_once(self) -> int:
    """The number of clients per compiled pass."""
    return self.group_size or default_group_size(self.per_round)


class State(NamedTuple):
  """The state of a training, on the host or on one device.

  Attributes:
    number: rounds done.
    variables: the global model's.
    server: the server optimizer's state.
    chain: the server chain's state.
    kept: client -> its upload chain's state after its last participation, if it has one.
    participations: how often each client has answered, int32 [clients].
  """

  number: int
  variables: Mapping
  server: Any
  chain: Any
  kept: dict[int, Any]
  participations: np.ndarray


class Round(NamedTuple):
  """What one round did.

  Attributes:
    clients: those that answered, ascending.
    samples: how many samples each of them trained on.
    bytes_up: bytes that each of them sent: of its update, see `bytes_sent`, and of BatchNorm's statistics.
    bytes_down: bytes that each drawn client received: the global model, BatchNorm's statistics included.
    bytes_statistics: of `bytes_up`, those of the statistics.
    update_norm: L2 norm of the mean upload, before the server's chain.
  """

  clients: np.ndarray
  samples: np.ndarray
  bytes_up: np.ndarray
  bytes_down: int
  bytes_statistics: np.ndarray
  update_norm: float


def start(federation: Federation, variables: Mapping) -> State:
  """Returns the `State` before the first round; raises `UsageError` for variables or targets of another model."""
  shape = federation.samples.shape[1:]
  check_variables(federation.client.model, variables, shape)
  federation.client.targets(
    federation.targets, len(federation.samples), outputs=outputs_shape(federation.client.model, variables, shape)
  )
  params = variables['params']
  server = promoting(federation.server).init(params)
  return State(0, variables, server, federation.chain.init(params), {}, np.zeros(len(federation.partition), np.int32))


def default_group_size(per_round: int) -> int:
  """Returns the number of clients per compiled pass: 1 on CPU (see docs/PERFORMANCE.md), else all."""
  return 1 if jax.default_backend() == 'cpu' else per_round


def draw(federation: Federation, number: int, key: jax.Array) -> tuple[np.ndarray, np.ndarray, np.random.Generator]:
  """Returns the clients of round `number`.

  Args:
    federation: the `Federation`.
    number: rounds done before it.
    key: of the whole training.

  Returns:
    (clients drawn, ascending; whether each of them answers, bool; the generator for all further draws of the round).
  """
  generator = generator_of(jax.random.fold_in(jax.random.fold_in(key, number), 0))
  drawn = np.sort(generator.choice(len(federation.partition), federation.per_round, replace=False))
  return drawn, generator.random(len(drawn)) >= federation.drop_out, generator


def after(federation: Federation, state: State, key: jax.Array) -> np.ndarray:
  """Returns how often each client will have answered after the next round, int32 [clients]; see `run_round`."""
  drawn, answers, _ = draw(federation, state.number, key)
  return _counted(state, drawn[answers])


def _counted(state: State, answered: np.ndarray) -> np.ndarray:
  counts = state.participations.copy()
  counts[answered] += 1
  return counts


def run_round(federation: Federation, state: State, key: jax.Array) -> tuple[State, Round]:
  """Returns (the next `State`, what the `Round` did); the same key gives the same round, bit for bit.

  Args:
    federation: the `Federation`.
    state: as `start` or an earlier round returned it.
    key: a typed JAX key, of the whole training: the same at every round.
  """
  drawn, answers, generator = draw(federation, state.number, key)
  key = jax.random.fold_in(key, state.number)
  uploads, new, batch_stats = _take_part(federation, state, drawn, generator, jax.random.fold_in(key, 1))
  sent = statistics_sent(uploads.mask, state.variables.get('batch_stats', {}), federation.layers)
  statistics = _statistics_bytes(state.variables, sent, len(drawn))
  done = Round(
    drawn[answers],
    np.asarray(uploads.num_samples[answers]),
    (_bytes_of(federation, uploads, drawn) + statistics)[answers],
    sum(x.nbytes for x in jax.tree.leaves(state.variables)),
    statistics[answers],
    0.0,
  )
  if not answers.any():
    return state._replace(number=state.number + 1), done
  weights = uploads.num_samples if federation.weighting == 'samples' else np.ones(len(drawn))
  client = federation.client
  step = _server(federation.chain, federation.server, client.share, federation.server_noise)
  variables, server, chain, norm = step(
    state.variables,
    state.server,
    state.chain,
    uploads,
    batch_stats,
    sent,
    np.where(answers, weights, 0).astype(np.float32),
    jax.random.fold_in(key, 2),
    np.float32(answers.sum()),
    client.trained_layers(state.variables['params'], federation.samples.shape[1:]) if client.frozen else None,
  )
  kept = {**state.kept, **{client: new[client] for client in drawn[answers].tolist() if client in new}}
  state = State(state.number + 1, variables, server, chain, kept, _counted(state, drawn[answers]))
  return state, done._replace(update_norm=float(norm))


def along(federation: Federation, variables: Mapping, key: jax.Array, rounds: int) -> Iterator[tuple[Mapping, Mapping]]:
  """Yields (variables after, variables before) each of some rounds; the arguments are those of `start`, `run_round`."""
  state = start(federation, variables)
  for _ in range(rounds):
    before, (state, _) = state, run_round(federation, state, key)
    yield state.variables, before.variables


@dataclasses.dataclass(frozen=True)
class _Participate:
  """One client's part in a round; equal ones compile once."""

  client: Client

  def __call__(self, variables: Mapping, lane: Mapping) -> tuple[Upload, Any, Tree]:
    return self.client.participate(
      lane['key'], variables, lane['samples'], lane['targets'], lane['weights'], lane['kept']
    )


def _take_part(
  federation: Federation, state: State, drawn: np.ndarray, generator: np.random.Generator, key: jax.Array
) -> tuple[Upload, dict[int, Any], Tree]:
  """Returns (uploads, {client: state of its upload chain}, batch statistics) of the drawn clients, in their order."""
  shuffled = [generator.permutation(federation.partition[client]) for client in drawn]
  everyone = np.arange(len(federation.partition))
  defends = np.full(len(everyone), True) if federation.defended is None else np.isin(everyone, federation.defended)
  places, results = [], []
  kept: dict[int, Any] = {}
  for client, members in (federation.client, defends), (federation.client.undefended(), ~defends):
    chosen = np.flatnonzero(members[drawn])
    if not len(chosen):
      continue
    longest = max(len(federation.partition[member]) for member in everyone[members])
    lanes = {
      **_padded(federation, [shuffled[i] for i in chosen], longest),
      'key': jax.vmap(lambda number: jax.random.fold_in(key, number))(jnp.asarray(drawn[chosen])),
      'kept': _kept(client, state, drawn[chosen]),
    }
    layout = Layout(federation.at_once)
    uploads, keeps, batch_stats = driver.evaluate(_Participate(client), state.variables, lanes, layout)
    if jax.tree.leaves(keeps):
      kept |= {int(drawn[i]): trees.take(keeps, row) for row, i in enumerate(chosen)}
    places.append(chosen)
    results.append((uploads, batch_stats))
  if len(results) == 1:
    return results[0][0], kept, results[0][1]
  order = np.argsort(np.concatenate(places))
  uploads, batch_stats = jax.tree.map(lambda *parts: _joined(parts)[order], *results)
  return uploads, kept, batch_stats


def _joined(parts: Sequence[Any]) -> np.ndarray:
  """Concatenates arrays [K, …]; masks of whole tensors [K] become masks of entries, if another part has those."""
  widest = max(parts, key=np.ndim)
  return np.concatenate(
    [
      np.broadcast_to(part.reshape(part.shape + (1,) * (widest.ndim - part.ndim)), part.shape[:1] + widest.shape[1:])
      for part in map(np.asarray, parts)
    ]
  )


def _padded(federation: Federation, parts: Sequence[np.ndarray], longest: int) -> dict[str, Any]:
  """Returns the samples of each part, padded to one length by its own samples, with weights: 0 for padding.

  Where nothing is padded, weights are None.
  """
  size = federation.client.batch_size or longest
  longest = -(-longest // size) * size
  chosen = np.stack([np.resize(part, longest) for part in parts])
  weights = np.stack([np.arange(longest) < len(part) for part in parts]).astype(np.float32)
  return {
    'samples': federation.samples[chosen],
    'targets': federation.client.loss.targets.kept(federation.targets)[chosen],
    'weights': None if weights.all() else weights,
  }


def _kept(client: Client, state: State, drawn: np.ndarray) -> Any:
  """Returns the states of the drawn clients' upload chains, stacked; of a new client, the chain's initial state."""
  initial = client.upload.init(state.variables['params'])
  if not jax.tree.leaves(initial):
    return initial
  kept = [state.kept.get(int(number), initial) for number in drawn]
  return jax.tree.map(lambda *leaves: np.stack([np.asarray(leaf) for leaf in leaves]), *kept)


@reusable(32)
def _server(
  chain: optax.GradientTransformation, server: optax.GradientTransformation, share: str, noise: float
) -> Callable[..., tuple]:
  """Returns the compiled step of the server; BatchNorm's statistics are averaged over those who sent them."""
  chain, server = optax.with_extra_args_support(chain), promoting(server)

  @jax.jit
  def step(
    variables: Mapping,
    server_state: Any,
    chain_state: Any,
    uploads: Upload,
    batch_stats: Tree,
    statistics: Tree,
    weights: jax.Array,
    key: jax.Array,
    num_clients: jax.Array,
    trained: Tree | None,
  ) -> tuple[Mapping, Any, Any, jax.Array]:
    params = variables['params']

    def held(update: Tree) -> Tree:
      return update if trained is None else trees.masked(update, trained)  # noise moves no frozen layer

    if noise:
      mean, _ = aggregate_client_dp(jax.random.fold_in(key, 1), uploads.update, noise, present=weights > 0)
    else:
      mean = layer_average(uploads, weights)
    mean = held(mean)
    norm = trees.norm(mean)
    portions = (weights > 0).astype(jnp.float32) if noise else weights
    given = {'num_clients': num_clients, 'weights': portions / jnp.sum(portions)}
    if not noise:  # its ε is of what depends on the noisy mean, and on the uploads only through it
      given['uploads'] = uploads.update
    mean, chain_state = chain.update(mean, chain_state, params, key=key, **given)
    mean = held(mean)
    gradient = jax.tree.map(jnp.negative, mean) if share == 'delta' else mean
    updates, server_state = server.update(gradient, server_state, params)
    variables = {**variables, 'params': optax.apply_updates(params, held(updates))}
    if variables.get('batch_stats'):
      average = functools.partial(_mean_statistics, weights)
      variables['batch_stats'] = jax.tree.map(average, variables['batch_stats'], batch_stats, statistics)
    return variables, server_state, chain_state, norm

  return step


def _mean_statistics(weights: jax.Array, before: jax.Array, new: jax.Array, sent: jax.Array) -> jax.Array:
  """Returns the mean of one of BatchNorm's statistics over the clients that sent it; that before, if none did."""
  portions = jnp.where(sent, weights, 0.0)
  total = jnp.sum(portions)
  counted = jnp.where(portions.reshape(-1, *(1,) * (new.ndim - 1)) > 0, new, jnp.zeros_like(new))  # 0·NaN is NaN
  mean = jnp.tensordot(portions / jnp.where(total > 0, total, 1.0), counted, 1)
  return jnp.where(total > 0, mean, before)


def statistics_sent(mask: Tree, batch_stats: Tree, layers: Sequence[trees.Layer] | None = None) -> Tree:
  """Returns which of BatchNorm's statistics each client sends, a tree shaped like `batch_stats` of bool [K].

  The statistics of a layer are sent with its parameters. A client that sends no parameters of the layer does not send
  the statistics, and the server does not learn them by other means. Those of a norm without parameters are always sent.

  Args:
    mask: the masks of the uploads of K clients, stacked.
    batch_stats: the running statistics, a tree like that of the modules that they belong to.
    layers: the model's layers; None takes each module for one, as `trees.layer_numbers` does.
  """
  numbers, count = trees.layer_numbers(mask, layers)
  masks = [np.asarray(one).reshape(len(one), -1).any(1) for one in jax.tree.leaves(mask)]
  some = np.zeros((count, len(masks[0])), bool)
  of_module: dict[tuple, set] = {}
  for (path, number), mask in zip(jax.tree.leaves_with_path(numbers), masks, strict=True):
    some[number] |= mask
    of_module.setdefault(trees.path_names(path)[:-1], set()).add(number)

  def of_statistic(path: Sequence, leaf: Any) -> np.ndarray:
    del leaf
    owners = of_module.get(trees.path_names(path)[:-1])
    return np.ones(some.shape[1], bool) if owners is None else np.any(some[sorted(owners)], axis=0)

  return jax.tree_util.tree_map_with_path(of_statistic, batch_stats)


def _statistics_bytes(variables: Mapping, sent: Tree, clients: int) -> np.ndarray:
  """Returns the bytes of BatchNorm's statistics that each client sends, int64 [K]."""
  total = np.zeros(clients, np.int64)
  for statistic, mask in zip(jax.tree.leaves(variables.get('batch_stats', {})), jax.tree.leaves(sent), strict=True):
    total += mask * statistic.nbytes
  return total


def _bytes_of(federation: Federation, uploads: Upload, drawn: np.ndarray) -> np.ndarray:
  """Returns the bytes of the uploads of the clients drawn, in the code of the defense where they are defended."""
  plain = bytes_sent(uploads)
  if federation.bits is None:
    return plain
  defended = np.ones(len(drawn), bool) if federation.defended is None else np.isin(drawn, federation.defended)
  return np.where(defended, bytes_sent(uploads, federation.bits), plain)


def bytes_sent(uploads: Upload, bits: Callable[[Any], Any] | None = None) -> np.ndarray:
  """Returns the bytes of each upload, int64 [K], counting only what was sent; without BatchNorm's statistics.

  A tensor sent whole takes the bytes of its values, or of their code. For a tensor sent in part, the sent values count.
  Their places count as the smaller of a 32-bit index for each sent value and a bit for every entry. If whole tensors
  are dropped, there is a bit for each tensor.

  Args:
    uploads: `Upload`s of K clients, stacked.
    bits: of the code of a tensor, see `Federation`; where a tensor is sent in part, its code takes that part of them.
  """
  total = np.zeros(len(np.asarray(uploads.num_samples)), np.int64)
  dropped = np.zeros(len(total), bool)
  tensors = 0
  for update, mask in zip(jax.tree.leaves(uploads.update), jax.tree.leaves(uploads.mask), strict=True):
    mask, update, tensors = np.asarray(mask), np.asarray(update), tensors + 1
    size = int(np.prod(update.shape[1:]))
    count = mask.reshape(len(mask), -1).sum(1, dtype=np.int64) * (size if mask.ndim == 1 else 1)
    part = (count > 0) & (count < size)
    dropped |= count == 0
    coded = 8 * update.dtype.itemsize * size if bits is None or not size else np.asarray(bits(update), np.int64)
    product = np.asarray(coded, object) * count.astype(object)  # may have more than 64 bits
    total += (-(-product // (8 * max(size, 1)))).astype(np.int64)
    total += np.where(part, np.minimum(4 * count, -(-size // 8)), 0)
  return total + np.where(dropped, -(-tensors // 8), 0)


def accuracy(
  model: Model, variables: Mapping, samples: np.ndarray, targets: np.ndarray, batch_size: int = 100
) -> tuple[float, float]:
  """Returns (accuracy, mean cross-entropy) of a model on samples; arguments and errors are those of `classified`."""
  predicted, loss = classified(model, variables, samples, targets, batch_size)
  return int(np.sum(predicted == decided(cross_entropy(), targets))) / len(predicted), loss


def decided(loss: Loss, targets: Any) -> np.ndarray:
  """Returns what a model has to decide for each sample: its class, or the number of its combination of flags, int [N].

  Args:
    loss: of a client.
    targets: as it takes them.

  Raises:
    UsageError: for targets that leave nothing to decide, such as values, of which there is no accuracy.
  """
  targets = np.asarray(targets)
  if loss.targets.decide is None or targets.ndim > 2:
    raise errors.UsageError(
      f'accuracy is of one class or some flags for each sample, and the loss {loss} is not: train without test samples'
    )
  if np.issubdtype(targets.dtype, np.integer) and targets.ndim == 1 and loss.targets in (CLASSES, SAMPLES):
    return targets  # where samples give their targets, the kind of each
  targets = targets if loss.targets is CLASSES else loss.targets.kept(targets) - 0.5
  return np.asarray(loss.targets.decide(targets))


@ranged
def classified(
  model: Model,
  variables: Mapping,
  samples: np.ndarray,
  targets: np.ndarray,
  batch_size: Annotated[int, Range(1, 10**6)] = 100,
  loss: Loss | None = None,
) -> tuple[np.ndarray, float]:
  """Returns (what a model decides for each sample, as `decided` has it, int [N]; the mean loss).

  BatchNorm uses its running statistics. The mean is the loss's own: where classes have weights, it is over these.

  Args:
    model, variables: the `Model` and its variables.
    samples: [N, …].
    targets: as the loss takes them.
    batch_size: samples per compiled pass; changes speed, and the last bits.
    loss: of a client; None for cross-entropy.

  Raises:
    UsageError: for samples that the loss does not take, or variables of another model; and as `decided` does.
  """
  loss = cross_entropy() if loss is None else loss
  if np.ndim(samples) == 4:
    data.check_images(samples)
  check_variables(check_model(model), variables, np.shape(samples)[1:])
  outputs = outputs_shape(model, variables, np.shape(samples)[1:])

  def check(given: Any, count: int) -> None:
    given = loss.targets.checked(given, count, outputs[-1])
    if not loss.own:
      loss.targets.check_shape(given, outputs)

  samples, targets = data.pair('the samples', (samples, targets), check=np.asarray, check_targets=check)
  decided(loss, targets[:1])  # raises for what cannot be
  predicted, total, parts, score = [], 0.0, 0.0, _score(model, loss)
  for first in range(0, len(samples), batch_size):
    some = slice(first, first + batch_size)
    found = score(variables, samples[some], loss.targets.kept(targets[some]))
    predicted.append(np.asarray(found[0]))
    total, parts = total + float(found[1]), parts + float(found[2])
  return np.concatenate(predicted), total / parts if parts else math.nan


class Decisions(NamedTuple):
  """What a model decides of test samples.

  Attributes:
    predicted: what it decides, int [N], see `classified`.
    truth: what it has to, int [N], see `decided`.
    loss: the mean over N.
    lengths: where samples are texts, which give their own targets: how many of the N are tokens of each; else None.
  """

  predicted: np.ndarray
  truth: np.ndarray
  loss: float
  lengths: list[int] | None = None


def judged(
  client: Client, variables: Mapping, samples: np.ndarray, targets: np.ndarray, batch_size: int = 100
) -> Decisions:
  """Returns what a client's model decides of samples, or of the tokens in these that count.

  Args:
    client: the `Client`, of whose model and loss it is.
    variables, samples, targets, batch_size: as `classified` takes them.
  """
  if not client.loss.own:
    predicted, loss = classified(client.model, variables, samples, targets, batch_size, client.loss)
    return Decisions(predicted, decided(client.loss, targets), loss)
  client.modality.check(samples)
  found, score = [], _score_of_tokens(client)
  for first in range(0, len(samples), batch_size):
    found.append(jax.device_get(score(variables, jnp.asarray(samples[first : first + batch_size]))))
  predicted, truth, counted, losses = (np.concatenate(parts) for parts in zip(*found, strict=True))
  if not counted.any():
    raise errors.UsageError(f'the loss {client.loss} predicts nothing of these {client.modality.noun[1]}')
  lengths = counted.reshape(len(counted), -1).sum(axis=1)
  mean = float(losses.sum(dtype=np.float64) / counted.sum())
  return Decisions(predicted[counted], truth[counted], mean, lengths.tolist())


@reusable(32)
def _score_of_tokens(client: Client) -> Callable[..., tuple[jax.Array, ...]]:
  @jax.jit
  def score(variables: Mapping, samples: jax.Array) -> tuple[jax.Array, ...]:
    given, targets = client.loss.of_samples(samples, client.modality, client.model.vocabulary)
    outputs, _ = client.model.apply(variables, given, False, None)
    logs = -jnp.sum(targets * jax.nn.log_softmax(outputs), axis=-1)
    return jnp.argmax(outputs, axis=-1), jnp.argmax(targets, axis=-1), jnp.any(targets > 0, axis=-1), logs

  return score


@reusable(32)
def _score(model: Model, loss: Loss) -> Callable[..., tuple[jax.Array, jax.Array, jax.Array]]:
  decide = loss.targets.decide
  assert decide is not None

  @jax.jit
  def score(variables: Mapping, samples: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    outputs, _ = model.apply(variables, samples, False, None)
    check_logits(model, outputs, (len(samples), *getattr(outputs, 'shape', ())[1:2]))
    encoded = loss.targets.encode(targets, outputs.shape[1], outputs.dtype)
    parts = loss.parts(encoded)
    return decide(outputs), jnp.sum(not_zero(parts) * loss(outputs, encoded)), jnp.sum(parts)

  return score
