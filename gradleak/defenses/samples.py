"""Defenses on the samples: the client trains on transformed ones.

Each factory returns a `Client`'s `transform`. It maps `(key, images float32 [N, H, W, C] in [0, 1], label probabilities
float32 [N, classes])` to transformed images and labels of the same shapes.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.scipy.ndimage import map_coordinates

from gradleak.core import errors, trees
from gradleak.core.settings import Fraction, Range
from gradleak.defenses.base import stream
from gradleak.defenses.defense import defense

Samples = tuple[jax.Array, jax.Array]  # images, and labels as probabilities
Transform = Callable[[jax.Array | None, jax.Array, jax.Array], Samples]


def _stream(name: str, key: jax.Array | None) -> jax.Array:
  """Returns the defense's own stream of `key`. Raises `UsageError` without a key."""
  if key is None:
    raise errors.UsageError(f'the defense {name} is random and needs a key: give one to local_update')
  return stream(name, key)


# The operations of ATS, (key, image [H, W, C], magnitude) -> image.


def _either(key: jax.Array, magnitude: float) -> jax.Array:
  """Returns ±magnitude, the sign drawn at random."""
  return magnitude * jax.random.rademacher(key, (), jnp.float32)


def _away(plain: Any, image: jax.Array, change: jax.Array) -> jax.Array:
  """Returns the image at 1 + change times its distance from `plain`."""
  return jnp.clip(image + change * (image - plain), 0, 1)


def _grey(image: jax.Array) -> jax.Array:
  """Returns the luminance [H, W, 1] of Rec. 601 for three channels, else the channels' mean."""
  channels = image.shape[-1]
  weights = (0.299, 0.587, 0.114) if channels == 3 else (1 / channels,) * channels
  return jnp.sum(image * jnp.asarray(weights, image.dtype).reshape(1, 1, -1), axis=-1, keepdims=True)


def _smooth(image: jax.Array) -> jax.Array:
  """Returns the image under a 3×3 mean in which the centre counts five times; the border is not changed."""
  height, width, _ = image.shape
  inside = sum(image[i : height - 2 + i, j : width - 2 + j] for i in range(3) for j in range(3))
  inside = (inside + 4 * image[1:-1, 1:-1]) / 13
  return image.at[1:-1, 1:-1].set(inside)


def _move(image: jax.Array, rows: jax.Array, columns: jax.Array, fill: float) -> jax.Array:
  """Returns the image whose pixel (i, j) is that at (rows, columns)[i, j], bilinearly; outside it is `fill`."""
  sample = functools.partial(map_coordinates, coordinates=[rows, columns], order=1, mode='constant', cval=fill)
  return jnp.clip(jax.vmap(sample, in_axes=-1, out_axes=-1)(image), 0, 1)


def _grid(image: jax.Array) -> list[jax.Array]:
  height, width, _ = image.shape
  return jnp.meshgrid(jnp.arange(height, dtype=jnp.float32), jnp.arange(width, dtype=jnp.float32), indexing='ij')


def _solarize(key: Any, image: jax.Array, threshold: float) -> jax.Array:
  del key
  # In eight bits a threshold is out of 256, so that 1 does not change even white.
  return jnp.where(image * (255 / 256) >= threshold, 1 - image, image)


def _posterize(key: Any, image: jax.Array, bits: float) -> jax.Array:
  del key
  step = 2.0 ** (8 - bits)
  return jnp.floor(jnp.round(255 * image) / step) * step / 255


def _shifted(key: Any, image: jax.Array, axis: int, amount: Any, shear: bool = False) -> jax.Array:
  """Returns an image moved along an axis by an amount of either sign, in a shear times the place on the other axis."""
  places = list(_grid(image))
  places[axis] += _either(key, amount) * (places[1 - axis] + 0.5) if shear else _either(key, amount)
  return _move(image, places[0], places[1], 0.0)


def _rotate(key: Any, image: jax.Array, degrees: float) -> jax.Array:
  del key
  rows, columns = _grid(image)
  height, width, _ = image.shape
  y, x = rows - (height - 1) / 2, columns - (width - 1) / 2
  cos, sin = jnp.cos(jnp.deg2rad(jnp.float32(degrees))), jnp.sin(jnp.deg2rad(jnp.float32(degrees)))
  return _move(image, cos * y + sin * x + (height - 1) / 2, cos * x - sin * y + (width - 1) / 2, 0.5)


def _cutout(key: Any, image: jax.Array, fraction: float) -> jax.Array:
  height, width, _ = image.shape
  side = round(fraction * min(height, width))
  row, column = jax.random.randint(key, (2,), 0, jnp.asarray((height - side + 1, width - side + 1)))
  rows, columns = (x.astype(jnp.int32) for x in _grid(image))
  inside = (rows >= row) & (rows < row + side) & (columns >= column) & (columns < column + side)
  return jnp.where(inside[..., None], 0.5, image)


class Operation(NamedTuple):
  """An operation of an ATS policy.

  Attributes:
    apply: (key, image [H, W, C], magnitude) -> image.
    low, high: the range of its magnitude; None where it has none.
    random: whether it draws a sign or a position.
    integer: whether its magnitude is an integer.
  """

  apply: Callable[[Any, jax.Array, float], jax.Array]
  low: float | None
  high: float | None
  random: bool = True
  integer: bool = False


OPERATIONS = {
  'invert': Operation(lambda key, image, magnitude: 1 - image, None, None, random=False),
  'brightness': Operation(lambda key, image, most: _away(0.0, image, _either(key, most)), 0, 1),
  'contrast': Operation(lambda key, image, most: _away(jnp.mean(_grey(image)), image, _either(key, most)), 0, 1),
  'sharpness': Operation(lambda key, image, most: _away(_smooth(image), image, _either(key, most)), 0, 1),
  'solarize': Operation(_solarize, 0, 1, random=False),
  'posterize': Operation(_posterize, 1, 8, random=False, integer=True),
  'translate_x': Operation(lambda key, image, part: _shifted(key, image, 1, part * image.shape[1]), 0, 1),
  'translate_y': Operation(lambda key, image, part: _shifted(key, image, 0, part * image.shape[0]), 0, 1),
  'shear_x': Operation(lambda key, image, slope: _shifted(key, image, 1, slope, shear=True), 0, 1),
  'shear_y': Operation(lambda key, image, slope: _shifted(key, image, 0, slope, shear=True), 0, 1),
  'rotate': Operation(_rotate, -180, 180, random=False),
  'cutout': Operation(_cutout, 0, 1),
}

PUBLISHED = 'translate_x:0.453|contrast:0.333|translate_y:0.101/translate_y:0.151|contrast:0.389|contrast:0.389'


def _parse(policy: str) -> tuple[tuple[tuple[Operation, float], ...], ...]:
  """Returns the alternatives of an ATS policy, tuples of (operation, magnitude). Raises `UsageError`."""

  def step(text: str) -> tuple[Operation, float]:
    name, colon, magnitude = (part.strip() for part in text.partition(':'))
    errors.check_choice('operation of ats(policy):', name, OPERATIONS)
    operation = OPERATIONS[name]
    if operation.low is None:
      if colon:
        raise errors.UsageError(f'ats(policy) has {text!r}, but {name} takes no magnitude')
      return operation, 0.0
    checked: dict[str, Any] = {'low': operation.low, 'high': operation.high, 'integer': operation.integer}
    return operation, float(errors.check_number(f'ats(policy): the magnitude of {name}', _number(magnitude), **checked))

  return tuple(tuple(step(text.strip()) for text in part.split('|')) for part in policy.split('/'))


def _number(text: str) -> float | str:
  """Returns the text as a number, an integer where it is whole; as it is, if it is none."""
  try:
    value = float(text)
  except ValueError:
    return text
  return int(value) if value.is_integer() else value


@defense(
  place='data',
  citation='Gao, Guo, Zhang, Qiu, Wen, Liu: Privacy-preserving Collaborative Learning with Automatic Transformation '
  'Search. CVPR 2021.',
  random=True,
)
def ats(*, policy: str = PUBLISHED) -> Transform:
  r"""Automatic transformation search's defense (Gao et al., CVPR 2021): an augmentation policy on the private images.

  Magnitudes m are as in AutoAugment and the published code:

  - `brightness`, `contrast` and `sharpness` multiply the distance to black, to the mean grey and to a smoothed image by
    1 ± m.
  - `translate_x` and `translate_y` move by ± m times the width or height.
  - `shear_x` and `shear_y` shear by the slope ± m.
  - `rotate` turns counterclockwise by m degrees.
  - `solarize` inverts pixels from the threshold m on.
  - `posterize` keeps m of eight bits.
  - `cutout` greys a square of m times the shorter side, at a random position.
  - `invert` has no magnitude.

  Signs and positions are drawn independently for each image. Pixels from outside are black (grey under `rotate`).
  Interpolation is bilinear, where the published code takes the nearest pixel or a cubic.

  The search over policies is not implemented: `ats_privacy_score` ranks policies by the paper's privacy score; its
  accuracy score is left out. The default is the published code's policy `3-1-7+43-18-18`, written out by that code's
  table of operations and magnitudes.

  Balunović et al. (2022) reconstruct images in spite of ATS early in training.

  Formula:
    x'_i = (T_{p,K} \circ \ldots \circ T_{p,1})(x_i), \quad p \text{ uniform over the alternatives of the policy}

  Args:
    policy: operations `name:magnitude` joined by `|`, in their order; alternatives, of which each image gets one at
      random, are separated by `/`.

  Returns:
    (key, images, targets) -> (samples, targets); the labels are not changed.

  Raises:
    UsageError: for an unknown operation or a magnitude out of its range; when called, without a key if the policy is
      random.
  """
  alternatives = _parse(policy)
  random = len(alternatives) > 1 or any(operation.random for operation, _ in alternatives[0])

  def augment(key: Any, image: jax.Array) -> jax.Array:
    def follow(steps: tuple, key: Any, image: jax.Array) -> jax.Array:
      for i, (operation, magnitude) in enumerate(steps):
        image = operation.apply(None if key is None else jax.random.fold_in(key, i), image, magnitude)
      return image

    if len(alternatives) == 1:
      return follow(alternatives[0], key, image)
    chosen, *keys = jax.random.split(key, 1 + len(alternatives))
    outcomes = [follow(steps, drawn, image) for steps, drawn in zip(alternatives, keys, strict=True)]
    return jnp.stack(outcomes)[jax.random.randint(chosen, (), 0, len(alternatives))]

  def transform(key: jax.Array | None, images: jax.Array, targets: jax.Array) -> Samples:
    errors.check_image_batch('the defense ats', images.shape)
    if not random:
      return jax.vmap(functools.partial(augment, None))(images), targets
    return jax.vmap(augment)(jax.random.split(_stream('ats', key), images.shape[0]), images), targets

  return transform


def ats_privacy_score(
  client: Any,
  variables: Mapping,
  key: jax.Array,
  image: jax.Array,
  label: int | jax.Array,
  policy: str,
  *,
  intervals: int = 20,
) -> jax.Array:
  """Returns ATS's privacy score S_pri of a policy for one image (Gao et al. 2021, section 4.2): lower is more private.

  Let x0 be a random image, and `x'(t) = (1 − t)·x0 + t·T(x)` for t in [0, 1]. The score is the area, by the trapezoid
  rule, under the cosine similarity of the gradients of x'(t) and of T(x). It says how well gradient matching is guided
  towards T(x). The published code averages the cosine over tensors; here it is over the whole gradient, as in the
  paper. Average it over images and keys.

  Args:
    client: the `Client`, used without its defenses.
    variables: the model's; in the paper it is half-trained on a tenth of the data.
    key: drives the policy and x0.
    image: float32 [H, W, C] in [0, 1].
    label: class index, an int32 scalar.
    policy: as `ats` takes it.
    intervals: of the trapezoid rule.

  Returns:
    A float32 scalar.
  """
  client, label = client.of_one_gradient(), jnp.asarray(label, jnp.int32).reshape(1)
  policy_key, start_key = jax.random.split(key)
  (transformed,), _ = ats(policy=policy)(policy_key, image[None], label)
  start = jax.random.uniform(start_key, image.shape, image.dtype)

  def gradient(image: jax.Array) -> Any:
    return client.local_update(None, variables, image[None], label).update

  target = gradient(transformed)
  t = jnp.linspace(0, 1, intervals + 1, dtype=image.dtype)
  curve = jax.vmap(lambda t: trees.cosine(gradient((1 - t) * start + t * transformed), target))(t)
  return jnp.trapezoid(curve, t)


def require_public(public: tuple | None) -> tuple:
  """Returns the public (samples, targets) for InstaHide. Raises `UsageError` where there are none."""
  if public is None:
    raise errors.UsageError(
      'the defense instahide mixes with public images and has none: give public=(samples, targets) to the scenario'
    )
  return public


def coefficients(key: jax.Array, mixed: int, largest: float) -> jax.Array:
  """Returns InstaHide's λ, float32 [mixed]: |N(0, 1)| divided by their sum, none above `largest`.

  The published code redraws until the bound holds. Here, a λ that exceeds the bound is moved towards 1/mixed just as
  far as needed, `λ ← 1/mixed + t·(λ − 1/mixed)`, which keeps the sum 1.
  """
  drawn = jnp.abs(jax.random.normal(key, (mixed,))) + 1e-6
  drawn /= jnp.sum(drawn)
  excess = jnp.max(drawn) - 1 / mixed
  room = jnp.asarray(largest, jnp.float32) - 1 / mixed
  shrink = jnp.where(excess > room, room / jnp.maximum(excess, 1e-6), 1.0)
  return 1 / mixed + shrink * (drawn - 1 / mixed)


def _partner(key: jax.Array, i: jax.Array, count: int, weights: jax.Array | None) -> jax.Array:
  """Returns the number of another sample of a batch of `count`, at random among those of weight above 0."""
  if weights is None:
    return (i + jax.random.randint(key, (), 1, count)) % count
  order = jnp.argsort(weights <= 0, stable=True).astype(jnp.int32)
  real = jnp.maximum(jnp.sum(weights > 0, dtype=jnp.int32), 1)
  return order[(jnp.argmax(order == i).astype(jnp.int32) + jax.random.randint(key, (), 1, jnp.maximum(real, 2))) % real]


@defense(
  place='data',
  citation='Huang, Song, Li, Arora: InstaHide: Instance-hiding Schemes for Private Distributed Learning. ICML 2020.',
  random=True,
  arguments=lambda context, settings: (require_public(context.public),),
)
def instahide(
  public: tuple | None = None, *, mixed: Annotated[int, Range(2, 64)] = 4, largest: Fraction = 0.65
) -> Transform:
  r"""InstaHide (Huang et al., ICML 2020): mixes each private image with others, then flips signs of pixels at random.

  Image i becomes `σ ∘ Σ_j λ_j s_j` in the range [−1, 1]. Here s holds the image, one other private image of the batch
  if there is one, and public images up to `mixed` in all. Padding, of weight 0, is no other image. Each public image
  occurs at most once. λ is as `coefficients` draws it, and σ is a uniform random sign for each pixel and channel. The
  label is the mixture of the private images' labels by their λ, divided by the sum of these, since public images have
  no labels. The published code's lower bound 0.3 on that sum is left out.

  |2x − 1| of an encoding x is the mixture's magnitude at every pixel: σ removes only the sign. Carlini et al. (2021)
  decode InstaHide from thousands of encodings of the same private images, given the public ones. No such attack is
  offered here: that other attacks fail does not prove protection.

  Formula:
    2 x'_i - 1 = \sigma \circ \left( 2 \sum_j \lambda_j s_j - 1 \right), \quad \sum_j \lambda_j = 1, \quad
    \sigma \in \{-1, 1\}^{H \times W \times C} \text{ uniform}

  Args:
    public: (images float32 [K, H, W, C], integer labels [K]) that everyone holds, K ≥ mixed − 1.
    mixed: the number of images in each mixture.
    largest: upper bound of each coefficient, at least 1/mixed.

  Returns:
    (key, images, targets, weights=None) -> (samples, targets).

  Raises:
    UsageError: for a bound below 1/mixed or too few public images; when called, without public images or a key.
  """
  errors.check_number('instahide(largest)', largest, low=1 / mixed, high=1)
  if public is not None and public[0].shape[0] < mixed - 1:
    raise errors.UsageError(
      f'instahide(mixed) is {mixed}, which takes up to {mixed - 1} public images, and public holds {public[0].shape[0]}'
    )

  def transform(
    key: jax.Array | None, images: jax.Array, targets: jax.Array, weights: jax.Array | None = None
  ) -> Samples:
    errors.check_image_batch('the defense instahide', images.shape)
    images, targets = jnp.asarray(images), jnp.asarray(targets)  # a traced index reads no array of NumPy
    count, others = images.shape[0], jnp.asarray(require_public(public)[0], images.dtype)

    def encode(key: jax.Array, i: jax.Array) -> Samples:
      coefficient_key, partner_key, public_key, sign_key = jax.random.split(key, 4)
      own = i[None]
      if count > 1:
        own = jnp.stack([i, _partner(partner_key, i, count, weights)])
      chosen = others[jax.random.choice(public_key, others.shape[0], (mixed - 1,), replace=False)]
      held = jnp.concatenate([images[own], chosen[: mixed - own.size]])
      parts = coefficients(coefficient_key, mixed, largest).astype(images.dtype)
      private = parts[: own.size]
      if count > 1 and weights is not None:  # alone among padding, it has no partner
        alone = jnp.sum(weights > 0) < 2
        held = jnp.where(alone, jnp.concatenate([images[i][None], chosen]), held)
        private = jnp.where(alone & jnp.asarray([False, True]), 0.0, private)
      mixture = jnp.tensordot(parts, held, 1)
      signs = jax.random.rademacher(sign_key, mixture.shape, mixture.dtype)
      private /= jnp.sum(private)
      return jnp.clip((signs * (2 * mixture - 1) + 1) / 2, 0, 1), jnp.tensordot(private, targets[own], 1)

    keys = jax.random.split(_stream('instahide', key), count)
    return jax.vmap(encode)(keys, jnp.arange(count, dtype=jnp.int32))

  return transform
