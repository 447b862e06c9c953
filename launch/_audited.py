"""What the programs that audit share: their flags, and the scenario and settings that these describe."""

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any

import jax

import gradleak as gl
from gradleak import registry
from gradleak.audit.plan import refused
from gradleak.core import errors
from gradleak.federated.earlier import RATE, earlier
from launch import _flags, _program
from launch._flags import NETWORK, Flags

OPTIONS = tuple(name for name in _flags.OPTIONS if name != 'limit')  # how data are read
# Settings that a program with attacks and stages of its own does not take: all but the size of a batch.
ATTACKER = tuple(field.name for field in dataclasses.fields(gl.AuditSettings) if field.name != 'batch_size')


def define(*own: str, attacker: bool = True, **defaults: Any) -> Flags:
  """Returns the common flags, defined.

  Args:
    *own: more names of `_flags.SHARED`, of one model and one seed.
    attacker: whether attacks and their settings are flags, too.
    **defaults: replace some defaults.
  """
  given = Flags()
  with _program.group('what is audited'):
    given.shared(*('dataset', 'split', *OPTIONS, 'trials', 'public'), **defaults)
    given.shared(*(['shuffle'] if attacker else []))
    rounds = defaults.pop('rounds_before', 0)
    given.integer(
      'rounds_before', rounds, 'Rounds of training on the public samples before; 0: nobody has taken part yet.'
    )
    given.shared('init', 'weights', *(name for name in NETWORK if name != 'model' or 'model' in own))
  with _program.group('client'):
    given.settings(gl.ClientSettings)
  with _program.group('attacker'):
    given.shared(*(['attacks'] if attacker else []), **defaults)
    given.settings(gl.AuditSettings, without=('adaptive_attacks',) if attacker else ATTACKER, steps=1000)
  with _program.group('defenses'):
    given.shared('defenses', **defaults)
  with _program.group('run'):
    given.shared('workdir', 'progress', 'x64', 'group_size', 'compilation_cache', **defaults)
    given.shared(*(name for name in own if name == 'seed'))
  return given


def load(given: Flags) -> tuple[Any, tuple | None]:
  """Returns (private samples, public (samples, targets) or None): where nobody asked and there are none.

  Where nobody asked, all of a split of fewer samples are public.

  Raises:
    UsageError: for data that are not there, or numbers out of range.
  """
  for name, low in (('trials', 1), ('batch_size', 1), ('public', 0)):
    errors.check_number(name, getattr(given, name), low=low, high=10**6, integer=True)
  _program.say(f'reading {given.dataset} …')
  count, drawn = given.trials * given.batch_size, _shuffles(given)
  dataset = given.read(given.split, limit=None if drawn else count)
  if drawn:
    dataset = gl.data.shuffled(dataset, count, gl.modalities.of_config(dataset.settings).noun[1])
  given.fit(dataset)
  public = public_split(given, given.public) if given.public else None
  return dataset, None if public is None else (public.samples, public.targets)


def _shuffles(given: Flags) -> bool:
  return 'shuffle' in given and given.shuffle


def public_split(given: Flags, limit: int | None = None) -> Any:
  """Returns the first samples of the split that is not attacked; None where nobody asked and it cannot be read.

  Where nobody asked, a split of fewer samples is enough.

  Raises:
    UsageError: where somebody asked for public samples, and there are none or too few.
  """
  split = 'test' if given.split.startswith('train') else 'train'
  read = functools.partial(gl.data.load, given.dataset, split, **given.options())
  try:
    return read(limit=limit)
  except gl.UsageError as error:
    if given.present('public'):
      raise
    if isinstance(error, errors.SizeError):
      return read()
    _program.say(f'note: there are no public samples: {error}')
    return None


@functools.cache
def _gallery(name: str, split: str, **options: Any) -> Any:
  """Returns the candidates of `gl.data.gallery`, read once for all models and seeds of a sweep."""
  return gl.data.gallery(name, split, **options)


def scenario(
  given: Flags, model: gl.models.Model, seed: int, dataset: Any, public: tuple | None, drawn: Any = None
) -> tuple[jax.Array, gl.Scenario]:
  """Returns (key of the audit, `Scenario`) of a model and a seed, before any training.

  Its variables are those of the flag --weights, or else `drawn`, or drawn by the model where that is None.
  """
  key = jax.random.key(seed)
  rounds = errors.check_number('rounds_before', given.rounds_before, low=0, high=10**6, integer=True)
  if rounds and public is None:
    if given.present('rounds_before'):
      raise errors.UsageError(f'{rounds} rounds before the audit need public samples, and there are none')
    rounds = 0
  variables = given.variables(model, dataset, public, 'public')
  variables = drawn if variables is None else variables
  built = gl.scenario(
    model,
    dataset.samples,
    dataset.targets,
    **({'key': jax.random.fold_in(key, 0)} if variables is None else {'variables': variables}),
    dataset=dataset.name,
    client=given.client(),
    public=public,
    modality=gl.modalities.of_config(dataset.settings),
    gallery=_gallery(given.dataset, given.split, **given.options()),
  )
  _flags.check_outputs(built, given.outputs(dataset))
  told: dict[str, Any] = {'rounds_before': rounds, 'rate_before': RATE} if rounds else {}
  told |= {'shuffle': True} if _shuffles(given) else {}
  built = built.noted({'split': dataset.split, **given.weights_described(), 'seed': seed, **told})
  return jax.random.fold_in(key, 1), built


def trained(seed: int, scenario: gl.Scenario) -> gl.Scenario:
  """Returns the scenario after the rounds of training that the flags ask for."""
  rounds = scenario.settings.get('rounds_before')
  if not rounds:
    return scenario
  _program.say(f'training for {rounds} round{"s" if rounds > 1 else ""} on the public samples …')
  assert scenario.public is not None
  clients = min(10, len(scenario.public[0]))
  key = jax.random.fold_in(jax.random.key(seed), 2)
  current, previous = earlier(
    key, scenario.client, scenario.variables, *scenario.public, rounds=rounds, clients=clients
  )
  known = scenario.settings
  told = {'start_fingerprint': known['weights_fingerprint']} if rounds > 1 and known.get('weights') else {}
  return scenario.trained(current, previous).noted(told)


def attacks(given: Flags, audits: Iterable[tuple[jax.Array, gl.Scenario]]) -> list[gl.attacks.AttackMethod]:
  """Returns the attacks of the flag; where nobody gave it, the usual ones that can be run in all audits.

  Those that are left out are named, with the reason.

  Args:
    audits: (key, scenario) of each.

  Raises:
    UsageError: where none of the usual ones can be run: that of the first.
  """
  methods = registry.attacks(given.attacks)
  if given.present('attacks') or len(methods) == 1:
    return methods
  reasons: dict[str, errors.UsageError] = {}
  for key, scenario in audits:
    reasons = refused(key, scenario, methods, given.trials, settings(given)) | reasons
  if len(reasons) == len(methods):
    raise reasons[str(methods[0])]
  for name, error in reasons.items():
    _program.say(f'note: {name} is left out: {error}')
  return [method for method in methods if str(method) not in reasons]


def settings(given: Flags) -> gl.AuditSettings:
  """Returns the `AuditSettings` that the flags describe; 0 steps are those that were published."""
  return given.made(gl.AuditSettings, steps=given.steps or None)
