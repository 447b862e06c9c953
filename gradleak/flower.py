"""Flower: what a client app is sent and what leaves it, recorded; and the client audited as a black box.

It needs the extra `flower`. Nothing else in gradleak imports it: `import gradleak.flower`.
"""

import dataclasses
import importlib
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gradleak.core import errors
from gradleak.core.trees import Tree
from gradleak.defenses.defense import as_defense
from gradleak.defenses.text import parse
from gradleak.engine.parts import told
from gradleak.engine.progress import callback, computing
from gradleak.federated import ClientSettings
from gradleak.federated.losses import as_loss
from gradleak.frameworks import opacus
from gradleak.frameworks.comparison import Comparison, compare
from gradleak.frameworks.exchange import Exchange, read, write
from gradleak.modalities import IMAGES, Modality
from gradleak.models import Model
from gradleak.models.model import check_model, outputs_shape
from gradleak.models.torch import to_torch
from gradleak.models.torch_weights import without_prefixes
from gradleak.studies.captured import Captured, attack

__all__ = ['Audit', 'Exchange', 'audit', 'read', 'record', 'recorded', 'update_of', 'weights_of']

_TRAIN = 'train'
_DIFFERENCE = 0.1  # of the norm of what was sent, below which what came back is no weights, but their difference
# Settings of `gradleak.attack`.
_OF_ATTACKS = {'attacks', 'labels', 'restarts', 'steps', 'controls', 'modality', 'workdir', 'progress'}


@dataclasses.dataclass(frozen=True)
class Audit:
  """A client of Flower, audited as a black box.

  Attributes:
    comparison: the client beside the simulated one, see `frameworks.comparison.Comparison`.
    client: the `ClientSettings` that attacks simulate: those that were given, or with what explains a difference.
    captured: what the attacks made of its update, see `gradleak.attack`; None where they were not run.
    exchange: the training that was attacked.
  """

  comparison: Comparison
  client: ClientSettings
  captured: Captured | None
  exchange: Exchange

  def __str__(self) -> str:
    words = self.comparison.words
    if self.captured is not None and not self.comparison.agrees:
      changed = any(one.changes for one in self.comparison.explanations)
      words = (*words, f'Attacks simulate the client {"with that" if changed else "as it was given"}.')
    return ' '.join(words)


def record(folder: Any) -> Callable:
  """Returns a client mod that writes what each training was sent, and what leaves the client.

  Put it first: `ClientApp(mods=[record('folder'), LocalDpMod(…)])`. The first mod is the outermost. It meets what the
  mods behind it return, with clipping and noise. Under secure aggregation no weights leave; the mod then writes the
  facts, and no arrays. A reply that is an error is passed on.

  Args:
    folder: where exchanges are written, see `read`; `gradleak.read_update` reads their files.

  Raises (from the mod):
    OSError: where the folder cannot be written.
  """

  def mod(message: Any, context: Any, call_next: Callable) -> Any:
    sent = _arrays(message)  # before the app may change them
    reply = call_next(message, context)
    if message.metadata.message_type.partition('.')[0] == _TRAIN and not reply.has_error():
      write(folder, Exchange(sent, _arrays(reply), {**_facts(message, reply), 'node': str(context.node_id)}))
    return reply

  return mod


def recorded(strategy: Any, folder: Any) -> Any:
  """Returns a strategy that does what another does, and writes what the server sends and receives in training.

  Args:
    strategy: a `flwr.serverapp.strategy.Strategy`. Wrap the outermost one: wrappers for differential privacy clip what
      they receive.
    folder: as `record` takes it.

  Raises:
    UsageError: for another object, such as a strategy of `flwr.server.strategy`.
  """
  base = _flwr('serverapp.strategy').Strategy
  if not isinstance(strategy, base):
    raise errors.UsageError(
      f'the strategy is {errors.shown(strategy)}, expected one of flwr.serverapp.strategy; with those of '
      'flwr.server.strategy, record at the clients by the mod record(folder)'
    )

  class Recorded(base):  # type: ignore[misc, valid-type]
    """The strategy with a record of what it sends and receives."""

    def __init__(self) -> None:
      self.messages: dict[int, Any] = {}

    def configure_train(self, server_round: int, arrays: Any, config: Any, grid: Any) -> Iterable:
      messages = list(strategy.configure_train(server_round, arrays, config, grid))
      self.messages = {message.metadata.dst_node_id: message for message in messages}
      return messages

    def aggregate_train(self, server_round: int, replies: Iterable) -> tuple:
      replies = list(replies)
      for reply in replies:
        node = reply.metadata.src_node_id
        if not reply.has_error() and node in self.messages:
          facts = {**_facts(self.messages[node], reply), 'round': server_round, 'node': str(node)}
          write(folder, Exchange(_arrays(self.messages[node]), _arrays(reply), facts))
      return strategy.aggregate_train(server_round, replies)

    def configure_evaluate(self, server_round: int, arrays: Any, config: Any, grid: Any) -> Iterable:
      return strategy.configure_evaluate(server_round, arrays, config, grid)

    def aggregate_evaluate(self, server_round: int, replies: Iterable) -> Any:
      return strategy.aggregate_evaluate(server_round, replies)

    def summary(self) -> None:
      strategy.summary()

  return Recorded()


def audit(
  client_fn: Callable,
  samples: Any,
  targets: Any,
  model: Model,
  variables: Mapping,
  *,
  key: Any = None,
  config: Mapping[str, Any] | None = None,
  run_config: Mapping[str, Any] | None = None,
  client: ClientSettings | None = None,
  defense: Any = None,
  **given: Any,
) -> Audit:
  """Calls a client's training on chosen samples, compares it with the simulated client, and attacks what it returns.

  The client is a black box: it is sent weights, and returns weights. It is called twice or more, see
  `frameworks.comparison.compare`. Attacks then run on the update of the first call, with the samples as the truth.
  Where another setting explains a difference, they simulate the client with that.

  Args:
    client_fn: (samples, targets) -> a `ClientApp`, a `Client` or a `NumPyClient` that trains on these samples alone.
      They are tensors of PyTorch: images float32 [N, C, H, W] in [0, 1], not normalised, as torchvision's `ToTensor`
      makes them; rows float32 [N, D]; texts int64 [N, T]; targets int64 [N].
    samples, targets: the samples, floats [N, H, W, C] in [0, 1] or what the modality takes, and integers [N].
    model, variables: of `gradleak.models.from_torch(module, …, mean=, std=)`; the weights that the client is sent.
    key: a typed JAX key for the attacks; None compares without an attack.
    config: what the server sends with the weights, such as {'lr': 0.01}.
    run_config: the configuration of the run, which an app reads from its context.
    client: how the simulated client trains. Its fields may be given as keyword arguments: learning_rate, momentum,
      local_epochs, local_batch_size and others; share is 'delta'.
    defense: what the client is known to use, of `gradleak.defenses`, or as a text. It is simulated, and attackers who
      know it run. DP-SGD of Opacus is recognised without it.
    **given: fields of `ClientSettings`, and what else `gradleak.attack` takes: attacks, labels, restarts, steps,
      controls, workdir, progress, and modality, which is what a sample is: of a dataset
      `gradleak.modalities.of_config(dataset.settings)`.

  Raises:
    UsageError: for a client that returns an error, other arrays than it was sent, or another number of samples; for a
      model that is not of PyTorch, or takes other samples; for samples, labels or settings out of range; for
      `share='gradient'`, since a Flower client returns weights; and as `gradleak.attack` does.
  """
  check_model(model)
  _layout(model)
  modality = given.get('modality', IMAGES)
  samples, targets = _samples(samples, targets, model, modality)
  own = {field.name for field in dataclasses.fields(ClientSettings)}
  settings = _settings(client or ClientSettings(), {name: given.pop(name) for name in own & set(given)})
  sent, made, steps = _sent(model, variables), list[tuple[Exchange, Tree]](), list[opacus.Step]()
  classes = _classes(model, variables, samples, targets, settings, modality.noun[0])

  def fit(samples: np.ndarray, targets: np.ndarray) -> Tree:
    with opacus.watched(steps):
      app = _app(client_fn(*_tensors(samples, targets)))
      exchange = _called(app, sent, config, run_config, len(samples))
    made.append((exchange, update := update_of(exchange, model)))
    return update

  for name in given:  # without a key nothing else reads them
    errors.check_choice('setting', name, own | _OF_ATTACKS)
  defense = parse(defense) if isinstance(defense, str) else as_defense(defense)
  given_or_seen = (lambda: defense) if defense.stages else (lambda: opacus.defense_of(steps)[0])
  what = (fit, model, variables, samples, targets, settings, classes, given_or_seen, lambda: _least_type(made, model))
  found = _compared(given.get('progress', 'auto'), steps, *what, modality)
  settings = _explained(settings, found)
  captured = None
  if key is not None:
    captured = attack(
      key,
      model,
      variables,
      found.update,
      sample_shape=samples.shape[1:],
      num_samples=len(samples),
      client=dataclasses.replace(settings, learning_rate=settings.rate),
      defense=given_or_seen(),
      truth=(samples, targets),
      **given,
    )
  return Audit(found, settings, captured, next(one for one, update in made if update is found.update))


def _least_type(made: list[tuple[Exchange, Tree]], model: Model) -> np.dtype:
  """Returns the type of the fewest bits among the parameters that the client returned first."""
  returned = _named(made[0][0].returned, model, returned=True)
  types = [returned[entry.name].dtype for entry in _layout(model).entries if entry.path[0] == 'params']
  return min(types, key=lambda one: jnp.finfo(one).bits)


def _settings(client: ClientSettings, changes: Mapping[str, Any]) -> ClientSettings:
  """Returns settings of a client that shares its delta; raises `UsageError` where it is said to share its gradient."""
  found = dataclasses.replace(client, **{'share': 'delta', **changes})
  if found.share != 'delta':
    raise errors.UsageError(f"share is {found.share!r}, and a Flower client returns its weights: set share='delta'")
  return found


def _explained(settings: ClientSettings, found: Comparison) -> ClientSettings:
  """Returns the settings with what explains a difference, and with the order that the client draws."""
  changes = next((one.changes for one in found.explanations if one.changes), {})
  order: dict[str, Any] = {'sample_order': 'shuffled'} if found.draws == 'order' else {}
  return dataclasses.replace(settings, **changes, **order)


def _compared(progress: str | Callable | None, steps: list[opacus.Step], *what: Any) -> Comparison:
  """Returns what `compare` does; its first sentence is on the steps that Opacus took, if any."""
  with told(computing(callback(progress), 'comparison')):
    found = compare(*what)
  words = opacus.defense_of(steps)[1]
  return dataclasses.replace(found, words=(words, *found.words)) if words else found


def update_of(exchange: Exchange, model: Model) -> Tree:
  """Returns what was returned minus what was sent, float32, a tree like the parameters of a model from PyTorch.

  Raises:
    UsageError: where the names or the shapes are not those of the model's state dict, or no weights were returned; for
      integers in place of floats; and for what is a tenth of what was sent, or less: a difference of weights.
  """
  layout = _layout(model)
  if not exchange.returned:
    raise errors.UsageError('no weights left the client: under secure aggregation, or by its own choice')
  before, after = (
    {name: array.astype(np.float64) for name, array in _named(arrays, model, returned).items()}
    for arrays, returned in ((exchange.sent, False), (exchange.returned, True))
  )
  trained = [entry.name for entry in layout.entries if entry.path[0] == 'params']
  sent, came = (float(np.sqrt(sum(np.square(of[name]).sum() for name in trained))) for of in (before, after))
  if came < _DIFFERENCE * sent:
    raise errors.UsageError(
      f'the client was sent weights of the norm {sent:.3g} and returned arrays of the norm {came:.3g}: these look like '
      'a difference of weights, expected the weights after training. Have it return what it was sent plus the '
      'difference; a recorded one is read by gradleak.read_update(list(exchange.returned.values()), model, variables)'
    )
  moved = {name: after[name] - before[name] for name in before}
  return jax.tree.map(lambda x: np.asarray(x, np.float32), layout.variables(moved)['params'])


def weights_of(exchange: Exchange, model: Model) -> dict[str, Tree]:
  """Returns the variables that a client was sent, of a model from PyTorch.

  A `NumPyClient` is sent a list: its arrays have no names, and stand in the order of the state dict.

  Raises:
    UsageError: where the names or the shapes are not those of the model's state dict.
  """
  return _layout(model).variables(_named(exchange.sent, model))


def _layout(model: Model) -> Any:
  """Returns the layout of a model of PyTorch; raises `UsageError` for another one."""
  if model.layout is None:
    raise errors.UsageError(f'the model {model.name!r} has no layout of PyTorch: make it by gradleak.models.from_torch')
  return model.layout


def _named(arrays: Mapping[str, np.ndarray], model: Model, returned: bool = False) -> dict[str, np.ndarray]:
  """Returns arrays by the names of the state dict; those named 0, 1, … are in its order.

  Tied arrays that are sent are equal. A client may have changed each that it returns, as by noise, and one is read.
  """
  layout = _layout(model)
  entries = {entry.name: entry for entry in layout.entries}
  names = layout.named()
  for every in (names, layout.named(tied=False)):
    if list(arrays) == [str(number) for number in range(len(every))]:
      arrays = dict(zip(every, arrays.values(), strict=True))
  arrays = without_prefixes(arrays, names)
  if returned:
    arrays = {first: arrays[name] for name, first in layout.tied if name in arrays} | dict(arrays)
  else:
    arrays = layout.untied(arrays)
  for name, entry in entries.items():
    found = arrays.get(name)
    if found is None or found.shape != entry.shape:
      what = 'is missing' if found is None else f'has shape {found.shape}'
      raise errors.UsageError(
        f'the arrays are not the state dict of {model.name!r}: {name!r} {what}, expected shape {entry.shape}; there '
        f'are {len(arrays)} arrays, and {len(names)} in the state dict'
      )
    if entry.dtype.startswith('float') and not jnp.issubdtype(found.dtype, jnp.floating):
      raise errors.UsageError(
        f'the array {name!r} is {found.dtype}, expected floats: values that are quantised mean nothing without their '
        'scale'
      )
  return {name: np.asarray(arrays[name]) for name in entries}


def _sent(model: Model, variables: Mapping) -> dict[str, np.ndarray]:
  """Returns the variables as the state dict of the module."""
  layout = _layout(model)
  entries = layout.named()
  arrays = layout.to_theirs(jax.device_get(dict(variables)))
  return {name: np.array(array, entries[name].dtype, order='C') for name, array in arrays.items()}


def _samples(samples: Any, targets: Any, model: Model, kind: Modality) -> tuple[np.ndarray, np.ndarray]:
  samples, targets = errors.host_array('samples', samples), errors.host_array('targets', targets)
  errors.check_instance('modality', kind, Modality, 'a gradleak.modalities.Modality')
  kind.check_model(model)
  kind.check(samples)
  if targets.shape != samples.shape[:1] or targets.dtype.kind not in 'iu':
    raise errors.UsageError(f'labels are {targets.dtype} of shape {targets.shape}, expected {len(samples)} integers')
  return kind.cast(samples), np.asarray(targets, np.int32)


def _classes(
  model: Model, variables: Mapping, samples: np.ndarray, targets: np.ndarray, client: ClientSettings, noun: str
) -> int:
  """Returns the number of classes of a model; raises `UsageError` for targets that are not among them."""
  classes = outputs_shape(model, variables, samples.shape[1:])[-1]
  as_loss(client.loss).targets.checked(targets, len(targets), classes, noun)
  return classes


def _tensors(samples: np.ndarray, targets: np.ndarray) -> tuple[Any, Any]:
  import torch

  # Copies: a client may change its tensors in place.
  return to_torch(torch.from_numpy(np.array(samples))), torch.from_numpy(targets.astype(np.int64))


def _app(made: Any) -> Any:
  """Returns the `ClientApp` that a function made, or one around the client that it made."""
  app = _flwr('clientapp').ClientApp
  if isinstance(made, app):
    return made
  if hasattr(made, 'to_client') and hasattr(made, 'fit'):
    return app(client_fn=lambda context: made.to_client())
  raise errors.UsageError(f'client_fn returned {errors.shown(made)}, expected a ClientApp, a Client or a NumPyClient')


def _called(
  app: Any, sent: dict[str, np.ndarray], config: Mapping | None, run_config: Mapping | None, number: int
) -> Exchange:
  """Returns the exchange of one training of an app, in process."""
  flwr = _flwr('app')
  arrays, values = flwr.ArrayRecord({name: flwr.Array(array) for name, array in sent.items()}), dict(config or {})
  if getattr(app, '_call', None) is None:
    content = flwr.RecordDict({'arrays': arrays, 'config': flwr.ConfigRecord(values)})
  else:  # an app around a client_fn: weights are a list
    content = flwr.RecordDict({'fitins.parameters': arrays, 'fitins.config': flwr.ConfigRecord(values)})
  # With its metadata, a message needs no identity of a running task.
  metadata = flwr.Metadata(1, 'audit', 0, 1, '', '1', time.time(), 3600.0, _TRAIN)
  message = flwr.Message(content, metadata=metadata)
  state = flwr.RecordDict()
  context = flwr.Context(1, 1, {'partition-id': 0, 'num-partitions': 1}, state, dict(run_config or {}))
  reply = app(message, context)
  if reply.has_error():
    raise errors.UsageError(f'the client returned an error: {reply.error.reason}')
  exchange = Exchange(sent, _arrays(reply), _facts(message, reply))
  for name, value in exchange.facts.items():
    if name.replace('_', '-') == 'num-examples' and value != number:  # not 'val-num-examples'
      raise errors.UsageError(
        f'the client says that it trained on {value:g} samples, and client_fn was given {number}: it must train on '
        'these alone'
      )
  return exchange


def _arrays(message: Any) -> dict[str, np.ndarray]:
  """Returns copies of all arrays of a message by name; of several records, the names are joined by '/'."""
  records = {key: record for key, record in message.content.array_records.items() if len(record)}
  return {
    name if len(records) == 1 else f'{key}/{name}': np.array(array.numpy())
    for key, record in records.items()
    for name, array in record.items()
  }


def _facts(message: Any, reply: Any) -> dict[str, Any]:
  """Returns what went with the arrays: the round, the configuration that was sent, and the metrics that came back."""
  values: dict[str, Any] = {}
  for records in (message.content.config_records, reply.content.metric_records):
    for record in records.values():
      values |= {name: value for name, value in record.items() if isinstance(value, bool | int | float | str)}
  return {**values, 'round': message.metadata.group_id}  # last: the folder has its name from it, and not from a metric


def _flwr(name: str) -> Any:
  """Returns a module of flwr; raises `UsageError` where it is not installed, or too old."""
  try:
    return importlib.import_module(f'flwr.{name}')
  except ImportError as error:
    raise errors.UsageError(
      f'gradleak.flower needs flwr.{name}, of Flower 1.42 or newer: '
      "pip install -e '.[flower]' in a checkout of gradleak"
    ) from error
