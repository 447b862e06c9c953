"""What an update itself says about how it was made: sentences for the person who captured it."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gradleak.attacks.labels import last_layer
from gradleak.core import errors, trees
from gradleak.core.statistics import percent
from gradleak.core.trees import Tree
from gradleak.federated import Client, ClientSettings
from gradleak.federated.losses import cross_entropy
from gradleak.modalities import Modality
from gradleak.studies.captured.inversion import Inversion
from gradleak.studies.captured.update import norm

ROUND = 2e-5  # relative distance within which a norm equals a number of at most two digits
ALIKE = 0.9  # correlation from which an update looks like the weights themselves
MANY = 0.9  # fraction of zeros, in whole rows and columns of a tensor, that is worth a word
LOST = 0.01  # fraction of values with fewer digits than their type, that is worth a word
SCATTERED = 0.02  # fraction of zeros that stand alone, neither in a row nor in a column of zeros
ONE_SIZE = 0.9  # of the largest magnitude, within which the values of an update of signs lie
UNEXPLAINED = 1e-3  # mismatch from which on samples are not those behind an update
EXPLAINED = 1e-6  # mismatch up to which samples explain an update
HALVED = 0.01  # part of the update that is rounding, that is worth a word
MOST = 0.8  # fraction of the values that are not zero, that has to lie there
_FEW = 16  # values that may be numbers of any type
_ROUNDING = 1e-5  # of the largest entry, in sums of float32

_OF_SIGNS = (
  'Nearly all values of the update that are not zero have one size: they are signs times a rate, as one step of Adam '
  "or signSGD leaves them. Without attacks=… the search compares the signs alone (match='sign')."
)


def of_signs(update: Tree) -> bool:
  """Returns whether nearly all values of an update that are not zero have one size."""
  sizes = np.concatenate([np.abs(np.asarray(x, np.float64)).ravel() for x in jax.tree.leaves(update)])
  sizes = sizes[sizes > 0]
  return len(sizes) > 1 and float((sizes >= ONE_SIZE * sizes.max()).mean()) >= MOST


def of_scale(update: Tree, factor: float, lost: float) -> list[str]:
  """Returns sentences on the size of an update; empty if float32 can hold its squares.

  Args:
    update, factor, lost: of a `captured.update.Checked`.
  """
  found = []
  if factor != 1:
    size = norm(jax.tree.leaves(update)) / factor
    found.append(
      f'The norm of the update is {size:.3g}: squares of its values leave the range of its type. It is attacked at a '
      'scale at which its largest value is 0.5 to 1; directions and quotients are the same at any scale. Attacks that '
      'compare sizes, by squared distances or a known clip, say nothing here.'
    )
  if lost >= LOST:
    found.append(
      f'{percent(lost, 0)} of its values that are not zero were given as subnormal numbers, which have lost digits: '
      'save the update in a wider type, or at a larger scale.'
    )
  return found


def of_rate(given: ClientSettings, steps: int) -> list[str]:
  """Returns a sentence on a learning rate that nobody gave, where an update depends on it; else none.

  Args:
    given: how the client is said to train.
    steps: local steps behind the update. The direction of a single one is the same at any rate.
  """
  if given.share != 'delta' or given.learning_rate is not None or steps == 1:
    return []
  return [
    f'The learning rate of the client is not given, and {given.rate:g} is assumed. Over {steps} local steps, another '
    'rate makes another update: give learning_rate=… as the client has it.'
  ]


def of_truth(mismatch: float) -> list[str]:
  """Returns sentences on a truth that does not explain an update; empty if it does, or if that is not known.

  Args:
    mismatch: of the private samples, see `inversion.Inversion`.
  """
  if not mismatch > UNEXPLAINED:
    return []
  return [
    f'The truth would cause another update: its mismatch is {mismatch:.2g}, and that of the private samples is near 0. '
    'Samples, labels, weights, columns or tokens are others than the client’s, or it has settings, chance or a defense '
    'that are not named. Verdicts compare with this truth alone.'
  ]


def of_range(config: Mapping) -> list[str]:
  """Returns a sentence on a truth of images that use a small part of [0, 1]; else none.

  Args:
    config: what is recorded of the samples, see `modalities.Modality.recorded`.
  """
  if 'pixel_range' not in config:
    return []
  low, high = config['pixel_range']
  return [
    f'The truth uses [{low:.3g}, {high:.3g}] of [0, 1] alone, where all images are close: PSNR and SSIM say little. '
    'Its pixels may have been divided by too large a number.'
  ]


def of_answers(inversions: Sequence[Inversion], kind: Modality, number: int) -> list[str]:
  """Returns a sentence where a closed form explains an update by samples that there cannot be; else none.

  Args:
    inversions: of all attacks.
    kind: what a sample is said to be.
    number: private samples that are said to be behind the update.
  """
  for one in inversions:
    kept = one.samples[:number][~one.empty[:number]]
    odd = kind.odd(kept) if not one.steps and one.mismatch <= EXPLAINED else ''
    if odd:
      return [
        f'The {kind.noun[1]} by which {one.attack} explains the update do not fit their description: {odd}. The client '
        'encodes or scales its samples otherwise, in another order, or has others than are known. Without a truth, the '
        'nearest that there may be are shown.'
      ]
  return []


def hints(
  update: Tree,
  variables: Mapping,
  client: Client,
  sample_shape: Sequence[int],
  num_samples: int,
  labels: Any = None,
  protected: bool = False,
  factor: float = 1.0,
) -> list[str]:
  """Returns sentences on what stands out in an update; empty if nothing does.

  Args:
    update: a tree of NumPy arrays, finite and not all zero.
    variables: the model's.
    client: how the update is said to be made.
    sample_shape: of one sample.
    num_samples: private samples that are said to be behind it.
    labels: their labels, where they are given; probabilities [N, classes] say nothing of the classifying layer.
    protected: whether the client's defense is given.
    factor: what the captured update was multiplied by, see `update.checked`.
  """
  named = {'.'.join(trees.path_names(path)): np.asarray(x) for path, x in jax.tree.leaves_with_path(update)}
  found = [
    *([_OF_SIGNS] if of_signs(update) else []),
    *_dropped(named),
    *_zeros(named, protected),
    *_clipped(named, protected, factor),
    *_weights(update, variables['params']),
    *(_halved(update, variables['params'], factor) if client.share == 'delta' else []),
    *_longer(update, variables, client, sample_shape),
  ]
  if client.loss == cross_entropy() and np.ndim(labels) < 2:
    found += _labels(update, client, tuple(sample_shape), num_samples, labels)
  return found


def _dropped(named: Mapping[str, np.ndarray]) -> Iterator[str]:
  empty = [name for name, array in named.items() if not array.any()]
  if empty:
    yield (
      f'Nothing but zeros: {errors.some(empty)}. These tensors were dropped, missing in the file, or nothing reached '
      'them. They are not compared.'
    )


def _zeros(named: Mapping[str, np.ndarray], protected: bool) -> Iterator[str]:
  shares = {name: float((array == 0).mean()) for name, array in named.items() if array.any()}
  alone = {name: _scattered(named[name]) for name in shares}
  pruned = {name: shares[name] for name, share in alone.items() if share >= SCATTERED}
  if pruned:
    yield (
      f'Single entries are exactly zero: {_shares(pruned)}. Pruning and top-k leave such zeros; a batch under ReLU '
      'leaves some, too, in the layers behind it and where samples are zero.'
      + ('' if protected else ' If the client dropped entries, name its defense.')
    )
  inactive = {
    name: share for name, share in shares.items() if share >= MANY and name not in pruned and named[name].ndim > 1
  }
  if inactive:
    yield (
      f'Whole rows or columns are exactly zero: {_shares(inactive)}. Inactive ReLU neurons, black pixels, levels that '
      'no row has and tokens that no text has leave such zeros, and so does a client that drops neurons.'
    )


def _scattered(array: np.ndarray) -> float:
  """Returns the fraction of entries that are zero, in a row and a column that hold something else."""
  if array.ndim < 2:
    return 0.0
  empty = (array == 0).reshape(-1, array.shape[-1])
  alone = empty & ~empty.all(axis=0, keepdims=True) & ~empty.all(axis=1, keepdims=True)
  return float(alone.mean())


def _clipped(named: Mapping[str, np.ndarray], protected: bool, factor: float) -> Iterator[str]:
  size = norm(named.values()) / factor
  rounded = float(f'{size:.1e}')
  if abs(size - rounded) <= ROUND * rounded:
    yield (
      f'The norm of the update is {rounded:g}, a round number: it was probably clipped.'
      + ('' if protected else f' If so, the defense is clip(norm={rounded:g}).')
    )


def _weights(update: Tree, params: Tree) -> Iterator[str]:
  pairs = list(zip(jax.tree.leaves(update), jax.tree.leaves(params), strict=True))
  flat = [np.concatenate([np.asarray(pair[i], np.float64).ravel() for pair in pairs]) for i in (0, 1)]
  norms = [float(np.linalg.norm(x)) for x in flat]
  alike = float(flat[0] @ flat[1]) / (norms[0] * norms[1]) if min(norms) > 0 else 0.0
  if alike > ALIKE:
    yield (
      f'The update has a cosine of {alike:.2f} with the weights: it looks like weights after training, not like a '
      "gradient or a difference. Subtract the weights that were sent, and attack it with share='delta'."
    )
  elif alike < -ALIKE:
    yield (
      f'The update has a cosine of −{-alike:.2f} with the weights: it looks like the weights that were sent, '
      'subtracted from a gradient or a difference. If what came back was one, read it without sent=….'
    )


def _halved(update: Tree, params: Tree, factor: float) -> Iterator[str]:
  """Reads whether what came back was rounded to a type of 16 bits: each sum of weight and update is one of its numbers.

  Rounding is taken for uniform: its deviation is a step of the type, divided by √12.
  """
  pairs = list(zip(jax.tree.leaves(update), jax.tree.leaves(params), strict=True))
  moved, sent = (np.concatenate([np.asarray(pair[i], np.float64).ravel() for pair in pairs]) for i in (0, 1))
  kept = moved != 0
  moved = moved[kept] / factor
  returned = moved + sent[kept]
  if np.count_nonzero(returned) < _FEW:
    return
  for kind in (jnp.bfloat16, jnp.float16):  # most numbers of the first are numbers of the second
    about = jnp.finfo(kind)
    with np.errstate(over='ignore'):
      apart = np.abs(returned.astype(kind).astype(np.float64) - returned)
    if not np.all(apart <= 2 * np.finfo(np.float32).eps * np.abs(moved)):
      continue
    steps = float(about.eps) * np.exp2(np.floor(np.log2(np.maximum(np.abs(returned), float(about.tiny)))))
    rounding = float(np.sqrt(np.square(steps).sum() / 12 / np.square(moved).sum()))
    if rounding >= HALVED:
      yield (
        f'The weights that came back have the precision of {np.dtype(kind).name}: rounding makes up about '
        f'{percent(min(rounding, 1.0), 0)} of the norm of the update, and hides that part of it from attacks. Save '
        'them in float32 to see what the client itself gives away.'
      )
    return


def _longer(update: Tree, variables: Mapping, client: Client, sample_shape: Sequence[int]) -> Iterator[str]:
  """Reads the gradient of the embeddings of positions: texts have a token wherever one is not zero."""
  about = client.model.first_block
  if about is None:
    return
  places = np.asarray(about.parts({**variables, 'params': update})[1])
  shared = places.sum(axis=0) / (len(places) + 1)  # with an embedding of the kind of text, which is added everywhere
  still = np.abs(places - shared).max(axis=1) <= _ROUNDING * np.abs(places).max()
  moved = np.flatnonzero(np.any(places, axis=1) & ~still)
  if len(moved) and moved[-1] >= sample_shape[0]:
    yield (
      f'The update moves the embedding of position {moved[-1] + 1}, and texts are said to have at most '
      f'{sample_shape[0]} tokens: they are longer, or it holds noise. sample_shape=({len(places)},) has room for all.'
    )


def _labels(
  update: Tree, client: Client, sample_shape: tuple[int, ...], num_samples: int, labels: Sequence[int] | None
) -> Iterator[str]:
  """Reads the bias of the classifying layer: of one sample, only that of its class is negative in a gradient."""
  try:
    kernel, bias = last_layer(client.model, update, sample_shape, client.num_classes)
  except errors.UsageError:  # the model has no such layer
    return
  if bias is None:
    return
  bias = np.asarray(bias, np.float64)
  if not bias.any():
    if labels is None:
      other = 'read from its weights' if np.any(kernel) else 'optimised'
      yield f'The bias of the classifying layer is missing: labels that are not given are {other}.'
    return
  bias = -bias if client.share == 'delta' else bias
  negative, positive = ({int(c) for c in np.flatnonzero(side)} for side in (bias < 0, bias > 0))
  if len(positive) == 1 and len(negative) == client.num_classes - 1 > num_samples:  # more than the samples can ask for
    other = 'gradient' if client.share == 'delta' else 'delta'
    yield (
      f'The signs in the classifying layer are those of share={other!r}, and the client is said to have '
      f'share={client.share!r}: the sign of the update may be reversed.'
    )
  elif len(negative) > num_samples:
    yield (
      f'The classifying layer asks for {len(negative)} classes, and {num_samples} '
      f'{"sample is" if num_samples == 1 else "samples are"} said to be behind the update: there are more samples, '
      'several local steps, or noise.'
    )
  elif labels is not None and num_samples == 1 and negative and not set(labels) <= negative:
    asked = ', '.join(map(str, sorted(negative)))
    yield f'The label is given as {labels[0]}, and the classifying layer asks for {asked}: one of them is wrong.'


def _shares(shares: Mapping[str, float]) -> str:
  return errors.some([f'{percent(share, 0)} of {name}' for name, share in shares.items()])
