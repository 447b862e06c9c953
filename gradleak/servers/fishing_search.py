"""The rounds of fishing: a last layer with a threshold, moved until the update is that of one sample (Wen et al. 2022).

The server and the attack of `fishing` are one round of class fishing, or a search of several rounds. This file says
what each round sends, and what its answer means.
"""

from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gradleak.attacks.dense import first_dense_layer
from gradleak.core import errors, trees
from gradleak.core.settings import Choice, Range, ranged
from gradleak.core.trees import Tree
from gradleak.models import Model
from gradleak.models.model import require
from gradleak.servers.base import replaced

WEIGHT = 0.5  # of the target's row, as in the published code
# The bias of all other classes: 1,000 in the published code, which logits of wide networks exceed; none reaches this.
BIAS = 1e20

# How far a count of samples may be from a whole number, because of rounding and samples close to a threshold.
ROUNDING = 0.02
# A sample is at the threshold if its logit of the target is smaller than this.
AT_THRESHOLD = 0.1

Class = Annotated[int, Range(0, 2**31 - 1)]  # below the number of classes, once that is known
Searching = Annotated[str, Choice(('published', 'difference'))]
Multiplier = Annotated[float, Range(1e-6, finite=True)]
Queries = Annotated[int, Range(3)]


# ---- The last layer.


def class_fished(model: Model, variables: dict, sample_shape: tuple[int, ...], target: int) -> dict:
  """Returns the variables with the last layer of class fishing; the bias of the target is unchanged."""
  kernel, bias = last_layer(model, sample_shape, variables['params'])
  weights, biases = (trees.get(variables['params'], path) for path in (kernel, bias))
  chosen = jnp.arange(biases.shape[0], dtype=jnp.int32) == target
  weights = jnp.broadcast_to(jnp.where(chosen, WEIGHT, 0.0).reshape(1, -1), weights.shape)
  biases = jnp.where(chosen, biases, jnp.asarray(BIAS, biases.dtype))
  return {**variables, 'params': replaced(variables['params'], {kernel: weights, bias: biases})}


def last_layer(model: Model, sample_shape: tuple[int, ...], params: Tree) -> tuple[tuple[str, ...], tuple[str, ...]]:
  """Returns the paths of the (kernel, bias) of the last layer.

  Raises:
    UsageError: if it is not dense with a bias, or the model does not list its layers.
  """
  layers = require(model, 'layers')(tuple(sample_shape))
  try:
    return first_dense_layer(layers[-1:], params)
  except errors.UsageError as error:
    raise errors.UsageError(
      f'fishing sets the weights and biases of the last layer, and that of {model.name!r} is no dense layer with a bias'
    ) from error


def check_target(target: int, num_classes: int) -> None:
  """Raises `UsageError` unless `target` is a class."""
  errors.check_number('target', target, low=0, high=num_classes - 1, integer=True)


# ---- The rounds.


class Fished(NamedTuple):
  """What one round of class fishing, or several of feature fishing, found.

  Attributes:
    variables: those of the last query: the gradient of the sample at them is N times `update`.
    update: a tree shaped like the parameters; `class_fishing` takes it as the upload at `variables`.
    features: the input of the sample to the last layer, [features].
    samples: estimated number of samples behind the update; 1 for one alone.
    alone: whether the gradient of the last layer tells that the update is that of one sample.
    queries: number of rounds.
  """

  variables: dict
  update: Tree
  features: np.ndarray
  samples: float
  alone: bool
  queries: int


class Answer(NamedTuple):
  """What one round with a threshold returned.

  Attributes:
    round: its number; class fishing is round 1.
    at: the threshold θ.
    sharpness: the factor of the direction u.
    row: N·∂W of the target's row, float64 [features].
    count: N·∂b of the target: −1 for each of its samples below θ, +1 for each sample of another class above.
    update: the upload; None when the search no longer needs it.
  """

  round: int
  at: float
  sharpness: float
  row: np.ndarray
  count: float  # type: ignore[assignment]
  update: Tree | None


class Plan(NamedTuple):
  """What is the same in all rounds of feature fishing.

  Attributes:
    variables: those of class fishing.
    layer: paths of (kernel, bias) of the last layer.
    num_samples: N, the batch size.
    target, method, multiplier, max_queries: see `fish`.
    public: (mean [features], covariance [features, features]) of the features of public images, or None.
  """

  variables: dict
  layer: tuple[tuple[str, ...], tuple[str, ...]]
  num_samples: int
  target: int
  method: str
  multiplier: float
  max_queries: int
  public: tuple[np.ndarray, np.ndarray] | None


class Search(NamedTuple):
  """State of feature fishing on one client.

  Attributes:
    plan: see `Plan`.
    over: whether no further round is needed.
    fished: what was found; while the search is not over, what the last round alone returned. None before that.
    direction: u, [features]; None before the first answer.
    mean: the mean of u·f over the samples of the class, where the search starts.
    number: number of samples of the class.
    threshold: (θ, sharpness) of the next round; None in class fishing's.
    answers: of the rounds after class fishing.
  """

  plan: Plan
  over: bool = False
  fished: Fished | None = None
  direction: np.ndarray | None = None
  mean: float = 0.0
  number: float = 0.0
  threshold: tuple[float, float] | None = None
  answers: tuple[Answer, ...] = ()


def class_query(
  query: Callable[[dict], Tree],
  model: Model,
  variables: dict,
  sample_shape: tuple[int, ...],
  num_samples: int,
  *,
  target: int = 0,
) -> Fished:
  """Returns what the one round of class fishing finds; its features are the mean over the class.

  Args:
    query, model, variables, sample_shape, num_samples, target: see `fish`.
  """
  sent = class_fished(model, variables, sample_shape, target)
  return _class_answer(sent, query(sent), last_layer(model, sample_shape, sent['params']), target, num_samples)


@ranged
def fish(
  query: Callable[[dict], Tree],
  model: Model,
  variables: dict,
  sample_shape: tuple[int, ...],
  num_samples: int,
  *,
  target: Class = 0,
  method: Searching = 'published',
  public: np.ndarray | None = None,
  multiplier: Multiplier = 300.0,
  max_queries: Queries = 64,
) -> Fished:
  """Isolates one of several samples of a class, on the host; every query is one more round with the same batch.

  The first query is class fishing. For the target's row, ∂W/∂b is the mean of the features of its samples, and −N·∂b
  their number. From the second query on, the weights of the target are multiplier·u and its bias is −multiplier·θ. Here
  u is a direction in the space of features; all other weights and biases are 0. For s = u·f, a sample with s > θ then
  has probability 1 for the target, any other has probability 0. So the samples of the class with s < θ have a gradient,
  and those of **other** classes with s > θ.

  'published' takes the largest of the mean features for u, and ∂W/∂b of the query before for θ, until θ stays the same.
  The lowest sample of the class is then at θ. That sample is isolated if no sample of another class is above.
  The variant 'difference' (ours) looks for two thresholds with one sample of the batch between them, the highest of all
  along u. The difference of the two updates is the gradient of that sample for the target's label, whichever samples
  contribute to both. The reason is that the label's part of the update is linear in the row of θ and cancels. The
  highest sample need not be of the target class. With `public` images it nearly always is, since u is then Fisher's
  discriminant of the class instead of one feature.

  Args:
    query: variables -> the gradient, the client's mean over its batch. A delta of one step with the learning rate η
      must be divided by −η.
    model: the `Model`.
    variables: of the honest model.
    sample_shape: (H, W, C).
    num_samples: N, the batch size.
    target: the class.
    method: 'published' or 'difference'.
    public: images [M, H, W, C] that the server holds. M should be several times the number of features.
    multiplier: 300 in the published code; 'difference' raises it where samples are too close.
    max_queries: the search ends after this many rounds, whatever it has found.

  Returns:
    `Fished`. If the class has one sample, the result of class fishing; if it has none, likewise, with `alone` False.

  Raises:
    UsageError: for a target that is no class, a model that does not fit, or public images with constant
      features.
  """
  settings: dict[str, Any] = {'target': target, 'method': method, 'multiplier': multiplier, 'max_queries': max_queries}
  search = begin(model, variables, sample_shape, num_samples, public=public, **settings)
  while not search.over:
    search = receive(search, query(send(search)))
  return search.fished  # type: ignore[return-value]


def begin(
  model: Model,
  variables: dict,
  sample_shape: tuple[int, ...],
  num_samples: int,
  *,
  target: int,
  method: str,
  public: np.ndarray | None,
  multiplier: float,
  max_queries: int,
) -> Search:
  """Returns the `Search` before its first round; the arguments are those of `fish`."""
  layer = last_layer(model, sample_shape, variables['params'])
  check_target(target, trees.get(variables['params'], layer[1]).shape[0])
  sent = class_fished(model, variables, sample_shape, target)
  known = None if public is None else _feature_statistics(model, sent, public)
  return Search(Plan(sent, layer, num_samples, target, method, multiplier, max_queries, known))


def send(search: Search) -> dict:
  """Returns the variables of the next round."""
  return search.plan.variables if search.threshold is None else _with_threshold(search, *search.threshold)


def receive(search: Search, update: Tree) -> Search:
  """Returns the `Search` after one more round; the update is a tree of arrays, the upload at `send(search)`."""
  plan = search.plan
  if search.threshold is None:
    first = _class_answer(plan.variables, update, plan.layer, plan.target, plan.num_samples)
    if first.alone or not 0.5 < first.samples < plan.num_samples + 0.5:
      return search._replace(over=True, fished=first)
    direction = _direction(first.features, plan.public)
    mean = float(direction @ first.features)
    return _replayed(search._replace(fished=first, direction=direction, mean=mean, number=first.samples))
  row, count = _target_share(update, plan.layer, plan.target, plan.num_samples)
  answer = Answer(len(search.answers) + 2, *search.threshold, row, count, update)
  last = _fished(search, answer, update, row, count, -count, False)
  return _replayed(search._replace(fished=last, answers=(*search.answers, answer)))


def _replayed(search):
  """Returns the `Search` with the next threshold, or over, by running its method again on all answers so far."""
  seen = []
  rounds = _METHODS[search.plan.method](search, lambda: len(seen) < search.plan.max_queries - 2)
  try:
    at, sharpness, needed = next(rounds)
    for answer in search.answers:
      seen.append(answer)
      at, sharpness, needed = rounds.send(answer)
  except StopIteration as end:
    return search._replace(over=True, fished=end.value._replace(queries=len(seen) + 1), answers=())
  kept = {answer.round for answer in needed}
  answers = tuple(answer if answer.round in kept else answer._replace(update=None) for answer in search.answers)
  return search._replace(threshold=(at, sharpness), answers=answers)


def _descent(search, more):
  """The published search: θ ← u·∂W/∂b of the samples below θ, until the lowest of them is at θ itself.

  The logits of that sample are then all equal, and its part of the count is −(1 − 1/classes).

  Args:
    search: after class fishing.
    more: () -> whether another two rounds are allowed.

  Yields:
    (θ, sharpness, the earlier answers whose updates are still needed); the `Answer` is sent to it.

  Returns:
    `Fished`.
  """
  plan, at = search.plan, search.mean
  own = 1 - 1 / trees.get(plan.variables['params'], plan.layer[1]).shape[0]
  while True:
    answer = yield at, plan.multiplier, ()
    found = float(search.direction @ answer.row) / answer.count if answer.count else np.inf
    stable = abs(found - at) < AT_THRESHOLD / plan.multiplier
    if stable or not more() or not np.isfinite(found):
      # Samples of other classes above θ add whole numbers to the count. They are not detected if as many samples of
      # the class are below θ.
      samples = -answer.count / own
      alone = bool(stable and abs(samples - 1) < ROUNDING)
      return _fished(search, answer, answer.update, answer.row, answer.count, samples, alone)
    at = found


def _highest(search, more):
  """Bisects for θ_low and θ_high around the one highest sample along u; the result is the difference of their rounds.

  N·∂b + number = Σ p over all samples: how many are above θ, of any class. If it is not a whole number, a sample is in
  the transition of the softmax, which is then made steeper. Arguments, yields and result are those of `_descent`.
  """
  at, sharpness = search.mean, search.plan.multiplier
  step = 4 / sharpness
  low, high = at, at + max(abs(at), 10 / sharpness)

  def above(answer):
    return answer.count + search.number

  below = yield low, sharpness, ()
  while above(below) < 1 - ROUNDING and more():  # no sample above the mean
    high, low, step = low + 4 / sharpness, low - step, 2 * step
    below = yield low, sharpness, ()
  beyond = yield high, sharpness, (below,)
  while above(beyond) > ROUNDING and more():
    reach = 2 * (high - low)
    if above(beyond) > 1 - ROUNDING:
      low, below = high, beyond
    high += reach
    beyond = yield high, sharpness, (below,)

  def alone():
    one = below.count - beyond.count
    inside = abs(one - 1) < ROUNDING and low < float(search.direction @ (below.row - beyond.row)) / one < high
    return bool(inside and abs(above(beyond)) < ROUNDING)

  asked_at = sharpness
  while not alone() and more():
    if abs(above(below) - 1) < ROUNDING and above(beyond) < ROUNDING and asked_at != sharpness:
      asked_at = sharpness
      below = yield low, sharpness, ()
      beyond = yield high, sharpness, (below,)
      continue
    middle = (low + high) / 2
    between = yield middle, sharpness, (below, beyond)
    if above(between) > 1 - ROUNDING:
      low, below = middle, between
    elif above(between) < ROUNDING:
      high, beyond = middle, between
    else:
      sharpness *= 4
  # At θ_high the sample has probability 0 for the target, so this is its whole gradient for the target's label.
  update, row, count = trees.subtract(beyond.update, below.update), beyond.row - below.row, beyond.count - below.count
  return _fished(search, beyond, update, row, count, -count, alone())


_METHODS = {'published': _descent, 'difference': _highest}


def _class_answer(variables, update, layer, target, num_samples):
  """Returns what the round of class fishing found, a `Fished`."""
  row, count = _target_share(update, layer, target, num_samples)
  features = row / count if count else np.zeros_like(row)
  return Fished(variables, update, features, -count, abs(count + 1) < ROUNDING, 1)


def _fished(search, answer, update, row, count, samples, alone):
  """Returns the `Fished` of an update at the variables of an answer."""
  features = row / count if count else np.zeros_like(row)
  variables = _with_threshold(search, answer.at, answer.sharpness)
  return Fished(variables, update, features, samples, alone, answer.round)


def _target_share(update, layer, target, num_samples):
  """Returns N·∂W of the target's row, float64 [features], and N·∂b; `layer` is the paths of (kernel, bias)."""
  kernel, bias = (trees.get(update, path) for path in layer)
  return np.asarray(kernel, np.float64)[:, target] * num_samples, float(bias[target]) * num_samples


def _with_threshold(search, at, sharpness):
  """Returns the variables of a round: probability 1 for the target where u·f > θ, up to the sharpness."""
  plan = search.plan
  weights, biases = (np.zeros(trees.get(plan.variables['params'], path).shape) for path in plan.layer)
  weights[:, plan.target] = sharpness * search.direction
  biases[plan.target] = -sharpness * at
  params = replaced(plan.variables['params'], dict(zip(plan.layer, (weights, biases), strict=True)))
  return {**plan.variables, 'params': params}


def _direction(mean, public):
  """Returns u of the class's mean features: the largest one, or, given public features, Fisher's discriminant.

  Σ⁻¹(mean − the public mean) with the public covariance Σ, scaled so that public features have variance 1 along it.
  """
  if public is None:
    return np.eye(mean.size)[np.argmax(mean)]
  centre, covariance = public
  direction = np.linalg.solve(covariance, mean - centre)
  return direction / np.sqrt(direction @ covariance @ direction)


def _feature_statistics(model, variables, samples):
  """Returns (mean, covariance) of the features of samples [M, …]; the covariance is regularised by 1e-6.

  Raises:
    UsageError: where no feature varies.
  """
  samples = jnp.asarray(samples, model.samples(1, samples.shape[1:], wide=False).dtype)
  features = jax.jit(require(model, 'features'))(variables, samples)
  features = np.asarray(features, np.float64)
  covariance = np.cov(features.T)
  if not np.trace(covariance) > 0:
    raise errors.UsageError(
      "all public samples have the same features, so no direction separates a class: give other samples as 'public', "
      'or another model'
    )
  size = features.shape[1]
  return features.mean(axis=0), covariance + 1e-6 * np.trace(covariance) / size * np.eye(size)
