"""Federated learning as the attacker sees it: clients, what they upload, what a server knows."""

from gradleak.federated.client import Client, Upload
from gradleak.federated.knowledge import Knowledge, Observation
from gradleak.federated.losses import LOSSES, cross_entropy, squared_error
from gradleak.federated.server import layer_average

__all__ = ['LOSSES', 'Client', 'Knowledge', 'Observation', 'Upload', 'cross_entropy', 'layer_average', 'squared_error']
