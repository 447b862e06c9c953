import html.parser
import json
import re

import numpy as np
import pytest

from gradleak import report

VOID = {'meta', 'img', 'br', 'link', 'input', 'hr', 'wbr', 'line', 'circle', 'rect'}


class Page(html.parser.HTMLParser):
  """Reads a page: its tags with attributes, the text of every table row and heading; fails on tags that do not nest."""

  def __init__(self, source):
    super().__init__()
    self.tags, self.rows, self.headings, self.open, self.text = [], [], [], [], []
    self.feed(source)
    self.close()
    assert not self.open

  def handle_starttag(self, tag, attributes):
    self.tags.append((tag, dict(attributes)))
    if tag not in VOID:
      self.open.append(tag)
    if tag == 'tr':
      self.rows.append([])
    if tag in ('td', 'th'):
      self.rows[-1].append('')
    if tag == 'h2':
      self.headings.append('')

  def handle_startendtag(self, tag, attributes):
    self.tags.append((tag, dict(attributes)))

  def handle_endtag(self, tag):
    assert self.open.pop() == tag

  def handle_data(self, data):
    if 'style' in self.open or 'svg' in self.open:
      return
    self.text.append(data)
    if 'td' in self.open or 'th' in self.open:
      self.rows[-1][-1] += data
    if 'h2' in self.open:
      self.headings[-1] += data

  def attributes(self, tag):
    return [attributes for name, attributes in self.tags if name == tag]


@pytest.fixture(scope='module')
def source(result):
  return report.render(result)


@pytest.fixture(scope='module')
def page(source):
  return Page(source)


def rows_of(page, first):
  return [[' '.join(cell.split()) for cell in row] for row in page.rows if row and row[0].strip() == first]


def test_sections_stand_in_order(page):
  assert page.headings == [
    'What the server can reconstruct', 'How much is recovered', 'Worst case per defense', 'How the attacks descended',
    'What this attacker was granted', 'Settings', 'How to read this page',
  ]  # fmt: skip


def test_nothing_is_loaded_from_anywhere(source, page):
  for _, attributes in page.tags:
    for name in ('src', 'href', 'xlink:href', 'action', 'data', 'poster'):
      assert attributes.get(name, '#').startswith(('#', 'data:image/png;base64,'))
    assert 'srcset' not in attributes
  assert not {'script', 'link', 'iframe', 'object', 'base'} & {tag for tag, _ in page.tags}
  styles = ''.join(re.findall(r'<style>(.*?)</style>', source, re.DOTALL))
  assert '@import' not in styles
  assert 'url(' not in styles
  assert set(re.findall(r'https?://[^"\s]+', source)) <= {'http://www.w3.org/2000/svg', 'http://www.w3.org/1999/xlink'}


def test_markup_serves_everyone(page):
  assert all(len(image['alt']) > 10 for image in page.attributes('img'))
  assert all(cell.get('scope') in ('col', 'row', 'rowgroup') for cell in page.attributes('th'))
  assert all(drawing['role'] == 'img' and drawing['aria-label'] for drawing in page.attributes('svg'))
  ids = [attributes['id'] for _, attributes in page.tags if 'id' in attributes]
  assert len(ids) == len(set(ids))
  assert {link['href'][1:] for link in page.attributes('a')} <= set(ids)


def test_light_dark_print_and_narrow(source):
  for query in ('prefers-color-scheme: dark', '@media print', 'max-width: 40rem', 'width=device-width'):
    assert query in source


def test_pictures_carry_psnr_and_verdict_in_words(result, page):
  for attack_index, attack in enumerate(result.config['attacks']):
    for defense in result.config['defenses']:
      cells = rows_of(page, defense)[attack_index][1:]
      rows = [r for r in result.rows if (r['attack'], r['defense']) == (attack, defense)]
      for cell, row, image in zip(cells, rows, result.reconstructions[attack, defense], strict=True):
        if row['diverged']:
          assert cell == 'NaN at step 412× diverged'
          continue
        error = np.mean((np.clip(image, 0, 1) - result.truth[row['trial']]) ** 2)
        more = ' +' if row['verdict'] == 'recovered' and not row['solved'] else ''
        assert cell.startswith(f'{-10 * np.log10(error):.1f} dB{more}')
        assert cell.endswith(f' {row["verdict"]}')


def test_figures_match_the_rows(result, page):
  for attack_index, attack in enumerate(result.config['attacks']):
    for defense in result.config['defenses']:
      cells = rows_of(page, defense)[2 + attack_index]  # after the two picture rows
      rows = [r for r in result.rows if (r['attack'], r['defense']) == (attack, defense)]
      psnr = np.array([r['psnr'] for r in rows if r['psnr'] is not None])
      half = {3: 4.302653, 4: 3.182446}[psnr.size] * psnr.std(ddof=1) / np.sqrt(psnr.size)  # Student's t from a table
      verdict, recovered, mean, _, _, oracle, unsolved, diverged = cells[1:]
      assert mean == f'{psnr.mean():.1f}{psnr.mean() - half:.1f} – {psnr.mean() + half:.1f}'
      assert recovered.startswith(f'{sum(r["success"] for r in rows)} of 4')
      assert oracle == f'{psnr.mean() + 0.5:.1f}'
      assert unsolved == str(sum(r['verdict'] == 'not solved' for r in rows))
      assert diverged == str(sum(r['diverged'] for r in rows))
      assert any(word in verdict for word in ('recovered', 'protected', 'not solved', 'undecided'))


def test_controls_stand_beside_the_attacks(result, page):
  controls = rows_of(page, 'null-gradient control')
  for attack, cells in zip(result.config['attacks'], controls, strict=True):
    values = [row['psnr'] for row in result.controls if row['attack'] == attack]
    assert cells[2] == '64 runs'
    assert cells[3].startswith(f'{np.mean(values):.1f}')


def test_worst_case_takes_any_attack(result, page):
  for defense in result.config['defenses']:
    cells = rows_of(page, defense)[-1]
    recovered = {r['trial'] for r in result.rows if r['defense'] == defense and r['success']}
    assert cells[1].startswith(f'{len(recovered)} of 4')


def test_one_dot_per_finite_run(result, source):
  drawings = re.findall(r'<svg class="strip".*?</svg>', source, re.DOTALL)
  finite = sum(row['psnr'] is not None for row in result.rows)
  assert sum(drawing.count('<circle') for drawing in drawings) == finite + len(result.controls)


def test_every_setting_and_every_grant_is_there(result, source, page):
  text = ' '.join(''.join(page.text).split())
  for key, value in result.config.items():
    assert [key, json.dumps(value)] in rows_of(page, key)
  for sentences in result.threat_models.values():
    for sentence in sentences:
      assert text.count(sentence) == 1  # granted alike, said once
  for version in result.versions.values():
    assert version in text
  assert '83.2 seconds' in text


def test_attackers_with_different_knowledge_are_told_apart(result):
  models = {attack: ['The same.', f'Only {i}.'] for i, attack in enumerate(result.threat_models)}
  text = report.render(result._replace(threat_models=models))
  assert text.count('<li>The same.</li>') == 2
  assert text.count('<li>Only 1.</li>') == 1


def test_everything_is_escaped(result):
  evil = '<script>alert("x")</script>&'
  rows = [row | {'defense': evil, 'attack': f'a{evil}'} for row in result.rows if row['defense'] == 'none'][:4]
  source = report.render(
    result._replace(
      config=result.config | dict.fromkeys(('dataset', 'model', 'split', 'init', 'labels', evil), evil),
      rows=rows,
      controls=[row | {'attack': f'a{evil}'} for row in result.controls],
      reconstructions={(f'a{evil}', evil): result.truth},
      curves={(f'a{evil}', evil): next(iter(result.curves.values()))},
      threat_models={f'a{evil}': [evil]},
      versions={'gradleak': evil},
    )
  )
  assert 'script' not in {tag for tag, _ in Page(source).tags}
  assert '<script' not in source
  assert '&lt;script&gt;' in source


@pytest.mark.parametrize(
  'settings',
  [
    {'trials': 1, 'diverged': ()},
    {'trials': 2, 'batch': 3, 'controls': 20},
    {'trials': 1, 'batch': 10, 'controls': 0, 'defenses': ('none',)},
    {
      'trials': 3,
      'attacks': ('dlg(history=100)',),
      'defenses': ('none', 'prune(rate=0.9)'),
      'diverged': [('dlg(history=100)', d, t) for d in ('none', 'prune(rate=0.9)') for t in range(3)],
    },
  ],
  ids=['one trial', 'batches', 'large batch without control', 'all diverged'],
)
def test_other_shapes_of_results(build, settings):
  result = build(**settings)
  page = Page(report.render(result))
  batch = settings.get('batch', 1)
  shown = min(8, settings['trials'] * batch)
  pairs = len(result.reconstructions)
  assert len(page.attributes('img')) == shown * (1 + pairs)
  text = ''.join(page.text)
  assert ('verdicts are of whole trials' in text) == (shown < settings['trials'] * batch)
  assert 'None' not in text
  assert 'nan' not in text


def test_a_colour_image_and_a_bare_config(build):
  result = build(2, diverged=())
  result = result._replace(
    config={},
    truth=np.repeat(result.truth, 3, axis=-1),
    reconstructions={pair: np.repeat(images, 3, axis=-1) for pair, images in result.reconstructions.items()},
    curves={},
    controls=[],
    threat_models={},
  )
  text = ''.join(Page(report.render(result)).text)
  assert 'closed-form' in text
  assert 'Without a null-gradient control' in text


def test_an_undefended_failure_leads_the_page(build):
  result = build(4, defenses=('none', 'laplace(scale=0.1)'), diverged=())
  rows = [row | {'success': False, 'verdict': 'not solved', 'solved': False} for row in result.rows]
  text = ' '.join(''.join(Page(report.render(result._replace(rows=rows))).text).split())
  assert 'Even without a defense none of the 4 images is recovered: this setting proves nothing' in text
  assert 'undefended run fails' in text


def test_same_result_same_bytes(result, source):
  assert report.render(result) == source


def test_write_leaves_three_whole_files(result, source, tmp_path):
  folder = tmp_path / 'new' / 'place'
  report.write(result, folder)
  assert sorted(path.name for path in folder.iterdir()) == ['grid.png', 'report.html', 'summary.csv']
  assert (folder / 'report.html').read_text('utf-8') == source
  assert (folder / 'grid.png').read_bytes() == report.grid(result)
  (folder / 'summary.csv').write_text('old')
  report.write(result, folder)
  assert (folder / 'summary.csv').read_bytes().decode() == report.summary_csv(result.rows)
