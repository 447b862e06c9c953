"""A whole training: rounds, their cost, the accuracy of the model, and checkpoints to resume from."""

import dataclasses
import functools
import itertools
import math
import os
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from gradleak import data
from gradleak.core import errors, statistics, trees
from gradleak.core.locks import alone
from gradleak.core.settings import Count, ranged
from gradleak.core.storage import (
  Workdir,
  append_time,
  damaged,
  json_lines,
  read_json_lines,
  read_times,
  write_atomically,
)
from gradleak.federated import chance, simulation
from gradleak.federated.accounting import Ledger
from gradleak.federated.simulation import Federation, Round, State
from gradleak.models.model import outputs_shape

_MEASURED = ('loss', 'update_norm')
UNSETTLED = 2.0  # points of accuracy from one measurement to the next


@ranged
def train(
  key: jax.Array,
  federation: Federation,
  variables: Mapping,
  rounds: Count,
  *,
  test: tuple | None = None,
  evaluate_every: Count = 1,
  workdir: str | os.PathLike | None = None,
  config: dict | None = None,
  privacy: Ledger | None = None,
  on_round: Callable[[dict, State, float], None] | None = None,
) -> tuple[State, list[dict]]:
  """Trains for a number of rounds; returns (the last `State`, a row per round).

  A row holds these plain JSON values:

  - 'round' (from 1 on), 'clients' (how many answered), 'samples' (that they trained on together), and 'update_norm',
    NaN where it is not finite;
  - 'bytes_up' and 'bytes_down', of all of them together, BatchNorm's statistics included;
  - 'bytes_statistics', those of the statistics in 'bytes_up';
  - at evaluated rounds, 'accuracy' and 'loss' (likewise) on the test samples, and the columns of `chance.facts`;
  - with `privacy`, 'epsilon' of all rounds so far, None if it is infinite;
  - with `privacy`, also 'epsilon_relation' and 'epsilon_unit', see `defenses.differential_privacy.Epsilon`.

  Args:
    key: a typed JAX key; the same key and settings give the same rows, bit for bit, also after a resume.
    federation: the `Federation`.
    variables: the initial model's.
    rounds: how many.
    test: (samples, targets) that the model is measured on, or None.
    evaluate_every: rounds between two measurements; the last round is always measured.
    workdir: a folder for `rounds.jsonl`, `timing.jsonl` and checkpoints; a run that was killed is resumed from it.
    config: what identifies the run there, plain JSON.
    privacy: the `Ledger` of the clients' and the server's noise, or None; its budget may end the training.
    on_round: called with (row, `State`, seconds of the round) after each round.

  Raises:
    UsageError: for a folder that belongs to another run or holds more rounds, a budget that the first round alone
      exceeds, or a ledger of another federation: its ε would be too small.
  """
  key = errors.check_key('key', key, traced=False)
  errors.check_instance('federation', federation, Federation, 'a gradleak.federated.simulation.Federation')
  check_privacy(key, federation, privacy)
  errors.check_json('config', {} if config is None else config)
  kind = federation.client.modality
  if test is not None:
    outputs = outputs_shape(federation.client.model, variables, federation.samples.shape[1:])
    check = functools.partial(federation.client.targets, outputs=outputs)
    test = data.pair('test', test, check=kind.check, check_targets=check, noun=kind.noun)

  def finished(state: State) -> bool:
    return state.number == rounds or _overdrawn(federation, state, key, privacy)

  state, rows = simulation.start(federation, variables), []
  with alone(workdir):
    store = None if workdir is None else Workdir(workdir, config or {}, {'group_size': federation.at_once})
    if store is not None:
      federation = dataclasses.replace(federation, group_size=store.speed['group_size'])
      state, rows = _resumed(store, federation, state, rounds)
    last = finished(state)
    while not last:
      started = time.monotonic()
      state, done = simulation.run_round(federation, state, key)
      row, seconds = _row(federation, state, done, privacy), time.monotonic() - started
      last = finished(state)
      if test is not None and (state.number % evaluate_every == 0 or last):
        row |= _measured(federation, state, *test)
      rows.append(row)
      if on_round is not None:
        on_round(row, state, seconds)
      if store is not None:  # after `on_round`: of a kill in it, the round is done again, and so is what it does
        _save(store, rows, state, seconds, due=last)
  return state, rows


def _resumed(store: Workdir, federation: Federation, state: State, rounds: int) -> tuple[State, list[dict]]:
  """Returns the state and the rows of the checkpoint in a work directory, or else those of the start."""
  found = store.load_checkpoint('training')
  if not found:
    return state, []
  state = _unpacked(federation, state, *found)
  if state.number > rounds:
    raise errors.UsageError(
      f'the folder {store.path} holds a training of {state.number} rounds, and {rounds} are asked for: ask for as many '
      'or more, or take another folder'
    )
  return state, _rows(store.path / 'rounds.jsonl', state.number)


def check_privacy(key: jax.Array, federation: Federation, privacy: Ledger | None) -> None:
  """Raises `UsageError` for a ledger that `train` refuses, which takes the same arguments."""
  if privacy is None:
    return
  errors.check_instance('privacy', privacy, Ledger, 'a Ledger, as gradleak.federated.accounting.ledger makes it')
  _check_accounted(privacy, federation)
  spent = privacy.epsilon(1, int(simulation.draw(federation, 0, key)[1].any()))
  if privacy.budget is not None and spent.value > privacy.budget:
    raise errors.UsageError(
      f'the first round alone costs ε = {spent.value:.3g} ({spent.said}), more than the budget of {privacy.budget}'
    )


def _check_accounted(privacy: Ledger, federation: Federation) -> None:
  """Raises `UsageError` where the ε of a ledger would be too small for a federation."""
  clients, client = range(len(federation.partition)), federation.client
  if privacy.server_noise != federation.server_noise:
    raise errors.UsageError(
      f'the ledger counts server noise of {privacy.server_noise}, and the federation has {federation.server_noise}'
    )
  if privacy.server_noise and privacy.sampling_rate < federation.per_round / len(clients) * (1 - 1e-9):
    raise errors.UsageError(
      f'the ledger counts a sampling rate of {privacy.sampling_rate}, and {federation.per_round} of {len(clients)} '
      'clients are drawn for a round'
    )
  if not privacy.counted:
    return
  if federation.defended is not None and (others := sorted(set(clients) - set(federation.defended))):
    raise errors.UsageError(f'the ledger counts the noise of all clients, and client {others[0]} trains without it')
  if privacy.unit == 'example':
    _check_examples(privacy, federation)
  if client.step is client.upload is simulation.NO_DEFENSE and client.transform is None:
    raise errors.UsageError(
      'the ledger counts the noise of clients, and they have no defense: give the federation the client under the '
      'defense, as gradleak.defenses.bind(…).client(…) returns it'
    )


def _check_examples(privacy: Ledger, federation: Federation) -> None:
  """Raises `UsageError` where the ε per example would be too small, as `_check_accounted` does."""
  client = federation.client
  held = np.concatenate([np.asarray(part) for part in federation.partition])
  if len(np.unique(held)) < len(held):
    raise errors.UsageError(
      'the ledger counts one part of each sample in a round, and some samples are held by several clients or more than '
      'once by one'
    )
  epochs = client.epochs if client.share == 'delta' else 1
  if (fewer := min(mechanism.releases for mechanism in privacy.counted)) < epochs:
    raise errors.UsageError(f'the ledger counts {fewer} local epochs, and clients train for {epochs}')


def _rows(path: pathlib.Path, number: int) -> list[dict]:
  """Returns the rows of the first rounds; raises `UsageError` if one is missing."""
  advice = 'restore it, or remove the folder to train anew'
  try:
    rows = read_json_lines(path, advice)[:number]
  except FileNotFoundError:
    raise damaged(path, 'it is missing', advice) from None
  if [row.get('round') for row in rows] != [*range(1, number + 1)]:
    raise damaged(path, f'it does not hold the rounds 1 to {number}', advice)
  # JSON has null for numbers that are not finite, as those of a training that diverged.
  return [
    {name: math.nan if value is None and name in _MEASURED else value for name, value in row.items()} for row in rows
  ]


def _overdrawn(federation: Federation, state: State, key: jax.Array, privacy: Ledger | None) -> bool:
  """Returns whether the next round would exceed the budget."""
  if privacy is None or privacy.budget is None:
    return False
  return privacy.epsilon(state.number + 1, int(simulation.after(federation, state, key).max())).value > privacy.budget


def _measured(federation: Federation, state: State, samples: np.ndarray, targets: np.ndarray) -> dict:
  """Returns what is measured of a model on test samples."""
  predicted, truth, loss, lengths = simulation.judged(federation.client, state.variables, samples, targets)
  return {
    'accuracy': int(np.sum(predicted == truth)) / len(truth),
    'loss': _finite(loss),
    **chance.facts(truth, predicted, lengths),
  }


def _finite(value: float) -> float:
  """Returns a number, NaN for an infinite one: `_rows` reads both as NaN."""
  return value if math.isfinite(value) else math.nan


def _row(federation: Federation, state: State, done: Round, privacy: Ledger | None) -> dict:
  """Returns the row of a round, before its evaluation."""
  row: dict[str, Any] = {
    'round': state.number,
    'clients': len(done.clients),
    'samples': int(done.samples.sum()),
    'bytes_up': int(done.bytes_up.sum()),
    'bytes_down': done.bytes_down * federation.per_round,
    'bytes_statistics': int(done.bytes_statistics.sum()),
    'update_norm': _finite(done.update_norm),
  }
  if privacy is not None:
    spent = privacy.epsilon(state.number, int(state.participations.max()))
    row['epsilon'] = spent.value if math.isfinite(spent.value) else None
    row |= {'epsilon_relation': spent.relation, 'epsilon_unit': spent.unit}
  return row


def seconds_of_a_round(workdir: str | os.PathLike) -> float:
  """Returns the median seconds of a round in a work directory, without the first, which compiles."""
  seconds = [entry['seconds'] for entry in read_times(pathlib.Path(workdir) / 'timing.jsonl')]
  return float(np.median(seconds[1:] or seconds or math.nan))


def bare(federation: Federation) -> Federation:
  """Returns a federation without the defenses of its clients and of its server."""
  return dataclasses.replace(
    federation, client=federation.client.undefended(), chain=simulation.NO_DEFENSE, server_noise=0.0
  )


def seconds_split(
  federation: Federation, variables: Mapping, key: jax.Array, repeats: int = 5, seconds: float = 3.0
) -> tuple[float, float]:
  """Returns (seconds of a round without the defenses, seconds that they add), medians over alternating warm rounds.

  The added time is the median difference of two consecutive rounds; measurement noise can make it negative.

  Args:
    federation: the `Federation`.
    variables: the initial model's; the first round is measured.
    key: of the training.
    repeats: the least number of measurements of each.
    seconds: the least total time of the measurements.
  """
  undefended = bare(federation)
  pairs: list[list[float]] = []
  while len(pairs) <= repeats or sum(map(sum, pairs[1:])) < seconds:
    pair = []
    for one in (undefended, federation):
      state = simulation.start(one, variables)
      started = time.monotonic()
      jax.block_until_ready(simulation.run_round(one, state, key)[0].variables)
      pair.append(time.monotonic() - started)
    pairs.append(pair)
  without, defended = np.asarray(pairs[1:]).T  # the first pair compiled
  return float(np.median(without)), float(np.median(defended - without))


class Gained(NamedTuple):
  """What the accuracy of one training is above that of another, with its 95 % interval by their test samples.

  Attributes:
    share: the difference, in [-1, 1].
    low, high: its interval.
    pairs: whether the two are compared sample by sample.
  """

  share: float
  low: float
  high: float
  pairs: bool


def gained(
  last: Mapping,
  wrong: Sequence[int] | None,
  other: Mapping,
  other_wrong: Sequence[int] | None,
  *,
  lengths: Sequence[int] | None = None,
  noun: str = 'samples',
) -> Gained | None:
  """Returns what the accuracy of a training is above that of another; None where test samples are not counted.

  The interval is that of pairs (`statistics.paired_interval`) where both trainings say, in accord with their accuracy,
  which samples are wrong. Otherwise it is that of independent samples (`statistics.difference_interval`). Tokens count
  as so many as are independent (`statistics.independent_trials`); None where that is not known.

  Args:
    last, other: the last row of each, see `train`.
    wrong, other_wrong: the numbers of the test samples, or the tokens in these, that each classifies wrongly, or None.
    lengths: of texts, see `simulation.Decisions`.
    noun: what an accuracy counts, see `chance.counted`.
  """
  if not last.get('tested') or not other.get('tested'):
    return None
  n, texts = last['tested'], noun == 'tokens'
  same = n == other['tested'] and (not texts or (lengths is not None and sum(lengths) == n))
  if same and _explains(wrong, last) and _explains(other_wrong, other):
    difference = np.zeros(n, int)
    difference[list(other_wrong or ())] += 1
    difference[list(wrong or ())] -= 1
    share = statistics.independent_trials(difference, lengths) / n if texts else 1.0
    above, below = (share * int(np.count_nonzero(difference == side)) for side in (1, -1))
    return Gained(*statistics.paired_interval(above, below, share * n), pairs=True)
  if texts and not ('independent' in last and 'independent' in other):
    return None
  return Gained(*statistics.difference_interval(*chance.correct(last), *chance.correct(other)), pairs=False)


def _explains(wrong: Sequence[int] | None, last: Mapping) -> bool:
  """Returns whether numbers of wrongly classified test samples are known, and as many as the accuracy says."""
  n = last['tested']
  return wrong is not None and set(wrong) <= set(range(n)) and len(set(wrong)) == n - round(last['accuracy'] * n)


def unsettled(rows: Sequence[Mapping]) -> float:
  """Returns the largest change of accuracy between two measurements, in points, over the last quarter of them."""
  values = [100 * row['accuracy'] for row in rows if row.get('accuracy') is not None]
  late = values[-max(2, len(values) // 4) :]
  return max((abs(b - a) for a, b in itertools.pairwise(late)), default=0.0)


def _save(store: Workdir, rows: list[dict], state: State, seconds: float, due: bool) -> None:
  """Writes the rows first: a resume drops those beyond the checkpoint."""

  def packed() -> list:
    write_atomically(store.path / 'rounds.jsonl', json_lines(rows))
    return _packed(state)

  append_time(store.path / 'timing.jsonl', round=state.number, seconds=seconds)
  store.save_checkpoint('training', state.number, packed, due=due)


def _packed(state: State) -> list:
  """Returns the leaves of a state; then the numbers of the clients with a state of their own, and those, stacked."""
  clients = sorted(state.kept)
  kept = [np.stack(leaves) for leaves in zip(*(jax.tree.leaves(state.kept[c]) for c in clients), strict=True)]
  numbers = np.asarray([-1, *clients])  # Orbax saves no empty arrays
  return [*jax.tree.leaves((state.variables, state.server, state.chain, state.participations)), numbers, *kept]


def _unpacked(federation: Federation, start: State, number: int, leaves: list) -> State:
  """Returns the state with these leaves; `start` is one of the same structure."""
  same = start.variables, start.server, start.chain, start.participations
  count, of_client = len(jax.tree.leaves(same)), federation.client.upload.init(start.variables['params'])
  variables, server, chain, participations = trees.rebuilt(same, leaves[:count])
  clients, *kept = leaves[count:]
  each = {int(c): trees.rebuilt(of_client, [leaf[i] for leaf in kept]) for i, c in enumerate(clients[1:])}
  return State(number, variables, server, chain, each, np.asarray(participations))
