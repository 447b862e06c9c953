"""The trials of every measurement: undefended gradients of single images, labels known."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

import gradleak as gl
from benchmarks import memory
from gradleak import metrics, registry
from gradleak.attacks import AttackMethod
from gradleak.core import trees
from gradleak.data import Dataset
from gradleak.engine import driver
from gradleak.engine.groups import Layout

MAX_IMAGES = 64  # more trials than that are restarts on the same images


class Setting(NamedTuple):
  """Trials of one attack on one model, as the driver takes them.

  Attributes:
    spec: the model, as `models.create` takes it.
    scenario: its `Scenario`.
    method: the attack.
    num_steps: its steps.
    build, shared, lanes: arguments of `driver.run`.
  """

  spec: str
  scenario: gl.Scenario
  method: AttackMethod
  num_steps: int
  build: Callable
  shared: tuple
  lanes: dict

  @property
  def trials(self) -> int:
    """The number of trials."""
    return len(self.lanes['image'])

  @property
  def usual_group(self) -> int:
    """The number of trials per micro-group, as in audits."""
    return driver.default_group_size(self.scenario.variables, 1)

  def first(self, trials: int) -> 'Setting':
    """Returns the same setting, limited to its first trials."""
    return self._replace(lanes=jax.tree.map(lambda x: x[:trials], self.lanes))

  def truth(self) -> np.ndarray:
    """Returns the private image of each trial, [trials, H, W, C]."""
    return self.scenario.samples[np.asarray(self.lanes['image'])]

  def psnr(self, images: Any) -> float:
    """Returns the median PSNR in dB of the first trials' reconstructions [n, H, W, C]."""
    return float(np.median(metrics.psnr(np.asarray(images), self.truth()[: len(images)])))


def load(dataset: str, data_dir: str | None, trials: int) -> Dataset:
  """Returns the images that these trials attack, 32×32 in colour."""
  return gl.data.load(dataset, 'test', data_dir=data_dir, limit=min(trials, MAX_IMAGES), image_size=32, channels=3)


def make(
  spec: str,
  attack: str,
  steps: int | None,
  dataset: Dataset,
  trials: int,
  *,
  formulation: str | None = None,
  init: str = 'explicit',
  batch_norm: str = 'train',
) -> Setting:
  """Returns the `Setting` of `trials` trials; trial i attacks image i modulo their number.

  Args:
    spec: the model, as `models.create` takes it.
    attack: a text such as 'csdlg(tv=1e-6)'.
    steps: its number of steps, unless the text sets it; None for the published one.
    dataset: the images, as `load` returns them.
    trials: number of trials.
    formulation: of convolutions; None for the default.
    init: of the model's weights.
    batch_norm: 'train' or 'eval'.

  Raises:
    UsageError: for an unknown model or attack.
  """
  scenario = gl.scenario(
    gl.models.create(spec, dataset.num_classes, conv=formulation, init=init),
    dataset.samples,
    dataset.targets,
    key=jax.random.key(0),
    batch_norm=batch_norm,
  )
  method, client = registry.attack(attack), scenario.client
  if steps is not None and 'steps' not in method.given:
    method = method.changed(steps=steps)
  images, labels = jax.numpy.asarray(scenario.samples), jax.nn.one_hot(scenario.targets, client.num_classes)
  knowledge = gl.Knowledge(batch_norm=batch_norm)

  def upload(shared, lane):
    return client.local_update(None, shared, lane['image'][None], lane['label'][None]).update

  uploads = driver.evaluate(
    upload,
    scenario.variables,
    {'image': images, 'label': labels},
    Layout(driver.default_group_size(scenario.variables, 1)),
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
    return method.build(lane['numbers'], client), lane['key'], observation

  lanes = {
    'image': jax.numpy.arange(trials, dtype=jax.numpy.int32) % len(images),
    'key': jax.random.split(jax.random.key(1), trials),
    'numbers': tuple(jax.numpy.full((trials,), number, jax.numpy.float32) for number in method.numbers),
  }
  num_steps = method(client).num_steps
  shared = (scenario.variables, jax.tree.map(jax.numpy.asarray, uploads), labels)
  return Setting(spec, scenario, method, num_steps, build, shared, lanes)


def starts(setting: Setting) -> np.ndarray:
  """Returns each trial's first dummy image, [trials, H, W, C]."""

  def start(shared, lane):
    attack, key, observation = setting.build(shared, lane)
    return attack.init(key, observation).dummy['images'][0]

  return np.asarray(driver.evaluate(start, setting.shared, setting.lanes, Layout(1)))


class Run(NamedTuple):
  """The result of one run of a variant.

  Attributes:
    milliseconds: per step and trial, without compilation.
    core_milliseconds: the same, of all processor cores together.
    compile_seconds: until the end of the first chunk, without the time of its steps; 0 if nothing is compiled.
    images: the first trials' reconstructions [n, H, W, C].
    group_size: trials per group at the end; fewer than requested if memory ran out.
  """

  milliseconds: float
  core_milliseconds: float
  compile_seconds: float
  samples: np.ndarray
  group_size: int = 1


def run(setting: Setting, at_once: int, group_size: int, devices: Sequence[Any], compared: int = 0) -> Run:
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
      Layout(group_size, devices),
      num_steps=setting.num_steps,
      chunk_steps=-(-setting.num_steps // 5),
      on_chunk=mark,
    )
    if len(images) < compared:
      images += list(found.samples[:, 0])
    # The first chunk holds the compilation.
    (step, since, _), (last, until, size) = marks[1], marks[-1]
    per_step = (until - since) / (last - step)
    seconds += per_step * setting.num_steps
    if not compile_seconds:
      compile_seconds = max(0.0, since[0] - started - per_step[0] * step)
  return Run(
    *(1e3 * seconds / setting.num_steps / setting.trials), compile_seconds, np.asarray(images[:compared]), size
  )


def measured(
  setting: Setting, at_once: int, *, group_size: int, devices: Sequence[Any], compared: int = 0
) -> tuple[Callable[[], dict[str, float]], Callable[[Mapping[str, float]], dict[str, float]]]:
  """Returns `run` and `once` of a `harness.Variant`: the figures of a `Run`, and the MiB that XLA plans per device."""

  def once(figures: Mapping[str, float]) -> dict[str, float]:
    return {'planned': memory.planned(setting.first(at_once), int(figures['group']), devices)}

  return lambda: figures(setting, run(setting, at_once, group_size, devices, compared)), once


def figures(setting: Setting, done: Run) -> dict[str, float]:
  """Returns the figures of a `Run`, with the PSNR of what it returned."""
  psnr = {'psnr': setting.psnr(done.samples)} if len(done.samples) else {}
  times = {'ms': done.milliseconds, 'core': done.core_milliseconds, 'compile': done.compile_seconds}
  return {**times, 'group': done.group_size, **psnr}
