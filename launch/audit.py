r"""Audits what one client update leaks: attacks it with and without defenses, and writes a report.

    python launch/audit.py --workdir=results/faces
    python launch/audit.py --dataset=cifar10 --data_dir=data --model='convnet(width=8)' --trials=16 \
      --attacks='csdlg(tv=1e-4);dlg' --defenses='none;prune(rate=0.9)+laplace(scale=0.001)' --steps=4000

The first runs on the embedded faces in two to three minutes on two cores. A run that was stopped goes on from its last
checkpoint when the same command is given again.
"""

import os

import jax

import gradleak as gl
from gradleak import registry
from gradleak.audit import plan
from gradleak.core import errors
from gradleak.report import terminal_table, write
from gradleak.report.page import is_current
from launch import _audited, _cluster, _program

_GIVEN = _audited.define(
  'model',
  'seed',
  defenses='none;gaussian(stddev=0.05);prune(rate=0.9);fragmentation(ratio=0.4);soteria(rate=0.6);'
  'graddefense(stddev=0.1);outpost',
  workdir='results/audit',
  rounds_before=1,
)
with _program.group('run'):
  _GIVEN.string(
    'distributed',
    None,
    'host:port of the first of several processes, or auto on a cluster: their devices share the images of each upload, '
    'for a batch too large for one host. All are started with the same flags but --process.',
  )
_cluster.define(_GIVEN)


def main(_):
  """Runs the audit that the flags describe and prints its table."""
  _GIVEN.configure()
  if _GIVEN.distributed is None and _cluster.shared(_GIVEN, 'audit', _GIVEN.trials, _GIVEN.workdir):
    return
  _distribute()
  registry.attacks(_GIVEN.attacks), registry.defenses(_GIVEN.defenses)  # an error comes before data are read
  dataset, public = _audited.load(_GIVEN)
  defenses = registry.defenses(_GIVEN.defenses)
  model = _GIVEN.network(_GIVEN.outputs(dataset), dataset.samples.shape[1:])
  key, scenario = _audited.scenario(_GIVEN, model, _GIVEN.seed, dataset, public)
  attacks = _audited.attacks(_GIVEN, [(key, scenario)])
  workdir, settings = _GIVEN.workdir, _audited.settings(_GIVEN)
  if _GIVEN.rounds_before:  # an error comes before the training
    plan(key, scenario, defenses, attacks, _GIVEN.trials, settings)
  result = gl.audit(
    key,
    _audited.trained(_GIVEN.seed, scenario),
    defenses,
    attacks,
    _GIVEN.trials,
    workdir=workdir,
    execution=_execution(),
    progress='none' if jax.process_index() else _GIVEN.progress,
    settings=settings,
  )
  if jax.process_index():
    return
  if result is None:
    print(f'process {_GIVEN.process} of {_GIVEN.processes} has done its share; the last one writes the report.')
    return
  report = os.path.join(workdir, 'report.html')
  if result.resumed and is_current(workdir):
    print(f'{workdir} is complete already: nothing to do.')
  else:
    write(result, workdir)
  print(terminal_table(result))
  print(f'\nreport: {report}')


def _execution():
  """Returns how the work is run: with --distributed, by all devices of all processes for each upload."""
  if _GIVEN.distributed is None:
    return _cluster.execution(_GIVEN)
  return _cluster.execution(_GIVEN, process=(0, 1), split=True)


def _distribute():
  """Makes this process one of several, if the flags say so."""
  if _GIVEN.distributed is None:
    return
  if _GIVEN.cluster is not None:
    raise errors.UsageError('--cluster shares trials, and --distributed the images of each upload: give one of them')
  jax.config.update('jax_cpu_collectives_implementation', 'gloo')
  if _GIVEN.distributed == 'auto':
    jax.distributed.initialize()
    return
  if _GIVEN.process is None or _GIVEN.processes is None:
    raise errors.UsageError('--distributed=host:port needs --process and --processes')
  errors.check_number('processes', _GIVEN.processes, low=1, integer=True)
  errors.check_number('process', _GIVEN.process, low=0, high=_GIVEN.processes - 1, integer=True)
  jax.distributed.initialize(_GIVEN.distributed, _GIVEN.processes, _GIVEN.process)


if __name__ == '__main__':
  _program.run(main)
