"""How many samples of each class each client holds, as one picture."""

from collections.abc import Sequence

import numpy as np

from gradleak import data
from gradleak.core import errors
from gradleak.data import partition
from gradleak.report import figures
from gradleak.report.figures import INK, SOFT

_COLOURS = ('#d3e6e8', '#0f6674', '#082f36')
_MAX_NUMBERED = 20  # clients: with more, counts do not fit into the cells
_MAX_BARS = 50  # clients: with more, the bars touch
_MAX_UNSORTED = 200  # clients: more are sorted by their number of samples
_MAX_NAMES = 26  # classes: with more, names are left out
_MOST_DIGITS = 3  # of a count that fits into a cell


def summary(parts: Sequence[np.ndarray], labels: np.ndarray) -> str:
  """Returns the partition in words, such as '100 clients, 12 to 600 samples, of 2 classes each'.

  Args:
    parts: an array of indices into `labels` for each client.
    labels: integers [N].
  """
  held = [len(np.unique(labels[part])) for part in parts]
  clients = f'{len(parts):,} client{"s" if len(parts) > 1 else ""}'
  samples = _range([len(part) for part in parts])
  plural = 's' if max(len(part) for part in parts) != 1 else ''
  classes = f'of {_range(held)} class{"es" if max(held) != 1 else ""}{" each" if min(held) == max(held) else ""}'
  return f'{clients}, {samples} sample{plural}, {classes}'


def partition_picture(parts: Sequence[np.ndarray], labels: np.ndarray, class_names: Sequence[str]) -> bytes:
  """Returns a PNG: a column per client, its samples of each class in colour, their total as a bar above.

  More than 200 clients are sorted by their number of samples.

  Args:
    parts: an array of indices into `labels` for each client.
    labels: integers [N].
    class_names: a name for each label.
  """
  from matplotlib.colors import LinearSegmentedColormap, PowerNorm

  labels = errors.host_array('labels', labels)
  names = errors.check_instance('class_names', class_names, (tuple, list), 'a name for each label')
  if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer):
    raise errors.UsageError(f'labels are {labels.dtype} of shape {labels.shape}, expected integers [N]')
  data.check_classes(labels, len(names))
  partition.check(parts, len(labels))
  counts = np.stack([np.bincount(labels[part], minlength=len(class_names)) for part in parts], axis=1)
  classes, clients = counts.shape
  ordered = clients > _MAX_UNSORTED
  counts = counts[:, np.argsort(counts.sum(0), stable=True)] if ordered else counts
  tall = min(max(0.24 * classes, 1.2), 4.2)
  largest = int(counts.max(initial=1))
  with figures.figure(7.2, tall + 1.9, layout='constrained') as (figure, png):
    bars, cells = figure.subplots(2, 1, sharex=True, height_ratios=(0.9, tall))
    if clients <= _MAX_BARS:
      bars.bar(np.arange(clients), counts.sum(0), color=SOFT, linewidth=0)
    else:
      bars.stairs(counts.sum(0), np.arange(clients + 1) - 0.5, fill=True, color=SOFT)
    bars.set_ylabel('samples')
    bars.tick_params(bottom=False, labelbottom=False)
    bars.set_title(summary(parts, labels), loc='left', fontsize=9, color=INK)
    # A root scale keeps small counts apart; zero stays white.
    drawn = cells.imshow(
      np.ma.masked_equal(counts, 0),
      cmap=LinearSegmentedColormap.from_list('held', _COLOURS),
      norm=PowerNorm(0.5, vmin=0, vmax=largest),
      aspect='auto',
      interpolation='nearest' if clients <= 500 else 'auto',
    )
    if clients <= _MAX_NUMBERED and len(str(largest)) <= _MOST_DIGITS and classes <= _MAX_NAMES:
      for row, column in np.argwhere(counts):
        count = counts[row, column]
        ink = 'white' if count > 0.15 * largest else INK
        cells.text(column, row, str(count), ha='center', va='center', fontsize=6.5, color=ink)
    if classes <= _MAX_NAMES:
      cells.set_yticks(np.arange(classes), [_short(name) for name in class_names])
    else:
      cells.set_ylabel('class')
    if clients <= _MAX_NUMBERED:
      cells.set_xticks(np.arange(clients))
    cells.set_xlabel('client, sorted by number of samples' if ordered else 'client')
    cells.spines[:].set(color='#b9bcc1', visible=True)
    figure.colorbar(
      drawn, ax=cells, label='samples of a class', pad=0.01, aspect=max(8, 5 * tall), ticks=_ticks(largest)
    )
    return png()


def _range(values: Sequence[int]) -> str:
  low, high = min(values), max(values)
  return f'{low:,}' if low == high else f'{low:,} to {high:,}'


def _short(name: str) -> str:
  name = str(name)
  return name if len(name) <= 16 else f'{name[:15]}…'


def _ticks(largest: int) -> list[int]:
  """Returns a few integers up to `largest`, evenly spaced on a root scale."""
  return sorted({round(fraction * largest) for fraction in (0, 0.04, 0.25, 0.56, 1)})
