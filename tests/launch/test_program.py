"""What all programs share: `--help`, feedback, and how they end on errors and signals."""

import contextlib
import dataclasses
import errno
import io
import re
import signal
import subprocess
import sys
from unittest import mock

import numpy as np
import pytest
from absl import flags

import gradleak as gl
from benchmarks import harness
from gradleak.core import errors, storage
from gradleak.engine import progress
from gradleak.engine.driver import Progress
from launch import _program
from tests import programs

NAMES = sorted(path.stem for path in (programs.ROOT / 'launch').glob('[a-z]*.py'))
TOY = '''r"""Waits.

    python toy.py \\
      --seconds=9
"""

import logging
import time
from concurrent import futures

from absl import flags
from launch import _program

with _program.group('how long'):
  _SECONDS = flags.DEFINE_float('seconds', 60, 'How long it waits.')
with _program.group('run'):
  flags.DEFINE_string('workdir', '', 'Folder.')
  flags.DEFINE_integer('seed', None, 'Seed.')
  flags.DEFINE_string('steps', 'a;b;none', 17 * 'word ' + 'on-off' + 13 * ' word')
with _program.group('how long'):
  flags.DEFINE_boolean('library', False, 'Waits in a library that hides interruptions.')
  flags.DEFINE_boolean('busy', False, 'Computes in another thread for ten minutes, which nothing interrupts.')
flags.DEFINE_string('progress', 'auto', 'Without a heading.')


def main(argv):
  _program.say('waiting …')
  if flags.FLAGS.busy:
    futures.ThreadPoolExecutor().submit(time.sleep, 600)
  print('started', flush=True)
  try:
    time.sleep(_SECONDS.value)
  except KeyboardInterrupt as interruption:
    if not flags.FLAGS.library:
      raise
    logging.getLogger('library').error('a callback failed')
    raise RuntimeError('INTERNAL') from interruption


if __name__ == '__main__':
  _program.run(main)
'''


@pytest.fixture(scope='module')
def toy(tmp_path_factory):
  path = tmp_path_factory.mktemp('toy') / 'toy.py'
  path.write_text(TOY)
  return [sys.executable, str(path)]


def start(command):
  environment = {**programs.environment(), 'PYTHONIOENCODING': 'utf-8'}
  pipes = {'stdout': subprocess.PIPE, 'stderr': subprocess.PIPE}
  if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # the tests run in the background, and children inherit that
    signal.signal(signal.SIGINT, signal.default_int_handler)
  return subprocess.Popen(command, env=environment, cwd=programs.ROOT, text=True, encoding='utf-8', **pipes)


def finish(process):
  out, err = process.communicate(timeout=60)
  return programs.Done(process.returncode, out, err)


def end(error):
  """Returns the exit status and what is printed of a program that raises `error`."""
  own, printed = flags.FlagValues(), io.StringIO()
  flags.DEFINE_string('workdir', 'results/mine', '', flag_values=own)
  own['verbosity'] = flags.FLAGS['verbosity']
  with mock.patch.object(flags, 'FLAGS', own), contextlib.redirect_stderr(printed), pytest.raises(SystemExit) as ended:
    _program._guarded(mock.Mock(side_effect=error), ['program'])
  return ended.value.code, printed.getvalue()


def test_help_lists_flags_by_heading_in_order_of_definition(toy):
  done = finish(start([*toy, '--help']))
  first, second = 17 * ' word', 13 * ' word'
  assert (done.status, done.err) == (0, '')
  assert done.out == (
    'Waits.\n\n    python toy.py \\\n      --seconds=9\n\n'
    'how long:\n  --seconds: How long it waits. (default: 60.0)\n'
    '  --[no]library: Waits in a library that hides interruptions. (default: False)\n'
    '  --[no]busy: Computes in another thread for ten minutes, which nothing interrupts. (default: False)\n\n'
    'run:\n  --workdir: Folder.\n  --seed: Seed.\n'
    f'  --steps:{first}\n      on-off{second} (default: a; b; none)\n\n'
    "flags:\n  --progress: Without a heading. (default: auto)\n\n--helpfull also lists absl's own flags.\n"
  )


def test_helpfull_adds_the_flags_of_absl(toy):
  done = finish(start([*toy, '--helpfull']))
  _, listed = done.out.split('\n\nabsl:\n')
  assert done.status == 0 and listed.count('  --verbosity: ') == 1 and '--seconds' not in listed


@pytest.mark.parametrize('name', NAMES)
def test_help_of_each_program_lists_all_its_flags_under_headings(name):
  _, own = programs._load(name)
  done = programs.start(name, '--help')
  assert (done.status, done.err) == (0, '')
  lines = done.out.splitlines()
  listed = {line.split(':')[0].removeprefix('  --').removeprefix('[no]') for line in lines if line.startswith('  --')}
  assert listed and listed == set(own) - {'verbosity', 'v'}
  assert 'flags:' not in lines  # the heading of those that have none
  assert max(len(line) for line in lines if not line.startswith(4 * ' ')) <= 100


@pytest.mark.parametrize('name', NAMES)
def test_programs_read_each_of_their_flags(name):
  _, own = programs._load(name)
  sources = [path.read_text('utf-8') for path in (programs.ROOT / 'launch').glob('_*.py')]
  source = (programs.ROOT / 'launch' / f'{name}.py').read_text('utf-8')
  read = {
    one for pair in re.findall(r"(?:_GIVEN|given|self)\.(\w+)|'(\w+)'", ''.join([source, *sources])) for one in pair
  }
  made = {'ClientSettings', *re.findall(r'made\((?:gl|harness)\.(\w+)', source)}
  made |= {'AuditSettings'} if '_audited.settings(' in source else set()
  settings = [getattr(gl, each) if hasattr(gl, each) else harness.Options for each in made]
  assert set(own) - read - {field.name for each in settings for field in dataclasses.fields(each)} == {'v'}


@pytest.mark.parametrize('name', NAMES)
def test_programs_refuse_a_wrong_seed_and_mode_of_progress_before_all_else(name):
  _, own = programs._load(name)
  if name in ('benchmark', 'leaderboard', 'prepare_data'):  # they compute nothing that has a seed
    assert 'seed' not in own
    return
  refused = {'progress': ('loud', "unknown progress mode 'loud' (valid: ")} | {'seed': ('-1', 'seed is -1, expected ')}
  for flag, (given, message) in refused.items():
    if flag in own:
      done = programs.start(name, f'--{flag}={given}')
      assert (done.status, done.out) == (2, '') and done.err.startswith(f'error: {message}'), done.err


@pytest.mark.parametrize(
  ('argument', 'message'),
  [
    ('--second=1', "Unknown command line flag 'second'. Did you mean: seconds"),
    ('--seconds=soon', 'flag --seconds=soon'),
    ('now', "unexpected argument 'now', settings are written --flag=value"),
  ],
)
def test_a_mistyped_argument_ends_on_one_line(toy, argument, message):
  done = finish(start([*toy, argument]))
  assert (done.status, done.out) == (2, '')
  assert done.err.startswith(f'error: {message}') and done.err.count('\n') == 1


def test_jax_is_not_imported_before_it_is_needed():
  check = "import sys, launch._program; sys.exit('jax' in sys.modules)"
  assert finish(start([sys.executable, '-c', check])).status == 0


@pytest.mark.parametrize(
  ('arguments', 'printed'),
  [
    (['--progress=lines'], 'waiting …\ninterrupted\n'),
    (['--progress=none'], 'interrupted\n'),
    (['--progress=none', '--busy'], 'interrupted\n'),
    (
      ['--progress=none', '--workdir=results/mine', '--library'],
      'interrupted: give the same command again to go on from the last checkpoint in results/mine\n',
    ),
  ],
)
@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGTERM])
def test_signals_end_on_one_line(toy, number, arguments, printed):
  process = start([*toy, *arguments])
  process.stdout.readline()
  process.send_signal(number)
  assert finish(process) == (128 + number, '', printed)


def test_an_ignored_interruption_stays_ignored(toy):
  # A shell starts the background jobs of a script like this.
  process = start(['sh', '-c', 'trap "" INT; exec "$@"', 'sh', *toy, '--seconds=0.3'])
  process.stdout.readline()
  process.send_signal(signal.SIGINT)
  assert finish(process) == (0, '', 'waiting …\n')


def test_programs_without_progress_speak():
  printed = io.StringIO()
  with mock.patch.object(flags, 'FLAGS', flags.FlagValues()), contextlib.redirect_stderr(printed):
    _program.say('reading faces …')
  assert printed.getvalue() == 'reading faces …\n'


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


def test_a_caution_is_one_line():
  caution = storage.Caution('a checkpoint\nis damaged')
  said = _program._on_one_line(caution, storage.Caution, 'storage.py', 12, told=set())
  assert said == 'caution: a checkpoint is damaged\n'


def test_compiled_programs_that_are_not_kept_are_told_once(monkeypatch):
  monkeypatch.setattr(flags, 'FLAGS', own := flags.FlagValues())
  flags.DEFINE_string('compilation_cache', 'programs', 'Folder.', flag_values=own)
  own.mark_as_parsed()
  told = set()
  words = 'Error {} persistent compilation cache entry for {!r}: {}'
  causes = ('reading', 'jit_step', 'error: truncated'), ('writing', 'jit_stage', 'OSError: [Errno 28] full')
  first, *more = (_program._on_one_line(words.format(*cause), UserWarning, told=told) for cause in causes)
  assert first.startswith('userwarning: some compiled programs in programs cannot be read or stored')
  assert '(error: truncated): remove' in first and first.count('\n') == 1 and more == ['']


@pytest.mark.slow
def test_damaged_compiled_programs_are_told_once(tmp_path):
  """As a kill or a full disk leaves them: JAX reads none of them, and writes none anew."""
  small = '--dataset=digits', '--model=mlp(widths=8)', '--trials=1', '--controls=1', '--attacks=fidel'
  given = *small, '--defenses=none', '--progress=none', f'--compilation_cache={tmp_path}/cache'
  assert programs.spawn('audit', *given, f'--workdir={tmp_path}/whole').err == ''
  kept = list((tmp_path / 'cache').iterdir())
  assert len(kept) > 5
  for path in kept:
    path.write_bytes(path.read_bytes()[:60])
  done = programs.spawn('audit', *given, f'--workdir={tmp_path}/damaged')
  assert done.status == 0 and done.err.count('\n') == 1
  assert f'some compiled programs in {tmp_path}/cache cannot be read or stored' in done.err


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
