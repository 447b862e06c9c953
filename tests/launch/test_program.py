"""How a program ends when a device fails or the disk is full, and what a person sees of memory that ran out."""

import contextlib
import errno
import io
from unittest import mock

import numpy as np
import pytest
from absl import flags

from gradleak import errors, progress
from gradleak.engine.driver import Progress
from launch import _program


def end(error):
  """Returns the exit status and what is printed of a program that raises `error`."""
  own, printed = flags.FlagValues(), io.StringIO()
  flags.DEFINE_string('workdir', 'results/mine', '', flag_values=own)
  own['verbosity'] = flags.FLAGS['verbosity']
  with mock.patch.object(flags, 'FLAGS', own), contextlib.redirect_stderr(printed), pytest.raises(SystemExit) as ended:
    _program._guarded(mock.Mock(side_effect=error), ['program'])
  return ended.value.code, printed.getvalue()


def test_a_device_that_failed():
  assert end(errors.DeviceError('the device failed\n at step 3')) == (1, 'error: the device failed at step 3\n')


@pytest.mark.parametrize('error', [
  OSError(errno.ENOSPC, 'No space left on device'), OSError(errno.EDQUOT, 'Disk quota exceeded'),
  ValueError("RESOURCE_EXHAUSTED: Failed to write 9 bytes to file 17: No space left on device [os_error_code='28']"),
])  # fmt: skip
def test_a_full_disk(error):
  status, printed = end(error)
  assert status == 1 and printed.count('\n') == 1
  assert printed.startswith('error: no space left in results/mine; ') and 'same command' in printed


def test_other_errors_keep_their_traceback():
  with pytest.raises(ValueError, match='a bug'):
    end(ValueError('a bug'))
  with pytest.raises(PermissionError):
    end(PermissionError(errno.EACCES, 'Permission denied'))


@pytest.mark.parametrize('mode', ['bar', 'lines'])
def test_memory_that_ran_out_is_said_once(mode):
  printed = io.StringIO()
  report = progress.reporter(mode, printed)
  for step, notice in ((0, ''), (5, 'out of memory, going on with groups of 4'), (6, ''), (100, '')):
    report('csdlg', Progress(step, 100, np.ones(8, np.float32), 8, 4, notice, None), np.ones(8, np.float32))
  assert printed.getvalue().count('csdlg: out of memory, going on with groups of 4\n') == 1
