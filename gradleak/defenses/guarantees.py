"""Which defenses guarantee differential privacy: chains as users write them, read as Gaussian mechanisms."""

import math
from typing import NamedTuple

from gradleak import errors, specs
from gradleak.defenses.registry import ENTRIES, REGISTRY

# They look at nothing but what they are handed, so that they cannot undo what was done before them.
_BLIND = ('clip', 'client_dp', 'gaussian', 'laplace', 'prune', 'topk')
# Their masks are sent along and applied last: noise that is added later does not hide which entries they chose.
_CHOOSING = ('topk', 'dgc', 'fragmentation')
_PLACES = ('data', 'step', 'upload')


class Mechanism(NamedTuple):
  """A Gaussian mechanism that each upload goes through.

  Attributes:
    noise: the noise multiplier, its standard deviation over the L2 sensitivity in the add/remove relation.
    unit: whose contribution it hides, 'client' (the upload against zeros in its place) or 'example' (the batch with or
      without it).
    releases: how often one upload releases what it hides: 1, or for an 'example' the local epochs.
  """

  noise: float
  unit: str
  releases: int


def mechanisms(defense, epochs=1):
  """Returns the `Mechanism`s of `defense`, each of which holds by itself; none if it has no noise that is covered here.

  Covered are `client_dp` and clip+gaussian (per client) and `dpsgd` (per example), each where no later defense looks at
  the data again and no earlier one chooses by the data what is sent. A delta made of DP-SGD's steps is computed from
  noisy gradients alone, and each epoch releases an example once. Only what the update says is covered: BatchNorm's
  statistics and the number of samples are not.

  Args:
    defense: a chain as a user writes it, such as 'clip(norm=1)+gaussian(stddev=0.1)'.
    epochs: how often one upload uses each example: the local epochs of a client, 1 of one that shares its gradient.

  Raises:
    UsageError: if `epochs` is no positive integer.
  """
  errors.check_number('epochs', epochs, low=1, integer=True)
  members = _members(defense)
  found = []
  for i, (name, settings) in enumerate(members):
    before, bound = members[i - 1] if i else (None, {})
    if not _all_in(_BLIND, members[i + 1 :]) or any(name in _CHOOSING for name, _ in members[:i]):
      continue
    if name == 'client_dp':
      found.append(Mechanism(settings['noise'], 'client', 1))
    elif name == 'gaussian' and before == 'clip':
      found.append(Mechanism(settings['stddev'] / bound['norm'], 'client', 1))
    elif name == 'dpsgd' and settings['noise'] > 0 and i == 0:
      found.append(Mechanism(settings['noise'], 'example', int(epochs)))
  return tuple(found)


def missing_bound(defense):
  """Returns the norm on which `defense` lacks the bound that its noise needs, or None where it may lack nothing.

  It is 'L2', or 'L1' where Laplace noise follows a `clip`. Asked of the defenses alone for which there are no
  `mechanisms`; of those that look at the data, or have no noise on the upload, nothing is said.
  """
  members = _members(defense)
  names = [name for name, _ in members]
  noises = [i for i, name in enumerate(names) if name in ('gaussian', 'laplace')]
  if not noises or 'client_dp' in names or not _all_in(_BLIND, members):  # client_dp brings a bound of its own
    return None
  if 'clip' not in names[: noises[-1]]:
    return 'L2'
  return None if 'gaussian' in names else 'L1'


def _members(defense):
  """Returns (name, settings) of each member in the order in which they act; without those that do nothing.

  There are none for 'none' and for the name of a user's own transformation.
  """
  try:
    members = [
      (spec.name, specs.template(spec, REGISTRY, 'defense').settings) for spec in specs.parse_chain(defense, 'defense')
    ]
  except errors.UsageError:
    return []
  members = [_plain(*member) for member in sorted(members, key=lambda member: _PLACES.index(ENTRIES[member[0]].place))]
  return [member for member in members if member is not None]


def _plain(name, settings):
  """Returns (name, settings) of what a member amounts to: a `client_dp` without noise is a clip; None for nothing."""
  if name == 'client_dp' and settings['noise'] == 0:
    name = 'clip'
  strength = {'gaussian': 'stddev', 'laplace': 'scale', 'prune': 'rate'}.get(name)
  idle = (name == 'clip' and math.isinf(settings['norm'])) or (strength and settings[strength] == 0)
  return None if idle else (name, settings)


def _all_in(names, members):
  return all(name in names for name, _ in members)
