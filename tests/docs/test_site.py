"""The pages: each method has one, with its formula, settings and source, and the site is built without a warning."""

import importlib
import os
import pathlib
import subprocess
import sys
import types

import pytest

import gradleak as gl
from experiments import comparison, judgement
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


def test_page_of_a_method_holds_what_its_traits_and_results_say(extensions):
  text = extensions('methods').page('prune')
  assert '| acts on | the update, before it is sent |' in text
  assert '| random | no |' in text
  assert '| sparsifies | entries, which are sent as zeros |' in text
  assert '| `masked` | It compares only what was sent and is not zero. |' in text
  entry = next(one for one in extensions('facts').seen('prune') if one.side.startswith('honest'))
  reached = ' | '.join(f'{count} of {entry.trials}' for count in entry.levels.values())
  assert f'| `{entry.defense}` | ' in text
  assert reached in text


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
  assert '| mini | 1 |' in shown and '![A, B: Table IX](../../results/tables/mini/graddefense_9-1.png)' in shown


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
  assert len(found) == 3
  for one in found:
    assert one in text
