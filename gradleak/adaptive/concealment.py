"""DCS²: the concealed samples are reconstructed beside the private ones; the start is the mean image of the class."""

import dataclasses

from gradleak import defenses
from gradleak.adaptive.base import AdaptiveAttack, Case, adaptive_to

# Weight of the private images' smoothness, in units of the distance.
PRIOR = 3e-2


@adaptive_to(defenses.concealment)
def adaptive_attacks(case: Case) -> list[AdaptiveAttack]:
  """Returns the adaptive attacks to concealed samples; the last needs public data (Wu et al. 2024, table 4).

  The concealed samples need not be in [0, 1] and need not be smooth, so that decoys have neither box nor prior. Where
  they have the labels of the private ones, the upload has nearly the direction of the private gradient. Then only
  smoothness distinguishes the private image from the added sample.
  """
  # Each upload has its own concealed samples. An average mixes those of all rounds, which `decoys` cannot represent.
  one_upload = dataclasses.replace(case.known, rounds=1)
  words = f'It weights the smoothness of the private images by {PRIOR:g}.'
  found = [
    one_upload.changed(
      'decoys', f'It reconstructs the concealed samples beside the private ones. {words}', decoys=1, prior=PRIOR
    ),
    case.known.changed('smooth', words, prior=PRIOR),
  ]
  if case.known.context.public is not None:
    words = 'It starts from the mean image of the class in its auxiliary data.'
    found.append(case.known.changed('class_average', words, start='class_average'))
  return found
