"""Fishing: a last layer with which only one sample of a large batch has a gradient (Wen et al. 2022).

The server changes no architecture, only the numbers of the last dense layer. With **class fishing**, only the samples
of one class have a gradient. Suppose that the batch has one sample of that class. Then the update of all layers in
front of the last one is that of this sample, divided by the batch size. Gradient matching continues as for a batch of
one. **Feature fishing** separates several samples of the class by a threshold on a feature, over several rounds with
the same batch.

Both need cross-entropy, the gradient of one step, and BatchNorm on running statistics, which the published code
switches on at the client. With the statistics of the batch, mean and variance carry every other sample into the
gradient.
"""

import dataclasses
from collections.abc import Callable, Collection
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np

from gradleak.attacks import presets
from gradleak.attacks.base import Attack, attack, require_gradient, unsent
from gradleak.attacks.matching.distances import reweighed
from gradleak.core import errors, trees
from gradleak.core.settings import Choice
from gradleak.core.trees import Tree
from gradleak.federated import Client
from gradleak.federated.scenario import Scenario
from gradleak.models import Model
from gradleak.servers.base import Observed, Server, check_sent, one_round, server
from gradleak.servers.fishing_search import (
  AT_THRESHOLD,
  BIAS,
  ROUNDING,
  Class,
  Multiplier,
  Queries,
  Search,
  Searching,
  begin,
  check_target,
  class_fished,
  last_layer,
  receive,
  send,
)
from gradleak.threat import Observation

INNER = {'csdlg': presets.csdlg, 'csdlg_fast': presets.csdlg_fast, 'gia': presets.gia, 'gs': presets.gs}
Statistics = Annotated[str, Choice(('running', 'public'))]

_CITATION = 'Wen, Geiping, Fowl, Goldblum, Goldstein: Fishing for User Data. ICML 2022.'


# ---- What the server sends.


@server
def class_fishing_server(*, target: Class = 0, statistics: Statistics = 'running') -> Server:
  """The server that fishes for the class `target`, in one round.

  The weights of the last layer are 0, for the target 0.5; its biases are 1e20, but the target keeps its own. The target
  then has probability 0 for every input, and a sample of another class has no gradient in front of this layer.

  Args:
    target: the class.
    statistics: the running statistics of BatchNorm that are sent: 'running', those of the honest model, or 'public',
      those of the public images. A client with `batch_norm='train'` does not use them, but the attacker simulates with
      them, and those of an untrained model describe no data.

  Raises (in `prepare`):
    UsageError: for a target that is no class, a last layer that is not dense with a bias, or not sent, and a client
      that shares a delta, is one of a cohort or has another loss than cross-entropy. Also for no public images, or
      a model without BatchNorm, where their statistics are asked for.
  """
  return one_round(_preparation(target, statistics))


@server
def feature_fishing_server(
  *,
  target: Class = 0,
  statistics: Statistics = 'running',
  method: Searching = 'published',
  multiplier: Multiplier = 300.0,
  max_queries: Queries = 64,
) -> Server:
  """The server that isolates one of several samples of the class `target`, in several rounds; see `fish`.

  With the method 'difference' it uses the public images of the scenario, if there are any.

  Args:
    target, statistics: see `class_fishing_server`.
    method, multiplier, max_queries: see `fish`.

  Raises:
    UsageError: as `class_fishing_server`; in `init`, for public images and a model without `features`.
  """

  def init(scenario: Scenario, batch_size: int) -> Search:
    return begin(
      scenario.client.model,
      scenario.variables,
      scenario.samples.shape[1:],
      batch_size,
      target=target,
      method=method,
      public=scenario.public[0] if method == 'difference' and scenario.public is not None else None,
      multiplier=multiplier,
      max_queries=max_queries,
    )

  return Server(
    _preparation(target, statistics),
    init,
    send=send,
    receive=receive,
    finished=lambda search: search.over,
    observed=lambda search: Observed(search.fished.variables, search.fished.update),
    rounds=max_queries,
  )


def _preparation(target: int, statistics: str) -> Callable[[jax.Array, Scenario, int], Scenario]:
  """Returns `prepare` of both servers; nothing in it is random, and it does not depend on the batch size."""

  def prepare(key: jax.Array, scenario: Scenario, batch_size: int) -> Scenario:
    del key, batch_size
    client, public = scenario.client, scenario.public
    check_target(target, client.num_classes)
    client.loss.require_cross_entropy('fishing')
    if client.share != 'gradient':
      raise errors.UsageError(
        f'fishing needs the gradient of one step, and this client has share={client.share!r}, epochs={client.epochs}: '
        "give share='gradient' to gradleak.scenario"
      )
    if client.cohort > 1:
      raise errors.UsageError(
        f'fishing isolates a sample in the update of one client, and the server sees the mean of {client.cohort}'
      )
    shape = scenario.samples.shape[1:]
    check_sent('fishing', scenario, last_layer(client.model, shape, scenario.variables['params']))
    variables = class_fished(client.model, scenario.variables, shape, target)
    if statistics == 'public':
      if public is None:
        raise errors.UsageError(
          "statistics='public' needs samples that everyone holds: give public=(samples, targets) to gradleak.scenario"
        )
      if not variables.get('batch_stats'):
        raise errors.UsageError(
          f"statistics='public' makes no difference to the model {client.model.name!r}, which has no BatchNorm: leave "
          'it out'
        )
      variables |= {'batch_stats': batch_statistics(client.model, variables, public[0])}
    return scenario._replace(variables=variables)

  return prepare


# ---- The attacks.


@attack(citation=_CITATION, reads=('weights', 'noise'), server=class_fishing_server)
def class_fishing(
  client: Client,
  *,
  target: Class = 0,
  statistics: Statistics = 'running',
  inner: Annotated[str, Choice(INNER)] = 'csdlg',
  steps: int = 24_000,
  tv: float = 1e-4,
  start: str = 'normal',
) -> Attack:
  r"""Class fishing (Wen et al. 2022): gradient matching of the one sample of a class in the batch.

  One image with the target's label is matched to the observed update times N. Only the target's row of the last layer
  is compared, since all samples contribute to the other rows. BatchNorm is simulated on the running statistics. If the
  batch has several samples of the class, their sum is matched; without any there is nothing to match. In both cases the
  objective at the truth is NaN.

  Formula:
    W_c = \tfrac{1}{2}, \; W_{j \ne c} = 0, \; b_{j \ne c} = 10^{20} \text{ for the target } c

    \min_x \; 1 - \cos(\nabla_\theta L(f_\theta(x), c), N g) + \text{tv} \cdot \text{TV}(x)

  Args:
    client: the `Client` that is simulated.
    target, statistics: see `class_fishing_server`.
    inner: the gradient matching, a name of `INNER`: 'csdlg', as in the paper, or a faster one.
    steps, tv, start: its settings.

  Raises (when run):
    UsageError: for a client that shares a delta.
  """
  matching = _matching_of_one(client, target, statistics, inner, steps, tv, start)

  def seen(observation: Observation) -> Observation:
    return isolated(client.model, observation, target, kept=unsent(client, observation))

  def objective(observation: Observation, samples: jax.Array, targets: jax.Array) -> jax.Array:
    of_class = jnp.argmax(targets, axis=1) == target
    sample = jnp.argmax(of_class)
    value = matching.objective(seen(observation), samples[sample][None], targets[sample][None])
    return jnp.where(jnp.sum(of_class) == 1, value, jnp.nan)

  return _adapted(matching, seen, objective, statistics == 'public')


@attack(citation=_CITATION, reads=('weights', 'noise'), server=feature_fishing_server)
def feature_fishing(
  client: Client,
  *,
  target: Class = 0,
  statistics: Statistics = 'running',
  method: Searching = 'published',
  multiplier: Multiplier = 300.0,
  max_queries: Queries = 64,
  inner: Annotated[str, Choice(INNER)] = 'csdlg',
  steps: int = 24_000,
  tv: float = 1e-4,
  start: str = 'normal',
) -> Attack:
  r"""Feature fishing (Wen et al. 2022): gradient matching of one of several samples of a class in the batch.

  What the rounds of `feature_fishing_server` isolate is matched as in `class_fishing`. The objective at the truth is
  the least over the samples that can have been isolated. These are the samples of the class, and with 'difference' all
  of the batch, each with the target's label. It is NaN unless the last layer's gradient shows that one sample was
  isolated. If class fishing was the only round, it is NaN unless the batch has one sample of the class.

  Formula:
    W_c = m u, \; b_c = -m \theta, \; W_{j \ne c} = 0, \; b_{j \ne c} = 0, \quad m = \text{multiplier}

    \text{a gradient only of } \{ c : \langle u, f \rangle < \theta \}
    \cup \{ j \ne c : \langle u, f \rangle > \theta \}

  Args:
    client: the `Client` that is simulated.
    target, statistics, method, multiplier, max_queries: see `feature_fishing_server`.
    inner, steps, tv, start: see `class_fishing`.

  Raises (when run):
    UsageError: for a client that shares a delta.
  """
  matching = _matching_of_one(client, target, statistics, inner, steps, tv, start)

  def seen(observation: Observation) -> Observation:
    searched, _ = _search_result(client.model, observation, target, method)
    uploads = jnp.where(searched, 2.0, 1.0) if method == 'difference' else 1.0
    return isolated(client.model, observation, target, uploads, unsent(client, observation))

  def objective(observation: Observation, samples: jax.Array, targets: jax.Array) -> jax.Array:
    of_class = jnp.argmax(targets, axis=1) == target
    label = jax.nn.one_hot(jnp.full(1, target), targets.shape[1], dtype=targets.dtype)
    values = jax.lax.map(lambda image: matching.objective(seen(observation), image[None], label), samples)
    searched, alone = _search_result(client.model, observation, target, method)
    candidates = of_class | (searched & (method == 'difference'))
    known = jnp.where(searched, alone, jnp.sum(of_class) == 1) & jnp.any(candidates)
    return jnp.where(known, jnp.min(jnp.where(candidates, values, jnp.inf)), jnp.nan)

  return _adapted(matching, seen, objective, statistics == 'public' or method == 'difference')


def _matching_of_one(client, target, statistics, inner, steps, tv, start):
  """Returns the gradient matching of one sample; a client of None is enough for the checks of the settings."""
  if client is not None:
    check_target(target, client.num_classes)
    client = dataclasses.replace(client, batch_norm='eval', batch_size=None)
  return INNER[inner](steps=steps, tv=tv, start=start)(client)


def _adapted(matching, seen, objective, auxiliary_data):
  """Returns the attack `matching` on what `seen` makes of the observation."""
  return matching._replace(
    init=lambda key, observation: matching.init(key, seen(observation)),
    step=lambda state, observation: matching.step(state, seen(observation)),
    reconstruct=lambda state, observation: matching.reconstruct(state, seen(observation)),
    objective=objective,
    labels='unused',
    auxiliary_data=matching.auxiliary_data or auxiliary_data,
    noise=lambda shape, variables: matching.noise((1, *shape[1:]), variables),
    running=True,
  )


def isolated(
  model: Model,
  observation: Observation,
  target: int,
  uploads: jax.Array | float = 1.0,
  kept: Collection[tuple[str, ...]] = (),
) -> Observation:
  """Returns the observation of one sample of the class `target`, given that of a batch of N.

  A clipping that the attacker knows was measured on all rows of the last layer, and cannot be simulated with one
  sample: it is dropped.

  Args:
    model: the `Model`.
    observation: of the batch.
    target: the class.
    uploads: how many uploads the update is the sum or difference of, each with the noise that is known.
    kept: paths of the parameters of which nothing is sent.

  Raises:
    UsageError: for an update that is a delta.
  """
  require_gradient('fishing', observation)
  number, targets = observation.batch_shape[0], observation.targets
  own = own_share(model, observation.batch_shape[1:], observation.update, target)
  observation = reweighed(observation, jax.tree.map(lambda mask: mask.astype(jnp.float32), own), kept)
  return dataclasses.replace(
    observation,
    update=jax.tree.map(lambda x: x * jnp.asarray(number, x.dtype), observation.update),
    targets=jax.nn.one_hot(jnp.full(1, target), observation.num_classes, dtype=targets.dtype),
    knowledge=dataclasses.replace(observation.knowledge, labels='known'),
    batch_shape=(1, *observation.batch_shape[1:]),
    noise=observation.noise * number**2 * uploads,
    clip=jnp.inf,
  )


def own_share(model: Model, sample_shape: tuple[int, ...], update: Tree, target: int) -> Tree:
  """Returns a tree of boolean masks: False in the rows of other classes in the last layer, which all samples change."""
  kernel, bias = last_layer(model, sample_shape, update)
  row = jnp.arange(trees.get(update, bias).shape[0], dtype=jnp.int32) == target
  masks = {kernel: row.reshape(1, -1), bias: row}
  return jax.tree_util.tree_map_with_path(lambda path, _: masks.get(trees.path_names(path), jnp.ones((), bool)), update)


def _search_result(model, observation, target, method):
  """Returns (whether there were rounds after class fishing, whether these isolated one sample), as `Fished.alone`.

  For 'difference', the lower threshold and its update are not known here: the criterion is one sample below θ_high.
  """
  number, params = observation.batch_shape[0], observation.variables['params']
  layer = last_layer(model, observation.batch_shape[1:], params)
  weights, biases = (trees.get(params, path) for path in layer)
  row, share = (trees.get(observation.update, path)[..., target] for path in layer)
  features = row / jnp.where(share == 0, jnp.ones_like(share), share)
  logit = jnp.sum(features * weights[:, target]) + biases[target]
  classes = biases.shape[0]
  own, placed = (1 - 1 / classes, jnp.abs(logit) < AT_THRESHOLD) if method == 'published' else (1.0, logit < 0)
  searched = biases[(target + 1) % classes] != BIAS
  return searched, (jnp.abs(number * share / own + 1) < ROUNDING) & placed


def batch_statistics(model: Model, variables: dict, samples: np.ndarray) -> Tree:
  """Returns the running statistics of BatchNorm that are those of these images as one batch.

  A model updates them as m·old + (1 − m)·batch, with a momentum m that is not known. The updates from old = 0 and from
  old = 1 give both m and the statistics of the batch.
  """
  apply = jax.jit(lambda variables, samples: model.apply(variables, samples, True, None)[1])
  before = (jax.tree.map(lambda x, v=value: jnp.full_like(x, v), variables['batch_stats']) for value in (0, 1))
  if not model.takes_ids:
    samples = jnp.asarray(samples, jax.tree.leaves(variables['batch_stats'])[0].dtype)
  zeros, ones = (apply({**variables, 'batch_stats': each}, samples) for each in before)

  def of_batch(old: jax.Array, zero: jax.Array, one: jax.Array) -> jax.Array:
    rate = 1 - (one - zero)  # 0 for a count of batches, which is left as it is
    return jnp.where(rate == 0, old, zero / jnp.where(rate == 0, jnp.ones_like(rate), rate))

  return jax.tree.map(of_batch, variables['batch_stats'], zeros, ones)
