"""What the numbers of an audit mean, in sentences that claim no more than the numbers do; names stand in backticks."""

import re

from gradleak.report import privacy
from gradleak.report.formatting import listed, number, percent_range

MIN_CONTROLS = 64
_TRANSFORMS = r'\b(ats|instahide)\b'
_FAILED = ('not_solved', 'diverged')


def sentences(summaries, worst, config):
  """Returns the sentences that open the report: the undefended setting, each defense, and how far that reaches.

  Args:
    summaries: from `tables.summarise`.
    worst: from `tables.worst_case`.
    config: the audit's settings, of which only `batch_size` is read.
  """
  return [undefended(summaries, worst, config), *defended(worst, config), caution(worst)]


def undefended(summaries, worst, config):
  """Returns the sentence about the runs without a defense: does this setting leak at all?"""
  entry = next((entry for entry in worst if entry['defense'] == 'none'), None)
  if entry is None:
    return 'No undefended run was made, so nothing here shows that an attack works in this setting at all.'
  if not entry['recovered']:
    return (
      f'Even without a defense {_none_of(entry, config)} recovered: this setting proves nothing about any defense, '
      'for where the attacks fail anyway a defense cannot show its worth.'
    )
  best = max(
    (summary for summary in summaries if summary['defense'] == 'none' and summary['recovered']),
    key=lambda summary: (summary['recovered'], summary['psnr']),
  )
  average = ' on average' if best['n'] > 1 else ''
  weak = ' That is less than half of them: a low figure under a defense means little here.'
  return (
    f'Without a defense, the server recovers {entry["recovered"]} of {entry["n"]} {_unit(entry["n"], config)} '
    f'(95 % interval {percent_range(entry)}); `{best["attack"]}` reaches {number(best["psnr"])} dB{average}, where an '
    f'upload of mere noise gives it at most {number(best["control_psnr"])} dB in 95 of 100 cases (the null-gradient '
    'control).' + (weak if 2 * entry['recovered'] < entry['n'] else '')
  )


def defended(worst, config):
  """Returns a few sentences about the defenses, grouped by the worst that any of the attackers did to them."""
  entries = [entry for entry in worst if entry['defense'] != 'none']
  idle = [entry for entry in entries if 'defense changed nothing' in entry['flags']]
  active = [entry for entry in entries if entry not in idle]
  leaking = [entry for entry in active if entry['recovered'] and entry not in _broken(worst)]
  silent = [entry for entry in active if not entry['recovered']]
  unsolved = [entry for entry in silent if entry['not_solved'] or entry['diverged']]
  withstood = [entry for entry in silent if entry not in unsolved]
  found = broken(worst, config)
  if leaking:
    shares = [f'{k} of {n} under {_names(group)} ({percent_range(group[0])})' for k, n, group in _by_count(leaking)]
    found.append(f'With a defense, it still recovers {"; ".join(shares)}.')
  helped = [entry for entry in leaking if entry['unaware'] is not None and entry['unaware'] < entry['recovered']]
  if helped:
    shares = [f'{k} of {n} under {_names(group)}' for k, n, group in _by_count(helped, 'unaware')]
    found.append(f'An attacker who takes the upload for a gradient gets no more than {listed(shares)}.')
  if withstood and _setting_works(worst):
    untried = [entry for entry in withstood if entry['aware'] is None]
    tried = [entry for entry in withstood if entry['aware'] is not None]
    found.append(
      f'Under {_names(withstood)} {_none_of(withstood[0], config)} recovered ({percent_range(withstood[0])}), although '
      'the attacks reached at least as good an objective as the truth has: for them, what was sent no longer singles '
      f'out the private data.{_tried(tried, untried)}'
    )
    if untried:
      where = f' of {_names(untried)}' if tried else ''
      found.append(f'An attacker who knows the defense{where} may do better.')
  if unsolved:
    failed, runs = (sum(entry[key] for entry in unsolved for key in keys) for keys in (_FAILED, ('runs',)))
    tried = [entry for entry in unsolved if entry['aware'] is not None]
    untried = [entry for entry in unsolved if entry['aware'] is None]
    found.append(
      f'Under {_names(unsolved)} {_none_of(unsolved[0], config)} recovered, but {failed} of {runs} runs failed as an '
      'optimisation (“not solved” or diverged): this does not show that '
      f'{"it protects" if len(unsolved) == 1 else "they protect"}.{_tried(tried, untried)}'
    )
  if idle:
    found.append(f'{_names(idle)} changed nothing in the upload: the figures are those of no defense.')
  return found


def broken(worst, config):
  """Returns at most one sentence, in a list: the defenses that stop only an attacker who does not know them."""
  entries = _broken(worst)
  if not entries:
    return []
  hidden = f'{_all_of(entries[0], config)} from an attacker who takes the upload for a gradient'
  if len(entries) == 1:
    (entry,) = entries
    verb = 'is' if entry['recovered'] == 1 else 'are'
    recovered = f'{entry["recovered"]} of {entry["n"]} ({percent_range(entry)}) {verb}'
    return [f'{_names(entries)} hides {hidden}, and {recovered} recovered by one who knows it ({_means(entry)}).']
  groups = {}
  for entry in entries:
    groups.setdefault((-entry['recovered'], _means(entry)), []).append(entry)
  shares = [
    f'{group[0]["recovered"]} of {group[0]["n"]} under {_names(group)} ({percent_range(group[0])}; {means})'
    for (_, means), group in sorted(groups.items(), key=lambda item: item[0][0])
  ]
  return [f'{len(entries)} defenses hide {hidden}, but one who knows them recovers {listed(shares)}.']


def caution(worst):
  """Returns the sentence that says how far the result reaches."""
  reach = 'What is recovered leaks; what is not was safe only from these attacks with this budget'
  unsolved = any(entry['not_solved'] for entry in worst)
  return f'{reach}, and runs “not solved” show no protection at all.' if unsolved else f'{reach}.'


def guarantees(config):
  """Returns what `privacy.statements` says, defenses of which it says the same together."""
  together = {}
  for statement in privacy.statements(config):
    defense, said = statement.split(': ', 1)
    together.setdefault(said, []).append(defense)
  return [f'{listed(defenses)}: {said}' for said, defenses in together.items()]


def cautions(summaries, worst, controls):
  """Returns the reasons to read the figures with care, one sentence each.

  Args:
    summaries: from `tables.summarise`.
    worst: from `tables.worst_case`.
    controls: the rows of the null-gradient control runs.
  """
  attacks = list(dict.fromkeys(summary['attack'] for summary in summaries))
  # A counter-measure that changes the attack has control runs of its own, numbered like those of the attack itself.
  sizes = {attack: len({row['trial'] for row in controls if row['attack'] == attack}) for attack in attacks}
  bare = [f'`{attack}`' for attack in attacks if not sizes[attack]]
  few = [f'{sizes[attack]} runs for `{attack}`' for attack in attacks if 0 < sizes[attack] < MIN_CONTROLS]
  failing = [f'`{s["attack"]}`' for s in summaries if s['defense'] == 'none' and not s['recovered']]
  unfinished, diverged = (sum(summary[key] for summary in summaries) for key in ('unfinished', 'diverged'))
  notes = []
  if failing and _setting_works(worst):
    notes.append(f'Nothing is recovered even without a defense by {listed(failing)}: no evidence about defenses there.')
  if bare:
    notes.append(f'Without a null-gradient control, hence without a threshold for “recovered”: {listed(bare)}.')
  if few:
    notes.append(f'The control is small, {listed(few)}; below {MIN_CONTROLS} the threshold itself is uncertain.')
  if unfinished:
    runs = _runs(unfinished)
    notes.append(f'In {unfinished} recovered {runs} the descent had not finished: the leak is at least this.')
  if diverged:
    notes.append(f'{diverged} {_runs(diverged)} diverged to NaN: not counted as recovered, and left out of the means.')
  transformed = [entry for entry in worst if re.search(_TRANSFORMS, entry['defense'])]
  if transformed:
    notes.append(
      f'Under {_names(transformed)} the client trains on transformed images, which an attack then finds: figures '
      'against the originals do not see a face that was moved or mixed. Look at the pictures. The attacks published '
      'against these (a policy guessed from early rounds; InstaHide’s decoding from many encodings) are not tried here.'
    )
  return notes


def _runs(count):
  return 'run' if count == 1 else 'runs'


def _setting_works(worst):
  return any(entry['defense'] == 'none' and entry['recovered'] for entry in worst)


def _broken(worst):
  """Returns the entries of which only an attacker who knows the defense recovers anything, in a setting that works."""
  return [entry for entry in worst if entry['unaware'] == 0 and entry['recovered'] and _setting_works(worst)]


def _by_count(entries, key='recovered'):
  """Returns [(count, n, entries)], those of the same count together, the largest count first."""
  counts = sorted({entry[key] for entry in entries}, reverse=True)
  groups = [[entry for entry in entries if entry[key] == count] for count in counts]
  return [(group[0][key], group[0]['n'], group) for group in groups]


def _means(entry):
  """Returns by which counter-measures a defense was broken: the strongest, and whether others did, too."""
  strongest, *others = entry['counters']
  return f'above all `{strongest}`' if others else f'`{strongest}`'


def _tried(tried, untried):
  """Returns what is to be said of the aware attackers that failed at the defenses `tried`, but at none of `untried`."""
  if not tried:
    return ''
  where = f' of {_names(tried)}' if untried else ''
  return f' Attackers who know the defense{where} were tried and failed, too.'


def _unit(n, config):
  size = config.get('batch_size', 1)
  noun, rest = ('image', '') if size == 1 else ('batch', f' of {size} images')
  return {'image': 'images', 'batch': 'batches'}[noun] + rest if n > 1 else noun + rest


def _none_of(entry, config):
  unit = _unit(entry['n'], config)
  return f'the one {unit} is not' if entry['n'] == 1 else f'none of the {entry["n"]} {unit} is'


def _all_of(entry, config):
  unit = _unit(entry['n'], config)
  return f'the one {unit}' if entry['n'] == 1 else f'all {entry["n"]} {unit}'


def _names(entries):
  return listed([f'`{entry["defense"]}`' for entry in entries])
