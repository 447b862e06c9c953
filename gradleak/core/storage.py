"""Results on disk: files that are whole or as they were, a folder with an identity, checkpoints to resume from.

What is read again was written with its SHA-256. Arrays hold it among themselves (`packed`), a result has one file that
lists those of the others (`seal`). So what was lost or changed on the way is refused, and named.
"""

import contextlib
import errno
import hashlib
import io
import json
import os
import pathlib
import re
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from gradleak.core import errors
from gradleak.core.trees import Tree

# What a kill leaves of a folder that was being claimed.
_CLAIM = re.compile(r'speed\.json|\.lock.*|\.(speed|config)\.json\..*\.tmp')
_RESULTS = ('config.json', 'autoleak.json')  # a file of each kind of run whose rows stand in its folder
_IN_JSON: dict[type, str] = {dict: 'an object', list: 'a list'}
CHECKPOINT_SEAL = 'seal.json'  # name of the file, in the folder of a checkpoint, that says what its others must be
SEAL = '_sha256'  # name of the digest among the arrays, and among the facts, that it is of


def write_atomically(path: Any, content: bytes | str) -> None:
  """Writes `content` (bytes, or a string as UTF-8) to `path`: a kill at any moment leaves the old file or the new.

  Raises:
    OSError: if the folder does not exist or cannot be written; `path` is then untouched.
  """
  path = pathlib.Path(path)
  content = content.encode('utf-8') if isinstance(content, str) else content
  with naming(path):
    descriptor, temporary = tempfile.mkstemp(prefix=f'.{path.name}.', suffix='.tmp', dir=path.parent)
    try:
      with os.fdopen(descriptor, 'wb') as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
      os.chmod(temporary, 0o666 & ~_umask())  # mkstemp gives access to the owner only
      os.replace(temporary, path)
    except BaseException:
      with contextlib.suppress(OSError):  # of a file system that has become read-only
        os.unlink(temporary)
      raise


def made_folder(path: Any) -> pathlib.Path:
  """Returns a folder that a user names, made if it does not exist.

  Raises:
    UsageError: for anything but a path, for that of a file, and where none can be.
  """
  folder = errors.check_path('the folder', path)
  if folder.exists() and not folder.is_dir():
    raise errors.UsageError(f'the folder is {errors.shown(str(folder))}, which is a file')
  try:
    folder.mkdir(parents=True, exist_ok=True)
  except (FileNotFoundError, NotADirectoryError) as error:  # in /proc, and below a file
    raise errors.UsageError(f'the folder {folder} cannot be made: {error.strerror}') from error
  return folder


def gathering(path: Any, own: str = '') -> pathlib.Path:
  """Returns a folder, which need not exist, that is to hold a folder for each of several runs.

  Args:
    path: of the folder.
    own: name of the file, one of `_RESULTS`, that makes a result of it.

  Raises:
    UsageError: for anything but a path, and for the folder of a run of another kind, whose files would be overwritten.
  """
  folder = errors.check_path('workdir', path)
  for name in _RESULTS:
    if name != own and (folder / name).exists():
      raise errors.FolderError(
        f'the work directory {folder} holds a run of another kind ({name}), and its rows would be overwritten: choose '
        'another folder'
      )
  return folder


@contextlib.contextmanager
def naming(path: Any) -> Iterator[None]:
  """Makes errors of the operating system name the file at `path`."""
  try:
    yield
  except OSError as error:
    error.filename, error.filename2 = str(path), None
    raise


def _umask() -> int:
  mask = os.umask(0)
  os.umask(mask)
  return mask


def computed_once(path: Any, compute: Callable[[], Any]) -> Any:
  """Returns the value of `compute()`, plain JSON, stored in a file; if the file exists, the value in it.

  Raises:
    UsageError: if the file is damaged.
  """
  path = pathlib.Path(path)
  if not path.exists():
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(compute()) + '\n')
  return read_json(path, 'remove it to compute it anew')


def _content(path: Any) -> bytes:
  """Returns what a file holds; raises `FileNotFoundError` where there is none, also below a file."""
  try:
    return pathlib.Path(path).read_bytes()
  except NotADirectoryError as error:
    raise FileNotFoundError(error.errno, error.strerror, error.filename) from error


def read_json(path: Any, advice: str, kind: type = object) -> Any:
  """Returns what a JSON file holds.

  Args:
    path: of the file.
    advice: what to do if it is damaged.
    kind: the type that it should hold.

  Raises:
    FileNotFoundError: if there is none.
    UsageError: for anything else that cannot be read: neither UTF-8 nor JSON, JSON without end, another type.
  """
  try:
    found = json.loads(_content(path).decode('utf-8'))
    return errors.check_instance('its content', found, kind, _IN_JSON.get(kind, kind.__name__))
  except FileNotFoundError:
    raise
  except (OSError, ValueError, RecursionError) as error:
    raise damaged(path, error, advice) from error


def read_json_lines(path: Any, advice: str) -> list[dict]:
  """Returns the objects of a file with one per line; arguments and errors are those of `read_json`."""
  try:
    lines = _content(path).decode('utf-8').splitlines()
    return [errors.check_instance('a line', json.loads(line), dict, _IN_JSON[dict]) for line in lines]
  except FileNotFoundError:
    raise
  except (OSError, ValueError, RecursionError) as error:
    raise damaged(path, error, advice) from error


def damaged(path: Any, reason: object, advice: str) -> errors.FolderError:
  """Returns the error for a file that cannot be read, or is not as it was written; it names the file and what to do."""
  what = 'cannot be read' if isinstance(reason, OSError) else 'is damaged'
  why = getattr(reason, 'strerror', None) or reason
  return errors.FolderError(f'{path} {what} ({why or type(reason).__name__}); {advice}')


def packed(arrays: Mapping[str, Any]) -> bytes:
  """Returns arrays as a compressed `.npz`, with a digest of their names, types, shapes and values among them."""
  buffer, found = io.BytesIO(), {name: np.asarray(array) for name, array in arrays.items()}
  np.savez_compressed(buffer, **found, **{SEAL: _digest_of_arrays(found)})  # type: ignore[arg-type]
  return buffer.getvalue()


def unpacked(path: Any, advice: str) -> dict[str, np.ndarray]:
  """Returns the arrays in a file of `packed`; raises as `read_arrays` and `check_digest` do."""
  return check_digest(path, read_arrays(path, advice), advice)


def read_arrays(path: Any, advice: str) -> dict[str, np.ndarray]:
  """Returns the arrays in an `.npz` by name; nothing in it is run.

  Args:
    path: of the file.
    advice: what to do if it is damaged.

  Raises:
    FileNotFoundError: if there is none.
    UsageError: for whatever else hinders the reading.
  """
  try:
    with np.load(io.BytesIO(_content(path)), allow_pickle=False) as archive:
      return {name: archive[name] for name in archive.files}
  except FileNotFoundError:
    raise
  except Exception as error:  # of zip, of zlib, of NumPy's header, of its memory: they are documented nowhere
    raise damaged(path, error, advice) from error


def check_digest(path: Any, arrays: dict[str, np.ndarray], advice: str) -> dict[str, np.ndarray]:
  """Returns the arrays of `packed` without their digest, compared with it.

  Those without one, of an earlier version, are taken as they are, with a `Caution`.

  Args:
    path, advice: as in `read_arrays`.
    arrays: what it returned.

  Raises:
    UsageError: for arrays that are not those of the digest.
  """
  wanted = arrays.pop(SEAL, None)
  if wanted is None:
    warnings.warn(f'{path} is of an earlier version, without a digest, and is taken as it is', Caution, stacklevel=3)
  elif not np.array_equal(wanted, _digest_of_arrays(arrays)):
    raise damaged(path, 'its arrays are not those of its digest', advice)
  return arrays


def _digest_of_arrays(arrays: Mapping[str, np.ndarray]) -> np.ndarray:
  """Returns the SHA-256 of named arrays, uint8 [32]; byte orders, which NumPy does not keep of all types, aside."""
  found = hashlib.sha256()
  for name in sorted(arrays):
    array = arrays[name]
    found.update(json.dumps([name, array.dtype.str[1:], array.shape]).encode())
    found.update(array.tobytes())
  return np.frombuffer(found.digest(), np.uint8)


def description(content: bytes | str) -> dict[str, Any]:
  """Returns what a sealed result says of a file: its number of lines and its SHA-256."""
  content = content.encode('utf-8') if isinstance(content, str) else content
  return {'lines': content.count(b'\n'), 'sha256': hashlib.sha256(content).hexdigest()}


def seal(path: Any, facts: Mapping[str, Any], files: Mapping[str, Mapping[str, Any]]) -> None:
  """Writes the file that makes a result of a folder: facts, and what its other files must be.

  Args:
    path: of the file.
    facts: plain JSON.
    files: name of a file in this folder -> its `description`.
  """
  content = json.loads(json.dumps({**facts, 'files': files}))  # as it will be read
  write_atomically(path, json.dumps({**content, SEAL: digest(content)}, indent=2))


def sealed(path: Any, advice: str, renewed: Collection[str] = ()) -> dict[str, Any]:
  """Returns the facts in a file of `seal`, and its 'files', after each of these was compared with the folder.

  Args:
    path: of the file.
    advice: what to do if a file is damaged.
    renewed: names of files that may be missing, because they are made anew.

  Raises:
    FileNotFoundError: if there is none.
    UsageError: for a file that is missing or not as it was sealed; names it and what differs.
  """
  path = pathlib.Path(path)
  facts = read_json(path, advice, dict)
  if SEAL not in facts:
    raise errors.UsageError(f'{path} is of an earlier version, without digests of its files; {advice}')
  if facts.pop(SEAL) != digest(facts):
    raise damaged(path, 'its content is not that of its digest', advice)
  for name, wanted in facts['files'].items():
    place = path.parent / name
    try:
      found = description(place.read_bytes())
    except OSError as error:
      if name in renewed and not place.exists():
        continue
      raise damaged(place, error, advice) from error
    if found != wanted:
      many = f'it has {found["lines"]} lines, and {wanted["lines"]} were written'
      same = 'its SHA-256 is not that of what was written'
      raise damaged(place, same if place.suffix == '.npz' or found['lines'] == wanted['lines'] else many, advice)
  return facts


def check_sealed(path: Any, advice: str, renewed: Collection[str] = ()) -> bool:
  """Returns whether there is a file of `seal`; arguments and errors are those of `sealed`."""
  try:
    sealed(path, advice, renewed)
  except FileNotFoundError:
    return False
  return True


def append_time(path: Any, **entry: Any) -> None:
  """Appends a line to a file of times, which stand apart from rows: these are the same whenever they are made.

  A line that a full disk or a kill cut off is ended first.
  """
  with naming(path), open(path, 'ab+') as file:
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - 1))
    cut_off = file.read(1) not in (b'', b'\n')
    file.write(b'\n' * cut_off + json_lines([entry]).encode('utf-8'))


def read_times(path: Any) -> list[dict]:
  """Returns the entries of a file of times; those that a full disk or a kill cut off are left out."""
  try:
    lines = _content(path).splitlines()
  except FileNotFoundError:
    return []
  entries = []
  for line in lines:
    with contextlib.suppress(ValueError, RecursionError):
      entries.append(json.loads(line))
  return [entry for entry in entries if isinstance(entry, dict) and isinstance(entry.get('seconds'), float)]


def times_of_parts(path: Any) -> list[dict]:
  """Returns the entry of each 'part' in a file of times; of a part that was run twice the last one."""
  return list({entry.get('part'): entry for entry in read_times(path)}.values())


def seconds_of_parts(path: Any) -> float:
  """Returns the seconds behind all parts of a file of times."""
  return sum(entry['seconds'] for entry in times_of_parts(path))


def digest(facts: Mapping[str, Any]) -> str:
  """Returns the SHA-256 of plain JSON; the order of its names makes no difference."""
  return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def folder_name(number: int, text: str) -> str:
  """Returns a folder's name for the `number`-th of several: '03-topk-ratio-0-1'."""
  return f'{number:02}-{re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")}'


def json_lines(rows: Iterable[Mapping]) -> str:
  """Returns one JSON object per line; NaN becomes null."""
  return ''.join(json.dumps(plain(row), allow_nan=False) + '\n' for row in rows)


def plain(value: Any, finite: bool = True) -> Any:
  """Returns `value` as plain JSON: NumPy and JAX scalars as Python's, and if `finite` NaN and infinity as None."""
  if isinstance(value, dict):
    return {key: plain(item, finite) for key, item in value.items()}
  if isinstance(value, list | tuple):
    return [plain(item, finite) for item in value]
  if isinstance(value, np.generic) or (hasattr(value, 'ndim') and value.ndim == 0):
    value = value.item()
  return None if finite and isinstance(value, float) and not np.isfinite(value) else value


class Caution(UserWarning):
  """What a user should know of a file, and what stops nothing; programs print it on one line."""


class Workdir:
  """A folder that belongs to one set of scientific settings.

  It holds `config.json` (the settings), `speed.json`, and what is rendered from the parts. `parts/` holds the results
  of each compiled attack, written when that attack is complete; `checkpoints/` holds the state of the attack that runs.

  Attributes:
    path: of the folder.
    speed: the speed settings in use.
    writes: whether this process writes.
  """

  path: pathlib.Path
  speed: dict[str, Any]
  writes: bool

  def __init__(
    self,
    path: Any,
    config: Mapping[str, Any],
    speed: Mapping[str, Any],
    shared: bool = False,
    together: bool = False,
    grows: Mapping[str, str] | None = None,
    extends: Sequence[str] = (),
  ) -> None:
    """Claims `path` for `config`, or checks that it was claimed for the same.

    Args:
      path: the folder; made if it does not exist.
      config: the scientific settings, plain JSON; they are the folder's identity.
      speed: settings that affect speed and rounding only, such as the micro-group size. Those of the first run are kept
        and reused.
      shared: whether other processes work in the same folder at the same time; their files are then left alone.
      together: whether all processes of `jax.distributed` make the same calls on the same folder; the first one writes.
      grows: {list of labels: what they stand for, {label: text}}, names of settings to which entries may be added
        later; `config.json` is then updated.
      extends: names of settings {label: numbers} to which labels and numbers may be added later, likewise.

    Raises:
      UsageError: if the folder belongs to other settings (names them), is not a folder, holds other files, or cannot be
        written. Nothing is left behind then.
    """
    self.path, self._shared, self._together = errors.check_path('the work directory', path), shared, together
    self.writes = not together or jax.process_index() == 0
    self._checkpoint_cost = 0.0
    self._checkpoint_time = time.monotonic()
    if not self.writes:
      multihost_utils.sync_global_devices('the work directory is claimed')
    try:
      _claim(self.path, plain(config), dict(speed), grows or {}, extends, self.writes)
      if self.writes and not shared:
        for leftover in (*self.path.glob('.*.tmp'), *self.path.glob('parts/.*.tmp')):  # of a kill while writing
          leftover.unlink(missing_ok=True)
      self.speed = {**speed, **_counts(self.path / 'speed.json')}
    except OSError as error:
      raise errors.FolderError(f'cannot use the work directory {path}: {error.strerror or error}') from error
    if together and self.writes:
      multihost_utils.sync_global_devices('the work directory is claimed')

  def record_speed(self, **changes: Any) -> None:
    """Records speed settings that a run had to change, such as a group size that does not fit the memory.

    Those that other processes have recorded in the meantime stay.
    """
    self.speed = {**self.speed, **_counts(self.path / 'speed.json'), **changes}
    if self.writes:
      write_atomically(self.path / 'speed.json', json.dumps(self.speed, indent=2))

  def load_part(self, name: str) -> tuple[list[dict], dict[str, np.ndarray]] | None:
    """Returns the (rows, arrays) of a completed part, or None.

    Raises:
      UsageError: if the file is damaged.
    """
    path, advice = self.path / 'parts' / f'{name}.npz', 'remove it to compute it anew, or restore it'
    try:
      arrays = unpacked(path, advice)
      return json.loads(arrays.pop('rows').item()), arrays
    except FileNotFoundError:
      return None
    except errors.UsageError:
      raise
    except (KeyError, ValueError, RecursionError) as error:
      raise damaged(path, error, advice) from error

  def save_part(self, name: str, rows: list[dict], arrays: Mapping[str, np.ndarray]) -> None:
    """Writes a completed part and removes its checkpoints."""
    if not self.writes:
      return
    content = packed({'rows': json.dumps(plain(rows, finite=False)), **arrays})
    write_atomically(self.path / 'parts' / f'{name}.npz', content)
    self._forget_checkpoints(name)

  def _forget_checkpoints(self, name: str, kept: str | None = None) -> None:
    """Removes all checkpoints but one; in a shared folder only those of `name`."""
    folder = self.path / 'checkpoints'
    for other in folder.glob(f'{name}-*' if self._shared else '*'):
      if other.name != kept:
        shutil.rmtree(other, ignore_errors=True)
    if kept is None:
      with contextlib.suppress(OSError):  # absent, or with checkpoints of another process
        folder.rmdir()

  def save_checkpoint(self, name: str, step: int, tree: Tree | Callable[[], Tree], due: bool = False) -> None:
    """Saves a checkpoint, unless that would take more than a tenth of the time since the last one.

    Orbax writes a new folder and renames it, and its files are sealed. A kill leaves this checkpoint or the one before.

    Args:
      name: of the part.
      step: how far it is.
      tree: arrays, or a function that returns them.
      due: save in any case.
    """
    wanted = due or time.monotonic() - self._checkpoint_time >= 10 * self._checkpoint_cost
    if self._together:  # Orbax saves in all processes at once, which a failed device cannot
      wanted = not due and bool(multihost_utils.broadcast_one_to_all(np.asarray(wanted)))
    if not wanted:
      return
    from orbax.checkpoint import v1 as ocp

    started = time.monotonic()
    tree = tree() if callable(tree) else tree
    folder = (self.path / 'checkpoints').absolute()
    leaves = dict(_named(i, np.asarray(leaf)) for i, leaf in enumerate(jax.tree.leaves(tree)))
    if not leaves:
      return
    with naming(folder / f'{name}-{step:08}'):
      os.rmdir(tempfile.mkdtemp(dir=made_folder(folder)))  # where this fails, a thread of Orbax would wait five minutes
      ocp.save(folder / f'{name}-{step:08}', leaves, overwrite=True)
    if self.writes:
      _seal_checkpoint(folder / f'{name}-{step:08}')
      self._forget_checkpoints(name, kept=f'{name}-{step:08}')
    self._checkpoint_time = time.monotonic()
    self._checkpoint_cost = self._checkpoint_time - started

  def load_checkpoint(self, name: str) -> tuple[int, list[np.ndarray]] | None:
    """Returns (step, leaves) of the newest whole checkpoint of `name`, or None; a `Caution` names a damaged one."""
    folder = (self.path / 'checkpoints').absolute()
    found = sorted(folder.glob(f'{name}-????????')) if folder.is_dir() else []
    for path in reversed(found):
      try:
        if check_sealed(path / CHECKPOINT_SEAL, ''):  # else the run was killed while it was written
          return int(path.name[-8:]), _checkpoint(path)
      except Exception:  # of a file that is not as it was sealed; or of Orbax, which does not document its errors
        warnings.warn(f'the checkpoint {path} is damaged: what came after the one before is done again', Caution, 2)
    return None


def _seal_checkpoint(path: pathlib.Path) -> None:
  """Writes what the files of a checkpoint must be.

  Orbax checks no sums. Where it fails to read a file, some of its threads may report to a loop that is closed by then.
  """
  files = {str(file.relative_to(path)): description(file.read_bytes()) for file in path.rglob('*') if file.is_file()}
  seal(path / CHECKPOINT_SEAL, {}, files)


def _checkpoint(path: pathlib.Path) -> list[np.ndarray]:
  """Returns the leaves in a checkpoint whose files are as they were written."""
  from orbax.checkpoint import v1 as ocp

  leaves = ocp.load(path)
  return [_leaf(name, np.asarray(leaves[name])) for name in sorted(leaves)]


def _named(index: int, leaf: np.ndarray) -> tuple[str, np.ndarray]:
  """Returns the (name, array) under which Orbax stores a leaf; an empty one, which it refuses, as its shape."""
  if leaf.size:
    return f'{index:04}', leaf
  return f'{index:04}_{"x".join(map(str, leaf.shape))}', np.zeros(1, leaf.dtype)


def _leaf(name: str, stored: np.ndarray) -> np.ndarray:
  """Returns the leaf that `_named` stored."""
  shape = name[5:]
  return np.zeros(tuple(map(int, shape.split('x'))), stored.dtype) if shape else stored


def _claim(
  path: pathlib.Path, config: dict, speed: dict, grows: Mapping[str, str], extends: Sequence[str], writes: bool
) -> None:
  """Makes a folder and writes its settings, or checks that it has the same; raises as `Workdir` does."""
  if path.exists() and not path.is_dir():
    raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
  known = _read(path / 'config.json')
  others = known is None and path.is_dir() and any(not _CLAIM.fullmatch(entry.name) for entry in path.iterdir())
  if others:
    known = _read(path / 'config.json')  # another share of the work may have begun in between
  if known is None and not writes:
    raise errors.FolderError(f'{path} holds no config.json: all processes need to see the same work directory')
  if known is None:
    if others:
      raise errors.FolderError(
        f'the work directory {path} holds other files and no config.json: choose an empty or new one'
      )
    path.mkdir(parents=True, exist_ok=True)
    write_atomically(path / 'speed.json', json.dumps(speed, indent=2))
  elif differing := _differing(known, config, grows, extends):
    # Derived values are named only if nothing else differs.
    differing = [key for key in differing if not key.endswith(('key', 'fingerprint'))] or differing
    changes = '; '.join(f'{key} was {known.get(key)!r}, now {config.get(key)!r}' for key in differing)
    raise errors.FolderError(
      f'the work directory {path} belongs to other settings: {changes}. '
      'Choose another directory, or the same settings to resume'
    )
  if writes:
    if known != config:
      write_atomically(path / 'config.json', json.dumps(config, indent=2))
    (path / 'parts').mkdir(exist_ok=True)


def _differing(known: dict, config: dict, grows: Mapping[str, str], extends: Sequence[str]) -> list[str]:
  """Returns the settings in which `config` is not `known`, but for what may be added to it."""
  texts = {name: labels for labels, name in grows.items()}

  def entries(settings: dict, labels: str) -> set:
    found = settings.get(grows[labels], {})
    return {(label, found.get(label)) for label in settings.get(labels, ())}

  def numbers(settings: dict, name: str) -> set:
    return {(label, number) for label, found in settings[name].items() for number in found}

  def added(name: str) -> bool:
    labels = texts.get(name, name)
    if labels in grows:
      return entries(known, labels) <= entries(config, labels)
    return name in extends and name in known and name in config and numbers(known, name) <= numbers(config, name)

  names = [name for name in {**known, **config} if known.get(name, ...) != config.get(name, ...)]
  return [name for name in names if not added(name)]


def _counts(path: pathlib.Path) -> dict[str, int]:
  """Returns the speed settings in a file, which are positive integers; raises `UsageError` for anything else."""
  found = _read(path) or {}
  for name, value in found.items():
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
      raise damaged(path, f'{name} is {errors.shown(value)}', 'remove the folder to start anew')
  return found


def _read(path: pathlib.Path) -> dict | None:
  """Returns the settings in a JSON file, or None if it does not exist."""
  try:
    return read_json(path, 'remove the folder to start anew', dict)
  except FileNotFoundError:
    return None
