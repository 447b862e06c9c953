"""Third-party transformations that do not survive JAX's strict settings, relaxed around their own calls only."""

import jax
import optax


def lenient(transformation):
  """Returns the optax `transformation` with its `init` and `update` run under JAX's standard promotion rules.

  Adam, AdamW, Yogi and optax's schedules mix Python floats and integer counts; under
  `jax_numpy_dtype_promotion='strict'` they raise. Our own code stays strict.
  """
  transformation = optax.with_extra_args_support(transformation)

  def relaxed(function):
    def call(*args, **kwargs):
      with jax.numpy_dtype_promotion('standard'), jax.numpy_rank_promotion('allow'):
        return function(*args, **kwargs)

    return call

  return optax.GradientTransformationExtraArgs(relaxed(transformation.init), relaxed(transformation.update))
