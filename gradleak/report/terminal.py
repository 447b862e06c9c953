"""An audit as a table for the terminal."""

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gradleak.audit.result import AuditResult, check_result
from gradleak.modalities import of_rows
from gradleak.report import findings, wording
from gradleak.report.formatting import aligned, count_range, listed, number, plus_minus, together
from gradleak.report.words import speaking, worded
from gradleak.summary.cases import Summary, named, paired, summarise, worst_case


@speaking
def terminal_table(result: AuditResult, width: int = 110) -> str:
  """Returns a result as an aligned table of at most `width` columns, followed by its findings in a few sentences."""
  summaries, worst = summarise(check_result(result).rows), worst_case(result.rows)
  pairs, size = paired(summaries), result.config.get('batch_size', 1)
  titles = [one.with_unit() for one in of_rows(result.rows).shown]
  lines: list[Sequence[str]] = [
    ('attack / defense', *titles, 'recovered (95 %)', 'inconclusive', 'worst verdict')
    + ((f'fully, of {size}',) if size > 1 else ())
  ]
  for attack, of_attack in together((attack, pair) for (attack, _), pair in pairs.items()).items():
    lines.append((attack, _thresholds(summary for pair in of_attack for summary in pair)))
    for pair in of_attack:
      if pair[0]['adaptive'] is not None:
        lines.append((f'  {pair[0]["defense"]}',))
      lines += [_line(summary, size) for summary in pair]
  told = [
    *findings.brief(summaries, worst, result.config, result.methods),
    *findings.stopped(result),
    *findings.alarms(result.controls, worst),
    wording.gallery(result.config),
  ]
  closing = [' '.join(filter(None, map(str, told))), *_legend(pairs, result.adaptive_attacks)]
  return page(lines, [*closing, *findings.guarantees(result.methods)], width)


def page(lines: Sequence[Sequence[str]], closing: Iterable[Any], width: int = 110) -> str:
  """Returns a table and the texts below it in at most `width` columns; the first cells are wrapped."""
  wrapped = [line for text in closing for line in textwrap.wrap(str(text).replace('`', ''), width)]
  return '\n'.join([*aligned(lines, width), '', *wrapped]) + '\n'


def _legend(
  pairs: Mapping[tuple[str, str], list[Summary]], adaptive_attacks: Mapping[str, Mapping[str, str]]
) -> list[str]:
  """Returns a sentence on each adaptive attack in the table, with its name and its effect.

  Where it does other things under other defenses, the sentences name these.
  """
  used = [summary for pair in pairs.values() for summary in pair if summary['adaptive']]
  does = [
    (one['adaptive'], adaptive_attacks.get(one['defense'], {}).get(one['adaptive']), one['defense']) for one in used
  ]
  said = together((adaptive, (sentence, defense)) for adaptive, sentence, defense in does if sentence)
  return [
    f'adaptive: {adaptive}{f" under {listed(dict.fromkeys(of))}" if len(together(told)) > 1 else ""}: '
    f'{worded(sentence)}'
    for adaptive, told in said.items()
    for sentence, of in together(told).items()
  ]


def _line(summary: Summary, size: int) -> tuple[str, ...]:
  """Returns the cells of one line of the terminal's table; adaptive attackers are indented below their defense."""
  adaptive = summary['adaptive']
  score, *others = of_rows([summary]).shown
  return (
    f'  {summary["defense"]}' if adaptive is None else f'    adaptive: {adaptive}',
    plus_minus(summary, score.column, score.digits),
    *(number(summary[one.column], one.digits) for one in others),
    count_range(summary),
    f'{summary["inconclusive"]}' + (f' + {summary["diverged"]} NaN' if summary['diverged'] else ''),
    f'{summary[named(summary["verdict"])]} {summary["verdict"]}',
    *([number(summary['revealed'])] if size > 1 else []),
  )


def _thresholds(summaries: Iterable[Summary]) -> str:
  """Returns the threshold of an attack in words; a range where adaptive attacks have others."""
  given = list(summaries)
  kind = of_rows(given)
  name, digits = kind.controls[0], kind.shown[0].digits
  found = sorted(summary[name] for summary in given if summary[name] is not None)
  ends = dict.fromkeys(number(threshold, digits) for threshold in (found[0], found[-1])) if found else {}
  return f'control {"–".join(ends)}' if found else 'no control'
