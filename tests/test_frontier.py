"""The frontier as one call: what is trained, what is attacked, and what is found again."""

import functools
import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradleak as gl
from gradleak import report
from gradleak.core import statistics
from gradleak.core.promotion import promoting
from gradleak.defenses import chain, compensation, graddefense, server_dp, topk
from gradleak.federated import training
from gradleak.studies import frontier
from gradleak.studies.autoleak import costs
from tests import texts
from tests.attackers import divide

pytestmark = pytest.mark.usefixtures('fast_compilation')


@pytest.fixture(scope='module')
def digits():
  data = gl.data.load('digits', 'train', limit=60)
  return data.samples, data.targets


@pytest.fixture(scope='module')
def call(digits, tmp_path_factory):
  """Returns a function that makes the same small frontier, anew or from its folder."""
  folder = tmp_path_factory.mktemp('frontier') / 'new'
  images, labels = digits
  model = gl.models.from_functions(
    lambda key, _: {'kernel': 0.3 * jax.random.normal(key, (64, 10)), 'bias': jax.numpy.zeros(10)},
    lambda params, images: images.reshape(-1, 64) @ params['kernel'] + params['bias'].reshape(1, -1),
    'linear',
  )

  def make(**changes):
    settings = {'rounds': 2, 'per_round': 2, 'steps': 3, 'trials': 1, 'controls': 2, 'attack_every': 2}
    settings |= {'workdir': folder, 'progress': 'none', **changes}
    attacks = settings.pop('attacks', [gl.attacks.wrap(divide, 'divide', reads=('weights',))])
    local = settings.pop('local', {'share': 'delta', 'local_batch_size': 10, 'learning_rate': 0.1})
    scenario = gl.scenario(
      model, images[:40], labels[:40], key=jax.random.key(1), public=(images[:8], labels[:8]),
      **local,
    )  # fmt: skip
    noisy = graddefense(stddev=0.1, num_slices=2, estimate='probes', root=4)
    defenses = [None, topk(ratio=0.1), chain(noisy, compensation(stddev=0.1, num_slices=2))]
    settings = {'key': jax.random.key(0), 'defenses': defenses, 'clients': 4, **settings}
    return gl.frontier(scenario=scenario, test=(images[40:], labels[40:]), attacks=attacks, **settings)

  return make, folder


@pytest.fixture(scope='module')
def found(call):
  with pytest.MonkeyPatch.context() as patch:  # rounds are measured for seconds, here once
    patch.setattr(training, 'seconds_split', functools.partial(training.seconds_split, repeats=1, seconds=0.0))
    return call[0]()


@pytest.mark.long
def test_each_defense_is_trained_and_attacked(found, digits):
  labels = list(found.trained)
  assert labels[:2] == ['none', 'topk(ratio=0.1)'] and 'compensation(' in labels[2]
  for one in found.trained.values():
    assert [row['round'] for row in one.rows] == [1, 2] and 0 <= one.rows[-1]['accuracy'] <= 1
    last = one.rows[-1]
    assert len(one.wrong) == round((1 - last['accuracy']) * last['tested'])
    assert (last['tested'], last['majority_share']) == (20, np.bincount(digits[1][40:]).max() / 20)
    assert 1 <= last['predicted_classes'] <= 10
  assert found.trained['none'].seconds_defense is None and found.trained['topk(ratio=0.1)'].seconds_defense is not None
  assert {row['defense'] for row in found.rows} == set(labels)
  assert [(leak.defense, leak.round) for leak in found.leakage] == [(one, at) for at in (0, 2) for one in labels]


@pytest.mark.long
def test_a_defense_at_the_server_acts_on_the_mean_and_not_on_the_upload(found):
  _, sparse, compensated = found.trained
  params = found.trained
  assert params[compensated].rows[0]['update_norm'] != params[sparse].rows[0]['update_norm']
  assert found.methods['defenses'][compensated]['places'] == ['upload', 'round']


@pytest.mark.long
def test_the_page_and_a_second_call(found, call):
  make, folder = call
  report.write(found, folder)
  page = (folder / 'training.html').read_text('utf-8')
  assert 'topk(ratio=0.1)' in page
  assert all(
    f'href="{place}/report.html"' in page and (folder / place / 'report.html').exists()
    for place in found.audits.values()
  )
  audit = folder / 'audit' / 'report.html'
  audit.write_text('mine')
  report.write(found, folder)
  assert audit.read_text() == 'mine'
  os.utime(audit, (0, 0))  # older than the audit: made anew
  report.write(found, folder)
  assert audit.read_text('utf-8') != 'mine'
  report.write(found, folder.with_name('elsewhere'))  # where its audits are not
  assert 'report.html' not in (folder.with_name('elsewhere') / 'training.html').read_text('utf-8')
  with pytest.raises(
    gl.UsageError, match=f"{folder.name} holds no finished audit of this version: its folders do, such as '{folder}/"
  ):
    gl.load(folder)
  known = sorted(folder.glob('*/wrong.json'))
  assert len(known) == 3
  known[0].unlink()  # as of a version that did not write it: it is made of the last checkpoint
  again = make()
  assert again.rows == found.rows
  assert [one.wrong for one in again.trained.values()] == [one.wrong for one in found.trained.values()]
  assert [one.rows for one in again.trained.values()] == [one.rows for one in found.trained.values()]


@pytest.mark.long
def test_tokens_are_counted_by_their_texts(tmp_path, monkeypatch):
  """Each token of the test texts counts but the first and the padding."""
  monkeypatch.setattr(training, 'seconds_split', lambda *given, **more: (0.0, None))
  made, test = texts.scenario(number=8), texts.notes(20, 'train')
  samples = test.samples.copy()
  samples[::2, 6:] = made.client.model.padding  # of other lengths
  again = functools.partial(
    gl.frontier, jax.random.key(0), made, (samples, test.targets), [gl.parse('prune(rate=0.9)')], (),
    clients=4, per_round=2, rounds=1, server_learning_rate=0.5, workdir=tmp_path, progress='none',
  )  # fmt: skip
  found = again()
  expected = (samples[:, 1:] != made.client.model.padding).sum(axis=1).tolist()
  for one in found.trained.values():
    last = one.rows[-1]
    assert one.lengths == expected and len(set(expected)) > 1 and last['tested'] == sum(expected)
    right = np.ones(last['tested'])
    right[one.wrong] = 0
    assert last['independent'] == pytest.approx(statistics.independent_trials(right, expected))
  for path in sorted(tmp_path.glob('*/lengths.json')):
    path.unlink()  # as of a version that did not write it
  assert [one.lengths for one in again().trained.values()] == [expected]


@pytest.mark.slow
def test_accuracy_is_measured_at_even_distances_and_at_the_end(call, monkeypatch, tmp_path):
  monkeypatch.setattr(training, 'seconds_split', lambda *given, **more: (0.0, None))
  monkeypatch.setattr(frontier, 'MEASUREMENTS', 2)
  found = call[0](rounds=5, attack_every=0, workdir=tmp_path / 'new')
  assert found.config['evaluate_every'] == 2
  for one in found.trained.values():
    assert [row['round'] for row in one.rows if 'accuracy' in row] == [2, 4, 5]


@pytest.mark.long
def test_costs_are_read_of_trainings_that_had_attacks(found, call):
  """The folder of the audit is no training; what was trained stands in a list."""
  folder = call[1]
  assert list(json.loads((folder / 'trainings.json').read_text('utf-8'))) == list(found.trained)
  assert (folder / 'audit' / 'config.json').exists()
  samples = {'image_shape': [8, 8, 1], 'num_classes': 10, 'loss': 'cross_entropy'}
  assert costs.task_of(folder) == {'model': 'linear', 'dataset': 'custom', 'init': None, 'weights': None, **samples}


@pytest.mark.long
def test_rounds_that_were_lost_or_edited_are_refused(found, call):
  make, folder = call
  path = folder / '00-none' / 'rounds.jsonl'
  lines = path.read_text().splitlines(keepends=True)
  try:
    for changed in (lines[:-1], [*lines[:-1], lines[-1].replace('"loss": ', '"loss": 1')]):
      assert changed != lines
      path.write_text(''.join(changed))
      with pytest.raises(
        gl.UsageError, match=r'00-none/rounds\.jsonl is damaged \(.*\); restore it, or remove the folder'
      ):
        make()
      with pytest.raises(gl.UsageError, match=r'00-none/rounds\.jsonl is damaged'):
        costs.of_training(folder, {})
  finally:
    path.write_text(''.join(lines))


@pytest.mark.long
@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'clients': [np.arange(10 * c, 10 * c + 10) for c in range(4)]}, 'partition_fingerprint was '),
    ({'attacks': [gl.attacks.wrap(divide, name, reads=('weights',)) for name in ('divide', 'two')]},
     "attack_texts was {'divide': 'divide'}, now {'divide': 'divide', 'two': 'two'}"),
  ],
)  # fmt: skip
def test_a_folder_of_another_partition_or_of_other_attacks_is_refused(found, call, changes, message):
  with pytest.raises(gl.UsageError, match=message):
    call[0](**changes)


UNATTACKED = {'attacks': (), 'attack_every': 0, 'trials': 4, 'controls': 32, 'steps': 1000}
PRIVATE = {'defenses': [None, gl.defenses.dpsgd(norm=1.0, noise=1.0)]}  # the first is trained before the other


@pytest.mark.long
def test_attacks_before_the_first_round_are_added_to_trainings(call, monkeypatch, tmp_path):
  monkeypatch.setattr(training, 'seconds_split', lambda *given, **more: (0.0, None))
  given = {'defenses': [None], 'workdir': tmp_path / 'new'}
  without = call[0](**given, **UNATTACKED)
  added = call[0](**given, attack_every=0)
  assert without.rows == [] and len(added.rows) == 1
  assert added.trained['none'].rows == without.trained['none'].rows


@pytest.mark.long
def test_a_training_is_found_again_where_the_list_of_defenses_has_another_order(call, monkeypatch, tmp_path):
  monkeypatch.setattr(training, 'seconds_split', lambda *given, **more: (0.0, None))
  folder, small = tmp_path / 'new', topk(ratio=0.1)
  first = call[0](defenses=[None, small], workdir=folder, attack_every=0)
  written = {path: path.stat().st_mtime_ns for path in folder.glob('*/rounds.jsonl')}
  second = call[0](defenses=[topk(ratio=0.2), small, None], workdir=folder, attack_every=0)
  assert len(written) == 2 and written == {path: path.stat().st_mtime_ns for path in written}
  assert len(list(folder.glob('*/rounds.jsonl'))) == 3  # that of none was not made anew
  assert {label: second.trained[label].rows for label in first.trained} == {
    label: one.rows for label, one in first.trained.items()
  }
  assert frontier._folders(folder, list(second.trained)) == json.loads((folder / frontier.TRAININGS).read_text())


def test_labels_that_are_written_alike_have_folders_of_their_own(tmp_path):
  (tmp_path / '00-a-1e-3').mkdir()
  (tmp_path / '00-a-1e-3' / 'config.json').write_text('{"defense": "a(1e-3)"}')
  found = frontier._folders(tmp_path, ['a(1e+3)', 'b', 'a(1e-3)'])
  assert found == {'a(1e+3)': '01-a-1e-3', 'b': '01-b', 'a(1e-3)': '00-a-1e-3'}


@pytest.mark.parametrize('tau', [1e-3, 1e-8])
def test_the_server_takes_its_rate_momentum_and_tau(tau):
  given = frontier.FrontierSettings(server='adam', server_learning_rate=0.01, server_tau=tau)
  server, gradient = promoting(frontier.SERVERS['adam'](given)), jnp.full(3, 1e-5)
  step = server.update(gradient, server.init(gradient))[0]
  np.testing.assert_allclose(step, -0.01 * 1e-5 / (1e-5 + tau), rtol=1e-4)  # the first step, with its bias corrected
  given = frontier.FrontierSettings(server_learning_rate=0.5, server_momentum=0.9)
  server = promoting(frontier.SERVERS['sgd'](given))
  _, state = server.update(gradient, server.init(gradient))
  np.testing.assert_allclose(server.update(gradient, state)[0], -0.5 * 1.9 * gradient, rtol=1e-6)


@pytest.mark.long
def test_the_rate_of_the_server_is_by_default_one_that_its_optimizer_trains_with(call, tmp_path):
  """Adam at a rate of 1 moves each weight by 1 in the first round, and leaves the model at chance."""
  adam, sgd = (
    call[0](**UNATTACKED, defenses=[None], workdir=tmp_path / one, server=one, rounds=6) for one in ('adam', 'sgd')
  )
  assert (adam.config['server_learning_rate'], sgd.config['server_learning_rate']) == (0.1, 1.0)
  assert adam.trained['none'].rows[-1]['accuracy'] >= 0.5


def test_a_folder_of_another_key_or_version_of_a_defense_is_refused(call, monkeypatch, tmp_path):
  monkeypatch.setattr(training, 'seconds_split', lambda *given, **more: (0.0, None))

  def of(version, **changes):
    half = gl.defenses.wrap(optax.scale(0.5), 'upload', label='half', version=version)
    return call[0](**UNATTACKED, defenses=[half], workdir=tmp_path / 'new', **changes)

  of('1')
  with pytest.raises(gl.UsageError, match="defense_version was '1', now '2'"):
    of('2')
  with pytest.raises(gl.UsageError, match='key was '):
    of('1', key=jax.random.key(7))


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'rouds': 3}, "unknown setting of gradleak.frontier: 'rouds'; did you mean 'rounds'"),
    ({'rounds': 0}, 'rounds is 0'),
    ({'server': 'adagrad'}, "unknown server 'adagrad'"),
    (
      {'server': 'adam', 'server_momentum': 0.9},
      r'server_momentum is 0\.9, and the server takes adam: leave it at 0, or',
    ),
    ({'server_tau': 1e-8}, 'server_tau is 1e-08, and the server takes sgd: leave it at 0.001, or give server=adam'),
    ({'local': {'momentum': 0.9}}, 'momentum is 0.9, and a client that shares its gradient'),
    ({'per_round': 9}, 'per_round is 9'),
    (
      {'local': {'share': 'delta', 'local_batch_size': 4, 'accumulate': 4}},
      'accumulate is 4, and local training on 10 images has 3 batches: no step is taken, and the delta is zero',
    ),
    ({'attacks': ()}, 'attack_every is 2, and there are no attacks'),
    ({**UNATTACKED, 'trials': 1}, 'trials is 1, and there are no attacks: give some, or leave it at 4'),
    (
      {'defenses': [None, server_dp(norm=1.0, noise=0.0, clients=2)], 'server_noise': 1.0},
      'server_dp computes anew the mean that server_noise is added to',
    ),
    ({**UNATTACKED, **PRIVATE, 'budget': 0.5}, 'the first round alone costs ε = '),
    ({**UNATTACKED, **PRIVATE, 'clients': [[0, 1], [1, 2]]}, 'some samples are held by several clients'),
  ],
)
def test_bad_settings_are_refused_before_anything_is_written(call, tmp_path, changes, message):
  with pytest.raises(gl.UsageError, match=message):
    call[0](workdir=tmp_path / 'new', **changes)
  assert not list(tmp_path.iterdir())


def test_the_folder_of_an_audit_is_refused(call, tmp_path):
  (tmp_path / 'config.json').write_text('{}')
  with pytest.raises(gl.UsageError, match='holds a run of another kind'):
    call[0](**UNATTACKED, workdir=tmp_path)
  assert len(list(tmp_path.iterdir())) == 1


def test_a_use_that_a_frontier_does_not_have_is_refused(call, tmp_path):
  with pytest.raises(gl.UsageError, match=r'shards is 2, and gradleak\.frontier has no use for it'):
    call[0](workdir=tmp_path / 'new', execution=gl.Execution(shards=2))
  assert not list(tmp_path.iterdir())


@pytest.mark.long
def test_attacked_clients_of_one_sample_have_not_the_order_of_several(call, tmp_path):
  local = {'share': 'delta', 'local_batch_size': 1, 'order': '1,0'}
  given = {'defenses': [None], 'clients': np.arange(40).reshape(20, 2).tolist(), 'rounds': 1, 'attack_every': 0}
  assert call[0](workdir=tmp_path, local=local, **given).rows


@pytest.mark.long
def test_clients_are_given_as_lists_of_their_samples(found):
  sizes = [len(part) for part in found.partition]
  assert sizes == [10] * 4 and len(np.unique(np.concatenate(found.partition))) == 40
