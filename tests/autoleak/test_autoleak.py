import dataclasses
import importlib
import json
import math
import pathlib
import shutil

import jax
import numpy as np
import optax
import pytest
from scipy import stats

import gradleak as gl
from gradleak import report
from gradleak.audit.verdict import VERDICTS
from gradleak.core import errors, statistics, storage
from gradleak.defenses import Mechanism
from gradleak.federated.augmentation import AUGMENTATIONS
from gradleak.modalities import of_config
from gradleak.studies.autoleak import baseline, bounds, ensemble, leaderboard, rankings
from tests import texts
from tests.circle import said_of_images
from tests.leaderboards import found as made_up
from tests.leaderboards import rank
from tests.report.parsing import Page

pytestmark = pytest.mark.usefixtures('fast_compilation')
MODULE = importlib.import_module('gradleak.studies.autoleak')
HIDDEN = gl.defenses.gaussian(stddev=1.0)
SHORT = (
  ensemble.Ranking('likelihood'),
  ensemble.Stage('closed forms', (gl.attacks.fidel(), gl.attacks.april())),
  ensemble.Stage('matching', (gl.attacks.csdlg_fast(steps=40, tv=1e-6),)),
  ensemble.Stage('averaged rounds', (gl.attacks.csdlg_fast(steps=40, tv=1e-6),), rounds=2, skips=ensemble.repeats),
  ensemble.Stage('malicious server', (gl.servers.imprint(bins=8),), honest=False),
)
LEARNED = ensemble.Stage('learned inverse', (gl.attacks.lti(steps=4, hidden=8, batch_size=8),))


class Heard(list):
  """A callback for progress that takes notes."""

  def __call__(self, attack, progress, objective):
    self.append(attack)

  def note(self, text):
    self.append(text)

  def end(self):
    self.append('end')


HEARD = Heard()


@pytest.fixture(scope='module')
def scenario():
  test, train = (gl.data.load('digits', split, limit=160) for split in ('test', 'train'))
  model = gl.models.create('mlp(widths=16)', 10, init='explicit')
  return gl.scenario(
    model, test.samples[:3], test.targets[:3], key=jax.random.key(0), dataset='digits', gallery=test.samples[3:],
    public=(train.samples[:16], train.targets[:16]),
  )  # fmt: skip


def run(scenario, patched, stages=SHORT, **settings):
  patched.setattr(MODULE, 'ENSEMBLES', {'images': stages})
  patched.setattr(MODULE, 'CONTROLS', 4)
  defenses = [gl.defenses.prune(rate=0.5), HIDDEN]
  return gl.autoleak(jax.random.key(1), scenario, defenses, 3, **{'progress': 'none', **settings})


@pytest.fixture(scope='module')
def both(scenario, tmp_path_factory):
  folder = tmp_path_factory.mktemp('autoleak')
  with pytest.MonkeyPatch.context() as patched:
    found = run(scenario, patched, workdir=folder)
    again = run(scenario, patched, workdir=folder, progress=HEARD)
    return found, again, run(scenario, patched, SHORT[1:3], staged=False), folder


def stage(found, name):
  return next(entry for entry in found.stages if entry['stage'] == name)


@pytest.mark.long
def test_what_is_exact_is_not_attacked_again(both):
  found, _, whole, _ = both
  assert found.verdicts()['none'] == ['exact'] * 3
  assert stage(found, 'closed forms')['targets'] == 9
  first = {(row['defense'], row['trial']) for row in found.rows
           if row['stage'] == 'closed forms' and row['verdict'] == 'exact'}  # fmt: skip
  later = {(row['defense'], row['trial']) for row in found.rows if row['stage'] == 'matching'}
  witnesses = {('none', trial) for trial in range(ensemble.WITNESSES)}
  assert witnesses <= later and not (later - witnesses) & first
  assert stage(whole, 'matching')['targets'] == 9 > stage(found, 'matching')['targets']


@pytest.mark.long
def test_the_worst_case_is_at_least_that_of_each_attack(both):
  for found in both[:3]:
    for honest in (True, False):
      worst = found.verdicts(honest)
      for row in found.rows:
        if row['honest'] == honest:
          assert VERDICTS.index(worst[row['defense']][row['trial']]) <= VERDICTS.index(row['verdict'])


@pytest.mark.long
def test_staging_costs_no_verdict(both):
  """An image that one stage shows exactly cannot be shown any better."""
  found, _, whole, _ = both
  for defense, verdicts in whole.verdicts().items():
    assert [v == 'exact' for v in verdicts] == [v == 'exact' for v in found.verdicts()[defense]]


@pytest.mark.long
def test_attacks_that_do_not_fit_are_named(both):
  left_out = stage(both[0], 'closed forms')['left_out']
  assert list(left_out) == ['april'] and 'position embedding' in left_out['april']


@pytest.mark.long
def test_without_public_images_what_learns_is_left_out(scenario):
  with pytest.MonkeyPatch.context() as patched:
    patched.setattr(MODULE, 'ENSEMBLES', {'images': (SHORT[1], LEARNED)})
    patched.setattr(MODULE, 'CONTROLS', 2)
    bare = scenario._replace(public=None)
    found = gl.autoleak(jax.random.key(1), bare, None, 1, progress='none')
  assert (
    found.stages[1]['left_out'] == {str(LEARNED.attacks[0]): 'it learns from public samples, and there are none'}
    and not found.stages[1]['attacks']
  )
  assert set(found.verdicts()) == {'none'}


@pytest.mark.long
def test_a_ranking_re_identifies_without_a_picture(both):
  """The digits of an undefended upload are first by likelihood; the noise of control runs is counted beside them."""
  found = both[0]
  assert {(one['defense'], one['rounds'], one['model']) for one in found.ranked} >= {('none', 1, 'exact')}
  assert all(one['trials'] == 3 and one['controls'] == 4 and one['candidates'] >= 99 for one in found.ranked)
  assert found.named()['none'] == {0, 1, 2} and found.named(False) == {}
  none = next(one for one in found.ranked if one['defense'] == str(HIDDEN))
  told = dataclasses.replace(
    found, rows=[{**row, 'verdict': 'nothing seen', 'success': False} for row in found.rows],
    ranked=[{**none, 'named': [1]}],
  )  # fmt: skip
  assert told.verdicts()[str(HIDDEN)] == ['nothing seen', 're-identified', 'nothing seen']
  assert [told.success_rate(str(HIDDEN), level)[0] for level in VERDICTS[:4]] == [0, 0, 1, 1]
  assert told.verdicts(False)[str(HIDDEN)] == ['nothing seen'] * 3
  line = next(one for one in report.autoleak_table(told).splitlines() if one.startswith(str(HIDDEN)))
  assert line.count('0 of 3') == 2 and line.count('1 of 3') == 2
  assert leaderboard.load(both[3]).ranked == found.ranked


def test_more_originals_of_a_batch_than_chance_allows_are_a_re_identification():
  def first(counts, others):
    return rankings._first(
      [
        {'trial': trial, 'identified': place < count, 'candidates': candidates}
        for trial, (count, candidates) in enumerate(zip(counts, others, strict=True))
        for place in range(8)
      ],
      8,
    )

  assert first((0, 1, 2, 8), [99] * 4) == [2, 3], 'one of eight is first among 100 in 8 of 100 cases'
  assert first((0, 1), [999] * 2) == [1]
  assert first((0, 1, 2, 8), [98] * 4) == [], 'of a short list nobody is re-identified'
  assert first((1, 2, 1, 8), (999, 99, 99, 0)) == [0, 1], 'each by its own list'


@pytest.mark.parametrize(
  ('defense', 'several', 'random', 'gaussian'),
  [
    (gl.defenses.prune(rate=0.5), False, False, False),
    (gl.defenses.dgc(ratio=0.1), True, False, False),
    (gl.parse('gaussian(stddev=30)+dgc(ratio=0.1)'), True, False, False),
    (gl.defenses.gaussian(stddev=30.0), True, True, True),
    (gl.defenses.laplace(scale=0.1), True, True, False),
    (gl.defenses.wrap(optax.trace(0.9), 'upload'), True, False, False),
    (gl.defenses.outpost(), True, True, False),
    (gl.parse('prune(rate=0.5)+server_dp(noise=1,clients=10)'), False, False, False),
    (gl.parse('gaussian(stddev=1)+server_dp(noise=1,clients=10)'), True, True, True),
  ],
  ids=str,
)
def test_stages_are_skipped_by_the_traits_of_a_defense(scenario, defense, several, random, gaussian):
  bound = gl.defenses.bind(defense, scenario.context)
  assert (ensemble.repeats(bound, scenario.context, 1) == '') == several
  assert (ensemble.redraws(bound, scenario.context, 1) == '') == random
  assert (ensemble.redraws(bound, scenario.context, 1, drawn=True) == '') != bound.in_turn
  assert (ensemble.known_noise(bound, scenario.context, 1) == '') == gaussian


@pytest.mark.slow
def test_a_second_ranking_reads_more_uploads_of_what_the_first_one_missed(scenario, tmp_path):
  """Noise hides the original from one upload, eight are read of random defenses alone, and what is known is skipped."""
  stages = (
    ensemble.Ranking('likelihood'),
    ensemble.Ranking('likelihood of rounds', rounds=8, skips=ensemble.redraws),
    ensemble.Stage('closed forms', (gl.attacks.fidel(),)),
    ensemble.Stage('known noise', (gl.attacks.bayes(steps=2, components=2),), rounds=2, skips=ensemble.known_noise),
  )
  strong, flat = gl.defenses.gaussian(stddev=30.0), gl.defenses.laplace(scale=0.1)
  with pytest.MonkeyPatch.context() as patched:
    patched.setattr(MODULE, 'ENSEMBLES', {'images': stages})
    patched.setattr(MODULE, 'CONTROLS', 2)
    found = gl.autoleak(jax.random.key(1), scenario, [strong, flat], 3, progress='none', malicious=False)
  second = stage(found, 'likelihood of rounds')
  why = 'a ranking reads several uploads only where they are drawn anew'
  assert second['skipped'] == {'none': why} and second['targets'] in (3, 6)
  rounds = {(one['stage'], one['rounds']) for one in found.ranked if one['defense'] == str(strong)}
  assert rounds == {('likelihood', 1), ('likelihood of rounds', 8)}
  noise = stage(found, 'known noise')
  assert list(noise['skipped']) == [str(flat)] and 'Gaussian noise of known variance' in noise['skipped'][str(flat)]
  attacked = {(row['defense'], row['trial']) for row in found.rows if row['stage'] == 'known noise'}
  assert attacked == {('none', 0), ('none', 1), *((str(strong), trial) for trial in range(3))}


@pytest.mark.slow
def test_a_second_ranking_reads_more_uploads_of_a_random_client(scenario):
  flipped = dataclasses.replace(scenario.client, augment=AUGMENTATIONS['flip'])
  stages = (*ensemble.ENSEMBLES['images'][:2], ensemble.Stage('closed forms', (gl.attacks.fidel(),)))
  with pytest.MonkeyPatch.context() as patched:
    patched.setattr(MODULE, 'ENSEMBLES', {'images': stages})
    patched.setattr(MODULE, 'CONTROLS', 2)
    patched.setattr(MODULE, 'ranked', lambda *given: [{**one, 'named': []} for one in rankings.ranked(*given)])
    given = {'progress': 'none', 'malicious': False}
    found = gl.autoleak(jax.random.key(1), scenario._replace(client=flipped), None, 2, **given)
  assert not stage(found, 'likelihood of rounds')['skipped']
  assert {(one['stage'], one['rounds']) for one in found.ranked} == {('likelihood', 1), ('likelihood of rounds', 8)}


@pytest.mark.slow
def test_a_list_without_labels_is_ranked_by_every_label(scenario):
  run_of = MODULE._Run(jax.random.key(1), scenario, {'none': None}, 2, 1, True, None, 'none', gl.Execution())
  run_of.rank(ensemble.Ranking('likelihood'))
  assert run_of.ranked[0]['named'] == [0, 1]
  both = MODULE._Run(jax.random.key(1), scenario, {'none': None}, 1, 2, True, None, 'none', gl.Execution())
  both.rank(ensemble.Ranking('likelihood'))
  (entry,) = both.stages
  assert not both.ranked and "labels='unknown' is for one sample" in entry['left_out']['likelihood']


def test_a_folder_that_cannot_be_used_is_not_taken_for_a_ranking_that_does_not_apply(scenario, monkeypatch):
  """The lock of a process that was lost may last a while: to go on without the ranking would give other verdicts."""

  def held(*given, **settings):
    raise errors.FolderError('the work directory is in use by another process')

  monkeypatch.setattr(MODULE, 'identify', held)
  run_of = MODULE._Run(jax.random.key(1), scenario, {'none': None}, 2, 1, True, None, 'none', gl.Execution())
  with pytest.raises(errors.FolderError):
    run_of.rank(ensemble.Ranking('likelihood'))


def test_what_shows_without_any_upload(scenario):
  made = {one['baseline']: one for one in baseline.baselines(scenario, 3, 1)}
  assert list(made) == ['grey image', 'class mean', 'nearest public image']
  truth = scenario.samples[:3]
  grey = 10 * np.log10(1 / np.mean((truth - 0.5) ** 2, axis=(1, 2, 3)))
  assert made['grey image']['score'] == pytest.approx(grey.mean(), rel=1e-5)
  public = scenario.public[0].reshape(16, -1)
  apart = [np.mean((public - one.ravel()) ** 2, axis=1).min() for one in truth]
  assert made['nearest public image']['score'] == pytest.approx(np.mean(-10 * np.log10(apart)), rel=1e-5)
  own = scenario._replace(public=(np.asarray(truth), scenario.targets[:3]))
  held = {one['baseline']: one for one in baseline.baselines(own, 3, 1)}['nearest public image']
  assert (held['exact'], held['recognisable'], held['named'], held['trials']) == (3, 3, 3, 3)
  alone = own._replace(public=(np.asarray(truth[:1]), scenario.targets[:1]))
  mean = {one['baseline']: one for one in baseline.baselines(alone, 3, 1)}['class mean']
  assert mean['exact'] == 1 == mean['recognisable']
  assert [one['baseline'] for one in baseline.baselines(scenario._replace(public=None), 3, 1)] == ['grey image']


@pytest.mark.parametrize(('candidates', 'shown'), [(98, 0), (99, 1)])
def test_an_answer_is_recognised_among_enough_candidates_alone(candidates, shown):
  found = {'candidates': candidates, 'psnr': 9.0, 'ssim': 0.6, 'pearson': 0.5}
  made = baseline._told('grey', [{**found, 'revealed': 0, 'recognised': 1, 'identified': 1}], gl.modalities.IMAGES)
  assert (made['exact'], made['recognisable'], made['named']) == (0, shown, shown)


def test_padding_is_no_token_of_the_nearest_text():
  """A text without a token in common was nearer than one with two, as both end in padding."""
  kind = texts.scenario(number=2, length=24).client.modality
  public = np.zeros((2, 24), np.int32)  # padding
  public[0, :20], public[1, :3] = np.arange(20) + 30, [5, 6, 7]
  private = np.zeros((2, 24), np.int32)
  private[0, :4], private[1, :3] = np.arange(4) + 46, [6, 5, 9]
  held = baseline._Held(kind.usual, kind.empty, private, np.zeros(2, int), public, np.zeros(2, int))
  np.testing.assert_array_equal(baseline._nearest_text(held), public)


def test_a_modality_without_an_ensemble_is_refused():
  with pytest.MonkeyPatch.context() as patched:
    patched.setattr(MODULE, 'ENSEMBLES', {'tables': ()})
    test = gl.data.load('digits', 'test', limit=2)
    one = gl.scenario(gl.models.mlp(10, widths=8), test.samples, test.targets, key=jax.random.key(0))
    with pytest.raises(gl.UsageError, match='AutoLeak-2 has ensembles for tables, and none for images'):
      gl.autoleak(jax.random.key(0), one, None, 1)


@pytest.mark.long
def test_only_random_defenses_are_averaged(both):
  averaged = [row for row in both[0].rows if row['stage'] == 'averaged rounds']
  assert max(row['rounds'] for row in averaged) == 2
  witnesses = {('none', trial) for trial in range(ensemble.WITNESSES)}
  assert {(row['defense'], row['trial']) for row in averaged if row['defense'] != str(HIDDEN)} == witnesses


@pytest.mark.long
def test_malicious_servers_are_counted_apart(both):
  found = both[0]
  assert {row['stage'] for row in found.rows if not row['honest']} == {'malicious server'}
  alone = [
    dataclasses.replace(found, rows=[row for row in found.rows if row['honest'] == side]) for side in (True, False)
  ]
  assert alone[0].verdicts() == found.verdicts() and alone[1].verdicts(False) == found.verdicts(False)


@pytest.mark.long
def test_rates(both):
  found = both[0]
  assert found.success_rate('none', 'exact') == (3, 3)
  counts = [found.success_rate(str(HIDDEN), level)[0] for level in VERDICTS[:4]]
  assert counts == sorted(counts)
  with pytest.raises(gl.UsageError, match="unknown level 'all'"):
    found.success_rate('none', 'all')
  with pytest.raises(gl.UsageError, match="unknown defense 'clip'"):
    found.success_rate('clip')


@pytest.mark.long
def test_one_callback_hears_all_stages_and_their_end(both):
  del both
  assert [text.split()[0] for text in HEARD].count('stage') == 5  # what stands in the work directory is not run again
  assert HEARD[-1] == 'end'  # else “no progress for 3 minutes” would follow a run that is over


@pytest.mark.long
def test_a_finished_run_is_found(both):
  found, again, _, folder = both
  assert again.rows == found.rows and all(result.resumed for result in again.audits.values())
  stored = json.loads((folder / 'autoleak.json').read_text())
  assert stored['flags'] == found.flags and stored['config']['version'] == 'AutoLeak-2'
  assert len((folder / 'rows.jsonl').read_text().splitlines()) == len(found.rows)


@pytest.mark.long
@pytest.mark.parametrize('place', ['.', 'closed_forms', 'matching', 'averaged_rounds', 'malicious_server'])
@pytest.mark.parametrize('name', ['rows.jsonl', 'controls.jsonl'])
def test_rows_that_were_lost_on_the_way_are_refused(both, tmp_path, place, name):
  folder = pathlib.Path(shutil.copytree(both[3], tmp_path / 'run'))
  path = folder / place / name
  lines = path.read_text().splitlines(keepends=True)
  for changed in (lines[: len(lines) // 2], [*lines, lines[-1]], [], [lines[-1], *lines[1:]]):
    path.write_text(''.join(changed))
    with pytest.raises(gl.UsageError, match=rf'{name} is damaged \(.*\); run .* again'):
      leaderboard.load(folder)
  path.write_text(''.join(lines))
  assert leaderboard.load(folder).rows == both[0].rows


@pytest.mark.long
def test_stages_of_another_run_are_refused(both, tmp_path):
  """Each is whole by itself."""
  folder = pathlib.Path(shutil.copytree(both[3], tmp_path / 'run'))
  path = folder / 'matching' / 'result.json'
  content = ''.join((folder / 'matching' / 'rows.jsonl').read_text().splitlines(keepends=True)[1:])
  (folder / 'matching' / 'rows.jsonl').write_text(content)
  facts = {name: value for name, value in json.loads(path.read_text()).items() if not name.startswith('_')}
  storage.seal(path, facts, {**facts['files'], 'rows.jsonl': storage.description(content)})
  gl.load(folder / 'matching')
  with pytest.raises(gl.UsageError, match=r'rows\.jsonl is damaged \(the stages hold others\); run launch/autoleak'):
    leaderboard.load(folder)


@pytest.mark.slow
def test_a_defense_is_added_to_a_finished_run(both, scenario, tmp_path):
  """What is there is not run again, and the rows are those of one run of all."""
  with pytest.MonkeyPatch.context() as patched:
    patched.setattr(MODULE, 'ENSEMBLES', {'images': SHORT})
    patched.setattr(MODULE, 'CONTROLS', 4)
    settings = {'workdir': tmp_path / 'new', 'progress': 'none'}
    gl.autoleak(jax.random.key(1), scenario, [gl.defenses.prune(rate=0.5)], 3, **settings)
    parts = {path: path.stat().st_mtime_ns for path in tmp_path.glob('new/*/parts/*')}
    grown = run(scenario, patched, **settings)
  assert parts and all(path.stat().st_mtime_ns == time for path, time in parts.items())
  for kind in ('rows', 'controls'):
    now, whole = (
      [[row[name] for name in ('stage', 'attack', 'defense', 'adaptive', 'trial')] for row in getattr(one, kind)]
      for one in (grown, both[0])
    )
    assert now == whole
    now, whole = (np.array([row['psnr'] for row in getattr(one, kind)]) for one in (grown, both[0]))
    np.testing.assert_allclose(now, whole, atol=0.05)  # fewer runs in a pass, other bits
  assert grown.verdicts() == both[0].verdicts() and grown.flags == both[0].flags


@pytest.mark.long
def test_the_page_and_the_table(both, tmp_path):
  found = both[0]
  report.write(found, tmp_path)
  page = Page((tmp_path / 'report.html').read_text('utf-8'))
  text = ' '.join(page.text)
  assert (
    page.headings[:5]
    == ['Worst case per level', 'Malicious servers', 'Re-identified by which', 'Without any upload', 'Every attack']
    and 'AutoLeak-2' in text
  )
  lines = {row[0].strip(): row for row in page.rows[:4]}
  assert 'exact' in lines['none'][1] and lines['none'][2].startswith('3 of 3')
  assert 'published rates need 400 samples or more, and there are 3' in text
  table = report.autoleak_table(found)
  count, n = found.success_rate(str(HIDDEN), 'above chance')
  line = next(line for line in table.splitlines() if line.startswith(str(HIDDEN)))
  assert f'{count} of {n}' in line and 'malicious server' in table
  assert repr(found).splitlines()[0] == 'AutoLeak-2: mlp(widths=16) on digits'


@pytest.mark.long
def test_the_last_line_of_each_table_is_of_noise(both, tmp_path):
  """Of no image; and one control run that shows its image exactly is a false alarm."""
  found = both[0]
  lines = [line.split('  ') for line in report.autoleak_table(found).splitlines() if line.startswith('noise')]
  assert len(lines) == 2 and all(line.count(' 0 of 4 (0–61 %)') + line.count('0 of 4 (0–61 %)') == 4 for line in lines)
  first = found.controls[0]
  shown = {'pearson': 1.0, 'revealed': 1, 'psnr': 60.0}
  told = dataclasses.replace(found, controls=[{**first, **shown}, *found.controls[1:]])
  (rates,) = report.autoleak.alarms(told, first['honest'])
  assert [one['count'] for one in rates['levels']] == [1] * 4 and rates['n'] == 4
  report.write(told, tmp_path)
  page = Page((tmp_path / 'report.html').read_text('utf-8'))
  assert [row[1][:6] for row in page.rows if row[0].startswith('noise')] == ['1 of 4', '0 of 4']
  alone = dataclasses.replace(found, controls=[row for row in found.controls if row['honest']])
  assert report.autoleak.alarms(alone, False) == []


def test_false_matches_of_rankings_are_said_below_the_line_that_counts_them():
  run = made_up()
  ranked = [rank('none', [0], alarms=[1001]), rank('laplace(scale=0.1)', [])]
  told = ' '.join(report.autoleak_table(dataclasses.replace(run, ranked=ranked)).split())
  assert 'noise (false alarms) 0 of 2 (0–85 %) 0 of 2 (0–85 %) 1 of 2' in told
  assert 'and by rankings of candidates, 1 comes to “re-identified”: a false alarm' in told


@pytest.mark.long
def test_what_a_user_calls_a_defense_is_no_part_of_the_task(scenario, monkeypatch):
  monkeypatch.setattr(MODULE, 'ENSEMBLES', {'images': SHORT[1:2]})
  monkeypatch.setattr(MODULE, 'CONTROLS', 2)
  pruned = gl.defenses.prune(rate=0.5)
  runs = [gl.autoleak(jax.random.key(1), scenario, one, 1, progress='none') for one in ([pruned], {'mine': pruned})]
  tasks = [leaderboard.entries(one)[0]['task'] for one in runs]
  assert tasks[0] == tasks[1] and runs[1].config['defenses'] == ['none', 'mine']


@pytest.mark.parametrize('name', ['staged', 'malicious'])
def test_bad_settings(scenario, name):
  with pytest.raises(gl.UsageError, match=f'{name} is 1, expected True or False'):
    gl.autoleak(jax.random.key(0), scenario, None, 1, **{name: 1})


@pytest.mark.slow
def test_trials_that_are_left_out(scenario):
  attacks, key = [gl.attacks.fidel()], jax.random.key(1)
  settings = {'controls': 2, 'progress': 'none', 'knowledge': 'non-adaptive'}
  whole = gl.audit(key, scenario, [None, HIDDEN], attacks, 3, **settings)
  some = gl.audit(key, scenario, [None, HIDDEN], attacks, 3, only={str(HIDDEN): [2], 'none': [0, 2]}, **settings)
  kept = [('none', 0), ('none', 2), (str(HIDDEN), 2)]
  assert [(row['defense'], row['trial']) for row in some.rows] == kept
  for row in some.rows:
    same = next(o for o in whole.rows if (o['defense'], o['trial']) == (row['defense'], row['trial']))
    assert row['psnr'] == pytest.approx(same['psnr'], rel=1e-5)
  for wrong, said in (
    ({'clip': [0]}, "unknown defense 'clip'"),
    ({'none': [3]}, 'a trial in only is 3'),
    ({}, 'no trial'),
  ):
    with pytest.raises(gl.UsageError, match=said):
      gl.audit(key, scenario, [None, HIDDEN], attacks, 3, only=wrong, **settings)


def test_the_bound_is_reached_by_the_best_guess():
  """Of two opposite contributions of norm 1 under noise of 2: the bound is tight, so that no smaller one holds."""
  bound = bounds.identification([Mechanism(2.0, 'example', 1)], 1)
  rng = np.random.default_rng(0)
  truth = rng.choice([-1, 1], size=400_000)
  hits = np.mean(np.sign(truth + 2.0 * rng.normal(size=truth.size)) == truth)
  assert hits == pytest.approx(bound, abs=3e-3) and bound == pytest.approx(stats.norm.cdf(0.5))
  assert bounds.identification([Mechanism(1.0, 'example', 4)], 9) == pytest.approx(
    stats.norm.cdf(2 + stats.norm.ppf(0.1))
  )
  assert bounds.identification([Mechanism(1e9, 'client', 1)], 99) == pytest.approx(0.01, rel=1e-3)
  assert bounds.identification([], 9) is None and bounds.identification([Mechanism(1.0, 'client', 1)], 0) is None


@pytest.mark.parametrize(('dimension', 'others'), [(2, 2), (3, 9), (100, 999)])
def test_the_best_of_all_attackers_stays_below_the_bound_and_is_near(dimension, others):
  """Bayes' rule among G + 1 contributions of norm 1, for one upload and for four."""
  rng = np.random.default_rng(1)
  candidates = rng.normal(size=(others + 1, dimension))
  candidates /= np.linalg.norm(candidates, axis=1, keepdims=True)
  truth = rng.integers(others + 1, size=5000)
  for noise, uploads in ((0.5, 1), (1.0, 1), (1.0, 4)):
    draws = rng.normal(size=(truth.size, dimension)) / math.sqrt(uploads)  # the mean of the uploads says all
    named = np.argmax((candidates[truth] + noise * draws) @ candidates.T, axis=1)
    _, low, high = statistics.proportion_interval(int(np.sum(named == truth)), truth.size)
    bound = bounds.identification([Mechanism(noise, 'client', uploads)], others)
    assert low < bound < 2.2 * high


def test_the_bound_holds_for_every_upload_that_was_read():
  facts = {label: {'mechanisms': [{'noise': 40.0, 'unit': 'example', 'releases': 3}]} for label in 'abc'}
  rows = [{'defense': label, 'rounds': rounds, 'candidates': 99} for label, rounds in (('a', 1), ('a', 8), ('b', 1))]
  found = MODULE._bounds(facts, rows, [], 1)
  for label, releases in (('a', 24), ('b', 3), ('c', 3)):
    assert found[label] == bounds.identification([Mechanism(40.0, 'example', releases)], 99) < 1
  shorter = [{**row, 'candidates': 1000} for row in rows[:1]] + rows[1:]  # lists by class, the least one decides
  assert MODULE._bounds(facts, shorter, [], 1) == MODULE._bounds(facts, shorter[::-1], [], 1) == found


def test_the_bound_of_a_batch_is_that_of_any_of_its_images():
  facts = {'none': {'mechanisms': []}, 'dp': {'mechanisms': [{'noise': 4.0, 'unit': 'example', 'releases': 1}]}}
  rows = [{'defense': 'dp', 'rounds': 1, 'candidates': 99}]
  single = bounds.identification([Mechanism(4.0, 'example', 1)], 99)
  assert MODULE._bounds(facts, rows, [], 1) == {'dp': single} and MODULE._bounds(facts, rows, [], 3) == {
    'dp': 3 * single
  }
  assert MODULE._bounds(facts, rows, [], 1000) == {'dp': 1.0}
  read = [{'defense': 'dp', 'rounds': 8, 'candidates': 99}]
  repeated = bounds.identification([Mechanism(4.0, 'example', 8)], 99)
  assert MODULE._bounds(facts, rows, read, 1) == {'dp': repeated}, 'a ranking may have read more uploads'


def test_where_no_attack_can_run(scenario):
  with pytest.MonkeyPatch.context() as patched:
    patched.setattr(MODULE, 'ENSEMBLES', {'images': (ensemble.Stage('closed forms', (gl.attacks.april(),)),)})
    with pytest.raises(gl.UsageError, match=r'no attack of AutoLeak-2 can run here: .*position embedding'):
      gl.autoleak(jax.random.key(1), scenario, None, 1, progress='none')


@pytest.mark.slow
def test_every_stage_runs_on_a_network_with_convolutions(scenario):
  """Closed forms and traps name the layer that they miss; no setting of the ensemble is wrong."""
  model = gl.models.create('lenet', 10, init='explicit')
  public = tuple(np.concatenate([each] * 7) for each in scenario.public)  # as many as a generator needs
  other = gl.scenario(model, scenario.samples, scenario.targets, key=jax.random.key(0), dataset='digits', public=public)
  run_of = MODULE._Run(jax.random.key(1), other, {'none': None}, 2, 1, True, None, 'none', gl.Execution())
  for one in (stage for stage in ensemble.ENSEMBLES['images'] if isinstance(stage, ensemble.Stage)):
    settings = gl.AuditSettings(restarts=one.restarts, rounds=one.rounds, labels='known', controls=2)
    left_out = run_of._left_out(one, settings)
    reasons = 'dense layer', 'position embedding', 'come apart into stages'
    assert all(any(reason in why for reason in reasons) for why in left_out.values())
    assert one.name in ('closed forms', 'residual peeling', 'malicious server') or not left_out


def rows():
  """Returns a scenario of rows of a table, and a closed form on them."""
  test = gl.data.load('breast_cancer', 'test', limit=40)
  model = gl.models.mlp(2, 'default', widths=16)
  made = gl.scenario(model, test.samples, test.targets, key=jax.random.key(0), modality=of_config(test.settings))
  return made, gl.attacks.peeling()


def notes():
  """Returns a scenario of texts, and a closed form on them."""
  return texts.scenario(), gl.attacks.span()


@pytest.mark.long
@pytest.mark.parametrize(('made', 'seen'), [(rows, '30 of 30 right'), pytest.param(notes, '', marks=pytest.mark.slow)])
def test_entries_of_rows_and_of_texts_make_a_leaderboard(made, seen, monkeypatch, tmp_path):
  scenario, attack = made()
  kind = scenario.client.modality
  stages = (ensemble.Ranking('likelihood'), ensemble.Stage('closed forms', (attack,)))
  monkeypatch.setattr(MODULE, 'ENSEMBLES', {kind.name: stages})
  monkeypatch.setattr(MODULE, 'CONTROLS', 2)
  found = gl.autoleak(jax.random.key(1), scenario, [HIDDEN], 2, progress='none')
  for entry in leaderboard.entries(found):
    leaderboard.add(tmp_path, entry)
  page = report.render_leaderboard(leaderboard.read(tmp_path))
  assert not said_of_images(page)
  assert f'2 of 2 {kind.noun[1]} can be recovered' in page and seen in page


@pytest.mark.slow
def test_a_malicious_server_reads_texts_and_shows_nothing_on_noise():
  stage = next(one for one in ensemble.ENSEMBLES['text'] if not getattr(one, 'honest', True))
  data = texts.notes(8)
  client = {'key': jax.random.key(0), 'modality': gl.modalities.of_config(data.settings), 'loss': 'next_token'}
  with pytest.MonkeyPatch.context() as patched:
    patched.setattr(MODULE, 'ENSEMBLES', {'text': (stage,)})
    patched.setattr(MODULE, 'CONTROLS', 4)
    wide = gl.scenario(texts.network(width=32)[0], data.samples[:2], data.targets[:2], **client)
    result = gl.autoleak(jax.random.key(1), wide, {'none': None}, 2, progress='none')
    narrow = gl.scenario(texts.network()[0], data.samples[:2], data.targets[:2], **client)
    with pytest.raises(gl.UsageError, match='decepticons needs a width of at least 32, and the model has 16'):
      gl.autoleak(jax.random.key(1), narrow, {'none': None}, 1, progress='none')
  assert [row['attack'] for row in result.rows] == ['decepticons'] * 2 and not any(row['honest'] for row in result.rows)
  assert {row['verdict'] for row in result.rows} <= {'exact', 'recognisable'}
  assert len(result.controls) >= 4 and all(row['rouge1'] == 0 for row in result.controls)
