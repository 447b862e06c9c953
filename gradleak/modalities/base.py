"""What a modality is: what a sample is, how it is judged and shown. Nothing else in the package knows."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gradleak.core import errors

NUMBER = (int, float)


class Column(NamedTuple):
  """One column of `rows.jsonl` and `controls.jsonl`.

  Attributes:
    name: its key.
    type: of its values in JSON.
    unit: 'dB', a range, or '' where there is none.
    meaning: a sentence.
    none: when the value is null; '' for never.
    bounds: the range that it has by definition, if a mean of it is summarised; else None.
  """

  name: str
  type: type | tuple[type, ...]
  unit: str
  meaning: str
  none: str = ''
  bounds: tuple[float, float] | None = None


class Shown(NamedTuple):
  """A column as tables show it.

  Attributes:
    column: its key.
    title: what it is called.
    unit: '' where there is none.
    digits: decimals.
    significant: whether two significant digits take their place.
  """

  column: str
  title: str
  unit: str = ''
  digits: int = 2
  significant: bool = False

  def with_unit(self, join: str = ' ') -> str:
    """Returns the title, with the unit behind it where there is one."""
    return join.join(filter(None, (self.title, self.unit)))


class Piece(NamedTuple):
  """A part of a sample as people read it: a cell of a table, a token of a text.

  Attributes:
    text: what stands there.
    right: whether it is what the private sample has; None where nothing is compared, as in the private sample itself.
    of: what it is a part of, such as a column; '' where parts follow each other as in a text.
    sure: how sure the attacker can be of it, in [0, 1]; None where nothing tells.
  """

  text: str
  right: bool | None = None
  of: str = ''
  sure: float | None = None


class Relaxation(NamedTuple):
  """What a search moves in place of samples: pixels as they are, or a number for each token that may stand there.

  Attributes:
    shape: (shape of the samples [N, …], variables of the model) -> the shape of what is moved.
    apply: what is moved -> what the model takes.
    decide: (what the model takes, variables) -> the samples that are settled on; −1 for numbers that are not finite,
      where samples are integers.
    relaxed: (samples, variables) -> what the model takes of them.
    scale: variables -> the standard deviation of what a search starts from, in units of that of its start.
    silent: path of the parameter, or of all below it, without a gradient where samples are moved so: not compared.
  """

  shape: Callable[[tuple[int, ...], Any], tuple[int, ...]]
  apply: Callable[[jax.Array], jax.Array]
  decide: Callable[[jax.Array, Any], jax.Array]
  relaxed: Callable[[jax.Array, Any], jax.Array]
  scale: Callable[[Any], jax.Array | float] = lambda variables: 1.0
  silent: tuple[str, ...] = ()


# Samples are moved as they are.
PLAIN = Relaxation(
  lambda shape, variables: shape,
  lambda free: free,
  lambda given, variables: given,
  lambda samples, variables: samples,
)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Modality:
  """What a sample is. Modalities are compared as objects, and known to stored results by their names.

  A batch of samples is an array [N, …], floats or integers; batches of one upload have one shape.

  Attributes:
    name: what results call it, such as 'images'.
    axis_names: of one sample, such as ('H', 'W', 'C').
    check: samples [N, …] -> None; raises `UsageError` for what are none, and names the first of them.
    describe: samples -> what is recorded of them, plain JSON; {} for nothing.
    evaluate: (reconstructions [K, …], truth [N, …], their labels, the true ones, signed=, blank=, among=) -> the
      figures of one reconstructed batch: `columns` but those of networks, 'revealed', 'flat', 'rank', 'first',
      'identified', 'recognised', 'candidates', 'label_correct', 'label_counts_correct' and 'permutation', see
      `metrics.evaluate`.
    distinct: samples -> the places of those that can be candidates, each once.
    flat: samples -> which of them are alike whatever they show, bool [N].
    gallery: (candidates, private samples) -> what `evaluate` takes as `among`.
    columns: those of its rows that others do not have.
    score: the column that grows with the likeness of a reconstruction; a run has to exceed its control.
    correlation: the column that tells a weak trace from none, in [-1, 1].
    margin: by how much the score of an attack has to be lower than another's to be worse, in its unit.
    effect: the least change of the score that is one, in its unit: of images 3 dB, half of the squared error.
    clear: the score beyond which a reconstruction is no clearer to people: of images 30 dB, eight grey levels of 255.
    likeness: the column by which the example of a verdict is chosen.
    oracle: the columns of which the best start is recorded, as 'oracle_…'.
    shown: what tables show, the score first.
    further: what is folded away, as further figures.
    nearness: (reconstructions, truth), in pairs -> the score of each, float [N].
    picture: a sample -> an image [H, W, C] with values in [0, 1] that people look at.
    marked: (a reconstruction or a private sample, the private sample or None) -> its `Piece`s, as people read them,
      each with whether it is right; None for samples that people look at.
    usual: the sample that is answered without any upload, from what is public; None for none.
    neutral: the shape of one sample -> a sample that says nothing, such as a grey image.
    drawn: (key, shape [N, …]) -> samples drawn at random, which say nothing either.
    empty: samples -> which of them are no answer, as closed forms return where they find nothing, bool [K].
    odd: samples -> what of them no sample may have, in words; '' where all may be samples.
    stored: (an array of a file, shape of one sample) -> samples as they are kept: images also with channels first.
    misfit: model -> why it takes other samples than these, in words; '' where it may take them.
    shapes: (model, its variables) -> shapes of samples that are tried where none is given.
    alike: (samples [K, …], others [M, …]) -> how alike each is to each, float [K, M], at most 1; None for `nearness`.
    sensitive: what `Piece.of` names that is worse to lose than the others.
    words: name of a sentence of the report -> the same of these samples; others speak of `noun` where images are meant.
    defaults: name of a program's flag -> its value where it is not given; others have those of images.
    remade: settings of a result -> the same modality with what they record of its samples; None where nothing is.
    copies: name -> what alters samples into copies that a list of candidates may hold in their place.
    by_networks: (model, variables, weights of LPIPS or None) -> a function (reconstructions, truth) -> more figures of
      pairs; None for none.
    noun: what one sample is called, singular and plural.
    shaped: the shape of one sample -> how sentences describe it.
    settle: samples that a search has moved -> the nearest that are allowed.
    box: the least and the largest entry that a sample can have by definition; infinite ones where it may have any.
    terms: names of the special terms of matching that are defined on them, see `attacks.matching.terms`.
    dtype: of samples: 'float32', or 'int32' for what is looked up.
    relaxed_axes: how many axes one sample has as a search moves it, floats; None for those of the sample.
    relaxations: name -> (model -> `Relaxation`), the usual one first; {} for samples that are moved as they are.
    targets: name -> (samples, or what a search moves, **settings of a loss) -> (what the model is given, the targets
      that the samples themselves give, floats [N, …, outputs]), see `losses.Loss.own`. A model with a `vocabulary` adds
      it as size=.
  """

  name: str
  axis_names: tuple[str, ...]
  check: Callable[[Any], None]
  evaluate: Callable[..., dict[str, Any]]
  distinct: Callable[[np.ndarray], list[int]]
  gallery: Callable[[Any, Any], Any]
  columns: tuple[Column, ...]
  score: str
  correlation: str
  likeness: str
  oracle: tuple[str, ...]
  shown: tuple[Shown, ...]
  nearness: Callable[[Any, Any], Any]
  picture: Callable[[np.ndarray], np.ndarray]
  noun: tuple[str, str]
  shaped: Callable[[Sequence[int]], str] = lambda shape: f'samples of shape {tuple(shape)}'
  further: tuple[Shown, ...] = ()
  settle: Callable[[Any], Any] = lambda samples: samples
  box: tuple[float, float] = (-math.inf, math.inf)
  terms: frozenset[str] = frozenset()
  flat: Callable[[np.ndarray], np.ndarray] = lambda samples: np.zeros(len(samples), bool)
  describe: Callable[[np.ndarray], Mapping[str, Any]] = lambda samples: {}
  copies: Mapping[str, Callable[[np.ndarray], np.ndarray]] = dataclasses.field(default_factory=dict)
  by_networks: Callable[..., Callable[..., dict[str, float | None]]] | None = None
  marked: Callable[[np.ndarray, np.ndarray | None], Sequence[Piece]] | None = None
  margin: float = 0.0
  effect: float = 0.0
  clear: float = math.inf
  usual: Any = None
  neutral: Callable[[Sequence[int]], np.ndarray] = lambda shape: np.zeros(shape, np.float32)
  drawn: Callable[[jax.Array, Sequence[int]], jax.Array] = jax.random.uniform
  empty: Callable[[np.ndarray], np.ndarray] = lambda samples: np.all(samples == 0, axis=tuple(range(1, samples.ndim)))
  odd: Callable[[np.ndarray], str] = lambda samples: ''
  stored: Callable[[np.ndarray, tuple[int, ...]], np.ndarray] = lambda samples, shape: samples
  misfit: Callable[[Any], str] = lambda model: ''
  shapes: Callable[[Any, Any], Sequence[tuple[int, ...]]] = lambda model, variables: ()
  alike: Callable[[np.ndarray, np.ndarray], np.ndarray] | None = None
  sensitive: frozenset[str] = frozenset()
  words: Mapping[str, str] = dataclasses.field(default_factory=dict)
  defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  remade: 'Callable[[Mapping[str, Any]], Modality] | None' = None
  dtype: str = 'float32'
  relaxed_axes: int | None = None
  relaxations: Mapping[str, Callable[[Any], Relaxation]] = dataclasses.field(default_factory=dict)
  targets: Mapping[str, Callable[..., tuple[jax.Array, jax.Array]]] = dataclasses.field(default_factory=dict)

  def __post_init__(self) -> None:
    named = {column.name for column in self.columns}
    tables = [one.column for one in (*self.shown, *self.further)]
    for name in (self.score, self.correlation, self.likeness, *self.oracle, *tables):
      errors.check_choice('column of the modality', name, named)
    first = self.shown[0].column
    if first != self.score:
      raise errors.UsageError(f'the modality {self.name!r} shows {first!r} before its score {self.score!r}')
    if self.score == self.correlation:
      raise errors.UsageError(f'the modality {self.name!r} has {self.score!r} for its score and its correlation')

  def __repr__(self) -> str:
    return self.name

  def check_batch(self, samples: Any) -> None:
    """Checks type and axes of samples, which may be traced; raises `UsageError` for others. Values are not read."""
    floats = jnp.issubdtype(samples.dtype, jnp.floating)
    integers = jnp.issubdtype(samples.dtype, jnp.integer)
    fits = samples.ndim == 1 + self.axes and (integers if self.integral else floats)
    moved = floats and self.relaxed_axes is not None and samples.ndim == 1 + self.relaxed_axes
    if not (fits or moved) or not samples.size:
      expected = f'{"integers" if self.integral else "floats"} [N, {", ".join(self.axis_names)}]'
      raise errors.UsageError(
        f'{self.noun[1]} are {samples.dtype} of shape {samples.shape}, expected {expected}, N ≥ 1'
      )

  def check_model(self, model: Any) -> None:
    """Raises `UsageError` for a model that takes other samples, or tokens of another tokeniser."""
    if model.axes not in (None, self.axes):
      known = model.axes in {one.axes for one in REGISTRY.values()}
      fit = 'give modality=gradleak.modalities.of_config(dataset.settings) of what the client trains on'
      none = 'no kind of samples has as many; a series is an image of one row, for a network that reshapes it'
      raise errors.UsageError(
        f'the model {model.name!r} takes samples of {model.axes} axes, and {self.noun[1]} have {self.axes}: '
        f'{fit if known else none}'
      )
    if model.takes_ids != self.integral:
      takes = 'ids of tokens' if model.takes_ids else 'floats'
      raise errors.UsageError(f'the model {model.name!r} takes {takes}, and {self.noun[1]} are {self.dtype}')
    if misfit := self.misfit(model):
      raise errors.UsageError(misfit)

  def recorded(self, samples: np.ndarray) -> dict[str, Any]:
    """Returns what the settings of a result tell of samples: `describe`, and the name of all modalities but images."""
    return {**({} if self is REGISTRY['images'] else {'modality': self.name}), **self.describe(samples)}

  @property
  def integral(self) -> bool:
    """Whether samples are integers."""
    return jnp.issubdtype(self.dtype, jnp.integer)

  def cast(self, samples: Any, floating: Any = np.float32) -> np.ndarray:
    """Returns samples as they are kept; `floating` is the dtype of those that are floats."""
    return np.asarray(samples).astype(self.dtype if self.integral else floating)

  def relaxation(self, name: str, model: Any) -> Relaxation:
    """Returns what a search moves in place of the samples of a model.

    Args:
      name: of `relaxations`; '' for the usual one.
      model: the `Model`.

    Raises:
      UsageError: for a name that is not among them.
    """
    if not self.relaxations and not name:
      return PLAIN
    if name not in self.relaxations and not self.relaxations:
      raise errors.UsageError(f'{self.noun[1]} are moved as they are: leave out relaxation={name}')
    chosen = name or next(iter(self.relaxations))
    errors.check_choice('relaxation', chosen, self.relaxations)
    return self.relaxations[chosen](model)

  def likenesses(self, samples: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Returns how alike each of samples [K, …] is to each of others [M, …], float [K, M]: `alike`, or `nearness`."""
    if self.alike is not None:
      return self.alike(samples, others)
    pairs = np.repeat(samples, len(others), axis=0), np.concatenate([others] * len(samples))
    return np.asarray(self.nearness(*pairs), np.float64).reshape(len(samples), len(others))

  @property
  def axes(self) -> int:
    """How many axes one sample has."""
    return len(self.axis_names)

  @property
  def scored(self) -> Column:
    """The column of the score, with the range that it has by definition."""
    return next(one for one in self.columns if one.name == self.score)

  @property
  def controls(self) -> tuple[str, ...]:
    """The columns that a run has to exceed: of the score, and of the correlation."""
    return f'control_{self.score}', f'control_{self.correlation}'

  def derived(self) -> tuple[Column, ...]:
    """Returns the columns that an audit adds for some of `columns`."""
    of = {column.name: column for column in self.columns}

    def made(what: str, name: str, meaning: str, none: str) -> Column:
      return of[name]._replace(name=f'{what}_{name}', meaning=meaning, none=none)

    best = 'The same, of the best start, chosen by the truth.'
    return (
      made('trained', self.score, f'{self.score} to what the client trained on.', 'these are the private samples'),
      *(made('oracle', name, best, 'all diverged') for name in self.oracle),
      made('control', self.score, '95th percentile of the control runs.', 'there is no control run'),
      made('control', self.correlation, 'Three deviations above the mean of the control.', 'there is none'),
    )


REGISTRY: dict[str, Modality] = {}


def modality(made: Modality) -> Modality:
  """Returns a modality, which stored results are known by from now on.

  Raises:
    UsageError: if another one has its name, or the score of one is a column of the other.
  """
  errors.check_instance('modality', made, Modality, 'a gradleak.modalities.Modality')
  for other in REGISTRY.values():
    shared = {column.name for column in made.columns} & {column.name for column in other.columns}
    if other is not made and (other.name == made.name or shared & {made.score, other.score}):
      raise errors.UsageError(f'the modality {made.name!r} has the name or the score of {other.name!r}')
  REGISTRY[made.name] = made
  return made


def of_rows(rows: Sequence[Mapping[str, Any]]) -> Modality:
  """Returns the modality of an audit's rows, by the column of its score; images, where there is no row.

  Raises:
    UsageError: for rows of no modality that is known.
  """
  if not rows:
    return REGISTRY['images']
  found = [one for one in REGISTRY.values() if one.score in rows[0]]
  if len(found) != 1:
    scores = ', '.join(one.score for one in REGISTRY.values())
    raise errors.UsageError(f'a row has none of the columns {scores}: its modality is not known')
  return found[0]


def of_config(config: Mapping[str, Any]) -> Modality:
  """Returns the modality of a result's settings, or of a dataset's; raises `UsageError` for one that is not known."""
  name = config.get('modality', 'images')
  errors.check_choice('modality', name, REGISTRY)
  found = REGISTRY[name]
  return found if found.remade is None else found.remade(config)
