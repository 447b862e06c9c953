"""What a notebook shows of a result: the worst case per defense, and the picture grid."""

from gradleak.audit.result import AuditResult
from gradleak.report import figures, page, pictures
from gradleak.summary import cases, shown

_TEMPLATE = """\
<table>
<thead><tr><th>defense</th><th>recovered</th><th>95 % interval</th><th>by</th></tr></thead>
<tbody>
{% for entry in worst %}
<tr><td>{{ entry.defense }}</td><td>{{ entry.recovered }} of {{ entry.n }}</td><td>{{ percent_range(entry) }}</td>
<td>{{ entry.by | join(', ') or '–' }}</td></tr>
{% endfor %}
</tbody>
</table>
<img src="{{ grid }}" width="{{ width }}" alt="Private images, and the reconstructions of each attack.">
"""


def html(result: AuditResult) -> str:
  """Returns a result as HTML for a notebook."""
  grid = pictures.grid(result)
  size = figures.width(grid) * 96 // figures.DPI
  template = page.environment().from_string(_TEMPLATE)
  return template.render(worst=cases.worst_case(result.rows), grid=shown.embedded(grid), width=size)


AuditResult._repr_html_ = html
