"""The picture of an audit for a slide."""

import importlib
import io
import types

import numpy as np
import pytest
from PIL import Image

from gradleak.core.errors import UsageError
from gradleak.modalities.base import Piece
from gradleak.report import figures, marked, pictures, slide
from gradleak.summary import cases


def pixels(png):
  return np.asarray(Image.open(io.BytesIO(png)).convert('RGB'))


@pytest.mark.long
@pytest.mark.parametrize(('trials', 'batch'), [(8, 1), (1, 1), (2, 3), (2, 11)])
def test_it_is_wide_and_the_same_each_time(build, trials, batch):
  result = build(trials, batch)
  png = slide(result)
  height, width, _ = pixels(png).shape
  assert width * 9 == height * 16 and png == slide(result)


def test_costs_add_a_line_and_are_of_defenses_that_were_audited(build):
  result = build(4, 1)
  defense = cases.worst_case(result.rows)[0]['defense']
  plain, priced = pixels(slide(result)), pixels(slide(result, {defense: 1.5}))
  assert plain.shape == priced.shape and (plain != priced).any()
  with pytest.raises(UsageError, match="unknown defense with a cost 'other'"):
    slide(result, {'other': 1.0})


def test_columns_show_the_attackers_that_recover_most(build):
  """Of an attacker that was not run there is a dash, never another one's picture."""
  result = build(4, 1)
  _, shown = pictures.select(result, 4)
  module = __import__('gradleak.report.slide', fromlist=['_strongest'])
  for entry in cases.worst_case(result.rows):
    summaries = [one for one in cases.summarise(result.rows) if one['defense'] == entry['defense']]
    found = module._strongest(cases.summarise(result.rows), entry['defense'], shown)
    for seen, adaptive in zip(found, (False, True), strict=True):
      known = [one for one in summaries if (one['adaptive'] is not None) is adaptive]
      assert (seen is None) == (not known)
      if known:
        most = max(one['recovered'] for one in known)
        row = seen[0].row
        assert next(one['recovered'] for one in known if cases.case(one) == cases.case(row)) == most


@pytest.mark.parametrize('draw', ['slide._draw_cell', 'borders._draw'])
def test_an_image_that_is_not_square_keeps_its_shape(draw):
  name, function = draw.split('.')
  module, black = importlib.import_module(f'gradleak.report.{name}'), np.zeros((4, 12, 1), np.float32)
  given = [pictures.Picture(0, 0, black, None, None)] if name == 'slide' else black
  with figures.canvas(2.0, 2.0) as (axes, png):
    getattr(module, function)(axes, given, 0.5, 0.5, 1.0)
    drawn = pixels(png()).max(axis=-1) < 128
  rows, columns = (np.flatnonzero(drawn.any(axis=axis)) for axis in (1, 0))
  assert len(columns) == pytest.approx(figures.DPI, abs=1) and len(columns) == pytest.approx(3 * len(rows), abs=3)
  assert abs(rows.mean() - figures.DPI) <= 1 and abs(columns.mean() - figures.DPI) <= 1  # in the middle


@pytest.mark.long
def test_running_texts_stay_within_the_picture():
  """Each defense has its name, its count and its text below each other, and long texts break into lines."""
  truth = [Piece(word) for word in ['word'] * 60]
  names = ['none', 'clip_samples(norm=1)+gaussian(stddev=0.05)', *(f'prune(rate=0.{i})' for i in range(5))]
  seen = [(name, [*truth, Piece('wrong', False)]) for name in names]
  worst = {name: {'recovered': 1, 'n': 2} for name in names}
  drawn = pixels(marked._running(seen, truth, worst, (12.8, 7.2)))
  height, width, _ = drawn.shape
  ink = (drawn != drawn[0, 0]).any(2)
  assert width * 9 == height * 16 and ink.any(0)[: width // 20].any()  # names stand at the left
  assert not ink[:, -width // 60 :].any() and not ink[-height // 60 :].any()
  lines = np.diff(ink.any(1).astype(int))
  assert (lines == 1).sum() >= 3 * (len(names) + 1)  # a name and, of 61 words, at least two lines each


@pytest.mark.parametrize(('words', 'lines', 'cut'), [(4, 1, False), (5, 2, False), (9, 2, True)])
def test_a_text_that_does_not_fit_ends_in_an_ellipsis(words, lines, cut):
  drawn = []
  axes = types.SimpleNamespace(text=lambda x, y, text, **_: drawn.append((round(y, 2), text)))
  marked._flow(axes, [Piece('word')] * words, 0.0, 0.0, 2.2, 0.4)
  heights, texts = zip(*drawn, strict=True)
  assert len(set(heights)) == lines and texts.count('word') == min(words, 8)
  assert (texts[-1] == '…') == cut == ('…' in texts)
