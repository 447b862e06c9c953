"""Stored results of the papers' tables: what a run found, and all that it takes to run it again.

There is a file for each table and scale, such as `results/tables/mini/ffl_1.json`. It has the rows that the table's
figures are computed from, the settings, and the seed. It also has the versions, the revision of the code, and the time.
The pages of results are made from these files alone (`pages`).
"""

import contextlib
import dataclasses
import io
import json
import os
import pathlib
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from experiments.experiment import Experiment, Outcome, duration, gains
from experiments.study import Study
from gradleak.audit import versions
from gradleak.core import errors
from gradleak.core.storage import SEAL, digest, made_folder, plain, read_json, write_atomically

FORMAT = 1
FIGURES = 6  # significant figures of a stored number
ROOT = pathlib.Path(__file__).resolve().parent.parent
PICTURES = 3  # of a table at most
WIDTH = 720  # of a picture, in pixels


class Stored(NamedTuple):
  """A file of results.

  Attributes:
    experiment: name of the table.
    scale, seed: of the run.
    settings: name of a run -> its settings that are not the defaults.
    rows: name of a run -> the rows that the table's figures are computed from.
    versions: what it was made with.
    revision: of the code; ends with '+' if files had been changed since; '' if it is not known.
    seconds: of all its runs.
    pictures: names of the pictures beside the file.
  """

  experiment: str
  scale: str
  seed: int
  settings: dict[str, Any]
  rows: dict[str, list[dict]]
  versions: dict[str, str]
  revision: str
  seconds: float
  pictures: list[str]


def store(
  folder: Any,
  experiment: Experiment,
  scale: str,
  seed: int,
  rows: Mapping[str, list[dict]],
  seconds: float,
  pictures: Sequence[str] = (),
) -> Stored:
  """Stores the results of a table in a folder, in place of earlier ones, and returns them.

  Args:
    folder: such as results/tables; the file goes into its folder of the scale.
    experiment: the `Experiment`, as declared.
    scale, seed: of the run.
    rows: name of a run -> its rows.
    seconds: of all runs.
    pictures: paths of PNGs; three are stored, spread over all, with 256 colours and a width of at most 720 pixels.
  """
  folder, kept, runs = made_folder(os.path.join(folder, scale)), [], experiment.runs
  for path in spread(pictures, PICTURES):
    kept.append(f'{experiment.name}-{len(kept) + 1}.png')
    write_atomically(folder / kept[-1], _small(path))
  compared = {name: {cell.run for cell in experiment.cells if cell.minus == name} | {name} for name in runs}
  about = {name: [cell for cell in experiment.cells if cell.run in compared[name]] for name in runs}
  found = Stored(
    experiment.name,
    scale,
    seed,
    {name: declared(run.scaled(scale)) for name, run in runs.items()},
    {name: _rounded(plain(runs[name].scaled(scale).stored(rows[name], about[name]))) for name in runs},
    versions(),
    revision(ROOT),
    round(seconds, 1),
    kept,
  )
  write_atomically(folder / f'{experiment.name}.json', _text(found))
  return found


def spread(items: Sequence[Any], count: int) -> list[Any]:
  """Returns at most `count` of the items, the first, the last and those evenly between them."""
  return [items[round(i)] for i in np.linspace(0, len(items) - 1, min(count, len(items)))]


def read(folder: Any, scale: str) -> dict[str, Stored]:
  """Returns name -> results of all tables stored at a scale.

  Raises:
    UsageError: for a damaged file, and for a file in place of the folder; names it.
  """
  found = {}
  if pathlib.Path(folder).is_file():
    raise errors.UsageError(f'the folder of stored results is {folder}, which is a file')
  for path in sorted(pathlib.Path(folder, scale).glob('*.json')):
    try:
      content = read_json(path, 'delete it and run the table again', dict)
      if content.pop(SEAL, None) not in (None, digest(content)):  # those of earlier versions have none
        raise ValueError('its content is not that of its digest')
      if content.pop('format') != FORMAT:
        raise ValueError('another format')
      one = Stored(**content)
    except errors.UsageError:
      raise
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
      raise errors.UsageError(f'{path} is damaged ({error}): delete it and run the table again') from error
    found[one.experiment] = one
  return found


def current(stored: Stored, experiment: Experiment) -> bool:
  """Returns whether results were made with the settings that the table declares now."""
  return stored.settings == {name: declared(run.scaled(stored.scale)) for name, run in experiment.runs.items()}


def outcomes(stored: Stored, experiment: Experiment) -> list[Outcome]:
  """Returns the `Outcome` of each cell, computed from the stored rows."""
  runs = {name: run.scaled(stored.scale) for name, run in experiment.runs.items()}
  return [runs[cell.run].outcome(cell, gains(cell, stored.rows)) for cell in experiment.cells]


def done(stored: Stored | None, experiment: Experiment, seed: int) -> bool:
  """Returns whether a table need not be run again: its results are there, of this seed and of its settings."""
  return stored is not None and stored.seed == seed and current(stored, experiment)


def took(stored: Stored) -> str:
  """Returns how long a table took, and on what, such as 'took 4 min on 1 × cpu'."""
  return f'took {duration(stored.seconds)} on {stored.versions.get("device", "an unknown device")}'


class Clock:
  """The time that the runs of a table took, in `seconds.json` of its work directory; interrupted ones count."""

  def __init__(self, workdir: str):
    self._path = os.path.join(workdir, 'seconds.json')
    made_folder(workdir)
    self._spent = self._read()

  def _read(self) -> dict[str, tuple[float, str | None]]:
    try:
      found = read_json(self._path, '', dict)
      return {run: (float(seconds), None if ended is None else str(ended)) for run, (seconds, ended) in found.items()}
    except (OSError, TypeError, ValueError):  # times alone: they start at 0
      return {}

  @property
  def seconds(self) -> float:
    """The seconds of all runs."""
    return sum(seconds for seconds, _ in self._spent.values())

  def complete(self, name: str, run: Study) -> bool:
    """Returns whether a run has ended before, with these settings."""
    return self._spent.get(name, (0.0, None))[1] == digest(declared(run))

  @contextlib.contextmanager
  def timed(self, name: str, run: Study) -> Iterator[None]:
    """Adds the time of this context to that of a run, unless it ended another time: a grown run has other settings."""
    before, _ = self._spent.get(name, (0.0, None))
    complete, started, ended = self.complete(name, run), time.monotonic(), None
    try:
      yield
      ended = digest(declared(run))
    finally:
      if not complete:
        # other runs of the table may be timed by other processes
        self._spent = {**self._read(), name: (before + time.monotonic() - started, ended)}
        write_atomically(self._path, json.dumps(self._spent) + '\n')


def declared(value: Any) -> Any:
  """Returns settings as plain JSON: of dataclasses the fields that are not at their defaults, of methods the texts.

  Named tuples have all their fields, but those at their defaults that the class lists as `later`.
  """
  if hasattr(value, '_asdict'):
    unset = {name for name in getattr(value, 'later', ()) if getattr(value, name) == value._field_defaults[name]}
    return declared({name: one for name, one in value._asdict().items() if name not in unset})
  if dataclasses.is_dataclass(value):
    fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if _set(field, value)}
    texts = {'attack': value.attack_text(), 'defenses': value.texts()} if hasattr(value, 'attack_text') else {}
    return declared({name: one for name, one in {**fields, **texts}.items() if name not in ('mini', 'changed')})
  if isinstance(value, Mapping):
    return {str(name): declared(one) for name, one in value.items()}
  if isinstance(value, list | tuple):
    return [declared(one) for one in value]
  return value if isinstance(value, str | int | float | None) else str(value)


def _set(field, value):
  if field.default_factory is not dataclasses.MISSING:
    return getattr(value, field.name) != field.default_factory()
  return getattr(value, field.name) != field.default


def revision(root: pathlib.Path) -> str:
  """Returns the revision of the checkout at `root`, with '+' if files were changed; '' if `root` is none."""

  def git(*arguments):
    return subprocess.run(['git', '-C', root, *arguments], capture_output=True, text=True, check=True).stdout.strip()

  try:
    if pathlib.Path(git('rev-parse', '--show-toplevel')) != root:
      return ''  # such as an environment inside of another project
    changed = git('status', '--porcelain', '--untracked-files=no', '--', 'gradleak', 'experiments')
    return git('rev-parse', 'HEAD') + ('+' if changed else '')
  except (OSError, subprocess.CalledProcessError):
    return ''


def _rounded(value):
  """Returns plain JSON with numbers of a few significant figures."""
  if isinstance(value, Mapping):
    return {name: _rounded(one) for name, one in value.items()}
  if isinstance(value, list | tuple):
    return [_rounded(one) for one in value]
  if isinstance(value, float):
    return float(f'{value:.{FIGURES}g}')
  return value


def _text(stored: Stored) -> str:
  """Returns the file: an entry per line, and a row per line."""
  content = json.loads(json.dumps({'format': FORMAT, **stored._asdict()}))  # as it will be read
  content[SEAL] = digest(content)
  rows = content.pop('rows')
  lines = [f'{json.dumps(name)}: {json.dumps(value)}' for name, value in content.items()]
  runs = [
    f'{json.dumps(name)}: [\n' + ',\n'.join(json.dumps(row) for row in found) + '\n]' for name, found in rows.items()
  ]
  return '{\n' + ',\n'.join([*lines, '"rows": {\n' + ',\n'.join(runs) + '\n}']) + '\n}\n'


def _small(path: str) -> bytes:
  """Returns a PNG with 256 colours and a width of at most `WIDTH`."""
  with Image.open(path) as opened:
    picture = opened.convert('RGB')
  if picture.width > WIDTH:
    picture = picture.resize((WIDTH, round(picture.height * WIDTH / picture.width)), Image.Resampling.LANCZOS)
  png = io.BytesIO()
  picture.quantize(256).save(png, 'PNG', optimize=True)
  return png.getvalue()
