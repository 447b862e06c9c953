"""Pixels are normalised inside the network: variables, layers and names stay, clients keep to images in [0, 1]."""

import jax
import numpy as np
import pytest

from gradleak import models
from gradleak.core import errors
from gradleak.models import normalisation

TEXT = 'lenet(width=4)+normalised(pixels={pixels})'


@pytest.mark.slow
@pytest.mark.parametrize(('pixels', 'channels'), [('mnist', 1), ('cifar10', 3), ('imagenet', 3)])
def test_the_network_sees_normalised_pixels(pixels, channels):
  bare, model = models.create('lenet(width=4)', 5), models.create(TEXT.format(pixels=pixels), 5)
  shape, key = (8, 8, channels), jax.random.key(0)
  images = np.random.default_rng(0).random((3, *shape), np.float32)
  mean, std = (np.asarray(values, np.float32).reshape(1, 1, 1, -1) for values in normalisation.STATISTICS[pixels])
  variables = model.init(key, shape)
  for a, b in zip(jax.tree.leaves(variables), jax.tree.leaves(bare.init(key, shape)), strict=True):
    np.testing.assert_array_equal(a, b)
  seen = (images - mean) / std
  np.testing.assert_allclose(model.apply(variables, images)[0], bare.apply(variables, seen)[0], rtol=2e-6, atol=2e-6)
  np.testing.assert_allclose(model.features(variables, images), bare.features(variables, seen), rtol=2e-6, atol=2e-6)
  assert model.layers(shape) == bare.layers(shape)
  assert model.name == TEXT.format(pixels=pixels) and model.penalised is None


@pytest.mark.slow
def test_it_wraps_a_model_that_adds_to_its_loss():
  model = models.create('lenet(width=4)+precode(size=3)+normalised(pixels=mnist)', 5)
  variables = model.init(jax.random.key(0), (8, 8, 1))
  images = np.full((2, 8, 8, 1), 0.5, np.float32)
  logits, _, penalty = model.penalised(variables, images, False, None)
  assert logits.shape == (2, 5) and penalty.shape == (2,)
  np.testing.assert_allclose(logits, model.apply(variables, images)[0], rtol=1e-6)
  other = models.create('lenet(width=4)+normalised(pixels=mnist)+precode(size=3)', 5)
  np.testing.assert_allclose(other.apply(variables, images)[0], logits, rtol=1e-6)


def test_images_of_other_channels_are_refused():
  model = models.create(TEXT.format(pixels='cifar10'), 5)
  with pytest.raises(errors.UsageError, match=r'statistics of 3 channel\(s\), and the images have 1'):
    model.init(jax.random.key(0), (8, 8, 1))
