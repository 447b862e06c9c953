"""The roofline: speed of a step of matching, relative to the machine's matrix products and memory bandwidth."""

import functools
import math
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import gradleak as gl
from benchmarks import setting
from gradleak.attacks.matching import Matching
from gradleak.engine import driver

WHOLE = 'whole gradient'
SIDE = 1024  # of the square matrices that are multiplied
STREAM = 2**25  # numbers that are copied: larger than any cache


def main(
  *,
  models: Sequence[str],
  attack: str,
  dataset: str,
  data_dir: str | None,
  trials: int,
  steps: int,
  repeats: int,
  group_size: int | None = None,
) -> None:
  """Measures and prints a row per model, with the formulation of convolution that audits use.

  Args:
    models: list of models, as `models.create` takes them.
    attack, dataset, data_dir: as launch/audit.py takes them.
    trials: number of trials that are attacked at once.
    steps: of the attack.
    repeats: number of measurements, in turn with the machine's own rates.
    group_size: trials per micro-group; None: as in audits.
  """
  images = setting.load(dataset, data_dir, trials)
  devices = jax.local_devices()
  settings = {}
  for model in models:
    settings[model] = some = setting.make(model, attack, steps, images, trials)
    if _compares_products(some):
      whole = str(some.method.changed(form='whole'))
      settings[f'{model} ({WHOLE})'] = setting.make(model, whole, steps, images, trials)
  rates, found, counted = [], {}, {}
  for repeat in range(repeats):
    rates.append((product_rate(devices), copy_rate(devices)))
    for model, some in settings.items():
      print(f'run {repeat + 1} of {repeats}: {model}', file=sys.stderr, flush=True)
      group = group_size or driver.default_group_size(some.scenario.variables, 1)
      found.setdefault(model, []).append(setting.run(some, trials, group, devices))
      if repeat == 0:
        counted[model] = group, step_flops(some), *xla_counts(some, group)
  product, copy = np.median(rates, axis=0)
  print(f'{attack}, {trials} trials, {dataset} at 32×32×3, {len(devices)} × {devices[0].device_kind}')
  print(f'jax {jax.__version__}; {repeats} runs of {steps} steps; load average {setting.load_average()}')
  print(
    f'matrix products of {SIDE}: {product / 1e9:.0f} GFLOP/s; copies: {copy / 1e9:.1f} GB/s, all devices together\n'
  )
  heads = ('model', -28), ('group', 5), ('MFLOP', 9), ('by XLA', 9), ('MB by XLA', 9)
  heads += (
    ('FLOP/B', 6),
    ('ms/step/trial', 13),
    ('GFLOP/s', 8),
    ('of products', 11),
    ('of roofline', 11),
    ('compile s', 9),
  )
  print(' '.join(f'{head:{"<" if width < 0 else ">"}{abs(width)}}' for head, width in heads))
  for model, runs in found.items():
    group, flops, xla_flops, moved = counted[model]
    milliseconds = np.median([run.milliseconds for run in runs])
    rate = flops / milliseconds * 1e3
    roof = min(product, flops / moved * copy)
    print(
      f'{model:28} {group:5} {flops / 1e6:9,.1f} {xla_flops / 1e6:9,.1f} {moved / 1e6:9,.1f} '
      f'{flops / moved:6.1f} {milliseconds:13.3f} {rate / 1e9:8.1f} {rate / product:11.0%} {rate / roof:11.0%} '
      f'{runs[0].compile_seconds:9.1f}'
    )
  print('\nMFLOP: of a step and trial, matrix products alone, counted from the layers (7 products for each, 5 for the')
  print(
    'first). By XLA: its own count of one step of one group, per trial, and the bytes that it reads and writes if no'
  )
  print('cache helps: above 100 % of the roofline, one did. Medians throughout.')


def _compares_products(some: setting.Setting) -> bool:
  """Returns whether the attack leaves wide layers' gradients unmultiplied (`attacks.matching.ghost`)."""
  images = jnp.asarray(some.scenario.images[:1])
  attack = some.method(some.scenario.client)
  matching = getattr(attack.init, '__self__', None)
  if not isinstance(matching, Matching):
    return False
  labels = jax.nn.one_hot(jnp.asarray(some.scenario.labels[:1]), some.scenario.client.num_classes)
  update = some.scenario.variables['params']
  observation = gl.Observation(some.scenario.variables, update, labels, gl.Knowledge(), images.shape, labels.shape[1])
  return matching.by_products(observation, images, labels)


def product_rate(devices: Sequence[Any]) -> float:
  """Returns the float32 operations per second of square matrix products on all devices at once."""
  numbers = np.random.default_rng(0).uniform(-1, 1, (len(devices), SIDE, SIDE)).astype(np.float32)

  def multiply(a):
    return jax.lax.fori_loop(0, 8, lambda _, b: a @ b / jnp.float32(math.sqrt(SIDE)), a)

  return len(devices) * 8 * 2 * SIDE**3 / _seconds(multiply, numbers, devices)


def copy_rate(devices: Sequence[Any]) -> float:
  """Returns the bytes per second that all devices together read and write while they copy."""
  numbers = np.zeros((len(devices), STREAM // len(devices)), np.float32)

  def copy(x):
    return jax.lax.fori_loop(0, 8, lambda _, x: x + jnp.float32(1), x)  # memory that was touched before

  return 8 * 2 * numbers.nbytes / _seconds(copy, numbers, devices)


def _seconds(function, numbers, devices):
  """Returns the least time that `function` takes on all rows at once, a row per device."""
  mesh = jax.sharding.Mesh(np.asarray(devices), ('rows',))
  numbers = jax.device_put(numbers, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec('rows')))
  run = functools.partial(jax.jit(jax.vmap(function)), numbers)
  jax.block_until_ready(run())
  return min(_time(run) for _ in range(5))


def _time(function):
  started = time.perf_counter()
  jax.block_until_ready(function())
  return time.perf_counter() - started


def step_flops(some: setting.Setting) -> int:
  """Returns the floating-point operations of the matrix products of one step of one trial of a `Setting`.

  A layer y = x·w with upstream gradient g needs three products for the client's gradient: y, g·wᵀ and xᵀ·g. The
  gradient in the dummy images needs four more: two through xᵀ·g and one through each of the others, since the weights
  are constants. The first layer needs neither of the two products for the client's gradient of its input.
  """
  scenario = some.scenario
  variables = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), scenario.variables)
  image = jax.ShapeDtypeStruct((1, *scenario.images.shape[1:]), jnp.float32)
  model = gl.models.create(some.spec, scenario.client.num_classes, conv='native')
  first, *others = _products(jax.make_jaxpr(lambda v, x: model.apply(v, x, True))(variables, image).jaxpr)
  return 5 * first + 7 * sum(others)


def _products(jaxpr):
  """Yields the operations of each convolution and matrix product, in order of execution."""
  for equation in jaxpr.eqns:
    if equation.primitive.name == 'conv_general_dilated':
      output, kernel = equation.outvars[0].aval, equation.invars[1].aval
      features = kernel.shape[equation.params['dimension_numbers'].rhs_spec[0]]
      yield 2 * output.size * kernel.size // features
    elif equation.primitive.name == 'dot_general':
      (contracted, _), _ = equation.params['dimension_numbers']
      left = equation.invars[0].aval
      yield 2 * equation.outvars[0].aval.size * math.prod(left.shape[axis] for axis in contracted)
    for value in equation.params.values():
      inner = getattr(value, 'jaxpr', None)
      if inner is not None:
        yield from _products(inner)


def xla_counts(some: setting.Setting, group_size: int) -> tuple[float, float]:
  """Returns (operations, bytes) of one step by XLA's cost analysis, per trial of a group."""

  def step(shared, lanes, states):
    def one(lane, state):
      attack, _, observation = some.build(shared, lane)
      return attack.step(state, observation)[0]

    return jax.vmap(one)(lanes, states)

  def init(shared, lanes):
    def one(lane):
      attack, key, observation = some.build(shared, lane)
      return attack.init(key, observation)

    return jax.vmap(one)(lanes)

  lanes = some.first(group_size).lanes
  count = len(lanes['image'])
  states = jax.eval_shape(init, some.shared, lanes)
  costs = jax.jit(step).lower(some.shared, lanes, states).compile().cost_analysis()
  return costs['flops'] / count, costs['bytes accessed'] / count
