"""Metrics of one batch, end to end."""

import json

import numpy as np
import pytest

from gradleak import metrics
from gradleak.core import errors

LABELS = np.array([3, 1, 3, 0])


def batch(seed=0, n=4, side=12):
  return np.random.default_rng(seed).uniform(0, 1, (n, side, side, 1)).astype(np.float32)


def test_a_perfect_recovery_in_another_order():
  truth, order = batch(), np.array([2, 0, 3, 1])
  row = metrics.evaluate(truth[order], truth, LABELS[order], LABELS)
  assert row['permutation'] == [1, 3, 0, 2]
  assert row['mse'] == row['mse_unclipped'] == 0
  assert row['psnr'] == row['psnr_unclipped'] == metrics.MAX_PSNR
  assert row['ssim'] == pytest.approx(1, abs=1e-6)
  assert row['pearson'] == pytest.approx(1, abs=1e-6)
  assert row['label_correct'] == row['label_counts_correct'] == 1


def test_means_over_the_batch_are_those_of_the_matched_pairs():
  truth, reconstructions = batch(1), batch(2) * 2 - np.float32(0.5)
  row = metrics.evaluate(reconstructions, truth, LABELS, LABELS)
  for name, metric in metrics.REGISTRY.items():
    one_by_one = [metric(reconstructions[[j]], truth[[i]])[0] for i, j in enumerate(row['permutation'])]
    assert row[name] == pytest.approx(np.mean(one_by_one), rel=1e-5)
  assert row['mse_unclipped'] > row['mse']


@pytest.mark.parametrize('shape', [(1, 1, 1), (1, 7, 3), (7, 1, 1), (2, 1, 1)])
def test_images_one_pixel_wide_or_high_have_finite_metrics(shape):
  truth, other = np.random.default_rng(0).uniform(0, 1, (2, 4, *shape)).astype(np.float32)
  for reconstructions in (truth, other, np.zeros_like(truth)):
    row = metrics.evaluate(reconstructions, truth, LABELS, LABELS)
    varies = [bool(np.ptp(images, axis=(1, 2, 3)).any()) for images in (reconstructions, truth)]
    assert all(np.isfinite(row[name]) == (name != 'pearson' or all(varies)) for name in metrics.REGISTRY), row
  assert metrics.evaluate(truth, truth, LABELS, LABELS)['ssim'] == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize(
  'labels_hat, correct, counts',
  [
    ([3, 1, 3, 0], 1, 1),
    ([1, 3, 0, 3], 0, 1),  # all the right labels on the wrong images
    ([3, 3, 3, 3], 0.5, 0.5),
    ([0, 0, 0, 0], 0.25, 0.25),  # 0 is counted once, however often it is guessed
    ([1, 1, 0, 5], 0.25, 0.5),
    ([7, 8, 9, -1], 0, 0),
  ],
)
def test_labels_in_place_and_as_counts(labels_hat, correct, counts):
  truth = batch()
  row = metrics.evaluate(truth, truth, np.array(labels_hat), LABELS)
  assert (row['label_correct'], row['label_counts_correct']) == (correct, counts)


def test_labels_follow_their_images():
  truth = batch()
  row = metrics.evaluate(truth[::-1], truth, LABELS[::-1], LABELS)
  assert row['label_correct'] == 1
  assert metrics.evaluate(truth[::-1], truth, LABELS, LABELS)['label_correct'] == 0


def test_fewer_or_more_images_than_there_are():
  truth = batch()
  few = metrics.evaluate(truth[[2]], truth, LABELS[[2]], LABELS)
  assert few['revealed_psnr'] == metrics.MAX_PSNR
  assert few['permutation'] == [-1, -1, 0, -1] and few['psnr'] == metrics.MAX_PSNR and few['revealed'] == 1
  assert few['label_correct'] == few['label_counts_correct'] == 0.25
  many = metrics.evaluate(np.concatenate([batch(9), truth]), truth, np.full(8, -1), LABELS)
  assert many['permutation'] == [4, 5, 6, 7] and many['psnr'] == metrics.MAX_PSNR and many['revealed'] == 4


def test_labels_are_not_wrong_if_none_are_given():
  untold, wrong = (metrics.evaluate(batch(), batch(), labels, LABELS) for labels in (LABELS[:0], np.full(4, -1)))
  assert np.isnan([untold['label_correct'], untold['label_counts_correct']]).all()
  assert wrong['label_correct'] == wrong['label_counts_correct'] == 0
  assert untold['psnr'] == wrong['psnr'] == metrics.MAX_PSNR


def test_revealed_does_not_depend_on_scale_or_order():
  truth = batch()
  shown = 0.3 * truth[[1]] + 0.1
  row = metrics.evaluate(np.concatenate([shown, batch(7, n=3)]), truth, LABELS, LABELS)
  assert row['revealed'] == 1
  assert row['permutation'][1] == 0 and row['revealed_psnr'] == pytest.approx(float(metrics.psnr(shown, truth[[1]])[0]))
  assert np.isnan(metrics.evaluate(batch(7), truth, LABELS, LABELS)['revealed_psnr'])


def test_a_diverged_batch_has_nan_metrics_and_keeps_its_labels():
  truth, reconstructions = batch(), batch()
  reconstructions[2, 5, 5, 0] = np.nan
  row = metrics.evaluate(reconstructions, truth, LABELS, LABELS)
  assert all(np.isnan(row[name]) for name in metrics.REGISTRY)
  assert row['permutation'] == [0, 1, 2, 3]
  assert row['label_correct'] == 1


def test_a_row_is_plain_python():
  row = metrics.evaluate(batch(1), batch(1), LABELS.astype(np.int32), LABELS)
  assert json.loads(json.dumps(row)) == row
  assert set(row) == {
    *metrics.REGISTRY,
    'revealed',
    'revealed_psnr',
    'flat',
    'label_correct',
    'label_counts_correct',
    'permutation',
  }
  assert {type(value) for key, value in row.items() if key not in ('permutation', 'revealed', 'flat')} == {float}


def test_flat_images_are_exact_by_their_error_and_have_no_correlation():
  """A blank medical slice has no variance; one with noise of a quarter of a level has none to speak of."""
  noise = np.random.default_rng(0).normal(size=(4, 12, 12, 1)).astype(np.float32)
  blank = np.full((4, 12, 12, 1), 0.3, np.float32)
  other = np.random.default_rng(1).normal(size=noise.shape).astype(np.float32)
  for truth in (blank, blank + np.float32(0.25 / 255) * other):
    found = metrics.evaluate(truth + np.float32(1e-4) * noise, truth, LABELS, LABELS)  # 80 dB
    assert (found['revealed'], found['flat']) == (4, 4) and found['revealed_psnr'] > 69
    assert metrics.evaluate(truth + np.float32(0.01) * noise, truth, LABELS, LABELS)['revealed'] == 0  # 40 dB
  assert np.isnan(metrics.evaluate(blank + noise, blank, LABELS, LABELS)['pearson'])


def test_correlation_is_the_mean_of_the_pairs_that_have_one():
  truth = batch()
  shown = truth + np.float32(0.2) * batch(1)
  whole = metrics.evaluate(shown, truth, LABELS, LABELS)
  truth[3] = 0.3
  row = metrics.evaluate(shown, truth, LABELS, LABELS)
  alone = metrics.evaluate(shown[:3], truth[:3], LABELS[:3], LABELS[:3])
  assert row['flat'] == 1 and whole['flat'] == 0
  assert row['pearson'] == pytest.approx(alone['pearson']) and row['pearson'] > 0.9


@pytest.mark.long
def test_a_closed_form_that_returns_zeros_has_not_found_a_black_image():
  truth = np.stack([np.zeros((12, 12, 1), np.float32), np.full((12, 12, 1), 0.4, np.float32)])
  of = {'labels_hat': LABELS[:2], 'labels': LABELS[:2]}
  assert metrics.evaluate(truth, truth, **of)['revealed'] == 2
  assert metrics.evaluate(truth, truth, blank=False, **of)['revealed'] == 1  # a grey one is found
  left = metrics.evaluate(truth[:1], truth[:1], [3], [3], blank=False)
  assert left['revealed'] == 0 and np.isnan(left['revealed_psnr'])


def test_compiles_once_per_shape(monkeypatch):
  traced, psnr = [], metrics.REGISTRY['psnr']
  monkeypatch.setitem(metrics.REGISTRY, 'psnr', lambda *images: traced.append(images) or psnr(*images))
  for seed in range(4):
    metrics.evaluate(batch(seed, side=13), batch(seed + 10, side=13), LABELS, LABELS)
  assert len(traced) == 1


@pytest.mark.parametrize(
  'changes, expected',
  [
    ({'reconstructions': batch()[:0]}, r'\(0, 12, 12, 1\), the truth \(4, 12, 12, 1\); expected'),
    ({'reconstructions': batch(side=11)}, 'of the same pixels'),
    ({'reconstructions': batch()[..., 0], 'truth': batch()[..., 0]}, r'\[N, H, W, C\]'),
    ({'truth': batch() * 2}, r'expected \[0, 1\]'),
    ({'truth': batch() - np.float32(0.5)}, r'expected \[0, 1\]'),
    ({'truth': batch() * np.float32(np.nan)}, r'nan.*expected \[0, 1\]'),
    ({'labels': LABELS[:3]}, r'labels are .* shape \(3,\), expected integers of shape \(4,\)'),
    ({'labels_hat': LABELS[:, None]}, 'labels_hat are'),
    ({'labels_hat': LABELS.astype(np.float32)}, 'labels_hat are float32'),
  ],
)
def test_bad_input_is_a_usage_error(changes, expected):
  arguments = {'reconstructions': batch(1), 'truth': batch(2), 'labels_hat': LABELS, 'labels': LABELS, **changes}
  with pytest.raises(errors.UsageError, match=expected):
    metrics.evaluate(**arguments)


def test_an_image_that_is_revealed_up_to_its_sign_has_a_psnr():
  truth = batch(n=1)
  given = 1 - truth, truth, LABELS[:1], LABELS[:1]
  row, known = (metrics.evaluate(*given, signed=signed) for signed in (False, True))
  assert (row['revealed'], known['revealed']) == (1, 0) and np.isnan(known['revealed_psnr'])
  assert row['revealed_psnr'] == row['psnr'] and np.isfinite(row['psnr'])
