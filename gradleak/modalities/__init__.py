"""Modalities: what a sample is, how it is judged and shown."""

from gradleak.modalities.base import (
  PLAIN,
  REGISTRY,
  Column,
  Modality,
  Piece,
  Relaxation,
  Shown,
  modality,
  of_config,
  of_rows,
)
from gradleak.modalities.images import IMAGES
from gradleak.modalities.tables import TABLE, table
from gradleak.modalities.text import TEXT

__all__ = [
  'IMAGES',
  'PLAIN',
  'REGISTRY',
  'TABLE',
  'TEXT',
  'Column',
  'Modality',
  'Piece',
  'Relaxation',
  'Shown',
  'modality',
  'of_config',
  'of_rows',
  'table',
]
