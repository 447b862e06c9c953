"""Speed on one GPU in one call: our trials together against the PyTorch loop on the same GPU, as Markdown."""

import os
import sys
import time
from collections.abc import Sequence

import jax
import numpy as np

import gradleak as gl
from benchmarks import memory, pytorch, setting, speed
from gradleak.core import errors


def main(
  *,
  models: Sequence[str],
  attack: str,
  dataset: str,
  data_dir: str | None,
  sizes: Sequence[int],
  group_sizes: Sequence[int],
  steps: int,
  repeats: int,
  compared: int,
  output: str,
) -> None:
  """Measures models × numbers of trials × group sizes and writes a table, anew after each model.

  Args:
    models: as launch/audit.py takes each.
    attack, dataset, data_dir: likewise.
    sizes: numbers of trials.
    group_sizes: trials per micro-group to try; those beyond the number of trials are measured as one group of all.
    steps: of the attack.
    repeats: how often each row is measured, the PyTorch loop's in turn with them.
    compared: trials that the PyTorch loop attacks one after another, from the same starts.
    output: the file.
  """
  images = setting.load(dataset, data_dir, max(sizes))
  for model in models:
    gl.models.create(model, images.num_classes)  # an unknown model is an error before anything is measured
  device = jax.devices()[0]
  lines = [
    f'## {device.device_kind}, {attack}, {dataset} at 32×32×3, {steps} steps',
    '',
    f'{speed.versions()}; {time.strftime("%Y-%m-%d")}; {repeats} runs in turn, medians, compilation apart. The loop '
    f'runs one trial at a time on {_loop_device()}. Both take the precision that their framework defaults to.',
    '',
    '| model | trials | group | ms per step and trial | PyTorch loop | times faster | compile s | device peak MiB '
    "| planned MiB | PSNR dB | loop's |",
    '|---|---|---|---|---|---|---|---|---|---|---|',
  ]
  _write(output, lines)
  for model in models:
    lines += _rows(model, attack, steps, images, sizes, group_sizes, repeats, compared)
    _write(output, lines)
  print('\n'.join(lines))


def _loop_device():
  try:
    kind = pytorch.device()
    return pytorch.torch().cuda.get_device_name() if kind == 'cuda' else f'the processor ({kind})'
  except pytorch.Unavailable as error:
    return f'nothing: {error}'


def _write(output, lines):
  try:
    os.makedirs(os.path.dirname(output) or '.', exist_ok=True)
    with open(output, 'w', encoding='utf-8') as file:
      file.write('\n'.join(lines) + '\n')
  except OSError as error:
    raise errors.UsageError(f'cannot write {output}: {error.strerror}') from error


def _rows(model, attack, steps, images, sizes, group_sizes, repeats, compared):
  """Returns the Markdown rows of one model."""
  every = setting.make(model, attack, steps, images, max(sizes))
  loop = speed.OneAtATime(every.first(compared), pytorch.attack)
  cells = sorted({(size, min(size, group)) for size in sizes for group in group_sizes})
  found, failed, looped, why = {cell: [] for cell in cells}, {}, [], ''
  for repeat in range(repeats):
    where = f'run {repeat + 1} of {repeats}: {model}'
    if not why:
      print(f'{where}, PyTorch', file=sys.stderr, flush=True)
      try:
        looped.append(loop())
      except pytorch.Unavailable as error:
        why = f'n/a: {error}'
    for size, group in cells:
      if (size, group) in failed:
        continue
      print(f'{where}, {size} trials in groups of {group}', file=sys.stderr, flush=True)
      some = every.first(size)
      try:
        done = setting.run(some, size, group, jax.local_devices()[:1], min(size, compared))
      except errors.DeviceError as error:
        failed[size, group] = str(error)
        continue
      found[size, group].append((done, memory.peak()))
  reference = np.median([done.milliseconds for done in looped]) if looped else None
  rows = []
  for (size, group), runs in found.items():
    if not runs:
      rows.append(f'| {model} | {size:,} | {group} | {failed[size, group]} |' + ' |' * 7)
      continue
    first, peak = runs[0]
    median = np.median([done.milliseconds for done, _ in runs])
    times = f'{reference:.3f} | {reference / median:.1f}×' if looped else f'{why} | –'
    theirs = f'{every.psnr(looped[0].images[:size]):.2f}' if looped else '–'
    planned = memory.planned(every.first(size), first.group_size, jax.local_devices()[:1])
    rows.append(
      f'| {model} | {size:,} | {first.group_size} | {median:.4f} | {times} | {first.compile_seconds:.1f} | {peak:,.0f} '
      f'| {planned:,.1f} | {every.psnr(first.images):.2f} | {theirs} |'
    )
  return rows
