r"""Measures ε from below: how well uploads distinguish neighbouring data sets, beside the stated ε.

    python launch/epsilon.py --defenses='client_dp(norm=1,noise=1.2);dpsgd(norm=1,noise=1.2)' --workdir=results/epsilon
    python launch/epsilon.py --neighbours=own --samples=4 --uploads=2000 --defenses='dpsgd(norm=1,noise=1)'
    python launch/epsilon.py --dataset=breast_cancer --neighbours=own --uploads=2000

A defense whose lower bound exceeds its ε, in the same relation and at the same δ, does not keep what it states. By
default the neighbours are canaries, the worst case. A run that was stopped goes on when the same command is given
again.
"""

import jax

import gradleak as gl
from gradleak import registry, report
from gradleak.core import errors
from launch import _program
from launch._flags import NETWORK, OPTIONS, Flags

_GIVEN = Flags()
with _program.group('client and model'):
  limit = (64, 'Private samples that are read; by default 64, or all of a smaller split.')
  _GIVEN.shared('dataset', 'split', *OPTIONS, *NETWORK, 'init', 'weights', limit=limit)
  _GIVEN.settings(gl.ClientSettings)
with _program.group('defenses'):
  _GIVEN.shared('defenses', defenses='client_dp(norm=1,noise=1.2);dpsgd(norm=1,noise=1.2)')
with _program.group('measurement'):
  _GIVEN.settings(gl.EpsilonSettings)
with _program.group('run'):
  _GIVEN.shared('seed', 'workdir', 'compilation_cache', 'progress')


def main(_):
  """Runs what the flags describe and prints its table."""
  _GIVEN.configure()
  defenses = registry.defenses(_GIVEN.defenses)
  _program.say(f'reading {_GIVEN.dataset} …')
  data = _read()
  _GIVEN.fit(data, keep=('defenses',))
  key = jax.random.key(_GIVEN.seed)
  model = _GIVEN.network(_GIVEN.outputs(data), data.samples.shape[1:])
  variables = _GIVEN.variables(model, data, (data.samples, data.targets), 'private')
  scenario = gl.scenario(
    model,
    data.samples,
    data.targets,
    **({'key': jax.random.fold_in(key, 0)} if variables is None else {'variables': variables}),
    modality=gl.modalities.of_config(data.settings),
    dataset=data.name,
    client=_GIVEN.client(),
  ).noted({'split': data.split, **_GIVEN.weights_described(), 'seed': _GIVEN.seed})
  found = gl.audit_epsilon(
    jax.random.fold_in(key, 1),
    scenario,
    defenses,
    settings=_GIVEN.made(gl.EpsilonSettings),
    workdir=_GIVEN.workdir,
    progress=_GIVEN.progress,
  )
  if _GIVEN.workdir is not None:
    report.write(found, _GIVEN.workdir)
  print(report.epsilon_table(found))


def _read():
  """Returns the private samples: the first ones, or all where there are fewer and --limit is not given."""
  try:
    return _GIVEN.read(_GIVEN.split)
  except errors.SizeError:
    if _GIVEN.present('limit'):
      raise
  return _GIVEN.read(_GIVEN.split, limit=None)


if __name__ == '__main__':
  _program.run(main)
