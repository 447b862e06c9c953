"""A page for each attack, defense, malicious server and family of models, written from the objects themselves.

`pages` returns the texts; at the start of a build they are written into docs/methods. The picture of a page
is that of a stored table in which the method occurs.
"""

import inspect
import math
import pathlib
import re
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import docstrings
import facts
from sphinx.application import Sphinx

import gradleak as gl
from experiments import comparison
from gradleak.attacks.matching import PARTS, TERMS, gradient_matching
from gradleak.attacks.matching.optimizers import first_order, lbfgs
from gradleak.core.settings import Choice, limits
from gradleak.models.registry import WRAPPERS

DOCS = pathlib.Path(__file__).parents[1]
KINDS = {'Attacks': gl.attacks.REGISTRY, 'Malicious servers': gl.servers.REGISTRY, 'Defenses': gl.defenses.REGISTRY}
SYMBOLS = (
  r'In the formulas, $g$ is a gradient (of an attack: the observed one), $\Delta$ an update, $\theta$ the parameters, '
  r'$f_\theta$ the network, $L$ the loss, $x$ images, $y$ labels and $N$ the number of samples behind an update; a '
  r'prime marks what is sent in place of something, a hat what is reconstructed. $[\,\cdot\,]$ is 1 where it holds, '
  r'else 0, $\cos$ the cosine similarity, TV the total variation, a bar a mean.'
)
# Setting -> the function and its parameter that it is handed to under another name.
ALIASES = {'steps': (gradient_matching, 'num_steps'), 'optimizer': (first_order, 'name')}
ABOUT = {
  'Attacks': 'reconstruct private samples from what a client sends',
  'Malicious servers': 'change the model that a client is sent, and read what comes back',
  'Defenses': 'change what a client trains on or sends; each is an `optax` transformation',
  'Models': 'are audited: networks of the library, as pure functions',
}
FEW, MOST = 4, 3  # attacks that a cell names, lines of a table that are not folded away
SETTINGS, LONG = 6, 48  # of them that are not folded away, characters of a defense's text that stand in a line
MODELS = {**gl.models.REGISTRY, **WRAPPERS}


def families() -> dict[str, dict[str, Callable]]:
  """Returns page -> its models by name: those of a file of `gradleak.models`; a wrapper has a page of its own."""
  found: dict[str, dict[str, Callable]] = {}
  for name, factory in MODELS.items():
    page = name if name in WRAPPERS else factory.__module__.rpartition('.')[2]
    found.setdefault(page, {})[name] = factory
  return found


def links() -> dict[str, str]:
  """Returns name of a method or model -> its page, beside other pages of methods."""
  own = {name: f'{name}.md' for registry in KINDS.values() for name in registry}
  return own | {name: f'{page}.md' for page, members in families().items() for name in members}


def pages() -> dict[str, str]:
  """Returns file name -> text: index.md, a page per kind, and a page per method and family of models."""
  texts = {f'{name}.md': page(name) for registry in KINDS.values() for name in registry}
  texts |= {f'{name}.md': family(name, members) for name, members in families().items()}
  return {'index.md': index(), **groups(), **texts}


def page(name: str) -> str:
  """Returns the page of a method of a registry."""
  if name in gl.defenses.REGISTRY:
    parts = [*_about_defense(name), *_known(name), *_board(name), *_costs(name)]
  else:
    parts = [*_about_attack(facts.ATTACKS[name]()), *_adaptive_attacks_of(name)]
  return '\n\n'.join([*described(name), *parts, *_tables(name)]) + '\n'


def described(name: str) -> list[str]:
  """Returns the part of a method's page that follows from its docstring and signature, as paragraphs."""
  server, published = None, ''
  if name in gl.defenses.REGISTRY:
    (stage,) = facts.example(name).stages
    own, citation, published = stage.factory, stage.traits.citation, stage.traits.published
    given = ', '.join(f'{setting}={value!r}' for setting, value in stage.given.items())
    made = f'defense = gl.defenses.{name}({given})'
  else:
    method = facts.ATTACKS[name]()
    own, citation, server = method.factory, method.citation, method.server
    made = f'attack = gl.{"attacks" if server is None else "servers"}.{name}()'
  parts = [f'# {published} (`{name}`)' if published else f'# {name}', *_description(own, name)]
  parts += [f'Source: {docstrings.markdown(citation)}'] if citation else []
  parts += ['## Formula', *map(_formula, docstrings.formulas(own))]
  if server is not None:
    parts += ['## What the server sends', *_description(server.factory, name)]
  return [*parts, *_settings(own, *(() if server is None else (server.factory,))), _python(made)]


def family(name: str, members: Mapping[str, Callable]) -> str:
  """Returns the page of models that are in one file; settings that several of them have stand there once."""
  parts, shown = [f'# {name}'], dict[tuple[str, ...], str]()
  if name not in WRAPPERS:
    parts += _description(inspect.getmodule(next(iter(members.values()))), name)
  for member, factory in members.items():
    own = [f'## {member}'] if list(members) != [name] else []
    parts += own + _description(factory, member, name) + [_formula(one) for one in docstrings.formulas(factory)]
    settings = tuple(_settings(factory, *_alike(member, members), level=3 if own else 2))
    parts += [f'Settings as those of `{shown[settings]}`.'] if settings in shown else settings
    shown.setdefault(settings, member)
    text = f'lenet+{member}' if member in WRAPPERS else member
    parts.append(_python(f"model = gl.models.create('{text}', 10)"))
  return '\n\n'.join(parts) + '\n'


def _alike(name: str, members: Mapping[str, Callable]) -> list[Callable]:
  """Returns a model of a family, and those that descriptions refer to for what they leave out."""
  found = [name]
  for one in found:
    mentioned = re.findall('`(\\w+)`', docstrings.sections(members[one])[''])
    found += [other for other in mentioned if other in members and other not in found]
  return [members[one] for one in found]


def index() -> str:
  """Returns the page above all others."""
  parts = [
    '# Methods',
    'Every page is written from the code: docstrings, traits, settings and stored results.',
    SYMBOLS,
  ]
  names = [_file(kind) for kind in (*KINDS, 'Models')]
  counts = (*map(len, KINDS.values()), len(MODELS))
  rows = [
    (f'[{kind}]({name}.md)', count, ABOUT[kind])
    for kind, name, count in zip((*KINDS, 'Models'), names, counts, strict=True)
  ]
  parts.append(_grid(('kind', 'how many', 'what they do'), rows))
  return '\n\n'.join([*parts, '```{toctree}\n:hidden:\n:maxdepth: 2\n\n' + '\n'.join(names) + '\n```']) + '\n'


def groups() -> dict[str, str]:
  """Returns file name -> text of the pages that list the methods of one kind."""
  texts = {}
  for kind, registry in KINDS.items():
    rows = [
      (f'[`{name}`]({name}.md)', _description(inspect.unwrap(factory), name)[0]) for name, factory in registry.items()
    ]
    texts[kind] = [_grid(('name', 'what it is'), rows), _toctree(registry)]
  rows = []
  for name, members in families().items():
    about = next(iter(members.values())) if name in WRAPPERS else inspect.getmodule(next(iter(members.values())))
    rows.append((', '.join(f'[`{one}`]({name}.md)' for one in members), _description(about, name)[0]))
  texts['Models'] = [_grid(('names', 'what they are'), rows), _toctree(families())]
  return {f'{_file(kind)}.md': '\n\n'.join([f'# {kind}', *parts]) + '\n' for kind, parts in texts.items()}


def _file(kind: str) -> str:
  return kind.lower().replace(' ', '_')


def _toctree(names: Iterable[str]) -> str:
  return '```{toctree}\n:hidden:\n\n' + '\n'.join(names) + '\n```'


def _others(*names: str) -> dict[str, str]:
  """Returns `links` without those to the page itself."""
  here = {f'{name}.md' for name in names}
  return {name: link for name, link in links().items() if link not in here}


def _description(documented: Any, *names: str) -> list[str]:
  """Returns the paragraphs of a docstring; the names of its own settings are no links."""
  settings = inspect.signature(documented).parameters if callable(documented) else ()
  shown = {name: link for name, link in _others(*names).items() if name not in settings}
  text = docstrings.sections(documented)['']
  if text.startswith('Returns '):
    text = text[8].upper() + text[9:]
  return docstrings.paragraphs(text, shown)


def _formula(latex: str) -> str:
  return f'$$\n{latex}\n$$'


def _python(line: str) -> str:
  return f'```python\nimport gradleak as gl\n\n{line}\n```'


def _settings(factory: Callable, *documented: Callable, level: int = 2) -> list[str]:
  """Returns the table of a factory's settings; those that all matching attacks share are folded.

  Args:
    factory: its keyword-only parameters are the settings.
    *documented: further factories whose docstrings say what they mean, before that of `factory`.
    level: of the heading.
  """
  sources = (*documented, factory, gradient_matching, first_order, lbfgs, *PARTS)
  settings = [one for one in inspect.signature(factory).parameters.values() if one.kind is one.KEYWORD_ONLY]
  heading = ('name', 'type', 'default', 'meaning')
  code = inspect.unwrap(factory).__code__
  written = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
  rows = {one.name: (f'`{one.name}`', _type(one), _default(one), _meaning(one.name, sources)) for one in settings}
  own = [row for name, row in rows.items() if name in written]
  shared = [row for name, row in rows.items() if name not in written]
  parts = [f'{"#" * level} Settings', *(_long(heading, own, SETTINGS) if own else ['It has none.'])]
  if shared:
    parts.append(_folded('Settings of all matching attacks', _grid(heading, shared)))
  return parts


def _meaning(name: str, sources: Sequence[Callable]) -> str:
  found = docstrings.meaning(name, *sources)
  if name in ALIASES:
    documented, parameter = ALIASES[name]
    own = docstrings.meaning(name, *(one for one in sources if one is not gradient_matching))
    found = own or docstrings.meaning(parameter, documented)
  if not found and name in TERMS:
    found = f'{TERMS[name].about}.'
  return docstrings.markdown(found, links())


def _type(parameter: inspect.Parameter) -> str:
  """Returns a setting's type, with its range or its choices."""
  annotation, limit = parameter.annotation, limits(parameter.annotation)[1]
  annotation = annotation if limit is None else typing.get_args(annotation)[0]
  name = getattr(annotation, '__name__', '') if isinstance(annotation, type) else ''
  text = f'`{name or annotation}`'
  if isinstance(limit, Choice):
    text += ': ' + ', '.join(f'`{one}`' for one in limit.names)
  elif limit is not None:
    finite = limit.finite or float not in limits(parameter.annotation)[0]
    high = f'{limit.high:g}]' if math.isfinite(limit.high) else '∞)' if finite else '∞]'
    text += f' in [{limit.low:g}, {high}'
  return docstrings.markdown(text)


def _default(parameter: inspect.Parameter) -> str:
  return 'required' if parameter.default is parameter.empty else docstrings.markdown(f'`{parameter.default!r}`')


def _long(heading: Sequence[str], rows: Sequence[Sequence[Any]], most: int = MOST) -> list[str]:
  """Returns a table, the lines beyond the first ones folded away; a single one is not."""
  most = len(rows) if len(rows) == most + 1 else most
  more = rows[most:]
  return [_grid(heading, rows[:most]), *([_folded(f'{len(more)} more', _grid(heading, more))] if more else [])]


def _folded(title: str, text: str) -> str:
  """Returns Markdown that is folded away below its title."""
  return f':::{{dropdown}} {title}\n{text}\n:::'


def _grid(heading: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
  """Returns a table; cells are Markdown."""

  def line(cells: Iterable[Any]) -> str:
    return f'| {" | ".join(map(str, cells))} |'

  return '\n'.join([line(heading), line(['---'] * len(heading)), *map(line, rows)])


def _about_defense(name: str) -> list[str]:
  made = facts.example(name)
  (stage,) = made.stages
  traits = stage.traits
  rows = [
    ('acts on', facts.PLACES[traits.place]),
    ('random', _yes(traits.random)),
    ('sparsifies', facts.SPARSIFIES[traits.sparsifies] + (', and sends them later' if traits.accumulates else '')),
    ('noise', facts.noise(name)),
    ('clips', facts.clips(name)),
    ('guarantee', facts.guarantee(name)),
    ('post-processing', _yes(traits.post_processing)),
  ]
  return ['## Traits', f'With the settings of `{made}`.', _grid(('trait', 'value'), rows)]


def _yes(value: bool) -> str:
  return 'yes' if value else 'no'


def _about_attack(made: Any) -> list[str]:
  attack = made(None)
  reads = ', '.join(facts.EVIDENCE[one] for one in facts.EVIDENCE if one in made.reads)
  labels = attack.labels + (f', by the rule `{made.label_rule}`' if attack.labels == 'inferred' else '')
  rows = [
    ('steps', f'{attack.num_steps:,}' if attack.num_steps else 'none: a closed form'),
    ('labels', labels),
    ('reads beside the update', reads or 'nothing'),
    ('learns from public images', _yes(made.learns) + (', anew for each defense it knows' if made.adaptive else '')),
    ('server', 'malicious' if made.server is not None else 'honest but curious'),
  ]
  return ['## What it takes', _grid(('property', 'value'), rows)]


def _known(name: str) -> list[str]:
  """Returns what attackers do who know a defense."""
  merged: dict[tuple[str, str], list[str]] = {}
  for one in facts.adaptive_attacks(name):
    merged.setdefault((one.name, one.words), []).append(one.attack)
  rows, which = [], []
  for (adaptive, words), attacks in merged.items():
    listed = ', '.join(f'[`{attack}`]({attack}.md)' for attack in attacks)
    many = len(attacks) > FEW
    rows.append((f'`{adaptive}`', docstrings.markdown(words), len(attacks) if many else listed))
    which += [f'- `{adaptive}`: {listed}'] * many
  parts = ['## Attackers who know it']
  if not rows:
    return [*parts, 'No adaptive attack applies to what a client sends.']
  where = (
    f'Adaptive attacks to `{facts.example(name)}`, as the library lists them for `{facts.MODEL}` and digits, where the '
    f'attacker has {facts.ROUNDS} uploads of the same samples.'
  )
  shown = [*parts, where, *_long(('adaptive attack', 'the attacker', 'attacks'), rows)]
  return [*shown, _folded('Which attacks these are', '\n'.join(which))] if which else shown


def _board(name: str) -> list[str]:
  """Returns the entries of the leaderboard that a defense is part of."""
  found = facts.seen(name)
  if not found:
    return []
  levels = list(found[0].levels)
  rows, by = [], []
  for one in found:
    task, server = docstrings.markdown(one.task), one.side.split('-')[-1].split()[0]
    rows.append((f'`{one.defense}`', task, server, one.trials, *(one.levels[level] for level in levels)))
    by.append(f'- `{one.defense}`, {task}, {server} server: ' + (', '.join(f'`{name}`' for name in one.by) or 'none'))
  parts = ['## Measured', 'Uploads that AutoLeak brought to each verdict or beyond, from `results/leaderboard`.']
  parts += _long(('defense', 'task', 'server', 'uploads', *levels), rows)
  parts.append(_folded('By which attackers', '\n'.join(dict.fromkeys(by))))
  costs = {(one.defense, *one.cost) for one in found if one.cost}
  told = [f'- `{defense}` costs {points:g} percentage points: {source}.' for defense, points, source in sorted(costs)]
  return parts + ([_folded('What it cost there', '\n'.join(told))] if told else [])


def _costs(name: str) -> list[str]:
  """Returns what a defense cost in stored trainings."""
  found = facts.costs(name)
  if not found:
    return []
  rows = [
    (
      _linked(one.table),
      one.column,
      f'`{_shortened(one.defense)}`',
      one.accuracy,
      one.undefended,
      one.against_none,
      one.overhead,
    )
    for one in found
  ]
  what = (
    'Accuracy of models that were trained under it, beside those of undefended trainings, and the time of a round. '
    'Where the undefended model is hardly better than chance, the training was too short for a conclusion.'
  )
  heads = ('table', 'of', 'defense', 'accuracy %', 'undefended', 'against none', 'round, % over none')
  return ['## Cost', what, *_long(heads, rows)]


def _shortened(text: str) -> str:
  """Returns a defense without settings where they are many: the page of the table has them."""
  return text if len(text) <= LONG else re.sub(r'\([^()]*\)', '(…)', text)


def _adaptive_attacks_of(name: str) -> list[str]:
  """Returns the adaptive attacks that an attack can use, by defense."""
  rows = []
  for defense in gl.defenses.REGISTRY:
    used = [f'`{one.name}`' for one in facts.adaptive_attacks(defense) if one.attack == name]
    if used:
      rows.append((f'[`{defense}`]({defense}.md)', ', '.join(used)))
  if not rows:
    return ['## Against defenses it knows', 'It can use no adaptive attack.']
  return ['## Against defenses it knows', _grid(('defense', 'adaptive attacks'), rows)]


def _tables(name: str) -> list[str]:
  """Returns the stored tables of papers in which a method occurs."""
  found = facts.tables(name)
  if not found:
    return []
  rows = [
    (
      _linked(one),
      *(one.counts[verdict] or '' for verdict in comparison.VERDICTS),
      sum(count for verdict, count in one.counts.items() if verdict not in comparison.VERDICTS) or '',
    )
    for one in found
  ]
  what = "The papers' figures that are about it, by how ours compare."
  heads = ('table', *comparison.VERDICTS, 'not counted')
  return ['## In the papers’ tables', what, *_long(heads, rows), *_picture(found)]


def _picture(found: Iterable[facts.Table]) -> list[str]:
  """Returns the picture of the first of these tables that has one."""
  pictured = [(table, table.pictures[0]) for table in found if table.pictures]
  return [f'{_linked(table)}:\n\n![{table.title}](../../{path})' for table, path in pictured[:1]]


def _linked(table: facts.Table) -> str:
  title = docstrings.markdown(table.title)
  return f'[{title}](../results/{table.name}.md)' if table.scale == facts.SHOWN else title


def write(folder: pathlib.Path, texts: Mapping[str, str]) -> None:
  """Writes files into a folder; equal ones are left alone, those of other names are deleted."""
  folder.mkdir(exist_ok=True)
  for path in folder.glob('*.md'):
    if path.name not in texts:
      path.unlink()
  for name, text in texts.items():
    path = folder / name
    if not path.is_file() or path.read_text('utf-8') != text:
      path.write_text(text, 'utf-8')


def setup(app: Sphinx) -> dict[str, bool]:
  """Writes the pages when a build starts."""
  app.connect('builder-inited', lambda app: write(DOCS / 'methods', pages()))
  return {'parallel_read_safe': True, 'parallel_write_safe': True}
