"""Which defenses guarantee differential privacy: their Gaussian mechanisms, found by their traits.

`differential_privacy.of_upload` makes an ε of a mechanism and a neighbouring relation.
"""

from collections.abc import Sequence

from gradleak.core.settings import Count, ranged
from gradleak.defenses.defense import PLACES, Defense, Mechanism, Noise, Stage, as_defense, is_idle


@ranged
def mechanisms(defense: Defense | None, epochs: Count = 1) -> tuple[Mechanism, ...]:
  """Returns the `Mechanism`s of a defense, each of which holds by itself; none if no noise of it is covered here.

  Covered are `client_dp` and clip+gaussian (per client) and `dpsgd` (per example). Each is covered if all later stages
  are post-processing, and if no earlier one lets the data select what is sent. A delta of DP-SGD's steps is computed
  from noisy gradients alone, and each epoch releases an example once. Only the update is covered: BatchNorm's
  statistics and the number of samples are not. Neither is noise of each local step that protects a whole client.

  Args:
    defense: a `Defense`, or None for none.
    epochs: how often one upload uses each example: the local epochs of a client, 1 of one that shares its gradient.
  """
  stages = _acting(defense)
  found = []
  for i, stage in enumerate(stages):
    if stage.traits.mechanism is None or not _post_processing(stages[i + 1 :]) or _select(stages[:i]):
      continue
    mechanism = stage.traits.mechanism(stage.settings, _clipped_to(stages[i - 1]) if i else None, i)
    if mechanism is not None and (mechanism.unit == 'example' or stage.traits.place != 'step'):
      releases = epochs if mechanism.unit == 'example' else 1
      found.append(Mechanism(mechanism.noise, mechanism.unit, int(releases)))
  return tuple(found)


def missing_bound(defense: Defense | None) -> str | None:
  """Returns the norm that is unbounded, so that the noise of a defense guarantees nothing; else None.

  It is 'L2', or 'L1' where only Laplace noise follows a clip. It is meant for defenses without `mechanisms`. The result
  is None if a stage is no post-processing, or there is no noise on all entries of the upload.

  Args:
    defense: a `Defense`, or None for none.
  """
  stages = _acting(defense)
  noises = {i: noise for i, stage in enumerate(stages) if (noise := _noise_on_all(stage))}
  if not noises or not _post_processing(stages):
    return None
  if any(stages[i].traits.clips for i in noises):
    return None
  if all(_clipped_to(stage) is None for stage in stages[: max(noises)]):
    return 'L2'
  return None if any(noise.distribution == 'gaussian' for noise in noises.values()) else 'L1'


def _acting(defense: Defense | None) -> list[Stage]:
  """Returns what acts before an upload is sent, in that order; what a server does later guarantees nothing of it."""
  stages = [stage for stage in as_defense(defense).at(*PLACES[:-1]) if not is_idle(stage)]
  return sorted(stages, key=lambda stage: PLACES.index(stage.traits.place))


def _clipped_to(stage: Stage) -> float | None:
  """Returns the norm that a stage clips the upload to, or None; a clip of each local step bounds no upload."""
  clips = stage.traits.clips if stage.traits.place == 'upload' else None
  return None if clips is None else float(clips(stage.settings))


def _noise_on_all(stage: Stage) -> Noise | None:
  """Returns the noise that a stage adds to every entry, or None; one that clips, but is no mechanism, has none."""
  noise, clips, mechanism = stage.traits.noise, stage.traits.clips, stage.traits.mechanism
  if noise is None or noise.fraction(stage.settings) < 1:
    return None
  silent = clips is not None and mechanism is not None and mechanism(stage.settings, None, 0) is None
  return None if silent else noise


def _post_processing(stages: Sequence[Stage]) -> bool:
  return all(stage.traits.post_processing for stage in stages)


def _select(stages: Sequence[Stage]) -> bool:
  return any(stage.traits.selects for stage in stages)
