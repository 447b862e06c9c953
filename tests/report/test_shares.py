"""What a defense costs beside what each attacker sees: the figure of a leaderboard's task."""

import json

from gradleak.report import figures
from gradleak.report.shares import ATTACKERS, failed, shares, shares_picture
from gradleak.studies.autoleak import leaderboard
from tests.leaderboards import COMMAND, found

COSTS = {'prune(rate=0.9)': (1.5, 'Table 2', (0.5, 2.5))}


def entries(costs=None, **settings):
  return leaderboard.entries(found(**settings), COMMAND, costs)


def test_each_attacker_has_a_share_of_its_own():
  none, prune, laplace = entries(named={'prune(rate=0.9)': [0, 3], 'laplace(scale=0.1)': []})
  assert len(shares(none)) == len(ATTACKERS)
  assert shares(none) == [(4, 4), (4, 4), None, (0, 4)], 'no ranking was run, and malicious servers come above chance'
  assert shares(prune) == [(2, 4), (2, 4), (2, 4), (0, 4)], 'one of three is re-identified by likelihood alone'
  assert shares(laplace) == [(0, 4), (0, 4), (0, 4), (0, 4)]
  assert shares(entries(malicious=False)[0])[-1] is None


def test_a_picture_needs_a_cost_and_shows_it():
  assert shares_picture(entries()) is None
  drawn = shares_picture(entries(COSTS))
  assert drawn.startswith(b'\x89PNG') and figures.width(drawn) > 1000
  other = shares_picture(entries({'prune(rate=0.9)': (9.0, 'Table 2')}))
  assert other != drawn == shares_picture(entries(COSTS)[::-1]), 'the order is that of the costs'
  seen = entries(COSTS, named={'prune(rate=0.9)': [0, 3]})
  assert shares_picture(seen) not in (drawn, other)


def test_a_share_of_attacks_that_failed_is_hollow():
  """0 of 100 samples were drawn like a defense that hides them, where the attacks had failed on all."""
  made = entries(COSTS)
  hollow = [{**made[0]}, {**made[1]}, {**made[2], 'honest': {**made[2]['honest'], 'failed': 4}}]
  solid = [*made[:2], {**made[2], 'honest': {**made[2]['honest'], 'failed': 0}}]
  assert failed(hollow[2])[:2] == [True, True] and not any(failed(solid[2]))
  assert shares_picture(hollow) != shares_picture(solid)


def test_the_page_of_a_leaderboard_has_it():
  from gradleak.report import render_leaderboard

  page = render_leaderboard({leaderboard.name(entry): json.loads(json.dumps(entry)) for entry in entries(COSTS)})
  assert 'the share of samples that each attacker sees' in page
  alone = render_leaderboard({leaderboard.name(entry): entry for entry in entries()})
  assert 'the share of samples' not in alone
