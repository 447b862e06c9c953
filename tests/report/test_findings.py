import numpy as np
import pytest

import gradleak as gl
from gradleak.audit import verdict
from gradleak.report import findings, privacy
from tests.report import facts

SINGLE = {'batch_size': 1}


def entry(defense='none', recovered=0, n=4, not_solved=0, diverged=0, flags=(), unaware=None, aware=None, counters=()):
  return {
    'defense': defense, 'recovered': recovered, 'n': n, 'runs': n, 'searches': n,
    'not_solved': not_solved, 'diverged': diverged,
    'verdict': 'exact' if recovered else 'not solved' if not_solved else 'diverged' if diverged else 'nothing seen',
    'reached': dict.fromkeys(('exact', 'recognisable', 'identifying', 'traces'), recovered),
    'nothing_seen': 0, 'success': recovered / n, 'success_low': 0.1, 'success_high': 0.9, 'by': [],
    'flags': list(flags), 'unaware': recovered if unaware is None else unaware, 'aware': aware,
    'counters': list(counters),
  }  # fmt: skip


def summary(attack='dlg', defense='none', recovered=4, psnr=50.14, unfinished=0, diverged=0, counter=None):
  return {
    'attack': attack, 'defense': defense, 'recovered': recovered, 'n': 4, 'psnr': psnr, 'control_psnr': 9.83,
    'unfinished': unfinished, 'diverged': diverged, 'counter': counter, 'identifying': 0, 'traces': 0,
  }  # fmt: skip


def paragraph(worst, summaries=None, config=SINGLE, methods=None):
  return ' '.join(findings.sentences(summaries or [summary()], worst, config, methods or {}))


def test_undefended_names_the_strongest_attack_with_its_control():
  summaries = [summary('weak', recovered=3, psnr=60.0), summary('dlg', recovered=4), summary('dlg', 'prune', psnr=99.0)]
  text = findings.undefended(summaries, [entry(recovered=4)], SINGLE)
  assert 'the attacks recover 4 of 4 images (95 % interval 10–90 %)' in text
  assert '`dlg` reaches 50.1 dB on average' in text
  assert 'On noise in place of an upload' in text and 'the 95th percentile of its runs is 9.8 dB.' in text
  assert 'means little' not in text


def test_a_weak_undefended_baseline_is_said():
  assert 'less than half' in findings.undefended([summary(recovered=1)], [entry(recovered=1)], SINGLE)


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
  assert words in findings.undefended([summary()], [entry(recovered=min(2, n), n=n)], config)


@pytest.mark.parametrize('worst', [[entry(), entry('prune')], [entry('prune')]])
def test_no_defense_is_credited_where_the_undefended_run_fails_or_is_missing(worst):
  text = paragraph(worst)
  assert 'proves nothing' in text or 'nothing here shows' in text
  assert 'singles' not in text
  assert '`prune`' not in text


def test_defenses_are_grouped_by_what_was_found():
  worst = [
    entry(recovered=4),
    entry('prune', recovered=3),
    entry('laplace'),
    entry('topk', not_solved=2, diverged=1),
    entry('noop', recovered=4, flags=['defense changed nothing']),
  ]
  leaking, withstood, knowing, unsolved, idle = findings.defended(worst, SINGLE)
  assert leaking == 'With a defense, they still recover 3 of 4 under `prune` (10–90 %).'
  assert withstood.startswith('Under `laplace` none of the 4 images is recovered (10–90 %), although')
  assert knowing == 'No counter-attack to `laplace` is known here, and one who knows the defense may do better.'
  assert unsolved.startswith('Under `topk` none of the 4 images is recovered, but 3 of 4 runs failed')
  assert unsolved.endswith('this does not show that it protects.')
  assert idle.startswith('`noop` changed nothing')


def test_not_solved_is_never_called_protection():
  worst = [entry(recovered=4), entry('prune', not_solved=1), entry('laplace', not_solved=4)]
  (text,) = findings.defended(worst, SINGLE)
  assert '`prune` and `laplace`' in text
  assert '5 of 8 runs failed' in text
  assert text.endswith('does not show that they protect.')
  assert 'no protection at all' in findings.caution(worst)
  assert 'not solved' not in findings.caution([entry(recovered=4)])


def test_cautions():
  worst = [entry(recovered=4)]
  controls = [{'attack': 'dlg', 'trial': trial, 'psnr': 9.0} for trial in range(64)]
  assert findings.cautions([summary()], worst, controls, {}) == []
  (few,) = findings.cautions([summary()], worst, controls[:63], {})
  assert '63 runs for `dlg`' in few
  assert '63 runs for `dlg`' in findings.cautions([summary()], worst, 2 * controls[:63], {})[0]  # two pools
  (bare,) = findings.cautions([summary()], worst, [], {})
  assert 'No null-gradient control was run for `dlg`' in bare
  unfinished, diverged = findings.cautions([summary(unfinished=1, diverged=2)], worst, controls, {})
  assert '1 run that shows something ' in unfinished
  assert '2 runs diverged' in diverged
  gs = [control | {'attack': 'gs'} for control in controls]
  (failing,) = findings.cautions([summary(), summary('gs', recovered=0)], worst, controls + gs, {})
  assert '`gs`' in failing
  assert '`dlg`' not in failing
  assert findings.cautions([summary() | {'candidates': 99}], worst, controls, {}) == []
  (unjudged,) = findings.cautions([summary() | {'candidates': 96}], worst, controls, {})
  assert unjudged.endswith('is not judged: this needs 99 candidates; there are 96.')


def test_it_is_said_where_knowing_the_defense_helps_nobody():
  worst = [entry(recovered=4), entry('prune', 4, unaware=4, aware=1), entry('clip', 4, unaware=4, aware=4)]
  (text,) = findings.outdone(worst)
  assert '1 of 4 in place of 4 under `prune`. ' in text and 'clip' not in text
  assert text in findings.cautions([summary()], worst, [], {})
  assert findings.outdone([entry(recovered=4, aware=1), entry('laplace', 2, unaware=2)]) == []  # none, and nobody knows


def test_attacks_that_can_use_nothing_of_what_is_known_are_named():
  given = [summary(), summary('dlg', 'clip'), summary('gs', 'clip'), summary('gs', 'clip', counter='clipped')]
  assert findings.unsuited(given, {}) == [
    'Knowing the defense changes nothing for `dlg` under `clip`: no counter-measure suits the attack.'
  ]
  assert findings.unsuited(given, {'knowledge': 'unaware'}) == findings.unsuited(given, {'counters': ['x']}) == []
  assert findings.unsuited(given[:3], {}) == []  # nobody knows a defense: `unaware` says so


def test_traces_without_a_defense_are_said():
  seen = {'exact': 0, 'recognisable': 0, 'identifying': 0, 'traces': 3}
  text = findings.undefended([summary(recovered=0)], [entry() | {'reached': seen}], SINGLE)
  assert 'none of the 4 images is recovered (3 of 4 leave traces): this setting proves nothing' in text


def test_a_caution_on_transformed_samples_follows_from_the_place_and_not_from_the_label():
  known = facts.of_defenses({'moved': gl.defenses.ats(policy='invert'), 'ats(policy=invert)': gl.defenses.clip(norm=1)})
  controls = [{'attack': 'dlg', 'trial': trial} for trial in range(64)]
  (moved,) = findings.cautions([summary()], [entry(recovered=4), *map(entry, known['defenses'])], controls, known)
  assert moved.startswith('Under `moved` the client trains on transformed images') and 'pictures' in moved


def test_a_defense_that_stops_unaware_attackers_alone():
  worst = [entry(recovered=4), entry('prune', recovered=4, unaware=0, aware=4, counters=['masked+prior'])]
  (text,) = findings.defended(worst, SINGLE)
  assert text == (
    '`prune` hides all 4 images from an attacker who is unaware of it, but 4 of 4 (10–90 %) are recovered by one who '
    'knows it (`masked+prior`).'
  )
  assert findings.broken(worst, SINGLE) == [text]
  worst[1]['counters'] = ['strong', 'weak']
  assert '(most by `strong`)' in findings.defended(worst, SINGLE)[0]
  one = [entry(recovered=1, n=1), entry('prune', recovered=1, n=1, unaware=0, aware=1, counters=['masked'])]
  assert findings.broken(one, SINGLE)[0].startswith('`prune` hides the one image from')
  assert '1 of 1 (10–90 %) is recovered' in findings.broken(one, SINGLE)[0]
  assert 'hides all 4 batches of 8 images from' in findings.broken(worst, {'batch_size': 8})[0]


def test_nothing_is_hidden_where_the_undefended_run_fails():
  worst = [entry(), entry('prune', recovered=4, unaware=0, aware=4, counters=['masked'])]
  (text,) = findings.defended(worst, SINGLE)[:1]
  assert 'hides' not in text
  assert 'they still recover 4 of 4 under `prune`' in text
  assert findings.broken(worst, SINGLE) == []


def test_the_headline_is_the_worst_case_and_says_what_the_unaware_get():
  worst = [entry(recovered=4), entry('prune', recovered=3, unaware=1, aware=3, counters=['masked'])]
  leaking, unaware = findings.defended(worst, SINGLE)
  assert leaking == 'With a defense, they still recover 3 of 4 under `prune` (10–90 %).'
  assert unaware == 'An attacker who is unaware of the defense recovers no more than 1 of 4 under `prune`.'
  for no_help in ({'unaware': 3, 'aware': 2}, {'unaware': 3, 'aware': None}):
    assert findings.defended([worst[0], worst[1] | no_help], SINGLE) == [leaking]
  alone = worst[1] | {'unaware': None}  # no unaware attacker was run: nothing is hidden from one
  assert findings.defended([worst[0], alone], SINGLE) == [leaking]


@pytest.mark.parametrize('failure', [{}, {'not_solved': 1}], ids=['protected', 'not solved'])
def test_aware_attackers_that_failed_are_mentioned(failure):
  tried, untried = entry('prune', aware=0, **failure), entry('laplace', **failure)
  text = paragraph([entry(recovered=4), tried])
  assert 'these images. Attackers who know the defense were tried and failed, too.' in text or failure
  assert 'Attackers who know the defense were tried and failed, too.' in text
  assert 'may do better' not in text
  text = paragraph([entry(recovered=4), tried, untried])
  assert 'Attackers who know the defense of `prune` were tried and failed, too.' in text or failure
  assert ('No counter-attack to `laplace` is known here' in text) == (not failure)
  text = paragraph([entry(recovered=4), untried])
  assert 'were tried' not in text
  assert ('No counter-attack to `laplace` is known here' in text) == (not failure)


def test_many_defenses_make_few_sentences():
  worst = [entry(recovered=8, n=8)]
  for i in range(4):
    worst.append(entry(f'broken{i}', recovered=8 - i // 2, n=8, unaware=0, aware=8 - i // 2, counters=['masked']))
    worst.append(entry(f'leaking{i}', recovered=5 + i // 2, n=8, unaware=5, aware=5 + i // 2, counters=['masked']))
    worst.append(entry(f'silent{i}', n=8, aware=0 if i else None))
    worst.append(entry(f'unsolved{i}', n=8, not_solved=i + 1, aware=0))
  broken, leaking, unaware, silent, better, unsolved = findings.defended(worst, SINGLE)
  assert broken == (
    '4 defenses hide all 8 images from an attacker who is unaware of them, but one who knows them recovers '
    '8 of 8 under `broken0` and `broken1` (10–90 %; `masked`) and 7 of 8 under `broken2` and `broken3` '
    '(10–90 %; `masked`).'
  )
  assert (
    '6 of 8 under `leaking2` and `leaking3` (10–90 %); 5 of 8 under `leaking0` and `leaking1` (10–90 %).' in leaking
  )
  assert unaware.endswith('no more than 5 of 8 under `leaking2` and `leaking3`.')
  assert 'Attackers who know the defense of `silent1`, `silent2` and `silent3` were tried and failed, too.' in silent
  assert better == 'No counter-attack to `silent0` is known here, and one who knows the defense may do better.'
  assert '10 of 32 runs failed' in unsolved
  for i in range(4):
    for kind in ('broken', 'leaking', 'silent', 'unsolved'):
      assert f'`{kind}{i}`' in paragraph(worst, config=SINGLE)


def test_defenses_with_the_same_guarantee_are_named_together():
  known = facts.of_defenses(['gaussian(stddev=1)', 'clip(norm=1)+gaussian(stddev=1)', 'laplace(scale=1)'])
  unbounded, bounded = findings.guarantees(known)
  assert (
    unbounded
    == '`gaussian(stddev=1)` and `laplace(scale=1)`: no ε: nothing bounds the norm of what the noise is added to.'
  )
  ((label, statement),) = privacy.statements(facts.of_defenses(['clip(norm=1)+gaussian(stddev=1)'])).items()
  assert bounded == f'`{label}`: {statement}.'
  assert findings.guarantees({}) == []


def test_a_label_with_a_colon_stays_whole():
  known = facts.of_defenses({'a: b': gl.defenses.gaussian(stddev=1)})
  assert findings.guarantees(known) == ['`a: b`: no ε: nothing bounds the norm of what the noise is added to.']


def test_where_only_unaware_attackers_ran_this_is_said_first():
  rows = [summary(), summary(defense='prune(rate=0.9)')]
  worst = [entry(recovered=4), entry('prune(rate=0.9)')]
  first = 'All attackers here are unaware of the defenses: one who knows a defense may recover more.'
  text = paragraph(worst, rows, {**SINGLE, 'knowledge': 'unaware'})
  assert text.startswith(first) and 'An attacker who knows the defense may do better.' in text
  assert first not in paragraph(worst, [*rows, summary(defense='prune(rate=0.9)', counter='masked')])
  assert first not in paragraph([entry(recovered=4)])


def test_what_there_is_to_say_of_a_defense_stands_before_its_figures():
  methods = {
    'defenses': {'none': {'remark': ''}, 'a': {'remark': 'first participation'}, 'b': {'remark': 'first participation'}}
  }
  assert findings.remarks(methods) == ['`a` and `b`: first participation.'] and not findings.remarks({})
  assert paragraph([entry(recovered=4)], methods=methods).startswith('`a` and `b`: first participation. Without')


def test_an_attack_that_does_no_better_than_on_noise_shows_its_prior():
  controls = [{'attack': name, 'trial': i, 'psnr': 9.7 + 0.1 * (i % 2)} for name in ('ggl', 'dlg') for i in range(64)]
  given = [
    {**summary('ggl', recovered=4), 'tier': 'D'},
    {**summary('ggl', 'prune', recovered=0, psnr=9.74), 'tier': 'D'},
    {**summary('ggl', 'prune', recovered=0, psnr=9.7, counter='masked'), 'tier': 'D'},
    {**summary('ggl', 'gaussian', recovered=0, psnr=9.76), 'tier': 'D'},  # beyond the control, 9.75 on average
    {**summary('ggl', 'soteria', recovered=0, psnr=9.0), 'tier': 'D', 'traces': 1},  # an upload shows something
    {**summary('dlg', 'prune', recovered=0, psnr=5.0), 'tier': 'B'},
    {**summary('dlg', recovered=4), 'tier': 'B'},
  ]
  (note,) = findings.cautions(given, [entry(recovered=4)], controls, {})
  assert note.startswith('The prior, not the upload: `ggl` under `prune`.') and 'dlg' not in note
  silent = [{**control, 'psnr': None} for control in controls]
  assert not findings.cautions(given, [entry(recovered=4)], silent, {})


def test_closed_forms_that_read_nothing_are_not_said_to_have_reached_an_objective():
  worst = [entry(recovered=4), entry('gaussian'), {**entry('prune'), 'searches': 0}]
  text = paragraph(worst)
  searched, closed = text.index('Under `gaussian`'), text.index('Under `prune`')
  assert text.index('reached an objective') in range(searched, closed)
  assert 'by closed forms, which have no objective: this says nothing of attacks that search.' in text[closed:]
  assert 'reached an objective' not in text[closed:]


def test_false_alarms_are_those_of_runs_that_the_others_do_not_explain():
  run = {
    'attack': 'dlg', 'control_psnr': 9.8, 'control_pearson': 0.5, 'revealed': 0, 'recognised': 0, 'identified': 0,
    'candidates': 99, 'diverged': False, 'objective': 1.0, 'objective_at_truth': 1.0, 'objective_start': 2.0,
  }  # fmt: skip
  runs = [{**run, 'trial': i, 'psnr': 9.0 + i % 3, 'pearson': 0.1 * (i % 4)} for i in range(32)]
  start = 'Of 32 uploads of noise, each judged by the others and by one attacker, '
  assert findings.alarms(runs) == f'{start}none comes to any step (95 % interval 0–11 %).'
  found = [{**runs[0], 'identified': 1, 'pearson': 0.9}, {**runs[1], 'psnr': 14.0, 'pearson': 0.9}, *runs[2:]]
  assert (
    findings.alarms(found[:1] + runs[1:]) == f'{start}1 comes to identifying: a false alarm (95 % interval 0–17 %).'
  )
  both = '1 comes to identifying and 1 comes to traces: false alarms (95 % interval 0–21 %).'
  assert findings.alarms(found) == f'{start}{both}'
  assert findings.alarms([]) == ''
  # One that is beyond the others, and not beyond a bound that it raises itself.
  few = [{**run, 'trial': i, 'psnr': 9.0, 'pearson': 0.05 + 0.1 * (i % 2)} for i in range(16)]
  few.append({**run, 'trial': 16, 'psnr': 11.0, 'pearson': 0.36})
  assert verdict.threshold(few).pearson > 0.36
  assert '1 comes to traces: a false alarm (' in findings.alarms(few)


def test_false_alarms_are_of_the_worst_attacker_as_the_verdict_on_a_defense_is():
  run = {
    'control_psnr': 9.8, 'control_pearson': 0.5, 'revealed': 0, 'recognised': 0, 'identified': 0, 'candidates': 99,
    'diverged': False, 'objective': 1.0, 'objective_at_truth': 1.0, 'objective_start': 2.0,
  }  # fmt: skip
  runs = [
    {**run, 'attack': name, 'trial': i, 'psnr': 9.0 + i % 3, 'pearson': 0.1 * (i % 4)}
    for name in ('dlg', 'csdlg', 'dga')
    for i in range(32)
  ]
  for place in (3, 32 + 7, 64 + 11):  # each attacker is mistaken once, of another upload of noise
    runs[place] |= {'psnr': 14.0, 'pearson': 0.9}
  assert verdict.united(runs).reached == {'exact': 0, 'recognisable': 0, 'identifying': 0, 'traces': 3}
  assert 'Of 32 uploads of noise, each judged by the others and by the worst of 3 attackers' in findings.alarms(runs)
  assert '3 come to traces: false alarms (95 % interval 1–26 %).' in findings.alarms(runs)
  runs[32 + 3] |= {'psnr': 14.0, 'pearson': 0.9}  # two mistakes about one upload are one false alarm
  assert verdict.united(runs).reached['traces'] == 3
  many = findings.alarms(runs, [{'attackers': 9}])
  assert 'met by up to 9 attackers' in many and 'in at most 1.2 % of uploads' in many


def test_a_threshold_does_not_depend_on_the_order_of_its_runs():
  """Processes that share an audit bring their control runs in another order."""
  shown = np.random.default_rng(0).uniform(-0.3, 0.6, 24).tolist()
  columns = {'psnr': 9.0, 'revealed': 0, 'recognised': 0, 'identified': 0}
  bounds = [verdict.threshold([{**columns, 'pearson': each} for each in shown[k:] + shown[:k]]) for k in range(24)]
  assert len({bound.pearson for bound in bounds}) == 1
