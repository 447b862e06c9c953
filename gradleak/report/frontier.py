"""What defenses hide against what they cost: one table, and one picture with the frontier."""

import csv
import io

from gradleak.report import figures
from gradleak.report.figures import SOFT
from gradleak.report.formatting import aligned
from gradleak.report.tables import grouped, strongest, summarise

COLUMNS = (
  'defense', 'psnr', 'ssim', 'recovered', 'n', 'by', 'accuracy', 'loss', 'rounds', 'bytes_up', 'bytes_down', 'seconds',
)  # fmt: skip
_COLOUR = '#0f6674'


def entries(trained, rows=()):
  """Returns one dict per defense, with `COLUMNS` as keys.

  Args:
    trained: defense -> (rows of `federated.training.train`, median seconds of a round).
    rows: of an audit of the same defenses, or none; then 'psnr' (dB) and 'ssim' are means under the attacker, aware or
      not, that recovers most, 'recovered' of 'n' are its successes, and 'by' is its name.
  """
  worst = {defense: strongest(group) for (defense,), group in grouped(summarise(rows), 'defense').items()}
  return [_entry(defense, *found, worst.get(defense)) for defense, found in trained.items()]


def _entry(defense, rounds, seconds, worst):
  worst = worst or {}
  by = ', '.join(filter(None, [worst.get('attack'), worst.get('counter')]))
  answered = max(1, sum(row['clients'] for row in rounds))
  return {
    'defense': defense,
    'psnr': worst.get('psnr'),
    'ssim': worst.get('ssim'),
    'recovered': worst.get('recovered'),
    'n': worst.get('n'),
    'by': by or None,
    'accuracy': rounds[-1]['accuracy'],
    'loss': rounds[-1]['loss'],
    'rounds': len(rounds),
    'bytes_up': sum(row['bytes_up'] for row in rounds) / answered,
    'bytes_down': sum(row['bytes_down'] for row in rounds) / answered,
    'seconds': seconds,
  }


def frontier_csv(found):
  """Returns the `entries` as CSV text; bytes are per client and round, seconds of a round."""
  text = io.StringIO()
  writer = csv.DictWriter(text, fieldnames=COLUMNS)
  writer.writeheader()
  writer.writerows(found)
  return text.getvalue()


def frontier_table(found):
  """Returns the `entries` as an aligned table."""
  lines = [('defense', 'accuracy', 'KiB up', 's/round', 'PSNR dB', 'recovered', 'by')]
  for one in found:
    attacked = one['n'] is not None
    lines.append(
      (
        one['defense'],
        f'{one["accuracy"]:.1%}',
        f'{one["bytes_up"] / 1024:,.1f}',
        f'{one["seconds"]:.2f}',
        f'{one["psnr"]:.1f}' if one['psnr'] is not None else '–',
        f'{one["recovered"]} of {one["n"]}' if attacked else '–',
        one['by'] or '–',
      )
    )
  return '\n'.join(aligned(lines))


def best(found):
  """Returns those `entries` of which no other hides as much and trains as well, by descending accuracy."""
  measured = [one for one in found if one['psnr'] is not None]

  def beaten(one):
    return any(
      other['psnr'] <= one['psnr']
      and other['accuracy'] >= one['accuracy']
      and (other['psnr'], other['accuracy']) != (one['psnr'], one['accuracy'])
      for other in measured
    )

  return sorted((one for one in measured if not beaten(one)), key=lambda one: (-one['accuracy'], one['psnr']))


def frontier(found):
  """Returns a PNG: accuracy against what the worst attacker gets back (PSNR, dB), a point per defense; None without.

  Up and left is better. Filled points are recovered from, hollow ones are not; a line joins those that none beats.
  """
  measured = [one for one in found if one['psnr'] is not None]
  if not measured:
    return None
  with figures.figure(7.2, 1.6 + 0.22 * len(measured) + 3.0, layout='constrained') as (figure, png):
    axes = figure.subplots()
    line = best(found)
    axes.plot([one['psnr'] for one in line], [100 * one['accuracy'] for one in line], color=SOFT, linewidth=1, zorder=1)
    for number, one in enumerate(measured, 1):
      face = _COLOUR if one['recovered'] else 'white'
      x, y = one['psnr'], 100 * one['accuracy']
      axes.scatter(x, y, s=28, facecolors=face, edgecolors=_COLOUR, zorder=2, label=f'{number}  {one["defense"]}')
      axes.annotate(str(number), (x, y), xytext=(5, 4), textcoords='offset points', fontsize=8)
    axes.set_xlabel('PSNR of what the worst attacker gets back, in dB (left: hidden)')
    axes.set_ylabel('test accuracy, in %')
    axes.spines[['top', 'right']].set_visible(False)
    axes.legend(frameon=False, loc='upper center', bbox_to_anchor=(0.5, -0.16), ncols=1 if len(measured) < 5 else 2)
    axes.set_title('filled: images recovered; hollow: none', fontsize=8.5, color=SOFT)
    return png()
