"""The rounding of secure aggregation, as Flower's SecAgg+ does it before it masks."""

from typing import Annotated, Any

import jax
import jax.numpy as jnp
import optax

from gradleak.core import errors, trees
from gradleak.core.settings import Range
from gradleak.core.trees import Tree
from gradleak.defenses.base import stream
from gradleak.defenses.defense import Noise, Settings, defense


def _spacing(settings: Settings) -> float:
  return 2 * settings['limit'] / settings['levels'] / settings['weight']


@defense(
  place='upload',
  citation='Bell, Bonawitz, Gascón, Lepoint, Raykova: Secure Single-Server Aggregation with (Poly)Logarithmic '
  'Overhead. CCS 2020; as secaggplus_mod of Flower 1.42.',
  published='SecAgg+ rounding',
  random=True,
  noise=Noise(lambda settings, context, count: _spacing(settings) ** 2 / 6, distribution='triangular'),
  clips_each='weight',
  remark=lambda context, settings: (
    'no ε of its own: rounding is not calibrated; whom the masks protect it does not say'
  ),
)
def secagg_rounding(
  *,
  limit: Annotated[float, Range(1e-12, finite=True)] = 8.0,
  levels: Annotated[float, Range(2, finite=True)] = 4194304.0,
  weight: Annotated[float, Range(1e-9, 1)] = 1.0,
) -> optax.GradientTransformationExtraArgs:
  r"""Truncates the new weights to ±limit and rounds them at random to one of the levels: what the masks then hide.

  It shows what is left without the masks: all other clients collude with the server, or a single client answers. The
  rounding hides little. The values are whole weights, times the client's examples over `max_weight` (1000 by default).
  A client of few examples sends a coarse update.

  The rounding is unbiased, so that the mean of several uploads has less of it. Its variance depends on where an entry
  lies between two levels. The mean of that variance is that of the triangular distribution. A weight beyond the limit
  is truncated without a warning. A share above 1 is refused here; the published mod warns of an overflow.

  Formula:
    \theta' = \tfrac{2 L}{w n} \left\lfloor \tfrac{n}{2 L} (\min(\max(w (\theta + g), -L), L) + L) + u
    \right\rfloor - \tfrac{L}{w}, \quad g' = \theta' - \theta, \quad u_i \sim \mathcal{U}(0, 1)

  Args:
    limit: L, the clipping range.
    levels: n, the quantization range.
    weight: w, the client's number of examples over the largest number.

  Raises (from its update):
    UsageError: without `key=` or the parameters.
  """

  def update(
    updates: Tree, state: optax.OptState, params: Tree = None, *, key: jax.Array | None = None, **extra: Any
  ) -> tuple[Tree, optax.OptState]:
    del extra
    key = stream('secagg_rounding', key, updates)
    if params is None:
      raise errors.UsageError(
        'the defense secagg_rounding rounds whole weights and needs params: call update(…, params)'
      )
    bound, scale = jnp.asarray(limit, jnp.float32), jnp.asarray(weight, jnp.float32)
    per_level = jnp.asarray(levels, jnp.float32) / (2 * bound)

    def one(update: jax.Array, before: jax.Array, draw: jax.Array) -> jax.Array:
      before = before.astype(jnp.float32)
      cut = jnp.clip(scale * (before + update.astype(jnp.float32)), -bound, bound)
      place = (cut + bound) * per_level
      # The change of the place is small beside it: added to the update, it keeps the digits that the sum would lose.
      low = jnp.floor(place)  # place + draw would be rounded to a fourth of a level: a bias
      moved = jax.lax.stop_gradient(low + (draw < place - low).astype(jnp.float32) - place) / per_level
      return ((cut + moved) / scale - before).astype(update.dtype)

    shapes = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, jnp.float32), params)
    return jax.tree.map(one, updates, params, trees.draws(jax.random.uniform, key, shapes)), state

  return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
