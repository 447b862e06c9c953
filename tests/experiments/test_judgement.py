"""What counts of a table, in which order its methods stand, and whether its claim holds: all follow from the rows."""

import dataclasses
import math
import pathlib
import re

import numpy as np
import pytest

import experiments
import launch
from experiments import claims, comparison, judgement, pages, results, table
from experiments.claims import Ordered
from experiments.comparison import Cell, Outcome
from experiments.experiment import Experiment, Run
from gradleak.core import statistics

TABLES = pathlib.Path(launch.__file__).parent.parent / 'results' / 'tables'
RUN = Run('digits', 'mlp', 'csdlg(steps=2)', {'none': 'none', 'GC': 'prune(rate=0.9)', 'DP': 'gaussian'}, 4)


def toy(cells, run=RUN, name='toy_1'):
  return Experiment(name, 'A paper.', 'Table 1', 'GC hides more than DP.', {'run': run}, tuple(cells), 'Means.')


def line(row, psnr, ssim, **others):
  return (Cell('digits', row, 'psnr', 'run', row, psnr, **others), Cell('digits', row, 'ssim', 'run', row, ssim))


def outcome(*values, recovered=0, control=8.0):
  mean = sum(values) / len(values)
  half = (max(values) - min(values)) / 2
  kept = dict(enumerate(values))
  return Outcome(
    mean, mean - half, mean + half, len(values), recovered, 0, '', control, failed=not recovered, values=kept
  )


CELLS = (*line('none', 30.0, 0.9), *line('GC', 9.0, 0.04), *line('DP', 15.0, 0.5))
WORKS = (outcome(30, 31, 29, recovered=3), outcome(0.9, 0.91, 0.89, recovered=3))
BLIND = (outcome(6, 7, 5), outcome(0.02, 0.03, 0.01))
SEEN = (outcome(14, 15.5, 15, recovered=2), outcome(0.5, 0.52, 0.48, recovered=2))


def test_two_reconstructions_that_show_nothing_agree_in_that_alone():
  found = judgement.statuses(toy(CELLS), (*WORKS, *BLIND, *SEEN), 'paper')
  assert found == ['agrees', 'agrees', 'both fail', 'both fail', 'agrees', 'agrees']
  once = (*WORKS, *(one._replace(recovered=1) for one in BLIND), *SEEN)
  assert judgement.statuses(toy(CELLS), once, 'paper')[2] == 'same order of magnitude'
  shown = toy((*CELLS[:2], *line('GC', 9.0, 0.4), *CELLS[4:]))  # the paper's is seen, ours is not
  assert judgement.statuses(shown, (*WORKS, *BLIND, *SEEN), 'paper')[2:4] == ['same order of magnitude', 'differs']


def test_what_one_of_two_pictures_shows_is_no_failure():
  """The last image that a read-out returns may show nothing where the best one does."""
  cells = [cell._replace(metric='last_ssim') if cell.metric == 'psnr' else cell for cell in line('GC', 0.04, 0.04)]
  seen = outcome(0.5, 0.52, 0.48)
  for beside, expected in ((seen, False), (BLIND[1], True)):
    assert judgement.nothing([(cells[0], BLIND[1]), (cells[1], beside)]) == expected
    assert judgement.nothing([(cells[0], beside), (cells[1], BLIND[1])]) == expected


def test_without_an_ssim_the_control_decides():
  cells = [cell for cell in CELLS if cell.metric == 'psnr']
  found = [WORKS[0], outcome(6, 7, 5, control=9.5), SEEN[0]]
  assert judgement.statuses(toy(cells), found, 'paper')[1] == 'both fail'
  found[1] = outcome(6, 7, 5, control=8.0)  # below the paper's 9.0
  assert judgement.statuses(toy(cells), found, 'paper')[1] == 'same order of magnitude'


def test_a_defense_is_not_judged_where_the_undefended_attack_fails():
  failing = tuple(one._replace(recovered=0, failed=True) for one in WORKS)
  found = judgement.statuses(toy(CELLS), (*failing, *BLIND, *SEEN), 'paper')
  assert found[:2] == ['agrees', 'agrees'] and set(found[2:]) == {'no conclusion'}
  elsewhere = [cell._replace(column='faces') if cell.row == 'none' else cell for cell in CELLS]
  assert 'no conclusion' not in judgement.statuses(toy(elsewhere), (*failing, *BLIND, *SEEN), 'paper')


def test_the_undefended_run_of_the_same_state_decides():
  cells = [Cell('fishing', f'{state}, {row}', 'psnr', state, row) for state in ('new', 'old') for row in ('none', 'DP')]
  experiment = Experiment('toy', 'A paper.', 'Table', 'Fishing.', {'new': RUN, 'old': RUN}, tuple(cells), 'Means.')
  fails, works = outcome(6, 7, 5), outcome(30, 31, 29, recovered=3)
  assert judgement.conclusive(experiment, (fails, fails, works, fails), 'paper') == [True, False, True, True]
  claim = Ordered('fishing | old, DP | psnr', 'fishing | old, none | psnr')
  assert claims.judged(experiment, (fails, fails, works, fails), 'paper', [claim]) == {claim: 'holds'}
  lone = dataclasses.replace(experiment, cells=(cells[0], cells[3]))  # its own state has none: the column's counts
  assert judgement.conclusive(lone, (fails, fails), 'paper') == [True, False]


def test_what_no_success_is_needed_for_is_judged_without_one():
  cells = [cell._replace(metric='cosine') for cell in CELLS if cell.metric == 'psnr']
  found = outcome(1.0, 0.99, 0.98), outcome(0.1, 0.11, 0.09), outcome(0.5, 0.51, 0.49)
  assert all(one.failed for one in found) and all(judgement.conclusive(toy(cells), found, 'paper'))


def test_a_repeated_cell_counts_once():
  outcomes = (*WORKS, *BLIND, *SEEN)
  other = dataclasses.replace(RUN, model='lenet')  # other settings, so that its rows are others
  more = dataclasses.replace(RUN, trials=5, settings=dataclasses.replace(RUN.settings, controls=7))  # the same, oftener
  rerun = tuple(one._replace(mean=one.mean + 0.001) for one in outcomes)
  moved, apart = (tuple(one._replace(mean=one.mean - gap) for one in outcomes) for gap in (0.001, 0.002))
  tables = {
    'one': (toy(CELLS), outcomes),
    'again': (toy(CELLS), rerun),
    'another': (toy(CELLS, other), moved),
    'oftener': (toy(CELLS, more), apart),
    'equal': (toy(CELLS, dataclasses.replace(RUN, model='mlp(widths=6)')), outcomes),
    'missing': (toy(CELLS), None),
  }
  found = judgement.judge(tables, 'paper')
  assert 'repeated' not in found['one'].statuses and 'repeated' not in found['another'].statuses
  assert set(found['again'].statuses) == set(found['equal'].statuses) == {'repeated'}
  assert set(found['oftener'].statuses) == {'repeated'}
  assert set(found['missing'].statuses) == {judgement.NOT_SHOWN}
  assert sum(found['again'].counts().values()) == 6


def counts(kept=0, opposite=0, smaller=0, undecided=0):
  return dict(zip(judgement.ORDERS, (kept, opposite, smaller, undecided), strict=True))


def order(outcomes, cells=CELLS):
  experiment = toy(cells)
  statuses = judgement.statuses(experiment, outcomes, 'paper')
  return judgement.order(judgement.Judged(experiment, outcomes, statuses, 'paper'))


def test_pairs_of_methods_are_in_the_papers_order_or_not():
  cells = (*CELLS, *line('GC', 20.0, 0.6))
  cells = (*cells[:6], *(cell._replace(row='GC, adaptive') for cell in cells[6:]))
  high = (outcome(20, 22, 21, recovered=3), outcome(0.6, 0.61, 0.62, recovered=3))
  found = order((*WORKS, *BLIND, *SEEN, *high), cells)
  assert found.pairs == counts(kept=6) and found.taus == [1, 1]
  assert found.undefended == counts(kept=6)
  turned = order((*WORKS, *high, *SEEN, *BLIND), cells)
  assert turned.pairs == counts(opposite=6) and turned.tau() == -1
  assert judgement.total([found, turned]).pairs == counts(kept=6, opposite=6)


@pytest.mark.parametrize(('value', 'unsettled'), [(20, 1), (14, 1), (2, 0)])
def test_an_opposite_order_may_be_so_under_one_reading_alone(value, unsettled):
  other = Cell('digits', 'DP, less noise', 'psnr', 'run', 'DP')
  cells = [*(cell for cell in CELLS if cell.metric == 'psnr'), other]
  high, low = outcome(13, 15, 14, recovered=3), outcome(4, 6, 5)  # the paper has 9 dB under GC, and 15 under DP
  found = WORKS[0], high, low, outcome(value - 1, value + 1, value, recovered=3)
  assert order(found, cells).unsettled == 0
  read = dataclasses.replace(toy(cells), readings={'DP': ('DP, less noise',)})
  judged = judgement.judge({'toy': (read, found)}, 'paper')['toy'].order
  assert judged.pairs == counts(opposite=1) and judged.unsettled == unsettled
  words = 'Not so under another reading of the paper: 1 of the opposite ones.'
  assert (words in table.ordered(judgement.total([judged]))) == bool(unsettled)


def test_a_pair_is_compared_trial_by_trial():
  wide = (outcome(10, 20, 30, recovered=1), outcome(0.1, 0.5, 0.9, recovered=1))
  above = (outcome(11, 21.2, 31.1, recovered=1), outcome(0.12, 0.53, 0.93, recovered=1))
  assert order((*WORKS, *wide, *above)).pairs == counts(kept=2)
  apart = tuple(one._replace(values={}) for one in wide)
  assert order((*WORKS, *apart, *above)).pairs == counts(undecided=2)


@pytest.mark.parametrize(('spread', 'kinds'), [(1.0, {'smaller': 1}), (20.0, {'undecided': 1})])
def test_an_interval_that_leaves_out_the_papers_difference_shows_a_smaller_one(spread, kinds):
  gained = np.array([-0.5, 0.5, 0.1]) * spread  # the paper's difference is 6 dB
  hidden = outcome(10, 20, 30, recovered=1)
  seen = outcome(*(hidden.values[trial] + gain for trial, gain in enumerate(gained)), recovered=1)
  cells = [cell for cell in CELLS if cell.metric == 'psnr']
  assert order((WORKS[0], hidden, seen), cells).pairs == counts(**kinds)
  noisy = [cells[0], *(cell._replace(spread=5.5, spread_n=16) for cell in cells[1:])]  # 6.3 to 11.7 dB, 12.3 to 17.7
  gained = np.array([-0.5, 0.5, 0.6]) * spread  # up to 1.7 dB, above the 0.6 that the intervals are apart
  seen = outcome(*(hidden.values[trial] + gain for trial, gain in enumerate(gained)), recovered=1)
  assert order((WORKS[0], hidden, seen), noisy).pairs == counts(undecided=1)


def test_the_claim_of_the_modes_is_about_the_rows_in_which_the_paper_shows_more_in_eval_mode():
  for network, rows in (
    ('resnet18', ('1, 1, 1', '1, 8, 8', '5, 8, 8')),
    ('resnet152', ('1, 1, 1', '5, 8, 8', '1, 8, 4')),
  ):
    claim = claims.CLAIMS[f'outpost_4_{network}']
    shown = [one.one.split(' | ')[1] for one in claim if not one.alike]
    assert [', '.join(row.split(', ')[i].split(' = ')[1] for i in range(3)) for row in shown] == list(rows)
    assert len(claim) == len(rows) + 4  # the modes are alike on all pretrained ones


def test_it_is_said_how_many_trials_would_decide_half_of_the_pairs():
  def near(gap):  # intervals of ±10 that are not paired
    return tuple(
      one._replace(mean=one.mean + gap, low=one.low + gap, high=one.high + gap, values={})
      for one in (outcome(10, 20, 30, recovered=1), outcome(10, 20, 30, recovered=1))
    )

  found = order((*WORKS, *near(0), *near(5)))
  assert found.needed == [16, 16] and found.times() == 16  # a half-width of 20 has to become one of 5
  assert 'At most 16 times the trials would bring half' in table.ordered(found)
  assert order((*WORKS, *near(0), *near(0))).times() == math.inf
  assert 'Not even 1,000 times' in table.ordered(order((*WORKS, *near(0), *near(0.1))))
  decided = order((*WORKS, *near(0), *near(50)))
  assert decided.needed == [1, 1] and 'trials' not in table.ordered(decided)
  assert judgement.total([found, decided]).times() == 1  # two of four


@pytest.mark.parametrize('other', [{'spread': 9.0, 'spread_n': 4}, {}])
def test_a_pair_that_the_paper_does_not_order_is_left_out(other):
  noise = {'spread': 9.0, 'spread_n': 4}
  psnr = 15.0 if other else 9.0  # within the paper's noise, or equal
  cells = (*CELLS[:2], *line('GC', 9.0, 0.04, **noise), *line('DP', psnr, 0.5, **other))
  found = order((*WORKS, *BLIND, *SEEN), cells)
  assert found.pairs == found.carried == counts(kept=1) and found.unordered == 1 and found.needed == [1]
  assert 'have no order either: 1.' in table.ordered(judgement.total([found]))


def test_a_pair_that_both_fail_carries_no_order():
  blind = tuple(one._replace(mean=one.mean + 1, values={k: v + 1 for k, v in one.values.items()}) for one in BLIND)
  cells = (*CELLS[:2], *line('GC', 9.0, 0.04), *line('DP', 9.5, 0.05))
  low = (blind[0], BLIND[1]._replace(mean=0.04, values={k: v + 0.02 for k, v in BLIND[1].values.items()}))
  found = order((*WORKS, *BLIND, *low), cells)
  assert sum(found.pairs.values()) == 2 and sum(found.carried.values()) == 0


def claimed(monkeypatch, outcomes, *claim, experiment=None):
  experiment = experiment or toy(CELLS)
  monkeypatch.setitem(claims.CLAIMS, 'toy_1', claim or (Ordered('digits | GC | psnr', 'digits | DP | psnr'),))
  return claims.paragraphs(experiment, outcomes, 'paper')


def test_a_claim_follows_from_the_rows(monkeypatch):
  said = claimed(monkeypatch, (*WORKS, *BLIND, *SEEN))
  assert said[0] == 'The paper claims: GC hides more than DP.' and said[1].startswith('Here: holds. ')
  turned = claimed(monkeypatch, (*WORKS, *SEEN, *BLIND))
  assert turned[1].startswith('Here: does not hold. ')
  assert turned[1].endswith('digits, PSNR dB: GC (14.83 ± 0.75) is not below DP (6.00 ± 1.00).')
  level = claimed(monkeypatch, (*WORKS, *SEEN, *SEEN))
  assert level[1].startswith('Here: undecided. ')
  failing = tuple(one._replace(recovered=0, failed=True, remark='0 of 3') for one in WORKS)
  reason = claimed(monkeypatch, (*failing, *BLIND, *SEEN))[1]
  assert reason.startswith('Here: undecided. ')
  assert reason.endswith('Even without a defense the attack recovers nothing here: digits, none (0 of 3).')
  both = toy((*CELLS, *(cell._replace(column='faces') for cell in CELLS[:2])))
  assert claimed(monkeypatch, (*failing, *BLIND, *SEEN, *failing), experiment=both)[1] == reason  # of its column alone
  chance = tuple(one._replace(recovered=None) for one in failing)
  assert 'Even without a defense the model is at chance here: ' in claimed(monkeypatch, (*chance, *BLIND, *SEEN))[1]
  lost = (BLIND[0]._replace(mean=None), BLIND[1])
  assert claimed(monkeypatch, (*WORKS, *lost, *SEEN))[1].startswith('Here: undecided. ')
  assert 'not compared' in claimed(monkeypatch, None)[1]
  ours = dataclasses.replace(toy(CELLS), paper=f'{claims.OURS}.')
  assert claimed(monkeypatch, None, experiment=ours)[0].startswith('Claim: ')


@pytest.mark.parametrize(
  ('claim', 'said'),
  [
    (Ordered('digits | GC | ssim', '0.1'), 'holds'),
    (Ordered('0.1', 'digits | GC | ssim'), 'does not hold'),
    (Ordered('digits | DP | psnr', 'digits | GC | psnr', 12.0), 'holds'),
    (Ordered('digits | DP | psnr', 'digits | GC | psnr', 3.0), 'does not hold'),
    (Ordered('digits | DP | psnr', 'digits | GC | psnr', 9.0), 'undecided'),
    (Ordered('digits | GC | psnr', 'digits | DP | psnr', 3.0), 'holds'),
    (Ordered('digits | GC | psnr', 'digits | DP | psnr', 3.0, alike=True), 'does not hold'),
    (Ordered('digits | GC | psnr', 'digits | DP | psnr', 13.0, alike=True), 'holds'),
  ],
)
def test_a_comparison_has_a_margin_or_a_bound(claim, said):
  assert list(claims.judged(toy(CELLS), (*WORKS, *BLIND, *SEEN), 'paper', [claim]).values()) == [said]


@pytest.mark.parametrize(
  'claim',
  [
    Ordered('digits | GC | ssim', '0.1'),
    Ordered('0.1', 'digits | GC | ssim'),
    Ordered('digits | GC | psnr', 'digits | DP | psnr'),
    Ordered('digits | GC | psnr', '6.5', 1.0, alike=True),
  ],
)
def test_figures_of_two_trials_decide_no_claim(claim):
  few = [outcome(*values)._replace(low=None, high=None) for values in ((6, 7), (0.02, 0.03))]
  assert claims.judged(toy(CELLS), (*WORKS, *few, *SEEN), 'paper', [claim]) == {claim: 'undecided'}


@pytest.mark.parametrize(
  ('claim', 'works', 'fails'),
  [
    (Ordered('0.1', 'digits | none | ssim'), 'does not hold', 'undecided'),  # it leaks
    (Ordered('digits | none | ssim', '0.1'), 'holds', 'undecided'),  # it resists
    (Ordered('faces | none | ssim', 'digits | none | ssim', 0.1, alike=True), 'holds', 'undecided'),
    (Ordered('faces | none | psnr', 'digits | none | psnr', 0.1, alike=True), 'does not hold', 'does not hold'),
    (Ordered('digits | none | ssim', '0.005'), 'does not hold', 'does not hold'),  # something is seen
  ],
)
def test_that_nothing_is_seen_says_nothing_where_every_undefended_attack_fails(claim, works, fails):
  cells = [cell._replace(column=column) for column in ('digits', 'faces') for cell in line('none', 30.0, 0.9)]
  blind = (*BLIND, outcome(9, 10, 8), BLIND[1])
  found = tuple(one._replace(recovered=1, failed=False) for one in blind[2:])
  experiment = toy(cells)
  assert list(claims.judged(experiment, (*BLIND, *found), 'paper', [claim]).values()) == [works]
  assert list(claims.judged(experiment, blind, 'paper', [claim]).values()) == [fails]
  said = claims.why(claims.lacking(experiment, blind, 'paper', [claim]))
  assert said.startswith('Even without a defense the attack recovers nothing here: ') == (fails == 'undecided')


def test_a_comparison_that_is_alone_is_singular():
  said = [dict(zip(claims.SAID, counts, strict=True)) for counts in ((1, 1, 1), (2, 0, 3))]
  assert claims.numbered(said[0]) == '1 holds, 1 does not hold, 1 is undecided'
  assert claims.numbered(said[1], 'not') == '2 hold, 0 do not, 3 are undecided'
  orders = [judgement.Order({}, {}, taus, {}, 0, 0, []) for taus in ([0.2], [0.2, 0.2])]
  assert [table.ordered(one) for one in orders] == [
    f'Kendall’s τ-b is 0.20, the median of {columns}.' for columns in ('1 column', '2 columns')
  ]


@pytest.mark.long
def test_a_claim_of_many_comparisons_is_contradicted_by_noise_at_most_as_often_as_one():
  cells = [cell for i in range(15) for cell in (*line('none', 1.0, 1.0), *line('GC', 0.0, 0.0))]
  cells = [cell._replace(column=f'data {index // 4}') for index, cell in enumerate(cells)]
  claim = [
    Ordered(f'data {i} | GC | {metric}', f'data {i} | none | {metric}')
    for i in range(15)
    for metric in ('psnr', 'ssim')
  ]
  rng, false = np.random.default_rng(0), 0
  for _ in range(60):
    drawn = [outcome(*rng.normal(size=16), recovered=1) for _ in cells]
    false += claims.whole(claims.judged(toy(cells), drawn, 'paper', claim).values()) == 'does not hold'
  assert false <= 5  # without the correction, about half of the 60
  far = [one._replace(mean=0.0, values={}, low=-1.0, high=1.0) for one in drawn]
  far[2] = far[2]._replace(mean=4.0, low=1.5, high=6.5)  # beyond 95 %, and not beyond 99.8 %
  assert claims.judged(toy(cells), far, 'paper', claim)[claim[0]] == 'undecided'
  assert claims.judged(toy(cells), far, 'paper', claim[:1])[claim[0]] == 'does not hold'


def test_diverged_trials_widen_no_interval_of_another_confidence_less():
  cell = Cell('digits', 'none', 'psnr', 'run', 'none')
  mean, low, high = statistics.mean_interval([8.0, 13.0], 0.95)
  found = Outcome(mean, low, high, 6, 1, 4, values={0: 8.0, 3: 13.0})  # four of six diverged
  assert comparison.interval(cell, found) == (low, high)
  exact = statistics.mean_interval([8.0, 13.0], 0.99)[1:]
  assert comparison.interval(cell, found, 0.99) == pytest.approx(exact)


def test_shares_of_different_counts_are_compared_as_shares():
  experiment = experiments.REGISTRY['fidel_5']
  (run,) = {cell.run for cell in experiment.cells if cell.column == 'mnist'}
  cells = [cell for cell in experiment.cells if cell.run == run]

  def said(single, batch):
    rows = [
      {'defense': cell.defense, 'samples': count, 'revealed': found}
      for cell, count, found in zip(cells, (100, 10), (single, batch), strict=True)
    ]
    found = [experiment.runs[run].outcome(cell, rows) for cell in cells]
    claim = claims.CLAIMS['fidel_5'][0]
    return claims.judged(dataclasses.replace(experiment, cells=tuple(cells)), found, 'paper', [claim])[claim]

  assert (said(100, 5), said(60, 6), said(60, 10), said(10, 10)) == ('holds', 'undecided', 'undecided', 'does not hold')


def test_a_bound_on_what_is_no_picture_needs_no_attack_that_works():
  cell, claim = Cell('digits', 'none', 'largest_error', 'run', 'none'), Ordered('digits | none | largest_error', '0.1')
  assert claims.judged(toy([cell]), BLIND[1:], 'paper', [claim]) == {claim: 'holds'}


def test_a_raw_upload_that_nobody_reads_contradicts_no_claim_that_it_leaks(made):
  (line,) = [line for line in made['index.md'].splitlines() if '(ffl_5_cifar100.md)' in line]
  assert '| **undecided**, as no undefended run works |' in line
  for other in ('outpost_3_1', 'outpost_4_resnet18', 'ffl_1'):  # of whose comparisons none, and some, lack such a run
    assert re.search(rf'\({other}\.md\) .*\| \*\*undecided\*\* \|', made['index.md'])
  here = next(line for line in made['ffl_1.md'].splitlines() if '**undecided**' in line)
  assert 'Even without a defense the attack recovers nothing here: ' in here and '(0 of 8; untrained network, ' in here
  assert 'Of its comparisons 2 hold, 0 do not, 2 are undecided.' in here  # one column was trained without that noise


def test_a_network_that_training_left_at_chance_contradicts_no_claim_that_it_leaks():
  cells = [cell._replace(column=column) for column in ('digits', 'faces') for cell in line('none', 30.0, 0.9)]
  works = tuple(one._replace(recovered=1, failed=False) for one in BLIND)
  leaks = [Ordered('0.1', 'digits | none | ssim')]

  def said(blind):
    return claims.judged(toy(cells), (*blind, *works), 'paper', leaks)[leaks[0]]

  idle = tuple(one._replace(untrained=True) for one in BLIND)
  assert (said(BLIND), said(idle)) == ('does not hold', 'undecided')
  assert claims.lacking(toy(cells), (*idle, *works), 'paper', leaks)[leaks[0]][0][0].column == 'digits'


def test_reconstructions_that_show_nothing_have_no_order():
  """Unclipped, one may be far below the other; where one shows something the order counts."""
  cells = [*line('none', 30.0, 0.9), *line('GC', 9.0, 0.1), *line('DP', 9.0, 0.1)]
  apart = outcome(-13, -12, -14), BLIND[1], outcome(-25, -24, -26), BLIND[1]
  below, above = (
    Ordered(f'digits | {one} | psnr', f'digits | {two} | psnr') for one, two in (('DP', 'GC'), ('GC', 'DP'))
  )

  def said(*shown):
    return list(claims.judged(toy(cells), (*WORKS, *shown), 'paper', [below, above]).values())

  assert said(*apart) == ['undecided', 'undecided']
  assert claims.unseen(toy(cells), (*WORKS, *apart), [below, above]) == {below, above}
  seen = [one._replace(recovered=1, failed=False) for one in apart[:2]]
  assert said(*seen, *apart[2:]) == ['holds', 'does not hold']


def test_the_sentence_of_a_stored_table_changes_with_its_rows():
  stored = results.read(TABLES, 'mini')['dcs2_1']
  experiment = experiments.get('dcs2_1')
  texts = experiment.runs['mnist'].scaled('mini').texts()
  swapped = {texts['DCS²']: texts['Soteria'], texts['Soteria']: texts['DCS²']}
  rows = {
    name: [{**row, 'defense': swapped.get(row['defense'], row['defense'])} for row in found]
    for name, found in stored.rows.items()
  }
  said = [
    claims.paragraphs(experiment, results.outcomes(one, experiment), 'mini')[1]
    for one in (stored, stored._replace(rows=rows))
  ]
  assert 'does not hold' in said[0] and 'DCS² (' in said[0] and 'is not below Soteria' in said[0]
  assert 'is not below Soteria' not in said[1] and said[0] != said[1]


# These ask, or say what is done: they claim no order.
ASKING = (
  'assumptions_aggregation', 'assumptions_priors', 'assumptions_trained', 'defenses_faces', 'graddefense_2b_readings',
  'labels', 'outpost_4_readings', 'priors_faces', 'priors_mnist', 'separation_cifar10', 'separation_mnist',
)  # fmt: skip


def test_every_claim_is_data():
  assert set(claims.CLAIMS) | set(ASKING) == set(experiments.REGISTRY) and not set(claims.CLAIMS) & set(ASKING)
  for name, claim in claims.CLAIMS.items():
    cells = {(cell.column, cell.row, cell.metric) for cell in experiments.get(name).cells}
    assert set(claims.places(claim)) <= cells and len(set(claim)) == len(claim), name
    if any(claims._blind(one) and judgement.pictured(claims.places([one])[0][2]) for one in claim):
      assert any(judgement.undefended(experiments.get(name), 'mini')), name


def test_the_papers_own_figures_bear_out_what_is_claimed():
  """A claim that the paper's figures contradict would be ours, not its own."""
  for name, claim in claims.CLAIMS.items():
    printed = {(c.column, c.row, c.metric): c for c in experiments.get(name).cells if c.paper is not None}
    for one in claim:
      sides = [claims._place(text) for text in (one.one, one.other)]
      if all(isinstance(place, float) or place in printed for place in sides):
        low, high = (place if isinstance(place, float) else judgement._middle(printed[place]) for place in sides)
        gap = abs(low - high) if one.alike else low - high
        assert gap <= max(one.margin, 0.01 if one.margin else 0), (name, one, low, high)


def test_seeds_spread_less_than_is_taken_for_a_single_training():
  spread = {}
  for name, stored in results.read(TABLES, 'mini').items():
    found = zip(experiments.get(name).cells, results.outcomes(stored, experiments.get(name)), strict=True)
    values = [list(one.values.values()) for cell, one in found if cell.metric in ('accuracy', 'sensitive_accuracy')]
    deviations = [np.std(each, ddof=1) for each in values if len(each) > 2]
    if deviations:
      spread[name] = np.sqrt(np.mean(np.square(deviations)))
  assert spread.pop('ffl_4_emnist_convnet') > comparison.ONE_TRAINING  # which has ten seeds
  assert len(spread) > 5 and max(spread.values()) < comparison.ONE_TRAINING


@pytest.fixture(scope='module')
def made():
  return pages.pages(results.read(TABLES, 'mini'), experiments.REGISTRY, 'mini', 'there')


def test_the_index_opens_with_claims_and_the_order_and_has_a_line_per_table(made):
  text = made['index.md']
  agreeing, total = map(int, re.search(r'(\d+) of (\d+) figures that count agree', text).groups())
  assert 0 < agreeing == text.partition('The figures that agree')[2].count('\n| [') < total
  assert text.index('Claims of tables') < text.index('Pairs of methods') < text.index('\n## ')
  tables = dict(re.findall(r'^\| \[.+?\]\((\w+)\.md\) \| .+ \| (\*\*.+?\*\*|no claim)(?:, as .+?)? \|', text, re.M))
  assert sorted(tables) == sorted(results.read(TABLES, 'mini'))
  assert all((said == 'no claim') == (not claims.CLAIMS.get(name)) for name, said in tables.items())


@pytest.mark.long
def test_pages_say_which_tables_have_decided_half_of_their_pairs_and_what_the_others_would_take(made):
  stored = results.read(TABLES, 'mini')
  times = {name: one.order.times() for name, one in pages.judge(stored, experiments.REGISTRY, 'mini').items()}
  times = {name: found for name, found in times.items() if found is not None}
  decided, few = (
    [name for name, found in times.items() if low <= found <= high] for low, high in ((0, 1), (1.001, 10))
  )
  assert f'beyond noise in {len(decided)} of {len(times)} tables' in made['index.md']
  assert f'10 times the trials would do for {len(few)} more' in made['index.md']
  for name, found in times.items():
    longer = re.search(r'With (\d+) times the trials it would take about', made[f'{name}.md'])
    assert (longer and int(longer[1])) == (math.ceil(found) if 1 < found <= table.MOST_TIMES else None), name
