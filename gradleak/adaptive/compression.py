"""Deep Gradient Compression: the factor of an entry that is sent follows from the rounds it was kept back."""

import jax
import numpy as np

from gradleak import defenses
from gradleak.adaptive.base import AdaptiveAttack, Case, View, adaptive_to
from gradleak.federated.client import Upload


@adaptive_to(defenses.dgc)
def adaptive_attacks(case: Case) -> list[AdaptiveAttack]:
  """Returns the adaptive attack that divides what several uploads send by what a constant gradient would have become.

  Suppose that the gradient is the same in all rounds. Then an entry that is sent k rounds after it was last cleared is
  `Σ_{j=1..k} (1 + m + … + m^{j−1})` times the gradient (Lin et al. 2018, algorithm 4). Which entries were sent, the
  server sees.
  """
  known, momentum = case.known, float(case.stage.settings['momentum'])
  if known.rounds == 1:
    return []
  factors = np.cumsum(np.cumsum(momentum ** np.arange(known.rounds)))

  def gradient(sent: np.ndarray) -> np.ndarray:
    """Returns the mean gradient of what was sent of a tensor [R, …]; 0 where nothing was."""
    kept, total, weight = np.zeros(sent.shape[1:], int), np.zeros(sent.shape[1:]), np.zeros(sent.shape[1:])
    for one in np.asarray(sent):
      there = one != 0
      total, weight = total + one, weight + there * factors[kept]
      kept = np.where(there, 0, kept + 1)
    return (total / np.where(weight > 0, weight, 1)).astype(sent.dtype)

  def views(upload: Upload) -> list[View]:
    return [known.view(upload, update=jax.tree.map(gradient, upload.update))]

  words = 'It divides each entry that was sent by the factor that momentum and the rounds it was kept back gave it.'
  return [AdaptiveAttack('decoded', words, views, frozenset({'update'}), rounds=known.rounds)]
