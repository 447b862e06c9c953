"""Package metadata; tool settings live in pyproject.toml."""

import pathlib
import re
import sys

from setuptools import find_packages, setup

HERE = pathlib.Path(__file__).parent
VERSION = re.search(r"VERSION = '(.+)'", (HERE / 'gradleak' / 'core' / 'version.py').read_text('utf-8')).group(1)

# Outside of a checkout, the programs and tables are inside the package: one name in site-packages, see gradleak/cli.py.
# A checkout is on the path as a whole, so that scripts beside it do not take its folder for the package.
OUTSIDE = ['benchmarks', 'experiments', 'launch']
CHECKOUT = bool({'editable_wheel', 'develop'} & set(sys.argv))
INSIDE = {'': '.'} if CHECKOUT else {f'gradleak._{name}': name for name in OUTSIDE}

# What builds the pages; tests build them, too.
DOCS = ['furo>=2025.9', 'myst-nb>=1.4,<2', 'sphinx>=9,<10', 'sphinx-copybutton>=0.5.2,<1', 'sphinx-design>=0.7,<1']

setup(
  name='gradleak',
  version=VERSION,
  description='Measures what federated-learning updates reveal about the data behind them, and what hiding it costs.',
  long_description=(HERE / 'README.md').read_text('utf-8'),
  long_description_content_type='text/markdown',
  license='Apache-2.0',
  python_requires='>=3.11',
  packages=find_packages(include=['gradleak', 'gradleak.*']) + (OUTSIDE if CHECKOUT else list(INSIDE)),
  package_dir=INSIDE,
  package_data={'gradleak': ['py.typed'], 'gradleak.report': ['*.css', '*.js', '*.toml']},
  entry_points={'console_scripts': ['gradleak = gradleak.cli:main']},
  install_requires=[
    'absl-py>=2.1,<3',
    'array_record>=0.7,<1',  # with importlib_resources: what reading TFDS data without TensorFlow needs
    'dp-accounting>=0.6,<1',
    'evosax>=0.3,<0.4',
    'flax>=0.12,<0.13',
    'importlib_resources>=6,<8',
    'jax>=0.10,<0.13',
    'jax-privacy>=2.0,<3',
    'jaxlib>=0.10,<0.13',
    'matplotlib>=3.9,<4',
    'numpy>=2.0,<3',
    'optax>=0.2.8,<0.3',
    'orbax-checkpoint>=0.12,<0.13',
    'pillow>=11',
    'scikit-image>=0.25,<0.27',
    'scikit-learn>=1.6,<2',
    'scipy>=1.14,<2',
    'tensorflow-datasets>=4.9.8,<5',
    'tqdm>=4.66,<5',
  ],
  extras_require={
    'benchmark': ['hydra-core>=1.3,<2', 'torch>=2.4,<3'],  # beside breaching, see the Makefile
    'cluster': ['ray[client]>=2.50,<3', 'submitit>=1.5,<2'],  # --cluster
    'docs': DOCS,
    'flower': ['flwr>=1.42,<2', 'torch>=2.4,<3'],
    'frame': ['pandas>=2,<4'],
    'gpu': ['jax[cuda13]>=0.10,<0.13'],
    'prepare': ['tensorflow-cpu>=2.16,<3'],
    'text': ['tokenizers>=0.20,<1'],  # files of tokenisers; bytes and words need nothing
    'torch': ['torch>=2.13,<3'],  # networks of PyTorch as they are: models.from_torch
    'test': [
      'ipykernel>=7,<8',
      'mypy>=1.15,<3',
      'nbclient>=0.10,<1',
      'pandas>=2,<4',
      'pytest>=8,<10',
      'pytest-xdist>=3.6,<4',
      'ruff>=0.12,<0.18',
      *DOCS,
    ],
  },
  classifiers=[
    'Programming Language :: Python :: 3.11',
    'Programming Language :: Python :: 3.12',
    'Programming Language :: Python :: 3.13',
    'Topic :: Scientific/Engineering :: Artificial Intelligence',
    'Topic :: Security',
    'Typing :: Typed',
  ],
)
