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
