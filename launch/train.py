r"""Trains a model by federated learning under each of several defenses: what hiding costs, beside what it hides.

    python launch/train.py --dataset=digits --clients=20 --per_round=5 --rounds=40 --workdir=results/train
    python launch/train.py --dataset=mnist --data_dir=data --partition='classes(number=5)' --defenses='topk(ratio=0.1)'
    python launch/train.py --clients=20 --rounds=60 --attacks='csdlg(tv=1e-6)' --workdir=results/frontier \
      --defenses='none;gaussian(stddev=1e-3|1e-2|1e-1);topk(ratio=0.1)'

The model starts from weights that are drawn, or from those of a file (--weights). Clients train at home, by FedAvg
(--share=delta) or FedSGD (--share=gradient), and the server averages. The file rounds.jsonl holds
accuracy, loss, exact bytes and ε of each round. With --attacks, the upload of a client of one sample is attacked under
the same defenses. The attacks run before the first round and after each --attack_every rounds. The frontier sets
accuracy against the result of the strongest attacker. The page training.html shows it all. A run that was stopped goes
on when the same command is given again.
"""

import dataclasses
import os

import jax
from absl import flags

import gradleak as gl
from gradleak import registry, report
from gradleak.core import errors
from gradleak.data import partition
from gradleak.engine import progress
from launch import _data, _program, _settings, _weights

with _program.group('what is trained'):
  _DATASET = flags.DEFINE_string('dataset', 'digits', 'As in launch/audit.py; trained on train, measured on test.')
  _DATA_DIR = flags.DEFINE_string('data_dir', None, 'Folder with prepared TFDS datasets (launch/prepare_data.py).')
  _LIMIT = flags.DEFINE_integer('limit', None, 'Take the first samples alone, of each split.')
  _LARGEST = _data.define_largest()
  _MODEL = flags.DEFINE_string('model', 'lenet', 'As in launch/audit.py.')
  _START = _weights.define()
  _PUBLIC = flags.DEFINE_integer('public', 100, 'The last training images are public, for defenses that need any.')
  _PARTITION = flags.DEFINE_string(
    'partition', 'iid', 'iid, iid(samples=600), classes(number=2,low=1,high=20), dirichlet(alpha=0.5).'
  )
  _CLIENTS = flags.DEFINE_integer('clients', 100, 'Number of clients.')
  _PROTOCOL = flags.DEFINE_string(
    'protocol',
    None,
    'ffl, graddefense, graddefense_cifar10, outpost: partition, clients and training as in that paper; flags prevail.',
  )
with _program.group('client'):
  _LOCAL = _settings.define(gl.ClientSettings, share='delta', local_batch_size=10)
with _program.group('training, server and attacks'):
  _GIVEN = _settings.define(gl.FrontierSettings)
  _DEFENSES = flags.DEFINE_string('defenses', 'none', "As in launch/audit.py: ';' lists, '+' chains, '|' spans a grid.")
  _ATTACKS = flags.DEFINE_string('attacks', '', 'As in launch/audit.py; none by default.')
with _program.group('run'):
  _SEED = flags.DEFINE_integer('seed', 0, 'Seed of weights, partition, draws and noise.')
  _GROUP = flags.DEFINE_integer('group_size', None, 'Clients that share one pass; changes speed, and bits.')
  _WORKDIR = flags.DEFINE_string('workdir', 'results/train', 'Folder for rows, timing and checkpoints.')
  _CACHE = _program.define_cache()
  _PROGRESS = flags.DEFINE_string('progress', 'auto', 'auto, bar, lines or none.')

_LOCAL_ONLY = ('local_epochs', 'local_batch_size', 'momentum', 'weight_decay')  # of clients that share their delta


def main(argv):
  """Trains as the flags describe and prints where it ended."""
  del argv
  _program.configure(_CACHE)
  _follow_protocol()
  settings, local = _settings.made(gl.FrontierSettings, _GIVEN), _client()
  defenses = registry.defenses(_DEFENSES.value)
  attacks = registry.attacks(_ATTACKS.value) if _ATTACKS.value else []
  errors.check_number('seed', _SEED.value, low=0, high=2**32 - 1, integer=True)
  progress.rounds(_PROGRESS.value, settings.rounds)  # an unknown mode says so before anything is read
  _program.say(f'reading {_DATASET.value} …')
  options = {'data_dir': _DATA_DIR.value, 'limit': _LIMIT.value, 'largest_pixel': _LARGEST.value}
  samples, test = (_data.load(_DATASET.value, split, **options) for split in ('train', 'test'))
  errors.check_number('public', _PUBLIC.value, low=0, high=len(samples.images) - 1, integer=True)
  kept = len(samples.images) - _PUBLIC.value
  train = samples.images[:kept], samples.labels[:kept]
  model = gl.models.create(_MODEL.value, samples.num_classes, init=_START.init.value)
  keys, shape = jax.random.split(jax.random.key(_SEED.value), 3), samples.images.shape[1:]
  variables = _weights.read(_START, model, shape, (test.images, test.labels), 'test')
  if variables is None:
    variables = jax.jit(model.init, static_argnums=1)(keys[0], shape)
  found = gl.frontier(
    keys[2],
    model,
    train,
    (test.images, test.labels),
    defenses,
    attacks,
    clients=partition.parse(_PARTITION.value, keys[1], train[1], _CLIENTS.value),
    variables=variables,
    client=local,
    public=(samples.images[kept:], samples.labels[kept:]) if _PUBLIC.value else None,
    gallery=gl.data.gallery(_DATASET.value, 'train', data_dir=_DATA_DIR.value) if attacks else None,
    settings=settings,
    config={
      'dataset': samples.name,
      **_weights.described(_START),
      'partition': _PARTITION.value,
      'seed': _SEED.value,
      'class_names': list(samples.class_names),
    },
    workdir=_WORKDIR.value,
    group_size=_GROUP.value,
    progress=_PROGRESS.value,
    on_audit=report.write,
  )
  report.write(found, _WORKDIR.value)
  print(report.frontier_table(report.entries(found.trained, found.rows, found.config['num_classes']), found.config))
  print(f'report: {os.path.join(_WORKDIR.value, "training.html")}')


def _follow_protocol():
  """Sets the flags that were not given as a paper's protocol has them."""
  if _PROTOCOL.value is None:
    return
  from experiments import utility

  if _PROTOCOL.value not in utility.PROTOCOLS:
    raise errors.unknown('protocol', _PROTOCOL.value, utility.PROTOCOLS)
  for name, value in dataclasses.asdict(utility.PROTOCOLS[_PROTOCOL.value]).items():
    if not flags.FLAGS[name].present:
      flags.FLAGS[name].value = value


def _client():
  """Returns the `ClientSettings` of the flags; of FedSGD clients without the defaults of local training."""
  if _LOCAL['share'].value != 'gradient':
    return _settings.made(gl.ClientSettings, _LOCAL)
  defaults = gl.ClientSettings()
  unset = {name: getattr(defaults, name) for name in _LOCAL_ONLY if not _LOCAL[name].present}
  return _settings.made(gl.ClientSettings, _LOCAL, **unset)


if __name__ == '__main__':
  _program.run(main)
