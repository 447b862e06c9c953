"""Ranks of defenses: equal numbers of uploads, known costs, and differences that noise does not explain."""

import pytest

from gradleak.report.ranks import differ, ranks
from tests.report.test_deploy import NONE, entry


def test_defenses_that_differ_have_a_rank_each():
  assert ranks([entry('a', 100, 100), entry('b', 0, 100), entry('c', 50, 100)]) == [(3, 3), (1, 1), (2, 2)]


def test_defenses_that_noise_could_swap_share_their_ranks():
  assert ranks([entry('a', 3, 100), entry('b', 4, 100), entry('c', 60, 100)]) == [(1, 2), (1, 2), (3, 3)]


def test_what_lies_between_two_that_differ_may_have_the_rank_of_either():
  a, b, c = (entry(name, count, 100) for name, count in (('a', 0), ('b', 4), ('c', 10)))
  assert not differ(0, 4, 100) and not differ(4, 10, 100) and differ(0, 10, 100)
  assert ranks([a, b, c]) == [(1, 2), (1, 3), (2, 3)]


def test_the_seeds_of_a_defense_are_one_defense_of_all_their_uploads():
  one = [entry('a', 0, 100), entry('b', 4, 100), entry('c', 90, 100)]
  two = [{**each, 'seed': seed} for each in one for seed in (0, 1)]
  assert differ(0, 8, 200) and ranks(one) == [(1, 2), (1, 2), (3, 3)]
  assert ranks(two) == [(1, 1), (1, 1), (2, 2), (2, 2), (3, 3), (3, 3)]
  assert ranks([*two, {**entry('d', 0, 100), 'seed': 0}]) == [*ranks(two), None]  # of fewer uploads
  two[1] |= {'cost': None}
  assert ranks(two) == [None, None, (1, 1), (1, 1), (2, 2), (2, 2)]


def test_seeds_of_the_same_images_are_no_more_images():
  one = [entry('a', 10, 50), entry('b', 17, 50), entry('c', 45, 50)]
  data = [{'fingerprints': {'data': name}} for name in ('x', 'y', 'z', 'x')]
  same = [{**each, **data[0], 'seed': seed} for each in one for seed in range(4)]
  others = [{**each, **data[seed], 'seed': seed} for each in one for seed in range(4)]
  assert not differ(10, 17, 50) and differ(30, 51, 150) and ranks(one) == [(1, 2), (1, 2), (3, 3)]
  assert ranks(same) == [rank for rank in ranks(one) for _ in range(4)]
  assert ranks(others) == [rank for rank in ((1, 1), (2, 2), (3, 3)) for _ in range(4)]


@pytest.mark.parametrize(
  'other',
  [
    entry('few', 0, 16),
    entry('unknown', 0, 100, cost=None),
    entry('dear', 0, 100, cost=(3.0, [1.0, 5.1])),
    entry('chance', 0, 100, at_chance='it predicts one class'),
    {**NONE, 'honest': entry('none', 100, 100)['honest']},
  ],
  ids=lambda one: one['defense'],
)
def test_other_numbers_of_uploads_and_costs_have_no_rank(other):
  assert ranks([other, entry('a', 1, 100), entry('b', 90, 100)]) == [None, (1, 1), (2, 2)]


def test_two_counts_differ_by_the_exact_test():
  assert differ(0, 6, 100) and not differ(0, 5, 100)  # p = 0.029, 0.059
  assert not differ(0, 1, 1)


def test_no_defense_has_no_rank():
  assert ranks([NONE]) == [None]
