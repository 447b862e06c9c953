"""Start points from another dataset: the client conceals with them, and the attacker does not hold them."""

import dataclasses

import numpy as np
import pytest

import experiments
from experiments.experiment import Run
from gradleak.defenses import bind

RUN = experiments.get('dcs2_6').runs['ggl'].scaled('smoke')


@pytest.fixture(scope='module')
def data():
  return RUN.load(None)


def test_start_points_fit_the_private_images(data):
  images, labels = data.others
  assert images.shape == (16, 8, 8, 1) and labels.dtype == np.int32 and set(labels.tolist()) <= set(range(10))
  assert data.public[0].shape == images.shape and not np.array_equal(data.public[0], images)
  scenario = RUN.scenario(data, 0)
  np.testing.assert_array_equal(scenario.public[0], data.public[0])  # what the attacker learns from
  assert scenario.settings['starts'] == 'faces'


def test_concealed_samples_start_there(data):
  """The same defense sends something else than from the attacker's public images; others are as they were."""
  scenario = RUN.scenario(data, 0)
  context = scenario.context
  made, plain = RUN.protections(scenario, data), Run.protections(RUN, scenario, data)
  assert list(map(str, made)) == list(map(str, plain)) == list(RUN.texts().values())
  others = dataclasses.replace(RUN, starts='digits')
  for one, usual, same in zip(
    made, plain, others.protections(scenario, data._replace(others=data.public)), strict=True
  ):
    arguments = [bind(each, context).arguments for each in (one, usual, same)]
    if one.stages and one.stages[0].name == 'concealment':
      np.testing.assert_array_equal(arguments[0][0][1][0], data.others[0])
      np.testing.assert_array_equal(arguments[1][0][1][0], arguments[2][0][1][0])
    else:
      assert arguments[0] == arguments[1]
  assert any(one.stages for one in made)
