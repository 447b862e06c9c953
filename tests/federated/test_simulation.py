"""Rounds against the algorithms written out, bytes against counts by hand, and resumes against what was not stopped."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradleak as gl
from gradleak import Client, defenses
from gradleak.core import errors, trees
from gradleak.engine import progress
from gradleak.federated import Upload, accounting, simulation, training
from gradleak.models import masked

KEY = jax.random.key(5)
PARTITION = [np.arange(3), np.arange(3, 5), np.asarray([5, 6, 7])]


@pytest.fixture(scope='module')
def setting(linear):
  """Returns make(client settings, federation settings) -> (`Federation` on eight digits, variables)."""

  def make(client=None, **changed):
    settings = {'share': 'delta', 'optimizer': optax.sgd(0.1), 'batch_size': 2, **(client or {})}
    federation = simulation.Federation(
      Client(linear.client.model, 10, **settings), linear.samples, linear.targets, PARTITION, 3
    )
    return dataclasses.replace(federation, **changed), linear.variables

  return make


def loss(params, images, labels):
  logits = images.reshape(len(images), -1) @ params['kernel'] + params['bias'].reshape(1, -1)
  return -jnp.mean(jnp.sum(jax.nn.log_softmax(logits) * jax.nn.one_hot(labels, 10, dtype=jnp.float32), axis=1))


gradient_of = jax.jit(jax.grad(loss))


def close(found, expected):
  for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
    np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6)


@pytest.mark.long
def test_a_round_of_fedsgd_is_a_step_on_all_samples(setting):
  federation, variables = setting({'share': 'gradient', 'batch_size': None}, server=optax.sgd(0.5))
  state, done = simulation.run_round(federation, simulation.start(federation, variables), KEY)
  gradient = gradient_of(variables['params'], federation.samples, federation.targets)
  expected = jax.tree.map(lambda p, g: p - 0.5 * g, variables['params'], gradient)
  close(state.variables['params'], expected)
  assert done.clients.tolist() == [0, 1, 2] and done.samples.tolist() == [3, 2, 3]
  np.testing.assert_allclose(done.update_norm, np.sqrt(sum(np.sum(g**2) for g in gradient.values())), rtol=1e-4)


@pytest.mark.long
@pytest.mark.parametrize(('weighting', 'weights'), [('samples', [3, 2, 3]), ('equal', [1, 1, 1])])
def test_a_round_of_fedavg_averages_clients_that_trained_alone(setting, weighting, weights):
  """Shuffled batches of two: clients of three samples end on a batch of one, and that of two takes no third step."""
  federation, variables = setting({'epochs': 2, 'batch_size': 2}, weighting=weighting)
  state = simulation.start(federation, variables)
  key = jax.random.fold_in(KEY, 0)
  draw = np.random.default_rng(np.asarray(jax.random.key_data(jax.random.fold_in(key, 0))).ravel())
  draw.choice(3, 3, replace=False), draw.random(3)
  deltas = []
  for part in PARTITION:
    part, params = draw.permutation(part), variables['params']
    for batch in (part[:2], part[2:]) * 2:
      if len(batch):
        gradient = gradient_of(params, federation.samples[batch], federation.targets[batch])
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient)
    deltas.append(jax.tree.map(jnp.subtract, params, variables['params']))
  mean = jax.tree.map(lambda *xs: np.average(np.stack(xs), axis=0, weights=weights), *deltas)
  found, _ = simulation.run_round(federation, state, KEY)
  close(found.variables['params'], jax.tree.map(jnp.add, variables['params'], mean))


@pytest.mark.long
def test_fedadam_steps_along_the_mean_delta(setting):
  server = optax.adam(0.01, eps=1e-3)
  federation, variables = setting(server=server)
  plain, _ = setting()
  averaged, _ = simulation.run_round(plain, simulation.start(plain, variables), KEY)
  found, _ = simulation.run_round(federation, simulation.start(federation, variables), KEY)
  with jax.numpy_dtype_promotion('standard'):
    mean = jax.tree.map(jnp.subtract, variables['params'], averaged.variables['params'])
    updates, _ = server.update(mean, server.init(variables['params']))
  close(found.variables['params'], optax.apply_updates(variables['params'], updates))


@pytest.mark.long
def test_groups_of_clients_change_nothing_but_rounding(setting):
  alone, variables = setting()
  together, _ = setting(group_size=3)
  ends = [simulation.run_round(f, simulation.start(f, variables), KEY)[0] for f in (alone, together)]
  close(ends[0].variables, ends[1].variables)


@pytest.mark.long
def test_who_never_answers_has_no_part(setting):
  federation, variables = setting(drop_out=1.0)
  state, done = simulation.run_round(federation, simulation.start(federation, variables), KEY)
  assert state.number == 1 and len(done.clients) == len(done.bytes_up) == 0
  jax.tree.map(np.testing.assert_array_equal, state.variables, variables)
  federation, _ = setting(drop_out=0.5, per_round=3)
  counts = [len(simulation.run_round(federation, state._replace(number=n), KEY)[1].clients) for n in range(12)]
  assert 0 < sum(counts) < 36 and len(set(counts)) > 1


@pytest.mark.long
def test_a_client_keeps_its_residual_until_it_takes_part_again(setting):
  dgc = defenses.dgc(ratio=0.1, momentum=0.9)
  federation, variables = setting({'upload': dgc}, per_round=2)
  state, kept = simulation.start(federation, variables), {}
  for _ in range(4):
    before = dict(state.kept)
    state, done = simulation.run_round(federation, state, KEY)
    assert set(state.kept) == set(before) | set(done.clients.tolist())
    for client, old in before.items():
      same = all(map(np.array_equal, jax.tree.leaves(old), jax.tree.leaves(state.kept[client])))
      assert same == (client not in done.clients)
    kept |= state.kept
  assert len(kept) == 3


@pytest.mark.long
def test_some_defend_themselves_and_others_do_not(setting):
  """One client sends its largest entries alone, two send everything; each is padded among its like."""
  dgc = {'upload': defenses.dgc(ratio=0.1)}
  federation, variables = setting(dgc, defended=(1,), weighting='equal')
  bare, guarded = setting()[0], setting(dgc)[0]

  def run(federation):
    return simulation.run_round(federation, simulation.start(federation, variables), KEY)

  def uploads(federation):
    drawn, _, generator = simulation.draw(federation, 0, KEY)
    key = jax.random.fold_in(jax.random.fold_in(KEY, 0), 1)
    found, _, _ = simulation._take_part(federation, simulation.start(federation, variables), drawn, generator, key)
    return [trees.take(found.update, i) for i in range(3)]

  (state, done), (_, plain), (_, compressed) = run(federation), run(bare), run(guarded)
  assert done.bytes_up.tolist() == [plain.bytes_up[0], compressed.bytes_up[1], plain.bytes_up[2]]
  assert compressed.bytes_up[1] < plain.bytes_up[1] / 4 and set(state.kept) == {1}
  plain, compressed = uploads(bare), uploads(guarded)
  parts = [plain[0], compressed[1], plain[2]]
  mean = jax.tree.map(lambda a, b, c: (a + b + c) / (2 + (b != 0)), *parts)
  close(state.variables['params'], jax.tree.map(jnp.add, variables['params'], mean))
  assert simulation._padded(federation, [PARTITION[1]], 2)['samples'].shape[1] == 2


def upload(linear, chain):
  client = Client(linear.client.model, 10, upload=chain)
  one = jax.jit(client.local_update)(KEY, linear.variables, linear.samples[:2], linear.targets[:2])
  return jax.tree.map(lambda x: np.asarray(x)[np.newaxis], one)


def test_bytes_are_those_of_what_was_sent(linear):
  """A kernel of 640 numbers and a bias of 10."""
  assert simulation.bytes_sent(upload(linear, optax.identity())).tolist() == [4 * 650]
  # Five in a hundred of each tensor: 32 numbers and their indices (a bit for each of 640 is shorter), and one of ten.
  assert simulation.bytes_sent(upload(linear, defenses.topk(ratio=0.05))).tolist() == [4 * 32 + 80 + 4 + 2]
  # One in a hundred: 7 numbers with an index each, which is shorter now; one of the bias.
  assert simulation.bytes_sent(upload(linear, defenses.topk(ratio=0.01))).tolist() == [4 * 7 + 28 + 4 + 2]
  half = defenses.fragmentation_random(ratio=0.5)
  assert simulation.bytes_sent(upload(linear, half)).tolist() in ([4 * 640 + 1], [4 * 10 + 1])


def test_bytes_of_a_large_tensor_are_not_negative():
  size = 6 * 10**8
  made = Upload({'a': np.broadcast_to(np.float32(0), (1, size))}, {'a': np.ones(1, bool)}, np.ones(1, np.int32))
  assert simulation.bytes_sent(made).tolist() == [4 * size]


def test_accuracy_of_targets_that_are_probabilities(linear):
  """Of ten samples and ten classes 3.6 were right."""
  model, variables = linear.client.model, linear.variables
  for number in (7, 10):
    samples, targets = linear.samples[:number], linear.targets[:number]
    samples, targets = np.resize(samples, (number, *samples.shape[1:])), np.resize(targets, number)
    expected = simulation.accuracy(model, variables, samples, targets)
    found = simulation.accuracy(model, variables, samples, np.eye(10, dtype=np.float32)[targets])
    assert found == pytest.approx(expected) and 0 <= found[0] <= 1


@pytest.mark.parametrize(
  ('defense', 'bits'),
  [
    (defenses.quantize(code='float16'), (640 * 16, 10 * 16)),
    (defenses.quantize(code='blockwise8'), (640 * 8 + 32, 10 * 8 + 32)),
    (defenses.quantize(code='normfloat4'), (640 * 4 + 10 * 32, 10 * 4 + 32)),
    (defenses.chain(defenses.topk(ratio=0.5), defenses.quantize(code='float16')), (320 * 16 + 640, 5 * 16 + 16)),
    (defenses.chain(defenses.quantize(code='float4'), defenses.gaussian(stddev=0.1)), (640 * 32, 10 * 32)),
    (defenses.chain(defenses.quantize(code='float16'), defenses.gaussian(stddev=0.0)), (640 * 16, 10 * 16)),
  ],
)
def test_bytes_of_a_code_are_those_of_its_bits(linear, defense, bits):
  made = upload(linear, defense)
  assert simulation.bytes_sent(made, defense.bits).tolist() == [sum(bits) // 8]


def test_the_adaptive_code_has_the_bits_of_its_levels(linear):
  """There are 2^b values at most, and more than 2^(b − 1) steps would take another bit."""
  defense = defenses.adaquant(weight=0.01)
  for leaf in jax.tree.leaves(upload(linear, defense).update):
    values, span = np.asarray(leaf), float(np.ptp(leaf))
    each = (int(defense.bits(values)[0]) - 64) / values[0].size
    assert each == max(1, math.ceil(math.log2(math.ceil(math.sqrt(span * 32 * math.log(4) / 0.01)))))
    assert len(np.unique(values)) <= 2**each


@pytest.mark.long
def test_a_training_counts_the_bytes_of_the_code(setting):
  defense = defenses.quantize(code='float16')
  for defended, left in ((None, 3 / 6), ((0,), 5 / 6)):  # three clients take part
    federation, variables = setting({'upload': defense}, bits=defense.bits, defended=defended)
    plain, _ = setting({'upload': defense}, defended=defended)
    done, before = (
      simulation.run_round(one, simulation.start(one, variables), KEY)[1].bytes_up for one in (federation, plain)
    )
    assert done.sum() == pytest.approx(before.sum() * left)


class Stop(Exception):
  pass


@pytest.mark.long
def test_a_training_that_diverged_says_so_when_it_is_read_again(setting, tmp_path):
  """Its loss was None then, and pages named the number of rounds as the cause."""
  federation, variables = setting({'optimizer': optax.chain(optax.sgd(1e30), optax.scale(1e30))})
  test = federation.samples, federation.targets
  for _ in range(2):
    _, rows = training.train(KEY, federation, variables, 2, test=test, workdir=tmp_path / 'new')
    assert math.isnan(rows[-1]['loss']) and math.isnan(rows[-1]['update_norm'])


def test_a_norm_beyond_float32_is_the_same_when_it_is_read_again(setting, tmp_path):
  federation, variables = setting({'optimizer': optax.sgd(1e22)})
  norms = [training.train(KEY, federation, variables, 1, workdir=tmp_path / 'new')[1][0]['update_norm'] for _ in '12']
  assert np.isnan(norms).all()


@pytest.mark.long
@pytest.mark.parametrize('defense', [{}, {'upload': defenses.dgc(ratio=0.1)}], ids=['none', 'dgc'])
def test_resumed_after_a_stop_is_what_was_never_stopped(setting, tmp_path, defense):
  federation, variables = setting(defense, per_round=2, server=optax.sgd(1.0, 0.9))
  test = federation.samples, federation.targets
  whole, rows = training.train(KEY, federation, variables, 6, test=test, workdir=tmp_path / 'whole')

  def stop(row, state, seconds):
    if row['round'] == 4:
      raise Stop

  with pytest.raises(Stop):
    training.train(KEY, federation, variables, 6, test=test, workdir=tmp_path / 'new', on_round=stop)
  seen = []
  call = {'test': test, 'workdir': tmp_path / 'new', 'on_round': lambda row, *_: seen.append(row['round'])}
  found, again = training.train(KEY, federation, variables, 6, **call)
  assert again == rows and len(rows) == 6
  assert seen[-3:] == [4, 5, 6]  # what was stopped after the round is done for it again
  jax.tree.map(np.testing.assert_array_equal, found, whole)
  assert (tmp_path / 'new' / 'rounds.jsonl').read_bytes() == (tmp_path / 'whole' / 'rounds.jsonl').read_bytes()
  finished, same = training.train(KEY, federation, variables, 6, test=test, workdir=tmp_path / 'new', on_round=stop)
  assert same == rows and finished.number == 6
  with pytest.raises(errors.UsageError, match='holds a training of 6 rounds, and 3 are asked for'):  # it never ended
    training.train(KEY, federation, variables, 3, test=test, workdir=tmp_path / 'new', on_round=stop)


@pytest.mark.long
@pytest.mark.parametrize(
  ('client', 'server'), [({'upload': defenses.dgc(ratio=0.1)}, {}), ({}, {'server': optax.adam(1.0)})]
)
def test_a_checkpoint_of_another_state_is_refused(setting, tmp_path, client, server):
  """As one that an earlier version wrote may be."""
  federation, variables = setting(client, **server)
  training.train(KEY, federation, variables, 1, workdir=tmp_path / 'run')
  with pytest.raises(errors.UsageError, match='a checkpoint does not fit'):
    training.train(KEY, setting()[0], variables, 2, workdir=tmp_path / 'run')


@pytest.mark.long
def test_a_folder_keeps_the_group_size_that_it_began_with(setting, tmp_path, monkeypatch):
  federation, variables = setting({}, per_round=2)
  sizes, run_round = [], simulation.run_round

  def spied(federation, *arguments):
    sizes.append(federation.at_once)
    return run_round(federation, *arguments)

  monkeypatch.setattr(simulation, 'run_round', spied)
  for rounds, size in ((1, 1), (2, 2)):
    asked = dataclasses.replace(federation, group_size=size)
    training.train(KEY, asked, variables, rounds, workdir=tmp_path / 'run')
  assert sizes == [1, 1]


@pytest.mark.long
def test_training_learns_eight_digits(setting):
  federation, variables = setting({'epochs': 3})
  _, rows = training.train(KEY, federation, variables, 40, test=(federation.samples, federation.targets))
  assert rows[0]['accuracy'] < 0.8 and rows[-1]['accuracy'] == 1
  assert rows[-1]['loss'] < rows[0]['loss'] / 3


@pytest.mark.parametrize(
  ('changed', 'words'),
  [
    ({'per_round': 4}, r'per_round is 4, expected an integer in \[1, 3\]'),
    ({'partition': [*PARTITION, np.arange(0)]}, 'client 3 has no samples'),
    ({'client': {'batch_size': 4, 'drop_last': True}}, '3 samples do not fill one batch of 4'),
    ({'client': {'cohort': 2}}, 'cohort is 2, which would divide the samples of each client'),
    ({'defended': (0, 3)}, r'defended client is 3, expected an integer in \[0, 2\]'),
  ],
)
def test_what_cannot_be_is_named(setting, changed, words):
  with pytest.raises(errors.UsageError, match=words):
    setting(**changed)


@pytest.mark.long
def test_noise_at_the_server_is_geyers_mean_of_those_who_answered(setting):
  federation, variables = setting(drop_out=0.5, server_noise=0.7)
  state = simulation.start(federation, variables)
  drawn, answers, _ = simulation.draw(federation, 0, KEY)
  assert 0 < answers.sum() < len(drawn)  # otherwise nothing is told apart
  quiet, _ = simulation.run_round(dataclasses.replace(federation, server_noise=1e-9), state, KEY)
  noisy, _ = simulation.run_round(federation, state, KEY)

  def moved(after):
    return np.concatenate([np.ravel(x - y) for x, y in zip(*map(jax.tree.leaves, after), strict=True)])

  alone, participate = [], jax.jit(federation.client.participate)
  for client in drawn[answers]:
    one = dataclasses.replace(federation, server_noise=0.0, drop_out=0.0)
    _, _, generator = simulation.draw(federation, 0, KEY)
    lane = simulation._padded(one, [generator.permutation(PARTITION[member]) for member in drawn], 3)
    row = list(drawn).index(client)
    key = jax.random.fold_in(jax.random.fold_in(jax.random.fold_in(KEY, 0), 1), client)
    upload, _, _ = participate(key, variables, lane['samples'][row], lane['targets'][row], lane['weights'][row])
    alone.append(moved((upload.update, jax.tree.map(np.zeros_like, upload.update))))
  norms = np.linalg.norm(alone, axis=1)
  bound = np.median(norms)
  mean = np.mean([x * min(1, bound / norm) for x, norm in zip(alone, norms, strict=True)], axis=0)
  found = moved((quiet.variables['params'], variables['params']))
  np.testing.assert_allclose(found, mean, rtol=1e-3, atol=1e-6)
  noise = moved((noisy.variables['params'], quiet.variables['params']))
  assert np.std(noise) == pytest.approx(0.7 * bound / answers.sum(), rel=0.1)


def test_participations_count_who_answered(setting):
  federation, variables = setting(per_round=2, drop_out=0.3)
  state, counts = simulation.start(federation, variables), np.zeros(3, int)
  for _ in range(6):
    np.testing.assert_array_equal(simulation.after(federation, state, KEY) - counts >= 0, True)
    state, done = simulation.run_round(federation, state, KEY)
    counts[done.clients] += 1
  np.testing.assert_array_equal(state.participations, counts)
  assert 0 < counts.sum() < 12


@pytest.mark.long
def test_the_budget_stops_training_before_the_round_that_would_exceed_it(setting, tmp_path):
  """Three clients, all of them in every round: after r rounds each has sent r times."""
  chain = defenses.client_dp(norm=1, noise=5)
  ledger = accounting.ledger(chain)
  federation, variables = setting({'upload': chain})
  budget = ledger.epsilon(4, 4).value + 1e-6
  given = {'test': (federation.samples, federation.targets), 'evaluate_every': 3, 'workdir': tmp_path / 'new'}
  given['privacy'] = dataclasses.replace(ledger, budget=budget)
  state, rows = training.train(KEY, federation, variables, 9, **given)
  assert state.number == len(rows) == 4
  assert [row['epsilon'] for row in rows] == [ledger.epsilon(r, r).value for r in range(1, 5)]
  assert {(row['epsilon_relation'], row['epsilon_unit']) for row in rows} == {('replace one', 'client')}
  assert progress._status(rows[0]) == f'ε {rows[0]["epsilon"]:.3g} (replace one, per client)'
  assert [('accuracy' in row) for row in rows] == [False, False, True, True]
  _, again = training.train(KEY, federation, variables, 9, **given)
  assert again == rows
  with pytest.raises(errors.UsageError, match=r'the first round alone costs ε = \d\.\d+ \(replace one, per client, '):
    training.train(
      KEY, federation, variables, 9, privacy=dataclasses.replace(ledger, budget=ledger.epsilon(1, 1).value / 2)
    )


@pytest.mark.parametrize(
  ('changed', 'ledger', 'message'),
  [
    ({}, {'server_noise': 1.1}, 'counts server noise of 1.1, and the federation has 0.0'),
    ({'server_noise': 1.1}, {}, 'counts server noise of 0.0, and the federation has 1.1'),
    ({'server_noise': 1.1, 'per_round': 2}, {'server_noise': 1.1, 'sampling_rate': 0.1}, '2 of 3 clients are drawn'),
    ({'defended': (0, 2)}, {}, 'client 1 trains without it'),
    ({'partition': [[0, 1], [1, 2], [3]]}, {}, 'some samples are held by several clients or more than once by one'),
    ({'partition': [[0, 0], [1, 2], [3]]}, {}, 'more than once by one'),
    ({'epochs': 2, 'share': 'delta'}, {}, 'counts 1 local epochs, and clients train for 2'),
    ({}, {}, 'counts the noise of clients, and they have no defense'),
    ({'server_noise': 1.1}, {'server_noise': 1.1}, 'counts the noise of clients, and they have no defense'),
  ],
)
def test_a_ledger_of_another_federation_is_refused(setting, changed, ledger, message):
  """Each of them had the ε of a training with less to account for."""
  own = {name: value for name, value in changed.items() if name in ('epochs', 'share')}
  federation, variables = setting(own, **{name: changed[name] for name in changed.keys() - own.keys()})
  unit = 'client' if 'server_noise' in changed else 'example'
  privacy = accounting.Ledger((defenses.Mechanism(2.0, unit),), **ledger)
  with pytest.raises(errors.UsageError, match=message):
    training.train(KEY, federation, variables, 1, privacy=privacy)


@pytest.mark.slow
def test_the_seconds_of_a_round_are_split(setting):
  """A defense that does ten thousand times too much shows in its own part."""

  def slow(updates, state, params=None, **extra):
    spun = jax.lax.fori_loop(0, 2000, lambda i, x: jnp.sin(x), jnp.full((64, 640), 0.5, jnp.float32))
    return jax.tree.map(lambda u: u + 0 * jnp.sum(spun), updates), state

  chain = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), slow)
  federation, variables = setting({'upload': chain}, per_round=1)
  without, added = training.seconds_split(federation, variables, KEY, repeats=3, seconds=0)
  assert 0 < without < added


@pytest.mark.long
def test_a_defense_at_the_server_is_handed_each_upload(setting):
  """Uploads that are clipped one by one, and their mean, as Flower's strategy wrapper does it."""
  given = {'share': 'gradient', 'batch_size': None}
  federation, variables = setting(
    given, server=optax.sgd(0.5), chain=defenses.server_dp(norm=0.3, noise=0.0, clients=3)
  )
  state, _ = simulation.run_round(federation, simulation.start(federation, variables), KEY)
  expected = jax.tree.map(jnp.zeros_like, variables['params'])
  for members, weight in zip(PARTITION[:3], (3, 2, 3), strict=True):
    gradient = gradient_of(variables['params'], federation.samples[members], federation.targets[members])
    norm = np.sqrt(sum(np.sum(g**2) for g in gradient.values()))
    assert norm > 0.3
    expected = jax.tree.map(lambda e, g, w=weight, n=norm: e + w / 8 * 0.3 / n * g, expected, gradient)
  close(state.variables['params'], jax.tree.map(lambda p, e: p - 0.5 * e, variables['params'], expected))


def test_a_defense_that_runs_the_network_again_is_told_what_only_fills_a_batch(linear):
  seen = []

  def update(updates, state, params=None, **given):
    seen.append(masked.counted(given['batch'][0]))
    return updates, state

  step = optax.GradientTransformationExtraArgs(optax.init_empty_state, update)
  client = Client(linear.client.model, 10, share='delta', optimizer=optax.sgd(0.1), batch_size=2, step=step)
  jax.eval_shape(client.local_update, KEY, linear.variables, linear.samples[:3], linear.targets[:3])
  assert len(seen) == 1 and seen[0].shape[0] == 2


@pytest.mark.long
@pytest.mark.parametrize('changed', [{'server_noise': 1.0}, {'chain': defenses.gaussian(stddev=1.0)}], ids=str)
def test_noise_at_the_server_moves_no_frozen_layer(changed):
  model = gl.models.mlp(10, widths=4)
  client = Client(model, 10, frozen=('Dense_0',))
  variables = model.init(KEY, (2, 2, 1))
  images, labels = jnp.full((8, 2, 2, 1), 0.5), jnp.arange(8)
  server = optax.chain(optax.add_decayed_weights(0.1), optax.sgd(0.5))
  federation = simulation.Federation(client, images, labels, PARTITION, 2, server=server, **changed)
  state, _ = simulation.run_round(federation, simulation.start(federation, variables), KEY)
  before, after = variables['params'], state.variables['params']
  jax.tree.map(np.testing.assert_array_equal, after['Dense_0'], before['Dense_0'])
  assert np.abs(after['Dense_1']['kernel'] - before['Dense_1']['kernel']).max() > 0.01


@pytest.mark.long
def test_noise_at_the_server_is_not_thrown_away(setting):
  """The mean of the raw uploads took the place of the noisy one, and the ε of the noise was still stated."""
  chain = defenses.server_dp(norm=0.3, noise=0.0, clients=3)
  words = 'server_dp computes anew the mean that server_noise is added to'
  with pytest.raises(errors.UsageError, match=words):
    setting(chain=chain, server_noise=1.0)
  with pytest.raises(errors.UsageError, match=words):
    accounting.ledger(chain, server_noise=1.0)

  def update(updates, state, params=None, *, uploads=None, **extra):
    mean = updates if uploads is None else jax.tree.map(lambda u: jnp.mean(u, axis=0), uploads)
    return jax.tree.map(lambda u: u * 0.5, mean), state

  def required(updates, state, params=None, *, uploads, **extra):
    return jax.tree.map(lambda u: jnp.mean(u, axis=0), uploads), state

  own, needy = (optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), x) for x in (update, required))
  federation, variables = setting(server_noise=1.0)
  steps = []
  for one in (federation, dataclasses.replace(federation, chain=own)):
    state, _ = simulation.run_round(one, simulation.start(one, variables), KEY)
    steps.append(jax.tree.map(jnp.subtract, state.variables['params'], variables['params']))
  close(jax.tree.map(lambda u: 0.5 * u, steps[0]), steps[1])
  for noise in (0.0, 1.0):
    one = dataclasses.replace(federation, chain=defenses.wrap(needy, 'round'), server_noise=noise)
    if not noise:
      simulation.run_round(one, simulation.start(one, variables), KEY)
      continue
    with pytest.raises(errors.UsageError, match='the defense own needs what it is not handed at its place'):
      simulation.run_round(one, simulation.start(one, variables), KEY)
