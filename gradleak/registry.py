"""Names to objects, for programs and experiments: all other functions take objects.

The texts are those of `gradleak.core.grammar`; the names are those of `attacks.REGISTRY`, `servers.REGISTRY` and
`defenses.REGISTRY`.
"""

import collections
from collections.abc import Callable, Mapping

from gradleak.attacks import REGISTRY as HONEST
from gradleak.attacks.base import AttackMethod
from gradleak.core import errors
from gradleak.core.grammar import parse_chain, parse_list, spec
from gradleak.defenses import REGISTRY as DEFENSES
from gradleak.defenses import text as text_of_defense
from gradleak.defenses.defense import Defense
from gradleak.servers import REGISTRY as MALICIOUS

ATTACKS: Mapping[str, Callable] = collections.ChainMap(HONEST, MALICIOUS)


def parse(text: str) -> AttackMethod | Defense:
  """Returns the attack or the defense that a text describes: 'csdlg(tv=1e-6)', 'clip(norm=1)+gaussian(stddev=0.1)'.

  Args:
    text: a chain of defenses if its first name is that of a defense or 'none', else an attack.

  Raises:
    UsageError: for a text of another form, an unknown name or setting, or a value out of range.
  """
  kind = 'attack or defense'
  name = parse_chain(text, kind)[0].name
  if name == 'none' or name in DEFENSES:
    return defense(text)
  if name not in ATTACKS:
    raise errors.unknown(kind, name, ['none', *ATTACKS, *DEFENSES])
  return attack(text)


def attack(text: str) -> AttackMethod:
  """Returns the attack that a text describes, as 'csdlg(tv=1e-6,steps=4000)'; raises as `parse` does."""
  given = spec(text, 'attack')
  errors.check_choice('attack', given.name, ATTACKS)
  return ATTACKS[given.name](**dict(given.settings))


def attacks(text: str) -> list[AttackMethod]:
  """Returns the attacks of a list separated by `;`, grids written out; raises as `parse_list` and `parse` do."""
  return [attack(entry) for entry in parse_list(text, 'attack')]


def defense(text: str) -> Defense:
  """Returns the defense that a text describes, as 'none' or 'clip(norm=1)+gaussian(stddev=0.1)'; raises as `parse`."""
  return text_of_defense.parse(text)


def defenses(text: str) -> list[Defense]:
  """Returns the defenses of a list separated by `;`, grids written out; raises as `parse_list` and `parse` do."""
  return [defense(entry) for entry in parse_list(text, 'defense')]
