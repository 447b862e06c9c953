"""Decepticons: texts in the gradient of the first block, its bins and marks, and what it refuses."""

import dataclasses
import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradleak as gl
from gradleak.audit import granted
from gradleak.audit.plan import plan
from gradleak.audit.settings import AuditSettings
from gradleak.core import trees
from gradleak.models.lora import lora
from gradleak.servers import decepticons as attack
from gradleak.threat import Knowledge, Observation
from tests import texts

LENGTH = 16
module = importlib.import_module('gradleak.servers.decepticons')


@functools.cache
def scenario(kind, head, loss, width=64, public=True, **settings):
  data, known = texts.notes(60, length=LENGTH), texts.notes(100, 'train', length=LENGTH)
  model, _ = texts.network(head, kind, length=LENGTH, width=width, layers=2, heads=4)
  return gl.scenario(
    model,
    data.samples,
    data.targets,
    key=jax.random.key(0),
    modality=texts.of_config(data.settings),
    loss=loss,
    public=(known.samples, known.targets) if public else None,
    **settings,
  )


def sent(given, seed=0):
  method = attack().server
  return method.build(method.numbers).prepare(jax.random.key(seed), given, 4)


def observed(given, first, number, change=None):
  """Returns the private texts, and the `Observation` of the upload that the server reads."""
  ids, labels = jnp.asarray(given.samples[first : first + number]), given.targets[first : first + number]
  update = jax.jit(given.client.local_update)(None, given.variables, ids, labels).update
  update = jax.tree.map(np.asarray, update if change is None else change(update))
  outputs, knowledge = given.client.num_classes, Knowledge(labels='unused', share=given.client.share)
  return np.asarray(ids), Observation(
    given.variables, update, jnp.zeros((number, outputs)), knowledge, ids.shape, outputs
  )


def read(given, observation):
  made = attack()(given.client)
  return np.asarray(made.reconstruct(made.init(jax.random.key(0), observation), observation).samples)


@pytest.mark.slow
@pytest.mark.parametrize('public', [True, False])
def test_an_encoder_gives_its_texts_away_exactly(public):
  """More tokens than features, in one upload."""
  given = sent(scenario('bert', 'mean', 'cross_entropy', public=public))
  ids, observation = observed(given, 0, 6)
  assert np.sum(ids != 0) > 64
  assert {*map(tuple, read(given, observation))} == {*map(tuple, ids)}


@pytest.mark.long
def test_a_decoder_gives_its_texts_away_but_for_targets_that_are_only_targets():
  given = sent(scenario('gpt', 'next', 'next_token'))
  ids, observation = observed(given, 0, 4)
  found = read(given, observation)
  starts = {tuple(row[: np.sum(row != 0) - 1]) for row in ids}
  assert starts <= {tuple(row[: len(start)]) for row in found for start in starts}


@pytest.mark.long
def test_texts_that_the_bins_do_not_explain_are_left_out():
  given = sent(scenario('gpt', 'mean', 'cross_entropy'))
  ids, observation = observed(given, 0, 3)
  places = module.places_of(given.client.model, given.variables['params'])
  bins = module.bins_of(places, given.variables, observation.update, LENGTH, 0)
  held = {}
  for pair in module.pairs_of(bins):
    held.setdefault(pair.bin, []).append(pair)
  right = [tuple(int(x) for x in row if x) for row in ids]
  assert module._sure(bins, held, right, True) == right
  mixed = [right[0][:6] + right[1][6:], right[1][:6] + right[0][6:], right[2]]
  assert not {*mixed[:2]} & {*module._sure(bins, held, mixed, True)}
  assert right[0][:8] not in module._sure(bins, held, [right[0][:8], *right[1:]], True)


@pytest.mark.long
@pytest.mark.parametrize('public', [True, False])
def test_bins_are_filled_by_tokens_and_not_by_padding(monkeypatch, public):
  """At the last positions, most public texts have padding alone."""
  seen = []

  def watched(values, weights, bins):
    seen.append(weights)
    return thresholds(values, weights, bins)

  thresholds = module.thresholds
  monkeypatch.setattr(module, 'thresholds', watched)
  given = sent(scenario('bert', 'mean', 'cross_entropy', public=public))
  assert given.client.model.padding == 0 and not seen[0][0].any() and seen[0][1:].sum() > 100


@pytest.mark.slow
def test_noise_hides_them_and_shows_no_text():
  given = sent(scenario('bert', 'mean', 'cross_entropy'))

  def noisy(update):
    return jax.tree.map(lambda x: x + jax.random.normal(jax.random.key(x.size), x.shape), update)

  _, observation = observed(given, 0, 4, noisy)
  assert (read(given, observation) == 0).all()
  _, observation = observed(given, 0, 4, lambda update: jax.tree.map(jnp.zeros_like, update))
  assert (read(given, observation) == 0).all()


@pytest.mark.long
def test_the_bins_hold_the_tokens_of_the_batch_and_no_others():
  given = sent(scenario('gpt', 'mean', 'cross_entropy'))
  ids, observation = observed(given, 0, 3)
  places = module.places_of(given.client.model, given.variables['params'])
  bins = module.bins_of(places, given.variables, observation.update, LENGTH, 0)
  found = {(pair.token, pair.place) for pair in module.pairs_of(bins)}
  assert found == {(int(token), place) for row in ids for place, token in enumerate(row) if token}


@pytest.mark.long
def test_what_is_sent_is_what_is_read():
  honest = scenario('gpt', 'mean', 'cross_entropy')
  given, other = sent(honest), sent(honest, 1)
  places = module.places_of(given.client.model, given.variables['params'])
  params = given.variables['params']
  up = trees.get(params, places.up)
  kernel, bias = np.asarray(up['kernel']), np.asarray(up['bias'])
  np.testing.assert_array_equal(kernel, np.repeat(kernel[:, :1], kernel.shape[1], axis=1))
  assert (np.diff(bias) < 0).all()
  inputs = np.asarray(trees.get(params, places.tokens))[:, None] + np.asarray(trees.get(params, places.positions))[None]
  np.testing.assert_allclose(inputs.mean(axis=-1), 0, atol=1e-5)
  np.testing.assert_allclose(np.square(inputs).mean(axis=-1), 1, atol=1e-5)
  measured = inputs[:, :LENGTH] @ kernel[:, 0]
  assert (measured[:, 1:].min(axis=0) > measured[:, :-1].max(axis=0)).all()  # one position after the other
  fired = np.sum(measured[..., None] + bias > 0, axis=-1)
  assert fired.min() >= 1 and [len(set(fired[:, t]) & set(fired[:, t + 1])) for t in range(LENGTH - 1)].count(0) == 15
  assert not np.allclose(kernel, np.asarray(trees.get(other.variables['params'], places.up)['kernel']))
  changed = jax.tree.map(lambda a, b: not np.array_equal(a, b), honest.variables['params'], params)
  assert not any(jax.tree.leaves(changed['h_1'])) and changed['wte']['embedding']


def test_thresholds_split_each_position_equally():
  rng = np.random.default_rng(0)
  values = rng.uniform(size=(50, 3)) + 2 * np.arange(3)
  ends = module.thresholds(values, np.ones((50, 3)), 30)
  assert ends.shape == (30,) and (np.diff(ends) > 0).all()
  counts = np.histogram(values, [*ends, np.inf])[0]
  np.testing.assert_array_equal(counts, 5)
  weights = np.where(values == values.max(axis=0), 1e6, 1.0)
  ends = module.thresholds(values, weights, 30)
  assert (np.histogram(values, [*ends, np.inf])[0].reshape(3, 10)[:, 0] >= 48).all()


def test_a_sum_of_a_few_atoms_is_told_apart_and_one_of_many_is_not():
  rng = np.random.default_rng(0)
  atoms = rng.normal(size=(60, 40))
  taken, shares = module._sparse(atoms, 3 * atoms[7] - 0.2 * atoms[30], 1e-9)
  assert taken == [7, 30]
  np.testing.assert_allclose(shares, [3, -0.2])
  assert module._sparse(atoms, rng.normal(size=8) @ atoms[:8], 1e-9) == ([], [])
  assert module._sparse(atoms, np.zeros(40), 1e-9) == ([], [])


def test_a_bin_is_divided_over_the_texts_so_far():
  rng = np.random.default_rng(0)
  mixing = np.pad(rng.normal(size=(9, 20)), ((0, 0), (10, 0)))
  bins = module.Bins(np.zeros((1, 30)), np.zeros((9, 30)), np.zeros((4, 30)), np.zeros(1), np.zeros(30), mixing, None)
  states = [module.State((i,), mixing[i]) for i in range(4)]
  shares = {0: 0.5, 1: -0.3, 2: 1.1}  # and the fourth text has no part
  pairs = [module.Pair(7, 1, shares[0] + shares[2], 0, 1e-6), module.Pair(8, 1, shares[1], 0, 1e-6)]
  token = {0: 7, 1: 8, 2: 7}
  total = sum(share * (mixing[i] + mixing[token[i]]) / 2 for i, share in shares.items())
  found = module._divided(bins, states, pairs, total, causal=True)
  assert sorted((i, pair.token) for i, pair in found) == sorted(token.items())
  total = 0.8 * (mixing[0] + mixing[7]) / 2 - 0.3 * (mixing[0] + mixing[8]) / 2  # two texts that are equal so far
  pairs = [module.Pair(7, 1, 0.8, 0, 1e-6), module.Pair(8, 1, -0.3, 0, 1e-6)]
  found = module._divided(bins, states, pairs, total, causal=True)
  assert sorted((i, pair.token) for i, pair in found) == [(0, 7), (0, 8)]


@pytest.mark.long
def test_models_that_are_not_known_are_refused():
  for kind, head in (('lstm', 'last'),):
    data = texts.notes(8, length=LENGTH)
    model, _ = texts.network(head, kind, length=LENGTH)
    made = gl.scenario(
      model, data.samples, data.targets, key=jax.random.key(0), modality=texts.of_config(data.settings)
    )
    with pytest.raises(gl.UsageError, match="gpt or bert, all of them, and the model is 'lstm"):
      sent(made)
  honest = scenario('gpt', 'mean', 'cross_entropy')
  adapted = lora(honest.client.model, rank=2)
  made = gl.scenario(adapted, honest.samples, honest.targets, key=jax.random.key(0), modality=honest.client.modality)
  with pytest.raises(gl.UsageError, match='decepticons sets the weights'):
    sent(made)
  with pytest.raises(gl.UsageError, match='a width of at least 32'):
    sent(scenario('gpt', 'mean', 'cross_entropy', width=16))
  for which, layer in (('frozen', 'h_0/mlp/c_fc'), ('private', 'wte'), ('private', 'h_0/attn')):
    with pytest.raises(gl.UsageError, match=r'decepticons sets .* frozen or private'):
      sent(scenario('gpt', 'mean', 'cross_entropy', **{which: layer}))
  whole = sent(scenario('gpt', 'mean', 'cross_entropy'))
  frozen = whole._replace(client=dataclasses.replace(whole.client, frozen=('h_0/mlp/c_fc',)))
  _, observation = observed(frozen, 0, 2)
  with pytest.raises(gl.UsageError, match='frozen or private'):
    read(frozen, observation)


@pytest.mark.long
@pytest.mark.parametrize('public', [True, False])
def test_public_texts_that_fill_the_bins_are_told(public):
  made = scenario('gpt', 'mean', 'cross_entropy', public=public)
  made = made._replace(samples=made.samples[:4], targets=made.targets[:4])
  (group,) = plan(jax.random.key(0), made, [None], [attack()], 1, AuditSettings(controls=1)).groups
  found = granted.knowledge(group, attack())
  assert found.auxiliary_data == (len(made.public[0]) if public else 0) and found.tier == ('G' if public else 'F')


@pytest.mark.long
@pytest.mark.parametrize(('kind', 'head', 'loss'), [('bert', 'mean', 'cross_entropy'), ('gpt', 'next', 'next_token')])
def test_the_client_can_see_it(kind, head, loss):
  given = scenario(kind, head, loss)
  honest, malicious = (
    gl.inspect(given.client.model, variables, (LENGTH,), loss=loss)
    for variables in (given.variables, sent(given).variables)
  )
  assert not honest.suspicious
  assert {'copies', 'ladder', 'untouched'} <= {finding.check for finding in malicious.findings if finding.suspicious}


@pytest.mark.slow  # what a fast test of AutoLeak runs, too
def test_it_stands_in_an_audit_like_the_others():
  honest = scenario('bert', 'mean', 'cross_entropy')
  result = gl.audit(
    jax.random.key(1),
    honest,
    [None, gl.defenses.gaussian(stddev=10.0)],
    [attack()],
    2,
    batch_size=2,
    controls=2,
    progress='none',
    knowledge='non-adaptive',
  )
  bare = [row for row in result.rows if row['defense'] == 'none']
  noisy = [row for row in result.rows if row['defense'] != 'none']
  assert all(row['token_accuracy'] == 1 for row in bare) and all(row['token_accuracy'] < 0.1 for row in noisy)
  assert {row['tier'] for row in result.rows} <= set('FG')
