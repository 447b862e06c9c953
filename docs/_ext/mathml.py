"""Formulas as MathML, which browsers draw themselves: pages need neither a script nor a network."""

import html
import re
from xml.etree import ElementTree

from docutils import nodes
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx
from sphinx.util import logging

_LOGGER = logging.getLogger(__name__)
_SPACE = '{http://www.w3.org/1998/Math/MathML}'
_SIGN = f'{_SPACE}mo'
ElementTree.register_namespace('', _SPACE.strip('{}'))
_FENCES = ('|', '‖', '⟨', '⟩', '⌊', '⌋', '⌈', '⌉')
_ALIASES = {r'\dots': r'\ldots'}


def converted(latex: str, block: bool) -> str:
  """Returns the MathML of a formula; raises `MathError` for a command that docutils does not know."""
  for name, known in _ALIASES.items():
    latex = latex.replace(name, known)
  written = re.sub(
    r'&(?!lt;|gt;|amp;|quot;)\w+;', lambda found: html.unescape(found[0]), tex2mathml(latex, as_block=block)
  )
  root = ElementTree.fromstring(written)  # XML has no other named entities
  _mend_accents(root)
  _mend_fences(root)
  return ElementTree.tostring(root, 'unicode')


def _mend_accents(root: ElementTree.Element) -> None:
  """Puts the index of an accented letter behind it; docutils puts it below."""
  for found in list(root.iter(f'{_SPACE}munderover')):
    base, index, accent = found
    if accent.tag == _SIGN and accent.get('stretchy') == 'false':
      found.tag = f'{_SPACE}msub'
      found[:] = [ElementTree.Element(f'{_SPACE}mover', accent='true'), index]
      found[0].extend([base, accent])


def _mend_fences(root: ElementTree.Element) -> None:
  r"""Lets bars and brackets stretch only where they enclose a group, as by \left and \right."""
  enclosing = {id(row[i]) for row in root.iter(f'{_SPACE}mrow') if len(row) > 1 for i in (0, -1)}
  for sign in root.iter(_SIGN):
    if sign.text in _FENCES and id(sign) not in enclosing:
      sign.attrib.update({'stretchy': 'false', 'lspace': '0', 'rspace': '0'})


def _visit(block: bool):
  def visit(self, node: nodes.Element) -> None:
    try:
      formula = converted(node.astext(), block)
      self.body.append(f'<div class="formula">{formula}</div>' if block else formula)
    except MathError as error:
      _LOGGER.warning('formula %r: %s', node.astext(), error, location=node)
    raise nodes.SkipNode

  return visit


def setup(app: Sphinx) -> dict[str, bool]:
  """Registers the renderer `mathml`."""
  app.add_html_math_renderer('mathml', (_visit(False), None), (_visit(True), None))
  return {'parallel_read_safe': True, 'parallel_write_safe': True}
