"""The page of a federated training, on trainings and attacks made up so that every answer is known."""

import csv
import json
import math
import struct

import numpy as np
import pytest

from gradleak import report
from gradleak.defenses.differential_privacy import Epsilon
from gradleak.report.frontier import beside, best, cost
from gradleak.report.partition import summary
from gradleak.report.training import along
from gradleak.report.training_findings import cautions, opening, per_cent, settings
from gradleak.studies.frontier import Frontier, Leak, Trained
from gradleak.summary import cases
from tests.report.facts import methods
from tests.report.parsing import Page

CONFIG = {
  'dataset': 'digits', 'model': 'lenet', 'partition': 'classes(number=2)', 'clients': 100, 'per_round': 10,
  'rounds': 40, 'share': 'delta', 'local_epochs': 1, 'local_batch_size': 10, 'learning_rate': 0.1, 'momentum': 0.9,
  'server': 'sgd', 'delta': 1e-5, 'num_classes': 10,
}  # fmt: skip


def test_a_cost_lies_in_its_interval():
  base = {'accuracy': 0.9795, 'at_chance': False}
  one = {'accuracy': 0.9794, 'at_chance': False, 'cost': 0.01, 'cost_low': -0.0177, 'cost_high': 0.0377}
  assert cost(one, base) == 0.01 and beside(one, base) == '0.0 (0.0 to 0.0)'
  assert cost({**one, 'cost': None}, base) == 0.1  # of the figures that are shown


@pytest.mark.parametrize(('ratio', 'text'), [(0.998, '99.8 %'), (1.0, '100 %'), (0.125, '12 %'), (0.0123, '1.2 %')])
def test_a_share_of_the_bytes_is_all_of_them_only_where_it_is(ratio, text):
  assert per_cent(ratio) == text


def test_noise_at_the_server_is_added_to_an_equal_mean():
  given = {**CONFIG, 'weighting': 'samples'}
  assert 'averages the uploads, weighted by samples, and' in ' '.join(settings(given))
  assert 'averages the uploads with equal weights, and' in ' '.join(settings({**given, 'server_noise': 2.0}))


def trained(accuracy, up=1024, rounds=40, seconds_defense=None, stopped=False, epsilon=None, **last):
  """Returns a training that ends at `accuracy`: 10 clients a round, each sends `up` bytes and is sent 2,048."""
  rows = [
    {
      'round': number, 'clients': 10, 'samples': 600, 'bytes_up': 10 * up, 'bytes_down': 20480, 'update_norm': 0.1,
      'accuracy': 0.1 + (accuracy - 0.1) * min(1, 2 * number / rounds), 'loss': 2.3 - number / rounds,
    }
    for number in range(1, rounds + 1)
  ]  # fmt: skip
  rows[-1] |= last
  spent = None if epsilon is None else Epsilon(epsilon, 'replace one', 'client', 'all uploads')
  return Trained(rows, 0.25, seconds_defense, stopped, spent)


def attacked(defense, *recovered, attack='dlg', adaptive=None, psnr=(30.0, 8.0), otherwise='nothing seen', size=1):
  """Returns an audit's rows: a trial is recovered (30 dB) or not (8 dB, and `otherwise`)."""
  return [
    {
      'attack': attack, 'defense': defense, 'adaptive': adaptive, 'trial': trial, 'batch_size': size, 'success': found,
      'verdict': 'exact' if found else otherwise, 'solved': True, 'psnr': psnr[0 if found else 1],
      'ssim': 0.9 if found else 0.1, 'mse': 0.1, 'pearson': 0.5, 'change': 0.0 if defense == 'none' else 0.5,
      'control_psnr': 12.0,
    }
    for trial, found in enumerate(recovered)
  ]  # fmt: skip


def said(trainings, rows=(), size=1, leakage=(), **config):
  found = report.entries(trainings, rows)
  worst = {entry['defense']: entry for entry in cases.worst_case(rows)}
  stopped = [defense for defense, one in trainings.items() if one.stopped]
  config = {**CONFIG, **config}
  given = {'config': config, 'trained': trainings}
  sentences = opening(found, worst, **given, stopped=stopped, leakage=leakage, size=size)
  notes = cautions(found, worst, **given)
  return ' '.join(map(str, sentences)), ' '.join(map(str, notes))


NONE, ALL, NOBODY = trained(0.961), (True,) * 4, (False,) * 4
LEAK = attacked('none', *ALL)
THREE = {'none': NONE, 'topk': trained(0.938, up=123), 'noise': trained(0.5), 'prune': trained(0.97)}


PAIR = {'none': NONE, 'topk': trained(0.938, up=123)}


@pytest.mark.parametrize(
  ('trainings', 'rows', 'names', 'words'),
  [
    ({'none': NONE}, (), 'unattacked', 'reaches a test accuracy of 96.1 % after 40 rounds. Nothing was attacked'),
    ({'none': NONE}, LEAK, 'leaks other_attacks',
     'the attackers recover 4 of 4 images from uploads of clients with one image (95 % interval 39–100 %).'),
    ({'topk': trained(0.9), 'noise': trained(0.5)}, (), 'unattacked best_worst',
     'Of 2 defenses, `topk` trains best: the model reaches 90.0 %. `noise` trains worst: the model reaches 50.0 %.'),
    (PAIR, [*LEAK, *attacked('topk', *NOBODY)], 'leaks hides other_attacks',
     'Under `topk` none of the 4 images is recovered by any attacker that was run (0–61 %); the model reaches 93.8 %, '
     '2.3 points less than without a defense, and clients send 12 % of the bytes.'),
    ({'none': NONE, 'topk': trained(0.961)}, [*LEAK, *attacked('topk', True, *NOBODY[1:])], 'leaks still other_attacks',
     'Under `topk` 1 of 4 images is still recovered (0–81 %); the model reaches 96.1 %, as much as without a defense, '
     'and clients send as many bytes.'),
    ({'topk': trained(0.9), 'noise': trained(0.9, up=64)}, (), 'unattacked trains_alike',
     'Under each of 2 defenses the model reaches 90.0 %.'),  # one was said to train best and worst
    ({'none': NONE, 'a': trained(0.9), 'b': trained(0.9, up=64), 'c': trained(0.5)}, (), 'unattacked best_worst',
     'Of 3 defenses, `a` and `b` train best: the model reaches 90.0 %, 6.1 points less than without a defense. `c` '
     'trains worst: the model reaches 50.0 %, 46.1 points less than without a defense, and clients send as many'),
    ({'none': NONE, 'a': trained(0.9), 'b': trained(0.9, up=64)},
     [*LEAK, *attacked('a', *NOBODY), *attacked('b', *NOBODY)], 'leaks hiding trains_best other_attacks',
     'Of these, `a` and `b` train best: the model reaches 90.0 %, 6.1 points less than without a defense.'),
    ({'none': NONE, 'a': Trained([], math.nan, None, True), 'b': Trained([], math.nan, None, True)},
     [*LEAK, *attacked('a', *NOBODY), *attacked('b', *NOBODY)], 'leaks hiding stopped other_attacks',
     'any attacker that was run (0–61 %). The ε budget'),  # one trained best whose accuracy was not measured
    ({'none': NONE, 'a': trained(0.9), 'b': trained(0.5)}, [*LEAK, *attacked('a', *ALL), *attacked('b', *ALL)],
     'leaks least_alike other_attacks', 'everything: `a` and `b` leak least, 4 of 4 images each (39–100 %).'),
    (THREE, [*LEAK, *attacked('topk', *NOBODY), *attacked('noise', *NOBODY), *attacked('prune', *ALL)],
     'leaks hiding trains_best other other_attacks',
     'Of these, `topk` trains best: the model reaches 93.8 %, 2.3 points less than without a defense, and clients send '
     '12 % of the bytes. Under `prune` 4 of 4 are recovered.'),
    (THREE, [*LEAK, *attacked('topk', *ALL), *attacked('noise', *NOBODY), *attacked('prune', True, *NOBODY[1:])],
     'leaks hiding that others other_attacks', 'Under the other 2, 1 to 4 of 4 are recovered.'),
    (THREE, [row for name in THREE for row in attacked(name, *(ALL if name == 'none' else NOBODY))],
     'leaks hiding trains_best other_attacks', 'Under all 3 defenses none of the 4 images is recovered'),
    (THREE, [*LEAK, *attacked('topk', *ALL), *attacked('noise', True, *NOBODY[1:]), *attacked('prune', *ALL)],
     'leaks least other_attacks', '3 defenses hides everything: `noise` leaks least, 1 of 4 images (0–81 %)'),
    (THREE, [row for name in THREE for row in attacked(name, *NOBODY)], 'fails best_worst other_attacks',
     'Even without a defense the attackers recover none of 4 images: this setting proves nothing'),
    ({'none': NONE, 'topk': trained(0.9)}, attacked('topk', *NOBODY), 'no_undefended costs other_attacks',
     'Under `topk` the model reaches 90.0 %, 6.1 points less'),
    ({'none': NONE, 'client_dp': trained(0.7, rounds=17, stopped=True, epsilon=2.31)}, (), 'unattacked costs stopped',
     'ε is 2.4 at δ = 1e-05 (replace one, per client, all uploads). The ε budget ended the training under `client_dp` '
     'after 17 of 40 rounds.'),
    ({'none': NONE, 'noise': trained(0.7, epsilon=math.inf)}, (), 'unattacked costs', 'and no ε is bounded.'),
    ({'none': NONE, 'noise': trained(0.7, epsilon=99111.2)}, (), 'unattacked costs',
     'ε is > 1000 at δ = 1e-05 (replace one, per client, all uploads), no protection in the sense of DP.'),
    ({'none': Trained([], math.nan, None, True)}, (), 'unattacked stopped', 'trained for 0 rounds, but not measured'),
  ],
)  # fmt: skip
def test_the_opening_says_what_was_found(trainings, rows, names, words):
  found = report.entries(trainings, rows)
  worst = {entry['defense']: entry for entry in cases.worst_case(rows)}
  stopped = [defense for defense, one in trainings.items() if one.stopped]
  made = opening(found, worst, config=CONFIG, trained=trainings, stopped=stopped)
  assert [one.name.partition('.')[2] for one in made] == names.split() and words in ' '.join(map(str, made))


def test_defenses_within_noise_of_the_first_and_the_last_are_counted():
  """One of a thousand test samples, or one of four uploads, decided which defense was named alone."""
  accuracies = {'a': 0.9, 'b': 0.899, 'c': 0.5, 'd': 0.501}
  four = {name: trained(accuracy, tested=1000) for name, accuracy in accuracies.items()}
  text = said(four)[0]
  assert '`a` trains best: the model reaches 90.0 %. 1 other is within noise of that. `c` trains worst' in text
  assert text.endswith('the model reaches 50.0 %. 1 other is within noise of that.')
  pairs = {'a': list(range(100)), 'b': list(range(101))}
  apart = {name: four[name]._replace(wrong=wrong) for name, wrong in pairs.items()}
  assert '1 other is within noise' in said(apart)[0]  # one sample more is no difference, of pairs either
  apart['b'] = trained(0.89, tested=1000)._replace(wrong=list(range(110)))
  assert 'within noise' not in said(apart)[0]  # ten more of the same are
  hidden = [row for name in four for row in attacked(name, *NOBODY)]
  assert 'Of these, `a` trains best: the model reaches 90.0 %. 1 other is within' in said(four, [*LEAK, *hidden])[0]
  leaking = {'a': 1, 'b': 2, 'c': 2, 'd': 4}
  some = [row for name, most in leaking.items() for row in attacked(name, *(one < most for one in range(8)))]
  text = said(four, [*attacked('none', *ALL, *ALL), *some])[0]
  assert '`a` leaks least, 1 of 8 images' in text and '90.0 %. 3 others are within noise of that.' in text


def test_the_opening_counts_batches_and_follows_the_leakage():
  leakage = [
    {'defense': 'none', 'round': 40, 'psnr': 9.0, 'ssim': 0.1, 'recovered': 0, 'n': 2, 'by': 'dlg'},
    {'defense': 'none', 'round': 0, 'psnr': 30.0, 'ssim': 0.9, 'recovered': 2, 'n': 2, 'by': 'dlg'},
  ]
  text, _ = said({'none': NONE}, attacked('none', True, True, size=8), 8, leakage, server_noise=1.0)
  assert 'recover 2 of 2 batches of 8 images from uploads of clients with 8 images' in text
  assert 'but with noise at the server, the model' in text
  assert (
    'goes from 30.0 dB (2 of 2 recovered) before the first round to 9.0 dB (0 of 2 recovered) after round 40' in text
  )
  assert 'goes from' not in said({'none': NONE}, LEAK, leakage=leakage[:1])[0]


def test_cautions():
  pair = {'none': NONE, 'topk': trained(0.9)}
  failed = attacked('topk', *NOBODY, otherwise='inconclusive')
  _, notes = said(pair, [*LEAK, *failed])
  assert 'Only 4 uploads' in notes and 'up to 61 %' in notes
  assert 'Against `topk` 4 of 4 runs failed' in notes
  assert 'No attacker who knows the defense was run against `topk`' in notes
  assert 'Each defense was trained once; another seed' in notes and 'guessing' not in notes
  few = {'none': trained(0.9, tested=100), 'topk': trained(0.9, tested=100)}
  assert 'trained once: the intervals of accuracy are by the test samples alone' in said(few, LEAK)[1]
  _, notes = said(pair, [*LEAK, *attacked('topk', *NOBODY), *attacked('topk', *NOBODY, adaptive='masked')])
  assert 'who knows' not in notes and 'failed' not in notes
  assert 'settled' not in notes
  pair['topk'].rows[-2]['accuracy'] = 0.85
  assert 'still changed by up to 5.0 points between two measurements (under `topk`)' in said(pair, LEAK)[1]
  pair['topk'].rows[5]['accuracy'] = 0.99  # early on it may
  assert 'up to 5.0 points' in said(pair, LEAK)[1]
  _, notes = said(pair, LEAK)
  assert 'No upload was attacked under `topk`.' in notes
  _, notes = said({'none': trained(0.19)}, attacked('none', *(True,) * 30))
  assert (
    'hardly better than always predicting one class (10.0 %)' in notes
    and 'Only' not in notes
    and 'trained once' not in notes
  )
  for accuracy, better in ((0.59, False), (0.95, True)):  # of two classes
    assert ('hardly better' in said({'none': trained(accuracy)}, (), num_classes=2)[1]) != better


def test_a_trial_counts_that_any_attacker_recovers():
  rows = [*attacked('none', True, False, True), *attacked('none', False, True, False, attack='csdlg', psnr=(40.0, 8.0))]
  found = report.worst_case_of(rows)['none']
  assert (found['recovered'], found['n'], found['by']) == (3, 3, 'dlg')
  assert found['psnr'] == pytest.approx((30 + 8 + 30) / 3)


def test_entries_and_their_csv():
  plain, dropped = trained(0.9, up=512, seconds_defense=0.0123), trained(0.8, epsilon=math.inf)
  del plain.rows[-1]['accuracy'], plain.rows[-1]['loss']
  plain.rows[-2]['accuracy'] = 0.88
  dropped.rows[0] |= {'clients': 0, 'bytes_up': 0}
  trainings = {'none': plain, 'noise': dropped, 'dp': trained(0.7, epsilon=0.5), 'gone': Trained([], math.nan)}
  none, noise, dp, gone = csv.DictReader(report.frontier_csv(report.entries(trainings, LEAK)).splitlines())
  assert float(none['accuracy']) == 0.88 and float(none['loss']) == 2.3 - 39 / 40
  assert (none['bytes_up'], none['bytes_down'], none['rounds'], none['seconds_defense']) == (
    '512.0',
    '2048.0',
    '40',
    '0.0123',
  )
  assert float(noise['bytes_up']) == 1024 and float(noise['bytes_down']) == pytest.approx(2048 * 40 / 39)
  assert (none['epsilon'], float(noise['epsilon']), dp['epsilon']) == ('', math.inf, '0.5')
  assert (none['recovered'], none['n'], none['by'], noise['n']) == ('4', '4', 'dlg', '')
  assert gone['accuracy'] == gone['bytes_up'] == gone['epsilon'] == gone['seconds'] == ''  # seconds were “nan”
  (once,) = csv.DictReader(report.frontier_csv(report.entries({'none': trained(0.9, rounds=1)})).splitlines())
  assert once['seconds'] == '' and none['seconds'] == '0.25'  # a single round includes compilation
  head, _, *lines = report.frontier_table(report.entries(trainings, LEAK)).splitlines()
  assert head.split('  ')[0] == 'defense' and head.rstrip().endswith('by')
  assert [cell.strip() for cell in lines[0].split('  ') if cell.strip()] == [
    'none', '88.0 %', '–', '0.5', '0.25', '12.3 ms', '–', '30.0', '4 of 4', 'dlg',
  ]  # fmt: skip
  assert '∞ (replace one)' in lines[1] and '0.50 (replace one)' in lines[2]
  assert lines[4] == 'ε: replace one, per client, all uploads, no sampling, δ = 1e-05, RDP.'
  assert dp['epsilon_relation'] == 'replace one' and dp['epsilon_unit'] == 'client' and dp['epsilon_delta'] == '1e-05'
  assert dp['epsilon_sampling'] == 'none' and none['epsilon_relation'] == gone['epsilon_relation'] == ''


def test_costs_beside_none_have_the_interval_of_pairs_where_the_samples_are_known():
  base, one = trained(0.9, tested=100), trained(0.8, tested=100)
  pair = {'none': base._replace(wrong=list(range(10))), 'topk': one._replace(wrong=list(range(20)))}
  for given, bounds in (({'none': base, 'topk': one}, (0.01, 19.95)), (pair, (3.7, 15.9))):
    none, topk = report.entries(given)
    assert topk['cost'] == pytest.approx(10) and none['cost'] is None
    assert (topk['cost_low'], topk['cost_high']) == pytest.approx(bounds, abs=0.06)
  assert ' 10.0 (3.7 to 15.9)' in report.frontier_table([none, topk])
  assert '10.0 points less than without a defense (95 % interval of the cost 3.7 to 15.9 points)' in said(pair, ())[0]


def test_costs_count_the_tokens_of_a_text_together():
  base, one = (trained(share, tested=100)._replace(lengths=[10] * 10) for share in (0.9, 0.8))
  given = {'none': base._replace(wrong=list(range(10))), 'topk': one._replace(wrong=list(range(20)))}
  alone, tokens = (report.entries(given, config={'loss': loss})[1] for loss in ('cross_entropy', 'next_token'))
  assert tokens['cost'] == alone['cost'] == pytest.approx(10)
  assert tokens['cost_low'] < 0 < alone['cost_low'] and tokens['cost_high'] > 1.5 * alone['cost_high']


MEASURED = {'tested': 10_000, 'majority_share': 0.1, 'predicted_classes': 10}


def test_an_undefended_model_at_chance_states_no_cost():
  """The terminal said "topk +76.1 (75.3 to 77.0)" of an undefended model that knows one class."""
  trainings = {'none': trained(0.1, **MEASURED | {'predicted_classes': 1}), 'topk': trained(0.861, **MEASURED)}
  found = report.entries(trainings)
  assert 'rouge1' in report.entries(trainings, config={'modality': 'text'})[0]
  none, topk = csv.DictReader(report.frontier_csv(found).splitlines())
  assert none['at_chance'] == 'it predicts one class for all 10,000 test samples' and topk['at_chance'] == ''
  assert topk['cost'] == topk['cost_low'] == topk['cost_high'] == '' and topk['majority_share'] == '0.1'
  table = report.frontier_table(found, CONFIG)
  text, notes = said(trainings)
  assert '76.1' not in table + text + notes
  assert table.splitlines()[2].split()[:5] == ['none', '10.0', '%,', 'chance', '–']
  for words in (table, notes.replace('`', '')):
    assert 'The undefended model is at chance: no cost can be stated. It predicts one class for all 10,000' in words
    assert (
      'The cause may be the learning rate (0.1 with momentum 0.9, which moves as far as 1 without; its default is 0.01)'
      in words
    )
    assert 'or the number of rounds (40).' in words
  assert 'reaches a test accuracy of 10.0 %, which is chance, after 40 rounds' in text
  assert 'Under `topk` the model reaches 86.1 %, and clients send as many bytes.' in text


@pytest.mark.parametrize(
  ('config', 'cause'),
  [
    ({'init': 'default', 'momentum': 0.0}, 'the learning rate (0.1), the initial weights (init=default) or'),
    ({'share': 'gradient', 'server_learning_rate': 0.5}, 'be the rate of the server (0.5) or the number'),
    ({'learning_rate': 0.01}, '(0.01 with momentum 0.9, which moves as far as 0.1 without)'),
    ({'momentum': 1.0}, '(0.1 with momentum 1, which never stops)'),
  ],
)
def test_why_a_model_may_be_at_chance_is_of_its_own_settings(config, cause):
  lost = {'none': trained(0.102, **MEASURED), 'topk': trained(0.5, **MEASURED)}
  assert cause in said(lost, **config)[1]
  lost['none'].rows[-1]['loss'] = math.nan
  assert 'Its training diverged' in said(lost, **config)[1] and 'The cause' not in said(lost, **config)[1]


def test_a_defense_at_chance_is_named_and_is_no_trade_off():
  trainings = {'none': trained(0.9, **MEASURED), 'noise': trained(0.1, **MEASURED), 'topk': trained(0.8, **MEASURED)}
  rows = [*LEAK, *attacked('noise', *NOBODY, psnr=(30.0, 2.0)), *attacked('topk', *NOBODY)]
  found = report.entries(trainings, rows)
  assert [one['defense'] for one in best(found)] == ['none', 'topk']
  table = report.frontier_table(found)
  assert (
    'The model under noise is at chance: its accuracy of 10.0 %' in table
    and '10.0 %, chance' in table
    and ' 80.0 (' in table
  )
  assert 'The undefended model' not in table and 'cause' not in table
  text, notes = said({name: trainings[name] for name in ('none', 'noise')})
  assert 'Under `noise` the model reaches 10.0 %, which is chance, 80.0 points less than without' in text
  assert 'The model under `noise` is at chance: ' in notes
  marked, plain = report.frontier(found), report.frontier([{**one, 'at_chance': ''} for one in found])
  assert marked.startswith(b'\x89PNG') and marked != plain
  assert report.frontier([one for one in found if one['at_chance']])  # of which there is no line


def test_the_commonest_class_is_what_hardly_better_is_judged_by():
  for share, hardly in ((0.1, False), (0.7, True)):
    notes = said({'none': trained(0.75, **MEASURED | {'majority_share': share})})[1]
    assert ('hardly better than always predicting one class (70.0 %)' in notes) == hardly


def test_names_that_have_no_room_get_numbers():
  def height(points):
    found = [
      {'defense': f'gaussian(stddev={i})', 'psnr': psnr, 'accuracy': accuracy, 'recovered': 0}
      for i, (psnr, accuracy) in enumerate(points)
    ]
    return struct.unpack('>I', report.frontier(found)[20:24])[0]

  apart = height([(10, 0.5), (20, 0.7), (30, 0.9), (math.inf, 0.99)])
  assert apart < height([(10, 0.5), *[(30 + i / 100, 0.9) for i in range(8)]])
  assert report.frontier([{'defense': 'none', 'psnr': None, 'accuracy': 0.9, 'recovered': None}]) is None


def test_partitions_in_words():
  labels = np.repeat(np.arange(10), 600)
  assert summary([np.arange(6000)], labels) == '1 client, 6,000 samples, of 10 classes each'
  assert summary([np.array([0]), np.array([600])], labels) == '2 clients, 1 sample, of 1 class each'
  parts = [np.arange(600 * c + 594, 600 * c + 606) for c in range(9)] + [np.arange(5400)[::9]]
  assert summary(parts, labels) == '10 clients, 12 to 600 samples, of 2 to 9 classes'
  assert summary([*parts[:9], np.arange(300, 900)], labels) == '10 clients, 12 to 600 samples, of 2 classes each'


@pytest.mark.parametrize(('clients', 'classes'), [(4, 2), (1000, 100)])
def test_partitions_are_drawn_within_bounds(clients, classes):
  parts = np.array_split(np.arange(3000), clients)
  png = report.partition_picture(parts, np.arange(3000) % classes, [f'class {i}' for i in range(classes)])
  width, height = struct.unpack('>II', png[16:24])
  assert png.startswith(b'\x89PNG') and width == 1152 and 0.2 * width < height < width


def write(folder):
  """Writes a page with all its parts."""
  trainings = {
    'none': NONE,
    'topk(ratio=0.1)': trained(0.938, up=123, seconds_defense=0.004),
    'client_dp(norm=1,noise=2)': trained(0.7, rounds=17, stopped=True, epsilon=2.31),
  }
  rows = [*LEAK, *attacked('topk(ratio=0.1)', *ALL, adaptive='masked'), *attacked('client_dp(norm=1,noise=2)', *NOBODY)]
  worst = report.worst_case_of(rows)
  leakage = [{'defense': name, 'round': number, **worst[name]} for name in worst for number in (0, 20)]
  parts = np.arange(40).reshape(4, 10)
  report.write_training(
    folder,
    trainings,
    config=CONFIG,
    audit_rows=rows,
    leakage=leakage,
    partition=report.partition_picture(parts, np.arange(40) % 4, list('abcd')),
    audits={'before the first round': 'audit/report.html'},
    methods=methods(defenses=list(trainings)),
  )
  return folder


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  return write(tmp_path_factory.mktemp('training'))


@pytest.fixture(scope='module')
def page(folder):
  return Page((folder / 'training.html').read_text('utf-8'))


def test_the_folder_holds_the_pictures(folder):
  for name in ('frontier', 'curves', 'leakage'):
    assert (folder / f'{name}.png').read_bytes().startswith(b'\x89PNG')
  assert (folder / 'frontier.csv').read_text().startswith('defense,psnr')


def test_the_page_shows_the_figures(page):
  assert len(page.attributes('img')) == 4 and 'audit/report.html' in {link['href'] for link in page.attributes('a')}
  rows = {row[0].strip(): [' '.join(cell.split()) for cell in row[1:]] for row in page.rows}
  assert rows['topk(ratio=0.1)'] == [
    '93.8 %cost 2.3', '1.300', '40', '0.112 %', '2.0', '0.25', '4.0', '–', '4 of 439–100 %', '30.0', '0.90',
    'dlg, masked',
  ]  # fmt: skip
  assert rows['client_dp(norm=1,noise=2)'][:8] == [
    '70.0 %cost 26.1',
    '1.300',
    '17',
    '1.0100 %',
    '2.0',
    '0.25',
    '–',
    '2.4replace one, per client, all uploads',
  ]
  assert rows['none'][0] == '96.1 %' and rows['momentum'] == ['0.9']
  assert json.loads(rows['partition'][0]) == 'classes(number=2)'
  assert 'trains for 1 local epoch in batches of 10 with learning rate 0.1 and momentum 0.9' in ''.join(page.text)
  assert 'after 17 of 40 rounds' in ''.join(page.text) and 'Geyer, Klein, Nabi' in ''.join(page.text)


def test_a_page_of_nothing_but_costs(tmp_path):
  report.write_training(tmp_path, {'topk': Trained([], math.nan, None, True)}, config={})
  page = Page((tmp_path / 'training.html').read_text('utf-8'))
  assert not page.attributes('img') and 'Nothing was attacked' in ''.join(page.text)
  assert {path.name for path in tmp_path.iterdir()} == {'training.html', 'frontier.csv'}
  assert along({'none': NONE}, ()) is None


@pytest.mark.parametrize(
  ('settings', 'loss', 'how'),
  [
    ({}, 'the mean cross-entropy.', 'learning rate 0.1 and momentum 0.9'),
    ({'loss': 'cross_entropy', 'optimizer': 'sgd', 'max_norm': None, 'proximal': 0.0}, 'the mean cross-entropy.',
     'learning rate 0.1 and momentum 0.9'),
    ({'loss': 'squared_error', 'optimizer': 'adam', 'momentum': 0.0, 'max_norm': 1.0, 'proximal': 0.01},
     'the mean of the client’s loss, squared_error.',
     'Adam, learning rate 0.1, gradients clipped to 1 and a proximal term of weight 0.01'),
  ],
)  # fmt: skip
def test_the_page_names_the_loss_and_the_local_training_of_its_clients(settings, loss, how, tmp_path):
  report.write_training(tmp_path, {'none': NONE}, config={**CONFIG, **settings})
  text = ''.join(Page((tmp_path / 'training.html').read_text('utf-8')).text)
  assert f'The loss is {loss}' in text and f'in batches of 10 with {how}, and sends' in text


@pytest.mark.long
def test_a_frontier_is_written_with_links_to_its_audits(tmp_path):
  trainings = {'none': NONE, 'topk(ratio=0.1)': trained(0.938, up=123)}
  rows = [*LEAK, *attacked('topk(ratio=0.1)', *NOBODY)]
  parts = [np.arange(10), np.arange(10, 40)]
  found = Frontier(
    CONFIG, trainings, rows, [Leak('none', 0, LEAK)], {'before the first round': 'audit'},
    methods(['dlg'], list(trainings)), parts, np.arange(40) % 10,
  )  # fmt: skip
  (tmp_path / 'audit').mkdir()
  (tmp_path / 'audit' / 'report.html').touch()
  report.write(found, tmp_path)
  page = Page((tmp_path / 'training.html').read_text('utf-8'))
  assert 'audit/report.html' in {link['href'] for link in page.attributes('a')}
  assert {path.name for path in tmp_path.iterdir()} == {
    'training.html', 'frontier.csv', 'frontier.png', 'curves.png', 'leakage.png', 'audit',
  }  # fmt: skip
  assert len(page.attributes('img')) == 4 and 'Zhu, Liu, Han' in ''.join(page.text)
