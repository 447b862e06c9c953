"""What an attacker who knows the defense does with the same upload before it matches.

Most adaptive attacks only change the data that is compared. Averages, weights, a known noise and a known clip are data
to an attack. So non-adaptive and adaptive attackers are lanes of one compiled program. The few that need another attack
say so by its settings. They run on the host, once per upload.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gradleak.adaptive import weights
from gradleak.attacks.base import AttackMethod
from gradleak.core import errors, trees
from gradleak.core.trees import Tree
from gradleak.defenses.clipping import clip
from gradleak.defenses.defense import PLACES, Bound, Context, Defense, Noise, Stage, norm_bound
from gradleak.federated.client import Upload
from gradleak.federated.response import noise_gains
from gradleak.federated.server import layer_average
from gradleak.models.model import outputs_shape

# Weights of total variation under noise and dropped entries, in units of the distance: `prior` of `matching`.
PRIORS = (1e-3, 1e-2, 5e-2)
AVERAGES = 'It averages the uploads.'
_LEARNED = 'learned'


class View(NamedTuple):
  """What an attacker compares: the fields of `Observation` of the same names, NumPy arrays on the host."""

  update: Tree
  weights: Tree
  noise: float
  clip: float


class Change(NamedTuple):
  """What an adaptive attack changes of an attack: the fields of `AdaptiveAttack` of the same names."""

  settings: tuple[tuple[str, Any], ...] = ()
  simulates: Defense | None = None
  noise: Defense | None = None

  @property
  def foreign(self) -> bool:
    """Whether it holds code of a user's own."""
    return any(stage.foreign for of in self[1:] if isinstance(of, Defense) for stage in of.stages)


class AdaptiveAttack(NamedTuple):
  """An adaptive attack to one defense, as one attack can use it.

  Attributes:
    name: one word or several joined by '+'; 'non-adaptive' for none.
    words: what the attacker does, a sentence; empty for none.
    views: `Upload` of R rounds, every leaf [R, …] -> the `View`s to try; the attacker keeps the one that matches best.
    offers: the evidence that it offers, of `threat.EVIDENCE` and 'update' where it changes what is compared.
    count: how many views there are.
    settings: settings of the attack that it changes, (name, value) pairs.
    simulates: the defense of the client that it simulates, or learns from; None for none.
    rounds: how many uploads of the same samples it reads.
    noise: the defense of whose noise the attack reads the variance; None where it offers none.
  """

  name: str
  words: str
  views: Callable[[Upload], list[View]]
  offers: frozenset[str] = frozenset()
  count: int = 1  # type: ignore[assignment]
  settings: tuple[tuple[str, Any], ...] = ()
  simulates: Defense | None = None
  rounds: int = 1
  noise: Defense | None = None

  @property
  def change(self) -> Change:
    """What it changes of the attack."""
    return Change(self.settings, self.simulates, self.noise)

  def suits(self, attack: AttackMethod) -> bool:
    """Returns whether the attack can make use of it: of what it offers, or of the settings that it changes.

    What it simulates is of use to an attack that compares what the client would send. Such an attack clips that, and
    its `match` is 'client'. The other ones take the update for a gradient, or its signs, and simulate no defense.
    """
    simulates = 'clip' in attack.reads and attack.settings.get('match', 'client') == 'client'
    if self.simulates is not None and not simulates:
      return False
    if self.settings:
      changes = dict(self.settings)
      made = attack.settings.get('generator') is not None  # whose images start where its weights do
      scaled = attack.settings.get('bias') is False  # neurons are combined by the bias gradient
      alone = attack.settings.get('seeds', 1) == 1 and attack.reads  # decoys are of one start, beside what is compared
      left_out = {'start': made, 'combine': scaled, 'decoys': not alone}
      return attack.takes(changes) and not any(left_out.get(name) for name in changes)
    return self.simulates is not None or 'update' in self.offers or bool(self.offers & attack.reads)


def everything(update: Tree) -> View:
  """Returns the `View` of an attacker who takes the upload as a gradient."""
  return View(update, ones(update), 0.0, math.inf)


NON_ADAPTIVE = AdaptiveAttack('non-adaptive', '', lambda upload: [everything(first(upload))])


def first(upload: Upload) -> Tree:
  """Returns the update of the first of several rounds."""
  return trees.take(upload.update, 0)


@dataclasses.dataclass(frozen=True)
class Known:
  """What an attacker knows of every upload under a defense, by its traits: zeros, a clip, noise.

  Attributes:
    bound: the defense, made for `context`.
    context: the `Context`.
    num_samples: samples behind one upload.
    rounds: uploads of the same samples on the same model that are averaged, or summed where the defense sends later
      what it dropped; 1 for a defense under which all of them are equal.
    reads: the evidence that the attack reads; nothing else is offered.
  """

  bound: Bound
  context: Context
  num_samples: int
  rounds: int
  reads: frozenset[str]

  @property
  def defense(self) -> Defense:
    """The `Defense`."""
    return self.bound.defense

  @property
  def stages(self) -> list[Stage]:
    """The stages of the defense in the order in which they act: those on the steps before those on the upload."""
    return sorted(self.defense.stages, key=lambda stage: PLACES.index(stage.traits.place))

  @property
  def sums(self) -> bool:
    """Whether several uploads are summed, not averaged."""
    return self.defense.accumulates

  @property
  def sparsifies(self) -> bool:
    """Whether dropped entries can be recognised by their zeros, and the attack can leave them out."""
    return 'weights' in self.reads and any(stage.traits.sparsifies for stage in self.defense.stages)

  @property
  def clip(self) -> float:
    """The norm that the upload was clipped to first; infinity where the attacker cannot clip alike."""
    stages, together = self.stages, self.context.client.cohort > 1  # a mean of clipped updates is not clipped
    if not stages or together or 'clip' not in self.reads or self.trains(stages[0]):  # nor a sum of clipped steps
      return math.inf
    clips = stages[0].traits.clips
    return math.inf if clips is None else float(clips(stages[0].settings))

  @property
  def terms(self) -> int:
    """How many gradients of samples are summed in a client's update; 1 for their mean."""
    client = self.context.client
    return self.num_samples // client.cohort if client.loss.summed else 1

  @property
  def norm_bound(self) -> float:
    """A bound on the norm of the update before noise; infinity where there is none."""
    size = sum(leaf.size for leaf in jax.tree.leaves(self.context.variables['params']))
    stages = [stage for stage in self.defense.stages if not self.trains(stage)]
    return min((norm_bound(stage, size, self.terms) for stage in stages), default=math.inf)

  @property
  def variance(self) -> float | Tree:
    """The variance of the noise in each entry, where every entry bears some and nothing behind changes it; else 0.0."""
    return self.variance_in(None)

  def variance_in(self, masks: Tree | None) -> float | Tree:
    """Returns the `variance` in rounds that sent so much; `masks` as `noise_of` takes them."""
    stages = self.stages
    last = max((i for i, stage in enumerate(stages) if _alters(stage)), default=0)
    found = [i for i, stage in enumerate(stages) if i >= last and _everywhere(stage)]
    if self.context.client.cohort > 1 and any(map(self._scattered, found)):
      return 0.0
    variances = [self.noise_of(stages[i], masks, i) for i in found]
    if any(vanishes(one) and self._draws(stages[i]) for i, one in zip(found, variances, strict=True)):
      return 0.0  # the local optimizer hides one of them
    return functools.reduce(_add, variances, 0.0)

  def _draws(self, stage: Stage) -> bool:
    """Returns whether a stage states noise of more than no variance."""
    noise = stage.traits.noise
    return noise is not None and not vanishes(noise.variance_of(stage.settings, self.context, 1))

  def _scattered(self, place: int) -> bool:
    """Returns whether each client sends the noise of a stage, by its place among `stages`, in entries of its own."""
    for i, stage in enumerate(self.stages):
      traits = stage.traits
      behind = traits.sparsifies == 'zeros' and i > place
      own = traits.sparsifies == 'mask' and (traits.selects or traits.random)
      if behind or own:
        return True
    return False

  def noise_of(self, stage: Stage, masks: Tree | None = None, place: int | None = None) -> float | Tree:
    """Returns the variance of the noise that a stage puts on an entry of what is compared.

    It is that of the mean or the sum over rounds, and of the mean over a cohort; frozen layers have none. It is 0.0
    without noise, and where nobody can tell what the client's optimizer makes of the noise of its steps
    (`response.noise_gains`).

    Args:
      stage: one of `stages`.
      masks: what each round sent, booleans [R, …]; None for what it usually sends.
      place: of the stage among `stages`, of which several may be equal; the first of them by default.
    """
    noise, client = stage.traits.noise, self.context.client
    if noise is None:
      return 0.0
    if self.trains(stage):
      variance = self._of_steps(stage, noise)
    else:
      variance = noise.variance_of(stage.settings, self.context, self.num_samples // client.cohort)
    params = self.context.variables['params']
    if client.frozen or client.private:
      shared = jax.device_get(client.shared_layers(params, self.context.sample_shape))
      variance = jax.tree.map(np.multiply, shared, _as_tree(variance, params))
    if self.rounds > 1 and self.sums:
      masks = self._usual if masks is None else masks
      gains = jax.tree.map(self._sent(self.stages.index(stage) if place is None else place), masks)
    elif masks is not None and any(np.any(np.asarray(m) != np.asarray(m)[:1]) for m in jax.tree.leaves(masks)):
      times = jax.tree.map(lambda m: np.sum(np.asarray(m), axis=0), masks)
      gains = jax.tree.map(lambda n: (n > 0) / np.maximum(n, 1), times)  # the mean is over the rounds that sent it
    else:
      return jax.tree.map(lambda v: v / (self.rounds * client.cohort), variance)
    return jax.tree.map(lambda v, gain: v / client.cohort * gain, _as_tree(variance, params), gains)

  def quieter(self, stage: Stage, upload: Upload) -> float:
    """Returns by what the variance of a stage's noise is larger in one client's upload than in what is compared."""
    cohort = self.context.client.cohort
    if self.rounds == 1:
      return cohort
    every = ones(self.context.variables['params'])
    alone, left = (_expected(noise, every) for noise in (self._one.noise_of(stage), self.noise_of(stage, upload.mask)))
    return cohort * alone / left if left else cohort

  def _sent(self, place: int) -> Callable[[Any], np.ndarray]:
    """Returns the function (masks [R, …]) -> the variance in a sum over that of the noise of a stage in each round.

    Noise behind what accumulates is sent as often as its entry. Noise before it is kept back with the entry, and grows
    by its momentum.
    """
    after = [stage for stage in self.stages[place:] if stage.traits.accumulates]
    momentum = float(after[-1].settings.get('momentum', 0.0)) if after else 0.0
    factors = np.cumsum(np.square(np.cumsum(momentum ** np.arange(self.rounds)))) if after else np.ones(self.rounds)
    return functools.partial(by_delay, factors=factors)

  @functools.cached_property
  def _usual(self) -> Tree:
    """What the rounds of a defense that accumulates send of an update of normal entries, [R, …]: its masks."""
    params = self.context.variables['params']
    return jax.tree.map(lambda u: u != 0, self.several(trees.draws(jax.random.normal, jax.random.key(0), params)))

  def several(self, update: Tree) -> Tree:
    """Returns what rounds of the same update become by what accumulates, NumPy arrays [R, …]."""
    both = zip(self.defense.stages, self.bound.arguments, strict=True)
    chosen = Defense(tuple(dataclasses.replace(m, arguments=given) for m, given in both if m.traits.accumulates))
    return jax.device_get(_accumulated(chosen, self.rounds, update, self.context.variables['params']))

  @property
  def _one(self) -> 'Known':
    """The same of a single upload."""
    return dataclasses.replace(self, rounds=1)

  def trains(self, stage: Stage) -> bool:
    """Returns whether a stage acts on gradients that a local optimizer then makes a delta of."""
    return self.context.client.share == 'delta' and stage.traits.place == 'step'

  def _of_steps(self, stage: Stage, noise: Noise) -> float | Tree:
    """Returns the variance in a delta of the noise of all local steps; 0.0 where the optimizer is not linear."""
    client, params = self.context.client, self.context.variables['params']
    steps, count = client.num_steps(self.num_samples), self.num_samples // client.cohort
    size = min(client.batch_size or count, count)
    sizes = [size] * (count // size) + [count % size] * (count % size > 0 and not client.drop_last)
    found: list[Tree] = []
    for each in dict.fromkeys(sizes):  # a smaller last batch has noise of its own, and momentum weighs it by its step
      gains = noise_gains(client.optimizer, steps, params, np.tile(np.equal(sizes, each), client.epochs))
      if gains is None:
        return 0.0
      variance = _as_tree(noise.variance_of(stage.settings, self.context, each), params)
      found.append(jax.tree.map(np.multiply, gains, variance))
    return jax.tree.map(lambda *variances: sum(variances), *found)

  @property
  def energies(self) -> list[float]:
    """The expected squared norm of the noise of each of `stages` in what is compared, before any clip behind it."""
    every, found = ones(self.context.variables['params']), []
    for i, stage in enumerate(self.stages):
      share = 0.0 if stage.traits.noise is None else min(1.0, stage.traits.noise.fraction(stage.settings))
      found.append(share * _expected(self.noise_of(stage, None, i), every) if share else 0.0)
    return found

  @property
  def energy(self) -> float:
    """Their sum."""
    return sum(self.energies)

  def left_by_clips(self, signal: float) -> tuple[float, list[float]]:
    """Returns which fraction clips leave of the energy of an update, and of the noise of each of `stages`.

    Args:
      signal: the squared norm of the update before all of them.
    """
    size = sum(leaf.size for leaf in jax.tree.leaves(self.context.variables['params']))
    own = [self.context.client.cohort * energy for energy in self._one.energies]  # of one client
    kept, left = 1.0, [1.0] * len(own)
    for i, stage in enumerate(self.stages):
      bound = math.inf if self.trains(stage) else min(_shortened(stage), norm_bound(stage, size, self.terms))
      total = kept * signal + sum(part * energy for part, energy in zip(left[:i], own, strict=False))
      factor = min(1.0, bound**2 / max(total, 1e-30))
      kept, left = kept * factor, [part * factor for part in left[:i]] + left[i:]
    return kept, left

  @property
  def adds_noise(self) -> bool:
    """Whether there is any noise in an upload."""
    return self._one.energy > 0

  def repeated(self, name: str, words: str) -> tuple[str, str]:
    """Returns an adaptive attack's name and words, where uploads are averaged or summed with that before them."""
    before = {part: said for part, (_, said) in self.parts.items() if part in ('averaged', 'summed')}
    return '+'.join([*before, name]), ' '.join([*before.values(), words])

  @property
  def parts(self) -> dict[str, tuple[str, str]]:
    """What is made use of: name -> (the evidence it is, what the attacker does, a sentence)."""
    floor = 'noise' in self.reads and _expected(self._one.variance, ones(self.context.variables['params'])) > 0
    found = {
      'averaged': (self.rounds > 1 and not self.sums, 'update', AVERAGES),
      'summed': (
        self.rounds > 1 and self.sums,
        'update',
        'It sums the uploads: what one drops, a later one sends.',
      ),
      'masked': (self.sparsifies, 'weights', 'It compares only what was sent and is not zero.'),
      'clipped': (math.isfinite(self.clip), 'clip', 'It clips what it simulates to the same norm.'),
      'floor': (floor, 'noise', 'It knows the variance of the noise.'),
    }
    return {name: (evidence, words) for name, (applies, evidence, words) in found.items() if applies}

  def adaptive(self) -> AdaptiveAttack | None:
    """Returns the adaptive attack of all that is known, or None if it is nothing."""
    parts = self.parts
    if not parts:
      return None
    words = ' '.join(words for _, words in parts.values() if words)
    offers = frozenset(evidence for evidence, _ in parts.values())
    return AdaptiveAttack('+'.join(parts), words, lambda upload: [self.view(upload)], offers, rounds=self.rounds)

  def smooth(self, words: str, weighs: str, prior: float) -> tuple[str, dict[str, Any]]:
    """Returns a sentence with a weight of smoothness, and its setting; without both where smoothness is not defined."""
    if 'prior' in self.context.client.modality.terms:
      return f'{words}, and {weighs} by {prior:g}.', {'prior': prior}
    return f'{words}.', {}

  def changed(
    self,
    name: str,
    words: str,
    weigh: Callable[[Tree, Tree], Tree] | None = None,
    simulates: Defense | None = None,
    **settings: Any,
  ) -> AdaptiveAttack:
    """Returns the adaptive attack that is the attack with other settings on all that is known but the noise level.

    Args:
      name, words, simulates: see `AdaptiveAttack`. What is simulated is not masked, see `besides`.
      weigh: (update, masks of its rounds) -> weights of its entries, or None for 1.
      **settings: of the attack.
    """
    parts = {part: said for part, (_, said) in self.parts.items() if part != 'floor'}
    if simulates is not None:
      parts.pop('masked', None)
    name, words = '+'.join([*parts, name]), ' '.join(filter(None, [*parts.values(), words]))

    def views(upload: Upload) -> list[View]:
      update = self.observed(upload)
      given = None if weigh is None else weigh(update, upload.mask)
      weighted = None if given is None else jax.tree.map(lambda w: np.asarray(w, np.float16), given)
      view = self.view(upload, weighted, update)._replace(noise=0.0)
      if simulates is None:
        return [view]
      return [view._replace(weights=self.besides(simulates, upload, update), clip=math.inf)]  # it clips where they do

    return AdaptiveAttack(
      name,
      words,
      views,
      settings=tuple(settings.items()),
      simulates=simulates,
      rounds=self.rounds,
    )

  def besides(self, simulates: Defense, upload: Upload, update: Tree) -> Tree:
    """Returns weights for a client that is simulated: 0 for what the defense drops and the simulation does not.

    Zeros that the simulation makes itself say which entries were dropped, and are compared.

    Args:
      simulates: the defense of that client.
      upload: of R rounds.
      update: what is compared.
    """
    weighted = ones(update)
    if _dropping(self.defense, 'mask') > _dropping(simulates, 'mask'):
      weighted = jax.tree.map(lambda w, mask: w * np.any(mask, axis=0), weighted, upload.mask)
    if _dropping(self.defense, 'zeros') > _dropping(simulates, 'zeros'):
      weighted = jax.tree.map(lambda w, u: w * (u != 0), weighted, update)
    return weighted

  def observed(self, upload: Upload) -> Tree:
    """Returns the update that is compared: the first, or the mean or the sum over the rounds."""
    if self.rounds == 1:
      return first(upload)
    if self.sums:
      return jax.tree.map(lambda u: np.sum(u, axis=0), upload.update)
    return jax.device_get(layer_average(upload))

  def view(self, upload: Upload, weighted: Tree = None, update: Tree = None, divided: Tree = None) -> View:
    """Returns the `View` of all that is known.

    Args:
      upload: of R rounds.
      weighted: weights of each entry, where another adaptive attack has some; else 1.
      update: what is compared in place of `observed`.
      divided: by what it is the mean or the sum over the rounds, divided; None for 1.
    """
    update = self.observed(upload) if update is None else update
    weighted = ones(update) if weighted is None else weighted
    if self.sparsifies:
      weighted = jax.tree.map(lambda w, u: w * (u != 0), weighted, update)
    variance = self.variance_in(upload.mask if self.rounds > 1 else None) if 'noise' in self.reads else 0.0
    if divided is not None:
      variance = jax.tree.map(lambda v, d: v / np.square(d), _as_tree(variance, update), divided)
    return View(update, weighted, _expected(variance, weighted), self.clip)


def by_delay(masks: Any, factors: np.ndarray) -> np.ndarray:
  """Returns the sum of the factors of the rounds that send an entry, by how many before kept it back.

  Args:
    masks: of a tensor, booleans [R, …]: whether a round sends an entry.
    factors: for each number of rounds, from 0 on, [R].
  """
  masks = np.asarray(masks)
  kept, total = np.zeros(masks.shape[1:], int), np.zeros(masks.shape[1:])
  for sent in masks:
    total = total + sent * factors[kept]
    kept = np.where(sent, 0, kept + 1)
  return total


def _as_tree(value: float | Tree, params: Tree) -> Tree:
  """Returns a tree shaped like the parameters; a number stands for each tensor."""
  return jax.tree.map(lambda p: value, params) if isinstance(value, float | int) else value


def _alters(stage: Stage) -> bool:
  """Returns whether a stage changes what it lets pass, before noise of its own: not one that only adds or drops."""
  traits = stage.traits
  adds = traits.noise is not None or traits.sparsifies
  shortens = math.isfinite(_shortened(stage)) or bool(traits.clips or traits.bounds)
  return bool(shortens or traits.limits or traits.bits or not adds)


def _shortened(stage: Stage) -> float:
  """Returns the norm that a stage clips what it is given to, where what it sends may be longer; infinity for none."""
  return math.inf if stage.traits.shortens is None else float(stage.traits.shortens(stage.settings))


def _everywhere(stage: Stage) -> bool:
  return stage.traits.noise is not None and stage.traits.noise.fraction(stage.settings) == 1


def vanishes(variance: float | Tree) -> bool:
  """Returns whether the noise of a stage has no variance that anybody can tell."""
  return not any(np.any(np.asarray(leaf) > 0) for leaf in jax.tree.leaves(variance))


def _add(a: float | Tree, b: float | Tree) -> float | Tree:
  if isinstance(a, float) and isinstance(b, float):
    return a + b
  scalar, tree = (a, b) if isinstance(a, float) else (b, a)
  if isinstance(scalar, float):
    return jax.tree.map(lambda x: x + scalar, tree)
  return jax.tree.map(lambda x, y: x + y, a, b)


def _expected(variance: float | Tree, weights: Tree) -> float:
  """Returns the sum over all entries of the variance times the weight."""
  if isinstance(variance, float):
    return variance * sum(float(np.sum(w, dtype=np.float64)) for w in jax.tree.leaves(weights)) if variance else 0.0
  both = zip(jax.tree.leaves(variance), jax.tree.leaves(weights), strict=True)
  return float(sum(np.sum(np.broadcast_to(v, w.shape) * np.asarray(w, np.float64)) for v, w in both))


def _dropping(defense: Defense, sparsifies: str) -> int:
  """Returns how many stages of a defense drop entries so, see `Traits.sparsifies`."""
  return sum(stage.traits.sparsifies == sparsifies for stage in defense.stages)


def ones(tree: Tree) -> Tree:
  """Returns weights of 1, shaped like `tree`."""
  return jax.tree.map(lambda x: np.ones(np.shape(x), np.float16), tree)


class Case(NamedTuple):
  """What an adaptive attack to one method is made for.

  Attributes:
    stage: the `Stage` of the defense.
    arguments: what the stage's factory was made for.
    known: all else that is known of the upload.
  """

  stage: Stage
  arguments: tuple
  known: Known


# Factory of a defense -> the functions (`Case`) -> adaptive attacks that are special to it.
SPECIAL: dict[Callable, list[Callable[[Case], Iterable[AdaptiveAttack]]]] = {}


def adaptive_to(maker: Callable) -> Callable[[Callable], Callable]:
  """Returns the decorator of a function, `Case` -> `AdaptiveAttack`s, that attackers apply who know this defense.

  They come beside those that there are; a function of the same name in the same module is replaced.

  Args:
    maker: a function that `defenses.defense` decorated, of the library or of a user.

  Raises:
    UsageError: for anything else, such as a `Defense`.
  """
  if isinstance(maker, Defense) or not hasattr(maker, 'traits'):
    raise errors.UsageError(
      'adaptive_to takes a function that gradleak.defenses.defense decorated, such as gradleak.defenses.prune, and got '
      f'{errors.shown(maker)}'
    )

  def decorate(function: Callable[[Case], Iterable[AdaptiveAttack]]) -> Callable[[Case], Iterable[AdaptiveAttack]]:
    known = SPECIAL.setdefault(maker.__wrapped__, [])  # type: ignore[attr-defined]
    known[:] = [one for one in known if '<lambda>' in _named(one) or _named(one) != _named(function)] + [function]
    return function

  return decorate


def _named(function: Callable) -> str:
  return f'{function.__module__} {function.__qualname__}' if hasattr(function, '__qualname__') else repr(function)


def adaptive_attacks(
  bound: Bound, context: Context, num_samples: int, attack: AttackMethod, rounds: int = 1
) -> list[AdaptiveAttack]:
  """Returns the adaptive attacks of an attack to a defense, those that it can make use of; empty where there are none.

  Args:
    bound: the defense, made for `context`.
    context: the `Context`.
    num_samples: samples behind one upload.
    attack: the `AttackMethod`; it names the evidence that it reads.
    rounds: uploads of the same samples on the same model that an attacker may average or sum; 1 is used for a defense
      under which all of them are equal.
  """
  bound = bound.sent
  stages, shape = bound.defense.stages, (num_samples, *context.sample_shape)
  reads = attack.reads
  if 'noise' in reads and not attack(context.client).noise(shape, context.variables):
    reads -= {'noise'}
  known = Known(bound, context, num_samples, rounds if bound.varies else 1, reads)
  once = dataclasses.replace(known, rounds=1) if bound.held else known  # one round is simulated, and not several
  simulated = _imitated(once) or [_simulated(once)]
  several = known.adaptive(), _agreed(known), _last(known)
  found = [*several, _prior(known), _weighted(known), *simulated, _combined(known)]
  for stage, arguments in zip(stages, bound.arguments, strict=True):
    found += [one for special in SPECIAL.get(stage.factory, []) for one in special(Case(stage, arguments, known))]
  found.append(_shown(known))
  suited = [adaptive for adaptive in _numbered(found) if adaptive.suits(attack)]
  if 'floor' in known.parts:  # those that change the attack have no noise in their views
    suited = [one if one.settings or one.simulates else one._replace(noise=bound.defense) for one in suited]
  if known.rounds > 1 and not known.sums and any(map(_drops_at_random, stages)):
    suited = [one._replace(views=functools.partial(_of_what_was_sent, one.views)) for one in suited]
  return [*_learned(known), *suited] if attack.adaptive else suited


def _numbered(found: Iterable[AdaptiveAttack | None]) -> list[AdaptiveAttack]:
  """Returns adaptive attacks under names of their own, by which rows differ: of two equal ones the second gets a -2."""
  named: dict[str, AdaptiveAttack] = {}
  for one in filter(None, found):
    names = itertools.chain([one.name], (f'{one.name}-{i}' for i in itertools.count(2)))
    name = next(name for name in names if name not in (*named, NON_ADAPTIVE.name, _LEARNED))
    named[name] = one._replace(name=name)
  return [*named.values()]


def _drops_at_random(stage: Stage) -> bool:
  """Returns whether zeros of a stage say what was not sent; those behind noise, of the smallest entries, are values."""
  return stage.traits.random and stage.traits.sparsifies == 'zeros' and not stage.traits.by_magnitude


def _of_what_was_sent(views: Callable[[Upload], list[View]], upload: Upload) -> list[View]:
  return views(_without_zeros(upload))


def _without_zeros(upload: Upload) -> Upload:
  """Returns an upload of R rounds whose zeros were not sent."""
  mask = jax.tree.map(lambda mask, u: _widened(mask, u) & (u != 0), upload.mask, upload.update)
  return dataclasses.replace(upload, mask=mask)


def _agreed(known: Known) -> AdaptiveAttack | None:
  """Returns the adaptive attack to noise on some entries, drawn anew for each upload: the values that uploads share.

  The same samples give the same update, bit for bit, and no two draws of noise are equal. So a value that occurs in two
  uploads has no noise.
  """
  partial = [noise for m in known.defense.stages if (noise := m.traits.noise) and 0 < noise.fraction(m.settings) < 1]
  if known.rounds == 1 or known.sums or not partial:
    return None
  words = 'It takes the value of an entry that most uploads share, bit for bit, and the mean where they share none.'

  def views(upload: Upload) -> list[View]:
    update = jax.tree.map(_most_frequent, upload.update, upload.mask, known.observed(upload))
    return [known.view(upload, update=update)._replace(noise=0.0)]

  return AdaptiveAttack('agreed', words, views, frozenset({'update'}), rounds=known.rounds)


def _most_frequent(values: np.ndarray, mask: np.ndarray, mean: np.ndarray) -> np.ndarray:
  """Returns the value of each entry of [R, …] that most rounds which sent it share; `mean` where no two are equal.

  Args:
    values: what the rounds sent of a tensor, zeros where they did not.
    mask: whether they sent it, booleans [R] or [R, …].
    mean: of what was sent, […].
  """
  sent = _widened(mask, values)
  shared = np.stack([np.sum((values == one) & sent & own, axis=0) for one, own in zip(values, sent, strict=True)])
  chosen = np.take_along_axis(values, np.argmax(shared, axis=0)[None], axis=0)[0]
  return np.where(np.max(shared, axis=0) > 1, chosen, mean).astype(values.dtype)


def _widened(mask: np.ndarray, values: np.ndarray) -> np.ndarray:
  """Returns the mask of a tensor of several rounds, [R] or [R, …], in the shape of its values."""
  return np.broadcast_to(np.reshape(mask, (*np.shape(mask), *(1,) * (np.ndim(values) - np.ndim(mask)))), values.shape)


def _last(known: Known) -> AdaptiveAttack | None:
  """Returns the adaptive attack to a user's own state: the last upload, as what is added may fade with each of them."""
  if known.rounds == 1 or not known.bound.keeps:
    return None

  def views(upload: Upload) -> list[View]:
    return [known.view(upload, update=trees.take(upload.update, -1))._replace(noise=0.0)]

  return AdaptiveAttack('last', 'It takes the last upload.', views, frozenset({'update'}), rounds=known.rounds)


def _prior(known: Known) -> AdaptiveAttack | None:
  """Returns the adaptive attack that weights smoothness by the noise and what is dropped, or None where nothing is.

  At the truth, noise of squared norm n on a gradient of squared norm g leaves the cosine distance `1 − 1/√(1 + n/g)`.
  That distance is the weight, rounded to one of `PRIORS`. The attacker learns g by simulating the client on random
  pixels, and knows its bound.
  """
  if 'prior' not in known.context.client.modality.terms:
    return None
  if known.adds_noise:
    noise, signal = _typical_energies(known)
    weight = 1 - 1 / math.sqrt(1 + noise / signal)
    prior = min(PRIORS, key=lambda prior: abs(math.log(prior / max(weight, 1e-12))))
  elif known.sparsifies:
    prior = PRIORS[0]
  else:
    return None
  return known.changed(
    'prior',
    f'It weights smoothness by {prior:g}, after the noise and the dropped entries that it expects.',
    prior=prior,
  )


def _weighted(known: Known) -> AdaptiveAttack | None:
  """Returns the adaptive attack that weighs entries by the noise expected on them, where it differs; else None."""
  if 'weights' not in known.reads:
    return None
  for stage, arguments in zip(known.defense.stages, known.bound.arguments, strict=True):
    noise = stage.traits.noise
    share = 1.0 if noise is None else noise.fraction(stage.settings)
    if noise is None or not 0 < share < 1:
      continue
    if _expected(known.noise_of(stage), ones(known.context.variables['params'])) == 0:
      continue
    if noise.groups is not None:
      by: Callable[..., Tree] = functools.partial(weights.by_group, groups=noise.groups(arguments), share=share)
      prior = PRIORS[0]
    elif stage.traits.sparsifies == 'zeros':
      by, prior = weights.by_magnitude, 2 * PRIORS[-1]
    else:
      continue
    words, settings = known.smooth('It weighs each entry by the noise expected on it', 'smoothness', prior)

    def weigh(update: Tree, masks: Tree, by: Callable[..., Tree] = by, stage: Stage = stage) -> Tree:
      return by(update, variance=known.noise_of(stage, masks))

    return known.changed('weighted', words, weigh, **settings)
  return None


def _typical_energies(known: Known) -> tuple[float, float]:
  """Returns the expected squared norms, in what is compared, of the noise and of a typical update."""
  context = known.context
  given = context.client, context.sample_shape, known.num_samples, context.variables
  squared = float(typical_squared_norm(*given))
  kept, left = known.left_by_clips(squared)
  signal = kept * squared
  if known.rounds > 1 and known.sums:  # both grow with the rounds, the noise by less
    clipped = jax.tree.map(lambda u: u * np.float32(math.sqrt(kept)), typical_update(*given))
    signal = float(trees.squared_norm(jax.tree.map(lambda u: np.sum(u, axis=0), known.several(clipped))))
  noise = sum(part * energy for part, energy in zip(left, known.energies, strict=True))
  return noise, max(signal, 1e-30)


# Entries seem dropped where this share more of them are zero than in an undefended update of random samples.
_DROPPED = 0.05


def _shown(known: Known) -> AdaptiveAttack | None:
  """Returns the adaptive attack to a stage of which nothing is known: what the upload itself shows, zeros and a norm.

  The simulated update is clipped to the norm of the observed one, or to the known clip of another stage where that is
  smaller. At the truth it has that norm or a larger one, whether the client clips or not.
  """
  stages = known.defense.at('step', 'upload')
  unknown = [stage for stage in stages if not _stated(stage)]
  if not unknown or (len(unknown) < len(stages) and not any(stage.foreign for stage in unknown)):
    return None

  def views(upload: Upload) -> list[View]:
    context = known.context
    usual = typical_zeros(context.client, context.sample_shape, known.num_samples, context.variables)
    dropped = _zeros(upload.update) > float(usual) + _DROPPED  # in each round, of which a mean has fewer
    update = known.observed(_without_zeros(upload) if dropped else upload)
    weighted = jax.tree.map(lambda u: (u != 0).astype(np.float16), update) if dropped else ones(update)
    norm = math.sqrt(sum(float(np.sum(np.square(u, dtype=np.float64))) for u in jax.tree.leaves(update)))
    return [View(update, weighted, 0.0, min(norm, known.clip))]

  words = (
    'Where zeros are more than usual it compares the rest alone; it clips what it simulates to the norm of the upload.'
  )
  return AdaptiveAttack(*known.repeated('shown', words), views, frozenset({'weights', 'clip'}), rounds=known.rounds)


def _stated(stage: Stage) -> bool:
  """Returns whether the traits of a stage, or an adaptive attack of the library to it, say what its uploads show."""
  traits, special = stage.traits, SPECIAL.get(stage.factory, [])
  declared = traits.sparsifies or traits.noise or traits.clips or traits.bounds or traits.limits or traits.simulated
  return bool(declared) or any(_named(one).startswith('gradleak.') for one in special)


def _zeros(update: Tree) -> float:
  """Returns the fraction of an update's entries that are exactly zero."""
  leaves = jax.tree.leaves(update)
  return sum(int(np.sum(np.asarray(u) == 0)) for u in leaves) / sum(u.size for u in leaves)


def _simulated(known: Known) -> AdaptiveAttack | None:
  """Returns the adaptive attack that simulates what is not random of the defense, too; None where there is nothing."""
  stages = known.defense.stages
  if all(stage.traits.simulated is None for stage in stages):
    return None
  parts = [
    noiseless(m, known.terms) if m.traits.simulated is None else _declared(m)
    for m in stages
    if m.traits.simulated is not None or math.isfinite(norm_bound(m))
  ]
  prior = PRIORS[-1]
  words, settings = known.smooth('It simulates what is not random of the defense, too', 'weights smoothness', prior)
  simulates = Defense(tuple(stage for part in parts for stage in part))
  return known.changed('simulated', words, simulates=simulates, **settings)


def _declared(stage: Stage) -> tuple[Stage, ...]:
  """Returns what the trait `simulated` of a stage gives; raises `UsageError` where it is no `Defense`."""
  assert stage.traits.simulated is not None
  found, name = stage.traits.simulated(stage.settings), f'what the trait simulated of {stage.name} returns'
  return errors.check_instance(name, found, Defense, 'a Defense, such as gradleak.defenses.wrap makes').stages


def noiseless(stage: Stage, terms: int = 1) -> tuple[Stage, ...]:
  """Returns what is simulated of a stage: itself, or if it is random what it does before its noise.

  Args:
    stage: the stage. Where it clips the gradient of each sample, the part clips what they make together.
    terms: see `norm_bound`.
  """
  if stage.traits.noise is None and not stage.traits.random:
    return (stage,)
  if stage.traits.simulated is not None:
    return _declared(stage)
  norm = norm_bound(stage, terms=terms)
  if math.isinf(norm):
    return ()
  (made,) = clip(norm=norm).stages
  return (dataclasses.replace(made, traits=dataclasses.replace(made.traits, place=stage.traits.place)),)


def _imitated(known: Known) -> Sequence[AdaptiveAttack | None]:
  """Returns the adaptive attacks to a function of the update of which nothing is declared, such as a user's own.

  The attacker applies the defense itself to what it simulates. Where the defense is flat (signs, rounding), its
  gradient is zero or undefined. A second attacker takes the gradient of the identity instead (Athalye et al. 2018,
  BPDA; straight-through).
  """
  stages = known.defense.at('step', 'upload')
  if not any(map(_undeclared, stages)):
    return []

  found = []
  for name, words, part in (
    ('simulated', 'It simulates the defense, too, and differentiates through it.', lambda stage: stage),
    (
      'straight-through',
      'It simulates the defense, too, and takes its gradient for that of the identity.',
      lambda stage: dataclasses.replace(
        stage, factory=_straight_through(stage.factory), label=f'{stage.name}, straight-through'
      ),
    ),
  ):
    parts = [(part(stage),) if _undeclared(stage) else noiseless(stage, known.terms) for stage in stages]
    simulates = Defense(tuple(one for several in parts for one in several))

    def views(upload: Upload, simulates: Defense = simulates) -> list[View]:
      update = known.observed(upload)
      return [everything(update)._replace(weights=known.besides(simulates, upload, update))]

    name, words = known.repeated(name, words)
    found.append(AdaptiveAttack(name, words, views, simulates=simulates, rounds=known.rounds))
  return found


def _undeclared(stage: Stage) -> bool:
  """Returns whether a stage that acts on updates is a function of them of which nothing is stated."""
  return not (stage.traits.random or _stated(stage))


@functools.cache  # one function, so that equal defenses compile once
def _straight_through(factory: Callable) -> Callable:
  """Returns the factory of the same transformations with the gradient of the identity."""

  @functools.wraps(factory)
  def made(*arguments: Any, **settings: Any) -> optax.GradientTransformationExtraArgs:
    inner = optax.with_extra_args_support(factory(*arguments, **settings))

    def update(updates: Tree, state: Any, params: Tree = None, **extra: Any) -> tuple[Tree, Any]:
      out, state = inner.update(updates, state, params, **extra)
      return jax.tree.map(lambda x, y: x + jax.lax.stop_gradient(y - x), updates, out), state

    return optax.GradientTransformationExtraArgs(inner.init, update)

  return made


def _learned(known: Known) -> list[AdaptiveAttack]:
  """Returns the adaptive attack of attacks that learn: from uploads that went through the same defense; if any."""
  if not known.defense.stages:
    return []
  words = 'It learns from uploads of its auxiliary data that went through the same defense, drawn anew for each.'
  return [AdaptiveAttack(_LEARNED, words, NON_ADAPTIVE.views, simulates=known.defense)]


def _combined(known: Known) -> AdaptiveAttack | None:
  """Returns the adaptive attack of closed forms that combine neurons under noise and pruning (Fidel, section II-B)."""
  if not known.adds_noise and not any(stage.traits.sparsifies for stage in known.defense.stages):
    return None
  words = 'It combines all neurons that hold the same image, over the entries that were sent.'
  return known.changed('combined', words, combine=True)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _accumulated(defense: Defense, rounds: int, update: Tree, params: Tree) -> Tree:
  """Returns what each round sends of the same update, every leaf [R, …]."""

  def one(state: Any, key: jax.Array) -> tuple[Any, Tree]:
    sent, state = defense.update(update, state, params, key=key)
    return state, sent

  return jax.lax.scan(one, defense.init(update), jax.random.split(jax.random.key(0), rounds))[1]


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def typical_update(client: Any, sample_shape: tuple, num_samples: int, variables: Mapping) -> Tree:
  """Returns an undefended update of samples and targets drawn at random."""
  return _typical(client, sample_shape, num_samples, variables)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def typical_squared_norm(client: Any, sample_shape: tuple, num_samples: int, variables: Mapping) -> jax.Array:
  """Returns the squared norm of an undefended update of samples and targets drawn at random."""
  return trees.squared_norm(_typical(client, sample_shape, num_samples, variables))


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def typical_zeros(client: Any, sample_shape: tuple, num_samples: int, variables: Mapping) -> jax.Array:
  """Returns the fraction of zeros in an undefended update of samples and targets drawn at random."""
  leaves = jax.tree.leaves(_typical(client, sample_shape, num_samples, variables))
  return sum(jnp.sum(u == 0) for u in leaves) / sum(u.size for u in leaves)


def _typical(client: Any, sample_shape: tuple, num_samples: int, variables: Mapping) -> Tree:
  drawn, classes = jax.random.split(jax.random.key(0))
  samples = client.modality.drawn(drawn, (num_samples, *sample_shape))
  outputs = outputs_shape(client.model, variables, sample_shape)
  targets = client.loss.targets.draw(classes, (num_samples, *outputs))
  return client.undefended().local_update(None, variables, samples, targets).update
