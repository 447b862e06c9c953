"""ε from below as a table for the terminal, and as CSV: what each defense states, and what uploads show."""

from collections.abc import Sequence
from typing import Any

from gradleak.core import errors, storage
from gradleak.report.formatting import defenses, exceeding, listed, percent
from gradleak.report.page import write_files
from gradleak.report.terminal import page
from gradleak.report.words import said
from gradleak.studies.epsilon import BROKEN, UNSTATED, EpsilonAudit
from gradleak.summary.cases import csv_text


def epsilon_table(found: EpsilonAudit, width: int = 110) -> str:
  """Returns a line per defense and method, aligned, and what the rows say below it.

  Args:
    found: what `gradleak.audit_epsilon` returns.
    width: columns of the terminal.
  """
  rows = _check(found).rows
  lines: list[Sequence[str]] = [('defense / method', 'unit', 'stated ε', 'measured ε ≥', 'by', 'verdict')]
  for label in defenses(rows):
    lines.append((label,))
    lines += [_line(row) for row in rows if row['defense'] == label]
  return page(lines, [*_findings(rows), *_terms(rows)], width)


def epsilon_csv(found: EpsilonAudit) -> str:
  """Returns the rows as CSV text, with the columns of `EpsilonAudit.rows`."""
  return csv_text(_check(found).rows)


def write_epsilon(found: EpsilonAudit, folder: Any) -> None:
  """Writes epsilon.csv, epsilon.txt (the table) and rows.jsonl, each whole or not at all."""
  files: dict[str, str | bytes | None] = {'epsilon.csv': epsilon_csv(found), 'epsilon.txt': epsilon_table(found)}
  write_files(folder, {**files, 'rows.jsonl': storage.json_lines(found.rows)})


def _check(found: Any) -> EpsilonAudit:
  return errors.check_instance('the result', found, EpsilonAudit, 'what gradleak.audit_epsilon returns')


def _line(row: dict[str, Any]) -> tuple[str, ...]:
  if row['guesses'] is None:
    by = f'TPR {percent(row["tpr"])}, FPR {percent(row["fpr"], 2)}'
  else:
    by = f'{row["correct"]} of {row["guesses"]} guesses'
  measured, stated = exceeding(row['measured'], row['stated'])
  return f'  {row["method"]}', row['unit'], stated, measured, by, row['verdict']


def _findings(rows: Sequence[dict[str, Any]]) -> list[str]:
  broken = defenses(row for row in rows if row['verdict'] == BROKEN)
  unstated = defenses(row for row in rows if row['verdict'] == UNSTATED)
  found = [said('epsilon.broken', names=broken, n=len(broken))] if broken else []
  if not broken and len(rows) > sum(row['verdict'] == UNSTATED for row in rows):
    found.append(said('epsilon.consistent'))
  return found + ([said('epsilon.unstated', names=unstated, n=len(unstated))] if unstated else [])


def _terms(rows: Sequence[dict[str, Any]]) -> list[str]:
  """Returns what the figures are relative to, and what a method assumes."""
  judged = [row for row in rows if row['verdict'] != UNSTATED] or rows
  seen = dict.fromkeys((row['relation'], row['published'], row['delta'], row['accountant']) for row in judged)
  terms = [
    ', '.join(filter(None, [relation, published, f'δ = {delta:g}', accountant and f'stated by {accountant.upper()}']))
    for relation, published, delta, accountant in seen
  ]
  first = rows[0]
  facts = {'neighbours': first['neighbours'], 'confidence': percent(first['confidence'], 0)}
  assumed = [said('epsilon.assumed')] if any(row['assumes'] for row in rows) else []
  return [said('epsilon.terms', terms=listed(terms), **facts), *assumed]
