"""The page of the leaderboard, made of results/leaderboard, beside the pages of the site."""

import pathlib

from sphinx.application import Sphinx

from gradleak.report import write_leaderboard

ENTRIES = pathlib.Path(__file__).parents[2] / 'results' / 'leaderboard'


def _write(app: Sphinx, exception: Exception | None) -> None:
  if exception is None and app.builder.format == 'html':
    write_leaderboard(ENTRIES, pathlib.Path(app.outdir, 'leaderboard.html'))


def setup(app: Sphinx) -> dict[str, bool]:
  """Writes the page when the others are written."""
  app.connect('build-finished', _write)
  return {'parallel_read_safe': True, 'parallel_write_safe': True}
