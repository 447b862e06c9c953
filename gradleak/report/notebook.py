"""What a notebook shows of a result: the worst case per defense, and the picture grid; of rows and texts the slide."""

from gradleak.audit.result import AuditResult
from gradleak.modalities import of_config
from gradleak.report import blocks, figures, pictures
from gradleak.report.formatting import percent_range
from gradleak.report.html import image, rendered
from gradleak.report.slide import slide
from gradleak.report.words import said, speaking
from gradleak.summary import cases, shown

_HEAD = ('defense', 'recovered', '95 % interval', 'by')
_ALT = 'Private samples, and the reconstructions of each attack.'


@speaking
def html(result: AuditResult) -> str:
  """Returns a result as HTML for a notebook."""
  looked_at = of_config(result.config).marked is None
  drawn, alt = (pictures.grid(result), _ALT) if looked_at else (slide(result), said('audit.slide'))
  rows = [
    blocks.Row([one['defense'], f'{one["recovered"]} of {one["n"]}', percent_range(one), ', '.join(one['by']) or '–'])
    for one in cases.worst_case(result.rows)
  ]
  table = rendered([blocks.Table(_HEAD, [blocks.Body(rows)], label='Worst case', first='')])
  size = figures.width(drawn) * 96 // figures.DPI
  return f'{table}\n{image(shown.embedded(drawn), alt, size)}\n'


AuditResult._repr_html_ = html
