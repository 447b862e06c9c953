"""How the attacks converged: the objective against the step, as SVG in the text colour of the page around it."""

import io
import re
from collections.abc import Sequence
from typing import Any, NamedTuple
from xml.sax.saxutils import quoteattr

import numpy as np

from gradleak.audit.result import AuditResult, check_result
from gradleak.report import figures
from gradleak.report.words import worded
from gradleak.summary import cases

_THEME_INK = figures.LINE  # replaced by the text colour of the page
_AT_TRUTH: dict[str, Any] = {'linewidth': 1.1, 'linestyle': (0, (2, 2))}
_MAX_POINTS = 160
_MAX_LINES = 24


class Descent(NamedTuple):
  """The curves of one case.

  Attributes:
    defense: its label.
    label: how the legend calls it.
    steps: int [K].
    objective: float [T, K].
    at_truth: the objective at the private images of each trial that has one.
  """

  defense: str
  label: str
  steps: np.ndarray
  objective: np.ndarray
  at_truth: list[float]


def curves(result: AuditResult) -> dict[str, str]:
  """Returns `{title: SVG}` with the objective against the step on log axes, one colour per defense.

  A title is the label of the attack; '· adaptive' follows where the attackers know the defense, and of these the
  strongest per defense is drawn. Thin lines are the first 24 trials, and the thick one is their median. The dashed line
  is the median objective at the private images where it is positive. Cases without steps (closed forms) or without a
  finite objective are left out.
  """
  by_case = cases.by_case(check_result(result).rows)
  shown = [cases.case(summary) for pair in cases.paired(cases.summarise(result.rows)).values() for summary in pair]
  panels: dict[str, list[Descent]] = {}
  for case in shown:
    attack, defense, *adaptive = case
    steps, objective = (np.asarray(values) for values in result.curves.get(case, ((), ())))
    if np.size(steps) > 1 and np.isfinite(_positive(objective)).any():
      at_truth = [row['objective_at_truth'] for row in by_case[case] if row.get('objective_at_truth') is not None]
      title, label = (f'{attack} · adaptive', f'{defense} · {adaptive[0]}') if adaptive else (attack, defense)
      panels.setdefault(title, []).append(Descent(defense, label, steps, objective.astype(np.float64), at_truth))
  defenses = list(dict.fromkeys(row['defense'] for row in result.rows))
  return {title: _panel(title, descents, defenses) for title, descents in panels.items()}


def _panel(title: str, descents: Sequence[Descent], defenses: Sequence[str]) -> str:
  """Returns the SVG of one attack."""
  from matplotlib import rc_context
  from matplotlib.backends.backend_svg import FigureCanvasSVG
  from matplotlib.figure import Figure
  from matplotlib.lines import Line2D
  from matplotlib.ticker import LogFormatter, NullLocator

  theme = dict.fromkeys(('text.color', 'axes.labelcolor', 'axes.edgecolor', 'xtick.color', 'ytick.color'), _THEME_INK)
  fonts = {'font.family': ['DejaVu Sans'], 'font.size': 9, 'svg.fonttype': 'none', 'svg.hashsalt': f'gradleak {title}'}
  with rc_context({**theme, **fonts, 'text.parse_math': False}):
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
      handles.append(Line2D([], [], color=colour, linewidth=2.2, linestyle=dashes, label=label))
      truth = np.median(at_truth) if at_truth else 0.0
      if truth > 0:
        axes.axhline(truth, color=colour, **_AT_TRUTH)
    handles.append(Line2D([], [], color=_THEME_INK, label=worded('objective at the private images'), **_AT_TRUTH))
    axes.set_xscale('symlog', linthresh=1)
    axes.xaxis.set_minor_locator(NullLocator())  # that of symlog repeats the major ones
    limits: tuple[Any, Any] = min(each.steps[0] for each in descents), max(each.steps[-1] for each in descents)
    axes.set_xlim(*limits)
    axes.set_yscale('log', nonpositive='mask')
    for place in (axes.xaxis.set_major_formatter, axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
      place(LogFormatter())  # 1e-05: powers that are set as mathematics take half of the time of a page
    axes.grid(color=_THEME_INK, alpha=0.12, linewidth=0.6)
    axes.spines[['top', 'right']].set_visible(False)
    figure.legend(handles=handles, loc='outside lower left', frameon=False, handlelength=3, labelspacing=0.35)
    buffer = io.StringIO()
    FigureCanvasSVG(figure).print_svg(buffer, metadata=dict.fromkeys(('Date', 'Creator', 'Format', 'Type')))
  return _embeddable(buffer.getvalue(), f'The objective of {title} against the step, a line per trial and defense.')


def _embeddable(svg: str, label: str) -> str:
  """Returns Matplotlib's SVG for a page with several: without ids that repeat and without style for the whole page."""
  svg = svg[svg.index('<svg') :].replace(_THEME_INK, 'currentColor')
  svg = re.sub(r'<style.*?</style>', '', svg, count=1, flags=re.DOTALL)
  svg = re.sub(r'<g id="[^"]*"', '<g', svg)
  opening = f'<svg role="img" aria-label={quoteattr(label)} style="stroke-linejoin: round; stroke-linecap: butt"'
  return svg.replace('<svg', opening, 1)


def _log_spaced(steps: np.ndarray) -> np.ndarray:
  """Returns at most `_MAX_POINTS` indices into `steps`, evenly spaced on a log axis, both ends included."""
  if len(steps) <= _MAX_POINTS:
    return np.arange(len(steps))
  return np.unique(np.round(np.geomspace(1, len(steps), _MAX_POINTS)).astype(int) - 1)


def _median(objective: np.ndarray) -> np.ndarray:
  """Returns the median over the trials that are finite, [T, K] -> [K]; NaN where none is."""
  median = np.full(objective.shape[1], np.nan)
  some = np.isfinite(objective).any(axis=0)
  median[some] = np.nanmedian(np.where(np.isfinite(objective), objective, np.nan)[:, some], axis=0)
  return median


def _positive(values: Any) -> np.ndarray:
  """Returns `values` with NaN in place of those that a log axis cannot show."""
  return np.where(np.isfinite(values) & (values > 0), values, np.nan)
