"""Privacy accounting of a training: ε(δ) of all that was published so far."""

import dataclasses
import math
from typing import Annotated, Any

from gradleak.core import errors
from gradleak.core.settings import NonNegative, Range, check_fields, ranged
from gradleak.defenses import Defense, Mechanism, differential_privacy, guarantees
from gradleak.defenses.defense import check_mean
from gradleak.defenses.differential_privacy import Epsilon


@dataclasses.dataclass(frozen=True)
class Ledger:
  """The noise that a training adds at each round, and how it is accounted for.

  Noise at the client protects a contribution from everyone, the server included. Noise at the server (Geyer et al.
  2017) protects a client in the published global models, while a curious server sees the raw uploads. Geyer's median
  norm, and BatchNorm's statistics, which the server averages without noise, are not counted.

  Attributes:
    mechanisms: the `Mechanism`s that each upload goes through.
    server_noise: Geyer's noise multiplier at the server (`differential_privacy.aggregate_client_dp`); 0 for none.
    sampling_rate: clients drawn per round over all clients; only `server_noise` uses it.
    delta: δ.
    accountant: 'rdp' or 'pld', see `differential_privacy.epsilon`.
    budget: the ε that must not be exceeded: training stops before the round that would (Geyer et al. 2017, algorithm
      1); None for no end.
  """

  mechanisms: tuple[Mechanism, ...]
  server_noise: NonNegative = 0.0
  sampling_rate: differential_privacy.Rate = 1.0
  delta: differential_privacy.Delta = 1e-5
  accountant: differential_privacy.Accountant = 'rdp'
  budget: Annotated[float | None, Range(1e-12, finite=True)] = None

  def __post_init__(self) -> None:
    check_fields(self)

  @property
  def unit(self) -> str:
    """Whom ε protects: 'client' if any noise protects whole clients, as the server's does, else 'example'.

    Values of different units cannot be compared: per-example noise counts only if there is no other.
    """
    per_example = any(mechanism.unit == 'example' for mechanism in self.mechanisms)
    per_client = self.server_noise > 0 or any(mechanism.unit == 'client' for mechanism in self.mechanisms)
    return 'example' if per_example and not per_client else 'client'

  @property
  def relation(self) -> str:
    """The neighbouring relation of every ε, one for all noise that is counted, see `differential_privacy.Epsilon`.

    The server sees who sends: against it, one contribution is replaced by another ('replace one'). Geyer's ε of the
    global models hides whether a client took part at all ('add or remove one'). Where noise of both kinds protects
    clients, the relation is the one that both are known in, 'replace by zeros'.
    """
    if not self.server_noise:
      return 'replace one'
    return 'replace by zeros' if self.counted else 'add or remove one'

  @property
  def terms(self) -> dict[str, Any]:
    """What every ε of this ledger is relative to, plain JSON; see `differential_privacy.Epsilon`."""
    return self.epsilon(0, 0).terms

  @ranged
  def epsilon(self, rounds: Annotated[int, Range(0)], participations: Annotated[int, Range(0)]) -> Epsilon:
    """Returns the ε of all that was published so far: the least valid one; infinity without any noise.

    Each mechanism of the ledger's unit gives a valid ε by itself, and so does the server's noise:
    - one at the client is released `releases · participations` times. Sampling gives no amplification, as the server
      sees who sends.
    - the server's noise is released at each of the `rounds`; a client takes part in each with probability
      `sampling_rate`, independently and in secret (Poisson sampling). This is customary for rounds of a fixed number of
      clients too, though their exact bound differs.

    Args:
      rounds: rounds done so far.
      participations: the largest number of rounds for which any one client was drawn, at most `rounds`.

    Raises:
      UsageError: for more participations than rounds.
    """
    errors.check_number('participations', participations, low=0, high=rounds, integer=True)
    found = [self._spent(mechanism.noise, mechanism.releases * participations) for mechanism in self.counted]
    if self.server_noise > 0:
      found.append(self._spent(self.server_noise, rounds, self.sampling_rate))
    sampled = self.server_noise > 0 and self.sampling_rate < 1
    return Epsilon(
      min(found, default=math.inf) if rounds else 0.0,
      self.relation,
      self.unit,
      'all global models' if self.server_noise > 0 else 'all uploads',
      'fixed size' if sampled else 'none',
      float(self.sampling_rate) if sampled else 1.0,
      self.delta,
      self.accountant,
    )

  @property
  def counted(self) -> tuple[Mechanism, ...]:
    """The mechanisms of the ledger's unit."""
    return tuple(mechanism for mechanism in self.mechanisms if mechanism.unit == self.unit)

  def _spent(self, noise: float, steps: int, sampling_rate: float = 1.0) -> float:
    if steps == 0:
      return 0.0
    return differential_privacy.epsilon(
      noise,
      self.relation,
      steps=steps,
      sampling_rate=sampling_rate,
      delta=self.delta,
      accountant=self.accountant,
    )


def ledger(
  defense: Defense | None,
  *,
  epochs: int = 1,
  server_noise: float = 0.0,
  sampling_rate: float = 1.0,
  delta: float = 1e-5,
  accountant: str = 'rdp',
  budget: float | None = None,
) -> Ledger | None:
  """Returns the `Ledger` of a training under a defense, or None if there is nothing to account for.

  Args:
    defense: a `Defense`, or None for none; see `guarantees.mechanisms` for what is covered.
    epochs: a client's local epochs; 1 where it shares its gradient.
    server_noise, sampling_rate, delta, accountant, budget: see `Ledger`.

  Raises:
    UsageError: for a value out of range, an unknown accountant, or a defense at the server that drops its noise.
  """
  check_mean(defense, server_noise)
  made = Ledger(guarantees.mechanisms(defense, epochs), server_noise, sampling_rate, delta, accountant, budget)
  return made if made.mechanisms or made.server_noise > 0 else None
