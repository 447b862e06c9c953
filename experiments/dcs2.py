"""DCS² (Wu, Hayat, Zhou, Harandi: Concealing Sensitive Samples against Gradient Leakage, AAAI 2024)."""

import dataclasses

from experiments import utility
from experiments.experiment import Cell, Experiment, Run
from experiments.utility import Method, Trainings
from gradleak import ClientSettings

PAPER = (
  'Wu, Hayat, Zhou, Harandi: Concealing Sensitive Samples against Gradient Leakage in Federated Learning. AAAI 2024.'
)
METRICS = 'PSNR and SSIM are not defined in the paper; ours are of images clipped to [0, 1]. Its ± is not explained.'
CHOICES = (
  'The attack is GS (Adam 0.1, 10,000 steps, TV 1e-4, unsigned, not boxed), one image per batch, labels known, '
  'networks untrained; how many images the paper averages over is not stated: 100 here.',
  'LeNet starts from U(−0.5, 0.5), as in DLG (undefended, 2,000 steps recover MNIST at about 55 dB), ConvNet as in '
  'PyTorch; BatchNorm runs in eval mode, as older attacks assume.',
)
STRENGTHS = (
  'The strengths of the other defenses are not stated: Gaussian noise of standard deviation 0.001, pruning of 90 %, '
  'Soteria at 90 %.'
)
CONCEALED = 'concealment(dissimilarity=0.01,latent=0.01,mixing={mixing},steps=1000,start={start},mixup={mixup})'


def _ours(mixing=0.7, start='proxy', mixup='false'):
  return CONCEALED.format(mixing=mixing, start=start, mixup=mixup)


BASELINES = {
  'none': 'none',
  'DP-Gaussian': 'gaussian(stddev=0.001)',
  'Prune': 'prune(rate=0.9)',
  'Soteria': 'soteria(rate=0.9)',
  'DCS²': _ours(),
}


def _mnist(defenses, attack='gs', public=100):
  return Run(
    'mnist',
    'lenet',
    attack,
    defenses,
    trials=100,
    init='explicit',
    public=public,
    mini={'trials': 16, 'controls': 16, 'changed': {'gs': {'steps': 2500}, 'concealment': {'steps': 300}}},
  )


def _cifar10(defenses):
  return Run(
    'cifar10',
    'convnet(width=32)',
    'gs',
    defenses,
    trials=100,
    client=ClientSettings(batch_norm='eval'),
    public=100,
    mini={
      'model': 'convnet(width=8)',
      'trials': 8,
      'controls': 8,
      'changed': {'gs': {'steps': 1000}, 'concealment': {'steps': 200}},
    },
  )


def _pair(column, row, run, defense, psnr, ssim):
  """Returns the cells of one line, PSNR and SSIM, each (value, ±) or a value."""
  psnr, ssim = (value if isinstance(value, tuple) else (value, None) for value in (psnr, ssim))
  return Cell(column, row, 'psnr', run, defense, *psnr), Cell(column, row, 'ssim', run, defense, *ssim)


def _lines(column, run, figures):
  return tuple(cell for label, (psnr, ssim) in figures.items() for cell in _pair(column, label, run, label, psnr, ssim))


def _table_1():
  mnist = {
    'none': ((59.20, 2.71), 1.00),  # its ± 4.87 lost an exponent
    'DP-Gaussian': ((35.38, 2.44), (0.83, 0.07)),
    'Prune': ((14.13, 2.29), (0.37, 0.06)),
    'Soteria': ((9.67, 1.09), (0.30, 0.07)),
    'DCS²': ((7.84, 2.56), (0.17, 0.09)),
  }
  cifar10 = {
    'none': ((20.41, 3.15), (0.73, 0.09)),
    'DP-Gaussian': ((12.34, 1.34), (0.28, 0.06)),
    'Prune': ((11.26, 1.75), (0.22, 0.06)),
    'Soteria': ((11.48, 1.42), (0.29, 0.06)),
    'DCS²': ((8.04, 1.10), (0.15, 0.05)),
  }
  return Experiment(
    'dcs2_1',
    PAPER,
    'Table 1: defenses against the GS attack',
    'Samples whose gradients resemble the private ones protect those better than noise, pruning or Soteria.',
    {'mnist': _mnist(BASELINES), 'cifar10': _cifar10(BASELINES)},
    _lines('MNIST', 'mnist', mnist) + _lines('CIFAR-10', 'cifar10', cifar10),
    METRICS,
    (*CHOICES, STRENGTHS),
  )


def _table_2():
  figures = {
    'none': (1.00, 0.00),
    'DP-Gaussian': (1.00, 0.00),
    'Prune': ((0.91, 0.12), (0.16, 0.20)),
    'Soteria': (1.00, 0.00),
    'DCS²': ((0.79, 0.22), (0.22, 0.23)),
  }
  column, cells = 'CIFAR-10 for TinyImageNet, Imprint', []
  for label, (ssim, lpips) in figures.items():
    cells.append(Cell(column, label, 'psnr', 'cifar10', label))
    for metric, value in (('ssim', ssim), ('lpips', lpips)):
      cells.append(Cell(column, label, metric, 'cifar10', label, *(value if isinstance(value, tuple) else (value,))))
  run = _cifar10(BASELINES)
  run = dataclasses.replace(run, attack='imprint(bins=10)', mini={**run.mini, 'trials': 32, 'controls': 64})
  return Experiment(
    'dcs2_2_imprint',
    PAPER,
    'Table 2, Imprint: defenses against a malicious server',
    'A defense against gradient matching need not protect from a server that inserts a module of its own.',
    {'cifar10': run},
    tuple(cells),
    METRICS,
    (
      'The paper has TinyImageNet at 224×224 and a trained ResNet-18; CIFAR-10 and an untrained ConvNet take '
      'their place: the module reads the image exactly, so neither should matter.',
      'The module has 10 bins, as in the published code, and the upload holds one image.',
      STRENGTHS,
    ),
  )


def _table_3():
  figures = {0.5: (0.80, 0.20, 0.22, 0.21), 0.7: (0.79, 0.22, 0.22, 0.23), 1.0: (0.78, 0.22, 0.23, 0.23)}
  run = _cifar10({'none': 'none', **{f'λ_g = {mixing}': _ours(mixing) for mixing in figures}})
  cells = [Cell('CIFAR-10 for TinyImageNet', 'none', metric, 'cifar10', 'none') for metric in ('psnr', 'ssim', 'lpips')]
  for mixing, (ssim, ssim_spread, lpips, lpips_spread) in figures.items():
    place = ('CIFAR-10 for TinyImageNet', f'λ_g = {mixing}')
    cells += [
      Cell(*place, 'psnr', 'cifar10', place[1]),
      Cell(*place, 'ssim', 'cifar10', place[1], ssim, ssim_spread),
      Cell(*place, 'lpips', 'cifar10', place[1], lpips, lpips_spread),
    ]
  return Experiment(
    'dcs2_3',
    PAPER,
    'Table 3: mixing weight λ_g',
    'More weight on the label of the concealed sample protects a little better.',
    {'cifar10': run},
    tuple(cells),
    METRICS,
    (
      *CHOICES,
      'The paper has TinyImageNet at 224×224, ResNet-18 and the Imprint attack; CIFAR-10, ConvNet and GS take their '
      'place. Only the direction can be compared.',
    ),
  )


def _table_4():
  attack = 'gs(start=class_average)'
  return Experiment(
    'dcs2_4',
    PAPER,
    'Table 4: an attacker who starts from the average image of the class',
    'The average image of the class does not help an attacker against concealed samples.',
    {'mnist': _mnist({'none': 'none', 'DCS²': _ours()}, attack, public=1000)},
    _lines('MNIST', 'mnist', {'none': ((59.22, 2.71), 1.00), 'DCS²': ((7.87, 2.44), (0.18, 0.09))}),
    METRICS,
    (*CHOICES, 'The class averages are of 1,000 public images from the train split.'),
  )


def _table_5():
  figures = {
    'MNIST, mixup': ('proxy', 'true', 7.97, 0.18),
    'MNIST': ('proxy', 'false', 7.84, 0.17),
    'noise, mixup': ('noise', 'true', 7.69, 0.18),
    'noise': ('noise', 'false', 7.40, 0.16),
  }
  defenses = {label: _ours(start=start, mixup=mixup) for label, (start, mixup, _, _) in figures.items()}
  lines = {'none': ((59.20, 2.71), 1.00)} | {label: (psnr, ssim) for label, (_, _, psnr, ssim) in figures.items()}
  return Experiment(
    'dcs2_5',
    PAPER,
    'Table 5: start points of the concealed samples',
    'Concealed samples protect wherever their search starts.',
    {'mnist': _mnist({'none': 'none', **defenses})},
    _lines('MNIST', 'mnist', lines),
    METRICS,
    (*CHOICES, 'The undefended line is that of table 1.'),
  )


def _table_7():
  prune = BASELINES['Prune']
  defenses = {'none': 'none', 'Prune': prune, 'DCS²': _ours(), 'Prune & DCS²': f'{_ours()}+{prune}'}
  lines = {
    'none': ((59.20, 2.71), 1.00),
    'Prune': (14.13, 0.37),
    'DCS²': (7.84, 0.17),
    'Prune & DCS²': (6.08, 0.12),
  }
  return Experiment(
    'dcs2_7',
    PAPER,
    'Table 7: concealed samples and pruning together',
    'Defenses of different kinds add up.',
    {'mnist': _mnist(defenses)},
    _lines('MNIST', 'mnist', lines),
    METRICS,
    (*CHOICES, STRENGTHS, 'The undefended line is that of table 1.'),
  )


def _trainings(dataset, network, available, steps, **mini):
  """Returns the trainings of a dataset in which one client defends its samples, by DCS² with `steps` each."""
  methods = {label: Method(defense) for label, defense in BASELINES.items()}
  quick = {label: Method(method.clients.replace('steps=1000', f'steps={steps}')) for label, method in methods.items()}
  return Trainings(
    dataset,
    network,
    methods,
    utility.DCS2,
    available,
    init='explicit' if network == 'lenet' else 'default',
    public=100,
    sensitive=64,
    timed=False,
    mini={'tested': 1000, 'defenses': quick, **mini},
  )


def _accuracies():
  figures = {
    'mnist': {
      'none': (86.98, 87.16), 'DP-Gaussian': (85.94, 86.91), 'Prune': (85.94, 86.91), 'Soteria': (86.98, 86.94),
      'DCS²': (86.98, 86.98),
    },
    'cifar10': {
      'none': (90.35, 80.41), 'DP-Gaussian': (77.19, 79.65), 'Prune': (77.80, 79.51), 'Soteria': (84.70, 79.76),
      'DCS²': (80.39, 79.79),
    },
  }  # fmt: skip
  runs = {
    'mnist': _trainings('mnist', 'lenet', 59_900, 100, samples=6000, protocol={'rounds': 40}),
    'cifar10': _trainings(
      'cifar10', 'convnet(width=32)', 49_900, 20, samples=2000, model='convnet(width=8)', protocol={'rounds': 20}
    ),
  }
  cells = [
    Cell(name, label, metric, dataset, label, figure)
    for dataset, name in (('mnist', 'MNIST'), ('cifar10', 'CIFAR-10'))
    for label, pair in figures[dataset].items()
    for metric, figure in zip(('sensitive_accuracy', 'accuracy'), pair, strict=True)
  ]
  return Experiment(
    'dcs2_1_accuracy',
    PAPER,
    'Table 1 and figure 3: accuracy on the sensitive samples and on the test set',
    'One client conceals its samples; the accuracy stays the same, also on these samples.',
    runs,
    tuple(cells),
    'Acc_S is the accuracy on the target client’s 64 samples, Acc_T on the test split, of the last model.',
    (
      'Clients, rounds and learning rate are not stated: 10 clients that all take part in each round, one epoch in '
      'batches of 64 at rate 0.1, shared as deltas; the target is one of them and holds 64 samples, so that it takes '
      'one step a round. The paper’s figures are multiples of 1/192, presumably of three seeds; ours is one.',
      'Only the target defends itself, and the others have ten times as many samples: its defense has little effect '
      'on the model.',
      STRENGTHS,
    ),
  )


EXPERIMENTS = (_table_1(), _accuracies(), _table_2(), _table_3(), _table_4(), _table_5(), _table_7())
