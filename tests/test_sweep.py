"""A sweep: the rows of its audits, one compilation for all numbers and seeds, the same bits however it is cut up."""

import dataclasses
import functools
import json
import os
import signal
import subprocess
import sys
import time
from unittest import mock

import jax
import numpy as np
import optax
import pytest

import gradleak as gl
from gradleak.audit import lanes
from gradleak.audit.labelled import named_defenses
from gradleak.engine import driver
from gradleak.report import strengths, sweep_csv
from gradleak.report.strengths import lines
from gradleak.studies.sweep import _Forecast, plan, sweep
from tests import programs
from tests.objects import objects

pytestmark = pytest.mark.usefixtures('fast_compilation')

STRENGTHS = objects([f'gaussian(stddev={0.01 * i:.2f})' for i in range(10)])
SETTINGS = {'restarts': 2, 'controls': 4, 'group_size': 4, 'progress': 'none', 'knowledge': 'non-adaptive'}
TRACES = []  # as long as the attack was built while something was traced


def counted(attack):
  """Returns the same attack, counted in `TRACES`."""

  @functools.wraps(attack.factory)
  def factory(client, **settings):
    TRACES.extend([None] * isinstance(settings['learning_rate'], jax.core.Tracer))
    return attack.factory(client, **settings)

  return dataclasses.replace(attack, factory=factory)


ATTACKS = [counted(gl.attacks.csdlg(tv=0, steps=8))]


def renamed(scenario, name):
  """Returns the same with a client that is not equal, so that nothing compiled is used again."""
  model = scenario.client.model._replace(name=name)
  return scenario._replace(client=dataclasses.replace(scenario.client, model=model))


@pytest.fixture(scope='module')
def audits(linear):
  weights = jax.tree.map(lambda w: w + 0.1, linear.variables)
  other = linear._replace(variables=weights, settings={**linear.settings, 'weights_fingerprint': 'other'})
  first, second = (one.noted({'seed': seed}) for seed, one in enumerate((linear, other)))
  return {'a': (jax.random.key(1), first), 'b': (jax.random.key(2), second)}


@pytest.fixture(scope='module')
def swept(audits, tmp_path_factory):
  """(traces, rows, folder, what was said) of a sweep over ten strengths and two sets of weights."""
  folder, said = tmp_path_factory.mktemp('sweep'), []
  before = len(TRACES)
  rows = sweep(audits, STRENGTHS, ATTACKS, 4, workdir=folder, say=said.append, **SETTINGS)
  return len(TRACES) - before, rows, folder, said


@pytest.mark.long
def test_other_strengths_and_models_compile_nothing(swept, audits):
  """The first of two models and its ten strengths compiled all; the slow tests count a strength alone."""
  before, others = len(TRACES), objects([f'gaussian(stddev={0.5 + i / 100:.2f})' for i in range(10)])
  gl.audit(*audits['b'], others, ATTACKS, 4, **SETTINGS)
  assert len(TRACES) == before and swept[0] > 0


@pytest.mark.long
def test_rows_are_those_of_the_audits(swept, audits):
  _, rows, folder, _ = swept
  assert [row['audit'] for row in rows] == ['a'] * 40 + ['b'] * 40
  key, scenario = audits['b']
  alone = gl.audit(key, scenario, STRENGTHS, ATTACKS, 4, **SETTINGS)
  assert [{key: value for key, value in row.items() if key != 'audit'} for row in rows[40:]] == alone.rows
  assert [json.loads(line) for line in (folder / 'rows.jsonl').read_text().splitlines()] == rows


@pytest.mark.long
def test_the_plan_is_said_before_anything_runs(swept, audits):
  said = swept[3]
  assert said[0].startswith('176 runs, 2 attacks in 1 compilations')
  assert 'a: csdlg(tv=0,steps=8), 88 runs of 8 steps, 22 groups of 4' in said[0] and 'compiled already' in said[0]
  assert len(said) == 2 and said[1].startswith('at this pace the rest takes about ')
  planned = plan(audits, STRENGTHS, ATTACKS, 4, restarts=2, controls=4, knowledge='non-adaptive')
  assert planned == {name: [('csdlg(tv=0,steps=8)', 88, 8)] for name in 'ab'}


def test_a_forecast_counts_what_comes_after():
  planned = {name: [lanes.Planned('x', 4, 10), lanes.Planned('y', 2, 5)] for name in 'ab'}
  forecast = _Forecast(planned, 1, None, print)
  done = driver.Progress(5, 5, np.zeros(2), 2, 2, '', None)
  assert forecast._left(('a', 'y'), done) == 50 and forecast._left(('b', 'y'), done) == 0
  assert forecast._left(('a', 'x'), done._replace(num_steps=10)) == 5 * 2 + 10 + 50


def test_a_forecast_counts_structures_of_one_name_and_all_looks_of_trials_that_stop():
  planned = {'a': [lanes.Planned('x', 4, 10)] * 3}
  half, whole = (driver.Progress(step, 10, np.zeros(4), 4, 2, '', None) for step in (5, 10))
  forecast = _Forecast(planned, 1, None, print)
  forecast.audit = 'a'
  assert forecast._left(('a', 'x'), half) == 5 * 4 + 2 * 40
  forecast('x', whole, None)
  assert forecast._left(('a', 'x'), half) == 5 * 4 + 40
  said = []
  stopping = _Forecast(planned, 1, None, said.append, sequential=True)
  assert stopping._left(('a', 'x'), half) == 3 * 40 - 5 * 4  # a look of some trials, of which more may come
  stopping.audit = 'a'
  for step in (0, 2, 4):
    stopping('x', half._replace(step=step), None)
  assert len(said) == 1 and said[0].startswith('at this pace the rest takes at most ')


@pytest.mark.long
def test_it_is_not_run_again(swept, audits):
  _, rows, folder, _ = swept
  before = len(TRACES)
  again = sweep(audits, STRENGTHS, ATTACKS, 4, workdir=folder, say=lambda text: None, **SETTINGS)
  assert again == rows and len(TRACES) == before


@pytest.mark.long
def test_tables_tell_the_uploads_of_two_models_apart(swept):
  head, *body = sweep_csv(swept[1]).splitlines()
  assert head.startswith('model,attack,defense,knowledge,adaptive,tier,n,psnr')
  assert len(body) == 10 and all(line.split(',')[0] == 'custom' or ',8,' in line for line in body)


@pytest.mark.slow
def test_the_picture_has_a_panel_per_defense(swept):
  assert strengths(swept[1], STRENGTHS)[:8] == b'\x89PNG\r\n\x1a\n'
  assert strengths([row for row in swept[1] if row['defense'] == str(STRENGTHS[0])], STRENGTHS) is None
  assert strengths(swept[1], STRENGTHS[:1]) is None  # nothing varies


@pytest.mark.slow
@pytest.mark.parametrize(('most', 'said'), [(1, ['The first 1 of 2 rows']), (2, [])])
def test_rows_that_the_picture_leaves_out_are_counted(swept, monkeypatch, most, said):
  """And its legend has the attacks of all others."""
  titles, legends = [], []
  monkeypatch.setattr(sys.modules[strengths.__module__], 'MAX_ROWS', most)
  monkeypatch.setattr('matplotlib.figure.Figure.suptitle', lambda _, title, **style: titles.append(title))
  monkeypatch.setattr('matplotlib.figure.Figure.legend', lambda _, handles, labels, **style: legends.extend(labels))
  other = {'model': 'other', 'attack': 'another'}
  rows = [*swept[1], *({**row, **other, 'audit': f'{row["audit"]} of another'} for row in swept[1])]
  assert strengths(rows, STRENGTHS) and titles == said
  assert ('another, non-adaptive' in legends) == (most == 2) and len(set(legends)) == len(legends)


def test_lines_run_along_the_number_that_varies_most():
  texts = ['none', 'prune(rate=0.9)', 'clip(norm=1)+gaussian(stddev=1e-2)', 'clip(norm=1)+gaussian(stddev=1e-3)']
  texts += ['clip(norm=2)+gaussian(stddev=1e-3)', 'clip(norm=1)+gaussian(stddev=1.5)']
  made = objects(texts)
  labels = ['none', *map(str, made[1:])]
  assert lines(named_defenses(made)) == [
    (
      'clip(norm=1)+gaussian(stddev=…)',
      [(1e-3, labels[3]), (1e-2, labels[2]), (1.5, labels[5])],
    ),
    ('clip(norm=2)+gaussian(stddev=…)', [(1e-3, labels[4])]),
  ]


def test_strengths_are_those_of_the_settings_and_not_of_labels():
  defenses = {
    'clip(norm=3)': gl.defenses.gaussian(stddev=0.1),
    'mild': gl.defenses.gaussian(stddev=0.01),
    'own(level=1)': gl.defenses.wrap(optax.scale(0.5), 'upload', label='own(level=1)'),
    'own(level=2)': gl.defenses.wrap(optax.scale(0.25), 'upload', label='own(level=2)'),
    'some': gl.defenses.outpost(noise=0.25),
    'default': gl.defenses.outpost(),
    'words': gl.defenses.graddefense(stddev=0.1),
    'slices': gl.defenses.graddefense(stddev=0.1, num_slices=7),
  }
  slices = gl.defenses.graddefense(stddev=0.1).stages[0].settings['num_slices']
  noise = gl.defenses.outpost().stages[0].settings['noise']
  assert lines(named_defenses(defenses)) == [
    ('gaussian(stddev=…)', [(0.01, 'mild'), (0.1, 'clip(norm=3)')]),
    ('outpost(noise=…)', [(0.25, 'some'), (noise, 'default')]),
    ('graddefense(stddev=0.1,num_slices=…)', sorted([(7, 'slices'), (slices, 'words')])),
  ]


def test_an_infinite_strength_has_no_place_on_an_axis():
  clips = [gl.defenses.dgc(ratio=0.1, clip=clip) for clip in (1.0, 10.0, np.inf)]
  (line,) = lines(named_defenses(clips))
  assert line.points == [(1.0, str(clips[0])), (10.0, str(clips[1]))]
  assert not lines(named_defenses(clips[1:]))


# ---- the program

SMOKE = (
  '--dataset=digits', '--models=mlp', '--trials=2', '--steps=5', '--controls=2', '--compilation_cache=',
  '--defenses=none;gaussian(stddev=0.01|0.1)',
)  # fmt: skip


@pytest.mark.slow
def test_the_program(tmp_path):
  done = programs.start('sweep', *SMOKE, '--knowledge=non-adaptive', f'--workdir={tmp_path}/new')
  assert done.status == 0, done.err
  assert '\n8 runs, 1 attacks in 1 compilations' in done.err
  assert 'gaussian(stddev=0.01)' in done.out
  for name in ('sweep.csv', 'sweep.png', 'rows.jsonl', 'mlp-seed0/report.html'):
    assert (tmp_path / 'new' / name).exists() and name in done.out + 'rows.jsonl'
  page = tmp_path / 'new' / 'mlp-seed0' / 'report.html'
  page.write_text('old')
  os.utime(page, (0, 0))  # older than its result: as a kill leaves it
  assert programs.start('sweep', *SMOKE, '--knowledge=non-adaptive', f'--workdir={tmp_path}/new').status == 0
  assert page.read_text('utf-8').startswith('<!')


@pytest.mark.parametrize(
  ('environment', 'expected'),
  [
    ({}, (0, 1)),
    ({'SLURM_PROCID': '1', 'SLURM_NTASKS': '2'}, (1, 2)),
    ({'SLURM_ARRAY_TASK_ID': '5', 'SLURM_ARRAY_TASK_MIN': '4', 'SLURM_ARRAY_TASK_COUNT': '8', 'SLURM_PROCID': '0',
      'SLURM_NTASKS': '1'}, (1, 8)),
  ],
)  # fmt: skip
def test_ranks_of_clusters(environment, expected):
  module, own = programs._load('sweep')
  own(['sweep'])
  with mock.patch.dict(os.environ, environment):
    assert module._process() == expected


@pytest.mark.parametrize(
  ('flag', 'message'),
  [
    ('--seeds=0', 'number of seeds is 0'),
    ('--seeds=1;1', 'the seed 1 is listed twice'),
    ('--seeds=many', "seeds is 'many'"),
    ('--process=1', '--process and --processes belong together'),
    ('--models=lent', "unknown model 'lent'"),
    ('--models=mlp;mlp', "'mlp' is listed twice"),
    ('--defenses=gaussian(stddev=0.1|)', 'empty value in a grid'),
    ('--defenses=gaussian(stddev=0.1|0.1)', 'listed twice'),
  ],
)
def test_bad_input(flag, message, tmp_path):
  done = programs.start('sweep', *SMOKE, f'--workdir={tmp_path}/new', flag)
  *said, last = done.err.splitlines()
  assert done.status == 2 and last.startswith('error: ') and message in last
  assert all(line.endswith('…') for line in said)
  assert not (tmp_path / 'new').exists()


def test_the_rows_of_an_audit_are_not_overwritten(tmp_path):
  (tmp_path / 'config.json').write_text('{}')
  (tmp_path / 'rows.jsonl').write_text('of an audit')
  with pytest.raises(gl.UsageError, match='holds a run of another kind'):
    sweep({}, [None], ATTACKS, 1, workdir=tmp_path)
  assert (tmp_path / 'rows.jsonl').read_text() == 'of an audit'


# ---- the same bits

# What the program is, with as many devices as the first argument says.
PROGRAM = """
import os, runpy, sys
count = int(sys.argv[1])
from gradleak.engine import ahead
ahead.cores = lambda: count
from gradleak.core import storage
save = storage.Workdir.save_checkpoint
def due(self, *arguments):
  save(self, *arguments, due=True)
storage.Workdir.save_checkpoint = due
sys.argv = ['launch/sweep.py', *sys.argv[2:]]
runpy.run_path(sys.argv[0], run_name='__main__')
"""


def launch(workdir, *flags, devices=2):
  return subprocess.Popen(
    [sys.executable, '-c', PROGRAM, str(devices), *flags, f'--workdir={workdir}', '--progress=lines'],
    cwd=programs.ROOT, env=programs.environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
  )  # fmt: skip


@pytest.mark.slow
def test_the_same_bits_alone_in_company_on_eight_devices_with_two_processes_and_after_a_kill(tmp_path):
  """Sixteen trials of LeNet at four strengths: 64 lanes and the control's."""
  flags = (
    '--dataset=digits', '--models=lenet', '--trials=16', '--steps=200', '--controls=16', '--group_size=8',
    '--defenses=gaussian(stddev=0|0.01|0.1)', '--compilation_cache=',
  )  # fmt: skip

  def rows(name):
    return (tmp_path / name / 'rows.jsonl').read_bytes()

  def finish(process):
    out, err = process.communicate(timeout=900)
    assert process.returncode == 0, err
    return out

  finish(launch(tmp_path / 'whole', *flags))
  finish(launch(tmp_path / 'alone', *flags, '--shards=16'))
  finish(launch(tmp_path / 'eight', *flags, devices=8))
  two = [launch(tmp_path / 'two', *flags, f'--process={i}', '--processes=2', devices=1) for i in range(2)]
  outs = [finish(process) for process in two]
  assert sum('has done its share' in out for out in outs) <= 1
  killed = launch(tmp_path / 'killed', *flags)
  while not any(int(path.name[-8:]) >= 40 for path in tmp_path.glob('killed/*/checkpoints/csdlg-*-00000???')):
    assert killed.poll() is None, killed.stderr.read()
    time.sleep(0.01)
  os.kill(killed.pid, signal.SIGKILL)
  killed.communicate()
  finish(launch(tmp_path / 'killed', *flags))
  for name in ('alone', 'eight', 'two', 'killed'):
    assert rows(name) == rows('whole'), name
  with np.load(tmp_path / 'whole' / 'lenet-seed0' / 'reconstructions.npz') as whole:
    for name in ('alone', 'eight', 'two', 'killed'):
      with np.load(tmp_path / name / 'lenet-seed0' / 'reconstructions.npz') as found:
        for key in whole:
          np.testing.assert_array_equal(found[key], whole[key])


@pytest.mark.slow
def test_ten_strengths_of_thirty_two_samples_and_four_restarts_compile_once(linear, small_images, tmp_path):
  images, labels = (np.resize(x, (32, *x.shape[1:])) for x in small_images)
  scenario = renamed(linear, 'many')._replace(samples=images, targets=labels, shared=None)
  audits, counts = {'one': (jax.random.key(1), scenario)}, []
  for strengths_, name in ((STRENGTHS, 'ten'), (STRENGTHS[1:2], 'one')):
    jax.clear_caches()  # else programs of other tests, and of the ten strengths, are found
    before = len(TRACES)
    settings = {**SETTINGS, 'restarts': 4}
    rows = sweep(audits, strengths_, ATTACKS, 32, workdir=tmp_path / name, say=lambda text: None, **settings)
    counts.append(len(TRACES) - before)
    assert len(rows) == 32 * len(strengths_)
    audits = {'one': (jax.random.key(1), renamed(scenario, 'fresh'))}
  assert 0 < counts[0] <= counts[1]
