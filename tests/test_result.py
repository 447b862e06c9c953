"""What a result offers: text, frame, notebook; the work directory that holds it; results side by side."""

import json
import pathlib
import re
import shutil
import sys
import types

import jax
import numpy as np
import pytest

import gradleak as gl
from gradleak import report
from gradleak.audit import schema
from gradleak.audit.plan import plan
from gradleak.audit.result import threat_models
from gradleak.audit.settings import AuditSettings
from gradleak.core import storage
from tests.report.parsing import Page

pytestmark = pytest.mark.usefixtures('fast_compilation')

FALSE_LABEL = 'dpsgd(norm=1,noise=2)'
ATTACK = gl.attacks.csdlg(tv=0, steps=4)
ATS = gl.defenses.ats(policy='invert|brightness:0.3/translate_x:0.2')
DEFENSES = {'none': None, FALSE_LABEL: gl.defenses.prune(rate=0.2), str(ATS): ATS}
FILES = ('rows.jsonl', 'controls.jsonl', 'reconstructions.npz', 'curves.npz', 'result.json')


def audit(linear, defenses=None, seed=7, **settings):
  settings = {'controls': 3, 'group_size': 3, 'progress': 'none', **settings}
  return gl.audit(jax.random.key(seed), linear, DEFENSES if defenses is None else defenses, [ATTACK], 2, **settings)


@pytest.fixture(scope='module')
def finished(linear, fast_compilation, tmp_path_factory):
  """A result and the work directory of its audit; nobody writes into it."""
  folder = tmp_path_factory.mktemp('result') / 'work'
  return audit(linear, workdir=folder), folder


@pytest.fixture
def folder(finished, tmp_path):
  """A copy of that work directory."""
  return pathlib.Path(shutil.copytree(finished[1], tmp_path / 'work'))


# ---- text, frame, notebook


def judged(**verdicts):
  """Returns a result with a row per verdict: {defense: [[verdict of each trial] of each attack]}."""
  rows = [
    {'attack': f'attack {a}', 'defense': defense, 'trial': trial, 'verdict': verdict}
    for defense, of_attacks in verdicts.items()
    for a, of_attack in enumerate(of_attacks)
    for trial, verdict in enumerate(of_attack)
  ]
  empty = {
    name: {} for name in ('reconstructions', 'curves', 'threat_models', 'adaptive_attacks', 'inspections', 'methods')
  }
  config = {'model': 'lenet', 'dataset': 'digits'}
  return gl.AuditResult(config, rows, [], np.zeros(0), **empty, versions={}, seconds=0.0, resumed=False)


def test_a_result_prints_the_worst_verdict_on_each_defense():
  found = judged(
    none=[['exact', 'nothing seen', 'inconclusive'], ['inconclusive', 'exact', 'inconclusive']],
    weak=[['nothing seen', 'nothing seen', 'nothing seen'], ['diverged', 'inconclusive', 'nothing seen']],
    gone=[['diverged', 'nothing seen', 'nothing seen']],
    strong=[['nothing seen', 'nothing seen', 'nothing seen']],
  )
  assert repr(found).splitlines() == [
    'AuditResult: lenet on digits',
    '  none: exact 2 of 3 trials',
    '  weak: inconclusive 1 of 3 trials',
    '  gone: diverged 1 of 3 trials',
    '  strong: nothing seen 3 of 3 trials',
  ]


def test_a_frame_holds_the_rows(finished):
  pandas = pytest.importorskip('pandas')
  frame = finished[0].to_frame()
  assert set(frame.columns) == {column.name for column in schema.columns(gl.modalities.IMAGES)}
  assert len(frame) == len(finished[0].rows)
  assert isinstance(frame, pandas.DataFrame)


def test_a_frame_is_made_of_the_rows_or_says_how_to_install_pandas(finished, monkeypatch):
  monkeypatch.setitem(sys.modules, 'pandas', types.SimpleNamespace(DataFrame=tuple))
  assert finished[0].to_frame() == tuple(finished[0].rows)
  monkeypatch.setitem(sys.modules, 'pandas', None)
  with pytest.raises(gl.UsageError, match=r"pip install 'pandas>=2,<4'"):
    finished[0].to_frame()


def test_a_notebook_shows_a_table_and_the_pictures(finished):
  result, _ = finished
  page = Page(result._repr_html_())
  assert [row[0] for row in page.rows] == ['defense', *DEFENSES]
  (image,) = page.attributes('img')
  assert image['src'].startswith('data:image/png;base64,') and 100 < int(image['width']) < 2000
  labels = {label: f'<b>{label}' for label in DEFENSES}
  cases = {(attack, labels[one], *rest): images for (attack, one, *rest), images in result.reconstructions.items()}
  rows = [row | {'defense': labels[row['defense']]} for row in result.rows]
  evil = gl.AuditResult(**{**vars(result), 'rows': rows, 'reconstructions': cases})
  assert not Page(evil._repr_html_()).attributes('b')


# ---- claims follow from the objects


@pytest.mark.long
def test_a_policy_with_bars_survives_storage_and_page(finished, tmp_path):
  result, folder = finished
  assert '|' in str(ATS) and str(ATS) in result.config['defenses']
  loaded = gl.load(folder)
  case = str(ATTACK), str(ATS)
  np.testing.assert_array_equal(loaded.reconstructions[case], result.reconstructions[case])
  report.write(loaded, tmp_path)
  page = Page((tmp_path / 'report.html').read_text('utf-8'))
  assert sum(row[0].strip() == str(ATS) for row in page.rows if row) == 4  # first screen, pictures, figures, worst case


# ---- the work directory


def assert_same(a, b):
  for name in (
    'config',
    'rows',
    'controls',
    'threat_models',
    'adaptive_attacks',
    'inspections',
    'methods',
    'versions',
    'seconds',
  ):
    assert getattr(a, name) == getattr(b, name), name
  np.testing.assert_array_equal(a.truth, b.truth)
  assert list(a.reconstructions) == list(b.reconstructions) and list(a.curves) == list(b.curves)
  for case, images in a.reconstructions.items():
    np.testing.assert_array_equal(images, b.reconstructions[case])
    for mine, others in zip(a.curves[case], b.curves[case], strict=True):
      np.testing.assert_array_equal(mine, others)


@pytest.mark.long
def test_a_loaded_result_is_the_one_in_memory(finished, tmp_path):
  result, folder = finished
  loaded = gl.load(folder)
  assert_same(loaded, result)
  assert loaded.resumed and not result.resumed
  for each, place in ((result, 'memory'), (loaded, 'disk')):
    report.write(each, tmp_path / place)
  for name in ('report.html', 'grid.png', 'summary.csv'):
    assert (tmp_path / 'memory' / name).read_bytes() == (tmp_path / 'disk' / name).read_bytes()


@pytest.mark.long
def test_a_page_is_written_from_a_path(finished, folder, tmp_path):
  report.write(finished[0], tmp_path / 'memory')
  report.write(str(folder))
  report.write(folder, tmp_path / 'elsewhere')
  page = (tmp_path / 'memory' / 'report.html').read_bytes()
  assert (folder / 'report.html').read_bytes() == (tmp_path / 'elsewhere' / 'report.html').read_bytes() == page
  with pytest.raises(gl.UsageError, match='needs a folder'):
    report.write(finished[0])


@pytest.mark.parametrize('name', ['config.json', *FILES])
def test_an_unfinished_audit_is_refused(folder, name):
  (folder / name).unlink()
  unfinished = r'holds no finished audit of this version: run the audit with workdir='
  lost = rf'{name} cannot be read \(No such file or directory\); run the audit with this workdir again'
  with pytest.raises(gl.UsageError, match=unfinished if name in ('config.json', 'result.json') else lost):
    gl.load(folder)
  with pytest.raises(gl.UsageError, match='holds no finished audit'):
    gl.load(folder / 'nowhere')


@pytest.mark.parametrize('name', FILES)
@pytest.mark.parametrize('content', [b'{"half', b'\xff\xfe', b'[1]\n'])
def test_a_damaged_file_is_refused(folder, name, content):
  (folder / name).write_bytes(content)
  with pytest.raises(gl.UsageError, match=f'{name} is damaged') as refused:
    gl.load(folder)
  assert '\n' not in str(refused.value)


CHANGES = {
  'dropped': lambda lines: lines[:-1],
  'repeated': lambda lines: [*lines, lines[0]],
  'emptied': lambda lines: [],
  'edited': lambda lines: [lines[0].replace('"trial": 0', '"trial": 1'), *lines[1:]],
  'exchanged': lambda lines: lines[::-1],
}


@pytest.mark.parametrize('name', ['rows.jsonl', 'controls.jsonl'])
@pytest.mark.parametrize('how', CHANGES)
def test_rows_that_are_not_those_that_were_written_are_refused_and_written_anew(finished, folder, linear, name, how):
  whole = (folder / name).read_text().splitlines(keepends=True)
  lines = CHANGES[how](whole)
  assert lines != whole
  (folder / name).write_text(''.join(lines))
  differing = f'it has {len(lines)} lines, and {len(whole)} were written' if len(lines) != len(whole) else 'its SHA-256'
  with pytest.raises(gl.UsageError, match=rf'{name} is damaged \({differing}.*\); run the audit with this workdir'):
    gl.load(folder)
  if how == 'dropped':
    with pytest.warns(storage.Caution, match=rf'{name} is damaged .*; it is written anew'):
      assert audit(linear, workdir=folder).resumed
    assert (folder / name).read_text() == ''.join(whole) and gl.load(folder).rows == finished[0].rows


def test_a_result_of_an_earlier_version_is_written_anew(finished, folder, linear):
  facts = json.loads((folder / 'result.json').read_text())
  (folder / 'result.json').write_text(
    json.dumps({name: facts[name] for name in facts if name in ('config', 'methods')})
  )
  with pytest.raises(gl.UsageError, match='of an earlier version, without digests of its files; run the audit with'):
    gl.load(folder)
  with pytest.warns(storage.Caution, match='of an earlier version'):
    audit(linear, workdir=folder)
  assert gl.load(folder).rows == finished[0].rows


def test_rows_of_another_version_are_refused(folder):
  rows = [json.loads(line) for line in (folder / 'rows.jsonl').read_text().splitlines()]
  content = storage.json_lines([{**row, 'older': 1} for row in rows])
  (folder / 'rows.jsonl').write_text(content)
  facts = json.loads((folder / 'result.json').read_text())
  known = {name: facts[name] for name in facts if not name.startswith('_')}
  storage.seal(folder / 'result.json', known, {**facts['files'], 'rows.jsonl': storage.description(content)})
  with pytest.raises(gl.UsageError, match=r'older.* rows of another version of gradleak need a new work directory'):
    gl.load(folder)


class Killed(BaseException):
  """What kills a run while it writes."""


@pytest.mark.long
@pytest.mark.parametrize(
  'last', ['rows.jsonl', 'result.json', *(pytest.param(name, marks=pytest.mark.slow) for name in FILES[1:-1])]
)
def test_a_kill_while_the_files_are_written_leaves_nothing_to_load(linear, folder, monkeypatch, last):
  """A defense is added to a finished audit, and the run is killed before one of the files is written."""
  write = storage.write_atomically

  def killed(path, content):
    if path.name == last:
      raise Killed
    write(path, content)

  defenses = {**DEFENSES, 'pruned': gl.defenses.prune(rate=0.5)}
  with monkeypatch.context() as patched, pytest.raises(Killed):
    for module in (storage, sys.modules['gradleak.audit.run']):
      patched.setattr(module, 'write_atomically', killed)
    audit(linear, defenses, workdir=folder)
  with pytest.raises(gl.UsageError, match='holds no finished audit'):
    gl.load(folder)
  result = audit(linear, defenses, workdir=folder)
  loaded = gl.load(folder)
  assert result.resumed and loaded.rows == result.rows
  assert loaded.config['defenses'] == list(defenses) == list(dict.fromkeys(row['defense'] for row in loaded.rows))


# ---- results side by side


@pytest.fixture(scope='module')
def two(finished, linear):
  """Results of two keys, of other defenses, one of them another one under the same label."""
  defenses = {'none': None, 'pruned': gl.defenses.prune(rate=0.5), FALSE_LABEL: gl.defenses.clip(norm=0.5)}
  return {'first': finished[0], 'second': audit(linear, defenses, seed=8)}


def test_equal_settings_are_not_mentioned(finished):
  found = gl.compare([finished[0], finished[0]], strict=True)
  assert found.names == ('1', '2') and found.differing == {}
  lines = str(found).splitlines()
  assert lines[0].split('  ')[0] == 'attack' and '1: PSNR dB, recovered (95 %)' in lines[0]
  assert len(lines) == 2 + len(found.rows) + len(found.worst)


def test_each_result_has_a_column(two):
  found = gl.compare(two)
  assert [(row['defense'], row['adaptive']) for row in found.rows if row['adaptive'] is None] == [
    (label, None) for label in ('none', FALSE_LABEL, str(ATS), 'pruned')
  ]
  for row in found.rows:
    for name, result in two.items():
      chosen = [r for r in result.rows if all(r[key] == row[key] for key in ('attack', 'defense', 'adaptive'))]
      assert row[f'{name} n'] == (len(chosen) or None)
      if chosen:
        assert row[f'{name} psnr'] == pytest.approx(np.mean([r['psnr'] for r in chosen]))
        assert row[f'{name} recovered'] == sum(r['success'] for r in chosen)
  cells = [re.split(' {2,}', line) for line in str(found).splitlines()]
  assert [str(ATTACK), 'pruned', '–', '–'] in [line[:4] for line in cells]  # no such runs in the first


def test_results_of_other_settings_are_not_compared_silently(two):
  found = gl.compare(two)
  assert set(found.differing) == {'key', f'defense {FALSE_LABEL}'}
  head = str(found).splitlines()[:4]
  assert head[0].startswith('These results differ in settings')
  assert any(line.startswith('  key: first [0, 7], second [0, 8]') for line in head)
  assert 'clip(norm=0.5)' in str(found)
  with pytest.raises(gl.UsageError, match=r'key: first \[0, 7\], second \[0, 8\].*strict=False'):
    gl.compare(two, strict=True)


@pytest.mark.parametrize('setting', ['model', 'data_fingerprint', 'batch_size', 'loss', 'trials', 'labels', 'key'])
def test_every_scientific_setting_counts(finished, setting):
  result, _ = finished
  other = gl.AuditResult(**{**vars(result), 'config': {**result.config, setting: 'other'}})
  without = gl.AuditResult(**{**vars(result), 'config': {k: v for k, v in result.config.items() if k != setting}})
  for changed in (other, without):
    assert list(gl.compare([result, changed]).differing) == [setting]


def test_a_comparison_in_markdown_and_as_a_frame(two, monkeypatch):
  found = gl.compare(two)
  lines = found.to_markdown().splitlines()
  assert any(line.startswith('- key: ') for line in lines)
  table = [line for line in lines if line.startswith('| ')]
  assert len(table) == 2 + len(found.rows) + len(found.worst) and table[1] == '| --- | --- | --- | --- | --- |'
  assert {line.replace(r'\|', '').count('|') for line in table} == {6}
  monkeypatch.setitem(sys.modules, 'pandas', types.SimpleNamespace(DataFrame=Frame))
  frame = found.to_frame()
  assert frame == found.rows and frame.attrs == {'differing': found.differing}


class Frame(list):
  """Stands for a data frame."""

  def __init__(self, rows):
    super().__init__(rows)
    self.attrs = {}


@pytest.mark.parametrize(('results', 'words'), [([], 'nothing to compare'), ({'a': 'results/a'}, "result 'a' is")])
def test_what_cannot_be_compared_is_refused(results, words):
  with pytest.raises(gl.UsageError, match=words):
    gl.compare(results)


# ---- the documents


def test_the_table_of_columns_is_that_of_the_schema(finished):
  text = (pathlib.Path(__file__).parent.parent / 'docs' / 'ROWS.md').read_text('utf-8')
  assert text == schema.markdown(), 'write gradleak.audit.schema.markdown() to docs/ROWS.md'
  for name in finished[0].rows[0]:
    assert f'| `{name}` |' in text


def test_a_comparison_shows_intervals_of_three_runs_or_more(finished):
  result = finished[0]
  rows = [{**result.rows[0], 'trial': trial, 'psnr': psnr} for trial, psnr in enumerate((10.0, 12.0, 14.0))]
  few, many = (gl.AuditResult(**{**vars(result), 'rows': kept}) for kept in (rows[:2], rows))
  found = gl.compare({'few': few, 'many': many})
  half = 4.303 * 2 / 3**0.5  # Student's quantile for two degrees of freedom
  assert found.rows[0]['many psnr_low'] == pytest.approx(12 - half, abs=1e-2)
  assert found.rows[0]['few psnr_low'] is None
  assert '11.0, 0 of 2 (0–85 %)' in str(found) and f'12.0 ± {half:.1f}, 0 of 3 (0–71 %)' in str(found)


def test_a_comparison_ends_with_the_worst_case_of_each_defense(finished):
  result = finished[0]
  first = next(row for row in result.rows if row['defense'] != 'none')
  seen = {'success': True, 'verdict': 'recognisable'}
  rows = [
    {**first, 'trial': 0, 'adaptive': None, **seen},
    {**first, 'trial': 1, 'adaptive': None},
    {**first, 'trial': 0, 'adaptive': 'masked'},
    {**first, 'trial': 1, 'adaptive': 'masked', **seen},
  ]
  (worst,) = gl.compare({'a': gl.AuditResult(**{**vars(result), 'rows': rows})}).worst
  assert (worst['a recovered'], worst['a n'], worst['a verdict']) == (2, 2, 'recognisable')
  assert worst['a by'] == [first['attack'], f'{first["attack"]} · masked']
  assert worst['a success_low'] == pytest.approx(0.158, abs=1e-3)


def test_steps_that_attacks_set_themselves_do_not_differ(finished):
  result = finished[0]
  config = {**result.config, 'steps': 7}
  same = gl.AuditResult(**{**vars(result), 'config': config})
  assert gl.compare([result, same]).differing == {}
  more = gl.AuditResult(**{**vars(same), 'rows': [{**row, 'steps': 7} for row in result.rows]})
  steps = result.rows[0]['steps']
  assert gl.compare([result, more]).differing == {f'steps of {ATTACK}': {'1': steps, '2': 7}}


@pytest.mark.long
@pytest.mark.parametrize('knowledge', ['both', 'adaptive'])
def test_what_an_adaptive_attack_holds_beside_the_unchanged_one_is_told(digits, knowledge):
  images, labels = (each[:32] for each in digits)
  given = {'key': jax.random.key(0), 'public': (images[16:], labels[16:])}
  scenario = gl.scenario(gl.models.create('mlp(widths=16)', 10), images[:16], labels[:16], **given)
  settings = AuditSettings(controls=1, knowledge=knowledge, adaptive_attacks=('class_average',))
  made = plan(jax.random.key(1), scenario, [gl.defenses.concealment(steps=2)], [gl.attacks.csdlg(steps=2)], 1, settings)
  (sentences,) = threat_models(made).values()
  names = 'class_average: ' * (knowledge == 'both')
  held = f'{names}It holds auxiliary data of the same kind, 16 samples.'
  assert held in sentences and any(one.startswith(f'{names}Threat model D') for one in sentences)
  assert ('It holds no auxiliary data.' in sentences) == (knowledge == 'both')
