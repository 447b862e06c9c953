"""A modality of one's own in one file: points on a circle, with a network for them."""

import re

import jax
import jax.numpy as jnp
import numpy as np

import gradleak as gl
from gradleak.modalities import Column, Modality, Shown, modality
from tests.report.parsing import Page

MIDDLE, RADIUS, NEAR = 0.5, 0.4, 0.02


def check(points):
  """Raises `UsageError` for what is no point on the circle."""
  points = np.asarray(points)
  if points.ndim != 2 or points.shape[1] != 2 or not np.issubdtype(points.dtype, np.floating):
    raise gl.UsageError(f'points are {points.dtype} of shape {points.shape}, expected floats [N, 2]')
  wrong = np.flatnonzero(~(np.abs(np.linalg.norm(points - MIDDLE, axis=1) - RADIUS) < 1e-4))
  if len(wrong):
    raise gl.UsageError(f'point {wrong[0]} is {points[wrong[0]]}, which is not on the circle')


def evaluate(found, truth, labels_hat, labels, *, signed=True, blank=True, among=None):
  """Returns the figures of one reconstructed batch: nearest first, each point once."""
  del signed, blank
  found, truth = np.asarray(found, np.float64), np.asarray(truth, np.float64)
  apart = np.linalg.norm(truth[:, np.newaxis] - found[np.newaxis], axis=-1)
  permutation = np.asarray(gl.metrics.match(found, truth))
  pairs = apart[np.arange(len(truth)), permutation]
  seen, real = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in (found[permutation] - MIDDLE, truth - MIDDLE))
  alike = np.sum(seen * real, axis=1)
  others = np.zeros((0, 2)) if among is None else among[int(labels[0])]
  nearer = np.linalg.norm(found[permutation][:, np.newaxis] - others[np.newaxis], axis=-1) < pairs[:, np.newaxis] - 1e-9
  ranks = 1 + nearer.sum(axis=1)
  right = np.nan if not len(labels_hat) else float(np.mean(np.asarray(labels_hat)[permutation] == labels))
  return {
    'nearness': float(-np.log10(pairs + 1e-6).mean()),
    'direction': float(alike.mean()),
    'revealed': int((pairs < NEAR / 10).sum()),
    'flat': 0,
    'rank': int(ranks.min()),
    'first': np.flatnonzero(ranks == 1).tolist(),
    'identified': int((ranks == 1).sum()),
    'recognised': int(((ranks == 1) & (pairs < NEAR)).sum()),
    'candidates': max(len(others) - 1, 0),
    'label_correct': right,
    'label_counts_correct': right,
    'permutation': permutation.tolist(),
  }


def picture(point):
  """Returns a picture of 25×25 pixels with a dot where the point is."""
  y, x = np.mgrid[0:1:25j, 0:1:25j]
  return np.exp(-((x - point[0]) ** 2 + (y - point[1]) ** 2) / 0.002)[..., np.newaxis]


CIRCLE = modality(
  Modality(
    name='circle',
    axis_names=('2',),
    check=check,
    evaluate=evaluate,
    distinct=lambda points: list(range(len(points))),
    gallery=lambda others, private: np.asarray(others, np.float64),
    columns=(
      Column('nearness', (int, float), '', 'Minus the decimal logarithm of the distance.', 'it diverged', (-2, 6)),
      Column('direction', (int, float), '[-1, 1]', 'Cosine of the directions from the middle.', 'it diverged', (-1, 1)),
    ),
    score='nearness',
    correlation='direction',
    likeness='nearness',
    oracle=('nearness',),
    shown=(Shown('nearness', 'nearness', 'digits', 1), Shown('direction', 'direction')),
    nearness=lambda found, truth: -np.log10(np.linalg.norm(np.asarray(found) - np.asarray(truth), axis=1) + 1e-6),
    picture=picture,
    noun=('point', 'points'),
  )
)


def said_of_images(page):
  """Returns what a page of other samples says of images: their words and their measures."""
  told = re.sub(r'\s+', ' ', ' '.join(Page(page).text))
  measures = r'PSNR|SSIM|\bdB\b|pixel|8 bits|checkerboard|no picture|\b[Ii]mages?\b(?!":)'
  return re.findall(rf'.{{0,60}}(?:{measures}).{{0,40}}', told)


def points(number, seed=0):
  """Returns points [N, 2] and their classes, int32 [N]: which quarter they lie in."""
  angles = np.random.default_rng(seed).uniform(0, 2 * np.pi, number)
  made = MIDDLE + RADIUS * np.stack([np.cos(angles), np.sin(angles)], axis=1)
  return made.astype(np.float32), (angles // (np.pi / 2)).astype(np.int32)


def network(width=16):
  """Returns a network of one hidden layer on points."""

  def init(key, shape):
    first, second = jax.random.split(key)
    return {
      'hidden': {'kernel': jax.random.normal(first, (*shape, width)), 'bias': jnp.zeros(width)},
      'out': {'kernel': jax.random.normal(second, (width, 4)) / width**0.5, 'bias': jnp.zeros(4)},
    }

  def apply(params, samples):
    hidden = jnp.tanh(samples @ params['hidden']['kernel'] + params['hidden']['bias'][jnp.newaxis])
    return hidden @ params['out']['kernel'] + params['out']['bias'][jnp.newaxis]

  return gl.models.from_functions(init, apply, 'ring', axes=1)
