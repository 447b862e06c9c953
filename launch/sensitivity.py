r"""Shows which assumption protects: drops what published attacks assume, one by one and all at once, and attacks.

    python launch/sensitivity.py --workdir=results/sensitivity
    python launch/sensitivity.py --dataset=cifar10 --data_dir=data --model='convnet(width=8)' --trials=16 \
      --attack='csdlg_fast(tv=1e-4)' --defense='gaussian(stddev=0.01)' --batch_size=8 --local_epochs=5

The laboratory has an untrained model whose weights are drawn from U(-0.5, 0.5), known labels, and one image. It attacks
the gradient of one step, with BatchNorm in eval mode and no defense. Production is what the flags describe.
The page sensitivity.html says what protects, and what does not. A run that was stopped goes on when the
same command is given again.
"""

import os

import jax
import numpy as np
from absl import flags

import gradleak as gl
from gradleak import registry, report
from gradleak.core import errors
from launch import _data, _program, _settings

with _program.group('what is attacked'):
  _DATASET = flags.DEFINE_string('dataset', 'faces', 'As in launch/audit.py; classes take turns in the private images.')
  _SPLIT = flags.DEFINE_string('split', 'test', 'Split that the private images come from.')
  _DATA_DIR = flags.DEFINE_string('data_dir', None, 'Folder with prepared TFDS datasets (launch/prepare_data.py).')
  _SIZE = flags.DEFINE_integer('image_size', None, 'Resize images to this many pixels on a side.')
  _CHANNELS = flags.DEFINE_integer('channels', None, '1: convert to grey, 3: to RGB.')
  _LARGEST = _data.define_largest()
  _MODEL = flags.DEFINE_string('model', 'lenet', 'As in launch/audit.py.')
  _INIT = flags.DEFINE_string('init', 'default', 'Initialisation of production: default (as PyTorch) or explicit.')
  _PUBLIC = flags.DEFINE_integer('public', 100, 'Public images that train the model, of the split train; 0 for none.')
with _program.group('client in production'):
  _LOCAL = _settings.define(gl.ClientSettings, share='delta', local_epochs=2, local_batch_size=2)
  _DEFENSE = flags.DEFINE_string('defense', 'none', "One defense, as in launch/audit.py; '+' chains.")
with _program.group('attack'):
  _ATTACK = flags.DEFINE_string('attack', 'csdlg_fast(tv=1e-6)', 'One attack, as in launch/audit.py.')
  _GIVEN = _settings.define(gl.SensitivitySettings)
with _program.group('run'):
  _SEED = flags.DEFINE_integer('seed', 0, 'Seed of weights, training and noise.')
  _GROUP = flags.DEFINE_integer('group_size', None, 'Trials that share one pass; changes speed, and bits.')
  _WORKDIR = flags.DEFINE_string('workdir', 'results/sensitivity', 'Folder for audits, page and checkpoints.')
  _CACHE = _program.define_cache()
  _PROGRESS = flags.DEFINE_string('progress', 'auto', 'auto, bar, lines or none.')


def main(argv):
  """Runs what the flags describe and prints its tables."""
  del argv
  _program.configure(_CACHE)
  given, local = _settings.made(gl.SensitivitySettings, _GIVEN), _client()
  attack, defense = registry.attack(_ATTACK.value), registry.defense(_DEFENSE.value)
  errors.check_number('seed', _SEED.value, low=0, high=2**32 - 1, integer=True)
  errors.check_number('public', _PUBLIC.value, low=0, integer=True)
  _program.say(f'reading {_DATASET.value} …')
  options = {
    'data_dir': _DATA_DIR.value,
    'image_size': _SIZE.value,
    'channels': _CHANNELS.value,
    'largest_pixel': _LARGEST.value,
  }
  private = _data.load(_DATASET.value, _SPLIT.value, **options)
  order = _turns(private.labels)
  public = None
  if _PUBLIC.value:
    other = gl.data.load(_DATASET.value, 'test' if _SPLIT.value.startswith('train') else 'train', **options)
    chosen = _turns(other.labels)[: _PUBLIC.value]
    public = other.images[chosen], other.labels[chosen]
  model = gl.models.create(_MODEL.value, private.num_classes, init=_INIT.value)
  found = gl.sensitivity(
    jax.random.key(_SEED.value),
    model,
    private.images[order],
    private.labels[order],
    attack=attack,
    client=local,
    defense=defense,
    public=public,
    num_classes=private.num_classes,
    gallery=gl.data.gallery(_DATASET.value, _SPLIT.value, **options),
    settings=given,
    config={'dataset': private.name, 'split': private.split, 'init': _INIT.value, 'seed': _SEED.value},
    workdir=_WORKDIR.value,
    group_size=_GROUP.value,
    progress=_PROGRESS.value,
    on_audit=report.write,
  )
  report.write(found, _WORKDIR.value)
  print(report.sensitivity_table(found))
  print(f'\nreport: {os.path.join(_WORKDIR.value, "sensitivity.html")}')


def _turns(labels):
  """Returns the order in which the classes take turns, so that a batch is of several; within a class it stays."""
  ranks = np.zeros(len(labels), int)
  for label in np.unique(labels):
    ranks[labels == label] = np.arange((labels == label).sum())
  return np.lexsort((-labels, ranks))


def _client():
  """Returns the `ClientSettings` of the flags; of FedSGD clients without the defaults of local training."""
  if _LOCAL['share'].value != 'gradient':
    return _settings.made(gl.ClientSettings, _LOCAL)
  defaults = gl.ClientSettings()
  names = ('local_epochs', 'local_batch_size')
  return _settings.made(gl.ClientSettings, _LOCAL, **{n: getattr(defaults, n) for n in names if not _LOCAL[n].present})


if __name__ == '__main__':
  _program.run(main)
