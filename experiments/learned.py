"""What an attack that learns sees through each defense, beside one that matches; tables without a paper's figures."""

from experiments.experiment import Cell, Experiment, Run
from gradleak import AuditSettings

PAPER = (
  'Not a table of a paper; the attack is of Wu, Chen, Guo and Weinberger: Learning to Invert: Simple Adaptive Attacks '
  'for Gradient Inversion in Federated Learning. UAI 2023.'
)
METRICS = (
  'PSNR and Pearson correlation are means over all uploads, one image each. Re-identified is the fraction of them '
  'whose original has rank 1 among the public images and those that no upload holds.'
)
# Defense -> (its text, the adaptive attack of csDLG).
DEFENSES = {
  'none': ('none', None),
  'Gaussian noise': ('gaussian(stddev=0.05)', 'prior'),
  'pruning': ('prune(rate=0.9)', 'masked'),
  'Soteria': ('soteria(rate=0.6)', 'masked'),
  'GradDefense': ('graddefense(stddev=0.1)', 'weighted'),
  'OUTPOST': ('outpost', 'simulated'),
  'DCS²': ('concealment', 'smooth'),
}


# For slow defenses fewer uploads are simulated, and each is used eight times. Concealment descends for each upload, and
# Soteria differentiates every feature.
SLOW = {'digits': ('DCS²',), 'faces': ('Soteria', 'DCS²')}


def _run(dataset, public, attack, rows):
  return Run(
    dataset, 'lenet', attack, {row: DEFENSES[row][0] for row in rows}, trials=64, public=public, init='explicit',
    settings=AuditSettings(knowledge='both'), mini={'controls': 32},
  )  # fmt: skip


def _experiment(dataset, public, more=''):
  """Learning to Invert and csDLG, non-adaptive and adaptive, on the same uploads."""
  slow = SLOW[dataset]
  runs = {
    'learned': _run(dataset, public, f'lti(steps=1000,hidden=256{more})', [row for row in DEFENSES if row not in slow]),
    'learned_slow': _run(dataset, public, f'lti(steps=200,hidden=256,batch_size=64,reuse=8{more})', slow),
    'matched': _run(dataset, public, 'csdlg_fast(steps=1000,tv=1e-6)', DEFENSES),
  }
  cells = []
  for row, (_, adaptive) in DEFENSES.items():
    learned = 'learned_slow' if row in slow else 'learned'
    tried = [(learned, None, 'learns from undefended uploads'), ('matched', None, 'csDLG, non-adaptive')]
    if row != 'none':
      tried += [(learned, 'learned', 'learns through the defense'), ('matched', adaptive, 'csDLG, adaptive')]
    cells += [
      Cell(column, row, metric, run, row, adaptive=adaptive)
      for run, adaptive, column in tried
      for metric in ('psnr', 'pearson', 'identified')
    ]
  return Experiment(
    f'lti_{dataset}',
    PAPER,
    f'An inverse that is learned from {public:,} public images through each defense, LeNet, {dataset}',
    'A network that is trained through a defense reads more of uploads under it than one that is trained on undefended '
    'uploads. Nothing of this is printed.',
    runs,
    tuple(cells),
    METRICS,
    ('The control of an attack that learns shows the mean public image: its PSNR is that of a good guess.',),
  )


EXPERIMENTS = (_experiment('digits', 1297), _experiment('faces', 100, ',mirrored=True'))
