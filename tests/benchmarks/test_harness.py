"""The harness: variants take turns, ratios are to the first, and what cannot be measured says so."""

import types

import jax
import numpy as np
import pytest

from benchmarks import gpu, harness, memory, pytorch, setting, speed
from benchmarks.harness import Column, Variant
from gradleak.core import errors

COLUMNS = [Column('ms', 'ms', '.1f'), Column('first', 'ms', '.1f', harness.first), *harness.ratios('ms')]


def variants(turns):
  """Returns three variants that note their turns; the last cannot be measured."""
  times = {'slow': iter((9.0, 2.0, 4.0, 3.0)), 'fast': iter((9.0, 1.0, 1.0, 2.0))}

  def timed(name):
    turns.append(name)
    return {'ms': next(times[name])}

  def missing():
    raise pytorch.Unavailable('torch is not installed')

  run = {name: (lambda name=name: timed(name)) for name in times}
  return [
    *(Variant(name, run[name], lambda figures, name=name: {'once': figures['ms'] + len(name)}) for name in times),
    Variant('other', missing),
  ]


def test_variants_take_turns_and_ratios_are_to_the_first(capsys):
  turns = []
  found = harness.measured(variants(turns), 3, 'net, ', warm=True)
  assert turns == ['slow', 'fast'] * 4
  assert {name: figures['ms'] for name, figures in found.items() if name != 'other'} == {
    'slow': [2, 4, 3], 'fast': [1, 1, 2]
  }  # fmt: skip
  assert found['other'] == 'n/a: torch is not installed' and found['slow']['once'] == [6]
  assert len(found['fast']['peak']) == 3
  said = capsys.readouterr().err.splitlines()
  assert said[0] == 'compiling: net, slow' and said[3] == 'run 1 of 3: net, slow' and len(said) == 9
  assert harness.table(found, COLUMNS).splitlines() == [
    'variant   ms  first  ratio  minima',
    'slow     3.0    2.0  1.00×   1.00×',
    'fast     1.0    1.0  0.33×   0.50×',
    'other    n/a: torch is not installed',
  ]


def test_what_does_not_compile_runs_no_more_often_than_asked():
  turns = []

  def run(name):
    turns.append(name)
    return {'ms': 1.0}

  sides = [Variant('ours', lambda: run('ours')), Variant('theirs', lambda: run('theirs'), compiled=False)]
  harness.measured(sides, 1, warm=True)
  assert turns == ['ours', 'ours', 'theirs']


def test_batches_that_two_attack_are_compared_in_pairs():
  def judged(*sides):
    found = {name: {'cells': [right]} for name, right in zip(('ours', 'theirs'), sides, strict=True)}
    return harness.paired(found, 'cells')

  even = [0.2, 0.9, 0.5, 0.7]
  assert judged([x + d for x, d in zip(even, (0.10, 0.11, 0.09, 0.10), strict=True)], even).endswith(
    'on 4 batches: +0.100 (+0.087 to +0.113), a difference.'
  )
  assert judged([0.3, 0.8, 0.5, 0.7], even).endswith('+0.000 (-0.130 to +0.130), undecided.')
  assert judged([0.3], [0.2]).endswith('on 1 batches: +0.100, undecided.')
  assert judged([0.3, 0.8], [0.2, 0.7]).endswith('on 2 batches: +0.100, undecided.')
  assert judged([0.25] * 6, [0.125] * 6).endswith('on 6 batches: +0.125 (+0.125 to +0.125), a difference.')
  assert harness.paired({'ours': {'cells': [even]}, 'theirs': 'n/a: PyTorch is not installed'}, 'cells') == ''
  heads = [column.head for column in harness.right('cells', 'cells')]
  shown = dict(
    zip(heads, harness.cells({'ours': {'cells': [even]}}, 'ours', harness.right('cells', 'cells')), strict=True)
  )
  assert shown['cells right'] == '0.575' and shown['±'] == '0.475'
  assert harness.cells({'ours': {'cells': [[0.5]]}}, 'ours', harness.right('cells', 'cells'))[3] == '–'


def test_what_was_measured_before_a_failure_stays():
  runs = iter((4.0, None, 5.0))

  def fails():
    seconds = next(runs)
    if seconds is None:
      raise errors.DeviceError('out of memory')
    return {'ms': seconds}

  assert harness.measured([Variant('one', fails)], 3)['one']['ms'] == [4.0]


def test_a_first_variant_that_is_missing_leaves_the_next_as_the_reference():
  found = harness.measured(list(reversed(variants([]))), 1)
  assert harness.cells(found, 'fast', COLUMNS)[-1] == '1.00×' and list(found) == ['other', 'fast', 'slow']


@pytest.mark.parametrize(
  ('sizes', 'expected'), [('8,2,8', [2, 8]), ('8,many', "sizes is 'many', expected"), ('0', 'sizes is 0, expected')]
)
def test_sizes_are_a_list_of_integers(sizes, expected):
  options = harness.Options(sizes=sizes)
  if isinstance(expected, list):
    assert options.listed_sizes('1') == expected
  else:
    with pytest.raises(errors.UsageError, match=expected):
      options.listed_sizes('1')


@pytest.mark.long
@pytest.mark.usefixtures('fast_compilation')
def test_figures_are_per_step_and_trial(monkeypatch):
  """A clock that advances 10 ms with each step: of two trials at once half of that each."""
  images = setting.load('digits', None, 2)
  ours = setting.make('mlp', 'csdlg', 10, images, 2)
  now, run = [0.0], setting.driver.run

  def stepped(*given, on_chunk, **named):
    def mark(progress):
      now[0] = 5.0 + 0.01 * progress.step
      on_chunk(progress)

    return run(*given, on_chunk=mark, **named)

  monkeypatch.setattr(setting.driver, 'run', stepped)
  monkeypatch.setattr(setting.time, 'perf_counter', lambda: now[0])
  measure, once = setting.measured(ours, 2, group_size=2, devices=setting.jax.local_devices()[:1], compared=1)
  figures = measure()
  assert figures['ms'] == pytest.approx(5) and figures['compile'] == pytest.approx(5) and once(figures)['planned'] > 0


@pytest.mark.slow
@pytest.mark.usefixtures('fast_compilation')
def test_the_loop_is_set_against_ours(monkeypatch, tmp_path):
  """Without PyTorch: a loop that takes 6 ms for each step of a trial, and returns its start."""
  monkeypatch.setattr(pytorch, 'device', lambda: 'cpu')
  monkeypatch.setattr(pytorch, 'prepare', lambda *given: None)
  monkeypatch.setattr(pytorch, 'quickest_threads', lambda once: None)
  attacked = lambda network, trial, settings, device: pytorch.Attacked(trial.start, 1.0, 0.006 * settings.steps, 0.0)  # noqa: E731
  monkeypatch.setattr(pytorch, 'attack', attacked)
  options = harness.Options(dataset='digits', attack='csdlg', trials=2, compared=1, steps=4, repeats=1)
  every = setting.make('mlp', 'csdlg', 4, setting.load('digits', None, 2), 2)
  loop = speed.OneAtATime(every.first(1), attacked)()
  assert loop['ms'] == pytest.approx(6) and np.isfinite(loop['psnr'])
  (row,) = gpu._rows(options, 'mlp', every, [2])
  texts = [text.strip() for text in row.strip('|').split('|')]
  assert texts[:3] == ['mlp', '2', '2'] and texts[4] == '6.000'
  assert float(texts[5].rstrip('×')) == pytest.approx(6 / float(texts[3]), abs=0.06)


@pytest.mark.parametrize(
  ('stats', 'of'), [(None, 'the process while the variant ran'), ({'peak_bytes_in_use': 1}, 'GPU')]
)
def test_a_peak_says_what_it_is_of(monkeypatch, stats, of):
  device = types.SimpleNamespace(memory_stats=lambda: stats)
  monkeypatch.setattr(jax, 'local_devices', lambda: [device])
  assert of in memory.of_what() and (memory.peak() == 1 / memory.MIB) == (of == 'GPU')
