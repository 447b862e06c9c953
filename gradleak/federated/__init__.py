"""Federated learning as the attacker sees it: clients, what they upload, what a server knows."""

from gradleak.federated.client import Client, Upload
from gradleak.federated.knowledge import Knowledge, Observation
from gradleak.federated.losses import LOSSES, cross_entropy, squared_error

__all__ = ['LOSSES', 'Client', 'Knowledge', 'Observation', 'Upload', 'cross_entropy', 'squared_error']
