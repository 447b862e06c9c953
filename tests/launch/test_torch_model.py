"""Networks of PyTorch in the programs."""

import sys
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
from absl import flags as absl_flags

import gradleak as gl
from launch import _flags
from tests import programs

NETWORK = """
from torch import nn


def net():
  return nn.Sequential(nn.Conv2d(1, 4, 3, 2, 1), nn.BatchNorm2d(4), nn.Sigmoid(), nn.Flatten(), nn.Linear(64, 10))
"""


@pytest.mark.parametrize(
  ('text', 'part'),
  [
    ('mine', 'expected package.module:Class, as in mine.networks:Net'),
    ('no_such_module:Net', "makes no network: ModuleNotFoundError: No module named 'no_such_module'"),
    ('math:nothing', 'makes no network: AttributeError'),
    ('math:pi', 'makes no network: TypeError'),
  ],
)
def test_what_makes_no_network_is_refused(text, part):
  with pytest.raises(gl.UsageError) as error:
    _flags.made(text)
  assert str(error.value).startswith(f'--torch_model={text}') and part in str(error.value)


def test_a_function_a_class_or_an_object_makes_the_network(tmp_path, monkeypatch):
  (tmp_path / 'made_here.py').write_text(
    'class Net:\n  state_dict = None\n\n\ndef net():\n  return Net()\n\n\nnow = Net()\n'
  )
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr(sys, 'path', list(sys.path))
  assert {type(_flags.made(f'made_here:{name}')).__name__ for name in ('Net', 'net', 'now')} == {'Net'}
  assert sys.path[-1] == str(tmp_path)


def test_numbers_of_a_normalisation():
  assert _flags.numbers('torch_mean', '0.5, 1') == [0.5, 1.0] and _flags.numbers('torch_mean', None) is None
  with pytest.raises(gl.UsageError, match='--torch_mean=x, expected a number for each channel'):
    _flags.numbers('torch_mean', 'x')


@pytest.mark.parametrize(
  ('flags', 'part'),
  [
    (['--torch_std=1'], '--torch_std is for --torch_model, which is missing'),
    (['--torch_model=mine:Net', '--model=lenet'], '--model is for the networks of --model, and not for --torch_model'),
    (['--torch_model=mine:Net', '--init=default'], '--init is for the networks of --model'),
  ],
)
@pytest.mark.parametrize('program', ['audit', pytest.param('train', marks=pytest.mark.slow)])
def test_flags_of_other_networks_are_refused(program, flags, part, tmp_path):
  done = programs.start(program, f'--workdir={tmp_path}/new', *flags)
  assert (done.status, done.out) == (2, '') and part in done.err.splitlines()[-1]


@pytest.mark.parametrize('flag', ['num_classes=99', 'flattened=channels_last'])
def test_what_the_weights_of_a_network_of_pytorch_tell_is_refused(flag, tmp_path):
  flags = '--torch_model=mine:Net', '--weights=w.pt', '--update=u.npz', '--sample_shape=8,8,1', '--progress=none'
  done = programs.start('attack', *flags, f'--{flag}', f'--workdir={tmp_path}/new')
  assert done.status == 2 and f'--{flag.partition("=")[0]} is for the networks of --model' in done.err


def test_the_help_says_that_it_runs_code():
  done = programs.start('audit', '--help')
  assert "and so runs the user's code, as no file's does" in ' '.join(done.out.split())


def send(tmp_path, monkeypatch, module, source, loss):
  """Writes weights.pt and update.npz of the network `net()` of a module, whose loss `loss(torch, network)` is."""
  torch = pytest.importorskip('torch', reason='PyTorch is not installed')
  (tmp_path / f'{module}.py').write_text(source)
  monkeypatch.syspath_prepend(str(tmp_path))
  monkeypatch.chdir(tmp_path)
  torch.manual_seed(0)
  network = __import__(module).net()
  torch.save(network.state_dict(), tmp_path / 'weights.pt')
  loss(torch, network).backward()
  np.savez(tmp_path / 'update.npz', **{name: one.grad.numpy() for name, one in network.named_parameters()})


@pytest.mark.slow
def test_an_update_of_a_network_of_pytorch_is_attacked_by_a_program(tmp_path, monkeypatch):
  send(tmp_path, monkeypatch, 'my_networks', NETWORK, lambda torch, net: net(torch.rand(1, 1, 8, 8)).square().sum())
  done = programs.start(
    'attack', '--torch_model=my_networks:net', '--weights=weights.pt', '--update=update.npz', '--sample_shape=8,8,1',
    '--attacks=csdlg(steps=3)', '--controls=2', '--labels=3', '--torch_mean=0.1', '--torch_std=0.9', '--progress=none',
    f'--workdir={tmp_path}/found',
  )  # fmt: skip
  assert done.status == 0 and 'csdlg(steps=3)' in done.out, done.err


TABLE = """
from torch import nn


def net():
  return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
"""


@pytest.mark.slow
def test_a_network_of_pytorch_takes_numbers_as_the_schema_scales_them(tmp_path, monkeypatch):
  """A client takes (age − 40) / 100, and sizes as they are."""
  row = [[(71 - 40) / 100, 2.75, 0.0, 1.0]]
  send(
    tmp_path, monkeypatch, 'of_tables', TABLE,
    lambda torch, net: torch.nn.functional.cross_entropy(net(torch.tensor(row)), torch.tensor([1])),
  )  # fmt: skip
  rng = np.random.default_rng(0)
  known = [f'{rng.integers(20, 80)},{rng.normal(5, 2):.3f},{"fm"[i % 2]},{i % 3 == 0:d}' for i in range(60)]
  (tmp_path / 'known.csv').write_text('\n'.join(['age,size,sex,ill', *known]))
  (tmp_path / 'schema.json').write_text('{"columns": {"age": {"center": 40, "scale": 100}, "size": {"scale": 1}}}')
  done = programs.start(
    'attack', '--torch_model=of_tables:net', '--weights=weights.pt', '--update=update.npz', '--attacks=fidel',
    '--dataset=table:known.csv', '--schema=schema.json', '--controls=1', f'--workdir={tmp_path}/found',
  )  # fmt: skip
  assert done.status == 0 and 'fidel, row 1: age: 71, size: 2.75, sex: m' in done.out, done.err


TOKENS = """
from torch import nn


def net():
  return nn.Sequential(nn.Embedding(30, 4), nn.Flatten(), nn.Linear(24, 3))
"""


@pytest.mark.long
def test_a_network_for_texts_is_exported_on_tokens(tmp_path, monkeypatch):
  pytest.importorskip('torch', reason='PyTorch is not installed')
  (tmp_path / 'of_tokens.py').write_text(TOKENS)
  monkeypatch.syspath_prepend(str(tmp_path))
  module, flags = programs._load('epsilon')
  with mock.patch.object(absl_flags, 'FLAGS', flags):
    flags(['epsilon', '--torch_model=of_tokens:net'])
    module._GIVEN.known = {'vocabulary': 30, 'padding': 0, 'length': 6}
    assert module._GIVEN.network(3, (6,)).vocabulary == 30
    flags.unparse_flags()


@pytest.mark.parametrize('program', ['audit', 'epsilon', 'identify', 'sensitivity', 'train'])
def test_programs_of_all_samples_take_all_flags_of_reading_them(program):
  given = programs._load(program)[0]._GIVEN
  missing = {*_flags.OPTIONS} - {*given.defined()}
  assert missing <= {'limit'}


@pytest.mark.long
def test_a_sweep_draws_the_weights_of_a_network_of_pytorch_by_its_seeds(tmp_path, monkeypatch):
  torch = pytest.importorskip('torch', reason='PyTorch is not installed')
  (tmp_path / 'of_seeds.py').write_text(NETWORK.replace('def net', 'def seeded'))
  monkeypatch.syspath_prepend(str(tmp_path))
  module, flags = programs._load('sweep')
  dataset, found = gl.data.load('digits', limit=1), {}

  def kept(audits, *others, **more):
    found.update(audits)
    raise InterruptedError

  with mock.patch.object(absl_flags, 'FLAGS', flags), mock.patch.object(module, 'sweep', kept):
    flags(['sweep', '--torch_model=of_seeds:seeded', '--seeds=3;5', '--dataset=digits', '--trials=1', '--public=0'])
    monkeypatch.setattr(module._audited, 'load', lambda given: (given.fit(dataset), (dataset, None))[1])
    with pytest.raises(InterruptedError):
      module.main(None)
    flags.unparse_flags()
  assert len({id(scenario.client.model) for _, scenario in found.values()}) == 1 and len(found) == 2
  for seed, (_, scenario) in zip((3, 5), found.values(), strict=True):
    torch.manual_seed(seed)
    bias = __import__('of_seeds').seeded()[4].bias.detach().numpy()
    np.testing.assert_array_equal(scenario.variables['params']['4']['bias'], bias)


@pytest.mark.parametrize('program', ['attack', 'audit', 'autoleak', 'epsilon', 'identify', 'sensitivity', 'train'])
def test_programs_of_one_network_take_those_of_pytorch(program):
  assert {*_flags.NETWORK} <= {*programs._load(program)[0]._GIVEN.defined()}
  assert {*_flags.NETWORK} - {'model'} <= {*programs._load('sweep')[0]._GIVEN.defined()}


def test_what_repeats_an_entry_names_no_other_network():
  """A network of PyTorch has neither --model nor --init, and both are refused beside it."""
  module, flags = programs._load('autoleak')
  with mock.patch.object(absl_flags, 'FLAGS', flags):
    flags(['autoleak', '--torch_model=mine:Net'])
    known = module._command(SimpleNamespace(settings={'init': 'mine:Net'}, public=None))
    flags.unparse_flags()
  assert known['torch_model'] == 'mine:Net' and not {'model', 'init'} & set(known)
