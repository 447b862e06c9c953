"""What ours is compared with attacks the same: the same gradient, objective and first step, from the same start."""

import jax
import numpy as np
import pytest

from benchmarks import pytorch, setting
from gradleak import data, registry

pytestmark = pytest.mark.usefixtures('fast_compilation')


@pytest.fixture(scope='module')
def torch():
  return pytest.importorskip('torch', reason='PyTorch is not installed')


def make(spec, steps=8):
  """Returns a setting of one trial on a 20×20 face in colour, and the PyTorch network of the same weights."""
  images = data.load('faces', limit=1, image_size=20, channels=3)
  ours = setting.make(spec, 'csdlg', steps, images, 1)
  scenario = ours.scenario
  network = pytorch.prepare(spec, scenario.client.model, scenario.variables, (20, 20, 3), scenario.client.num_classes)
  trial = pytorch.Trial(ours.truth()[0], int(scenario.targets[0]), setting.starts(ours)[0])
  return ours, network.cpu(), trial


DEEP = [pytest.param(spec, marks=pytest.mark.slow) for spec in ('convnet(width=2)', 'resnet18(width=2)')]
MODELS = ['mlp', 'lenet', 'lenet4(activation=tanh)', *DEEP]


@pytest.mark.parametrize('spec', MODELS)
def test_the_gradient_is_ours(torch, spec):
  ours, network, trial = make(spec)
  update = jax.tree.map(lambda x: x[0], ours.shared[1])
  expected = pytorch.arrays(network, ours.scenario.client.model, update, (20, 20, 3))
  found = pytorch.gradient(network, pytorch.tensor(trial.image, 'cpu'), torch.tensor([trial.label]))
  expected, found = (np.concatenate([np.asarray(x).ravel() for x in tree]) for tree in (expected, found))
  assert np.linalg.norm(found - expected) <= 1e-4 * np.linalg.norm(expected)


@pytest.mark.parametrize('spec', MODELS[1:])  # of this network's face, mlp's gradient is zero
def test_the_first_objective_and_step_are_ours(torch, spec):
  ours, network, trial = make(spec)

  def one(shared, lane):
    attack, key, observation = ours.build(shared, lane)
    state, info = attack.step(attack.init(key, observation), observation)
    return info['objective'], state.dummy['images']

  objective, images = one(ours.shared, jax.tree.map(lambda x: x[0], ours.lanes))
  found = pytorch.attack(network, trial, pytorch.Settings(8, 0.1, 1e-4), 'cpu')
  assert found.objective == pytest.approx(float(objective), rel=1e-4)
  start = pytorch.tensor(trial.start, 'cpu').requires_grad_()
  label = torch.tensor([trial.label])
  observed = pytorch.gradient(network, pytorch.tensor(trial.image, 'cpu'), label)
  value = pytorch.objective(network, start, label, [g.detach() for g in observed], 1e-4)
  (slope,) = torch.autograd.grad(value, start)
  stepped = np.clip(trial.start - 0.1 * np.sign(slope[0].permute(1, 2, 0).numpy()), 0, 1)
  assert np.mean(np.abs(stepped - np.asarray(images)[0]) < 1e-4) > 0.99  # a slope of nearly zero has any sign


def test_it_recovers_as_ours_does(torch):
  ours, network, trial = make('lenet', steps=60)
  found = pytorch.attack(network, trial, pytorch.settings(ours.method, 60), 'cpu')
  mine = setting.run(ours, 1, 1, jax.local_devices()[:1], compared=1)
  assert ours.psnr(found.image[np.newaxis]) == pytest.approx(ours.psnr(mine.samples), abs=1)


def test_breaching_attacks_the_same(torch):
  pytest.importorskip('hydra', reason='breaching is not installed')
  from benchmarks import breaching

  try:
    breaching.package()
  except pytorch.Unavailable as error:
    pytest.skip(str(error))
  ours, network, trial = make('lenet')
  settings = pytorch.settings(ours.method, 8)
  theirs, mine = (module.attack(network, trial, settings, 'cpu') for module in (breaching, pytorch))
  assert theirs.objective == pytest.approx(mine.objective, rel=2e-3)  # its total variation sees zeros beyond the border
  assert ours.psnr(theirs.image[np.newaxis]) == pytest.approx(ours.psnr(mine.image[np.newaxis]), abs=0.5)


@pytest.mark.parametrize('spec', ['cnn', 'lenet+precode(size=8)', 'resnet18(norm=group)'])
def test_what_the_loop_does_not_have_is_said(torch, spec):
  with pytest.raises(pytorch.Unavailable, match='the loop has no'):
    pytorch.network(spec, 10, (20, 20, 3))


@pytest.mark.parametrize('attack', ['dlg', 'csdlg(optimizer=sgd)'])
def test_an_attack_that_the_loop_is_not_is_said(attack):
  with pytest.raises(pytorch.Unavailable, match='the loop is csdlg'):
    pytorch.settings(registry.attack(attack), 10)
