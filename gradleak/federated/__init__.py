"""Federated learning: clients, their uploads, and the server."""

from gradleak.federated import losses
from gradleak.federated.client import Client, Upload
from gradleak.federated.roughness import roughness
from gradleak.federated.server import layer_average
from gradleak.federated.settings import ClientSettings

__all__ = [
  'Client',
  'ClientSettings',
  'Upload',
  'layer_average',
  'losses',
  'roughness',
]
