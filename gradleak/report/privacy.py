"""The differential privacy that a defense guarantees for one upload, in words."""

from collections.abc import Mapping
from typing import Any

from gradleak.defenses import Mechanism, differential_privacy
from gradleak.report.formatting import upwards

DELTA = 1e-5
# The first hides which image was used from a server that knows who sends; the second, whether any was.
RELATIONS = 'replace one', 'replace by zeros'
NO_PROTECTION = 1000  # ε beyond which it says nothing
_MISSING = {
  'L2': 'no ε: nothing bounds the norm of what the noise is added to',
  'L1': 'no ε: Laplace noise needs a bound on the L1 norm, and `clip` bounds the L2 norm',
}


def guarantee(facts: Mapping[str, Any]) -> str | None:
  """Returns what a defense guarantees for one upload, or None if it has no noise, or noise that is not covered.

  It names the neighbouring relation of each ε, see `differential_privacy.Epsilon`. Noise without a bound on the
  sensitivity guarantees nothing. Sampling of clients amplifies nothing: the server knows which client sent an upload.

  Args:
    facts: of the defense, from `AuditResult.methods`; `defenses.guarantees` says what is covered.
  """
  found = [_spent(Mechanism(**mechanism)) for mechanism in facts['mechanisms']]
  return '; '.join(found) or _MISSING.get(facts['missing_bound'])


def brief(facts: Mapping[str, Any]) -> str:
  """Returns the smallest ε that `guarantee` states of one upload for `RELATIONS[0]`, by RDP; '' for none."""
  bounds = [
    differential_privacy.of_upload(Mechanism(**one), RELATIONS[0], delta=DELTA).value
    for one in facts.get('mechanisms', ())
  ]
  if not bounds:
    return ''
  least = min(bounds)
  return bounded(least)


def bounded(epsilon: float) -> str:
  """Returns an ε that a defense guarantees, rounded up; where it is no protection, only that."""
  return f'ε > {NO_PROTECTION}' if epsilon > NO_PROTECTION else f'ε ≤ {upwards(epsilon)}'


def statements(methods: Mapping[str, Any]) -> dict[str, str]:
  """Returns {label: `guarantee`} of the defenses that have one.

  Args:
    methods: `AuditResult.methods`.
  """
  found = {label: guarantee(facts) for label, facts in methods.get('defenses', {}).items()}
  return {label: statement for label, statement in found.items() if statement}


def _spent(mechanism: Mechanism) -> str:
  """Returns the ε that one upload through a mechanism spends in both relations, in words."""
  rdp = differential_privacy.of_upload(mechanism, RELATIONS[0], delta=DELTA)
  times = '' if mechanism.releases == 1 else f' of {mechanism.releases} local epochs'
  terms = f'per {rdp.unit}, {rdp.published}{times}, no sampling, δ = {rdp.delta:g}'
  return f'{", ".join(_bounded(mechanism, relation) for relation in RELATIONS)}; {terms}'


def _bounded(mechanism: Mechanism, relation: str) -> str:
  """Returns the ε of one upload in a relation, by each accountant."""
  rdp, pld = (
    differential_privacy.of_upload(mechanism, relation, delta=DELTA, accountant=accountant).value
    for accountant in differential_privacy.ACCOUNTANTS
  )
  if pld > NO_PROTECTION:
    return f'ε > {NO_PROTECTION} ({relation}): no protection in the sense of DP'
  tighter = '' if pld == rdp else f', {upwards(pld)} by PLD'
  return f'ε ≤ {upwards(rdp)} ({relation}; by RDP{tighter})'
