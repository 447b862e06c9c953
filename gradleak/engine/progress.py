"""Prints the progress of attacks and trainings: a bar with the objective and the time left, or lines."""

import functools
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, TextIO

import numpy as np

from gradleak.core import errors
from gradleak.core.statistics import percent
from gradleak.engine.driver import Progress

MODES = ('auto', 'bar', 'lines', 'none')


def reporter(mode: str = 'auto', stream: TextIO | None = None) -> Callable[[str, Progress, np.ndarray], None] | None:
  """Returns a callback for `audit(progress=…)`, or None for 'none'.

  Args:
    mode: 'bar' (a live bar), 'lines' (about ten lines per attack), 'none', or 'auto': a bar on a terminal, else lines.
    stream: where to write; standard error by default.

  Raises:
    UsageError: for an unknown mode.
  """
  return _chosen(mode, stream or sys.stderr, _Bar, _Lines)


def callback(progress: str | Callable | None) -> Callable | None:
  """Returns the callback of a run's `progress=`: a user's own function, or the `reporter` of a mode; None for none."""
  return progress if progress is None or callable(progress) else reporter(progress)


def note(progress: Callable | None, text: str) -> None:
  """Hands a line to a callback of `reporter`; a user's own function takes none."""
  getattr(progress, 'note', lambda _: None)(text)


def end(progress: Callable | None) -> None:
  """Says to a callback of `reporter` that the run is over or has failed."""
  getattr(progress, 'end', lambda: None)()


def computing(progress: Callable | None, name: str) -> Callable[[int, int, str], None]:
  """Returns a callback for `engine.parts.told` that hands lines to a callback of `reporter`, if it takes long.

  Args:
    progress: the callback of `reporter`, or None.
    name: what learns, or is computed.
  """
  since: dict[str, list] = {}  # unit -> [seconds and number at the first call, seconds at the last line]
  heard = time.monotonic()

  def on_part(done: int, total: int, unit: str) -> None:
    nonlocal heard
    now, before = time.monotonic(), heard
    heard = now
    if unit not in since or done <= since[unit][1]:  # the first part includes compilation; or it starts again
      since[unit] = [now, done, now]
      if now - before >= WAIT:
        note(progress, f'{name}: {done} of {total} {unit}')
      return
    began, first, said = since[unit]
    if done == total or now - said < WAIT:
      return
    since[unit][-1] = now
    left = (now - began) / (done - first) * (total - done)
    note(progress, f'{name}: {done} of {total} {unit}, {left:.0f} s left')

  return on_part


def rounds(
  mode: str, total: int, stream: TextIO | None = None
) -> Callable[[Mapping[str, Any], Any, float], None] | None:
  """Returns a callback for `federated.training.train(on_round=…)`, or None for 'none'.

  Args:
    mode, stream: as in `reporter`.
    total: rounds of the training.

  Raises:
    UsageError: for an unknown mode.
  """
  return _chosen(mode, stream or sys.stderr, functools.partial(_RoundBar, total), functools.partial(_RoundLines, total))


def _chosen(mode: str, stream: TextIO, bar: Callable, lines: Callable) -> Callable | None:
  errors.check_choice('progress mode', mode, MODES)
  if mode == 'none':
    return None
  return bar(stream) if mode == 'bar' or (mode == 'auto' and stream.isatty()) else lines(stream)


def _status(row: Mapping[str, Any]) -> str:
  """Returns accuracy and loss, if they were measured in this round, and the ε spent so far."""
  measured = [f'accuracy {percent(row["accuracy"])}, loss {row["loss"]:.3f}'] if 'accuracy' in row else []
  spent = (
    [f'ε {row["epsilon"]:.3g} ({row["epsilon_relation"]}, per {row["epsilon_unit"]})'] if row.get('epsilon') else []
  )
  return ', '.join(measured + spent)


class _RoundBar:
  """One tqdm bar, with the latest accuracy."""

  def __init__(self, total: int, stream: TextIO) -> None:
    self._total, self._stream = total, stream
    self._bar: Any = None

  def __call__(self, row: Mapping[str, Any], state: Any, seconds: float) -> None:
    from tqdm import tqdm

    if self._bar is None:
      self._bar = tqdm(
        total=self._total, initial=row['round'] - 1, unit='round', file=self._stream, dynamic_ncols=True, leave=False
      )
    if _status(row):
      self._bar.set_postfix_str(_status(row), refresh=False)
    self._bar.update(row['round'] - self._bar.n)
    if row['round'] == self._total:
      self._bar.leave = True  # an interruption, which does not get here, leaves no bar below its line
      self._bar.close()


class _RoundLines:
  """A line after the first round, which includes compilation, and after each twentieth of the rounds."""

  def __init__(self, total: int, stream: TextIO) -> None:
    self._total, self._stream, self._first, self._seconds = total, stream, None, []

  def __call__(self, row: Mapping[str, Any], state: Any, seconds: float) -> None:
    number, rounds = row['round'], self._total
    if self._first is None:
      self._first = number
    else:
      self._seconds.append(seconds)
    if number == self._first or 20 * number // rounds > 20 * (number - 1) // rounds:
      left = f', {np.median(self._seconds) * (rounds - number):.0f} s left' if self._seconds and number < rounds else ''
      line = ', '.join(filter(None, [f'round {number} of {rounds}', _status(row)]))
      print(line + left, file=self._stream, flush=True)


def _summary(progress: Progress, objective: np.ndarray) -> str:
  if progress.unit != 'step':
    return 'on the host'
  finite = objective[np.isfinite(objective)]
  return f'objective {np.median(finite):.3g}' if finite.size else 'diverged'


def _runs(progress: Progress) -> str:
  many = len(progress.objective)
  return f'{many} {"run" if many == 1 else "runs"}'


# A line says how far what is computed in parts is, after so many seconds without one.
WAIT = 10.0

# After so many minutes without progress, and again after as many, a line says where a run stands.
SILENT = 3.0


class _Watch:
  """Says where a run stands if nothing has been heard of it for `SILENT` minutes."""

  def __init__(self, stream: TextIO) -> None:
    self._stream, self._silent = stream, 0.0
    self._timer: threading.Timer | None = None

  def heard(self, where: str) -> None:
    """Starts to wait, from where the run stands now."""
    self.end()
    self._silent = 0.0
    self._wait(where)

  def end(self) -> None:
    """Stops waiting."""
    if self._timer is not None:
      self._timer.cancel()
      self._timer = None

  def _wait(self, where: str) -> None:
    self._timer = threading.Timer(60 * SILENT, self._late, (where,))
    self._timer.daemon = True
    self._timer.start()

  def _late(self, where: str) -> None:
    self._silent += SILENT
    print(f'no progress for {self._silent:g} minutes; the last was: {where}', file=self._stream, flush=True)
    self._wait(where)


class _Notes:
  """Lines between the attacks, on what takes time before the first step; a watch, until `end` is called."""

  _stream: TextIO
  _watch: _Watch

  def note(self, text: str) -> None:
    """Writes a line."""
    print(text, file=self._stream, flush=True)
    self._watch.heard(text)

  def end(self) -> None:
    """Must be called when the run is over or has failed."""
    self._watch.end()

  def _heard(self, attack: str, progress: Progress) -> None:
    self._watch.heard(f'{attack}, {progress.unit} {progress.step} of {progress.num_steps}')


class _Bar(_Notes):
  """One tqdm bar per attack; tqdm estimates the time left."""

  def __init__(self, stream: TextIO) -> None:
    self._stream, self._watch = stream, _Watch(stream)
    self._attack: str | None = None
    self._bar: Any = None

  def __call__(self, attack: str, progress: Progress, objective: np.ndarray) -> None:
    from tqdm import tqdm

    self._heard(attack, progress)

    if attack != self._attack:
      self._attack = attack
      self._bar = tqdm(
        total=progress.num_steps,
        initial=progress.step,
        desc=attack,
        unit=progress.unit,
        file=self._stream,
        dynamic_ncols=True,
        leave=False,
      )
    if progress.notice:
      self._bar.write(f'{attack}: {progress.notice}', file=self._stream)
    self._bar.set_postfix_str(f'{_summary(progress, objective)}, {_runs(progress)}', refresh=False)
    self._bar.update(progress.step - self._bar.n)
    if progress.done:
      self._bar.leave = True  # an interruption, which does not get here, leaves no bar below its line
      self._bar.close()
      self._attack = None


class _Lines(_Notes):
  """A line at the start and after each tenth of the steps."""

  def __init__(self, stream: TextIO) -> None:
    self._stream, self._watch, self._tenth = stream, _Watch(stream), 0
    self._attack: str | None = None
    self._since: tuple[float, int] | None = None  # (seconds, step) where the timing began

  def __call__(self, attack: str, progress: Progress, objective: np.ndarray) -> None:
    self._heard(attack, progress)
    if not progress.num_steps:
      self._print(f'{attack}: {_runs(progress)} of a closed form')
      return
    steps = progress.num_steps
    tenth = 10 * progress.step // steps
    if attack != self._attack:
      self._attack, self._tenth, self._since = attack, tenth, None
      resumed = f' from {progress.unit} {progress.step}' if progress.step else ''
      of = f' of {progress.num_steps} steps' if progress.unit == 'step' else ', one after another'
      self._print(f'{attack}: {_runs(progress)}{of}{resumed}')
    elif self._since is None:  # the first chunk includes compilation
      self._since = time.monotonic(), progress.step
    if progress.notice:
      self._print(f'{attack}: {progress.notice}')
    if tenth > self._tenth or progress.done:
      self._tenth = tenth
      began, first = self._since or (0, progress.step)
      left = ''
      if first < progress.step < progress.num_steps:
        seconds = (time.monotonic() - began) / (progress.step - first) * (progress.num_steps - progress.step)
        left = f', {seconds:.0f} s left'
      self._print(f'{attack}: {100 * progress.step // steps:3d} %, {_summary(progress, objective)}{left}')
    if progress.done:
      self._attack = None

  def _print(self, line: str) -> None:
    print(line, file=self._stream, flush=True)
