"""Verdicts are computed from cells, and notes are filled from the run at hand and shown at their own scale alone."""

import math
import re

import pytest

import experiments
from experiments import comparison, table
from experiments.comparison import Cell, Note, Outcome, verdict
from experiments.experiment import Experiment
from experiments.notes import NOTES
from tests import programs

NAMES = sorted({note.experiment for note in NOTES})


def judged(metric, paper, mean, half=None, spread=None, spread_n=None, trainings=None, n=8):
  found = (mean, None, None) if half is None else (mean, mean - half, mean + half)
  cell = Cell('', '', metric, '', '', paper, spread, spread_n=spread_n)
  return verdict(cell, Outcome(*found, n, None, 0, trainings=trainings))


@pytest.mark.parametrize(
  ('metric', 'paper', 'mean', 'half', 'spread', 'expected'),
  [
    ('psnr', 20.0, 21.0, 1.0, None, 'agrees'),  # the intervals meet
    ('psnr', 20.0, 23.0, 1.0, 2.0, 'same order of magnitude'),  # a ± over an unknown number is no interval
    ('psnr', 20.0, 23.0, 1.0, None, 'same order of magnitude'),
    ('psnr', 20.0, 31.0, 1.0, None, 'differs'),  # more than a factor of ten in MSE
    ('psnr', 22.2, 13.7, 8.8, None, 'undecided'),
    ('psnr_unclipped', (-4.0, -4.3), -4.1, None, None, 'agrees'),  # between two pictures
    ('ssim', 1.0, 0.9996, 0.0003, None, 'agrees'),  # rounded by the paper
    ('ssim', 0.17, 0.04, 0.01, 0.09, 'differs'),  # a bounded score has no order of magnitude
    ('accuracy', 87.2, 88.7, 0.8, None, 'differs'),
    ('revealed', 20, 20.5, 0.3, None, 'agrees'),  # a whole number
    ('revealed', 20.0, 20.5, 0.3, None, 'same order of magnitude'),
    ('revealed', 20, 17.7, 0.4, None, 'same order of magnitude'),
    ('queries', 3.2, 3.3, None, None, 'agrees'),  # exact ones: to 5 %
    ('overhead', 3.2, 3.2, None, None, 'same order of magnitude'),  # of another machine
    ('overhead', 3.2, -1.0, None, None, 'differs'),
    ('mse_unclipped', 0.05, 0.2, 0.3, None, 'undecided'),
    ('mse_unclipped', 0.05, 2.0, 0.3, None, 'differs'),
    ('psnr', None, 20.0, 1.0, None, ''),
    ('psnr', 20.0, None, None, None, ''),
  ],
)
def test_a_verdict_follows_from_the_cell(metric, paper, mean, half, spread, expected):
  assert judged(metric, paper, mean, half, spread) == expected
  assert expected in (*comparison.VERDICTS, '')


@pytest.mark.parametrize(('n', 'expected'), [(None, 'differs'), (1, 'agrees'), (16, 'agrees'), (400, 'differs')])
def test_the_papers_standard_deviation_is_over_a_known_number(n, expected):
  # 1.96 · 0.4 / √n beside a gap of 0.19.
  assert judged('ssim', 0.5, 0.7, 0.01, 0.4, n) == expected


def test_a_single_training_decides_only_what_seeds_cannot_reverse():
  for trainings in (1, 2):
    found = [
      judged('accuracy', 88.14, mean, trainings=trainings, n=1000) for mean in (88.55, 80.0, 97.0, 98.1, 77.7, 19.25)
    ]
    assert found == ['undecided'] * 3 + ['differs'] * 3
    assert judged('accuracy', 88.14, 70.0, trainings=trainings, n=30) == 'undecided'  # of 30 test samples
  assert judged('accuracy', 88.14, 88.55, 0.5, trainings=3) == 'agrees'
  several = [judged('accuracy', 88.14, mean, half, trainings=3, n=1000) for mean, half in ((80.0, 9.0), (80.0, 11.0))]
  assert several == ['agrees', 'undecided']  # three that leave more open than one agreed with what one did not
  assert judged('accuracy', 88.14, 70.0, 11.0, trainings=3, n=1000) == 'differs'


CELLS = (
  Cell('MNIST', 'none', 'psnr', 'run', 'none', 59.2, 2.7),
  Cell('MNIST', 'DCS²', 'psnr', 'run', 'DCS²', 7.8, 2.6),
)
OUTCOMES = (Outcome(60.0, 59.0, 61.0, 4, 4, 0, '4 of 4'), Outcome(6.5, 6.0, 7.0, 4, 0, 0, '0 of 4'))


def shown(note, outcomes=OUTCOMES, scale='mini', seed=0, weights=False):
  return comparison.remarks([note], CELLS, outcomes, scale, seed, weights)


def test_a_note_is_filled_from_the_cells():
  text = '{none | psnr} of {none | psnr | paper} dB {none | psnr | verdict}; {MNIST | DCS² | psnr | remark}'
  note = Note('toy', text, 'MNIST', holds=(('DCS² | psnr', '<', 'none | psnr'), ('none | psnr', '~', 'none | psnr')))
  assert shown(note) == {'MNIST': ['60.00 ± 1.00 of 59.20 ± 2.70 dB agrees; 0 of 4']}


@pytest.mark.parametrize(
  ('claim', 'wanted'),
  [
    (('none | psnr', '<', 'DCS² | psnr'), '“none | psnr” (60.00 ± 1.00) to be below “DCS² | psnr” (6.50 ± 0.50).'),
    (
      ('none | psnr | paper', '<', 'none | psnr'),
      '“none | psnr | paper” (59.20 ± 2.70) to be below “none | psnr” (60.00 ± 1.00).',
    ),
    (
      ('none | psnr', '~', 'DCS² | psnr'),
      '“none | psnr” (60.00 ± 1.00) to be about the same as “DCS² | psnr” (6.50 ± 0.50).',
    ),
  ],
)
def test_a_note_that_does_not_hold_is_replaced(claim, wanted):
  (said,) = shown(Note('toy', 'Both fail.', 'MNIST', holds=(claim,)))['MNIST']
  assert said == f'A note of this table does not hold for these figures: it needs {wanted}'


def test_nothing_holds_of_a_run_that_diverged():
  note = Note('toy', 'Both fail.', 'MNIST', holds=(('DCS² | psnr', '<', 'none | psnr'),))
  (said,) = shown(note, (OUTCOMES[0], Outcome(None, None, None, 4, 0, 4)))['MNIST']
  assert 'does not hold' in said and '(diverged)' in said


@pytest.mark.parametrize('claim', [('DCS² | psnr', '<', 'none | psnr'), ('none | psnr', '~', 'none | psnr | paper')])
def test_nothing_holds_of_fewer_than_three_trials(claim):
  note = Note('toy', 'Words.', 'MNIST', holds=(claim,))
  assert shown(note) == {'MNIST': ['Words.']}
  few = tuple(one._replace(low=None, high=None, n=2) for one in OUTCOMES)
  (said,) = shown(note, (few[0]._replace(mean=59.2), few[1]))['MNIST']
  assert 'does not hold' in said


@pytest.mark.parametrize(
  ('given', 'missing'),
  [({'scale': 'smoke'}, 'scale'), ({'scale': 'paper'}, 'scale'), ({'seed': 1}, 'seed'), ({'weights': True}, 'model')],
)
def test_a_note_is_shown_where_it_was_written_for(given, missing):
  assert shown(Note('toy', 'Words.', 'MNIST'), **given) == {'': [f'No note at this {missing}.']}
  assert comparison.remarks([], CELLS, OUTCOMES, 'mini', 0, False) == {'': ['No note at this scale.']}


@pytest.mark.parametrize('name', NAMES)
def test_notes_name_cells_that_there_are(name):
  experiment = experiments.get(name)
  cells = {(cell.column, cell.row, cell.metric): cell for cell in experiment.cells}
  assert experiment.notes
  for note in experiment.notes:
    assert note.column in {'', *(cell.column for cell in experiment.cells)}
    for place, shown in comparison.places(note):
      assert place in cells and (shown != 'paper' or cells[place].paper is not None)
    assert all(relation in ('<', '~') for _, relation, _ in note.holds)


@pytest.mark.parametrize('note', NOTES, ids=lambda note: f'{note.experiment}-{note.column}')
def test_notes_type_no_figure_and_no_verdict(note):
  prose = comparison.PLACE.sub('', note.text)
  assert not re.search(r'\d ?(dB|%|points|of \d)|\d\.\d\d|± ?\d', prose)
  assert not re.search(r'\b(dis)?agrees?\b', prose, re.IGNORECASE)


@pytest.mark.parametrize('name', NAMES)
@pytest.mark.parametrize('mean', [None, 12.0])
def test_every_note_is_written_for_any_figures(name, mean):
  experiment = experiments.get(name)
  outcomes = [Outcome(mean, None, None, 1, 0, mean is None, '1 of 1') for _ in experiment.cells]
  for weights in (False, True):
    below = comparison.remarks(experiment.notes, experiment.cells, outcomes, 'mini', 0, weights)
    assert below and all('{' not in text for texts in below.values() for text in texts)


def test_verdicts_and_notes_stand_in_the_table_but_not_at_scale_smoke():
  run = experiments.get('dcs2_4').runs['mnist']
  cells = tuple(cell._replace(run='mnist', defense='none') for cell in CELLS)
  toy = Experiment('toy', 'A.', 'Table', 'Shows.', {'mnist': run}, cells, 'So.', (), (Note('toy', 'Words.', 'MNIST'),))
  mini, smoke = (table.markdown(toy, scale, 0, OUTCOMES) for scale in ('mini', 'smoke'))
  assert '| none | 60.00 ± 1.00 | 59.20 ± 2.70 *agrees* | 4 of 4 |' in mini and '\n\nWords.\n' in mini
  assert '| none | 60.00 ± 1.00 | 59.20 ± 2.70 | 4 of 4 |' in smoke and '\n\nNo note at this scale.\n' in smoke
  assert 'Verdicts are computed' in mini and 'No verdicts' in smoke and 'agrees' not in smoke
  assert 'agrees' in table.table_csv(toy, 'mini', OUTCOMES)
  assert 'agrees' not in table.table_csv(toy, 'smoke', OUTCOMES)
  assert table.terminal(toy, 'mini', 0, OUTCOMES).endswith('\n\nWords.')
  assert 'No note at this seed.' in table.terminal(toy, 'mini', 1, OUTCOMES)


@pytest.mark.slow
@pytest.mark.usefixtures('fast_compilation')
def test_a_smoke_run_says_that_there_is_no_verdict(tmp_path):
  done, lines = programs.reproduce(experiments.get('dcs2_4'), tmp_path / 'new')
  assert 'agrees' not in done.out.lower() and 'No verdicts' in done.out
  assert all(line['verdict'] == '' and math.isfinite(float(line['mean'])) for line in lines)
