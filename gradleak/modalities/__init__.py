"""Modalities: what a sample is, how it is judged and shown."""

from gradleak.modalities.base import REGISTRY, Column, Modality, Piece, Shown, modality, of_config, of_rows
from gradleak.modalities.images import IMAGES
from gradleak.modalities.tables import TABLE, table

__all__ = [
  'IMAGES',
  'REGISTRY',
  'TABLE',
  'Column',
  'Modality',
  'Piece',
  'Shown',
  'modality',
  'of_config',
  'of_rows',
  'table',
]
