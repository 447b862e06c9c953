"""The settings of an audit in sentences, and where its methods come from."""

import re

from gradleak.report.formatting import listed

# Only what is beyond doubt: a wrong citation is worse than none.
CITATIONS = {
  'dlg': 'Zhu, Liu, Han: Deep Leakage from Gradients. NeurIPS 2019.',
  'idlg': 'Zhao, Mopuri, Bilen: iDLG: Improved Deep Leakage from Gradients. 2020.',
  'csdlg': 'Geiping, Bauermeister, Dröge, Moeller: Inverting Gradients – How Easy Is It to Break Privacy in Federated '
  'Learning? NeurIPS 2020.',
  'fidel': 'Enthoven, Al-Ars: Fidel: Reconstructing Private Training Samples from Weight Updates. 2021.',
  'imprint': 'Fowl, Geiping, Czaja, Goldblum, Goldstein: Robbing the Fed. ICLR 2022.',
  'fishing': 'Wen, Geiping, Fowl, Goldblum, Goldstein: Fishing for User Data. ICML 2022.',
  'soteria': 'Sun et al.: Soteria: Provable Defense against Privacy Leakage in Federated Learning. CVPR 2021.',
  'graddefense': 'Wang, Guo, Xie, Qi: Protect Privacy from Gradient Leakage Attack. INFOCOM 2022.',
  'outpost': 'Wang, Hugh, Li: More Than Enough Is Too Much. IEEE/ACM Transactions on Networking, 2024.',
  'concealment': 'Wu, Hayat, Zhou, Harandi: Concealing Sensitive Samples against Gradient Leakage. AAAI 2024.',
  'fragmentation': 'Na, Hong, Kim, Shin: Closing the Loophole: Rethinking Reconstruction Attacks in Federated Learning '
  'from a Privacy Standpoint. ACSAC 2022.',
  'client_dp': 'Geyer, Klein, Nabi: Differentially Private Federated Learning: A Client Level Perspective. 2017.',
  'dpsgd': 'Abadi et al.: Deep Learning with Differential Privacy. CCS 2016.',
  'precode': 'Scheliga, Mäder, Seeland: PRECODE – A Generic Model Extension to Prevent Deep Gradient Leakage. '
  'WACV 2022.',
  'ats': 'Gao, Guo, Zhang, Qiu, Wen, Liu: Privacy-preserving Collaborative Learning with Automatic Transformation '
  'Search. CVPR 2021.',
  'instahide': 'Huang, Song, Li, Arora: InstaHide: Instance-hiding Schemes for Private Distributed Learning. '
  'ICML 2020.',
  'dgc': 'Lin, Han, Mao, Wang, Dally: Deep Gradient Compression. ICLR 2018.',
}
_SYNONYMS = {
  'dga': 'dlg',
  'gia': 'csdlg',
  'gs': 'csdlg',
  'csdlg_fast': 'csdlg',
  'csdlg_lbfgs': 'csdlg',
  'ffl': 'fragmentation',
  'fragmentation_random': 'fragmentation',
  'graddefense_step': 'graddefense',
  'dcs2': 'concealment',
}
_LABELS = {
  'known': 'The labels are granted to the attacker.',
  'inferred': 'The attacker infers the labels from the update.',
  'optimised': 'The attacker optimises the labels together with the images.',
}


def settings(config):
  """Returns the audit's settings as sentences; a key that `config` lacks is left out."""
  parts = [_data(config), _network(config), _client(config), _attacker(config), _size(config), _knowledge(config)]
  return [part for part in parts if part]


def citations(config):
  """Returns the citations of the attacks, defenses and model of `config`, in order of appearance, each once."""
  specs = [*config.get('attacks', []), *config.get('defenses', []), str(config.get('model', ''))]
  names = re.findall(r'[A-Za-z_][A-Za-z_0-9]*(?=\(|\+|$)', '+'.join(re.sub(r'\(.*?\)', '', spec) for spec in specs))
  found = [CITATIONS.get(_SYNONYMS.get(name, name)) for name in names]
  return list(dict.fromkeys(citation for citation in found if citation))


def shape(config):
  """Returns the image shape in words, such as '28 × 28 pixels, grey'; empty if unknown."""
  if not config.get('image_shape'):
    return ''
  height, width, channels = config['image_shape']
  colours = {1: 'grey', 3: 'colour'}.get(channels, f'{channels} channels')
  return f'{height} × {width} pixels, {colours}'


def _data(config):
  if 'dataset' not in config:
    return ''
  split = f' ({config["split"]})' if config.get('split') else ''
  details = [shape(config), f'{config["num_classes"]} classes' if config.get('num_classes') else '']
  return f'The private images are from {config["dataset"]}{split}: ' + '; '.join(filter(None, details)) + '.'


def _network(config):
  if 'model' not in config:
    return ''
  start = f', initialised as “{config["init"]}”' if config.get('init') else ''
  norm = f'; BatchNorm runs in {config["batch_norm"]} mode' if config.get('batch_norm', 'none') != 'none' else ''
  return f'The network is {config["model"]}{start}{norm}.'


def _client(config):
  size = config.get('batch_size', 1)
  batch = 'one image' if size == 1 else f'a batch of {size} images'
  if config.get('share') == 'delta':
    epochs = config.get('local_epochs') or 1
    return (
      f'Each client trains on {batch} for {epochs} local epoch{"s" if epochs > 1 else ""} '
      'and shares the change of its weights (FedAvg).'
    )
  return f'Each client shares the gradient of {batch} (FedSGD).' if config.get('share') == 'gradient' else ''


def _attacker(config):
  effort = []
  if config.get('steps'):
    effort.append(f'takes {config["steps"]} steps')
  if config.get('restarts'):
    several = 's, and keeps the result that matches the update best' if config['restarts'] > 1 else ''
    effort.append(f'has {config["restarts"]} start{several}')
  sentences = [f'Each attack {listed(effort)}; it never sees the truth.'] if effort else []
  if config.get('labels'):
    sentences.append(_LABELS.get(config['labels'], f'Labels: {config["labels"]}.'))
  return ' '.join(sentences)


def _size(config):
  if 'trials' not in config:
    return ''
  seed = f' from seed {config["seed"]}' if 'seed' in config else ''
  size = config.get('controls')
  controls = f'; {size} control runs with a null gradient set the threshold' if size else ''
  count = config['trials']
  return f'Every attack meets every defense in {count} trial{"s" if count != 1 else ""}{seed}{controls}.'


def _knowledge(config):
  averaged = f', and may average {config["rounds"]} uploads of the same samples' if config.get('rounds', 1) > 1 else ''
  knowing = f'attackers who know it and its settings{averaged}'
  return {
    'unaware': 'No attacker knows the defense.',
    'aware': f'Every defense meets {knowing}, as far as they can make use of that.',
    'both': f'Every defense meets attackers who take what was sent for a gradient, and {knowing}.',
  }.get(config.get('knowledge'), '')
