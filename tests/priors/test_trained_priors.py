"""A generator that is trained: its loss, its file, its refusal of private images, its resume."""

import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradleak as gl
from gradleak.core import storage
from gradleak.core.errors import UsageError
from gradleak.priors import denoiser, gan, trained, training

pytestmark = pytest.mark.usefixtures('fast_compilation')
SHAPE = (8, 8, 1)


@pytest.fixture(scope='module')
def images():
  return gl.data.load('digits', 'train', limit=24).samples


@pytest.fixture(scope='module')
def learned(images, tmp_path_factory):
  """Returns a training of 60 steps, its state and its file."""
  made = gan.training(SHAPE, width=2, batch_size=8, learning_rate=1e-3)
  state = training.train(jax.random.key(0), made, images, 60)
  path = tmp_path_factory.mktemp('prior') / 'weights.npz'
  trained.save(path, made.module, jax.device_get(state.average), images, dataset='digits', split='train')
  return made, state, path


@pytest.mark.slow
def test_images_are_in_the_box_and_each_by_itself(learned):
  made, state, path = learned
  prior = trained.load(path)
  latents = jax.random.normal(jax.random.key(1), (3, prior.latent))
  found = np.asarray(prior.make(prior.weights, latents))
  assert found.shape == (3, *SHAPE) and found.min() >= 0 and found.max() <= 1
  np.testing.assert_allclose(prior.make(prior.weights, latents[1:2])[0], found[1], atol=1e-6)
  np.testing.assert_allclose(made.module.apply({'params': state.average}, latents), found, atol=1e-6)
  assert trained.load(path).make is prior.make  # compiled once


@pytest.mark.slow
def test_the_penalty_is_of_the_slope_between_real_and_generated_images(learned, images):
  """Of a critic that is linear in the pixels, the slope is its weight at every place."""
  made, state, _ = learned

  class Linear:
    def apply(self, variables, images):
      return jnp.sum(images * variables['params'], axis=(1, 2, 3))

  weight = jnp.full((1, *SHAPE), 0.25)  # its norm is 2
  linear = made._replace(critic=Linear())
  plain = jnp.zeros((1, *SHAPE))
  key = jax.random.key(3)
  loss = jax.jit(linear.critic_loss)
  found = loss(weight, state.generator, key, jnp.asarray(images))
  keys = jax.random.split(key, 3)
  real = images[jax.random.randint(keys[0], (8,), 0, len(images))]
  generated = made._made(state.generator, keys[1])
  expected = 0.25 * float(jnp.sum(generated) - jnp.sum(real)) / 8 + gan.PENALTY * (2 - 1) ** 2
  assert float(found) == pytest.approx(expected, abs=1e-4)
  assert float(loss(plain, state.generator, key, jnp.asarray(images))) == pytest.approx(10, abs=1e-3)


@pytest.mark.slow
def test_generated_images_come_nearer_to_real_ones(images):
  """The distance of the mean generated image to the mean real one falls."""
  made = gan.training(SHAPE, width=4, batch_size=16, learning_rate=1e-3)

  def apart(state):
    found = made.module.apply({'params': state.generator}, jax.random.normal(jax.random.key(5), (64, gan.LATENT)))
    return float(np.mean(np.square(found.mean(0) - images.mean(0))))

  before = made.init(jax.random.fold_in(jax.random.key(0), 0))
  assert apart(training.train(jax.random.key(0), made, images, 400)) < 0.2 * apart(before)


@pytest.mark.slow
def test_a_denoiser_removes_noise(images, tmp_path):
  made = denoiser.training(SHAPE, width=8, batch_size=32)
  state = training.train(jax.random.key(0), made, images, 400)
  trained.save(tmp_path / 'weights.npz', made.module, jax.device_get(state.average), images, dataset='digits')
  prior = trained.load(tmp_path / 'weights.npz', 'denoiser')
  others = gl.data.load('digits', 'test', limit=20).samples
  noisy = others + 0.3 * np.asarray(jax.random.normal(jax.random.key(1), others.shape))
  clean = prior.make(prior.weights, noisy, np.full(20, 0.3, np.float32))
  assert np.mean(np.square(clean - others)) < 0.6 * np.mean(np.square(noisy - others))


@pytest.mark.slow
def test_a_denoisers_file(images, tmp_path):
  made = denoiser.training((5, 7, 1), width=2)  # odd sides are padded
  weights = made.init(jax.random.key(0)).weights
  path = tmp_path / 'weights.npz'
  trained.save(path, made.module, weights, np.zeros((2, 5, 7, 1)), dataset='none')
  prior = trained.load(path, 'denoiser')
  noisy, level = np.ones((3, 5, 7, 1), np.float32), np.full(3, 0.1, np.float32)
  np.testing.assert_array_equal(
    prior.make(prior.weights, noisy, level), made.module.apply({'params': weights}, noisy, level)
  )
  assert prior.latent == 0 and 'Vincent' in prior.about['citation']
  with pytest.raises(UsageError, match='holds a denoiser, expected a generator'):
    trained.load(path)
  with pytest.raises(UsageError, match=r"unknown load\(kind\) 'score'"):
    trained.load(path, 'score')


@pytest.mark.slow
def test_a_training_that_was_killed_goes_on_to_the_same_bits(learned, images, tmp_path):
  made, state, _ = learned

  class Killed(Exception):
    pass

  def kill(done, losses):
    if done == 40:
      raise Killed

  with pytest.raises(Killed):
    training.train(jax.random.key(0), made, images, 60, workdir=tmp_path / 'prior', config={'a': 1}, on_steps=kill)
  steps = []
  resumed = training.train(
    jax.random.key(0), made, images, 60, workdir=tmp_path / 'prior', config={'a': 1},
    on_steps=lambda done, losses: steps.append(done),
  )  # fmt: skip
  assert steps and steps[0] > 20 and steps[-1] == 60
  assert all(map(np.array_equal, jax.tree.leaves(resumed), jax.tree.leaves(state)))
  with pytest.raises(UsageError, match='belongs to'):
    training.train(jax.random.key(0), made, images, 60, workdir=tmp_path / 'prior', config={'a': 2})
  with pytest.raises(UsageError, match='holds a training of 60 steps, more than 40'):
    training.train(jax.random.key(0), made, images, 40, workdir=tmp_path / 'prior', config={'a': 1})
  for key, public in ((1, images), (0, images[1:])):
    with pytest.raises(UsageError, match='belongs to'):
      training.train(jax.random.key(key), made, public, 60, workdir=tmp_path / 'prior', config={'a': 1})


@pytest.mark.long
def test_private_images_that_it_has_seen_are_refused(learned, images):
  prior = trained.load(learned[2])
  others = gl.data.load('digits', 'test', limit=4).samples
  prior.check(others)
  with pytest.raises(UsageError, match='1 of the 5 private images are among'):
    prior.check(np.concatenate([others, images[3:4]]))
  with pytest.raises(UsageError, match='is of images of 8×8×1, and the private ones have 25×25×1'):
    prior.check(np.zeros((2, 25, 25, 1)))
  assert prior.about['images'] == 24 and prior.about['dataset'] == 'digits' and 'Wasserstein' in prior.about['citation']


@pytest.mark.parametrize(
  ('numbers', 'match'),
  [({'steps': 30}, 'expected a multiple of 20'), ({'images': np.zeros((4, 9, 9, 1), np.float32)}, 'have shape')],
)
def test_bad_trainings_are_refused(learned, images, numbers, match):
  given = {'images': images, 'steps': 20, **numbers}
  with pytest.raises(UsageError, match=match):
    training.train(jax.random.key(0), learned[0], **given)


def test_damaged_files_are_refused(learned, tmp_path):
  with pytest.raises(UsageError, match='cannot read the weights of the prior'):
    trained.load(tmp_path / 'none.npz')
  path = tmp_path / 'text.npz'
  path.write_text('text')
  with pytest.raises(UsageError, match='is no file of weights of a prior'):
    trained.load(path)
  with np.load(learned[2]) as archive:
    arrays = {name: archive[name] for name in archive.files if not name.startswith('_')}
  name = next(name for name in arrays if name.startswith('weights/'))
  for number, changed in enumerate(
    [
      {**arrays, name: np.zeros((2, 2))},
      {key: value for key, value in arrays.items() if key != name},
      {**arrays, 'about': json.dumps({'width': 2})},
      {'0.weight': np.zeros((4, 2), np.float32)},
      {'0.weight': np.zeros((5, 2), np.float32), '0.bias': np.zeros(5, np.float32)},
    ]
  ):
    path = tmp_path / f'{number}.npz'
    path.write_bytes(storage.packed(changed))
    with pytest.raises(UsageError, match='is no '):
      trained.load(path)


@pytest.mark.parametrize(
  'about',
  [
    {'width': 0},
    {'width': -3},
    {'width': 1.5},
    {'width': 10**400},
    {'width': True},
    {'image_shape': [0, 8, 1]},
    {'image_shape': [8, 8]},
    {'image_shape': 8},
    {'kind': 'singer'},
    {'kind': []},
    None,
    [],
    3,
  ],
)
def test_descriptions_of_no_network_are_refused(learned, tmp_path, about):
  with np.load(learned[2]) as archive:
    arrays = {name: archive[name] for name in archive.files if not name.startswith('_')}
  known = json.loads(arrays['about'].item())
  changed = {**known, **about} if isinstance(about, dict) else about
  (tmp_path / 'prior.npz').write_bytes(storage.packed({**arrays, 'about': json.dumps(changed)}))
  with pytest.raises(UsageError, match='is no file of weights of a prior') as caught:
    trained.load(tmp_path / 'prior.npz')
  assert '\n' not in str(caught.value)


def test_weights_that_are_no_numbers_and_json_without_end_are_refused(learned, tmp_path):
  with np.load(learned[2]) as archive:
    arrays = {name: archive[name] for name in archive.files if not name.startswith('_')}
  name = next(name for name in arrays if name.endswith('kernel'))
  for changed in (
    {name: np.full_like(arrays[name], np.nan)},
    {name: arrays[name].astype(np.int32)},
    {'about': '[' * 10**5},
    {'about': np.zeros(3)},
  ):
    (tmp_path / 'prior.npz').write_bytes(storage.packed({**arrays, **changed}))
    with pytest.raises(UsageError, match='is no file of weights of a prior'):
      trained.load(tmp_path / 'prior.npz')


def test_a_weight_that_was_changed_is_not_taken(learned, tmp_path):
  with np.load(learned[2]) as archive:
    arrays = {name: archive[name] for name in archive.files}
  name = next(name for name in arrays if name.endswith('kernel'))
  np.savez(tmp_path / 'prior.npz', **{**arrays, name: arrays[name] * 2})
  with pytest.raises(UsageError, match='its arrays are not those of its digest'):
    trained.load(tmp_path / 'prior.npz')


@pytest.mark.parametrize(
  ('weight', 'bias'),
  [
    (np.zeros(16), np.zeros(16)),
    (np.zeros((16, 0)), np.zeros(16)),
    (np.zeros((16, 3)), np.zeros(9)),
    (np.zeros((16, 3)), np.zeros((16, 1))),
    (np.full((16, 3), np.inf), np.zeros(16)),
    (np.zeros((2, 2, 2)), np.zeros(2)),
  ],
)
def test_dense_layers_that_are_none_are_refused(tmp_path, weight, bias):
  np.savez(tmp_path / 'net.npz', **{'0.weight': weight.astype(np.float32), '0.bias': bias.astype(np.float32)})
  with pytest.raises(UsageError, match='is no '):
    trained.load(tmp_path / 'net.npz')


def test_a_prior_may_be_a_safetensors_file(tmp_path):
  """It is read as what it is: NumPy takes every file of another format for pickled objects."""
  layer = {'0.weight': np.ones((4, 2), np.float32), '0.bias': np.zeros(4, np.float32)}
  places, data = {}, b''
  for name, array in layer.items():
    places[name] = {'dtype': 'F32', 'shape': list(array.shape), 'data_offsets': [len(data), len(data) + array.nbytes]}
    data += array.tobytes()
  header = json.dumps(places).encode()
  path = tmp_path / 'prior.safetensors'
  path.write_bytes(len(header).to_bytes(8, 'little') + header + data)
  assert trained.load(path).image_shape == (2, 2, 1)
  path.write_bytes(len(header).to_bytes(8, 'little') + header)
  with pytest.raises(UsageError, match='an array reaches beyond the file'):
    trained.load(path)


def test_dense_layers_of_pytorch(tmp_path):
  """Two layers, against NumPy."""
  rng = np.random.default_rng(0)
  sizes = (3, 5, 16)
  arrays = {}
  for number, (before, after) in enumerate(itertools.pairwise(sizes)):
    arrays[f'{2 * number}.weight'] = rng.normal(size=(after, before)).astype(np.float32)
    arrays[f'{2 * number}.bias'] = rng.normal(size=after).astype(np.float32)
  path = tmp_path / 'net.npz'
  np.savez(path, **arrays)
  prior = trained.load(path)
  latents = np.asarray(jax.random.normal(jax.random.key(0), (2, prior.latent)))
  hidden = np.maximum(latents @ arrays['0.weight'].T + arrays['0.bias'], 0)
  expected = (np.tanh(hidden @ arrays['2.weight'].T + arrays['2.bias']) + 1) / 2
  np.testing.assert_allclose(prior.make(prior.weights, jnp.asarray(latents)).reshape(2, 16), expected, atol=1e-5)
  assert prior.seen is None and prior.image_shape == (4, 4, 1) and prior.latent == 3


def test_a_generator_of_pytorch_is_no_denoiser(tmp_path):
  path = tmp_path / 'generator.npz'
  np.savez(path, **{'0.weight': np.ones((16, 2), np.float32), '0.bias': np.zeros(16, np.float32)})
  assert trained.load(path).image_shape == (4, 4, 1)
  with pytest.raises(UsageError, match=r'generator\.npz holds a generator, expected a denoiser'):
    trained.load(path, 'denoiser')


@pytest.mark.parametrize(('shape', 'halvings'), [((8, 64, 1), 4), ((64, 3, 3), 4), ((1, 20, 1), 3), ((28, 28, 1), 3)])
def test_a_critic_sees_long_images(shape, halvings):
  """A side that is halved to one pixel stays one while the other is halved."""
  made = gan.training(shape, width=2, batch_size=2)
  weights = jax.eval_shape(made.init, jax.random.key(0)).critic
  assert sum(name.startswith('Conv') for name in weights) == halvings
  sides = [max(1, side // 2**halvings) for side in shape[:2]]
  (dense,) = [leaves for name, leaves in weights.items() if name.startswith('Dense')]
  assert max(leaf.size for leaf in jax.tree.leaves(dense)) == sides[0] * sides[1] * 2 * 2 ** (halvings - 1)
