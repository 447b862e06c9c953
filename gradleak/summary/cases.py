"""Rows of an audit by case: means, counts and intervals; the worst case of each defense."""

import csv
import io
import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from gradleak.audit.result import AuditResult, Case
from gradleak.audit.verdict import FAILED, LEVELS, RECOVERED, VERDICTS, unfinished, worst
from gradleak.core import anytime, errors, statistics
from gradleak.modalities import Column, of_rows

Row = dict[str, Any]
Summary = dict[str, Any]
_NOBODY: Mapping[str, Collection[int]] = MappingProxyType({})


def summarise(rows: Iterable[Row]) -> list[Summary]:
  """Returns one summary per attack, defense and adaptive attack, in order of appearance.

  Runs that diverged have no metrics: the means leave them out, and they count as not recovered. Runs on the same images
  are not independent, since a sweep repeats a trial for every seed. So the intervals are computed over the images, not
  over the runs. Where trials stopped by what was found (`audit.sequential`), all intervals are those of `core.anytime`,
  which hold at any number of trials.

  Args:
    rows: of an audit or a sweep, one dict per run.

  Returns:
    A list of flat dicts: `attack`, `defense`, `knowledge` ('non-adaptive' or 'adaptive'), `adaptive` (the
    adaptive attack of an adaptive attacker, else None), `tier`, `n` (runs); of `psnr` (dB), `ssim`, `mse`, `pearson`,
    `ms_ssim`, `lpips` and `fmse` the mean, and with `_low` and `_high` its 95 % interval; `success` (the fraction of
    runs recovered, that is exact or recognisable) with its exact 95 % interval; the counts `recovered`, of every
    verdict by its name (`exact`, …, `inconclusive`), and `unfinished` (runs that show something, from exact to above
    chance, before the attack had converged); the means of `revealed` (images of a batch that are fully revealed),
    `revealed_psnr` (dB, of these), `oracle_psnr` (dB), `control_psnr` (dB), `rank`, `label_correct`, `change` and
    `sent` (fraction of the entries sent); `candidates`; `verdict`, the worst of the runs; and `stopped`, how the trials
    of the defense stopped, None where their number was fixed. What cannot be computed is None.
  """
  return [_summary(group) for group in by_case(rows).values()]


def strongest(summaries: Iterable[Summary]) -> Summary:
  """Returns the summary with the most runs recovered; among equals, that with the highest mean PSNR."""
  return max(summaries, key=_strength)


def paired(summaries: Iterable[Summary]) -> dict[tuple[str, str], list[Summary]]:
  """Returns `{(attack, defense): summaries}` of at most two: non-adaptive, and by the strongest adaptive attacker."""
  pairs = {}
  for pair, group in grouped(summaries, 'attack', 'defense').items():
    non_adaptive = [summary for summary in group if summary['adaptive'] is None]
    adaptive = [summary for summary in group if summary['adaptive'] is not None]
    pairs[pair] = [*non_adaptive, strongest(adaptive)] if adaptive else non_adaptive
  return pairs


def worst_case(rows: Iterable[Row], named: Mapping[str, Collection[int]] = _NOBODY) -> list[dict[str, Any]]:
  """Returns one entry per defense: of how many trials any attacker, non-adaptive or adaptive, recovers the images.

  Args:
    rows: of an audit.
    named: defense -> the trials that are re-identified without a picture.

  Returns:
    A list of dicts: `defense`; `recovered` of `n` trials; `success`, that fraction, with its 95 % interval
    `success_low` and `success_high` (exact, or see `intervals`); the trials that `non_adaptive` and `adaptive`
    attackers recover, None where none were run, the latter also by attacks without an adaptive form; `by`, see
    `attackers`, those that recover a trial; `adaptive_attacks`, the adaptive attacks that recover one, the strongest
    first; `verdict`, the worst of all runs; `reached`, of each of the four levels the number of trials that any
    attacker brings there or further; `failed`, the trials that none brings to a level, and on which an attack failed
    as an optimisation; `attackers`, the number of attacks and adaptive attacks, of which that is the
    worst; `runs`, how many of them are `searches` (closed forms are none), and the count of every verdict among them
    (`exact`, …, `inconclusive`); and `flags`,
    reasons for care, their counts over runs.
  """
  groups = grouped(rows, 'defense')
  undefended = groups.get(('none',))
  setting = []
  if undefended is None:
    setting = ['no undefended run']
  elif not any(row['success'] for row in undefended):
    setting = ['undefended run fails']
  return [_worst(defense, group, setting, set(named.get(defense, ()))) for (defense,), group in groups.items()]


def worst_case_of(rows: Iterable[Row]) -> dict[str, dict[str, Any]]:
  """Returns the worst case of each defense: any attacker has 'recovered' the images of so many of 'n' trials.

  'psnr' (dB) and 'ssim' are the means of the strongest single attacker (most recovered, then highest PSNR), which 'by'
  names.

  Args:
    rows: of an audit.
  """
  rows = check_rows(rows)
  groups = grouped(summarise(rows), 'defense')
  found = {}
  for entry in worst_case(rows):
    best = strongest(groups[entry['defense'],])
    found[entry['defense']] = {
      **{name: best[name] for name in (of_rows([best]).score, of_rows([best]).likeness)},
      'recovered': entry['recovered'],
      'n': entry['n'],
      'by': ', '.join(filter(None, (best['attack'], best['adaptive']))),
    }
  return found


def summary_csv(rows: Iterable[Row]) -> str:
  """Returns the summaries of rows as CSV text, one line each; None is an empty cell."""
  return csv_text(summarise(rows), ('attack', 'defense'))


def csv_text(lines: Iterable[dict[str, Any]], columns: Sequence[str] = ()) -> str:
  """Returns dicts as CSV text, one line each; None is an empty cell.

  Args:
    lines: with the same keys in the same order.
    columns: the head where there is no line.
  """
  text, lines = io.StringIO(), list(lines)
  writer = csv.DictWriter(text, fieldnames=list(lines[0]) if lines else columns)
  writer.writeheader()
  writer.writerows(lines)
  return text.getvalue()


def grouped(rows: Iterable[dict], *keys: str) -> dict[tuple, list[dict]]:
  """Returns {values of the keys: rows} in order of appearance; the value of a missing key is None."""
  groups: dict[tuple, list[dict]] = {}
  for row in check_rows(rows):
    groups.setdefault(tuple(row.get(key) for key in keys), []).append(row)
  return groups


def check_rows(rows: Any, *columns: str) -> list[dict]:
  """Returns rows as a list; raises `UsageError` for anything but dictionaries that have these columns."""
  if isinstance(rows, AuditResult):
    raise errors.UsageError('rows is an AuditResult: give its rows, as in summarise(result.rows)')
  rows = list(errors.check_instance('rows', rows, Iterable, 'the rows of an audit'))
  for row in rows:
    if not isinstance(row, dict) or not all(column in row for column in columns):
      raise errors.UsageError(f'a row is {errors.shown(row)}, expected one of docs/ROWS.md, with {", ".join(columns)}')
  return rows


def case(row: dict) -> Case:
  """Returns the `Case` of a row or summary, as in an audit's reconstructions and curves."""
  return row['attack'], row['defense'], *filter(None, [row.get('adaptive')])


def by_case(rows: Iterable[dict]) -> dict[Case, list[dict]]:
  """Returns {`case`: rows} in order of appearance."""
  groups: dict[Case, list[dict]] = {}
  for row in check_rows(rows, 'attack', 'defense'):
    groups.setdefault(case(row), []).append(row)
  return groups


def trials(rows: Iterable[dict]) -> list[int]:
  """Returns the numbers of the trials that were attacked, those of most cases first, then in their order."""
  counts = Counter(row['trial'] for row in check_rows(rows, 'trial'))
  return sorted(counts, key=lambda trial: (-counts[trial], trial))


def _numbers(rows: Iterable[Row], key: str) -> list[float]:
  """Returns the values of a column that are neither missing, None nor NaN."""
  values = [row.get(key) for row in rows]
  return [float(value) for value in values if value is not None and not math.isnan(value)]


def _mean(rows: Iterable[Row], key: str) -> float | None:
  values = _numbers(rows, key)
  return math.fsum(values) / len(values) if values else None


def intervals(rows: Iterable[Row]) -> Any:
  """Returns the module whose intervals hold for these rows: `anytime` where trials stopped by what was found."""
  return anytime if any('stopped' in row for row in rows) else statistics


def _mean_interval(by_image: Sequence[Sequence[Row]], column: Column) -> dict[str, float | None]:
  """Returns {key: mean, key_low, key_high}; the 95 % interval is cut to the metric's range.

  The bounds are None for fewer than `statistics.MIN_RUNS` images, and for equal values. Equal values, such as several
  at the largest PSNR of 100 dB, show no spread.
  """
  key, (least, most) = column.name, column.bounds or (-math.inf, math.inf)
  values = [value for group in by_image if (value := _mean(group, key)) is not None]
  if not values:
    return dict.fromkeys((key, f'{key}_low', f'{key}_high'))
  found = intervals(row for group in by_image for row in group).mean_interval(values)
  mean, low, high = (float(value) for value in found)
  bounded = len(values) >= statistics.MIN_RUNS and math.isfinite(low) and math.isfinite(high) and low < high
  return {
    key: mean,
    f'{key}_low': max(low, least) if bounded else None,
    f'{key}_high': min(high, most) if bounded else None,
  }


def _by_image(rows: Iterable[Row]) -> list[list[Row]]:
  """Returns the rows of each private batch: several where a sweep attacks the same one under several seeds."""
  return list(grouped(rows, 'dataset', 'trial').values())


def _fraction(rows: Iterable[Row], successes: int, n: int, independent: int | None = None) -> dict[str, float]:
  names = ('success', 'success_low', 'success_high')
  interval = intervals(rows).proportion_interval(successes, n, independent=independent)
  return dict(zip(names, map(float, interval), strict=True))


def _counts(rows: Sequence[Row]) -> dict[str, int]:
  counts = {named(verdict): sum(row['verdict'] == verdict for row in rows) for verdict in VERDICTS}
  return {'recovered': sum(counts[level] for level in RECOVERED), **counts}


def named(verdict: str) -> str:
  """Returns the key of a verdict's count."""
  return verdict.replace(' ', '_').replace('-', '_')


def _summary(rows: Sequence[Row]) -> Summary:
  first, counts, by_image, kind = rows[0], _counts(rows), _by_image(rows), of_rows(rows)
  means, score = [column for column in kind.columns if column.bounds is not None], kind.score
  return {
    'attack': first['attack'],
    'defense': first['defense'],
    'knowledge': first.get('knowledge', 'non-adaptive'),
    'adaptive': first.get('adaptive'),
    'tier': first.get('tier'),
    'n': len(rows),
    **{key: value for column in means for key, value in _mean_interval(by_image, column).items()},
    **_fraction(rows, sum(bool(row['success']) for row in rows), len(rows), len(by_image)),
    **counts,
    'unfinished': sum(map(unfinished, rows)),
    'revealed': _mean(rows, 'revealed'),
    **{f'{of}_{score}': _mean(rows, f'{of}_{score}') for of in ('revealed', 'trained', 'oracle', 'control')},
    'rank': _mean(rows, 'rank'),
    'candidates': min((row['candidates'] for row in rows if row.get('candidates') is not None), default=None),
    'label_correct': _mean(rows, 'label_correct'),
    'change': _mean(rows, 'change'),
    'sent': _mean(rows, 'sent'),
    'verdict': worst({row['verdict'] for row in rows}),
    'stopped': ', '.join(dict.fromkeys(row['stopped'] for row in rows if 'stopped' in row)) or None,
  }


def _worst(defense: str, rows: Sequence[Row], setting: Sequence[str], named: Collection[int]) -> dict[str, Any]:
  """Returns one entry of `worst_case`; `setting` are the flags that all defenses have, `named` the trials of one."""
  trials = {row['trial'] for row in rows}
  recovered = _recovered(rows)
  non_adaptive = [row for row in rows if row.get('adaptive') is None]
  adaptive = [row for row in rows if row.get('adaptive') is not None]
  forms = {row['attack'] for row in adaptive}  # an attack without one is run as it is by those who know the defense
  knowing = adaptive + [row for row in non_adaptive if row['attack'] not in forms] * bool(forms)
  leaking = [row for row in rows if row['success']]
  by_strength = sorted(summarise(adaptive), key=_strength, reverse=True)
  counts, runs = _counts(rows), len(rows)
  flags = list(setting)
  if counts['inconclusive']:
    flags.append(f'{counts["inconclusive"]} of {runs} inconclusive')
  changes = _numbers(rows, 'change')
  if defense != 'none' and changes and not any(changes):
    flags.append('defense changed nothing')
  if counts['diverged']:
    flags.append(f'diverged {counts["diverged"]}')
  return {
    'defense': defense,
    'n': len(trials),
    **counts,
    'recovered': recovered,
    **_fraction(rows, recovered, len(trials)),
    'verdict': worst({row['verdict'] for row in rows} | ({LEVELS[2]} if named else set())),
    'reached': {level: _reached(rows, level, named) for level in LEVELS},
    'failed': len(_trials(rows, FAILED) - _trials(rows, LEVELS) - set(named)),
    'attackers': len(by_case(rows)),
    'runs': runs,
    'searches': sum(row.get('steps', 1) > 0 for row in rows),
    'non_adaptive': _recovered(non_adaptive) if non_adaptive else None,
    'adaptive': _recovered(knowing) if knowing else None,
    'by': attackers(leaking),
    'adaptive_attacks': list(dict.fromkeys(summary['adaptive'] for summary in by_strength if summary['recovered'])),
    'flags': flags,
  }


def attackers(rows: Iterable[Row]) -> list[str]:
  """Returns the attackers of these rows, 'attack · adaptive attack', the one with the most trials among them first."""
  trials: dict[str, set] = {}
  for row in rows:
    trials.setdefault(' · '.join(filter(None, [row['attack'], row.get('adaptive')])), set()).add(row['trial'])
  return sorted(trials, key=lambda name: -len(trials[name]))


def _recovered(rows: Iterable[Row]) -> int:
  """Returns the number of trials with a success among their rows."""
  return len({row['trial'] for row in rows if row['success']})


def _reached(rows: Iterable[Row], level: str, named: Collection[int]) -> int:
  """Returns the number of trials of which any row has this verdict or a stronger one, or that are `named` at least."""
  enough = LEVELS[: LEVELS.index(level) + 1]
  return len(_trials(rows, enough) | (set(named) if LEVELS[2] in enough else set()))


def _trials(rows: Iterable[Row], verdicts: Collection[str]) -> set[int]:
  return {row['trial'] for row in rows if row['verdict'] in verdicts}


def _strength(summary: Summary) -> tuple[int, float]:
  score = summary[of_rows([summary]).score]
  return summary['recovered'], -math.inf if score is None else score
