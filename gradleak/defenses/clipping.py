"""Clipping: of the norm of a whole update, and of each of its entries."""

import math

import jax
import jax.numpy as jnp
import optax

from gradleak.core import trees
from gradleak.core.settings import Positive
from gradleak.core.trees import Tree
from gradleak.defenses.base import stateless
from gradleak.defenses.defense import defense


@defense(
  place='upload',
  clips=lambda settings: settings['norm'],
  post_processing=True,
  idle=lambda settings: math.isinf(settings['norm']),
)
def clip(*, norm: Positive) -> optax.GradientTransformationExtraArgs:
  r"""Scales the update by min(1, norm / ‖update‖₂), over all tensors together.

  It changes the scale and not the direction, so it has no effect on attacks that minimise the cosine distance. An
  update whose norm is no finite number becomes zeros: a single NaN would otherwise let all other entries pass.

  Formula:
    g' = g \cdot \min(1, \text{norm} / \lVert g \rVert_2)

  Args:
    norm: the largest L2 norm of the result; infinity is the identity.
  """
  return stateless('clip', lambda updates: trees.clip(updates, norm))


@defense(
  place='upload',
  limits=lambda settings: settings['limit'],
  simulated=lambda settings: clamp(limit=settings['limit']),
  post_processing=True,
  idle=lambda settings: math.isinf(settings['limit']),
)
def clamp(*, limit: Positive) -> optax.GradientTransformationExtraArgs:
  r"""Truncates every entry to [−limit, limit].

  Unlike `clip`, it changes the direction. Entries within the limit keep their values.

  Formula:
    g'_i = \min(\max(g_i, -\text{limit}), \text{limit})

  Args:
    limit: the largest magnitude of an entry; infinity is the identity.
  """
  return stateless('clamp', lambda updates: clamped(updates, limit))


def clamped(updates: Tree, limit: float | jax.Array) -> Tree:
  """Returns the updates with every entry in [−limit, limit]; the limit may be traced."""
  return jax.tree.map(lambda u: jnp.clip(u, -jnp.asarray(limit, u.dtype), jnp.asarray(limit, u.dtype)), updates)
