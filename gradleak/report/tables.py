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
  """Returns one summary per attack, defense and counter-measure, in order of appearance.

  Runs that diverged have no metrics: they are left out of the means, and count as not recovered in the share.

  Args:
    rows: the audit's rows, one dict per trial × attack × defense × counter-measure.

  Returns:
    A list of flat dicts: `attack`, `defense`, `knowledge` ('unaware' or 'aware' of the defense), `counter` (the name of
    an aware attacker's counter-measure, else None), `tier`, `n`; of `psnr` (dB), `ssim`, `mse`, `pearson` the mean with
    `_low` and `_high`, its 95 % interval; `success` (the share of runs beyond the control) with its exact 95 %
    interval; the counts `recovered`, `protected`, `not_solved`, `diverged`, and `unfinished` (recovered before the
    descent had finished); the means of `revealed` (images of a batch that are fully revealed), `revealed_psnr` (of
    these, dB), `oracle_psnr` (dB), `label_correct`, `change` and `sent` (share of the entries sent); `control_psnr`
    (dB); and `verdict`, the word for all of them. What cannot be computed is None.
  """
  return [_summary(group) for group in by_attacker(rows).values()]


def strongest(summaries):
  """Returns the summary of the most runs recovered, among equals that of the highest mean PSNR."""
  return max(summaries, key=_strength)


def paired(summaries):
  """Returns what is shown where every counter-measure would be too much: {(attack, defense): [summary, …]}.

  The summary of the unaware attacker comes first, then the strongest of the aware ones; of either where there is one.
  """
  pairs = {}
  for pair, group in grouped(summaries, 'attack', 'defense').items():
    unaware = [summary for summary in group if summary['counter'] is None]
    aware = [summary for summary in group if summary['counter'] is not None]
    pairs[pair] = [*unaware, strongest(aware)] if aware else unaware
  return pairs


def worst_case(rows):
  """Returns one entry per defense: the share of trials that any of the attackers recovers, aware of it or not.

  Args:
    rows: the audit's rows.

  Returns:
    A list of dicts: `defense`; `recovered` of `n` trials; their share `success` with the exact 95 % interval
    `success_low`, `success_high`; of the trials those that `unaware` and `aware` attackers recover, None where there
    were none; `by`, the attacks that recover something, each with its counter-measure; `counters`, the counter-measures
    that recover something, the strongest first; `runs` (one attack on one trial each) and of these the counts
    `protected`, `not_solved`, `diverged`; and `flags`, the reasons to be careful, their counts over runs.
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
  """Returns the summaries of `rows` as CSV text, one line each; a missing value is an empty cell."""
  summaries = summarise(rows)
  text = io.StringIO()
  writer = csv.DictWriter(text, fieldnames=list(summaries[0]) if summaries else ['attack', 'defense'])
  writer.writeheader()
  writer.writerows(summaries)
  return text.getvalue()


def terminal_table(result, width=110):
  """Returns the result as an aligned table of at most `width` columns, closed by what it means in a few sentences."""
  summaries, worst = summarise(result.rows), worst_case(result.rows)
  pairs, size = paired(summaries), result.config.get('batch_size', 1)
  head = ('attack / defense', 'PSNR dB', 'SSIM', 'recovered (95 %)', 'not solved', 'verdict')
  head += (f'fully, of {size}',) if size > 1 else ()
  lines, last = [], None
  for (attack, defense), pair in pairs.items():
    if attack != last:
      last = attack
      of_attack = [summary for (name, _), group in pairs.items() if name == attack for summary in group]
      lines.append((attack, _thresholds(of_attack)))
    if pair[0]['counter'] is not None:
      lines.append((f'  {defense}',))
    lines += [_line(summary, size) for summary in pair]
  lines = [(*line, *[''] * (len(head) - len(line))) for line in lines]
  widths = [max(len(line[i]) for line in [head, *lines]) for i in range(len(head))]
  widths[0] = min(widths[0], width - sum(widths[1:]) - 2 * (len(head) - 1))
  table = [text for line in [head, *lines] for text in _aligned(line, widths)]
  table.insert(1, '-' * (sum(widths) + 2 * (len(head) - 1)))
  means = [
    findings.undefended(summaries, worst, result.config),
    *findings.broken(worst, result.config),
    findings.caution(worst),
  ]
  closing = [' '.join(means), *findings.guarantees(result.config)]
  wrapped = [line for text in closing for line in textwrap.wrap(text.replace('`', ''), width)]
  return '\n'.join([*table, '', *wrapped]) + '\n'


def grouped(rows, *keys):
  """Returns the rows by the values of `keys`, None where one is missing: {(value, …): rows}, in order of appearance."""
  groups = {}
  for row in rows:
    groups.setdefault(tuple(row.get(key) for key in keys), []).append(row)
  return groups


def attacker(row):
  """Returns whose a row or summary is: (attack, defense) or, who knows the defense, (attack, defense, counter)."""
  return row['attack'], row['defense'], *filter(None, [row.get('counter')])


def by_attacker(rows):
  """Returns {`attacker`: rows}, in order of appearance; the keys are those of an audit's reconstructions and curves."""
  groups = {}
  for row in rows:
    groups.setdefault(attacker(row), []).append(row)
  return groups


def _line(summary, size):
  """Returns the cells of one line of the terminal's table; an aware attacker stands further in, below its defense."""
  counter = summary['counter']
  return (
    f'  {summary["defense"]}' if counter is None else f'    aware: {counter}',
    plus_minus(summary, 'psnr'),
    number(summary['ssim'], 2),
    f'{summary["recovered"]} of {summary["n"]} ({percent_range(summary)})',
    f'{summary["not_solved"]}' + (f' + {summary["diverged"]} NaN' if summary['diverged'] else ''),
    summary['verdict'],
    *([number(summary['revealed'])] if size > 1 else []),
  )


def _thresholds(summaries):
  """Returns the threshold of an attack, or the range of those of its counter-measures."""
  found = sorted(summary['control_psnr'] for summary in summaries if summary['control_psnr'] is not None)
  if not found:
    return 'no control'
  return 'control ' + '–'.join(dict.fromkeys(number(threshold) for threshold in (found[0], found[-1])))


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
    'knowledge': first.get('knowledge', 'unaware'),
    'counter': first.get('counter'),
    'tier': first.get('tier'),
    'n': len(rows),
    **{key: value for name in METRICS for key, value in _mean_interval(rows, name).items()},
    **_share(sum(bool(row['success']) for row in rows), len(rows)),
    **counts,
    'unfinished': sum(row['verdict'] == 'recovered' and not row['solved'] for row in rows),
    'revealed': _mean(rows, 'revealed'),
    'revealed_psnr': _mean(rows, 'revealed_psnr'),
    'oracle_psnr': _mean(rows, 'oracle_psnr'),
    'control_psnr': _mean(rows, 'control_psnr'),
    'label_correct': _mean(rows, 'label_correct'),
    'change': _mean(rows, 'change'),
    'sent': _mean(rows, 'sent'),
    'verdict': _verdict(counts, len(rows)),
  }


def _worst(defense, rows, setting):
  trials = {row['trial'] for row in rows}
  recovered = _recovered(rows)
  unaware = [row for row in rows if row.get('counter') is None]
  aware = [row for row in rows if row.get('counter') is not None]
  leaking = [row for row in rows if row['success']]
  by_strength = sorted(summarise(aware), key=_strength, reverse=True)
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
    'unaware': _recovered(unaware) if unaware else None,
    'aware': _recovered(aware) if aware else None,
    'by': list(dict.fromkeys(' · '.join(filter(None, [row['attack'], row.get('counter')])) for row in leaking)),
    'counters': list(dict.fromkeys(summary['counter'] for summary in by_strength if summary['recovered'])),
    'flags': flags,
  }


def _recovered(rows):
  """Returns the number of trials with a success among their rows."""
  return len({row['trial'] for row in rows if row['success']})


def _strength(summary):
  return summary['recovered'], -math.inf if summary['psnr'] is None else summary['psnr']


def _aligned(line, widths):
  """Returns the text lines of one table line, whose first cell may take several."""
  indent = len(line[0]) - len(line[0].lstrip())
  first = [' ' * indent + part for part in wrap(line[0].strip(), widths[0] - indent)]
  rest = [f'{cell:<{width}}' for cell, width in zip(line[1:], widths[1:], strict=True)]
  return ['  '.join([f'{first[0]:<{widths[0]}}', *rest]).rstrip(), *first[1:]]
