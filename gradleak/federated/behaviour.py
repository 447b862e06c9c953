"""What functions compute, as fingerprints: an optimizer, or a network that a user wrote, has no settings to read.

A fingerprint is that of the program that JAX traces. Nothing is computed, so that it is the same in every process and
on every device, and no rounding matters. Another version of JAX may trace another program.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gradleak.core.methods import contents, program_text
from gradleak.core.promotion import promoting
from gradleak.core.reuse import reusable
from gradleak.core.trees import Tree
from gradleak.federated.augmentation import AUGMENTATIONS
from gradleak.federated.client import DEFAULT_OPTIMIZER, Client
from gradleak.federated.losses import LOSSES
from gradleak.models import Model

FUNCTIONS = ('model_fingerprint', 'loss_fingerprint', 'augment_fingerprint', 'optimizer_fingerprint')
_SAMPLES = 2


def behaviour(
  client: Client, variables: Mapping, samples: np.ndarray, targets: np.ndarray, described: bool
) -> dict[str, str]:
  """Returns the fingerprints of a client's functions that nothing else describes, by their names in `FUNCTIONS`.

  Args:
    client: the undefended `Client`.
    variables: of its model.
    samples, targets: the private ones, of which shapes and dtypes matter.
    described: whether settings describe its optimizer.
  """
  given, found = jnp.asarray(samples[:_SAMPLES]), {}
  if not client.model.named:
    found['model'] = program(_passed, client.model, client.batch_norm == 'train')(variables, given, jax.random.key(0))
  if client.loss.factory not in {made.__wrapped__ for made in LOSSES.values()}:  # type: ignore[attr-defined]
    encoded = client.targets(targets[:_SAMPLES], len(given), dtype=given.dtype)
    found['loss'] = program(_lost, client.loss)(jnp.zeros(encoded.shape, encoded.dtype), encoded)
  if client.augment not in AUGMENTATIONS.values():
    found['augment'] = program(_called, client.augment)(jax.random.key(0), given)
  if client.share == 'delta' and not described and client.optimizer is not DEFAULT_OPTIMIZER:
    own, usual = (moves(one, variables['params']) for one in (client.optimizer, DEFAULT_OPTIMIZER))
    found |= {'optimizer': own} if own != usual else {}
  return {f'{name}_fingerprint': value for name, value in found.items()}


def program(function: Callable, *static: Any) -> Callable[..., str]:
  """Returns a function: arrays -> 16 hexadecimal digits of what `function` does with `static`, then such arrays."""

  def of(*given: Any) -> str:
    leaves, structure = jax.tree.flatten(given)
    return _traced(function, static, structure, tuple(jax.ShapeDtypeStruct(jnp.shape(x), x.dtype) for x in leaves))

  return of


@reusable(64)
def _traced(function: Callable, static: tuple, structure: Any, shapes: tuple) -> str:
  closed = jax.make_jaxpr(lambda *given: function(*static, *given))(*structure.unflatten(shapes))
  held = contents([jnp.asarray(value) for value in _constants(closed)])
  return hashlib.sha256(f'{program_text(closed)}{held}'.encode()).hexdigest()[:16]


def _constants(program: Any) -> Iterator[Any]:
  """Yields the arrays that a program holds, those of programs within it too: its text shows them in part."""
  yield from getattr(program, 'consts', ())
  for equation in getattr(program, 'jaxpr', program).eqns:
    yield from (one.val for one in equation.invars if hasattr(one, 'val'))
    for option in jax.tree.leaves(tuple(equation.params.values())):
      if hasattr(option, 'eqns') or hasattr(option, 'jaxpr'):
        yield from _constants(option)


def moves(optimizer: optax.GradientTransformation, params: Tree) -> str:
  """Returns the fingerprint of an optimizer, of its start and of a step, on parameters like these."""
  return program(_moved, optimizer)(params)


def _moved(optimizer: optax.GradientTransformation, params: Tree) -> tuple[Tree, Tree]:
  chain = promoting(optimizer)
  state = chain.init(params)
  return state, jax.jit(chain.update)(params, state, params)


def _passed(model: Model, train: bool, variables: Mapping, samples: jax.Array, key: jax.Array) -> tuple[Tree, ...]:
  """Returns what a model makes of samples, once as it is evaluated and once as a client trains it; and a gradient."""

  def trained(params: Tree) -> tuple[jax.Array, Tree]:
    run = model.apply if model.penalised is None else model.penalised
    logits, *more = run({**variables, 'params': params}, samples, train, key)
    return jnp.sum(logits), (logits, more)

  return model.apply(variables, samples, False, None)[0], jax.grad(trained, has_aux=True)(variables['params'])


def _lost(loss: Any, outputs: jax.Array, targets: jax.Array) -> tuple[jax.Array, ...]:
  """Returns the losses of samples, and the derivative of their sum."""
  losses, back = jax.vjp(lambda outputs: loss(outputs, targets), outputs)
  return losses, *back(jnp.ones_like(losses))


def _called(function: Callable, *given: Any) -> Any:
  return function(*given)
