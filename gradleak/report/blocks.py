"""What a page is made of; `html` renders it.

A text is read as prose: names stand in backticks, a line break is kept, and `Html` is taken as it is.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple


class Html(str):
  """Markup, which is not escaped."""


class Cell(NamedTuple):
  """A cell of a table.

  Attributes:
    text: its text.
    small: lines in small print below; empty ones are left out.
    kind: CSS classes, beside those of the column.
    span: the columns that it takes.
    value: what the column is sorted by.
  """

  text: Any = ''
  small: Sequence[Any] = ()
  kind: str = ''
  span: int = 1
  value: Any = None


class Row(NamedTuple):
  """A line of a table: its cells (texts or `Cell`s), the first of which names it, and its CSS classes."""

  cells: Sequence[Any]
  kind: str = ''


class Column(NamedTuple):
  """A column.

  Attributes:
    text: its heading.
    kind: CSS classes of all its cells; 'first' marks that by which the rows are sorted.
    sort: how it is sorted by a click, as 'text' or 'number'; '' if not at all.
    span: the cells below the heading.
  """

  text: str = ''
  kind: str = ''
  sort: str = ''
  span: int = 1


class Body(NamedTuple):
  """Rows that belong together, with a title above them, if any."""

  rows: Sequence[Row]
  title: str = ''


class Table(NamedTuple):
  """A table.

  Attributes:
    columns: its headings, each a text, a `Column` or its fields; without any text there is no head.
    bodies: its rows in groups.
    kind: CSS classes.
    label: its name for people who hear it; by default the heading of its section.
    first: the CSS class of the first cell of each row.
    style: further CSS of this table.
  """

  columns: Sequence[Any]
  bodies: Sequence[Body]
  kind: str = ''
  label: str = ''
  first: str = 'spec'
  style: str = ''


class Text(NamedTuple):
  """A paragraph; its kind is '', 'note' or 'meaning'."""

  text: Any
  kind: str = ''


class Bullets(NamedTuple):
  """A list of sentences."""

  items: Sequence[Any]
  kind: str = ''


class Cautions(NamedTuple):
  """Reasons to read a result with care; none are not shown."""

  items: Sequence[Any]


class Terms(NamedTuple):
  """Terms, each with what is said of it."""

  items: Sequence[tuple[str, Sequence[Any]]]


class Picture(NamedTuple):
  """A PNG with what it shows in words; one that is read keeps its letters on a narrow screen, where it scrolls."""

  png: bytes
  alt: str
  read: bool = False


class Details(NamedTuple):
  """Blocks that are folded away below a summary."""

  summary: str
  blocks: Sequence[Any]


class Heading(NamedTuple):
  """A heading within a section."""

  text: str


class Section(NamedTuple):
  """A part of a page.

  Attributes:
    name: its anchor.
    title: its heading.
    blocks: its content.
    short: how the list of sections calls it, by default its title.
  """

  name: str
  title: str
  blocks: Sequence[Any]
  short: str = ''


class Page(NamedTuple):
  """A page.

  Attributes:
    kind: the CSS class of its body.
    title, kicker, heading: what stands in its tab, above its heading, and as its heading.
    opening: the blocks of its first screen.
    sections: its parts; other blocks may stand between them, and None is left out.
    footer: the blocks of its end.
    named: whether the first screen lists the sections.
    script: JavaScript at its end.
  """

  kind: str
  title: str
  kicker: str
  heading: str
  opening: Sequence[Any]
  sections: Sequence[Any]
  footer: Sequence[Any] = ()
  named: str = 'Sections'
  script: str = ''
