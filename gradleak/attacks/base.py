"""What an attack is: pure functions that a driver scans, so that all attacks have progress bars and checkpoints."""

import dataclasses
import functools
import hashlib
import math
import pathlib
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gradleak.core import errors, methods
from gradleak.core.methods import Method
from gradleak.core.trees import Tree
from gradleak.federated import Client
from gradleak.threat import EVIDENCE, Observation


def unsent(client: Client, observation: Observation) -> frozenset[tuple[str, ...]]:
  """Returns the paths of the parameters of which a client sends nothing: they are frozen or private."""
  return client.kept_paths(observation.variables['params'], observation.batch_shape[1:])


class Reconstruction(NamedTuple):
  """What an attack returns.

  Attributes:
    samples: [K, …], the surest first. Closed forms may find more or fewer than the N private ones.
    labels: class indices, int32 [K], −1 where the label is unknown; [0] if the attack returns no labels.
    objective: what the attack minimised, priors included, at these samples; float32 scalar, 0 for closed forms.
    distance: the matching distance alone; of several restarts the one with the least is kept.
    objective_start: the objective at the start.
    diverged_step: the first step with a value that is not finite, or −1; int32 scalar.
  """

  samples: jax.Array
  labels: jax.Array
  objective: jax.Array
  distance: jax.Array
  objective_start: jax.Array
  diverged_step: jax.Array


class Attack(NamedTuple):
  """An attack as pure functions of an `Observation`, which is all that it sees.

  Attributes:
    init: (key, observation) -> state, a tree of arrays; a key in it is stored as its `key_data`.
    step: (state, observation) -> (state, info). `info` is a dict of scalars: 'objective', NaN once diverged, and
      optionally 'finished', whether the reconstruction and the objective cannot change any more. Without 'finished', a
      lane has finished once its objective is not finite.
    reconstruct: (state, observation) -> `Reconstruction`.
    objective: (observation, samples, targets as probabilities) -> objective, evaluated by the auditor at the truth; NaN
      where the private samples do not determine it.
    num_steps: how many steps to run; 0 for closed-form attacks.
    labels: the label mode that the attack was published with: 'known', 'inferred', 'optimised' or 'unused'.
    auxiliary_data: whether it uses data of the same kind, such as `Observation.class_means`.
    on_host: whether `reconstruct` runs on the host, in NumPy: it cannot be compiled, and the driver calls it lane by
      lane. `init` checks what it is given, so that errors come before anything runs.
    signed: whether it determines the sign of a sample; else the samples that it reveals are counted by |Pearson|.
    assumes: a sentence on what it knows, or assumes, of local training; empty where nothing of it is simulated.
    prior: a sentence on what it learned of samples from a file; empty for none.
    noise: (shape of a batch, variables of the model) -> whether it makes use of noise of a known level.
    running: see `Knowledge`.
  """

  init: Callable[[jax.Array, Observation], Tree]
  step: Callable[[Tree, Observation], tuple[Tree, dict[str, jax.Array]]]
  reconstruct: Callable[[Tree, Observation], Reconstruction]
  objective: Callable[[Observation, jax.Array, jax.Array], jax.Array]
  num_steps: int
  labels: str
  auxiliary_data: bool = False
  on_host: bool = False
  signed: bool = True
  assumes: str = ''
  prior: str = ''
  noise: Callable[[tuple[int, ...], Tree], bool] = lambda shape, variables: True
  running: bool = False


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class AttackMethod(Method):
  """An attack with its settings; called with a `Client`, it gives the `Attack`.

  Attributes:
    citation: its source.
    evidence: the `EVIDENCE` that it may use, see `reads`.
    label_rule: the rule by which labels are inferred, a name of `labels.RULES`, as published.
    server: the malicious server whose uploads it reads, a `Method`; None for an honest server.
    label: how results call an attack of a user's own.
    version: of a user's own code: stored results are of one version, see `wrap`.
    prepare: (key, `Scenario`, settings, samples behind one upload) -> what it learns from public data before it sees an
      upload, a tree of arrays that it is handed as `Observation.prepared`; None for nothing. It runs on the host, once
      for all uploads.
    adaptive: whether `prepare` learns from uploads that it simulates. It then runs once more for each defense that an
      attacker knows, on a scenario whose client applies that defense (the adaptive attack 'learned').
  """

  kind: str = 'attack'
  citation: str = ''
  evidence: frozenset[str] = frozenset()
  label_rule: str = 'bias_corrected'
  server: Method | None = None
  label: str = ''
  version: str = ''
  prepare: Callable[..., Tree] | None = None
  adaptive: bool = False

  @property
  def reads(self) -> frozenset[str]:
    """The evidence that it uses, none where it compares no updates; an adaptive attack that offers other is not run."""
    return frozenset() if self.settings.get('distance') == 'prefix' else self.evidence

  @property
  def name(self) -> str:
    """The factory's name, or the label of an attack of a user's own."""
    return self.label or super().name

  def __call__(self, client: Client | None) -> Attack:
    """Returns the `Attack` that simulates this client; None is enough to check the settings of a built-in one."""
    return self.build(self.numbers, client)

  def build(self, numbers: tuple, *arguments: Any) -> Attack:
    """Returns the `Attack` with these numbers, which may be traced.

    Raises:
      UsageError: if the factory returns something else.
    """
    attack = super().build(numbers, *arguments)
    if not isinstance(attack, Attack):
      raise errors.UsageError(f'the attack {str(self)!r} returns {attack!r}, expected a gradleak.attacks.Attack')
    return attack

  def changed(self, **settings: Any) -> 'AttackMethod':
    """Returns the same attack with some settings changed, its server with those that it has."""
    made = super().changed(**settings)
    if made.server is None:
      return made
    shared = {name: value for name, value in made.settings.items() if name in made.server.settings}
    return dataclasses.replace(made, server=made.server.changed(**shared))

  @property
  def learns(self) -> bool:
    """Whether it learns from the scenario's public samples before it sees an upload; with a `file`, others did."""
    return self.prepare is not None and not self.settings.get('file')

  @property
  def content(self) -> str:
    """Eight hexadecimal digits of what its `file` holds; '' without one, or where none can be read."""
    path = pathlib.Path(self.settings.get('file') or '')
    return hashlib.sha256(path.read_bytes()).hexdigest()[:8] if path.is_file() else ''

  def takes(self, settings: dict[str, Any]) -> bool:
    """Returns whether it has all of these settings."""
    return all(name in self.settings for name in settings)


def attack(
  *,
  citation: str = '',
  reads: tuple[str, ...] = (),
  label_rule: str = 'bias_corrected',
  server: Callable[..., Method] | None = None,
  name: str = '',
  prepare: Callable[..., Tree] | None = None,
  adaptive: bool = False,
  version: str = '',
) -> Callable[[Callable], Callable[..., AttackMethod]]:
  """Returns the decorator that makes a factory, (client, *, settings) -> `Attack`, one of `AttackMethod`s.

  Args:
    citation, reads, label_rule, prepare, adaptive: see `AttackMethod`. Settings that `prepare` uses are not annotated
      `float`.
    server: the malicious server that it belongs to, (settings by keyword) -> `Method`. It is made with the settings of
      the attack, which must include its own.
    name: how texts and results call it; the factory's name by default.
    version: of a user's own code, see `wrap`.

  Raises:
    UsageError: for evidence that does not exist, or a server with a setting that the attack does not have.
  """
  for one in reads:
    errors.check_choice('evidence', one, EVIDENCE)
  version = version and errors.check_text('version', version)

  needed = server.setting_names if server is not None else ()  # type: ignore[attr-defined]

  def decorate(factory: Callable) -> Callable[..., AttackMethod]:
    missing = set(needed) - set(methods.setting_names(factory))
    if missing:
      raise errors.UsageError(
        f'the attack {factory.__name__} lacks settings of its server: {", ".join(sorted(missing))}; the server is made '
        'with the settings of the attack'
      )

    @functools.wraps(factory)
    def make(**settings: Any) -> AttackMethod:
      made = AttackMethod(
        factory,
        settings,
        citation=citation,
        evidence=frozenset(reads),
        label_rule=label_rule,
        label=name,
        version=version,
        prepare=prepare,
        adaptive=adaptive,
      )
      if server is None:
        return made
      return dataclasses.replace(made, server=server(**{key: made.settings[key] for key in needed}))

    make.__signature__ = methods.signature(factory)  # type: ignore[attr-defined]
    make.setting_names = methods.setting_names(factory)  # type: ignore[attr-defined]
    return make

  return decorate


def wrap(factory: Callable, label: str = '', reads: tuple[str, ...] = EVIDENCE, *, version: str = '') -> AttackMethod:
  """Returns the `AttackMethod` of a user's own function, client -> `Attack`.

  Args:
    factory: the function. Its keyword-only parameters are settings, which keep their defaults.
    label: how results call it; the function's name by default.
    reads: the evidence that it uses; all by default.
    version: of its code, such as '2'. A work directory holds label and version; under another version it is refused. A
      change of the code that keeps the version is not seen.

  Raises:
    UsageError: if it is not a function.
  """
  expected = (
    'one of gradleak.attacks, such as gradleak.attacks.csdlg(), or a function of a Client that returns an Attack'
  )
  if isinstance(factory, Method | optax.GradientTransformation):
    raise errors.UsageError(f'the attack is {errors.shown(factory)}, expected {expected}')
  errors.check_function('the attack', factory, 1, expected)
  label = label or getattr(factory, '__name__', type(factory).__name__)
  version = version and errors.check_text('version', version)
  return AttackMethod(factory, {}, evidence=frozenset(reads), label=label, version=version)


def as_attack(entry: Any) -> AttackMethod:
  """Returns the `AttackMethod` that an entry of an audit's list is.

  Raises:
    UsageError: for a text, or anything else that is not an attack.
  """
  if isinstance(entry, AttackMethod):
    return entry
  if isinstance(entry, str):
    raise errors.UsageError(f'the attack {entry!r} is a text, expected an object: gradleak.parse({entry!r}) makes it')
  return wrap(entry)


def require_gradient(name: str, observation: Observation) -> None:
  """Raises `UsageError` if the client shares its delta; for an attack, called `name`, that reads gradients."""
  if observation.knowledge.share != 'gradient':
    raise errors.UsageError(f"the attack {name} reads the gradient of one step, and this client has share='delta'")


def require_sent(name: str, client: Client, observation: Observation, paths: Collection[tuple[str, ...]]) -> None:
  """Raises `UsageError` if nothing is sent of any of these parameters, which an attack, called `name`, reads."""
  kept = client.kept_paths(observation.update, observation.batch_shape[1:])  # closed forms need no weights
  if missing := [path for path in paths if path in kept]:
    raise errors.UsageError(
      f'the attack {name} reads the gradient of {"/".join(missing[0])}, and the client does not share it: it is frozen '
      'or private'
    )


def closed_form(
  read: Callable[..., tuple[jax.Array, jax.Array | None]],
  *,
  check: Callable[[Observation], Any] | None = None,
  random: bool = False,
  auxiliary_data: bool = False,
) -> Attack:
  """Returns the `Attack` of a closed form, which has nothing to optimise.

  Args:
    read: a pure function of the `Observation`, and of a key if it is `random`. It returns (samples [K, …] with as many
      values as the private ones, the surest first; their labels, int32 [K], or None if it finds none).
    check: raises `UsageError` for an `Observation` that it cannot read; shapes suffice. None where `read` does.
    random: whether `read` takes a key.
    auxiliary_data: as in `Attack`.
  """

  def reconstruct(state: jax.Array, observation: Observation) -> Reconstruction:
    samples, labels = read(observation, *([jax.random.wrap_key_data(state)] if random else []))
    samples = samples.reshape(-1, *observation.batch_shape[1:])
    labels = jnp.zeros(0, jnp.int32) if labels is None else labels
    diverged = jnp.where(jnp.isfinite(samples).all(), -1, 0).astype(jnp.int32)
    return Reconstruction(samples, labels, _nothing(), _nothing(), _nothing(), diverged)

  return _without_steps(check or _ignored, reconstruct)._replace(auxiliary_data=auxiliary_data)


def padding_of(client: Any) -> int:
  """Returns the token that fills short texts of a client's model; −1, which is no token, where it has none."""
  known = None if client is None else client.model.padding
  return -1 if known is None else known


def host_form(
  check: Callable[[Observation], Any],
  read: Callable[[Observation, np.ndarray], tuple[np.ndarray, np.ndarray | None]],
  *,
  blank: int | None = None,
  labelled: bool = False,
) -> Attack:
  """Returns the `Attack` of a closed form that runs on the host, in NumPy.

  It is no part of a compiled program: a callback from one would wait for the devices that wait for it. An update that
  is not finite is not read: a decomposition of it may fail, or never end. Such a trial has diverged.

  Args:
    check: raises `UsageError` for an `Observation` that it cannot read; shapes suffice.
    read: (`Observation` of NumPy arrays, key data uint32 [2]) -> (samples [K, values], K ≤ N; labels int [K], or None
      if it finds none). Zeros with the label −1 are appended where fewer than N are found.
    blank: for samples of integers, what takes the place of zeros; None for samples of floats.
    labelled: whether `read` finds labels.
  """

  def reconstruct(state: jax.Array, observation: Observation) -> Reconstruction:
    number, dtype = observation.batch_shape[0], jax.tree.leaves(observation.update)[0].dtype
    dtype = dtype if blank is None else np.dtype(np.int32)
    finite = all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(observation.update))
    samples, labels = np.zeros(0), np.zeros(0) if labelled else None
    if finite:
      samples, labels = read(jax.tree.map(np.asarray, observation), np.asarray(state))
    missing, pixels = number - len(samples), math.prod(observation.batch_shape[1:])
    samples = np.pad(samples.reshape(-1, pixels), ((0, missing), (0, 0)), constant_values=blank or 0).astype(dtype)
    samples = samples.reshape(number, *observation.batch_shape[1:])
    labels = np.zeros(0) if labels is None else np.pad(labels, (0, missing), constant_values=-1)
    nothing, diverged = np.float32(0), np.int32(-1 if finite and np.isfinite(samples).all() else 0)
    return Reconstruction(samples, labels.astype(np.int32), nothing, nothing, nothing, diverged)

  return _without_steps(check, reconstruct)._replace(on_host=True)


def _without_steps(
  check: Callable[[Observation], Any], reconstruct: Callable[[jax.Array, Observation], Reconstruction]
) -> Attack:
  """Returns the `Attack` whose state is its key."""

  def init(key: jax.Array, observation: Observation) -> jax.Array:
    check(observation)
    return jax.random.key_data(key)

  return Attack(
    init=init,
    step=lambda state, observation: (state, {'objective': _nothing()}),
    reconstruct=reconstruct,
    objective=_nothing,
    num_steps=0,
    labels='unused',
  )


def _nothing(*_: Any) -> jax.Array:
  return jnp.float32(0)


def _ignored(observation: Observation) -> None:
  del observation
