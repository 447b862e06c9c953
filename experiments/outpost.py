"""OUTPOST (Wang, Hugh, Li: More Than Enough Is Too Much, IEEE/ACM Transactions on Networking, 2024), table III."""

import dataclasses

from experiments import utility
from experiments.experiment import Cell, Paper, Run
from experiments.fishing import Fishing
from experiments.utility import Method, Trainings
from gradleak import AuditSettings, ClientSettings

PAPER = (
  'Wang, Hugh, Li: More Than Enough Is Too Much: Adaptive Defenses against Gradient Leakage in Production Federated '
  'Learning. IEEE/ACM Transactions on Networking, 2024.'
)
METRICS = (
  'MSE is of unclipped images, as in the paper, SSIM of clipped ones. The paper shows the best of ten restarts, chosen '
  'by the truth, and so do MSE and SSIM here; the PSNR is of the restart that an attacker would choose, of the least '
  'matching distance.'
)
CHOICES = (
  'The paper shows one sample (or batch) for each figure; how many it averages over is not stated: 8 here.',
  'The learning rate of these scenarios is not stated: 0.01, as in its training experiments. Both attackers match '
  'deltas, and labels are known.',
  'All its defenses act on the gradient of a local step; gradient compression and Laplacian noise act on the delta '
  'here. The delta of one step is −η times the gradient, so its noise has η times the scale: 0.01·√(0.1/2); of two '
  'steps, √2 times that.',
  'GradDefense is the published code: each step, 5 of 10 slices, clipped to its standard deviation of 0.1.',
)
TABLES = Paper(PAPER, METRICS, CHOICES)

PART = 'What is stored was run on a part of EMNIST Balanced.'
LABELS = ('none', 'GC', 'DP', 'Soteria', 'GD', 'OUTPOST')
# Scenario -> (title, dataset, n, B, attack -> (MSE, LPIPS, SSIM), each in the order of LABELS).
SCENARIOS = {
  1: ('EMNIST: E = 1, n = 1, B = 1', 'emnist/balanced', 1, 1, {
    'DLG': ((6.6e-3, 13.96, 113.63, 95.19, 32.57, 77.05), (7.1e-2, 0.55, 0.60, 0.63, 0.64, 0.58),
            (0.99, 0.30, 0.19, 3.3e-2, 1.0e-2, 0.13)),
    'csDLG': ((2.6e-7, 199.08, 297.84, 296.76, 360.98, 294.678), (5.8e-7, 0.60, 0.66, 0.63, 0.64, 0.68),
              (1.00, 0.32, 6.5e-2, 4.1e-2, 1.7e-2, 1.6e-2)),
  }),
  2: ('EMNIST: E = 1, n = 2, B = 1', 'emnist/balanced', 2, 1, {
    'DLG': ((5.8e-2, 69.87, 319.30, 16.07, 25.50, 75.92), (0.31, 0.61, 0.66, 0.70, 0.65, 0.67),
            (0.77, 3.7e-2, 2.4e-2, 4.7e-2, 2.7e-2, 6.4e-2)),
    'csDLG': ((0.14, 336.05, 1231.82, 782.93, 668.79, 277.73), (0.40, 0.60, 0.65, 0.59, 0.63, 0.66),
              (0.70, 3.3e-2, 1.4e-2, 1.6e-2, 3.4e-2, 3.8e-2)),
  }),
  3: ('CIFAR-10: E = 1, n = 1, B = 1', 'cifar10', 1, 1, {
    'DLG': ((5.1e-2, 7.83, 34.08, 25.91, 11.46, 13.10), (0.53, 0.77, 0.77, 0.76, 0.74, 0.77),
            (0.57, 4.4e-2, 3.6e-2, 5.5e-2, 2.2e-2, 2.1e-2)),
    'csDLG': ((5.9e-5, 27.50, 34.51, 25.91, 56.66, 35.24), (1.8e-3, 0.76, 0.78, 0.76, 0.77, 0.77),
              (0.99, 2.6e-2, 2.9e-2, 5.5e-2, 1.7e-2, 3.4e-2)),
  }),
  4: ('CIFAR-10: E = 1, n = 16, B = 16', 'cifar10', 16, 16, {
    'DLG': ((1.37, 4.82, 19.92, 2.85, 4.04, 15.85), (0.67, 0.69, 0.71, 0.70, 0.69, 0.70),
            (2.9e-2, 1.9e-2, 1.5e-2, 2.2e-2, 2.2e-2, 1.7e-2)),
    'csDLG': ((6.2e-2, 6.85, 13.68, 14.87, 2.1e10, 13.03), (0.51, 0.69, 0.71, 0.69, 0.71, 0.70),
              (0.30, 4.5e-2, 1.6e-2, 2.7e-2, 3.8e-2, 3.1e-2)),
  }),
}  # fmt: skip
ATTACKS = {'DLG': 'dga(steps=3000)', 'csDLG': 'csdlg_lbfgs(steps=3000)'}
# Two cores: (trials, restarts, controls, steps).
MINI = {1: (8, 4, 8, 1500), 2: (4, 3, 4, 1000), 3: (4, 3, 4, 1500), 4: (1, 2, 1, 500)}


def _scenario(index):
  title, dataset, samples, batch_size, figures = SCENARIOS[index]
  steps = samples // batch_size
  more = '' if index == 2 else ', more so to csDLG'  # the paper's figures of scenario 2 say the reverse
  defenses = {
    'none': 'none',
    'GC': 'prune(rate=0.8)',
    'DP': f'laplace(scale={0.01 * (0.1 / 2) ** 0.5 * steps**0.5:.6g})',
    'Soteria': 'soteria(rate=0.5)',
    'GD': 'graddefense_step(stddev=0.1,clip=0.1)',
    'OUTPOST': 'outpost(noise=0.8,fisher=0.4,decay=0.1,prune=0.8)',
  }
  trials, restarts, controls, attack_steps = MINI[index]
  runs, cells = {}, []
  for attack, text in ATTACKS.items():
    runs[attack.lower()] = Run(
      dataset,
      'lenet4',
      text,
      defenses,
      trials=1 if samples == 16 else 8,
      settings=AuditSettings(batch_size=samples, restarts=10, labels='known', knowledge='non-adaptive'),
      client=ClientSettings(share='delta', local_batch_size=batch_size, learning_rate=0.01),
      init='explicit',
      mini={
        'trials': trials,
        'restarts': restarts,
        'controls': controls,
        'changed': {text.partition('(')[0]: {'steps': attack_steps}},
      },
    )
    for label, mse, lpips, ssim in zip(LABELS, *figures[attack], strict=True):
      cells += [
        Cell(attack, label, 'oracle_mse_unclipped', attack.lower(), label, mse),
        Cell(attack, label, 'lpips', attack.lower(), label, lpips),
        Cell(attack, label, 'oracle_ssim', attack.lower(), label, ssim),
        Cell(attack, label, 'psnr', attack.lower(), label),
      ]
  return TABLES.table(
    f'outpost_3_{index}',
    f'Table III, scenario {index}: {title}',
    f'Undefended deltas leak their images{more}; every defense hides them.',
    runs,
    cells,
    choices=(*((PART,) if dataset.startswith('emnist') else ()), *CHOICES),
  )


# Name -> (title, dataset, classes per client, samples, rounds, local steps, the text's figures for DP, and those for
# OUTPOST). Figures are the accuracy in % of the undefended one, and the delay in %.
FIGURE_3 = {
  'emnist': ('EMNIST', 'emnist/balanced', 24, 112_800, 100, 180, (91.5, None), (96.72, 3.54)),
  'cifar10': ('CIFAR-10', 'cifar10', 5, 50_000, 150, 80, (83.1, None), (97.81, 1.47)),
}
# Two cores: name -> (samples, rounds, test samples, seeds).
MINI_TRAININGS = {'emnist': (35_200, 100, 5000, 3), 'cifar10': (10_000, 150, 1000, 5)}


def _methods(steps):
  """Returns what figure 3 compares; `steps` local ones make the delta that noise is added to."""
  return {
    'none': utility.UNDEFENDED,
    'GC': Method('prune(rate=0.8)'),
    'DP': Method(f'laplace(scale={0.01 * (0.1 / 2 * steps) ** 0.5:.6g})'),
    'Soteria': Method('soteria(rate=0.5)'),
    'GD': Method('graddefense_step(stddev=0.1,clip=0.1)'),
    'OUTPOST': Method('outpost(noise=0.8,fisher=0.4,decay=0.1,prune=0.8)'),
  }


def _figure_3(name):
  title, dataset, classes, samples, rounds, steps, dp, outpost = FIGURE_3[name]
  few, mini_rounds, tested, seeds = MINI_TRAININGS[name]
  mini_steps = 5 * -(-few // 100 // 32)
  run = Trainings(
    dataset,
    'lenet4',
    _methods(steps),
    dataclasses.replace(utility.OUTPOST, partition=f'classes(number={classes})', rounds=rounds),
    samples,
    init='explicit',
    mini={
      'samples': few,
      'tested': tested,
      'seeds': seeds,
      'protocol': {'rounds': mini_rounds},
      'defenses': _methods(mini_steps),
      'extrapolated': ('Soteria', 'GD'),
    },
  )
  printed = {'DP': dp, 'OUTPOST': outpost}
  cells = []
  for label in run.defenses:
    share, delay = printed.get(label, (None, None))
    cells += [
      Cell(title, label, 'accuracy', 'training', label),
      Cell(title, label, 'accuracy_share', 'training', label, share),
      Cell(title, label, 'round_seconds', 'training', label),
      Cell(title, label, 'overhead', 'training', label, delay),
    ]
  return TABLES.table(
    f'outpost_figure_3_{name}',
    f'Figure 3: accuracy and seconds under the defenses, {title}',
    'OUTPOST keeps more than 90 % of the accuracy; Soteria and GradDefense take longer.',
    {'training': run},
    cells,
    metrics='The figure prints curves; numbers are those of the text, in % of the undefended model’s accuracy and '
    'time.',
    choices=(
      *((PART,) if dataset.startswith('emnist') else ()),
      'How the data are non-i.i.d. is not stated: each client holds half of the classes, 1 % of the samples.',
      'LeNet with four convolutions has the “explicit” weights, which its sigmoids need to learn at all.',
      'OUTPOST’s noise goes with the variance of the weights: it needs the paper’s rate of 0.01. Of 180 local steps 29 '
      'are expected to be protected, of 80 22, of the 55 and 20 at scale mini 19 and 11.',
      'Gradient compression and Laplacian noise act on the delta, the latter with the scale that noise of variance 0.1 '
      'on the gradient of each local step would have there.',
      'GradDefense is the published code: each step, 5 of 10 slices, clipped to its standard deviation of 0.1.',
    ),
  )


# Strategy -> (samples of the class in a batch, attack).
FISHED = {
  'class fishing': (1, 'class_fishing(target=1,tv={tv})'),
  'feature fishing': (2, 'feature_fishing(target=1,method=published,tv={tv})'),
  'feature fishing (ours)': (2, 'feature_fishing(target=1,method=difference,tv={tv})'),
}
FISHED_UNDER = {
  'none': 'none',
  'GC': 'prune(rate=0.8)',
  'DP': f'laplace(scale={(0.1 / 2) ** 0.5:.6g})',
  'OUTPOST': 'outpost(noise=0.8,fisher=0.4,decay=0.1,prune=0.8)',
}


def _fishing(strategy, state, mode, modified=True):
  """Returns the audit of a strategy on an 'untrained' or 'trained' model; the trained one is defended in eval mode."""
  count, text = FISHED[strategy]
  trained = state == 'trained'
  training = {'trained': 10_000, 'training_steps': 500} if trained else {}
  return Fishing(
    'cifar10',
    'resnet20(pixels=imagenet)',
    text.format(tv=0.05 if trained else 0.001),
    FISHED_UNDER if trained and mode == 'eval' and modified else {'none': 'none'},
    trials=16,
    settings=AuditSettings(batch_size=128, knowledge='non-adaptive'),
    client=ClientSettings(batch_norm=mode),
    public=2_000,
    count=count,
    modified=modified,
    trained=50_000 * trained,
    training_steps=8_000 * trained,
    mini={
      'model': 'resnet20(width=8,pixels=imagenet)',
      'trials': 4,
      'controls': 2,
      'public': 1_000,
      'changed': {text.partition('(')[0]: {'inner': 'csdlg_fast', 'steps': 600, 'start': 'constant'}},
      **training,
    },
  )


def _figure_5():
  runs, cells = {}, []
  for strategy in FISHED:
    settings = [(state, mode) for state in ('untrained', 'trained') for mode in ('eval', 'train')]
    if strategy != 'feature fishing (ours)':
      settings += [('trained', mode, False) for mode in ('eval', 'train')]
    for state, mode, *unmodified in settings:
      row = ', '.join([state, mode, *(['unmodified'] if unmodified else [])])
      name = f'{strategy}_{row}'.translate(str.maketrans(' ', '_', ',()'))
      runs[name] = _fishing(strategy, state, mode, *unmodified)
      cells += [
        Cell(strategy, row if label == 'none' else f'{row}, {label}', metric, name, label)
        for label in runs[name].defenses
        for metric in ('cosine', 'queries', 'alone', 'psnr', 'ssim')
      ]
  return TABLES.table(
    'outpost_figure_5',
    'Figure 5: fishing for one sample of a batch of 128, under defenses',
    'One changed layer isolates a sample; BatchNorm on the statistics of the batch prevents it, DP and OUTPOST, too. '
    'The paper prints pictures alone, one each.',
    runs,
    cells,
    metrics='Ours, of the first batch, are in isolated.png of each run. The cosine is that of what was isolated with '
    'the '
    'gradient of the sample of the class that it is most similar to, 1 for one sample alone; “known to be alone” is '
    'the fraction of batches of which the server can tell. PSNR and SSIM are those with the most similar image of the '
    'batch.',
    choices=(
      'ResNet-20 and CIFAR-10 take the place of ResNet-18 and CIFAR-100; the target is class 1, as in the paper.',
      'One sample of the class: class fishing. Two: feature fishing, as published, and ours, which takes the '
      'difference of two queries and a direction from public images.',
      'Total variation weighs 0.05 where the model is trained, 1e-3 where it is not: found on the first batch without '
      'defense. The paper’s weight is not stated.',
      'Unmodified: the same attack on the upload at the honest model.',
      'Defenses keep the settings of table III, on the gradient, the client’s BatchNorm in eval mode, as published '
      'fishing has it; DP’s noise is Laplacian.',
    ),
  )


def _vit_fishing(strategy, state, modified):
  run = _fishing(strategy, state, 'eval', modified)
  return dataclasses.replace(
    run,
    model='vit_tiny',
    init='default',
    defenses={'none': 'none'},
    training_optimizer='adam',
    training_rate=1e-3,
    mini={**run.mini, 'model': 'vit_tiny(depth=4,width=96)', **({'training_steps': 300} if state == 'trained' else {})},
  )


def _figure_6():
  runs, cells = {}, []
  for strategy in ('class fishing', 'feature fishing'):
    for state, modified in (('untrained', True), ('trained', True), ('trained', False)):
      row = state if modified else f'{state}, unmodified'
      name = f'{strategy}_{row}'.translate(str.maketrans(' ', '_', ','))
      runs[name] = _vit_fishing(strategy, state, modified)
      cells += [Cell(strategy, row, metric, name, 'none') for metric in ('cosine', 'queries', 'alone', 'psnr', 'ssim')]
  return TABLES.table(
    'outpost_figure_6',
    'Figure 6: fishing for one sample of a batch of 128 on a vision transformer',
    'Fishing fails on ViT, untrained and pretrained, with and without label conflicts. The paper prints pictures '
    'alone.',
    runs,
    cells,
    metrics='Columns are those of figure 5. The cosine says whether a sample was isolated, PSNR whether it was '
    'reconstructed.',
    choices=(
      'ViT-tiny with patches of 4 and CIFAR-10 take the place of ViT and CIFAR-100; the target is class 1.',
      'ViT has no BatchNorm: the modes of figure 5 are one here.',
    ),
  )


EXPERIMENTS = (*map(_scenario, SCENARIOS), *map(_figure_3, FIGURE_3), _figure_5(), _figure_6())
