"""What AutoLeak found: a page whose first screen says which defense failed, and how sure that is; and a table."""

from typing import Any

from gradleak.audit.verdict import LEVELS
from gradleak.core import storage
from gradleak.report import findings, headline, page, pictures, wording
from gradleak.report.formatting import aligned, percent_range, upwards
from gradleak.studies.autoleak import AutoLeak
from gradleak.studies.autoleak.bounds import RELATION
from gradleak.studies.autoleak.ensemble import CONTROLS, WITNESSES
from gradleak.summary import cases, worst

ENOUGH = 400  # images of a published rate
NOISE = 'noise (false alarms)'  # the line of the control runs


def render_autoleak(found: AutoLeak) -> str:
  """Returns the report as one HTML page that loads nothing."""
  honest = [row for row in found.rows if row['honest']]
  entries = cases.worst_case(honest)
  bounds = {label: f'{upwards(100 * bound)} %' for label, bound in found.bounds.items()}
  first = next(iter(found.audits.values()))
  return (
    page.environment()
    .get_template('autoleak.html.j2')
    .render(
      config=found.config,
      symbols=pictures.SYMBOLS,
      headline=headline.sentence(entries, found.config),
      lines=headline.lines(
        honest,
        entries,
        lambda row: worst.pair(found.audits[row['stage']], row),
        flags={label: [_flag(said) for said in flags] for label, flags in found.flags.items()},
        bound=bounds,
      ),
      bounded=bool(bounds),
      relation=RELATION,
      few=found.config['trials'] < ENOUGH,
      levels=worst.levels(honest),
      malicious=worst.levels([row for row in found.rows if not row['honest']]),
      alarms={honest: _alarms(found, honest) for honest in (True, False)},
      attacks=_attacks(found),
      stages=found.stages,
      noise=NOISE,
      witnesses=WITNESSES,
      controls=CONTROLS,
      flags=found.flags,
      gallery=headline.gallery(found.rows, found.config),
      noise_said=findings.alarms([row for row in found.controls if row['honest']], entries),
      versions=first.versions,
      duration=page.duration(found.seconds),
    )
  )


def autoleak_table(found: AutoLeak) -> str:
  """Returns the worst-case rates for the terminal, aligned, and the flags below them."""
  parts = []
  for title, honest in (('honest-but-curious server', True), ('malicious server', False)):
    rows = [row for row in found.rows if row['honest'] == honest]
    if rows:
      lines = [(title, *LEVELS)]
      named = [(line['defense'], line) for line in worst.levels(rows)] + [
        (NOISE, line) for line in _alarms(found, honest)
      ]
      lines += [
        (name, *(f'{one["count"]} of {line["n"]} ({percent_range(one)})' for one in line['steps']))
        for name, line in named
      ]
      parts.append('\n'.join(aligned([list(line) for line in lines])))
  said = [f'{label}: {flag}.' for label, flags in found.flags.items() for flag in flags]
  entries = cases.worst_case([row for row in found.rows if row['honest']])
  noise = findings.alarms([row for row in found.controls if row['honest']], entries)
  said += filter(None, [noise, wording.gallery(found.config)])
  return '\n\n'.join([*parts, *(['\n'.join(said)] if said else [])]) + '\n'


def write_autoleak(found: AutoLeak, folder: Any) -> None:
  """Writes report.html, whole or not at all; `folder` is made if it does not exist."""
  storage.write_atomically(storage.made_folder(folder) / 'report.html', render_autoleak(found))


def _attacks(found: AutoLeak) -> dict[str, list[dict[str, Any]]]:
  """Returns {defense: summaries of its attackers, in the order of the stages}, each with its 'stage'."""
  attacks: dict[str, list[dict[str, Any]]] = {}
  for (stage,), rows in cases.grouped(found.rows, 'stage').items():
    for summary in cases.summarise(rows):
      attacks.setdefault(summary['defense'], []).append({**summary, 'stage': stage})
  return attacks


def _alarms(found: AutoLeak, honest: bool) -> list[dict[str, Any]]:
  return worst.alarms([row for row in found.controls if row['honest'] == honest])


def _flag(said: str) -> str:
  return said.partition(':')[0]
