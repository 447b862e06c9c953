"""A whole training: rounds, what they cost, how good the model is, and a folder that survives a kill."""

import dataclasses
import json
import math
import pathlib
import time

import jax
import numpy as np

from gradleak import errors
from gradleak.federated import simulation
from gradleak.storage import Workdir, json_lines, write_atomically


def train(
  key,
  federation,
  variables,
  rounds,
  *,
  test=None,
  evaluate_every=1,
  workdir=None,
  config=None,
  privacy=None,
  budget=None,
  on_round=None,
):
  """Trains for a number of rounds; returns (the last `simulation.State`, a row per round).

  A row holds plain JSON values: 'round' (from 1 on), 'clients' (those that answered), 'samples' (that they trained on
  together), 'bytes_up' and 'bytes_down' (of all of them together), 'update_norm', and at evaluated rounds 'accuracy'
  and 'loss' on the test samples; with `privacy` also 'epsilon', of all rounds so far, None where nothing bounds it.

  Args:
    key: a typed JAX key; the same key and settings give the same rows, bit for bit, also after a resume.
    federation: the `simulation.Federation`.
    variables: the initial model's.
    rounds: how many.
    test: (images, labels) that the model is measured on, or None.
    evaluate_every: rounds between two measurements; the last round is always measured.
    workdir: a folder for `rounds.jsonl`, `timing.jsonl` and checkpoints; a run that was killed goes on from there.
    config: what identifies the run there, plain JSON.
    privacy: the `accounting.Ledger` of what the clients and the server do, or None.
    budget: the ε that must not be exceeded: training stops before the round that would (Geyer et al. 2017, algorithm
      1). Needs `privacy`.
    on_round: called with (row, `simulation.State`, seconds of the round) after each round.

  Raises:
    UsageError: for numbers out of range, a folder that belongs to another run, or a budget that nothing accounts for or
      that the first round alone exceeds.
  """
  errors.check_number('rounds', rounds, low=1, integer=True)
  errors.check_number('evaluate_every', evaluate_every, low=1, integer=True)
  if budget is not None:
    errors.check_number('the budget of epsilon', budget, low=1e-12, finite=True)
    if privacy is None:
      raise errors.UsageError(f'a budget of ε = {budget} needs a defense whose ε is known, such as client_dp')

  def overdrawn(state):
    if budget is None:
      return False
    return privacy.epsilon(state.number + 1, int(simulation.after(federation, state, key).max())) > budget

  state, rows = simulation.start(federation, variables), []
  if overdrawn(state):
    spent = privacy.epsilon(1, 1)
    raise errors.UsageError(f'the first round alone costs ε = {spent:.3g}, more than the budget of {budget}')
  store = None if workdir is None else Workdir(workdir, config or {}, {'group_size': federation.at_once})
  if store is not None and (found := store.load_checkpoint('training')):
    state = _unpacked(federation, state, *found)
    lines = (store.path / 'rounds.jsonl').read_text('utf-8').splitlines()
    rows = [json.loads(line) for line in lines[: state.number]]
  last = state.number == rounds or overdrawn(state)
  while not last:
    started = time.monotonic()
    state, done = simulation.run_round(federation, state, key)
    row = {
      'round': state.number,
      'clients': len(done.clients),
      'samples': int(done.samples.sum()),
      'bytes_up': int(done.bytes_up.sum()),
      'bytes_down': done.bytes_down * federation.per_round,
      'update_norm': done.update_norm,
    }
    seconds = time.monotonic() - started
    if privacy is not None:
      spent = privacy.epsilon(state.number, int(state.participations.max()))
      row['epsilon'] = spent if math.isfinite(spent) else None
    last = state.number == rounds or overdrawn(state)
    if test is not None and (state.number % evaluate_every == 0 or last):
      row['accuracy'], row['loss'] = simulation.accuracy(federation.client.model, state.variables, *test)
    rows.append(row)
    if store is not None:
      _save(store, rows, state, seconds, due=last)
    if on_round is not None:
      on_round(row, state, seconds)
  return state, rows


def seconds_of_a_round(workdir):
  """Returns the median seconds of a round in a work directory, of those behind the first, which compiles."""
  lines = (pathlib.Path(workdir) / 'timing.jsonl').read_text('utf-8').splitlines()
  seconds = [json.loads(line)['seconds'] for line in lines]
  return float(np.median(seconds[1:] or seconds))


def seconds_split(federation, variables, key, repeats=5, seconds=3.0):
  """Returns (seconds of a round without the defenses, seconds that they add), medians of warm rounds in turn.

  What is added is the median of the differences of two rounds that follow each other; noise can make it negative.

  Args:
    federation: the `simulation.Federation`.
    variables: the initial model's; the first round is measured.
    key: of the training.
    repeats: how often each is measured at least.
    seconds: it goes on for so long.
  """
  bare = dataclasses.replace(
    federation, client=federation.client.undefended(), chain=simulation.NO_DEFENSE, server_noise=0.0
  )
  pairs = []
  while len(pairs) <= repeats or sum(map(sum, pairs[1:])) < seconds:
    pair = []
    for one in (bare, federation):
      state = simulation.start(one, variables)
      started = time.monotonic()
      jax.block_until_ready(simulation.run_round(one, state, key)[0].variables)
      pair.append(time.monotonic() - started)
    pairs.append(pair)
  without, defended = np.asarray(pairs[1:]).T  # the first pair compiled
  return float(np.median(without)), float(np.median(defended - without))


def _save(store, rows, state, seconds, due):
  """Writes the rows first: those beyond the checkpoint are forgotten on a resume."""

  def packed():
    write_atomically(store.path / 'rounds.jsonl', json_lines(rows))
    return _packed(state)

  with open(store.path / 'timing.jsonl', 'a', encoding='utf-8') as file:
    file.write(json_lines([{'round': state.number, 'seconds': seconds}]))
  store.save_checkpoint('training', state.number, packed, due=due)


def _packed(state):
  """Returns the leaves of a state; what clients kept is stacked, behind their numbers."""
  clients = sorted(state.kept)
  kept = [np.stack(leaves) for leaves in zip(*(jax.tree.leaves(state.kept[c]) for c in clients), strict=True)]
  numbers = np.asarray([-1, *clients])  # Orbax saves no empty arrays
  return [*jax.tree.leaves((state.variables, state.server, state.chain, state.participations)), numbers, *kept]


def _unpacked(federation, start, number, leaves):
  """Returns the state that had these leaves; `start` is one of the same structure."""
  structure = jax.tree.structure((start.variables, start.server, start.chain, start.participations))
  main, (clients, *kept) = leaves[: structure.num_leaves], leaves[structure.num_leaves :]
  of_client = jax.tree.structure(federation.client.upload.init(start.variables['params']))
  each = {int(c): of_client.unflatten([leaf[i] for leaf in kept]) for i, c in enumerate(clients[1:])}
  variables, server, chain, participations = structure.unflatten(main)
  return simulation.State(number, variables, server, chain, each, np.asarray(participations))
