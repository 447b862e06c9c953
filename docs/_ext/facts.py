"""What pages say of a method beside its docstring: from its traits, the adaptive attacks, and stored results."""

import functools
import pathlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

import gradleak as gl
from gradleak import adaptive
from gradleak.attacks.base import AttackMethod
from gradleak.core import grammar, methods
from gradleak.defenses import Bound, Context, Defense
from gradleak.defenses.defense import SENSITIVITIES
from gradleak.defenses.differential_privacy import epsilon
from gradleak.defenses.guarantees import mechanisms
from gradleak.report import privacy
from gradleak.studies.autoleak import leaderboard

ROOT = pathlib.Path(__file__).parents[2]
ATTACKS: dict[str, Callable] = {**gl.attacks.REGISTRY, **gl.servers.REGISTRY}
PLACES = {
  'data': 'the samples, before training',
  'step': 'the gradient of each local step',
  'upload': 'the update, before it is sent',
  'round': 'the mean update, at the server',
}
SPARSIFIES = {
  '': 'nothing',
  'zeros': 'entries, which are sent as zeros',
  'mask': 'entries, which are not sent; the server knows which',
}
CLIPS_EACH = {
  'sample': 'each sample’s gradient{} (not the upload)',
  'upload': 'each upload{}, at the server, which sees them unclipped',
  'weight': 'each new weight{} (not the upload)',
}
EVIDENCE = {
  'weights': 'which entries count, and how much',
  'noise': 'the expected norm of the noise',
  'clip': 'the norm that the update was clipped to',
  'uploads': 'several uploads of the same samples',
}
# Values of settings that have no default, for what depends on a value.
EXAMPLES = {
  'stddev': 0.05,
  'scale': 0.02,
  'rate': 0.9,
  'ratio': 0.4,
  'norm': 1.0,
  'noise': 0.01,
  'limit': 0.01,
  'sensitivity': 1e-4,
  'epsilon': 10.0,
  'delta': 1e-5,
  'clients': 10,
}
MODEL, SAMPLES, DELTA = 'lenet(width=4)', 1, 1e-5
TABLES, SCALES = ROOT / 'results' / 'tables', ('paper', 'mini')  # stored results
SHOWN = 'mini'  # the scale of the tables that have pages
ROUNDS = 16  # uploads that an attacker may average


class Known(NamedTuple):
  """An adaptive attack that an attack can use.

  Attributes:
    name, words: as of `AdaptiveAttack`.
    attack: name of the attack.
  """

  name: str
  words: str
  attack: str


class Seen(NamedTuple):
  """What an entry of the leaderboard says of a defense on one side.

  Attributes:
    defense: as text.
    task: dataset, model and samples.
    side: the server.
    levels: verdict -> how many trials came as far.
    trials: how many there were.
    by: the attacks that came farthest.
    cost: lost accuracy in percentage points and its source; None if it was not measured.
  """

  defense: str
  task: str
  side: str
  levels: dict[str, int]
  trials: int
  by: list[str]
  cost: tuple[float, str] | None


@functools.cache
def context() -> Context:
  """Returns the `Context` in which adaptive attacks are listed: a small network on handwritten digits."""
  digits = gl.data.load('digits')
  images, labels = digits.samples[:12], digits.targets[:12]
  key = jax.random.key(0)
  public = images[4:], labels[4:]
  found = gl.scenario(gl.models.create(MODEL, 10), images[:4], labels[:4], key=key, public=public)
  return Context(found.client, found.variables, images.shape[1:], found.public)


@functools.cache
def example(name: str) -> Defense:
  """Returns the defense of the registry with the settings of `EXAMPLES` where it has no defaults."""
  factory = gl.defenses.REGISTRY[name]
  given = [setting for setting in methods.setting_names(factory) if setting not in methods.defaults(factory)]
  return factory(**{setting: EXAMPLES[setting] for setting in given})


@functools.cache
def rows() -> Context:
  """Returns the same for rows of a table, for attacks that read nothing else."""
  data = gl.data.load('breast_cancer', 'test', limit=12)
  modality = gl.modalities.of_config(data.settings)
  found = gl.scenario(gl.models.mlp(2, widths=8), data.samples, data.targets, key=jax.random.key(0), modality=modality)
  return Context(found.client, found.variables, data.samples.shape[1:], (data.samples, data.targets))


@functools.cache
def adaptive_attacks(name: str) -> tuple[Known, ...]:
  """Returns the adaptive attacks to a defense that any attack of the registries can use."""
  made: dict[str, AttackMethod] = {attack: factory() for attack, factory in ATTACKS.items()}
  return tuple(Known(one.name, one.words, attack) for attack, method in made.items() for one in _usable(name, method))


@functools.cache
def _bound(name: str, where: Callable[[], Context]) -> Bound:
  return gl.defenses.bind(example(name), where())


def _usable(name: str, method: AttackMethod) -> list[adaptive.AdaptiveAttack]:
  """Returns the adaptive attacks of one attack, on the first kind of samples that attack and defense take."""
  for where in (context, rows):
    try:
      return adaptive.adaptive_attacks(_bound(name, where), where(), SAMPLES, method, ROUNDS)
    except gl.UsageError:
      continue
  return []


def noise(name: str) -> str:
  """Returns the noise that a defense adds at the settings of `example`, in words."""
  (stage,) = example(name).stages
  found = stage.traits.noise
  if found is None:
    return 'none'
  variance = found.variance(stage.settings, context(), SAMPLES)
  deviations = [float(np.sqrt(v)) for leaf in jax.tree.leaves(variance) for v in np.ravel(leaf)]
  low, high = min(deviations), max(deviations)
  between = f'{low:.3g}' if low == high else f'{low:.3g} to {high:.3g}'
  share = found.fraction(stage.settings)
  entries = 'each entry' if share == 1 else f'{100 * share:.3g} % of the entries'
  return f'{found.distribution}, standard deviation {between}, on {entries}'


def clips(name: str) -> str:
  """Returns what a defense clips at the settings of `example`, in words."""
  (stage,) = example(name).stages
  traits = stage.traits
  if traits.clips_each:
    norm = '' if traits.bounds is None else f' to L2 norm {float(traits.bounds(stage.settings)):g}'
    return CLIPS_EACH[traits.clips_each].format(norm)
  if traits.clips is not None:
    return f'the whole update to L2 norm {float(traits.clips(stage.settings)):g}'
  return 'nothing' if traits.limits is None else f'each entry to ±{float(traits.limits(stage.settings)):g}'


def guarantee(name: str) -> str:
  """Returns what a defense by itself guarantees at the settings of `example`, in words."""
  found = mechanisms(example(name))
  bounds = []
  for one in found:
    for relation in SENSITIVITIES:
      spent = epsilon(one.noise, relation, steps=one.releases, delta=DELTA)
      shown = privacy.bounded(spent)
      bounds.append(f'{shown} per upload for each {one.unit} in the relation “{relation}” (δ = {DELTA:g})')
  return '; '.join(bounds) or 'none by itself'


@functools.cache
def board() -> tuple[tuple[frozenset[str], Seen], ...]:
  """Returns (names of the methods, what was seen) of each entry and side of the stored leaderboard."""
  folder = ROOT / 'results' / 'leaderboard'
  entries = leaderboard.read(folder).values() if folder.is_dir() else ()
  return tuple(_sides(entries))


def _sides(entries: Any) -> Iterator[tuple[frozenset[str], Seen]]:
  for entry in entries:
    task, cost = entry['task'], entry['cost']
    model = task['model'].partition('+')[0]  # how it takes pixels is said on the leaderboard
    where = f'{task["dataset"]}, `{model}`' + f', {task["batch_size"]} per upload' * (task['batch_size'] > 1)
    names = frozenset(one.name for one in grammar.parse_chain(entry['text'], 'defense'))
    for side, words in leaderboard.SIDES.items():
      if entry[side] is not None:
        levels = {one['level']: one['count'] for one in entry[side]['levels']}
        paid = cost and (cost['points'], cost['source'])
        yield names, Seen(entry['text'], where, words, levels, entry[side]['n'], entry[side]['by'], paid)


def seen(name: str) -> list[Seen]:
  """Returns what the leaderboard saw of all defenses that a method is part of."""
  return [one for names, one in board() if name in names]


class Table(NamedTuple):
  """A stored table of a paper in which a method occurs.

  Attributes:
    name, title, scale: of the table, the paper's authors with its number, and the scale at which it was run.
    counts: verdict -> number of the paper's figures with it, of those that are about the method.
    pictures: of the table, paths from the root of the repository.
  """

  name: str
  title: str
  scale: str
  counts: dict[str, int]
  pictures: tuple[str, ...]


@functools.cache
def _stored() -> tuple[tuple[Any, Any], ...]:
  """Returns (stored results, `judgement.Judged`) of all tables that are stored as they are declared."""
  import experiments
  from experiments import pages, results

  found = []
  for scale in SCALES:
    stored = results.read(TABLES, scale)
    for name, judged in pages.judge(stored, experiments.REGISTRY, scale).items():
      if judged.outcomes is not None:
        found.append((stored[name], judged))
  return tuple(found)


def tables(name: str) -> list[Table]:
  """Returns the stored tables in which a method occurs: an attack, or a part of a defense."""
  from experiments import judgement

  found = []
  for stored, judged in _stored():
    experiment = judged.experiment
    counts, occurs = dict.fromkeys(judgement.COUNTED, 0), False
    for cell, status in zip(experiment.cells, judged.statuses, strict=True):
      if name in _methods(stored.settings[cell.run], cell.defense):
        occurs = True
        if status:
          counts[status] += 1
    if occurs:
      found.append(
        Table(
          experiment.name,
          f'{experiment.paper.partition(":")[0]}: {experiment.table}',
          stored.scale,
          counts,
          tuple(f'results/tables/{stored.scale}/{picture}' for picture in stored.pictures),
        )
      )
  return found


class Cost(NamedTuple):
  """What a defense cost in a stored training.

  Attributes:
    table: the `Table`.
    column: of the figures.
    defense: of the clients, as text.
    accuracy: of the trained model on test samples, as shown in the table.
    undefended: the same without a defense; '' where the table has none.
    against_none: the difference to the undefended model, likewise; '' without one.
    overhead: of a round over one without the defense, in percent; '' where the table has none.
  """

  table: Table
  column: str
  defense: str
  accuracy: str
  undefended: str
  against_none: str
  overhead: str


def costs(name: str) -> list[Cost]:
  """Returns what a defense cost in each stored training that it was part of."""
  from experiments import comparison

  found, listed = [], {table.name: table for table in tables(name)}
  for stored, judged in _stored():
    experiment, shown = judged.experiment, dict[tuple, dict]()
    for cell, outcome in zip(experiment.cells, judged.outcomes, strict=True):
      if cell.metric in ('accuracy', 'overhead'):
        text = comparison.ours_text(cell.metric, outcome)
        shown.setdefault((cell.run, cell.defense), {})[cell.metric] = cell, text, outcome.remark
    for (run, label), figures in shown.items():
      if 'accuracy' in figures and name in _methods(stored.settings[run], label):
        cell, accuracy, remark = figures['accuracy']
        overhead = figures['overhead'][1] if 'overhead' in figures else ''
        bare = [
          shown[run, other]['accuracy'][1] for at, other in shown if at == run and other in _undefended(stored, run)
        ]
        defense = _defense(stored.settings[run], label)
        found.append(
          Cost(listed[experiment.name], cell.column, defense, accuracy, *(bare or [''])[:1], remark, overhead)
        )
  return found


def _undefended(stored: Any, run: str) -> set[str]:
  """Returns the labels of a stored training that have no defense, at the clients or at the server."""
  found = stored.settings[run].get('defenses') or {}
  return {
    label
    for label, method in found.items()
    if method == 'none'
    or (isinstance(method, dict) and (method['clients'], method['q'], method['delta']) == ('none', None, None))
  }


def _defense(settings: dict, label: str) -> str:
  """Returns the defense of the clients behind a figure, as text, by the stored settings of its run."""
  found = (settings.get('defenses') or {}).get(label)
  return (found['clients'] if isinstance(found, dict) else found) or 'none'


def _methods(settings: dict, label: str) -> set[str]:
  """Returns the names of the attack and of the defense's parts behind a figure, by the stored settings of its run."""
  attack = settings.get('attack')
  parts = grammar.parse_chain(_defense(settings, label), 'defense')
  return {one.name for one in parts} | ({grammar.spec(attack, 'attack').name} if attack else set())
