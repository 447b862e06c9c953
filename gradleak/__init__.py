"""gradleak: what a federated-learning update reveals about the data behind it, and what hiding it costs."""

__version__ = '0.1.0'

from gradleak import attacks, data, defenses, federated, metrics, models, report
from gradleak.audit import AuditResult, audit
from gradleak.errors import UsageError
from gradleak.federated import Client, Knowledge, Observation, Upload
from gradleak.inspection import Inspection, inspect
from gradleak.scenario import Scenario, scenario

__all__ = [
  'AuditResult',
  'Client',
  'Inspection',
  'Knowledge',
  'Observation',
  'Scenario',
  'Upload',
  'UsageError',
  'attacks',
  'audit',
  'data',
  'defenses',
  'federated',
  'inspect',
  'metrics',
  'models',
  'report',
  'scenario',
]
