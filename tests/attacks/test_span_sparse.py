"""The span attack on adapters with fewer columns than tokens: sparse recovery, and assembly of sequences."""

import dataclasses
import time

import jax
import numpy as np
import pytest

from gradleak.attacks import span_assembly, span_decoder, span_sparse, subspace
from gradleak.core import trees
from tests.attacks.test_span import ADAPTED, BERT, PAD, attacked, batch, expected, model_of, noisy, rounded, stirred
from tests.attacks.test_span import observed as seen

DECODER = ADAPTED.replace('layers=2', 'layers=3,head=mean').format(4)
ENCODER = BERT.replace('layers=2', 'layers=3,head=mean') + '+lora(rank=4,only=query-value)'


def observed(spec, ids, labels, change=None):
  """Returns the client and the `Observation` of its upload in a later round, where B is not zero."""
  return seen(spec, ids, labels, change=change, variables=stirred(model_of(spec)[1]))


@pytest.mark.slow
@pytest.mark.parametrize('change', [None, rounded])
def test_more_tokens_than_columns_are_read_exactly(change):
  """Adapters of rank 4 on two layers have 8 columns, and the batch 20 tokens."""
  ids, labels = batch(2, 10, seed=11)
  assert attacked(*observed(DECODER, ids, labels, change)) == expected(ids)


@pytest.mark.long
def test_of_an_encoder_a_batch_is_read_exactly_or_nothing_is_claimed():
  """An encoder has no order in which positions depend on each other, and now and then its batch is not found."""
  right = 0
  for seed in (11, 12):
    ids, labels = batch(2, 9, seed=seed)
    found = attacked(*observed(ENCODER, ids, labels))
    assert set(found) <= {*expected(ids), (PAD,) * 9}
    right += found == expected(ids)
  assert right


@pytest.mark.long
def test_tokens_that_stand_at_several_positions_and_sequences_of_different_lengths():
  ids, labels = batch(2, 10, seed=12)
  ids[0, [2, 5]], ids[1, 7] = ids[0, 0], ids[1, 3]
  ids[1, 8:] = PAD
  assert attacked(*observed(DECODER, ids, labels)) == expected(ids)


@pytest.mark.long
def test_noise_that_is_not_known_leaves_no_sequence_that_is_wrong():
  ids, labels = batch(2, 10, seed=13)
  for share in (1e-3, 1e-1):
    found = attacked(*observed(DECODER, ids, labels, lambda update, share=share: noisy(update, share)))
    assert set(found) <= {*expected(ids), (PAD,) * 10}


@pytest.mark.slow
@pytest.mark.parametrize('first', [True, False])
def test_adapters_on_all_matrices_are_read_too(first):
  """Those of the table have a row for each token, but in the first round."""
  spec = ADAPTED.replace('layers=2', 'layers=3,head=mean').replace(',only=q-v', '').format(4)
  ids, labels = batch(1, 8, seed=16)
  client, observation = seen(spec, ids, labels) if first else observed(spec, ids, labels)
  assert attacked(client, observation) == ([(PAD,) * 8] if first else expected(ids))


def drawn_signal(rng, features=40, columns=4, noise=0.0):
  signal = rng.normal(size=(features, columns)) + noise * rng.normal(size=(features, columns))
  return span_sparse.Signal(np.linalg.qr(signal)[0], np.full(columns, max(noise, 1e-6)))


def test_what_is_beyond_columns_is_the_projection():
  rng = np.random.default_rng(0)
  signal = drawn_signal(rng)
  given = np.linalg.qr(np.concatenate([signal.basis[:, :2], rng.normal(size=(40, 3))], axis=1))[0]
  rest, volume = signal.beyond(given)
  assert rest.shape == (40, 2)
  outside = np.linalg.qr(np.concatenate([given, signal.basis[:, 2:]], axis=1))[0][:, 5:7]
  np.testing.assert_allclose(rest @ rest.T, outside @ outside.T, atol=1e-8)
  values = np.linalg.svd(signal.basis - given @ given.T @ signal.basis, compute_uv=False)
  assert volume == pytest.approx(np.log(values[:2]).sum() + 2 * np.log(span_sparse.CLEAR * 1e-6), rel=1e-6)


def test_what_chance_explains_is_not_taken_for_evidence():
  rng = np.random.default_rng(1)
  signal = drawn_signal(rng)
  given = np.linalg.qr(np.concatenate([signal.basis, rng.normal(size=(40, 10))], axis=1))[0]
  assert signal.explained(given, 100.0)
  assert not signal.explained(given[:, 1:], 100.0)  # a direction is left
  assert not signal.explained(given, 1e5)  # of e^100,000 sets
  assert not signal._replace(noise=np.full(4, 0.5)).explained(given, 1.0)  # as close as any direction
  assert not signal._replace(basis=signal.basis[:, :0], noise=signal.noise[:0]).explained(given, 1.0)


def test_columns_are_orthonormal_and_span_what_rows_add():
  rng = np.random.default_rng(2)
  given, rows = np.linalg.qr(rng.normal(size=(20, 3)))[0], rng.normal(size=(4, 20))
  rows[3] = rows[0] + given[:, 1]
  found = span_sparse.columns_of(rows, given)
  assert found.shape == (20, 3)
  both = np.concatenate([given, found], axis=1)
  np.testing.assert_allclose(both.T @ both, np.eye(6), atol=1e-10)
  np.testing.assert_allclose(both @ both.T @ rows.T, rows.T, atol=1e-8)


def test_rows_are_matched_with_the_sums_that_they_make_up():
  rng = np.random.default_rng(3)
  rows = rng.normal(size=(18, 6)) * np.exp(rng.normal(size=(18, 1)))
  right = np.eye(6, dtype=bool)[rng.permutation(18) % 6]
  np.testing.assert_array_equal(span_sparse._whole(rows, right.T.astype(float) @ rows), right)
  assert not span_sparse._whole(rng.normal(size=(600, 2)), rng.normal(size=(5, 2))).any()  # too many


def test_noise_in_a_direction_is_that_of_the_gradient_and_of_float32():
  rng = np.random.default_rng(4)
  gradient = rng.normal(size=(30, 4)) * np.asarray([1, 1e-3, 1e-7, 1e-9])
  span = subspace.span_of([gradient], 40, noise=1e-20)
  signal = span_sparse.signal_of(span)
  sizes = np.linalg.svd(gradient, compute_uv=False)
  level = max(1e-20, subspace.rounding(gradient))
  expected_noise = np.sqrt(30 * level) / sizes + span_sparse.INEXACT * sizes[0] / sizes
  kept = expected_noise < span_sparse.NOISY
  assert 2 <= kept.sum() < 4
  np.testing.assert_allclose(signal.noise, expected_noise[kept], rtol=1e-6)


def test_the_sparse_search_is_taken_where_tokens_may_outnumber_columns():
  rng = np.random.default_rng(5)
  span = subspace.span_of([rng.normal(size=(30, 8))], 20)
  assert span_sparse.crowded(span, 8) and not span_sparse.crowded(span, 7)
  assert not span_sparse.crowded(subspace.span_of([rng.normal(size=(30, 40))], 20), 60)
  assert not span_sparse.crowded(subspace.beside([span], [np.eye(30)]), 20)


def searched(ids, labels):
  """Returns a search for the sequences of a batch, and these, as places among its candidates."""
  client, observation = observed(DECODER, ids, labels)
  about = client.model.first_block
  first, second = (
    subspace.span_of([np.asarray(trees.get(observation.update, path)['a']) for path in paths], ids.size)
    for paths in (about.projections, about.second)
  )
  block = span_decoder.block_of(about, observation.variables, ids.shape[1])
  places = np.repeat(np.arange(ids.shape[1]), len(ids))
  rows = span_decoder.projected(block, ids.T.ravel(), places)
  signals = span_sparse.signal_of(first), span_sparse.signal_of(second)
  truth = [tuple(int(x) for x in np.arange(ids.shape[1]) * len(ids) + i) for i in range(len(ids))]
  return span_assembly._Search(block, *signals, rows, places), truth


@pytest.mark.long
def test_the_right_sequences_leave_the_least_and_each_token_is_needed():
  search, truth = searched(*batch(2, 10, seed=14))
  least = search.cost(truth)
  for exchange in span_assembly._exchanges(2, [6, 7]):
    changed = exchange(truth, 3)
    assert search.cost(changed) > least + 1
    assert {own[3] for own in changed} == {6, 7} and sorted(sum(changed, ())) == sorted(sum(truth, ()))
  assert all(search.needed(own, truth) for own in truth)
  longer = [truth[0], truth[1][:5]]
  assert not search.needed((*truth[0][:9], 19), [*truth, (*truth[0][:9], 19)])
  assert search.shortened(truth) == truth and search.shortened([truth[0]] * 2) == [truth[0]] * 2
  assert search.second.beyond(search.columns(longer))[0].shape[1]
  assert search.improved([truth[0][:4] + truth[1][4:], truth[1][:4] + truth[0][4:]]) in (truth, truth[::-1])


@pytest.mark.long
def test_inputs_of_a_decoder_depend_on_what_stands_before():
  search, truth = searched(*batch(2, 6, seed=15))
  a, b = truth[0], (*truth[0][:3], *truth[1][3:])
  np.testing.assert_allclose(search.inputs(a)[:3], search.inputs(b)[:3], atol=1e-5)
  assert np.abs(search.inputs(a)[3:] - search.inputs(b)[3:]).max() > 1e-2
  assert search.columns([a, b]).shape[1] == 6 + 3


@pytest.mark.slow
@pytest.mark.parametrize(('head', 'seed'), [('last', 0), ('last', 1), ('mean', 2)])
def test_goal_of_adapters_at_the_shape_of_gpt2(head, seed):
  """Adapters of rank 8 on queries and values have 16 columns, and the batch 32 tokens."""
  spec = f'gpt(vocabulary=50257,width=768,layers=12,heads=12,length=16,fused=False,padding=None,head={head})'
  ids, labels = batch(2, 16, seed, 50257)
  client, observation = observed(spec + '+lora(rank=8,only=q-v)', ids, labels)
  observation = dataclasses.replace(observation, update=jax.tree.map(np.asarray, observation.update))
  started = time.monotonic()
  found = attacked(client, observation)
  print(
    f'GPT-2 shape, adapters of rank 8, 2×16: {len(set(found) & set(expected(ids)))} of 2 exact, '
    f'{time.monotonic() - started:.0f} s'
  )
  assert found == expected(ids)
