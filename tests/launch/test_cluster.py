"""What --cluster makes of a program: its shares, the rounds of a staged one, and the result, on an engine of tests."""

import contextlib
import dataclasses
import importlib
import json
import os
import pathlib
from unittest import mock

import pytest

import experiments
from experiments import results
from gradleak.engine import cluster
from gradleak.studies.autoleak import ensemble
from launch import _cluster
from tests import programs

CACHE = f'--compilation_cache={os.environ["GRADLEAK_TEST_CACHE"]}'
pytestmark = pytest.mark.usefixtures('fast_compilation')
SMOKE = (
  '--dataset=digits', '--trials=3', '--steps=3', '--controls=4', CACHE, '--knowledge=non-adaptive',
  '--group_size=2', '--attacks=fidel',
)  # fmt: skip


class Engine:
  """Runs commands in this process, the last one first; keeps their arguments."""

  cores, places = 2, 2

  def __init__(self, lost=()):
    self.asked, self.lost = [], list(lost)

  def run(self, commands, seconds=None):
    self.asked.append([command.arguments for command in commands])
    for number in reversed(range(len(commands))):
      command = commands[number]
      assert pathlib.Path(command.mark[0]).read_text() == command.mark[1]
      if command.name in self.lost:
        self.lost.remove(command.name)
        yield number, cluster.Ended(1, '', 'error: a device failed')
        continue
      program, *flags = command.arguments
      done = programs.start(program, *flags)
      yield number, cluster.Ended(done.status or 0, done.out, (done.err.splitlines() or [''])[-1])


def on(engine, program, *flags):
  """Runs a program on an engine of ours; returns how it ended and what it connected to."""
  connected = mock.Mock(side_effect=lambda *where, **given: contextlib.nullcontext(engine))
  with mock.patch.object(cluster, 'connected', connected):
    return programs.start(program, *flags), connected.call_args


def same(one, other, *names):
  for name in names:
    assert (one / name).read_bytes() == (other / name).read_bytes(), name


@pytest.mark.slow
def test_shares_of_an_audit_give_the_rows_of_one_process(tmp_path):
  flags = (*SMOKE, '--model=mlp(widths=8)', '--defenses=none;prune(rate=0.5)', '--rounds_before=0', '--progress=bar')
  whole = programs.start('audit', *flags, '--progress=none', f'--workdir={tmp_path}/whole')
  assert whole.status == 0, whole.err
  engine = Engine()
  given = ('--cluster=ray://head:1', '--cores=3', '--gpus=1', '--retries=2', f'--workdir={tmp_path}/shared')
  done, call = on(engine, 'audit', *flags, *given)
  assert done.status == 0, done.err
  shares, result = engine.asked
  (first, second), (last,) = shares, result
  assert first == (*second[:-2], '--process=0', '--processes=2') and second[-2:] == ('--process=1', '--processes=2')
  assert last == (*first[:-2], '--process=0', '--processes=1')
  assert '--cores=2' in first and '--model=mlp(widths=8)' in first and f'--workdir={tmp_path}/shared' in first
  assert not any(one.startswith(('--cluster', '--gpus', '--retries', '--progress', '--cores=3')) for one in first)
  assert call == mock.call(
    'ray://head:1', processes=None, cores=3, gpus=1, retries=2, options='', logs=f'{tmp_path}/shared-slurm'
  )
  assert '2 processes share the work, 2 cores each' in done.err and '2 of 2 shares have ended' in done.err
  assert done.out.splitlines()[1:] == whole.out.replace('/whole/', '/shared/').splitlines()
  same(tmp_path / 'whole', tmp_path / 'shared', 'rows.jsonl', 'controls.jsonl', 'config.json')
  assert not list(tmp_path.glob('shared/.lock*'))


def test_there_are_no_more_shares_than_trials(tmp_path):
  engine = Engine(lost=['share 3 of 3'])
  done, _ = on(engine, 'audit', *SMOKE, '--cluster=local', '--processes=9', f'--workdir={tmp_path}/new')
  assert done.status == 1 and done.err.splitlines()[-1] == 'error: share 3 of 3: a device failed'
  assert len(engine.asked) == 1 and len(engine.asked[0]) == 3
  assert not (tmp_path / 'new').exists()


def test_an_error_of_a_share_is_that_of_the_program(tmp_path):
  done, _ = on(Engine(), 'sweep', *SMOKE, '--cluster=local', '--models=lent', f'--workdir={tmp_path}/new')
  assert done.status == 2
  assert done.err.splitlines()[-1].startswith("error: share 2 of 2: unknown model 'lent'")
  assert not (tmp_path / 'new').exists()


@pytest.mark.slow
def test_a_sweep_has_as_many_shares_as_processes(tmp_path):
  flags = (*SMOKE, '--models=mlp(widths=8)', '--defenses=none', '--progress=none', '--attacks=csdlg(tv=0)')
  engine = Engine()
  done, _ = on(engine, 'sweep', *flags, '--cluster=slurm', '--processes=3', f'--workdir={tmp_path}/shared')
  assert done.status == 0, done.err
  assert len(engine.asked[0]) == 3 and '--progress=none' in engine.asked[0][0]
  whole = programs.start('sweep', *flags, f'--workdir={tmp_path}/whole')
  assert whole.status == 0, whole.err
  same(tmp_path / 'whole', tmp_path / 'shared', 'rows.jsonl', 'sweep.csv')


@pytest.mark.long
def test_one_process_is_the_program_itself(tmp_path):
  engine = Engine()
  flags = (*SMOKE, '--defenses=none', '--model=mlp(widths=8)', '--rounds_before=0')
  done, _ = on(engine, 'audit', *flags, '--cluster=local', '--processes=1', f'--workdir={tmp_path}/new')
  assert done.status == 0 and len(engine.asked) == 1 and '1 process shares the work' in done.err
  assert 'report: ' in done.out


@pytest.mark.slow
def test_trainings_are_shared_and_then_their_audit(tmp_path):
  flags = (
    '--dataset=digits', '--limit=60', '--public=4', '--clients=4', '--per_round=2', '--rounds=2', '--model=mlp',
    '--defenses=none;topk(ratio=0.1);prune(rate=0.5)', '--attacks=fidel', '--trials=2', '--controls=2',
    CACHE, '--progress=none',
  )  # fmt: skip
  engine = Engine()
  done, _ = on(engine, 'train', *flags, '--cluster=local', f'--workdir={tmp_path}/shared')
  assert done.status == 0, done.err
  assert len(engine.asked[0]) == 2 and 'report: ' in done.out
  parts = {path.name for path in tmp_path.glob('shared/audit/parts/*')}
  assert parts and all('of2' in name for name in parts)
  whole = programs.start('train', *flags, f'--workdir={tmp_path}/whole')
  assert whole.status == 0, whole.err
  folders = json.loads((tmp_path / 'whole' / 'trainings.json').read_text())
  names = [f'{folder}/rounds.jsonl' for folder in folders.values()]
  same(tmp_path / 'whole', tmp_path / 'shared', 'trainings.json', 'audit/rows.jsonl', *names)


@pytest.mark.slow
def test_a_share_of_trainings_leaves_the_others(tmp_path):
  flags = (
    '--dataset=digits', '--limit=60', '--public=4', '--clients=4', '--per_round=2', '--rounds=1', '--model=mlp',
    '--defenses=none;topk(ratio=0.1);prune(rate=0.5)', CACHE, '--progress=none',
    f'--workdir={tmp_path}/new', '--process=1', '--processes=2',
  )  # fmt: skip
  done = programs.start('train', *flags)
  assert done.status == 0 and done.out.startswith('process 1 of 2 has done its share'), done.err
  assert [path.name for path in tmp_path.glob('new/*')] == ['01-topk-ratio-0-1']
  done = programs.start('train', *flags[:-1], '--processes=4')
  assert done.status == 2 and 'number of processes is 4' in done.err


@pytest.mark.slow
def test_the_runs_of_a_table_are_shared(tmp_path):
  """Two of them attack the same trained network, which one of them trains."""
  experiment = experiments.get('outpost_figure_4')
  assert len(experiment.runs) == 2 and all(run.trains for run in experiment.runs.values())
  flags = ('--experiment=outpost_figure_4', '--scale=smoke', CACHE, '--progress=none', '--results=')
  engine = Engine()
  done, _ = on(engine, 'reproduce', *flags, '--cluster=local', f'--workdir={tmp_path}/shared')
  assert done.status == 0, done.err
  assert len(engine.asked[0]) == 2
  whole = programs.start('reproduce', *flags, f'--workdir={tmp_path}/whole')
  assert whole.status == 0, whole.err
  same(tmp_path / 'whole', tmp_path / 'shared', 'table.csv')
  seconds = json.loads((tmp_path / 'shared' / 'seconds.json').read_text())
  assert set(seconds) == set(experiment.runs) and all(ended for _, ended in seconds.values())


def test_all_tables_are_tasks_of_their_own(tmp_path, monkeypatch):
  names = 'dcs2_3', 'spear_exact', 'peeling_cifar10'
  monkeypatch.setattr(experiments, 'REGISTRY', {name: experiments.get(name) for name in names})
  stored = dataclasses.replace(experiments.get('dcs2_3'), cells=())
  results.store(tmp_path / 'stored', stored, 'smoke', 1, {run: [] for run in stored.runs}, 9.0)
  statuses = iter([(0, 0), (1, 2)])
  asked = []

  class Tables(Engine):
    def run(self, commands, seconds=None):
      asked.extend([[command.name for command in commands], seconds, commands[0].arguments])
      for number, status in statuses:
        yield number, cluster.Ended(status, '', 'error: no data')

  flags = ('--all', '--budget=10min', '--scale=smoke', f'--results={tmp_path}/stored', f'--workdir={tmp_path}/work')
  done, _ = on(Tables(), 'reproduce', *flags, '--cluster=ray', '--data_dir=data')
  assert (
    done.status == 2
    and 'these failed, see above: spear_exact' in done.err
    and 'spear_exact: error: no data' in done.err
  )
  assert 'give the same command again: peeling_cifar10\n' in done.out and '1 tables were run' in done.out
  assert asked[:2] == [[*names], 600.0]
  assert asked[2][0] == 'reproduce' and {'--experiment=dcs2_3', '--data_dir=data', '--cores=2'} <= set(asked[2])
  assert f'--workdir={tmp_path}/work/dcs2_3-smoke' in asked[2]


def test_a_staged_run_is_started_until_one_share_sees_its_end():
  """A share waits with its next stage for those of others; then all are started again, and the whole at the end."""
  ended = iter([75, 75, 75, 0, 0])

  class Staged(Engine):
    def run(self, commands, seconds=None):
      self.asked.append([command.name for command in commands])
      for number in range(len(commands)):
        yield number, cluster.Ended(next(ended), 'the table\n', '')

  engine = Staged()
  flags = ('--trials=2', '--defenses=none', '--cluster=local')
  with mock.patch.object(_cluster, '_engine', lambda *given: contextlib.nullcontext((engine, ('', '')))):
    done = programs.start('autoleak', *flags)
  assert done.status in (0, None) and done.out == 'the table\n'
  assert engine.asked == [['share 1 of 2', 'share 2 of 2']] * 2 + [['all shares']]


@pytest.mark.slow
def test_shares_of_autoleak_give_the_rows_of_one_process(tmp_path, monkeypatch):
  import gradleak as gl

  stages = (
    ensemble.Ranking('likelihood'),
    ensemble.Stage('closed forms', (gl.attacks.fidel(),)),
    ensemble.Stage('matching', (gl.attacks.csdlg_fast(steps=20, tv=1e-6),)),
  )
  module = importlib.import_module('gradleak.studies.autoleak')
  monkeypatch.setattr(module, 'ENSEMBLES', {'images': stages})
  monkeypatch.setattr(module, 'CONTROLS', 4)
  flags = (
    '--dataset=digits', '--model=mlp(widths=8)', '--trials=3', '--defenses=prune(rate=0.5);gaussian(stddev=1)',
    '--rounds_before=0', CACHE, '--progress=none',
  )  # fmt: skip
  engine = Engine()
  done, _ = on(engine, 'autoleak', *flags, '--cluster=local', f'--workdir={tmp_path}/shared')
  assert done.status == 0, done.err
  assert 3 <= len(engine.asked) <= 4 and len(engine.asked[-1]) == 1
  whole = programs.start('autoleak', *flags, f'--workdir={tmp_path}/whole')
  assert whole.status == 0, whole.err
  same(tmp_path / 'whole', tmp_path / 'shared', 'rows.jsonl', 'controls.jsonl', 'likelihood/rows.jsonl')
  told = [json.loads((tmp_path / name / 'autoleak.json').read_text()) for name in ('whole', 'shared')]
  assert told[0]['ranked'] == told[1]['ranked'] and told[0]['flags'] == told[1]['flags']


@pytest.mark.parametrize(
  ('program', 'flags', 'message'),
  [
    ('audit', ('--gpus=1',), '--gpus is for --cluster, which is missing'),
    ('train', ('--slurm=time=5',), '--slurm is for --cluster, which is missing'),
    (
      'sweep',
      ('--cluster=local', '--process=0', '--processes=2'),
      '--process is for a process that is started by hand',
    ),
    ('audit', ('--cluster=slurm',), '--cluster=slurm needs --processes'),
    ('audit', ('--cluster=cloud',), "the cluster is 'cloud', expected local, ray, ray://host:port or slurm"),
    ('audit', ('--cluster=local', '--workdir='), '--cluster needs a --workdir that all processes see'),
    ('audit', ('--cluster=local', '--distributed=auto'), '--cluster shares trials, and --distributed the images'),
    ('autoleak', ('--cluster=local', '--cores=0'), '0, expected an integer in [1'),
    ('audit', ('--process=1',), '--process and --processes belong together'),
    ('reproduce', ('--experiment=dcs2_3', '--processes=2'), '--process and --processes belong together'),
    ('reproduce', ('--experiment=dcs2_3', '--process=0', '--processes=99'), 'processes is 99'),
  ],
)
def test_bad_input(program, flags, message, tmp_path):
  done = programs.start(program, f'--workdir={tmp_path}/new', *flags)
  assert done.status == 2 and message in done.err.splitlines()[-1], done.err
  assert not (tmp_path / 'new').exists()
