"""The differential privacy that a defense really gives, in words: the ε of one upload."""

from gradleak.defenses import differential_privacy, guarantees
from gradleak.report.formatting import upwards

DELTA = 1e-5
_MISSING = {
  'L2': 'no ε: the sensitivity is unbounded',
  'L1': 'no ε: Laplace noise needs a bound on the L1 norm, and `clip` bounds the L2 norm',
}


def guarantee(defense, epochs=1):
  """Returns what `defense` guarantees for one upload, or None if it has no noise, or noise that is not covered.

  `guarantees.mechanisms` says what is covered. Noise without a bound on what it hides guarantees nothing. No
  amplification by sampling is claimed: the server sees who sends.

  Args:
    defense, epochs: as for `guarantees.mechanisms`.
  """
  found = [_spent(mechanism) for mechanism in guarantees.mechanisms(defense, epochs)]
  return '; '.join(found) or _MISSING.get(guarantees.missing_bound(defense))


def statements(config):
  """Returns a sentence on each defense in `config['defenses']` of which `guarantee` says something, names in backticks.

  Args:
    config: the audit's settings, of which 'defenses', 'share' and 'local_epochs' are read.
  """
  epochs = (config.get('local_epochs') or 1) if config.get('share') == 'delta' else 1
  found = {defense: guarantee(defense, epochs) for defense in config.get('defenses', [])}
  return [f'`{defense}`: {statement}.' for defense, statement in found.items() if statement]


def _unit(mechanism):
  if mechanism.unit == 'client':
    return 'one upload, per client (against zeros in its place)'
  times = '' if mechanism.releases == 1 else f' of {mechanism.releases} local epochs'
  return f'one upload{times}, per example (the batch with or without it)'


def _spent(mechanism):
  """Returns the sentence on the ε that one upload through `mechanism` spends."""
  rdp, pld = (
    differential_privacy.epsilon(mechanism.noise, steps=mechanism.releases, delta=DELTA, accountant=accountant)
    for accountant in differential_privacy.ACCOUNTANTS
  )
  if pld > 1000:
    return f'ε > 1000: no protection in the sense of DP (δ = 1e-5, {_unit(mechanism)})'
  tighter = '' if pld == rdp else f', {upwards(pld)} (PLD)'
  return f'ε ≤ {upwards(rdp)} (RDP){tighter} at δ = 1e-5, {_unit(mechanism)}'
