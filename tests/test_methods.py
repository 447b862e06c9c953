"""What a method's factory consists of, where it is a user's own."""

import functools

import gradleak as gl
from gradleak.core import methods

SOURCE = """
def helper(x):
  return {0} * x

def made({1}):
  def inner(x):
    return helper(x) in {{"a", "b"}}
  return inner
"""


def code(*parts):
  module = {'__name__': 'mine'}
  exec(SOURCE.format(*parts), module)
  return methods.code_of_ones_own(module['made'])


def test_the_code_of_functions_of_ones_own():
  """It follows the body and helpers of the same module; of this package's functions there is none."""
  assert code(1, 'c') == code(1, 'c') != code(2, 'c')
  assert methods.code_of_ones_own(gl.attacks.csdlg().factory) == ''
  assert methods.code_of_ones_own(functools.partial(lambda x, y: x, 1)) != ''
