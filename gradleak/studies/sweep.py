"""A sweep: one audit per global model, each in a folder of its own, and one table of all."""

import itertools
import pathlib
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from gradleak.audit import AuditResult, AuditSettings, Planned, audit, planned_of
from gradleak.audit import plan as plan_of
from gradleak.core import errors
from gradleak.core import settings as settings_of
from gradleak.core.settings import paired
from gradleak.core.storage import gathering, json_lines, write_atomically
from gradleak.engine import driver
from gradleak.engine.execution import Execution
from gradleak.engine.progress import callback, end, note
from gradleak.federated.scenario import Scenario

Audits = Mapping[str, tuple[Any, Scenario]]


def plan(
  audits: Audits,
  defenses: Any,
  attacks: Any,
  num_trials: int,
  settings: AuditSettings | None = None,
  **changes: Any,
) -> dict[str, list[Planned]]:
  """Returns the runs by name, each a list of `Planned`: one compilation each; equal ones compile once.

  Args:
    audits: {name: (key, scenario)}; scenarios that differ in weights alone share one `Client` and compile once.
    defenses, attacks, num_trials, settings, **changes: as `gradleak.audit` takes them.

  Raises:
    UsageError: for settings that cannot be run.
  """
  given = settings_of.replaced(AuditSettings() if settings is None else settings, 'gradleak.sweep', **changes)
  for name, one in errors.check_instance('audits', audits, Mapping, '{name: (key, scenario)}').items():
    errors.check_text('the name of an audit', name)
    if not isinstance(one, tuple | list) or len(one) != 2:
      raise errors.UsageError(f'the audit {name!r} is {errors.shown(one)}, expected (key, scenario)')
  if not audits:
    raise errors.UsageError('there is nothing to sweep: no model is given')
  return {
    name: planned_of(plan_of(key, scenario, defenses, attacks, num_trials, given))
    for name, (key, scenario) in audits.items()
  }


def sweep(
  audits: Audits,
  defenses: Any,
  attacks: Any,
  num_trials: int,
  *,
  workdir: Any,
  settings: AuditSettings | None = None,
  execution: Execution | None = None,
  progress: str | Callable = 'auto',
  say: Callable[[str], Any] = print,
  on_result: Callable[[pathlib.Path, AuditResult], Any] | None = None,
  **changes: Any,
) -> list[dict] | None:
  """Runs one audit after the other, or this process's share of each, and returns the rows of all.

  Args:
    audits: {name: (key, scenario)}; the names become folders of `workdir`.
    defenses, attacks, num_trials: as `gradleak.audit` takes them; grids are lists.
    workdir: a folder; an audit that is complete there is not run again, and audits may be added later.
    settings, execution, progress: as `gradleak.audit` takes them.
    say: called with the plan before anything runs, and with a forecast once the first chunks are timed.
    on_result: called with (folder, `AuditResult`) after each audit that is complete.
    **changes: fields of `AuditSettings` and of `Execution`.

  Returns:
    A list of the audits' rows, as in `rows.jsonl`; None while parts of other processes are missing.

  Raises:
    UsageError: for settings that cannot be run, before anything is compiled or written.
  """
  given, how = paired('gradleak.sweep', changes, settings=(AuditSettings, settings), execution=(Execution, execution))
  how.check('gradleak.sweep', num_trials, workdir)
  folder = gathering(workdir)
  planned = plan(audits, defenses, attacks, num_trials, given)
  shown = callback(progress)
  forecast = _Forecast(planned, how.process[1], shown, say, given.sequential)
  say(_in_words(audits, planned, how, given))
  rows, missing = [], []
  for name, (key, scenario) in audits.items():
    forecast.audit = name
    result = audit(
      key,
      scenario,
      defenses,
      attacks,
      num_trials,
      settings=given,
      workdir=folder / name,
      execution=how,
      progress=forecast,
    )
    if result is None:
      missing.append(name)
      continue
    if on_result is not None:
      on_result(folder / name, result)
    rows += [{'audit': name, **row} for row in result.rows]
  if missing:
    return None
  write_atomically(folder / 'rows.jsonl', json_lines(rows))
  return rows


def _in_words(audits: Audits, planned: Mapping[str, list[Planned]], how: Execution, given: AuditSettings) -> str:
  """Returns the plan: what is compiled, what is run."""
  lines, compiled = [], set()
  for name, structures in planned.items():
    _, scenario = audits[name]
    size = how.size(scenario.variables, given.batch_size)
    for structure in structures:
      program = (scenario.client, structure)
      again = ' (compiled already)' if program in compiled else ''
      compiled.add(program)
      lines.append(
        f'  {name}: {structure.attack}, {structure.runs:,} runs of {structure.num_steps:,} steps, '
        f'{-(-structure.runs // size):,} groups of {size}{again}'
      )
  rank, processes = how.process
  share = f'; this is process {rank} of {processes}' if processes > 1 else ''
  runs = sum(structure.runs for structures in planned.values() for structure in structures)
  attacks = sum(len(structures) for structures in planned.values())
  head = f'{"at most " * given.sequential}{runs:,} runs, {attacks} attacks in {len(compiled)} compilations{share}'
  return '\n'.join([head, *lines])


class _Forecast:
  """A progress callback that, once the first chunks are timed, says how long the rest of the sweep will take.

  Attributes:
    audit: the name of the audit that runs.
  """

  audit: str

  def __init__(
    self,
    planned: Mapping[str, list[Planned]],
    processes: int,
    progress: Callable | None,
    say: Callable[[str], Any],
    sequential: bool = False,
  ) -> None:
    self._planned, self._processes, self._progress, self._say = planned, processes, progress, say
    self._sequential = sequential  # whether trials stop by what is found: then it says how long the rest takes at most
    self._since: tuple | None = None  # (place, seconds, step) where the timing began
    self._ended: Counter[tuple[str, str]] = Counter()  # place -> structures of that name that are done
    self._said = False

  def __call__(self, attack: str, progress: driver.Progress, objective: np.ndarray) -> None:
    if self._progress is not None:
      self._progress(f'{self.audit}: {attack}', progress, objective)
    now, place = time.monotonic(), (self.audit, attack)
    if self._since is None or self._since[0] != place:
      self._since = place, None, None
    elif self._since[1] is None and progress.step < progress.num_steps:  # the first chunk held the compilation
      self._since = place, now, progress.step
    elif self._since[1] is not None and not self._said and progress.step > self._since[2]:
      steps = (progress.step - self._since[2]) * len(progress.objective)
      seconds = (now - self._since[1]) / steps * self._left(place, progress)
      self._say(f'at this pace the rest takes {"at most" if self._sequential else "about"} {_duration(seconds)}')
      self._said = True
    self._ended[place] += progress.done

  def note(self, text: str) -> None:
    """Passes a line between the attacks on."""
    note(self._progress, text)

  def end(self) -> None:
    """Ends the watch of the progress that it passes on."""
    end(self._progress)

  def _left(self, place: tuple[str, str], progress: driver.Progress) -> float:
    """Returns the steps of all runs that this process has not done yet; those of an audit are done in their order.

    Several of its structures may bear one name. Where trials stop, each structure may run in all later looks.
    """
    names = list(self._planned)
    first, *others = (self._planned[name] for name in names[names.index(place[0]) :])
    alike = [number for number, structure in enumerate(first) if structure.attack == place[1]]
    current = -1 if self._sequential else alike[min(self._ended[place], len(alike) - 1)]
    rest = [*first[current + 1 :], *itertools.chain(*others)]
    here = 0 if self._sequential else progress.num_steps  # the rest holds those of this structure as well
    left: float = (here - progress.step) * len(progress.objective)
    return left + sum(structure.runs * structure.num_steps for structure in rest) / self._processes


def _duration(seconds: float) -> str:
  return (
    f'{seconds:.0f} s' if seconds < 90 else f'{seconds / 60:.0f} min' if seconds < 5400 else f'{seconds / 3600:.1f} h'
  )
