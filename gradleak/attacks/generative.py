"""Attacks with a prior that was trained on other images of the same kind: GGL, GIAS, plug-and-play."""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from gradleak import errors
from gradleak.attacks.base import Attack, attack
from gradleak.attacks.evolution import evolution
from gradleak.attacks.matching import Denoising, Matching, Priors, gradient_matching
from gradleak.attacks.optimizers import first_order
from gradleak.attacks.simulated import Simulation
from gradleak.federated import Client
from gradleak.priors import denoiser, gan, trained, training
from gradleak.priors.base import Generator
from gradleak.priors.latent import of_latents, tuned
from gradleak.trees import Tree

GGL = 'Li, Zhang, Liu, Liu: Auditing Privacy Defenses in Federated Learning via Generative Gradient Leakage. CVPR 2022.'
GIAS = 'Jeon, Kim, Lee, Oh, Ok: Gradient Inversion with Generative Image Prior. NeurIPS 2021.'
PNP = (
  'Romano, Elad, Milanfar: The Little Engine That Could: Regularization by Denoising (RED). SIAM Journal on Imaging '
  'Sciences 2017.'
)


def _learned(
  key: jax.Array, scenario: Any, settings: Mapping[str, Any], batch_size: int, kind: str = 'generator'
) -> Tree:
  """Returns the weights of the prior: those of the `file`, or trained on the scenario's public images.

  Raises:
    UsageError: for a prior that has seen a private image, and for a file that cannot be read.
  """
  del batch_size
  if settings['file']:
    prior = trained.load(settings['file'], kind)
    prior.check(scenario.images)
    return prior.weights
  images = scenario.public[0]
  shape = tuple(images.shape[1:])
  if kind == 'generator':
    made: Any = gan.training(shape, width=settings['width'], batch_size=32, learning_rate=2e-4)
  else:
    made = denoiser.training(shape, width=settings['width'], batch_size=32)
  return training.train(key, made, images, settings['training_steps']).average


def _told(made: Attack, file: str, kind: str = 'generator') -> Attack:
  """Returns the `Attack` that says what it holds: the public images, or what was learned from others."""
  if not file:
    return made._replace(auxiliary_data=True)
  about = trained.load(file, kind).about
  if 'dataset' not in about:
    return made._replace(prior=f'It holds a {kind} from a file that does not say what it was trained on.')
  images = f'{about["images"]:,} images of {about["dataset"]}, split {about["split"]}'
  return made._replace(prior=f'It holds a {kind} that was trained on {images}; no private image is among them.')


def _check_training(width: int, training_steps: int) -> None:
  errors.check_number('width', width, low=1, high=4096, integer=True)
  training.check_steps('training_steps', training_steps)


def _generator(file: str, width: int, make: Any) -> Generator:
  """Returns the `Generator` of a file, or of what is trained on public images of any shape."""
  if file:
    found = trained.load(file)
    return make(found.make, found.latent)
  return _of_any_shape(width, make)


@functools.cache
def _of_any_shape(width: int, make: Any) -> Generator:
  def of(shape: tuple[int, ...]) -> Generator:
    return make(trained.making(gan.Generator(tuple(shape[1:]), width)), gan.LATENT)

  return Generator(
    lambda key, shape, learned: of(shape).init(key, shape, learned),
    lambda optimised, kept, shape, learned: of(shape).apply(optimised, kept, shape, learned),
  )


@attack(citation=GGL, reads=('weights', 'clip'), prepare=_learned)
def ggl(
  client: Client,
  *,
  file: str = '',
  steps: int = 500,
  population: int = 50,
  kl: float = 0.1,
  distance: str = 'squared_euclidean',
  width: int = 16,
  training_steps: int = 2000,
) -> Attack:
  """Generative gradient leakage (Li et al. 2022): CMA-ES on the latents of a trained generator.

  500 generations of 50 candidates and the weight of the KL divergence are the published ones; there the generator is
  told the label, and the distance is divided by the number of tensors; here the KL divergence is weighed in units of
  the observed update's own distance from none.

  Args:
    client: the `Client` that is simulated.
    file: of `launch/train_prior.py`, or of a PyTorch generator of dense layers; '' trains on the public images.
    steps: generations.
    population: candidates of each.
    kl: weight of `evolution.divergence`.
    distance: as of `gradient_matching`.
    width, training_steps: of a generator that is trained on the public images.

  Raises:
    UsageError: for a value out of range or a file that cannot be read; when run, for a prior that has seen a private
      image.
  """
  _check_training(width, training_steps)
  matching = Matching(
    client,
    optax.with_extra_args_support(optax.identity()),
    Simulation('client', 0, 0, 1.0, 'known'),
    Priors(0.0, 0.0, 0.0, None, None, None),
    distance=distance,
    layer_weighting='uniform',
    box=False,
    start='normal',
    decoys=0,
    tolerance=0.0,
    form='auto',
    seeds=1,
    partial=None,
    sharpness=None,
    generator=_generator(file, width, of_latents),
  )
  found = evolution(matching, population=population, generations=steps, kl=kl, labels='inferred')
  return _told(found, file)


@attack(citation=GIAS, reads=('weights', 'noise', 'clip'), prepare=_learned)
def gias(
  client: Client,
  *,
  file: str = '',
  steps: int = 6000,
  latent_steps: int = 1000,
  learning_rate: float = 3e-2,
  weight_rate: float = 1e-3,
  tv: float = 1e-6,
  distance: str = 'cosine',
  width: int = 16,
  training_steps: int = 2000,
) -> Attack:
  """Gradient inversion with an adapted generator (Jeon et al. 2021): first the latents, then the weights.

  Adam at 3e-2 for 1,000 steps and then at 1e-3 for 5,000, the cosine distance and TV 1e-6 are the published settings
  for 32×32 pixels. With `latent_steps` = `steps` the weights stay: GGL by gradient descent.

  Args:
    client: the `Client` that is simulated.
    file, width, training_steps: as of `ggl`.
    steps: of both parts together.
    latent_steps: of the first part.
    learning_rate, weight_rate: of the first and of the second part.
    tv, distance: as of `gradient_matching`.

  Raises:
    UsageError: as `ggl`.
  """
  _check_training(width, training_steps)
  errors.check_number('latent_steps', latent_steps, low=0, high=steps, integer=True)
  optimizer = in_turn(first_order('adam', learning_rate, steps), first_order('adam', weight_rate, steps), latent_steps)
  found = gradient_matching(
    client,
    optimizer,
    steps,
    distance=distance,
    tv=tv,
    labels='known',
    generator=_generator(file, width, tuned),
  )
  return _told(found, file)


@attack(citation=PNP, reads=('weights', 'noise', 'clip'), prepare=functools.partial(_learned, kind='denoiser'))
def pnp(
  client: Client,
  *,
  file: str = '',
  steps: int = 2000,
  learning_rate: float = 0.03,
  tv: float = 0.0,
  prior: float = 1e-2,
  first_level: float = 0.3,
  last_level: float = 0.03,
  width: int = 16,
  training_steps: int = 2000,
) -> Attack:
  """Plug-and-play matching: `csdlg_fast` with a denoiser's score in place of total variation, annealed.

  Ours; the regularisation is RED's (Romano et al. 2017, eq. 15), on a noisy image as in sampling by diffusion.

  Args:
    client: the `Client` that is simulated.
    file, width, training_steps: as of `ggl`; of `launch/train_prior.py --kind=denoiser`.
    steps, learning_rate, tv: as of `csdlg_fast`.
    prior: weight of the regularisation, see `matching.Denoising`; attackers who know the noise weigh it by that.
    first_level, last_level: the noise's standard deviation at the first and the last step.

  Raises:
    UsageError: as `ggl`.
  """
  _check_training(width, training_steps)
  errors.check_number('prior', prior, low=0, finite=True)
  for name, level in (('first_level', first_level), ('last_level', last_level)):
    errors.check_number(name, level, low=denoiser.LEVELS[0], high=denoiser.LEVELS[1])
  make = trained.load(file, 'denoiser').make if file else _denoise_any_shape(width)
  found = gradient_matching(
    client,
    first_order('adam99', learning_rate, steps, gradient='plain', decay='cosine'),
    steps,
    distance='chordal',
    tv=tv,
    box=True,
    start='constant',
    labels='known',
    denoising=Denoising(make, prior, first_level, last_level, steps),
  )
  return _told(found, file, 'denoiser')


@functools.cache
def _denoise_any_shape(width: int) -> Any:
  def make(weights: Tree, noisy: jax.Array, level: jax.Array) -> jax.Array:
    return trained.making(denoiser.Denoiser(tuple(noisy.shape[1:]), width))(weights, noisy, level)

  return make


class InTurn(NamedTuple):
  """State of `in_turn`: steps done, and the states of the two optimizers."""

  count: jax.Array
  first: Any
  second: Any


def in_turn(
  first: optax.GradientTransformation, second: optax.GradientTransformation, at: int
) -> optax.GradientTransformationExtraArgs:
  """Returns the optimizer that moves all but the change of the generator's weights for `at` steps, then that alone."""
  parts = tuple(map(optax.with_extra_args_support, (first, second)))

  def split(dummy: dict) -> tuple[dict, Tree]:
    rest = {**dummy, 'weights': {k: leaf for k, leaf in dummy['weights'].items() if k != 'change'}}
    return rest, dummy['weights']['change']

  def init(dummy: dict) -> InTurn:
    rest, change = split(dummy)
    return InTurn(jnp.zeros((), jnp.int32), parts[0].init(rest), parts[1].init(change))

  def update(gradient: dict, state: InTurn, dummy: dict, **given: Any) -> tuple[dict, InTurn]:
    early = state.count < at
    moves = []
    for part, which, active, kept, values in zip(
      parts, split(gradient), (early, ~early), (state.first, state.second), split(dummy), strict=True
    ):
      moved, new = part.update(which, kept, values, **given)
      moved = jax.tree.map(lambda leaf, active=active: jnp.where(active, leaf, jnp.zeros_like(leaf)), moved)
      moves.append((moved, jax.tree.map(lambda a, b, active=active: jnp.where(active, a, b), new, kept)))
    (rest, first_state), (change, second_state) = moves
    updates = {**rest, 'weights': {**rest['weights'], 'change': change}}
    return updates, InTurn(state.count + 1, first_state, second_state)

  return optax.GradientTransformationExtraArgs(init, update)
