"""The page of a sensitivity: its sentences follow from the rows, and it can be read without its pictures."""

import pytest

from gradleak import report
from tests.report.parsing import Page
from tests.test_sensitivity import NOISE, made


def page(psnr, **options):
  found = made(['batch', 'labels'], psnr, **options)
  return Page(report.render_sensitivity(found)), ' '.join(report.sensitivity_findings(found))


@pytest.mark.parametrize(
  ('psnr', 'sentence'),
  [
    (
      lambda dropped: list((5 if 'batch' in dropped else 25) + NOISE),
      'you are protected by batch, not by labels (recovered if back in the laboratory: 8 of 8 with batch).',
    ),
    (
      lambda dropped: list((5 if 'labels' in dropped else 25) + NOISE),
      'you are protected by labels, not by batch (recovered if back in the laboratory: 8 of 8 with labels).',
    ),
    (lambda dropped: list((5 if dropped else 25) + NOISE), 'each of batch and labels lowers the leak.'),
    (lambda dropped: list(25 + NOISE), 'You are not protected: 8 of 8 uploads of production give images away.'),
    (lambda dropped: list(5 + NOISE), 'The attack fails in its own laboratory setting, so nothing is shown'),
  ],
)
def test_the_sentence_follows_from_the_rows(psnr, sentence):
  seen, findings = page(psnr)
  assert sentence in findings
  assert sentence in ' '.join(' '.join(seen.text).split())


def test_pictures_are_told_in_words_and_links_lead_to_audits():
  found = made(
    ['batch', 'labels'], lambda dropped: list((5 if 'batch' in dropped else 25) + NOISE), skipped=['BatchNorm']
  )
  links = {name: f'{place}/report.html' for name, place in found.audits.items() if name != 'labels'}
  seen = Page(report.render_sensitivity(found, links))
  images = seen.attributes('img')
  assert all(image['alt'] for image in images)
  assert 'without batch: 5.1 dB, 0 of 8 recovered' in images[0]['alt']
  assert {link['href'] for link in seen.attributes('a')} == set(links.values())
  assert any('skipped: no meaning here' in ' '.join(row) for row in seen.rows)
  assert 'verdict' in seen.rows[0] and any(row[0] == 'batch' and row[-1] == 'protects' for row in seen.rows)


def test_cautions_follow_from_the_rows():
  found = made(['batch'], lambda dropped: list((5 if dropped else 25) + NOISE))
  assert str(report.sensitivity.cautions(found)[0]).startswith('In 8 of the 16 runs')
  poor = found._replace(accuracy={'own': {'trained': 0.4, 'untrained': 0.3, 'guessing': 0.5}})
  assert any('hardly trained' in str(text) for text in report.sensitivity.cautions(poor))
  assert not any('hardly' in str(text) for text in report.sensitivity.cautions(found))


def test_runs_that_diverged_are_a_caution():
  """Production whose runs all end in NaN had no caution: diverged runs were counted nowhere among them."""
  found = made(['batch'], lambda dropped: list((5 if dropped else 25) + NOISE))
  lost = found._replace(
    rows=[{**one, 'verdict': one['verdict'].replace('inconclusive', 'diverged')} for one in found.rows]
  )
  (told,) = report.sensitivity.cautions(lost)
  assert str(told).startswith('8 of the 16 runs of the waterfall diverged to NaN: not counted as recovered')


def test_an_attack_that_ended_unsolved_is_said_to_have():
  found = made(['batch'], lambda dropped: list((5 if dropped else 25) + NOISE))
  assert 'Against this attack, which ended unsolved in 8 of 8 runs' in report.sensitivity_findings(found)[1]
  solved = found._replace(
    rows=[{**row, 'verdict': row['verdict'].replace('inconclusive', 'nothing seen')} for row in found.rows]
  )
  assert report.sensitivity_findings(solved)[1].startswith('You are protected by batch (')


def test_the_same_result_gives_the_same_page():
  found = made(['batch'], lambda dropped: list(25 + NOISE))
  assert report.render_sensitivity(found) == report.render_sensitivity(found)
