"""The span attack on transformers of tokens (Petrov et al. 2024, DAGER, arXiv 2405.15586).

Written from a description of the paper, with checks of its own. The test of the span has no tolerance to set. The
second check reads the MLP of the first block in place of the next block. Sequences of encoders are solved for
(`span_encoder`).
"""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from gradleak.attacks import base, span_assembly, span_decoder, span_encoder, span_sparse, span_targets, subspace
from gradleak.attacks.span_decoder import Prefix
from gradleak.attacks.subspace import Span
from gradleak.core import errors, trees
from gradleak.federated import Client
from gradleak.federated.response import first_rates
from gradleak.models.model import FirstBlock
from gradleak.threat import Observation

COMPLETE = 2.0  # what a complete batch leaves of the gradient at most, in units of its noise


def tokens_of(table_gradient: Any, noise: float = 0.0, most: int | None = None) -> np.ndarray:
  """Returns the ids of tokens whose rows of the embeddings' gradient are not zero, or not noise alone, int [K].

  Where embeddings are trained, this is the set of tokens that the batch holds, and no inference. With a head that is
  tied to the embeddings, every row has a gradient. Then rows that stand out are taken for those of tokens that occur,
  or the set is all tokens where the batch may hold all.

  Args:
    table_gradient: [V, d].
    noise: known variance of the noise in each entry. It is also read from the rows of tokens that do not occur: from
      the median row where these are more than half of all.
    most: tokens that the batch holds at most. By default more than half are taken to be absent, except where rows are
      zero: then there is no noise.
  """
  from scipy import stats  # importing it takes a quarter of the time of `import gradleak`

  squares = np.sum(np.square(np.asarray(table_gradient, np.float64)), axis=1)
  width = np.shape(table_gradient)[1]
  if most is None:
    most = 0 if squares.all() else len(squares)
  absent, level = len(squares) - most, 0.0
  if 2 * most < len(squares):
    level = float(np.median(squares)) / width
  elif absent > 0 and squares.all():  # else nothing but what is zero is surely of a token that does not occur
    level = float(np.sort(squares)[absent // 2]) / width
  level = max(noise, level)
  if level == 0:
    return np.flatnonzero(squares)
  most = stats.chi2.isf(0.5 / len(squares), width)
  return np.flatnonzero(squares > level * most)


@base.attack(
  citation='Petrov, Dimitrov, Baader, Müller, Vechev: DAGER: Exact Gradient Inversion for Large Language Models. '
  'NeurIPS 2024.',
  reads=('noise',),
)
def span(client: Client) -> base.Attack:
  r"""The span attack (DAGER): texts from the subspace that the gradients of the first block span, exactly.

  The gradients of queries, keys and values are combinations of the layer's inputs. A token may stand at a position if
  its input lies in their span. A sequence is right so far if the input of the block's MLP lies in the span of that
  layer's gradient. A decoder's sequences grow token by token; an encoder's are solved for. So are those of a single
  block whose head reads one token. Those are returned that explain the gradient together. The noise λ is known from the
  defense, or read from the directions that fewer than d tokens cannot span: the test has no tolerance.

  The batch must hold fewer tokens than the width. It returns no labels. The last token under `next_token` is only a
  target. It is the one along whose logit what the gradient has beyond the others points.

  Adapters of rank r on two of the three layers (LoRA) have 2r columns, which span as many tokens. More are found by
  sparse recovery (`span_sparse`). Their sequences are those that explain all of the gradient of the next adapters
  (`span_assembly`). In the first round, where B is zero, the batch must hold fewer tokens than r.

  Formula:
    G = X^\top \Delta, \quad r(x) = \lambda x^\top (G G^\top + \lambda I)^{-1} x / \lVert x \rVert^2

    r(x) \approx 0 \text{ for each row } x \text{ of } X

  Args:
    client: the `Client` that is attacked.

  Raises:
    UsageError: when run, for a model without a first block that is known, one whose block is frozen or not shared,
      batches where no second layer is shared, and local optimizers whose update is no combination of gradients.
  """

  def check(observation: Observation) -> FirstBlock:
    return _checked(client, observation)

  def read(observation: Observation, key: np.ndarray) -> tuple[np.ndarray, None]:
    about = check(observation)
    rng = np.random.default_rng(key.ravel())
    found = sequences(about, observation, rng, base.unsent(client, observation))
    length, blank = observation.batch_shape[1], base.padding_of(client)
    made = [np.pad(one.tokens, (0, length - len(one.tokens)), constant_values=blank) for one in found]
    texts = np.asarray(made, np.int32).reshape(len(found), length)
    if len(found) and about.causal and client.loss.own == 'next_token' and client.share == 'gradient':
      mean = client.loss.settings.get('reduction', 'mean') == 'mean'
      texts = span_targets.completed(client.model, observation, texts, [len(one.tokens) for one in found], mean)
    return texts, None

  return base.host_form(check, read, blank=base.padding_of(client))


def sequences(
  about: FirstBlock,
  observation: Observation,
  rng: np.random.Generator,
  kept: Collection[tuple[str, ...]] = (),
) -> list[Prefix]:
  """Returns the sequences that are found, the surest first: as many as the batch has, or fewer.

  Fewer that explain the gradient up to its noise mean that the batch holds some of them more than once. The first ones
  are then repeated. The paths `kept` are of parameters of which nothing is sent.
  """
  number, length = observation.batch_shape[:2]
  update, variables = observation.update, observation.variables
  noise = _variance(observation, kept)
  most = number * length
  first = _span(about, observation, about.projections, most, noise)
  second = _span(about, observation, about.second, most, noise) if about.second else None
  if first is None or (second is None and number > 1):
    return []
  block = span_decoder.block_of(about, variables, length)
  allowed = _allowed(about, update, len(block.table), noise, most)
  find = span_sparse.recovered if span_sparse.crowded(first, most) else span_decoder.screened
  candidates = find(block, first, allowed, number)
  if second is None:
    return span_decoder.likeliest(candidates)
  if span_sparse.crowded(second, most):
    return span_assembly.assembled(block, first, second, candidates, number, rng)
  once = round(second.rank) <= number and round(second.rank) < round(first.rank)  # a head reads one token of each
  if about.causal and not once:
    found = span_decoder.decoded(block, second, candidates, number, rng)
  else:
    likely = [span_encoder.before_gap(block, first, one, place) for place, one in enumerate(candidates)]
    found = span_encoder.encoded(block, second, likely, number, rng, once)
    if _left(second, found) >= COMPLETE and sum(map(len, candidates)) > sum(map(len, likely)):
      more = span_encoder.encoded(block, second, candidates, number, rng, once)
      found = min((found, more), key=lambda one: _left(second, one))
  if len(found) < number and _left(second, found) < COMPLETE:
    found = [found[i % len(found)] for i in range(number)]
  return found


def _left(span: Span, found: list[Prefix]) -> float:
  """Returns what sequences leave of the gradient, in units of its noise; infinity of none."""
  rows = [np.stack(one.inputs) for one in found]
  return span.left(span.added(np.concatenate(rows), np.zeros((len(span.basis), 0)))) if rows else math.inf


def _span(
  about: FirstBlock, observation: Observation, paths: Sequence[tuple[str, ...]], inputs: int, noise: float
) -> Span | None:
  """Returns the span of the inputs of kernels, or of their adapters.

  The gradient of A in W + AB is a combination of inputs. It is zero in the first round, where B is. That of B is then a
  combination of inputs times A.
  """
  found = [trees.get(observation.update, path) for path in paths]
  if not about.adapters:
    return subspace.span_of([part for one in found for part in _parts(about, one)], inputs, noise)
  if any(np.any(one['a']) for one in found):
    return subspace.span_of([np.asarray(one['a']) for one in found], inputs, noise)
  if about.causal:  # the first token has no gradient in queries, since it attends to itself alone: values see all
    paths, found = paths[-1:], found[-1:]
  given = [np.asarray(trees.get(observation.variables['params'], path)['a'], np.float64) for path in paths]
  spans = [subspace.span_of([np.asarray(one['b'])], inputs, noise) for one in found]
  kept = [(span, a) for span, a in zip(spans, given, strict=True) if span is not None]
  return subspace.beside(*zip(*kept, strict=True)) if kept else None


def _parts(about: FirstBlock, kernel: Any) -> list[Any]:
  """Returns the kernels of queries, keys and values apart, whose gradients differ in size."""
  kernel = np.asarray(kernel)
  fused = len(about.projections) == 1 and kernel.shape[1] == 3 * kernel.shape[0]
  return np.split(kernel, 3, axis=1) if fused else [kernel]


def _variance(observation: Observation, kept: Collection[tuple[str, ...]]) -> float:
  """Returns the known variance of the noise in each entry of the update that is sent."""
  return float(observation.noise) / trees.entries(observation.update, kept)


def _allowed(about: FirstBlock, update: Any, vocabulary: int, noise: float, most: int) -> np.ndarray:
  """Returns the tokens that may occur: those with a gradient of their embedding, if any has one; never padding."""
  try:
    given = trees.get(update, about.table)
    gradient = np.asarray(given['a'] if isinstance(given, Mapping) else given)  # an adapter has a row for each token
  except (KeyError, TypeError):
    gradient = np.zeros((0, 1))
  known = tokens_of(gradient, noise, most) if np.any(gradient) else np.arange(vocabulary)
  known = known if len(known) else np.arange(vocabulary)
  return known[known != about.padding] if about.padding is not None else known


def _checked(client: Client, observation: Observation) -> FirstBlock:
  """Returns what is known of the first block; raises `UsageError` for what the attack cannot read."""
  about = client.model.first_block
  if about is None or not about.projections:
    raise errors.UsageError(
      'the attack span reads the first block of a transformer of tokens, and none is known of the model '
      f'{client.model.name!r}: take gpt, bert, or a network of PyTorch that adds e and p, and attends by '
      'scaled_dot_product_attention'
    )
  if not about.second and observation.batch_shape[0] > 1:
    raise errors.UsageError(
      f'the attack span puts sequences together by the inputs of a second layer, and {client.model.name!r} shares '
      'none: attack batches of one, or adapt a second block'
    )
  kept = base.unsent(client, observation)
  if any(one[: len(path)] == path for one in kept for path in (*about.projections, *about.second)):
    raise errors.UsageError(
      'the attack span reads the gradients of queries, keys, values and the MLP of the first block, and the client '
      'does not share them: they are frozen or private'
    )
  if client.share == 'delta' and first_rates(client.optimizer, observation.variables['params']) is None:
    raise errors.UsageError(
      'the attack span reads combinations of gradients, and the local optimizer sends none: adam, rmsprop and weight '
      'decay change every entry by itself; attack a client with sgd'
    )
  return about
