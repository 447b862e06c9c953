"""Entries of a leaderboard follow from the rows, survive the disk, and are refused where they cannot be true."""

import dataclasses
import functools
import json
import math
import operator
import random

import pytest
from scipy import stats

from gradleak import UsageError
from gradleak.audit.verdict import LEVELS
from gradleak.core import storage
from gradleak.report import render_leaderboard, write_leaderboard
from gradleak.studies.autoleak import leaderboard
from gradleak.studies.autoleak.costs import Cost, alike, task_of_entry
from gradleak.studies.autoleak.entry import checked
from gradleak.studies.identification import Identification
from gradleak.summary import worst
from tests.leaderboards import COMMAND, changed, found, rank

PRUNE = 'prune(rate=0.9)'


@pytest.fixture(scope='module')
def run():
  return found(bounds={'laplace(scale=0.1)': 0.25}, flags={PRUNE: ['gradient masked: so it is']})


@pytest.fixture(scope='module')
def made(run):
  costs = {PRUNE: (1.5, 'Table 2')}
  return {entry['defense']: entry for entry in leaderboard.entries(run, COMMAND, costs)}


def test_counts_and_intervals_follow_from_the_rows(made):
  honest = made[PRUNE]['honest']
  assert (honest['verdict'], honest['count'], honest['n']) == ('exact', 1, 4)
  assert [(one['level'], one['count']) for one in honest['levels']] == list(zip(LEVELS, (1, 2, 2, 3), strict=True))
  for one in honest['levels']:
    assert one['low'] == pytest.approx(stats.beta.ppf(0.025, one['count'], 5 - one['count']))
    assert one['high'] == pytest.approx(stats.beta.ppf(0.975, one['count'] + 1, 4 - one['count']))
  nothing = made['laplace(scale=0.1)']['honest']
  assert (nothing['verdict'], nothing['count'], [one['count'] for one in nothing['levels']]) == (
    'nothing seen',
    4,
    [0] * 4,
  )


def test_malicious_servers_are_apart(made):
  assert made['none']['malicious']['verdict'] == 'above chance' and made['none']['honest']['verdict'] == 'exact'
  assert all(entry['malicious'] is None for entry in leaderboard.entries(found(malicious=False)))


def test_false_alarms_of_attackers_that_met_another_defense_are_none_of_an_entry(made, run):
  thresholds = {'control_psnr': 5.0, 'control_pearson': 0.1}
  one = next(row for row in run.controls if row['honest'])
  others = [{**one, 'attack': 'other', **thresholds, 'trial': 1000 + i} for i in range(16)]
  others[0] |= {'psnr': 60.0, 'pearson': 0.99}
  known = [*run.controls, *others]
  assert worst.alarms([row for row in known if row['honest']])[0]['levels'][-1]['count'] == 1
  met = {**next(row for row in run.rows if row['honest'] and row['defense'] == PRUNE), 'attack': 'other', **thresholds}
  beside = dataclasses.replace(run, controls=known, rows=[*run.rows, met])
  alarms = {entry['defense']: entry['honest']['noise']['levels'][-1]['count'] for entry in leaderboard.entries(beside)}
  assert alarms == {'none': 0, PRUNE: 1, 'laplace(scale=0.1)': 0}


def test_false_alarms_are_counted_for_all_attackers_of_a_defense_together(made, run, tmp_path):
  entry = made['none']
  assert entry['honest']['noise'] == {'n': 2, 'levels': [{'level': level, 'count': 0} for level in LEVELS]}
  ranked = [rank(PRUNE, [0, 3], alarms=[1]), rank('none', [0])]
  told = leaderboard.entries(dataclasses.replace(run, ranked=ranked))
  alarms = [[one['count'] for one in made['honest']['noise']['levels']] for made in told]
  assert alarms == [[0] * 4, [0, 0, 1, 1], [0] * 4], 'a false match is an alarm of its own defense'
  assert told[1]['malicious']['noise'] == entry['malicious']['noise']
  entry = told[1]
  entry['honest']['noise']['levels'][-1]['count'] = 3
  with pytest.raises(UsageError, match='runs on noise, expected counts that rise'):
    leaderboard.add(tmp_path, entry)
  with pytest.raises(UsageError, match='honest has no line of noise'):
    leaderboard.entries(dataclasses.replace(run, controls=[]))


def test_a_ranking_decides_with_pictures_and_stands_beside_them(run):
  """Pruning: trials 0 and 1 by pictures, 0 and 3 by likelihood, of which 3 by it alone."""
  ranked = [rank(PRUNE, [0]), rank(PRUNE, [0, 3], rounds=8), rank('laplace(scale=0.1)', [2])]
  told = {entry['defense']: entry for entry in leaderboard.entries(dataclasses.replace(run, ranked=ranked))}
  assert [one['count'] for one in told[PRUNE]['honest']['levels']] == [1, 2, 3, 4]
  counts = {'identified': 2, 'n': 4, 'alone': 1, 'false': 0, 'controls': 2}
  assert told[PRUNE]['likelihood'] == {**counts, 'candidates': 99, 'rounds': 8, 'model': 'exact'}
  hidden = told['laplace(scale=0.1)']['honest']
  assert (hidden['verdict'], hidden['count'], hidden['by']) == ('re-identified', 1, ['likelihood'])
  assert told['laplace(scale=0.1)']['example']['trial'] == 2
  assert told['none']['likelihood'] is None


@pytest.mark.parametrize(
  ('change', 'words'),
  [
    (lambda e: e.pop('baselines'), 'has the field baselines'),
    (lambda e: e.pop('likelihood'), 'has the field likelihood'),
    (lambda e: e['honest'].pop('noise'), 'honest has no line of noise'),
    (lambda e: e['malicious']['noise'].update(n=0), 'malicious has no line of noise'),
    (lambda e: e['likelihood'].update(identified=4, alone=1), '4 of 4 are identified by likelihood, and 3 of 4'),
    (lambda e: e['likelihood'].update(n=3), '2 of 3 are identified by likelihood'),
    (lambda e: e['likelihood'].update(alone=3), "likelihood has {'identified': 2"),
    (lambda e: e['likelihood'].update(false=3), "likelihood has {'identified': 2"),
    (lambda e: e['likelihood'].pop('false'), 'likelihood lacks false'),
  ],
)
def test_what_an_entry_of_this_version_has_to_say(run, tmp_path, change, words):
  ranked = [rank(PRUNE, [0, 3])]
  entry = next(one for one in leaderboard.entries(dataclasses.replace(run, ranked=ranked)) if one['defense'] == PRUNE)
  assert checked(entry, 'it') == entry
  wrong = json.loads(json.dumps(entry))
  change(wrong)
  with pytest.raises(UsageError) as error:
    leaderboard.add(tmp_path, wrong)
  assert words in str(error.value)


def former(entry):
  """Returns what AutoLeak-1 would have written."""
  lacking = {name: value for name, value in entry.items() if name not in ('likelihood', 'baselines', 'stages')}
  sides = {
    side: {name: value for name, value in entry[side].items() if name != 'noise'} for side in ('honest', 'malicious')
  }
  return {**lacking, **sides, 'versions': {**entry['versions'], 'autoleak': 'AutoLeak-1'}}


@pytest.mark.long
def test_entries_of_autoleak_1_remain_readable_and_are_folded_below(made, tmp_path):
  for entry in made.values():
    leaderboard.add(tmp_path, former(entry))
  alone = render_leaderboard(leaderboard.read(tmp_path))
  assert 'AutoLeak-1: a fixed ensemble' in alone and 'Earlier versions' not in alone
  leaderboard.add(tmp_path, made[PRUNE], replace=True)
  mixed = render_leaderboard(leaderboard.read(tmp_path))
  shown, _, below = mixed.partition('Earlier versions</h2>')
  assert 'AutoLeak-2: a fixed ensemble' in shown and '<summary>AutoLeak-1: ' in below
  assert 'laplace' in below and 'laplace' not in shown and '1 defense of the updates' in shown


def test_entries_of_one_task_are_about_the_same_weights(made, tmp_path):
  leaderboard.add(tmp_path, made[PRUNE])
  other = {**made['none'], 'fingerprints': {**made['none']['fingerprints'], 'weights': 'others'}}
  with pytest.raises(UsageError, match=r'none-.* and prune-.* of one task, and of different weights|of one task'):
    leaderboard.add(tmp_path, other)
  assert len(leaderboard.read(tmp_path)) == 1
  both = [{**made[PRUNE], 'fingerprints': other['fingerprints']}, other]
  assert len(leaderboard.add_all(tmp_path, both, replace=True)) == len(leaderboard.read(tmp_path)) == 2  # all at once
  leaderboard.add(tmp_path, former(other), replace=True)  # what AutoLeak-1 mixed remains readable
  leaderboard.add(tmp_path, made[PRUNE], replace=True)
  (tmp_path / f'{leaderboard.name(other)}.json').write_text(json.dumps(other))
  with pytest.raises(UsageError, match='of different weights: run one of them again'):
    leaderboard.read(tmp_path)


def test_entries_of_one_training_may_be_of_processors_that_round_differently(tmp_path):
  def entry(trials=4, **changes):
    run = found({'none': ['exact'] * trials, PRUNE: ['exact'] * trials}, rounds_before=1, **changes)
    return next(one for one in leaderboard.entries(run) if one['defense'] == PRUNE)

  leaderboard.add(tmp_path, entry())
  said = 'the network was trained 2 times, and the weights are not the same bits'
  assert said not in render_leaderboard(leaderboard.read(tmp_path))
  with pytest.raises(UsageError, match='are of one task, and of different public samples'):
    leaderboard.add(tmp_path, entry(5, public_fingerprint='others'))
  leaderboard.add(tmp_path, entry(5, weights_fingerprint='rounded'))
  assert said not in render_leaderboard(leaderboard.read(tmp_path))  # that of five uploads stands for both
  leaderboard.add(tmp_path, leaderboard.entries(found(rounds_before=1))[0])
  assert said in render_leaderboard(leaderboard.read(tmp_path))


def test_entries_of_one_task_begin_with_the_same_weights_of_a_file(tmp_path):
  run = functools.partial(found, rounds_before=1, init=None, weights='mine.npz')
  one, other, former_one = (leaderboard.entries(run(**told))[1] for told in (
    {'previous_fingerprint': 'a'}, {'previous_fingerprint': 'b', 'seed': 7}, {'seed': 8},
  ))  # fmt: skip
  assert one['fingerprints']['start'] == 'a' and 'start' not in former_one['fingerprints']
  tasks = [task_of_entry(each) for each in (one, other, former_one)]
  assert [alike(tasks[0], task) for task in tasks] == [True, False, True] == [alike(task, tasks[0]) for task in tasks]
  assert not leaderboard.compare({**one, 'fingerprints': former_one['fingerprints']}, run(previous_fingerprint='a'))
  assert leaderboard.compare(one, run(previous_fingerprint='b')) == ['fingerprint of start was a, now b']
  leaderboard.add_all(tmp_path, [one, former_one])
  with pytest.raises(UsageError, match='are of one task, and of different weights in a file'):
    leaderboard.add(tmp_path, other)


def test_of_one_defense_and_seed_the_entry_of_most_uploads_is_shown(tmp_path):
  for verdicts in (['exact'] * 4, ['exact'] * 2 + ['above chance'] * 4):
    run = found({'none': ['exact'] * len(verdicts), PRUNE: verdicts})
    for one in leaderboard.entries(run, costs={PRUNE: (1.0, 'x', (0.5, 1.5))}):
      leaderboard.add(tmp_path, one)
  shown = render_leaderboard(leaderboard.read(tmp_path))
  assert '6 of 6 images' in shown and '10 of 10' not in shown and '4 of 4' not in shown
  assert '2 of 6' in shown and 'rank 1' in shown


@pytest.mark.parametrize('part', ['data', 'public', 'gallery'])
def test_entries_of_one_task_seed_and_number_of_trials_have_the_same_samples(made, tmp_path, part):
  leaderboard.add(tmp_path, made[PRUNE])
  other = {**made['none'], 'fingerprints': {**made['none']['fingerprints'], part: 'others'}}
  with pytest.raises(UsageError, match=r'are of one task, and of different (private samples|public samples|galleries)'):
    leaderboard.add(tmp_path, other)
  leaderboard.add(tmp_path, {**other, 'seed': 7})


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    (lambda one: one['honest'].update(by=[]), 'it names no attacker'),
    (lambda one: one['honest'].update(failed=4), 'counts of .* of 4 trials'),
    (lambda one: one.update(bound=0.0), 'its bound is 0'),
    (lambda one: one['task']['more'].update(modality='sound'), "modality is 'sound'|unknown modality"),
    (lambda one: one['task']['more'].update(gallery={'images': {}}), 'the gallery lacks fields'),
    (lambda one: one['task']['more'].update(gallery=3), 'the gallery is 3, expected an object'),
    (lambda one: one.update(text='a+(', settings=None), 'unbalanced parentheses'),
  ],
  ids=['attacker', 'failed', 'bound', 'modality', 'gallery', 'no gallery', 'grammar'],
)
def test_what_no_page_can_show_is_no_entry(made, tmp_path, change, message):
  entry = json.loads(json.dumps(made[PRUNE]))
  change(entry)
  with pytest.raises(UsageError, match=f'is no entry of a leaderboard: .*{message}'):
    leaderboard.add(tmp_path, entry)


def test_what_nobody_gave_is_null(made, run):
  assert made[PRUNE]['cost'] == {'points': 1.5, 'source': 'Table 2'} and made['none']['cost'] is None
  assert made['laplace(scale=0.1)']['bound'] == 0.25 and made[PRUNE]['bound'] is None
  assert made[PRUNE]['flags'] == ['gradient masked: so it is']
  assert all(entry['settings'] is None for entry in leaderboard.entries(run))


def test_the_settings_repeat_the_defense_alone(made):
  assert made[PRUNE]['settings'] == {**COMMAND, 'defenses': PRUNE}
  assert made[PRUNE]['places'] == ['upload']


def test_a_cost_at_chance_says_so(run):
  why = 'it predicts one class for all 10,000 test samples'
  cost = Cost(80.0, 'x', (79.0, 81.0), why)
  made = {entry['defense']: entry for entry in leaderboard.entries(run, COMMAND, {PRUNE: cost})}
  assert made[PRUNE]['cost'] == {'points': 80.0, 'source': 'x', 'interval': [79.0, 81.0], 'at_chance': why}
  assert leaderboard.priced(made[PRUNE], Cost(1.0, 'y'))['cost'] == {'points': 1.0, 'source': 'y'}


def test_the_cost_of_another_defense_of_the_same_label_is_refused(run, made):
  cost, other = (Cost(1.0, 'y', text=text) for text in (made[PRUNE]['text'], 'prune(rate=0.1)'))
  assert leaderboard.priced(made[PRUNE], cost)['cost'] == {'points': 1.0, 'source': 'y'}
  said = r'is that of a training under prune\(rate=0\.1\), and the entry is of'
  with pytest.raises(UsageError, match=said):
    leaderboard.priced(made[PRUNE], other)
  with pytest.raises(UsageError, match=said):
    leaderboard.entries(run, costs={PRUNE: other})


def test_costs_are_checked(run):
  for costs, words in (
    ({'prun': (1, 'x')}, "unknown defense with a cost 'prun'"),
    ({PRUNE: 1.5}, 'where the figure is from'),
    ({PRUNE: (float('nan'), 'x')}, 'the cost of prune'),
    ({PRUNE: (1.5, '')}, 'source'),
    ({PRUNE: (1.5, 'x', 2.0)}, 'the interval of the cost of prune'),
    ({PRUNE: (1.5, 'x', (2.0, 3.0))}, 'the interval of the cost is'),
    ({PRUNE: (1.5, 'x', (1.0, 2.0), 'y')}, 'where the figure is from'),
  ):
    with pytest.raises(UsageError, match=words):
      leaderboard.entries(run, COMMAND, costs)


def test_the_digest_is_of_the_rows_in_any_order(run):
  assert leaderboard.digest(run.rows) == leaderboard.digest(run.rows[::-1])
  assert leaderboard.digest(run.rows) != leaderboard.digest(changed(run, PRUNE, psnr=1.0).rows)


def test_entries_survive_the_disk(made, tmp_path):
  paths = [leaderboard.add(tmp_path / 'board', entry) for entry in made.values()]
  read = leaderboard.read(tmp_path / 'board')
  assert read == {leaderboard.name(entry): entry for entry in made.values()}
  assert sorted(paths) == sorted((tmp_path / 'board').iterdir())  # and nothing else
  assert leaderboard.add(tmp_path / 'board', made[PRUNE]) in paths


def test_entries_of_the_first_format_read_as_those_of_today(made, tmp_path):
  former = {'re-identified': 'identifying', 'above chance': 'traces', 'inconclusive': 'not solved', 'levels': 'steps'}
  for entry in made.values():
    text = json.dumps({**entry, 'format': 1}, indent=1, ensure_ascii=False)
    for now, then in former.items():
      text = text.replace(f'"{now}"', f'"{then}"')
    assert all(f'"{then}"' in text for then in ('identifying', 'traces', 'steps'))
    (tmp_path / f'{leaderboard.name(entry)}.json').write_text(text)
  assert leaderboard.read(tmp_path) == {leaderboard.name(entry): entry for entry in made.values()}


def test_tasks_seeds_and_trials_have_files_of_their_own(made):
  others = [found(model='cnn'), found(seed=1), found({'none': ['exact'] * 3})]
  names = {leaderboard.name(leaderboard.entries(other)[0]) for other in others}
  assert len(names | {leaderboard.name(made['none'])}) == 4


def test_the_last_digits_of_a_number_are_no_other_task(made):
  entry = made[PRUNE]
  spread = [{'columns': [{'std': value}]} for value in (3.66948187532691, 3.6694818753269094, 3.6695)]
  tasks = [{**entry['task'], 'more': {**entry['task']['more'], 'schema': one}} for one in spread]
  one, same, other = (leaderboard.name(checked({**entry, 'task': task}, 'it')) for task in tasks)
  assert one == same != other


def test_an_entry_that_differs_is_not_overwritten(made, tmp_path):
  path = leaderboard.add(tmp_path, made[PRUNE])
  costly = {**made[PRUNE], 'cost': {'points': 2.0, 'source': 'Table 3'}}
  with pytest.raises(UsageError, match=rf'{path.name} holds an entry that differs in cost'):
    leaderboard.add(tmp_path, costly)
  assert leaderboard.read(tmp_path)[path.stem] == made[PRUNE]
  leaderboard.add(tmp_path, costly, replace=True)
  assert leaderboard.read(tmp_path)[path.stem] == costly
  leaderboard.add(tmp_path, {**costly, 'cost': None}, replace=True)  # another run says nothing of the training
  assert leaderboard.read(tmp_path)[path.stem] == costly


def test_an_entry_has_the_cost_of_its_defense_under_other_numbers_of_uploads(tmp_path):
  def entry(cost=None, **changes):
    runs = leaderboard.entries(found(**changes), COMMAND, {PRUNE: cost} if cost else {})
    return next(one for one in runs if one['defense'] == PRUNE)

  first, second = (1.5, 'a training'), (2.5, 'another')
  leaderboard.add(tmp_path, entry(first))
  more = {'none': ['exact'] * 3, PRUNE: ['exact'] * 3}

  def added(**changes):
    return json.loads(leaderboard.add(tmp_path, entry(**changes)).read_text())['cost']

  assert added(verdicts=more) == added(verdicts=more) == {'points': 1.5, 'source': 'a training'}
  assert added(model='cnn') is None  # another task
  leaderboard.add(tmp_path, entry(second, verdicts=more), replace=True)
  assert added(seed=1) is None  # the two disagree
  leaderboard.add(tmp_path, entry(verdicts=more), replace=True)
  assert added(verdicts=more) == {'points': 2.5, 'source': 'another'}  # its own stays


def test_an_entry_of_a_run_that_went_on_is_the_same_but_for_its_seconds(made, tmp_path):
  """A run of more defenses in the same folder has the rows of the former ones."""
  path = leaderboard.add(tmp_path, made[PRUNE])
  stages = [{**stage, 'seconds': stage['seconds'] + 9.5} for stage in made[PRUNE]['stages']]
  assert stages and leaderboard.add(tmp_path, {**made[PRUNE], 'stages': stages}) == path
  assert leaderboard.read(tmp_path)[path.stem] == made[PRUNE]
  skipped = [{**stage, 'skipped': 'it was left out'} for stage in stages]
  with pytest.raises(UsageError, match=rf'{path.name} holds an entry that differs in stages'):
    leaderboard.add(tmp_path, {**made[PRUNE], 'stages': skipped})


def counts(entry, *values):
  for one, value in zip(entry['honest']['levels'], values, strict=True):
    one['count'] = value


@pytest.mark.parametrize(
  ('change', 'words'),
  [
    (lambda e: e.pop('flags'), "lacks field 'flags'"),
    (lambda e: e.update(note=1), "unknown field 'note'"),
    (lambda e: e['honest'].pop('by'), "honest lacks field 'by'"),
    (lambda e: e.update(trials='4'), "trials is '4', expected an integer"),
    (lambda e: e.update(trials=True), 'trials is True'),
    (lambda e: e.update(format=3), 'has the format 3'),
    (lambda e: e['versions'].update(autoleak='AutoLeak-9999'), "version is 'AutoLeak-9999'"),
    (lambda e: e['versions'].update(autoleak='AutoLeak'), "version is 'AutoLeak'"),
    (lambda e: counts(e, 1, 2, 2, 5), 'counts of'),
    (lambda e: counts(e, 2, 1, 2, 3), 'counts of'),
    (lambda e: counts(e, 2, 1, 2, 3), '4 of 4 trials'),
    (lambda e: counts(e, 0, 2, 2, 3), 'the interval of exact'),
    (lambda e: e['honest'].update(verdict='above chance'), "worst verdict is 'above chance'"),
    (lambda e: e['honest']['levels'][0].update(high=0.1), 'the interval of exact'),
    (lambda e: e['example'].update(seen='https://example.org/a.png'), 'the picture seen'),
    (lambda e: e.update(rows_sha256='0'), 'rows_sha256'),
    (lambda e: e.update(bound=1.5), 'bound is 1.5'),
    (lambda e: e['settings'].update(workdir='/'), "the setting 'workdir'"),
    (lambda e: e['settings'].update(seed=[0]), "the setting 'seed'"),
    (lambda e: e['settings'].update(defenses='none'), "its settings repeat 'none'"),
    (lambda e: e['cost'].update(points=float('inf')), 'points is inf'),
    (lambda e: e['cost'].update(interval=[2.0, 3.0]), 'the interval of the cost is'),
    (lambda e: e['cost'].update(interval=[1.0]), 'the interval of the cost is'),
    (lambda e: e['cost'].update(interval='wide'), "interval is 'wide', expected a list"),
    (lambda e: e.update(seed=7), 'the file needs this name'),
    (lambda e: e.update(seed=10**400), 'seed is 10000'),
    (lambda e: e.update(candidates=-1), 'candidates is -1, expected an integer in [0, '),
    (lambda e: e['cost'].update(points=1e308), 'points is 1e+308, expected a number in [-100, 100]'),
    (lambda e: e['cost'].update(points=10**400), 'expected a number in [-100, 100]'),
    (lambda e: e['honest'].update(levels=[]), 'its levels are []'),
    (lambda e: e['honest'].update(count=-1), 'count is -1'),
    (lambda e: e['task']['more'].update(note='\ud800'), 'expected printable text'),
    (lambda e: e['task'].update(model='\ud800'), 'expected printable text'),
    (lambda e: e['flags'].append('a' * 10**6), 'of at most 2000 characters'),
    (lambda e: e['settings'].update(seed=math.nan), 'seed is nan, expected a number'),
    (lambda e: e['example'].update(trial=4), 'its example is of trial 4, and there are 4'),
    (lambda e: e['example'].update(seen='data:image/png;base64,AAAA'), 'the picture seen'),
  ],
)
def test_what_cannot_be_true_is_refused(made, tmp_path, change, words):
  path = leaderboard.add(tmp_path, made[PRUNE])
  entry = json.loads(path.read_text('utf-8'))
  change(entry)
  path.write_text(json.dumps(entry), 'utf-8')
  with pytest.raises(UsageError) as error:
    leaderboard.read(tmp_path)
  assert str(path) in str(error.value) and words in str(error.value)


WRONG = [
  10**400, -(10**400), 2**63, -1, 1e308, math.nan, math.inf, [], {}, [[]], [None], None, True, '', 'x',
  '\ud800', '\0', '\u202e', 'a' * 10**5, {'\ud800': 1}, ['\ud800'], {'a': {'a': {'a': {'a': {'a': {}}}}}}, '<blink>',
]  # fmt: skip


def places(value, path=()):
  """Returns the path of each value within plain JSON."""
  inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
  return [path, *(place for key, one in inner for place in places(one, (*path, key)))]


@pytest.mark.slow
def test_a_file_that_someone_else_wrote_is_refused_or_shown(made, tmp_path):
  """Each value in turn is replaced by what it cannot be, or by what is strange."""
  draw, whole = random.Random(0), json.dumps(made[PRUNE])
  read = 0
  for place in places(made[PRUNE])[1:]:
    for value in draw.sample(WRONG, 6):
      entry = json.loads(whole)
      *outer, last = place
      functools.reduce(operator.getitem, outer, entry)[last] = value
      named = entry if isinstance(entry['defense'], str) else made[PRUNE]
      path = tmp_path / f'{leaderboard.name(named)}.json'
      path.write_text(json.dumps(entry), 'utf-8')
      try:
        leaderboard.read(tmp_path)
        write_leaderboard(tmp_path, tmp_path / 'page.html')
        assert '<blink>' not in (tmp_path / 'page.html').read_text('utf-8')
        read += 1
      except UsageError as error:
        assert path.name in str(error)
      path.unlink()
  assert read > 20  # of what may be any text, and any plain value


@pytest.mark.parametrize('content', [b'', b'{"format": 1', b'[1]', b'\xff\xfe', b'[' * 10**5])
def test_a_damaged_file_is_named(tmp_path, content):
  (tmp_path / 'damaged.json').write_bytes(content)
  with pytest.raises(UsageError, match=r'damaged\.json'):
    leaderboard.read(tmp_path)


def test_folders_that_are_none(tmp_path):
  with pytest.raises(UsageError, match='which is none'):
    leaderboard.read(tmp_path / 'nowhere')
  with pytest.raises(UsageError, match='holds no finished AutoLeak'):
    leaderboard.load(tmp_path)
  (tmp_path / 'autoleak.json').write_text('{"stages": [{}]}')
  with pytest.raises(UsageError, match='of an earlier version, without digests of its files; run launch/autoleak'):
    leaderboard.load(tmp_path)
  storage.seal(tmp_path / 'autoleak.json', {'stages': [{}]}, {})
  with pytest.raises(UsageError, match='is damaged'):
    leaderboard.load(tmp_path)


def test_another_run_is_compared(made, run):
  entry = made[PRUNE]
  assert leaderboard.compare(entry, run) == []
  assert leaderboard.compare(entry, changed(run, PRUNE, psnr=1.0)) == [leaderboard.BITS]
  weaker = leaderboard.compare(entry, changed(run, PRUNE, verdict='recognisable'))
  assert weaker == ['honest-but-curious server, exact was 1 of 4, now 0 of 4', leaderboard.BITS]
  seed = leaderboard.compare(entry, found(seed=1, weights_fingerprint='dd'))
  assert seed == ['seed was 0, now 1', 'fingerprint of weights was weights, now dd']
  honest = leaderboard.compare(entry, found(malicious=False))
  assert 'malicious server, above chance was 4 of 4, now not run' in honest
  with pytest.raises(UsageError, match='unknown defense of the run'):
    leaderboard.compare(entry, found({'none': ['exact'] * 4}))


def test_what_the_likelihood_finds_is_compared(run):
  then, now = (found(named={PRUNE: named}) for named in ([0, 1], [0]))  # pictures show both, too
  entry = next(one for one in leaderboard.entries(then) if one['defense'] == PRUNE)
  assert leaderboard.compare(entry, then) == []
  assert leaderboard.compare(entry, now) == ['likelihood, originals first was 2 of 4, now 1 of 4']
  changes = leaderboard.compare(entry, run)
  assert changes[0] == 'likelihood, originals first was 2 of 4, now not run' and len(changes) == 2


def test_weights_that_are_trained_before_may_be_other_bits(made, run):
  """Another seed, or weights that are drawn, explain no rounding."""
  drawn = made[PRUNE]
  trained = {**drawn, 'task': {**drawn['task'], 'rounds_before': 1}}
  now = {'weights_fingerprint': 'dd', 'rounds_before': 1}
  assert leaderboard.compare(trained, found(**now)) == [leaderboard.TRAINED]
  assert leaderboard.TRAINED.startswith(leaderboard.ROUNDED)
  assert 'fingerprint of weights was weights, now dd' in leaderboard.compare(trained, found(**now, seed=1))
  assert leaderboard.compare(drawn, found(weights_fingerprint='dd')) == ['fingerprint of weights was weights, now dd']


def test_other_versions_explain_other_bits(made, run):
  older = {**made[PRUNE], 'versions': {**made[PRUNE]['versions'], 'jax': '0.9.0'}}
  assert leaderboard.compare(older, run) == []
  said = leaderboard.compare({**older, 'rows_sha256': '0' * 64}, run)
  assert said == [f'{leaderboard.BITS}; jax was 0.9.0, now 0.10.2']


def identification(made, identified=3, **config):
  """Returns what `gradleak.identify` would find on the task of `made`, four originals under pruning."""
  task = made[PRUNE]['task']
  known = {
    **{part: value for part, value in task.items() if part != 'more'},
    **task['more'],
    'public_fingerprint': 'public',
    'seed': made[PRUNE]['seed'],
  }
  row = {'defense': 'p', 'copies': 'exact', 'model': 'exact', 'rounds': 1, 'candidates': 99, 'posterior': None}
  rows = [
    {**row, 'statistic': 'likelihood', 'trial': trial, 'identified': trial < identified, 'present': None}
    for trial in range(4)
  ]
  return Identification({**known, 'defenses': {'p': 'prune(rate=0.9)'}, **config}, rows, [], 1.0)


def test_originals_that_are_first_by_likelihood_stand_beside_the_levels(made, tmp_path):
  entry = former(made[PRUNE])
  assert leaderboard.identified(made[PRUNE], identification(made)) is None, 'it has rankings of its own'
  found = leaderboard.identified(entry, identification(made))
  assert found['likelihood'] == {'identified': 3, 'n': 4, 'candidates': 99, 'rounds': 1, 'model': 'exact'}
  assert {part: value for part, value in found.items() if part != 'likelihood'} == entry
  leaderboard.add(tmp_path, found)
  page = render_leaderboard(leaderboard.read(tmp_path))
  assert 'by likelihood,' in page
  assert 'among 99' in page
  assert '3 of 4' in page
  leaderboard.add(tmp_path, former(made['none']))
  assert 'not run' in render_leaderboard(leaderboard.read(tmp_path)), 'of the others it is not known'


@pytest.mark.parametrize(
  'change',
  [
    {'model': 'mlp'}, {'local_epochs': 3}, {'public_fingerprint': 'x'}, {'defenses': {'p': 'prune(rate=0.8)'}},
    {'seed': 7},
  ],
)  # fmt: skip
def test_a_likelihood_of_another_task_or_defense_is_none_of_an_entry(made, change):
  entry = former(made[PRUNE])
  assert leaderboard.identified(entry, identification(made, **change)) is None


def test_altered_copies_alone_say_nothing_of_an_entry(made):
  found = identification(made)
  copies = dataclasses.replace(found, rows=[{**row, 'copies': 'jpeg'} for row in found.rows])
  assert leaderboard.identified(former(made[PRUNE]), copies) is None


def test_more_originals_than_uploads_are_refused(made):
  wrong = {
    **former(made[PRUNE]),
    'likelihood': {'identified': 5, 'n': 4, 'candidates': 99, 'rounds': 1, 'model': 'exact'},
  }
  with pytest.raises(UsageError, match='5 of 4 are identified'):
    checked(wrong, 'it')
