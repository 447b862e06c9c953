"""What the papers claim of each table, as orders between its cells, and whether our rows bear it out.

The sentence of a claim is an experiment's `shows`; `CLAIMS` says which figures it orders, and `judged` compares ours.
No verdict is typed: a claim that the rows contradict is said to not hold.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from experiments import comparison, judgement
from experiments.comparison import HEADINGS, Cell, Outcome, ours_text
from experiments.deep import TABLE_4
from experiments.experiment import Experiment
from experiments.ffl import TABLES_3_TO_5

OURS = 'Not a table of a paper'  # what begins the `paper` of a table without one
SAID = ('holds', 'does not hold', 'undecided')
SHOWN = 3  # contradicted comparisons that are written out


class Ordered(NamedTuple):
  """One comparison that a claim makes: a figure is below another one.

  Attributes:
    one, other: 'column | row | metric' of two cells; or a number in place of one of them.
    margin: by which `one` may be above `other`, in the metric's unit.
    alike: the two differ by at most `margin` in either direction, instead.
  """

  one: str
  other: str
  margin: float = 0.0
  alike: bool = False


def judged(
  experiment: Experiment, outcomes: Sequence[Outcome], scale: str, claim: Sequence[Ordered]
) -> dict[Ordered, str]:
  """Returns of each comparison one of `SAID`.

  It holds where the whole 95 % interval of the difference says so. A single comparison contradicts a claim. So it does
  not hold where an interval at 1 − 0.05/m says so, with m comparisons in the claim (Bonferroni). All else is undecided.
  So is what is said of a figure that we do not have, or what needs an undefended attack that works, see `lacking`. So
  is the order of two reconstructions that show nothing, see `unseen`.
  """
  found = comparison.by_place(experiment.cells, outcomes)
  lacks, blank = lacking(experiment, outcomes, scale, claim), unseen(experiment, outcomes, claim)
  return {one: SAID[2] if lacks[one] or one in blank else _word(found, one, len(claim)) for one in claim}


def unseen(experiment: Experiment, outcomes: Sequence[Outcome], claim: Sequence[Ordered]) -> set[Ordered]:
  """Returns the orders of two reconstructions of which neither shows anything, see `judgement.nothing`."""
  lines = judgement.lines(experiment.cells, outcomes)

  def blank(text: str) -> bool:
    place = _place(text)
    return not isinstance(place, float) and judgement.pictured(place[2]) and judgement.nothing(lines[place[:2]])

  return {one for one in claim if not one.alike and blank(one.one) and blank(one.other)}


def lacking(
  experiment: Experiment, outcomes: Sequence[Outcome], scale: str, claim: Sequence[Ordered]
) -> dict[Ordered, list[tuple[Cell, Outcome]]]:
  """Returns of each comparison the undefended runs that fail, where it needs one that works; [] where it needs none.

  What is said of a defense needs those that `judgement.blocking` names. A figure of a reconstruction may be below a
  bound, or two may be alike, because nothing is seen anywhere. This needs one that works in the table; and a
  network that training took beyond chance, if it was to be trained.
  """
  found = comparison.by_place(experiment.cells, outcomes)
  blocked = dict(zip(found, judgement.blocking(experiment, outcomes, scale), strict=True))
  alone = [each for each, bare in zip(found.values(), judgement.undefended(experiment, scale), strict=True) if bare]
  failing = [(cell, outcome) for cell, outcome in alone if outcome.failed]
  lacks = {}
  for one in claim:
    named = places([one])
    metrics = {metric for _, _, metric in named}
    needed = {each[0]: each for place in named for each in blocked[place]}
    if needed:
      lacks[one] = list(needed.values())
    else:
      idle = any(found[place][1].failed and found[place][1].untrained for place in named)
      blind = (idle or len(failing) == len(alone)) and all(map(judgement.pictured, metrics))
      led = blind and _blind(one) == _word(found, one, len(claim))
      lacks[one] = [each for each in failing if each[0].metric in metrics] if led else []
  return lacks


def _blind(one: Ordered) -> str:
  """Returns which of `SAID` an attack that shows nothing leads to; '' for an order of two figures."""
  if one.alike or isinstance(_place(one.other), float):
    return SAID[0]
  return SAID[1] if isinstance(_place(one.one), float) else ''


def _word(found: dict, one: Ordered, count: int) -> str:
  """Returns which of `SAID` the intervals of a difference are; `count`: of the comparisons in its claim."""
  low, high = _difference(found, one)
  below = high <= one.margin if one.margin or one.alike else high < 0
  if below and (low >= -one.margin or not one.alike):
    return SAID[0]
  low, high = _difference(found, one, 1 - 0.05 / count)
  return SAID[1] if low > one.margin or (one.alike and high < -one.margin) else SAID[2]


def whole(said: Iterable[str]) -> str:
  """Returns one of `SAID` for a claim of several comparisons: it holds if all do, and does not if one does not."""
  listed = list(said)
  return SAID[1] if SAID[1] in listed else SAID[2] if SAID[2] in listed else SAID[0]


def pair(experiment: Experiment, outcomes: Sequence[Outcome] | None, scale: str) -> dict[str, str]:
  """Returns who claims -> the claim, and 'Here' -> what our rows say of it; empty for a table that makes no claim.

  Args:
    experiment: the `Experiment`.
    outcomes: one per cell, or None where it was not run.
    scale: of the run.
  """
  claim = CLAIMS.get(experiment.name, ())
  if not claim:
    return {}
  who = 'Claim' if experiment.paper.startswith(OURS) else 'The paper claims'
  return {who: experiment.shows, 'Here': _sentence(experiment, outcomes, scale, claim)}


def paragraphs(experiment: Experiment, outcomes: Sequence[Outcome] | None, scale: str) -> list[str]:
  """Returns what `pair` does, as sentences; a table that makes no claim only says what it shows."""
  said = pair(experiment, outcomes, scale)
  return [f'{who}: {what}' for who, what in said.items()] or [experiment.shows]


def _sentence(experiment: Experiment, outcomes: Sequence[Outcome] | None, scale: str, claim: Sequence[Ordered]) -> str:
  if outcomes is None:
    return 'not compared at this scale.'
  said = judged(experiment, outcomes, scale, claim)
  counts = {word: list(said.values()).count(word) for word in SAID}
  text = f'{whole(said.values())}. Of its comparisons {numbered(counts, "not")}.'
  lacks = lacking(experiment, outcomes, scale, claim)
  reason, blank = why(lacks), sum(not lacks[one] for one in unseen(experiment, outcomes, claim))
  text += f' {reason}' if reason else ''
  text += f' In {blank} of them neither side shows anything of an image.' if blank else ''
  found = comparison.by_place(experiment.cells, outcomes)
  against = [_written(found, one) for one, word in said.items() if word == SAID[1]]
  more = f' And {len(against) - SHOWN} more.' if len(against) > SHOWN else ''
  return ' '.join([text, *against[:SHOWN]]) + more


def numbered(counts: Mapping[str, int], fails: str = 'not hold') -> str:
  """Returns how many hold, do not, and are undecided, in words; `counts` are by `SAID`."""
  verbs = ('holds', 'hold'), (f'does {fails}', f'do {fails}'), ('is undecided', 'are undecided')
  return ', '.join(f'{counts[word]} {verb[counts[word] != 1]}' for word, verb in zip(SAID, verbs, strict=True))


def why(lacks: Mapping[Ordered, Sequence[tuple[Cell, Outcome]]]) -> str:
  """Returns the sentence on the undefended runs whose failure leaves comparisons undecided; '' for none."""
  failing = dict.fromkeys(
    (cell.column, cell.row, one.recovered, one.remark) for of in lacks.values() for cell, one in of
  )
  if not failing:
    return ''
  what = 'the model is at chance' if any(count is None for *_, count, _ in failing) else 'the attack recovers nothing'
  named = [f'{column}, {row} ({remark})' for column, row, _, remark in failing]
  more = f' and {len(named) - SHOWN} more' if len(named) > SHOWN else ''
  return f'Even without a defense {what} here: {"; ".join(named[:SHOWN])}{more}.'


def _written(found: dict, one: Ordered) -> str:
  """Returns the sentence on a comparison that does not hold."""
  places = [_place(text) for text in (one.one, one.other)]
  cell = next(found[place][0] for place in places if not isinstance(place, float))
  (first, ours), (second, others) = (_side(found, place, cell.column) for place in places)
  wanted = f'within {one.margin:g} of' if one.alike else f'at most {one.margin:g} above' if one.margin else 'below'
  return f'{cell.column}, {HEADINGS[cell.metric][0]}: {first} ({ours}) is not {wanted} {second} ({others}).'


def _side(found: dict, place: tuple[str, str, str] | float, column: str) -> tuple[str, str]:
  if isinstance(place, float):
    return 'the bound', f'{place:g}'
  cell, outcome = found[place]
  return cell.row if cell.column == column else f'{cell.row} of {cell.column}', ours_text(cell.metric, outcome)


def _difference(found: dict, one: Ordered, confidence: float = 0.95) -> tuple[float, float]:
  """Returns the interval of the first side less the second; an infinite one where a figure is missing."""
  nothing = -float('inf'), float('inf')
  places = [_place(text) for text in (one.one, one.other)]
  if not any(isinstance(place, float) for place in places):
    return comparison.difference(*(found[place] for place in places), confidence) or nothing
  sides = [_exact(place) if isinstance(place, float) else found[place] for place in places]
  bounds = [comparison.interval(*side, confidence) for side in sides]
  if None in bounds:
    return nothing
  (low, high), (least, largest) = bounds  # type: ignore[misc]
  return low - largest, high - least


def _exact(value: float) -> tuple[Cell, Outcome]:
  return Cell('', '', '', '', ''), Outcome(value, None, None, 0, None, 0)


def _place(text: str) -> tuple[str, str, str] | float:
  """Returns a cell's (column, row, metric), or a number."""
  column, *rest = (part.strip() for part in text.split(' | '))
  return (column, *rest) if rest else float(column)  # type: ignore[return-value]


def places(claim: Sequence[Ordered]) -> list[tuple[str, str, str]]:
  """Returns (column, row, metric) of all cells that a claim names."""
  named = [_place(text) for one in claim for text in (one.one, one.other)]
  return [place for place in named if not isinstance(place, float)]


def _below(columns: Iterable[str], metrics: Iterable[str], lower: Iterable[str], upper: Iterable[str]):
  """Returns that each of the lower rows is below each of the upper ones, in each column and metric."""
  lower, upper, metrics = list(lower), list(upper), list(metrics)
  return tuple(
    Ordered(f'{column} | {one} | {metric}', f'{column} | {other} | {metric}')
    for column in columns
    for metric in metrics
    for one in lower
    for other in upper
  )


def _alike(columns, metric, one, other, margin):
  return tuple(Ordered(f'{c} | {one} | {metric}', f'{c} | {other} | {metric}', margin, True) for c in columns)


def _costs(columns, metric, dear, cheap, margin):
  """Returns that a row has at most `margin` less than another."""
  return tuple(Ordered(f'{c} | {cheap} | {metric}', f'{c} | {dear} | {metric}', margin) for c in columns)


_THREE = ('MNIST', 'Fashion-MNIST', 'CIFAR-10')
_TWO = ('MNIST', 'CIFAR-10')
_SEEN = ('psnr', 'ssim')
_GRADDEFENSE = ('Ours', 'GC', 'DP-G', 'DP-L', 'PLD')
_OUTPOST = ('GC', 'DP', 'Soteria', 'GD', 'OUTPOST')
_OTHERS = ('DP-Gaussian', 'Prune', 'Soteria')
_GGL, _TINY = 'faces for CelebA, GGL', 'CIFAR-10 for TinyImageNet'
_IMPRINT = f'{_TINY}, Imprint'
_STARTS = ('MNIST, mixup', 'MNIST', 'noise, mixup', 'noise')
_FFL = (
  *(f'FFL-random r = {r}' for r in (0.2,)),
  *(f'DP δ = {d}' for d in ('1e-4', '1e-5', '1e-6')),
  *(f'DGC {r}' for r in (0.05, 0.1, 0.2)),
)
_DP = ('DP in training', 'a thousandth of its noise in training')


def _modes(network):
  """Returns the claim of table IV, for the rows in which the paper's untrained network shows more in eval mode."""
  eval_mode, train = ({state: f'{mode} mode, {state}' for state in ('untrained', 'pretrained')} for mode in _MODES)
  rows = {f'E = {e}, n = {n}, B = {b}': figures[network] for (e, n, b), figures in TABLE_4.items()}
  return (
    *(
      Ordered(f'{train["untrained"]} | {row} | psnr', f'{eval_mode["untrained"]} | {row} | psnr')
      for row, printed in rows.items()
      if printed[0] > printed[2]
    ),
    *(
      Ordered(f'{train["pretrained"]} | {row} | psnr', f'{eval_mode["pretrained"]} | {row} | psnr', 2.0, True)
      for row in rows
    ),
  )


_MODES = ('eval', 'train')


def _scenario(stronger):
  """Returns the claim of a scenario of table III; `stronger`: whether the paper's csDLG shows more than its DLG."""
  return (
    *_below(('DLG', 'csDLG'), ['oracle_ssim'], _OUTPOST, ['none']),
    *((Ordered('DLG | none | oracle_ssim', 'csDLG | none | oracle_ssim'),) if stronger else ()),
  )


def _accuracies(*columns, kept):
  return (
    *_costs(kept, 'accuracy', 'Ours', 'none', 2.0),
    *(Ordered(f'{column} | Ours | overhead', '10') for column in columns),
    *_below(columns, ['accuracy'], ('GC', 'DP-G', 'DP-L'), ['Ours']),
  )


def _fragments(*columns, metric='psnr_unclipped'):
  return _below(columns, [metric], ['FFL r = 0.2'], _FFL)


def _cheap(place='Tables 4 and 5: accuracy'):
  return (
    *_costs([place], 'accuracy', 'FFL r = 0.6', 'FFL r = 1.0', 5.0),
    Ordered('Table 3: seconds of a round | FFL r = 0.6 | overhead', '10'),
  )


def _figure_3(column):
  return (
    Ordered('90', f'{column} | OUTPOST | accuracy_share'),
    *_below([column], ['overhead'], ['OUTPOST'], ['Soteria', 'GD']),
  )


def _learned():
  return tuple(
    Ordered(f'learns from undefended uploads | {row} | psnr', f'learns through the defense | {row} | psnr')
    for row in ('Gaussian noise', 'pruning', 'Soteria', 'GradDefense', 'OUTPOST', 'DCS²')
  )


_FISHED = 'class fishing | {} | cosine'
# Name of a table -> what its claim orders.
CLAIMS: dict[str, tuple[Ordered, ...]] = {
  'graddefense_1': _below((*_THREE, 'CIFAR-100'), _SEEN, ['[C] perturbed'], ['[D] muted']),
  **{
    f'graddefense_2{part}': (
      *_below(_THREE, ['ssim'], _GRADDEFENSE, ['none', 'PLD, muted']),
    )
    for part in 'ab'
  },
  'graddefense_3a': (
    *_below(_THREE, _SEEN, ['sensitivity'], ['layer size']),
    *_below(_THREE, _SEEN, ['sensitivity, σ = 0.001'], ['layer size, σ = 0.001']),
  ),
  'graddefense_3b': _alike(_TWO, 'psnr', 'root 100', 'root 400', 1.0),
  'graddefense_3c': _alike(_TWO, 'psnr', 'bias 0.1', 'bias 0.4', 1.0),
  'graddefense_3e': _below(_THREE, _SEEN, ['clipping'], ['no clipping']),
  'graddefense_2a_accuracy': _accuracies(*_THREE, kept=_TWO),  # of Fashion-MNIST the paper prints 2.5 points
  'graddefense_2b_accuracy': _accuracies(*_THREE, kept=_THREE),
  'graddefense_figure_2': (
    *_costs(_TWO, 'accuracy', 'compensated', 'none', 2.0),
    *_below(_TWO, ['accuracy'], ['uncompensated'], ['compensated']),
  ),
  'graddefense_readings': tuple(
    Ordered(f'Fashion-MNIST | σ = {s}, uncompensated | accuracy', f'Fashion-MNIST | σ = {s}, columns | accuracy')
    for s in (0.01, 0.03, 0.1, 0.3)
  ),
  'graddefense_3d': (
    *_alike(_TWO, 'accuracy', 'Q = 6', 'Q = 12', 1.0),
    *_below(_TWO, ['accuracy'], ['Q = 1'], ['Q = 6']),
  ),
  'graddefense_3e_accuracy': _costs(_THREE, 'accuracy', 'clipping', 'no clipping', 1.0),
  **{f'outpost_3_{index}': _scenario(index != 2) for index in (1, 2, 3, 4)},
  'outpost_figure_3_emnist': _figure_3('EMNIST'),
  'outpost_figure_3_cifar10': _figure_3('CIFAR-10'),
  'outpost_figure_5': (
    *(
      Ordered(_FISHED.format(f'{state}, train'), _FISHED.format(f'{state}, eval'))
      for state in ('untrained', 'trained')
    ),
    *(
      Ordered(_FISHED.format(f'trained, eval, {other}'), _FISHED.format('trained, eval'))
      for other in ('unmodified', 'DP', 'OUTPOST')
    ),
  ),
  'outpost_figure_6': tuple(
    Ordered(f'{column} | {row} | ssim', str(judgement.BLIND))
    for column in ('class fishing', 'feature fishing')
    for row in ('untrained', 'trained')
  ),
  'outpost_1': (
    Ordered('default initialisation | best start | oracle_ssim', 'explicit initialisation | best start | oracle_ssim'),
    Ordered('trained | best start | oracle_ssim', 'default initialisation | best start | oracle_ssim'),
  ),
  'outpost_4_resnet18': _modes('resnet18'),
  'outpost_4_resnet152': _modes('resnet152'),
  **{
    name: tuple(
      Ordered(f'{mode} mode, {state} | {row} | ssim', str(judgement.BLIND))
      for mode in _MODES
      for state in ('untrained', 'pretrained')
    )
    for name, row in (('outpost_5', 'CIFAR-100'), ('outpost_5_tiny', 'Tiny ImageNet'))
  },
  'outpost_figure_4': (
    *_below([f'E = 1, n = {n}, B = {n}' for n in (1, 8)], ['psnr'], ['DP'], ['GC', 'GD', 'OUTPOST']),
    *_below([f'E = 1, n = {n}, B = {n}' for n in (1, 8)], ['psnr'], ['GD', 'OUTPOST'], ['GC']),
  ),
  'dcs2_1': _below(_TWO, _SEEN, ['DCS²'], _OTHERS),
  'dcs2_2_imprint': (
    *_alike([_IMPRINT], 'last_ssim', 'DP-Gaussian', 'none', 0.05),
    *_alike([_IMPRINT], 'last_ssim', 'Soteria', 'none', 0.05),
    *_below([_IMPRINT], ['last_ssim'], ['DCS²'], ['none', *_OTHERS]),
  ),
  'dcs2_2_ggl': (
    *_below([_GGL], _SEEN, ['DCS²'], _OTHERS),
    *_below([_GGL], _SEEN, ['Prune', 'Soteria'], ['DP-Gaussian', 'none']),
  ),
  'dcs2_3': _below([_IMPRINT], ['last_ssim'], ['λ_g = 1.0'], ['λ_g = 0.5']),
  'dcs2_4': _below(['MNIST'], _SEEN, ['DCS²'], ['none']),
  'dcs2_5': _below(['MNIST'], _SEEN, _STARTS, ['none']),
  'dcs2_6': _below([_GGL], _SEEN, ['DCS²'], ['none']),
  'dcs2_7': _below(['MNIST'], _SEEN, ['Prune & DCS²'], ['Prune', 'DCS²']),
  'dcs2_figure_2': _below((*(f'{name}, GS' for name in _TWO), _GGL, _IMPRINT), _SEEN, ['DCS²'], _OTHERS),
  'dcs2_1_accuracy': (
    *_costs(_TWO, 'accuracy', 'DCS²', 'none', 1.0),
    *_costs(['MNIST'], 'sensitive_accuracy', 'DCS²', 'none', 1.0),
  ),
  'dcs2_2_accuracy': (
    *_costs([_TINY], 'accuracy', 'DCS²', 'none', 1.0),
    *_below([_TINY], ['sensitive_accuracy'], _OTHERS, ['DCS²']),
  ),
  'dcs2_2_celeba_accuracy': (
    *_costs(['faces for CelebA', 'start points from CIFAR-10'], 'accuracy', 'DCS²', 'none', 1.0),
    *_below(['faces for CelebA'], ['sensitive_accuracy'], ('DP-Gaussian', 'Prune'), ['DCS²']),
  ),
  'dcs2_3_accuracy': _below([_TINY], ['sensitive_accuracy', 'accuracy'], ['λ_g = 1.0'], ['λ_g = 0.5']),
  'dcs2_5_accuracy': tuple(
    one
    for row in _STARTS
    for metric in ('sensitive_accuracy', 'accuracy')
    for one in _costs(['MNIST'], metric, row, 'none', 2.0)
  ),
  'dcs2_7_accuracy': (
    *_costs(['MNIST'], 'sensitive_accuracy', 'Prune & DCS²', 'none', 2.0),
    *_costs(['MNIST'], 'accuracy', 'Prune & DCS²', 'none', 2.0),
  ),
  'ffl_1': (
    *(Ordered(str(judgement.BLIND), f'{column} | raw upload | ssim') for column in _DP),
    *_below(_DP, ['ssim'], ['perturbed upload'], ['raw upload']),
  ),
  'ffl_5': _fragments('LeNet, four convolutions', 'ConvNet'),
  'ffl_6': _fragments('ResNet', metric='psnr_normalised'),
  'ffl_5_cifar100': _fragments('ResNet'),
  'ffl_5_emnist': _fragments('ConvNet'),
  **{f'ffl_4_{name}': _cheap() for name in TABLES_3_TO_5},
  'fidel_5': _below(('mnist', 'cifar10'), ['revealed_share'], ['batch'], ['one by one']),
  'fidel_8': (
    Ordered('0', 'mnist | one by one, table III | revealed_share'),
    Ordered('0', 'cifar10 | one by one, table IV | revealed_share'),
  ),
  'fidel_13': (
    *_below(['30 samples'], ['revealed'], ['relu, no dropout'], ['relu, dropout 0.5']),
    *_below(['30 samples'], ['revealed'], ['tanh, no dropout', 'sigmoid, no dropout'], ['relu, no dropout']),
  ),
  'fidel_13_training': (
    Ordered(*(f'steps {steps} | relu, dropout 0.5, 30 samples | revealed' for steps in (0, 20000))),
    *_below(['steps 20000'], ['revealed'], ['relu, no dropout, 30 samples'], ['relu, dropout 0.5, 30 samples']),
  ),
  'fidel_14': (
    Ordered('0', '20 samples | relu, dropout 0.5 | revealed'),
    *_below(['20 samples'], ['revealed'], ['relu, no dropout'], ['relu, dropout 0.5']),
  ),
  'peeling_cifar10': _below(
    ['batches of 32'],
    ['certified'],
    ['32 images, float64, noise 0.001, tolerance 0.0001', '32 images, float64, 50 % pruned'],
    ['32 images, float64'],
  ),
  'spear_exact': (
    *(
      Ordered(f'{column} | {n} {what}, float64 | largest_error', '1e-6')
      for column, what in (('normal, float64', 'normal inputs'), ('images, float64', 'images less their mean'))
      for n in (10, 12, 14)
    ),
    Ordered('1e-3', 'normal, float64, noise | 10 normal inputs, float64, noise 1e-05 | largest_error'),
  ),
  'assumptions_deltas': tuple(
    Ordered(f'{column} | the gradient (eq. 2 of OUTPOST) | psnr', f'{column} | the client’s steps | psnr')
    for column in ('SGD 0.1', 'momentum 0.9, 0.03', 'Adam 1e-3')
  ),
  'lti_digits': _learned(),
  'lti_faces': _learned(),
}  # fmt: skip
