"""Tables: encoded rows, float [N, D] (`gradleak.data.tables`), judged by their cells."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gradleak.core import errors
from gradleak.core.reuse import reusable
from gradleak.data import check_labels
from gradleak.data.tables import FLAGGED, ORDINAL, Schema, from_json
from gradleak.metrics.identification import MOST, PERCENTILE, different, firsts
from gradleak.metrics.labels import checked, of_matched
from gradleak.modalities.base import NUMBER, PLAIN, Column, Modality, Piece, Relaxation, Shown, modality
from gradleak.models import Model

RIGHT = 0.319  # standard deviations: of a value that counts as right (Vero et al. 2023)
EXACT = 0.01  # standard deviations
_PAIRS = 4096  # of different rows that calibrate the threshold
_SLACK = 1e-3  # of an entry of a one-hot block
_SOFT = 0.05  # of the entry of a row that explains an update, from which on it stands for nothing
_FEW = 3  # columns in a sentence
_FAR = 2.0  # above the largest cost of a pair
_DIVERGED = 'the trial diverged'
_NO_KIND = 'the table has no such column, or the trial diverged'

COLUMNS = (
  Column(
    'cells',
    NUMBER,
    '[0, 1]',
    'Cells that are right: the category, or a value within 0.319 deviations.',
    _DIVERGED,
    (0, 1),
  ),
  Column(
    'cells_exact', NUMBER, '[0, 1]', 'Cells that are exact: the category, or a value within 0.01.', _DIVERGED, (0, 1)
  ),
  Column('categories', NUMBER, '[0, 1]', 'Cells of categorical and binary columns that are right.', _NO_KIND, (0, 1)),
  Column('numbers', NUMBER, '[0, 1]', 'Cells of continuous and ordinal columns that are right.', _NO_KIND, (0, 1)),
  Column('rows_right', NUMBER, '[0, 1]', 'Rows of which all cells are right.', _DIVERGED, (0, 1)),
  Column(
    'trace', NUMBER, '[-1, 1]', 'Cosine of the cells less what is usual in their columns; a mean.', _DIVERGED, (-1, 1)
  ),
  Column('revealed_cells', NUMBER, '[0, 1]', 'Cells that are right of the rows that are exact.', 'no row is', (0, 1)),
)


# Sentences of the report that mean something else of rows than of any sample.
WORDS: dict[str, str] = {
  'meaning.exact': 'a whole row itself',
  'done.recognisable': '{n:gives|give} rows away that are mostly right',
  'done.above chance': '{n:leaves|leave} cells above chance',
  'verdicts.exact': (
    'All cells of a private row are exact in one of the rows that the attack returned: equal categories, and values '
    'within 0.01 standard deviations of the column.'
  ),
  'verdicts.recognisable': (
    'Two tests hold. The original is the nearest of all candidates, {size:0} other real rows, by its cells.{made} '
    'And more cells are right than 99 of 100 pairs of different candidates have in common.'
  ),
  'verdicts.re-identified': (
    'The original is the nearest of all candidates, which happens to one attacker by chance in {chance:significant} '
    '% of uploads, and the trace is three standard deviations above that of the control, if that has any: an attacker '
    'with a list of suspects learns who it is, although the row is not right.'
  ),
  'verdicts.above chance': (
    'The share of right cells and the trace are beyond the control (its 95th percentile; three standard deviations '
    'above its mean), and nothing more. The trace is the cosine of the cells less what is usual in their columns.'
  ),
  'audit.slide': (
    'The first private row, and what the strongest attacker of each defense makes of its upload: right cells are '
    'marked. Below that, of how many trials they recover a row.'
  ),
  'scores.table': (
    'The share of cells that are right: a category that is equal, or a value within 0.319 standard deviations of its '
    'column, as TabLeak (Vero et al. 2023) counts. Exact cells are within 0.01. Rows are matched to the private ones '
    'first. Medians and commonest categories alone have some cells right, so compare with the column “without an '
    'upload”.'
  ),
  'marked.samples': (
    'What the strongest attacker of each defense makes of the first private rows, cell by cell. What is right has a '
    'tick and a colour. “Sure to” is what an attacker sees, too: one less the entropy of a relaxed category. The '
    'columns that leak under most defenses come first, the surest of them before others. The last line counts them.'
  ),
  'marked.parts': (
    'How often each column is right, over all rows, as the strongest attacker of each defense sees it. “Without an '
    'upload” are the median and the commonest category. The columns that leak most come first.'
  ),
  'marked.together': (
    'The share of private rows of which at least so many {of} are right at once. One column that is right '
    'may be luck, a whole record is not.'
  ),
  'sensitivity.term_score': (
    'The share of right cells of one row per trial, the same in all settings. In a batch it is the first.'
  ),
  'captured.neutral': 'medians and commonest categories',
  'captured.neutral_head': 'usual',
  'captured.alike': 'share of equal cells',
  'marked.sensitive': 'of the sensitive columns {names:names}',
  'marked.all': 'of the {n} columns',
}


# What programs take where flags are not given.
DEFAULTS: dict[str, Any] = {
  'model': 'mlp(widths=100-100)',
  'init': 'default',
  'attack': 'tableak(seeds=4,steps=300)',
  'attacks': 'fidel;peeling;spear;tableak(seeds=4,steps=300)',
  'defenses': 'none;gaussian(stddev=0.05);prune(rate=0.9);clip_samples(norm=1)+gaussian(stddev=0.05);'
  'fragmentation(ratio=0.4);graddefense(stddev=0.1);outpost',
}


class Gallery(NamedTuple):
  """Rows among which an original is to be found.

  Attributes:
    schema: which covers them; cells of others are taken by it, too, lest numbers be rounded here and not there.
    cells: of different rows, [G, F].
    places: what a row is known by -> its place among them.
    threshold: the least share of right cells of a row that is recognised.
  """

  schema: Schema
  cells: np.ndarray
  places: dict[bytes, int]
  threshold: float


@reusable(64)
def table(schema: Schema) -> Modality:
  """Returns the modality of rows that a schema encodes; equal schemas give the same object.

  Args:
    schema: a `gradleak.data.Schema`: `gradleak.data.load(…).settings` has one, and `of_config` makes its modality.
  """
  errors.check_instance('schema', schema, Schema, 'a gradleak.data.Schema')
  of = {name: functools.partial(function, schema) for name, function in _OF_SCHEMA.items()}
  return Modality(
    name='table',
    axis_names=('D',),
    columns=COLUMNS,
    score='cells',
    correlation='trace',
    margin=0.05,
    effect=0.1,
    likeness='cells',
    oracle=('cells', 'cells_exact'),
    shown=(Shown('cells', 'cells right'), Shown('cells_exact', 'cells exact')),
    further=(
      Shown('categories', 'categories\nright'),
      Shown('numbers', 'numbers\nright'),
      Shown('rows_right', 'whole rows\nright'),
      Shown('trace', 'trace'),
    ),
    noun=('row', 'rows'),
    usual=schema.usual,
    neutral=lambda shape: schema.usual,
    shapes=lambda model, variables: [(schema.width,)],
    sensitive=frozenset(schema.sensitive),
    words=WORDS,
    defaults=DEFAULTS,
    relaxations={'plain': lambda model: PLAIN, 'cells': functools.partial(_cells, schema)},
    remade=_remade,
    **of,  # type: ignore[arg-type]
  )


def _remade(config: Mapping[str, Any]) -> Modality:
  """Returns the modality of a result's settings."""
  if 'schema' not in config:
    raise errors.UsageError('the settings of this table have no schema')
  return table(from_json(config['schema']))


def check(schema: Schema, rows: Any) -> None:
  """Raises `UsageError` for what are no encoded rows [N, D] of a schema; names the first row and its column."""
  rows = errors.host_array('rows', rows)
  if rows.ndim != 2 or not rows.size or not np.issubdtype(rows.dtype, np.floating):
    raise errors.UsageError(
      f'rows are {rows.dtype.name} of shape {rows.shape}, expected floats [N, D] of Schema.encode'
    )
  if rows.shape[1] != schema.width:
    raise errors.UsageError(f'rows have {rows.shape[1]} entries, and those of the schema {schema.width}')
  for field, place in zip(schema.fields, schema.places, strict=True):
    block = rows[:, place]
    wrong = ~np.isfinite(block).all(axis=1)
    flags = block if not field.numeric else block[:, 1:]
    wrong |= (np.minimum(np.abs(flags), np.abs(flags - 1)) > _SLACK).any(axis=1)
    if not field.numeric:
      wrong |= np.abs(flags.sum(axis=1) - 1) > _SLACK
    if field.kind == ORDINAL:
      allowed = ((field.values - field.mean) / field.std)[np.newaxis]
      near = np.abs(block[:, :1] - allowed).min(axis=1) <= _SLACK
      wrong |= ~near & ~(flags > _SLACK).any(axis=1)
    if wrong.any():
      row = int(np.argmax(wrong))
      shown = ', '.join(f'{entry:g}' for entry in block[row])
      kind = 'one number' if field.numeric else 'a single 1 among zeros'
      kind = 'the number of one of its levels, in deviations' if field.kind == ORDINAL else kind
      raise errors.UsageError(f'row {row} has {shown} in the column {field.name!r}, expected {kind}')


def evaluate(
  schema: Schema,
  found: Any,
  truth: Any,
  labels_hat: Any,
  labels: Any,
  *,
  signed: bool = True,
  blank: bool = True,
  among: Gallery | Mapping[int, Gallery] | None = None,
) -> dict[str, Any]:
  """Returns the figures of one reconstructed batch, after matching its rows one-to-one with the private ones.

  Args:
    schema: of the rows.
    found: float [K, D], in any order; entries may be whatever a search has made of them.
    truth: float [N, D].
    labels_hat: int [K], −1 for unknown; [0] if the attack gives no labels.
    labels: int [N].
    signed: whether a row must have the right sign to count as exact.
    blank: whether a row of zeros is an answer; where it is none, no cell of it is right.
    among: the `Gallery` that an original is to be found in, or one per label.

  Returns:
    The columns of a row, but those that an audit adds; see `modalities.base.Modality.evaluate`.
  """
  found, truth = (errors.host_array(name, rows) for name, rows in (('reconstructions', found), ('truth', truth)))
  if found.ndim != 2 or found.shape[1:] != truth.shape[1:]:
    raise errors.UsageError(
      f'reconstructions have shape {found.shape}, the truth {truth.shape}; expected [K, D], [N, D]'
    )
  check_labels(labels, len(truth))
  labels_hat, labels = checked(labels_hat, labels, len(found), len(truth))
  schema = schema.covering(truth)
  finite = np.isfinite(found).all(axis=1)
  answered = np.isfinite(found).any(axis=1) & (blank | found.any(axis=1))
  found = np.where(answered[:, np.newaxis], found, np.nan)
  cells, wanted = schema.cells(found), schema.cells(truth)
  permutation = match(schema, cells, wanted)
  paired = permutation >= 0
  cells_of, of = cells[permutation[paired]], wanted[paired]
  right, exact = (_right(schema, cells_of, of, within) for within in (RIGHT, EXACT))
  diverged = not finite[permutation[paired]].all()
  numeric = np.asarray([field.numeric for field in schema.fields])
  whole = _exact_rows(schema, cells, wanted, found, signed)
  shared = (right.sum(axis=1) / right.shape[1])[whole[paired]]

  def mean(values: np.ndarray) -> float:
    return math.nan if diverged or not values.size else float(np.mean(values, dtype=np.float64))

  return {
    'cells': mean(right),
    'cells_exact': mean(exact),
    'categories': mean(right[:, ~numeric]),
    'numbers': mean(right[:, numeric]),
    'rows_right': mean(np.asarray(right.all(axis=1))),
    'trace': mean(_traces(schema, cells_of, of)),
    'revealed_cells': float(np.mean(shared)) if shared.size else math.nan,
    'revealed': int(whole.sum()),
    'flat': 0,
    **(
      {}
      if among is None
      else _identified(found[permutation[paired]], truth[paired], labels[paired], paired, right, among)
    ),
    **of_matched(labels_hat, labels, permutation),
    'permutation': permutation.tolist(),
  }


def misfit(schema: Schema, model: Model) -> str:
  """Returns why a network does not take the numbers of rows as the schema says, in words; '' where it does."""
  if schema.scaling is None:
    return ''
  scaled = [place.start for field, place in zip(schema.fields, schema.places, strict=True) if field.scaling]
  taken = np.asarray(model.normalisation or np.zeros((2, 0)), np.float32)  # mean and std
  if taken.shape[1] == schema.width and np.array_equal(taken[:, scaled], np.stack(schema.scaling)[:, scaled]):
    return ''
  return (
    f'the schema says by which center and scale numbers are taken, and {model.name!r} does not do that: give '
    'gradleak.models.standardised(model, *data.scaling)'
  )


def match(schema: Schema, cells: np.ndarray, wanted: np.ndarray) -> np.ndarray:
  """Returns which of cells [K, F] is matched to each of the private ones [N, F], int [N]; −1 where too few are left.

  By the least total `costs`, exact pairs first.
  """
  from scipy import optimize

  cost = costs(schema, cells, wanted)
  exact = np.stack([_right(schema, cells, np.broadcast_to(one, cells.shape), EXACT).all(axis=1) for one in wanted])
  bonus = _FAR * min(cost.shape)
  rows, matched = optimize.linear_sum_assignment(np.where(exact, cost - bonus, cost))
  permutation = np.full(len(wanted), -1)
  permutation[rows] = matched
  return permutation


def costs(schema: Schema, cells: np.ndarray, wanted: np.ndarray) -> np.ndarray:
  """Returns how far cells [K, F] are from others [N, F], float [N, K]: a mean over the columns.

  A category counts 0 or 1, a number its difference in deviations, 1 at most. So does a gap, and a cell without answer.
  """
  total = np.zeros((len(wanted), len(cells)))
  for place, field in enumerate(schema.fields):
    one, other = wanted[:, place, np.newaxis], cells[np.newaxis, :, place]
    if field.numeric:
      same = np.isinf(one) & np.isinf(other)
      with np.errstate(invalid='ignore'):
        apart = np.where(same, 0.0, np.minimum(np.abs(one - other), 1.0))
      total += np.where(np.isnan(apart), 1.0, apart)
    else:
      total += one != other
  return total / max(1, len(schema.fields))


def _right(schema: Schema, cells: np.ndarray, wanted: np.ndarray, within: float) -> np.ndarray:
  """Returns which cells are right, bool [N, F], of pairs [N, F]."""
  with np.errstate(invalid='ignore'):
    near = np.abs(cells - wanted) <= within + 1e-6  # of rounding in float32
  numeric = np.asarray([field.numeric for field in schema.fields])
  return np.where(numeric[np.newaxis] & np.isfinite(wanted), near, cells == wanted)


def _exact_rows(schema: Schema, cells: np.ndarray, wanted: np.ndarray, found: np.ndarray, signed: bool) -> np.ndarray:
  """Returns which private rows any reconstruction has exactly, bool [N]; of either sign, where that is not known."""
  of_sign = [cells] if signed else [cells, schema.cells(-found)]
  exact = [_right(schema, one, np.broadcast_to(row, one.shape), EXACT).all(axis=1) for one in of_sign for row in wanted]
  return np.asarray(exact).any(axis=1).reshape(len(of_sign), -1).any(axis=0)


def _traces(schema: Schema, cells: np.ndarray, wanted: np.ndarray) -> np.ndarray:
  """Returns the cosine of each pair, [N], of `_centred` cells; 0 where one of them has no length."""
  one, other = _centred(schema, cells), _centred(schema, wanted)
  norms = np.linalg.norm(one, axis=1) * np.linalg.norm(other, axis=1)
  return np.divide(np.sum(one * other, axis=1), norms, out=np.zeros(len(one)), where=norms > 1e-12)


def _centred(schema: Schema, cells: np.ndarray) -> np.ndarray:
  """Returns cells less what is usual in their columns, [N, …], so that each column weighs as much as another."""
  parts = [np.zeros((len(cells), 0))]
  for place, field in enumerate(schema.fields):
    column = cells[:, place]
    if field.numeric:
      parts.append(np.where(np.isfinite(column), np.clip(column, -3, 3), 0.0)[:, np.newaxis])
    else:
      shares = np.asarray(field.shares)
      known = np.isfinite(column)
      chosen = np.eye(len(shares))[np.where(known, column, 0).astype(int)]
      spread = math.sqrt(max(float(np.sum(shares * (1 - shares))), 1e-12))
      parts.append(np.where(known[:, np.newaxis], chosen - shares[np.newaxis], 0.0) / spread)
  return np.concatenate(parts, axis=1)


def distinct(schema: Schema, rows: np.ndarray) -> list[int]:
  """Returns the places of the first `MOST` + 1 rows whose cells differ."""
  return firsts(_known_by(schema, rows))


def gallery(schema: Schema, rows: Any, private: Any) -> Gallery:
  """Returns the `Gallery` of the first `MOST` + 1 different rows.

  A row is recognised if it has more cells right than 99 of 100 pairs of different rows have in common.

  Args:
    schema: of the rows.
    rows: float [G, D], private ones among them or not; G may be 0.
    private: float [N, D]; they calibrate the threshold where there are fewer than two rows.
  """
  rows, private = np.asarray(rows, np.float32), np.asarray(private, np.float32)
  schema = schema.covering(np.concatenate([rows.reshape(-1, schema.width), private]))
  kept = rows.reshape(-1, schema.width)[np.asarray(distinct(schema, rows), int)]
  cells = schema.cells(kept)
  of = cells if len(cells) > 1 else schema.cells(private)
  return Gallery(schema, cells, {known: i for i, known in enumerate(_known_by(schema, kept))}, calibrated(schema, of))


def calibrated(schema: Schema, cells: np.ndarray) -> float:
  """Returns the share of right cells from which on a row is recognised; 1 where there are no two different rows."""
  if len(cells) < 2:
    return 1.0
  first, second = different(len(cells), _PAIRS)
  shared = _right(schema, cells[first], cells[second], RIGHT).mean(axis=1)
  return float(min(1.0, np.percentile(shared, PERCENTILE) + 1e-9))


def _known_by(schema: Schema, rows: np.ndarray) -> list[bytes]:
  """Returns what tells each row from all that differ in a cell."""
  cells = np.round(schema.cells(rows), 5) + 0.0
  return [row.tobytes() for row in cells]


def _identified(
  found: np.ndarray,
  truth: np.ndarray,
  labels: np.ndarray,
  paired: np.ndarray,
  right: np.ndarray,
  among: Gallery | Mapping[int, Gallery],
) -> dict[str, Any]:
  """Returns 'rank', 'first', 'identified', 'recognised' and 'candidates' of pairs; ties count against the original."""
  ranks, others, enough = [], [], []
  for place, label in enumerate(labels):
    kind = among if isinstance(among, Gallery) else among[int(label)]
    row = truth[place : place + 1]
    schema = kind.schema.covering(row)
    cells = schema.cells(found[place : place + 1])
    own = costs(schema, cells, schema.cells(row))[0, 0]
    apart = costs(schema, cells, kind.cells)[:, 0]
    itself = kind.places.get(_known_by(schema, row)[0])
    kept = np.delete(apart, itself) if itself is not None else apart[:MOST]
    answered = ~np.isnan(cells)
    ranks.append(1 + int(np.sum(kept <= own + 1e-6)) if answered.all() else 1 + len(kept))
    others.append(len(kept))
    enough.append(right[place].mean() >= kind.threshold)
  first = np.asarray(ranks) == 1
  named = first & (np.asarray(others) > 0)
  return {
    'rank': min(ranks),
    'first': np.flatnonzero(paired)[named].tolist(),
    'identified': int(named.sum()),
    'recognised': int((first & np.asarray(enough)).sum()),
    'candidates': min(others),
  }


def settle(schema: Schema, rows: jax.Array) -> jax.Array:
  """Returns rows [N, D] in the range of their numbers, and the entries of blocks in [0, 1].

  Blocks stay relaxed: a search that took the largest entry in every step would not move. `evaluate` takes it at last.
  """
  low, high = bounds(schema)
  return jnp.clip(rows, jnp.asarray(low, rows.dtype).reshape(1, -1), jnp.asarray(high, rows.dtype).reshape(1, -1))


def _cells(schema: Schema, model: Any) -> Relaxation:
  """Returns what a search moves in place of rows: a softmax for each block, a sigmoid in the range of each number.

  The logits of a level with the share p are p + √(p(1 − p))·u, as in TabLeak's code: rare levels move more slowly.
  """
  del model
  low, high = (end.astype(np.float32).reshape(1, -1) for end in bounds(schema))
  blocks = [(place, field) for field, place in zip(schema.fields, schema.places, strict=True) if not field.numeric]

  def apply(free: jax.Array) -> jax.Array:
    rows = low + (high - low) * jax.nn.sigmoid(free)
    for place, field in blocks:
      shares = np.asarray(field.shares, np.float32).reshape(1, -1)
      logits = shares + np.sqrt(shares * (1 - shares)) * free[..., place]
      rows = rows.at[..., place].set(jax.nn.softmax(logits, axis=-1))
    return rows

  def decide(rows: jax.Array, variables: Any) -> jax.Array:
    for place, field in blocks:
      rows = rows.at[..., place].set(jax.nn.one_hot(rows[..., place].argmax(axis=-1), field.width, dtype=rows.dtype))
    return rows

  return Relaxation(lambda shape, variables: shape, apply, decide, lambda rows, variables: rows)


def bounds(schema: Schema) -> tuple[np.ndarray, np.ndarray]:
  """Returns the least and the largest of each entry of a row, [D]."""
  low, high = np.zeros(schema.width), np.ones(schema.width)
  for field, place in zip(schema.fields, schema.places, strict=True):
    if field.numeric:
      low[place.start], high[place.start] = ((end - field.mean) / field.std for end in (field.low, field.high))
  return low, high


def drawn(schema: Schema, key: jax.Array, shape: Sequence[int]) -> jax.Array:
  """Returns rows [N, D] at random, of which each column is drawn by itself: levels by their shares, normal numbers."""
  key, levels = jax.random.split(key)
  rows = settle(schema, jax.random.normal(key, shape))
  for number, (field, place) in enumerate(zip(schema.fields, schema.places, strict=True)):
    shares = np.asarray(field.shares, np.float32)
    if field.numeric and field.gaps:
      shares = np.asarray([1 - shares[-1], shares[-1]], np.float32)
    entries = rows[:, place]
    if len(shares):
      chosen = jax.random.categorical(jax.random.fold_in(levels, number), jnp.log(shares), shape=(shape[0],))
      entries = jax.nn.one_hot(chosen, len(shares), dtype=rows.dtype)
    if field.numeric:
      values = rows[:, place.start]
      if field.kind == ORDINAL:
        allowed = jnp.asarray((field.values - field.mean) / field.std, rows.dtype)
        values = allowed[jnp.argmin(jnp.abs(values[:, jnp.newaxis] - allowed[jnp.newaxis]), axis=-1)]
      parts = [values * entries[:, 0], entries[:, 1]] if field.gaps else [values]
      entries = jnp.stack(parts, axis=-1)
    rows = rows.at[:, place].set(entries)
  return rows


def nearness(schema: Schema, found: Any, truth: Any) -> np.ndarray:
  """Returns the share of right cells of pairs, float [N]; NaN for a row that is not finite."""
  found, schema = np.asarray(found), schema.covering(truth)
  right = _right(schema, schema.cells(found), schema.cells(np.asarray(truth)), RIGHT).mean(axis=1)
  return np.where(np.isfinite(found).all(axis=1), right, np.nan)


def odd(schema: Schema, rows: np.ndarray) -> str:
  """Returns what of rows [K, D] no row of the columns may have, the first of each column, in words; '' for nothing."""
  found = []
  for field, place in zip(schema.fields, schema.places, strict=True):
    block = np.asarray(rows, np.float64)[:, place]
    flags = block if not field.numeric else block[:, 1:]
    wrong = np.argwhere(np.minimum(np.abs(flags), np.abs(flags - 1)) > _SOFT)
    if len(wrong):
      found.append(f'{field.name} has {flags[tuple(wrong[0])]:.3g} where 0 or 1 stands')
      continue
    wide = schema.covering(rows).fields[schema.fields.index(field)]
    held = block[:, -1] <= FLAGGED if field.gaps else np.ones(len(block), bool)
    values = block[held, 0] * field.std + field.mean
    if (wide.low, wide.high) != (field.low, field.high):
      far = values[np.argmax(np.maximum(field.low - values, values - field.high))]
      found.append(f'{field.name} has {far:.4g} where {field.low:.4g} to {field.high:.4g} are known')
    elif wide.step != field.step:
      apart = np.abs(values - np.rint(values))
      found.append(f'{field.name} has {values[np.argmax(apart)]:.4g} where whole numbers are known')
    elif field.kind == ORDINAL and values.size:
      apart = np.abs(values[:, np.newaxis] - field.values[np.newaxis]).min(axis=1) / field.std
      if apart.max() > _SOFT:
        found.append(f'{field.name} has {values[np.argmax(apart)]:.4g} between its levels')
  return ', '.join(found[:_FEW]) + (f' and {len(found) - _FEW} more columns alike' if len(found) > _FEW else '')


def marked(schema: Schema, row: np.ndarray, truth: np.ndarray | None = None) -> list[Piece]:
  """Returns the cells of a row [D] as texts, each with whether it is right; of the private row itself without."""
  schema = schema if truth is None else schema.covering(np.asarray(truth)[np.newaxis])
  cells = schema.cells(np.asarray(row)[np.newaxis])
  texts = schema.texts(cells)[0]
  right: Sequence[Any] = [None] * len(texts)
  if truth is not None:
    right = _right(schema, cells, schema.cells(np.asarray(truth)[np.newaxis]), RIGHT)[0].tolist()
  sure = [None if np.isnan(one) else float(one) for one in schema.certainty(np.asarray(row)[np.newaxis])[0]]
  names = [field.name for field in schema.fields]
  return [Piece(*one) for one in zip(texts, right, names, sure, strict=True)]


def picture(schema: Schema, row: np.ndarray) -> np.ndarray:
  """Returns an image [H, W, 1] in [0, 1] of a row: a square per cell, from the least value to the largest."""
  cells = schema.cells(np.asarray(row)[np.newaxis])[0]
  shades = []
  for cell, field in zip(cells, schema.fields, strict=True):
    if field.numeric:
      low, high = ((end - field.mean) / field.std for end in (field.low, field.high))
      shades.append(0.5 if np.isinf(cell) else (cell - low) / max(high - low, 1e-12))
    else:
      shades.append(cell / max(len(field.levels) + field.gaps - 1, 1))
  across = math.ceil(math.sqrt(max(1, len(shades))))
  padded = np.full(across * math.ceil(max(1, len(shades)) / across), 1.0)
  padded[: len(shades)] = shades
  return padded.reshape(-1, across, 1)


def shaped(schema: Schema, shape: Sequence[int]) -> str:
  """Returns (D,) in words, such as '14 columns, encoded as 105 numbers'."""
  (width,) = shape
  number = len(schema.fields)
  return f'{number} columns' + (f', encoded as {width} numbers' if width != number else '')


def describe(schema: Schema, rows: np.ndarray) -> dict[str, Any]:
  """Returns {'schema': …}, from which stored results remake the modality."""
  del rows
  return {'schema': schema.to_json()}


_OF_SCHEMA: dict[str, Callable[..., Any]] = {
  'check': check,
  'misfit': misfit,
  'evaluate': evaluate,
  'distinct': distinct,
  'gallery': gallery,
  'settle': settle,
  'drawn': drawn,
  'nearness': nearness,
  'marked': marked,
  'odd': odd,
  'picture': picture,
  'shaped': shaped,
  'describe': describe,
}

TABLE = modality(table(Schema(())))  # by whose columns rows are known; settings remake that of their schema
