"""Convolution in three formulations: the same function of the same parameters, at different speed.

Gradient matching differentiates weight gradients, which differ between trials. Under `vmap`, the weight gradients of a
native convolution become grouped convolutions. On CPU and GPU, XLA runs these up to two orders of magnitude slower than
the matrix products of `patches`. With weights shared by all trials, a native convolution avoids the copies of
`patches`; `hybrid`, the default, uses the faster one for each operation.
"""

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

_SMALL = 8  # pixels on a side


def native(images: jax.Array, kernel: jax.Array, size: int, stride: int, padding: int) -> jax.Array:
  """Convolves by XLA's own operation; all formulations have these arguments.

  Args:
    images: [N, H, W, C].
    kernel: [features, size·size·C], ordered (column, row, channel).
    size, stride, padding: in pixels, the same for rows and columns.

  Returns:
    [N, H', W', features].
  """
  kernel = kernel.reshape(kernel.shape[0], size, size, images.shape[-1]).transpose(2, 1, 3, 0)
  return _native(images, kernel, (stride, stride), [(padding, padding)] * 2)


def patches(images: jax.Array, kernel: jax.Array, size: int, stride: int, padding: int) -> jax.Array:
  """Convolves by copying out each pixel's neighbourhood (im2col), and one matrix product."""
  return jnp.einsum('nhwk,fk->nhwf', columns(images, size, stride, padding), kernel)


def columns(images: jax.Array, size: int, stride: int, padding: int) -> jax.Array:
  """Returns what each output of a convolution sees, [N, H', W', size·size·C], ordered (column, row, channel).

  Rows are copied first, then columns: half the copies of a single stage.
  """
  images = jnp.pad(images, ((0, 0), (padding, padding), (padding, padding), (0, 0)))
  height = (images.shape[1] - size) // stride + 1
  width = (images.shape[2] - size) // stride + 1
  rows = [images[:, i : i + stride * (height - 1) + 1 : stride] for i in range(size)]
  joined = jnp.concatenate(rows, axis=-1)
  return jnp.concatenate([joined[:, :, j : j + stride * (width - 1) + 1 : stride] for j in range(size)], axis=-1)


def hybrid(images: jax.Array, kernel: jax.Array, size: int, stride: int, padding: int) -> jax.Array:
  """Convolves natively with a kernel that all lanes of a `vmap` share, and by `patches` with a kernel per lane.

  A convolution and its two gradients are bilinear, and the derivatives of each are the other two. So one rule per
  operation holds at every order of differentiation. Weight gradients differ between lanes, and so do the operands that
  are convolved with their cotangents. Always `patches` where the copies are cheap. That is so with fewer than 16
  channels, as in LeNet, and on images of up to 8×8, as in the last layers of deep networks.
  """
  if images.shape[-1] < 16 or max(images.shape[1:3]) <= _SMALL:
    return patches(images, kernel, size, stride, padding)
  geometry = {'side': images.shape[1:3], 'size': size, 'stride': stride, 'padding': padding}
  return _convolve.bind(images, kernel, **geometry)


def general(
  images: jax.Array,
  kernel: jax.Array,
  strides: Sequence[int],
  pads: Sequence[tuple[int, int]],
  dilations: Sequence[int],
  groups: int,
) -> jax.Array:
  """Convolves over any number of sides, with strides, pads and dilations of each, in groups of channels.

  As `patches` does.

  Args:
    images: [N, …, C].
    kernel: [features, C / groups, …], as PyTorch has it.
    strides, pads, dilations: one per side; negative pads crop.
    groups: of channels and of features, each of which sees its own.

  Returns:
    [N, …, features].
  """
  images = jax.lax.pad(images, jnp.zeros((), images.dtype), [(0, 0, 0), *((*pad, 0) for pad in pads), (0, 0, 0)])
  seen = images.reshape(*images.shape[:-1], groups, -1)
  for side, size, stride, dilation in zip(range(1, images.ndim - 1), kernel.shape[2:], strides, dilations, strict=True):
    count = (seen.shape[side] - dilation * (size - 1) - 1) // stride + 1
    spans = [slice(i * dilation, i * dilation + stride * (count - 1) + 1, stride) for i in range(size)]
    seen = jnp.concatenate([seen[(slice(None),) * side + (span,)] for span in spans], axis=-1)
  features = kernel.shape[0] // groups
  weight = kernel.reshape(groups, features, *kernel.shape[1:])
  weight = weight.transpose(0, 1, *range(weight.ndim - 1, 2, -1), 2).reshape(groups, features, -1)
  return jnp.einsum('...gk,gfk->...gf', seen, weight).reshape(*seen.shape[:-2], -1)


_plain: contextvars.ContextVar[bool] = contextvars.ContextVar('plain', default=False)


@contextlib.contextmanager
def plain() -> Iterator[None]:
  """In this block `fast` is XLA's own operation, by which who reads a traced network knows a convolution."""
  token = _plain.set(True)
  try:
    yield
  finally:
    _plain.reset(token)


def fast(
  images: jax.Array,
  kernel: jax.Array,
  strides: Sequence[int],
  padding: Any,
  lhs_dilation: Sequence[int] | None = None,
  rhs_dilation: Sequence[int] | None = None,
  dimension_numbers: Any = None,
  feature_group_count: int = 1,
  precision: Any = None,
  **others: Any,
) -> jax.Array:
  """Convolves as `jax.lax.conv_general_dilated` does, in the formulation that is fast here.

  It takes the place of that function in Flax's `Conv`: images [N, …, C], kernel […, C / groups, features]. What Flax
  does not ask for by default (dilated images, a precision) is left to XLA's own operation.
  """
  sides = images.ndim - 2
  given = (tuple(one or (1,) * sides) for one in (lhs_dilation, rhs_dilation))
  dilation, strides = (next(given), next(given)), tuple(strides)
  asked = precision is not None or any(one is not None for one in others.values())
  if _plain.get() or max(dilation[0]) > 1 or asked or sides < 1:
    return jax.lax.conv_general_dilated(
      images, kernel, strides, padding, *dilation, dimension_numbers, feature_group_count, 1, precision, **others
    )
  sizes = [step * (size - 1) + 1 for size, step in zip(kernel.shape[:-2], dilation[1], strict=True)]
  pads = padding
  if isinstance(padding, str):
    pads = jax.lax.padtype_to_pads(images.shape[1:-1], sizes, strides, padding)
  pads = [(int(low), int(high)) for low, high in pads]
  square = sides == 2 and all(len(set(one)) == 1 for one in (kernel.shape[:2], strides, dilation[1]))
  if not square or feature_group_count > 1 or dilation[1][0] > 1:
    turned = kernel.transpose(-1, -2, *range(sides))
    return general(images, turned, strides, pads, dilation[1], feature_group_count)
  if len({*sum(pads, ())}) > 1 or pads[0][0] < 0:
    zero = jnp.zeros((), images.dtype)
    images, pads = jax.lax.pad(images, zero, [(0, 0, 0), *((*pad, 0) for pad in pads), (0, 0, 0)]), [(0, 0)]
  size = kernel.shape[0]
  turned = kernel.transpose(3, 1, 0, 2).reshape(kernel.shape[-1], -1)
  return hybrid(images, turned, size, strides[0], pads[0][0])


FORMULATIONS: dict[str, Callable[..., jax.Array]] = {'native': native, 'patches': patches, 'hybrid': hybrid}


def _native(
  images: jax.Array,
  kernel: jax.Array,
  strides: tuple[int, int],
  padding: Sequence[tuple[int, int]],
  **dilation: tuple[int, int],
) -> jax.Array:
  return jax.lax.conv_general_dilated(
    images, kernel, strides, padding, dimension_numbers=('NHWC', 'HWIO', 'NHWC'), **dilation
  )


def _outputs(
  formulation: Callable[..., jax.Array], images: jax.Array, kernel: jax.Array, *, side: Any, **geometry: int
) -> jax.Array:
  del side
  return formulation(images, kernel, **geometry)


def _images_gradient(cotangent: jax.Array, kernel: jax.Array, *, side: tuple[int, int], **geometry: int) -> jax.Array:
  """Applies the transpose of `patches` with respect to its images."""
  shape = (cotangent.shape[0], *side, kernel.shape[1] // geometry['size'] ** 2)
  transpose = jax.linear_transpose(
    lambda images: patches(images, kernel, **geometry), jax.ShapeDtypeStruct(shape, cotangent.dtype)
  )
  return transpose(cotangent)[0]


def _native_images_gradient(
  cotangent: jax.Array, kernel: jax.Array, *, side: tuple[int, int], size: int, stride: int, padding: int
) -> jax.Array:
  """Applies the transpose of `native` with respect to its images: a convolution with the flipped kernel."""
  channels = kernel.shape[1] // size**2
  kernel = kernel.reshape(kernel.shape[0], size, size, channels)[:, ::-1, ::-1].transpose(2, 1, 0, 3)
  low = size - 1 - padding
  pads = [(low, n + size - 2 - low - (m - 1) * stride) for n, m in zip(side, cotangent.shape[1:3], strict=True)]
  return _native(cotangent, kernel, (1, 1), pads, lhs_dilation=(stride, stride))


def _kernel_gradient(images: jax.Array, cotangent: jax.Array, *, side: tuple[int, int], **geometry: int) -> jax.Array:
  """Applies the transpose of `patches` with respect to its kernel."""
  del side
  shape = (cotangent.shape[-1], geometry['size'] ** 2 * images.shape[-1])
  transpose = jax.linear_transpose(
    lambda kernel: patches(images, kernel, **geometry), jax.ShapeDtypeStruct(shape, images.dtype)
  )
  return transpose(cotangent)[0]


def _primitive(
  name: str, shared: Callable[..., jax.Array], per_lane: Callable[..., jax.Array], has_kernel: bool = True
) -> Primitive:
  """Returns a bilinear primitive, computed by `per_lane` if the kernel is batched, else by `shared`.

  Args:
    name: of the primitive.
    shared, per_lane: (two arrays, **geometry) -> their product.
    has_kernel: whether the second array is a kernel; otherwise `per_lane` is used under every `vmap`.
  """
  primitive = Primitive(name)
  primitive.def_impl(lambda *arrays, **geometry: jax.jit(functools.partial(shared, **geometry))(*arrays))

  def result(*arrays: Any, **geometry: Any) -> Any:
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]
    found = jax.eval_shape(functools.partial(shared, **geometry), *shapes)
    return arrays[0].update(shape=found.shape)

  def batch(arrays: Sequence[jax.Array], axes: Sequence[int | None], **geometry: Any) -> tuple[jax.Array, int]:
    if has_kernel and axes[1] is None:  # fold the lanes into the batch of images
      lanes = jnp.moveaxis(arrays[0], axes[0], 0)  # type: ignore[arg-type]
      found = primitive.bind(lanes.reshape(-1, *lanes.shape[2:]), arrays[1], **geometry)
      return found.reshape(*lanes.shape[:2], *found.shape[1:]), 0
    return jax.vmap(functools.partial(per_lane, **geometry), in_axes=axes)(*arrays), 0

  primitive.def_abstract_eval(result)
  batching.primitive_batchers[primitive] = batch
  mlir.register_lowering(primitive, mlir.lower_fun(shared, multiple_results=False))
  return primitive


_convolve = _primitive('convolve', functools.partial(_outputs, native), functools.partial(_outputs, patches))
_of_images = _primitive('convolve_images_gradient', _native_images_gradient, _images_gradient)
_of_kernel = _primitive('convolve_kernel_gradient', _kernel_gradient, _kernel_gradient, has_kernel=False)

ad.defbilinear(
  _convolve,
  lambda cotangent, images, kernel, **geometry: _of_images.bind(cotangent, kernel, **geometry),
  lambda cotangent, images, kernel, **geometry: _of_kernel.bind(images, cotangent, **geometry),
)
ad.defbilinear(
  _of_images,
  lambda images, cotangent, kernel, **geometry: _convolve.bind(images, kernel, **geometry),
  lambda images, cotangent, kernel, **geometry: _of_kernel.bind(images, cotangent, **geometry),
)
ad.defbilinear(
  _of_kernel,
  lambda kernel, images, cotangent, **geometry: _of_images.bind(cotangent, kernel, **geometry),
  lambda kernel, images, cotangent, **geometry: _convolve.bind(images, kernel, **geometry),
)
