"""Real data, if available."""

import os
import pathlib

import pytest


@pytest.fixture
def test_data():
  """The folder of real data (tfds/, raw/, folders/) that GRADLEAK_TEST_DATA names."""
  path = os.environ.get('GRADLEAK_TEST_DATA')
  if not path:
    pytest.skip('needs real data: set GRADLEAK_TEST_DATA to a folder that holds tfds/, raw/ and folders/')
  return pathlib.Path(path)
