"""Black-box clients whose one setting is another: the comparison names the setting."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest

from gradleak import ClientSettings, defenses, models
from gradleak.core import errors
from gradleak.engine.parts import told
from gradleak.frameworks import comparison
from gradleak.frameworks.comparison import compare

BELIEVED = ClientSettings(share='delta', learning_rate=0.1, local_epochs=2, local_batch_size=2, momentum=0.5)


@pytest.fixture(scope='module')
def model():
  return models.create('mlp(widths=16)', 4)


@pytest.fixture(scope='module')
def variables(model):
  return jax.device_get(model.init(jax.random.key(0), (6, 6, 3)))


IMAGES = np.random.default_rng(0).uniform(size=(4, 6, 6, 3)).astype(np.float32)
LABELS = np.asarray([3, 0, 1, 3], np.int32)


@pytest.fixture(scope='module')
def check(model, variables):
  def run(change=None, transform=None, believed=BELIEVED, defense=None, after=None, chosen=None):
    """Compares a client with these changes of its settings, its images, its order or its update."""
    settings = dataclasses.replace(BELIEVED, **(change or {}))

    def fit(images, labels):
      images, labels = transform(images, labels) if transform else (images, labels)
      update = comparison._simulated(model, variables, 4, settings, images, labels)
      return after(update) if after else update

    return compare(fit, model, variables, IMAGES, LABELS, believed, 4, lambda: defense)

  return run


@pytest.mark.long
def test_the_search_tells_how_far_it_is(check):
  heard = []
  with told(lambda *part: heard.append(part)):
    assert check({'local_batch_size': None}).explanations
  dones, totals, units = zip(*heard, strict=True)
  assert dones == tuple(range(len(dones))) and {totals[0]} == set(totals) and len(dones) < totals[0]
  assert set(units) == {'settings within rounding'}


def test_the_same_client_agrees(check):
  found = check()
  assert found.agrees and found.difference < 1e-5 and found.repeat == 0 and found.draws == '' and not found.explanations
  assert 'agrees' in found.words[0] and len(found.words) == 1


def test_a_client_that_changes_its_samples_in_place_changes_no_others(check):
  before = IMAGES.copy(), LABELS.copy()

  def spoiling(images, labels):
    given = images.copy(), labels.copy()
    images *= 0.5
    labels[:] = 0
    return given

  found = check(transform=spoiling)
  assert found.repeat == 0 and found.agrees
  np.testing.assert_array_equal(IMAGES, before[0])
  np.testing.assert_array_equal(LABELS, before[1])


@pytest.mark.long
@pytest.mark.parametrize(
  'change',
  [
    {'learning_rate': 0.03},
    {'local_epochs': 5},
    {'local_batch_size': None},
    {'momentum': 0.9},
    *(
      pytest.param(late, marks=pytest.mark.slow)  # kinds that are tried after others
      for late in (
        {'weight_decay': 0.01},
        {'momentum': 0.0, 'learning_rate': 0.02},
        {'optimizer': 'nesterov'},
        {'optimizer': 'adam', 'momentum': 0.0, 'learning_rate': 0.001},
        {'optimizer': 'adamw', 'momentum': 0.0, 'weight_decay': 0.01, 'learning_rate': 0.003},
        {'proximal': 1.0},
        {'loss': 'cross_entropy(smoothing=0.1)'},
        {'local_epochs': 1, 'local_batch_size': 1},
      )
    ),
  ],
  ids=str,
)
def test_a_wrong_setting_is_named(check, change):
  found = check(change)
  assert not found.agrees and found.difference > 0.01
  assert any({**one.changes} == change for one in found.explanations), found.explanations
  assert all(one.difference <= comparison.AGREES for one in found.explanations)
  assert any(f'{name}=' in found.words[0] for name in change)


@pytest.mark.long
@pytest.mark.parametrize('change', [{'local_batch_size': 1, 'accumulate': 3}, {'last_batch': 'dropped'},
                                    {'frozen': 'Dense_0', 'weight_decay': 0.1, 'max_norm': 0.01}], ids=str)  # fmt: skip
def test_a_training_that_is_not_compiled_is_the_same(model, variables, change):
  """Five batches, of which two are left, or two and a half."""
  settings = dataclasses.replace(BELIEVED, local_epochs=1, **change)
  images, labels = (np.concatenate([part, part[:1]]) for part in (IMAGES, LABELS))
  made = [run(model, variables, 4, settings, images, labels) for run in (comparison._simulated, comparison._quick)]
  assert comparison._apart(*made) < 1e-5


@pytest.mark.long
def test_a_layer_that_the_client_leaves_as_it_is_is_named(check):
  found = check({'frozen': 'Dense_0'})
  assert [one.changes for one in found.explanations] == [{'frozen': 'Dense_0'}] and not found.agrees
  assert "it trains what the client does not. What follows is with frozen='Dense_0'." in found.words[0]
  found = check({'frozen': 'Dense_0', 'momentum': 0.9})
  assert [one.changes for one in found.explanations] == [{'frozen': 'Dense_0', 'momentum': 0.9}]


@pytest.mark.slow
def test_a_dropped_last_batch_is_named(check):
  """Of four samples in batches of three, one is left out."""
  believed = dataclasses.replace(BELIEVED, local_epochs=1, local_batch_size=3)
  found = check({'local_epochs': 1, 'local_batch_size': 3, 'last_batch': 'dropped'}, believed=believed)
  assert [one.changes for one in found.explanations] == [{'last_batch': 'dropped'}]


@pytest.mark.long
def test_a_missing_normalisation_is_named(check):
  found = check(transform=lambda images, labels: ((images - np.float32(0.5)) / np.float32(0.5), labels))
  assert [one.words for one in found.explanations] == ['a normalisation 0.5 and 0.5'] and not found.agrees


@pytest.fixture(params=[(11, 'to 11 bits (TF32'), (8, 'to 8 bits (bfloat16)')], ids=['TF32', 'bfloat16'])
def imprecise(request, model, variables, monkeypatch):
  """(momentum) -> the comparison with a client of another precision, and the name of the precision."""
  bits, name = request.param
  monkeypatch.setattr(comparison, 'AGREES', 1e-4)  # on a network this small, TF32 changes 3e-4
  short = jax.tree.map(lambda x: np.asarray(jax.lax.reduce_precision(x, 8, 10)), (variables, IMAGES))

  def run(momentum=BELIEVED.momentum):
    settings = dataclasses.replace(BELIEVED, momentum=momentum, precision='bfloat16' if bits == 8 else 'float32')

    def fit(images, labels):
      return comparison._simulated(model, short[0], 4, settings, short[1], labels)

    return compare(fit, model, variables, IMAGES, LABELS, BELIEVED, 4)

  return run, name


def test_a_client_of_another_precision_agrees_and_its_bits_are_said(imprecise, monkeypatch):
  """PyTorch convolves in TF32 on a GPU unless it is told otherwise."""
  run, name = imprecise
  monkeypatch.setattr(comparison, '_explained', lambda *given: [])  # no setting does exactly
  found = run()
  assert found.agrees and f'which rounding {name}' in found.words[0] and found.words[0].endswith('would explain.')


@pytest.mark.slow
def test_a_wrong_setting_of_a_client_of_another_precision_is_named(imprecise):
  run, _ = imprecise
  found = run(momentum=0.9)
  assert not found.agrees and 'but for rounding to' in found.words[0]
  assert any(one.changes.get('momentum') == 0.9 for one in found.explanations), found.explanations


@pytest.mark.long
@pytest.mark.parametrize('bits', [24, 11, 8])
def test_a_client_of_fewer_bits_is_told_by_its_jumps(bits, model, variables):
  """Its settings need not be known; pixels and weights are rounded, as in front of a product."""
  settings = dataclasses.replace(BELIEVED, optimizer='nesterov', momentum=0.9)

  def rounded(x):
    return np.asarray(jax.lax.reduce_precision(x, 8, bits - 1))

  def fit(images, labels):
    return comparison._simulated(model, jax.tree.map(rounded, variables), 4, settings, rounded(images), labels)

  assert comparison._is_coarse(fit, IMAGES, LABELS) is (bits < 24)

  def normed(images, labels):  # behind BatchNorm, copies have no gradient
    return jax.tree.map(lambda x: x * np.float32(np.ptp(images, axis=0).any()), fit(images, labels))

  assert comparison._is_coarse(normed, IMAGES, LABELS) is (bits < 24)


def test_ids_of_tokens_have_no_neighbours_that_tell_how_a_client_rounds():
  texts = np.asarray([[3, 1], [2, 7]], np.int32)
  assert comparison._is_coarse(lambda *given: pytest.fail('called'), texts, LABELS[:2]) is False


@pytest.mark.long
def test_a_setting_that_is_not_tried_is_no_rounding(check, monkeypatch):
  """It moves the update by as little as coarse products would; the search at full precision is left out."""
  monkeypatch.setattr(comparison, '_explained', lambda *given: [])
  found = check({'weight_decay': 0.0007})
  assert comparison.AGREES < found.difference < 0.02
  assert not found.agrees and 'no setting that was tried explains it' in found.words[0]
  monkeypatch.setattr(comparison, '_is_coarse', lambda *given: True)
  assert check({'weight_decay': 0.0007}).agrees


@pytest.mark.parametrize('shuffles', [False, True])
def test_kernels_that_add_up_in_another_order_each_time_draw_nothing(model, variables, shuffles):
  """As those of cuDNN may; it is no augmentation, and hides no order of the samples."""
  draw, coins = np.random.default_rng(0), itertools.cycle((1, -1))

  def fit(images, labels):
    order = next(coins) if shuffles else 1
    near = jax.tree.map(lambda x: (x * (1 + 1e-6 * draw.standard_normal(x.shape))).astype(x.dtype), variables)
    return comparison._simulated(model, near, 4, BELIEVED, images[::order], labels[::order])

  found = compare(fit, model, variables, IMAGES, LABELS, BELIEVED, 4)
  assert found.agrees and found.repeat > comparison.REPEATS and found.draws == ('order' if shuffles else '')
  assert ('as rounding does' in found.words[-1]) is not shuffles


def test_what_is_no_rounding_is_not_taken_for_it(model, variables):
  """One tensor of four is longer by a fifth, which no precision that is known does."""
  sent = comparison._sent(comparison._simulated, model, 4, BELIEVED)
  update = sent(variables)(IMAGES, LABELS)
  longer = {**update, 'Dense_1': {**update['Dense_1'], 'bias': update['Dense_1']['bias'] * np.float32(1.2)}}
  assert comparison.AGREES < comparison._apart(longer, update) < comparison._MOST
  for rounding in comparison.ROUNDINGS:
    assert not comparison._rounded(sent, variables, longer, IMAGES, LABELS, rounding)


@pytest.mark.parametrize(('difference', 'said'), [(1.5e-7, False), (7.4e-4, True), (5e-3, False)])
def test_what_nearly_agrees_says_by_how_much_it_does_not(difference, said):
  one = comparison.Explanation('learning_rate=0.05', difference, {'learning_rate': 0.05})  # 5e-3: by rounding of Adam
  text = comparison._told(0.3, [one], comparison.ROUNDINGS[0])
  assert 'They agree with learning_rate=0.05.' in text
  assert ('still differ' in text) is said and ('They still differ by 7.4e-04' in text) is said


@pytest.mark.long
def test_a_clipped_update_is_told_from_a_wrong_rate(check):
  def clipped(update):
    norm = comparison._norm(update)
    return jax.tree.map(lambda u: u * np.float32(0.02 / norm), update)

  settings = dataclasses.replace(BELIEVED, local_epochs=1, local_batch_size=None, momentum=0.0)
  change = {'local_epochs': 1, 'local_batch_size': None, 'momentum': 0.0}
  assert 'clipped to the norm 0.02' in check(change, after=clipped, believed=settings).explanations[0].words
  rate = check({**change, 'learning_rate': 0.01}, believed=settings).explanations
  assert [one.words for one in rate] == ['learning_rate=0.01']


@pytest.mark.long
def test_what_nothing_explains_is_said(check, monkeypatch):
  kinds = comparison._kinds
  monkeypatch.setattr(comparison, '_kinds', lambda *given: itertools.islice(kinds(*given), 3))  # of nine
  found = check(after=lambda update: jax.tree.map(np.sign, update))
  assert not found.agrees and found.explanations == () and 'no setting that was tried' in found.words[0]


def test_a_client_that_does_not_train_is_refused(check):
  with pytest.raises(errors.UsageError, match='did not train'):
    check(after=lambda update: jax.tree.map(np.zeros_like, update))


def in_new_orders(draw):
  """Returns (samples, targets) -> both in an order of its own each time."""

  def transform(images, labels):
    order = draw.permutation(len(images))
    return images[order], labels[order]

  return transform


@pytest.mark.long
def test_orders_augmentation_and_noise_are_told_apart(check):
  draw = np.random.default_rng(0)
  shuffled = in_new_orders(draw)
  found = check(transform=shuffled)
  assert found.draws == 'order' and found.agrees and "sample_order='shuffled'" in found.words[-1]
  found = check({'learning_rate': 0.03}, transform=shuffled)
  assert found.draws == 'order' and not found.agrees and found.explanations[0].changes == {'learning_rate': 0.03}
  found = check(transform=lambda x, y: (x + draw.normal(0, 0.3, x.shape).astype(np.float32), y))
  assert found.draws == 'samples' and not found.agrees and 'augments' in found.words[-1]
  coins = iter([0, 0, 1, 0, 0, 0, 0, 1])  # flips that come out the same several times, on all samples and on one
  assert check(transform=lambda x, y: (x[:, :, ::-1] if next(coins) else x, y)).draws == 'samples'
  kept = check(after=lambda u: jax.tree.map(lambda x: x * draw.integers(0, 2, x.shape).astype(x.dtype), u))
  assert kept.draws == 'samples'  # as dropout does

  def uneven(update):
    """Adds noise that is five times as large in half of the columns."""
    scales = jax.tree.map(lambda x: np.where(np.arange(x.shape[-1]) % 2, 3e-3, 15e-3), update)
    return jax.tree.map(lambda x, s: x + (s * draw.normal(0, 1, x.shape)).astype(x.dtype), update, scales)

  assert check(after=uneven).draws == 'samples'
  found = check(after=lambda u: jax.tree.map(lambda x: x + draw.normal(0, 0.003, x.shape).astype(x.dtype), u))
  assert found.draws == 'noise' and found.agrees and found.noise == pytest.approx(0.003, rel=0.1)
  assert '0.003' in found.words[-1].replace('0.0029', '0.003').replace('0.0030', '0.003')
  noisy = check(
    {'learning_rate': 0.3}, after=lambda u: jax.tree.map(lambda x: x + draw.normal(0, 3e-3, x.shape).astype(x.dtype), u)
  )
  assert noisy.draws == 'noise' and not noisy.agrees


@pytest.mark.long
@pytest.mark.parametrize(
  ('wrong', 'named'),
  [
    ({'local_batch_size': None}, {'local_batch_size': 2}),
    ({'local_batch_size': 3}, {'local_batch_size': 2}),  # as many steps on as many samples
    ({'momentum': 0.0}, {'momentum': 0.5}),
    ({'local_batch_size': None, 'learning_rate': 0.03}, {'local_batch_size': 2, 'learning_rate': 0.1}),
  ],
  ids=str,
)
def test_what_the_first_step_does_not_show_is_named_of_a_client_that_shuffles(check, wrong, named):
  """On one sample, one step is all that any batch size and momentum make."""
  client = {'local_epochs': 1}
  believed = dataclasses.replace(BELIEVED, **client, **wrong)
  found = check(client, transform=in_new_orders(np.random.default_rng(0)), believed=believed)
  assert found.draws == 'order' and not found.agrees
  assert found.explanations[0].changes == named and found.explanations[0].difference < 1e-4
  assert all(f'{name}={value}' in found.words[0] for name, value in named.items())


@pytest.mark.slow
def test_a_normalisation_and_a_dropped_batch_are_named_of_a_client_that_shuffles(check):
  believed = dataclasses.replace(BELIEVED, local_epochs=1, local_batch_size=None)
  mixed = in_new_orders(np.random.default_rng(0))

  def normalised(images, labels):
    return mixed((images - np.float32(0.5)) / np.float32(0.5), labels)

  (one,) = check({'local_epochs': 1}, transform=normalised, believed=believed).explanations
  assert one.words == 'a normalisation 0.5 and 0.5 and local_batch_size=2'
  change = {'local_epochs': 1, 'local_batch_size': 3}  # one sample fills no batch
  believed = dataclasses.replace(BELIEVED, **change)
  (one,) = check({**change, 'last_batch': 'dropped'}, transform=mixed, believed=believed).explanations
  assert one.changes == {'last_batch': 'dropped'}


@pytest.mark.long
@pytest.mark.parametrize('shuffles', [False, True])
@pytest.mark.parametrize('believed', [{'sample_order': 'shuffled'}, {'augment': 'flip'}], ids=str)
def test_a_client_that_does_not_draw_what_the_simulated_one_does_is_another(check, shuffles, believed):
  transform = in_new_orders(np.random.default_rng(0)) if shuffles else None
  found = check(transform=transform, believed=dataclasses.replace(BELIEVED, **believed))
  if shuffles and 'sample_order' in believed:
    assert found.agrees and not found.explanations
    return
  (one,) = found.explanations
  named = {name: {'sample_order': 'fixed', 'augment': 'none'}[name] for name in believed}
  assert not found.agrees and one.changes == named and 'draws what the client does not' in found.words[0]


def test_an_order_that_changes_nothing_is_not_drawn(check):
  """All samples are in one batch."""
  client = {'local_batch_size': None, 'sample_order': 'shuffled'}
  assert check({'local_batch_size': None}, believed=dataclasses.replace(BELIEVED, **client)).agrees


@pytest.mark.slow
def test_a_named_defense_is_simulated_and_a_wrong_strength_is_found(check):
  draw = np.random.default_rng(1)

  def noisy(update):
    clipped = jax.tree.map(lambda u: u * np.float32(min(1, 0.1 / comparison._norm(update))), update)
    return jax.tree.map(lambda x: x + draw.normal(0, 0.002, x.shape).astype(x.dtype), clipped)

  right = check(after=noisy, defense=defenses.client_dp(norm=0.1, noise=0.02))
  assert right.agrees and 'they agree' in right.words[0]
  for norm, noise in ((0.1, 0.03), (0.2, 0.01)):
    wrong = check(after=noisy, defense=defenses.client_dp(norm=norm, noise=noise))
    assert not wrong.agrees and 'do not agree' in wrong.words[0]
  plain = check(defense=defenses.prune(rate=0.5))
  assert not plain.agrees and 'differs' in plain.words[0]


@pytest.fixture(scope='module')
def normed(variables):
  """Returns a network with a bias in front of a mean that takes it away, and its variables."""
  plain = models.create('mlp(widths=16)', 4)

  def apply(params, images):
    shifted = images + params['bias'][None, None, None]
    return plain.apply({'params': params['net']}, shifted - shifted.mean((1, 2), keepdims=True))[0]

  model = models.from_functions(
    lambda key, shape: {'net': plain.init(key, shape)['params'], 'bias': np.zeros(3)}, apply
  )
  return model, {'params': {'net': variables['params'], 'bias': np.zeros(3, np.float32)}}


ADAM = ClientSettings(share='delta', learning_rate=0.001, optimizer='adam')


def along_rounding(normed, believed, settings=ADAM, shuffles=False):
  """Compares a client whose steps along the bias have signs of their own, as with another order of a sum."""
  coins = itertools.cycle((-1, 1))

  def fit(images, labels):
    sign = next(coins) if shuffles and len(images) > 1 else 1
    update = comparison._simulated(*normed, 4, settings, images[::sign], labels[::sign])
    return {**update, 'bias': sign * np.float32([1e-3, -1e-3, 1e-3])}

  return compare(fit, *normed, IMAGES, LABELS, believed, 4)


@pytest.mark.long
def test_steps_along_nothing_but_rounding_are_no_difference(normed):
  """The bias has no gradient but rounding, and Adam steps along it at full length."""
  found = along_rounding(normed, ADAM)
  assert found.agrees and found.difference > 10 * comparison.AGREES and 'which rounding would explain' in found.words[0]
  batched = dataclasses.replace(ADAM, local_batch_size=3)
  drawn = along_rounding(normed, batched, batched, shuffles=True)
  assert drawn.draws == 'order' and drawn.agrees and 'On one sample the simulated client agrees' in drawn.words[0]
  simulate, variables = comparison._sent(comparison._simulated, normed[0], 4, ADAM), normed[1]
  for factor, explained in ((1.0, True), (1.02, False)):  # a rate that is wrong by 2 % is no rounding
    target = jax.tree.map(lambda u, factor=factor: u * np.float32(factor), found.update)
    assert comparison._rounded(simulate, variables, target, IMAGES, LABELS) is explained


@pytest.mark.slow
def test_settings_are_named_beside_steps_along_nothing_but_rounding(normed):
  named = along_rounding(normed, ClientSettings(share='delta', learning_rate=0.001))
  assert not named.agrees and named.explanations[0].changes['optimizer'] == 'adam'
  sgd = dataclasses.replace(ADAM, optimizer='sgd')
  twice = along_rounding(normed, sgd, dataclasses.replace(ADAM, local_epochs=2))
  assert twice.explanations[0].changes == {'local_epochs': 2, 'optimizer': 'adam', 'momentum': 0.0}
