"""The quickstart notebook runs from its first cell to its last, and is stored without outputs."""

import asyncio
import os
import time
import warnings

import nbformat
import pytest

from tests import programs

NOTEBOOK = programs.ROOT / 'docs' / 'quickstart.ipynb'


@pytest.fixture(scope='module')
def notebook():
  found = nbformat.read(NOTEBOOK, as_version=4)
  nbformat.validate(found)
  return found


def test_it_is_short_and_has_no_outputs(notebook):
  code = [cell for cell in notebook.cells if cell.cell_type == 'code']
  assert 8 <= len(notebook.cells) <= 14 and code
  assert not any(cell.outputs or cell.execution_count for cell in code)
  assert notebook.metadata.kernelspec.name == 'python3'


@pytest.mark.slow
def test_it_runs(notebook, tmp_path, monkeypatch):
  with warnings.catch_warnings():
    warnings.simplefilter('ignore')  # of Jupyter
    from nbclient import NotebookClient

    monkeypatch.setenv('PYTHONPATH', str(programs.ROOT))
    monkeypatch.setenv('PYTHONWARNINGS', 'error::UserWarning')
    monkeypatch.setenv('JAX_COMPILATION_CACHE_DIR', os.environ['GRADLEAK_TEST_CACHE'])
    begun = time.monotonic()
    done = asyncio.run(
      NotebookClient(notebook, timeout=300, resources={'metadata': {'path': str(tmp_path)}}).async_execute()
    )
    print(f'{time.monotonic() - begun:.0f} s')
  outputs = [output for cell in done.cells if cell.cell_type == 'code' for output in cell.outputs]
  assert any('image/png' in output.get('data', {}) for output in outputs)
  assert any('recovered' in output.get('text', '') for output in outputs)
  assert (tmp_path / 'results' / 'quickstart' / 'report.html').exists()
