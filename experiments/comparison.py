"""Ours beside the paper's: the cells of a table, our figures for them, verdicts, and notes that are filled from both.

No verdict and no figure is typed. `verdict` computes words such as “agrees”, and the text of a `Note` names the cells
that its figures are read from. What a whole table says of a cell is in `judgement`.
"""

import math
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from gradleak.attacks.labels import RULES
from gradleak.core import statistics
from gradleak.report.formatting import number, significant

BEST = 'best'  # of all adaptive attacks, for each upload


class Cell(NamedTuple):
  """One number of the paper, and where ours is found.

  Attributes:
    column: the heading of the part of the table, such as the dataset.
    row: the line of the table, such as the paper's name of the defense.
    metric: a key of `HEADINGS`: one of an audit's rows, or 'lpips'; of a training, one of `utility.METRICS`.
    run: a key of the experiment's `runs`.
    defense: a label of that run's defenses.
    paper: its number; several where it prints several (one per picture); None where it prints none.
    spread: the number that the paper prints after ±, a standard deviation.
    adaptive: the adaptive attack of an attacker who knows the defense, or `BEST`; None: the attacker is non-adaptive.
    minus: the run whose trials those of `run` are compared with, one by one; its metric is a gain.
    spread_n: number of images or trainings that the standard deviation is over; None where it is not known.
  """

  column: str
  row: str
  metric: str
  run: str
  defense: str
  paper: float | tuple[float, ...] | None = None
  spread: float | None = None
  adaptive: str | None = None
  minus: str | None = None
  spread_n: int | None = None


class Outcome(NamedTuple):
  """Our figure for a cell, with its 95 % interval; None where there is none.

  Attributes:
    mean, low, high: of the cell's metric; in audits, over the trials that did not diverge.
    n: number of trials, or of test samples.
    recovered: how many trials were successes beyond the control; None in trainings.
    diverged: how many have no figure.
    remark: the last column of its line.
    control: of audits, the PSNR that a run without the upload reaches, in dB; None elsewhere.
    trainings: of trainings, how many seeds the figure is of; None elsewhere.
    failed: whether the run shows nothing by itself: no trial was a success, or the model is at chance.
    untrained: of audits, whether training left the network that is attacked at chance.
    open: what too few trainings leave open, the ends; None for what `left_open` says to either side.
    values: trial, or seed -> its figure; what runs on the same uploads have in common is compared one by one.
  """

  mean: float | None
  low: float | None
  high: float | None
  n: int
  recovered: int | None
  diverged: int
  remark: str = ''
  control: float | None = None
  trainings: int | None = None
  failed: bool = False
  untrained: bool = False
  open: tuple[float, float] | None = None
  values: Mapping[int, float] = {}


LEVELS = ('instances', 'classes')  # of `gradleak.metrics.LabelScores`
CHANCE = 'chance'
GUESSES = (*RULES, CHANCE)  # the rules of label inference, and labels drawn from all classes alike
# Metric -> (heading, value -> text).
HEADINGS = {
  'psnr': ('PSNR dB', lambda value: number(value, 2)),
  'over_control': ('dB over the control', lambda value: number(value, 2)),
  'psnr_gain': ('gain in dB, paired', lambda value: number(value, 2)),
  'psnr_unclipped': ('PSNR dB (unclipped)', lambda value: number(value, 2)),
  'psnr_normalised': ('PSNR dB (normalised pixels)', lambda value: number(value, 2)),
  'oracle_psnr': ('PSNR dB (best restart by the truth)', lambda value: number(value, 2)),
  'last_psnr': ('PSNR dB (last image returned)', lambda value: number(value, 2)),
  'oracle_ssim': ('SSIM (best restart by the truth)', lambda value: number(value, 3)),
  'oracle_mse_unclipped': ('MSE (unclipped, best restart by the truth)', significant),
  'ssim': ('SSIM', lambda value: number(value, 3)),
  'pearson': ('correlation', lambda value: number(value, 2)),
  'last_ssim': ('SSIM (last image returned)', lambda value: number(value, 3)),
  'mse_unclipped': ('MSE (unclipped)', significant),
  'mse_normalised': ('MSE (normalised pixels)', significant),
  'lpips': ('LPIPS', lambda value: number(value, 3)),
  'accuracy': ('accuracy %', lambda value: number(value, 2)),
  'sensitive_accuracy': ('accuracy on sensitive samples %', lambda value: number(value, 2)),
  'accuracy_share': ('% of the undefended accuracy', lambda value: number(value, 1)),
  'overhead': ('round time, % over none', lambda value: number(value, 2)),
  'clipping_overhead': ('round time, % over no clipping', lambda value: number(value, 2)),
  'round_seconds': ('seconds of a round', lambda value: number(value, 2)),
  'train_seconds': ('training s', lambda value: number(value, 2)),
  'defense_seconds': ('defense s', lambda value: number(value, 3)),
  'parameters': ('parameters sent, millions', lambda value: number(value, 3)),
  'share_sent': ('% of the parameters', lambda value: number(value, 1)),
  'total_parameters': ('parameters at full width, millions', lambda value: number(value, 6)),
  'epsilon': ('ε (add or remove one client, all rounds)', lambda value: number(value, 2)),
  'change': ('change of the update, of its norm', lambda value: number(value, 2)),
  'identified': ('re-identified %', lambda value: number(100 * value, 1)),
  'revealed': ('samples fully revealed', number),
  'revealed_share': ('samples fully revealed %', lambda value: number(value, 1)),
  'revealed_90': ('samples at ≥ 0.9', number),
  'certified': ('images certified', number),
  'largest_error': ('largest error', significant),
  'cosine': ('cosine', lambda value: number(value, 3)),
  'objective': ('reconstruction loss', significant),
  'queries': ('queries', number),
  'alone': ('known to be alone', lambda value: number(value, 2)),
  **{f'{level}_{rule}': (rule, lambda value: number(value, 1)) for level in LEVELS for rule in GUESSES},
}

DECADE = 10.0  # dB in PSNR, a factor elsewhere
ROUNDED, EXACT = 0.005, 0.05  # fraction of the paper's figure by which ours may differ: beside an interval, without one
NORMAL = 1.96  # standard errors on either side of a mean in its 95 % interval
# Points of accuracy: a standard deviation of trainings under other seeds, which most have less of. Those of FFL, with
# clients of a few classes, have more, and ten seeds.
ONE_TRAINING = 5.0
TIMED = (
  'overhead',
  'clipping_overhead',
  'round_seconds',
  'train_seconds',
  'defense_seconds',
)  # of another machine than the paper's
ACCURACIES = ('accuracy', 'sensitive_accuracy', 'accuracy_share')
# Metric -> the width of its range, where a figure has no order of magnitude.
BOUNDED = {
  **dict.fromkeys(('ssim', 'oracle_ssim', 'last_ssim', 'lpips', 'cosine', 'alone'), 1.0),
  **dict.fromkeys((*ACCURACIES, 'share_sent', 'revealed_share'), 100.0),
}
VERDICTS = ('agrees', 'both fail', 'same order of magnitude', 'differs', 'undecided', 'no conclusion')


def verdict(cell: Cell, found: Outcome) -> str:
  """Returns how our figure stands to the paper's, one of `VERDICTS`; '' where either prints none.

  Our interval is the 95 % interval. The paper's is its mean ± 1.96 SD/√n where it prints a standard deviation SD over a
  known number n. For several figures of the paper, it is from the least to the largest; else it is the paper's figure.

  - 'undecided': our interval is wider than 10 dB of PSNR, half of the range of a bounded score, a factor of ten else.
    So are a figure of fewer than three trials, and an accuracy of as few trainings within what they leave open. So is
    one of more trainings whose interval is no narrower than that.
  - 'agrees': the intervals meet, to 0.5 % of the paper's figure, or to 0.5 of a whole number. If neither has an
    interval, the figures differ by at most 5 %. Seconds never agree, since they are of another machine.
  - 'same order of magnitude': the means differ by at most 10 dB of PSNR (a factor of ten in MSE), or a factor of ten.
    This is never said of a bounded score (SSIM, LPIPS, cosine, accuracy, shares).
  - 'differs': all else.
  """
  ours, papers = interval(cell, found), paper_interval(cell)
  if ours is None or papers is None:
    return ''
  (low, high), (least, largest) = ours, papers
  if unmeasured(found):
    return 'undecided'
  if single(cell, found) or _loose(cell, found, high - low):
    return 'undecided' if low <= largest and least <= high else 'differs'
  printed = cell.paper if isinstance(cell.paper, tuple) else (cell.paper,)
  if _wide(cell.metric, low, high):
    return 'undecided'
  slack = (EXACT if low == high and least == largest else ROUNDED) * max(map(abs, printed))
  slack = max(slack, 0.5 if all(isinstance(value, int) for value in printed) else 0.0)
  if cell.metric not in TIMED and low <= largest + slack and least - slack <= high:
    return 'agrees'
  middle = sum(printed) / len(printed)
  if 'psnr' in cell.metric:
    near = abs(found.mean - middle) <= DECADE
  else:
    small, large = sorted((found.mean, middle))
    near = cell.metric not in BOUNDED and small > 0 and large <= DECADE * small
  return 'same order of magnitude' if near else 'differs'


def single(cell: Cell, found: Outcome) -> bool:
  """Returns whether a figure is an accuracy of so few trainings that it has no interval."""
  return cell.metric in ACCURACIES and found.trainings is not None and found.trainings < statistics.MIN_RUNS


def left_open(accuracy: float, tested: int) -> float:
  """Returns the points to either side of an accuracy that too few trainings leave open, by seed and test samples."""
  share = min(max(accuracy / 100, 0.0), 1.0)
  return NORMAL * math.hypot(ONE_TRAINING, 100 * math.sqrt(share * (1 - share) / max(tested, 1)))


def _of_few(found: Outcome) -> tuple[float, float]:
  """Returns the ends of what too few trainings leave open of a figure."""
  half = left_open(found.mean, found.n)
  return found.open or (found.mean - half, found.mean + half)


def _loose(cell: Cell, found: Outcome, width: float) -> bool:
  """Returns whether the interval of an accuracy of several trainings leaves as much open as too few of them do."""
  if cell.metric not in ACCURACIES or not found.trainings:
    return False
  low, high = _of_few(found)
  return width >= high - low


def unmeasured(found: Outcome) -> bool:
  """Returns whether the noise of a figure is not known: it is of fewer than three trials of an audit."""
  return found.recovered is not None and found.low is None


def interval(cell: Cell, found: Outcome, confidence: float = 0.95) -> tuple[float, float] | None:
  """Returns the interval of our figure, None where there is none; of few trainings, what they leave open.

  It is infinite where the noise of a figure is not known, see `unmeasured`. Another confidence than 0.95 widens it as
  Student's t does. Its degrees of freedom are the trials with a figure, less one; few trainings have the normal's.
  """
  if found.mean is None:
    return None
  if unmeasured(found):
    return -math.inf, math.inf
  few = single(cell, found)
  low, high = _of_few(found) if few else (found.low, found.high)
  if low is None or high is None:
    return found.mean, found.mean
  freedom = math.inf if few else (found.trainings or len(found.values) or found.n) - 1
  if confidence == 0.95 or freedom < 1:
    return low, high
  from scipy import stats

  wider = float(stats.t.ppf((1 + confidence) / 2, freedom) / stats.t.ppf(0.975, freedom))
  return found.mean - wider * (found.mean - low), found.mean + wider * (high - found.mean)


def paper_interval(cell: Cell) -> tuple[float, float] | None:
  """Returns the interval of the paper's figure, None where it prints none."""
  if cell.paper is None:
    return None
  printed = cell.paper if isinstance(cell.paper, tuple) else (cell.paper,)
  known = cell.spread is not None and cell.spread_n is not None
  half = NORMAL * cell.spread / math.sqrt(cell.spread_n) if known else 0.0
  return min(printed) - half, max(printed) + half


def difference(
  one: tuple[Cell, Outcome], other: tuple[Cell, Outcome], confidence: float = 0.95
) -> tuple[float, float] | None:
  """Returns the interval of one of our figures less another, None where either has none.

  Trials or seeds that both have are compared one by one. Without them, or where fewer than six have all the same
  difference, it is between the intervals' ends. A figure without an interval is taken to 5 %, and one with unknown
  noise may have any difference.
  """
  if one[1].mean is None or other[1].mean is None:
    return None
  if unmeasured(one[1]) or unmeasured(other[1]):
    return -math.inf, math.inf
  common = sorted(one[1].values.keys() & other[1].values.keys())
  if len(common) >= statistics.MIN_RUNS and not single(*one) and not single(*other):
    paired = [one[1].values[key] - other[1].values[key] for key in common]
    _, low, high = statistics.difference_of_means(paired, confidence)
    if not math.isnan(low):
      return low, high
  (low, high), (least, largest) = _allowed(*one, confidence), _allowed(*other, confidence)
  return low - largest, high - least


def _allowed(cell: Cell, found: Outcome, confidence: float) -> tuple[float, float]:
  low, high = interval(cell, found, confidence)  # type: ignore[misc]
  slack = EXACT / 2 * abs(found.mean) if low == high < math.inf else 0.0  # type: ignore[arg-type]
  return low - slack, high + slack


def _wide(metric: str, low: float, high: float) -> bool:
  """Returns whether an interval is too wide to be compared."""
  if low == high:
    return False
  if 'psnr' in metric:
    return high - low > DECADE
  if metric in BOUNDED:
    return high - low > BOUNDED[metric] / 2
  return low <= 0 or high > DECADE * low


def ours_text(metric: str, found: Outcome) -> str:
  """Returns our figure as 'mean ± half the 95 % interval'; 'n/a' for LPIPS without its weights."""
  show = HEADINGS[metric][1]
  if found.mean is None:
    return 'n/a' if metric == 'lpips' else 'diverged' if found.diverged else '–'
  return show(found.mean) if found.low is None else f'{show(found.mean)} ± {show((found.high - found.low) / 2)}'


def paper_text(cell: Cell) -> str:
  """Returns the paper's number or numbers; '–' where it prints none."""
  show = HEADINGS[cell.metric][1]
  if cell.paper is None:
    return '–'
  if isinstance(cell.paper, tuple):
    return ' and '.join(map(show, cell.paper))
  return show(cell.paper) + ('' if cell.spread is None else f' ± {show(cell.spread)}')


class Note(NamedTuple):
  """A remark beside a table, for the scale and the seed that it was written for.

  Attributes:
    experiment: the name of the table.
    text: what is said; `{row | metric}` stands for our figure of a cell, `{column | row | metric}` for one of another
      column, and a last part 'paper', 'verdict', 'remark' or 'count' for the paper's figure, for what `verdict` says,
      for the last entry of the line, or for that entry up to its first semicolon.
    column: where it stands; '' below all columns.
    scale, seed: of the runs that it is about.
    weights: whether it is about weights given as a file.
    holds: what it presumes, each (place, '<' or '~', place), places as in the text: the first figure is below the
      second beyond the intervals of both, or the intervals meet.
  """

  experiment: str
  text: str
  column: str = ''
  scale: str = 'mini'
  seed: int = 0
  weights: bool = False
  holds: tuple[tuple[str, str, str], ...] = ()


PLACE = re.compile(r'\{([^{}]+)\}')
_SHOWN = {
  'ours': lambda cell, found: ours_text(cell.metric, found),
  'paper': lambda cell, found: paper_text(cell),
  'verdict': lambda cell, found: verdict(cell, found) or 'no verdict',
  'remark': lambda cell, found: found.remark,
  'count': lambda cell, found: found.remark.partition(';')[0],
}


def places(note: Note) -> list[tuple[tuple[str, str, str], str]]:
  """Returns ((column, row, metric), what is shown of it) of all places in a note's text and in what it presumes."""
  named = [*PLACE.findall(note.text), *(place for one, _, other in note.holds for place in (one, other))]
  return [_place(text, note.column) for text in named]


def _place(text: str, column: str) -> tuple[tuple[str, str, str], str]:
  parts = [part.strip() for part in text.split('|')]
  shown = parts.pop() if parts[-1] in _SHOWN else 'ours'
  return (*([column] if len(parts) == 2 else []), *parts), shown  # type: ignore[return-value]


def said(note: Note, cells: Sequence[Cell], outcomes: Sequence[Outcome]) -> str:
  """Returns the text of a note with the figures of a run, or that it does not hold for them."""
  found = by_place(cells, outcomes)

  def figure(text: str) -> str:
    place, shown = _place(text, note.column)
    return _SHOWN[shown](*found[place])

  for one, relation, other in _failing(note, found):
    wanted = 'below' if relation == '<' else 'about the same as'
    return (
      f'A note of this table does not hold for these figures: it needs “{one}” ({figure(one)}) to be {wanted} '
      f'“{other}” ({figure(other)}).'
    )
  return PLACE.sub(lambda match: figure(match[1]), note.text)


def holds(note: Note, cells: Sequence[Cell], outcomes: Sequence[Outcome]) -> bool:
  """Returns whether what a note presumes is so in a run."""
  return not _failing(note, by_place(cells, outcomes))


def explained(note: Note, cell: Cell) -> bool:
  """Returns whether a note is about a figure: of its column, and of a metric that the note names, if it names any."""
  named = {(column, metric) for (column, _, metric), _ in places(note)}
  return (cell.column, cell.metric) in named if named else note.column in ('', cell.column)


def by_place(cells: Sequence[Cell], outcomes: Sequence[Outcome]) -> dict[tuple, tuple[Cell, Outcome]]:
  """Returns (column, row, metric) -> a cell and its outcome."""
  return {(cell.column, cell.row, cell.metric): (cell, one) for cell, one in zip(cells, outcomes, strict=True)}


def _failing(note: Note, found: dict[tuple, tuple[Cell, Outcome]]) -> list[tuple[str, str, str]]:
  """Returns what a note presumes and is not so."""
  return [
    (one, relation, other)
    for one, relation, other in note.holds
    if not _related(relation, *(_interval(*found[place], shown) for place, shown in _pair(one, other, note.column)))
  ]


def fitting(notes: Sequence[Note], scale: str, seed: int, weights: bool) -> list[Note]:
  """Returns the notes that were written for such a run."""
  return [note for note in notes if (note.scale, note.seed, note.weights) == (scale, seed, weights)]


def _pair(one: str, other: str, column: str) -> list[tuple[tuple[str, str, str], str]]:
  return [_place(text, column) for text in (one, other)]


def _interval(cell: Cell, found: Outcome, shown: str) -> tuple[float, float] | None:
  """Returns the interval of our figure or of the 'paper'’s, None where there is none, or its noise is not known."""
  if shown == 'paper':
    return paper_interval(cell)
  return None if unmeasured(found) else interval(cell, found)


def _related(relation: str, one: tuple[float, float] | None, other: tuple[float, float] | None) -> bool:
  """Returns whether '<' or '~' holds between two intervals; neither does where one is missing."""
  if one is None or other is None:
    return False
  return one[1] < other[0] if relation == '<' else one[0] <= other[1] and other[0] <= one[1]


def remarks(
  notes: Sequence[Note], cells: Sequence[Cell], outcomes: Sequence[Outcome], scale: str, seed: int, weights: bool
) -> dict[str, list[str]]:
  """Returns column -> what stands below it; '' -> what stands below all of them.

  Args:
    notes: of one experiment.
    cells, outcomes: of the experiment, in the same order.
    scale, seed, weights: of the run at hand. Notes that were written for others are not shown; where none is left, this
      is said.
  """
  found: dict[str, list[str]] = {}
  for note in fitting(notes, scale, seed, weights):
    found.setdefault(note.column, []).append(said(note, cells, outcomes))
  if not found:
    at_scale = [note for note in notes if note.scale == scale]
    missing = 'scale' if not at_scale else 'seed' if seed not in {note.seed for note in at_scale} else 'model'
    found[''] = [f'No note at this {missing}.']
  return found
