"""Several results side by side: one table, and the settings in which the results differ."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from gradleak import errors
from gradleak.audit import GROWS, AuditResult
from gradleak.audit.result import frame
from gradleak.metrics import statistics

_KEYS = ('attack', 'defense', 'counter')
_FIGURES = ('psnr', 'psnr_low', 'psnr_high', 'recovered', 'n')


@dataclasses.dataclass(frozen=True, repr=False)
class Comparison:
  """The results of several audits in one table; `print` it, or show it in a notebook.

  Attributes:
    names: of the results.
    differing: {setting: {name: value}} of the settings that are not the same in all results; what is called 'attack x'
      or 'defense x' is a method that means something else under the same label. A missing value is None.
    rows: one dict per attack × defense × counter-measure: 'attack', 'defense', 'counter' (None: the attacker is unaware
      of the defense), and for each result '<name> psnr' (mean in dB over the runs that did not diverge) with the bounds
      of its 95 % interval '<name> psnr_low' and '<name> psnr_high' (of three runs or more), '<name> recovered' and
      '<name> n' (the runs that recover, and all runs); None where a result has no such runs.
  """

  names: tuple[str, ...]
  differing: dict[str, dict[str, Any]]
  rows: list[dict[str, Any]]

  def __str__(self) -> str:
    lines = [self._head(), *self._cells()]
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    texts = ['  '.join(f'{cell:<{w}}' for cell, w in zip(line, widths, strict=True)).rstrip() for line in lines]
    rule = '-' * (sum(widths) + 2 * (len(widths) - 1))
    return '\n'.join([*self._warning('  '), texts[0], rule, *texts[1:]])

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
    return [*_KEYS, *(f'{name}: PSNR dB, recovered' for name in self.names)]

  def _cells(self) -> list[list[str]]:
    return [[*(row[key] or '–' for key in _KEYS), *(_cell(row, name) for name in self.names)] for row in self.rows]

  def _warning(self, mark: str) -> list[str]:
    """Returns the lines above the table; none if all settings are the same."""
    if not self.differing:
      return []
    said = [f'{mark}{setting}: {_shown(values)}' for setting, values in self.differing.items()]
    return ['These results differ in settings, so their figures may not be comparable:', '', *said, '']


def compare(results: Mapping[str, AuditResult] | Iterable[AuditResult], *, strict: bool = False) -> Comparison:
  """Returns results side by side, one row per attack × defense × counter-measure.

  Args:
    results: {name: `AuditResult`}, or a list, whose results are called '1', '2', and so on.
    strict: whether results that differ in a scientific setting (model, data, batch size, client, trials, labels, key
      and so on) are refused; otherwise the differing settings stand above the table. Other attacks and defenses are
      never refused.

  Raises:
    UsageError: if there is none, one is no `AuditResult`, or for differing settings where `strict`.
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
  differing = _differing(named)
  if strict and differing:
    said = '; '.join(f'{setting}: {_shown(values)}' for setting, values in differing.items())
    raise errors.UsageError(f'these results differ in settings ({said}): compare them with strict=False')
  return Comparison(tuple(named), differing, _rows(named))


def _differing(named: dict[str, AuditResult]) -> dict[str, dict[str, Any]]:
  """Returns the settings in which the results differ, and the labels that stand for different methods."""
  grown = {*GROWS, *GROWS.values()}
  settings = dict.fromkeys(name for result in named.values() for name in result.config if name not in grown)
  found = {name: {of: result.config.get(name) for of, result in named.items()} for name in settings}
  for kind in ('attack', 'defense'):
    for label in dict.fromkeys(label for result in named.values() for label in result.config[f'{kind}s']):
      found[f'{kind} {label}'] = {
        of: result.config.get(f'{kind}_texts', {}).get(label, label)
        for of, result in named.items()
        if label in result.config[f'{kind}s']
      }
  return {name: values for name, values in found.items() if not _alike([*values.values()])}


def _alike(values: list) -> bool:
  return all(value == values[0] for value in values)


def _rows(named: dict[str, AuditResult]) -> list[dict[str, Any]]:
  found: dict[tuple, dict[str, list[dict]]] = {}
  for name, result in named.items():
    for row in result.rows:
      found.setdefault(tuple(row[key] for key in _KEYS), {}).setdefault(name, []).append(row)
  return [
    {**dict(zip(_KEYS, case, strict=True)), **{k: v for name in named for k, v in _figures(name, of.get(name)).items()}}
    for case, of in found.items()
  ]


def _figures(name: str, rows: list[dict] | None) -> dict[str, Any]:
  """Returns the figures of one result in one row of the table."""
  names = [f'{name} {column}' for column in _FIGURES]
  if rows is None:
    return dict.fromkeys(names)
  finite = [row['psnr'] for row in rows if row['psnr'] is not None]
  mean, *bounds = statistics.mean_interval(finite)
  sure = len(finite) >= statistics.MIN_RUNS and np.isfinite(bounds).all()
  low, high = bounds if sure else (None, None)
  values = mean if finite else None, low, high, sum(row['success'] for row in rows), len(rows)
  return dict(zip(names, values, strict=True))


def _cell(row: dict[str, Any], name: str) -> str:
  psnr, low, _, recovered, n = (row[f'{name} {column}'] for column in _FIGURES)
  if n is None:
    return '–'
  mean = '–' if psnr is None else f'{psnr:.1f}' if low is None else f'{psnr:.1f} ± {psnr - low:.1f}'
  return f'{mean}, {recovered} of {n}'


def _shown(values: dict[str, Any]) -> str:
  return ', '.join(f'{name} {"–" if value is None else errors.shown(value)}' for name, value in values.items())
