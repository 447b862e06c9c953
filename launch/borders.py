r"""Draws what lies just above and just below the border of each verdict, from real attacks.

    python launch/borders.py --output=results/borders_faces.png
    python launch/borders.py --dataset=cifar10 --data_dir=data --output=results/borders_cifar10.png

Uploads bear Gaussian noise of many strengths, so that reconstructions of every quality arise.
"""

import pathlib

from launch import _program
from launch._flags import IMAGE_OPTIONS, Flags

_GIVEN = Flags()
with _program.group('what is attacked'):
  _GIVEN.shared('dataset', *IMAGE_OPTIONS, 'trials', trials=(32, 'Private images.'))
with _program.group('how much'):
  _GIVEN.integer('strengths', 12, 'Strengths of noise, from 1e-3 to 0.3.')
  _GIVEN.integer('steps', 300, 'Steps of the attack, dga(start=uniform).')
with _program.group('run'):
  _GIVEN.string('output', 'results/borders.png', 'The file.')
  _GIVEN.shared('progress', 'compilation_cache')


def main(_):
  """Runs the attacks and draws the picture."""
  _GIVEN.configure()

  import jax
  import numpy as np

  import gradleak as gl
  from gradleak import report
  from gradleak.core import errors, storage

  for name in ('trials', 'strengths', 'steps'):
    errors.check_number(name, getattr(_GIVEN, name), low=1, high=10**6, integer=True)
  data = _GIVEN.read('test', limit=_GIVEN.trials)
  _GIVEN.images_alone(data)
  gallery = gl.data.gallery(_GIVEN.dataset, 'test', **_GIVEN.options())
  key = jax.random.key(0)
  model = gl.models.create('lenet', data.num_classes, init='explicit')
  scenario = gl.scenario(model, data.samples, data.targets, key=key, dataset=data.name, gallery=gallery)
  if gallery.by_class and len(np.unique(data.targets)) > 1:
    raise errors.UsageError(f'{_GIVEN.trials} images are of several kinds, each with a border of its own: take fewer')
  strengths = np.geomspace(1e-3, 0.3, _GIVEN.strengths)
  result = gl.audit(
    jax.random.key(1),
    scenario,
    [None, *(gl.defenses.gaussian(stddev=float(f'{stddev:.3g}')) for stddev in strengths)],
    [gl.attacks.dga(start='uniform', steps=_GIVEN.steps)],
    _GIVEN.trials,
    knowledge='non-adaptive',
    labels='known',
    controls=32,
    progress=_GIVEN.progress,
  )
  threshold = gl.metrics.gallery(scenario.gallery.samples, data.samples).threshold
  output = pathlib.Path(_GIVEN.output)
  storage.made_folder(output.parent)
  storage.write_atomically(output, report.border_picture(result, threshold))
  print(
    f'{output}: {len(result.rows)} reconstructions, {result.rows[0]["candidates"]} candidates, '
    f'SSIM threshold {threshold:.2f}'
  )


if __name__ == '__main__':
  _program.run(main)
