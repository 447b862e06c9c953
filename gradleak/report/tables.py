"""Rows of an audit as summaries, as CSV text, and as a table for the terminal."""

import csv
import io
import math
import textwrap

from gradleak.metrics import statistics
from gradleak.report import findings
from gradleak.report.formatting import number, percent_range, plus_minus, wrap

VERDICTS = ('recovered', 'protected', 'not solved', 'diverged')
METRICS = ('psnr', 'ssim', 'mse', 'pearson')


def summarise(rows):
  """Returns one summary per (attack, defense), in order of appearance.

  Runs that diverged have no metrics: they are left out of the means, and count as not recovered in the share.

  Args:
    rows: the audit's rows, one dict per trial × attack × defense.

  Returns:
    A list of flat dicts: `attack`, `defense`, `tier`, `n`; of `psnr` (dB), `ssim`, `mse` and `pearson` the mean with
    `_low` and `_high`, its 95 % interval; `success` (the share of runs beyond the control) with its exact 95 %
    interval; the counts `recovered`, `protected`, `not_solved`, `diverged`, and `unfinished` (recovered before the
    descent had finished); the means of `oracle_psnr` (dB), `label_correct` and `change`; `control_psnr` (dB); and
    `verdict`, the word for all of them. What cannot be computed is None.
  """
  return [_summary(group) for group in grouped(rows, 'attack', 'defense').values()]


def worst_case(rows):
  """Returns one entry per defense: the share of trials that any of the attacks recovers.

  Args:
    rows: the audit's rows.

  Returns:
    A list of dicts: `defense`; `recovered` of `n` trials; their share `success` with the exact 95 % interval
    `success_low`, `success_high`; `runs` (one attack on one trial each) and of these the counts `protected`,
    `not_solved`, `diverged`; `attacks`, those that recover something; and `flags`, the reasons to be careful, their
    counts over runs.
  """
  groups = grouped(rows, 'defense')
  undefended = groups.get(('none',))
  setting = []
  if undefended is None:
    setting = ['no undefended run']
  elif not any(row['success'] for row in undefended):
    setting = ['undefended run fails']
  return [_worst(defense, group, setting) for (defense,), group in groups.items()]


def summary_csv(rows):
  """Returns the summaries of `rows` as CSV text, one line per (attack, defense); a missing value is an empty cell."""
  summaries = summarise(rows)
  text = io.StringIO()
  writer = csv.DictWriter(text, fieldnames=list(summaries[0]) if summaries else ['attack', 'defense'])
  writer.writeheader()
  writer.writerows(summaries)
  return text.getvalue()


def terminal_table(result, width=110):
  """Returns the result as an aligned table of at most `width` columns, closed by what it means in a few sentences."""
  summaries, worst = summarise(result.rows), worst_case(result.rows)
  head = ('attack / defense', 'PSNR dB', 'SSIM', 'recovered (95 %)', 'not solved', 'verdict')
  lines, attack = [], None
  for summary in summaries:
    if summary['attack'] != attack:
      attack = summary['attack']
      threshold = summary['control_psnr']
      lines.append((attack, f'control {number(threshold)}' if threshold is not None else 'no control', '', '', '', ''))
    lines.append(
      (
        f'  {summary["defense"]}',
        plus_minus(summary, 'psnr'),
        number(summary['ssim'], 2),
        f'{summary["recovered"]} of {summary["n"]} ({percent_range(summary)})',
        f'{summary["not_solved"]}' + (f' + {summary["diverged"]} NaN' if summary['diverged'] else ''),
        summary['verdict'],
      )
    )
  widths = [max(len(line[i]) for line in [head, *lines]) for i in range(len(head))]
  widths[0] = min(widths[0], width - sum(widths[1:]) - 2 * (len(head) - 1))
  table = [text for line in [head, *lines] for text in _aligned(line, widths)]
  table.insert(1, '-' * (sum(widths) + 2 * (len(head) - 1)))
  closing = f'{findings.undefended(summaries, worst, result.config)} {findings.caution(worst)}'.replace('`', '')
  return '\n'.join([*table, '', *textwrap.wrap(closing, width)]) + '\n'


def grouped(rows, *keys):
  """Returns the rows by the values of `keys`: {(value, …): rows}, in order of appearance."""
  groups = {}
  for row in rows:
    groups.setdefault(tuple(row[key] for key in keys), []).append(row)
  return groups


def _numbers(rows, key):
  """Returns the values of `key` that are there, as floats."""
  values = [row.get(key) for row in rows]
  return [float(value) for value in values if value is not None and not math.isnan(value)]


def _mean(rows, key):
  values = _numbers(rows, key)
  return math.fsum(values) / len(values) if values else None


def _mean_interval(rows, key):
  """Returns {key: mean, key_low, key_high} over the runs that have it; None where they cannot be computed."""
  values = _numbers(rows, key)
  if not values:
    return dict.fromkeys((key, f'{key}_low', f'{key}_high'))
  mean, low, high = (float(value) for value in statistics.mean_interval(values))
  bounded = math.isfinite(low) and math.isfinite(high)
  return {key: mean, f'{key}_low': low if bounded else None, f'{key}_high': high if bounded else None}


def _share(successes, n):
  share, low, high = (float(value) for value in statistics.proportion_interval(successes, n))
  return {'success': share, 'success_low': low, 'success_high': high}


def _counts(rows):
  return {verdict.replace(' ', '_'): sum(row['verdict'] == verdict for row in rows) for verdict in VERDICTS}


def _verdict(counts, n):
  """Returns the word for a group of runs: the verdict that all share, else no more than the mixture shows."""
  for verdict in VERDICTS:
    if counts[verdict.replace(' ', '_')] == n:
      return verdict
  return 'partly recovered' if counts['recovered'] else 'undecided'


def _summary(rows):
  first, counts = rows[0], _counts(rows)
  return {
    'attack': first['attack'],
    'defense': first['defense'],
    'tier': first.get('tier'),
    'n': len(rows),
    **{key: value for name in METRICS for key, value in _mean_interval(rows, name).items()},
    **_share(sum(bool(row['success']) for row in rows), len(rows)),
    **counts,
    'unfinished': sum(row['verdict'] == 'recovered' and not row['solved'] for row in rows),
    'oracle_psnr': _mean(rows, 'oracle_psnr'),
    'control_psnr': _mean(rows, 'control_psnr'),
    'label_correct': _mean(rows, 'label_correct'),
    'change': _mean(rows, 'change'),
    'verdict': _verdict(counts, len(rows)),
  }


def _worst(defense, rows, setting):
  trials = grouped(rows, 'trial').values()
  recovered = sum(any(row['success'] for row in trial) for trial in trials)
  counts, runs = _counts(rows), len(rows)
  flags = list(setting)
  if counts['not_solved']:
    flags.append(f'{counts["not_solved"]} of {runs} not solved')
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
    **_share(recovered, len(trials)),
    'runs': runs,
    'attacks': list(dict.fromkeys(row['attack'] for row in rows if row['success'])),
    'flags': flags,
  }


def _aligned(line, widths):
  """Returns the text lines of one table line, whose first cell may take several."""
  indent = len(line[0]) - len(line[0].lstrip())
  first = [' ' * indent + part for part in wrap(line[0].strip(), widths[0] - indent)]
  rest = [f'{cell:<{width}}' for cell, width in zip(line[1:], widths[1:], strict=True)]
  return ['  '.join([f'{first[0]:<{widths[0]}}', *rest]).rstrip(), *first[1:]]
