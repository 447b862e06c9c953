"""The training program: what it leaves behind, that it goes on where it was, and what it refuses."""

import csv
import json
from unittest import mock

import jax
import numpy as np
import pytest
from absl import flags as absl_flags

import gradleak as gl
from gradleak.core import trees
from gradleak.defenses.differential_privacy import epsilon
from gradleak.federated.scenario import fingerprint
from gradleak.report.frontier import best, columns
from tests import programs

pytestmark = pytest.mark.usefixtures('fast_compilation')
SMALL = (
  '--dataset=digits', '--limit=120', '--model=mlp', '--clients=4', '--per_round=2', '--rounds=3', '--public=20',
  '--learning_rate=0.01', '--progress=lines',
)  # fmt: skip


@pytest.mark.slow
def test_it_trains_from_the_weights_of_a_file(tmp_path):
  variables = gl.models.mlp(10).init(jax.random.key(7), (8, 8, 1))
  entries = {'.'.join(trees.path_names(path)): leaf for path, leaf in jax.tree.leaves_with_path(variables['params'])}
  np.savez(tmp_path / 'mine.npz', **entries)
  done = programs.start('train', *SMALL, f'--weights={tmp_path}/mine.npz', f'--workdir={tmp_path}/new')
  assert done.status == 0, done.err
  assert done.out.startswith('defense') and 'round 3 of 3, accuracy' in done.err
  assert 'mine.npz: ' in done.err and 'of 120 test images' in done.err
  assert not (tmp_path / 'new' / 'frontier.png').exists()
  config = json.loads((tmp_path / 'new' / '00-none' / 'config.json').read_text())
  assert config['weights'] == 'mine.npz' and 'init' not in config
  assert config['weights_fingerprint'] == fingerprint(variables)


@pytest.mark.slow
def test_a_budget_ends_the_training_and_spares_the_reference(tmp_path):
  flags = (*SMALL, '--rounds=9', '--per_round=4', '--defenses=none;client_dp(norm=1,noise=9)', '--budget=2')
  done = programs.start('train', *flags, f'--workdir={tmp_path}/new')
  assert done.status == 0, done.err
  rows = [
    [json.loads(line) for line in path.read_text().splitlines()] for path in sorted(tmp_path.glob('new/*/rounds.jsonl'))
  ]
  assert len(rows[0]) == 9 and 'epsilon' not in rows[0][-1]
  none, private = (json.loads(path.read_text()) for path in sorted(tmp_path.glob('new/*/config.json')))
  assert 'epsilon' not in none and private['epsilon']['relation'] == 'replace one'
  assert 'ε: replace one, per client, all uploads' in done.out
  spent = [row['epsilon'] for row in rows[1]]
  assert spent == [epsilon(9, 'replace one', steps=r) for r in range(1, len(spent) + 1)]
  assert spent[-1] <= 2 < epsilon(9, 'replace one', steps=len(spent) + 1) and len(spent) < 9
  refused = programs.start(
    'train', *SMALL, '--defenses=client_dp(norm=1,noise=9)', '--budget=0.1', f'--workdir={tmp_path}/refused'
  )
  assert refused.status == 2 and 'the first round alone costs ε = ' in refused.err
  assert not (tmp_path / 'refused').exists()


@pytest.mark.long
def test_a_protocol_sets_what_flags_do_not(tmp_path):
  flags = ('--dataset=digits', '--model=mlp', '--protocol=graddefense', '--rounds=1', '--clients=40', '--per_round=3')
  done = programs.start('train', *flags, '--progress=none', f'--workdir={tmp_path}/new')
  assert done.status == 0, done.err
  config = json.loads((tmp_path / 'new' / '00-none' / 'config.json').read_text())
  assert config['partition'] == 'classes(number=2,low=1,high=10)' and config['weighting'] == 'equal'
  assert (config['rounds'], config['clients'], config['local_epochs'], config['learning_rate']) == (1, 40, 2, 0.01)


@pytest.mark.long
@pytest.mark.parametrize('dataset', ['notes', 'breast_cancer'])
def test_rows_and_texts_are_trained_on_without_attacks(dataset, tmp_path):
  """Texts have a number of attacker's steps of their own, which was refused where nobody attacks."""
  flags = ('--clients=200', '--per_round=1', '--rounds=1', '--public=20', '--progress=none')
  done = programs.start('train', f'--dataset={dataset}', *flags, f'--workdir={tmp_path}/new')
  assert done.status == 0, done.err
  assert (tmp_path / 'new' / '00-none' / 'lengths.json').exists() == (dataset == 'notes')


def test_clients_of_a_protocol_have_half_of_the_classes_of_the_data():
  module, own = programs._load('train')
  with mock.patch.object(absl_flags, 'FLAGS', own):
    own(['train', '--protocol=ffl', '--clients=40'])
    module._follow_protocol(100)
    assert (own.partition, own.rounds, own.clients) == ('classes(number=50)', 2000, 40)
    own.unparse_flags()


@pytest.mark.slow
def test_it_trains_attacks_and_draws_the_frontier(tmp_path):
  flags = (*SMALL, '--defenses=none;topk(ratio=0.1)', '--attacks=csdlg', '--trials=1', '--steps=3', '--attack_every=2')
  done = programs.start('train', *flags, f'--workdir={tmp_path}/new')
  assert done.status == 0, done.err
  assert 'topk(ratio=0.1), 2 of 2' in done.err and 'round 3 of 3, accuracy' in done.err
  with open(tmp_path / 'new' / 'frontier.csv', encoding='utf-8', newline='') as file:
    none, topk = csv.DictReader(file)
  numbers = 64 * 128 + 128 + 128 * 128 + 128 + 128 * 64 + 64 + 64 * 10 + 10
  assert [none['defense'], topk['defense']] == ['none', 'topk(ratio=0.1)']
  assert float(none['bytes_up']) == 4 * numbers > 5 * float(topk['bytes_up'])
  assert none['n'] == '1' and float(none['psnr']) > 0 and 0 <= float(none['accuracy']) <= 1
  assert (tmp_path / 'new' / 'frontier.png').read_bytes().startswith(b'\x89PNG')
  assert (tmp_path / 'new' / 'audit' / 'report.html').exists()
  assert (tmp_path / 'new' / 'training.html').exists()
  leaks = (tmp_path / 'new' / '01-topk-ratio-0-1' / 'leakage.jsonl').read_text().splitlines()
  leaks = [json.loads(line) for line in leaks]
  assert [(leak['round'], {row['trial'] for row in leak['rows']}) for leak in leaks] == [(2, {0})]
  assert (tmp_path / 'new' / '01-topk-ratio-0-1' / 'audit-00002' / 'report.html').exists()
  assert (tmp_path / 'new' / 'leakage.png').read_bytes().startswith(b'\x89PNG')
  rows = [json.loads(line) for line in (tmp_path / 'new' / '00-none' / 'rounds.jsonl').read_text().splitlines()]
  assert [row['round'] for row in rows] == [1, 2, 3]
  again = programs.start('train', *flags, f'--workdir={tmp_path}/new')
  assert again.status == 0 and 'round' not in again.err
  other = programs.start('train', *flags, '--seed=1', f'--workdir={tmp_path}/new')
  assert other.status == 2 and 'seed was 0, now 1' in other.err


def test_what_none_beats_is_the_frontier():
  points = [(20, 0.9), (10, 0.9), (10, 0.8), (5, 0.7), (30, 0.95), (None, 0.99)]
  blank = dict.fromkeys(columns())
  found = [{**blank, 'psnr': psnr, 'accuracy': accuracy} for psnr, accuracy in points]
  assert [(one['psnr'], one['accuracy']) for one in best(found)] == [(30, 0.95), (10, 0.9), (5, 0.7)]


@pytest.mark.parametrize(
  ('flags', 'words'),
  [
    ('--server=adagrad', "unknown server 'adagrad'"),
    ('--clients=0', 'number of clients is 0'),
    ('--per_round=9', 'per_round is 9'),
    ('--partition=dirichlet(alpha=-1)', 'dirichlet(alpha) is -1'),
    ('--defenses=topk(ratio=2)', 'topk(ratio) is 2'),
    ('--attacks=csdgl', "unknown attack 'csdgl'"),
    ('--momentum=2', 'momentum is 2'),
    ('--rounds=0', 'rounds is 0'),
    ('--protocol=fll', "unknown protocol 'fll'"),
    ('--protocol=ffl --share=gradient', 'the protocol ffl is of local training'),
    ('--server=adam --server_momentum=0.9', 'server_momentum is 0.9'),
    ('--attack_every=-1', 'attack_every is -1'),
    ('--attack_every=2', 'attack_every is 2, and there are no attacks'),
    ('--controls=8', 'controls is 8, and there are no attacks'),
    ('--share=gradient', 'learning_rate is 0.01, and a client that shares its gradient'),
    ('--server_noise=-1', 'server_noise is -1'),
    ('--share=weights', "unknown share 'weights'"),
  ],
)
def test_one_line_and_status_two(tmp_path, flags, words):
  done = programs.start('train', *SMALL, '--progress=none', *flags.split(), f'--workdir={tmp_path}/new')
  assert done.status == 2 and done.err.startswith('error: ') and words in done.err, done.err
  assert not (tmp_path / 'new').exists()
