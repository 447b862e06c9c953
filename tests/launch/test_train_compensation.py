"""The server's compensation in a training by the program: it changes what is averaged, not what clients send."""

import json

import pytest

from tests import programs

NOISE = 'graddefense(stddev=0.3,ratio=1.0,num_slices=4,root=8)'
SERVER = 'compensation(stddev=0.3,ratio=1.0,num_slices=4'
SMALL = (
  '--dataset=digits', '--limit=300', '--model=mlp', '--clients=3', '--per_round=3', '--rounds=2', '--public=8',
  '--learning_rate=0.01', '--progress=none',
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.usefixtures('fast_compilation')
def test_the_program_compensates(tmp_path):
  defenses = [NOISE, f'{NOISE}+{SERVER})', f'{NOISE}+{SERVER},memory=True)']
  done = programs.start('train', *SMALL, f'--defenses={";".join(defenses)}', f'--workdir={tmp_path}/new')
  assert done.status == 0, done.err
  paths = sorted(tmp_path.glob('new/*/rounds.jsonl'))
  noisy, compensated, remembered = ([json.loads(line) for line in path.read_text().splitlines()] for path in paths)
  for rows in (noisy, compensated, remembered):
    assert rows[0]['update_norm'] == noisy[0]['update_norm'] > 1  # the uploads of the first round are the same
    assert rows[0]['bytes_up'] == noisy[0]['bytes_up']
  assert compensated[0]['loss'] == remembered[0]['loss'] < noisy[0]['loss']  # noise is dropped
  assert compensated[1]['loss'] != remembered[1]['loss']  # and comes back in the next round
