"""The program of ε from below: a run, what it writes, and what it refuses."""

import json
from unittest import mock

import pytest
from absl import flags as absl_flags

import gradleak as gl
from tests import programs

SMALL = '--dataset=digits', '--limit=8', '--model=mlp(widths=8)', '--uploads=400', '--canaries=16', '--progress=none'


@pytest.mark.long
def test_a_run(tmp_path):
  defenses = '--defenses=client_dp(norm=1,noise=2);none'
  done = programs.start('epsilon', *SMALL, defenses, '--compilation_cache=', f'--workdir={tmp_path}/new')
  assert done.status == 0, done.err
  assert 'stated ε' in done.out and 'no stated ε' in done.out
  rows = [json.loads(line) for line in (tmp_path / 'new' / 'rows.jsonl').read_text('utf-8').splitlines()]
  assert [row['verdict'] for row in rows][-1] == 'no stated ε'
  assert (tmp_path / 'new' / 'epsilon.csv').exists()


@pytest.mark.long
@pytest.mark.parametrize(
  'samples',
  [
    ('diabetes', '--model=mlp(widths=4)'),
    pytest.param(('notes', '--model=gpt(width=4,layers=1,heads=2)', '--length=6'), marks=pytest.mark.slow),
  ],
)
def test_rows_of_a_table_and_texts(samples, tmp_path):
  small = '--limit=8', '--uploads=40', '--canaries=0', '--progress=none', '--compilation_cache='
  done = programs.start('epsilon', f'--dataset={samples[0]}', *samples[1:], *small, f'--workdir={tmp_path}/new')
  assert done.status == 0, done.err
  assert 'client_dp(norm=1,noise=1.2)' in done.out and 'dpsgd(norm=1,noise=1.2)' in done.out  # and no others
  config = json.loads((tmp_path / 'new' / 'config.json').read_text('utf-8'))
  assert config['loss'] == {'diabetes': 'cross_entropy', 'notes': 'next_token'}[samples[0]]


def test_a_split_of_fewer_samples_than_the_default_is_read_whole(tmp_path):
  (tmp_path / 'few.csv').write_text('a,b\n' + '\n'.join(f'{i}.5,{i % 2}' for i in range(40)))
  module, flags = programs._load('epsilon')
  with mock.patch.object(absl_flags, 'FLAGS', flags):
    flags(['epsilon', f'--dataset=table:{tmp_path}/few.csv'])
    assert len(module._read().samples) == 12
    flags(['epsilon', '--limit=64'])
    with pytest.raises(gl.UsageError, match='64 rows are asked for'):
      module._read()
    flags.unparse_flags()


def test_what_it_refuses(tmp_path):
  for flag, reason in {
    '--relation=add or remove one': "unknown relation 'add or remove one'",
    '--uploads=4': 'uploads is 4',
    '--confidence=1': 'confidence is 1.0',
    '--neighbours=worst': "unknown neighbours 'worst'",
  }.items():
    done = programs.start('epsilon', *SMALL, flag, f'--workdir={tmp_path}/new')
    assert done.status == 2 and reason in done.err, done.err
    assert not (tmp_path / 'new').exists()
