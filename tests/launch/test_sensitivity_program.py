"""The sensitivity program: on the faces in full, and what it refuses."""

import json
import re

import pytest

from tests import programs


def test_what_it_refuses(tmp_path):
  done = programs.start('sensitivity', '--trials=40', '--progress=none', f'--workdir={tmp_path}/new')
  assert done.status == 2 and '40 trials of 4 images need 160, there are 100' in done.err
  assert not (tmp_path / 'new').exists()


@pytest.mark.slow
def test_the_faces(tmp_path):
  done = programs.start('sensitivity', '--progress=none', '--compilation_cache=', f'--workdir={tmp_path}/new')
  assert done.status == 0, done.err
  rows = [json.loads(line) for line in (tmp_path / 'new' / 'rows.jsonl').read_text('utf-8').splitlines()]
  recovered = {name: sum(r['recovered'] for r in rows if r['setting'] == name) for name in {r['setting'] for r in rows}}
  assert recovered['laboratory'] == 8 > recovered['production']
  page = (tmp_path / 'new' / 'sensitivity.html').read_text('utf-8')
  assert 'In the laboratory setting 8 of 8 uploads give images away' in page
  assert f'in production {recovered["production"]} of 8' in re.sub(r'\s+', ' ', page)
