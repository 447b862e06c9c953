"""Fishing: a last layer in which one sample of a large batch alone has a gradient (Wen et al. 2022).

The server changes no architecture, only the numbers of the last dense layer. **Class fishing** leaves a gradient to the
samples of one class: where that class has one sample in the batch, the update of everything in front of the last layer
is that sample's, divided by the batch size, and gradient matching goes on as for a batch of one. **Feature fishing**
tells several samples of the class apart by a threshold on a feature, over several rounds with the same batch.

Both need cross-entropy, one step, and BatchNorm on running statistics, which the published code switches on at the
client. On the batch's statistics every other sample is in the gradient, through mean and variance.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gradleak import errors, trees
from gradleak.attacks import closed_form, presets
from gradleak.attacks.base import Attack
from gradleak.federated.losses import cross_entropy
from gradleak.models import model as models

INNER = {'csdlg': presets.csdlg, 'csdlg_fast': presets.csdlg_fast, 'gia': presets.gia, 'gs': presets.gs}
STATISTICS = ('running', 'public')

WEIGHT = 0.5  # of the target's row, and the bias of all other classes, as in the published code
BIAS = 1000.0


def server(key, scenario, batch_size, *, target: int = 0, statistics: str = 'running'):
  """Returns the `Scenario` with the model of a server that fishes for the class `target`.

  The last layer's rows are 0 but the target's, which is 0.5; its biases 1000 but the target's. Whatever the input, the
  target then has probability 0, so that a sample of another class has no gradient in front of this layer.

  Args:
    key: unused: there is nothing random about it.
    scenario: the honest one.
    batch_size: unused: it works for any.
    target: the class.
    statistics: what BatchNorm's running statistics are sent as: 'running', those of the honest model, or 'public',
      those that its layers have on the public images. A client with `batch_norm='train'` does not use them, but the
      attacker simulates with them, and those of an untrained model are no data's.

  Raises:
    UsageError: for a target that is no class, a last layer that is not dense with a bias, a loss other than
      cross-entropy, or no public images where they are asked for.
  """
  del key, batch_size
  check_target(target, scenario.client.num_classes)
  if scenario.client.loss is not cross_entropy:
    raise errors.UsageError('fishing needs the loss cross_entropy: of any other, a probability of 0 leaves no gradient')
  if statistics not in STATISTICS:
    raise errors.unknown('statistics', statistics, STATISTICS)
  variables = class_fished(scenario.client.model, scenario.variables, scenario.images.shape[1:], target)
  if statistics == 'public':
    if scenario.public is None:
      raise errors.UsageError(
        "statistics='public' needs images that everyone holds: give public=(images, labels) to gradleak.scenario"
      )
    if variables.get('batch_stats'):
      variables |= {'batch_stats': batch_statistics(scenario.client.model, variables, scenario.public[0])}
  return scenario._replace(variables=variables)


def class_fishing(
  client,
  *,
  target: int = 0,
  statistics: str = 'running',
  inner: str = 'csdlg',
  steps: int = 24_000,
  tv: float = 1e-4,
  start: str = 'normal',
):
  """Returns the attack on what comes back from a client of `server`: gradient matching of the one sample.

  The observed update times N is matched by one image with the target's label; of the last layer's rows only the
  target's is compared, since in the others every sample has its share. BatchNorm is simulated on the running
  statistics. With several samples of the class in the batch it matches their sum, and with none there is nothing to
  match.

  Args:
    client: the `Client` that is simulated.
    target, statistics: as `server` takes them.
    inner: the gradient matching, a name of `INNER`: Geiping's, as in the paper, or a faster one.
    steps, tv, start: its settings.
  """
  check_target(target, 1 << 31 if client is None else client.num_classes)
  if statistics not in STATISTICS:
    raise errors.unknown('statistics', statistics, STATISTICS)
  if inner not in INNER:
    raise errors.unknown('inner attack', inner, INNER)
  single = None if client is None else dataclasses.replace(client, batch_norm='eval', epochs=1, batch_size=None)
  attack = INNER[inner](single, steps=steps, tv=tv, start=start)

  def seen(observation):
    return isolated(single.model, observation, target)

  def objective(observation, images, labels):
    sample = jnp.argmax(labels[:, target])
    value = attack.objective(seen(observation), images[sample][None], labels[sample][None])
    return jnp.where(jnp.argmax(labels[sample]) == target, value, jnp.nan)

  return Attack(
    lambda key, observation: attack.init(key, seen(observation)),
    lambda state, observation: attack.step(state, seen(observation)),
    lambda state, observation: attack.reconstruct(state, seen(observation)),
    objective,
    attack.num_steps,
    'unused',
  )


def isolated(model, observation, target):
  """Returns the observation of one sample of class `target` that stands in the observation of a batch of N.

  The clipping that the attacker knows of was measured on all rows of the last layer, so it says nothing here.
  """
  number, labels = observation.image_shape[0], observation.labels
  compared = own_share(model, observation.image_shape[1:], observation.update, target)
  if observation.compared is not None:
    compared = jax.tree.map(jnp.logical_and, observation.compared, compared)
  return dataclasses.replace(
    observation,
    update=jax.tree.map(lambda x: x * jnp.asarray(number, x.dtype), observation.update),
    labels=jax.nn.one_hot(jnp.full(1, target), observation.num_classes, dtype=labels.dtype),
    knowledge=dataclasses.replace(observation.knowledge, labels='known'),
    image_shape=(1, *observation.image_shape[1:]),
    compared=compared,
    noise=observation.noise * number**2,
    clip=jnp.inf,
  )


def own_share(model, image_shape, update, target):
  """Returns a tree of boolean masks: True but in the last layer's rows of other classes, where all samples stand."""
  kernel, bias = last_layer(model, image_shape, update)
  row = jnp.arange(trees.get(update, bias).shape[0], dtype=jnp.int32) == target
  masks = {kernel: row.reshape(1, -1), bias: row}
  return jax.tree_util.tree_map_with_path(lambda path, _: masks.get(trees.path_names(path), jnp.ones((), bool)), update)


class Fished(NamedTuple):
  """What one round of class fishing, or several of feature fishing, found.

  Attributes:
    variables: those of the last query: the sample's gradient at them is N times `update`.
    update: a tree shaped like the parameters; `class_fishing` takes it as what came back from `variables`.
    features: the sample's input to the last layer, [features].
    samples: how many samples the update seems to hold; 1 for one alone.
    alone: whether it holds one sample alone, as far as the last layer's gradient tells.
    queries: rounds that it took.
  """

  variables: dict
  update: object
  features: np.ndarray
  samples: float
  alone: bool
  queries: int


def class_query(query, model, variables, image_shape, num_samples, *, target=0):
  """Returns what the one round of class fishing finds, a `Fished`; its features are the mean over the class.

  The arguments are those of `feature_fishing`.
  """
  sent = class_fished(model, variables, image_shape, target)
  update = query(sent)
  row, count = _answer(update, last_layer(model, image_shape, update), target, num_samples)
  features = row / count if count else np.zeros_like(row)
  return Fished(sent, update, features, -count, abs(count + 1) < 0.02, 1)


def feature_fishing(
  query,
  model,
  variables,
  image_shape,
  num_samples,
  *,
  target=0,
  method='published',
  public=None,
  multiplier=300.0,
  max_queries=64,
):
  """Isolates one of several samples of a class; a host function, every query one more round with the same batch.

  The first query is class fishing: for the target's row, ∂W/∂b is the mean of its samples' features, and −N·∂b their
  number. From the second on that row of the last layer is multiplier·u with the bias −multiplier·θ, u a direction in
  the space of features, and all other rows and biases are 0: with s = u·f, a sample with s > θ is taken for the target
  for sure, any other is not. So the samples of the class with s < θ have a gradient, and those of **other** classes
  with s > θ.

  'published' takes for u the largest of the mean features, and for θ the ∂W/∂b of the query before, until it stays the
  same: the class's lowest sample stands at θ. It is alone where no other class reaches that high. 'difference' (ours)
  looks for two thresholds between which one sample of the batch stands, the highest of all along u. The difference of
  the two updates is that sample's gradient for the target's label, whoever else has one: what a label adds to the
  update is linear in θ's row and cancels. Nothing says that the highest sample is of the target class; with `public`
  images it nearly always is, since u is then Fisher's discriminant of the class instead of a single feature.

  Args:
    query: variables -> the gradient, the client's mean over its batch; a delta of one step of rate η is to be divided
      by −η.
    model: the `Model`.
    variables: the honest ones.
    image_shape: (H, W, C).
    num_samples: N, the batch size.
    target: the class.
    method: 'published' or 'difference'.
    public: images [M, H, W, C] that the server holds; for a discriminant that means something, M should be some times
      the number of features.
    multiplier: 300 in the published code; 'difference' raises it where samples stand too close.
    max_queries: it gives up beyond.

  Returns:
    `Fished`. Where the class has one sample, class fishing's own query; where it has none, `alone` is False.

  Raises:
    UsageError: for a method or target that does not exist, or a model that does not fit.
  """
  if method not in ('published', 'difference'):
    raise errors.unknown('method of feature fishing', method, ('published', 'difference'))
  errors.check_number('multiplier', multiplier, low=1e-6, finite=True)
  errors.check_number('max_queries', max_queries, low=3, integer=True)
  kernel, bias = last_layer(model, image_shape, variables['params'])
  classes = trees.get(variables['params'], bias).shape[0]
  check_target(target, classes)
  rounds = []

  def ask(sent):
    rounds.append(sent)
    return query(sent)

  def threshold(direction, at, sharpness):
    """Returns one round's (variables, update, N·∂W of the target's row, N·∂b)."""
    weights = np.zeros((direction.size, classes), np.float32)
    weights[:, target] = sharpness * direction
    biases = np.zeros(classes, np.float32)
    biases[target] = -sharpness * at
    params = _replaced(variables['params'], {kernel: jnp.asarray(weights), bias: jnp.asarray(biases)})
    sent = {**variables, 'params': params}
    update = ask(sent)
    return sent, update, *_answer(update, (kernel, bias), target, num_samples)

  first = class_query(ask, model, variables, image_shape, num_samples, target=target)
  if first.alone or not 0.5 < first.samples < num_samples + 0.5:
    return first
  mean = first.features
  direction = np.eye(mean.size)[np.argmax(mean)] if public is None else _discriminant(model, variables, public, mean)
  search = _descent if method == 'published' else _highest
  sent, update, row, count, samples, alone = search(
    lambda at, sharpness=multiplier: threshold(direction, at, sharpness),
    float(direction @ mean),
    direction,
    first.samples,
    classes,
    multiplier,
    lambda: len(rounds) <= max_queries - 2,
  )
  return Fished(sent, update, row / count if count else np.zeros_like(row), samples, alone, len(rounds))


def _answer(update, paths, target, num_samples):
  """Returns N·∂W of the target's row, float64 [features], and N·∂b; the paths are those of (kernel, bias)."""
  kernel, bias = (trees.get(update, path) for path in paths)
  return np.asarray(kernel, np.float64)[:, target] * num_samples, float(bias[target]) * num_samples


def _descent(ask, at, direction, number, classes, multiplier, more):
  """The published search: θ ← u·∂W/∂b of the samples below θ, until the lowest of them stands at θ itself.

  There its logits are all equal: it misses its label by 1 − 1/classes.
  """
  del number
  own = 1 - 1 / classes
  while True:
    sent, update, row, count = ask(at)
    found = float(direction @ row) / count if count else np.inf
    stable = abs(found - at) < 0.1 / multiplier
    if stable or not more() or not np.isfinite(found):
      # Others' shares in the count are whole numbers; what is not excluded is as many of other classes as of this one.
      return sent, update, row, count, -count / own, bool(stable and abs(-count / own - 1) < 0.02)
    at = found


def _highest(ask, at, direction, number, classes, multiplier, more):
  """Bisects for θ_low and θ_high around the one highest sample along u; returns the difference of the two queries.

  N·∂b + number = Σ p over all samples: how many stand above θ, of whatever class. Between whole numbers a sample stands
  in the flank of the softmax, which is then made steeper.
  """
  del classes

  def above(asked):
    return asked[3] + number

  sharpness, step = multiplier, 4 / multiplier
  low, high = at, at + max(abs(at), 10 / multiplier)
  below = ask(low, sharpness)
  while above(below) < 0.98 and more():  # nobody above the mean
    high, low, step = low + 4 / sharpness, low - step, 2 * step
    below = ask(low, sharpness)
  beyond = ask(high, sharpness)
  while above(beyond) > 0.02 and more():
    reach = 2 * (high - low)
    if above(beyond) > 0.98:
      low, below = high, beyond
    high += reach
    beyond = ask(high, sharpness)

  def alone():
    one = below[3] - beyond[3]
    inside = abs(one - 1) < 0.02 and low < float(direction @ (below[2] - beyond[2])) / one < high
    return bool(inside and abs(above(beyond)) < 0.02)

  asked_at = sharpness
  while not alone() and more():
    if abs(above(below) - 1) < 0.02 and above(beyond) < 0.02 and asked_at != sharpness:
      asked_at = sharpness
      below, beyond = ask(low, sharpness), ask(high, sharpness)
      continue
    middle = (low + high) / 2
    between = ask(middle, sharpness)
    if above(between) > 0.98:
      low, below = middle, between
    elif above(between) < 0.02:
      high, beyond = middle, between
    else:
      sharpness *= 4
  # At θ_high the sample misses the target's label by its whole probability, as one of the class would.
  update, count = trees.subtract(beyond[1], below[1]), below[3] - beyond[3]
  return beyond[0], update, beyond[2] - below[2], -count, count, alone()


def _discriminant(model, variables, public, mean):
  """Returns Fisher's direction, Σ⁻¹(mean − the public mean), along which public features have variance 1.

  Σ is their covariance.

  Raises:
    UsageError: where no feature varies.
  """
  features = jax.jit(models.require(model, 'features'))(variables, jnp.asarray(public, jnp.float32))
  features = np.asarray(features, np.float64)
  covariance = np.cov(features.T)
  if not np.trace(covariance) > 0:
    raise errors.UsageError('the model has the same features for all public images, and nothing could be told apart')
  covariance += 1e-6 * np.trace(covariance) / len(mean) * np.eye(len(mean))
  direction = np.linalg.solve(covariance, mean - features.mean(axis=0))
  return direction / np.sqrt(direction @ covariance @ direction)


def class_fished(model, variables, image_shape, target):
  """Returns the variables with the last layer of class fishing; the target's own bias stays."""
  kernel, bias = last_layer(model, image_shape, variables['params'])
  weights, biases = (trees.get(variables['params'], path) for path in (kernel, bias))
  chosen = jnp.arange(biases.shape[0], dtype=jnp.int32) == target
  weights = jnp.broadcast_to(jnp.where(chosen, WEIGHT, 0.0).astype(weights.dtype).reshape(1, -1), weights.shape)
  biases = jnp.where(chosen, biases, jnp.asarray(BIAS, biases.dtype))
  return {**variables, 'params': _replaced(variables['params'], {kernel: weights, bias: biases})}


def last_layer(model, image_shape, params):
  """Returns the paths of the (kernel, bias) of the last layer.

  Raises:
    UsageError: if it is not dense with a bias, or the model does not list its layers.
  """
  layers = models.require(model, 'layers')(tuple(image_shape))
  try:
    return closed_form.first_dense_layer(layers[-1:], params)
  except errors.UsageError as error:
    raise errors.UsageError(
      f'fishing sets the weights and biases of the last layer, and that of {model.name!r} is no dense layer with a bias'
    ) from error


def batch_statistics(model, variables, images):
  """Returns what BatchNorm's running statistics would be if they were those of these images as one batch.

  Running statistics are m·old + (1 − m)·batch with a momentum m of the model's own: seen from zeros and from ones, both
  can be told.
  """
  apply = jax.jit(lambda variables, images: model.apply(variables, images, True, None)[1])
  before = (jax.tree.map(lambda x, v=value: jnp.full_like(x, v), variables['batch_stats']) for value in (0, 1))
  images = jnp.asarray(images, jax.tree.leaves(variables['batch_stats'])[0].dtype)
  zeros, ones = (apply({**variables, 'batch_stats': each}, images) for each in before)
  return jax.tree.map(lambda zero, one: zero / (1 - (one - zero)), zeros, ones)


def check_target(target, num_classes):
  """Raises `UsageError` unless `target` is a class."""
  errors.check_number('target', target, low=0, high=num_classes - 1, integer=True)


def _replaced(params, leaves):
  """Returns the parameters with the leaves at some paths replaced."""
  return jax.tree_util.tree_map_with_path(lambda path, leaf: leaves.get(trees.path_names(path), leaf), params)
