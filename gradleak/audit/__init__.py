"""The main job: scenario × defenses × attacks × trials → rows.

    plan ─► uploads ─► views ─► lanes ─► scores ─► result

Each step is a pure function in the file of that name, handed what the one before returned. `run` alone holds the work
directory, the progress bar and the share of the work.
"""

from gradleak.audit.labelled import Labelled
from gradleak.audit.lanes import Planned
from gradleak.audit.plan import Plan, plan
from gradleak.audit.result import AuditResult
from gradleak.audit.run import TIMES, audit, joined, load, planned_of, versions, versions_of_parts
from gradleak.audit.settings import AuditSettings

__all__ = [
  'TIMES',
  'AuditResult',
  'AuditSettings',
  'Labelled',
  'Plan',
  'Planned',
  'audit',
  'joined',
  'load',
  'plan',
  'planned_of',
  'versions',
  'versions_of_parts',
]
