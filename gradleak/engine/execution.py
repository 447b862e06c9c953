"""How work is run: in which groups, and by which of several processes."""

import dataclasses
from typing import Any

from gradleak.core import errors, settings
from gradleak.core.settings import setting
from gradleak.core.trees import Tree
from gradleak.engine import driver

_RUN: dict[str, Any] = {'group': 'run'}


@dataclasses.dataclass(frozen=True)
class Execution:
  """How work is run, which is no part of what is measured; each is a keyword argument of the calls that take it.

  Several processes need not know of each other, and one that dies is started again by itself.

  Attributes:
    group_size: lanes that share one pass: trials, clients or candidates; None takes a measured default, or what fits.
      It changes speed, and bits.
    process: (rank, number) of this process among several that share the work and the work directory.
    shards: into how many parts the trials are cut, from the number of processes (None) to that of trials.
    split: whether devices share the samples of each upload, in place of trials: for a batch too large for one device.
      With `jax.distributed`, those of all its processes do, which then make this same call and see the same work
      directory; the first one writes. When one dies, all do, and are started again together.
  """

  group_size: int | None = setting(
    None, 'Trials that share one pass; changes speed, and bits.', **_RUN, low=1, integer=True
  )
  process: tuple[int, int] = setting((0, 1), 'Rank of this process, and the number of all.', **_RUN)
  shards: int | None = setting(None, 'Parts that the trials are cut into.', **_RUN, low=1, integer=True)
  split: bool = setting(False, 'Whether devices share the samples of an upload.', **_RUN)

  def check(self, what: str, most: int, workdir: Any, *used: str) -> None:
    """Checks how the work of a call is shared.

    Args:
      what: the call, for messages.
      most: into how many parts its work can be cut, such as trials.
      workdir: its work directory, or None.
      *used: fields that the call has a use for; by default all.

    Raises:
      UsageError: for a field that the call has no use for, for ranks and shares that do not fit, or for several
        processes without a work directory.
    """
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      if used and field.name not in used and value != field.default:
        raise errors.UsageError(f'{field.name} is {errors.shown(value)}, and {what} has no use for it: leave it out')
    settings.check(self)
    errors.check_instance('split', self.split, bool, 'True or False')
    errors.check_number('trials', most, low=1, integer=True)
    if not isinstance(self.process, tuple | list) or len(self.process) != 2:
      raise errors.UsageError(f'process is {errors.shown(self.process)}, expected (rank, number of processes)')
    rank, processes = self.process
    errors.check_number('number of processes', processes, low=1, high=most, integer=True)  # each has a trial
    errors.check_number('rank of the process', rank, low=0, high=processes - 1, integer=True)
    if self.shards is not None:
      errors.check_number('shards', self.shards, low=processes, high=most, integer=True)
    if processes > 1 and workdir is None:
      raise errors.UsageError(f'{processes} processes need a work directory that all of them see')

  def size(self, variables: Tree, batch_size: int = 1) -> int:
    """Returns the group size: the one that is given, or the default for these weights and so many samples."""
    return driver.default_group_size(variables, batch_size) if self.group_size is None else self.group_size
