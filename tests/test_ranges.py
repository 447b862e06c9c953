"""The range of every setting, written down once more: just outside it is refused by name, on its bounds it is accepted.

A new setting with a `Range` or a `Choice` needs an entry in `RANGES`. There `float [0, inf]` includes infinity, and
`int?` may be None as well.
"""

import dataclasses
import importlib
import inspect
import math
import pkgutil

import jax
import numpy as np
import optax
import pytest

import gradleak as gl
from gradleak.core import errors, settings
from gradleak.federated import Client
from gradleak.models import registry as models

FRACTION, WEIGHT, COUNT, NATURAL = 'float [0, 1]', 'float [0, inf)', 'int [1, inf)', 'int [0, inf)'
POSITIVE, UNBOUNDED = 'float [1e-12, inf]', 'float [0, inf]'
CLASS, WIDTH, CHANNELS = 'int [0, 2147483647]', 'int [1, 65536]', 'int [1, 1024]'
ACTIVATION = 'sigmoid|relu|tanh|leaky_relu|gelu|identity'
DENSE = {'activation': ACTIVATION, 'dropout': 'float [0, 0.99]'}
SMALL = {'width': WIDTH, 'activation': ACTIVATION}
RESNET = {'width': CHANNELS, 'norm': 'batch|group', 'pixels': 'unit|half|imagenet'}
DEEP = {**RESNET, 'stem': 'cifar|imagenet'}
VGG = {**RESNET, 'norm': 'none|batch?'}
TOKENS = {
  'vocabulary': 'int [3, 1048576]', 'width': WIDTH, 'layers': 'int [1, 128]', 'padding': 'int? [0, inf)',
  'dropout': 'float [0, 0.99]',
}  # fmt: skip
ATTENTION = {**TOKENS, 'heads': COUNT, 'length': 'int [1, 65536]'}
VIT = {'patch': CHANNELS, 'depth': 'int [1, 128]', 'width': WIDTH, 'heads': WIDTH, 'pixels': 'unit|half|imagenet'}
FISHING = {'target': CLASS, 'statistics': 'running|public'}
SEARCH = {'method': 'published|difference', 'multiplier': 'float [1e-06, inf)', 'max_queries': 'int [3, inf)'}
INNER = {'inner': 'csdlg|csdlg_fast|gia|gs'}
MODULE = {'bins': 'int [2, 65536]', 'gain': 'float [1e-06, 1000000.0]'}
IMPRINT = {**MODULE, 'measurement': 'mean|random', 'quantiles': 'normal|laplace|empirical'}
DECEPTICONS = {'gain': 'float [1, 1e+08]', 'mark': 'float [0.001, 1]'}
TRAP = {'variant': 'mirrored|independent|both|soliton_free|soliton_data|qbi', 'scale': FRACTION}
SPENT = {'delta': 'float [1e-300, 0.999999999999]', 'accountant': 'rdp|pld'}
SAMPLED = {**SPENT, 'sampling_rate': 'float [1e-12, 1]'}
SLICED = {'stddev': WEIGHT, 'ratio': FRACTION, 'num_slices': COUNT}
BOUND = {'delta': 'float [0, 1]', 'confidence': 'float [1e-09, 0.999999999]'}
GUESSED = {'canaries': COUNT, 'guesses': NATURAL, 'correct': NATURAL}
REDUCED = {'reduction': 'mean|sum'}
MATRIX = {'rule': 'band|below', 'layout': 'columns|rows'}
CONCEALED = dict.fromkeys(('dissimilarity', 'latent', 'learning_rate', 'tolerance', 'margin'), WEIGHT)
PARTY = dict.fromkeys(('learning_rate', 'tv', 'decorrelation', 'temperature', 'negentropy'), UNBOUNDED)
ESTIMATES, BALANCES = 'exact|probes|probes_squared', 'sensitivity|size'

RANGES = {
  'attacks.april.april': {'rcond': FRACTION},
  'attacks.bayes.bayes': {
    'steps': COUNT, 'learning_rate': 'float [1e-12, inf)', 'components': COUNT, 'gaussian': WEIGHT,
  },
  'attacks.decoded.fidel_decoder': {'decoder': 'table_iii|table_iv|windows', 'steps': NATURAL},
  'attacks.decoder.table_iii': {'steps': COUNT, 'batch_size': COUNT},
  'attacks.decoder.table_iv': {'steps': COUNT, 'batch_size': COUNT},
  'attacks.decoder.windows': {'context': NATURAL, 'hidden': NATURAL, 'steps': COUNT},
  'attacks.fidel.fidel': {'candidates': NATURAL},
  'attacks.linear.linear': {'starts': COUNT, 'tolerance': FRACTION},
  'attacks.linear.solve': {'starts': COUNT, 'tolerance': FRACTION},
  'attacks.tableak.tableak': {'seeds': 'int [1, 64]', 'pooling': 'median|mean|best'},
  'attacks.labels.infer': {'rule': 'idlg|yin|bias_corrected|wainakh|ilrg|geng|rlu'},
  'attacks.peeling.peel': {'batch_size': COUNT, 'tolerance': FRACTION},
  'attacks.peeling.peeling': {'tolerance': FRACTION},
  'attacks.peeling.scale': {'batch_size': COUNT, 'tolerance': FRACTION},
  'attacks.residual_peeling.residual_peeling': {'iterations': COUNT, 'tv': WEIGHT},
  'attacks.separation.alternating': {'steps': COUNT, 'damping': FRACTION, 'ridge': UNBOUNDED},
  'attacks.separation.cocktail_party': {'steps': COUNT, **PARTY},
  'attacks.separation.fast_ica': {'batch_size': COUNT, 'iterations': COUNT},
  'attacks.separation.nmf': {'batch_size': COUNT, 'iterations': COUNT},
  'attacks.spear.spear': {
    'programs': COUNT, 'submatrices': COUNT, 'sparsity': FRACTION, 'tolerance': 'float? [0, 1]',
    'rank': 'int? [1, inf)', 'batch_size': 'int? [1, inf)',
  },
  'attacks.spear.spear_attack': {'submatrices': COUNT, 'programs': COUNT},
  'attacks.text.lamp': {
    'steps': COUNT, 'learning_rate': 'float [1e-12, inf)', 'relaxation': 'softmax|embeddings', 'surprise': WEIGHT,
    'size': WEIGHT, 'moves': 'int [1, 200]', 'every': COUNT, 'starts': 'int [1, 10000]', 'partial': 'float? [0, 1]',
  },
  'data.check_classes': {'num_classes': 'int? [1, 2147483648]'},
  'data.gallery': {'most': COUNT},
  'data.load': {
    'limit': 'int? [1, inf)', 'image_size': 'int? [1, 4096]', 'largest_pixel': 'float? [1e-06, inf)',
    'length': 'int? [1, 65536]',
  },
  'data.partition.classes': {'number': COUNT, 'low': COUNT},
  'data.partition.dirichlet': {'alpha': 'float [0.001, inf)', 'least': COUNT},
  'data.partition.iid': {'samples': NATURAL},
  'defenses.clipping.clamp': {'limit': POSITIVE},
  'defenses.clipping.clip': {'norm': POSITIVE},
  'defenses.compensation.compensate': {'variance': WEIGHT, 'q': 'float [1, inf)', **MATRIX},
  'defenses.compensation.compensation': {**SLICED, 'q': COUNT, **MATRIX},
  'defenses.compression.dgc': {'ratio': FRACTION, 'momentum': FRACTION, 'clip': POSITIVE},
  'defenses.compression.prune': {'rate': FRACTION},
  'defenses.compression.topk': {'ratio': FRACTION},
  'defenses.concealment.concealment': {
    **CONCEALED, 'mixing': FRACTION, 'steps': COUNT, 'start': 'noise|proxy', 'sensitive': 'int? [0, inf)',
  },
  'defenses.defense.Mechanism.multiplier': {'relation': 'replace one|replace by zeros|add or remove one'},
  'defenses.defense.Noise': {'distribution': 'gaussian|laplace|triangular'},
  'defenses.defense.Traits': {
    'place': 'data|step|upload|round', 'sparsifies': '|zeros|mask', 'clips_each': '|sample|upload|weight',
  },
  'defenses.differential_privacy.aggregate_client_dp': {'noise': WEIGHT},
  'defenses.differential_privacy.client_dp': {'norm': POSITIVE, 'noise': WEIGHT},
  'defenses.differential_privacy.clip_samples': {'norm': POSITIVE},
  'defenses.differential_privacy.dpsgd': {'norm': POSITIVE, 'noise': WEIGHT},
  'defenses.differential_privacy.epsilon': {
    'noise': WEIGHT, 'relation': 'replace one|replace by zeros|add or remove one', 'steps': COUNT, **SAMPLED,
  },
  'defenses.differential_privacy.of_upload': {'relation': 'replace one|replace by zeros', 'uploads': COUNT, **SPENT},
  'defenses.differential_privacy.rounds_within': {'budget': 'float [1e-12, inf)', 'noise': WEIGHT, **SAMPLED},
  'defenses.fragmentation.fragmentation': {'ratio': FRACTION, 'unit': 'layer|tensor'},
  'defenses.fragmentation.fragmentation_random': {'ratio': FRACTION},
  'defenses.graddefense.graddefense': {
    **SLICED, 'balance': BALANCES, 'estimate': ESTIMATES, 'root': 'int? [1, inf)',
  },
  'defenses.graddefense.graddefense_step': {**SLICED, 'clip': POSITIVE},
  'defenses.graddefense.sensitivity': {'method': ESTIMATES, 'probes': COUNT},
  'defenses.graddefense.slice_gradients': {'num_slices': COUNT, 'balance': BALANCES},
  'defenses.guarantees.mechanisms': {'epochs': COUNT},
  'defenses.local_dp.local_dp': {
    'norm': POSITIVE, 'sensitivity': WEIGHT, 'epsilon': 'float [1e-12, inf)', 'delta': 'float [1e-37, 0.999999999999]',
  },
  'defenses.noise.gaussian': {'stddev': WEIGHT},
  'defenses.noise.laplace': {'scale': WEIGHT},
  'defenses.outpost.outpost': {
    'noise': WEIGHT, 'fisher': FRACTION, 'decay': UNBOUNDED, 'prune': FRACTION, 'variant': 'paper|code',
  },
  'defenses.outpost.outpost_pruning': {'prune': FRACTION, 'variant': 'paper|code'},
  'defenses.percentile_privacy.percentile_privacy': {
    'percentile': 'float [0, 100]', 'gamma': POSITIVE, 'steps': COUNT,
  },
  'defenses.quantization.adaquant': {'weight': 'float [1e-09, inf)'},
  'defenses.quantization.quantize': {'code': 'float16|blockwise8|float4|normfloat4'},
  'defenses.samples.instahide': {'mixed': 'int [2, 64]', 'largest': FRACTION},
  'defenses.secagg.secagg_rounding': {
    'limit': 'float [1e-12, inf)', 'levels': 'float [2, inf)', 'weight': 'float [1e-09, 1]',
  },
  'defenses.server_dp.server_dp': {
    'norm': POSITIVE, 'noise': WEIGHT, 'clients': COUNT, 'rate': WEIGHT, 'quantile': FRACTION,
    'counts': 'clipped|unclipped',
  },
  'defenses.soteria.soteria': {'rate': FRACTION, 'variant': 'paper|code|code_shifted'},
  'defenses.svt_privacy.svt_privacy': {
    'fraction': FRACTION, 'epsilon': POSITIVE, 'noise_var': POSITIVE, 'gamma': POSITIVE, 'tau': WEIGHT,
  },
  'engine.cluster.connected': {
    'processes': 'int? [1, inf)', 'cores': 'int? [1, inf)', 'gpus': 'float? [0, inf)', 'retries': NATURAL,
  },
  'engine.startup.configure': {'cores': 'int? [1, inf)'},
  'federated.accounting.Ledger': {'server_noise': WEIGHT, 'budget': 'float? [1e-12, inf)', **SAMPLED},
  'federated.accounting.Ledger.epsilon': {'rounds': NATURAL, 'participations': NATURAL},
  'federated.client.Client': {
    **dict.fromkeys(('num_classes', 'epochs', 'cohort'), COUNT), 'batch_size': 'int? [1, inf)',
    'share': 'gradient|delta', 'batch_norm': 'train|eval', 'precision': 'float32|bfloat16', 'extra_gradients': NATURAL,
  },
  'federated.earlier.earlier': {'rounds': COUNT, 'clients': COUNT, 'rate': WEIGHT},
  'federated.losses.binary_cross_entropy': REDUCED,
  'federated.losses.binary_focal': {'gamma': WEIGHT, 'alpha': 'float? [0, 1]', **REDUCED},
  'federated.losses.cross_entropy': {'smoothing': FRACTION, 'average': 'weights|samples', **REDUCED},
  'federated.losses.dice': {'smooth': POSITIVE, **REDUCED},
  'federated.losses.focal': {'gamma': WEIGHT, **REDUCED},
  'federated.losses.huber': {'delta': POSITIVE, **REDUCED},
  'federated.losses.masked_token': {'share': 'float [1e-06, 1]', 'seed': 'int [0, 2147483647]', **REDUCED},
  'federated.losses.mean_squared_error': REDUCED,
  'federated.losses.next_token': REDUCED,
  'federated.losses.squared_error': REDUCED,
  'federated.optimizers.accumulated': {'batches': COUNT},
  'federated.optimizers.clipped': {'norm': POSITIVE},
  'federated.optimizers.proximal': {'weight': WEIGHT},
  'federated.roughness.roughness': {'batch_size': COUNT},
  'federated.simulation.Federation': {
    'per_round': COUNT, 'weighting': 'samples|equal', 'server_noise': WEIGHT, 'drop_out': FRACTION,
    'group_size': 'int? [1, inf)',
  },
  'federated.simulation.classified': {'batch_size': 'int [1, 1000000]'},
  'federated.training.train': {'rounds': COUNT, 'evaluate_every': COUNT},
  'models.agreement.agreement': {'tolerance': WEIGHT},
  'models.convnets.convnet': {'width': CHANNELS},
  'models.convnets.convnet9': {'width': CHANNELS},
  'models.lora.lora': {'rank': 'int [1, 4096]', 'alpha': 'float [1e-06, inf)'},
  'models.normalisation.normalised': {'pixels': 'mnist|cifar10|imagenet'},
  'models.precode.precode': {'size': WIDTH, 'beta': WEIGHT},
  **{f'models.resnet.resnet{depth}': RESNET for depth in (20, 56)},
  **{f'models.resnet.resnet{depth}': DEEP for depth in (18, 34, 50, 101, 152)},
  'models.small.cnn': {**DENSE, 'width': WIDTH},
  'models.small.lenet': SMALL,
  'models.small.lenet4': SMALL,
  'models.small.mlp': DENSE,
  'models.tabular.ft_transformer': {
    'width': WIDTH, 'heads': WIDTH, 'depth': 'int [1, 128]', 'dropout': 'float [0, 0.99]',
  },
  'models.tabular.resnet_mlp': {
    'width': WIDTH, 'depth': 'int [1, 128]', 'factor': 'int [1, 16]', 'norm': 'batch|layer|identity',
    'dropout': 'float [0, 0.99]',
  },
  'models.transformers.bert': {**ATTENTION, 'head': 'first|mean|masked'},
  'models.transformers.gpt': {**ATTENTION, 'head': 'last|mean|next'},
  'models.transformers.lstm': {**TOKENS, 'head': 'last|mean|next'},
  'models.vgg.vgg11': VGG,
  'models.vgg.vgg16': VGG,
  'models.vit.vit_small': VIT,
  'models.vit.vit_tiny': VIT,
  'priors.trained.load': {'kind': 'generator|denoiser'},
  'servers.decepticons.decepticons': DECEPTICONS,
  'servers.decepticons.decepticons_server': DECEPTICONS,
  'servers.fishing.class_fishing': {**FISHING, **INNER},
  'servers.fishing.class_fishing_server': FISHING,
  'servers.fishing.feature_fishing': {**FISHING, **SEARCH, **INNER},
  'servers.fishing.feature_fishing_server': {**FISHING, **SEARCH},
  'servers.fishing_search.fish': {'target': CLASS, **SEARCH},
  'servers.imprint.imprint': IMPRINT,
  'servers.imprint.imprint_server': IMPRINT,
  'servers.trap.trap': TRAP,
  'servers.trap.trap_server': TRAP,
  'studies.epsilon.bounds.distinguished': BOUND,
  'studies.epsilon.bounds.gaussian_delta': {'mu': WEIGHT, 'epsilon': WEIGHT},
  'studies.epsilon.bounds.gaussian_epsilon': {'mu': WEIGHT, 'delta': FRACTION},
  'studies.epsilon.bounds.one_run': BOUND,
  'studies.epsilon.bounds.one_run_epsilon': {**GUESSED, **BOUND},
  'studies.epsilon.bounds.one_run_p_value': {**GUESSED, 'epsilon': WEIGHT, 'delta': FRACTION},
}  # fmt: skip
# Their factories check several settings together, in tests of their own.
TOGETHER = {
  ('instahide', 'largest'),
  *((f'vit_{size}', name) for size in ('tiny', 'small') for name in ('width', 'heads')),
  ('ft_transformer', 'width'),
  ('ft_transformer', 'heads'),
  *((model, name) for model in ('gpt', 'bert', 'lstm') for name in ('vocabulary', 'width', 'heads', 'head')),
}

MODEL = gl.models.mlp(10, widths=2)
IMAGES, LABELS = np.full((4, 2, 2, 1), 0.5, np.float32), np.arange(4, dtype=np.int32)
GIVEN = {
  'num_classes': 10,
  'model': MODEL,
  'self': gl.defenses.Mechanism(1.0, 'client'),
  'key': jax.random.key(0),
  'labels': LABELS,
  'targets': LABELS,
  'num_clients': 1,
  'mechanisms': (),
}
GIVEN |= {'optimizer': optax.sgd(0.1)}
GIVEN |= {'client': Client(MODEL, 10), 'samples': IMAGES, 'partition': [np.arange(4)], 'per_round': 1}
MADE = [*gl.defenses.REGISTRY.values(), *gl.attacks.REGISTRY.values(), *gl.servers.REGISTRY.values()]
MADE += [*models.REGISTRY.values(), *models.WRAPPERS.values()]
EVERY = [(name, setting) for name, ranges in RANGES.items() for setting in ranges]


def found(name):
  """Returns the module and the object, and where that is a method its class."""
  *path, last = name.split('.')
  if path[-1][0].isupper():
    return getattr(found('.'.join(path)), last)
  return getattr(importlib.import_module('.'.join(['gradleak', *path])), last)


def annotations(made):
  """Returns {name: annotation} of what has a range."""
  if inspect.isclass(made):
    pairs = [(field.name, field.type) for field in dataclasses.fields(made)]
  else:
    pairs = [(name, one.annotation) for name, one in inspect.signature(made).parameters.items()]
  return {name: annotation for name, annotation in pairs if settings.limits(annotation)[1]}


def values(text):
  """Returns (values on the bounds, values just outside) of a range or of choices."""
  kind, _, rest = text.partition('[')
  if not rest:
    names = text.removesuffix('?').split('|')
    inside, outside = [*names], [f'{names[-1]}s', 3]
  else:
    integer, end = kind.startswith('int'), rest[-1]
    low, high = (float(one) if one == 'inf' or not integer else int(one) for one in rest[:-1].split(', '))
    inside, outside = [low], [math.nan, '1', True, low - 1 if integer else math.nextafter(low, -math.inf)]
    outside += [low + 0.5] if integer else []
    if high < math.inf:
      inside.append(high)
      outside.append(high + 1 if integer else math.nextafter(high, math.inf))
    else:
      (inside if end == ']' else outside).append(high)
  (inside if kind.rstrip().endswith('?') else outside).append(None)
  return inside, outside


def call(name, setting, value):
  """Returns what is made with a value of one setting, the others at their defaults or at a bound."""
  made, ranges = found(name), RANGES[name]
  needed = [one.name for one in inspect.signature(made).parameters.values() if one.default is one.empty]
  given = {one: values(ranges[one])[0][0] if one in ranges else GIVEN.get(one) for one in needed}
  return made(**{**given, setting: value})


def test_every_range_is_written_down():
  """Functions, methods and dataclasses of the whole package are searched."""
  ranged = set()
  for module in pkgutil.walk_packages(gl.__path__, 'gradleak.'):
    for name, one in vars(importlib.import_module(module.name)).items():
      if getattr(one, '__module__', None) == module.name and (
        inspect.isfunction(one) or (inspect.isclass(one) and dataclasses.is_dataclass(one))
      ):
        parts = {name: one} | {
          f'{name}.{k}': v for k, v in vars(one).items() if inspect.isclass(one) and inspect.isfunction(v)
        }
        ranged |= {f'{module.name[9:]}.{k}' for k, v in parts.items() if '__' not in k and annotations(v)}
  assert ranged == set(RANGES)
  for name, ranges in RANGES.items():
    assert annotations(found(name)).keys() == ranges.keys() - {'delta'} | annotations(found(name)).keys() & {'delta'}, (
      name
    )


@pytest.mark.parametrize(('name', 'setting'), EVERY)
def test_just_outside_is_refused_by_name(name, setting):
  for value in values(RANGES[name][setting])[1]:
    with pytest.raises(errors.UsageError) as caught:
      call(name, setting, value)
    assert setting in str(caught.value) and errors.shown(value) in str(caught.value), str(caught.value)
    assert 'expected' in str(caught.value) or 'valid: ' in str(caught.value)


def test_texts_describe_what_has_the_same_ranges():
  for text, words in (
    (
      'gaussian(stddev=-1)',
      'gaussian(stddev) is -1, expected a finite number in [0, inf]; the nearest valid value is 0',
    ),
    ('clip(norm=1)+prune(rate=1.5)', 'prune(rate) is 1.5, expected a number in [0, 1]; the nearest valid value is 1'),
    ('imprint(bins=1)', 'imprint(bins) is 1, expected an integer in [2, 65536]; the nearest valid value is 2'),
    ('trap(variant=qbii)', "unknown trap(variant) 'qbii'; did you mean 'qbi'?"),
  ):
    with pytest.raises(errors.UsageError) as caught:
      gl.parse(text)
    assert str(caught.value).startswith(words)
  with pytest.raises(errors.UsageError, match=r'classes\(number\) is 0'):
    gl.data.partition.parse('classes(number=0)', GIVEN['key'], LABELS, 1)
  with pytest.raises(errors.UsageError, match=r'lora\(rank\) is 0'):
    gl.models.create('mlp+lora(rank=0)', 10)


def test_traced_numbers_pass_unchecked_and_traced_integers_do_not():
  jax.jit(lambda x: gl.defenses.gaussian(stddev=x).update({}, (), key=GIVEN['key'])[0])(-1.0)
  with pytest.raises(errors.UsageError, match='is traced'):
    jax.jit(lambda n: gl.defenses.graddefense_step(stddev=0.1, num_slices=n))(3)


@pytest.mark.parametrize(('name', 'setting'), EVERY)
def test_there_are_no_other_choices(name, setting):
  limit = settings.limits(annotations(found(name))[setting])[1]
  if isinstance(limit, settings.Choice):
    assert set(limit.names) == set(RANGES[name][setting].removesuffix('?').split('|'))


@pytest.mark.parametrize(('name', 'setting'), EVERY)
def test_on_the_bounds_is_accepted(name, setting):
  for value in values(RANGES[name][setting])[0]:
    assert settings.fitting(setting, value, annotations(found(name))[setting]) == value
    if found(name) in MADE and (name.rpartition('.')[2], setting) not in TOGETHER:
      call(name, setting, value)
