"""What differential privacy says about finding an original among candidates."""

import math
from collections.abc import Sequence

from gradleak.defenses import Mechanism


def identification(mechanisms: Sequence[Mechanism], candidates: int) -> float | None:
  """Returns the largest probability with which any attacker finds the original among equally likely candidates.

  A Gaussian mechanism of noise multiplier σ is 2/σ-Gaussian DP for one sample in place of another (1/σ for adding or
  removing one), √k times that for k releases; a success of probability p without the upload then has at most
  Φ(μ + Φ⁻¹(p)) with it. Dong, Roth, Su: Gaussian Differential Privacy, JRSS-B 2022, and Hayes, Mahloujifar, Balle:
  Bounding Training Data Reconstruction in DP-SGD, NeurIPS 2023 (reconstruction robustness, ReRo).

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
  return min(float(norm.cdf(2 * math.sqrt(one.releases) / one.noise + prior)) for one in mechanisms)
