"""What to deploy, by entries of a leaderboard."""

import re

import numpy as np
import pytest

from gradleak.core.statistics import differ, proportion_interval
from gradleak.report import deploy, words
from gradleak.report.ranks import ranks

LEVELS = ('exact', 'recognisable', 're-identified', 'above chance')


def side(shown, n):
  low, high = proportion_interval(shown, n)[-2:]
  return {'n': n, 'levels': [{'level': level, 'count': shown, 'low': low, 'high': high} for level in LEVELS]}


def entry(defense, honest, n=40, malicious=None, cost=(0.0, [-1.0, 1.0]), likelihood=None, **more):
  """Returns the parts of an entry that advice reads."""
  made = {
    'defense': defense,
    'text': defense,
    'task': {'batch_size': 1},
    'honest': side(honest, n),
    'malicious': None if malicious is None else side(malicious, n),
    'cost': None if cost is None else {'points': cost[0], 'interval': cost[1], **more},
  }
  seen = {'identified': likelihood, 'n': n, 'candidates': 99}
  return made if likelihood is None else {**made, 'likelihood': seen}


def names(*entries):
  return [one.name.removeprefix('deploy.') for one in deploy.advice(entries)]


NONE = entry('none', 40, cost=None)
OPEN = entry('none', 40, malicious=40, cost=None)
LISTED = entry('none', 40, cost=None, likelihood=40)


def test_the_defense_that_shows_least_is_named_with_its_count():
  (told,) = deploy.advice([NONE, entry('a', 1, 50), entry('b', 0, 50)])
  assert told.name == 'deploy.hidden_honest' and told.facts['best'] == 'b' and told.facts['count'] == 0
  assert 'deploy `b`: 0 of 50 samples are recognisable (0–8 %)' in str(told)


@pytest.mark.parametrize(
  ('shown', 'n', 'name'),
  [
    (0, 40, 'hidden_honest'),
    (0, 8, 'undecided_honest'),
    (1, 40, 'undecided_honest'),
    (8, 40, 'undecided_honest'),
    (9, 40, 'shown_honest'),
  ],
)
def test_a_count_decides_by_the_ends_of_its_interval(shown, n, name):
  assert names(NONE, entry('a', shown, n)) == [name]


def test_that_none_hides_is_not_said_where_another_one_may():
  few, many = entry('few', 0, 16), entry('many', 20, 110)  # the lower end of the first is zero
  assert names(NONE, many) == ['shown_honest'] and names(NONE, few, many) == ['undecided_honest']
  told = deploy.advice([NONE, entry('few', 0, 16), entry('many', 7, 110)])
  assert told[0].name == 'deploy.undecided_honest' and told[0].facts['best'] == 'many'


def test_defenses_within_noise_of_the_one_that_shows_least_are_counted():
  entries = [entry(name, shown, 80) for name, shown in (('a', 0), ('b', 0), ('c', 5), ('d', 6))]
  several, one = (deploy.advice([NONE, *of])[0] for of in (entries, entries[:1]))
  assert [told.facts['alike'] for told in (several, one)] == [2, 0]
  assert not differ(0, 80, 5, 80) and differ(0, 80, 6, 80)
  assert str(several) == f'{one} 2 others are within noise of that.'  # the sentence named one of three alone
  few = [entry(name, 0, 8) for name in 'ab']
  assert '(0–37 %). 1 other is within noise of that. More uploads would' in str(deploy.advice([NONE, *few])[0])


def test_the_lowest_of_several_counts_hides_by_an_interval_that_holds_for_all():
  """Of 20 defenses that show a tenth, the lowest count was called hidden in two of five draws."""
  alone = entry('a', 0)
  assert names(NONE, alone) == ['hidden_honest']  # 0 of 40: at most 8.8 %
  assert names(NONE, alone, *(entry(str(one), 30) for one in range(19))) == ['undecided_honest']  # at most 15.4 %
  draw, wrong = np.random.default_rng(0), 0
  for _ in range(200):
    counts = draw.binomial(100, 0.1, 20).tolist()
    wrong += names(NONE, *(entry(str(one), count, 100) for one, count in enumerate(counts)))[0] == 'hidden_honest'
  assert wrong <= 200 * deploy.LEVEL


def test_defenses_that_hide_an_original_as_well_are_counted():
  entries = [entry(name, 0, likelihood=seen) for name, seen in (('a', 3), ('b', 3), ('c', 30))]
  told = deploy.advice([LISTED, *entries])[-1]
  assert (told.name, told.facts['alike']) == ('deploy.listed', 1)
  assert str(told).endswith('finds 3 of 40 originals. 1 other is within noise of that.')


def test_uploads_that_show_nothing_undefended_are_those_of_all_seeds():
  blind = [{**entry('none', 0, n, cost=None), 'seed': seed} for n, seed in ((4, 0), (2, 1), (400, 1))]
  (told,) = deploy.advice([*blind, {**entry('a', 0, 400), 'seed': 1}])
  assert (told.name, told.facts['n']) == ('deploy.blind_honest', 404)


def test_a_leak_counts_under_a_seed_that_has_no_undefended_entry():
  entries = seeded([NONE, entry('a', 0)], [entry('a', 40)])
  assert [one.name for one in deploy.advice(entries)] == ['deploy.shown_honest']
  assert ranks([*entries, {**entry('b', 0), 'seed': 0}]) == [None, (2, 2), (2, 2), (1, 1)]


def test_a_leak_counts_where_the_attacks_failed_under_another_seed():
  lost = entry('a', 0)
  lost['honest']['failed'] = 40
  entries = seeded([NONE, entry('a', 40), entry('b', 30)], [NONE, lost])
  (told,) = deploy.advice(entries)
  assert told.name == 'deploy.shown_honest' and told.facts['best'] == 'b'
  assert ranks(entries) == [None, (2, 2), (1, 1), None, (2, 2)]


def test_who_was_not_tried_on_a_defense_is_said():
  bare = {**OPEN, 'likelihood': LISTED['likelihood']}
  told = deploy.advice([bare, entry('a', 0, 50), entry('b', 0, 50, malicious=50, likelihood=50)])
  assert [one.name.removeprefix('deploy.') for one in told] == [
    'hidden_honest', 'shown_malicious', 'untried_malicious', 'everyone', 'unranked',
  ]  # fmt: skip
  assert [one.facts['names'] for one in told if one.name in ('deploy.untried_malicious', 'deploy.unranked')] == [
    ['a']
  ] * 2


def test_few_uploads_say_what_they_allow():
  (told,) = deploy.advice([NONE, entry('a', 0, 8)])
  assert '0 of 8 samples are recognisable (0–37 %)' in str(told) and str(told).endswith('More uploads would decide.')


def test_defenses_of_unknown_or_large_cost_are_named_and_not_counted():
  told = deploy.advice(
    [
      NONE,
      entry('unknown', 0, cost=None),
      entry('dear', 0, cost=(3.0, [1.0, 5.1])),
      entry('chance', 0, cost=(0.0, [0.0, 0.0]), at_chance='it predicts one class'),
      entry('cheap', 30),
    ]
  )
  assert [one.name for one in told] == ['deploy.shown_honest', 'deploy.unknown', 'deploy.costly']
  assert told[0].facts['best'] == 'cheap' and told[1].facts['names'] == ['unknown']
  assert told[2].facts['names'] == ['dear', 'chance']


def test_what_it_costs_stands_beside_each_answer():
  told = deploy.advice([OPEN, entry('a', 20, malicious=0, cost=(1.2, [0.9, 1.5]))])
  assert [str(one).endswith('at a cost of 1.2 points (0.9 to 1.5).') for one in told] == [True, True]
  bare = entry('a', 20)
  bare['cost'] = {'points': -0.6}
  assert str(deploy.advice([NONE, bare])[0]).endswith('at a cost of −0.6 points.')


def test_where_none_that_is_cheap_hides_an_original_the_dear_one_is_named_that_does():
  cheap, dear = entry('a', 0, likelihood=40), entry('b', 0, cost=(20.0, [19.0, 21.0]), likelihood=3)
  told = deploy.advice([LISTED, cheap, dear])
  assert [one.name.removeprefix('deploy.') for one in told] == ['hidden_honest', 'everyone', 'costly', 'dear']
  assert 'Of those that cost more, `b` hides best' in str(told[-1]) and 'finds 3 of 40 originals' in str(told[-1])
  assert names(LISTED, cheap, {**dear, 'likelihood': cheap['likelihood']})[-1] == 'costly'
  assert 'dear' not in names(LISTED, entry('a', 0, likelihood=12), dear)


def test_without_any_cost_those_that_show_least_are_named():
  entries = [entry(name, shown, malicious=4, cost=None) for name, shown in (('a', 0), ('b', 30), ('c', 0))]
  told = deploy.advice([OPEN, *entries])
  assert [one.name for one in told] == ['deploy.unpriced_honest', 'deploy.unpriced_malicious']  # all are counted
  assert told[0].facts['names'] == told[1].facts['names'] == ['a', 'c']
  assert '`a` and `c` show least: 0 of 40 samples are recognisable (0–9 %). What they cost is unknown.' in str(told[0])


def test_attacks_that_did_not_converge_say_nothing_for_a_defense():
  failed, other = entry('a', 0, 50, malicious=0), entry('b', 3, 50, malicious=11)
  failed['malicious'] |= {'verdict': 'inconclusive', 'count': 50}
  told = deploy.advice([OPEN, failed, other])
  assert [one.name for one in told] == [
    'deploy.hidden_honest', 'deploy.shown_malicious', 'deploy.inconclusive_malicious',
  ]  # fmt: skip
  assert [one.facts.get('best') for one in told] == ['a', 'b', None] and 'Under `a` the attacks' in str(told[-1])
  assert 'says nothing for this defense' in str(told[-1])
  assert names(OPEN, failed) == ['hidden_honest', 'inconclusive_malicious']
  failed['malicious']['count'] = 4  # as few as may be shown, which more uploads might turn out to be
  assert names(OPEN, failed, other) == ['hidden_honest', 'undecided_malicious']
  many = entry('a', 0, 400, malicious=0)
  many['malicious'] |= {'verdict': 'inconclusive', 'count': 4}
  assert names(OPEN, many, other) == ['hidden_honest', 'hidden_malicious']


@pytest.mark.parametrize('worst', ['inconclusive', 'diverged', 'above chance'])
def test_uploads_on_which_attacks_failed_are_no_evidence_whatever_the_worst_verdict(worst):
  lost, other = entry('a', 0), entry('b', 3)
  lost['honest'] |= {'verdict': worst, 'count': 1 if worst == 'above chance' else 40, 'failed': 39}
  assert names(NONE, lost, other) == ['undecided_honest', 'inconclusive_honest']
  assert ranks([NONE, lost, other]) == [None, None, (1, 1)]
  leaking = entry('a', 20)
  leaking['honest']['failed'] = 20  # what it shows is evidence, and more might be shown
  assert ranks([NONE, leaking, other]) == [None, (2, 2), (1, 1)]


def test_a_malicious_server_may_be_shown_other_samples_by_each_kind_of_attack():
  bare = entry('none', 64, 64, malicious=64, cost=None)
  assert names(bare, entry('a', 1, 64, malicious=0)) == ['hidden_honest', 'hidden_malicious']
  assert names(bare, entry('a', 1, 64, malicious=1)) == ['hidden_honest', 'undecided_malicious']  # 2 of 64: 0–10.8 %


def test_a_defense_is_credited_where_the_attacks_of_its_own_seed_work():
  blind = [{**entry(name, 0), 'seed': 1} for name in ('none', 'a')]
  working = [{**one, 'seed': 0} for one in (NONE, entry('b', 20))]
  told = deploy.advice(blind + working)
  assert [one.facts.get('best') for one in told if one.name.endswith('_honest')] == ['b']
  named = [{**one, 'likelihood': {'identified': 0, 'n': 40, 'candidates': 99}} for one in blind]
  told = deploy.advice([*named, {**LISTED, 'seed': 0}, {**entry('b', 20, likelihood=12), 'seed': 0}])
  assert [one.facts['best'] for one in told if one.name in ('deploy.listed', 'deploy.everyone')] == ['b']
  assert deploy.judged(blind, 'honest') == blind and ranks(blind + working) == [None, None, None, (1, 1)]


@pytest.mark.parametrize(('batch', 'found'), [(1, True), (40, False)])  # by chance 1 in 1,000 and 39 in 1,000 uploads
def test_originals_of_a_batch_are_found_beyond_what_chance_finds_of_one_of_them(batch, found):
  entries = [{**entry(name, 400, 400), 'task': {'batch_size': batch}} for name in ('none', 'a')]
  for one in entries:
    one['likelihood'] = {'identified': 16, 'n': 400, 'candidates': 999}
  assert ('listed' in names(*entries)) == found


def seeded(*of_seeds):
  """Returns entries, those of the n-th argument of seed n."""
  return [{**one, 'seed': seed} for seed, of in enumerate(of_seeds) for one in of]


def test_a_defense_counts_by_the_seed_that_shows_most():
  bare = {**OPEN, 'likelihood': LISTED['likelihood']}
  lucky = entry('a', 0, malicious=0, likelihood=2), entry('a', 40, malicious=40, likelihood=40)
  steady = entry('b', 3, malicious=3, likelihood=10)
  told = deploy.advice(seeded([bare, lucky[0], steady], [bare, lucky[1], steady]))
  assert [one.facts['best'] for one in told] == ['b', 'b', 'b']
  assert [one.facts.get('count', one.facts.get('identified')) for one in told] == [3, 3, 10]
  unpriced = [[{**one, 'cost': None} for one in (bare, each, steady)] for each in lucky]
  assert [one.facts['names'] for one in deploy.advice(seeded(*unpriced))[:2]] == [['b'], ['b']]


def test_of_one_seed_the_entry_of_most_uploads_counts():
  few, many = entry('a', 0, 8), entry('a', 1, 400)
  (told,) = deploy.advice(seeded([NONE, few, many]))
  assert (told.name, told.facts['n']) == ('deploy.hidden_honest', 400)


def test_a_defense_is_counted_where_no_seed_is_costly_or_failed():
  free, dear = entry('a', 0), entry('a', 0, cost=(9.0, [8.0, 10.0]))
  told = deploy.advice(seeded([NONE, free, entry('b', 3)], [NONE, dear, entry('b', 3)]))
  assert [one.name for one in told] == ['deploy.undecided_honest', 'deploy.costly'] and told[0].facts['best'] == 'b'
  lost = entry('a', 0)
  lost['honest'] |= {'verdict': 'inconclusive', 'count': 40, 'failed': 40}
  told = deploy.advice(seeded([NONE, free, entry('b', 3)], [NONE, lost, entry('b', 3)]))
  assert [one.name for one in told] == ['deploy.undecided_honest', 'deploy.inconclusive_honest']
  assert told[0].facts['best'] == 'b' and told[1].facts['names'] == ['a']


def test_a_flag_is_said_and_nothing_is_to_be_deployed_by_it():
  made = {**entry('a', 0), 'flags': ['attack weaker than its control: tag is nearer on noise']}
  (told,) = deploy.advice([NONE, made])
  assert told.name == 'deploy.flagged_honest' and 'too low: attack weaker than its control.' in str(told)
  assert 'deploy `a`' not in str(told)
  assert names(NONE, {**made, 'honest': side(20, 40)}) == ['shown_honest']


def test_a_flag_is_said_where_no_cost_is_known():
  flag = 'gradient masked: the objective never moved'
  (told,) = deploy.advice([NONE, *({**entry(name, 0, cost=None), 'flags': [flag]} for name in 'ab')])
  assert str(told).endswith(
    'unknown. Entries of `a` and `b` are flagged, so that the count may be too low: gradient masked.'
  )
  (told,) = deploy.advice([NONE, {**entry('a', 0, cost=None), 'flags': [flag]}, entry('b', 0, cost=None)])
  assert '`a` and `b` show least' in str(told) and 'Entries of `a` are flagged' in str(told)


def test_a_malicious_server_sees_what_a_curious_one_sees():
  told = deploy.advice([OPEN, entry('a', 20, malicious=0), entry('b', 3, malicious=9)])
  assert [one.facts['best'] for one in told] == ['b', 'b'] and [one.facts['count'] for one in told] == [3, 9]
  told = deploy.advice([OPEN, entry('a', 20, malicious=0)])
  assert [one.facts['count'] for one in told] == [20, 20]


def test_a_malicious_server_is_not_judged_by_attacks_of_a_curious_one_that_failed():
  lost, other = entry('a', 0, malicious=0), entry('b', 3, malicious=3)
  lost['honest']['failed'] = 39
  assert names(OPEN, lost, other) == [
    'undecided_honest', 'inconclusive_honest', 'undecided_malicious', 'inconclusive_malicious',
  ]  # fmt: skip
  shows = entry('a', 0, malicious=20)
  shows['honest']['failed'] = 39  # what the malicious server shows is evidence
  assert [one.facts.get('best') for one in deploy.advice([OPEN, shows])] == [None, 'a']


def test_a_task_on_which_no_attack_works_says_so():
  blind = entry('none', 0, n=4, malicious=0, cost=None)
  assert names(blind, entry('a', 0, 4, malicious=0)) == ['blind_honest', 'blind_malicious']


def test_a_tie_under_a_malicious_server_goes_to_who_hides_more_from_a_curious_one():
  told = deploy.advice([OPEN, entry('a', 20, malicious=0), entry('b', 3, malicious=0)])
  assert [one.facts['best'] for one in told] == ['b', 'b']


def test_a_tie_goes_to_who_hides_more_at_the_other_levels_and_then_to_the_cheaper_one():
  def named(defense, reidentified, points):
    made = entry(defense, 0, cost=(points, [points - 1, points + 1]))
    made['honest']['levels'][2:] = side(reidentified, 40)['levels'][2:]
    return made

  def best(*entries):
    return deploy.advice([NONE, *entries])[0].facts['best']

  assert best(named('a', 30, 0.0), named('b', 3, 1.0)) == 'b'
  assert best(named('a', 3, 2.0), named('b', 3, 1.0)) == 'b'
  listed = [entry('a', 0, cost=(2.0, [1.0, 3.0]), likelihood=12), entry('b', 0, likelihood=12)]
  assert deploy.advice([NONE, *listed])[-1].facts['best'] == 'b'


def test_a_list_of_candidates_needs_no_picture():
  assert names(LISTED, entry('a', 0, likelihood=40), entry('b', 0, likelihood=40))[-1] == 'everyone'
  mixed = deploy.advice([LISTED, entry('a', 0, likelihood=40), entry('b', 0, n=9, likelihood=9)])[-1]
  assert 'the likelihood finds each of at least 9 originals' in str(mixed)
  told = deploy.advice([LISTED, entry('a', 0, likelihood=40), entry('b', 5, likelihood=12)])[-1]
  assert told.name == 'deploy.listed' and told.facts['best'] == 'b' and 'finds 12 of 40 originals' in str(told)


def test_a_few_lucky_originals_do_not_hide_best():
  """0 of 4 allow up to 60 %, 2 of 400 allow 2 %; it was the former that was named."""
  entries = [entry('few', 0, 4, likelihood=0), entry('many', 0, 400, likelihood=2)]
  told = deploy.advice([LISTED, *entries])[-1]
  assert told.name == 'deploy.listed' and told.facts['best'] == 'many'
  blind = entry('none', 40, cost=None, likelihood=0)
  assert not any('listed' in one.name for one in deploy.advice([blind, *entries]))


@pytest.mark.parametrize('section', ['autoleak', 'leaderboard', 'deploy'])
def test_what_is_said_of_a_task_is_true_of_rows_and_texts(section):
  told = {name: text for name, text in words.texts()[section].items() if name != 'earlier'}
  assert told and not [name for name, text in told.items() if re.search(r'\bimages?\b', text, re.IGNORECASE)]
