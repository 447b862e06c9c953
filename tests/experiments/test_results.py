"""Stored results hold what a table's figures are computed from; pages are computed from them."""

import dataclasses
import json
import math
import pathlib
import re
import subprocess

import numpy as np
import pytest
from PIL import Image, ImageColor

import experiments
import launch
from experiments import claims, comparison, judgement, pages, results, table
from experiments import experiment as machinery
from experiments.comparison import Cell
from experiments.experiment import Experiment, Run
from experiments.notes import Note
from gradleak.core import errors, storage
from gradleak.core.storage import plain
from gradleak.report import figures, training

ROOT = pathlib.Path(launch.__file__).parent.parent
RUN = Run('digits', 'mlp', 'csdlg(steps=2)', {'none': 'none', 'GC': 'prune(rate=0.9)'}, 4, mini={'trials': 1})
CELLS = (
  Cell('digits', 'none', 'psnr', 'run', 'none', 39.2),
  Cell('digits', 'GC', 'psnr', 'run', 'GC', 39.2),
  Cell('digits', 'GC', 'psnr_gain', 'run', 'GC', minus='other'),
  Cell('digits', 'GC', 'ssim', 'other', 'GC', 0.51),
)
TOY = Experiment('toy_1', 'A paper.', 'Table 1', 'It shows.', {'run': RUN, 'other': RUN}, CELLS, 'Means.')


def rows(*psnrs):
  found = []
  for defense in RUN.texts().values():
    for trial, psnr in enumerate(psnrs):
      row = {'defense': defense, 'adaptive': None, 'trial': trial, 'psnr': psnr, 'control_psnr': 8.0, 'ssim': 0.51}
      found.append({**row, 'success': psnr > 20, 'diverged': False, 'unused': 1.0})
  return found


@pytest.fixture
def stored(tmp_path):
  picture = tmp_path / 'grid.png'
  Image.fromarray(np.random.default_rng(0).integers(0, 255, (30, 2000, 3), np.uint8)).save(picture)
  found = {'run': rows(39.123456789, 39.4, 39.2, 39.3), 'other': rows(10.0, 10.1, 10.2, 10.3)}
  results.store(tmp_path / 'tables', TOY, 'mini', 3, found, 12.34, [str(picture)])
  return found, results.read(tmp_path / 'tables', 'mini')['toy_1'], tmp_path / 'tables'


def test_figures_are_the_same_from_what_is_stored(stored):
  found, one, folder = stored
  expected = [TOY.runs[cell.run].outcome(cell, machinery.gains(cell, found)) for cell in CELLS]
  for ours, wanted in zip(results.outcomes(one, TOY), expected, strict=True):
    assert ours[3:-1] == wanted[3:-1] and ours.values == pytest.approx(wanted.values, rel=1e-5)
    np.testing.assert_allclose(ours[:3], wanted[:3], rtol=1e-5)
  assert 'unused' not in one.rows['run'][0] and len(one.rows['run']) == len(one.rows['other']) == 8
  assert (one.scale, one.seed, one.seconds, one.pictures) == ('mini', 3, 12.3, ['toy_1-1.png'])
  assert one.versions['jax'] and {'dataset', 'model', 'attack', 'defenses', 'trials'} <= set(one.settings['run'])
  with Image.open(folder / 'mini' / 'toy_1-1.png') as small:
    assert small.width == results.WIDTH and small.mode == 'P'


def test_a_stored_picture_keeps_the_colours_of_its_lines(tmp_path):
  labels = 'none', 'DP', 'GC', 'Prune', 'Soteria', 'ATS'
  rounds = {
    label: [{'round': n, 'accuracy': 0.9 - 0.5 / n - 0.01 * i} for n in (1, 2, 4)] for i, label in enumerate(labels)
  }
  picture = tmp_path / 'curves.png'
  picture.write_bytes(training.curves({label: training.Trained(one, None) for label, one in rounds.items()}))
  found = {'run': rows(39.1), 'other': rows(10.0)}
  results.store(tmp_path, TOY, 'mini', 3, found, 12.3, [str(picture)])
  with Image.open(tmp_path / 'mini' / 'toy_1-1.png') as small:
    kept = np.unique(np.asarray(small.convert('RGB'), int).reshape(-1, 3), axis=0)
  for label in labels:
    colour = ImageColor.getrgb(figures.line_style(label, labels)[0])
    assert np.abs(kept - colour).max(axis=1).min() <= 8, label


def test_the_pictures_are_spread_over_the_runs():
  found = [''.join(results.spread('abcdefgh'[:count], 3)) for count in range(9)]
  assert found == ['', 'a', 'ab', 'abc', 'acd', 'ace', 'acf', 'adg', 'aeh']


def test_results_of_other_settings_are_not_shown(stored):
  _, one, _ = stored
  assert results.current(one, TOY) and results.done(one, TOY, 3) and not results.done(one, TOY, 4)
  other = dataclasses.replace(TOY, runs={'run': RUN, 'other': RUN.replaced(restarts=3)})
  assert not results.current(one, other) and not results.done(None, TOY, 3)
  text = pages.pages({'toy_1': one}, {'toy_1': other}, 'mini', 'there')
  assert list(text) == ['index.md'] and 'its settings have changed since' in text['index.md']


def test_a_page_has_figures_verdicts_pictures_and_how_to_run_it_again(stored):
  _, one, _ = stored
  found = pages.pages({'toy_1': one}, {'toy_1': TOY}, 'mini', 'there')
  page, index = found['toy_1.md'], found['index.md']
  assert '39.26' in page and '![Table 1: picture 1](there/toy_1-1.png)' in page
  assert '--experiment=toy_1' in page and 'trials 1 instead of 4' in page and 'which took 12 s' in page
  judged = pages.judge({'toy_1': one}, {'toy_1': TOY}, 'mini')['toy_1']
  assert judged.counts() == {**dict.fromkeys(judgement.COUNTED, 0), 'agrees': 3}
  assert '3 printed figures:' in index and '3 of 3 figures that count agree' in index
  assert page.index('picture 1') < page.index('39.26') < page.index('<summary>Settings')
  assert '| [Table 1](toy_1.md) | It shows | no claim |' in index and '1 of 1 declared' in index
  empty = pages.pages({}, {'toy_1': TOY}, 'mini', 'there')
  assert '| not shown | 3 |' in empty['index.md'] and '| Table 1 | It shows | not yet, on digits |' in empty['index.md']


def test_a_difference_without_a_note_that_holds_is_of_unknown_cause(stored):
  _, one, _ = stored
  cells = (CELLS[0]._replace(paper=80.0), *CELLS[1:])
  bare = dataclasses.replace(TOY, cells=cells)
  says = Note('toy_1', 'Because.', seed=3, holds=(('digits | none | psnr', '<', 'digits | none | psnr | paper'),))
  fails = says._replace(holds=(('digits | none | psnr | paper', '<', 'digits | none | psnr'),))
  for notes, unknown in (((), True), ((fails,), True), ((says,), False)):
    noted = dataclasses.replace(bare, notes=notes)
    page = pages.pages({'toy_1': one}, {'toy_1': noted}, 'mini', 'there')['toy_1.md']
    assert (pages.UNKNOWN in page) == unknown and ('Because.' in page) != unknown
    assert not unknown or f'{pages.UNKNOWN}: digits, PSNR dB.' in page
  assert pages.UNKNOWN not in pages.pages({'toy_1': one}, {'toy_1': TOY}, 'mini', 'there')['toy_1.md']


def test_a_note_explains_the_column_and_the_metrics_that_it_names():
  cell = CELLS[0]
  assert cell.column == 'digits' and cell.metric == 'psnr'
  for note, about in (
    (Note('toy_1', 'Because.'), True),
    (Note('toy_1', 'Because.', 'digits'), True),
    (Note('toy_1', 'Because.', 'faces'), False),
    (Note('toy_1', 'It has {digits | none | psnr} dB.'), True),
    (Note('toy_1', 'It has {none | ssim}.', 'digits'), False),
  ):
    assert comparison.explained(note, cell) == about


def test_damaged_results_are_named(stored):
  *_, folder = stored
  path = folder / 'mini' / 'toy_1.json'
  whole = json.loads(path.read_text())
  for name, rows in whole['rows'].items():
    path.write_text(json.dumps({**whole, 'rows': {**whole['rows'], name: rows[1:]}}))
    with pytest.raises(errors.UsageError, match=r'toy_1\.json is damaged \(its content is not that of its digest\)'):
      results.read(folder, 'mini')
  path.write_text(json.dumps({name: value for name, value in whole.items() if name != storage.SEAL}))
  assert results.read(folder, 'mini')['toy_1'].rows == whole['rows']  # of an earlier version
  path.write_text(json.dumps(whole))
  for text in ('{', '[]', '{}', json.dumps({**json.loads(path.read_text()), 'format': 0})):
    path.write_text(text)
    with pytest.raises(errors.UsageError, match=r'toy_1\.json is damaged'):
      results.read(folder, 'mini')


def test_a_clock_counts_what_was_interrupted_and_nothing_twice(tmp_path):
  run, folder = next(iter(experiments.get('ffl_4_cifar10_resnet').runs.values())), str(tmp_path / 'new')
  clock = results.Clock(folder)
  with pytest.raises(KeyboardInterrupt), clock.timed('run', run):
    raise KeyboardInterrupt
  spent = clock.seconds
  assert not clock.complete('run', run)
  with clock.timed('run', run):
    pass
  whole = clock.seconds
  again = results.Clock(folder)
  assert again.complete('run', run)
  with again.timed('run', run):
    pass
  assert 0 < spent < whole == again.seconds and math.isfinite(whole)
  grown = dataclasses.replace(run, seeds=7)  # more trainings in the same folder: what they take is added
  assert not again.complete('run', grown)
  with again.timed('run', grown):
    pass
  assert again.seconds > whole and again.complete('run', grown)


def test_a_clock_in_a_file_is_refused(tmp_path):
  (tmp_path / 'file').write_text('')
  with pytest.raises(errors.UsageError, match='which is a file'):
    results.Clock(str(tmp_path / 'file'))


@pytest.mark.parametrize('content', ['[]', '{"run": 3}', '{"run": ["long", true]}', '{"run": null}', '[' * 10**5])
def test_a_clock_that_is_damaged_starts_anew(tmp_path, content):
  (tmp_path / 'seconds.json').write_text(content)
  assert results.Clock(str(tmp_path)).seconds == 0


@pytest.mark.parametrize('name', sorted(experiments.REGISTRY))
@pytest.mark.parametrize('scale', ['mini', 'paper'])
def test_settings_are_plain(name, scale):
  for run in experiments.get(name).runs.values():
    found = results.declared(run.scaled(scale))
    assert json.loads(json.dumps(found)) == found and '<' not in str(found)


@pytest.mark.long
def test_the_pages_of_results_are_what_the_stored_rows_say():
  found = results.read(ROOT / 'results' / 'tables', 'mini')
  stale = [name for name, one in found.items() if not results.current(one, experiments.get(name))]
  assert found and not stale, f'the settings of {stale} have changed: run them again, or delete their results'
  made = pages.pages(found, experiments.REGISTRY, 'mini', 'there')
  assert set(made) == {'index.md', *(f'{name}.md' for name in found)}
  for name, text in made.items():
    widest = max((line.count('|') - 1 for line in text.splitlines() if line.startswith('| ')), default=0)
    assert widest <= table.MOST_COLUMNS, name
    above = text.partition('## Figures')[0]
    assert name == 'index.md' or '![' in above or not found[name.removesuffix('.md')].pictures
    assert name == 'index.md' or '| Here |' in above or not claims.CLAIMS.get(name.removesuffix('.md'))
  pictures = {path.name for path in (ROOT / 'results' / 'tables' / 'mini').glob('*.png')}
  assert pictures == {picture for one in found.values() for picture in one.pictures}


def test_a_batch_that_spear_did_not_separate_is_read_again():
  experiment = experiments.get('spear_exact')
  run = next(iter(experiment.runs.values())).scaled('mini')
  row = {'errors': [1e-9, math.inf], 'seconds': 1.0}
  found = [{**row, 'defense': cell.defense} for cell in experiment.cells]
  stored = json.loads(json.dumps(plain(found)))
  for cell in experiment.cells:
    assert run.outcome(cell, stored) == run.outcome(cell, found) and run.outcome(cell, stored).mean == math.inf


def test_a_revision_is_of_this_checkout_alone(tmp_path):
  git = ['git', '-C', str(tmp_path), '-c', 'user.name=a', '-c', 'user.email=a@b']
  for arguments in (['init', '-q'], ['commit', '-q', '--allow-empty', '-m', 'first']):
    subprocess.run([*git, *arguments], check=True)
  (tmp_path / 'gradleak').mkdir()
  (tmp_path / 'experiments').mkdir()
  root = tmp_path.resolve()
  assert re.fullmatch('[0-9a-f]{40}', results.revision(root))
  assert results.revision(root / 'gradleak') == ''  # inside of another project
  (root / 'gradleak' / 'new.py').write_text('')
  subprocess.run([*git, 'add', '-A'], check=True)
  assert results.revision(root).endswith('+')
