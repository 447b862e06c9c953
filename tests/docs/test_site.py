"""The pages: each method has one, with its formula, settings and source, and the site is built without a warning."""

import importlib
import inspect
import json
import os
import pathlib
import re
import subprocess
import sys
import types

import pytest

import gradleak as gl
from experiments import comparison, judgement
from gradleak.audit.verdict import VERDICTS
from gradleak.core import methods as named
from gradleak.models.registry import WRAPPERS

ROOT = pathlib.Path(__file__).parents[2]
DOCS = ROOT / 'docs'
REGISTRIES = {**gl.attacks.REGISTRY, **gl.servers.REGISTRY, **gl.defenses.REGISTRY}


@pytest.fixture(scope='module')
def extensions():
  """Returns a function, name -> extension of the build."""
  with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(DOCS / '_ext'))
    yield importlib.import_module


@pytest.mark.parametrize('name', REGISTRIES)
def test_page_of_a_method_describes_it(extensions, name):
  methods, docstrings = extensions('methods'), extensions('docstrings')
  text = '\n\n'.join(methods.described(name))
  made = extensions('facts').example(name) if name in gl.defenses.REGISTRY else REGISTRIES[name]()
  factory = made.stages[0].factory if name in gl.defenses.REGISTRY else made.factory
  citations = made.citations if name in gl.defenses.REGISTRY else [made.citation]
  assert docstrings.formulas(factory)
  for formula in docstrings.formulas(factory):
    assert f'$$\n{formula}\n$$' in text
    assert '<math' in extensions('mathml').converted(formula, True)
  for citation in citations:
    assert f'Source: {docstrings.markdown(citation)}' in text
  for setting in named.setting_names(factory):
    (line,) = [line for line in text.split('\n') if line.startswith(f'| `{setting}` |')]
    assert line.rsplit('|', 2)[1].strip(), f'{name}({setting}) has no meaning'


@pytest.mark.long
def test_page_of_a_method_holds_what_its_traits_and_results_say(extensions):
  text = extensions('methods').page('prune')
  assert '| acts on | the update, before it is sent |' in text
  assert '| random | no |' in text
  assert '| sparsifies | entries, which are sent as zeros |' in text
  assert '| `masked` | It compares only what was sent and is not zero. |' in text
  entry = next(one for one in extensions('facts').seen('prune') if one.side.startswith('honest'))
  reached = ' | '.join(map(str, (entry.trials, *entry.levels.values())))
  assert f'| `{entry.defense}` | ' in text
  assert reached in text


def test_a_page_counts_the_uploads_of_the_leaderboard_which_are_not_of_images_alone(extensions):
  text = '\n'.join(extensions('methods')._board('prune'))
  assert 'Uploads that AutoLeak brought' in text and '| server | uploads | exact |' in text and 'gpt' in text


def test_a_page_says_what_is_clipped_where_it_is_not_the_whole_update(extensions):
  """A defense whose first sentence speaks of clipping said that it clips nothing."""
  shown = {
    name: re.search(r'^\| clips \| (.+) \|$', '\n'.join(extensions('methods')._about_defense(name)), re.M)[1]
    for name in gl.defenses.REGISTRY
  }
  assert shown['dpsgd'] == shown['clip_samples'] == 'each sample’s gradient to L2 norm 1 (not the upload)'
  assert shown['client_dp'] == 'the whole update to L2 norm 1' and shown['clamp'].startswith('each entry to ±')
  assert shown['server_dp'].startswith('each upload, at the server, ') and shown['prune'] == 'nothing'
  spoken = re.compile(r'\b(clip|truncat)', re.I)
  named = {
    name for name, factory in gl.defenses.REGISTRY.items() if spoken.search(inspect.getdoc(factory).partition('\n')[0])
  }
  assert {'dpsgd', 'clamp', 'secagg_rounding'} < named and all(shown[name] != 'nothing' for name in named)


def test_a_guarantee_is_rounded_up_and_is_none_where_it_does_not_protect(extensions):
  from gradleak.report import privacy

  assert [privacy.bounded(value) for value in (4.729, 10.73, 1e5)] == ['ε ≤ 4.8', 'ε ≤ 11', 'ε > 1000']
  guarantee = extensions('facts').guarantee
  assert guarantee('dpsgd').startswith('ε > 1000 per upload for each example in the relation “')
  assert guarantee('prune') == 'none by itself'


def test_page_of_a_method_counts_the_figures_that_are_about_it(extensions, monkeypatch):
  facts = extensions('facts')
  cells = [
    comparison.Cell('MNIST', 'Ours', 'psnr', 'mnist', 'Ours', 10.0),
    comparison.Cell('MNIST', 'None', 'psnr', 'mnist', 'none', 40.0),
    comparison.Cell('MNIST', 'Ours', 'ssim', 'mnist', 'Ours'),
  ]
  statuses = [judgement.COUNTED[0], judgement.COUNTED[-1], '']
  run = {'attack': 'dga(steps=3)', 'defenses': {'none': 'none', 'Ours': 'clip(norm=1)+graddefense(stddev=0.1)'}}
  stored = types.SimpleNamespace(settings={'mnist': run}, scale='mini', pictures=['graddefense_9-1.png'])
  experiment = types.SimpleNamespace(name='graddefense_9', paper='A, B: A Title. 2022.', table='Table IX', cells=cells)
  judged = types.SimpleNamespace(experiment=experiment, statuses=statuses)
  monkeypatch.setattr(facts, '_stored', lambda: [(stored, judged)])
  counted = {name: [sum(table.counts.values()) for table in facts.tables(name)] for name in REGISTRIES}
  assert {name: found for name, found in counted.items() if found} == {'clip': [1], 'graddefense': [1], 'dga': [2]}
  (table,) = facts.tables('graddefense')
  assert table.counts == {**dict.fromkeys(judgement.COUNTED, 0), statuses[0]: 1}
  assert table.title == 'A, B: Table IX'
  shown = '\n'.join(extensions('methods')._tables('graddefense'))
  assert (
    'Table IX](../results/graddefense_9.md) | 1 |' in shown
    and '![A, B: Table IX](../../results/tables/mini/graddefense_9-1.png)' in shown
  )


def test_page_of_a_defense_says_what_it_cost_in_trainings(extensions, monkeypatch):
  facts = extensions('facts')
  cells = [
    comparison.Cell('MNIST', label, metric, 'training', label)
    for label in ('none', 'Ours')
    for metric in ('accuracy', 'overhead')
  ]
  outcomes = [comparison.Outcome(mean, None, None, 9, 0, 0, remark) for mean, remark in (
    (90.0, ''), (0.0, ''), (84.5, '-5.5 [-7.0, -4.0]'), (31.0, ''),
  )]  # fmt: skip
  ours = {
    'clients': 'clip(norm=1)+graddefense(stddev=0.1)',
    'q': 5,
    'delta': None,
    'layout': 'columns',
    'memory': False,
  }
  run = {'dataset': 'mnist', 'defenses': {'none': {**ours, 'clients': 'none', 'q': None}, 'Ours': ours}}
  stored = types.SimpleNamespace(settings={'training': run}, scale='mini', pictures=[])
  experiment = types.SimpleNamespace(name='graddefense_9', paper='A, B: A Title. 2022.', table='Table IX', cells=cells)
  judged = types.SimpleNamespace(experiment=experiment, outcomes=outcomes, statuses=[''] * 4)
  monkeypatch.setattr(facts, '_stored', lambda: [(stored, judged)])
  (cost,) = facts.costs('graddefense')
  assert cost[1:] == ('MNIST', ours['clients'], '84.50', '90.00', '-5.5 [-7.0, -4.0]', '31.00')
  assert not facts.costs('prune')
  shown = '\n'.join(extensions('methods')._costs('clip'))
  assert f'| MNIST | `{ours["clients"]}` | 84.50 | 90.00 | -5.5 [-7.0, -4.0] | 31.00 |' in shown


def test_no_method_and_no_model_lacks_a_page(extensions):
  links, families = extensions('methods').links(), extensions('methods').families()
  assert set(links) == {*REGISTRIES, *gl.models.REGISTRY, *WRAPPERS}
  assert {links[name] for name in REGISTRIES} == {f'{name}.md' for name in REGISTRIES}
  pages = [*REGISTRIES, *families, *(extensions('methods').groups()), 'index']
  assert len(set(pages)) == len(pages)


def test_a_family_of_models_shows_each_of_its_members(extensions):
  for name, members in extensions('methods').families().items():
    text = extensions('methods').family(name, members)
    for member, factory in members.items():
      assert f"gl.models.create('{'lenet+' if member in WRAPPERS else ''}{member}', 10)" in text
      assert all(f'| `{setting}` |' in text for setting in named.setting_names(factory))


@pytest.mark.long
def test_settings_stand_once_and_long_tables_are_folded(extensions):
  methods = extensions('methods')
  text = methods.family('resnet', methods.families()['resnet'])
  assert 'Settings as those of `resnet18`.' in text and text.count('| `stem` |') == 1
  assert text.count('Settings as those of') + text.count('### Settings') == len(methods.families()['resnet'])
  shown = methods.page('concealment')
  table, _, folded = shown.partition('## Settings')[2].partition(':::{dropdown}')
  assert len(re.findall(r'^\| `', table, re.M)) == methods.SETTINGS and '| `projection` |' in folded
  assert (
    methods._shortened('clip(norm=1)+a(' + 'b=1,' * 9 + ')') == 'clip(…)+a(…)'
    and methods._shortened('a(b=1)') == 'a(b=1)'
  )
  heads, rows = ('a', 'b'), [(number, 'x') for number in range(6)]
  assert len(methods._long(heads, rows[:4])) == 1  # one line is not folded
  assert methods._long(heads, rows)[1].count('\n| ') == 5  # with its heading and rule


def test_the_index_of_methods_counts_each_kind(extensions):
  methods = extensions('methods')
  counts = dict(re.findall(r'^\| \[(.+?)\]\(\w+\.md\) \| (\d+) \|', methods.index(), re.M))
  assert counts == {kind: str(len(found)) for kind, found in {**methods.KINDS, 'Models': methods.MODELS}.items()}


def test_api_has_every_public_name_once(extensions):
  api, links = extensions('api'), extensions('methods').links()
  shown = [
    text.split(':members: ')[-1].split('\n')[0].split(', ') for text in api.pages().values() if ':members: ' in text
  ]
  assert {'audit', 'Defense', 'from_flax', 'psnr', 'load', 'Server', 'Generator'} <= {
    name for part in shown for name in part
  }
  modules = api.modules()  # under the names that they have where they stand
  missing = {
    name for name in gl.__all__ if name not in shown[0] and getattr(getattr(gl, name), '__name__', '') not in modules
  }
  assert not missing - set(links)


def test_docstring_is_taken_apart(extensions):
  docstrings = extensions('docstrings')

  def documented():
    r"""Does *this* of `x`s, |x| ≤ 1.

    Formula:
      a_1 = b

      c = \frac{d}{e}

    Args:
      first, second: one; two.
      third: all of it,
        over two lines.

    Returns:
      A pair: both.
    """

  assert docstrings.formulas(documented) == ['a_1 = b', r'c = \frac{d}{e}']
  assert docstrings.meaning('second', documented) == 'two.'
  assert docstrings.meaning('third', documented) == 'all of it, over two lines.'
  assert docstrings.paragraphs(docstrings.sections(documented)['']) == [r'Does \*this\* of `x`s, \|x\| ≤ 1.']
  lines = docstrings.restructured(docstrings.inspect.getdoc(documented).split('\n'))
  assert lines[0] == r'Does \*this\* of ``x``\ s, \|x\| ≤ 1.'
  assert '   c = \\frac{d}{e}' in lines
  assert ':returns: A pair: both.' in lines


def test_index_of_an_accented_letter_stands_behind_it(extensions):
  formula = ''.join(extensions('mathml').converted(r'\hat{x}_j < \sum_{i=1}^N a_i', True).split())
  accented = '<msub><moveraccent="true"><mi>x</mi><mostretchy="false">ˆ</mo></mover><mi>j</mi></msub>'
  assert accented in formula
  assert '<munderover><momovablelimits="true">∑</mo>' in formula


def test_only_bars_around_a_group_stretch(extensions):
  formula = ''.join(
    extensions('mathml').converted(r'\lVert a \rVert_2 + \left\lVert \frac{a}{b} \right\rVert', False).split()
  )
  assert formula.count('>‖</mo>') == 4
  assert formula.count('<mo>‖</mo>') == 2


def test_writing_leaves_equal_files_alone_and_deletes_others(extensions, tmp_path):
  write = extensions('methods').write
  write(tmp_path, {'a.md': 'a', 'b.md': 'b'})
  os.utime(tmp_path / 'a.md', (0, 0))
  write(tmp_path, {'a.md': 'a', 'c.md': 'c'})
  assert sorted(path.name for path in tmp_path.iterdir()) == ['a.md', 'c.md']
  assert (tmp_path / 'a.md').stat().st_mtime == 0


@pytest.mark.slow
def test_site_is_built_without_a_warning(tmp_path):
  command = [sys.executable, '-m', 'sphinx', '-W', '--keep-going', '-n', '-q', '-b', 'html']
  ran = subprocess.run([*command, '-d', tmp_path / 'trees', DOCS, tmp_path / 'site'], capture_output=True, text=True)
  assert ran.returncode == 0, ran.stderr
  for name in REGISTRIES:
    assert (tmp_path / 'site' / 'methods' / f'{name}.html').is_file()
  page = (tmp_path / 'site' / 'methods' / 'graddefense.html').read_text()
  assert '<math' in page
  assert 'compensated' in page
  board = (tmp_path / 'site' / 'leaderboard.html').read_text()
  assert all(path.stem in board for path in (ROOT / 'results' / 'leaderboard').glob('*.json'))


def test_readme_holds_the_findings_of_the_leaderboard(extensions):
  """Each is made of stored entries: a figure that changes there has to change in README.md."""
  from gradleak.studies.autoleak import leaderboard

  text = ' '.join((ROOT / 'README.md').read_text('utf-8').split())
  found = extensions('leaderboard').findings(leaderboard.read(ROOT / 'results' / 'leaderboard'))
  assert len(found) == 4
  for one in found:
    assert one in text


def test_claims_of_the_questions_hold():
  """FAQ and comparison name figures of stored results in words; these are what the words stand for."""
  from gradleak.studies.autoleak import leaderboard

  entries = leaderboard.read(ROOT / 'results' / 'leaderboard').values()
  bare = [entry for entry in entries if entry['text'] == 'none' and entry['task']['model'] == 'lenet']
  assert len(bare) > 1
  for entry in bare:
    shown = {one['level']: one['count'] for one in entry['honest']['levels']}
    assert shown['recognisable'] == entry['honest']['n']
  speed = (DOCS / 'PERFORMANCE.md').read_text('utf-8')
  said = re.search(r'LeNet takes ([\d.]+) ms .* and ([\d.]+) ms', (DOCS / 'comparison.md').read_text('utf-8'))
  ours, theirs = re.search(r'\| LeNet \| ([\d.]+) \| .+?× \| ([\d.]+):', speed).groups()
  assert (float(said[1]), float(said[2])) == (round(float(ours), 2), round(float(theirs), 1))


def test_what_servers_see_of_several_clients_is_what_its_table_holds():
  from gradleak.audit.verdict import RECOVERED

  stored = json.loads((ROOT / 'results' / 'tables' / 'mini' / 'assumptions_aggregation.json').read_text('utf-8'))
  seen = {
    name: f'{sum(row["verdict"] in RECOVERED for row in rows)} of {len(rows)}' for name, rows in stored['rows'].items()
  }
  assert f'csDLG shows pictures from {seen["lenet_csdlg_8"]} means' in (DOCS / 'which_defense.md').read_text('utf-8')
  text = (DOCS / 'measurements.md').read_text('utf-8')
  assert f'| gradients | {seen["lenet_csdlg_1"]} |\n| means of eight clients | {seen["lenet_csdlg_8"]} |' in text
  assert f'| adapters of rank 16; of rank 2 | {seen["lenet_lora_16"]}; {seen["lenet_lora_2"]} |' in text
  assert seen['mlp_fidel_8'] == '2 of 2'  # the closed form of both pages


def test_bibtex_holds_what_the_citation_file_names(extensions):
  import yaml

  citation = yaml.safe_load((ROOT / 'CITATION.cff').read_text('utf-8'))
  text = extensions('pieces').bibtex(citation)
  names = re.findall(r'^@\w+\{(\w+),$', text, re.M)
  assert len(names) == len(set(names)) == 1 + len(citation['references'])
  for paper in citation['references']:
    assert f'title = {{{{{paper["title"]}}}}}' in text and paper['authors'][-1]['family-names'] in text
  assert f'version = {{{citation["version"]}}}' in text and text.count('{') == text.count('}')


def test_tiers_and_times_are_tables(extensions):
  from gradleak.threat.knowledge import TIERS

  pieces = extensions('pieces')
  assert re.findall(r'^\| (\w) \|', pieces.tiers(), re.M) == list(TIERS)
  counts = re.findall(r'^\| .+? \| (\d+) \|', pieces.times(), re.M)
  assert sum(map(int, counts)) == len(list((ROOT / 'results' / 'tables' / 'mini').glob('*.json')))


def test_the_explorer_has_both_attackers_of_each_choice(extensions):
  pieces = extensions('pieces')
  rows = json.loads(extensions('explorer_rows').STORED.read_text('utf-8'))['rows']
  places = {(row['attack'], row['defense'], row['strength'], row['trial']) for row in rows}
  assert len(places) == len(rows) == 2 * 3 * 7 * 3
  for row in rows:
    known, ignored = (VERDICTS.index(row[who]['verdict']) for who in ('knows', 'ignores'))
    assert known <= ignored and row['private'].startswith('data:image/png')
  text = pieces.explorer(rows)
  assert text.count('<option>') == 5 and json.loads(re.search(r'id="explored">(.*?)</script>', text)[1]) == rows
  assert not re.search(r'https?://', text)
  assert text.count('alt="') == text.count('<img ') > 1 and 'alt=""' not in text  # nobody heard what was shown


def test_cells_of_wide_tables_know_their_headings(extensions):
  labelled = extensions('narrow').labelled
  row = '<tr><td>x</td><td></td><td><em>y</em></td><td><code>z</code></td></tr>'
  heads = ''.join(f'<th>{one}</th>' for one in ('a', 'b', 'c &amp; d', 'e'))
  text = labelled(f'<table class="t"><thead><tr>{heads}</tr></thead><tbody>{row}</tbody></table>')
  assert '<table class="t stacked wide">' in text and '<td class="empty" data-label="b">' in text
  assert 'data-label="c &amp; d"' in text and '<code>z</code>' in text
  assert '<code class="long">zzz' in labelled(
    f'<table><thead><tr>{heads}</tr></thead><tr><td><code>{"z" * 20}</code></td></tr></table>'
  )
  few = '<table><thead><tr><th>a</th></tr></thead><tbody><tr><td>x</td></tr></tbody></table>'
  assert labelled(few) == few


@pytest.mark.long
def test_results_have_a_page_per_table_and_pictures_that_are_there(extensions):
  texts = extensions('tables').texts()
  contents = re.search(r'\{toctree\}\n:hidden:\n\n(.*?)\n```', texts['index.md'], re.S)[1].split('\n')
  assert {f'{one.partition(" ")[0]}.md' for one in contents} == set(texts) - {'index.md'}
  for name, text in texts.items():
    for picture in re.findall(r'\]\((\S+\.png)\)', text):
      assert (DOCS / 'results' / picture).resolve().is_file(), f'{name}: {picture}'


def test_each_module_stands_once_in_the_index_of_the_api(extensions):
  api = extensions('api')
  assert sorted(re.findall(r'^\| \[`([\w.]+)`\]', api.pages()['index.md'], re.M)) == sorted(api.modules())


def test_each_page_says_for_whom_it_is():
  written = [path for folder in ('', 'guides', 'concepts') for path in (DOCS / folder).glob('*.md')]
  others = {'index', 'development', 'changes', 'ROWS'}  # the first, and those that include or are made of something
  for path in written:
    assert path.stem in others or re.match(r'# .+\n\n\*For ', path.read_text('utf-8')), path.name


def test_answers_are_those_of_the_leaderboard(extensions):
  from gradleak.report import deploy
  from gradleak.studies.autoleak import leaderboard

  board = extensions('leaderboard')
  entries = leaderboard.read(ROOT / 'results' / 'leaderboard')
  text = board.answers(entries)
  facts = [finding.facts for of in board._newest(entries) for finding in deploy.advice(of)]
  best = {name for one in facts for name in [*([one['best']] if 'best' in one else []), *one.get('names', ())]}
  named = set(re.findall(r'`([^`]+)`', text))
  assert named <= best and text.count('\n| ') == len(board._newest(entries)) + 2
  led, table = text.split('\n\n', 1)
  assert not re.search(r'\| *\|', table), 'an empty cell'
  for line, of in zip(table.split('\n')[2:], board._newest(entries), strict=False):
    told = {finding.name.removeprefix('deploy.'): finding.facts for finding in deploy.advice(of)}
    assert line.startswith(f'| {of[0]["task"]["model"].partition("+")[0]} on {of[0]["task"]["dataset"]} ')
    assert (' (AutoLeak-1, ' in line) == (board.number_of(of[0]) == 1)
    for kind, facts in told.items():
      if kind.endswith('_honest') and 'best' in facts:
        assert f'`{facts["best"]}`: {facts["count"]} of {facts["n"]} shown (' in line
        sure, doubted = led.split('.** ')[0], led.split('another defense first on ')[-1].split('. ')[0]
        assert f'`{facts["best"]}`' in sure if not facts['alike'] else board._short(of) in doubted
      elif kind.startswith('inconclusive_'):
        assert f'not known of `{facts["names"][0]}`' in line
      elif kind == 'everyone':
        assert f'{facts["n"]} of {facts["n"]} named among {facts["candidates"]} others' in line
      elif kind == 'blind_honest':
        assert f'reconstructions fail even undefended (0 of {facts["n"]})' in line
  names = [finding.name for of in board._newest(entries) for finding in deploy.advice(of)]
  assert ('None of those counted hides whose sample' in led) == ('deploy.listed' not in names)
  other = ('deploy.blind', 'deploy.inconclusive')
  recovered = sum(name.endswith('_honest') and not name.startswith(other) for name in names)
  assert f'on {names.count("deploy.hidden_honest") or "none"} of the {recovered} tasks' in led


def test_the_answer_over_all_tasks_follows_from_theirs(extensions):
  from gradleak.report import words

  of = {'best': 'a', 'n': 99, 'count': 0, 'alike': 0, 'range': {'success_low': 0.0, 'success_high': 0.04}}
  hidden = words.found('deploy.hidden_honest', **of)
  named = words.found('deploy.listed', best='a', identified=1, n=9, candidates=99)
  led = extensions('leaderboard')._led
  text = led({'honest': [('mlp on x', hidden)], 'list': [('mlp on x', named)]})
  assert 'these show least: `a` (mlp on x).**' in text and 'on 1 of the 1 tasks' in text
  assert 'recovered: mlp on x. ' in text and 'None of those counted hides' not in text and 'Noise' not in text
  alike = words.found('deploy.hidden_honest', **{**of, 'best': 'b', 'alike': 2})
  text = led({'honest': [('mlp on x', hidden), ('mlp on y', alike)]})
  assert 'these show least: `a` (mlp on x).** Noise could put another defense first on 1 of 2 tasks: mlp on y. ' in text
  facts = {'names': ['b'], 'number': 1, 'doubt': '', **{name: of[name] for name in ('count', 'n', 'range')}}
  unpriced = words.found('deploy.unpriced_honest', **facts)  # of which no cost is known
  assert 'on 1 of the 1 tasks' in led({'honest': [('mlp on x', hidden), ('mlp on y', unpriced)]})
  flagged = words.found('deploy.flagged_honest', **of)
  text = led({'honest': [('mlp on x', flagged)]})
  assert 'on none of the 1 tasks' in text and 'None of those counted hides' not in text


@pytest.mark.long
def test_tasks_have_a_figure_and_what_is_not_counted(extensions, tmp_path):
  from gradleak.studies.autoleak import leaderboard

  board = extensions('leaderboard')
  entries = leaderboard.read(ROOT / 'results' / 'leaderboard')
  text = board.tasks(entries, tmp_path)
  tasks = board._newest(entries)
  assert text.count('### ') == len(tasks) and 'shows least' not in text and 'not counted here' in text
  pictures = re.findall(r'\(_deploy/(shares-\d\.png)\)', text)
  priced = [of for of in tasks if any(entry['cost'] for entry in of)]
  assert len(pictures) == len(priced) == len(set(pictures))
  assert all((tmp_path / one).read_bytes().startswith(b'\x89PNG') for one in pictures)


def test_findings_follow_from_their_entries(extensions):
  from gradleak.studies.autoleak import leaderboard

  findings = extensions('leaderboard').findings
  entries = leaderboard.read(ROOT / 'results' / 'leaderboard')
  before = findings(entries)
  name, seen = next(
    (name, one)
    for name, one in entries.items()
    if (one['task']['dataset'], one['task']['model'], one['text']) == ('cifar10', 'lenet', 'outpost')
  )
  other = {**seen, 'task': {**seen['task'], 'model': 'cnn'}}  # another network on the same images
  assert findings({**entries, 'other': other}) == before
  levels = [{**one, 'count': 3} for one in seen['honest']['levels']]
  assert '`outpost`' in before[-1]
  assert '`outpost`' not in findings({**entries, name: {**seen, 'honest': {**seen['honest'], 'levels': levels}}})[-1]
  with pytest.raises(ValueError, match='unpack'):  # a sentence for all needs one number of uploads
    findings({**entries, name: {**seen, 'trials': 400, 'honest': {**seen['honest'], 'n': 400}}})


def test_bounds_on_a_cost_are_rounded_outwards_and_no_share_to_all(extensions):
  board = extensions('leaderboard')

  def entry(name, count, low, high):
    honest = {'n': 400, 'levels': [{'level': 'recognisable', 'count': count}]}
    return {'defense': name, 'text': name, 'cost': {'points': low, 'interval': [low, high]}, 'honest': honest}

  digits = [entry('a', 399, 0.54, 1.34), entry('b', 400, 0.86, 1.52), entry('dear', 0, 4.0, 6.0)]
  said = board._of_digits(digits)
  assert 'At least 99 % of 400' in said and 'each of the 2 defenses' in said and '`a` shows least' in said
  assert said.endswith('at most 1.4.')
  with pytest.raises(ValueError, match='unpack'):  # a sentence for all needs one number of uploads
    board._of_digits([*digits, {**digits[0], 'honest': {**digits[0]['honest'], 'n': 50}}])
  hidden, shown = entry('a', 0, 6.88, 12.68), entry('b', 400, 6.88, 12.68)
  assert 'at least 6.8 points' in board._in_colour([hidden, shown])


def test_a_finding_credits_no_defense_whose_attacks_failed(extensions):
  """README named four defenses among those that hide colour images, and attacks on 65 to 100 of 100 had failed."""
  told = extensions('leaderboard')._in_colour

  def entry(name, count, failed, low=6.88):
    honest = {'n': 100, 'levels': [{'level': 'recognisable', 'count': count}], 'failed': failed}
    return {'defense': name, 'text': name, 'cost': {'points': 9.0, 'interval': [low, 12.0]}, 'honest': honest}

  shown, hidden, lost = entry('a', 100, 0), entry('b', 0, 10), entry('c', 0, 11, 0.5)
  assert told([shown, hidden]).endswith('under `a`. Under `b` none does; these cost at least 6.8 points of accuracy.')
  assert told([shown, hidden, lost]).endswith('6.8 points of accuracy. Under `c` the attacks did not converge, which '
                                              'says nothing for these.')  # fmt: skip
  assert told([shown, lost]).endswith('under `a`. Under `c` the attacks did not converge, which says nothing for '
                                      'these.')  # fmt: skip


def test_defenses_of_one_name_stand_together_in_the_findings(extensions):
  texts = ['a(x=1)', 'b(y=1)', 'b(y=2)', 'c']
  assert extensions('leaderboard')._strengths(texts) == ['`a(x=1)`', '`b` at 2 strengths', '`c`']
