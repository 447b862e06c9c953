"""TAG and LAMP: what is moved of texts, the moves, and the n-gram model."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradleak as gl
from gradleak import Knowledge, Observation
from gradleak.attacks import base
from gradleak.attacks import text as attacks
from gradleak.attacks.matching import distances
from gradleak.modalities import PLAIN, of_config
from gradleak.modalities.text import table
from gradleak.priors import ngram
from tests import texts
from tests.attackers import run

KEY = jax.random.key(3)


def observed(scenario, number=1, first=0, **known):
  """Returns the `Observation` of some notes."""
  samples, labels = (jnp.asarray(x[first : first + number]) for x in (scenario.samples, scenario.targets))
  client = scenario.client
  update = jax.jit(client.local_update)(None, scenario.variables, samples, labels).update
  encoded = client.loss.targets.encode(labels, client.num_classes, jnp.float32)
  knowledge = Knowledge(labels='known', label_inference='idlg')
  return Observation(
    scenario.variables, update, encoded, knowledge, samples.shape, client.num_classes, **known
  ), samples


def found_by(attack, observation, key=KEY):
  return run(attack, key, observation)[0]


@pytest.fixture(scope='module')
def scenario():
  return texts.scenario(number=101)


@pytest.mark.long
def test_tag_reads_a_note(scenario):
  observation, samples = observed(scenario)
  found = found_by(gl.attacks.tag(steps=120, decay='cosine')(scenario.client), observation)
  assert found.samples.dtype == jnp.int32 and found.samples.shape == samples.shape
  assert float(found.objective) < 0.2 * float(found.objective_start)
  assert (np.asarray(found.samples) == np.asarray(samples)).mean() >= 0.8


@pytest.mark.slow
def test_noise_in_place_of_an_upload_shows_nothing(scenario):
  observation, samples = observed(scenario)
  noise = jax.tree.map(lambda x: jax.random.normal(jax.random.key(x.size), x.shape), observation.update)
  found = found_by(
    gl.attacks.tag(steps=60, decay='cosine')(scenario.client), dataclasses.replace(observation, update=noise)
  )
  assert (np.asarray(found.samples) == np.asarray(samples)).mean() <= 0.3


@pytest.mark.long
def test_what_is_not_finite_is_no_token(scenario):
  observation, _ = observed(scenario)
  dead = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), observation.update)
  found = found_by(gl.attacks.tag(steps=2)(scenario.client), dataclasses.replace(observation, update=dead))
  assert int(found.diverged_step) == 0 and (np.asarray(found.samples) == -1).all()


@pytest.mark.slow
@pytest.mark.parametrize('relaxation', ['softmax', 'embeddings'])
def test_the_objective_is_zero_at_the_truth(relaxation):
  made = texts.scenario('cross_entropy', 'last', number=8)
  observation, samples = observed(made, 2)
  for method in (
    gl.attacks.tag(relaxation=relaxation, steps=2),
    gl.attacks.lamp(relaxation=relaxation, steps=2, starts=1),
  ):
    attack = method(made.client)
    at_truth = float(attack.objective(observation, samples, observation.targets))
    start = float(found_by(attack, dataclasses.replace(observation, prepared=prior(made))).objective_start)
    if relaxation == 'softmax':  # of embeddings the term of their size is left in LAMP's
      assert abs(at_truth) < 1e-5 * max(1.0, start)
    assert at_truth < start


def prior(scenario):
  return ngram.fitted(np.asarray(scenario.public[0]), scenario.settings['tokeniser']['size'])


def test_embeddings_and_probabilities_are_settled_on_their_tokens(scenario):
  kind, client = scenario.client.modality, scenario.client
  samples = jnp.asarray(scenario.samples[:3])
  for name in ('softmax', 'embeddings'):
    form = kind.relaxation(name, client.model)
    relaxed = form.relaxed(samples, scenario.variables)
    assert relaxed.shape == form.shape(samples.shape, scenario.variables)
    assert np.array_equal(form.decide(relaxed, scenario.variables), samples)
  assert kind.relaxation('', client.model) is not PLAIN
  with pytest.raises(gl.UsageError, match='unknown relaxation'):
    kind.relaxation('logits', client.model)
  with pytest.raises(gl.UsageError, match='images are moved as they are'):
    gl.modalities.IMAGES.relaxation('softmax', None)


@pytest.mark.long
@pytest.mark.parametrize(
  ('size', 'loss'),
  [
    (264, 'masked_token'),
    *(
      pytest.param(*one, marks=pytest.mark.slow)
      for one in ((256, 'masked_token'), (264, 'next_token'), (256, 'next_token'))
    ),
  ],
)
def test_a_vocabulary_that_is_rounded_or_lacks_what_was_added_is_searched(size, loss):
  model = gl.models.gpt(size, 'default', vocabulary=size, padding=None, width=8, layers=1, heads=2, head='next')
  samples = np.frombuffer(b'a text', np.uint8).astype(np.int32)[None]
  made = gl.scenario(model, samples, [0], key=KEY, modality=gl.modalities.TEXT, loss=loss)
  form = gl.modalities.TEXT.relaxation('softmax', model)
  assert form.shape((1, 6), None) == (1, 6, size)
  rising = jnp.asarray(np.broadcast_to(np.linspace(0, 1, size, dtype=np.float32), (1, 6, size)))
  assert (np.asarray(form.decide(rising, None)) == min(size, 258) - 1).all()  # of bytes, padding and the mask
  observation, _ = observed(made)
  attack = gl.attacks.tag(steps=2)(made.client)
  assert float(attack.objective(observation, jnp.asarray(samples), observation.targets)) < 1e-6
  found = found_by(attack, observation)
  assert np.isfinite(float(found.objective)) and int(np.max(found.samples)) < 258


def test_both_norms_are_a_sum_of_squares_and_magnitudes():
  rng = np.random.default_rng(0)
  a, b, w = ({'x': rng.normal(size=(3, 2)), 'y': rng.normal(size=4)} for _ in range(3))
  w = {name: np.abs(value) for name, value in w.items()}
  trees = [jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), one) for one in (a, b, w)]
  expected = sum((w[n] * (a[n] - b[n]) ** 2).sum() + 0.3 * (np.sqrt(w[n]) * np.abs(a[n] - b[n])).sum() for n in a)
  assert float(distances.both_norms(*trees, alpha=0.3)) == pytest.approx(expected, rel=1e-5)
  plain = sum(((a[n] - b[n]) ** 2).sum() for n in a)
  assert float(distances.both_norms(*trees[:2], alpha=0.0)) == pytest.approx(plain, rel=1e-5)


def test_a_silent_parameter_is_so_with_its_adapters():
  update = {'wte': {'embedding': {'a': jnp.ones(1), 'b': jnp.ones(1)}}, 'h': jnp.ones(2)}
  given = Observation({}, update, jnp.zeros((1, 2)), Knowledge(labels='unused'), (1, 4), 2)
  weights = distances.Comparison().without(given, ('wte', 'embedding')).weights
  assert [float(x.sum()) for x in jax.tree.leaves(weights)] == [2, 0, 0]


def test_the_mean_cosine_leaves_out_what_was_not_sent():
  a = {'x': jnp.asarray([1.0, 0.0]), 'y': jnp.asarray([1.0, 1.0]), 'z': jnp.asarray([5.0])}
  b = {'x': jnp.asarray([0.0, 2.0]), 'y': jnp.asarray([3.0, 3.0]), 'z': jnp.asarray([0.0])}
  assert float(distances.mean_cosine(a, b)) == pytest.approx((1 + 0) / 2, abs=1e-6)
  weights = {'x': jnp.zeros(2), 'y': jnp.ones(2), 'z': jnp.ones(1)}
  assert float(distances.mean_cosine(a, b, weights)) == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize('seed', range(24))
def test_moves_keep_the_tokens_of_a_sequence_and_the_padding(seed):
  tokens = jnp.asarray([[5, 6, 7, 8, 9, 0, 0], [11, 12, 13, 14, 15, 16, 17]])
  made = jnp.stack([tokens, tokens * 2], axis=-1).astype(jnp.float32)
  found = np.asarray(attacks.ordered(made, attacks.order(jax.random.key(seed), tokens, 0)))
  assert np.array_equal(found[..., 1], 2 * found[..., 0])
  changed = [row for row in range(2) if not np.array_equal(found[row, :, 0], tokens[row])]
  assert len(changed) <= 1
  for row in range(2):
    assert sorted(found[row, :, 0]) == sorted(np.asarray(tokens[row]))
  assert (found[0, 5:, 0] == 0).all()


def test_padding_is_that_of_any_network_of_tokens():
  known = {kind: base.padding_of(texts.scenario('cross_entropy', 'last', kind, 2).client) for kind in ('lstm', 'gpt')}
  assert known == {'lstm': texts.notes(2).known['padding'], 'gpt': texts.notes(2).known['padding']}


@pytest.mark.long
def test_moves_are_of_all_kinds():
  tokens = jnp.arange(2, 10)[jnp.newaxis]
  made = tokens[..., jnp.newaxis].astype(jnp.float32)
  found = {
    tuple(np.asarray(attacks.ordered(made, attacks.order(jax.random.key(seed), tokens, 0)))[0, :, 0].astype(int))
    for seed in range(200)
  }
  start = list(range(2, 10))
  assert any(sum(a != b for a, b in zip(one, start, strict=True)) == 2 for one in found)  # two change places
  assert any(one != tuple(start) and one == tuple(start[k:] + start[:k]) for one in found for k in range(3, 6))
  assert len(found) > 60


def reference(tokens, size, sequence):
  """The bigram model, counted in dictionaries."""
  single, pairs, before = {}, {}, {}
  for line in tokens.tolist():
    for token in line:
      single[token] = single.get(token, 0) + 1
    for a, b in itertools.pairwise(line):
      pairs[a, b] = pairs.get((a, b), 0) + 1
      before[a] = before.get(a, 0) + 1
  total = sum(single.values()) + size
  alone = {token: (single.get(token, 0) + 1) / total for token in range(size)}
  firsts = [line[0] for line in tokens.tolist()]
  k = ngram.STRENGTH
  found = np.log((firsts.count(sequence[0]) + k * alone[sequence[0]]) / (len(firsts) + k))
  for a, b in itertools.pairwise(sequence):
    found += np.log((pairs.get((a, b), 0) + k * alone[b]) / (before.get(a, 0) + k))
  return -found / len(sequence)


@pytest.mark.long
def test_the_bigram_model_is_that_of_its_formula():
  rng = np.random.default_rng(2)
  tokens = rng.integers(0, 7, (20, 6))
  model = ngram.fitted(tokens, 7)
  asked = rng.integers(0, 7, (5, 6))
  expected = [reference(tokens, 7, line) for line in asked.tolist()]
  np.testing.assert_allclose(ngram.surprise(model, jnp.asarray(asked)), expected, rtol=1e-5)
  assert float(ngram.surprise(model, jnp.asarray(tokens)).mean()) < np.mean(expected)
  with pytest.raises(gl.UsageError, match='sequences'):
    ngram.fitted(np.zeros(3, int), 7)


def test_pairs_of_a_large_vocabulary_share_places():
  tokens = np.asarray([[7, 60_000, 1], [7, 60_000, 2]])
  model = ngram.fitted(tokens, 70_000)
  seen, other = (float(ngram.surprise(model, jnp.asarray([[7, b, 1]]))[0]) for b in (60_000, 60_001))
  assert model.pairs.size == 1 << 22 and seen < other - 2


@pytest.mark.long
@pytest.mark.parametrize('starts', [1, 3])
def test_the_keys_of_starts_and_moves_are_disjoint(scenario, monkeypatch, starts):
  """None is another one, nor one of its children, with which it draws."""
  begun = []

  def init(self, key, observation):
    jax.debug.callback(lambda data: begun.append(np.asarray(data)), jax.random.key_data(key))
    return original(self, key, observation)

  original = attacks.Alternating.init
  monkeypatch.setattr(attacks.Alternating, 'init', init)
  observation, _ = observed(scenario, prepared=prior(scenario))
  attack = gl.attacks.lamp(steps=2, starts=starts, moves=1)(scenario.client)
  moves = jax.random.wrap_key_data(attack.init(KEY, observation).key)
  jax.effects_barrier()
  first = [jax.random.wrap_key_data(data) for data in np.unique(begun, axis=0)]
  families = [[one, *jax.random.split(one, 8)] for one in (*first, moves)]
  drawn = {tuple(np.asarray(jax.random.key_data(one)).tolist()) for family in families for one in family}
  assert len(first) == starts and len(drawn) == 9 * (starts + 1)


@pytest.mark.slow
def test_lamp_alternates(scenario):
  observation, samples = observed(scenario, prepared=None)
  observation = dataclasses.replace(observation, prepared=prior(scenario))
  found = found_by(gl.attacks.lamp(steps=120, starts=2, moves=2, every=20)(scenario.client), observation)
  assert (np.asarray(found.samples) == np.asarray(samples)).mean() >= 0.5
  with pytest.raises(gl.UsageError, match='lamp'):
    gl.attacks.lamp(moves=0)


@pytest.mark.long
def test_what_is_of_pixels_is_refused(scenario):
  client = scenario.client
  for method, message in (
    (gl.attacks.csdlg(), 'tv is not defined on texts'),
    (gl.attacks.tag(decoys=1), 'decoys is not defined on texts'),
    (gl.attacks.tag(start='uniform'), 'start is not defined on texts'),
    (gl.attacks.tag(generator='untrained'), 'generator is not defined on texts'),
    (gl.attacks.tag(relaxation='pixels'), 'unknown relaxation'),
  ):
    with pytest.raises(gl.UsageError, match=message):
      method(client)
  with pytest.raises(gl.UsageError, match='images are moved as they are'):
    gl.attacks.tag()(gl.Client(gl.models.create('mlp(widths=4)', 3), 3))
  lstm = texts.scenario(kind='lstm', number=8)
  with pytest.raises(gl.UsageError, match='does not say where its embeddings of tokens are'):
    attack = gl.attacks.tag(relaxation='embeddings')(lstm.client)
    jax.eval_shape(attack.init, KEY, observed(lstm)[0])


def test_embeddings_that_are_not_known_or_look_like_probabilities_are_refused():
  model = gl.models.create('gpt(vocabulary=5,width=4,layers=1,heads=1,padding=None)', 2)
  square = model.first_block._replace(parts=lambda variables: (np.eye(5),))
  for block, told in ((None, 'does not say where its embeddings'), (square, 'embeds 5 tokens in as many numbers')):
    with pytest.raises(gl.UsageError, match=told):
      table({}, model._replace(first_block=block))


def test_settings_remake_the_modality():
  found = of_config(texts.notes(2).settings)
  assert found is of_config(texts.notes(3).settings) and found.name == 'text'
  pieces = found.marked(np.asarray([5, 6, 0, 7]), np.asarray([5, 9, 6, 0]))
  assert [piece.right for piece in pieces] == [True, False, False, False]
