"""One self-contained HTML page of a federated training: what its defenses hide, and what they cost."""

import base64
import itertools
import math
import pathlib
import struct

from gradleak import storage
from gradleak.metrics.statistics import proportion_interval
from gradleak.report import figures, page, tables, wording
from gradleak.report.figures import SOFT
from gradleak.report.formatting import listed, number, percent_range, significant
from gradleak.report.frontier import PERFECT, entries, epsilon, frontier, frontier_csv, kib, milliseconds, percent

_RESTLESS = 2.0  # points of accuracy from one measurement to the next
_SURE = 30  # trials from which on an interval is no longer wide
_DPI = 160


def write_training(folder, trained, *, config, audit_rows=(), leakage=(), partition=None, audits=None):
  """Writes training.html, frontier.csv, and where there is something to draw frontier.png, curves.png, leakage.png.

  Args:
    folder: a path, made if it does not exist.
    trained: defense -> `frontier.Trained`, 'none' for training without any.
    config: the settings of the run, named as the flags of launch/train.py; those that it lacks are left out. Its
      'num_classes', if any, tells what guessing would give.
    audit_rows: of an audit of uploads under the same defenses, or none.
    leakage: the leakage along the training, or none: dicts of 'defense', 'round' (0 before the first) and what
      `frontier.worst_case_of` says of the uploads at that round.
    partition: PNG of `partition.partition_picture`, or None.
    audits: text -> the relative link to the report of an audit.
  """
  folder = pathlib.Path(folder)
  folder.mkdir(parents=True, exist_ok=True)
  found = entries(trained, audit_rows)
  pictures = {'frontier': frontier(found), 'curves': curves(trained), 'leakage': along(trained, leakage)}
  for name, png in pictures.items():
    if png is not None:
      storage.write_atomically(folder / f'{name}.png', png)
  storage.write_atomically(folder / 'frontier.csv', frontier_csv(found))
  worst = {entry['defense']: entry for entry in tables.worst_case(audit_rows)}
  size = next((row.get('batch_size') or 1 for row in audit_rows), 1)
  stopped = [defense for defense, one in trained.items() if one.stopped]
  source = (
    page.environment()
    .get_template('training.html.j2')
    .render(
      config=config,
      findings=opening(found, worst, config=config, stopped=stopped, leakage=leakage, size=size),
      cautions=cautions(found, worst, config=config, trained=trained),
      pictures={name: _embedded(png) for name, png in {**pictures, 'partition': partition}.items() if png is not None},
      lines=_lines(found, worst),
      small=_small_print(trained, worst),
      attacked=bool(worst),
      audits=audits or {},
      settings=_settings(config),
      citations=wording.citations(
        {
          'attacks': list(dict.fromkeys(row['attack'] for row in audit_rows)),
          'defenses': list(trained),
          'model': config.get('model', ''),
        }
      ),
    )
  )
  storage.write_atomically(folder / 'training.html', source)


def opening(found, worst, *, config, stopped=(), leakage=(), size=1):
  """Returns the sentences that open the page; they claim no more than the figures show. Names stand in backticks.

  Args:
    found: `frontier.entries`.
    worst: defense -> its entry of `tables.worst_case`.
    config, leakage: as of `write_training`.
    stopped: the defenses whose training the ε budget ended.
    size: images per client that was attacked.
  """
  by_name = {one['defense']: one for one in found}
  defended = [one for one in found if one['defense'] != 'none']
  base = by_name.get('none')
  said = [_undefended(base, worst, config, size)]
  if leaking_without(worst):
    said += _hidden([one for one in defended if one['defense'] in worst], worst, base, config, size)
  else:
    said += _costs(defended, base, config)
  said += _along(leakage)
  if stopped:
    ended = [f'`{defense}` after {by_name[defense]["rounds"]}' for defense in stopped]
    planned = f' of {config["rounds"]}' if 'rounds' in config else ''
    said.append(f'The ε budget ended the training under {listed(ended)}{planned} rounds.')
  if worst:
    said.append('What was not recovered was safe only from these attacks, with their budget.')
  return said


def leaking_without(worst):
  """Returns whether the attacks recover anything without a defense; if not, they cannot show what a defense hides."""
  return 'none' in worst and worst['none']['recovered'] > 0


def cautions(found, worst, *, config, trained):
  """Returns the reasons to read the figures with care, one sentence each.

  Args:
    found, worst, config: as of `opening`.
    trained: as of `write_training`.
  """
  base = next((one for one in found if one['defense'] == 'none'), None)
  classes = config.get('num_classes')
  notes = []
  if base and classes and base['accuracy'] is not None and base['accuracy'] < 2 / classes:
    notes.append(
      f'Without a defense the model is hardly better than guessing among {classes} classes: what the defenses cost in '
      'accuracy cannot be seen here.'
    )
  swings = {defense: _swing(one) for defense, one in trained.items()}
  most = max(swings, key=swings.get)
  if swings[most] >= _RESTLESS:
    notes.append(
      f'Accuracy had not settled: in the last quarter of the training it still moved by up to {swings[most]:.1f} '
      f'points from one measurement to the next (under `{most}`), so that the last one is a snapshot.'
    )
  trials = max((entry['n'] for entry in worst.values()), default=_SURE)
  if trials < _SURE:
    most = math.ceil(100 * float(proportion_interval(0, trials)[2]))
    sample = 'Only one upload was' if trials == 1 else f'Only {trials} uploads were'
    notes.append(
      f'{sample} attacked under each defense: even where nothing is recovered, up to {most} % of uploads may '
      'be recoverable (95 % interval).'
    )
  failing = [entry for entry in worst.values() if not entry['recovered'] and entry['not_solved'] + entry['diverged']]
  if leaking_without(worst) and failing:
    failed, runs = (
      sum(entry[key] for entry in failing for key in keys) for keys in (('not_solved', 'diverged'), ('runs',))
    )
    notes.append(
      f'Against {_names(failing)} {failed} of {runs} runs failed as an optimisation (“not solved” or diverged), which '
      'does not show that the data are protected.'
    )
  unmet = [e for e in worst.values() if e['defense'] != 'none' and e['aware'] is None and not e['recovered']]
  if leaking_without(worst) and unmet:
    notes.append(f'No attacker who knows the defense was run against {_names(unmet)}; one may do better.')
  bare = [one for one in found if one['defense'] not in worst]
  if worst and bare:
    notes.append(f'No upload was attacked under {_names(bare)}.')
  idle = [entry for entry in worst.values() if 'defense changed nothing' in entry['flags']]
  if idle:
    notes.append(f'{_names(idle)} changed nothing in the uploads that were attacked.')
  if len(found) > 1:
    notes.append('There was one training under each defense: differences of a point of accuracy or so may be chance.')
  return notes


def curves(trained):
  """Returns a PNG: test accuracy against rounds, a line per defense; None where none was measured."""
  if not any(_measured(one) for one in trained.values()):
    return None
  with figures.figure(7.2, 3.5 + _legend_height(trained), layout='constrained') as (figure, png):
    axes = figure.subplots()
    _draw_accuracy(axes, trained)
    figure.legend(loc='outside lower left', frameon=False, ncols=_across(trained), handlelength=3)
    return png()


def along(trained, leakage):
  """Returns a PNG: what the worst attacker gets back (PSNR, dB) beside accuracy, both against rounds; None without.

  Filled points are recovered from, hollow ones are not.
  """
  points = [entry for entry in leakage if entry['psnr'] is not None]
  if not points:
    return None
  with figures.figure(8.2, 3.3 + _legend_height(trained), layout='constrained') as (figure, png):
    left, right = figure.subplots(1, 2, sharex=True)
    for defense in trained:
      of_defense = sorted((entry for entry in points if entry['defense'] == defense), key=lambda entry: entry['round'])
      colour, dashes = figures.line_style(defense, trained)
      x, y = [entry['round'] for entry in of_defense], [min(entry['psnr'], PERFECT) for entry in of_defense]
      left.plot(x, y, color=colour, linestyle=dashes, linewidth=1.3, zorder=1, label=defense)
      faces = [colour if entry['recovered'] else 'white' for entry in of_defense]
      left.scatter(x, y, s=26, facecolors=faces, edgecolors=colour, linewidths=1.2, zorder=2)
    _finish(left, 'PSNR of the worst attacker, in dB')
    left.set_title('filled: images recovered · hollow: none', fontsize=8, color=SOFT)
    _draw_accuracy(right, trained)
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc='outside lower left', frameon=False, ncols=_across(trained), handlelength=3)
    return png()


def _undefended(base, worst, config, size):
  """Returns the sentence on training without a defense: how good the model gets, and whether its uploads leak."""
  attacked = worst.get('none')
  noise = config.get('server_noise')
  without = 'Without a defense' + (' at the clients, but with noise at the server,' if noise else '')
  if base is None:
    trained = 'No training without a defense was run, so nothing here shows what the defenses cost'
  elif base['accuracy'] is None:
    trained = f'{without} the model was trained for {_rounds(base)}, but not measured on test samples'
  else:
    trained = f'{without} the model reaches a test accuracy of {percent(base["accuracy"])} after {_rounds(base)}'
  if not worst:
    return f'{trained}. Nothing was attacked, so this page says nothing about what an attacker learns.'
  if attacked is None:
    return f'{trained}. No undefended upload was attacked, so nothing here shows that these attacks work at all.'
  if not attacked['recovered']:
    return (
      f'{trained}. Even without a defense the attackers recover none of {_uploads(attacked["n"], size)}: this setting '
      'proves nothing about what any defense hides.'
    )
  leak = (
    f'an attacker who sees what clients with {_images(size)} upload gets {attacked["recovered"]} of '
    f'{_uploads(attacked["n"], size)} back (95 % interval {percent_range(attacked)})'
  )
  return f'{trained}; without one, {leak}.' if base is None else f'{trained}, and {leak}.'


def _hidden(defended, worst, base, config, size):
  """Returns the sentences on what the defenses that were attacked hide, and what that costs."""
  if not defended:
    return []
  n = worst[defended[0]['defense']]['n']
  hiding = [one for one in defended if not worst[one['defense']]['recovered']]
  others = [one for one in defended if one not in hiding]
  none_of = f'none of the {_uploads(n, size)} is recovered by any attacker that was run'
  if len(defended) == 1:
    (one,) = defended
    entry = worst[one['defense']]
    still = f'{entry["recovered"]} of {_uploads(n, size)} still {"comes" if entry["recovered"] == 1 else "come"} back'
    what = none_of if hiding else still
    return [f'Under `{one["defense"]}` {what} ({percent_range(entry)}); {_cost(one, base, config)}.']
  if not hiding:
    least = min(others, key=lambda one: (worst[one['defense']]['recovered'], _or_zero(one['psnr'])))
    entry = worst[least['defense']]
    return [
      f'None of the {len(defended)} defenses hides everything: `{least["defense"]}` leaks least, '
      f'{entry["recovered"]} of {_uploads(n, size)} ({percent_range(entry)}); {_cost(least, base, config)}.'
    ]
  how_many = f'all {len(hiding)}' if not others else f'{len(hiding)} of {len(defended)}'
  said = [f'Under {how_many} defenses {none_of} ({percent_range(worst[hiding[0]["defense"]])}).']
  best = max(hiding, key=_trains)
  which = f'That is `{best["defense"]}`' if len(hiding) == 1 else f'Of these, `{best["defense"]}` trains best'
  said.append(f'{which}: {_cost(best, base, config)}.')
  counts = sorted(worst[one['defense']]['recovered'] for one in others)
  if counts:
    between = f'{counts[0]}' if counts[0] == counts[-1] else f'{counts[0]} to {counts[-1]}'
    where = f'`{others[0]["defense"]}`' if len(others) == 1 else f'the other {len(others)},'
    said.append(f'Under {where} {between} of {n} {"comes" if counts[-1] == 1 else "come"} back.')
  return said


def _costs(defended, base, config):
  """Returns what the defenses cost, where nothing shows what they hide."""
  measured = [one for one in defended if one['accuracy'] is not None]
  if not measured:
    return []
  best, least = max(measured, key=_trains), min(measured, key=_trains)
  if len(measured) == 1:
    return [f'Under `{best["defense"]}` {_cost(best, base, config)}.']
  return [
    f'Of {len(measured)} defenses, `{best["defense"]}` trains best: {_cost(best, base, config)}. '
    f'`{least["defense"]}` trains worst: {_cost(least, base, config)}.'
  ]


def _along(leakage):
  """Returns how what comes back without a defense changes along the training, in a list of at most one sentence."""
  points = sorted(
    (entry for entry in leakage if entry['defense'] == 'none' and entry['psnr'] is not None),
    key=lambda entry: entry['round'],
  )
  if len(points) < 2:
    return []
  first, last = points[0], points[-1]
  when = [
    'before the first round' if not entry['round'] else f'after round {entry["round"]}' for entry in (first, last)
  ]
  what = [f'{number(e["psnr"])} dB ({e["recovered"]} of {e["n"]} recovered)' for e in (first, last)]
  return [f'Without a defense, what the worst attacker gets back goes from {what[0]} {when[0]} to {what[1]} {when[1]}.']


def _cost(one, base, config):
  """Returns in words what training under a defense gives and costs, beside training without one."""
  parts = []
  if one['accuracy'] is None:
    parts.append('its accuracy was not measured')
  elif base is None or base['accuracy'] is None or base is one:
    parts.append(f'the model reaches {percent(one["accuracy"])}')
  else:
    points = _points(one, base)
    beside = f'{abs(points):.1f} points {"less" if points < 0 else "more"} than' if points else 'as much as'
    parts.append(f'the model reaches {percent(one["accuracy"])}, {beside} without a defense')
  share = _share(one, base)
  if share is not None:
    parts.append(f'clients send {share}')
  if one['epsilon'] is not None:
    at = f' at δ = {config["delta"]:g}' if 'delta' in config else ''
    bounded = one['epsilon'] < math.inf
    whose = f' {one["protects"]}' if one['protects'] else ''
    parts.append(f'ε is {epsilon(one["epsilon"])}{at}{whose}' if bounded else 'no ε bounds what is learnt')
  return parts[0] if len(parts) == 1 else f'{", ".join(parts[:-1])}, and {parts[-1]}'


def _points(one, base):
  """Returns how many points of accuracy a defense adds, from the figures as they are printed."""
  return round(round(100 * one['accuracy'], 1) - round(100 * base['accuracy'], 1), 1)


def _share(one, base):
  """Returns how many bytes are sent under a defense, beside none; None where that is not known."""
  if base is None or not base['bytes_up'] or one['bytes_up'] is None:
    return None
  ratio = one['bytes_up'] / base['bytes_up']
  if abs(ratio - 1) < 0.005:
    return 'as many bytes'
  return f'{_per_cent(ratio)} of the bytes' if ratio < 1 else f'{ratio:.2f} times the bytes'


def _per_cent(ratio):
  """Returns a share with two digits at least, none of them behind the point from ten per cent on."""
  return f'{100 * ratio:.0f} %' if ratio >= 0.095 else f'{significant(100 * ratio)} %'


def _trains(one):
  return (-1 if one['accuracy'] is None else one['accuracy'], -_or_zero(one['bytes_up']))


def _or_zero(value):
  return value or 0


def _names(entries):
  return listed([f'`{entry["defense"]}`' for entry in entries])


def _images(size):
  return 'one image' if size == 1 else f'{size} images'


def _uploads(n, size):
  if size == 1:
    return f'{n} image{"s" if n > 1 else ""}'
  return f'{n} batch{"es" if n > 1 else ""} of {size} images'


def _rounds(one):
  return f'{one["rounds"]} round{"s" if one["rounds"] != 1 else ""}'


def _lines(found, worst):
  """Returns the cells of the table, a dict per defense."""
  base = next((one for one in found if one['defense'] == 'none'), None)

  def line(one):
    other = one is not base and base is not None
    points = _points(one, base) if other and None not in (one['accuracy'], base['accuracy']) else None
    return {
      **one,
      'accuracy': percent(one['accuracy']),
      'points': '' if points is None else f'{points:+.1f}'.replace('-', '−'),
      'up': kib(one['bytes_up']),
      'share': _per_cent(one['bytes_up'] / base['bytes_up'])
      if other and one['bytes_up'] is not None and base['bytes_up']
      else '',
      'down': kib(one['bytes_down']),
      'milliseconds': milliseconds(one['seconds_defense']),
      'epsilon': epsilon(one['epsilon']),
      'worst': worst.get(one['defense']),
    }

  return [line(one) for one in found]


def _small_print(trained, worst):
  """Returns what stands in small print in the table, in words; empty for nothing."""
  beside = 'points of accuracy and share of the bytes beside training without a defense'
  interval = 'the exact 95 % interval of the share recovered'
  return listed(
    [words for words, there in ((beside, 'none' in trained and len(trained) > 1), (interval, worst)) if there] or ['']
  )


def _settings(config):
  """Returns the settings of a training as sentences; a key that `config` lacks is left out."""

  def has(*keys):
    return all(config.get(key) for key in keys)

  said = []
  if has('dataset', 'model'):
    said.append(f'The model is {config["model"]}, the data are {config["dataset"]}.')
  if has('clients', 'per_round'):
    drop = f'; each fails to answer with probability {config["drop_out"]:g}' if has('drop_out') else ''
    dealt = f', among whom the samples are dealt as `{config["partition"]}`' if has('partition') else ''
    said.append(f'There are {config["clients"]} clients{dealt}; {config["per_round"]} are drawn for a round{drop}.')
  rate = f'learning rate {config["learning_rate"]:g}' if has('learning_rate') else ''
  momentum = f'momentum {config["momentum"]:g}' if has('momentum') else ''
  decay = f'weight decay {config["weight_decay"]:g}' if has('weight_decay') else ''
  how = listed([part for part in (rate, momentum, decay) if part] or ['SGD'])
  if config.get('share') == 'delta':
    epochs = config.get('local_epochs') or 1
    batches = f' in batches of {config["local_batch_size"]}' if has('local_batch_size') else ''
    said.append(
      f'Each of them trains for {epochs} local epoch{"s" if epochs > 1 else ""}{batches} with {how}, and shares the '
      'change of its weights (FedAvg).'
    )
  elif config.get('share') == 'gradient':
    said.append('Each of them shares the gradient of all its samples (FedSGD).')
  if has('server'):
    rate = f' of learning rate {config["server_learning_rate"]:g}' if has('server_learning_rate') else ''
    momentum = f' and momentum {config["server_momentum"]:g}' if has('server_momentum') else ''
    weights = {'samples': ', weighted by their samples', 'equal': ', all alike'}.get(config.get('weighting'), '')
    said.append(f'The server averages the uploads{weights}, and takes a step of {config["server"]}{rate}{momentum}.')
  if has('server_noise'):
    said.append(f'It adds noise of multiplier {config["server_noise"]:g} to clipped uploads (Geyer et al.).')
  if has('budget'):
    said.append(f'Training stops before the round that would spend more than ε = {config["budget"]:g}.')
  return said


def _measured(one):
  return [(row['round'], 100 * row['accuracy']) for row in one.rows if 'accuracy' in row]


def _swing(one):
  """Returns by how many points accuracy moved at most between two measurements of the last quarter of them."""
  values = [accuracy for _, accuracy in _measured(one)]
  late = values[-max(2, len(values) // 4) :]
  return max((abs(b - a) for a, b in itertools.pairwise(late)), default=0.0)


def _draw_accuracy(axes, trained):
  """Draws test accuracy against rounds, a line per defense."""
  for defense, one in trained.items():
    points = _measured(one)
    colour, dashes = figures.line_style(defense, trained)
    if points:
      marker = 'o' if len(points) == 1 else None
      axes.plot(*zip(*points, strict=True), color=colour, linestyle=dashes, linewidth=1.4, marker=marker, label=defense)
      if one.stopped:
        axes.plot(*points[-1], marker='x', color=colour, markersize=6)
  if any(one.stopped for one in trained.values()):
    axes.set_title('×: the ε budget was spent', fontsize=8, color=SOFT)
  _finish(axes, 'test accuracy, in %')


def _finish(axes, label):
  from matplotlib.ticker import MaxNLocator

  axes.set_xlabel('round')
  axes.set_ylabel(label)
  axes.xaxis.set_major_locator(MaxNLocator(integer=True))
  axes.grid(color='#0a0b0c', alpha=0.1, linewidth=0.6)
  axes.set_axisbelow(True)
  axes.spines[['top', 'right']].set_visible(False)


def _across(trained):
  """Returns the number of columns of a legend."""
  longest = max(map(len, trained))
  return 3 if longest <= 28 else 2 if longest <= 46 else 1


def _legend_height(trained):
  return 0.18 * -(-len(trained) // _across(trained))


def _embedded(png):
  """Returns a PNG as a data URI, and its width in the page's pixels."""
  width = struct.unpack('>I', png[16:20])[0]
  return {'uri': f'data:image/png;base64,{base64.b64encode(png).decode()}', 'width': round(width * 1.12 * 96 / _DPI)}
