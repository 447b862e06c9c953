"""Attacks by name, apart from their numbers, which are traced."""

from collections.abc import Callable
from typing import NamedTuple

from gradleak import errors, specs
from gradleak.attacks import presets
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
}

# The label rule that an attack was published with, where its labels are inferred.
LABEL_RULES = {'idlg': 'idlg'}


class AttackTemplate(NamedTuple):
  """An attack as written by a user.

  Attributes:
    name: the canonical text.
    structure: what decides the compilation; hashable.
    numbers: the numeric settings, a tuple of floats.
    build: (numbers, client) -> Attack.
    label_rule: the rule of inferred labels.
    spec, steps: what `parse` was given; no spec for an attack of a user's own.
  """

  name: str
  structure: tuple
  numbers: tuple[float, ...]
  build: Callable
  label_rule: str = 'bias_corrected'
  spec: specs.Spec | None = None
  steps: int | None = None

  def changed(self, settings):
    """Returns the template with some settings changed, (name, value) pairs; None where there is nothing to set."""
    if not settings:
      return self
    if self.spec is None:
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
  if steps is not None and spec.name in REGISTRY:
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
  )
  attack.build(attack.numbers, None)  # range errors now, not while tracing; nothing is simulated yet
  return attack


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
