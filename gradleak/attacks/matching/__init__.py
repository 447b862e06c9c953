"""Gradient matching as a sum of terms: a distance, priors, a parametrisation, a solver and a simulation."""

from gradleak.attacks.matching.ladder import Ladder
from gradleak.attacks.matching.samples import Samples, start_images
from gradleak.attacks.matching.search import PARTS, Matching, MatchState, composed, gradient_matching, settings
from gradleak.attacks.matching.terms import TERMS, Denoising, Given, Term

__all__ = [
  'PARTS',
  'TERMS',
  'Denoising',
  'Given',
  'Ladder',
  'MatchState',
  'Matching',
  'Samples',
  'Term',
  'composed',
  'gradient_matching',
  'settings',
  'start_images',
]
