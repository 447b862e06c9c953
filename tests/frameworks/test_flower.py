"""Real client apps of Flower in process: recorded, compared, attacked with the truth."""

import copy
import logging
import pathlib
import runpy
import time

import jax
import numpy as np
import pytest

from gradleak import attacks, data, defenses, modalities, models
from gradleak.core import errors
from gradleak.models.model import check_variables

pytest.importorskip('torch')
pytest.importorskip('flwr')

import torch

from gradleak import flower
from tests.frameworks import quickstart

IMAGES = np.random.default_rng(0).uniform(size=(4, 32, 32, 3)).astype(np.float32)
LABELS = np.asarray([3, 1, 4, 1])
KNOWN = {'learning_rate': 0.01, 'momentum': 0.9}
FLIP = {'norm': 1.0, 'sensitivity': 1e-4, 'epsilon': 10.0, 'delta': 1e-5}


@pytest.fixture(scope='module', autouse=True)
def quiet():
  logging.getLogger('flwr').setLevel(logging.ERROR)


@pytest.fixture(scope='module')
def network():
  torch.manual_seed(0)
  return models.from_torch(quickstart.Net(), IMAGES, mean=(0.5,) * 3, std=(0.5,) * 3)


def audited(sent, client=quickstart.app, known=KNOWN, defense=None, **settings):
  return flower.audit(lambda x, y: client(x, y, **settings), IMAGES, LABELS, *sent, defense=defense, **known).comparison


@pytest.mark.parametrize('client', [quickstart.app, quickstart.numpy_client, quickstart.legacy_app])
def test_the_quickstart_is_the_client_that_is_simulated(network, client):
  found = audited(network, client)
  assert found.agrees and found.difference < 1e-4 and found.draws == ''


@pytest.mark.parametrize(
  ('settings', 'words'),
  [
    ({'lr': 0.05}, 'learning_rate=0.05'),
    ({'epochs': 3}, 'local_epochs=3'),
    ({'batch': 2}, 'local_batch_size=2'),
    ({'mean': 0.0, 'std': 1.0}, 'a normalisation none'),
  ],
  ids=str,
)
def test_a_setting_that_the_user_did_not_know_is_named(network, settings, words):
  found = audited(network, **settings)
  assert not found.agrees and words in found.words[0]


def test_batch_norm_trains_as_theirs_and_its_mode_is_named():
  network = models.from_torch(quickstart.normed(), IMAGES, mean=(0.5,) * 3, std=(0.5,) * 3)
  found = audited(network, quickstart.numpy_client, network=quickstart.normed)
  assert found.agrees and found.difference < 1e-4
  found = audited(network, quickstart.numpy_client, network=quickstart.frozen_statistics)
  assert "batch_norm='eval'" in found.words[0]


def test_shuffling_and_augmentation_show(network):
  known = {**KNOWN, 'local_batch_size': 1}
  assert audited(network, known=known, batch=1, shuffle=True).draws == 'order'
  assert audited(network, flip=True).draws == 'samples'


def test_a_dp_mod_is_recognised_and_recorded_as_what_really_leaves(network, tmp_path):
  from flwr.clientapp.mod import LocalDpMod

  mod = LocalDpMod(FLIP['norm'], FLIP['sensitivity'], FLIP['epsilon'], FLIP['delta'])
  found = audited(network, mods=[flower.record(tmp_path), mod])
  assert found.draws == 'noise' and found.noise == pytest.approx(4.845e-5, rel=0.03)
  (one,) = flower.read(tmp_path)  # the second call took the place of the first
  assert one.facts['num-examples'] == 4 and one.facts['round'] == '1'
  sent = network[0].layout.to_theirs(network[1])
  assert list(one.sent) == list(sent) and all(np.array_equal(one.sent[name], sent[name]) for name in sent)
  noise = audited(network, mods=[mod], defense=defenses.local_dp(**FLIP))
  assert noise.agrees
  assert not audited(network, mods=[mod], defense=defenses.local_dp(**{**FLIP, 'sensitivity': 2e-4})).agrees
  inner = audited(network, mods=[LocalDpMod(1e-3, 0, 10, 1e-5), flower.record(tmp_path / 'inner')])
  assert 'clipped to the norm 0.001' in inner.words[0]
  norm = np.sqrt(sum(np.sum(np.square(leaf)) for leaf in jax.tree.leaves(inner.update)))
  (one,) = flower.read(tmp_path / 'inner')
  moved = np.sqrt(sum(np.sum(np.square(leaf)) for leaf in jax.tree.leaves(flower.update_of(one, network[0]))))
  assert norm == pytest.approx(1e-3, rel=1e-2) and moved > 5e-3  # behind the mod nothing is clipped yet


def test_dp_sgd_is_recognised_and_simulated(network):
  found = audited(network, quickstart.private_app, norm=0.5, noise=0.2, known={'learning_rate': 0.01})
  assert found.draws == 'noise' and found.noise == pytest.approx(0.01 * 0.2 * 0.5 / 4, rel=0.05)
  for noise, right in ((0.2, True), (0.3, False)):
    defense = defenses.dpsgd(norm=0.5, noise=noise)
    one = audited(network, quickstart.private_app, norm=0.5, noise=0.2, known={'learning_rate': 0.01}, defense=defense)
    assert one.agrees == right


def test_the_attack_has_verdicts_and_sees_the_update_of_the_client(network):
  found = flower.audit(
    quickstart.app,
    IMAGES[:1],
    LABELS[:1],
    *network,
    key=jax.random.key(0),
    steps=20,
    controls=2,
    progress=None,
    **KNOWN,
  )
  assert found.comparison.agrees and str(found).startswith('The simulated client agrees')
  assert found.captured.rows and all('verdict' in row and np.isfinite(row['psnr']) for row in found.captured.rows)
  assert flower.audit(quickstart.app, IMAGES[:1], LABELS[:1], *network, **KNOWN).captured is None


def test_attacks_simulate_the_client_with_what_explains_the_difference(network):
  given = {'key': jax.random.key(0), 'steps': 20, 'controls': 2, 'progress': None, 'defense': 'none', **KNOWN}
  wrong = flower.audit(lambda x, y: quickstart.app(x, y, lr=0.05), IMAGES[:1], LABELS[:1], *network, **given)
  assert wrong.client.learning_rate == 0.05 and wrong.captured.config['learning_rate'] == 0.05
  assert str(wrong).endswith('They agree with learning_rate=0.05. Attacks simulate the client with that.')
  known = {**KNOWN, 'local_batch_size': 1}
  shuffled = flower.audit(lambda x, y: quickstart.app(x, y, batch=1, shuffle=True), IMAGES, LABELS, *network, **known)
  assert shuffled.client.sample_order == 'shuffled' and 'Attacks' not in str(shuffled)


def test_the_servers_side_is_recorded_before_the_server_clips(network, tmp_path):
  from flwr.app import ArrayRecord, ConfigRecord, Message, Metadata, MetricRecord, RecordDict
  from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping, FedAvg

  arrays = ArrayRecord({name: torch.tensor(array) for name, array in network[0].layout.to_theirs(network[1]).items()})

  class Strategy(FedAvg):
    def configure_train(self, server_round, arrays, config, grid):
      content = RecordDict({'arrays': arrays, 'config': config})
      return [
        Message(content, metadata=Metadata(1, str(node), 0, node, '', '1', 0.0, 1e9, 'train')) for node in (11, 12)
      ]

  def moved(message):
    weights = {name: torch.tensor(array.numpy() + 0.5) for name, array in message.content['arrays'].items()}
    content = RecordDict({'arrays': ArrayRecord(weights), 'metrics': MetricRecord({'num-examples': 3})})
    return Message(content, metadata=Metadata(1, '', message.metadata.dst_node_id, 0, '', '1', 0.0, 1e9, 'train'))

  strategy = DifferentialPrivacyServerSideFixedClipping(Strategy(), 0.0, 1e-3, 2)
  strategy = flower.recorded(strategy, tmp_path)
  messages = strategy.configure_train(2, arrays, ConfigRecord({'lr': 0.1}), None)
  aggregated, _ = strategy.aggregate_train(2, [moved(message) for message in messages])
  found = flower.read(tmp_path)
  assert [(one.facts['round'], one.facts['node'], one.facts['lr']) for one in found] == [
    (2, n, 0.1) for n in ('11', '12')
  ]
  for name, array in found[0].sent.items():
    np.testing.assert_allclose(found[0].returned[name], array + 0.5, rtol=1e-6)
    assert np.abs(aggregated[name].numpy() - array).max() < 1e-3  # the server clipped after the record
  with pytest.raises(errors.UsageError, match=r'flwr\.server\.strategy'):
    flower.recorded(object(), tmp_path)


@pytest.fixture(scope='module')
def grey():
  torch.manual_seed(0)
  images = np.random.default_rng(0).uniform(size=(3, 4, 4, 1)).astype(np.float32)
  flat = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 3))
  return images, models.from_torch(flat, images, mean=(0.5,), std=(0.5,)), flat


def test_a_client_that_normalises_in_place_leaves_the_samples_as_they_are(grey):
  images, network, flat = grey
  before = images.copy()

  def client(x, y):
    return quickstart.numpy_client(x.sub_(0.5).div_(0.5), y, network=lambda: copy.deepcopy(flat), mean=0.0, std=1.0)

  found = flower.audit(client, images, np.asarray([0, 1, 2]), *network, **KNOWN)
  np.testing.assert_array_equal(images, before)
  assert found.comparison.agrees


def _changed(grey, change, **settings):
  """Returns the audit of a client that changes the arrays which it returns, each by (array sent, array trained)."""
  images, network, flat = grey

  def client(x, y):
    made = quickstart.numpy_client(x, y, network=lambda: copy.deepcopy(flat), **settings)
    train = made.fit
    made.fit = lambda sent, config: ([change(*pair) for pair in zip(sent, train(sent, config)[0], strict=True)], 3, {})
    return made

  return flower.audit(client, images, np.asarray([0, 1, 2]), *network, **KNOWN)


def test_a_client_that_rounds_its_weights_is_told_at_once(grey):
  def half(sent, trained):
    return trained.astype(np.float16)

  found = _changed(grey, half).comparison
  assert found.agrees and not found.explanations
  assert 'agrees, but for rounding. The client returns float16, which moves the update by' in found.words[0]
  found = _changed(grey, half, lr=0.05).comparison  # no setting is searched for
  assert not found.agrees and not found.explanations and 'have it return float32' in found.words[0]


@pytest.mark.parametrize(
  ('change', 'match'),
  [
    (lambda sent, trained: trained - sent, r'these look like a difference of weights, expected the weights after'),
    (lambda sent, trained: (100 * trained).astype(np.int8), r"the array '1\.weight' is int8, expected floats"),
    (lambda sent, trained: trained * np.float32('nan'), r'returns values that are not finite: its training diverges'),
  ],
  ids=['delta', 'integers', 'nan'],
)
def test_what_is_no_weights_is_refused_before_settings_are_tried(change, match, grey):
  with pytest.raises(errors.UsageError, match=match):
    _changed(grey, change)


@pytest.fixture(scope='module')
def ill():
  """Returns encoded rows of patients, and a network of them: the audit of it takes more settings."""
  torch.manual_seed(0)
  draw = np.random.default_rng(0)
  columns = {'age': draw.integers(18, 90, 40), 'ward': draw.choice(['a', 'b', 'c'], 40)}
  private = data.table(columns, draw.choice(['no', 'yes'], 40))
  samples, targets = private.samples[:3], private.targets[:3]
  network = torch.nn.Sequential(torch.nn.Linear(samples.shape[1], 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))

  def audited(count=3, lr=0.01, **settings):
    def client(x, y):
      assert x.shape == (len(y), samples.shape[1]) and x.dtype == torch.float32
      return quickstart.numpy_client(x, y, network=lambda: copy.deepcopy(network), mean=0.0, std=1.0, lr=lr)

    known = {**KNOWN, 'modality': modalities.of_config(private.settings), **settings}
    return flower.audit(client, samples[:count], targets[:count], *sent, **known)

  sent = models.from_torch(network, samples)
  return audited


def test_a_client_of_rows_is_compared_and_attacked(ill):
  assert ill().comparison.agrees
  found = ill(lr=0.05).comparison
  assert [one.words for one in found.explanations] == ['learning_rate=0.05']
  found = ill(count=1, key=jax.random.key(0), attacks=[attacks.fidel()], progress='none')
  assert found.comparison.agrees
  assert [row['verdict'] for row in found.captured.rows] == ['exact']


def test_rows_that_are_taken_for_images_are_refused_with_what_to_give(ill):
  with pytest.raises(errors.UsageError, match=r'takes samples of 1 axes, and images have 3: give modality='):
    ill(modality=modalities.IMAGES)
  with pytest.raises(errors.UsageError, match=r'takes floats, and texts are int32'):
    ill(modality=modalities.TEXT)
  with pytest.raises(errors.UsageError, match=r'expected a gradleak\.modalities\.Modality'):
    ill(modality='table')


@pytest.mark.long
def test_a_client_of_texts_is_compared_and_attacked():
  torch.manual_seed(0)
  texts = np.random.default_rng(0).integers(1, 256, (3, 5)).astype(np.int32)
  network = torch.nn.Sequential(torch.nn.Embedding(256, 4), torch.nn.Flatten(), torch.nn.Linear(20, 2))

  def client(x, y, **settings):
    assert x.shape == (len(y), 5) and x.dtype == torch.int64
    return quickstart.numpy_client(x, y, network=lambda: copy.deepcopy(network), mean=0.0, std=1.0, **settings)

  sent = models.from_torch(network, texts)
  what = texts, np.asarray([0, 1, 1]), *sent
  known = {**KNOWN, 'modality': modalities.TEXT, 'loss': 'cross_entropy'}
  assert flower.audit(client, *what, **known).comparison.agrees
  found = flower.audit(lambda x, y: client(x, y, batch=2), *what, **known).comparison
  assert [one.words for one in found.explanations] == ['local_batch_size=2']
  run = {'key': jax.random.key(0), 'attacks': [attacks.tag(steps=300, decay='cosine')], 'progress': 'none'}
  attacked = flower.audit(client, texts[:1], np.asarray([1]), *sent, **known, **run)
  assert [row['verdict'] for row in attacked.captured.rows] == ['exact']
  unknown = flower.audit(lambda x, y: client(x, y, batch=2, lr=0.013, momentum=0.3), *what, **known).comparison
  assert not unknown.agrees and not unknown.explanations  # no neighbours of a token tell how it rounds


def test_labels_and_pixels_out_of_range_are_refused_before_the_client_is_called(grey):
  images, network, _ = grey
  for samples, targets, match in (
    (images, [0, 1, -100], r'image 2 has the label -100, expected in \[0, 2\].*ignore_index'),
    (images, [0, 3, 1], r'image 1 has the label 3, expected in \[0, 2\]$'),
    (images * 255, [0, 1, 2], 'image 0 has a pixel of'),
  ):
    with pytest.raises(errors.UsageError, match=match):
      flower.audit(lambda x, y: pytest.fail('called'), samples, np.asarray(targets), *network, **KNOWN)


def test_a_client_that_returns_weights_shares_no_gradient(grey):
  images, network, _ = grey
  with pytest.raises(errors.UsageError, match="share is 'gradient', and a Flower client returns its weights"):
    flower.audit(lambda x, y: pytest.fail('called'), images, np.asarray([0, 1, 2]), *network, share='gradient')


def test_the_folder_of_a_record_has_its_name_from_the_round_and_from_no_metric(tmp_path):
  from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, Metadata, MetricRecord, RecordDict

  def trained(message, context):
    content = {'arrays': message.content['arrays'], 'metrics': MetricRecord({'round': 0, 'node': 3, 'loss': 0.5})}
    return Message(RecordDict(content), reply_to=message)

  for number in ('1', '2'):
    content = {'arrays': ArrayRecord({'w': Array(np.ones(2))}), 'config': ConfigRecord({'round': 7})}
    message = Message(RecordDict(content), metadata=Metadata(1, 'm', 0, 7, '', number, time.time(), 3600.0, 'train'))
    flower.record(tmp_path)(message, Context(1, 7, {}, RecordDict(), {}), trained)
  found = [one.facts for one in flower.read(tmp_path)]
  assert found == [{'round': number, 'node': '7', 'loss': 0.5} for number in ('1', '2')]


def test_the_count_of_batches_is_held_as_the_model_holds_it():
  """Flower records num_batches_tracked as int64, and variables hold all statistics as floats."""
  nn = torch.nn
  module = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(72, 3))
  model, variables = models.from_torch(module, torch.rand(2, 1, 8, 8), check=False)
  sent = {name: value.numpy() for name, value in module.state_dict().items()}
  assert sent['1.num_batches_tracked'].dtype == np.int64
  found = flower.weights_of(flower.Exchange(sent, {}, {}), model)
  jax.tree.map(np.testing.assert_array_equal, found, dict(variables))
  check_variables(model, found, (8, 8, 1))


def test_what_a_numpy_client_was_sent_is_read_as_variables(grey):
  _, (model, variables), _ = grey
  named = model.layout.to_theirs(variables)
  for sent in (named, {str(i): array for i, array in enumerate(named.values())}):
    found = flower.weights_of(flower.Exchange(sent, {}, {}), model)
    jax.tree.map(np.testing.assert_array_equal, found, dict(variables))
  with pytest.raises(errors.UsageError, match='not the state dict'):
    flower.weights_of(flower.Exchange({'0': named['1.weight']}, {}, {}), model)


def test_the_exchange_is_the_training_whose_update_is_attacked(grey):
  """What a simulated client draws, and the client does not, makes the comparison run again."""
  images, network, flat = grey

  def client(x, y):
    return quickstart.numpy_client(x, y, network=lambda: copy.deepcopy(flat), batch=1, shuffle=True)

  known = {**KNOWN, 'local_batch_size': 1, 'sample_order': 'shuffled', 'augment': 'flip'}
  torch.manual_seed(0)
  found = flower.audit(client, images, np.asarray([0, 1, 2]), *network, **known)
  assert 'draws what the client does not' in str(found)
  sent = flower.update_of(found.exchange, network[0])
  jax.tree.map(np.testing.assert_array_equal, sent, found.comparison.update)


class Tied(torch.nn.Module):
  """Square layers, of which the second has the weight of the first."""

  def __init__(self):
    super().__init__()
    self.a, self.b, self.c = (torch.nn.Linear(16, 16, bias=False) for _ in range(3))
    self.b.weight = self.a.weight

  def forward(self, x):
    return self.c(torch.tanh(self.b(torch.tanh(self.a(x.flatten(1))))))


def test_tied_weights_stand_where_the_state_dict_has_them():
  torch.manual_seed(0)
  module, images = Tied(), np.random.default_rng(0).uniform(size=(3, 4, 4, 1)).astype(np.float32)
  model, variables = models.from_torch(module, images, mean=(0.5,), std=(0.5,))

  def client(x, y):
    return quickstart.numpy_client(x, y, network=lambda: copy.deepcopy(module))

  assert flower.audit(client, images, np.asarray([0, 1, 2]), model, variables, **KNOWN).comparison.agrees
  sent = {str(i): value.numpy() for i, value in enumerate(module.state_dict().values())}
  found = flower.weights_of(flower.Exchange(sent, {}, {}), model)
  jax.tree.map(np.testing.assert_array_equal, found, dict(variables))
  with pytest.raises(errors.UsageError, match=r'b\.weight and a\.weight are one tensor'):
    flower.weights_of(flower.Exchange({**sent, '1': sent['2']}, {}, {}), model)
  for given in (
    {name: np.full_like(value, np.nan) for name, value in sent.items()},
    {**sent, '1': sent['1'] + 1},  # a mod adds noise to each array
    {str(i): value.detach().numpy() for i, value in enumerate(module.parameters())},
  ):
    flower.update_of(flower.Exchange(sent, given, {}), model)


def test_a_client_may_count_other_samples_too(network):
  assert audited(network, metrics={'val-num-examples': 7, 'val_num_examples': 7}).agrees


def test_clients_that_are_not_understood_are_refused(network, tmp_path):
  for client, match in (
    (lambda x, y: 3, 'expected a ClientApp'),
    (lambda x, y: quickstart.app(x[:2], y[:2]), 'trained on 2 samples'),
    (lambda x, y: quickstart.app(x, y, lr=0.0), 'did not train'),
    (lambda x, y: quickstart.numpy_client(x, y, keep=3), 'not the state dict'),
  ):
    with pytest.raises(errors.UsageError, match=match):
      flower.audit(client, IMAGES, LABELS, *network, **KNOWN)
  with pytest.raises(errors.UsageError, match="unknown setting 'local_optimizer'"):
    flower.audit(quickstart.app, IMAGES, LABELS, *network, local_optimizer='adam')
  built = models.create('lenet', 10)
  with pytest.raises(errors.UsageError, match='from_torch'):
    flower.audit(quickstart.app, IMAGES, LABELS, built, built.init(jax.random.key(0), (32, 32, 3)), **KNOWN)
  with pytest.raises(errors.UsageError, match='secure aggregation'):
    flower.update_of(flower.Exchange({}, {}, {}), network[0])


def test_secure_aggregation_rounds_as_theirs():
  """A client rounds its weights, times its share, to levels; the server divides the share out again."""
  from flwr.common.secure_aggregation.quantization import dequantize, quantize

  draw = np.random.default_rng(0)
  before, update, share = draw.normal(0, 0.1, (2000,)), draw.normal(0, 1e-2, (2000,)), 0.25
  (whole,) = dequantize(quantize([(before + update) * share], 8.0, 4096), 8.0, 4096)
  theirs = whole / share - before
  ours, params = defenses.secagg_rounding(levels=4096, weight=share), {'w': before.astype(np.float32)}
  sent = ours.update({'w': update.astype(np.float32)}, ours.init(params), params, key=jax.random.key(0))[0]['w']
  step = 16 / 4096 / share
  for one in (theirs, np.asarray(sent)):
    assert np.abs(one - update).max() <= step * 1.001
    assert np.std(one - update) == pytest.approx(step / np.sqrt(6), rel=0.1)
  apart = (np.asarray(sent) - theirs) / step
  np.testing.assert_allclose(apart, np.round(apart), atol=1e-3)  # on the same levels


@pytest.mark.slow
def test_the_example_records_agrees_and_attacks(tmp_path, monkeypatch, capsys):
  monkeypatch.chdir(tmp_path)
  path = pathlib.Path(__file__).parents[2] / 'examples' / 'flower_quickstart.py'
  assert sum(bool(line.strip()) for line in path.read_text('utf-8').splitlines()) <= 40
  result = runpy.run_path(str(path))['result']
  assert result.comparison.agrees and 'The simulated client agrees' in capsys.readouterr().out
  assert (tmp_path / 'results/flower_audit/report.html').is_file()
  (recorded,) = flower.read('results/flower')
  assert recorded.facts['lr'] == 0.01 and recorded.facts['num-examples'] == 1
  assert max(row['psnr'] for row in result.captured.rows) > 15  # grey is at 13 dB
