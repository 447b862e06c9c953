"""Runs the audit that the explorer shows, and stores its rows and pictures in results/explorer/faces.json.

`PYTHONPATH=. python docs/_ext/explorer_rows.py` takes some ten minutes on two cores.
"""

import json
import pathlib

import jax
import numpy as np

import gradleak as gl
from gradleak.audit import verdict
from gradleak.core.storage import made_folder, write_atomically
from gradleak.report.formatting import together
from gradleak.summary import shown, worst

STORED = pathlib.Path(__file__).parents[2] / 'results' / 'explorer' / 'faces.json'
STRENGTHS = {
  'gaussian(stddev={})': (0.001, 0.003, 0.01, 0.03, 0.1, 0.3),
  'laplace(scale={})': (0.001, 0.003, 0.01, 0.03, 0.1, 0.3),
  'prune(rate={})': (0.5, 0.7, 0.8, 0.9, 0.95, 0.99),
}
ATTACKS = ('csdlg_fast(tv=1e-6,steps=400)', 'dga(steps=100,start=uniform)')
TRIALS, ROUNDS = 3, 16


def rows() -> list[dict]:
  """Returns a row per attack, defense, strength and trial: what an attacker sees who ignores or knows the defense."""
  private, public = gl.data.load('faces', 'test', limit=8), gl.data.load('faces', 'train', limit=100)
  model = gl.models.create('lenet', private.num_classes, init='explicit')
  scenario = gl.scenario(
    model,
    private.samples,
    private.targets,
    key=jax.random.key(0),
    dataset='faces',
    public=(public.samples, public.targets),
    gallery=gl.data.gallery('faces'),
  )
  texts = {text.format(value): (text, value) for text, values in STRENGTHS.items() for value in values}
  defenses = {'none': None} | {text: gl.parse(text) for text in texts}
  attacks = {text: gl.parse(text) for text in ATTACKS}
  result = gl.audit(jax.random.key(1), scenario, defenses, attacks, TRIALS, controls=16, rounds=ROUNDS)
  places = {'none': [(text, 0.0) for text in STRENGTHS]} | {text: [place] for text, place in texts.items()}
  found = []
  for (attack, label, trial), of in together(((r['attack'], r['defense'], r['trial']), r) for r in result.rows).items():
    seen = {row['adaptive']: row for row in of}
    best = max(of, key=lambda row: (-verdict.VERDICTS.index(row['verdict']), row['psnr']))
    image = shown.data_uri(result.truth[trial, 0])
    for text, value in places[label]:
      row = {'attack': attack, 'defense': text.replace('{}', '…'), 'strength': value, 'trial': trial}
      found.append(row | {'private': image, 'ignores': _seen(result, seen[None]), 'knows': _seen(result, best)})
  return sorted(found, key=lambda row: (ATTACKS.index(row['attack']), row['defense'], row['strength'], row['trial']))


def _seen(result: gl.AuditResult, row: dict) -> dict:
  """Returns what one attacker saw of one trial."""
  picture = shown.data_uri(np.nan_to_num(worst.pair(result, row)[1][0], nan=0.5))
  return {'verdict': row['verdict'], 'psnr': round(float(row['psnr']), 1), 'seen': picture}


if __name__ == '__main__':
  gl.configure()
  made_folder(STORED.parent)
  lines = ',\n'.join(json.dumps(row) for row in rows())
  write_atomically(STORED, f'{{"rows": [\n{lines}\n]}}\n')
