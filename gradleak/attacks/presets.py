"""Published attacks as settings of gradient matching.

Each takes the simulated client first; the keyword arguments are settings, and their defaults the published values (of
the authors' code where the paper is silent). One annotated `float` is traced, the others are structure.
"""

import inspect

from gradleak.attacks.matching import gradient_matching
from gradleak.attacks.optimizers import first_order, lbfgs


def _settings(*, start: str = 'normal', decoys: int = 0, prior: float = 0.0, tolerance: float = 0.0):
  """Settings of `gradient_matching` that all presets have."""


def _preset(function):
  """Lists these where `function` takes `**shared`, for `gradleak.specs` and `help`."""
  own = {name: p for name, p in inspect.signature(function).parameters.items() if name != 'shared'}
  shared = {name: p for name, p in inspect.signature(_settings).parameters.items() if name not in own}
  function.__signature__ = inspect.Signature([*own.values(), *shared.values()])
  return function


@_preset
def dlg(client, *, steps: int = 6000, history: int = 100, tv: float = 0.0, **shared):
  """Deep leakage from gradients (Zhu, Liu and Han 2019): images and labels together, squared distance, L-BFGS.

  The published code runs 300 × 20 iterations of L-BFGS without a line search, from N(0, 1), without box or restarts.
  Ours goes back where a step does not descend, so it does not explode; a step is one evaluation.
  """
  return gradient_matching(client, lbfgs(history=history), steps, tv=tv, labels='optimised', **shared)


@_preset
def idlg(client, *, steps: int = 6000, history: int = 100, tv: float = 0.0, **shared):
  """Improved DLG (Zhao, Mopuri and Bilen 2020): DLG with the label read from the last layer's gradient first."""
  return gradient_matching(client, lbfgs(history=history), steps, tv=tv, labels='inferred', **shared)


@_preset
def csdlg(
  client,
  *,
  steps: int = 24_000,
  learning_rate: float = 0.1,
  tv: float = 1e-4,
  distance: str = 'cosine',
  gradient: str = 'sign',
  optimizer: str = 'adam',
  decay: str = 'step',
  box: bool = True,
  layer_weighting: str = 'uniform',
  l2: float = 0.0,
  **shared,
):
  """Inverting gradients (Geiping et al. 2020), "csDLG" in OUTPOST: cosine distance, TV, Adam on the sign, boxed.

  24,000 steps and TV 1e-4 are the published command line's; the CIFAR notebooks use TV 1e-6, the library 1e-1 unsigned.
  """
  return gradient_matching(
    client,
    first_order(optimizer, learning_rate, steps, gradient=gradient, decay=decay),
    steps,
    distance=distance,
    tv=tv,
    l2=l2,
    box=box,
    layer_weighting=layer_weighting,
    labels='known',
    **shared,
  )


@_preset
def csdlg_lbfgs(client, *, steps: int = 3000, history: int = 100, tv: float = 0.0, **shared):
  """OUTPOST's csDLG (Wang et al. 2024, section V-B): the cosine distance by L-BFGS, no prior, no box, labels known."""
  return gradient_matching(client, lbfgs(history=history), steps, distance='cosine', tv=tv, labels='known', **shared)


@_preset
def csdlg_fast(
  client, *, steps: int = 2000, learning_rate: float = 0.03, tv: float = 1e-4, start: str = 'constant', **shared
):
  """What csDLG minimises and knows, in a twelfth of its steps: Adam on the plain gradient, cosine decay, from grey.

  The sign makes every pixel move as far as the rate says until that has decayed; Adam with a memory of a hundred steps
  lets those rest that have arrived.
  """
  return csdlg(
    client,
    steps=steps,
    learning_rate=learning_rate,
    tv=tv,
    distance='chordal',
    gradient='plain',
    optimizer='adam99',
    decay='cosine',
    start=start,
    **shared,
  )


@_preset
def dga(client, *, steps: int = 500, history: int = 100, tv: float = 0.0, **shared):
  """GradDefense's deep gradient attack (Wang et al. 2022, section VI-A): DLG, 500 steps of L-BFGS, known labels."""
  return gradient_matching(client, lbfgs(history=history), steps, tv=tv, labels='known', **shared)


@_preset
def gia(client, *, steps: int = 1000, learning_rate: float = 0.1, tv: float = 1e-4, **shared):
  """GradDefense's gradient inverting attack (Wang et al. 2022, section VI-A): csDLG, 1,000 steps."""
  return csdlg(client, steps=steps, learning_rate=learning_rate, tv=tv, **shared)


@_preset
def gs(client, *, steps: int = 10_000, learning_rate: float = 0.1, tv: float = 1e-4, **shared):
  """DCS²'s GradSim attacker (Wu et al. 2024): csDLG by Adam on the plain gradient, not boxed, labels known."""
  return csdlg(client, steps=steps, learning_rate=learning_rate, tv=tv, gradient='plain', box=False, **shared)
