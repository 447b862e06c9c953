"""Closed forms name pixels: a network that hands them on in another order is refused, and not read as noise."""

import jax
import pytest
from flax import linen as nn

import gradleak as gl


class Net(nn.Module):
  """A dense network on samples that are turned first."""

  turned: str

  @nn.compact
  def __call__(self, images, train=False):
    turns = {
      'as they are': lambda x: x,
      'shifted': lambda x: 2 * x - 1,
      'channels first': lambda x: x.transpose(0, 3, 1, 2),
      'upside down': lambda x: x[:, ::-1],
    }
    x = turns[self.turned](images)
    return nn.Dense(10)(nn.relu(nn.Dense(32)(x.reshape(len(x), -1))))


def attacked(turned, attack):
  images = jax.random.uniform(jax.random.key(0), (4, 4, 4, 3))
  scenario = gl.scenario(gl.models.from_flax(Net(turned)), images, jax.numpy.arange(4), key=jax.random.key(1))
  return gl.audit(jax.random.key(2), scenario, [None], [attack], num_trials=2, controls=2, progress='none')


@pytest.mark.long
@pytest.mark.parametrize('attack', [gl.attacks.fidel(), gl.attacks.peeling(), gl.attacks.spear()], ids=str)
@pytest.mark.parametrize('turned', ['channels first', 'upside down'])
def test_pixels_in_another_order_are_refused(turned, attack):
  with pytest.raises(gl.UsageError, match='value by value, in the order of rows, columns and channels'):
    attacked(turned, attack)


@pytest.mark.long
def test_pixels_in_their_order_are_read():
  assert all(row['psnr'] > 60 for row in attacked('as they are', gl.attacks.fidel()).rows)
  assert len(attacked('shifted', gl.attacks.fidel()).rows) == 2
