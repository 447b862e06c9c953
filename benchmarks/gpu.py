"""Speed on one GPU in one call: our trials together against the PyTorch loop on the same GPU, as Markdown."""

import functools
import pathlib
import time

import jax

import gradleak as gl
from benchmarks import harness, memory, pytorch, setting, speed
from benchmarks.harness import Column, Variant
from gradleak.core.storage import write_atomically

READS = ('dataset', 'data_dir', 'models', 'attack', 'compared', 'sizes', 'group_sizes', 'steps', 'repeats', 'output')
MODELS = ('lenet', 'convnet', 'resnet18')
LOOP = 'PyTorch'
COLUMNS = [
  Column('group', 'group', '.0f', harness.first), Column('ms per step and trial', 'ms', '.4f'),
  Column('compile s', 'compile', '.1f', harness.first), Column('device peak MiB', 'peak', ',.0f', harness.first),
  Column('planned MiB', 'planned', ',.1f'), Column('PSNR dB', 'psnr', '.2f', harness.first),
]  # fmt: skip


def main(options: harness.Options) -> None:
  """Measures models × numbers of trials × group sizes and writes a table, anew after each model."""
  output, sizes = options.output or 'results/gpu.md', options.listed_sizes('1,128,1024')
  images, models = setting.load(options.dataset, options.data_dir, max(sizes)), options.listed_models(*MODELS)
  for model in models:
    gl.models.create(model, images.num_classes)  # an unknown model is an error before anything is measured
  harness.writable(output)
  heads = ['model', 'trials', *(column.head for column in COLUMNS)]
  heads[4:4] = ['PyTorch loop', 'times faster']
  lines = [
    f'## {jax.devices()[0].device_kind}, {options.attack}, {options.dataset} at 32×32×3, {options.steps} steps',
    '',
    f'{speed.versions()}; {time.strftime("%Y-%m-%d")}; {options.repeats} runs in turn, medians, compilation apart. The '
    f'loop runs one trial at a time on {_loop_device()}, in the precision that PyTorch defaults to; ours is float32. '
    f'{memory.of_what()}',
    '',
    '| ' + ' | '.join(heads) + " | loop's |",
    '|---' * (len(heads) + 1) + '|',
  ]
  for model in models:
    every = setting.make(model, options.attack, options.steps, images, max(sizes))
    lines += _rows(options, model, every, sizes)
    write_atomically(pathlib.Path(output), '\n'.join(lines) + '\n')
  print('\n'.join(lines))


def _loop_device() -> str:
  try:
    kind = pytorch.device()
    return pytorch.torch().cuda.get_device_name() if kind == 'cuda' else f'the processor ({kind})'
  except pytorch.Unavailable as error:
    return f'nothing: {error}'


def _rows(options: harness.Options, model: str, every: setting.Setting, sizes: list[int]) -> list[str]:
  """Returns the Markdown rows of one model; groups beyond the number of trials are one group of all."""
  groups, compared = harness.integers('group_sizes', options.group_sizes), options.compared
  places = sorted({(size, min(size, group)) for size in sizes for group in groups})
  variants = [Variant(LOOP, speed.OneAtATime(every.first(compared), pytorch.attack))]
  measure = functools.partial(setting.measured, devices=jax.local_devices()[:1])
  for size, group in places:
    given = measure(every.first(size), size, group_size=group, compared=min(size, compared))
    variants.append(Variant(f'{size:,} trials in groups of {group}', *given))
  found = harness.measured(variants, options.repeats, f'{model}, ')
  milliseconds, psnr = (next(column for column in COLUMNS if column.figure == figure) for figure in ('ms', 'psnr'))
  loop, theirs = harness.value(found, LOOP, milliseconds), harness.cells(found, LOOP, [psnr])[0]
  rows = []
  for variant, (size, group) in zip(variants[1:], places, strict=True):
    ours = harness.value(found, variant.name, milliseconds)
    if ours is None:
      rows.append(f'| {model} | {size:,} | {group} | {found[variant.name]} |' + ' |' * (len(COLUMNS) + 1))
      continue
    texts = harness.cells(found, variant.name, COLUMNS)
    texts[2:2] = [found[LOOP], '–'] if loop is None else [f'{loop:.3f}', f'{loop / ours:.1f}×']
    rows.append(f'| {model} | {size:,} | ' + ' | '.join([*texts, theirs]) + ' |')
  return rows
