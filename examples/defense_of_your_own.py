"""A defense of your own, of which an audit knows as much as of ours: its noise, source and ε, and who attacks it.

python examples/defense_of_your_own.py
"""

import jax
import optax

import gradleak as gl


@gl.defenses.defense(
  place='upload',
  random=True,  # so that attackers average repeated uploads
  citation='You: Noise on a Grid. 2026.',
  noise=gl.defenses.Noise(lambda settings, context, num_samples: settings['stddev'] ** 2),
  mechanism=lambda settings, norm, position: norm and gl.defenses.Mechanism(settings['stddev'] / norm, 'client'),
  post_processing=True,
)
def grid_noise(*, stddev: float, grid: float = 1e-3):
  """Adds Gaussian noise and rounds to multiples of `grid`. Strengths annotated float share one compilation."""

  def update(updates, state, params=None, *, key, **extra):
    noise = optax.tree.random_like(key, updates)
    return jax.tree.map(lambda x, n: grid * jax.numpy.round((x + stddev * n) / grid), updates, noise), state

  return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)


@gl.adaptive.adaptive_to(grid_noise)
def smoothness(case):
  return [case.known.changed('smooth', 'It weights smoothness by a hundredth.', prior=0.01)]


data, model = gl.data.load('digits', limit=200), gl.models.create('mlp(widths=64)', 10)
scenario = gl.scenario(model, data.samples, data.targets, key=jax.random.key(0), dataset='digits')
mine = [gl.defenses.chain(gl.defenses.clip(norm=1), grid_noise(stddev=stddev)) for stddev in (0.01, 0.1, 1)]
result = gl.audit(jax.random.key(1), scenario, [None, *mine], [gl.attacks.csdlg()], 2, steps=200, controls=8, rounds=4)
print(gl.report.terminal_table(result), *gl.report.wording.citations(result.methods), sep='\n')
