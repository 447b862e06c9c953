"""What published attacks assume of clients, each dropped alone; tables of this project, without a paper's figures."""

import dataclasses

from experiments.deep import SGD, pretrained
from experiments.experiment import Cell, Experiment, Run
from gradleak import AuditSettings, ClientSettings

PAPER = 'Not a table of a paper.'
METRICS = 'PSNR and Pearson correlation are means over all images of an upload, matched to the private ones.'
LOCAL = {'share': 'delta', 'local_epochs': 2, 'local_batch_size': 2}
TANH = 'lenet(activation=tanh)'


def _run(attack, *, client=None, model='lenet', samples=1, init='explicit', trials=16, dataset='faces', **mini):
  return Run(
    dataset, model, attack, {'none': 'none'}, trials=trials, init=init, client=client or ClientSettings(),
    settings=AuditSettings(batch_size=samples, labels='known', knowledge='non-adaptive'),
    mini={'trials': min(trials, 8), 'controls': 8, **mini},
  )  # fmt: skip


def _cells(column, row, run):
  return [Cell(column, row, metric, run, 'none') for metric in ('psnr', 'pearson', 'revealed')]


def _experiment(name, title, expectation, runs, cells, choices=()):
  return Experiment(name, PAPER, title, expectation, runs, tuple(cells), METRICS, choices)


def _aggregation():
  """Secure aggregation of 1 to 8 clients, and adapters alone, by matching and by Fidel's closed form."""
  runs, cells = {}, []
  networks = {'LeNet': 'lenet', 'dense network': 'mlp'}
  for title, model in networks.items():
    attacks = {'csDLG': 'csdlg_fast(tv=1e-5)', **({'Fidel': 'fidel'} if model == 'mlp' else {})}
    for label, attack in attacks.items():
      column = f'{title}, {label}'
      for clients in (1, 2, 4, 8):
        run = f'{model}_{label.lower()}_{clients}'
        client = ClientSettings(cohort=clients)
        runs[run] = _run(attack, client=client, model=model, samples=clients, trials=max(2, 16 // clients))
        cells += _cells(column, f'mean of {clients} clients', run)
    for rank in (2, 16):
      run = f'{model}_lora_{rank}'
      runs[run] = _run('csdlg_fast(tv=1e-5)', model=f'{model}+lora(rank={rank})')
      cells += _cells(f'{title}, csDLG', f'adapters of rank {rank} alone', run)
  return _experiment(
    'assumptions_aggregation',
    'What the server sees: the mean of several clients, or adapters alone; one image per client',
    'The mean of K clients with one image each is the gradient of a batch of K images. Nothing of this is printed.',
    runs,
    cells,
    ('An untrained adapter B is zero, and so is the gradient of A: what is shared at first is AᵀG alone.',),
  )


def _deltas():
  """The delta of E = 2, n = 4, B = 2, simulated and taken for a gradient."""
  clients = {
    'SGD 0.1': {},
    'momentum 0.9, 0.03': {'learning_rate': 0.03, 'momentum': 0.9},
    'Adam 1e-3': {'optimizer': 'adam', 'learning_rate': 1e-3},
  }
  matched = {
    'the client’s steps': '',
    'the gradient (eq. 2 of OUTPOST)': ',match=approximation',
    'a surrogate model (SME)': ',match=surrogate',
    'one epoch instead of two': ',epochs=1',
    'batches of 4 instead of 2': ',batch_size=4',
    'three times the rate': ',rate=3.0',
    'samples in unknown order': ',orders=free,order=1e-3',
  }
  runs, cells = {}, []
  for column, local in clients.items():
    for i, (row, text) in enumerate(matched.items()):
      run = f'{column.split()[0].lower()}_{i}'
      runs[run] = _run(
        f'csdlg_fast(steps=1000{text})', client=ClientSettings(**LOCAL, **local), model=TANH, samples=4, init='default',
        trials=8, controls=2, changed={'csdlg_fast': {'steps': 600}},
      )  # fmt: skip
      cells += _cells(column, row, run)
  return _experiment(
    'assumptions_deltas',
    'What the delta of two epochs of two batches is taken for, LeNet with tanh',
    'Simulating the client beats taking its delta for a gradient, also with momentum and Adam. Nothing of this is '
    'printed.',
    runs,
    cells,
    (
      'LeNet with sigmoids hides the difference: the first step makes nearly all of its delta (distance 3e-4 between '
      'delta and gradient at a rate of 0.1).',
    ),
  )


# What is added to csDLG -> its settings.
PRIORS = {
  'eight times the steps': '',
  'BatchNorm statistics': 'batch_norm=0.001',
  'four random starts, consistent': 'seeds=4,group=0.01,start=uniform',
  'four random starts': 'seeds=4,start=uniform',
  'half of the entries': 'partial=0.5',
  'flat minimum': 'sharpness=0.1',
  'random subsets (MAGIA)': 'subset=2',
  'an untrained generator': '',
}
TRAINED = {
  'model': 'resnet20(pixels=imagenet)', 'dataset': 'cifar10', 'init': 'default',
  'client': ClientSettings(batch_norm='eval'),
}  # fmt: skip


BATCHES = {'eight times the steps', 'random subsets (MAGIA)'}  # rows that exist for batches only


def _priors(name, title, networks, rows, choices=()):
  """Each prior and search, with and without, on the same uploads; networks: column -> (settings, samples, at mini)."""
  runs, cells = {}, []
  for column, (given, samples, mini) in networks.items():
    base = f'{column.split(",")[0].split()[-1].lower()}_{samples}'
    for row, text in {'csDLG': '', **rows}.items():
      run = base if row == 'csDLG' else f'{base}_{row.translate(str.maketrans(" ", "_", ",()"))}'
      steps = 4000 if row == 'eight times the steps' else 500
      attack = f'csdlg_fast(steps={steps},tv=1e-5{"," if text else ""}{text})'
      made = _run(f'cinet(steps={steps})' if row == 'an untrained generator' else attack, samples=samples, **given)
      training = dataclasses.replace(pretrained(80, SGD), tested=500) if given is TRAINED else None
      runs[run] = dataclasses.replace(made, training=training, mini={'trials': 16, 'controls': 2, **mini})
      cells += _cells(column, row, run)[:2]
      if run != base:
        cells.append(Cell(column, row, 'psnr_gain', run, 'none', minus=base))
  return _experiment(
    name,
    title,
    'Each is of a published attack: GradInversion (BatchNorm statistics, consistent starts), FedLeak (entries, flat '
    'minimum, in its manner), MAGIA (subsets), CI-Net (generator). Nothing of this is printed.',
    runs,
    cells,
    (*choices, 'Steps are as many in all rows but one that says so: a step of CI-Net takes up to nine times as long.'),
  )


def _batches():
  mnist = {'dataset': 'mnist'}
  networks = {f'LeNet, batches of {samples}': (mnist, samples, {}) for samples in (4, 8)}
  rows = {row: text for row, text in PRIORS.items() if row != 'BatchNorm statistics'}
  return _priors(
    'assumptions_priors', 'What priors and searches add to csDLG on batches, paired over uploads', networks, rows
  )


def _trained():
  training = dataclasses.replace(pretrained(50, SGD, 15, 15_000), tested=500)
  changed = {attack: {'steps': 200} for attack in ('csdlg_fast', 'cinet')}
  mini = {'model': 'resnet20(width=8,pixels=imagenet)', 'training': training, 'changed': changed}
  rows = {row: text for row, text in PRIORS.items() if row not in BATCHES}
  return _priors(
    'assumptions_trained',
    'What priors and searches add to csDLG on a trained ResNet-20, single images, paired over uploads',
    {'trained ResNet-20': (TRAINED, 1, mini)},
    rows,
    ('BatchNorm is in eval mode, as published attacks have it.',),
  )


EXPERIMENTS = (_aggregation(), _deltas(), _batches(), _trained())
