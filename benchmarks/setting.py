"""What is attacked in every measurement: undefended gradients of single images, labels known."""

import os
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np

import gradleak as gl
from gradleak import attacks, metrics, trees
from gradleak.engine import driver

MAX_IMAGES = 64  # more trials than that are restarts on the same images


class Setting(NamedTuple):
  """Trials of one attack on one model, as the driver takes them.

  Attributes:
    spec: the model, as `models.create` takes it.
    scenario: its `Scenario`.
    template: the attack's.
    num_steps: its steps.
    build, shared, lanes: arguments of `driver.run`.
  """

  spec: str
  scenario: gl.Scenario
  template: attacks.AttackTemplate
  num_steps: int
  build: Callable
  shared: tuple
  lanes: dict

  @property
  def trials(self):
    """The number of trials."""
    return len(self.lanes['image'])

  def first(self, trials):
    """Returns the same with its first trials alone."""
    return self._replace(lanes=jax.tree.map(lambda x: x[:trials], self.lanes))

  def truth(self):
    """Returns the private image of each trial, [trials, H, W, C]."""
    return self.scenario.images[np.asarray(self.lanes['image'])]

  def psnr(self, images):
    """Returns the median PSNR in dB of the first trials' reconstructions [n, H, W, C]."""
    return float(np.median(metrics.psnr(np.asarray(images), self.truth()[: len(images)])))


def load(dataset, data_dir, trials):
  """Returns the images that so many trials attack, 32×32 in colour."""
  return gl.data.load(dataset, 'test', data_dir=data_dir, limit=min(trials, MAX_IMAGES), image_size=32, channels=3)


def make(spec, attack, steps, dataset, trials, *, formulation=None, init='explicit', batch_norm='train'):
  """Returns the `Setting` of `trials` trials; trial i attacks image i modulo their number.

  Args:
    spec: the model, as `models.create` takes it.
    attack: as `attacks.parse` takes it, with these `steps` unless it sets its own.
    steps: its number of steps; None for those it was published with.
    dataset: the images, as `load` returns them.
    trials: number of trials.
    formulation: of convolutions; None for the backend's default.
    init: of the model's weights.
    batch_norm: 'train' or 'eval'.

  Raises:
    UsageError: for an unknown model or attack.
  """
  scenario = gl.scenario(
    gl.models.create(spec, dataset.num_classes, conv=formulation, init=init),
    dataset.images,
    dataset.labels,
    key=jax.random.key(0),
    num_classes=dataset.num_classes,
    batch_norm=batch_norm,
  )
  template, client = attacks.parse(attack, steps), scenario.client
  images, labels = jax.numpy.asarray(scenario.images), jax.nn.one_hot(scenario.labels, client.num_classes)
  knowledge = gl.Knowledge(batch_norm=batch_norm)

  def upload(shared, lane):
    return client.local_update(None, shared, lane['image'][None], lane['label'][None]).update

  uploads = driver.evaluate(
    upload,
    scenario.variables,
    {'image': images, 'label': labels},
    group_size=driver.default_group_size(scenario.variables, 1),
  )

  def build(shared, lane):
    variables, uploads, labels = shared
    observation = gl.Observation(
      variables,
      trees.take(uploads, lane['image']),
      labels[lane['image']][None],
      knowledge,
      (1, *images.shape[1:]),
      labels.shape[1],
    )
    return template.build(lane['numbers'], client), lane['key'], observation

  lanes = {
    'image': jax.numpy.arange(trials, dtype=jax.numpy.int32) % len(images),
    'key': jax.random.split(jax.random.key(1), trials),
    'numbers': tuple(jax.numpy.full((trials,), number, jax.numpy.float32) for number in template.numbers),
  }
  num_steps = template.build(template.numbers, client).num_steps
  shared = (scenario.variables, jax.tree.map(jax.numpy.asarray, uploads), labels)
  return Setting(spec, scenario, template, num_steps, build, shared, lanes)


def load_average():
  """Returns the machine's load average of the last minute as text: above the number of cores, others are at work."""
  return f'{os.getloadavg()[0]:.1f}' if hasattr(os, 'getloadavg') else 'unknown'


def published_steps(attack):
  """Returns the steps of an attack as it was published, unless the text sets them."""
  template = attacks.parse(attack)
  return template.build(template.numbers, None).num_steps


def starts(setting):
  """Returns each trial's first dummy image, [trials, H, W, C]."""

  def start(shared, lane):
    attack, key, observation = setting.build(shared, lane)
    return attack.init(key, observation).dummy['images'][0]

  return np.asarray(driver.evaluate(start, setting.shared, setting.lanes, group_size=1))


class Run(NamedTuple):
  """What one run of a variant gave.

  Attributes:
    milliseconds: per step and trial, compilation apart.
    core_milliseconds: the same, of all processor cores together.
    compile_seconds: until the first chunk of steps is done, without the time that its steps took; 0 where nothing is
      compiled.
    images: the first trials' reconstructions [n, H, W, C].
    group_size: trials per group in the end, fewer where memory ran out.
  """

  milliseconds: float
  core_milliseconds: float
  compile_seconds: float
  images: np.ndarray
  group_size: int = 1


def run(setting, at_once, group_size, devices, compared=0):
  """Runs the trials, `at_once` per call of the driver, and returns the `Run` with the first `compared` images."""
  seconds, compile_seconds, images, size = np.zeros(2), 0.0, [], group_size
  for first in range(0, setting.trials, at_once):
    some = jax.tree.map(lambda x, first=first: x[first : first + at_once], setting.lanes)
    marks, started = [], time.perf_counter()

    def mark(progress, marks=marks):
      marks.append((progress.step, np.array([time.perf_counter(), time.process_time()]), progress.group_size))

    found = driver.run(
      setting.build,
      setting.shared,
      some,
      num_steps=setting.num_steps,
      group_size=group_size,
      chunk_steps=-(-setting.num_steps // 5),
      devices=devices,
      on_chunk=mark,
    )
    if len(images) < compared:
      images += list(found.images[:, 0])
    # The first chunk holds the compilation.
    (step, since, _), (last, until, size) = marks[1], marks[-1]
    per_step = (until - since) / (last - step)
    seconds += per_step * setting.num_steps
    if not compile_seconds:
      compile_seconds = max(0.0, since[0] - started - per_step[0] * step)
  return Run(
    *(1e3 * seconds / setting.num_steps / setting.trials), compile_seconds, np.asarray(images[:compared]), size
  )
