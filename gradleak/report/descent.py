"""How the attacks descended: the objective against the step, as SVG that takes its colours from the page around it."""

import io
import re
from xml.sax.saxutils import quoteattr

import numpy as np

from gradleak.report import figures, tables

_THEME_INK = figures.LINE  # stands for the colour of the page's text, whatever it is
_AT_TRUTH = {'linewidth': 1.1, 'linestyle': (0, (2, 2))}
_MAX_POINTS = 160
_MAX_LINES = 24


def curves(result):
  """Returns {title: SVG}: the objective against the step, on log axes, a colour per defense.

  A title is the attack's name, followed by '· aware' where the attackers know the defense; of these the strongest
  counter-measure to each defense is drawn.

  Thin lines are trials (the first 24), the thick one is their median, the dashed one the objective at the truth
  (median) where it is above zero. Text and axes take the colour of the surrounding text. What has no descent (closed
  forms, runs that all diverged at once) is left out.
  """
  by_attacker = tables.by_attacker(result.rows)
  shown = [
    tables.attacker(summary) for pair in tables.paired(tables.summarise(result.rows)).values() for summary in pair
  ]
  panels = {}
  for attacker in shown:
    attack, defense, *counter = attacker
    steps, objective = (np.asarray(values) for values in result.curves.get(attacker, ((), ())))
    if np.size(steps) > 1 and np.isfinite(_positive(objective)).any():
      at_truth = [
        row['objective_at_truth'] for row in by_attacker[attacker] if row.get('objective_at_truth') is not None
      ]
      title, label = (f'{attack} · aware', f'{defense} · {counter[0]}') if counter else (attack, defense)
      panels.setdefault(title, []).append((defense, label, steps, objective.astype(np.float64), at_truth))
  defenses = list(dict.fromkeys(row['defense'] for row in result.rows))
  return {title: _panel(title, descents, defenses) for title, descents in panels.items()}


def _panel(title, descents, defenses):
  """Returns the SVG of the descents [(defense, label, steps [K], objective [T, K], objective at the truth [T])]."""
  from matplotlib import rc_context
  from matplotlib.backends.backend_svg import FigureCanvasSVG
  from matplotlib.figure import Figure
  from matplotlib.lines import Line2D

  theme = dict.fromkeys(('text.color', 'axes.labelcolor', 'axes.edgecolor', 'xtick.color', 'ytick.color'), _THEME_INK)
  fonts = {'font.family': ['DejaVu Sans'], 'font.size': 9, 'svg.fonttype': 'none', 'svg.hashsalt': f'gradleak {title}'}
  with rc_context({**theme, **fonts}):
    figure = Figure(figsize=(5.2, 3.3 + 0.19 * len(descents)), facecolor='none', layout='constrained')
    axes = figure.add_subplot(facecolor='none', xlabel='step', ylabel='objective')
    handles = []
    for defense, label, steps, objective, at_truth in descents:
      colour, dashes = figures.line_style(defense, defenses)
      chosen = _log_spaced(steps)
      steps, objective = steps[chosen], objective[:, chosen]
      for trial in objective[:_MAX_LINES]:
        axes.plot(steps, _positive(trial), color=colour, linewidth=0.7, alpha=0.35)
      axes.plot(steps, _positive(_median(objective)), color=colour, linewidth=2.2, linestyle=dashes)
      handles.append(Line2D([], [], color=colour, linewidth=2.2, linestyle=dashes, label=_plain(label)))
      truth = np.median(at_truth) if at_truth else 0.0
      if truth > 0:
        axes.axhline(truth, color=colour, **_AT_TRUTH)
    handles.append(Line2D([], [], color=_THEME_INK, label='objective at the truth', **_AT_TRUTH))
    axes.set_xscale('symlog', linthresh=1)
    axes.set_xlim(min(steps[0] for _, _, steps, *_ in descents), max(steps[-1] for _, _, steps, *_ in descents))
    axes.set_yscale('log', nonpositive='mask')
    axes.grid(color=_THEME_INK, alpha=0.12, linewidth=0.6)
    axes.spines[['top', 'right']].set_visible(False)
    figure.legend(handles=handles, loc='outside lower left', frameon=False, handlelength=3, labelspacing=0.35)
    buffer = io.StringIO()
    FigureCanvasSVG(figure).print_svg(buffer, metadata=dict.fromkeys(('Date', 'Creator', 'Format', 'Type')))
  return _embeddable(buffer.getvalue(), f'The objective of {title} against its step, a line per trial and defense.')


def _embeddable(svg, label):
  """Returns matplotlib's SVG fit to stand in a page beside others: own ids only, no style for the whole page."""
  svg = svg[svg.index('<svg') :].replace(_THEME_INK, 'currentColor')
  svg = re.sub(r'<style.*?</style>', '', svg, count=1, flags=re.DOTALL)
  svg = re.sub(r'<g id="[^"]*"', '<g', svg)
  opening = f'<svg role="img" aria-label={quoteattr(label)} style="stroke-linejoin: round; stroke-linecap: butt"'
  return svg.replace('<svg', opening, 1)


def _plain(name):
  """Returns `name` so that matplotlib reads no mathematics into it."""
  return name.replace('$', r'\$')


def _log_spaced(steps):
  """Returns at most `_MAX_POINTS` indices into `steps`, evenly spaced on a log axis, the ends among them."""
  if len(steps) <= _MAX_POINTS:
    return np.arange(len(steps))
  return np.unique(np.round(np.geomspace(1, len(steps), _MAX_POINTS)).astype(int) - 1)


def _median(objective):
  """Returns the median over trials [T, K] -> [K] of what is finite; NaN where nothing is."""
  median = np.full(objective.shape[1], np.nan)
  some = np.isfinite(objective).any(axis=0)
  median[some] = np.nanmedian(np.where(np.isfinite(objective), objective, np.nan)[:, some], axis=0)
  return median


def _positive(values):
  """Returns `values` with NaN for what a log axis cannot show."""
  return np.where(np.isfinite(values) & (values > 0), values, np.nan)
