"""What every attack of the registries keeps to.

A new attack needs a row in `ROWS`; the first test fails without it.
"""

import dataclasses
import functools
import inspect
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradleak as gl
from gradleak import Knowledge, Observation, UsageError
from gradleak.attacks import presets
from gradleak.attacks.matching import TERMS
from gradleak.core import trees
from gradleak.core.settings import limits

pytestmark = pytest.mark.usefixtures('fast_compilation')

ATTACKS = {**gl.attacks.REGISTRY, **gl.servers.REGISTRY}


class Row(NamedTuple):
  """How to test an attack.

  Attributes:
    settings: of a run that compiles fast; of one with steps, two of them.
    refused: for each setting whose range stands in no annotation (tests/test_ranges.py has those), a value out of range
      or of the wrong type.
    felt: the evidence that changes its reconstruction: all that it reads; without the clip where the distance does
      not depend on the scale.
    like: the attack that it is with other settings; it is compiled in the slow tests alone.
  """

  settings: dict
  refused: dict
  felt: tuple[str, ...] = ()
  like: str = ''


MATCHING = {
  **{name: float('nan') for name in presets.offered() if name in TERMS},
  'steps': 0,
  'tv': -1.0,
  'start': 'unifrm',
  'decoys': -1,
  'tolerance': -1.0,
  'form': 'ghst',
  'match': 'clint',
  'epochs': -1,
  'batch_size': -1,
  'rate': 0.0,
  'orders': 'random',
  'seeds': 0,
  'partial': 1.1,
  'sharpness': -0.1,
  'softness': 0.0,
  'generator': 'untraned',
  'subset': 0,
  'subset_weight': 1.1,
  'subset_growth': -1,
}
NAMES = {'distance': 'cosin', 'gradient': 'signed', 'optimizer': 'adamm', 'decay': 'linear', 'layer_weighting': 'late'}
LBFGS = {**MATCHING, 'history': 0}
RATE = {**MATCHING, 'learning_rate': 0.0}
MADE = {name: value for name, value in RATE.items() if name != 'start'}  # images that a generator makes
FISHING = {'steps': 0, 'tv': -1.0, 'start': 'unifrm'}
SHORT, SHORTER = {'steps': 2}, {'steps': 2, 'history': 2}
SMALL = {'steps': 2, 'learning_rate': 1e-5}  # rounding decides the sign of many weights' gradients
DIRECTION = ('weights', 'noise')
ROWS = {
  'dlg': Row(SHORTER, LBFGS, (*DIRECTION, 'clip')),
  'idlg': Row(SHORTER, LBFGS, (*DIRECTION, 'clip'), like='dlg'),
  'csdlg': Row(SHORT, {**RATE, **NAMES, 'box': 1, 'l2': -1.0}, DIRECTION),
  'csdlg_fast': Row(SHORT, RATE, DIRECTION, like='csdlg'),
  'csdlg_lbfgs': Row(SHORTER, LBFGS, DIRECTION, like='dlg'),
  'dga': Row(SHORTER, LBFGS, (*DIRECTION, 'clip'), like='dlg'),
  'gia': Row(SHORT, RATE, DIRECTION, like='csdlg'),
  'gs': Row(SHORT, RATE, DIRECTION, like='csdlg'),
  'ladder': Row(
    {**SHORT, 'rungs': 2},
    {name: value for name, value in RATE.items() if name != 'tv'}
    | {'lowest': 0.0, 'highest': -1.0, 'rungs': 1, 'slack': 0.5, 'descent': 0.5},
    DIRECTION,
  ),
  'annealed': Row(
    {**SHORT, 'rungs': 2},
    {name: value for name, value in RATE.items() if name not in ('tv', 'roughness')}
    | {'lowest': 0.0, 'highest': -1.0, 'rungs': 1, 'slack': 0.5, 'descent': 0.5},
    DIRECTION,
    like='ladder',
  ),
  'cinet': Row(SMALL, {**MADE, 'distance': 'cosin', 'gradient': 'signed'}, DIRECTION, like='csdlg'),
  'magia': Row(SHORTER, LBFGS, (*DIRECTION, 'clip'), like='dlg'),
  'fidel': Row({}, {'bias': 'no', 'combine': 'no'}),
  'peeling': Row({}, {}),
  'spear': Row({'submatrices': 10, 'programs': 10}, {}),
  'imprint': Row({'bins': 4}, {'sparse': 1, 'residual': 1}),
  'trap': Row({}, {}),
  'class_fishing': Row({**SHORT, 'target': 1}, FISHING, DIRECTION, like='csdlg'),
  'feature_fishing': Row({**SHORT, 'target': 1}, FISHING, DIRECTION, like='class_fishing'),
}


# They read networks with convolutions: tests/attacks/test_convolutional.py.
CONVOLUTIONAL = {'fidel_decoder', 'prefix'}
TRANSFORMERS = {'april'}  # tests/attacks/test_april.py
RESIDUAL = {'residual_peeling'}  # tests/attacks/test_residual_peeling.py
LEARNED = {'lti'}  # tests/attacks/test_learned.py
GENERATIVE = {'ggl', 'gias', 'gifd', 'pnp'}  # tests/attacks/test_generative.py
BAYES = {'bayes'}  # tests/attacks/test_bayes.py
TEXTS = {'tag', 'lamp', 'span', 'decepticons'}  # test_text_attacks.py, test_span.py; tests/servers/test_decepticons.py
TABLES = {'tableak', 'linear'}  # tests/test_tables.py


def test_every_attack_has_a_row():
  others = CONVOLUTIONAL | TRANSFORMERS | RESIDUAL | LEARNED | GENERATIVE | BAYES | TEXTS | TABLES
  assert ROWS.keys() | others == ATTACKS.keys()


class Case(NamedTuple):
  """One attack, and what servers see in its setting.

  Attributes:
    method: the `AttackMethod`.
    client: the `Client` of the model that its server sends.
    run: (key, `Observation`) -> `Reconstruction`: the whole attack, compiled unless it runs on the host.
    batch: the `Observation` of two 8×8 images; labels are not granted.
    narrow: three of a single image of 64×1 pixels each, as the attack was published; leaves [3, …].
  """

  method: gl.attacks.AttackMethod
  client: gl.Client
  run: object
  batch: Observation
  narrow: Observation


@functools.cache
def case(name):
  """Returns the `Case` of an attack; made once for all tests."""
  method = ATTACKS[name](**ROWS[name].settings)
  client, batch = observed(method, (8, 8, 1), 2, granted=False)
  narrow = [observed(method, (64, 1, 1), 1, granted=True, first=i)[1] for i in range(3)]
  stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *narrow)
  run = functools.partial(whole, method(client))
  return Case(method, client, run if method(client).on_host else jax.jit(run), batch, stacked)


@functools.cache
def scenario_of(sample_shape):
  from sklearn.datasets import load_digits

  data = load_digits()
  images = (data.images[:8] / 16).reshape(8, *sample_shape).astype(np.float32)
  model = gl.models.create('mlp(widths=8)', 10, init='default')
  return gl.scenario(model, images, data.target[:8].astype(np.int32), key=jax.random.key(2))


def observed(method, sample_shape, number, *, granted, first=0):
  """Returns (client, `Observation`) of some images, with all kinds of evidence, as a non-adaptive attacker has it."""
  sent = scenario_of(sample_shape)
  if method.server is not None:
    sent = method.server.build(method.server.numbers).prepare(jax.random.key(1), sent, number)
  images, labels = (jnp.asarray(part[first : first + number]) for part in (sent.samples, sent.targets))
  update = send(sent.client, sent.variables, images, labels)
  made = method(sent.client)
  mode = made.labels if granted or made.labels != 'known' else 'inferred'
  probabilities = jax.nn.one_hot(labels, 10, dtype=jnp.float32) * float(mode == 'known')
  rule = method.label_rule if number == 1 else 'bias_corrected'  # iDLG's rule reads one label
  return sent.client, Observation(
    sent.variables,
    update,
    probabilities,
    Knowledge(labels=mode, label_inference=rule),
    images.shape,
    10,
    weights=jax.tree.map(jnp.ones_like, update),
    noise=jnp.float32(0),
    clip=jnp.float32(jnp.inf),
    uploads=jax.tree.map(lambda x: jnp.stack([x, x]), update),
  )


@functools.partial(jax.jit, static_argnums=0)
def send(client, variables, images, labels):
  return client.local_update(None, variables, images, labels).update


def whole(attack, key, observation, loop=jax.lax.fori_loop):
  """Returns the `Reconstruction` of all steps, on one observation."""

  def step(_, state):
    state, info = attack.step(state, observation)
    assert info['objective'].shape == ()
    return state

  state = loop(0, attack.num_steps, step, attack.init(key, observation))
  return attack.reconstruct(state, observation)


def python_loop(start, stop, step, state):
  return functools.reduce(lambda state, i: step(i, state), range(start, stop), state)


KEY = jax.random.key(5)
every_attack = pytest.mark.parametrize(
  'name', [pytest.param(name, marks=[pytest.mark.slow] * bool(ROWS[name].like)) for name in ATTACKS if name in ROWS]
)


def same(a, b):
  """Whether two reconstructions are the same bits."""
  return all(np.array_equal(x, y, equal_nan=True) for x, y in zip(a, b, strict=True))


def close(a, b):
  for x, y in zip(a, b, strict=True):
    np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-3)


def check(found, observation):
  """Checks the shapes of what an attack returns, and that it says so where it diverged."""
  assert found.samples.shape[1:] == observation.batch_shape[1:] and found.samples.dtype == jnp.float32
  assert found.labels.ndim == 1 and found.labels.dtype == jnp.int32
  assert int(found.diverged_step) >= 0 or np.isfinite(found.samples).all()
  assert all(x.shape == () for x in found[2:])


@every_attack
def test_several_images_without_any_private_data(name):
  """The observation holds no labels; what stands in their place changes nothing."""
  method, client, run, batch, _ = case(name)
  found = run(KEY, batch)
  check(found, batch)
  assert int(found.diverged_step) == -1
  assert not np.asarray(batch.targets).any()
  assert same(found, run(KEY, dataclasses.replace(batch, targets=jnp.full_like(batch.targets, 0.5))))
  assert method(client).labels in ('known', 'inferred', 'optimised', 'unused')


@every_attack
def test_evidence_counts_where_it_is_read_and_nowhere_else(name):
  method, _, run, batch, _ = case(name)
  key = jax.random.key(6)
  evidence = {
    'weights': jax.tree.map(lambda x: jax.random.bernoulli(key, 0.5, x.shape).astype(x.dtype), batch.update),
    'noise': 1e6 * trees.squared_norm(batch.update),  # so much that the search has arrived at once
    'clip': jnp.float32(0.1) * trees.norm(batch.update),
    'uploads': jax.tree.map(lambda x: -x, batch.uploads),
  }
  assert tuple(evidence) == gl.attacks.EVIDENCE
  plain = run(KEY, batch)
  unread = {one: value for one, value in evidence.items() if one not in method.reads}
  assert same(plain, run(KEY, dataclasses.replace(batch, **unread)))
  assert set(ROWS[name].felt) <= method.reads
  for one in ROWS[name].felt:
    assert not same(plain, run(KEY, dataclasses.replace(batch, **{one: evidence[one]}))), one


@every_attack
@pytest.mark.parametrize('value', [0.0, np.nan])
def test_dead_inputs_are_survived(name, value):
  _, _, run, batch, _ = case(name)
  found = run(KEY, dataclasses.replace(batch, update=jax.tree.map(lambda x: jnp.full_like(x, value), batch.update)))
  check(found, batch)


def by_steps(attack, key, observation):
  """The same, each phase compiled by itself, and the steps in a loop of Python's."""
  phases = ('init', 'step') if attack.on_host else ('init', 'step', 'reconstruct')
  compiled = {phase: jax.jit(getattr(attack, phase)) for phase in phases}
  return whole(attack._replace(**compiled), key, observation, python_loop)


def check_together(name, alone):
  """On three observations of one image each, one pixel wide, whose uploads, labels and keys differ."""
  method, client, _, _, narrow = case(name)
  attack, keys = method(client), jax.random.split(KEY, 3)
  if attack.on_host:  # lane by lane, as the driver calls it
    lanes = [whole(attack, key, trees.take(narrow, i)) for i, key in enumerate(keys)]
    together = jax.tree.map(lambda *xs: jnp.stack(xs), *lanes)
  else:
    together = jax.jit(jax.vmap(functools.partial(whole, attack)))(keys, narrow)
  for i, key in enumerate(keys):
    one = alone(attack, key, trees.take(narrow, i))
    check(one, narrow)
    close(trees.take(together, i), one)
  assert not np.array_equal(together.samples[0], together.samples[1])


@pytest.mark.long
@every_attack
def test_compiled_with_others_it_gives_what_it_gives_alone(name):
  check_together(name, by_steps)


@pytest.mark.long
@pytest.mark.parametrize('name', [pytest.param(name, marks=[pytest.mark.slow] * (name != 'fidel')) for name in ROWS])
def test_not_compiled_it_gives_the_same(name):
  """Each operation is compiled by itself, which takes longer than the whole."""
  check_together(name, functools.partial(whole, loop=python_loop))


@pytest.mark.parametrize('name', ROWS)
def test_each_setting_has_a_range(name):
  """Refused at the call, by the factory without a client, or at the latest when it is traced."""
  row, (method, client, _, _, narrow) = ROWS[name], case(name)
  annotations = {one.name: one.annotation for one in inspect.signature(ATTACKS[name]).parameters.values()}
  assert row.refused.keys() == {one for one in method.settings if limits(annotations[one])[1] is None}
  method(None)  # settings can be checked before there is a client
  for setting, value in row.refused.items():
    with pytest.raises(UsageError):
      changed = method.changed(**{setting: value})
      changed(None)
      jax.eval_shape(changed(client).init, KEY, trees.take(narrow, 0))
      pytest.fail(f'{name}({setting}={value}) is not refused')
