"""FFL (Na, Hong, Kim, Shin, “Closing the Loophole: Rethinking Reconstruction Attacks”, ACSAC 2022)."""

import dataclasses
import math

import numpy as np

from experiments import utility
from experiments.experiment import NON_ADAPTIVE, Cell, Data, Experiment, Run, Training
from experiments.utility import Method, Trainings
from gradleak import AuditSettings, ClientSettings

PAPER = (
  'Na, Hong, Kim, Shin: Closing the Loophole: Rethinking Reconstruction Attacks in Federated Learning from a Privacy '
  'Standpoint. ACSAC 2022.'
)
METRICS = 'MSE and PSNR are of unclipped images. Ours are means over images.'
NORMALISED = (
  'MSE and PSNR are of pixels over their standard deviation, whose square divides the MSE of images in [0, 1]. An MSE '
  'of up to 2.7 is out of reach of these, and what boxed images that show nothing have in such units. The paper states '
  'no unit. Ours are means over images, the paper’s of two pictures, a dog and a horse.'
)
UNBOXED = 'The attack is csDLG of Geiping et al. without its box, labels known, one image per upload.'
BOXED = (
  'The attack is csDLG of Geiping et al., labels known, one image per upload. Lines without its box have MSE and PSNR '
  'in units of [0, 1], the other reading of the paper’s figures.'
)
CHOICES = (
  'The model attacked has been trained on other images, without a defense unless one is named, so that there is a '
  'global gradient to compare with; the paper trains one under each method: N = 100 clients, of which α = 0.1 take '
  'part in each of T = 2,000 rounds. Here a client’s update in training is the gradient on all its images.',
  'The last column says what the network is: “trained” only with the accuracy that was wanted, on held-out images of '
  'the train split.',
  'BatchNorm trains on batch statistics, its running ones are averaged; client and attacker then use the running ones, '
  'as in Geiping et al.',
)
LETTERS = (
  'TFDS has 88,800 of the 145,600 images of EMNIST Letters. What is stored was run on a part of EMNIST, whose test '
  'images show the letters A to S.'
)
LENET = 'LeNet with four convolutions is not of the paper; its sigmoids need the “explicit” weights to learn.'
DP_NOISE = (
  'ε = 8 over 2,000 rounds of a tenth of the clients needs noise multipliers of 2.72, 2.97 and 3.20 at δ = 1e-4, 1e-5 '
  'and 1e-6 (by Rényi accounting). '
  f'Its relation is “{utility.RELATION}” client, under Poisson sampling. '
  'This noise is far larger than an upload, and the accuracies that the paper prints '
  'are impossible with it; another line has a thousandth of the noise. The clipping norm is not stated: 1 here.'
)

LITTLE_NOISE, SENT = 'DP, a thousandth of its noise', ', matched where sent'
# Method -> variant -> (defense, MSE of dog and horse, PSNR of dog and horse).
TABLE_6 = {
  'FFL r = 0.2': ('fragmentation(ratio=0.2)', (2.5215, 2.7064), (-4.01, -4.32)),
  'FFL r = 0.4': ('fragmentation(ratio=0.4)', (1.1393, 2.5336), (-0.57, -4.04)),
  'FFL r = 0.6': ('fragmentation(ratio=0.6)', (1.3935, 1.4402), (-1.44, -1.58)),
  'FFL r = 0.8': ('fragmentation(ratio=0.8)', (0.0383, 0.3009), (14.17, 5.22)),
  'FFL r = 1 (none)': ('none', (0.0038, 0.0097), (24.2, 20.12)),
  'FFL-random r = 0.2': ('fragmentation_random(ratio=0.2)', (0.0234, 0.7158), (16.32, 1.45)),
  'FFL-random r = 0.4': ('fragmentation_random(ratio=0.4)', (0.0019, 0.0027), (27.14, 25.73)),
  'FFL-random r = 0.6': ('fragmentation_random(ratio=0.6)', (0.0054, 0.0037), (22.71, 24.37)),
  'FFL-random r = 0.8': ('fragmentation_random(ratio=0.8)', (0.0185, 0.0051), (17.32, 22.89)),
  'DP δ = 1e-4': ('client_dp(norm=1,noise=2.72)', (1.2534, 0.0329), (-0.98, 14.82)),
  'DP δ = 1e-5': ('client_dp(norm=1,noise=2.97)', (0.5641, 0.4814), (2.49, 3.18)),
  'DP δ = 1e-6': ('client_dp(norm=1,noise=3.20)', (1.5161, 0.5078), (-1.81, 2.94)),
  LITTLE_NOISE: ('client_dp(norm=1,noise=0.003)', None, None),
  'DGC 0.05': ('dgc(ratio=0.05)', (1.3035, 1.2741), (-1.15, -1.05)),
  'DGC 0.1': ('dgc(ratio=0.1)', (1.0251, 0.6485), (-0.11, 1.88)),
  'DGC 0.2': ('dgc(ratio=0.2)', (0.2506, 0.1511), (6.01, 8.21)),
}


def _cells(column, row, run, defense, mse=None, psnr=None, adaptive=None, unit='unclipped'):
  return (
    Cell(column, row, f'mse_{unit}', run, defense, mse, adaptive=adaptive),
    Cell(column, row, f'psnr_{unit}', run, defense, psnr, adaptive=adaptive),
    Cell(column, row, 'ssim', run, defense, adaptive=adaptive),
  )


def _lines(column, run, *, printed=False, unit='unclipped'):
  """Returns the cells of all methods of table 6, matched as they are and where sent; `printed`: beside its figures."""
  cells = []
  for label, (text, *figures) in TABLE_6.items():
    cells += _cells(column, label, run, label, *(figures if printed else ()), unit=unit)
    if text.startswith(('fragmentation', 'dgc')):
      cells += _cells(column, label + SENT, run, label, adaptive='masked', unit=unit)
  return cells


@dataclasses.dataclass(frozen=True)
class Normalised(Run):
  """An audit whose rows have 'mse_normalised' and 'psnr_normalised', too: of pixels over their standard deviation."""

  def execute(self, data: Data, seed: int, *, workdir: str, progress: str = 'auto') -> list[dict]:
    """Runs the audit in its own folder, or resumes it; returns its rows."""
    rows = super().execute(data, seed, workdir=workdir, progress=progress)
    images = data.private.samples if data.others is None else data.others[0]
    variance = float(np.mean(np.var(images, axis=(0, 1, 2), dtype=np.float64)))
    return [{**row, **normalised_scores(row, variance)} for row in rows]


def normalised_scores(row: dict, variance: float) -> dict[str, float | None]:
  """Returns the unclipped MSE and PSNR of a row in units in which pixels have variance 1; None for a diverged trial.

  Args:
    row: of an audit, of images in [0, 1].
    variance: of such pixels.
  """
  mse, psnr = row['mse_unclipped'], row['psnr_unclipped']
  return {
    'mse_normalised': None if mse is None else mse / variance,
    'psnr_normalised': None if psnr is None else psnr + 10 * math.log10(variance),
  }


# N, α and T of the paper; a client holds 500 of the 50,000 images.
PAPERS = Training(rounds=2000, clients=100, samples=490, share=0.1, accuracy=80, tested=1000)
ATTACK = 'csdlg(box=False)'
# Network, or dataset of few images -> what two cores attack.
SMALL = {
  'convnet9': {'model': 'convnet9(width=32)', 'image_size': 12, 'trials': 4, 'controls': 4,
               'changed': {'csdlg': {'steps': 1000}}},
  'resnet18': {'model': 'resnet18(width=32)', 'image_size': 16, 'trials': 4, 'controls': 4,
               'changed': {'csdlg': {'steps': 2000}}},
  'cifar100': {'model': 'resnet18(width=8)', 'trials': 2, 'controls': 8, 'changed': {'csdlg': {'steps': 500}}},
}  # fmt: skip
KNOWN = AuditSettings(knowledge='both', adaptive_attacks=('masked',))


def _lenet4(defenses, defense='none', settings=NON_ADAPTIVE):
  return Run(
    'cifar10', 'lenet4', ATTACK, defenses, trials=1000, init='explicit',
    training=dataclasses.replace(PAPERS, defense=defense), settings=settings,
    mini={'image_size': 12, 'trials': 8, 'controls': 16, 'changed': {'csdlg': {'steps': 2000}},
          'training': Training(300, 10, 100, defense=defense, accuracy=80, tested=500)},
  )  # fmt: skip


def _network(dataset, model, training, small=None, *, trials=1000, rate=0.1):
  """Returns the attacks of table 6 on a network of the paper; `small` is its training on a small machine."""
  small = small or Training(rounds=300, clients=40, samples=50, share=0.05, rate=rate, accuracy=80, tested=500)
  return Run(
    dataset, f'{model}(width=64)', ATTACK, DEFENSES, trials=trials, training=training, settings=KNOWN,
    client=ClientSettings(batch_norm='eval'),
    mini={**SMALL.get(dataset, SMALL[model]), 'training': small},
  )  # fmt: skip


DEFENSES = {label: text for label, (text, _, _) in TABLE_6.items()}
# For a part of CIFAR-100 that holds 1,117 training and 916 test images.
FEW = Training(rounds=100, clients=20, samples=40, share=0.1, rate=0.2, accuracy=70, tested=200)


def _figure_1():
  dp = 'client_dp(norm=1,noise=2.97)'
  defenses = {
    'raw upload': 'none',
    'perturbed upload': dp,
    'perturbed by a thousandth': 'client_dp(norm=1,noise=0.003)',
  }
  runs, cells = {}, []
  trained = {
    'DP in training': dp,
    'a thousandth of its noise in training': defenses['perturbed by a thousandth'],
    'no DP in training': 'none',
  }
  for column, defense in trained.items():
    run = column.replace(' ', '_').lower()
    runs[run] = _lenet4(defenses, defense)
    for label in defenses:
      cells += _cells(column, label, run, label)
  return Experiment(
    'ffl_1',
    PAPER,
    'Figure 1: attacks on models trained with differential privacy',
    'Differential privacy at the server does not protect from the server: a raw upload leaks even if the model was '
    'trained with it. The paper prints pictures alone.',
    runs,
    tuple(cells),
    METRICS,
    (UNBOXED, *CHOICES, LENET, DP_NOISE),
  )


SHOWS = (
  'The layers most similar to the global gradient reveal the least: at small r FFL leaves nothing to see, unlike '
  'random layers, noise and compression.'
)
OF_ATTACKS = (
  DP_NOISE,
  'DGC: momentum 0.9, no clipping, first participation (no residual).',
  'The paper matches “the portions” that were sent; whether zeros elsewhere count is not stated: both are shown.',
)


def _attacks(name, table, columns, *, choices=()):
  """Returns the attacks on uploads under each method, on the networks of `columns`: column -> (name, `Run`)."""
  cells = [cell for column, (run, _) in columns.items() for cell in _lines(column, run)]
  return Experiment(
    name,
    PAPER,
    table,
    f'{SHOWS} The paper prints curves and pictures alone.',
    dict(columns.values()),
    tuple(cells),
    METRICS,
    (UNBOXED, *CHOICES, *choices, *OF_ATTACKS),
  )


def _table_6():
  """Returns the one table of attacks with figures, which decide what its unit is: beside, two lines in the other."""
  boxed = _network('cifar10', 'resnet18', PAPERS, rate=0.2)
  given = {field.name: getattr(boxed, field.name) for field in dataclasses.fields(boxed)}
  runs, column = {'resnet': Normalised(**{**given, 'attack': 'csdlg'})}, 'ResNet'
  cells = _lines(column, 'resnet', printed=True, unit='normalised')
  # At r = 1 the random layers are all layers, too; the paper prints other figures of the second picture.
  cells += _cells(
    column, 'FFL-random r = 1 (none)', 'resnet', 'FFL r = 1 (none)', (0.0038, 0.0038), (24.2, 24.2), unit='normalised'
  )
  compared = ('FFL r = 0.2', 'FFL r = 1 (none)')
  runs['unboxed'] = dataclasses.replace(
    boxed, defenses={label: DEFENSES[label] for label in compared}, settings=NON_ADAPTIVE
  )
  for label in compared:
    cells += _cells('ResNet, no box', label, 'unboxed', label)
  return Experiment(
    'ffl_6',
    PAPER,
    'Figures 4 and 5 (b), with the numbers of table 6: fragmented gradients, CIFAR-10/ResNet',
    SHOWS,
    runs,
    tuple(cells),
    NORMALISED,
    (BOXED, *CHOICES, *OF_ATTACKS),
    readings={
      label: (LITTLE_NOISE if label.startswith('DP') else label + SENT,)
      for label, (text, printed, _) in TABLE_6.items()
      if printed and text != 'none'
    },
  )


def _figures_4_to_7():
  """Figures 4 to 7 and table 6: one experiment for each setting of data that a user prepares."""
  wide = dataclasses.replace
  return (
    _attacks(
      'ffl_5',
      'Figures 5 (a) and 7: fragmented gradients, CIFAR-10/ConvNet',
      {
        'LeNet, four convolutions': ('lenet4', _lenet4(DEFENSES, settings=KNOWN)),
        'ConvNet': ('convnet', _network('cifar10', 'convnet9', PAPERS)),
      },
      choices=(LENET,),
    ),
    _table_6(),
    _attacks(
      'ffl_5_cifar100',
      'Figures 5 (c) and 6: fragmented gradients, CIFAR-100/ResNet',
      {'ResNet': ('resnet', _network('cifar100', 'resnet18', wide(PAPERS, accuracy=70), FEW, rate=0.2))},
    ),
    _attacks(
      'ffl_5_emnist',
      'Figures 5 (d) and 6: fragmented gradients, EMNIST/ConvNet',
      {'ConvNet': ('convnet', _network('emnist/letters', 'convnet9', wide(PAPERS, samples=870, accuracy=90),
                                       trials=1300))},
      choices=(LETTERS,),
    ),
  )  # fmt: skip


RATIOS = (0.2, 0.4, 0.6, 0.8, 1.0)
DELTAS = (1e-4, 1e-5, 1e-6)
COMPRESSED = (0.05, 0.1, 0.2)
# Architecture -> millions of parameters sent at each r (table 2); ResNet-18's are bytes, as its total says.
TABLE_2 = {'ConvNet': (0.134, 0.563, 2.44, 3.48, 3.49), 'ResNet': (1.67, 3.08, 15.1, 25.9, 44.7)}
# Name -> (dataset, architecture, model, seconds of training and selection, accuracies of FFL and FFL-random by r, of DP
# by δ, of DGC by ratio).
TABLES_3_TO_5 = {
  'cifar10_convnet': ('CIFAR-10', 'ConvNet', 'convnet9', (0.94, 0.03), (84.42, 84.28, 84.31, 85.05, 85.08),
                      (83.35, 84.02, 84.2, 84.67), (76.44, 79.62, 80.16), (84.13, 85.3, 86.07)),
  'cifar10_resnet': ('CIFAR-10', 'ResNet', 'resnet18', (1.27, 0.09), (78.19, 80.77, 86.45, 89.75, 89.53),
                     (83.18, 86.31, 87.78, 88.21), (88.59, 89.53, 89.96), (87.35, 88.21, 89.3)),
  'cifar100_resnet': ('CIFAR-100', 'ResNet', 'resnet18', (1.34, 0.10), (63.48, 64.02, 68.94, 72.29, 72.99),
                      (67.3, 69.77, 71, 71.89), (69.09, 74.39, 72.14), (68.17, 69.96, 69.87)),
  'emnist_convnet': ('EMNIST', 'ConvNet', 'convnet9', (1.79, 0.03), (94.79, 94.59, 94.95, 94.99, 94.95),
                     (94.73, 94.91, 94.94, 95), (94.69, 95.01, 94.95), (94.95, 94.98, 94.87)),
}  # fmt: skip
# Dataset -> (name, half of its classes, training samples).
TRAINED_ON = {
  'CIFAR-10': ('cifar10', 5, 50_000), 'CIFAR-100': ('cifar100', 50, 50_000), 'EMNIST': ('emnist/letters', 13, 88_800),
}  # fmt: skip
# Table -> fields of `Trainings` at scale mini. With 20,000 samples a client takes four local steps in a round.
TRAINED_AT_MINI = {
  'cifar10_convnet': {'image_size': 12, 'samples': 20_000, 'tested': 1000, 'seeds': 12, 'protocol': {'rounds': 60}},
  'cifar10_resnet': {
    'model': 'resnet18(width=4)', 'image_size': 16, 'samples': 20_000, 'tested': 1000, 'seeds': 12,
    'protocol': {'rounds': 60},
  },
  # As `FEW`: three clients hold a class, and the rarest has three images.
  'cifar100_resnet': {
    'image_size': 16, 'samples': 1_000, 'tested': 900, 'seeds': 10,
    'protocol': {'rounds': 60, 'clients': 6, 'per_round': 3},
  },
  'emnist_convnet': {'image_size': 12, 'samples': 20_000, 'tested': 1000, 'seeds': 10, 'protocol': {'rounds': 40}},
}  # fmt: skip


def _tables_2_to_5(name):
  dataset, architecture, model, seconds, ffl, shuffled, dp, dgc = TABLES_3_TO_5[name]
  source, classes, samples = TRAINED_ON[dataset]
  lines = {f'FFL r = {r}': (Method(f'fragmentation(ratio={r})'), a) for r, a in zip(RATIOS, ffl, strict=True)}
  lines['FFL r = 1.0'] = utility.UNDEFENDED, ffl[-1]
  lines |= {
    f'FFL-random r = {r}': (Method(f'fragmentation_random(ratio={r})'), a)
    for r, a in zip(RATIOS, shuffled, strict=False)
  }
  lines |= {f'DP δ = {d:.0e}': (Method(delta=d), a) for d, a in zip(DELTAS, dp, strict=True)}
  lines |= {f'DGC {r}': (Method(f'dgc(ratio={r})'), a) for r, a in zip(COMPRESSED, dgc, strict=True)}
  lines[LITTLE_NOISE] = Method(delta=DELTAS[1], scale=0.001), None
  run = Trainings(
    source,
    f'{model}(width=64)',
    {label: method for label, (method, _) in lines.items()},
    dataclasses.replace(utility.FFL, partition=f'classes(number={classes})'),
    samples,
    mini={'model': f'{model}(width=8)', **TRAINED_AT_MINI[name]},
  )
  cells = []
  for label, (method, accuracy) in lines.items():
    cells.append(Cell('Tables 4 and 5: accuracy', label, 'accuracy', 'training', label, accuracy))
    if method.delta and accuracy:
      cells.append(Cell('Tables 4 and 5: accuracy', label, 'epsilon', 'training', label, utility.BUDGET))
  total = TABLE_2[architecture][-1]
  for ratio, sent in zip(RATIOS, TABLE_2[architecture], strict=True):
    place = ('Table 2: what a client sends in a round', label := f'FFL r = {ratio}')
    cells.append(Cell(*place, 'parameters', 'training', label))  # at another width its share alone compares
    cells.append(Cell(*place, 'share_sent', 'training', label, 100 * sent / total))
    if ratio == 1:
      cells.append(Cell(*place, 'total_parameters', 'training', label, total))
  for label in lines:
    figures = (*seconds, 100 * seconds[1] / seconds[0]) if label == 'FFL r = 0.6' else (None,) * 3
    for metric, figure in zip(('train_seconds', 'defense_seconds', 'overhead'), figures, strict=True):
      cells.append(Cell('Table 3: seconds of a round', label, metric, 'training', label, figure))
  return Experiment(
    f'ffl_4_{name}',
    PAPER,
    f'Tables 2 to 5: accuracy, parameters and seconds, {dataset}/{architecture}',
    'Sending a few layers alone costs little accuracy and almost no time.',
    {'training': run},
    tuple(cells),
    'Table 3 is of one client; ours are seconds of a round of ten. What is sent is counted in bytes, over four; '
    'ResNet-18 has 11.2 million parameters, of which the paper prints the bytes.',
    (
      'Local epochs and learning rate are not stated: 1 and 0.1. BatchNorm trains on batch statistics, its running '
      'ones are averaged. Which r table 3 is of is not stated: shown beside 0.6.',
      'FFL, first participation: random layers. DGC: momentum 0.9, no clipping.',
      'DP is Geyer’s mechanism at the server with the least noise with which ε = 8 lasts for all rounds (2.72, 2.97 '
      f'and 3.20 over 2,000 rounds), in the relation “{utility.RELATION}” client, accounted as Poisson sampling.',
      'The paper states neither its noise nor its relation, and stops when ε is spent: another line has little noise.',
      *((LETTERS,) if dataset == 'EMNIST' else ()),
    ),
    readings={label: (LITTLE_NOISE,) for label, (method, accuracy) in lines.items() if method.delta and accuracy},
  )


EXPERIMENTS = (_figure_1(), *_figures_4_to_7(), *map(_tables_2_to_5, TABLES_3_TO_5))
