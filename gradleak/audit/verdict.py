"""What the figures of one run amount to: recovered, protected, not solved, or diverged."""

CONTROL = 'null_gradient'
# The Pearson correlation at which a quarter of an image's variance is explained.
RECOGNISABLE = 0.5


def judge(row: dict, control_psnr: float, control_revealed: float = 0.0) -> dict:
  """Returns a row's `control_psnr`, `success`, `solved` and `verdict`.

  A trial is a success beyond the 95th percentile of the control pool, if it also correlates with the truth by at least
  `RECOGNISABLE`: attacks whose control ends in noise of full contrast would otherwise call milder noise a recovery. So
  is a batch of which more images are fully revealed than the 95th percentile of the control reveals
  (`control_revealed`), however bad the others are: closed forms give some images exactly and nothing of the rest.

  It is solved when the attacker did as well on its own objective as the truth would (a failure then is the defense's
  merit), or, for a success, when 99.9 % of the descent from the start to the truth is done; less means that the leak is
  at least this.
  """
  close = row['psnr'] > control_psnr and row['pearson'] >= RECOGNISABLE
  success = bool(close or row.get('revealed', 0) > control_revealed) and not row['diverged']
  gap = row['objective'] - row['objective_at_truth']
  tolerance = (
    1e-3 * (row['objective_start'] - row['objective_at_truth']) if success else 1e-6 * abs(row['objective_at_truth'])
  )
  solved = bool(gap <= tolerance)
  if row['diverged']:
    verdict = 'diverged'
  elif success:
    verdict = 'recovered'
  else:
    verdict = 'protected' if solved else 'not solved'
  return {'control_psnr': control_psnr, 'success': success, 'solved': solved, 'verdict': verdict}


def require_undefended_recovery(rows: list[dict], undefended: set[str]) -> list[dict]:
  """Returns one attack's rows; 'protected' becomes 'not solved' on trials that the attack fails without a defense, too.

  Args:
    rows: of one attack.
    undefended: the labels of the entries that are no defense.
  """
  failing = {row['trial'] for row in rows if row['defense'] in undefended and row['verdict'] != 'recovered'}

  def credited(row: dict) -> dict:
    undeserved = row['verdict'] == 'protected' and row['trial'] in failing and not row['control']
    return {**row, 'verdict': 'not solved'} if undeserved else row

  return [credited(row) for row in rows]
