"""Federated learning: clients, their uploads, and the server."""

from gradleak.federated.client import Client, Upload
from gradleak.federated.losses import LOSSES, cross_entropy, squared_error
from gradleak.federated.roughness import roughness
from gradleak.federated.server import layer_average
from gradleak.federated.settings import ClientSettings

__all__ = [
  'LOSSES',
  'Client',
  'ClientSettings',
  'Upload',
  'cross_entropy',
  'layer_average',
  'roughness',
  'squared_error',
]
