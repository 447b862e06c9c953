"""Networks as pure functions.

Built-in networks are factories, such as `lenet(10, width=24)`; `create('lenet(width=24)', 10)` makes the same from a
text. `from_flax`, `from_nnx` and `from_functions` wrap a user's own network.
"""

from gradleak.models.convnets import convnet, convnet9
from gradleak.models.model import Model, check_apply, check_variables, from_flax, from_functions
from gradleak.models.nnx_modules import from_nnx
from gradleak.models.registry import REGISTRY, create
from gradleak.models.resnet import resnet18, resnet20
from gradleak.models.small import cnn, lenet, lenet4, mlp

__all__ = [
  'REGISTRY',
  'Model',
  'check_apply',
  'check_variables',
  'cnn',
  'convnet',
  'convnet9',
  'create',
  'from_flax',
  'from_functions',
  'from_nnx',
  'lenet',
  'lenet4',
  'mlp',
  'resnet18',
  'resnet20',
]
