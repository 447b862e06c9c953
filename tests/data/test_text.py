"""Texts: the notes, tokenisers, and files of a user's own."""

import hashlib
import json

import numpy as np
import pytest

import gradleak as gl
from gradleak.data import notes, text, tokenisers

LINES = ['The Knee hurts.', 'No fever, today', 'naïve café', 'knee pain']


def test_notes_are_the_same_everywhere():
  """A digest of the first ones, so that another version of Python, or a change of the grammar, is seen."""
  first = '\n'.join(notes.note('test', index)[0] for index in range(50))
  assert hashlib.sha256(first.encode()).hexdigest()[:16] == DIGEST
  assert notes.note('train', 3) != notes.note('test', 3)


DIGEST = '38e10f383daa9cbf'


def test_notes_differ_and_have_known_words_alone():
  found = {split: [notes.note(split, index)[0] for index in range(1001)] for split in notes.SPLITS}
  assert all(len(set(one)) == 1001 for one in found.values()) and not set(found['test']) & set(found['train'])
  known = set(notes.vocabulary())
  assert all(set(tokenisers.words_of(note)) <= known for one in found.values() for note in one)
  assert [notes.note('test', index)[1] for index in range(6)] == [0, 1, 2, 3, 4, 0]


@pytest.mark.parametrize('line', LINES)
def test_bytes_come_back(line):
  made = tokenisers.in_bytes()
  assert made.decode(made.encode(line)) == line and made.size == 258
  padded = made.batch([line], 40)[0]
  assert made.decode(padded) == line and (padded[len(line.encode()) :] == made.pad).all()
  assert made.decode(made.batch([line], 3)[0]) == line.encode()[:3].decode('utf-8', 'replace')


def test_words_are_counted_and_others_are_one_token():
  made = tokenisers.in_words(LINES, most=3)
  assert made.pieces[:3] == ('[pad]', '[mask]', '[unknown]') and made.size == 6
  assert 'knee' in made.pieces  # twice, all others once
  assert made.decode(made.encode('KNEE zzz')) == 'knee [unknown]'
  assert tokenisers.restored(json.loads(json.dumps(made.described()))) == made
  with pytest.raises(gl.UsageError, match='text 1 is'):
    made.batch(['knee', '  '], 4)
  with pytest.raises(gl.UsageError, match='no words'):
    tokenisers.in_words(['', ' '])


def test_words_keep_their_signs():
  """Accents of their own, as file systems and a capital İ have them, and vowel signs had cut words into pieces."""
  line = 'İstanbul, cafe\u0301s हिन्दी ❤\ufe0fgood a_b'
  held = tokenisers.words_of(line)
  assert held == ['i\u0307stanbul', ',', 'cafe\u0301s', 'हिन्दी', '❤', '\ufe0f', 'good', 'a_b']


def test_a_vocabulary_that_is_not_kept_shows_numbers():
  made = tokenisers.Tokeniser('file', tuple(f'w{i}' for i in range(9)), 0, 1)
  again = tokenisers.restored(made.described())
  assert again.size == 9 and again.shown(4) == '#4' and again.pad == 0


def test_tokens_of_bytes_are_shown_as_their_letters():
  """A page showed fÃ¼r in place of für, and invisible signs as they are."""
  pieces = ('<pad>', 'fÃ¼r', 'ĠGrÃ¶', 'Ãł', 'æ¼', 'Ċ', '<|mask|>', '▁für', 'Ġ')
  made = tokenisers.Tokeniser('file', pieces, 0, 6, source='{"decoder": {"type": "ByteLevel"}}')
  shown = [made.shown(token) for token in range(9)]
  assert shown == ['<pad>', 'für', ' Grö', 'à', '\\xe6\\xbc', '\\n', '<|mask|>', '▁für', ' ']
  other = tokenisers.Tokeniser(
    'file', ('[PAD]', 'Ġgħ', 'fÃ¼r', '[MASK]'), 0, 3, source='{"decoder": {"type": "WordPiece"}}'
  )
  assert [other.shown(token) for token in range(3)] == ['[PAD]', 'Ġgħ', 'fÃ¼r']
  held = tokenisers.in_words(['a\x1b \u200f b'])
  assert [held.shown(token) for token in range(3, held.size)] == ['\\x1b', 'a', 'b', '\\u200f']
  assert [tokenisers.in_bytes().shown(token) for token in (10, 65, 195, 256)] == ['\\n', 'A', '\\xc3', '[pad]']


def test_arrays_of_texts(tmp_path):
  data = gl.data.load('notes', limit=7, length=12)
  assert data.samples.shape == (7, 12) and data.samples.dtype == np.int32 and data.num_classes == 5
  assert data.known == {'vocabulary': data.settings['tokeniser']['size'], 'padding': 0, 'length': 12}
  assert 'are cut' in data.notes[0]
  assert len(gl.data.gallery('notes').samples) == 1001
  assert gl.data.load('notes', limit=2, tokeniser='bytes').samples.shape == (2, 128)
  with pytest.raises(gl.UsageError, match='2001 texts are asked for'):
    gl.data.load('notes', limit=2001)
  with pytest.raises(gl.UsageError, match='split of notes'):
    gl.data.load('notes', 'validation')
  with pytest.raises(gl.UsageError, match='no file'):
    gl.data.load('notes', tokeniser=str(tmp_path / 'none.json'))


@pytest.mark.parametrize(
  'name, content',
  [
    ('a.tsv', 'pos\tgood film\nneg\tbad film\npos\tgreat\nneg\tdull\npos\tfine\n'),
    ('a.tsv', 'sentence\tlabel\ngood film\tpos\nbad film\tneg\ngreat\tpos\ndull\tneg\nfine\tpos\n'),
    ('a.csv', 'id,label,text\n1,pos,"good film"\n2,neg,bad film\n3,pos,great\n4,neg,dull\n5,pos,fine\n'),
  ],
)
def test_files_with_labels(tmp_path, name, content):
  path = tmp_path / name
  path.write_text(content)
  train, test = (text.read(f'text:{path}', split) for split in ('train', 'test'))
  assert train.first(4) == ['good film', 'bad film', 'great', 'dull'] and test.first(1) == ['fine']
  assert train.class_names == ('neg', 'pos') and train.labels.tolist() == [1, 0, 1, 0] and test.labels.tolist() == [1]
  found = gl.data.load(f'text:{path}', 'test', length=3)
  assert (
    found.settings['tokeniser']['unknown'] == 2
    and found.samples[0, 0] == 2
    and 'not in the vocabulary' in found.notes[0]
  )


def test_files_of_lines_and_folders(tmp_path):
  (tmp_path / 'train.txt').write_text('\n'.join(LINES) + '\n\n')
  (tmp_path / 'dev.txt').write_text(LINES[0])
  assert text.read(f'text:{tmp_path}', 'train').size == 4
  assert gl.data.load(f'text:{tmp_path}', 'dev', length=5).samples.shape == (1, 5)
  with pytest.raises(gl.UsageError, match=r'split of text.*did you mean|valid: dev, train'):
    text.read(f'text:{tmp_path}', 'test')
  with pytest.raises(gl.UsageError, match='no file'):
    text.read('text:/nowhere/else', 'train')
  (tmp_path / 'wide.csv').write_text('a,b,c\n1,2,3\n')
  with pytest.raises(gl.UsageError, match='3 columns and none is called'):
    text.read(f'text:{tmp_path / "wide.csv"}', 'train')
  (tmp_path / 'short.tsv').write_text('text\tlabel\nonly\n')
  with pytest.raises(gl.UsageError, match='row 2 of'):
    text.read(f'text:{tmp_path / "short.tsv"}', 'train')


NOTES = [f'note {number} on a heart' for number in range(10)]


@pytest.mark.parametrize(
  ('name', 'head', 'line', 'said'),
  [
    ('a.csv', 'text,label', 'dear all, {text},{label}', 'row 2 of .* has 3 values, expected 2'),
    ('a.csv', 'label,text', '{label},dear all, {text}', 'row 2 of .* has 3 values, expected 2'),
    ('a.csv', 'text,label', '"{text},{label}', 'cannot read'),
    ('a.csv', 'body,kind', '{text},{label}', '11 different labels in 11 rows'),
    ('a.csv', 'kind,body', '{label},{text}', 'begins with kind, body, a label that no other row has'),
    ('a.csv', 'text,label', '{text},{gap}', 'has texts without a label'),
    ('a.rtf', 'text,label', '{text},{label}', "the suffix '.rtf'"),
    ('a.csv', 'text,label,Text', '{text},{label},no', "several columns 'text'"),
    ('a.csv', 'label,text,label', '{label},{text},no', "several columns 'label'"),
    ('a.csv', 'Text,Sentiment', '{text},{label}', 'no column label .*: give one of Sentiment such a name, or keep'),
    ('a.csv', 'comment', '{text}', "begins with 'comment', which may be a heading or a text"),
    ('a.tsv', 'comment', '{text}', 'or name the file .txt'),
    ('a.csv', 'text, short;label', '{text}, ward;{label}', "may be separated by ',' or ';': put values"),
  ],
)
def test_files_that_are_not_understood_are_refused(tmp_path, name, head, line, said):
  lines = [line.format(text=one, label=i % 2, gap='' if i == 3 else 1) for i, one in enumerate(NOTES)]
  (tmp_path / name).write_text('\n'.join([head, *lines]))
  with pytest.raises(gl.UsageError, match=said):
    text.read(f'text:{tmp_path / name}', 'train')


def test_labels_that_are_numbers_are_in_their_order_and_spelt_alike(tmp_path):
  path = tmp_path / 'a.csv'
  path.write_text('\n'.join(['label,text', *(f'{i % 14}{".0" * (i % 3 == 0)},word{i} here' for i in range(84))]))
  found = text.read(f'text:{path}', 'train')
  assert found.class_names == tuple(map(str, range(14))) and found.labels[:4].tolist() == [0, 1, 2, 3]
  path.write_text('label,text\nnan,a b\n1,c d\n0,e f\n1,g h\n0,x\n')
  with pytest.raises(gl.UsageError, match="without a label, 'nan' in place of one"):
    text.read(f'text:{path}', 'train')
  path.write_text('label,text\n1,a b\n1,c d\ninf,e f\n0,g h\n0,x\n')
  with pytest.raises(gl.UsageError, match="row 2 has 'inf' as its label in"):
    text.read(f'text:{path}', 'train')


def test_files_beside_the_splits_move_no_label(tmp_path):
  """A README made a class '', and of test.csv and test.tsv one was not read."""
  for split in ('train', 'test'):
    (tmp_path / f'{split}.csv').write_text('label,text\nneg,bad film\npos,good film\n')
  (tmp_path / 'README.txt').write_text('Films.\n')
  found = text.read(f'text:{tmp_path}', 'test')
  assert found.class_names == ('neg', 'pos') and found.labels.tolist() == [0, 1]
  with pytest.raises(gl.UsageError, match=r"'README' of .* has no labels, and other files there have"):
    text.read(f'text:{tmp_path}', 'README')
  (tmp_path / 'train.csv').unlink()
  (tmp_path / 'train.txt').write_text('dull film\n')  # a vocabulary needs no labels
  assert 'dull' in gl.data.load(f'text:{tmp_path}', 'test').settings['tokeniser']['pieces']
  (tmp_path / 'test.tsv').write_text('label\ttext\nneg\tdull\n')
  with pytest.raises(gl.UsageError, match=r'has test\.csv and test\.tsv: keep one of them'):
    text.read(f'text:{tmp_path}', 'test')


@pytest.mark.parametrize('sign', [',', ';', '|'])
def test_marks_of_byte_order_and_other_signs(tmp_path, sign):
  """With a mark of byte order the labels were taken for the texts."""
  path = tmp_path / 'a.csv'
  path.write_text('\n'.join([f'text{sign}label', *(f'{one}{sign}{i % 2}' for i, one in enumerate(NOTES))]), 'utf-8-sig')
  found = text.read(f'text:{path}', 'train')
  assert found.first(8) == [*NOTES[:4], *NOTES[5:9]] and found.class_names == ('0', '1')
  path = tmp_path / 'a.TXT'
  path.write_text('one\u2028two\n\nthree\n', 'utf-8-sig')
  assert text.read(f'text:{path}', 'train').first(2) == ['one\u2028two', 'three']


def test_a_file_that_changes_is_read_again(tmp_path):
  path = tmp_path / 'a.txt'
  for words in (['heart', 'lung'], ['heart failure', 'lung failure', 'liver']):
    path.write_text('\n'.join(words * 5))
    found = gl.data.load(f'text:{path}', 'train')
    assert len(found.samples) == 4 * len(words)
    assert set(found.settings['tokeniser']['pieces'][3:]) == {each for one in words for each in one.split()}


@pytest.mark.parametrize('name', ['[PAD]', '<pad>', '<PAD>', '<|pad|>', '<|padding|>', '<｜▁pad▁｜>'])
def test_a_token_for_padding_is_known_by_its_usual_spellings(name):
  """Of some of them another token was added behind the vocabulary."""
  assert tokenisers.special('pad', {'a': 0, '<padded>': 1, 'pad': 2, name: 3}, 'it') == 3
  assert tokenisers.special('mask', {'a': 0, name: 3}, 'it') is None
  with pytest.raises(gl.UsageError, match=r'it has the tokens .*\[paD\], expected one of them'):
    tokenisers.special('pad', {name: 3, '[paD]': 4}, 'it')


def test_what_a_file_of_a_tokeniser_says_of_padding_goes_first():
  library = pytest.importorskip('tokenizers')
  made = library.Tokenizer(library.models.WordLevel({'a': 0, '[pad]': 1, '</s>': 2, '?': 3}, unk_token='?'))
  found = tokenisers.from_json(made.to_str(), 'it')
  assert (found.pad, found.mask, found.unknown, found.size, found.added) == (1, 4, 3, 5, ('[mask]',))
  told = text.remarks(found, ['a'], found.batch(['a'], 2), 2)
  assert told == ('The tokeniser lacks [mask]: added behind its own, they make 5 tokens.',)
  made.enable_padding(pad_id=2, pad_token='</s>')
  assert tokenisers.from_json(made.to_str(), 'it').pad == 2


def test_what_a_tokeniser_pads_and_cuts_is_not_its_own(tmp_path):
  library = pytest.importorskip('tokenizers')
  made = library.Tokenizer.from_str(tokenisers.trained(NOTES, 400).source)
  plain = made.encode(NOTES[0]).ids
  made.enable_padding(length=40, pad_id=0, pad_token='[pad]')
  made.enable_truncation(3)
  made.save(str(tmp_path / 'tokenizer.json'))
  assert tokenisers.from_file(tmp_path / 'tokenizer.json').encode(NOTES[0]) == plain


def test_a_tokeniser_that_is_trained(tmp_path):
  pytest.importorskip('tokenizers')
  found = gl.data.load('notes', limit=4, tokeniser='bpe:400', length=64)
  made = tokenisers.restored(found.settings['tokeniser'])
  assert made.size == 400 and made.decode(found.samples[0]) == notes.note('test', 0)[0]
  path = tmp_path / 'tokenizer.json'
  path.write_text(made.source)
  again = tokenisers.from_file(path)
  assert again == made and again.encode('knee pain') == made.encode('knee pain')
  path.write_text('{}')
  with pytest.raises(gl.UsageError, match='no tokeniser'):
    tokenisers.from_file(path)
