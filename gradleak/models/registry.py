"""The built-in models by name."""

from collections.abc import Callable, Mapping
from typing import Any

from gradleak.core import errors, grammar, methods
from gradleak.models import convnets, lora, normalisation, precode, resnet, small, tabular, transformers, vgg, vit
from gradleak.models.model import Model

REGISTRY: dict[str, Callable[..., Model]] = {
  'mlp': small.mlp,
  'cnn': small.cnn,
  'lenet': small.lenet,
  'lenet4': small.lenet4,
  'convnet': convnets.convnet,
  'convnet9': convnets.convnet9,
  'resnet18': resnet.resnet18,
  'resnet20': resnet.resnet20,
  'resnet34': resnet.resnet34,
  'resnet50': resnet.resnet50,
  'resnet56': resnet.resnet56,
  'resnet101': resnet.resnet101,
  'resnet152': resnet.resnet152,
  'vgg11': vgg.vgg11,
  'vgg16': vgg.vgg16,
  'vit_tiny': vit.vit_tiny,
  'vit_small': vit.vit_small,
  'gpt': transformers.gpt,
  'bert': transformers.bert,
  'lstm': transformers.lstm,
  'logistic': tabular.logistic,
  'resnet_mlp': tabular.resnet_mlp,
  'ft_transformer': tabular.ft_transformer,
}
WRAPPERS: dict[str, Callable[..., Model]] = {
  'lora': lora.lora,
  'normalised': normalisation.normalised,
  'precode': precode.precode,
}


def create(
  spec: str | grammar.Spec,
  num_classes: int,
  *,
  init: str = 'explicit',
  conv: str | None = None,
  columns: tuple[int, ...] = (),
  known: Mapping[str, Any] | None = None,
) -> Model:
  """Returns the `Model` that `spec` describes, such as `convnet(width=8)` or `lenet+normalised(pixels=mnist)`.

  Args:
    spec: a name of `REGISTRY` with settings in parentheses, then any `WRAPPERS` of it; or a parsed `Spec`.
    num_classes: number of logits.
    init: 'explicit' or 'default', see `gradleak.models.layers.initialiser`; wrappers have their own.
    conv: a name of `convolution.FORMULATIONS`; None takes the faster one. It affects speed only.

    columns: entries of each column of a table, for a network that takes them and is not given any.
    known: settings that the data tell, such as the vocabulary of texts, for a network that takes them and is not given
      others.

  Raises:
    UsageError: for an unknown name, setting or init.
  """
  base, *wrappers = (spec,) if isinstance(spec, grammar.Spec) else grammar.parse_chain(spec, 'model')
  if base.name in WRAPPERS:
    raise errors.UsageError(f'{base.name!r} wraps a model: write it after one, as in lenet+{base}')
  chosen = methods.from_spec(base, REGISTRY, 'model')
  told = {**(known or {}), **({'columns': columns} if columns else {})}
  told = {name: value for name, value in told.items() if name in chosen.settings}
  model = chosen.factory(num_classes, init, conv, **{**told, **chosen.given})._replace(name=str(base)).built_in()
  if len({wrapper.name for wrapper in wrappers}) < len(wrappers):
    raise errors.UsageError(f'a wrapper stands twice in the model {errors.shown(spec)}')
  for wrapper in wrappers:
    chosen = methods.from_spec(wrapper, WRAPPERS, 'wrapper of a model')
    model = chosen.factory(model, **chosen.given)._replace(name=f'{model.name}+{wrapper}').built_in()
  return model
