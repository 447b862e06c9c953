"""Trains LeNet on digits in a plain optax loop, under OUTPOST.

python examples/train_with_a_defense.py
"""

import jax
import jax.numpy as jnp
import optax

import gradleak as gl

data, model = gl.data.load('digits', 'train'), gl.models.create('lenet(activation=relu)', 10, init='default')
params = model.init(jax.random.key(0), data.samples.shape[1:])['params']
optimizer = optax.chain(gl.defenses.outpost(noise=0.8, prune=0.8), optax.sgd(0.1))
state = optimizer.init(params)


@jax.jit
def step(key, params, state):
  chosen = jax.random.randint(key, (64,), 0, len(data.samples))
  samples, targets = jnp.asarray(data.samples)[chosen], jnp.asarray(data.targets)[chosen]

  def loss(params):
    return optax.softmax_cross_entropy_with_integer_labels(model.apply({'params': params}, samples)[0], targets).mean()

  updates, state = optimizer.update(jax.grad(loss)(params), state, params, key=jax.random.fold_in(key, 1))
  return optax.apply_updates(params, updates), state


for i in range(2000):
  params, state = step(jax.random.key(i), params, state)
test = gl.data.load('digits', 'test')
logits, _ = model.apply({'params': params}, jnp.asarray(test.samples))
print(f'accuracy on {len(test.targets)} test digits: {(logits.argmax(1) == test.targets).mean():.1%}')
