r"""Attacks an update that you captured: what it gives away, how well that matches it, and the same attack on noise.

    python launch/attack.py --update=update.npz --weights=weights.npz --model=lenet --sample_shape=32,32,3
    python launch/attack.py --sent=sent.npz --returned=returned.npz --truth=truth.npz --model=lenet …
    python launch/attack.py --update=update.npz --weights=weights.npz --dataset=table:known.csv --model='mlp(widths=64)'

Without --dataset samples are images. A table or texts of the same kind say what the columns or the tokens are; the
private ones need not be among them. Files are of numpy.savez, safetensors or torch.save, with named tensors or a list
of them. An update is given as it is, or as the weights that the client was sent and those that it returned. The private
samples are not needed, and nothing is called recovered without them. With --truth, which no attack sees, there are
verdicts. A run that was stopped goes on from its last checkpoint when the same command is given again.
"""

import os

import jax
from absl import flags

import gradleak as gl
from gradleak import registry, report
from gradleak.core import errors
from gradleak.data import text
from gradleak.models import torch_weights
from gradleak.studies import captured
from launch import _program
from launch._flags import NETWORK, OPTIONS, Flags

_READ = tuple(name for name in OPTIONS if name != 'limit')
_GIVEN = Flags()
with _program.group('what was captured'):
  _GIVEN.string('update', None, 'File with the update: .npz, .safetensors or of torch.save.')
  _GIVEN.string('returned', None, 'In place of --update: file with the weights that the client returned.')
  _GIVEN.shared('weights', *NETWORK, weights=(None, 'File with the weights that the client was sent, likewise.'))
  _GIVEN.string('sent', None, 'The same as --weights.')
  _GIVEN.string(
    'truth',
    None,
    "File of numpy.savez with the private 'samples' and 'targets', and a 'gallery', for verdicts; of rows or texts, as "
    '--dataset has them, also a file .csv, .tsv or .txt.',
  )
  _GIVEN.shared(
    'dataset',
    'split',
    *_READ,
    dataset=('', 'Rows, texts or images of the same kind, as in launch/audit.py, public ones for instance.'),
    split=('test', 'Split of --dataset that is read.'),
  )
  _GIVEN.string(
    'sample_shape', None, 'Of private samples, of images height,width,channels; else that of the samples of --dataset.'
  )
  _GIVEN.integer('num_classes', None, 'Number of logits; by default the only one that fits the weights.')
  _GIVEN.string('names', '', "Modules in the files as in the model: 'fc1=Dense_0;fc2=Dense_1'.")
  _GIVEN.string(
    'flattened',
    'channels_first',
    'How a network with names of PyTorch flattens an image: channels_first, as PyTorch has it, or channels_last.',
  )
  _GIVEN.boolean('partial', False, 'Tensors that the update lacks are zeros: they were dropped.')
with _program.group('client'):
  _GIVEN.settings(gl.ClientSettings)
  _GIVEN.string('defense', 'none', "What the client is known to use, such as 'clip(norm=1)+gaussian(stddev=0.01)'.")
with _program.group('attacker'):
  published = 'As in launch/audit.py; by default closed forms where they read the network, and a search.'
  _GIVEN.shared('attacks', attacks=('', published))
  _GIVEN.string(
    'labels', '', "Of the private samples: '3;5', inferred, optimised, or a label rule; as published by default."
  )
  _GIVEN.settings(gl.CapturedSettings, without=('modality', 'sample_shape', 'labels', 'defense'))
with _program.group('run'):
  _GIVEN.shared('seed', 'workdir', 'progress', 'x64', 'compilation_cache', workdir='results/attack')


def main(_):
  """Attacks the update that the flags describe and prints its table."""
  _GIVEN.configure()
  defense = registry.defense(_GIVEN.defense)
  attacks = registry.attacks(_GIVEN.attacks) if _GIVEN.attacks else None
  labels = _labels(_GIVEN.labels)
  returned, weights = _one_of('update', 'returned'), _one_of('weights', 'sent')
  kind, shape, outputs, dataset = _samples()
  _program.say(f'reading {returned} …')
  model, variables = _model(weights, shape, outputs)
  truth = _truth(kind, shape, dataset) if _GIVEN.truth else None
  update = gl.read_update(
    returned,
    model,
    variables,
    sent=weights if _GIVEN.returned else None,
    sample_shape=shape,
    names=_names(_GIVEN.names),
    partial=_GIVEN.partial,
    flattened=_GIVEN.flattened,
  )
  number = {} if truth is None or _GIVEN.present('num_samples') else {'num_samples': len(truth[0])}
  found = gl.attack(
    jax.random.key(_GIVEN.seed),
    model,
    variables,
    update,
    attacks=attacks,
    client=_client(),
    truth=truth,
    given=_GIVEN.made(gl.CapturedSettings, modality=kind, sample_shape=shape, labels=labels, defense=defense, **number),
    workdir=_GIVEN.workdir,
    progress=_GIVEN.progress,
  )
  report.write(found, _GIVEN.workdir)
  print(report.captured_table(found))
  print(f'\nreport: {os.path.join(_GIVEN.workdir, "report.html")}')


def _one_of(usual, other):
  """Returns the file that one of two flags names."""
  given = [name for name in (usual, other) if getattr(_GIVEN, name)]
  if len(given) == 2:
    raise errors.UsageError(f'--{usual} and --{other} are both given: one of them says it')
  if not given:
    raise errors.UsageError(f'--{usual} is missing. {flags.FLAGS[usual].help} Or give --{other}.')
  return getattr(_GIVEN, given[0])


def _client():
  """Returns the `ClientSettings`; weights that were returned are those of a client that shares its delta."""
  made = _GIVEN.client()
  if not _GIVEN.returned or made.share == 'delta':
    return made
  if _GIVEN.present('share'):
    raise errors.UsageError('--returned are weights, and less those sent they are a delta: leave out --share=gradient')
  return _GIVEN.made(gl.ClientSettings, share='delta')


def _samples():
  """Returns (modality, shape of a sample, number of outputs or None, --dataset or None)."""
  if not _GIVEN.dataset:
    _GIVEN.refuse_beside('--dataset, which is missing', 'split', *_READ)
    if not _GIVEN.sample_shape:
      raise errors.UsageError(f'--sample_shape is missing. {flags.FLAGS["sample_shape"].help}')
    return gl.modalities.IMAGES, _shape(_GIVEN.sample_shape), None, None
  if _GIVEN.sample_shape:
    raise errors.UsageError('--sample_shape is that of the samples of --dataset: give one of them')
  dataset = _GIVEN.read(_GIVEN.split)
  _GIVEN.fit(dataset)
  return gl.modalities.of_config(dataset.settings), dataset.samples.shape[1:], _GIVEN.outputs(dataset), dataset


def _truth(kind, shape, dataset):
  """Returns the private samples and targets of --truth, and a gallery or None."""
  if not _GIVEN.truth.lower().endswith(text.SUFFIXES):
    return captured.read_truth(_GIVEN.truth, shape, kind)
  if dataset is None:
    raise errors.UsageError(f'--truth is {_GIVEN.truth}, and --dataset says how its rows or texts are encoded: give it')
  found = gl.data.read_like(_GIVEN.truth, dataset, _GIVEN.options()['schema'])
  for note in found.notes:
    _program.say(note)
  return found.samples, found.targets, None


def _shape(text):
  """Returns (height, width, channels) of 'height,width,channels'."""
  parts = [part.strip() for part in text.replace('x', ',').split(',')]
  if len(parts) != 3 or not all(part.isdecimal() and int(part) for part in parts):
    raise errors.UsageError(f'--sample_shape={text}, expected height,width,channels as in 32,32,3')
  return tuple(map(int, parts))


def _names(text):
  """Returns {module in the file: module of the model} of 'one=other;…'."""
  pairs = [entry.split('=') for entry in text.split(';') if entry.strip()]
  if not all(len(pair) == 2 and all(part.strip() for part in pair) for pair in pairs):
    raise errors.UsageError(f'--names={text}, expected module=module;…, as in fc1=Dense_0;fc2=Dense_1')
  return {theirs.strip(): ours.strip() for theirs, ours in pairs}


def _labels(text):
  """Returns a list of integers, a word, or None."""
  parts = [part.strip() for part in text.replace(',', ';').split(';') if part.strip()]
  if parts and all(part.isdecimal() for part in parts):
    return [int(part) for part in parts]
  return text or None


def _model(weights, shape, outputs):
  """Returns (model, variables) of a file; the number of classes is the only one that fits, unless it is known."""
  names = _names(_GIVEN.names)
  if _GIVEN.torch_model:  # its weights have their layout, and one number of classes
    _GIVEN.refuse_beside('the networks of --model, and not for --torch_model', 'num_classes', 'flattened')

  def made(number):
    model = _GIVEN.network(number, shape)
    return model, gl.read_weights(weights, model, shape, names=names, flattened=_GIVEN.flattened)

  number = outputs if _GIVEN.num_classes is None else _GIVEN.num_classes
  if number is not None or _GIVEN.torch_model:
    return made(number)
  entries = torch_weights.read(weights)
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
