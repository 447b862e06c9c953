"""Audit results for people: summaries, a terminal table, a picture grid, curves, one self-contained HTML page."""

from gradleak.report.descent import curves
from gradleak.report.frontier import Trained, entries, frontier, frontier_csv, frontier_table, worst_case_of
from gradleak.report.page import render, write
from gradleak.report.partition import partition_picture
from gradleak.report.pictures import data_uri, grid
from gradleak.report.strengths import strengths, sweep_csv, sweep_summaries
from gradleak.report.tables import summarise, summary_csv, terminal_table, worst_case
from gradleak.report.training import write_training

__all__ = [
  'Trained',
  'curves',
  'data_uri',
  'entries',
  'frontier',
  'frontier_csv',
  'frontier_table',
  'grid',
  'partition_picture',
  'render',
  'strengths',
  'summarise',
  'summary_csv',
  'sweep_csv',
  'sweep_summaries',
  'terminal_table',
  'worst_case',
  'worst_case_of',
  'write',
  'write_training',
]
