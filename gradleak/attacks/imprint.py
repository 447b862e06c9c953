"""Imprint: a module in front of any network that writes single images into its gradient (Fowl et al., ICLR 2022).

In "Robbing the Fed" all K neurons of a dense layer take the same measurement of an image, h(x) = ⟨w, x⟩, its brightness
for one, and neuron k fires above a threshold of its own: z_k = g·(h − c_k), with the c_k at quantiles of h. A second
dense layer hands back the same to the network from every neuron, so that a sample's gradient s = ∂ℓ/∂z_k is the same in
all that fire. What neighbours differ by is then the sample in the bin c_k ≤ h < c_{k+1} alone: with ΔW = s·x, Δb = s,
its image is the quotient, exactly, whatever stands behind the module.

Over several local steps thresholds move and differences no longer cancel. The sparse variant has an activation that is
flat above the bin, too, clip(z, 0, g) of z_k = g·(h − c_k) / (c_{k+1} − c_k): a sample then reaches one neuron, and
nothing is to be subtracted. It stays alone there as long as the others' steps do not move a bin by its own width.
"""

import dataclasses
import statistics

import jax
import jax.numpy as jnp
import numpy as np

from gradleak import errors
from gradleak.attacks import base, fidel
from gradleak.models.model import Model, require
from gradleak.trees import Layer

MEASUREMENTS = ('mean', 'random')
QUANTILES = ('normal', 'laplace', 'empirical')

_NAME = 'imprint'
# Mean and standard deviation of a measurement of natural images: of 2,000 in CIFAR-10, and over five draws of w.
_NATURAL = {'mean': (0.47, 0.13), 'random': (0.0, 0.2)}
# Bins end so many standard deviations from the mean: below and above there is nothing.
_END = 10
# What leaves the box of pixels, or its bin in units of its width, by more than this is a mixture.
_SLACK = 0.02
# The products whose differences are taken: TF32, a GPU's default, leaves 60 dB of them.
_EXACT = jax.lax.Precision.HIGHEST


def measurement_vector(key, size, measurement):
  """Returns w, float32 [size]: 1 / size for the 'mean'; 'random' directions have mean 0 and length 1."""
  if measurement == 'mean':
    return jnp.full(size, 1 / size, jnp.float32)
  w = jax.random.normal(key, (size,))
  w = w - w.mean()
  return w / jnp.linalg.norm(w)


def bin_edges(bins, quantiles, *, measured=None, measurement='mean'):
  """Returns the edges c_0 < … < c_K, float64 [bins + 1], of bins that images fall into alike often.

  Args:
    bins: their number K.
    quantiles: 'normal' or 'laplace', with mean and standard deviation of what was measured; 'empirical', its own.
    measured: measurements of auxiliary images [P]. Without them 'normal' and 'laplace' have those of natural images.
    measurement: what is measured, a name of `MEASUREMENTS`.

  Raises:
    UsageError: for 'empirical' without auxiliary images.
  """
  if measured is None and quantiles == 'empirical':
    raise errors.UsageError(
      'imprint(quantiles=empirical) needs auxiliary images: give public=(images, labels) to gradleak.scenario, '
      "or take 'normal' or 'laplace'"
    )
  mean, stddev = _NATURAL[measurement] if measured is None else (np.mean(measured), np.std(measured))
  shares = np.arange(1, bins) / bins
  if quantiles == 'empirical':
    inner = np.quantile(measured, shares)
  elif quantiles == 'laplace':
    inner = mean - stddev / np.sqrt(2) * np.sign(shares - 0.5) * np.log1p(-2 * np.abs(shares - 0.5))
  else:
    inner = np.array([statistics.NormalDist(mean, stddev or 1e-6).inv_cdf(share) for share in shares])
  edges = np.concatenate([[mean - _END * stddev], inner, [mean + _END * stddev]])
  # Auxiliary images that measure alike leave no bin between them, and a sparse one divides by its width.
  least = max(1e-3 * stddev / bins, 1e-6)
  return np.maximum.accumulate(edges - least * np.arange(bins + 1)) + least * np.arange(bins + 1)


def module_parameters(w, edges, *, gain=1.0, sparse=False):
  """Returns the module's parameters: {'measure', 'return'}, a dense layer's {'kernel', 'bias'} each.

  Args:
    w: the measurement [D].
    edges: of K bins, [K + 1].
    gain: g. The second layer divides by it, so that the network sees the same image.
    sparse: whether a neuron's slope is steepened by its bin's width.
  """
  widths = np.diff(edges)
  slopes = gain / widths if sparse else np.full(len(widths), gain)
  # On average over the bins, so that an image becomes brighter by about its own deviation, whatever their number.
  back = ((edges[-1] - edges[0]) / (2 * _END) if sparse else 1.0) / (gain * len(widths))
  return {
    'measure': {
      'kernel': w.reshape(-1, 1) * jnp.asarray(slopes, jnp.float32).reshape(1, -1),
      'bias': jnp.asarray(-slopes * edges[:-1], jnp.float32),
    },
    'return': {'kernel': jnp.full((len(widths), w.size), back, jnp.float32), 'bias': jnp.zeros(w.size, jnp.float32)},
  }


def insert(model, module, *, gain=1.0, sparse=False):
  """Returns `model` with an imprint module in front: its input is x + A₂·φ(A₁·x), shaped like x.

  Its parameters are {'imprint': module, 'model': the model's own}; statistics of BatchNorm and everything else that
  the model offers (`features`, `layers`, `penalised`) stay what they were.

  Args:
    model: a `Model`; wrapped ones as well.
    module: of `module_parameters`, for images of one shape.
    gain: where the sparse activation becomes flat.
    sparse: whether φ(z) = clip(z, 0, gain) in place of max(z, 0).
  """

  def inner(variables):
    return {**variables, 'params': variables['params']['model']}

  def passed(variables, images):
    params, rows = variables['params'][_NAME], images.reshape(images.shape[0], -1)
    z = jnp.matmul(rows, params['measure']['kernel'], precision=_EXACT) + params['measure']['bias'].reshape(1, -1)
    fired = jnp.clip(z, 0, jnp.asarray(gain, z.dtype)) if sparse else jax.nn.relu(z)
    added = jnp.matmul(fired, params['return']['kernel'], precision=_EXACT) + params['return']['bias'].reshape(1, -1)
    return images + added.reshape(images.shape)

  def init(key, image_shape):
    variables = model.init(key, image_shape)
    return {**variables, 'params': {_NAME: module, 'model': variables['params']}}

  def apply(variables, images, train=False, key=None):
    return model.apply(inner(variables), passed(variables, images), train, key)

  def penalised(variables, images, train=False, key=None):
    return model.penalised(inner(variables), passed(variables, images), train, key)

  def features(variables, images):
    return model.features(inner(variables), passed(variables, images))

  def layers(image_shape):
    own = [
      Layer(f'{_NAME}/{part}', tuple((_NAME, part, name) for name in ('kernel', 'bias')))
      for part in ('measure', 'return')
    ]
    behind = [
      Layer(f'model/{layer.name}', tuple(('model', *path) for path in layer.paths))
      for layer in require(model, 'layers')(image_shape)
    ]
    return (*own, *behind)

  return Model(
    f'{model.name}+{_NAME}',
    init,
    apply,
    None if model.features is None else features,
    None if model.layers is None else layers,
    None if model.penalised is None else penalised,
  )


def _check(bins, measurement, gain, quantiles):
  errors.check_number('imprint(bins)', bins, low=2, high=65_536, integer=True)
  errors.check_number('imprint(gain)', gain, low=1e-6, high=1e6)
  if measurement not in MEASUREMENTS:
    raise errors.unknown('measurement', measurement, MEASUREMENTS)
  if quantiles not in QUANTILES:
    raise errors.unknown('quantiles', quantiles, QUANTILES)


def server(
  key,
  scenario,
  batch_size,
  *,
  bins: int = 128,
  measurement: str = 'mean',
  gain: float = 1e-3,
  quantiles: str = 'normal',
  sparse: bool = False,
):
  """Returns the `Scenario` whose model has the imprint module in front: what the malicious server sends.

  Args:
    key: draws the random measurement.
    scenario: the honest one; of its public images, where there are any, the measurement's distribution is taken.
    batch_size: not used: the number of bins, not of samples, is chosen beforehand.
    bins: K; the expected share of samples alone in their bin is (1 − 1/K)^(N−1).
    measurement: 'mean' (brightness) or 'random'.
    gain: g, the scale of the first layer; its gradient goes with 1/g, which is how absolute noise is outdone.
    quantiles: 'normal', 'laplace' or 'empirical', see `bin_edges`.
    sparse: the variant for several local steps.

  Raises:
    UsageError: for settings out of range, or empirical quantiles without public images.
  """
  del batch_size
  _check(bins, measurement, gain, quantiles)
  w = measurement_vector(key, int(np.prod(scenario.images.shape[1:])), measurement)
  measured = None
  if scenario.public is not None:
    public = np.asarray(scenario.public[0], np.float64)
    measured = public.reshape(len(public), -1) @ np.asarray(w, np.float64)
  edges = bin_edges(bins, quantiles, measured=measured, measurement=measurement)
  module = module_parameters(w, edges, gain=gain, sparse=sparse)
  variables = scenario.variables
  return scenario._replace(
    client=dataclasses.replace(scenario.client, model=insert(scenario.client.model, module, gain=gain, sparse=sparse)),
    variables={**variables, 'params': {_NAME: module, 'model': variables['params']}},
  )


def recover(update, module, *, gain=1.0, sparse=False):
  """Returns what each bin holds, the surest first: (images [K, D], shares [K], whether there is anything bool [K]).

  An image that is alone in its bin has pixels in [0, 1] and measures as its bin says; of those that do, and of those
  that do not, the ones that keep closest to the box come first, and then those with the largest share in the gradient,
  where rounding matters least.

  Args:
    update: of the module's first layer, {'kernel' [D, K], 'bias' [K]}; a gradient or a delta.
    module: its parameters as sent.
    gain, sparse: as it was built.
  """

  def differences(x):
    return x if sparse else x - jnp.concatenate([x[..., 1:], jnp.zeros_like(x[..., :1])], axis=-1)

  shares = differences(update['bias'])
  images, alive = fidel.partial_reconstructions(differences(update['kernel']), shares)
  beyond = fidel.beyond_box(images)
  z = jnp.einsum('kd,dk->k', images, module['kernel'], precision=_EXACT) + module['bias']
  widths = -jnp.diff(module['bias'], append=-jnp.inf)  # the topmost bin has no end
  widths = jnp.full_like(widths, gain) if sparse else widths
  slack = jnp.asarray(_SLACK, images.dtype)
  elsewhere = (z < -slack * widths) | (z > (1 + slack) * widths)
  order = jnp.lexsort((-jnp.abs(shares), jnp.where(beyond <= slack, 0, beyond), elsewhere, ~alive))
  return images[order], shares[order], alive[order]


def imprint(
  client,
  *,
  bins: int = 128,
  measurement: str = 'mean',
  gain: float = 1e-3,
  quantiles: str = 'normal',
  sparse: bool = False,
):
  """Robbing the Fed (Fowl et al. 2022): reads one image per bin of the module that `server` inserted.

  Closed-form. It returns as many images as the batch has samples, or as there are bins if those are fewer, the surest
  first; black ones where there is nothing left to return. It does not tell their labels.

  Args:
    client: not used; a module is read in the same way whoever trained it.
    bins, measurement, gain, quantiles, sparse: as `server` takes them.

  Raises:
    UsageError: for settings out of range; when run, for a model without the module.
  """
  del client
  _check(bins, measurement, gain, quantiles)

  def read(observation):
    params = observation.variables['params']
    if _NAME not in params:
      raise errors.UsageError("the attack 'imprint' reads a module that the model sent does not have")
    module, update = (tree['measure'] for tree in (params[_NAME], observation.update[_NAME]))
    images, _, _ = recover(update, module, gain=gain, sparse=sparse)
    return images[: observation.image_shape[0]], None

  return base.closed_form(read, auxiliary_data=True)
