"""The most likely image: the exact density of a known noise, and a Gaussian prior of public images."""

from collections.abc import Mapping
from typing import Annotated, Any

import jax
import numpy as np

from gradleak.attacks.base import Attack, attack
from gradleak.attacks.matching import gradient_matching
from gradleak.attacks.matching.distances import squared_euclidean
from gradleak.attacks.matching.optimizers import first_order
from gradleak.core.settings import Count, NonNegative, Range
from gradleak.core.trees import Tree
from gradleak.federated import Client
from gradleak.priors.gaussian import LINEAR, fitted

CITATION = 'Balunović, Dimitrov, Staab, Vechev: Bayesian Framework for Gradient Leakage. ICLR 2022.'


def _learned(key: jax.Array, scenario: Any, settings: Mapping[str, Any], batch_size: int) -> Tree:
  """Returns the prior of the scenario's public images."""
  del key, batch_size
  return fitted(np.asarray(scenario.public[0]), settings['components'])


@attack(citation=CITATION, reads=('weights', 'noise', 'clip'), prepare=_learned)
def bayes(
  client: Client,
  *,
  steps: Count = 300,
  learning_rate: Annotated[float, Range(1e-12, finite=True)] = 0.1,
  components: Count = 250,
  gaussian: NonNegative = 1.0,
) -> Attack:
  r"""The image of largest posterior density (Balunović et al. 2022, eq. 4), where the noise is Gaussian and known.

  The prior is Gaussian, with mean and principal components of the public images. Its form is ours: the source has other
  approximations of the posterior. Several uploads count by their mean. An attacker who does not know the noise has a
  floor of 1e-6 of the update's mean square for its variance, as rounding would leave.

  Formula:
    \min_z \; \lVert \nabla_\theta L(f_\theta(x), y) - g \rVert^2 + \text{gaussian} \cdot \sigma^2 \lVert z \rVert^2,
    \quad x = m + \sum_k z_k s_k v_k

  Args:
    steps: of Adam on z.
    learning_rate: of its first step; it falls to zero along a cosine.
    components: principal components v_k that are kept, or as many as there are.
    gaussian: weight of the prior; 1 is the posterior density.

  Raises:
    UsageError: for a value out of range; when run, for fewer than two public images.
  """
  optimizer = first_order('adam', learning_rate, steps, decay='cosine')
  made = gradient_matching(
    client, optimizer, steps, distance=squared_euclidean, generator=LINEAR, gaussian=gaussian
  )  # fmt: skip
  return made._replace(auxiliary_data=True)
