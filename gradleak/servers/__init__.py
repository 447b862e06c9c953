"""Malicious servers: what they send, and the attacks that read what comes back."""

from gradleak.servers.base import Observed, Server, one_round, server
from gradleak.servers.decepticons import decepticons
from gradleak.servers.fishing import class_fishing, feature_fishing
from gradleak.servers.imprint import imprint
from gradleak.servers.trap import trap

# By name: what a text may name.
REGISTRY = {
  'imprint': imprint,
  'trap': trap,
  'decepticons': decepticons,
  'class_fishing': class_fishing,
  'feature_fishing': feature_fishing,
}

__all__ = [
  'REGISTRY',
  'Observed',
  'Server',
  'class_fishing',
  'decepticons',
  'feature_fishing',
  'imprint',
  'one_round',
  'server',
  'trap',
]
