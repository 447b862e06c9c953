"""The settings of an audit in sentences, and the sources of its methods."""

from collections.abc import Mapping
from typing import Any

from gradleak.audit.sequential import Question
from gradleak.modalities import of_config
from gradleak.report.formatting import listed
from gradleak.report.words import said, worded


def settings(config: Mapping[str, Any]) -> list[str]:
  """Returns the settings of an audit as sentences; missing ones are left out."""
  parts = [_data(config), _network(config), _client(config), _attacker(config), _size(config), _knowledge(config)]
  parts += [(said('settings.lpips', **config) if 'lpips_weights' in config else ''), gallery(config)]
  return [part for part in parts if part]


def gallery(config: Mapping[str, Any]) -> str:
  """Returns what images an original is to be found among, in sentences; '' where a result does not say."""
  made = config.get('gallery')
  if not made:
    return ''
  images = made['images']
  classes = [name for name in images if name != 'unlabelled']
  values = {
    'total': sum(images.values()),
    'classes': len(classes),
    'least': min(images.values(), default=0),
    'kinds': [said('settings.gallery_kind', n=count, name=name) for name, count in images.items()],
    'left': [f'{count:,} of class {name}' for name, count in made['left_out'].items()] or ['none'],
    'flat': said('settings.gallery_flat', n=made['flat']) if made['flat'] else '',
    'shared': said('settings.gallery_shared', n=made['shared']) if made.get('shared') else '',
    'public': said('settings.gallery_public', n=made['public']) if made['public'] else '',
  }
  if not values['total']:
    return said('settings.gallery_empty', **values)
  if made['by_class']:
    return said('settings.gallery_by_class', **values)
  return said('settings.gallery' if len(classes) == len(images) else 'settings.gallery_unlabelled', **values)


def published(methods: Mapping[str, Any]) -> dict[str, str]:
  """Returns {defense: what its source calls it, or ''}; `methods` is that of `citations`."""
  return {label: each.get('published', '') for label, each in methods.get('defenses', {}).items()}


def citations(methods: Mapping[str, Any]) -> list[str]:
  """Returns the citations of attacks, defenses and model, each once.

  Args:
    methods: `AuditResult.methods`.
  """
  facts = [*methods.get('attacks', {}).values(), *methods.get('defenses', {}).values(), methods.get('model', {})]
  return list(dict.fromkeys(citation for each in facts for citation in each.get('citations', [])))


def shape(config: Mapping[str, Any]) -> str:
  """Returns the shape of a sample in words, such as '28 × 28 pixels, grey'; empty if unknown."""
  if not config.get('image_shape'):
    return ''
  return of_config(config).shaped(config['image_shape'])


def _data(config: Mapping[str, Any]) -> str:
  if 'dataset' not in config:
    return ''
  split = f' ({config["split"]})' if config.get('split') else ''
  details = [shape(config), _counted(config.get('num_classes') or 0, 'class', 'classes')]
  return said('settings.dataset', dataset=config['dataset'], split=split, details='; '.join(filter(None, details)))


def _counted(number: int, one: str, several: str) -> str:
  """Returns a number with what is counted; '' for none."""
  return f'{number} {one if number == 1 else several}' if number else ''


def _network(config: Mapping[str, Any]) -> str:
  if 'model' not in config:
    return ''
  start = f', initialised as “{config["init"]}”' if config.get('init') else ''
  start += f', with the weights of {config["weights"]}' if config.get('weights') else ''
  if config.get('rounds_before'):
    rounds = config['rounds_before']
    start += worded(f', after {rounds} round{"s" if rounds > 1 else ""} of federated training on public images')
    start += f' at a rate of {config["rate_before"]:g}' if 'rate_before' in config else ''
  norm = f'; BatchNorm runs in {config["batch_norm"]} mode' if config.get('batch_norm', 'none') != 'none' else ''
  return said('settings.network', model=config['model'], start=start, norm=norm)


def _client(config: Mapping[str, Any]) -> str:
  size = config.get('batch_size', 1) // config.get('cohort', 1)  # those of all clients together
  batch = worded('one image' if size == 1 else f'a batch of {size} images')
  if config.get('share') not in ('delta', 'gradient'):
    return ''
  return said(f'settings.{config["share"]}', batch=batch, epochs=config.get('local_epochs') or 1, local=_local(config))


def optimizer(name: Any) -> str:
  """Returns what people call an optimizer of `ClientSettings`."""
  of_sgd = {'sgd': 'SGD', 'nesterov': 'SGD with Nesterov’s momentum'}
  return {**of_sgd, 'adam': 'Adam', 'adamw': 'AdamW', 'rmsprop': 'RMSprop'}.get(str(name), str(name))


def _local(config: Mapping[str, Any]) -> str:
  """Returns what is unusual of local training, '' for plain SGD."""
  words = {
    'optimizer': f'by {optimizer(config.get("optimizer"))}',
    'momentum': f'with a momentum of {config.get("momentum") or 0:g}',
    'weight_decay': f'with a weight decay of {config.get("weight_decay") or 0:g}',
    'max_norm': f'with gradients clipped to {config.get("max_norm") or 0:g}',
  }
  used = [text for name, text in words.items() if config.get(name)]
  return f' {listed(used)}' if used else ''


def _attacker(config: Mapping[str, Any]) -> str:
  sentences = [said(f'settings.{name}', **config) for name in ('steps', 'restarts') if config.get(name)]
  if labels := config.get('labels'):
    modes = ('auto', 'known', 'inferred', 'optimised')
    sentences.append(said(f'settings.{labels if labels in modes else "rule"}', labels=labels))
  return ' '.join(sentences)


def _size(config: Mapping[str, Any]) -> str:
  if 'trials' not in config:
    return ''
  seed = f' from seed {config["seed"]}' if 'seed' in config else ''
  controls = _counted(config.get('controls') or 0, 'control run sets', 'control runs set')
  controls = f'; {controls} the threshold for success' if controls else ''
  most = 'at most ' * sequential(config)
  return said('settings.trials', trials=config['trials'], most=most, seed=seed, controls=controls)


def sequential(config: Mapping[str, Any]) -> bool:
  """Returns whether the trials of an audit with these settings stopped by what was found."""
  return Question.of(config) is not None


def intervals(config: Mapping[str, Any], fixed: str = 'exact') -> str:
  """Returns of which kind the intervals of an audit are; `fixed` where the number of trials was."""
  return 'anytime-valid' if sequential(config) else fixed


def _knowledge(config: Mapping[str, Any]) -> str:
  if config.get('knowledge') not in ('non-adaptive', 'adaptive', 'both'):
    return ''
  rounds = config.get('rounds', 1)
  knowing = said('settings.averaging' if rounds > 1 else 'settings.knowing', rounds=rounds)
  return said(f'settings.{config["knowledge"]}', knowing=knowing)
