"""The benchmark prints both sides and their ratios; its figures are nobody's business here."""

import re

import jax
import pytest

from tests import programs

pytestmark = pytest.mark.usefixtures('fast_compilation')


def test_it_prints_every_variant_and_its_ratio():
  done = programs.start('benchmark', '--model=mlp', '--trials=2', '--steps=10', '--repeats=1')
  assert (done.status, done.err) == (0, '')
  table = {}
  for line in done.out.splitlines():
    found = re.fullmatch(r'(\S.*?) +([\d.]+) +([\d,]+) +([\d.]+) +([\d.]+)×', line)
    if found:
      table[found[1]] = [float(figure.replace(',', '')) for figure in found.groups()[1:]]
  fast, slow = ('patches', 'native') if jax.default_backend() == 'cpu' else ('native', 'patches')
  assert list(table) == [f'2 trials batched, {fast}', f'one trial at a time, {fast}', f'2 trials batched, {slow}']
  (reference, *_, one), *others = table.values()
  assert one == 1
  for milliseconds, per_hour, _, ratio in others:
    assert ratio == pytest.approx(milliseconds / reference, rel=0.1, abs=0.01)  # of figures that were rounded
    assert per_hour == pytest.approx(3.6e6 / (2000 * milliseconds), rel=0.1)
  assert 'csdlg on mlp, faces at 32×32×3, 2 × ' in done.out


@pytest.mark.parametrize(
  ('flags', 'message'),
  [
    ('--model=lent', "unknown model 'lent'"),
    ('--attack=csdgl', "unknown attack 'csdgl'"),
    ('--trials=0', 'trials is 0, expected an integer in [1, '),
    ('--steps=1', 'steps is 1, expected an integer in [2, '),
    ('--repeats=0', 'repeats is 0, expected an integer in [1, '),
    ('--trials=101', "101 images are asked for, but the split 'test' of faces has 100"),
  ],
)
def test_bad_input(flags, message):
  done = programs.start('benchmark', '--model=mlp', '--trials=2', '--steps=10', '--repeats=1', flags)
  assert done.status == 2
  assert done.err.startswith('error: ') and done.err.count('\n') == 1 and message in done.err
