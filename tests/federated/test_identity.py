"""What changes the results of a client changes what identifies it, and a name alone never stands for two functions."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import gradleak as gl
from gradleak.federated import Client
from gradleak.federated.augmentation import flip
from gradleak.federated.behaviour import moves, program

MODEL = gl.models.mlp(10, widths='8')
BASE = {'share': 'delta', 'epochs': 2, 'batch_size': 2}
PARAMS = {'a': jnp.zeros((3, 4)), 'b': jnp.zeros(3)}
# Each field that an audit does not replace -> another value of it.
CHANGES = {
  'num_classes': None,  # that of the model
  'model': None,  # tested below
  'modality': None,  # known by its name
  'step': None,
  'upload': None,
  'transform': None,
  'extra_gradients': None,  # those of the defenses
  'loss': 'focal(gamma=2)',
  'share': 'gradient',
  'optimizer': optax.sgd(1.0),
  'epochs': 3,
  'batch_size': 4,
  'drop_last': True,
  'batch_norm': 'eval',
  'remat': True,
  'augment': flip,
  'shuffled': True,
  'order': ((1, 0, 2, 3, 4, 5, 6, 7), (0, 1, 2, 3, 4, 5, 6, 7)),
  'precision': 'bfloat16',
  'frozen': ('Dense_0',),
  'private': ('Dense_0',),
  'cohort': 2,
}


@pytest.fixture(scope='module')
def data():
  found = gl.data.load('digits', limit=8)
  return found.samples, found.targets


def settings(data, model=MODEL, **fields):
  client = Client(model, 10, **fields) if fields else None
  return gl.scenario(model, *data, key=jax.random.key(0), client=client).settings


@pytest.mark.parametrize('field', [field.name for field in dataclasses.fields(Client)])
def test_each_field_of_a_client_is_part_of_its_identity(data, field):
  value = CHANGES[field]
  if value is None:
    return
  model, base = MODEL, BASE
  if field == 'share':
    base = {'share': 'delta', 'batch_size': 8}
  if field == 'batch_norm':
    model = gl.models.from_flax(Normed())
  assert settings(data, model, **{**base, field: value}) != settings(data, model, **base)


def test_defaults_and_what_a_client_does_not_use_are_not_recorded(data):
  usual = settings(data, share='delta', epochs=2)
  expected = {'loss', 'share', 'local_epochs', 'local_batch_size'}
  own = set(settings(data, **BASE)) - set(settings(data, share='gradient')) | {'loss', 'share'}
  assert own == expected and settings(data, optimizer=optax.sgd(0.1), share='delta', epochs=2) == usual
  assert settings(data, share='gradient', optimizer=optax.adam(1.0)) == settings(data, share='gradient')
  assert not [name for name in settings(data) if name in ('model_fingerprint', 'loss_fingerprint')]


class Normed(nn.Module):
  """A network with BatchNorm, and with dropout where it is trained."""

  act: str = 'relu'
  rate: float = 0.1

  @nn.compact
  def __call__(self, x, train=False):
    x = nn.BatchNorm(use_running_average=not train)(nn.Dense(16)(x.reshape(x.shape[0], -1)))
    return nn.Dense(10)(nn.Dropout(self.rate, deterministic=not train)(getattr(jax.nn, self.act)(x)))


def straight(x):
  return x + jax.lax.stop_gradient(jnp.sign(x) - x)


def of_functions(inner):
  def init(key, shape):
    return {'w': jax.random.normal(key, (64, 10))}

  return gl.models.from_functions(init, lambda params, x: inner(x.reshape(len(x), -1) @ params['w']))


@pytest.mark.long
def test_models_of_one_name_and_weights_are_told_apart_by_what_they_compute(data):
  networks = [
    gl.models.from_flax(Normed()),
    gl.models.from_flax(Normed(act='tanh')),
    gl.models.from_flax(Normed(rate=0.2)),
    gl.models.from_flax(Normed(), mean=[0.5], std=[0.1]),
    of_functions(jnp.sign),
    of_functions(straight),  # of the same outputs
  ]
  found = [settings(data, model) for model in networks]
  assert len({one['model_fingerprint'] for one in found}) == len(found)
  assert settings(data, gl.models.from_flax(Normed())) == found[0]
  renamed = MODEL._replace(name='lenet')
  assert 'model_fingerprint' in settings(data, renamed) and 'model_fingerprint' not in settings(data)


def test_built_in_models_are_known_by_their_names(data):
  for wrapper in ('', '+precode(size=4,beta=0.1)', '+lora(rank=1)', '+normalised'):
    assert gl.models.create(f'mlp(widths=8){wrapper}', 10).named
  precoded = gl.models.precode.precode
  assert precoded(MODEL, size=4).named and not precoded(MODEL, size=4, beta=0.5).named
  assert not MODEL._replace(apply=gl.models.lenet(10).apply).named


def test_losses_and_augmentations_of_a_user_are_told_apart_by_what_they_compute(data):
  def loss(factor):
    def mine(outputs, targets):
      return factor * optax.softmax_cross_entropy(outputs, targets)

    return mine

  def augment(rate):
    return lambda key, x: x + rate * jax.random.normal(key, x.shape)

  for name, one, other, again in (
    ('loss', loss(1.0), loss(2.0), loss(1.0)),
    ('augment', augment(0.1), augment(0.2), augment(0.1)),
  ):
    found = [settings(data, **BASE, **{name: each}) for each in (one, other, again)]
    assert found[0] != found[1] and found[0] == found[2]
  of_settings = [gl.scenario(MODEL, *data, key=jax.random.key(0), loss=gl.losses.wrap(loss(f))) for f in (1.0, 2.0)]
  assert of_settings[0].settings != of_settings[1].settings


def test_losses_on_probabilities_are_told_apart(data):
  def of(power):
    return lambda outputs, targets: -jnp.sum(targets * (1 - outputs) ** power * jnp.log(outputs), axis=-1)

  found = [settings(data, loss=of(power))['loss_fingerprint'] for power in (0, 2)]
  assert found[0] != found[1]


def test_arrays_that_a_program_holds_are_a_part_of_it():
  def scaled(values):
    held = jnp.asarray(values, jnp.float32)
    return lambda x: jax.lax.cond(x[0] > 0, lambda x: x * held, lambda x: jax.jit(jnp.sin)(x), x)

  many, given = np.arange(2000.0), jnp.ones(2000)
  other = np.where(many == 1000, 0.5, many)  # what the text of a long array leaves out
  assert program(scaled(many))(given) == program(scaled(many))(given) != program(scaled(other))(given)
  assert program(jnp.sin)(given) != program(jnp.cos)(given)  # which hold none


def test_a_changed_scenario_has_the_fingerprints_of_one_that_is_made_anew(data):
  model, local = gl.models.from_flax(Normed()), gl.ClientSettings(share='delta')
  first, other = (gl.scenario(model, *data, key=jax.random.key(seed), client=local) for seed in range(2))
  assert first.settings['model_fingerprint'] == other.settings['model_fingerprint']  # weights have their own
  assert first.trained(other.variables).settings == other.settings
  wrapped = gl.losses.wrap(lambda outputs, targets: jnp.sum(jnp.square(outputs - targets), -1))
  there = first.of(slice(None), dataclasses.replace(local, loss=wrapped))
  assert 'loss_fingerprint' in there.settings and there.of(slice(None), local).settings == first.settings


@pytest.mark.parametrize(
  ('one', 'other'),
  [
    (optax.sgd(0.1), optax.sgd(0.1001)),
    (optax.sgd(0.1), optax.sgd(0.1, momentum=0.1)),
    (optax.adam(0.1), optax.adam(0.1, eps=1e-7)),
    (optax.adam(0.1), optax.adamw(0.1, weight_decay=1e-3)),
    (optax.clip_by_global_norm(1.0), optax.clip_by_global_norm(9.0)),
    (optax.sgd(0.1), optax.sgd(optax.piecewise_constant_schedule(0.1, {50: 0.5}))),
    (optax.sgd(0.1), optax.masked(optax.sgd(0.1), {'a': True, 'b': False})),
    (
      gl.federated.optimizers.corrected({'a': jnp.ones((3, 4)), 'b': jnp.ones(3)}, PARAMS),
      gl.federated.optimizers.corrected(PARAMS, {'a': jnp.ones((3, 4)), 'b': jnp.ones(3)}),
    ),
    (optax.sgd(0.1), optax.MultiSteps(optax.sgd(0.1), 2).gradient_transformation()),
  ],
  ids=['rate', 'momentum', 'epsilon', 'decay', 'clip', 'schedule', 'mask', 'control variates', 'accumulated'],
)  # fmt: skip
def test_optimizers_are_told_apart_by_what_they_make_of_gradients(one, other):
  assert moves(one, PARAMS) != moves(other, PARAMS)
  assert moves(one, PARAMS) == moves(one, jax.tree.map(np.asarray, PARAMS))


@pytest.mark.long
def test_a_work_folder_is_refused_under_another_optimizer(data, tmp_path):
  def found(rate):
    scenario = gl.scenario(
      MODEL, *data, key=jax.random.key(0), client=Client(MODEL, 10, share='delta', optimizer=optax.sgd(rate))
    )
    return gl.audit(
      jax.random.key(1), scenario, [None], [gl.attacks.csdlg(steps=1)], 1, controls=1, progress='none', workdir=tmp_path
    )

  first = found(0.5)
  assert not first.resumed and found(0.5).resumed
  with pytest.raises(gl.UsageError, match='optimizer_fingerprint'):
    found(0.25)
