"""What AutoLeak found: a page whose first screen says which defense failed, and how sure that is; and a table."""

from collections.abc import Sequence
from typing import Any

from gradleak import storage
from gradleak.audit.verdict import LEVELS, false_alarms
from gradleak.autoleak import AutoLeak
from gradleak.autoleak.bounds import RELATION
from gradleak.autoleak.ensemble import CONTROLS, WITNESSES
from gradleak.metrics import statistics
from gradleak.report import findings, headline, page, pictures, tables, wording
from gradleak.report.formatting import aligned, percent_range, upwards

ENOUGH = 400  # images of a published rate
NOISE = 'noise (false alarms)'  # the line of the control runs


def render_autoleak(found: AutoLeak) -> str:
  """Returns the report as one HTML page that loads nothing."""
  honest = [row for row in found.rows if row['honest']]
  worst = tables.worst_case(honest)
  bounds = {label: f'{upwards(100 * bound)} %' for label, bound in found.bounds.items()}
  first = next(iter(found.audits.values()))
  return (
    page.environment()
    .get_template('autoleak.html.j2')
    .render(
      config=found.config,
      symbols=pictures.SYMBOLS,
      headline=headline.sentence(worst, found.config),
      lines=headline.lines(
        honest,
        worst,
        lambda row: headline.pair(found.audits[row['stage']], row),
        flags={label: [_flag(said) for said in flags] for label, flags in found.flags.items()},
        bound=bounds,
      ),
      bounded=bool(bounds),
      relation=RELATION,
      few=found.config['trials'] < ENOUGH,
      levels=levels(honest),
      malicious=levels([row for row in found.rows if not row['honest']]),
      alarms={honest: alarms(found, honest) for honest in (True, False)},
      attacks=_attacks(found),
      stages=found.stages,
      noise=NOISE,
      witnesses=WITNESSES,
      controls=CONTROLS,
      flags=found.flags,
      gallery=headline.gallery(found.rows, found.config),
      noise_said=findings.alarms([row for row in found.controls if row['honest']], worst),
      versions=first.versions,
      duration=page.duration(found.seconds),
    )
  )


def levels(rows: Sequence[dict]) -> list[dict[str, Any]]:
  """Returns, per defense, its worst-case attack success rate at each step.

  Args:
    rows: of AutoLeak, by honest-but-curious servers or by malicious ones.

  Returns:
    Dicts: 'defense', 'n' trials, and 'steps': one dict per step, from 'exact' to 'traces', with 'level', 'count' and
    the exact 95 % interval of the fraction, 'success_low' to 'success_high'.
  """
  found = []
  for entry in tables.worst_case(rows):
    steps = []
    for level in LEVELS:
      _, low, high = statistics.proportion_interval(entry['reached'][level], entry['n'])
      steps.append({'level': level, 'count': entry['reached'][level], 'success_low': low, 'success_high': high})
    found.append({'defense': entry['defense'], 'n': entry['n'], 'steps': steps})
  return found


def alarms(found: AutoLeak, honest: bool) -> list[dict[str, Any]]:
  """Returns how often noise comes to each step: the `levels` of the control runs, one dict, or none without any.

  Each control run is judged as if it were an upload, by the others (`audit.verdict.false_alarms`). As of an upload, the
  worst counts of all attackers that met the same noise.

  Args:
    found: an AutoLeak.
    honest: whether by honest-but-curious servers, or by malicious ones.
  """
  return levels(false_alarms([row for row in found.controls if row['honest'] == honest]))


def autoleak_table(found: AutoLeak) -> str:
  """Returns the worst-case rates for the terminal, aligned, and the flags below them."""
  parts = []
  for title, honest in (('honest-but-curious server', True), ('malicious server', False)):
    rows = [row for row in found.rows if row['honest'] == honest]
    if rows:
      lines = [(title, *LEVELS)]
      named = [(line['defense'], line) for line in levels(rows)] + [(NOISE, line) for line in alarms(found, honest)]
      lines += [
        (name, *(f'{one["count"]} of {line["n"]} ({percent_range(one)})' for one in line['steps']))
        for name, line in named
      ]
      parts.append('\n'.join(aligned([list(line) for line in lines])))
  said = [f'{label}: {flag}.' for label, flags in found.flags.items() for flag in flags]
  worst = tables.worst_case([row for row in found.rows if row['honest']])
  noise = findings.alarms([row for row in found.controls if row['honest']], worst)
  said += filter(None, [noise, wording.gallery(found.config)])
  return '\n\n'.join([*parts, *(['\n'.join(said)] if said else [])]) + '\n'


def write_autoleak(found: AutoLeak, folder: Any) -> None:
  """Writes report.html, whole or not at all; `folder` is made if it does not exist."""
  storage.write_atomically(storage.made_folder(folder) / 'report.html', render_autoleak(found))


def _attacks(found: AutoLeak) -> dict[str, list[dict[str, Any]]]:
  """Returns {defense: summaries of its attackers, in the order of the stages}, each with its 'stage'."""
  attacks: dict[str, list[dict[str, Any]]] = {}
  for (stage,), rows in tables.grouped(found.rows, 'stage').items():
    for summary in tables.summarise(rows):
      attacks.setdefault(summary['defense'], []).append({**summary, 'stage': stage})
  return attacks


def _flag(said: str) -> str:
  return said.partition(':')[0]
