"""How our figures look, and their PNG."""

import contextlib
import io

INK, SOFT = '#1d2126', '#5c6168'


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
