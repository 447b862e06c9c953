"""The program that attacks a captured update, end to end on small settings."""

import json

import jax
import numpy as np
import pytest

import gradleak as gl
from gradleak.core import trees
from tests import programs

pytestmark = pytest.mark.usefixtures('fast_compilation')


@pytest.fixture(scope='module')
def folder(small_images, tmp_path_factory):
  """A folder with the weights of a small network, and the gradient of a client of one digit."""
  path = tmp_path_factory.mktemp('captured')
  model = gl.models.mlp(10, widths=16)
  variables = model.init(jax.random.key(0), (8, 8, 1))
  images, labels = small_images
  update = gl.ClientSettings().client(model, 10).local_update(None, variables, images[:1], labels[:1]).update
  returned = jax.tree.map(lambda w, g: w - 0.1 * g, variables['params'], update)
  np.savez(path / 'truth.npz', images=images[:1], labels=labels[:1])
  np.savez(path / 'scalar.npz', images=images[:1], labels=labels[0])
  for name, tree in (('weights', variables['params']), ('update', update), ('returned', returned)):
    np.savez(path / f'{name}.npz', **{'/'.join(trees.path_names(p)): x for p, x in jax.tree.leaves_with_path(tree)})
  return path


def start(folder, *flags):
  """Runs the program on the files in a folder; later flags replace earlier ones."""
  files = [f'--{name}={folder}/{name}.npz' for name in ('update', 'weights')]
  common = ('--sample_shape=8,8,1', '--model=mlp(widths=16)', '--controls=2', '--compilation_cache=')
  return programs.start('attack', *files, *common, f'--workdir={folder}/found', *flags)


@pytest.mark.slow
def test_it_prints_a_table_and_writes_a_page(folder, small_images):
  done = start(folder, '--attacks=fidel;peeling')
  assert done.status == 0, done.err
  assert 'mismatch' in done.out and f'report: {folder}/found/report.html' in done.out
  assert [line.split()[0] for line in done.out.splitlines()[2:4]] == ['fidel', 'peeling']
  assert done.err.startswith(f'reading {folder}/update.npz …') and 'runs of a closed form' in done.err
  assert {path.name for path in (folder / 'found').iterdir()} >= {
    'config.json', 'result.json', 'reconstructions.npz', 'reconstructions.png', 'report.html',
  }  # fmt: skip
  with np.load(folder / 'found' / 'reconstructions.npz') as archive:
    for attack in ('fidel', 'peeling'):
      np.testing.assert_allclose(archive[f'["{attack}", null]'][0], small_images[0][0], atol=1e-5)
  page = (folder / 'found' / 'report.html').read_text('utf-8')
  assert 'nothing on this page says' in page and page.rstrip().endswith('</html>')
  config = json.loads((folder / 'found' / 'config.json').read_text('utf-8'))
  assert (config['num_classes'], config['attacks'], config['controls']) == (10, ['fidel', 'peeling'], 2)


@pytest.mark.long
def test_what_was_sent_and_what_came_back_with_the_truth(folder, tmp_path):
  files = [f'--sent={folder}/weights.npz', f'--returned={folder}/returned.npz', f'--truth={folder}/truth.npz']
  done = start(folder, '--update=', '--weights=', *files, '--attacks=fidel', f'--workdir={tmp_path}/new')
  assert done.status == 0, done.err
  head, _, line, *_ = done.out.splitlines()
  assert head.split()[-2:] == ['verdict', 'score'] and line.split()[-3] == 'exact' and float(line.split()[-2]) > 40
  config = json.loads((tmp_path / 'new' / 'config.json').read_text('utf-8'))
  assert (config['share'], config['truth'], config['num_samples']) == ('delta', True, 1)


@pytest.mark.parametrize(
  ('flags', 'parts'),
  [
    (['--update='], ['--update is missing. File with the update', 'Or give --returned.']),
    (['--weights='], ['--weights is missing. File with the weights', 'Or give --sent.']),
    (['--returned=weights.npz'], ['--update and --returned are both given']),
    (['--update=', '--returned={folder}/returned.npz', '--share=gradient'], ['leave out --share=gradient']),
    (['--truth={folder}/weights.npz'], ['expected one array of samples, called samples or images']),
    (['--truth={folder}/scalar.npz'], ['the truth: labels']),
    (['--truth={folder}/own.csv'], ['--dataset says how its rows or texts are encoded']),
    (['--sample_shape=8'], ['--sample_shape=8, expected height,width,channels as in 32,32,3']),
    (['--sample_shape=8²,8,1'], ['--sample_shape=8²,8,1, expected height,width,channels as in 32,32,3']),
    (['--labels=²'], ["unknown way to obtain labels '²'"]),
    (['--length=3'], ['--length is for --dataset, which is missing']),
    (['--split=train'], ['--split is for --dataset, which is missing']),
    (['--names=fc1'], ['--names=fc1, expected module=module']),
    (['--labels=guess'], ["unknown way to obtain labels 'guess'", 'bias_corrected']),
    (['--labels=1;2'], ['labels are [1, 2], expected 1 integers']),
    (['--model=mlp(widths=8)'], ["do not fit 'mlp(widths=8)'", 'of another shape: Dense_0.bias']),
    (['--weights=nowhere.npz'], ["cannot read the weights in 'nowhere.npz'"]),
    (['--attacks=fiddle'], ["unknown attack 'fiddle'; did you mean 'fidel'?"]),
    (['--share=delta', '--attacks=peeling'], ['the attack peeling reads the gradient of one step']),
  ],
)
def test_bad_input_ends_on_one_line_and_leaves_nothing(folder, flags, parts, tmp_path):
  done = start(folder, f'--workdir={tmp_path}/new', *(flag.format(folder=folder) for flag in flags))
  assert (done.status, done.out) == (2, '')
  *_, last = done.err.splitlines()
  assert last.startswith('error: ') and all(part in last for part in parts)
  assert not (tmp_path / 'new').exists()
