"""What an attacker may hold beside the upload: generators of images."""

from gradleak.priors.base import Generator, as_generator
from gradleak.priors.untrained import untrained

# By name: what a text may name.
GENERATORS = {'untrained': untrained}

__all__ = ['GENERATORS', 'Generator', 'as_generator', 'untrained']
