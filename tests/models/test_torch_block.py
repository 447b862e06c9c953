"""The first block of PyTorch's transformers: its parts, what attacks read through it, and networks that have none."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradleak as gl
from gradleak.core import trees
from gradleak.modalities import TEXT
from gradleak.models import torch_weights

torch = pytest.importorskip('torch', reason='PyTorch is not installed')
from torch import nn  # noqa: E402

pytestmark = pytest.mark.usefixtures('fast_compilation')
V, T, WIDTH, PAD = 90, 6, 64, 0


class Transformer(nn.Module):
  """Blocks of PyTorch's own, with learned positions; what a test changes of them."""

  def __init__(self, causal=True, first=True, layers=1, pad=None, scale=1.0, tied=False):
    super().__init__()
    self.words, self.places = nn.Embedding(V, WIDTH), nn.Parameter(torch.randn(T, WIDTH))
    given = {'dropout': 0.0, 'batch_first': True, 'norm_first': first}
    self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(WIDTH, 2, 48, **given) for _ in range(layers))
    self.head, self.pad, self.scale = nn.Linear(WIDTH, V, bias=False), pad, scale
    if tied:
      self.head.weight = self.words.weight
    mask = nn.Transformer.generate_square_subsequent_mask(T)
    self.causal = causal
    self.register_buffer('mask', mask if causal else torch.zeros(T, T))

  def forward(self, ids):
    x = self.scale * self.words(ids) + self.places
    hidden = None if self.pad is None else torch.zeros(ids.shape).masked_fill(ids == self.pad, -torch.inf)
    for block in self.blocks:
      x = block(x, src_mask=self.mask, src_key_padding_mask=hidden)
    return self.head(x) if self.causal else self.head((x * (ids != self.pad)[:, :, None]).mean(1))


class Small(nn.Module):
  """One block of three dense layers behind a norm, in GPT's order; or what a test changes of it."""

  def __init__(self, change=''):
    super().__init__()
    self.words, self.places, self.change = nn.Embedding(V, WIDTH), nn.Embedding(T, WIDTH), change
    self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
    self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
    self.wide, self.head = nn.Linear(WIDTH, 48), nn.Linear(48, 3)

  def forward(self, ids):
    places = torch.arange(T)
    e = self.words(ids)
    x = e * self.places(places) if self.change == 'product' else e + self.places(places)
    given = self.norms[0](x)
    q, k, v = (one(given).reshape(-1, T, 2, WIDTH // 2).transpose(1, 2) for one in (self.query, self.key, self.value))
    if self.change == 'rotary':
      q = q * torch.cos(places.float())[:, None]
    if self.change == 'scale':
      attended = nn.functional.scaled_dot_product_attention(q, k, v, scale=0.5)
    elif self.change == 'written out':
      attended = torch.softmax(q @ k.transpose(-1, -2) / (WIDTH // 2) ** 0.5, -1) @ v
    elif self.change == 'window':
      near = (places[:, None] - places[None]).abs() < 2
      attended = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=near)
    else:
      attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    x = (given if self.change == 'post' else x) + self.out(attended.transpose(1, 2).reshape(-1, T, WIDTH))
    if self.change == 'summed':
      x = x + e
    return self.head(torch.relu(self.wide(self.norms[1](x)))).mean(1)


NETWORKS = {
  'decoder': lambda: Transformer(),
  'without a norm in front': lambda: Transformer(first=False),
  'encoder with padding': lambda: Transformer(causal=False, pad=PAD),
  'scaled, tied, two blocks': lambda: Transformer(layers=2, scale=WIDTH**0.5, tied=True),
  'three kernels': lambda: Small(),
  'added to the norm': lambda: Small('post'),
}


@functools.cache
def taken(name):
  torch.manual_seed(0)
  net = NETWORKS[name]() if name in NETWORKS else Small(name)
  return gl.models.from_torch(net, texts(4), check=False)


def texts(number, seed=0):
  return np.random.default_rng(seed).integers(1, V, (number, T)).astype(np.int32)


def uploaded(model, variables, ids):
  """Returns the client of classes or of next tokens, and its upload."""
  of_tokens = model.apply(variables, ids[:1])[0].ndim == 3
  given = {'loss': gl.losses.next_token() if of_tokens else gl.losses.cross_entropy()}
  client = gl.Client(model, model.apply(variables, ids[:1])[0].shape[-1], modality=TEXT, **given)
  targets = np.zeros(len(ids), np.int32)
  update = client.local_update(None, variables, jnp.asarray(ids), jnp.asarray(targets)).update
  knowledge = gl.Knowledge(labels='unused', share=client.share)
  return client, gl.Observation(
    variables, update, jnp.zeros((len(ids), client.num_classes)), knowledge, ids.shape, client.num_classes
  )


def read(client, observation):
  """Returns the texts that `span` finds, in order; what it does not find is padding."""
  attack = gl.attacks.span()(client)
  found = attack.reconstruct(attack.init(jax.random.key(0), observation), observation).samples
  return sorted(np.maximum(found, 0).tolist())


@pytest.mark.parametrize('name', NETWORKS)
def test_span_reads_texts_exactly(name):
  model, variables = taken(name)
  about, ids = model.first_block, texts(3, seed=1)
  if about.padding is not None:
    ids[1, 4:] = about.padding
  assert read(*uploaded(model, variables, ids)) == sorted(ids.tolist())


def test_span_reads_the_adapters_of_a_network():
  model = gl.models.lora.lora(taken('three kernels')[0], rank=10)
  variables = model.init(jax.random.key(1), (T,))
  moved = jax.tree.map(lambda x: x + jax.random.normal(jax.random.key(2), x.shape) / 20, variables['params'])
  assert model.first_block.adapters and len(model.first_block.projections) == 3
  ids = texts(1, seed=4)
  assert read(*uploaded(model, {**variables, 'params': moved}, ids)) == ids.tolist()


@pytest.mark.parametrize(
  ('name', 'causal', 'padding', 'normed'),
  [
    ('decoder', True, None, True),
    ('without a norm in front', True, None, False),
    ('encoder with padding', False, PAD, True),
    ('scaled, tied, two blocks', True, None, True),
    ('three kernels', True, None, True),
    ('added to the norm', True, None, True),
  ],
)
def test_what_is_known_of_the_block(name, causal, padding, normed):
  model, variables = taken(name)
  about = model.first_block
  assert (about.causal, about.padding, about.heads) == (causal, padding, 2)
  assert model.padding == padding and (about.parts(variables)[4] == 1e-5) == normed
  params = variables['params']
  assert trees.get(params, about.table).shape == (V, WIDTH) and trees.get(params, about.second[0]).shape == (WIDTH, 48)
  kernels = [trees.get(params, path).shape for path in about.projections]
  assert kernels == ([(WIDTH, WIDTH)] * 3 if name in ('three kernels', 'added to the norm') else [(WIDTH, 3 * WIDTH)])
  assert len(about.next_projections) == ('two blocks' in name)


@pytest.mark.parametrize('name', NETWORKS)
def test_embeddings_in_place_of_tokens_give_their_logits(name):
  model, variables = taken(name)
  ids = texts(3, seed=2)
  if model.padding is not None:
    ids[1, 4:] = model.padding
  table = model.first_block.parts(variables)[0]
  logits = model.apply(variables, ids)[0]
  np.testing.assert_allclose(model.apply(variables, table[ids])[0], logits, rtol=1e-4, atol=1e-5)
  moved = jax.grad(lambda x: jnp.sum(model.apply(variables, x)[0] ** 2))(table[ids])
  assert np.all(np.any(np.asarray(moved) != 0, axis=-1) == (ids != model.padding))
  for wrong in (np.zeros((2, T, WIDTH + 1), np.float32), np.zeros((2, T, WIDTH), np.int32)):
    with pytest.raises(gl.UsageError, match=r'takes samples of shape ids \(6,\), or probabilities .* or embeddings'):
      model.apply(variables, wrong)


@pytest.mark.parametrize('change', ['product', 'rotary', 'scale', 'written out', 'window', 'summed'])
def test_a_block_of_other_parts_is_none(change):
  model, variables = taken(change)
  assert model.first_block is None and model.vocabulary == V
  client, observation = uploaded(model, variables, texts(2))
  with pytest.raises(gl.UsageError, match='reads the first block of a transformer of tokens, and none is known of'):
    gl.attacks.span()(client).init(jax.random.key(0), observation)


def test_names_of_published_files_are_not_those_of_a_module(tmp_path):
  model, variables = taken('decoder')
  np.savez(tmp_path / 'net.npz', **model.layout.to_theirs(variables))
  with pytest.raises(gl.UsageError, match='PyTorch weights are for residual networks, VGGs and transformers'):
    torch_weights.load(tmp_path / 'net.npz', model, (T,))


def test_texts_with_other_padding_than_the_network_masks_are_refused():
  model, _ = taken('encoder with padding')
  assert 'takes the token 0 for padding, and the texts are padded with 256' in TEXT.misfit(
    model._replace(vocabulary=258)
  )
