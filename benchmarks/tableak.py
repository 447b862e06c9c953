"""TabLeak and the code of its authors, on the same rows of Adult, weights and gradients.

The authors' code is no package: `--clone` is a folder with it, which brings the data.
"""

import contextlib
import dataclasses
import importlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import gradleak as gl
from benchmarks import harness, pytorch
from benchmarks.harness import Variant
from gradleak.core import errors
from gradleak.data import tables
from gradleak.engine import driver
from gradleak.engine.groups import Layout
from gradleak.modalities.tables import table

READS = ('trials', 'compared', 'steps', 'clone', 'batch', 'starts', 'repeats')
SOURCE = 'https://github.com/eth-sri/tableak'
INNER = 'attacks.gradient_inversion_attack'
WIDTHS = 100, 100  # of the published network
COLUMNS = harness.right('cells', 'cells')


class Clone(NamedTuple):
  """The authors' code.

  Attributes:
    data: their data set, standardised.
    invert: their attack, `invert_grad`.
    network: their class of networks.
  """

  data: Any
  invert: Callable[..., Any]
  network: Callable[..., Any]


class Batches(NamedTuple):
  """What both attack.

  Attributes:
    clone: the `Clone`.
    client: ours, with their network.
    variables: the weights of that network, as ours takes them.
    rows: private rows in our encoding, float32 [trials, N, D].
    theirs: the same in theirs, a tensor [trials, N, D].
    labels: int [trials, N].
    network: their network.
    starts, steps: of each attack.
    compared: how many of the batches, the first, the authors' code attacks and right cells are counted in.
  """

  clone: Clone
  client: gl.Client
  variables: dict
  rows: np.ndarray
  theirs: Any
  labels: np.ndarray
  network: Any
  starts: int
  steps: int
  compared: int

  def figures(self, found: Sequence[Any], watch: pytorch.Stopwatch) -> dict[str, float]:
    """Returns the figures of reconstructed batches [n, N, D] of our encoding, those of the first private ones."""

    def right(rows: Any, place: int) -> float:
      return self.client.modality.evaluate(rows, self.rows[place], [], self.labels[place])['cells']

    return harness.batch_figures(found, watch.read(), 'cells', right, self.compared)

  def encoded(self, rows: Any) -> np.ndarray:
    """Returns rows of theirs [N, D] in our encoding."""
    mean, std = map(np.asarray, self.client.model.normalisation)
    return rows.detach().numpy() * std + mean


def main(options: harness.Options) -> None:
  """Measures and prints both; each is judged by our measure of right cells, whose tolerances are the published ones."""
  made = batches(opened(options.clone), options.trials, options.batch, options.starts, options.steps, options.compared)
  found = harness.report(
    f'tableak, Adult, {options.trials} batches of {options.batch} rows, {options.starts} starts of {options.steps} '
    f'steps, {harness.hardware()}',
    [
      Variant('all at once', ours(made)),
      Variant(f"the authors' code, the first {made.compared}", published(made), compiled=False),
    ],
    COLUMNS,
    options.repeats,
    harness.right_note('Cells', made.compared),
    warm=True,
  )
  print(harness.paired(found, 'cells'))


def opened(folder: str | None) -> Clone:
  """Returns the authors' code in a folder.

  Its last line writes into a tensor that needs a gradient, which PyTorch 2.13 refuses: the line gets a copy.

  Raises:
    UsageError: without PyTorch, for a folder that holds no clone, and for code that does not run.
  """
  if folder is None or not os.path.isfile(os.path.join(folder, *INNER.split('.')) + '.py'):
    raise errors.UsageError(f'give --clone=FOLDER with a clone of {SOURCE}; there is none in {folder}')
  known = set(sys.modules)
  with contextlib.chdir(folder):
    sys.path.insert(0, os.getcwd())
    try:
      pytorch.torch()
      datasets, models, inner = map(importlib.import_module, ('datasets', 'models', INNER))
      data = datasets.ADULT()
    except (pytorch.Unavailable, ImportError, AttributeError, OSError) as error:
      raise errors.UsageError(f'the code in {folder} does not run: {error}') from error
    finally:
      sys.path.remove(os.getcwd())
      for name in {*sys.modules} - known:  # its names are those of other packages
        if (getattr(sys.modules[name], '__file__', None) or '').startswith(os.getcwd() + os.sep):
          del sys.modules[name]
  bounded = inner.continuous_sigmoid_bound
  inner.continuous_sigmoid_bound = lambda x, *given, **named: bounded(x.clone(), *given, **named)
  data.standardize()
  return Clone(data, inner.invert_grad, models.FullyConnected)


def batches(clone: Clone, trials: int, batch: int, starts: int, steps: int, compared: int) -> Batches:
  """Returns the `Batches` of so many trials; their rows are drawn without replacement."""
  torch = pytorch.torch()
  torch.manual_seed(0)
  theirs, labels, features = clone.data.get_Xtrain(), clone.data.get_ytrain(), clone.data.train_features
  values = clone.data.decode_batch(theirs, standardized=True)
  columns = {name: list(values[:, place]) for place, name in enumerate(features)}
  kinds = {
    name: {'kind': tables.CONTINUOUS} if levels is None else {'kind': tables.CATEGORICAL, 'levels': levels}
    for name, levels in features.items()
  }
  schema = tables.infer(columns, kinds)
  numbers = [place.start for field, place in zip(schema.fields, schema.places, strict=True) if field.numeric]
  mean, std = (x.numpy().astype(np.float32) for x in (clone.data.mean, clone.data.std))
  fields = [field for field in schema.fields if field.numeric]
  scales = np.array([field.std for field in fields], np.float32)
  mean[numbers] = (mean[numbers] - np.array([field.mean for field in fields], np.float32)) / scales
  std[numbers] /= scales
  network = clone.network(theirs.shape[1], [*WIDTHS, 2])
  inner, variables = gl.models.from_torch(network, theirs[:2])
  client = gl.ClientSettings().client(gl.models.standardised(inner, mean, std), 2)
  chosen = np.random.default_rng(0).permutation(len(theirs))[: trials * batch]
  rows = schema.encode({name: [column[i] for i in chosen] for name, column in columns.items()})
  sizes = trials, batch, -1
  return Batches(
    clone,
    dataclasses.replace(client, modality=table(schema)),
    variables,
    rows.reshape(sizes),
    theirs[chosen].reshape(sizes),
    np.asarray(labels)[chosen].reshape(trials, batch),
    network,
    starts,
    steps,
    min(compared, trials),
  )


def ours(made: Batches) -> Callable[[], Mapping[str, float]]:
  """Returns what attacks all batches together, compiled at its first call, and returns the figures."""
  method, labels = gl.attacks.tableak(steps=made.steps, seeds=made.starts), jax.nn.one_hot(made.labels, 2)
  layout = Layout(driver.default_group_size(made.variables, made.rows.shape[1]))

  def upload(variables: dict, lane: dict) -> Any:
    return made.client.local_update(None, variables, lane['rows'], lane['labels']).update

  def build(variables: dict, lane: dict) -> tuple[Any, Any, gl.Observation]:
    seen = gl.Observation(variables, lane['update'], lane['labels'], gl.Knowledge(), made.rows.shape[1:], 2)
    return method(made.client), lane['key'], seen

  lanes = {'labels': labels, 'key': jax.random.split(jax.random.key(1), len(labels))}
  rows = {'rows': jnp.asarray(made.rows), 'labels': labels}
  lanes['update'] = driver.evaluate(upload, made.variables, rows, layout)

  def attack() -> Mapping[str, float]:
    watch = pytorch.Stopwatch('cpu')
    return made.figures(driver.run(build, made.variables, lanes, layout, num_steps=made.steps).samples, watch)

  return attack


def published(made: Batches) -> Callable[[], Mapping[str, float]]:
  """Returns what attacks the first batches by the authors' code, one start after the other, and returns the figures."""
  torch, (of, invert, _) = pytorch.torch(), made.clone
  loss = torch.nn.CrossEntropyLoss()

  def one(rows: Any, targets: np.ndarray, steps: int, starts: int) -> Any:
    labels = torch.tensor(targets)
    gradient = pytorch.gradient(made.network, rows, labels)
    return invert(
      net=made.network, training_criterion=loss, true_grad=[part.detach() for part in gradient], true_label=labels,
      true_data=rows, reconstruction_loss='cosine_sim', dataset=of, max_iterations=steps, post_selection=starts,
      softmax_trick=True, sigmoid_trick=True, pooling='median+softmax',
    )  # fmt: skip

  pytorch.quickest_threads(lambda: one(made.theirs[0], made.labels[0], 20, 1))

  def attack() -> Mapping[str, float]:
    watch = pytorch.Stopwatch('cpu')
    first = zip(made.theirs[: made.compared], made.labels, strict=False)
    return made.figures([made.encoded(one(*batch, made.steps, made.starts)) for batch in first], watch)

  return attack
