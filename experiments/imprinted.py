"""The imprint attack read as in DCS²'s published code: of the images returned, only the last is scored."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import numpy as np

import gradleak as gl
from experiments.experiment import Data, Run
from gradleak import metrics
from gradleak.core.trees import Tree
from gradleak.defenses import Defense


@dataclasses.dataclass(frozen=True)
class Imprinted(Run):
  """An audit of `imprint`; its rows have 'last_psnr' and 'last_ssim', too, of the published read-out.

  'psnr' and 'ssim' are of the returned image that is nearest to the private one.
  """

  more: ClassVar[str] = 'last.json'

  def of_trials(self, data: Data, seed: int) -> Callable[[Defense], Callable[[int], dict]]:
    """Returns defense -> trial -> its 'last_psnr' and 'last_ssim'; the upload holds one image."""
    server = self.method().server
    sent = server.factory(**server.settings).prepare(jax.random.key(seed), self.scenario(data, seed), 1)
    return functools.partial(_last_under, sent, jax.random.key(seed))


def _last_under(sent: gl.Scenario, key: jax.Array, defense: Defense) -> Callable[[int], dict]:
  shape = sent.samples.shape[1:]
  context = gl.defenses.Context(sent.client, sent.variables, shape, sent.public)
  send = jax.jit(gl.defenses.bind(defense, context).client(sent.client).local_update)
  labels = 2 if any(stage.name == 'concealment' for stage in defense.stages) else 1

  def of_trial(trial: int) -> dict:
    truth, targets = (x[trial : trial + 1] for x in (sent.samples, sent.targets))
    upload = send(jax.random.fold_in(key, trial), sent.variables, truth, targets).update['imprint']['measure']
    image = last_returned(jax.device_get(upload), labels).reshape(1, *shape)
    scores = {'last_psnr': metrics.psnr(image, truth), 'last_ssim': metrics.ssim(image, truth)}
    return {name: float(np.asarray(score).squeeze()) for name, score in scores.items()}

  return of_trial


def last_returned(update: Tree, count: int) -> np.ndarray:
  """Returns the last image that the published read-out returns, [D]; black if there are fewer.

  Each bin's entries less those of the bin before give an image; `count` of them are returned, those of the largest mean
  weight first.

  Args:
    update: of the module's first layer, {'kernel' [D, K], 'bias' [K]}.
    count: number of labels that the attacker is given: two where a concealed sample is sent, too.
  """

  def differences(x: Any) -> np.ndarray:
    return np.diff(np.asarray(x, np.float64), axis=-1, prepend=0.0)

  kernel, bias = differences(update['kernel']), differences(update['bias'])
  alive = np.flatnonzero(bias)
  order = alive[np.argsort(-np.abs(kernel[:, alive].mean(axis=0)), kind='stable')][:count]
  if len(order) < count:
    return np.zeros(len(kernel), np.float32)
  return np.float32(kernel[:, order[-1]] / bias[order[-1]])
