"""The names of Hugging Face's GPT-2 and BERT, and how their tensors are those of our decoder and encoder."""

import re
from collections.abc import Mapping, Sequence

import numpy as np

_PREFIXES = ('transformer.', 'bert.')
# Buffers, tied copies and heads that a model of ours does not have.
_UNUSED = re.compile(
  r'^h\.\d+\.attn\.(masked_)?bias$|position_ids$|^cls\.seq_relationship\.|^cls\.predictions\.decoder\.weight$'
)
_HEADS = re.compile(r'^(lm_head|score|classifier|pooler|cls)\.')
_CONV1D = re.compile(r'^h\.\d+\.(attn|mlp)\.')  # GPT-2's dense layers are stored [in, out]
_OLD = {'gamma': 'weight', 'beta': 'bias'}  # of LayerNorm in the first files of BERT


def published_name(path: Sequence[str]) -> str:
  """Returns Hugging Face's name, without a prefix, of the parameter at `path` of a network of tokens."""
  *modules, leaf = path
  name = re.sub(r'(^|\.)(h|layer)_(\d+)', r'\1\2.\3', '.'.join(modules))
  name = f'cls.{name}' if name.startswith('predictions') else name
  return f'{name}.{leaf if leaf == "bias" else "weight"}'


def read_entries(entries: Mapping[str, np.ndarray], wanted: Sequence[str]) -> dict[str, np.ndarray]:
  """Returns the entries of a file under the names of `published_name`, each [in, out] where it is a dense layer's.

  Heads that the model does not have, buffers and tied copies are left out.

  Args:
    entries: tensors by name, in PyTorch's layout.
    wanted: the names of the model's parameters.
  """
  found: dict[str, np.ndarray] = {}
  for name, values in entries.items():
    for prefix in _PREFIXES:
      name = name.removeprefix(prefix)
    module, _, leaf = name.rpartition('.')
    name = f'{module}.{_OLD.get(leaf, leaf)}'
    name = 'cls.predictions.decoder.bias' if name == 'cls.predictions.bias' else name
    if _UNUSED.search(name) or (_HEADS.match(name) and name not in wanted):
      continue
    dense = values.ndim == 2 and 'embedding' not in name and not re.match(r'wte|wpe', name)
    values = values.T if dense and not _CONV1D.match(name) else values
    parts = [name.replace('.c_attn.', f'.{part}.') for part in 'qkv']
    if '.c_attn.' in name and parts[0] in wanted and values.shape[-1] % 3 == 0:
      found |= dict(zip(parts, np.split(values, 3, axis=-1), strict=True))
    else:
      found[name] = values
  return found


def is_head(name: str) -> bool:
  """Returns whether a parameter is of a head, which is drawn anew for another task."""
  return bool(_HEADS.match(name))
