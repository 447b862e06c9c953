"""Attacks with a prior that was trained on other images of the same kind: GGL, GIAS, GIFD, plug-and-play."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from gradleak.attacks.base import Attack, AttackMethod, attack
from gradleak.attacks.matching import Denoising, composed
from gradleak.attacks.matching.evolution import evolution
from gradleak.attacks.matching.optimizers import first_order, within
from gradleak.attacks.presets import Preset, matched, offered, with_settings
from gradleak.core import errors
from gradleak.core.trees import Tree
from gradleak.engine.parts import tell
from gradleak.federated import Client
from gradleak.federated.scenario import fingerprint
from gradleak.priors import denoiser, gan, trained, training
from gradleak.priors.base import Generator
from gradleak.priors.latent import layered, of_latents, tuned

GGL = 'Li, Zhang, Liu, Liu: Auditing Privacy Defenses in Federated Learning via Generative Gradient Leakage. CVPR 2022.'
GIAS = 'Jeon, Kim, Lee, Oh, Ok: Gradient Inversion with Generative Image Prior. NeurIPS 2021.'
GIFD = (
  'Fang, Chen, Wang, Wang, Xia: GIFD: A Generative Gradient Inversion Method with Feature Domain Optimization. ICCV '
  '2023.'
)
PNP = (
  'Romano, Elad, Milanfar: The Little Engine That Could: Regularization by Denoising (RED). SIAM Journal on Imaging '
  'Sciences 2017.'
)

WIDTH, TRAINING_STEPS = 16, 2000  # of a prior that is trained on public images, by default
LATENT_RATE = 3e-2  # of the latents of gias, by default
WEIGHT_RATE, RADIUS, GROWTH = 1e-3, 0.1, 0.5  # of what moves behind the latents, by default
KEPT = 4  # priors, the last ones trained
_TRAINED: dict[tuple, Tree] = {}


def _learned(
  key: jax.Array, scenario: Any, settings: Mapping[str, Any], batch_size: int, kind: str = 'generator'
) -> Tree:
  """Returns the weights of the prior: those of the `file`, or trained on the scenario's public images.

  Attacks of one process that hold the same prior share them: they are trained once.

  Raises:
    UsageError: for a prior that has seen a private image, and for a file that cannot be read.
  """
  del batch_size
  if settings['file']:
    prior = trained.load(settings['file'], kind)
    prior.check(scenario.samples)
    return prior.weights
  images, width, steps = scenario.public[0], settings['width'], settings['training_steps']
  given = kind, width, steps, fingerprint((images, jax.random.key_data(key)))
  if given not in _TRAINED:
    shape = tuple(images.shape[1:])
    if kind == 'generator':
      made: Any = gan.training(shape, width=width, batch_size=32, learning_rate=2e-4)
    else:
      made = denoiser.training(shape, width=width, batch_size=32)
    state = training.train(key, made, images, steps, on_steps=lambda done, _: tell(done, steps))
    _TRAINED[given] = state.average
    while len(_TRAINED) > KEPT:
      del _TRAINED[next(iter(_TRAINED))]
  return _TRAINED[given]


def _told(made: Attack, file: str, kind: str = 'generator') -> Attack:
  """Returns the `Attack` that says what it holds: the public images, or what was learned from others."""
  if not file:
    return made._replace(auxiliary_data=True)
  about = trained.load(file, kind).about
  if not {'dataset', 'split'} <= about.keys():
    return made._replace(prior=f'It holds a {kind} from a file that does not say what it was trained on.')
  images = f'{about["images"]:,} images of {about["dataset"]}, split {about["split"]}'
  return made._replace(prior=f'It holds a {kind} that was trained on {images}, and on no private image that is known.')


def _check_training(file: str, width: int, training_steps: int) -> None:
  errors.check_number('width', width, low=1, high=4096, integer=True)
  training.check_steps('training_steps', training_steps)
  if file:
    errors.check_idle('beside a file', {'width': (width, WIDTH), 'training_steps': (training_steps, TRAINING_STEPS)})


def _generator(file: str, width: int, make: Any) -> Generator:
  """Returns the `Generator` of a file, or of what is trained on public images of any shape."""
  if file:
    found = trained.load(file)
    return make(found.make, found.latent)._replace(learned=lambda shape: found.weights)
  return _of_any_shape(width, make)


@functools.cache
def _of_any_shape(width: int, make: Any) -> Generator:
  def module(shape: tuple[int, ...]) -> gan.Generator:
    return gan.Generator(tuple(shape[1:]), width)

  def of(shape: tuple[int, ...]) -> Generator:
    return make(trained.making(module(shape)), gan.LATENT)

  def learned(shape: tuple[int, ...]) -> Tree:
    return jax.eval_shape(module(shape).init, jax.random.key(0), jnp.zeros((1, gan.LATENT)))['params']

  return Generator(
    lambda key, shape, learned: of(shape).init(key, shape, learned),
    lambda optimised, kept, shape, learned: of(shape).apply(optimised, kept, shape, learned),
    learned,
  )


def _generative(
  citation: str, reads: tuple[str, ...] = ('weights', 'noise', 'clip'), kind: str = 'generator', make: Any = matched
) -> Callable[[Callable[..., Any]], Callable[..., AttackMethod]]:
  """Returns the decorator of a function (*, its own settings) -> (its `file`, a `Preset` or what `make` takes for one).

  Terms that are left out by default are settings of the attack beside its own.
  """

  def told(client: Client, made: tuple[str, Any], terms: Mapping[str, Any]) -> Attack:
    file, preset = made
    if client is not None:
      errors.check_image_batch('an attack with a generator or a denoiser', ('N', *client.modality.axis_names))
    return _told(make(client, preset, terms), file, kind)

  def decorate(function: Callable[..., Any]) -> Callable[..., AttackMethod]:
    factory = with_settings(function, told, offered(all_settings=False))
    return attack(citation=citation, reads=reads, prepare=functools.partial(_learned, kind=kind))(factory)

  return decorate


def _evolved(client: Client, made: tuple[int, dict, dict], terms: Mapping[str, Any]) -> Attack:
  """Returns CMA-ES of (generations, settings of `gradient_matching`, settings of `evolution`)."""
  generations, settings, searched = made
  matching = composed(client, optax.identity(), generations, {**settings, **terms})
  return evolution(matching, labels='inferred', **searched)


@_generative(GGL, reads=('weights', 'clip'), make=_evolved)
def ggl(
  *,
  file: str = '',
  steps: int = 500,
  population: int = 50,
  kl: float = 0.1,
  distance: str = 'squared_euclidean',
  width: int = WIDTH,
  training_steps: int = TRAINING_STEPS,
) -> tuple[str, tuple]:
  r"""Generative gradient leakage (Li et al. 2022): CMA-ES on the latents of a trained generator.

  The weight of the KL divergence and 500 generations of 50 candidates are the published ones. The published generator
  is given the label, and the published distance is divided by the number of tensors. Here, the KL divergence is weighed
  in units of the observed update's distance from zero.

  Formula:
    \min_z \; \lVert \nabla_\theta L(f_\theta(G(z)), y) - g \rVert^2 + \text{kl} \cdot \lVert g \rVert^2 \cdot
    \tfrac{1}{2} (\mu_z^2 + \sigma_z^2 - \log \sigma_z^2 - 1)

  Args:
    file: of `launch/train_prior.py`, or of a PyTorch generator of dense layers; '' trains on the public images.
    steps: generations.
    population: candidates of each.
    kl: weight of `evolution.divergence`.
    distance: 'squared_euclidean', 'cosine', or another one of `gradient_matching`.
    width, training_steps: of a generator that is trained on the public images.

  Raises:
    UsageError: for a value out of range, a setting that has no effect, or a file that cannot be read; when run, for a
      prior that has seen a private image.
  """
  _check_training(file, width, training_steps)
  settings = {'distance': distance, 'generator': _generator(file, width, of_latents)}
  return file, (steps, settings, {'population': population, 'kl': kl})


@_generative(GIAS)
def gias(
  *,
  file: str = '',
  steps: int = 6000,
  latent_steps: int = 1000,
  learning_rate: float = LATENT_RATE,
  weight_rate: float = WEIGHT_RATE,
  tv: float = 1e-6,
  distance: str = 'cosine',
  width: int = WIDTH,
  training_steps: int = TRAINING_STEPS,
) -> tuple[str, Preset]:
  r"""Gradient inversion with an adapted generator (Jeon et al. 2021): first the latents, then the weights.

  The settings are published for images of 32 pixels a side. The distance is the cosine, with `tv=1e-6`. Adam takes
  1,000 steps at `3e-2`, then 5,000 at `1e-3`. With `latent_steps` = `steps` the weights stay: GGL by gradient descent.

  Formula:
    \min_z \text{, then } \min_w \; 1 - \cos(\nabla_\theta L(f_\theta(x), y), g) + \text{tv} \cdot \text{TV}(x),
    \quad x = G_w(z)

  Args:
    file, width, training_steps: as of `ggl`.
    steps: of both parts together.
    latent_steps: of the first part.
    learning_rate, weight_rate: of the first and of the second part.
    tv: weight of the total variation.
    distance: as of `ggl`.

  Raises:
    UsageError: as `ggl`.
  """
  _check_training(file, width, training_steps)
  errors.check_number('latent_steps', latent_steps, low=0, high=steps, integer=True)
  errors.check_number('weight_rate', weight_rate, low=1e-12, finite=True)
  if latent_steps == steps:
    errors.check_idle('where latent_steps leaves no other steps', {'weight_rate': (weight_rate, WEIGHT_RATE)})
  if latent_steps == 0:
    errors.check_idle('where latent_steps is 0', {'learning_rate': (learning_rate, LATENT_RATE)})
  optimizer = in_turn(
    first_order('adam', learning_rate, steps),
    lambda number, length: first_order('adam', weight_rate, length),
    latent_steps,
    steps,
  )
  return file, Preset(optimizer, steps, {'distance': distance, 'tv': tv, 'generator': _generator(file, width, tuned)})


@_generative(GIFD)
def gifd(
  *,
  file: str = '',
  steps: int = 5000,
  latent_steps: int = 1000,
  learning_rate: float = 0.1,
  radius: float = RADIUS,
  growth: float = GROWTH,
  tv: float = 1e-4,
  l2: float = 1e-6,
  distance: str = 'cosine',
  width: int = WIDTH,
  training_steps: int = TRAINING_STEPS,
) -> tuple[str, Preset]:
  r"""Feature domain optimization (Fang et al. 2023): the latents, then the features of one layer after the other.

  The features of a layer start where the layers before it ended, and stay in an l1-ball around that. The point with the
  lowest objective on the way is returned. The published settings are 1,000 steps for the latents and for each layer,
  with the cosine distance, `tv=1e-4` and `l2=1e-6`. Each takes Adam at 0.1 with a warm-up and a decay. From layer to
  layer,
  the published radii grow by a fraction of the first one, 0.5 (StyleGAN2) or 0.25 (BigGAN). The first radius, 2,000
  there, depends on the generator. The published code holds the norm of the latents, too, and returns the image of the
  last restart with the score of the best.

  Formula:
    \min_z \text{, then } \min_{h_k} \; 1 - \cos(\nabla_\theta L(f_\theta(x), y), g) + \text{tv} \cdot \text{TV}(x)
    + \text{l2} \cdot \overline{x^2}

    x = G_k(h_k), \quad \lVert h_k - h_k^0 \rVert_1 \le r_k

  Args:
    file, width, training_steps: as of `ggl`.
    steps: of all parts together; what the latents leave is divided evenly among the layers.
    latent_steps: of the first part.
    learning_rate: of Adam in each part.
    radius: of the ball of the first layer, per entry: the mean |change| of an image's features, whose root mean square
      is 1 (of a PyTorch generator, as they are).
    growth: by which fraction of this the radius per entry grows from layer to layer.
    tv, l2: weights of the total variation and of the mean square.
    distance: as of `ggl`.

  Raises:
    UsageError: as `ggl`; when run, for a generator without layers between latents and images.
  """
  _check_training(file, width, training_steps)
  errors.check_number('latent_steps', latent_steps, low=0, high=steps, integer=True)
  errors.check_number('radius', radius, low=0, finite=True)
  errors.check_number('growth', growth, low=0, finite=True)
  if latent_steps == steps:
    ball = {'radius': (radius, RADIUS), 'growth': (growth, GROWTH)}
    errors.check_idle('where latent_steps leaves no other steps', ball)

  def of_layer(number: int, length: int) -> optax.GradientTransformation:
    adam = first_order('adam', learning_rate, length, decay='warm')
    return optax.chain(adam, within(radius * (1 + growth * number)))

  first = first_order('adam', learning_rate, max(1, latent_steps), decay='warm')
  settings = {'distance': distance, 'tv': tv, 'l2': l2, 'generator': _generator(file, width, layered)}
  return file, Preset(in_turn(first, of_layer, latent_steps, steps), steps, settings)


@_generative(PNP, kind='denoiser')
def pnp(
  *,
  file: str = '',
  steps: int = 2000,
  learning_rate: float = 0.03,
  tv: float = 0.0,
  prior: float = 1e-2,
  first_level: float = 0.3,
  last_level: float = 0.03,
  width: int = WIDTH,
  training_steps: int = TRAINING_STEPS,
) -> tuple[str, Preset]:
  r"""Plug-and-play matching: `csdlg_fast` with a denoiser's score in place of total variation, annealed.

  Ours; the regularisation is RED's (Romano et al. 2017, eq. 15), on a noisy image as in sampling by diffusion.

  Formula:
    \min_{x \in [0, 1]^n} \; \tfrac{1}{2} \left\lVert \frac{\nabla_\theta L}{\lVert \nabla_\theta L \rVert} -
    \frac{g}{\lVert g \rVert} \right\rVert^2 + \text{prior} \cdot \sqrt{\overline{(x - D(x + \sigma_t \varepsilon))^2}}
    + \text{tv} \cdot \text{TV}(x), \quad \varepsilon \sim \mathcal{N}(0, I)

  Args:
    file, width, training_steps: as of `ggl`; of `launch/train_prior.py --kind=denoiser`.
    steps, learning_rate, tv: as of `csdlg_fast`.
    prior: weight of the regularisation, see `matching.terms.Denoising`; attackers who know the noise weigh it by that.
    first_level, last_level: the noise's standard deviation at the first and the last step.

  Raises:
    UsageError: as `ggl`.
  """
  _check_training(file, width, training_steps)
  errors.check_number('prior', prior, low=0, finite=True)
  for name, level in (('first_level', first_level), ('last_level', last_level)):
    errors.check_number(name, level, low=denoiser.LEVELS[0], high=denoiser.LEVELS[1])
  make = trained.load(file, 'denoiser').make if file else _denoise_any_shape(width)
  optimizer = first_order('adam99', learning_rate, steps, decay='cosine')
  denoising = Denoising(make, prior, first_level, last_level)
  settings = {'distance': 'cosine', 'tv': tv, 'box': True, 'start': 'constant', 'denoising': denoising}
  return file, Preset(optimizer, steps, settings)


@functools.cache
def _denoise_any_shape(width: int) -> Any:
  def make(weights: Tree, noisy: jax.Array, level: jax.Array) -> jax.Array:
    return trained.making(denoiser.Denoiser(tuple(noisy.shape[1:]), width))(weights, noisy, level)

  return make


class InTurn(NamedTuple):
  """State of `in_turn`: steps done, and the states of its optimizers."""

  count: jax.Array
  states: list[Any]


def in_turn(
  first: optax.GradientTransformation,
  later: Callable[[int, int], optax.GradientTransformation],
  at: int,
  steps: int,
) -> optax.GradientTransformationExtraArgs:
  """Returns the optimizer that moves a generator's latents for `at` steps, then each other part of its weights.

  Args:
    first: moves all but these parts.
    later: (number of a part, its steps) -> what moves it. Parts come in the order of their names; they share what is
      left of the steps, and the last goes on to the end.
    at, steps: of the first part, and of all.

  Raises:
    UsageError: when run, where the first part has no steps and labels are to be optimised, which it moves.
  """

  def split(dummy: dict) -> list[Tree]:
    names = _later_parts(dummy)
    early = {name: leaf for name, leaf in dummy['weights'].items() if name not in names}
    return [{**dummy, 'weights': early}, *(dummy['weights'][name] for name in names)]

  def optimizers(count: int) -> tuple[list[optax.GradientTransformationExtraArgs], list[int]]:
    length = (steps - at) // count
    made = [first, *(later(number, max(1, length)) for number in range(count))]
    edges = [0, *(at + number * length for number in range(count)), steps]
    return list(map(optax.with_extra_args_support, made)), edges

  def init(dummy: dict) -> InTurn:
    if at == 0 and 'logits' in dummy:
      raise errors.UsageError(
        'labels are optimised beside the latents, and latent_steps is 0: give the latents a step or more, or leave the '
        'labels known or inferred'
      )
    parts = split(dummy)
    made, _ = optimizers(len(parts) - 1)
    return InTurn(jnp.zeros((), jnp.int32), [one.init(part) for one, part in zip(made, parts, strict=True)])

  def update(gradient: dict, state: InTurn, dummy: dict, **given: Any) -> tuple[dict, InTurn]:
    parts, moves, states = split(dummy), [], []
    made, edges = optimizers(len(parts) - 1)
    for number, (one, slope, kept, values) in enumerate(zip(made, split(gradient), state.states, parts, strict=True)):
      active = (edges[number] <= state.count) & (state.count < edges[number + 1])
      moved, new = one.update(slope, kept, values, **given)
      moves.append(jax.tree.map(lambda x, active=active: jnp.where(active, x, jnp.zeros_like(x)), moved))
      states.append(jax.tree.map(lambda a, b, active=active: jnp.where(active, a, b), new, kept))
    later_moves = dict(zip(_later_parts(dummy), moves[1:], strict=True))
    return {**moves[0], 'weights': {**moves[0]['weights'], **later_moves}}, InTurn(state.count + 1, states)

  return optax.GradientTransformationExtraArgs(init, update)


def _later_parts(dummy: dict) -> list[str]:
  """Returns the parts of a generator's weights that are optimised after its latents, in their order."""
  return sorted(set(dummy['weights']) - {'latents'})
