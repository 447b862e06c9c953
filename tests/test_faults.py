"""A full disk and folders that cannot be written: one line with the file and the cause, and a run that goes on."""

import errno
import os

import pytest

from gradleak import errors, storage
from tests import programs

CAUSES = [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EIO]
RUN = (
  '--progress=none', '--compilation_cache=', '--dataset=digits', '--model=mlp(widths=4)', '--trials=1', '--steps=2',
  '--controls=2', '--public=0', '--knowledge=unaware', '--defenses=none',
)  # fmt: skip
WRITTEN = ('rows.jsonl', 'controls.jsonl', 'reconstructions.npz', 'curves.npz', 'result.json')
RENDERED = ('grid.png', 'summary.csv', 'report.html')


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


@pytest.mark.parametrize(
  ('name', 'content'),
  [
    ('config.json', b'[]'),
    ('config.json', b'\xff'),
    ('config.json', b'{"a":' * 100_000),
    ('speed.json', b'no JSON'),
  ],
)
def test_a_damaged_file_of_a_work_directory_is_named(tmp_path, name, content):
  storage.Workdir(tmp_path / 'work', {'a': 1}, {})
  (tmp_path / 'work' / name).write_bytes(content)
  with pytest.raises(errors.UsageError, match=f'{name} is damaged'):
    storage.Workdir(tmp_path / 'work', {'a': 1}, {})


def test_files_of_others_are_left_alone(tmp_path):
  (tmp_path / 'work').mkdir()
  (tmp_path / 'work' / 'diary.txt').write_text('mine')
  with pytest.raises(errors.UsageError, match='holds other files'):
    storage.Workdir(tmp_path / 'work', {}, {})
  assert [path.name for path in (tmp_path / 'work').iterdir()] == ['diary.txt']
