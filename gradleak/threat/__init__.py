"""What an attacker is granted: its knowledge, its observation, and the evidence in it."""

from gradleak.threat.knowledge import Knowledge
from gradleak.threat.observation import EVIDENCE, Observation

__all__ = ['EVIDENCE', 'Knowledge', 'Observation']
