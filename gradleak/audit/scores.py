"""Scored and judged: what the attacks found against the private samples, one row per target."""

import json
import math
from collections.abc import Collection
from typing import Any

import jax
import numpy as np

from gradleak.adaptive import NON_ADAPTIVE
from gradleak.audit import granted, schema
from gradleak.audit.group import Group
from gradleak.audit.lanes import Found, Key, Lane
from gradleak.audit.uploads import Uploads, fraction_sent
from gradleak.audit.verdict import CONTROL, exact_alone, is_flat, judge, threshold
from gradleak.audit.views import Target, called
from gradleak.core import trees
from gradleak.core.storage import plain
from gradleak.defenses.defense import remarks
from gradleak.modalities import Modality

Part = tuple[list[dict], dict[str, np.ndarray]]


def scored(group: Group, sent: Uploads, found: Found) -> Part:
  """Returns the rows of one structure, not yet judged, and arrays with the key, samples and curve of each row."""
  rows, keys, samples, curves = [], [], [], []
  for lanes in _by_target(found.table.lanes):
    row, chosen, permutation = _row(group, sent, found, lanes)
    rows.append({**row, 'steps': found.table.num_steps})
    first = found.table.lanes[lanes[0]]
    keys.append(first.target.key(group, found.table.variants[first.variant].name(group)))
    samples.append(_arranged(found.reconstructions.samples[chosen], permutation))
    curves.append(found.curves[chosen])
  arrays = {'keys': [json.dumps(key) for key in keys], 'images': samples, 'curves': curves, 'steps': found.steps}
  return rows, {name: np.asarray(array) for name, array in arrays.items()}


def judged(parts: list[Part]) -> list[dict]:
  """Returns the rows of one structure's parts, judged by the control runs of the same variant in all of them.

  Flat samples are judged by the controls of flat ones, all others by the others: any guess is nearer to a flat sample.
  Without a control of its kind a run is exact or shows nothing.
  """
  rows = [row for part, _ in parts for row in part]
  variants = [
    (variant, is_flat(row))
    for (variant, *_), row in zip((key for part in parts for key in keys_of(part)), rows, strict=True)
  ]
  pools = {
    v: [row for row, of in zip(rows, variants, strict=True) if of == v and row['control']] for v in set(variants)
  }
  beyond = {v: threshold(pool) if pool else exact_alone(pools.get((v[0], not v[1]), [])) for v, pool in pools.items()}
  return [schema.check(plain({**row, **judge(row, beyond[v])})) for row, v in zip(rows, variants, strict=True)]


def kept(part: Part, wanted: Collection[Key]) -> Part:
  """Returns the rows of a part that are wanted, with their arrays."""
  rows, arrays = part
  places = [i for i, key in enumerate(keys_of(part)) if key in wanted]
  of_rows = ('keys', 'images', 'curves')
  return [rows[i] for i in places], {name: x[places] if name in of_rows else x for name, x in arrays.items()}


def keys_of(part: Part) -> list[tuple]:
  """Returns what each row of a part is about, see `lanes.Key`."""
  keys = zip(map(json.loads, part[1]['keys']), part[0], strict=True)
  return [(name, label if row['control'] else called(label), *rest) for (name, label, *rest), row in keys]


def kept_distance(distances: np.ndarray, diverged_steps: np.ndarray) -> np.ndarray:
  """Returns by what the attacker chooses among starts: their distances; infinity for those that diverged.

  Args:
    distances, diverged_steps: of each start, see `Reconstruction`.
  """
  return np.where((diverged_steps >= 0) | np.isnan(distances), np.inf, distances)


def _by_target(lanes: list[Lane]) -> list[range]:
  """Returns the ranges of lanes that are about the same variant and target."""
  starts = [
    i
    for i, lane in enumerate(lanes)
    if i == 0 or (lane.variant, lane.target.views) != (lanes[i - 1].variant, lanes[i - 1].target.views)
  ]
  return [range(start, stop) for start, stop in zip(starts, [*starts[1:], len(lanes)], strict=True)]


def _row(group: Group, sent: Uploads, found: Found, lanes: range) -> tuple[dict, int, Any]:
  """Returns a target's row without its verdict, the lane that the attacker keeps, and how its samples are matched."""
  reconstructions, scenario, kind = found.reconstructions, group.scenario, group.modality
  first = found.table.lanes[lanes.start]
  target, variant = first.target, found.table.variants[first.variant]
  truth, labels = group.truth[target.trial], group.classes[target.trial]

  failed = reconstructions.diverged_step >= 0

  def samples(lane: int) -> Any:  # none of a trial that diverged: what is decided on NaN may look like an answer
    made = reconstructions.samples[lane]
    return np.full(np.shape(made), _nothing(made)) if failed[lane] else made

  def evaluated(lane: int) -> dict:
    figures = kind.evaluate(
      samples(lane),
      truth,
      reconstructions.labels[lane],
      labels,
      signed=found.table.signed,
      blank=found.table.num_steps > 0,
      among=group.gallery,
    )
    return figures | {one.name: math.nan for one in kind.columns if failed[lane] and one.name in figures}

  measured = list(map(evaluated, lanes))
  started = slice(lanes.start, lanes.stop)
  best = int(np.argmin(kept_distance(reconstructions.distance[started], reconstructions.diverged_step[started])))
  chosen, figures = lanes[best], measured[best]
  oracle = max(measured, key=lambda figure: -math.inf if np.isnan(figure[kind.score]) else figure[kind.score])
  permutation, first = figures.pop('permutation'), figures.pop('first')
  diverged = int(reconstructions.diverged_step[chosen])
  known = granted.knowledge(group, variant.method)
  row = {
    'dataset': scenario.settings['dataset'],
    'model': scenario.settings['model'],
    'init': scenario.settings.get('init'),
    'attack': group.attacks[variant.attack].label,
    **_met(group, target),
    'trial': target.address,
    'seed': scenario.settings.get('seed'),
    'batch_size': group.settings.batch_size,
    'restarts': group.settings.restarts,
    'labels': known.labels,
    **figures,
    'identified': int(np.count_nonzero(~group.shared[target.trial][first])),
    **_by_networks(group, samples(chosen), truth, permutation),
    f'trained_{kind.score}': None if diverged >= 0 else _to_trained(kind, sent, target, samples(chosen)),
    'objective': float(reconstructions.objective[chosen]),
    'distance': float(reconstructions.distance[chosen]),
    'objective_start': float(reconstructions.objective_start[chosen]),
    'objective_at_truth': float(found.at_truth[chosen]),
    **{f'oracle_{name}': oracle[name] for name in kind.oracle},
    'diverged': diverged >= 0,
    'diverged_step': diverged if diverged >= 0 else None,
    'change': sent.changes[target.defense][target.place],
    'sent': fraction_sent(trees.take(trees.take(sent.sent[target.defense], 0), target.place)),
    'tier': known.tier,
  }
  return row, chosen, permutation


def _by_networks(group: Group, samples: jax.Array, truth: np.ndarray, permutation: list[int]) -> dict:
  """Returns the figures of networks, means over the pairs, see `Modality.by_networks`."""
  compared = group.modality.by_networks
  if compared is None:
    return {}
  matched = np.asarray(permutation) >= 0
  pairs = np.asarray(samples)[np.asarray(permutation)[matched]], truth[matched]
  return compared(group.client.model, group.scenario.variables, group.lpips)(*pairs)


def _to_trained(kind: Modality, sent: Uploads, target: Target, samples: jax.Array) -> float | None:
  """Returns the score of a reconstruction to what the client trained on, None where this is what is private."""
  trained = None if target.defense < 0 else sent.trained[target.defense]
  if trained is None:
    return None
  nothing = np.zeros(0, np.int32), np.zeros(len(trained[target.place]), np.int32)
  return kind.evaluate(samples, trained[target.place], *nothing)[kind.score]


def _met(group: Group, target: Target) -> dict:
  """Returns the columns that say which defense the attacker met, and by which adaptive attack."""
  control, non_adaptive = target.defense < 0, target.adaptive is NON_ADAPTIVE
  return {
    'defense': CONTROL if control else group.defenses[target.defense].label,
    'control': control,
    'knowledge': 'non-adaptive' if non_adaptive else 'adaptive',
    'adaptive': None if non_adaptive else target.adaptive.name,
    'rounds': target.adaptive.rounds,
    'remark': '' if control else remarks(group.defenses[target.defense].method.defense, group.scenario.context),
  }


def _arranged(samples: jax.Array, permutation: Any) -> np.ndarray:
  """Returns the samples [K, …] as they are matched to the truth, [N, …]; NaN, or −1, where none is left for one."""
  matched = np.asarray(permutation).reshape(-1, *[1] * (samples.ndim - 1)) >= 0
  return np.where(matched, samples[permutation], _nothing(samples))


def _nothing(samples: Any) -> np.generic:
  """Returns what stands where no sample is: NaN, or −1."""
  return np.int32(-1) if np.issubdtype(samples.dtype, np.integer) else np.float32(np.nan)
