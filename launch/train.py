"""Trains a model by federated learning under each of several defenses: what hiding costs, beside what it hides.

    python launch/train.py --dataset=digits --clients=20 --per_round=5 --rounds=40 --workdir=results/train
    python launch/train.py --dataset=mnist --data_dir=data --partition='classes(number=5)' --defenses='topk(ratio=0.1)'
    python launch/train.py --clients=20 --rounds=60 --attacks='csdlg(tv=1e-6)' --workdir=results/frontier \
      --defenses='none;gaussian(stddev=1e-3|1e-2|1e-1);topk(ratio=0.1)'

Clients train at home (FedAvg: --share=delta; FedSGD: --share=gradient), the server averages. rounds.jsonl holds
accuracy, loss, exact bytes and ε of each round. With --attacks, what a client of one sample would upload is attacked
under the same defenses, before the first round and after each --attack_every rounds, and the frontier sets accuracy
against what the worst attacker gets back. training.html shows it all. A run that was stopped goes on when the same
command is given again.
"""

import dataclasses
import json
import os
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
_PROTOCOL = flags.DEFINE_string(
  'protocol',
  None,
  'ffl, graddefense, graddefense_cifar10, outpost: who trains as in that paper; flags prevail.',
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
_ATTACK_EVERY = flags.DEFINE_integer('attack_every', 0, 'Rounds between two attacks; 0: before the first alone.')
_TRIALS = flags.DEFINE_integer('trials', 4, 'Samples that are attacked under each defense.')
_CONTROLS = flags.DEFINE_integer('controls', 32, 'Null-gradient runs per attack that define success.')
_STEPS = flags.DEFINE_integer('steps', 1000, 'Steps of attacks that do not set their own.')
_SERVER = flags.DEFINE_string('server', 'sgd', "The server's optimizer: sgd or adam (FedAdam).")
_SERVER_RATE = flags.DEFINE_float('server_learning_rate', 1.0, 'Its learning rate.')
_SERVER_MOMENTUM = flags.DEFINE_float('server_momentum', 0.0, 'Its momentum, of sgd.')
_SERVER_NOISE = flags.DEFINE_float(
  'server_noise', 0.0, "Geyer's mechanism at the server: clipping at the median norm, and this noise multiplier."
)
_BUDGET = flags.DEFINE_float('budget', None, 'Training stops before the round that would spend more than this ε.')
_DELTA = flags.DEFINE_float('delta', 1e-5, 'δ of every ε.')
_WEIGHTING = flags.DEFINE_string('weighting', 'samples', 'How much an upload counts: samples or equal.')
_EVERY = flags.DEFINE_integer('evaluate_every', 1, 'Rounds between two measurements on the test split.')
_PUBLIC = flags.DEFINE_integer('public', 100, 'The last training images are public, for defenses that need any.')
_SEED = flags.DEFINE_integer('seed', 0, 'Seed of weights, partition, draws and noise.')
_GROUP = flags.DEFINE_integer('group_size', None, 'Clients that share one pass; changes speed, and bits.')
_WORKDIR = flags.DEFINE_string('workdir', 'results/train', 'Folder for rows, timing and checkpoints.')
_CACHE = _program.define_cache()
_PROGRESS = flags.DEFINE_string('progress', 'auto', 'auto, bar, lines or none.')

# What identifies a run; the rest changes speed alone.
_SCIENCE = (_DATASET, _LIMIT, _MODEL, _INIT, _BATCH_NORM, _PARTITION, _CLIENTS, _PER_ROUND, _DROP_OUT, _ROUNDS, _SHARE)
_SCIENCE += (_EPOCHS, _BATCH, _RATE, _MOMENTUM, _DECAY, _SERVER, _SERVER_RATE, _SERVER_MOMENTUM, _WEIGHTING)
_SCIENCE += (_SERVER_NOISE, _BUDGET, _DELTA, _EVERY, _PUBLIC, _SEED)


def main(argv):
  """Trains as the flags describe and prints where it ended."""
  del argv
  _program.configure(_CACHE)

  import gradleak as gl
  from gradleak import defenses, errors, progress, report, specs
  from gradleak.data import partition
  from gradleak.federated import accounting, simulation, training
  from gradleak.scenario import fingerprint
  from gradleak.storage import folder_name

  if _PROTOCOL.value is not None:
    from experiments import utility

    if _PROTOCOL.value not in utility.PROTOCOLS:
      raise errors.unknown('protocol', _PROTOCOL.value, utility.PROTOCOLS)
    for name, value in dataclasses.asdict(utility.PROTOCOLS[_PROTOCOL.value]).items():
      if not flags.FLAGS[name].present:
        flags.FLAGS[name].value = value
  options = {'data_dir': _DATA_DIR.value, 'limit': _LIMIT.value}
  samples, test = (gl.data.load(_DATASET.value, split, **options) for split in ('train', 'test'))
  errors.check_number('public', _PUBLIC.value, low=0, high=len(samples.images) - 1, integer=True)
  for flag in (_RATE, _SERVER_RATE):
    errors.check_number(flag.name, flag.value, low=1e-12, finite=True)
  for flag in (_MOMENTUM, _SERVER_MOMENTUM, _DECAY):
    errors.check_number(flag.name, flag.value, low=0, high=1)
  errors.check_number('seed', _SEED.value, low=0, high=2**32 - 1, integer=True)
  errors.check_number('attack_every', _ATTACK_EVERY.value, low=0, integer=True)
  server = _server(errors)
  public = len(samples.images) - _PUBLIC.value
  private = samples.images[:public], samples.labels[:public]
  shared = (samples.images[public:], samples.labels[public:]) if _PUBLIC.value else None
  model = gl.models.create(_MODEL.value, samples.num_classes, init=_INIT.value)
  keys = jax.random.split(jax.random.key(_SEED.value), 3)
  variables = jax.jit(model.init, static_argnums=1)(keys[0], samples.images.shape[1:])
  client = _client(model, samples.num_classes)
  context = defenses.registry.Context(client, variables, samples.images.shape[1:], shared)
  chosen = [defenses.parse(text, context) for text in specs.parse_list(_DEFENSES.value, 'defense')]
  parts = partition.parse(_PARTITION.value, keys[1], private[1], _CLIENTS.value)
  attack = _attack(keys[2], client, private, shared, samples) if _ATTACKS.value else None
  if attack:
    # What cannot be run says so before anything is trained.
    attack(variables, [defense.name for defense in chosen], None)

  config = {flag.name: flag.value for flag in _SCIENCE}
  config |= {'data_fingerprint': fingerprint((samples.images, samples.labels)), 'num_classes': samples.num_classes}
  trained, leakage, audits = {}, [], {}
  for number, defense in enumerate(chosen):
    federation = simulation.Federation(
      defense.build(defense.numbers, client),
      *private,
      parts,
      _PER_ROUND.value,
      server=server,
      weighting=_WEIGHTING.value,
      server_noise=_SERVER_NOISE.value,
      drop_out=_DROP_OUT.value,
      group_size=_GROUP.value,
    )
    ledger = accounting.ledger(
      defense.name,
      epochs=client.epochs,
      server_noise=_SERVER_NOISE.value,
      sampling_rate=_PER_ROUND.value / _CLIENTS.value,
      delta=_DELTA.value,
    )
    if len(chosen) > 1:
      print(f'{defense.name}, {number + 1} of {len(chosen)}', file=sys.stderr, flush=True)
    folder = os.path.join(_WORKDIR.value, folder_name(number, defense.name))
    report_round = progress.rounds(_PROGRESS.value, _ROUNDS.value)

    def after_round(row, state, seconds, name=defense.name, folder=folder, report_round=report_round):
      if report_round:
        report_round(row, state, seconds)
      if attack and _ATTACK_EVERY.value and row['round'] % _ATTACK_EVERY.value == 0:
        found = attack(state.variables, [name], os.path.join(folder, f'audit-{row["round"]:05}'), variables)
        _remember(folder, row['round'], report.worst_case_of(found.rows)[name])

    _, rows = training.train(
      keys[2],
      federation,
      variables,
      _ROUNDS.value,
      test=(test.images, test.labels),
      evaluate_every=_EVERY.value,
      workdir=folder,
      config={**config, 'defense': defense.name},
      privacy=ledger,
      budget=_BUDGET.value if ledger else None,  # an undefended reference has none to spend
      on_round=after_round,
    )
    bare = defense.name == 'none' and not _SERVER_NOISE.value
    added = None if bare else _added(folder, federation, variables, keys[2])
    trained[defense.name] = report.Trained(
      rows,
      training.seconds_of_a_round(folder),
      added,
      stopped=len(rows) < _ROUNDS.value,
      protects=accounting.caption(ledger) if ledger else None,
    )
    for entry in _remembered(folder):
      leakage.append({'defense': defense.name, **entry})
      place = os.path.join(os.path.basename(folder), f'audit-{entry["round"]:05}', 'report.html')
      audits[f'{defense.name}, after round {entry["round"]}'] = place
  rows = []
  if attack:
    rows = attack(variables, [defense.name for defense in chosen], os.path.join(_WORKDIR.value, 'audit')).rows
    first = report.worst_case_of(rows)
    leakage += [{'defense': defense.name, 'round': 0, **first[defense.name]} for defense in chosen]
    audits = {'before the first round, all defenses': 'audit/report.html', **audits}
  report.write_training(
    _WORKDIR.value,
    trained,
    config=config,
    audit_rows=rows,
    leakage=sorted(leakage, key=lambda entry: entry['round']) if _ATTACK_EVERY.value else (),
    partition=report.partition_picture(parts, private[1], samples.class_names),
    audits=audits,
  )
  print(report.frontier_table(report.entries(trained, rows)))
  print(f'report: {os.path.join(_WORKDIR.value, "training.html")}')


def _server(errors):
  """Returns the server's optimizer."""
  import optax

  servers = {
    'sgd': lambda: optax.sgd(_SERVER_RATE.value, _SERVER_MOMENTUM.value or None),
    'adam': lambda: optax.adam(_SERVER_RATE.value, eps=1e-3),  # τ of Reddi et al. 2021
  }
  if _SERVER.value not in servers:
    raise errors.unknown('server', _SERVER.value, servers)
  return servers[_SERVER.value]()


def _client(model, num_classes):
  """Returns the undefended `Client`."""
  import optax

  from gradleak.federated import Client

  local = optax.sgd(_RATE.value, _MOMENTUM.value or None)
  fedavg = _SHARE.value == 'delta'
  return Client(
    model,
    num_classes,
    share=_SHARE.value,
    optimizer=optax.chain(optax.add_decayed_weights(_DECAY.value), local) if _DECAY.value else local,
    epochs=_EPOCHS.value if fedavg else 1,
    batch_size=_BATCH.value if fedavg else None,
    batch_norm=_BATCH_NORM.value,
  )


def _attack(key, client, private, public, samples):
  """Returns (variables, names of defenses, folder, previous=None) -> the audit of clients of one private sample each.

  `previous` are the weights that they were sent before; without a folder, settings are checked and nothing is run.
  """
  import gradleak as gl
  from gradleak import specs
  from gradleak.audit import prepare

  attacks = specs.parse_list(_ATTACKS.value, 'attack')

  def run(variables, names, folder, previous=None):
    scenario = gl.scenario(
      client.model,
      *(x[: _TRIALS.value] for x in private),
      variables=variables,
      num_classes=samples.num_classes,
      dataset=samples.name,
      share=_SHARE.value,
      local_epochs=client.epochs,
      learning_rate=_RATE.value,
      momentum=_MOMENTUM.value,
      weight_decay=_DECAY.value,
      batch_norm=_BATCH_NORM.value,
      public=public,
      previous=previous,
    )
    scenario = scenario._replace(client=dataclasses.replace(client, batch_size=None))
    arguments = key, scenario, names, attacks, _TRIALS.value
    settings = {'steps': _STEPS.value, 'knowledge': 'both', 'controls': _CONTROLS.value}
    if folder is None:
      return prepare(*arguments, **settings)
    result = gl.audit(*arguments, workdir=folder, progress=_PROGRESS.value, **settings)
    gl.report.write(result, folder)
    return result

  return run


def _added(folder, federation, variables, key):
  """Returns the seconds that the defense adds to a round, measured once and kept in the folder."""
  from gradleak.federated import training
  from gradleak.storage import computed_once

  def split():
    without, added = training.seconds_split(federation, variables, key)
    return {'seconds_without': without, 'seconds_defense': added}

  return computed_once(os.path.join(folder, 'split.json'), split)['seconds_defense']


def _remembered(folder):
  """Returns what attacks after rounds found, one dict per round."""
  path = os.path.join(folder, 'leakage.jsonl')
  if not os.path.exists(path):
    return []
  with open(path, encoding='utf-8') as file:
    return [json.loads(line) for line in file]


def _remember(folder, number, found):
  """Keeps what the attack after a round found; a round that is done again after a resume replaces itself."""
  from gradleak.storage import json_lines, write_atomically

  others = [entry for entry in _remembered(folder) if entry['round'] != number]
  entries = sorted([*others, {'round': number, **found}], key=lambda entry: entry['round'])
  write_atomically(os.path.join(folder, 'leakage.jsonl'), json_lines(entries))


if __name__ == '__main__':
  _program.run(main)
