r"""How likely an upload is, given each candidate of a list: the test of an attacker who needs no picture.

    candidate ─► simulated client, without its noise ─► expected update ─► log-likelihood of the upload

Between two candidates the likelihood ratio is the strongest test that there is, for any rate of false matches. Source:
Neyman, Pearson, On the Problem of the Most Efficient Tests of Statistical Hypotheses, Phil. Trans. R. Soc. A 1933. What
an attacker assumes of an upload follows from the traits of the defense, in `expected`:

- What is not random is simulated: pruning, top-k, clipping, Soteria.
- Declared noise leaves the simulation, and its density stands in its place. For noise on some of the entries, or of the
  groups of entries, that is a mixture.
- Entries that are not sent, or are no finite numbers, are not compared.
- Any other random defense is simulated several times, and the nearest of these uploads counts. Under declared noise,
  such as two noises or one that is rounded, their mean is among them: it has less of the noise.
- A client that augments its samples, drops out neurons or shuffles them is likewise simulated several times.
- A defense whose simulation is costly is not simulated at all: the direction of the bare update is compared. Where such
  a defense projects (DCS², eq. 11), its uploads are orthogonal to the bare update of their sample, or on its side.

The likelihood of an exact candidate is lost where the list holds an altered copy, such as a JPEG. Its pattern of
largest entries is not. So both are computed (`support`).
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gradleak.adaptive.base import Known, noiseless, vanishes
from gradleak.core.trees import Tree
from gradleak.defenses.defense import Bound, Context, Defense, Stage, bind
from gradleak.federated.client import COSTLY
from gradleak.threat import EVIDENCE

DRAWS = 8  # simulated uploads of a defense whose randomness has no density
ROUNDING = 1e-4  # of the root mean square of an upload: an entry that deviates by less has no noise
ORTHOGONAL = 3e-7  # cosine, at most, that rounding leaves of what float32 makes orthogonal: it has up to 2.3e-7
TOP = 0.05  # of the entries of a tensor: its largest ones
_EQUAL = 1e-6  # distance of two updates over their norm, of float32: below it they are equal
_ALIKE = 1 - _EQUAL**2 / 2  # their cosine
_DOUBLES = 2**24  # entries of updates in double precision at a time

MODELS = ('exact', 'noise', 'mixture', 'draws', 'direction', 'projected')


class Expected(NamedTuple):
  """What an attacker expects of the upload of a candidate.

  Attributes:
    model: one of `MODELS`: 'exact' (no noise), 'noise' (on every entry), 'mixture' (on some), 'draws', 'direction', and
      'projected', where an upload may also be orthogonal to the update.
    bound: the defense that is simulated on a candidate.
    draws: how many uploads of a candidate are simulated.
    variance: of the noise, shaped like the parameters.
    fraction: of the entries, or groups, that have noise.
    groups: the number of each entry's group; None where entries are chosen one by one.
    laplace: whether the noise is Laplace's; else it is Gaussian.
    masked: whether zeros are left out of the comparison.
    certain: whether nothing of a client is random but the defense, and its noise has the density of one draw.
    centred: whether the mean of the simulated uploads is one of those of which the nearest counts.
  """

  model: str
  bound: Bound
  draws: int
  variance: Tree
  fraction: float
  groups: Tree | None
  laplace: bool
  masked: bool
  certain: bool = True
  centred: bool = False

  @property
  def stated(self) -> bool:
    """Whether the density of the upload is that of the defense, so that a posterior follows from it."""
    return self.certain and self.model in ('noise', 'mixture')

  def drawn(self) -> 'Expected':
    """Returns the same of a client that is random itself: the nearest of several simulated uploads counts."""
    model = 'draws' if self.model == 'exact' else self.model
    return self._replace(model=model, draws=max(DRAWS, self.draws), certain=False)

  @property
  def variances(self) -> np.ndarray:
    """The variance of each entry in a row, float32 [P]."""
    return _row(self.variance)


def expected(bound: Bound, context: Context, num_samples: int) -> Expected:
  """Returns what an attacker who knows the defense expects of an upload.

  Args:
    bound: the defense, made for `context`.
    context: the `Context`.
    num_samples: samples behind the upload.
  """
  bound = bound.sent
  known = Known(bound, context, num_samples, 1, frozenset(EVIDENCE))
  stages = known.stages
  params = context.variables['params']
  nothing = jax.tree.map(lambda p: np.zeros((), np.float32), params)
  masked = any(stage.traits.sparsifies == 'mask' for stage in stages)

  def simulating(stages: list[Stage], model: str, draws: int = 1, zeros: bool = False) -> Expected:
    made = bind(Defense(tuple(stages)), context)
    return Expected(model, made, draws, nothing, 0.0, None, False, masked or zeros)

  if costly := [stage for stage in stages if _gradients(stage, context) >= COSTLY]:
    cheap = [m for m in stages if m not in costly and not m.traits.random]
    projected = any(m.traits.projects(m.settings) for m in costly) and len(cheap) + len(costly) == len(stages)
    zeros = any(m.traits.sparsifies == 'zeros' for m in stages)
    return simulating(cheap, 'projected' if projected else 'direction', zeros=zeros)
  noisy = [stage for stage in stages if stage.traits.noise is not None]
  chosen = [m for m in stages if m.traits.random and m.traits.noise is None and m.traits.sparsifies == 'mask']
  rest = [stage for stage in stages if stage not in noisy and stage not in chosen]
  variances = [known.noise_of(stage) for stage in noisy]
  first = stages.index(noisy[0]) if noisy else len(stages)
  additive = len(noisy) <= 1 and not any(m in rest for m in stages[first + 1 :])
  if any(m.traits.random for m in rest) or not additive or any(map(vanishes, variances)):
    return simulating(stages, 'draws', DRAWS)._replace(centred=bool(noisy))
  made = simulating([part for m in stages if m not in chosen for part in noiseless(m)], 'exact')
  if not noisy:
    return made
  noise, (variance,) = noisy[0].traits.noise, variances
  assert noise is not None
  # What is dropped at random is zero, and all that is sent has the noise.
  sends = bool(noisy[0].traits.sparsifies) and not any(part.traits.sparsifies for part in noiseless(noisy[0]))
  fraction = 1.0 if sends else min(1.0, float(noise.fraction(noisy[0].settings)))
  tree = jax.tree.map(
    lambda p, v: np.broadcast_to(np.asarray(v, np.float32), np.shape(p)),
    params,
    jax.tree.map(lambda p: variance, params) if isinstance(variance, float | int) else variance,
  )
  arguments = bound.arguments[bound.defense.stages.index(noisy[0])]
  # The noise of one local step is in the weights of the next one. A batch has no posterior.
  summed = num_samples == 1 and known.trains(noisy[0]) and context.client.num_steps(1) > 1
  return made._replace(
    model='noise' if fraction == 1 else 'mixture',
    variance=tree,
    fraction=fraction,
    groups=None if noise.groups is None or fraction == 1 else noise.groups(arguments),
    laplace=noise.distribution == 'laplace',
    masked=made.masked or sends,
    certain=not summed and noise.distribution in ('gaussian', 'laplace'),
  )


def _gradients(stage: Stage, context: Context) -> int:
  return int(stage.traits.gradients(context, stage.settings))


def flat(update: Tree) -> np.ndarray:
  """Returns the entries of updates in a row, float32 [U, P], where every leaf is [U, …]."""
  leaves = [np.asarray(leaf, np.float32) for leaf in jax.tree.leaves(update)]
  return np.concatenate([leaf.reshape(len(leaf), -1) for leaf in leaves], axis=1)


def _row(tree: Tree) -> np.ndarray:
  """Returns the entries of one tree, shaped like the parameters, in a row."""
  return flat(jax.tree.map(lambda leaf: np.asarray(leaf)[np.newaxis], tree))[0]


def finite(updates: np.ndarray, masks: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray | None]:
  """Returns updates [..., P] and which entries are compared, None for all: what is not finite is zero, and is not."""
  known = np.isfinite(updates)
  if known.all():
    return updates, masks
  return np.where(known, updates, np.float32(0)), known if masks is None else masks & known


def ruled_out(masks: np.ndarray | None, means: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
  """Returns what candidates would send [C, K, P], zeros where it is not finite, and whom that rules out, bool [U, C].

  The second is None where all is finite. An upload is not of a candidate who would send no finite number where the
  upload has one, [U, P] in `masks`.
  """
  known, usual = finite(means)
  if usual is None:
    return means, None
  compared = np.ones((1, means.shape[-1]), bool) if masks is None else masks
  clash = np.float32(~usual).reshape(-1, means.shape[-1]) @ np.float32(compared).T > 0
  return known, clash.reshape(*means.shape[:2], -1).all(axis=1).T


def log_likelihoods(given: Expected, updates: Any, masks: Any, means: Any) -> np.ndarray:
  """Returns the log-likelihood of each upload, given each candidate, floats [U, C].

  What all candidates share is left out where the noise is Gaussian and on every entry.

  Args:
    given: what is assumed.
    updates: the uploads, float32 [U, P].
    masks: which of their entries are compared, [U, P]; None for all.
    means: what the candidates would send, float32 [C, K, P]; of K simulated uploads the most likely one counts, or
      their mean where `given` says so.
  """
  scale = np.sqrt(np.mean(np.square(updates, dtype=np.float64), axis=1, keepdims=True))
  floor = np.maximum(np.float32(scale * ROUNDING) ** 2, np.float32(1e-30))
  if given.centred:
    means = np.concatenate([means, np.mean(means, axis=1, keepdims=True)], axis=1)
  number, draws, entries = means.shape
  each, variance = means.reshape(-1, entries), given.variances[np.newaxis]
  if given.model == 'mixture' or given.laplace:
    groups, count = None, 0
    if given.groups is not None:
      groups = _row(given.groups).astype(np.int32)
      count = int(groups.max()) + 1
    of = functools.partial(_of_means, given.model, given.laplace, count)
    found = np.asarray(of(updates, masks, each, floor, variance, groups, np.float32(given.fraction)))
  else:
    found = _in_double(given.model, updates, masks, each, variance, floor)
  return np.max(found.reshape(-1, number, draws), axis=-1)


def orthogonal(updates: np.ndarray, masks: np.ndarray | None, means: np.ndarray) -> np.ndarray:
  """Returns which uploads [U, P] are orthogonal to a candidate's update [C, K, P], to rounding, bool [U, C]."""
  number, draws, entries = means.shape
  own, both, squares = _products(updates, masks, means.reshape(-1, entries))
  lengths = np.sqrt(own * squares)
  found = (lengths > 0) & (np.abs(both) <= ORTHOGONAL * lengths)
  return found.reshape(-1, number, draws).any(axis=-1)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _of_means(
  model: str,
  laplace: bool,
  count: int,
  updates: Any,
  masks: Any,
  means: Any,
  floor: Any,
  variance: Any,
  groups: Any,
  fraction: Any,
) -> jax.Array:
  """Returns the log-likelihoods [U, C] of uploads [U, P], given means [C, P], under Laplace's noise or a mixture."""
  kept = jnp.ones_like(updates) if masks is None else masks.astype(jnp.float32)
  log_noisy, log_quiet = jnp.log(fraction), jnp.log1p(-fraction)

  def one(mean: jax.Array) -> jax.Array:
    residual = updates - mean[None]
    terms = (_laplace if laplace else _normal)(residual, variance + floor)
    if model == 'noise':
      return jnp.sum(terms * kept, -1)
    quiet = _normal(residual, floor)
    if groups is None:
      return jnp.sum(jnp.logaddexp(log_noisy + terms, log_quiet + quiet) * kept, -1)
    terms, quiet = (
      jax.vmap(lambda row: jax.ops.segment_sum(row, groups, count))(each * kept) for each in (terms, quiet)
    )
    return jnp.sum(jnp.logaddexp(log_noisy + terms, log_quiet + quiet), -1)

  return jax.lax.map(one, means).T


def _normal(residual: jax.Array, variance: jax.Array) -> jax.Array:
  """Returns the logarithm of the density of N(0, variance)."""
  return -0.5 * (jnp.square(residual) / variance + jnp.log(2 * jnp.pi * variance))


def _laplace(residual: jax.Array, variance: jax.Array) -> jax.Array:
  """Returns the logarithm of Laplace's density of this variance."""
  return -jnp.abs(residual) / jnp.sqrt(variance / 2) - 0.5 * jnp.log(2 * variance)


def _in_double(
  model: str, updates: np.ndarray, masks: np.ndarray | None, means: np.ndarray, variance: np.ndarray, floor: np.ndarray
) -> np.ndarray:
  """Returns the log-likelihoods, float64 [U, C], of uploads [U, P], given means [C, P], under the other models.

  Updates of one class may differ by less than float32 keeps of their products.
  """
  compared = means.shape[-1] if masks is None else np.sum(masks, axis=-1, keepdims=True)
  if model in ('direction', 'projected'):
    cosine = np.clip(cosines(updates, masks, means), 0, _ALIKE)
    if model == 'projected':
      cosine[orthogonal(updates, masks, means[:, np.newaxis])] = _ALIKE
    return -0.5 * compared * np.log1p(-np.square(cosine))
  own, both, squares = _products(updates, masks, means, (variance, floor) if model == 'noise' else None)
  energy = own - 2 * both + squares
  if model == 'draws':
    return -0.5 * compared * np.log(np.maximum(energy, _EQUAL**2 * own + 1e-30))
  return -0.5 * energy / (floor if model == 'exact' else 1)


def cosines(updates: Any, masks: Any, means: Any) -> np.ndarray:
  """Returns the cosine of each upload [U, P] and each candidate's update [C, P], float64 [U, C]."""
  own, both, squares = _products(updates, masks, means)
  return both / np.maximum(np.sqrt(own * squares), 1e-30)


def _products(updates: Any, masks: Any, means: Any, variances: tuple | None = None) -> tuple[Any, Any, Any]:
  """Returns the products of uploads [U, P] with themselves, with [C, P], and of these with themselves, float64 [U, C].

  Some entries are computed at a time: the double precision of all would fill the memory.

  Args:
    updates, masks, means: as `log_likelihoods` takes them, but for the draws.
    variances: two that the products are divided by the sum of, [1, P] and [U, 1]; None for 1.
  """
  own, both, squares = (np.zeros((len(updates), number)) for number in (1, len(means), len(means)))
  size = max(1, _DOUBLES // (len(updates) + len(means)))
  for first in range(0, means.shape[-1], size):
    part = slice(first, first + size)
    one, other = (np.asarray(each[:, part], np.float64) for each in (updates, means))
    weights = np.ones((1, one.shape[1])) if masks is None else np.asarray(masks[:, part], np.float64)
    if variances is not None:
      weights = weights / (variances[0][:, part] + variances[1])
    weighed = one * weights
    own += np.sum(weighed * one, axis=-1, keepdims=True)
    both += weighed @ other.T
    squares += weights @ np.square(other).T
  return own, both, squares


def patterns(updates: np.ndarray, sizes: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
  """Returns the pattern of each upload, bool [U, P], and how many entries of each tensor it has, int [U, tensors].

  Where more than a tenth of a tensor are zeros, or not finite, the pattern is its other entries. Else it is the largest
  entries of the tensor, the fraction `TOP`.
  """
  found, counts = [], []
  updates, _ = finite(updates, None)
  for part in np.split(updates, np.cumsum(sizes)[:-1], axis=1):
    sent, size = np.count_nonzero(part, axis=1), part.shape[1]
    count = np.where(sent < 0.9 * size, sent, max(1, round(TOP * size)))
    found.append(_largest(np.abs(part), count) & (part != 0))
    counts.append(count)
  return np.concatenate(found, axis=1), np.stack(counts, axis=1)


def largest_as_many(updates: np.ndarray, kept: np.ndarray, sizes: tuple[int, ...]) -> np.ndarray:
  """Returns the largest entries of updates [U, P], bool: as many of each tensor as others keep, bool [U, P]."""
  ends = np.cumsum(sizes)[:-1]
  parts = zip(np.split(np.abs(updates), ends, axis=1), np.split(kept, ends, axis=1), strict=True)
  return np.concatenate([_largest(part, np.count_nonzero(own, axis=1)) for part, own in parts], axis=1)


def support(pattern: np.ndarray, counts: np.ndarray, means: np.ndarray, sizes: tuple[int, ...]) -> np.ndarray:
  """Returns which fraction of each upload's pattern the largest entries of each candidate's update are, [U, C].

  Entries that are as large as the least of them count, too, and zeros never.

  Args:
    pattern, counts: of `patterns`.
    means: the bare updates of the candidates, [C, P].
    sizes: the number of entries of each tensor.
  """
  shared = np.zeros((len(pattern), len(means)), np.float32)
  magnitudes = np.abs(means)
  rising = [np.sort(part, axis=1) for part in np.split(magnitudes, np.cumsum(sizes)[:-1], axis=1)]
  for several in np.unique(counts, axis=0):
    alike = np.all(counts == several, axis=1)
    least = [
      part[:, size - c] if c else np.full(len(part), np.inf)
      for part, size, c in zip(rising, sizes, several, strict=True)
    ]
    top = (magnitudes > 0) & (magnitudes >= np.repeat(np.stack(least, axis=1), sizes, axis=1))
    shared[alike] = np.asarray(_product(pattern[alike], top))
  return shared / np.maximum(pattern.sum(axis=1, keepdims=True), 1)


@jax.jit
def _product(a: jax.Array, b: jax.Array) -> jax.Array:
  return a.astype(jnp.float32) @ b.astype(jnp.float32).T


def _largest(sizes: np.ndarray, count: np.ndarray) -> np.ndarray:
  """Returns which entries of each row are among its `count` largest ones, bool; of equal ones any."""
  made, width = np.zeros(sizes.shape, bool), sizes.shape[1]
  for row, (values, number) in enumerate(zip(sizes, count.tolist(), strict=True)):
    if number >= width:
      made[row] = True
    elif number:
      made[row, np.argpartition(values, width - number)[width - number :]] = True
  return made
