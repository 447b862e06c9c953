"""Results for people: summaries, a terminal table, a picture grid, curves, one self-contained HTML page."""

import os
from typing import Any

from gradleak.audit import AuditResult, load
from gradleak.core import errors
from gradleak.report import notebook as notebook  # it gives results their HTML
from gradleak.report.autoleak import autoleak_table, render_autoleak, write_autoleak
from gradleak.report.borders import border_picture
from gradleak.report.captured import captured_grid, captured_table, render_captured, write_captured
from gradleak.report.descent import curves
from gradleak.report.epsilon import epsilon_csv, epsilon_table, write_epsilon
from gradleak.report.frontier import entries, frontier, frontier_csv, frontier_table
from gradleak.report.identification import (
  identification_picture,
  identification_table,
  render_identification,
  write_identification,
)
from gradleak.report.leaderboard import render_leaderboard, write_leaderboard
from gradleak.report.page import render, write_audit
from gradleak.report.partition import partition_picture
from gradleak.report.pictures import grid
from gradleak.report.sensitivity import (
  render_sensitivity,
  sensitivity_csv,
  sensitivity_findings,
  sensitivity_table,
  waterfall,
  write_sensitivity,
)
from gradleak.report.slide import slide
from gradleak.report.strengths import strengths, sweep_csv, sweep_summaries
from gradleak.report.terminal import terminal_table
from gradleak.report.training import write_frontier, write_training
from gradleak.studies.autoleak import AutoLeak
from gradleak.studies.captured import Captured
from gradleak.studies.epsilon import EpsilonAudit
from gradleak.studies.frontier import Frontier
from gradleak.studies.identification import Identification
from gradleak.studies.sensitivity import Sensitivity
from gradleak.summary.cases import summarise, summary_csv, worst_case, worst_case_of
from gradleak.summary.shown import data_uri
from gradleak.summary.worst import levels

__all__ = [
  'autoleak_table',
  'border_picture',
  'captured_grid',
  'captured_table',
  'curves',
  'data_uri',
  'entries',
  'epsilon_csv',
  'epsilon_table',
  'frontier',
  'frontier_csv',
  'frontier_table',
  'grid',
  'identification_picture',
  'identification_table',
  'levels',
  'partition_picture',
  'render',
  'render_autoleak',
  'render_captured',
  'render_identification',
  'render_leaderboard',
  'render_sensitivity',
  'sensitivity_csv',
  'sensitivity_findings',
  'sensitivity_table',
  'slide',
  'strengths',
  'summarise',
  'summary_csv',
  'sweep_csv',
  'sweep_summaries',
  'terminal_table',
  'waterfall',
  'worst_case',
  'worst_case_of',
  'write',
  'write_autoleak',
  'write_captured',
  'write_epsilon',
  'write_identification',
  'write_leaderboard',
  'write_training',
]


def write(
  result: AuditResult
  | AutoLeak
  | Frontier
  | Captured
  | Identification
  | Sensitivity
  | EpsilonAudit
  | str
  | os.PathLike,
  folder: Any = None,
) -> None:
  """Writes the page, pictures and tables of a result, each file whole or not at all.

  Args:
    result: an `AuditResult`, an `AutoLeak`, a `Frontier`, a `Captured`, an `Identification`, a `Sensitivity` or an
      `EpsilonAudit`; or the work directory of a finished audit, see `load`.
    folder: a path, made if it does not exist; by default the work directory.

  Raises:
    UsageError: if a result is given without a folder, or a path that holds no finished audit.
  """
  if isinstance(result, str | os.PathLike):
    folder = result if folder is None else folder
    result = load(result)
  if folder is None:
    raise errors.UsageError('the result needs a folder to be written into: report.write(result, folder)')
  writers: dict[type, Any] = {Frontier: write_frontier, Captured: write_captured, Sensitivity: write_sensitivity}
  writers |= {AutoLeak: write_autoleak, Identification: write_identification, EpsilonAudit: write_epsilon}
  writers |= {object: write_audit}
  next(write for kind, write in writers.items() if isinstance(result, kind))(result, folder)
