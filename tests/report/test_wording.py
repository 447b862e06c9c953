import re

import jax
import optax
import pytest

import gradleak as gl
from gradleak.audit.plan import plan
from gradleak.audit.result import methods as of_plan
from gradleak.audit.settings import AuditSettings
from gradleak.report import training_findings, wording
from gradleak.report.words import said
from tests.report.facts import methods


def test_settings_in_words(result):
  text = ' '.join(wording.settings(result.config))
  for part in ('digits (all): 16 × 16 pixels, grey; 10 classes', 'gradient of one image (FedSGD)', '1000 steps',
               '2 starts, of which it keeps the best match', 'labels are granted',
               '4 trials from seed 0', '64 control runs'):  # fmt: skip
    assert part in text


def test_settings_of_federated_averaging():
  config = {'share': 'delta', 'local_epochs': 3, 'batch_size': 8, 'labels': 'optimised', 'restarts': 1, 'model': 'm',
            'batch_norm': 'train', 'dataset': 'd', 'image_shape': [4, 6, 3], 'trials': 1}  # fmt: skip
  text = ' '.join(wording.settings(config))
  for part in ('a batch of 8 images for 3 local epochs', 'FedAvg', 'BatchNorm runs in train mode',
               '4 × 6 pixels, colour', 'optimises the labels', '1 trial.', 'has 1 start.'):  # fmt: skip
    assert part in text


@pytest.mark.parametrize(('name', 'shown'), [('adam', 'by Adam'), ('adamw', 'by AdamW'), ('rmsprop', 'by RMSprop'),
                                              ('nesterov', 'by SGD with Nesterov’s momentum')])  # fmt: skip
def test_optimizers_have_their_names(name, shown):
  text = ' '.join(wording.settings({'share': 'delta', 'optimizer': name, 'local_epochs': 2}))
  assert f'for 2 local epochs {shown} and sends' in text
  (trained,) = training_findings.settings({'share': 'delta', 'optimizer': name})
  assert f'with {shown[3:]}, and sends' in trained


def test_what_is_not_set_is_not_said():
  assert wording.settings({}) == []


def test_a_gallery_in_words():
  made = {'by_class': True, 'images': {'face': 100}, 'left_out': {'non-face': 100}, 'flat': 0, 'public': 50}
  text = wording.gallery({'gallery': made})
  assert '100 images of class face; left out: 100 of class non-face. 50 of them are public.' in text
  made = {'by_class': False, 'images': {'0': 501, '1': 500}, 'left_out': {}, 'flat': 7, 'public': 0}
  text = wording.gallery({'gallery': made})
  assert '1,001 images of 2 classes, at least 500 of each. 7 flat ones are left out.' in text and 'public' not in text
  assert '1,001 images, taken for one kind' in wording.gallery({'gallery': {**made, 'images': {'unlabelled': 1001}}})
  assert text in wording.settings({'gallery': made}) and wording.gallery({}) == ''
  one = wording.gallery({'gallery': {'by_class': True, 'images': {'face': 1}, 'left_out': {}, 'flat': 1, 'public': 1}})
  assert all(part in one for part in ('1 image of class face', '1 flat one is left out', '1 of them is public'))
  made = {'by_class': False, 'images': {}, 'left_out': {}, 'flat': 4, 'public': 0}
  assert wording.gallery({'gallery': made}) == 'The gallery has no images. 4 flat ones are left out.'


@pytest.mark.parametrize(
  ('name', 'facts', 'expected'),
  [
    ('headline.images', {'recovered': 1, 'n': 8}, '1 of 8 images can be recovered'),
    ('headline.images', {'recovered': 1, 'n': 1}, '1 of 1 image can be recovered'),
    ('findings.above', {'seen': 1, 'n': 4}, '(1 of 4 is above chance)'),
    ('settings.steps', {'steps': 1}, 'takes 1 step, if'),
    ('leaderboard.granted', {'n': 1}, 'and 1 public sample.'),
    ('sensitivity.leaks', {'recovered': 1, 'n': 8}, '1 of 8 uploads of production gives images away'),
    ('sensitivity.few', {'trials': 1}, 'There is one trial: intervals'),
    ('training.clients', {'clients': 1, 'per_round': 1, 'split': '', 'drop': ''}, 'is one client; 1 is drawn'),
    ('training.clients', {'clients': 3, 'per_round': 2, 'split': '', 'drop': ''}, 'are 3 clients; 2 are drawn'),
    ('captured.verdicts', {'controls': 1}, '1 run on noise is what a verdict has to exceed'),
  ],
)
def test_a_count_of_one_is_singular(name, facts, expected):
  assert expected in said(name, **facts)


def test_settings_of_one_class_and_one_control_run():
  config = {'dataset': 'd', 'num_classes': 1, 'trials': 1, 'controls': 1}
  text = ' '.join(wording.settings(config))
  assert '1 class.' in text and '1 control run sets the threshold' in text


def test_upper_bounds_are_rounded_up_and_what_was_given_keeps_its_digits():
  of = {'best': 'a', 'cost': '0.0 points', 'n': 50, 'count': 0, 'others': ''}
  seen = {'success_low': 0.0, 'success_high': 0.0711}
  assert 'recognisable (0–8 %).' in said('deploy.undecided_honest', **of, range=seen)
  assert 'by chance in at most 0.41 % of' in said('findings.more_attackers', most=3, one_in=741, chance=300 / 741)
  assert 'probability of at most 0.12 %.' in said('findings.anytime', rate=0.0012)
  assert 'of at most 5.0 %.' in said('findings.anytime', rate=0.05)
  asked = {'level': 'exact', 'most': 8, 'answers': ['x']}
  assert 'known to ± 0.25 %,' in said('findings.stopped_within', share=0.0025, **asked)


def test_citations_name_what_was_used_once():
  found = wording.citations(
    methods(
      ['dlg', 'csdlg(tv=1e-4)', 'gia(steps=10)'],
      ['none', 'clip(norm=1)+soteria(rate=0.5)', 'soteria(rate=0.6)', 'prune(rate=0.5)'],
    )
  )
  assert [citation.split(',')[0].split(' et')[0] for citation in found] == ['Zhu', 'Geiping', 'Sun']
  assert wording.citations({}) == []


def test_citations_of_defenses_under_other_names_and_of_the_model():
  precode = gl.models.create('lenet+precode(size=64)', 10)
  known = methods(
    ['csdlg_lbfgs(history=10)'],
    ['clip(norm=1)+fragmentation_random(ratio=0.4)', 'graddefense_step(stddev=0.1)', 'dgc(ratio=0.01)',
     'topk(ratio=0.1)', 'client_dp(norm=1,noise=1)', 'dpsgd(norm=1,noise=1)', 'ats', 'instahide(mixed=4)'],
    precode.citations,
  )  # fmt: skip
  found = [re.split('[,:]| et', citation)[0] for citation in wording.citations(known)]
  assert found == ['Geiping', 'Na', 'Wang', 'Lin', 'Geyer', 'Abadi', 'Gao', 'Huang', 'Scheliga']
  assert gl.models.create('lenet', 10).citations == ()


@pytest.mark.parametrize('alike', [('dlg', 'dga'), ('csdlg', 'csdlg_fast', 'csdlg_lbfgs', 'gia', 'gs')])
def test_attacks_of_one_paper_cite_it_once(alike):
  assert len(wording.citations(methods(alike))) == 1
  assert len(wording.citations(methods([*alike, 'idlg']))) == 2


@pytest.mark.long
def test_citations_follow_from_the_object_and_not_from_its_label():
  """Class fishing is cited under a harmless label, and a label that names a published method cites nothing."""
  dataset = gl.data.load('digits', limit=2)
  model = gl.models.create('mlp', dataset.num_classes)
  scenario = gl.scenario(model, dataset.samples, dataset.targets, key=jax.random.key(0))
  attacks = {'harmless': gl.servers.class_fishing(), 'dlg(history=100)': gl.attacks.csdlg(steps=1)}
  defenses = {'none': None, 'soteria(rate=0.5)': gl.defenses.wrap(optax.identity(), 'upload')}
  given = AuditSettings(controls=1, knowledge='non-adaptive')
  known = of_plan(plan(jax.random.key(0), scenario, defenses, attacks, 1, given))
  found = [citation.split(',')[0] for citation in wording.citations(known)]
  assert found == ['Wen', 'Geiping']


def test_who_attacks_is_said(both):
  text = ' '.join(wording.settings(both.config))
  assert 'by a non-adaptive attacker, and by adaptive ones, who know' in text
  assert 'average' not in text
  text = ' '.join(wording.settings({'knowledge': 'adaptive', 'rounds': 5}))
  said = (
    'All attackers are adaptive: they know the defense and its settings, and may average 5 uploads of the same samples.'
  )
  assert said in text
  assert 'non-adaptive' not in text
  assert wording.settings({'knowledge': 'non-adaptive'}) == [
    'All attackers are non-adaptive: they do not know the defense.'
  ]


def test_where_labels_come_from_is_said():
  assert wording.settings({'labels': 'auto'}) == ['Each attack takes the labels as in its publication.']
  (said,) = wording.settings({'labels': 'bias_corrected'})
  assert said == 'The attacker infers the labels by the rule bias_corrected.'
