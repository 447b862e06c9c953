"""Tables of the papers, rerun end to end at their smallest."""

import csv
import dataclasses
import json
import sys
from unittest import mock

import numpy as np
import pytest
from absl import flags as absl_flags

import experiments
from experiments import forecast, results
from experiments.comparison import BEST, Cell
from experiments.experiment import Experiment, Run
from experiments.forecast import Forecast
from gradleak.core.statistics import MIN_RUNS
from gradleak.metrics import perceptual
from gradleak.models.operations import Operations
from launch import _program
from tests import programs

SMOKE = ('--scale=smoke', '--compilation_cache=', '--progress=none', '--results=')

pytestmark = pytest.mark.usefixtures('fast_compilation')


@pytest.mark.slow
@pytest.mark.parametrize('name', sorted(experiments.REGISTRY))
def test_every_table_is_rerun(name, tmp_path):
  experiment, workdir = experiments.get(name), tmp_path / 'new' / 'er'
  done, lines = programs.reproduce(experiment, workdir)
  for line, cell in zip(lines, experiment.cells, strict=True):
    assert (line['column'], line['row'], line['metric']) == cell[:3]
    kind = experiment.runs[cell.run].kind
    if kind == 'audit':
      _check_audited(line, cell, workdir)
    elif kind == 'trainings':
      extrapolated = 'extrapolated from one local step' in line['remark']
      tested = str(experiment.runs[cell.run].scaled('smoke').sensitive) if 'sensitive' in cell.metric else '50'
      assert line['n'] == ('0' if extrapolated else tested)
      none = [one['remark'] for one in lines if (one['metric'], one['defense']) == ('accuracy', 'none')]
      lost = cell.metric == 'accuracy_share' and any('at chance' in remark for remark in none)
      assert line['mean'] != '' or extrapolated or lost
    elif line['mean']:
      assert float(line['mean']) >= 0
  table = (workdir / 'table.md').read_text('utf-8')
  assert f'# {experiment.table}\n' in table and ' instead of ' in table
  assert experiment.table in done.out and f'table: {workdir}/table.md' in done.out
  for run, study in experiment.runs.items():
    assert (workdir / run / study.page).exists() and f'{study.shown}: {workdir}/{run}/{study.page}' in done.out
    assert (workdir / run / study.pictured).read_bytes().startswith(b'\x89PNG')
    if study.kind == 'trainings':
      methods = (workdir / run / 'methods.jsonl').read_text('utf-8').splitlines()
      assert len(methods) == len(study.defenses) * study.seeds

  if name == 'ffl_1':
    before = {path: path.stat().st_mtime_ns for path in workdir.rglob('*.*') if path.parent != workdir}
    flags = (*SMOKE, f'--experiment={name}', f'--workdir={workdir}')
    again = programs.start('reproduce', *flags)
    assert (again.status, again.out, again.err) == (0, done.out, '')
    assert {path: path.stat().st_mtime_ns for path in before} == before  # nothing is attacked or rendered again
    other = programs.start('reproduce', *flags, '--seed=1')
    assert other.status == 2 and 'belongs to other settings' in other.err and other.err.count('\n') == 1


def _check_audited(line, cell, workdir):
  """Checks a line against the rows of its audit."""
  rows = [json.loads(text) for text in (workdir / cell.run / 'rows.jsonl').read_text('utf-8').splitlines()]
  rows = [row for row in rows if row['defense'] == line['defense'] and row.get('adaptive') == cell.adaptive]
  if cell.adaptive != BEST:
    assert int(line['n']) == len(rows) == 2
  if cell.metric == 'lpips':
    assert line['mean'] == ''
  elif rows and cell.metric in rows[0]:  # what fishing isolates is not in the rows of the audit
    values = [row[cell.metric] for row in rows if row[cell.metric] is not None]
    assert (line['mean'] != '') == bool(values)
    if values:
      assert float(line['mean']) == pytest.approx(sum(values) / len(values), rel=1e-6)
    if len(values) < MIN_RUNS:
      assert line['low'] == line['high'] == ''
    else:
      assert float(line['low']) <= float(line['mean']) <= float(line['high'])


@pytest.mark.slow
def test_lpips_is_printed_where_its_weights_are_given(tmp_path, monkeypatch):
  network, rng = perceptual._BACKBONES['squeeze'], np.random.default_rng(0)
  tensors = {name: 0.1 * rng.standard_normal(shape, np.float32) for name, shape in network.shapes().items()}
  np.savez(tmp_path / 'squeeze.npz', **tensors)
  np.savez(tmp_path / 'heads.npz', **{f'lin{i}': np.ones(n, np.float32) for i, n in enumerate(network.channels)})
  run = Run('faces', 'mlp(widths=4)', 'csdlg(steps=2)', {'none': 'none'}, 2, mini={'controls': 2})
  cells = tuple(Cell('faces', 'none', metric, 'run', 'none', 0.5) for metric in ('lpips', 'ssim'))
  toy = Experiment('toy', 'A paper.', 'Table 1', 'It shows.', {'run': run, 'other': run}, cells, 'Means.')
  monkeypatch.setitem(experiments.REGISTRY, 'toy', toy)
  files = f'--lpips_weights={tmp_path}/squeeze.npz', f'--lpips_heads={tmp_path}/heads.npz'
  flags = '--experiment=toy', '--compilation_cache=', '--progress=none', '--lpips_backbone=squeeze'
  done = programs.start('reproduce', *flags, *files, f'--workdir={tmp_path}/with')
  assert done.status == 0, done.err
  rows = [json.loads(text) for text in (tmp_path / 'with' / 'run' / 'rows.jsonl').read_text('utf-8').splitlines()]
  (line, _) = csv.DictReader((tmp_path / 'with' / 'table.csv').read_text('utf-8').splitlines())
  assert float(line['mean']) == pytest.approx(sum(row['lpips'] for row in rows) / 2, rel=1e-6) and line['verdict']
  table = (tmp_path / 'with' / 'table.md').read_text('utf-8')
  assert 'the backbone squeeze, with the weights in squeeze.npz and heads.npz' in table and 'n/a' not in table
  other = (tmp_path / 'with' / 'other' / 'rows.jsonl').read_text('utf-8').splitlines()
  assert [json.loads(text)['lpips'] for text in other] == [None, None]
  for given, message in ((files[:1], 'lpips_heads is missing'), (files[1:], 'lpips_weights is missing')):
    done = programs.start('reproduce', *flags, *given, f'--workdir={tmp_path}/without')
    assert done.status == 2 and message in done.err
  done = programs.start('reproduce', '--experiment=graddefense_2a', *files, f'--workdir={tmp_path}/without')
  assert done.status == 2 and 'graddefense_2a has no LPIPS' in done.err


def test_the_list_names_all_with_the_time_that_they_took(tmp_path):
  (name, _), *others = experiments.REGISTRY.items()
  experiment = experiments.get(name)
  rows = {run: [] for run in experiment.runs}
  bare = dataclasses.replace(experiment, cells=())
  stored = results.store(tmp_path, bare, 'mini', 0, rows, 250.0)
  done = programs.start('reproduce', '--list', f'--results={tmp_path}')
  assert (done.status, done.err) == (0, '')
  lines = {line.split()[0]: line for line in done.out.splitlines()}
  assert f'took 4 min on {stored.versions["device"]} ' in lines[name]
  for other, one in others:
    assert one.table in lines[other] and ' not stored ' in lines[other]


def test_a_table_that_took_longer_than_what_is_left_waits(tmp_path, monkeypatch, capsys):
  """In the order of the times that they took, those without one last; one that failed is named."""
  registry = {name: experiments.get(name) for name in ('dcs2_3', 'spear_exact', 'peeling_cifar10')}
  monkeypatch.setattr(experiments, 'REGISTRY', registry)
  for name, seconds in (('dcs2_3', 900.0), ('spear_exact', 8.0)):
    experiment = dataclasses.replace(experiments.get(name), cells=())
    results.store(tmp_path, experiment, 'smoke', 1, {run: [] for run in experiment.runs}, seconds)
  failing = [sys.executable, '-c', 'raise SystemExit(2)']
  monkeypatch.setattr(_program, 'command', lambda name: failing)
  done = programs.start('reproduce', '--all', '--budget=10min', '--scale=smoke', f'--results={tmp_path}')
  assert done.status == 2 and 'these failed, see above: spear_exact, peeling_cifar10' in done.err
  assert 'table 1 of 3: spear_exact, which took 8 s on ' in done.out and '10 min of the budget left' in done.out
  assert 'table 3 of 3: peeling_cifar10; ' in done.out and 'give the same command again: dcs2_3\n' in done.out


def test_tables_that_took_no_time_yet_run_by_their_forecasts(tmp_path, monkeypatch):
  """A summary of all tables ends it, with the hours of those that are stored."""
  names = ('dcs2_3', 'spear_exact', 'peeling_cifar10')
  monkeypatch.setattr(experiments, 'REGISTRY', {name: experiments.get(name) for name in names})
  for name, products in (('dcs2_3', 5.0), ('spear_exact', 7.0), ('peeling_cifar10', 1.0)):
    settings = forecast._settings(experiments.get(name), 'smoke')
    forecast.keep(tmp_path / 'forecast-smoke', Forecast(name, 1, 1, Operations(products), 0.0, '', settings))
  bare = dataclasses.replace(experiments.get('spear_exact'), cells=())
  results.store(tmp_path / 'stored', bare, 'smoke', 0, {run: [] for run in bare.runs}, 5400.0)
  monkeypatch.setattr(_program, 'command', lambda name: [sys.executable, '-c', 'raise SystemExit(3)'])
  flags = '--scale=smoke', f'--results={tmp_path}/stored', f'--workdir={tmp_path}'
  done = programs.start('reproduce', '--all', '--budget=10min', *flags)
  assert done.status == 2 and 'these failed, see above: peeling_cifar10, dcs2_3' in done.err
  lines = [line.split() for line in done.out.splitlines() if line.split()[:1] and line.split()[0] in names]
  assert lines == [['dcs2_3', '–', 'failed'], ['spear_exact', '1.50', 'stored'], ['peeling_cifar10', '–', 'failed']]


@pytest.mark.long
def test_a_dry_run_prints_what_tables_take_and_keeps_it(tmp_path, monkeypatch):
  names = ('spear_exact', 'peeling_cifar10')
  monkeypatch.setattr(experiments, 'REGISTRY', {name: experiments.get(name) for name in names})
  flags = '--all', '--scale=smoke', '--dry_run', '--rate=2e6', f'--workdir={tmp_path}', '--compilation_cache='
  done = programs.start('reproduce', *flags)
  assert done.status == 0 and 'tracing peeling_cifar10, table 2 of 2 …' in done.err
  head, _, first, second, whole = done.out.splitlines()[-5:]
  assert head.split()[:4] == ['table', 'runs', 'lanes', 'TFLOP'] and first.startswith('spear_exact')
  found = forecast.read(tmp_path / 'forecast-smoke', experiments.get('peeling_cifar10'), 'smoke')
  hours = (found.operations.products + found.operations.entries) / 2e6 / 3600
  assert hours > 0 and second.split()[:2] == ['peeling_cifar10', '1'] and whole.startswith('all 2')
  assert float(second.split()[5]) == pytest.approx(hours, rel=0.01)
  again = programs.start('reproduce', *flags)
  assert again.out == done.out and 'tracing' not in again.err
  monkeypatch.setattr(
    type(experiments.get('spear_exact').runs['dense']), 'rehearse', lambda *_: np.ones(3) @ np.ones(4)
  )
  other = programs.start('reproduce', *flags, f'--workdir={tmp_path}/other')
  assert other.status == 2 and other.err.splitlines()[-1].endswith('do not fit together, see above: spear_exact')
  assert 'FAILED: dense: ValueError: matmul' in other.out


@pytest.mark.slow
@pytest.mark.parametrize('scale', ['smoke', 'mini', 'paper'])
def test_every_table_fits_together_at_every_scale(scale, tmp_path):
  """In a process of its own, whose memory is given back."""
  cache = f'--compilation_cache={tmp_path}/cache'
  done = programs.spawn(
    'reproduce', '--all', f'--scale={scale}', '--dry_run', '--rate=1e10', f'--workdir={tmp_path}', cache
  )
  assert done.status == 0, done.err
  assert f'\nall {len(experiments.REGISTRY)} ' in done.out and 'FAILED' not in done.out


@pytest.mark.slow
def test_all_runs_what_is_not_stored_within_a_budget(tmp_path):
  folders = f'--workdir={tmp_path}/work', f'--results={tmp_path}/stored'
  flags = '--all', '--scale=smoke', '--progress=none', f'--compilation_cache={tmp_path}/cache', *folders
  first = programs.spawn('reproduce', *flags, '--budget=60s')
  stored = {path.stem for path in (tmp_path / 'stored' / 'smoke').glob('*.json')}
  assert first.status == 0 and stored and f'0 of {len(experiments.REGISTRY)} tables are stored' in first.out, first.err
  late = first.out.splitlines()[-1]
  assert ' run now\n' in first.out and ' left\n' in first.out
  assert late.startswith('outside of the budget, give the same command again: ')
  assert not stored & set(late.rpartition(': ')[2].split(', '))
  again = programs.spawn('reproduce', *flags, '--budget=1s')
  assert again.status == 0 and f'{len(stored)} of {len(experiments.REGISTRY)} tables are stored' in again.out
  pages = programs.start('reproduce', f'--pages={tmp_path}/pages', f'--results={tmp_path}/stored', '--scale=smoke')
  assert pages.status == 0 and f'{len(stored)} of ' in (tmp_path / 'pages' / 'index.md').read_text('utf-8')


def test_tables_in_turn_have_the_cores_that_are_given():
  module, own = programs._load('reproduce')
  child = mock.Mock(**{'return_value.wait.return_value': 0})
  with mock.patch.object(absl_flags, 'FLAGS', own), mock.patch('subprocess.Popen', child):
    own(['reproduce', '--all', '--cores=3'])
    assert module._child('dcs2_1', 60) == 0
    own.unparse_flags()
  ((command,), _) = child.call_args
  assert '--cores=3' in command and '--experiment=dcs2_1' in command


@pytest.mark.parametrize(
  ('flags', 'messages'),
  [
    ((), ('--experiment=… is needed', 'dcs2_1', 'outpost_3_4')),
    (('--experiment=dcs2',), ("unknown experiment 'dcs2'", 'did you mean', 'valid: assumptions_')),
    (('--experiment=dcs2_1', '--scale=tiny'), ("unknown scale 'tiny'", 'valid: mini, paper, smoke')),
    (('--all', '--budget=soon'), ('budget is', "'soon'", 'such as 90min or 2h')),
    (('--all', '--budget=2h later'), ('budget is',)),
    (('--experiment=dcs2_1', '--dry_run', '--rate=0'), ('rate is 0.0', 'expected a finite number in [1, ')),
    (('--all', '--results='), ('--all and --pages need a folder',)),
    (('--all', '--experiment=dcs2_1'), ('give one of --experiment and --all',)),
    (('--list', '--pages={new}'), ('give one of --list and --pages',)),
    (('--pages={new}', '--dry_run'), ('--dry_run has no effect here: it belongs to --all or --experiment',)),
    (('--experiment=dcs2_1', '--rate=1e9'), ('--rate has no effect here: it belongs to --dry_run',)),
    (('--all', '--weights=mine.npz'), ('--weights has no effect here: it belongs to --experiment',)),
    (('--all', '--lpips_heads=heads.npz'), ('--lpips_heads has no effect here: it belongs to --experiment',)),
    (('--experiment=dcs2_1', '--lpips_backbone=vgg'), ('--lpips_backbone has no effect here',)),
    (('--experiment=dcs2_1', '--budget=1h'), ('--budget has no effect here: it belongs to --all',)),
    (('--experiment=dcs2_1', '--dry_run', '--weights=mine.npz'), ('--weights has no effect here',)),
    (('--all', '--process=0', '--processes=2'), ('--process has no effect here: it belongs to --experiment',)),
    (('--list', '--cluster=local'), ('--cluster has no effect here',)),
    (('--pages={new}', '--seed=7'), ('--seed has no effect here: it belongs to --all or --experiment',)),
    (('--experiment=dcs2_1', '--dry_run', '--seed=7'), ('--seed has no effect here',)),
    (('--list', '--data_dir={new}'), ('--data_dir has no effect here: it belongs to --all or --experiment',)),
    (('--pages={new}',), ('--workdir has no effect here',)),
    (
      ('--experiment=dcs2_1', '--data_dir={new}'),
      ('mnist is not prepared in {new}', 'launch/prepare_data.py --dataset=mnist'),
    ),
  ],
)
def test_bad_input(flags, messages, tmp_path):
  new = str(tmp_path / 'new')
  workdir = tmp_path / 'results'
  done = programs.start('reproduce', *(flag.format(new=new) for flag in flags), f'--workdir={workdir}')
  assert done.status == 2 and done.out == '' and not workdir.exists()
  *before, last = done.err.splitlines()
  assert last.startswith('error: ') and all(line.startswith('reading the data of ') for line in before)
  for message in messages:
    assert message.format(new=new) in last


@pytest.mark.parametrize('flag', ['--list', '--pages={here}/new'])
def test_a_file_is_no_folder_of_results(flag, tmp_path):
  (tmp_path / 'file').write_text('')
  done = programs.start('reproduce', flag.format(here=tmp_path), f'--results={tmp_path}/file')
  assert done.status == 2 and f'the folder of stored results is {tmp_path}/file, which is a file' in done.err
  assert not (tmp_path / 'new').exists()
