r"""Attacks an update that you captured: pictures, how well they match it, and the same attack on noise beside them.

    python launch/attack.py --update=update.npz --weights=weights.npz --model=lenet --image_shape=32,32,3

The update and the weights that the client was sent are files of numpy.savez, safetensors or torch.save with named
tensors. The private images are not needed, and nothing is called recovered without them. A run that was stopped goes on
from its last checkpoint when the same command is given again.
"""

import os

import jax
from absl import flags

import gradleak as gl
from launch import _program, _settings

with _program.group('what was captured'):
  _UPDATE = flags.DEFINE_string('update', None, 'File with the update: .npz, .safetensors or of torch.save.')
  _WEIGHTS = flags.DEFINE_string('weights', None, 'File with the weights that the client was sent, likewise.')
  _MODEL = flags.DEFINE_string('model', 'lenet', 'As in launch/audit.py.')
  _SHAPE = flags.DEFINE_string('image_shape', None, 'Of the private images: height,width,channels.')
  _CLASSES = flags.DEFINE_integer(
    'num_classes', None, 'Number of logits; by default the only one that fits the weights.'
  )
  _NAMES = flags.DEFINE_string('names', '', "Modules in the files as in the model: 'fc1=Dense_0;fc2=Dense_1'.")
  _FLATTENED = flags.DEFINE_string(
    'flattened',
    'channels_first',
    'How a network with names of PyTorch flattens an image: channels_first, as PyTorch has it, or channels_last.',
  )
  _PARTIAL = flags.DEFINE_boolean('partial', False, 'Tensors that the update lacks are zeros: they were withheld.')
with _program.group('client'):
  _CLIENT = _settings.define(gl.ClientSettings)
  _DEFENSE = flags.DEFINE_string(
    'defense', 'none', "What the client is known to use, such as 'clip(norm=1)+gaussian(stddev=0.01)'."
  )
with _program.group('attacker'):
  _ATTACKS = flags.DEFINE_string(
    'attacks', '', 'As in launch/audit.py; by default csdlg_fast, and those of fidel and peeling that read the network.'
  )
  _LABELS = flags.DEFINE_string(
    'labels', '', "Of the private samples: '3;5', inferred, optimised, or a label rule; as published by default."
  )
  _GIVEN = _settings.define(gl.CapturedSettings)
with _program.group('run'):
  _SEED = flags.DEFINE_integer('seed', 0, 'Seed of starts and noise.')
  _WORKDIR = flags.DEFINE_string('workdir', 'results/attack', 'Folder for pictures, the report and checkpoints.')
  _PROGRESS = flags.DEFINE_string('progress', 'auto', 'auto, bar, lines or none.')
  _X64 = flags.DEFINE_boolean('x64', False, 'float64 throughout: for closed forms alone.')
  _CACHE = _program.define_cache()


def main(argv):
  """Attacks the update that the flags describe and prints its table."""
  del argv
  _program.configure(_CACHE, _X64)

  from gradleak import registry, report
  from gradleak.core import errors
  from gradleak.engine import progress

  errors.check_number('seed', _SEED.value, low=0, high=2**32 - 1, integer=True)
  progress.reporter(_PROGRESS.value)  # an unknown mode says so before anything is read
  defense = registry.defense(_DEFENSE.value)
  attacks = registry.attacks(_ATTACKS.value) if _ATTACKS.value else None
  labels = _labels(_LABELS.value)
  for flag in (_UPDATE, _WEIGHTS, _SHAPE):
    if not flag.value:
      raise errors.UsageError(f'--{flag.name} is missing. {flags.FLAGS[flag.name].help}')
  shape = _shape(_SHAPE.value)
  _program.say(f'reading {_UPDATE.value} …')
  model, variables = _model(shape)
  update = gl.read_update(
    _UPDATE.value,
    model,
    variables,
    image_shape=shape,
    names=_names(_NAMES.value),
    partial=_PARTIAL.value,
    flattened=_FLATTENED.value,
  )
  found = gl.attack(
    jax.random.key(_SEED.value),
    model,
    variables,
    update,
    attacks=attacks,
    image_shape=shape,
    labels=labels,
    client=_settings.made(gl.ClientSettings, _CLIENT),
    defense=defense,
    given=_settings.made(gl.CapturedSettings, _GIVEN),
    workdir=_WORKDIR.value,
    progress=_PROGRESS.value,
  )
  report.write(found, _WORKDIR.value)
  print(report.captured_table(found))
  print(f'\nreport: {os.path.join(_WORKDIR.value, "report.html")}')


def _shape(text):
  """Returns (height, width, channels) of 'height,width,channels'."""
  from gradleak.core import errors

  parts = [part.strip() for part in text.replace('x', ',').split(',')]
  if len(parts) != 3 or not all(part.isdigit() and int(part) for part in parts):
    raise errors.UsageError(f'--image_shape={text}, expected height,width,channels as in 32,32,3')
  return tuple(map(int, parts))


def _names(text):
  """Returns {module in the file: module of the model} of 'one=other;…'."""
  from gradleak.core import errors

  pairs = [entry.split('=') for entry in text.split(';') if entry.strip()]
  if not all(len(pair) == 2 and all(part.strip() for part in pair) for pair in pairs):
    raise errors.UsageError(f'--names={text}, expected module=module;…, as in fc1=Dense_0;fc2=Dense_1')
  return {theirs.strip(): ours.strip() for theirs, ours in pairs}


def _labels(text):
  """Returns a list of integers, a word, or None."""
  parts = [part.strip() for part in text.replace(',', ';').split(';') if part.strip()]
  if parts and all(part.isdigit() for part in parts):
    return [int(part) for part in parts]
  return text or None


def _model(shape):
  """Returns (model, variables); the number of classes is the only one that fits the weights, unless it is given."""
  from gradleak.core import errors
  from gradleak.models import torch_weights

  names = _names(_NAMES.value)

  def made(number):
    model = gl.models.create(_MODEL.value, number)
    return model, gl.read_weights(_WEIGHTS.value, model, shape, names=names, flattened=_FLATTENED.value)

  if _CLASSES.value is not None:
    return made(_CLASSES.value)
  entries = torch_weights.read(_WEIGHTS.value)
  counts = sorted({values.shape[0] for values in entries.values() if values.ndim == 1})
  fitting, reason = [], None
  for number in counts:
    try:
      fitting.append(made(number))
    except errors.UsageError as error:
      if 'does not fit' not in str(error) and 'do not fit' not in str(error):
        raise
      reason = error
  if len(fitting) == 1:
    return fitting[0]
  if reason is not None and not fitting:
    raise reason
  raise errors.UsageError('the weights do not tell the number of classes: give --num_classes')


if __name__ == '__main__':
  _program.run(main)
