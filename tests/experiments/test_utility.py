"""Trainings beside the papers' numbers: what is run, measured, kept and said about it."""

import csv
import dataclasses
import io
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradleak as gl
from experiments import comparison, table, utility
from experiments.experiment import Cell, Experiment
from experiments.rehearsal import Ledger
from experiments.utility import Method, Protocol, Trainings
from gradleak.core import errors
from gradleak.defenses.compensation import compensate, noise_variance
from gradleak.defenses.differential_privacy import epsilon
from gradleak.federated import simulation, training
from gradleak.federated.client import NO_DEFENSE

PROTOCOL = Protocol(6, 2, 'classes(number=2,low=2,high=6)', 4, 1, 4, 0.3)
METHODS = {
  'none': Method(),
  'half of the layers': Method('fragmentation_random(ratio=0.5)'),
  'DP': Method(delta=1e-5),
  'Soteria': Method('soteria(rate=0.5)'),
}
RUN = Trainings('digits', 'mlp', METHODS, PROTOCOL, samples=300, tested=100, extrapolated=('Soteria',))
TRAINED = dataclasses.replace(RUN, defenses={k: m for k, m in METHODS.items() if k != 'Soteria'}, extrapolated=())


def row(correct, tested=1000, **others):
  return {'correct': correct, 'tested': tested, 'diverged': False, **others}


@pytest.mark.slow
@pytest.mark.usefixtures('fast_compilation')
def test_a_run_trains_measures_and_resumes(tmp_path, monkeypatch):
  monkeypatch.setattr(utility, 'SPENT', 0.0)
  data, folder = TRAINED.load(None), str(tmp_path / 'run')
  rows = TRAINED.execute(data, 0, workdir=folder, progress='none')
  assert [row['defense'] for row in rows] == list(TRAINED.defenses)
  none, half, dp = rows
  for label, found in zip(('00-none', '01-half-of-the-layers', '02-dp'), rows, strict=True):
    lines = (tmp_path / 'run' / label / 'rounds.jsonl').read_text('utf-8').splitlines()
    last = json.loads(lines[-1])
    assert len(lines) == PROTOCOL.rounds and found['correct'] == round(100 * last['accuracy'])
  total = none['parameters']
  sizes = [x.size for x in jax.tree.leaves(utility.prepare(RUN, data, 0).variables['params'])]
  assert none['share_sent'] == 100 and total == pytest.approx(sum(sizes) / 1e6) == none['total_parameters']
  assert 0 < half['share_sent'] < 100 and half['parameters'] == pytest.approx(total * half['share_sent'] / 100)
  assert 7.5 < dp['epsilon'] <= 8 and none['correct'] > 0
  for found in rows:
    assert found['round_seconds'] == pytest.approx(found['train_seconds'] + found['defense_seconds'])

  before = {path: path.stat().st_mtime_ns for path in (tmp_path / 'run').glob('*/*.json*')}
  assert TRAINED.execute(data, 0, workdir=folder, progress='none') == rows
  assert {path: path.stat().st_mtime_ns for path in before} == before  # nothing is trained or measured again
  with pytest.raises(errors.UsageError, match='seed was 0, now 1'):
    TRAINED.execute(data, 1, workdir=folder, progress='none')

  rows.append({'defense': 'Soteria', 'extrapolated': True, 'round_seconds': 86_400.0, 'overhead': 900.0})
  cells = [Cell('digits', label, metric, 'run', label) for label in METHODS for metric in ('accuracy', 'overhead')]
  experiment = Experiment('toy', 'A.', 'Table', 'Shows.', {'run': RUN}, tuple(cells), 'So.')
  outcomes = [RUN.outcome(cell, rows) for cell in cells]
  (lines,) = table.sections(experiment, outcomes).values()
  assert lines[0] == ['', 'accuracy %', 'round time, % over none', 'against none']  # the paper prints none
  assert lines[1][-1] == 'at chance' and lines[2][-1].startswith('no conclusion') and lines[4][1] == '–'
  assert lines[4][1:] == [
    '–',
    '900.00',
    'not trained: seconds extrapolated from one local step, all rounds would take 4 d',
  ]
  text = table.markdown(experiment, 'paper', 0, outcomes)
  assert 'Fewer than three seeds' in text and '| none |' in text and 'trials' not in text
  kept = list(csv.DictReader(io.StringIO(table.table_csv(experiment, 'paper', outcomes))))
  assert kept[4]['defense'] == 'none & client_dp(delta=1e-05) at the server' and kept[0]['n'] == '100'
  assert float(kept[0]['mean']) >= 0 and kept[0]['low'] == kept[0]['high'] == kept[0]['recovered'] == ''


@pytest.mark.slow
@pytest.mark.usefixtures('fast_compilation')
def test_one_client_defends_its_sensitive_samples(tmp_path):
  methods = {'none': Method(), 'half': Method('fragmentation_random(ratio=0.5)')}
  run = dataclasses.replace(RUN, defenses=methods, extrapolated=(), sensitive=3, timed=False)
  data = run.load(None)
  setting = utility.prepare(run, data, 0)
  assert len(setting.parts[0]) == 3
  np.testing.assert_array_equal(setting.parts[1], utility.prepare(RUN, data, 0).parts[1])
  none, half = run.execute(data, 0, workdir=str(tmp_path / 'run'), progress='none')
  assert 50 < half['share_sent'] < 100 == none['share_sent']  # most clients send everything
  outcome = run.outcome(Cell('', '', 'sensitive_accuracy', '', 'half'), [none, half])
  assert outcome.n == 3 and outcome.mean == pytest.approx(100 * half['sensitive_correct'] / 3)
  assert outcome.remark.startswith('no conclusion: none is at chance') and outcome.low is None  # after four rounds


def test_a_difference_in_words():
  assert utility.compared([4.0, 5.0, 6.0]) == '+5.0 (+2.5 to +7.5), beyond noise'
  assert utility.compared([-3.0, 0.0, 0.0]).startswith('−1.0 (−5.3 to +3.3), within noise')
  assert utility.compared([-9.0]) == '−9.0, one training, undecided'
  assert utility.compared([-11.0]) == '−11.0, one training, undecided'
  assert utility.compared([-20.0]) == '−20.0, beyond noise'


def test_a_training_belongs_to_its_test_samples_and_its_public_ones(monkeypatch):
  class Stopped(Exception):
    pass

  def train(*given, config, **others):
    raise Stopped(json.dumps(config, sort_keys=True))

  monkeypatch.setattr(utility.training, 'train', train)
  data = dataclasses.replace(RUN, public=8).load(None)
  public, tested, setting = data.public, data.tested, utility.prepare(RUN, data, 0)
  changes = [
    {},
    {'tested': tested._replace(samples=tested.samples[::-1])},
    {'tested': tested._replace(targets=tested.targets[::-1])},
    {'public': (public[0][::-1], public[1])},
    {'public': None},
  ]
  configs = set()
  for change in changes:
    with pytest.raises(Stopped) as stopped:
      utility._trained(RUN, setting, data._replace(**change), METHODS['none'], None, 0, 'unused', 'none')
    configs.add(str(stopped.value))
  assert len(configs) == len(changes)


def test_the_difference_is_to_the_undefended_model():
  rows = [row(900, defense='none'), row(500, defense='DP', epsilon=7.9), row(890, defense='half of the layers')]
  found = {r['defense']: RUN.outcome(Cell('', '', 'accuracy', '', r['defense']), rows) for r in rows}
  assert found['none'].remark == '' and found['DP'].remark == '−40.0, beyond noise'
  assert found['half of the layers'].remark == '−1.0, one training, undecided'
  assert found['DP'].mean == 50 and found['DP'].n == 1000 and found['DP'].low is None
  assert RUN.outcome(Cell('', '', 'accuracy_share', '', 'DP'), rows).mean == pytest.approx(100 * 5 / 9)
  assert RUN.outcome(Cell('', '', 'epsilon', '', 'DP'), rows).mean == 7.9
  lost = [{**rows[0], 'diverged': True}, *rows[1:]]
  assert RUN.outcome(Cell('', '', 'accuracy', '', 'none'), lost).remark == 'diverged'


def test_an_undefended_model_at_chance_draws_no_conclusion():
  known = {'majority_share': 0.1, 'predicted_classes': 10}
  rows = [
    row(105, defense='none', **known),
    row(500, defense='DP', **known),
    row(90, defense='half of the layers', **known),
  ]
  found = {r['defense']: RUN.outcome(Cell('', '', 'accuracy', '', r['defense']), rows).remark for r in rows}
  assert found == {
    'none': 'at chance',
    'DP': 'no conclusion: none is at chance',
    'half of the layers': 'no conclusion: none is at chance, at chance',
  }
  assert RUN.outcome(Cell('', '', 'accuracy_share', '', 'DP'), rows).mean is None
  rows[0] |= {'correct': 800}
  assert RUN.outcome(Cell('', '', 'accuracy', '', 'half of the layers'), rows).remark.endswith(
    'beyond noise, at chance'
  )


@pytest.mark.long
def test_images_are_resized_and_parameters_counted_at_their_published_size():
  small = dataclasses.replace(RUN, image_size=5)
  data = small.load(None)
  assert data.samples.samples.shape == (300, 5, 5, 1) and data.tested.samples.shape == (100, 5, 5, 1)
  whole, found = utility.prepare(RUN, RUN.load(None), 0), utility.prepare(small, data, 0)
  assert found.total_parameters == whole.total_parameters == whole.parameters > found.parameters


def test_an_accuracy_has_an_interval_only_of_three_seeds():
  def found(seeds, label='DP', metric='accuracy'):
    rows = [row(900 + 10 * s, defense='none', seed=s) for s in range(seeds)]
    rows += [row(850 + 10 * s + s * s, defense='DP', seed=s, parameters=2.0) for s in range(seeds)]
    return RUN.outcome(Cell('', '', metric, '', label), rows)

  for seeds in (1, 2):
    assert (found(seeds).low, found(seeds).high, found(seeds).trainings) == (None, None, seeds)
  three = found(3)
  values = [85, 86.1, 87.4]
  assert three.mean == pytest.approx(sum(values) / 3)
  assert three.high - three.low == pytest.approx(2 * 4.303 * np.std(values, ddof=1) / 3**0.5, rel=1e-3)
  assert three.values == pytest.approx(dict(enumerate(values)))
  assert three.remark == '−4.8 (−5.4 to −4.3), beyond noise'  # seed by seed
  assert found(3, metric='accuracy_share').values == pytest.approx({0: 8500 / 90, 1: 8610 / 91, 2: 8740 / 92})
  assert found(3, metric='parameters').mean == 2


@pytest.mark.parametrize(('undefended', 'defended'), [(90.0, 85.0), (19.7, 19.1)])
def test_the_share_of_a_small_accuracy_is_open_by_more_points(undefended, defended):
  """Of 19.7 %, 10 points of accuracy are 50 of the share: 97 % of it held “more than 90 %”."""
  rows = [row(10 * undefended, defense='none', seed=0), row(10 * defended, defense='DP', seed=0)]
  cell = Cell('', '', 'accuracy_share', '', 'DP')
  found = comparison.interval(cell, RUN.outcome(cell, rows))
  bare, ours = (comparison.left_open(accuracy, 1000) for accuracy in (undefended, defended))
  assert min(bare, ours) > 9.8
  low, high = (defended - ours) / (undefended + bare), (defended + ours) / (undefended - bare)
  assert found == pytest.approx((100 * low, 100 * high))


def test_equal_differences_of_a_few_seeds_are_not_decided():
  assert utility.compared([0.1] * 3) == '+0.1 under each seed, undecided'
  assert utility.compared([0.1] * 6) == '+0.1 (+0.1 to +0.1), beyond noise'


@pytest.mark.parametrize('metric', ['overhead', 'defense_seconds'])
def test_what_none_adds_is_the_noise_of_the_others(metric):
  rows = [row(900, defense='none', **{metric: -0.6}), row(800, defense='DP', **{metric: 4.0})]
  found = {one['defense']: RUN.outcome(Cell('', '', metric, '', one['defense']), rows) for one in rows}
  assert found['DP'][:3] == pytest.approx((4.0, 3.4, 4.6)) and found['none'][:3] == (-0.6, None, None)


def test_clipping_is_timed_against_the_same_defense_without_it():
  rows = [
    row(900, defense='none', text='none', round_seconds=1.0),
    row(800, defense='half of the layers', text='graddefense(stddev=0.1)', round_seconds=2.0),
    row(800, defense='DP', text='clip_samples(norm=1)+graddefense(stddev=0.1)', round_seconds=2.5),
  ]
  more = [{name: value for name, value in one.items() if name != 'round_seconds'} | {'seed': 1} for one in rows]
  for given in (rows, rows + more):  # rounds are timed under the first seed
    assert RUN.outcome(Cell('', '', 'clipping_overhead', '', 'DP'), given).mean == pytest.approx(25)


def test_the_public_samples_may_be_of_another_dataset():
  own = dataclasses.replace(RUN, public=4)
  other = dataclasses.replace(own, starts='faces')
  mine, theirs = own.load(None), other.load(None)
  np.testing.assert_array_equal(mine.samples.samples, theirs.samples.samples)
  assert mine.public[0].shape == theirs.public[0].shape and not np.array_equal(mine.public[0], theirs.public[0])
  assert (other.scaled('smoke').starts, own.scaled('smoke').starts) == ('faces', '')


def test_a_model_at_chance_has_failed():
  cell = Cell('', '', 'accuracy', '', 'none')
  for correct, classes, failed in ((115, 'digits', True), (150, 'digits', False), (19, 'cifar100', False)):
    run = dataclasses.replace(RUN, dataset=classes)
    assert run.outcome(cell, [row(correct, defense='none')]).failed == failed


def test_what_follows_from_the_declaration_is_known():
  followed = {
    (label, metric) for label in METHODS for metric in utility.METRICS if RUN.follows(Cell('', '', metric, '', label))
  }
  assert ('DP', 'epsilon') in followed and ('half of the layers', 'total_parameters') in followed
  assert ('none', 'share_sent') in followed and ('half of the layers', 'share_sent') not in followed
  assert not {metric for _, metric in followed} & {'accuracy', 'sensitive_accuracy', 'round_seconds'}


@pytest.mark.slow
@pytest.mark.usefixtures('fast_compilation')
def test_each_seed_is_trained_anew(tmp_path):
  run = dataclasses.replace(RUN, defenses={'none': Method()}, extrapolated=(), timed=False, seeds=3)
  rows = run.execute(run.load(None), 5, workdir=str(tmp_path / 'run'), progress='none')
  assert [row['seed'] for row in rows] == [5, 6, 7] and len({row['loss'] for row in rows}) == 3
  alone = dataclasses.replace(run, seeds=1).execute(run.load(None), 6, workdir=str(tmp_path / 'other'), progress='none')
  assert alone == rows[1:2]


@pytest.mark.long
@pytest.mark.parametrize(('delta', 'published'), [(1e-4, 2.72), (1e-5, 2.97), (1e-6, 3.20)])
def test_the_noise_spends_the_budget_in_all_rounds(delta, published):
  noise = utility.noise_for(8.0, delta, 2000, 0.1)
  assert noise == pytest.approx(published, rel=0.012)
  assert epsilon(noise, utility.RELATION, steps=2000, sampling_rate=0.1, delta=delta) <= 8
  assert epsilon(0.985 * noise, utility.RELATION, steps=2000, sampling_rate=0.1, delta=delta) > 8


@pytest.mark.long
def test_parameters_are_counted_at_full_width():
  run = dataclasses.replace(RUN, published='resnet18(width=64)')
  images = np.zeros((300, 32, 32, 3), np.float32)
  samples = gl.data.Dataset('colours', 'train', images, np.arange(300, dtype=np.int32) % 10, tuple('0123456789'))
  setting = utility.prepare(run, utility.Data(samples, samples, None, (32, 32, 3)), 0)
  assert setting.total_parameters == 11_173_962 > setting.parameters


def test_a_round_is_extrapolated_from_one_step(monkeypatch):
  calls = []

  def split(federation, variables, key, repeats=5, seconds=3.0):
    calls.append(federation)
    return (0.1, 0.5) if len(calls) == 2 else (2.0, 0.0)

  monkeypatch.setattr(training, 'seconds_split', split)
  run = dataclasses.replace(RUN, protocol=dataclasses.replace(PROTOCOL, partition='iid(samples=10)', local_epochs=3))
  setting = utility.prepare(run, run.load(None), 0)
  whole = utility.federation(run, setting, METHODS['Soteria'])
  found = utility._seconds(run, setting, whole, extrapolated=True)
  bare, one = calls
  assert bare.client == setting.client and bare.per_round == 2
  assert [len(part) for part in one.partition] == [4] and one.per_round == one.client.epochs == 1
  turns = -(-2 // jax.local_device_count())
  assert found['defense_seconds'] == 0.5 * 3 * 3 * turns  # ten samples are three batches of four
  assert found['overhead'] == pytest.approx(50 * found['defense_seconds'])


def test_a_rehearsal_counts_of_what_is_extrapolated_the_step_that_is_timed(monkeypatch):
  counted, ledger = [], Ledger()

  def run_round(one, state, key):
    counted.append((one.client.step is NO_DEFENSE, one.per_round, sum(map(len, one.partition)), ledger._turns[0]))
    return state, None

  monkeypatch.setattr(simulation, 'run_round', run_round)
  monkeypatch.setattr(simulation, 'accuracy', lambda *_: (0.5, 1.0))
  run = dataclasses.replace(RUN, protocol=dataclasses.replace(PROTOCOL, partition='iid(samples=10)'), seeds=3)
  run = dataclasses.replace(run, defenses={label: METHODS[label] for label in ('none', 'Soteria')})
  run.rehearse(None, ledger)
  assert counted == [
    (True, 2, 60, 12), (True, 2, 60, 6), (True, 2, 60, 6),  # trained by three seeds, and timed
    (True, 2, 60, 6), (True, 2, 60, 6),  # without Soteria
    (True, 1, 4, 3), (False, 1, 4, 3),  # a step without it and with it, as a round would take 30
  ]  # fmt: skip
  assert ledger.lanes == 12 * 2
  counted.clear()
  dataclasses.replace(run, timed=False).rehearse(None, ledger)
  assert [turns for *_, turns in counted] == [12]


@pytest.mark.slow
def test_the_server_compensates_what_the_clients_add():
  run = dataclasses.replace(RUN, public=4)
  setting = utility.prepare(run, run.load(None), 0)
  method = Method('graddefense(stddev=0.1,ratio=0.5,num_slices=4,root=4)', q=2)
  made = utility.federation(run, setting, method)
  noise = {'w': 0.1 * jax.random.normal(jax.random.key(0), (40, 30))}
  noise = jax.tree.map(lambda x: x * jnp.float32(0.5**0.5 / 5**0.5), noise)
  found, _ = made.chain.update(noise, made.chain.init(noise), num_clients=jnp.float32(5))
  variance = noise_variance(jnp.full(5, 0.2, jnp.float32), stddev=0.1, ratio=0.5, num_slices=4)
  expected = compensate(noise, variance, q=2)
  np.testing.assert_allclose(found['w'], expected['w'], atol=1e-6)
  assert jnp.linalg.norm(found['w']) < 0.5 * jnp.linalg.norm(noise['w'])  # most of it lies in the band
  assert str(method).endswith(' & compensation(q=2,layout=columns) at the server')
