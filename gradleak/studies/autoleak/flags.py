"""Reasons to distrust a verdict: on what a defense sends, and on how the attacks went."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from gradleak.core.trees import Tree
from gradleak.defenses.defense import Defense, bind
from gradleak.federated import Client
from gradleak.federated.roughness import roughness
from gradleak.federated.scenario import Scenario
from gradleak.modalities import of_rows as modality_of
from gradleak.summary.cases import grouped

LEVELS = 16  # distinct sizes of the entries of a tensor, at most, that make it quantised
SMALLEST = 64  # entries of a tensor that is looked at
MOVED = 1e-6  # relative fall of an objective that counts as none
UPLOADS = 8  # at most, of which it is asked how far noise on their samples turns them
NOISE = 0.01  # its standard deviation, in units of the pixels' range

MASKED = 'gradient masked'
FROZEN = 'noise frozen'
UNCHANGED = 'changes nothing'
WEAKER = 'attack weaker than its control'
FAILS = 'undefended attack fails'
UNAVERAGED = 'randomness not averaged'


def of_uploads(key: jax.Array, scenario: Scenario, defense: Defense, batch_size: int) -> list[str]:
  """Returns what two uploads of a client with a defense give away about it, sentences that begin with the flag.

  Both are computed anew with different keys, of the first private batch and of the second one, if there is one. Where a
  user's own defense has a state, the second is sent by another client, and by the same in the state after the first.

  Args:
    key: of this look.
    scenario: the `Scenario`.
    defense: the `Defense`.
    batch_size: private samples behind one upload.
  """
  if not defense.stages:
    return []
  bound, bare = bind(defense, scenario.context), scenario.client
  defended = bound.client(bare)
  batches = [slice(0, batch_size), slice(batch_size, 2 * batch_size)]
  batches = batches if len(scenario.samples) >= 2 * batch_size else batches[:1] * 2
  keys = jax.random.split(key)

  def sent(client: Client, one: jax.Array, batch: slice, before: Any = None) -> tuple[Tree, Any]:
    samples = scenario.samples[batch], scenario.targets[batch]
    return jax.device_get(_sent(client, one, scenario.variables, *samples, before))

  first, state = sent(defended, keys[0], batches[0])
  others = [sent(defended, keys[1], batches[1], before)[0] for before in (None, *([state] if bound.keeps else ()))]
  undefended = [sent(bare, one, batch)[0] for one, batch in zip(keys, batches, strict=True)]
  found = []
  sizes = _sizes(first)
  if sizes and max(sizes) <= LEVELS and not max(_sizes(undefended[0]), default=0) <= LEVELS:
    found.append(
      f'{MASKED}: the entries of each tensor have at most {max(sizes)} sizes, so that attacks that match directions or '
      'sizes start from little; one with many restarts may still succeed'
    )
  added = _flat(first) - _flat(undefended[0])
  alike = any(_alike(added, _flat(other) - _flat(undefended[1])) for other in others)
  if alike and not _alike(*(_flat(before) for before in undefended)):
    found.append(f'{FROZEN}: two uploads bear the same noise, which whoever knows it subtracts')
  again, _ = sent(defended, keys[1], batches[0])
  same = np.array_equal(_flat(again), _flat(first))
  altered = (_flat(first) != 0) & ~np.isclose(_flat(first), _flat(undefended[0]), rtol=1e-4)
  if defense.random and same and altered.any():  # what only drops entries may choose them without chance
    found.append(f'{FROZEN}: it is called random, but another key gives the same upload of the same samples')
  return found


@functools.partial(jax.jit, static_argnums=0)
def _sent(
  client: Client, key: jax.Array, variables: Tree, samples: jax.Array, targets: jax.Array, state: Any
) -> tuple[Tree, Any]:
  upload, state, _ = client.participate(key, variables, samples, targets, None, state)
  return upload.update, state


def of_rows(rows: Sequence[dict], controls: Sequence[dict], random: bool, averaged: bool) -> list[str]:
  """Returns what the rows of one defense say about its attacks, sentences that begin with the flag.

  Args:
    rows: of one defense, by all attackers.
    controls: the control runs of the same attacks.
    random: whether the defense is random.
    averaged: whether any attacker averaged several uploads.
  """
  found = []
  changes = [row['change'] for row in rows if row['change'] is not None]
  if changes and not any(changes) and any(row['defense'] != 'none' for row in rows):
    found.append(f'{UNCHANGED}: every upload is that of an undefended client')
  by_attack = grouped(rows, 'attack')
  stuck = [attack for (attack,), of in by_attack.items() if _stuck(of)]
  if stuck:
    found.append(f'{MASKED}: the objective of {", ".join(stuck)} never moved, so its gradient vanishes')
  pools = {attack: grouped(of, modality_of(of).controls[0]).values() for (attack,), of in by_attack.items()}
  weaker = [attack for attack, of in pools.items() if all(_weaker(each, controls) for each in of)]
  if weaker:
    nearer = f'{"is" if len(weaker) == 1 else "are"} nearer to the {modality_of(rows).noun[1]} on noise'
    found.append(f'{WEAKER}: {", ".join(weaker)} {nearer}')
  if random and not averaged:
    found.append(f'{UNAVERAGED}: it is random, and no attacker averaged several uploads')
  return found


def of_undefended(key: jax.Array, scenario: Scenario, rows: Sequence[dict], batch_size: int) -> list[str]:
  """Returns what undefended uploads say about all defenses: a sentence where nothing is recovered of them.

  It ends with how far noise on the private samples turns the update (`federated.roughness`).

  Args:
    key: of that noise.
    scenario: the `Scenario`.
    rows: of undefended uploads by honest-but-curious servers: that a malicious one succeeds shows nothing about these.
    batch_size: private samples behind one upload.
  """
  if not rows or any(row['success'] for row in rows):
    return []
  size = min(UPLOADS, len(scenario.samples) // batch_size) * batch_size
  samples = scenario.samples[:size], scenario.targets[:size]
  turned = roughness(key, scenario.client, scenario.variables, *samples, stddevs=(NOISE,), batch_size=batch_size)
  what = 'pixels' if scenario.client.modality.marked is None else scenario.client.modality.noun[1]
  return [
    f'{FAILS}: no honest-but-curious attacker recovers anything without a defense, where noise of {NOISE:g} on the '
    f'{what} turns the update by a cosine distance of {turned[NOISE]:.2g}'
  ]


def _weaker(rows: Sequence[dict], controls: Sequence[dict]) -> bool:
  """Returns whether rows are further from the samples than the control runs of their pool."""
  kind = modality_of(rows)
  bound = kind.controls[0]
  of = rows[0]['attack'], rows[0][bound]
  return _mean(rows) + kind.margin < _mean([row for row in controls if (row['attack'], row[bound]) == of])


def _stuck(rows: Sequence[dict]) -> bool:
  """Returns whether the objective of an attack with steps ends where it started, in all runs."""
  moves = [
    abs(row['objective_start'] - row['objective']) > MOVED * abs(row['objective_start'])
    for row in rows
    if row['steps'] and not row['diverged'] and row['objective_start'] is not None
  ]
  return bool(moves) and not any(moves)


def _mean(rows: Sequence[dict]) -> float:
  score = modality_of(rows).score
  values = [row[score] for row in rows if row[score] is not None]
  return float(np.mean(values)) if values else float('nan')


def _sizes(update: Any) -> list[int]:
  """Returns how many distinct absolute values the entries of each tensor have, zeros aside."""
  leaves = [np.asarray(leaf).ravel() for leaf in jax.tree.leaves(update)]
  entries = [np.abs(leaf[leaf != 0]) for leaf in leaves]
  return [len(np.unique(np.float32(each))) for each in entries if each.size >= SMALLEST]


def _flat(update: Any) -> np.ndarray:
  return np.concatenate([np.asarray(leaf, np.float64).ravel() for leaf in jax.tree.leaves(update)])


def _alike(a: np.ndarray, b: np.ndarray) -> bool:
  """Returns whether two vectors point the same way, to one in ten thousand."""
  norms = np.linalg.norm(a) * np.linalg.norm(b)
  return bool(norms > 0 and a @ b / norms > 0.9999)
