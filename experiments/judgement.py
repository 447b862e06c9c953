"""What a whole table says of its cells: which of them count, in which order they stand, and whether a claim holds.

`comparison.verdict` sets one figure beside another; here the rest of the table is looked at. A defense is not judged
where the undefended attack fails. Two reconstructions that show nothing agree in no more than that. A figure that
follows from the declaration, or stands in an earlier table, does not count.
"""

import collections
import dataclasses
import functools
import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from experiments import comparison
from experiments.comparison import Cell, Outcome
from experiments.experiment import NON_ADAPTIVE, Experiment
from experiments.results import declared
from experiments.study import Study

BLIND = 0.1  # SSIM, at most, of a reconstruction in which nothing is seen
UNCOUNTED = ('by construction', 'repeated')
NOT_SHOWN = 'not shown'
COUNTED = (*comparison.VERDICTS, *UNCOUNTED, NOT_SHOWN)
PICTURES = ('psnr', 'ssim', 'mse', 'lpips')  # what begins or ends the names of the metrics of a reconstruction
# Metrics that mean the same whether or not an attack succeeds, or a model learns.
UNCONDITIONAL = (*comparison.TIMED, 'cosine', 'queries', 'parameters', 'share_sent', 'total_parameters', 'epsilon')


def statuses(experiment: Experiment, outcomes: Sequence[Outcome], scale: str) -> list[str]:
  """Returns of each cell one of `COUNTED`; '' where the paper prints no figure. It does not know of other tables.

  - 'by construction' if the figure follows from the declaration.
  - 'no conclusion' if the undefended run of its column fails (`conclusive`).
  - 'both fail' if neither reconstruction shows anything of the image, or ours shows nothing and agrees.
  - What `comparison.verdict` says, otherwise.

  Args:
    experiment: the `Experiment`.
    outcomes: one per cell, in their order.
    scale: of the run.
  """
  beside, given = lines(experiment.cells, outcomes), []
  allowed = conclusive(experiment, outcomes, scale)
  for cell, found, conclusion in zip(experiment.cells, outcomes, allowed, strict=True):
    status, line = comparison.verdict(cell, found), beside[cell.column, cell.row]
    if cell.paper is None:
      status = ''
    elif not status:
      status = NOT_SHOWN
    elif experiment.runs[cell.run].scaled(scale).follows(cell):
      status = 'by construction'
    elif not conclusion:
      status = 'no conclusion'
    elif pictured(cell.metric) and nothing(line) and (status == 'agrees' or printed_nothing(line)):
      status = 'both fail'
    given.append(status)
  return given


def conclusive(experiment: Experiment, outcomes: Sequence[Outcome], scale: str) -> list[bool]:
  """Returns of each cell whether its table allows a conclusion: nothing is `blocking` it."""
  return [not found for found in blocking(experiment, outcomes, scale)]


def blocking(experiment: Experiment, outcomes: Sequence[Outcome], scale: str) -> list[list[tuple[Cell, Outcome]]]:
  """Returns of each cell the undefended cells whose failure leaves what it says of a defense open.

  A defense is judged beside the undefended cells of the same run, column and metric, or of other runs where its own has
  none. A run fails if no image is recovered, or if its model is at chance. No `UNCONDITIONAL` metric needs one.
  """
  bare = undefended(experiment, scale)
  beside = collections.defaultdict(list)
  for cell, found, alone in zip(experiment.cells, outcomes, bare, strict=True):
    if alone:
      beside[cell.column, cell.metric].append((cell, found))

  def failing(cell: Cell) -> list[tuple[Cell, Outcome]]:
    known = beside[cell.column, cell.metric]
    own = [each for each in known if each[0].run == cell.run] or known
    return [each for each in own if each[1].failed]

  return [
    [] if alone or cell.metric in UNCONDITIONAL else failing(cell)
    for cell, alone in zip(experiment.cells, bare, strict=True)
  ]


def undefended(experiment: Experiment, scale: str) -> list[bool]:
  """Returns of each cell whether it is about a run without a defense."""
  texts = {name: run.scaled(scale).texts() for name, run in experiment.runs.items()}
  return [cell.adaptive is None and texts[cell.run][cell.defense] == 'none' for cell in experiment.cells]


def pictured(metric: str) -> bool:
  """Returns whether a metric is one of a reconstruction."""
  return any(name in metric.split('_') for name in PICTURES)


def nothing(line: Sequence[tuple[Cell, Outcome]]) -> bool:
  """Returns whether our reconstructions of a line show nothing: no success, and an SSIM or PSNR not beyond noise.

  An SSIM is beyond it if its 95 % interval is above 0.1, or its mean where no interval is known. The best of several
  pictures counts. Where there is no SSIM, a PSNR is if its mean is above that of a run without the upload.

  Args:
    line: the cells of one column and row, with their outcomes.
  """
  known = [(cell, one) for cell, one in line if one.mean is not None]
  if any(one.recovered for _, one in known):
    return False
  ssims = [one.mean if one.low is None else one.low for cell, one in known if cell.metric.endswith('ssim')]
  below = [one.mean <= one.control for cell, one in known if 'psnr' in cell.metric and one.control is not None]
  return max(ssims) <= BLIND if ssims else bool(below) and all(below)


def printed_nothing(line: Sequence[tuple[Cell, Outcome]]) -> bool:
  """Returns whether the paper's figures of a line show nothing: an SSIM of at most 0.1, or a PSNR below our control.

  The papers print no control. The best of several pictures counts.
  """
  printed = [
    (cell, one, max(cell.paper) if isinstance(cell.paper, tuple) else cell.paper)
    for cell, one in line
    if cell.paper is not None
  ]
  ssims = [value for cell, _, value in printed if cell.metric.endswith('ssim')]
  below = [value <= one.control for cell, one, value in printed if 'psnr' in cell.metric and one.control is not None]
  return max(ssims) <= BLIND if ssims else bool(below) and all(below)


def lines(cells: Sequence[Cell], outcomes: Sequence[Outcome]) -> dict[tuple[str, str], list[tuple[Cell, Outcome]]]:
  """Returns (column, row) -> its cells with their outcomes."""
  found = collections.defaultdict(list)
  for cell, one in zip(cells, outcomes, strict=True):
    found[cell.column, cell.row].append((cell, one))
  return found


@dataclasses.dataclass(frozen=True, eq=False)
class Judged:
  """A table beside the paper's.

  Attributes:
    experiment: the `Experiment`.
    outcomes: one per cell, or None where the table was not run.
    statuses: of each cell, see `statuses`; those of repeated cells are 'repeated'.
    scale: of the run.
  """

  experiment: Experiment
  outcomes: Sequence[Outcome] | None
  statuses: Sequence[str]
  scale: str

  def counts(self) -> dict[str, int]:
    """Returns status -> number of the paper's figures with it."""
    found = collections.Counter(self.statuses)
    return {status: found[status] for status in COUNTED}

  @functools.cached_property
  def order(self) -> 'Order':
    """How the methods of the table are ordered, see the function `order`."""
    return order(self)


def judge(found: Mapping[str, tuple[Experiment, Sequence[Outcome] | None]], scale: str) -> dict[str, Judged]:
  """Returns name -> `Judged` of all tables; a cell that stands in an earlier one with the same figure is repeated.

  The same run and method beside the same figure of the paper count once, in the table where they stand first. Equal
  settings decide, or equal figures: a training that was run again for another table is no second agreement.

  Args:
    found: name of a table -> its `Experiment`, and one outcome per cell, or None where it was not run.
    scale: of the runs.
  """
  seen: set[object] = set()
  judged = {}
  for name, (experiment, outcomes) in found.items():
    if outcomes is None:
      given = ['' if cell.paper is None else NOT_SHOWN for cell in experiment.cells]
    else:
      given, keys = statuses(experiment, outcomes, scale), _keys(experiment, outcomes, scale)
      counting = [status not in ('', NOT_SHOWN, 'by construction') for status in given]
      known = [one and not seen.isdisjoint(key) for one, key in zip(counting, keys, strict=True)]
      seen.update(*(key for one, key in zip(counting, keys, strict=True) if one))
      given = ['repeated' if again else status for again, status in zip(known, given, strict=True)]
    judged[name] = Judged(experiment, outcomes, given, scale)
  return judged


def _keys(experiment: Experiment, outcomes: Sequence[Outcome], scale: str) -> list[set[object]]:
  """Returns of each cell what it is known by beside the paper's figure: the settings of its run, and our interval."""
  runs = {name: run.scaled(scale) for name, run in experiment.runs.items()}
  settings, texts = ({name: part(run) for name, run in runs.items()} for part in (_settings, lambda run: run.texts()))
  keys: list[set[object]] = []
  for cell, found in zip(experiment.cells, outcomes, strict=True):
    method = texts[cell.run][cell.defense], cell.adaptive
    keys.append({(cell.metric, cell.paper, settings[cell.run], method)})
    if found.low is not None and found.low != found.high:
      keys[-1].add((cell.metric, cell.paper, found.mean, found.low, found.high, found.n))
  return keys


def _settings(run: Study) -> str:
  """Returns what the rows of a run depend on, beside the method of each; how many there are is no part of it."""
  known = run.replaced(controls=NON_ADAPTIVE.controls) if hasattr(run, 'settings') else run
  found = {name: value for name, value in declared(known).items() if name not in run.apart}
  return repr((type(run).__name__, sorted((name, repr(value)) for name, value in found.items())))


ORDERS = ('as in the paper', 'opposite', 'smaller than in the paper', 'undecided')


class Order(NamedTuple):
  """How the lines of tables are ordered, here and in the papers.

  Attributes:
    pairs: one of `ORDERS` -> number of pairs of methods in it.
    undefended: the same of pairs of a method and the undefended run.
    taus: Kendall's τ-b of each group of at least three methods.
    carried: as `pairs`, without those that carry no order: both show nothing, or the undefended attack fails.
    unsettled: how many of the opposite `pairs` are not so under another reading of the paper.
    unordered: number of pairs left out, which the paper itself does not order: see `_differs`.
    needed: of each of `pairs`, at most how many times the trials give it an order if its difference stays as it is: 1
      where it has one, infinity where no number does.
  """

  pairs: dict[str, int]
  undefended: dict[str, int]
  taus: list[float]
  carried: dict[str, int]
  unsettled: int
  unordered: int
  needed: list[float]

  def tau(self) -> float | None:
    """The median τ-b, None without a group."""
    return statistics.median(self.taus) if self.taus else None

  def times(self) -> float | None:
    """At most how many times the trials bring half of the pairs beyond noise, see `needed`; None without a pair."""
    return sorted(self.needed)[(len(self.needed) - 1) // 2] if self.needed else None


def order(judged: Judged) -> Order:
  """Returns how the methods of a table are ordered, by column and metric.

  A pair has an order where the 95 % interval of our difference leaves out 0. An interval that covers 0 and leaves out
  the paper's difference shows a 'smaller' one. All else is 'undecided'. Methods are the lines with a printed figure but
  the undefended one, which stands apart. Pairs that the paper does not order, figures that follow from the declaration,
  and pairs that stand in an earlier table, are left out.
  """
  from scipy import stats

  pairs, apart, carried = (dict.fromkeys(ORDERS, 0) for _ in range(3))
  taus: list[float] = []
  needed: list[float] = []
  unsettled = unordered = 0
  if judged.outcomes is None:
    return Order(pairs, apart, taus, carried, unsettled, unordered, needed)
  beside = comparison.by_place(judged.experiment.cells, judged.outcomes)

  def read(cell: Cell, found: Outcome) -> list[tuple[Cell, Outcome]]:
    places = [(cell.column, row, cell.metric) for row in judged.experiment.readings.get(cell.row, ())]
    return [(cell, found), *((cell, beside[place][1]) for place in places if place in beside)]

  groups = collections.defaultdict(list)
  bare = undefended(judged.experiment, judged.scale)
  for cell, found, status, alone in zip(judged.experiment.cells, judged.outcomes, judged.statuses, bare, strict=True):
    if status not in ('', NOT_SHOWN, 'by construction'):
      groups[cell.column, cell.metric].append((cell, found, status, alone))
  for members in groups.values():
    mixed = not all(alone for *_, alone in members)  # else the lines are settings, none of them with a defense
    for index, (one, ours, status, alone) in enumerate(members):
      for other, others, second, also in members[index + 1 :]:
        if status == second == 'repeated':
          continue
        if not _differs(one, other):
          unordered += not (mixed and (alone or also))
          continue
        kind, trials = _pair((one, ours), (other, others))
        if mixed and (alone or also):
          apart[kind] += 1
          continue
        pairs[kind] += 1
        ways = itertools.product(read(one, ours), read(other, others)) if kind == 'opposite' else ()
        unsettled += any(_pair(*way)[0] != kind for way in ways if way[0][1] is not way[1][1])
        needed.append(trials)
        carried[kind] += 'no conclusion' not in (status, second) and (status, second) != ('both fail',) * 2
    methods = [(_middle(cell), found.mean) for cell, found, _, alone in members if not (mixed and alone)]
    if len(methods) > 2 and not all(status == 'repeated' for *_, status, _ in members):
      tau = float(stats.kendalltau(*zip(*methods, strict=True)).statistic)
      taus += [] if math.isnan(tau) else [tau]
  return Order(pairs, apart, taus, carried, unsettled, unordered, needed)


def total(orders: Iterable[Order]) -> Order:
  """Returns the `Order` of several tables together."""
  listed = list(orders)

  def added(name: str) -> dict[str, int]:
    return {kind: sum(getattr(one, name)[kind] for one in listed) for kind in ORDERS}

  taus, needed = ([value for one in listed for value in getattr(one, name)] for name in ('taus', 'needed'))
  unsettled, unordered = (sum(getattr(one, name) for one in listed) for name in ('unsettled', 'unordered'))
  return Order(added('pairs'), added('undefended'), taus, added('carried'), unsettled, unordered, needed)


def _differs(one: Cell, other: Cell) -> bool:
  """Returns whether the paper orders two of its figures: they are not equal, and their intervals there do not meet."""
  (low, high), (least, largest) = (comparison.paper_interval(cell) for cell in (one, other))  # type: ignore[misc]
  noisy = all(cell.spread is not None and cell.spread_n is not None for cell in (one, other))
  return _middle(one) != _middle(other) and not (noisy and low <= largest and least <= high)


def _pair(one: tuple[Cell, Outcome], other: tuple[Cell, Outcome]) -> tuple[str, float]:
  """Returns one of `ORDERS` for two lines that differ, and of `Order.needed`: an interval is as wide as 1/√trials."""
  (low, high), (least, largest) = (comparison.paper_interval(cell) for cell, _ in (one, other))  # type: ignore[misc]
  paper = _middle(one[0]) - _middle(other[0])
  ours = comparison.difference(one, other)
  if ours is None:
    return 'undecided', math.inf
  if ours[0] <= 0 <= ours[1]:
    middle, half = sum(ours) / 2, (ours[1] - ours[0]) / 2
    excluded = ours[1] < low - largest or high - least < ours[0]
    trials = (half / middle) ** 2 if middle and math.isfinite(half) else math.inf
    return 'smaller than in the paper' if excluded else 'undecided', trials
  return 'as in the paper' if (ours[0] > 0) == (paper > 0) else 'opposite', 1.0


def _middle(cell: Cell) -> float:
  printed = cell.paper if isinstance(cell.paper, tuple) else (cell.paper,)
  return sum(printed) / len(printed)  # type: ignore[arg-type]
