"""A full disk and folders that cannot be written: one line with the file and the cause, and a run that goes on."""

import builtins
import errno
import gc
import itertools
import os
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradleak
from gradleak.core import errors, storage
from gradleak.federated import simulation, training
from tests import programs

CAUSES = [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EIO]
RUN = (
  '--progress=none', '--compilation_cache=', '--dataset=digits', '--model=mlp(widths=4)', '--trials=1',
  '--attacks=fidel', '--controls=2', '--public=0', '--knowledge=non-adaptive', '--defenses=none',
)  # fmt: skip
WRITTEN = ('rows.jsonl', 'controls.jsonl', 'reconstructions.npz', 'curves.npz', 'result.json')
RENDERED = ('grid.png', 'summary.csv', 'report.html')


def fast_where(fast, cases):
  """Returns the cases as parameters, all but some of them slow."""
  return [pytest.param(*case, marks=[pytest.mark.slow] * (case not in fast)) for case in cases]


def failing(number, when=lambda *arguments: True, function=lambda *arguments: None):
  def fail(*arguments, **options):
    if when(*arguments):
      raise OSError(number, os.strerror(number))
    return function(*arguments, **options)

  return fail


@pytest.mark.parametrize('number', CAUSES)
@pytest.mark.parametrize('function', ['fsync', 'chmod', 'replace'])
def test_a_write_that_fails_names_its_file_and_leaves_the_old_one(tmp_path, monkeypatch, function, number):
  (tmp_path / 'file').write_text('old')
  with monkeypatch.context() as patch:
    patch.setattr(os, function, failing(number))
    with pytest.raises(OSError, match=os.strerror(number)) as caught:
      storage.write_atomically(tmp_path / 'file', 'new')
  assert caught.value.filename == str(tmp_path / 'file') and caught.value.errno == number
  assert os.listdir(tmp_path) == ['file'] and (tmp_path / 'file').read_text() == 'old'


def test_a_file_system_that_becomes_read_only_is_named_although_nothing_can_be_removed(tmp_path, monkeypatch):
  with monkeypatch.context() as patch:
    for function in ('fsync', 'unlink'):
      patch.setattr(os, function, failing(errno.EROFS))
    with pytest.raises(OSError, match='Read-only file system') as caught:
      storage.write_atomically(tmp_path / 'file', 'new')
  assert caught.value.filename == str(tmp_path / 'file')
  storage.Workdir(tmp_path / 'work', {}, {})  # and what is left of it harms nobody


def test_a_work_directory_that_cannot_be_made_is_a_usage_error(tmp_path, monkeypatch):
  for number in CAUSES:
    with monkeypatch.context() as patch, pytest.raises(errors.UsageError, match=os.strerror(number)):
      patch.setattr(os, 'replace', failing(number))
      storage.Workdir(tmp_path / 'work', {'a': 1}, {})
  assert storage.Workdir(tmp_path / 'work', {'a': 1}, {'size': 2}).speed == {'size': 2}


@pytest.fixture(scope='module')
def workdir(fast_compilation, tmp_path_factory):
  """The folder of a run that a failure stopped while its part was written, and that a second one completed."""
  workdir = tmp_path_factory.mktemp('faults') / 'new'
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(os, 'replace', failing(errno.ENOSPC, lambda _, path: path.suffix == '.npz', os.replace))
    done = programs.start('audit', *RUN, f'--workdir={workdir}')
  assert done.status == 1 and done.err.startswith(f'error: no space left in {workdir}/parts/') and not done.out
  assert not list(workdir.rglob('*.tmp'))
  assert programs.start('audit', *RUN, f'--workdir={workdir}').status == 0
  return workdir


@pytest.mark.long
@pytest.mark.parametrize(('name', 'number'), [('result.json', errno.EROFS), ('report.html', errno.ENOSPC)])
def test_a_program_ends_on_one_line_and_the_next_one_goes_on(workdir, monkeypatch, name, number):
  before = {file: (workdir / file).read_bytes() for file in (*WRITTEN, *RENDERED)}
  for file in ('result.json', *RENDERED):
    (workdir / file).unlink()
  with monkeypatch.context() as patch:
    patch.setattr(os, 'replace', failing(number, lambda _, path: path.name == name, os.replace))
    done = programs.start('audit', *RUN, f'--workdir={workdir}')
  assert done.status == 1 and done.err.count('\n') == 1 and done.err.startswith('error: ')
  assert str(workdir / name) in done.err and 'same command again' in done.err
  assert number == errno.ENOSPC or os.strerror(number) in done.err
  assert programs.start('audit', *RUN, f'--workdir={workdir}').status == 0
  assert {file for file in before if not (workdir / file).exists()} == set()
  for file in WRITTEN[:2]:
    assert (workdir / file).read_bytes() == before[file]


# ---- checkpoints, trainings and sweeps


@pytest.mark.long
@pytest.mark.parametrize(
  ('function', 'number'),
  fast_where(
    [('open', errno.ENOSPC), ('rename', errno.EACCES), ('mkdir', errno.EROFS)],
    itertools.product(('open', 'rename', 'mkdir'), CAUSES),
  ),
)
@pytest.mark.filterwarnings('ignore')  # Orbax leaves coroutines behind that were never awaited
def test_a_checkpoint_that_cannot_be_written_leaves_the_one_before(tmp_path, monkeypatch, function, number):
  work = storage.Workdir(tmp_path / 'work', {}, {})
  first, second = ([np.full(3, value, np.float32), np.arange(4)] for value in (1, 2))
  work.save_checkpoint('part', 1, first, due=True)
  with monkeypatch.context() as patch, pytest.raises(OSError, match=os.strerror(number)) as caught:
    patch.setattr(builtins if function == 'open' else os, function, failing(number))
    work.save_checkpoint('part', 2, second, due=True)
  assert str(caught.value.filename) == str(tmp_path / 'work' / 'checkpoints' / 'part-00000002')
  if function == 'mkdir':  # a thread that waits for the folder would keep the process for minutes
    assert 'write_metadata_after_commits' not in {thread.name for thread in threading.enumerate()}
  caught.value.__traceback__ = None
  del caught
  gc.collect()
  again = storage.Workdir(tmp_path / 'work', {}, {})
  step, leaves = again.load_checkpoint('part')
  assert step == 1
  for leaf, expected in zip(leaves, first, strict=True):
    np.testing.assert_array_equal(leaf, expected)
  again.save_checkpoint('part', 3, second, due=True)
  assert again.load_checkpoint('part')[0] == 3


TRAINED = ('rounds.jsonl', 'config.json', 'timing.jsonl')


@pytest.fixture(scope='module')
def train(fast_compilation):
  """A training of three rounds, on the same data and from the same key."""
  images = np.random.default_rng(0).uniform(size=(8, 8, 8, 1)).astype(np.float32)
  model = gradleak.models.from_functions(
    lambda key, shape: {'w': jnp.zeros((64, 10))}, lambda params, x: x.reshape(-1, 64) @ params['w'], 'own'
  )
  variables = {'params': {'w': np.zeros((64, 10), np.float32)}}
  parts = [np.arange(4), np.arange(4, 8)]
  federation = simulation.Federation(gradleak.Client(model, 10), images, np.arange(8, dtype=np.int32), parts, 2)

  def run(folder):
    return training.train(jax.random.key(0), federation, variables, 3, workdir=folder, config={'a': 1})[1]

  return run


@pytest.mark.parametrize(
  ('name', 'number'),
  fast_where(
    [('config.json', errno.EROFS), *((name, errno.ENOSPC) for name in TRAINED)],
    itertools.product(TRAINED, (errno.ENOSPC, errno.EROFS)),
  ),
)
def test_a_training_names_the_file_and_goes_on_as_if_nothing_had_been(train, tmp_path, monkeypatch, name, number):
  whole = train(tmp_path / 'whole')
  with monkeypatch.context() as patch:
    if name == 'timing.jsonl':
      opens = failing(number, lambda path, *_: str(path).endswith(name), open)
      patch.setattr(storage, 'open', opens, raising=False)
    else:
      patch.setattr(os, 'replace', failing(number, lambda _, path: path.name == name, os.replace))
    with pytest.raises((OSError, errors.UsageError), match=os.strerror(number)) as caught:
      train(tmp_path / 'work')
  assert name in str(caught.value) or 'work' in str(caught.value)
  assert train(tmp_path / 'work') == whole
  assert (tmp_path / 'work' / 'rounds.jsonl').read_bytes() == (tmp_path / 'whole' / 'rounds.jsonl').read_bytes()


@pytest.mark.parametrize(
  ('change', 'words'),
  [
    (lambda lines: lines[1:], r'does not hold the rounds 1 to 3'),
    (lambda lines: [lines[0], *lines], r'does not hold the rounds 1 to 3'),
    (lambda lines: [], r'does not hold the rounds 1 to 3'),
    (lambda lines: [*lines[:2], b'{"round": '], r'rounds\.jsonl is damaged'),
    (lambda lines: [b'[]\n', *lines], 'a line is'),
  ],
)
def test_a_training_does_not_go_on_from_rounds_that_were_lost(train, tmp_path, change, words):
  train(tmp_path / 'work')
  path = tmp_path / 'work' / 'rounds.jsonl'
  path.write_bytes(b''.join(change(path.read_bytes().splitlines(keepends=True))))
  with pytest.raises(errors.UsageError, match=words):
    train(tmp_path / 'work')


@pytest.mark.slow  # an audit that cannot write its files is tested above
@pytest.mark.parametrize('number', [errno.ENOSPC, errno.EROFS])
def test_a_sweep_that_cannot_write_its_table_is_complete_when_called_again(tmp_path, monkeypatch, number):
  flags = [flag for flag in RUN if not flag.startswith('--model=')]
  flags += ['--models=mlp(widths=4)', '--group_size=2', f'--workdir={tmp_path / "new"}']
  with monkeypatch.context() as patch:
    patch.setattr(os, 'replace', failing(number, lambda _, path: path.name == 'sweep.csv', os.replace))
    done = programs.start('sweep', *flags)
  assert done.status == 1 and done.err.splitlines()[-1].startswith('error: ') and not list(tmp_path.rglob('*.tmp'))
  assert str(tmp_path / 'new' / 'sweep.csv') in done.err and 'same command again' in done.err
  before = (tmp_path / 'new' / 'rows.jsonl').read_bytes()
  assert programs.start('sweep', *flags).status == 0
  assert (tmp_path / 'new' / 'rows.jsonl').read_bytes() == before
  assert (tmp_path / 'new' / 'sweep.csv').read_text().startswith('model,attack,defense')
