"""Ranks of defenses: known costs, and differences that noise does not explain, whatever the numbers of uploads."""

import pytest

from gradleak.core.statistics import differ
from gradleak.report.ranks import ranks
from tests.report.test_deploy import NONE, entry


def test_defenses_that_differ_have_a_rank_each():
  assert ranks([entry('a', 100, 100), entry('b', 0, 100), entry('c', 50, 100)]) == [(3, 3), (1, 1), (2, 2)]


def test_defenses_that_noise_could_swap_share_their_ranks():
  assert ranks([entry('a', 3, 100), entry('b', 4, 100), entry('c', 60, 100)]) == [(1, 2), (1, 2), (3, 3)]


def test_what_lies_between_two_that_differ_may_have_the_rank_of_either():
  a, b, c = (entry(name, count, 100) for name, count in (('a', 0), ('b', 4), ('c', 10)))
  assert not differ(0, 100, 4, 100) and not differ(4, 100, 10, 100) and differ(0, 100, 10, 100)
  assert ranks([a, b, c]) == [(1, 2), (1, 3), (2, 3)]


def test_the_seeds_of_a_defense_are_one_defense_of_all_their_uploads():
  one = [entry('a', 0, 100), entry('b', 4, 100), entry('c', 90, 100)]
  two = [{**each, 'seed': seed} for each in one for seed in (0, 1)]
  assert differ(0, 200, 8, 200) and ranks(one) == [(1, 2), (1, 2), (3, 3)]
  assert ranks(two) == [(1, 1), (1, 1), (2, 2), (2, 2), (3, 3), (3, 3)]
  fewer = {**entry('d', 0, 100), 'seed': 0}
  assert ranks([*two, fewer]) == [(1, 2), (1, 2), (2, 3), (2, 3), (4, 4), (4, 4), (1, 3)]
  two[1] |= {'cost': None}
  assert ranks(two) == [None, None, (1, 1), (1, 1), (2, 2), (2, 2)]


def test_seeds_of_the_same_images_are_no_more_images():
  one = [entry('a', 10, 50), entry('b', 17, 50), entry('c', 45, 50)]
  data = [{'fingerprints': {'data': name}} for name in ('x', 'y', 'z', 'x')]
  same = [{**each, **data[0], 'seed': seed} for each in one for seed in range(4)]
  others = [{**each, **data[seed], 'seed': seed} for each in one for seed in range(4)]
  assert not differ(10, 50, 17, 50) and differ(30, 150, 51, 150) and ranks(one) == [(1, 2), (1, 2), (3, 3)]
  assert ranks(same) == [rank for rank in ranks(one) for _ in range(4)]
  assert ranks(others) == [rank for rank in ((1, 1), (2, 2), (3, 3)) for _ in range(4)]


def test_a_rate_between_two_counts_is_apart_only_where_both_are():
  """1 of 48 is a third of an image of 16: 0 of them would differ from 5, and 1 does not."""
  one = [
    {**entry(name, count, 16), 'seed': seed, 'fingerprints': {'data': 'x'}}
    for name, counts in (('a', (1, 0, 0)), ('b', (5, 5, 5)))
    for seed, count in enumerate(counts)
  ]
  assert differ(0, 16, 5, 16) and not differ(1, 16, 5, 16) and ranks(one) == [(1, 2)] * 6


def test_seeds_of_fewer_uploads_take_the_first_images_of_one_split():
  fewer = [
    {**entry(name, count, n), 'seed': seed, 'fingerprints': {'data': f'first {n}'}}
    for name, counts in (('a', (15, 14)), ('b', (23, 21)))
    for seed, (count, n) in enumerate(zip(counts, (50, 45), strict=True))
  ]
  assert differ(29, 95, 44, 95) and ranks(fewer) == [(1, 2)] * 4


@pytest.mark.parametrize(
  'other',
  [
    entry('unknown', 0, 100, cost=None),
    entry('dear', 0, 100, cost=(3.0, [1.0, 5.1])),
    entry('chance', 0, 100, at_chance='it predicts one class'),
    {**NONE, 'honest': entry('none', 100, 100)['honest']},
  ],
  ids=lambda one: one['defense'],
)
def test_unknown_costs_and_costs_above_the_limit_have_no_rank(other):
  assert ranks([other, entry('a', 1, 100), entry('b', 90, 100)]) == [None, (1, 1), (2, 2)]


def test_fewer_uploads_give_a_wider_rank_and_more_of_them_a_narrower_one():
  a, b = entry('a', 1, 100), entry('b', 90, 100)
  assert ranks([entry('few', 0, 16), a, b]) == [(1, 2), (1, 2), (3, 3)]
  c, d = (lambda n: entry('c', n // 10, n)), entry('d', 8, 50)
  assert ranks([c(50), d, b]) == [(1, 2), (1, 2), (3, 3)]
  assert ranks([c(1000), entry('d', 160, 1000), b]) == [(1, 1), (2, 2), (3, 3)]


def test_two_counts_differ_by_the_exact_test():
  assert differ(0, 100, 6, 100) and not differ(0, 100, 5, 100)  # p = 0.029, 0.059
  assert differ(0, 400, 2, 50) and not differ(0, 400, 1, 50)  # p = 0.012, 0.111
  assert not differ(0, 1, 1, 1)


def test_no_defense_has_no_rank():
  assert ranks([NONE]) == [None]
