"""Several results side by side: their figures, their worst cases, and the settings in which they differ."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gradleak.audit import AuditResult
from gradleak.audit.result import frame
from gradleak.audit.run import GROWS
from gradleak.core import errors
from gradleak.modalities import Shown, of_config
from gradleak.report.formatting import aligned, count_range, plus_minus
from gradleak.summary.cases import summarise, worst_case

_KEYS = ('attack', 'defense', 'adaptive')
_COUNTS = ('recovered', 'n', 'success_low', 'success_high')
_WORST = (*_COUNTS, 'verdict', 'by')
_ANY = 'any attack'


@dataclasses.dataclass(frozen=True, repr=False)
class Comparison:
  """The results of several audits in one table; `print` it, or show it in a notebook.

  Attributes:
    names: of the results.
    differing: {setting: {name: value}} of the settings that are not the same in all results; what is called 'attack x'
      or 'defense x' is a method that means something else under the same label. A missing value is None.
    rows: one dict per attack × defense × adaptive attack: 'attack', 'defense', 'adaptive' (None: the attacker is
      non-adaptive of the defense), and for each result the mean score over the runs that did not diverge, for images
      '<name> psnr' in dB, with the bounds of its 95 % interval '<name> psnr_low' and '<name> psnr_high' (of three runs
      or more), '<name> recovered' and '<name> n' (the runs that recover, and all runs), and the bounds of the 95 %
      interval of that fraction (see `cases.summarise`), '<name> success_low' and '<name> success_high'; None where a
      result has no such runs.
    worst: one dict per defense, over all attackers: 'defense', and for each result '<name> recovered' of '<name> n'
      trials, the bounds as above, '<name> verdict' (the worst) and '<name> by' (the attacks that recover a trial, each
      with its adaptive attack).
    score: the column that is compared, as tables show it.
  """

  names: tuple[str, ...]
  differing: dict[str, dict[str, Any]]
  rows: list[dict[str, Any]]
  worst: list[dict[str, Any]]
  score: Shown

  def __str__(self) -> str:
    return '\n'.join([*self._warning('  '), *aligned([self._head(), *self._cells()])])

  __repr__ = __str__

  def to_markdown(self) -> str:
    """Returns the differing settings as a list, and the table, in Markdown."""
    lines = [self._head(), ['---'] * (len(_KEYS) + len(self.names)), *self._cells()]
    escaped = [[cell.replace('|', r'\|') for cell in line] for line in lines]
    return '\n'.join([*self._warning('- '), *(f'| {" | ".join(line)} |' for line in escaped)])

  _repr_markdown_ = to_markdown

  def to_frame(self) -> Any:
    """Returns `rows` as a `pandas.DataFrame`; `differing` stands in its `attrs`.

    Raises:
      UsageError: if pandas is not installed.
    """
    made = frame(self.rows)
    made.attrs['differing'] = self.differing
    return made

  def _head(self) -> list[str]:
    return [*_KEYS, *(f'{name}: {self.score.with_unit()}, recovered (95 %)' for name in self.names)]

  def _cells(self) -> list[list[str]]:
    """Returns the lines of the table; below, the worst case of each defense."""
    cells = [
      [*(row[key] or '–' for key in _KEYS), *(self._cell(row, name) for name in self.names)] for row in self.rows
    ]
    worst = [[_ANY, entry['defense'], '–', *(_worst_cell(entry, name) for name in self.names)] for entry in self.worst]
    return cells + worst

  def _cell(self, row: dict[str, Any], name: str) -> str:
    of = _of(row, name, _figures(self.score))
    return '–' if of['n'] is None else f'{plus_minus(of, self.score.column, self.score.digits)}, {count_range(of)}'

  def _warning(self, mark: str) -> list[str]:
    """Returns the lines above the table; none if all settings are the same."""
    if not self.differing:
      return []
    said = [f'{mark}{setting}: {_shown(values)}' for setting, values in self.differing.items()]
    return ['These results differ in settings, so their figures may not be comparable:', '', *said, '']


def compare(results: Mapping[str, AuditResult] | Iterable[AuditResult], *, strict: bool = False) -> Comparison:
  """Returns results side by side, one row per attack × defense × adaptive attack.

  Args:
    results: {name: `AuditResult`}, or a list, whose results are called '1', '2', and so on.
    strict: whether results that differ in a scientific setting (model, data, batch size, client, trials, labels, key
      and so on) are refused; otherwise the differing settings stand above the table. Other attacks and defenses are
      never refused.

  Raises:
    UsageError: if there is none, one is no `AuditResult`, or for differing settings where `strict`; for samples of
      several modalities.
  """
  errors.check_instance('results', results, Iterable, 'a list of results, or a dict {name: result}')
  pairs = results.items() if isinstance(results, Mapping) else ((i + 1, each) for i, each in enumerate(results))
  named = {str(name): result for name, result in pairs}
  if not named:
    raise errors.UsageError('there is nothing to compare: give a list of results, or a dict {name: result}')
  for name, result in named.items():
    if not isinstance(result, AuditResult):
      raise errors.UsageError(
        f'the result {name!r} is {errors.shown(result)}, expected an AuditResult: what gradleak.audit or gradleak.load '
        'returns'
      )
  kinds = {name: of_config(result.config) for name, result in named.items()}
  score, *others = dict.fromkeys(kind.shown[0] for kind in kinds.values())
  if others:
    raise errors.UsageError(f'these results are of different samples ({_shown(kinds)}): compare those of one kind')
  differing = _differing(named)
  if strict and differing:
    said = '; '.join(f'{setting}: {_shown(values)}' for setting, values in differing.items())
    raise errors.UsageError(f'these results differ in settings ({said}): compare them with strict=False')
  summaries = {name: summarise(result.rows) for name, result in named.items()}
  worst = {name: worst_case(result.rows) for name, result in named.items()}
  return Comparison(
    tuple(named),
    differing,
    _joined(summaries, _KEYS, _figures(score)),
    _joined(worst, ('defense',), _WORST),
    score,
  )


def _figures(score: Shown) -> tuple[str, ...]:
  return score.column, f'{score.column}_low', f'{score.column}_high', *_COUNTS


def _differing(named: dict[str, AuditResult]) -> dict[str, dict[str, Any]]:
  """Returns the settings in which the results differ, and the labels that stand for different methods."""
  grown = {*GROWS, *GROWS.values(), 'steps'}  # the steps that attacks had stand in their rows
  settings = dict.fromkeys(name for result in named.values() for name in result.config if name not in grown)
  found = {name: {of: result.config.get(name) for of, result in named.items()} for name in settings}
  for kind in ('attack', 'defense'):
    for label in dict.fromkeys(label for result in named.values() for label in result.config[f'{kind}s']):
      found[f'{kind} {label}'] = {
        of: result.config.get(f'{kind}_texts', {}).get(label, label)
        for of, result in named.items()
        if label in result.config[f'{kind}s']
      }
  steps = {name: {row['attack']: row.get('steps') for row in result.rows} for name, result in named.items()}
  for label in dict.fromkeys(label for of in steps.values() for label in of):
    found[f'steps of {label}'] = {name: of[label] for name, of in steps.items() if label in of}
  return {name: values for name, values in found.items() if not _alike([*values.values()])}


def _alike(values: list) -> bool:
  return all(value == values[0] for value in values)


def _joined(results: Mapping[str, list[dict]], keys: Sequence[str], figures: Sequence[str]) -> list[dict[str, Any]]:
  """Returns one dict for all entries of several results with the same keys: the keys, and '<name> <figure>'."""
  found: dict[tuple, dict[str, dict]] = {}
  for name, entries in results.items():
    for entry in entries:
      found.setdefault(tuple(entry[key] for key in keys), {})[name] = entry
  return [
    {
      **dict(zip(keys, case, strict=True)),
      **{f'{name} {figure}': of[name][figure] if name in of else None for name in results for figure in figures},
    }
    for case, of in found.items()
  ]


def _of(entry: dict[str, Any], name: str, figures: Sequence[str]) -> dict[str, Any]:
  """Returns the figures of one result, without its name."""
  return {figure: entry[f'{name} {figure}'] for figure in figures}


def _worst_cell(entry: dict[str, Any], name: str) -> str:
  of = _of(entry, name, _WORST)
  return '–' if of['n'] is None else f'{of["verdict"]}, {count_range(of)}'


def _shown(values: dict[str, Any]) -> str:
  return ', '.join(f'{name} {"–" if value is None else errors.shown(value)}' for name, value in values.items())
