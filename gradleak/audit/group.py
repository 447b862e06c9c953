"""The attacks that read uploads of one model, and the defenses that they meet."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from gradleak import metrics
from gradleak.audit.labelled import Labelled
from gradleak.audit.settings import AuditSettings
from gradleak.audit.streams import Streams
from gradleak.federated import Client
from gradleak.federated.scenario import Scenario
from gradleak.modalities import Modality
from gradleak.servers.base import Server


@dataclasses.dataclass(frozen=True)
class Group:
  """The attacks whose server sends the same model, and the defenses that they meet.

  Attributes:
    streams: of the audit's randomness.
    scenario: with the model and the variables that clients are sent.
    server: the malicious `Server`, or None: the server is honest.
    attacks: their labels and `AttackMethod`s.
    defenses: their labels and `Bound` defenses.
    num_trials: T.
    settings: the `AuditSettings`.
    candidates: returns what `gallery` is.
    lpips: the weights of LPIPS, None where none were given.
    only: label of a defense -> the trials that are attacked under it; None attacks all.
  """

  streams: Streams
  scenario: Scenario
  server: Server | None
  attacks: tuple[Labelled, ...]
  defenses: tuple[Labelled, ...]
  num_trials: int
  settings: AuditSettings
  candidates: Callable[[], dict[int, Any]]
  lpips: metrics.LpipsWeights | None = None
  only: Mapping[str, frozenset[int]] | None = None

  def attacks_trial(self, defense: str, trial: int) -> bool:
    """Returns whether a trial is attacked under the defense of this label."""
    return self.only is None or int(trial) in self.only.get(defense, ())

  @property
  def modality(self) -> Modality:
    """What a sample is."""
    return self.client.modality

  @property
  def client(self) -> Client:
    """The undefended client."""
    return self.scenario.client

  @property
  def truth(self) -> np.ndarray:
    """The private samples, [T, B, …]."""
    return self._batches(self.scenario.samples)

  @property
  def shared(self) -> np.ndarray:
    """Which of each batch are samples that others have, too, bool [T, B]."""
    shared = self.scenario.shared
    return self._batches(np.zeros(len(self.scenario.samples), bool) if shared is None else np.asarray(shared, bool))

  @property
  def gallery(self) -> dict[int, Any]:
    """Label -> among what a private sample of it is to be found, computed once for all groups."""
    return self.candidates()

  @property
  def targets(self) -> np.ndarray:
    """Their targets, as the client's loss takes them, [T, B, …]."""
    return self._batches(self.scenario.targets)

  @property
  def classes(self) -> np.ndarray:
    """Their classes, int32 [T, B]; 0 where targets are no classes."""
    return self._batches(self.scenario.classes)

  def _batches(self, samples: np.ndarray) -> np.ndarray:
    size = self.settings.batch_size
    return samples[: self.num_trials * size].reshape(self.num_trials, size, *samples.shape[1:])
