"""Published attacks as settings of gradient matching.

The keyword arguments are settings. Their defaults are the published values; where the paper does not state one, that of
the authors' code. Settings annotated `float` are traced, the others decide the compilation. `csdlg(tv=1e-6)` is the
attack with its settings, `csdlg(tv=1e-6)(client)` its functions for the client that is simulated.
"""

import inspect
from collections.abc import Callable
from typing import Any

from gradleak.attacks.base import Attack, AttackMethod, attack
from gradleak.attacks.matching import gradient_matching
from gradleak.attacks.optimizers import first_order, lbfgs
from gradleak.federated import Client

DLG = 'Zhu, Liu, Han: Deep Leakage from Gradients. NeurIPS 2019.'
IDLG = 'Zhao, Mopuri, Bilen: iDLG: Improved Deep Leakage from Gradients. 2020.'
CSDLG = (
  'Geiping, Bauermeister, Dröge, Moeller: Inverting Gradients – How Easy Is It to Break Privacy in Federated Learning? '
  'NeurIPS 2020.'
)
CINET = (
  'Zhang, Zhang, Sotthiwat, Xu, Liu, Zhen, Liu: Generative Gradient Inversion via Over-Parameterized Networks in '
  'Federated Learning. ICCV 2023.'
)
MAGIA = (
  'MAGIA: Sensing Per-Image Signals from Single-Round Averaged Gradients for Label-Inference-Free Gradient Inversion. '
  'arXiv 2509.18170, 2025.'
)


def _settings(
  *,
  start: str = 'normal',
  decoys: int = 0,
  prior: float = 0.0,
  tolerance: float = 0.0,
  form: str = 'auto',
  match: str = 'client',
  epochs: int = 0,
  batch_size: int = 0,
  rate: float = 1.0,
  orders: str = 'known',
  seeds: int = 1,
  batch_norm: float | None = None,
  group: float | None = None,
  order: float | None = None,
  partial: float | None = None,
  sharpness: float | None = None,
  generator: str | None = None,
  subset: int | None = None,
  subset_weight: float = 1e-3,
  subset_growth: int = 0,
) -> None:
  """Settings of `gradient_matching` that all presets have."""


def _preset(
  citation: str,
  label_rule: str = 'bias_corrected',
  reads: tuple[str, ...] = ('weights', 'noise', 'clip'),
  without: tuple[str, ...] = (),
) -> Callable[[Callable[..., Attack]], Callable[..., AttackMethod]]:
  """Returns the decorator of a matching attack: `_settings` but those `without` are what `**shared` stands for."""

  def decorate(function: Callable[..., Attack]) -> Callable[..., AttackMethod]:
    own = {name: p for name, p in inspect.signature(function).parameters.items() if name != 'shared'}
    shared = {name: p for name, p in inspect.signature(_settings).parameters.items() if name not in (*own, *without)}
    function.__signature__ = inspect.Signature([*own.values(), *shared.values()])  # type: ignore[attr-defined]
    return attack(citation=citation, reads=reads, label_rule=label_rule)(function)

  return decorate


@_preset(DLG)
def dlg(client: Client, *, steps: int = 6000, history: int = 100, tv: float = 0.0, **shared: Any) -> Attack:
  r"""Deep leakage from gradients (Zhu, Liu and Han 2019): images and labels together, squared distance, L-BFGS.

  The published code runs 300 × 20 iterations of L-BFGS without a line search, from N(0, 1), without box or restarts.
  Ours has a line search, so that it does not diverge. One step is one evaluation.

  Formula:
    \min_{x, y} \; \lVert \nabla_\theta L(f_\theta(x), \text{softmax}(y)) - g \rVert_2^2 + \text{tv} \cdot \text{TV}(x)
  """
  return gradient_matching(client, lbfgs(history=history), steps, tv=tv, labels='optimised', **shared)


@_preset(IDLG, 'idlg')
def idlg(client: Client, *, steps: int = 6000, history: int = 100, tv: float = 0.0, **shared: Any) -> Attack:
  r"""Improved DLG (Zhao, Mopuri and Bilen 2020): DLG with the label read from the last layer's gradient first.

  Formula:
    y = \arg\min_c \sum_i \frac{\partial L}{\partial W_{ic}}, \quad
    \min_x \; \lVert \nabla_\theta L(f_\theta(x), y) - g \rVert_2^2 + \text{tv} \cdot \text{TV}(x)
  """
  return gradient_matching(client, lbfgs(history=history), steps, tv=tv, labels='inferred', **shared)


@_preset(CSDLG)
def csdlg(
  client: Client,
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
  **shared: Any,
) -> Attack:
  r"""Inverting gradients (Geiping et al. 2020), "csDLG" in OUTPOST: cosine distance, TV, Adam on the sign, boxed.

  24,000 steps and TV 1e-4 are the published command line's; the CIFAR notebooks use TV 1e-6, the library 1e-1 unsigned.

  Formula:
    \min_{x \in [0, 1]^n} \; 1 - \frac{\langle \nabla_\theta L(f_\theta(x), y), g \rangle}
    {\lVert \nabla_\theta L(f_\theta(x), y) \rVert \, \lVert g \rVert} + \text{tv} \cdot \text{TV}(x)
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


@_preset(CSDLG)
def csdlg_lbfgs(client: Client, *, steps: int = 3000, history: int = 100, tv: float = 0.0, **shared: Any) -> Attack:
  r"""OUTPOST's csDLG (Wang et al. 2024, section V-B): the cosine distance by L-BFGS, no prior, no box, labels known.

  Formula:
    \min_x \; 1 - \frac{\langle \nabla_\theta L(f_\theta(x), y), g \rangle}
    {\lVert \nabla_\theta L(f_\theta(x), y) \rVert \, \lVert g \rVert} + \text{tv} \cdot \text{TV}(x)
  """
  return gradient_matching(client, lbfgs(history=history), steps, distance='cosine', tv=tv, labels='known', **shared)


@_preset(CSDLG)
def csdlg_fast(
  client: Client,
  *,
  steps: int = 2000,
  learning_rate: float = 0.03,
  tv: float = 1e-4,
  start: str = 'constant',
  **shared: Any,
) -> Attack:
  r"""The objective and knowledge of csDLG, in a twelfth of its steps: Adam on the plain gradient, cosine decay, grey.

  With the sign, every pixel moves by the learning rate in each step until that has decayed. Adam with a memory of a
  hundred steps makes small steps for pixels that have converged.

  Formula:
    \min_{x \in [0, 1]^n} \; 1 - \frac{\langle \nabla_\theta L(f_\theta(x), y), g \rangle}
    {\lVert \nabla_\theta L(f_\theta(x), y) \rVert \, \lVert g \rVert} + \text{tv} \cdot \text{TV}(x)
  """
  return csdlg(
    steps=steps,
    learning_rate=learning_rate,
    tv=tv,
    gradient='plain',
    optimizer='adam99',
    decay='cosine',
    start=start,
    **shared,
  )(client)


@_preset('Balunović, Dimitrov, Staab, Vechev: Bayesian Framework for Gradient Leakage. ICLR 2022.', reads=())
def prefix(client: Client, *, steps: int = 400, history: int = 100, tv: float = 0.0, **shared: Any) -> Attack:
  r"""Matches only what stands before the first dense layer, by L-BFGS: exact behind any randomness, such as PRECODE's.

  Balunović et al. (2022) match the layer's input; here the gradients of the layers before it are matched, too, which a
  single sample determines exactly. See `gradleak.attacks.prefix_matching`. It needs no labels.

  Formula:
    \min_x \; \frac{\lVert J(x)^\top \delta - g \rVert^2}{\lVert g \rVert^2}
    + \frac{\lVert h(x) - h \rVert^2}{\lVert h \rVert^2} + \text{tv} \cdot \text{TV}(x)

    \delta = W \, \partial b, \quad h = \frac{\partial W \, \partial b}{\lVert \partial b \rVert^2}, \quad
    J = \frac{\partial h}{\partial \theta_{\text{before}}}
  """
  return gradient_matching(client, lbfgs(history=history), steps, distance='prefix', tv=tv, labels='unused', **shared)


@_preset(DLG)
def dga(client: Client, *, steps: int = 500, history: int = 100, tv: float = 0.0, **shared: Any) -> Attack:
  r"""GradDefense's deep gradient attack (Wang et al. 2022, section VI-A): DLG, 500 steps of L-BFGS, known labels.

  Formula:
    \min_x \; \lVert \nabla_\theta L(f_\theta(x), y) - g \rVert_2^2 + \text{tv} \cdot \text{TV}(x)
  """
  return gradient_matching(client, lbfgs(history=history), steps, tv=tv, labels='known', **shared)


@_preset(CSDLG)
def gia(client: Client, *, steps: int = 1000, learning_rate: float = 0.1, tv: float = 1e-4, **shared: Any) -> Attack:
  r"""GradDefense's gradient inverting attack (Wang et al. 2022, section VI-A): csDLG, 1,000 steps.

  Formula:
    \min_{x \in [0, 1]^n} \; 1 - \frac{\langle \nabla_\theta L(f_\theta(x), y), g \rangle}
    {\lVert \nabla_\theta L(f_\theta(x), y) \rVert \, \lVert g \rVert} + \text{tv} \cdot \text{TV}(x)
  """
  return csdlg(steps=steps, learning_rate=learning_rate, tv=tv, **shared)(client)


@_preset(CSDLG)
def gs(client: Client, *, steps: int = 10_000, learning_rate: float = 0.1, tv: float = 1e-4, **shared: Any) -> Attack:
  r"""DCS²'s GradSim attacker (Wu et al. 2024): csDLG by Adam on the plain gradient, not boxed, labels known.

  Formula:
    \min_x \; 1 - \frac{\langle \nabla_\theta L(f_\theta(x), y), g \rangle}
    {\lVert \nabla_\theta L(f_\theta(x), y) \rVert \, \lVert g \rVert} + \text{tv} \cdot \text{TV}(x)
  """
  return csdlg(steps=steps, learning_rate=learning_rate, tv=tv, gradient='plain', box=False, **shared)(client)


@_preset(CINET, without=('start',))
def cinet(
  client: Client,
  *,
  steps: int = 2000,
  learning_rate: float = 1e-3,
  tv: float = 0.0,
  distance: str = 'cosine',
  gradient: str = 'sign',
  generator: str = 'untrained',
  **shared: Any,
) -> Attack:
  r"""CI-Net (Zhang et al. 2023): images from an untrained network, whose weights are optimised; labels known.

  Cosine distance, no TV, Adam on the sign at a constant rate; 2,000 steps for batches of 16 on CIFAR-10, 30,000 on
  ImageNet. The published victims have sigmoids in place of ReLU; others found that the attack fails on ReLU, tanh and
  GELU. The published code keeps the step with the best SSIM to the private images, ours that of the least objective.

  Formula:
    \min_w \; 1 - \cos(\nabla_\theta L(f_\theta(x), y), g) + \text{tv} \cdot \text{TV}(x), \quad x = G_w(z)
  """
  return gradient_matching(
    client,
    first_order('adam', learning_rate, steps, gradient=gradient),
    steps,
    distance=distance,
    tv=tv,
    labels='known',
    generator=generator,
    **shared,
  )


@_preset(MAGIA)
def magia(
  client: Client,
  *,
  steps: int = 6000,
  history: int = 100,
  tv: float = 0.005,
  subset: int = 1,
  subset_growth: int = 3000,
  **shared: Any,
) -> Attack:
  r"""MAGIA (arXiv 2509.18170): DLG with TV, and beside the whole batch the gradients of random subsets are matched.

  300 iterations of up to 20 evaluations of L-BFGS, images and labels together, squared distance, weights 0.999 and
  0.001; the subset grows from one sample to the whole batch over the first 150 iterations, the script's default (a
  constant size of 2 is its other documented run: `subset=2,subset_growth=0`). What rescales the subset's term is not
  published, see `Subsets`; the script also divides the subset's mean gradient by S and the observed one by N once more,
  takes means over entries there, draws a subset in each evaluation, and has no line search: not followed.

  Formula:
    \min_{x, y} \; (1 - w) \lVert \bar{g}_{1..N}(x, y) - g \rVert^2 + \frac{w}{f} \lVert \bar{g}_S(x, y) - g \rVert^2
    + \text{tv} \cdot \text{TV}(x), \quad f = \frac{N - |S|}{|S| \, (N - 1)}
  """
  return gradient_matching(
    client,
    lbfgs(history=history),
    steps,
    tv=tv,
    labels='optimised',
    subset=subset,
    subset_growth=subset_growth,
    **shared,
  )
