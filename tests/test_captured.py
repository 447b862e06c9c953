"""A captured update: read from any format, attacked without a truth, and described in words that claim no more."""

import dataclasses
import functools
import json
import pathlib
import re
import runpy
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import gradleak as gl
from gradleak import report
from gradleak.attacks.matching.distances import cosine
from gradleak.audit import schema
from gradleak.core import trees
from gradleak.models import torch_weights
from gradleak.models.state_dict import Layout
from gradleak.report import captured as report_captured
from gradleak.studies import captured
from gradleak.studies.captured.hints import hints, of_scale
from tests.models.test_torch_weights import small, tensors, written, zipped

pytestmark = pytest.mark.usefixtures('fast_compilation')
SHAPE = (8, 8, 1)


@functools.cache
def sending(client):
  return jax.jit(client.local_update)


class OfTorch:
  """A tensor as PyTorch has it that requires a gradient."""

  shape = (10,)

  def __array__(self, *types, **options):
    raise RuntimeError("Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead.")


class Case:
  """A model with its variables and clients' updates on real digits."""

  def __init__(self, model, images, labels, **client):
    self.model, self.samples, self.targets, self.fields = model, images, labels, client
    self.variables = model.init(jax.random.key(0), images.shape[1:])
    self.client = gl.ClientSettings(**client).client(model, 10)

  def update(self, number=1, client=None):
    """Returns what a client sends of the first images."""
    send = sending(client or self.client)
    update = send(jax.random.key(3), self.variables, self.samples[:number], self.targets[:number]).update
    return jax.tree.map(np.asarray, update)

  def stand_in(self, number):
    """Returns the scenario that stands in for one whose images are known."""
    return captured._stand_in(self.model, self.variables, SHAPE, None, number, gl.ClientSettings(**self.fields))

  def attack(self, update, **options):
    """Returns the `Captured` of a few steps and two control runs."""
    options = {'controls': 2, 'steps': 5, 'progress': 'none', 'sample_shape': SHAPE, **self.fields, **options}
    return gl.attack(jax.random.key(1), self.model, self.variables, update, **options)


@pytest.fixture(scope='module')
def dense(small_images):
  return Case(gl.models.mlp(10, widths=16), *small_images)


@pytest.fixture(scope='module')
def affine(linear, small_images):
  return Case(linear.client.model, *small_images)


def named(tree, joint='.'):
  return {joint.join(trees.path_names(path)): np.asarray(x) for path, x in jax.tree.leaves_with_path(tree)}


def as_torch(update):
  """Returns an update of a dense network on grey images as PyTorch names and lays out its tensors."""
  return {name.replace('kernel', 'weight'): x.T.copy() if x.ndim == 2 else x for name, x in named(update).items()}


@pytest.mark.long
def test_a_folder_belongs_to_the_version_of_an_attack(dense, tmp_path):
  def mine(client):
    return gl.attacks.dlg(steps=2)(client)

  def attack(version):
    return dense.attack(dense.update(), attacks=[gl.attacks.wrap(mine, version=version)], workdir=tmp_path / 'run')

  attack('1')
  assert attack('1').inversions
  with pytest.raises(gl.UsageError, match=r'mine.*version 1.*now.*version 2'):
    attack('2')


@pytest.mark.long
@pytest.mark.parametrize('kind', ['npz', 'safetensors', 'legacy', 'zip', 'names'])
def test_every_format_gives_the_private_image(kind, dense, tmp_path):
  update, names = dense.update(), None
  if kind in ('npz', 'safetensors'):
    path = written(kind, {f'params/{name}': x for name, x in named(update, '/').items()}, tmp_path)
  elif kind == 'names':
    names = {'fc1': 'Dense_0', 'net.fc2': 'Dense_1'}
    entries = as_torch(update)
    for theirs, ours in names.items():
      entries = {name.replace(ours, theirs): x for name, x in entries.items()}
    path = written('npz', {f'module.{name}': x for name, x in entries.items()}, tmp_path)
  else:
    path = written(kind, as_torch(update), tmp_path)
  read = gl.read_update(path, dense.model, dense.variables, sample_shape=SHAPE, names=names)
  jax.tree.map(np.testing.assert_array_equal, read, update)
  (one,) = dense.attack(read, attacks=[gl.attacks.fidel()]).inversions
  np.testing.assert_allclose(one.samples[0], dense.samples[0], atol=1e-5)
  assert one.mismatch < 1e-9 and (one.control_mismatch > 0.5).all() and one.closer == 2 and one.adaptive is None
  assert one.likeness < 0.9 and one.control_samples.shape[0] == 2 and one.steps == 0


@pytest.mark.parametrize('channels', [1, 3])
def test_the_layout_of_a_convolutional_network_in_pytorch(channels, tmp_path):
  model = gl.models.cnn(10, width=2, widths=8)
  variables = model.init(jax.random.key(0), (10, 8, channels))
  entries = {}
  for name, x in named(variables['params']).items():
    name = name.replace('kernel', 'weight')
    if x.shape[0] == 2 and x.ndim == 2:  # [out, column·row·in] → [out, in, row, column]
      x = x.reshape(2, 3, 3, channels).transpose(0, 3, 2, 1)
    elif name == 'Dense_0.weight':  # features of 4 × 3 pixels and 2 channels
      x = x.reshape(4, 3, 2, -1).transpose(3, 2, 0, 1).reshape(-1, 24)
    elif x.ndim == 2:
      x = x.T
    entries[name] = np.ascontiguousarray(x)
  path = written('zip', entries, tmp_path)
  read = gl.read_update(path, model, variables, sample_shape=(10, 8, channels))
  jax.tree.map(np.testing.assert_array_equal, read, variables['params'])
  weights = gl.read_weights(path, model, (10, 8, channels))
  jax.tree.map(np.testing.assert_array_equal, weights, dict(variables))


def test_an_update_of_a_published_residual_network(tmp_path):
  model, rng = small(), np.random.default_rng(0)
  shapes = jax.eval_shape(lambda key: model.init(key, SHAPE), jax.random.key(0))
  entries = {}
  for path, leaf in jax.tree.leaves_with_path(shapes):
    name, shape = torch_weights.torch_name(trees.path_names(path)[1:]), leaf.shape
    if name.startswith('linear.'):
      shape = shape[::-1]
    elif len(shape) == 2:
      side = 1 if 'shortcut' in name else 3
      shape = (shape[0], shape[1] // side**2, side, side)
    name = name.replace('linear', 'fc').replace('shortcut', 'downsample')
    entries[f'module.{name}'] = rng.normal(size=shape).astype(np.float32)
  path = written('zip', entries, tmp_path)
  expected = torch_weights.load(path, model, SHAPE)
  read = gl.read_update(path, model, expected, sample_shape=SHAPE)  # without the statistics of BatchNorm
  jax.tree.map(np.testing.assert_array_equal, read, expected['params'])
  jax.tree.map(np.testing.assert_array_equal, gl.read_weights(path, model, SHAPE), expected)


def test_files_that_do_not_fit_name_the_tensors(dense, tmp_path):
  def read(entries, **options):
    return gl.read_update(written('npz', entries, tmp_path), dense.model, dense.variables, **options)

  update = dense.update()
  entries = named(update)
  without = {name: x for name, x in entries.items() if name != 'Dense_1.bias'}
  with pytest.raises(
    gl.UsageError,
    match=r"the update in '.*' does not fit 'mlp\(widths=16\)': missing: Dense_1\.bias\. partial=True takes missing",
  ):
    read(without)
  with pytest.raises(
    gl.UsageError, match=r"names=\{'module in the file': 'module of the model'\} says which is which$"
  ):
    read({name.replace('Dense_1', 'head'): x for name, x in entries.items()})
  as_torch = {name.replace('kernel', 'weight'): x.T.copy() if x.ndim == 2 else x for name, x in entries.items()} | {
    'Dense_1.weight': entries['Dense_1.kernel']
  }
  with pytest.raises(
    gl.UsageError, match=r'Dense_1\.weight \(16, 10\), here \(10, 16\), where the model has \(16, 10\)$'
  ):
    read(as_torch)
  with pytest.raises(gl.UsageError, match=r"the update is the path 'update.npz': gradleak\.read_update"):
    dense.attack('update.npz')
  read_partly = read(without, partial=True)
  assert not np.any(read_partly['Dense_1']['bias']) and np.any(read_partly['Dense_1']['kernel'])
  with pytest.raises(gl.UsageError, match=r'not in the model: extra\.bias$'):
    read({**entries, 'extra.bias': np.zeros(3, np.float32)})
  with pytest.raises(gl.UsageError, match=r'of another shape: Dense_0\.bias \(3,\) where the model has \(16,\)$'):
    read({**entries, 'Dense_0.bias': np.zeros(3, np.float32)})
  (tmp_path / 'text').write_text('no tensors')
  with pytest.raises(gl.UsageError, match=r"cannot read the update in '.*text'"):
    gl.read_update(tmp_path / 'text', dense.model, dense.variables)


def test_updates_that_cannot_be_attacked_say_why(affine):
  update = affine.update()
  for changed, message in [
    ({'kernel': update['kernel']}, 'the update does not fit the model: missing: bias'),
    ({**update, 'bias': np.zeros(3, np.float32)}, r'of another shape: bias \(3,\) where the model has \(10,\)'),
    ({**update, 'bias': np.full(10, np.nan, np.float32)}, 'not finite: 10 of 10 in bias'),
    ({**update, 'bias': np.zeros(10, np.int32)}, 'the tensor bias of the update is int32, expected floats'),
    (jax.tree.map(np.zeros_like, update), 'every value of the update is zero'),
    ({**update, 'bias': OfTorch()}, r'the tensor bias of the update is .*expected an array of numbers \(.*detach'),
  ]:
    with pytest.raises(gl.UsageError, match=message):
      affine.attack(changed)


@pytest.mark.parametrize(
  ('options', 'message'),
  [
    ({'labels': [1, 2]}, 'labels are .*, expected 1 integers'),
    ({'labels': 'guessed'}, "unknown way to obtain labels 'guessed'"),
    ({'controls': 0}, 'controls is 0, expected an integer in'),
    ({'epochs': 2}, "unknown setting of gradleak.attack: 'epochs'"),
    ({'attacks': [gl.attacks.fidel()]}, "does not offer 'layers'"),
    ({'attacks': [gl.servers.imprint()]}, 'malicious server'),
    ({'sample_shape': (8, 8)}, r'sample_shape is \(8, 8\), expected \(height, width, channels\)'),
    ({'sample_shape': None}, r'sample_shape is not given'),
  ],
)
def test_settings_that_cannot_be_run_say_why(affine, options, message):
  with pytest.raises(gl.UsageError, match=message):
    affine.attack(affine.update(), **options)


def test_the_shape_of_images_is_derived_where_one_fits(dense):
  assert captured.derived_sample_shape(dense.model, dense.variables) == SHAPE


@pytest.mark.long
@pytest.mark.parametrize(
  'attack',
  [gl.attacks.fidel(), gl.attacks.peeling(), pytest.param(gl.attacks.csdlg_fast(), marks=pytest.mark.slow)],
  ids=str,
)
def test_the_finding_is_the_same_at_any_scale(attack, dense, tmp_path):
  update = dense.update()
  (expected,) = dense.attack(update, attacks=[attack]).inversions
  for scale in (1e-60, 1e-6, 1e39):
    scaled = {name: x.astype(np.float64) * scale for name, x in named(update).items()}
    np.savez(tmp_path / 'update.npz', **scaled)
    found = dense.attack(gl.read_update(tmp_path / 'update.npz', dense.model, dense.variables), attacks=[attack])
    (one,) = found.inversions
    np.testing.assert_allclose(one.samples, expected.samples, atol=1e-4)
    np.testing.assert_allclose(one.mismatch, expected.mismatch, rtol=1e-3, atol=1e-12)
    np.testing.assert_allclose(one.control_mismatch, expected.control_mismatch, rtol=0.1)
    said = [text for text in found.warnings if text.startswith('The norm of the update is ')]
    assert len(said) == (not 1e-10 < scale < 1e10) and not any(
      'clip' in text for text in found.warnings if text not in said
    )
    if said:
      size = float(np.sqrt(sum(np.square(x).sum(dtype=np.float64) for x in jax.tree.leaves(update)))) * scale
      assert f'is {size:.3g}:' in said[0]


@pytest.mark.long
def test_a_scale_that_the_type_of_an_update_does_not_hold_is_said(dense):
  update = dense.update()
  small = jax.tree.map(lambda x: (x.astype(np.float64) * 1e-40).astype(np.float32), update)
  found = dense.attack(small, attacks=[gl.attacks.fidel()])
  assert any(text.endswith('save the update in a wider type, or at a larger scale.') for text in found.warnings)
  with pytest.raises(gl.UsageError, match=r"'ilrg' reads the size of the update, and its norm of .*e-40 is beyond"):
    dense.attack(small, labels='ilrg')
  half = jax.tree.map(lambda x: x.astype(np.float16), update)  # parameters of a short type, and a long update
  kept = captured.update.checked(jax.tree.map(lambda x: x * np.float32(1e5), update), half)
  assert kept.factor < 1 and all(np.isfinite(x).all() for x in jax.tree.leaves(kept.update))
  assert captured.update.checked(update, dense.variables['params'])[1:] == (1.0, 0.0)


def test_what_stands_out_in_an_update(affine):
  def warned(update, labels=None):
    return ' '.join(hints(update, affine.variables, affine.client, SHAPE, 1, labels))

  update = affine.update()
  assert warned(update) == ''
  norm = float(np.sqrt(sum(np.square(x).sum(dtype=np.float64) for x in jax.tree.leaves(update))))
  assert 'clip(norm=0.5)' in warned(jax.tree.map(lambda x: x * np.float32(0.5 / norm), update))
  pruned = affine.update(client=_defended(affine, gl.defenses.prune(rate=0.8)))
  assert 'Single entries are exactly zero' in warned(pruned) and 'of kernel' in warned(pruned)
  assert 'Nothing but zeros: kernel.' in warned({**update, 'kernel': np.zeros_like(update['kernel'])})
  weights = jax.tree.map(lambda x, w: np.asarray(w) - np.float32(0.01) * x, update, dict(affine.variables['params']))
  assert 'looks like weights after training' in warned(weights)
  twice = jax.tree.map(lambda x, w: np.float32(-0.01) * x - np.asarray(w), update, dict(affine.variables['params']))
  assert 'the weights that were sent, subtracted from' in warned(twice) and 'after training' not in warned(twice)
  assert "signs in the classifying layer are those of share='delta'" in warned(jax.tree.map(np.negative, update))
  several = {**update, 'bias': np.asarray([0.9] + 9 * [-0.1], np.float32)}  # nine samples may be of nine classes
  assert "are those of share='delta'" in warned(several)
  assert not hints(several, affine.variables, affine.client, SHAPE, 9)
  assert 'asks for 3 classes, and 1 sample is said' in warned(affine.update(3))
  right = int(affine.targets[0])
  wrong = (right + 1) % 10
  assert warned(update, [right]) == ''
  assert f'The label is given as {wrong}, and the classifying layer asks for {right}' in warned(update, [wrong])


@pytest.mark.parametrize('kind', ['float16', 'bfloat16'])
def test_weights_that_came_back_with_few_digits_are_said_to_be_rounded(kind, affine):
  sent, client = affine.variables['params'], dataclasses.replace(affine.client, share='delta')
  back = jax.tree.map(lambda w, u: np.asarray(w) - np.float32(1e-3) * u, dict(sent), affine.update())
  short = jax.tree.map(lambda x: np.asarray(jnp.asarray(x, kind), np.float64), back)
  for returned, size in ((short, 1), (back, 1), (short, 2.0**-70)):
    moved = jax.tree.map(lambda x, w: x - np.asarray(w, np.float64), returned, dict(sent))
    update = jax.tree.map(lambda x, size=size: (size * x).astype(np.float32), moved)
    exact = jax.tree.map(lambda x, w: np.asarray(x, np.float64) - np.asarray(w, np.float64), back, dict(sent))
    told = [one for one in hints(update, affine.variables, client, SHAPE, 1, factor=size) if 'precision' in one]
    assert len(told) == (returned is short)
    if told:
      lost = sum(np.square(x / size - y).sum() for x, y in zip(*map(jax.tree.leaves, (update, exact)), strict=True))
      share = np.sqrt(lost / sum(np.square(x / size).sum(dtype=np.float64) for x in jax.tree.leaves(update)))
      said = float(re.search(rf'precision of {kind}: rounding makes up about ([0-9.]+) %', told[0])[1])
      assert abs(said / 100 - share) < 0.1


def test_a_share_of_zeros_that_is_not_all_is_not_called_all(affine):
  update = affine.update()
  update = {**update, 'kernel': np.where(np.arange(640).reshape(64, 10) == 5, np.float32(1), np.float32(0))}
  told = ' '.join(hints(update, affine.variables, affine.client, SHAPE, 1))
  assert '99.8 % of kernel' in told
  assert of_scale(update, 1, 399 / 400)[0].startswith('99.8 % of its values that are not zero were given as subnormal')


def _defended(case, defense):
  from gradleak.defenses.defense import Context, bind

  return bind(defense, Context(case.client, case.variables, SHAPE)).client(case.client)


@pytest.mark.slow
def test_an_attacker_who_knows_the_defense_and_its_own_controls(affine):
  defense = gl.defenses.prune(rate=0.5)
  update = affine.update(client=_defended(affine, defense))
  found = affine.attack(update, defense=defense, attacks=[gl.attacks.csdlg_fast()], steps=30).inversions
  assert [one.adaptive for one in found] == [None, 'masked', 'masked+prior']
  non_adaptive, masked, _ = found
  assert masked.mismatch < non_adaptive.mismatch and masked.does.startswith('It compares only what was sent')
  assert all(one.closer == 2 and one.control_mismatch.shape == (2,) for one in found)
  assert 'It knows the defense and its settings.' in masked.granted and masked.labels.tolist() == [affine.targets[0]]


@pytest.mark.parametrize(('signs', 'expected'), [(False, 'ladder'), (True, 'ladder(match=sign)')])
def test_the_default_attacks_are_a_ladder_and_what_reads_the_network(affine, dense, signs, expected):
  found = [
    [
      str(one.method)
      for one in captured._attacks(None, jax.random.key(0), of.stand_in(1), gl.CapturedSettings(), signs)
    ]
    for of in (affine, dense)
  ]
  assert found == [[expected], ['fidel', 'peeling', expected]]


@pytest.mark.slow
def test_a_prior_from_a_file_needs_no_public_images(dense, tmp_path):
  """The generator makes the private image of some latents; the other images of its file are not private."""
  image = dense.samples[0]
  arrays = {'0.weight': np.eye(64, 2, dtype=np.float32), '0.bias': np.arctanh(1.96 * image.reshape(-1) - 0.98)}
  np.savez(tmp_path / 'prior.npz', **arrays)
  for make in (gl.attacks.gias, gl.attacks.ggl):
    with pytest.raises(gl.UsageError, match=r'beside a captured upload there are none: give it .* file=… of launch'):
      dense.attack(dense.update(), attacks=[make()])
  found = dense.attack(
    dense.update(),
    attacks=[gl.attacks.gias(file=str(tmp_path / 'prior.npz'), latent_steps=5, learning_rate=0.1)],
    steps=150,
    labels=dense.targets[:1],
  )
  (one,) = found.inversions
  assert one.mismatch < 0.05 < 0.5 < one.control_mismatch.min()
  assert any('a generator from a file' in sentence for sentence in one.granted)
  with pytest.raises(gl.UsageError, match='the prior is of images of 8×8×1, and the private ones have 4×16×1'):
    options = {'attacks': [gl.attacks.ggl(file=str(tmp_path / 'prior.npz'))], 'sample_shape': (4, 16, 1)}
    dense.attack(dense.update(), **options)
  with pytest.raises(gl.UsageError, match='there are none: audit a client'):
    dense.attack(dense.update(), attacks=[gl.attacks.lti()])


@pytest.fixture(scope='module')
def delta(linear, small_images):
  return Case(linear.client.model, *small_images, share='delta', local_epochs=2)


@pytest.mark.slow
def test_a_client_that_shares_its_delta(delta):
  options = {'num_samples': 2, 'labels': delta.targets[:2], 'restarts': 2, 'steps': 20}
  (one,) = delta.attack(delta.update(2), **options).inversions
  assert one.samples.shape == (2, *SHAPE) and one.labels_mode == 'known'
  assert one.objective < one.objective_start and one.mismatch < one.control_mismatch.min()
  np.testing.assert_allclose(one.mismatch, one.distance, atol=1e-5)
  assert any('2 local steps' in sentence for sentence in one.granted)


@pytest.fixture(scope='module')
def stored(affine, tmp_path_factory):
  """Returns (what was found, the work directory)."""
  folder = tmp_path_factory.mktemp('stored') / 'new'
  return affine.attack(affine.update(), workdir=folder), folder


def test_what_was_found_before_keeps_its_version(dense, tmp_path, monkeypatch):
  from gradleak.studies.captured import inversion

  settings = {'attacks': [gl.attacks.fidel()], 'workdir': tmp_path / 'w'}
  with monkeypatch.context() as patch:
    patch.setattr(inversion, 'versions', lambda: {'gradleak': '0.1.0'})
    dense.attack(dense.update(), **settings)
  assert dense.attack(dense.update(), **settings).versions['gradleak'] == '0.1.0'


@pytest.mark.slow
def test_a_work_directory_holds_what_was_found(affine, stored):
  first, folder = stored
  again = affine.attack(affine.update(), workdir=folder, progress=None)
  for one, other in zip(first.inversions, again.inversions, strict=True):
    np.testing.assert_array_equal(one.samples, other.samples)
    assert (one.mismatch, one.granted) == (other.mismatch, other.granted)
  told = json.loads((folder / 'result.json').read_text('utf-8'))
  assert told['inversions'][0]['closer'] == first.inversions[0].closer and told['config'] == first.config
  with np.load(folder / 'reconstructions.npz') as archive:
    np.testing.assert_array_equal(archive['["ladder", null]'], first.inversions[0].samples)
  with pytest.raises(gl.UsageError, match=r'belongs to other settings: .*steps was 5, now 6'):
    affine.attack(affine.update(), workdir=folder, steps=6)


@pytest.mark.slow
def test_a_run_that_was_stopped_goes_on(affine, stored, tmp_path):
  def stop(title, progress, objective):
    if progress.step == 3:
      raise KeyboardInterrupt

  with pytest.raises(KeyboardInterrupt):
    affine.attack(affine.update(), workdir=tmp_path / 'w', progress=stop)
  assert len(list((tmp_path / 'w' / 'checkpoints').iterdir())) == 1
  (one,) = affine.attack(affine.update(), workdir=tmp_path / 'w').inversions
  np.testing.assert_array_equal(one.samples, stored[0].inversions[0].samples)
  assert not (tmp_path / 'w' / 'checkpoints').exists()


def test_the_page_escapes_and_claims_nothing(stored, tmp_path):
  script = '<script>alert(1)</script>'
  result, _ = stored
  config = {**result.config, 'model': script, 'defense': script}
  (one,) = (dataclasses.replace(one, attack=script, adaptive=script, grey=2.0) for one in result.inversions)
  changed = dataclasses.replace(result, inversions=[one], config=config, warnings=[script], citations=[script])
  gl.report.write(changed, tmp_path)
  page = (tmp_path / 'report.html').read_text('utf-8')
  assert '<script' not in page and '&lt;script&gt;' in page and page.rstrip().endswith('</html>')
  assert page.count('<img') == 3 and 'on noise, 2 runs' in page
  assert 'recovered' not in page.lower().replace('--recovered', '') and 'nothing on this page says' in page
  assert (tmp_path / 'reconstructions.png').read_bytes().startswith(b'\x89PNG')
  table = report.captured_table(changed)
  assert script in table and '2 of 2' in table and 'knows the defense' in table


def test_the_page_without_controls(stored):
  nothing = np.zeros(0, np.float32)
  (one,) = (
    dataclasses.replace(one, control_mismatch=nothing, control_samples=one.control_samples[:0], grey=2.0)
    for one in stored[0].inversions
  )
  result = dataclasses.replace(stored[0], inversions=[one], config={**stored[0].config, 'controls': 0})
  page = report.render_captured(result)
  assert 'No control was run.' in page and 'no control was run' in page and page.count('<img') == 1


@pytest.mark.slow
def test_the_example(tmp_path, monkeypatch, capsys):
  monkeypatch.chdir(tmp_path)
  path = pathlib.Path(__file__).parents[1] / 'examples' / 'captured_upload.py'
  assert len(path.read_text('utf-8').splitlines()) < 40
  (one,) = runpy.run_path(str(path))['result'].inversions
  face = gl.data.load('faces', 'test', limit=1).samples[0]
  assert gl.metrics.pearson(one.samples[:1], face[None])[0] > 0.98 and one.closer == 4
  assert 'report: results/captured/report.html' in capsys.readouterr().out


@pytest.mark.long
@pytest.mark.parametrize(
  'missing', ['bias', *(pytest.param(late, marks=pytest.mark.slow) for late in ('kernel', None))]
)
def test_a_tensor_that_is_missing_is_not_compared(affine, missing):
  """Labels are read from what is there."""
  update = affine.update()
  update |= {} if missing is None else {missing: np.zeros_like(update[missing])}
  found = affine.attack(update, steps=60)
  (one,) = found.inversions
  assert (one.labels_mode, list(one.labels)) == ('inferred', affine.targets[:1].tolist())
  assert one.mismatch < 0.1
  assert ('They are not compared' in ' '.join(found.warnings)) == (missing is not None)


@pytest.mark.long
def test_a_closed_form_without_labels_is_compared_where_the_bias_is_missing(dense):
  """The label is read from the weights then: as class 0, which a bias of zeros is read as, it would explain nothing."""
  for missing in (False, True):
    moved = Case(dense.model, dense.samples[1:], dense.targets[1:])
    update = moved.update()
    if missing:
      update['Dense_1']['bias'] = np.zeros_like(update['Dense_1']['bias'])
    (one,) = moved.attack(update, attacks=[gl.attacks.fidel(candidates=1)]).inversions
    assert moved.targets[0] != 0 and one.mismatch < 1e-6


@pytest.mark.long
def test_labels_of_an_update_of_adapters_are_optimised():
  digits = gl.data.load('digits', limit=1)
  case = Case(gl.models.create('lenet(width=4)+lora(rank=2)', 10), digits.samples, digits.targets)
  (one,) = case.attack(case.update(), attacks=[gl.attacks.csdlg(steps=2)], sample_shape=(8, 8, 1)).inversions
  assert one.labels.shape == (1,) and np.isfinite(one.mismatch)


class Segmenting(nn.Module):
  @nn.compact
  def __call__(self, x):
    return nn.Dense(10)(nn.tanh(nn.Dense(4)(x)))


@pytest.fixture(scope='module')
def segmenting():
  """(its model and updates, the classes of its pixels)."""
  images = np.asarray(gl.data.load('digits', limit=2).samples)
  classes = np.rint(9 * images[..., 0]).astype(np.int32)
  return Case(gl.models.from_flax(Segmenting()), images, classes), classes


def test_classes_of_positions_are_given_as_the_loss_takes_them(segmenting):
  case, classes = segmenting
  known = functools.partial(captured._known, case.model, case.variables, SHAPE, None)
  chosen = gl.studies.captured.CapturedSettings(num_samples=2, labels=classes.astype(np.int64))
  mode, labels, _ = known(chosen, gl.ClientSettings())
  assert mode == 'known' and np.array_equal(labels, classes)
  for wrong in (classes[:1], classes[..., 0], classes[:, 0, 0]):
    with pytest.raises(gl.UsageError, match=r'expected integers \(2, 8, 8\), one for each position'):
      known(dataclasses.replace(chosen, labels=wrong), gl.ClientSettings())
  with pytest.raises(gl.UsageError, match='label'):
    known(dataclasses.replace(chosen, labels=classes + 2), gl.ClientSettings())
  stand_in = case.stand_in(2)
  assert stand_in.targets.shape == classes.shape and not stand_in.one_class
  assert captured._mode('', gl.attacks.csdlg(), stand_in, '') == 'optimised'
  assert captured._mode('', gl.attacks.fidel(), stand_in, '') == 'auto'


@pytest.mark.long
def test_an_update_of_a_segmentation_is_attacked(segmenting):
  case, classes = segmenting
  options = {'attacks': [gl.attacks.csdlg(tv=0.0)], 'num_samples': 2, 'controls': 1}
  (given,) = case.attack(case.update(2), labels=classes, **options).inversions
  assert given.labels_mode == 'known' and np.isfinite(given.mismatch)
  (alone,) = case.attack(case.update(2), **options).inversions
  assert alone.labels_mode == 'optimised' and np.isnan(alone.mismatch)
  found = case.attack(case.update(2), truth=(case.samples, classes), labels=classes, **options)
  assert found.inversions[0].at_truth < 1e-6 and found.rows
  with pytest.raises(gl.UsageError, match='label rules read one class of each sample'):
    case.attack(case.update(2), labels='inferred', **options)


@pytest.mark.parametrize('dense_layers', [1, 2])
def test_pytorchs_layout_of_a_model_that_lists_no_layers(dense_layers, tmp_path):
  """Names whose order is not that of the layers: what each dense layer takes is read from the network."""
  names = {'conv1': (3, 3, 3, 4), 'classifier': (8 * 8 * 4, 10), 'after': (10, 10)}
  chosen = dict(list(names.items())[: 1 + dense_layers])
  rng = np.random.default_rng(0)
  params = {name: {'kernel': rng.normal(size=shape).astype(np.float32)} for name, shape in chosen.items()}

  def apply(params, images):
    options = {'dimension_numbers': ('NHWC', 'HWIO', 'NHWC')}
    maps = jax.lax.conv_general_dilated(images, params['conv1']['kernel'], (1, 1), 'SAME', **options)
    logits = maps.reshape(len(maps), -1) @ params['classifier']['kernel']
    return logits @ params['after']['kernel'] if 'after' in params else logits

  model = gl.models.from_functions(lambda key, shape: params, apply)
  first = params['classifier']['kernel'].reshape(8, 8, 4, 10).transpose(3, 2, 0, 1).reshape(10, -1)
  entries = {'conv1.weight': params['conv1']['kernel'].transpose(3, 2, 0, 1), 'classifier.weight': first}
  if dense_layers > 1:
    entries['after.weight'] = params['after']['kernel'].T
  np.savez(tmp_path / 'update.npz', **entries)
  found = gl.read_update(tmp_path / 'update.npz', model, {'params': params}, sample_shape=(8, 8, 3))
  for name, kernel in params.items():
    np.testing.assert_array_equal(found[name]['kernel'], kernel['kernel'])


def state_dict(update):
  """Returns the tensors of an update in the order of PyTorch's state dict, by its names."""
  entries = as_torch(update)
  return {name: entries[name] for name in sorted(entries, key=lambda name: (name.partition('.')[0], 'bias' in name))}


def torch_list(arrays, path):
  """Writes a list of tensors as torch.save does."""
  pickles, storages = tensors({str(i): x for i, x in enumerate(arrays)})
  path.write_bytes(zipped(b'](' + b''.join(pickles.values()) + b'e', storages))
  return path


class Tensor:
  """What a tensor of PyTorch looks like from outside."""

  def __init__(self, values, dtype='torch.float32', is_quantized=False):
    self.values, self.dtype, self.is_quantized = values, dtype, is_quantized

  detach = cpu = lambda self: self

  def float(self):
    return Tensor(self.values.astype(np.float32))

  def __array__(self, dtype=None, copy=None):
    if self.dtype != 'torch.float32':
      raise TypeError(f'Got unsupported ScalarType of {self.dtype}')
    return np.asarray(self.values, dtype)


FORMS = ('dictionary', 'nested', 'list', 'savez', 'torch list', 'tensors', 'tree', 'frozen')


@pytest.mark.parametrize('form', FORMS)
def test_every_form_in_which_a_framework_has_an_update(form, dense, tmp_path):
  update = dense.update()
  by_name, arrays = state_dict(update), list(state_dict(update).values())
  path = tmp_path / 'update.npz'
  np.savez(path, *arrays)
  what = {
    'dictionary': by_name,
    'nested': {'_orig_mod': {'module': {'model': by_name}}},
    'list': arrays,
    'savez': path,
    'torch list': torch_list(arrays, tmp_path / 'update.pt'),
    'tensors': {name: Tensor(x) for name, x in by_name.items()},
    'tree': update,
    'frozen': {**by_name, 'Dense_9.kernel': None},  # as `parameter.grad` has it
  }[form]
  read = gl.read_update(what, dense.model, dense.variables)
  jax.tree.map(np.testing.assert_array_equal, read, update)


def test_a_network_for_series_is_told_what_it_can_be_attacked_on(dense):
  with pytest.raises(gl.UsageError, match='takes samples of 2 axes, and images have 3: no kind of samples has as many'):
    gl.attack(jax.random.key(0), dense.model._replace(axes=2), dense.variables, dense.update(), progress='none')


def test_short_floats_are_read_and_quantised_values_refused(dense, tmp_path):
  update = state_dict(dense.update())
  short = {name: jax.numpy.asarray(x, jax.numpy.bfloat16) for name, x in update.items()}
  expected = jax.tree.map(lambda x: np.asarray(jax.numpy.asarray(x, jax.numpy.bfloat16), np.float32), dense.update())
  tensors_ = {name: Tensor(np.asarray(x), 'torch.bfloat16') for name, x in short.items()}
  eight = {name: Tensor(np.asarray(x), 'torch.float8_e4m3fn') for name, x in short.items()}
  for what in (short, tensors_, eight, written('npz', {name: np.asarray(x) for name, x in short.items()}, tmp_path)):
    jax.tree.map(np.testing.assert_array_equal, gl.read_update(what, dense.model, dense.variables), expected)
  quantised = {name: (x * 100).astype(np.int8) for name, x in update.items()}
  with pytest.raises(gl.UsageError, match=r'the tensor Dense_\d\.\w+ is int8, expected floats\. Quantised values mean'):
    gl.read_update(quantised, dense.model, dense.variables)
  with pytest.raises(gl.UsageError, match='is quantised: give its dequantize'):
    first, *_ = update
    gl.read_update({**update, first: Tensor(update[first], is_quantized=True)}, dense.model, dense.variables)
  empty = Tensor(update[first])
  empty.is_meta = True
  with pytest.raises(gl.UsageError, match=f'{first} is on the device meta, where it has no values'):
    gl.read_update({**update, first: empty}, dense.model, dense.variables)


@pytest.mark.long
def test_weights_that_came_back_less_those_sent(dense, tmp_path):
  update, sent = dense.update(), dense.variables['params']
  returned = jax.tree.map(lambda w, u: np.asarray(w) - np.float32(0.1) * u, dict(sent), update)
  expected = jax.tree.map(lambda a, b: np.asarray(a, np.float64) - np.asarray(b, np.float64), returned, dict(sent))
  np.savez(tmp_path / 'sent.npz', *state_dict(sent).values())
  for before in (dense.variables, sent, tmp_path / 'sent.npz', list(state_dict(sent).values())):
    read = gl.read_update(state_dict(returned), dense.model, dense.variables, sent=before)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b.astype(np.float32)), read, expected)
  (one,) = (
    Case(dense.model, dense.samples, dense.targets, share='delta').attack(read, attacks=[gl.attacks.fidel()]).inversions
  )
  np.testing.assert_allclose(one.samples[0], dense.samples[0], atol=1e-3)
  part = {name: x for name, x in state_dict(returned).items() if name.startswith('Dense_0')}
  with pytest.raises(gl.UsageError, match=r'what was sent has Dense_1\.bias, and the update does not'):
    gl.read_update(part, dense.model, dense.variables, sent=sent, partial=True)


class OfFlower:
  """An array as Flower sends it: bytes, and what makes an array of them."""

  def __init__(self, values):
    self.numpy = lambda: values


def test_arrays_of_flower_are_read(affine):
  update = affine.update()
  found = gl.read_update({name: OfFlower(x) for name, x in update.items()}, affine.model, affine.variables)
  jax.tree.map(np.testing.assert_array_equal, found, dict(update))


def test_a_list_that_does_not_fit_says_how_to_name_its_arrays(dense, tmp_path):
  arrays = list(state_dict(dense.update()).values())
  advice = r'give a dictionary, as dict\(zip\(network\.state_dict\(\), arrays\)\)$'
  with pytest.raises(gl.UsageError, match=rf'a list of 3 arrays, and .+ has 4 parameters and 0 statistics.*{advice}'):
    gl.read_update(arrays[:3], dense.model, dense.variables)
  with pytest.raises(gl.UsageError, match=r'of another shape: Dense_0\.weight'):
    gl.read_update([arrays[2], arrays[3], arrays[0], arrays[1]], dense.model, dense.variables)
  unordered = dense.model._replace(layers=None)
  with pytest.raises(gl.UsageError, match=rf'does not tell the order of its layers: {advice}'):
    gl.read_update(arrays, unordered, dense.variables, sample_shape=SHAPE)
  with pytest.raises(gl.UsageError, match=r'the update is 3, expected the path of a file, a dictionary'):
    gl.read_update(3, dense.model, dense.variables)


class Square(nn.Module):
  bias: bool = True

  @nn.compact
  def __call__(self, images):
    for _ in range(2):
      images = nn.Dense(4, use_bias=self.bias)(images.reshape(len(images), -1))
    return images


def test_a_list_of_square_layers_is_in_pytorchs_layout_as_a_dictionary_is():
  model, rng = gl.models.from_flax(Square()), np.random.default_rng(0)
  variables = model.init(jax.random.key(0), (2, 2, 1))
  update = jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32), variables['params'])
  for what in (state_dict(update), list(state_dict(update).values()), jax.tree.leaves(update)):
    read = gl.read_update(what, model, variables, sample_shape=(2, 2, 1))
    jax.tree.map(np.testing.assert_array_equal, read, update)
  model = gl.models.from_flax(Square(bias=False))
  kernels = {name: {'kernel': layer['kernel']} for name, layer in update.items()}
  with pytest.raises(gl.UsageError, match='its shapes do not tell whether the list has the leaves'):
    gl.read_update(jax.tree.leaves(kernels), model, {'params': kernels}, sample_shape=(2, 2, 1))


def test_an_update_by_pytorchs_names_of_a_network_of_pytorch_is_read_before_it_is_attacked(dense):
  of_torch = Case(dense.model._replace(layout=Layout((), SHAPE)), dense.samples, dense.targets)
  update = dense.update()
  for flat in (named(update), {'params': named(update)}, jax.tree.map(Tensor, update)):
    with pytest.raises(gl.UsageError, match=r'whose layout is another: gradleak\.read_update\(update, model'):
      of_torch.attack(flat)
    captured.update.checked(jax.tree.map(np.asarray, flat), dense.variables['params'])  # names alone turn nothing
  captured.update.checked(update, dense.variables['params'], of_torch.model.layout)


def test_a_list_without_one_of_its_arrays_is_refused(dense, tmp_path):
  first, _, *others = jax.tree.leaves(dense.update())
  listed = {'arr_0': first, **{f'arr_{i + 2}': x for i, x in enumerate(others)}}
  np.savez(tmp_path / 'update.npz', **listed)
  for what in (listed, tmp_path / 'update.npz'):
    with pytest.raises(gl.UsageError, match=r'arrays are missing: it holds arr_0, arr_2, arr_3, and no arr_1$'):
      gl.read_update(what, dense.model, dense.variables)


def test_two_tensors_of_one_name_are_refused(dense):
  update = state_dict(dense.update())
  more = {'fc1.bias': update['Dense_0.bias']}
  for what, names, match in (
    ({**update, **more}, {'fc1': 'Dense_0'}, r'the name Dense_0\.bias by names='),
    ({**update, 'Dense_0': {'bias': update['Dense_0.bias']}}, None, r'the name Dense_0\.bias:'),
    ({**update, 'Dense_0/bias': update['Dense_0.bias']}, None, r'the name Dense_0\.bias:'),
    ({'module.a': more['fc1.bias'], 'batch_stats.a': more['fc1.bias']}, None, 'the name a without its prefix'),
  ):
    with pytest.raises(gl.UsageError, match=f'two tensors have {match}'):
      gl.read_update(what, dense.model, dense.variables, names=names)
  swapped = {name.replace('Dense_0', 'x'): x for name, x in update.items()}
  read = gl.read_update(swapped, dense.model, dense.variables, names={'x': 'Dense_0'})
  jax.tree.map(np.testing.assert_array_equal, read, dense.update())


def test_a_list_with_the_statistics_of_batch_norm():
  model, rng = small(), np.random.default_rng(0)
  variables = model.init(jax.random.key(0), SHAPE)
  drawn = jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32), dict(variables))
  arrays = []
  for layer in model.layers(SHAPE):
    for module in dict.fromkeys(path[:-1] for path in layer.paths):
      values = trees.get(drawn['params'], module)
      for leaf in ('kernel', 'scale', 'bias'):
        if leaf in values:
          arrays.append(in_torch(module, leaf, values[leaf]))
      if 'scale' in values:
        statistics = trees.get(drawn['batch_stats'], module)
        arrays += [statistics['mean'], statistics['var'], np.asarray(3, np.int64)]
  read = gl.read_update(arrays, model, variables, sample_shape=SHAPE)
  jax.tree.map(np.testing.assert_array_equal, read, drawn['params'])
  jax.tree.map(np.testing.assert_array_equal, gl.read_weights(arrays, model, SHAPE), drawn)


def in_torch(module, leaf, values):
  """Returns a tensor of `small` in PyTorch's layout."""
  if leaf != 'kernel':
    return values
  if module == ('linear',):
    return values.T
  side = 1 if 'shortcut' in '.'.join(module) else 3
  return values.reshape(len(values), side, side, -1).transpose(0, 3, 2, 1)


@pytest.mark.long
def test_verdicts_of_an_auditor_who_owns_the_images(dense, tmp_path):
  options = {'attacks': [gl.attacks.fidel(), gl.attacks.csdlg_fast()], 'controls': 4, 'workdir': tmp_path / 'w'}
  found = dense.attack(dense.update(), truth=(dense.samples[:1], dense.targets[:1]), **options)
  frame = found.to_frame()
  assert frame['attack'].tolist() == ['fidel', 'csdlg_fast']
  assert frame['verdict'][0] == 'exact' and frame['psnr'][0] > 60 > 20 > frame['psnr'][1]
  assert len(found.controls) == 8 and all(row['control'] for row in found.controls)
  assert set(found.rows[0]) == {column.name for column in schema.columns(gl.modalities.IMAGES)}
  table, page = report.captured_table(found), report.render_captured(found)
  assert 'exact' in table and 'knows the defense' not in table
  assert 'Judged by the private samples' in page and 'nothing on this page says' not in page
  again = dense.attack(dense.update(), truth=(dense.samples[:1], dense.targets[:1]), **options)
  assert again.rows == found.rows
  with pytest.raises(gl.UsageError, match=r'belongs to other settings: .*truth was True, now False'):
    dense.attack(dense.update(), **options)


@pytest.mark.slow
def test_among_few_others_the_control_decides_what_is_recognised():
  """An image of noise was called recognisable: the rank is certain, and the thumbnail shows nothing."""
  shape, number = (12, 12, 1), np.random.default_rng(0)
  image, others = (number.uniform(size=(count, *shape)).astype(np.float32) for count in (1, 120))
  owned = Case(gl.models.mlp(10, widths=16), image, np.array([3]))
  verdicts, notes = [], []
  for steps, gallery in ((10, []), (20, []), (10, [others[:98]]), (10, [others])):
    options = {'sample_shape': shape, 'controls': 4, 'attacks': [gl.attacks.csdlg_fast(steps=steps)]}
    found = owned.attack(owned.update(), truth=(image, [3], *gallery), **options)
    (row,) = found.rows
    verdicts.append(row['verdict'])
    notes.append('is not judged: this needs 99 candidates' in report.render_captured(found))
    assert row['recognised'] == 1 and notes[-1] == ('needs 99 candidates' in report.captured_table(found))
  assert verdicts == ['inconclusive', 'recognisable', 'inconclusive', 'recognisable']
  assert notes == [True, True, True, False] and row['candidates'] == 120


def test_a_truth_that_does_not_fit_is_refused(dense):
  for truth, message in [
    (dense.samples[:1], r'truth is .*, expected \(samples, targets\)'),
    ((dense.samples[:1], [10]), 'has the label 10'),
    ((dense.samples[:1] * 3, dense.targets[:1]), r'\[0, 1\]'),
    ((dense.samples[:1], dense.targets[:1], dense.samples[:, :4]), 'the gallery is .*, expected floats'),
  ]:
    with pytest.raises(gl.UsageError, match=message):
      dense.attack(dense.update(), truth=truth, attacks=[gl.attacks.fidel()])
  with pytest.raises(gl.UsageError, match='the truth has 2 samples, and num_samples is 1'):
    dense.attack(dense.update(), truth=(dense.samples[:2], dense.targets[:2]), num_samples=1)
  with pytest.raises(gl.UsageError, match=r'the labels given are \[\d\], and those of the truth \[\d\]'):
    dense.attack(dense.update(), truth=(dense.samples[:1], dense.targets[:1]), labels=[int(dense.targets[0]) ^ 1])
  with pytest.raises(gl.UsageError, match=r'give attack truth=\(samples, targets\)'):
    dense.attack(dense.update(), attacks=[gl.attacks.fidel()]).to_frame()


@pytest.mark.long
@pytest.mark.parametrize(
  ('given', 'told'),
  [({'local_epochs': 2}, True), ({'local_epochs': 2, 'learning_rate': 0.1}, False), ({}, False)],
  ids=str,
)
def test_a_learning_rate_that_nobody_gave_is_told_where_it_counts(given, told, affine, monkeypatch):
  monkeypatch.setattr(captured, '_inverted', lambda *_: ([], [], []))
  found = affine.attack(affine.update(), share='delta', attacks=[gl.attacks.dlg()], **given).warnings
  text = 'The learning rate of the client is not given, and 0.1 is assumed. Over 2 local steps,'
  assert any(one.startswith(text) for one in found) is told
  assert any('learning rate' in one for one in found) is told


@pytest.mark.long
def test_a_truth_of_a_small_range_is_told(affine, monkeypatch):
  monkeypatch.setattr(captured, '_inverted', lambda *_: ([], [], []))
  for scale in (1, 255):
    truth = affine.samples[:1] / scale, affine.targets[:1]
    told = affine.attack(affine.update(), truth=truth, attacks=[gl.attacks.dlg()]).warnings
    assert any(re.match(r'The truth uses \[0.*\] of \[0, 1\] alone', one) for one in told) == (scale == 255)


@pytest.mark.long
def test_a_defense_may_be_a_text(affine):
  attack = [gl.attacks.csdlg_fast()]
  update = affine.update()
  texts, objects = (
    affine.attack(update, attacks=attack, defense=one) for one in ('clip(norm=1)', gl.defenses.clip(norm=1))
  )
  assert texts.config == objects.config and [one.adaptive for one in texts.inversions] == [None, 'clipped']
  with pytest.raises(gl.UsageError, match="unknown defense 'clp'; did you mean 'clip'"):
    affine.attack(update, defense='clp(norm=1)')


@pytest.fixture(scope='module')
def adam(small_images):
  return Case(gl.models.mlp(10, widths=16), *small_images, share='delta', optimizer='adam', learning_rate=1e-3)


@pytest.mark.slow
def test_one_step_of_adam_is_attacked_by_its_signs(adam, dense):
  update = adam.update()
  of_signs = captured.of_signs
  assert of_signs(update) and not of_signs(dense.update())
  found = adam.attack(update, steps=120, controls=2)
  assert [one.attack for one in found.inversions] == ['fidel', 'ladder(match=sign)']  # peeling reads gradients
  last = found.inversions[-1]
  assert last.closer == 2 and not last.inconclusive and last.mismatch < 0.9 * last.grey
  assert any('signs times a rate' in text for text in found.warnings)
  assert any('for the sign of the gradient' in sentence for sentence in last.granted)
  tiers = [sentence for one in found.inversions for sentence in one.granted if sentence.startswith('Threat model')]
  assert [sentence[:14] for sentence in tiers] == ['Threat model A', 'Threat model C']  # knows the training


def test_several_steps_of_adam_are_not_attacked_by_signs(adam, dense, small_images, monkeypatch):
  choose, searches = captured._attacks, []

  def chosen(*given):
    searches.append(choose(*given)[-1].label)
    raise KeyboardInterrupt  # before it runs

  monkeypatch.setattr(captured, '_attacks', chosen)
  several = Case(gl.models.mlp(10, widths=16), *small_images, **{**adam.fields, 'local_epochs': 3})
  for case in (adam, several):
    with pytest.raises(KeyboardInterrupt):
      case.attack(dense.update())
  assert searches == ['ladder(match=sign)', 'ladder']


@pytest.mark.parametrize(
  ('ends', 'said'),
  [
    ([0.6, 0.9], 'closer than all of 2 runs on noise, which end at 0.6 – 0.9.'),
    ([np.nan, 0.9], 'closer than all of 2 runs on noise, which end at 0.9 where they find anything.'),
    ([np.nan], 'closer than 1 of 1 run on noise, which finds nothing.'),
  ],
)
def test_runs_on_noise_that_find_nothing_are_not_said_to_end_as_others_do(ends, said):
  one = types.SimpleNamespace(attack='a', adaptive=None, diverged=False, found=True, mismatch=0.1, inconclusive='')
  one.control_mismatch, one.closer = np.array(ends), len(ends)
  assert str(report_captured.finding(one)).endswith(said)


@pytest.mark.slow
def test_an_objective_that_does_not_move_is_inconclusive(adam):
  """Adam's first step is a sign, whose derivative is nearly zero: the search stays where it started."""
  start = gl.attacks.csdlg(steps=5, start='constant', learning_rate=1e-9)
  (one,) = adam.attack(adam.update(), attacks={'still': start}).inversions
  assert one.inconclusive == 'unmoved'
  (other,) = (dataclasses.replace(one, objective=0.1 * one.objective_start, grey=one.mismatch),)
  assert other.inconclusive == 'grey'
  assert dataclasses.replace(other, grey=1.1 * one.mismatch).inconclusive == ''
  for said, words in ((one, 'its objective did not move'), (other, 'no better than grey images do')):
    assert words in str(report_captured.finding(said)) and 'closer than' not in str(report_captured.finding(said))
  result = dataclasses.replace(adam.attack(adam.update(), attacks=[gl.attacks.fidel()]), inversions=[one])
  assert 'inconclusive' in report.captured_table(result) and 'did not move' in report.render_captured(result)


TARGETS = {
  'cross_entropy': np.random.default_rng(0).dirichlet(np.ones(10), 2).astype(np.float32),
  'mean_squared_error': np.random.default_rng(1).random((2, 10)).astype(np.float32),
  'binary_cross_entropy': np.eye(10, dtype=int)[:2] + np.eye(10, dtype=int)[2:4],
}


@pytest.mark.long
@pytest.mark.parametrize('loss', TARGETS)
def test_labels_and_a_truth_in_a_file_are_as_the_loss_takes_them(dense, loss, tmp_path):
  client, targets = gl.ClientSettings(loss=loss).client(dense.model, 10), TARGETS[loss]
  samples = dense.samples[:2]
  update = client.local_update(None, dense.variables, samples, targets.astype(np.float32)).update
  np.savez(tmp_path / 'truth.npz', samples=samples, targets=targets)
  truth = captured.read_truth(tmp_path / 'truth.npz', SHAPE)
  options = {'attacks': [gl.attacks.csdlg()], 'loss': loss, 'controls': 1}
  found = dense.attack(update, truth=truth, labels=targets, **options)
  (one,) = found.inversions
  assert one.labels_mode == 'known' and one.at_truth < 1e-6 and not any('classes' in told for told in found.warnings)
  (alone,) = dense.attack(update, labels=targets, num_samples=2, **options).inversions
  assert alone.mismatch == pytest.approx(one.mismatch, abs=1e-6)
  simulated = client.local_update(None, dense.variables, alone.samples, targets.astype(np.float32)).update
  assert alone.mismatch == pytest.approx(float(cosine(simulated, update)), abs=1e-5)
  with pytest.raises(gl.UsageError, match=r'the labels given are .*, and those of the truth'):
    dense.attack(update, truth=truth, labels=targets[:, ::-1], **options)
  for wrong in ({'labels': targets[:, :7]}, {'truth': (samples, targets[:, :7])}):
    with pytest.raises(gl.UsageError, match=r'labels are .* of shape \(2, 7\), expected'):
      dense.attack(update, num_samples=2, **wrong, **options)


def test_the_truth_in_a_file(dense, tmp_path):
  images, labels = dense.samples[:2], dense.targets[:2]
  path = tmp_path / 'truth.npz'
  wide = np.random.default_rng(0).integers(0, 256, (2, 4, 5, 3), np.uint8)
  for arrays, expected, shape in [
    ({'samples': images, 'targets': labels}, images, SHAPE),
    ({'arr_0': images, 'arr_1': labels}, images, SHAPE),
    ({'images': wide.transpose(0, 3, 1, 2), 'labels': labels}, wide.astype(np.float32) / 255, (4, 5, 3)),
    ({'images': np.zeros_like(wide), 'labels': labels}, np.zeros_like(wide, np.float32), (4, 5, 3)),
  ]:
    np.savez(path, **arrays)
    found = captured.read_truth(path, shape)
    np.testing.assert_array_equal(found[0], expected)
    np.testing.assert_array_equal(found[1], labels)
    assert found[2] is None
  np.savez(path, samples=wide, targets=labels, gallery=wide.transpose(0, 3, 1, 2))
  np.testing.assert_array_equal(captured.read_truth(path, (4, 5, 3))[2], wide.astype(np.float32) / 255)
  np.savez(path, pictures=images, labels=labels)
  with pytest.raises(
    gl.UsageError, match=r'holds pictures, labels, expected one array of samples, called samples or images'
  ):
    captured.read_truth(path, SHAPE)
  for mask in ('samples', 'gallery'):
    np.savez(path, **{'samples': wide, 'targets': labels, mask: (wide > 127).astype(np.uint8)})
    with pytest.raises(gl.UsageError, match='bytes of 0 and 1 alone, and a byte of 255 is white'):
      captured.read_truth(path, (4, 5, 3))
  with pytest.raises(gl.UsageError, match=r"cannot read the truth in 'nowhere\.npz'"):
    captured.read_truth('nowhere.npz', SHAPE)
