"""Networks of tokens: sizes, published weights, forward passes against NumPy, padding, relaxations, adapters."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special

import gradleak as gl
from gradleak import models
from gradleak.core import errors, trees
from gradleak.models import torch_weights
from tests.models.shapes import count, shapes
from tests.models.shapes import drawn as values_of

V, D, HEADS, LENGTH = 11, 8, 2, 6
GPT = f'gpt(vocabulary={V},width={D},layers=2,heads={HEADS},length={LENGTH},padding=10'
BERT = f'bert(vocabulary={V},width={D},layers=2,heads={HEADS},length={LENGTH},padding=10'
LSTM = f'lstm(vocabulary={V},width={D},padding=10'
IDS = np.asarray([[3, 1, 4, 1, 5], [9, 2, 10, 10, 10]], np.int32)
ONE = [text.replace('layers=2', 'layers=1') for text in (GPT, BERT)]  # two are compared with NumPy below
ALL = [
  (ONE[0] + ')', 2), (ONE[0] + ',head=mean,fused=False)', 2), (ONE[0] + ',head=next)', V),
  (ONE[0] + ',head=next,tied=False)', V), (ONE[1] + ')', 2), (ONE[1] + ',head=mean)', 2), (ONE[1] + ',head=masked)', V),
  (LSTM + ')', 2), (LSTM + ',layers=2,head=mean)', 2), (LSTM + ',head=next)', V),
]  # fmt: skip


@functools.cache
def made(spec, outputs):
  """Returns the model, variables drawn so that norms and biases matter, and its compiled `apply`."""
  model = models.create(spec, outputs, init='default')
  return model, values_of(model, (5,)), jax.jit(model.apply, static_argnums=2)


def run(spec, outputs, samples):
  _, variables, apply = made(spec, outputs)
  return np.asarray(apply(variables, np.asarray(samples))[0])


@pytest.mark.long
@pytest.mark.parametrize(
  ('spec', 'outputs', 'published'),
  [
    ('gpt(vocabulary=50257,width=768,layers=12,heads=12,head=next,padding=None)', 50257, 124_439_808),
    ('bert(vocabulary=30522,width=768,layers=12,heads=12,padding=0)', 2, 109_482_240 + 2 * 768 + 2),
  ],
)
def test_published_sizes(spec, outputs, published):
  assert count(shapes(spec, (32,), outputs)) == published


@pytest.mark.slow
@pytest.mark.parametrize(('spec', 'outputs'), ALL)
def test_ids_probabilities_and_embeddings_are_the_same_samples(spec, outputs):
  model, variables, _ = made(spec, outputs)
  models.check_apply(model, variables, (5,))
  models.check_variables(model, variables, (5,))
  assert model.takes_ids and model.axes == 1
  params = variables['params']
  table = params['wte' if 'wte' in params else 'embeddings']
  table = table.get('word_embeddings', table)['embedding']
  found = run(spec, outputs, IDS)
  np.testing.assert_allclose(run(spec, outputs, jax.nn.one_hot(IDS, V)), found, atol=2e-5)
  np.testing.assert_allclose(run(spec, outputs, table[IDS]), found, atol=2e-5)


@pytest.mark.long
@pytest.mark.parametrize(('spec', 'outputs'), ALL)
def test_padding_is_not_seen(spec, outputs):
  found, short = run(spec, outputs, IDS)[1:], run(spec, outputs, IDS[1:, :2])
  np.testing.assert_allclose(found[:, :2] if found.ndim == 3 else found, short, atol=1e-5)


@pytest.mark.parametrize(('spec', 'outputs'), ALL)
def test_layers_hold_every_parameter_once(spec, outputs):
  model, variables, _ = made(spec, outputs)
  paths = [path for layer in model.layers((5,)) for path in layer.paths]
  assert sorted(paths) == sorted(trees.path_names(path) for path, _ in jax.tree.leaves_with_path(variables['params']))
  assert len({layer.name for layer in model.layers((5,))}) == len(model.layers((5,)))


def test_a_decoder_does_not_see_what_follows():
  changed = IDS.copy()
  changed[0, 3] = 7
  first, second = (run(GPT + ',head=next)', V, ids) for ids in (IDS, changed))
  np.testing.assert_array_equal(first[0, :3], second[0, :3])
  assert np.abs(first[0, 3:] - second[0, 3:]).max() > 1e-3


# References in NumPy, in float64, from Hugging Face's names, a sequence at a time.


def norm(x, entries, name, epsilon):
  x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + epsilon)
  return x * entries[f'{name}.weight'] + entries[f'{name}.bias']


def attend(query, key, value, causal):
  mixed = []
  for q, k, v in zip(*(np.split(x, HEADS, axis=-1) for x in (query, key, value)), strict=True):
    scores = np.exp(q @ k.T / np.sqrt(q.shape[1]))
    scores = np.tril(scores) if causal else scores
    mixed.append(scores / scores.sum(1, keepdims=True) @ v)
  return np.concatenate(mixed, axis=1)


def gpt2(entries, ids):
  """Returns the hidden states behind the last norm."""
  x = entries['wte.weight'][ids] + entries['wpe.weight'][: len(ids)]

  def conv1d(x, name):
    return x @ entries[f'{name}.weight'] + entries[f'{name}.bias']

  for i in range(2):
    parts = np.split(conv1d(norm(x, entries, f'h.{i}.ln_1', 1e-5), f'h.{i}.attn.c_attn'), 3, axis=-1)
    x = x + conv1d(attend(*parts, True), f'h.{i}.attn.c_proj')
    y = conv1d(norm(x, entries, f'h.{i}.ln_2', 1e-5), f'h.{i}.mlp.c_fc')
    y = 0.5 * y * (1 + np.tanh(np.sqrt(2 / np.pi) * (y + 0.044715 * y**3)))
    x = x + conv1d(y, f'h.{i}.mlp.c_proj')
  return norm(x, entries, 'ln_f', 1e-5)


def bert_base(entries, ids):
  """Returns the hidden states behind the last block."""
  own = 'embeddings.'
  x = entries[own + 'word_embeddings.weight'][ids] + entries[own + 'position_embeddings.weight'][: len(ids)]
  x = norm(x + entries[own + 'token_type_embeddings.weight'][0], entries, own + 'LayerNorm', 1e-12)

  def linear(x, name):
    return x @ entries[f'{name}.weight'].T + entries[f'{name}.bias']

  for i in range(2):
    place = f'encoder.layer.{i}.'
    parts = [linear(x, f'{place}attention.self.{name}') for name in ('query', 'key', 'value')]
    mixed = linear(attend(*parts, False), place + 'attention.output.dense')
    x = norm(x + mixed, entries, place + 'attention.output.LayerNorm', 1e-12)
    y = linear(x, place + 'intermediate.dense')
    y = linear(y * 0.5 * (1 + scipy.special.erf(y / np.sqrt(2))), place + 'output.dense')
    x = norm(x + y, entries, place + 'output.LayerNorm', 1e-12)
  return x


def gpt2_names():
  found = {'wte.weight': (V, D), 'wpe.weight': (LENGTH, D), 'ln_f.weight': (D,), 'ln_f.bias': (D,)}
  for i in range(2):
    dense = {'attn.c_attn': (D, 3 * D), 'attn.c_proj': (D, D), 'mlp.c_fc': (D, 4 * D), 'mlp.c_proj': (4 * D, D)}
    for name, shape in dense.items():
      found |= {f'h.{i}.{name}.weight': shape, f'h.{i}.{name}.bias': shape[1:]}
    found |= {f'h.{i}.ln_{j}.{part}': (D,) for j in (1, 2) for part in ('weight', 'bias')}
    found |= {f'h.{i}.attn.bias': (1, 1, LENGTH, LENGTH)}  # a buffer with the causal mask
  return found | {'lm_head.weight': (V, D)}


def bert_names():
  found = {
    'embeddings.word_embeddings.weight': (V, D),
    'embeddings.position_embeddings.weight': (LENGTH, D),
    'embeddings.token_type_embeddings.weight': (2, D),
  }
  norms, dense = ['embeddings.LayerNorm', 'cls.predictions.transform.LayerNorm'], {'pooler.dense': (D, D)}
  for i in range(2):
    place = f'encoder.layer.{i}.'
    dense |= {f'{place}attention.self.{name}': (D, D) for name in ('query', 'key', 'value')}
    dense |= {
      f'{place}attention.output.dense': (D, D),
      f'{place}intermediate.dense': (4 * D, D),
      f'{place}output.dense': (D, 4 * D),
    }
    norms += [place + 'attention.output.LayerNorm', place + 'output.LayerNorm']
  dense |= {'classifier': (2, D), 'cls.predictions.transform.dense': (D, D), 'cls.seq_relationship': (2, D)}
  for name, shape in dense.items():
    found |= {f'{name}.weight': shape, f'{name}.bias': shape[:1]}
  found |= {f'{name}.{part}': (D,) for name in norms for part in ('weight', 'bias')}
  return found | {'cls.predictions.bias': (V,), 'cls.predictions.decoder.weight': (V, D)}


def drawn(names, seed=0):
  rng = np.random.default_rng(seed)
  found = {
    name: (rng.normal(size=shape) * 0.4 + ('orm' in name or 'ln_' in name) * name.endswith('weight')).astype(np.float32)
    for name, shape in names.items()
  }
  tied = {'lm_head.weight': 'wte.weight', 'cls.predictions.decoder.weight': 'embeddings.word_embeddings.weight'}
  return found | {name: found[other] for name, other in tied.items() if name in found}


def stored(tmp_path, entries, prefix=''):
  path = tmp_path / 'weights.npz'
  np.savez(path, **{(name if name.startswith(('lm_head', 'cls', 'classifier')) else prefix + name): values
                    for name, values in entries.items()})  # fmt: skip
  return path


@pytest.mark.parametrize('fused', [True, False])
def test_published_weights_of_gpt2_and_its_forward_pass(tmp_path, fused):
  entries = drawn(gpt2_names())
  model = models.create(GPT + f',head=next,fused={fused})', V)
  variables = torch_weights.load(stored(tmp_path, entries, 'transformer.'), model, (5,))
  ids = IDS[:1]
  wide = {name: values.astype(np.float64) for name, values in entries.items()}
  expected = gpt2(wide, ids[0]) @ wide['wte.weight'].T
  np.testing.assert_allclose(jax.jit(model.apply)(variables, jnp.asarray(ids))[0][0], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.long
def test_published_weights_of_bert_and_its_forward_pass(tmp_path):
  entries = drawn(bert_names())
  wide = {name: values.astype(np.float64) for name, values in entries.items()}
  path = stored(tmp_path, entries, 'bert.')
  hidden = bert_base(wide, IDS[0])
  model = models.create(BERT + ')', 2)
  found = jax.jit(model.apply)(torch_weights.load(path, model, (5,)), jnp.asarray(IDS[:1]))[0][0]
  pooled = np.tanh(hidden[0] @ wide['pooler.dense.weight'].T + wide['pooler.dense.bias'])
  expected = pooled @ wide['classifier.weight'].T + wide['classifier.bias']
  np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)

  model = models.create(BERT + ',head=masked)', V)
  found = jax.jit(model.apply)(torch_weights.load(path, model, (5,)), jnp.asarray(IDS[:1]))[0][0]
  place = 'cls.predictions.transform.'
  y = hidden @ wide[place + 'dense.weight'].T + wide[place + 'dense.bias']
  y = norm(y * 0.5 * (1 + scipy.special.erf(y / np.sqrt(2))), wide, place + 'LayerNorm', 1e-12)
  expected = y @ wide['embeddings.word_embeddings.weight'].T + wide['cls.predictions.bias']
  np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.long
def test_a_file_without_the_head_needs_a_key_and_faults_are_listed(tmp_path):
  entries = {name: values for name, values in drawn(gpt2_names()).items() if name != 'lm_head.weight'}
  path, model = stored(tmp_path, entries), models.create(GPT + ')', 2)
  with pytest.raises(errors.UsageError, match=re.escape('missing: score.weight')):
    torch_weights.load(path, model, (5,))
  variables = torch_weights.load(path, model, (5,), head=jax.random.key(3))
  assert variables['params']['score']['kernel'].shape == (D, 2)
  np.testing.assert_array_equal(variables['params']['wte']['embedding'], entries['wte.weight'])
  with pytest.raises(errors.UsageError, match='of another shape'):
    torch_weights.load(path, models.create(GPT.replace('length=6', 'length=7') + ',head=next)', V), (5,))


def test_an_lstm_is_its_equations():
  model, variables, _ = made(LSTM + ')', 2)
  params = jax.tree.map(lambda x: np.asarray(x, np.float64), variables['params'])
  own = params['lstm_0']
  expected = []
  for ids in IDS:
    h = c = np.zeros(D)
    for token in ids[ids != 10]:
      gates = params['wte']['embedding'][token] @ own['kernel'] + own['bias'] + h @ own['recurrent']
      i, f, g, o = np.split(gates, 4)
      i, f, o = (scipy.special.expit(x) for x in (i, f, o))
      c = f * c + i * np.tanh(g)
      h = o * np.tanh(c)
    expected.append(h @ params['head']['kernel'] + params['head']['bias'])
  np.testing.assert_allclose(run(LSTM + ')', 2, IDS), expected, atol=1e-5)
  assert model.first_block is None


@pytest.mark.long
def test_dropout_is_active_in_training_with_a_key_alone():
  _, variables, apply = made(GPT + ',dropout=0.5)', 2)
  plain, other = (np.asarray(apply(variables, IDS, True, key)[0]) for key in (None, jax.random.key(1)))
  np.testing.assert_allclose(plain, run(GPT + ')', 2, IDS), atol=1e-5)
  assert np.abs(plain - other).max() > 1e-3
  still, other = (np.asarray(apply(variables, IDS, False, key)[0]) for key in (None, jax.random.key(1)))
  np.testing.assert_array_equal(still, other)
  np.testing.assert_allclose(plain, other, atol=1e-5)


@pytest.mark.long
def test_adapters_of_chosen_matrices_alone():
  model = models.create(GPT + ',fused=False)+lora(rank=2,only=q-v)', 2, init='default')
  variables = jax.jit(model.init, static_argnums=1)(jax.random.key(0), (5,))
  assert [layer.name for layer in model.layers((5,))] == [f'h_{i}/attn/{part}' for i in (0, 1) for part in 'qv']
  assert {name for block in variables['params'].values() for name in block['attn']} == {'q', 'v'}
  assert model.takes_ids and model.axes == 1 and model.first_block.adapters
  assert model.first_block.projections == tuple(('h_0', 'attn', name, 'kernel') for name in 'qv')
  assert model.first_block.second == tuple(('h_1', 'attn', name, 'kernel') for name in 'qv')
  base = models.create(GPT + ',fused=False)', 2)
  expected = jax.jit(base.apply)({'params': variables['base']}, jnp.asarray(IDS))[0]
  np.testing.assert_allclose(jax.jit(model.apply)(variables, jnp.asarray(IDS))[0], expected, atol=1e-6)
  with pytest.raises(errors.UsageError, match="unknown module to adapt 'w'"):
    models.create(GPT + ')+lora(only=w)', 2).init(jax.random.key(0), (5,))


@pytest.mark.long
@pytest.mark.parametrize('spec', [GPT + ')', BERT + ')'])
def test_the_first_block_is_that_of_the_network(spec):
  """The input of the projections and of the MLP, from the functions of `FirstBlock`, against the gradients' span."""
  model, variables, _ = made(spec, 2)
  block, ids = model.first_block, jnp.asarray(IDS)
  table, positions, scale, shift, epsilon = block.parts(variables)
  plain = table[ids] + positions[jnp.newaxis, :5]
  centred = plain - plain.mean(-1, keepdims=True)
  x = centred / jnp.sqrt(jnp.mean(centred**2, -1, keepdims=True) + epsilon) * scale.reshape(1, 1, -1) + shift.reshape(
    1, 1, -1
  )
  seen = jnp.asarray(IDS != 10)[:, jnp.newaxis, :] & (
    jnp.tril(jnp.ones((5, 5), bool))[jnp.newaxis] | (not block.causal)
  )
  attended = models.layers.attention(*block.tokens(variables, x), block.heads, seen)
  mixed = block.mixed(variables, x if block.normalised_sum else plain, attended)
  following = block.following(variables, x if block.normalised_sum else plain, attended)
  squares = jax.jit(jax.grad(lambda params: jnp.sum(model.apply({'params': params}, ids)[0] ** 2)))
  gradient = squares(variables['params'])
  assert trees.get(gradient, block.table).shape == (V, D)
  for inputs, paths in ((x, block.projections), (mixed, block.second), (following, block.next_projections)):
    counted = np.asarray(inputs)[np.asarray(IDS != 10)].T  # [d, tokens]
    for path in paths:
      found = np.asarray(trees.get(gradient, path))
      residual = found - counted @ np.linalg.lstsq(counted, found, rcond=None)[0]
      assert np.abs(residual).max() < 1e-4 * np.abs(found).max()


@pytest.mark.parametrize(
  ('call', 'message'),
  [
    (lambda: models.gpt(2, width=10, heads=3), 'expected a divisor of the width 10'),
    (lambda: models.gpt(2, vocabulary=64, padding=None), 'probabilities could not be told from embeddings'),
    (lambda: models.gpt(2, vocabulary=100), r'gpt\(padding\) is 256, expected an id below the vocabulary 100'),
    (lambda: models.bert(2, head='masked'), 'has an output for each of 258 tokens, and num_classes is 2'),
    (lambda: models.gpt(2, head='first'), 'head'),
    (lambda: models.gpt(2, length=4).init(jax.random.key(0), (5,)), 'a sequence has 5 tokens'),
    (lambda: run(GPT + ')', 2, np.zeros((2, 5), np.float32)), 'expected ids, integers'),
    (lambda: run(GPT + ')', 2, np.zeros((2, 5, 7), np.float32)), r'probabilities \[N, T, 11\] or embeddings'),
  ],
)
def test_what_does_not_fit_is_refused(call, message):
  with pytest.raises(gl.UsageError, match=message):
    call()
