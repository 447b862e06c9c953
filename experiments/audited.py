"""Every defense on faces, against one who takes an upload for a gradient and those who know the defense."""

from experiments.comparison import BEST
from experiments.experiment import Cell, Experiment, Run
from gradleak import AuditSettings, registry

PAPER = 'Not a table of a paper; the defenses are cited in their docstrings.'
METRICS = 'PSNR and Pearson correlation are means over all uploads, one image each.'
DEFENSES = (
  'none', 'clip(norm=1)', 'gaussian(stddev=0.05)', 'laplace(scale=0.02)', 'prune(rate=0.9)', 'topk(ratio=0.1)',
  'dgc(ratio=0.1)', 'fragmentation(ratio=0.4)', 'fragmentation_random(ratio=0.4)', 'soteria(rate=0.6)',
  'graddefense(stddev=0.1)', 'clip_samples(norm=1)+graddefense(stddev=0.1)', 'graddefense_step(stddev=0.1)', 'outpost',
  'concealment', 'prune(rate=0.7)+concealment', 'client_dp(norm=1,noise=0.01)', 'dpsgd(norm=1,noise=0.01)', 'ats',
  'instahide',
)  # fmt: skip
UNKNOWABLE = ('none', 'ats', 'instahide')  # no attacker who knows them is implemented


def _shown(text: str) -> str:
  """Returns how a defense is called: by the name of its source first, if another."""
  published = registry.defense(text).published
  return f'{published} (`{text}`)' if published else text


def _faces():
  run = Run(
    'faces', 'lenet', 'csdlg_fast(tv=1e-6,steps=1000)', {text: text for text in DEFENSES}, trials=64, public=100,
    init='explicit', settings=AuditSettings(knowledge='both'),
    mini={'trials': 16, 'controls': 16, 'changed': {'csdlg_fast': {'steps': 400}, 'concealment': {'steps': 200}}},
  )  # fmt: skip
  attackers = {None: 'takes the upload for a gradient', BEST: 'knows the defense, the best for each upload'}
  cells = tuple(
    Cell(column, _shown(text), metric, 'faces', text, adaptive=adaptive)
    for adaptive, column in attackers.items()
    for text in DEFENSES
    if adaptive is None or text not in UNKNOWABLE
    for metric in ('psnr', 'pearson', 'identified', *(['change'] if adaptive is None else []))
  )
  return Experiment(
    'defenses_faces',
    PAPER,
    'Every defense, to a non-adaptive attacker and to the best adaptive one, LeNet, faces',
    'Which defenses hide an image from one who takes the upload for a gradient, and which from one who knows them. '
    'Nothing of this is printed.',
    {'faces': run},
    cells,
    METRICS
    + ' The best attacker who knows the defense is chosen for each upload by the verdict, then by PSNR, as a worst '
    'case is.',
    (
      'The model is initialised widely (“explicit”), as the attacks were published.',
      'Noise of a fixed size hides more, the smaller the gradient, which differs by an order of magnitude from one '
      'draw of the weights to another: the last column of the first table says how much each defense changes the '
      'update here.',
    ),
  )


EXPERIMENTS = (_faces(),)
