"""Texts: token ids int32 [N, T], padded behind; a search moves probabilities of tokens, or their embeddings."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gradleak.core import errors
from gradleak.data import tokenisers
from gradleak.data.text import MODALITY
from gradleak.data.tokenisers import Tokeniser
from gradleak.metrics import text as metrics
from gradleak.metrics.identification import firsts
from gradleak.modalities.base import NUMBER, Column, Modality, Piece, Relaxation, Shown, modality
from gradleak.models import Model

_DIVERGED = 'the trial diverged'
_SHARE = (0, 1)
_ROUNDED_UP = 128  # tokens that a network may embed beyond those of its tokeniser, else a hundredth of these

COLUMNS = (
  Column('rouge1', NUMBER, '[0, 1]', 'ROUGE-1, the F1 of shared words; mean over the batch.', _DIVERGED, _SHARE),
  Column('rouge2', NUMBER, '[0, 1]', 'ROUGE-2, the F1 of shared pairs of words; a mean.', _DIVERGED, _SHARE),
  Column('rouge_l', NUMBER, '[0, 1]', 'ROUGE-L, the F1 of the longest common subsequence.', _DIVERGED, _SHARE),
  Column('token_accuracy', NUMBER, '[0, 1]', 'Share of the tokens that are right at their place.', _DIVERGED, _SHARE),
  Column('type_accuracy', NUMBER, '[0, 1]', 'The same, each different token counted once.', _DIVERGED, _SHARE),
  Column(
    'standing',
    NUMBER,
    '[-1, 1]',
    'tanh of the normal score of where the original stands among the candidates, by bags of tokens; 0 by chance.',
    'the trial diverged, or there is no candidate',
    (-1, 1),
  ),
)


def _probabilities(tokens: int, model: Model) -> Relaxation:
  """Returns the relaxation by a softmax over all that a model embeds; the likeliest token is settled on."""
  size = model.vocabulary or tokens

  def decide(given: jax.Array, variables: Any) -> jax.Array:
    del variables
    return _decided(given[..., :tokens])

  return Relaxation(
    shape=lambda shape, variables: (*shape, size),
    apply=lambda free: jax.nn.softmax(free, axis=-1),
    decide=decide,
    relaxed=lambda samples, variables: jax.nn.one_hot(samples, size, dtype=jnp.float32),
  )


def _embeddings(tokens: int, model: Model) -> Relaxation:
  """Returns the relaxation by free embeddings; the token whose embedding has the largest cosine is settled on."""
  return Relaxation(
    shape=lambda shape, variables: (*shape, table(variables, model).shape[1]),
    apply=lambda free: free,
    decide=lambda given, variables: _decided(given @ unit(table(variables, model)[:tokens].astype(given.dtype)).T),
    relaxed=lambda samples, variables: jnp.take(table(variables, model), samples, axis=0, mode='clip'),
    scale=lambda variables: jnp.std(table(variables, model)),
    silent=() if model.first_block is None else model.first_block.table,
  )


def _decided(scores: jax.Array) -> jax.Array:
  """Returns the token with the largest score, int32 [N, T]; −1 where one is not finite."""
  return jnp.where(jnp.isfinite(scores).all(axis=-1), jnp.argmax(scores, axis=-1).astype(jnp.int32), -1)


def unit(rows: jax.Array) -> jax.Array:
  """Returns rows [V, d] divided by their norms; zeros stay so."""
  return rows / jnp.maximum(jnp.linalg.norm(rows, axis=-1, keepdims=True), jnp.asarray(1e-12, rows.dtype))


def table(variables: Any, model: Model) -> jax.Array:
  """Returns the table of embeddings [V, d] of a model of tokens; raises `UsageError` for a model that names none."""
  if model.first_block is None:
    raise errors.UsageError(
      f'the model {model.name!r} does not say where its embeddings of tokens are: take gpt or bert'
    )
  found = model.first_block.parts(variables)[0]
  if found.shape[0] == found.shape[1]:
    raise errors.UsageError(
      f'the model {model.name!r} embeds {len(found)} tokens in as many numbers: probabilities could not be told from '
      'embeddings'
    )
  return found


def _check(made: Tokeniser, samples: Any) -> None:
  samples = errors.host_array('texts', samples)
  if samples.ndim != 2 or not samples.size or samples.dtype.kind not in 'iu':
    raise errors.UsageError(f'texts are {samples.dtype} of shape {samples.shape}, expected tokens, integers [N, T]')
  wrong = np.argwhere((samples < 0) | (samples >= made.size))
  if len(wrong):
    row, place = wrong[0]
    raise errors.UsageError(f'text {row} has the token {samples[row, place]}, expected one in [0, {made.size - 1}]')
  empty = np.flatnonzero(np.isin(samples, list(made.special)).all(axis=1))
  if len(empty):
    raise errors.UsageError(f'text {empty[0]} has no token but padding')
  held = samples != made.pad
  gaps = np.flatnonzero((held[:, 1:] & ~held[:, :-1]).any(axis=1))
  if len(gaps):
    raise errors.UsageError(f'text {gaps[0]} has padding before a token: texts are padded behind')


def _distinct(samples: np.ndarray) -> list[int]:
  return firsts(np.ascontiguousarray(text).tobytes() for text in samples)


def _marked(made: Tokeniser, text: np.ndarray, truth: np.ndarray | None) -> list[Piece]:
  """Returns the tokens of a text; a missing one where the reconstruction has none in place of one."""
  found = []
  for place, token in enumerate(np.asarray(text).tolist()):
    own = None if truth is None else int(truth[place])
    empty = token in made.special or token < 0
    if empty and (own is None or own in made.special):
      continue
    right = None if own is None else token == own and not empty
    found.append(Piece('▢' if empty else made.shown(int(token)), right))
  return found


def _misfit(made: Tokeniser, model: Model) -> str:
  """Returns why a model is of another tokeniser; '' where it is not, or does not say.

  A model may embed a few more tokens, up to a multiple of eight. It may lack those for padding and masks, which are
  added to the tokens of a file.
  """
  known = made.size if model.vocabulary is None else model.vocabulary
  more = known - made.size
  rounded_up = known % 8 == 0 and more <= max(_ROUNDED_UP, made.size // 100)
  if (more > 0 and not rounded_up) or not made.special.issuperset(range(known, made.size)):
    return (
      f'{model.name!r} embeds {known} tokens, and the tokeniser has {made.size}: it is of another tokeniser, else '
      f'give it vocabulary={made.size}'
    )
  if model.padding not in (None, made.pad):
    return (
      f'{model.name!r} takes the token {model.padding} for padding, and the texts are padded with {made.pad}: give it '
      f'padding={made.pad}'
    )
  return ''


def _longest(model: Model, variables: Any) -> list[tuple[int, ...]]:
  """Returns the shape of a text that has a token at every position that the model embeds; none where it names none."""
  return [] if model.first_block is None else [(len(model.first_block.parts(variables)[1]),)]


def _first(made: Tokeniser) -> int:
  """Returns the first token that stands for something."""
  return next(token for token in range(made.size) if token not in made.special)


def _neutral(made: Tokeniser, shape: Sequence[int]) -> np.ndarray:
  """Returns a text of one token over and over."""
  return np.full(shape, _first(made), np.int32)


def _drawn(made: Tokeniser, key: jax.Array, shape: Sequence[int]) -> jax.Array:
  """Returns texts of random tokens, each of which stands for something."""
  return jax.random.choice(key, np.setdiff1d(np.arange(made.size, dtype=np.int32), list(made.special)), shape)


def _replaced(made: Tokeniser, samples: np.ndarray) -> np.ndarray:
  """Returns texts whose middle token is another one, the first that stands for something, or the second."""
  found, first = samples.copy(), _first(made)
  second = next((token for token in range(first + 1, made.size) if token not in made.special), first)
  places = np.arange(len(found)), ((samples != made.pad).sum(axis=1) - 1) // 2
  found[places] = np.where(found[places] == first, second, first)
  return found


def _shortened(made: Tokeniser, samples: np.ndarray) -> np.ndarray:
  """Returns texts without their last token, where they have two."""
  found = samples.copy()
  held = (samples != made.pad).sum(axis=1)
  places = np.arange(len(found)), np.maximum(held - 1, 0)
  found[places] = np.where(held > 1, made.pad, found[places])
  return found


def following(made: Tokeniser, samples: jax.Array, size: int | None = None) -> jax.Array:
  """Returns the targets of predicting each next token, floats [N, T, V]; zeros where none follows, or padding does.

  Args:
    made: the tokeniser.
    samples: ids [N, T], or probabilities [N, T, V].
    size: V, how many tokens the model embeds; None for those of the tokeniser.
  """
  whole = _as_probabilities(samples, size or made.size)
  after = jnp.concatenate([whole[:, 1:], jnp.zeros_like(whole[:, :1])], axis=1)
  return after * (jnp.arange(whole.shape[-1]) != made.pad).astype(after.dtype).reshape(1, 1, -1)


def hidden(
  made: Tokeniser, samples: jax.Array, share: float, seed: int, size: int | None = None
) -> tuple[jax.Array, jax.Array]:
  """Returns (samples with masks, targets of predicting what they hide, floats [N, T, V], zeros elsewhere).

  A share of the places is masked, the same for all texts and always: BERT's static masking. A text without a token at
  these places counts for nothing.

  Args:
    made: the tokeniser.
    samples: ids [N, T], or probabilities [N, T, V].
    share: of the places, at least one of them.
    seed: of the places.
    size: V, how many tokens the model embeds; None for those of the tokeniser.
  """
  size = size or made.size
  whole, length = _as_probabilities(samples, size), samples.shape[1]
  places = np.random.default_rng(seed).permutation(length)[: max(1, round(share * length))]
  masked = np.zeros((1, length, 1), bool)
  masked[0, places] = True
  known = (jnp.arange(size) != made.pad).astype(whole.dtype).reshape(1, 1, -1)
  targets = jnp.where(masked, whole * known, jnp.zeros_like(whole))
  if samples.ndim == 2:
    covered = masked[..., 0] & (samples != made.pad)
    return jnp.where(covered, jnp.asarray(made.mask, samples.dtype), samples), targets
  mask = jax.nn.one_hot(min(made.mask, size - 1), size, dtype=whole.dtype).reshape(1, 1, -1)  # as ids are clipped
  pad = jax.nn.one_hot(made.pad, size, dtype=whole.dtype).reshape(1, 1, -1)
  padding = jnp.sum(whole * pad, axis=-1, keepdims=True)
  return jnp.where(masked, padding * pad + (1 - padding) * mask, whole), targets


def _as_probabilities(samples: jax.Array, size: int) -> jax.Array:
  if samples.ndim == 2:
    return jax.nn.one_hot(samples, size, dtype=jnp.float32)
  if samples.shape[-1] != size:
    raise errors.UsageError(
      f'a loss that predicts tokens needs ids or probabilities of {size} tokens, and these samples are '
      f'embeddings of {samples.shape[-1]} numbers: take the relaxation softmax, or a loss of classes'
    )
  return samples


# Flags of programs that are not given have these values.
DEFAULTS: dict[str, Any] = {
  'model': 'gpt(width=32,layers=1,heads=2)',
  'init': 'default',
  'loss': 'next_token',
  'attack': 'tag(decay=cosine)',
  'attacks': 'span;tag(decay=cosine)',
  'steps': 300,
  'public': 1000,
  'defenses': 'none;gaussian(stddev=0.01);prune(rate=0.99);dpsgd(norm=0.1,noise=0.1);fragmentation(ratio=0.4);'
  'graddefense(stddev=0.1);outpost',
}

# Sentences of the report that mean something else of texts than of any sample.
WORDS = {
  'meaning.recognisable': 'a text of which phrases are right, and whose original is nearest to it',
  'verdicts.exact': 'A private text is one of those that the attack returned: all its tokens are right, in order.',
  'verdicts.recognisable': 'Two tests hold. The original is the nearest of all candidates, {size:0} other real texts, '
  'by its weighted bag of tokens.{made} And its ROUGE-2 is above the 99th percentile of two different candidates.',
  'verdicts.re-identified': 'The original is the nearest of all candidates by its weighted bag of tokens, which '
  'happens to one attacker by chance in {chance:significant} % of uploads. And its standing among them is three '
  'standard deviations above that of the control, if that has any: an attacker with a list of suspects learns who it '
  'is, although no text is right.',
  'verdicts.above chance': 'ROUGE-1 and the standing among the candidates are beyond the control (its 95th percentile; '
  'three standard deviations above its mean), and nothing more.',
  'scores.text': 'The F1 of the words that a reconstruction and the private text have in common, each as often as it '
  'occurs (ROUGE-1, Lin 2004); 1 is all of them, in any order. Texts are matched to the private ones first. Common '
  'words alone are shared by different texts, so compare with the control.',
  'sensitivity.term_score': 'ROUGE-1 of one text per trial, the same in all settings; in a batch it is the first.',
  'captured.neutral': 'texts of a single token',
  'captured.neutral_head': 'one token',
  'captured.alike': 'ROUGE-1',
  'marked.samples': 'What the strongest attacker of each defense makes of the first private texts, token by token. '
  'What is right at its place is bold and has a colour. The last line counts it.',
}


@functools.lru_cache(maxsize=32)
def of_tokeniser(made: Tokeniser) -> Modality:
  """Returns the modality of texts of a tokeniser, the same object for equal ones."""
  special = made.special
  return Modality(
    name=MODALITY,
    axis_names=('T',),
    dtype='int32',
    relaxed_axes=2,
    check=functools.partial(_check, made),
    describe=lambda samples: {'tokeniser': made.described()},
    evaluate=lambda *arguments, signed=True, blank=True, among=None: metrics.evaluate(
      *arguments, special=special, decode=made.decode, among=among
    ),
    distinct=_distinct,
    gallery=lambda candidates, private: metrics.gallery(candidates, private, special, made.decode),
    columns=COLUMNS,
    score='rouge1',
    correlation='standing',
    likeness='rouge2',
    effect=0.1,
    oracle=('rouge1', 'rouge2', 'token_accuracy'),
    shown=(Shown('rouge1', 'ROUGE-1'), Shown('rouge2', 'ROUGE-2'), Shown('token_accuracy', 'tokens right')),
    further=(
      Shown('rouge_l', 'ROUGE-L'),
      Shown('type_accuracy', 'tokens right,\neach kind once'),
      Shown('standing', 'standing by\nbag of tokens'),
    ),
    nearness=functools.partial(_nearness, made),
    picture=functools.partial(_picture, made),
    neutral=functools.partial(_neutral, made),
    drawn=functools.partial(_drawn, made),
    misfit=functools.partial(_misfit, made),
    shapes=_longest,
    empty=lambda samples: (np.isin(samples, list(special)) | (samples < 0)).all(axis=1),
    marked=functools.partial(_marked, made),
    remade=_remade,
    defaults=DEFAULTS,
    words=WORDS,
    copies={
      'one token': functools.partial(_replaced, made),
      'shortened': functools.partial(_shortened, made),
    },
    noun=('text', 'texts'),
    shaped=lambda shape: f'up to {shape[0]} tokens',
    relaxations={
      'softmax': functools.partial(_probabilities, made.size),
      'embeddings': functools.partial(_embeddings, made.size),
    },
    targets={
      'next_token': lambda samples, **settings: (samples, following(made, samples, **settings)),
      'masked_token': lambda samples, **settings: hidden(made, samples, **settings),
    },
  )


def _nearness(made: Tokeniser, found: Any, truth: Any) -> np.ndarray:
  """Returns the ROUGE-1 of pairs, float [N]."""
  read = [[metrics.words(made.decode(one)) for one in np.asarray(texts)] for texts in (found, truth)]
  return np.asarray([metrics.rouge(one, other, 1) for one, other in zip(*read, strict=True)])


def _picture(made: Tokeniser, text: np.ndarray) -> np.ndarray:
  """Returns an image with a bar for each token, its height the token's number; padding is white."""
  text = np.asarray(text)
  height = 16
  found = np.ones((height, len(text), 1))
  for place, token in enumerate(text.tolist()):
    if token >= 0 and token not in made.special:
      found[height - 1 - int((height - 1) * token / made.size) :, place] = 0.25
  return found


def _remade(config: Mapping[str, Any]) -> Modality:
  described = config.get('tokeniser')
  return TEXT if described is None else of_tokeniser(tokenisers.restored(described))


def of_scenario(settings: Mapping[str, Any]) -> Tokeniser:
  """Returns the tokeniser of a scenario's settings; raises `UsageError` where its samples are no texts."""
  if 'tokeniser' not in settings:
    raise errors.UsageError('the attack reads texts, and the samples of this client are none')
  return tokenisers.restored(settings['tokeniser'])


TEXT = modality(of_tokeniser(tokenisers.in_bytes()))
