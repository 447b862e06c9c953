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


@pytest.mark.parametrize('dtype', [np.float32, np.float16])
def test_differences_keep_their_digits(tmp_path, dtype):
  """A sum in the precision of the weights rounds differences to multiples of theirs, and small ones to 0."""
  before, after = recorders(tmp_path)
  moved = {name: np.full(value.shape, 1e-7, dtype) for name, value in WEIGHTS.items()}
  before.process(shareable({name: value.astype(dtype) + 1 for name, value in WEIGHTS.items()}), Context('site-1'))
  after.process(shareable(moved, 'WEIGHT_DIFF'), Context('site-1'))
  (found,) = read(tmp_path)
  for name, value in moved.items():
    np.testing.assert_allclose(found.returned[name] - found.sent[name], value, rtol=1e-6)


def test_a_result_without_its_task_and_quantised_weights_are_refused(tmp_path):
  before, after = recorders(tmp_path)
  with pytest.raises(errors.UsageError, match='no recorder saw the task of round 2'):
    after.process(shareable(WEIGHTS), Context('site-3'))
  with pytest.raises(errors.UsageError, match='quantised or encrypted'):
    before.process(shareable(WEIGHTS, quantized_flag=True), Context('site-3'))


@pytest.mark.parametrize(
  'moved', [{f'model.{name}': value for name, value in WEIGHTS.items()}, {'fc.weight': np.ones(3, np.float32)}], ids=str
)
def test_differences_that_fit_no_weights_of_the_task_are_refused(tmp_path, moved):
  before, after = recorders(tmp_path)
  before.process(shareable(dict(WEIGHTS)), Context('site-1'))
  with pytest.raises(errors.UsageError, match=r'fit no weights of the task: \S*fc\.weight.* has fc\.weight, fc\.bias$'):
    after.process(shareable(moved, 'WEIGHT_DIFF'), Context('site-1'))
  assert not list(tmp_path.iterdir())


def test_a_kind_that_may_hold_weights_out_of_sight_is_refused(tmp_path):
  for one in recorders(tmp_path):
    with pytest.raises(errors.UsageError, match="kind 'COLLECTION', in which weights are not found"):
      one.process(shareable({'a': shareable(WEIGHTS)['DXO']}, 'COLLECTION'), Context('site-1'))


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


def filtered(one, arrays, **meta):
  """Returns what a filter of NVIDIA FLARE makes of weight differences."""
  from nvflare.apis.dxo import DXO, DataKind, from_shareable
  from nvflare.apis.fl_context import FLContext

  sent = {name: array.copy() for name, array in arrays.items()}
  return from_shareable(one.process(DXO(DataKind.WEIGHT_DIFF, sent, meta).to_shareable(), FLContext())).data


@pytest.mark.slow
@pytest.mark.parametrize(
  'settings', [{}, {'fraction': 0.4, 'gamma': 0.01, 'noise_var': 5.0, 'replace': False}], ids=str
)
def test_svt_privacy_sends_as_many_entries_with_the_same_noise_as_theirs(settings):
  pytest.importorskip('nvflare')
  import jax
  import scipy.stats
  from nvflare.app_common.filters.svt_privacy import SVTPrivacy

  from gradleak import defenses

  arrays = {'w': np.random.default_rng(0).normal(0, 0.01, (200, 100)).astype(np.float32)}
  theirs = filtered(SVTPrivacy(**settings), arrays)['w']
  ours = defenses.svt_privacy(**settings)
  ours = np.asarray(ours.update(arrays, ours.init(arrays), key=jax.random.key(0))[0]['w'])
  assert np.count_nonzero(ours) == pytest.approx(np.count_nonzero(theirs), rel=0.02)
  assert scipy.stats.ks_2samp(ours[ours != 0], theirs[theirs != 0]).pvalue > 1e-3


@pytest.mark.slow
@pytest.mark.filterwarnings('ignore:The given NumPy array is not writable')
def test_adaquant_rounds_as_theirs_and_where_theirs_sends_no_numbers_ours_does():
  pytest.importorskip('nvflare')
  torch = pytest.importorskip('torch')
  from nvflare.app_opt.pt.quantization.ada_quant import AdaQuantizer

  from gradleak import defenses

  def both(array):
    theirs = AdaQuantizer()
    quantized, state = theirs.quantize(torch.from_numpy(array))
    quantized = quantized if isinstance(quantized, torch.Tensor) else torch.as_tensor(quantized)
    ours = defenses.adaquant()
    sent = ours.update({'w': array}, ours.init({'w': array}))[0]['w']
    return theirs.dequantized(quantized, state).numpy(), np.asarray(sent)

  array = np.random.default_rng(0).normal(0, 0.01, (30, 20)).astype(np.float32)
  theirs, ours = both(array)
  np.testing.assert_allclose(ours, theirs, atol=1e-6)
  theirs, ours = both(array * np.float32(1e-3))
  assert np.isnan(theirs).all() and np.isfinite(ours).all()
