"""Attackers who know the defense: what each makes of the same upload before it matches.

Most counter-measures only change what is compared: masks, averages, a known noise and a known clip are data to gradient
matching, so that unaware and aware attackers are lanes of one compiled program. The few that need another attack say so
by its settings. They run on the host, once per upload.
"""

import functools
import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gradleak import trees
from gradleak.defenses.compensation import compensate, noise_variance
from gradleak.defenses.graddefense import num_perturbed
from gradleak.defenses.soteria import defended_kernel

# Slices to mute are guessed in so many ways at most, the most likely first.
MAX_GUESSES = 8

# Defenses that leave zeros where they withhold.
_WITHHOLDING = ('prune', 'topk', 'dgc', 'fragmentation', 'fragmentation_random', 'soteria', 'outpost')

# Weights of total variation against noise and gaps, in units of the distance: settings of `matching`'s `prior`.
PRIORS = (1e-3, 1e-2, 5e-2)

# Variance of the noise that a defense adds to every entry, from its settings and the number of samples.
_VARIANCE = {
  'gaussian': lambda s, n: s['stddev'] ** 2,
  'laplace': lambda s, n: 2 * s['scale'] ** 2,
  'client_dp': lambda s, n: (s['norm'] * s['noise']) ** 2 if s['noise'] else 0.0,
  'dpsgd': lambda s, n: (s['norm'] * s['noise'] / n) ** 2 if s['noise'] else 0.0,
}
_RANDOM = (*_VARIANCE, 'outpost', 'fragmentation', 'fragmentation_random', 'graddefense', 'graddefense_step')
_CLIPPING = ('clip', 'client_dp')


class View(NamedTuple):
  """What an attacker compares: the fields of `Observation` of the same names, as NumPy arrays."""

  update: object
  compared: object
  noise: float
  clip: float


class Counter(NamedTuple):
  """A counter-measure to one defense.

  Attributes:
    name: one word or several joined by '+'; 'unaware' for none.
    words: what the attacker does, a sentence; empty for none.
    views: upload tree -> the `View`s to try; the attacker keeps the one that matches best.
    count: how many views that are.
    settings: settings of the attack that it changes, as (name, value) pairs.
    rounds: how many uploads of the same samples are averaged first.
  """

  name: str
  words: str
  views: Callable
  count: int = 1
  settings: tuple = ()
  rounds: int = 1


def everything(update):
  """Returns the `View` of an attacker who takes the upload as a gradient."""
  return View(update, jax.tree.map(lambda u: np.ones(u.shape, bool), update), 0.0, math.inf)


UNAWARE = Counter('unaware', '', lambda update: [everything(update)])


def counters(defense, context, num_samples, rounds=1):
  """Returns the counter-measures to a defense, a list of `Counter`; empty where none is known.

  Args:
    defense: a `defenses.Defense`; transformations of a user's own have no members, hence no counter-measure.
    context: the `defenses.registry.Context` it was made for.
    num_samples: samples behind one upload.
    rounds: uploads of the same samples on the same model that an aware attacker may average.
  """
  names = [member.name for member in defense.members]
  settings = {member.name: member.settings for member in defense.members}
  averaged = rounds if any(name in _RANDOM for name in names) else 1
  known = _Known(defense.members, num_samples, averaged)
  found = []
  if known.name:
    found.append(Counter(known.name, known.words, lambda update: [known.view(update)], rounds=averaged))
  prior = _prior(defense, context, num_samples, averaged, known)
  if prior:
    words = f'It weights smoothness by {prior:g}, after the noise and the gaps that it expects.'
    found.append(_changed('prior', words, known, averaged, prior=prior))
  if 'soteria' in names:
    found.append(_muted_layer(context, known, averaged))
  if 'graddefense' in names:
    slicing = next(member.arguments[0] for member in defense.members if member.name == 'graddefense')
    found.append(_muted_slices(slicing, settings['graddefense'], known, averaged))
    found.append(_compensated(settings['graddefense'], known, averaged))
  if 'concealment' in names:
    found.append(
      _changed('decoys', 'It reconstructs the concealed samples beside the private ones.', known, averaged, decoys=1)
    )
    if context.public is not None:
      words = 'It starts from the mean image of the class in its auxiliary data.'
      found.append(_changed('class_average', words, known, averaged, start='class_average'))
  return found


class _Known:
  """What a chain's settings tell about every upload: zeros, a clip, noise."""

  def __init__(self, members, num_samples, rounds):
    names = [member.name for member in members]
    self.withholds = any(name in _WITHHOLDING for name in names)
    clips = [i for i, name in enumerate(names) if name in _CLIPPING]
    norms = [members[i].settings['norm'] for i in clips]
    self.bound = min([member.settings['norm'] for member in members if 'norm' in member.settings], default=math.inf)
    self.clip = norms[0] if norms and clips[0] == 0 else math.inf  # later ones bound what the attacker cannot redo
    last = clips[-1] if clips else 0
    variances = [_VARIANCE[m.name](m.settings, num_samples) for m in members[last:] if m.name in _VARIANCE]
    self.variance = sum(variances) / rounds
    parts = {
      'averaged': (rounds > 1, ''),  # the rounds are stated elsewhere
      'masked': (self.withholds, 'It compares only what was sent and is not zero.'),
      'clipped': (math.isfinite(self.clip), 'It clips what it simulates to the same norm.'),
      'floor': (self.variance > 0, 'It stops at the distance that the noise alone would leave.'),
    }
    self.parts = {part: words for part, (applies, words) in parts.items() if applies}
    self.name = '+'.join(self.parts)
    self.words = ' '.join(filter(None, self.parts.values()))

  def view(self, update, compared=None):
    """Returns the `View` of all that is known; `compared` restricts it further."""
    mask = compared or jax.tree.map(lambda u: np.ones(u.shape, bool), update)
    if self.withholds:
      mask = jax.tree.map(lambda m, u: m & (u != 0), mask, update)
    count = sum(int(m.sum()) for m in jax.tree.leaves(mask))
    return View(update, mask, self.variance * count, self.clip)


def _muted_layer(context, known, rounds):
  """Soteria: the layer that it prunes is left out (Wang et al. 2022, table I, column D)."""
  client, image = context.client, jnp.zeros((1, *context.image_shape), jnp.float32)
  num_features = jax.eval_shape(client.model.features, context.variables, image).shape[1]
  params = context.variables['params']
  path = defended_kernel(client.model, params, num_features, client.num_classes, context.image_shape)
  layer = path[:-1] or path  # with its bias

  def views(update):
    def keep(where, u):
      return np.full(u.shape, trees.path_names(where)[: len(layer)] != layer)

    return [known.view(update, jax.tree_util.tree_map_with_path(keep, update))]

  return Counter('muted', 'It leaves out the layer that the defense prunes.', views, rounds=rounds)


def _muted_slices(slicing, settings, known, rounds):
  """GradDefense: the slices that bear noise are left out, guessed by brute force (Wang et al. 2022, section IV-B).

  Noise of standard deviation σ has the median magnitude 0.674·σ; the guesses begin with the slices nearest to it.
  """
  total = slicing.num_slices
  muted = int(num_perturbed(settings['ratio'], total))
  count = min(MAX_GUESSES, math.comb(min(total, muted + 3), muted))

  def views(update):
    numbers = [np.asarray(n).ravel() for n in jax.tree.leaves(slicing.slices)]
    entries = [np.abs(np.asarray(u)).ravel() for u in jax.tree.leaves(update)]
    numbers, entries = np.concatenate(numbers), np.concatenate(entries)
    median = np.array([np.median(entries[numbers == s]) if (numbers == s).any() else 0.0 for s in range(total)])
    level = 0.6745 * max(settings['stddev'], 1e-12) / math.sqrt(rounds)
    unlike = np.abs(np.log(np.maximum(median, 1e-30) / level))
    by_likeness = np.argsort(unlike, kind='stable')
    guesses = sorted(itertools.combinations(range(min(total, muted + 3)), muted), key=sum)
    return [
      known.view(update, jax.tree.map(lambda s, g=by_likeness[list(guess)]: ~np.isin(s, g), slicing.slices))
      for guess in guesses[:count]
    ]

  words = f'It leaves out {muted} of the {total} slices, in the {count} likeliest ways, and keeps what matches best.'
  return Counter('slices', words, views, count, rounds=rounds)


def _compensated(settings, known, rounds):
  """GradDefense: the server's compensation, abused on one client's upload (Wang et al. 2022, table III [E])."""
  noise = {name: settings[name] for name in ('stddev', 'ratio', 'num_slices')}
  variance = noise_variance(np.full(rounds, 1 / rounds), **noise)  # of the mean over the rounds

  def views(update):
    cleaned = compensate(jax.tree.map(jnp.asarray, update), variance)
    return [known.view(jax.tree.map(np.asarray, cleaned))]

  return Counter('compensated', "It applies the server's compensation to the upload first.", views, rounds=rounds)


def _changed(name, words, known, rounds, **settings):
  """Returns the counter-measure that is another attack on all that is known but the noise level."""
  parts = {part: said for part, said in known.parts.items() if part != 'floor'}
  name, words = '+'.join([*parts, name]), ' '.join(filter(None, [*parts.values(), words]))

  def views(update):
    return [known.view(update)._replace(noise=0.0)]

  return Counter(name, words, views, settings=tuple(settings.items()), rounds=rounds)


def _prior(defense, context, num_samples, rounds, known):
  """Returns the one of `PRIORS` that suits the noise and the gaps, or None where there are none.

  At the truth, noise of squared norm n on a gradient of squared norm g leaves the cosine distance 1 − 1/√(1 + n/g):
  that is the weight. The attacker learns g by simulating the client on random pixels, and knows its bound.
  """
  noise = sum(_energy(member, context, num_samples) for member in defense.members) / rounds
  if noise:
    typical = _typical_squared_norm(context.client, context.image_shape, num_samples, context.variables)
    signal = max(min(float(typical), known.bound**2), 1e-30)
    weight = 1 - 1 / math.sqrt(1 + noise / signal)
    return min(PRIORS, key=lambda prior: abs(math.log(prior / max(weight, 1e-12))))
  return PRIORS[0] if known.withholds else None


def _energy(member, context, num_samples):
  """Returns the expected squared norm of the noise that a defense adds to an update."""
  params, settings = context.variables['params'], member.settings
  size = sum(x.size for x in jax.tree.leaves(params))
  if member.name in _VARIANCE:
    return size * _VARIANCE[member.name](settings, num_samples)
  if member.name in ('graddefense', 'graddefense_step'):
    return size * settings['stddev'] ** 2 * min(1.0, settings['ratio'])
  if member.name == 'outpost':
    spread = sum(x.size * min(1.0, float(np.var(x))) ** 2 for x in map(np.asarray, jax.tree.leaves(params)))
    return settings['fisher'] * settings['noise'] ** 2 * spread
  return 0.0


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _typical_squared_norm(client, image_shape, num_samples, variables):
  """Returns the squared norm of an undefended update of samples of random pixels and labels."""
  pixels, classes = jax.random.split(jax.random.key(0))
  images = jax.random.uniform(pixels, (num_samples, *image_shape))
  labels = jax.random.randint(classes, (num_samples,), 0, client.num_classes)
  return trees.squared_norm(client.undefended().local_update(None, variables, images, labels).update)
