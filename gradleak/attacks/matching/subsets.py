"""Random subsets of the dummy batch, whose gradients are matched beside the whole batch's (MAGIA, arXiv 2509.18170)."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from gradleak.core import errors

# Evaluations that share a subset, those of one iteration in the published code: a line search compares their values.
_KEPT = 20


@dataclasses.dataclass(frozen=True)
class Subsets:
  """Matching of random subsets: (1 − w)·distance(whole batch) + w·distance(subset) / f, f = (N − S) / (S(N − 1)).

  The published objective rescales by a closed form in N and S that the published script calls and does not define; f is
  our reading. The mean gradient of a subset of size S, drawn uniformly out of N, has f times the variance σ² of one
  sample's gradient. Here `σ² = mean‖g_i − ḡ‖²` over the batch. For the squared distance, the expectation of the
  subset's term is therefore ‖ḡ − g*‖² / f + σ². Where the whole batch matches, it does not depend on S, nor is it zero
  at the truth: it pulls the samples' gradients together. A subset that is the whole batch adds nothing. The other
  samples stay in the batch with labels of zero, so BatchNorm's statistics are those of all samples. A step takes two
  evaluations of the batch.

  Attributes:
    subset: S, the least number of samples of a subset; None for no such term.
    subset_weight: w.
    subset_growth: evaluations over which the subset grows from S to the whole batch, linearly; 0 for never. The script
      calls that its warm-up.
  """

  subset: int | None = None
  subset_weight: float | jax.Array = 1e-3
  subset_growth: int = 0

  def __post_init__(self) -> None:
    errors.check_number('subset_weight', self.subset_weight, low=0, high=1, finite=True)
    errors.check_number('subset_growth', self.subset_growth, low=0, integer=True)
    if self.subset is not None:
      errors.check_number('subset', self.subset, low=1, integer=True)
      return
    without = {'subset_weight': self.subset_weight, 'subset_growth': self.subset_growth}
    errors.check_idle('without subset', {name: (value, getattr(Subsets, name)) for name, value in without.items()})

  def drawn(self, count: jax.Array, total: int) -> tuple[jax.Array, jax.Array]:
    """Returns (S, float32 weights [total] that make a mean over the batch one over the subset) after `count` steps."""
    turn = count // _KEPT
    size = jnp.int32(min(self.subset or total, total))
    if self.subset_growth:
      done = (turn * _KEPT + 1).astype(jnp.float32) / self.subset_growth
      size = jnp.clip(jnp.ceil(total * done).astype(jnp.int32), size, total)
    order = jax.random.permutation(jax.random.fold_in(jax.random.key(0), turn), total)
    return size, jnp.where(order < size, total / size.astype(jnp.float32), 0.0)

  def term(
    self, distance: Callable[[jax.Array], jax.Array], apart: jax.Array, count: jax.Array, total: int
  ) -> jax.Array:
    """Returns what is added to the distance of the whole batch.

    Args:
      distance: weights [total] of the samples -> distance of their weighted mean gradient.
      apart: that of the whole batch.
      count: steps done.
      total: N.
    """
    size, weights = self.drawn(count, total)
    scale = (total - 1) * size.astype(jnp.float32) / jnp.maximum(total - size, 1).astype(jnp.float32)
    return jnp.where(size < total, self.subset_weight * (scale * distance(weights) - apart), 0.0)

  def changed(self, count: jax.Array) -> jax.Array:
    """Returns whether the subset after `count` steps is another one than a step before."""
    return (count > 0) & (count % _KEPT == 0)
