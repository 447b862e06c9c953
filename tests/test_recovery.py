"""The main program's default setting leaks, and its control does not."""

import jax
import numpy as np
import pytest

import gradleak as gl


@pytest.mark.slow
def test_faces_leak_and_their_controls_do_not():
  dataset = gl.data.load('faces', limit=20)
  model = gl.models.create('lenet', dataset.num_classes)
  scenario = gl.scenario(model, dataset.samples, dataset.targets, key=jax.random.fold_in(jax.random.key(0), 0))
  found = gl.audit(
    jax.random.fold_in(jax.random.key(0), 1), scenario, [None, gl.defenses.null_gradient()],
    [gl.attacks.csdlg(tv=1e-6)], 20, steps=2000, progress='none',
  )  # fmt: skip
  psnr = {
    defense: [row['psnr'] for row in found.rows if row['defense'] == defense] for defense in ('none', 'null_gradient')
  }
  assert np.mean(psnr['none'][:8]) >= 45  # the program's default are eight trials
  assert sum(row['success'] for row in found.rows if row['defense'] == 'null_gradient') <= 2  # of 20
  assert len(found.controls) == 64
  assert max(row['psnr'] for row in found.controls) < 15
  assert max(psnr['null_gradient']) < 15
