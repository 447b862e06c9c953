"""What a federated training under each defense shows: each finding with its values, and no more than these say."""

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from gradleak.core.statistics import differ, proportion_interval
from gradleak.federated.chance import counted
from gradleak.federated.training import UNSETTLED, unsettled
from gradleak.modalities import of_rows
from gradleak.report import chance, wording
from gradleak.report.formatting import defenses, listed, percent, scored, significant, unit
from gradleak.report.frontier import Entry, between, cost, epsilon, gained, protects, score, undefended
from gradleak.report.privacy import NO_PROTECTION
from gradleak.report.words import Finding, found, said, within_noise, worded
from gradleak.studies.frontier import Trained

_ENOUGH = 30  # trials: with fewer, intervals are wide

Worst = Mapping[str, Mapping[str, Any]]  # defense -> its entry of `cases.worst_case`
Config = Mapping[str, Any]


def opening(
  entries: Sequence[Entry],
  worst: Worst,
  *,
  config: Config,
  trained: Mapping[str, Trained],
  stopped: Sequence[str] = (),
  leakage: Iterable[Mapping[str, Any]] = (),
  size: int = 1,
) -> list[Finding]:
  """Returns what opens the page.

  Args:
    entries: `frontier.entries`.
    worst: defense -> its entry of `cases.worst_case`.
    config, trained, leakage: as of `training.write_training`.
    stopped: the defenses whose training the ε budget ended.
    size: images per client that was attacked.
  """
  by_name = {one['defense']: one for one in entries}
  defended = [one for one in entries if one['defense'] != 'none']
  base = by_name.get('none')
  alike = functools.partial(_others_alike, trained, counted(config))
  made = [_undefended(base, worst, config, size)]
  if leaks_undefended(worst):
    made += _hidden([one for one in defended if one['defense'] in worst], worst, base, size, alike)
  else:
    made += _costs(defended, base, alike)
  made += _along(leakage)
  if stopped:
    ended = [said('training.ended', defense=one, rounds=by_name[one]['rounds']) for one in stopped]
    made.append(found('training.stopped', ended=ended, planned=f' of {config["rounds"]}' if 'rounds' in config else ''))
  return made + ([found('training.other_attacks')] if worst else [])


def cautions(
  entries: Sequence[Entry], worst: Worst, *, config: Config, trained: Mapping[str, Trained]
) -> list[Finding]:
  """Returns the reasons to read the figures with care.

  Args:
    entries, worst, config: as of `opening`.
    trained: as of `training.write_training`.
  """
  notes = [*_of_training(entries, config, trained), *_of_attacks(entries, worst)]
  if len(entries) > 1:
    known = any(one['cost'] is not None for one in entries)
    notes.append(found('training.once', by=said('training.once_by') if known else ''))
  return notes


def settings(config: Config) -> list[str]:
  """Returns the settings of a training as sentences; missing ones are left out."""

  def part(key: str, text: str) -> str:
    return text.format(config[key]) if config.get(key) else ''

  made, share = [], config.get('share')
  if config.get('dataset') and config.get('model'):
    made.append(said('training.data', **config))
  if config.get('clients') and config.get('per_round'):
    split = said('training.split', **config) if config.get('partition') else ''
    drop = said('training.drop', **config) if config.get('drop_out') else ''
    made.append(said('training.clients', **config, split=split, drop=drop))
  if share in ('delta', 'gradient'):
    rates = [part(name, name.replace('_', ' ') + ' {:g}') for name in ('learning_rate', 'momentum', 'weight_decay')]
    rates += [part('max_norm', 'gradients clipped to {:g}'), part('proximal', 'a proximal term of weight {:g}')]
    optimizer = str(config.get('optimizer') or 'sgd')
    used = [wording.optimizer(optimizer) * (optimizer != 'sgd'), *rates]
    how = listed(list(filter(None, used)) or ['SGD'])
    batches = part('local_batch_size', ' in batches of {}')
    made.append(said(f'training.{share}', how=how, batches=batches, epochs=config.get('local_epochs') or 1))
  if config.get('server'):
    weighting = 'equal' if config.get('server_noise') else config.get('weighting', '')  # see `simulation.Federation`
    weights = {'samples': ', weighted by samples', 'equal': ' with equal weights'}.get(weighting, '')
    rate = part('server_learning_rate', ' with learning rate {:g}') + part('server_momentum', ' and momentum {:g}')
    rate += part('server_tau', ' and τ {:g}') if config['server'] == 'adam' else ''
    made.append(said('training.server', server=config['server'], weights=weights, rate=rate))
  made += [said('training.noise', **config)] if config.get('server_noise') else []
  return made + ([said('training.budget', **config)] if config.get('budget') else [])


def leaks_undefended(worst: Worst) -> bool:
  """Returns whether the attacks recover anything without a defense; if not, they cannot show what a defense hides."""
  return 'none' in worst and worst['none']['recovered'] > 0


def per_cent(ratio: float) -> str:
  """Returns a ratio in per cent with two digits, or as an integer from 10 % on; less than all is no 100 %."""
  return percent(ratio, 0) if ratio >= 0.095 else f'{significant(100 * ratio)} %'


def measured(one: Trained) -> list[tuple[int, float]]:
  """Returns (round, test accuracy in %) of the rounds that measured it."""
  return [(row['round'], 100 * row['accuracy']) for row in one.rows if 'accuracy' in row]


def _of_training(entries: Sequence[Entry], config: Config, trained: Mapping[str, Trained]) -> list[Finding]:
  """Returns the cautions on the figures of the training."""
  base = undefended(entries)
  classes = config.get('num_classes')
  notes = chance.findings(entries, config)
  share = (base or {}).get('majority_share') or (1 / classes if classes else None)
  reached = base and base['accuracy']
  if base and share and reached is not None and not base['at_chance'] and reached < min(2 * share, share + 0.1):
    notes.append(found('training.hardly', share=share))
  swings = {defense: unsettled(one.rows) for defense, one in trained.items()}
  most = max(swings, key=lambda defense: swings[defense])
  if swings[most] >= UNSETTLED:
    notes.append(found('training.unsettled', points=swings[most], defenses=[most]))
  return notes


def _of_attacks(entries: Sequence[Entry], worst: Worst) -> list[Finding]:
  """Returns the cautions on the figures of the attacks."""
  notes = []
  trials = max((entry['n'] for entry in worst.values()), default=_ENOUGH)
  if trials < _ENOUGH:
    most = math.ceil(100 * float(proportion_interval(0, trials)[2]))
    notes.append(found('training.few', trials=trials, most=most))
  if leaks_undefended(worst):
    failing = [e for e in worst.values() if not e['recovered'] and e['inconclusive'] + e['diverged']]
    failed, runs = (sum(e[key] for e in failing for key in keys) for keys in (('inconclusive', 'diverged'), ('runs',)))
    if failing:
      notes.append(found('training.failed', defenses=defenses(failing), failed=failed, runs=runs))
    unmet = [e for e in worst.values() if e['defense'] != 'none' and e['adaptive'] is None and not e['recovered']]
    if unmet:
      notes.append(found('training.unmet', defenses=defenses(unmet)))
  bare = [one for one in entries if one['defense'] not in worst]
  if worst and bare:
    notes.append(found('training.bare', defenses=defenses(bare)))
  idle = [entry for entry in worst.values() if 'defense changed nothing' in entry['flags']]
  return notes + ([found('training.idle', defenses=defenses(idle))] if idle else [])


def _undefended(base: Entry | None, worst: Worst, config: Config, size: int) -> Finding:
  """Returns what training without a defense shows: the accuracy, and whether uploads leak."""
  attacked = worst.get('none')
  noise = said('training.server_noise') if config.get('server_noise') else ''
  if base is None:
    trained = said('training.no_base')
  elif base['accuracy'] is None:
    trained = said('training.unmeasured', **base, noise=noise)
  else:
    lost = _lost(base)
    trained = said('training.reaches', **base, noise=noise, lost=lost and f'{lost},')
  if not worst:
    return found('training.unattacked', trained=trained)
  if attacked is None:
    return found('training.no_undefended', trained=trained)
  facts = {'trained': trained, 'entry': attacked, 'uploads': worded(f'{attacked["n"]} {unit(attacked["n"], size)}')}
  if not attacked['recovered']:
    return found('training.fails', **facts)
  images = worded('one image' if size == 1 else f'{size} images')
  return found('training.leaks', join='; without one,' if base is None else ', and', images=images, **facts)


def _hidden(
  defended: Sequence[Entry], worst: Worst, base: Entry | None, size: int, alike: Callable[..., Any]
) -> list[Finding]:
  """Returns what the attacked defenses hide, and what that costs; `alike` is `_others_alike` of two lists."""
  if not defended:
    return []
  n = worst[defended[0]['defense']]['n']
  hiding = [one for one in defended if not worst[one['defense']]['recovered']]
  others = [one for one in defended if one not in hiding]

  def told(name: str, one: Entry, **more: Any) -> Finding:
    facts = {
      'entry': worst[one['defense']],
      'uploads': f'{n} {worded(unit(n, size))}',
      'cost': _cost(one, base),
      **more,
    }
    return found(f'training.{name}', defenses=[one['defense']], **facts)

  if len(defended) == 1:
    return [told('hides' if hiding else 'still', defended[0])]
  if not hiding:
    seen = {one['defense']: (worst[one['defense']]['recovered'], worst[one['defense']]['n']) for one in others}
    fewest = min(seen.values())
    least = [one for one in others if seen[one['defense']][0] == fewest[0]]
    near = within_noise(sum(not differ(*one, *fewest) for one in seen.values()) - len(least))
    one = told('least' if len(least) == 1 else 'least_alike', least[0], n=len(defended), others=near)
    return [one._replace(facts={**one.facts, 'defenses': defenses(least)})]
  how_many = f'all {len(hiding)}' if not others else f'{len(hiding)} of {len(defended)}'
  made = [told('hiding', hiding[0], how_many=how_many)]
  known = [one for one in hiding if one['accuracy'] is not None]
  if len(hiding) == 1:
    made.append(told('that', hiding[0]))
  elif known:
    best = _alike(known, max)
    facts = {'best': defenses(best), 'alike': len(best), 'cost': _cost_of(best, base), 'others': alike(known, best)}
    made.append(found('training.trains_best', **facts))
  counts = sorted(worst[one['defense']]['recovered'] for one in others)
  if counts:
    between = f'{counts[0]}' if counts[0] == counts[-1] else f'{counts[0]} to {counts[-1]}'
    facts = {'counts': between, 'n': n, 'most': counts[-1], 'others': len(others)}
    made.append(told('other' if len(others) == 1 else 'others', others[0], **facts))
  return made


def _costs(defended: Sequence[Entry], base: Entry | None, alike: Callable[..., Any]) -> list[Finding]:
  """Returns what the defenses cost, where nothing shows what they hide."""
  known = [one for one in defended if one['accuracy'] is not None]
  if not known:
    return []
  if len(known) == 1:
    return [found('training.costs', defenses=defenses(known), cost=_cost(known[0], base))]
  best, least = _alike(known, max), _alike(known, min)
  if best == least:
    return [found('training.trains_alike', n=len(known), cost=_cost_of(known, base))]
  facts: dict[str, Any] = {'cost': _cost_of(best, base), 'least_cost': _cost_of(least, base)}
  facts |= {'best': defenses(best), 'least': defenses(least), 'best_alike': len(best), 'least_alike': len(least)}
  facts |= {'others': alike(known, best), 'near': alike(known, least)}
  return [found('training.best_worst', n=len(known), **facts)]


def _others_alike(
  trained: Mapping[str, Trained], noun: str, known: Sequence[Entry], named: Sequence[Entry]
) -> Finding | str:
  """Returns the sentence on those whose accuracy may be that of the ones named, by the test samples; '' for none."""
  apart = [gained(trained[named[0]['defense']], trained[one['defense']], noun) for one in known if one not in named]
  return within_noise(sum(each is not None and each.low <= 0 <= each.high for each in apart))


def _alike(known: Sequence[Entry], end: Callable[..., Any]) -> list[Entry]:
  """Returns the trainings with the highest accuracy, or with the lowest: `end` is max or min."""
  reached = end(one['accuracy'] for one in known)
  return [one for one in known if one['accuracy'] == reached]


def _cost_of(alike: Sequence[Entry], base: Entry | None) -> str:
  """Returns what a training costs, of several with the same accuracy only that."""
  if len(alike) == 1:
    return _cost(alike[0], base)
  return _reached(alike[0], base, _lost(alike[0]) * all(map(_lost, alike)), interval='')


def _along(leakage: Iterable[Mapping[str, Any]]) -> list[Finding]:
  """Returns at most one finding: how the leakage without a defense changes along the training."""
  known = sorted(
    (entry for entry in leakage if entry['defense'] == 'none' and score(entry) is not None),
    key=lambda entry: entry['round'],
  )
  if len(known) < 2:
    return []
  kind = of_rows(known)
  first, last = (
    said(
      'training.end',
      one=one,
      value=scored(kind, score(one)),
      when=f'after round {one["round"]}' if one['round'] else 'before the first round',
    )
    for one in (known[0], known[-1])
  )
  return [found('training.along', first=first, last=last)]


def _cost(one: Entry, base: Entry | None) -> str:
  """Returns the accuracy, bytes and ε of a training under a defense, beside training without one."""
  parts = [_reached(one, base, _lost(one))]
  sent = _bytes(one, base)
  if sent is not None:
    parts.append(said('training.cost_bytes', bytes=sent))
  if one['epsilon'] == math.inf:
    parts.append(said('training.cost_unbounded'))
  elif one['epsilon'] is not None:
    nothing = said('training.no_protection') if one['epsilon'] > NO_PROTECTION else ''
    spent = {'epsilon': epsilon(one['epsilon']), 'delta': one['epsilon_delta'], 'protects': protects(one)}
    parts.append(said('training.cost_epsilon', **spent, nothing=nothing))
  return parts[0] if len(parts) == 1 else f'{", ".join(parts[:-1])}, and {parts[-1]}'


def _reached(one: Entry, base: Entry | None, lost: str, interval: str | None = None) -> str:
  """Returns the accuracy of a training under a defense, beside training without one; by default with its interval."""
  if one['accuracy'] is None:
    return said('training.cost_unmeasured')
  lower = cost(one, base)
  if lower is None:
    return said('training.cost_reaches', **one, lost=lost)
  beside = f'{abs(lower):.1f} points {"less" if lower > 0 else "more"} than' if round(lower, 1) else 'as much as'
  if interval is None:
    interval = '' if one['cost'] is None else f' (95 % interval of the cost {between(one)} points)'
  return said('training.cost_points', **one, lost=lost, beside=beside, interval=interval)


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
