"""A trained prior in a file: its weights, what it was trained on, and the refusal of private images."""

import functools
import hashlib
import itertools
import json
import math
import os
import pathlib
import re
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gradleak.core import errors, storage
from gradleak.core.settings import Choice, ranged
from gradleak.core.storage import plain, write_atomically
from gradleak.core.trees import Tree, path_names
from gradleak.models import torch_weights
from gradleak.models.model import check_sample_shape
from gradleak.priors import denoiser, gan
from gradleak.priors.base import Change, unchanged

Module = gan.Generator | denoiser.Denoiser

# What a file may hold -> (its module, how it was trained).
KINDS: dict[str, tuple[type, str]] = {
  'generator': (
    gan.Generator,
    'Gulrajani, Ahmed, Arjovsky, Dumoulin, Courville: Improved Training of Wasserstein GANs. NIPS 2017.',
  ),
  'denoiser': (
    denoiser.Denoiser,
    'Vincent: A Connection between Score Matching and Denoising Autoencoders. Neural Computation 2011.',
  ),
}


class Prior(NamedTuple):
  """A generator or a denoiser that was trained, and on what.

  Attributes:
    make: of a generator (weights, latents [N, `latent`], optionally a `base.Change` of the features of its layers) ->
      images [N, H, W, C] in [0, 1]; of a denoiser (weights, noisy images [N, H, W, C], standard deviations [N]) ->
      images; pure.
    latent: numbers that an image is made of, N(0, 1) where it was trained; 0 of a denoiser.
    weights: its weights, a tree.
    image_shape: (H, W, C) of its images.
    about: plain JSON: 'dataset', 'split', 'images', 'steps', 'citation', 'licence'; of a file of PyTorch's none of it.
    seen: a fingerprint of each image that it was trained on, uint64, ascending; None where that is not known.
  """

  make: Callable[..., jax.Array]
  latent: int
  weights: Tree
  image_shape: tuple[int, int, int]
  about: dict[str, Any]
  seen: np.ndarray | None

  def check(self, images: np.ndarray) -> None:
    """Raises `UsageError` if it was trained on any of these private images, or makes images of another shape."""
    if tuple(images.shape[1:]) != self.image_shape:
      ours, theirs = ('×'.join(map(str, shape)) for shape in (self.image_shape, images.shape[1:]))
      raise errors.UsageError(f'the prior is of images of {ours}, and the private ones have {theirs}')
    if self.seen is not None:
      check_apart(self.seen, images)


def check_apart(seen: np.ndarray, private: np.ndarray, noun: str = 'images', use: str = 'learns from') -> None:
  """Raises `UsageError` if any private sample [N, …] has one of these fingerprints of what an attack uses.

  Args:
    seen: `fingerprints`.
    private: the samples.
    noun: what they are called.
    use: what the attack does with those that it has.
  """
  known = np.isin(fingerprints(private), seen)
  if known.any():
    raise errors.UsageError(
      f'{known.sum()} of the {len(private)} private {noun} are among those that the attack {use}: what an attacker '
      'holds has to be apart from what is attacked; take another split'
    )


def fingerprints(samples: np.ndarray) -> np.ndarray:
  """Returns a fingerprint of each sample [N, …], uint64 [N]: of images [N, H, W, C] in [0, 1] to eight bits."""
  samples = np.asarray(samples)
  exact = samples if samples.ndim != 4 else np.round(255 * samples).astype(np.uint8)
  digests = [hashlib.sha256(one.tobytes()).digest()[:8] for one in exact]
  return np.frombuffer(b''.join(digests), np.uint64)


def save(path: str | os.PathLike, module: Module, weights: Tree, images: np.ndarray, **about: Any) -> None:
  """Writes a trained prior.

  Args:
    path: of the file, `.npz`.
    module, weights: of the generator or the denoiser.
    images: all images that it was trained on, [N, H, W, C].
    **about: what `Prior.about` holds beside the number of images and the citation, plain JSON.
  """
  kind = next(name for name, (made, _) in KINDS.items() if isinstance(module, made))
  known = {
    'kind': kind,
    'citation': KINDS[kind][1],
    'image_shape': module.image_shape,
    'width': module.width,
    'images': len(images),
  }
  arrays = {
    'weights/' + '/'.join(path_names(path)): np.asarray(leaf)
    for path, leaf in jax.tree_util.tree_leaves_with_path(weights)
  }
  told = {'about': json.dumps(plain({**known, **about})), 'seen': np.sort(fingerprints(images))}
  write_atomically(path, storage.packed({**told, **arrays}))


@functools.cache
def making(module: Module) -> Callable[..., jax.Array]:
  """Returns the function of a module; the same for equal ones, so that attacks with it compile once."""
  return lambda weights, *given: module.apply({'params': weights}, *given)


@ranged
def load(path: str | os.PathLike, kind: Annotated[str, Choice(KINDS)] = 'generator') -> Prior:
  """Returns the `Prior` in a file of `save`, or of a PyTorch generator of dense layers with ReLU and tanh.

  Such a file holds '0.weight', '0.bias', '2.weight', … of an `nn.Sequential` whose outputs are grey, square images.

  Args:
    path: of the file.
    kind: 'generator' or 'denoiser', what is expected there.

  Raises:
    UsageError: for a file that is missing, damaged, or of something else.
  """
  found = pathlib.Path(errors.check_path('the weights of the prior', path))
  try:
    prior = _load(str(found), found.stat().st_mtime_ns)
  except OSError as error:
    raise errors.UsageError(f'cannot read the weights of the prior {found}: {error.strerror}') from error
  held = prior.about.get('kind', 'generator')  # a file of PyTorch's does not say
  if held != kind:
    raise errors.UsageError(f'{found} holds a {held}, expected a {kind}')
  return prior


@functools.lru_cache(maxsize=16)
def _load(path: str, stamp: int) -> Prior:
  """Returns the `Prior`; the same object for the same file, so that attacks with it compile once."""
  del stamp
  advice = 'restore it, or train the prior again'
  with open(path, 'rb') as file:
    is_archive = file.read(2) == b'PK'
  arrays = storage.read_arrays(path, advice) if is_archive else {}
  if 'about' not in arrays:
    try:
      return _dense(torch_weights.read(path))
    except errors.UsageError as error:
      raise errors.UsageError(f'{path} is no file of weights of a prior ({error})') from error
  arrays = storage.check_digest(path, arrays, advice)
  try:
    about = json.loads(arrays['about'].item())
    module = KINDS[about['kind']][0](check_sample_shape(about['image_shape']), _width(about['width']))
    latent = gan.LATENT if isinstance(module, gan.Generator) else 0
    given = [jnp.zeros((1, latent))] if latent else [jnp.zeros((1, *module.image_shape)), jnp.ones(1)]
    shapes = jax.eval_shape(module.init, jax.random.key(0), *given)['params']
    places = jax.tree_util.tree_leaves_with_path(shapes)
    leaves = [arrays['weights/' + '/'.join(path_names(place))] for place, _ in places]
    if any(leaf.shape != shape.shape for leaf, (_, shape) in zip(leaves, places, strict=True)):
      raise errors.UsageError('weights have the wrong shapes')
    seen = arrays['seen'].astype(np.uint64)
    _check_finite(arrays)
  except Exception as error:  # a damaged description of a network may raise anything
    raise errors.UsageError(f'{path} is no file of weights of a prior ({error})') from error
  weights = jax.tree.unflatten(jax.tree.structure(shapes), leaves)
  return Prior(making(module), latent, weights, module.image_shape, about, seen)


def _width(given: Any) -> int:
  return errors.check_number('its width', given, low=1, high=4096, integer=True)


def _check_finite(arrays: dict[str, np.ndarray]) -> None:
  """Raises `UsageError` for weights that are no finite floats."""
  for name, array in arrays.items():
    if name.endswith(('bias', 'kernel', 'weight', 'scale')) and not (
      jnp.issubdtype(array.dtype, jnp.floating) and np.isfinite(array.astype(np.float64)).all()
    ):
      raise errors.UsageError(f'{name} holds what is no finite float')


def _dense(arrays: dict[str, np.ndarray]) -> Prior:
  """Returns the `Prior` of dense layers whose names are numbers; raises `UsageError` for anything else."""
  numbers = sorted({int(name.partition('.')[0]) for name in arrays if re.fullmatch(r'[0-9]{1,9}\..*', name)})
  try:
    layers = [(arrays[f'{number}.weight'], arrays[f'{number}.bias']) for number in numbers]
  except KeyError as error:
    raise errors.UsageError(f'there is no {error}') from error
  dense = bool(layers) and all(
    weight.ndim == 2 and weight.size and bias.shape == weight.shape[:1] for weight, bias in layers
  )
  fits = dense and all(one[0].shape[0] == two[0].shape[1] for one, two in itertools.pairwise(layers))
  side = math.isqrt(len(layers[-1][0])) if fits else 0
  if not fits or side**2 != len(layers[-1][0]):
    raise errors.UsageError('it is no generator of grey, square images by dense layers')
  _check_finite(arrays)
  return Prior(_dense_images, layers[0][0].shape[1], layers, (side, side, 1), {}, None)


def _dense_images(layers: Any, latents: jax.Array, change: Change = unchanged) -> jax.Array:
  """Returns what dense layers (weight, bias), with ReLU between and tanh at the end, make of latents [N, in].

  The change is of what stands behind each ReLU, [N, out].
  """
  x = latents
  for index, (weight, bias) in enumerate(layers):
    x = x @ weight.T + bias.reshape(1, -1)
    x = change(index, jax.nn.relu(x)) if index < len(layers) - 1 else jnp.tanh(x)
  side = math.isqrt(x.shape[1])
  return (x.reshape(-1, side, side, 1) + 1) / 2
