"""An audit as a table for the terminal."""

import textwrap
from collections.abc import Iterable, Mapping, Sequence

from gradleak.audit.result import AuditResult, check_result
from gradleak.report import findings, wording
from gradleak.report.formatting import listed, number, percent_range, plus_minus, wrap
from gradleak.summary.cases import Summary, named, paired, summarise, worst_case


def terminal_table(result: AuditResult, width: int = 110) -> str:
  """Returns a result as an aligned table of at most `width` columns, followed by its findings in a few sentences."""
  summaries, worst = summarise(check_result(result).rows), worst_case(result.rows)
  pairs, size = paired(summaries), result.config.get('batch_size', 1)
  head: tuple[str, ...] = ('attack / defense', 'PSNR dB', 'SSIM', 'recovered (95 %)', 'not solved', 'worst verdict')
  head += (f'fully, of {size}',) if size > 1 else ()
  lines: list[tuple[str, ...]] = []
  last = None
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
  found = [
    *findings.unaware(summaries),
    *findings.remarks(result.methods),
    *findings.pixels(result.config),
    findings.undefended(summaries, worst, result.config),
    *findings.broken(worst, result.config),
    *findings.hinting(worst, result.config),
    *findings.outdone(worst),
    *findings.unsuited(summaries, result.config),
    findings.caution(worst),
    findings.alarms(result.controls, worst),
    wording.gallery(result.config),
  ]
  closing = [' '.join(filter(None, found)), *_legend(pairs, result.counters), *findings.guarantees(result.methods)]
  wrapped = [line for text in closing for line in textwrap.wrap(text.replace('`', ''), width)]
  return '\n'.join([*table, '', *wrapped]) + '\n'


def _legend(pairs: Mapping[tuple[str, str], list[Summary]], counters: Mapping[str, Mapping[str, str]]) -> list[str]:
  """Returns a sentence on each counter-measure that stands in the table: 'aware: name: what that attacker does'.

  Where it does other things under other defenses, the sentences name these.
  """
  said: dict[str, dict[str, list[str]]] = {}
  for summary in (summary for pair in pairs.values() for summary in pair if summary['counter']):
    sentence = counters.get(summary['defense'], {}).get(summary['counter'])
    if sentence:
      said.setdefault(summary['counter'], {}).setdefault(sentence, []).append(summary['defense'])
  return [
    f'aware: {counter}{f" under {listed(list(dict.fromkeys(of)))}" if len(sentences) > 1 else ""}: {sentence}'
    for counter, sentences in said.items()
    for sentence, of in sentences.items()
  ]


def _line(summary: Summary, size: int) -> tuple[str, ...]:
  """Returns the cells of one line of the terminal's table; aware attackers are indented below their defense."""
  counter = summary['counter']
  return (
    f'  {summary["defense"]}' if counter is None else f'    aware: {counter}',
    plus_minus(summary, 'psnr'),
    number(summary['ssim'], 2),
    f'{summary["recovered"]} of {summary["n"]} ({percent_range(summary)})',
    f'{summary["not_solved"]}' + (f' + {summary["diverged"]} NaN' if summary['diverged'] else ''),
    f'{summary[named(summary["verdict"])]} {summary["verdict"]}',
    *([number(summary['revealed'])] if size > 1 else []),
  )


def _thresholds(summaries: Iterable[Summary]) -> str:
  """Returns the threshold of an attack in words; a range where counter-measures have others."""
  found = sorted(summary['control_psnr'] for summary in summaries if summary['control_psnr'] is not None)
  if not found:
    return 'no control'
  return 'control ' + '–'.join(dict.fromkeys(number(threshold) for threshold in (found[0], found[-1])))


def _aligned(line: Sequence[str], widths: Sequence[int]) -> list[str]:
  """Returns the text lines of one table line, whose first cell is wrapped."""
  indent = len(line[0]) - len(line[0].lstrip())
  first = [' ' * indent + part for part in wrap(line[0].strip(), widths[0] - indent)]
  rest = [f'{cell:<{width}}' for cell, width in zip(line[1:], widths[1:], strict=True)]
  return ['  '.join([f'{first[0]:<{widths[0]}}', *rest]).rstrip(), *first[1:]]
