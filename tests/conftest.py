"""Strict settings for all tests, two CPU devices so that sharding is always exercised, and shared fixtures."""

import contextlib
import functools
import gc
import os
import pathlib
import shutil
import subprocess
import sys
import threading
import time
import types

os.environ.setdefault('JAX_PLATFORMS', 'cpu')  # also where there is a GPU; on it: JAX_PLATFORMS=cuda
os.environ.setdefault('OPENBLAS_NUM_THREADS', '1')  # before NumPy: threads that wait take as long as what they wait for
gc.set_threshold(50_000, 20, 20)  # imports and traced programs are many objects, few of them garbage

import jax  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402

jax.config.update('jax_num_cpu_devices', 2)
jax.config.update('jax_numpy_dtype_promotion', 'strict')
jax.config.update('jax_numpy_rank_promotion', 'raise')

# Tests build the same programs again and again: what this run or an earlier one compiled is read back, bit for bit.
# The first process names the folder, which `pytest --cache-clear` empties; its workers inherit the name.
PROGRAMS, MOST_BYTES = pathlib.Path(__file__).parents[1] / '.pytest_cache' / 'd' / 'programs', 2 * 10**9
if 'GRADLEAK_TEST_CACHE' not in os.environ:
  if sum(entry.stat().st_size for entry in (os.scandir(PROGRAMS) if PROGRAMS.is_dir() else ())) > MOST_BYTES:
    shutil.rmtree(PROGRAMS, ignore_errors=True)  # nearly all of it is of code that has changed since
  os.environ['GRADLEAK_TEST_CACHE'] = str(PROGRAMS)
jax.config.update('jax_compilation_cache_dir', os.environ['GRADLEAK_TEST_CACHE'])
jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.1)
jax.config.update('jax_persistent_cache_min_entry_size_bytes', -1)
# Else the folder is a part of each program's key: programs of launch/ in this process name another one.
jax.config.update('jax_persistent_cache_enable_xla_caches', 'none')

# XLA's emitters for fused loops take half of the seconds that it compiles, for programs of which tests run a few steps.
QUICK_XLA = '--xla_cpu_use_fusion_emitters=false', '--xla_cpu_parallel_codegen_split_count=1'

# Of these choices of tests none holds a slow one.
QUICK = 'not slow and not long', 'not slow', 'long and not slow'

# Tests compile much and compute little: without optimisations, programs compile in half the time.
QUICK_JAX = {'jax_persistent_cache_min_compile_time_secs': 0.0, 'jax_disable_most_optimizations': True}


def lower_in_one_context():
  """Lowers the programs of a thread in one MLIR context: a context of its own is a fourth of what a small one takes."""
  from jax._src.interpreters import mlir  # private: another JAX may have none of these names, and lowers as it does

  with contextlib.suppress(AttributeError):
    make, current, own = mlir.make_ir_context, mlir.ir.Context, threading.local()

    def context():
      if current.current is not None:  # a program that is lowered within another one
        return make()
      if not hasattr(own, 'context'):
        own.context = make()
      return own.context

    mlir.make_ir_context = context


def trace_initialisers_once():
  """Lets Flax trace the initialiser of a weight once: to compare shapes, it does so at each call of a network."""
  from flax.core import scope

  @functools.lru_cache(10_000)
  def kept(make, arguments, named):
    return jax.eval_shape(lambda: make(jax.random.key(0), *arguments, **dict(named)))

  def shape(function, *given):
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    held = {name: cell.cell_contents for name, cell in cells}
    try:
      return kept(held['init_fn'], held['init_args'], tuple(held['init_kwargs'].items()))
    except (KeyError, TypeError):  # another function, or arguments without a hash
      return jax.eval_shape(function, *given)

  scope.jax = types.SimpleNamespace(**{**vars(jax), 'eval_shape': shape})


def known_to_xla(flag):
  """Returns whether a process with this flag starts: XLA ends those with a flag that it does not know."""
  starts = [sys.executable, '-c', 'from jaxlib import xla_client; xla_client.make_cpu_client()']
  return not subprocess.run(starts, env={**os.environ, 'XLA_FLAGS': flag}, capture_output=True).returncode


def pytest_collection_finish():
  gc.freeze()  # what is imported stays: going through it again and again would take a tenth of the time


def pytest_addoption(parser):
  parser.addoption('--budget', type=float, help='Minutes after which the remaining tests are skipped; shows progress.')


class Budget:
  """Skips what does not fit into --budget minutes, and says after each test how far the run has come."""

  def __init__(self, minutes):
    self.minutes, self.started, self.total, self.done = minutes, time.monotonic(), 0, 0

  @property
  def elapsed(self):
    """Minutes since the start."""
    return (time.monotonic() - self.started) / 60

  def pytest_collection_finish(self, session):
    self.total = len(session.items)

  def pytest_runtest_setup(self, item):
    del item
    if self.elapsed > self.minutes:
      pytest.skip(f'the budget of {self.minutes:g} minutes is spent')

  def pytest_runtest_logfinish(self, nodeid, location):
    del location
    self.done += 1
    if self.elapsed <= self.minutes:
      print(f'\n{self.done} of {self.total}, {self.elapsed:.0f} of {self.minutes:g} minutes: {nodeid}', flush=True)


def pytest_configure(config):
  # Slow tests compile as a user does, and so does `XLA_FLAGS= pytest`.
  if config.option.markexpr in QUICK and 'XLA_FLAGS' not in os.environ:
    every = ' '.join(QUICK_XLA)
    os.environ['XLA_FLAGS'] = every if known_to_xla(every) else ' '.join(filter(known_to_xla, QUICK_XLA))
    os.environ['GRADLEAK_TEST_QUICK'] = '1'  # workers inherit both
  if 'GRADLEAK_TEST_QUICK' in os.environ:
    lower_in_one_context()
    trace_initialisers_once()
    for name, value in QUICK_JAX.items():
      jax.config.update(name, value)
  if config.getoption('--budget') is not None:
    config.pluginmanager.register(Budget(config.getoption('--budget')))


@pytest.fixture(scope='session')
def digits():
  """All 1,797 digits, float32 [N, 8, 8, 1] in [0, 1], and their labels."""
  from sklearn.datasets import load_digits

  data = load_digits()
  return (data.images[..., None] / 16).astype(np.float32), data.target.astype(np.int32)


@pytest.fixture(scope='session')
def small_images():
  """Eight real 8×8 digits in [0, 1], float32 [8, 8, 8, 1], and their labels."""
  from sklearn.datasets import load_digits

  digits = load_digits()
  return (digits.images[:8, :, :, None] / 16).astype(np.float32), digits.target[:8].astype(np.int32)


@pytest.fixture(scope='module')
def fast_compilation():
  """Compiles so in long runs, too: for tests that run whole audits of a few steps."""
  before = {name: jax.config.values[name] for name in QUICK_JAX}
  for name, value in QUICK_JAX.items():
    jax.config.update(name, value)
  yield
  for name, value in before.items():
    jax.config.update(name, value)


@pytest.fixture(scope='session')
def compilation_cache():
  """The folder of compiled programs that all tests share, for those that start processes of their own."""
  return os.environ['GRADLEAK_TEST_CACHE']


@pytest.fixture(scope='session')
def published_resnet20():
  """The file of Idelbayev's ResNet-20, 1,000 test images of CIFAR-10 and their labels, where they are."""
  folder = pathlib.Path(os.environ.get('GRADLEAK_TEST_DATA', ''))
  weights = folder / 'weights' / 'resnet20_cifar10.npz'
  if not weights.is_file():
    pytest.skip('needs GRADLEAK_TEST_DATA to name a folder that holds weights/resnet20_cifar10.npz and tfds/cifar10')
  import tensorflow_datasets as tfds

  options = {'split': 'test[:1000]', 'download': False, 'builder_kwargs': {'file_format': 'array_record'}}
  examples = list(tfds.data_source('cifar10', data_dir=folder / 'tfds', **options))
  images = np.stack([example['image'] for example in examples]).astype(np.float32) / 255
  return weights, images, np.array([example['label'] for example in examples], np.int32)


@pytest.fixture(scope='session')
def linear(small_images):
  """A scenario that compiles fast: one dense layer on eight 8×8 digits."""
  import gradleak

  model = gradleak.models.from_functions(
    lambda key, _: {'kernel': 0.3 * jax.random.normal(key, (64, 10)), 'bias': jax.numpy.zeros(10)},
    lambda params, images: images.reshape(-1, 64) @ params['kernel'] + params['bias'].reshape(1, -1),
    'linear',
  )
  return gradleak.scenario(model, *small_images, key=jax.random.key(0), dataset='digits')


@pytest.fixture(scope='session')
def network():
  """A LeNet for 8×8 digits and its weights."""
  from gradleak import models

  model = models.create('lenet', 10)
  return model, model.init(jax.random.key(0), (8, 8, 1))
