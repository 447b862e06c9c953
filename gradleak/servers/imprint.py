"""Imprint: a module in front of any network that writes single images into its gradient (Fowl et al., ICLR 2022).

In "Robbing the Fed", all K neurons of a dense layer take the same measurement of an image, h(x) = ⟨w, x⟩. An example is
the brightness. Neuron k fires above its own threshold, z_k = g·(h − c_k), with the c_k at quantiles of h. A second
dense layer returns the same from every neuron to the network. So a sample's gradient s = ∂ℓ/∂z_k is the same in all
neurons that fire. Neighbouring neurons then differ only by the sample in the bin c_k ≤ h < c_{k+1}. With ΔW = s·x and
Δb = s, its image is exactly the quotient, for any network behind the module.

Over several local steps the thresholds move, and the differences no longer cancel. The sparse variant therefore has an
activation that is also flat above the bin. It is clip(z, 0, g) of `z_k = g·(h − c_k) / (c_{k+1} − c_k)`. A sample then
reaches one neuron, and no difference is needed. It stays alone there as long as the steps of the others move no bin by
its width.
"""

import dataclasses
import math
import statistics
from collections.abc import Collection
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np

from gradleak.attacks.base import Attack, attack, closed_form
from gradleak.attacks.fidel import beyond_range, partial_reconstructions
from gradleak.core import errors
from gradleak.core.settings import Choice, Range
from gradleak.core.trees import Layer, Tree
from gradleak.federated import Client
from gradleak.federated.scenario import Scenario
from gradleak.modalities import IMAGES, Modality
from gradleak.models.model import Model, require, wrapped
from gradleak.servers.base import Server, one_round, server
from gradleak.threat import Observation

Bins = Annotated[int, Range(2, 65_536)]
Measurement = Annotated[str, Choice(('mean', 'random'))]
Gain = Annotated[float, Range(1e-6, 1e6)]
Quantiles = Annotated[str, Choice(('normal', 'laplace', 'empirical'))]

_NAME = 'imprint'
# Mean and standard deviation of a measurement of natural images: of 2,000 in CIFAR-10, and over five draws of w.
_NATURAL = {'mean': (0.47, 0.13), 'random': (0.0, 0.2)}
_STANDARDISED = (0.0, 1.0)  # of standardised entries: at most this deviation of their mean
# The outermost edges are this many standard deviations from the mean.
_END = 10
# What leaves its modality's range, or its bin in units of the width, by more is a mixture.
_SLACK = 0.02
# The precision of the products whose differences are taken: TF32, the default of a GPU, leaves 60 dB.
_EXACT = jax.lax.Precision.HIGHEST


def measurement_vector(key: jax.Array, size: int, measurement: str) -> jax.Array:
  """Returns w, float32 [size]: 1 / size for the 'mean'; a 'random' w has mean 0 and length 1."""
  if measurement == 'mean':
    return jnp.full(size, 1 / size, jnp.float32)
  w = jax.random.normal(key, (size,))
  w = w - w.mean()
  return w / jnp.linalg.norm(w)


def bin_edges(
  bins: int, quantiles: str, *, measured: np.ndarray | None = None, measurement: str = 'mean', kind: Modality = IMAGES
) -> np.ndarray:
  """Returns the edges c_0 < … < c_K, float64 [bins + 1], of bins that images fall into equally often.

  Args:
    bins: their number K.
    quantiles: of the 'normal' or 'laplace' distribution with the mean and standard deviation of `measured`, or
      'empirical' ones of `measured` itself.
    measured: measurements of auxiliary images [P]. Without them, the mean and deviation are those of natural images,
      and 0 and 1 for entries without a range, such as standardised rows.
    measurement: what is measured, 'mean' or 'random'.
    kind: the modality.

  Raises:
    UsageError: for 'empirical' without auxiliary images.
  """
  if measured is None and quantiles == 'empirical':
    raise errors.UsageError(
      'imprint(quantiles=empirical) needs auxiliary samples: give public=(samples, targets) to gradleak.scenario, '
      "or take 'normal' or 'laplace'"
    )
  usual = _STANDARDISED if math.isinf(kind.box[1]) else _NATURAL[measurement]
  mean, stddev = usual if measured is None else (np.mean(measured), np.std(measured))
  shares = np.arange(1, bins) / bins
  if quantiles == 'empirical':
    inner = np.quantile(measured, shares)
  elif quantiles == 'laplace':
    inner = mean - stddev / np.sqrt(2) * np.sign(shares - 0.5) * np.log1p(-2 * np.abs(shares - 0.5))
  else:
    normal = statistics.NormalDist(mean, stddev or 1e-6)  # type: ignore[arg-type]
    inner = np.array([normal.inv_cdf(share) for share in shares])
  edges = np.concatenate([[mean - _END * stddev], inner, [mean + _END * stddev]])
  # Auxiliary images with equal measurements leave bins of width 0, and a sparse module divides by the width.
  least = max(1e-3 * stddev / bins, 1e-6)
  return np.maximum.accumulate(edges - least * np.arange(bins + 1)) + least * np.arange(bins + 1)


def module_parameters(w: jax.Array, edges: np.ndarray, *, gain: float = 1.0, sparse: bool = False) -> Tree:
  """Returns the parameters of the module: {'measure', 'return'}, each a dense layer {'kernel', 'bias'}.

  Args:
    w: the measurement [D].
    edges: of K bins, [K + 1].
    gain: g. The second layer divides by it, so that it does not change what the network is given.
    sparse: whether the slope of a neuron is divided by the width of its bin.
  """
  widths = np.diff(edges)
  slopes = gain / widths if sparse else np.full(len(widths), gain)
  # The mean over the neurons: for any number of bins, an image becomes brighter by about its own deviation.
  back = ((edges[-1] - edges[0]) / (2 * _END) if sparse else 1.0) / (gain * len(widths))
  return {
    'measure': {
      'kernel': w.reshape(-1, 1) * jnp.asarray(slopes, jnp.float32).reshape(1, -1),
      'bias': jnp.asarray(-slopes * edges[:-1], jnp.float32),
    },
    'return': {'kernel': jnp.full((len(widths), w.size), back, jnp.float32), 'bias': jnp.zeros(w.size, jnp.float32)},
  }


def insert(model: Model, module: Tree, *, gain: float = 1.0, sparse: bool = False, residual: bool = True) -> Model:
  """Returns `model` with an imprint module in front: its input is x + A₂·φ(A₁·x), shaped like x.

  Its parameters are `{'imprint': module, 'model': those of the model}`. Statistics of BatchNorm and the other functions
  of the model (`features`, `layers`, `penalised`) are unchanged.

  Args:
    model: any `Model`, also a wrapped one.
    module: of `module_parameters`, for images of one shape.
    gain: where the sparse activation becomes flat.
    sparse: whether φ(z) is clip(z, 0, gain) instead of max(z, 0).
    residual: whether x is added; else the input is A₂·φ(A₁·x).
  """

  def passed(variables, images):
    params, rows = variables['params'][_NAME], images.reshape(images.shape[0], -1)
    z = jnp.matmul(rows, params['measure']['kernel'], precision=_EXACT) + params['measure']['bias'].reshape(1, -1)
    fired = jnp.clip(z, 0, jnp.asarray(gain, z.dtype)) if sparse else jax.nn.relu(z)
    added = jnp.matmul(fired, params['return']['kernel'], precision=_EXACT) + params['return']['bias'].reshape(1, -1)
    added = added.reshape(images.shape)
    return images + added if residual else added

  def init(key, sample_shape):
    variables = model.init(key, sample_shape)
    return {**variables, 'params': {_NAME: module, 'model': variables['params']}}

  def layers(sample_shape):
    own = [
      Layer(f'{_NAME}/{part}', tuple((_NAME, part, name) for name in ('kernel', 'bias')))
      for part in ('measure', 'return')
    ]
    behind = [
      Layer(f'model/{layer.name}', tuple(('model', *path) for path in layer.paths))
      for layer in require(model, 'layers')(sample_shape)
    ]
    return (*own, *behind)

  return wrapped(
    model,
    f'{model.name}+{_NAME}',
    init,
    lambda variables, images: (
      {**variables, 'params': variables['params']['model']},
      passed(variables, images),
    ),
    layers=None if model.layers is None else layers,
    layout=None,  # the module that is put in front has no tensors of PyTorch
    normalisation=None,  # the module takes the pixels as they are
    first_block=None,
  )


@server
def imprint_server(
  *,
  bins: Bins = 128,
  measurement: Measurement = 'mean',
  gain: Gain = 1e-3,
  quantiles: Quantiles = 'normal',
  sparse: bool = False,
  residual: bool = True,
) -> Server:
  """The server that sends the model with an imprint module in front.

  If the scenario has public images, the distribution of the measurement is taken from them. The key draws the random
  measurement.

  Args:
    bins: K. A sample is alone in its bin with probability (1 − 1/K)^(N−1).
    measurement: 'mean' (brightness) or 'random'.
    gain: g, the scale of the first layer. Its gradient grows with 1/g, so that a small g outweighs absolute noise.
    quantiles: 'normal', 'laplace' or 'empirical', see `bin_edges`.
    sparse: the variant for several local steps.
    residual: whether the network behind the module is given the image plus what the module returns, so that it goes on
      working; published is False, and the network is given what the module returns alone.

  Raises (in `prepare`):
    UsageError: for empirical quantiles without public images, and for a model of tokens.
  """

  def prepare(key: jax.Array, scenario: Scenario, batch_size: int) -> Scenario:
    del batch_size
    if scenario.client.model.takes_ids:
      raise errors.UsageError(
        f'imprint measures the values of a sample, and the model {scenario.client.model.name!r} takes tokens: take '
        'decepticons'
      )
    w = measurement_vector(key, int(np.prod(scenario.samples.shape[1:])), measurement)
    measured = None
    if scenario.public is not None:
      public = np.asarray(scenario.public[0], np.float64)
      measured = public.reshape(len(public), -1) @ np.asarray(w, np.float64)
    kind = scenario.client.modality
    edges = bin_edges(bins, quantiles, measured=measured, measurement=measurement, kind=kind)
    module = module_parameters(w, edges, gain=gain, sparse=sparse)
    model = insert(scenario.client.model, module, gain=gain, sparse=sparse, residual=residual)
    given, shape = scenario.client, scenario.samples.shape[1:]
    known = {layer.name for layer in given.model.layers(shape)} if given.model.layers is not None else set()
    frozen, private = (tuple(_inside(name, known) for name in names) for names in (given.frozen, given.private))
    return scenario._replace(
      client=dataclasses.replace(scenario.client, model=model, frozen=frozen, private=private),
      variables={**scenario.variables, 'params': {_NAME: module, 'model': scenario.variables['params']}},
    )

  return one_round(prepare)


def _inside(name: str, layers: Collection[str]) -> str:
  """Returns the name behind the imprint module of a layer or module of the honest model: a path begins with 'model'."""
  if name in layers:
    return f'model/{name}'
  path = name.replace('.', '/')
  return f'/model/{path.strip("/")}' if '/' in path else name


def recover(
  update: Tree, module: Tree, *, gain: float = 1.0, sparse: bool = False, kind: Modality = IMAGES
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Returns what each bin holds, the surest first: (images [K, D], shares [K], whether there is anything bool [K]).

  An image that is alone in its bin has pixels in [0, 1], and its measurement lies in its bin. The order is first by
  whether the measurement lies in the bin, then by how far the entries leave the modality's range. The third criterion
  is the size of the share in the gradient, since rounding matters least for a large one.

  Args:
    update: of the first layer of the module, {'kernel' [D, K], 'bias' [K]}; a gradient or a delta.
    module: the parameters of this layer as sent.
    gain, sparse: as the module was built.
    kind: the modality.
  """

  def differences(x):
    return x if sparse else x - jnp.concatenate([x[..., 1:], jnp.zeros_like(x[..., :1])], axis=-1)

  shares = differences(update['bias'])
  images, alive = partial_reconstructions(differences(update['kernel']), shares)
  beyond = beyond_range(images, kind)
  z = jnp.einsum('kd,dk->k', images, module['kernel'], precision=_EXACT) + module['bias']
  widths = -jnp.diff(module['bias'], append=-jnp.inf)  # the topmost bin has no end
  widths = jnp.full_like(widths, gain) if sparse else widths
  slack = jnp.asarray(_SLACK, images.dtype)
  elsewhere = (z < -slack * widths) | (z > (1 + slack) * widths)
  order = jnp.lexsort((-jnp.abs(shares), jnp.where(beyond <= slack, 0, beyond), elsewhere, ~alive))
  return images[order], shares[order], alive[order]


@attack(
  citation='Fowl, Geiping, Czaja, Goldblum, Goldstein: Robbing the Fed. ICLR 2022.',
  server=imprint_server,
)
def imprint(
  client: Client,
  *,
  bins: Bins = 128,
  measurement: Measurement = 'mean',
  gain: Gain = 1e-3,
  quantiles: Quantiles = 'normal',
  sparse: bool = False,
  residual: bool = True,
) -> Attack:
  r"""Robbing the Fed (Fowl et al. 2022): reads one image per bin of the module that `imprint_server` inserts.

  Closed-form. It returns as many images as the batch has samples, but at most one per bin, the surest first. Images
  beyond those that were found are black. It returns no labels.

  Formula:
    z_k = a \, (\langle w, x \rangle - c_k), \quad a = \text{gain}

    \hat{x}_k = \frac{\Delta W_k - \Delta W_{k+1}}
    {\Delta b_k - \Delta b_{k+1}}, \quad \text{sparse: }
    \hat{x}_k = \Delta W_k / \Delta b_k

  Args:
    client: whose modality is read; the module is the same for every client.
    bins, measurement, gain, quantiles, sparse, residual: see `imprint_server`.

  Raises (when run):
    UsageError: for a model without the module.
  """
  del residual

  def read(observation: Observation) -> tuple[jax.Array, None]:
    params = observation.variables['params']
    if _NAME not in params:
      raise errors.UsageError(
        "the attack imprint reads a module that the model sent does not have: send that of the attack's own server"
      )
    module, update = (tree['measure'] for tree in (params[_NAME], observation.update[_NAME]))
    images, _, _ = recover(update, module, gain=gain, sparse=sparse, kind=client.modality)
    return images[: observation.batch_shape[0]], None

  return closed_form(read, auxiliary_data=True)
