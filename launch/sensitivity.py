r"""Shows which assumption protects: drops what published attacks assume, one by one and all at once, and attacks.

    python launch/sensitivity.py --workdir=results/sensitivity
    python launch/sensitivity.py --dataset=cifar10 --data_dir=data --model='convnet(width=8)' --trials=16 \
      --attack='csdlg_fast(tv=1e-4)' --defense='gaussian(stddev=0.01)' --batch_size=8 --local_epochs=5

The laboratory has an untrained model, known labels, and one sample. For images its weights are from U(-0.5, 0.5).
It attacks the gradient of one step, with BatchNorm in eval mode and no defense. Production is what the flags describe.
The page sensitivity.html says what protects, and what does not. A run that was stopped goes on when the
same command is given again.
"""

import os

import jax
import numpy as np

import gradleak as gl
from gradleak import registry, report
from gradleak.core import errors
from launch import _audited, _program
from launch._flags import NETWORK, Flags, check_outputs

_GIVEN = Flags()
with _program.group('what is attacked'):
  _GIVEN.shared(
    *('dataset', 'split', *_audited.OPTIONS, *NETWORK, 'init', 'public'),
    init=('default', 'Initialisation of production: default (as PyTorch) or explicit.'),
    public=(100, 'Public samples that train the model, of the split train; 0 for none.'),
  )
with _program.group('client in production'):
  _GIVEN.settings(gl.ClientSettings, share='delta', local_epochs=2, local_batch_size=2)
  _GIVEN.string('defense', 'none', "One defense, as in launch/audit.py; '+' chains.")
with _program.group('attack'):
  _GIVEN.string('attack', '', 'One attack, as in launch/audit.py; csdlg_fast by default, of images with tv=1e-6.')
  _GIVEN.settings(gl.SensitivitySettings)
with _program.group('run'):
  _GIVEN.shared('seed', 'group_size', 'workdir', 'compilation_cache', 'progress', workdir='results/sensitivity')


def main(_):
  """Runs what the flags describe and prints its tables."""
  _GIVEN.configure()
  attack = registry.attack(_GIVEN.attack) if _GIVEN.attack else None  # an error comes before data are read
  defense = registry.defense(_GIVEN.defense)
  errors.check_number('public', _GIVEN.public, low=0, integer=True)
  _program.say(f'reading {_GIVEN.dataset} …')
  private = _GIVEN.read(_GIVEN.split)
  _GIVEN.fit(private)
  order = _turns(private.targets)
  public = _public() if _GIVEN.public else None
  model = _GIVEN.network(_GIVEN.outputs(private), private.samples.shape[1:])
  key = jax.random.key(_GIVEN.seed)
  scenario = gl.scenario(
    model,
    private.samples[order],
    private.targets[order],
    key=jax.random.fold_in(key, 0),
    dataset=private.name,
    client=_GIVEN.client(),
    public=public,
    modality=gl.modalities.of_config(private.settings),
    gallery=gl.data.gallery(_GIVEN.dataset, _GIVEN.split, **_GIVEN.options()),
  )
  check_outputs(scenario, _GIVEN.outputs(private))
  found = gl.sensitivity(
    key,
    scenario.noted({'split': private.split, **_GIVEN.weights_described(), 'seed': _GIVEN.seed}),
    attack=attack,
    defense=defense,
    settings=_GIVEN.made(gl.SensitivitySettings),
    workdir=_GIVEN.workdir,
    execution=gl.Execution(_GIVEN.group_size),
    progress=_GIVEN.progress,
  )
  report.write(found, _GIVEN.workdir)
  print(report.sensitivity_table(found))
  print(f'\nreport: {os.path.join(_GIVEN.workdir, "sensitivity.html")}')


def _public():
  """Returns the public (samples, targets) of the other split; None where nobody asked and there are none."""
  other = _audited.public_split(_GIVEN)
  if other is None:
    return None
  if _GIVEN.present('public'):
    errors.check_limit(_GIVEN.public, len(other.samples), 'public samples', other.split, other.name)
  chosen = _turns(other.targets)[: _GIVEN.public]
  return other.samples[chosen], other.targets[chosen]


def _turns(labels):
  """Returns the order in which the classes take turns, so that a batch is of several; within a class it stays."""
  if labels.ndim > 1 or not np.issubdtype(labels.dtype, np.integer):  # values have no classes
    return np.arange(len(labels))
  ranks = np.zeros(len(labels), int)
  for label in np.unique(labels):
    ranks[labels == label] = np.arange((labels == label).sum())
  return np.lexsort((-labels, ranks))


if __name__ == '__main__':
  _program.run(main)
