"""What a malicious server is: what it sends a client in each round, and what it makes of each upload."""

import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gradleak.core import errors, methods, trees
from gradleak.core.methods import Method
from gradleak.core.trees import Tree
from gradleak.federated.scenario import Scenario


class Observed(NamedTuple):
  """What a server hands to its attack after the last round.

  Attributes:
    variables: those that the upload is a gradient at.
    update: the upload, or what the server made of several, a tree shaped like the parameters.
  """

  variables: dict
  update: Tree


class Server(NamedTuple):
  """A malicious server, on the host; all functions are pure, and a state is plain data: trees, numbers, tuples.

  Attributes:
    prepare: (key, `Scenario`, batch size) -> the `Scenario` of the model that clients are sent, with the variables of
      the first round. All rounds share its client and its model; only variables change.
    init: prepared `Scenario`, batch size -> state, of one client (one trial).
    send: state -> the variables of the next round.
    receive: (state, update) -> state; the update is a tree of NumPy arrays, a gradient or delta as the client sent it.
    finished: state -> whether no further round is needed.
    observed: state -> `Observed`; also of a state that has not finished, when `rounds` are over.
    rounds: the most rounds on one client.
  """

  prepare: Callable[[Any, Scenario, int], Scenario]
  init: Callable[[Scenario, int], Any]
  send: Callable[[Any], dict]
  receive: Callable[[Any, Tree], Any]
  finished: Callable[[Any], bool]
  observed: Callable[[Any], Observed]
  rounds: int = 1


def one_round(prepare: Callable[[Any, Scenario, int], Scenario]) -> Server:
  """Returns the `Server` that sends one model and hands on what comes back."""
  return Server(
    prepare,
    init=lambda scenario, batch_size: (scenario.variables, None),
    send=lambda state: state[0],
    receive=lambda state, update: (state[0], update),
    finished=lambda state: state[1] is not None,
    observed=lambda state: Observed(*state),
  )


def check_sent(name: str, scenario: Scenario, paths: Collection[tuple[str, ...]]) -> None:
  """Checks that a client is sent what a server sets.

  Args:
    name: of the server's attack.
    scenario: the honest `Scenario`.
    paths: of the parameters that the server sets, or of modules that hold them.

  Raises:
    UsageError: if any of them is frozen or private.
  """
  kept = scenario.client.kept_paths(scenario.variables['params'], tuple(scenario.samples.shape[1:]))
  met = sorted('/'.join(path) for path in paths if any(one[: len(path)] == path for one in kept))
  if met:
    raise errors.UsageError(
      f'{name} sets {met[0]}, and the server does not send it: a client keeps what is frozen or private as it is'
    )


def server(factory: Callable[..., Server]) -> Callable[..., Method]:
  """Makes a factory, (*, settings) -> `Server`, one of `Method`s, which can be compared and hashed."""

  @functools.wraps(factory)
  def make(**settings: Any) -> Method:
    return Method(factory, settings, kind='server')

  make.setting_names = methods.setting_names(factory)  # type: ignore[attr-defined]

  return make


def replaced(params: Tree, leaves: Mapping[tuple[str, ...], Any]) -> Tree:
  """Returns the parameters with the leaves at some paths replaced, cast to the type of what they replace."""

  def replace(path, leaf):
    name = trees.path_names(path)
    return jnp.asarray(leaves[name], leaf.dtype) if name in leaves else leaf

  return jax.tree_util.tree_map_with_path(replace, params)
