"""Slurm's engine, with commands in place of Slurm's own that run the jobs of an array on this machine."""

import os
import stat
import sys

import pytest

from gradleak.engine import cluster

pytest.importorskip('submitit', reason="needs submitit: pip install -e '.[cluster]'")

SBATCH = """
import os, pathlib, re, subprocess, sys
text = pathlib.Path(sys.argv[1]).read_text()
pathlib.Path('{folder}/script').write_text(text)
first, last = map(int, re.search(r'--array=(\\d+)-(\\d+)', text).groups())
for task in range(first, last + 1):
  given = {{'SLURM_JOB_ID': f'7{{task}}', 'SLURM_ARRAY_JOB_ID': '7', 'SLURM_ARRAY_TASK_ID': str(task)}}
  given |= {{'SLURM_PROCID': '0', 'SLURM_LOCALID': '0', 'SLURM_NODEID': '0', 'SLURM_NTASKS': '1'}}
  quiet = {{'stdout': subprocess.DEVNULL, 'stderr': subprocess.DEVNULL}}
  subprocess.Popen(['bash', sys.argv[1]], env={{**os.environ, **given}}, **quiet)
print('Submitted batch job 7')
"""
SRUN = """
import os, subprocess, sys
_, _, _, out, _, err, *command = sys.argv
task = os.environ['SLURM_ARRAY_TASK_ID']
out, err = (path.replace('%A', '7').replace('%a', task).replace('%t', '0') for path in (out, err))
sys.exit(subprocess.call(command, stdout=open(out, 'a'), stderr=open(err, 'a')))
"""
CANCEL = """
import sys
open('{folder}/cancelled', 'a').write(sys.argv[1] + '\\n')
"""
RUNNING = "print('JobID|State|NodeList'); print('7_[0-9]|RUNNING|here')"


@pytest.fixture
def slurm(tmp_path, monkeypatch):
  """Puts the commands into the path; returns a function that makes commands of one line of Python each."""
  (tmp_path / 'bin').mkdir()
  for name, text in (('sbatch', SBATCH), ('srun', SRUN), ('scancel', CANCEL), ('sacct', RUNNING)):
    path = tmp_path / 'bin' / name
    path.write_text(f'#!{sys.executable}\n{text.format(folder=tmp_path) if name != "srun" else text}')
    path.chmod(path.stat().st_mode | stat.S_IEXEC)
  monkeypatch.setenv('PATH', f'{tmp_path}/bin:{os.environ["PATH"]}')
  monkeypatch.setattr(cluster, 'POLL', 0.1)
  (tmp_path / 'mark').write_text('seen')

  def commands(script, number):
    monkeypatch.setattr(cluster, '_BEGIN', script)
    return [
      cluster.command(f'share {i}', [str(i)], (str(tmp_path / 'mark'), 'seen'), 0)._replace(place=str(tmp_path))
      for i in range(number)
    ]

  return commands


def test_shares_are_an_array_job(slurm, tmp_path, capsys):
  script = 'import sys; print("half", file=sys.stderr); print(sys.argv[1]); sys.exit(75 * int(sys.argv[1]))'
  commands = slurm(script, 2)
  options = 'partition=gpu,mem=32G,reservation=mine'
  with cluster.connected('slurm', cores=3, gpus=1, options=options, logs=tmp_path / 'logs') as engine:
    assert (engine.cores, engine.places) == (3, None)
    found = dict(engine.run(commands))
  assert found == {0: (0, '0\n', 'half'), 1: (75, '1\n', 'half')}
  text = (tmp_path / 'script').read_text()
  for one in ('cpus-per-task=3', 'gpus-per-node=1', 'partition=gpu', 'mem=32G', 'reservation=mine', 'time=480'):
    assert f'#SBATCH --{one}\n' in text
  said = capsys.readouterr().err
  assert '(share 0, job 7_0) half\n' in said and '(share 1, job 7_1) half\n' in said
  assert not (tmp_path / 'cancelled').exists()


def test_what_is_late_is_cancelled(slurm, tmp_path):
  with cluster.connected('slurm', logs=tmp_path / 'logs') as engine:
    assert list(engine.run(slurm('import time; time.sleep(30)', 2), seconds=0.2)) == []
  assert sorted((tmp_path / 'cancelled').read_text().split()) == ['7_0', '7_1']


def test_what_sbatch_refuses_is_one_sentence(slurm, tmp_path):
  (tmp_path / 'bin' / 'sbatch').write_text('#!/bin/sh\necho "sbatch: error: invalid partition: gpux" >&2\nexit 1\n')
  with (
    cluster.connected('slurm', options='partition=gpux', logs=tmp_path / 'logs') as engine,
    pytest.raises(cluster.errors.UsageError, match='no job with the options of --slurm: sbatch: error: invalid part'),
  ):
    list(engine.run(slurm('', 2)))


def test_a_task_submits_itself_again_with_the_same_command(slurm):
  (command,) = slurm('', 1)
  again = cluster._Task().checkpoint(command)
  assert isinstance(again.function, cluster._Task) and again.args == (command,)


def test_without_slurm_it_is_one_sentence(tmp_path, monkeypatch):
  monkeypatch.setenv('PATH', str(tmp_path))
  with (
    pytest.raises(cluster.errors.UsageError, match='no Slurm is found on this machine'),
    cluster.connected('slurm', logs=tmp_path / 'logs'),
  ):
    pass
