"""APRIL's closed form on vision transformers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradleak as gl
from gradleak import Client, Knowledge, Observation, UsageError
from gradleak.attacks.april import patches_of
from gradleak.core import trees
from gradleak.models import vit

pytestmark = pytest.mark.usefixtures('fast_compilation')

SMALL = 'vit_tiny(patch=4,depth=1,width=48)'


@pytest.fixture(scope='module')
def images():
  from skimage.data import lfw_subset

  return lfw_subset()[:2, 4:20, 4:20, None].astype(np.float32)


def sent(images, spec=SMALL, before=None, **local):
  """Returns (the client, the observation) of images; `before`: what the network itself does to them."""
  model = gl.models.create(spec, 10, init='default')
  if before is not None:
    apply = model.apply
    model = model._replace(apply=lambda variables, x, *given: apply(variables, before(x), *given))
  variables, client = model.init(jax.random.key(0), images.shape[1:]), Client(model, 10, **local)
  labels = jnp.arange(len(images))
  update = jax.jit(client.local_update)(None, variables, images, labels).update
  knowledge = Knowledge(labels='unused', share=client.share)
  return client, Observation(variables, update, jnp.zeros((len(images), 10)), knowledge, images.shape, 10)


def read(client, observation, **settings):
  attack = gl.attacks.april(**settings)(client)
  return jax.jit(lambda seen: attack.reconstruct(attack.init(jax.random.key(1), seen), seen))(observation)


def psnr(found, truth):
  return -10 * np.log10(np.mean(np.square(np.asarray(found, np.float64) - truth)))


def noisy(observation, share):
  """Returns the observation with Gaussian noise of this share of each tensor's norm."""
  leaves, structure = jax.tree.flatten(observation.update)
  drawn = [np.random.default_rng(i).normal(size=leaf.shape).astype(np.float32) for i, leaf in enumerate(leaves)]
  added = [x + share * trees.norm(x) / np.linalg.norm(z) * z for x, z in zip(leaves, drawn, strict=True)]
  return Observation(**{**vars(observation), 'update': structure.unflatten(added)})


@pytest.mark.long
@pytest.mark.parametrize(
  ('spec', 'local', 'channels'),
  [
    (SMALL, {}, 1),
    (f'{SMALL}+normalised(pixels=imagenet)', {}, 3),
    pytest.param('vit_tiny(patch=4,depth=2,width=48)', {}, 3, marks=pytest.mark.slow),
    pytest.param('vit_tiny(patch=8,depth=2,width=192)', {}, 1, marks=pytest.mark.slow),
    pytest.param(SMALL, {'share': 'delta'}, 1, marks=pytest.mark.slow),  # one plain step: a factor cancels
  ],
)
def test_one_image_is_exact(images, spec, local, channels):
  image = np.concatenate([images[:1] ** (i + 1) for i in range(channels)], axis=-1)
  found = read(*sent(image, spec, **local))
  assert found.samples.shape == image.shape and found.labels.shape == (0,) and int(found.diverged_step) == -1
  assert psnr(found.samples, image) > 60


@pytest.mark.long
@pytest.mark.parametrize(
  ('before', 'expected'),
  [(lambda x: (x - 0.4) / 0.3, lambda x: x), (jnp.square, jnp.square)],
  ids=['a normalisation', 'none that it is'],
)
def test_a_normalisation_that_the_network_holds_is_undone(images, before, expected):
  found = read(*sent(images[:1], before=before)).samples
  assert psnr(found, expected(images[:1])) > 60


@pytest.mark.long
@pytest.mark.parametrize(
  'before',
  [
    lambda x: x.reshape(-1, 4, 4, 4, 4, 1).transpose(0, 3, 2, 1, 4, 5).reshape(x.shape),
    lambda x: x.reshape(-1, 4, 4, 4, 4, 1).transpose(0, 1, 4, 3, 2, 5).reshape(x.shape),
  ],
  ids=['patches by column', 'pixels of a patch by column'],
)
def test_another_order_is_refused(images, before):
  client, observation = sent(images[:1], before=before)
  with pytest.raises(UsageError, match='does not pass its patches on value by value'):
    read(client, observation)


@pytest.mark.slow
def test_noise_and_a_batch_degrade_it_and_neither_breaks_it(images):
  client, alone = sent(images[:1])
  exact = psnr(read(client, alone).samples, images[:1])
  slight, strong = (psnr(read(client, noisy(alone, share)).samples, images[:1]) for share in (1e-4, 1e-1))
  assert exact > slight + 10 > strong + 20
  mixed = read(*sent(images)).samples
  assert mixed.shape == images[:1].shape and np.isfinite(mixed).all()
  assert max(psnr(mixed, images[i : i + 1]) for i in range(2)) < 40 < exact
  nothing = Observation(**{**vars(alone), 'update': trees.zeros_like(alone.update)})
  assert not np.asarray(read(client, nothing).samples).any()


@pytest.mark.long
def test_more_patches_than_features_are_not_determined(images):
  found = read(*sent(images[:1], 'vit_tiny(patch=2,depth=1,width=48)'))  # 64 patches
  assert np.isfinite(found.samples).all() and psnr(found.samples, images[:1]) < 40


def test_it_returns_the_patches_of_least_squares():
  rng = np.random.default_rng(0)
  patches, behind = rng.normal(size=(6, 5)).astype(np.float32), rng.normal(size=(6, 9)).astype(np.float32)
  np.testing.assert_allclose(patches_of(patches.T @ behind, behind), patches, atol=1e-4)
  deficient = behind.copy()
  deficient[3] = deficient[2]  # of two tokens that receive the same, the mean is known
  expected = patches.copy()
  expected[2:4] = patches[2:4].mean(axis=0)
  np.testing.assert_allclose(patches_of(patches.T @ deficient, deficient, 1e-5), expected, atol=1e-4)
  left, values, right = np.linalg.svd(behind, full_matrices=False)
  cut = np.where(values > 0.5 * values[0], 1 / values, 0)
  assert 0 < np.count_nonzero(cut) < 6
  by_hand = left * cut @ right @ behind.T @ patches
  np.testing.assert_allclose(patches_of(patches.T @ behind, behind, 0.5), by_hand, atol=1e-4)


@pytest.mark.long
def test_patches_are_put_back_where_they_were(images):
  found = read(*sent(images[:1])).samples
  np.testing.assert_allclose(vit.patches(found, 4), vit.patches(images[:1], 4), atol=1e-3)
  assert psnr(found.transpose(0, 2, 1, 3), images[:1]) < 30


@pytest.mark.long
@pytest.mark.parametrize(
  ('spec', 'message'), [('mlp(widths=8)', 'no parameter pos_embed'), ('lenet', 'no parameter pos_embed')]
)
def test_other_networks_are_refused(images, spec, message):
  client, observation = sent(images[:1], spec)
  with pytest.raises(UsageError, match=message):
    jax.eval_shape(gl.attacks.april()(client).init, jax.random.key(0), observation)


def test_an_embedding_that_does_not_fit_is_named(images):
  client, observation = sent(images[:1])
  fewer = dict(observation.update, tokens={**observation.update['tokens'], 'pos_embed': jnp.zeros((9, 48))})
  with pytest.raises(UsageError, match='takes 16 values to 48 features, beside 9 positions of 48'):
    read(client, Observation(**{**vars(observation), 'update': fewer}))


@pytest.mark.slow
def test_it_stands_in_an_audit(images):
  model = gl.models.create(SMALL, 10, init='default')
  scenario = gl.scenario(model, images, np.arange(2, dtype=np.int32), key=jax.random.key(0), dataset='faces')
  settings = {'controls': 4, 'progress': 'none'}
  rows = gl.audit(jax.random.key(1), scenario, [None], [gl.attacks.april()], 2, **settings).rows
  assert min(row['psnr'] for row in rows) > 60 and {row['verdict'] for row in rows} <= {'exact', 'recognisable'}
