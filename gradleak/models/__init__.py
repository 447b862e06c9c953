"""Networks as pure functions.

Built-in networks are factories, such as `lenet(10, width=24)`; `create('lenet(width=24)', 10)` makes the same from a
text. `from_flax`, `from_nnx`, `from_torch` and `from_functions` wrap a user's own network; `agreement` compares one
that was written anew with the original.
"""

from gradleak.models.agreement import Agreement, Difference, agreement
from gradleak.models.convnets import convnet, convnet9
from gradleak.models.model import Model, Normalisation, check_apply, check_variables, from_flax, from_functions
from gradleak.models.nnx_modules import from_nnx
from gradleak.models.registry import REGISTRY, create
from gradleak.models.resnet import resnet18, resnet20, resnet34, resnet50, resnet56, resnet101, resnet152
from gradleak.models.small import cnn, lenet, lenet4, mlp
from gradleak.models.tabular import ft_transformer, logistic, resnet_mlp, standardised
from gradleak.models.torch import from_torch
from gradleak.models.transformers import bert, gpt, lstm
from gradleak.models.vgg import vgg11, vgg16
from gradleak.models.vit import vit_small, vit_tiny

__all__ = [
  'REGISTRY',
  'Agreement',
  'Difference',
  'Model',
  'Normalisation',
  'agreement',
  'bert',
  'check_apply',
  'check_variables',
  'cnn',
  'convnet',
  'convnet9',
  'create',
  'from_flax',
  'from_functions',
  'from_nnx',
  'from_torch',
  'ft_transformer',
  'gpt',
  'lenet',
  'lenet4',
  'logistic',
  'lstm',
  'mlp',
  'resnet18',
  'resnet20',
  'resnet34',
  'resnet50',
  'resnet56',
  'resnet101',
  'resnet152',
  'resnet_mlp',
  'standardised',
  'vgg11',
  'vgg16',
  'vit_small',
  'vit_tiny',
]
