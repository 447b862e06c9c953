"""The benchmark prints both sides and their ratios; its figures are nobody's business here."""

import ast
import importlib
import inspect
import re
import sys

import jax
import pytest

import gradleak as gl
from benchmarks import harness
from gradleak.models import convolution
from tests import programs

pytestmark = pytest.mark.usefixtures('fast_compilation')
SMALL = {'model': 'mlp', 'trials': 2, 'compared': 1, 'steps': 10, 'repeats': 1}
MISSING = 'n/a: torch is not installed (make benchmark installs it)'


def reads(measure):
  """Returns the names of the flags that a measure reads."""
  return importlib.import_module(f'benchmarks.{measure}').READS


def little(measure='speed'):
  """Returns the flags of a measure on little."""
  sizes = {name: value for name, value in SMALL.items() if name in reads(measure)}
  return [f'--measure={measure}', *(f'--{name}={value}' for name, value in sizes.items())]


def read(text):
  """Returns ({variant: figures, the ratio last}, {variant: why it was not measured})."""
  table, missing = {}, {}
  for line in text.splitlines():
    if found := re.fullmatch(r'(\S.*?) {2,}(\d[\d., –]+) +([\d.]+)× +([\d.]+)× +([\d.]+)×', line):
      table[found[1]] = [float(figure.replace(',', '')) for figure in found[2].split() if figure != '–'] + [
        float(found[3])
      ]
    elif found := re.fullmatch(r'(\S.*?) {2,}(n/a.*)', line):
      missing[found[1]] = found[2]
  return table, missing


@pytest.mark.slow
def test_it_prints_every_variant_and_its_ratio():
  done = programs.start('benchmark', *little(), '--model=lenet', '--group_size=2')
  assert done.status == 0 and 'csdlg on lenet, faces at 32×32×3, 2 × ' in done.out
  table, missing = read(done.out)
  fast = 'hybrid'
  others = [name for name in convolution.FORMULATIONS if name != fast]
  ours = [f'2 trials in groups of 2, {fast}', f'one trial at a time, {fast}']
  ours += [f'2 trials in groups of 2, {name}' for name in others]
  assert list(table)[:4] == ours
  assert len(table) + len(missing) == 6
  reference = next(iter(table.values()))
  assert reference[-1] == 1
  for name, (milliseconds, _, per_hour, _, peak, *group, psnr, ratio) in table.items():
    assert ratio == pytest.approx(milliseconds / reference[0], rel=0.1, abs=0.01)  # of figures that were rounded
    assert per_hour == pytest.approx(3.6e6 / (24_000 * milliseconds), rel=0.1, abs=0.1)
    assert peak > sum(group) and (sum(group) > 0) == (name in ours)
    assert psnr == pytest.approx(reference[-2], abs=0.5)  # all attack the same trial from the same start


@pytest.mark.slow
def test_scaling_prints_a_row_per_number_of_trials():
  done = programs.start('benchmark', *little('scaling'), '--sizes=4,2', '--devices=1')
  rows = [line.split() for line in done.out.splitlines() if line.endswith('×')]
  assert done.status == 0
  assert [row[0] for row in rows] == ['2', '4']
  assert rows[0][-3:] == ['1.00×'] * 3
  small, large = (float(row[4]) for row in rows)
  assert 0 < small < large < 2 * small  # states grow, a pass does not


@pytest.mark.slow
def test_the_roofline_counts_the_products_of_a_step():
  done = programs.start('benchmark', *little('roofline'), '--models=mlp', '--trials=2')
  assert done.status == 0
  row = next(line.split() for line in done.out.splitlines() if line.startswith('mlp'))
  classes = gl.data.load('faces', 'test').num_classes
  products = 2 * (5 * 3072 * 128 + 7 * (128 * 128 + 128 * 64 + 64 * classes))
  assert float(row[2]) == pytest.approx(products / 1e6, abs=0.06)
  assert float(row[3]) > float(row[2])  # XLA counts the rest too


@pytest.mark.slow
def test_training_prints_a_row_per_way_to_run_the_clients():
  done = programs.start('benchmark', '--measure=training', '--models=mlp', '--dataset=digits', '--repeats=1')
  assert done.status == 0
  rows = [line for line in done.out.splitlines() if line.endswith('×')]
  batched = [f'one program, clients by {number}' for number in (1, 2, 5, 10)]
  assert [row.split('  ')[0] for row in rows] == ['a Python loop over clients', *batched]
  assert all(float(row.split()[-3]) > 0 for row in rows)


@pytest.mark.slow
def test_the_profile_has_a_row_per_workload_with_its_share_of_the_machine():
  done = programs.start('benchmark', *little('profile'), '--models=mlp', '--trials=3')
  assert done.status == 0
  names = 'csdlg on mlp', 'lti, the inverse of lenet', 'training of lenet, a round'
  rows = {name: line[len(name) :].split() for name in names for line in done.out.splitlines() if line.startswith(name)}
  assert list(rows) == list(names)
  first, again, compilation, noise, idle, padding, gflop, rate, share = rows['csdlg on mlp']
  assert float(first) > float(again) > 0 and noise == '50%' and padding == '0.0%' and float(idle[:-1]) < 100
  assert float(compilation[:-1]) == pytest.approx(100 * (1 - float(again) / float(first)), abs=1.5)
  assert float(rate) == pytest.approx(float(gflop) / float(again), rel=0.5)
  (products,) = re.findall(r'^matrix products of \d+: ([\d,]+) GFLOP/s', done.out, re.M)
  assert abs(int(share[:-1]) - 100 * float(rate) / float(products.replace(',', ''))) <= 1 and int(share[:-1]) < 100
  assert all(row[3:6] == ['–'] * 3 and float(row[7]) > 0 for row in list(rows.values())[1:])


@pytest.mark.slow
def test_programs_that_are_found_again_spare_their_compilation():
  done = programs.start('benchmark', *little('cache'), '--trials=2')
  assert done.status == 0
  names = 'nothing kept', 'kept by JAX itself, found again', 'all kept, found again'
  rows = {name: line[len(name) :].split() for name in names for line in done.out.splitlines() if line.startswith(name)}
  files = [float(rows[name][4]) for name in names]
  assert files[0] == 0 and files[2] > files[1]
  assert float(rows[names[2]][0]) < float(rows[names[0]][0])


@pytest.mark.slow
def test_gpu_writes_its_table_to_a_file(monkeypatch, tmp_path):
  monkeypatch.setitem(sys.modules, 'torch', None)
  output = tmp_path / 'new' / 'gpu.md'
  flags = ('--models=mlp', '--sizes=1,3', '--group_sizes=2,8', f'--output={output}')
  done = programs.start('benchmark', *little('gpu'), *flags)
  assert done.status == 0
  text = output.read_text('utf-8')
  assert jax.devices()[0].device_kind in text.split('\n')[0]
  rows = [[cell.strip() for cell in line.split('|')[1:-1]] for line in text.split('\n') if line.startswith('| mlp')]
  assert [row[:3] for row in rows] == [['mlp', '1', '1'], ['mlp', '3', '2'], ['mlp', '3', '3']]
  assert {row[4] for row in rows} == {MISSING}
  assert all(float(row[3]) > 0 for row in rows)


@pytest.mark.slow
def test_schedule_prints_when_the_faster_one_is_there_and_draws_both(tmp_path):
  output = tmp_path / 'new' / 'schedules.png'
  attacks = ('--attack=csdlg(steps=6)', '--faster=csdlg_fast(steps=5)')
  done = programs.start('benchmark', *little('schedule'), '--models=mlp', *attacks, f'--output={output}')
  assert done.status == 0
  assert output.read_bytes().startswith(b'\x89PNG')
  lines = [re.split(r' {2,}', line, maxsplit=1) for line in done.out.splitlines() if line.startswith('csdlg')]
  rows = {name: figures.split() for name, figures in lines}
  slow, fast = rows['csdlg(steps=6)'], rows['csdlg_fast(steps=5)']
  assert (slow[0], fast[0]) == ('6', '5') and float(slow[1]) > 0 and float(fast[1]) > 0
  reached = next(value for name, value in rows.items() if 'reaches' in name)
  assert float(reached[4]) >= float(slow[4])
  assert re.search(r'times less +[\d.]+× +[\d.]+× +[\d.]+×', done.out)


@pytest.mark.parametrize(
  ('flags', 'message'),
  [
    ('--measure=sped', "unknown measure 'sped'; did you mean 'speed'?"),
    ('--variants=batched,tensorflow', "unknown variant 'tensorflow'"),
    ('--model=lent', "unknown model 'lent'"),
    ('--attack=csdgl', "unknown attack 'csdgl'"),
    ('--dataset=breast_cancer', 'attacks on images, and breast_cancer holds others'),
    ('--steps=5 --starts=3', '--starts has no effect here: --measure=speed reads --dataset, --data_dir, --model, '),
    ('--measure=tag --dataset=faces', '--dataset has no effect here: --measure=tag reads --trials, --compared, '),
    ('--measure=generative --model=mlp --models=mlp', 'give --model or --models, not both'),
    ('--measure=scaling --devices=99', 'devices is 99, expected an integer in [0, '),
    ('--trials=0', 'trials is 0, expected an integer in [1, '),
    ('--measure=scaling --sizes=8,many', "sizes is 'many', expected an integer in [1, "),
    ('--measure=gpu --models=lenet;lent', "unknown model 'lent'"),
    ('--measure=gpu --output=/dev/null/gpu.md', 'cannot write /dev/null/gpu.md'),
    ('--measure=schedule --faster=csdgl', "unknown attack 'csdgl'"),
    ('--measure=schedule --output=/dev/null/x.png', 'cannot write /dev/null/x.png'),
  ],
)
def test_bad_input(flags, message):
  measure = flags.split()[0].removeprefix('--measure=')
  done = programs.start('benchmark', *little(measure if measure in harness.MEASURES else 'speed'), *flags.split())
  assert done.status == 2
  last = done.err.strip().split('\n')[-1]
  assert last.startswith('error: ') and message in last


@pytest.mark.parametrize('measure', harness.MEASURES)
def test_a_measure_names_what_it_reads_of_the_options(measure):
  module = importlib.import_module(f'benchmarks.{measure}')
  nodes = [*ast.walk(ast.parse(inspect.getsource(module)))]
  of = [node for node in nodes if isinstance(node, ast.Attribute)]
  used = {node.attr for node in of if isinstance(node.value, ast.Name) and node.value.id == 'options'}
  lists = {'listed_models': {'models'}, 'listed_sizes': {'sizes'}}
  named = set().union(*(lists.get(name, {name}) for name in used))
  calls = [node for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
  usual = [node for node in calls if node.func.attr == 'listed_models' and not node.args]
  falls_back = usual and 'models' not in used  # to --model
  assert named | ({'model'} if falls_back else set()) == set(reads(measure))
