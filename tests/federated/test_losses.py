"""Losses and their targets: by hand, in a client, in an audit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradleak as gl
from gradleak.attacks import labels as label_rules
from gradleak.federated import losses, simulation, targets, training

N, SHAPE = 6, (4, 4, 1)
RNG = np.random.default_rng(0)
LOGITS = RNG.normal(size=(N, 3)).astype(np.float32)
CLASSES = np.asarray([0, 2, 1, 1, 0, 2])
FLAGS = np.asarray([[0, 1, 1], [1, 0, 0], [1, 1, 1], [0, 0, 0], [1, 0, 1], [0, 1, 0]], np.float32)
VALUES = RNG.normal(size=(N, 3)).astype(np.float32) * 2
SOFT = RNG.dirichlet(np.ones(3), N).astype(np.float32)
WEIGHT = (0.5, 2.0, 3.5)


def log_softmax(z):
  return z - np.log(np.exp(z).sum(-1, keepdims=True))


def sigmoid(z):
  return 1 / (1 + np.exp(-z))


def negative_log(y):
  """Returns (−log p at the class, −mean log p, weight of the class) of each sample."""
  logs = log_softmax(LOGITS.astype(np.float64))
  return -logs[np.arange(N), y], -logs, np.asarray(WEIGHT)[y]


def binary(weight=1.0, positive=1.0):
  p = sigmoid(LOGITS.astype(np.float64))
  return -np.asarray(weight) * (np.asarray(positive) * FLAGS * np.log(p) + (1 - FLAGS) * np.log(1 - p))


def expected():
  """Yields (loss, targets, its value over the batch), written out as PyTorch's documentation defines it."""
  own, logs, weight = negative_log(CLASSES)
  p = np.exp(-own)
  yield losses.cross_entropy(), CLASSES, own.mean()
  yield losses.cross_entropy(reduction='sum'), CLASSES, own.sum()
  yield losses.cross_entropy(weight=WEIGHT), CLASSES, (weight * own).sum() / weight.sum()
  yield losses.cross_entropy(weight=WEIGHT, reduction='sum'), CLASSES, (weight * own).sum()
  smooth = (weight * own * 0.8 + 0.2 / 3 * (logs * WEIGHT).sum(-1)).sum() / weight.sum()
  yield losses.cross_entropy(weight=WEIGHT, smoothing=0.2), CLASSES, smooth
  yield losses.cross_entropy(smoothing=0.1), CLASSES, (0.9 * own + 0.1 * logs.mean(-1)).mean()
  yield losses.cross_entropy(), SOFT, (SOFT * logs).sum(-1).mean()
  yield losses.cross_entropy(weight=WEIGHT, average='samples'), SOFT, (SOFT * logs * WEIGHT).sum(-1).mean()
  yield losses.focal(gamma=2.0), CLASSES, ((1 - p) ** 2 * own).mean()
  yield losses.focal(gamma=1.5, weight=WEIGHT), CLASSES, (weight * (1 - p) ** 1.5 * own).mean()
  yield losses.binary_cross_entropy(), FLAGS, binary().mean()
  yield losses.binary_cross_entropy(weight=WEIGHT, positive=(1.0, 4.0, 0.5)), FLAGS, binary(WEIGHT, (1, 4, 0.5)).mean()
  yield losses.binary_cross_entropy(reduction='sum'), FLAGS, binary().sum()
  q = np.where(FLAGS == 1, sigmoid(LOGITS), 1 - sigmoid(LOGITS))
  focal = np.where(FLAGS == 1, 0.25, 0.75) * (1 - q) ** 2 * binary()
  yield losses.binary_focal(), FLAGS, focal.mean()
  apart = np.abs(LOGITS - VALUES)
  yield losses.mean_squared_error(), VALUES, (apart**2).mean()
  yield losses.mean_squared_error(reduction='sum'), VALUES, (apart**2).sum()
  yield losses.huber(delta=0.7), VALUES, np.where(apart <= 0.7, apart**2 / 2, 0.7 * (apart - 0.35)).mean()


def linear(outputs=3):
  """Returns a model of outputs x·w + b, and its variables."""
  model = gl.models.from_functions(
    lambda key, shape: {'w': 0.3 * jax.random.normal(key, (int(np.prod(shape)), outputs)), 'b': jnp.zeros(outputs)},
    lambda params, images: images.reshape(len(images), -1) @ params['w'] + params['b'].reshape(1, -1),
    'linear',
  )
  return model, model.init(jax.random.key(1), SHAPE)


@pytest.mark.parametrize(('loss', 'given', 'value'), list(expected()), ids=lambda one: str(one)[:60])
def test_losses_of_a_batch_by_hand(loss, given, value):
  encoded = loss.targets.encode(jnp.asarray(given), 3, jnp.float32)
  each = loss(jnp.asarray(LOGITS), encoded)
  assert each.shape == (N,)
  found = loss.reduced(each, encoded, jnp.ones(N))
  np.testing.assert_allclose(found, value, rtol=2e-6)
  padded = loss.reduced(each, encoded, jnp.asarray([1.0] * 4 + [0.0] * 2))  # the last two are padding
  np.testing.assert_allclose(padded, loss.reduced(each[:4], encoded[:4], jnp.ones(4)), rtol=1e-6)
  alone = jnp.stack([loss(jnp.asarray(LOGITS[i : i + 1]), encoded[i : i + 1])[0] for i in range(N)])
  np.testing.assert_allclose(each, alone, rtol=1e-6)


def test_losses_equal_pytorch_s():
  torch = pytest.importorskip('torch')
  functional = torch.nn.functional
  z, weight, smoothing = torch.tensor(LOGITS), torch.tensor(WEIGHT), 0.2
  classes, flags, values = torch.tensor(CLASSES), torch.tensor(FLAGS), torch.tensor(VALUES)
  pairs = [
    (losses.cross_entropy(weight=WEIGHT, smoothing=0.2), CLASSES,
     functional.cross_entropy(z, classes, weight, label_smoothing=smoothing)),
    (losses.cross_entropy(weight=WEIGHT, average='samples'), SOFT,
     functional.cross_entropy(z, torch.tensor(SOFT), weight)),
    (losses.binary_cross_entropy(weight=WEIGHT, positive=WEIGHT), FLAGS,
     functional.binary_cross_entropy_with_logits(z, flags, weight, pos_weight=weight)),
    (losses.huber(delta=0.7), VALUES, functional.huber_loss(z, values, delta=0.7)),
    (losses.mean_squared_error(reduction='sum'), VALUES, functional.mse_loss(z, values, reduction='sum')),
  ]  # fmt: skip
  for loss, given, value in pairs:
    encoded = loss.targets.encode(jnp.asarray(given), 3, jnp.float32)
    found = loss.reduced(loss(jnp.asarray(LOGITS), encoded), encoded, jnp.ones(N))
    np.testing.assert_allclose(found, value.item(), rtol=2e-6, err_msg=str(loss))


def test_a_segmentation_averages_over_its_pixels():
  z, y = RNG.normal(size=(2, 5, 4, 3)).astype(np.float32), RNG.integers(0, 3, (2, 5, 4))
  logs = log_softmax(z.astype(np.float64))
  own = -np.take_along_axis(logs, y[..., None], -1)[..., 0]
  weight = np.asarray(WEIGHT)[y]
  for loss, value in (
    (losses.cross_entropy(), own.mean()),
    (losses.cross_entropy(weight=WEIGHT), (own * weight).sum() / weight.sum()),
  ):
    encoded = loss.targets.encode(jnp.asarray(y), 3, jnp.float32)
    assert encoded.shape == z.shape
    np.testing.assert_allclose(
      loss.reduced(loss(jnp.asarray(z), encoded), encoded, jnp.ones(2)), value, rtol=2e-6, err_msg=str(loss)
    )
  p, hot = np.exp(logs).reshape(2, 20, 3), np.eye(3)[y].reshape(2, 20, 3)
  overlap = 1 - (2 * (p * hot).sum(1) + 1) / (p.sum(1) + hot.sum(1) + 1)
  dice = losses.dice(smooth=1.0)
  np.testing.assert_allclose(dice(jnp.asarray(z), encoded), overlap.mean(-1), rtol=2e-5)


@pytest.mark.long
@pytest.mark.parametrize('loss', ['cross_entropy', 'dice'])
def test_a_segmentation_is_attacked(loss):
  def init(key, shape):
    return {'kernel': jax.random.normal(key, (9 * shape[2], 3))}

  def apply(params, images):
    patches = jax.lax.conv_general_dilated_patches(
      images, (3, 3), (1, 1), 'SAME', dimension_numbers=('NHWC', 'HWIO', 'NHWC')
    )
    return jnp.tanh(patches) @ params['kernel'].reshape(1, 1, *params['kernel'].shape)

  images = RNG.random((4, 5, 6, 1)).astype(np.float32)
  classes = RNG.integers(0, 3, images.shape[:3])
  model = gl.models.from_functions(init, apply, 'pixels')
  built = gl.scenario(model, images, classes, key=jax.random.key(0), loss=loss)
  found = gl.audit(jax.random.key(1), built, [None], [gl.attacks.csdlg(steps=200)], 2, labels='known', controls=2)
  assert all(row['objective'] < 0.2 * row['objective_start'] for row in found.rows)
  with pytest.raises(gl.UsageError, match='identification is for one class of each sample'):
    gl.identify(jax.random.key(0), built, [None], 2)
  with pytest.raises(gl.UsageError, match=r'\(4, 5, 6\)'):
    gl.scenario(model, images, classes[:, :4], key=jax.random.key(0), loss=loss)


@pytest.mark.long
@pytest.mark.parametrize(
  ('loss', 'given'),
  [
    (losses.cross_entropy(weight=WEIGHT, smoothing=0.1), CLASSES),
    (losses.focal(), CLASSES),
    (losses.binary_cross_entropy(positive=(2.0, 1.0, 1.0)), FLAGS),
    (losses.mean_squared_error(), VALUES),
    (losses.huber(reduction='sum'), VALUES),
  ],
  ids=str,
)
def test_a_client_trains_on_each_loss(loss, given, small_images):
  """Two steps of SGD in batches of three equal those that are written out."""
  model, variables = linear()
  images = small_images[0][:N, ::2, ::2]
  client = gl.ClientSettings(share='delta', local_batch_size=3, learning_rate=0.1, loss=loss).client(model, 3)
  found = jax.jit(client.local_update)(None, variables, images, given).update
  params = variables['params']

  def value(params, x, y):
    z = model.apply({'params': params}, x, True, None)[0]
    return loss.reduced(loss(z, y), y, jnp.ones(3))

  encoded = loss.targets.encode(jnp.asarray(given), 3, jnp.float32)
  for first in (0, 3):
    gradient = jax.grad(value)(params, images[first : first + 3], encoded[first : first + 3])
    params = jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient)
  for name, leaf in found.items():
    np.testing.assert_allclose(leaf, params[name] - variables['params'][name], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
  ('loss', 'given', 'words'),
  [
    ('cross_entropy', FLAGS.astype(int), r'targets are int\d+ of shape \(6, 3\), and the model returns outputs'),
    ('cross_entropy', [0, 1, 2, 3, 0, 1], r'image 3 has the label 3, expected in \[0, 2\]'),
    ('binary_cross_entropy', CLASSES, r'expected 0 and 1 for each output, of shape \(6, 3\)'),
    ('binary_cross_entropy', 2 * FLAGS, r'image 0 has the label 2.0, expected 0, 1 or a probability'),
    ('mean_squared_error', CLASSES, r'expected floats for each output, of shape \(6, 3\)'),
    (
      'mean_squared_error',
      np.where(VALUES.max() == VALUES, np.inf, VALUES),
      r'the target of image \d, output \d, is inf, expected finite numbers',
    ),
    ('hinge', CLASSES, r"unknown loss 'hinge'"),
    ('cross_entropy(weight=(1,2))', CLASSES, r'a loss has 2 weights, \(1.0, 2.0\), and the model 3 outputs'),
    ('cross_entropy(smoothing=2)', CLASSES, r'smoothing'),
  ],
)
def test_targets_that_do_not_fit_are_refused(loss, given, words, small_images):
  model, variables = linear()
  with pytest.raises(gl.UsageError, match=words):
    built = gl.scenario(model, small_images[0][:N, ::2, ::2], np.asarray(given), variables=variables, loss=loss)
    built.client.local_update(None, variables, built.samples, built.targets)


ONE_HOT = np.eye(3, dtype=np.float32)[CLASSES]
WRONG = {
  r'the probabilities of {} 0 sum to 1.2, expected 1: .* the loss is .binary_cross_entropy': ONE_HOT * np.float32(1.2),
  r'{} 3 has the probability -0.5 of class 2, expected numbers ≥ 0 that sum to 1': ONE_HOT
  + np.where(np.arange(N)[:, None] == 3, np.float32([[0.5, 0, -0.5]]), np.float32(0)),
  r'{} 1 has the probability nan of class 0, expected': np.where(np.eye(N, 3, -1) > 0, np.float32(np.nan), ONE_HOT),
  r'the probabilities of {} 0 sum to 3, expected 1': np.ones((N, 3), np.float32),
  r'shape \(6, 1\).*give labels\[:, 0\]': CLASSES[:, np.newaxis],
  r'labels are float32 of shape \(6, 1\), expected .* give labels\[:, 0\]': CLASSES[:, np.newaxis].astype(np.float32),
}


@pytest.mark.parametrize(('words', 'given'), WRONG.items(), ids=lambda one: str(one)[:30])
def test_soft_labels_and_columns_are_checked_wherever_they_enter(words, given, small_images):
  """With the number of the sample and the class; nothing that only looks like labels is taken for some."""
  model, variables = linear()
  images = np.asarray(small_images[0][:N, ::2, ::2])
  client = gl.ClientSettings().client(model, 3)
  update = client.local_update(None, variables, images, CLASSES).update
  attacks = [gl.attacks.csdlg(tv=0.0, steps=1)]
  good = simulation.Federation(client, images, CLASSES, [np.arange(N)], 1)

  def captured(**truth):
    return gl.attack(jax.random.key(0), model, variables, update, attacks=attacks, sample_shape=SHAPE, **truth)

  def federation():
    return simulation.start(simulation.Federation(client, images, given, [np.arange(N)], 1), variables)

  of_images = words.format('image')
  for enter in (
    lambda: client.local_update(None, variables, images, given),
    lambda: client.gradient(variables, images, given),
    lambda: gl.scenario(model, images, given, variables=variables),
    lambda: gl.scenario(model, images, CLASSES, variables=variables, public=(images, given)),
    federation,
    lambda: training.train(jax.random.key(0), good, variables, 1, test=(images, given)),
  ):
    with pytest.raises(gl.UsageError, match=of_images):
      enter()
  with pytest.raises(gl.UsageError, match=words.format('sample')):
    simulation.classified(model, variables, images, given)
  with pytest.raises(gl.UsageError, match=of_images):
    captured(truth=(images, given))
  with pytest.raises(gl.UsageError, match=f'{of_images}|labels are'):
    captured(labels=given, num_samples=N)


@pytest.mark.parametrize('dtype', ['float32', 'float16', 'bfloat16'])
def test_rounded_probabilities_sum_to_one(dtype):
  given = jnp.asarray(SOFT, dtype)
  assert targets.CLASSES.checked(given, N, 3) is given
  positions = np.tile(SOFT[:, np.newaxis], (1, 2, 1))
  targets.CLASSES.checked(positions, N, 3)
  positions[4, 1, 2] += 1
  with pytest.raises(gl.UsageError, match=r'probabilities of sample 4 at \(1,\) sum to 2, expected 1'):
    targets.CLASSES.checked(positions, N, 3)


def test_one_column_is_right_where_the_network_has_one_output(small_images):
  model, variables = linear(1)
  images = small_images[0][:N, ::2, ::2]
  for loss, given in (('binary_cross_entropy', FLAGS[:, :1]), ('mean_squared_error', VALUES[:, :1])):
    client = gl.ClientSettings(loss=loss).client(model, 1)
    column, flat = (client.local_update(None, variables, images, one).update for one in (given, given[:, 0]))
    jax.tree.map(np.testing.assert_array_equal, column, flat)


@pytest.mark.slow
def test_one_logit_is_one_flag(small_images):
  model, variables = linear(1)
  images = small_images[0][:N, ::2, ::2]
  built = gl.scenario(model, images, FLAGS[:, 0], variables=variables, loss='binary_cross_entropy')
  found = jax.jit(built.client.local_update)(None, variables, images, FLAGS[:, 0]).update
  z = images.reshape(N, -1) @ variables['params']['w']
  error = (sigmoid(np.asarray(z)) - FLAGS[:, :1]) / N
  np.testing.assert_allclose(found['w'], images.reshape(N, -1).T @ error, rtol=1e-4, atol=1e-7)
  assert built.settings['loss'] == 'binary_cross_entropy' and built.classes.tolist() == [0] * N
  result = gl.audit(
    jax.random.key(0), built, [None], [gl.attacks.csdlg(tv=0.0, steps=2)], 2, batch_size=3, labels='known', controls=1
  )
  assert all(row['objective_at_truth'] < 1e-6 < row['objective'] for row in result.rows)


@pytest.mark.slow
@pytest.mark.parametrize(
  ('loss', 'given', 'labels'),
  [('binary_cross_entropy', FLAGS, 'optimised'), ('mean_squared_error', VALUES, 'known')],
)
def test_an_audit_of_other_targets(loss, given, labels, small_images):
  """Matching finds what a dense layer cannot hide; labels are not scored, for there are none."""
  model = gl.models.create('mlp(widths=8)', 3)
  variables = model.init(jax.random.key(1), SHAPE)
  images = small_images[0][:N, ::2, ::2]
  built = gl.scenario(model, images, given, variables=variables, loss=loss)
  attacks = [gl.attacks.csdlg(tv=0.0, steps=30), gl.attacks.fidel()]
  found = gl.audit(jax.random.key(0), built, [None], attacks, 2, labels=labels, controls=4)
  assert len(found.rows) == 4 and all(row['label_correct'] is None for row in found.rows)
  matched = next(row for row in found.rows if row['attack'].startswith('csdlg'))
  assert matched['objective'] < 0.5 * matched['objective_start']
  if labels == 'known':
    assert matched['objective_at_truth'] < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize('given', [True, False])
def test_a_captured_update_of_flags(given, small_images):
  """Flags are given, or optimised by default; the auditor's truth is judged with them."""
  model = gl.models.create('mlp(widths=8)', 3)
  variables = model.init(jax.random.key(1), SHAPE)
  images = small_images[0][:2, ::2, ::2]
  client = gl.ClientSettings(loss='binary_cross_entropy')
  update = client.client(model, 3).local_update(None, variables, images, FLAGS[:2]).update
  found = gl.attack(
    jax.random.key(0), model, variables, update, attacks=[gl.attacks.csdlg(tv=0.0, steps=20)], sample_shape=SHAPE,
    client=client, truth=(images, FLAGS[:2]), controls=2, progress=None, **({'labels': FLAGS[:2]} if given else {}),
  )  # fmt: skip
  (own,) = found.inversions
  assert own.objective < own.objective_start and not own.labels.size
  assert np.isfinite(own.mismatch) == given  # optimised flags are not returned: no update follows from pictures alone
  assert found.rows[0]['label_correct'] is None and found.rows[0]['labels'] == ('known' if given else 'optimised')
  with pytest.raises(gl.UsageError, match='expected 0 and 1 for each output'):
    gl.attack(
      jax.random.key(0), model, variables, update, sample_shape=SHAPE, client=client, labels=[0, 1], num_samples=2
    )


def test_rules_say_which_losses_they_apply_to(small_images):
  for rule in label_rules.RULES:
    label_rules.check_loss(rule, losses.cross_entropy())
  label_rules.check_loss('yin', losses.focal())
  label_rules.check_loss('bias_corrected', losses.cross_entropy(reduction='sum'))
  refused = [
    ('ilrg', losses.squared_error()),
    ('ilrg', losses.cross_entropy(reduction='sum')),
    ('bias_corrected', losses.cross_entropy(weight=WEIGHT)),
    ('yin', losses.cross_entropy(smoothing=0.1)),
    ('idlg', losses.binary_cross_entropy()),
  ]
  for rule, loss in refused:
    with pytest.raises(gl.UsageError, match=f'the label rule {rule!r} does not apply to the loss {loss.name}'):
      label_rules.check_loss(rule, loss)
  model, variables = linear()
  built = gl.scenario(model, small_images[0][:N, ::2, ::2], FLAGS, variables=variables, loss='binary_cross_entropy')
  with pytest.raises(gl.UsageError, match=r"does not apply to the loss binary_cross_entropy.*labels='optimised'"):
    gl.audit(jax.random.key(0), built, [None], [gl.attacks.csdlg(steps=2)], 1, labels='inferred')


def test_what_compares_classes_refuses_other_targets(small_images):
  model, variables = linear()
  images = small_images[0][:N, ::2, ::2]
  flags = gl.scenario(model, images, FLAGS, variables=variables, loss='binary_cross_entropy')
  with pytest.raises(gl.UsageError, match='identification is for classes, and the loss binary_cross_entropy'):
    gl.identify(jax.random.key(0), flags, [None], 2)
  soft = gl.scenario(model, images, SOFT, variables=variables)
  with pytest.raises(gl.UsageError, match=r'one class of each sample, and the labels have the shape \(6, 3\)'):
    gl.identify(jax.random.key(0), soft, [None], 2)


def test_a_loss_of_one_s_own():
  def absolute(outputs, values):
    return jnp.abs(outputs - values).mean(-1)

  loss = losses.wrap(absolute, 'values')
  assert loss.targets is targets.VALUES and str(loss) == 'absolute' and loss == losses.wrap(absolute, 'values')
  assert losses.as_loss(losses.focal) == losses.focal() == losses.parse('focal(gamma=2)')
  assert losses.focal() != losses.focal(gamma=1.0) and losses.focal().activation == 'softmax'
  with pytest.raises(gl.UsageError, match="unknown kind of targets 'ranks'"):
    losses.wrap(absolute, 'ranks')
  with pytest.raises(gl.UsageError, match='weight is'):
    losses.cross_entropy(weight='balanced')


def test_accuracy_counts_combinations_of_flags(small_images):
  model, variables = linear()
  images = small_images[0][:N, ::2, ::2]
  loss = losses.binary_cross_entropy()
  z = np.asarray(model.apply(variables, images, False, None)[0])
  found, value = simulation.classified(model, variables, images, FLAGS, loss=loss)
  right = ((z > 0) == (FLAGS > 0.5)).all(axis=1)
  assert ((found == simulation.decided(loss, FLAGS)) == right).all()
  p = sigmoid(z)
  np.testing.assert_allclose(value, -(FLAGS * np.log(p) + (1 - FLAGS) * np.log(1 - p)).mean(), rtol=1e-5)
  with pytest.raises(gl.UsageError, match='accuracy is of one class or some flags for each sample'):
    simulation.classified(model, variables, images, VALUES, loss=losses.mean_squared_error())


@pytest.mark.parametrize('name', ['mean', 'sum'])
def test_the_loss_on_test_samples_is_that_of_the_client(name):
  """PyTorch's criterion divides by the weights of the classes of all samples, and not of each by itself."""
  model = gl.models.from_functions(
    lambda key, shape: {'w': jnp.ones(())}, lambda params, x: params['w'] * x.reshape(len(x), -1)
  )
  samples = np.float32([[[[0.9, 0.1]]], [[[0.4, 0.6]]], [[[0.8, 0.2]]]]).reshape(3, 1, 2, 1)
  targets, weight = np.array([0, 1, 1]), (9.0, 1.0)
  loss = losses.cross_entropy(weight=weight, reduction=name)
  logs = np.asarray(jax.nn.log_softmax(samples.reshape(3, 2)))
  each, parts = -logs[range(3), targets], np.asarray(weight)[targets]
  _, found = simulation.classified(model, {'params': {'w': jnp.ones(())}}, samples, targets, 2, loss)
  assert found == pytest.approx((parts * each).sum() / (parts.sum() if name == 'mean' else 3), rel=1e-5)
