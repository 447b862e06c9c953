"""The roofline: speed of a step of matching, relative to the machine's matrix products and memory bandwidth."""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import gradleak as gl
from benchmarks import harness, setting
from benchmarks.harness import Column, Variant
from gradleak.attacks.matching import Matching

READS = ('dataset', 'data_dir', 'models', 'attack', 'trials', 'group_size', 'steps', 'repeats')
WHOLE = 'whole gradient'
MACHINE = 'the machine'
SIDE = 1024  # of the square matrices that are multiplied
STREAM = 2**25  # numbers that are copied: larger than any cache
COLUMNS = [
  Column('group', 'group', '.0f'), Column('MFLOP', 'mflop', ',.1f'), Column('by XLA', 'xla', ',.1f'),
  Column('MB by XLA', 'mb', ',.1f'), Column('FLOP/B', 'intensity', '.1f'), Column('ms/step/trial', 'ms'),
  Column('GFLOP/s', 'rate', '.1f'), Column('of products', 'products', '.0%'), Column('of roofline', 'roofline', '.0%'),
  Column('compile s', 'compile', '.1f', harness.first),
]  # fmt: skip


def main(options: harness.Options) -> None:
  """Measures in turn with the machine's own rates, and prints a row per model, as audits convolve."""
  images, devices = setting.load(options.dataset, options.data_dir, options.trials), jax.local_devices()
  make = functools.partial(setting.make, steps=options.steps, dataset=images, trials=options.trials)
  variants = [Variant(MACHINE, lambda: {'product': product_rate(devices), 'copy': copy_rate(devices)})]
  for model in options.listed_models('lenet', 'convnet', 'resnet18'):
    settings = {model: make(model, options.attack)}
    if _compares_products(settings[model]):
      settings[f'{model} ({WHOLE})'] = make(model, str(settings[model].method.changed(form='whole')))
    variants += [_variant(options, name, some, devices) for name, some in settings.items()]
  print(f'{options.attack}, {options.trials} trials, {options.dataset} at 32×32×3, {harness.hardware()}')
  print(f'jax {jax.__version__}; {options.repeats} runs of {options.steps} steps; load {harness.load_average()}')
  found = harness.measured(variants, options.repeats)
  machine = found.pop(MACHINE)
  product, copy = (np.median(machine[name]) for name in ('product', 'copy'))
  print(
    f'matrix products of {SIDE}: {product / 1e9:.0f} GFLOP/s; copies: {copy / 1e9:.1f} GB/s, all devices together\n'
  )
  for figures in found.values():
    flops, intensity = 1e6 * figures['mflop'][0], figures['intensity'][0]
    rate = flops / np.median(figures['ms']) * 1e3
    figures |= {'rate': [rate / 1e9], 'products': [rate / product]}
    figures['roofline'] = [rate / min(product, intensity * copy)]
  print(harness.table(found, COLUMNS, 'model'))
  print(
    '\nMFLOP: of a step and trial, matrix products alone, counted from the layers (7 products for each, 5 for the '
    'first). By XLA: its own count of one step of one group, per trial, and the bytes that it reads and writes if no '
    'cache helps: above 100 % of the roofline, one did. Medians throughout.'
  )


def _variant(options: harness.Options, name: str, some: setting.Setting, devices: Sequence[Any]) -> Variant:
  """Returns the variant of a model, with its operations and bytes."""
  group = options.group_size or some.usual_group

  def counted(figures: Mapping[str, float]) -> dict[str, float]:
    del figures
    flops, (xla, moved) = step_flops(some), xla_counts(some, group)
    return {'mflop': flops / 1e6, 'xla': xla / 1e6, 'mb': moved / 1e6, 'intensity': flops / moved}

  run, _ = setting.measured(some, options.trials, group_size=group, devices=devices)
  return Variant(name, run, counted)


def _compares_products(some: setting.Setting) -> bool:
  """Returns whether the attack leaves wide layers' gradients unmultiplied (`attacks.matching.ghost`)."""
  images = jnp.asarray(some.scenario.samples[:1])
  attack = some.method(some.scenario.client)
  matching = getattr(attack.init, '__self__', None)
  if not isinstance(matching, Matching):
    return False
  labels = jax.nn.one_hot(jnp.asarray(some.scenario.targets[:1]), some.scenario.client.num_classes)
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
  return min(harness.seconds(run) for _ in range(5))


def step_flops(some: setting.Setting) -> int:
  """Returns the floating-point operations of the matrix products of one step of one trial of a `Setting`.

  A layer y = x·w with upstream gradient g needs three products for the client's gradient: y, g·wᵀ and xᵀ·g. The
  gradient in the dummy images needs four more: two through xᵀ·g and one through each of the others, since the weights
  are constants. The first layer needs neither of the two products for the client's gradient of its input.
  """
  scenario = some.scenario
  variables = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), scenario.variables)
  image = jax.ShapeDtypeStruct((1, *scenario.samples.shape[1:]), jnp.float32)
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
