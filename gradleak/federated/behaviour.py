"""What functions compute, as fingerprints: an optimizer, or a network that a user wrote, has no settings to read.

A fingerprint is made of a few sums, and tells apart what differs by more than rounding. The same function has the same
one in every process.
"""

import functools
import hashlib
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gradleak.core.promotion import promoting
from gradleak.core.reuse import reusable
from gradleak.core.trees import Tree
from gradleak.engine import compiler
from gradleak.federated.augmentation import AUGMENTATIONS
from gradleak.federated.client import DEFAULT_OPTIMIZER, Client
from gradleak.federated.losses import LOSSES
from gradleak.models import Model

FUNCTIONS = ('model_fingerprint', 'loss_fingerprint', 'augment_fingerprint', 'optimizer_fingerprint')
_SAMPLES, _DRAWS = 2, 8
# Sizes of the gradients of successive steps: beside a small one the ε of Adam counts, and a large one is clipped.
_SIZES = (1e-6, 1e-3, 1.0, 1e3)
_FEWEST, _MOST, _ENTRIES = 8, 64, 2**26  # steps of an optimizer, and entries that all of them move at most
_DIGITS = 5


def behaviour(
  client: Client, variables: Mapping, samples: np.ndarray, targets: np.ndarray, described: bool
) -> dict[str, str]:
  """Returns the fingerprints of a client's functions that nothing else describes, by their names in `FUNCTIONS`.

  Args:
    client: the undefended `Client`.
    variables: of its model.
    samples, targets: the private ones.
    described: whether settings describe its optimizer.
  """
  given, found = jnp.asarray(samples[:_SAMPLES]), {}
  if not client.model.named:
    train = client.batch_norm == 'train'
    found['model'] = digest(*_compiled(_passed, client.model, train)(dict(variables), given, jax.random.key(0)))
  if client.loss.factory not in {made.__wrapped__ for made in LOSSES.values()}:  # type: ignore[attr-defined]
    encoded = client.targets(targets[:_SAMPLES], len(given), dtype=given.dtype)
    found['loss'] = digest(_compiled(_lost, client.loss)(jnp.asarray(_drawn(0, encoded.shape), encoded.dtype), encoded))
  if client.augment not in AUGMENTATIONS.values():
    keys = jax.random.split(jax.random.key(0), _DRAWS)
    found['augment'] = digest(_compiled(_augmented, client.augment)(keys, jnp.asarray(samples[:_DRAWS])))
  if client.share == 'delta' and not described and client.optimizer is not DEFAULT_OPTIMIZER:
    own, usual = (moves(one, variables['params']) for one in (client.optimizer, DEFAULT_OPTIMIZER))
    found |= {'optimizer': own} if own != usual else {}
  return {f'{name}_fingerprint': value for name, value in found.items()}


def digest(*trees: Tree) -> str:
  """Returns 16 hexadecimal digits of the arrays in trees, those of one relative to the norm of all arrays in it."""
  found = hashlib.sha256()
  for tree in trees:
    leaves = [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(tree)]
    norm = math.sqrt(sum(float(np.vdot(leaf, leaf)) for leaf in leaves))
    found.update(f'{norm:.{_DIGITS - 1}e}'.encode())
    for place, leaf in enumerate(leaves):
      share = float(np.vdot(_drawn(place, leaf.shape), leaf)) / (norm or 1.0)
      found.update(f'{leaf.shape}{round(share, _DIGITS) + 0.0}'.encode())
  return found.hexdigest()[:16]


def moves(optimizer: optax.GradientTransformation, params: Tree) -> str:
  """Returns the fingerprint of what an optimizer makes of gradients of parameters like these, in successive steps."""
  leaves, structure = jax.tree.flatten(params)
  return _moves(optimizer, structure, tuple((np.shape(leaf), jnp.result_type(leaf)) for leaf in leaves))


@reusable(64)
def _moves(optimizer: optax.GradientTransformation, structure: Any, shapes: tuple) -> str:
  size = sum(math.prod(shape) for shape, _ in shapes)
  count = max(_FEWEST, min(_MOST, _ENTRIES // max(1, size)))
  sizes = jnp.asarray([_SIZES[i % len(_SIZES)] for i in range(count)], jnp.float32)
  start, slopes = (
    structure.unflatten([jnp.asarray(_drawn(2 * i + which, shape), dtype) for i, (shape, dtype) in enumerate(shapes)])
    for which in range(2)
  )
  sums = jax.device_get(_compiled(_moved, promoting(optimizer))(start, slopes, sizes))
  return digest(*([leaf[i] for leaf in sums] for i in range(count)))


def _moved(optimizer: optax.GradientTransformation, start: Tree, slopes: Tree, sizes: jax.Array) -> list[jax.Array]:
  """Returns the norm of the updates of each tensor in each step, and their part along the gradient, [steps, 2]."""

  def step(carry: tuple, size: jax.Array) -> tuple[tuple, list[jax.Array]]:
    params, state = carry
    gradients = jax.tree.map(lambda slope: slope * size.astype(slope.dtype), slopes)
    updates, state = optimizer.update(gradients, state, params)
    both = zip(*map(jax.tree.leaves, (updates, slopes)), strict=True)
    sums = [jnp.stack([jnp.sqrt(jnp.sum(u * u)), jnp.sum(u * s)]) for u, s in both]
    return (optax.apply_updates(params, updates), state), sums

  carry = jax.tree.map(lambda x: jnp.asarray(x, x.dtype), (start, optimizer.init(start)))
  return jax.lax.scan(step, carry, sizes)[1]


def _passed(model: Model, train: bool, variables: dict, samples: jax.Array, key: jax.Array) -> tuple[Tree, Tree]:
  """Returns what a model makes of samples, once as it is evaluated and once as a client trains it; and a gradient."""

  def trained(params: Tree) -> tuple[jax.Array, Tree]:
    run = model.apply if model.penalised is None else model.penalised
    logits, *more = run({**variables, 'params': params}, samples, train, key)
    weights = jnp.asarray(_drawn(0, logits.shape), logits.dtype)
    return jnp.sum(weights * logits), (logits, more)

  with jax.default_matmul_precision(compiler.precision()):
    gradient, passed = jax.grad(trained, has_aux=True)(variables['params'])
    return (model.apply(variables, samples, False, None)[0], passed), gradient


def _lost(loss: Any, outputs: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Returns the losses of samples, and the derivative of their sum."""
  losses, back = jax.vjp(lambda outputs: loss(outputs, targets), outputs)
  return losses, *back(jnp.ones_like(losses))


def _augmented(augment: Callable, keys: jax.Array, samples: jax.Array) -> jax.Array:
  return jax.vmap(augment, (0, None))(keys, samples)


@reusable(8)
def _compiled(function: Callable, *given: Any) -> Callable:
  """Returns a function whose first arguments are given, compiled as fast as can be: it runs once."""
  quick = compiler.known(xla_backend_optimization_level=0, xla_llvm_disable_expensive_passes=True)
  return jax.jit(functools.partial(function, *given), compiler_options=quick)


def _drawn(seed: int, shape: tuple[int, ...]) -> np.ndarray:
  """Returns numbers of a standard normal distribution, the same for the same seed and shape."""
  return np.random.default_rng(seed).standard_normal(shape)
