"""Rows are those of each attack and defense alone: neither their order nor what ran before changes them."""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradleak as gl
from gradleak.audit.lanes import expected, structures, table
from gradleak.audit.plan import plan
from gradleak.audit.settings import AuditSettings
from gradleak.audit.uploads import uploads
from gradleak.audit.views import views
from gradleak.defenses.defense import defense
from gradleak.priors.trained import fingerprints

pytestmark = pytest.mark.usefixtures('fast_compilation')
MODEL = gl.models.mlp(10, widths='8')


@pytest.fixture(scope='module')
def scenario():
  data = gl.data.load('digits', limit=24)
  return gl.scenario(
    MODEL, data.samples[:4], data.targets[:4], key=jax.random.key(0), public=(data.samples[4:], data.targets[4:])
  )


def audit(scenario, defenses, attacks, **given):
  given = {'num_trials': 2, 'controls': 2, 'progress': 'none', **given}
  return gl.audit(jax.random.key(1), scenario, defenses, attacks, **given)


def about(result):
  """Returns what each row is about."""
  names = ('attack', 'defense', 'adaptive', 'trial')
  return sorted(str([row[name] for name in names]) for row in (*result.rows, *result.controls))


def rows(result):
  return sorted(json.dumps(row, sort_keys=True) for row in (*result.rows, *result.controls))


CHAIN = gl.defenses.chain(gl.defenses.soteria(rate=0.5), gl.defenses.gaussian(stddev=0.01))
SAME_EVIDENCE = {'csdlg': gl.attacks.csdlg(steps=1), 'bayes': gl.attacks.bayes(steps=1, components=2)}
ORDERS = [('csdlg', 'bayes'), ('bayes', 'csdlg')]


@pytest.mark.long
@pytest.mark.parametrize('names', ORDERS)
def test_attacks_that_read_the_same_and_use_different_noise_have_all_their_rows(scenario, names):
  attacks, settings = {name: SAME_EVIDENCE[name] for name in names}, AuditSettings(controls=2)
  (group,) = plan(jax.random.key(1), scenario, [CHAIN], attacks, 1, settings).groups
  assert len({attack.reads for _, attack in group.attacks}) == 1
  both = np.arange(1), np.arange(2)
  seen = views(group, uploads(group, *both, 1))
  for variants in structures(group):
    wanted = expected(group, variants, *both)
    found = [
      lane.target.key(group, variants[lane.variant].name(group)) for lane in table(group, seen, variants, wanted).lanes
    ]
    assert sorted(found) == sorted(wanted)
    with pytest.raises(RuntimeError, match='please report'):
      table(group, seen._replace(targets=seen.targets[:-1]), variants, wanted)


@pytest.mark.slow
def test_attacks_that_read_the_same_have_the_same_rows_in_any_order(scenario, tmp_path):
  attacks = [{name: SAME_EVIDENCE[name] for name in names} for names in ORDERS]
  first, other = (about(audit(scenario, [CHAIN], each, workdir=tmp_path / str(i))) for i, each in enumerate(attacks))
  assert first == other  # control runs of two settings of one attack look alike
  again = audit(scenario, [CHAIN], attacks[0], workdir=tmp_path / '0')
  assert again.resumed and about(again) == first


@pytest.mark.long
def test_equal_defenses_under_two_labels_share_their_control_runs(scenario):
  noise = {name: gl.defenses.gaussian(stddev=0.01) for name in 'ab'}
  found = about(audit(scenario, noise, [gl.attacks.bayes(steps=1, components=2)], num_trials=1))
  assert len(set(found)) == len(found) == 2 * 2 + 2 * 2


@pytest.mark.long
def test_a_defense_that_is_called_as_the_control_runs_has_its_own_rows(scenario, tmp_path):
  attack, defenses = [gl.attacks.csdlg(steps=1)], [None, gl.defenses.null_gradient()]
  first = audit(scenario, defenses[:1], attack, workdir=tmp_path)
  grown = audit(scenario, defenses, attack, workdir=tmp_path)
  assert rows(grown) == rows(audit(scenario, defenses, attack))
  assert len(grown.controls) == len(first.controls)
  assert {row['trial'] for row in grown.rows if row['defense'] == 'null_gradient'} == {0, 1}


@pytest.mark.long
def test_shares_have_the_control_runs_of_noise_that_others_meet(scenario, tmp_path):
  attack, defenses = (
    [gl.attacks.bayes(steps=1, components=2)],
    {'none': None, 'noise': gl.defenses.gaussian(stddev=0.1)},
  )
  only = {'none': [0], 'noise': [1]}
  for index in range(2):
    found = audit(scenario, defenses, attack, only=only, workdir=tmp_path, process=(index, 2))
  assert len({row['trial'] for row in found.controls if row['adaptive'] == 'floor'}) == 2


SWEEPS = {
  'a float that decides the structure': [gl.attacks.csdlg(steps=1, roughness=r) for r in (0.1, 0.01)],
  'a number': [gl.attacks.csdlg(steps=1, tv=tv) for tv in (0, 0.5)],
}


@pytest.mark.long
@pytest.mark.parametrize('name', SWEEPS)
def test_an_attack_is_added_in_front(scenario, tmp_path, name):
  old, new = SWEEPS[name]
  first = audit(scenario, [None], [old], workdir=tmp_path)
  grown = audit(scenario, [None], [new, old], workdir=tmp_path)
  parts = sorted(path.name for path in (tmp_path / 'parts').iterdir())
  turned = audit(scenario, [None], [old, new], workdir=tmp_path)
  assert turned.resumed and sorted(path.name for path in (tmp_path / 'parts').iterdir()) == parts and len(parts) == 2
  fresh = audit(scenario, [None], [new, old])
  assert rows(grown) == rows(turned) == rows(fresh) and set(rows(first)) <= set(rows(fresh))
  for case, samples in fresh.reconstructions.items():
    np.testing.assert_array_equal(grown.reconstructions[case], samples)


def own(value):
  """Returns an attack of a user; all have one name."""

  def mine(client):
    def read(observation):
      return jnp.full(observation.batch_shape, value), None

    return gl.attacks.closed_form(read)

  return mine


@pytest.mark.long
def test_attacks_that_no_name_tells_apart_keep_their_rows(scenario, tmp_path):
  attacks = {name: own(value) for name, value in (('old', 0.1), ('new', 0.9))}
  audit(scenario, [None], {'old': attacks['old']}, workdir=tmp_path)
  before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / 'parts').iterdir()}
  grown = audit(scenario, [None], {name: attacks[name] for name in ('new', 'old')}, workdir=tmp_path)
  assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / 'parts').iterdir()}.items() >= before.items()
  assert rows(grown) == rows(audit(scenario, [None], attacks))


@pytest.mark.long
def test_parts_of_one_name_give_each_its_own(scenario, tmp_path, monkeypatch):
  attacks = {name: own(value) for name, value in (('old', 0.1), ('new', 0.9))}
  monkeypatch.setattr(sys.modules['gradleak.audit.run'], '_name', lambda group, variant: 'same')
  audit(scenario, [None], {'old': attacks['old']}, workdir=tmp_path)
  grown = audit(scenario, [None], {name: attacks[name] for name in ('new', 'old')}, workdir=tmp_path)
  assert rows(grown) == rows(audit(scenario, [None], attacks))


@pytest.mark.long
def test_a_process_waits_for_rows_that_another_adds_to_its_part(scenario, tmp_path):
  attacks = [gl.attacks.csdlg(steps=1, tv=tv) for tv in (0.1, 0.2)]
  for index in range(2):
    audit(scenario, [None], attacks[:1], workdir=tmp_path, process=(index, 2))
  assert audit(scenario, [None], attacks, workdir=tmp_path, process=(0, 2)) is None
  assert rows(audit(scenario, [None], attacks, workdir=tmp_path, process=(1, 2))) == rows(
    audit(scenario, [None], attacks)
  )


@defense(place='upload', arguments=lambda context, settings: (np.float32(np.mean(context.public[0])).reshape(1),))
def signed(mean=None):
  """Sends each entry times the sign of the public mean, less one half."""

  def update(updates, state, params=None):
    return jax.tree.map(
      lambda x: x * jnp.sign(jnp.asarray([1.0] if mean is None else mean)[0] - 0.5).astype(x.dtype), updates
    ), state

  return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


@pytest.mark.long
def test_a_simulated_defense_is_that_of_the_audit_and_not_of_the_one_before(scenario):
  """Programs are kept for equal arguments, by what arrays hold."""

  def found(value):
    public = np.full_like(scenario.public[0], value), scenario.public[1]
    known = scenario._replace(public=public)
    attacks, given = [gl.attacks.csdlg(steps=1)], {'knowledge': 'adaptive', 'adaptive_attacks': ('simulated',)}
    rows = audit(known, {'signed': signed()}, attacks, num_trials=1, controls=1, **given).rows
    return [row['objective_at_truth'] for row in rows if row['defense'] == 'signed']

  for value in (0.2, 0.8):
    assert np.abs(found(value)).max() < 1e-3


def transformed(function, **traits):
  return gl.defenses.wrap(
    optax.stateless(lambda updates, params=None: jax.tree.map(function, updates)), place='upload', **traits
  )


@pytest.mark.long
def test_a_defense_that_prints_as_another_has_control_runs_of_its_own(scenario, tmp_path):
  first, second = transformed(lambda x: 3 * x), transformed(lambda x: x * jnp.abs(x))
  assert str(first) == str(second)
  given = {'knowledge': 'adaptive', 'adaptive_attacks': ('simulated',), 'num_trials': 1}
  attacks = [gl.attacks.csdlg(steps=1)]
  audit(scenario, {'first': first}, attacks, workdir=tmp_path, **given)
  grown = audit(scenario, {'second': second, 'first': first}, attacks, workdir=tmp_path, **given)
  assert rows(grown) == rows(audit(scenario, {'second': second, 'first': first}, attacks, **given))


@pytest.mark.long
def test_own_noises_that_print_alike_have_all_their_rows(scenario):
  def noisy(stddev):
    def update(updates, state, params=None, *, key, **extra):
      return jax.tree.map(lambda x: x + stddev * jax.random.normal(key, x.shape, x.dtype), updates), state

    made = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
    noise = gl.defenses.Noise(variance=lambda settings, context, norm: stddev**2)
    return gl.defenses.wrap(made, place='upload', random=True, noise=noise)

  defenses = {'small': noisy(0.01), 'large': noisy(0.1)}
  found = audit(scenario, defenses, [SAME_EVIDENCE['bayes']], num_trials=1)
  assert {row['defense'] for row in found.rows if row['adaptive'] is not None} == {'small', 'large'}


@pytest.mark.long
@pytest.mark.parametrize(
  ('attack', 'defense', 'settings'),
  [
    (gl.attacks.csdlg(steps=1, start='class_average'), None, {}),
    (gl.attacks.csdlg(steps=1), gl.defenses.concealment(steps=1), {}),  # an adaptive attack starts from public samples
    (gl.attacks.csdlg(steps=1), None, {'labels': 'rlu'}),
    (gl.attacks.bayes(steps=1, components=2), None, {}),
  ],
  ids=['start', 'adaptive', 'labels', 'learned'],
)
def test_a_private_sample_among_the_public_ones_is_refused_before_anything_runs(
  scenario, tmp_path, attack, defense, settings
):
  both = [np.concatenate(pair) for pair in zip(scenario.public, (scenario.samples, scenario.targets), strict=True)]
  known = scenario._replace(public=tuple(both))
  with pytest.raises(gl.UsageError, match=r'4 of the 4 private images are among those that the attack .* take another'):
    audit(known, [defense], [attack], workdir=tmp_path / 'new', **settings)
  assert not (tmp_path / 'new').exists()
  assert audit(known, [None], [gl.attacks.csdlg(steps=1)], controls=1).rows  # which uses none of them


@pytest.mark.long
def test_rows_that_are_equal_by_chance_are_no_leak_of_the_private_ones():
  rng = np.random.default_rng(0)
  told = gl.data.table({'sex': rng.choice(['f', 'm'], 400), 'work': rng.choice(list('abc'), 400)}, np.arange(400) % 2)
  attack = gl.attacks.csdlg(start='class_average', tv=0.0, steps=1)
  given = {'key': jax.random.key(0), 'modality': gl.modalities.of_config(told.settings)}

  def audited(private, public):
    both = [(told.samples[places], told.targets[places]) for places in (private, public)]
    return audit(gl.scenario(gl.models.mlp(2, widths='8'), *both[0], public=both[1], **given), [None], [attack])

  assert audited(slice(20), slice(20, None)).rows
  distinct = np.unique(told.samples, axis=0, return_index=True)[1]
  with pytest.raises(gl.UsageError, match='private rows are among those that the attack is given as public'):
    audited(distinct, distinct)  # where none equals another one, all of them are no chance


def test_samples_that_are_no_images_are_compared_as_they_are():
  tokens = np.asarray([[1, 2], [257, 258]], np.int32)
  assert len(set(fingerprints(tokens).tolist())) == 2
  images = np.full((2, 1, 1, 1), 0.5, np.float32) + np.asarray([0, 1e-4], np.float32).reshape(2, 1, 1, 1)
  assert len(set(fingerprints(images).tolist())) == 1
