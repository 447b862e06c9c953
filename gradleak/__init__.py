"""gradleak: what a federated-learning update reveals about the data behind it, and what hiding it costs."""

__version__ = '0.2.0'

from gradleak import attacks, data, defenses, federated, metrics, models, report, servers
from gradleak.audit import AuditResult, AuditSettings, audit, load
from gradleak.autoleak import AutoLeak, autoleak
from gradleak.captured import Captured, CapturedSettings, attack, read_update, read_weights
from gradleak.errors import UsageError
from gradleak.federated import Client, ClientSettings, Knowledge, Observation, Upload
from gradleak.frontier import Frontier, FrontierSettings, frontier
from gradleak.inspection import Inspection, inspect
from gradleak.report.compare import Comparison, compare
from gradleak.scenario import Scenario, scenario
from gradleak.sensitivity import Sensitivity, SensitivitySettings, sensitivity
from gradleak.specs import parse
from gradleak.startup import configure

__all__ = [
  'AuditResult',
  'AuditSettings',
  'AutoLeak',
  'Captured',
  'CapturedSettings',
  'Client',
  'ClientSettings',
  'Comparison',
  'Frontier',
  'FrontierSettings',
  'Inspection',
  'Knowledge',
  'Observation',
  'Scenario',
  'Sensitivity',
  'SensitivitySettings',
  'Upload',
  'UsageError',
  'attack',
  'attacks',
  'audit',
  'autoleak',
  'compare',
  'configure',
  'data',
  'defenses',
  'federated',
  'frontier',
  'inspect',
  'load',
  'metrics',
  'models',
  'parse',
  'read_update',
  'read_weights',
  'report',
  'scenario',
  'sensitivity',
  'servers',
]
