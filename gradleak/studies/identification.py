"""Re-identification without a picture: whose sample is behind an upload, by the likelihood of each candidate.

    uploads ─► statistics of every candidate ─► rank of the original ─► false matches among innocent candidates

An attacker with a list of suspects simulates the client on each of them, and compares (`adaptive.likelihood`). One
upload of one sample is ranked by three statistics, and by the one of them that separates its first candidate best:

- likelihood: of the upload, given the candidate and the defense. For exact candidates no test is stronger, where its
  density is that of the defense.
- direction: the cosine of the upload and the candidate's bare update.
- pattern: which fraction of the upload's largest entries are the largest ones of the candidate's bare update. It
  survives altered copies of the original.
- combined: the statistic whose first candidate is further ahead of the second one than is usual.

The candidates of a batch are ranked by non-negative least squares of the upload on all candidates' updates (Lawson,
Hanson, Solving Least Squares Problems, 1974). An innocent candidate is one that is not behind the upload. The scores of
innocent ones calibrate a presence test, for an attacker who does not know whether the original is on the list.
"""

import dataclasses
import functools
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gradleak import metrics
from gradleak.adaptive import likelihood
from gradleak.audit.group import Group
from gradleak.audit.labelled import Labelled, named_defenses, text
from gradleak.audit.settings import AuditSettings
from gradleak.audit.streams import Streams
from gradleak.audit.uploads import Send, uploads
from gradleak.core import errors
from gradleak.core.locks import alone
from gradleak.core.settings import check, paired, setting
from gradleak.core.storage import (
  Workdir,
  append_time,
  damaged,
  description,
  digest,
  json_lines,
  plain,
  read_json_lines,
  seal,
  sealed,
  seconds_of_parts,
  write_atomically,
)
from gradleak.core.trees import Tree
from gradleak.defenses import NO_DEFENSE
from gradleak.defenses.defense import Bound, bind
from gradleak.engine import driver
from gradleak.engine.execution import Execution
from gradleak.engine.groups import Layout
from gradleak.engine.parts import told
from gradleak.engine.progress import callback, computing, end, note
from gradleak.federated.scenario import Scenario, fingerprint

STATISTICS = ('likelihood', 'direction', 'pattern')
COMBINED, REGRESSION = 'combined', 'regression'
RATE = 1e-3  # of false matches, at which a presence test is stated
EXACT = 'exact'
RESULT = 'identification.json'  # seals what stands beside it
_TIMES = 'timing.jsonl'
_FILES = {'rows': 'rows.jsonl', 'pairs': 'pairs.jsonl', 'noise': 'noise.jsonl'}
_COLUMNS = 1000  # of a regression, where a client is random: each candidate has several
_TRIED = 4  # candidates by which it is found whether a client is random
_VERSION = 2  # of parts: before, likelihoods were of float32, and equal scores were false matches
_BLOCK = 2**27  # entries of candidates' updates that are held at once
_LARGEST = 2**30  # entries of the updates of all candidates that a regression holds


@dataclasses.dataclass(frozen=True)
class IdentificationSettings:
  """The settings of `identify` that are no objects."""

  batch_size: int = setting(1, 'Samples behind one upload.', group='run', low=1, high=10**6, integer=True)
  candidates: int = setting(
    1000,
    'Length of the list, originals included, where there are as many; by a gallery of kinds, that of each kind.',
    group='run',
    low=2,
    high=10**6,
    integer=True,
  )
  rounds: int = setting(
    1, 'Uploads of the same samples on the same model, whose log-likelihoods are summed; one is read where neither '
    'client nor defense is random, or a defense sends later what it held back.', group='attacker', low=1, high=10**6,
    integer=True,
  )  # fmt: skip
  labels: str = setting(
    'known', 'known: those of the candidates; unknown: every label is tried.', group='attacker',
    choices=('known', 'unknown'),
  )  # fmt: skip
  copies: str = setting(
    EXACT, 'What the list holds: exact, or names of altered copies, joined by commas.', group='attacker'
  )
  controls: int = setting(
    0, 'Uploads of noise that are ranked, too: an original at rank 1 is then a false match.', group='run', low=0,
    high=10**6, integer=True,
  )  # fmt: skip


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Identification:
  """What `identify` found.

  Attributes:
    config: the settings, plain JSON.
    rows: one dict per original and statistic: 'defense', 'copies', 'model' (of the likelihood, one of
      `likelihood.MODELS`), 'statistic', 'trial', 'place' (in its batch), 'label', 'rank' (1 is the first), 'candidates'
      (beside the original), 'identified', 'posterior' (of the original under equal priors; None where the density of
      the upload is not that of the defense), 'p_value' (of the presence test), 'rounds'
      (that were read) and 'present' (whether that test finds it at `RATE`; None for too few pairs).
    pairs: one dict per defense, copies and statistic: the 'false' matches of the presence test among 'n' pairs of an
      upload and an innocent candidate. Its thresholds are from other uploads.
    seconds: wall time of all parts, those of an earlier call included.
    noise: one dict per control run, place in its batch, defense, copies and statistic, of an upload of noise with the
      norms of an upload: 'rank' of an original in place of which the noise was sent, 'candidates' and 'identified',
      which is a false match. Control run j stands for the originals of trial j modulo T, as in `gradleak.audit`.
  """

  config: dict[str, Any]
  rows: list[dict[str, Any]]
  pairs: list[dict[str, Any]]
  seconds: float
  noise: list[dict[str, Any]] = dataclasses.field(default_factory=list)

  def counts(self) -> list[dict[str, Any]]:
    """Returns one dict per defense, copies and statistic: 'identified' and 'present' of 'n', with 95 % intervals."""
    grouped: dict[tuple, list[dict]] = {}
    for row in self.rows:
      grouped.setdefault((row['defense'], row['copies'], row['statistic']), []).append(row)
    false = {(one['defense'], one['copies'], one['statistic']): one for one in self.pairs}
    return [_counted(key, rows, false.get(key)) for key, rows in grouped.items()]

  def decisive(self, copies: str = EXACT) -> str:
    """Returns the statistic that decides: of a list with the samples themselves the likelihood, else 'combined'."""
    if any(row['statistic'] == REGRESSION for row in self.rows):
      return REGRESSION
    return STATISTICS[0] if copies == EXACT else COMBINED

  def identified(self, defense: str, statistic: str = '', copies: str = EXACT) -> tuple[int, int]:
    """Returns (originals at rank 1, originals); by default of the `decisive` statistic.

    Raises:
      UsageError: for an unknown defense, statistic or copy.
    """
    statistic = statistic or self.decisive(copies)
    for kind, value in (('defense', defense), ('statistic', statistic), ('copies', copies)):
      errors.check_choice(kind, value, list(dict.fromkeys(row[kind] for row in self.rows)))
    wanted = {'defense': defense, 'statistic': statistic, 'copies': copies}
    rows = [row for row in self.rows if all(row[name] == value for name, value in wanted.items())]
    return sum(row['identified'] for row in rows), len(rows)

  def __repr__(self) -> str:
    lines = [
      f'  {one["defense"]}, {one["copies"]}, {one["statistic"]}: {one["identified"]} of {one["n"]}'
      for one in self.counts()
    ]
    return '\n'.join([f'{self.config["model"]} on {self.config["dataset"]}', *lines])


def _counted(key: tuple, rows: Sequence[Mapping], false: Mapping | None) -> dict[str, Any]:
  n = len(rows)
  made: dict[str, Any] = dict(zip(('defense', 'copies', 'statistic'), key, strict=True))
  made |= {'model': rows[0]['model'], 'rounds': rows[0]['rounds'], 'n': n}
  made['candidates'] = min(row['candidates'] for row in rows)  # a class may have fewer others than another
  for name in ('identified', 'present'):
    found = [row[name] for row in rows if row[name] is not None]
    independent = len({row['trial'] for row in rows if row[name] is not None})  # the originals of a batch share one
    _, low, high = (
      metrics.proportion_interval(sum(found), len(found), independent=independent) if found else (None, None, None)
    )
    made |= {name: sum(found) if found else None, f'{name}_low': low, f'{name}_high': high}
  known = [row['posterior'] for row in rows if row['posterior'] is not None]
  made['posterior'] = float(np.mean(known)) if known else None
  return made | ({} if false is None else {'false': false['false'], 'pairs': false['n']})


class _List(NamedTuple):
  """The candidates, N of them.

  Attributes:
    samples: [N, …], those of the private ones first.
    labels: int [N].
    private: the place of each private sample in it, [T, B].
    kinds: whether only candidates of one label are compared.
    shared: how many others have each private sample, int [T, B]; None for nobody. They are ahead of the original.
  """

  samples: np.ndarray
  labels: np.ndarray
  private: np.ndarray
  kinds: bool
  shared: np.ndarray | None = None

  def others(self, trial: int, place: int) -> int:
    """Returns how many others have a private sample."""
    return 0 if self.shared is None else int(self.shared[trial, place])


def identify(
  key: Any,
  scenario: Scenario,
  defenses: Any,
  num_trials: int,
  *,
  settings: IdentificationSettings | None = None,
  workdir: Any = None,
  execution: Execution | None = None,
  progress: str | Callable = 'auto',
  **changes: Any,
) -> Identification | None:
  """Ranks a list of candidates by how likely each is behind an upload, under each defense.

  Uploads are those of an audit with the same key. The list holds the private samples, and then the gallery's, whose
  labels count as known. A loss that predicts tokens needs none. The attacker knows the defense, and draws its own
  randomness.

  Args:
    key: a typed JAX key.
    scenario: what is attacked, see `gradleak.scenario`.
    defenses: as `gradleak.audit` takes them; None is no defense.
    num_trials: T.
    settings: `IdentificationSettings`; each may also be given as a keyword argument.
    workdir: a folder for results; a run that was killed goes on with the defense where it stopped.
    execution: an `Execution`: group_size (of candidates), and process (several share the defenses).
    progress: 'auto', 'bar', 'lines' or 'none'.
    **changes: fields of `IdentificationSettings` and of `Execution`.

  Returns:
    An `Identification`; None while parts of other processes are missing.

  Raises:
    UsageError: for settings that cannot be run; for a gallery without labels where they are to be known; for a batch
      whose candidates' updates do not fit.
  """
  given, how = paired(
    'gradleak.identify', changes, settings=(IdentificationSettings, settings), execution=(Execution, execution)
  )
  check(given)
  key = errors.check_key('key', key, traced=False)
  errors.check_instance('scenario', scenario, Scenario, 'a gradleak.Scenario')
  errors.check_number('trials', num_trials, low=1, high=10**6, integer=True)
  if scenario.client.loss.own:  # labels are no part of it
    given = dataclasses.replace(given, labels='known')
  chosen, copies = named_defenses(defenses), _copies(scenario, given.copies)
  listed = _listed(scenario, num_trials, given)
  config = {
    **scenario.settings,
    **dataclasses.asdict(given),
    'trials': num_trials,
    'listed': len(listed.samples),
    'listed_fingerprint': fingerprint(listed),
    'key': np.asarray(jax.random.key_data(key)).tolist(),
  }
  config |= {'unknown_labels': 'one for all rounds'} if given.labels == 'unknown' else {}  # they were one for each
  how.check('gradleak.identify', num_trials, workdir, 'group_size', 'process')
  show = callback(progress)
  size = how.size(scenario.variables)
  tables: dict[str, list] = {name: [] for name in _FILES}
  with alone(workdir, how.process):
    store = None if workdir is None else Workdir(workdir, config, {'group_size': size}, how.process[1] > 1)
    size = size if store is None else store.speed['group_size']
    run = _Run(key, scenario, given, listed, num_trials, size, show)
    try:
      rows = _all(run, store, [(one, name, alter) for name, alter in copies.items() for one in chosen], how.process)
    finally:
      end(show)
    if rows is None:
      return None
    for row in rows:
      tables[row.pop('kind')].append(row)
    described = {**config, 'defenses': {one.label: str(one.method) for one in chosen}}
    described |= {'client_draws': likelihood.DRAWS} if run.random else {}
    seconds = run.seconds if store is None else seconds_of_parts(store.path / _TIMES)
    made = Identification(described, **tables, seconds=seconds)
    if store is not None:
      _write(store.path, made)
  return made


def _all(run: '_Run', store: Workdir | None, parts: list[tuple], process: tuple[int, int]) -> list[dict] | None:
  """Returns the rows of all parts, stored or run now; None while one is missing, whose turn is another process's."""
  names = [
    f'{name}-{digest({"version": _VERSION, "defense": text(one), "label": one.label, **_assumed(one)})[:8]}'
    for one, name, _ in parts
  ]
  found: dict[str, list[dict]] = {}
  for number, name in enumerate(names):
    known = None if store is None else store.load_part(name)
    if known is not None:
      found[name] = known[0]
    elif number % process[1] == process[0]:
      started = time.monotonic()
      tables = zip(_FILES, run.under(*parts[number]), strict=True)
      found[name] = [{**row, 'kind': kind} for kind, each in tables for row in each]
      run.seconds += time.monotonic() - started
      if store is not None:
        store.save_part(name, found[name], {})
        append_time(store.path / _TIMES, part=name, seconds=time.monotonic() - started)
  for name in names:
    if name not in found:  # perhaps it has come in the meantime
      known = None if store is None else store.load_part(name)
      if known is None:
        return None
      found[name] = known[0]
  return [row for name in names for row in found[name]]


def _assumed(defense: Labelled) -> dict[str, bool]:
  """Returns what names a part, beside its defense: earlier versions assumed no projection, and no mean of draws."""
  stages = defense.method.at('step', 'upload')
  projects = any(stage.traits.projects(stage.settings) for stage in stages)
  drawn = any(stage.traits.noise and (len(stages) > 1 or stage.traits.place == 'step') for stage in stages)
  return {name: True for name, holds in (('projects', projects), ('centred', drawn)) if holds}


def load(workdir: Any) -> Identification:
  """Returns the `Identification` of a finished run from its work directory.

  Raises:
    UsageError: if the folder holds none, or a damaged file.
  """
  folder = errors.check_path('workdir', workdir)
  again = 'run launch/identify.py with this workdir again, or restore it'
  try:
    facts = sealed(folder / RESULT, again)
    tables = {name: read_json_lines(folder / file, again) for name, file in _FILES.items()}
    return Identification(facts['config'], **tables, seconds=facts['seconds'])
  except FileNotFoundError:
    raise errors.UsageError(
      f'{folder} holds no finished identification: run launch/identify.py with this workdir'
    ) from None
  except KeyError as error:
    raise damaged(folder / RESULT, error, again) from error


def _write(folder: pathlib.Path, made: Identification) -> None:
  """Writes rows, pairs and the file that seals them."""
  contents = {file: json_lines(getattr(made, name)) for name, file in _FILES.items()}
  for file, content in contents.items():
    write_atomically(folder / file, content)
  facts = {'config': made.config, 'seconds': made.seconds}
  seal(folder / RESULT, plain(facts), {file: description(content) for file, content in contents.items()})


def _copies(scenario: Scenario, text: str) -> dict[str, Callable]:
  """Returns {name: what alters the candidates}."""
  known: dict[str, Callable] = {EXACT: lambda samples: samples, **scenario.client.modality.copies}
  names = [name.strip() for name in errors.check_text('copies', text).split(',')]
  for name in names:
    errors.check_choice('copies', name, known)
  return {name: known[name] for name in dict.fromkeys(names)}


def _listed(scenario: Scenario, num_trials: int, given: IdentificationSettings) -> _List:
  """Returns the `_List`: private samples, then those of the gallery, each once, and under each label that is known."""
  count = num_trials * given.batch_size
  if count > len(scenario.samples):
    raise errors.UsageError(
      f'{num_trials} trials of {given.batch_size} need {count}, and there are {len(scenario.samples)}'
    )
  if not scenario.client.loss.own:
    scenario.client.loss.require_classes('identification')
  if scenario.targets.ndim != 1:
    raise errors.UsageError(
      f'identification is for one class of each sample, and the labels have the shape {scenario.targets.shape}'
    )
  gallery, dtype = scenario.gallery, scenario.samples.dtype
  samples = np.concatenate([scenario.samples[:count], gallery.samples.astype(dtype)])
  labels = np.concatenate([scenario.targets[:count], gallery.targets])
  known = given.labels == 'known' and not scenario.client.loss.own
  labelled = known or gallery.by_class
  names = [(sample.tobytes(), int(label) * labelled) for sample, label in zip(samples, labels, strict=True)]
  first: dict[tuple[bytes, int], int] = {}
  for i, name in enumerate(names):
    first.setdefault(name, i)
  own = np.asarray([first[name] for name in names[:count]])
  places, of = np.asarray(list(first.values())), labels if gallery.by_class else np.zeros_like(labels)
  kinds = [places[of[places] == kind] for kind in np.unique(of[own])]
  kept = np.sort(np.concatenate([kind[: max(given.candidates, np.isin(kind, own).sum())] for kind in kinds]))
  if known and np.any(labels[kept] < 0):
    raise errors.UsageError(
      "the labels of the gallery are not known: give gallery=(samples, targets), or labels='unknown'"
    )
  private = np.searchsorted(kept, own).reshape(num_trials, given.batch_size)
  others = scenario.shared if labelled else scenario.alike
  shared = None if others is None else others[:count].reshape(private.shape)
  found = _List(samples[kept], labels[kept], private, bool(gallery.by_class), shared)
  if len(found.samples) < 2:
    raise errors.UsageError('there is no candidate beside the original: give gallery=… to gradleak.scenario')
  return found


class _Run:
  """The statistics of all candidates under one defense after the other."""

  def __init__(
    self,
    key: jax.Array,
    scenario: Scenario,
    given: IdentificationSettings,
    listed: _List,
    num_trials: int,
    size: int,
    show: Callable | None,
  ):
    self.scenario, self.given, self.listed, self.size, self.show = scenario, given, listed, size, show
    self.streams, self.num_trials = Streams(key), num_trials
    self.sizes = tuple(int(np.size(leaf)) for leaf in jax.tree.leaves(scenario.variables['params']))
    self.held: dict[tuple, Any] = {}
    self.seconds = 0.0

  @functools.cached_property
  def random(self) -> bool:
    """Whether the undefended client sends different updates of one sample: it augments, drops out or shuffles."""
    bound, few = bind(NO_DEFENSE, self.scenario.context), slice(0, _TRIED)
    made = self._means(bound, likelihood.DRAWS, self.listed.samples, 'as they are', few)
    each = made.reshape(len(made), -1, likelihood.DRAWS, made.shape[-1])
    return not np.array_equal(each, np.broadcast_to(each[:, :, :1], each.shape), equal_nan=True)

  def under(self, defense: Labelled, copies: str, alter: Callable) -> tuple[list[dict], list[dict], list[dict]]:
    """Returns the rows, pairs and control runs of one defense and one kind of copies."""
    label = defense.label
    bound = bind(defense.method, self.scenario.context).sent  # a server's masks and choices are in no upload
    given = likelihood.expected(bound, self.scenario.context, self.given.batch_size)
    given = given.drawn() if self.random else given
    note(self.show, f'{label}: uploads, and what {len(self.listed.samples):,} candidates ({copies}) would send …')
    updates, masks = self._once(('uploads', label), lambda: self._uploads(label, bound, given))
    samples = np.asarray(alter(self.listed.samples), self.listed.samples.dtype)
    if self.given.batch_size > 1 or self.scenario.client.cohort > 1:
      scores = {REGRESSION: self._regression(given, updates, masks, samples, copies)}
    else:
      scores = self._statistics(given, updates, masks, samples, copies)
    facts = {'defense': label, 'copies': copies, 'model': given.model, 'rounds': updates.shape[1]}
    sent, noise = ({name: score[part] for name, score in scores.items()} for part in self._parts)
    return *_judged(sent, self.listed, facts, given.stated), _alarmed(noise, self.listed, facts)

  @property
  def _parts(self) -> tuple[slice, slice]:
    """Where the trials and the control runs stand among uploads."""
    return slice(self.num_trials), slice(self.num_trials, None)

  def _once(self, about: tuple, compute: Callable[[], Any]) -> Any:
    """Returns what is computed once for all defenses and copies, as long as all of it fits."""
    if about in self.held:
      return self.held[about]
    made = compute()
    if sum(leaf.size for leaf in jax.tree.leaves((self.held, made))) <= _LARGEST:
      self.held[about] = made
    return made

  def _uploads(self, label: str, bound: Bound, given: Any) -> tuple[np.ndarray, np.ndarray | None]:
    """Returns the uploads of all trials and control runs, float32 [T + C, R, P], and which entries are compared.

    The noise of a control run is cut to the entries that its trial sent. Where the update decides which are sent, it is
    cut to as many of its own largest ones.
    """
    several = (self.random or bound.defense.random) and not bound.held  # a candidate holds nothing
    audited = AuditSettings(batch_size=self.given.batch_size, rounds=self.given.rounds if several else 1)
    group = Group(
      self.streams, self.scenario, None, (), (Labelled(label, bound),), self.num_trials, audited, dict
    )  # fmt: skip
    with told(computing(self.show, f'uploads under {label}')):
      made = uploads(group, np.arange(self.num_trials), np.arange(self.given.controls), self.size).sent
    sent, update = made[0], _rows(made[0].update)
    stand_ins = np.arange(self.given.controls) % self.num_trials
    noise = _rows(made[1].update) if self.given.controls else update[stand_ins]
    if not given.masked:
      return np.concatenate([update, noise]), None
    declared = any(stage.traits.sparsifies == 'mask' for stage in bound.defense.stages)
    full = jax.tree.map(lambda m, u: np.broadcast_to(_widened(m, u.ndim), u.shape), sent.mask, sent.update)
    kept = _rows(full) if declared else update != 0
    cut = kept[stand_ins]
    if any(stage.traits.selects for stage in bound.defense.stages):  # their choice tells of the trial
      shape, entries = noise.shape, noise.shape[-1]
      flat = noise.reshape(-1, entries), cut.reshape(-1, entries)
      cut = likelihood.largest_as_many(*flat, self.sizes).reshape(shape)
    return np.concatenate([update, noise * cut]), np.concatenate([kept, cut])

  def _means(
    self, bound: Bound, draws: int, samples: np.ndarray, copies: str, block: slice, alike: bool = False
  ) -> np.ndarray:
    """Returns what a block of candidates would send, float32 [C, K, P]; K draws, or labels, or both.

    Where draws are `alike`, all candidates have the same ones, so that what a noise adds tells none of them apart.
    """
    classes, chosen = self.scenario.client.num_classes, samples[block]
    known = self.given.labels == 'known'
    labels = self.listed.labels[block][:, np.newaxis] if known else np.tile(np.arange(classes), (len(chosen), 1))
    count = labels.size * draws
    stream = self.streams.named('candidates' if alike else f'candidates {copies} {block.start}')
    lanes = {
      'trial': jnp.asarray(np.repeat(np.arange(labels.size), draws)),
      'key': jnp.tile(jax.random.split(stream, draws), labels.size) if alike else jax.random.split(stream, count),
      'numbers': tuple(jnp.full(count, number, jnp.float32) for number in bound.defense.numbers),
    }
    shared = {
      'variables': self.scenario.variables,
      'samples': jnp.asarray(np.repeat(chosen, labels.shape[1], axis=0)[:, np.newaxis]),
      'targets': jnp.asarray(labels.reshape(-1, 1)),
    }
    client = dataclasses.replace(self.scenario.client, cohort=1, order=None, drop_last=False)  # of one sample
    with told(computing(self.show, f'candidates under {bound.defense}')):
      sent = driver.evaluate(Send.of(bound, client), shared, lanes, Layout(self.size), unit='candidates')
    return likelihood.flat(sent.update).reshape(len(chosen), labels.shape[1] * draws, -1)

  def _bare(self, samples: np.ndarray, copies: str, block: slice) -> np.ndarray:
    """Returns the undefended updates of some candidates, see `_means`; several of a client that is random."""
    bound = bind(NO_DEFENSE, self.scenario.context)
    about = 'bare', copies, block.start, block.stop
    draws = likelihood.DRAWS if self.random else 1
    return self._once(about, lambda: self._means(bound, draws, samples, copies, block))

  def _statistics(
    self, given: Any, updates: np.ndarray, masks: np.ndarray | None, samples: np.ndarray, copies: str
  ) -> dict[str, np.ndarray]:
    """Returns {statistic: of each upload and candidate, [T, N]}, sums over the rounds.

    Unknown labels are one for all rounds: the likelihood is summed over them, and the best of another statistic counts.
    """
    trials, rounds, entries = updates.shape
    rows, kept = updates.reshape(-1, entries), None if masks is None else masks.reshape(-1, entries)
    rows, kept = likelihood.finite(rows, kept)
    pattern, counts = likelihood.patterns(rows, self.sizes)
    parts: dict[str, list[np.ndarray]] = {name: [] for name in STATISTICS}
    labels = 1 if self.given.labels == 'known' else self.scenario.client.num_classes
    step = max(1, _BLOCK // (entries * given.draws * labels))
    for start in range(0, len(samples), step):
      block = slice(start, start + step)
      own, _ = likelihood.finite(means := self._bare(samples, copies, block))
      if given.bound.defense.stages:
        means = self._means(given.bound, given.draws, samples, copies, block, given.centred)
      own, means = (each.reshape(-1, each.shape[1] // labels, entries) for each in (own, means))  # draws of a label
      each = [own[:, k] for k in range(own.shape[1])]
      means, impossible = likelihood.ruled_out(kept, means)
      likely = likelihood.log_likelihoods(given, rows, kept, means)
      scores = {
        'likelihood': likely if impossible is None else np.where(impossible, -np.inf, likely),
        'direction': np.max([likelihood.cosines(rows, kept, one) for one in each], axis=0),
        'pattern': np.max([likelihood.support(pattern, counts, one, self.sizes) for one in each], axis=0),
      }
      for name, score in scores.items():
        of_rounds = np.moveaxis(score.reshape(trials, rounds, -1, labels), 1, 0).astype(np.float64)
        over = np.logaddexp if name == 'likelihood' else np.maximum
        parts[name].append(over.reduce(functools.reduce(np.add, of_rounds), axis=-1))
    return {name: np.concatenate(found, axis=1) for name, found in parts.items()}

  def _regression(
    self, given: Any, updates: np.ndarray, masks: np.ndarray | None, samples: np.ndarray, copies: str
  ) -> np.ndarray:
    """Returns the weight of each candidate in each upload, [T, N], by non-negative least squares on bare updates.

    Where the client is random, the weight of a candidate is that of all its draws.
    """
    from scipy import optimize

    if self.given.labels == 'unknown':
      raise errors.UsageError(
        "the candidates of a batch are compared with their labels: labels='unknown' is for one sample"
      )
    if len(samples) * updates.shape[-1] * (likelihood.DRAWS if self.random else 1) > _LARGEST:
      raise errors.UsageError(
        f'the updates of {len(samples):,} candidates have {updates.shape[-1]:,} entries each, too many for a batch: '
        'list fewer candidates'
      )
    own = _differing(self._bare(samples, copies, slice(0, len(samples))), max(1, _COLUMNS // len(samples)))
    means, _ = likelihood.finite(own.reshape(-1, own.shape[-1]))
    found = []
    for trial, several in enumerate(updates):
      several, mask = likelihood.finite(several, None if masks is None else masks[trial])
      times = np.full(several.shape[1:], len(several)) if mask is None else mask.sum(axis=0)
      mean = (several if mask is None else several * mask).sum(axis=0) / np.maximum(times, 1)
      kept, variance = times > 0, given.variances
      stated = given.stated and np.all(variance > 0)
      weights = np.sqrt(times[kept] / (variance[kept] if stated else len(several)), dtype=np.float32)
      rows, target = means[:, kept] * weights, mean[kept] * weights
      gram = np.asarray(rows @ rows.T, np.float64)
      common = np.asarray(rows @ target, np.float64)
      if not gram.any() or not np.isfinite([gram.sum(), common.sum()]).all():  # nothing to compare
        found.append(np.full(len(samples), np.nan))
        continue
      gram[np.diag_indices(len(gram))] *= 1 + 1e-6
      root = np.linalg.cholesky(gram + 1e-12 * np.trace(gram) / len(gram) * np.eye(len(gram)))
      weight = optimize.nnls(root.T, np.linalg.solve(root, common))[0]
      found.append(weight.reshape(len(samples), -1).sum(axis=1))
    return np.asarray(found)


def _differing(means: np.ndarray, most: int) -> np.ndarray:
  """Returns so many draws of each candidate's updates [C, K, P]: the first, and those that are farthest from it."""
  apart = np.linalg.norm(means - means[:, :1], axis=2)
  apart[:, 0] = np.inf
  chosen = np.argsort(-apart, axis=1, kind='stable')[:, :most]
  return np.take_along_axis(means, chosen[:, :, np.newaxis], axis=1)


def _rows(tree: Tree) -> np.ndarray:
  """Returns a tree of leaves [R, T, …] as an array [T, R, P]."""
  leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]
  return np.concatenate([leaf.reshape(*leaf.shape[:2], -1) for leaf in leaves], axis=2).swapaxes(0, 1)


def _widened(mask: Any, axes: int) -> np.ndarray:
  mask = np.asarray(mask)
  return mask.reshape(*mask.shape, *[1] * (axes - mask.ndim))


def _judged(
  scores: dict[str, np.ndarray], listed: _List, facts: Mapping[str, Any], stated: bool
) -> tuple[list[dict], list[dict]]:
  """Returns the rows and pairs of one defense: ranks, posteriors, and the presence test of each statistic."""
  allowed, scores = _allowed(listed), {name: _bounded(score) for name, score in scores.items()}
  standard = {name: _standardised(score, allowed) for name, score in scores.items()}
  if len(scores) > 1:
    scores = {**scores, COMBINED: _clearest(standard, listed, allowed)}
    standard = {**standard, COMBINED: scores[COMBINED]}
  rows, pairs = [], []
  for name, score in scores.items():
    tests = _presence(standard[name], listed, allowed)
    pairs.append(plain({**facts, 'statistic': name, 'false': tests.false, 'n': tests.pairs}))
    for trial, several in enumerate(listed.private):
      for position, own in enumerate(several):
        beside = allowed[trial, position].copy()
        beside[several] = False  # the others of its batch are no wrong answers
        alike = listed.others(trial, position)
        rank = _rank(score[trial], own, beside, alike)
        posterior = None
        if stated and name == 'likelihood' and np.isfinite(score[trial, own]):
          logs = np.nan_to_num(score[trial, beside] - score[trial, own], nan=np.inf)
          posterior = float(1 / (1 + alike + np.sum(np.exp(np.minimum(logs, 700)))))
        elif stated and name == 'likelihood':
          posterior = 0.0
        row = {
          **facts,
          'statistic': name,
          'trial': trial,
          'place': position,
          'label': listed.labels[own],
          'rank': rank,
          'candidates': int(beside.sum()),
          'identified': rank == 1 and bool(beside.any()),
          'posterior': posterior,
          'p_value': tests.p_values[trial, position],
          'present': bool(tests.p_values[trial, position] <= RATE) if tests.decides else None,
        }
        rows.append(plain(row))
  return rows, pairs


def _alarmed(scores: dict[str, np.ndarray], listed: _List, facts: Mapping[str, Any]) -> list[dict]:
  """Returns how the originals of its trial are ranked by each control run, scores [C, N]."""
  allowed, found = _allowed(listed), []
  for name, score in scores.items():
    for number, row in enumerate(_bounded(score)):
      trial = number % len(listed.private)
      for place, own in enumerate(listed.private[trial]):
        beside = allowed[trial, place].copy()
        beside[listed.private[trial]] = False
        rank = _rank(row, own, beside, listed.others(trial, place))
        of = {'statistic': name, 'trial': number, 'place': place, 'rank': rank, 'candidates': int(beside.sum())}
        found.append(plain({**facts, **of, 'identified': rank == 1 and bool(beside.any())}))
  return found


def _bounded(score: np.ndarray) -> np.ndarray:
  """Returns scores, NaN for those that exceed all numbers: what has overflowed tells as little."""
  return np.where(score == np.inf, np.nan, score)


def _rank(row: np.ndarray, own: int, beside: np.ndarray, alike: int) -> int:
  """Returns the rank of a candidate, of which `alike` others are the same; a score that is not finite is the last."""
  ahead = alike + int(np.sum(~(row[beside] < row[own])))
  return 1 + max(ahead, int(not np.isfinite(row[own])))


def _allowed(listed: _List) -> np.ndarray:
  """Returns which candidates each private sample is compared with, bool [T, B, N]."""
  if not listed.kinds:
    return np.ones((*listed.private.shape, len(listed.labels)), bool)
  return listed.labels[listed.private][..., np.newaxis] == listed.labels


def _standardised(score: np.ndarray, allowed: np.ndarray) -> np.ndarray:
  """Returns scores less the median of an upload's candidates, over the 95th percentile less the median, [T, N].

  Both are of scores that are finite.
  """
  made, compared = [], np.asarray(np.any(allowed, axis=1))
  for row, of in zip(score, compared, strict=True):
    known = np.isfinite(row)
    if not np.any(of & known):
      made.append(np.full(len(row), np.nan))
      continue
    middle, high = np.quantile(row[of & known], [0.5, 0.95])
    made.append((row - middle) / max(float(high - middle), 1e-12 * max(1.0, float(np.max(np.abs(row[known]))))))
  return np.asarray(made)


def _clearest(standard: Mapping[str, np.ndarray], listed: _List, allowed: np.ndarray) -> np.ndarray:
  """Returns for each upload the scores of the statistic whose first candidate is ahead by most, [T, N].

  Being ahead is the distance of the first candidate and the second, over that of the second and the median. It is
  compared with that of the other uploads, the originals of which are taken off the list: an attacker simulates those.
  """
  ahead, usual = {}, {}
  for name, score in standard.items():
    clear, null = [], []
    for trial, several in enumerate(listed.private):
      of: np.ndarray = np.any(allowed[trial], axis=0)
      clear.append(_ahead(score[trial][of]))
      of[several] = False
      null.append(_ahead(score[trial][of]))
    ahead[name], usual[name] = np.asarray(clear), np.asarray(null)
  made = []
  for trial in range(len(listed.private)):
    known = [name for name in standard if np.isfinite(standard[name][trial]).any()] or list(standard)
    ratios = {name: ahead[name][trial] / max([*np.delete(usual[name], trial), 1e-12], default=1.0) for name in known}
    best = max(ratios, key=lambda name: ratios[name]) if len(listed.private) > 1 else known[0]
    made.append(standard[best][trial])
  return np.asarray(made)


def _ahead(scores: np.ndarray) -> float:
  """Returns how far the first of some finite scores is ahead of the second, over how far that is above the median."""
  scores = scores[np.isfinite(scores)]
  if len(scores) < 3:
    return 0.0
  second, first = np.sort(scores)[-2:]
  return float((first - second) / max(second - np.median(scores), 1e-12))


class _Tests(NamedTuple):
  """A presence test.

  Attributes:
    p_values: of the originals, [T, B].
    false: its false matches among pairs that did not calibrate it.
    pairs: how many these are.
    decides: whether there are enough pairs for `RATE`.
  """

  p_values: np.ndarray
  false: int
  pairs: int
  decides: bool


def _presence(standard: np.ndarray, listed: _List, allowed: np.ndarray) -> _Tests:
  """Returns the presence test of a statistic: is this candidate behind this upload?

  The p-value of a candidate is the fraction of the pairs of another upload and an innocent candidate that score as
  high. False matches at `RATE` are counted on odd trials, by thresholds of even ones.
  """
  innocent: np.ndarray = np.any(allowed, axis=1) & ~np.isnan(standard)
  for trial, several in enumerate(listed.private):
    innocent[trial, several] = False
  p_values = np.ones(listed.private.shape)
  for trial, several in enumerate(listed.private):
    others = innocent.copy()
    others[trial] = False
    pool = np.sort(standard[others])
    above = len(pool) - np.searchsorted(pool, standard[trial, several], side='left')
    p_values[trial] = np.where(np.isnan(standard[trial, several]), 1.0, (1 + above) / (1 + len(pool)))
  calibrating, held = standard[::2][innocent[::2]], standard[1::2][innocent[1::2]]
  if not len(calibrating) or not len(held):
    return _Tests(p_values, 0, 0, False)
  allowed_above = int(RATE * (1 + len(calibrating)))
  threshold = np.inf if allowed_above < 1 else np.sort(calibrating)[-allowed_above]
  return _Tests(p_values, int(np.sum(held > threshold)), len(held), allowed_above >= 1)
