"""PyTorch's layers in JAX: convolution, pooling, norms, dropout, embedding, attention, recurrent layers, resizing."""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gradleak.core import errors
from gradleak.models import convolution, layers
from gradleak.models.aten import OPERATIONS, Last, Run, Tokens, Unsupported, aligned, last, on_maps, operation

# Convolution ---------------------------------------------------------------------------------------------------------


def _each(value: Any, count: int) -> tuple[int, ...]:
  """Returns one number per side of a list that may have one for all."""
  values = (value,) if isinstance(value, int) else tuple(value)
  return values * count if len(values) == 1 else values


@operation('linear')
def _linear(run: Run, x: Any, weight: Any, bias: Any = None) -> Any:
  """Multiplies by a weight [out, in], or [in, out] where the program marks it as 'dense'."""
  found = jnp.matmul(x.astype(weight.dtype), weight if run.mark == 'dense' else weight.T)
  return found if bias is None else found + bias.reshape((1,) * (found.ndim - 1) + bias.shape)


@on_maps('convolution')
def _convolution(
  run: Run,
  x: Any,
  weight: Any,
  bias: Any,
  stride: Sequence[int],
  padding: Sequence[int],
  dilation: Sequence[int],
  transposed: bool,
  output_padding: Sequence[int],
  groups: int,
) -> Any:
  """Convolves x [N, C, …] with weight [out, in / groups, …], or if transposed [in, out / groups, …]."""
  sides = x.ndim - 2
  if sides != weight.ndim - 2 or sides < 1:
    raise Unsupported('a batch without its axis')
  stride, padding, dilation = (_each(one, sides) for one in (stride, padding, dilation))
  images = last(x).astype(weight.dtype)
  pads = [(pad, pad) for pad in padding]
  if transposed:
    images, weight, pads = _dilated(images, weight, stride, padding, dilation, _each(output_padding, sides), groups)
    stride = (1,) * sides
  square = sides == 2 and len({*weight.shape[2:]}) == len({*stride}) == len({*pads}) == 1 and pads[0][0] == pads[0][1]
  if square and groups == 1 and set(dilation) == {1} and pads[0][0] >= 0:
    kernel = weight.transpose(0, 3, 2, 1).reshape(len(weight), -1)
    found = convolution.hybrid(images, kernel, weight.shape[2], stride[0], pads[0][0])
  else:
    found = convolution.general(images, weight, stride, pads, dilation, groups)
  return Last(found if bias is None else found + bias.reshape((1,) * (found.ndim - 1) + bias.shape))


def _dilated(
  images: jax.Array,
  weight: jax.Array,
  stride: tuple[int, ...],
  padding: tuple[int, ...],
  dilation: tuple[int, ...],
  more: tuple[int, ...],
  groups: int,
) -> tuple[jax.Array, jax.Array, list[tuple[int, int]]]:
  """Returns images, weight and pads of the convolution of stride 1 that equals a transposed one."""
  spread = [(0, 0, 0), *((0, 0, step - 1) for step in stride), (0, 0, 0)]
  images = jax.lax.pad(images, jnp.zeros((), images.dtype), spread)
  inputs, outputs, *sizes = weight.shape
  weight = weight.reshape(groups, inputs // groups, outputs, *sizes).swapaxes(1, 2)
  weight = jnp.flip(weight.reshape(groups * outputs, inputs // groups, *sizes), range(2, weight.ndim - 1))
  pads = []
  for size, pad, step, extra in zip(sizes, padding, dilation, more, strict=True):
    low = step * (size - 1) - pad
    pads.append((low, low + extra))
  return images, weight, pads


# Pooling -------------------------------------------------------------------------------------------------------------


def _windows(
  images: jax.Array, sizes: Sequence[int], strides: Sequence[int], dilations: Sequence[int], counts: Sequence[int]
) -> list[jax.Array]:
  """Returns the entries of each window [N, …, C], one array per place in a window, row by row."""
  found = []
  for place in itertools.product(*map(range, sizes)):
    starts = [i * step for i, step in zip(place, dilations, strict=True)]
    spans = [
      slice(start, start + stride * (count - 1) + 1, stride)
      for start, stride, count in zip(starts, strides, counts, strict=True)
    ]
    found.append(images[(slice(None), *spans)])
  return found


def _outputs(side: int, size: int, stride: int, pad: int, dilation: int, ceil: bool) -> int:
  """Returns how many windows fit along a side; with `ceil`, one that ends behind the side counts."""
  whole = side + 2 * pad - dilation * (size - 1) - 1
  count = (-(-whole // stride) if ceil else whole // stride) + 1
  return count - (ceil and (count - 1) * stride >= side + pad)


def _pool_geometry(x: Any, size: Any, stride: Any, padding: Any, dilation: Any, ceil: bool) -> tuple:
  sides = x.ndim - 2
  sizes = _each(size, sides)
  strides = sizes if stride == () else _each(stride, sides)
  pads, dilations = _each(padding, sides), _each(dilation, sides)
  counts = [
    _outputs(side, size, stride, pad, step, ceil)
    for side, size, stride, pad, step in zip(x.shape[2:], sizes, strides, pads, dilations, strict=True)
  ]
  ends = [  # how far the last window reaches beyond the padded side
    (count - 1) * stride + step * (size - 1) + 1 - side - pad
    for count, stride, step, size, side, pad in zip(counts, strides, dilations, sizes, x.shape[2:], pads, strict=True)
  ]
  return sizes, strides, dilations, counts, [(pad, max(end, 0)) for pad, end in zip(pads, ends, strict=True)]


@on_maps('max_pool2d_with_indices', 'max_pool3d_with_indices')
def _max_pool(
  run: Run, x: Any, size: Any, stride: Any = (), padding: Any = 0, dilation: Any = 1, ceil_mode: bool = False
) -> Any:
  """Pools; the first maximum of a window has the derivative. The places of the maxima are not returned."""
  sizes, strides, dilations, counts, pads = _pool_geometry(x, size, stride, padding, dilation, ceil_mode)
  images = last(x)
  flat = len(sizes) == 2 and sizes == strides and len(set(sizes)) == 1 and not any(map(sum, pads))
  if flat and set(dilations) == {1} and not ceil_mode:
    return Last(layers.max_pool(images, sizes[0])), None
  lowest = jnp.finfo(images.dtype).min
  images = jnp.pad(images, [(0, 0), *pads, (0, 0)], constant_values=lowest)
  windows = jnp.stack(_windows(images, sizes, strides, dilations, counts), axis=-1)
  return Last(layers.largest(windows)), None


@on_maps('avg_pool1d', 'avg_pool2d', 'avg_pool3d')
def _avg_pool(
  run: Run,
  x: Any,
  size: Any,
  stride: Any = (),
  padding: Any = 0,
  ceil_mode: bool = False,
  count_include_pad: bool = True,
  divisor_override: int | None = None,
) -> Any:
  sizes, strides, ones, counts, pads = _pool_geometry(x, size, stride, padding, 1, ceil_mode)
  images = jnp.pad(last(x), [(0, 0), *pads, (0, 0)])
  total = functools.reduce(jnp.add, _windows(images, sizes, strides, ones, counts))
  if divisor_override:
    return Last(total / jnp.asarray(divisor_override, total.dtype))
  held = np.ones(())
  for side, count, stride, window, (low, high) in zip(x.shape[2:], counts, strides, sizes, pads, strict=True):
    del high
    starts = np.arange(count) * stride - low
    ends = np.minimum(starts + window, side + low)  # padding on both sides counts; what ceil_mode adds does not
    if not count_include_pad:
      starts, ends = np.maximum(starts, 0), np.minimum(ends, side)
    held = held[..., None] * (ends - starts)
  return Last(total / jnp.asarray(held, total.dtype).reshape(1, *counts, 1))


def _mapped(x: Any, matrices: Sequence[np.ndarray]) -> Last:
  """Returns a map [N, C, …] whose sides are multiplied by matrices [new, old]."""
  values = last(x)
  for place, matrix in enumerate(matrices, 1):
    values = jnp.moveaxis(jnp.tensordot(jnp.asarray(matrix, values.dtype), values, (1, place)), 0, place)
  return Last(values)


def _adaptive_windows(side: int, count: int) -> list[range]:
  return [range(i * side // count, -(-(i + 1) * side // count)) for i in range(count)]


@on_maps('_adaptive_avg_pool2d', '_adaptive_avg_pool3d', 'adaptive_avg_pool1d', 'adaptive_avg_pool2d')
def _adaptive_avg_pool(run: Run, x: Any, size: Any) -> Any:
  matrices = []
  for side, count in zip(x.shape[2:], _each(size, x.ndim - 2), strict=True):
    matrix = np.zeros((count, side))
    for row, window in zip(matrix, _adaptive_windows(side, count), strict=True):
      row[window.start : window.stop] = 1 / len(window)
    matrices.append(matrix)
  return _mapped(x, matrices)


@on_maps('adaptive_max_pool2d', 'adaptive_max_pool3d')
def _adaptive_max_pool(run: Run, x: Any, size: Any) -> Any:
  """Pools over windows that may differ in their sizes; the first maximum has the derivative."""
  images = last(x)
  places = [_adaptive_windows(side, count) for side, count in zip(x.shape[2:], _each(size, x.ndim - 2), strict=True)]
  found = []
  for window in itertools.product(*places):
    part = images[(slice(None), *(slice(one.start, one.stop) for one in window))].reshape(len(images), -1, x.shape[1])
    found.append(layers.largest(jnp.swapaxes(part, 1, 2)))
  return Last(jnp.stack(found, 1).reshape(len(images), *map(len, places), x.shape[1])), None


# Resizing ------------------------------------------------------------------------------------------------------------


def _sources(side: int, count: int, align_corners: bool, scale: float | None) -> np.ndarray:
  """Returns where each new pixel lies among the old ones, in float64."""
  if align_corners:
    return np.arange(count) * ((side - 1) / (count - 1) if count > 1 else 0.0)
  return (np.arange(count) + 0.5) * (1 / scale if scale else side / count) - 0.5


def _linear_matrix(side: int, count: int, align_corners: bool, scale: float | None) -> np.ndarray:
  places = np.maximum(_sources(side, count, align_corners, scale), 0)
  low = np.minimum(places.astype(int), side - 1)
  matrix = np.zeros((count, side))
  np.add.at(matrix, (np.arange(count), low), 1 - (places - low))
  np.add.at(matrix, (np.arange(count), np.minimum(low + 1, side - 1)), places - low)
  return matrix


def _cubic_matrix(side: int, count: int, align_corners: bool, scale: float | None) -> np.ndarray:
  places = _sources(side, count, align_corners, scale)
  low, matrix = np.floor(places).astype(int), np.zeros((count, side))
  for offset in (-1, 0, 1, 2):
    away = np.abs(places - low - offset)
    near = ((1.25 * away - 2.25) * away) * away + 1
    far = ((-0.75 * away + 3.75) * away - 6) * away + 3
    np.add.at(matrix, (np.arange(count), np.clip(low + offset, 0, side - 1)), np.where(away <= 1, near, far))
  return matrix


def _nearest_matrix(side: int, count: int, scale: float | None) -> np.ndarray:
  step = np.float32(1 / scale if scale else side / count)
  return np.eye(side)[np.minimum((np.arange(count, dtype=np.float32) * step).astype(int), side - 1)]


def _resizing(name: str, sides: int, matrix: Callable[..., np.ndarray], corners: bool) -> None:
  def resize(run: Run, x: Any, size: Sequence[int] | None, *rest: Any) -> Any:
    aligned_corners = (rest[0],) if corners else ()
    scales = rest[1 if corners else 0 :]
    if len(scales) == 1 and isinstance(scales[0], tuple | list):  # the overload 'vec'
      scales = tuple(scales[0])
    scales = scales if any(scales) else (None,) * sides
    size = size or [int(side * scale) for side, scale in zip(x.shape[2:], scales, strict=True)]
    each = zip(x.shape[2:], size, scales, strict=True)
    return _mapped(x, [matrix(side, count, *aligned_corners, scale) for side, count, scale in each])

  OPERATIONS[name] = resize


_resizing('upsample_nearest1d', 1, _nearest_matrix, False)
_resizing('upsample_nearest2d', 2, _nearest_matrix, False)
_resizing('upsample_nearest3d', 3, _nearest_matrix, False)
_resizing('upsample_linear1d', 1, _linear_matrix, True)
_resizing('upsample_bilinear2d', 2, _linear_matrix, True)
_resizing('upsample_trilinear3d', 3, _linear_matrix, True)
_resizing('upsample_bicubic2d', 2, _cubic_matrix, True)


# Norms ---------------------------------------------------------------------------------------------------------------


def _along_channels(x: jax.Array, values: jax.Array) -> jax.Array:
  return values.reshape((1,) * (x.ndim - 1) + values.shape)


def _scaled(x: jax.Array, weight: Any, bias: Any) -> jax.Array:
  """Returns a map with its channels last, times a weight and plus a bias per channel."""
  x = x if weight is None else x * _along_channels(x, weight)
  return x if bias is None else x + _along_channels(x, bias)


@on_maps('_native_batch_norm_legit_functional', '_native_batch_norm_legit', 'native_batch_norm')
def _batch_norm(
  run: Run, x: Any, weight: Any, bias: Any, mean: Any, var: Any, training: bool, momentum: float, eps: float
) -> Any:
  """Returns (the norm, …, the new running mean and variance, the latter of the unbiased variance of the batch)."""
  images = last(x)
  images, low = images.astype(jnp.float32) if images.dtype.itemsize < 4 else images, images.dtype
  if not (training and run.train) and mean is not None:
    found = _normed(images, _along_channels(images, mean), _along_channels(images, var), eps)
    return Last(_scaled(found, weight, bias).astype(low)), None, None, mean, var
  over = tuple(range(images.ndim - 1))
  counts = run.counted(images) if mean is not None or images.shape[0] > 1 else None
  share = jnp.ones((1,) * images.ndim, images.dtype) if counts is None else counts.astype(images.dtype)
  share = jnp.broadcast_to(share, (images.shape[0], *(1,) * (images.ndim - 1)))
  size = jnp.sum(share) * math.prod(images.shape[1:-1])
  if math.prod(images.shape[:-1]) == 1:
    raise errors.UsageError(f'BatchNorm of {run.where} has one value per channel, on which PyTorch does not train')
  centre = jnp.sum(images * share, over, keepdims=True) / size
  spread = jnp.sum(jnp.square(images - centre) * share, over, keepdims=True) / size
  found = Last(_scaled(_normed(images, centre, spread, eps), weight, bias).astype(low))
  if mean is None:
    return found, None, None, None, None
  rate = jnp.asarray(momentum, mean.dtype)
  unbiased = spread.reshape(-1) * size / jnp.maximum(size - 1, 1)
  return (
    found,
    None,
    None,
    *((1 - rate) * old + rate * new.astype(old.dtype) for old, new in ((mean, centre.reshape(-1)), (var, unbiased))),
  )


def _normed(x: jax.Array, mean: jax.Array, var: jax.Array, eps: float) -> jax.Array:
  return (x - mean) * jax.lax.rsqrt(var + jnp.asarray(eps, x.dtype))


@on_maps('_native_batch_norm_legit_no_training', '_native_batch_norm_legit_no_training.default')
def _batch_norm_evaluated(
  run: Run, x: Any, weight: Any, bias: Any, mean: Any, var: Any, momentum: float, eps: float
) -> Any:
  return _batch_norm(run, x, weight, bias, mean, var, False, momentum, eps)


@on_maps('_native_batch_norm_legit.no_stats')
def _batch_norm_without_statistics(
  run: Run, x: Any, weight: Any, bias: Any, training: bool, momentum: float, eps: float
) -> Any:
  return _batch_norm(run, x, weight, bias, None, None, training, momentum, eps)


@operation('native_layer_norm')
def _native_layer_norm(run: Run, x: Any, shape: Sequence[int], weight: Any, bias: Any, eps: float) -> Any:
  return _layer_norm(run, x, shape, weight, bias, eps), None, None


@operation('layer_norm')
def _layer_norm(
  run: Run, x: Any, shape: Sequence[int], weight: Any = None, bias: Any = None, eps: float = 1e-5, *others: Any
) -> Any:
  over = tuple(range(x.ndim - len(shape), x.ndim))
  mean = jnp.mean(x, over, keepdims=True)
  found = _normed(x, mean, jnp.mean(jnp.square(x - mean), over, keepdims=True), eps)
  for values, apply in ((weight, jnp.multiply), (bias, jnp.add)):
    if values is not None:
      found = apply(found, values.reshape((1,) * (x.ndim - values.ndim) + values.shape))
  return found


@operation('rms_norm')
def _rms_norm(run: Run, x: Any, shape: Sequence[int], weight: Any = None, eps: float | None = None) -> Any:
  over = tuple(range(x.ndim - len(shape), x.ndim))
  eps = float(jnp.finfo(x.dtype).eps) if eps is None else eps
  found = x * jax.lax.rsqrt(jnp.mean(jnp.square(x), over, keepdims=True) + jnp.asarray(eps, x.dtype))
  return found if weight is None else found * weight.reshape((1,) * (x.ndim - weight.ndim) + weight.shape)


@on_maps('group_norm')
def _group_norm(
  run: Run, x: Any, groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5, *others: Any
) -> Any:
  images = last(x)
  parts = images.reshape(*images.shape[:-1], groups, -1)
  over = (*range(1, parts.ndim - 2), parts.ndim - 1)
  mean = jnp.mean(parts, over, keepdims=True)
  found = _normed(parts, mean, jnp.mean(jnp.square(parts - mean), over, keepdims=True), eps)
  return Last(_scaled(found.reshape(images.shape), weight, bias))


@on_maps('native_group_norm')
def _native_group_norm(
  run: Run, x: Any, weight: Any, bias: Any, count: int, channels: int, sides: int, groups: int, eps: float
) -> Any:
  return _group_norm(run, x, groups, weight, bias, eps), None, None


# Dropout -------------------------------------------------------------------------------------------------------------


@on_maps('native_dropout')
def _native_dropout(run: Run, x: Any, rate: float, train: bool | None) -> Any:
  return _dropout(run, x, rate, train is not False), None


@on_maps('dropout')
def _dropout(run: Run, x: Any, rate: float, train: bool = True) -> Any:
  kept = run.drawn(x.shape, 1 - rate) if train and rate else None
  if kept is None:
    return x
  scale = jnp.asarray(0 if rate == 1 else 1 / (1 - rate), x.dtype)
  (x, kept), maps = aligned(run, x, kept.astype(x.dtype) * scale)
  return Last(x * kept) if maps else x * kept


@operation('bernoulli.p')
def _bernoulli(run: Run, x: Any, probability: float) -> Any:
  """Draws as for the dropout of whole channels, which divides by the probability; that is 1 without a key."""
  kept = run.drawn(x.shape, probability)
  return jnp.full_like(x, probability) if kept is None else kept.astype(x.dtype)


# Embedding and attention ---------------------------------------------------------------------------------------------


@operation('embedding')
def _embedding(
  run: Run, weight: Any, indices: Any, padding: int = -1, scale_grad_by_freq: bool = False, sparse: bool = False
) -> Any:
  """Takes rows of the weight [rows, features], or mixtures of them; the one of the padding has no derivative."""
  if scale_grad_by_freq:
    raise Unsupported('gradients that are scaled by the frequency of a row')
  if padding >= 0:
    weight = weight.at[padding].set(jax.lax.stop_gradient(weight[padding]))
  if isinstance(indices, Tokens):
    return jnp.take(indices.mixtures.astype(weight.dtype) @ weight[: indices.mixtures.shape[1]], indices.places, 0)
  if not jnp.issubdtype(indices.dtype, jnp.integer):
    raise Unsupported(f'indices of type {indices.dtype}')
  return jnp.take(weight, indices, 0)


@operation('scaled_dot_product_attention')
def _attention(
  run: Run,
  query: Any,
  key: Any,
  value: Any,
  mask: Any = None,
  dropout: float = 0.0,
  is_causal: bool = False,
  *,
  scale: float | None = None,
  enable_gqa: bool = False,
) -> Any:
  """Attends: queries [.., L, E], keys [.., S, E], values [.., S, V]; a boolean mask says what takes part."""
  if enable_gqa:
    share = query.shape[-3] // key.shape[-3]
    key, value = (jnp.repeat(one, share, axis=-3) for one in (key, value))
  scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
  scores = jnp.matmul(query * jnp.asarray(scale, query.dtype), jnp.swapaxes(key, -1, -2))
  if is_causal:
    mask = jnp.tril(jnp.ones(scores.shape[-2:], bool))
  if mask is not None:
    mask = mask.reshape((1,) * (scores.ndim - mask.ndim) + mask.shape)
    scores = jnp.where(mask, scores, -jnp.inf) if mask.dtype == bool else scores + mask.astype(scores.dtype)
  weights = _dropout(run, _softmax_of_some(scores, mask), dropout)
  return jnp.matmul(weights, value)


def _softmax_of_some(scores: jax.Array, mask: Any) -> jax.Array:
  """Returns the softmax; rows in which nothing takes part are zeros, as PyTorch has them."""
  if mask is None:
    return jax.nn.softmax(scores, -1)
  nothing = jnp.all(jnp.isneginf(scores), -1, keepdims=True)
  found = jax.nn.softmax(jnp.where(nothing, jnp.zeros_like(scores), scores), -1)
  return jnp.where(nothing, jnp.zeros_like(found), found)


# Recurrent layers ----------------------------------------------------------------------------------------------------


def _lstm_cell(carry: tuple, projected: jax.Array, weights: Sequence[Any]) -> tuple:
  hidden, cell = carry
  recurrent, bias, *projection = weights
  gates = projected + hidden @ recurrent.T + (0 if bias is None else bias[None])
  i, f, g, o = jnp.split(gates, 4, -1)
  cell = jax.nn.sigmoid(f) * cell + jax.nn.sigmoid(i) * jnp.tanh(g)
  hidden = jax.nn.sigmoid(o) * jnp.tanh(cell)
  return (hidden @ projection[0].T if projection else hidden), cell


def _gru_cell(carry: tuple, projected: jax.Array, weights: Sequence[Any]) -> tuple:
  (hidden,) = carry
  recurrent, bias = weights
  inner = hidden @ recurrent.T + (0 if bias is None else bias[None])
  (r, z, n), (hr, hz, hn) = jnp.split(projected, 3, -1), jnp.split(inner, 3, -1)
  r, z = jax.nn.sigmoid(r + hr), jax.nn.sigmoid(z + hz)
  return ((1 - z) * jnp.tanh(n + r * hn) + z * hidden,)


def _rnn_cell(act: Callable, carry: tuple, projected: jax.Array, weights: Sequence[Any]) -> tuple:
  (hidden,) = carry
  recurrent, bias = weights
  return (act(projected + hidden @ recurrent.T + (0 if bias is None else bias[None])),)


def _scanned(cell: Callable, x: jax.Array, start: tuple, weights: Sequence[Any], biased: bool, back: bool) -> tuple:
  """Returns ([T, N, H], the last states) of one layer in one direction, over x [T, N, features]."""
  weight, recurrent, *others = weights
  first, second = others[:2] if biased else (None, None)
  projected = x @ weight.T
  if first is not None:
    projected += first.reshape(1, 1, -1)
  kept = (recurrent, second, *others[2 if biased else 0 :])

  def step(carry: tuple, one: jax.Array) -> tuple[tuple, jax.Array]:
    carry = cell(carry, one, kept)
    return carry, carry[0]

  state, outputs = jax.lax.scan(step, start, projected, reverse=back)
  return outputs, state


def _recurrent(cell: Callable, number: int) -> Callable[..., Any]:
  """Returns an operation of recurrent layers with a number of states."""

  def run_layers(
    run: Run,
    x: Any,
    states: Any,
    weights: Sequence[Any],
    biased: bool,
    count: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
  ) -> Any:
    if isinstance(biased, tuple | list) or x.ndim != 3:
      raise Unsupported('packed sequences, or one without the axis of the batch')
    states = (states,) if number == 1 else tuple(states)
    x = x.swapaxes(0, 1) if batch_first else x
    directions = 2 if bidirectional else 1
    size, ends = len(weights) // (count * directions), []
    for layer in range(count):
      outputs = []
      for direction in range(directions):
        place = layer * directions + direction
        start = tuple(state[place] for state in states)
        own = weights[place * size : (place + 1) * size]
        output, end = _scanned(cell, x, start, own, biased, direction == 1)
        outputs.append(output)
        ends.append(end)
      x = jnp.concatenate(outputs, -1)
      if dropout and train and layer < count - 1:
        kept = Run(run.dtype, run.train, run.key, run.counted)
        kept.number = run.number * 1000 + layer
        x = _dropout(kept, x, dropout)
    final = tuple(jnp.stack([end[i] for end in ends]) for i in range(number))
    return (x.swapaxes(0, 1) if batch_first else x, *final)

  return run_layers


operation('lstm.input')(_recurrent(_lstm_cell, 2))
operation('gru.input')(_recurrent(_gru_cell, 1))
operation('rnn_tanh.input')(_recurrent(functools.partial(_rnn_cell, jnp.tanh), 1))
operation('rnn_relu.input')(_recurrent(functools.partial(_rnn_cell, jax.nn.relu), 1))
