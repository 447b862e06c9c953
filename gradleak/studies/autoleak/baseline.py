"""What shows of private samples without any upload: answers that an attacker has before it attacks."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypedDict

import numpy as np

from gradleak.audit.plan import galleries
from gradleak.audit.verdict import MIN_CANDIDATES
from gradleak.federated.scenario import Scenario, classes_of


class Baseline(TypedDict):
  """How near one answer without an upload comes.

  Attributes:
    baseline: its name.
    score, likeness: means over the samples, of the columns of their modality.
    exact, recognisable, named: the trials of which a sample comes to this level; 'named' is re-identified. The first
      needs a correlation of 0.98, the others rank 1 among the candidates, as of a reconstruction.
    trials: how many there are.
  """

  baseline: str
  score: float
  likeness: float
  exact: int
  recognisable: int
  named: int
  trials: int


class _Held(NamedTuple):
  """What an answer is made of: private samples [N, …], at which only the nearest looks, labels, and public ones.

  `usual` and `empty` are those of the `Modality`.
  """

  usual: np.ndarray | None
  empty: Callable[[np.ndarray], np.ndarray]
  private: np.ndarray
  labels: np.ndarray
  public: np.ndarray
  public_labels: np.ndarray


def _grey(held: _Held) -> np.ndarray:
  """Returns flat images of half the largest value."""
  return np.full_like(held.private, 0.5)


def _usual(held: _Held) -> np.ndarray:
  """Returns the answer that the columns alone give: their medians and commonest levels."""
  return np.broadcast_to(np.asarray(held.usual, held.private.dtype), held.private.shape).copy()


def _class_mean(held: _Held) -> np.ndarray:
  """Returns the mean public sample of each label; of all where it has none."""
  means = [
    held.public[of if (of := held.public_labels == label).any() else slice(None)].mean(axis=0) for label in held.labels
  ]
  return np.asarray(means, held.private.dtype)


def _nearest(held: _Held) -> np.ndarray:
  """Returns the public sample nearest to each private one: more than any attacker without an upload can know."""
  public = held.public.reshape(len(held.public), -1)
  apart = [np.sum((public - one.ravel()) ** 2, axis=1) for one in held.private]
  return held.public[[int(np.argmin(each)) for each in apart]]


def _commonest(held: _Held) -> np.ndarray:
  """Returns the commonest token of public texts at each place, for every private one."""
  found = [np.bincount(column).argmax() for column in held.public.T]
  return np.broadcast_to(np.asarray(found, held.private.dtype), held.private.shape)


def _nearest_text(held: _Held) -> np.ndarray:
  """Returns the public text with the largest share of tokens in common with each private one, at any place.

  The share is the F1 of both; padding and masks are no tokens.
  """
  most = 1 + int(max(held.public.max(), held.private.max()))
  tokens = ~held.empty(np.arange(most)[:, np.newaxis])
  counts = [
    np.stack([np.bincount(text, minlength=most) for text in texts]) * tokens for texts in (held.public, held.private)
  ]
  lengths = counts[0].sum(axis=1)
  shares = [np.minimum(counts[0], one).sum(axis=1) / (lengths + one.sum()) for one in counts[1]]
  return held.public[[int(share.argmax()) for share in shares]]


# Modality -> {name of an answer: (what makes it, whether it needs public samples)}.
ANSWERS: dict[str, dict[str, tuple[Callable[[_Held], np.ndarray], bool]]] = {
  'images': {
    'grey image': (_grey, False),
    'class mean': (_class_mean, True),
    'nearest public image': (_nearest, True),
  },
  'table': {
    'medians and commonest levels': (_usual, False),
    'class mean': (_class_mean, True),
    'nearest public row': (_nearest, True),
  },
  'text': {
    'commonest token at each place': (_commonest, True),
    'nearest public text': (_nearest_text, True),
  },
}


def baselines(scenario: Scenario, num_trials: int, batch_size: int) -> list[Baseline]:
  """Returns how near each answer of the scenario's modality comes; those of public samples where there are some.

  Args:
    scenario: what is audited.
    num_trials: T.
    batch_size: samples behind one upload.
  """
  count, kind = num_trials * batch_size, scenario.client.modality
  images, labels = scenario.samples[:count], scenario.classes[:count]
  public = scenario.public and (np.asarray(scenario.public[0]), classes_of(scenario.public[1], scenario.client))
  held = _Held(kind.usual, kind.empty, images, labels, *(public or (images[:0], labels[:0])))
  among = galleries(scenario, count)
  made: list[Baseline] = []
  for name, (answer, needs_public) in ANSWERS.get(kind.name, {}).items():
    if needs_public and not len(held.public):
      continue
    found = answer(held)
    batches = [slice(start, start + batch_size) for start in range(0, count, batch_size)]
    figures = [
      kind.evaluate(found[of], images[of], labels[of], labels[of], signed=True, blank=True, among=among)
      for of in batches
    ]
    made.append(_told(name, figures, kind))
  return made


def _told(name: str, figures: list[dict[str, Any]], kind: Any) -> Baseline:
  enough = [one['candidates'] >= MIN_CANDIDATES for one in figures]
  return Baseline(
    baseline=name,
    score=float(np.mean([one[kind.score] for one in figures])),
    likeness=float(np.mean([one[kind.likeness] for one in figures])),
    exact=sum(one['revealed'] > 0 for one in figures),
    recognisable=sum(
      bool(one['revealed'] or (one['recognised'] and many)) for one, many in zip(figures, enough, strict=True)
    ),
    named=sum(bool(one['revealed'] or (one['identified'] and many)) for one, many in zip(figures, enough, strict=True)),
    trials=len(figures),
  )
