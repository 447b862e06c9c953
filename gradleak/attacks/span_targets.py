"""The last token of each sequence under a loss of next tokens: a target only, which no block takes.

All else that the loss compares is known once the sequences are. What the gradient has beyond it are the gradients of
log p(y) for one unknown token y of each sequence. The derivative of the logits along it is largest at y.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gradleak.models.model import Model
from gradleak.threat import Observation


def completed(
  model: Model, observation: Observation, texts: np.ndarray, lengths: Sequence[int], mean: bool
) -> np.ndarray:
  """Returns texts [N, T] with the token that follows each, where there is a place for it.

  Args:
    model: of the client.
    observation: of its upload, a gradient.
    texts: ids, padded behind, by −1 where the model has no padding.
    lengths: number of tokens of each that are known.
    mean: whether the loss is a mean over all positions that are compared, or their sum.
  """
  places = np.asarray(lengths)
  rows = np.flatnonzero((places > 0) & (places < texts.shape[1]))
  if not len(rows):
    return texts
  known = np.arange(1, texts.shape[1])[np.newaxis] < places[:, np.newaxis]  # which targets are
  total = float(known.sum() + len(rows)) if mean else 1.0
  found, padding = texts.copy(), None if model.first_block is None else model.first_block.padding

  def scores() -> np.ndarray:
    given = observation.variables, observation.update, jnp.asarray(np.maximum(found, 0)), jnp.asarray(known), total
    made = np.asarray(_scores(model)(*given))[rows, places[rows] - 1]
    if padding is not None:
      made[:, padding] = -np.inf
    return made

  def settle(row: int, token: int) -> None:
    found[row, places[row]] = token
    known[row, places[row] - 1] = True

  left = list(range(len(rows)))
  while left:  # the clearest one first
    own = scores()
    best, second = np.sort(own, axis=1)[:, [-1, -2]].T
    clear = max(left, key=lambda i: (best[i] - second[i]) / np.std(own[i][np.isfinite(own[i])]))
    settle(int(rows[clear]), int(np.argmax(own[clear])))
    left.remove(clear)
  for i, row in enumerate(rows.tolist() if len(rows) > 1 else []):  # and each once more, beside all others
    known[row, places[row] - 1] = False
    settle(row, int(np.argmax(scores()[i])))
  return found


@functools.lru_cache(maxsize=16)
def _scores(model: Model) -> Callable:
  """Returns (variables, update, ids, which targets are known, positions) -> derivatives of all logits [N, T, V]."""

  def run(variables: Any, update: Any, ids: jax.Array, known: jax.Array, total: Any) -> jax.Array:
    params = variables['params']

    def logits(params: Any) -> jax.Array:
      return model.apply({**variables, 'params': params}, ids, False, None)[0]

    def explained(params: Any) -> jax.Array:
      chances = jax.nn.log_softmax(logits(params)[:, :-1], axis=-1)
      own = jnp.take_along_axis(chances, ids[:, 1:, jnp.newaxis], axis=-1)[..., 0]
      return -jnp.sum(jnp.where(known, own, jnp.zeros_like(own)))

    rest = jax.tree.map(
      lambda sent, own: jnp.where(sent == 0, jnp.zeros_like(own), own - jnp.asarray(total, own.dtype) * sent),
      update,
      jax.grad(explained)(params),
    )
    return jax.jvp(logits, (params,), (rest,))[1]

  return jax.jit(run)
