"""The flags that programs share, each declared once, those of settings objects, and what they name.

This module imports gradleak only where a program runs.
"""

import dataclasses
import functools
import importlib.util
import json
import os
import sys
import types
import typing
from collections.abc import Mapping
from typing import Any

import numpy as np
from absl import flags

from launch import _program

_KINDS = {str: 'string', int: 'integer', float: 'float'}
# Name -> (kind, default, help).
SHARED: dict[str, tuple[str, Any, str]] = {
  'dataset': (
    'string', 'faces',
    'faces, digits, folder:PATH (split/label/*.png|jpg), or a TFDS name; tables: breast_cancer, diabetes, table:PATH '
    '(CSV); texts: notes, text:PATH (.txt, .tsv, .csv).',
  ),
  'split': ('string', 'test', 'Split that the private samples come from; the first ones are taken.'),
  'shuffle': (
    'boolean', False,
    'Draw the private samples from the whole split, the same for each seed, in place of its first ones.',
  ),
  'data_dir': ('string', None, 'Folder with prepared TFDS datasets (launch/prepare_data.py).'),
  'limit': ('integer', None, 'Take the first samples alone, of each split.'),
  'image_size': ('integer', None, 'Resize images to this many pixels on a side.'),
  'channels': ('integer', None, '1: convert to grey, 3: to RGB.'),
  'largest_pixel': (
    'float', None, 'Value in the files that is 1, as 4095 for 12 bits; by default the largest of their type.'
  ),
  'label': ('string', None, 'table:PATH: column of the class; by default the one of --schema, or the last.'),
  'tokeniser': ('string', 'words', 'Of texts: words, bytes, bpe:SIZE (trained on train), or a tokenizer.json.'),
  'length': ('integer', None, 'Of texts: tokens that are kept; 24 words, 128 bytes, or 32 of others by default.'),
  'schema': ('string', None, 'table:PATH: JSON file on columns: kinds, levels, the label, which are sensitive.'),
  'trials': ('integer', 8, 'Uploads attacked per defense.'),
  'public': ('integer', 100, 'Public samples for defenses and attackers, from the split train (test for train).'),
  'model': (
    'string', 'lenet',
    'mlp, cnn, lenet, lenet4, convnet, convnet9, resnet18, resnet20, resnet34, resnet50, resnet56, resnet101, '
    "resnet152, vgg11, vgg16, vit_tiny, vit_small; for tables also logistic, "
    "resnet_mlp, ft_transformer; settings as in 'convnet(width=8)'.",
  ),
  'torch_model': (
    'string', None,
    'package.module:Class of a PyTorch network of your own, in place of --model; the class, or a function, is called '
    "without arguments. This imports the module, and so runs the user's code, as no file's does.",
  ),
  'torch_mean': ('string', None, 'Mean of each channel, by which images in [0, 1] are normalised for it: 0.5,0.5,0.5.'),
  'torch_std': ('string', None, 'Deviation of each channel, likewise.'),
  'init': ('string', 'explicit', 'explicit: U(-0.5, 0.5), as in DLG; default: U(±1/√fan_in), as PyTorch.'),
  'weights': (
    'string', None,
    "File with the model's weights, by the names of PyTorch or of this model (numpy.savez, safetensors, torch.save); "
    'they are drawn without it.',
  ),
  'attacks': (
    'string', 'csdlg(tv=1e-6)',
    "List separated by ';', with settings: dlg, idlg, csdlg, csdlg_fast, csdlg_lbfgs, ladder, annealed, dga, gia, gs, "
    'magia, cinet, ggl, gias, gifd, pnp, bayes, lti; closed forms: fidel, peeling, residual_peeling, spear, april; of '
    'tables: tableak, linear; of texts: tag, lamp, span; of malicious servers: imprint, trap, class_fishing, '
    'feature_fishing, decepticons (texts).',
  ),
  'defenses': (
    'string', 'none',
    "List separated by ';'; '+' composes a chain: prune(rate=0.9)+laplace(scale=0.001); '|' spans a grid: "
    'gaussian(stddev=0.01|0.1).',
  ),
  'seed': ('integer', 0, 'Seed of all that is random: weights, draws, noise, starts.'),
  'workdir': ('string', None, 'Folder for rows, pictures, the report and checkpoints.'),
  'progress': ('string', 'auto', 'auto, bar, lines or none.'),
  'x64': ('boolean', False, 'float64 throughout: for closed forms alone.'),
  'group_size': ('integer', None, 'Trials, or clients, that share one pass; changes speed, and bits.'),
  'cluster': (
    'string', None,
    'Where processes share the work: local (several on this machine, by Ray), ray (the cluster of this machine), '
    'ray://host:port, or slurm (an array job).',
  ),
  'cores': ('integer', None, 'CPU cores of each process; all by default, with --cluster 8 or what there is for each.'),
  'gpus': ('float', None, 'cluster: GPUs of each process, or the part of one; by default one where there is any.'),
  'retries': ('integer', 8, 'cluster: how often a process whose machine was lost is started again.'),
  'slurm': ('string', '', 'cluster=slurm: options of sbatch, such as partition=gpu,time=480.'),
  'compilation_cache': (
    'string', os.path.join(os.path.expanduser('~'), '.cache', 'gradleak'),
    "JAX's persistent compilation cache; empty for none.",
  ),
}  # fmt: skip
NETWORK = ('model', 'torch_model', 'torch_mean', 'torch_std')  # which network it is
IMAGE_OPTIONS = ('data_dir', 'image_size', 'channels', 'largest_pixel')  # how images are read
OPTIONS = (*IMAGE_OPTIONS, 'limit', 'label', 'schema', 'tokeniser', 'length')  # how data are read
# Flags of clients that share their delta: they have no meaning, and no defaults, for a shared gradient.
_LOCAL = ('local_epochs', 'local_batch_size', 'momentum', 'weight_decay')


class Flags:
  """The flags of a program; each one's value is an attribute of its name."""

  def __init__(self) -> None:
    self._holders: dict[str, flags.FlagHolder] = {}
    self._fitting: dict[str, Any] = {}  # defaults that suit what is audited

  def __getattr__(self, name: str) -> Any:
    if name.startswith('_') or name not in self._holders:
      raise AttributeError(f'no flag {name!r} was defined')
    if name in self._fitting and not self.present(name):
      return self._fitting[name]
    return self._holders[name].value

  def __contains__(self, name: str) -> bool:
    return name in self._holders

  def defined(self) -> list[str]:
    """Returns the names of the flags."""
    return list(self._holders)

  def present(self, name: str) -> bool:
    """Returns whether the user gave a flag."""
    return self._holders[name].present

  def fit(self, dataset: Any, *, keep: tuple[str, ...] = ()) -> None:
    """Lets flags that are not given have the defaults that suit the samples of a dataset, where these have their own.

    A program whose own list of defenses does not begin with none takes them without it.

    Args:
      dataset: the samples.
      keep: flags whose defaults are the program's own.
    """
    import gradleak as gl

    own = dict(gl.modalities.of_config(dataset.settings).defaults)
    own |= {'models': own['model']} if 'model' in own else {}
    usual = self._holders['defenses'].value if 'defenses' in self else ''
    if ';' not in usual:  # a program that audits none by itself
      own.pop('defenses', None)
    elif 'defenses' in own and not usual.startswith('none'):
      own['defenses'] = own['defenses'].removeprefix('none;')
    if 'attacks' in self and not self._holders['attacks'].value:  # a program that attacks nothing by itself
      own = {name: value for name, value in own.items() if name not in ('attacks', 'steps')}
    self._fitting = {name: value for name, value in own.items() if name in self and name not in keep}
    self.columns, self.known, self.scaling = dataset.columns, dict(dataset.known), dataset.scaling
    head = gl.losses.as_loss(self.loss).own if 'loss' in self else ''
    if head:  # the outputs of the network are tokens
      self.known['head'] = head.removesuffix('_token')

  known: Mapping[str, Any] = types.MappingProxyType({})  # settings of a network that the data tell

  def outputs(self, dataset: Any) -> int:
    """Returns how many outputs a network has for the loss of the flags: classes, or tokens that it predicts."""
    return self.known['vocabulary'] if 'vocabulary' in self.known and 'head' in self.known else dataset.num_classes

  columns: tuple[int, ...] = ()  # entries of each column of a table
  scaling: tuple | None = None  # by which a network takes the numbers of a table, see `Dataset.scaling`

  def define(self, kind: str, name: str, default: Any, text: str) -> None:
    """Defines a flag of a kind of absl's."""
    self._holders[name] = getattr(flags, f'DEFINE_{kind}')(name, default, text)

  string = functools.partialmethod(define, 'string')
  integer = functools.partialmethod(define, 'integer')
  float = functools.partialmethod(define, 'float')
  boolean = functools.partialmethod(define, 'boolean')

  def shared(self, *names: str, **changed: Any) -> None:
    """Defines flags of `SHARED`; `changed` has another default of some, or (default, help)."""
    for name in names:
      kind, *declared = SHARED[name]
      given = changed.get(name, declared[0])
      self.define(kind, name, *(given if isinstance(given, tuple) else (given, declared[1])))

  def settings(self, settings: type, *, without: tuple[str, ...] = (), **defaults: Any) -> None:
    """Defines a flag for each field of a settings dataclass, with its help text and its default.

    Args:
      settings: the dataclass, its fields made by `gradleak.core.settings.setting`.
      without: fields without a flag.
      **defaults: replace some of its defaults.
    """
    for field in dataclasses.fields(settings):
      if field.name not in without:
        default = defaults.get(field.name, field.default)
        self.define(_KINDS[_plain(field.type)], field.name, default, field.metadata['help'])

  def made(self, settings: type, **changes: Any) -> Any:
    """Returns the settings object that the flags describe, some fields replaced."""
    names = [field.name for field in dataclasses.fields(settings)]
    return settings(**{**{name: getattr(self, name) for name in names if name in self}, **changes})

  def client(self) -> Any:
    """Returns the `ClientSettings`; those of a shared gradient without the program's defaults of local training."""
    import gradleak as gl

    if self.share != 'gradient':
      return self.made(gl.ClientSettings)
    defaults = gl.ClientSettings()
    return self.made(gl.ClientSettings, **{name: getattr(defaults, name) for name in _LOCAL if not self.present(name)})

  def configure(self) -> None:
    """Configures JAX, before anything is computed, and checks the seed and the mode of progress."""
    import gradleak as gl
    from gradleak.core import errors
    from gradleak.engine import progress

    given = {name: getattr(self, name) for name in ('x64', 'cores') if name in self}
    gl.configure(cache=self.compilation_cache, **given)
    if 'seed' in self:
      errors.check_number('seed', self.seed, low=0, high=2**32 - 1, integer=True)
    progress.reporter(self.progress)

  def options(self) -> dict[str, Any]:
    """Returns the arguments of `gradleak.data.load` that are flags of this program; --label goes into the schema.

    Raises:
      UsageError: for --data_dir beside a dataset that is not read from it, and as `table_files.known_of` does.
    """
    from gradleak.data import table_files

    found = {name: getattr(self, name) for name in OPTIONS if name in self}
    check_data_dir(self.dataset, found.get('data_dir'))
    label = found.pop('label', None)
    if label is not None:
      found['schema'] = json.dumps({**table_files.known_of(found['schema']), 'label': label})
    return found

  def gallery_options(self) -> dict[str, Any]:
    """Returns the arguments of `gradleak.data.gallery` that are flags of this program."""
    return {name: value for name, value in self.options().items() if name != 'limit'}

  def images_alone(self, dataset: Any) -> None:
    """Raises `UsageError` for a dataset of other samples than images, which this program does not take."""
    from gradleak.core import errors

    if dataset.settings:
      raise errors.UsageError(f'this program is for images, and {dataset.name} holds others: take gradleak audit')

  def read(self, split: str, **options: Any) -> Any:
    """Returns the samples of a split, and writes what a user may not expect of them to standard error."""
    import gradleak as gl

    dataset = gl.data.load(self.dataset, split, **{**self.options(), **options})
    for note in dataset.notes:
      _program.say(f'note: {note}')
    return dataset

  def network(
    self, num_classes: int, sample_shape: tuple[int, ...], seed: int | None = None, name: str | None = None
  ) -> Any:
    """Returns the `Model` of the flags --model and --init, or of --torch_model, which scales numbers as --schema says.

    Args:
      num_classes: number of logits; a network of PyTorch has its own.
      sample_shape: (H, W, C), for a network of PyTorch.
      seed: of the weights of a network of PyTorch; None for that of the flag --seed, if there is one.
      name: of a network that stands in for --model.

    Raises:
      UsageError: for flags of one network where the other is given, and for a module that is not found.
    """
    import gradleak as gl

    made = self._network(num_classes, sample_shape, seed, name)
    return made if self.scaling is None else gl.models.standardised(made, *self.scaling)

  def _network(self, num_classes: int, sample_shape: tuple[int, ...], seed: int | None, name: str | None) -> Any:
    """Returns what `network` does, which takes samples as they are."""
    import gradleak as gl

    if not self.torch_model:
      self.refuse_beside('--torch_model, which is missing', 'torch_mean', 'torch_std')
      init = {'init': self.init} if 'init' in self else {}
      return gl.models.create(name or self.model, num_classes, **init, columns=self.columns, known=self.known)
    own = [name for name in ('model', 'models', 'init') if name in self]
    self.refuse_beside(f'the networks of --{own[0]}, and not for --torch_model', *own)
    module = self._drawn(seed)
    mean, std = (numbers(name, getattr(self, name)) for name in ('torch_mean', 'torch_std'))
    _program.say(f'exporting {self.torch_model} …')
    rng = np.random.default_rng(0)
    example: Any = rng.random((4, *sample_shape), np.float32)
    if 'vocabulary' in self.known:
      example = rng.integers(self.known['vocabulary'], size=example.shape, dtype=np.int32)
    return gl.models.from_torch(module, example, mean=mean, std=std)[0]

  def _drawn(self, seed: int | None) -> Any:
    """Returns the module of --torch_model; what it draws is of a seed, or else of the flag --seed, if there is one."""
    seed = self.seed if seed is None and 'seed' in self else seed
    if seed is not None and importlib.util.find_spec('torch'):
      importlib.import_module('torch').manual_seed(seed)
    return made(self.torch_model)

  def torch_variables(self, model: Any, sample_shape: tuple[int, ...], seed: int) -> Any:
    """Returns the variables of the module of --torch_model as it is made anew under a seed.

    Args:
      model: what `network` made of it, under any seed.
      sample_shape: (H, W, C).
      seed: of what the module draws.

    Raises:
      UsageError: for a module that is not found, or whose tensors are others than those of the model.
    """
    import gradleak as gl

    return gl.read_weights(dict(self._drawn(seed).state_dict()), model, sample_shape)

  def refuse_beside(self, what: str, *names: str) -> None:
    """Raises `UsageError` where one of these flags is given, which are for something else."""
    from gradleak.core import errors

    for name in names:
      if self.present(name):
        raise errors.UsageError(f'--{name} is for {what}')

  def variables(self, model: Any, dataset: Any, samples: tuple | None, kind: str) -> dict | None:
    """Returns the variables in the file of --weights, None without one, and says how often they decide rightly.

    Args:
      model: the `Model` whose weights they are.
      dataset: what it is for.
      samples: (samples, targets) on which the accuracy is measured, or None.
      kind: what these are called.

    Raises:
      UsageError: for a file that does not hold weights of this model, and with a flag of how they are drawn.
    """
    import gradleak as gl
    from gradleak.core import errors
    from gradleak.core.statistics import percent
    from gradleak.federated.simulation import judged

    if not self.weights:
      return None
    if self.present('init'):
      raise errors.UsageError('--weights are those of a file, and --init says how weights are drawn: give one of them')
    variables = gl.read_weights(self.weights, model, dataset.samples.shape[1:])
    modality = gl.modalities.of_config(dataset.settings)
    client = dataclasses.replace(self.client().client(model, self.outputs(dataset)), modality=modality)
    if samples is not None and client.loss.targets.decide is not None:
      decided, right, *_ = judged(client, variables, *samples)
      of = f'{len(samples[0]):,} {kind} {modality.noun[1]}'
      _program.say(f'accuracy with the weights of {self.weights}: {percent((decided == right).mean())}, of {of}')
    return variables

  def weights_described(self) -> dict[str, str]:
    """Returns `{'init': the rule, or the module of PyTorch}`, or `{'weights': the name of the file}`."""
    if 'weights' in self and self.weights:
      return {'weights': os.path.basename(self.weights)}
    return {'init': self.torch_model if 'torch_model' in self and self.torch_model else self.init}


def made(text: str) -> Any:
  """Returns what package.module:Class makes, or what stands there; the current folder is searched last."""
  from gradleak.core import errors

  module, _, name = text.partition(':')
  if not module or not name:
    raise errors.UsageError(f'--torch_model={text}, expected package.module:Class, as in mine.networks:Net')
  if os.getcwd() not in sys.path:
    sys.path.append(os.getcwd())
  try:
    found = importlib.import_module(module)
    for part in name.split('.'):
      found = getattr(found, part)
    return found() if isinstance(found, type) or not hasattr(found, 'state_dict') else found
  except Exception as error:  # the user's code may raise anything
    raise errors.UsageError(f'--torch_model={text} makes no network: {type(error).__name__}: {error}') from error


def check_data_dir(dataset: str, data_dir: str | None) -> None:
  """Raises `UsageError` for a folder of prepared datasets beside one that is not read from it."""
  from gradleak import data
  from gradleak.core import errors

  if data_dir is not None and not data.is_tfds(dataset):
    raise errors.UsageError(
      f'--data_dir is the folder of prepared TFDS datasets, and {errors.shown(dataset)} is read elsewhere: leave it out'
    )


def check_outputs(scenario: Any, number: int) -> None:
  """Raises `UsageError` where the network of a `Scenario` does not have as many logits as the data have classes."""
  from gradleak.core import errors

  client = scenario.client
  if client.loss.activation == 'softmax' and client.num_classes != number:
    raise errors.UsageError(
      f'the model {client.model.name!r} has {client.num_classes} logits, the data {number} classes'
    )


def numbers(name: str, text: str | None) -> list[float] | None:
  """Returns the numbers of a flag, separated by commas."""
  from gradleak.core import errors

  if text is None:
    return None
  try:
    return [float(part) for part in text.split(',')]
  except ValueError as error:
    raise errors.UsageError(f'--{name}={text}, expected a number for each channel, as in 0.5,0.5,0.5') from error


def _plain(annotation: Any) -> type:
  """Returns the type of a field that may be None."""
  if isinstance(annotation, types.UnionType):
    return next(one for one in typing.get_args(annotation) if one is not type(None))
  return annotation
