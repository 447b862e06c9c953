"""Attacks by name, apart from their numbers, which are traced."""

import inspect
from collections.abc import Callable
from typing import NamedTuple

from gradleak import errors, specs
from gradleak.attacks import fidel, fishing, imprint, peeling, presets, spear, trap
from gradleak.attacks.base import Attack

REGISTRY = {
  'dlg': presets.dlg,
  'idlg': presets.idlg,
  'csdlg': presets.csdlg,
  'csdlg_fast': presets.csdlg_fast,
  'csdlg_lbfgs': presets.csdlg_lbfgs,
  'dga': presets.dga,
  'gia': presets.gia,
  'gs': presets.gs,
  'fidel': fidel.fidel,
  'peeling': peeling.peeling,
  'spear': spear.spear_attack,
  'imprint': imprint.imprint,
  'trap': trap.trap,
  'class_fishing': fishing.class_fishing,
}

# What the malicious server of an attack sends: (key, scenario, batch size, settings by keyword) -> `Scenario`.
SERVERS = {'imprint': imprint.server, 'trap': trap.server, 'class_fishing': fishing.server}

# The label rule that an attack was published with, where its labels are inferred.
LABEL_RULES = {'idlg': 'idlg'}


class Server(NamedTuple):
  """A malicious server; equal ones send the same model.

  Attributes:
    manipulate: see `SERVERS`.
    settings: (name, value) pairs.
  """

  manipulate: Callable
  settings: tuple

  def sends(self, key, scenario, batch_size):
    """Returns the `Scenario` of the model that it sends in place of the honest one; there was none before it."""
    return self.manipulate(key, scenario._replace(previous=None), batch_size, **dict(self.settings))


class AttackTemplate(NamedTuple):
  """An attack as written by a user.

  Attributes:
    name: the canonical text.
    structure: what decides the compilation; hashable.
    numbers: the numeric settings, a tuple of floats.
    build: (numbers, client) -> Attack.
    label_rule: the rule of inferred labels.
    spec, steps: what `parse` was given; no spec for an attack of a user's own.
    server: the malicious `Server`, or None: the server is honest but curious.
  """

  name: str
  structure: tuple
  numbers: tuple[float, ...]
  build: Callable
  label_rule: str = 'bias_corrected'
  spec: specs.Spec | None = None
  steps: int | None = None
  server: Server | None = None

  def changed(self, settings):
    """Returns the template with some settings changed, (name, value) pairs; None where there is nothing to set."""
    if not settings:
      return self
    if self.spec is None or any(name not in settings_of(self.spec.name) for name, _ in settings):
      return None
    return parse(str(self.spec._replace(settings=tuple(dict((*self.spec.settings, *settings)).items()))), self.steps)


def parse(text, steps=None):
  """Returns the `AttackTemplate` of 'csdlg' or 'csdlg(tv=1e-6,steps=4000)'.

  Args:
    text: as a user writes it.
    steps: number of steps where the text does not set it; None leaves the published one.

  Raises:
    UsageError: for an unknown name or setting, or a value out of range.
  """
  spec = specs.parse(text, 'attack')
  settings = dict(spec.settings)
  if steps is not None and 'steps' in settings_of(spec.name):
    errors.check_number('steps', steps, low=1, integer=True)
    settings.setdefault('steps', steps)
  template = specs.template(spec._replace(settings=tuple(settings.items())), REGISTRY, 'attack')
  attack = AttackTemplate(
    str(spec),
    template.structure,
    template.numbers,
    template.build,
    LABEL_RULES.get(spec.name, 'bias_corrected'),
    spec,
    steps,
    _server(spec.name, template.settings),
  )
  attack.build(attack.numbers, None)  # range errors now, not while tracing; nothing is simulated yet
  return attack


def settings_of(name):
  """Returns the names of the settings that the attack `name` takes; none of an unknown one."""
  return _settings(REGISTRY[name]) if name in REGISTRY else []


def _settings(function):
  """Returns the names of a factory's settings, its keyword-only parameters."""
  parameters = inspect.signature(function).parameters
  return [name for name, parameter in parameters.items() if parameter.kind is parameter.KEYWORD_ONLY]


def _server(name, settings):
  manipulate = SERVERS.get(name)
  return manipulate and Server(manipulate, tuple((setting, settings[setting]) for setting in _settings(manipulate)))


def custom(name, factory):
  """Returns the template of a user's own attack; `factory` maps a client to an `Attack`.

  Raises:
    UsageError: if it is no function, or (from `build`) returns something else.
  """
  if not callable(factory):
    raise errors.UsageError(
      f'the attack {name!r} is {factory!r}, expected a text or a function of a Client that returns an Attack'
    )

  def build(numbers, client):
    attack = factory(client)
    if not isinstance(attack, Attack):
      raise errors.UsageError(f'the attack {name!r} returns {attack!r}, expected a gradleak.attacks.Attack')
    return attack

  return AttackTemplate(name, (name, id(factory)), (), build)
