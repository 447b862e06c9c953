import base64
import json
import re
from dataclasses import replace

import jax
import numpy as np
import pytest

from gradleak import report
from gradleak.report import headline, html
from gradleak.report import page as page_of
from gradleak.summary import cases, worst
from tests.objects import objects
from tests.report.parsing import Page


@pytest.fixture(scope='module')
def source(result):
  return report.render(result)


@pytest.fixture(scope='module')
def page(source):
  return Page(source)


def changed(result, **changes):
  """Returns a changed result without its curves: to draw them takes most of the time of a page."""
  return replace(result, curves={}, **changes)


def rows_of(page, first):
  return [[' '.join(cell.split()) for cell in row] for row in page.rows if row and row[0].strip() == first]


def test_sections_stand_in_order(page):
  assert page.headings == [
    'What this shows', 'What the attacks reconstruct', 'How much is recovered', 'Worst case per defense',
    'How the attacks converged',
    'What the attackers know', 'What the client could notice', 'Settings', 'How to read this page',
  ]  # fmt: skip


def test_pictures_carry_psnr_and_verdict_in_words(result, page):
  for attack_index, attack in enumerate(result.config['attacks']):
    for defense in result.config['defenses']:
      cells = rows_of(page, defense)[1 + attack_index][1:]  # after the first screen
      rows = [r for r in result.rows if (r['attack'], r['defense']) == (attack, defense)]
      for cell, row, image in zip(cells, rows, result.reconstructions[attack, defense], strict=True):
        if row['diverged']:
          assert cell == 'NaN at step 412× diverged'
          continue
        error = np.mean((np.clip(image, 0, 1) - result.truth[row['trial']]) ** 2)
        more = ' +' if row['success'] and not row['solved'] else ''
        assert cell.startswith(f'{-10 * np.log10(error):.1f} dB{more}')
        assert cell.endswith(f' {row["verdict"]}')


def test_the_best_start_is_shown_where_there_are_several(result, source):
  once = changed(result, config={**result.config, 'restarts': 1})
  assert 'oracle<br>PSNR' in source and 'oracle' not in report.render(once).lower()


def test_figures_match_the_rows(result, page):
  for attack_index, attack in enumerate(result.config['attacks']):
    for defense in result.config['defenses']:
      cells = rows_of(page, defense)[3 + attack_index]  # after the first screen and the two picture rows
      rows = [r for r in result.rows if (r['attack'], r['defense']) == (attack, defense)]
      psnr = np.array([r['psnr'] for r in rows if r['psnr'] is not None])
      half = {3: 4.302653, 4: 3.182446}[psnr.size] * psnr.std(ddof=1) / np.sqrt(psnr.size)  # Student's t from a table
      verdict, recovered, mean, _, _, oracle, unsolved, diverged = cells[1:]
      assert mean == f'{psnr.mean():.1f}{psnr.mean() - half:.1f} – {psnr.mean() + half:.1f}'
      assert recovered.startswith(f'{sum(r["success"] for r in rows)} of 4')
      assert oracle == f'{psnr.mean() + 0.5:.1f}'
      assert unsolved == str(sum(r['verdict'] == 'inconclusive' for r in rows))
      assert diverged == str(sum(r['diverged'] for r in rows))
      assert any(word in verdict for word in ('exact', 'nothing seen', 'inconclusive'))


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


def test_a_bar_that_lacks_one_trial_is_not_read_out_as_all():
  entry = {'defense': 'a', 'n': 400, 'recovered': 399, 'success': 399 / 400, 'success_low': 0.986, 'success_high': 1.0,
           'non_adaptive': 399, 'adaptive': None, 'by': ['x'], 'flags': []}  # fmt: skip
  (_, table, _) = page_of._worst([entry], {}, 'exact').blocks
  assert 'aria-label="99.8 %, interval 98–100 %"' in html.rendered([table])


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
  text = report.render(changed(result, threat_models=models))
  assert text.count('<li>The same.</li>') == 2
  assert text.count('<li>Only 1.</li>') == 1


# ---- attackers who know the defense


@pytest.fixture(scope='module')
def beside(source_of_both):
  return Page(source_of_both)


def section(page, heading, before):
  """The text between two phrases, the last of each."""
  text = ' '.join(''.join(page.text).split())
  return text[text.rindex(heading) : text.rindex(before)]


def test_every_adaptive_attack_has_its_figures_below_the_non_adaptive_attacker(both, beside):
  rows = [[' '.join(cell.split()) for cell in row] for row in beside.rows if len(row) == 9]
  figures = [row for row in rows if re.match(r'\d of 4', row[2])]
  assert len(figures) == len(both.reconstructions)
  for cells, (case, group) in zip(figures, cases.by_case(both.rows).items(), strict=True):
    attack, defense, *adaptive = case
    pair = len([key for key in both.reconstructions if key[:2] == (attack, defense)]) > 1
    assert cells[0] == (f'adaptive: {adaptive[0]}' if adaptive else f'{defense}non-adaptive' if pair else defense)
    psnr = [row['psnr'] for row in group if row['psnr'] is not None]
    assert cells[3].startswith(f'{np.mean(psnr):.1f}')
    assert cells[2].startswith(f'{sum(row["success"] for row in group)} of 4')
    own = adaptive and 'prior' in adaptive[0]
    threshold = {'dlg(history=100)': '11.9', 'csdlg(tv=1e-4)': '12.7'}[attack]
    assert cells[2].endswith(f'above {threshold} dB') == bool(own)
    assert ('above' in cells[2]) == bool(own)


def test_dots_stand_before_the_threshold_of_their_own_row(both, source_of_both):
  strips = re.findall(r'<svg class="strip".*?</svg>', source_of_both, re.DOTALL)
  at = [float(re.search(r'class="threshold" x1="([\d.]+)"', strip)[1]) for strip in strips]
  attackers = [key for key in both.reconstructions if key[0] == both.config['attacks'][0]]
  own = {'prior' in ''.join(key[2:]): x for key, x in zip(attackers, at, strict=False)}
  for key, x in zip(attackers, at, strict=False):
    assert x == own['prior' in ''.join(key[2:])]
  assert own[True] > own[False]
  controls = at[len(attackers) : len(attackers) + 2]
  assert controls == [own[False], own[True]]


def test_each_pool_of_control_runs_has_its_row(both, beside):
  for attack, (usual, other) in zip(
    both.config['attacks'],
    [(1, 2), (3, 4)],
    strict=True,
  ):
    rows = [
      [' '.join(c.split()) for c in row] for row in beside.rows if row and row[0].startswith('null-gradient control')
    ]
    low, high = rows[usual - 1], rows[other - 1]
    values = {
      own: np.mean([r['psnr'] for r in both.controls if r['attack'] == attack and (r['control_psnr'] > 11.5) == own])
      for own in (False, True)
    }
    assert (low[0], low[2]) == ('null-gradient control', '64 runs')
    assert high[0] == 'null-gradient controlof adaptive: masked+prior, prior'
    assert high[2].startswith('64 runsthreshold ')
    assert low[3].startswith(f'{values[False]:.1f}')
    assert high[3].startswith(f'{values[True]:.1f}')


def test_pools_of_control_runs_with_like_thresholds_are_told_apart(both):
  nudge = lambda row: row | {'control_psnr': row['control_psnr'] - 1.49 * (row['control_psnr'] > 11.5)}  # noqa: E731
  only = [row for row in both.rows if row['attack'].startswith('dlg')]
  result = changed(
    both,
    rows=[nudge(row) for row in only],
    controls=[nudge(row) for row in both.controls if row['attack'].startswith('dlg')],
  )
  page = Page(report.render(result))
  names = [' '.join(row[0].split()) for row in page.rows if row and row[0].startswith('null-gradient control')]
  assert names == ['null-gradient control', 'null-gradient controlof adaptive: masked+prior, prior']
  text = ' '.join(cell for row in page.rows if len(row) == 9 for cell in row)
  assert 'above 10.4 dB' not in text and 'threshold 10.4 dB' not in text


def test_pictures_of_a_pair_stand_together(both, beside, source_of_both):
  pairs = re.findall(r'<tr class="(first|second)"><th class="spec" scope="row">(.*?)</th>', source_of_both)
  assert [kind for kind, _ in pairs] == ['first', 'second'] * 6
  assert pairs[0][1] == '<code>prune(rate=0.9)</code><small>non-adaptive</small>'
  assert re.sub('<wbr>', '', pairs[1][1]) == 'adaptive: masked+prior'
  (cells,) = [
    row for row in beside.rows if row and row[0].strip() == 'adaptive: prior' and len(row) == 5 and 'exact' in row[1]
  ]
  rows = [r for r in both.rows if r['adaptive'] == 'prior' and r['attack'] == 'csdlg(tv=1e-4)']
  for cell, row in zip(cells[1:], rows, strict=True):
    assert cell.strip().startswith(f'{row["psnr"]:.1f} dB')
  alts = [image['alt'] for image in beside.attributes('img')]
  assert sum('defense prune(rate=0.9) known to the attacker (masked+prior): ' in alt for alt in alts) == 8
  assert not any('(masked):' in alt and 'prune(rate=0.9) ' in alt for alt in alts)  # the weaker one


def test_worst_case_tells_non_adaptive_adaptive_and_any(both, result, beside, page):
  assert ['defense', 'non-adaptive', 'adaptive', 'any', '0 to 100 %', 'by', 'flags'] in beside.rows
  assert ['defense', 'recovered', '0 to 100 %', 'by', 'flags'] in page.rows
  rows = {
    row[0]: [' '.join(cell.split()) for cell in row]
    for row in beside.rows
    if len(row) == 7 and row[1] != 'non-adaptive'
  }
  for defense in both.config['defenses']:
    non_adaptive, adaptive, anyone = (
      len({r['trial'] for r in both.rows if r['defense'] == defense and r['success'] and chosen(r)})
      for chosen in (lambda r: not r['adaptive'], lambda r: r['adaptive'], lambda r: True)
    )
    assert rows[defense][1] == f'{non_adaptive} of 4'
    assert rows[defense][2] == ('–' if defense == 'none' else f'{adaptive} of 4')
    assert rows[defense][3].startswith(f'{anyone} of 4')
  assert rows['laplace(scale=0.1)'][1:3] == ['0 of 4', '4 of 4']
  assert rows['laplace(scale=0.1)'][5] == 'csdlg(tv=1e-4) · prior'


def test_the_name_that_a_source_gives_comes_first(result):
  known = {**result.methods['defenses']}
  known['prune(rate=0.9)'] = {**known['prune(rate=0.9)'], 'published': 'OUR'}
  rows = Page(report.render(changed(result, methods={**result.methods, 'defenses': known}))).rows
  assert sum(row[:1] == ['OUR (prune(rate=0.9))'] for row in rows) >= 2
  assert not any(row[:1] == ['prune(rate=0.9)'] for row in rows)


def test_what_adaptive_attackers_do_is_said(both, beside, page):
  granted = section(beside, 'Adaptive attackers', 'The private images are from')
  for defense, sentences in both.adaptive_attacks.items():
    for adaptive, sentence in sentences.items():
      assert f'{adaptive}: {sentence}' in granted, defense
  assert 'They see one upload, as non-adaptive attackers do.' in granted
  assert 'No adaptive attack was run' not in granted
  assert 'Adaptive attackers' not in ' '.join(page.text)
  assert 'Non-adaptive, adaptive' not in ' '.join(page.text)
  assert 'Non-adaptive, adaptive' in ' '.join(beside.text)


def test_rounds_and_defenses_without_a_adaptive_attack(both):
  averaged = {'averaged': 'It averages the uploads.'}
  adaptive_attacks = {'none': {}, 'a': {'x': 'Does x.'}, 'b': {'x': 'Does x.'}, 'c': averaged, 'd': {}}
  result = changed(both, config=both.config | {'rounds': 7}, adaptive_attacks=adaptive_attacks)
  granted = section(Page(report.render(result)), 'Adaptive attackers', 'The private images are from')
  assert 'they average 7 uploads of the same samples on the same model' in granted
  assert 'as non-adaptive attackers do' not in granted
  assert granted.count('Does x.') == 1  # met alike, said once
  assert 'averaged: It averages the uploads.' in granted
  assert 'No adaptive attack was run against d: without one' in granted


def test_adaptive_attackers_alone(knowing):
  source = report.render(changed(knowing))
  page = Page(source)
  rows = [row[0].strip() for row in page.rows if row]
  assert rows.count('prune(rate=0.9)adaptive: masked+prior') == 2  # the pictures of two attacks
  assert rows.count('prune(rate=0.9)adaptive: masked') == 2  # their figures, the first row of the defense
  assert rows.count('adaptive: masked+prior') == 2
  assert 'class="first"' not in source
  worst = next(row for row in page.rows if len(row) == 7 and row[0] == 'prune(rate=0.9)')
  assert worst[1].strip() == '–'


def test_guarantees_and_what_was_sent(both, beside):
  settings = section(beside, 'Each client sends', 'Every setting')
  assert 'laplace(scale=0.1) and prune(rate=0.99)+gaussian(stddev=0.01): no ε' in settings
  rows = [[' '.join(cell.split()) for cell in row] for row in beside.rows if len(row) == 10]
  assert rows[0][-1] == 'entriessent'
  sent = {(row[0], row[1]): row[-1] for row in rows[1:]}
  for attack in both.config['attacks']:
    assert sent[attack, 'none'] == '100 %'
    assert (
      sent[attack, 'prune(rate=0.9)adaptive: masked+prior'] == sent[attack, 'prune(rate=0.9)non-adaptive'] == '10 %'
    )
    assert sent[attack, 'prune(rate=0.99)+gaussian(stddev=0.01)adaptive: masked'] == '1.25 %'
  bare = [{key: value for key, value in row.items() if key != 'sent'} for row in both.rows]
  shares = [row[-1] for row in Page(report.render(changed(both, rows=bare))).rows if len(row) == 10][1:]
  assert shares == ['–'] * len(both.reconstructions)
  most = [{**row, 'sent': 0.9997} for row in both.rows]
  shares = [row[-1] for row in Page(report.render(changed(both, rows=most))).rows if len(row) == 10][1:]
  assert set(shares) == {'99.97 %'}  # it was 100 %


def test_the_page_leads_with_the_defense_that_knowledge_breaks(beside):
  text = ' '.join(' '.join(beside.text).split())
  assert 'none of the 4 images is recovered by a non-adaptive attacker, but 4 of 4 (39–100 %) are by' in text
  assert 'Attackers who know the defense were tried and failed, too.' in text


@pytest.mark.slow
def test_a_real_audit_of_attackers_who_know_the_defense(linear, fast_compilation, tmp_path):
  import gradleak as gl

  defenses = objects(['none', 'prune(rate=0.9)', 'gaussian(stddev=0.01)', 'clip_samples(norm=1)'])
  found = gl.audit(
    jax.random.key(7), linear, defenses, [gl.attacks.csdlg(tv=0)], 2, steps=5, controls=3, rounds=2, group_size=4,
    progress='none',
  )  # fmt: skip
  report.write(found, tmp_path)
  page = Page((tmp_path / 'report.html').read_text('utf-8'))
  text = ' '.join(''.join(page.text).split())
  figures = [row for row in page.rows if len(row) == 8 and re.match(r'\d of 2', row[2])]
  assert len(figures) == len(found.reconstructions) > 6
  for defense, sentences in found.adaptive_attacks.items():
    for adaptive, sentence in sentences.items():
      assert f'{adaptive}: {sentence}' in text, defense
  assert 'they average 2 uploads' in text
  assert 'No adaptive attack was run against clip_samples(norm=1)' in text
  assert '3 runs for csdlg(tv=0)' in text
  pools = {row['control_psnr'] for row in found.controls}
  rows = [row for row in page.rows if row and row[0].startswith('null-gradient control')]
  runs = [int(row[2].split()[0]) for row in rows]
  assert (len(runs), sum(runs)) == (len(pools), len(found.controls))
  table = report.terminal_table(found)
  assert table.count('    adaptive: ') == 2
  assert max(map(len, table.splitlines())) <= 110


def test_everything_is_escaped(result):
  evil = '<script>alert("x")</script>&'
  rows = [row | {'defense': evil, 'attack': f'a{evil}'} for row in result.rows if row['defense'] == 'none'][:4]
  source = report.render(
    replace(
      result,
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


@pytest.mark.long
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
  first = 2 * len(result.config['defenses'])
  assert len(page.attributes('img')) == shown * (1 + pairs) + first + 1  # the slide
  text = ''.join(page.text)
  assert ('a verdict is of the whole trial' in text) == (shown < settings['trials'] * batch)
  assert 'None' not in text
  assert 'nan' not in text


def test_a_colour_image_and_a_bare_config(build):
  result = build(2, diverged=())
  result = replace(
    result,
    config={},
    truth=np.repeat(result.truth, 3, axis=-1),
    reconstructions={pair: np.repeat(images, 3, axis=-1) for pair, images in result.reconstructions.items()},
    curves={},
    controls=[],
    threat_models={},
  )
  text = ''.join(Page(report.render(result)).text)
  assert 'closed-form' in text
  assert 'No null-gradient control was run' in text


@pytest.mark.long
@pytest.mark.parametrize(
  ('kept', 'reason'), [('it has no layers', 'it has no layers'), (None, 'its folder does not say why')]
)
def test_a_model_that_the_check_cannot_read_is_told_with_the_reason(result, kept, reason):
  attack = result.config['attacks'][0]
  text = ''.join(Page(report.render(changed(result, inspections={attack: kept}))).text)
  assert f'The check cannot read this model: {reason}.' in text


@pytest.mark.long
def test_defenses_that_the_first_picture_leaves_out_are_counted(result, monkeypatch):
  number = len(result.config['defenses'])
  for most in (number - 1, number):
    monkeypatch.setattr('gradleak.report.marked.MOST', most)
    text = ''.join(Page(report.render(result)).text)
    said = f'The picture has the first {most} of {number} defenses, the table all of them.'
    assert (said in text) == (most < number) and text.count('The picture has the first') == (most < number)


def test_an_undefended_failure_leads_the_page(build):
  result = build(4, defenses=('none', 'laplace(scale=0.1)'), diverged=())
  rows = [row | {'success': False, 'verdict': 'inconclusive', 'solved': False} for row in result.rows]
  text = ' '.join(''.join(Page(report.render(changed(result, rows=rows))).text).split())
  assert 'Even without a defense none of the 4 images is recovered: this setting proves nothing' in text
  assert 'undefended run fails' in text


@pytest.mark.long
def test_same_result_same_bytes(result, source):
  assert report.render(result) == source


@pytest.mark.long
def test_write_leaves_whole_files(result, source, tmp_path):
  folder = tmp_path / 'new' / 'place'
  report.write(result, folder)
  assert sorted(path.name for path in folder.iterdir()) == ['grid.png', 'report.html', 'slide.png', 'summary.csv']
  assert (folder / 'report.html').read_text('utf-8') == source
  assert (folder / 'grid.png').read_bytes() == report.grid(result)
  slide = (folder / 'slide.png').read_bytes()
  assert slide == report.slide(result)
  assert 'plot read"' not in source
  assert base64.b64encode(slide).decode() in source  # the page's first picture is the one to be saved
  (folder / 'summary.csv').write_text('old')
  report.write(changed(result), folder)
  assert (folder / 'summary.csv').read_bytes().decode() == report.summary_csv(result.rows)


def test_the_first_screen_has_a_line_per_defense(result, page):
  lines = {row[0].strip(): row for row in page.rows[: 1 + len(result.config['defenses'])]}
  worst = {entry['defense']: entry for entry in report.worst_case(result.rows)}
  assert [name for name in lines if name != 'defense'] == result.config['defenses']
  for defense, entry in worst.items():
    seen = ' '.join(lines[defense][1].split())
    assert entry['verdict'] in seen and headline.meanings()[entry['verdict']] in seen
    count = sum(
      any(row['trial'] == t and row['defense'] == defense and row['verdict'] == entry['verdict'] for row in result.rows)
      for t in range(4)
    )
    assert lines[defense][2].startswith(f'{count} of 4')


@pytest.mark.parametrize(
  ('candidates', 'said'),
  [(99, 'neither a picture nor an identity'), (98, 'identity was not judged: 99 candidates are needed')],
)
def test_traces_deny_an_identity_only_where_it_was_judged(result, candidates, said):
  rows = [row | {'verdict': 'above chance', 'success': False, 'candidates': candidates} for row in result.rows]
  for line in headline.lines(rows, report.worst_case(rows), lambda row: worst.pair(result, row)):
    assert said in line['meaning']


@pytest.mark.parametrize('candidates', [99, 98])
def test_terms_say_what_is_asked_among_few_candidates(candidates):
  said = str(headline.verdict_terms(headline.gallery([{'candidates': candidates}], {}), {}))
  assert ('where 99 are needed' in said) == ('Not judged here' in said) == (candidates < 99)


def test_the_example_is_of_the_attacker_with_that_verdict(result):
  for line in headline.lines(result.rows, report.worst_case(result.rows), lambda row: worst.pair(result, row)):
    row = line['example']
    assert (row['defense'], row['verdict']) == (line['defense'], line['verdict'])
    image = result.reconstructions[row['attack'], row['defense']][row['trial'], 0]
    assert line['found'] == report.data_uri(image) and line['truth'] == report.data_uri(result.truth[row['trial'], 0])


def entry(defense, verdict, recovered=0):
  return {'defense': defense, 'verdict': verdict, 'recovered': recovered, 'n': 4}


def test_the_example_of_a_batch_is_its_clearest_pair():
  truth = np.linspace(0, 1, 2 * 64, dtype=np.float32).reshape(2, 8, 8, 1)
  row = {'defense': 'none', 'attack': 'a', 'trial': 0, 'success': True, 'verdict': 'exact', 'psnr': 9.0, 'ssim': 0.5}
  found = np.stack([1 - truth[0], truth[1]])
  (line,) = worst.lines(
    [row], [{**entry('none', 'exact', 1), 'n': 1, 'reached': {'exact': 1}}], lambda _: (truth, found)
  )
  assert line['truth'] == line['found'] == report.data_uri(truth[1])


@pytest.mark.parametrize(
  ('worst', 'said'),
  [
    ([entry('none', 'exact', 4)], 'Without a defense, 4 of 4 images can be recovered.'),
    (
      [entry('none', 'exact', 3), entry('a', 'exact', 1), entry('b', 'exact', 1), entry('c', 'nothing seen')],
      'Without a defense, 3 of 4 images can be recovered; of 3 defenses, 2 give images away exactly and 1 hides what '
      'these attackers look for.',
    ),
    (
      [entry('none', 'above chance'), entry('a', 'inconclusive'), entry('b', 'diverged')],
      'Even without a defense no image is recovered (above chance): nothing here speaks for a defense; of 2 defenses, '
      '2 are undecided, as attacks on them failed.',
    ),
    ([entry('a', 're-identified')], 'No undefended upload was attacked; the defense gives away which image it was.'),
  ],
)
def test_one_sentence(worst, said):
  assert headline.sentence(worst, {}) == said
  of_batches = headline.sentence(worst, {'batch_size': 4})
  assert of_batches == re.sub(r'(\d of \d) images can', r'images of \1 uploads can', said)


def test_the_chance_to_be_found_is_of_the_whole_upload():
  assert headline.gallery([{'candidates': 99}], {})['chance'] == pytest.approx(1)
  whole = headline.gallery([{'candidates': 99, 'batch_size': 32}], {})
  assert whole['chance'] == pytest.approx(100 * (1 - 0.99**32))
  assert headline.gallery([{'candidates': 120}, {'candidates': 80}], {})['size'] == 80
