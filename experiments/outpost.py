"""OUTPOST (Wang, Hugh, Li: More Than Enough Is Too Much, IEEE/ACM Transactions on Networking, 2024), table III."""

from experiments.experiment import Cell, Experiment, Run

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
  'Fashion-MNIST takes the place of EMNIST Balanced: both are grey, 28×28.',
  'The paper shows one sample (or batch) for each figure; how many it averages over is not stated: 8 here.',
  'The learning rate of these scenarios is not stated: 0.01, as in its training experiments. Both attackers match '
  'deltas, and labels are known.',
  'All its defenses act on the gradient of a local step; gradient compression and Laplacian noise act on the delta '
  'here. The delta of one step is −η times the gradient, so its noise has η times the scale: 0.01·√(0.1/2); of two '
  'steps, √2 times that.',
  'GradDefense is the published code (each step, 5 of 10 slices); the bound of its clipping is not stated: 1 here.',
)

LABELS = ('none', 'GC', 'DP', 'Soteria', 'GD', 'OUTPOST')
# Scenario -> (title, dataset, n, B, attack -> (MSE, LPIPS, SSIM), each in the order of LABELS).
SCENARIOS = {
  1: ('EMNIST: E = 1, n = 1, B = 1', 'fashion_mnist', 1, 1, {
    'DLG': ((6.6e-3, 13.96, 113.63, 95.19, 32.57, 77.05), (7.1e-2, 0.55, 0.60, 0.63, 0.64, 0.58),
            (0.99, 0.30, 0.19, 3.3e-2, 1.0e-2, 0.13)),
    'csDLG': ((2.6e-7, 199.08, 297.84, 296.76, 360.98, 294.678), (5.8e-7, 0.60, 0.66, 0.63, 0.64, 0.68),
              (1.00, 0.32, 6.5e-2, 4.1e-2, 1.7e-2, 1.6e-2)),
  }),
  2: ('EMNIST: E = 1, n = 2, B = 1', 'fashion_mnist', 2, 1, {
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
MINI = {1: (4, 4, 8, 1500), 2: (4, 3, 4, 1000), 3: (4, 3, 4, 1500), 4: (1, 2, 1, 500)}


def _scenario(index):
  title, dataset, samples, batch_size, figures = SCENARIOS[index]
  steps = samples // batch_size
  defenses = {
    'none': 'none',
    'GC': 'prune(rate=0.8)',
    'DP': f'laplace(scale={0.01 * (0.1 / 2) ** 0.5 * steps**0.5:.6g})',
    'Soteria': 'soteria(rate=0.5)',
    'GD': 'graddefense_step(stddev=0.1,clip=1)',
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
      batch_size=samples,
      restarts=10,
      init='explicit',
      share='delta',
      local_batch_size=batch_size,
      learning_rate=0.01,
      labels='known',
      mini={
        'trials': trials,
        'restarts': restarts,
        'controls': controls,
        'settings': {text.partition('(')[0]: {'steps': attack_steps}},
      },
    )
    for label, mse, lpips, ssim in zip(LABELS, *figures[attack], strict=True):
      cells += [
        Cell(attack, label, 'oracle_mse_unclipped', attack.lower(), label, mse),
        Cell(attack, label, 'lpips', attack.lower(), label, lpips),
        Cell(attack, label, 'oracle_ssim', attack.lower(), label, ssim),
        Cell(attack, label, 'psnr', attack.lower(), label),
      ]
  return Experiment(
    f'outpost_3_{index}',
    PAPER,
    f'Table III, scenario {index}: {title}',
    'Undefended deltas leak their images, more so to csDLG; every defense leaves noise.',
    runs,
    tuple(cells),
    METRICS,
    CHOICES,
  )


EXPERIMENTS = tuple(map(_scenario, SCENARIOS))
