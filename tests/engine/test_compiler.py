"""Options of the compiler are passed only to an XLA that knows them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gradleak.engine import compiler, groups


def test_an_option_that_this_xla_does_not_know_is_left_out():
  options = compiler.known(xla_backend_optimization_level=1, xla_no_such_option=True)
  assert options == {'xla_backend_optimization_level': 1}
  assert compiler.known(xla_no_such_option=True) is None


def test_this_xla_knows_by_what_a_gpu_runs_a_graph():
  assert 'WHILE' in groups.OPTIONS['gpu']['xla_gpu_enable_command_buffer']
  assert compiler.known(**groups.OPTIONS['gpu']) == groups.OPTIONS['gpu']


@pytest.mark.parametrize(('set_', 'precision'), [(None, 'HIGHEST'), ('tensorfloat32', 'HIGH')])
def test_products_of_lanes_have_the_digits_of_float32_unless_a_user_says_otherwise(set_, precision):
  placement = groups.place(np.arange(2), groups.Layout(2, jax.devices()))
  lanes = placement.pad(jnp.ones([2, 3]))
  with jax.default_matmul_precision(set_):
    text = placement.lowered(lambda shared, lane: shared @ lane, jnp.ones([4, 3]), lanes).as_text()
  assert f'precision = [{precision}, {precision}]' in text


def test_lanes_run_on_an_xla_that_does_not_know_an_option(monkeypatch):
  monkeypatch.setitem(groups.OPTIONS, 'cpu', {**groups.OPTIONS['cpu'], 'xla_gone_in_a_later_version': False})
  placement = groups.place(jnp.arange(3), groups.Layout(2, jax.devices()[:1]))
  lanes = placement.pad(jnp.arange(3.0))
  doubled = placement.unpad(placement.call(lambda shared, lane: shared * lane, jnp.float32(2), lanes))
  assert doubled.tolist() == [0, 2, 4]


def test_few_lanes_run_on_two_devices_as_many_do():
  """A program of a single device has other bits: a share of the work would not have those of the whole."""
  few = groups.place(np.arange(3), groups.Layout(4, jax.devices()))
  assert len(few.devices) == 2 and few.counts.tolist() == [1, 0] and few.groups.tolist() == [0]
  many = groups.place(np.arange(9), groups.Layout(4, jax.devices()))
  assert many.devices == few.devices and many.table.shape == few.table.shape
  lanes = few.pad(jnp.arange(3.0))
  doubled = few.unpad(few.call(lambda shared, lane: shared * lane, jnp.float32(2), lanes))
  assert doubled.tolist() == [0, 2, 4]
