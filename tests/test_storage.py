"""Files that are whole or as they were, folders with an identity, checkpoints."""

import io
import json
import math
import os
import shutil
import stat

import jax.numpy as jnp
import numpy as np
import pytest

from gradleak.core import errors, storage

CONFIG = {'dataset': 'digits', 'trials': 2, 'steps': None, 'attacks': ['csdlg'], 'learning_rate': 0.1}


def open_workdir(path, **changes):
  return storage.Workdir(path, {**CONFIG, **changes}, {'group_size': 8})


def test_shares_that_claim_a_folder_at_the_same_time_both_have_it(tmp_path, monkeypatch):
  """The second one looks for the settings before the first one writes them, and at the folder afterwards."""
  open_workdir(tmp_path / 'new')
  read, seen = storage._read, []

  def late(path):
    seen.append(path.name)
    return None if seen == ['config.json'] else read(path)

  monkeypatch.setattr(storage, '_read', late)
  open_workdir(tmp_path / 'new')
  seen.clear()
  (tmp_path / 'other').mkdir()
  (tmp_path / 'other' / 'file').touch()
  with pytest.raises(errors.FolderError, match='holds other files and no config'):
    open_workdir(tmp_path / 'other')


@pytest.mark.parametrize('content', ['grüße\n', b'\x00\xff'])
def test_write_atomically(tmp_path, content):
  storage.write_atomically(tmp_path / 'file', 'old')
  storage.write_atomically(tmp_path / 'file', content)
  assert (tmp_path / 'file').read_bytes() == (content if isinstance(content, bytes) else content.encode('utf-8'))
  assert os.listdir(tmp_path) == ['file']


@pytest.mark.parametrize('failing', ['fsync', 'chmod', 'replace'])
def test_an_interruption_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, failing):
  (tmp_path / 'file').write_text('old')

  def fail(*arguments):
    raise KeyboardInterrupt

  monkeypatch.setattr(os, failing, fail)
  with pytest.raises(KeyboardInterrupt):
    storage.write_atomically(tmp_path / 'file', 'new')
  assert os.listdir(tmp_path) == ['file']
  assert (tmp_path / 'file').read_text() == 'old'


def test_a_missing_folder_is_an_os_error(tmp_path):
  with pytest.raises(OSError):
    storage.write_atomically(tmp_path / 'none' / 'file', 'new')


@pytest.mark.parametrize('mask', [0o022, 0o077])
def test_files_have_the_permissions_that_the_user_asks_for(tmp_path, mask):
  before = os.umask(mask)
  try:
    storage.write_atomically(tmp_path / 'file', 'new')
    assert os.umask(mask) == mask  # reading the mask has not changed it
  finally:
    os.umask(before)
  assert stat.S_IMODE((tmp_path / 'file').stat().st_mode) == 0o666 & ~mask


def test_json_lines_hold_no_nan():
  rows = [{'psnr': math.nan, 'mse': np.float32(0.5), 'n': np.int64(3), 'ok': np.bool_(True), 'name': 'ä'}]
  rows.append({'psnr': jnp.float32(-jnp.inf), 'curve': (1.0, math.inf), 'deeper': {'x': np.nan}, 'none': None})
  text = storage.json_lines(rows)
  assert text.endswith('\n') and text.count('\n') == 2
  assert [json.loads(line) for line in text.splitlines()] == [
    {'psnr': None, 'mse': 0.5, 'n': 3, 'ok': True, 'name': 'ä'},
    {'psnr': None, 'curve': [1.0, None], 'deeper': {'x': None}, 'none': None},
  ]
  assert storage.json_lines([]) == ''


def test_plain_is_what_json_gives_back():
  value = {'a': (np.float32(0.1), [jnp.int32(2), math.nan]), 'b': 'text', 'c': True}
  assert json.loads(json.dumps(storage.plain(value))) == storage.plain(value)


def test_the_same_settings_own_the_folder_again(tmp_path):
  open_workdir(tmp_path / 'deep' / 'er')
  # Tuples and NumPy numbers are what JSON makes of them.
  again = open_workdir(tmp_path / 'deep' / 'er', attacks=('csdlg',), trials=np.int64(2))
  assert again.speed == {'group_size': 8}


def test_speed_settings_that_another_process_records_stay(tmp_path):
  one, other = open_workdir(tmp_path / 'work'), open_workdir(tmp_path / 'work')
  one.record_speed(attack_group_size=4)
  other.record_speed(rows_of_x=100)
  one.record_speed(attack_group_size=2)
  recorded = {'group_size': 8, 'attack_group_size': 2, 'rows_of_x': 100}
  assert open_workdir(tmp_path / 'work').speed == recorded


def test_the_first_speed_settings_are_kept(tmp_path):
  open_workdir(tmp_path / 'new')
  assert storage.Workdir(tmp_path / 'new', CONFIG, {'group_size': 3}).speed == {'group_size': 8}


@pytest.mark.parametrize(
  ('changes', 'named', 'unnamed'),
  [
    ({'trials': 3}, ['trials was 2, now 3'], ['steps', 'fingerprint']),
    ({'steps': 7, 'dataset': 'faces'}, ["dataset was 'digits', now 'faces'", 'steps was None, now 7'], ['trials']),
    ({'restarts': 2}, ['restarts was None, now 2'], ['trials']),
    ({'data_fingerprint': 'b', 'trials': 3}, ['trials was 2, now 3'], ['fingerprint']),
    ({'data_fingerprint': 'b'}, ["data_fingerprint was 'a', now 'b'"], ['trials']),
  ],
)
def test_other_settings_are_named_and_nothing_changes(tmp_path, changes, named, unnamed):
  open_workdir(tmp_path / 'new', data_fingerprint='a')
  before = {path: path.read_bytes() for path in (tmp_path / 'new').iterdir() if path.is_file()}
  with pytest.raises(errors.UsageError) as caught:
    open_workdir(tmp_path / 'new', **{'data_fingerprint': 'a', **changes})
  assert all(words in str(caught.value) for words in [*named, str(tmp_path / 'new')])
  assert not any(words in str(caught.value) for words in unnamed)
  assert {path: path.read_bytes() for path in (tmp_path / 'new').iterdir() if path.is_file()} == before


@pytest.mark.parametrize(
  ('now', 'grows'),
  [
    ({'attacks': ['csdlg', 'dlg']}, True),
    ({'attacks': ['dlg', 'csdlg']}, True),  # the order is that of a result, not of what was run
    ({'attacks': ['csdlg', 'mine'], 'attack_texts': {'mine': 'dlg(tv=0)'}}, True),
    ({'attacks': ['csdlg'], 'attack_texts': {'csdlg': 'dlg(tv=0)'}}, False),  # the label stands for something else now
    ({'attacks': []}, False),
    ({'attacks': ['dlg']}, False),
    ({'attacks': ['csdlg', 'dlg'], 'trials': 3}, False),
    ({'attacks': ['csdlg', 'dlg'], 'notes': ['new']}, False),
  ],
)
def test_labels_may_be_added_but_not_taken_away_and_keep_what_they_stand_for(tmp_path, now, grows):
  def opened(**changes):
    return storage.Workdir(tmp_path / 'new', {**CONFIG, **changes}, {}, grows={'attacks': 'attack_texts'})

  opened()
  if not grows:
    with pytest.raises(errors.UsageError, match='belongs to other settings: '):
      opened(**now)
    return
  opened(**now)
  assert json.loads((tmp_path / 'new' / 'config.json').read_text()) == {**CONFIG, **now}
  with pytest.raises(errors.UsageError, match='attacks was'):
    opened()


@pytest.mark.parametrize(
  ('now', 'grows'),
  [
    ({'none': [0, 1], 'clip': [1]}, True),
    ({'clip': [0], 'none': [0, 1, 2]}, True),
    ({'none': [0], 'clip': [1]}, False),
    ({'clip': [0, 1]}, False),
    (None, False),  # all of them, and not some more
  ],
)
def test_numbers_may_be_added_but_not_taken_away(tmp_path, now, grows):
  def opened(only):
    return storage.Workdir(tmp_path / 'new', {**CONFIG, **({'only': only} if only else {})}, {}, extends=['only'])

  opened({'none': [0, 1]})
  if grows:
    opened(now)
    assert json.loads((tmp_path / 'new' / 'config.json').read_text())['only'] == now
    now = {'none': [0, 1]}
  with pytest.raises(errors.UsageError, match='belongs to other settings: only was'):
    opened(now)


@pytest.mark.parametrize('name', ['config.json', 'autoleak.json'])
def test_a_folder_for_several_runs_is_not_that_of_a_run_of_another_kind(tmp_path, name):
  assert storage.gathering(tmp_path) == tmp_path and storage.gathering(tmp_path / 'new') == tmp_path / 'new'
  (tmp_path / name).write_text('{}')
  with pytest.raises(errors.UsageError, match=rf'holds a run of another kind \({name}\), and its rows would be'):
    storage.gathering(tmp_path)
  assert storage.gathering(tmp_path, name) == tmp_path


def test_what_may_be_added_is_not_named_where_something_else_differs(tmp_path):
  def opened(**changes):
    config = {**CONFIG, 'only': {'none': [0]}, 'weights_fingerprint': 'a', **changes}
    return storage.Workdir(tmp_path / 'new', config, {}, grows={'attacks': 'attack_texts'}, extends=['only'])

  opened()
  added = {'attacks': ['csdlg', 'dlg'], 'attack_texts': {'dlg': 'dlg(tv=0)'}, 'only': {'none': [0, 1]}}
  with pytest.raises(errors.UsageError) as caught:
    opened(**added, weights_fingerprint='b')
  said = "other settings: weights_fingerprint was 'a', now 'b'. Choose"
  assert said in str(caught.value)
  opened(**added)


@pytest.mark.parametrize('name', ['config.json', 'speed.json'])
@pytest.mark.parametrize('content', [b'', b'{"dataset": "dig', b'\xff\xfe\x00', b'[]', b'null', b'{"a":' * 10**5])
def test_damaged_settings_are_a_usage_error(tmp_path, name, content):
  open_workdir(tmp_path / 'new')
  (tmp_path / 'new' / name).write_bytes(content)
  with pytest.raises(errors.UsageError, match=rf'{name} is damaged .*; remove the folder to start anew'):
    open_workdir(tmp_path / 'new')
  assert (tmp_path / 'new' / name).read_bytes() == content


def test_a_folder_with_other_files_is_left_alone(tmp_path):
  (tmp_path / 'thesis.tex').write_text('precious')
  with pytest.raises(errors.UsageError, match=r'holds other files and no config\.json'):
    open_workdir(tmp_path)
  assert os.listdir(tmp_path) == ['thesis.tex']


def test_a_file_is_no_folder(tmp_path):
  (tmp_path / 'file').write_text('precious')
  for path in (tmp_path / 'file', tmp_path / 'file' / 'below'):
    with pytest.raises(errors.UsageError, match=f'cannot use the work directory {path}: Not a directory'):
      open_workdir(path)
  assert (tmp_path / 'file').read_text() == 'precious'


@pytest.mark.parametrize('killed_at', ['speed.json', 'config.json'])
def test_a_kill_while_claiming_leaves_the_folder_free(tmp_path, monkeypatch, killed_at):
  write = storage.write_atomically

  def killed(path, content):
    if path.name == killed_at:
      (path.parent / f'.{path.name}.a1b2.tmp').write_text(content[:5])  # as kill -9 leaves it
      raise KeyboardInterrupt
    write(path, content)

  with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
    patch.setattr(storage, 'write_atomically', killed)
    open_workdir(tmp_path / 'new')
  store = open_workdir(tmp_path / 'new', trials=3)
  assert store.speed == {'group_size': 8}
  assert sorted(os.listdir(tmp_path / 'new')) == ['config.json', 'parts', 'speed.json']


def test_what_a_kill_while_writing_leaves_is_removed(tmp_path):
  open_workdir(tmp_path / 'new')
  for name in ('.rows.jsonl.a1b2.tmp', 'parts/.00-csdlg.npz.c3d4.tmp', 'notes.tmp'):
    (tmp_path / 'new' / name).write_text('half')
  open_workdir(tmp_path / 'new')
  assert sorted(os.listdir(tmp_path / 'new')) == ['config.json', 'notes.tmp', 'parts', 'speed.json']
  assert not os.listdir(tmp_path / 'new' / 'parts')


def test_parts(tmp_path):
  store = open_workdir(tmp_path / 'new')
  assert store.load_part('00-csdlg') is None
  rows = [{'psnr': 12.5, 'mse': math.nan, 'verdict': 'diverged', 'solved': False}]
  arrays = {'images': np.full((1, 2), np.nan, np.float32), 'steps': np.arange(3)}
  store.save_checkpoint('00-csdlg', 3, [np.zeros(2)])
  store.save_part('00-csdlg', rows, arrays)
  assert not (tmp_path / 'new' / 'checkpoints').exists()
  found_rows, found = open_workdir(tmp_path / 'new').load_part('00-csdlg')
  assert math.isnan(found_rows[0].pop('mse'))  # kept: a verdict is yet to come of it
  assert found_rows == [{'psnr': 12.5, 'verdict': 'diverged', 'solved': False}]
  assert found.keys() == arrays.keys()
  for key, array in arrays.items():
    np.testing.assert_array_equal(found[key], array)
    assert found[key].dtype == array.dtype
  assert store.load_part('01-dlg') is None


def without_rows(whole):
  """Returns a part that lost its rows, with the digest of those that it had."""
  with np.load(io.BytesIO(whole)) as archive:
    arrays = {**archive, 'rows': '[]'}
  edited = io.BytesIO()
  np.savez(edited, **arrays)
  return edited.getvalue()


@pytest.mark.parametrize(
  'damage', [lambda whole: whole[:-40], lambda whole: b'', lambda whole: b'no archive', without_rows]
)
def test_a_damaged_part_is_a_usage_error(tmp_path, damage):
  store = open_workdir(tmp_path / 'new')
  store.save_part('00-csdlg', [{'psnr': 1.0}], {'images': np.ones((4, 4))})
  path = tmp_path / 'new' / 'parts' / '00-csdlg.npz'
  path.write_bytes(damage(path.read_bytes()))
  with pytest.raises(errors.UsageError, match=r'00-csdlg\.npz is damaged'):
    store.load_part('00-csdlg')


def test_checkpoints(tmp_path):
  store = open_workdir(tmp_path / 'new')
  assert store.load_checkpoint('00-csdlg') is None
  # More leaves than ten, so that their order is no accident of their names.
  leaves = [np.full((i + 1,), i, np.float32) for i in range(12)] + [np.asarray(-1, np.int32)]
  store.save_checkpoint('00-csdlg', 40, tuple(leaves))
  step, found = open_workdir(tmp_path / 'new').load_checkpoint('00-csdlg')
  assert step == 40
  for a, b in zip(found, leaves, strict=True):
    np.testing.assert_array_equal(a, b)
    assert a.dtype == b.dtype
  assert store.load_checkpoint('01-dlg') is None


@pytest.mark.parametrize('seed', range(3))
def test_a_checkpoint_that_is_not_as_it_was_written_is_not_gone_on_from(tmp_path, seed):
  """Orbax reads flipped bytes of an array as other numbers."""
  store, draw = open_workdir(tmp_path / 'new'), np.random.default_rng(seed)
  leaves = [draw.normal(size=(40, 30)).astype(np.float32), np.arange(7)]
  store.save_checkpoint('00-csdlg', 40, leaves)
  largest = max((tmp_path / 'new' / 'checkpoints').rglob('d/*'), key=lambda path: path.stat().st_size)
  content = bytearray(largest.read_bytes())
  content[len(content) // 2 + draw.integers(100)] ^= 1 << draw.integers(8)
  largest.write_bytes(content)
  with pytest.warns(
    storage.Caution, match=r'00-csdlg-00000040 is damaged: what came after the one before is done again'
  ):
    assert store.load_checkpoint('00-csdlg') is None


@pytest.mark.parametrize('part', ['state/_METADATA', 'state/manifest.ocdbt'])
def test_a_checkpoint_without_a_file_is_named_and_orbax_does_not_read_it(tmp_path, monkeypatch, part):
  """A thread of Orbax that fails may report to a loop that is closed by then, on the terminal of whoever runs it."""
  store = open_workdir(tmp_path / 'new')
  store.save_checkpoint('00-csdlg', 40, [np.arange(7)])
  (tmp_path / 'new' / 'checkpoints' / '00-csdlg-00000040' / part).unlink()
  monkeypatch.setattr('orbax.checkpoint.v1.load', lambda path: pytest.fail('a damaged checkpoint is read'))
  with pytest.warns(storage.Caution, match='00-csdlg-00000040 is damaged'):
    assert store.load_checkpoint('00-csdlg') is None


def test_a_whole_checkpoint_that_orbax_cannot_read_is_named(tmp_path, monkeypatch):
  """As one of another version of Orbax may be."""

  def unread(path):
    raise RuntimeError('no such format')

  store = open_workdir(tmp_path / 'new')
  store.save_checkpoint('00-csdlg', 40, [np.arange(7)])
  monkeypatch.setattr('orbax.checkpoint.v1.load', unread)
  with pytest.warns(storage.Caution, match='00-csdlg-00000040 is damaged'):
    assert store.load_checkpoint('00-csdlg') is None


def test_of_a_checkpoint_that_was_not_finished_nothing_is_read(tmp_path):
  """A run killed between a checkpoint and its seal has the one before, and no reason for a caution."""
  store, folder = open_workdir(tmp_path / 'new'), tmp_path / 'new' / 'checkpoints'
  store.save_checkpoint('00-csdlg', 40, [np.arange(7)])
  shutil.copytree(folder / '00-csdlg-00000040', folder / '00-csdlg-00000080')
  (folder / '00-csdlg-00000080' / storage.CHECKPOINT_SEAL).unlink()
  step, (leaf,) = store.load_checkpoint('00-csdlg')
  assert step == 40
  np.testing.assert_array_equal(leaf, np.arange(7))


def test_a_damaged_seal_is_named_and_the_checkpoint_before_is_gone_on_from(tmp_path):
  store, folder = open_workdir(tmp_path / 'new'), tmp_path / 'new' / 'checkpoints'
  store.save_checkpoint('00-csdlg', 40, [np.arange(7)])
  shutil.copytree(folder / '00-csdlg-00000040', folder / '00-csdlg-00000080')
  (folder / '00-csdlg-00000080' / storage.CHECKPOINT_SEAL).write_text('{}')
  with pytest.warns(storage.Caution, match='00-csdlg-00000080 is damaged'):
    assert store.load_checkpoint('00-csdlg')[0] == 40


ARRAYS = {'images': np.linspace(0, 1, 60, dtype=np.float32).reshape(3, 20), 'names': np.array(['a', 'ü'])}


@pytest.mark.parametrize('seed', range(4))
def test_flipped_bytes_of_arrays_are_one_error_whatever_they_hit(tmp_path, seed):
  """The zip, its compression, NumPy's header or the values: each module raises errors of its own."""
  draw, whole = np.random.default_rng(seed), storage.packed(ARRAYS)
  path, refused = tmp_path / 'a.npz', 0
  for _ in range(60):
    content = bytearray(whole)
    content[draw.integers(len(content))] ^= draw.integers(1, 256)
    path.write_bytes(content[: draw.integers(len(content)) if draw.random() < 0.1 else None])
    try:
      found = storage.unpacked(path, 'restore it')
      assert all(np.array_equal(found[name], array) for name, array in ARRAYS.items())  # it hit a date in the zip
    except errors.UsageError as error:
      refused += 1
      assert str(error).startswith(f'{path} is damaged (') and str(error).endswith('); restore it')
    except storage.Caution:  # it hit the name of the digest
      refused += 1
  assert refused > 40


def test_arrays_without_a_digest_are_taken_with_a_caution(tmp_path):
  np.savez(tmp_path / 'old.npz', **ARRAYS)
  with pytest.warns(storage.Caution, match=r'old\.npz is of an earlier version, without a digest'):
    assert set(storage.unpacked(tmp_path / 'old.npz', '')) == set(ARRAYS)
  with pytest.raises(FileNotFoundError):
    storage.unpacked(tmp_path / 'none.npz', '')


def test_a_sealed_result_names_what_differs(tmp_path):
  content = {'rows.jsonl': '{"a": 1}\n{"a": 2}\n', 'x.npz': storage.packed(ARRAYS)}
  for name, one in content.items():
    storage.write_atomically(tmp_path / name, one)
  path = tmp_path / 'result.json'
  storage.seal(
    path, {'seconds': 1.5, 'odd': math.nan, 3: (1, 2)}, {n: storage.description(c) for n, c in content.items()}
  )
  assert storage.sealed(path, '')['3'] == [1, 2] and storage.check_sealed(path, '')
  assert not storage.check_sealed(tmp_path / 'none.json', '')
  for name, change, words in (
    ('rows.jsonl', b'{"a": 1}\n', r'rows.jsonl is damaged \(it has 1 lines, and 2 were written\); restore it'),
    ('rows.jsonl', b'{"a": 1}\n{"a": 3}\n', r'rows.jsonl is damaged \(its SHA-256 is not that of what was written\)'),
    ('rows.jsonl', None, r'rows.jsonl cannot be read \(No such file or directory\); restore it'),
    ('x.npz', b'', r'x.npz is damaged \(its SHA-256'),
    ('result.json', path.read_bytes().replace(b'1.5', b'2.5'), r'result.json is damaged \(its content is not'),
    ('result.json', b'[]', 'result.json is damaged'),
    ('result.json', b'{"seconds": 1.5}', 'of an earlier version, without digests of its files; restore it'),
  ):
    kept = (tmp_path / name).read_bytes()
    (tmp_path / name).unlink()
    if change is not None:
      (tmp_path / name).write_bytes(change)
    with pytest.raises(errors.UsageError, match=words):
      storage.sealed(path, 'restore it')
    (tmp_path / name).write_bytes(kept)


def test_times_that_were_cut_off_are_left_out(tmp_path):
  assert storage.read_times(tmp_path / 'none.jsonl') == []
  storage.append_time(tmp_path / 'timing.jsonl', part='a', seconds=1.5)
  with open(tmp_path / 'timing.jsonl', 'ab') as file:
    file.write(b'{"part": "b", "sec\n[]\n\xff\n{"part": "c"}\n')
  storage.append_time(tmp_path / 'timing.jsonl', part='d', seconds=2.5)
  assert [entry['seconds'] for entry in storage.read_times(tmp_path / 'timing.jsonl')] == [1.5, 2.5]


def test_a_time_behind_one_that_was_cut_off_counts(tmp_path):
  storage.append_time(tmp_path / 'timing.jsonl', part='a', seconds=1.5)
  with open(tmp_path / 'timing.jsonl', 'ab') as file:
    file.write(b'{"part": "b", "sec')  # the disk was full
  for part in 'bc':
    storage.append_time(tmp_path / 'timing.jsonl', part=part, seconds=2.5)
  assert storage.seconds_of_parts(tmp_path / 'timing.jsonl') == 6.5


@pytest.mark.parametrize('content', ['{"group_size": 0}', '{"group_size": "many"}', '{"group_size": true}'])
def test_speed_settings_are_counts(tmp_path, content):
  open_workdir(tmp_path / 'new')
  (tmp_path / 'new' / 'speed.json').write_text(content)
  with pytest.raises(errors.UsageError, match=r'speed\.json is damaged \(group_size is'):
    open_workdir(tmp_path / 'new')


def cheap(store):
  """Makes the next checkpoint due."""
  store._checkpoint_cost = 0.0
  return store


def test_only_the_newest_checkpoint_is_kept(tmp_path):
  store = open_workdir(tmp_path / 'new')
  for step in (5, 10, 15):
    cheap(store).save_checkpoint('00-csdlg', step, [np.full(3, step)])
  assert os.listdir(tmp_path / 'new' / 'checkpoints') == ['00-csdlg-00000015']
  cheap(store).save_checkpoint('00-csdlg', 15, [np.full(3, 16)])  # a resumed run may come by the same step
  assert store.load_checkpoint('00-csdlg')[1][0].tolist() == [16, 16, 16]


def test_what_a_kill_leaves_behind_is_no_checkpoint(tmp_path):
  store = open_workdir(tmp_path / 'new')
  store.save_checkpoint('00-csdlg', 5, [np.full(3, 5)])
  folder = tmp_path / 'new' / 'checkpoints'
  (folder / '00-csdlg-00000010').mkdir()  # being removed
  half = folder / '00-csdlg-00000015'  # being removed, too
  half.mkdir()
  (half / '_CHECKPOINT_METADATA').write_text('{}')
  (folder / '00-csdlg-00000020.orbax-checkpoint-tmp').mkdir()  # being written
  assert store.load_checkpoint('00-csdlg')[0] == 5
  cheap(store).save_checkpoint('00-csdlg', 25, [np.full(3, 25)])
  assert os.listdir(folder) == ['00-csdlg-00000025']


def test_saving_takes_a_tenth_of_the_time_at_most(tmp_path, monkeypatch):
  now = 0.0
  monkeypatch.setattr(storage.time, 'monotonic', lambda: now)
  store = open_workdir(tmp_path / 'new')
  saved = []

  def save(path, leaves, overwrite):
    nonlocal now
    now += 2.0  # seconds that a checkpoint costs
    path.mkdir(parents=True)
    saved.append(int(path.name[-8:]))

  from orbax.checkpoint import v1 as ocp

  monkeypatch.setattr(ocp, 'save', save)
  for step in range(100):
    store.save_checkpoint('00-csdlg', step, [np.zeros(1)])
    now += 1.0  # seconds of work between
  assert saved == [0, 20, 40, 60, 80]


def test_empty_arrays_are_stored_by_their_shape_and_no_arrays_not_at_all(tmp_path):
  store = open_workdir(tmp_path / 'w')
  store.save_checkpoint('part', 0, [], due=True)
  assert store.load_checkpoint('part') is None
  store.save_checkpoint('part', 1, [np.zeros((2, 0), np.int32), np.arange(3.0)], due=True)
  step, (empty, full) = store.load_checkpoint('part')
  assert step == 1 and empty.shape == (2, 0) and empty.dtype == np.int32 and full.tolist() == [0, 1, 2]
