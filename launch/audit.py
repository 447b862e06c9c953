"""Audits what one client update leaks: attacks it with and without defenses, and writes a report.

    python launch/audit.py --workdir=results/faces
    python launch/audit.py --dataset=cifar10 --data_dir=data --model='convnet(width=8)' --trials=16 \
      --attacks='csdlg(tv=1e-4);dlg' --defenses='none;prune(rate=0.9)+laplace(scale=0.001)' --steps=4000

The first runs on the embedded faces in about a minute on two cores. A run that was stopped goes on from its last
checkpoint when the same command is given again.
"""

import os

import jax
from absl import flags

from launch import _program

_DATASET = flags.DEFINE_string(
  'dataset', 'faces', 'faces, digits, folder:PATH (split/label/*.png|jpg), or a TFDS name.'
)
_SPLIT = flags.DEFINE_string('split', 'test', 'Split that the private samples come from; the first ones are taken.')
_DATA_DIR = flags.DEFINE_string('data_dir', None, 'Folder with prepared TFDS datasets (launch/prepare_data.py).')
_IMAGE_SIZE = flags.DEFINE_integer('image_size', None, 'Resize images to this many pixels on a side.')
_CHANNELS = flags.DEFINE_integer('channels', None, '1: convert to grey, 3: to RGB.')
_MODEL = flags.DEFINE_string('model', 'lenet', "mlp, cnn, lenet, lenet4, convnet; settings as in 'convnet(width=8)'.")
_INIT = flags.DEFINE_string(
  'init', 'explicit', 'explicit: U(-0.5, 0.5), as in DLG; default: U(±1/√fan_in), as PyTorch.'
)
_LOSS = flags.DEFINE_string('loss', 'cross_entropy', 'cross_entropy or squared_error.')
_BATCH_NORM = flags.DEFINE_string(
  'batch_norm', 'train', 'train: batch statistics; eval: running ones, as older attacks assumed.'
)
_SHARE = flags.DEFINE_string(
  'share', 'gradient', 'gradient: one step (FedSGD); delta: weights after local training (FedAvg).'
)
_LOCAL_EPOCHS = flags.DEFINE_integer('local_epochs', 1, 'Local epochs of a client that shares its delta.')
_LOCAL_BATCH = flags.DEFINE_integer('local_batch_size', None, 'Batch size of local training; all samples by default.')
_RATE = flags.DEFINE_float('learning_rate', 0.1, 'Learning rate of local training.')
_ATTACKS = flags.DEFINE_string(
  'attacks', 'csdlg(tv=1e-6)', "List separated by ';': dlg, idlg, csdlg, csdlg_lbfgs, dga, gia, gs, with settings."
)
_DEFENSES = flags.DEFINE_string(
  'defenses',
  'none;gaussian(stddev=0.05);prune(rate=0.9);fragmentation(ratio=0.4);soteria(rate=0.6);graddefense(stddev=0.1);outpost',
  "List separated by ';'; '+' composes a chain: prune(rate=0.9)+laplace(scale=0.001).",
)
_TRIALS = flags.DEFINE_integer('trials', 8, 'Uploads attacked per defense.')
_BATCH_SIZE = flags.DEFINE_integer('batch_size', 1, 'Images behind one upload.')
_RESTARTS = flags.DEFINE_integer('restarts', 1, 'Starts per trial; the least matching distance is chosen.')
_STEPS = flags.DEFINE_integer('steps', 1000, 'Steps of attacks that do not set their own; 0: as published.')
_LABELS = flags.DEFINE_string(
  'labels',
  'auto',
  'auto (as published), known, inferred, optimised, or a label rule: idlg, yin, bias_corrected, wainakh.',
)
_KNOWLEDGE = flags.DEFINE_string(
  'knowledge',
  'both',
  'unaware: attackers take what was sent for a gradient; aware: they know the defense; both: side by side.',
)
_ROUNDS = flags.DEFINE_integer(
  'rounds', 1, 'Uploads of the same samples on the same model that an aware attacker averages.'
)
_PUBLIC = flags.DEFINE_integer(
  'public', 100, 'Public images for defenses and attackers, from the split train (test for train), if it has them.'
)
_CONTROLS = flags.DEFINE_integer('controls', 64, 'Null-gradient runs per attack that define success.')
_SEED = flags.DEFINE_integer('seed', 0, 'Seed of weights, noise and starts.')
_WORKDIR = flags.DEFINE_string('workdir', 'results/audit', 'Folder for rows, pictures, the report and checkpoints.')
_PROGRESS = flags.DEFINE_string('progress', 'auto', 'auto, bar, lines or none.')
_GROUP_SIZE = flags.DEFINE_integer('group_size', None, 'Trials that share one pass; changes speed, not science.')
_CACHE = flags.DEFINE_string(
  'compilation_cache',
  os.path.join(os.path.expanduser('~'), '.cache', 'gradleak'),
  "JAX's persistent compilation cache; empty for none.",
)


def _load_public(gl):
  """Returns public (images, labels) of the other split, or None where nobody asked and there are none."""
  if not _PUBLIC.value:
    return None
  split = 'test' if _SPLIT.value.startswith('train') else 'train'
  options = {'data_dir': _DATA_DIR.value, 'image_size': _IMAGE_SIZE.value, 'channels': _CHANNELS.value}
  try:
    public = gl.data.load(_DATASET.value, split, limit=_PUBLIC.value, **options)
  except gl.UsageError:
    if _PUBLIC.present:
      raise
    return None
  return public.images, public.labels


def main(argv):
  """Runs the audit that the flags describe and prints its table."""
  del argv
  if _CACHE.value:
    jax.config.update('jax_compilation_cache_dir', _CACHE.value)
  jax.config.update('jax_num_cpu_devices', os.cpu_count() or 1)  # one XLA device per core: lanes are sharded over them

  import gradleak as gl
  from gradleak import errors, specs
  from gradleak.report import terminal_table, write

  attacks, defenses = specs.parse_list(_ATTACKS.value, 'attack'), specs.parse_list(_DEFENSES.value, 'defense')
  for name, flag, low in (('trials', _TRIALS, 1), ('batch_size', _BATCH_SIZE, 1), ('public', _PUBLIC, 0)):
    errors.check_number(name, flag.value, low=low, high=10**6, integer=True)
  errors.check_number('seed', _SEED.value, low=0, high=2**32 - 1, integer=True)
  dataset = gl.data.load(
    _DATASET.value,
    _SPLIT.value,
    data_dir=_DATA_DIR.value,
    image_size=_IMAGE_SIZE.value,
    channels=_CHANNELS.value,
    limit=_TRIALS.value * _BATCH_SIZE.value,
  )
  public = _load_public(gl)
  model = gl.models.create(_MODEL.value, dataset.num_classes, init=_INIT.value)
  key = jax.random.key(_SEED.value)
  scenario = gl.scenario(
    model,
    dataset.images,
    dataset.labels,
    key=jax.random.fold_in(key, 0),
    num_classes=dataset.num_classes,
    dataset=dataset.name,
    split=dataset.split,
    init=_INIT.value,
    seed=_SEED.value,
    loss=_LOSS.value,
    share=_SHARE.value,
    local_epochs=_LOCAL_EPOCHS.value,
    local_batch_size=_LOCAL_BATCH.value,
    learning_rate=_RATE.value,
    batch_norm=_BATCH_NORM.value,
    public=public,
  )
  result = gl.audit(
    jax.random.fold_in(key, 1),
    scenario,
    defenses,
    attacks,
    _TRIALS.value,
    batch_size=_BATCH_SIZE.value,
    restarts=_RESTARTS.value,
    steps=_STEPS.value or None,
    labels=_LABELS.value,
    controls=_CONTROLS.value,
    knowledge=_KNOWLEDGE.value,
    rounds=_ROUNDS.value,
    workdir=_WORKDIR.value,
    group_size=_GROUP_SIZE.value,
    progress=_PROGRESS.value,
  )
  report = os.path.join(_WORKDIR.value, 'report.html')
  if result.resumed and os.path.exists(report):
    print(f'{_WORKDIR.value} is complete already: nothing to do.')
  else:
    write(result, _WORKDIR.value)
  print(terminal_table(result))
  print(f'\nreport: {report}')


if __name__ == '__main__':
  _program.run(main)
