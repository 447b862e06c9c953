"""The ranks of a task's defenses, as far as their uploads tell them apart."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from gradleak.report import deploy
from gradleak.report.formatting import together

LEVEL = 0.05  # of the test of each pair


def ranks(entries: Sequence[Mapping[str, Any]]) -> list[tuple[int, int] | None]:
  """Returns the best and the worst rank that each entry may have, 1 for the least leak; None where it has none.

  An honest-but-curious server counts, and the images that it recovers. Two defenses differ where Fisher's exact test
  rejects equal rates at `LEVEL`. The best rank counts the defenses that show fewer images, and the worst one those that
  show more. Only defenses with the commonest number of uploads are ranked, and of these only affordable ones
  (`deploy.affordable`) on which the attacks did not fail (`deploy.failed`). The seeds of a defense count together.
  Where they attack the same images, the test is that of the same rates among so many images.

  Args:
    entries: of the leaderboard, of one task.
  """
  defended = [entry for entry in deploy.judged(entries, 'honest') if entry['text'] != 'none']
  seeds = together((entry['text'], entry) for entry in defended)
  uploads = {text: sum(one['honest']['n'] for one in of) for text, of in seeds.items()}
  numbers = Counter(uploads.values())
  common = max(numbers, key=lambda n: (numbers[n], n), default=0)
  counts = {
    text: sum(deploy.shown(one['honest']) for one in of)
    for text, of in seeds.items()
    if uploads[text] == common and all(deploy.affordable(one) and not deploy.failed(one['honest']) for one in of)
  }
  images = min((_images(seeds[text]) for text in counts), default=0)

  def place(count: int) -> tuple[int, int]:
    ours, *others = (round(each * images / common) for each in (count, *counts.values()))
    apart = [other for other, of in zip(counts.values(), others, strict=True) if differ(ours, of, images)]
    return 1 + sum(other < count for other in apart), len(counts) - sum(other > count for other in apart)

  ranked = {text: place(count) for text, count in counts.items()}
  return [ranked.get(entry['text']) if entry in defended else None for entry in entries]


def _images(entries: Sequence[Mapping[str, Any]]) -> int:
  """Returns how many different images the uploads of some entries are of; where nothing is known, all are."""
  most: dict[Any, int] = {}
  for place, one in enumerate(entries):
    data = one.get('fingerprints', {}).get('data') or place
    most[data] = max(most.get(data, 0), one['honest']['n'])
  return sum(most.values())


def differ(one: int, other: int, n: int) -> bool:
  """Returns whether two counts of n each are too far apart for equal rates, by Fisher's exact test at `LEVEL`."""
  from scipy.stats import fisher_exact

  return bool(fisher_exact([[one, n - one], [other, n - other]])[1] < LEVEL)
