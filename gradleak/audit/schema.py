"""The columns of an audit's rows: name, type, unit and meaning of each."""

import functools
from typing import Any

from gradleak.audit.sequential import ANSWERS
from gradleak.audit.verdict import VERDICTS
from gradleak.core import errors
from gradleak.modalities import IMAGES, Modality, of_rows
from gradleak.modalities.base import NUMBER, Column

_DIVERGED = 'the trial diverged'
_CONTROL = 'it is a control run, or not finite'
_NO_LABELS = 'the attack returns no labels'

_HEAD = """\
# Columns of the rows

<!-- Written by gradleak.audit.schema.markdown(); tests/test_result.py compares. -->

These are the columns of `AuditResult.rows`, `.controls` and `.to_frame()`, and of `rows.jsonl` and `controls.jsonl` in
a work directory. A row is one run: an attack on one trial under one defense, non-adaptive or by one adaptive
attack; or a control run.

| column | type | unit | meaning | null |
| --- | --- | --- | --- | --- |"""

_RUN = (
  Column('dataset', str, '', 'Name of the data.'),
  Column('model', str, '', 'Name of the model.'),
  Column('init', str, '', 'How the weights were initialised.', 'it was not noted'),
  Column('attack', str, '', 'Label of the attack.'),
  Column('defense', str, '', "Label of the defense, 'none' for no defense; 'null_gradient' in control runs."),
  Column('control', bool, '', 'Whether the upload was replaced by noise of the same norm (null-gradient control).'),
  Column('knowledge', str, '', "'non-adaptive' or 'adaptive'."),
  Column(
    'adaptive', str, '', 'The adaptive attack of an attacker who knows the defense.', 'the attacker is non-adaptive'
  ),
  Column('rounds', int, '', 'Uploads of the same samples that the attacker reads.'),
  Column('remark', str, '', 'What there is to say of the defense in this setting; empty for nothing.'),
  Column('trial', int, '', 'Number of the private batch, or of the control run.'),
  Column('seed', int, '', 'Seed of the program.', 'it was not noted'),
  Column('batch_size', int, 'samples', 'Private samples behind one upload.'),
  Column('restarts', int, '', 'Starts; the one with the smallest matching distance is kept.'),
  Column('labels', str, '', "Where the attack has labels from: 'known', 'inferred', 'optimised' or 'unused'."),
)
_FOUND = (
  Column(
    'revealed',
    int,
    'samples',
    'Samples of the batch that are fully revealed: Pearson at least 0.98, or RMSE up to 1/255.',
  ),
  Column('flat', int, 'samples', 'Samples of the batch that deviate from their mean by an RMS of at most 1/255.'),
  Column('rank', int, '', 'Rank of the original among the candidates; of a batch the best.', _DIVERGED),
  Column('identified', int, 'samples', 'Samples of the batch at rank 1, less those that others have, too.'),
  Column('recognised', int, 'samples', "Samples at rank 1 with an SSIM of at least the gallery's threshold."),
  Column(
    'candidates',
    int,
    'samples',
    'Others among which an original is to be found, the least of the batch; chance is 1 in one more.',
  ),
  Column('label_correct', NUMBER, '[0, 1]', 'Fraction of the samples whose label is right.', _NO_LABELS),
  Column('label_counts_correct', NUMBER, '[0, 1]', 'Fraction of the labels that are right in any order.', _NO_LABELS),
  Column('objective', NUMBER, '', 'The objective of the attack at its reconstruction.', _DIVERGED),
  Column('distance', NUMBER, '', 'The matching distance alone, without priors.', _DIVERGED),
  Column('objective_start', NUMBER, '', 'The objective at the start.', 'it was not finite'),
  Column('objective_at_truth', NUMBER, '', 'The objective at the private samples.', 'they do not determine it'),
  Column('diverged', bool, '', 'Whether a value became infinite or NaN.'),
  Column('diverged_step', int, '', 'The first such step.', 'it did not diverge'),
  Column('change', NUMBER, '', 'Norm of what the defense changed over the norm of the undefended upload.', _CONTROL),
  Column('sent', NUMBER, '[0, 1]', 'Fraction of the entries of the update that were sent.'),
  Column('tier', str, 'A–H', 'Threat model of Carletti et al. (2025).'),
  Column('steps', int, '', 'Steps of the attack; 0 for closed forms.'),
  Column('success', bool, '', 'Whether there is a picture: exact or recognisable.'),
  Column('solved', bool, '', 'Whether the objective is as low as at the truth.'),
  Column('verdict', str, '', ', '.join(map(repr, VERDICTS)) + '.'),
)
# Rows of an audit of a fixed number of trials have no such column.
STOPPED = Column(
  'stopped',
  str,
  '',
  f'How the trials of the defense stopped: {", ".join(map(repr, ANSWERS))}; in rows of sequential audits alone.',
)


@functools.cache
def columns(kind: Modality) -> tuple[Column, ...]:
  """Returns the columns of the rows of a modality."""
  return *_RUN, *kind.columns, *kind.derived(), *_FOUND


def check(row: dict[str, Any]) -> dict[str, Any]:
  """Returns the row, checked.

  Raises:
    UsageError: for a column that is missing, unknown, of another type, or null where it never is.
  """
  known = _by_name(of_rows([row]))
  if differing := (set(row) ^ set(known)) - {STOPPED.name}:
    raise errors.UsageError(
      f'a row has other columns than docs/ROWS.md ({", ".join(sorted(differing))}): rows of another version '
      'of gradleak need a new work directory'
    )
  for name, value in row.items():
    column = known.get(name, STOPPED)
    fits = column.none if value is None else isinstance(value, column.type)
    if not fits or (isinstance(value, bool) and column.type is not bool):
      raise errors.UsageError(f'the column {name} of a row is {value!r}, expected {_shown(column.type)}')
  return row


@functools.cache
def _by_name(kind: Modality) -> dict[str, Column]:
  return {column.name: column for column in columns(kind)}


def _shown(types: type | tuple[type, ...]) -> str:
  """Returns a type as the documents call it."""
  words: dict[Any, str] = {bool: 'true or false', int: 'integer', str: 'text'}
  return words.get(types, 'number')


def markdown() -> str:
  """Returns the text of docs/ROWS.md."""
  lines = [
    f'| `{c.name}` | {_shown(c.type)} | {c.unit} | {c.meaning} | {c.none and f"if {c.none}"} |'
    for c in (*columns(IMAGES), STOPPED)
  ]
  return '\n'.join([_HEAD, *lines]) + '\n'
