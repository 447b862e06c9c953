"""The style of the figures, and their PNG."""

import contextlib
import io
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

INK, SOFT = '#1d2126', '#5c6168'
LINE = '#0a0b0c'  # of uploads without a defense
DPI = 160
# Okabe and Ito's colour-blind-safe palette without the two colours that are too light on white. Orange is darkened and
# blue lightened, so that all contrast with white and with near-black.
_PALETTE = ('#2f86c9', '#d55e00', '#009e73', '#cc79a7', '#b87f00')
_DASHES = ('-', (0, (7, 1.5)), (0, (3, 1.2, 1, 1.2)), (0, (1.2, 1)))


@contextlib.contextmanager
def figure(width: float, height: float, **options: Any) -> Iterator[tuple[Any, Callable[[], bytes]]]:
  """Yields a Matplotlib figure in our style, and the function that returns it as a PNG.

  Args:
    width, height: in inches.
    **options: of `matplotlib.figure.Figure`.
  """
  from matplotlib import rc_context
  from matplotlib.backends.backend_agg import FigureCanvasAgg
  from matplotlib.figure import Figure
  from matplotlib.ticker import LogFormatterMathtext, NullFormatter

  style = {'font.family': ['DejaVu Sans'], 'font.size': 8.5, 'text.color': INK, 'text.parse_math': False}
  with rc_context({**style, 'axes.spines.top': False, 'axes.spines.right': False}):
    made = Figure(figsize=(width, height), dpi=DPI, facecolor='white', **options)

    def png() -> bytes:
      for axis in (axis for axes in made.axes for axis in (axes.xaxis, axes.yaxis)):
        if isinstance(axis.get_major_formatter(), LogFormatterMathtext):  # mathematics would be shown as it is written
          axis.set_major_formatter('{x:g}')
          axis.set_minor_formatter(NullFormatter())
      buffer = io.BytesIO()
      FigureCanvasAgg(made).print_png(buffer, metadata={'Software': None})
      return buffer.getvalue()

    yield made, png


@contextlib.contextmanager
def canvas(width: float, height: float) -> Iterator[tuple[Any, Callable[[], bytes]]]:
  """Yields axes that are a whole `figure`, in inches from its upper left corner, and the function of its PNG."""
  with figure(width, height) as (made, png):
    axes = made.add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(height, 0))
    axes.set_axis_off()
    yield axes, png


def extent(pixels: Any, left: float, top: float, side: float) -> tuple[float, float, float, float]:
  """Returns where an image stands in a square of a `canvas`: (left, right, bottom, top), with the shape of the image.

  Args:
    pixels: [H, W] or [H, W, C].
    left, top, side: of the square, in inches.
  """
  height, width = pixels.shape[:2]
  tall, wide = (side * (length / max(height, width)) for length in (height, width))
  x, y = left + (side - wide) / 2, top + (side - tall) / 2
  return x, x + wide, y + tall, y


def legend(figure: Any, drawn: Mapping[str, Any], **options: Any) -> None:
  """Draws the legend of a figure: label -> artist, all of them.

  Matplotlib leaves out labels that begin with an underscore where it collects them, and users' names may.

  Args:
    figure: of Matplotlib.
    drawn: the entries.
    **options: of `Figure.legend`.
  """
  figure.legend(list(drawn.values()), list(drawn), frameon=False, **options)


def line_style(defense: str, defenses: Iterable[str]) -> tuple[str, Any]:
  """Returns (colour, dashes): 'none' in near-black, defenses in the colours of the palette, then also dashed."""
  if defense == 'none':
    return LINE, '-'
  place = [name for name in defenses if name != 'none'].index(defense)
  return _PALETTE[place % len(_PALETTE)], _DASHES[place // len(_PALETTE) % len(_DASHES)]


def width(png: bytes) -> int:
  """Returns the width of a PNG in pixels."""
  return struct.unpack('>I', png[16:20])[0]
