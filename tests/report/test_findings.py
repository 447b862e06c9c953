import pytest

from gradleak.report import findings

SINGLE = {'batch_size': 1}


def entry(defense='none', recovered=0, n=4, not_solved=0, diverged=0, flags=()):
  return {
    'defense': defense, 'recovered': recovered, 'n': n, 'runs': n, 'not_solved': not_solved, 'diverged': diverged,
    'protected': 0, 'success': recovered / n, 'success_low': 0.1, 'success_high': 0.9, 'attacks': [],
    'flags': list(flags),
  }  # fmt: skip


def summary(attack='dlg', defense='none', recovered=4, psnr=50.14, unfinished=0, diverged=0):
  return {
    'attack': attack, 'defense': defense, 'recovered': recovered, 'n': 4, 'psnr': psnr, 'control_psnr': 9.83,
    'unfinished': unfinished, 'diverged': diverged,
  }  # fmt: skip


def paragraph(worst, summaries=None, config=SINGLE):
  return ' '.join(findings.sentences(summaries or [summary()], worst, config))


def test_undefended_names_the_strongest_attack_with_its_control():
  summaries = [summary('weak', recovered=3, psnr=60.0), summary('dlg', recovered=4), summary('dlg', 'prune', psnr=99.0)]
  text = findings.undefended(summaries, [entry(recovered=4)], SINGLE)
  assert 'recovers 4 of 4 images (95 % interval 10–90 %)' in text
  assert '`dlg` reaches 50.1 dB on average' in text
  assert 'at most 9.8 dB in 95 of 100 cases' in text
  assert 'means little' not in text


def test_a_weak_undefended_baseline_is_said():
  assert 'less than half' in findings.undefended([summary(recovered=1)], [entry(recovered=1)], SINGLE)


@pytest.mark.parametrize(
  ('config', 'n', 'words'),
  [
    (SINGLE, 4, '2 of 4 images ('),
    ({'batch_size': 8}, 4, '2 of 4 batches of 8 images ('),
    (SINGLE, 1, '1 of 1 image ('),
    ({'batch_size': 8}, 1, '1 of 1 batch of 8 images ('),
  ],
)
def test_units(config, n, words):
  assert words in findings.undefended([summary()], [entry(recovered=min(2, n), n=n)], config)


@pytest.mark.parametrize('worst', [[entry(), entry('prune')], [entry('prune')]])
def test_no_defense_is_credited_where_the_undefended_run_fails_or_is_missing(worst):
  text = paragraph(worst)
  assert 'proves nothing' in text or 'nothing here shows' in text
  assert 'singles' not in text
  assert '`prune`' not in text


def test_defenses_are_grouped_by_what_was_found():
  worst = [
    entry(recovered=4),
    entry('prune', recovered=3),
    entry('laplace'),
    entry('topk', not_solved=2, diverged=1),
    entry('noop', recovered=4, flags=['defense changed nothing']),
  ]
  leaking, withstood, unsolved, idle = findings.defended(worst, SINGLE)
  assert leaking == 'With a defense, it still recovers 3 of 4 under `prune` (10–90 %).'
  assert withstood.startswith('Under `laplace` none of the 4 images is recovered (10–90 %), although')
  assert unsolved.startswith('Under `topk` none of the 4 images is recovered, but 3 of 4 runs failed')
  assert unsolved.endswith('this does not show that it protects.')
  assert idle.startswith('`noop` changed nothing')


def test_not_solved_is_never_called_protection():
  worst = [entry(recovered=4), entry('prune', not_solved=1), entry('laplace', not_solved=4)]
  (text,) = findings.defended(worst, SINGLE)
  assert '`prune` and `laplace`' in text
  assert '1 of 4 and 4 of 4 runs' in text
  assert text.endswith('does not show that they protect.')
  assert 'no protection at all' in findings.caution(worst)
  assert 'not solved' not in findings.caution([entry(recovered=4)])


def test_cautions():
  worst = [entry(recovered=4)]
  controls = [{'attack': 'dlg'}] * 64
  assert findings.cautions([summary()], worst, controls) == []
  (few,) = findings.cautions([summary()], worst, controls[:63])
  assert '63 runs for `dlg`' in few
  (bare,) = findings.cautions([summary()], worst, [])
  assert 'Without a null-gradient control' in bare
  unfinished, diverged = findings.cautions([summary(unfinished=1, diverged=2)], worst, controls)
  assert '1 recovered run ' in unfinished
  assert '2 runs diverged' in diverged
  (failing,) = findings.cautions([summary(), summary('gs', recovered=0)], worst, controls + [{'attack': 'gs'}] * 64)
  assert '`gs`' in failing
  assert '`dlg`' not in failing
