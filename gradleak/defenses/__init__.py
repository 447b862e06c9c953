"""Defenses as optax transformations: each drops into anybody's `optax.chain`.

Random ones take `key=`, data-dependent ones `batch=`, as keyword extra arguments of `update`. Strength zero is the
identity, exactly.
"""

from gradleak.defenses.base import chain
from gradleak.defenses.clipping import clip
from gradleak.defenses.compression import prune
from gradleak.defenses.control import null_gradient
from gradleak.defenses.noise import gaussian, laplace
from gradleak.defenses.registry import REGISTRY, Defense, parse

__all__ = ['REGISTRY', 'Defense', 'chain', 'clip', 'gaussian', 'laplace', 'null_gradient', 'parse', 'prune']
