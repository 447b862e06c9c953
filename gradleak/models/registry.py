"""The models that come along, by name."""

from gradleak import errors, specs
from gradleak.models import cnn, convnet, layers, lenet, mlp

REGISTRY = {
  'mlp': mlp.mlp,
  'cnn': cnn.cnn,
  'lenet': lenet.lenet,
  'lenet4': lenet.lenet4,
  'convnet': convnet.convnet,
}


def create(spec, num_classes, *, init='explicit', conv=None):
  """Returns the `Model` that `spec` describes, as `lenet` or `convnet(width=8)`.

  Args:
    spec: a name of `REGISTRY` with settings in parentheses, or a parsed `Spec`.
    num_classes: number of logits.
    init: 'explicit' or 'default', see `gradleak.models.layers.initialiser`.
    conv: convolution formulation, 'patches' or 'native'; None takes the backend's faster one. It changes speed alone.

  Raises:
    UsageError: for an unknown name, setting or init.
  """
  spec = specs.parse(spec, 'model') if isinstance(spec, str) else spec
  factory, static, numeric = specs.resolve(spec, REGISTRY, 'model')
  errors.check_number('num_classes', num_classes, low=1, integer=True)
  layers.initialiser(init)
  conv = conv or layers.default_formulation()
  if conv not in ('patches', 'native'):
    raise errors.unknown('convolution formulation', conv, ('patches', 'native'))
  return factory(num_classes, init, conv, **static, **numeric)._replace(name=str(spec))
