"""What a federated training under each defense shows, in sentences that claim no more; names stand in backticks."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gradleak.core.statistics import proportion_interval
from gradleak.federated.training import UNSETTLED, unsettled
from gradleak.report import chance
from gradleak.report.formatting import listed, number, percent_range, significant
from gradleak.report.frontier import Entry, between, epsilon, percent, points, protects, undefended
from gradleak.report.privacy import NO_PROTECTION
from gradleak.studies.frontier import Trained

_ENOUGH = 30  # trials: with fewer, intervals are wide

Worst = Mapping[str, Mapping[str, Any]]  # defense -> its entry of `cases.worst_case`
Config = Mapping[str, Any]


def opening(
  found: Sequence[Entry],
  worst: Worst,
  *,
  config: Config,
  stopped: Sequence[str] = (),
  leakage: Iterable[Mapping[str, Any]] = (),
  size: int = 1,
) -> list[str]:
  """Returns the sentences that open the page.

  Args:
    found: `frontier.entries`.
    worst: defense -> its entry of `cases.worst_case`.
    config, leakage: as of `training.write_training`.
    stopped: the defenses whose training the ε budget ended.
    size: images per client that was attacked.
  """
  by_name = {one['defense']: one for one in found}
  defended = [one for one in found if one['defense'] != 'none']
  base = by_name.get('none')
  said = [_undefended(base, worst, config, size)]
  if leaks_undefended(worst):
    said += _hidden([one for one in defended if one['defense'] in worst], worst, base, config, size)
  else:
    said += _costs(defended, base, config)
  said += _along(leakage)
  if stopped:
    ended = [f'`{defense}` after {by_name[defense]["rounds"]}' for defense in stopped]
    planned = f' of {config["rounds"]}' if 'rounds' in config else ''
    said.append(f'The ε budget ended the training under {listed(ended)}{planned} rounds.')
  if worst:
    said.append('Images that were not recovered may be recovered by other attacks, or by these with more steps.')
  return said


def cautions(found: Sequence[Entry], worst: Worst, *, config: Config, trained: Mapping[str, Trained]) -> list[str]:
  """Returns the reasons to read the figures with care, one sentence each.

  Args:
    found, worst, config: as of `opening`.
    trained: as of `training.write_training`.
  """
  notes = [*_of_training(found, config, trained), *_of_attacks(found, worst)]
  if len(found) > 1:
    known = any(one['points'] is not None for one in found)
    by = ': the intervals of accuracy are by the test samples alone' if known else ''
    notes.append(f'Each defense was trained once{by}; another seed may end elsewhere.')
  return notes


def settings(config: Config) -> list[str]:
  """Returns the settings of a training as sentences; missing ones are left out."""

  def has(*keys: str) -> bool:
    return all(config.get(key) for key in keys)

  said = []
  if has('dataset', 'model'):
    said.append(f'The model is {config["model"]}, the data are {config["dataset"]}.')
  if has('clients', 'per_round'):
    drop = f'; each fails to answer with probability {config["drop_out"]:g}' if has('drop_out') else ''
    split = f', with the samples split by `{config["partition"]}`' if has('partition') else ''
    said.append(f'There are {config["clients"]} clients{split}; {config["per_round"]} are drawn for a round{drop}.')
  rate = f'learning rate {config["learning_rate"]:g}' if has('learning_rate') else ''
  momentum = f'momentum {config["momentum"]:g}' if has('momentum') else ''
  decay = f'weight decay {config["weight_decay"]:g}' if has('weight_decay') else ''
  how = listed([part for part in (rate, momentum, decay) if part] or ['SGD'])
  if config.get('share') == 'delta':
    epochs = config.get('local_epochs') or 1
    batches = f' in batches of {config["local_batch_size"]}' if has('local_batch_size') else ''
    said.append(
      f'Each of them trains for {epochs} local epoch{"s" if epochs > 1 else ""}{batches} with {how}, and sends the '
      'change of its weights (FedAvg).'
    )
  elif config.get('share') == 'gradient':
    said.append('Each of them sends the gradient of all its samples (FedSGD).')
  if has('server'):
    rate = f' with learning rate {config["server_learning_rate"]:g}' if has('server_learning_rate') else ''
    momentum = f' and momentum {config["server_momentum"]:g}' if has('server_momentum') else ''
    weights = {'samples': ', weighted by samples', 'equal': ' with equal weights'}.get(config.get('weighting', ''), '')
    said.append(f'The server averages the uploads{weights}, and takes a step of {config["server"]}{rate}{momentum}.')
  if has('server_noise'):
    said.append(f'It adds noise of multiplier {config["server_noise"]:g} to clipped uploads (Geyer et al.).')
  if has('budget'):
    said.append(f'Training stops before the round that would exceed ε = {config["budget"]:g}.')
  return said


def leaks_undefended(worst: Worst) -> bool:
  """Returns whether the attacks recover anything without a defense; if not, they cannot show what a defense hides."""
  return 'none' in worst and worst['none']['recovered'] > 0


def per_cent(ratio: float) -> str:
  """Returns a ratio in per cent with two digits, or as an integer from 10 % on."""
  return f'{100 * ratio:.0f} %' if ratio >= 0.095 else f'{significant(100 * ratio)} %'


def measured(one: Trained) -> list[tuple[int, float]]:
  """Returns (round, test accuracy in %) of the rounds that measured it."""
  return [(row['round'], 100 * row['accuracy']) for row in one.rows if 'accuracy' in row]


def _of_training(found: Sequence[Entry], config: Config, trained: Mapping[str, Trained]) -> list[str]:
  """Returns the cautions on the figures of the training."""
  base = undefended(found)
  classes = config.get('num_classes')
  notes = chance.sentences(found, config)
  share = (base or {}).get('majority_share') or (1 / classes if classes else None)
  reached = base and base['accuracy']
  if base and share and reached is not None and not base['at_chance'] and reached < min(2 * share, share + 0.1):
    notes.append(
      f'Without a defense the model is hardly better than always predicting one class ({percent(share)}): this does '
      'not show what the defenses cost in accuracy.'
    )
  swings = {defense: unsettled(one.rows) for defense, one in trained.items()}
  most = max(swings, key=lambda defense: swings[defense])
  if swings[most] >= UNSETTLED:
    notes.append(
      f'Accuracy had not settled: in the last quarter of the training it still changed by up to {swings[most]:.1f} '
      f'points between two measurements (under `{most}`).'
    )
  return notes


def _of_attacks(found: Sequence[Entry], worst: Worst) -> list[str]:
  """Returns the cautions on the figures of the attacks."""
  notes = []
  trials = max((entry['n'] for entry in worst.values()), default=_ENOUGH)
  if trials < _ENOUGH:
    most = math.ceil(100 * float(proportion_interval(0, trials)[2]))
    sample = 'Only one upload was' if trials == 1 else f'Only {trials} uploads were'
    notes.append(
      f'{sample} attacked under each defense: even where nothing is recovered, up to {most} % of uploads may '
      'be recoverable (95 % interval).'
    )
  if leaks_undefended(worst):
    failing = [e for e in worst.values() if not e['recovered'] and e['not_solved'] + e['diverged']]
    failed, runs = (sum(e[key] for e in failing for key in keys) for keys in (('not_solved', 'diverged'), ('runs',)))
    if failing:
      notes.append(
        f'Against {_names(failing)} {failed} of {runs} runs failed as an optimisation (“not solved” or diverged), '
        'which does not show that the data are protected.'
      )
    unmet = [e for e in worst.values() if e['defense'] != 'none' and e['aware'] is None and not e['recovered']]
    if unmet:
      notes.append(f'No attacker who knows the defense was run against {_names(unmet)}; one may do better.')
  bare = [one for one in found if one['defense'] not in worst]
  if worst and bare:
    notes.append(f'No upload was attacked under {_names(bare)}.')
  idle = [entry for entry in worst.values() if 'defense changed nothing' in entry['flags']]
  if idle:
    notes.append(f'{_names(idle)} changed nothing in the uploads that were attacked.')
  return notes


def _undefended(base: Entry | None, worst: Worst, config: Config, size: int) -> str:
  """Returns the sentence on training without a defense: the accuracy, and whether uploads leak."""
  attacked = worst.get('none')
  noise = ' at the clients, but with noise at the server,' if config.get('server_noise') else ''
  without = f'Without a defense{noise}'
  if base is None:
    trained = 'No training without a defense was run, so nothing here shows what the defenses cost'
  elif base['accuracy'] is None:
    trained = f'{without} the model was trained for {_rounds(base)}, but not measured on test samples'
  else:
    reached = f'a test accuracy of {percent(base["accuracy"])}{_lost(base)}'
    trained = f'{without} the model reaches {reached}{"," * bool(_lost(base))} after {_rounds(base)}'
  if not worst:
    return f'{trained}. Nothing was attacked, so this page does not show what an attacker learns.'
  if attacked is None:
    return f'{trained}. No undefended upload was attacked, so nothing here shows that these attacks work at all.'
  if not attacked['recovered']:
    return (
      f'{trained}. Even without a defense the attackers recover none of {_uploads(attacked["n"], size)}: this setting '
      'proves nothing about what any defense hides.'
    )
  leak = (
    f'the attackers recover {attacked["recovered"]} of {_uploads(attacked["n"], size)} from uploads of clients with '
    f'{_images(size)} (95 % interval {percent_range(attacked)})'
  )
  return f'{trained}; without one, {leak}.' if base is None else f'{trained}, and {leak}.'


def _hidden(defended: Sequence[Entry], worst: Worst, base: Entry | None, config: Config, size: int) -> list[str]:
  """Returns the sentences on what the attacked defenses hide, and what that costs."""
  if not defended:
    return []
  n = worst[defended[0]['defense']]['n']
  hiding = [one for one in defended if not worst[one['defense']]['recovered']]
  others = [one for one in defended if one not in hiding]
  none_of = f'none of the {_uploads(n, size)} is recovered by any attacker that was run'
  if len(defended) == 1:
    (one,) = defended
    entry = worst[one['defense']]
    still = f'{entry["recovered"]} of {_uploads(n, size)} {_is(entry["recovered"])} still recovered'
    what = none_of if hiding else still
    return [f'Under `{one["defense"]}` {what} ({percent_range(entry)}); {_cost(one, base, config)}.']
  if not hiding:
    least = min(others, key=lambda one: (worst[one['defense']]['recovered'], one['psnr'] or 0))
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
    said.append(f'Under {where} {between} of {n} {_is(counts[-1])} recovered.')
  return said


def _costs(defended: Sequence[Entry], base: Entry | None, config: Config) -> list[str]:
  """Returns what the defenses cost, where nothing shows what they hide."""
  known = [one for one in defended if one['accuracy'] is not None]
  if not known:
    return []
  best, least = max(known, key=_trains), min(known, key=_trains)
  if len(known) == 1:
    return [f'Under `{best["defense"]}` {_cost(best, base, config)}.']
  return [
    f'Of {len(known)} defenses, `{best["defense"]}` trains best: {_cost(best, base, config)}. '
    f'`{least["defense"]}` trains worst: {_cost(least, base, config)}.'
  ]


def _along(leakage: Iterable[Mapping[str, Any]]) -> list[str]:
  """Returns at most one sentence: how the leakage without a defense changes along the training."""
  known = sorted(
    (entry for entry in leakage if entry['defense'] == 'none' and entry['psnr'] is not None),
    key=lambda entry: entry['round'],
  )
  if len(known) < 2:
    return []
  ends = known[0], known[-1]
  when = ['before the first round' if not entry['round'] else f'after round {entry["round"]}' for entry in ends]
  what = [f'{number(entry["psnr"])} dB ({entry["recovered"]} of {entry["n"]} recovered)' for entry in ends]
  return [
    f'Without a defense, the PSNR of the strongest attacker goes from {what[0]} {when[0]} to {what[1]} {when[1]}.'
  ]


def _cost(one: Entry, base: Entry | None, config: Config) -> str:
  """Returns the accuracy, bytes and ε of a training under a defense, beside training without one."""
  parts = []
  if one['accuracy'] is None:
    parts.append('its accuracy was not measured')
  elif (added := points(one, base)) is None:
    parts.append(f'the model reaches {percent(one["accuracy"])}{_lost(one)}')
  else:
    beside = f'{abs(added):.1f} points {"less" if added < 0 else "more"} than' if added else 'as much as'
    interval = '' if one['points'] is None else f' (95 % interval {between(one)} points)'
    parts.append(f'the model reaches {percent(one["accuracy"])}{_lost(one)}, {beside} without a defense{interval}')
  sent = _bytes(one, base)
  if sent is not None:
    parts.append(f'clients send {sent}')
  if one['epsilon'] is not None:
    nothing = ', no protection in the sense of DP' if one['epsilon'] > NO_PROTECTION else ''
    bounded = one['epsilon'] < math.inf
    of = f' at δ = {one["epsilon_delta"]:g} ({protects(one)})'
    parts.append(f'ε is {epsilon(one["epsilon"])}{of}{nothing}' if bounded else 'no ε is bounded')
  return parts[0] if len(parts) == 1 else f'{", ".join(parts[:-1])}, and {parts[-1]}'


def _lost(one: Entry) -> str:
  return ', which is chance' if one['at_chance'] else ''


def _bytes(one: Entry, base: Entry | None) -> str | None:
  """Returns the bytes that are sent under a defense, beside none; None where that is not known."""
  if base is None or not base['bytes_up'] or one['bytes_up'] is None:
    return None
  ratio = one['bytes_up'] / base['bytes_up']
  if abs(ratio - 1) < 0.005:
    return 'as many bytes'
  return f'{per_cent(ratio)} of the bytes' if ratio < 1 else f'{ratio:.2f} times the bytes'


def _trains(one: Entry) -> tuple[float, float]:
  """Returns what trainings are ordered by: accuracy, then few bytes."""
  return (-1 if one['accuracy'] is None else one['accuracy'], -(one['bytes_up'] or 0))


def _names(entries: Iterable[Mapping[str, Any]]) -> str:
  return listed([f'`{entry["defense"]}`' for entry in entries])


def _is(count: int) -> str:
  return 'is' if count == 1 else 'are'


def _images(size: int) -> str:
  return 'one image' if size == 1 else f'{size} images'


def _uploads(n: int, size: int) -> str:
  if size == 1:
    return f'{n} image{"s" if n > 1 else ""}'
  return f'{n} batch{"es" if n > 1 else ""} of {size} images'


def _rounds(one: Entry) -> str:
  return f'{one["rounds"]} round{"s" if one["rounds"] != 1 else ""}'
