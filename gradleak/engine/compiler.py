"""What programs are compiled with: options of XLA, which come and go with its versions, and the precision."""

import functools

import jax

Value = bool | int | str


def known(**options: Value) -> dict[str, Value] | None:
  """Returns those of the options that this XLA knows, for `compiler_options` of `jax.jit`; None if it knows none."""
  return {name: value for name, value in options.items() if _accepts(name, value)} or None


def once() -> dict[str, Value] | None:
  """Returns the options for a program that runs once: it is compiled as fast as can be."""
  return known(xla_backend_optimization_level=0, xla_llvm_disable_expensive_passes=True)


def precision() -> str:
  """Returns the precision of products: all digits of float32, or what the user has JAX default to.

  A GPU's own default, TF32, keeps 11 of 24 bits, which costs an attack on LeNet 1 dB.
  """
  return jax.config.values['jax_default_matmul_precision'] or 'highest'


@functools.cache
def _accepts(name: str, value: Value) -> bool:
  """Returns whether the default backend compiles a program under this option; it is asked once."""
  try:
    jax.jit(lambda: None, compiler_options={name: value}).lower().compile()
  except jax.errors.JaxRuntimeError as error:
    if not any(text in str(error) for text in ('No such compile option', 'is not a valid')):
      raise
    return False
  return True
