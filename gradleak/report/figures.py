"""How our figures look, and their PNG."""

import contextlib
import io

INK, SOFT = '#1d2126', '#5c6168'
LINE = '#0a0b0c'  # of the undefended run
# Okabe and Ito's colour-blind-safe palette, without the two that vanish on white; orange darkened and blue lightened,
# so that all of them stand out from white and from near-black.
_PALETTE = ('#2f86c9', '#d55e00', '#009e73', '#cc79a7', '#b87f00')
_DASHES = ('-', (0, (7, 1.5)), (0, (3, 1.2, 1, 1.2)), (0, (1.2, 1)))


@contextlib.contextmanager
def figure(width, height, **options):
  """Yields a Matplotlib figure of so many inches, in our style, and the function that returns it as a PNG."""
  from matplotlib import rc_context
  from matplotlib.backends.backend_agg import FigureCanvasAgg
  from matplotlib.figure import Figure

  with rc_context({'font.family': ['DejaVu Sans'], 'font.size': 8.5, 'text.color': INK, 'text.parse_math': False}):
    made = Figure(figsize=(width, height), dpi=160, facecolor='white', **options)

    def png():
      buffer = io.BytesIO()
      FigureCanvasAgg(made).print_png(buffer, metadata={'Software': None})
      return buffer.getvalue()

    yield made, png


def line_style(defense, defenses):
  """Returns (colour, dashes): the undefended run in near-black, the others in the palette's colours, then dashed."""
  if defense == 'none':
    return LINE, '-'
  place = [name for name in defenses if name != 'none'].index(defense)
  return _PALETTE[place % len(_PALETTE)], _DASHES[place // len(_PALETTE) % len(_DASHES)]
