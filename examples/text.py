"""Audits what one update of a small language model gives away of a patient note, without a defense and under two.

python examples/text.py
"""

import jax

import gradleak as gl

private = gl.data.load('notes', 'test', limit=4)
public = gl.data.load('notes', 'train', limit=200)
vocabulary = private.known['vocabulary']
model = gl.models.gpt(vocabulary, 'default', **private.known, width=32, layers=1, heads=2, head='next')

scenario = gl.scenario(
  model,
  private.samples,
  private.targets,
  key=jax.random.key(0),
  modality=gl.modalities.of_config(private.settings),
  loss='next_token',
  public=(public.samples, public.targets),
  gallery=gl.data.gallery('notes'),
  dataset='notes',
)
defenses = [None, gl.defenses.gaussian(stddev=0.01), gl.defenses.dpsgd(norm=0.1, noise=0.1)]
attack = gl.attacks.tag(steps=300, decay='cosine')
result = gl.audit(jax.random.key(1), scenario, defenses, [attack], num_trials=4, workdir='results/text')
gl.report.write(result, 'results/text')
print(gl.report.terminal_table(result), '\n\nreport: results/text/report.html')
