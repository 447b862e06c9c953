"""Which defenses guarantee differential privacy: their Gaussian mechanisms, found by their traits.

`differential_privacy.of_upload` makes an ε of a mechanism and a neighbouring relation.
"""

from collections.abc import Sequence

from gradleak.core.settings import Count, ranged
from gradleak.defenses.defense import PLACES, Defense, Mechanism, Member, Noise, as_defense, is_idle


@ranged
def mechanisms(defense: Defense | None, epochs: Count = 1) -> tuple[Mechanism, ...]:
  """Returns the `Mechanism`s of a defense, each of which holds by itself; none if no noise of it is covered here.

  Covered are `client_dp` and clip+gaussian (per client) and `dpsgd` (per example). Each is covered if all later members
  are post-processing, and if no earlier one lets the data select what is sent. A delta of DP-SGD's steps is computed
  from noisy gradients alone, and each epoch releases an example once. Only the update is covered: BatchNorm's
  statistics and the number of samples are not.

  Args:
    defense: a `Defense`, or None for none.
    epochs: how often one upload uses each example: the local epochs of a client, 1 of one that shares its gradient.
  """
  members = _acting(defense)
  found = []
  for i, member in enumerate(members):
    if member.traits.mechanism is None or not _post_processing(members[i + 1 :]) or _select(members[:i]):
      continue
    clips = members[i - 1].traits.clips if i else None
    clipped_to = None if clips is None else float(clips(members[i - 1].settings))
    mechanism = member.traits.mechanism(member.settings, clipped_to, i)
    if mechanism is not None:
      releases = epochs if mechanism.unit == 'example' else 1
      found.append(Mechanism(mechanism.noise, mechanism.unit, int(releases)))
  return tuple(found)


def missing_bound(defense: Defense | None) -> str | None:
  """Returns the norm that is unbounded, so that the noise of a defense guarantees nothing; else None.

  It is 'L2', or 'L1' where only Laplace noise follows a clip. It is meant for defenses without `mechanisms`. The result
  is None if a member is no post-processing, or there is no noise on all entries of the upload.

  Args:
    defense: a `Defense`, or None for none.
  """
  members = _acting(defense)
  noises = {i: noise for i, member in enumerate(members) if (noise := _noise_on_all(member))}
  if not noises or not _post_processing(members):
    return None
  if any(members[i].traits.clips for i in noises):
    return None
  if not any(member.traits.clips for member in members[: max(noises)]):
    return 'L2'
  return None if any(noise.distribution == 'gaussian' for noise in noises.values()) else 'L1'


def _acting(defense: Defense | None) -> list[Member]:
  """Returns the members in the order in which they act, without those that are the identity."""
  members = [member for member in as_defense(defense).members if not is_idle(member)]
  return sorted(members, key=lambda member: PLACES.index(member.traits.place))


def _noise_on_all(member: Member) -> Noise | None:
  """Returns the noise that a member adds to every entry, or None; one that clips, but is no mechanism, has none."""
  noise, clips, mechanism = member.traits.noise, member.traits.clips, member.traits.mechanism
  if noise is None or noise.fraction(member.settings) < 1:
    return None
  silent = clips is not None and mechanism is not None and mechanism(member.settings, None, 0) is None
  return None if silent else noise


def _post_processing(members: Sequence[Member]) -> bool:
  return all(member.traits.post_processing or member.traits.place == 'round' for member in members)


def _select(members: Sequence[Member]) -> bool:
  return any(member.traits.selects for member in members)
