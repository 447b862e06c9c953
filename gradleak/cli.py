"""The command `gradleak`: `gradleak audit …` is `python launch/audit.py …`.

In a checkout the programs lie in launch/, and the tables of papers in experiments/. An installed package holds both
inside itself, so that it brings one name into site-packages; here they get their names.
"""

import importlib.util
import runpy
import sys
from typing import Any

PROGRAMS = {
  'audit': 'what one client update leaks, with and without defenses',
  'autoleak': 'the standard evaluation: a fixed ensemble of attacks, worst case per image',
  'epsilon': 'a lower bound on ε from uploads, beside the ε that a defense states',
  'identify': 'whose sample is behind an upload, by likelihood',
  'leaderboard': 'entries of defenses, and the page that compares them',
  'attack': 'an update that you captured',
  'sensitivity': 'which assumption of published attacks protects you',
  'sweep': 'grids of models, seeds and strengths',
  'train': 'federated training under defenses, and what it costs',
  'train_prior': 'a generator or a denoiser for attackers who have seen other images',
  'reproduce': 'the tables of the papers',
  'prepare_data': 'a dataset of TensorFlow Datasets, once',
  'borders': 'pictures on both sides of the border of each verdict',
  'benchmark': 'speed, as ratios in one run',
}
INSIDE = {'launch': 'gradleak._launch', 'experiments': 'gradleak._experiments', 'benchmarks': 'gradleak._benchmarks'}


class _Inside:
  """Finds the packages of `INSIDE` where they are installed."""

  @staticmethod
  def find_spec(name: str, path: Any = None, target: Any = None) -> Any:
    """Returns where such a package lies, None for others and in a checkout."""
    found = importlib.util.find_spec(INSIDE[name]) if name in INSIDE else None
    if found is None:
      return None
    folders = found.submodule_search_locations
    return importlib.util.spec_from_file_location(name, found.origin, submodule_search_locations=folders)


def main() -> None:
  """Runs the program that the first argument names."""
  name = sys.argv[1] if len(sys.argv) > 1 else '--help'
  if name in ('--help', '-h', 'help'):
    print(_help())
    return
  if name == '--version':
    from gradleak import __version__

    print(f'gradleak {__version__}')
    return
  if name not in PROGRAMS:
    print(f"gradleak: unknown program '{name}' (valid: {', '.join(PROGRAMS)})", file=sys.stderr)
    sys.exit(2)
  sys.meta_path.insert(0, _Inside())
  sys.argv = [f'gradleak {name}', *sys.argv[2:]]
  runpy.run_module(f'launch.{name}', run_name='__main__', alter_sys=False)


def _help() -> str:
  width = max(map(len, PROGRAMS))
  lines = [f'  {name:<{width}}  {what}' for name, what in PROGRAMS.items()]
  return '\n'.join(['gradleak PROGRAM [--flags]', '', *lines, '', 'gradleak PROGRAM --help lists the flags of one.'])


if __name__ == '__main__':
  main()
