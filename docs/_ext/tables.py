"""The pages of the stored tables, written by `experiments.pages` when a build starts."""

import os
import pathlib

import facts
import methods
from sphinx.application import Sphinx

import experiments
from experiments import pages, results

DOCS = pathlib.Path(__file__).parents[1]


def texts() -> dict[str, str]:
  """Returns file name -> text of the pages in docs/results; the index has the table of contents of the others."""
  pictures = os.path.relpath(facts.TABLES / facts.SHOWN, DOCS / 'results').replace(os.sep, '/')
  made = pages.pages(results.read(facts.TABLES, facts.SHOWN), experiments.REGISTRY, facts.SHOWN, pictures)
  names = [name.removesuffix('.md') for name in made if name != 'index.md']
  contents = '\n'.join(f'{name} <{name}>' for name in names)  # by the name that reproduces it
  made['index.md'] += f'\n```{{toctree}}\n:hidden:\n\n{contents}\n```\n'
  return made


def setup(app: Sphinx) -> dict[str, bool]:
  """Writes the pages when a build starts."""
  app.connect('builder-inited', lambda app: methods.write(DOCS / 'results', texts()))
  return {'parallel_read_safe': True, 'parallel_write_safe': True}
