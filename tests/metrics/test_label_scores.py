import math

import pytest

from gradleak.core import errors
from gradleak.metrics import label_scores


@pytest.mark.parametrize(
  ('found', 'truth', 'expected'),
  [
    ([2, 0, 1], [0, 1, 2], (1.0, 1.0, 1.0)),  # in any order
    ([3, 3, 3, 3], [3, 3, 5, 7], (0.5, 1 / 3, 1.0)),  # two threes are right, two too many
    ([3, 5, 5, 1], [3, 3, 5, 7], (0.5, 2 / 3, 2 / 3)),
    ([4, 5], [1, 1], (0.0, 0.0, 0.0)),
    ([-1, 1, -1], [1, 1, 2], (1 / 3, 0.5, 1.0)),  # −1 is no class
    ([0, 0, 1], [0], (1.0, 1.0, 0.5)),
  ],
)
def test_by_hand(found, truth, expected):
  assert label_scores(found, truth) == pytest.approx(expected)


def test_nothing_found_has_no_precision():
  for found in ([], [-1, -1]):
    scores = label_scores(found, [1, 2])
    assert scores[:2] == (0.0, 0.0) and math.isnan(scores.precision)


@pytest.mark.parametrize(('found', 'truth'), [([[1]], [1]), ([1.5], [1]), ([1], []), ([1], [-1]), ([1], [[1]])])
def test_what_is_no_list_of_labels_is_refused(found, truth):
  with pytest.raises(errors.UsageError, match='expected'):
    label_scores(found, truth)
