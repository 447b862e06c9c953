"""Defenses as optax transformations: each can be used in any `optax.chain`.

Random ones take `key=`, data-dependent ones `batch=`, as keyword extra arguments of `update`. Strength zero is the
identity, exactly.
"""

from gradleak.defenses.clipping import clip
from gradleak.defenses.compensation import compensation
from gradleak.defenses.compression import dgc, prune, topk
from gradleak.defenses.concealment import concealed_samples, concealment
from gradleak.defenses.control import null_gradient
from gradleak.defenses.defense import (
  NO_DEFENSE,
  Bound,
  Context,
  Defense,
  Mechanism,
  Noise,
  Traits,
  as_defense,
  bind,
  chain,
  defense,
  wrap,
)
from gradleak.defenses.differential_privacy import aggregate_client_dp, client_dp, clip_samples, dpsgd
from gradleak.defenses.fragmentation import fragmentation, fragmentation_random
from gradleak.defenses.graddefense import graddefense, graddefense_step
from gradleak.defenses.noise import gaussian, laplace
from gradleak.defenses.outpost import outpost, outpost_pruning
from gradleak.defenses.samples import ats, instahide
from gradleak.defenses.soteria import soteria

# By name: what a text may name.
REGISTRY = {
  made.__name__: made
  for made in (
    ats,
    client_dp,
    clip,
    clip_samples,
    compensation,
    concealment,
    dgc,
    dpsgd,
    fragmentation,
    fragmentation_random,
    gaussian,
    graddefense,
    graddefense_step,
    instahide,
    laplace,
    null_gradient,
    outpost,
    prune,
    soteria,
    topk,
  )
}

__all__ = [
  'NO_DEFENSE',
  'REGISTRY',
  'Bound',
  'Context',
  'Defense',
  'Mechanism',
  'Noise',
  'Traits',
  'aggregate_client_dp',
  'as_defense',
  'ats',
  'bind',
  'chain',
  'client_dp',
  'clip',
  'clip_samples',
  'compensation',
  'concealed_samples',
  'concealment',
  'defense',
  'dgc',
  'dpsgd',
  'fragmentation',
  'fragmentation_random',
  'gaussian',
  'graddefense',
  'graddefense_step',
  'instahide',
  'laplace',
  'null_gradient',
  'outpost',
  'outpost_pruning',
  'prune',
  'soteria',
  'topk',
  'wrap',
]
