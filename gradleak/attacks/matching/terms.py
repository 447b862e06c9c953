"""The terms of the objective beside the distance: what an attacker holds for likely of images.

A term is one function and one entry of `TERMS`, whose name is a setting of `gradient_matching` and of the attacks made
of it. Each is zero where the images are as expected.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gradleak.core import errors, trees
from gradleak.modalities import Modality
from gradleak.priors.gaussian import squared_length
from gradleak.threat import Observation

_ROUNDING = 1e-6  # of the squared norm of an update without noise
_OPPONENTS = (1, 1, 1), (1, 0, -1), (1, -2, 1)  # brightness, and what differs between colours
_COLOURS, _BENDS = 2.0, 0.5  # weights of differences of colour, and of second order
_FEATURES = 96  # of the random convolution, as published


class Given(NamedTuple):
  """What a term may use beside the images.

  Attributes:
    apply: of the model that is attacked.
    observation: the `Observation`.
    copies: dummy samples of each private one.
    done, steps: steps done, and their number.
    kept: paths of the parameters of which nothing is sent.
  """

  apply: Callable[..., Any]
  observation: Observation
  copies: int = 1
  done: jax.Array | int = 0
  steps: int = 1
  kept: Collection[tuple[str, ...]] = ()


class Term(NamedTuple):
  """A term, and what is known of it.

  Attributes:
    of: (images [copies · N, H, W, C], `Given`) -> a float32 scalar; or a class of such functions, whose objects hold
      their `weight` and are the setting.
    weight: by default. A number is always part of the sum, and traced; None leaves the term out.
    high: the largest weight; the least is 0.
    relative: whether the weight is in units of the distance between the observed update and none.
    together: whether the images are those of all seeds, [seeds, copies · N, H, W, C].
    beside: 'seeds' or 'orders', the setting without which there is nothing to compare; the term is then left out.
    needs: one of `NEEDS`.
    without: settings that must keep their defaults.
    special: whether it is defined on the samples of some modalities only, see `Modality.terms`.
  """

  of: Callable[..., Any]
  weight: float | jax.Array | None = None
  high: float = math.inf
  relative: bool = False
  together: bool = False
  beside: str = ''
  needs: str = ''
  without: tuple[str, ...] = ()
  special: bool = False

  def suits(self, name: str, kind: Modality) -> bool:
    """Returns whether it is defined on the samples of a modality."""
    return not self.special or name in kind.terms

  @property
  def about(self) -> str:
    """What its setting means, from the first sentence of the function's docstring."""
    text = ' '.join((self.of.__doc__ or '').partition('\n\n')[0].split())
    found = f'weight of {text.removeprefix("Returns ").rstrip(".")}'
    return f'{found}, in units of the distance between the observed update and none' if self.relative else found


# What a term may need -> (whether an `Observation` has it, in words).
NEEDS: dict[str, tuple[Callable[[Observation], bool], str]] = {
  '': (lambda seen: True, ''),
  'batch_stats': (lambda seen: bool(jax.tree.leaves(seen.variables.get('batch_stats', {}))), 'a model with BatchNorm'),
  'gaussian': (
    lambda seen: isinstance(seen.prepared, dict) and seen.prepared.keys() == {'mean', 'basis'},
    'a Gaussian prior, which the attack bayes learns from public samples',
  ),
  'class_means': (lambda seen: seen.class_means is not None, 'auxiliary data: public=(samples, targets) of a scenario'),
}


def total_variation(images: jax.Array, given: Given | None = None) -> jax.Array:
  """Returns the anisotropic total variation, mean |∂x/∂row| + mean |∂x/∂column|; images [N, H, W, C].

  Along a side of one pixel there is no difference, and nothing is added.
  """
  del given
  return _sizes(images[:, 1:] - images[:, :-1], images[:, :, 1:] - images[:, :, :-1])


def _sizes(*differences: jax.Array) -> jax.Array:
  """Returns the sum of the mean magnitudes of differences, of those that there are."""
  return sum((jnp.mean(trees.magnitude(x)) for x in differences if x.size), jnp.zeros((), differences[0].dtype))


def roughness(images: jax.Array, given: Given | None = None) -> jax.Array:
  """Returns the total variation of brightness and of two colour differences, and half that of their slopes.

  Natural images have stronger edges in brightness than in colour, so colour differences count twice. The three axes are
  orthonormal: (R + G + B)/√3, (R − B)/√2 and (R − 2G + B)/√6. Images with any other number of channels are taken as
  they are. Total variation alone prefers flat patches. Differences of second order allow slopes, as in total
  generalised variation (Bredies, Kunisch, Pock 2010); the mixed one counts twice.
  """
  del given
  if images.shape[-1] == len(_OPPONENTS):
    axes = np.asarray(_OPPONENTS, np.float32)
    axes = axes / np.linalg.norm(axes, axis=1, keepdims=True) * np.float32([[1], [_COLOURS], [_COLOURS]])
    images = images @ jnp.asarray(axes.T, images.dtype)
  rows, columns = jnp.diff(images, axis=1), jnp.diff(images, axis=2)
  bends = _sizes(jnp.diff(rows, axis=1), jnp.diff(columns, axis=2), 2 * jnp.diff(rows, axis=2))
  return _sizes(rows, columns) + _BENDS * bends


def mean_square(images: jax.Array, given: Given | None = None) -> jax.Array:
  """Returns the mean squared pixel."""
  del given
  return jnp.mean(jnp.square(images))


def batch_statistics(images: jax.Array, given: Given) -> jax.Array:
  """Returns Σ_l ‖μ_l − BN mean‖ + ‖σ²_l − BN var‖ over the BatchNorm layers (GradInversion, Yin et al. 2021, eq. 9).

  After a pass the running averages are m of the old ones and 1 − m of the batch's: their change shows the batch. The
  momentum m of each layer is what a pass of zeros leaves of running averages of 1. What it leaves whole is a count.
  """
  variables = given.observation.variables
  _, after = given.apply(variables, images, True, None)
  changes = trees.subtract(after, variables['batch_stats'])
  pairs = zip(jax.tree.leaves(changes), _momenta(given.apply, variables, images), strict=True)
  return jnp.sum(jnp.stack([trees.norm(change) / (1 - momentum) for change, momentum in pairs if momentum < 1]))


def _momenta(apply: Callable[..., Any], variables: Mapping, images: jax.Array) -> list[float]:
  """Returns the momentum of each of the running averages, in the order of leaves, from shapes only."""

  def nothing(tree: Any) -> Any:
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), tree)

  @jax.jit
  def kept() -> Any:
    zeros = nothing(variables)
    ones = {**zeros, 'batch_stats': jax.tree.map(jnp.ones_like, zeros['batch_stats'])}
    first, second = (apply(old, nothing(images), True, None)[1] for old in (ones, zeros))
    return jax.tree.map(lambda a, b: jnp.mean(a - b), first, second)

  with jax.ensure_compile_time_eval():
    return [float(momentum) for momentum in jax.tree.leaves(kept())]


def disagreement(images: jax.Array, given: Given | None = None) -> jax.Array:
  """Returns the mean squared distance from the mean over several starts of the same images, [starts, N, H, W, C].

  This is GradInversion's group consistency (Yin et al. 2021, eq. 11) with the pixel mean as the consensus. First each
  start is shifted by whole pixels to where it correlates best with the consensus.
  """
  del given
  consensus = jax.lax.stop_gradient(jnp.mean(images, axis=0))
  shifted = jax.vmap(lambda start: registered(consensus, start))(jax.lax.stop_gradient(images))
  consensus = jnp.mean(shifted, axis=0)
  targets = jax.vmap(lambda start: registered(start, consensus))(jax.lax.stop_gradient(images))
  return jnp.mean(jnp.square(images - targets))


def registered(fixed: jax.Array, moving: jax.Array) -> jax.Array:
  """Returns `moving`, each image shifted (cyclically) by the whole pixels at which it correlates best with `fixed`.

  By phase correlation: the largest value of the inverse transform of the normalised cross-power spectrum.

  Args:
    fixed, moving: [N, H, W, C].
  """

  def one(fixed: jax.Array, moving: jax.Array) -> jax.Array:
    spectrum = jnp.fft.fft2(fixed, axes=(0, 1)) * jnp.conj(jnp.fft.fft2(moving, axes=(0, 1)))
    spectrum = jnp.sum(spectrum, axis=-1)
    size = jnp.abs(spectrum)
    surface = jnp.fft.ifft2(spectrum / jnp.where(size > 0, size, jnp.ones_like(size)).astype(spectrum.dtype)).real
    row, column = jnp.divmod(jnp.argmax(surface), surface.shape[1])
    return jnp.roll(moving, (row, column), axis=(0, 1))

  return jax.vmap(one)(fixed, moving)


def disorder(images: jax.Array, given: Given) -> jax.Array:
  """Returns how far the epochs' dummy samples are from being the same ones in another order.

  Dimitrov et al. (2022, section 4.2) take the maximum over an epoch's images of a random 3×3 convolution, which does
  not depend on their order. The result is the mean squared difference between two epochs, over all pairs.
  """
  count, channels = given.copies, images.shape[-1]
  kernel = jax.random.normal(jax.random.key(0), (3, 3, channels, _FEATURES), images.dtype) / jnp.sqrt(9.0 * channels)

  def features(epoch: jax.Array) -> jax.Array:
    found = jax.lax.conv_general_dilated(epoch, kernel, (1, 1), 'SAME', dimension_numbers=('NHWC', 'HWIO', 'NHWC'))
    return jnp.max(found, axis=0)

  of_epochs = jax.vmap(features)(images.reshape(count, -1, *images.shape[1:]))
  pairs = jnp.square(of_epochs[:, None] - of_epochs[None])
  return jnp.sum(jnp.mean(pairs, axis=(2, 3, 4))) / max(1, count * (count - 1))


def gaussian_prior(images: jax.Array, given: Given) -> jax.Array:
  """Returns σ²·Σ ‖z‖² of images mean + z·basis, where σ² is the variance of the known noise in an entry of the update.

  With the squared Euclidean distance, it is the posterior density of images under a Gaussian prior (`priors.gaussian`).
  Where no noise is known, σ² is 1e-6 of the mean square of the update.
  """
  observation = given.observation
  count = trees.entries(observation.update, given.kept)
  if observation.weights is not None:
    count = sum(jnp.sum(leaf.astype(jnp.float32)) for leaf in trees.leaves_but(observation.weights, given.kept))
  energy = jnp.maximum(observation.noise, _ROUNDING * trees.squared_norm(observation.update))
  return energy / count * squared_length(images, observation.prepared)


class Denoising(NamedTuple):
  """Regularisation by a denoiser D that was learned (Romano, Elad, Milanfar 2017), its noise annealed.

  Attributes:
    make: (weights, noisy images, standard deviations [N]) -> images.
    weight: of the root mean square of x − D(x + σε), whose slope is taken without D's own.
    first, last: σ at the first and at the last step; it falls geometrically.
  """

  make: Callable[..., jax.Array]
  weight: float | jax.Array
  first: float
  last: float

  def __call__(self, images: jax.Array, given: Given) -> jax.Array:
    """Returns the root mean square at a step; ε is drawn anew in each, the same for all trials."""
    images = images.reshape(-1, *images.shape[2:])
    count = jnp.asarray(given.done)
    level = self.first * (self.last / self.first) ** (count.astype(jnp.float32) / max(1, given.steps - 1))
    noise = jax.random.normal(jax.random.fold_in(jax.random.key(0), count), images.shape)
    levels = jnp.broadcast_to(level, images.shape[:1])
    clean = jax.lax.stop_gradient(self.make(given.observation.prepared, images + level * noise, levels))
    return trees.safe_sqrt(jnp.mean(jnp.square(images - clean)))


# Setting -> its term, in the order in which they are summed.
TERMS: dict[str, Term] = {
  'tv': Term(total_variation, 0.0, special=True),
  'roughness': Term(roughness, special=True),
  'l2': Term(mean_square, 0.0),
  'prior': Term(total_variation, 0.0, relative=True, special=True),
  'batch_norm': Term(batch_statistics, needs='batch_stats'),
  'group': Term(disagreement, together=True, beside='seeds', special=True),
  'order': Term(disorder, beside='orders', special=True),
  'gaussian': Term(gaussian_prior, needs='gaussian'),
  'denoising': Term(Denoising, together=True, special=True),
}


def summed(given: Mapping[str, Any], changed: Collection[str] = ()) -> tuple[tuple[str, Term], ...]:
  """Returns names and terms of a sum: those that settings, or their defaults, give a weight, each with that weight.

  Args:
    given: settings by name.
    changed: names of all settings that are not at their defaults.

  Raises:
    UsageError: for a weight out of range, or a setting that a term must not meet.
  """
  found = {}
  for name, term in TERMS.items():
    value = given.get(name, term.weight)
    if value is None:
      continue
    if not isinstance(term.of, type):
      errors.check_number(name, value, low=0, high=term.high, finite=True)
    elif not isinstance(value, term.of):
      raise errors.UsageError(f'{name} is {errors.shown(value)}, expected a {term.of.__name__}')
    for other in set(term.without).intersection(changed):
      raise errors.UsageError(f'{name} is not for a search with {other}: leave out one of the two')
    own: Any = value
    found[name] = term._replace(of=own, weight=own.weight) if isinstance(term.of, type) else term._replace(weight=value)
  return tuple(found.items())


def in_use(name: str, term: Term) -> bool:
  """Returns whether a term of a sum is in use: one that is left out by default where it is there.

  Another one is in use where its weight is known not to be 0.
  """
  return TERMS[name].weight is None or not (isinstance(term.weight, jax.core.Tracer) or term.weight == 0)


def check_modality(terms: Iterable[tuple[str, Term]], kind: Modality) -> None:
  """Checks the terms of a sum; raises `UsageError` for one in use that is not defined on such samples."""
  for name, term in terms:
    if in_use(name, term) and not term.suits(name, kind):
      raise errors.UsageError(f'{name} is not defined on {kind.noun[1]}: leave it out')


def addends(terms: Mapping[str, Term], images: jax.Array, given: Given, unit: jax.Array) -> list[jax.Array]:
  """Returns what is added to the distance, weight · function; weights of one function are added first.

  Args:
    terms: by name, as `summed` returns them.
    images, given: what their functions take.
    unit: distance between the observed update and none.

  Raises:
    UsageError: for a term that needs what the observation lacks.
  """
  weights: dict[int, Any] = {}
  for name, term in terms.items():
    has, words = NEEDS[term.needs]
    if not has(given.observation):
      raise errors.UsageError(f'{name} needs {words}')
    weight = term.weight * unit if term.relative else term.weight
    weights[id(term.of)] = weights[id(term.of)] + weight if id(term.of) in weights else weight
  functions = {id(term.of): term.of for term in terms.values()}
  return [weight * functions[which](images, given) for which, weight in weights.items()]
