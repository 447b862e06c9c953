"""What a defense is: an optax transformation with declared properties.

`@defense(place=…, …)` turns a factory of transformations into one of `Defense`s. Its arguments are the `Traits`. They
say where the defense acts, whether it is random, and what it drops. They also say how much noise it adds to each
entry, what it clips to, and what it guarantees. Audits and reports treat a defense by nothing but its traits.
"""

import dataclasses
import functools
import inspect
import math
import sys
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import optax

from gradleak.core import errors
from gradleak.core.methods import Method, accepted, identity, name_of, setting_names
from gradleak.core.settings import Choice, check_fields, ranged
from gradleak.core.trees import Layer, Tree, path_names
from gradleak.defenses import foreign
from gradleak.defenses.base import sequence

PLACES = ('data', 'step', 'upload', 'round')
SPARSIFIES = ('', 'zeros', 'mask')
DISTRIBUTIONS = ('gaussian', 'laplace', 'triangular')
PARTS = ('', 'sample', 'upload', 'weight')
# Neighbouring relation -> the L2 sensitivity of a sum of contributions, in units of the norm that bounds each.
SENSITIVITIES = {'replace one': 2.0, 'replace by zeros': 1.0, 'add or remove one': 1.0}
Settings = Mapping[str, Any]
# What a defense on the samples has none of: its noise, say, is not that of an entry of the update.
_OF_UPDATES = 'sparsifies', 'accumulates', 'noise', 'clips', 'bounds', 'shortens', 'limits', 'bits'


@dataclasses.dataclass(frozen=True)
class Context:
  """What a defense is bound to; its factory's positional arguments are computed from it.

  Attributes:
    client: the undefended `Client`.
    variables: the global model's.
    sample_shape: (H, W, C).
    public: public data (samples, targets), float32 [K, H, W, C] and int32 [K], or None.
    previous: variables of the model that this client received before, or None at its first participation.
  """

  client: Any
  variables: Any
  sample_shape: tuple[int, ...]
  public: tuple | None = None
  previous: Any = None

  @property
  def layers(self) -> tuple[Layer, ...] | None:
    """The model's layers, or None if it does not offer them."""
    offered = self.client.model.layers
    return None if offered is None else offered(self.sample_shape)

  @property
  def unshared(self) -> frozenset[tuple[str, ...]]:
    """The paths of the parameters that the client does not share, which are zeros in its update."""
    whole = not (self.client.frozen or self.client.private)
    return frozenset() if whole else self.client.kept_paths(self.variables['params'], self.sample_shape)

  @property
  def frozen(self) -> frozenset[tuple[str, ...]]:
    """The paths of the parameters that the client does not train, which are zeros in its gradients."""
    if not self.client.frozen:
      return frozenset()
    return dataclasses.replace(self, client=dataclasses.replace(self.client, private=())).unshared


@dataclasses.dataclass(frozen=True)
class Noise:
  """The noise that a defense adds to an update.

  Attributes:
    variance: (settings, `Context`, number of samples) -> the variance of an entry that has noise: a number, or a tree
      shaped like the parameters of numbers or arrays.
    fraction: settings -> that of the entries that have noise, 1 for all of them.
    groups: arguments of the factory -> the number of each entry's group, integers shaped like the parameters; either
      all entries of a group have noise, or none. None if entries are chosen one by one.
    distribution: 'gaussian', 'laplace' or 'triangular', that of stochastic rounding.

  Raises:
    UsageError: for another distribution.
  """

  variance: Callable[[Settings, Context, int], float | Tree]
  fraction: Callable[[Settings], float] = lambda settings: 1.0
  groups: Callable[[tuple], Tree] | None = None
  distribution: Annotated[str, Choice(DISTRIBUTIONS)] = 'gaussian'

  def __post_init__(self) -> None:
    check_fields(self)

  def variance_of(self, settings: Settings, context: Context, num_samples: int) -> float | Tree:
    """Returns the `variance`: a float, also for a scalar array; or a tree shaped like the parameters."""
    found = self.variance(settings, context, num_samples)
    number = jax.tree_util.all_leaves([found]) and jnp.ndim(found) == 0
    return float(found) if number else found


@dataclasses.dataclass(frozen=True)
class Mechanism:
  """A Gaussian mechanism that each upload goes through.

  Attributes:
    noise: the noise multiplier, its standard deviation over the L2 norm that bounds each contribution.
    unit: whose contribution it protects, that of a 'client' (its upload) or of an 'example' (its part of the batch).
    releases: how often one upload releases that contribution: 1, or for an 'example' the local epochs.
  """

  noise: float
  unit: str
  releases: int = 1

  @ranged
  def multiplier(self, relation: Annotated[str, Choice(SENSITIVITIES)]) -> float:
    """Returns the standard deviation of the noise over the L2 sensitivity in a relation, a key of `SENSITIVITIES`.

    A contribution of norm ≤ S moves the sum by at most S if zeros take its place. It moves the sum by 2·S if another
    contribution does (Ponomareva et al., How to DP-fy ML, JAIR 2023, section 2.1.1).
    """
    return self.noise / SENSITIVITIES[relation]


@dataclasses.dataclass(frozen=True)
class Traits:
  """Properties of a defense; functions of its settings where they depend on them.

  Attributes:
    place: where it acts: 'data' (on the samples), 'step' (on the gradient of each local step, before the local
      optimizer), 'upload' (on the update before it is sent) or 'round' (at the server, on the mean update).
    random: whether different keys give different outputs; an attacker may then average repeated uploads.
    citation: its source.
    published: what its source calls it, which pages show before the factory's name; '' where that is the same.
    arguments: (`Context`, settings) -> the factory's positional arguments, computed once, on the host.
    sparsifies: '' (nothing), 'zeros' (dropped entries are sent as zeros) or 'mask' (dropped entries are not sent, and
      the server knows which; its state has a field `mask`).
    accumulates: whether it sends in later rounds what it dropped: an attacker may then sum repeated uploads.
    by_magnitude: whether it drops the entries of smallest magnitude: an attacker then has a bound on them.
    noise: the `Noise` that it adds, or None.
    clips: settings -> the L2 norm that it clips the whole update to, before noise of its own; or None. An attacker can
      clip what it simulates.
    clips_each: what it clips one by one in place of the whole update: the gradient of each 'sample' (to `bounds`), each
      'upload' at the server, or each new 'weight'; '' for nothing. Attackers do not read it, pages do.
    bounds: settings -> a bound on the L2 norm of its output without noise of its own, or None; `clips` is one. Where it
      clips each 'sample', that of a mean.
    shortens: settings -> the L2 norm that it clips what it is given to, where what it sends may be longer; or None.
    limits: settings -> the largest magnitude of an entry of its output without noise of its own, or None.
    mechanism: (settings, L2 norm that the stage before it clips the upload to, or None; its position in the chain) ->
      the `Mechanism` that it is, or None.
    post_processing: whether its output depends only on the update and on public values, so that guarantees of the
      stages before it still hold.
    selects: whether the mask of `sparsifies` depends on the update: noise that is added later does not protect the
      mask.
    simulated: settings -> the `Defense` that is its part without randomness, which an attacker applies to what it
      simulates; or None where the mask of what was dropped says as much.
    bits: (settings, what is sent of a tensor, floats [K, …]) -> the bits of its code, numbers [K]; or None for those of
      its type. It counts where no later stage changes the update.
    remark: (`Context`, settings) -> what results say of it there, a few words; '' for nothing.
    gradients: (`Context`, settings) -> how many gradients it computes of each sample, beside the client's own: an
      attacker who simulates it many times does so less often where they are many.
    idle: settings -> whether it is the identity.
    projects: settings -> whether it turns what would oppose the gradient that it takes, until both are orthogonal: an
      upload that is, to rounding, names its sample.
    replaces: whether it computes anew what it returns, so that what earlier stages of its place did is lost: it is the
      first of them.
    moves: whether it moves samples, or looks at derivatives with respect to them, and so takes none that are whole
      numbers. What acts on samples does.
  """

  place: Annotated[str, Choice(PLACES)] = 'upload'
  random: bool = False
  citation: str = ''
  published: str = ''
  arguments: Callable[[Context, Settings], tuple] = lambda context, settings: ()
  sparsifies: Annotated[str, Choice(SPARSIFIES)] = ''
  accumulates: bool = False
  by_magnitude: bool = False
  noise: Noise | None = None
  clips: Callable[[Settings], float] | None = None
  clips_each: Annotated[str, Choice(PARTS)] = ''
  bounds: Callable[[Settings], float] | None = None
  shortens: Callable[[Settings], float] | None = None
  limits: Callable[[Settings], float] | None = None
  mechanism: Callable[[Settings, float | None, int], Mechanism | None] | None = None
  post_processing: bool = False
  selects: bool = False
  simulated: Callable[[Settings], Any] | None = None
  bits: Callable[[Settings, Any], Any] | None = None
  remark: Callable[[Context, Settings], str] = lambda context, settings: ''
  gradients: Callable[[Context, Settings], int] = lambda context, settings: 0
  idle: Callable[[Settings], bool] = lambda settings: False
  projects: Callable[[Settings], bool] = lambda settings: False
  replaces: bool = False
  moves: bool = False

  def __post_init__(self) -> None:
    check_fields(self)
    always = 'arguments', 'gradients', 'idle', 'projects'
    for name in ('clips', 'bounds', 'shortens', 'limits', 'mechanism', 'bits', *always):
      value = getattr(self, name)
      if not callable(value) and (value is not None or name in always):
        raise errors.UsageError(f'the trait {name} is {errors.shown(value)}, expected a function')
    if self.noise is not None:
      errors.check_instance('the trait noise', self.noise, Noise, 'a gradleak.defenses.Noise')
    for name in _OF_UPDATES if self.place == 'data' else ():
      if getattr(self, name):
        raise errors.UsageError(f"the trait {name} is of updates, and place='data' acts on samples: leave it out")


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Stage(Method):
  """One method of a defense.

  Attributes:
    traits: its `Traits`.
    label: how results call a transformation of a user's own.
    version: of a user's own code: stored results are of one version, see `wrap`.
  """

  kind: str = 'defense'
  traits: Traits = dataclasses.field(default_factory=Traits)
  label: str = ''
  version: str = ''

  @property
  def name(self) -> str:
    """The factory's name, or the label of a user's own transformation."""
    return self.label or super().name

  def __reduce_ex__(self, protocol: Any) -> Any:
    """Returns how it is made anew where its factory is in a module: traits hold functions that have no name."""
    make: Any = sys.modules.get(self.factory.__module__)
    for part in getattr(self.factory, '__qualname__', '').split('.'):
      make = getattr(make, part, None)
    if getattr(make, '__wrapped__', None) is not self.factory:
      return super().__reduce_ex__(protocol)
    return _remade, (make, self.arguments, dict(self.given))

  @property
  def structure(self) -> Hashable:
    """What decides the compilation: that of a `Method`, and the traits, for the place where it acts."""
    return super().structure, identity(self.traits)

  @property
  def foreign(self) -> bool:
    """Whether it is a user's own, and not of this library."""
    return inspect.unwrap(self.factory) is _given or not self.factory.__module__.startswith('gradleak.')

  def arguments_in(self, context: Context) -> tuple:
    """Returns the factory's positional arguments: those that were given, or else what the context says."""
    return self.arguments or self.traits.arguments(context, self.settings)

  def made(self) -> Any:
    """Returns what the factory makes of the settings and arguments that it was given.

    Where it is made for something that a `Context` has, and has none yet, that is asked for when it is called.

    Raises:
      UsageError: where nothing says what a positional argument without a default is.
    """
    parameters = list(inspect.signature(self.factory).parameters.values())[len(self.arguments) :]
    kinds = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    missing = ', '.join(one.name for one in parameters if one.kind in kinds and one.default is one.empty)
    if missing and (self.arguments or self.traits.arguments is Traits.arguments):
      raise errors.UsageError(
        f'the defense {self.name} is made for {missing} and has none: make it by {self.name}({missing}, …), or give '
        'the trait arguments=lambda context, settings: (…,)'
      )
    if missing:
      return _asking(self.name, missing, self.traits.place)
    return self._checked(self.factory(*self.arguments, **self.settings))

  def build(self, numbers: tuple, *arguments: Any) -> Any:
    """Returns what the factory makes with these numbers, which may be traced, of these positional arguments."""
    return self._checked(super().build(numbers, *arguments))

  def _checked(self, transformation: Any) -> Any:
    return foreign.checked(self.name, transformation, self.traits.random) if self.foreign else transformation


def _asking(name: str, missing: str, place: str) -> Any:
  """Returns a transformation, or a function on the samples, that raises `UsageError` when it is called."""

  def ask(*given: Any, **extra: Any) -> Any:
    del given, extra
    raise errors.UsageError(f'the defense {name} is made for {missing} and has none: make it by {name}({missing}, …)')

  return ask if place == 'data' else optax.GradientTransformationExtraArgs(ask, ask)


def _remade(make: Callable, arguments: tuple, settings: Mapping) -> Stage:
  return make(*arguments, **settings).stages[0]


class Defense(optax.GradientTransformationExtraArgs):
  """An optax transformation with its settings and `Traits`; equal ones have equal stages.

  It can be used in any `optax.chain`. An audit or a federation places each stage where it acts. A defense on the
  samples is called like a function, `defense(key, samples, targets)`; its `update` raises `UsageError`.

  Attributes:
    stages: one `Stage` per part of a chain, in order.
    transform: of a single defense on the samples, the function (key, samples, targets) -> (samples, targets), which
      `jax.jit` accepts (a tuple like this one it does not); else None.
  """

  stages: tuple[Stage, ...]
  transform: Callable | None

  def __new__(cls, stages: Any, *update: Any) -> Any:
    """Returns the defense of these stages. Making each of them checks its settings.

    Given the fields of a transformation, `init` and `update`, it returns a plain one: named tuples are made anew like
    this by `jax.tree.map` and `dataclasses.asdict`.
    """
    if update:
      return cls._make((stages, *update))
    made = [stage.made() for stage in stages]
    transformations = [
      _on_samples(stage.name) if stage.traits.place == 'data' else one for stage, one in zip(stages, made, strict=True)
    ]
    both = sequence(*transformations)
    foreign_alone = all(stage.foreign for stage in stages)
    self = super().__new__(cls, both.init, both.update if foreign_alone else _of_floats(stages, both.update))
    self.stages = tuple(stages)
    self.transform = made[0] if len(made) == 1 and stages[0].traits.place == 'data' else None
    return self

  @classmethod
  def _make(cls, fields: Iterable) -> Any:
    return optax.GradientTransformationExtraArgs(*fields)

  def __reduce__(self) -> tuple:
    return Defense, (self.stages,)

  def __call__(
    self, key: jax.Array, samples: jax.Array, targets: jax.Array, weights: jax.Array | None = None
  ) -> tuple[jax.Array, jax.Array]:
    """Returns the samples to train on in place of these, for a single defense that acts on samples only.

    Their `weights`, 0 for padding, reach a defense that takes them.
    """
    if self.transform is None:
      raise errors.UsageError(f'the defense {self} acts on updates, not on samples: call its update(…)')
    samples = errors.as_array('samples', samples)
    if samples.ndim != 4 or not samples.size or samples.dtype.kind in 'biu':
      raise errors.UsageError(
        f'images are {samples.dtype} of shape {samples.shape}, expected floats [N, H, W, C], N ≥ 1'
      )
    key = None if key is None else errors.check_key('key', key)
    return self.transform(key, samples, targets, **accepted(self.transform, weights=weights))

  @property
  def structure(self) -> Hashable:
    """What decides the compilation."""
    return tuple(stage.structure for stage in self.stages)

  @property
  def numbers(self) -> tuple[float, ...]:
    """The numeric settings of all stages."""
    return tuple(number for stage in self.stages for number in stage.numbers)

  @property
  def citations(self) -> list[str]:
    """The sources of its stages, each once."""
    return list(dict.fromkeys(stage.traits.citation for stage in self.stages if stage.traits.citation))

  @property
  def published(self) -> str:
    """What sources call it, such as 'prune+DCS²' for a chain; '' where factories have the same names."""
    if not any(stage.traits.published for stage in self.stages):
      return ''
    return '+'.join(stage.traits.published or stage.name for stage in self.stages)

  @property
  def version(self) -> str:
    """The versions of a user's own stages, joined by ', '; '' where none has one."""
    return ', '.join(stage.version for stage in self.stages if stage.version)

  @property
  def random(self) -> bool:
    """Whether what a client sends is random; stages of the place 'round' act on it afterwards."""
    return any(stage.traits.random and not is_idle(stage) for stage in self.at('data', 'step', 'upload'))

  @property
  def accumulates(self) -> bool:
    """Whether a client sends in later rounds what it held back."""
    return any(stage.traits.accumulates and not is_idle(stage) for stage in self.at('data', 'step', 'upload'))

  def at(self, *places: str) -> tuple[Stage, ...]:
    """Returns the stages that act at these places, in their order."""
    return tuple(stage for stage in self.stages if stage.traits.place in places)

  @property
  def bits(self) -> Callable[[Any], Any] | None:
    """What is sent of a tensor, floats [K, …] -> the bits of its code, [K]; None where it is sent as it is."""
    last = [stage for stage in self.at('upload') if not is_idle(stage)][-1:]
    found = last[0].traits.bits if last else None
    return None if found is None else functools.partial(found, last[0].settings)

  def __str__(self) -> str:
    return '+'.join(map(str, self.stages)) or 'none'

  __repr__ = __str__

  def __eq__(self, other: object) -> bool:
    return isinstance(other, Defense) and self.stages == other.stages

  def __ne__(self, other: object) -> bool:
    return not self == other

  def __hash__(self) -> int:
    return hash(self.stages)


def _of_floats(stages: Sequence[Stage], update: Callable) -> Callable:
  """Returns the update of stages, which raises `UsageError` for updates that are no floats."""

  def checked(updates: Tree, state: Any, params: Tree = None, **extra: Any) -> tuple[Tree, Any]:
    for path, leaf in jax.tree.leaves_with_path(updates):
      if not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
        raise errors.UsageError(
          f'the defense {"+".join(map(str, stages))} acts on floats, and {"/".join(path_names(path))} of the update is '
          f'{jnp.result_type(leaf)}: leave it out, as by optax.masked'
        )
    return update(updates, state, params, **extra)

  return checked


def _on_samples(name: str) -> optax.GradientTransformationExtraArgs:
  def update(updates: Tree, state: Any, params: Tree = None, **extra: Any) -> tuple[Tree, Any]:
    del updates, state, params, extra
    raise errors.UsageError(f'the defense {name} acts on the samples: call it as a function, (key, samples, targets)')

  return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def defense(*, version: str = '', **traits: Any) -> Callable[[Callable], Callable[..., Defense]]:
  """Returns the decorator that makes a factory of transformations one of `Defense`s; `traits` are those of `Traits`.

  The factory's positional parameters are what it is made for, such as the model's layers. Where they are not given,
  `place` computes them by the trait `arguments`. Its keyword-only parameters are its settings, those annotated `float`
  its numbers; an annotation with a `Range` or a `Choice` is checked (`core.settings`). The `version` is that of `wrap`.
  """
  declared = _traits(**traits)
  version = version and errors.check_text('version', version)

  def decorate(factory: Callable) -> Callable[..., Defense]:
    @functools.wraps(factory)
    def make(*arguments: Any, **settings: Any) -> Defense:
      arguments, settings = _placed(factory, arguments, settings)
      return Defense((Stage(factory, settings, arguments, traits=declared, version=version),))

    make.traits = declared  # type: ignore[attr-defined]
    return make

  return decorate


def _placed(factory: Callable, arguments: tuple, settings: Mapping) -> tuple[tuple, dict]:
  """Returns (positional arguments, settings), of which positional arguments were named in part.

  Raises:
    UsageError: where a positional argument is missing or given twice.
  """
  if set(settings) <= set(setting_names(factory)):
    return arguments, dict(settings)
  kinds = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
  positional = [one for one in inspect.signature(factory).parameters.values() if one.kind in kinds]
  named = {one.name: settings[one.name] for one in positional if one.name in settings}
  try:
    found = inspect.Signature(positional).bind(*arguments, **named)
  except TypeError as error:
    raise errors.UsageError(f'the defense {name_of(factory)}: {error}') from None
  found.apply_defaults()
  same = all(value is one.default for value, one in zip(found.args, positional, strict=True))
  return () if same else found.args, {name: value for name, value in settings.items() if name not in named}


def _traits(**traits: Any) -> Traits:
  names = [field.name for field in dataclasses.fields(Traits)]
  for name in traits:
    errors.check_choice('trait of a defense:', name, names)
  return Traits(**traits)


def wrap(
  transformation: Any, place: str | None = None, *, label: str = 'own', version: str = '', **traits: Any
) -> Defense:
  """Returns the `Defense` of a user's own transformation; it is then treated like those of this library.

  For one with settings to sweep over, decorate its factory by `defense` instead.

  Args:
    transformation: an optax transformation; for the place 'data' a function (key, samples, targets) -> (samples,
      targets). A `Defense` is returned as it is.
    place: where it acts, see `Traits`.
    label: how results call it.
    version: of its code, such as '2'. A work directory holds label and version; under another version it is refused. A
      change of the code that keeps the version is not seen.
    **traits: its other properties, see `Traits`.

  Raises:
    UsageError: without a place, for an unknown trait, for an object of another kind, or for what a `Defense` would not
      keep: another place, a label, a version, traits.
  """
  if isinstance(transformation, Defense):
    others = [stage for stage in transformation.stages if place not in (None, stage.traits.place)]
    if others or version or traits or label != 'own':
      raise errors.UsageError(
        f"'{transformation}' is a defense, and keeps its "
        + (f"place '{others[0].traits.place}'" if others else 'label, version and traits')
        + ': wrap the transformation that it is made of, or leave wrap out'
      )
    return transformation
  if place is None:
    raise errors.UsageError(
      "where the transformation acts is not known: give place='data', 'step', 'upload' or 'round', as in "
      "gradleak.defenses.wrap(transformation, place='step')"
    )
  declared = _traits(place=place, **traits)
  errors.check_text('label', label)
  version = version and errors.check_text('version', version)
  fits = callable(transformation) if place == 'data' else isinstance(transformation, optax.GradientTransformation)
  if not fits:
    kind = 'a function (key, samples, targets) -> (samples, targets)' if place == 'data' else 'an optax transformation'
    raise errors.UsageError(f'the defense {label!r} is {transformation!r}, expected {kind}')
  return Defense((Stage(_given, {}, (transformation,), traits=declared, label=label, version=version),))


def _given(transformation: Any) -> Any:
  return transformation


NO_DEFENSE = Defense(())


def chain(*transformations: Any) -> Any:
  """Returns the `Defense` of several, each acting at its own place, and those of one place in the order given.

  With other optax transformations among them, such as the local optimizer, the result is a plain transformation.
  `optax.chain` passes the same `key=` to every stage, so that two noises of the same kind would be equal. This chain
  passes `fold_in(key, i)` to the i-th stage.

  Args:
    *transformations: `Defense`s, or any optax transformations.
  """
  if not all(isinstance(one, Defense) for one in transformations):
    return sequence(*transformations)
  return Defense(tuple(stage for one in transformations for stage in one.stages))


@dataclasses.dataclass(frozen=True)
class Bound:
  """A defense made for one context.

  Attributes:
    defense: the `Defense`.
    arguments: positional arguments of each stage's factory.
    gradients: that its stages compute of each sample, see `Traits`.
    frozen, unshared: the paths of the parameters that a step does not move, and that an upload does not hold.
    keeps: whether a user's own stage of the upload has a state, beside its masks, from one upload to the next.
    holds: whether that state depends on what was sent before, and not only on how often.
  """

  defense: Defense
  arguments: tuple[tuple, ...]
  gradients: int = 0
  frozen: frozenset[tuple[str, ...]] = frozenset()
  unshared: frozenset[tuple[str, ...]] = frozenset()
  keeps: bool = False
  holds: bool = False

  @property
  def in_turn(self) -> bool:
    """Whether an upload depends on those that the client sent before."""
    return self.keeps or self.defense.accumulates

  @property
  def held(self) -> bool:
    """Whether an upload depends on the updates behind those that the client sent before."""
    return self.holds or self.defense.accumulates

  @property
  def varies(self) -> bool:
    """Whether uploads of the same samples differ."""
    return self.in_turn or self.defense.random

  def build(self, numbers: tuple, client: Any) -> Any:
    """Returns the client under the defense.

    Args:
      numbers: the numeric settings of all stages, in the order of `Defense.numbers`; they may be traced.
      client: the undefended `Client`. Stages of the place 'round' do not change it.
    """
    made = self._made(numbers)
    return dataclasses.replace(
      client,
      transform=made['data'][0] if made['data'] else client.transform,
      step=sequence(*made['step'], still=self.frozen) if made['step'] else client.step,
      upload=sequence(*made['upload'], still=self.unshared) if made['upload'] else client.upload,
      extra_gradients=self.gradients,
    )

  @property
  def sent(self) -> 'Bound':
    """What acts before an upload is sent, and so all that a curious server meets: no idle stage, none of 'round'."""
    stages = enumerate(self.defense.stages)
    kept = [i for i, stage in stages if stage.traits.place != 'round' and not is_idle(stage)]
    defense = Defense(tuple(self.defense.stages[i] for i in kept))
    return dataclasses.replace(self, defense=defense, arguments=tuple(self.arguments[i] for i in kept))

  def client(self, client: Any) -> Any:
    """Returns the client under the defense with its own numbers."""
    return self.build(self.defense.numbers, client)

  def server(self) -> optax.GradientTransformation:
    """Returns what acts at the server, the stages of the place 'round'; `NO_DEFENSE` where there are none."""
    made = self._made(self.defense.numbers)['round']
    return sequence(*made) if made else NO_DEFENSE

  def _made(self, numbers: tuple) -> dict[str, list]:
    """Returns the transformations of all stages by place, for `build`."""
    made: dict[str, list] = {place: [] for place in PLACES}
    left = list(numbers)
    for stage, given in zip(self.defense.stages, self.arguments, strict=True):
      own, left = tuple(left[: len(stage.numbers)]), left[len(stage.numbers) :]
      made[stage.traits.place].append(stage.build(own, *given))
    return made


def remarks(defense: Defense, context: Context) -> str:
  """Returns what results say of a defense in a context, joined by '; '; '' for nothing."""
  found = [stage.traits.remark(context, stage.settings) for stage in defense.stages]
  if any(stage.traits.mechanism for stage in defense.stages):
    narrow = any(leaf.dtype.itemsize < 4 for leaf in jax.tree.leaves(context.variables['params']))
    found.append('an ε is of real numbers, and what is sent has half precision' if narrow else '')
  return '; '.join(dict.fromkeys(filter(None, found)))


def bind(defense: Defense | None, context: Context) -> Bound:
  """Returns the defense made for a context: for its model, client and public data.

  Args:
    defense: the `Defense`, or None for none.
    context: the `Context`.

  Raises:
    UsageError: for anything but a `Defense`, more than one on the samples, a stage that another one undoes, a noise
      that is stated and changes, or a context without what it needs, such as public data or a model with `features`.
  """
  defense = as_defense(defense)
  check_order(defense)
  errors.check_instance('context', context, Context, 'a gradleak.defenses.Context')
  if len(defense.at('data')) > 1:
    raise errors.UsageError(f"'{defense}' transforms the samples twice; one such defense is possible")
  kind = context.client.modality
  for stage in defense.stages:
    if kind.integral and (stage.traits.moves or (stage.traits.place == 'data' and not stage.foreign)):
      raise errors.UsageError(
        f'the defense {stage.name} moves numbers such as pixels, and {kind.noun[1]} are whole ones: leave it out'
      )
  bound = Bound(
    defense,
    tuple(stage.arguments_in(context) for stage in defense.stages),
    sum(int(stage.traits.gradients(context, stage.settings)) for stage in defense.stages),
    context.frozen,
    context.unshared,
  )
  bound.client(context.client)  # so that a factory's errors are raised here, and not while tracing
  _check_steady(bound, context)
  keeps, holds = _remembered(bound, context.variables)
  return dataclasses.replace(bound, keeps=keeps, holds=holds)


def _check_steady(bound: Bound, context: Context) -> None:
  """Raises `UsageError` where a user's own stage states one noise, and draws by what it keeps, as by a schedule."""
  client, params = context.client, (context.variables or {}).get('params', {})
  once = client.share == 'gradient' or (client.epochs == 1 and client.batch_size is None)  # a state of steps is new
  for stage, given in zip(bound.defense.stages, bound.arguments, strict=True):
    place = stage.traits.place
    if (
      stage.foreign
      and stage.traits.noise
      and (place == 'upload' or (place == 'step' and not once))
      and not is_idle(stage)
    ):
      made = optax.with_extra_args_support(stage.build(stage.numbers, *given))
      if foreign.depends(made, params, jax.eval_shape(made.init, params)):
        raise errors.UsageError(
          f'the defense {stage.name} states a noise, which is one for all rounds and steps, and what it sends depends '
          'on its state: leave the trait noise out, or make the noise a stage of its own'
        )


def _remembered(bound: Bound, variables: Mapping | None) -> tuple[bool, bool]:
  """Returns `keeps` and `holds` of a bound defense."""
  keeps = holds = False
  params = (variables or {}).get('params', {})
  for stage, given in zip(bound.defense.stages, bound.arguments, strict=True):
    if stage.foreign and stage.traits.place == 'upload' and not is_idle(stage):
      made = optax.with_extra_args_support(stage.build(stage.numbers, *given))
      state = jax.eval_shape(made.init, params)
      if foreign.without_masks(state):
        keeps, holds = True, holds or foreign.holds(made, params, state)
  return keeps, holds


def as_defense(entry: Any) -> Defense:
  """Returns the `Defense` that an entry of an audit's list is; None is no defense.

  Raises:
    UsageError: for a text, a transformation without a place, or anything else.
  """
  if entry is None:
    return NO_DEFENSE
  if isinstance(entry, Defense):
    return entry
  if isinstance(entry, str):
    raise errors.UsageError(f'the defense {entry!r} is a text, expected an object: gradleak.parse({entry!r}) makes it')
  if isinstance(entry, optax.GradientTransformation):
    raise errors.UsageError(
      'where a plain optax transformation acts is not known: wrap it by '
      "gradleak.defenses.wrap(transformation, place='step') or place='upload'"
    )
  if hasattr(entry, 'traits'):
    raise errors.UsageError(
      f'the defense {entry.__name__} is not made yet: call it with its settings, {entry.__name__}(…)'
    )
  raise errors.UsageError(f'the defense is {errors.shown(entry)}, expected one of gradleak.defenses, or None for none')


def check_order(defense: Defense) -> None:
  """Raises `UsageError` where a stage computes anew what earlier stages of its place have changed."""
  for place in PLACES:
    acting = [stage for stage in defense.at(place) if not is_idle(stage)]
    for stage in acting[1:]:
      if stage.traits.replaces:
        raise errors.UsageError(
          f'the defense {stage.name} computes anew what {acting[0].name} has changed, which has no effect: put '
          f'{stage.name} first'
        )


def check_mean(defense: Defense | None, noise: float) -> None:
  """Raises `UsageError` for a stage at the server that computes anew the mean to which noise was added."""
  for stage in defense.at('round') if noise and defense is not None else ():
    if stage.traits.replaces and not is_idle(stage):
      raise errors.UsageError(
        f'the defense {stage.name} computes anew the mean that server_noise is added to, and the ε of that noise would '
        'not hold: leave one of the two out'
      )


def is_idle(stage: Stage) -> bool:
  """Returns whether a stage is the identity."""
  return stage.traits.idle(stage.settings)


def norm_bound(stage: Stage, size: int | None = None, terms: int = 1) -> float:
  """Returns a bound on the L2 norm of the stage's output without its own noise; infinity if there is none.

  Args:
    stage: the stage.
    size: how many entries the output has, for stages that limit each of them; None takes no account of those.
    terms: how many gradients are summed where each of them is clipped; 1 for their mean.
  """
  declared, limits = stage.traits.bounds or stage.traits.clips, stage.traits.limits
  bound = math.inf if declared is None else float(declared(stage.settings))
  bound *= terms if stage.traits.clips_each == 'sample' else 1
  return bound if limits is None or size is None else min(bound, math.sqrt(size) * float(limits(stage.settings)))
