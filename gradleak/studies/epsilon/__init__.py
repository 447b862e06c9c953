"""ε from below: what uploads of neighbouring data sets show of a defense's ε, beside the ε that it states.

    neighbours D, D' ─► many uploads of each ─► a score ─► rates ─► lower bound on ε ─► verdict

A bound on ε from uploads holds with a confidence. A defense is 'broken' if its bound exceeds the ε that it states, in
the same relation and at the same δ. `verdict` computes this from the figures of a row.
"""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree

from gradleak.audit.labelled import named_defenses, text
from gradleak.core import errors, settings, trees
from gradleak.core.locks import alone
from gradleak.core.settings import setting
from gradleak.core.storage import Workdir, digest
from gradleak.defenses import Context, Defense, bind, differential_privacy, guarantees
from gradleak.defenses.defense import PLACES, norm_bound
from gradleak.defenses.differential_privacy import ACCOUNTANTS, Epsilon
from gradleak.engine.progress import end, note, reporter
from gradleak.federated import losses
from gradleak.federated.client import Client
from gradleak.federated.scenario import Scenario
from gradleak.modalities import IMAGES
from gradleak.models import Model
from gradleak.studies.epsilon.bounds import FEWEST, Measured, distinguished, one_run

__all__ = ['EpsilonAudit', 'EpsilonSettings', 'Measured', 'audit_epsilon', 'measure', 'release_scores', 'verdict']

RELATIONS = ('replace one', 'replace by zeros')  # those of uploads, whose receiver sees who sends
BROKEN, CONSISTENT, UNSTATED = 'broken', 'consistent', 'no stated ε'
# Method of a row -> whether it assumes Gaussian DP.
METHODS = {'distinguishing': False, 'distinguishing, Gaussian DP': True}
ONE_RUN = 'one run'
_PAIRS = 16  # uploads of either data set under one key, whose difference is the direction of the score
_DIMENSION = 8  # of the canary's update
_FAR = 1e4  # norm of a canary's contribution, in units of the clip
_ENTRIES = 2**21  # of the uploads that are made at once
_PLAIN = optax.sgd(1.0)  # one object, so that clients are equal
_LOOKED_AT = 64  # own contributions among which the farthest pair is looked for

Release = Callable[[jax.Array, jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True)
class EpsilonSettings:
  """How an ε is measured; each is an argument of `audit_epsilon` and a flag of launch/epsilon.py."""

  relation: str = setting(
    'replace one', "Which data sets are neighbours: 'replace one' or 'replace by zeros'.", choices=RELATIONS
  )
  delta: float = setting(1e-5, 'δ of every ε.', low=1e-300, high=1 - 1e-12)
  accountant: str = setting('pld', 'Accountant of the stated ε: pld (tighter) or rdp.', choices=ACCOUNTANTS)
  neighbours: str = setting(
    'canary',
    'canary: the worst case, contributions far beyond the clip; own: the farthest pair of the private samples.',
    choices=('canary', 'own'),
  )
  uploads: int = setting(20_000, 'Uploads of either data set; half of them choose the threshold.', low=8, integer=True)
  rounds: int = setting(1, 'Uploads of the same contribution that are seen together.', low=1, integer=True)
  samples: int = setting(1, 'Examples behind an upload.', low=1, integer=True)
  canaries: int = setting(
    1000, 'Canaries of the audit in one run, of an ε per example; 0 for none.', low=0, integer=True
  )
  confidence: float = setting(0.95, 'Confidence of every bound.', low=0.5, high=1 - 1e-9)


class EpsilonAudit(NamedTuple):
  """What was measured beside what is stated.

  Attributes:
    rows: one per defense, unit and method, plain JSON. 'stated' is ε, None where none is stated. 'relation', 'unit',
      'published', 'delta' and 'accountant' are what both are relative to. 'measured' is the lower bound, with
      'confidence'; the other columns are the fields of `Measured`, the settings, and 'verdict'.
    config: what identifies the run, plain JSON.
  """

  rows: list[dict[str, Any]]
  config: dict[str, Any]


def verdict(stated: float | None, measured: float) -> str:
  """Returns 'broken' if a lower bound on ε exceeds what is stated, 'consistent' if not, 'no stated ε' for None."""
  if stated is None or math.isinf(stated):
    return UNSTATED
  return BROKEN if measured > stated else CONSISTENT


def release_scores(key: jax.Array, release: Release, uploads: int) -> tuple[np.ndarray, np.ndarray]:
  """Returns scores (of uploads of the first data set, of the second one), float64 [uploads] each.

  The score is the linear discriminant, the logarithm of the likelihood ratio of two Gaussians with one covariance. Each
  of R rounds is projected onto the difference of the means. It is computed under common keys, in which additive noise
  cancels. The weights of the rounds are fitted to the first half of the uploads, so that a bound on the second half
  holds.

  Args:
    key: a typed key; all uploads are independent.
    release: (key, whether of the first data set: a boolean scalar) -> what one run sends, floats [R, D]; traceable.
    uploads: of each data set, ≥ 8.
  """
  pairing, first, second = jax.random.split(errors.check_key('key', key), 3)
  yes, no = jnp.asarray(True), jnp.asarray(False)
  keys = jax.random.split(pairing, _PAIRS)
  apart = jax.jit(lambda: jnp.mean(jax.lax.map(lambda one: release(one, yes) - release(one, no), keys), axis=0))()
  lengths = jnp.linalg.norm(apart, axis=1, keepdims=True)
  directions = apart / jnp.where(lengths > 0, lengths, 1.0)
  at_once = max(1, min(uploads, _ENTRIES // max(1, apart.size)))

  @jax.jit
  def projected(keys: jax.Array, inside: jax.Array) -> jax.Array:
    return jax.lax.map(lambda one: jnp.sum(release(one, inside) * directions, axis=1), keys, batch_size=at_once)

  sides = [
    np.asarray(projected(jax.random.split(one, uploads), which), np.float64)
    for one, which in ((first, yes), (second, no))
  ]
  fitted = [side[: uploads // 2] for side in sides]
  covariance = sum(np.cov(side, rowvar=False).reshape(len(apart), -1) for side in fitted) / 2
  ridge = 1e-9 * np.trace(covariance) / len(apart) + np.finfo(np.float32).tiny
  means = [side.mean(axis=0) for side in fitted]
  weights = np.linalg.solve(covariance + ridge * np.eye(len(apart)), means[0] - means[1])
  weights /= np.abs(weights).max() or 1.0
  return sides[0] @ weights, sides[1] @ weights


def measure(
  key: jax.Array,
  release: Release,
  *,
  delta: float,
  uploads: int = 20_000,
  confidence: float = 0.95,
  statistic: Callable[[jax.Array], jax.Array] | None = None,
) -> dict[str, Measured]:
  """Returns {method: lower bound on the ε of any function that releases something}, by `distinguished`.

  Args:
    key, release, uploads: as in `release_scores`.
    delta: δ.
    confidence: of each bound.
    statistic: what one run sends, floats [R, D] -> its score, such as a known logarithm of the likelihood ratio; by
      default it is fitted.
  """
  if statistic is not None:
    known = statistic
    scores = _known_scores(key, lambda one, inside: known(release(one, inside)), uploads)
  else:
    scores = release_scores(key, release, uploads)
  return {
    name: distinguished(*scores, delta=delta, confidence=confidence, gaussian=gaussian)
    for name, gaussian in METHODS.items()
  }


def _known_scores(key: jax.Array, scored: Release, uploads: int) -> tuple[np.ndarray, np.ndarray]:
  sides = zip(jax.random.split(errors.check_key('key', key)), (True, False), strict=True)
  return tuple(  # type: ignore[return-value]
    np.asarray(jax.jit(jax.vmap(scored, (0, None)))(jax.random.split(one, uploads), jnp.asarray(inside)))
    for one, inside in sides
  )


def audit_epsilon(
  key: Any,
  scenario: Scenario,
  defenses: Any,
  *,
  stated: Mapping[str, Epsilon] | None = None,
  settings: EpsilonSettings | None = None,
  workdir: Any = None,
  progress: str = 'auto',
  **changes: Any,
) -> EpsilonAudit:
  """Measures ε from below for each defense, and compares it with the ε that the defense states.

  The canary is the worst case: a linear model whose gradient is the sample itself, in the scenario's client. Its sample
  is 10⁴ times as long as the clip. Its neighbour is the opposite one, or zeros. Its client has no private layers, and
  no order of other samples. Plain SGD takes the place of a local optimizer that keeps the canary from the clip, as Adam
  with a small rate does. With neighbours='own' the scenario's client, model and samples are used, whose updates may be
  short of the clip, or point alike.

  An ε per example is also measured in one run: each of many orthogonal canaries, or its neighbour, is in by a coin.

  Args:
    key: a typed JAX key; the same key and settings give the same rows.
    scenario: see `gradleak.scenario`.
    defenses: as `gradleak.audit` takes them.
    stated: label of a defense -> the `Epsilon` that is claimed for it, in place of that of its `Mechanism`s.
    settings: `EpsilonSettings`.
    workdir: a folder; a defense that is complete there is not measured again.
    progress: 'auto', 'bar', 'lines' or 'none'.
    **changes: fields of `EpsilonSettings`.

  Returns:
    An `EpsilonAudit`. By chance, a correct mechanism is 'broken' in at most one minus the confidence of its rows.

  Raises:
    UsageError: for settings that cannot be run; for a claim in another relation, at another δ, or of fewer uploads
      than are seen together; with neighbours='own', for a client that takes no step.
  """
  key, chosen = errors.check_key('key', key, traced=False), _chosen(settings, changes)
  errors.check_instance('scenario', scenario, Scenario, 'what gradleak.scenario(…) returns')
  named, claims = named_defenses(defenses), dict(stated or {})
  for label, claim in claims.items():
    errors.check_choice('defense', label, [one.label for one in named])
    _check_claim(label, claim, chosen)
  config = {
    **scenario.settings,
    **dataclasses.asdict(chosen),
    'defenses': [one.label for one in named],
    'defense_texts': {one.label: f'{text(one)}; {claims.get(one.label, "")}' for one in named},
    'key': np.asarray(jax.random.key_data(key)).tolist(),
  }
  show, rows = reporter(progress), []
  with alone(workdir):
    store = None if workdir is None else Workdir(workdir, config, {}, grows={'defenses': 'defense_texts'})
    try:
      for number, (label, defense) in enumerate(named):
        name = digest({'defense': config['defense_texts'][label], 'label': label})[:8]
        part = None if store is None else store.load_part(name)
        if part is None:
          note(show, f'{label}, {number + 1} of {len(named)}: {chosen.uploads:,} uploads of either data set')
          found = _rows(key, scenario, label, defense, claims.get(label), chosen)
          if store is not None:
            store.save_part(name, found, {})
        rows += found if part is None else part[0]
    finally:
      end(show)
  return EpsilonAudit(rows, config)


def _chosen(given: EpsilonSettings | None, changes: dict) -> EpsilonSettings:
  made = settings.replaced(EpsilonSettings() if given is None else given, 'gradleak.audit_epsilon', **changes)
  settings.check(errors.check_instance('settings', made, EpsilonSettings, 'EpsilonSettings'))
  if made.neighbours == 'own' and made.relation != RELATIONS[0]:
    raise errors.UsageError(
      f"neighbours are 'own' in the relation {made.relation!r}, and no sample is known whose gradient is zero: choose "
      "'replace one', or neighbours='canary'"
    )
  if 0 < made.canaries < FEWEST:
    raise errors.UsageError(f'canaries is {made.canaries}, expected 0 for none, or at least {FEWEST}')
  return made


def _check_claim(label: str, claim: Any, chosen: EpsilonSettings) -> None:
  errors.check_instance(f'the ε of {label!r}', claim, Epsilon, 'an Epsilon of defenses.differential_privacy')
  wanted = chosen.relation, chosen.delta
  if (claim.relation, claim.delta) != wanted:
    raise errors.UsageError(
      f'the ε of {label!r} is stated for {claim.relation!r} at δ = {claim.delta:g}, and measured for {wanted[0]!r} at '
      f'δ = {wanted[1]:g}: give both the same'
    )
  together = 'one upload' if chosen.rounds == 1 else 'all uploads'
  if claim.published not in (together, 'all uploads'):  # what holds of all holds of one
    raise errors.UsageError(
      f'the ε of {label!r} is stated for {claim.published}, and measured for uploads of the same contribution that are '
      f'seen together (rounds={chosen.rounds}): state that of {together}'
    )


def stated_of(defense: Defense, client: Client, chosen: EpsilonSettings) -> list[Epsilon]:
  """Returns what a defense states of so many uploads: for each unit the least ε; nothing without a `Mechanism`."""
  epochs = client.epochs if client.share == 'delta' else 1
  least: dict[str, Epsilon] = {}
  for mechanism in guarantees.mechanisms(defense, epochs):
    found = differential_privacy.of_upload(
      mechanism, chosen.relation, uploads=chosen.rounds, delta=chosen.delta, accountant=chosen.accountant
    )
    if found.unit not in least or found.value < least[found.unit].value:
      least[found.unit] = found
  return list(least.values())


def _rows(
  key: jax.Array, scenario: Scenario, label: str, defense: Defense, claim: Epsilon | None, chosen: EpsilonSettings
) -> list[dict[str, Any]]:
  """Returns the rows of a defense, one per unit and method."""
  stated = [claim] if claim is not None else stated_of(defense, scenario.client, chosen)
  published = 'one upload' if chosen.rounds == 1 else 'all uploads'
  rows = []
  for one in stated or [Epsilon(math.inf, chosen.relation, 'client', published, delta=chosen.delta)]:
    key_of = jax.random.fold_in(key, ('client', 'example').index(one.unit))
    release = (_canary if chosen.neighbours == 'canary' else _own)(scenario, defense, one.unit, chosen)
    found = measure(key_of, release, delta=chosen.delta, uploads=chosen.uploads, confidence=chosen.confidence)
    if claim is not None or not stated:  # nobody states that this mechanism is Gaussian
      found = {method: measured for method, measured in found.items() if not METHODS[method]}
    if one.unit == 'example' and chosen.neighbours == 'canary' and chosen.canaries:
      found[ONE_RUN] = _in_one_run(jax.random.fold_in(key_of, 1), scenario, defense, chosen)
    rows += [_row(label, one, method, measured, chosen) for method, measured in found.items()]
  return rows


def _row(label: str, stated: Epsilon, method: str, measured: Measured, chosen: EpsilonSettings) -> dict[str, Any]:
  value = stated.value if math.isfinite(stated.value) else None
  return {
    'defense': label,
    'relation': stated.relation,
    'unit': stated.unit,
    'published': stated.published,
    'delta': stated.delta,
    'stated': value,
    'accountant': None if value is None else stated.accountant,
    'measured': measured.epsilon,
    'confidence': chosen.confidence,
    'method': method,
    'assumes': 'Gaussian DP' if METHODS.get(method) else '',
    'neighbours': chosen.neighbours,
    'rounds': chosen.rounds,
    **{name: found for name, found in measured._asdict().items() if name != 'epsilon'},
    'verdict': verdict(value, measured.epsilon),
  }


def _probe_init(key: jax.Array, sample_shape: Sequence[int]) -> dict[str, Any]:
  del key
  return {'params': {'weight': jnp.zeros(sample_shape, jnp.float32)}, 'round': {'sign': jnp.ones((), jnp.float32)}}


def _probe_apply(variables: Any, samples: jax.Array, train: bool = False, key: Any = None) -> tuple[jax.Array, dict]:
  del train, key
  weight = variables['params']['weight'] * variables['round']['sign']
  value = jnp.sum(samples * weight[None], axis=(1, 2, 3))
  return jnp.stack([value, -value], axis=1), {}


def _probe_loss(logits: jax.Array, targets: jax.Array) -> jax.Array:
  del targets
  return logits[:, 0]


PROBE = Model('canary', _probe_init, _probe_apply)  # the gradient of a sample is the sample, times the round's sign


def _probed(
  scenario: Scenario, defense: Defense, size: int, canaries: Callable[[float], jax.Array]
) -> tuple[Client, dict[str, Any], jax.Array]:
  """Returns (the scenario's client with the model of canaries under a defense, variables, samples).

  Args:
    scenario, defense: as `audit_epsilon` takes them.
    size: entries of a canary.
    canaries: the norm of a canary -> the samples with all canaries in, floats [N, size, 1, 1].
  """
  finite = [bound for stage in defense.at(*PLACES[:-1]) if math.isfinite(bound := norm_bound(stage))]
  bound, given = max(finite, default=1.0), scenario.client
  samples = canaries(_FAR * bound)
  bare = dataclasses.replace(
    given.undefended(),
    model=PROBE,
    loss=losses.wrap(_probe_loss),
    num_classes=2,
    augment=None,
    precision='float32',
    frozen=(),
    private=(),
    order=given.order if given.order and len(given.order[0]) == len(samples) else None,
    cohort=1,
    modality=IMAGES,
  )
  variables = _probe_init(jax.random.key(0), (size, 1, 1))
  if bare.share == 'delta' and not _reaches(bare, variables, samples, bound, bool(defense.at('step'))):
    bare = dataclasses.replace(bare, optimizer=_PLAIN)
  with _naming_layers(scenario, defense):
    try:
      client = bind(defense, Context(bare, variables, (size, 1, 1))).client(bare)
    except errors.UsageError as error:
      raise errors.UsageError(f"{error} (the canary's model has none: choose neighbours='own')") from error
    if _foreign(defense):
      targets = jnp.zeros(len(samples), jnp.int32)
      jax.eval_shape(client.local_update, jax.random.key(0), variables, samples, targets)
  return client, variables, samples


@contextlib.contextmanager
def _naming_layers(scenario: Scenario, defense: Defense) -> Iterator[None]:
  """Raises `UsageError` for what a user's own stage raises that it does not raise on the scenario's model."""
  try:
    yield
  except Exception as error:
    if isinstance(error, errors.UsageError) or not _foreign(defense):
      raise
    one = scenario.samples[:1], scenario.targets[:1]
    client = bind(defense, scenario.context).client(scenario.client)
    jax.eval_shape(client.local_update, jax.random.key(0), scenario.variables, *one)  # raises what is no such layer
    raise errors.UsageError(
      f"the defense {defense} needs what the canary's model does not have: choose neighbours='own' "
      f'({type(error).__name__}: {error})'
    ) from error


def _foreign(defense: Defense) -> bool:
  return any(stage.foreign for stage in defense.stages)


def _reaches(bare: Client, variables: Any, samples: jax.Array, bound: float, linear: bool) -> bool:
  """Returns whether the local optimizer carries canaries beyond the clip, as Adam's short steps do not.

  Args:
    bare: the undefended client of canaries, which shares its delta.
    variables: of its model.
    samples: with all canaries in.
    bound: the norm to exceed.
    linear: whether a delta has to be linear in the gradients, as noise of each step demands.
  """
  targets, flat = jnp.zeros(len(samples), jnp.int32), np.asarray(samples, np.float64).reshape(len(samples), -1)

  def lengths(client: Client, times: float) -> np.ndarray:
    sent = jax.jit(client.local_update)(None, variables, times * samples, targets).update
    return np.abs(flat @ np.asarray(ravel_pytree(sent)[0], np.float64))

  own, plain = lengths(bare, 1.0), lengths(dataclasses.replace(bare, optimizer=_PLAIN), 1.0)
  trained_on = plain > 0  # not what is left out of an epoch
  if not np.all((own > bound * np.linalg.norm(flat, axis=1))[trained_on]):
    return False
  return not linear or bool(np.allclose(lengths(bare, 2.0), 2 * own, rtol=1e-3))


def _sent(client: Client, variables: Any, key: jax.Array, samples: jax.Array, targets: jax.Array, rounds: int) -> Any:
  """Returns what a client sends in its rounds, floats [R, D]; the sign of a canary alternates between rounds."""
  numbers = jnp.arange(rounds)
  signs = {'round': {'sign': 1 - 2 * (numbers % 2).astype(jnp.float32)}} if client.model is PROBE else None
  keys = jax.vmap(jax.random.fold_in, (None, 0))(key, numbers)
  sent = client.in_turn(keys, variables, samples, targets, signs).update
  return jax.vmap(lambda update: ravel_pytree(update)[0])(sent)


def _canary(scenario: Scenario, defense: Defense, unit: str, chosen: EpsilonSettings) -> Release:
  """Returns the release of a canary and of its neighbour; other samples contribute zeros, of either unit."""
  del unit

  def filled(norm: float) -> jax.Array:
    canary = jnp.full((1, _DIMENSION, 1, 1), norm * chosen.samples / math.sqrt(_DIMENSION), jnp.float32)
    return jnp.concatenate([canary, jnp.zeros((chosen.samples - 1, _DIMENSION, 1, 1), jnp.float32)])

  client, variables, samples = _probed(scenario, defense, _DIMENSION, filled)
  canary, others = samples[:1], samples[1:]
  neighbour = -canary if chosen.relation == RELATIONS[0] else jnp.zeros_like(canary)
  targets = jnp.zeros(chosen.samples, jnp.int32)

  def release(key: jax.Array, inside: jax.Array) -> jax.Array:
    samples = jnp.concatenate([jnp.where(inside, canary, neighbour), others])
    return _sent(client, variables, key, samples, targets, chosen.rounds)

  return release


def _own(scenario: Scenario, defense: Defense, unit: str, chosen: EpsilonSettings) -> Release:
  """Returns the release of the two own contributions that are farthest apart, after clipping."""
  size = chosen.samples
  each = size if unit == 'client' else 1
  count = min(_LOOKED_AT, len(scenario.samples) // each)
  if count < 2 or len(scenario.samples) < size + 1:
    raise errors.UsageError(
      f'there are {len(scenario.samples)} private samples, too few for two neighbours of {size}: give more'
    )
  samples, targets = jnp.asarray(scenario.samples), jnp.asarray(scenario.targets)
  bound = min(map(norm_bound, defense.at(*PLACES[:-1])), default=math.inf)  # not what a server clips later

  @jax.jit
  def contributions() -> jax.Array:
    batches = [x[: count * each].reshape(count, each, *x.shape[1:]) for x in (samples, targets)]
    return jax.lax.map(
      lambda one: ravel_pytree(trees.clip(scenario.client.gradient(scenario.variables, *one), bound))[0], batches
    )

  vectors = np.asarray(contributions(), np.float64)
  squares = (vectors**2).sum(axis=1)
  distances = squares[:, None] + squares[None] - 2 * vectors @ vectors.T
  first, second = (int(i) for i in np.unravel_index(np.argmax(distances), distances.shape))
  places = [np.arange(one * each, (one + 1) * each) for one in (first, second)]
  if unit == 'example':
    rest = np.setdiff1d(np.arange(len(samples)), np.concatenate(places))[: size - 1]
    places = [np.concatenate([one, rest]) for one in places]
  if len({len(one) for one in places} | {size}) > 1:
    raise errors.UsageError(f'{len(samples)} private samples are too few for a batch of {size} beside two neighbours')
  client = bind(defense, scenario.context).client(scenario.client)
  (one, other), (its, others) = ([part[place] for place in places] for part in (samples, targets))
  _check_steps(scenario.client.undefended(), scenario.variables, one, its)

  def release(key: jax.Array, inside: jax.Array) -> jax.Array:
    batch = jnp.where(inside, one, other), jnp.where(inside, its, others)
    return _sent(client, scenario.variables, key, *batch, chosen.rounds)

  return release


def _check_steps(bare: Client, variables: Any, samples: jax.Array, targets: jax.Array) -> None:
  """Raises `UsageError` for a local training that takes no step, whose delta of zeros says nothing of an ε."""
  if bare.share != 'delta':
    return
  sent = jax.jit(bare.local_update)(None, variables, samples, targets).update
  if not any(np.any(leaf) for leaf in jax.tree.leaves(sent)):
    raise errors.UsageError(
      f'the local training leaves the weights as they are on samples={len(samples)}, as where the batches are fewer '
      "than `accumulate`: give more samples, or neighbours='canary'"
    )


def _in_one_run(key: jax.Array, scenario: Scenario, defense: Defense, chosen: EpsilonSettings) -> Measured:
  """Returns the bound by one upload, or one series of them, with many canaries; each has a coordinate of its own."""
  count = chosen.canaries
  client, variables, axes = _probed(
    scenario, defense, count, lambda norm: norm * count * jnp.eye(count, dtype=jnp.float32)[:, :, None, None]
  )
  targets = jnp.zeros(count, jnp.int32)
  absent = -1.0 if chosen.relation == RELATIONS[0] else 0.0

  @jax.jit
  def sent(key: jax.Array, coins: jax.Array) -> jax.Array:
    samples = jnp.where(coins, 1.0, absent)[:, None, None, None] * axes
    return _sent(client, variables, key, samples, targets, chosen.rounds)

  flipping, noise, pairing = jax.random.split(key, 3)
  coins = jax.random.bernoulli(flipping, 0.5, (count,))
  apart = sent(pairing, jnp.ones(count, bool)) - sent(pairing, jnp.zeros(count, bool))  # under one key noise cancels
  middle = (1 + absent) / 2 * apart  # between one that is in and its neighbour
  scores = jnp.sum((sent(noise, coins) - middle) * apart, axis=0)
  return one_run(scores, coins, delta=chosen.delta, confidence=chosen.confidence)
