"""What the programs that audit share: their flags, and the scenario and settings that these describe."""

import types

import jax
from absl import flags

from launch import _program


def define(**defaults):
  """Defines the common flags and returns their holders, `.name.value` each; `defaults` replaces some defaults."""
  made = types.SimpleNamespace()

  def define_one(kind):
    def define(name, default, text):
      setattr(made, name, getattr(flags, f'DEFINE_{kind}')(name, defaults.get(name, default), text))

    return define

  string, integer, number = define_one('string'), define_one('integer'), define_one('float')
  string('dataset', 'faces', 'faces, digits, folder:PATH (split/label/*.png|jpg), or a TFDS name.')
  string('split', 'test', 'Split that the private samples come from; the first ones are taken.')
  string('data_dir', None, 'Folder with prepared TFDS datasets (launch/prepare_data.py).')
  integer('image_size', None, 'Resize images to this many pixels on a side.')
  integer('channels', None, '1: convert to grey, 3: to RGB.')
  string('init', 'explicit', 'explicit: U(-0.5, 0.5), as in DLG; default: U(±1/√fan_in), as PyTorch.')
  string('loss', 'cross_entropy', 'cross_entropy or squared_error.')
  string('batch_norm', 'train', 'train: batch statistics; eval: running ones, as older attacks assumed.')
  string('share', 'gradient', 'gradient: one step (FedSGD); delta: weights after local training (FedAvg).')
  integer('local_epochs', 1, 'Local epochs of a client that shares its delta.')
  integer('local_batch_size', None, 'Batch size of local training; all samples by default.')
  number('learning_rate', 0.1, 'Learning rate of local training.')
  string(
    'attacks',
    'csdlg(tv=1e-6)',
    "List separated by ';': dlg, idlg, csdlg, csdlg_fast, csdlg_lbfgs, dga, gia, gs, with settings; closed forms: "
    'fidel, peeling, spear; of malicious servers: imprint, trap, class_fishing.',
  )
  string(
    'defenses',
    'none',
    "List separated by ';'; '+' composes a chain: prune(rate=0.9)+laplace(scale=0.001); '|' spans a grid: "
    'gaussian(stddev=0.01|0.1).',
  )
  integer('trials', 8, 'Uploads attacked per defense.')
  integer('batch_size', 1, 'Images behind one upload.')
  integer('restarts', 1, 'Starts per trial; the least matching distance is chosen.')
  integer('steps', 1000, 'Steps of attacks that do not set their own; 0: as published.')
  string(
    'labels',
    'auto',
    'auto (as published), known, inferred, optimised, or a label rule: idlg, yin, bias_corrected, wainakh.',
  )
  string(
    'knowledge',
    'both',
    'unaware: attackers take what was sent for a gradient; aware: they know the defense; both: side by side.',
  )
  integer('rounds', 1, 'Uploads of the same samples on the same model that an aware attacker averages.')
  integer(
    'public',
    100,
    'Public images for defenses and attackers, from the split train (test for train), if it has them.',
  )
  integer('controls', 64, 'Null-gradient runs per attack that define success.')
  string('workdir', None, 'Folder for rows, pictures, the report and checkpoints.')
  string('progress', 'auto', 'auto, bar, lines or none.')
  made.x64 = flags.DEFINE_boolean('x64', False, 'float64 throughout: for closed forms alone.')
  integer('group_size', None, 'Trials that share one pass; changes speed, not science.')
  made.compilation_cache = _program.define_cache()
  return made


def load(given):
  """Returns (private samples, public (images, labels) or None): where nobody asked and there are none.

  Raises:
    UsageError: for data that are not there, or numbers out of range.
  """
  import gradleak as gl
  from gradleak import errors

  for name, low in (('trials', 1), ('batch_size', 1), ('public', 0)):
    errors.check_number(name, getattr(given, name).value, low=low, high=10**6, integer=True)
  options = {name: getattr(given, name).value for name in ('data_dir', 'image_size', 'channels')}
  dataset = gl.data.load(
    given.dataset.value, given.split.value, limit=given.trials.value * given.batch_size.value, **options
  )
  if not given.public.value:
    return dataset, None
  split = 'test' if given.split.value.startswith('train') else 'train'
  try:
    public = gl.data.load(given.dataset.value, split, limit=given.public.value, **options)
  except gl.UsageError:
    if given.public.present:
      raise
    return dataset, None
  return dataset, (public.images, public.labels)


def scenario(given, model, seed, dataset, public):
  """Returns (key of the audit, `Scenario`) of a model and a seed."""
  import gradleak as gl

  key = jax.random.key(seed)
  built = gl.scenario(
    model,
    dataset.images,
    dataset.labels,
    key=jax.random.fold_in(key, 0),
    num_classes=dataset.num_classes,
    dataset=dataset.name,
    split=dataset.split,
    init=given.init.value,
    seed=seed,
    loss=given.loss.value,
    share=given.share.value,
    local_epochs=given.local_epochs.value,
    local_batch_size=given.local_batch_size.value,
    learning_rate=given.learning_rate.value,
    batch_norm=given.batch_norm.value,
    public=public,
  )
  return jax.random.fold_in(key, 1), built


def settings(given):
  """Returns the keyword arguments of `gradleak.audit` that the flags describe."""
  names = ('batch_size', 'restarts', 'labels', 'controls', 'knowledge', 'rounds', 'group_size')
  return {**{name: getattr(given, name).value for name in names}, 'steps': given.steps.value or None}
