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

import jax
import numpy as np
from jax.experimental import multihost_utils

from gradleak import errors

_CLAIM = re.compile(r'speed\.json|\.(speed|config)\.json\..*\.tmp')


def write_atomically(path, content):
  """Writes `content` (bytes, or a string as UTF-8) to `path`: a kill at any moment leaves the old file or the new.

  Raises:
    OSError: if the folder does not exist or cannot be written; `path` is then untouched.
  """
  path = pathlib.Path(path)
  content = content.encode('utf-8') if isinstance(content, str) else content
  descriptor, temporary = tempfile.mkstemp(prefix=f'.{path.name}.', suffix='.tmp', dir=path.parent)
  try:
    with os.fdopen(descriptor, 'wb') as file:
      file.write(content)
      file.flush()
      os.fsync(file.fileno())
    os.chmod(temporary, 0o666 & ~_umask())  # mkstemp makes files for their owner alone
    os.replace(temporary, path)
  except BaseException:
    os.unlink(temporary)
    raise


def _umask():
  mask = os.umask(0)
  os.umask(mask)
  return mask


def computed_once(path, compute):
  """Returns what `compute()` returned when it was first called for this file, plain JSON; its folder is made."""
  path = pathlib.Path(path)
  if not path.exists():
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(compute()) + '\n')
  return json.loads(path.read_text('utf-8'))


def folder_name(number, text):
  """Returns a folder's name for the `number`-th of several: '03-topk-ratio-0-1'."""
  return f'{number:02}-{re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")}'


def json_lines(rows):
  """Returns one JSON object per line; NaN becomes null."""
  return ''.join(json.dumps(plain(row), allow_nan=False) + '\n' for row in rows)


def plain(value, finite=True):
  """Returns `value` as plain JSON: NumPy and JAX scalars as Python's and, if `finite`, other values as None."""
  if isinstance(value, dict):
    return {key: plain(item, finite) for key, item in value.items()}
  if isinstance(value, list | tuple):
    return [plain(item, finite) for item in value]
  if isinstance(value, np.generic) or (hasattr(value, 'ndim') and value.ndim == 0):
    value = value.item()
  return None if finite and isinstance(value, float) and not np.isfinite(value) else value


class Workdir:
  """A folder that belongs to one set of scientific settings.

  It holds `config.json` (the settings), `parts/` (what each compiled attack found, written once it is complete),
  `checkpoints/` (the attack in progress) and whatever is rendered from the parts.
  """

  def __init__(self, path, config, speed, shared=False, together=False):
    """Claims `path` for `config`, or finds it claimed for the same.

    Args:
      path: the folder; made if it does not exist.
      config: the scientific settings, plain JSON; they are the folder's identity.
      speed: settings that change no figure in kind but bits, as the micro-group size: the first run's are kept and
        reused, and readable as `self.speed`.
      shared: whether other processes work in the same folder at the same time; then nothing of theirs is cleared away.
      together: whether all processes of `jax.distributed` make the same calls on the same folder; the first one writes.

    Raises:
      UsageError: if the folder belongs to other settings (names them), is no folder, holds other files, or cannot be
        written. Nothing is left behind then.
    """
    self.path, self._shared, self._together = pathlib.Path(path), shared, together
    self.writes = not together or jax.process_index() == 0
    if not self.writes:
      multihost_utils.sync_global_devices('the work directory is claimed')
    self._checkpoint_cost = 0.0
    self._checkpoint_time = time.monotonic()
    config = plain(config)
    try:
      known = self._read('config.json')
      if known is None and not self.writes:
        raise errors.UsageError(f'{self.path} holds no config.json: all processes need to see the same work directory')
      if known is None:
        # A kill while the folder was claimed leaves it with speed.json, or parts of these two.
        if self.path.is_dir() and any(not _CLAIM.fullmatch(entry.name) for entry in self.path.iterdir()):
          raise errors.UsageError(
            f'the work directory {self.path} holds other files and no config.json: choose an empty or new one'
          )
        self.path.mkdir(parents=True, exist_ok=True)
        write_atomically(self.path / 'speed.json', json.dumps(speed, indent=2))
        write_atomically(self.path / 'config.json', json.dumps(config, indent=2))
      elif known != config:
        differing = [key for key in {**known, **config} if known.get(key, ...) != config.get(key, ...)]
        # Derived values are named only where nothing explains them.
        differing = [key for key in differing if not key.endswith(('key', 'fingerprint'))] or differing
        changes = '; '.join(f'{key} was {known.get(key)!r}, now {config.get(key)!r}' for key in differing)
        raise errors.UsageError(
          f'the work directory {path} belongs to other settings: {changes}. '
          'Choose another directory, or the same settings to resume'
        )
      if self.writes:
        (self.path / 'parts').mkdir(exist_ok=True)
      if self.writes and not shared:
        for leftover in (*self.path.glob('.*.tmp'), *self.path.glob('parts/.*.tmp')):  # of a kill while writing
          leftover.unlink(missing_ok=True)
      self.speed = self._read('speed.json') or speed
      if together and self.writes:
        multihost_utils.sync_global_devices('the work directory is claimed')
    except OSError as error:
      raise errors.UsageError(f'cannot use the work directory {path}: {error.strerror or error}') from error

  def _read(self, name):
    try:
      content = json.loads((self.path / name).read_text('utf-8'))
    except FileNotFoundError:
      return None
    except ValueError as error:  # neither JSON nor UTF-8
      raise errors.UsageError(f'{self.path / name} is damaged ({error}); remove the folder to start anew') from error
    if not isinstance(content, dict):
      raise errors.UsageError(f'{self.path / name} is damaged (no settings in it); remove the folder to start anew')
    return content

  def record_speed(self, **changes):
    """Records settings that a run had to change, as a group size that does not fit the memory."""
    self.speed = {**self.speed, **changes}
    if self.writes:
      write_atomically(self.path / 'speed.json', json.dumps(self.speed, indent=2))

  def load_part(self, name):
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

  def save_part(self, name, rows, arrays):
    """Writes a completed part and forgets its checkpoints."""
    if not self.writes:
      return
    buffer = io.BytesIO()
    np.savez_compressed(buffer, rows=json.dumps(plain(rows, finite=False)), **arrays)
    write_atomically(self.path / 'parts' / f'{name}.npz', buffer.getvalue())
    self._forget_checkpoints(name)

  def _forget_checkpoints(self, name, kept=None):
    """Removes the checkpoints but one: all others, or those of `name` where other processes have theirs."""
    folder = self.path / 'checkpoints'
    for other in folder.glob(f'{name}-*' if self._shared else '*'):
      if other.name != kept:
        shutil.rmtree(other, ignore_errors=True)
    if kept is None:
      with contextlib.suppress(OSError):  # absent, or another process has checkpoints there
        folder.rmdir()

  def save_checkpoint(self, name, step, tree, due=False):
    """Saves `tree`, or what it returns, unless that would take more than a tenth of the time since the last one.

    Orbax writes beside and renames, so that a kill leaves this checkpoint or the one before.
    """
    wanted = due or time.monotonic() - self._checkpoint_time >= 10 * self._checkpoint_cost
    if self._together:  # Orbax has all processes save; a device that failed answers nobody
      wanted = not due and bool(multihost_utils.broadcast_one_to_all(np.asarray(wanted)))
    if not wanted:
      return
    from orbax.checkpoint import v1 as ocp

    started = time.monotonic()
    tree = tree() if callable(tree) else tree
    folder = (self.path / 'checkpoints').absolute()
    leaves = {f'{i:04}': np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves(tree))}
    ocp.save(folder / f'{name}-{step:08}', leaves, overwrite=True)
    if self.writes:
      self._forget_checkpoints(name, kept=f'{name}-{step:08}')
    self._checkpoint_time = time.monotonic()
    self._checkpoint_cost = self._checkpoint_time - started

  def load_checkpoint(self, name):
    """Returns (step, leaves) of the newest whole checkpoint of `name`, or None."""
    from orbax.checkpoint import v1 as ocp

    folder = (self.path / 'checkpoints').absolute()
    found = sorted(folder.glob(f'{name}-????????')) if folder.is_dir() else []
    for path in reversed(found):
      try:
        leaves = ocp.load(path)
      except Exception:  # what a kill left of it, or of its removal: Orbax documents no closed list
        continue
      return int(path.name[-8:]), [np.asarray(leaves[key]) for key in sorted(leaves)]
    return None
