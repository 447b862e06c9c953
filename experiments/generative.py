"""Attackers with a prior on images, each beside its control; tables without a paper's figures."""

from experiments.experiment import Cell, Experiment, Run
from gradleak import AuditSettings

PAPER = 'Not a table of a paper; the attacks are cited in their docstrings.'
METRICS = 'PSNR and Pearson correlation are means over uploads of one image each.'
TRAINED = {'training_steps': 1000}
# Attack -> (its text, its settings for two cores).
ATTACKS = {
  'csDLG, no prior': ('csdlg_fast(tv=0.0)', {'steps': 600}),
  'csDLG, total variation': ('csdlg_fast(tv=1e-4)', {'steps': 600}),
  'CI-Net': ('cinet', {'steps': 300}),
  'GGL': ('ggl', {'steps': 150, 'population': 30, **TRAINED}),
  'descent on latents': ('gias(steps=1000,latent_steps=1000)', {'steps': 400, 'latent_steps': 400, **TRAINED}),
  'GIAS': ('gias', {'steps': 600, 'latent_steps': 300, **TRAINED}),
  'GIFD': ('gifd', {'steps': 600, 'latent_steps': 200, **TRAINED}),
  'plug-and-play': ('pnp', {'steps': 600, **TRAINED}),
}
DEFENSES = {'none': 'none', 'Gaussian noise': 'gaussian(stddev=0.05)'}


def _experiment(dataset, title, public):
  runs, cells = {}, []
  for row, (text, small) in ATTACKS.items():
    run = row.translate(str.maketrans(' ', '_', ',')).lower()
    runs[run] = Run(
      dataset, 'lenet', text, DEFENSES, trials=32, public=public, init='explicit',
      settings=AuditSettings(knowledge='non-adaptive', labels='known'),
      mini={'controls': 16, 'changed': {text.partition('(')[0]: small}},
    )  # fmt: skip
    cells += [
      Cell(column, row, metric, run, column) for column in DEFENSES for metric in ('psnr', 'over_control', 'pearson')
    ]
  return Experiment(
    f'priors_{dataset}',
    PAPER,
    f'Attackers with a prior, each beside its control, LeNet, {title}',
    'What an attack returns for noise in place of an update is its prior alone: only what is beyond that comes from '
    'the upload. Nothing of this is printed.',
    runs,
    tuple(cells),
    METRICS
    + ' “Over the control” is each upload’s PSNR less the 95th percentile of the control, which has random updates.',
    (f'Generators and denoisers are trained on {public:,} public images of the train split.',),
  )


EXPERIMENTS = (_experiment('faces', 'faces', 100), _experiment('mnist', 'MNIST', 2000))
