"""Images: float [N, H, W, C] with pixels in [0, 1]."""

import functools
import io
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from gradleak import data, metrics
from gradleak.core import errors
from gradleak.core.reuse import reusable
from gradleak.core.trees import Tree
from gradleak.data.images import span
from gradleak.engine import compiler
from gradleak.modalities.base import NUMBER, Column, Modality, Shown, modality
from gradleak.models import Model

_DIVERGED = 'the trial diverged'
_UNDEFINED = 'the trial diverged, or no pair varies in both images'
_NO_LPIPS = 'its weights were not given, or the trial diverged'
_POSITIVE = (0, math.inf)
_PAIRS = 16  # that a network compares at once
_BEYOND = 0.05  # pixels that explain an update, from which on they are none
_GREY = 0.5
SIDES = (8, 16, 28, 32, 48, 64, 96, 128, 224)  # of squares that are tried where no shape is given

COLUMNS = (
  Column('psnr', NUMBER, 'dB', 'PSNR of images clipped to [0, 1], peak 1; mean over the batch.', _DIVERGED, _POSITIVE),
  Column('ssim', NUMBER, '[-1, 1]', 'SSIM, 11×11 Gaussian window; mean over the batch.', _DIVERGED, (-1, 1)),
  Column('mse', NUMBER, '', 'Mean squared error, images clipped to [0, 1]; mean over the batch.', _DIVERGED, (0, 1)),
  Column('pearson', NUMBER, '[-1, 1]', 'Pearson correlation; mean over the pairs that have one.', _UNDEFINED, (-1, 1)),
  Column('ms_ssim', NUMBER, '[0, 1]', 'MS-SSIM on up to five scales, as many as fit; a mean.', _DIVERGED, (0, 1)),
  Column('lpips', NUMBER, '', 'LPIPS, 0 for equal images; mean over the batch.', _NO_LPIPS, _POSITIVE),
  Column('fmse', NUMBER, '', 'Mean squared error of the logits of the model that was sent.', _DIVERGED, _POSITIVE),
  Column('mse_unclipped', NUMBER, '', 'Mean squared error of images that are not clipped.', _DIVERGED),
  Column('psnr_unclipped', NUMBER, 'dB', 'PSNR of images that are not clipped.', _DIVERGED),
  Column('revealed_psnr', NUMBER, 'dB', 'Mean PSNR of the images that are fully revealed.', 'no image is'),
)


def describe(images: np.ndarray) -> dict[str, list[float]]:
  """Returns {'pixel_range': [least, largest]} of images that use a small part of [0, 1]."""
  small = span(images)
  return {} if small is None else {'pixel_range': list(small)}


def shaped(shape: Sequence[int]) -> str:
  """Returns (H, W, C) in words, such as '28 × 28 pixels, grey'."""
  height, width, channels = shape
  colours = {1: 'grey', 3: 'colour'}.get(channels, f'{channels} channels')
  return f'{height} × {width} pixels, {colours}'


def jpeg(images: np.ndarray, quality: int = 75) -> np.ndarray:
  """Returns grey or colour images [N, H, W, C] in [0, 1] after JPEG of a quality; raises `UsageError` for others."""
  from PIL import Image

  if images.shape[-1] not in (1, 3):
    raise errors.UsageError(f'a JPEG has 1 or 3 channels, and these images have {images.shape[-1]}')

  def coded(image: np.ndarray) -> np.ndarray:
    with io.BytesIO() as file:
      Image.fromarray(_eight_bits(image)).save(file, 'JPEG', quality=quality)
      return np.asarray(Image.open(file), np.float32).reshape(image.shape) / 255

  return np.stack([coded(image) for image in images])


def _eight_bits(image: np.ndarray) -> np.ndarray:
  levels = np.rint(image * 255).astype(np.uint8)
  return levels[..., 0] if image.shape[-1] == 1 else levels


def by_networks(model: Model, variables: Tree, weights: metrics.LpipsWeights | None) -> Callable:
  """Returns (images, truth) -> 'fmse' and 'lpips', means over pairs; the latter None without its weights.

  Args:
    model, variables: of the network whose logits `metrics.fmse` compares.
    weights: of LPIPS, or None.
  """
  fmse = functools.partial(_fmse(model), variables)
  return lambda images, truth: {
    'fmse': _mean(fmse, images, truth),
    'lpips': None if weights is None else _mean(functools.partial(_lpips, weights), images, truth),
  }


def _mean(metric: Callable[[np.ndarray, np.ndarray], jax.Array], images: np.ndarray, truth: np.ndarray) -> float:
  """Returns the mean of a metric over pairs of images, of which a network is given a few at a time."""
  chunks = [slice(start, start + _PAIRS) for start in range(0, len(truth), _PAIRS)]
  return float(np.mean(np.concatenate([metric(images[chunk], truth[chunk]) for chunk in chunks]), dtype=np.float64))


@reusable(8)
def _fmse(model: Model) -> Callable[[Tree, jax.Array, jax.Array], jax.Array]:
  def fmse(variables: Tree, images: jax.Array, truth: jax.Array) -> jax.Array:
    def logits(pixels: jax.Array) -> jax.Array:
      return model.apply(variables, pixels.astype(truth.dtype), False, None)[0]

    return metrics.fmse(images, truth, logits)

  # Run on few images once per row: compiling it well would take longer than running it.
  return jax.jit(fmse, compiler_options=compiler.known(xla_backend_optimization_level=0))


@jax.jit
def _lpips(weights: metrics.LpipsWeights, images: jax.Array, truth: jax.Array) -> jax.Array:
  return metrics.lpips(images, truth, weights)


def stored(images: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
  """Returns images of a file with channels last, bytes as floats in [0, 1].

  Args:
    images: [N, H, W, C], or [N, C, H, W] as PyTorch has them.
    shape: (H, W, C).

  Raises:
    UsageError: for bytes that are 0 and 1 alone: a mask, or pixels in [0, 1] that were rounded.
  """
  height, width, channels = shape
  if images.dtype == np.uint8 and images.size and images.max() == 1 and images.min() == 0:
    raise errors.UsageError('the images are bytes of 0 and 1 alone, and a byte of 255 is white: save floats in [0, 1]')
  if images.shape[1:] == (channels, height, width) and images.shape[1:] != shape:
    images = images.transpose(0, 2, 3, 1)
  return images.astype(np.float32) / 255 if images.dtype == np.uint8 else images


def odd(images: np.ndarray) -> str:
  """Returns in words how far pixels are beyond [0, 1]; '' where none is."""
  low, high = float(images.min()), float(images.max())
  return f'pixels from {low:.2g} to {high:.2g} where 0 to 1 are known' if min(low, 1 - high) < -_BEYOND else ''


def correlations(images: np.ndarray, others: np.ndarray) -> np.ndarray:
  """Returns the Pearson correlation of each of images [K, …] with each of others [M, …]; 0 for constant ones."""
  return _units(images) @ _units(others).T


def _units(images: np.ndarray) -> np.ndarray:
  """Returns images [K, pixels], float64, less their means and of norm 1; zeros for constant ones."""
  rows = np.nan_to_num(np.asarray(images, np.float64).reshape(len(images), -1), posinf=0.0, neginf=0.0)
  rows = rows - rows.mean(axis=1, keepdims=True)
  norms = np.linalg.norm(rows, axis=1, keepdims=True)
  return rows / np.where(norms > 1e-12, norms, np.inf)


# Sentences of the report on images; others have those of any sample.
WORDS: dict[str, str] = {
  'meaning.recognisable': 'a picture in which the original can be recognised',
  'meaning.re-identified': 'no picture, but enough to find the original among others',
  'meaning.above chance': 'more than nothing, but neither a picture nor an identity',
  'meaning.unjudged': 'more than nothing, but no picture; identity was not judged: {needed} candidates are needed',
  'done.recognisable': '{n:leaves|leave} recognisable pictures',
  'sensitivity.term_recovered': (
    'Uploads of which the attacker has a picture, exact or recognisable: an image correlates with the private one by '
    'at least 0.98, or deviates from it by at most one level of 8 bits (root mean square); or the private one is the '
    'most similar of all candidates, and the SSIM is at least the threshold of the gallery. The page of each audit '
    'says which images these are. Of a batch this is asked of more images than the same attack shows on noise '
    '(control). Of several attackers on a defense the strongest counts.'
  ),
  'sensitivity.term_score': (
    'In dB, of one image per trial, the same in all settings; in a batch it is the first. 10 dB more is a tenth of the '
    'squared error. In differences, what is above {clear} counts as {clear}: a clearer picture is no larger leak.'
  ),
  'verdicts.exact': (
    "One of the images that the attack returned correlates with the private one by at least 0.98 (Fidel's “fully "
    'revealed”), or deviates from it by at most one level of 8 bits (root mean square), which decides where an '
    'image is flat and has no correlation.'
  ),
  'verdicts.recognisable': (
    'Two tests hold. The original is the most similar of all candidates: {size:0} other real images, by the '
    'whitened correlation.{made} And the SSIM is at least a threshold calibrated on these candidates without '
    'human judgement: the median SSIM of an image and of its thumbnail of 0.4 of the side, or the 99th percentile'
    ' of the SSIM of two different images, whichever is larger.'
  ),
  'verdicts.re-identified': (
    'The original is the most similar of all candidates, which happens to one attacker by chance in '
    '{chance:significant} % of uploads, and the correlation is three standard deviations above that of the '
    'control, if that has any: an attacker with a list of suspects learns who it is, although there is no picture.'
  ),
  'verdicts.above chance': (
    'PSNR and correlation are beyond the control (its 95th percentile; three standard deviations above its mean),'
    ' and nothing more.'
  ),
  'verdicts.recovered': (
    'Exact or recognisable: there is a picture. The percentages beside the counts are {exact} 95 '
    '% intervals. A plus after the PSNR marks a run, at any of the four levels, that had not converged: more '
    'steps may show more.{batches}'
  ),
  'verdicts.batches': (
    ' Of a batch, one image decides, where the control shows none. “Fully” counts the images of a batch that are '
    'exact, with their mean PSNR (at most 100 dB).'
  ),
  'verdicts.diverged': (
    'A value became NaN or infinite. The run counts as not recovered and enters no mean; its picture is a checkerboard.'
  ),
  'findings.fails': (
    'Even without a defense {none_of} recovered{above}: this setting proves nothing about any defense, because '
    'the attacks show no picture without one, too.'
  ),
  'findings.reidentified': 'No picture, but {unit} that are re-identified among the candidates: {counts:list}.',
  'findings.seen': 'No picture, but {unit} that are seen above chance: {counts:list}.',
  'audit.both': (
    'A non-adaptive attacker treats the upload as that of an undefended client. An adaptive one knows the defense'
    ' and its settings, and runs the adaptive attack named. Where one row stands for all adaptive attackers, it '
    'is that of the strongest: the most runs recovered, then the highest mean PSNR.'
  ),
  'autoleak.rankings': (
    'Originals that are re-identified: by the likelihood of the upload, given each candidate of a list, without a'
    ' picture; and by what an attack reconstructs. Either decides the level. The last column has uploads of noise'
    ' of which the original is first: false matches. Where an upload says nothing, one in a list is first by '
    'chance.'
  ),
  'training.term_recovered': (
    'The uploads from which at least one attacker, non-adaptive or adaptive, has a picture of the private images,'
    ' exact or recognisable: an image correlates with the private one by at least 0.98, or deviates from it by at'
    ' most one level of 8 bits (root mean square); or the private one is the most similar of all candidates, and '
    'the SSIM is at least the threshold of the gallery. The page of each audit says which images these are. This '
    'is a lower bound: attacks that were not run may recover more.'
  ),
  'training.term_strongest': (
    'The single attacker that recovers most uploads, then the one with the highest mean PSNR; and its means. PSNR'
    ' is in dB, of images in [0, 1]; 10 dB more is a tenth of the squared error. SSIM is 1 for identical images. '
    'Neither says whether an image can be recognised: look at the pictures on the pages of the attacks.'
  ),
  'scores.images': (
    'Peak signal-to-noise ratio in dB: how close a reconstruction, clipped to [0, 1], is to the private image. 10'
    ' dB more is a tenth of the squared error. Papers define it differently, so their numbers may not be '
    'comparable. A reconstruction of which most values lie far beyond [0, 1] is drawn scaled to that range, since'
    ' an attacker would look at it so; its PSNR is that of the clipped one.'
  ),
}


IMAGES = modality(
  Modality(
    name='images',
    axis_names=('H', 'W', 'C'),
    check=data.check_images,
    describe=describe,
    evaluate=metrics.evaluate,
    distinct=metrics.distinct,
    flat=lambda images: images.std(axis=(1, 2, 3), dtype=np.float64) <= metrics.LEVEL,
    gallery=metrics.gallery,
    columns=COLUMNS,
    score='psnr',
    correlation='pearson',
    margin=1.0,
    effect=3.0,
    clear=30.0,
    likeness='ssim',
    oracle=('psnr', 'ssim', 'mse_unclipped'),
    shown=(Shown('psnr', 'PSNR', 'dB', 1), Shown('ssim', 'SSIM')),
    further=(
      Shown('mse', 'MSE', significant=True),
      Shown('pearson', 'Pearson\ncorrelation'),
      Shown('ms_ssim', 'MS-SSIM'),
      Shown('fmse', 'error of\nthe logits', significant=True),
    ),
    nearness=metrics.psnr,
    picture=lambda image: image,
    neutral=lambda shape: np.full(shape, _GREY, np.float32),
    odd=odd,
    stored=stored,
    shapes=lambda model, variables: [(side, side, channels) for side in SIDES for channels in (1, 3)],
    alike=correlations,
    copies={
      'darker': lambda images: images * 0.9,
      'shifted': lambda images: np.concatenate([images[:, :, :1], images[:, :, :-1]], axis=2),
      'jpeg': jpeg,
    },
    by_networks=by_networks,
    noun=('image', 'images'),
    words=WORDS,
    shaped=shaped,
    settle=lambda images: jnp.clip(images, 0.0, 1.0),
    box=(0.0, 1.0),
    terms=frozenset({'tv', 'roughness', 'prior', 'group', 'order', 'denoising'}),
  )
)
