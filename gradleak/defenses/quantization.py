"""Codes of few bits, as frameworks send updates: rounding that is meant to save bandwidth."""

import functools
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gradleak.core.settings import Choice, Range
from gradleak.defenses.base import stateless
from gradleak.defenses.defense import Settings, defense

CODES = ('float16', 'blockwise8', 'float4', 'normfloat4')
_BITS = {'float16': 16, 'blockwise8': 8, 'float4': 4, 'normfloat4': 4}
_SCALE = 32  # bits of a float beside a block
_BLOCKS = {'blockwise8': 4096, 'float4': 64, 'normfloat4': 64}
# Dettmers, Pagnoni, Holtzman, Zettlemoyer: QLoRA. NeurIPS 2023, appendix E.
_NORMFLOAT4 = (
  -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
  -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
  0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
_FLOAT4 = (0.0, 1 / 192, 1 / 6, 1 / 4, 1 / 3, 1 / 2, 2 / 3, 1.0)  # and their negatives


def _bits(settings: Settings, sent: Any) -> np.ndarray:
  """Returns the bits of each upload of a tensor [K, …]: those of its entries, and of the largest one of each block."""
  size, code = sent[0].size, settings['code']
  blocks = -(-size // _BLOCKS[code]) if code in _BLOCKS else 0
  return np.full(len(sent), _BITS[code] * size + _SCALE * blocks)


def _adaptive_bits(settings: Settings, sent: Any) -> np.ndarray:
  """Returns the bits of each upload of a tensor [K, …]: those of its entries, and of the least and the largest one."""
  flat = np.asarray(sent).reshape(len(sent), -1)
  each = _width(flat.max(axis=1) - flat.min(axis=1), settings['weight'], flat.dtype.itemsize)
  return np.asarray(each, np.int64) * flat.shape[1] + 2 * _SCALE


_NO_NOISE = 'no ε of its own: rounding adds no noise, its output is a function of the update'


@defense(
  place='upload',
  citation='Dettmers, Lewis, Shleifer, Zettlemoyer: 8-bit Optimizers via Block-wise Quantization. ICLR 2022; as '
  'ModelQuantizer of NVIDIA FLARE 2.9.',
  published='ModelQuantizer',
  post_processing=True,
  bits=_bits,
  remark=lambda context, settings: _NO_NOISE,
)
def quantize(*, code: Annotated[str, Choice(CODES)] = 'float16') -> optax.GradientTransformationExtraArgs:
  r"""Rounds every entry to the nearest value of a code of few bits; nothing is random.

  It is meant to save bandwidth. What an attacker meets is an error of at most half the distance between two values.

  'float16' rounds to half precision. The others divide blocks of a tensor by their largest magnitude, and take the
  nearest value. The dynamic code of 'blockwise8' has 8 bits and spans seven decades, in blocks of 4,096 entries. The
  codes 'float4' and 'normfloat4' have 4 bits and blocks of 64. They are floats, and quantiles of a normal distribution
  (QLoRA, appendix E).

  Formula:
    g'_i = s_B \, c_{k(i)}, \quad k(i) = \arg\min_k | g_i / s_B - c_k |, \quad s_B = \max_{j \in B} |g_j|

  Args:
    code: the values c and the blocks B.
  """
  return stateless('quantize', lambda updates: jax.tree.map(lambda u: _coded(u, code) if u.size else u, updates))


@defense(
  place='upload',
  citation='Hönig, Zhao, Mullins: DAdaQuant: Doubly-adaptive Quantization for Communication-efficient Federated '
  'Learning. ICML 2022; as AdaQuantizer of NVIDIA FLARE 2.9.',
  post_processing=True,
  bits=_adaptive_bits,
  remark=lambda context, settings: _NO_NOISE,
)
def adaquant(*, weight: Annotated[float, Range(1e-9, finite=True)] = 0.01) -> optax.GradientTransformationExtraArgs:
  r"""Rounds every entry to one of 2^b − 1 even steps from the least to the largest entry of its tensor.

  The range of a tensor decides b, so that a small update is sent in few bits. The published filter divides by zero
  where b is 0, and sends no numbers. At the default weight that is a range below 2.3e-4. Here b is at least 1.

  Formula:
    g'_i = \min g + r \, \mathrm{round}(\ell (g_i - \min g) / r) / \ell, \quad r = \max g - \min g, \quad
    \ell = 2^{\lceil \log_2 \lceil \sqrt{32 r \ln 4 / w} \, \rceil \rceil} - 1

  Args:
    weight: w, of the bits against the error.
  """
  return stateless('adaquant', lambda updates: jax.tree.map(lambda u: _adaptive(u, weight) if u.size else u, updates))


def _coded(update: jax.Array, code: str) -> jax.Array:
  if code == 'float16':
    largest = float(jnp.finfo(jnp.float16).max)
    return jnp.clip(update.astype(jnp.float32), -largest, largest).astype(jnp.float16).astype(update.dtype)
  values = jnp.asarray(_values(code))
  size = _BLOCKS[code]
  flat = update.astype(jnp.float32).ravel()
  blocks = jnp.pad(flat, (0, -flat.size % size)).reshape(-1, size)
  scale = jnp.max(jnp.abs(blocks), axis=1, keepdims=True)
  places = jnp.searchsorted((values[1:] + values[:-1]) / 2, blocks / jnp.where(scale > 0, scale, jnp.ones_like(scale)))
  return (scale * values[places]).ravel()[: flat.size].reshape(update.shape).astype(update.dtype)


def _adaptive(update: jax.Array, weight: float) -> jax.Array:
  whole = update.astype(jnp.float32)
  low = jnp.min(whole)
  span = jnp.max(whole) - low
  steps = jnp.exp2(_width(span, weight, update.dtype.itemsize)) - 1
  width = jnp.where(span > 0, span, 1.0) / steps
  return (low + width * jnp.round((whole - low) / width)).astype(update.dtype)


def _width(span: Any, weight: float, itemsize: int) -> jax.Array:
  """Returns the bits of an entry of a tensor whose entries have this range, at least 1."""
  squared = jnp.asarray(span, jnp.float32) * float(8 * itemsize * np.log(4)) / jnp.asarray(weight, jnp.float32)
  return jnp.maximum(jnp.ceil(jnp.log2(jnp.maximum(jnp.ceil(jnp.sqrt(squared)), 1.0))), 1.0)


@functools.cache
def _values(code: str) -> np.ndarray:
  """Returns the values of a code of blocks, ascending."""
  if code == 'normfloat4':
    return np.asarray(_NORMFLOAT4, np.float32)
  if code == 'float4':
    return np.asarray([-v for v in _FLOAT4[:0:-1]] + [*_FLOAT4], np.float32)
  found = [0.0, 1.0]
  for exponent in range(7):  # 2^exponent fractions of a decade each, from 1e-6 on; both signs
    edges = np.linspace(0.1, 1, 2**exponent + 1)
    means = 10.0 ** (exponent - 6) * (edges[1:] + edges[:-1]) / 2
    found += [*means, *-means]
  return np.asarray(sorted(found), np.float32)
