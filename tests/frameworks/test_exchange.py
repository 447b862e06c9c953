"""What is recorded of a framework is read again as it was, and what is damaged is refused."""

import numpy as np
import pytest

from gradleak.core import errors
from gradleak.frameworks.exchange import Exchange, read, write


def exchange(**facts):
  sent = {'conv1.weight': np.arange(6, dtype=np.float32).reshape(2, 3), 'steps': np.asarray(3)}
  return Exchange(sent, {name: array + 1 for name, array in sent.items()}, facts)


def test_an_exchange_is_read_as_it_was_written(tmp_path):
  for number in (2, 1):
    folder = write(tmp_path / 'new' / 'folder', exchange(round=number, node='7/../x', lr=0.1))
    assert folder.parent == tmp_path / 'new' / 'folder' and '/' not in folder.name
  found = read(tmp_path / 'new' / 'folder')
  assert [one.facts for one in found] == [{'round': number, 'node': '7/../x', 'lr': 0.1} for number in (1, 2)]
  for name, array in exchange().sent.items():
    np.testing.assert_array_equal(found[0].sent[name], array, strict=True)
    np.testing.assert_array_equal(found[0].returned[name], array + 1, strict=True)


def test_rounds_are_in_their_order(tmp_path):
  places = [(1, '20'), (1, 'site-3'), (2, '3'), (2, '11'), (10, '3'), (10, '3a')]
  for number, node in reversed(places):
    write(tmp_path, exchange(round=number, node=node))
  assert [(one.facts['round'], one.facts['node']) for one in read(tmp_path)] == places


def test_one_of_the_same_name_takes_its_place_and_no_facts_make_a_name(tmp_path):
  assert write(tmp_path, exchange(round=1)) == write(tmp_path, exchange(round=1, lr=2))
  assert write(tmp_path, exchange()).name == 'exchange'
  assert [one.facts for one in read(tmp_path)] == [{}, {'round': 1, 'lr': 2}]


def test_nodes_whose_names_differ_in_other_characters_alone_have_a_folder_each(tmp_path):
  nodes = ['site a', 'site/a', 'site_a', 'site:a']
  for node in nodes:
    write(tmp_path, exchange(round=1, node=node))
  assert sorted(one.facts['node'] for one in read(tmp_path)) == sorted(nodes)


@pytest.mark.parametrize('name', ['sent.npz', 'returned.npz', 'facts.json'])
def test_a_damaged_file_is_named(tmp_path, name):
  folder = write(tmp_path, exchange(round=1))
  (folder / name).write_bytes(b'PK')
  with pytest.raises(errors.UsageError, match='round_1 cannot be read'):
    read(tmp_path)


def test_a_folder_without_exchanges_and_arrays_that_numpy_does_not_write_are_refused(tmp_path):
  with pytest.raises(errors.UsageError, match='nothing was recorded'):
    read(tmp_path)
  for sent in ({'file': np.ones(1)}, {'w': np.asarray([{}])}):
    with pytest.raises(errors.UsageError, match='NumPy does not write'):
      write(tmp_path, Exchange(sent, {}, {}))
