"""Deep Gradient Compression: the factor of an entry that is sent follows from the rounds it was kept back."""

import jax
import numpy as np

from gradleak import defenses
from gradleak.adaptive.base import AdaptiveAttack, Case, View, adaptive_to, by_delay
from gradleak.federated.client import Upload


@adaptive_to(defenses.dgc)
def adaptive_attacks(case: Case) -> list[AdaptiveAttack]:
  """Returns the adaptive attack that divides what several uploads send by what a constant gradient would have become.

  Suppose that the gradient is the same in all rounds. Then an entry that is sent k rounds after it was last cleared is
  `Σ_{j=1..k} (1 + m + … + m^{j−1})` times the gradient (Lin et al. 2018, algorithm 4). Which entries were sent, the
  server sees.
  """
  known, momentum = case.known, float(case.stage.settings['momentum'])
  several = sum(stage.traits.accumulates for stage in known.stages) > 1  # both keep entries back
  if known.rounds == 1 or known.context.client.cohort > 1 or several:  # each of a cohort keeps back other entries
    return []
  factors = np.cumsum(np.cumsum(momentum ** np.arange(known.rounds)))

  def factor(sent: np.ndarray) -> np.ndarray:
    """Returns by what a sum of what was sent of a tensor [R, …] is larger than the gradient; 1 where nothing was."""
    found = by_delay(np.asarray(sent) != 0, factors)
    return np.where(found > 0, found, 1)

  def gradient(sent: np.ndarray, factor: np.ndarray) -> np.ndarray:
    return (sum(np.asarray(sent, np.float64)) / factor).astype(sent.dtype)

  def views(upload: Upload) -> list[View]:
    divided = jax.tree.map(factor, upload.update)
    return [known.view(upload, update=jax.tree.map(gradient, upload.update, divided), divided=divided)]

  words = 'It divides each entry that was sent by the factor that momentum and the rounds it was kept back gave it.'
  return [AdaptiveAttack('decoded', words, views, frozenset({'update'}), rounds=known.rounds)]
