"""Defenses by name: what a user may write, and what comes of it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from gradleak import Client, defenses, errors, models
from gradleak.defenses import registry

KEY = jax.random.key(0)
UPDATES = {'w': jnp.asarray([3.0, -4.0, 0.5, 1.0])}


def defend(defense, numbers=None):
  client = Client(models.from_functions(None, None), 10)
  defended = defense.build(defense.numbers if numbers is None else numbers, client)
  assert defended.step is client.step and defended.transform is None  # all defenses here stand in the upload chain
  upload = optax.with_extra_args_support(defended.upload)
  return np.asarray(upload.update(UPDATES, upload.init(UPDATES), key=KEY)[0]['w'])


def test_none_is_the_identity():
  defense = defenses.parse(' none ')
  assert (defense.name, defense.structure, defense.numbers) == ('none', (), ())
  np.testing.assert_array_equal(defend(defense), UPDATES['w'])


def test_chains_act_from_left_to_right():
  np.testing.assert_allclose(defend(defenses.parse('prune(rate=0.5)+clip(norm=1)')), [0.6, -0.8, 0, 0], rtol=1e-6)
  np.testing.assert_allclose(defend(defenses.parse('prune(rate=0.5)')), [3, -4, 0, 0])


def test_members_draw_apart():
  both = defenses.parse('gaussian(stddev=1)+gaussian(stddev=1)')
  first, second = (defend(both, numbers) - np.asarray(UPDATES['w']) for numbers in ((1.0, 0.0), (0.0, 1.0)))
  assert np.abs(first - second).min() > 1e-3


def test_numbers_are_open_and_structure_is_not():
  defense = defenses.parse('clip(norm=2)+gaussian(stddev=0.1)')
  assert defense.name == 'clip(norm=2)+gaussian(stddev=0.1)'
  assert defense.numbers == (2.0, 0.1)
  assert defense.structure == defenses.parse('clip(norm=1) + gaussian(stddev=3)').structure
  assert defense.structure != defenses.parse('gaussian(stddev=0.1)+clip(norm=2)').structure
  assert hash(defense.structure)
  np.testing.assert_allclose(np.linalg.norm(defend(defense, (0.5, 0.0))), 0.5, rtol=1e-6)


@pytest.mark.parametrize(
  ('text', 'words'),
  [
    ('gausian(stddev=1)', ["unknown defense 'gausian'", "did you mean 'gaussian'", 'laplace', 'prune']),
    ('gaussian', ['gaussian needs the setting stddev']),
    ('gaussian(sigma=1)', ["'sigma'", 'stddev']),
    ('null_gradient(norm=1)', ["'norm'", 'it has none']),
    ('prune(rate=1.5)', ['prune(rate)', '1.5', 'nearest valid value is 1']),
    ('clip(norm=1)+prune(rate=-1)', ['prune(rate)', '-1']),
    ('none+prune(rate=0.5)', ["'none' stands alone"]),
    ('none(strength=0)', ["'none' stands alone"]),
    ('prune(rate=0.5)+', ["'prune(rate=0.5)+'", 'empty']),
    ('', ["''", 'empty']),
  ],
)
def test_bad_texts_raise_before_anything_runs(text, words):
  with pytest.raises(errors.UsageError) as caught:
    defenses.parse(text)
  assert all(word in str(caught.value) for word in words), str(caught.value)


def test_every_defense_is_exported_by_its_name():
  for name, factory in defenses.REGISTRY.items():
    assert getattr(defenses, name) is factory and name in defenses.__all__


def test_a_users_own_transformation():
  double, triple = (registry.custom(name, optax.scale(factor)) for name, factor in (('double', 2.0), ('triple', 3.0)))
  assert double.name == 'double' and double.numbers == () and double.structure != triple.structure
  np.testing.assert_allclose(defend(double), 2 * UPDATES['w'])
