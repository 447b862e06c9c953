"""The imprint attack read as in DCS²'s published code: of the images returned, only the last is scored."""

import dataclasses
from typing import Any, ClassVar

import jax
import numpy as np

import gradleak as gl
from experiments.experiment import Data, Run
from gradleak import metrics, registry
from gradleak.core.trees import Tree
from gradleak.defenses import Defense


@dataclasses.dataclass(frozen=True)
class Imprinted(Run):
  """An audit of `imprint`; its rows have 'last_psnr' and 'last_ssim', too, of the published read-out.

  'psnr' and 'ssim' are of the returned image that is nearest to the private one.
  """

  more: ClassVar[str] = 'last.json'

  def columns(self, data: Data, seed: int) -> dict[str, list[dict]]:
    """Returns defense -> 'last_psnr' and 'last_ssim' of each trial, whose upload holds one image."""
    honest = self.scenario(data, seed)
    server = self.method().server
    sent = server.factory(**server.settings).prepare(jax.random.key(seed), honest, 1)
    return {text: self._last_under(registry.defense(text), sent, seed) for text in self.texts().values()}

  def _last_under(self, defense: Defense, sent: gl.Scenario, seed: int) -> list[dict]:
    shape = sent.samples.shape[1:]
    context = gl.defenses.Context(sent.client, sent.variables, shape, sent.public)
    send = jax.jit(gl.defenses.bind(defense, context).client(sent.client).local_update)
    labels = 2 if any(stage.name == 'concealment' for stage in defense.stages) else 1
    found = []
    for trial in range(self.trials):
      batch = (x[trial : trial + 1] for x in (sent.samples, sent.targets))
      key = jax.random.fold_in(jax.random.key(seed), trial)
      update = send(key, sent.variables, *batch).update['imprint']['measure']
      image = last_returned(jax.device_get(update), labels).reshape(1, *shape)
      truth = sent.samples[trial : trial + 1]
      scores = {'last_psnr': metrics.psnr(image, truth), 'last_ssim': metrics.ssim(image, truth)}
      found.append({name: float(np.asarray(score).squeeze()) for name, score in scores.items()})
    return found


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
