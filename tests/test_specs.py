"""The language of the programs, and the objects that its texts describe."""

import math
import random

import pytest

import gradleak as gl
from gradleak import registry
from gradleak.core import errors, grammar, methods


def blur(images, *, width: float, passes: int = 1, mode: str = 'same', wrap: bool = False, sharpness: float = 2.0):
  return (images, width, passes, mode, wrap, sharpness)


def silence():
  return 'silence'


REGISTRY = {'blur': blur, 'silence': silence}
POLICY = 'translate_x:0.4|contrast:0.3/invert'


@pytest.mark.parametrize(
  ('text', 'name', 'settings'),
  [
    ('none', 'none', {}),
    ('  blur  ', 'blur', {}),
    ('blur()', 'blur', {}),
    ('blur(width=0.5)', 'blur', {'width': 0.5}),
    (' blur ( width = 1e-4 , passes = 3 ,) ', 'blur', {'width': 1e-4, 'passes': 3}),
    ('blur(width=-inf,mode=valid)', 'blur', {'width': -math.inf, 'mode': 'valid'}),
    ("blur(mode='valid')", 'blur', {'mode': 'valid'}),
    ('blur(wrap=True,mode=None)', 'blur', {'wrap': True, 'mode': None}),
    ('blur(wrap=false)', 'blur', {'wrap': False}),
    ('blur(size=(3,4),width=1)', 'blur', {'size': (3, 4), 'width': 1}),
    ("blur(size=((3,'a,b'),()))", 'blur', {'size': ((3, 'a,b'), ())}),
    (f"ats(policy='{POLICY}')", 'ats', {'policy': POLICY}),
    (f'ats(policy="{POLICY}", mode=same)', 'ats', {'policy': POLICY, 'mode': 'same'}),
    (r"blur(mode='C:\data files\new\x.npz')", 'blur', {'mode': r'C:\data files\new\x.npz'}),
    (r'blur(mode=C:\data\x.npz)', 'blur', {'mode': r'C:\data\x.npz'}),
    (r"blur(mode='it\'s (a+b); \\ = c, ')", 'blur', {'mode': "it's (a+b); \\ = c, "}),
    ("blur(mode='3',other='none',third='')", 'blur', {'mode': '3', 'other': 'none', 'third': ''}),
    ('blur(widths=128-64,path=a/b.npz)', 'blur', {'widths': '128-64', 'path': 'a/b.npz'}),
    ('blur(decoder=windows(context=1))', 'blur', {'decoder': 'windows(context=1)'}),
  ],
)
def test_spec(text, name, settings):
  spec = grammar.spec(text, 'filter')
  assert (spec.name, dict(spec.settings)) == (name, settings)
  assert [type(value) for _, value in spec.settings] == [type(value) for value in settings.values()]
  assert grammar.spec(str(spec), 'filter') == spec


def test_canonical_form():
  assert str(grammar.spec(' blur ( width = 5e-1 , wrap = TRUE ) ', 'filter')) == 'blur(width=0.5,wrap=True)'
  assert str(grammar.spec('silence()', 'filter')) == 'silence'
  assert str(grammar.spec("blur(mode='valid',size=( 3,4 ))", 'filter')) == 'blur(mode=valid,size=(3,4))'
  assert str(grammar.spec(f'ats(policy="{POLICY}")', 'filter')) == f"ats(policy='{POLICY}')"
  assert grammar.written('blur', {'mode': "it's", 'width': 1e-6}) == r"blur(mode='it\'s',width=1e-06)"


def test_whatever_is_written_reads_back():
  draw = random.Random(0)

  def word():
    return ''.join(draw.choice('ab1e-.|,;()+=\'" \\\né') for _ in range(draw.randrange(9)))

  def value():
    number = draw.choice([draw.randrange(-(2**63) + 1, 2**63), draw.uniform(-1, 1) * 10 ** draw.randrange(-20, 20)])
    return draw.choice([number, True, False, None, math.inf, word(), word(), word(), (number, word()), ((word(),),)])

  for _ in range(800):
    spec = grammar.Spec('blur', tuple((key, value()) for key in ('x', 'y', 'z')[: draw.randrange(4)]))
    text = str(spec)
    assert grammar.spec(text, 'filter') == spec, text
    assert grammar.parse_chain(f'{text}+{text}', 'filter') == (spec, spec), text
    assert grammar.parse_list(f'{text};silence', 'filter') == [text, 'silence'], text


@pytest.mark.parametrize(
  'text',
  [
    '',
    '(',
    'blur(',
    'blur)',
    'blur(width=1',
    'blur(width)',
    'blur(width=)',
    'blur(=1)',
    'blur(width=1)x',
    '3d(width=1)',
    'blur(width=1)(passes=2)',
    'blur((width=1)',
    'blur(wi dth=1)',
    'a-b',
    "blur(mode='valid)",
    "blur(mode='valid'x)",
    "blur(mode='a'b'c')",
    "blur(width=b'1')",
    'blur(,width=1)',
    'blur(width=1,,passes=2)',
    'blur(width=1,,)',
    'blur(,)',
    'blur(size=(1,,2))',
    'blur(size=(,))',
    'blur(size=[1,2])',
    'blur(width=1\0)',
    'blur,silence',
    'blur(width=1e999)',
    'blur(passes=9223372036854775808)',
  ],
)
def test_unreadable_text_is_a_usage_error_that_quotes_it(text):
  with pytest.raises(errors.UsageError) as caught:
    grammar.spec(text, 'filter')
  assert 'filter' in str(caught.value) and repr(text) in str(caught.value)
  assert '\n' not in str(caught.value)


@pytest.mark.parametrize(
  ('text', 'message'),
  [
    ("blur(mode='valid)", 'a quote is not closed in the filter "blur(mode=\'valid)"'),
    ('blur(width=1', "unbalanced parentheses in the filter 'blur(width=1'"),
    ('blur)+(silence', "unbalanced parentheses in the filter 'blur)+(silence'"),
    ("blur(n=a'b')", 'cannot read "n=a\'b\'" in the filter "blur(n=a\'b\')": quotes stand around a whole value'),
  ],
)
def test_what_does_not_match_is_said(text, message):
  with pytest.raises(errors.UsageError) as caught:
    grammar.parse_chain(text, 'filter')
  assert str(caught.value) == message


def chains(text, kind):
  return [grammar.parse_chain(entry, kind) for entry in grammar.parse_list(text, kind)]


@pytest.mark.parametrize(
  'text',
  [
    'a' * 1001,
    f'blur(width={"9" * 400})',
    f'blur(width={"9" * 5000})',
    f'blur(width=-{"9" * 400}.0)',
    f'blur(size={"(" * 4000}{")" * 4000})',
    f'blur(size={"(" * 300}{")" * 300})',
    f'blur(size={"(" * 400}1)',
    f'blur(size={"-" * 900}1,width=)',
    f'blur({",".join(f"x{i}=1" for i in range(400))})',
    f"blur(mode='{chr(92) * 901}')",
  ],
)
@pytest.mark.parametrize('read', [grammar.spec, grammar.parse_chain, chains])
def test_absurd_text_is_a_usage_error_of_one_sentence(read, text):
  with pytest.raises(errors.UsageError) as caught:
    read(text, 'filter')
  assert len(str(caught.value)) < 300 and '\n' not in str(caught.value)


def test_a_setting_given_twice():
  with pytest.raises(errors.UsageError, match="sets 'width' twice"):
    grammar.spec('blur(width=1,width=2)', 'filter')


def test_chains_split_outside_parentheses_and_quotes_only():
  chain = grammar.parse_chain("blur(width=1e+2) + silence+blur(mode=a+b)+blur(mode=')+(')", 'filter')
  assert chain == (
    grammar.Spec('blur', (('width', 100.0),)),
    grammar.Spec('silence'),
    grammar.Spec('blur', (('mode', 'a+b'),)),
    grammar.Spec('blur', (('mode', ')+('),)),
  )
  for text in ('blur+', '+blur', 'blur++blur', 'blur(a=1+blur', 'blur)+(blur'):
    with pytest.raises(errors.UsageError):
      grammar.parse_chain(text, 'filter')


def test_lists():
  assert grammar.parse_list('none; blur(width=1) ;silence+blur', 'filter') == ['none', 'blur(width=1)', 'silence+blur']
  assert grammar.parse_list("blur(mode='a;b,c');none", 'filter') == ["blur(mode='a;b,c')", 'none']
  for text in ('', ' ', 'none;', ';none', 'none;;blur'):
    with pytest.raises(errors.UsageError, match='empty'):
      grammar.parse_list(text, 'filter')
  with pytest.raises(errors.UsageError, match="'blur' is listed twice"):
    grammar.parse_list('blur; none; blur', 'filter')


def test_commas_between_entries_hint_at_semicolons():
  expected = (
    "'none,blur(width=1,passes=2)' has a comma between filters, expected ';' as in 'none;blur(width=1,passes=2)'"
  )
  with pytest.raises(errors.UsageError) as caught:
    grammar.parse_list('silence;none,blur(width=1,passes=2)', 'filter')
  assert str(caught.value) == expected


def test_grids():
  assert grammar.expand('blur', 'filter') == ['blur']
  assert grammar.expand('blur(width=1| 2,mode=a|b)', 'filter') == [
    'blur(width=1,mode=a)',
    'blur(width=1,mode=b)',
    'blur(width=2,mode=a)',
    'blur(width=2,mode=b)',
  ]
  assert grammar.parse_list('blur(width=1|2)+silence;none', 'filter') == [
    'blur(width=1)+silence',
    'blur(width=2)+silence',
    'none',
  ]
  with pytest.raises(errors.UsageError, match='empty value in a grid'):
    grammar.expand('blur(width=1|)', 'filter')
  with pytest.raises(errors.UsageError, match='16384 entries, expected at most 10000'):
    grammar.expand(f'blur({",".join(f"x{i}=1|2" for i in range(14))})', 'filter')


@pytest.mark.parametrize(
  ('text', 'values'),
  [
    ('blur(width={},wrap=1)', ['(8,8)', '(16,16)']),
    ('blur(width={})', ['(8,8)', '3', '((1,2),3)']),
    ('chain(first=blur(width={}),wrap=1)', ['1', '2']),
    ('chain(first={})+silence', ['blur(width=1)', 'silence']),
    ('blur(width={},wrap=1)+silence', ['1e-1', '1e+5', '2e+6']),
    ('blur(mode={})', ['a', 'b+c']),
    ('chain(first={})', ['blur(width=1,wrap=2)', "blur(wrap='a|b')"]),
  ],
)
def test_alternatives_are_whole_values_tuples_and_calls_among_them(text, values):
  assert grammar.expand(text.format('|'.join(values)), 'filter') == [text.format(value) for value in values]


def test_alternatives_within_alternatives_are_refused():
  inner, silence = grammar.expand('chain(first=blur(width=1|2)|silence)', 'filter')
  assert grammar.spec(silence, 'filter').settings == (('first', 'silence'),)
  with pytest.raises(errors.UsageError, match='spells alternatives, expected one value'):
    grammar.spec(inner, 'filter')


@pytest.mark.parametrize(
  ('text', 'texts'),
  [
    (f"ats(policy='{POLICY}')", [f"ats(policy='{POLICY}')"]),
    ("ats(policy='x=a|b')", ["ats(policy='x=a|b')"]),
    ('ats(policy=\'a|b\'|"c|d",n=1|2)', [f'ats(policy={p},n={n})' for p in ("'a|b'", '"c|d"') for n in (1, 2)]),
    (r"ats(policy='a\'|b')", [r"ats(policy='a\'|b')"]),
  ],
)
def test_what_is_quoted_is_no_grid(text, texts):
  assert grammar.expand(text, 'filter') == texts


def method(text):
  return methods.from_spec(grammar.spec(text, 'filter'), REGISTRY, 'filter')


def test_a_method_knows_its_settings():
  made = method('blur(width=1,passes=2)')
  assert made.factory('x', **made.given) == ('x', 1, 2, 'same', False, 2.0)
  assert made.build((7, 8), 'x') == ('x', 7, 2, 'same', False, 8)
  assert made.numbers == (1.0, 2.0) and str(made) == 'blur(width=1,passes=2)'
  assert made.structure == method('blur(passes=2,width=3,sharpness=4)').structure
  assert made.structure != method('blur(width=1,passes=3)').structure


@pytest.mark.parametrize(
  ('text', 'words'),
  [
    ('blurr(width=1)', ["unknown filter 'blurr'", "did you mean 'blur'", 'valid: blur, silence']),
    ('blur(widht=1)', ["'widht'", "did you mean 'width'", 'passes, sharpness, width, wrap']),
    ('silence(width=1)', ['silence', "'width'", 'it has none']),
    ('blur', ['blur needs the setting width by name', 'blur(width=…)']),
    ('blur(width=none)', ['blur(width)', 'None']),
    ('blur(width=1|2)', ["'width=1|2'", "'1|2' spells alternatives, expected one value"]),
    ('blur(width=(8|16,8))', ["'8|16' spells alternatives, expected one value"]),
  ],
)
def test_what_does_not_fit_the_factory_is_named(text, words):
  with pytest.raises(errors.UsageError) as caught:
    method(text)
  assert all(word in str(caught.value) for word in words), str(caught.value)


def test_attacks():
  attack = registry.attack('csdlg(tv=1e-6)')
  assert attack == gl.attacks.csdlg(tv=1e-6) and str(attack) == 'csdlg(tv=1e-06)'
  assert registry.attack('csdlg(tv=1)') == gl.attacks.csdlg(tv=1.0)  # an integer is a number
  assert str(registry.attack('csdlg(tv=1)')) == 'csdlg(tv=1)'
  assert registry.attack('trap') == gl.servers.trap()
  assert registry.attacks('csdlg(tv=1e-4|1e-6); dlg') == [
    gl.attacks.csdlg(tv=1e-4), gl.attacks.csdlg(tv=1e-6), gl.attacks.dlg()
  ]  # fmt: skip


def test_defenses():
  prune, noise = gl.defenses.prune(rate=0.9), gl.defenses.laplace(scale=0.001)
  assert registry.defense('none') is gl.defenses.NO_DEFENSE and registry.defense(' none() ') is gl.defenses.NO_DEFENSE
  assert registry.defense('prune(rate=0.9)+laplace(scale=0.001)') == gl.defenses.chain(prune, noise)
  assert registry.defenses('none;prune(rate=0.5|0.9)') == [
    gl.defenses.NO_DEFENSE, gl.defenses.prune(rate=0.5), prune
  ]  # fmt: skip


def test_parse_makes_what_the_first_name_says():
  for text in ('none', 'prune(rate=0.9)', 'clip(norm=1)+gaussian(stddev=0.1)'):
    assert registry.parse(text) == registry.defense(text)
  for text in ('csdlg(tv=1e-6)', 'trap'):
    assert registry.parse(text) == registry.attack(text)


@pytest.mark.parametrize(
  ('read', 'text', 'message'),
  [
    (registry.attack, 'csdgl', "unknown attack 'csdgl'; did you mean 'csdlg'"),
    (registry.attack, 'tarp', "did you mean 'trap'"),
    (registry.attack, 'csdlg+dlg', "cannot read the attack 'csdlg+dlg'"),
    (registry.attack, 'prune(rate=0.5)', "unknown attack 'prune'"),
    (registry.defense, 'prun(rate=0.5)', "unknown defense 'prun'; did you mean 'prune'"),
    (registry.defense, 'nnone', "did you mean 'none'"),
    (registry.defense, 'none+prune(rate=0.5)', "'none' stands alone, got 'none+prune(rate=0.5)'"),
    (registry.defense, 'prune(rate=0.5)+none', "'none' stands alone"),
    (registry.defense, 'none(rate=1)', "'none' stands alone"),
    (registry.defense, 'prune(rate=1.5)', 'prune(rate) is 1.5'),
    (registry.defenses, 'none,prune(rate=0.5)', "expected ';' as in 'none;prune(rate=0.5)'"),
    (registry.parse, 'gausian(stddev=1)', "unknown attack or defense 'gausian'; did you mean 'gaussian'"),
    (registry.parse, 'csdlg+prune(rate=0.5)', "cannot read the attack 'csdlg+prune(rate=0.5)'"),
    (registry.parse, '', "the attack or defense '' is empty"),
    (registry.parse, 3, 'the attack or defense is 3, expected a text'),
  ],
)
def test_what_names_no_object_is_a_usage_error(read, text, message):
  with pytest.raises(errors.UsageError) as caught:
    read(text)
  assert message in str(caught.value)
