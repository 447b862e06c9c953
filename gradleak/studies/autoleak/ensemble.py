"""The fixed ensemble: stages of attacks, from the cheapest on, with budgets that nobody chooses."""

from typing import NamedTuple

from gradleak import attacks, servers
from gradleak.attacks import AttackMethod

VERSION = 'AutoLeak-1'


class Stage(NamedTuple):
  """Attacks that run together, on what no earlier stage has broken.

  Attributes:
    name: of the stage, and of its folder.
    attacks: as `gradleak.audit` takes them, by a non-adaptive attacker and by adaptive ones.
    restarts: starts of each.
    rounds: uploads of the same samples that the attacker reads; more than one are averaged, where a defense is random.
    honest: whether the server sends the model that it should.
  """

  name: str
  attacks: tuple[AttackMethod, ...]
  restarts: int = 1
  rounds: int = 1
  honest: bool = True


STAGES = (
  Stage('closed forms', (attacks.fidel(), attacks.peeling(), attacks.april())),
  Stage('matching', (attacks.csdlg_fast(steps=500, tv=1e-6),)),
  Stage('learned inverse', (attacks.lti(steps=300, hidden=256),)),
  Stage('L-BFGS matching', (attacks.dga(steps=300, start='uniform'),)),
  Stage('signed matching', (attacks.csdlg(steps=500, tv=1e-4),), restarts=2),
  Stage('generator', (attacks.gias(steps=250, latent_steps=100, training_steps=260),)),
  Stage('averaged rounds', (attacks.csdlg_fast(steps=500, tv=1e-6),), rounds=8),
  Stage('malicious server', (servers.imprint(), servers.trap()), honest=False),
)
CONTROLS = 16  # runs on noise, of each attack
WITNESSES = 2  # trials on which every attack also runs without a defense
