"""An audit's figures by networks: FMSE always, LPIPS where its weights are given."""

import jax
import numpy as np
import pytest

import gradleak as gl
from gradleak import report
from gradleak.metrics import perceptual

SIDE = 17
pytestmark = pytest.mark.usefixtures('fast_compilation')


def guess(client):
  """An attack without steps that returns noise, its images in the order of the batch."""
  del client
  return gl.attacks.closed_form(
    lambda observation, key: (jax.random.uniform(key, observation.batch_shape), None), random=True
  )


@pytest.fixture(scope='module')
def files(tmp_path_factory):
  """Random weights of SqueezeNet and heads: (backbone, heads)."""
  folder, rng = tmp_path_factory.mktemp('weights'), np.random.default_rng(0)
  network = perceptual._BACKBONES['squeeze']
  tensors = {name: 0.1 * rng.standard_normal(shape, np.float32) for name, shape in network.shapes().items()}
  np.savez(folder / 'backbone.npz', **tensors)
  np.savez(folder / 'heads.npz', **{f'lin{i}': np.ones(n, np.float32) for i, n in enumerate(network.channels)})
  return folder / 'backbone.npz', folder / 'heads.npz'


@pytest.fixture(scope='module')
def scenario():
  rng = np.random.default_rng(1)
  model = gl.models.from_functions(
    lambda key, _: {'kernel': jax.random.normal(key, (SIDE * SIDE, 3))},
    lambda params, images: images.reshape(-1, SIDE * SIDE) @ params['kernel'],
    'linear',
  )
  images = rng.uniform(size=(4, SIDE, SIDE, 1)).astype(np.float32)
  return gl.scenario(model, images, np.arange(4) % 3, key=jax.random.key(0), dataset='noise')


def audit(scenario, **changes):
  given = {'controls': 2, 'batch_size': 2, 'progress': 'none', 'knowledge': 'non-adaptive', **changes}
  return gl.audit(jax.random.key(0), scenario, [None], {'guess': guess}, 2, **given)


def settings(files, **changes):
  return {'lpips_backbone': 'squeeze', 'lpips_weights': str(files[0]), 'lpips_heads': str(files[1]), **changes}


@pytest.mark.slow
def test_rows_and_page_hold_lpips_where_its_weights_are_given(scenario, files):
  with_it, without = audit(scenario, **settings(files)), audit(scenario)
  weights = gl.metrics.read_lpips('squeeze', backbone_weights=files[0], heads=files[1])
  kernel = np.asarray(scenario.variables['params']['kernel'], np.float64)
  for row, images, truth in zip(with_it.rows, with_it.reconstructions['guess', 'none'], with_it.truth, strict=True):
    np.testing.assert_allclose(row['lpips'], np.mean(jax.jit(gl.metrics.lpips)(images, truth, weights)), rtol=1e-5)
    np.testing.assert_allclose(row['ms_ssim'], np.mean(jax.jit(gl.metrics.ms_ssim)(images, truth)), rtol=1e-5)
    logits = (images.astype(np.float64) - truth).reshape(2, -1) @ kernel
    np.testing.assert_allclose(row['fmse'], np.mean(logits**2), rtol=1e-4)
  assert all(row['lpips'] > 0 for row in with_it.controls)
  assert [row['lpips'] for row in without.rows + without.controls] == [None] * 4
  assert [{**row, 'lpips': None} for row in with_it.rows] == without.rows
  assert ['LPIPS' in report.render(result).split('More figures')[0] for result in (with_it, without)] == [True, False]
  assert report.summarise(with_it.rows)[0]['lpips'] == pytest.approx(np.mean([row['lpips'] for row in with_it.rows]))


@pytest.mark.slow
def test_a_work_directory_belongs_to_weights_not_to_paths(scenario, files, tmp_path):
  audit(scenario, workdir=tmp_path / 'run', **settings(files))
  moved = tmp_path / 'moved.npz'
  moved.write_bytes(files[0].read_bytes())
  assert audit(scenario, workdir=tmp_path / 'run', **settings(files, lpips_weights=str(moved))).resumed
  with pytest.raises(gl.UsageError, match='lpips'):
    audit(scenario, workdir=tmp_path / 'run')
  assert not any('lpips' in name for name in audit(scenario).config)


@pytest.mark.parametrize(
  'changes, expected',
  [
    ({'lpips_heads': None}, 'lpips_heads is missing: LPIPS needs two files, lpips_weights and lpips_heads'),
    ({'lpips_weights': None}, 'lpips_weights is missing'),
    ({'lpips_backbone': 'alex'}, '17×17 pixels, too few for LPIPS'),
    ({'lpips_backbone': 'resnet'}, "unknown lpips_backbone 'resnet'"),
  ],
)
def test_what_cannot_be_measured_is_refused_before_anything_runs(scenario, files, changes, expected):
  with pytest.raises(gl.UsageError, match=expected):
    audit(scenario, **settings(files, **changes))
