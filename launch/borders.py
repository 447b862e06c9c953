r"""Draws what lies just above and just below the border of each verdict, from real attacks.

    python launch/borders.py --output=results/borders_faces.png
    python launch/borders.py --dataset=cifar10 --data_dir=data --output=results/borders_cifar10.png

Uploads bear Gaussian noise of many strengths, so that reconstructions of every quality arise.
"""

import pathlib

from absl import flags

from launch import _program

with _program.group('what is attacked'):
  _DATASET = flags.DEFINE_string('dataset', 'faces', 'As in launch/audit.py.')
  _DATA_DIR = flags.DEFINE_string('data_dir', None, 'Folder with prepared TFDS datasets (launch/prepare_data.py).')
  _TRIALS = flags.DEFINE_integer('trials', 32, 'Private images.')
with _program.group('how much'):
  _STRENGTHS = flags.DEFINE_integer('strengths', 12, 'Strengths of noise, from 1e-3 to 0.3.')
  _STEPS = flags.DEFINE_integer('steps', 300, 'Steps of the attack, dga(start=uniform).')
with _program.group('run'):
  _OUTPUT = flags.DEFINE_string('output', 'results/borders.png', 'The file.')
  _PROGRESS = flags.DEFINE_string('progress', 'auto', 'auto, bar, lines or none.')
  _CACHE = _program.define_cache()


def main(argv):
  """Runs the attacks and draws the picture."""
  del argv
  _program.configure(_CACHE)

  import jax
  import numpy as np

  import gradleak as gl
  from gradleak import report
  from gradleak.core import errors, storage

  for name, value in (('trials', _TRIALS.value), ('strengths', _STRENGTHS.value), ('steps', _STEPS.value)):
    errors.check_number(name, value, low=1, high=10**6, integer=True)
  data = gl.data.load(_DATASET.value, 'test', data_dir=_DATA_DIR.value, limit=_TRIALS.value)
  gallery = gl.data.gallery(_DATASET.value, 'test', data_dir=_DATA_DIR.value)
  key = jax.random.key(0)
  model = gl.models.create('lenet', data.num_classes, init='explicit')
  scenario = gl.scenario(model, data.images, data.labels, key=key, dataset=data.name, gallery=gallery)
  if gallery.by_class and len(np.unique(data.labels)) > 1:
    raise errors.UsageError(f'{_TRIALS.value} images are of several kinds, each with a border of its own: take fewer')
  strengths = np.geomspace(1e-3, 0.3, _STRENGTHS.value)
  result = gl.audit(
    jax.random.key(1),
    scenario,
    [None, *(gl.defenses.gaussian(stddev=float(f'{stddev:.3g}')) for stddev in strengths)],
    [gl.attacks.dga(start='uniform', steps=_STEPS.value)],
    _TRIALS.value,
    knowledge='unaware',
    labels='known',
    controls=32,
    progress=_PROGRESS.value,
  )
  bar = gl.metrics.gallery(scenario.gallery.images, data.images).bar
  output = pathlib.Path(_OUTPUT.value)
  storage.made_folder(output.parent)
  storage.write_atomically(output, report.border_picture(result, bar))
  print(f'{output}: {len(result.rows)} reconstructions, {result.rows[0]["candidates"]} candidates, SSIM bar {bar:.2f}')


if __name__ == '__main__':
  _program.run(main)
