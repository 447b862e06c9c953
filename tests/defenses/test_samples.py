"""Defenses on the samples: ATS and InstaHide."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import PIL.Image
import PIL.ImageEnhance
import PIL.ImageOps
import pytest
import scipy.stats

import gradleak as gl
from gradleak import Client, defenses, models
from gradleak.core import errors
from gradleak.defenses import samples

pytestmark = pytest.mark.usefixtures('no_key_is_used_twice')
KEY = jax.random.key(3)
CASES = {  # the positional arguments of each, and whether it is random
  'ats': (lambda public: (), True),
  'instahide': (lambda public: (public,), True),
}
every_defense = pytest.mark.parametrize('name', CASES)


@pytest.fixture(scope='module')
def batch(small_images):
  """Three digits with their labels as probabilities, one of them soft."""
  labels = jax.nn.one_hot(jnp.asarray(small_images[1][:3]), 10)
  return jnp.asarray(small_images[0][:3]), labels.at[2].set(0.1)


@pytest.fixture(scope='module')
def public(small_images):
  return small_images[0][3:], small_images[1][3:]


def make(name, public, **settings):
  return defenses.REGISTRY[name](*CASES[name][0](public), **settings)


compiled = functools.cache(lambda defense: jax.jit(defense.transform))


def run(function, batch, seed=1):
  return compiled(function)(jax.random.key(seed), *batch)


def test_the_table_covers_the_registry():
  assert set(CASES) == {name for name, make in defenses.REGISTRY.items() if make.traits.place == 'data'}


@pytest.mark.long
@every_defense
def test_shapes_dtypes_and_the_range_stay(name, batch, public):
  function = make(name, public)
  images, labels = run(function, batch)
  assert (images.shape, images.dtype) == (batch[0].shape, jnp.float32)
  assert (labels.shape, labels.dtype) == (batch[1].shape, jnp.float32)
  assert images.min() >= 0 and images.max() <= 1 and np.abs(images - batch[0]).max() > 0.1
  np.testing.assert_allclose(labels.sum(1), 1, rtol=1e-5)
  for shape in ((1, 5, 9, 3), (4, 8, 8, 2)):  # shapes alone: any size, any channels
    others = jax.ShapeDtypeStruct(shape, jnp.float32), jax.ShapeDtypeStruct((shape[0], 10), jnp.float32)
    strangers = jnp.zeros((6, *shape[1:])), jnp.zeros(6, jnp.int32)
    out = jax.eval_shape(make(name, strangers).transform, jax.random.clone(KEY), *others)
    assert [x.shape for x in out] == [x.shape for x in others]


@pytest.mark.long
@every_defense
def test_draws_follow_the_key_and_differ_between_images(name, batch, public):
  function = make(name, public)
  first, again, other = (run(function, batch, seed)[0] for seed in (1, 1, 2))
  np.testing.assert_array_equal(first, again)
  assert np.abs(first - other).max() > 0.05 and defenses.REGISTRY[name].traits.random == CASES[name][1]
  alike = jnp.stack([batch[0][0]] * 8), jnp.stack([batch[1][0]] * 8)
  copies = run(function, alike)[0]
  assert np.abs(copies - copies[:1]).max() > 0.05


@pytest.mark.slow
@every_defense
def test_compiled_equals_eager_and_lanes_equal_a_loop(name, batch, public):
  function = make(name, public)
  seeds = jnp.arange(3, dtype=jnp.int32)
  together = jax.jit(jax.vmap(lambda seed: function(jax.random.key(seed), *batch)))(seeds)
  for seed in range(3):
    jax.tree.map(
      lambda a, b, i=seed: np.testing.assert_allclose(a[i], b, atol=1e-5), together, run(function, batch, seed)
    )
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a[1], b, atol=1e-5), together, function(jax.random.key(1), *batch)
  )


@pytest.mark.slow
@every_defense
def test_gradients_pass_through(name, batch, public):
  function = make(name, public)

  def total(images, labels):
    images, labels = function(jax.random.key(0), images, labels)
    return jnp.sum(images**2) + jnp.sum(labels**2)

  for images in (batch[0], jnp.zeros_like(batch[0]), jnp.ones_like(batch[0])):
    for gradient in jax.jit(jax.grad(total, argnums=(0, 1)))(images, batch[1]):
      assert np.isfinite(gradient).all()
  assert np.abs(jax.jit(jax.grad(total))(*batch)).max() > 0


@every_defense
def test_a_missing_key_is_named(name, batch, public):
  with pytest.raises(errors.UsageError, match=f'{name}.*key'):
    make(name, public)(None, *batch)


def test_a_coefficient_has_room_for_the_others(public):
  with pytest.raises(errors.UsageError, match=r'instahide\(largest\) is 0.2, .* nearest valid value is 0.25'):
    make('instahide', public, largest=0.2)


def tiny():
  """A model that compiles fast: one dense layer."""
  return models.from_functions(
    lambda key, _: {'w': jax.random.normal(key, (64, 10))},
    lambda params, images: images.reshape(-1, 64) @ params['w'],
  )


@pytest.mark.long
@every_defense
def test_a_client_trains_on_what_comes_out(name, batch, public):
  """The update is that of the undefended client on the defended samples, and the attacker's simulation has no part."""
  model = tiny()
  client = Client(model, 10)
  variables = model.init(jax.random.key(0), (8, 8, 1))
  context = defenses.Context(client, variables, (8, 8, 1), public)
  defended = defenses.bind(gl.parse(f'{name}+clip(norm=1000)'), context).client(client)
  update = jax.jit(defended.local_update)(KEY, variables, *batch).update
  seen = compiled(make(name, public))(jax.random.fold_in(KEY, 4), *batch)
  expected = jax.jit(client.local_update)(None, variables, *seen).update
  np.testing.assert_allclose(update['w'], expected['w'], rtol=1e-4, atol=1e-6)
  assert defended.undefended().transform is None
  with pytest.raises(errors.UsageError, match='transforms the samples twice'):
    defenses.bind(gl.parse(f'{name}+ats'), context)


# ATS


def bilinear(image, row, column, fill):
  """Returns the pixel [C] at a real place, what lies outside being `fill`."""
  height, width, channels = image.shape
  total = np.zeros(channels)
  i, j = math.floor(row), math.floor(column)
  for r, weight_r in ((i, 1 - (row - i)), (i + 1, row - i)):
    for c, weight_c in ((j, 1 - (column - j)), (j + 1, column - j)):
      inside = 0 <= r < height and 0 <= c < width
      total += weight_r * weight_c * (image[r, c] if inside else fill)
  return total


def geometric(image, name, magnitude):
  height, width, _ = image.shape
  out = np.zeros_like(image)
  for i in range(height):
    for j in range(width):
      row, column, fill = i, j, 0.0
      if name == 'translate_x':
        column = j + magnitude * width
      elif name == 'translate_y':
        row = i + magnitude * height
      elif name == 'shear_x':
        column = j + magnitude * (i + 0.5)
      elif name == 'shear_y':
        row = i + magnitude * (j + 0.5)
      else:
        angle, fill = math.radians(magnitude), 0.5
        y, x = i - (height - 1) / 2, j - (width - 1) / 2
        row = (height - 1) / 2 + math.sin(angle) * x + math.cos(angle) * y
        column = (width - 1) / 2 + math.cos(angle) * x - math.sin(angle) * y
      out[i, j] = bilinear(image, row, column, fill)
  return out


def both_signs(name, magnitude, images):
  """Returns the operation's outputs on copies of one image each, over draws of the sign: the two that occur."""
  policy = samples.ats(policy=f'{name}:{magnitude}')
  outputs = [np.asarray(run(policy, (images, jnp.zeros((len(images), 10))), seed)[0]) for seed in range(8)]
  return [np.unique(np.stack([output[i] for output in outputs]), axis=0) for i in range(len(images))]


@pytest.fixture(scope='module')
def coloured():
  """A 9×7 colour crop of a photograph in eight bits, and as floats."""
  import skimage.data

  crop = skimage.data.astronaut()[100:190:10, 200:270:10]
  return crop, (crop / 255).astype(np.float32)


@pytest.mark.long
@pytest.mark.parametrize(
  ('name', 'magnitude'),
  [('translate_x', 0.25), ('translate_x', 0.453), ('translate_y', 0.3), ('shear_x', 0.3), ('shear_y', 0.2)],
)
def test_geometric_operations_against_loops(name, magnitude, coloured, small_images):
  for image in (coloured[1], small_images[0][0]):
    found = both_signs(name, magnitude, image[None])[0]
    expected = [geometric(image.astype(np.float64), name, sign * magnitude) for sign in (-1, 1)]
    assert len(found) == 2
    for output in found:
      assert min(np.abs(output - e).max() for e in expected) < 1e-4
    assert np.abs(found[0] - found[1]).max() > 0.1


@pytest.mark.parametrize('degrees', [15, -40, 90])
def test_rotation_against_loops_and_quarter_turns(degrees, coloured, small_images):
  policy = samples.ats(policy=f'rotate:{degrees}')
  for image in (coloured[1], small_images[0][0]):
    output = policy(None, jnp.asarray(image)[None], None)[0][0]
    np.testing.assert_allclose(output, geometric(image.astype(np.float64), 'rotate', degrees), atol=1e-4)
  if degrees == 90:
    np.testing.assert_allclose(output, np.rot90(small_images[0][0]), atol=1e-4)  # counterclockwise


ENHANCE = {
  'brightness': PIL.ImageEnhance.Brightness,
  'contrast': PIL.ImageEnhance.Contrast,
  'sharpness': PIL.ImageEnhance.Sharpness,
}


@pytest.mark.parametrize('magnitude', [0.2, 0.5])
@pytest.mark.parametrize('name', ENHANCE)
def test_enhancements_are_those_of_pillow(name, magnitude, coloured):
  """Pillow is what AutoAugment and ATS call; it rounds to eight bits on its way."""
  eight, image = coloured
  found = both_signs(name, magnitude, image[None])[0]
  pictures = [ENHANCE[name](PIL.Image.fromarray(eight)).enhance(1 + sign * magnitude) for sign in (-1, 1)]
  expected = [np.asarray(picture, np.float64) / 255 for picture in pictures]
  assert len(found) == 2
  for output in found:
    assert min(np.abs(output - e).max() for e in expected) < 2.5 / 255
  assert np.abs(expected[0] - expected[1]).max() > 10 / 255


@pytest.mark.parametrize(
  ('policy', 'operate'),
  [
    ('invert', PIL.ImageOps.invert),
    *((f'solarize:{t / 256}', lambda picture, t=t: PIL.ImageOps.solarize(picture, t)) for t in (0, 100, 128, 256)),
    *((f'posterize:{bits}', lambda picture, b=bits: PIL.ImageOps.posterize(picture, b)) for bits in (1, 4, 8)),
  ],
)
def test_point_operations_are_those_of_pillow(policy, operate, coloured):
  eight, image = coloured
  output, _ = samples.ats(policy=policy)(None, jnp.asarray(image)[None], None)  # nothing is drawn: no key is needed
  np.testing.assert_allclose(output[0], np.asarray(operate(PIL.Image.fromarray(eight))) / 255, atol=1e-6)


@pytest.mark.parametrize('name', ['brightness', 'contrast', 'sharpness', 'translate_x', 'translate_y', 'shear_x'])
def test_signs_are_fair(name, coloured):
  images = jnp.broadcast_to(jnp.asarray(coloured[1]), (1000, *coloured[1].shape))
  output, _ = run(samples.ats(policy=f'{name}:0.4'), (images, jnp.zeros((1000, 10))))
  same = int((np.abs(output - output[:1]).max((1, 2, 3)) < 1e-6).sum())
  assert scipy.stats.binomtest(same, 1000, 0.5).pvalue > 1e-4
  assert scipy.stats.binomtest(same, 1000, 1 / 3).pvalue < 1e-4
  assert scipy.stats.binomtest(same, 1000, 2 / 3).pvalue < 1e-4


def test_cutout_covers_a_square_at_any_place():
  images = jnp.ones((400, 6, 9, 2))
  output = np.asarray(run(samples.ats(policy='cutout:0.5'), (images, jnp.zeros((400, 10))))[0])
  assert set(np.unique(output)) == {0.5, 1.0}
  places = []
  for image in output:
    rows, columns = np.nonzero(image[..., 0] == 0.5)
    np.testing.assert_array_equal(image[..., 0], image[..., 1])
    assert len(rows) == 9 and np.ptp(rows) == np.ptp(columns) == 2
    places.append((rows.min(), columns.min()))
  counts = np.zeros((4, 7))
  np.add.at(counts, tuple(np.transpose(places)), 1)
  assert scipy.stats.chisquare(counts.ravel()).pvalue > 1e-4
  assert counts.min() > 0


@pytest.mark.parametrize('name', sorted(set(samples.OPERATIONS) - {'invert', 'solarize', 'posterize'}))
def test_magnitude_zero_leaves_images_alone(name, batch):
  np.testing.assert_array_equal(run(samples.ats(policy=f'{name}:0'), batch)[0], batch[0])


def test_operations_act_from_left_to_right(batch):
  both, _ = samples.ats(policy='invert|solarize:0.9')(None, *batch)
  np.testing.assert_allclose(both, np.where((1 - batch[0]) * 255 / 256 >= 0.9, batch[0], 1 - batch[0]), atol=1e-6)
  other, _ = samples.ats(policy='solarize:0.9|invert')(None, *batch)
  assert np.abs(both - other).max() > 0.5


def test_members_of_a_policy_draw_apart(batch):
  """Two coins: of two halves of the way, a quarter of the images gets each of −−, ++ and a half −+ or +−."""
  images = jnp.full((2000, 2, 2, 1), 0.2)
  output = run(samples.ats(policy='brightness:0.5|brightness:0.5'), (images, jnp.zeros((2000, 10))))[0][:, 0, 0, 0]
  counts = [int((np.abs(output - 0.2 * f) < 1e-5).sum()) for f in (0.25, 0.75, 2.25)]
  assert sum(counts) == 2000
  assert scipy.stats.chisquare(counts, [500, 1000, 500]).pvalue > 1e-4
  assert scipy.stats.chisquare(counts, [1000, 1e-9, 1000], sum_check=False).pvalue < 1e-4


def test_each_image_gets_one_of_the_alternatives():
  images = jnp.full((1000, 2, 2, 1), 0.2)
  output = run(samples.ats(policy='invert/posterize:8 / solarize:0'), (images, jnp.zeros((1000, 10))))[0][:, 0, 0, 0]
  inverted = int((np.abs(output - 0.8) < 1e-5).sum())
  assert inverted + int((np.abs(output - 0.2) < 1e-5).sum()) == 1000
  assert scipy.stats.binomtest(inverted, 1000, 2 / 3).pvalue > 1e-4
  assert scipy.stats.binomtest(inverted, 1000, 1 / 2).pvalue < 1e-4


@pytest.mark.parametrize(
  ('policy', 'words'),
  [
    ('rotat:15', ["'rotat'", "did you mean 'rotate'", 'solarize']),
    ('rotate:181', ['rotate', '181', '180']),
    ('rotate', ['rotate', "''", '[-180, 180]']),
    ('contrast:much', ['contrast', "'much'"]),
    ('contrast:nan', ['contrast', 'nan']),
    ('contrast:-0.1', ['contrast', '-0.1']),
    ('posterize:2.5', ['posterize', '2.5', 'integer']),
    ('invert:1', ['invert', 'takes no magnitude']),
    ('invert|', ["unknown operation of ats(policy): ''"]),
    ('', ["unknown operation of ats(policy): ''"]),
  ],
)
def test_bad_policies_are_named(policy, words):
  with pytest.raises(errors.UsageError) as caught:
    samples.ats(policy=policy)
  assert all(word in str(caught.value) for word in words), str(caught.value)


def test_policies_are_structure_and_may_be_written_down():
  policy = 'translate_x:0.3|contrast:0.4/rotate:-15'
  defense = gl.parse(f"ats(policy='{policy}')+gaussian(stddev=0.1)")
  assert defense == defenses.chain(samples.ats(policy=policy), defenses.gaussian(stddev=0.1))
  assert defense.numbers == (0.1,) and defense.stages[0].settings == {'policy': policy}
  assert defense.structure != gl.parse('ats+gaussian(stddev=0.1)').structure


@pytest.fixture(scope='module')
def scored(small_images):
  model = tiny()
  variables = model.init(jax.random.key(0), (8, 8, 1))
  return Client(model, 10), variables, jnp.asarray(small_images[0][0]), int(small_images[1][0])


@pytest.mark.long
def test_privacy_score_against_a_loop(scored):
  client, variables, image, label = scored
  gradient = jax.jit(lambda x: client.local_update(None, variables, x[None], jnp.asarray([label])).update)
  transform, draw = jax.random.split(KEY)
  (target,), _ = samples.ats(policy='brightness:0.5')(transform, image[None], None)
  start = np.asarray(jax.random.uniform(draw, image.shape), np.float64)

  def flat(x):
    return np.concatenate([np.asarray(g, np.float64).ravel() for g in jax.tree.leaves(gradient(jnp.float32(x)))])

  truth, area = flat(target), 0.0
  for i in range(5):
    g = flat((1 - i / 4) * start + i / 4 * np.asarray(target, np.float64))
    area += (1 if 0 < i < 4 else 0.5) / 4 * (g @ truth) / np.linalg.norm(g) / np.linalg.norm(truth)
  defended = dataclasses.replace(client, transform=samples.ats(policy='invert'))  # left out, as are all its defenses
  key = jax.random.clone(KEY)
  score = jax.jit(
    lambda x: samples.ats_privacy_score(defended, variables, key, x, label, 'brightness:0.5', intervals=4)
  )(image)
  np.testing.assert_allclose(score, area, atol=1e-4)


@pytest.mark.long
def test_the_privacy_score_is_of_gradients_whatever_the_client_shares(scored):
  client, variables, image, label = scored
  trains = dataclasses.replace(client, share='delta', epochs=2, batch_size=1, order=((0,), (0,)))

  def score(client):
    return samples.ats_privacy_score(
      client, variables, jax.random.clone(KEY), image, label, 'brightness:0.5', intervals=2
    )

  np.testing.assert_allclose(score(trains), score(client), rtol=1e-6)


# InstaHide


@pytest.mark.parametrize(('mixed', 'largest'), [(2, 0.5), (2, 0.65), (4, 0.65), (4, 0.3), (6, 1.0)])
def test_coefficients_sum_to_one_under_their_bound(mixed, largest):
  draw = jax.jit(jax.vmap(lambda key, bound: samples.coefficients(key, mixed, bound), in_axes=(0, None)))
  drawn = np.asarray(draw(jax.random.split(jax.random.key(0), 4000), largest), np.float64)
  np.testing.assert_allclose(drawn.sum(1), 1, atol=1e-5)
  assert drawn.min() >= 0 and drawn.max() <= largest + 1e-6
  if largest < 1:
    assert drawn.max() > largest - 1e-4  # the bound is reached
  # All places are alike, and λ is a normalised half normal where the bound does not reach.
  error = drawn.std(0) / np.sqrt(4000)
  assert (np.abs(drawn.mean(0) - 1 / mixed) < 4.5 * error + 1e-6).all()
  if largest == 1:
    normal = np.abs(np.random.default_rng(0).normal(size=(4000, mixed)))
    uniform = np.random.default_rng(0).uniform(size=(4000, mixed))
    assert scipy.stats.ks_2samp(drawn[:, 0], (normal / normal.sum(1, keepdims=True))[:, 0]).pvalue > 1e-3
    assert scipy.stats.ks_2samp(drawn[:, 0], (uniform / uniform.sum(1, keepdims=True))[:, 0]).pvalue < 1e-3


def solve(pixels, sources):
  """Returns λ [len(sources)] ≥ 0 of the mixture whose magnitudes are |2·pixels − 1|, and the residual's norm.

  The signs are those of the true mixture, found by trying which sources explain the magnitudes: here all sources lie
  above one half, so that every mixture is positive in the range [−1, 1].
  """
  magnitudes = np.abs(2 * np.asarray(pixels, np.float64) - 1).ravel()
  return scipy.optimize.nnls(np.stack([(2 * s - 1).ravel() for s in sources], 1), magnitudes)


@pytest.mark.long
@pytest.mark.parametrize(('count', 'mixed'), [(1, 2), (1, 4), (2, 2), (3, 4), (3, 6)])
def test_encodings_mix_the_right_images(count, mixed):
  """On images above one half, magnitudes are the mixture itself: its coefficients and the label's follow."""
  rng = np.random.default_rng(count)
  private, strangers = (rng.uniform(0.5, 1, (n, 8, 8, 1)).astype(np.float32) for n in (count, 6))
  labels = jax.nn.one_hot(jnp.arange(count), 5)
  function = samples.instahide((strangers, np.zeros(6, np.int32)), mixed=mixed)
  coded, soft = run(function, (jnp.asarray(private), labels))
  partners = set()
  for i in range(count):
    weights, residual = solve(coded[i], [*private, *strangers])
    assert residual < 1e-4
    used = np.nonzero(weights > 1e-4)[0]
    own = used[used < count]
    assert abs(weights.sum() - 1) < 1e-4 and weights.max() <= 0.65 + 1e-4
    assert len(used) <= mixed and len(used[used >= count]) <= mixed - min(count, 2)
    assert len(used) >= mixed - 1  # one may be drawn near zero
    assert set(own) <= {i, *range(count)} and len(own) <= 2
    partners |= set(own) - {i}
    np.testing.assert_allclose(soft[i], np.pad(weights[:count] / weights[:count].sum(), (0, 5 - count)), atol=1e-3)
  assert bool(partners) == (count > 1)


@pytest.mark.long
def test_signs_of_pixels_are_fair_and_independent():
  images = jnp.full((20, 8, 8, 3), 0.9)
  coded = np.asarray(
    run(
      samples.instahide((np.full((4, 8, 8, 3), 0.9, np.float32), np.zeros(4, np.int32))),
      (images, jnp.full((20, 2), 0.5)),
    )[0]
  )
  np.testing.assert_allclose(np.abs(2 * coded - 1), 0.8, atol=1e-5)
  positive = coded > 0.5
  assert scipy.stats.binomtest(int(positive.sum()), positive.size, 0.5).pvalue > 1e-4
  assert scipy.stats.binomtest(int(positive.sum()), positive.size, 0.45).pvalue < 1e-4
  agree = [positive[..., 0] == positive[..., 1], positive[:, 1:] == positive[:, :-1], positive[1:] == positive[:-1]]
  for same in agree:  # between channels, neighbours and images
    assert scipy.stats.binomtest(int(same.sum()), same.size, 0.5).pvalue > 1e-4


@pytest.mark.long
def test_arrays_of_numpy_are_encoded_alike(batch, public):
  function = samples.instahide(public)
  expected = function(jax.random.key(0), *batch)
  for given in (map(np.asarray, batch), (np.asarray(batch[0]), batch[1]), (batch[0], np.asarray(batch[1]))):
    jax.tree.map(np.testing.assert_array_equal, function(jax.random.key(0), *given), expected)
  client = Client(models.mlp(10), 10, transform=function.transform)
  images, targets = map(np.asarray, batch)
  found = client.transformed(jax.random.key(0), images, targets)
  jax.tree.map(np.testing.assert_array_equal, found, client.transformed(jax.random.key(0), *batch))


@pytest.mark.long
def test_each_client_of_a_cohort_transforms_its_own_samples(small_images):
  """The upload is the update of what they are said to train on."""
  model = models.mlp(10, widths=(4,), init='default')
  images, targets = (part[:4] for part in small_images)
  variables = model.init(jax.random.key(0), images.shape[1:])
  plain = Client(model, 10, cohort=2)
  client = dataclasses.replace(plain, transform=samples.ats().transform)
  trained = client.transformed(jax.random.key(3), images, targets)
  assert trained[0].shape == images.shape and not np.array_equal(trained[0], images)
  found = client.local_update(jax.random.key(3), variables, images, targets).update
  expected = plain.local_update(None, variables, *trained).update
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-7), found, expected)


@pytest.mark.long
def test_the_bound_is_traced(batch, public):
  traces = []

  @jax.jit
  def encode(largest):
    traces.append(largest)
    return samples.instahide(public, largest=largest)(jax.random.key(0), *batch)[0]

  for largest in (0.3, 0.65):
    np.testing.assert_allclose(
      encode(jnp.float32(largest)), run(samples.instahide(public, largest=largest), batch, 0)[0], atol=1e-5
    )
  assert len(traces) == 1


def test_public_images_are_needed_and_enough_of_them(batch, public):
  with pytest.raises(errors.UsageError, match=r'instahide.*public='):
    samples.instahide()(jax.random.key(0), *batch)
  context = defenses.Context(Client(models.create('lenet', 10), 10), {}, (8, 8, 1))
  with pytest.raises(errors.UsageError, match=r'instahide.*public='):
    defenses.bind(samples.instahide(), context)
  with pytest.raises(errors.UsageError, match='up to 6 public images, and public holds 5'):
    defenses.bind(samples.instahide(mixed=7, largest=0.5), dataclasses.replace(context, public=public))


@pytest.mark.long
@pytest.mark.parametrize('count', [1, 2])
def test_instahide_mixes_no_image_with_padding(batch, public, count):
  """In a training, small clients are padded by copies of their own images."""
  transform = samples.instahide(public)
  images, targets = (x[:count] for x in batch)
  padded = [jnp.concatenate([x, x, x]) for x in (images, targets)]
  weights = jnp.asarray([1.0] * count + [0.0] * 2 * count)
  for seed in range(3):
    alone, among = transform(jax.random.key(seed), images, targets), transform(jax.random.key(seed), *padded, weights)
    for one, other in zip(alone, among, strict=True):
      np.testing.assert_allclose(one, other[:count], atol=1e-6)


@pytest.mark.long
def test_a_client_tells_instahide_its_padding(batch, public):
  seen = []

  def transform(key, images, targets, weights=None):
    seen.append(weights)
    return images, targets

  model = models.mlp(10, widths=4)
  variables = model.init(jax.random.key(0), (8, 8, 1))
  plain = lambda key, images, targets: (images, targets)  # noqa: E731
  labels, weights = jnp.arange(3), jnp.asarray([1.0, 1.0, 0.0])
  for one in (transform, plain):
    client = Client(model, 10, transform=one)
    client.participate(KEY, variables, batch[0], labels, weights)
    client.local_update(KEY, variables, batch[0], labels)
  assert seen[0] is weights and seen[1] is None
