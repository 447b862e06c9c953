"""Synthetic patient notes from a seeded grammar: nobody's data, the same for every version of Python and NumPy."""

import hashlib
from collections.abc import Sequence
from typing import TypeVar

from gradleak.core import errors

T = TypeVar('T')

SPLITS = {'test': 2000, 'train': 8000}  # notes of each

_NAMES = (
  'abel', 'ada', 'alma', 'amir', 'anton', 'bela', 'boris', 'cara', 'celia', 'cyril', 'dalia', 'daria', 'dino',
  'edda', 'egon', 'elif', 'emil', 'enzo', 'erika', 'fadi', 'faye', 'felix', 'freya', 'gina', 'goran', 'greta',
  'hanna', 'hugo', 'ida', 'igor', 'inga', 'ivo', 'jana', 'jonas', 'kaya', 'kemal', 'lara', 'leon', 'lina', 'luca',
  'maja', 'malik', 'mara', 'milo', 'nadia', 'nils', 'nora', 'olga', 'omar', 'otto', 'paula', 'petra', 'rafi', 'rosa',
  'samir', 'selma', 'theo', 'ute', 'vera', 'viktor', 'wanda', 'yara', 'zeno',
)  # fmt: skip
_ADULTS = (
  'diabetes', 'hypertension', 'asthma', 'smoker', 'former smoker', 'obesity', 'anaemia', 'penicillin allergy',
  'kidney disease', 'liver cirrhosis', 'depression', 'migraine', 'stroke in 2019', 'hip replacement',
  'atrial fibrillation', 'gout', 'no medication', 'lives alone', 'alcohol abuse', 'latex allergy',
)  # fmt: skip
_CHILDREN = (
  'asthma', 'eczema', 'born preterm', 'penicillin allergy', 'no medication', 'twin', 'heart murmur',
  'iron deficiency',
)  # fmt: skip
# Department -> (complaints, findings, treatments).
_DEPARTMENTS = {
  'cardiology': (
    'chest pain,palpitations,short of breath,leg swelling,syncope,cold sweat,pain in left arm,fatigue',
    'troponin raised,st elevation,sinus rhythm,systolic murmur,ejection fraction low,normal ecg,long qt,'
    'mitral leak on echo',
    'start aspirin,urgent catheter,beta blocker,holter for one day,increase diuretic,pacemaker,statin,'
    'observe overnight',
  ),
  'neurology': (
    'headache,dizziness,weak right hand,seizure,double vision,memory loss,tremor at rest,numb left leg',
    'reflexes brisk,lesion on mri,normal ct,slow eeg,facial droop,neck stiff,gait unsteady,no deficit',
    'start levetiracetam,lumbar puncture,lysis given,refer to stroke unit,levodopa trial,repeat mri,triptan,'
    'memory clinic',
  ),
  'orthopaedics': (
    'knee pain,fall on wrist,low back pain,shoulder stiff,ankle sprain,hip pain at night,swollen finger,limps',
    'fracture of radius,meniscus torn,normal xray,joint warm,effusion,disc bulge,tendon intact,bone density low',
    'plaster for six weeks,physiotherapy,arthroscopy,ibuprofen,crutches,surgery tomorrow,steroid injection,'
    'brace at night',
  ),
  'paediatrics': (
    'fever,cough,ear pain,rash on trunk,vomiting,poor feeding,wheeze,crying at night',
    'throat red,ear drum bulging,lungs clear,weight below curve,dehydrated,spots on palms,crackles on left,well child',
    'oral fluids,amoxicillin,paracetamol,vaccine given,salbutamol,admit for fluids,stool culture,recheck on monday',
  ),
  'psychiatry': (
    'low mood,panic attacks,poor sleep,hears voices,worries daily,weight loss,self harm,restless',
    'oriented,no suicidal plan,flat affect,thoughts racing,lithium level low,anxious,insight poor,eye contact good',
    'start sertraline,weekly therapy,admit tonight,raise quetiapine,sleep diary,crisis plan,taper lorazepam,'
    'group sessions',
  ),
}
CLASS_NAMES = tuple(_DEPARTMENTS)
_UNITS = ('hours', 'days', 'weeks', 'months')
_TEMPLATES = (
  '{name} {age} {sex} : {complaint} for {count} {unit} . {condition} . {finding} . {treatment} .',
  '{complaint} for {count} {unit} , {sex} {name} {age} . {finding} , {condition} . plan {treatment} .',
  '{sex} of {age} , {condition} . {complaint} since {count} {unit} . {finding} . {name} agrees : {treatment} .',
  '{name} , {sex} , {age} . reports {complaint} , {count} {unit} . {finding} . {treatment} .',
)


def note(split: str, index: int) -> tuple[str, int]:
  """Returns a note and its department, a place in `CLASS_NAMES`; departments take turns.

  Args:
    split: 'train' or 'test'.
    index: number of the note in it, at least 0.
  """
  errors.check_choice('split of notes', split, SPLITS)
  department = index % len(CLASS_NAMES)
  complaints, findings, treatments = (texts.split(',') for texts in _DEPARTMENTS[CLASS_NAMES[department]])

  def drawn(slot: str, choices: Sequence[T]) -> T:
    digest = hashlib.sha256(f'{split}/{index}/{slot}'.encode()).digest()
    return choices[int.from_bytes(digest[:8], 'big') % len(choices)]

  child = CLASS_NAMES[department] == 'paediatrics'
  filled = drawn('template', _TEMPLATES).format(
    name=drawn('name', _NAMES),
    age=drawn('age', range(1, 18) if child else range(18, 96)),
    sex=drawn('sex', ('boy', 'girl') if child else ('man', 'woman')),
    complaint=drawn('complaint', complaints),
    count=drawn('count', range(2, 13)),
    unit=drawn('unit', _UNITS),
    condition=drawn('condition', _CHILDREN if child else _ADULTS),
    finding=drawn('finding', findings),
    treatment=drawn('treatment', treatments),
  )
  return filled, department


def vocabulary() -> tuple[str, ...]:
  """Returns all words that a note may have, sorted."""
  listed = ','.join([*_ADULTS, *_CHILDREN, *(text for texts in _DEPARTMENTS.values() for text in texts)]).replace(
    ',', ' '
  )
  words = {word for text in _TEMPLATES for word in text.split() if not word.startswith('{')}
  words |= {*listed.split(), *_NAMES, *_UNITS, *map(str, range(1, 96)), 'boy', 'girl', 'man', 'woman'}
  return tuple(sorted(words))
