"""The picture of an audit for a slide."""

import io

import numpy as np
import pytest
from PIL import Image

from gradleak.core.errors import UsageError
from gradleak.report import pictures, slide
from gradleak.summary import cases


def pixels(png):
  return np.asarray(Image.open(io.BytesIO(png)).convert('RGB'))


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
