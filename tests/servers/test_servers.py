"""What all malicious servers have in common: their contract, and the attacks that name them."""

import jax
import numpy as np
import pytest

from gradleak import servers
from gradleak.core import errors
from gradleak.servers import Observed, one_round


def test_one_round_returns_what_came_back(linear):
  seen = []

  def prepare(key, scenario, batch_size):
    seen.append((key, batch_size))
    return scenario._replace(variables=jax.tree.map(lambda x: 2 * x, scenario.variables))

  server = one_round(prepare)
  sent = server.prepare('key', linear, 5)
  state = server.init(sent, 5)
  assert seen == [('key', 5)] and server.rounds == 1 and not server.finished(state)
  asked = server.send(state)
  jax.tree.map(lambda got, honest: np.testing.assert_array_equal(got, 2 * honest), asked, linear.variables)
  update = jax.tree.map(np.ones_like, asked['params'])
  after = server.receive(state, update)
  assert server.finished(after) and not server.finished(state)  # states are not changed
  assert server.observed(after) == Observed(asked, update)


@pytest.mark.parametrize('name', servers.REGISTRY)
def test_attacks_know_their_server_and_source(name):
  make = servers.REGISTRY[name]
  attack = make()
  assert attack.name == name and attack.citation and attack.server.kind == 'server'
  assert set(attack.server.settings) <= set(attack.settings)
  assert attack.server == make().server and hash(attack.server) == hash(make().server)
  setting = {'imprint': {'bins': 7}, 'trap': {'scale': 0.5}, 'decepticons': {'mark': 0.3}}.get(name, {'target': 4})
  assert make(**setting).server != attack.server and make(**setting).server.settings.items() >= setting.items()
  built = attack.server.build(attack.server.numbers)
  assert isinstance(built, servers.Server) and built.rounds == (64 if name == 'feature_fishing' else 1)
  with pytest.raises(errors.UsageError, match='unknown setting'):
    make(depth=3)
