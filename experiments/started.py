"""An audit of concealed samples whose start points come from another dataset than the one that is attacked."""

import dataclasses
from typing import Any

import numpy as np

import gradleak as gl
from experiments.experiment import Data, Run
from gradleak.data import Dataset
from gradleak.defenses import Defense
from gradleak.federated.scenario import fingerprint


def brought(name: str, count: int, like: Dataset, data_dir: str | None) -> tuple[np.ndarray, np.ndarray]:
  """Returns the first training (samples, targets) of a dataset, in the size, the channels and the classes of another.

  Args:
    name: of the dataset, as in `gradleak.data.load`.
    count: number of images.
    like: the other dataset; labels are taken modulo its number of classes.
    data_dir: folder of TFDS datasets.
  """
  side, _, channels = like.samples.shape[1:]
  found = gl.data.load(name, 'train', data_dir=data_dir, limit=count, image_size=side, channels=channels)
  return found.samples, np.asarray(found.targets % like.num_classes, np.int32)


@dataclasses.dataclass(frozen=True)
class Started(Run):
  """An audit in which the client holds other public images than the attacker; `Data.others` are the client's.

  Attributes:
    starts: the dataset of the start points: the first `public` images of its train split, see `brought`.
  """

  starts: str = 'cifar10'

  def smallest(self) -> dict[str, Any]:
    """Returns what makes this a small audit, with faces as start points for digits."""
    return {**super().smallest(), 'starts': 'faces'}

  def load(self, data_dir: str | None) -> Data:
    """Returns the `Data`, with the start points."""
    data = super().load(data_dir)
    return data._replace(others=brought(self.starts, self.public, data.private, data_dir))

  def scenario(self, data: Data, seed: int, folder: str | None = None, progress: str = 'none') -> gl.Scenario:
    """Returns the `Scenario`, which records the start points."""
    made = super().scenario(data, seed, folder, progress)
    told = {'starts': self.starts, 'starts_fingerprint': fingerprint(data.others)}
    return made._replace(settings={**made.settings, **told})

  def protections(self, scenario: gl.Scenario, data: Data) -> list[Defense]:
    """Returns the defenses, those that conceal samples with their start points."""

    def started(stage: Any) -> Any:
      if 'start' not in stage.settings:
        return stage
      return dataclasses.replace(stage, arguments=(scenario.client, data.others))

    return [Defense(tuple(map(started, made.stages))) for made in super().protections(scenario, data)]
