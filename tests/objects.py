"""Texts as objects, for tests that list many methods."""

import gradleak as gl


def objects(entries):
  """Returns a list or dict of methods, texts among them parsed."""
  if isinstance(entries, dict):
    return {label: gl.parse(entry) if isinstance(entry, str) else entry for label, entry in entries.items()}
  return [gl.parse(entry) if isinstance(entry, str) else entry for entry in entries]
