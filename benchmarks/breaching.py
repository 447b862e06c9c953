"""The public package `breaching` on the same weights, images and starts: its own code, one trial at a time.

Its attack 'invertinggradients' is the csDLG of Geiping et al. (2020); its total variation is taken at our weight, over
the same mean, with zeros beyond the border.
"""

import contextlib
import io
import logging
import types
import warnings
from typing import Any

from benchmarks import pytorch
from benchmarks.pytorch import Attacked, Settings, Trial

# Operators that torchvision describes while it is imported; without its compiled part they must be declared first.
_OPERATORS = ('nms', 'qnms')


def package() -> Any:
  """Returns the module `breaching`, imported once.

  Raises:
    Unavailable: where it, or what it imports, is not installed.
  """
  torch = pytorch.torch()
  with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
    warnings.simplefilter('ignore')
    try:
      try:
        import torchvision  # noqa: F401
      except RuntimeError:  # beside a CPU build of torch its compiled part cannot be loaded
        library = torch.library.Library('torchvision', 'DEF')
        for name in _OPERATORS:
          library.define(f'{name}(Tensor x) -> Tensor')
        package.library = library  # kept: its declarations end when it is deleted
      import breaching
    except ImportError as error:
      raise pytorch.Unavailable(f'breaching needs {error.name} (make benchmark installs it)') from None
  return breaching


def version() -> str:
  """Returns the version that is installed."""
  from importlib import metadata

  return metadata.version('breaching')


def attack(module: Any, trial: Trial, settings: Settings, device: str) -> Attacked:
  """Attacks one trial; arguments and what is returned are those of `pytorch.attack`."""
  torch, breaching = pytorch.torch(), package()
  overrides = [
    f'optim.max_iterations={settings.steps}',
    f'optim.step_size={settings.learning_rate}',
    f'regularization.total_variation.scale={settings.tv}',
    f'optim.callback={settings.steps + 1}',
  ]
  label = torch.tensor([int(trial.label)], device=device)
  loss = torch.nn.CrossEntropyLoss()
  shape = (trial.image.shape[-1], *trial.image.shape[:-1])
  payload = {
    'parameters': [parameter.detach() for parameter in module.parameters()],
    'buffers': None,
    'metadata': types.SimpleNamespace(shape=shape, modality='vision'),
  }
  shared = {
    'gradients': [g.detach() for g in pytorch.gradient(module, pytorch.tensor(trial.image, device), label)],
    'buffers': None,
    'metadata': {'num_data_points': 1, 'labels': label, 'local_hyperparams': None},
  }
  logging.getLogger('breaching').setLevel(logging.ERROR)
  with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
    warnings.simplefilter('ignore')
    config = breaching.get_attack_config('invertinggradients', overrides)
    setup = {'dtype': torch.float, 'device': torch.device(device)}
    attacker = breaching.attacks.prepare_attack(module, loss, config, setup)
    start = pytorch.tensor(trial.start, device)
    watch = pytorch.Stopwatch(device)
    found, stats = attacker.reconstruct([payload], [shared], {}, initial_data=start)
    seconds = watch.read()
  return Attacked(found['data'][0].permute(1, 2, 0).cpu().numpy(), stats['Trial_0_Val'][0], *seconds)
