"""The differential privacy that a defense really gives: the ε of one upload, for defenses as users write them."""

import math

from gradleak import errors, specs
from gradleak.defenses import differential_privacy
from gradleak.defenses.registry import ENTRIES, REGISTRY

DELTA = 1e-5
# They look at nothing but what they are handed, so that they cannot undo what was done before them.
_BLIND = ('clip', 'client_dp', 'gaussian', 'laplace', 'prune', 'topk')
_PLACES = ('data', 'step', 'upload')


def guarantee(defense, epochs=1):
  """Returns what `defense` guarantees for one upload, or None if it has no noise, or noise that is not covered here.

  Covered are `client_dp` and clip+gaussian (per client: the upload against zeros in its place) and `dpsgd` (per
  example: the batch with or without it), each where no later defense looks at the data again; and `gaussian` and
  `laplace` without a bound on what they hide, which guarantee nothing. No amplification by sampling is claimed: the
  server sees who sends.

  Args:
    defense: a chain as a user writes it, such as 'clip(norm=1)+gaussian(stddev=0.1)'.
    epochs: how often one upload uses each example: the local epochs of a client.
  """
  try:
    members = [
      (spec.name, specs.template(spec, REGISTRY, 'defense').settings) for spec in specs.parse_chain(defense, 'defense')
    ]
  except errors.UsageError:  # 'none', or the name of a user's own transformation
    return None
  members = [_plain(*member) for member in sorted(members, key=lambda member: _PLACES.index(ENTRIES[member[0]].place))]
  members = [member for member in members if member is not None]
  blind = [all(name in _BLIND for name, _ in members[i:]) for i in range(len(members) + 1)]
  found = []
  for i, (name, settings) in enumerate(members):
    before, bound = members[i - 1] if i else (None, {})
    if not blind[i + 1]:
      continue
    if name == 'client_dp':
      found.append(_per_client(settings['noise']))
    elif name == 'gaussian' and before == 'clip':
      found.append(_per_client(settings['stddev'] / bound['norm']))
    elif name == 'dpsgd' and settings['noise'] > 0 and i == 0:
      found.append(_per_example(settings['noise'], epochs))
  return '; '.join(found) or (_unbounded([name for name, _ in members]) if blind[0] else None)


def statements(config):
  """Returns a sentence on each defense in `config['defenses']` of which `guarantee` says something, names in backticks.

  Args:
    config: the audit's settings, of which 'defenses', 'share' and 'local_epochs' are read.
  """
  epochs = (config.get('local_epochs') or 1) if config.get('share') == 'delta' else 1
  found = {defense: guarantee(defense, epochs) for defense in config.get('defenses', [])}
  return [f'`{defense}`: {statement}.' for defense, statement in found.items() if statement]


def _plain(name, settings):
  """Returns (name, settings) of what a member amounts to: a `client_dp` without noise is a clip; None for nothing."""
  if name == 'client_dp' and settings['noise'] == 0:
    name = 'clip'
  strength = {'gaussian': 'stddev', 'laplace': 'scale', 'prune': 'rate'}.get(name)
  idle = (name == 'clip' and math.isinf(settings['norm'])) or (strength and settings[strength] == 0)
  return None if idle else (name, settings)


def _unbounded(names):
  """Returns why noise among the upload's defenses `names` guarantees nothing; None where it may."""
  noises = [i for i, name in enumerate(names) if name in ('gaussian', 'laplace')]
  if not noises:
    return None
  if 'clip' not in names[: noises[-1]]:
    return 'no ε: the sensitivity is unbounded'
  if 'gaussian' not in names:
    return 'no ε: Laplace noise needs a bound on the L1 norm, and `clip` bounds the L2 norm'
  return None


def _per_client(noise):
  return _spent(noise, 1, 'one upload, per client (against zeros in its place)')


def _per_example(noise, epochs):
  times = '' if epochs == 1 else f' of {epochs} local epochs'
  return _spent(noise, epochs, f'one upload{times}, per example (the batch with or without it)')


def _spent(noise, steps, unit):
  """Returns the sentence on the ε of `steps` Gaussian mechanisms of the multiplier `noise`."""
  rdp, pld = (
    differential_privacy.epsilon(noise, steps=steps, delta=DELTA, accountant=accountant)
    for accountant in differential_privacy.ACCOUNTANTS
  )
  if pld > 1000:
    return f'ε > 1000: no protection in the sense of DP (δ = 1e-5, {unit})'
  tighter = '' if pld == rdp else f', {_upwards(pld)} (PLD)'
  return f'ε ≤ {_upwards(rdp)} (RDP){tighter} at δ = 1e-5, {unit}'


def _upwards(value):
  """Returns a positive `value` with two significant digits or none after the point, rounded up: it is a bound."""
  digits = max(0, 1 - math.floor(math.log10(value)))
  return f'{math.ceil(value * 10**digits) / 10**digits:.{digits}f}'
