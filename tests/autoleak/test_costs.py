"""What a defense costs follows from finished trainings of one task, and from nothing else."""

import json

import numpy as np
import pytest

from gradleak import UsageError
from gradleak.core import statistics
from gradleak.studies.autoleak import costs

TASK = {'model': 'mlp', 'dataset': 'digits', 'init': 'explicit'}
CONFIG = {
  **TASK, 'rounds': 2, 'per_round': 3, 'clients': 9, 'partition': 'iid', 'share': 'delta', 'local_epochs': 4, 'seed': 0,
}  # fmt: skip


@pytest.fixture
def trained(tmp_path):
  """(defense, accuracy, **settings) -> the folder with this training, too."""

  def add(defense, accuracy, done=2, measured=None, wrong=None, **settings):
    path = tmp_path / 'trainings.json'
    folders = json.loads(path.read_text()) if path.exists() else {}
    folders[defense] = f'{len(folders):02d}'
    path.write_text(json.dumps(folders))
    folder = tmp_path / folders[defense]
    folder.mkdir()
    config = CONFIG | {'defense': defense} | settings
    (folder / 'config.json').write_text(json.dumps({name: one for name, one in config.items() if one is not None}))
    rows = [{'round': 1}, {'round': done, 'accuracy': accuracy, **(measured or {})}]
    (folder / 'rounds.jsonl').write_text('\n'.join(map(json.dumps, rows)) + '\n')
    if wrong is not None:
      (folder / 'wrong.json').write_text(json.dumps([*wrong]))
    return tmp_path

  return add


def test_points_below_the_undefended_accuracy(trained):
  trained('none', 0.913)
  trained('prune(rate=0.9)', 0.888)
  found = costs.of_training(trained('outpost', 0.92), TASK)
  assert {label: cost.points for label, cost in found.items()} == {'prune(rate=0.9)': 2.5, 'outpost': -0.7}
  assert found['prune(rate=0.9)'].source == (
    'one training of 2 rounds, 3 of 9 clients each (iid), which share the delta after 4 local epochs, all under '
    'the defense, seed 0: 88.8 % of the test samples, undefended 91.3 %'
  )


def test_a_training_without_notes_is_described_by_what_is_known(trained):
  """As one of `gl.frontier`, whose folder holds the notes of its scenario alone."""
  trained('none', 0.913, partition=None, seed=None)
  (cost,) = costs.of_training(trained('outpost', 0.9, partition=None, seed=None), TASK).values()
  assert ', 3 of 9 clients each, which share the delta after 4 local epochs, all under the defense: 90' in cost.source


def test_a_cost_is_that_of_what_its_label_means(trained):
  trained('none', 0.913, defense_text='none')
  (cost,) = costs.of_training(trained('outpost', 0.9, defense_text='prune(rate=0.1)'), TASK).values()
  assert cost.text == 'prune(rate=0.1)'


@pytest.mark.parametrize(
  ('served', 'said'),
  [
    ({'server': 'sgd', 'server_learning_rate': 1.0, 'server_momentum': 0.0}, ' local epochs, all'),
    (
      {'server': 'adam', 'server_learning_rate': 0.01, 'server_momentum': 0.0},
      ' to a server with adam of rate 0.01, all',
    ),
    (
      {'server': 'adam', 'server_learning_rate': 0.01, 'server_momentum': 0.0, 'server_tau': 1e-8},
      ' to a server with adam of rate 0.01 and τ 1e-08, all',
    ),
    ({'server': 'sgd', 'server_learning_rate': 0.5}, ' to a server with sgd of rate 0.5, all'),
    (
      {'server': 'sgd', 'server_learning_rate': 1.0, 'server_momentum': 0.9},
      ' to a server with sgd of rate 1 and momentum 0.9, all',
    ),
    ({'server_noise': 2.0}, ' to a server with noise of multiplier 2, all'),
    (
      {'server': 'sgd', 'server_learning_rate': 0.5, 'server_noise': 2.0},
      ' to a server with noise of multiplier 2 and sgd of rate 0.5, all',
    ),
  ],
)
def test_a_server_that_does_more_than_add_is_named(trained, served, said):
  trained('none', 0.913, **served)
  source = costs.of_training(trained('outpost', 0.9, **served), TASK)['outpost'].source
  assert said in source
  assert f'{"with that noise and no defense" if "server_noise" in served else "undefended"} 91.3 %' in source


def test_the_number_of_test_samples_bounds_the_figure(trained):
  for defense, accuracy in (('none', 0.8), ('outpost', 0.6)):
    folder = trained(defense, accuracy, measured={'tested': 1000})
  points, source, interval, at_chance, _ = costs.of_training(folder, TASK)['outpost']
  assert points == 20 and at_chance == '' and interval == pytest.approx((16.0, 23.9), abs=0.05)
  assert ': 60.0 % of the 1,000 test samples, undefended 80.0 % (' in source
  assert source.endswith('(difference +16.0 to +23.9 points, by the number of test samples)')


def test_an_interval_is_rounded_outwards(trained):
  """What may cost 5.0019 points is not within 5."""
  for defense, accuracy, wrong in (('none', 0.9985, range(3)), ('outpost', 0.9575, range(3, 88))):
    folder = trained(defense, accuracy, measured={'tested': 2000}, wrong=wrong)
  _, low, high = statistics.paired_interval(85, 3, 2000)
  found = costs.of_training(folder, TASK)['outpost'].interval
  assert found == pytest.approx((100 * low, 100 * high), abs=0.01)
  assert found[0] <= 100 * low and found[1] == 5.01 >= 100 * high > 5


def test_models_are_compared_sample_by_sample(trained):
  for defense, accuracy, wrong in (('none', 0.8, range(200)), ('outpost', 0.79, range(5, 215))):
    folder = trained(defense, accuracy, measured={'tested': 1000}, wrong=wrong)
  points, source, interval, *_ = costs.of_training(folder, TASK)['outpost']
  assert points == 1 and interval == pytest.approx((0.1, 1.9), abs=0.01)
  assert source.endswith(
    '(difference +0.1 to +1.9 points, by the test samples that one of the two models alone classifies wrongly)'
  )
  (folder / '01' / 'wrong.json').write_text(json.dumps([*range(5)]))  # of another model: the accuracy says 210
  assert costs.of_training(folder, TASK)['outpost'].source.endswith('by the number of test samples)')
  (folder / '01' / 'wrong.json').write_text(json.dumps([*range(1000, 1210)]))  # of samples that there are not
  assert costs.of_training(folder, TASK)['outpost'].source.endswith('by the number of test samples)')
  (folder / '01' / 'wrong.json').write_text('[')
  with pytest.raises(UsageError, match=r'01 is not of launch/train\.py, or damaged'):
    costs.of_training(folder, TASK)


@pytest.mark.parametrize('loss', ['next_token', 'masked_token(share=0.2)'])
def test_tokens_are_not_called_samples(trained, loss):
  for defense, accuracy, predicted in (('none', 0.8, 10), ('outpost', 0.6, 10), ('concealment', 0.1, 1)):
    measured = LOST | {'tested': 1000, 'predicted_classes': predicted, 'independent': 400.0}
    folder = trained(defense, accuracy, measured=measured, loss=loss)
  found = costs.of_training(folder, TASK)
  assert ': 60.0 % of the 1,000 test tokens, undefended 80.0 % (' in found['outpost'].source
  assert found['outpost'].source.endswith('by the number of test tokens)')
  ends = (100 * end for end in statistics.difference_interval(320, 400, 240, 400)[1:])
  assert found['outpost'].interval == pytest.approx(tuple(ends), abs=0.01)
  assert found['concealment'].at_chance == 'it predicts one class for all 1,000 test tokens'


def test_tokens_of_a_text_are_not_independent(trained):
  """25 tokens of each of 40 texts: 3 of 40 whole texts are wrong with the defense alone, and 1 without alone."""
  for defense, accuracy, wrong in (('none', 0.9, range(100)), ('outpost', 0.85, range(25, 175))):
    folder = trained(defense, accuracy, measured={'tested': 1000}, wrong=wrong, loss='next_token')
  assert costs.of_training(folder, TASK)['outpost'].interval is None  # of an earlier version
  for name in ('00', '01'):
    (folder / name / 'lengths.json').write_text(json.dumps([25] * 40))
  found = costs.of_training(folder, TASK)['outpost']
  n = statistics.independent_trials(np.repeat([-1, 0, 1, 0], [25, 75, 75, 825]), [25] * 40)
  low, high = (100 * end for end in statistics.paired_interval(0.075 * n, 0.025 * n, n)[1:])
  assert 30 < n < 40 and low < 0 < high and found.interval == pytest.approx((low, high), abs=0.01)
  assert 'by the test tokens that one of the two models alone classifies wrongly' in found.source
  (folder / '01' / 'lengths.json').write_text(json.dumps([20] * 50))  # of other texts
  assert costs.of_training(folder, TASK)['outpost'].interval is None


LOST = {'tested': 10_000, 'majority_share': 0.1, 'predicted_classes': 1}


def test_an_undefended_model_at_chance_has_no_costs(trained):
  trained('none', 0.102, measured=LOST | {'predicted_classes': 4})
  folder = trained('outpost', 0.8, measured=LOST | {'predicted_classes': 10})
  words = (
    r'is at chance \(its accuracy of 10\.2 % \(95 % interval 9\.6 to 10\.8 %\) is not above .*\): no cost can be stated'
  )
  with pytest.raises(UsageError, match=words):
    costs.of_training(folder, TASK)


def test_two_models_at_chance_that_know_no_shares_have_no_costs(trained):
  """Trainings of earlier versions: rows without the share of the commonest class."""
  trained('none', 0.102, measured={'tested': 10_000}, num_classes=10)
  folder = trained('outpost', 0.102, measured={'tested': 10_000}, num_classes=10)
  with pytest.raises(UsageError, match=r'at chance .* of always predicting one of 10 classes'):
    costs.of_training(folder, TASK)


def test_a_defense_that_ends_at_chance_is_named(trained):
  trained('none', 0.9, measured=LOST | {'predicted_classes': 10})
  trained('outpost', 0.85, measured=LOST | {'predicted_classes': 10})
  found = costs.of_training(trained('concealment', 0.1, measured=LOST), TASK)
  assert found['outpost'].at_chance == '' and 'chance' not in found['outpost'].source
  assert found['concealment'].points == 80
  assert found['concealment'].at_chance == 'it predicts one class for all 10,000 test samples'
  assert ': 10.0 % of the 10,000 test samples, which is chance (it predicts one class' in found['concealment'].source


def test_the_folder_of_an_audit_is_no_training(trained):
  trained('none', 0.9)
  folder = trained('outpost', 0.8)
  (folder / 'audit').mkdir()
  (folder / 'audit' / 'config.json').write_text(json.dumps({'trials': 4, 'defenses': ['none', 'outpost']}))
  assert costs.of_training(folder, TASK)['outpost'].points == 10


def test_what_is_trained_stands_in_the_list_of_trainings(trained):
  trained('none', 0.9)
  folder = trained('outpost', 0.8)
  (folder / 'trainings.json').write_text(json.dumps({'none': '00', 'topk': '01'}))
  with pytest.raises(UsageError, match='01 holds the training under outpost, expected that under topk'):
    costs.of_training(folder, TASK)
  for damaged in ('{', '[]', '{"none": 3}'):
    (folder / 'trainings.json').write_text(damaged)
    with pytest.raises(UsageError, match=r'trainings\.json is damaged'):
      costs.of_training(folder, TASK)
  (folder / 'trainings.json').unlink()
  with pytest.raises(UsageError, match=r'there is no .*trainings\.json: give the command of launch/train\.py again'):
    costs.of_training(folder, TASK)


def test_a_training_that_had_not_settled_says_so(trained):
  trained('none', 0.9)
  folder = trained('outpost', 0.8)
  rows = [{'round': 1, 'accuracy': 0.5}, {'round': 2, 'accuracy': 0.8}]
  (folder / '01' / 'rounds.jsonl').write_text('\n'.join(map(json.dumps, rows)))
  (cost,) = costs.of_training(folder, TASK).values()
  assert cost.source.endswith(
    'undefended 90.0 %, not settled: up to 30.0 points between two measurements in the last quarter of the training'
  )


def test_an_epsilon_budget_may_end_a_training(trained):
  trained('none', 0.9, 2, budget=8)
  folder = trained('client_dp', 0.8, 1, budget=8)
  with pytest.raises(UsageError, match='not finished'):
    costs.of_training(folder, TASK)
  (folder / '01' / 'split.json').write_text('{}')
  (cost,) = costs.of_training(folder, TASK).values()
  words = '80.0 % of the test samples after 1 rounds, when its ε budget was spent, undefended'
  assert cost.points == 10 and words in cost.source


def test_weights_of_a_file(trained):
  """A training that starts from them is of a task that does, and says so."""
  task = {'model': 'mlp', 'dataset': 'digits', 'weights': 'mine.npz'}
  for defense, accuracy in (('none', 0.9), ('outpost', 0.8)):
    folder = trained(defense, accuracy, weights='mine.npz', init=None)
  (cost,) = costs.of_training(folder, task).values()
  assert cost.points == 10 and cost.source.startswith('one training of 2 rounds from the weights of mine.npz, 3 of 9')
  with pytest.raises(UsageError, match=r'have weights mine\.npz, the entries None'):
    costs.of_training(folder, TASK | {'init': None})


@pytest.mark.parametrize(
  'known',
  [
    {'weights_fingerprint': 'a'},
    {'weights_fingerprint': 'rounded', 'previous_fingerprint': 'a', 'rounds_before': 1},
    {'weights_fingerprint': 'b', 'previous_fingerprint': 'b', 'start_fingerprint': 'a', 'rounds_before': 3},
  ],
)
def test_files_of_one_name_may_hold_other_weights(trained, known):
  task = {'model': 'mlp', 'dataset': 'digits', 'weights': 'mine.npz'}
  for defense, accuracy in (('none', 0.9), ('outpost', 0.8)):
    folder = trained(defense, accuracy, weights='mine.npz', init=None, weights_fingerprint='a')
  other = {name: 'c' if value == 'a' else value for name, value in known.items()}
  unknown = {name: value for name, value in known.items() if value != 'a'}
  for told in (known, unknown, {**other, 'precision': 'float64'}):  # in float64 the same weights have other bits
    assert costs.of_training(folder, task | told)['outpost'].points == 10
  with pytest.raises(UsageError, match=r'have other weights in a file of the name mine\.npz, the entries others'):
    costs.of_training(folder, task | other)
  drawn = {'init': 'explicit', 'weights_fingerprint': 'a', 'model': 'mlp', 'dataset': 'digits'}
  assert costs.start_of(drawn) is None  # of another seed they are others


@pytest.mark.parametrize(
  ('second', 'task', 'words'),
  [
    (('outpost', 0.9, 1), {}, 'is not finished'),
    (('outpost', None), {}, 'is not finished'),
    (('outpost', 0.9), {'dataset': 'faces'}, 'have dataset digits, the entries faces'),
    (('outpost', 0.9), {'model': 'lenet'}, 'have model mlp, the entries lenet'),
  ],
)
def test_other_trainings_are_refused(trained, second, task, words):
  trained('none', 0.9)
  with pytest.raises(UsageError, match=words):
    costs.of_training(trained(*second), TASK | task)


@pytest.mark.parametrize(
  ('part', 'trained_on', 'attacked'),
  [('image_shape', [12, 12, 1], [28, 28, 1]), ('num_classes', 2, 10), ('loss', 'focal', 'cross_entropy')],
)
def test_a_training_on_samples_of_another_size_or_kind_is_refused(trained, part, trained_on, attacked):
  for defense in ('none', 'outpost'):
    folder = trained(defense, 0.9, **{part: trained_on})
  assert list(costs.of_training(folder, TASK | {part: trained_on})) == ['outpost']
  assert costs.task_of(folder)[part] == trained_on
  with pytest.raises(UsageError, match=f'have {part} '):
    costs.of_training(folder, TASK | {part: attacked})


def test_settings_differ(trained):
  trained('none', 0.9)
  with pytest.raises(UsageError, match='other settings'):
    costs.of_training(trained('outpost', 0.9, seed=1), TASK)


def test_no_undefended_training_and_damaged_files(trained, tmp_path):
  with pytest.raises(UsageError, match='without a defense'):
    costs.of_training(trained('outpost', 0.9), TASK)
  (tmp_path / '00' / 'rounds.jsonl').write_text('{')
  with pytest.raises(UsageError, match='damaged'):
    costs.of_training(tmp_path, TASK)
