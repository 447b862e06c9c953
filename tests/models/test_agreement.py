"""A network that was written anew, compared with the original: equal ones agree, and a wrong layer is named."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import gradleak as gl
from gradleak import models
from gradleak.core import trees
from gradleak.models import Agreement, Difference, agreement

SHAPE = (8, 8, 3)
NAMES = {'conv1': 'Conv_0', 'conv2': 'Conv_1', 'fc': 'Dense_0'}


class Net(nn.Module):
  """Two convolutions and a dense layer; the slope is that of the second activation, which the test gets wrong."""

  slope: float = 0.0

  @nn.compact
  def __call__(self, images):
    hidden = nn.relu(nn.Conv(4, (3, 3))(images))
    hidden = nn.leaky_relu(nn.Conv(5, (3, 3), strides=2)(hidden), self.slope)
    return nn.Dense(6)(hidden.reshape(len(hidden), -1))


def dense(key, sample_shape):
  first, second = jax.random.split(key)
  return {
    'a': {'w': jax.random.normal(first, (192, 5)) / 14, 'b': jnp.zeros(5)},
    'z': {'w': jax.random.normal(second, (5, 4))},
  }


def outputs_of(params, images):
  hidden = jnp.tanh(images.reshape(len(images), -1) @ params['a']['w'] + params['a']['b'].reshape(1, -1))
  return {'a': hidden, 'z': hidden @ params['z']['w']}


class Original:
  """What is saved of a network in PyTorch, made of one of ours: outputs with channels first, the gradient by name."""

  def __init__(self, model):
    self.model, self.variables = model, model.init(jax.random.key(0), SHAPE)
    key = jax.random.key(1)
    self.samples, self.targets = np.asarray(jax.random.uniform(key, (3, *SHAPE))), np.array([0, 3, 1])
    self.logits = np.asarray(model.apply(self.variables, self.samples)[0])
    client = gl.ClientSettings().client(model, self.logits.shape[1])
    self.gradient = jax.jit(client.local_update)(None, self.variables, self.samples, self.targets).update

  def outputs(self):
    """Returns what hooks save of `Net` with slope 0."""
    kept = lambda module, name: type(module) in (nn.Conv, nn.Dense)  # noqa: E731
    _, seen = Net().apply(self.variables, self.samples, capture_intermediates=kept)
    layers = {name: np.asarray(each['__call__'][0]) for name, each in seen['intermediates'].items()}
    channels_first = {n: x.transpose(0, 3, 1, 2) if x.ndim == 4 else x for n, x in layers.items()}
    return {theirs: channels_first[ours] for theirs, ours in NAMES.items()}

  def compare(self, model=None, variables=None, **options):
    return agreement(model or self.model, variables or self.variables, self.samples, self.logits, **options)


@pytest.fixture(scope='module')
def original():
  return Original(models.from_flax(Net()))


def test_an_equal_network_agrees_in_everything(original):
  found = original.compare(outputs=original.outputs(), names=NAMES, gradient=(original.gradient, original.targets))
  assert found.agrees and found.first is None and str(found).endswith('no relative difference is above 0.0001.')
  parameters = [f'{layer}/{leaf}' for layer in NAMES.values() for leaf in ('kernel', 'bias')]
  assert [each.name for each in found.differences] == [*NAMES.values(), 'logits', *parameters]
  assert [each.kind for each in found.differences] == 3 * ['output'] + ['logits'] + 6 * ['gradient']
  assert all(0 <= each.relative < 1e-5 for each in found.differences)


def test_a_wrong_activation_is_found_in_the_layer_behind_it(original):
  wrong = models.from_flax(Net(slope=0.2))
  found = original.compare(wrong, outputs=original.outputs(), names=NAMES)
  assert not found.agrees and found.first[:2] == ('output', 'Dense_0')
  assert [each.name for each in found.departing] == ['Dense_0', 'logits']
  assert 'The networks depart first in the output of Dense_0: relative difference ' in str(found)
  shown = original.compare(wrong)
  assert shown.first[:2] == ('logits', 'logits') and 'depart first in the logits' in str(shown)


def test_a_wrong_weight_is_found_in_its_own_layer(original):
  params = original.variables['params']
  kernel = params['Conv_1']['kernel'][::-1]  # rows in the wrong order
  variables = {'params': {**params, 'Conv_1': {**params['Conv_1'], 'kernel': kernel}}}
  found = original.compare(variables=variables, outputs=original.outputs(), names=NAMES)
  assert found.first[:2] == ('output', 'Conv_1')


def test_a_wrong_backward_pass_is_found_from_the_end():
  right = models.from_functions(dense, lambda params, images: outputs_of(params, images)['z'])

  def stopped(params, images):
    frozen = {**params, 'a': jax.lax.stop_gradient(params['a'])}
    return outputs_of(frozen, images)['z']

  original = Original(right)
  layers = [trees.Layer('a', (('a', 'w'), ('a', 'b'))), trees.Layer('z', (('z', 'w'),))]
  wrong = models.from_functions(dense, stopped, layers=layers)
  given = {'gradient': (original.gradient, original.targets)}
  outputs = outputs_of(original.variables['params'], original.samples)
  assert original.compare(**given).agrees
  found = original.compare(wrong, outputs=outputs, outputs_of=outputs_of, **given)
  assert [each.name for each in found.departing] == ['a/w', 'a/b'] and found.first == Difference('gradient', 'a/b', 1.0)


def test_values_that_are_not_finite_depart_and_zeros_are_compared_absolutely():
  found = Agreement((Difference('output', 'a', 0.0), Difference('logits', 'logits', float('nan'))), 1e-4)
  assert found.first.kind == 'logits' and not found.agrees
  original = Original(models.from_functions(dense, lambda params, images: 0 * outputs_of(params, images)['z']))
  assert original.compare().differences == (Difference('logits', 'logits', 0.0),)
  shifted = models.from_functions(dense, lambda params, images: 0 * outputs_of(params, images)['z'] + 2)
  assert original.compare(shifted).first.relative == pytest.approx(2 * 12**0.5)


@pytest.mark.parametrize(
  ('change', 'words'),
  [
    ({'outputs': {'conv3': np.zeros(3)}}, "unknown layer 'conv3' (valid: Conv_0, "),
    (
      {'outputs': {'Conv_0': np.zeros((3, 8, 8, 4))}},
      'the output of Conv_0 has shape (3, 8, 4, 8), channels last, and',
    ),
    ({'outputs': [1]}, 'outputs is [1], expected a mapping'),
    ({'names': NAMES}, 'names and outputs_of are for outputs of layers'),
    ({'gradient': {}}, 'gradient is {}, expected (gradient, labels)'),
    ({'gradient': ({}, [0, 1, 9])}, 'expected integers in [0, 5], one per image'),
    ({'gradient': ({}, [0, 1, 2])}, 'only one of them has Conv_0/bias'),
    ({'train': 1}, 'train is 1, expected True or False'),
  ],
)
def test_what_does_not_fit_is_refused(original, change, words):
  with pytest.raises(gl.UsageError) as caught:
    original.compare(**change)
  assert words in str(caught.value)


def test_images_and_logits_that_do_not_fit_are_refused(original):
  for images, logits, words in [
    (original.samples[0], original.logits, 'images have shape (8, 8, 3), expected [N, H, W, C]'),
    (original.samples.transpose(0, 3, 1, 2), original.logits, 'the variables do not fit'),
    (original.samples, original.logits[:2], 'the logits have shape (2, 6), and those of the model (3, 6)'),
    (original.samples, 'logits', 'expected an array of numbers'),
  ]:
    with pytest.raises(gl.UsageError) as caught:
      agreement(original.model, original.variables, images, logits)
    assert words in str(caught.value)


def test_gradients_of_another_shape_are_refused(original):
  gradient = jax.tree.map(np.asarray, original.gradient)
  gradient['Conv_0']['bias'] = np.zeros(7)
  with pytest.raises(gl.UsageError, match=r'the gradient of Conv_0/bias has shape \(7,\), expected \(4,\)'):
    original.compare(gradient=(gradient, original.targets))


def test_functions_without_outputs_of_have_no_layers_to_compare():
  original = Original(models.from_functions(dense, lambda params, images: outputs_of(params, images)['z']))
  with pytest.raises(gl.UsageError, match='is no Linen module: give outputs_of='):
    original.compare(outputs={'a': np.zeros((3, 5))})
