"""Files that are not there, folders in place of files, and files in place of folders: one sentence that names them."""

import pytest

import gradleak as gl
from gradleak.core import storage
from gradleak.priors import trained
from gradleak.studies import identification
from gradleak.studies.autoleak import costs
from tests import programs


@pytest.fixture
def wrong(tmp_path):
  """Paths that hold no file: nothing there, below a file, a folder."""
  (tmp_path / 'file').write_text('{}')
  (tmp_path / 'folder.txt').mkdir()
  return tmp_path / 'none.txt', tmp_path / 'file' / 'below.txt', tmp_path / 'folder.txt'


@pytest.mark.parametrize('read', [storage.read_json, storage.read_json_lines, storage.read_arrays, storage.sealed])
def test_below_a_file_there_is_no_file(wrong, read):
  for path in wrong[:2]:
    with pytest.raises(FileNotFoundError):
      read(path, 'mend it')
  with pytest.raises(gl.UsageError, match=r'folder\.txt cannot be read .*; mend it'):
    read(wrong[2], 'mend it')
  assert storage.read_times(wrong[1]) == [] and not storage.check_sealed(wrong[1], 'mend it')


def test_texts_that_cannot_be_read(wrong, tmp_path):
  (tmp_path / 'notes.txt').write_text('one two\nthree four\n' * 5)
  dataset = gl.data.load(f'text:{tmp_path}/notes.txt')
  for path in wrong:
    with pytest.raises(gl.UsageError, match=rf'cannot read the texts in {path}: '):
      gl.data.read_like(path, dataset)
  (tmp_path / 'split' / 'train.txt').mkdir(parents=True)
  with pytest.raises(gl.UsageError, match=r'cannot read the texts in .*train\.txt: Is a directory'):
    gl.data.load(f'text:{tmp_path}/split', 'train')


def test_weights_of_a_prior_that_cannot_be_read(wrong):
  for path in wrong:
    with pytest.raises(gl.UsageError, match=rf'cannot read the weights of the prior {path}: '):
      trained.load(path, 'generator')


def test_work_directories_that_are_files(tmp_path):
  (tmp_path / 'file').write_text('{}')
  with pytest.raises(gl.UsageError, match='file holds no finished identification'):
    identification.load(tmp_path / 'file')
  with pytest.raises(gl.UsageError, match=r'there is no .*file/trainings.json'):
    costs.task_of(tmp_path / 'file')
  for flag in ('costs', 'identified'):
    done = programs.start('leaderboard', f'--{flag}={tmp_path}/file', f'--folder={tmp_path}')
    assert done.status == 2 and done.err.startswith('error: ') and done.err.count('\n') == 1


@pytest.mark.parametrize('place', ['{here}/file/below', '/proc/gradleak'])
def test_folders_that_cannot_be_made_are_named(tmp_path, place):
  (tmp_path / 'file').write_text('')
  place = place.format(here=tmp_path)
  with pytest.raises(gl.UsageError, match=f'the folder {place} cannot be made: '):
    storage.made_folder(place)


@pytest.mark.long
def test_a_program_ends_in_that_sentence():
  flags = '--dataset=digits', '--trials=1', '--public=0', '--defenses=none', '--progress=none', '--model=mlp(widths=2)'
  done = programs.start('autoleak', *flags, '--workdir=/proc/gradleak')
  assert done.status == 2 and done.err.startswith('error: the folder /proc/gradleak cannot be made: ')
