"""Reading the samples that the flags name, and saying what a user may not expect of them."""

from typing import Any

from absl import flags

import gradleak as gl
from launch import _program


def define_largest() -> flags.FlagHolder[float | None]:
  """Defines --largest_pixel and returns its holder."""
  return flags.DEFINE_float(
    'largest_pixel', None, 'Value in the files that is 1, as 4095 for 12 bits; by default the largest of their type.'
  )


def load(name: str, split: str, **options: Any) -> gl.data.Dataset:
  """Returns what `gradleak.data.load` does of the same arguments, and writes its notes to standard error."""
  dataset = gl.data.load(name, split, **options)
  for note in dataset.notes:
    _program.say(f'note: {note}')
  return dataset
