"""What the figures of an audit show, in sentences that claim no more than the figures do; names stand in backticks."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gradleak.audit.verdict import CHANCE, LEVELS, MIN_CANDIDATES, united
from gradleak.core import statistics
from gradleak.data.images import span_in_words
from gradleak.report import privacy
from gradleak.report.formatting import listed, number, percent_range, significant

MIN_CONTROLS = 64
_FAILED = ('not_solved', 'diverged')

Entry = dict[str, Any]  # of `cases.worst_case`
Summary = dict[str, Any]  # of `cases.summarise`
Config = Mapping[str, Any]  # of the audit


def sentences(
  summaries: Sequence[Summary], worst: Sequence[Entry], config: Config, methods: Mapping[str, Any]
) -> list[str]:
  """Returns the sentences that open the page: who attacked, without a defense, with each, and what they do not show.

  Args:
    summaries: from `cases.summarise`.
    worst: from `cases.worst_case`.
    config: the audit's settings.
    methods: `AuditResult.methods`.
  """
  return [
    *unaware(summaries),
    *remarks(methods),
    *pixels(config),
    undefended(summaries, worst, config),
    *defended(worst, config),
    caution(worst),
  ]


def unaware(summaries: Sequence[Summary]) -> list[str]:
  """Returns at most one sentence: that no attacker knew the defenses; `summaries` are from `cases.summarise`."""
  defended = [summary for summary in summaries if summary['defense'] != 'none']
  if not defended or any(summary['counter'] for summary in summaries):
    return []
  return ['All attackers here are unaware of the defenses: one who knows a defense may recover more.']


def unsuited(summaries: Sequence[Summary], config: Config) -> list[str]:
  """Returns at most one sentence: the attacks that can use nothing of what is known of some defenses.

  Args:
    summaries: from `cases.summarise`.
    config: the audit's settings; where they ask for unaware attackers or name counter-measures, nothing is said.
  """
  if config.get('knowledge', 'both') == 'unaware' or config.get('counters') is not None:
    return []
  cases: dict[tuple[str, str], set] = {}
  for summary in summaries:
    if summary['defense'] != 'none':
      cases.setdefault((summary['attack'], summary['defense']), set()).add(summary['counter'])
  found: dict[str, list[str]] = {}
  for (attack, defense), counters in cases.items():
    if counters == {None}:
      found.setdefault(f'`{attack}`', []).append(f'`{defense}`')
  if not found or not any(summary['counter'] for summary in summaries):  # else see `unaware`
    return []
  places = [f'{attack} under {listed(defenses)}' for attack, defenses in found.items()]
  return [f'Knowing the defense changes nothing for {"; ".join(places)}: no counter-measure suits the attack.']


def alarms(controls: list[dict[str, Any]], worst: Sequence[Entry] = ()) -> str:
  """Returns how often noise would be called a leak, in sentences; '' without control runs.

  The verdict on a defense is that of the worst of its attackers, and so is that on each upload of noise.

  Args:
    controls: the rows of the control runs.
    worst: from `cases.worst_case`.
  """
  if not controls:
    return ''
  noise = united(controls)
  _, low, high = statistics.proportion_interval(noise.reached[LEVELS[-1]], noise.n)
  chance = percent_range({'success_low': low, 'success_high': high})
  by = f'the worst of {noise.attackers} attackers, as a defense is' if noise.attackers > 1 else 'one attacker'
  further = [0, *noise.reached.values()]  # of each level or further
  found = {level: noise.reached[level] - before for level, before in zip(LEVELS, further, strict=False)}
  came = [f'{count} come{"s" if count == 1 else ""} to {level}' for level, count in found.items() if count]
  end = f': {"a false alarm" if further[-1] == 1 else "false alarms"}' if came else ''
  said = (
    f'Of {noise.n} uploads of noise, each judged by the others and by {by}, '
    f'{listed(came) if came else "none comes to any step"}{end} (95 % interval {chance}).'
  )
  most = max((entry['attackers'] for entry in worst), default=0)
  if most <= noise.attackers:
    return said
  return (
    f'{said} A defense was met by up to {most} attackers, of whom some share a control. One in {CHANCE} runs on noise '
    f'is beyond the threshold of traces, so the worst of {most} attackers comes there by chance in at most '
    f'{significant(100 * most / CHANCE)} % of uploads.'
  )


def remarks(methods: Mapping[str, Any]) -> list[str]:
  """Returns what there is to say of the defenses in this setting; `methods` is `AuditResult.methods`."""
  together: dict[str, list[str]] = {}
  for defense, known in methods.get('defenses', {}).items():
    if known.get('remark'):
      together.setdefault(known['remark'], []).append(f'`{defense}`')
  return [f'{listed(defenses)}: {remark}.' for remark, defenses in together.items()]


def pixels(config: Config) -> list[str]:
  """Returns at most one sentence: that the images use a small part of [0, 1], where they do."""
  return [span_in_words(*config['pixel_range'])] if 'pixel_range' in config else []


def undefended(summaries: Sequence[Summary], worst: Sequence[Entry], config: Config) -> str:
  """Returns what the attacks recover without a defense; the arguments are those of `sentences`."""
  entry = next((entry for entry in worst if entry['defense'] == 'none'), None)
  if entry is None:
    return 'No undefended upload was attacked, so nothing here shows that the attacks work in this setting.'
  if not entry['recovered']:
    seen = entry['reached']['traces']
    traces = f' ({seen} of {entry["n"]} leave traces)' if seen else ''
    return (
      f'Even without a defense {_none_of(entry, config)} recovered{traces}: this setting proves nothing about any '
      'defense, because the attacks show no picture without one, too.'
    )
  best = max(
    (summary for summary in summaries if summary['defense'] == 'none' and summary['recovered']),
    key=lambda summary: (summary['recovered'], summary['psnr']),
  )
  average = ' on average' if best['n'] > 1 else ''
  weak = ' That is less than half of them, so a low number under a defense means little here.'
  return (
    f'Without a defense, the attacks recover {entry["recovered"]} of {entry["n"]} {_unit(entry["n"], config)} '
    f'(95 % interval {percent_range(entry)}); `{best["attack"]}` reaches {number(best["psnr"])} dB{average}. On noise '
    f'in place of an upload (the null-gradient control) the 95th percentile of its runs is '
    f'{number(best["control_psnr"])} dB.' + (weak if 2 * entry['recovered'] < entry['n'] else '')
  )


def defended(worst: Sequence[Entry], config: Config) -> list[str]:
  """Returns a few sentences on the defenses, grouped by their worst case; the arguments are those of `sentences`."""
  active = _active(worst)
  idle = [entry for entry in worst if entry['defense'] != 'none' and entry not in active]
  leaking = [entry for entry in active if entry['recovered'] and entry not in _broken(worst)]
  silent = [entry for entry in active if not entry['recovered'] and not entry['reached']['traces']]
  unsolved = [entry for entry in silent if entry['not_solved'] or entry['diverged']]
  withstood = [entry for entry in silent if entry not in unsolved]
  found = [*broken(worst, config), *_leaking(leaking), *hinting(worst, config)]
  if withstood and _setting_works(worst):
    found += _withstood(withstood, config)
  if unsolved:
    found.append(_unsolved(unsolved, config))
  if idle:
    found.append(f'{_names(idle)} changed nothing in the upload: the figures are those of no defense.')
  return found


def broken(worst: Sequence[Entry], config: Config) -> list[str]:
  """Returns at most one sentence: the defenses that work only against attackers who are unaware of them."""
  entries = _broken(worst)
  if not entries:
    return []
  hidden = _all_of(entries[0], config)
  if len(entries) == 1:
    (entry,) = entries
    verb = 'is' if entry['recovered'] == 1 else 'are'
    recovered = f'{entry["recovered"]} of {entry["n"]} ({percent_range(entry)}) {verb}'
    return [
      f'{_names(entries)} hides {hidden} from an attacker who is unaware of it, but {recovered} recovered by one who '
      f'knows it ({_means(entry)}).'
    ]
  groups: dict[tuple, list[Entry]] = {}
  for entry in entries:
    groups.setdefault((-entry['recovered'], _means(entry)), []).append(entry)
  counts = [
    f'{group[0]["recovered"]} of {group[0]["n"]} under {_names(group)} ({percent_range(group[0])}; {means})'
    for (_, means), group in sorted(groups.items(), key=lambda item: item[0][0])
  ]
  return [
    f'{len(entries)} defenses hide {hidden} from an attacker who is unaware of them, but one who knows them recovers '
    f'{listed(counts)}.'
  ]


def hinting(worst: Sequence[Entry], config: Config) -> list[str]:
  """Returns the sentences on defenses under which there is no picture, but something of the images."""
  found = []
  entries = [entry for entry in _active(worst) if not entry['recovered'] and entry['reached']['traces']]
  for level, what in (('identifying', 'found among the candidates'), ('traces', 'seen in traces')):
    here = [entry for entry in entries if entry['verdict'] == level]
    if here:
      counts = [f'{entry["reached"][level]} of {entry["n"]} under {_names([entry])}' for entry in here]
      found.append(f'No picture, but {_unit(2, config)} that are {what}: {listed(counts)}.')
  return found


def outdone(worst: Sequence[Entry]) -> list[str]:
  """Returns at most one sentence: the defenses under which attackers recover less for knowing the defense."""
  counts = [
    f'{entry["aware"]} of {entry["n"]} in place of {entry["unaware"]} under {_names([entry])}'
    for entry in _active(worst)
    if None not in (entry['aware'], entry['unaware']) and entry['aware'] < entry['unaware']
  ]
  if not counts:
    return []
  return [
    f'Attackers who know the defense recover less than those who do not: {listed(counts)}. Their counter-measures do '
    'not help here, so the worst case is that of the unaware attackers.'
  ]


def caution(worst: Sequence[Entry]) -> str:
  """Returns the sentence on what the result does not show; `worst` is from `cases.worst_case`."""
  reach = 'Images that were not recovered may be recovered by other attacks, or by these with more steps or starts'
  unsolved = any(entry['not_solved'] for entry in worst)
  return f'{reach}; runs that are “not solved” show no protection at all.' if unsolved else f'{reach}.'


def guarantees(methods: Mapping[str, Any]) -> list[str]:
  """Returns `privacy.statements`, defenses with the same statement in one; `methods` is `AuditResult.methods`."""
  together: dict[str, list[str]] = {}
  for defense, statement in privacy.statements(methods).items():
    together.setdefault(statement, []).append(f'`{defense}`')
  return [f'{listed(defenses)}: {statement}.' for statement, defenses in together.items()]


def cautions(
  summaries: Sequence[Summary], worst: Sequence[Entry], controls: Iterable[dict], methods: Mapping[str, Any]
) -> list[str]:
  """Returns the reasons to read the figures with care, one sentence each.

  Args:
    summaries: from `cases.summarise`.
    worst: from `cases.worst_case`.
    controls: the rows of the null-gradient control runs.
    methods: `AuditResult.methods`.
  """
  attacks = list(dict.fromkeys(summary['attack'] for summary in summaries))
  controls = list(controls)
  # A counter-measure that changes the attack has control runs of its own, numbered like those of the attack itself.
  numbers = {(row['attack'], row['trial']) for row in controls}
  sizes = {attack: sum(of == attack for of, _ in numbers) for attack in attacks}
  bare = [f'`{attack}`' for attack in attacks if not sizes[attack]]
  few = [f'{sizes[attack]} runs for `{attack}`' for attack in attacks if 0 < sizes[attack] < MIN_CONTROLS]
  failing = [f'`{s["attack"]}`' for s in summaries if s['defense'] == 'none' and not s['recovered']]
  unfinished, diverged = (sum(summary[key] for summary in summaries) for key in ('unfinished', 'diverged'))
  notes = []
  if failing and _setting_works(worst):
    notes.append(
      f'Even without a defense, nothing is recovered by {listed(failing)}: such figures show nothing about defenses.'
    )
  if bare:
    notes.append(f'No null-gradient control was run for {listed(bare)}: without its threshold no run is “recovered”.')
  if few:
    notes.append(
      f'The null-gradient control is small ({listed(few)}): with fewer than {MIN_CONTROLS} the threshold is uncertain.'
    )
  others = min((s['candidates'] for s in summaries if s.get('candidates') is not None), default=MIN_CANDIDATES)
  if others < MIN_CANDIDATES:
    notes.append(
      f'Whether an image can be found among others is not judged: this needs {MIN_CANDIDATES} candidates; there '
      f'{"is" if others == 1 else "are"} {others}.'
    )
  if unfinished:
    notes.append(
      f'In {unfinished} {_runs(unfinished)} that {"shows" if unfinished == 1 else "show"} something of the images the '
      'attack had not converged: more steps may show more.'
    )
  if diverged:
    notes.append(f'{diverged} {_runs(diverged)} diverged to NaN: not counted as recovered, and left out of the means.')
  return notes + outdone(worst) + _prior_alone(summaries, controls) + _transformed(summaries, worst, methods)


def _prior_alone(summaries: Sequence[Summary], controls: Sequence[dict]) -> list[str]:
  """Returns at most one sentence: where an attacker with other images does no better than on noise, on average."""
  found: dict[str, list[str]] = {}
  for summary in summaries:
    score, control = summary['psnr'], _control_psnr(summary, controls)
    learned = summary.get('tier') in ('D', 'G')
    silent = not any(summary[level] for level in ('recovered', 'identifying', 'traces'))
    if learned and silent and None not in (score, control) and score <= control:
      found.setdefault(f'`{summary["attack"]}`', []).append(f'`{summary["defense"]}`')
  if not found:
    return []
  places = '; '.join(f'{attack} under {listed(list(dict.fromkeys(defenses)))}' for attack, defenses in found.items())
  return [
    f'The prior, not the upload: {places}. There the control, which is given noise, scores as high; what the images '
    'show was learned from other images.'
  ]


def _control_psnr(summary: Summary, controls: Sequence[dict]) -> float | None:
  """Returns the mean PSNR of the control runs: of this counter-measure, if it has its own, else of the attack."""
  runs = [row for row in controls if row['attack'] == summary['attack']]
  runs = [row for row in runs if row.get('counter') == summary['counter']] or runs
  found = [psnr for row in runs if (psnr := row.get('psnr')) is not None and not math.isnan(psnr)]
  return math.fsum(found) / len(found) if found else None


def _leaking(leaking: Sequence[Entry]) -> list[str]:
  """Returns the sentences on defenses under which something is recovered, whoever attacks."""
  if not leaking:
    return []
  counts = [f'{k} of {n} under {_names(group)} ({percent_range(group[0])})' for k, n, group in _by_count(leaking)]
  found = [f'With a defense, they still recover {"; ".join(counts)}.']
  helped = [entry for entry in leaking if entry['unaware'] is not None and entry['unaware'] < entry['recovered']]
  if helped:
    counts = [f'{k} of {n} under {_names(group)}' for k, n, group in _by_count(helped, 'unaware')]
    found.append(f'An attacker who is unaware of the defense recovers no more than {listed(counts)}.')
  return found


def _withstood(withstood: Sequence[Entry], config: Config) -> list[str]:
  """Returns the sentences on defenses under which no attack failed as an optimisation, and none recovered anything."""
  untried = [entry for entry in withstood if entry['aware'] is None]
  tried = [entry for entry in withstood if entry['aware'] is not None]
  found = []
  for group in ([one for one in withstood if one['searches']], [one for one in withstood if not one['searches']]):
    if group:
      why = (
        'although the attacks reached an objective at least as low as that of the private images: for them, the upload '
        'no longer singles out these images'
        if group[0]['searches']
        else 'by closed forms, which have no objective: this says nothing of attacks that search'
      )
      found.append(f'Under {_names(group)} {_none_of(group[0], config)} recovered ({percent_range(group[0])}), {why}.')
  found[-1] += _tried(tried, untried)
  if untried:
    all_known = config.get('knowledge') != 'unaware' and config.get('counters') is None
    known = f'No counter-attack to {_names(untried)} is known here, and one' if all_known else 'An attacker'
    found.append(
      f'{known} who knows the defense{" of " + _names(untried) if tried and not all_known else ""} may do better.'
    )
  return found


def _unsolved(unsolved: Sequence[Entry], config: Config) -> str:
  """Returns the sentence on defenses under which nothing is recovered, but some attacks failed as an optimisation."""
  failed, runs = (sum(entry[key] for entry in unsolved for key in keys) for keys in (_FAILED, ('runs',)))
  tried = [entry for entry in unsolved if entry['aware'] is not None]
  untried = [entry for entry in unsolved if entry['aware'] is None]
  return (
    f'Under {_names(unsolved)} {_none_of(unsolved[0], config)} recovered, but {failed} of {runs} runs failed as an '
    'optimisation (“not solved” or diverged): this does not show that '
    f'{"it protects" if len(unsolved) == 1 else "they protect"}.{_tried(tried, untried)}'
  )


def _transformed(summaries: Sequence[Summary], worst: Sequence[Entry], methods: Mapping[str, Any]) -> list[str]:
  """Returns at most one sentence: the defenses on the samples, which metrics against the originals underrate."""
  known = methods.get('defenses', {})
  transformed = [entry for entry in worst if 'data' in known.get(entry['defense'], {}).get('places', [])]
  if not transformed:
    return []
  return [
    f'Under {_names(transformed)} the client trains on transformed images, and these are what an attack reconstructs: '
    'metrics against the originals are low even where a moved or mixed image can be recognised, so look at the '
    f'pictures.{_to_trained(summaries, transformed)} No attack here undoes the transformation (by a policy guessed '
    'from early rounds, or by decoding many encodings of InstaHide).'
  ]


def _to_trained(summaries: Sequence[Summary], transformed: Sequence[Entry]) -> str:
  """Returns the sentence on how near the reconstructions are to the images that were trained on."""
  found = []
  for entry in transformed:
    reached = [s for s in summaries if s['defense'] == entry['defense'] and s.get('trained_psnr') is not None]
    if reached:
      best = max(reached, key=lambda summary: summary['trained_psnr'])
      found.append(f'{number(best["trained_psnr"])} dB by `{best["attack"]}` under `{entry["defense"]}`')
  return f' To the images that were trained on, the reconstructions reach {listed(found)}.' if found else ''


def _active(worst: Sequence[Entry]) -> list[Entry]:
  """Returns the defenses that changed the upload."""
  return [e for e in worst if e['defense'] != 'none' and 'defense changed nothing' not in e['flags']]


def _runs(count: int) -> str:
  return 'run' if count == 1 else 'runs'


def _setting_works(worst: Iterable[Entry]) -> bool:
  return any(entry['defense'] == 'none' and entry['recovered'] for entry in worst)


def _broken(worst: Sequence[Entry]) -> list[Entry]:
  """Returns the defenses under which only aware attackers recover anything, in a setting that works."""
  return [entry for entry in worst if entry['unaware'] == 0 and entry['recovered'] and _setting_works(worst)]


def _by_count(entries: Iterable[Entry], key: str = 'recovered') -> list[tuple[int, int, list[Entry]]]:
  """Returns [(count, n, entries with that count)], the largest count first."""
  groups: dict[int, list[Entry]] = {}
  for entry in sorted(entries, key=lambda entry: -entry[key]):
    groups.setdefault(entry[key], []).append(entry)
  return [(count, group[0]['n'], group) for count, group in groups.items()]


def _means(entry: Entry) -> str:
  """Returns the counter-measure that recovers most, and whether others recover something, too."""
  strongest, *others = entry['counters']
  return f'most by `{strongest}`' if others else f'`{strongest}`'


def _tried(tried: Sequence[Entry], untried: Sequence[Entry]) -> str:
  """Returns the sentence on aware attackers that failed: run against `tried`, but not against `untried`."""
  if not tried:
    return ''
  where = f' of {_names(tried)}' if untried else ''
  return f' Attackers who know the defense{where} were tried and failed, too.'


def _unit(n: int, config: Config) -> str:
  size = config.get('batch_size', 1)
  if size == 1:
    return 'image' if n == 1 else 'images'
  return f'{"batch" if n == 1 else "batches"} of {size} images'


def _none_of(entry: Entry, config: Config) -> str:
  unit = _unit(entry['n'], config)
  return f'the one {unit} is not' if entry['n'] == 1 else f'none of the {entry["n"]} {unit} is'


def _all_of(entry: Entry, config: Config) -> str:
  unit = _unit(entry['n'], config)
  return f'the one {unit}' if entry['n'] == 1 else f'all {entry["n"]} {unit}'


def _names(entries: Iterable[Entry]) -> str:
  return listed([f'`{entry["defense"]}`' for entry in entries])
