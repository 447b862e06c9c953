"""Attackers who know the defense: counter-measures by its traits, and those that are special to one defense."""

from gradleak.adaptive import compression, concealment, graddefense, soteria
from gradleak.adaptive.base import UNAWARE, Case, Counter, Known, View, counter_to, counters, everything

__all__ = [
  'UNAWARE',
  'Case',
  'Counter',
  'Known',
  'View',
  'compression',
  'concealment',
  'counter_to',
  'counters',
  'everything',
  'graddefense',
  'soteria',
]
