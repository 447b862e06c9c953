"""Bad arguments of library calls: one `UsageError` each, which names the argument, before anything is compiled."""

import math
import re
import struct
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import PIL.Image
import pytest

import gradleak as gl
from gradleak import registry
from gradleak.core import errors
from gradleak.federated import accounting, simulation, training
from gradleak.studies import sweep

SHAPE = (8, 8, 1)
IMAGES = np.full((4, *SHAPE), 0.5, np.float32)
LABELS = np.arange(4, dtype=np.int32)
KEY = jax.random.key(0)
VARIABLES = {'params': {'w': np.zeros((64, 10), np.float32)}}
DP = gl.defenses.client_dp(norm=1.0, noise=1.0)
PARTS = [np.arange(2), np.arange(2, 4)]
MANY = '9' * 400


def logits(params, images):
  return images.reshape(-1, 64) @ params['w']


def model(apply=logits):
  return gl.models.from_functions(lambda key, shape: {'w': jnp.zeros((64, 10))}, apply, 'own')


MODEL = model()
EMPTY = gl.models.from_functions(lambda key, shape: {}, lambda params, x: jnp.zeros((len(x), 10)), 'empty')
CLIENT = gl.Client(MODEL, 10)
NOISE = gl.defenses.gaussian(stddev=0.1)


def scenario(images=IMAGES, labels=LABELS, **options):
  options = options if 'variables' in options else {'key': KEY, **options}
  return gl.scenario(options.pop('model', MODEL), images, labels, **options)


def audit(key=KEY, defenses=None, attacks=None, trials=1, given=None, **options):
  attacks = [gl.attacks.csdlg(steps=2)] if attacks is None else attacks
  options = {'progress': 'none', **options}
  return gl.audit(key, scenario() if given is None else given, defenses, attacks, trials, **options)


def frontier(key=KEY, train=(IMAGES, LABELS), test=(IMAGES, LABELS), defenses=None, attacks=(), **options):
  options = {'clients': 2, 'per_round': 2, 'rounds': 1, 'progress': 'none', 'workdir': '/proc/none', **options}
  given = {name: options.pop(name) for name in ('model', 'variables') if name in options}
  return gl.frontier(key, scenario(*train, share='delta', **given), test, defenses, attacks, **options)


def federation(**options):
  return simulation.Federation(
    **{'client': CLIENT, 'samples': IMAGES, 'targets': LABELS, 'partition': PARTS, 'per_round': 2, **options}
  )


def train(key=KEY, variables=VARIABLES, **options):
  return training.train(key, federation(), variables, options.pop('rounds', 1), **options)


def update(key=KEY, variables=VARIABLES, images=IMAGES, labels=LABELS, client=CLIENT):
  return client.local_update(key, variables, images, labels)


def message(call, *arguments, **options):
  with pytest.raises(errors.UsageError) as caught:
    call(*arguments, **options)
  assert 0 < len(str(caught.value)) <= 1000 and '\n' not in str(caught.value)
  return str(caught.value)


TAKE_KEYS = {
  'audit': audit,
  'scenario': lambda key: scenario(key=key),
  'frontier': frontier,
  'sweep': lambda key: sweep.plan({'a': (key, scenario())}, None, [gl.attacks.csdlg()], 1),
  'train': train,
  'local_update': update,
  'partition': lambda key: gl.data.partition.iid(key, LABELS, 2),
  'init': lambda key: gl.models.lenet(10).init(key, SHAPE),
  'own init': lambda key: MODEL.init(key, SHAPE),
  'defense': lambda key: NOISE.update(VARIABLES, NOISE.init(VARIABLES), key=key),
  'chain': lambda key: gl.defenses.chain(NOISE, NOISE).update(VARIABLES, ((), ()), key=key),
  'samples': lambda key: gl.defenses.ats()(key, IMAGES, LABELS),
  'server': lambda key: gl.defenses.aggregate_client_dp(key, {'w': jnp.ones((2, 3))}, 0.1),
}
NO_KEYS = {'integer': 0, 'text': '0', 'batch': jax.random.split(KEY, 3), 'data': np.zeros(2, np.int32), 'function': abs}


@pytest.mark.parametrize('call', TAKE_KEYS)
def test_what_is_no_key(call):
  for given in NO_KEYS.values():
    assert 'key is ' in message(TAKE_KEYS[call], given)
  if call != 'local_update':  # without noise and dropout, None is one
    assert 'key' in message(TAKE_KEYS[call], None)


def test_old_keys_are_keys():
  old = jax.random.PRNGKey(0)
  np.testing.assert_array_equal(gl.data.partition.iid(old, LABELS, 2), gl.data.partition.iid(KEY, LABELS, 2))
  assert NOISE.update(VARIABLES, (), key=old)[0]['params']['w'].shape == (64, 10)


OUTSIDE = {
  'audit': (audit, KEY),
  'scenario': (scenario, IMAGES),
  'variables': (lambda v: scenario(variables=v), VARIABLES),
  'frontier': (lambda x: frontier(train=(x, LABELS)), IMAGES),
  'train': (train, KEY),
  'partition': (lambda key: gl.data.partition.iid(key, LABELS, 2), KEY),
  'labels': (lambda y: gl.data.partition.iid(KEY, y, 2), LABELS),
  'match': (lambda x: gl.metrics.match(x, IMAGES), IMAGES),
  'evaluate': (lambda x: gl.metrics.evaluate(x, IMAGES, LABELS, LABELS), IMAGES),
  'mean': (gl.metrics.mean_interval, np.ones(3, np.float32)),
  'proportion': (lambda n: gl.metrics.proportion_interval(n, 3), 1),
  'picture': (gl.report.data_uri, IMAGES[0]),
}


@pytest.mark.parametrize('call', OUTSIDE)
def test_host_functions_are_called_outside_of_transformations(call):
  function, argument = OUTSIDE[call]
  for transform in (jax.jit, lambda f: jax.vmap(lambda x: f(argument if call == 'proportion' else x))):
    given = argument if transform is jax.jit else jax.tree.map(lambda x: jnp.stack([x, x]), argument)
    if call != 'proportion' or transform is jax.jit:
      assert 'outside of jax.jit' in message(transform(function), given)


NO_SAMPLES = {
  'labels as floats': (IMAGES, LABELS.astype(np.float32)),
  'labels beyond': (IMAGES, LABELS + 10),
  'negative labels': (IMAGES, LABELS - 1),
  'fewer labels': (IMAGES, LABELS[:3]),
  'labels of one class': (IMAGES, np.eye(7, dtype=np.float32)[LABELS]),
  'no labels': (IMAGES, None),
  'text labels': (IMAGES, ['a', 'b', 'c', 'd']),
  'ragged labels': (IMAGES, [[1], [2, 3]]),
  'huge labels': (IMAGES, [10**400] * 4),
  'integers': ((IMAGES * 255).astype(np.uint8), LABELS),
  'no batch': (IMAGES[0], LABELS),
  'no images': (IMAGES[:0], LABELS[:0]),
  'text': ('images', LABELS),
  'objects': (np.array([None] * 4), LABELS),
  'complex images': (IMAGES.astype(np.complex64), LABELS),
  'ragged images': ([np.zeros((2, 2)), np.zeros((3, 3))], LABELS),
}
TAKE_SAMPLES = {
  'scenario': scenario,
  'public': lambda *pair: scenario(public=pair),
  'frontier': lambda *pair: frontier(train=pair),
  'test': lambda *pair: frontier(test=pair),
  'federation': lambda *pair: federation(samples=pair[0], targets=pair[1]),
  'local_update': lambda *pair: update(images=pair[0], labels=pair[1]),
  'delta': lambda *pair: update(images=pair[0], labels=pair[1], client=gl.Client(MODEL, 10, share='delta')),
}


@pytest.mark.parametrize('call', TAKE_SAMPLES)
def test_what_are_no_samples(call):
  for images, labels in NO_SAMPLES.values():
    assert re.search('image|sample|label|target', message(TAKE_SAMPLES[call], images, labels))


def test_pixels_and_pairs_are_checked():
  for images in (IMAGES + 1, IMAGES * math.nan, IMAGES - 1):
    assert 'has a pixel of' in message(scenario, images)
  for pair in (None, (IMAGES,), (IMAGES, LABELS, LABELS), 'ab', IMAGES, 3):
    assert 'expected (samples, targets)' in message(frontier, test=pair)
  for pair in ((IMAGES,), 'ab', 3):
    assert 'public is ' in message(scenario, public=pair)
    assert 'test is ' in message(train, test=pair)
    assert 'batch is ' in message(gl.inspect, gl.models.mlp(10, widths=2), _mlp(), SHAPE, batch=pair)


def _mlp():
  shapes = jax.eval_shape(lambda key: gl.models.mlp(10, widths=2).init(key, SHAPE), KEY)
  return jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)


OTHER_VARIABLES = [
  VARIABLES['params'], [1], 3, 'weights', {}, {'params': None}, {'params': {'w': np.zeros((64, 9), np.float32)}},
  {'params': {'w': np.zeros((64, 10), np.int32)}}, {'params': {'w': 'a'}}, {'params': {'w': abs}},
]  # fmt: skip


@pytest.mark.parametrize('variables', OTHER_VARIABLES, ids=range(len(OTHER_VARIABLES)))
def test_variables_of_another_model(variables):
  for call in (
    lambda v: scenario(variables=v), lambda v: scenario().trained(VARIABLES, v), lambda v: frontier(variables=v),
    lambda v: update(variables=v), lambda v: train(variables=v), lambda v: simulation.start(federation(), v),
    lambda v: simulation.accuracy(MODEL, v, IMAGES, LABELS),
    lambda v: gl.inspect(gl.models.mlp(10, widths=2), v, SHAPE),
  ):  # fmt: skip
    assert 'variables' in message(call, variables)


RETURNED = {
  'a tuple': lambda p, x: (logits(p, x), 1),
  'a dict': lambda p, x: {'logits': logits(p, x)},
}


@pytest.mark.parametrize('kind', RETURNED)
def test_what_a_model_returns(kind):
  own = model(RETURNED[kind])
  for call in (
    lambda: scenario(model=own),
    lambda: frontier(model=own),
    lambda: update(client=gl.Client(own, 10)),
  ):
    assert "the model 'own' returns " in message(call)


def test_what_is_no_model_and_no_image_shape():
  for other in (None, 'lenet', 3, logits, (1, 2), gl.models.Model):
    for call in (
      lambda m: scenario(model=m),
      lambda m: frontier(model=m),
      lambda m: gl.Client(m, 10),
      lambda m: gl.inspect(m, VARIABLES, SHAPE),
      lambda m: gl.models.check_variables(m, VARIABLES, SHAPE),
    ):
      assert 'the model is ' in message(call, other)
  for shape in (None, 8, '8x8', (-8, 8, 1), (8, 8), (0, 8, 1), (8.5, 8, 1), (10**400, 8, 1)):
    assert 'sample_shape is ' in message(gl.models.lenet(10).init, KEY, shape)
    assert 'sample_shape is ' in message(gl.inspect, gl.models.lenet(10), VARIABLES, shape)


NO_NUMBERS = [10**400, -1, math.nan, b'1', '1', [1], np.array([1, 2]), 1j, True]
TAKE_NUMBERS = {
  'trials': lambda n: audit(trials=n if n is not True else b'1'),
  'controls': lambda n: audit(controls=n),
  'batch_size': lambda n: audit(batch_size=n),
  'group_size': lambda n: audit(group_size=n),
  'rank of the process': lambda n: audit(process=(n, 2), workdir='/proc/none'),
  'process': lambda n: audit(process=n),
  'budget': lambda n: frontier(budget=n),
  'client': lambda n: frontier(clients=n),
  'per_round': lambda n: frontier(per_round=n),
  'rounds': lambda n: train(rounds=n),
  'the budget': lambda n: train(privacy=accounting.ledger(DP, budget=n)),
  'local_steps': lambda n: gl.Knowledge(local_steps=n),
  'number of clients': lambda n: gl.data.partition.dirichlet(KEY, LABELS, n, alpha=1.0),
  'channels': lambda n: gl.data.load('digits', limit=1, channels=n),
}


@pytest.mark.parametrize('name', TAKE_NUMBERS)
def test_what_is_no_number(name):
  for given in NO_NUMBERS:
    assert name.split()[-1] in message(TAKE_NUMBERS[name], given)


@pytest.mark.parametrize(
  ('call', 'words'),
  [
    (lambda: audit(defenses=gl.defenses.concealment(sensitive=99, steps=1)), 'concealment(sensitive) is 99'),
    (lambda: _defended(gl.defenses.graddefense(stddev=0.1, root=1000)), 'graddefense(root) is 1000'),
    (lambda: frontier(budget=1.0), 'a budget of ε = 1.0 needs a defense'),
    (lambda: frontier(defenses=DP, per_round=9), 'per_round is 9'),
    (lambda: federation(partition=[np.array([99]), np.array([1])]), 'a sample of client 0 is 99'),
    (lambda: federation(partition=[np.array([0.5]), np.array([1])]), 'the samples of client 0'),
    (lambda: gl.models.create('lenet' + '+precode' * 100, 10), 'stands twice'),
  ],
)
def test_settings_beyond_the_data(call, words):
  assert words in message(call)


def _defended(defense):
  mlp = gl.models.mlp(10, widths=2)
  return audit(defenses=defense, given=scenario(model=mlp, variables=_mlp(), public=(IMAGES, LABELS)))


def _captured(**options):
  options = {'sample_shape': SHAPE, 'labels': [0], 'attacks': [gl.attacks.csdlg(steps=1)], **options}
  return gl.attack(KEY, MODEL, VARIABLES, {'w': np.ones((64, 10), np.float32)}, **options)


def test_shares_are_refused_before_the_plan_is_said():
  said = []
  for options in ({'process': (5, 2)}, {'process': (0, 3)}, {'shards': 9}, {'shards': 0}, {'group_size': 0}):
    audits = {'a': (KEY, scenario())}
    message(
      sweep.sweep,
      audits,
      None,
      [gl.attacks.csdlg()],
      2,
      workdir='/proc/none',
      progress='none',
      say=said.append,
      **options,
    )
  assert not said


TEXTS = [
  'a' * 5000, 'csdlg' + '(' * 3000, f'csdlg(tv={"(" * 400}{")" * 400})', f'csdlg(tv={MANY})',
  f'csdlg(steps={MANY * 12})',
  'csdlg(tv=b"1")', "csdlg(tv=b'1')", 'csdlg(tv=1_0)', 'csdlg(tv=١)', 'csdlg(tv=1j)', 'csdlg(tv=1e999)', 'csdlg\x00',
  'csdlg\ud800', '+' * 900, ';' * 900, '', '__import__("os")', None, 3, b'csdlg', ['csdlg'],
]  # fmt: skip


@pytest.mark.parametrize('text', TEXTS, ids=range(len(TEXTS)))
def test_texts_that_describe_nothing(text):
  for read in (gl.parse, registry.attacks, registry.defenses, lambda t: gl.models.create(t, 10)):
    message(read, text)
  message(gl.data.partition.parse, text, KEY, LABELS, 2)
  message(gl.load, text)
  message(gl.data.load, 'digits', text)


@pytest.mark.long
def test_lists_without_end():
  assert 'at most 10000' in message(registry.attacks, ';'.join(f'csdlg(tv={i})' for i in range(20_000)))


@pytest.mark.parametrize(
  'notes', [{'a': abs}, {'a': {1}}, {'a': np.zeros(3)}, {3: 1}, {'a': {(1, 2): 3}}, {'a': '\ud800'}, [1], 'text']
)
def test_records_are_json(notes):
  assert 'notes is ' in message(scenario().noted, notes)
  assert 'config is ' in message(train, config=notes)


def test_a_record_that_contains_itself_is_refused_and_scalars_are_plain():
  loop = {}
  loop['loop'] = loop
  assert 'notes is ' in message(scenario().noted, loop)
  assert scenario().noted({'rate': np.float32(0.5)}).settings['rate'] == 0.5


@pytest.mark.parametrize(
  ('call', 'words'),
  [
    (lambda: audit(attacks=3), 'the attack is 3'),
    (lambda: audit(attacks=['csdlg']), "gradleak.parse('csdlg') makes it"),
    (lambda: audit(defenses=['prune(rate=0.9)']), "gradleak.parse('prune(rate=0.9)') makes it"),
    (lambda: audit(attacks=[NOISE]), 'the attack is gaussian(stddev=0.1), expected one of gradleak.attacks'),
    (lambda: audit(attacks=[MODEL]), 'the attack is Model('),
    (lambda: audit(attacks=MODEL), 'the attack is Model('),
    (lambda: audit(attacks=[gl.servers.trap().server]), 'the attack is trap_server('),
    (lambda: audit(attacks=[gl.attacks.csdlg]), 'such as gradleak.attacks.csdlg()'),
    (lambda: audit(attacks=[gl.models.lenet]), 'num_classes is '),
    (lambda: audit(attacks=[gl.Client]), 'the attack is '),
    (lambda: audit(defenses=[gl.attacks.csdlg()]), 'the defense is csdlg,'),
    (
      lambda: audit(defenses=[gl.defenses.gaussian]),
      'the defense gaussian is not made yet: call it with its settings, gaussian(…)',
    ),
    (lambda: audit(defenses=[print]), 'the defense is '),
    (lambda: audit(defenses=[MODEL]), 'the defense is Model('),
    (lambda: audit(batch_size=np.float32(1)), 'batch_size is'),
    (lambda: gl.inspect(gl.models.mlp(10, widths=2), _mlp(), SHAPE, loss=abs), 'loss is <built-in'),
    (lambda: gl.inspect(gl.models.mlp(10, widths=2), _mlp(), SHAPE, train=[]), 'train is []'),
    (lambda: update(client=gl.Client(MODEL, 10, loss=lambda z, y: None)), 'the loss returns None'),
    (lambda: gl.Client(MODEL, 10, transform=abs), 'transform is '),
    (lambda: gl.models.mlp(10, activation=['relu']), "unknown mlp(activation) ['relu']"),
    (lambda: gl.models.resnet20(10, norm=np.zeros(2)), 'unknown resnet20(norm) array'),
    (lambda: gl.read_weights(1, MODEL, SHAPE), 'the weights is 1, expected the path of a file'),
    (lambda: gl.read_update(True, MODEL, VARIABLES), 'the update is True, expected the path of a file'),
    (lambda: gl.attack(KEY, MODEL, VARIABLES, VARIABLES['params'], client=3), 'client is 3'),
    (lambda: gl.attack(KEY, MODEL, VARIABLES, VARIABLES['params'], sample_shape=3), 'sample_shape is 3'),
    (lambda: gl.data.check_classes(['a']), 'labels is'),
    (lambda: gl.metrics.fully_revealed(IMAGES, IMAGES, signed=np.ones(2)), 'signed is '),
    (lambda: audit(defenses=3), 'the defense is 3'),
    (lambda: audit(defenses=optax.sgd(0.1)), 'defenses.wrap(transformation'),
    (lambda: audit(defenses={'a\ud800': NOISE}), 'the label of the defense'),
    (lambda: audit(settings={}), 'settings is {}, expected AuditSettings'),
    (lambda: audit(adaptive_attacks='masked'), 'adaptive_attacks is'),
    (
      lambda: audit(defenses=[gl.defenses.prune(rate=0.9)], adaptive_attacks=['maskd']),
      "'maskd'; did you mean 'masked'?",
    ),
    (lambda: audit(adaptive_attacks=['masked']), "names 'masked', and no attack here has an adaptive attack to any"),
    (lambda: audit(progress=3), 'progress'),
    (lambda: audit(workdir=3), 'the work directory is 3'),
    (lambda: audit(split='all'), "split is 'all', expected True or False"),
    (lambda: audit(only={'none': 3}), 'the trials of none in only is 3'),
    (lambda: gl.autoleak(KEY, None, None, 1), 'scenario is None, expected a gradleak.Scenario'),
    (lambda: gl.autoleak(KEY, scenario(), None, 1.5), 'trials is 1.5, expected an integer'),
    (lambda: gl.autoleak(KEY, scenario(), None, 1, batch_size='2'), "batch_size is '2'"),
    (lambda: gl.autoleak(KEY, scenario(), None, 1, progress=3), 'progress mode 3'),
    (lambda: _captured(progress=3), 'progress mode 3'),
    (lambda: _captured(progress=b'bar'), "progress mode b'bar'"),
    (lambda: gl.read_update('/proc/self/status', MODEL, VARIABLES, names=3), 'names is 3, expected a mapping'),
    (lambda: gl.read_update('/proc/self/status', MODEL, VARIABLES, names={'a': 3}), 'a module in names is 3'),
    (lambda: gl.read_update('/proc/self/status', MODEL, VARIABLES, partial=3), 'partial is 3, expected True or False'),
    (lambda: gl.read_weights('/proc/self/status', MODEL, SHAPE, names=[3]), 'names is [3], expected a mapping'),
    (lambda: scenario(model=EMPTY), "'empty' has no parameters: a client of it would send nothing"),
    (lambda: frontier(model=EMPTY), "'empty' has no parameters"),
    (lambda: gl.attack(KEY, EMPTY, {'params': {}}, {}, sample_shape=SHAPE), "'empty' has no parameters"),
    (lambda: audit(workdir='a' * 5000), 'the work directory is'),
    (lambda: gl.defenses.chain(NOISE, 3), 'a stage of the chain is 3'),
    (lambda: gl.defenses.wrap(optax.identity(), 'step', clips=3), 'the trait clips is 3'),
    (lambda: gl.defenses.wrap(optax.identity(), 'step', noise=3), 'the trait noise is 3'),
    (lambda: gl.defenses.wrap(optax.identity(), 'step', label=''), 'label is'),
    (lambda: gl.Client(MODEL, 10, optimizer=3), 'optimizer is 3'),
    (lambda: gl.Client(MODEL, 10, loss='squared'), "unknown loss 'squared'"),
    (lambda: gl.compare(3), 'results is 3'),
    (lambda: gl.report.write(3, 'folder'), 'the result is 3'),
    (lambda: gl.report.captured_table(3), 'the result is 3'),
    (lambda: gl.report.entries(3), 'trained is 3'),
    (lambda: gl.report.entries({'none': 3}), 'a training is 3'),
    (lambda: gl.report.worst_case_of(3), 'rows is 3'),
    (lambda: gl.report.frontier_csv([{}]), 'an entry is {}'),
    (lambda: gl.report.frontier(3), 'found is 3'),
    (lambda: gl.report.partition_picture([[9]], LABELS, 'abcd'), 'class_names is'),
    (lambda: gl.report.partition_picture([[9]], LABELS, list('abcd')), 'a sample of client 0 is 9'),
    (lambda: gl.report.write_training(3, {}, config={}), 'the folder is 3'),
    (lambda: gl.report.write_training('folder', {}, config=3), 'config is 3'),
    (lambda: gl.report.terminal_table({}), 'the result is {}'),
    (lambda: gl.report.summarise([{'attack': 1}]), 'a row is'),
    (lambda: gl.report.data_uri('a'), "image is 'a'"),
    (lambda: gl.metrics.psnr(None, IMAGES), 'reconstructions is None'),
    (lambda: gl.data.partition.by_user([1, 'a', None]), 'users are'),
    (lambda: gl.data.load('folder:~nobody-at-all/x'), 'the path of folder:PATH'),
    (lambda: gl.data.load('mnist', data_dir='~nobody-at-all'), 'data_dir'),
  ],
)
def test_other_arguments(call, words):
  assert words in message(call)


# ---- images


def chunk(kind, content):
  return struct.pack('>I', len(content)) + kind + content + struct.pack('>I', zlib.crc32(kind + content))


def png(side, *chunks):
  head = chunk(b'IHDR', struct.pack('>IIBBBBB', side, side, 8, 0, 0, 0, 0))
  return b'\x89PNG\r\n\x1a\n' + head + b''.join(chunks) + chunk(b'IEND', b'')


@pytest.mark.parametrize(
  'content',
  [
    png(30_000, chunk(b'IDAT', b'')),
    png(9_000, chunk(b'IDAT', zlib.compress(bytes(9_001 * 900), 9))),
    png(8, chunk(b'zTXt', b'k\0\0' + zlib.compress(bytes(10**8), 9)), chunk(b'IDAT', zlib.compress(bytes(72)))),
    png(8)[:20], b'', b'<script>', b'GIF89a',
  ],
  ids=['pixels', 'many pixels', 'text', 'cut', 'empty', 'script', 'head'],
)  # fmt: skip
def test_image_bombs(tmp_path, content):
  (tmp_path / 'test' / 'a').mkdir(parents=True)
  (tmp_path / 'test' / 'a' / '0.png').write_bytes(content)
  assert 'cannot read the image' in message(gl.data.load, f'folder:{tmp_path}')


def test_names_that_are_no_text(tmp_path):
  for name in (b'\xff', b'a\nb'):
    folder = bytes(tmp_path / name.hex() / 'test') + b'/' + name
    (tmp_path / name.hex() / 'test').mkdir(parents=True)
    (tmp_path / name.hex() / 'test' / 'a').mkdir()
    PIL.Image.fromarray(np.zeros((8, 8), np.uint8)).save(tmp_path / name.hex() / 'test' / 'a' / '0.png')
    (tmp_path / name.hex() / 'test' / 'a').rename(folder.decode('utf-8', 'surrogateescape'))
    assert 'the name of a label' in message(gl.data.load, f'folder:{tmp_path / name.hex()}')
