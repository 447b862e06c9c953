"""A made-up run of AutoLeak: 4 digits, three defenses, verdicts as given."""

import dataclasses

from gradleak.audit.verdict import RECOVERED
from gradleak.studies.autoleak import VERSION, AutoLeak
from gradleak.studies.autoleak.entry import FINGERPRINTS
from gradleak.studies.autoleak.rankings import Ranked
from tests.report.conftest import ATTACKS, digits, make

# Defense -> verdicts on its trials by honest-but-curious servers.
VERDICTS = {
  'none': ['exact', 'exact', 'exact', 'exact'],
  'prune(rate=0.9)': ['exact', 'recognisable', 'above chance', 'inconclusive'],
  'laplace(scale=0.1)': ['nothing seen', 'nothing seen', 'nothing seen', 'nothing seen'],
}
COMMAND = {'dataset': 'digits', 'model': 'lenet', 'seed': 0, 'trials': 4, 'staged': True, 'defenses': 'all; of; them'}


def rank(defense, named, alarms=(), rounds=1):
  """Returns what a ranking found under a defense: the trials of `named`, and `alarms` of two control runs."""
  return Ranked(
    stage='likelihood', defense=defense, model='exact', rounds=rounds, candidates=99, named=list(named), trials=4,
    alarms=list(alarms), controls=2,
  )  # fmt: skip


def found(verdicts=None, malicious=True, bounds=None, flags=None, named=None, **config):
  """Returns an `AutoLeak`; `config` replaces settings, and `named` has the trials that rankings re-identify."""
  verdicts = verdicts or VERDICTS
  trials = len(next(iter(verdicts.values())))
  stages = {'matching': True, **({'malicious server': False} if malicious else {})}
  audits = {stage: make(digits(trials), ATTACKS[:1], tuple(verdicts), (), controls=2) for stage in stages}
  for stage, audit in audits.items():
    for row in audit.rows:
      row['verdict'] = verdicts[row['defense']][row['trial']] if stages[stage] else 'above chance'
      row['success'] = row['verdict'] in RECOVERED
  marks = {stage: {'stage': stage, 'honest': honest} for stage, honest in stages.items()}
  first = audits['matching']
  settings = {name: first.config[name] for name in ('dataset', 'split', 'model', 'init', 'batch_size', 'seed', 'share')}
  return AutoLeak(
    config={
      **settings,
      'trials': trials,
      'version': VERSION,
      'staged': True,
      'defenses': list(verdicts),
      'key': [1, 2],
      **{f'{part}_fingerprint': part for part in FINGERPRINTS},
      **config,
    },
    rows=[{**row, **marks[stage]} for stage, audit in audits.items() for row in audit.rows],
    controls=[{**row, **marks[stage]} for stage, audit in audits.items() for row in audit.controls],
    stages=[
      {'stage': stage, 'honest': honest, 'attacks': ['x'], 'left_out': {}, 'skipped': {}, 'seconds': 1.25}
      for stage, honest in stages.items()
    ],
    ranked=[rank(defense, named) for defense, named in (named or {}).items()],
    baselines=[
      {'baseline': 'grey image', 'score': 7.3, 'likeness': 0.0, 'exact': 0, 'recognisable': 0, 'named': 1}
      | {'trials': trials}
    ],
    flags={defense: (flags or {}).get(defense, []) for defense in verdicts},
    bounds=bounds or {},
    audits=audits,
    defenses=first.methods['defenses'],
    seconds=83.2,
  )


def changed(run, defense, **columns):
  """Returns a run whose first row of a defense has other values."""
  rows = [dict(row) for row in run.rows]
  next(row for row in rows if row['defense'] == defense).update(columns)
  return dataclasses.replace(run, rows=rows)
