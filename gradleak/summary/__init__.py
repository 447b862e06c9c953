"""Rows to numbers: summaries, worst cases, intervals, false alarms, and images as they are shown."""
