"""The main program, end to end on small settings."""

import json
import os
from typing import NamedTuple
from unittest import mock

import jax
import numpy as np
import PIL.Image
import pytest

import gradleak as gl
from gradleak.attacks import AttackMethod
from gradleak.core import trees
from gradleak.core.storage import Caution
from gradleak.federated.scenario import fingerprint
from tests import programs

SMOKE = (
  '--dataset=digits', '--model=mlp', '--trials=2', '--steps=5', '--controls=2', '--knowledge=non-adaptive',
  '--compilation_cache=', '--rounds_before=0',
)  # fmt: skip
DEFENSES = '--defenses=none;prune(rate=0.9)'
READING = 'reading digits …\n'  # the first line of feedback
FILES = {'config.json', 'rows.jsonl', 'controls.jsonl', 'summary.csv', 'reconstructions.npz', 'report.html', 'grid.png'}
KEYS = {
  'dataset', 'model', 'attack', 'defense', 'trial', 'seed', 'mse', 'psnr', 'ssim', 'pearson', 'label_correct',
  'objective', 'diverged', 'steps', 'oracle_psnr', 'objective_at_truth', 'control_psnr', 'success',
}  # fmt: skip

pytestmark = pytest.mark.usefixtures('fast_compilation')


class Completed(NamedTuple):
  """A run that is complete: its folder, what it printed, and how often its attacks were traced."""

  workdir: object
  done: object
  traces: int

  def read(self, name):
    return [json.loads(line) for line in (self.workdir / name).read_text('utf-8').splitlines()]


def run(workdir, *arguments):
  """Runs the program, and counts how often csDLG is built with traced numbers, that is while it is compiled."""
  traces, build = [], AttackMethod.build

  def counted(method, numbers, *arguments):
    traces.extend([None] * any(isinstance(number, jax.core.Tracer) for number in numbers))
    return build(method, numbers, *arguments)

  with mock.patch.object(AttackMethod, 'build', counted):
    done = programs.start('audit', *SMOKE, f'--workdir={workdir}', *arguments)
  assert done.status == 0, done.err
  return Completed(workdir, done, len(traces))


@pytest.fixture(scope='module')
def completed(fast_compilation, tmp_path_factory):
  return run(tmp_path_factory.mktemp('results') / 'new' / 'er', DEFENSES)


def snapshot(folder):
  return {path: (path.stat().st_mtime_ns, path.is_file() and path.read_bytes()) for path in folder.rglob('*')}


@pytest.mark.long
def test_everything_is_there(completed):
  assert {path.name for path in completed.workdir.iterdir()} >= FILES
  assert not list(completed.workdir.rglob('*.tmp')) and not (completed.workdir / 'checkpoints').exists()
  config = json.loads((completed.workdir / 'config.json').read_text())
  assert (config['dataset'], config['model'], config['trials'], config['steps'], config['seed']) == (
    'digits', 'mlp', 2, 5, 0
  )  # fmt: skip
  assert (config['defenses'], config['attacks']) == (['none', 'prune(rate=0.9)'], ['csdlg(tv=1e-06)'])


@pytest.mark.long
def test_one_row_per_trial(completed):
  rows, controls = completed.read('rows.jsonl'), completed.read('controls.jsonl')
  assert [(row['defense'], row['trial']) for row in rows] == [
    ('none', 0), ('none', 1), ('prune(rate=0.9)', 0), ('prune(rate=0.9)', 1)
  ]  # fmt: skip
  assert [(row['defense'], row['trial']) for row in controls] == [('null_gradient', 0), ('null_gradient', 1)]
  for row in rows + controls:
    assert row.keys() >= KEYS
    assert (row['dataset'], row['model'], row['attack'], row['seed']) == ('digits', 'mlp', 'csdlg(tv=1e-06)', 0)
    assert row['steps'] == 5 and not row['diverged'] and row['objective'] < row['objective_start']


@pytest.mark.long
def test_pictures_and_tables_are_readable(completed):
  with np.load(completed.workdir / 'reconstructions.npz') as archive:
    images = {'truth', '["csdlg(tv=1e-06)", "none"]', '["csdlg(tv=1e-06)", "prune(rate=0.9)"]'}
    assert set(archive) == {*images, '_sha256'}
    assert {archive[name].shape for name in images} == {(2, 1, 8, 8, 1)}
  with PIL.Image.open(completed.workdir / 'grid.png') as image:
    assert min(image.size) > 100
  summary = (completed.workdir / 'summary.csv').read_text().splitlines()
  assert len(summary) == 3 and summary[0].startswith('attack,defense,')
  page = (completed.workdir / 'report.html').read_text('utf-8')
  assert 'csdlg(tv=1e-06)' in page and 'prune(rate=0.9)' in page and page.rstrip().endswith('</html>')


@pytest.mark.long
def test_it_prints_a_table_and_shows_progress(completed):
  out, err = completed.done.out, completed.done.err
  assert 'PSNR dB' in out and 'inconclusive' in out
  assert [line.split()[0] for line in out.splitlines() if line.startswith('  ')][:2] == ['none', 'prune(rate=0.9)']
  assert f'report: {completed.workdir}/report.html' in out
  assert 'csdlg(tv=1e-06): 6 runs of 5 steps' in err and '100 %, objective' in err


@pytest.mark.slow
def test_the_weights_of_a_file(tmp_path):
  model = gl.models.mlp(10)
  variables = model.init(jax.random.key(7), (8, 8, 1))
  entries = {'.'.join(trees.path_names(path)): leaf for path, leaf in jax.tree.leaves_with_path(variables['params'])}
  np.savez(tmp_path / 'mine.npz', **entries)
  done = programs.start('audit', *SMOKE, f'--weights={tmp_path}/mine.npz', f'--workdir={tmp_path}/run')
  assert done.status == 0, done.err
  assert f'accuracy with the weights of {tmp_path}/mine.npz: ' in done.err and 'of 100 public images' in done.err
  config = json.loads((tmp_path / 'run' / 'config.json').read_text())
  assert config['weights'] == 'mine.npz' and 'init' not in config
  assert config['weights_fingerprint'] == fingerprint(variables)
  page = (tmp_path / 'run' / 'report.html').read_text('utf-8')
  assert 'mlp, with the weights of mine.npz' in page and 'initialised as' not in page


@pytest.mark.parametrize(
  ('flags', 'words'),
  [
    ('--weights={here}/none.npz', 'none.npz'),
    ('--weights={here}/other.npz', 'do not fit'),
    ('--weights={here}/other.npz --init=default', '--init says how weights are drawn: give one of them'),
  ],
)
def test_weights_that_it_refuses(tmp_path, flags, words):
  np.savez(tmp_path / 'other.npz', kernel=np.zeros((3, 3), np.float32))
  done = programs.start('audit', *SMOKE, *flags.format(here=tmp_path).split(), f'--workdir={tmp_path}/run')
  assert done.status == 2 and words in done.err.splitlines()[-1]
  assert not (tmp_path / 'run').exists()


@pytest.mark.slow
def test_the_second_start_says_that_it_is_complete(completed):
  """In a process of its own: what a user does."""
  before = snapshot(completed.workdir)
  done = programs.spawn('audit', *SMOKE, DEFENSES, f'--workdir={completed.workdir}')
  assert (done.status, done.err) == (0, READING)
  assert done.out.startswith(f'{completed.workdir} is complete already: nothing to do.\n')
  assert done.out.endswith(completed.done.out)
  assert snapshot(completed.workdir) == before


@pytest.mark.long
def test_speed_is_no_setting(completed):
  before = snapshot(completed.workdir)
  done = programs.start('audit', *SMOKE, DEFENSES, f'--workdir={completed.workdir}', '--group_size=3')
  assert done.status == 0 and 'is complete already' in done.out
  assert snapshot(completed.workdir) == before


@pytest.mark.long
@pytest.mark.parametrize(
  ('flag', 'named'),
  [
    ('--trials=1', 'trials was 2, now 1'),
    ('--steps=6', 'steps was 5, now 6'),
    ('--seed=1', 'seed was 0, now 1'),
    ('--model=mlp(activation=tanh)', "model was 'mlp', now 'mlp(activation=tanh)'"),
    ('--share=delta', "share was 'gradient', now 'delta'"),
    ('--defenses=none', "defenses was ['none', 'prune(rate=0.9)'], now ['none']"),
  ],
)
def test_another_setting_is_named_and_the_folder_stays_as_it_is(completed, flag, named):
  before = snapshot(completed.workdir)
  done = programs.start('audit', *SMOKE, DEFENSES, f'--workdir={completed.workdir}', flag)
  assert done.status == 2 and done.out == ''
  assert done.err.startswith(f'{READING}error: the work directory ') and done.err.count('\n') == 2
  assert named in done.err and 'fingerprint' not in done.err and 'key was' not in done.err
  assert snapshot(completed.workdir) == before


@pytest.mark.long
def test_what_was_deleted_is_rendered_again(completed):
  names = ('rows.jsonl', 'report.html', 'reconstructions.npz')
  before = {name: (completed.workdir / name).read_bytes() for name in names}
  (completed.workdir / 'rows.jsonl').unlink()
  (completed.workdir / 'report.html').unlink()
  with pytest.warns(Caution, match=r'rows\.jsonl cannot be read .*; it is written anew'):
    done = programs.start('audit', *SMOKE, DEFENSES, f'--workdir={completed.workdir}')
  assert done.status == 0 and done.err == READING  # nothing is attacked again
  after = {name: (completed.workdir / name).read_bytes() for name in names}
  assert after['rows.jsonl'] == before['rows.jsonl']
  assert after['reconstructions.npz'] == before['reconstructions.npz']
  assert after['report.html'].startswith(b'<!')


@pytest.mark.long
def test_a_page_that_is_older_than_its_result_is_made_anew(completed):
  """As a kill leaves it, between the result of a folder that grew and its page."""
  page = completed.workdir / 'report.html'
  page.write_text('old')
  os.utime(page, (0, 0))
  done = programs.start('audit', *SMOKE, DEFENSES, f'--workdir={completed.workdir}')
  assert done.status == 0 and 'complete already' not in done.out
  anew = page.read_text('utf-8')
  assert anew.startswith('<!')
  page.write_text('mine')
  assert 'complete already' in programs.start('audit', *SMOKE, DEFENSES, f'--workdir={completed.workdir}').out
  assert page.read_text() == 'mine'
  page.write_text(anew, 'utf-8')


@pytest.fixture(scope='module')
def restarted(fast_compilation, tmp_path_factory):
  return run(tmp_path_factory.mktemp('restarted') / 'new', DEFENSES, '--restarts=2')


@pytest.mark.slow
def test_attacks_of_one_structure_are_compiled_once(completed, restarted, tmp_path):
  jax.clear_caches()  # else it finds the programs of `restarted`
  both = run(tmp_path / 'new', DEFENSES, '--attacks=csdlg(tv=0.01);csdlg(tv=1e-6)')
  assert both.traces == restarted.traces > 0  # as many runs of one attack
  assert 'csdlg × 2: 12 runs of 5 steps' in both.done.err
  rows = both.read('rows.jsonl')
  assert [row['attack'] for row in rows] == ['csdlg(tv=0.01)'] * 4 + ['csdlg(tv=1e-06)'] * 4
  assert rows[4:] == completed.read('rows.jsonl')
  assert all(a['objective'] > b['objective'] for a, b in zip(rows[:4], rows[4:], strict=True))


@pytest.mark.slow
def test_restarts(completed, restarted):
  rows, one = restarted.read('rows.jsonl'), completed.read('rows.jsonl')
  assert len(rows) == len(one)
  assert all(a['distance'] <= b['distance'] for a, b in zip(rows, one, strict=True))  # the first start is the same
  assert any(a['distance'] < b['distance'] for a, b in zip(rows, one, strict=True))
  assert all(row['oracle_psnr'] >= row['psnr'] and row['restarts'] == 2 for row in rows)


@pytest.mark.slow
def test_a_client_that_shares_its_delta_of_a_batch_whose_labels_are_inferred(tmp_path):
  flags = ('--share=delta', '--local_epochs=2', '--local_batch_size=1', '--batch_size=2', '--learning_rate=0.05')
  found = run(tmp_path / 'new', '--defenses=none', '--labels=inferred', *flags)
  config = json.loads((found.workdir / 'config.json').read_text())
  assert {key: config[key] for key in ('share', 'local_epochs', 'local_batch_size', 'learning_rate', 'batch_size')} == {
    'share': 'delta', 'local_epochs': 2, 'local_batch_size': 1, 'learning_rate': 0.05, 'batch_size': 2
  }  # fmt: skip
  rows = found.read('rows.jsonl')
  assert [(row['trial'], row['batch_size'], row['labels']) for row in rows] == [(0, 2, 'inferred'), (1, 2, 'inferred')]
  assert all(row['objective_at_truth'] < 1e-4 < row['objective'] < row['objective_start'] for row in rows)
  assert all(0 <= row['label_correct'] <= row['label_counts_correct'] <= 1 for row in rows)
  page = (found.workdir / 'report.html').read_text('utf-8')
  assert 'after 4 local steps' in page and 'It infers the labels from the update' in page
  with np.load(found.workdir / 'reconstructions.npz') as archive:
    assert archive['truth'].shape == (2, 2, 8, 8, 1)


@pytest.mark.slow
def test_attackers_who_know_the_defense_stand_beside(fast_compilation, tmp_path):
  """The program's default: both."""
  done = programs.start(
    'audit', *SMOKE, '--knowledge=both', '--defenses=none;prune(rate=0.9)', '--trials=1', f'--workdir={tmp_path}',
  )  # fmt: skip
  assert done.status == 0, done.err
  rows = [json.loads(line) for line in (tmp_path / 'rows.jsonl').read_text('utf-8').splitlines()]
  assert [(row['defense'].partition('(')[0], row['adaptive']) for row in rows] == [
    ('none', None), ('prune', None), ('prune', 'masked'), ('prune', 'masked+prior'),
  ]  # fmt: skip
  assert 'adaptive' in done.out and 'masked' in (tmp_path / 'report.html').read_text('utf-8')


ROWS = (
  '--dataset=breast_cancer', '--trials=1', '--steps=2', '--controls=1', '--public=0', '--knowledge=non-adaptive',
  '--compilation_cache=', '--defenses=none',
)  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize(('program', 'model'), [('audit', '--model=logistic'), ('sweep', '--models=mlp;logistic')])
def test_usual_attacks_that_a_network_does_not_offer_are_left_out_with_the_reason(program, model, tmp_path):
  own = () if program == 'audit' else ('--seeds=1',)
  done = programs.start(program, *ROWS, model, *own, f'--workdir={tmp_path}')
  assert done.status == 0, done.err
  assert 'note: peeling is left out: peeling needs a hidden layer' in done.err and 'note: spear is left out' in done.err
  (config, *_) = (json.loads(path.read_text('utf-8')) for path in tmp_path.rglob('config.json'))
  assert config['attacks'] == ['fidel', 'tableak(seeds=4,steps=300)']
  refused = programs.start(program, *ROWS, model, *own, '--attacks=fidel;peeling', f'--workdir={tmp_path}/own')
  assert refused.status == 2 and 'peeling needs a hidden layer' in refused.err


@pytest.mark.long
def test_where_no_usual_attack_can_be_run_the_reason_is_the_error(tmp_path):
  done = programs.start('audit', *ROWS, '--error_rate=0.01', f'--workdir={tmp_path}')
  assert done.status == 2 and 'note:' not in done.err and 'error: error_rate is a term of the question' in done.err


@pytest.mark.long
def test_samples_that_are_sorted_are_drawn_where_trials_stop(tmp_path):
  """The embedded faces stand before what is none, and no flag put them in another order."""
  flags = (
    '--dataset=faces', '--model=mlp', '--attacks=fidel', '--trials=64', '--decide=0.5', '--controls=8', '--public=8',
    '--knowledge=non-adaptive', '--rounds_before=0', '--defenses=none', f'--workdir={tmp_path}/new',
  )  # fmt: skip
  refused = programs.start('audit', *flags)
  assert refused.status == 2 and 'shuffle them, as --shuffle does' in refused.err
  done = programs.start('audit', *flags, '--shuffle')
  assert done.status == 0, done.err
  result = gl.load(tmp_path / 'new')
  first = gl.data.load('faces', limit=64).samples
  assert len(result.stops) == 1 and result.config['shuffle'] is True
  assert not np.array_equal(np.asarray(result.truth)[:8].squeeze(), first[:8].squeeze())
  few = programs.start('audit', '--dataset=digits', '--trials=9999', '--shuffle', f'--workdir={tmp_path}/few')
  assert few.status == 2 and 'images are asked for' in few.err
