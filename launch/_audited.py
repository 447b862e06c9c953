"""What the programs that audit share: their flags, and the scenario and settings that these describe."""

import functools
import types
from typing import Any

import jax
from absl import flags

import gradleak as gl
from gradleak.core import errors
from gradleak.engine import progress
from gradleak.federated.earlier import RATE, earlier
from launch import _data, _program, _settings, _weights

# What the attacker's flags set; a program with attacks of its own has none of them.
ATTACKER = ('restarts', 'steps', 'labels', 'controls', 'knowledge', 'rounds', 'counters')


def define(*, attacker: bool = True, **defaults: Any) -> types.SimpleNamespace:
  """Defines the common flags and returns their holders, `.name` each.

  Args:
    attacker: whether attacks and their settings are flags, too.
    **defaults: replace some defaults.
  """
  given = types.SimpleNamespace()

  def one(kind: str, name: str, default: Any, text: str) -> None:
    setattr(given, name, getattr(flags, f'DEFINE_{kind}')(name, defaults.get(name, default), text))

  with _program.group('what is audited'):
    one('string', 'dataset', 'faces', 'faces, digits, folder:PATH (split/label/*.png|jpg), or a TFDS name.')
    one('string', 'split', 'test', 'Split that the private samples come from; the first ones are taken.')
    one('string', 'data_dir', None, 'Folder with prepared TFDS datasets (launch/prepare_data.py).')
    one('integer', 'image_size', None, 'Resize images to this many pixels on a side.')
    one('integer', 'channels', None, '1: convert to grey, 3: to RGB.')
    given.largest_pixel = _data.define_largest()
    one('integer', 'trials', 8, 'Uploads attacked per defense.')
    one('integer', 'public', 100, 'Public images for defenses and attackers, from the split train (test for train).')
    one('integer', 'rounds_before', 0, 'Rounds of training on the public images before; 0: nobody has taken part yet.')
    vars(given).update(vars(_weights.define(**defaults)))
  with _program.group('client'):
    given.client = _settings.define(gl.ClientSettings)
  with _program.group('attacker'):
    if attacker:
      one(
        'string',
        'attacks',
        'csdlg(tv=1e-6)',
        "List separated by ';': dlg, idlg, csdlg, csdlg_fast, csdlg_lbfgs, dga, gia, gs, magia, cinet, ggl, gias, "
        'gifd, pnp, lti, with settings; closed forms: fidel, peeling, spear, april; of malicious servers: imprint, '
        'trap, class_fishing, feature_fishing.',
      )
    steps = {'steps': 1000, **defaults}
    without = ('counters',) if attacker else ATTACKER
    given.settings = _settings.define(gl.AuditSettings, without=without, **steps)
  with _program.group('defenses'):
    one(
      'string',
      'defenses',
      'none',
      "List separated by ';'; '+' composes a chain: prune(rate=0.9)+laplace(scale=0.001); '|' spans a grid: "
      'gaussian(stddev=0.01|0.1).',
    )
  with _program.group('run'):
    one('string', 'workdir', None, 'Folder for rows, pictures, the report and checkpoints.')
    one('string', 'progress', 'auto', 'auto, bar, lines or none.')
    one('boolean', 'x64', False, 'float64 throughout: for closed forms alone.')
    one('integer', 'group_size', None, 'Trials that share one pass; changes speed, not science.')
    given.compilation_cache = _program.define_cache()
  return given


def load(given: types.SimpleNamespace) -> tuple[Any, tuple | None]:
  """Returns (private samples, public (images, labels) or None): where nobody asked and there are none.

  Raises:
    UsageError: for data that are not there, or numbers out of range.
  """
  progress.reporter(given.progress.value)  # an unknown mode says so before anything is read
  batch_size = given.settings['batch_size'].value
  for name, value, low in (
    ('trials', given.trials.value, 1),
    ('batch_size', batch_size, 1),
    ('public', given.public.value, 0),
  ):
    errors.check_number(name, value, low=low, high=10**6, integer=True)
  _program.say(f'reading {given.dataset.value} …')
  options = _options(given)
  dataset = _data.load(given.dataset.value, given.split.value, limit=given.trials.value * batch_size, **options)
  if not given.public.value:
    return dataset, None
  split = 'test' if given.split.value.startswith('train') else 'train'
  try:
    public = gl.data.load(given.dataset.value, split, limit=given.public.value, **options)
  except gl.UsageError:
    if given.public.present:
      raise
    return dataset, None
  return dataset, (public.images, public.labels)


def _options(given: types.SimpleNamespace) -> dict[str, Any]:
  return {name: getattr(given, name).value for name in ('data_dir', 'image_size', 'channels', 'largest_pixel')}


@functools.cache
def _gallery(name: str, split: str, **options: Any) -> Any:
  """Returns the candidates of `gl.data.gallery`, read once for all models and seeds of a sweep."""
  return gl.data.gallery(name, split, **options)


def scenario(
  given: types.SimpleNamespace, model: gl.models.Model, seed: int, dataset: Any, public: tuple | None
) -> tuple[jax.Array, gl.Scenario]:
  """Returns (key of the audit, `Scenario`) of a model and a seed, before any training."""
  key = jax.random.key(seed)
  rounds = errors.check_number('rounds_before', given.rounds_before.value, low=0, high=10**6, integer=True)
  if rounds and public is None:
    if given.rounds_before.present:
      raise errors.UsageError(f'{rounds} rounds before the audit need public images, and there are none')
    rounds = 0
  variables = _weights.read(given, model, dataset.images.shape[1:], public, 'public')
  built = gl.scenario(
    model,
    dataset.images,
    dataset.labels,
    **({'key': jax.random.fold_in(key, 0)} if variables is None else {'variables': variables}),
    num_classes=dataset.num_classes,
    dataset=dataset.name,
    client=_settings.made(gl.ClientSettings, given.client),
    public=public,
    gallery=_gallery(given.dataset.value, given.split.value, **_options(given)),
    notes={
      'split': dataset.split,
      **_weights.described(given),
      'seed': seed,
      **({'rounds_before': rounds, 'rate_before': RATE} if rounds else {}),
    },
  )
  return jax.random.fold_in(key, 1), built


def trained(seed: int, scenario: gl.Scenario) -> gl.Scenario:
  """Returns the scenario after the rounds of training that the flags ask for."""
  rounds = scenario.settings.get('rounds_before')
  if not rounds:
    return scenario
  _program.say(f'training for {rounds} round{"s" if rounds > 1 else ""} on the public images …')
  assert scenario.public is not None
  clients = min(10, len(scenario.public[0]))
  key = jax.random.fold_in(jax.random.key(seed), 2)
  current, previous = earlier(
    key, scenario.client, scenario.variables, *scenario.public, rounds=rounds, clients=clients
  )
  return scenario.trained(current, previous)


def settings(given: types.SimpleNamespace) -> gl.AuditSettings:
  """Returns the `AuditSettings` that the flags describe; 0 steps are those that were published."""
  return _settings.made(gl.AuditSettings, given.settings, steps=given.settings['steps'].value or None)
