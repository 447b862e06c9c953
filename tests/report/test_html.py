"""What holds of every page: it loads nothing, serves everyone, escapes what is foreign; and blocks as HTML."""

import re

import numpy as np
import pytest

from gradleak import report
from gradleak.report import blocks, html
from gradleak.studies.autoleak import leaderboard
from tests.leaderboards import COMMAND, found
from tests.report.parsing import Page
from tests.report.test_training_page import write
from tests.test_sensitivity import NOISE, made

EVIL = '<script>alert("x")</script>&'


@pytest.fixture(scope='module', params=['audit', 'autoleak', 'leaderboard', 'sensitivity', 'training'])
def source(request, tmp_path_factory):
  if request.param == 'audit':
    return request.getfixturevalue('source_of_both')
  if request.param == 'autoleak':
    run = found()
    run.stages[:] = [{**one, 'attacks': ['dlg'], 'left_out': {}, 'targets': 3, 'all_targets': 4, 'seconds': 1.0}
                     for one in run.stages]  # fmt: skip
    return report.render_autoleak(run)
  if request.param == 'leaderboard':
    return report.render_leaderboard({leaderboard.name(one): one for one in leaderboard.entries(found(), COMMAND)})
  if request.param == 'sensitivity':
    return report.render_sensitivity(made(['batch'], lambda dropped: list(25 + NOISE)), {'batch': 'batch/report.html'})
  return (write(tmp_path_factory.mktemp('training')) / 'training.html').read_text('utf-8')


def test_nothing_is_loaded_from_anywhere(source):
  page = Page(source)
  for tag, attributes in page.tags:
    for name in ('src', 'href', 'xlink:href', 'action', 'data', 'poster'):
      own = attributes.get(name, '#')
      file = tag == 'a' and (own.endswith('/report.html') or 'download' in attributes)
      assert own.startswith(('#', 'data:image/png;base64,')) or file
    assert 'srcset' not in attributes
  assert not {'link', 'iframe', 'object', 'base'} & {tag for tag, _ in page.tags}
  assert not re.search(r'@import|url\((?!#)', source)
  assert set(re.findall(r'https?://[^"\s]+', source)) <= {'http://www.w3.org/2000/svg', 'http://www.w3.org/1999/xlink'}
  scripts = re.findall(r'<script>(.*?)</script>', source, re.DOTALL)
  assert len(scripts) == ('Leaderboard' in source)  # which sorts and searches its tables, and does nothing else
  assert not any(re.search(r'fetch|XMLHttp|import|innerHTML|eval|cookie|Storage', script) for script in scripts)


def test_markup_serves_everyone(source):
  page = Page(source)
  assert all(len(image['alt']) > 10 for image in page.attributes('img'))
  assert all(cell.get('scope') in ('col', 'row', 'rowgroup') for cell in page.attributes('th'))
  assert all(drawing['role'] == 'img' and drawing['aria-label'] for drawing in page.attributes('svg'))
  ids = [attributes['id'] for _, attributes in page.tags if 'id' in attributes]
  assert len(ids) == len(set(ids))
  assert {link['href'][1:] for link in page.attributes('a') if link['href'].startswith('#')} <= set(ids)
  for query in ('prefers-color-scheme: dark', '@media print', 'max-width: 40rem', 'width=device-width'):
    assert query in source


def test_every_block_escapes_what_is_foreign():
  row = blocks.Row([EVIL, blocks.Cell(EVIL, [EVIL], value=EVIL)])
  parts = [
    blocks.Text(EVIL),
    blocks.Heading(EVIL),
    blocks.Bullets([EVIL]),
    blocks.Cautions([EVIL]),
    blocks.Table([EVIL, ('b', '', 'text')], [blocks.Body([row], EVIL)], label=EVIL),
    blocks.Terms([(EVIL, [EVIL])]),
    blocks.Details(EVIL, [blocks.Text(html.code(EVIL))]),
    blocks.Text(html.text(html.link(EVIL, EVIL), html.image('data:', EVIL), html.tagged('code', EVIL))),
  ]
  section = blocks.Section('s', EVIL, parts, EVIL)
  made = html.page(blocks.Page('x', EVIL, EVIL, EVIL, parts, [section], [blocks.Text(EVIL)]))
  assert 'script' not in {tag for tag, _ in Page(made).tags} and made.count('&lt;script&gt;') > 30


def test_a_table_gives_its_columns_classes_and_its_rows_names():
  rows = [blocks.Row(['x', blocks.Cell('1', ['', 'small', None], 'kept')], 'more')]
  made = html.rendered([blocks.Table(['a', ('b\nc', 'left')], [blocks.Body(rows, 'both')])], 'Name')
  assert '<th scope="col" class="left">b<br>c</th>' in made and 'aria-label="Name"' in made
  assert (
    '<tr class="more"><th class="spec" scope="row">x</th>\n<td class="left kept">1<small>small</small></td>' in made
  )
  assert '<th class="group" scope="rowgroup" colspan="2"><span>both</span></th>' in made
  assert html.rendered([None, blocks.Cautions([])]).strip() == ''


def test_an_unknown_value_is_told_from_none_where_a_script_sorts_by_it():
  cells = [blocks.Cell('a', value='a'), blocks.Cell('unknown', value=''), blocks.Cell('0', value=0.0), blocks.Cell('–')]
  made = html.rendered([blocks.Table(['n', 'x', 'y', 'z'], [blocks.Body([blocks.Row(cells)])])])
  assert re.findall(r' data-value="([^"]*)"', made) == ['a', '', '0.0'] and '<td data-value="">unknown</td>' in made
  assert "x === '' || y === ''" in html.resource('leaderboard.js')


def test_long_words_are_broken_where_they_may_be_and_no_word_takes_quadratic_time():
  assert html.text('csdlg_fast(steps=3,tv=1)+`x` 5 %') == (
    'csdlg_fast(<wbr>steps=3,<wbr>tv=1)+<wbr><code>x</code> 5\N{NO-BREAK SPACE}%'
  )
  assert html.text('short(a) +1,000') == 'short(a) +1,000'
  assert html.text('a' * 10**6) == 'a' * 10**6  # hours, were it looked at from each of its letters on


def test_pictures_stand_in_the_page(result):
  picture = blocks.Picture(report.grid(result), 'A "grid"')
  (image,) = Page(html.rendered([picture])).attributes('img')
  assert image['alt'] == 'A "grid"' and np.isclose(
    int(image['width']), 1.12 * 96 / 160 * html.figures.width(picture.png), atol=1
  )
