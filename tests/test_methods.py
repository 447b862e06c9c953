"""Settings whose range stands in annotations, wherever they are checked."""

import dataclasses
import math
from typing import Annotated, Any

import jax
import numpy as np
import pytest

from gradleak.core import errors
from gradleak.core.methods import Method
from gradleak.core.settings import Choice, Count, Fraction, Range, check_fields, fitting, limits, ranged

MODES = {'same': 1, 'valid': 2}


def blur(image, *, width: Fraction = 0.5, passes: Count = 1, mode: Annotated[str | None, Choice(MODES)] = None):
  return image, width, passes, mode


@ranged
def faded(
  image, by: Annotated[float | jax.Array, Range(0, finite=True)], *, times: Annotated[int | None, Range(1)] = None
):
  return image, by, times


@dataclasses.dataclass(frozen=True)
class Camera:
  name: str
  pixels: Count = 8


@pytest.mark.parametrize(
  ('value', 'annotation', 'words'),
  [
    (-0.1, Fraction, 'a number in [0, 1]; the nearest valid value is 0'),
    (math.inf, Annotated[float, Range(0, finite=True)], 'a finite number in [0, inf]'),
    (None, Fraction, 'a number in [0, 1]'),
    (True, Fraction, 'a number in [0, 1]'),
    (1.0, Count, 'an integer in [1, inf]'),
    (True, Count, 'an integer'),
    (0, Annotated[int | None, Range(1)], 'an integer in [1, inf]'),
    ('1', int, 'an integer'),
    *(
      (value, Fraction, 'a number in [0, 1]') for value in (10**400, -1, math.nan, b'1', '1', [1], np.array([1, 2]), 1j)
    ),
    (1, bool, 'expected bool'),
    (1, str, 'expected str'),
    ('vald', Annotated[str, Choice(MODES)], "did you mean 'valid'? (valid: same, valid)"),
    (None, Annotated[str, Choice(MODES)], 'valid: same, valid'),
  ],
)
def test_what_does_not_fit_is_refused_by_name(value, annotation, words):
  with pytest.raises(errors.UsageError) as caught:
    fitting('one', value, annotation)
  assert 'one' in str(caught.value) and errors.shown(value) in str(caught.value) and words in str(caught.value)


@pytest.mark.parametrize(
  ('value', 'annotation'),
  [
    (math.inf, Annotated[float, Range(0)]),
    (np.float32(0.5), Fraction),
    (None, Annotated[float | None, Range(0)]),
    (None, Annotated[str | None, Choice(MODES)]),
    ('8-8', str | int | tuple),
    ([1], Any),
    ((1, 2), tuple[int, ...]),
  ],
)
def test_what_fits_is_returned_as_it_is(value, annotation):
  assert fitting('one', value, annotation) is value


def test_integers_of_numpy_become_pythons():
  assert type(fitting('one', np.int64(3), Count)) is int
  assert Method(blur, {'passes': np.int32(2)}) == Method(blur, {'passes': 2})


def test_a_range_makes_a_number_no_less_traced():
  method = Method(blur, {'width': 0.25})
  assert method.numbers == (0.25,) and limits(Fraction)[0] == (float,)
  assert method.structure == method.changed(width=0.75).structure != method.changed(passes=2).structure
  assert jax.jit(lambda x: method.build((x,), 0)[1])(7.0) == 7  # traced, and not checked
  for refused in (lambda: method.changed(width=1.5), lambda: method.build((1.5,), 0)):
    with pytest.raises(errors.UsageError, match=r'blur\(width\) is 1.5'):
      refused()


def test_functions_check_their_arguments_by_name_and_by_position():
  assert faded(1, 2.0, times=np.int8(3)) == (1, 2.0, 3)
  for call in (lambda: faded(1, -1.0), lambda: faded(1, by=-1.0)):
    with pytest.raises(errors.UsageError, match=r'^faded\(by\) is -1.0, expected a finite number'):
      call()
  with pytest.raises(errors.UsageError, match=r'faded\(times\) is 0'):
    faded(1, 2.0, times=0)
  with pytest.raises(TypeError, match='by'):
    faded(1)


def test_fields_of_a_dataclass_are_checked():
  made = Camera('a', np.int64(4))
  check_fields(made)
  assert type(made.pixels) is int
  with pytest.raises(errors.UsageError, match='pixels is 0, expected an integer'):
    check_fields(Camera('a', 0))
