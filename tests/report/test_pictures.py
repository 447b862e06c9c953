import base64
import io
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from gradleak.report import data_uri, figures, grid, pictures, render
from gradleak.summary import cases


def decode(uri):
  head, data = uri.split(',')
  assert head == 'data:image/png;base64'
  return np.asarray(Image.open(io.BytesIO(base64.b64decode(data))))


def test_data_uri_keeps_every_pixel_and_clips():
  grey = np.array([[[0.0], [0.2]], [[-3.0], [1.7]]])
  np.testing.assert_array_equal(decode(data_uri(grey)), [[0, 51], [0, 255]])
  colour = np.random.default_rng(0).uniform(size=(5, 4, 3))
  np.testing.assert_array_equal(decode(data_uri(colour)), np.round(colour * 255))


def test_a_canvas_is_in_inches_from_its_upper_left_corner():
  with figures.canvas(2, 1) as (axes, png):
    axes.fill_between([0, 0.5], 0, 0.25, color='black', linewidth=0)
    dark = np.asarray(Image.open(io.BytesIO(png())).convert('L')) < 128
  assert dark.shape == (figures.DPI, 2 * figures.DPI)
  down, across = figures.DPI // 4, figures.DPI // 2
  assert dark[: down - 2, : across - 2].all() and not dark[down + 2 :].any() and not dark[:, across + 2 :].any()


def test_a_copy_at_another_scale_is_drawn_as_a_picture():
  """An exact reconstruction may have any scale and offset: clipped, nothing of it would be seen."""
  face = np.random.default_rng(0).beta(2, 2, size=(20, 20, 1))
  scaled = decode(data_uri(40 * face - 9))
  assert np.corrcoef(scaled.ravel(), face.ravel())[0, 1] > 0.98
  within = np.clip(1.3 * face - 0.15, -0.4, 1.4)  # an overshoot is clipped
  np.testing.assert_array_equal(decode(data_uri(within)), np.round(255 * np.clip(within, 0, 1))[..., 0])


def test_pixels_that_are_no_numbers_become_a_checkerboard():
  image = np.full((2, 3, 1), 0.5)
  image[0, 0], image[0, 1] = np.nan, np.inf
  pixels = decode(data_uri(image))
  assert pixels[0, 0] != pixels[0, 1]
  assert min(pixels[0, 0], pixels[0, 1]) > 128
  assert (pixels[0, 2], *pixels[1]) == (128,) * 4


def test_large_images_are_reduced():
  assert decode(data_uri(np.zeros((448, 224, 3)))).shape == (192, 96, 3)


@pytest.mark.parametrize(
  ('trials', 'batch', 'places'),
  [
    (12, 1, [(t, 0) for t in range(8)]),
    (1, 1, [(0, 0)]),
    (4, 3, [(t, b) for t in range(2) for b in range(3)]),
    (2, 11, [(0, b) for b in range(8)]),
  ],
)
def test_the_first_trials_and_images_are_shown_at_most_eight(build, trials, batch, places):
  result = build(trials, batch)
  truth, shown = pictures.select(result)
  assert [(p.trial, p.index) for p in truth] == places
  for pair, row in shown.items():
    for picture, (t, b) in zip(row, places, strict=True):
      np.testing.assert_array_equal(picture.pixels, result.reconstructions[pair][t, b])
      assert (picture.row['trial'], picture.row['attack'], picture.row['defense']) == (t, *pair)


def test_each_picture_has_its_own_psnr(build):
  result = build(2, 3)
  _, shown = pictures.select(result)
  for pair, row in shown.items():
    for picture in row:
      error = np.clip(picture.pixels, 0, 1) - result.truth[picture.trial, picture.index]
      if np.isnan(error).any():
        assert picture.score is None
      else:
        assert picture.score == pytest.approx(-10 * np.log10(np.mean(error**2)), abs=1e-3), pair


@pytest.mark.long
def test_pictures_of_chosen_trials_are_those_of_their_numbers(build):
  """As of an audit with `only`: each case has some of the trials, and a gap for the others."""
  whole = build(6, defenses=('none', 'prune(rate=0.9)'))
  chosen = {'none': [1, 3], 'prune(rate=0.9)': [2, 3, 5]}
  result = replace(
    whole,
    rows=[row for row in whole.rows if row['trial'] in chosen[row['defense']]],
    reconstructions={case: images[chosen[case[1]]] for case, images in whole.reconstructions.items()},
    curves={case: (steps, of[chosen[case[1]]]) for case, (steps, of) in whole.curves.items()},
  )
  truth, shown = pictures.select(result)
  assert [picture.trial for picture in truth] == [3, 1, 2, 5]  # what all cases have is first
  for picture in truth:
    np.testing.assert_array_equal(picture.pixels, whole.truth[picture.trial, 0])
  for case, row in shown.items():
    assert [picture.trial for picture in row if picture.pixels is not None] == [
      t for t in (3, 1, 2, 5) if t in chosen[case[1]]
    ]
    for picture in (one for one in row if one.pixels is not None):
      np.testing.assert_array_equal(picture.pixels, whole.reconstructions[case][picture.trial, 0])
      assert picture.row['trial'] == picture.trial and cases.case(picture.row) == case
  assert render(result).count('>–<') >= 6 and grid(result)  # six gaps


def test_of_the_adaptive_attackers_the_strongest_is_shown_after_the_non_adaptive_one(both, knowing):
  _, shown = pictures.select(both)
  dlg, csdlg = both.config['attacks']
  assert [case[1:] for case in shown if case[0] == csdlg] == [
    ('none',), ('prune(rate=0.9)',), ('prune(rate=0.9)', 'masked+prior'), ('laplace(scale=0.1)',),
    ('laplace(scale=0.1)', 'prior'), ('prune(rate=0.99)+gaussian(stddev=0.01)',),
    ('prune(rate=0.99)+gaussian(stddev=0.01)', 'masked'),
  ]  # fmt: skip
  assert (dlg, 'prune(rate=0.9)', 'masked+prior') in shown
  for case, row in shown.items():
    for picture in row:
      np.testing.assert_array_equal(picture.pixels, both.reconstructions[case][picture.trial, picture.index])
      assert cases.case(picture.row) == case
  adaptive = {case[:2] for case in pictures.select(knowing)[1] if len(case) == 3}
  assert adaptive and not adaptive & set(knowing.reconstructions)


def bars(png):
  """The vertical bars at the left edge, (top, bottom) in pixels."""
  column = np.asarray(Image.open(io.BytesIO(png)).convert('L')).astype(int)[:, 16]  # 0.1 inch
  dark = np.flatnonzero(np.diff(np.concatenate([[0], column < 200, [0]])))
  return [(top, bottom) for top, bottom in dark.reshape(-1, 2) if bottom - top > 100]


@pytest.mark.slow
def test_grid_joins_the_pair_of_a_defense(result, both, knowing):
  assert bars(grid(result)) == []
  assert bars(grid(knowing)) == []
  joined = bars(grid(both))
  assert len(joined) == 2 * 3
  for top, bottom in joined:
    assert bottom - top == pytest.approx((2 * 0.95 + 0.22 + 0.1) * 160, abs=4)  # from the first picture to the second
  assert np.diff([top for top, _ in joined]).min() > joined[0][1] - joined[0][0] + 16
  assert grid(both) == grid(both)


def test_labels_name_the_attacker_of_each_row(both):
  _, shown = pictures.select(both)

  def words(*case, among=shown):
    return [line for line, _ in pictures._label(*case, shown=among)]

  dlg = both.config['attacks'][0]
  assert words(dlg, 'none') == [dlg, 'none']
  assert words(dlg, 'prune(rate=0.9)') == [dlg, 'prune(rate=0.9)', 'non-adaptive']
  assert words(dlg, 'prune(rate=0.9)', 'masked+prior') == ['adaptive: masked+prior']
  alone = [(dlg, 'prune(rate=0.9)', 'masked+prior')]
  assert words(*alone[0], among=alone) == [dlg, 'prune(rate=0.9)', 'adaptive: masked+prior']


def test_trials_are_found_by_their_number_where_the_first_were_not_attacked(build):
  result = build(2)
  rows = [row | {'trial': row['trial'] + 100} for row in result.rows]
  result = replace(result, rows=rows, truth=np.concatenate([np.zeros((100, *result.truth.shape[1:])), result.truth]))
  truth, _ = pictures.select(result)
  assert [picture.trial for picture in truth] == [100, 101]
  np.testing.assert_array_equal(truth[1].pixels, result.truth[101, 0])


def test_grid_shows_crisp_pixels(build):
  result = build(1, diverged=())
  board = np.indices((8, 8)).sum(0).reshape(1, 1, 8, 8, 1) % 2
  result = replace(
    result,
    truth=np.where(board, 0.2, 0.6),
    reconstructions={pair: np.where(board, 0.3, 0.7) for pair in result.reconstructions},
  )
  image = np.asarray(Image.open(io.BytesIO(grid(result))).convert('L'))
  picture = (0.95 * 160) ** 2  # inches at 160 dots
  for level, count in ((51, 1), (153, 1), (76, 8), (178, 8)):  # one truth, 2 attacks × 4 defenses
    assert (image == level).sum() == pytest.approx(count * picture / 2, rel=0.08), level


@pytest.mark.slow
def test_grid_grows_with_rows_and_columns_and_is_deterministic(build, result):
  results = result, build(8), build(4, attacks=result.config['attacks'][:1]), build(7)
  sizes = [Image.open(io.BytesIO(grid(each))).size for each in results]
  assert sizes[1][0] - sizes[0][0] == pytest.approx(4 * 1.05 * 160, abs=2)
  assert sizes[1][1] == sizes[3][1]
  assert sizes[0][1] - sizes[1][1] == pytest.approx(0.17 * 160, abs=2)  # the legend of a narrow one has a line more
  assert sizes[0][1] > 1.7 * sizes[2][1]
  assert grid(result) == grid(result)


@pytest.mark.long
@pytest.mark.parametrize('trials', [1, 2, 4])
def test_nothing_is_cut_off_at_the_right_of_a_narrow_grid(build, trials):
  image = np.asarray(Image.open(io.BytesIO(grid(build(trials)))).convert('L'))
  assert (image[-80:] < 250).any() and (image[:, -4:] > 250).all()


def test_grid_takes_names_literally(result):
  name = r'$x$<b>\frac'
  result = replace(
    result,
    rows=[row | {'defense': name} for row in result.rows if row['defense'] == 'none'],
    reconstructions={(attack, name): images for (attack, _), images in result.reconstructions.items()},
  )
  assert Image.open(io.BytesIO(grid(result))).format == 'PNG'


@pytest.mark.parametrize('scale', ['log', 'symlog'])
def test_powers_of_ten_are_written_as_numbers(scale):
  """Formulas are not set, so that a defense may be called what it likes: their source would stand at the axis."""
  with figures.figure(3, 2) as (figure, png):
    axes = figure.add_subplot()
    axes.plot([0.01, 1, 100], [0, 1, 2])
    axes.set_xscale(scale)
    png()
    labels = [label.get_text() for label in axes.get_xticklabels()]
  assert '100' in labels and not any('$' in label for label in labels)
