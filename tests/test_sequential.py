"""Trials that stop: answers that are wrong as rarely as they say, rows of the full audit, whatever happens between."""

import dataclasses
import functools
import itertools
import json
import math
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradleak as gl
from gradleak import report
from gradleak.audit import granted, run, sequential
from gradleak.audit.sequential import Question
from gradleak.core import anytime, statistics
from gradleak.engine import groups
from gradleak.report.page import render
from gradleak.studies.sweep import sweep
from gradleak.summary import cases, worst
from tests.attackers import divide

pytestmark = pytest.mark.usefixtures('fast_compilation')

MOST = 20  # trials, in looks of 8, 8 and 4
RATE = 0.05


# ---- intervals


def ever(wrong, p, most, step):
  """Returns the exact probability that `wrong(successes, n)` holds at any look at trials of probability p."""
  alive, total = np.ones(1), 0.0
  for n in range(1, most + 1):
    alive = np.append(alive * (1 - p), 0) + np.append(0, alive * p)
    if n % step == 0:
      hit = np.asarray([wrong(k, n) for k in range(n + 1)])
      total += alive[hit].sum()
      alive[hit] = 0
  return total


def misled(decide, p, most=120, step=sequential.LOOK):
  """Returns the probability that the answer is wrong; where the shares are equal, any answer is."""
  question = Question('recognisable', decide, None, RATE, 10**6)
  wrong = {'above'} if p <= decide else set()
  wrong |= {'below'} if p >= decide else set()
  return ever(lambda k, n: question.answer(k, n) in wrong, p, most, step)


@pytest.fixture(autouse=True)
def anew():
  """Intervals are kept by their counts: none of another test, whose rule may be another."""
  sequential._interval.cache_clear()
  yield
  sequential._interval.cache_clear()


@pytest.mark.long
@pytest.mark.parametrize(('decide', 'p'), [(0.5, 0.5), (0.5, 0.48), (0.5, 0.53), (0.1, 0.1), (0.1, 0.08), (0.9, 0.91)])
def test_an_answer_is_wrong_as_rarely_as_it_says(decide, p):
  assert 0 < misled(decide, p) <= RATE


@pytest.mark.parametrize(('decide', 'p'), [(0.5, 0.5), (0.1, 0.1)])
def test_intervals_of_a_fixed_number_of_trials_are_wrong_more_often(decide, p):
  with mock.patch.object(anytime, 'proportion_interval', statistics.proportion_interval):
    assert misled(decide, p) > 1.5 * RATE


@pytest.mark.parametrize('p', [0.03, 0.3, 0.5])
def test_a_look_after_each_trial_misses_as_rarely(p):
  limit = math.log(1 / RATE)
  beyond = [anytime.log_evidence(np.arange(n + 1), n, p) >= limit for n in range(401)]
  assert 0 < ever(lambda k, n: beyond[n][k], p, 400, step=1) <= RATE


@pytest.mark.long
@pytest.mark.parametrize('p', [0.1, 0.4])
def test_a_share_that_is_called_known_is(p):
  question = Question('exact', None, 0.15, RATE, 10**6)
  assert question.answer(0, 8) is None

  def missed(k, n):
    _, low, high = anytime.proportion_interval(k, n)
    return question.answer(k, n) == 'within' and not low <= p <= high

  assert ever(missed, p, 120, step=sequential.LOOK) <= RATE


def test_the_interval_of_a_share_by_hand():
  # of n failures the mixture is C(2n, n) / 4ⁿ, and the evidence against p that over (1 − p)ⁿ
  share, low, high = anytime.proportion_interval(0, 7)
  assert (share, low) == (0, 0)
  assert high == pytest.approx(1 - (math.comb(14, 7) / 4**7 * 0.05) ** (1 / 7), abs=1e-9)
  np.testing.assert_allclose(anytime.proportion_interval(7, 7), [1, 1 - high, 1])
  _, low, high = anytime.proportion_interval(3, 10)
  integral = math.gamma(3.5) * math.gamma(7.5) / math.gamma(11) / math.pi
  for end in (low, high):
    assert integral / (end**3 * (1 - end) ** 7) == pytest.approx(20, rel=1e-6)
  assert anytime.proportion_interval(0, 0)[1:] == (0, 1)
  assert anytime.proportion_interval(6, 20, independent=10) == pytest.approx(anytime.proportion_interval(3, 10))


def test_part_of_a_success_is_no_evidence_against_any_share():
  share, low, high = anytime.proportion_interval(1, 200, independent=1)  # a two-hundredth of a success in one trial
  assert (share, low) == (1 / 200, 0) and share < high < 1
  np.testing.assert_allclose(anytime.proportion_interval(199, 200, independent=1), [1 - share, 1 - high, 1])


@pytest.mark.parametrize('n', [1, 5, 40])
def test_an_interval_for_any_number_of_trials_is_wider_than_one_for_a_fixed_number(n):
  for k in range(n + 1):
    _, low, high = statistics.proportion_interval(k, n)
    _, lower, higher = anytime.proportion_interval(k, n)
    assert lower <= low and high <= higher and (n == 1 or higher - lower > high - low)
  assert anytime.proportion_interval(n, n, 0.99)[1] < anytime.proportion_interval(n, n, 0.9)[1]


def misses(interval, looks=range(5, 45, 3), runs=250):
  """Returns in which share of runs the mean of normal values is outside at any look."""
  rng = np.random.default_rng(3)
  values = rng.normal(4, 0.1, (runs, max(looks)))
  return np.mean([any(not low <= 4 <= high for n in looks for _, low, high in [interval(x[:n])]) for x in values])


@pytest.mark.long
def test_the_interval_of_a_mean_misses_as_rarely_as_it_says_and_that_of_student_does_not():
  assert misses(anytime.mean_interval) <= RATE
  assert misses(statistics.mean_interval) > 2 * RATE


def test_the_interval_of_a_mean_at_its_ends():
  assert anytime.mean_interval([1.0, 2.0, 3.0, 4.0])[1:] == (-math.inf, math.inf)
  mean, low, high = anytime.mean_interval([1.0, 2.0, math.nan, 3.0, 4.0, 5.0])
  # n = 5: the evidence of t is 6^(−1/2) ((1 + t²/4) / (1 + t²/24))^(5/2)
  t = (mean - low) / (np.std([1, 2, 3, 4, 5], ddof=1) / 5**0.5)
  assert 6**-0.5 * ((1 + t**2 / 4) / (1 + t**2 / 24)) ** 2.5 == pytest.approx(20)
  assert (mean, high - mean) == (3, pytest.approx(mean - low))
  assert anytime.mean_interval([2.0] * 6) == (2, 2, 2)
  assert anytime.mean_interval([2.0] * 4)[1:] == (-math.inf, math.inf)
  assert all(math.isnan(end) for end in anytime.mean_interval([1.0])[1:])
  with pytest.raises(gl.UsageError, match='confidence'):
    anytime.mean_interval([1.0, 2.0], 1.5)


# ---- looks


def rows_of(**reached):
  """Returns rows, one per trial: {defense: whether each is recovered}."""
  return [
    {'defense': label, 'trial': t, 'control': False, 'verdict': 'exact' if one else 'nothing seen'}
    for label, of_trials in reached.items()
    for t, one in enumerate(of_trials)
  ]


def asked(rows, most=64, defenses=('none', 'a', 'b'), **question):
  given = {'level': 'recognisable', 'decide': 0.5, 'within': None, 'error_rate': RATE, 'most': most, **question}
  found = sequential.further(rows, Question(**given), defenses, {'none'})
  assert all(trials == frozenset(range(len(trials))) for trials in found.values())
  return {label: len(trials) for label, trials in found.items()}


def test_trials_run_until_the_question_is_decided():
  yes, no = [True] * 8, [False] * 8
  assert asked([]) == {'none': 8, 'a': 8, 'b': 8}
  assert asked([], most=5) == {'none': 5, 'a': 5, 'b': 5}
  # decided are 'none' and 'b'; the undefended uploads go on beside 'a'
  assert asked(rows_of(none=yes, a=yes[:4] + no[:4], b=no)) == {'none': 16, 'a': 16, 'b': 8}
  assert asked(rows_of(none=yes * 2, a=[True, False] * 8, b=no)) == {'none': 24, 'a': 24, 'b': 8}
  assert asked(rows_of(none=yes * 2, a=[True, False] * 8, b=no), most=20) == {'none': 20, 'a': 20, 'b': 8}
  assert asked(rows_of(none=yes, a=yes, b=no)) == {'none': 8, 'a': 8, 'b': 8}
  assert asked(rows_of(none=yes, a=no)) == {'none': 8, 'a': 8, 'b': 8}  # 'b' was added


def test_the_worst_of_all_attackers_counts_and_control_runs_do_not():
  fails = rows_of(a=[False] * 8)
  hits = [{**row, 'verdict': 'recognisable', 'attack': 'other'} for row in fails]
  controls = [{**row, 'control': True, 'verdict': 'exact', 'trial': row['trial'] + 8} for row in fails]
  config = {'decide': 0.5, 'level': 'recognisable', 'error_rate': RATE, 'trials': 64}
  for rows in (fails + hits + controls, controls + hits + fails):
    assert [stop.answer for stop in sequential.stops(rows, config)] == ['above']
  assert [stop.answer for stop in sequential.stops(fails + controls, config)] == ['below']
  assert [stop.answer for stop in sequential.stops(fails + hits, {**config, 'level': 'exact'})] == ['below']
  assert sequential.stops(fails, {'trials': 8}) == []


def test_uploads_on_which_all_attacks_diverged_are_not_those_that_show_nothing():
  """64 uploads whose attacks all diverged were answered with fewer than a half, after the first eight."""
  config = {'decide': 0.5, 'level': 'recognisable', 'error_rate': RATE, 'trials': 64}

  def stop(lost, reached, other=(), **changes):
    rows = rows_of(a=[True] * reached + [False] * (64 - reached))
    rows = rows[: 64 - lost] + [{**row, 'verdict': 'diverged'} for row in rows[64 - lost :]]
    return sequential.stops(rows + [{**row, 'verdict': one} for one in other for row in rows], {**config, **changes})[0]

  every = stop(64, 0)
  assert (every.answer, every.after, every.reached, every.diverged) == ('undecided', 64, 0, 64)
  assert (every.low, every.high) == (0, 1)
  some = stop(20, 0)
  assert (some.answer, some.diverged) == ('below', 20)
  assert some.high == anytime.proportion_interval(20, 64)[2] > anytime.proportion_interval(0, 64)[2] and some.low == 0
  assert stop(30, 34).answer == 'above'  # what succeeded is beyond doubt
  for verdict in ('nothing seen', 'inconclusive'):  # of another attack; one becomes the other once all trials are known
    assert (stop(64, 0, [verdict]).answer, stop(64, 0, [verdict]).diverged) == ('below', 0)
  share = {'decide': None, 'within': 0.2}
  assert stop(64, 0, **share).answer == 'undecided' and stop(0, 0, **share).answer == 'within'


def test_the_first_answer_stands():
  reached = [True] * 8 + [False] * 8  # the interval after 16 has the share in it again
  config = {'decide': 0.5, 'level': 'exact', 'error_rate': RATE, 'trials': 16}
  (stop,) = sequential.stops(rows_of(none=reached), config)
  assert (stop.answer, stop.after, stop.trials, stop.reached) == ('above', 8, 16, 8)
  assert stop.low < 0.5 < stop.high
  (stop,) = sequential.stops(rows_of(none=[True, False] * 8), config)
  assert (stop.answer, stop.after) == ('undecided', 16)
  assert sequential.stops(rows_of(none=[True, False] * 4), config) == []  # more have to run


# ---- audits


def hide_small_digits(updates, params):
  """Sends nothing of the kernel where the digit is below five."""
  del params
  return {**updates, 'kernel': jnp.where(updates['bias'][:5].min() < 0, 0.0, updates['kernel'])}


DEFENSES = {
  'none': None,
  'some': gl.defenses.wrap(optax.stateless(hide_small_digits), 'upload'),
  'all': gl.defenses.gaussian(stddev=100),
}


@pytest.fixture(scope='module')
def scenario(linear):
  data = gl.data.load('digits', limit=MOST)
  return gl.scenario(linear.client.model, data.samples, data.targets, key=jax.random.key(0), dataset='digits')


def audit(scenario, defenses=DEFENSES, attacks=divide, trials=MOST, **settings):
  given = {'controls': 8, 'group_size': 4, 'progress': 'none', 'knowledge': 'non-adaptive', **settings}
  return gl.audit(jax.random.key(7), scenario, defenses, attacks, trials, **given)


@pytest.fixture(scope='module')
def full(scenario, fast_compilation):
  return audit(scenario)


@pytest.fixture(scope='module')
def stopped(scenario, fast_compilation):
  return audit(scenario, decide=0.5)


def bare(rows):
  return [{name: value for name, value in row.items() if name != 'stopped'} for row in rows]


@pytest.mark.long
def test_an_audit_stops_where_the_question_is_decided(stopped, full):
  assert [(stop.defense, stop.answer, stop.after, stop.trials) for stop in stopped.stops] == [
    ('none', 'above', 8, MOST),
    ('some', 'undecided', MOST, MOST),
    ('all', 'below', 8, 8),
  ]
  assert [len([row for row in stopped.rows if row['defense'] == label]) for label in DEFENSES] == [MOST, MOST, 8]
  assert {(row['defense'], row['stopped']) for row in stopped.rows} == {
    ('none', 'above'), ('some', 'undecided'), ('all', 'below'),
  }  # fmt: skip
  assert stopped.stops[0].reached == MOST and 0 < stopped.stops[1].reached < MOST and stopped.stops[2].reached == 0
  assert full.stops == [] and not any('stopped' in row for row in full.rows)


@pytest.mark.long
def test_its_rows_are_the_first_ones_of_the_full_audit(stopped, full):
  counts = {stop.defense: stop.trials for stop in stopped.stops}
  assert bare(stopped.rows) == [row for row in full.rows if row['trial'] < counts[row['defense']]]
  assert stopped.controls == full.controls
  for case, images in stopped.reconstructions.items():
    np.testing.assert_array_equal(images, full.reconstructions[case][: counts[case[1]]])


@pytest.mark.long
def test_the_settings_say_what_was_asked(stopped, full):
  asked_ = {'decide': 0.5, 'within': None, 'level': 'recognisable', 'error_rate': 0.05}
  assert stopped.config == {**full.config, **asked_}


@pytest.mark.long
def test_a_defense_may_be_called_as_the_control_runs_are(scenario, stopped):
  result = audit(scenario, {'none': None, 'null_gradient': DEFENSES['some']}, decide=0.5)
  assert [(stop.answer, stop.trials) for stop in result.stops] == [('above', MOST), ('undecided', MOST)]
  assert not any('stopped' in row for row in result.controls) and len(result.controls) == 8


@pytest.mark.long
def test_a_share_to_a_width(scenario):
  result = audit(scenario, within=0.3, error_rate=0.1, level='exact')
  assert [stop.answer for stop in result.stops] == ['within'] * 3
  assert {stop.defense: stop.after for stop in result.stops} == {'none': 8, 'some': 20, 'all': 8}
  assert all((stop.high - stop.low) / 2 <= 0.3 for stop in result.stops)


class Killed(BaseException):
  """What stops a run from outside."""


@pytest.mark.long
def test_a_run_that_was_stopped_between_looks_goes_on(scenario, stopped, tmp_path, monkeypatch):
  work = run._Worker.work
  looks = itertools.count()

  def killed(self, *arguments):
    if next(looks) == 1:
      raise Killed
    return work(self, *arguments)

  monkeypatch.setattr(run._Worker, 'work', killed)
  with pytest.raises(Killed):
    audit(scenario, decide=0.5, workdir=tmp_path / 'work')
  result = audit(scenario, decide=0.5, workdir=tmp_path / 'work')
  assert next(looks) == 5  # two looks, one of them killed, then three, the first of them found
  assert result.rows == stopped.rows and result.controls == stopped.controls
  kept = [json.loads(line) for line in (tmp_path / 'work' / 'rows.jsonl').read_text().splitlines()]
  assert kept == stopped.rows
  assert gl.load(tmp_path / 'work').stops == stopped.stops
  assert audit(scenario, decide=0.5, workdir=tmp_path / 'work').resumed
  with pytest.raises(gl.UsageError, match='decide'):
    audit(scenario, decide=0.6, workdir=tmp_path / 'work')


def nothing(client):
  """An attack that never finds anything."""
  del client
  return gl.attacks.closed_form(lambda observation: (jnp.zeros(observation.batch_shape), None))


@pytest.mark.slow
def test_what_is_added_later_changes_answers_as_if_it_had_been_there(scenario, tmp_path):
  few = {'none': None, 'some': DEFENSES['some']}
  audit(scenario, few, {'blind': nothing}, decide=0.5, workdir=tmp_path / 'work')
  assert {stop.trials for stop in gl.load(tmp_path / 'work').stops} == {8}
  first = audit(scenario, DEFENSES, {'blind': nothing, 'sees': divide}, decide=0.5, workdir=tmp_path / 'work')
  assert [stop.trials for stop in first.stops] == [MOST, MOST, 8]
  apart = audit(scenario, DEFENSES, {'blind': nothing, 'sees': divide}, decide=0.5)
  assert first.rows == apart.rows


@pytest.mark.long
def test_trials_that_an_earlier_run_needed_are_left_out_where_they_are_no_longer(scenario, tmp_path):
  labels = {'a': DEFENSES['some']}  # the first attack recovers some uploads, so that all trials run
  audit(scenario, labels, {'sees': divide}, decide=0.5, workdir=tmp_path / 'work')
  both = audit(scenario, labels, {'sees': divide, 'all': peeking(scenario)}, decide=0.5, workdir=tmp_path / 'work')
  assert [(stop.answer, stop.trials) for stop in both.stops] == [('above', 8)]
  assert {row['trial'] for row in both.rows} == set(range(8))


def peeking(scenario):
  """Returns an attack that knows the images by their labels' uploads: it returns the nearest private image."""
  images = jnp.asarray(scenario.samples)

  def read(observation):
    bias = observation.update['bias']
    logits = jax.vmap(lambda x: x.reshape(-1) @ observation.variables['params']['kernel'])(images)
    own = jax.nn.one_hot(jnp.argmin(bias), 10)[None]
    return images[jnp.argmin(jnp.abs(jax.nn.softmax(logits) - own - bias[None]).sum(1))][None], None

  return lambda client: gl.attacks.closed_form(read)


@pytest.mark.parametrize(
  ('settings', 'says'),
  [
    ({'decide': 0.5, 'within': 0.1}, 'two questions'),
    ({'decide': 0.5, 'only': {'none': [0]}}, 'only names them'),
    ({'level': 'exact'}, 'level is a term'),
    ({'error_rate': 0.1}, 'error_rate is a term'),
    ({'decide': 0.0}, 'decide'),
    ({'decide': 1.5}, 'decide'),
    ({'within': 0.0}, 'within'),
    ({'decide': 0.5, 'level': 'inconclusive'}, 'level'),
    ({'decide': 0.5, 'error_rate': 0.0}, 'error_rate'),
    ({'decide': 0.5, 'shards': 2}, 'do not see each other'),
    ({'decide': 0.5, 'split': True}, 'do not see each other'),
  ],
)
def test_what_cannot_be_asked_is_refused(scenario, settings, says):
  with pytest.raises(gl.UsageError, match=says):
    audit(scenario, trials=4, **settings)


def test_samples_that_are_sorted_by_class_are_refused(scenario):
  faces = [1] * 50 + [0] * 50  # those of the embedded data: all of the first looks are faces
  for classes in (faces, faces[::-1], [2] * 5 + [0] * 5 + [1] * 5):
    with pytest.raises(gl.UsageError, match='sorted by class'):
      sequential.check_order(np.asarray(classes))
  for classes in (faces[:50], [0, 1, 2] * 20, [*range(10)], [1, 1, 0], [1] * 20 + [0] + [1] * 20 + [0] * 20):
    sequential.check_order(np.asarray(classes))
  order = np.argsort(scenario.targets[:MOST], kind='stable')
  ordered = scenario._replace(samples=scenario.samples[order], targets=scenario.targets[order])
  with pytest.raises(gl.UsageError, match='sorted by class: shuffle them'):
    audit(ordered, decide=0.5)


def test_processes_that_share_the_trials_are_refused(scenario, tmp_path):
  with pytest.raises(gl.UsageError, match='do not see each other'):
    audit(scenario, decide=0.5, process=(0, 2), workdir=tmp_path / 'work')
  assert not (tmp_path / 'work').exists()
  audits = {'a': (jax.random.key(7), scenario)}
  given = {'progress': 'none', 'say': lambda _: None, 'controls': 8, 'knowledge': 'non-adaptive'}
  with pytest.raises(gl.UsageError, match='do not see each other'):
    sweep(audits, DEFENSES, divide, MOST, workdir=tmp_path / 'sweep', process=(0, 2), decide=0.5, **given)


@pytest.mark.long
def test_a_sweep_stops_each_of_its_audits(scenario, stopped, tmp_path):
  given = {'progress': 'none', 'controls': 8, 'knowledge': 'non-adaptive', 'group_size': 4}
  said = []
  rows = sweep(
    {'a': (jax.random.key(7), scenario)}, DEFENSES, divide, MOST, workdir=tmp_path / 'sweep', decide=0.5,
    say=said.append, **given,
  )  # fmt: skip
  assert rows == [{'audit': 'a', **row} for row in stopped.rows]
  assert said[0].startswith('at most ')


# ---- speed


def test_later_looks_run_in_the_program_of_the_first():
  devices = jax.local_devices()
  layout = groups.Layout(4, devices)
  wide, narrow = groups.place(np.arange(40), layout), groups.place(np.arange(3), layout._replace(room=40))
  assert narrow.capacity == wide.capacity and narrow.devices == wide.devices
  assert narrow.counts.sum() == 1 and groups.place(np.arange(3), layout).capacity == 2
  assert groups.place(np.arange(40), groups.Layout(4, devices, room=3)).capacity == wide.capacity


def test_no_look_but_the_first_compiles_an_attack(scenario, monkeypatch):
  shapes = []
  table_run = run.run

  def noted(group, made, *arguments, **settings):
    stacked = jax.tree.leaves(made.shared['views'])[0].shape[0]
    shapes.append((len(made.lanes), max(made.room, len(made.lanes)), stacked))
    return table_run(group, made, *arguments, **settings)

  monkeypatch.setattr(run, 'run', noted)
  audit(scenario, decide=0.5)
  assert [lanes for lanes, *_ in shapes] == [32, 16, 8]  # 8 control runs among the first
  assert len({rest for _, *rest in map(tuple, shapes) for rest in [tuple(rest)]}) == 1


def test_an_attack_learns_once(scenario, monkeypatch):
  calls = []

  def prepared(group, attack, simulates=None):
    calls.append(attack)
    return jnp.zeros(3)

  monkeypatch.setattr(granted, 'prepared', prepared)
  audit(scenario, decide=0.5)
  assert len(calls) == 1


# ---- reports


@pytest.mark.long
def test_all_intervals_are_anytime_valid(stopped, full):
  of, exact = ({(one['attack'], one['defense']): one for one in cases.summarise(r.rows)} for r in (stopped, full))
  for case, one in of.items():
    _, *bounds = anytime.proportion_interval(one['recovered'], one['n'])
    assert [one['success_low'], one['success_high']] == bounds
    assert one['stopped'] == {'none': 'above', 'some': 'undecided', 'all': 'below'}[case[1]]
    assert exact[case]['stopped'] is None
  some = next(one for case, one in of.items() if case[1] == 'some')
  values = [row['ssim'] for row in stopped.rows if row['defense'] == 'some']
  assert some['ssim_low'] == pytest.approx(max(-1, anytime.mean_interval(values)[1]))
  for entry in cases.worst_case(stopped.rows):
    _, *bounds = anytime.proportion_interval(entry['recovered'], entry['n'])
    assert [entry['success_low'], entry['success_high']] == bounds
  for line in worst.lines(stopped.rows, cases.worst_case(stopped.rows), functools.partial(worst.pair, stopped)):
    _, *bounds = anytime.proportion_interval(line['count'], line['n'])
    assert [line['success_low'], line['success_high']] == bounds
  for entry in worst.levels(stopped.rows):
    for level in entry['levels']:
      _, *bounds = anytime.proportion_interval(level['count'], entry['n'])
      assert [level['success_low'], level['success_high']] == bounds
  for entry in worst.levels(full.rows):
    _, *bounds = statistics.proportion_interval(entry['levels'][0]['count'], entry['n'])
    assert [entry['levels'][0]['success_low'], entry['levels'][0]['success_high']] == bounds


@pytest.mark.long
def test_reports_say_how_trials_stopped(stopped, full):
  table = ' '.join(report.terminal_table(stopped).split())
  assert 'whether its attackers bring more, or fewer, than 50.0 % of the uploads to “recognisable” or further' in table
  assert 'more under none (8 trials); undecided under some (20 trials); fewer under all (8 trials)' in table
  assert 'anytime-valid' in table and '0 of 8 (0–44 %)' in table
  rows = [{**row, 'verdict': 'diverged'} if row['defense'] == 'all' else row for row in stopped.rows]
  lost = dataclasses.replace(stopped, rows=rows, config={**stopped.config, 'trials': 8})
  table = ' '.join(report.terminal_table(lost).split())
  assert 'undecided under all (8 trials, and all attacks diverged on 8)' in table and 'fewer under' not in table
  page, fixed = render(stopped), render(full)
  assert page.count('anytime-valid') == 4 and 'exact 95' not in page and 'Clopper' not in page
  assert 'at most 20 trials' in page
  assert 'anytime-valid' not in fixed and 'Clopper' in fixed and 'at most 20' not in fixed
