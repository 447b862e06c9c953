"""Decepticons: weights of a transformer of tokens that write texts into its gradient (Fowl et al., ICLR 2023).

The server changes no architecture. Embeddings of tokens and positions are codes in coordinates of their own. Attention
of the first block is uniform, and adds the mean code of the tokens that are seen: a mark of the sequence so far. All
neurons of the block's first dense layer take one measurement ⟨m, x⟩ of their input. Neuron k fires above its own
threshold c_k (`servers.imprint`). The gradients of neighbouring neurons then differ by the tokens in one bin.

Two points differ from the paper. There, attention to the first token marks a sequence. Here the mark is a mean, by
which each token follows from the text before. And tokens are not clustered: bins with several of them are solved for.
"""

import itertools
import math
from typing import Annotated, Any, NamedTuple

import jax
import numpy as np

from gradleak.attacks import span_targets
from gradleak.attacks.base import Attack, attack, host_form, padding_of, unsent
from gradleak.core import errors, trees
from gradleak.core.settings import Range
from gradleak.core.trees import Tree
from gradleak.federated import Client
from gradleak.federated.scenario import Scenario
from gradleak.models.model import FirstBlock, Model
from gradleak.servers.base import Server, check_sent, one_round, replaced, server
from gradleak.threat import Observation

Path = tuple[str, ...]
Gain = Annotated[float, Range(1.0, 1e8)]
Mark = Annotated[float, Range(1e-3, 1.0)]

_SHARES = 3 / 8, 1 / 8  # of the features for codes of tokens and of positions; the others are for the mark
_LEAST = 32  # features, below which codes resemble each other
_FEW = 6  # pairs that a bin may hold and be read
_FIT = 1e-3  # what may be left of a bin, or of its marks, in units of the norm
_APART = 8.0  # of the measurements of neighbouring positions, in deviations of those of tokens
_RAMP = 0.9  # the largest share of a position's code by which it is measured
_SURE = 6.0  # deviations of its noise that a share has to exceed
_MANY = 10_000  # ways to divide a bin over sequences that are tried


class Places(NamedTuple):
  """Where the parameters of a transformer of tokens stand.

  Attributes:
    tokens, positions: tables of embeddings.
    zeros: further tables, which are not used.
    norms: the LayerNorms of the first block's inputs.
    attention: kernels of queries, keys and values, in one or in three.
    out: dense layer behind attention.
    up, down: dense layers of the first block.
  """

  tokens: Path
  positions: Path
  zeros: tuple[Path, ...]
  norms: tuple[Path, ...]
  attention: tuple[Path, ...]
  out: Path
  up: Path
  down: Path

  @property
  def dense(self) -> tuple[Path, ...]:
    """The modules with a bias."""
    return (*self.norms, *self.attention, self.out, self.up, self.down)

  @property
  def all(self) -> tuple[Path, ...]:
    """Everything that is set."""
    return (self.tokens, self.positions, *self.zeros, *self.dense)


def _gpt(*attention: str) -> Places:
  own = ('h_0', 'attn')
  return Places(
    ('wte', 'embedding'),
    ('wpe', 'embedding'),
    (),
    (('h_0', 'ln_1'), ('h_0', 'ln_2')),
    tuple((*own, name) for name in attention),
    (*own, 'c_proj'),
    ('h_0', 'mlp', 'c_fc'),
    ('h_0', 'mlp', 'c_proj'),
  )


_FIRST = ('encoder', 'layer_0')
_BERT = Places(
  ('embeddings', 'word_embeddings', 'embedding'),
  ('embeddings', 'position_embeddings', 'embedding'),
  (('embeddings', 'token_type_embeddings', 'embedding'),),
  (('embeddings', 'LayerNorm'), (*_FIRST, 'attention', 'output', 'LayerNorm')),
  tuple((*_FIRST, 'attention', 'self', name) for name in ('query', 'key', 'value')),
  (*_FIRST, 'attention', 'output', 'dense'),
  (*_FIRST, 'intermediate', 'dense'),
  (*_FIRST, 'output', 'dense'),
)
_KNOWN = (_gpt('c_attn'), _gpt('q', 'k', 'v'), _BERT)


def places_of(model: Model, params: Tree) -> Places:
  """Returns the `Places` of a model's parameters; raises `UsageError` for a model that is not known."""
  paths = {trees.path_names(path) for path, _ in jax.tree_util.tree_flatten_with_path(params)[0]}
  for known in _KNOWN:
    if {known.tokens, known.positions, *known.zeros, *((*path, 'bias') for path in known.dense)} <= paths:
      return known
  raise errors.UsageError(
    f'decepticons sets the weights of the first block of gpt or bert, all of them, and the model is {model.name!r}'
  )


def _codes(rng: np.random.Generator, number: int, width: int) -> np.ndarray:
  """Returns codes [number, width] with mean 0 and a mean square of 1."""
  drawn = rng.normal(size=(number, width))
  drawn -= drawn.mean(axis=1, keepdims=True)
  return drawn / np.sqrt(np.mean(drawn**2, axis=1, keepdims=True))


def _beside(codes: np.ndarray, ramp: np.ndarray, height: np.ndarray) -> np.ndarray:
  """Returns codes [T, width] with a share `height` [T] of `ramp`, all of them with a mean square of 1."""
  free = codes - np.mean(codes * ramp, axis=1, keepdims=True) * ramp
  free /= np.sqrt(np.mean(free**2, axis=1, keepdims=True))
  return height[:, np.newaxis] * ramp + np.sqrt(1 - height**2)[:, np.newaxis] * free


def thresholds(values: np.ndarray, weights: np.ndarray, bins: int) -> np.ndarray:
  """Returns the lower ends of bins, increasing [bins]: as many for each position, which tokens fall into equally often.

  Args:
    values: measurements of tokens at positions [V, T]; those of a position are larger than those of the one before.
    weights: how often each occurs [V, T].
    bins: their number, at least T.
  """
  ends = []
  before = 2 * values[:, 0].min() - values[:, 0].max()
  for place, own in enumerate(np.array_split(np.arange(bins), values.shape[1])):
    held = weights[:, place] > 0 if weights[:, place].any() else np.ones(len(values), bool)
    order = np.argsort(values[held, place])
    seen = values[held, place][order]
    share = np.cumsum(np.maximum(weights[held, place][order], 1e-9))
    middles = np.concatenate([[(before + values[:, place].min()) / 2], (seen[1:] + seen[:-1]) / 2])  # below each value
    found = middles[np.searchsorted(share / share[-1], np.arange(len(own)) / len(own), side='right')]
    ends += [*found]
    before = values[:, place].max()
  least = 1e-4 * np.ptp(values) / bins
  return np.maximum.accumulate(np.asarray(ends) - least * np.arange(bins)) + least * np.arange(bins)


def weights_of(
  places: Places,
  params: Tree,
  rng: np.random.Generator,
  most: int,
  texts: Any,
  *,
  padding: int | None,
  gain: float,
  mark: float,
) -> Tree:
  """Returns the parameters that the server sends.

  Args:
    places: of the model.
    params: of the model.
    rng: draws codes and the measurement.
    most: tokens of a text; bins are those of one position after the other.
    texts: public token ids [P, T] by which bins are filled equally; None for tokens and positions that are alike.
    padding: the id that fills short texts and needs no bin; None where there is none.
    gain: of the measurement, which makes GELU a step.
    mark: scale of the mark beside a code.
  """
  table, positions = (trees.get(params, path) for path in (places.tokens, places.positions))
  (vocabulary, features), length = table.shape, positions.shape[0]
  own, place = (int(share * features) for share in _SHARES)
  rest = features - own - place
  size = math.sqrt(features / (own + place))
  codes, ramp = _codes(rng, vocabulary, own) * size, _codes(rng, 1, place)[0]
  height = np.clip(np.linspace(-_RAMP, _RAMP, most)[np.minimum(np.arange(length), most - 1)], -_RAMP, _RAMP)
  spots = size * _beside(_codes(rng, length, place), ramp, height)
  token = rng.normal(size=own)
  steep = _APART * np.std(codes @ token) * most / (2 * _RAMP * size * place)
  measured = np.concatenate([token, steep * ramp, np.zeros(rest)])
  measured /= np.linalg.norm(measured)
  bins = trees.get(params, places.up)['kernel'].shape[1]
  counts = np.full((vocabulary, most), float(texts is None))
  if texts is not None:
    np.add.at(counts, (texts, np.arange(texts.shape[1])[np.newaxis]), 1.0)
  if padding is not None:
    counts[padding] = 0.0
  values = (codes @ measured[:own])[:, np.newaxis] + (spots[:most] @ measured[own : own + place])[np.newaxis]
  edges = thresholds(values, counts, bins)
  mixing = np.zeros((features, features))
  mixing[:own, own + place :] = _codes(rng, own, rest) / math.sqrt(own)
  back = rng.normal(size=features) / (gain * bins)
  made: dict[Path, np.ndarray] = {
    places.tokens: np.pad(codes, ((0, 0), (0, features - own))),
    places.positions: np.pad(spots, ((0, 0), (own, rest))),
    **{path: np.zeros(trees.get(params, path).shape) for path in places.zeros},
  }
  for path in places.norms:
    made |= {(*path, 'scale'): np.ones(features), (*path, 'bias'): np.zeros(features)}
  kernels = [np.zeros((features, features))] * 2 + [mixing]
  split = [np.concatenate(kernels, axis=1)] if len(places.attention) == 1 else kernels
  layers = [
    *((path, kernel, np.zeros(kernel.shape[1])) for path, kernel in zip(places.attention, split, strict=True)),
    (places.out, mark * np.diag(np.arange(features) >= own + place).astype(float), np.zeros(features)),
    (places.up, np.repeat(gain * measured[:, np.newaxis], bins, axis=1), -gain * edges),
    (places.down, np.tile(back, (bins, 1)), np.zeros(features)),
  ]
  for path, kernel, bias in layers:
    made |= {(*path, 'kernel'): kernel, (*path, 'bias'): bias}
  return replaced(params, made)


@server
def decepticons_server(*, gain: Gain = 1e5, mark: Mark = 0.1) -> Server:
  """The server that sends a decoder or an encoder with the weights of Decepticons.

  If the scenario has public texts, bins are filled equally by them. The key draws codes and measurement.

  Args:
    gain: of the measurement, which makes GELU a step. The gradient falls with it.
    mark: scale of the mark of a sequence beside the code of a token.

  Raises (in `prepare`):
    UsageError: for models other than gpt and bert, such as those with adapters, for layers that are not sent, and for
      fewer than 32 features.
  """

  def prepare(key: jax.Array, scenario: Scenario, batch_size: int) -> Scenario:
    del batch_size
    params = scenario.variables['params']
    places = places_of(scenario.client.model, params)
    check_sent('decepticons', scenario, places.all)
    features = trees.get(params, places.tokens).shape[1]
    if features < _LEAST:
      raise errors.UsageError(f'decepticons needs a width of at least {_LEAST}, and the model has {features}')
    length, bins = scenario.samples.shape[1], trees.get(params, places.up)['kernel'].shape[1]
    if length > bins:
      raise errors.UsageError(f'decepticons needs a neuron for each of {length} positions, and the layer has {bins}')
    texts = None if scenario.public is None else np.asarray(scenario.public[0])
    rng = np.random.default_rng(np.asarray(jax.random.key_data(key)).ravel())
    padding = scenario.client.model.padding
    made = weights_of(places, params, rng, length, texts, padding=padding, gain=gain, mark=mark)
    return scenario._replace(variables={**scenario.variables, 'params': made})

  return one_round(prepare)


class Bins(NamedTuple):
  """What the client's gradient holds, in the coordinates of codes.

  Attributes:
    sums: of the inputs of each bin times the gradients of their tokens, [K, d].
    codes: of tokens [V, d].
    spots: of positions [T, d].
    edges: lower ends of bins [K].
    measured: the measurement [d].
    mixing: what a token adds to the mark, [V, d].
    padding: the id of padding, or None.
  """

  sums: np.ndarray
  codes: np.ndarray
  spots: np.ndarray
  edges: np.ndarray
  measured: np.ndarray
  mixing: np.ndarray
  padding: int | None


class Pair(NamedTuple):
  """A token at a position, in some of the sequences.

  Attributes:
    token, place: which.
    share: the sum of the gradients of its sequences.
    bin: where it was read.
    noise: root mean square of what the bin's pairs leave of the codes.
  """

  token: int
  place: int
  share: float
  bin: int
  noise: float


def bins_of(places: Places, variables: Tree, update: Tree, length: int, padding: int | None) -> Bins:
  """Returns the `Bins` of an upload of clients that were sent these variables."""
  params = variables['params']
  up, sent = trees.get(params, places.up), trees.get(update, places.up)
  kernel = np.asarray(sent['kernel'], np.float64).T
  codes, spots = (np.asarray(trees.get(params, path), np.float64) for path in (places.tokens, places.positions))
  value, out = (
    np.asarray(trees.get(params, path)['kernel'], np.float64) for path in (places.attention[-1], places.out)
  )
  features = codes.shape[1]
  gain = float(np.linalg.norm(np.asarray(up['kernel'], np.float64)[:, 0]))
  return Bins(
    kernel - np.concatenate([kernel[1:], np.zeros((1, features))]),
    codes,
    spots[:length],
    -np.asarray(up['bias'], np.float64) / gain,
    np.asarray(up['kernel'], np.float64)[:, 0] / gain,
    codes @ value[:, -features:] @ out,
    padding,
  )


def pairs_of(bins: Bins) -> list[Pair]:
  """Returns the pairs of tokens and positions that each bin holds."""
  wide = np.flatnonzero(np.any(bins.codes != 0, axis=0) | np.any(bins.spots != 0, axis=0))
  atoms_of = (bins.codes @ bins.measured)[:, np.newaxis] + (bins.spots @ bins.measured)[np.newaxis]
  if bins.padding is not None:
    atoms_of[bins.padding] = 1e300
  longest = np.square(bins.mixing).sum(axis=1).max() / bins.codes.shape[1]
  shrunk = atoms_of / math.sqrt(1 + longest)  # LayerNorm divides by a norm with the mark
  low, high = np.minimum(atoms_of, shrunk) - 1e-4, np.maximum(atoms_of, shrunk) + 1e-4
  norms = np.linalg.norm(bins.sums[:, wide], axis=1)
  level = _FIT * float(np.median(norms[norms > 0])) if norms.any() else 0.0
  ends = np.concatenate([bins.edges[1:], [np.inf]])
  found = []
  for k in np.flatnonzero(norms > level):
    tokens, places = np.nonzero((high >= bins.edges[k]) & (low < ends[k]))
    atoms = (bins.codes[tokens] + bins.spots[places])[:, wide]
    taken, shares = _sparse(atoms, bins.sums[k, wide], level)
    left = bins.sums[k, wide] - np.asarray(shares) @ atoms[taken]
    noise = math.sqrt(np.sum(left**2) / max(len(wide) - len(taken), 1))
    found += [
      Pair(int(tokens[i]), int(places[i]), share, int(k), noise) for i, share in zip(taken, shares, strict=True)
    ]
  return found


def _sparse(atoms: np.ndarray, target: np.ndarray, level: float) -> tuple[list[int], list[float]]:
  """Returns which atoms [K, d], and how much of each, add up to a vector [d]; none where more than a few are needed.

  Orthogonal least squares: the next atom is the one that leaves the least.
  """
  taken: list[int] = []
  basis, rest = np.zeros((atoms.shape[1], 0)), target
  while np.linalg.norm(rest) > max(level, _FIT * np.linalg.norm(target)):
    if len(taken) == min(_FEW, len(atoms)):
      return [], []
    free = atoms - (atoms @ basis) @ basis.T
    norms = np.linalg.norm(free, axis=1)
    gains = np.where(norms > 1e-6, np.abs(free @ rest) / np.maximum(norms, 1e-6), 0)
    gains[taken] = 0
    taken.append(int(np.argmax(gains)))
    basis = np.linalg.qr(atoms[taken].T)[0]
    rest = target - basis @ (basis.T @ target)
  return taken, np.linalg.lstsq(atoms[taken].T, target, rcond=None)[0].tolist() if taken else []


class State(NamedTuple):
  """A text so far: its tokens, and its mark times the number of tokens that are seen [d]."""

  tokens: tuple[int, ...]
  mark: np.ndarray


def texts_of(bins: Bins, causal: bool, most: int) -> list[tuple[int, ...]]:
  """Returns the texts that the pairs of the bins make up, by the marks in the bins.

  Args:
    bins: of an upload.
    causal: whether a mark is that of the tokens before; else it is that of the whole text.
    most: texts in the batch.
  """
  pairs = pairs_of(bins)
  held: dict[int, list[Pair]] = {}
  for pair in pairs:
    held.setdefault(pair.bin, []).append(pair)
  states = [State((), np.zeros(bins.mixing.shape[1]))] if causal else _marks(bins, held, most)
  ended: list[State] = []
  for place in range(len(bins.spots)):
    grown: dict[tuple[int, int], State] = {}
    for k, own in held.items():
      here = [pair for pair in own if pair.place == place]
      for i, pair in _divided(bins, states, here, bins.sums[k], causal) if here else ():
        added = bins.mixing[pair.token] if causal else 0.0
        grown[i, pair.token] = State((*states[i].tokens, pair.token), states[i].mark + added)
    ended += [state for i, state in enumerate(states) if i not in {i for i, _ in grown}]
    states = list(grown.values())[:most]
  found = [state.tokens for state in states + ended if state.tokens][:most]
  return _sure(bins, held, found, causal)


def _sure(bins: Bins, held: dict[int, list[Pair]], found: list[tuple[int, ...]], causal: bool) -> list[tuple[int, ...]]:
  """Returns those texts of which all inputs stand in bins that the texts explain, and that nothing goes on."""
  inputs: dict[tuple[int, int], list[tuple[int, np.ndarray]]] = {}
  for n, tokens in enumerate(found):
    added = np.cumsum(bins.mixing[list(tokens)], axis=0) / np.arange(1, len(tokens) + 1)[:, np.newaxis]
    for place, token in enumerate(tokens):
      x = bins.codes[token] + bins.spots[place] + added[place if causal else -1]
      inputs.setdefault((token, place), []).append((n, x))
  rest = np.any(bins.mixing != 0, axis=0)
  wrong: set[int] = set()
  for k, own in held.items():
    members = [one for pair in own for one in inputs.get((pair.token, pair.place), ())]
    rows = np.stack([x for _, x in members]) if members else np.zeros((0, len(rest)))
    left = bins.sums[k] - np.linalg.lstsq(rows.T, bins.sums[k], rcond=1e-9)[0] @ rows
    least = _SURE * own[0].noise * math.sqrt(len(rest))
    if np.linalg.norm(left) > max(least, 10 * _FIT * np.linalg.norm(bins.sums[k, rest])):
      open_places = {pair.place for pair in own}
      wrong |= {n for n, _ in members} | {n for n, tokens in enumerate(found) if len(tokens) in open_places}
  return [tokens for n, tokens in enumerate(found) if n not in wrong]


def _marks(bins: Bins, held: dict[int, list[Pair]], most: int) -> list[State]:
  """Returns a state for each mark of an encoder's texts: what several bins of one pair agree in."""
  found: list[list[np.ndarray]] = []
  rest = np.any(bins.mixing != 0, axis=0)
  for k, own in held.items():
    if len(own) > 1:
      continue
    mark = np.where(rest, bins.sums[k] / own[0].share, 0.0)
    near = [group for group in found if np.linalg.norm(group[0] - mark) < 10 * _FIT * np.linalg.norm(mark)]
    if near:
      near[0].append(mark)
    else:
      found.append([mark])
  found.sort(key=len, reverse=True)
  return [State((), np.mean(group, axis=0)) for group in found[:most]]


def _divided(
  bins: Bins, states: list[State], pairs: list[Pair], total: np.ndarray, causal: bool
) -> list[tuple[int, Pair]]:
  """Returns which texts go on with which pairs of a bin, all at one position.

  The bin's sum has the share of each pair by its code, and that of each text by its mark. The share of a pair is the
  sum of those of its texts. Texts that are equal so far may go on with several pairs.
  """
  place = pairs[0].place
  if causal and place == 0:
    return [(0, pair) for pair in pairs]
  rest = np.any(bins.mixing != 0, axis=0)
  marks = np.stack([state.mark for state in states])[:, rest] if states else np.zeros((0, int(rest.sum())))
  target = total[rest]
  if causal:
    target = target * (place + 1) - sum(pair.share * bins.mixing[pair.token][rest] for pair in pairs)
  inverse = np.linalg.pinv(marks.T, rcond=1e-6)
  shares = inverse @ target
  levels = _SURE * pairs[0].noise * (place + 1 if causal else 1) * np.linalg.norm(inverse, axis=1)
  alive = np.flatnonzero(np.abs(shares) > levels)
  if not len(alive) or len(pairs) ** len(alive) > _MANY:
    return []
  ways = np.asarray(list(itertools.product(range(len(pairs)), repeat=len(alive))))
  made = np.stack([(ways == j) @ shares[alive] for j in range(len(pairs))], axis=1)
  missed = np.abs(made - [pair.share for pair in pairs])
  tolerance = float(np.linalg.norm(levels)) + _FIT * max(abs(pair.share) for pair in pairs)
  best = int(np.lexsort((missed.sum(axis=1), (missed > tolerance).sum(axis=1)))[0])
  left = np.flatnonzero(missed[best] > tolerance)
  found = [(int(i), pairs[j]) for i, j in zip(alive, ways[best], strict=True) if j not in left]
  return found + [(int(i), pairs[j]) for i in alive[np.isin(ways[best], left)] for j in left]


@attack(
  citation='Fowl, Geiping, Reich, Wen, Czaja, Goldblum, Goldstein: Decepticons: Corrupted Transformers Breach Privacy '
  'in Federated Learning for Language Models. ICLR 2023.',
  server=decepticons_server,
)
def decepticons(client: Client, *, gain: Gain = 1e5, mark: Mark = 0.1) -> Attack:
  r"""Decepticons (Fowl et al. 2023): reads texts from the first block that `decepticons_server` sets.

  Closed-form, on the host. Bins hold pairs of a token and a position, and the marks of their texts. It returns the
  texts that explain their bins, and no labels. The last token under `next_token` is found as by `span`.

  Formula:
    z_k = a \, (\langle m, x \rangle - c_k), \quad a = \text{gain}

    \Delta W_k - \Delta W_{k+1} = \sum_{c_k \le \langle m, x_i \rangle < c_{k+1}} \delta_i x_i, \quad
    x_i = e_i + p_i + \text{mark} \cdot \frac{1}{t} \sum_{j \le t} R e_j

  Args:
    client: the `Client` that is attacked.
    gain, mark: see `decepticons_server`.

  Raises:
    UsageError: when run, for models other than gpt and bert, and for a client that does not share the first block.
  """
  del gain, mark

  def check(observation: Observation) -> tuple[Places, FirstBlock]:
    places, about = places_of(client.model, observation.variables['params']), client.model.first_block
    if about is None:
      raise errors.UsageError(f'decepticons reads gpt or bert, and the model is {client.model.name!r}')
    kept = unsent(client, observation)
    if any(one[: len(places.up)] == places.up for one in kept):
      raise errors.UsageError(
        f'decepticons reads the gradient of {"/".join(places.up)}, and the client does not share it: it is frozen or '
        'private'
      )
    return places, about

  def read(observation: Observation, key: np.ndarray) -> tuple[np.ndarray, None]:
    del key
    places, about = check(observation)
    number, length = observation.batch_shape[:2]
    bins = bins_of(places, observation.variables, observation.update, length, about.padding)
    found = texts_of(bins, about.causal, number)
    made = [np.pad(one, (0, length - len(one)), constant_values=padding_of(client)) for one in found]
    texts = np.asarray(made, np.int32).reshape(len(found), length)
    if len(found) and about.causal and client.loss.own == 'next_token' and client.share == 'gradient':
      mean = client.loss.settings.get('reduction', 'mean') == 'mean'
      texts = span_targets.completed(client.model, observation, texts, [len(one) for one in found], mean)
    return texts, None

  return host_form(check, read, blank=padding_of(client))._replace(auxiliary_data=True)
