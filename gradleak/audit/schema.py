"""The columns of an audit's rows: name, type, unit and meaning of each."""

from typing import Any, NamedTuple

from gradleak.audit.verdict import VERDICTS
from gradleak.core import errors


class Column(NamedTuple):
  """One column of `rows.jsonl` and `controls.jsonl`.

  Attributes:
    name: its key.
    type: of its values in JSON.
    unit: 'dB', a range, or '' where there is none.
    meaning: a sentence.
    none: when the value is null; '' for never.
  """

  name: str
  type: type | tuple[type, ...]
  unit: str
  meaning: str
  none: str = ''


_NUMBER = (int, float)
_DIVERGED = 'the trial diverged'
_UNDEFINED = 'the trial diverged, or no pair varies in both images'
_CONTROL = 'it is a control run, or not finite'
_NO_LPIPS = 'its weights were not given, or the trial diverged'
_NO_LABELS = 'the attack returns no labels'

_HEAD = """\
# Columns of the rows

<!-- Written by gradleak.audit.schema.markdown(); tests/test_result.py compares. -->

These are the columns of `AuditResult.rows`, `.controls` and `.to_frame()`, and of `rows.jsonl` and `controls.jsonl` in
a work directory. A row is one run: an attack on one trial under one defense, unaware of the defense or by one
counter-measure; or a control run.

| column | type | unit | meaning | null |
| --- | --- | --- | --- | --- |"""

COLUMNS = (
  Column('dataset', str, '', 'Name of the data.'),
  Column('model', str, '', 'Name of the model.'),
  Column('init', str, '', 'How the weights were initialised.', 'it was not noted'),
  Column('attack', str, '', 'Label of the attack.'),
  Column('defense', str, '', "Label of the defense, 'none' for no defense; 'null_gradient' in control runs."),
  Column('control', bool, '', 'Whether the upload was replaced by noise of the same norm (null-gradient control).'),
  Column('knowledge', str, '', "'unaware' or 'aware' of the defense."),
  Column('counter', str, '', 'The counter-measure of an attacker who knows the defense.', 'the attacker is unaware'),
  Column('rounds', int, '', 'Uploads of the same samples that the attacker reads.'),
  Column('remark', str, '', 'What there is to say of the defense in this setting; empty for nothing.'),
  Column('trial', int, '', 'Number of the private batch, or of the control run.'),
  Column('seed', int, '', 'Seed of the program.', 'it was not noted'),
  Column('batch_size', int, 'images', 'Private images behind one upload.'),
  Column('restarts', int, '', 'Starts; the one with the smallest matching distance is kept.'),
  Column('labels', str, '', "Where the attack has labels from: 'known', 'inferred', 'optimised' or 'unused'."),
  Column('ms_ssim', _NUMBER, '[0, 1]', 'MS-SSIM, on as many of five scales as fit; mean over the batch.', _DIVERGED),
  Column('mse', _NUMBER, '', 'Mean squared error, images clipped to [0, 1]; mean over the batch.', _DIVERGED),
  Column('mse_unclipped', _NUMBER, '', 'The same without clipping.', _DIVERGED),
  Column('pearson', _NUMBER, '[-1, 1]', 'Pearson correlation; mean over the pairs that have one.', _UNDEFINED),
  Column('psnr', _NUMBER, 'dB', 'PSNR of images clipped to [0, 1], peak 1; mean over the batch.', _DIVERGED),
  Column('psnr_unclipped', _NUMBER, 'dB', 'The same without clipping.', _DIVERGED),
  Column('ssim', _NUMBER, '[-1, 1]', 'SSIM, 11×11 Gaussian window; mean over the batch.', _DIVERGED),
  Column(
    'revealed',
    int,
    'images',
    'Images of the batch that are fully revealed: Pearson at least 0.98, or RMSE up to 1/255.',
  ),
  Column('revealed_psnr', _NUMBER, 'dB', 'Mean PSNR of the images that are fully revealed.', 'no image is'),
  Column('flat', int, 'images', 'Images of the batch that deviate from their mean by an RMS of at most 1/255.'),
  Column('rank', int, '', 'Rank of the original among the candidates; of a batch the best.', _DIVERGED),
  Column('identified', int, 'images', 'Images of the batch at rank 1.'),
  Column('recognised', int, 'images', "Images at rank 1 with an SSIM of at least the gallery's bar."),
  Column(
    'candidates',
    int,
    'images',
    'Others among which an original is to be found, the least of the batch; chance is 1 in one more.',
  ),
  Column('label_correct', _NUMBER, '[0, 1]', 'Fraction of the images whose label is right.', _NO_LABELS),
  Column('label_counts_correct', _NUMBER, '[0, 1]', 'Fraction of the labels that are right in any order.', _NO_LABELS),
  Column('fmse', _NUMBER, '', 'Feature MSE: of the logits of the model that was sent, without clipping.', _DIVERGED),
  Column('lpips', _NUMBER, '', 'LPIPS, 0 for equal images; mean over the batch.', _NO_LPIPS),
  Column('trained_psnr', _NUMBER, 'dB', 'PSNR to the images that the client trained on.', 'these are the private ones'),
  Column('objective', _NUMBER, '', 'The objective of the attack at its reconstruction.', _DIVERGED),
  Column('distance', _NUMBER, '', 'The matching distance alone, without priors.', _DIVERGED),
  Column('objective_start', _NUMBER, '', 'The objective at the start.', 'it was not finite'),
  Column('objective_at_truth', _NUMBER, '', 'The objective at the private images.', 'they do not determine it'),
  Column('oracle_psnr', _NUMBER, 'dB', 'PSNR of the best start, chosen by the truth.', 'all diverged'),
  Column('oracle_ssim', _NUMBER, '[-1, 1]', 'SSIM of that start.', 'all diverged'),
  Column('oracle_mse_unclipped', _NUMBER, '', 'Unclipped mean squared error of that start.', 'all diverged'),
  Column('diverged', bool, '', 'Whether a value became infinite or NaN.'),
  Column('diverged_step', int, '', 'The first such step.', 'it did not diverge'),
  Column('change', _NUMBER, '', 'Norm of what the defense changed over the norm of the undefended upload.', _CONTROL),
  Column('sent', _NUMBER, '[0, 1]', 'Fraction of the entries of the update that were sent.'),
  Column('tier', str, 'A–H', 'Threat model of Carletti et al. (2025).'),
  Column('steps', int, '', 'Steps of the attack; 0 for closed forms.'),
  Column('control_psnr', _NUMBER, 'dB', '95th percentile of the control runs.', 'there is no control run'),
  Column('control_pearson', _NUMBER, '[-1, 1]', 'Three deviations above the mean of the control.', 'there is none'),
  Column('success', bool, '', 'Whether there is a picture: exact or recognisable.'),
  Column('solved', bool, '', 'Whether the objective is as low as at the truth.'),
  Column('verdict', str, '', ', '.join(map(repr, VERDICTS)) + '.'),
)
_BY_NAME = {column.name: column for column in COLUMNS}


def check(row: dict[str, Any]) -> dict[str, Any]:
  """Returns the row, checked.

  Raises:
    UsageError: for a column that is missing, unknown, of another type, or null where it never is.
  """
  if differing := set(row) ^ set(_BY_NAME):
    raise errors.UsageError(
      f'a row has other columns than docs/ROWS.md ({", ".join(sorted(differing))}): rows of another version '
      'of gradleak need a new work directory'
    )
  for name, value in row.items():
    column = _BY_NAME[name]
    fits = column.none if value is None else isinstance(value, column.type)
    if not fits or (isinstance(value, bool) and column.type is not bool):
      raise errors.UsageError(f'the column {name} of a row is {value!r}, expected {_shown(column.type)}')
  return row


def _shown(types: type | tuple[type, ...]) -> str:
  """Returns a type as the documents call it."""
  words: dict[Any, str] = {bool: 'true or false', int: 'integer', str: 'text'}
  return words.get(types, 'number')


def markdown() -> str:
  """Returns the text of docs/ROWS.md."""
  columns = [
    f'| `{c.name}` | {_shown(c.type)} | {c.unit} | {c.meaning} | {c.none and f"if {c.none}"} |' for c in COLUMNS
  ]
  return '\n'.join([_HEAD, *columns]) + '\n'
