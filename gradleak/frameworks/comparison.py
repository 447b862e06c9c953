"""A client as a black box, compared with the client that is simulated: which setting explains the difference."""

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gradleak.core import errors, trees
from gradleak.core.promotion import promoting
from gradleak.core.trees import Tree
from gradleak.defenses import Context, Defense, bind
from gradleak.engine.parts import tell
from gradleak.federated import ClientSettings
from gradleak.modalities import IMAGES, Modality
from gradleak.models import Model

AGREES = 1e-3  # relative difference of two updates up to which they are of the same training
CLOSE = 1e-4  # and up to which a rate of four digits, or rounding, explains it
REPEATS = 1e-6  # and of two calls of a client that draws nothing
_TRIED = 4  # how often a change that stands for rounding is drawn
_SPREAD, _MOST = 3.0, 0.1  # times what they do to a tensor, and relative difference: what rounding explains at most
_WHITE = 3.0  # ratio of the largest to the least deviation of noise that is the same in all parts of all tensors
_BITS = 32  # of a type that does not round the weights which a client returns
_FEW = 64  # entries of a part whose deviation says nothing
_FLIPS = 6  # fair coins that a client tosses before it counts as one that draws nothing
_ZEROS, _HEAVY = 0.01, 8.0  # share of zeros, and kurtosis, that noise does not have; Laplace's kurtosis is 6
_LOUD = 0.15  # relative difference of two deviations, of thousands of entries, up to which they are equal
_RATES = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)  # times the rate of the settings, to start from
_NOT_QUICK = ('private', 'augment', 'cohort', 'precision', 'order')  # what `_quick` leaves to the client
_SMALL, _STRAIGHT = 2.0**-16, 0.3  # relative change of pixels, and of how far twice as much moves an update
_MOMENTUM = 0.9  # what most people type
_REFINED = 8  # rates that are tried for one change
_ROUNDS = 4  # of explaining what another explanation leaves, of a client that shuffles
_UNDRAWN = {'sample_order': 'fixed', 'augment': 'none'}
_DRAWS = {'sample_order': 'order', 'augment': 'samples'}  # as `Comparison.draws` names it
_NORMALISED = {
  '0.5 and 0.5': ((0.5,), (0.5,)),
  'of CIFAR-10': ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
  'of ImageNet': ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
}

Fit = Callable[[np.ndarray, np.ndarray], Tree]
Sent = Callable[[Mapping], Fit]  # what a client that is sent these variables computes


class Rounding(NamedTuple):
  """A precision of products: the deviation of relative changes of pixels and weights that stand for it, its name."""

  change: float
  name: str


ROUNDINGS = (
  Rounding(1e-6, 'rounding'),
  Rounding(2**-12, "rounding to 11 bits (TF32, PyTorch's default of convolutions on a GPU, or float16)"),
  Rounding(2**-9, 'rounding to 8 bits (bfloat16)'),
)


class Explanation(NamedTuple):
  """A changed setting under which the simulated update is that of the client.

  Attributes:
    words: what is changed, as 'learning_rate=0.05'.
    difference: relative, under the change.
    changes: fields of `ClientSettings`; empty for what is none, such as a normalisation.
  """

  words: str
  difference: float
  changes: dict[str, Any]


class _Sought(NamedTuple):
  """Whether settings agree, else the changes under which they do, and the rounding that it takes."""

  agrees: bool
  found: list[Explanation]
  rounding: Rounding


@dataclasses.dataclass(frozen=True)
class Comparison:
  """The update of the client beside the simulated one.

  Attributes:
    update: that of the client, of the first call.
    difference: ‖client − simulated‖ / ‖client‖.
    repeat: ‖first call − second call‖ / ‖first call‖.
    noise: the deviation of the noise that each entry of an update seems to have; 0 for none.
    draws: what the client draws: '' (nothing), 'order', 'samples' (augmentation or dropout), 'noise'.
    agrees: whether the simulated client is that client, up to what it draws.
    explanations: changes under which they agree, the closest first; empty where they agree, or nothing was found.
    words: sentences on all that.
  """

  update: Tree
  difference: float
  repeat: float
  noise: float
  draws: str
  agrees: bool
  explanations: tuple[Explanation, ...]
  words: tuple[str, ...]


def compare(
  fit: Fit,
  model: Model,
  variables: Mapping,
  samples: np.ndarray,
  targets: np.ndarray,
  settings: ClientSettings,
  num_classes: int,
  defense: Callable[[], Defense | None] = lambda: None,
  kind: Callable[[], Any] = lambda: np.float32,
  modality: Modality = IMAGES,
) -> Comparison:
  """Returns the `Comparison` of a client with the simulated one.

  The client is called until two updates on the samples differ, or seven times at most. If they differ, it is called on
  the first sample as well: an order needs several samples. A client that shuffles is called on copies of it, too, whose
  number tells the steps. Noise is what has the same deviation in every tensor. Where no setting explains a difference,
  it is called on samples that hardly differ, which tells whether it rounds more than float32 does.

  Args:
    fit: (samples, targets) -> the delta of the parameters that the client returns, a tree like the parameters. Each
      call has copies, which it may change.
    model, variables: what it was sent.
    samples, targets: the samples, as the modality takes them, and integers [N].
    settings: of the simulated client.
    num_classes: of the model.
    defense: returns what the client uses, simulated as well; it is called once the client has trained.
    kind: returns the type of the weights that the client returns. One of 16 bits rounds them, so that settings are not
      searched for.
    modality: what a sample is.

  Raises:
    UsageError: where the client returns what it was sent, or values that are not finite.
  """
  fit, what = _copying(fit), (model, variables, samples, targets)
  pair = _two(fit, samples, targets)
  _check_trained(*pair)
  repeat = _apart(*pair)
  once, quickly = (functools.partial(how, modality=modality) for how in (_simulated, _quick))
  simulated, quick = (functools.partial(_sent, how, model, num_classes) for how in (once, quickly))
  sent = simulated(settings)
  same = functools.partial(_same, sent, variables)
  draws, noise = ('', 0.0) if repeat < REPEATS else _drawn(fit, pair, samples, targets, same)
  used = defense()
  if used is not None and used.stages:
    simulate = functools.partial(once, model, variables, num_classes)
    return _defended(simulate, settings, used, pair, (samples, targets), repeat, noise)
  mine = sent(variables)(samples, targets)
  undrawn = _undrawn(simulated, variables, settings, samples, targets, draws=draws)
  if other := undrawn or _frozen(pair[0], mine, settings):
    another = dataclasses.replace(settings, **other)
    return _still(compare(fit, *what, another, num_classes, kind=kind, modality=modality), other)
  difference = _apart(pair[0], mine)
  rounded = _rounded(sent, variables, pair[0], samples, targets)
  made = functools.partial(Comparison, pair[0], difference, repeat, noise, draws)
  drawn = _said(draws, noise, repeat)
  # Two draws of the same noise differ by √2 times what one differs from its mean by.
  expected = (1 + _LOUD) * repeat / np.sqrt(2) if draws == 'noise' else AGREES
  if difference <= expected or rounded:
    why = 'the noise' if draws == 'noise' else ROUNDINGS[0].name if rounded else ''
    return made(True, (), (_agreed(difference, why), *drawn))
  if jnp.finfo(kind()).bits < _BITS:
    agrees, told = _of_few_bits(pair[0], mine, variables['params'], np.dtype(kind()))
    return made(agrees, (), (told, *drawn))
  if draws in ('samples', 'noise'):
    differ = f'The updates of client and simulated client differ by {difference:.2g} of the norm.'
    return made(False, (), (differ, *drawn))
  coarse = functools.cache(lambda: _is_coarse(fit, samples, targets, draws == 'order', modality.box))
  search = functools.partial(_sought, coarse, simulated, quick, variables, model)
  if draws == 'order':
    sought = _shuffled(search, fit, model, settings, pair[0], samples, targets)
    agreed = _agreed_on_one(difference, sought.rounding)
  else:
    sought = search(settings, pair[0], samples, targets)
    sought = sought._replace(found=[*_clipped(fit, sought.found, pair[0], samples, targets), *sought.found])
    agreed = _agreed(difference, sought.rounding.name)
  if sought.agrees:
    return made(True, (), (agreed, *drawn))
  return made(False, tuple(sought.found), (_told(difference, sought.found, sought.rounding), *drawn))


def _check_trained(*updates: Tree) -> None:
  """Raises `UsageError` for updates of a client that did not train, or whose training diverged."""
  if not _norm(updates[0]):
    raise errors.UsageError('the client returns the weights that it was sent: it did not train')
  if not np.isfinite([_norm(update) for update in updates]).all():
    raise errors.UsageError(
      'the client returns values that are not finite: its training diverges on these samples. A smaller learning rate, '
      'or other samples, may help'
    )


def _of_few_bits(update: Tree, mine: Tree, params: Tree, kind: np.dtype) -> tuple[bool, str]:
  """Returns whether a client that rounds its weights to a short type agrees, and the sentence that says so."""

  def rounded(sent: Any, moved: Any) -> np.ndarray:
    sent = np.asarray(sent, np.float64)
    return (sent + np.asarray(moved, np.float64)).astype(kind).astype(np.float64) - sent

  short = jax.tree.map(rounded, params, mine)
  share = _distance(short, mine) / _norm(update)
  told = f'The client returns {kind.name}, which moves the update by {share:.2g} of its norm'
  if _distance(update, short) <= _LOUD * _distance(short, mine) + AGREES * _norm(update):
    return True, f'The simulated client agrees, but for rounding. {told}.'
  difference = _apart(update, mine)
  return False, f'{told}. The updates differ by {difference:.2g}: have it return float32 to have its settings compared.'


def _copying(fit: Fit) -> Fit:
  return lambda samples, targets: fit(np.array(samples), np.array(targets))


def _sent(how: Callable[..., Tree], model: Model, num_classes: int, settings: ClientSettings) -> Sent:
  return lambda variables: functools.partial(how, model, variables, num_classes, settings)


def _simulated(
  model: Model,
  variables: Mapping,
  num_classes: int,
  settings: ClientSettings,
  samples: np.ndarray,
  targets: np.ndarray,
  defense: Defense | None = None,
  key: Any = None,
  modality: Modality = IMAGES,
) -> Tree:
  client = dataclasses.replace(settings.client(model, num_classes), modality=modality)
  if client.drop_last and len(samples) < (client.batch_size or 1):
    return jax.tree.map(np.zeros_like, jax.device_get(variables['params']))  # of no batch
  if defense is not None:
    client = bind(defense, Context(client, dict(variables), samples.shape[1:])).client(client)
  return jax.device_get(_compiled(client)(key, variables, samples, targets).update)


@functools.lru_cache(64)
def _compiled(client: Any) -> Callable:
  return jax.jit(client.local_update)


def _quick(
  model: Model,
  variables: Mapping,
  num_classes: int,
  settings: ClientSettings,
  samples: np.ndarray,
  targets: np.ndarray,
  modality: Modality = IMAGES,
) -> Tree:
  """Returns what `_simulated` does, without compiling the training anew for each setting."""
  usual = ClientSettings()
  if any(getattr(settings, name) != getattr(usual, name) for name in _NOT_QUICK):
    return _simulated(model, variables, num_classes, settings, samples, targets, modality=modality)
  settings.client(model, num_classes)  # refuses settings that do not go together
  client = dataclasses.replace(settings, accumulate=1).client(model, num_classes)
  bare = ClientSettings(loss=settings.loss, batch_norm=settings.batch_norm).client(model, num_classes)
  gradient = _gradient(dataclasses.replace(bare, modality=modality))
  optimizer = promoting(client.optimizer)
  params, size, steps = variables['params'], settings.local_batch_size or len(samples), settings.accumulate
  mask = client.trained_layers(params, samples.shape[1:]) if settings.frozen else None
  trained = functools.partial(trees.masked, mask=mask) if settings.frozen else lambda tree: tree
  state = optimizer.init(params)
  dropped = len(samples) % size if settings.last_batch == 'dropped' else 0
  starts = list(range(0, len(samples) - dropped, size)) * settings.local_epochs
  for first in range(0, len(starts) - steps + 1, steps):
    parts = [slice(start, start + size) for start in starts[first : first + steps]]
    found = [gradient({**variables, 'params': params}, samples[part], targets[part]) for part in parts]
    mean = found[0] if steps == 1 else jax.tree.map(lambda *each: sum(each) / steps, *found)
    updates, state = optimizer.update(trained(mean), state, params)
    params = optax.apply_updates(params, trained(updates))
  return jax.device_get(jax.tree.map(lambda a, b: a - b, params, variables['params']))


def _frozen(target: Tree, mine: Tree, settings: ClientSettings) -> dict[str, Any]:
  """Returns the change of the settings that freezes what a client leaves as it is, and the simulated one trains.

  It names modules of which no tensor moves.
  """
  pairs = zip(jax.tree.leaves_with_path(target), jax.tree.leaves(mine), strict=True)
  moved = {trees.path_names(path): (bool(np.any(theirs)), bool(np.any(own))) for (path, theirs), own in pairs}
  names = []
  for module in dict.fromkeys(path[:-1] for path in moved if len(path) > 1):
    theirs, own = zip(*(one for path, one in moved.items() if path[: len(module)] == module), strict=True)
    if any(own) and not any(theirs):
      elsewhere = len(module) == 1 and any(module[0] in path[1:-1] for path in moved)
      names.append('/' * elsewhere + '/'.join(module))
  if not names or any('-' in name for name in names):
    return {}
  return {'frozen': '-'.join([*filter(None, [settings.frozen]), *names])}


@functools.lru_cache(16)
def _gradient(client: Any) -> Callable:
  return jax.jit(client.gradient)


def _two(fit: Fit, samples: np.ndarray, targets: np.ndarray) -> tuple[Tree, Tree]:
  """Returns two updates of the client, different ones if it draws: two flips of one sample are often the same."""
  first = second = fit(samples, targets)
  for _ in range(-(-_FLIPS // len(samples))):
    second = fit(samples, targets)
    if _apart(first, second) >= REPEATS:
      break
  return first, second


def _drawn(
  fit: Fit, pair: tuple[Tree, Tree], samples: np.ndarray, targets: np.ndarray, same: Callable[..., bool]
) -> tuple[str, float]:
  """Returns (what the client draws, the deviation of its noise)."""
  white = _white(*pair)
  if white:
    return 'noise', white
  if same(pair, samples, targets):
    return '', 0.0
  if len(samples) > 1 and same(_two(fit, samples[:1], targets[:1]), samples[:1], targets[:1]):
    return 'order', 0.0
  return 'samples', 0.0


def _undrawn(
  simulate: Callable[[ClientSettings], Sent],
  variables: Mapping,
  settings: ClientSettings,
  *data: np.ndarray,
  draws: str,
) -> dict[str, Any]:
  """Returns the changes of the settings that switch off what the simulated client draws, and the client does not."""
  off = {name: value for name, value in _UNDRAWN.items() if draws not in ('samples', _DRAWS[name])}
  found, keys = {}, map(jax.random.key, itertools.count())

  for name in [name for name, value in off.items() if getattr(settings, name) != value]:
    others: dict[str, Any] = {other: value for other, value in off.items() if other != name}
    one = simulate(dataclasses.replace(settings, **others))
    fit = functools.partial(_drawing, one(variables), keys)
    if not _same(one, variables, _two(fit, *data), *data):
      found[name] = off[name]
  return found


def _drawing(fit: Callable[..., Tree], keys: Iterator[jax.Array], samples: np.ndarray, targets: np.ndarray) -> Tree:
  return fit(samples, targets, key=next(keys))


def _still(found: Comparison, undrawn: Mapping[str, Any]) -> Comparison:
  """Returns the comparison with a simulated client that draws or trains more, from that with one which does not."""
  named = ' and '.join(f'{name}={value!r}' for name, value in undrawn.items())
  explanations = [
    Explanation(f'{named} and {one.words}', one.difference, {**undrawn, **one.changes}) for one in found.explanations
  ]
  if found.agrees:
    explanations = [Explanation(named, found.difference, {**undrawn})]
  does = 'trains' if 'frozen' in undrawn else 'draws'
  words = f'The simulated client is another: it {does} what the client does not. What follows is with {named}.'
  return dataclasses.replace(found, agrees=False, explanations=tuple(explanations), words=(words, *found.words))


def _white(first: Tree, second: Tree) -> float:
  """Returns the deviation of noise that is the same everywhere in two updates; 0.0 where it is not.

  What dropout and augmentation change has zeros, few large entries, and parts of a tensor that differ.
  """
  tensors = zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True)
  differences = [np.asarray(a, np.float64) - np.asarray(b, np.float64) for a, b in tensors]
  everything = np.concatenate([one.ravel() for one in differences])
  squares = np.mean(np.square(everything))
  if np.mean(everything == 0) > _ZEROS or np.mean(everything**4) > _HEAVY * squares**2:
    return 0.0
  parts = [part for one in differences for axis in range(one.ndim) for part in np.moveaxis(one, axis, 0)]
  found = [np.sqrt(np.mean(np.square(part))) for part in (*differences, *parts) if np.size(part) >= _FEW]
  if not found or max(found) > _WHITE * min(found):
    return 0.0
  return float(np.sqrt(squares / 2))


def _is_coarse(
  fit: Fit,
  samples: np.ndarray,
  targets: np.ndarray,
  shuffles: bool = False,
  box: tuple[float, float] = IMAGES.box,
) -> bool:
  """Returns whether a client rounds more than float32 does, or may do so.

  In float32, twice a small change of the samples moves an update twice as far. Rounding to fewer bits makes it jump,
  and so does a ReLU that meets its kink: one change that it follows is enough. Copies of one sample have no order, and
  fewer ReLUs; but BatchNorm makes nothing of them. Ids of tokens have no neighbours, which leaves it open: False.
  """
  if np.issubdtype(samples.dtype, np.integer):
    return False
  draw = np.random.default_rng(0)
  copies = tuple(np.repeat(part[:1], len(part), axis=0) for part in (samples, targets))
  for given, labels in [copies] if shuffles else [copies, (samples, targets)]:
    start = jax.tree.map(np.float64, fit(given, labels))
    for _ in range(_TRIED):
      change = _SMALL * draw.standard_normal(samples[:1].shape)
      near = [np.clip(given * (1 + times * change), *box).astype(given.dtype) for times in (1, 2)]
      once, twice = (jax.tree.map(np.subtract, fit(x, labels), start) for x in near)
      if _norm(twice) > 0 and _distance(twice, jax.tree.map(lambda x: 2 * x, once)) <= _STRAIGHT * _norm(twice):
        return False
  return True


def _sought(
  coarse: Callable[[], bool],
  simulate: Callable[[ClientSettings], Sent],
  quick: Callable[[ClientSettings], Sent],
  variables: Mapping,
  model: Model,
  settings: ClientSettings,
  target: Tree,
  samples: np.ndarray,
  targets: Any,
  counts: Sequence[int] = (),
) -> _Sought:
  """Returns what explains a target that is not that of these settings.

  Rounding to fewer bits than float32 has explains it where the client is `coarse` alone: it would hide other settings.
  With counts it is a list of updates, each of so many of the samples, and may be that of the settings.
  """
  exact, quickly, what = _of_each(counts, simulate)(settings), _of_each(counts, quick), (target, samples, targets)
  if counts and (_apart(target, exact(variables)(samples, targets)) <= AGREES or _rounded(exact, variables, *what)):
    return _Sought(True, [], ROUNDINGS[0])
  found, rounding = _explained(quickly, variables, settings, model, *what), ROUNDINGS[0]
  kinds = () if found or not coarse() else ROUNDINGS[1:]
  for kind in kinds:
    if _rounded(exact, variables, *what, kind):
      return _Sought(True, [], kind)
  for kind in kinds:
    if not found:
      found, rounding = _explained(quickly, variables, settings, model, *what, kind), kind
  return _Sought(False, found, rounding)


def _of_each(counts: Sequence[int], simulate: Callable[[ClientSettings], Sent]) -> Callable[[ClientSettings], Sent]:
  return (lambda settings: lambda sent: _each(counts, simulate(settings)(sent))) if counts else simulate


def _each(counts: Sequence[int], fit: Fit) -> Fit:
  return lambda samples, targets: [fit(samples[:count], targets[:count]) for count in counts]


def _shuffled(
  search: Callable[..., _Sought],
  fit: Fit,
  model: Model,
  settings: ClientSettings,
  update: Tree,
  samples: np.ndarray,
  targets: np.ndarray,
) -> _Sought:
  """Returns what explains a client that takes its samples in a new order each time.

  One sample has no order, nor have copies of it, whose number tells the steps. What explains one sample is judged on
  copies, and what explains these is judged again, on those that tell its batch size.
  """
  changes, best, normalised, seen = dict[str, Any](), Explanation('', 0.0, {}), '', lambda one: one
  single = bool(_norm(fit(samples[:1], targets[:1])))  # which may make no batch
  for _ in range(_ROUNDS):
    given = dataclasses.replace(settings, **changes)
    counts = [1] if single else _telling(given, len(samples))
    copies = [np.repeat(part[:1], counts[-1], axis=0) for part in (samples, targets)]
    sought = search(given, _each(counts, fit)(*copies), seen(copies[0]), copies[1], counts)
    clipped = _clipped(fit, sought.found, update, samples, targets) if single else []
    if clipped or not (sought.agrees or sought.found):
      return sought._replace(found=[*clipped, *sought.found])
    best = sought.found[0] if sought.found else Explanation('', best.difference, {})
    if not (single or best.changes):
      words = [*filter(None, [normalised, best.words]), *(f'{name}={value!r}' for name, value in changes.items())]
      found = [Explanation(' and '.join(words), best.difference, changes)] if words else []
      return _Sought(not found, found, sought.rounding)
    if single:
      named = ((words, change) for words, _, change in _normalisations(model) if best.words.startswith(words))
      normalised, seen = next(named, (normalised, seen))
    changes, single = {**changes, **best.changes}, False
  return _Sought(False, [], ROUNDINGS[0])


def _telling(settings: ClientSettings, count: int) -> list[int]:
  """Returns how many copies of a sample tell a batch size from all others: as many as fill one, and one more."""
  size = settings.local_batch_size or count
  told = (size, 2 * size - 1) if settings.last_batch == 'dropped' else (1, size, size + 1)
  return sorted({min(one, count) for one in (*told, count)})


def _clipped(
  fit: Fit, found: list[Explanation], update: Tree, samples: np.ndarray, targets: np.ndarray
) -> list[Explanation]:
  """Returns that updates are clipped where a rate explains one, and that of other samples has the same norm."""
  if not found or len(samples) == 1 or set(found[0].changes) != {'learning_rate'}:
    return []
  norm = _norm(update)
  if abs(_norm(fit(samples[-1:], targets[-1:])) - norm) >= AGREES * norm:
    return []
  return [Explanation(f'an update that is clipped to the norm {norm:.4g}', found[0].difference, {})]


def _explained(
  simulate: Callable[[ClientSettings], Sent],
  variables: Mapping,
  settings: ClientSettings,
  model: Model,
  target: Tree,
  samples: np.ndarray,
  targets: Any,
  rounding: Rounding = ROUNDINGS[0],
) -> list[Explanation]:
  """Returns the changes under which the simulated update is the target, up to rounding.

  Who is `engine.parts.told` hears of each setting. The search ends at the first kind that has some. Where rounding is
  coarse, several kinds have some, of which those that change the fewest settings are returned. Each change is tried as
  it is, and with the rate that fits best.
  """
  found: list[Explanation] = []
  kinds = list(_kinds(settings, len(samples), model))
  total, numbers = sum(map(len, kinds)), itertools.count()
  for kind in kinds:
    for words, changes, changed in kind:
      tell(next(numbers), total, f'settings within {rounding.name.partition(" (")[0]}')
      with contextlib.suppress(errors.UsageError):  # a change that does not go with the other settings
        given = dataclasses.replace(settings, **changes)
        one = _fitting(simulate, variables, given, target, changed(samples), targets, rounding)
        if one is not None:
          rate, apart = one
          if rate != settings.rate or not words:
            changes = {**changes, 'learning_rate': rate}
            words = ' and '.join(filter(None, [words, f'learning_rate={rate:g}']))
          found.append(Explanation(words, apart, changes))
    if found and rounding == ROUNDINGS[0]:
      break
  found.sort(key=lambda one: float(f'{one.difference:.1g}'))  # of equal ones, the likeliest first
  if rounding == ROUNDINGS[0]:
    return found
  changed_fields = [len(one.changes) + one.words.startswith('a normalisation') for one in found]
  return [one for one, number in zip(found, changed_fields, strict=True) if number == min(changed_fields)]


def _fitting(
  simulate: Callable[[ClientSettings], Sent],
  variables: Mapping,
  settings: ClientSettings,
  target: Tree,
  samples: np.ndarray,
  targets: Any,
  rounding: Rounding,
) -> tuple[float, float] | None:
  """Returns (learning rate, difference) at which the simulated update is the target; None if it is at no rate."""

  def at(rate: float) -> Sent:
    return simulate(dataclasses.replace(settings, learning_rate=rate))

  def apart(rate: float) -> tuple[float, float]:
    mine = at(rate)(variables)(samples, targets)
    return _apart(target, mine), _norm(target) / max(_norm(mine), 1e-30)

  rate = settings.rate
  if apart(rate)[0] > AGREES:  # far from the right one, the norm need not grow with the rate
    rate = min((settings.rate * factor for factor in _RATES), key=lambda one: apart(one)[0])
  least = np.inf
  for _ in range(_REFINED):
    found, factor = apart(rate)
    if found <= AGREES or _rounded(at(rate), variables, target, samples, targets, rounding):
      short = float(f'{rate:.2g}')  # what people type
      return min((apart(one)[0], one) for one in {short, rate})[::-1]
    if found >= least:
      return None
    least, rate = found, float(f'{rate * factor:.4g}')
  return None


def _rounded(
  simulate: Sent,
  variables: Mapping,
  target: Tree,
  samples: np.ndarray,
  targets: Any,
  rounding: Rounding = ROUNDINGS[0],
) -> bool:
  """Returns whether rounding explains, tensor by tensor, how a simulated update differs from the target.

  Adam takes steps of one size, also along entries whose gradient is nothing but rounding, such as those of a bias in
  front of BatchNorm. So what changes of pixels and weights by rounding do to a simulated tensor is taken for the
  tolerance.
  """
  exact = simulate(variables)(samples, targets)
  if not AGREES < _apart(target, exact) <= _MOST:
    return False
  strict = AGREES * _norm(target)
  tolerances = _tolerances(simulate, variables, exact, samples, targets, rounding)
  return _within(exact, target, [max(strict, one) for one in tolerances])


def _same(simulate: Sent, variables: Mapping, pair: tuple[Tree, Tree], samples: np.ndarray, targets: Any) -> bool:
  """Returns whether two updates differ by rounding alone: kernels of a GPU may add up in another order each time."""
  if _apart(*pair) < REPEATS:
    return True
  exact = simulate(variables)(samples, targets)
  return _within(*pair, _tolerances(simulate, variables, exact, samples, targets, ROUNDINGS[0]))


def _within(a: Tree, b: Tree, tolerances: list[float]) -> bool:
  parts = zip(*map(jax.tree.leaves, (a, b)), tolerances, strict=True)
  return all(_distance(one, other) <= tolerance for one, other, tolerance in parts)


def _tolerances(
  simulate: Sent, variables: Mapping, exact: Tree, samples: np.ndarray, targets: Any, rounding: Rounding
) -> list[float]:
  """Returns how far rounding moves each tensor of a simulated update at most."""
  draw = np.random.default_rng(0)

  def near(one: Any) -> Any:
    one = np.asarray(one)
    change = 1 + rounding.change * draw.standard_normal(one.shape)
    return (one * change).astype(one.dtype) if np.issubdtype(one.dtype, np.floating) else one

  moved = [simulate(jax.tree.map(near, variables))(near(samples), targets) for _ in range(_TRIED)]
  parts = zip(*map(jax.tree.leaves, (exact, *moved)), strict=True)
  return [_SPREAD * max(_distance(mine, one) for one in others) for mine, *others in parts]


def _kinds(settings: ClientSettings, count: int, model: Model) -> Iterator[list[tuple]]:
  """Yields lists of (words, changes of the settings, change of the samples), the likeliest first."""

  def same(samples: np.ndarray) -> np.ndarray:
    return samples

  def fields(**values: Any) -> list[tuple]:
    (name,) = values
    now = getattr(settings, name)
    return [(f'{name}={one!r}', {name: one}, same) for one in values[name] if one != now]

  yield [('', {}, same)]
  yield _normalisations(model)
  yield fields(batch_norm=('train', 'eval'))
  yield [*fields(local_epochs=(1, 2, 3, 4, 5, 10)), *fields(local_batch_size=(None, *_sizes(count)))]
  yield [*fields(momentum=(0.0, 0.5, 0.9, 0.99)), *fields(weight_decay=(0.0, 1e-4, 5e-4, 1e-3, 1e-2))]
  optimizers = [
    *((f'optimizer={one!r}', {'optimizer': one, 'momentum': 0.0}, same) for one in ('sgd', 'adam', 'rmsprop')),
    ("optimizer='adamw'", {'optimizer': 'adamw', 'momentum': 0.0, 'weight_decay': 0.01}, same),  # PyTorch's default
    *((words, change, same) for words, change in _nesterov(settings)),
  ]
  yield optimizers
  yield [*fields(last_batch=('kept', 'dropped')), *fields(accumulate=(1, 2, 4, 8))]
  yield [*fields(proximal=(0.0, 1e-3, 1e-2, 0.1, 1.0)), *fields(loss=('cross_entropy', 'cross_entropy(smoothing=0.1)'))]
  yield [
    (f'local_epochs={epochs} and {words}', {'local_epochs': epochs, **changes}, same)
    for epochs, (words, changes, _) in itertools.product(
      (1, 2, 3, 5), [*fields(local_batch_size=(None, *_sizes(count))), *fields(momentum=(0.0, 0.9)), *optimizers[1:2]]
    )
    if epochs != settings.local_epochs
  ]


def _nesterov(settings: ClientSettings) -> Iterator[tuple[str, dict[str, Any]]]:
  """Yields (words, changes) to Nesterov's momentum, or from it to the usual one, at the momentum given and at 0.9."""
  name = 'sgd' if settings.optimizer == 'nesterov' else 'nesterov'
  if settings.momentum:
    yield f'optimizer={name!r}', {'optimizer': name}
  if settings.momentum != _MOMENTUM:
    yield f'optimizer={name!r} and momentum={_MOMENTUM}', {'optimizer': name, 'momentum': _MOMENTUM}


def _sizes(count: int) -> list[int]:
  return [size for size in (1, 2, 4, 8, 16, 32, 64) if size < count]


def _normalisations(model: Model) -> list[tuple]:
  """Returns changes of what is done to pixels in front of the network; none of it is done to rows and tokens."""
  if model.axes not in (None, IMAGES.axes):
    return []
  mean, std = ((0.0,), (1.0,)) if model.normalisation is None else model.normalisation
  tried = {'none': ((0.0,), (1.0,)), **_NORMALISED}
  return [
    (
      f'a normalisation {words}',
      {},
      functools.partial(_as_if, *(np.asarray(one, np.float32) for one in (mean, std, *other))),
    )
    for words, other in tried.items()
  ]


def _as_if(mean: Any, std: Any, other_mean: Any, other_std: Any, samples: np.ndarray) -> np.ndarray:
  """Returns samples that the model's own normalisation turns into what another makes of these."""
  channels = samples.shape[-1]
  if any(np.size(one) not in (1, channels) for one in (other_mean, other_std)):
    raise errors.UsageError('a normalisation of other channels')
  return np.asarray((samples - other_mean) / other_std * std + mean, np.float32)


def _defended(
  simulate: Callable[..., Tree],
  settings: ClientSettings,
  defense: Defense,
  pair: tuple[Tree, Tree],
  samples: tuple[np.ndarray, np.ndarray],
  repeat: float,
  noise: float,
) -> Comparison:
  """Returns the comparison with a client under a defense: of two draws of each, how far apart they are."""
  keys = jax.random.split(jax.random.key(0), 2)
  mine = [simulate(settings, *samples, defense=defense, key=key) for key in keys]
  spread, theirs = _distance(*mine), _distance(*pair)
  across = np.mean([_distance(a, b) for a in mine for b in pair])
  difference = float(across / max(_norm(pair[0]), 1e-30))
  if spread == 0 and theirs <= REPEATS * _norm(pair[0]):
    agrees = difference <= AGREES
    words = f'With {defense}, the simulated client differs from the client by {difference:.1e} of the norm.'
  else:
    agrees = bool(abs(spread - theirs) <= _LOUD * theirs and abs(across - theirs) <= _LOUD * theirs)
    words = (
      f'With {defense}, two updates of the client are {theirs:.3g} apart, two of the simulated client {spread:.3g}, '
      f'and one of each {across:.3g}: {"they agree." if agrees else "they do not agree."}'
    )
  return Comparison(pair[0], difference, repeat, noise, 'noise' if noise else '', agrees, (), (words,))


def _agreed(difference: float, why: str) -> str:
  words = f'The simulated client agrees: its update differs from that of the client by {difference:.1e} of the norm'
  return f'{words}, which {why} would explain.' if why else f'{words}.'


def _agreed_on_one(difference: float, rounding: Rounding) -> str:
  return (
    f'On one sample the simulated client agrees{_but_for(rounding)}, and on copies of it, whose order changes nothing; '
    f'on all, they differ by {difference:.1e} of the norm.'
  )


def _told(difference: float, found: list[Explanation], rounding: Rounding) -> str:
  if found:
    several = ' or '.join(one.words for one in found)
    told = f'The updates differ by {difference:.2g} of the norm. They agree with {several}{_but_for(rounding)}.'
    least = min(one.difference for one in found)
    if rounding != ROUNDINGS[0] or not CLOSE < least <= AGREES:
      return told
    return f'{told} They still differ by {least:.1e}: a setting that was not tried may be the right one.'
  return (
    f'The simulated client is another: the updates differ by {difference:.2g} of the norm, and no setting that was '
    'tried explains it. Attacks that simulate this client compare with the wrong update.'
  )


def _but_for(rounding: Rounding) -> str:
  return '' if rounding == ROUNDINGS[0] else f', but for {rounding.name}'


def _said(draws: str, noise: float, repeat: float) -> list[str]:
  """Returns what two calls of the client show, a sentence or none."""
  if not draws:
    return [] if repeat < REPEATS else [f'Two calls differ by {repeat:.1e} of the norm, as rounding does.']
  what = {
    'order': "On one sample they do not: the client takes its samples in a new order (sample_order='shuffled').",
    'samples': 'On one sample they do, too: the client augments its samples, or has dropout. Switch both off in the '
    'client to have the rest compared.',
    'noise': f'The difference has the same deviation in all tensors: noise of {noise:.3g} in every entry. Name what '
    'adds it by defense=…, such as local_dp, client_dp, gaussian or dpsgd.',
  }[draws]
  return [f'Two calls on the same samples differ by {repeat:.1e} of the norm. {what}']


def _apart(a: Tree, b: Tree) -> float:
  return _distance(a, b) / max(_norm(a), 1e-30)


def _distance(a: Tree, b: Tree) -> float:
  return _norm(jax.tree.map(lambda x, y: np.asarray(x, np.float64) - np.asarray(y, np.float64), a, b))


def _norm(tree: Tree) -> float:
  return float(np.sqrt(sum(np.sum(np.square(leaf, dtype=np.float64)) for leaf in jax.tree.leaves(tree))))
