"""Which attacks meet a captured update where none is named, as data: a line for each attack that runs."""

from collections.abc import Callable
from typing import NamedTuple

import jax

from gradleak import attacks
from gradleak.attacks import AttackMethod
from gradleak.core import errors
from gradleak.federated.scenario import Scenario
from gradleak.models.soft_slopes import has_max_pools

# Parameters up to which `annealed` takes all its steps, and those up to which its gain was measured. With fewer steps,
# it takes no longer than `ladder`. Several samples take longer: two rungs do, near the weight that is best.
_SMALL, _MEASURED, _FEWER = 10**5, 10**6, 600
_TWO = {'lowest': 5e-3, 'highest': 0.02, 'rungs': 2}


class Known(NamedTuple):
  """What is known of an update before it is attacked.

  Attributes:
    scenario: of the client that it is said to come from.
    number: of private samples behind it.
    signs: whether it holds signs, as one step of Adam leaves them.
  """

  scenario: Scenario
  number: int
  signs: bool

  @property
  def parameters(self) -> int:
    """How many numbers the client trains."""
    return sum(leaf.size for leaf in jax.tree.leaves(self.scenario.variables['params']))

  @property
  def small(self) -> bool:
    """Whether the network is small."""
    return self.parameters <= _SMALL

  @property
  def max_pools(self) -> bool:
    """Whether it is of one step of a network with max pools, up to the size that was measured."""
    client, samples = self.scenario.client, self.scenario.samples
    one_step = client.share == 'gradient' or client.num_steps(self.number) == 1
    return (
      one_step
      and self.parameters <= _MEASURED
      and has_max_pools(client.model, self.scenario.variables, samples.shape[1:])
    )


def anything(known: Known) -> bool:
  """Returns whether an attack is meant for the update: always."""
  del known
  return True


class Default(NamedTuple):
  """An attack that runs where none is named.

  Attributes:
    attack: the attack.
    fits: whether it is meant for an update.
  """

  attack: AttackMethod
  fits: Callable[[Known], bool] = anything


def _of_signs(known: Known) -> bool:
  return known.signs


# By the name of the modality: of each line, the first attack that fits. The last line is a search, which always runs;
# the others run where they can read the network.
DEFAULTS: dict[str, tuple[tuple[Default, ...], ...]] = {
  'images': (
    (Default(attacks.fidel()),),
    (Default(attacks.peeling()),),
    (
      Default(attacks.ladder(match='sign'), _of_signs),
      Default(attacks.ladder(), lambda known: not known.max_pools),
      Default(attacks.annealed(), lambda known: known.small and known.number == 1),
      Default(attacks.annealed(steps=_FEWER), lambda known: known.number == 1),
      Default(attacks.annealed(steps=4000, **_TWO), lambda known: known.small),
      Default(attacks.annealed(steps=900, **_TWO)),
    ),
  ),
  'table': (
    (Default(attacks.fidel()),),
    (Default(attacks.peeling()),),
    (Default(attacks.spear(submatrices=100_000)),),
    (Default(attacks.linear()),),
    (
      Default(attacks.tableak(steps=500, seeds=8, match='sign'), _of_signs),
      Default(attacks.tableak(steps=500, seeds=8)),
    ),
  ),
  'text': (
    (Default(attacks.span()),),
    (
      Default(attacks.tag(steps=300, decay='cosine', match='sign'), _of_signs),
      Default(attacks.tag(steps=300, decay='cosine')),
    ),
  ),
}


def chosen(known: Known, reads: Callable[[AttackMethod], bool]) -> list[AttackMethod]:
  """Returns the attacks that meet an update; no search is among them in float64.

  Args:
    known: what is known of it.
    reads: whether an attack can read the network and what the client shares.

  Raises:
    UsageError: for samples that have no such attacks.
  """
  kind = known.scenario.client.modality
  if kind.name not in DEFAULTS:
    raise errors.UsageError(f'no attacks on {kind.noun[1]} run where none is named: give attacks=[…]')
  *forms, search = [next(one.attack for one in line if one.fits(known)) for line in DEFAULTS[kind.name]]
  searches = [] if jax.config.jax_enable_x64 and not known.signs else [search]
  return [*(form for form in forms if reads(form)), *searches]
