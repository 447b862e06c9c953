"""Blocks as one HTML page that loads nothing."""

import html as markup
import importlib.resources
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from gradleak.report import figures
from gradleak.report.blocks import (
  Bullets,
  Cautions,
  Cell,
  Column,
  Details,
  Heading,
  Html,
  Page,
  Picture,
  Section,
  Table,
  Terms,
  Text,
)
from gradleak.report.pictures import SYMBOLS
from gradleak.summary import shown

SCREEN = 1.12 * 96 / figures.DPI  # CSS pixels of a pixel of a figure


def page(made: Page) -> str:
  """Returns a page as HTML; equal pages give equal texts."""
  sections = [one for one in made.sections if isinstance(one, Section)]
  named = [f'<a href="#{one.name}">{_inline(one.short or one.title)}</a>' for one in sections]
  nav = f'<nav aria-label="{made.named}">\n{"".join(named)}\n</nav>' if made.named else ''
  script = f'<script>\n{made.script}</script>\n' if made.script else ''
  footer = f'<footer>\n{rendered(made.footer)}\n</footer>\n' if any(made.footer) else ''
  return (
    '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
    '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
    f'<meta name="color-scheme" content="light dark">\n<title>{markup.escape(made.title)}</title>\n'
    f'<style>\n{resource("style.css")}</style>\n</head>\n<body class="{made.kind}">\n<header>\n'
    f'<p class="kicker">{_inline(made.kicker)}</p>\n<h1>{_inline(made.heading)}</h1>\n'
    f'{rendered(made.opening)}\n{nav}\n</header>\n<main>\n{rendered(made.sections)}\n</main>\n{footer}{script}</body>\n</html>\n'
  )


def rendered(made: Iterable[Any], label: str = '') -> str:
  """Returns blocks as HTML, without those that are None; `label` names tables that have no name."""
  return '\n'.join(_RENDERED[type(one)](one, label) for one in made if one is not None)


def resource(name: str) -> str:
  """Returns the text of a file of this folder."""
  return importlib.resources.files('gradleak.report').joinpath(name).read_text('utf-8')


def code(*labels: str) -> Html:
  """Returns names in the type of code, with commas between several."""
  return Html(', '.join(f'<code>{_broken(markup.escape(label))}</code>' for label in labels))


def method(label: str, published: str | None = '') -> Html:
  """Returns the label of a method, behind the name that its source gives it, if another."""
  return text(f'{published} (', code(label), ')') if published else code(label)


def text(*parts: str) -> Html:
  """Returns texts one after the other, each escaped but for `Html`."""
  return Html(''.join(_inline(part) for part in parts))


def mark(verdict: str) -> Html:
  """Returns a verdict with its symbol, in its colour."""
  kind = verdict.replace(' ', '-')
  return Html(f'<span class="mark {kind}"><span aria-hidden="true">{SYMBOLS[verdict]}</span> {verdict}</span>')


def tagged(tag: str, plain: str, kind: str = '') -> Html:
  """Returns a text as it stands within a tag of a class, escaped."""
  return Html(f'<{tag}{_attributes(class_=kind)}>{markup.escape(plain)}</{tag}>')


def image(uri: str, alt: str, width: int | None = None) -> Html:
  """Returns a picture; `alt` says what it shows, and `width` is in CSS pixels."""
  return Html(f'<img{_attributes(src=uri, width=width, alt=alt)}>')


def link(text: str, to: str | None) -> Html:
  """Returns a text that leads to a page, the text alone for None."""
  return Html(f'<a href="{markup.escape(to)}">{_inline(text)}</a>' if to else _inline(text))


def _inline(text: Any) -> str:
  """Returns a text escaped: names in backticks as code, lines broken where they were, no break before a per cent."""
  if isinstance(text, Html):
    return text
  escaped = _broken(markup.escape(str(text))).replace('\n', '<br>').replace(' %', '\N{NO-BREAK SPACE}%')
  return re.sub(r'`([^`]*)`', r'<code>\1</code>', escaped)


def _broken(escaped: str) -> str:
  """Returns an escaped text with places where a long label may be broken; numbers stay whole."""
  # A word is looked at from its beginning alone: from each of its letters on, a long one would take quadratic time.
  return re.sub(r'([+,](?!\d)|[|/]|(?<!\w)\w{8,}\()(?=\S)', r'\1<wbr>', escaped)


def _attributes(**values: Any) -> str:
  """Returns attributes of a tag, without empty ones; an underscore at the end of a name is dropped."""
  known = {name.rstrip('_').replace('_', '-'): value for name, value in values.items() if value not in ('', None)}
  return ''.join(f' {name}="{markup.escape(str(value))}"' for name, value in known.items())


def _table(table: Table, label: str) -> str:
  named = {'role': 'region', 'aria_label': table.label or label, 'tabindex': 0}
  bodies = []
  columns = [
    one if isinstance(one, Column) else Column(*((one,) if isinstance(one, str) else one)) for one in table.columns
  ]
  width = sum(column.span for column in columns)
  for body in table.bodies:
    title = f'<tr><th class="group" scope="rowgroup" colspan="{width}"><span>{_inline(body.title)}</span></th></tr>\n'
    labelled = 'board' in table.kind.split()
    rows = [
      f'<tr{_attributes(class_=row.kind)}>{_cells(table.first, columns, row.cells, labelled)}</tr>' for row in body.rows
    ]
    bodies.append('<tbody>\n' + (title if body.title else '') + '\n'.join(rows) + '\n</tbody>\n')
  head = ''.join(map(_heading, columns))
  head = f'<thead><tr>{head}</tr></thead>\n' if any(column.text for column in columns) else ''
  opening = f'<table{_attributes(class_=table.kind, style=table.style)}>'
  return f'<div class="scroll"{_attributes(**named)}>\n{opening}\n{head}{"".join(bodies)}</table>\n</div>'


def _heading(column: Column) -> str:
  if not column.text:
    return '<td></td>'
  sort = {'data_sort': column.sort, 'aria_sort': 'ascending' if 'first' in column.kind.split() else ''}
  kinds = _attributes(
    class_=column.kind.removesuffix('first').strip(), colspan=column.span if column.span > 1 else '', **sort
  )
  return f'<th scope="col"{kinds}>{_inline(column.text)}</th>'


def _cells(first: str, columns: Iterable[Column], given: Iterable[Any], labelled: bool = False) -> str:
  """Returns the cells of a row, the first of which names it; where labelled, each knows the heading of its column."""
  made, place = [], 0
  over = [column for column in columns for _ in range(column.span)]
  kinds = [column.kind.removesuffix('first').strip() for column in over]
  for one in given:
    cell = one if isinstance(one, Cell) else Cell(one)
    kind = ' '.join(filter(None, [kinds[place] if place < len(kinds) else '', cell.kind]))
    inside = _inline(cell.text) + ''.join(f'<small>{_inline(line)}</small>' for line in cell.small if line)
    shape = {'colspan': cell.span if cell.span > 1 else ''}
    if labelled and place < len(over) and cell.span == 1:
      shape['data_label'] = ' '.join(markup.unescape(re.sub(r'<[^>]+>', '', over[place].text)).split())
    if place == 0 and cell.span == 1:
      kind = ' '.join(filter(None, [first, kind]))
    names = 'spec' in kind.split() or (place == 0 and cell.span == 1)
    tag, scope = ('th', 'row') if names else ('td', '')
    # An empty value is one: of what is unknown, which the script of a page sorts last.
    value = '' if cell.value is None else f' data-value="{markup.escape(str(cell.value))}"'
    made.append(f'<{tag}{_attributes(class_=kind, scope=scope, **shape)}{value}>{inside}</{tag}>')
    place += cell.span
  return '\n'.join(made)


def _list(items: Iterable[str], kind: str = '') -> str:
  return f'<ul{_attributes(class_=kind)}>\n' + ''.join(f'<li>{_inline(item)}</li>\n' for item in items) + '</ul>'


def _terms(terms: Terms) -> str:
  said = (
    f'<dt>{_inline(term)}</dt>\n' + ''.join(f'<dd>{_inline(one)}</dd>\n' for one in of) for term, of in terms.items
  )
  return f'<dl>\n{"".join(said)}</dl>'


def _picture(picture: Picture) -> str:
  alt = markup.escape(picture.alt)
  shape = f'width="{round(figures.width(picture.png) * SCREEN)}" alt="{alt}"'
  return (
    f'<div class="scroll plot{" read" if picture.read else ""}" role="region" aria-label="{alt}" tabindex="0">'
    f'<img src="{shown.embedded(picture.png)}" {shape}></div>'
  )


def _cautions(cautions: Cautions) -> str:
  if not cautions.items:
    return ''
  return f'<div class="cautions" role="note"><strong>Read with care</strong>\n{_list(cautions.items)}\n</div>'


def _section(section: Section) -> str:
  inside = rendered(section.blocks, section.title)
  return (
    f'<section aria-labelledby="{section.name}">\n<h2 id="{section.name}">{_inline(section.title)}</h2>\n'
    f'{inside}\n</section>'
  )


_RENDERED: Mapping[type, Callable[[Any, str], str]] = {
  Html: lambda one, _: one,
  Text: lambda one, _: f'<p{_attributes(class_=one.kind)}>{_inline(one.text)}</p>',
  Heading: lambda one, _: f'<h3>{_inline(one.text)}</h3>',
  Bullets: lambda one, _: _list(one.items, one.kind),
  Cautions: lambda one, _: _cautions(one),
  Terms: lambda one, _: _terms(one),
  Table: _table,
  Picture: lambda one, _: _picture(one),
  Details: lambda one, label: (
    f'<details>\n<summary>{_inline(one.summary)}</summary>\n{rendered(one.blocks, label)}\n</details>'
  ),
  Section: lambda one, _: _section(one),
}
