"""What to deploy on a task: what its entries of the leaderboard say, and what they leave open."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gradleak.audit.verdict import FAILED, RECOVERED
from gradleak.core import statistics
from gradleak.report.formatting import defenses, listed, minus, number, together
from gradleak.report.words import Finding, found, within_noise
from gradleak.studies.autoleak import rankings

AFFORDABLE = 5.0  # points of accuracy, at the upper end of the cost's interval
HIDDEN = 0.1  # of the images that an attacker may show, at the upper end of the interval
LEVEL = 0.05  # of the test of each pair of defenses
SHOWN = RECOVERED[-1]


def advice(entries: Sequence[Mapping[str, Any]]) -> list[Finding]:
  """Returns what the entries of one task say of its defenses, a `Finding` for each kind of attacker.

  Only defenses count whose accuracy cost is known, and not above `AFFORDABLE` points by the upper end of its interval.
  Attacks that fail say nothing for a defense: one on which they `failed` does not count either. Shares of samples are
  compared by the upper ends of their intervals. Named is the defense with the lowest, with the number of those that do
  not differ from it by Fisher's exact test. It hides samples only by an interval that holds for all that are compared
  (Bonferroni). Where the attacks failed on a few, those are not called hidden either. A malicious server also sees what
  a curious one sees: the worse of both counts, and neither may have failed. Samples are called hidden by both counts
  together. Where a task has several seeds, those count for which the attacks work without a defense (`judged`). A
  defense counts by the one that shows most: all of them have to hide the samples.

  Args:
    entries: of the leaderboard, of one task.
  """
  undefended = [entry for entry in entries if entry['text'] == 'none']
  defended = [entry for entry in entries if entry['text'] != 'none']
  costly = {entry['text'] for entry in defended if not affordable(entry)}
  cheap = [entry for entry in defended if entry['text'] not in costly]
  priced = any(entry['cost'] for entry in defended)
  counted = cheap if priced else defended
  told = []
  for side in ('honest', 'malicious'):
    attacked = [entry for entry in judged(entries, side) if entry in counted and entry[side]]
    told += _side(side, undefended, attacked, priced) + _untried(f'untried_{side}', undefended, counted, side)
  ranked = _of_working_seeds(entries, _finds_originals)
  named = _likelihood(undefended, [entry for entry in ranked if entry in counted])
  told += named + _untried('unranked', undefended, counted, 'likelihood')
  unknown = defenses(entry for entry in defended if entry['cost'] is None)
  dear = [entry for entry in defended if entry['cost'] is not None and not affordable(entry)]
  names = defenses(dear)
  told += [found('deploy.unknown', names=unknown, n=len(unknown))] if unknown and priced else []
  told += [found('deploy.costly', names=names, n=len(names), points=AFFORDABLE)] if names else []
  hidden = _likelihood(undefended, [entry for entry in ranked if entry in dear])
  hiding = [one for one in hidden if one.name == 'deploy.listed']
  return told + [
    found('deploy.dear', **one.facts) for one in hiding if [one.name for one in named] == ['deploy.everyone']
  ]


def _untried(
  name: str, undefended: Sequence[Mapping[str, Any]], counted: Sequence[Mapping[str, Any]], part: str
) -> list[Finding]:
  """Returns which defenses no attacker of a kind was tried on, where it was without one."""
  tried = {entry['text'] for entry in counted if entry.get(part)}
  names = defenses(entry for entry in counted if entry['text'] not in tried)
  return [found(f'deploy.{name}', names=names, n=len(names))] if names and any(e.get(part) for e in undefended) else []


def affordable(entry: Mapping[str, Any]) -> bool:
  """Returns whether the cost of a defense is known, and at most `AFFORDABLE` by the upper end of its interval."""
  cost = entry['cost']
  return cost is not None and 'at_chance' not in cost and max(_ends(cost)) <= AFFORDABLE


def too_costly(cost: Mapping[str, Any]) -> bool:
  """Returns whether a cost is known to exceed `AFFORDABLE`, by the lower end of its interval, or ends at chance."""
  return 'at_chance' in cost or min(_ends(cost)) > AFFORDABLE


def _ends(cost: Mapping[str, Any]) -> Sequence[float]:
  return cost.get('interval', [cost['points']])


def _level(entry: Mapping[str, Any], side: str) -> dict[str, Any]:
  """Returns how many samples are shown to an attacker: {'count', 'n', 'range'}."""
  one, n = max(
    ((one, entry[which]['n']) for which in _sides(side) for one in entry[which]['levels'] if one['level'] == SHOWN),
    key=lambda pair: pair[0]['high'],
  )
  return {'count': one['count'], 'n': n, 'range': {'success_low': one['low'], 'success_high': one['high']}}


def failed(seen: Mapping[str, Any]) -> bool:
  """Returns whether few samples are shown, but more than `HIDDEN` could be had the attacks not failed.

  Args:
    seen: of an entry, by one kind of server.
  """
  return shown(seen) <= HIDDEN * seen['n'] < shown(seen) + lost(seen)


def lost(seen: Mapping[str, Any]) -> int:
  """Returns on how many uploads an attack failed and none shows anything; `seen` is that of `failed`.

  Entries before 0.3.0 count failures only where no upload has a level.
  """
  return seen.get('failed', seen['count'] if seen.get('verdict') in FAILED else 0)


def _lost(entry: Mapping[str, Any], side: str) -> bool:
  """Returns whether any attacks that a server can run `failed`, and none of them shows more than `HIDDEN`."""
  seen = [entry[which] for which in _sides(side)]
  return any(map(failed, seen)) and all(shown(one) <= HIDDEN * one['n'] for one in seen)


def conclusive(entries: Sequence[Mapping[str, Any]], side: str) -> list[Mapping[str, Any]]:
  """Returns the entries of one defense on which the attacks of a server did not fail.

  Empty where they failed under any seed, and show no more than `HIDDEN` under the others: nothing is known of it then.
  """
  kept = [entry for entry in entries if not _lost(entry, side)]
  leaks = any(shown(entry[which]) > HIDDEN * entry[which]['n'] for entry in kept for which in _sides(side))
  return kept if leaks or len(kept) == len(entries) else []


def judged(entries: Sequence[Mapping[str, Any]], side: str) -> list[Mapping[str, Any]]:
  """Returns the entries of the seeds for which the attacks of a server show samples without a defense; all if none."""
  return _of_working_seeds(entries, lambda entry: bool(entry[side]) and shown(entry[side]) > 0)


def _of_working_seeds(
  entries: Sequence[Mapping[str, Any]], works: Callable[[Mapping[str, Any]], bool]
) -> list[Mapping[str, Any]]:
  """Returns the entries of the seeds for which an attacker `works` without a defense; all where there is none.

  Where an attacker works under a defense, its entry counts under any seed: it is a leak.
  """
  seeds = {entry.get('seed') for entry in entries if entry['text'] == 'none' and works(entry)}
  return [entry for entry in entries if entry.get('seed') in seeds or works(entry)] if seeds else list(entries)


def _worst_seeds(
  entries: Sequence[Mapping[str, Any]], seen: Callable[[Mapping[str, Any]], Any]
) -> list[Mapping[str, Any]]:
  """Returns an entry per defense: of each seed that of most uploads, and of the seeds the one that shows most."""
  worst = {entry['text']: entry for entry in sorted(largest(entries), key=seen)}  # the last one stays
  return [entry for entry in entries if entry is worst[entry['text']]]


def largest(entries: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
  """Returns the entries of one task without those of fewer uploads than another one of their defense and seed."""
  most = {(entry['text'], entry.get('seed')): entry for entry in sorted(entries, key=lambda one: one['honest']['n'])}
  return [entry for entry in entries if entry is most[entry['text'], entry.get('seed')]]


def shown(seen: Mapping[str, Any]) -> int:
  """Returns how many samples are shown to one kind of server, whose part of an entry `seen` is."""
  return next(one['count'] for one in seen['levels'] if one['level'] == SHOWN)


def _sides(side: str) -> tuple[str, ...]:
  """Returns whose attacks a server can run; a malicious one also runs those of a curious one."""
  return ('malicious', 'honest') if side == 'malicious' else ('honest',)


def _least(entry: Mapping[str, Any], side: str) -> float:
  """Returns the share of samples that an attacker is shown at least, by the lower end of its interval."""
  levels = (one for which in _sides(side) for one in entry[which]['levels'])
  return max(one['low'] for one in levels if one['level'] == SHOWN)


def _at_most(entry: Mapping[str, Any], side: str, compared: int) -> float:
  """Returns the share of samples that an attacker may be shown, were those shown on which the attacks failed.

  A malicious server may be shown others by the attacks of a curious one than by its own. The interval covers the shares
  of as many defenses as are compared, all together, at least as often as one of `LEVEL` covers one.
  """
  seen = [entry[which] for which in _sides(side)]
  n, share = min(one['n'] for one in seen), sum((shown(one) + lost(one)) / one['n'] for one in seen)
  return statistics.proportion_interval(min(n, math.ceil(round(share * n, 6))), n, 1 - LEVEL / compared)[2]


def _seen(entry: Mapping[str, Any], side: str) -> list[float]:
  """Returns the upper ends of what an attacker sees: of samples that are recognisable, then of each level."""
  ends = []
  for which in _sides(side):
    levels = entry[which]['levels']
    ends.append([one['high'] for one in (*(one for one in levels if one['level'] == SHOWN), *levels)])
  return [max(pair) for pair in zip(*ends, strict=True)]


def _side(
  side: str, undefended: Sequence[Mapping[str, Any]], cheap: Sequence[Mapping[str, Any]], priced: bool
) -> list[Finding]:
  """Returns what is to be said of one kind of server; `priced`: whether costs are known."""
  bare = [entry[side] for entry in largest(undefended) if entry[side]]
  if bare and not any(map(shown, bare)):
    return [found(f'deploy.blind_{side}', n=sum(one['n'] for one in bare))]
  if not bare or not cheap:
    return []

  by_text = together((entry['text'], entry) for entry in cheap)
  kept = {text: conclusive(of, side) for text, of in by_text.items()}
  names = defenses(by_text[text][0] for text, of in kept.items() if not of)
  told = [found(f'deploy.inconclusive_{side}', names=names, n=len(names))] if names else []
  cheap = _worst_seeds([entry for of in kept.values() for entry in of], lambda one: _seen(one, side))
  if not cheap:
    return told
  if not priced:
    least = min(_seen(entry, side) for entry in cheap)
    named = [entry for entry in cheap if _seen(entry, side) == least]
    names, doubted = defenses(named), defenses(filter(_flags, named))
    reasons = list(dict.fromkeys(flag for entry in named for flag in _flags(entry)))
    doubt = found('deploy.doubted', names=doubted, flags=reasons) if doubted else ''
    level = _level(named[0], side)
    level |= _alike([_level(entry, side) for entry in cheap], level, named=len(named))
    return [found(f'deploy.unpriced_{side}', names=names, number=len(names), doubt=doubt, **level), *told]
  best = min(cheap, key=lambda entry: (_seen(entry, side), _seen(entry, 'honest'), entry['cost']['points']))
  level = _level(best, side)
  flags = _flags(best)
  leaks = min(_least(entry, side) for entry in cheap) > HIDDEN
  name = 'shown' if leaks else 'flagged' if flags else 'undecided'
  most = max(level['range']['success_high'], _at_most(best, side, len(cheap)))
  name = 'hidden' if most <= HIDDEN and not flags else name
  facts = {
    'best': best['defense'],
    **_alike([_level(entry, side) for entry in cheap], level),
    'cost': _price(best),
    'flags': listed(flags) if flags else '',
    **level,
  }
  return [found(f'deploy.{name}_{side}', **facts), *told]


def _alike(
  seen: Sequence[Mapping[str, Any]], best: Mapping[str, Any], count: str = 'count', named: int = 1
) -> dict[str, Any]:
  """Returns how many defenses beside those named do not differ from the best one, and the sentence on these."""
  alike = sum(not statistics.differ(one[count], one['n'], best[count], best['n'], LEVEL) for one in seen) - named
  return {'alike': alike, 'others': within_noise(alike)}


def _flags(entry: Mapping[str, Any]) -> list[str]:
  """Returns the flags of an entry, without their figures."""
  return [flag.partition(':')[0] for flag in entry.get('flags', ())]


def _likelihood(undefended: Sequence[Mapping[str, Any]], cheap: Sequence[Mapping[str, Any]]) -> list[Finding]:
  """Returns what is to be said of an attacker with a list of candidates; nothing where it fails without a defense."""
  ranked = [entry for entry in cheap if entry.get('likelihood')]
  known = _worst_seeds(ranked, lambda entry: _named(entry['likelihood'])[1])
  if not known or not any(map(_finds_originals, undefended)):
    return []
  best = min(known, key=lambda entry: (_named(entry['likelihood'])[1], (entry['cost'] or {}).get('points', 0)))
  seen = best['likelihood']
  facts = {
    'best': best['defense'],
    'cost': _price(best),
    **_alike([one['likelihood'] for one in known], seen, 'identified'),
    **{key: seen[key] for key in ('identified', 'n', 'candidates')},
  }
  if any(entry['likelihood']['identified'] < entry['likelihood']['n'] for entry in known):
    return [found('deploy.listed', **facts)]
  fewest, most = (of(entry['likelihood']['n'] for entry in known) for of in (min, max))
  least = 'at least ' * (fewest < most)
  return [found('deploy.everyone', **{**facts, 'identified': fewest, 'n': fewest, 'least': least})]


def _finds_originals(entry: Mapping[str, Any]) -> bool:
  """Returns whether the likelihood finds more originals than chance does."""
  one = entry.get('likelihood')
  if one is None:
    return False
  by_chance = rankings.chance(entry['task']['batch_size'], one['candidates'])  # of a trial; before AutoLeak-2 originals
  return _named(one)[0] > max(1 / (one['candidates'] + 1), by_chance)


def _price(entry: Mapping[str, Any]) -> str:
  """Returns the accuracy that a defense costs, with its interval where it is known."""
  cost = entry['cost']
  if cost is None:
    return 'an unknown number of points'
  ends = interval(cost)
  return f'{minus(number(cost["points"]))} points' + (f' ({ends})' if ends else '')


def interval(cost: Mapping[str, Any]) -> str:
  """Returns the interval of an accuracy cost; '' where it is not known."""
  return ' to '.join(minus(number(end)) for end in cost.get('interval', ()))


def _named(seen: Mapping[str, Any]) -> tuple[float, float]:
  """Returns the 95 % interval of the share of originals that the likelihood finds."""
  _, low, high = statistics.proportion_interval(seen['identified'], seen['n'])
  return float(low), float(high)
