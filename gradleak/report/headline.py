"""The first screen of a page: one sentence, and a line per defense with the verdict of its worst attacker."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gradleak.audit.verdict import MIN_CANDIDATES, NOTHING, RECOVERED, VERDICTS
from gradleak.report import wording
from gradleak.report.formatting import listed
from gradleak.summary import worst

# Verdict -> what it says of an image, in plain words.
MEANINGS = {
  'exact': 'the image itself',
  'recognisable': 'a picture in which the original can be recognised',
  'identifying': 'no picture, but enough to find the original among others',
  'traces': 'more than nothing, but neither a picture nor an identity',
  'not solved': 'the attack failed as an optimisation: this shows no protection',
  'diverged': 'the attack ended in numbers that are not finite: this shows no protection',
  NOTHING: 'no more than an attacker sees who is given noise',
}
# Verdict -> what so many defenses do.
_DONE = {
  'exact': ('gives images away exactly', 'give images away exactly'),
  'recognisable': ('leaves recognisable pictures', 'leave recognisable pictures'),
  'identifying': ('gives away which image it was', 'give away which image it was'),
  'traces': ('leaves traces', 'leave traces'),
  'not solved': ('is undecided, as attacks on it failed', 'are undecided, as attacks on them failed'),
  'diverged': ('is undecided, as attacks on it failed', 'are undecided, as attacks on them failed'),
  NOTHING: ('hides what these attackers look for', 'hide what these attackers look for'),
}


def sentence(entries: Sequence[dict], config: Mapping[str, Any]) -> str:
  """Returns one sentence on an audit.

  Args:
    entries: from `cases.worst_case`.
    config: the audit's settings; only `batch_size` is read.
  """
  undefended = next((entry for entry in entries if entry['defense'] == 'none'), None)
  defended = [entry for entry in entries if entry['defense'] != 'none']
  if undefended is None:
    start = 'No undefended upload was attacked'
  elif undefended['verdict'] not in RECOVERED:
    start = f'Even without a defense no image is recovered ({undefended["verdict"]}): nothing here speaks for a defense'
  else:
    seen = undefended['recovered']
    batches = config.get('batch_size', 1) > 1  # of which one image decides
    counted = f'{seen} of {undefended["n"]} {"uploads" if batches else "image" if seen == 1 else "images"}'
    start = f'Without a defense, {"images of " if batches else ""}{counted} can be recovered'
  if not defended:
    return f'{start}.'
  groups: dict[tuple[str, str], int] = {}
  for entry in sorted(defended, key=lambda entry: VERDICTS.index(entry['verdict'])):
    words = _DONE[entry['verdict']]
    groups[words] = groups.get(words, 0) + 1
  if len(defended) == 1:
    return f'{start}; the defense {_DONE[defended[0]["verdict"]][0]}.'
  told = [f'{count} {words[count > 1]}' for words, count in groups.items()]
  return f'{start}; of {len(defended)} defenses, {listed(told)}.'


def recovering(entries: Sequence[dict]) -> str:
  """Returns a clause: under how many defenses images are recovered; empty for none.

  Args:
    entries: of `cases.worst_case`.
  """
  defended = [entry for entry in entries if entry['defense'] != 'none']
  if not defended:
    return ''
  leaking = sum(entry['verdict'] in RECOVERED for entry in defended)
  if len(defended) == 1:
    return f'images are {"" if leaking else "not "}recovered under the one defense'
  return f'images are recovered under {leaking} of {len(defended)} defenses'


def lines(rows: Sequence[dict], found: Sequence[dict], picture: Callable, **more: Mapping[str, Any]) -> list[dict]:
  """Returns the lines of `worst.lines`, whose arguments these are, each with the 'meaning' of its verdict."""
  enough = worst.candidates(rows)['enough']
  return [{**line, 'meaning': _meaning(line['verdict'], enough)} for line in worst.lines(rows, found, picture, **more)]


def gallery(rows: Sequence[dict], config: Mapping[str, Any]) -> dict[str, Any]:
  """Returns what `worst.candidates` does, and what the gallery is made of, 'said'."""
  return {**worst.candidates(rows), 'said': wording.gallery(config)}


def _meaning(verdict: str, enough: bool) -> str:
  if verdict == 'traces' and not enough:
    return f'more than nothing, but no picture; identity was not judged: {MIN_CANDIDATES} candidates are needed'
  return MEANINGS[verdict]
