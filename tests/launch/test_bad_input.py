"""What a user can get wrong: one line that names the value and what was expected, status 2, and nothing left behind."""

import numpy as np
import pytest

from tests import programs

# Flags (in which {here} is a folder of bad things, {new} one that does not exist) -> what the line must hold.
CASES = [
  # data
  ('--dataset=facse', "unknown dataset 'facse'", "did you mean 'faces'", 'digits, folder:PATH'),
  ('--dataset=', "unknown dataset ''", 'faces'),
  ('--dataset=mnist --data_dir={new}', 'mnist is not prepared in {new}', 'launch/prepare_data.py --dataset=mnist'),
  ('--dataset=mnits --data_dir={new}', "unknown dataset 'mnits'", "did you mean 'mnist'"),
  ('--split=validation', "unknown split of digits 'validation'", 'valid: test, train'),
  ('--dataset={here}/alike', "no dataset is named '{here}/alike'", 'write folder:{here}/alike'),
  ('--dataset=folder:{new}', "no folder '{new}'", 'PATH/split/label'),
  ('--dataset=folder:', "no folder ''"),
  ('--dataset=folder:{here}/alike --split=train', "'train'", 'valid: test'),
  ('--dataset=folder:{here}/empty', "'test'", 'expected PATH/split/label/*.png'),
  ('--dataset=folder:{here}/unreadable', 'cannot read the image {here}/unreadable/test/a/0.png'),
  ('--dataset=folder:{here}/differing', '9×9', '8×8', '--image_size'),
  ('--channels=2', 'channels is 2', '1 (grey), 3 (RGB)'),
  ('--image_size=0', 'load(image_size) is 0', 'in [1, 4096]'),
  ('--image_size=large', "flag --image_size=large: invalid literal for int() with base 10: 'large'"),
  # model and loss
  ('--model=lent', "unknown model 'lent'", "did you mean 'lenet'", 'convnet', 'mlp'),
  ('--model=', "the model '' is empty"),
  ('--model=lenet(', "unbalanced parentheses in the model 'lenet('"),
  ('--model=convnet(8)', "cannot read '8' in the model 'convnet(8)'", 'expected setting=value'),
  ('--model=mlp(width=3)', "setting of the model mlp: 'width'", 'activation, dropout'),
  ('--model=mlp(dropout=often)', "mlp(dropout) is 'often'", 'expected a number'),
  ('--model=convnet(width=0)', 'convnet(width) is 0', 'in [1, 1024]'),
  ('--model=convnet(width=2)', 'convnet pools 9×9 pixels', 'images of 8×8 are too small'),
  ('--model=cnn --image_size=3', 'at least 4×4 pixels, got 3×3'),
  ('--init=xavier', "unknown init 'xavier'", 'default, explicit'),
  ('--loss=hinge', "unknown loss 'hinge'", 'cross_entropy, dice, focal'),
  ('--batch_norm=evl', "unknown batch_norm 'evl'", "did you mean 'eval'"),
  # client
  ('--share=gradients', "unknown share 'gradients'", "did you mean 'gradient'", 'delta'),
  ('--local_epochs=2', 'local_epochs is 2', 'that shares its gradient takes one step', "share='delta'"),
  ('--local_batch_size=1 --batch_size=2', 'one step', 'local_batch_size is 1, and a client that shares its gradient'),
  ('--share=delta --local_epochs=0', 'epochs is 0', 'in [1, inf]'),
  ('--share=delta --local_batch_size=0', 'local_batch_size is 0', 'in [1, inf]'),
  ('--share=delta --learning_rate=0', 'learning_rate is 0.0', 'expected a finite number'),
  # knowledge
  ('--knowledge=adaptiv', "unknown knowledge 'adaptiv'", "did you mean 'adaptive'", 'both'),
  ('--rounds=0', 'rounds is 0', 'in [1, 1000000]'),
  ('--public=5000', '5000 images are asked for', 'has 1297'),
  ('--public=0 --rounds_before=2', '2 rounds before the audit need public samples'),
  ('--rounds_before=-1', 'rounds_before is -1', 'nearest valid value is 0'),
  ('--public=-1', 'public is -1', 'nearest valid value is 0'),
  ('--public=0 --defenses=graddefense(stddev=0.1)', 'graddefense', 'public'),
  ('--public=0 --defenses=instahide', 'public'),
  ('--public=0 --attacks=gs(start=class_average)', "'class_average' needs auxiliary data", 'public'),
  ('--dataset=folder:{here}/alike --defenses=concealment(start=proxy)', 'public'),
  ('--dataset=folder:{here}/one', 'has one logit', 'return two logits'),
  ('--defenses=ats+instahide', 'transforms the samples twice'),
  ('--model=convnet(width=1) --image_size=9 --defenses=dpsgd(norm=1,noise=1)', 'BatchNorm'),
  # attacks
  ('--attacks=csdgl', "unknown attack 'csdgl'", "did you mean 'csdlg'", 'valid: '),
  ('--attacks=', "the list of attacks ''", 'is empty or has an empty entry'),
  ('--attacks=csdlg;;dlg', "'csdlg;;dlg'", 'empty entry'),
  ('--attacks=csdlg(tv=1e-4);csdlg(tv=0.0001)', "the attack 'csdlg(tv=0.0001)' is listed twice"),
  ('--attacks=csdlg(tv=1e-4', "unbalanced parentheses in the attack 'csdlg(tv=1e-4'"),
  ('--attacks=csdlg+dlg', "cannot read the attack 'csdlg+dlg'"),
  ('--attacks=csdlg(tvv=1)', "setting of the attack csdlg: 'tvv'", "did you mean 'tv'"),
  ('--attacks=csdlg(tv=1,tv=2)', "'csdlg(tv=1,tv=2)' sets 'tv' twice"),
  ('--attacks=csdlg(tv=-1)', 'tv is -1.0', 'in [0, inf]', 'the nearest valid value is 0'),
  ('--attacks=csdlg(tv=nan)', 'csdlg(tv) is nan', 'expected a number'),
  ('--attacks=csdlg(distance=cosin)', "unknown distance 'cosin'", "did you mean 'cosine'"),
  ('--attacks=csdlg(box=3)', 'csdlg(box) is 3', 'expected bool'),
  ('--attacks=idlg --batch_size=2', "the label rule 'idlg' reads one label, the batch holds 2"),
  # defenses
  ('--defenses=prun(rate=0.5)', "unknown defense 'prun'", "did you mean 'prune'", 'gaussian'),
  ('--defenses=', "the list of defenses ''", 'is empty or has an empty entry'),
  ('--defenses=none;', "'none;'", 'empty entry'),
  ('--defenses=prune(rate=0.5);prune(rate=0.50)', "the defense 'prune(rate=0.5)' is listed twice"),
  ('--defenses=none+prune(rate=0.5)', "'none' stands alone", "'none+prune(rate=0.5)'"),
  ('--defenses=prune(rate=0.5)+', "'prune(rate=0.5)+'", 'empty member'),
  ('--defenses=prune(rate=0.5))', "unbalanced parentheses in the defense 'prune(rate=0.5))'"),
  ('--defenses=prune(rate)', "cannot read 'rate' in the defense 'prune(rate)'", 'expected setting=value'),
  ('--defenses=prune(rate=1.5)', 'prune(rate) is 1.5', 'in [0, 1]', 'the nearest valid value is 1'),
  ('--defenses=gaussian()', 'gaussian needs the setting stddev by name', 'gaussian(stddev=…)'),
  # how much, and how
  ('--trials=0', 'trials is 0', 'in [1, 1000000]'),
  ('--trials=many', 'flag --trials=many'),
  ('--trials=501', "501 images are asked for, but the split 'test' of digits has 500"),
  ('--batch_size=0', 'batch_size is 0', 'in [1, 1000000]'),
  ('--trials=1 --batch_size=501', '501 images are asked for', '500'),
  ('--trials=251 --batch_size=2', '502 images are asked for', '500'),
  ('--restarts=-1', 'restarts is -1', 'in [1, 1000000]'),
  ('--controls=0', 'controls is 0', 'in [1, 1000000]'),
  ('--steps=-1', 'steps is -1', 'in [1, 1000000]'),
  ('--label=job', 'a label and a schema are of a table in a file', 'is none'),
  ('--labels=guessed', "unknown labels 'guessed'", 'auto', 'known'),
  ('--labels=yin --batch_size=11', "'yin' assumes no class twice", '11 samples of 10 classes'),
  ('--seed=-1', 'seed is -1', 'in [0, 4294967295]'),
  ('--seed=4294967296', 'seed is 4294967296', 'the nearest valid value is 4294967295'),
  ('--group_size=0', 'group_size is 0', 'in [1, inf]'),
  ('--progress=loud', "unknown progress mode 'loud'", 'auto, bar, lines, none'),
  ('--trails=3', "Unknown command line flag 'trails'", 'trials'),
  ('digits', "unexpected argument 'digits'", '--flag=value'),
  # the work directory
  ('--processes=2', '--process and --processes belong together'),
  ('--distributed=localhost:1', 'needs --process and --processes'),
  ('--distributed=localhost:1 --process=2 --processes=2', 'process is 2', 'in [0, 1]'),
  ('--workdir={here}/file', 'cannot use the work directory {here}/file: Not a directory'),
  ('--workdir={here}/file/below', 'cannot use the work directory {here}/file/below: Not a directory'),
  ('--workdir=/proc/gradleak', 'cannot use the work directory /proc/gradleak'),
  ('--workdir={here}/alike', '{here}/alike holds other files', 'choose an empty or new one'),
  ('--workdir={here}/damaged', '{here}/damaged/config.json is damaged', 'remove the folder to start anew'),
]  # fmt: skip
BASE = (  # --progress comes first: a case may set its own
  '--progress=none',
  '--dataset=digits',
  '--model=mlp',
  '--trials=2',
  '--steps=2',
  '--controls=2',
  '--defenses=none',
)

pytestmark = pytest.mark.usefixtures('fast_compilation')


@pytest.fixture(scope='module')
def here(tmp_path_factory):
  """A folder of files and folders that are not what a user takes them for."""
  import PIL.Image

  here = tmp_path_factory.mktemp('bad')
  for name, sides in (('alike', (8, 8)), ('differing', (8, 9)), ('unreadable', (8, 8))):
    for i, (label, side) in enumerate(zip('ab', sides, strict=True)):
      folder = here / name / 'test' / label
      folder.mkdir(parents=True)
      PIL.Image.fromarray(np.full((side, side), 99, np.uint8)).save(folder / f'{i}.png')
  (here / 'unreadable' / 'test' / 'a' / '0.png').write_bytes(b'no picture')
  (here / 'one' / 'test' / 'a').mkdir(parents=True)
  for i in range(2):
    PIL.Image.fromarray(np.full((8, 8), 99, np.uint8)).save(here / 'one' / 'test' / 'a' / f'{i}.png')
  (here / 'empty').mkdir()
  (here / 'file').write_text('precious')
  (here / 'damaged').mkdir()
  (here / 'damaged' / 'config.json').write_text('{"dataset": "dig')
  return here


def contents(folder):
  return {path: path.is_file() and path.read_bytes() for path in folder.rglob('*')}


def check(program, case, here, tmp_path):
  before = contents(here)
  flags, *words = (text.format(here=here, new=tmp_path / 'new') for text in case)
  done = program('audit', *BASE, '--compilation_cache=', f'--workdir={tmp_path}/new/er', *flags.split(' '))
  assert done.status == 2
  assert done.err.startswith('error: ') and done.err.endswith('\n') and done.err.count('\n') == 1, done.err
  assert 'Traceback' not in done.err and done.out == ''
  for word in words:
    assert word in done.err, done.err
  assert len(done.err) < 600  # to be read, not to be searched
  assert contents(here) == before
  assert not list(tmp_path.iterdir())


@pytest.mark.parametrize('case', CASES, ids=[case[0] for case in CASES])
def test_one_line_status_two_and_nothing_left_behind(here, tmp_path, case):
  check(programs.start, case, here, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize(
  'flags',
  [
    '--trails=3',
    *(
      pytest.param(flags, marks=pytest.mark.slow)
      for flags in ('--attacks=csdlg(tv=-1)', '--dataset=folder:{here}/unreadable')
    ),
  ],
)
def test_the_same_in_a_process_of_its_own(here, tmp_path, flags):
  check(programs.spawn, next(case for case in CASES if case[0] == flags), here, tmp_path)


def test_there_are_many_kinds():
  assert len({case[0] for case in CASES}) == len(CASES) >= 30
