"""Audits a table of your own: columns of all kinds, with gaps, from a dict, a pandas frame or a CSV file.

python examples/table.py
"""

import jax
import numpy as np

import gradleak as gl

rng = np.random.default_rng(0)
age = rng.integers(18, 90, 400)
columns = {
  'age': age,
  'department': rng.choice(['cardiology', 'oncology', 'surgery', 'urology'], 400),
  'smoker': np.where(rng.random(400) < 0.3, 'yes', 'no'),
  'stage': rng.choice(['I', 'II', 'III'], 400),
  'creatinine': np.where(rng.random(400) < 0.1, np.nan, rng.lognormal(0, 0.4, 400).round(2)),
}
ill = np.where(age + rng.normal(0, 20, 400) > 60, 'yes', 'no')
known = {'stage': {'kind': 'ordinal', 'levels': ['I', 'II', 'III']}}  # all else is inferred
private, public = (
  gl.data.table(columns, ill, split=split, given=known, sensitive=['department', 'smoker', 'stage'], name='patients')
  for split in ('test', 'train')
)
scenario = gl.scenario(
  gl.models.mlp(2, 'default', widths='100-100'),
  private.samples,
  private.targets,
  key=jax.random.key(0),
  modality=gl.modalities.of_config(private.settings),
  public=(public.samples[:100], public.targets[:100]),
  dataset='patients',
)
attacks = [gl.attacks.peeling(), gl.attacks.tableak(steps=300, seeds=4)]
result = gl.audit(jax.random.key(1), scenario, [None, gl.defenses.gaussian(stddev=0.05)], attacks, 4, batch_size=4)
print(gl.report.terminal_table(result))
gl.report.write(result, 'results/patients')
