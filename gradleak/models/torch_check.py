"""Whether a PyTorch module and the model that was made of it agree: logits, gradient, and what a step changes.

Both are run in float64. In float32 a network whose BatchNorm sees a few values departs from itself by 1e-4.
"""

import copy
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gradleak.core import errors
from gradleak.core.trees import Tree
from gradleak.engine import compiler
from gradleak.models import aten, torch_modules
from gradleak.models.aten_program import Step
from gradleak.models.model import Model

_TOLERANCE = {np.dtype(np.float64): 1e-6, np.dtype(np.float32): 1e-3}  # relative
_LEAST = 1e-2  # of the whole gradient's norm: a tensor's difference is relative to that at least
_ANYWAY = 'check=False takes the model as it is'

Watch = Callable[[Step, Any], None]


def check(
  torch: Any,
  module: Any,
  inputs: Any,
  model: Model,
  variables: Tree,
  samples: np.ndarray,
  watched: Callable[[Tree, jax.Array, bool, Watch], Any],
) -> None:
  """Raises `UsageError` where a module and a model differ on samples; it names the first layer that does.

  Args:
    torch: the package.
    module: a module, whose type, mode and statistics are changed.
    inputs: the samples as it takes them.
    model, variables: what was made of it.
    samples: the samples as the model takes them.
    watched: (variables, images, train, watch) runs the model and calls watch(step, value) for each operation.
  """
  dtype = np.dtype(np.float64 if _takes_float64(torch, module, inputs) else np.float32)
  module = module.to(getattr(torch, dtype.name))
  with jax.enable_x64(dtype == np.float64):
    variables, samples = jax.tree.map(lambda x: _to(np.asarray(x), dtype), (variables, samples))
    inputs = inputs.to(getattr(torch, dtype.name)) if inputs.is_floating_point() else inputs
    before, fresh = dict(torch_modules.numbers(module)), copy.deepcopy(module)  # which may keep tensors of a pass
    for train in (False, True):
      _check_mode(torch, module, inputs, model, variables, samples, train, watched)
      _check_one_sample(torch, fresh, inputs, model, variables, samples, train)
  for attribute, value in torch_modules.numbers(module):
    if before.get(attribute, value) != value:
      raise errors.UsageError(
        f'the module {model.name!r} changes its attribute {attribute} when it is called, which a model holds as it is: '
        f'register it as a buffer. {_ANYWAY}'
      )


def _to(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
  return values.astype(dtype) if values.dtype.kind == 'f' else values


def _takes_float64(torch: Any, module: Any, inputs: Any) -> bool:
  """Returns whether a module can be run in float64: one that turns values to float32 itself cannot."""
  inputs = inputs.double() if inputs.is_floating_point() else inputs
  try:
    with torch.no_grad():
      copy.deepcopy(module).double().eval()(inputs)
  except Exception:  # a user's network may raise anything
    return False
  return True


def _check_mode(
  torch: Any,
  module: Any,
  inputs: Any,
  model: Model,
  variables: Tree,
  samples: np.ndarray,
  train: bool,
  watched: Callable[[Tree, jax.Array, bool, Watch], Any],
) -> None:
  """Raises the errors of `check` in one mode."""
  assert model.layout is not None
  mode = f'in {"training" if train else "evaluation"}'
  logits, outputs, gradients, after = _theirs(torch, module, inputs, train, model.name)
  found, ours, changed = _ours(model, variables, samples, train, logits)
  if not _near(found, logits):
    layer = _first(watched, variables, samples, train, outputs)
    raise errors.UsageError(
      f'the model departs from the module {model.name!r} {mode}: the logits differ by '
      f'{_relative(found, logits):.1e} of their norm, {layer}. {_ANYWAY}'
    )
  whole = np.sqrt(sum(float(np.sum(np.square(one, dtype=np.float64))) for one in gradients.values()))
  named = model.layout.to_theirs({'params': ours})
  pairs = {name: (named.get(name, np.zeros_like(one)), one) for name, one in gradients.items()}
  apart = [name for name, pair in pairs.items() if not _near(*pair, _LEAST * whole)]
  if apart:  # a gradient departs backward: the last layer comes first
    layers = [name for layer in model.layers(samples.shape[1:]) for name in map('.'.join, layer.paths)]  # type: ignore[misc]
    first = max(apart, key=lambda name: layers.index(name) if name in layers else len(layers))
    if first not in named or not dict(module.named_parameters())[first].requires_grad:
      raise errors.UsageError(
        f'{"the model" if first in named else "the module"} alone has a gradient of {first} {mode}, which the forward '
        f'pass of {model.name!r} changes or switches off: do that outside of it. {_ANYWAY}'
      )
    raise errors.UsageError(
      f'the gradient of the model departs from that of the module {model.name!r} {mode}, first in {first}: by '
      f'{_relative(*pairs[first]):.1e} of its norm. {_ANYWAY}'
    )
  for name, values in (model.layout.to_theirs({'batch_stats': changed}) if train else {}).items():
    if not _near(values, after[name], 1e-3):
      raise errors.UsageError(
        f'the model departs from the module {model.name!r} in {name} after a step of training. {_ANYWAY}'
      )


def _check_one_sample(
  torch: Any, module: Any, inputs: Any, model: Model, variables: Tree, samples: np.ndarray, train: bool
) -> None:
  """Raises `UsageError` where the logits of a batch of one sample are others; what PyTorch cannot run is passed over.

  An export is for two samples or more: what a module does with one alone is not in it.
  """
  try:
    with torch.no_grad(), _without_dropout(torch):
      logits = _logits(torch, module.train(train), inputs[:1], model.name).numpy()
  except errors.UsageError:
    raise
  except Exception:  # BatchNorm does not train on one value per channel
    return

  @functools.partial(jax.jit, compiler_options=compiler.once())
  def run(variables: Tree, samples: jax.Array) -> jax.Array:
    found = model.apply(variables, samples, train, None)[0]
    return jnp.moveaxis(found, -1, 1) if found.ndim == 4 else found

  try:
    same = _near(np.asarray(run(variables, jnp.asarray(samples[:1]))), logits)
  except errors.UsageError:
    same = False
  if not same:
    raise errors.UsageError(
      f'the module {model.name!r} computes another thing for a batch of one sample than for several. {_ANYWAY}, for '
      'batches of several'
    )


def _logits(torch: Any, module: Any, inputs: Any, name: str) -> Any:
  """Returns the logits of a module that returns these alone; there is a row per sample."""
  found = module(inputs)
  if found.shape[:1] != inputs.shape[:1]:
    raise errors.UsageError(
      f'the module {name!r} returns {tuple(found.shape)} for {len(inputs)} samples, expected logits of each sample'
    )
  return found


def _theirs(torch: Any, module: Any, inputs: Any, train: bool, name: str) -> tuple[np.ndarray, dict, dict, dict]:
  """Returns the module's (logits, outputs of its layers, gradients, `state_dict` after the pass); without dropout."""
  outputs: dict[str, np.ndarray] = {}

  def watch(name: str) -> Callable[..., None]:
    def keep(layer: Any, given: Any, output: Any) -> None:
      if isinstance(output, torch.Tensor):
        outputs[name] = output.detach().numpy().copy()

    return keep

  module.train(train)
  module.zero_grad()
  leaves = [(name, one) for name, one in module.named_modules() if name and not list(one.children())]
  hooks = [one.register_forward_hook(watch(name)) for name, one in leaves]
  with torch.enable_grad(), _without_dropout(torch):
    logits = _logits(torch, module, inputs, name)
    if not logits.requires_grad:
      raise errors.UsageError(f'the module {name!r} returns logits that depend on no parameter that is trained')
    (logits * torch.from_numpy(_slopes(logits.detach().numpy()))).sum().backward()
  for hook in hooks:
    hook.remove()
  gradients = {
    name: np.zeros(one.shape) if one.grad is None else one.grad.to_dense().numpy().copy()
    for name, one in module.named_parameters()
  }
  after = {name: one.detach().numpy().copy() for name, one in module.state_dict().items()}
  return logits.detach().numpy(), outputs, gradients, after


def _slopes(logits: np.ndarray) -> np.ndarray:
  """Returns the derivative of a loss with respect to logits in PyTorch's order of axes."""
  return np.random.default_rng(0).standard_normal(logits.shape).astype(logits.dtype) / logits.dtype.type(len(logits))


def _without_dropout(torch: Any) -> Any:
  """Returns a context in which all that is drawn for dropout is kept."""
  from torch.utils._python_dispatch import TorchDispatchMode

  class Kept(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
      if function is torch.ops.aten.bernoulli_.float:
        return args[0].fill_(args[1] if len(args) > 1 else (kwargs or {}).get('p', 0.5))
      return function(*args, **(kwargs or {}))

  return Kept()


def _ours(model: Model, variables: Tree, samples: np.ndarray, train: bool, theirs: np.ndarray) -> tuple:
  """Returns the model's (logits as PyTorch has them, gradient, new 'batch_stats')."""
  slopes = _slopes(theirs)

  @functools.partial(jax.jit, compiler_options=compiler.once())
  def run(variables: Tree, samples: jax.Array) -> tuple:
    def loss(params: Tree) -> tuple[jax.Array, tuple]:
      logits, changed = model.apply({**variables, 'params': params}, samples, train, None)
      logits = jnp.moveaxis(logits, -1, 1) if logits.ndim == 4 else logits
      return jnp.sum(logits * slopes), (logits, changed)

    return jax.grad(loss, has_aux=True)(variables['params'])

  gradient, (logits, changed) = jax.device_get(run(variables, jnp.asarray(samples)))
  return logits, gradient, changed


def _first(
  watched: Callable, variables: Tree, samples: np.ndarray, train: bool, outputs: Mapping[str, np.ndarray]
) -> str:
  """Returns which layer's output departs first, in words."""
  found: dict[str, Any] = {}

  def watch(step: Step, value: Any) -> None:
    value = value[0] if isinstance(value, tuple) else value
    if aten.is_array(value):
      found[step.where] = aten.plain(value)

  watched(variables, jnp.asarray(samples), train, watch)
  for name, value in found.items():
    if name in outputs and outputs[name].shape == value.shape and not _near(np.asarray(value), outputs[name]):
      return f'and the output of {name} is the first that departs, by {_relative(np.asarray(value), outputs[name]):.1e}'
  return 'and no output of a layer departs before them'


def _near(found: np.ndarray, wanted: np.ndarray, least: float = 0.0) -> bool:
  apart = np.linalg.norm(np.asarray(found, np.float64).ravel() - np.asarray(wanted, np.float64).ravel())
  size = np.linalg.norm(np.asarray(wanted, np.float64).ravel())
  tolerance = _TOLERANCE.get(wanted.dtype, 1e-6)
  return bool(found.shape == wanted.shape and apart <= tolerance * max(float(size), least) + 1e-12)


def _relative(found: np.ndarray, wanted: np.ndarray) -> float:
  size = float(np.linalg.norm(np.asarray(wanted, np.float64)))
  apart = float(np.linalg.norm(np.asarray(found, np.float64) - np.asarray(wanted, np.float64)))
  return apart / size if size else apart
