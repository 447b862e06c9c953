"""Trains LeNet on digits in a plain optax loop, under OUTPOST.

python examples/train_with_a_defense.py
"""

import jax
import jax.numpy as jnp
import optax

import gradleak as gl

data, model = gl.data.load('digits', 'train'), gl.models.create('lenet(activation=relu)', 10, init='default')
images, labels = jnp.asarray(data.images), jax.nn.one_hot(data.labels, 10)
params = model.init(jax.random.key(0), images.shape[1:])['params']
optimizer = optax.chain(gl.defenses.outpost(noise=0.8), optax.sgd(0.1))
state = optimizer.init(params)


def loss(params, batch):
  logits, _ = model.apply({'params': params}, batch[0])
  return optax.softmax_cross_entropy(logits, batch[1]).mean()


@jax.jit
def step(key, params, state):
  chosen = jax.random.randint(key, (64,), 0, len(images))
  batch = images[chosen], labels[chosen]
  updates, state = optimizer.update(jax.grad(loss)(params, batch), state, params, key=jax.random.fold_in(key, 1))
  return optax.apply_updates(params, updates), state


for i in range(2001):
  params, state = step(jax.random.key(i), params, state)
  if i % 500 == 0:
    test = gl.data.load('digits', 'test')
    logits, _ = model.apply({'params': params}, jnp.asarray(test.images))
    print(f'step {i}: accuracy {(logits.argmax(1) == test.labels).mean():.3f}')
