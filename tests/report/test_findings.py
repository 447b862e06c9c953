"""What is found in the figures of an audit, as values; and each sentence once."""

import numpy as np
import pytest

import gradleak as gl
from gradleak.audit import verdict
from gradleak.report import findings, privacy, words
from gradleak.report.words import found
from tests.report import facts

SINGLE = {'batch_size': 1}


def entry(
  defense='none',
  recovered=0,
  n=4,
  inconclusive=0,
  diverged=0,
  flags=(),
  non_adaptive=None,
  adaptive=None,
  adaptive_attacks=(),
):
  return {
    'defense': defense, 'recovered': recovered, 'n': n, 'runs': n, 'searches': n,
    'inconclusive': inconclusive, 'diverged': diverged,
    'verdict': 'exact' if recovered else 'inconclusive' if inconclusive else 'diverged' if diverged else 'nothing seen',
    'reached': dict.fromkeys(('exact', 'recognisable', 're-identified', 'above chance'), recovered),
    'nothing_seen': 0, 'success': recovered / n, 'success_low': 0.1, 'success_high': 0.9, 'by': [],
    'flags': list(flags), 'non_adaptive': recovered if non_adaptive is None else non_adaptive, 'adaptive': adaptive,
    'adaptive_attacks': list(adaptive_attacks),
  }  # fmt: skip


def summary(attack='dlg', defense='none', recovered=4, psnr=50.14, unfinished=0, diverged=0, adaptive=None):
  return {
    'attack': attack, 'defense': defense, 'recovered': recovered, 'n': 4, 'psnr': psnr, 'control_psnr': 9.83,
    'unfinished': unfinished, 'diverged': diverged, 'adaptive': adaptive, 're_identified': 0, 'above_chance': 0,
  }  # fmt: skip


def values(made):
  """Returns [(name, defenses that it is of)], those of its parts in its place where it has parts."""
  told = []
  for one in made:
    parts = [part for key in ('counts', 'places') for part in one.facts.get(key, ())]
    told.append((one.name.partition('.')[2], [part.facts['defenses'] for part in parts] or one.facts.get('defenses')))
  return told


def defended(*entries, config=SINGLE):
  return values(findings.defended([entry(recovered=4), *entries], config))


UNDEFENDED = entry(recovered=3), summary()
CONTROLS = [{'attack': 'dlg', 'trial': trial, 'psnr': 9.0} for trial in range(64)]


def cautions(*summaries, worst=(), controls=CONTROLS, methods=None):
  return findings.cautions(summaries or [summary()], [entry(recovered=4), *worst], controls, methods or {})


def test_undefended_names_the_strongest_attack_with_its_control():
  summaries = [summary('weak', recovered=3, psnr=60.0), summary('dlg', recovered=4), summary('dlg', 'prune', psnr=99.0)]
  (one,) = findings.undefended(summaries, [entry(recovered=4)], SINGLE)
  assert one.facts['best'] is summaries[1]
  _, weak = findings.undefended([summary(recovered=1)], [entry(recovered=1)], SINGLE)
  assert weak.name == 'findings.weak'


@pytest.mark.parametrize(
  ('config', 'n', 'words'),
  [
    (SINGLE, 4, '2 of 4 images ('),
    ({'batch_size': 8}, 4, '2 of 4 batches of 8 images ('),
    (SINGLE, 1, '1 of 1 image ('),
    ({'batch_size': 8}, 1, '1 of 1 batch of 8 images ('),
  ],
)
def test_units(config, n, words):
  assert words in str(findings.undefended([summary()], [entry(recovered=min(2, n), n=n)], config)[0])


@pytest.mark.parametrize(('worst', 'name'), [([entry(), entry('a')], 'fails'), ([entry('a')], 'no_undefended')])
def test_no_defense_is_credited_where_the_undefended_run_fails_or_is_missing(worst, name):
  made = findings.sentences([summary(adaptive='x')], worst, SINGLE, {})
  assert [one.name for one in made] == [f'findings.{name}', 'findings.other_attacks']
  broken = [entry(), entry('prune', recovered=4, non_adaptive=0, adaptive=4, adaptive_attacks=['masked'])]
  assert values(findings.defended(broken, SINGLE))[0] == ('leaking', [['prune']]) and not findings.broken(
    broken, SINGLE
  )


def test_defenses_are_grouped_by_what_was_found():
  known = {'adaptive': 0}
  assert defended(
    entry('prune', recovered=3), entry('laplace'), entry('topk', inconclusive=2, diverged=1),
    entry('gs', inconclusive=1),
    entry('noop', recovered=4, flags=['defense changed nothing']),
  ) == [
    ('leaking', [['prune']]), ('searched', ['laplace']), ('unmet', ['laplace']), ('unsolved', ['topk', 'gs']),
    ('idle', ['noop']),
  ]  # fmt: skip
  closed = entry('fidel', **known) | {'searches': 0}
  assert defended(entry('a', **known), closed, entry('b')) == [
    ('searched', ['a', 'b']), ('closed', ['fidel']), ('tried_of', ['a', 'fidel']), ('unmet', ['b']),
  ]  # fmt: skip
  assert defended(entry('a', **known)) == [('searched', ['a']), ('tried', ['a'])]
  non_adaptive = {'knowledge': 'non-adaptive'}
  assert defended(entry('a'), config=non_adaptive)[-1] == ('untried', ['a'])
  assert defended(entry('a'), entry('b', **known), config=non_adaptive)[-1] == ('untried_of', ['a'])
  unsolved = [entry('a', inconclusive=1, **known), entry('b', inconclusive=1)]
  assert defended(*unsolved) == [('unsolved', ['a', 'b']), ('tried_of', ['a'])]


def test_a_count_is_of_the_uploads_of_its_own_defense():
  found_of = findings.defended(
    [
      entry(recovered=4),
      entry('weak', 2, n=64), entry('late', 2, n=2),
      entry('a', n=64), entry('b', n=8),
      entry('c', n=64, inconclusive=1), entry('d', n=8, inconclusive=1),
    ],
    SINGLE,
  )  # fmt: skip
  told = ' '.join(str(one) for one in found_of).replace('`', '')
  assert 'recover 2 of 2 under late (' in told and '2 of 64 under weak (' in told
  assert 'Under a none of the 64 images is' in told and 'Under b none of the 8 images is' in told
  assert 'Under c and d none of the images is recovered' in told
  several = [entry(recovered=4)] + [
    entry(name, 4, n=n, non_adaptive=0, adaptive=4, adaptive_attacks=['x']) for name, n in (('a', 64), ('b', 8))
  ]
  said = str(*findings.broken(several, SINGLE)).replace('`', '')
  assert 'Under 2 defenses none of the images is recovered' in said
  assert '4 of 8 under b' in said and '4 of 64 under a' in said


def test_not_solved_is_never_called_protection():
  worst = [entry(recovered=4), entry('prune', inconclusive=1), entry('laplace', inconclusive=4)]
  (one,) = findings.defended(worst, SINGLE)
  assert (one.name, one.facts['failed'], one.facts['runs']) == ('findings.unsolved', 5, 8)
  assert findings.caution(worst).name == 'findings.other_attacks_unsolved'
  assert findings.caution([entry(recovered=4)]).name == 'findings.other_attacks'
  for failed, said in (
    ({'inconclusive': 1}, 'starts; runs that are “inconclusive” show no protection at all.'),
    ({'diverged': 1}, 'starts; runs that are “diverged” show no protection at all.'),  # nothing was said of these
    ({'inconclusive': 1, 'diverged': 1}, 'runs that are “inconclusive” or “diverged” show no protection at all.'),
  ):
    assert str(findings.caution([entry(recovered=4), entry('prune', **failed)])).endswith(said)


def test_cautions():
  assert cautions() == []
  for controls in (CONTROLS[:63], 2 * CONTROLS[:63]):  # one pool, or two
    assert '63 runs for `dlg`' in str(cautions(controls=controls)[0])
  unfinished, diverged = cautions(summary(unfinished=1, diverged=2))
  assert (unfinished.name, unfinished.facts['n'], diverged.facts['n']) == ('findings.unfinished', 1, 2)
  gs = [control | {'attack': 'gs'} for control in CONTROLS]
  (failing,) = cautions(summary(), summary('gs', recovered=0), controls=CONTROLS + gs)
  assert failing == found('findings.failing', attacks=['gs'])
  assert cautions(controls=[]) == [found('findings.no_control', attacks=['dlg'])]
  assert cautions(summary() | {'candidates': 99}) == []
  assert cautions(summary() | {'candidates': 96}) == [found('findings.few_candidates', needed=99, others=96)]


def test_it_is_said_where_knowing_the_defense_helps_nobody():
  worst = [entry('prune', 4, non_adaptive=4, adaptive=1), entry('clip', 4, non_adaptive=4, adaptive=4)]
  assert values(cautions(worst=worst)) == [('outdone', [['prune']])]
  assert (
    findings.outdone([entry(recovered=4, adaptive=1), entry('laplace', 2, non_adaptive=2)]) == []
  )  # none, and nobody knows


def test_knowing_the_defense_helps_where_it_adds_uploads_although_it_shows_fewer():
  """One who knows it recovers one upload, the others three more; the worst case of four was called that of three."""
  helped = entry('prune', 4, non_adaptive=3, adaptive=1, adaptive_attacks=['masked'])
  (one,) = findings.outdone([helped])
  assert str(one) == (
    'Attackers who know the defense recover less than those who do not, but other uploads: 1 of 4 in place of 3, '
    'together 4, under `prune`.'
  )
  idle = entry('clip', 3, non_adaptive=3, adaptive=1)
  assert [one.name for one in findings.outdone([helped, idle])] == ['findings.outdone', 'findings.outdone_partly']


def test_attacks_that_can_use_nothing_of_what_is_known_are_named():
  given = [summary(), summary('dlg', 'clip'), summary('gs', 'clip'), summary('gs', 'clip', adaptive='clipped')]
  assert values(findings.unsuited(given, {})) == [('unsuited', [['clip']])]
  assert (
    findings.unsuited(given, {'knowledge': 'non-adaptive'})
    == findings.unsuited(given, {'adaptive_attacks': ['x']})
    == []
  )
  assert findings.unsuited(given[:3], {}) == []  # nobody knows a defense: `non-adaptive` says so


def test_a_caution_on_transformed_samples_follows_from_the_place_and_not_from_the_label():
  known = facts.of_defenses({'moved': gl.defenses.ats(policy='invert'), 'ats(policy=invert)': gl.defenses.clip(norm=1)})
  (moved,) = cautions(worst=map(entry, known['defenses']), methods=known)
  assert moved == found('findings.transformed', defenses=['moved'], reached='')
  (near,) = cautions(summary(defense='moved') | {'trained_psnr': 20.0}, worst=[entry('moved')], methods=known)
  assert 'the reconstructions reach 20.0 dB by `dlg` under `moved`.' in str(near)


def test_a_defense_that_stops_non_adaptive_attackers_alone():
  prune = entry('prune', recovered=4, non_adaptive=0, adaptive=4, adaptive_attacks=['strong', 'weak'])
  (one,) = findings.broken([entry(recovered=4), prune], {'batch_size': 8})
  assert (one.facts['none_of'], one.facts['means']) == ('none of the 4 batches of 8 images is', 'most by `strong`')
  single = [
    entry(recovered=1, n=1),
    entry('prune', recovered=1, n=1, non_adaptive=0, adaptive=1, adaptive_attacks=['masked']),
  ]
  (one,) = findings.broken(single, SINGLE)
  assert str(one).startswith('Under `prune` the one image is not recovered by a non-adaptive')
  assert '1 of 1 (10–90 %) is by an adaptive one' in str(one)


def test_the_headline_is_the_worst_case_and_says_what_the_non_adaptive_get():
  leaking = entry('prune', recovered=3, non_adaptive=1, adaptive=3, adaptive_attacks=['masked'])
  assert defended(leaking) == [('leaking', [['prune']]), ('helped', [['prune']])]
  for no_help in ({'non_adaptive': 3, 'adaptive': 2}, {'non_adaptive': 3, 'adaptive': None}, {'non_adaptive': None}):
    assert defended(leaking | no_help) == [('leaking', [['prune']])]


def test_many_defenses_make_few_sentences():
  worst = [entry(recovered=8, n=8)]
  for i in range(4):
    worst.append(
      entry(f'broken{i}', recovered=8 - i // 2, n=8, non_adaptive=0, adaptive=8 - i // 2, adaptive_attacks=['masked'])
    )
    worst.append(
      entry(f'leaking{i}', recovered=5 + i // 2, n=8, non_adaptive=5, adaptive=5 + i // 2, adaptive_attacks=['masked'])
    )
    worst.append(entry(f'silent{i}', n=8, adaptive=0 if i else None))
  broken, leaking, helped, *_ = made = findings.defended(worst, SINGLE)
  names = [[f'{kind}{i}' for i in numbers] for kind, numbers in (('broken', (0, 1)), ('broken', (2, 3)))]
  assert values([broken]) == [('broken_several', names)]
  assert values([leaking, helped]) == [
    ('leaking', [['leaking2', 'leaking3'], ['leaking0', 'leaking1']]), ('helped', [['leaking2', 'leaking3']]),
  ]  # fmt: skip
  assert str(leaking).endswith('recover 6 of 8 under `leaking2` and `leaking3` (10–90 %); 5 of 8 under `leaking0` and '
                               '`leaking1` (10–90 %).')  # fmt: skip
  assert [one.name for one in made[3:]] == ['findings.searched', 'findings.tried_of', 'findings.unmet']


def test_guarantees_and_remarks_name_defenses_together_by_their_whole_labels():
  known = facts.of_defenses(['gaussian(stddev=1)', 'clip(norm=1)+gaussian(stddev=1)', 'laplace(scale=1)'])
  unbounded, bounded = findings.guarantees(known)
  assert unbounded.facts['defenses'] == ['gaussian(stddev=1)', 'laplace(scale=1)']
  ((label, statement),) = privacy.statements(facts.of_defenses(['clip(norm=1)+gaussian(stddev=1)'])).items()
  assert str(bounded) == f'`{label}`: {statement}.' and findings.guarantees({}) == []
  known = facts.of_defenses({'a: b': gl.defenses.gaussian(stddev=1)})
  assert findings.guarantees(known)[0].facts['defenses'] == ['a: b']
  known = {'defenses': {'none': {'remark': ''}, 'a': {'remark': 'first time'}, 'b': {'remark': 'first time'}}}
  assert list(map(str, findings.remarks(known))) == ['`a` and `b`: first time.'] and not findings.remarks({})
  assert findings.sentences([summary()], [UNDEFENDED[0]], SINGLE, known)[0] == findings.remarks(known)[0]


def test_where_only_non_adaptive_attackers_ran_this_is_said_first():
  rows = [summary(), summary(defense='prune')]
  assert findings.sentences(rows, [entry(recovered=4)], SINGLE, {})[0].name == 'findings.non_adaptive'
  assert (
    findings.non_adaptive([*rows, summary(defense='prune', adaptive='masked')]) == findings.non_adaptive(rows[:1]) == []
  )


def test_an_attack_that_does_no_better_than_on_noise_shows_its_prior():
  controls = [{'attack': name, 'trial': i, 'psnr': 9.7 + 0.1 * (i % 2)} for name in ('ggl', 'dlg') for i in range(64)]
  given = [
    {**summary('ggl', recovered=4), 'tier': 'D'},
    {**summary('ggl', 'prune', recovered=0, psnr=9.74), 'tier': 'D'},
    {**summary('ggl', 'prune', recovered=0, psnr=9.7, adaptive='masked'), 'tier': 'D'},
    {**summary('ggl', 'gaussian', recovered=0, psnr=9.76), 'tier': 'D'},  # beyond the control, 9.75 on average
    {**summary('ggl', 'soteria', recovered=0, psnr=9.0), 'tier': 'D', 'above_chance': 1},  # an upload shows something
    {**summary('dlg', 'prune', recovered=0, psnr=5.0), 'tier': 'B'},
    {**summary('dlg', recovered=4), 'tier': 'B'},
  ]
  (note,) = cautions(*given, controls=controls)
  assert [part.facts for part in note.facts['places']] == [{'attack': 'ggl', 'defenses': ['prune']}]
  assert not cautions(*given, controls=[{**control, 'psnr': None} for control in controls])


def test_what_is_seen_without_a_recovered_sample_is_said_of_no_other_defense():
  """Beside rows that are recovered under one defense stood “No row is recovered, but” others."""
  told = [words.texts()['findings'][name] for name in ('seen', 'reidentified')]
  assert all(text.startswith('Where no image is recovered, {unit} are ') for text in told)


RUN = {
  'attack': 'dlg', 'control_psnr': 9.8, 'control_pearson': 0.5, 'revealed': 0, 'recognised': 0, 'identified': 0,
  'candidates': 99, 'diverged': False, 'objective': 1.0, 'objective_at_truth': 1.0, 'objective_start': 2.0,
}  # fmt: skip


def test_false_alarms_are_those_of_runs_that_the_others_do_not_explain():
  runs = [{**RUN, 'trial': i, 'psnr': 9.0 + i % 3, 'pearson': 0.1 * (i % 4)} for i in range(32)]
  start = 'Of 32 uploads of noise, each judged by the others and by one attacker, '
  found = [{**runs[0], 'identified': 1, 'pearson': 0.9}, {**runs[1], 'psnr': 14.0, 'pearson': 0.9}, *runs[2:]]
  for given, said in (
    (runs, 'none comes to any level (95 % interval 0–11 %).'),
    (found[:1] + runs[1:], '1 comes to “re-identified”: a false alarm (95 % interval 0–17 %).'),
    (found, '1 comes to “re-identified” and 1 comes to “above chance”: false alarms (95 % interval 0–21 %).'),
  ):
    assert list(map(str, findings.alarms(given))) == [start + said]
  assert findings.alarms([]) == []
  # One that is beyond the others, and not beyond a bound that it raises itself.
  few = [{**RUN, 'trial': i, 'psnr': 9.0, 'pearson': 0.05 + 0.1 * (i % 2)} for i in range(16)]
  few.append({**RUN, 'trial': 16, 'psnr': 11.0, 'pearson': 0.36})
  assert verdict.threshold(few).correlation > 0.36
  assert '1 comes to “above chance”: a false alarm (' in str(findings.alarms(few)[0])


@pytest.mark.parametrize('count', [1, 2, 3])
def test_as_many_runs_are_false_alarms_as_exceed_the_others(count):
  """Three of 32 with a recognised image are not beyond the percentile that they raise themselves."""
  runs = [
    {**RUN, 'trial': i, 'psnr': 9.0, 'pearson': 0.1 * (i % 4), 'recognised': int(i < count), 'candidates': 999,
     'steps': 100, 'ssim': 0.1} for i in range(32)
  ]  # fmt: skip
  apart = [verdict.judge(row, verdict.threshold([one for one in runs if one is not row])) for row in runs]
  assert [row['verdict'] for row in verdict.false_alarms(runs)] == [row['verdict'] for row in apart]
  assert verdict.united(runs).reached['recognisable'] == count


def test_a_control_run_that_two_stages_share_counts_once():
  level = np.random.default_rng(0).normal(0, 0.1, 15)
  level = [0.355, *(0.1 * (level - level.mean()) / level.std(ddof=1))]  # 3.55 deviations above the others
  runs = [
    {**RUN, 'trial': i, 'psnr': 9.0 + 2 * (i == 0), 'pearson': value, 'identified': int(i == 0)}
    for i, value in enumerate(level)
  ]
  staged = [{**row, 'stage': stage} for stage in ('matching', 'averaged rounds') for row in runs]
  assert verdict.united(staged) == verdict.united(runs)
  assert verdict.united(runs).attackers == 1


def test_false_alarms_are_of_the_worst_attacker_as_the_verdict_on_a_defense_is():
  runs = [
    {**RUN, 'attack': name, 'trial': i, 'psnr': 9.0 + i % 3, 'pearson': 0.1 * (i % 4)}
    for name in ('dlg', 'csdlg', 'dga')
    for i in range(32)
  ]
  for place in (3, 32 + 7, 64 + 11):  # each attacker is mistaken once, of another upload of noise
    runs[place] |= {'psnr': 14.0, 'pearson': 0.9}
  assert verdict.united(runs).reached == {'exact': 0, 'recognisable': 0, 're-identified': 0, 'above chance': 3}
  (one,) = findings.alarms(runs, [{'attackers': 3}])
  assert (
    one.facts['n'] == 32 and one.facts['by'].facts == {'attackers': 3} and '3 come to “above chance”: false' in str(one)
  )
  runs[32 + 3] |= {'psnr': 14.0, 'pearson': 0.9}  # two mistakes about one upload are one false alarm
  assert verdict.united(runs).reached['above chance'] == 3
  (ranked,) = findings.alarms(runs, named={5, 7})  # one of which an attacker brings to “above chance”
  assert 'as a defense is, and by rankings of candidates, 2 come to “re-identified” and 2 come to' in str(ranked)
  assert '2 come to “above chance”: false alarms (95 % interval' in str(ranked)
  _, many = findings.alarms(runs, [{'attackers': 9}])
  assert 'met by up to 9 attackers' in str(many) and 'in at most 1.3 % of uploads' in str(many)


def test_a_threshold_does_not_depend_on_the_order_of_its_runs():
  """Processes that share an audit bring their control runs in another order."""
  shown = np.random.default_rng(0).uniform(-0.3, 0.6, 24).tolist()
  columns = {'psnr': 9.0, 'revealed': 0, 'recognised': 0, 'identified': 0}
  bounds = [verdict.threshold([{**columns, 'pearson': each} for each in shown[k:] + shown[:k]]) for k in range(24)]
  assert len({bound.correlation for bound in bounds}) == 1


@pytest.mark.parametrize(
  ('given', 'sentence'),
  [
    (
      findings.undefended([UNDEFENDED[1]], [UNDEFENDED[0]], SINGLE)[0],
      'Without a defense, the attacks recover 3 of 4 images (95 % interval 10–90 %); `dlg` reaches 50.1 dB on average. '
      'On noise in place of an upload (the null-gradient control) the 95th percentile of its runs is 9.8 dB.',
    ),
    (
      found('findings.broken', defenses=['a'], none_of='none of the 4 images is', entry=UNDEFENDED[0], means='`x`'),
      'Under `a` none of the 4 images is recovered by a non-adaptive attacker, but 3 of 4 (10–90 %) are by an adaptive '
      'one, who knows it (`x`).',
    ),
    (
      found('findings.unsolved', defenses=['a', 'b'], none_of='none is', failed=5, runs=8, n=2),
      'Under `a` and `b` none is recovered, but 5 of 8 runs failed as an optimisation (“inconclusive” or diverged): '
      'this does not show that they protect.',
    ),
    (
      found('findings.count_means', k=7, n=8, defenses=['a'], entry=UNDEFENDED[0], means='`x`'),
      '7 of 8 under `a` (10–90 %; `x`)',
    ),
    (
      found('findings.instead', entry=entry(non_adaptive=4, adaptive=1), defenses=['a']),
      '1 of 4 in place of 4 under `a`',
    ),
    (
      found('findings.few_controls', few=['x'], enough=64),
      'The null-gradient control is small (x): with fewer than 64 the threshold is uncertain.',
    ),
    (
      found('findings.fails', none_of='none is', above=found('findings.above', seen=3, n=4)),
      'Even without a defense none is recovered (3 of 4 are above chance): this setting proves nothing about any '
      'defense, because the attacks show no picture without one, too.',
    ),
    (
      found('findings.unfinished', n=1),
      'In 1 run that shows something of the images the attack had not converged: more steps may show more.',
    ),
  ],
  ids=lambda value: getattr(value, 'name', ''),
)  # fmt: skip
def test_sentences(given, sentence):
  assert str(given) == sentence
