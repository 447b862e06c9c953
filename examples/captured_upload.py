"""Captures the gradient of one private face in a file, and attacks the file as one who holds it and the weights would.

python examples/captured_upload.py
"""

import pathlib

import jax
import numpy as np

import gradleak as gl

folder = pathlib.Path('results/captured')
folder.mkdir(parents=True, exist_ok=True)
faces = gl.data.load('faces', 'test', limit=1)
model = gl.models.lenet(faces.num_classes)
variables = model.init(jax.random.key(0), faces.samples.shape[1:])


def save(name, params):
  """Writes named tensors, as any training loop can."""
  named = {jax.tree_util.keystr(path, simple=True, separator='/'): x for path, x in jax.tree.leaves_with_path(params)}
  np.savez(folder / name, **named)


client = gl.ClientSettings().client(model, faces.num_classes)
save('weights.npz', variables['params'])
save('update.npz', client.local_update(None, variables, faces.samples, faces.targets).update)

update = gl.read_update(folder / 'update.npz', model, variables)
result = gl.attack(jax.random.key(1), model, variables, update, sample_shape=faces.samples.shape[1:], steps=500)
gl.report.write(result, folder)
print(gl.report.captured_table(result), '\n\nreport: results/captured/report.html')
