"""The recorder of NVIDIA FLARE, without it and, where it is installed, in it."""

import numpy as np
import pytest

from gradleak.core import errors
from gradleak.frameworks import nvflare
from gradleak.frameworks.exchange import read

WEIGHTS = {'fc.weight': np.ones((2, 3), np.float32), 'fc.bias': np.zeros(2, np.float32)}


class Shareable(dict):
  def get_header(self, name, default=None):
    return self.get('headers', {}).get(name, default)


class Context:
  def __init__(self, name):
    self.name = name

  def get_identity_name(self):
    return self.name


def shareable(data, kind='WEIGHTS', **meta):
  return Shareable({'DXO': {'kind': kind, 'data': data, 'meta': {'current_round': 2, **meta}}})


def recorders(folder):
  """Returns the recorders of the chain of task data and of that of results."""
  made = nvflare.Recorder(str(folder)), nvflare.Recorder(str(folder))
  for one, chain in zip(made, ('task_data', 'task_result'), strict=True):
    setattr(one, '__chain_type', chain)
  return made


@pytest.mark.parametrize('kind', ['WEIGHTS', 'WEIGHT_DIFF'])
def test_weights_and_differences_are_recorded_as_weights(tmp_path, kind):
  before, after = recorders(tmp_path)
  for site in ('site-1', 'site-2'):
    task = shareable(dict(WEIGHTS))
    assert before.process(task, Context(site)) is task
    moved = {name: (value if kind == 'WEIGHTS' else 0 * value) + 0.5 for name, value in WEIGHTS.items()}
    result = shareable(moved, kind, NUM_STEPS_CURRENT_ROUND=7)
    assert after.process(result, Context(site)) is result
  found = read(tmp_path)
  assert [one.facts['node'] for one in found] == ['site-1', 'site-2']
  assert found[0].facts == {'current_round': 2, 'NUM_STEPS_CURRENT_ROUND': 7, 'round': 2, 'node': 'site-1'}
  for name, value in WEIGHTS.items():
    np.testing.assert_array_equal(found[0].sent[name], value)
    np.testing.assert_array_equal(found[0].returned[name], value + 0.5)


def test_a_result_without_its_task_and_quantised_weights_are_refused(tmp_path):
  before, after = recorders(tmp_path)
  with pytest.raises(errors.UsageError, match='no recorder saw the task of round 2'):
    after.process(shareable(WEIGHTS), Context('site-3'))
  with pytest.raises(errors.UsageError, match='quantised or encrypted'):
    before.process(shareable(WEIGHTS, quantized_flag=True), Context('site-3'))


def test_what_holds_no_weights_passes(tmp_path):
  before, _ = recorders(tmp_path)
  for other in (Shareable(), shareable({'accuracy': 0.5}, 'METRICS')):
    assert before.process(other, Context('site-4')) is other
  assert not list(tmp_path.iterdir())


@pytest.mark.slow  # imports NVIDIA FLARE
def test_it_is_a_filter_of_nvidia_flare_behind_its_own(tmp_path):
  pytest.importorskip('nvflare')
  from nvflare.apis.dxo import DXO, DataKind, MetaKey
  from nvflare.apis.filter import Filter, FilterContextKey
  from nvflare.apis.fl_constant import ReservedKey
  from nvflare.apis.fl_context import FLContext
  from nvflare.app_common.filters.percentile_privacy import PercentilePrivacy

  from gradleak import defenses

  context = FLContext()
  context.put(ReservedKey.IDENTITY_NAME, 'site-9', private=True, sticky=False)
  before, after = nvflare.Recorder(str(tmp_path)), nvflare.Recorder(str(tmp_path))
  assert isinstance(before, Filter)
  before.set_prop(FilterContextKey.CHAIN_TYPE, 'task_data')
  after.set_prop(FilterContextKey.CHAIN_TYPE, 'task_result')
  meta = {MetaKey.CURRENT_ROUND: 5}
  before.process(DXO(DataKind.WEIGHTS, dict(WEIGHTS), meta).to_shareable(), context)
  delta = {name: np.random.default_rng(0).normal(0, 0.01, v.shape).astype(np.float32) for name, v in WEIGHTS.items()}
  sent = DXO(DataKind.WEIGHT_DIFF, {name: value.copy() for name, value in delta.items()}, meta).to_shareable()
  after.process(PercentilePrivacy(percentile=40).process(sent, context), context)
  (found,) = read(tmp_path)
  ours = defenses.percentile_privacy(percentile=40.0)
  expected = ours.update(delta, ours.init(delta))[0]
  for name, value in WEIGHTS.items():
    np.testing.assert_allclose(found.returned[name] - value, expected[name], atol=1e-7)
