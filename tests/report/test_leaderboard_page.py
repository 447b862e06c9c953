"""The page of a leaderboard: one table per task, sorted, explained, and loading nothing."""

import base64
import csv
import io
import json
import re
import shlex

import pytest

from gradleak import UsageError, report
from gradleak.audit.verdict import LEVELS
from gradleak.report import deploy
from gradleak.report.leaderboard import _worst, listing, render_leaderboard
from gradleak.studies.autoleak import leaderboard
from gradleak.studies.autoleak.costs import Cost
from tests.leaderboards import COMMAND, found
from tests.report.parsing import Page


def board(*runs, costs=None):
  entries = [entry for run in runs for entry in leaderboard.entries(run, COMMAND, costs)]
  return {leaderboard.name(entry): entry for entry in entries}


@pytest.fixture(scope='module')
def entries():
  costs = {'prune(rate=0.9)': (1.5, 'Table <2>')}
  flagged = {'prune(rate=0.9)': ['gradient masked: the `objective` never moved']}
  return board(found(flags=flagged, bounds={'laplace(scale=0.1)': 0.0312}), costs=costs)


@pytest.fixture(scope='module')
def source(entries):
  return render_leaderboard(entries)


@pytest.fixture(scope='module')
def page(source):
  return Page(source)


def cells(page, first):
  return next([' '.join(cell.split()) for cell in row] for row in page.rows if row and row[0].strip() == first)


def _text(source):
  return ' '.join(' '.join(Page(source).text).split())


def order(source):
  return [row[0].strip() for row in Page(source).rows if len(row) > 2][1:]


def test_seeds_of_a_task_are_one_line_of_what_is_said(entries):
  other = [{**entry, 'seed': 1} for entry in entries.values()]
  once, twice = (_worst(found, 'honest') for found in (entries.values(), [*entries.values(), *other]))
  assert twice == [{**one, 'recovered': 2 * one['recovered'], 'n': 2 * one['n']} for one in once]
  priced = [{**entry, 'cost': {'points': 9.0, 'source': ''}} for entry in (*entries.values(), *other)]
  (costly,) = [one for one in deploy.advice(priced) if one.name == 'deploy.costly']
  assert len(costly.facts['names']) == len({*costly.facts['names']}) == costly.facts['n']


def test_a_line_per_defense_the_least_leak_first(entries, source):
  assert order(source) == ['prune(rate=0.9)', 'laplace(scale=0.1)', 'none']  # the cost of the second is unknown
  known = {name: {**entry, 'cost': {'points': 1.0, 'source': ''}} for name, entry in entries.items()}
  assert order(render_leaderboard(known)) == ['laplace(scale=0.1)', 'prune(rate=0.9)', 'none']


def test_figures_follow_from_the_entries(page):
  assert cells(page, 'prune(rate=0.9)') == [
    'prune(rate=0.9)', '', '50 %2 of 4 (6–94 %), flaggedrank 1', '1.5',
    '1 of 40–81 %', '2 of 46–94 %', '3 of 419–100 %', '◔ above chance4 of 439–100 %', '–',
  ]  # fmt: skip
  assert cells(page, 'laplace(scale=0.1)')[-1] == '3.2 %'
  assert 'in the neighbouring relation “replace by zeros”' in ''.join(page.text)


@pytest.mark.long
def test_a_task_says_how_many_public_samples_its_attackers_hold(entries, source):
  def held(*publics):
    made = [{**entry, 'settings': public and {'public': public}} for entry, public in zip(board_, publics, strict=True)]
    return re.findall(r'([\d,]+) public samples', _text(render_leaderboard(dict(zip(entries, made, strict=True)))))

  board_ = list(entries.values())
  assert held(5000, 5000, 5000) == held(5000, None, 5000) == ['5,000']
  assert held(None, None, None) == held(5000, 100, 5000) == []


def test_few_uploads_and_the_way_back_to_the_documents_are_said(entries, source):
  said = 'where fewer than 400 uploads were attacked'
  assert said in _text(source)
  many = {name: {**entry, 'trials': 400} for name, entry in entries.items()}
  assert said not in _text(render_leaderboard(many)).partition('How to read it')[0]
  text = render_leaderboard(entries, 'methods/')
  assert all(f'href="methods/../{page}.html"' in text for page in ('index', 'which_defense'))
  assert 'which_defense.html' not in source


def test_a_task_says_what_its_gallery_holds_or_that_it_is_of_an_earlier_version(source, entries):
  assert report.leaderboard.EARLIER in source
  made = {'by_class': True, 'images': {'face': 100}, 'left_out': {'non-face': 100}, 'flat': 0, 'public': 50}
  told = {
    name: {**entry, 'task': {**entry['task'], 'more': {**entry['task']['more'], 'gallery': made}}}
    for name, entry in entries.items()
  }
  text = render_leaderboard(told)
  assert '100 images of class face; left out: 100 of class non-face.' in text and report.leaderboard.EARLIER not in text
  assert len(Page(render_leaderboard({**entries, **{f'{name} ': one for name, one in told.items()}})).rows) > len(
    Page(text).rows
  )  # another gallery is another task


def test_the_name_that_a_source_gives_comes_first(entries):
  named = {name: {**one, 'published': 'OUR' * ('prune' in one['text'])} for name, one in entries.items()}
  found = [row[0] for row in Page(render_leaderboard(named)).rows if row]
  assert 'OUR (prune(rate=0.9))' in found and 'laplace(scale=0.1)' in found


def test_false_alarms_stand_where_they_are_known(source, entries):
  assert _text(source).count('false alarms, of 2: none (0–85 %)') == 6, 'by honest servers and by malicious ones'
  levels = [{'level': level, 'count': count} for level, count in zip(LEVELS, (0, 0, 1, 2), strict=True)]
  noise = {'noise': {'n': 16, 'levels': levels}}
  known = {name: {**entry, 'honest': {**entry['honest'], **noise}} for name, entry in entries.items()}
  text = render_leaderboard(known)
  words = 'false alarms, of 16: re-identified 1 (0–31 %), above chance 2 (1–39 %)'
  assert _text(text).count(words) == 3 and '“False alarms”' in text


def test_each_task_begins_with_what_was_found(page):
  text = ' '.join(' '.join(page.text).split())
  assert (
    'Without a defense, 4 of 4 images can be recovered; of 2 defenses, 1 gives images away exactly and 1 hides what '
    'these attackers look for. By what only a malicious server can do, images are recovered under 0 of 2 defenses.'
  ) in text


def test_tasks_whose_undefended_images_are_recovered_come_first():
  failing = {'none': ['inconclusive'] * 4, 'prune(rate=0.9)': ['inconclusive'] * 4}
  tasks = {**board(found(failing, dataset='a')), **board(found(dataset='z'))}
  assert re.findall(r'<h2 id="task-.">.* on (.)</h2>', render_leaderboard(tasks)) == ['z', 'a']


def test_what_is_not_known_is_said_to_be(page):
  assert cells(page, 'laplace(scale=0.1)')[3] == 'unknown'
  assert cells(page, 'none')[3] == '–'  # no defense costs nothing
  text = ' '.join(' '.join(page.text).split())
  assert 'Cost: Table <2>.' in text and 'Flag: gradient masked: the objective never moved.' in text


def test_a_defense_that_ends_at_chance_is_named():
  costs = {'prune(rate=0.9)': Cost(80.0, 'x', (79.0, 81.0), 'it predicts one class'), 'laplace(scale=0.1)': (2.0, 'y')}
  page = Page(render_leaderboard(board(found(), costs=costs)))
  assert cells(page, 'prune(rate=0.9)')[3] == '80.079.0 to 81.0at chancetoo costly'
  assert 'chance' not in cells(page, 'laplace(scale=0.1)')[3]


def test_a_cost_stands_above_its_interval():
  costs = {'prune(rate=0.9)': (-1.0, 'x', (-7.64, 5.5)), 'laplace(scale=0.1)': (2.0, 'y')}
  page = Page(render_leaderboard(board(found(), costs=costs)))
  assert ''.join(cells(page, 'prune(rate=0.9)')[3].split()) == '−1.0−7.6to5.5maybetoocostly'
  assert cells(page, 'laplace(scale=0.1)')[3] == '2.0'
  above = Page(render_leaderboard(board(found(), costs={'prune(rate=0.9)': (9.0, 'x', (5.1, 12.0))})))
  assert ''.join(cells(above, 'prune(rate=0.9)')[3].split()) == '9.05.1to12.0toocostly'


def test_among_equals_the_cheaper_comes_first():
  verdicts = {
    'none': ['exact'] * 4,
    'prune(rate=0.9)': ['above chance'] * 4,
    'laplace(scale=0.1)': ['above chance'] * 4,
  }
  cheap = {'prune(rate=0.9)': (2.0, 'x')}
  assert order(render_leaderboard(board(found(verdicts), costs=cheap)))[0] == 'prune(rate=0.9)'
  both = cheap | {'laplace(scale=0.1)': (1.0, 'x')}
  assert order(render_leaderboard(board(found(verdicts), costs=both)))[0] == 'laplace(scale=0.1)'


def test_fewer_trials_are_not_less_leak():
  few, many = ({'none': ['exact'] * n, 'prune(rate=0.9)': ['nothing seen'] * n} for n in (2, 8))
  lines = Page(render_leaderboard(board(found(few, seed=1), found(many)))).rows
  assert ['of 8' in row[4] for row in lines if row[0].strip() == 'prune(rate=0.9)'] == [True, False]


def test_a_table_per_task():
  page = Page(render_leaderboard(board(found(), found(batch_size=2), found(share='delta'), found(seed=1))))
  assert len(page.attributes('table')) == len(page.headings[:-1]) == 3
  assert sum(row[0].strip() == 'none' for row in page.rows if row) == 4
  alone = Page(render_leaderboard(board(found(malicious=False))))
  assert not any('malicious' in cell for row in alone.rows for cell in row)


def test_every_entry_says_how_to_repeat_it(page, entries):
  text = ' '.join(' '.join(page.text).split())
  for name, entry in entries.items():
    assert f'launch/leaderboard.py --check={name}' in text and entry['rows_sha256'] in text
    assert f'--defenses={shlex.quote(entry["text"])}' in text


def test_weights_of_a_file_are_named_and_needed_to_repeat_it(source):
  text = render_leaderboard(board(found(weights='mine.npz')))
  assert 'weights=mine.npz' in text and '--workdir=FOLDER --weights=FILE</code>' in text
  assert '--weights' not in source


def test_all_cells_of_a_table_are_in_columns(page):
  widths = {len(row) for row in page.rows if len(row) > 1}
  assert len(widths) == 1
  spans = {int(cell['colspan']) for cell in page.attributes('td') if 'colspan' in cell}
  assert spans == widths


def test_it_is_written_from_a_folder(entries, source, tmp_path):
  for entry in entries.values():
    leaderboard.add(tmp_path / 'board', entry)
  report.write_leaderboard(tmp_path / 'board', tmp_path / 'new' / 'page.html')
  assert (tmp_path / 'new' / 'page.html').read_text('utf-8') == source
  with pytest.raises(UsageError, match='has no entries'):
    report.write_leaderboard(tmp_path / 'new', tmp_path / 'page.html')


def test_more_trials_that_meet_a_rare_case_are_no_larger_leak():
  """One exact image of forty is less than none of four, which may be 60 %."""
  rare = ['exact'] + ['above chance'] * 39
  many = board(found({'none': ['exact'] * 40, 'prune(rate=0.9)': rare}))
  few = board(found({'none': ['exact'] * 4, 'laplace(scale=0.1)': ['above chance'] * 4}))
  assert order(render_leaderboard({**many, **few}))[:2] == ['prune(rate=0.9)', 'laplace(scale=0.1)']


def test_who_re_identifies_stands_in_a_column_of_its_own():
  ranked = {'prune(rate=0.9)': [0, 3], 'laplace(scale=0.1)': [1]}
  page = Page(render_leaderboard(board(found(named=ranked))))
  assert cells(page, 'prune(rate=0.9)')[-2] == '2 of 46–94 %1 by it alone'
  assert cells(page, 'laplace(scale=0.1)')[2] == '0 %0 of 4 (0–61 %)'
  assert cells(page, 'none')[-2] == 'not run'
  text = ' '.join(' '.join(page.text).split())
  assert 'grey image: exact 0, recognisable 0, re-identified 1 of 4; mean score 7.3' in text
  assert 'matching: 1.2 s; malicious server: 1.2 s' in text and '“By it alone”' in text


def test_a_stage_that_does_not_apply_says_why():
  run = found()
  run.stages[0]['skipped'] = {'laplace(scale=0.1)': 'its noise is not Gaussian'}
  text = render_leaderboard(board(run))
  assert text.count('(not here: its noise is not Gaussian)') == 1


def test_the_files_hold_each_entry_once(source, entries):
  found = {}
  for kind in ('csv', 'json'):
    coded = re.search(rf'download="leaderboard.{kind}" href="data:[a-z/]+;base64,([^"]+)"', source)[1]
    found[kind] = base64.b64decode(coded).decode()
  rows = json.loads(found['json'])
  assert rows == report.leaderboard.listing(entries) and [row['name'] for row in rows] == sorted(entries)
  lines = list(csv.DictReader(io.StringIO(found['csv'])))
  assert lines == [{name: '' if value is None else str(value) for name, value in row.items()} for row in rows]
  (pruned,) = [row for row in rows if row['defense'] == 'prune(rate=0.9)']
  assert (pruned['honest_recognisable'], pruned['honest_n'], pruned['cost_points']) == (2, 4, 1.5)


def test_attacks_that_failed_stand_beside_what_is_recovered(entries):
  """A line said 0 of 100, and nothing of the attacks, which had failed on all of them."""
  seen = entries | {
    name: {**one, 'honest': {**one['honest'], 'failed': 3}, 'malicious': {**one['malicious'], 'failed': 2}}
    for name, one in entries.items()
    if one['defense'] == 'laplace(scale=0.1)'
  }
  text, cell = render_leaderboard(seen), cells(Page(render_leaderboard(seen)), 'laplace(scale=0.1)')
  assert '3 failed' in cell[2] and '2 failed' in cell[-2] and '“Failed”: the uploads of which no attacker' in text
  rows = {one['defense']: one for one in listing(seen)}
  assert (rows['laplace(scale=0.1)']['honest_failed'], rows['laplace(scale=0.1)']['malicious_failed']) == (3, 2)
  assert rows['prune(rate=0.9)']['honest_failed'] == 1 and 'failed' not in cells(Page(text), 'prune(rate=0.9)')[2]
  assert deploy.lost({'verdict': 'inconclusive', 'count': 4}) == 4  # of a version that did not count them


def test_a_defense_on_which_attacks_failed_is_not_listed_as_one_that_leaks_least():
  made = board(
    found({'none': ['exact'] * 4, 'prune(rate=0.9)': ['exact'] * 4, 'laplace(scale=0.1)': ['above chance'] * 4})
  )
  names = ['laplace(scale=0.1)', 'prune(rate=0.9)', 'none']
  seen, lost = (
    {
      name: {**one, 'honest': {**one['honest'], 'failed': failed * (one['text'] == names[0])}}
      for name, one in made.items()
    }
    for failed in (0, 4)
  )
  assert order(render_leaderboard(seen)) == names
  assert order(render_leaderboard(lost)) == [names[1], names[0], names[2]]


def test_names_lead_to_the_pages_of_methods(entries, source):
  assert 'methods/' not in source
  text = render_leaderboard(entries, 'methods/')
  assert text.count('href="methods/prune.html"') == text.count('href="methods/laplace.html"') == 1
  assert 'methods/none.html' not in text


def test_costs_above_the_limit_are_grey():
  costs = {'prune(rate=0.9)': (4.0, 'x', (2.0, 5.1)), 'laplace(scale=0.1)': (4.0, 'y', (3.0, 5.0))}
  rows = [one.get('class') for one in Page(render_leaderboard(board(found(), costs=costs))).attributes('tr')]
  assert rows.count('costly') == 1


def test_where_no_attack_works_only_the_malicious_server_is_shown():
  page = Page(render_leaderboard(board(found({'none': ['inconclusive'] * 4, 'prune(rate=0.9)': ['inconclusive'] * 4}))))
  assert cells(page, 'none') == ['none', '–', '◔ above chance4 of 439–100 %']
  assert 'on this task reconstructions cannot tell defenses apart' in ' '.join(' '.join(page.text).split())


def test_each_cell_knows_its_heading_for_narrow_screens(page):
  labels = [cell['data-label'] for cell in page.attributes('td') if 'data-label' in cell]
  assert {'private, seen', 'recovered', 'accuracy cost, points', '● exact'} <= set(labels)


def test_an_epsilon_stands_below_the_name_of_its_defense():
  private = 'clip(norm=1)+gaussian(stddev=2)'
  made = board(found({'none': ['exact'] * 4, private: ['nothing seen'] * 4, 'laplace(scale=0.1)': ['exact'] * 4}))
  page = Page(render_leaderboard(made))
  assert cells(page, f'{private}ε ≤ 4.8 per upload')[0] and cells(page, 'laplace(scale=0.1)')[0]
  text = ' '.join(' '.join(page.text).split())
  assert 'in the neighbouring relation “replace one” at δ = 1e-05' in text
  assert 'Differential privacy: no ε: nothing bounds the norm' in text
  (row,) = (one for one in listing(made) if one['defense'] == private)
  assert row['epsilon'] == 'ε ≤ 4.8'
