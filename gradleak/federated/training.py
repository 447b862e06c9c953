"""A whole training: rounds, what they cost, how good the model is, and a folder that survives a kill."""

import json
import pathlib
import time

import jax
import numpy as np

from gradleak import errors
from gradleak.federated import simulation
from gradleak.storage import Workdir, json_lines, write_atomically


def train(key, federation, variables, rounds, *, test=None, evaluate_every=1, workdir=None, config=None, on_round=None):
  """Trains for a number of rounds; returns (the last `simulation.State`, a row per round).

  A row holds plain JSON values: 'round' (from 1 on), 'clients' (those that answered), 'samples' (that they trained on
  together), 'bytes_up' and 'bytes_down' (of all of them together), 'update_norm', and at evaluated rounds 'accuracy'
  and 'loss' on the test samples.

  Args:
    key: a typed JAX key; the same key and settings give the same rows, bit for bit, also after a resume.
    federation: the `simulation.Federation`.
    variables: the initial model's.
    rounds: how many.
    test: (images, labels) that the model is measured on, or None.
    evaluate_every: rounds between two measurements; the last round is always measured.
    workdir: a folder for `rounds.jsonl`, `timing.jsonl` and checkpoints; a run that was killed goes on from there.
    config: what identifies the run there, plain JSON.
    on_round: called with (row, rounds, seconds of the round) after each round.

  Raises:
    UsageError: for numbers out of range, or a folder that belongs to another run.
  """
  errors.check_number('rounds', rounds, low=1, integer=True)
  errors.check_number('evaluate_every', evaluate_every, low=1, integer=True)
  store = None if workdir is None else Workdir(workdir, config or {}, {'group_size': federation.group_size})
  state, rows = simulation.start(federation, variables), []
  if store is not None and (found := store.load_checkpoint('training')):
    state = _unpacked(federation, state, *found)
    lines = (store.path / 'rounds.jsonl').read_text('utf-8').splitlines()
    rows = [json.loads(line) for line in lines[: state.number]]
  while state.number < rounds:
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
    if test is not None and (state.number % evaluate_every == 0 or state.number == rounds):
      row['accuracy'], row['loss'] = simulation.accuracy(federation.client.model, state.variables, *test)
    rows.append(row)
    if store is not None:
      _save(store, rows, state, seconds, due=state.number == rounds)
    if on_round is not None:
      on_round(row, rounds, seconds)
  return state, rows


def seconds_of_a_round(workdir):
  """Returns the median seconds of a round in a work directory, of those behind the first, which compiles."""
  lines = (pathlib.Path(workdir) / 'timing.jsonl').read_text('utf-8').splitlines()
  seconds = [json.loads(line)['seconds'] for line in lines]
  return float(np.median(seconds[1:] or seconds))


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
  return [*jax.tree.leaves((state.variables, state.server, state.chain)), numbers, *kept]


def _unpacked(federation, start, number, leaves):
  """Returns the state that had these leaves; `start` is one of the same structure."""
  structure = jax.tree.structure((start.variables, start.server, start.chain))
  main, (clients, *kept) = leaves[: structure.num_leaves], leaves[structure.num_leaves :]
  of_client = jax.tree.structure(federation.client.upload.init(start.variables['params']))
  each = {int(c): of_client.unflatten([leaf[i] for leaf in kept]) for i, c in enumerate(clients[1:])}
  return simulation.State(number, *structure.unflatten(main), each)
