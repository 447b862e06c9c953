import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import numpy as np
import pytest

from gradleak.report import curves


@pytest.fixture(scope='module')
def panels(result):
  return curves(result)


def texts(svg):
  return [element.text for element in ElementTree.fromstring(svg).iter('{http://www.w3.org/2000/svg}text')]


def test_one_panel_per_attack_names_every_defense(result, panels):
  assert list(panels) == result.config['attacks']
  for svg in panels.values():
    assert set(result.config['defenses']) <= set(texts(svg))
    assert 'objective at the private images' in texts(svg)
    assert {'1e−03', '1', '10', '100'} <= set(texts(svg))  # powers of both axes, in plain text


def test_panels_take_their_ink_from_the_page_and_share_no_ids(panels):
  ids = [set(re.findall(r' id="([^"]+)"', svg)) for svg in panels.values()]
  assert not ids[0] & ids[1]
  for svg in panels.values():
    assert 'fill: currentColor' in svg
    assert '<style' not in svg
    assert '#000000' not in svg


def test_deterministic(result, panels):
  assert curves(result) == panels


def lines(svg, width):
  """The drawn paths of one line width, as arrays of (x, y)."""
  paths = re.findall(rf'<path d="([^"]*)"[^>]*stroke-width: {width}[;"]', svg)
  return [np.array(re.findall(r'[ML] (\S+) (\S+)', path), float) for path in paths]


def test_lines_are_trials_median_and_truth(result, panels):
  defenses = len(result.config['defenses'])
  for attack, svg in panels.items():
    assert len(lines(svg, '0.7')) == 4 * defenses
    dashed = lines(svg, '1.1')[:defenses]
    # Heights on the page are linear in the logarithm: the median's ends and the truths must lie on one straight line.
    values, heights = [], []
    # The last width of 2.2 per defense stands in the legend, drawn after all curves.
    for defense, median, truth in zip(result.config['defenses'], lines(svg, '2.2'), dashed, strict=False):
      objective = result.curves[attack, defense][1]
      rows = [r for r in result.rows if (r['attack'], r['defense']) == (attack, defense)]
      values += [np.nanmedian(objective[:, 0]), np.median([r['objective_at_truth'] for r in rows])]
      heights += [median[0, 1], truth[0, 1]]
    slope, offset = np.polyfit(np.log10(values), heights, 1)
    assert slope < 0
    np.testing.assert_allclose(heights, slope * np.log10(values) + offset, atol=0.01)


def test_long_descents_are_thinned_but_keep_their_ends(build):
  result = build(1, diverged=())
  steps = np.arange(20_000)
  objective = np.linspace(1, 1e-3, 20_000).reshape(1, -1)
  (svg, _) = curves(replace(result, curves=dict.fromkeys(result.curves, (steps, objective)))).values()
  medians = lines(svg, '2.2')
  assert len(medians[0]) <= 160
  assert medians[0][0, 1] == min(medians[0][:, 1])  # the highest point: SVG counts downwards
  assert medians[0][-1, 1] == max(medians[0][:, 1])
  assert len(svg) < 100_000


def test_closed_forms_have_no_panel(result):
  some = {pair: curve for pair, curve in result.curves.items() if pair[0].startswith('dlg')}
  closed = {pair: (np.array([0]), np.ones((4, 1))) for pair in result.curves if pair not in some}
  assert [attack[:3] for attack in curves(replace(result, curves=some | closed))] == ['dlg']
  assert curves(replace(result, curves={})) == {}


def test_values_that_a_log_axis_cannot_show(result):
  steps = np.arange(5)
  bad = np.array([[1.0, 0.0, -1e-8, np.nan, np.inf], [np.nan] * 5])
  for objective, panels in ((bad, 2), (np.full((2, 5), np.nan), 0)):
    assert len(curves(replace(result, curves=dict.fromkeys(result.curves, (steps, objective))))) == panels


def test_a_truth_of_zero_has_no_line(result):
  rows = [row | {'objective_at_truth': 0.0} for row in result.rows]
  for svg in curves(replace(result, rows=rows)).values():
    assert len(lines(svg, '1.1')) == 1  # the legend's


def test_names_are_taken_literally(result):
  name = r'a<b&"$x$'
  result = replace(
    result,
    rows=[row | {'attack': f'<{row["attack"]}>', 'defense': name} for row in result.rows if row['defense'] == 'none'],
    curves={(f'<{attack}>', name): curve for (attack, defense), curve in result.curves.items() if defense == 'none'},
  )
  panels = curves(result)
  assert len(panels) == 2
  for svg in panels.values():
    assert name in texts(svg)


@pytest.mark.slow
def test_the_strongest_who_know_a_defense_have_a_panel_of_their_own(both):
  panels = curves(both)
  dlg, csdlg = both.config['attacks']
  assert list(panels) == [dlg, f'{dlg} · adaptive', csdlg, f'{csdlg} · adaptive']
  non_adaptive, adaptive = texts(panels[csdlg]), texts(panels[f'{csdlg} · adaptive'])
  assert set(both.config['defenses']) <= set(non_adaptive)
  assert not any(' · ' in text for text in non_adaptive)
  assert [text for text in adaptive if ' · ' in text] == [
    'prune(rate=0.9) · masked+prior', 'laplace(scale=0.1) · prior', 'prune(rate=0.99)+gaussian(stddev=0.01) · masked',
  ]  # fmt: skip
  assert 'none' not in adaptive
  # The same colour for the same defense, whoever attacks: the first drawn there is the second here.
  colours = [
    re.findall(r'stroke: (#\w+); stroke-width: 2.2', panels[title]) for title in (csdlg, f'{csdlg} · adaptive')
  ]
  assert colours[1][0] == colours[0][0] != colours[0][1]
  # What is drawn is the adaptive attackers' own descent.
  other = {
    key: (steps, 10 * objective if len(key) == 3 else objective) for key, (steps, objective) in both.curves.items()
  }
  changed = curves(replace(both, curves=other))
  assert [title for title in panels if changed[title] != panels[title]] == [f'{dlg} · adaptive', f'{csdlg} · adaptive']
