"""The tables of the papers, declared: settings, the paper's numbers, and one command that reruns them.

python launch/reproduce.py --list
python launch/reproduce.py --experiment=graddefense_2a --scale=mini --data_dir=data
"""

import dataclasses

from experiments import (
  assumptions,
  audited,
  dcs2,
  deep,
  ffl,
  fidel,
  fidel_pictures,
  generative,
  graddefense,
  labels,
  learned,
  outpost,
  peeling,
  separation,
  spear,
)
from experiments.experiment import Experiment
from experiments.notes import NOTES
from gradleak.core import errors

REGISTRY: dict[str, Experiment] = {
  experiment.name: dataclasses.replace(
    experiment, notes=tuple(note for note in NOTES if note.experiment == experiment.name)
  )
  for module in (
    graddefense,
    outpost,
    deep,
    dcs2,
    ffl,
    fidel_pictures,
    fidel,
    separation,
    peeling,
    spear,
    assumptions,
    learned,
    generative,
    audited,
    labels,
  )
  for experiment in module.EXPERIMENTS
}


def get(name: str) -> Experiment:
  """Returns the `Experiment` of that name.

  Raises:
    UsageError: for an unknown name; lists the valid ones.
  """
  if name not in REGISTRY:
    raise errors.unknown('experiment', name, REGISTRY)
  return REGISTRY[name]
