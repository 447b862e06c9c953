"""TAG here and in breaching: the same network, gradient, start, objective and first steps."""

import jax
import numpy as np
import pytest

import gradleak as gl

pytestmark = pytest.mark.usefixtures('fast_compilation')


@pytest.fixture(scope='module')
def made():
  pytest.importorskip('torch', reason='PyTorch is not installed')
  from benchmarks import tag

  with pytest.MonkeyPatch.context() as patched:
    for name, size in {'WIDTH': 16, 'HEADS': 2, 'LAYERS': 1, 'LENGTH': 8}.items():
      patched.setattr(tag, name, size)
    yield tag.batches(2, 2, 12, 1)


def test_both_have_the_same_network_and_gradient(made):
  import torch

  texts, labels = made.texts[0], made.labels[0]
  outputs = made.network(torch.tensor(texts))
  np.testing.assert_allclose(
    made.client.model.apply(made.variables, texts, False, None)[0], outputs.detach(), atol=1e-5
  )
  loss = torch.nn.functional.cross_entropy(outputs, torch.tensor(labels).long())
  theirs = torch.autograd.grad(loss, made.network.parameters())
  ours = jax.tree.leaves(made.client.local_update(None, made.variables, texts, labels).update)
  assert sum(float(np.sum(np.square(x))) for x in ours) == pytest.approx(
    sum(float((x * x).sum()) for x in theirs), 1e-4
  )


def test_breaching_takes_the_same_steps(made):
  pytest.importorskip('hydra', reason='breaching is not installed')
  from benchmarks import breaching, pytorch, tag

  try:
    breaching.package()
  except pytorch.Unavailable as error:
    pytest.skip(str(error))
  method = gl.attacks.tag(steps=made.steps, learning_rate=tag.RATE, alpha=tag.ALPHA, relaxation='embeddings')
  build, lanes, _ = tag._build(made, method)
  attack, key, seen = build(made.variables, jax.tree.map(lambda x: x[0], lanes))
  state, objectives = attack.init(key, seen), []
  for _ in range(4):
    state, info = attack.step(state, seen)
    objectives.append(float(info['objective']))
  found, values = tag.one(made, made.texts[0], made.labels[0], tag.starts(made, method)[0], made.steps)
  assert found.shape == (2, 8) and len(values) == made.steps and objectives[3] != pytest.approx(objectives[0])
  np.testing.assert_allclose(2 * np.asarray(values[:4]), objectives, rtol=1e-3)


def test_what_is_measured_is_the_same_batches(made):
  from benchmarks import tag

  figures = tag.ours(made, gl.attacks.tag(steps=made.steps))()
  (right,) = figures['tokens']
  assert figures['seconds'] > 0 and 0 <= right <= 1
  watch = tag.pytorch.Stopwatch('cpu')
  assert made.figures(made.texts, watch)['tokens'] == [1]
  assert made.figures([made.texts[0], made.texts[0]], watch)['tokens'] == [1]  # the first alone is compared
  assert made.figures([made.texts[1], made.texts[1]], watch)['tokens'][0] < 1
