"""Audits what one client update leaks: attacks it with and without defenses, and writes a report.

    python launch/audit.py --workdir=results/faces
    python launch/audit.py --dataset=cifar10 --data_dir=data --model='convnet(width=8)' --trials=16 \
      --attacks='csdlg(tv=1e-4);dlg' --defenses='none;prune(rate=0.9)+laplace(scale=0.001)' --steps=4000

The first runs on the embedded faces in about a minute on two cores. A run that was stopped goes on from its last
checkpoint when the same command is given again.
"""

import os

from absl import flags

from launch import _audited, _program

_GIVEN = _audited.define(
  defenses='none;gaussian(stddev=0.05);prune(rate=0.9);fragmentation(ratio=0.4);soteria(rate=0.6);'
  'graddefense(stddev=0.1);outpost',
  workdir='results/audit',
)
_MODEL = flags.DEFINE_string(
  'model', 'lenet', "mlp, cnn, lenet, lenet4, convnet, convnet9, resnet18, resnet20; settings as in 'convnet(width=8)'."
)
_SEED = flags.DEFINE_integer('seed', 0, 'Seed of weights, noise and starts.')


def main(argv):
  """Runs the audit that the flags describe and prints its table."""
  del argv
  _audited.prepare(_GIVEN)

  import gradleak as gl
  from gradleak import errors, specs
  from gradleak.report import terminal_table, write

  attacks = specs.parse_list(_GIVEN.attacks.value, 'attack')
  defenses = specs.parse_list(_GIVEN.defenses.value, 'defense')
  errors.check_number('seed', _SEED.value, low=0, high=2**32 - 1, integer=True)
  dataset, public = _audited.load(_GIVEN)
  model = gl.models.create(_MODEL.value, dataset.num_classes, init=_GIVEN.init.value)
  key, scenario = _audited.scenario(_GIVEN, model, _SEED.value, dataset, public)
  workdir = _GIVEN.workdir.value
  result = gl.audit(
    key,
    scenario,
    defenses,
    attacks,
    _GIVEN.trials.value,
    workdir=workdir,
    progress=_GIVEN.progress.value,
    **_audited.settings(_GIVEN),
  )
  report = os.path.join(workdir, 'report.html')
  if result.resumed and os.path.exists(report):
    print(f'{workdir} is complete already: nothing to do.')
  else:
    write(result, workdir)
  print(terminal_table(result))
  print(f'\nreport: {report}')


if __name__ == '__main__':
  _program.run(main)
