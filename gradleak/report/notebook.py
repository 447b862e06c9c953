"""What a notebook shows of a result: the worst case per defense, and the picture grid."""

from gradleak.audit.result import AuditResult
from gradleak.report import blocks, figures, pictures
from gradleak.report.formatting import percent_range
from gradleak.report.html import rendered
from gradleak.summary import cases, shown

_HEAD = ('defense', 'recovered', '95 % interval', 'by')
_ALT = 'Private samples, and the reconstructions of each attack.'


def html(result: AuditResult) -> str:
  """Returns a result as HTML for a notebook."""
  grid = pictures.grid(result)
  rows = [
    blocks.Row([one['defense'], f'{one["recovered"]} of {one["n"]}', percent_range(one), ', '.join(one['by']) or '–'])
    for one in cases.worst_case(result.rows)
  ]
  table = rendered([blocks.Table(_HEAD, [blocks.Body(rows)], label='Worst case', first='')])
  size = figures.width(grid) * 96 // figures.DPI
  return f'{table}\n<img src="{shown.embedded(grid)}" width="{size}" alt="{_ALT}">\n'


AuditResult._repr_html_ = html
