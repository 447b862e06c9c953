r"""Audits what one client update leaks: attacks it with and without defenses, and writes a report.

    python launch/audit.py --workdir=results/faces
    python launch/audit.py --dataset=cifar10 --data_dir=data --model='convnet(width=8)' --trials=16 \
      --attacks='csdlg(tv=1e-4);dlg' --defenses='none;prune(rate=0.9)+laplace(scale=0.001)' --steps=4000

The first runs on the embedded faces in two to three minutes on two cores. A run that was stopped goes on from its last
checkpoint when the same command is given again.
"""

import os

import jax
from absl import flags

from launch import _audited, _program

_GIVEN = _audited.define(
  defenses='none;gaussian(stddev=0.05);prune(rate=0.9);fragmentation(ratio=0.4);soteria(rate=0.6);'
  'graddefense(stddev=0.1);outpost',
  workdir='results/audit',
  rounds_before=1,
)
with _program.group('what is audited'):
  _MODEL = flags.DEFINE_string(
    'model',
    'lenet',
    'mlp, cnn, lenet, lenet4, convnet, convnet9, resnet18, resnet20, resnet34, resnet50, resnet56, resnet101, '
    "resnet152, vgg11, vgg16, vit_tiny, vit_small; settings as in 'convnet(width=8)'.",
  )
with _program.group('run'):
  _SEED = flags.DEFINE_integer('seed', 0, 'Seed of weights, noise and starts.')
  _DISTRIBUTED = flags.DEFINE_string(
    'distributed',
    None,
    'host:port of the first of several processes, or auto on a cluster: their devices share the images of each upload, '
    'for a batch too large for one host. All are started with the same flags but --process.',
  )
  _PROCESS = flags.DEFINE_integer('process', None, 'distributed: rank of this process.')
  _PROCESSES = flags.DEFINE_integer('processes', None, 'distributed: number of processes.')


def main(argv):
  """Runs the audit that the flags describe and prints its table."""
  del argv
  _program.configure(_GIVEN.compilation_cache, _GIVEN.x64)
  _distribute()

  import gradleak as gl
  from gradleak import registry
  from gradleak.audit import plan
  from gradleak.core import errors
  from gradleak.report import terminal_table, write

  attacks, defenses = registry.attacks(_GIVEN.attacks.value), registry.defenses(_GIVEN.defenses.value)
  errors.check_number('seed', _SEED.value, low=0, high=2**32 - 1, integer=True)
  dataset, public = _audited.load(_GIVEN)
  model = gl.models.create(_MODEL.value, dataset.num_classes, init=_GIVEN.init.value)
  key, scenario = _audited.scenario(_GIVEN, model, _SEED.value, dataset, public)
  workdir, settings = _GIVEN.workdir.value, _audited.settings(_GIVEN)
  if _GIVEN.rounds_before.value:  # an error comes before the training
    plan(key, scenario, defenses, attacks, _GIVEN.trials.value, settings)
  result = gl.audit(
    key,
    _audited.trained(_SEED.value, scenario),
    defenses,
    attacks,
    _GIVEN.trials.value,
    workdir=workdir,
    split=_DISTRIBUTED.value is not None,
    progress='none' if jax.process_index() else _GIVEN.progress.value,
    settings=settings,
    group_size=_GIVEN.group_size.value,
  )
  if jax.process_index():
    return
  report = os.path.join(workdir, 'report.html')
  if result.resumed and os.path.exists(report):
    print(f'{workdir} is complete already: nothing to do.')
  else:
    write(result, workdir)
  print(terminal_table(result))
  print(f'\nreport: {report}')


def _distribute():
  """Makes this process one of several, if the flags say so."""
  from gradleak.core import errors

  if _DISTRIBUTED.value is None:
    if _PROCESS.value is not None or _PROCESSES.value is not None:
      raise errors.UsageError(
        '--process and --processes belong to --distributed; launch/sweep.py shares trials among processes'
      )
    return
  jax.config.update('jax_cpu_collectives_implementation', 'gloo')
  if _DISTRIBUTED.value == 'auto':
    jax.distributed.initialize()
    return
  if _PROCESS.value is None or _PROCESSES.value is None:
    raise errors.UsageError('--distributed=host:port needs --process and --processes')
  errors.check_number('processes', _PROCESSES.value, low=1, integer=True)
  errors.check_number('process', _PROCESS.value, low=0, high=_PROCESSES.value - 1, integer=True)
  jax.distributed.initialize(_DISTRIBUTED.value, _PROCESSES.value, _PROCESS.value)


if __name__ == '__main__':
  _program.run(main)
