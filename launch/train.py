"""Trains a model by federated learning under each of several defenses: what hiding costs, beside what it hides.

    python launch/train.py --dataset=digits --clients=20 --per_round=5 --rounds=40 --workdir=results/train
    python launch/train.py --dataset=mnist --data_dir=data --partition='classes(number=5)' --defenses='topk(ratio=0.1)'
    python launch/train.py --clients=20 --rounds=60 --attacks='csdlg(tv=1e-6)' --workdir=results/frontier \
      --defenses='none;gaussian(stddev=1e-3|1e-2|1e-1);topk(ratio=0.1)'

Clients train at home (FedAvg: --share=delta; FedSGD: --share=gradient), the server averages. rounds.jsonl holds
accuracy, loss and exact bytes of each round. With --attacks, what a client of one sample would upload in the first
round is attacked under the same defenses, and frontier.png sets accuracy against what the worst attacker gets back. A
run that was stopped goes on when the same command is given again.
"""

import dataclasses
import os
import re
import sys

import jax
from absl import flags

from launch import _program

_DATASET = flags.DEFINE_string('dataset', 'digits', 'As in launch/audit.py; trained on train, measured on test.')
_DATA_DIR = flags.DEFINE_string('data_dir', None, 'Folder with prepared TFDS datasets (launch/prepare_data.py).')
_LIMIT = flags.DEFINE_integer('limit', None, 'Take the first samples alone, of each split.')
_MODEL = flags.DEFINE_string('model', 'lenet', 'As in launch/audit.py.')
_INIT = flags.DEFINE_string('init', 'explicit', 'explicit: U(-0.5, 0.5); default: U(±1/√fan_in), as PyTorch.')
_BATCH_NORM = flags.DEFINE_string('batch_norm', 'train', 'train or eval, as in launch/audit.py.')
_PARTITION = flags.DEFINE_string(
  'partition', 'iid', 'iid, iid(samples=600), classes(number=2,low=1,high=20), dirichlet(alpha=0.5).'
)
_CLIENTS = flags.DEFINE_integer('clients', 100, 'How many clients there are.')
_PER_ROUND = flags.DEFINE_integer('per_round', 10, 'How many of them are drawn for a round.')
_DROP_OUT = flags.DEFINE_float('drop_out', 0.0, 'Probability that one of these never answers.')
_ROUNDS = flags.DEFINE_integer('rounds', 100, 'Rounds of training.')
_SHARE = flags.DEFINE_string('share', 'delta', 'delta (FedAvg) or gradient (FedSGD).')
_EPOCHS = flags.DEFINE_integer('local_epochs', 1, 'Local epochs of FedAvg.')
_BATCH = flags.DEFINE_integer('local_batch_size', 10, 'Batch size of local training.')
_RATE = flags.DEFINE_float('learning_rate', 0.1, 'Learning rate of local training.')
_MOMENTUM = flags.DEFINE_float('momentum', 0.0, 'Momentum of local training.')
_DECAY = flags.DEFINE_float('weight_decay', 0.0, 'Weight decay of local training.')
_DEFENSES = flags.DEFINE_string('defenses', 'none', "As in launch/audit.py: ';' lists, '+' chains, '|' spans a grid.")
_ATTACKS = flags.DEFINE_string('attacks', '', 'As in launch/audit.py; none by default.')
_TRIALS = flags.DEFINE_integer('trials', 4, 'Samples that are attacked under each defense.')
_STEPS = flags.DEFINE_integer('steps', 1000, 'Steps of attacks that do not set their own.')
_SERVER = flags.DEFINE_string('server', 'sgd', "The server's optimizer: sgd or adam (FedAdam).")
_SERVER_RATE = flags.DEFINE_float('server_learning_rate', 1.0, 'Its learning rate.')
_SERVER_MOMENTUM = flags.DEFINE_float('server_momentum', 0.0, 'Its momentum, of sgd.')
_WEIGHTING = flags.DEFINE_string('weighting', 'samples', 'How much an upload counts: samples or equal.')
_EVERY = flags.DEFINE_integer('evaluate_every', 1, 'Rounds between two measurements on the test split.')
_PUBLIC = flags.DEFINE_integer('public', 100, 'The last training images are public, for defenses that need any.')
_SEED = flags.DEFINE_integer('seed', 0, 'Seed of weights, partition, draws and noise.')
_GROUP = flags.DEFINE_integer('group_size', 1, 'Clients that share one pass; changes speed, and bits.')
_WORKDIR = flags.DEFINE_string('workdir', 'results/train', 'Folder for rows, timing and checkpoints.')
_PROGRESS = flags.DEFINE_string('progress', 'auto', 'auto, bar, lines or none.')

# What identifies a run; the rest changes speed alone.
_SCIENCE = (_DATASET, _LIMIT, _MODEL, _INIT, _BATCH_NORM, _PARTITION, _CLIENTS, _PER_ROUND, _DROP_OUT, _ROUNDS, _SHARE)
_SCIENCE += (_EPOCHS, _BATCH, _RATE, _MOMENTUM, _DECAY, _SERVER, _SERVER_RATE, _SERVER_MOMENTUM, _WEIGHTING)
_SCIENCE += (_EVERY, _PUBLIC, _SEED)


def main(argv):
  """Trains as the flags describe and prints where it ended."""
  del argv
  jax.config.update('jax_num_cpu_devices', os.cpu_count() or 1)  # one XLA device per core

  import optax

  import gradleak as gl
  from gradleak import defenses, errors, progress, report, specs
  from gradleak.data import partition
  from gradleak.federated import Client, simulation, training
  from gradleak.scenario import fingerprint

  options = {'data_dir': _DATA_DIR.value, 'limit': _LIMIT.value}
  samples, test = (gl.data.load(_DATASET.value, split, **options) for split in ('train', 'test'))
  errors.check_number('public', _PUBLIC.value, low=0, high=len(samples.images) - 1, integer=True)
  for flag in (_RATE, _SERVER_RATE):
    errors.check_number(flag.name, flag.value, low=1e-12, finite=True)
  for flag in (_MOMENTUM, _SERVER_MOMENTUM, _DECAY):
    errors.check_number(flag.name, flag.value, low=0, high=1)
  errors.check_number('seed', _SEED.value, low=0, high=2**32 - 1, integer=True)
  servers = {
    'sgd': lambda: optax.sgd(_SERVER_RATE.value, _SERVER_MOMENTUM.value or None),
    'adam': lambda: optax.adam(_SERVER_RATE.value, eps=1e-3),  # τ of Reddi et al. 2021
  }
  if _SERVER.value not in servers:
    raise errors.unknown('server', _SERVER.value, servers)
  server = servers[_SERVER.value]()
  public = len(samples.images) - _PUBLIC.value
  model = gl.models.create(_MODEL.value, samples.num_classes, init=_INIT.value)
  keys = jax.random.split(jax.random.key(_SEED.value), 3)
  variables = jax.jit(model.init, static_argnums=1)(keys[0], samples.images.shape[1:])
  local = optax.sgd(_RATE.value, _MOMENTUM.value or None)
  local = optax.chain(optax.add_decayed_weights(_DECAY.value), local) if _DECAY.value else local
  fedavg = _SHARE.value == 'delta'
  client = Client(
    model,
    samples.num_classes,
    share=_SHARE.value,
    optimizer=local,
    epochs=_EPOCHS.value if fedavg else 1,
    batch_size=_BATCH.value if fedavg else None,
    batch_norm=_BATCH_NORM.value,
  )
  private = samples.images[:public], samples.labels[:public]
  shared = (samples.images[public:], samples.labels[public:]) if _PUBLIC.value else None
  context = defenses.registry.Context(client, variables, samples.images.shape[1:], shared)
  chosen = [defenses.parse(text, context) for text in specs.parse_list(_DEFENSES.value, 'defense')]
  parts = partition.parse(_PARTITION.value, keys[1], private[1], _CLIENTS.value)
  attacks = specs.parse_list(_ATTACKS.value, 'attack') if _ATTACKS.value else []
  attack = _attack(keys[2], client, variables, private, shared, chosen, attacks, samples) if attacks else None

  config = {flag.name: flag.value for flag in _SCIENCE}
  config |= {'data_fingerprint': fingerprint((samples.images, samples.labels))}
  trained = {}
  for number, defense in enumerate(chosen):
    federation = simulation.Federation(
      defense.build(defense.numbers, client),
      *private,
      parts,
      _PER_ROUND.value,
      server=server,
      weighting=_WEIGHTING.value,
      drop_out=_DROP_OUT.value,
      group_size=_GROUP.value,
    )
    if len(chosen) > 1:
      print(f'{defense.name}, {number + 1} of {len(chosen)}', file=sys.stderr, flush=True)
    folder = os.path.join(_WORKDIR.value, f'{number:02}-{re.sub(r"[^a-z0-9]+", "-", defense.name.lower()).strip("-")}')
    _, rows = training.train(
      keys[2],
      federation,
      variables,
      _ROUNDS.value,
      test=(test.images, test.labels),
      evaluate_every=_EVERY.value,
      workdir=folder,
      config={**config, 'defense': defense.name},
      on_round=progress.rounds(_PROGRESS.value),
    )
    trained[defense.name] = rows, training.seconds_of_a_round(folder)
  found = report.entries(trained, attack().rows if attack else [])
  print(report.frontier_table(found))
  _write('frontier.csv', report.frontier_csv(found))
  picture = report.frontier(found)
  if picture is not None:
    _write('frontier.png', picture)


def _attack(key, client, variables, private, public, chosen, attacks, samples):
  """Returns () -> the audit of clients of one private sample each; settings that cannot be run say so at once."""
  import gradleak as gl
  from gradleak.audit import prepare

  scenario = gl.scenario(
    client.model,
    *(x[: _TRIALS.value] for x in private),
    variables=variables,
    num_classes=samples.num_classes,
    dataset=samples.name,
    share=_SHARE.value,
    local_epochs=_EPOCHS.value if _SHARE.value == 'delta' else 1,
    learning_rate=_RATE.value,
    momentum=_MOMENTUM.value,
    weight_decay=_DECAY.value,
    batch_norm=_BATCH_NORM.value,
    public=public,
  )
  scenario = scenario._replace(client=dataclasses.replace(client, batch_size=None))
  arguments = key, scenario, [defense.name for defense in chosen], attacks, _TRIALS.value
  settings = {'steps': _STEPS.value, 'knowledge': 'both'}
  prepare(*arguments, **settings)  # what cannot be run says so before anything is trained

  def run():
    folder = os.path.join(_WORKDIR.value, 'audit')
    result = gl.audit(*arguments, workdir=folder, progress=_PROGRESS.value, **settings)
    gl.report.write(result, folder)
    print(f'report: {os.path.join(folder, "report.html")}')
    return result

  return run


def _write(name, content):
  from gradleak.storage import write_atomically

  path = os.path.join(_WORKDIR.value, name)
  write_atomically(path, content)
  print(f'{os.path.splitext(name)[1][1:]}: {path}')


if __name__ == '__main__':
  _program.run(main)
