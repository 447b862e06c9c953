"""CITATION.cff names this version and this licence, and the papers as the methods do."""

import pytest
import yaml

import gradleak as gl
from tests.programs import ROOT

METHODS = {
  'FFL': gl.defenses.fragmentation.traits.citation,
  'Fidel': gl.attacks.fidel().citation,
  'GradDefense': gl.defenses.graddefense.traits.citation,
  'OUTPOST': gl.defenses.outpost.traits.citation,
  'DCS²': gl.defenses.concealment.traits.citation,
}


@pytest.fixture(scope='module')
def content():
  return yaml.safe_load((ROOT / 'CITATION.cff').read_text('utf-8'))


def test_it_has_what_the_format_requires(content):
  assert {'cff-version', 'message', 'title', 'authors'} <= set(content)
  assert content['cff-version'] == '1.2.0' and content['type'] == 'software' and content['title'] == 'gradleak'
  assert [author['name'] for author in content['authors']] == ['The gradleak developers']
  assert all({'type', 'title', 'authors', 'year'} <= set(paper) for paper in content['references'])


def test_version_and_licence_are_those_of_the_package(content):
  assert content['version'] == gl.__version__
  assert f"license='{content['license']}'" in (ROOT / 'setup.py').read_text('utf-8')


def test_papers_are_cited_as_by_their_methods(content):
  cited = []
  for paper in content['references']:
    venue = paper.get('collection-title') or (
      f'{paper["journal"]}, {paper["year"]}' if 'journal' in paper else paper['year']
    )
    names = ', '.join(author['family-names'] for author in paper['authors'])
    cited.append(f'{names}: {paper["title"]}. {venue}.')
  assert cited == list(METHODS.values())
