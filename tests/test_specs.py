"""The small language of the programs."""

import math

import pytest

from gradleak import errors, specs


def blur(*, width: float, passes: int = 1, mode: str = 'same', wrap: bool = False, sharpness: float = 2.0):
  return (width, passes, mode, wrap, sharpness)


def silence():
  return 'silence'


REGISTRY = {'blur': blur, 'silence': silence}


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
  ],
)
def test_parse(text, name, settings):
  spec = specs.parse(text, 'filter')
  assert (spec.name, dict(spec.settings)) == (name, settings)
  assert specs.parse(str(spec), 'filter') == spec


def test_canonical_form():
  assert str(specs.parse(' blur ( width = 5e-1 , wrap = TRUE ) ', 'filter')) == 'blur(width=0.5,wrap=True)'
  assert str(specs.parse('silence()', 'filter')) == 'silence'


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
  ],
)
def test_unreadable_text_is_a_usage_error_that_quotes_it(text):
  with pytest.raises(errors.UsageError) as caught:
    specs.parse(text, 'filter')
  assert 'filter' in str(caught.value) and repr(text) in str(caught.value)
  assert '\n' not in str(caught.value)


def test_a_setting_given_twice():
  with pytest.raises(errors.UsageError, match="sets 'width' twice"):
    specs.parse('blur(width=1,width=2)', 'filter')


def test_chains_split_outside_parentheses_only():
  chain = specs.parse_chain('blur(width=1e+2) + silence+blur(mode=a+b)', 'filter')
  assert chain == (
    specs.Spec('blur', (('width', 100.0),)),
    specs.Spec('silence'),
    specs.Spec('blur', (('mode', 'a+b'),)),
  )
  for text in ('blur+', '+blur', 'blur++blur', 'blur(a=1+blur', 'blur)+(blur'):
    with pytest.raises(errors.UsageError):
      specs.parse_chain(text, 'filter')


def test_lists():
  assert specs.parse_list('none; blur(width=1) ;silence+blur', 'filter') == ['none', 'blur(width=1)', 'silence+blur']
  for text in ('', ' ', 'none;', ';none', 'none;;blur'):
    with pytest.raises(errors.UsageError, match='empty'):
      specs.parse_list(text, 'filter')
  with pytest.raises(errors.UsageError, match="'blur' is listed twice"):
    specs.parse_list('blur; none; blur', 'filter')


def resolve(text):
  return specs.resolve(specs.parse(text, 'filter'), REGISTRY, 'filter')


def test_floats_are_numeric_and_all_else_is_static():
  factory, static, numeric = resolve('blur(width=1,passes=2,mode=valid,wrap=true)')
  assert factory is blur
  assert static == {'passes': 2, 'mode': 'valid', 'wrap': True}
  assert numeric == {'width': 1.0} and isinstance(numeric['width'], float)


@pytest.mark.parametrize(
  ('text', 'words'),
  [
    ('blurr(width=1)', ["unknown filter 'blurr'", "did you mean 'blur'", 'valid: blur, silence']),
    ('blur(widht=1)', ["'widht'", "did you mean 'width'", 'passes, sharpness, width, wrap']),
    ('silence(width=1)', ['silence', "'width'", 'it has none']),
    ('blur', ['blur needs the setting width', 'blur(width=…)']),
    ('blur(width=wide)', ['blur(width)', "'wide'", 'a number']),
    ('blur(width=nan)', ['blur(width)', 'nan']),
    ('blur(width=none)', ['blur(width)', 'None']),
    ('blur(width=1,passes=2.5)', ['blur(passes)', '2.5', 'int']),
    ('blur(width=1,passes=true)', ['blur(passes)', 'True', 'int']),
    ('blur(width=1,mode=3)', ['blur(mode)', '3', 'str']),
    ('blur(width=1,wrap=1)', ['blur(wrap)', '1', 'bool']),
  ],
)
def test_what_does_not_fit_the_factory_is_named(text, words):
  with pytest.raises(errors.UsageError) as caught:
    resolve(text)
  assert all(word in str(caught.value) for word in words), str(caught.value)


def template(text):
  return specs.template(specs.parse(text, 'filter'), REGISTRY, 'filter')


def test_template_separates_structure_from_numbers():
  made = template('blur(width=1,passes=2)')
  assert made.numbers == (1.0, 2.0)  # sharpness' default included, in the order of the signature
  assert made.build(made.numbers) == (1.0, 2, 'same', False, 2.0)
  assert made.build((7, 8)) == (7, 2, 'same', False, 8)
  assert made.structure == template('blur(passes=2,width=3,sharpness=4)').structure
  assert made.structure != template('blur(width=1,passes=3)').structure
  assert made.structure != template('silence').structure
  assert len({made.structure, template('blur(width=5,passes=2)').structure}) == 1  # hashable
  with pytest.raises(ValueError, match='zip'):
    made.build((7,))
