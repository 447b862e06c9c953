"""A factory whose objects are found again."""

from gradleak.core.reuse import reusable


def test_equal_arguments_of_equal_types_give_one_object_and_the_oldest_is_dropped():
  make = reusable(2)(lambda *given, **more: [given, more])
  first = make(1, width=2)
  assert make(1, width=2) is first and make(1.0, width=2) is not first and make(1, width=True) is not first
  assert make(1, width=2) is not first  # two others were made since


def test_arguments_without_a_hash_make_a_new_object_each_time():
  make = reusable(2)(lambda *given, **more: [given, more])
  assert make([1]) is not make([1]) and make(width=[1]) == [(), {'width': [1]}]
