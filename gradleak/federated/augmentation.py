"""Augmentation of local batches, as clients train: pure functions of a key and images [N, H, W, C]."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

_PAD = 8  # a crop moves an image by up to an eighth of its side, as 4 pixels of 32 in the usual recipe for CIFAR


def flip(key: jax.Array, images: jax.Array) -> jax.Array:
  """Returns each image mirrored left to right with a probability of one half."""
  mirrored = jax.random.bernoulli(key, 0.5, (images.shape[0], 1, 1, 1))
  return jnp.where(mirrored, images[:, :, ::-1], images)


def crop(key: jax.Array, images: jax.Array) -> jax.Array:
  """Returns each image moved by up to an eighth of its sides, with zeros where nothing was."""
  count, height, width, _ = images.shape
  pad_rows, pad_columns = max(1, height // _PAD), max(1, width // _PAD)
  padded = jnp.pad(images, ((0, 0), (pad_rows, pad_rows), (pad_columns, pad_columns), (0, 0)))
  rows = jax.random.randint(jax.random.fold_in(key, 0), (count,), 0, 2 * pad_rows + 1)
  columns = jax.random.randint(jax.random.fold_in(key, 1), (count,), 0, 2 * pad_columns + 1)

  def one(image: jax.Array, row: jax.Array, column: jax.Array) -> jax.Array:
    return jax.lax.dynamic_slice(image, (row, column, jnp.zeros_like(row)), images.shape[1:])

  return jax.vmap(one)(padded, rows, columns)


def crop_and_flip(key: jax.Array, images: jax.Array) -> jax.Array:
  """Returns images cropped, then mirrored."""
  return flip(jax.random.fold_in(key, 2), crop(jax.random.fold_in(key, 3), images))


AUGMENTATIONS: dict[str, Callable[[jax.Array, jax.Array], jax.Array] | None] = {
  'none': None,
  'flip': flip,
  'crop': crop,
  'crop_flip': crop_and_flip,
}
