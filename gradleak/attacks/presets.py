"""Published attacks as settings of gradient matching.

The keyword arguments are settings. Their defaults are the published values; where the paper does not state one, that of
the authors' code. Settings annotated `float` are traced, the others decide the compilation. `csdlg(tv=1e-6)` is the
attack with its settings, `csdlg(tv=1e-6)(client)` its functions for the client that is simulated.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import optax

from gradleak.attacks.base import Attack, AttackMethod, attack
from gradleak.attacks.matching import TERMS, Ladder, Matching, composed, gradient_matching, settings
from gradleak.attacks.matching.distances import DISTANCES
from gradleak.attacks.matching.optimizers import first_order, lbfgs
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


# Settings of `gradient_matching` that a preset has where it names them itself.
_OWN = ('distance', 'layer_weighting', 'tv', 'l2', 'box', 'denoising', 'gaussian', 'relaxation')

# How texts and tables call the types of settings whose default is None.
_TYPES = {'generator': str | None, 'subset': int | None}


class Preset(NamedTuple):
  """An attack as data.

  Attributes:
    solver: the optimizer of the dummy samples.
    steps: their number.
    settings: of `gradient_matching`: the weights of terms, the start, the box.
    labels: the mode that it was published with.
  """

  solver: optax.GradientTransformation
  steps: int
  settings: Mapping[str, Any]
  labels: str = 'known'


class Climb(NamedTuple):
  """A search at several weights of total variation, as data.

  Attributes:
    preset: what all rungs have in common.
    settings: of `Ladder`.
    term: whose weight it is.
  """

  preset: Preset
  settings: Mapping[str, Any]
  term: str = 'tv'


def offered(*, all_settings: bool = True) -> dict[str, inspect.Parameter]:
  """Returns the settings that presets have beside their own, or only those of terms that are left out by default.

  A number is annotated `float`, and so traced.
  """
  found = {}
  for name, parameter in settings().items():
    optional = name in TERMS and TERMS[name].weight is None and not TERMS[name].beside
    if name in _OWN or not (all_settings or optional):
      continue
    static = _TYPES.get(name, parameter.annotation)
    kind = static if parameter.default is None else type(parameter.default)
    found[name] = parameter.replace(annotation=kind)
  return found


def with_settings(
  function: Callable[..., Any], make: Callable[..., Attack], given: Mapping[str, inspect.Parameter]
) -> Callable[..., Attack]:
  """Returns the factory (client, *, settings) -> `Attack` of a function that takes only its own settings.

  Args:
    function: (*, its own settings) -> anything; it has the docstring.
    make: (client, what the function returns, values of the further settings) -> `Attack`.
    given: the further settings by name; its own come first.
  """
  own = {name: one for name, one in inspect.signature(function).parameters.items() if one.kind is one.KEYWORD_ONLY}
  more = {name: one for name, one in given.items() if name not in own}

  @functools.wraps(function)
  def factory(client: Client, **values: Any) -> Attack:
    made = function(**{name: value for name, value in values.items() if name in own})
    return make(client, made, {name: value for name, value in values.items() if name not in own})

  client = inspect.Parameter('client', inspect.Parameter.POSITIONAL_ONLY, annotation=Client)
  factory.__signature__ = inspect.Signature([client, *own.values(), *more.values()])  # type: ignore[attr-defined]
  return factory


def matched(client: Client, made: Preset, further: Mapping[str, Any]) -> Attack:
  """Returns the attack that a preset and further settings are."""
  return gradient_matching(client, made.solver, made.steps, labels=made.labels, **{**made.settings, **further})


def climbed(client: Client, made: Climb, further: Mapping[str, Any]) -> Attack:
  """Returns the attack that a ladder and further settings are."""
  base = made.preset

  def rung(weight: float | jax.Array) -> Matching:
    return composed(client, base.solver, base.steps, {**base.settings, **further, made.term: weight})

  return Ladder(rung, **made.settings).attack(base.labels)


def preset(
  citation: str,
  label_rule: str = 'bias_corrected',
  reads: tuple[str, ...] = ('weights', 'noise', 'clip'),
  without: tuple[str, ...] = (),
  make: Callable[..., Attack] = matched,
) -> Callable[[Callable[..., Any]], Callable[..., AttackMethod]]:
  """Returns the decorator of a function (*, its own settings) -> `Preset`; all others but those `without` are added.

  Args:
    citation, reads, label_rule: of the attack.
    without: settings that are not added.
    make: (client, what the function returns, values of the settings that are added) -> `Attack`.
  """

  def decorate(function: Callable[..., Any]) -> Callable[..., AttackMethod]:
    shared = {name: one for name, one in offered().items() if name not in without}
    return attack(citation=citation, reads=reads, label_rule=label_rule)(with_settings(function, make, shared))

  return decorate


@preset(DLG)
def dlg(*, steps: int = 6000, history: int = 100, tv: float = 0.0) -> Preset:
  r"""Deep leakage from gradients (Zhu, Liu and Han 2019): samples and labels together, squared distance, L-BFGS.

  The published code runs 300 × 20 iterations of L-BFGS without a line search, from N(0, 1), without box or restarts.
  Ours has a line search, so that it does not diverge. One step is one evaluation.

  Formula:
    \min_{x, y} \; \lVert \nabla_\theta L(f_\theta(x), \text{softmax}(y)) - g \rVert_2^2 + \text{tv} \cdot \text{TV}(x)
  """
  return Preset(lbfgs(history=history), steps, {'tv': tv}, 'optimised')


@preset(IDLG, 'idlg')
def idlg(*, steps: int = 6000, history: int = 100, tv: float = 0.0) -> Preset:
  r"""Improved DLG (Zhao, Mopuri and Bilen 2020): DLG with the label read from the last layer's gradient first.

  Formula:
    y = \arg\min_c \sum_i \frac{\partial L}{\partial W_{ic}}, \quad
    \min_x \; \lVert \nabla_\theta L(f_\theta(x), y) - g \rVert_2^2 + \text{tv} \cdot \text{TV}(x)
  """
  return Preset(lbfgs(history=history), steps, {'tv': tv}, 'inferred')


@preset(CSDLG)
def csdlg(
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
) -> Preset:
  r"""Inverting gradients (Geiping et al. 2020), "csDLG" in OUTPOST: cosine distance, TV, Adam on the sign, boxed.

  The published command line has 24,000 steps and TV 1e-4. The CIFAR notebooks have TV 1e-6, the library 1e-1 unsigned.

  Formula:
    \min_{x \in [0, 1]^n} \; 1 - \frac{\langle \nabla_\theta L(f_\theta(x), y), g \rangle}
    {\lVert \nabla_\theta L(f_\theta(x), y) \rVert \, \lVert g \rVert} + \text{tv} \cdot \text{TV}(x)
  """
  solver = first_order(optimizer, learning_rate, steps, gradient=gradient, decay=decay)
  given = {'distance': distance, 'tv': tv, 'l2': l2, 'box': box, 'layer_weighting': layer_weighting}
  return Preset(solver, steps, given)


@preset(CSDLG)
def csdlg_lbfgs(*, steps: int = 3000, history: int = 100, tv: float = 0.0) -> Preset:
  r"""OUTPOST's csDLG (Wang et al. 2024, section V-B): the cosine distance by L-BFGS, no prior, no box, labels known.

  Formula:
    \min_x \; 1 - \frac{\langle \nabla_\theta L(f_\theta(x), y), g \rangle}
    {\lVert \nabla_\theta L(f_\theta(x), y) \rVert \, \lVert g \rVert} + \text{tv} \cdot \text{TV}(x)
  """
  return Preset(lbfgs(history=history), steps, {'distance': 'cosine', 'tv': tv})


@preset(CSDLG)
def csdlg_fast(
  *,
  steps: int = 2000,
  learning_rate: float = 0.03,
  tv: float = 1e-4,
  start: str = 'constant',
) -> Preset:
  r"""The objective and knowledge of csDLG, in a twelfth of its steps: Adam on the plain gradient, cosine decay, grey.

  With the sign, every pixel moves by the learning rate in each step until that has decayed. Adam with a memory of a
  hundred steps makes small steps for pixels that have converged.

  Formula:
    \min_{x \in [0, 1]^n} \; 1 - \frac{\langle \nabla_\theta L(f_\theta(x), y), g \rangle}
    {\lVert \nabla_\theta L(f_\theta(x), y) \rVert \, \lVert g \rVert} + \text{tv} \cdot \text{TV}(x)
  """
  solver = first_order('adam99', learning_rate, steps, decay='cosine')
  return Preset(solver, steps, {'distance': 'cosine', 'tv': tv, 'box': True, 'start': start})


@preset(CSDLG, make=climbed)
def ladder(
  *,
  steps: int = 600,
  learning_rate: float = 0.1,
  lowest: float = 1e-4,
  highest: float = 1e-1,
  rungs: int = 4,
  slack: float = 2.0,
  descent: float = 30.0,
  start: str = 'normal',
) -> Climb:
  r"""csDLG at several weights of total variation at once, of which it keeps the smoothest that still matches.

  Weights rise from `lowest` to `highest` by equal factors. It keeps the rung with the largest weight whose distance is
  at most `slack` times the least. So no weight has to be known: which one helps differs by network and image. A rung
  starts at `descent` times its weight, which falls over the first seven tenths of the steps. The objective that results
  state is that of the first rung. Adam on the sign, with cosine decay.

  Formula:
    x_k = \arg\min_{x \in [0, 1]^n} \; d(x) + \text{tv}_k \cdot \text{TV}(x), \quad
    d(x) = 1 - \cos(\nabla_\theta L(f_\theta(x), y), g)

    k = \max \{ k : d(x_k) \le \text{slack} \cdot \min_j d(x_j) \}

  Args:
    steps: number of steps of each rung.
    learning_rate: of Adam at the first step.
    lowest, highest: weights of total variation of the first rung and of the last.
    rungs: their number, 2 to 16.
    slack: how many times the least distance the kept rung may have, at least 1.
    descent: how many times its weight a rung starts with, at least 1.
    start: the first images, as in `gradient_matching`.
  """
  solver = first_order('adam', learning_rate, steps, gradient='sign', decay='cosine')
  base = Preset(solver, steps, {'distance': 'cosine', 'box': True, 'start': start})
  return Climb(base, {'lowest': lowest, 'highest': highest, 'rungs': rungs, 'slack': slack, 'descent': descent})


@preset('Matching with annealed derivatives: our own method.', make=climbed, without=('tv', 'roughness'))
def annealed(
  *,
  steps: int = 5000,
  learning_rate: float = 0.1,
  lowest: float = 2e-3,
  highest: float = 0.032,
  rungs: int = 3,
  slack: float = 3.0,
  descent: float = 100.0,
  softness: float = 1.5,
  start: str = 'uniform',
) -> Climb:
  r"""A ladder whose derivatives of ReLUs and max pools are soft at first, for convolutional networks with max pools.

  The gradient of a network jumps where a window of a max pool changes its largest entry, and where a pre-activation
  changes its sign. At such jumps the search of `ladder` stops. Here τ starts at `softness` and falls to a hundredth
  over the first eight tenths of the steps, see `gradleak.models.soft_slopes`. Logits are exact throughout, gradients at
  the end. Rungs differ in the weight of `roughness`: brightness may change more than colours do, and slopes may stand.

  Formula:
    \text{relu}'_\tau(z) = \sigma(z / \tau s), \quad
    \frac{\partial}{\partial z} \max_{i \in \text{window}} z_i = \text{softmax}(z / \tau s), \quad
    s^2 = \text{mean}(z^2)

    x_k = \arg\min_{x \in [0, 1]^n} \; 1 - \cos(\nabla_\theta L_\tau(f_\theta(x), y), g)
    + w_k \cdot \text{roughness}(x), \quad \tau \to 0

  Args:
    steps: number of steps of each rung.
    learning_rate: of Adam at the first step.
    lowest, highest: weights of roughness of the first rung and of the last.
    rungs: their number, 2 to 16.
    slack: how many times the least distance the kept rung may have, at least 1.
    descent: how many times its weight a rung starts with, at least 1.
    softness: τ at the first step, above 0.
    start: the first images, as in `gradient_matching`.
  """
  solver = first_order('adam', learning_rate, steps, gradient='sign', decay='cosine')
  base = Preset(solver, steps, {'distance': 'cosine', 'box': True, 'start': start, 'softness': softness})
  rungs_of = {'lowest': lowest, 'highest': highest, 'rungs': rungs, 'slack': slack, 'descent': descent}
  return Climb(base, rungs_of, 'roughness')


@preset(
  'Balunović, Dimitrov, Staab, Vechev: Bayesian Framework for Gradient Leakage. ICLR 2022.',
  reads=(),
  without=(*DISTANCES['prefix'].ignores, 'order', 'subset', 'subset_weight', 'subset_growth'),
)
def prefix(*, steps: int = 400, history: int = 100, tv: float = 0.0) -> Preset:
  r"""Matches only what stands before the first dense layer, by L-BFGS: exact behind any randomness, such as PRECODE's.

  Balunović et al. (2022) match the layer's input; here the gradients of the layers before it are matched, too, which a
  single sample determines exactly. See `gradleak.attacks.matching.prefix`. It needs no labels. A delta has to be a
  multiple of one gradient, as that of one step of SGD.

  Formula:
    \min_x \; \frac{\lVert J(x)^\top \delta - g \rVert^2}{\lVert g \rVert^2}
    + \frac{\lVert h(x) - h \rVert^2}{\lVert h \rVert^2} + \text{tv} \cdot \text{TV}(x)

    \delta = W \, \partial b, \quad h = \frac{\partial W \, \partial b}{\lVert \partial b \rVert^2}, \quad
    J = \frac{\partial h}{\partial \theta_{\text{before}}}
  """
  return Preset(lbfgs(history=history), steps, {'distance': 'prefix', 'tv': tv}, 'unused')


@preset(DLG)
def dga(*, steps: int = 500, history: int = 100, tv: float = 0.0) -> Preset:
  r"""GradDefense's deep gradient attack (Wang et al. 2022, section VI-A): DLG, 500 steps of L-BFGS, known labels.

  Formula:
    \min_x \; \lVert \nabla_\theta L(f_\theta(x), y) - g \rVert_2^2 + \text{tv} \cdot \text{TV}(x)
  """
  return Preset(lbfgs(history=history), steps, {'tv': tv})


@preset(CSDLG)
def gia(*, steps: int = 1000, learning_rate: float = 0.1, tv: float = 1e-4) -> Preset:
  r"""GradDefense's gradient inverting attack (Wang et al. 2022, section VI-A): csDLG, 1,000 steps.

  Formula:
    \min_{x \in [0, 1]^n} \; 1 - \frac{\langle \nabla_\theta L(f_\theta(x), y), g \rangle}
    {\lVert \nabla_\theta L(f_\theta(x), y) \rVert \, \lVert g \rVert} + \text{tv} \cdot \text{TV}(x)
  """
  solver = first_order('adam', learning_rate, steps, gradient='sign', decay='step')
  return Preset(solver, steps, {'distance': 'cosine', 'tv': tv, 'box': True})


@preset(CSDLG)
def gs(*, steps: int = 10_000, learning_rate: float = 0.1, tv: float = 1e-4) -> Preset:
  r"""DCS²'s GradSim attacker (Wu et al. 2024): csDLG by Adam on the plain gradient, not boxed, labels known.

  Formula:
    \min_x \; 1 - \frac{\langle \nabla_\theta L(f_\theta(x), y), g \rangle}
    {\lVert \nabla_\theta L(f_\theta(x), y) \rVert \, \lVert g \rVert} + \text{tv} \cdot \text{TV}(x)
  """
  solver = first_order('adam', learning_rate, steps, decay='step')
  return Preset(solver, steps, {'distance': 'cosine', 'tv': tv})


@preset(CINET, without=('start',))
def cinet(
  *,
  steps: int = 2000,
  learning_rate: float = 1e-3,
  tv: float = 0.0,
  distance: str = 'cosine',
  gradient: str = 'sign',
  generator: str = 'untrained',
) -> Preset:
  r"""CI-Net (Zhang et al. 2023): images from an untrained network, whose weights are optimised; labels known.

  Cosine distance, no TV, Adam on the sign at a constant rate; 2,000 steps for batches of 16 on CIFAR-10, 30,000 on
  ImageNet. The published victims have sigmoids in place of ReLU; others found that the attack fails on ReLU, tanh and
  GELU. The published code keeps the step with the best SSIM to the private images, ours that of the least objective.

  Formula:
    \min_w \; 1 - \cos(\nabla_\theta L(f_\theta(x), y), g) + \text{tv} \cdot \text{TV}(x), \quad x = G_w(z)
  """
  solver = first_order('adam', learning_rate, steps, gradient=gradient)
  return Preset(solver, steps, {'distance': distance, 'tv': tv, 'generator': generator})


@preset(MAGIA)
def magia(
  *,
  steps: int = 6000,
  history: int = 100,
  tv: float = 0.005,
  subset: int = 1,
  subset_growth: int = 3000,
) -> Preset:
  r"""MAGIA (arXiv 2509.18170): DLG with TV, and beside the whole batch the gradients of random subsets are matched.

  The published attack takes 300 iterations of up to 20 evaluations of L-BFGS, for samples and labels together. It has
  the squared distance with weights 0.999 and 0.001. The subset grows from one sample to the whole batch over the first
  150 iterations, which is the script's default. Its other documented run has a constant size of two
  (`subset=2,subset_growth=0`). The factor that rescales the subset's term is not published, see `Subsets`. The
  following steps of the script are not followed. It also divides the subset's mean gradient by S and the observed one
  by N once more, and takes means over entries there. It draws a subset in each evaluation, and has no line search.

  Formula:
    \min_{x, y} \; (1 - w) \lVert \bar{g}_{1..N}(x, y) - g \rVert^2 + \frac{w}{f} \lVert \bar{g}_S(x, y) - g \rVert^2
    + \text{tv} \cdot \text{TV}(x), \quad f = \frac{N - |S|}{|S| \, (N - 1)}
  """
  given = {'tv': tv, 'subset': subset, 'subset_growth': subset_growth}
  return Preset(lbfgs(history=history), steps, given, 'optimised')
