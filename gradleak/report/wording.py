"""The settings of an audit in sentences, and the sources of its methods."""

from collections.abc import Mapping
from typing import Any

from gradleak.report.formatting import listed

_LABELS = {
  'auto': 'Each attack takes the labels as in its publication.',
  'known': 'The labels are granted to the attacker.',
  'inferred': 'The attacker infers the labels from the update.',
  'optimised': 'The attacker optimises the labels together with the images.',
}


def settings(config: Mapping[str, Any]) -> list[str]:
  """Returns the settings of an audit as sentences; missing ones are left out."""
  parts = [_data(config), _network(config), _client(config), _attacker(config), _size(config), _knowledge(config)]
  parts += [_lpips(config), gallery(config)]
  return [part for part in parts if part]


def gallery(config: Mapping[str, Any]) -> str:
  """Returns what images an original is to be found among, in sentences; '' where a result does not say."""
  made = config.get('gallery')
  if not made:
    return ''
  total, classes = sum(made['images'].values()), [name for name in made['images'] if name != 'unlabelled']
  flat = f' {made["flat"]:,} flat ones are left out.' if made['flat'] else ''
  if not total:
    return f'The gallery has no images.{flat}'
  own = f'{flat} An image is never its own candidate.'
  public = f' {made["public"]:,} of them are public.' if made['public'] else ''
  if made['by_class']:
    left = listed([f'{count:,} of class {name}' for name, count in made['left_out'].items()] or ['none'])
    kinds = listed([f'{count:,} images of class {name}' for name, count in made['images'].items()])
    return f'Each class is a kind of its own: the gallery has {kinds}; left out: {left}.{public}{own}'
  if len(classes) < len(made['images']):
    return f'The gallery has {total:,} images, taken for one kind.{public}{own}'
  least = min(made['images'].values())
  return (
    f'The classes are taken for one kind: the gallery has {total:,} images of {len(classes)} '
    f'class{"" if len(classes) == 1 else "es"}, at least {least:,} of each.{public}{own}'
  )


def citations(methods: Mapping[str, Any]) -> list[str]:
  """Returns the citations of attacks, defenses and model, each once.

  Args:
    methods: `AuditResult.methods`.
  """
  facts = [*methods.get('attacks', {}).values(), *methods.get('defenses', {}).values(), methods.get('model', {})]
  return list(dict.fromkeys(citation for each in facts for citation in each.get('citations', [])))


def shape(config: Mapping[str, Any]) -> str:
  """Returns the image shape in words, such as '28 × 28 pixels, grey'; empty if unknown."""
  if not config.get('image_shape'):
    return ''
  height, width, channels = config['image_shape']
  colours = {1: 'grey', 3: 'colour'}.get(channels, f'{channels} channels')
  return f'{height} × {width} pixels, {colours}'


def _data(config: Mapping[str, Any]) -> str:
  if 'dataset' not in config:
    return ''
  split = f' ({config["split"]})' if config.get('split') else ''
  details = [shape(config), f'{config["num_classes"]} classes' if config.get('num_classes') else '']
  return f'The private images are from {config["dataset"]}{split}: ' + '; '.join(filter(None, details)) + '.'


def _network(config: Mapping[str, Any]) -> str:
  if 'model' not in config:
    return ''
  start = f', initialised as “{config["init"]}”' if config.get('init') else ''
  start += f', with the weights of {config["weights"]}' if config.get('weights') else ''
  if config.get('rounds_before'):
    rounds = config['rounds_before']
    start += f', after {rounds} round{"s" if rounds > 1 else ""} of federated training on public images'
    start += f' at a rate of {config["rate_before"]:g}' if 'rate_before' in config else ''
  norm = f'; BatchNorm runs in {config["batch_norm"]} mode' if config.get('batch_norm', 'none') != 'none' else ''
  return f'The network is {config["model"]}{start}{norm}.'


def _client(config: Mapping[str, Any]) -> str:
  size = config.get('batch_size', 1) // config.get('cohort', 1)  # those of all clients together
  batch = 'one image' if size == 1 else f'a batch of {size} images'
  if config.get('share') == 'delta':
    epochs = config.get('local_epochs') or 1
    return (
      f'Each client trains on {batch} for {epochs} local epoch{"s" if epochs > 1 else ""}{_local(config)} '
      'and sends the change of its weights (FedAvg).'
    )
  return f'Each client sends the gradient of {batch} (FedSGD).' if config.get('share') == 'gradient' else ''


def _local(config: Mapping[str, Any]) -> str:
  """Returns what is unusual of local training, '' for plain SGD."""
  words = {
    'optimizer': f'by {str(config.get("optimizer")).capitalize()}',
    'momentum': f'with a momentum of {config.get("momentum"):g}' if config.get('momentum') else '',
    'weight_decay': f'with a weight decay of {config.get("weight_decay"):g}' if config.get('weight_decay') else '',
    'max_norm': f'with gradients clipped to {config.get("max_norm"):g}' if config.get('max_norm') else '',
  }
  used = [text for name, text in words.items() if config.get(name)]
  return f' {listed(used)}' if used else ''


def _attacker(config: Mapping[str, Any]) -> str:
  sentences = []
  if config.get('steps'):
    sentences.append(f'An attack that searches takes {config["steps"]} steps, if it does not set its own number.')
  if config.get('restarts'):
    several = 's, of which it keeps the best match' if config['restarts'] > 1 else ''
    sentences.append(f'Each attack has {config["restarts"]} start{several}.')
  if config.get('labels'):
    sentences.append(_LABELS.get(config['labels'], f'The attacker infers the labels by the rule {config["labels"]}.'))
  return ' '.join(sentences)


def _size(config: Mapping[str, Any]) -> str:
  if 'trials' not in config:
    return ''
  seed = f' from seed {config["seed"]}' if 'seed' in config else ''
  size = config.get('controls')
  controls = f'; {size} control runs set the threshold for success' if size else ''
  count = config['trials']
  return f'Every attack is run against every defense in {count} trial{"s" if count != 1 else ""}{seed}{controls}.'


def _knowledge(config: Mapping[str, Any]) -> str:
  averaged = f', and may average {config["rounds"]} uploads of the same samples' if config.get('rounds', 1) > 1 else ''
  knowing = f'know the defense and its settings{averaged}'
  return {
    'unaware': 'All attackers are unaware of the defense.',
    'aware': f'All attackers {knowing}.',
    'both': f'Each attack is run by an attacker who is unaware of the defense, and by attackers who {knowing}.',
  }.get(config.get('knowledge', ''), '')


def _lpips(config: Mapping[str, Any]) -> str:
  if 'lpips_weights' not in config:
    return ''
  return f'LPIPS is by the network {config["lpips_backbone"]}, weights {config["lpips_weights"]} (SHA-256).'
