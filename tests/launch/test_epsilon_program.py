"""The program of ε from below: a run, what it writes, and what it refuses."""

import json

from tests import programs

SMALL = '--dataset=digits', '--limit=8', '--model=mlp(widths=8)', '--uploads=400', '--canaries=16', '--progress=none'


def test_a_run(tmp_path):
  defenses = '--defenses=client_dp(norm=1,noise=2);none'
  done = programs.start('epsilon', *SMALL, defenses, '--compilation_cache=', f'--workdir={tmp_path}/new')
  assert done.status == 0, done.err
  assert 'stated ε' in done.out and 'no stated ε' in done.out
  rows = [json.loads(line) for line in (tmp_path / 'new' / 'rows.jsonl').read_text('utf-8').splitlines()]
  assert [row['verdict'] for row in rows][-1] == 'no stated ε'
  assert (tmp_path / 'new' / 'epsilon.csv').exists()


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
