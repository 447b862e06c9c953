"""The examples of methods of a user's own: an audit knows of them what it knows of ours."""

import importlib.util
import pathlib
import runpy

import pytest

import gradleak as gl

EXAMPLES = pathlib.Path(__file__).parents[1] / 'examples'
pytestmark = pytest.mark.usefixtures('fast_compilation')


def run(name, capsys):
  """Returns the result of an example, and what it prints."""
  path = EXAMPLES / f'{name}.py'
  assert len(path.read_text('utf-8').splitlines()) < 40
  return runpy.run_path(str(path))['result'], ' '.join(capsys.readouterr().out.split())


@pytest.mark.slow
def test_a_defense_of_ones_own(capsys):
  result, printed = run('defense_of_your_own', capsys)
  strengths = [f'clip(norm=1)+grid_noise(stddev={stddev})' for stddev in (0.01, 0.1, 1)]
  assert list(result.methods['defenses']) == ['none', *strengths]
  known = result.methods['defenses'][strengths[2]]
  assert known['mechanisms'] == [{'noise': 1.0, 'unit': 'client', 'releases': 1}] and known['random']
  assert f'{strengths[2]}: ε ≤ 11 (replace one; by RDP' in printed and 'ε ≤ 4.8 (replace by zeros; by RDP' in printed
  assert 'You: Noise on a Grid. 2026.' in printed and known['citations'] == ['You: Noise on a Grid. 2026.']
  adaptive_attacks = result.adaptive_attacks[strengths[0]]
  assert adaptive_attacks['averaged+clipped+smooth'].endswith('It weights smoothness by a hundredth.')
  assert {row['rounds'] for row in result.rows if row['adaptive'] == 'averaged+clipped+smooth'} == {4}
  assert {row['adaptive'] for row in result.rows if row['defense'] == strengths[0]} == {None, *adaptive_attacks}


@pytest.mark.slow
def test_an_attack_of_ones_own(capsys):
  result, printed = run('attack_of_your_own', capsys)
  assert list(result.methods['attacks']) == ['neurons', 'neurons(ridge=0.0001)', 'fidel']
  assert 'You: All Neurons Together. 2026.' in printed
  found = {(row['attack'], row['defense'], row['adaptive']): row for row in result.rows}
  pruned, noisy = str(gl.defenses.prune(rate=0.98)), str(gl.defenses.gaussian(stddev=0.01))
  assert {key[2] for key in found if key[:2] == ('neurons', pruned)} == {None, 'masked'}  # it reads weights
  assert {key[2] for key in found if key[0] == 'fidel'} == {None, 'combined'}
  assert {key[2] for key in found if key[1] == noisy and key[0] != 'fidel'} == {None}
  assert {row['steps'] for row in result.rows} == {0}
  undefended = [row['psnr'] for row in result.rows if (row['attack'], row['defense']) == ('neurons', 'none')]
  assert min(undefended) > 60


@pytest.mark.slow
def test_a_table(capsys, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  result, printed = run('table', capsys)
  bare = [row for row in result.rows if (row['attack'], row['defense']) == ('peeling', 'none')]
  assert [row['revealed'] for row in bare] == [4] * 4 and 'cells right' in printed
  page = (tmp_path / 'results' / 'patients' / 'report.html').read_text('utf-8')
  assert 'department' in page and 'sensitive columns' in page


def test_the_example_of_pytorch_ends_with_a_sentence_where_that_is_missing(monkeypatch):
  found = importlib.util.find_spec
  monkeypatch.setattr(importlib.util, 'find_spec', lambda name, *rest: None if name == 'torch' else found(name, *rest))
  with pytest.raises(SystemExit, match=r'this example needs PyTorch: pip install torch'):
    runpy.run_path(str(EXAMPLES / 'audit_your_torch_model.py'))


@pytest.mark.slow
def test_a_network_of_pytorch(capsys, tmp_path, monkeypatch):
  pytest.importorskip('torch', reason='PyTorch is not installed')
  monkeypatch.chdir(tmp_path)
  result, printed = run('audit_your_torch_model', capsys)
  assert result.config['model'] == 'sequential' and 'report: results/my_torch_network/report.html' in printed
  psnr = {row['defense']: row['psnr'] for row in result.rows if row['adaptive'] is None}
  assert set(psnr) == {'none', 'gaussian(stddev=0.05)', str(gl.defenses.outpost())}
  assert (tmp_path / 'results/my_torch_network/report.html').exists()
