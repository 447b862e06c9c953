"""How work is run: what is refused, and which group size it stands for."""

import re

import numpy as np
import pytest

import gradleak as gl
from gradleak.engine import driver
from gradleak.engine.groups import Layout

WEIGHTS = {'params': {'w': np.zeros((100, 80))}}


@pytest.mark.parametrize(
  ('given', 'message'),
  [
    ({'group_size': 0}, 'group_size is 0, expected an integer in [1, inf]'),
    ({'process': 3}, 'process is 3, expected (rank, number of processes)'),
    ({'process': (0, 9)}, 'number of processes is 9'),
    ({'process': (2, 2)}, 'rank of the process is 2'),
    ({'process': (0, 2)}, '2 processes need a work directory'),
    ({'shards': 9}, 'shards is 9'),
    ({'split': 1}, 'split is 1, expected True or False'),
  ],
)
def test_what_cannot_be_run_is_refused(given, message):
  with pytest.raises(gl.UsageError, match=re.escape(message)):
    gl.Execution(**given).check('call', 4, None)


def test_each_process_has_a_share():
  gl.Execution(process=(1, 2), shards=3).check('call', 4, 'here')
  with pytest.raises(gl.UsageError, match='shards is 1'):
    gl.Execution(process=(1, 2), shards=1).check('call', 4, 'here')


def test_a_field_without_a_use_is_refused_unless_it_has_its_default():
  gl.Execution(group_size=3, shards=None).check('call', 4, None, 'group_size')
  for given in ({'process': (0, 2)}, {'shards': 2}, {'split': True}):
    with pytest.raises(gl.UsageError, match=f'{next(iter(given))} is .*, and call has no use for it'):
      gl.Execution(**given).check('call', 4, 'here', 'group_size')


def test_the_group_size_is_that_given_or_the_measured_one():
  assert gl.Execution(5).size(WEIGHTS, 2) == 5
  assert gl.Execution().size(WEIGHTS, 2) == driver.default_group_size(WEIGHTS, 2) == 4
  assert Layout(5, room=3).halved() == Layout(3, room=3)
