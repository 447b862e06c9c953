"""The ranks of a task's defenses, as far as their uploads tell them apart."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from gradleak.core.statistics import differ
from gradleak.report import deploy
from gradleak.report.formatting import together


def ranks(entries: Sequence[Mapping[str, Any]]) -> list[tuple[int, int] | None]:
  """Returns the best and the worst rank that each entry may have, 1 for the least leak; None where it has none.

  An honest-but-curious server counts, and the rate of images that it recovers. Two defenses differ by Fisher's exact
  test at `deploy.LEVEL`, so that few uploads give a wide rank. The best rank counts the defenses that show less, and
  the worst one those that show more. Only affordable ones are ranked (`deploy.affordable`) on which the attacks did not
  fail (`deploy.conclusive`). The seeds of a defense count together. Where they attack the same images, the test is that
  of the same rates among so many images.

  Args:
    entries: of the leaderboard, of one task, and one of each defense and seed (`deploy.largest`).
  """
  defended = [entry for entry in deploy.judged(entries, 'honest') if entry['text'] != 'none']
  rates: dict[str, tuple[float, int]] = {}
  for text, of in together((entry['text'], entry) for entry in defended).items():
    kept = deploy.conclusive(of, 'honest')
    if kept and all(map(deploy.affordable, of)):
      number = sum(one['honest']['n'] for one in kept)
      rates[text] = sum(deploy.shown(one['honest']) for one in kept) / number, _images(kept)

  def place(ours: tuple[float, int]) -> tuple[int, int]:
    apart = [
      rate
      for rate, images in rates.values()
      if all(differ(*one, *other, deploy.LEVEL) for one in _counted(*ours) for other in _counted(rate, images))
    ]
    return 1 + sum(rate < ours[0] for rate in apart), len(rates) - sum(rate > ours[0] for rate in apart)

  ranked = {text: place(rate) for text, rate in rates.items()}
  return [ranked.get(entry['text']) if entry in defended else None for entry in entries]


def _counted(rate: float, images: int) -> set[tuple[int, int]]:
  """Returns (count, images) that a rate of several seeds is between; rounded to one of them, it may seem apart."""
  exact = round(rate * images, 6)
  return {(math.floor(exact), images), (math.ceil(exact), images)}


def _images(entries: Sequence[Mapping[str, Any]]) -> int:
  """Returns how many different images the uploads of some entries are of, at least.

  Seeds with other numbers of uploads take the first images of one split. Where nothing is known, equal numbers are of
  different images.
  """
  pairs = ((one['honest']['n'], one.get('fingerprints', {}).get('data') or place) for place, one in enumerate(entries))
  return max(n * len(set(data)) for n, data in together(pairs).items())
