"""The measurement of label rules: what is drawn, measured, refused and drawn as a picture."""

import dataclasses

import jax
import numpy as np
import pytest

import experiments
from experiments import labels, table
from experiments.comparison import CHANCE, GUESSES
from gradleak.attacks.labels import RULES
from gradleak.threat import Observation


@pytest.fixture(scope='module')
def run():
  few = {'rules': ('idlg', 'yin', 'ilrg', 'rlu'), 'largest': 16, 'clients': 2}
  return dataclasses.replace(experiments.get('labels').runs['lenet'].scaled('smoke'), **few)


@pytest.fixture(scope='module')
def data(run):
  return run.load(None)


def test_every_rule_has_a_figure_beside_chance():
  experiment = experiments.get('labels')
  assert (*RULES, CHANCE) == GUESSES
  for name in experiment.runs:
    for label in experiment.runs[name].defenses:
      metrics = {cell.metric for cell in experiment.cells if (cell.run, cell.defense) == (name, label)}
      assert metrics == {f'{level}_{guess}' for level in ('instances', 'classes') for guess in GUESSES}


def test_scores_are_lists_over_clients():
  found = labels.scored(np.asarray([[1, 1, 2], [0, 0, 0]]), np.asarray([[1, 2, 2], [0, 0, 3]]))
  assert found == {'instances': [2 / 3, 2 / 3], 'classes': [1.0, 0.5], 'precision': [1.0, 1.0]}


def test_a_draw_has_disjoint_clients_and_dirichlet_uneven_ones(run, data):
  run, truth, present = dataclasses.replace(run, clients=10), data.private[1], {}
  for draw in labels.DRAWS:
    parts = run._drawn(truth, 0, draw)
    assert len(parts) == run.clients and all(len(part) >= run.largest for part in parts)
    assert len(np.unique(np.concatenate(parts))) == sum(map(len, parts))
    present[draw] = np.mean([np.bincount(truth[part], minlength=10).max() / len(part) for part in parts])
  assert present['IID'] < 0.3 < present['Dirichlet 0.1']


def test_what_a_rule_refuses_is_found_by_asking_it():
  variables = labels.client_of('mlp', 10, labels.WAYS[0], 1).model.init(jax.random.key(0), (8, 8, 1))
  examples = np.zeros((10, 1, 8, 8, 1), np.float32)
  for size, refused in ((1, set()), (8, {'idlg'}), (16, {'idlg', 'yin'})):
    client = labels.client_of('mlp', 10, labels.WAYS[1], size)
    found = labels.refused(client, variables, (size, 8, 8, 1), examples)
    assert set(found) == refused and all(rule in text for rule, text in found.items())
    assert client.num_steps(size) == 2 * min(size, 4)
    observation, moved = labels.observed(client, variables, variables['params'], (size, 8, 8, 1))
    assert isinstance(observation, Observation) and moved == pytest.approx(0.1 * client.num_steps(size))


@pytest.mark.slow
@pytest.mark.usefixtures('fast_compilation')
def test_a_run_measures_and_draws(run, data, tmp_path, monkeypatch):
  monkeypatch.setattr(labels, 'SIZES', (1, 16))
  folder = tmp_path / 'run'
  rows = run.execute(data, 0, workdir=str(folder), progress='none')
  assert [row['defense'] for row in rows] == list(run.defenses) and len(rows) == 8
  assert (folder / 'labels.png').read_bytes().startswith(b'\x89PNG')
  for row in rows:
    assert set(row['guesses']) == {*run.rules, CHANCE}
    assert row['guesses']['ilrg']['instances'] == pytest.approx([1, 1], abs=0.3)
    chance = np.mean(row['guesses'][CHANCE]['instances'])
    assert chance < 0.3 if row['size'] == 1 else 0.2 < chance < 0.75
    assert ('refused' in row['guesses']['idlg']) == (row['size'] == 16)

  cells = [cell for cell in experiments.get('labels').cells if cell.run == 'lenet' and cell.defense in run.defenses]
  cells = [cell for cell in cells if cell.metric.partition('_')[2] in (*run.rules, CHANCE)]
  experiment = dataclasses.replace(experiments.get('labels'), cells=tuple(cells))
  outcomes = [run.outcome(cell, rows) for cell in cells]
  for lines in table.sections(experiment, outcomes).values():
    assert lines[0] == ['', *run.rules, CHANCE, run.remarks]  # no column of a paper that prints nothing
    assert all(len(line) == len(lines[0]) for line in lines)
    assert lines[1][1] == '100.0 ± 0.0' and lines[2][1] == '–' and lines[2][-1].endswith('; idlg, yin')
  assert not any('Verdicts' in text for text in table.settings(experiment, 'mini', 0))
