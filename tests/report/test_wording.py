import re

from gradleak.report import wording


def test_settings_in_words(result):
  text = ' '.join(wording.settings(result.config))
  for part in ('digits (all): 16 × 16 pixels, grey; 10 classes', 'gradient of one image (FedSGD)', '1000 steps',
               '2 starts', 'labels are granted', '4 trials from seed 0', '64 control runs'):  # fmt: skip
    assert part in text


def test_settings_of_federated_averaging():
  config = {'share': 'delta', 'local_epochs': 3, 'batch_size': 8, 'labels': 'optimised', 'restarts': 1, 'model': 'm',
            'batch_norm': 'train', 'dataset': 'd', 'image_shape': [4, 6, 3], 'trials': 1}  # fmt: skip
  text = ' '.join(wording.settings(config))
  for part in ('a batch of 8 images for 3 local epochs', 'FedAvg', 'BatchNorm runs in train mode',
               '4 × 6 pixels, colour', 'optimises the labels', '1 trial.', 'has 1 start;'):  # fmt: skip
    assert part in text


def test_what_is_not_set_is_not_said():
  assert wording.settings({}) == []


def test_citations_name_what_was_used_once():
  config = {
    'attacks': ['dlg', 'csdlg(tv=1e-4)', 'gia(steps=10)', 'mine'],
    'defenses': ['none', 'clip(norm=1)+soteria(rate=0.5)', 'soteria', 'outposts'],
  }
  found = wording.citations(config)
  assert [citation.split(',')[0].split(' et')[0] for citation in found] == ['Zhu', 'Geiping', 'Sun']
  assert wording.citations({}) == []


def test_citations_of_defenses_under_other_names_and_of_the_model():
  config = {
    'attacks': ['csdlg_lbfgs(history=10)'],
    'defenses': ['clip(norm=1)+fragmentation_random(ratio=0.4)', 'graddefense_step', 'dgc(ratio=0.01)',
                 'topk(ratio=0.1)', 'client_dp(norm=1,noise=1)', 'dpsgd(norm=1,noise=1)', 'ats(policy=1)',
                 'instahide(k=4)'],
    'model': 'lenet+precode(size=64)',
  }  # fmt: skip
  found = [re.split('[,:]| et', citation)[0] for citation in wording.citations(config)]
  assert found == ['Geiping', 'Na', 'Wang', 'Lin', 'Geyer', 'Abadi', 'Gao', 'Huang', 'Scheliga']
  assert wording.citations({'model': 'lenet(precode=1)'}) == []


def test_every_cited_name_is_a_method():
  from gradleak.attacks.registry import REGISTRY as ATTACKS
  from gradleak.defenses.registry import REGISTRY as DEFENSES
  from gradleak.models.registry import WRAPPERS

  assert {name for name in wording._SYNONYMS.values()} <= set(wording.CITATIONS)
  planned = {'fidel', 'imprint', 'fishing'}  # attacks of other papers that the taxonomy names
  assert set(wording.CITATIONS) - planned <= {*ATTACKS, *DEFENSES, *WRAPPERS}


def test_who_attacks_is_said(both):
  assert 'take what was sent for a gradient, and attackers who know it' in ' '.join(wording.settings(both.config))
  assert 'average' not in ' '.join(wording.settings(both.config))
  text = ' '.join(wording.settings({'knowledge': 'aware', 'rounds': 5}))
  assert 'attackers who know it and its settings, and may average 5 uploads of the same samples' in text
  assert 'for a gradient' not in text
  assert wording.settings({'knowledge': 'unaware'}) == ['No attacker knows the defense.']
