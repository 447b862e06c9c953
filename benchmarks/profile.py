"""Where time goes in what evidence needs: compilation, steps, runs on noise and waste, and the rate of the machine."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

import gradleak as gl
from benchmarks import harness, roofline, setting
from benchmarks.harness import Column, Variant
from experiments import forecast
from gradleak import AuditSettings, registry
from gradleak.audit import granted
from gradleak.audit.lanes import Found, Table
from gradleak.audit.plan import Plan, plan
from gradleak.data import partition
from gradleak.engine import driver, groups
from gradleak.federated import Client, simulation

READS = ('dataset', 'data_dir', 'models', 'attack', 'trials', 'steps', 'repeats')
MODELS = ('lenet', 'convnet(width=64)', 'resnet18')
INVERSE = 'lti(steps={steps},hidden=256)'
CLIENTS, SAMPLES, BATCH = 10, 20, 10  # of the training: clients of a round, samples of each, and of a local step
COLUMNS = [
  Column('first s', 'first', '.2f', harness.first), Column('again s', 'seconds', '.2f'),
  Column('compilation', 'compilation', '.0%', harness.first), Column('on noise', 'controls', '.0%'),
  Column('idle', 'idle', '.1%'), Column('padding', 'padding', '.1%'), Column('GFLOP', 'gflop', ',.2f'),
  Column('GFLOP/s', 'rate', '.1f'), Column('of products', 'share', '.0%'),
]  # fmt: skip


def main(options: harness.Options) -> None:
  """Measures the workloads in turn with the machine's rate of matrix products, and prints a row for each."""
  devices = jax.local_devices()
  works = [*_works(options)]
  variants = [Variant(roofline.MACHINE, lambda: {'product': roofline.product_rate(devices)})]
  variants += [Variant(name, Timed(work, more)) for name, work, more in works]
  print(f'{options.dataset} at 32×32×3, {options.trials} trials, {options.steps} steps; {harness.hardware()}')
  print(f'jax {jax.__version__}; {options.repeats} runs in turn; load average {harness.load_average()}')
  found = harness.measured(variants, options.repeats)
  product = float(np.median(found.pop(roofline.MACHINE)['product']))
  for name, work, _ in works:
    figures = found[name]
    if not isinstance(figures, str):
      flops = forecast.operations(work).products
      rate = flops / float(np.median(figures['seconds']))
      figures |= {'gflop': [flops / 1e9], 'rate': [rate / 1e9], 'share': [rate / product]}
  print(f'matrix products of {roofline.SIDE}: {product / 1e9:.0f} GFLOP/s, all devices together\n')
  print(harness.table(found, COLUMNS, 'workload'))
  print(
    '\nFirst: compilation and one run; again: another one, medians. On noise: share of the lanes that are control '
    'runs. Idle: share of the steps after the last new minimum of a lane’s objective, as far as chunks show it. '
    'Padding: share of the positions of groups that repeat other lanes. GFLOP: of matrix products, counted in '
    'the traced program.'
  )


class Timed:
  """A workload that is timed; its first call compiles, and is followed by another one."""

  def __init__(self, work: Callable[[], Any], more: Callable[[Any], dict[str, float]]) -> None:
    self.work, self.more, self.first = work, more, None

  def __call__(self) -> dict[str, float]:
    """Returns the seconds of a call, what compilation took of the first one, and the shares of what ran."""
    results: list[Any] = []

    def run() -> Any:
      results.append(self.work())
      return results[-1]

    if self.first is None:
      self.first = forecast.seconds(run)
    again = forecast.seconds(run)
    compilation = max(0.0, 1 - again / self.first)
    return {'first': self.first, 'seconds': again, 'compilation': compilation, **self.more(results[-1])}


def _works(options: harness.Options) -> Iterator[tuple[str, Callable[[], Any], Callable[[Any], dict[str, float]]]]:
  """Yields (name, what is run, results -> shares) of each workload."""
  data = setting.load(options.dataset, options.data_dir, options.trials)
  for model in options.listed_models(*MODELS):
    method = registry.attack(options.attack)
    method = method if 'steps' in method.given else method.changed(steps=options.steps)
    work, table = forecast.matching(_planned(model, data, method, options.trials))
    yield f'{method.name} on {model}', work, functools.partial(shares, table)
  inverse = registry.attack(INVERSE.format(steps=options.steps))
  group = _planned('lenet', data, inverse, options.trials).groups[0]
  yield 'lti, the inverse of lenet', lambda: granted.prepared(group, inverse), lambda _: {}
  yield 'training of lenet, a round', _round(data), lambda _: {}


def _planned(model: str, data: Any, method: Any, trials: int) -> Plan:
  """Returns the audit of single images, undefended, with a run on noise for each."""
  scenario = gl.scenario(
    gl.models.create(model, data.num_classes, init='explicit'), data.samples, data.targets, key=jax.random.key(0),
    public=(1 - data.samples, data.targets),
  )  # fmt: skip
  trials = min(trials, len(data.samples))
  given = AuditSettings(controls=trials, knowledge='non-adaptive', labels='known')
  return plan(jax.random.key(1), scenario, [None], [method], trials, given)


def _round(data: Any) -> Callable[[], Any]:
  """Returns what trains all clients for a round."""
  samples, targets = (np.resize(x, (CLIENTS * SAMPLES, *x.shape[1:])) for x in (data.samples, data.targets))
  model = gl.models.create('lenet', data.num_classes)
  parts = partition.iid(jax.random.key(0), targets, CLIENTS, samples=SAMPLES)
  client = Client(model, data.num_classes, share='delta', batch_size=BATCH)
  federation = simulation.Federation(client, samples, targets, parts, CLIENTS)
  variables = jax.jit(model.init, static_argnums=1)(jax.random.key(1), samples.shape[1:])
  state = simulation.start(federation, variables)
  return lambda: simulation.run_round(federation, state, jax.random.key(2))[0].variables


def shares(table: Table, found: Found) -> dict[str, float]:
  """Returns which shares of a run of lanes gave nothing new: 'controls', 'idle' and 'padding'."""
  lanes, size = len(table.lanes), driver.default_group_size(table.shared['variables'], 1)
  run = groups.place(np.arange(lanes), groups.Layout(size)).counts.sum() * size
  best = np.minimum.accumulate(np.where(np.isfinite(found.curves), found.curves, np.inf), axis=1)
  newest = [int(np.flatnonzero(np.diff(one, prepend=np.inf) < 0)[-1]) for one in best]
  idle = 1 - np.mean(found.steps[newest]) / found.steps[-1]
  return {
    'controls': sum(lane.target.defense < 0 for lane in table.lanes) / lanes,
    'idle': float(idle),
    'padding': 1 - lanes / float(run),
  }
