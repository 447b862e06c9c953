import csv
import dataclasses
import io
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

import gradleak as gl
from gradleak.report import (
  findings,
  formatting,
  summarise,
  summary_csv,
  sweep_summaries,
  terminal,
  terminal_table,
  worst_case,
)
from gradleak.summary import cases
from tests.report.facts import methods

DIVERGED = 'csdlg(tv=1e-4)', 'prune(rate=0.9)'


def row(**changes):
  """A row of an audit: one trial that nothing recovers."""
  base = {
    'attack': 'a', 'defense': 'none', 'trial': 0, 'psnr': 10.0, 'ssim': 0.1, 'mse': 0.1, 'pearson': 0.0,
    'oracle_psnr': 10.0, 'control_psnr': 12.0, 'label_correct': 1.0, 'success': False, 'solved': True,
    'verdict': 'nothing seen', 'diverged': False, 'change': 0.0, 'tier': 'B',
  }  # fmt: skip
  return base | changes


RECOVERED = {'success': True, 'verdict': 'exact', 'psnr': 30.0}


RANGES = {'psnr': (0, np.inf), 'ssim': (-1, 1), 'mse': (0, 1), 'pearson': (-1, 1)}


def clopper_pearson(k, n):
  """The exact interval from its definition by quantiles of the beta distribution."""
  low = stats.beta.ppf(0.025, k, n - k + 1) if k else 0.0
  high = stats.beta.ppf(0.975, k + 1, n - k) if k < n else 1.0
  return low, high


def test_summaries_match_scipy_and_numpy(result):
  summaries = summarise(result.rows)
  assert [(s['attack'], s['defense']) for s in summaries] == list(result.reconstructions)
  for summary in summaries:
    rows = [r for r in result.rows if (r['attack'], r['defense']) == (summary['attack'], summary['defense'])]
    assert summary['n'] == len(rows) == 4
    for metric in ('psnr', 'ssim', 'mse', 'pearson'):
      values = np.array([r[metric] for r in rows if r[metric] is not None])
      assert summary[metric] == pytest.approx(values.mean())
      interval = stats.ttest_1samp(values, 0).confidence_interval(0.95)
      low, high = RANGES[metric]
      within = max(interval.low, low), min(interval.high, high)
      assert (summary[f'{metric}_low'], summary[f'{metric}_high']) == pytest.approx(within)
    successes = sum(r['psnr'] is not None and r['psnr'] > r['control_psnr'] for r in rows)
    assert summary['success'] == successes / 4
    assert (summary['success_low'], summary['success_high']) == pytest.approx(clopper_pearson(successes, 4))
    assert summary['recovered'] == successes
    assert summary['recovered'] + summary['nothing_seen'] + summary['inconclusive'] + summary['diverged'] == 4


def test_seeds_repeat_images_and_do_not_narrow_the_intervals():
  once = [row(model='m', audit='seed0', seed=0, trial=trial, psnr=10.0 + trial, **changes)
          for trial, changes in enumerate([{}, {'success': True, 'verdict': 'exact'}, {}, {}])]  # fmt: skip
  twice = [*once, *({**each, 'audit': 'seed1', 'seed': 1} for each in once)]
  (of_one,), (of_two,) = (sweep_summaries(rows)['m'] for rows in (once, twice))
  assert (of_one['n'], of_two['n']) == (4, 8)
  assert (of_one['recovered'], of_two['recovered']) == (1, 2)
  bounds = ('psnr', 'psnr_low', 'psnr_high', 'success', 'success_low', 'success_high')
  np.testing.assert_allclose([of_two[key] for key in bounds], [of_one[key] for key in bounds], rtol=1e-12)
  others = [*once, *({**each, 'audit': 'seed1', 'seed': 1, 'dataset': 'others'} for each in once)]
  assert sweep_summaries(others)['m'][0]['success_high'] < of_one['success_high']


def test_audits_of_one_model_that_are_no_seeds_of_it_stand_alone():
  rows = [row(model='m', audit=audit, trial=trial, init=init, seed=seed, **RECOVERED if audit == 'before' else {})
          for audit, init, seed in (('before', 'default', 0), ('after', 'default', 0), ('wide', 'wide', 1))
          for trial in range(2)]  # fmt: skip
  found = {title: [(one['recovered'], one['n']) for one in made] for title, made in sweep_summaries(rows).items()}
  assert found == {'before': [(2, 2)], 'after': [(0, 2)], 'm, wide': [(0, 2)]}


def test_a_diverged_run_enters_no_mean_but_counts_as_not_recovered(result):
  (summary,) = [s for s in summarise(result.rows) if (s['attack'], s['defense']) == DIVERGED]
  survivors = [r['psnr'] for r in result.rows if (r['attack'], r['defense']) == DIVERGED and not r['diverged']]
  assert len(survivors) == 3
  assert summary['psnr'] == pytest.approx(sum(survivors) / 3)
  assert (summary['n'], summary['recovered'], summary['diverged'], summary['success']) == (4, 3, 1, 0.75)


def test_means_of_nothing_and_intervals_of_one_value_are_none():
  gone = row(psnr=None, ssim=None, mse=None, pearson=None, oracle_psnr=None, verdict='diverged', diverged=True)
  (summary,) = summarise([gone])
  assert summary['psnr'] is summary['psnr_low'] is summary['oracle_psnr'] is None
  (summary,) = summarise([row()])
  assert (summary['psnr'], summary['psnr_low'], summary['psnr_high']) == (10.0, None, None)
  (summary,) = summarise([row(psnr=100.0, ssim=0.9 + trial / 100, trial=trial) for trial in range(4)])
  assert (summary['psnr'], summary['psnr_low'], summary['psnr_high']) == (100.0, None, None)  # a cap has no spread
  assert summary['ssim_low'] is not None


@pytest.mark.parametrize(
  ('verdicts', 'word'),
  [
    (['exact'] * 2, 'exact'),
    (['recognisable', 'exact', 'inconclusive'], 'exact'),
    (['above chance', 're-identified'], 're-identified'),
    (['above chance', 'inconclusive'], 'above chance'),
    (['nothing seen'] * 2, 'nothing seen'),
    (['nothing seen', 'inconclusive'], 'inconclusive'),
    (['inconclusive', 'diverged'], 'inconclusive'),
    (['diverged', 'nothing seen'], 'diverged'),
  ],
)
def test_the_word_for_several_runs_is_the_worst_of_them(verdicts, word):
  rows = [row(trial=t, verdict=v, success=v in ('exact', 'recognisable')) for t, v in enumerate(verdicts)]
  (found,), (entry,) = summarise(rows), worst_case(rows)
  assert found['verdict'] == entry['verdict'] == word
  assert found[cases.named(word)] == verdicts.count(word)
  assert found['recovered'] == entry['recovered'] == sum(v in ('exact', 'recognisable') for v in verdicts)


def test_the_steps_count_trials_that_come_as_far_or_further():
  verdicts = [
    ('exact', 'above chance'),
    ('recognisable', 'inconclusive'),
    ('re-identified', 'above chance'),
    ('nothing seen', 'above chance'),
  ]
  rows = [
    row(attack=attack, trial=t, verdict=v, success=v in ('exact', 'recognisable'))
    for t, of_trial in enumerate(verdicts)
    for attack, v in zip('ab', of_trial, strict=True)
  ]
  assert worst_case(rows)[0]['reached'] == {'exact': 1, 'recognisable': 2, 're-identified': 3, 'above chance': 4}


def test_intervals_stay_within_the_range_of_their_metric():
  rows = [row(psnr=1.0, ssim=0.1, mse=0.02), row(psnr=30.0, ssim=0.99, mse=0.9, trial=1)]
  (two,) = summarise(rows)
  assert (two['psnr'], two['psnr_low'], two['ssim_high']) == (15.5, None, None)  # of two runs it tells nothing
  rows.append(row(psnr=30.0, ssim=0.99, mse=0.9, trial=2))
  (summary,) = summarise(rows)
  ends = [(summary[f'{metric}_low'], summary[f'{metric}_high']) for metric in ('ssim', 'mse')]
  assert ends == [(pytest.approx(0.693 - 1.277, abs=2e-3), 1), (0, 1)]
  half = stats.t.ppf(0.975, 2) * np.std([1.0, 30.0, 30.0], ddof=1) / np.sqrt(3)
  assert (summary['psnr_low'], summary['psnr_high']) == (0, pytest.approx(61 / 3 + half))
  assert formatting.plus_minus(summary, 'psnr') == f'20.3 ± {half:.1f}'


def test_unfinished_counts_runs_at_any_step_that_were_not_solved():
  rows = [row(trial=0, solved=False, **RECOVERED), row(trial=1, **RECOVERED), row(trial=2, solved=False)]
  assert summarise(rows)[0]['unfinished'] == 1
  assert summarise([*rows, row(trial=3, solved=False, verdict='above chance')])[0]['unfinished'] == 2


def test_worst_case_is_the_union_over_attacks():
  rows = [row(attack=attack, trial=t) for attack in 'ab' for t in range(5)]
  rows[0] |= RECOVERED  # a on trial 0
  rows[5] |= RECOVERED  # b on trial 0
  rows[8] |= RECOVERED  # b on trial 3
  (entry,) = worst_case(rows)
  assert (entry['recovered'], entry['n'], entry['runs'], entry['by']) == (2, 5, 10, ['b', 'a'])
  assert (entry['non_adaptive'], entry['adaptive'], entry['adaptive_attacks']) == (2, None, [])
  assert entry['success'] == 0.4
  assert (entry['success_low'], entry['success_high']) == pytest.approx(clopper_pearson(2, 5))
  assert entry['flags'] == []


def knows(adaptive, **changes):
  return row(knowledge='adaptive', adaptive=adaptive, defense='prune', change=0.5, **changes)


def test_who_knows_a_defense_runs_attacks_without_an_adaptive_form_as_they_are():
  rows = [row(defense='prune', trial=t, attack='b', **RECOVERED) for t in range(3)]
  rows += [row(defense='prune', trial=t, attack='a') for t in range(3)]
  assert worst_case(rows)[0]['adaptive'] is None
  (entry,) = worst_case([*rows, *(knows('masked', trial=t, attack='a') for t in range(3))])
  assert (entry['non_adaptive'], entry['adaptive']) == (3, 3)
  (entry,) = worst_case([*rows, *(knows('masked', trial=t, attack='b') for t in range(3))])
  assert (entry['non_adaptive'], entry['adaptive']) == (3, 0)


def test_each_attacker_has_its_own_summary(both):
  summaries = summarise(both.rows)
  assert [cases.case(summary) for summary in summaries] == list(both.reconstructions)
  for summary in summaries:
    rows = [r for r in both.rows if cases.case(r) == cases.case(summary)]
    assert summary['n'] == len(rows) == 4
    assert (
      summary['knowledge'] == ('adaptive' if len(cases.case(summary)) == 3 else 'non-adaptive') == rows[0]['knowledge']
    )
    assert summary['adaptive'] == rows[0]['adaptive']
    assert summary['psnr'] == pytest.approx(np.mean([r['psnr'] for r in rows if r['psnr'] is not None]))
    assert summary['sent'] == pytest.approx(rows[0]['sent'])
  (bare,) = summarise([row()])
  assert (bare['knowledge'], bare['adaptive'], bare['sent']) == ('non-adaptive', None, None)
  shares = summarise([row(sent=0.2), row(sent=0.4, trial=1)])
  assert shares[0]['sent'] == pytest.approx(0.3)


def test_the_strongest_recovers_most_and_then_reaches_the_highest_psnr():
  def summary(recovered, psnr):
    return {'recovered': recovered, 'psnr': psnr}

  assert cases.strongest([summary(1, 40.0), summary(2, 9.0), summary(0, 50.0)])['psnr'] == 9.0
  assert cases.strongest([summary(0, 7.0), summary(0, 9.0), summary(0, 8.0)])['psnr'] == 9.0
  assert cases.strongest([summary(0, None), summary(0, 5.0)])['psnr'] == 5.0
  assert cases.strongest([summary(0, None)])['psnr'] is None


def test_a_pair_is_the_non_adaptive_attacker_and_the_strongest_adaptive_one():
  rows = [
    row(defense='none'),
    row(defense='prune', psnr=99.0),
    knows('weak', psnr=30.0),
    knows('strong', **RECOVERED),
    knows('other', psnr=40.0),
    row(attack='b', defense='none'),
    {**knows('weak'), 'attack': 'b'},
  ]
  pairs = cases.paired(summarise(rows))
  assert {pair: [summary['adaptive'] for summary in group] for pair, group in pairs.items()} == {
    ('a', 'none'): [None], ('a', 'prune'): [None, 'strong'], ('b', 'none'): [None], ('b', 'prune'): ['weak'],
  }  # fmt: skip


def test_the_worst_case_is_that_of_any_attacker_adaptive_or_not():
  rows = [row(attack=attack, defense='prune', trial=t, change=0.5) for attack in 'ab' for t in range(5)]
  rows += [knows(adaptive, trial=t) for adaptive in ('weak', 'strong', 'none at all') for t in range(5)]
  rows[5] |= RECOVERED  # b, non-adaptive, on trial 0
  rows[10] |= RECOVERED  # weak on trial 0
  rows[17] |= RECOVERED  # strong on trials 2 and 4
  rows[19] |= RECOVERED
  (entry,) = worst_case(rows)
  assert (entry['recovered'], entry['n'], entry['runs']) == (3, 5, 25)
  assert (entry['non_adaptive'], entry['adaptive']) == (1, 3)
  assert entry['by'] == ['a · strong', 'b', 'a · weak']
  assert entry['adaptive_attacks'] == ['strong', 'weak']
  assert (entry['success_low'], entry['success_high']) == pytest.approx(clopper_pearson(3, 5))
  (entry,) = worst_case(rows[10:])
  assert (entry['non_adaptive'], entry['adaptive'], entry['recovered']) == (None, 3, 3)
  (entry,) = worst_case(rows[20:])
  assert (entry['non_adaptive'], entry['adaptive'], entry['by'], entry['adaptive_attacks']) == (None, 0, [], [])


def test_flags():
  prune = {'defense': 'prune', 'change': 0.5}
  works, fails = row(**RECOVERED), row()
  assert [e['flags'] for e in worst_case([works, row(**prune)])] == [[], []]
  assert [e['flags'] for e in worst_case([fails, row(**prune)])] == [['undefended run fails']] * 2
  assert worst_case([row(**prune)])[0]['flags'] == ['no undefended run']
  assert worst_case([works, row(defense='prune')])[1]['flags'] == ['defense changed nothing']
  rows = [works, row(**prune, verdict='inconclusive'), row(**prune, verdict='diverged', trial=1), row(**prune, trial=2)]
  assert worst_case(rows)[1]['flags'] == ['1 of 3 inconclusive', 'diverged 1']


def test_a_defense_that_changed_one_upload_is_not_called_idle():
  rows = [row(**RECOVERED), row(defense='prune', change=0.0), row(defense='prune', change=0.1, trial=1)]
  assert worst_case(rows)[1]['flags'] == []


def test_csv_reads_back(result):
  summaries = summarise(result.rows)
  lines = list(csv.DictReader(io.StringIO(summary_csv(result.rows))))
  assert len(lines) == len(summaries) == 8
  for line, summary in zip(lines, summaries, strict=True):
    assert line['defense'] == summary['defense']
    assert float(line['psnr']) == summary['psnr']
    assert int(line['inconclusive']) == summary['inconclusive']
  assert next(csv.DictReader(io.StringIO(summary_csv([row(change=None)]))))['change'] == ''
  assert summary_csv([]).strip() == 'attack,defense'


def test_csv_tells_attackers_apart(both):
  lines = list(csv.DictReader(io.StringIO(summary_csv(both.rows))))
  found = [(line['attack'], line['defense'], *filter(None, [line['adaptive']])) for line in lines]
  assert found == list(both.reconstructions)
  assert {line['knowledge'] for line in lines if line['adaptive']} == {'adaptive'}


def test_terminal_table_is_aligned_narrow_and_says_what_it_means(result):
  text = terminal_table(result)
  lines = text.splitlines()
  assert max(map(len, lines)) <= 110
  start = lines[0].index('worst verdict')
  for summary in summarise(result.rows):
    (line,) = [
      line for line in lines if line.strip().startswith(f'{summary["defense"]} ') and f'{summary["psnr"]:.1f} ' in line
    ]
    assert line[start:] == f'{summary[cases.named(summary["verdict"])]} {summary["verdict"]}'
    assert f'{summary["recovered"]} of 4' in line
  assert 'the attacks recover 4 of 4 images' in ' '.join(lines)
  assert '`' not in text


STRONGEST = {  # by how the fixture mixes them: (attack, defense): adaptive attack
  ('dlg(history=100)', 'prune(rate=0.9)'): 'masked+prior',
  ('csdlg(tv=1e-4)', 'prune(rate=0.9)'): 'masked+prior',
  ('csdlg(tv=1e-4)', 'laplace(scale=0.1)'): 'prior',
}


def test_attackers_are_ordered_by_the_trials_that_they_reach():
  rows = [row(), row(attack='b', trial=1), row(attack='b', trial=2), row(attack='b', trial=2, adaptive='weak')]
  assert cases.attackers(rows) == ['b', 'a', 'b · weak']


def test_terminal_table_shows_the_strongest_adaptive_attacker_below_the_non_adaptive_one(both):
  text = terminal_table(both)
  lines = text.splitlines()
  assert max(map(len, lines)) <= 110
  assert text.count('    adaptive: ') == 2 * 3  # one per attack and defense but 'none'
  assert '\nadaptive: prior: It does prior to laplace(scale=0.1).' in text  # what the names above stand for
  attack = None
  summaries = {cases.case(summary): summary for summary in summarise(both.rows)}
  for i, line in enumerate(lines):
    attack = line.split()[0] if line.startswith(('dlg', 'csdlg')) else attack
    if line.startswith('    adaptive: '):
      defense = lines[i - 1].split()[0] if 'gaussian' not in lines[i - 1] else both.config['defenses'][3]
      adaptive = line.split()[1]
      summary = summaries[attack, defense, adaptive]
      assert STRONGEST.get((attack, defense), adaptive) == adaptive
      assert f' {summary["psnr"]:.1f} ± ' in line
      assert line.endswith(f'{summary[cases.named(summary["verdict"])]} {summary["verdict"]}')
  assert 'control 11.2–12.7 ' in text.replace('\n', ' ')  # the thresholds of csdlg and of its other prior
  assert '1 NaN' in next(line for line in lines[lines.index(next(x for x in lines if x.startswith('csdlg'))) :]
                         if 'prune(rate=0.9)' in line)  # fmt: skip


def test_terminal_table_names_defenses_that_leave_traces(both):
  seen = [row | {'verdict': 'above chance', 'success': False} if row['defense'] != 'none' else row for row in both.rows]
  text = ' '.join(terminal_table(dataclasses.replace(both, rows=seen)).split())
  assert 'No picture, but images that are seen above chance: 4 of 4 under ' in text
  assert 'seen above chance' not in terminal_table(both)


def test_terminal_table_of_adaptive_attackers_alone_names_the_defense(knowing):
  lines = terminal_table(knowing).splitlines()
  assert lines[2].startswith('dlg(history=100)') and 'control 10.4–11.9' in lines[2]
  assert lines[3].startswith('  none  ')
  assert lines[4] == '  prune(rate=0.9)'
  assert lines[5].startswith('    adaptive: masked+prior ')
  assert max(map(len, lines)) <= 110


def test_terminal_table_closes_with_what_noise_guarantees(result):
  known = methods(defenses=['none', 'gaussian(stddev=0.1)', 'clip(norm=1)+gaussian(stddev=2)'])
  text = terminal_table(replace(result, methods=known))
  assert max(map(len, text.splitlines())) <= 110
  said = findings.guarantees(known)
  assert len(said) == 2
  for statement in said:
    assert str(statement).replace('`', '') in ' '.join(text.split())
  assert 'ε' not in terminal_table(replace(result, methods=methods(defenses=['none'])))


def test_terminal_table_wraps_long_names(result):
  long = '+'.join(f'prune(rate=0.{i})' for i in range(1, 9))
  rows = [r | {'defense': long if r['defense'].startswith('laplace') else r['defense']} for r in result.rows]
  lines = terminal_table(replace(result, rows=rows)).splitlines()
  assert max(map(len, lines)) <= 110
  for i in range(1, 9):
    assert sum(f'prune(rate=0.{i})' in line for line in lines) >= 2  # once per attack: nothing is cut away


def test_percentages_are_rounded_outwards():
  assert formatting.percent_range({'success_low': 0.3976, 'success_high': 1.0}) == '39–100 %'
  assert formatting.percent_range({'success_low': 0.0, 'success_high': 0.602}) == '0–61 %'
  assert formatting.percent_range({'success_low': 0.29, 'success_high': 0.57}) == '29–57 %'  # 100 · 0.29 < 29 in floats


@pytest.mark.parametrize(
  ('value', 'text'),
  [
    (None, '–'),
    (float('nan'), '–'),
    (0.0, '0'),
    (0.42, '0.42'),
    (2.9e-5, '2.9 × 10⁻⁵'),
    (1.2e9, '1.2 × 10⁹'),
    (float('inf'), '∞'),
    (float('-inf'), '−∞'),
  ],
)
def test_significant(value, text):
  assert formatting.significant(value) == text


@pytest.mark.parametrize(
  ('fraction', 'digits', 'text'),
  [(0, 0, '0 %'), (1, 1, '100.0 %'), (1 / 400, 0, '0.2 %'), (399 / 400, 0, '99.8 %'), (0.999, 0, '99.9 %'),
   (1e-4, 1, '0.01 %'), (1e-9, 0, '< 0.0001 %'), (1 - 1e-9, 0, '> 99.9999 %'), (None, 1, '–')],
)  # fmt: skip
def test_a_share_between_is_never_none_or_all(fraction, digits, text):
  assert formatting.percent(fraction, digits) == text


def test_an_upper_bound_is_rounded_up_and_no_further():
  assert [formatting.upwards(value) for value in (1.01, 1.1, 100 * 0.07, 9.96, 10.2, 0.0999)] == [
    '1.1', '1.1', '7.0', '10', '11', '0.10'
  ]  # fmt: skip
  assert formatting.number(float('-inf')) == '−∞' and formatting.upwards(0.0) == '0'


def test_a_lower_bound_is_rounded_down_until_it_shows_what_it_exceeds():
  assert formatting.exceeding(0.9951, 1.0) == ('0.99', '1.00')
  assert formatting.exceeding(1.0045, 1.004) == ('1.0045', '1.0040')
  assert formatting.exceeding(3.0, None) == ('3.00', '–') and formatting.exceeding(2.5, 1.0) == ('2.50', '1.00')
  assert formatting.significant(99.6) == '100' and formatting.significant(123.4) == '120'


def test_wrap_breaks_after_joints_and_loses_nothing():
  assert formatting.wrap('prune(rate=0.9)+laplace(scale=0.1)', 20) == ['prune(rate=0.9)+', 'laplace(scale=0.1)']
  name = 'x' * 50 + '+' + 'y' * 7
  assert ''.join(formatting.wrap(name, 12)) == name
  assert max(map(len, formatting.wrap(name, 12))) <= 12
  assert formatting.wrap('fragmentation_random(ratio=0.4)', 30) == ['fragmentation_random(', 'ratio=0.4)']
  assert formatting.wrap('prune(rate=0.9)+clip(norm=1)', 22) == ['prune(rate=0.9)+', 'clip(norm=1)']


def test_no_negative_zero():
  assert (formatting.number(-0.004, 2), formatting.number(-0.006, 2)) == ('0.00', '-0.01')


def test_a_adaptive_attack_that_differs_between_defenses_is_explained_for_each(both):
  words = {'prune(rate=0.9)': {'prior': 'It weights by 1.'}, 'laplace(scale=0.1)': {'prior': 'It weights by 2.'}}
  pairs = {('a', defense): [{'defense': defense, 'adaptive': 'prior'}] for defense in words}
  text = terminal._legend(pairs, words)
  assert text == [f'adaptive: prior under {defense}: {of["prior"]}' for defense, of in words.items()]
  assert terminal._legend(pairs, {defense: {'prior': 'It is one.'} for defense in words}) == [
    'adaptive: prior: It is one.'
  ]


def test_a_result_in_place_of_its_rows_is_named(both):
  with pytest.raises(gl.UsageError, match=r'give its rows, as in summarise\(result\.rows\)'):
    summarise(both)
