"""The models that come along, by name."""

from gradleak import errors, specs
from gradleak.models import cnn, convnet, convolution, layers, lenet, mlp, precode, resnet

REGISTRY = {
  'mlp': mlp.mlp,
  'cnn': cnn.cnn,
  'lenet': lenet.lenet,
  'lenet4': lenet.lenet4,
  'convnet': convnet.convnet,
  'convnet9': convnet.convnet9,
  'resnet18': resnet.resnet18,
  'resnet20': resnet.resnet20,
}
WRAPPERS = {'precode': precode.precode}


def create(spec, num_classes, *, init='explicit', conv=None):
  """Returns the `Model` that `spec` describes, as `lenet`, `convnet(width=8)` or `lenet+precode(size=64)`.

  Args:
    spec: a name of `REGISTRY` with settings in parentheses, then any `WRAPPERS` of it; or a parsed `Spec`.
    num_classes: number of logits.
    init: 'explicit' or 'default', see `gradleak.models.layers.initialiser`; wrappers have their own.
    conv: a name of `convolution.FORMULATIONS`; None takes the backend's faster one. It changes speed alone.

  Raises:
    UsageError: for an unknown name, setting or init.
  """
  base, *wrappers = specs.parse_chain(spec, 'model') if isinstance(spec, str) else (spec,)
  if base.name in WRAPPERS:
    raise errors.UsageError(f'{base.name!r} wraps a model: write it behind one, as in lenet+{base}')
  factory, static, numeric = specs.resolve(base, REGISTRY, 'model')
  errors.check_number('num_classes', num_classes, low=1, integer=True)
  layers.initialiser(init)
  conv = conv or convolution.default_formulation()
  if conv not in convolution.FORMULATIONS:
    raise errors.unknown('convolution formulation', conv, convolution.FORMULATIONS)
  model = factory(num_classes, init, conv, **static, **numeric)._replace(name=str(base))
  for wrapper in wrappers:
    wrap, static, numeric = specs.resolve(wrapper, WRAPPERS, 'wrapper of a model')
    model = wrap(model, **static, **numeric)._replace(name=f'{model.name}+{wrapper}')
  return model
