import jax
import numpy as np
import pytest
from scipy import stats
from skimage import metrics as others
from skimage import transform

import gradleak as gl
from gradleak import metrics
from gradleak.metrics import identification


@pytest.fixture(scope='module')
def digits():
  return np.concatenate([gl.data.load('digits', split).samples for split in ('test', 'train')])


@pytest.fixture(scope='module')
def among(digits):
  return metrics.gallery(digits[40:], digits[:40])


def whitened(rows, fitted, ridge):
  """The same by principal components, as eigenfaces are made."""
  rows, fitted = (x - x.mean(axis=1, keepdims=True) for x in (rows, fitted))
  rows, fitted = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in (rows, fitted))
  mean = fitted.mean(axis=0)
  values, vectors = np.linalg.eigh((fitted - mean).T @ (fitted - mean))
  made = (rows - mean) @ vectors / np.sqrt(np.maximum(values, 0) + ridge)
  return made / np.linalg.norm(made, axis=1, keepdims=True)


def test_ranks_are_those_of_the_mahalanobis_cosine(digits, among):
  rng = np.random.default_rng(0)
  truth = digits[:40]
  found = truth + 0.6 * rng.normal(size=truth.shape)
  size = len(among.places)
  flat = digits[np.r_[40 : 40 + size, :40]].reshape(-1, 64).astype(float)
  centred = flat - flat.mean(axis=1, keepdims=True)
  units = centred / np.linalg.norm(centred, axis=1, keepdims=True)
  ridge = 0.1 * np.sum((units - units.mean(axis=0)) ** 2) / 64
  candidates = flat[:1000]  # beside one that is not among them
  a, b, c = (whitened(x.reshape(-1, 64).astype(float), flat, ridge) for x in (found, truth, candidates))
  expected = 1 + np.sum(a @ c.T >= np.sum(a * b, axis=1)[:, np.newaxis], axis=1)
  ranks = metrics.ranks(found, truth, among)
  np.testing.assert_array_equal(ranks, expected)
  assert 1 < np.median(ranks) < 200 and ranks.min() == 1


def test_the_image_itself_is_first_on_any_scale(digits, among):
  assert set(metrics.ranks(3 * digits[:40] - 1, digits[:40], among)) == {1}
  assert set(metrics.ranks(digits[40:50], digits[:10], among)) != {1}  # those are other candidates


def test_what_shows_nothing_is_last(digits, among):
  found = np.stack([np.full_like(digits[0], np.nan), np.zeros_like(digits[0])])
  np.testing.assert_array_equal(metrics.ranks(found, digits[:2], among), [1001, 1001])


@pytest.mark.slow
def test_null_gradients_find_no_more_than_chance(digits):
  """What csDLG makes of noise, compared with 1,280 originals that it did not attack."""

  labels = np.concatenate([gl.data.load('digits', split).targets for split in ('test', 'train')])
  model = gl.models.create('mlp(widths=16)', 10, init='explicit')
  scenario = gl.scenario(model, digits, labels, key=jax.random.key(0))
  found = gl.audit(
    jax.random.key(1), scenario, [gl.defenses.null_gradient()], [gl.attacks.csdlg_fast(steps=30)], 64, controls=4,
    knowledge='non-adaptive', labels='known', progress='none',
  )  # fmt: skip
  (images,) = found.reconstructions.values()
  among = metrics.gallery(digits[200:], digits[:200])
  hits = sum(
    np.sum(metrics.ranks(images[:, 0], np.roll(digits[64:192], shift, axis=0)[:64], among) == 1) for shift in range(20)
  )
  assert set(among.candidates(digits[64:192])) == {1000}
  assert hits <= stats.binom.ppf(0.999, 64 * 20, 1 / 1001)


def test_an_image_is_never_its_own_candidate(digits):
  among = metrics.gallery(np.concatenate([digits[:60], digits[:10]]), digits[:40])  # ten are there twice
  assert set(among.candidates(digits[:60])) == {59} and set(among.candidates(digits[60:70])) == {60}
  assert set(metrics.ranks(digits[:60], digits[:60], among)) == {1}
  assert metrics.ranks(digits[1:2], digits[:1], among) > 1  # another private one is a candidate
  whole = metrics.gallery(digits, digits[:40])
  assert set(whole.candidates(digits[:40])) == {1000} == set(whole.candidates(digits[-40:]))


def test_without_information_one_of_all_candidates_is_first(digits):
  """Whatever is shown, it is nearest to one of them: of 60 originals in turn exactly one has rank 1."""
  among = metrics.gallery(digits[:60], digits[:60])
  noise = np.random.default_rng(0).uniform(size=(20, 8, 8, 1)).astype(np.float32)
  firsts = [np.sum(metrics.ranks(np.repeat(one[None], 60, axis=0), digits[:60], among) == 1) for one in noise]
  assert firsts == [1] * 20


def test_bar_and_candidates_do_not_depend_on_how_many_are_attacked(digits):
  galleries = [metrics.gallery(digits[:200], digits[:attacked]) for attacked in (8, 16, 32)]
  assert len({one.threshold for one in galleries}) == 1
  found = digits[:8] + 0.5 * np.random.default_rng(0).normal(size=digits[:8].shape)
  for one in galleries:
    np.testing.assert_array_equal(metrics.ranks(found, digits[:8], one), metrics.ranks(found, digits[:8], galleries[0]))


def test_flat_images_are_no_candidates_and_have_no_rank(digits):
  blank = np.full((50, 8, 8, 1), 0.1, np.float32)
  blank += np.float32(0.5 / 255) * np.random.default_rng(0).uniform(size=blank.shape).astype(np.float32)
  among, alone = (metrics.gallery(images, digits[:4]) for images in (np.concatenate([blank, digits[:60]]), digits[:60]))
  assert among.threshold == alone.threshold and len(among.places) == 60  # any two blank ones have an SSIM of 1
  constant = np.full((1, 8, 8, 1), 0.2, np.float32)
  assert metrics.ranks(digits[:1], constant, among) == 61


def test_the_bar_is_that_of_thumbnails_or_of_other_images():
  rng = np.random.default_rng(0)
  coarse = rng.uniform(size=(12, 8, 8, 1)).astype(np.float32)  # two of them have nothing in common
  images = 0.9 * transform.resize(coarse, (12, 24, 24, 1), order=1) + 0.1 * rng.uniform(size=(12, 24, 24, 1))
  images = images.astype(np.float32)
  thumbs = identification.thumbnails(images)
  small = transform.resize(images, (12, 10, 10, 1), order=1, anti_aliasing=True)  # 0.4 of the side
  assert np.corrcoef(transform.resize(small, (12, 24, 24, 1), order=1).ravel(), thumbs.ravel())[0, 1] > 0.98
  similar = [
    others.structural_similarity(
      a[..., 0], b[..., 0], gaussian_weights=True, sigma=1.5, use_sample_covariance=False, data_range=1.0
    )
    for a, b in zip(thumbs, images, strict=True)
  ]
  assert identification.calibrated(images) == pytest.approx(np.median(similar), abs=0.02)
  alike = images[:1] + 0.01 * rng.uniform(size=images.shape).astype(np.float32)
  assert identification.calibrated(np.clip(alike, 0, 1)) > 0.9
  assert identification.calibrated(images[:1]) == pytest.approx(similar[0], abs=1e-3)


def test_evaluate_counts_pairs(digits, among):
  rng = np.random.default_rng(0)
  noise = rng.uniform(size=digits[:1].shape).astype(np.float32)
  found = np.concatenate([digits[:2], digits[2:3] + 2 * noise, noise])
  figures = metrics.evaluate(found, digits[:4], np.zeros(0, int), np.zeros(4, int), among=among)
  assert (figures['rank'], figures['recognised']) == (1, 2) and figures['identified'] in (2, 3)


def test_a_gallery_of_another_shape_is_refused(digits):
  with pytest.raises(gl.UsageError, match=r'the gallery has the shape .*expected \[G, 8, 8, 1\]'):
    metrics.gallery(digits[:, :4], digits[:3])


@pytest.mark.slow
def test_large_images_are_compared_reduced():
  rng = np.random.default_rng(0)
  images = rng.uniform(size=(5, 130, 70, 1)).astype(np.float32)
  among = metrics.gallery(images[2:], images[:2])
  assert among.mean.size == 64 * 64
  np.testing.assert_array_equal(metrics.ranks(images[:2], images[:2], among), [1, 1])


@pytest.mark.parametrize(('count', 'floored'), [(0, True), (99, True), (100, False)])
def test_the_threshold_of_few_images_has_a_floor(count, floored):
  """The thumbnail of an image of noise shows next to nothing, and any reconstruction was a picture of it."""
  noise = np.random.default_rng(0).uniform(size=(101, 16, 16, 1)).astype(np.float32)
  assert identification.calibrated(noise) < 0.5
  assert (identification.gallery(noise[:count], noise[100:]).threshold == identification.LEAST) == floored
  clear = np.full((2, 16, 16, 1), 0.5, np.float32) + np.linspace(0, 0.5, 16, dtype=np.float32)[:, np.newaxis]
  clear[1] = clear[1, ::-1]
  assert identification.gallery(clear, clear[:1]).threshold > 0.9
