"""Legends and labels of pictures as Matplotlib draws them, with names of users."""

import warnings

import pytest

import gradleak as gl
from gradleak.report.strengths import strengths
from gradleak.report.training import along, curves
from gradleak.studies.frontier import Trained
from tests.report.conftest import ATTACKS

NAMES = ('none', '_mine', '$x_1$ and $', '_child0')  # as Matplotlib's own labels begin


@pytest.fixture
def drawn(monkeypatch):
  """The legends of the figures that are drawn, as lists of texts; a warning is an error."""
  from matplotlib.backends.backend_agg import FigureCanvasAgg

  seen, draw = [], FigureCanvasAgg.print_png

  def print_png(canvas, *arguments, **options):
    with warnings.catch_warnings(action='error'):
      draw(canvas, *arguments, **options)
    seen.extend([text for text in legend.get_texts() if text.get_text()] for legend in canvas.figure.legends)

  monkeypatch.setattr(FigureCanvasAgg, 'print_png', print_png)
  return seen


def check(drawn, names):
  (legend,) = drawn
  assert [text.get_text() for text in legend] == list(names)
  assert not any(text.get_parse_math() for text in legend)  # else what stands between two signs is a formula
  drawn.clear()


def test_curves_name_each_defense(drawn):
  trained = {name: Trained([{'round': 1, 'accuracy': 0.5}, {'round': 2, 'accuracy': 0.6}], 0.1) for name in NAMES}
  assert curves(trained)
  check(drawn, NAMES)
  known = [{'defense': name, 'round': at, 'recovered': 1, 'psnr': 9.0} for name in NAMES for at in (0, 1)]
  assert along(trained, known)
  check(drawn, NAMES)


def test_strengths_name_each_attack(drawn, result):
  defenses = [gl.defenses.prune(rate=rate) for rate in (0.5, 0.9)]
  called = dict(zip(ATTACKS, NAMES[1:], strict=False))
  rows = [
    {**row, 'attack': called[row['attack']], 'defense': str(one), 'audit': 'one', 'adaptive': None}
    for row in result.rows
    if row['defense'] == 'prune(rate=0.9)'
    for one in defenses
  ]
  assert strengths(rows, defenses)
  check(drawn, [f'{name}, non-adaptive' for name in called.values()])
