"""GradDefense: the slices that bear noise are left out, or the server's compensation is applied to one upload."""

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np

from gradleak import defenses
from gradleak.adaptive.base import AdaptiveAttack, Case, View, adaptive_to
from gradleak.core.trees import Tree
from gradleak.defenses.compensation import compensate, noise_variance
from gradleak.defenses.graddefense import num_perturbed
from gradleak.federated.client import Upload

# At most so many choices of slices are tried, the most likely first.
MAX_CHOICES = 8


@adaptive_to(defenses.graddefense)
def adaptive_attacks(case: Case) -> list[AdaptiveAttack]:
  """Returns both adaptive attacks; the second alone where all slices bear noise."""
  slices = case.arguments[0].num_slices
  left = slices - int(num_perturbed(case.stage.settings['ratio'], slices))
  return [*([_muted_slices(case)] if left else []), _compensated(case)]


def _muted_slices(case: Case) -> AdaptiveAttack:
  """Leaves out the slices that bear noise, by trying choices of them (Wang et al. 2022, section IV-B).

  Noise of standard deviation σ has the median magnitude 0.674·σ; slices with a median near it are chosen first. One
  upload is read: each draws its slices anew, and in a mean of four about three quarters bear noise.
  """
  (slicing,), settings, known = case.arguments, case.stage.settings, dataclasses.replace(case.known, rounds=1)
  total = slicing.num_slices
  muted = int(num_perturbed(settings['ratio'], total))
  count = min(MAX_CHOICES, math.comb(min(total, muted + 3), muted))

  def views(upload: Upload) -> list[View]:
    update = known.observed(upload)
    numbers = np.concatenate([np.asarray(n).ravel() for n in jax.tree.leaves(slicing.slices)])
    entries = np.concatenate([np.abs(np.asarray(u)).ravel() for u in jax.tree.leaves(update)])
    median = np.array([np.median(entries[numbers == s]) if (numbers == s).any() else 0.0 for s in range(total)])
    level = 0.6745 * max(settings['stddev'], 1e-12) / math.sqrt(known.context.client.cohort)
    unlike = np.abs(np.log(np.maximum(median, 1e-30) / level))
    by_likeness = np.argsort(unlike, kind='stable')
    choices = sorted(itertools.combinations(range(min(total, muted + 3)), muted), key=sum)

    def without(choice: tuple[int, ...]) -> Tree:
      chosen = by_likeness[list(choice)]
      return jax.tree.map(lambda s: (~np.isin(s, chosen)).astype(np.float16), slicing.slices)

    return [known.view(upload, without(choice), update) for choice in choices[:count]]

  words = f'It leaves out {muted} of the {total} slices, in the {count} most likely ways, and keeps the best match.'
  return AdaptiveAttack('slices', words, views, frozenset({'weights'}), count)


def _compensated(case: Case) -> AdaptiveAttack:
  """Applies the server's compensation to one client's upload (Wang et al. 2022, table III [E])."""
  settings, known = case.stage.settings, case.known
  noise = {name: settings[name] for name in ('stddev', 'ratio', 'num_slices')}

  def views(upload: Upload) -> list[View]:
    shares = np.full(known.rounds, 1 / math.sqrt(known.rounds * known.quieter(case.stage, upload)))
    variance = noise_variance(shares, **noise)  # of the mean or the sum over the rounds
    update = jax.tree.map(jnp.asarray, known.observed(upload))
    cleaned = compensate(update, variance, unshared=known.context.unshared)
    return [known.view(upload, update=jax.tree.map(np.asarray, cleaned))]

  words = "It applies the server's compensation to the upload first."
  return AdaptiveAttack('compensated', words, views, frozenset({'update'}), rounds=known.rounds)
