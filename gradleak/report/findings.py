"""What the figures of an audit show: each finding with its values, and no more than the figures say."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from gradleak.audit.result import AuditResult
from gradleak.audit.sequential import Question
from gradleak.audit.verdict import CHANCE, FAILED, LEVELS, MIN_CANDIDATES, united
from gradleak.core import statistics
from gradleak.data.images import span_in_words
from gradleak.modalities import of_config, of_rows
from gradleak.report import privacy
from gradleak.report.formatting import defenses, listed, scored, together, unit
from gradleak.report.words import Finding, found, said

MIN_CONTROLS = 64

Entry = dict[str, Any]  # of `cases.worst_case`
Summary = dict[str, Any]  # of `cases.summarise`
Config = Mapping[str, Any]  # of the audit


def sentences(
  summaries: Sequence[Summary], worst: Sequence[Entry], config: Config, methods: Mapping[str, Any]
) -> list[str | Finding]:
  """Returns what opens the page: who attacked, without a defense, with each, and what that does not show.

  Args:
    summaries: from `cases.summarise`.
    worst: from `cases.worst_case`.
    config: the audit's settings.
    methods: `AuditResult.methods`.
  """
  return [*_setting(summaries, worst, config, methods), *defended(worst, config), caution(worst)]


def brief(
  summaries: Sequence[Summary], worst: Sequence[Entry], config: Config, methods: Mapping[str, Any]
) -> list[str | Finding]:
  """Returns what the terminal says in place of `sentences`, which it takes the arguments of."""
  return [
    *_setting(summaries, worst, config, methods),
    *broken(worst, config),
    *hinting(worst, config),
    *outdone(worst),
    *unsuited(summaries, config),
    caution(worst),
  ]


def _setting(
  summaries: Sequence[Summary], worst: Sequence[Entry], config: Config, methods: Mapping[str, Any]
) -> list[str | Finding]:
  return [*non_adaptive(summaries), *remarks(methods), *pixels(config), *undefended(summaries, worst, config)]


def non_adaptive(summaries: Sequence[Summary]) -> list[Finding]:
  """Returns at most one finding: that no attacker knew the defenses."""
  defended = any(summary['defense'] != 'none' for summary in summaries)
  return [found('findings.non_adaptive')] if defended and not any(summary['adaptive'] for summary in summaries) else []


def unsuited(summaries: Sequence[Summary], config: Config) -> list[Finding]:
  """Returns at most one finding: the attacks that can use nothing of what is known of some defenses.

  Args:
    summaries: from `cases.summarise`.
    config: the audit's settings; where they ask for non-adaptive attackers or name adaptive attacks, nothing is said.
  """
  if config.get('knowledge', 'both') == 'non-adaptive' or config.get('adaptive_attacks') is not None:
    return []
  cases = together(((s['attack'], s['defense']), s['adaptive']) for s in summaries if s['defense'] != 'none')
  alone = together(case for case, adaptive_attacks in cases.items() if adaptive_attacks == [None])
  if not any(summary['adaptive'] for summary in summaries):  # see `non_adaptive`
    return []
  return _places('findings.unsuited', alone)


def alarms(controls: list[dict[str, Any]], worst: Sequence[Entry] = (), named: Collection[int] = ()) -> list[Finding]:
  """Returns how often noise would be called a leak; nothing without control runs.

  The verdict on a defense is that of the worst of its attackers, and so is that on each upload of noise.

  Args:
    controls: the rows of the control runs.
    worst: from `cases.worst_case`.
    named: the numbers of the control runs that rankings of candidates re-identify.
  """
  if not controls:
    return []
  noise = united(controls, named)
  _, low, high = statistics.proportion_interval(noise.reached[LEVELS[-1]], noise.n)
  further = [0, *noise.reached.values()]  # of each level or further
  counts = {level: noise.reached[level] - before for level, before in zip(LEVELS, further, strict=False)}
  levels = [found('findings.came', k=count, level=level) for level, count in counts.items() if count]
  made = [
    found(
      'findings.alarms',
      n=noise.n,
      by=found(
        'findings.worst_attacker' if noise.attackers > 1 else 'findings.one_attacker', attackers=noise.attackers
      ),
      ranked=said('findings.ranked') if named else '',
      came=found('findings.some_alarms' if levels else 'findings.no_alarm', levels=levels, total=further[-1]),
      interval={'success_low': low, 'success_high': high},
    )
  ]
  most = max((entry['attackers'] for entry in worst), default=0)
  if most > noise.attackers:
    made.append(found('findings.more_attackers', most=most, one_in=CHANCE, chance=min(100, 100 * most / CHANCE)))
  return made


def stopped(result: AuditResult) -> list[Finding]:
  """Returns what was asked of each defense, with the answers and the trials that they took; nothing for no question."""
  question = Question.of(result.config)
  if question is None or not result.stops:
    return []
  told = together(((stop.answer, stop.after, stop.diverged), stop.defense) for stop in result.stops)
  answers = []
  for (answer, after, number), names in told.items():
    more = said('findings.answer_diverged', n=number) if number else ''
    answers.append(found(f'findings.answer_{answer}', defenses=names, trials=after, diverged=more))
  return [
    found(
      'findings.stopped_within' if question.decide is None else 'findings.stopped_decide',
      share=question.decide or question.within,
      level=question.level,
      most=question.most,
      answers=answers,
    ),
    found('findings.anytime', rate=question.error_rate),
  ]


def remarks(methods: Mapping[str, Any]) -> list[Finding]:
  """Returns what there is to say of the defenses in this setting; `methods` is `AuditResult.methods`."""
  known = methods.get('defenses', {}).items()
  return _of_defenses((facts['remark'], defense) for defense, facts in known if facts.get('remark'))


def guarantees(methods: Mapping[str, Any]) -> list[Finding]:
  """Returns `privacy.statements`, defenses with the same statement in one; `methods` is `AuditResult.methods`."""
  return _of_defenses((statement, defense) for defense, statement in privacy.statements(methods).items())


def _of_defenses(pairs: Iterable[tuple[str, str]]) -> list[Finding]:
  return [found('findings.of_defenses', defenses=names, said=text) for text, names in together(pairs).items()]


def pixels(config: Config) -> list[str]:
  """Returns at most one sentence: that the images use a small part of [0, 1], where they do."""
  return [span_in_words(*config['pixel_range'])] if 'pixel_range' in config else []


def undefended(summaries: Sequence[Summary], worst: Sequence[Entry], config: Config) -> list[Finding]:
  """Returns what the attacks recover without a defense; the arguments are those of `sentences`."""
  entry = next((entry for entry in worst if entry['defense'] == 'none'), None)
  if entry is None:
    return [found('findings.no_undefended')]
  if not entry['recovered']:
    seen = entry['reached']['above chance']
    above = said('findings.above', seen=seen, n=entry['n']) if seen else ''
    return [found('findings.fails', none_of=_none_of([entry], config), above=above)]
  kind = of_rows(summaries)
  best = max(
    (summary for summary in summaries if summary['defense'] == 'none' and summary['recovered']),
    key=lambda summary: (summary['recovered'], summary[kind.score]),
  )
  reached = {'reaches': scored(kind, best[kind.score]), 'control': scored(kind, best[kind.controls[0]])}
  weak = [found('findings.weak')] if 2 * entry['recovered'] < entry['n'] else []
  return [
    found('findings.undefended', entry=entry, best=best, unit=_unit(entry['n'], config), **reached),
    *weak,
  ]


def defended(worst: Sequence[Entry], config: Config) -> list[Finding]:
  """Returns what was found of the defenses, grouped by their worst case; the arguments are those of `sentences`."""
  active = _active(worst)
  idle = [entry for entry in worst if entry['defense'] != 'none' and entry not in active]
  leaking = [entry for entry in active if entry['recovered'] and entry not in _broken(worst)]
  silent = [entry for entry in active if not entry['recovered'] and not entry['reached']['above chance']]
  unsolved = [entry for entry in silent if entry['inconclusive'] or entry['diverged']]
  withstood = [entry for entry in silent if entry not in unsolved]
  made = [*broken(worst, config), *_leaking(leaking), *hinting(worst, config)]
  if withstood and _setting_works(worst):
    made += _withstood(withstood, config)
  if unsolved:
    failed, runs = (sum(entry[key] for entry in unsolved for key in keys) for keys in (FAILED, ('runs',)))
    of = {'defenses': defenses(unsolved), 'none_of': _none_of(unsolved, config), 'n': len(unsolved)}
    made += [found('findings.unsolved', failed=failed, runs=runs, **of), *_tried(unsolved)]
  return made + ([found('findings.idle', defenses=defenses(idle))] if idle else [])


def broken(worst: Sequence[Entry], config: Config) -> list[Finding]:
  """Returns at most one finding: the defenses that work only against attackers who do not know them."""
  entries = _broken(worst)
  if not entries:
    return []
  none_of = _none_of(entries, config)
  if len(entries) == 1:
    (entry,) = entries
    return [found('findings.broken', defenses=defenses(entries), none_of=none_of, entry=entry, means=_means(entry))]
  groups = together(((*_rank(entry, 'recovered'), _means(entry)), entry) for entry in entries)
  counts = [
    _count('count_means', group, means=means)
    for (*_, means), group in sorted(groups.items(), key=lambda item: item[0][:-1])
  ]
  return [found('findings.broken_several', n=len(entries), none_of=none_of, counts=counts)]


def hinting(worst: Sequence[Entry], config: Config) -> list[Finding]:
  """Returns the defenses under which there is no picture, but something of the images."""
  made = []
  entries = [entry for entry in _active(worst) if not entry['recovered'] and entry['reached']['above chance']]
  for level, name in (('re-identified', 'reidentified'), ('above chance', 'seen')):
    counts = [_count('count', [e], k=e['reached'][level]) for e in entries if e['verdict'] == level]
    if counts:
      made.append(found(f'findings.{name}', unit=_unit(2, config), counts=counts))
  return made


def outdone(worst: Sequence[Entry]) -> list[Finding]:
  """Returns the defenses under which attackers recover less for knowing the defense, apart where they add uploads."""
  fewer = [
    entry
    for entry in _active(worst)
    if None not in (entry['adaptive'], entry['non_adaptive']) and entry['adaptive'] < entry['non_adaptive']
  ]
  made = []
  for name, adds in (('', False), ('_partly', True)):
    counts = [_count(f'instead{name}', [e]) for e in fewer if (e['recovered'] > e['non_adaptive']) == adds]
    made += [found(f'findings.outdone{name}', counts=counts)] if counts else []
  return made


def caution(worst: Sequence[Entry]) -> Finding:
  """Returns what the result does not show; `worst` is from `cases.worst_case`."""
  failed = [f'“{verdict}”' for verdict in FAILED if any(entry[verdict] for entry in worst)]
  if not failed:
    return found('findings.other_attacks')
  return found('findings.other_attacks_unsolved', failed=listed(failed, 'or'))


def cautions(
  summaries: Sequence[Summary], worst: Sequence[Entry], controls: Iterable[dict], methods: Mapping[str, Any]
) -> list[Finding]:
  """Returns the reasons to read the figures with care.

  Args:
    summaries: from `cases.summarise`.
    worst: from `cases.worst_case`.
    controls: the rows of the null-gradient control runs.
    methods: `AuditResult.methods`.
  """
  attacks = list(dict.fromkeys(summary['attack'] for summary in summaries))
  controls = list(controls)
  # An adaptive attack that changes the attack has control runs of its own, numbered like those of the attack itself.
  numbers = {(row['attack'], row['trial']) for row in controls}
  sizes = {attack: sum(of == attack for of, _ in numbers) for attack in attacks}
  bare = [attack for attack in attacks if not sizes[attack]]
  few = [
    found('findings.few_runs', runs=size, attack=attack) for attack, size in sizes.items() if 0 < size < MIN_CONTROLS
  ]
  failing = [s['attack'] for s in summaries if s['defense'] == 'none' and not s['recovered']]
  unfinished, diverged = (sum(summary[key] for summary in summaries) for key in ('unfinished', 'diverged'))
  notes = [
    (failing and _setting_works(worst), found('findings.failing', attacks=failing)),
    (bare, found('findings.no_control', attacks=bare)),
    (few, found('findings.few_controls', few=few, enough=MIN_CONTROLS)),
    (unfinished, found('findings.unfinished', n=unfinished)),
    (diverged, found('findings.diverged', n=diverged)),
  ]
  said_of = [
    *few_candidates(summaries),
    *outdone(worst),
    *_prior_alone(summaries, controls),
    *_transformed(summaries, worst, methods),
  ]
  return [note for holds, note in notes if holds] + said_of


def few_candidates(rows: Sequence[Mapping]) -> list[Finding]:
  """Returns at most one finding: there are too few candidates, in rows or summaries, to judge who an original is."""
  others = min((row['candidates'] for row in rows if row.get('candidates') is not None), default=MIN_CANDIDATES)
  few = found('findings.few_candidates', needed=MIN_CANDIDATES, others=others)
  return [few] if others < MIN_CANDIDATES else []


def _prior_alone(summaries: Sequence[Summary], controls: Sequence[dict]) -> list[Finding]:
  """Returns at most one finding: where an attacker with other images does no better than on noise, on average."""

  def silent(summary: Summary) -> bool:
    score, control = summary[of_rows([summary]).score], _control(summary, controls)
    learned = summary.get('tier') in ('D', 'G')
    nothing = not any(summary[level] for level in ('recovered', 're_identified', 'above_chance'))
    return learned and nothing and score is not None and control is not None and score <= control

  return _places('findings.prior', together((s['attack'], s['defense']) for s in summaries if silent(s)))


def _places(name: str, where: Mapping[str, Sequence[str]]) -> list[Finding]:
  """Returns a finding on attacks under some defenses, none for no attack."""
  places = [found('findings.place', attack=attack, defenses=list(dict.fromkeys(of))) for attack, of in where.items()]
  return [found(name, places=places)] if places else []


def _control(summary: Summary, controls: Sequence[dict]) -> float | None:
  """Returns the mean score of the control runs: of this adaptive attack, if it has its own, else of the attack."""
  runs = [row for row in controls if row['attack'] == summary['attack']]
  runs = [row for row in runs if row.get('adaptive') == summary['adaptive']] or runs
  name = of_rows([summary]).score
  known = [score for row in runs if (score := row.get(name)) is not None and not math.isnan(score)]
  return math.fsum(known) / len(known) if known else None


def _leaking(leaking: Sequence[Entry]) -> list[Finding]:
  """Returns the defenses under which any attacker recovers something."""
  helped = [
    entry for entry in leaking if entry['non_adaptive'] is not None and entry['non_adaptive'] < entry['recovered']
  ]
  return [
    found(f'findings.{name}', counts=[_count(count, group, k=k) for k, group in _by_count(entries, key)])
    for name, count, entries, key in (
      ('leaking', 'count_range', leaking, 'recovered'),
      ('helped', 'count', helped, 'non_adaptive'),
    )
    if entries
  ]


def _withstood(withstood: Sequence[Entry], config: Config) -> list[Finding]:
  """Returns the defenses under which no attack failed as an optimisation, and none recovered anything."""
  made = []
  for name, searches in (('searched', True), ('closed', False)):
    alike = together((e['n'], e) for e in withstood if bool(e['searches']) == searches)
    for group in alike.values():
      of = {'defenses': defenses(group), 'none_of': _none_of(group, config), 'entry': group[0]}
      made.append(found(f'findings.{name}', **of))
  made += _tried(withstood)
  untried = [entry for entry in withstood if entry['adaptive'] is None]
  if untried:
    all_known = config.get('knowledge') != 'non-adaptive' and config.get('adaptive_attacks') is None
    name = 'unmet' if all_known else 'untried_of' if len(untried) < len(withstood) else 'untried'
    made.append(found(f'findings.{name}', defenses=defenses(untried)))
  return made


def _tried(entries: Sequence[Entry]) -> list[Finding]:
  """Returns at most one finding: the adaptive attackers that failed, of the defenses that met one."""
  tried = [entry for entry in entries if entry['adaptive'] is not None]
  if not tried:
    return []
  return [found('findings.tried' if len(tried) == len(entries) else 'findings.tried_of', defenses=defenses(tried))]


def _transformed(summaries: Sequence[Summary], worst: Sequence[Entry], methods: Mapping[str, Any]) -> list[Finding]:
  """Returns at most one finding: the defenses on the samples, which metrics against the originals underrate."""
  known = methods.get('defenses', {})
  transformed = [entry for entry in worst if 'data' in known.get(entry['defense'], {}).get('places', [])]
  if not transformed:
    return []
  best, kind = [], of_rows(summaries)
  name = f'trained_{kind.score}'
  for entry in transformed:
    reached = [s for s in summaries if s['defense'] == entry['defense'] and s.get(name) is not None]
    if reached:
      best_one = max(reached, key=lambda summary: summary[name])
      best.append(found('findings.to_trained', best=best_one, reaches=scored(kind, best_one[name])))
  near = said('findings.reached', best=best) if best else ''
  return [found('findings.transformed', defenses=defenses(transformed), reached=near)]


def _unit(n: int, config: Config) -> str:
  return unit(n, config.get('batch_size', 1), of_config(config).noun)


def _active(worst: Sequence[Entry]) -> list[Entry]:
  """Returns the defenses that changed the upload."""
  return [e for e in worst if e['defense'] != 'none' and 'defense changed nothing' not in e['flags']]


def _setting_works(worst: Iterable[Entry]) -> bool:
  return any(entry['defense'] == 'none' and entry['recovered'] for entry in worst)


def _broken(worst: Sequence[Entry]) -> list[Entry]:
  """Returns the defenses under which only adaptive attackers recover anything, in a setting that works."""
  return [entry for entry in worst if entry['non_adaptive'] == 0 and entry['recovered'] and _setting_works(worst)]


def _rank(entry: Entry, key: str) -> tuple[float, int]:
  """Returns (a share, negative so that the largest is first; of how many uploads it is), the same for a group."""
  return -entry[key] / entry['n'], entry['n']


def _by_count(entries: Iterable[Entry], key: str) -> list[tuple[int, list[Entry]]]:
  """Returns [(count, entries with that count of as many)], the largest share first."""
  groups = together((_rank(entry, key), entry) for entry in entries)
  return [(group[0][key], group) for _, group in sorted(groups.items(), key=lambda item: item[0])]


def _count(name: str, group: Sequence[Entry], **more: Any) -> Finding:
  """Returns a part of a finding: the count of a group of entries with the same figures."""
  first = group[0]
  return found(
    f'findings.{name}',
    **{'k': first['recovered'], 'n': first['n'], 'defenses': defenses(group), 'entry': first, **more},
  )


def _means(entry: Entry) -> str:
  """Returns the adaptive attack that recovers most, and whether others also recover something."""
  strongest, *others = entry['adaptive_attacks']
  return f'most by `{strongest}`' if others else f'`{strongest}`'


def _none_of(entries: Sequence[Entry], config: Config) -> str:
  single, uploads = _uploads(entries, config)
  return f'the one {uploads} is not' if single else f'none of the {uploads} is'


def _uploads(entries: Sequence[Entry], config: Config) -> tuple[bool, str]:
  """Returns (whether each defense has one upload, what they are called with their number, if that is the same)."""
  numbers = {entry['n'] for entry in entries}
  if numbers == {1}:
    return True, _unit(1, config)
  return False, (f'{numbers.pop()} ' if len(numbers) == 1 else '') + _unit(2, config)
