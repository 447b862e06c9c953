"""gradleak measures gradient inversion: what a federated-learning update reveals, and what hiding it costs."""

from gradleak import adaptive, attacks, data, defenses, federated, metrics, modalities, models, report, servers
from gradleak.audit import AuditResult, AuditSettings, audit, load
from gradleak.core.errors import UsageError
from gradleak.core.version import VERSION as __version__
from gradleak.engine.execution import Execution
from gradleak.engine.startup import configure
from gradleak.federated import Client, ClientSettings, Upload, losses
from gradleak.federated.inspection import Inspection, inspect
from gradleak.federated.scenario import Scenario, scenario
from gradleak.registry import parse
from gradleak.report.compare import Comparison, compare
from gradleak.studies.autoleak import AutoLeak, autoleak
from gradleak.studies.captured import Captured, CapturedSettings, attack, read_update, read_weights
from gradleak.studies.epsilon import EpsilonAudit, EpsilonSettings, audit_epsilon
from gradleak.studies.frontier import Frontier, FrontierSettings, frontier
from gradleak.studies.identification import Identification, IdentificationSettings, identify
from gradleak.studies.sensitivity import Sensitivity, SensitivitySettings, sensitivity
from gradleak.threat import Knowledge, Observation

__all__ = [
  'AuditResult',
  'AuditSettings',
  'AutoLeak',
  'Captured',
  'CapturedSettings',
  'Client',
  'ClientSettings',
  'Comparison',
  'EpsilonAudit',
  'EpsilonSettings',
  'Execution',
  'Frontier',
  'FrontierSettings',
  'Identification',
  'IdentificationSettings',
  'Inspection',
  'Knowledge',
  'Observation',
  'Scenario',
  'Sensitivity',
  'SensitivitySettings',
  'Upload',
  'UsageError',
  '__version__',
  'adaptive',
  'attack',
  'attacks',
  'audit',
  'audit_epsilon',
  'autoleak',
  'compare',
  'configure',
  'data',
  'defenses',
  'federated',
  'frontier',
  'identify',
  'inspect',
  'load',
  'losses',
  'metrics',
  'modalities',
  'models',
  'parse',
  'read_update',
  'read_weights',
  'report',
  'scenario',
  'sensitivity',
  'servers',
]
