"""A study of its own: scales, what they change, and parts that are measured once, kept and drawn."""

import dataclasses
from typing import ClassVar, NamedTuple

import numpy as np
import PIL.Image
import pytest

import experiments
from experiments.comparison import Cell
from experiments.study import SCALES, Study, mean_of
from gradleak.core import errors


@dataclasses.dataclass(frozen=True)
class Rules:
  steps: int = 100
  rate: float = 0.1


class Data(NamedTuple):
  samples: np.ndarray


@dataclasses.dataclass(frozen=True)
class Sums(Study):
  """Sums of numbers, several times each."""

  count: int
  rules: Rules = Rules()
  defenses: dict = dataclasses.field(default_factory=lambda: {'none': 'none', 'twice': 'double'})

  inner: ClassVar = ('rules',)
  page: ClassVar = 'sums.png'
  remarks: ClassVar = 'of'
  measured: ClassVar = []

  def smallest(self):
    return {'count': 1, 'steps': 2}

  def parts(self, data, seed, progress):
    for label in self.defenses:
      yield label, lambda label=label: self._part(label, data, seed)

  def _part(self, label, data, seed):
    self.measured.append(label)
    rows = [{'defense': label, 'sums': [seed + number for number in range(self.count)]}]
    return rows, {'images': data.samples}

  def said(self, label, rows):
    return f'{label}: {rows[0]["sums"]}'

  def picture(self, rows):
    return b'drawn'

  def outcome(self, cell, rows):
    return mean_of(self.row_of(cell, rows)['sums'], 'so many')


STUDY = Sums(5, mini={'count': 3, 'rate': 0.5, 'defenses': {'none': 'none', 'twice': 'thrice'}})


def test_a_scale_replaces_fields_and_those_of_inner_settings():
  mini, smoke = STUDY.scaled('mini'), STUDY.scaled('smoke')
  assert STUDY.scaled('paper') is STUDY
  assert (mini.count, mini.rules, mini.mini) == (3, Rules(rate=0.5), {})
  assert (smoke.count, smoke.rules, smoke.defenses) == (1, Rules(steps=2), STUDY.defenses)
  assert STUDY.replaced(rules={'steps': 7}).rules == Rules(7)
  assert STUDY.changes('paper') == []
  assert STUDY.changes('mini') == ['count 3 instead of 5', 'rate 0.5 instead of 0.1', 'twice thrice instead of double']
  assert STUDY.changes('smoke') == ['count 1 instead of 5', 'steps 2 instead of 100']
  with pytest.raises(
    errors.UsageError, match=r"unknown scale 'mni'; did you mean 'mini'\? \(valid: mini, paper, smoke"
  ):
    STUDY.scaled('mni')


def test_parts_are_measured_once_kept_and_drawn(tmp_path, capsys):
  folder, data = tmp_path / 'new', Data(np.zeros((2, 4, 4, 1), np.float32))
  STUDY.measured.clear()
  rows = STUDY.execute(data, 3, workdir=str(folder), progress='lines')
  assert rows == [{'defense': label, 'sums': [3, 4, 5, 6, 7]} for label in ('none', 'twice')]
  assert capsys.readouterr().err == ''.join(f'{row["defense"]}: {row["sums"]}\n' for row in rows)
  with PIL.Image.open(folder / 'images.png') as image:
    assert min(image.size) > 10
  (folder / 'sums.png').unlink()
  assert STUDY.execute(data, 3, workdir=str(folder), progress='lines') == rows
  assert STUDY.measured == ['none', 'twice'] and (folder / 'sums.png').read_bytes() == b'drawn'
  assert capsys.readouterr().err == ''
  for study, seed, named in ((STUDY, 4, 'seed was 3, now 4'), (STUDY.replaced(steps=9), 3, 'rules was ')):
    with pytest.raises(errors.UsageError, match=named):
      study.execute(data, seed, workdir=str(folder), progress='none')
  with pytest.raises(errors.UsageError, match='belongs to other'):
    STUDY.execute(Data(data.samples + 1), 3, workdir=str(folder), progress='none')


def test_an_outcome_is_the_mean_of_what_was_repeated():
  found = STUDY.outcome(Cell('', '', 'sums', 'run', 'twice'), [{'defense': 'twice', 'sums': [1.0, 2.0, 3.0]}])
  assert found[:2] == pytest.approx((2, 2 - 4.302653 / 3**0.5)) and (found.n, found.remark) == (3, 'so many')
  assert mean_of([4.0], '')[:4] == (4.0, None, None, 1)  # a single one has no interval


@pytest.mark.parametrize('name', sorted(experiments.REGISTRY))
def test_every_study_says_what_its_scales_change(name):
  for run in experiments.get(name).runs.values():
    assert run.changes('paper') == []
    for scale in SCALES[:2]:
      now, told = run.scaled(scale), run.changes(scale)
      assert set(now.texts()) == set(now.defenses) == set(run.defenses)
      described, before = now.described(), run.described()
      differing = [key for key, value in described.items() if value != before.get(key, value) or key not in before]
      assert [text.partition(' instead of ')[0] for text in told] == [f'{key} {described[key]}' for key in differing]
      fields = {field.name for field in dataclasses.fields(run)} - {'changed', 'training', *run.inner, *run.untold}
      changed = {key for key in fields if getattr(now, key) != getattr(run, key)}
      held = {key: getattr(run, key) for key in changed}
      assert all(any(text.startswith(f'{key} ') for text in told) for key in changed if not isinstance(held[key], dict))
