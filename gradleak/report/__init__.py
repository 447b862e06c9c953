"""Audit results for people: summaries, a terminal table, a picture grid, curves, one self-contained HTML page."""

from gradleak.report.descent import curves
from gradleak.report.frontier import entries, frontier, frontier_csv, frontier_table
from gradleak.report.page import render, write
from gradleak.report.pictures import data_uri, grid
from gradleak.report.strengths import strengths, sweep_csv, sweep_summaries
from gradleak.report.tables import summarise, summary_csv, terminal_table, worst_case

__all__ = [
  'curves',
  'data_uri',
  'entries',
  'frontier',
  'frontier_csv',
  'frontier_table',
  'grid',
  'render',
  'strengths',
  'summarise',
  'summary_csv',
  'sweep_csv',
  'sweep_summaries',
  'terminal_table',
  'worst_case',
  'write',
]
