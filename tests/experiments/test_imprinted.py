"""The published read-out of the imprint module: the last of the images that it returns."""

import numpy as np
import pytest

from experiments.imprinted import last_returned
from gradleak.servers.imprint import bin_edges, module_parameters

EDGES = np.array([-5.0, 0.2, 0.4, 0.6, 0.8, 10.0])


def upload(*samples):
  """Returns the gradient of the module's first layer for (image, ∂loss/∂z) pairs: each reaches all bins below it."""
  kernel, bias = np.zeros((4, 5)), np.zeros(5)
  for image, share in samples:
    fired = image.mean() > EDGES[:-1]
    kernel += share * np.outer(image, fired)
    bias += share * fired
  return {'kernel': kernel, 'bias': bias}


DARK, BRIGHT = np.array([0.1, 0.3, 0.5, 0.3]), np.array([0.9, 0.7, 0.5, 0.7])


def test_one_image_is_returned_as_it_is():
  np.testing.assert_allclose(last_returned(upload((DARK, 2.0)), 1), DARK, rtol=1e-6)


def test_of_two_the_last_one_may_be_either():
  """Rows of the largest mean weight come first: the sum of both, then the image that the client gives more weight."""
  np.testing.assert_allclose(last_returned(upload((DARK, 2.0), (BRIGHT, 1.0)), 2), BRIGHT, rtol=1e-6)
  np.testing.assert_allclose(last_returned(upload((DARK, 3.0), (BRIGHT, 0.5)), 2), DARK, rtol=1e-6)


def test_what_is_missing_is_black():
  assert not last_returned(upload(), 1).any()


def test_our_module_gives_the_gradient_that_the_read_out_expects():
  module = module_parameters(np.full(4, 0.25, np.float32), bin_edges(10, 'normal'), gain=1e-4)
  assert float(module['return']['kernel'][0, 0]) == pytest.approx(1000)  # as published: 1 / 0.001
