"""The flags of a model's weights: drawn by a rule, or those of a file."""

import os
import types
from typing import Any

from absl import flags

import gradleak as gl
from gradleak.core import errors
from gradleak.federated.simulation import accuracy
from launch import _program


def define(**defaults: Any) -> types.SimpleNamespace:
  """Defines --init and --weights and returns their holders; `defaults` replace some defaults."""
  draws = 'explicit: U(-0.5, 0.5), as in DLG; default: U(±1/√fan_in), as PyTorch.'
  file = (
    "File with the model's weights, by the names of PyTorch or of this model (numpy.savez, safetensors, torch.save); "
    'they are drawn without it.'
  )
  return types.SimpleNamespace(
    init=flags.DEFINE_string('init', defaults.get('init', 'explicit'), draws),
    weights=flags.DEFINE_string('weights', defaults.get('weights'), file),
  )


def read(
  given: types.SimpleNamespace, model: gl.models.Model, image_shape: tuple[int, ...], samples: tuple | None, kind: str
) -> dict | None:
  """Returns the variables in the file of the flag, None without one, and says what accuracy they have.

  Args:
    given: what `define` returns.
    model: whose weights they are.
    image_shape: (H, W, C).
    samples: (images, labels) on which the accuracy is measured, or None.
    kind: what these are called.

  Raises:
    UsageError: for a file that does not hold weights of this model, and with a flag of how they are drawn.
  """
  if not given.weights.value:
    return None
  if given.init.present:
    raise errors.UsageError('--weights are those of a file, and --init says how weights are drawn: give one of them')
  variables = gl.read_weights(given.weights.value, model, image_shape)
  if samples is not None:
    share, _ = accuracy(model, variables, *samples)
    count = f'{len(samples[0]):,} {kind} images'
    _program.say(f'accuracy with the weights of {given.weights.value}: {share:.1%}, of {count}')
  return variables


def described(given: types.SimpleNamespace) -> dict[str, str]:
  """Returns `{'init': the rule}`, or `{'weights': the name of the file}`."""
  if given.weights.value:
    return {'weights': os.path.basename(given.weights.value)}
  return {'init': given.init.value}
