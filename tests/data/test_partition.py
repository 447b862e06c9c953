"""Partitions: the properties of each, and that no sample belongs to two clients."""

import jax
import numpy as np
import pytest

from gradleak.core import errors
from gradleak.data import partition

KEY = jax.random.key(3)
LABELS = np.random.default_rng(0).integers(0, 10, 3000)
TEXTS = ('iid', 'iid(samples=7)', 'classes(number=5)', 'classes(number=2,low=1,high=20)', 'dirichlet(alpha=0.3)')


def held(parts):
  return [set(LABELS[part].tolist()) for part in parts]


@pytest.mark.parametrize('text', TEXTS)
def test_no_sample_belongs_to_two_and_the_key_decides(text):
  parts = partition.parse(text, KEY, LABELS, 30)
  together = np.concatenate(parts)
  assert len(parts) == 30 and min(map(len, parts)) > 0
  assert len(set(together.tolist())) == len(together)
  assert together.min() >= 0 and together.max() < len(LABELS)
  again, other = (partition.parse(text, key, LABELS, 30) for key in (KEY, jax.random.key(4)))
  assert all((a == b).all() for a, b in zip(parts, again, strict=True))
  assert not all(np.array_equal(a, b) for a, b in zip(parts, other, strict=True))


def test_iid_shares_are_equal_and_mixed():
  assert {len(part) for part in partition.parse('iid', KEY, LABELS, 30)} == {100}
  assert {len(part) for part in partition.parse('iid(samples=7)', KEY, LABELS, 30)} == {7}
  assert all(len(classes) >= 9 for classes in held(partition.parse('iid', KEY, LABELS, 30)))


def test_half_of_the_classes_in_equal_shards():
  parts = partition.parse('classes(number=5)', KEY, LABELS, 30)
  assert all(len(classes) == 5 for classes in held(parts))
  holders = [sum(label in classes for classes in held(parts)) for label in range(10)]
  assert holders == [15] * 10
  for label in range(10):
    shards = [np.sum(LABELS[part] == label) for part in parts if label in LABELS[part]]
    assert set(shards) == {np.sum(label == LABELS) // 15}


def test_a_few_samples_of_two_classes():
  parts = partition.parse('classes(number=2,low=1,high=20)', KEY, LABELS, 30)
  counts = [
    np.sum(LABELS[part] == label) for part, classes in zip(parts, held(parts), strict=True) for label in classes
  ]
  assert all(len(classes) == 2 for classes in held(parts))
  assert min(counts) >= 1 and max(counts) <= 20
  assert 7 < np.mean(counts) < 14  # uniform on 1 … 20: 10.5, with a standard error of 0.7


def test_the_smaller_alpha_the_fewer_classes_hold_most_of_a_client():
  def largest(alpha):
    parts = partition.parse(f'dirichlet(alpha={alpha})', KEY, LABELS, 30)
    assert sum(map(len, parts)) == len(LABELS)
    return np.mean([np.bincount(LABELS[part]).max() / len(part) for part in parts])

  assert largest(0.1) > 0.5 > 0.25 > largest(100.0)


def test_the_first_and_the_last_client_hold_as_many_classes_and_samples():
  labels = np.repeat(np.arange(10), 20)
  drawn = [partition.dirichlet(jax.random.key(seed), labels, 20, alpha=0.5) for seed in range(200)]
  for count in (len, lambda part: len(np.unique(labels[part]))):
    apart = [count(parts[0]) - count(parts[-1]) for parts in drawn]
    assert abs(np.mean(apart)) < 4 * np.std(apart) / np.sqrt(len(apart))


def test_by_user():
  parts = partition.by_user(['b', 'a', 'b', 'c'])
  assert [part.tolist() for part in parts] == [[1], [0, 2], [3]]


@pytest.mark.parametrize(
  ('text', 'clients', 'words'),
  [
    ('idd', 3, "unknown partition 'idd'"),
    ('iid(samples=200)', 30, '30 clients of 200 samples need 6000 samples, there are 3000'),
    ('iid', 4000, 'need 4000 samples, there are 3000'),
    ('classes(number=11)', 3, r'classes\(number\) is 11'),
    ('classes(number=1,low=900,high=900)', 30, 'that hold class 0 need 2700 samples'),
    ('classes(number=2,low=5,high=3)', 30, r'classes\(high\) is 3'),
    ('classes(number=2,low=5)', 30, r'classes\(high\) is 0'),
    ('classes(number=2,low=0,high=3)', 30, r'classes\(low\) is 0'),
    ('dirichlet(alpha=0.001,least=90)', 30, 'a thousand times'),
    ('iid', 0, 'number of clients is 0'),
  ],
)
def test_impossible_partitions_are_named(text, clients, words):
  with pytest.raises(errors.UsageError, match=words):
    partition.parse(text, KEY, LABELS, clients)
