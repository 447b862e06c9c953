"""What wraps a network keeps of it what it does not change."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradleak as gl
from gradleak import Client, attacks, models
from gradleak.models import lora, normalisation, precode, registry
from gradleak.models.state_dict import Layout
from gradleak.servers.imprint import insert
from gradleak.threat import Knowledge, Observation

FUNCTIONS = {'name', 'init', 'apply', 'features', 'penalised', 'stands_for'}
KNOWN = models.Normalisation((0.5,), (0.2,))
# What wraps -> (its result, the fields that it changes beside the functions).
WRAPPERS = {
  'lora': (lora.lora, {'layers', 'layout', 'citations', 'first_block'}),
  'precode': (precode.precode, {'layers', 'layout', 'citations'}),
  'normalised': (normalisation.normalised, {'normalisation', 'axes'}),
  'standardised': (lambda model: models.standardised(model, np.zeros(4), np.ones(4)), {'normalisation', 'axes'}),
  'imprint': (lambda model: insert(model, {}), {'layers', 'layout', 'normalisation', 'first_block'}),
}


def test_every_wrapper_is_tried():
  assert set(registry.WRAPPERS) <= set(WRAPPERS)


@pytest.mark.parametrize('name', WRAPPERS)
def test_what_a_wrapper_does_not_change_is_that_of_its_model(name):
  wrap, changed = WRAPPERS[name]
  base = models.mlp(3)._replace(axes=None, citations=('One.',), layout=Layout((), (4,)))
  base = base if 'normalisation' in changed and name != 'imprint' else base._replace(normalisation=KNOWN)
  made = wrap(base)
  for field in set(base._fields) - changed - FUNCTIONS:
    assert getattr(made, field) == getattr(base, field), field
  assert made.named == (name in registry.WRAPPERS), 'the name says what a wrapper with settings computes'
  assert made.axes == {'normalised': 3, 'standardised': 1}.get(name)
  assert made.normalisation == {'imprint': None, 'lora': KNOWN, 'precode': KNOWN}.get(name, made.normalisation)


@pytest.mark.long
@pytest.mark.parametrize('chain', ['normalised(pixels=mnist)+precode', 'precode+normalised(pixels=mnist)'])
def test_a_closed_form_reads_pixels_through_wrappers_in_any_order(chain):
  model = models.create(f'mlp(widths=16)+{chain.replace("precode", "precode(size=4)")}', 3, init='default')
  client, images = Client(model, 3), jax.random.uniform(jax.random.key(0), (1, 4, 4, 1))
  labels, variables = jax.nn.one_hot(jnp.asarray([1]), 3), model.init(jax.random.key(1), (4, 4, 1))
  update = jax.jit(client.local_update)(jax.random.key(2), variables, images, labels).update
  seen = Observation(variables, update, labels, Knowledge(), images.shape, 3)
  attack = attacks.fidel()(client)
  found = jax.jit(attack.reconstruct)(jax.jit(attack.init)(jax.random.key(3), seen), seen)
  np.testing.assert_allclose(found.samples[0], images[0], atol=1e-4)


def test_precode_takes_rows():
  model = models.create('mlp(widths=8)+precode(size=4)', 2, init='default')
  rows = np.random.default_rng(0).normal(size=(6, 5)).astype(np.float32)
  data = gl.data.table({f'x{i}': row for i, row in enumerate(rows.T)}, [0, 1] * 3)
  modality = gl.modalities.of_config(data.settings)
  made = gl.scenario(model, data.samples, data.targets, key=jax.random.key(0), modality=modality)
  assert made.samples.shape[1:] == (5,) and made.settings['model'] == model.name


def test_what_a_wrapper_does_not_take_is_refused_in_its_own_words():
  tokens, normal = models.gpt(3, width=8, layers=1, heads=1), models.resnet20(3, width=2, pixels='half')
  for make, words in (
    (lambda: precode.precode(tokens), 'precode takes a network of images or rows'),
    (lambda: normalisation.normalised(tokens), r'normalised\(pixels=cifar10\) takes a network of images, and'),
    (lambda: normalisation.normalised(normal), 'takes a network that does not normalise'),
    (lambda: models.standardised(tokens, [0.0], [1.0]), 'standardised takes a network of rows'),
    (lambda: models.standardised(models.lenet(3), [0.0], [1.0]), 'rows, and .* takes samples of 3 axes'),
    (lambda: normalisation.normalised(lora.lora(normal)), 'takes a network that does not normalise'),
  ):
    with pytest.raises(gl.UsageError, match=words):
      make()
