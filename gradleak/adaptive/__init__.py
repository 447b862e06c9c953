"""Attackers who know the defense: adaptive attacks by its traits, and those that are special to one defense."""

from gradleak.adaptive import compression, concealment, graddefense, soteria
from gradleak.adaptive.base import (
  NON_ADAPTIVE,
  AdaptiveAttack,
  Case,
  Change,
  Known,
  View,
  adaptive_attacks,
  adaptive_to,
  everything,
)

__all__ = [
  'NON_ADAPTIVE',
  'AdaptiveAttack',
  'Case',
  'Change',
  'Known',
  'View',
  'adaptive_attacks',
  'adaptive_to',
  'compression',
  'concealment',
  'everything',
  'graddefense',
  'soteria',
]
