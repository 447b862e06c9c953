"""What the numbers of an audit mean, in sentences that claim no more than the numbers do; names stand in backticks."""

from gradleak.report.formatting import listed, number, percent_range

MIN_CONTROLS = 64


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
  """Returns up to four sentences about the defenses, grouped by what was found."""
  entries = [entry for entry in worst if entry['defense'] != 'none']
  idle = [entry for entry in entries if 'defense changed nothing' in entry['flags']]
  active = [entry for entry in entries if entry not in idle]
  leaking = [entry for entry in active if entry['recovered']]
  silent = [entry for entry in active if not entry['recovered']]
  unsolved = [entry for entry in silent if entry['not_solved'] or entry['diverged']]
  withstood = [entry for entry in silent if entry not in unsolved]
  found = []
  if leaking:
    shares = [f'{e["recovered"]} of {e["n"]} under `{e["defense"]}` ({percent_range(e)})' for e in leaking]
    found.append(f'With a defense, it still recovers {listed(shares)}.')
  if withstood and _setting_works(worst):
    found.append(
      f'Under {_names(withstood)} {_none_of(withstood[0], config)} recovered ({percent_range(withstood[0])}), although '
      'the attacks reached at least as good an objective as the truth has: for them, what was sent no longer singles '
      'out the private data. An attacker who knows the defense may do better.'
    )
  if unsolved:
    counts = listed([f'{entry["not_solved"] + entry["diverged"]} of {entry["runs"]}' for entry in unsolved])
    found.append(
      f'Under {_names(unsolved)} {_none_of(unsolved[0], config)} recovered, but {counts} runs failed as an '
      'optimisation (“not solved” or diverged): this does not show that '
      f'{"it protects" if len(unsolved) == 1 else "they protect"}.'
    )
  if idle:
    found.append(f'{_names(idle)} changed nothing in the upload: the figures are those of no defense.')
  return found


def caution(worst):
  """Returns the sentence that says how far the result reaches."""
  reach = 'What is recovered leaks; what is not was safe only from these attacks with this budget'
  unsolved = any(entry['not_solved'] for entry in worst)
  return f'{reach}, and runs “not solved” show no protection at all.' if unsolved else f'{reach}.'


def cautions(summaries, worst, controls):
  """Returns the reasons to read the figures with care, one sentence each.

  Args:
    summaries: from `tables.summarise`.
    worst: from `tables.worst_case`.
    controls: the rows of the null-gradient control runs.
  """
  attacks = list(dict.fromkeys(summary['attack'] for summary in summaries))
  sizes = {attack: sum(row['attack'] == attack for row in controls) for attack in attacks}
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
  return notes


def _runs(count):
  return 'run' if count == 1 else 'runs'


def _setting_works(worst):
  return any(entry['defense'] == 'none' and entry['recovered'] for entry in worst)


def _unit(n, config):
  size = config.get('batch_size', 1)
  noun, rest = ('image', '') if size == 1 else ('batch', f' of {size} images')
  return {'image': 'images', 'batch': 'batches'}[noun] + rest if n > 1 else noun + rest


def _none_of(entry, config):
  unit = _unit(entry['n'], config)
  return f'the one {unit} is not' if entry['n'] == 1 else f'none of the {entry["n"]} {unit} is'


def _names(entries):
  return listed([f'`{entry["defense"]}`' for entry in entries])
