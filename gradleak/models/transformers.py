"""Networks on token ids: a decoder shaped as GPT-2, an encoder shaped as BERT, and a small LSTM.

All take ids [N, T], integers. Floats in their place are probabilities of tokens [N, T, vocabulary], or embeddings
[N, T, width]: what a search over texts moves. Modules bear the names of Hugging Face's, so that published weights can
be read from a file (`torch_weights.load`).
"""

from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from gradleak.core import errors
from gradleak.core.settings import Choice, Count, Range
from gradleak.core.trees import Tree
from gradleak.models import layers, repeated
from gradleak.models.builtin import Width, builtin
from gradleak.models.model import FirstBlock, Model, from_flax

CITATIONS = {
  'gpt': (
    'Radford, Wu, Child, Luan, Amodei, Sutskever: Language Models are Unsupervised Multitask Learners. OpenAI 2019.',
  ),
  'bert': (
    'Devlin, Chang, Lee, Toutanova: BERT: Pre-training of Deep Bidirectional Transformers for Language Understanding. '
    'NAACL 2019.',
  ),
  'lstm': ('Hochreiter, Schmidhuber: Long Short-Term Memory. Neural Computation 1997.',),
}
GPT_HEADS = ('last', 'mean', 'next')
BERT_HEADS = ('first', 'mean', 'masked')
MAX_LENGTH, MAX_TOKENS = 65_536, 1_048_576

Vocabulary = Annotated[int, Range(3, MAX_TOKENS)]
Length = Annotated[int, Range(1, MAX_LENGTH)]
Padding = Annotated[int | None, Range(0)]
Depth = Annotated[int, Range(1, 128)]
Dropped = Annotated[float, Range(0, 0.99)]


def _drawn(initial: str, fan_in: int) -> Callable[..., jax.Array]:
  """Returns the initialiser of weights: 'default' is N(0, 0.02²), as published; others are those of `layers`."""
  return nn.initializers.normal(0.02) if initial == 'default' else layers.initialiser(initial)(fan_in)


class Dense(nn.Module):
  """A dense layer with kernel [in, out] on the last axis; with 'default', N(0, 0.02²) and a bias of zero."""

  features: int
  initial: str
  bias: bool = True

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    draw = _drawn(self.initial, x.shape[-1])
    y = x @ self.param('kernel', draw, (x.shape[-1], self.features), jnp.float32)
    if not self.bias:
      return y
    zeros = nn.initializers.zeros_init() if self.initial == 'default' else draw
    return y + self.param('bias', zeros, (self.features,), jnp.float32).reshape(*[1] * (x.ndim - 1), -1)


class Embedding(nn.Module):
  """A table of vectors: rows for integers, mixtures of rows for probabilities, and vectors as they are."""

  rows: int
  width: int

  def setup(self) -> None:
    self.embedding = self.param('embedding', nn.initializers.normal(0.02), (self.rows, self.width), jnp.float32)

  def __call__(self, x: jax.Array) -> jax.Array:
    if jnp.issubdtype(x.dtype, jnp.integer):
      return jnp.take(self.embedding, x, axis=0, mode='clip')
    return x if x.shape[-1] == self.width else x @ self.embedding

  def attend(self, x: jax.Array) -> jax.Array:
    """Returns the products with all rows."""
    return x @ self.embedding.T

  def counts(self, x: jax.Array, padding: int | None) -> jax.Array:
    """Returns which positions hold a token, bool [N, T]: those whose likeliest token, or vector, is not padding's."""
    if padding is None:
      return jnp.ones(x.shape[:2], bool)
    if jnp.issubdtype(x.dtype, jnp.integer):
      return x != padding
    if x.shape[-1] == self.rows:
      return jnp.argmax(x, axis=-1) != padding
    return jnp.any(x != jax.lax.stop_gradient(self.embedding[padding]).reshape(1, 1, -1), axis=-1)


class Shape(NamedTuple):
  """What the modules of one network share."""

  initial: str
  vocabulary: int
  width: int
  depth: int
  heads: int
  length: int
  padding: int | None
  dropout: float
  fused: bool = False
  tied: bool = True


def _norm(name: str, epsilon: float) -> nn.Module:
  return nn.LayerNorm(epsilon=epsilon, use_fast_variance=False, name=name)


def _drop(shape: Shape, x: jax.Array, train: bool) -> jax.Array:
  return nn.Dropout(shape.dropout, deterministic=not train)(x) if shape.dropout else x


def _positions(shape: Shape, name: str, x: jax.Array) -> jax.Array:
  """Returns the embeddings of positions [1, T, width]; raises `UsageError` for more than the network has."""
  if x.shape[1] > shape.length:
    raise errors.UsageError(f'a sequence has {x.shape[1]} tokens, and the model is made for length={shape.length}')
  return Embedding(shape.length, shape.width, name=name)(jnp.arange(x.shape[1])[jnp.newaxis])


class GptAttention(nn.Module):
  """Attention with one dense layer for queries, keys and values, or one for each, and one for the result."""

  shape: Shape

  @nn.compact
  def __call__(self, x: jax.Array, seen: jax.Array) -> jax.Array:
    width, initial = self.shape.width, self.shape.initial
    if self.shape.fused:
      parts = jnp.split(Dense(3 * width, initial, name='c_attn')(x), 3, axis=-1)
    else:
      parts = [Dense(width, initial, name=name)(x) for name in 'qkv']
    return Dense(width, initial, name='c_proj')(layers.attention(parts[0], parts[1], parts[2], self.shape.heads, seen))


class GptMlp(nn.Module):
  """Two dense layers on each token, with four times as many features and GELU, by tanh, between."""

  shape: Shape

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    y = jax.nn.gelu(Dense(4 * self.shape.width, self.shape.initial, name='c_fc')(x), approximate=True)  # gelu_new
    return Dense(self.shape.width, self.shape.initial, name='c_proj')(y)


class GptBlock(nn.Module):
  """Attention and dense layers, each on a LayerNorm of its input and added to it."""

  shape: Shape

  @nn.compact
  def __call__(self, x: jax.Array, seen: jax.Array, train: bool) -> jax.Array:
    x = x + _drop(self.shape, GptAttention(self.shape, name='attn')(_norm('ln_1', 1e-5)(x), seen), train)
    return x + _drop(self.shape, GptMlp(self.shape, name='mlp')(_norm('ln_2', 1e-5)(x)), train)


class Gpt(nn.Module):
  """Tokens and positions, blocks, LayerNorm and a head."""

  outputs: int
  shape: Shape
  head: str

  @nn.compact
  def __call__(self, ids: jax.Array, train: bool = False) -> jax.Array:
    shape = self.shape
    wte = Embedding(shape.vocabulary, shape.width, name='wte')
    x = wte(_tokens(shape, ids))
    counted, x = wte.counts(ids, shape.padding), x + _positions(shape, 'wpe', x)
    causal = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))
    seen = causal[jnp.newaxis] & counted[:, jnp.newaxis, :]
    x, names = _drop(shape, x, train), [f'h_{i}' for i in range(shape.depth)]
    if shape.dropout:
      for name in names:
        x = GptBlock(shape, name=name)(x, seen, train)
    else:
      x = repeated.chain(self, lambda **given: GptBlock(shape, **given), names, x, seen, train)
    x = _norm('ln_f', 1e-5)(x)
    if self.head == 'next':
      return wte.attend(x) if shape.tied else Dense(self.outputs, shape.initial, bias=False, name='lm_head')(x)
    pooled = _last(x, counted) if self.head == 'last' else _mean(x, counted)
    return Dense(self.outputs, shape.initial, bias=False, name='score')(pooled)


def _tokens(shape: Shape, x: jax.Array) -> jax.Array:
  """Returns the samples; raises `UsageError` for floats that are neither probabilities nor embeddings."""
  floats = not jnp.issubdtype(x.dtype, jnp.integer)
  if x.ndim != 2 + floats or (floats and x.shape[-1] not in (shape.vocabulary, shape.width)):
    raise errors.UsageError(
      f'samples of a model of tokens are {x.dtype} of shape {x.shape}, expected ids, integers [N, T], probabilities '
      f'[N, T, {shape.vocabulary}] or embeddings [N, T, {shape.width}]'
    )
  return x


def _last(x: jax.Array, counted: jax.Array) -> jax.Array:
  """Returns the vector of the last position that counts, [N, width]; the first where none does."""
  place = jnp.max(jnp.where(counted, jnp.arange(counted.shape[1])[jnp.newaxis], 0), axis=1)
  return jnp.take_along_axis(x, place[:, jnp.newaxis, jnp.newaxis], axis=1)[:, 0]


def _mean(x: jax.Array, counted: jax.Array) -> jax.Array:
  """Returns the mean over the positions that count, [N, width]; 0 where none does."""
  weights = counted.astype(x.dtype)[..., jnp.newaxis]
  return jnp.sum(x * weights, axis=1) / jnp.maximum(jnp.sum(weights, axis=1), jnp.asarray(1, x.dtype))


class BertSelf(nn.Module):
  """Attention of all tokens to all that count."""

  shape: Shape

  @nn.compact
  def __call__(self, x: jax.Array, seen: jax.Array) -> jax.Array:
    parts = [Dense(self.shape.width, self.shape.initial, name=name)(x) for name in ('query', 'key', 'value')]
    return layers.attention(parts[0], parts[1], parts[2], self.shape.heads, seen)


class BertAdded(nn.Module):
  """A dense layer whose result is added to another value, and a LayerNorm."""

  shape: Shape

  @nn.compact
  def __call__(self, x: jax.Array, other: jax.Array, train: bool) -> jax.Array:
    x = _drop(self.shape, Dense(self.shape.width, self.shape.initial, name='dense')(x), train)
    return _norm('LayerNorm', 1e-12)(x + other)


class BertAttention(nn.Module):
  """Attention, added to its input and normalised."""

  shape: Shape

  @nn.compact
  def __call__(self, x: jax.Array, seen: jax.Array, train: bool) -> jax.Array:
    return BertAdded(self.shape, name='output')(BertSelf(self.shape, name='self')(x, seen), x, train)


class BertMlp(nn.Module):
  """A dense layer of four times as many features, and exact GELU."""

  shape: Shape
  features: int

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    return jax.nn.gelu(Dense(self.features, self.shape.initial, name='dense')(x), approximate=False)


class BertBlock(nn.Module):
  """Attention and dense layers, each added to its input and then normalised."""

  shape: Shape

  @nn.compact
  def __call__(self, x: jax.Array, seen: jax.Array, train: bool) -> jax.Array:
    x = BertAttention(self.shape, name='attention')(x, seen, train)
    wide = BertMlp(self.shape, 4 * self.shape.width, name='intermediate')(x)
    return BertAdded(self.shape, name='output')(wide, x, train)


class BertEmbeddings(nn.Module):
  """Tokens, positions and the first of two types, added and normalised."""

  shape: Shape

  @nn.compact
  def __call__(self, ids: jax.Array, train: bool) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns (x [N, T, width], which positions count, the table)."""
    words = Embedding(self.shape.vocabulary, self.shape.width, name='word_embeddings')
    x = words(_tokens(self.shape, ids))
    kind = Embedding(2, self.shape.width, name='token_type_embeddings')(jnp.zeros((1, 1), jnp.int32))
    x = x + _positions(self.shape, 'position_embeddings', x) + kind
    return (
      _drop(self.shape, _norm('LayerNorm', 1e-12)(x), train),
      words.counts(ids, self.shape.padding),
      words.embedding,
    )


class BertEncoder(nn.Module):
  """The blocks."""

  shape: Shape

  @nn.compact
  def __call__(self, x: jax.Array, seen: jax.Array, train: bool) -> jax.Array:
    names = [f'layer_{i}' for i in range(self.shape.depth)]
    if not self.shape.dropout:
      return repeated.chain(self, lambda **given: BertBlock(self.shape, **given), names, x, seen, train)
    for name in names:
      x = BertBlock(self.shape, name=name)(x, seen, train)
    return x


class BertTransform(nn.Module):
  """A dense layer, exact GELU and LayerNorm."""

  shape: Shape

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    y = jax.nn.gelu(Dense(self.shape.width, self.shape.initial, name='dense')(x), approximate=False)
    return _norm('LayerNorm', 1e-12)(y)


class BertPredictions(nn.Module):
  """A dense layer, GELU and LayerNorm; products with the table of embeddings, and a bias for each token."""

  shape: Shape

  @nn.compact
  def __call__(self, x: jax.Array, table: jax.Array) -> jax.Array:
    x = BertTransform(self.shape, name='transform')(x)
    return Bias(name='decoder')(x @ table.T)


class Bias(nn.Module):
  """A number for each output."""

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    bias = self.param('bias', nn.initializers.zeros_init(), (x.shape[-1],), jnp.float32)
    return x + bias.reshape(1, 1, -1)


class Bert(nn.Module):
  """Embeddings, blocks, and a head."""

  outputs: int
  shape: Shape
  head: str

  @nn.compact
  def __call__(self, ids: jax.Array, train: bool = False) -> jax.Array:
    shape = self.shape
    x, counted, table = BertEmbeddings(shape, name='embeddings')(ids, train)
    x = BertEncoder(shape, name='encoder')(x, counted[:, jnp.newaxis, :], train)
    if self.head == 'masked':
      return BertPredictions(shape, name='predictions')(x, table)
    x = jnp.tanh(BertPooler(shape, name='pooler')(x[:, 0])) if self.head == 'first' else _mean(x, counted)
    return Dense(self.outputs, shape.initial, name='classifier')(_drop(shape, x, train))


class BertPooler(nn.Module):
  """A dense layer on the first token."""

  shape: Shape

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    return Dense(self.shape.width, self.shape.initial, name='dense')(x)


class LstmLayer(nn.Module):
  """One LSTM over the positions, with PyTorch's order of gates: input, forget, cell, output. Padding is passed over."""

  initial: str
  width: int

  @nn.compact
  def __call__(self, x: jax.Array, counted: jax.Array) -> jax.Array:
    draw = layers.initialiser(self.initial)(self.width)
    inputs = self.param('kernel', draw, (x.shape[-1], 4 * self.width), jnp.float32)
    recurrent = self.param('recurrent', draw, (self.width, 4 * self.width), jnp.float32)
    bias = self.param('bias', draw, (4 * self.width,), jnp.float32)
    gates = jnp.swapaxes(x @ inputs + bias.reshape(1, 1, -1), 0, 1)

    def step(carry: tuple[jax.Array, jax.Array], given: tuple[jax.Array, jax.Array]) -> tuple[Any, jax.Array]:
      (h, c), (gate, counts) = carry, given
      i, f, g, o = jnp.split(gate + h @ recurrent, 4, axis=-1)
      cell = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
      hidden = jax.nn.sigmoid(o) * jnp.tanh(cell)
      h, c = jnp.where(counts[:, jnp.newaxis], hidden, h), jnp.where(counts[:, jnp.newaxis], cell, c)
      return (h, c), h

    zeros = jnp.zeros((x.shape[0], self.width), gates.dtype)
    _, found = jax.lax.scan(step, (zeros, zeros), (gates, counted.T))
    return jnp.swapaxes(found, 0, 1)


class Lstm(nn.Module):
  """Tokens, LSTMs and a head."""

  outputs: int
  shape: Shape
  head: str

  @nn.compact
  def __call__(self, ids: jax.Array, train: bool = False) -> jax.Array:
    wte = Embedding(self.shape.vocabulary, self.shape.width, name='wte')
    x = wte(_tokens(self.shape, ids))
    counted = wte.counts(ids, self.shape.padding)
    for i in range(self.shape.depth):
      x = _drop(self.shape, LstmLayer(self.shape.initial, self.shape.width, name=f'lstm_{i}')(x, counted), train)
    if self.head != 'next':
      x = _last(x, counted) if self.head == 'last' else _mean(x, counted)
    return layers.Dense(self.outputs, self.shape.initial, name='head')(x)


def _checked(name: str, num_classes: int, shape: Shape, head: str) -> None:
  """Raises `UsageError` for settings that do not fit each other."""
  if shape.width % shape.heads:
    raise errors.UsageError(f'{name}(heads) is {shape.heads}, expected a divisor of the width {shape.width}')
  if shape.width == shape.vocabulary:
    raise errors.UsageError(
      f'{name} has width and vocabulary {shape.width}: probabilities could not be told from embeddings, take another '
      'width'
    )
  if shape.padding is not None and shape.padding >= shape.vocabulary:
    raise errors.UsageError(
      f'{name}(padding) is {shape.padding}, expected an id below the vocabulary {shape.vocabulary}'
    )
  if head in ('next', 'masked') and num_classes != shape.vocabulary:
    raise errors.UsageError(
      f'{name}(head={head}) has an output for each of {shape.vocabulary} tokens, and num_classes is {num_classes}'
    )


def _model(name: str, module: nn.Module, shape: Shape, first: FirstBlock | None = None) -> Model:
  return from_flax(module, axes=1, dtype='int32')._replace(
    citations=CITATIONS[name], first_block=first, vocabulary=shape.vocabulary, padding=shape.padding
  )


def _applied(module: nn.Module, params: Tree, *inputs: Any) -> Any:
  return module.apply({'params': params}, *inputs)


def _gpt_first(shape: Shape) -> FirstBlock:
  """Returns what the span attack reads of a decoder."""

  def parts(variables: Tree) -> tuple:
    params = variables['params']
    norm = params['h_0']['ln_1']
    return params['wte']['embedding'], params['wpe']['embedding'], norm['scale'], norm['bias'], 1e-5

  def tokens(variables: Tree, x: jax.Array) -> tuple[jax.Array, ...]:
    attn = variables['params']['h_0']['attn']
    if not shape.fused:
      return tuple(_applied(Dense(shape.width, shape.initial), attn[name], x) for name in 'qkv')
    return tuple(jnp.split(_applied(Dense(3 * shape.width, shape.initial), attn['c_attn'], x), 3, axis=-1))

  def mixed(variables: Tree, plain: jax.Array, attended: jax.Array) -> jax.Array:
    block = variables['params']['h_0']
    x = plain + _applied(Dense(shape.width, shape.initial), block['attn']['c_proj'], attended)
    return _applied(_norm('', 1e-5).clone(name=None), block['ln_2'], x)

  def following(variables: Tree, plain: jax.Array, attended: jax.Array) -> jax.Array:
    params = variables['params']
    x = plain + _applied(Dense(shape.width, shape.initial), params['h_0']['attn']['c_proj'], attended)
    x = x + _applied(GptMlp(shape), params['h_0']['mlp'], mixed(variables, plain, attended))
    return _applied(_norm('', 1e-5).clone(name=None), params['h_1']['ln_1'], x)

  names = ('c_attn',) if shape.fused else ('q', 'k', 'v')
  deep = shape.depth > 1
  return FirstBlock(
    causal=True,
    padding=shape.padding,
    heads=shape.heads,
    table=('wte', 'embedding'),
    projections=tuple(('h_0', 'attn', name, 'kernel') for name in names),
    second=(('h_0', 'mlp', 'c_fc', 'kernel'),),
    next_projections=tuple(('h_1', 'attn', name, 'kernel') for name in names) if deep else (),
    parts=parts,
    tokens=tokens,
    mixed=mixed,
    following=following,
    normalised_sum=False,
  )


def _bert_first(shape: Shape) -> FirstBlock:
  """Returns what the span attack reads of an encoder."""

  def parts(variables: Tree) -> tuple:
    own = variables['params']['embeddings']
    position = own['position_embeddings']['embedding'] + own['token_type_embeddings']['embedding'][:1]
    norm = own['LayerNorm']
    return own['word_embeddings']['embedding'], position, norm['scale'], norm['bias'], 1e-12

  def attention_of(variables: Tree) -> Tree:
    return variables['params']['encoder']['layer_0']['attention']

  def tokens(variables: Tree, x: jax.Array) -> tuple[jax.Array, ...]:
    own = attention_of(variables)['self']
    return tuple(_applied(Dense(shape.width, shape.initial), own[name], x) for name in ('query', 'key', 'value'))

  def mixed(variables: Tree, plain: jax.Array, attended: jax.Array) -> jax.Array:
    return _applied(BertAdded(shape._replace(dropout=0.0)), attention_of(variables)['output'], attended, plain, False)

  def following(variables: Tree, plain: jax.Array, attended: jax.Array) -> jax.Array:
    own, x = variables['params']['encoder']['layer_0'], mixed(variables, plain, attended)
    plain_shape = shape._replace(dropout=0.0)
    wide = _applied(BertMlp(plain_shape, 4 * shape.width), own['intermediate'], x)
    return _applied(BertAdded(plain_shape), own['output'], wide, x, False)

  block, names = ('encoder', 'layer_0'), ('query', 'key', 'value')
  after = [('encoder', 'layer_1', 'attention', 'self', name, 'kernel') for name in names]
  return FirstBlock(
    causal=False,
    padding=shape.padding,
    heads=shape.heads,
    table=('embeddings', 'word_embeddings', 'embedding'),
    projections=tuple((*block, 'attention', 'self', name, 'kernel') for name in names),
    second=((*block, 'intermediate', 'dense', 'kernel'),),
    next_projections=tuple(after) if shape.depth > 1 else (),
    parts=parts,
    tokens=tokens,
    mixed=mixed,
    following=following,
    normalised_sum=True,
  )


@builtin
def gpt(
  num_classes: int,
  init: str = 'explicit',
  conv: str | None = None,
  *,
  vocabulary: Vocabulary = 258,
  width: Width = 64,
  layers: Depth = 2,
  heads: Count = 4,
  length: Length = 1024,
  head: Annotated[str, Choice(GPT_HEADS)] = 'last',
  tied: bool = True,
  fused: bool = True,
  padding: Padding = 256,
  dropout: Dropped = 0.0,
) -> Model:
  """Returns a decoder shaped as GPT-2 (Radford et al. 2019): LayerNorm first, GELU by tanh, learned positions.

  With `vocabulary=50257,width=768,layers=12,heads=12` and the head 'next' it has 124,439,808 parameters, GPT-2's.

  Args:
    num_classes: number of outputs; with the head 'next', the vocabulary.
    init: 'default' draws weights from N(0, 0.02²) and sets biases to zero, as published; 'explicit' draws dense layers
      from U(−0.5, 0.5), with which attention is nearly one-hot. Embeddings are from N(0, 0.02²) in both.
    conv: not used; the network has no convolution.
    vocabulary: number of token ids.
    width: features of a token; the dense layers of a block have four times as many.
    layers: number of blocks.
    heads: of the attention; a divisor of the width.
    length: number of positions with an embedding, 1,024 in GPT-2. Sequences may be shorter.
    head: what the outputs are: of classes, from the 'last' token or from the 'mean' of all, [N, classes]; or of the
      'next' token at each position, [N, T, vocabulary].
    tied: whether the head 'next' takes the table of embeddings for its weights.
    fused: whether one dense layer, `c_attn`, makes queries, keys and values, as published, or three: `q`, `k`, `v`.
    padding: the id that fills short sequences, which no token attends to and no head counts; None for none.
    dropout: share of features that training drops, where a client has a key; 0.1 in GPT-2.

  Raises:
    UsageError: for settings that do not fit each other; at `init` and when applied, for samples that are no tokens and
      for longer sequences.
  """
  del conv
  shape = Shape(init, vocabulary, width, layers, heads, length, padding, dropout, fused, tied)
  _checked('gpt', num_classes, shape, head)
  return _model('gpt', Gpt(num_classes, shape, head), shape, _gpt_first(shape))


@builtin
def bert(
  num_classes: int,
  init: str = 'explicit',
  conv: str | None = None,
  *,
  vocabulary: Vocabulary = 258,
  width: Width = 64,
  layers: Depth = 2,
  heads: Count = 4,
  length: Length = 512,
  head: Annotated[str, Choice(BERT_HEADS)] = 'first',
  padding: Padding = 256,
  dropout: Dropped = 0.0,
) -> Model:
  """Returns an encoder shaped as BERT (Devlin et al. 2019): LayerNorm last, exact GELU, learned positions.

  With `vocabulary=30522,width=768,layers=12,heads=12` it has the 109,482,240 parameters of BERT base, and those of its
  head. All tokens are of the first of its two types.

  Args:
    num_classes, init, conv, vocabulary, width, layers, heads, length, padding, dropout: as for `gpt`.
    head: what the outputs are: of classes, from the 'first' token by a dense layer and tanh, or from the 'mean' of all,
      [N, classes]; or of the 'masked' token at each position, [N, T, vocabulary].

  Raises:
    UsageError: as `gpt` does.
  """
  del conv
  shape = Shape(init, vocabulary, width, layers, heads, length, padding, dropout)
  _checked('bert', num_classes, shape, head)
  return _model('bert', Bert(num_classes, shape, head), shape, _bert_first(shape))


@builtin
def lstm(
  num_classes: int,
  init: str = 'explicit',
  conv: str | None = None,
  *,
  vocabulary: Vocabulary = 258,
  width: Width = 64,
  layers: Depth = 1,
  head: Annotated[str, Choice(GPT_HEADS)] = 'last',
  padding: Padding = 256,
  dropout: Dropped = 0.0,
) -> Model:
  """Returns `layers` LSTMs (Hochreiter and Schmidhuber 1997) on embeddings of tokens, and a dense layer.

  Args:
    num_classes, conv, vocabulary, padding, dropout: as for `gpt`.
    init: 'default' draws weights and biases from U(±1/√width), as PyTorch's LSTM, 'explicit' from U(−0.5, 0.5).
    width: of the embeddings and of each LSTM.
    layers: number of LSTMs, one on the other.
    head: as for `gpt`.

  Raises:
    UsageError: as `gpt` does.
  """
  del conv
  shape = Shape(init, vocabulary, width, layers, 1, MAX_LENGTH, padding, dropout)
  _checked('lstm', num_classes, shape, head)
  return _model('lstm', Lstm(num_classes, shape, head), shape)
