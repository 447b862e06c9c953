"""What a person sees while an attack runs: a bar with the objective and the time left, or lines where no bar can be."""

import functools
import sys
import time

import numpy as np

from gradleak import errors

MODES = ('auto', 'bar', 'lines', 'none')


def reporter(mode='auto', stream=None):
  """Returns a callback for `audit(progress=…)`, or None for 'none'.

  Args:
    mode: 'bar' (a live bar), 'lines' (about ten lines per attack), 'none', or 'auto': a bar on a terminal, else lines.
    stream: where to write; standard error by default.

  Raises:
    UsageError: for an unknown mode.
  """
  return _chosen(mode, stream or sys.stderr, _Bar, _Lines)


def rounds(mode, total, stream=None):
  """Returns a callback for `federated.training.train(on_round=…)`, or None for 'none'; arguments as of `reporter`.

  Args:
    mode, stream: as of `reporter`.
    total: rounds of the training.
  """
  return _chosen(mode, stream or sys.stderr, functools.partial(_RoundBar, total), functools.partial(_RoundLines, total))


def _chosen(mode, stream, bar, lines):
  if mode not in MODES:
    raise errors.unknown('progress mode', mode, MODES)
  if mode == 'none':
    return None
  return bar(stream) if mode == 'bar' or (mode == 'auto' and stream.isatty()) else lines(stream)


def _standing(row):
  """Returns how good the model is, where that was measured in this round, and the ε that was spent."""
  standing = [f'accuracy {row["accuracy"]:.1%}, loss {row["loss"]:.3f}'] if 'accuracy' in row else []
  return ', '.join(standing + ([f'ε {row["epsilon"]:.3g}'] if row.get('epsilon') else []))


class _RoundBar:
  """One tqdm bar, with the latest accuracy."""

  def __init__(self, total, stream):
    self._total, self._stream, self._bar = total, stream, None

  def __call__(self, row, state, seconds):
    from tqdm import tqdm

    if self._bar is None:
      self._bar = tqdm(total=self._total, initial=row['round'] - 1, unit='round', file=self._stream, dynamic_ncols=True)
    if _standing(row):
      self._bar.set_postfix_str(_standing(row), refresh=False)
    self._bar.update(row['round'] - self._bar.n)
    if row['round'] == self._total:
      self._bar.close()


class _RoundLines:
  """A line at the first round, which compiles, and at each twentieth of the way."""

  def __init__(self, total, stream):
    self._total, self._stream, self._first, self._seconds = total, stream, None, []

  def __call__(self, row, state, seconds):
    number, rounds = row['round'], self._total
    if self._first is None:
      self._first = number
    else:
      self._seconds.append(seconds)
    if number == self._first or 20 * number // rounds > 20 * (number - 1) // rounds:
      left = f', {np.median(self._seconds) * (rounds - number):.0f} s left' if self._seconds and number < rounds else ''
      words = ', '.join(filter(None, [f'round {number} of {rounds}', _standing(row)]))
      print(words + left, file=self._stream, flush=True)


def _figure(objective):
  finite = objective[np.isfinite(objective)]
  return f'objective {np.median(finite):.3g}' if finite.size else 'diverged'


class _Bar:
  """One tqdm bar per attack, whose rate gives the time left."""

  def __init__(self, stream):
    self._stream, self._attack, self._bar = stream, None, None

  def __call__(self, attack, progress, objective):
    from tqdm import tqdm

    if attack != self._attack:
      self._attack = attack
      self._bar = tqdm(
        total=progress.num_steps, initial=progress.step, desc=attack, unit='step', file=self._stream, dynamic_ncols=True
      )
    if progress.notice:
      self._bar.write(f'{attack}: {progress.notice}', file=self._stream)
    self._bar.set_postfix_str(f'{_figure(objective)}, {len(progress.objective)} runs', refresh=False)
    self._bar.update(progress.step - self._bar.n)
    if progress.done:
      self._bar.close()
      self._attack = None


class _Lines:
  """A line at the start and at each tenth of the way."""

  def __init__(self, stream):
    self._stream, self._attack, self._tenth, self._since = stream, None, 0, None

  def __call__(self, attack, progress, objective):
    if not progress.num_steps:
      self._print(f'{attack}: {len(progress.objective)} runs of a closed form')
      return
    steps = progress.num_steps
    tenth = 10 * progress.step // steps
    if attack != self._attack:
      self._attack, self._tenth, self._since = attack, tenth, None
      resumed = f' from step {progress.step}' if progress.step else ''
      self._print(f'{attack}: {len(progress.objective)} runs of {progress.num_steps} steps{resumed}')
    elif self._since is None:  # the first chunk held the compilation
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
      self._print(f'{attack}: {100 * progress.step // steps:3d} %, {_figure(objective)}{left}')
    if progress.done:
      self._attack = None

  def _print(self, line):
    print(line, file=self._stream, flush=True)
