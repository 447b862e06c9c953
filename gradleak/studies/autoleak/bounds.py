"""What differential privacy says about finding an original among candidates."""

import math
from collections.abc import Sequence

from gradleak.defenses import Mechanism

RELATION = 'replace by zeros'  # the neighbouring relation of the bound, see `identification`


def identification(mechanisms: Sequence[Mechanism], candidates: int) -> float | None:
  """Returns the largest probability with which any attacker finds the original among equally likely candidates.

  The relation is 'replace by zeros', although the candidates replace each other. Let A_i be the uploads for which an
  attacker names candidate i, P_i the law of an upload of i, and Q that of zeros. The A_i are disjoint, so the mean of
  Q(A_i) is at most 1/(G + 1). Between P_i and Q, k releases through a Gaussian mechanism of noise multiplier σ are
  μ-Gaussian DP with μ = √k/σ. Hence P_i(A_i) ≤ Φ(μ + Φ⁻¹(Q(A_i))). This is concave in Q(A_i), so that the mean success
  is at most Φ(μ + Φ⁻¹(1/(G + 1))). Two opposite candidates reach it.

  Source: Dong, Roth, Su, Gaussian Differential Privacy, JRSS-B 2022; Hayes, Mahloujifar, Balle, Bounding Training Data
  Reconstruction in DP-SGD, NeurIPS 2023 (reconstruction robustness, ReRo).

  Args:
    mechanisms: of a defense, see `gradleak.defenses.mechanisms`; each holds by itself, so that the tightest counts.
    candidates: G, others beside the original.

  Returns:
    A probability; None without a mechanism, or candidates.
  """
  from scipy.stats import norm

  if not mechanisms or not candidates:
    return None
  prior = norm.ppf(1 / (candidates + 1))
  return min(float(norm.cdf(math.sqrt(one.releases) / one.multiplier(RELATION) + prior)) for one in mechanisms)
