"""Options of XLA's compiler, which come and go with its versions: one is used only where this XLA knows it."""

import functools

import jax


def known(**options: bool | int) -> dict[str, bool | int] | None:
  """Returns those of the options that this XLA knows, for `compiler_options` of `jax.jit`; None if it knows none."""
  return {name: value for name, value in options.items() if _accepts(name, value)} or None


@functools.cache
def _accepts(name: str, value: bool | int) -> bool:
  """Returns whether the default backend compiles a program under this option; it is asked once."""
  try:
    jax.jit(lambda: None, compiler_options={name: value}).lower().compile()
  except jax.errors.JaxRuntimeError as error:
    if 'No such compile option' not in str(error):
      raise
    return False
  return True
