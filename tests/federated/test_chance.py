"""A model is at chance by the commonest class and an interval, or if it predicts one class; and in no other case."""

import numpy as np
import pytest

from gradleak.federated.chance import at_chance, facts


def row(correct, tested, share=0.1, predicted=10):
  return {
    'accuracy': correct / tested, 'tested': tested, 'majority_share': share, 'predicted_classes': predicted
  }  # fmt: skip


def test_facts_of_predictions():
  labels, predicted = np.array([0, 2, 2, 2, 1]), np.array([1, 1, 0, 1, 1])
  assert facts(labels, predicted) == {'tested': 5, 'majority_share': 0.6, 'predicted_classes': 2}
  assert facts(labels, np.zeros(5, int))['predicted_classes'] == 1


def test_tokens_of_a_text_are_not_independent():
  """Of 40 texts of 25 tokens each, 26 are right as a whole: 65 % of them is not above 51 %, of 1,000 tokens it is."""
  truth, lengths = np.arange(1000) % 100 < 49, [25] * 40
  predicted = np.where(np.arange(1000) < 650, truth, ~truth)
  measured = {'accuracy': 0.65, **facts(truth, predicted, lengths)}
  assert measured['tested'] == 1000 and 30 < measured['independent'] < 40 and measured['majority_share'] == 0.51
  assert 'is not above the 51.0 %' in at_chance(measured, noun='tokens')
  assert at_chance({**measured, 'independent': 1000}) == ''


@pytest.mark.parametrize(
  ('measured', 'words'),
  [
    (row(1020, 10_000), 'its accuracy of 10.2 % (95 % interval 9.6 to 10.8 %) is not above the 10.0 %'),
    (row(30, 100, 0.25), 'is not above the 25.0 % of always predicting the commonest class'),
    (row(9_050, 10_000, 0.9), 'is not above the 90.0 %'),  # far above one in ten
    (row(1000, 10_000, predicted=1), 'it predicts one class for all 10,000 test samples'),
    (row(200, 10_000, 0.3, predicted=1), 'it predicts one class'),  # and not the commonest
    (row(9999, 10_000, 1.0), 'is not above the 100.0 %'),  # one class is no test
  ],
)
def test_at_chance(measured, words):
  assert words in at_chance(measured)


@pytest.mark.parametrize(
  'measured',
  [
    row(1100, 10_000),  # small, and beyond the interval
    row(9_200, 10_000, 0.9),
    row(40, 100, 0.25),
    {'accuracy': 0.1},  # of how many is not known
    {},
  ],
)
def test_not_at_chance_or_not_known(measured):
  assert at_chance(measured) == ''


def test_rows_of_earlier_versions_are_judged_by_the_number_of_classes():
  old = {'accuracy': 0.102, 'tested': 10_000}
  assert at_chance(old) == '' and 'of always predicting one of 10 classes' in at_chance(old, 10)
  assert at_chance(old, 100) == '' and at_chance(old | {'accuracy': 0.2}, 10) == ''
