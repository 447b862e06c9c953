"""A user's objects that do not fit are refused in one sentence that says what to do."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import gradleak
from gradleak import models
from gradleak.core import errors, trees

SHAPE = (8, 8, 1)


def message(function, *arguments, **options):
  with pytest.raises(errors.UsageError) as caught:
    function(*arguments, **options)
  assert '\n' not in str(caught.value)
  return str(caught.value)


# ---- variables


def zeros(model, sample_shape=SHAPE):
  shapes = jax.eval_shape(lambda key: model.init(key, sample_shape), jax.random.key(0))
  return jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)


def test_variables_that_fit_pass():
  for model in (models.lenet(10), models.convnet(10, width=2)):
    models.check_variables(model, zeros(model, (9, 9, 1)), [9, 9, 1])
  linear = models.from_functions(lambda key, shape: [jnp.zeros((2, 3)), 0.5], lambda params, images: images)
  models.check_variables(linear, {'params': [np.zeros((2, 3)), 1.0], 'batch_stats': {}}, SHAPE)


def test_parameters_alone_are_recognised():
  lenet, convnet = models.lenet(10), models.convnet(10, width=2)
  assert message(models.check_variables, lenet, zeros(lenet)['params'], SHAPE) == (
    "the variables are the parameters of 'lenet' alone: pass {'params': …}"
  )
  assert message(models.check_variables, convnet, zeros(convnet, (9, 9, 1))['params'], (9, 9, 1)).endswith(
    "alone: pass {'params': …, 'batch_stats': …}"
  )


@pytest.mark.parametrize(
  ('variables', 'words'),
  [
    (None, 'are None, '),
    ([1, 2], 'are a list of 2, '),
    ({'w': 1, 'b': 3}, "have the keys ['b', 'w'], "),
  ],
)
def test_variables_without_parameters_are_named(variables, words):
  found = message(models.check_variables, models.lenet(10), variables, SHAPE)
  assert found == f"the variables {words}expected a dict with 'params', as the init of 'lenet' returns"


def test_the_first_difference_is_named():
  model = models.lenet(10)
  variables = zeros(model)

  def changed(layer, **values):
    return {'params': {**variables['params'], layer: values}}

  def difference(given, sample_shape=SHAPE):
    return message(models.check_variables, model, given, sample_shape)

  assert difference(variables, (9, 9, 1)) == (
    "the variables do not fit the model 'lenet' for samples of shape (9, 9, 1): "
    "variables['params']['Dense_0']['kernel'] has shape (48, 10), expected (108, 10)"
  )
  bias, kernel = (variables['params']['Conv_1'][name] for name in ('bias', 'kernel'))
  assert difference(changed('Conv_1', bias=bias)).endswith("['Conv_1']['kernel'] is missing, expected shape (12, 300)")
  found = difference(changed('Conv_1', bias=bias, kernel=kernel, scale=bias))
  assert found.endswith(": variables['params']['Conv_1']['scale'] is not one of the model's")
  assert difference(changed('Conv_1', bias=bias, kernel=kernel.astype(np.int8))).endswith('is int8, expected float32')
  assert difference(zeros(models.mlp(10))).endswith("['Conv_0']['bias'] is missing, expected shape (12,)")


# ---- what apply returns


@pytest.mark.parametrize(
  ('returned', 'words'),
  [
    (lambda images: (images, images), 'a tuple of 2, expected logits alone'),
    (lambda images: None, 'None, expected logits alone'),
    (lambda images: 'logits', "'logits', expected"),
    (lambda images: jnp.zeros((2, 3), jnp.int32), 'int32 of shape (2, 3), expected'),
    (lambda images: jnp.zeros((1, 3)), 'float32 of shape (1, 3), expected'),
    (lambda images: jnp.zeros(2), 'float32 of shape (2,), expected'),
    (lambda images: images, 'float32 of shape (2, 8, 8, 1), expected'),
  ],
)
def test_what_apply_returns_is_named(returned, words):
  model = models.from_functions(lambda key, shape: {}, lambda params, images: returned(images), 'own')
  found = message(models.check_apply, model, {'params': {}}, SHAPE)
  assert found.startswith(f"the model 'own' returns {words}") and '[N, classes] floats for 2 samples' in found


def test_apply_of_a_hand_made_model_returns_a_pair():
  model = models.Model('own', None, lambda variables, images, train, key: jnp.zeros((2, 3)))
  assert 'returns float32 of shape (2, 3), expected (logits, batch_stats)' in message(
    models.check_apply, model, {'params': {}}, SHAPE
  )


def test_a_function_of_one_image_is_told_to_map_over_the_batch():
  model = models.from_functions(
    lambda key, shape: jnp.zeros((64, 3)), lambda params, image: image.reshape(-1) @ params, 'own'
  )
  found = message(models.check_apply, model, {'params': jnp.zeros((64, 3))}, SHAPE)
  assert found.startswith("the model 'own' fails on a batch of shape (2, 8, 8, 1) (TypeError: dot_general ")
  assert 'jax.vmap' in found


def test_apply_that_fits_passes_and_our_own_errors_are_kept():
  model = models.cnn(10, width=2, widths=3)
  models.check_apply(model, zeros(model), SHAPE)
  assert message(models.check_apply, model, zeros(model), (3, 3, 1)).startswith('cnn needs images of at least 4×4')


# ---- other libraries' modules


class Linen(nn.Module):
  @nn.compact
  def __call__(self, images):
    return nn.Dense(3)(images.reshape(images.shape[0], -1))


class Nnx(nnx.Module):
  def __init__(self, rngs):
    self.dense = nnx.Linear(64, 3, rngs=rngs)

  def __call__(self, images):
    return self.dense(images.reshape(images.shape[0], -1))


@jax.tree_util.register_pytree_with_keys_class
class Equinox:
  """Imitates an Equinox module: a pytree with functions among its leaves, called with one image."""

  def __init__(self, weight, activation=jnp.tanh):
    self.weight, self.activation = weight, activation

  def __call__(self, image):
    return self.activation(self.weight @ image.reshape(-1))

  def tree_flatten_with_keys(self):
    return [(jax.tree_util.GetAttrKey(name), value) for name, value in vars(self).items()], None

  @classmethod
  def tree_unflatten(cls, _, leaves):
    return cls(*leaves)


def test_from_flax_says_what_to_call_instead():
  assert message(models.from_flax, Linen) == 'from_flax takes an instance of a Linen module: call from_flax(Linen(…))'
  for module in (Nnx, Nnx(nnx.Rngs(0))):
    assert message(models.from_flax, module) == 'Nnx is a Flax NNX module: call gradleak.models.from_nnx(Nnx(…))'
  assert message(models.from_flax, 3).endswith('got 3; wrap functions by gradleak.models.from_functions')
  assert 'both or neither' in message(models.from_flax, Linen(), mean=(0.5,))


def test_from_functions_takes_functions():
  module, function = Equinox(jnp.zeros((3, 64))), lambda *arguments: None
  for init, apply, role in (
    (module, module, 'init'), (function, module, 'apply'), (module.weight, function, 'init'), (function, None, 'apply'),
    (Linen(), Linen(), 'init'), (function, Nnx(nnx.Rngs(0)), 'apply'), ({'w': 1}, function, 'init'),
  ):  # fmt: skip
    found = message(models.from_functions, init, apply)
    assert found.startswith(
      f'from_functions takes two functions, init(key, sample_shape) and apply(params, images), and {role} is '
    )
    assert (
      'from_flax or from_nnx; for an Equinox module, params, static = eqx.partition(module, eqx.is_inexact_array)'
      in found
    )
  models.from_functions(function, jax.tree_util.Partial(function, jnp.zeros(2)))


@pytest.mark.parametrize(
  'params',
  [None, {'name': 'relu'}, Equinox(jnp.zeros((3, 64))), [jnp.zeros(2), nn.relu], [jnp.zeros(2, int)], {'n': 3}],
)
def test_parameters_are_floats(params):
  model = models.from_functions(lambda key, shape: params, lambda params, images: images, 'own')
  found = message(model.init, jax.random.key(0), SHAPE)
  assert found.startswith("init of the model 'own' returns ") and 'eqx.partition(module, eqx.is_inexact_array)' in found
  assert 'jax.vmap(eqx.combine(params, static))(images)' in found


def test_integers_among_the_parameters_are_named_in_any_network():
  module = Nnx(nnx.Rngs(0))
  module.steps = nnx.Param(jnp.asarray(3))
  for model in (
    models.from_nnx(module, 'own'),
    models.from_functions(lambda key, shape: {'dense': jnp.zeros(2), 'steps': 3}, lambda params, images: images, 'own'),
  ):
    found = message(models.check_variables, model, {'params': {}}, SHAPE)
    assert found.startswith("init of the model 'own' returns ")
    assert "as params['steps'], expected a pytree of floats" in found


def test_numbers_among_the_parameters_become_arrays(small_images):
  model = models.from_functions(
    lambda key, shape: {'w': np.zeros((64, 10), np.float32), 'b': 0.5},
    lambda params, images: images.reshape(-1, 64) @ params['w'] + params['b'],
  )
  variables = model.init(jax.random.key(0), SHAPE)
  assert variables['params']['b'].dtype == jnp.result_type(float) and not variables['params']['b'].weak_type
  given = {'params': {'w': variables['params']['w'], 'b': 0.25}}
  scenario = gradleak.scenario(model, *small_images, variables=given).trained(given, given)
  assert all(isinstance(tree['params']['b'], jax.Array) for tree in (scenario.variables, scenario.previous))


def test_layers_are_of_parameters():
  wrong = [trees.Layer('first', (('dense', 'weight'),))]
  made = models.from_functions(lambda key, shape: {'dense': jnp.zeros(2)}, lambda params, images: images, layers=wrong)
  for found in (message(made.init, jax.random.key(0), SHAPE), message(models.from_nnx, Nnx(nnx.Rngs(0)), layers=wrong)):
    assert "has the path ('dense', 'weight'), expected paths of its parameters: ('dense'," in found
  assert "a layer is 'dense'" in message(models.from_nnx, Nnx(nnx.Rngs(0)), layers=['dense'])


def test_a_partitioned_module_is_a_model():
  """Follows the advice of the message: arrays in one tree, None for the rest, and `jax.vmap` over the batch."""
  module = Equinox(jnp.asarray(np.random.default_rng(0).normal(size=(3, 64)), jnp.float32))
  model = models.from_functions(
    lambda key, shape: Equinox(module.weight, None),
    lambda params, images: jax.vmap(Equinox(params.weight, module.activation))(images),
  )
  variables = model.init(jax.random.key(0), SHAPE)
  models.check_variables(model, variables, SHAPE)
  models.check_apply(model, variables, SHAPE)
  images = np.random.default_rng(1).uniform(0, 1, (2, *SHAPE)).astype(np.float32)
  np.testing.assert_allclose(
    model.apply(variables, images)[0], np.tanh(images.reshape(2, 64) @ module.weight.T), rtol=1e-4, atol=1e-5
  )
