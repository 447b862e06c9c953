"""Defenses as optax transformations: each can be used in any `optax.chain`.

Random ones take `key=`, data-dependent ones `batch=`, as keyword extra arguments of `update`. Strength zero is the
identity, exactly.
"""

from gradleak.defenses.clipping import clamp, clip
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
from gradleak.defenses.local_dp import local_dp
from gradleak.defenses.noise import gaussian, laplace
from gradleak.defenses.outpost import outpost, outpost_pruning
from gradleak.defenses.percentile_privacy import percentile_privacy
from gradleak.defenses.quantization import adaquant, quantize
from gradleak.defenses.samples import ats, instahide
from gradleak.defenses.secagg import secagg_rounding
from gradleak.defenses.server_dp import server_dp
from gradleak.defenses.soteria import soteria
from gradleak.defenses.svt_privacy import svt_privacy

# By name: what a text may name.
REGISTRY = {
  made.__name__: made
  for made in (
    adaquant,
    ats,
    clamp,
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
    local_dp,
    null_gradient,
    outpost,
    percentile_privacy,
    prune,
    quantize,
    secagg_rounding,
    server_dp,
    soteria,
    svt_privacy,
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
  'adaquant',
  'aggregate_client_dp',
  'as_defense',
  'ats',
  'bind',
  'chain',
  'clamp',
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
  'local_dp',
  'null_gradient',
  'outpost',
  'outpost_pruning',
  'percentile_privacy',
  'prune',
  'quantize',
  'secagg_rounding',
  'server_dp',
  'soteria',
  'svt_privacy',
  'topk',
  'wrap',
]
