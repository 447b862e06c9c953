r"""Trains a generator or a denoiser of images on public data: the prior of generative attacks.

    python launch/train_prior.py --workdir=results/prior-faces
    python launch/train_prior.py --dataset=mnist --data_dir=data --limit=5000 --workdir=results/prior-mnist
    python launch/train_prior.py --kind=denoiser --workdir=results/denoiser-faces
    python launch/audit.py --attacks='csdlg;gias(file=results/prior-faces/weights.npz)'

The program trains a WGAN-GP, or a denoiser, on one split. The file weights.npz holds the weights, their training
data, and a fingerprint of each training image. An audit refuses a prior that has seen its private images. The picture
samples.png shows generated images, and below each its nearest training image. For a denoiser it shows noisy images and
their denoised versions. A training that was stopped goes on when the same command is given again.
"""

import os
import sys
import time

from absl import flags

from launch import _data, _program

with _program.group('what is trained'):
  _DATASET = flags.DEFINE_string('dataset', 'faces', 'As in launch/audit.py.')
  _SPLIT = flags.DEFINE_string('split', 'train', 'The split that is public.')
  _DATA_DIR = flags.DEFINE_string('data_dir', None, 'Folder with prepared TFDS datasets (launch/prepare_data.py).')
  _LIMIT = flags.DEFINE_integer('limit', None, 'The first images alone.')
  _LARGEST = _data.define_largest()
  _LICENCE = flags.DEFINE_string('licence', '', 'Licence of the images, recorded with the weights.')
with _program.group('training'):
  _KIND = flags.DEFINE_string('kind', 'generator', 'generator: WGAN-GP; denoiser.')
  _STEPS = flags.DEFINE_integer('steps', 2000, 'Steps, a multiple of 20; the critic of a generator has five for each.')
  _WIDTH = flags.DEFINE_integer('width', 16, 'Channels at full resolution.')
  _BATCH = flags.DEFINE_integer('batch_size', 32, 'Images per step.')
  _RATE = flags.DEFINE_float('learning_rate', 2e-4, 'Of Adam.')
with _program.group('run'):
  _SEED = flags.DEFINE_integer('seed', 0, 'Seed of weights and draws.')
  _WORKDIR = flags.DEFINE_string('workdir', 'results/prior', 'Folder for weights, samples and checkpoints.')
  _CACHE = _program.define_cache()
  _PROGRESS = flags.DEFINE_string('progress', 'auto', 'auto, bar, lines or none.')


def main(argv: list[str]) -> None:
  """Trains as the flags describe, and writes the weights and the samples."""
  del argv
  _program.configure(_CACHE)

  import jax

  from gradleak.core import errors
  from gradleak.core.storage import write_atomically
  from gradleak.engine import progress
  from gradleak.priors import denoiser, gan, trained, training

  for name, flag in (('width', _WIDTH), ('batch_size', _BATCH)):
    errors.check_number(name, flag.value, low=1, high=4096, integer=True)
  errors.check_number('learning_rate', _RATE.value, low=1e-8, high=1)
  errors.check_number('seed', _SEED.value, low=0, high=2**32 - 1, integer=True)
  errors.check_choice('progress mode', _PROGRESS.value, progress.MODES)
  _program.say(f'reading {_DATASET.value} …')
  options = {'data_dir': _DATA_DIR.value, 'limit': _LIMIT.value, 'largest_pixel': _LARGEST.value}
  data = _data.load(_DATASET.value, _SPLIT.value, **options)
  shape = data.images.shape[1:]
  errors.check_choice('kind', _KIND.value, trained.KINDS)
  make = gan.training if _KIND.value == 'generator' else denoiser.training
  made = make(shape, width=_WIDTH.value, batch_size=_BATCH.value, learning_rate=_RATE.value)
  about = {
    'dataset': _DATASET.value,
    'split': _SPLIT.value,
    'steps': _STEPS.value,
    'licence': _LICENCE.value or f'that of the images of {_DATASET.value}',
  }
  config = {
    **about,
    'kind': _KIND.value,
    'limit': _LIMIT.value,
    'width': _WIDTH.value,
    'batch_size': _BATCH.value,
    'learning_rate': _RATE.value,
    'seed': _SEED.value,
    'trained_on': trained.fingerprints(data.images).sum().item(),
  }
  _program.say('compiling …')
  state = training.train(
    jax.random.key(_SEED.value),
    made,
    data.images,
    _STEPS.value,
    workdir=_WORKDIR.value,
    config=config,
    on_steps=_report(_STEPS.value, _PROGRESS.value),
  )
  weights = os.path.join(_WORKDIR.value, 'weights.npz')
  trained.save(weights, made.module, jax.device_get(state.average), data.images, **about)
  samples = os.path.join(_WORKDIR.value, 'samples.png')
  write_atomically(samples, _sheet(trained.load(weights, _KIND.value), data.images, _SEED.value))
  print(f'{len(data.images)} images of {_DATASET.value}, {_SPLIT.value}; {_STEPS.value} steps')
  print(f'weights: {weights}\nsamples: {samples}')


def _report(total, mode):
  """Returns a callback that prints about twenty lines; None for none."""
  if mode == 'none':
    return None
  times = [time.monotonic()]

  def on_steps(done, losses):
    times.append(time.monotonic())
    if len(times) > 2 and 20 * done // total == 20 * (done - 20) // total and done < total:
      return
    pace = (times[-1] - times[1]) / max(1, len(times) - 2)
    left = f', {pace * (total - done) / 20:.0f} s left' if len(times) > 2 and done < total else ''
    told = ', '.join(f'{name} {loss:.3f}' for name, loss in losses.items())
    print(f'step {done} of {total}, {told}{left}', file=sys.stderr, flush=True)

  return on_steps


def _sheet(prior, images, seed):
  """Returns a PNG of 24 generated images and the nearest one that was trained on, of each; or of denoised ones."""
  import jax
  import numpy as np

  from experiments.panels import Panel, sheet

  if not prior.latent:
    clean = images[:24]
    noisy = clean + 0.2 * np.asarray(jax.random.normal(jax.random.key(seed), clean.shape))
    found = np.asarray(prior.make(prior.weights, noisy, np.full(len(clean), 0.2, np.float32)))
    return sheet([Panel('trained on', clean), Panel('with noise of 0.2', noisy), Panel('denoised', found)])
  latents = jax.random.normal(jax.random.key(seed), (24, prior.latent))
  found = np.asarray(prior.make(prior.weights, latents))
  apart = [np.mean(np.square(images - one), axis=(1, 2, 3)) for one in found]
  nearest = np.stack([images[np.argmin(each)] for each in apart])
  return sheet([Panel('generated', found), Panel('nearest of those trained on', nearest)])


if __name__ == '__main__':
  _program.run(main)
