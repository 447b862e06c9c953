"""Results on disk: files that are whole or as they were, a folder with an identity, checkpoints to resume from."""

import contextlib
import io
import json
import os
import pathlib
import re
import shutil
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from gradleak import errors
from gradleak.trees import Tree

# What a kill leaves of a folder that was being claimed.
_CLAIM = re.compile(r'speed\.json|\.(speed|config)\.json\..*\.tmp')


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
      os.chmod(temporary, 0o666 & ~_umask())  # mkstemp makes files for their owner alone
      os.replace(temporary, path)
    except BaseException:
      with contextlib.suppress(OSError):  # of a file system that has become read-only
        os.unlink(temporary)
      raise


def made_folder(path: Any) -> pathlib.Path:
  """Returns a folder that a user names, made if it does not exist.

  Raises:
    UsageError: for anything but a path, and for that of a file.
  """
  folder = errors.check_path('the folder', path)
  if folder.exists() and not folder.is_dir():
    raise errors.UsageError(f'the folder is {errors.shown(str(folder))}, which is a file')
  folder.mkdir(parents=True, exist_ok=True)
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
  """Returns the value of `compute()`, plain JSON, stored in a file; if the file exists, the value in it."""
  path = pathlib.Path(path)
  if not path.exists():
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(compute()) + '\n')
  return json.loads(path.read_text('utf-8'))


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


class Workdir:
  """A folder that belongs to one set of scientific settings.

  It holds `config.json` (the settings), `speed.json`, `parts/` (the results of each compiled attack, written when it is
  complete), `checkpoints/` (of the attack that runs) and what is rendered from the parts.

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
      self.speed = _read(self.path / 'speed.json') or dict(speed)
    except OSError as error:
      raise errors.UsageError(f'cannot use the work directory {path}: {error.strerror or error}') from error
    if together and self.writes:
      multihost_utils.sync_global_devices('the work directory is claimed')

  def record_speed(self, **changes: Any) -> None:
    """Records speed settings that a run had to change, such as a group size that does not fit the memory."""
    self.speed = {**self.speed, **changes}
    if self.writes:
      write_atomically(self.path / 'speed.json', json.dumps(self.speed, indent=2))

  def load_part(self, name: str) -> tuple[list[dict], dict[str, np.ndarray]] | None:
    """Returns the (rows, arrays) of a completed part, or None.

    Raises:
      UsageError: if the file is damaged.
    """
    path = self.path / 'parts' / f'{name}.npz'
    try:
      with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as archive:
        arrays = {key: archive[key] for key in archive.files}
      return json.loads(arrays.pop('rows').item()), arrays
    except FileNotFoundError:
      return None
    except (OSError, EOFError, KeyError, ValueError, zipfile.BadZipFile) as error:
      raise errors.UsageError(f'{path} is damaged ({error}); remove it to compute it anew') from error

  def save_part(self, name: str, rows: list[dict], arrays: Mapping[str, np.ndarray]) -> None:
    """Writes a completed part and removes its checkpoints."""
    if not self.writes:
      return
    buffer = io.BytesIO()
    np.savez_compressed(buffer, rows=json.dumps(plain(rows, finite=False)), **arrays)  # type: ignore[arg-type]
    write_atomically(self.path / 'parts' / f'{name}.npz', buffer.getvalue())
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

    Orbax writes a new folder and renames it, so that a kill leaves this checkpoint or the one before.

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
      ocp.save(folder / f'{name}-{step:08}', leaves, overwrite=True)
    if self.writes:
      self._forget_checkpoints(name, kept=f'{name}-{step:08}')
    self._checkpoint_time = time.monotonic()
    self._checkpoint_cost = self._checkpoint_time - started

  def load_checkpoint(self, name: str) -> tuple[int, list[np.ndarray]] | None:
    """Returns (step, leaves) of the newest complete checkpoint of `name`, or None."""
    from orbax.checkpoint import v1 as ocp

    folder = (self.path / 'checkpoints').absolute()
    found = sorted(folder.glob(f'{name}-????????')) if folder.is_dir() else []
    for path in reversed(found):
      try:
        leaves = ocp.load(path)
      except Exception:  # incomplete after a kill; Orbax does not document which errors it raises
        continue
      return int(path.name[-8:]), [_leaf(key, np.asarray(leaves[key])) for key in sorted(leaves)]
    return None


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
  known = _read(path / 'config.json')
  if known is None and not writes:
    raise errors.UsageError(f'{path} holds no config.json: all processes need to see the same work directory')
  if known is None:
    if path.is_dir() and any(not _CLAIM.fullmatch(entry.name) for entry in path.iterdir()):
      raise errors.UsageError(
        f'the work directory {path} holds other files and no config.json: choose an empty or new one'
      )
    path.mkdir(parents=True, exist_ok=True)
    write_atomically(path / 'speed.json', json.dumps(speed, indent=2))
  elif differing := _differing(known, config, grows, extends):
    # Derived values are named only if nothing else differs.
    differing = [key for key in differing if not key.endswith(('key', 'fingerprint'))] or differing
    changes = '; '.join(f'{key} was {known.get(key)!r}, now {config.get(key)!r}' for key in differing)
    raise errors.UsageError(
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


def _read(path: pathlib.Path) -> dict | None:
  """Returns the settings in a JSON file, or None if it does not exist."""
  try:
    content = json.loads(path.read_text('utf-8'))
  except FileNotFoundError:
    return None
  except (ValueError, RecursionError) as error:  # neither JSON nor UTF-8, or JSON without end
    raise errors.UsageError(f'{path} is damaged ({error}); remove the folder to start anew') from error
  if not isinstance(content, dict):
    raise errors.UsageError(f'{path} is damaged (no settings in it); remove the folder to start anew')
  return content
