import numpy as np
import PIL.Image
import pytest

from gradleak import data
from gradleak.core import errors

RNG = np.random.default_rng(0)
GREY = RNG.integers(0, 256, (6, 5), dtype=np.uint8)
COLOUR = RNG.integers(0, 256, (6, 5, 3), dtype=np.uint8)


def write(root, name, image, **settings):
  """Writes an array or a PIL image to root/name and returns the path."""
  path = root / name
  path.parent.mkdir(parents=True, exist_ok=True)
  (image if isinstance(image, PIL.Image.Image) else PIL.Image.fromarray(image)).save(path, **settings)
  return path


def load(root, split='test', **settings):
  return data.load(f'folder:{root}', split, **settings)


def test_images_are_ordered_by_file_name_then_label(tmp_path):
  for shade, name in enumerate(['b/2.png', 'a/2.png', 'b/1.PNG', 'a/3.png', 'c/1.png']):
    write(tmp_path, f'test/{name}', np.full((2, 2), shade, np.uint8))
  dataset = load(tmp_path)
  assert dataset.class_names == ('a', 'b', 'c')
  assert dataset.targets.tolist() == [1, 2, 0, 1, 0]
  np.testing.assert_allclose(dataset.samples[:, 0, 0, 0] * 255, [2, 4, 1, 0, 3], rtol=1e-6)


def test_splits_agree_on_the_classes(tmp_path):
  write(tmp_path, 'train/b/1.png', GREY)
  write(tmp_path, 'train/a/1.png', GREY)
  write(tmp_path, 'test/b/1.png', GREY)
  test = load(tmp_path)
  assert test.class_names == load(tmp_path, 'train').class_names == ('a', 'b')
  assert test.targets.tolist() == [1]
  assert test.name == f'folder:{tmp_path}'


@pytest.mark.parametrize('pixels', [GREY, COLOUR], ids=['grey', 'rgb'])
def test_png_pixels_are_kept_exactly(tmp_path, pixels):
  write(tmp_path, 'test/a/1.png', pixels)
  loaded = load(tmp_path).samples
  assert loaded.dtype == np.float32
  np.testing.assert_array_equal(np.rint(loaded[0] * 255), pixels.reshape(6, 5, -1))


def test_jpeg_is_read(tmp_path):
  smooth = np.add.outer(np.arange(16), np.arange(16)).astype(np.uint8) * np.uint8(8)
  write(tmp_path, 'test/a/1.jpg', smooth, quality=95)
  write(tmp_path, 'test/a/2.JPEG', smooth, quality=95)
  loaded = load(tmp_path).samples
  assert loaded.shape == (2, 16, 16, 1)
  assert np.abs(loaded[..., 0] * 255 - smooth).max() < 4


def test_sixteen_bit_grey_keeps_its_depth(tmp_path):
  deep = np.array([[0, 1, 256], [257, 40000, 65535]], np.uint16)
  write(tmp_path, 'test/a/1.png', deep)
  np.testing.assert_allclose(load(tmp_path).samples[0, ..., 0], deep / 65535, rtol=1e-6)


def test_palette_becomes_rgb(tmp_path):
  flag = np.zeros((4, 4, 3), np.uint8)
  flag[:2], flag[2:] = (255, 0, 0), (0, 0, 255)
  write(tmp_path, 'test/a/1.png', PIL.Image.fromarray(flag).convert('P', palette=PIL.Image.Palette.ADAPTIVE))
  np.testing.assert_array_equal(load(tmp_path).samples[0] * 255, flag)


def test_transparent_pixels_are_put_on_white(tmp_path):
  pixels = np.zeros((1, 3, 4), np.uint8)
  pixels[..., 0], pixels[..., 3] = 255, [0, 255, 51]  # red: invisible, solid, a fifth
  write(tmp_path, 'test/a/1.png', pixels)
  loaded = load(tmp_path).samples[0, 0] * 255
  np.testing.assert_allclose(loaded, [[255, 255, 255], [255, 0, 0], [255, 204, 204]], atol=1e-3)


def test_grey_with_transparency_stays_grey(tmp_path):
  write(tmp_path, 'test/a/1.png', PIL.Image.new('LA', (2, 2), (10, 255)))
  np.testing.assert_allclose(load(tmp_path).samples * 255, np.full((1, 2, 2, 1), 10), rtol=1e-6)


def test_one_bit_and_cmyk_convert(tmp_path):
  write(tmp_path, 'test/a/1.png', PIL.Image.new('1', (2, 2), 1))
  np.testing.assert_array_equal(load(tmp_path).samples, np.ones((1, 2, 2, 1)))
  write(tmp_path, 'train/a/1.jpg', PIL.Image.new('CMYK', (8, 8), (0, 255, 255, 0)))
  red = load(tmp_path, 'train').samples[0, 4, 4]
  assert red[0] > 0.8 > 0.3 > max(red[1:])


def test_photographs_are_turned_upright(tmp_path):
  exif = PIL.Image.Exif()
  exif[0x0112] = 6  # the camera was rotated by 90 degrees
  write(tmp_path, 'test/a/1.png', GREY, exif=exif)
  np.testing.assert_array_equal(np.rint(load(tmp_path).samples[0, ..., 0] * 255), np.rot90(GREY, -1))


def test_hidden_and_other_files_are_ignored(tmp_path):
  write(tmp_path, 'test/a/1.png', GREY)
  (tmp_path / 'test/a/._1.png').write_bytes(b'resource fork')
  (tmp_path / 'test/a/notes.txt').write_text('notes')
  (tmp_path / 'test/.cache/x').mkdir(parents=True)
  (tmp_path / '.git/a').mkdir(parents=True)
  dataset = load(tmp_path)
  assert dataset.class_names == ('a',)
  assert len(dataset.samples) == 1


def test_what_is_left_out_is_said(tmp_path):
  for name in ('a', 'b'):
    write(tmp_path, f'test/{name}/1.png', GREY)
  assert load(tmp_path).notes == ()
  for name in ('a/1.bmp', 'a/2.bmp', 'b/scan.tif', 'b/README', 'b/Thumbs.db', '__MACOSX/a/1.png', 'a/more/2.png'):
    write(tmp_path, 'test/b/spare.png', GREY)
    (tmp_path / 'test' / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / 'test/b/spare.png').rename(tmp_path / 'test' / name)
  write(tmp_path, 'test/loose.png', GREY)
  (tmp_path / 'train/new folder').mkdir(parents=True)
  (tmp_path / '__MACOSX/test').mkdir(parents=True)
  dataset = load(tmp_path)
  assert dataset.class_names == ('a', 'b', 'new folder') and len(dataset.samples) == 2
  empty, others, deep, loose = dataset.notes
  assert empty.startswith('1 of the label folders hold no image in any split, and count as classes: new folder.')
  assert others.endswith('are left out, .png, .jpg, .jpeg are read: 2 with .bmp, 1 with .tif, 1 with no suffix.')
  assert deep == 'Images in folders below those of the labels are left out: a/more.'
  assert loose.endswith('stand in no label folder and are left out: loose.png.')
  with pytest.raises(errors.UsageError, match=r"unknown split of folder:.* '__MACOSX' .valid: test, train"):
    load(tmp_path, '__MACOSX')


@pytest.mark.parametrize('bits', [10, 12, 14])
def test_grey_of_fewer_bits_than_its_file_is_said_and_can_be_scaled(bits, tmp_path):
  largest = 2**bits - 1
  write(tmp_path, 'test/a/1.png', np.array([[0, largest], [largest // 2, 1]], np.uint16))
  (note,) = load(tmp_path).notes
  assert note.startswith(f'The images use [0, {largest / 65535:.3g}] of [0, 1] alone')
  scaled = load(tmp_path, largest_pixel=largest)
  assert scaled.notes == () and scaled.samples.max() == 1
  with pytest.raises(errors.UsageError, match=f'has a pixel of {largest}, above largest_pixel=500'):
    load(tmp_path, largest_pixel=500)


def test_only_the_first_images_are_decoded(tmp_path):
  write(tmp_path, 'test/a/1.png', GREY)
  broken = tmp_path / 'test/a/2.png'
  broken.write_bytes(b'no image')
  assert load(tmp_path, limit=1).samples.shape == (1, 6, 5, 1)
  with pytest.raises(errors.UsageError, match=f'cannot read the image {broken}'):
    load(tmp_path)


def test_truncated_image_is_named(tmp_path):
  path = write(tmp_path, 'test/a/1.png', RNG.integers(0, 256, (64, 64, 3), dtype=np.uint8))
  path.write_bytes(path.read_bytes()[:2000])
  with pytest.raises(errors.UsageError, match=f'cannot read the image {path}'):
    load(tmp_path)


def test_differing_sizes_need_image_size(tmp_path):
  first = write(tmp_path, 'test/a/1.png', GREY)
  second = write(tmp_path, 'test/a/2.png', GREY[:4])
  with pytest.raises(errors.UsageError, match=f'{first} has 6×5 pixels, {second} 4×5: pass image_size .--image_size'):
    load(tmp_path)
  assert load(tmp_path, image_size=4).samples.shape == (2, 4, 4, 1)


def test_differing_channels_need_channels(tmp_path):
  first = write(tmp_path, 'test/a/1.png', GREY)
  second = write(tmp_path, 'test/a/2.png', COLOUR)
  with pytest.raises(errors.UsageError, match=f'{first} has 1 channels, {second} 3: pass channels .--channels'):
    load(tmp_path)
  assert load(tmp_path, channels=3).samples.shape == (2, 6, 5, 3)
  assert load(tmp_path, channels=1).samples.shape == (2, 6, 5, 1)


def test_missing_folders_and_images(tmp_path):
  with pytest.raises(errors.UsageError, match="no folder '/no/such/place'; folder:PATH expects images at"):
    data.load('folder:/no/such/place')
  with pytest.raises(errors.UsageError, match="no folder ''"):
    data.load('folder:')
  with pytest.raises(errors.UsageError, match=r"unknown split of folder:.* 'test' .valid: .it has none"):
    load(tmp_path)
  (tmp_path / 'train/a').mkdir(parents=True)
  (tmp_path / 'validation/a').mkdir(parents=True)
  with pytest.raises(errors.UsageError, match=r"'trian'; did you mean 'train'. .valid: train, validation"):
    load(tmp_path, 'trian')
  with pytest.raises(errors.UsageError, match=f'no images in {tmp_path}/train, expected {tmp_path}/train/label/'):
    load(tmp_path, 'train')
  with pytest.raises(errors.UsageError, match='unknown split'):
    load(tmp_path, '../' + tmp_path.name + '/train')


def test_real_folders(test_data):
  name = f'folder:{test_data}/folders/faces32'
  test, train = data.load(name), data.load(name, 'train')
  assert test.samples.shape == (500, 32, 32, 3)
  assert train.samples.shape == (2500, 32, 32, 3)
  assert test.class_names == train.class_names == ('female', 'male')
  assert set(test.targets[:20]) == {0, 1}
  small = data.load(f'folder:{test_data}/folders/imagenet224', image_size=32)
  assert small.samples.shape == (128, 32, 32, 3)
