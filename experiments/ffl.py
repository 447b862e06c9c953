"""FFL (Na, Hong, Kim, Shin: Closing the Loophole: Rethinking Reconstruction Attacks, ACSAC 2022)."""

from experiments.experiment import Cell, Experiment, Run, Training

PAPER = (
  'Na, Hong, Kim, Shin: Closing the Loophole: Rethinking Reconstruction Attacks in Federated Learning from a Privacy '
  'Standpoint. ACSAC 2022.'
)
METRICS = (
  'MSE and PSNR are of unclipped images, as in the paper. Its numbers are those of two pictures, a dog and a horse '
  '(table 6: ResNet-18 on CIFAR-10); figure 5 prints averages as curves without numbers. Ours are means over images.'
)
CHOICES = (
  'The attack is csDLG of Geiping et al., labels known, one image per upload.',
  'The model attacked has been trained for some rounds on other images (2,000 in the paper), without a defense, so '
  'that there is a global gradient to compare with; the paper trains one under each method.',
  'LeNet with four convolutions and ConvNet stand in for ResNet-18. BatchNorm runs in eval mode, as in Geiping et al., '
  'in training and attack alike: its statistics stay those of a fresh network.',
)
DP_NOISE = (
  'ε = 8 over 2,000 rounds of a tenth of the clients needs noise multipliers of 2.72, 2.97 and 3.20 at δ = 1e-4, 1e-5 '
  'and 1e-6 (by Rényi accounting). They drown an upload, and the accuracies that the paper prints could not come from '
  'them; a line of a thousandth of the noise stands beside. The clipping norm is not stated: 1 here.'
)

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
  'DP, a thousandth of its noise': ('client_dp(norm=1,noise=0.003)', None, None),
  'DGC 0.05': ('dgc(ratio=0.05)', (1.3035, 1.2741), (-1.15, -1.05)),
  'DGC 0.1': ('dgc(ratio=0.1)', (1.0251, 0.6485), (-0.11, 1.88)),
  'DGC 0.2': ('dgc(ratio=0.2)', (0.2506, 0.1511), (6.01, 8.21)),
}


def _cells(column, row, run, defense, mse=None, psnr=None, counter=None):
  return (
    Cell(column, row, 'mse_unclipped', run, defense, mse, counter=counter),
    Cell(column, row, 'psnr_unclipped', run, defense, psnr, counter=counter),
    Cell(column, row, 'ssim', run, defense, counter=counter),
  )


def _lenet4(defenses, training, knowledge='unaware'):
  return Run(
    'cifar10', 'lenet4', 'csdlg', defenses, trials=1000, training=training,
    knowledge=knowledge, counters=('masked',),
    mini={'trials': 8, 'controls': 16, 'settings': {'csdlg': {'steps': 2000}},
          'training': Training(rounds=20, defense=training.defense)},
  )  # fmt: skip


def _convnet(defenses, training, knowledge='unaware'):
  return Run(
    'cifar10', 'convnet(width=64)', 'csdlg', defenses, trials=1000, training=training,
    batch_norm='eval', knowledge=knowledge, counters=('masked',),
    mini={'model': 'convnet(width=8)', 'trials': 4, 'controls': 4, 'settings': {'csdlg': {'steps': 1000}},
          'training': Training(rounds=10, defense=training.defense)},
  )  # fmt: skip


def _figure_1():
  dp = 'client_dp(norm=1,noise=2.97)'
  defenses = {
    'raw upload': 'none',
    'perturbed upload': dp,
    'perturbed by a thousandth': 'client_dp(norm=1,noise=0.003)',
  }
  published = {'trained with DP': Training(2000, defense=dp), 'trained without': Training(2000)}
  runs, cells = {}, []
  for column, training in published.items():
    run = column.replace(' ', '_').lower()
    runs[run] = _lenet4(defenses, training)
    for label in defenses:
      cells += _cells(column, label, run, label)
  return Experiment(
    'ffl_1',
    PAPER,
    'Figure 1: attacks on models trained with differential privacy',
    'That a model was trained with privacy at the server says nothing of what the server sees: a raw upload leaks all '
    'the same. The paper prints pictures alone.',
    runs,
    tuple(cells),
    METRICS,
    (*CHOICES, DP_NOISE),
  )


def _figure_5():
  defenses = {label: text for label, (text, _, _) in TABLE_6.items()}
  training = Training(2000)
  cells = []
  for run, column in (('lenet4', 'LeNet, four convolutions'), ('convnet', 'ConvNet')):
    for label, (text, mse, psnr) in TABLE_6.items():
      cells += _cells(column, label, run, label, mse, psnr)
      if text.startswith(('fragmentation', 'dgc')):
        cells += _cells(column, f'{label}, matched where sent', run, label, mse, psnr, 'masked')
  return Experiment(
    'ffl_5',
    PAPER,
    'Figures 4 and 5, with the numbers of table 6: fragmented gradients',
    'The layers most alike to the global gradient give the least away: at small r FFL leaves nothing to see, where '
    'random layers, noise and compression do.',
    {'lenet4': _lenet4(defenses, training, 'both'), 'convnet': _convnet(defenses, training, 'both')},
    tuple(cells),
    METRICS,
    (
      *CHOICES,
      DP_NOISE,
      'DGC: momentum 0.9, no clipping, first participation (no residual).',
      'The paper matches “the portions” that were sent; whether zeros elsewhere count is not stated: both are shown.',
    ),
  )


EXPERIMENTS = (_figure_1(), _figure_5())
