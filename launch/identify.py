r"""Ranks a list of candidates by how likely each is behind an upload: re-identification without a picture.

    python launch/identify.py --defenses='none;gaussian(stddev=0.2);outpost' --workdir=results/identify
    python launch/identify.py --dataset=mnist --data_dir=data --trials=64 --candidates=1000 --copies=exact,jpeg \
      --defenses='none;prune(rate=0.9)' --workdir=results/identify_mnist

The list holds the private samples and others of the same split. A run that was stopped goes on with the defense where
it stopped when the same command is given again.
"""

import os

import gradleak as gl
from gradleak import registry, report
from launch import _audited, _program
from launch._flags import NETWORK, Flags

_GIVEN = Flags()
with _program.group('what is attacked'):
  _GIVEN.shared(
    *('dataset', 'split', *_audited.OPTIONS, 'trials', 'public'),
    *(*NETWORK, 'init', 'weights', 'seed'),
  )
  _GIVEN.integer('rounds_before', 0, 'Rounds of training on the public samples before.')
with _program.group('client'):
  _GIVEN.settings(gl.ClientSettings)
with _program.group('attacker'):
  _GIVEN.settings(gl.IdentificationSettings)
with _program.group('defenses'):
  _GIVEN.shared('defenses')
with _program.group('run'):
  _GIVEN.shared('workdir', 'progress', 'group_size', 'compilation_cache')


def main(_):
  """Ranks the candidates under each defense and prints the counts."""
  _GIVEN.configure()
  defenses = registry.defenses(_GIVEN.defenses)
  dataset, public = _audited.load(_GIVEN)
  model = _GIVEN.network(_GIVEN.outputs(dataset), dataset.samples.shape[1:])
  key, scenario = _audited.scenario(_GIVEN, model, _GIVEN.seed, dataset, public)
  found = gl.identify(
    key,
    _audited.trained(_GIVEN.seed, scenario),
    defenses,
    _GIVEN.trials,
    settings=_GIVEN.made(gl.IdentificationSettings),
    workdir=_GIVEN.workdir,
    execution=gl.Execution(_GIVEN.group_size),
    progress=_GIVEN.progress,
  )
  print(report.identification_table(found))
  if _GIVEN.workdir is not None:
    report.write(found, _GIVEN.workdir)
    print(f'report: {os.path.join(_GIVEN.workdir, "identification.html")}')


if __name__ == '__main__':
  _program.run(main)
