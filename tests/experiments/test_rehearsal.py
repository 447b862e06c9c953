"""Rehearsals count what runs compute, and compute nothing; forecasts are made of them."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import experiments
import gradleak as gl
from experiments import forecast, rehearsal
from experiments.experiment import Run
from experiments.forecast import Forecast, Rates
from experiments.rehearsal import Ledger, rehearsed
from gradleak import AuditSettings
from gradleak.audit.plan import plan
from gradleak.audit.uploads import uploads
from gradleak.core import errors
from gradleak.core.reuse import reusable
from gradleak.engine import driver
from gradleak.models.operations import Operations, counted

pytestmark = pytest.mark.usefixtures('fast_compilation')


@functools.cache
def _kept(number):
  return jax.jit(lambda x: number * x)


def test_a_program_is_counted_and_not_run():
  called = []

  def run(x, turns):
    jax.debug.callback(lambda: called.append(1))
    return jax.lax.fori_loop(jnp.int32(0), turns, lambda i, x: x @ x, x)

  with rehearsed(ledger := Ledger()):
    function = jax.jit(run)
    with ledger.times(10), ledger.times(3, 2):
      found = function(jnp.ones((4, 4)), np.int32(5))
    assert function(found, np.int32(2)).shape == (4, 4)
    function(found, np.int32(2))
    text = counted(function.trace(found, np.int32(2)).jaxpr).equations
  jax.effects_barrier()
  assert not called and ledger.total.products == 128 * (30 * 5 + 2 + 2)
  assert ledger.total.executed == (2 * 5 + 1) * 30 / 2 + 2 * (2 * 2 + 1)
  assert ledger.programs['run'].equations == ledger.total.equations == text > 0
  np.testing.assert_array_equal(function(2 * jnp.eye(4), 1), 4 * np.eye(4))  # it computes outside
  assert called


def test_what_is_kept_for_equal_arguments_stays_apart(monkeypatch):
  jax.block_until_ready(_kept(2.0)(jnp.ones(3)))

  @reusable(4)
  def made(number):
    return jax.jit(lambda x: number + x)

  monkeypatch.setattr(rehearsal, 'made', made, raising=False)
  monkeypatch.setattr(rehearsal, '_kept', _kept, raising=False)
  real = rehearsal.made(1.0)
  with rehearsed(ledger := Ledger()):
    assert rehearsal.made(1.0) is not real and rehearsal.made(1.0) is rehearsal.made(1.0)
    rehearsal.made(1.0)(jnp.ones(3))
    rehearsal._kept(2.0)(jnp.ones(3))
    assert ledger.total.entries == 6
  assert rehearsal.made(1.0) is real and jax.jit is not rehearsal and rehearsal._kept is _kept
  np.testing.assert_array_equal(real(jnp.ones(3)), np.full(3, 2))


def test_within_a_trace_functions_are_traced():
  with rehearsed(ledger := Ledger()):
    inner = jax.jit(lambda x: x @ x)
    jax.jit(lambda x: inner(x) + inner(x))(jnp.ones((2, 2)))
  assert ledger.total.products == 2 * 16 and list(ledger.programs) == ['<lambda>']


def test_keys_and_large_arrays_have_their_types():
  with rehearsed(Ledger()):
    made = jax.jit(lambda key: (jax.random.split(key, 3), jnp.ones((2000, 1000)), jnp.arange(4), jnp.ones(5)))
    keys, large, whole, small = made(jax.random.key(1))
  assert jnp.issubdtype(keys.dtype, jax.dtypes.prng_key) and keys.shape == (3,)
  assert large.shape == (2000, 1000) and not np.any(large) and whole.dtype == jnp.int32
  assert 0 < np.std(small) < 1


def test_data_are_noise_in_their_shape():
  with rehearsed(Ledger()):
    found = gl.data.load('mnist', 'train', limit=2500)
    assert gl.data.load('cifar10', limit=2, image_size=25, channels=1).samples.shape == (2, 25, 25, 1)
    assert gl.data.gallery('mnist', 'test').samples.shape == (101, 28, 28, 1)
    assert gl.data.gallery('mnist', 'test', image_size=12).samples.shape == (101, 12, 12, 1)
    assert gl.data.gallery('faces', 'test', image_size=9).samples.shape[1:] == (9, 9, 1)
    assert len(gl.data.load('faces', limit=3).samples) == 3
    for name, split, limit in (('mnist', 'test', 10_001), ('svhn', 'test', 1)):
      with pytest.raises(errors.UsageError, match=name):
        gl.data.load(name, split, limit=limit)
  assert found.samples.shape == (2500, 28, 28, 1) and 0 <= found.samples.min() < found.samples.max() <= 1
  assert found.num_classes == 10 and set(found.targets) == set(range(10))


def test_every_dataset_of_the_tables_has_a_shape():
  runs = [run for one in experiments.REGISTRY.values() for run in one.runs.values()]
  names = {run.dataset for run in runs} | {run.starts for run in runs if getattr(run, 'starts', '')}
  assert names - set(gl.data.EMBEDDED) == set(rehearsal.SHAPES)


@pytest.fixture(scope='module')
def run():
  settings = AuditSettings(controls=3, restarts=2, knowledge='non-adaptive')
  defenses = {label: label for label in ('none', 'prune(rate=0.5)')}
  return Run('digits', 'mlp', 'csdlg_fast(steps=7)', defenses, trials=5, settings=settings)


@pytest.mark.slow
def test_an_audit_is_counted_for_all_trials_from_one(run):
  """The count from one trial and one control run is that of all of them, run in groups of one."""
  with rehearsed(ledger := Ledger()):
    run.rehearse(None, ledger)
  with rehearsed(whole := Ledger()):
    data = run.load(None)
    gl.audit(
      jax.random.key(0), run.scenario(data, 0), run.protections(None, data), [run.method()], 5, settings=run.settings,
      group_size=1, progress='none',
    )  # fmt: skip
  assert ledger.lanes == (2 * 5 + 3) * 2
  assert ledger.total.products == pytest.approx(whole.programs['over_lanes'].products, rel=0.03)
  # An update of each tensor, and views of it, of all lanes.
  assert ledger.kept > 26 * 4 * 64


@pytest.mark.long
@pytest.mark.parametrize(('trials', 'controls'), [(2, 16), (16, 2)])
def test_uploads_are_counted_by_trials_and_those_of_control_runs_by_their_number(run, trials, controls):
  run = run.replaced(trials=trials, controls=controls)

  def planned(one):
    scenario = one.scenario(data := one.load(None), 0)
    protections = one.protections(scenario, data)
    return plan(jax.random.key(0), scenario, protections, [one.method()], one.trials, one.settings).groups[0]

  with rehearsed(ledger := Ledger()):
    group, ledger.total = planned(run.replaced(trials=1, controls=1)), Operations()
    run.rehearsed(group, ledger, 1)
  with rehearsed(whole := Ledger()):
    group, whole.total = planned(run), Operations()
    uploads(group, np.arange(trials), np.arange(controls), 1)
  assert ledger.total.products == whole.total.products > 0
  assert ledger.total.equations == pytest.approx(whole.total.equations, rel=0.02)  # of programs, each once


@pytest.mark.long
def test_a_forecast_says_what_does_not_fit(run, monkeypatch):
  declared = experiments.get('spear_exact')
  good = forecast.forecast(declared, 'smoke')
  assert good.error == '' and good.runs == 1
  kind = type(next(iter(declared.runs.values())))

  def broken(self, data_dir, ledger):
    jax.jit(lambda x: x @ jnp.ones(4))(jnp.ones(3))

  monkeypatch.setattr(kind, 'rehearse', broken)
  found = forecast.forecast(declared, 'smoke')
  assert found.error.startswith('dense: TypeError: ') and 'test_rehearsal.py:' in found.error


def test_forecasts_are_kept_for_their_settings(tmp_path):
  one = experiments.get('dcs2_4')
  settings = forecast._settings(one, 'smoke')
  found = Forecast('dcs2_4', 1, 7, Operations(2e12, 3e9, 5.0, 6, 7.0, 1), 8.0, '', settings)
  assert forecast.read(tmp_path, one, 'smoke') is None
  forecast.keep(tmp_path, found)
  assert forecast.read(tmp_path, one, 'smoke') == found
  assert forecast.read(tmp_path, one, 'mini') is None
  forecast.keep(tmp_path, found._replace(error='broken'))
  assert forecast.read(tmp_path, one, 'smoke') is None  # it is tried again


def test_a_forecast_that_was_counted_in_another_way_is_made_anew(tmp_path):
  one = experiments.get('dcs2_4')
  found = Forecast('dcs2_4', 1, 7, Operations(2e12), 8.0, '', forecast._settings(one, 'smoke'))
  forecast.keep(tmp_path, found)
  (path,) = tmp_path.iterdir()
  kept = json.loads(path.read_text())
  path.write_text(json.dumps({name: value for name, value in kept.items() if name != 'counting'}))
  assert forecast.read(tmp_path, one, 'smoke') is None  # of the time before there was a number
  path.write_text('{')
  with pytest.raises(errors.UsageError, match='remove it to count the table anew'):
    forecast.read(tmp_path, one, 'smoke')


def test_the_table_is_in_the_order_of_hours():
  rates = Rates(1e9, 1e9, 1e6, 1e2)
  long = Forecast('long', 2, 1000, Operations(3.6e12, 0, 0, 0, 2**20), 2**30, '', {})
  short = Forecast('short', 1, 10, Operations(0, 1.8e12, 0.9e9, 90_000, 0.0), 0, 'run: wrong', {})
  assert rates.seconds(long.operations) == 3600 and rates.seconds(short.operations) == 1800 + 900 + 900
  lines = forecast.shown([long, short._replace(operations=Operations(1.8e12))], rates, {'long': ['mnist']}).splitlines()
  assert [line.split()[0] for line in lines] == ['table', lines[1], 'short', 'long', 'all']
  assert lines[2].split()[1:6] == ['1', '10', '1.8', '0', '0.5'] and lines[2].endswith('FAILED: run: wrong')
  assert lines[3].split()[1:] == ['2', '1,000', '3.6', '0', '1', '1', '1', 'mnist']
  assert lines[4].split() == ['all', '2', '3', '1,010', '5.4', '0', '1.5']


def test_rates_follow_from_what_was_timed(monkeypatch):
  programs = [Operations(1e9, 1e8, 1e3, 500), Operations(2e9, 4e8, 1e5, 900), Operations(8e9, 1e8, 2e4, 700)]
  rates = Rates(4e9, 5e8, 1e5, 250.0)

  def timed(model, trials, steps):
    one = programs[[name for name, *_ in forecast.TIMED].index(model)]
    again = rates._replace(equations=float('inf')).seconds(one)
    return one, again + one.equations / 250, again

  monkeypatch.setattr(forecast, '_timed', timed)
  np.testing.assert_allclose(forecast.measured_rates(), rates, rtol=1e-6)


@pytest.mark.slow
def test_what_is_timed_is_what_is_counted():
  found, first, again = forecast._timed('mlp', 3, 4)
  twice, *_ = forecast._timed('mlp', 3, 8)
  assert again > 0 and first > 0 and found.equations > 100
  assert twice.products / found.products == pytest.approx(2, rel=0.2)
  assert driver.default_group_size({'params': np.zeros(10)}, 1) == 8  # as before


def test_missing_data_are_named():
  assert forecast.missing(experiments.get('dcs2_6'), 'paper', None) == ('cifar10',)
  assert forecast.missing(experiments.get('priors_faces'), 'paper', None) == ()
