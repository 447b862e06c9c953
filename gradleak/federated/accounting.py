"""What the rounds of a training cost in privacy: ε(δ) of all that has been published so far."""

import dataclasses
import functools
import math

from gradleak import errors
from gradleak.defenses import differential_privacy, guarantees

_epsilon = functools.cache(differential_privacy.epsilon)  # a training asks for the same figures at every round


@dataclasses.dataclass(frozen=True)
class Ledger:
  """The noise that a training adds at each round, and how it is accounted for.

  Noise at the client hides a contribution from everyone, the server included; noise at the server (Geyer et al. 2017)
  hides a client in the published global models, while a curious server sees the uploads as they are. What Geyer's
  median norm reveals, and BatchNorm's statistics, which the server averages without noise, are not counted.

  Attributes:
    mechanisms: the `guarantees.Mechanism`s that each upload goes through.
    server_noise: Geyer's noise multiplier at the server (`differential_privacy.aggregate_client_dp`); 0 for none.
    sampling_rate: clients drawn per round over all clients. It counts for `server_noise` alone.
    delta: δ in (0, 1).
    accountant: 'rdp' or 'pld', see `differential_privacy.epsilon`.
  """

  mechanisms: tuple[guarantees.Mechanism, ...]
  server_noise: float = 0.0
  sampling_rate: float = 1.0
  delta: float = 1e-5
  accountant: str = 'rdp'

  def __post_init__(self):
    errors.check_number('server_noise', self.server_noise, low=0, finite=True)
    errors.check_number('sampling_rate', self.sampling_rate, low=1e-12, high=1)
    errors.check_number('delta', self.delta, low=1e-300, high=1 - 1e-12)
    if self.accountant not in differential_privacy.ACCOUNTANTS:
      raise errors.unknown('accountant', self.accountant, differential_privacy.ACCOUNTANTS)

  @property
  def unit(self):
    """Whom ε protects: 'client' if any of the noise hides whole clients, as the server's does, else 'example'.

    Figures of different units cannot be compared: noise that hides examples counts only where no other is there.
    """
    hides_examples = any(mechanism.unit == 'example' for mechanism in self.mechanisms)
    hides_clients = self.server_noise > 0 or any(mechanism.unit == 'client' for mechanism in self.mechanisms)
    return 'example' if hides_examples and not hides_clients else 'client'

  def epsilon(self, rounds, participations):
    """Returns the ε, a float, of all models published so far: the least that holds; infinity where nothing does.

    Each mechanism of the ledger's unit holds by itself, and so does the server's noise:
    - one at the client is released `releases · participations` times. Sampling amplifies nothing, as the server sees
      who sends.
    - the server's noise is released at each of the `rounds`, of which a client takes part in any with probability
      `sampling_rate`, independently and unseen (Poisson sampling). Rounds of a fixed number of clients are customarily
      accounted for like this, though their bound differs.

    Args:
      rounds: how many have been done.
      participations: the most rounds for which any one client was drawn, at most `rounds`.

    Raises:
      UsageError: if either is no such integer.
    """
    errors.check_number('rounds', rounds, low=0, integer=True)
    errors.check_number('participations', participations, low=0, high=int(rounds), integer=True)
    if rounds == 0:
      return 0.0
    found = [
      self._spent(mechanism.noise, mechanism.releases * int(participations))
      for mechanism in self.mechanisms
      if mechanism.unit == self.unit
    ]
    if self.server_noise > 0:
      found.append(self._spent(self.server_noise, int(rounds), self.sampling_rate))
    return min(found, default=math.inf)

  def _spent(self, noise, steps, sampling_rate=1.0):
    if steps == 0:
      return 0.0
    return _epsilon(noise, steps=steps, sampling_rate=sampling_rate, delta=self.delta, accountant=self.accountant)


def ledger(defense, *, epochs=1, server_noise=0.0, sampling_rate=1.0, delta=1e-5, accountant='rdp'):
  """Returns the `Ledger` of a training under `defense`, or None where there is nothing to account for.

  Args:
    defense: a chain as a user writes it; see `guarantees.mechanisms` for what is covered.
    epochs: a client's local epochs; 1 where it shares its gradient.
    server_noise, sampling_rate, delta, accountant: see `Ledger`.

  Raises:
    UsageError: for a value out of range or an unknown accountant.
  """
  made = Ledger(guarantees.mechanisms(defense, epochs), server_noise, sampling_rate, delta, accountant)
  return made if made.mechanisms or made.server_noise > 0 else None


def caption(ledger):
  """Returns what a table's column of ε is about: 'per client' or 'per example', and what it does not protect."""
  limits = ', of the global models, not of the uploads' if ledger.server_noise > 0 else ''
  return f'per {ledger.unit}{limits}'
