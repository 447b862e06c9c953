"""The leaderboard's program: what it refuses; and a run that is added, shown and repeated."""

import json

import pytest

from gradleak.studies.autoleak import leaderboard
from gradleak.studies.autoleak.entry import SETTINGS
from tests import programs
from tests.leaderboards import COMMAND, found

# Flags of launch/autoleak.py that are of a machine, or change no figure.
OF_THE_MACHINE = {
  *('workdir', 'progress', 'compilation_cache', 'group_size', 'data_dir', 'weights'),
  *('cluster', 'cores', 'gpus', 'retries', 'slurm', 'process', 'processes'),
}


@pytest.fixture
def board(tmp_path):
  for entry in leaderboard.entries(found(), COMMAND):
    leaderboard.add(tmp_path / 'board', entry)
  return tmp_path / 'board'


def test_every_flag_of_autoleak_is_repeated_or_of_the_machine():
  _, own = programs._load('autoleak')
  flags = {name for name in own if getattr(own[name], 'heading', None)}
  assert flags == {*SETTINGS, *OF_THE_MACHINE}
  assert not {*SETTINGS} & OF_THE_MACHINE


@pytest.mark.parametrize(
  ('flags', 'words'),
  [
    (
      '',
      'give one of --add=WORKDIR, --costs=WORKDIR, --identified=WORKDIR, --check=NAME --workdir=FOLDER and --page=FILE',
    ),
    ('--add={here} --page={here}/page.html', 'give one of'),
    ('--page={here}/page.html --costs={here} --folder={here}/board', 'give one of'),
    ('--costs={here} --identified={here} --folder={here}/board', 'give one of'),
    ('--add={here} --identified={here} --folder={here}/board', 'give one of'),
    ('--page={here}/page.html --replace --folder={here}/board', '--replace is for --add, which is missing'),
    ('--page={here}/page.html --weights=w.npz --folder={here}/board', '--weights is for --check, which is missing'),
    ('--add={here}', '{here} holds no finished AutoLeak'),
    ('--add={here}/nowhere', 'holds no finished AutoLeak'),
    ('--page={here}/page.html --folder={here}/nowhere', 'which is none'),
    ('--page={here}/page.html --folder={here}', 'has no entries'),
    ('--check=outpost --workdir={here}/new --folder={here}/board', "unknown name of the leaderboard 'outpost'"),
    ('--check={name} --folder={here}/board', "workdir is '', expected a path"),
    ('--check={name} --workdir={here}/done --folder={here}/board', 'holds a finished run'),
  ],
)
def test_what_it_refuses(board, tmp_path, flags, words):
  (tmp_path / 'done').mkdir()
  (tmp_path / 'done' / 'autoleak.json').write_text('{}')
  known = {'here': tmp_path, 'name': next(iter(leaderboard.read(board)))}
  done = programs.start('leaderboard', *flags.format(**known).split())
  assert done.status == 2 and len(done.err.splitlines()) == 1
  assert words.format(**known) in done.err
  assert not (tmp_path / 'page.html').exists() and not (tmp_path / 'new').exists()


def test_an_entry_with_the_weights_of_a_file_names_the_file(tmp_path):
  entry = next(iter(leaderboard.entries(found(weights='mine.npz'), COMMAND)))
  path = leaderboard.add(tmp_path / 'board', entry)
  done = programs.start(
    'leaderboard', f'--check={path.stem}', f'--folder={tmp_path}/board', f'--workdir={tmp_path}/new'
  )
  assert done.status == 2 and 'is of a model with the weights of mine.npz: give --weights=FILE' in done.err


def test_an_entry_of_a_former_version_is_checked_by_that_version(board, tmp_path):
  path = next(board.iterdir())
  entry = json.loads(path.read_text('utf-8'))
  entry['versions'] |= {'autoleak': 'AutoLeak-1', 'gradleak': '0.2.0'}
  path.write_text(json.dumps(entry), 'utf-8')
  done = programs.start('leaderboard', f'--check={path.stem}', f'--folder={board}', f'--workdir={tmp_path}/new')
  assert done.status == 2 and not (tmp_path / 'new').exists()
  assert 'is of AutoLeak-1, and this version runs AutoLeak-2: gradleak 0.2.0 can check it' in done.err


def test_a_damaged_file_is_named_and_no_page_written(board, tmp_path):
  path = next(board.iterdir())
  path.write_text(path.read_text('utf-8')[:100], 'utf-8')
  done = programs.start('leaderboard', f'--page={tmp_path}/page.html', f'--folder={board}')
  assert done.status == 2 and str(path) in done.err and not (tmp_path / 'page.html').exists()


def test_a_page_that_is_a_folder_is_named(board, tmp_path):
  done = programs.start('leaderboard', f'--page={tmp_path}', f'--folder={board}')
  assert (done.status, done.err.count('\n')) == (1, 1)
  assert done.err.startswith(f'error: cannot write {tmp_path} (Is a directory)')


def test_the_page(board, tmp_path):
  done = programs.start('leaderboard', f'--page={tmp_path}/page.html', f'--folder={board}')
  assert (done.status, done.err) == (0, '')
  assert (tmp_path / 'page.html').read_text('utf-8').count('<table') == 1


def test_costs_of_a_training_are_written_into_the_files_of_its_task(board, tmp_path):
  trained = tmp_path / 'trained'
  task = next(iter(leaderboard.read(board).values()))['task']
  for defense, accuracy in (('none', 0.9), ('prune(rate=0.9)', 0.85)):
    folder = trained / defense
    folder.mkdir(parents=True)
    config = {'rounds': 2, 'per_round': 3, 'clients': 9, 'partition': 'iid', 'share': 'gradient', 'seed': 0}
    config |= {'model': task['model'], 'dataset': task['dataset'], 'init': task['init'], 'defense': defense}
    (folder / 'config.json').write_text(json.dumps(config))
    (folder / 'rounds.jsonl').write_text(json.dumps({'round': 2, 'accuracy': accuracy, 'tested': 1000}))
  (trained / 'trainings.json').write_text(json.dumps({'none': 'none', 'prune(rate=0.9)': 'prune(rate=0.9)'}))
  before = leaderboard.read(board)
  done = programs.start('leaderboard', f'--costs={trained}', f'--folder={board}')
  after = leaderboard.read(board)
  (name,) = (name for name in before if before[name] != after[name])
  assert (done.status, done.out.strip()) == (0, str(board / f'{name}.json'))
  assert after[name]['defense'] == 'prune(rate=0.9)' and after[name]['cost']['points'] == 5
  assert {**after[name], 'cost': None} == {**before[name], 'cost': None}
  config_of_none = trained / 'none' / 'config.json'
  config_of_none.write_text(config_of_none.read_text().replace(task['model'], 'mlp'))
  done = programs.start('leaderboard', f'--costs={trained}', f'--folder={board}')
  assert done.status == 2 and 'is of the task that was trained in' in done.err


def test_costs_are_of_defenses_and_not_of_their_labels(board, tmp_path):
  (entry,) = (one for one in leaderboard.read(board).values() if one['text'] == 'prune(rate=0.9)')
  config = {'rounds': 1, 'per_round': 3, 'clients': 9, 'share': 'gradient'} | {
    part: entry['task'][part] for part in ('model', 'dataset', 'init')
  }
  trained = {'none': ('none', 0.9), 'mine': ('prune(rate=0.9)', 0.8), 'laplace(scale=0.1)': ('laplace(scale=9)', 0.5)}
  for label, (text, accuracy) in trained.items():
    folder = tmp_path / 'trained' / label
    folder.mkdir(parents=True)
    (folder / 'config.json').write_text(json.dumps({**config, 'defense': label, 'defense_text': text}))
    (folder / 'rounds.jsonl').write_text(json.dumps({'round': 1, 'accuracy': accuracy}))
  (tmp_path / 'trained' / 'trainings.json').write_text(json.dumps({label: label for label in trained}))
  done = programs.start('leaderboard', f'--costs={tmp_path / "trained"}', f'--folder={board}')
  assert done.status == 0, done.err
  costs = {one['text']: one['cost'] and one['cost']['points'] for one in leaderboard.read(board).values()}
  assert costs == {'none': None, 'prune(rate=0.9)': 10, 'laplace(scale=0.1)': None}


@pytest.mark.slow
def test_a_run_is_added_shown_and_repeated(tmp_path):
  run, board = tmp_path / 'run', f'--folder={tmp_path}/board'
  defenses = '--defenses=prune(rate=0.9);gaussian(stddev=0.5)'
  what = '--dataset=digits', '--model=mlp(widths=16)', '--trials=2', '--public=30', defenses
  done = programs.spawn('autoleak', *what, '--progress=none', f'--workdir={run}')
  assert done.status == 0, done.err

  bare = json.loads((run / 'command.json').read_text('utf-8'))
  assert (bare['model'], bare['trials'], bare['rounds_before'], bare['public']) == ('mlp(widths=16)', 2, 1, 30)
  costs = tmp_path / 'costs.json'
  costs.write_text(json.dumps({'prune(rate=0.9)': [0.5, 'a guess of this test']}))
  assert programs.start('leaderboard', f'--add={run}', board, f'--costs={costs}').status == 0
  entries = leaderboard.read(tmp_path / 'board')
  assert {entry['defense'] for entry in entries.values()} == {'none', 'prune(rate=0.9)', 'gaussian(stddev=0.5)'}
  again = programs.start('leaderboard', f'--add={run}', board)
  assert again.status == 2 and 'differs in cost' in again.err
  assert programs.start('leaderboard', f'--add={run}', board, '--replace').status == 0

  name = next(name for name in entries if name.startswith('prune'))
  done = programs.spawn('leaderboard', f'--check={name}', board, '--progress=none', f'--workdir={tmp_path}/check')
  assert done.status == 0, done.err
  assert done.out.endswith(f'{name}: the same counts, the same bits\n')
  assert json.loads((tmp_path / 'check' / 'command.json').read_text('utf-8'))['defenses'] == 'prune(rate=0.9)'
