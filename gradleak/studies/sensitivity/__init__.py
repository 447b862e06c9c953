"""Which assumption protects: an attack in its laboratory setting, and what is left of it as assumptions are dropped.

    assumptions ─► settings, one per set of dropped assumptions ─► one audit each ─► rows ─► effects ─► judgements

Published attacks assume an untrained model, wide initialisation, known labels, one sample and one local step. Each of
these is an `Assumption`: a function that takes a `Setting` from the laboratory to production. What a judgement says is
computed from rows, in `judged`, and from nothing else.
"""

import dataclasses
import math
import re
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gradleak.attacks import csdlg_fast
from gradleak.attacks.base import as_attack
from gradleak.audit import AuditResult, AuditSettings, audit, plan
from gradleak.core import errors
from gradleak.core.settings import check, paired
from gradleak.core.storage import gathering
from gradleak.defenses.defense import as_defense
from gradleak.engine.execution import Execution
from gradleak.engine.progress import rounds as reporter
from gradleak.federated import ClientSettings, simulation, training
from gradleak.federated.scenario import Scenario
from gradleak.modalities import IMAGES, Modality
from gradleak.models import lora
from gradleak.studies.sensitivity.assumptions import (
  LABORATORY,
  LOCAL,
  PROBE,
  PRODUCTION,
  WIDTH,
  Assumption,
  SensitivitySettings,
  Setting,
  assumptions,
  check_assumptions,
  steps_of,
  unlabelled,
)
from gradleak.studies.sensitivity.judgement import Effect, Judgement, Sensitivity, effect, judged, untrained

__all__ = [
  'LABORATORY', 'PRODUCTION', 'Assumption', 'Effect', 'Judgement', 'Sensitivity', 'SensitivitySettings', 'Setting',
  'assumptions', 'effect', 'judged', 'redrawn', 'sensitivity', 'untrained',
]  # fmt: skip

_HELD_OUT = 4  # one of so many public samples measures the accuracy, the others train


@dataclasses.dataclass(frozen=True)
class _Task:
  """What all settings of one call share; arguments of `sensitivity`, checked."""

  key: jax.Array
  given: Scenario
  settings: SensitivitySettings
  config: dict
  folder: Any
  how: Execution
  progress: str


def sensitivity(
  key: Any,
  scenario: Scenario,
  *,
  attack: Any = None,
  defense: Any = None,
  chosen: Sequence[Assumption] | None = None,
  settings: SensitivitySettings | None = None,
  workdir: Any = 'results/sensitivity',
  execution: Execution | None = None,
  progress: str = 'auto',
  **changes: Any,
) -> Sensitivity:
  """Attacks the laboratory setting, drops one assumption at a time, and all; restores each alone in production.

  `gradleak.report.write` makes a page of the result, and of each audit.

  Args:
    key: a typed JAX key; the same key and settings give the same rows, bit for bit, also after a resume.
    scenario: production: N ≥ trials · batch_size · cohort private samples, how the client trains, and its model, see
      `gradleak.scenario`. Weights that were drawn are trained on its public samples. Weights that were given stay.
      Trial t is the t-th batch; where an upload is of one sample, it is the first of that batch, which all share. A
      quarter of the public samples measures the accuracy.
    attack: one of `gradleak.attacks`; by default `csdlg_fast` with tv=1e-6, or without it on samples that have none.
    defense: the client's in production, or None.
    chosen: `Assumption`s in the order in which they are dropped; `assumptions` by default.
    settings: `SensitivitySettings`.
    workdir: a folder, which holds one folder per audit; a run that was stopped goes on from there.
    execution: an `Execution`: group_size, as `gradleak.audit` takes it.
    progress: 'auto', 'bar', 'lines' or 'none'.
    **changes: fields of `SensitivitySettings` and of `Execution`.

  Raises:
    UsageError: for settings that cannot be run, before anything is trained or attacked.
  """
  given, how = paired(
    'gradleak.sensitivity', changes, settings=(SensitivitySettings, settings), execution=(Execution, execution)
  )
  check(given)
  key = errors.check_key('key', key, traced=False)
  method = None if attack is None else as_attack(attack)
  hidden = as_defense(defense)
  how.check('gradleak.sensitivity', given.trials, workdir, 'group_size')
  task = _Task(key, _checked(scenario, given), given, {}, gathering(workdir), how, progress)
  reporter(progress, 1)  # an unknown mode says so now
  local, classes = scenario.described_by('gradleak.sensitivity'), scenario.client.num_classes
  method = method or csdlg_fast(tv=1e-6 if 'tv' in scenario.client.modality.terms else 0.0)
  if chosen is None:
    chosen = assumptions(
      local,
      method,
      given,
      defense=hidden if hidden.stages else None,
      num_classes=classes,
      public=scenario.public,
      batch_norm=bool(scenario.variables.get('batch_stats')),
      given=not scenario.drawn,
      modality=scenario.client.modality,
      adapters=lora.BASE in scenario.variables,
    )
  check_assumptions(chosen)
  local = dataclasses.replace(LOCAL, loss=local.loss)
  free = scenario.client.loss.own or unlabelled(method, local, classes, scenario.client.modality)
  start = Setting(
    ClientSettings(loss=local.loss, batch_norm='eval'),
    AuditSettings(steps=given.steps, controls=given.controls, labels='auto' if free else 'known'),
    method,
    as_defense(None),
    wide=scenario.client.modality is IMAGES,
  )
  told = {'attack': str(method), 'defense': str(hidden) if hidden.stages else None}
  task.config.update(**dataclasses.asdict(given), **scenario.settings, **told)
  return _run(task, list(chosen), start)


def _checked(scenario: Any, given: SensitivitySettings) -> Scenario:
  """Returns the scenario of production with the samples that are attacked, all other things being checked."""
  errors.check_instance('scenario', scenario, Scenario, 'a gradleak.Scenario')
  local = scenario.described_by('gradleak.sensitivity')
  samples, public, noun = scenario.samples, scenario.public, scenario.client.modality.noun[1]
  needed = given.trials * given.batch_size * local.cohort
  if len(samples) < needed:
    raise errors.UsageError(
      f'{given.trials} trials of {needed // given.trials} {noun} need {needed}, there are {len(samples)}: give fewer '
      'trials or a smaller batch_size'
    )
  least = _HELD_OUT * given.training_clients
  if public is not None and len(public[0]) < least:
    raise errors.UsageError(
      f'public holds {len(public[0])} {noun}, and {given.training_clients} clients that train on them need {least}'
    )
  return scenario.of(slice(needed), local)


def _run(task: _Task, chosen: list[Assumption], start: Setting) -> Sensitivity:
  """Trains, then runs one audit per setting, or finds them in the work directory."""
  used = [one for one in chosen if not one.skipped]
  steps = steps_of(used)
  settings = {name: _setting(start, used, dropped) for name, dropped in steps.items()}
  for one in settings.values():  # what cannot be run says so now
    made = _scenario(task, one, task.given.variables)
    plan(task.key, made, [one.defense], [one.attack], task.settings.trials, one.audit)
  weights: dict[tuple[bool, bool], Mapping] = {}
  accuracy: dict[str, dict[str, float]] = {}
  rows, examples, audits, methods = [], {}, {}, {}
  began, seconds = time.monotonic(), 0.0
  for number, (name, one) in enumerate(settings.items()):
    which = one.wide, one.trained
    if which not in weights:
      weights[which], measured, took = _weights(task, *which)
      seconds += took
      if measured:
        accuracy[_origin(one.wide)] = measured
    _say(task, number, len(settings), name, began)
    folder = task.folder / re.sub(r'[^\w+]+', '-', name.replace(' + ', '+').lower())
    result = audit(
      jax.random.fold_in(task.key, 1),
      _scenario(task, one, weights[which]),
      [one.defense],
      [one.attack],
      task.settings.trials,
      settings=one.audit,
      workdir=folder,
      execution=task.how,
      progress=task.progress,
    )
    assert result is not None  # this process runs all of it
    found, example = _found(task.given.client.modality, name, result)
    rows += found
    examples[name], audits[name] = example, folder.name
    methods = {kind: {**methods.get(kind, {}), **facts} for kind, facts in result.methods.items()}
    seconds += result.seconds
  truth = task.given.samples[0]
  return Sensitivity(task.config, chosen, steps, rows, examples, truth, accuracy, audits, methods, seconds)


def _setting(start: Setting, used: Sequence[Assumption], dropped: Sequence[str]) -> Setting:
  """Returns the setting in which some assumptions are dropped.

  Local batches are no larger than the upload's, and one sample has no order. No more batches are accumulated than there
  are: without a step, an upload of zeros would count as protected.
  """
  made = start
  for one in used:
    if one.name in dropped:
      made = one.change(made)
  count, size = made.audit.batch_size // made.client.cohort, made.client.local_batch_size
  changes: dict[str, Any] = {'local_batch_size': None} if size is not None and size >= count else {}
  changes |= {'order': ''} if count == 1 else {}
  client = dataclasses.replace(made.client, **changes)
  if client.accumulate > 1:
    batches = client.client(PROBE, 2).num_steps(made.audit.batch_size)
    client = dataclasses.replace(client, accumulate=min(client.accumulate, batches))
  return made._replace(client=client)


def _scenario(task: _Task, one: Setting, variables: Mapping) -> Scenario:
  """Returns the scenario of a setting: all samples, or the first of each batch where an upload is of one."""
  apart = max(1, len(task.given.samples) // (task.settings.trials * one.audit.batch_size))
  made = task.given.of(slice(None, None, apart), one.client).trained(variables)
  return made.noted({'init': _origin(one.wide), 'trained': one.trained})


def _origin(wide: bool) -> str:
  return f'U(−{WIDTH}, {WIDTH})' if wide else 'own'


def _say(task: _Task, number: int, count: int, name: str, began: float) -> None:
  """Says which setting is next, and how long the rest takes at the pace so far."""
  if task.progress == 'none':
    return
  pace = (time.monotonic() - began) / number if number else 0.0
  left = f' (about {pace * (count - number):.0f} s left)' if number else ''
  what = name if name in (LABORATORY, PRODUCTION) else f'dropped: {name}'
  print(f'setting {number + 1} of {count}, {what}{left}', file=sys.stderr, flush=True)


def redrawn(key: jax.Array, variables: Mapping) -> dict:
  """Returns the variables with every parameter drawn from U(−0.5, 0.5), as in DLG's code; statistics stay."""
  leaves, structure = jax.tree.flatten(variables['params'])
  keys = jax.random.split(key, max(len(leaves), 1))
  drawn = [
    jax.random.uniform(each, jnp.shape(leaf), jnp.result_type(leaf), minval=-WIDTH, maxval=WIDTH)
    for each, leaf in zip(keys, leaves, strict=False)
  ]
  return {**variables, 'params': jax.tree.unflatten(structure, drawn)}


def _weights(task: _Task, wide: bool, trained: bool) -> tuple[Mapping, dict[str, float], float]:
  """Returns (variables, accuracies measured, seconds); a training goes on from its folder."""
  start = redrawn(jax.random.fold_in(task.key, 2), task.given.variables) if wide else task.given.variables
  if not trained:
    return start, {}, 0.0
  assert task.given.public is not None
  given, began = task.settings, time.monotonic()
  samples, targets = task.given.public
  order = np.asarray(jax.random.permutation(jax.random.fold_in(task.key, 3), len(samples)))
  held, rest = np.split(order, [len(order) // _HELD_OUT])
  size = len(rest) // given.training_clients
  own = task.given.client
  local = ClientSettings(
    share='delta', optimizer='adam', learning_rate=given.training_rate, local_batch_size=min(8, size), loss=own.loss
  )
  client = dataclasses.replace(local.client(own.model, own.num_classes), modality=own.modality)
  federation = simulation.Federation(
    client,
    samples[rest],
    targets[rest],
    np.split(np.arange(given.training_clients * size), given.training_clients),
    given.training_clients,
  )
  test = None if own.loss.targets.decide is None else (samples[held], targets[held])
  name = f'training-{"wide" if wide else "own"}'
  if task.progress != 'none':
    noun = own.modality.noun[1]
    print(f'training on {len(rest)} public {noun}, initialised from {_origin(wide)} …', file=sys.stderr, flush=True)
  state, rows = training.train(
    jax.random.fold_in(task.key, 4),
    federation,
    start,
    given.training_rounds,
    test=test,
    evaluate_every=given.training_rounds,
    workdir=task.folder / name,
    config={**task.config, 'wide': wide},
    on_round=reporter(task.progress, given.training_rounds),
  )
  measured = {}
  if test is not None:
    predicted, truth, *_ = simulation.judged(client, start, *test)
    measured = {
      'trained': rows[-1]['accuracy'],
      'untrained': float(np.mean(predicted == truth)),
      'guessing': float(np.unique_counts(truth).counts.max() / len(truth)),
      **{name: rows[-1][name] for name in ('tested', 'independent') if name in rows[-1]},
    }
  return state.variables, measured, time.monotonic() - began


def _found(kind: Modality, name: str, result: AuditResult) -> tuple[list[dict[str, Any]], np.ndarray]:
  """Returns (rows of a setting, what the strongest attacker makes of the first trial's sample)."""
  cases: dict[Any, list[dict]] = {}
  for row in result.rows:
    cases.setdefault(row['adaptive'], []).append(row)
  adaptive = max(cases, key=lambda one: _strength(kind.score, cases[one]))
  rows = cases[adaptive]
  case = rows[0]['attack'], rows[0]['defense'], *filter(None, [adaptive])
  found, truth = (kind.cast(np.asarray(side)[:, 0]) for side in (result.reconstructions[case], result.truth))
  whole, bound = [row['verdict'] != 'diverged' for row in rows], kind.controls[0]
  scores = np.full(len(rows), np.nan)
  if any(whole):
    scores[whole] = kind.nearness(found[whole], truth[whole])
  return [
    {
      'setting': name,
      'trial': row['trial'],
      kind.score: None if np.isnan(value) else float(value),
      'recovered': row['success'],
      'by': adaptive,
      bound: row[bound],
      'verdict': row['verdict'],
      f'upload_{kind.score}': row[kind.score],
    }
    for row, value in zip(rows, scores, strict=True)
  ], found[0]


def _strength(score: str, rows: Sequence[dict]) -> tuple[int, float]:
  """Returns what orders attackers: uploads recovered, then the mean score."""
  finite = [row[score] for row in rows if row[score] is not None]
  return sum(row['success'] for row in rows), float(np.mean(finite)) if finite else -math.inf
