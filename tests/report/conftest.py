"""A made-up audit in the shape of a real one: 4 trials, 2 attacks × 4 defenses, with every verdict among them."""

import numpy as np
import pytest

from gradleak import AuditResult, report
from tests.report.facts import methods

ATTACKS = ('dlg(history=100)', 'csdlg(tv=1e-4)')
DEFENSES = ('none', 'prune(rate=0.9)', 'laplace(scale=0.1)', 'prune(rate=0.99)+gaussian(stddev=0.01)')
# Per defense: how much noise is mixed into the truth (dlg, csdlg), the final objective over the truth's, the change.
OUTCOMES = {
  'none': ((0.01, 0.04), 0.1, 0.0),
  'prune(rate=0.9)': ((0.08, 0.3), 0.95, 0.42),
  'laplace(scale=0.1)': ((1.0, 1.0), 0.5, 3.1),
  'prune(rate=0.99)+gaussian(stddev=0.01)': ((1.0, 1.0), 4.0, 0.97),
  'clip(norm=1)+gaussian(stddev=2)': ((1.0, 1.0), 0.5, 3.1),
}
SENT = {'prune(rate=0.9)': 0.1, 'prune(rate=0.99)+gaussian(stddev=0.01)': 0.0125}
# Who knows a defense, {adaptive attack: as above}: one does worse than another on `prune`, one breaks what stopped the
# others (by one attack of two), and all fail at the last.
ADAPTIVE = {
  'none': {},
  'prune(rate=0.9)': {'masked': ((0.06, 0.2), 0.95), 'masked+prior': ((0.02, 0.1), 0.95)},
  'laplace(scale=0.1)': {'floor': ((1.0, 1.0), 0.5), 'prior': ((1.0, 0.3), 0.5)},
  'prune(rate=0.99)+gaussian(stddev=0.01)': {'masked': ((1.0, 1.0), 4.0)},
}
OWN_CONTROL = 1.5  # dB by which the control of an adaptive attack with another prior lies above that of the attack
CONTROL_PSNR = {'dlg(history=100)': 10.4, 'csdlg(tv=1e-4)': 11.2}


def digits(trials, batch=1, side=16):
  from sklearn.datasets import load_digits

  images = load_digits().images[: trials * batch] / 16
  return np.kron(images, np.ones((side // 8, side // 8))).reshape(trials, batch, side, side, 1).astype(np.float32)


def decibels(image, truth):
  return float(-10 * np.log10(np.mean((np.clip(image, 0, 1) - truth) ** 2)))


def threshold(attack, adaptive):
  return CONTROL_PSNR[attack] + OWN_CONTROL * ('prior' in (adaptive or ''))


def make(
  truth,
  attacks=ATTACKS,
  defenses=DEFENSES,
  diverged=(('csdlg(tv=1e-4)', 'prune(rate=0.9)', 2),),
  controls=64,
  adaptive=None,
  non_adaptive=True,
):
  """Returns an `AuditResult` for `truth` [T, B, H, W, C].

  `diverged` lists (attack, defense, trial); `adaptive` holds adaptive attacks, and without `non_adaptive` these stand
  alone.
  """
  known = adaptive or {}
  rng = np.random.default_rng(0)
  trials, batch = truth.shape[:2]
  steps = np.unique(np.geomspace(1, 1000, 60).astype(int)) - 1
  rows, reconstructions, curves = [], {}, {}
  for attack in attacks:
    for defense, adaptive in [(d, c) for d in defenses for c in (None, *known.get(d, {}))]:
      if adaptive is None and known.get(defense) and not non_adaptive:
        continue
      (mixes, end, change) = OUTCOMES[defense]
      mixes, end = (mixes, end) if adaptive is None else known[defense][adaptive]
      key = (attack, defense) if adaptive is None else (attack, defense, adaptive)
      mix = mixes[ATTACKS.index(attack)]
      noise = rng.uniform(size=truth.shape) if mix == 1 else rng.normal(0.5, 0.5, truth.shape)
      images = ((1 - mix) * truth + mix * noise).astype(np.float32)
      at_truth = 0.002 * (1 + change) * rng.uniform(0.9, 1.1, trials)
      fall = 1 + 900 * np.exp(-np.sqrt(steps) / 2.5) * rng.uniform(0.6, 1.6, (trials, 1))
      objective = (at_truth * end * rng.uniform(0.7, 1.3, trials))[:, np.newaxis] * fall
      for t in range(trials):
        gone = (*key, t) in diverged
        if gone:
          images[t] = np.nan
          objective[t, 30:] = np.nan
        psnr = None if gone else float(np.mean([decibels(images[t, b], truth[t, b]) for b in range(batch)]))
        error = None if gone else float(np.mean((np.clip(images[t], 0, 1) - truth[t]) ** 2))
        success = psnr is not None and psnr > threshold(attack, adaptive)
        solved = not gone and bool(objective[t, -1] <= at_truth[t])
        verdict = 'diverged' if gone else 'exact' if success else 'nothing seen' if solved else 'inconclusive'
        rows.append(
          {
            'dataset': 'digits', 'model': 'lenet', 'init': 'explicit', 'attack': attack, 'defense': defense, 'trial': t,
            'seed': 0, 'batch_size': batch, 'restarts': 2, 'labels': 'known', 'mse': error, 'psnr': psnr,
            'ssim': None if gone else 0.98 - mix - t / 100, 'pearson': None if gone else 0.98 - mix**2 - t / 100,
            'mse_unclipped': error, 'psnr_unclipped': psnr, 'label_correct': 1.0,
            'objective': None if gone else float(objective[t, -1]),
            'distance': None if gone else float(objective[t, -1]), 'objective_start': float(objective[t, 0]),
            'objective_at_truth': float(at_truth[t]), 'oracle_psnr': None if gone else psnr + 0.5,
            'control_psnr': threshold(attack, adaptive), 'control_pearson': 0.5,
            'success': success, 'solved': solved, 'verdict': verdict,
            'knowledge': 'non-adaptive' if adaptive is None else 'adaptive', 'adaptive': adaptive, 'rounds': 1,
            'control': False,
            'diverged': gone, 'diverged_step': 412 if gone else None, 'steps': 1000, 'change': change,
            'sent': SENT.get(defense, 1.0), 'tier': 'B', 'rank': None if gone else 1 if success else 30,
            'candidates': 1000,
          }
        )  # fmt: skip
      reconstructions[key], curves[key] = images, (steps, objective)
  return AuditResult(
    resumed=False,
    config={
      'dataset': 'digits', 'split': 'all', 'model': 'lenet', 'init': 'explicit', 'num_classes': 10,
      'image_shape': list(truth.shape[2:]), 'attacks': list(attacks), 'defenses': list(defenses), 'trials': trials,
      'restarts': 2, 'steps': 1000, 'batch_size': batch, 'labels': 'known', 'seed': 0, 'local_epochs': 1,
      'share': 'gradient', 'batch_norm': 'none', 'controls': controls,
      **({'knowledge': 'both' if non_adaptive else 'adaptive'} if known else {}),
    },
    rows=rows,
    controls=[
      {
        **rows[0], 'attack': attack, 'defense': 'null_gradient', 'trial': 1000 + i, 'control': True,
        'verdict': 'inconclusive', 'success': False, 'solved': False, 'diverged': False,
        'control_psnr': threshold(attack, pool), 'control_pearson': 0.5, 'revealed': 0, 'recognised': 0,
        'identified': 0, 'knowledge': 'non-adaptive', 'adaptive': None,
        'psnr': float(rng.normal(threshold(attack, pool) - 2.5, 1.5)),
        'ssim': 0.05, 'mse': 0.2, 'pearson': 0.02, 'change': 1.4,
      }
      for attack in attacks for i in range(controls) for pool in (('', 'prior') if known else ('',))
    ],
    truth=truth,
    reconstructions=reconstructions,
    curves=curves,
    inspections={a: ['The biases of the last layer lie far apart.'] if i else [] for i, a in enumerate(attacks)},
    adaptive_attacks={d: {c: f'It does {c} to {d}.' for c in found} for d, found in known.items() if d in defenses},
    methods=methods(attacks, defenses),
    threat_models={
      attack: [
        'The server is honest but curious: it sends the genuine model and reads what comes back.',
        'It sees the gradient of one step on the private samples, as the client sent it.',
        'It is given the true labels of the private samples.',
        'It does not know which defense the client uses, and ignores it.',
      ]
      for attack in attacks
    },
    versions={'gradleak': '0.1.0', 'jax': '0.10.2', 'python': '3.11.2', 'platform': 'Linux x86_64', 'device': 'cpu'},
    seconds=83.2,
  )  # fmt: skip


@pytest.fixture(scope='session')
def result():
  return make(digits(4))


@pytest.fixture(scope='session')
def both():
  """Non-adaptive and adaptive attackers."""
  return make(digits(4), adaptive=ADAPTIVE)


@pytest.fixture(scope='session')
def source_of_both(both):
  """Their page."""
  return report.render(both)


@pytest.fixture(scope='session')
def knowing():
  """Adaptive attackers; non-adaptive ones only where there is no adaptive attack."""
  return make(digits(4), adaptive=ADAPTIVE, non_adaptive=False, diverged=())


@pytest.fixture(scope='session')
def build():
  """The maker itself, for other shapes: `build(trials=…, batch=…, **settings of make)`."""
  return lambda trials=4, batch=1, **settings: make(digits(trials, batch), **settings)
