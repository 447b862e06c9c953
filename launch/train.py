r"""Trains a model by federated learning under each of several defenses: what hiding costs, beside what it hides.

    python launch/train.py --dataset=digits --clients=20 --per_round=5 --rounds=40 --workdir=results/train
    python launch/train.py --dataset=mnist --data_dir=data --partition='classes(number=5)' --defenses='topk(ratio=0.1)'
    python launch/train.py --clients=20 --rounds=60 --attacks='csdlg(tv=1e-6)' --workdir=results/frontier \
      --defenses='none;gaussian(stddev=1e-3|1e-2|1e-1);topk(ratio=0.1)'

The model starts from weights that are drawn, or from those of a file (--weights). Clients train at home, by FedAvg
(--share=delta) or FedSGD (--share=gradient), and the server averages. The file rounds.jsonl holds
accuracy, loss, exact bytes and ε of each round. With --attacks, the upload of a client of one sample is attacked under
the same defenses. The attacks run before the first round and after each --attack_every rounds. The frontier sets
accuracy against the result of the strongest attacker. The page training.html shows it all. A run that was stopped goes
on when the same command is given again.
"""

import dataclasses
import os

import jax
import numpy as np
from absl import flags

import gradleak as gl
from gradleak import registry, report
from gradleak.core import errors
from gradleak.data import partition
from launch import _cluster, _program
from launch._flags import NETWORK, OPTIONS, Flags

_GIVEN = Flags()
with _program.group('what is trained'):
  _GIVEN.shared(
    *('dataset', *OPTIONS, *NETWORK, 'init', 'weights', 'public'),
    dataset='digits',
    public=(100, 'The last training samples are public, for defenses that need any; at most half, where not given.'),
  )
  _GIVEN.string('partition', 'iid', 'iid, iid(samples=600), classes(number=2,low=1,high=20), dirichlet(alpha=0.5).')
  _GIVEN.integer('clients', 100, 'Number of clients.')
  _GIVEN.string(
    'protocol',
    None,
    'dcs2, ffl, graddefense, outpost, and for other data dcs2_cifar10, graddefense_cifar10, outpost_emnist: partition, '
    'clients and training as in that paper; flags prevail.',
  )
with _program.group('client'):
  _GIVEN.settings(gl.ClientSettings, share='delta', local_batch_size=10)
with _program.group('training, server and attacks'):
  _GIVEN.settings(gl.FrontierSettings)
  _GIVEN.shared('defenses', 'attacks', attacks=('', 'As in launch/audit.py; none by default.'))
with _program.group('run'):
  _GIVEN.shared('seed', 'group_size', 'workdir', 'compilation_cache', 'progress', workdir='results/train')
_cluster.define(_GIVEN)


def main(_):
  """Trains as the flags describe and prints where it ended."""
  _GIVEN.configure()
  most = max(len(registry.defenses(_GIVEN.defenses)), _GIVEN.trials if _GIVEN.attacks else 0)
  if _cluster.shared(_GIVEN, 'train', most, _GIVEN.workdir):
    return
  _check_protocol()
  defenses = registry.defenses(_GIVEN.defenses)
  attacks = registry.attacks(_GIVEN.attacks) if _GIVEN.attacks else []
  _program.say(f'reading {_GIVEN.dataset} …')
  dataset, test = map(_GIVEN.read, ('train', 'test'))
  _GIVEN.fit(dataset)
  _follow_protocol(len(np.unique(dataset.targets)))
  kept = len(dataset.samples) - _public(len(dataset.samples))
  samples, targets = dataset.samples[:kept], dataset.targets[:kept]
  keys, shape = jax.random.split(jax.random.key(_GIVEN.seed), 3), dataset.samples.shape[1:]
  model = _GIVEN.network(_GIVEN.outputs(dataset), shape)
  variables = _GIVEN.variables(model, dataset, (test.samples, test.targets), 'test')
  scenario = gl.scenario(
    model,
    samples,
    targets,
    key=keys[0],
    variables=variables,
    dataset=dataset.name,
    client=_GIVEN.client(),
    public=(dataset.samples[kept:], dataset.targets[kept:]) if kept < len(dataset.samples) else None,
    gallery=gl.data.gallery(_GIVEN.dataset, 'train', **_GIVEN.gallery_options()) if attacks else None,
    modality=gl.modalities.of_config(dataset.settings),
  )
  found = gl.frontier(
    keys[2],
    scenario.noted(
      {
        **_GIVEN.weights_described(),
        'partition': _GIVEN.partition,
        'seed': _GIVEN.seed,
        'class_names': list(dataset.class_names),
      }
    ),
    (test.samples, test.targets),
    defenses,
    attacks,
    clients=partition.parse(_GIVEN.partition, keys[1], targets, _GIVEN.clients),
    settings=_GIVEN.made(gl.FrontierSettings),
    workdir=_GIVEN.workdir,
    execution=_cluster.execution(_GIVEN),
    progress=_GIVEN.progress,
  )
  if found is None:
    print(f'process {_GIVEN.process} of {_GIVEN.processes} has done its share; the command without it writes the page.')
    return
  report.write(found, _GIVEN.workdir)
  print(report.frontier_table(report.entries(found.trained, found.rows, found.config), found.config))
  print(f'report: {os.path.join(_GIVEN.workdir, "training.html")}')


def _public(samples):
  """Returns how many of so many training samples are public; where nobody asked, at most half."""
  if not _GIVEN.present('public'):
    return min(_GIVEN.public, samples // 2)
  return errors.check_number('public', _GIVEN.public, low=0, high=samples - 1, integer=True)


def _check_protocol():
  """Raises `UsageError` for a protocol that is unknown, or of other clients."""
  if _GIVEN.protocol is None:
    return
  from experiments import utility

  if _GIVEN.protocol not in utility.PROTOCOLS:
    raise errors.unknown('protocol', _GIVEN.protocol, utility.PROTOCOLS)
  if _GIVEN.share == 'gradient':
    raise errors.UsageError(
      f'the protocol {_GIVEN.protocol} is of local training, and a client that shares its gradient takes one step '
      'without it: leave out --protocol or --share=gradient'
    )


def _follow_protocol(classes):
  """Sets the flags that were not given as a paper's protocol has them on data of so many classes."""
  if _GIVEN.protocol is None:
    return
  from experiments import utility

  for name, value in dataclasses.asdict(utility.protocol_on(_GIVEN.protocol, classes)).items():
    if not flags.FLAGS[name].present:
      flags.FLAGS[name].value = value


if __name__ == '__main__':
  _program.run(main)
