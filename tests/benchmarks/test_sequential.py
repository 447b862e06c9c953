"""The audits whose trials stop, as the benchmark measures them."""

import pytest

from benchmarks.sequential import TASKS, drawn
from gradleak.audit.sequential import check_order


@pytest.mark.parametrize('task', TASKS, ids=str)
@pytest.mark.parametrize('trials', [8, 64])
def test_the_samples_of_each_audit_come_in_no_order(task, trials):
  """The benchmark ended in a refusal: its faces stood before what is none."""
  data = drawn(task, trials)
  check_order(data.targets)
  assert len(data.samples) == len(data.targets) == trials * task.batch_size
