"""Losses that predict tokens: by hand, on probabilities, in a client."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradleak as gl
from gradleak.models.model import per_example_loss
from tests import texts
from tests.federated.test_losses import log_softmax

MASK = 1


def of_batch(client, variables, samples, labels):
  """Returns the loss of a batch, as the client computes it."""
  samples, targets = client.transformed(None, jnp.asarray(samples), jnp.asarray(labels))

  @jax.jit
  def loss(variables):
    each, _ = per_example_loss(client.network, client.loss, variables, samples, targets)
    return client.loss.reduced(each, targets, jnp.ones(len(samples)))

  return float(loss(variables))


def logits(client, variables, samples):
  apply = jax.jit(client.model.apply, static_argnums=(2, 3))
  return np.asarray(apply(variables, jnp.asarray(samples), False, None)[0], np.float64)


def gradient(made, samples, labels):
  return jax.jit(made.client.gradient)(made.variables, jnp.asarray(samples), jnp.asarray(labels))


@pytest.fixture(scope='module')
def scenario():
  return texts.scenario(number=8)


@pytest.mark.long
@pytest.mark.parametrize('reduction', ['mean', 'sum'])
def test_next_tokens_by_hand(reduction):
  made = texts.scenario(gl.losses.next_token(reduction=reduction), number=8)
  samples = made.samples[:3].copy()
  samples[0, 4:] = 0
  samples[1, 7:] = 0
  logs = log_softmax(logits(made.client, made.variables, samples))
  terms = [
    -logs[n, t, samples[n, t + 1]] for n in range(3) for t in range(samples.shape[1] - 1) if samples[n, t + 1] != 0
  ]
  assert len(terms) == 3 + 6 + 9
  expected = np.sum(terms) if reduction == 'sum' else np.mean(terms)  # over all positions, as PyTorch's ignore_index
  assert of_batch(made.client, made.variables, samples, made.targets[:3]) == pytest.approx(expected, rel=1e-5)


@pytest.mark.long
@pytest.mark.parametrize('kind', ['bert', 'gpt'])
def test_masked_tokens_by_hand(kind):
  head = 'masked' if kind == 'bert' else 'next'
  made = texts.scenario(gl.losses.masked_token(share=0.3, seed=4), head, kind, number=8)
  samples = made.samples[:3].copy()
  samples[0, 6:] = 0
  places = np.random.default_rng(4).permutation(texts.LENGTH)[:3]
  covered = samples.copy()
  covered[:, places] = np.where(samples[:, places] == 0, 0, MASK)
  logs = log_softmax(logits(made.client, made.variables, covered))
  terms = [-logs[n, t, samples[n, t]] for n in range(3) for t in places if samples[n, t] != 0]
  found = of_batch(made.client, made.variables, samples, made.targets[:3])
  assert found == pytest.approx(np.mean(terms), rel=1e-5)


@pytest.mark.long
@pytest.mark.parametrize(
  'loss, head, kind', [('next_token', 'next', 'gpt'), ('masked_token(share=0.3)', 'masked', 'bert')]
)
def test_one_hot_probabilities_give_the_gradient_of_ids(loss, head, kind):
  made = texts.scenario(loss, head, kind, number=8)
  samples = made.samples[:2].copy()
  samples[0, 5:] = 0
  relaxed = jnp.asarray(texts.one_hot(samples, made.client.num_classes))
  both = [gradient(made, x, made.targets[:2]) for x in (samples, relaxed)]
  for a, b in zip(*map(jax.tree.leaves, both), strict=True):
    np.testing.assert_allclose(a, b, atol=1e-6 * float(jnp.abs(a).max()) + 1e-9)


@pytest.mark.long
def test_what_the_labels_say_changes_no_gradient(scenario):
  samples = scenario.samples[:2]
  first, second = (gradient(scenario, samples, y) for y in ([0, 1], [4, 4]))
  assert all(np.array_equal(a, b) for a, b in zip(*map(jax.tree.leaves, (first, second)), strict=True))


@pytest.mark.long
def test_sequences_of_one_token(scenario):
  """Nothing follows: alone the gradient is zero and finite, beside others they count for nothing."""
  samples = scenario.samples[:2].copy()
  samples[0, 1:] = 0
  labels = scenario.targets[:2]
  alone = gradient(scenario, samples[:1], labels[:1])
  assert all(not np.asarray(leaf).any() for leaf in jax.tree.leaves(alone))
  both = gradient(scenario, samples, labels)
  other = gradient(scenario, samples[1:], labels[1:])
  for a, b in zip(*map(jax.tree.leaves, (both, other)), strict=True):
    np.testing.assert_allclose(a, b, atol=1e-6)


@pytest.mark.parametrize('loss', ['next_token', 'masked_token'])
def test_targets_are_made_of_what_a_defense_makes_of_the_tokens(loss):
  made = texts.scenario(loss, number=8)
  hide = gl.defenses.wrap(lambda key, samples, targets: (jnp.full_like(samples, 7), targets), 'data')
  client, samples = gl.defenses.bind(hide, made.context).client(made.client), made.samples[:2]
  found = client.transformed(None, samples, made.targets[:2])
  jax.tree.map(
    np.testing.assert_array_equal, found, made.client.transformed(None, np.full_like(samples, 7), made.targets[:2])
  )


@pytest.mark.long
def test_a_mean_over_local_batches_counts_positions(scenario):
  """A gradient of a batch is that of its parts, weighted by the positions that count."""
  samples = scenario.samples[:2].copy()
  samples[0, 4:] = 0
  labels = scenario.targets[:2]
  parts = [gradient(scenario, samples[i : i + 1], labels[i : i + 1]) for i in (0, 1)]
  whole = gradient(scenario, samples, labels)
  for a, b, c in zip(*map(jax.tree.leaves, (*parts, whole)), strict=True):
    np.testing.assert_allclose((3 * a + 9 * b) / 12, c, atol=1e-6)


def test_what_has_no_tokens_is_refused(scenario):
  model = gl.models.create('mlp(widths=8)', 3)
  with pytest.raises(gl.UsageError, match='images have none that it knows'):
    gl.scenario(model, np.zeros((2, 4, 4, 1), np.float32), [0, 1], key=jax.random.key(0), loss='next_token')
  embedded = jnp.zeros((2, texts.LENGTH, 16))
  with pytest.raises(gl.UsageError, match='these samples are embeddings of 16 numbers'):
    scenario.client.gradient(scenario.variables, embedded, jnp.asarray([0, 1]))
  with pytest.raises(gl.UsageError, match=r'labels are int32 of shape \(3,\), expected 2 integers'):
    scenario.client.gradient(scenario.variables, jnp.asarray(scenario.samples[:2]), jnp.asarray([0, 1, 2]))


def test_a_client_refuses_what_are_no_tokens(scenario):
  with pytest.raises(gl.UsageError, match=r'texts are int32 of shape \(2, 10, 1\), expected integers \[N, T\]'):
    scenario.client.local_update(None, scenario.variables, jnp.zeros((2, 10, 1), jnp.int32), jnp.asarray([0, 1]))
  for samples, message in (
    (np.full((2, 10), 10**6), 'text 0 has the token 1000000'),
    (np.zeros((2, 10), int), 'text 0 has no token but padding'),
    (np.asarray([[0, 3, 4], [3, 4, 0]]), 'text 0 has padding before a token'),
    (np.ones((2, 10)), 'expected tokens'),
  ):
    with pytest.raises(gl.UsageError, match=message):
      scenario.client.modality.check(samples)
