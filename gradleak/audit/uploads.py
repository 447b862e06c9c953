"""What each client sends: the uploads of a group's trials under each defense, and of its control runs."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gradleak.audit import granted
from gradleak.audit.group import Group
from gradleak.audit.streams import folded, numbered
from gradleak.core import trees
from gradleak.core.methods import contents
from gradleak.core.trees import Tree
from gradleak.defenses import NO_DEFENSE, null_gradient
from gradleak.defenses.defense import Bound, bind
from gradleak.engine import ahead, driver
from gradleak.engine.groups import Layout
from gradleak.federated import Client, Upload
from gradleak.federated.client import COSTLY


class Uploads(NamedTuple):
  """The uploads of one group, on the host; R rounds of T trials (or control runs).

  Attributes:
    trials: the trials that these are, int [T].
    controls: the control runs that these are, int [C].
    sent: per defense, and last of the control runs, an `Upload` whose leaves are [R, T, …].
    changes: per defense, and last of the control runs, float [T]: the norm of what the defense changed, relative to
      that of the undefended upload; NaN for control runs.
    variables: per defense, and last of the control runs, the variables that a server of several rounds refers the
      upload to, every leaf [T, …]; None where all were sent the same.
    trained: per defense the samples that the clients trained on in the first round, [T, B, …]; None where these
      are the private ones, or no samples in [0, 1].
    like: index of a defense of whose noise an attack reads the variance -> (trial -> the upload whose norms the control
      runs of that trial have, an `Upload` [R, …], and the variables that it is referred to, or None).
  """

  trials: np.ndarray
  controls: np.ndarray
  sent: list[Upload]
  changes: list[np.ndarray]
  variables: list[Tree | None]
  trained: list[np.ndarray | None]
  like: dict[int, dict[int, tuple[Upload, Tree | None]]]


class _Request(NamedTuple):
  """Uploads to be made: of one defense, on the keys of a stream, at some addresses, for some rounds."""

  bound: Bound
  stream: str
  addresses: np.ndarray
  rounds: int


@dataclasses.dataclass(frozen=True)
class Send:
  """(shared, lane) -> `Upload`: what a client under a defense sends. Equal ones compile once; lanes bring numbers."""

  bound: Bound = dataclasses.field(compare=False)
  defense: Any
  client: Client

  @classmethod
  def of(cls, bound: Bound, client: Client) -> 'Send':
    """Returns the function of a bound defense."""
    return cls(bound, (bound.defense.structure, contents(bound.arguments)), client)

  def __call__(self, shared: dict, lane: dict) -> Upload:
    """Called while tracing, by the driver."""
    client, samples, targets = self.given(shared, lane)
    variables: Any = lane.get('variables', shared.get('variables'))
    return client.local_update(lane['key'], variables, samples, targets)

  def given(self, shared: dict, lane: dict) -> tuple[Client, jax.Array, jax.Array]:
    """Returns the lane's client under the defense, and its private samples."""
    client = self.bound.build(lane['numbers'], self.client)
    return client, shared['samples'][lane['trial']], shared['targets'][lane['trial']]


@dataclasses.dataclass(frozen=True)
class SendInTurn:
  """(shared, lane) -> the `Upload`s of several rounds, [R, …], of a client that keeps its state between them."""

  send: Send

  def __call__(self, shared: dict, lane: dict) -> Upload:
    """Called while tracing, by the driver."""
    client, samples, targets = self.send.given(shared, lane)
    return client.in_turn(lane['key'], shared['variables'], samples, targets)


@dataclasses.dataclass(frozen=True)
class Transformed:
  """(shared, lane) -> the samples that a client under a defense on the samples trains on."""

  send: Send

  def __call__(self, shared: dict, lane: dict) -> jax.Array:
    """Called while tracing, by the driver."""
    client, samples, targets = self.send.given(shared, lane)
    return client.transformed(lane['key'], samples, targets)[0]


def uploads(group: Group, trials: np.ndarray, controls: np.ndarray, group_size: int) -> Uploads:
  """Returns the `Uploads` of some trials and control runs; their figures do not depend on which others are computed.

  Args:
    group: the `Group`.
    trials, controls: numbers of trials and of control runs, int [T] and [C].
    group_size: lanes that share one pass.
  """
  rounds = [_rounds(group, bound) for _, bound in group.defenses]
  requests = [_Request(bind(NO_DEFENSE, group.scenario.context), 'client', trials, 1)]
  requests += [
    _Request(bound, 'client', trials, number) for (_, bound), number in zip(group.defenses, rounds, strict=True)
  ]
  noisy: list[int] = []
  if len(controls):
    requests.append(_Request(bind(null_gradient(), group.scenario.context), 'control', controls, min(rounds)))
    noisy = [d for d, (_, bound) in enumerate(group.defenses) if granted.known_noise(group, bound)]
    met = np.unique(controls % group.num_trials)
    requests += [requests[1 + d]._replace(addresses=met) for d in noisy]
  undefended, *first = _computed(group, requests, group_size)
  changed = [_changes(sent, undefended) for sent in first[: len(group.defenses)]]
  sent, variables = first, [None] * len(first)
  if group.server is not None and group.server.rounds > 1:
    pairs = [_served(group, request, upload, group_size) for request, upload in zip(requests[1:], first, strict=True)]
    sent, variables = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
  trained = [_trained(group, request, group_size) for request in requests[1 : 1 + len(group.defenses)]]
  own = len(sent) - len(noisy)
  like = {
    d: {
      int(t): (jax.tree.map(lambda x, i=i: x[:, i], upload), None if referred is None else trees.take(referred, i))
      for i, t in enumerate(met)
    }
    for d, upload, referred in zip(noisy, sent[own:], variables[own:], strict=True)
  }
  changed.append(np.full(len(controls), np.nan))
  return Uploads(trials, controls, sent[:own], changed, variables[:own], trained, like)


def _rounds(group: Group, bound: Bound) -> int:
  """Returns how many uploads of a trial any attacker of a defense reads."""
  if not group.attacks or any('uploads' in attack.reads for _, attack in group.attacks):
    return group.settings.rounds
  return max(adaptive.rounds for _, attack in group.attacks for adaptive in granted.attackers(group, attack, bound))


def _computed(group: Group, requests: list[_Request], group_size: int) -> list[Upload]:
  """Returns the uploads of each request on the variables of the group; equal `Send`s are made together."""
  found: list[Any] = [None] * len(requests)
  for i, request in enumerate(requests):
    if request.rounds > 1 and request.bound.in_turn:
      found[i] = _in_turn(group, request, group_size)
  alike: dict[Send, list[int]] = {}
  for i, request in enumerate(requests):
    if found[i] is None:
      alike.setdefault(Send.of(request.bound, group.client), []).append(i)
  shared = _shared(group, variables=group.scenario.variables)
  calls = [
    (chosen, send, jax.tree.map(_joined, *(_lanes(group, requests[i]) for i in chosen)))
    for send, chosen in alike.items()
  ]
  ahead.together(
    lambda: (driver.lowered_evaluation(send, shared, lanes, Layout(group_size)) for _, send, lanes in calls)
  )
  for chosen, send, lanes in calls:
    made = driver.evaluate(send, shared, lanes, Layout(group_size), unit=_unit(send.bound))
    start = 0
    for i in chosen:
      shape = requests[i].rounds, len(requests[i].addresses)
      part = slice(start, start + shape[0] * shape[1])
      found[i] = jax.tree.map(_reshaped(part, shape), made)
      start = part.stop
  return found


def _unit(bound: Bound) -> str | None:
  """Returns what the uploads of a costly client are called where it is said how far they are; None for others."""
  return f'uploads under {bound.defense}' if bound.gradients >= COSTLY else None


def _in_turn(group: Group, request: _Request, group_size: int) -> Upload:
  """Returns the uploads of a client that keeps its state between the rounds, [R, T, …]."""
  lanes, count = _lanes(group, request), len(request.addresses)
  keys = lanes['key'].reshape(request.rounds, count).T
  lanes = {'key': keys, 'trial': lanes['trial'][:count], 'numbers': tuple(x[:count] for x in lanes['numbers'])}
  function = SendInTurn(Send.of(request.bound, group.client))
  made = _evaluate(group, function, lanes, group_size, variables=group.scenario.variables)
  return jax.tree.map(lambda x: np.moveaxis(np.asarray(x), 0, 1), made)


def _trained(group: Group, request: _Request, group_size: int) -> np.ndarray | None:
  """Returns the samples that the clients trained on, [T, B, …]; None for the private ones, or none in [0, 1]."""
  if not request.bound.defense.at('data'):
    return None
  lanes = _lanes(group, request._replace(rounds=1))
  samples = np.asarray(_evaluate(group, Transformed(Send.of(request.bound, group.client)), lanes, group_size))
  return samples if samples.min() >= 0 and samples.max() <= 1 else None


def _reshaped(part: slice, shape: tuple[int, int]) -> Callable[[Any], np.ndarray]:
  return lambda x: np.asarray(x[part]).reshape(*shape, *x.shape[1:])


def _lanes(group: Group, request: _Request, first_round: int = 0) -> dict:
  """Returns the lanes of a request, round by round; upload i of a round draws the i-th key of the round's stream."""
  trial = request.addresses % group.num_trials
  names = [
    f'{request.stream} round {i}' if i else request.stream for i in range(first_round, first_round + request.rounds)
  ]
  streams = np.repeat([numbered(name) for name in names], len(trial))
  keys = folded(group.streams.key, streams, np.tile(request.addresses, request.rounds).astype(np.int32))
  count = len(streams)
  numbers = tuple(np.full(count, number, np.float32) for number in request.bound.defense.numbers)
  return {'key': keys, 'trial': np.tile(trial, request.rounds).astype(np.int32), 'numbers': numbers}


def _joined(first: Any, *others: Any) -> Any:
  """Returns arrays end to end; those of NumPy stay so, which needs no compilation for each number of lanes."""
  join = np.concatenate if isinstance(first, np.ndarray) else jnp.concatenate
  return join([first, *others]) if others else first


def _evaluate(group: Group, function: Callable, lanes: dict, group_size: int, **shared: Any) -> Any:
  return driver.evaluate(function, _shared(group, **shared), lanes, Layout(group_size))


def _shared(group: Group, **shared: Any) -> dict:
  return {**shared, **jax.device_put({'samples': group.truth, 'targets': group.targets})}


def _served(group: Group, request: _Request, first: Upload, group_size: int) -> tuple[Upload, Tree]:
  """Returns what a server of several rounds observes of each trial: (`Upload` [1, T, …], variables [T, …])."""
  server = group.server
  assert server is not None
  update = [trees.take(trees.take(first.update, 0), t) for t in range(len(request.addresses))]
  start = server.init(group.scenario, group.settings.batch_size)
  states = [server.receive(start, answer) for answer in update]
  for number in range(1, server.rounds):
    asking = [t for t, state in enumerate(states) if not server.finished(state)]
    if not asking:
      break
    one = request._replace(addresses=request.addresses[asking], rounds=1)
    asked = jax.tree.map(lambda *xs: jnp.stack([jnp.asarray(x) for x in xs]), *(server.send(states[t]) for t in asking))
    lanes = {**_lanes(group, one, number), 'variables': asked}
    answers = _evaluate(group, Send.of(request.bound, group.client), lanes, group_size).update
    for place_, t in enumerate(asking):
      states[t] = server.receive(states[t], jax.tree.map(lambda x, i=place_: np.asarray(x[i]), answers))
  seen = [server.observed(state) for state in states]
  stacked = jax.tree.map(lambda *xs: np.stack([np.asarray(x) for x in xs])[np.newaxis], *(one.update for one in seen))
  variables = jax.tree.map(lambda *xs: np.stack([np.asarray(x) for x in xs]), *(one.variables for one in seen))
  return dataclasses.replace(first, update=stacked), variables


def _changes(upload: Upload, undefended: Upload) -> np.ndarray:
  """Returns the change of each trial's first upload; in NumPy, as compiled sums depend on the number of trials."""
  defended, plain = (jax.tree.leaves(trees.take(each.update, 0)) for each in (upload, undefended))
  plain = [np.asarray(x, np.float64) for x in plain]

  def norms(leaves: list) -> np.ndarray:
    return np.sqrt(sum(np.square(x, dtype=np.float64).reshape(len(x), -1).sum(1) for x in leaves))

  with np.errstate(divide='ignore', invalid='ignore'):
    return norms([a - b for a, b in zip(defended, plain, strict=True)]) / norms(plain)


def fraction_sent(upload: Upload) -> float:
  """Returns the fraction of the entries that one upload sends."""
  pairs = zip(jax.tree.leaves(upload.update), jax.tree.leaves(upload.mask), strict=True)
  sizes = [(u.size, np.broadcast_to(mask, u.shape).sum()) for u, mask in pairs]
  return float(sum(sent for _, sent in sizes) / sum(size for size, _ in sizes))
