"""What `identify` found: whose sample is behind an upload, as a table, a picture and a page."""

from collections.abc import Mapping, Sequence
from typing import Any

from gradleak.core import errors
from gradleak.core.statistics import differ
from gradleak.report import blocks, figures, html, page, terminal, wording
from gradleak.report.figures import SOFT
from gradleak.report.formatting import defenses, duration, percent, percent_range, together, wrap
from gradleak.report.html import code
from gradleak.report.words import said, speaking
from gradleak.studies.identification import COMBINED, RATE, REGRESSION, Identification
from gradleak.summary.cases import csv_text

_COLOURS = {'likelihood': '#0f6674', 'direction': '#7a8b99', 'pattern': '#b03a10', COMBINED: '#1f1f1f'}
_LINE, _LEFT, _WIDTH = 0.62, 2.6, 7.2  # inches


@speaking
def identification_table(found: Identification) -> str:
  """Returns the counts of each defense and statistic as an aligned table, and what they mean."""
  headings, groups = _cells(found)
  lines = [headings, *(line for group in groups for line in group)]
  return terminal.page(lines, filter(None, [opening(found), *notes(found), wording.gallery(found.config)]))


@speaking
def opening(found: Identification) -> str:
  """Returns the sentence that a page opens with: how many originals are found under which defense."""
  decisive = [one for one in _counts(found) if one['statistic'] == found.decisive(one['copies'])]
  of_first = [one for one in decisive if one['copies'] == decisive[0]['copies']]
  most = max(of_first, key=lambda one: one['identified'])
  least = min(of_first, key=lambda one: one['identified'])
  if len(of_first) == 1:
    return said('identification.single', **most)
  if most['identified'] == least['identified']:
    return said('identification.equal', entries=len(of_first), **most)
  hiding, showing = (
    defenses(one for one in of_first if one['identified'] == end['identified']) for end in (least, most)
  )
  alike = [one for one in of_first if not differ(one['identified'], one['n'], least['identified'], least['n'])]
  more = len(alike) - len(hiding)
  others = said('identification.others', n=more) if more else ''
  facts = {'most': most, 'least': least, 'hiding': hiding, 'showing': showing, 'alike': len(hiding), 'others': others}
  return said('identification.opening', **facts)


@speaking
def notes(found: Identification) -> list[str]:
  """Returns what the words of the table mean, in sentences."""
  counts = _counts(found)
  names = {one['statistic'] for one in counts}
  told = [said(f'identification.{name}') for name in (*_COLOURS, REGRESSION) if name in names]
  models = {one['model'] for one in counts}
  told += [said(f'identification.model_{name}') for name in sorted(models) if REGRESSION not in names]
  told += [said('identification.drawn', draws=found.config['client_draws'])] if 'client_draws' in found.config else []
  pairs = [one['pairs'] for one in counts if one['present'] is not None]
  told += [said('identification.present', one_in=round(1 / RATE), pairs=max(pairs))] if pairs else []
  noise = [row for row in found.noise if row['statistic'] == found.decisive(row['copies'])]
  return told + (
    [said('identification.noise', n=len(noise), count=sum(row['identified'] for row in noise))] if noise else []
  )


@speaking
def render_identification(found: Identification) -> str:
  """Returns the report as one HTML page that loads nothing."""
  config = found.config
  made = blocks.Page(
    'identification',
    f'Re-identification: {config["model"]} on {config["dataset"]}',
    'Re-identification by likelihood',
    f'{config["model"]} on {config["dataset"]}',
    [blocks.Text(opening(found), 'meaning'), blocks.Picture(identification_picture(found), opening(found))],
    [
      blocks.Section('counts', 'Every statistic', [_table(found)]),
      blocks.Section('reading', 'How to read this page', [blocks.Bullets([*notes(found), wording.gallery(config)])]),
      blocks.Section('settings', 'Settings', [page.every_setting(config)]),
    ],
    [blocks.Text(duration(found.seconds))],
  )
  return html.page(made)


def write_identification(found: Identification, folder: Any) -> None:
  """Writes identification.html, identification.png and summary.csv, each whole or not at all."""
  files: dict[str, str | bytes | None] = {
    'identification.png': identification_picture(found),
    'summary.csv': csv_text(_counts(found)),
    'rows.csv': csv_text(found.rows),
    'identification.html': render_identification(found),
  }
  page.write_files(folder, files)


def identification_picture(found: Identification) -> bytes:
  """Returns a PNG: of each defense and list the fraction at rank 1 by each statistic, with 95 % intervals."""
  groups = together(((one['defense'], one['copies']), one) for one in _counts(found))
  tall = _LINE * len(groups) + 0.9
  with figures.figure(_WIDTH, tall) as (figure, png):
    axes = figure.add_axes((_LEFT / _WIDTH, 0.5 / tall, 1 - (_LEFT + 0.2) / _WIDTH, 1 - 0.95 / tall))
    for row, of_defense in enumerate(groups.values()):
      for place, one in enumerate(of_defense):
        _draw(axes, row + (place - (len(of_defense) - 1) / 2) * 0.2, one, first=not row)
    chance = 1 / (1 + _counts(found)[0]['candidates'])
    axes.axvline(100 * chance, color=SOFT, linestyle=':', linewidth=1)
    axes.set(xlim=(-2, 102), ylim=(len(groups) - 0.5, -0.5), xlabel='at rank 1, in % (dots: chance)')
    names = ['\n'.join(_named(defense, copies, found)) for defense, copies in groups]
    axes.set_yticks(range(len(groups)), names, fontsize=8)
    axes.grid(axis='x', color='#0a0b0c', alpha=0.1, linewidth=0.6)
    figure.legend(loc='upper right', ncols=4, fontsize=8, frameon=False)
    return png()


def _draw(axes: Any, place: float, one: Mapping[str, Any], first: bool) -> None:
  """Draws the fraction of one statistic, with its interval."""
  value, low, high = (100 * x for x in (one['identified'] / one['n'], one['identified_low'], one['identified_high']))
  colour = _COLOURS.get(one['statistic'], '#0f6674')
  axes.plot([low, high], [place, place], color=colour, linewidth=1.2)
  axes.plot(value, place, 'o', color=colour, markersize=4, label=one['statistic'] if first else None)


def _named(defense: str, copies: str, found: Identification) -> list[str]:
  several = len({row['copies'] for row in found.rows}) > 1
  return [*wrap(defense, 34), *([f'list: {copies}'] if several else [])]


def _cells(found: Identification) -> tuple[list[str], list[list[list[str]]]]:
  """Returns headings, and groups of lines of cells; a column that says nothing here is left out."""
  counts = _counts(found)
  figures = {'at rank 1': lambda one: _rate(one, 'identified')}
  if any(one['present'] is not None for one in counts):
    figures |= {'present': lambda one: _rate(one, 'present'), 'false matches': _false}
  if any(one['posterior'] is not None for one in counts):
    figures['posterior'] = lambda one: percent(one['posterior'])
  several = len({one['copies'] for one in counts}) > 1
  groups = []
  for (defense, copies), of_group in together(((one['defense'], one['copies']), one) for one in counts).items():
    names = [[defense, *([copies] if several else [])]] + [['', *([''] if several else [])]] * (len(of_group) - 1)
    groups.append(
      [
        [*name, one['statistic'], *(write(one) for write in figures.values())]
        for name, one in zip(names, of_group, strict=True)
      ]
    )
  return ['defense', *(['list'] if several else []), 'statistic', *figures], groups


def _table(found: Identification) -> blocks.Table:
  headings, groups = _cells(found)
  left = [(name, 'left') if name in ('list', 'statistic') else name for name in headings]
  rows = [[blocks.Row([code(name) if name else '', *rest]) for name, *rest in group] for group in groups]
  return blocks.Table(left, [blocks.Body(group) for group in rows])


def _counts(found: Identification) -> Sequence[dict[str, Any]]:
  return errors.check_instance('the result', found, Identification, 'what gradleak.identify returns').counts()


def _rate(one: Mapping[str, Any], name: str) -> str:
  if one[name] is None:
    return '–'
  low, high = (one[f'{name}_{end}'] for end in ('low', 'high'))
  return f'{one[name]} of {one["n"]} ({percent_range({"success_low": low, "success_high": high}, " to ")})'


def _false(one: Mapping[str, Any]) -> str:
  return f'{one["false"]} of {one["pairs"]:,}' if one.get('pairs') and one['present'] is not None else '–'
