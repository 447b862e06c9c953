"""Figures of texts: against references that are written here, and by hand."""

import itertools

import numpy as np
import pytest
from scipy.stats import kstest, norm

from gradleak import UsageError
from gradleak.metrics import text

PAD, MASK = 0, 1
SPECIAL = frozenset({PAD, MASK})
RNG = np.random.default_rng(0)


def decode(tokens):
  return ' '.join(f'w{token}' for token in tokens if token > MASK)


def evaluate(found, truth, labels_hat=(), labels=None, among=None):
  found, truth = np.asarray(found), np.asarray(truth)
  labels = np.zeros(len(truth), int) if labels is None else labels
  return text.evaluate(found, truth, np.asarray(labels_hat, int), labels, special=SPECIAL, decode=decode, among=among)


def reference_rouge(found, truth, n):
  """Counts each n-gram that both have as often as the rarer side has it."""
  grams = [[tuple(one[i : i + n]) for i in range(len(one) - n + 1)] for one in (found, truth)]
  shared = sum(min(grams[0].count(gram), grams[1].count(gram)) for gram in set(grams[0]))
  if not shared:
    return 0.0
  precision, recall = shared / len(grams[0]), shared / len(grams[1])
  return 2 * precision * recall / (precision + recall)


def reference_subsequence(found, truth):
  """The longest common subsequence by trying all of them."""
  for length in range(min(len(found), len(truth)), 0, -1):
    subsequences = {tuple(found[i] for i in chosen) for chosen in itertools.combinations(range(len(found)), length)}
    for chosen in itertools.combinations(range(len(truth)), length):
      if tuple(truth[i] for i in chosen) in subsequences:
        return length
  return 0


@pytest.mark.parametrize('seed', range(20))
def test_rouge_is_that_of_its_definition(seed):
  rng = np.random.default_rng(seed)
  found, truth = (rng.integers(0, 4, rng.integers(1, 8)).tolist() for _ in range(2))
  for n in (1, 2, 3):
    assert text.rouge(found, truth, n) == pytest.approx(reference_rouge(found, truth, n))
  longest = reference_subsequence(found, truth)
  assert text.rouge_l(found, truth) == pytest.approx(2 * longest / (len(found) + len(truth)) if longest else 0.0)


def test_known_values_of_rouge():
  found, truth = ['the', 'cat', 'was', 'found', 'under', 'the', 'bed'], ['the', 'cat', 'was', 'under', 'the', 'bed']
  assert text.rouge(found, truth, 1) == pytest.approx(12 / 13)
  assert text.rouge(found, truth, 2) == pytest.approx(2 * 4 / 11)
  assert text.rouge_l(found, truth) == pytest.approx(12 / 13)
  assert text.words("The Cat's 2nd, naïve") == ['the', 'cat', 's', '2nd', 'naïve']
  assert text.rouge([], truth, 1) == text.rouge_l([], truth) == 0.0


def test_padding_never_counts_as_right():
  truth = [[5, 6, PAD, PAD, PAD, PAD]]
  nothing = evaluate([[7, 8, PAD, PAD, PAD, PAD]], truth)
  assert nothing['token_accuracy'] == nothing['type_accuracy'] == nothing['rouge1'] == nothing['revealed'] == 0
  longer = evaluate([[5, 6, 9, PAD, PAD, PAD]], truth)
  assert longer['token_accuracy'] == 1 and longer['revealed'] == 0 and longer['rouge1'] == pytest.approx(4 / 5)
  assert evaluate(truth, truth)['revealed'] == 1
  assert evaluate([[PAD] * 6], truth)['revealed'] == 0
  assert evaluate([[-1] * 6], truth)['token_accuracy'] == 0


def test_frequent_tokens_count_once():
  truth = [[4, 4, 4, 4, 5, 6]]
  found = evaluate([[4, 4, 4, 4, 7, 7]], truth)
  assert found['token_accuracy'] == pytest.approx(4 / 6) and found['type_accuracy'] == pytest.approx(1 / 3)


def test_sequences_are_paired_by_their_wrong_tokens():
  truth = RNG.integers(2, 9, (4, 6))
  order = [2, 0, 3, 1]
  found = truth[order].copy()
  found[:, 0] = 9
  permutation = text.match(found, truth, SPECIAL)
  assert [order[place] for place in permutation] == [0, 1, 2, 3]
  best = max(itertools.permutations(range(4)), key=lambda p: sum((found[j] == truth[i]).sum() for i, j in enumerate(p)))
  pairs = [(found[j] == truth[i]).sum() for i, j in enumerate(permutation)]
  assert sum(pairs) == sum((found[j] == truth[i]).sum() for i, j in enumerate(best))
  assert text.match(found[:2], truth, SPECIAL).tolist().count(-1) == 2


def test_repeated_sequences_need_as_many_answers():
  truth = np.asarray([[3, 4, PAD], [3, 4, PAD], [5, 5, 5]])
  assert evaluate([[3, 4, PAD], [9, 9, 9], [5, 5, 5]], truth)['revealed'] == 2
  assert evaluate(truth[::-1], truth)['revealed'] == 3


def test_originals_stand_among_candidates():
  candidates = np.stack([np.arange(6) + 6 * i + 2 for i in range(20)])
  among = text.gallery(candidates, candidates[:1], SPECIAL, decode)
  assert among.threshold == 0 and among.candidates(candidates[:2]).tolist() == [19, 19]
  bag = candidates[3][::-1].copy()  # the bag alone, in another order
  found = evaluate([bag], [candidates[3]], among=among)
  assert found['rank'] == 1 and found['identified'] == 1
  score = norm.isf(text._share(bag, candidates[3]) / 20) + 4 * 1  # no candidate has a token of it
  assert found['standing'] == pytest.approx(np.tanh(score))
  assert found['recognised'] == 0  # no pair of words follows each other
  assert evaluate([candidates[3]], [candidates[3]], among=among)['recognised'] == 1
  other = evaluate([candidates[4]], [candidates[3]], among=among)
  drawn = text._share(candidates[4], candidates[3])
  assert other['rank'] == 20 and other['standing'] == pytest.approx(np.tanh(norm.isf((1 + 19 * drawn) / 20)))
  nothing = evaluate([[PAD] * 6], [candidates[3]], among={0: among})
  assert nothing['identified'] == 0 and nothing['rank'] == 20
  outside = np.arange(200, 206)[np.newaxis]
  assert among.candidates(outside).tolist() == [20]


@pytest.mark.parametrize('tokens', [40, 400])
def test_by_chance_the_score_is_normal(tokens):
  """Also where most candidates have no token in common with a reconstruction, and are as similar as the original."""
  candidates = np.stack([RNG.integers(2, tokens, 8) for _ in range(300)])
  among = text.gallery(candidates, candidates, SPECIAL, decode)
  found = np.stack([RNG.integers(2, tokens, 8) for _ in range(300)])
  _, scores = text.standings(found, candidates, among, SPECIAL)
  assert kstest(scores, 'norm').pvalue > 0.01 and scores.max() < 4.2


def test_the_threshold_is_of_different_texts():
  alike = np.stack([np.asarray([2, 3, 4, 5 + i]) for i in range(30)])
  assert text.calibrated(alike, decode) == pytest.approx(2 / 3)
  assert text.calibrated(alike[:1], decode) == 1


def test_labels_and_what_is_refused():
  truth = np.asarray([[3, 4], [5, 6]])
  found = evaluate(truth[::-1], truth, labels_hat=[1, 0], labels=np.asarray([0, 0]))
  assert found['label_correct'] == 0.5 and found['label_counts_correct'] == 0.5
  with pytest.raises(UsageError, match='expected tokens'):
    evaluate(truth.astype(float), truth)
  with pytest.raises(UsageError, match='expected tokens'):
    evaluate(truth[:, :1], truth)
  for wrong, words in (
    ({'labels_hat': [1]}, r'labels_hat are .* expected integers of shape \(2,\)'),
    ({'labels': np.zeros(1, int)}, r'labels are .* expected integers of shape \(2,\)'),
  ):
    with pytest.raises(UsageError, match=words):
      evaluate(truth, truth, **wrong)
  with pytest.raises(UsageError, match='expected tokens'):
    evaluate(truth[:0], truth)


def test_without_candidates_nobody_stands_anywhere():
  truth = np.asarray([[3, 4, 5, 6]])
  among = text.gallery(truth, truth, SPECIAL, decode)
  for found in (truth, -np.ones_like(truth)):
    figures = evaluate(found, truth, among=among)
    assert np.isnan(figures['standing']) and figures['candidates'] == 0
    assert figures['identified'] == 0 and figures['first'] == []


def test_words_are_parted_at_all_signs_and_keep_their_marks():
  assert text.words('User_name = admin') == ['user', 'name', 'admin']
  assert text.words('नमस्ते, दुनिया') == ['नमस्ते', 'दुनिया'] and text.words('Cafe\u0301 olé') == ['cafe\u0301', 'olé']
