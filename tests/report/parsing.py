"""Reads a page as a browser would."""

import html.parser

VOID = {'meta', 'img', 'br', 'link', 'input', 'hr', 'wbr', 'line', 'circle', 'rect'}


class Page(html.parser.HTMLParser):
  """Reads a page: its tags with attributes, the text of every table row and heading; fails on tags that do not nest."""

  def __init__(self, source):
    super().__init__()
    self.tags, self.rows, self.headings, self.open, self.text = [], [], [], [], []
    self.feed(source)
    self.close()
    assert not self.open

  def handle_starttag(self, tag, attributes):
    self.tags.append((tag, dict(attributes)))
    if tag not in VOID:
      self.open.append(tag)
    if tag == 'tr':
      self.rows.append([])
    if tag in ('td', 'th'):
      self.rows[-1].append('')
    if tag == 'h2':
      self.headings.append('')

  def handle_startendtag(self, tag, attributes):
    self.tags.append((tag, dict(attributes)))

  def handle_endtag(self, tag):
    assert self.open.pop() == tag

  def handle_data(self, data):
    data = data.replace('\N{NO-BREAK SPACE}', ' ')
    if 'style' in self.open or 'svg' in self.open:
      return
    self.text.append(data)
    if 'td' in self.open or 'th' in self.open:
      self.rows[-1][-1] += data
    if 'h2' in self.open:
      self.headings[-1] += data

  def attributes(self, tag):
    return [attributes for name, attributes in self.tags if name == tag]
