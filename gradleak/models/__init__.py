"""Networks as pure functions.

`create(name, num_classes, …)` builds one of ours; `from_flax` and `from_functions` wrap a user's own.
"""

from gradleak.models.model import Model, from_flax, from_functions
from gradleak.models.registry import REGISTRY, create

__all__ = ['REGISTRY', 'Model', 'create', 'from_flax', 'from_functions']
