"""What pages and tables say: sentences of words.toml, with values in their places."""

import contextlib
import contextvars
import functools
import re
import string
import tomllib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, ParamSpec, TypeVar

from gradleak.modalities import IMAGES, Modality, of_config
from gradleak.report import formatting
from gradleak.report.html import resource

P = ParamSpec('P')
T = TypeVar('T')

_KIND: contextvars.ContextVar[Modality] = contextvars.ContextVar('kind', default=IMAGES)

# How a value is written; '{n:image|images}' chooses between one and several.
_FORMATS: Mapping[str, Callable[[Any], str]] = {
  'names': lambda names: formatting.listed([f'`{name}`' for name in names]),
  'list': formatting.listed,
  'commas': lambda parts: ', '.join(map(str, parts)),
  'semicolons': lambda parts: '; '.join(map(str, parts)),
  'percent': formatting.percent,
  'given': formatting.percent_given,
  'upwards': formatting.upwards,
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
  """Returns the text 'table.name' of words.toml with values in their places, in the words of the modality."""
  table, _, entry = name.partition('.')
  kind = _KIND.get()
  template = kind.words[name] if name in kind.words else texts()[table][entry]
  return _Writer().vformat(worded(template), (), {'score': kind.shown[0].title, **facts})


@contextlib.contextmanager
def about(config: Mapping[str, Any]) -> Iterator[Modality]:
  """Lets `said` and `worded` speak of the samples of a result's settings within a block; gives their modality."""
  token = _KIND.set(of_config(config))
  try:
    yield _KIND.get()
  finally:
    _KIND.reset(token)


def speaking(function: Callable[P, T]) -> Callable[P, T]:
  """Decorates a function of a result, which has a `config`: its texts are `about` that."""

  @functools.wraps(function)
  def within(*args: P.args, **kwargs: P.kwargs) -> T:
    with about(getattr(args[0], 'config', {})):
      return function(*args, **kwargs)

  return within


def worded(text: str) -> str:
  """Returns a text that speaks of images with the noun of the modality in their place."""
  one, several = _KIND.get().noun
  if one == 'image':
    return text

  def named(match: re.Match) -> str:
    article, word = match.groups()
    noun = several if word.endswith('s') else one
    noun = noun.capitalize() if word[0].isupper() else noun
    if not article:
      return noun
    an = 'an' if noun[0] in 'aeiou' else 'a'
    return f'{an.capitalize() if article[0].isupper() else an} {noun}'

  return re.sub(r'(?<!\{)\b(?:([Aa]n?) )?([Ii]mages?)\b', named, text)


def found(name: str, /, **facts: Any) -> Finding:
  """Returns a `Finding`."""
  return Finding(name, facts)


def within_noise(others: int) -> Finding | str:
  """Returns the sentence on how many others noise could put in the place of what was just said; '' for none."""
  return found('findings.within_noise', n=others) if others else ''


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
