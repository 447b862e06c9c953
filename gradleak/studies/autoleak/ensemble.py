"""The fixed ensembles, as data: stages of attacks for each modality, with budgets that nobody chooses."""

from collections.abc import Callable
from typing import NamedTuple

from gradleak import attacks, servers
from gradleak.adaptive import likelihood
from gradleak.attacks import AttackMethod
from gradleak.defenses.defense import Bound, Context

VERSION = 'AutoLeak-2'
CONTROLS = 16  # runs on noise, of each attack and each ranking
WITNESSES = 2  # trials on which every attack also runs without a defense
CANDIDATES = 1000  # of a ranking, where there are as many


def anything(bound: Bound, context: Context, batch_size: int, drawn: bool = False) -> str:
  """Returns why a stage is not run under a defense; '' where it is: always."""
  del bound, context, batch_size, drawn
  return ''


def repeats(bound: Bound, context: Context, batch_size: int, drawn: bool = False) -> str:
  """Returns why attacks read one upload of the same samples; '' where they average or sum several."""
  del context, batch_size, drawn
  return '' if bound.varies else 'it does the same to all uploads of the same samples'


def redraws(bound: Bound, context: Context, batch_size: int, drawn: bool = False) -> str:
  """Returns why a ranking reads one upload; '' where it reads several, of a random client or defense."""
  del context, batch_size
  if bound.held:
    return 'a ranking does not simulate what it held back in earlier rounds'
  return '' if drawn or bound.defense.random else 'a ranking reads several uploads only where they are drawn anew'


def known_noise(bound: Bound, context: Context, batch_size: int, drawn: bool = False) -> str:
  """Returns why an upload does not bear noise of known variance on every entry, near to Gaussian; '' where it does."""
  del drawn
  found = likelihood.expected(bound, context, batch_size)
  gaussian = found.model == 'noise' and not found.laplace
  return '' if gaussian else 'it does not add Gaussian noise of known variance to every entry'


class Stage(NamedTuple):
  """Attacks that run together, on what no earlier stage has broken.

  Attributes:
    name: of the stage, and of its folder.
    attacks: as `gradleak.audit` takes them, by a non-adaptive attacker and by adaptive ones.
    restarts: starts of each.
    rounds: uploads of the same samples that the attacker reads.
    honest: whether the server sends the model that it should.
    skips: (defense, context, samples behind an upload, whether the client itself is random) -> why the stage is not run
      under a defense, '' where it is.
  """

  name: str
  attacks: tuple[AttackMethod, ...]
  restarts: int = 1
  rounds: int = 1
  honest: bool = True
  skips: Callable[[Bound, Context, int, bool], str] = anything


class Ranking(NamedTuple):
  """A ranking of a list of candidates by the likelihood of the upload (`gradleak.identify`), without a picture.

  Attributes:
    name, rounds, skips: see `Stage`.
  """

  name: str
  rounds: int = 1
  skips: Callable[[Bound, Context, int, bool], str] = anything


# By the name of the modality.
ENSEMBLES: dict[str, tuple[Ranking | Stage, ...]] = {
  'images': (
    Ranking('likelihood'),
    Ranking('likelihood of rounds', rounds=8, skips=redraws),
    Stage('closed forms', (attacks.fidel(), attacks.peeling(), attacks.april())),
    Stage('residual peeling', (attacks.residual_peeling(),)),
    Stage('matching', (attacks.csdlg_fast(steps=500, tv=1e-6),)),
    Stage('learned inverse', (attacks.lti(steps=300, hidden=256),)),
    Stage('smooth matching', (attacks.ladder(steps=300, lowest=1e-6, highest=1e-2, rungs=3),)),
    Stage('L-BFGS matching', (attacks.dga(steps=300, start='uniform'),)),
    Stage('averaged rounds', (attacks.csdlg_fast(steps=500, tv=1e-6),), rounds=8, skips=repeats),
    Stage('known noise', (attacks.bayes(steps=300),), rounds=8, skips=known_noise),
    Stage('malicious server', (servers.imprint(), servers.trap()), honest=False),
  ),
  'table': (
    Ranking('likelihood'),
    Ranking('likelihood of rounds', rounds=8, skips=redraws),
    Stage('closed forms', (attacks.fidel(), attacks.peeling(), attacks.spear(submatrices=100_000))),
    Stage('residual peeling', (attacks.residual_peeling(),)),
    Stage('relaxed matching', (attacks.tableak(steps=500, seeds=8),)),
    Stage('matching', (attacks.csdlg_fast(steps=500, tv=0.0, start='normal'),)),
    Stage('L-BFGS matching', (attacks.dga(steps=300),)),
    Stage('averaged rounds', (attacks.tableak(steps=500, seeds=8),), rounds=8, skips=repeats),
    Stage('malicious server', (servers.imprint(), servers.trap()), honest=False),
  ),
  'text': (
    Ranking('likelihood'),
    Ranking('likelihood of rounds', rounds=8, skips=redraws),
    Stage('closed forms', (attacks.span(),)),
    Stage('matching', (attacks.tag(steps=300, decay='cosine'),)),
    Stage('matching and moves', (attacks.lamp(steps=300, starts=20),)),
    Stage('L-BFGS matching', (attacks.dga(steps=300),)),
    Stage('averaged rounds', (attacks.tag(steps=300, decay='cosine'),), rounds=8, skips=repeats),
    Stage('malicious server', (servers.decepticons(),), honest=False),
  ),
}
