r"""Runs AutoLeak, the fixed ensemble of attacks, against defenses, and writes a page with the worst that it sees.

    python launch/autoleak.py --defenses='gaussian(stddev=0.05);soteria(rate=0.6)' --workdir=results/autoleak
    python launch/autoleak.py --dataset=mnist --data_dir=data --trials=400 --defenses=outpost --workdir=results/outpost

There is nothing to choose but what is audited. A run that was stopped goes on where it stopped when the same command is
given again.
"""

import json
import os

import gradleak as gl
from gradleak import registry
from gradleak.core.storage import write_atomically
from gradleak.report import autoleak_table, write
from gradleak.studies.autoleak.entry import SETTINGS
from launch import _audited, _cluster, _program

_GIVEN = _audited.define(
  'model',
  'seed',
  attacker=False,
  defenses='gaussian(stddev=0.05);prune(rate=0.9);fragmentation(ratio=0.4);soteria(rate=0.6);graddefense(stddev=0.1);'
  'outpost',
  workdir='results/autoleak',
  rounds_before=1,
)
with _program.group('run'):
  _GIVEN.boolean('staged', True, 'Whether later stages leave out what is exact already.')
  _GIVEN.boolean('malicious', True, 'Whether servers that change the model run, too; counted apart.')
_cluster.define(_GIVEN)


def main(_):
  """Runs the ensemble and prints the worst-case rates."""
  _GIVEN.configure()
  if _cluster.shared(_GIVEN, 'autoleak', _GIVEN.trials, _GIVEN.workdir, stages=True):
    return None
  registry.defenses(_GIVEN.defenses)  # an error comes before data are read
  dataset, public = _audited.load(_GIVEN)
  defenses = registry.defenses(_GIVEN.defenses)
  model = _GIVEN.network(_GIVEN.outputs(dataset), dataset.samples.shape[1:])
  key, scenario = _audited.scenario(_GIVEN, model, _GIVEN.seed, dataset, public)
  workdir = _GIVEN.workdir
  found = gl.autoleak(
    key,
    _audited.trained(_GIVEN.seed, scenario),
    defenses,
    _GIVEN.trials,
    batch_size=_GIVEN.batch_size,
    staged=_GIVEN.staged,
    malicious=_GIVEN.malicious,
    workdir=workdir,
    execution=_cluster.execution(_GIVEN),
    progress=_GIVEN.progress,
  )
  if found is None:
    print(f'process {_GIVEN.process} of {_GIVEN.processes} waits for shares of others: give the same command again.')
    return _cluster.UNFINISHED
  print(autoleak_table(found))
  if workdir is not None:
    write(found, workdir)
    write_atomically(os.path.join(workdir, 'command.json'), json.dumps(_command(scenario), indent=2))
    print(f'report: {os.path.join(workdir, "report.html")}')
  return 0


def _command(scenario):
  """Returns the flags that repeat this run; what was left out for want of public samples is left out again."""
  known = {name: getattr(_GIVEN, name) for name in SETTINGS}
  known['rounds_before'] = scenario.settings.get('rounds_before', 0)
  known['init'] = scenario.settings.get('init')  # none with the weights of a file
  known['public'] = 0 if scenario.public is None else len(scenario.public[0])
  if known['torch_model']:  # has neither, and is refused beside them
    known |= {'model': None, 'init': None}
  return {name: value for name, value in known.items() if value is not None}


if __name__ == '__main__':
  _program.run(main)
