"""The derivative of a gradient-matching distance, for tests of models."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from gradleak import Client
from gradleak.attacks.matching import distances


def check_second_order(model, sample_shape, batch_norm='train'):
  """Checks the slope of the cosine distance between a client's gradients against differences of it, in float64."""
  rng = np.random.default_rng(0)
  private, dummy, direction = rng.uniform(0, 1, (3, 2, *sample_shape))
  client, labels = Client(model, 5, batch_norm=batch_norm), np.asarray([1, 3], np.int32)
  variables = jax.tree.map(np.asarray, jax.jit(model.init, static_argnums=1)(jax.random.key(0), sample_shape))
  with jax.enable_x64(True), jax.numpy_dtype_promotion('standard'):  # Flax's norms promote float64 and float32
    variables = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), variables)
    gradient = jax.jit(lambda images: client.gradient(variables, images, labels))
    observed = gradient(private)
    slope = jax.jit(jax.grad(lambda images: distances.cosine(gradient(images), observed)))(dummy)
    target, *several = (
      np.asarray(ravel_pytree(gradient(images))[0])
      for images in (private, dummy, *(dummy + step * direction for step in (-1e-5, 1e-5, -1e-7, 1e-7)))
    )
  here, *around = (1 - each @ target / np.linalg.norm(each) / np.linalg.norm(target) for each in several)
  slope = np.asarray(slope)
  assert slope.dtype == np.float64 and np.isfinite(slope).all() and here > 1e-3
  # Of two steps, since ReLU and pooling have kinks: both are wrong where the slope is.
  differences = [(around[1] - around[0]) / 2e-5, (around[3] - around[2]) / 2e-7]
  along = float(np.sum(slope * direction))
  assert min(abs(difference / along - 1) for difference in differences) < 1e-4, (along, differences)
