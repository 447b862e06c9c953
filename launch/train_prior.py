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

from launch import _program
from launch._flags import IMAGE_OPTIONS, Flags

_GIVEN = Flags()
with _program.group('what is trained'):
  _GIVEN.shared('dataset', 'split', 'limit', *IMAGE_OPTIONS, split=('train', 'The split that is public.'))
  _GIVEN.string('licence', '', 'Licence of the images, recorded with the weights.')
with _program.group('training'):
  _GIVEN.string('kind', 'generator', 'generator: WGAN-GP; denoiser.')
  _GIVEN.integer('steps', 2000, 'Steps, a multiple of 20; the critic of a generator has five for each.')
  _GIVEN.integer('width', 16, 'Channels at full resolution.')
  _GIVEN.integer('batch_size', 32, 'Images per step.')
  _GIVEN.float('learning_rate', 2e-4, 'Of Adam.')
with _program.group('run'):
  _GIVEN.shared('seed', 'workdir', 'compilation_cache', 'progress', workdir='results/prior')


def main(argv: list[str]) -> None:
  """Trains as the flags describe, and writes the weights and the samples."""
  _GIVEN.configure()

  import jax

  from gradleak.core import errors
  from gradleak.core.storage import write_atomically
  from gradleak.priors import denoiser, gan, trained, training

  for name in ('width', 'batch_size'):
    errors.check_number(name, getattr(_GIVEN, name), low=1, high=4096, integer=True)
  errors.check_number('learning_rate', _GIVEN.learning_rate, low=1e-8, high=1)
  _program.say(f'reading {_GIVEN.dataset} …')
  data = _GIVEN.read(_GIVEN.split)
  _GIVEN.images_alone(data)
  shape = data.samples.shape[1:]
  errors.check_choice('kind', _GIVEN.kind, trained.KINDS)
  make = gan.training if _GIVEN.kind == 'generator' else denoiser.training
  made = make(shape, width=_GIVEN.width, batch_size=_GIVEN.batch_size, learning_rate=_GIVEN.learning_rate)
  about = {name: getattr(_GIVEN, name) for name in ('dataset', 'split', 'steps')}
  about['licence'] = _GIVEN.licence or f'that of the images of {_GIVEN.dataset}'
  config = {
    **about,
    **{name: getattr(_GIVEN, name) for name in ('kind', 'limit', 'width', 'batch_size', 'learning_rate', 'seed')},
    'trained_on': trained.fingerprints(data.samples).sum().item(),
  }
  _program.say('compiling …')
  state = training.train(
    jax.random.key(_GIVEN.seed),
    made,
    data.samples,
    _GIVEN.steps,
    workdir=_GIVEN.workdir,
    config=config,
    on_steps=_report(_GIVEN.steps, _GIVEN.progress),
  )
  weights = os.path.join(_GIVEN.workdir, 'weights.npz')
  trained.save(weights, made.module, jax.device_get(state.average), data.samples, **about)
  samples = os.path.join(_GIVEN.workdir, 'samples.png')
  write_atomically(samples, _sheet(trained.load(weights, _GIVEN.kind), data.samples, _GIVEN.seed))
  print(f'{len(data.samples)} images of {_GIVEN.dataset}, {_GIVEN.split}; {_GIVEN.steps} steps')
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
