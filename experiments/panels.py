"""Grids of pictures: private images and what was found of them."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from gradleak.report import figures


class Panel(NamedTuple):
  """`images` [n, H, W, C] in [0, 1] under a title, with a caption of one or more lines below each, or None."""

  title: str
  samples: np.ndarray
  captions: list[str] | None = None


def plain(axes: Any, lines: str = 'both') -> None:
  """Takes minor ticks off a plot, and draws its grid."""
  axes.minorticks_off()
  axes.grid(axis=lines, color='#0a0b0c', alpha=0.1, linewidth=0.6)


def stretched(images: Any) -> Any:
  """Returns images [n, …], each scaled to [0, 1] by itself; a constant one is black."""
  axes = tuple(range(1, images.ndim))
  low, high = images.min(axis=axes, keepdims=True), images.max(axis=axes, keepdims=True)
  return (images - low) / jnp.where(high == low, 1.0, high - low)


def sheet(panels: Sequence[Panel], across: int = 12) -> bytes:
  """Returns a PNG of `Panel`s, one below the other, at most `across` images in a line."""
  from matplotlib.patches import Rectangle

  tile, gap, title, caption = 0.5, 0.06, 0.24, 0.12  # inches
  lines = [-(-len(panel.samples) // across) for panel in panels]
  tall = tile + gap
  below = [gap + caption * max(1 + text.count('\n') for text in p.captions) if p.captions else 0 for p in panels]
  heights = [title + n * (tall + deep) for n, deep in zip(lines, below, strict=True)]
  wide, high = across * tall + 3 * gap, sum(heights) + 2 * gap
  with figures.canvas(wide, high) as (axes, png):
    top = gap
    for panel, height, deep in zip(panels, heights, below, strict=True):
      axes.text(2 * gap, top + title / 2, panel.title, va='center')
      for index, image in enumerate(panel.samples):
        line, place = divmod(index, across)
        x, y = 2 * gap + place * tall, top + title + line * (tall + deep)
        image = np.clip(np.asarray(image, np.float32), 0, 1)
        image = image if image.shape[-1] == 3 else image[..., 0]
        extent = (x, x + tile, y + tile, y)
        axes.imshow(image, cmap='gray', vmin=0, vmax=1, interpolation='nearest', aspect='auto', extent=extent)
        axes.add_patch(Rectangle((x, y), tile, tile, facecolor='none', edgecolor='#9a9fa6', linewidth=0.4))
        if panel.captions:
          text = panel.captions[index]
          axes.text(x + tile / 2, y + tile + gap / 2, text, ha='center', va='top', fontsize=6.5, linespacing=1.1)
      top += height
    return png()
