"""What pages and tables say: sentences of words.toml, with values in their places."""

import functools
import string
import tomllib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from gradleak.report import formatting
from gradleak.report.html import resource

# How a value is written; '{n:image|images}' chooses between one and several.
_FORMATS: Mapping[str, Callable[[Any], str]] = {
  'names': lambda names: formatting.listed([f'`{name}`' for name in names]),
  'list': formatting.listed,
  'commas': lambda parts: ', '.join(map(str, parts)),
  'semicolons': lambda parts: '; '.join(map(str, parts)),
  'percent': formatting.percent,
  'range': formatting.percent_range,
  'significant': formatting.significant,
  **{str(digits): functools.partial(formatting.number, digits=digits) for digits in range(4)},
}


class Finding(NamedTuple):
  """What was found, and with which values; as a text it is the sentence of words.toml.

  Attributes:
    name: of the sentence.
    facts: the values in it.
  """

  name: str
  facts: Mapping[str, Any]

  def __str__(self) -> str:
    return said(self.name, **self.facts)


def said(name: str, /, **facts: Any) -> str:
  """Returns the text 'table.name' of words.toml with values in their places."""
  table, _, entry = name.partition('.')
  return _Writer().vformat(texts()[table][entry], (), facts)


def found(name: str, /, **facts: Any) -> Finding:
  """Returns a `Finding`."""
  return Finding(name, facts)


@functools.cache
def texts() -> dict[str, dict[str, str]]:
  """Returns words.toml as `{table: {entry: text}}`."""
  return tomllib.loads(resource('words.toml'))


class _Writer(string.Formatter):
  """Writes values as `formatting` does."""

  def format_field(self, value: Any, spec: str) -> Any:
    if '|' in spec:
      one, several = spec.split('|')
      return one if value == 1 else several
    return _FORMATS[spec](value) if spec in _FORMATS else super().format_field(value, spec)
