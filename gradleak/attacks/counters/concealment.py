"""DCS²: the concealed samples are reconstructed beside the private ones; the start is the mean image of the class."""

import dataclasses

from gradleak import defenses
from gradleak.attacks.counters.base import Case, Counter, counter_to


@counter_to(defenses.concealment)
def counters(case: Case) -> list[Counter]:
  """Returns the counter-measures to concealed samples; the second needs public data (Wu et al. 2024, table 4)."""
  # Each upload has its own concealed samples. An average mixes those of all rounds, which `decoys` cannot represent.
  one_upload = dataclasses.replace(case.known, rounds=1)
  found = [one_upload.changed('decoys', 'It reconstructs the concealed samples beside the private ones.', decoys=1)]
  if case.known.context.public is not None:
    words = 'It starts from the mean image of the class in its auxiliary data.'
    found.append(case.known.changed('class_average', words, start='class_average'))
  return found
