"""Settings of the documentation's build: `make docs`."""

import pathlib
import re
import sys

HERE = pathlib.Path(__file__).parent
sys.path[:0] = [str(HERE / '_ext'), str(HERE.parent)]

project = author = 'gradleak'
copyright = 'The gradleak developers'
release = version = re.search(
  r"VERSION = '(.+)'", (HERE.parent / 'gradleak' / 'core' / 'version.py').read_text('utf-8')
)[1]

extensions = [
  'myst_nb',
  'sphinx.ext.autodoc',
  'sphinx.ext.napoleon',
  'sphinx_copybutton',
  'sphinx_design',
  'api',
  'leaderboard',
  'mathml',
  'methods',
  'narrow',
  'pieces',
  'plain',
  'tables',
]
exclude_patterns = ['_build', '_ext', '_deploy']
nb_execution_mode = 'cache'  # the notebook is stored without outputs, and executed when it has changed
nb_execution_raise_on_error = True
nb_execution_timeout = 600
myst_enable_extensions = ['colon_fence', 'dollarmath']
myst_heading_anchors = 3
html_theme = 'furo'
html_title = f'gradleak {release}'
html_math_renderer = 'mathml'
html_show_copyright = False
html_static_path = ['_static']
html_css_files = ['site.css']
copybutton_prompt_text = '$ '

autodoc_member_order = 'bysource'
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
python_display_short_literal_types = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
# Types in signatures that have no page. Some are of other libraries, whose inventories need a network. Others are of
# these modules, which are no part of the public interface.
INTERNAL = '|'.join(
  [
    *(r'attacks\.matching(?:\.\w+)?', r'core\.\w+', 'defenses.defense', 'federated.inspection', 'metrics.revealed'),
    *('federated.targets', 'defenses.differential_privacy', 'studies.captured.inversion', 'studies.frontier'),
    *('studies.sensitivity.assumptions', r'studies\.autoleak\.\w+', 'frameworks.comparison', 'models.state_dict'),
    *('models.model', 'data.tokenisers', 'audit.sequential', 'defenses.concealment'),
  ]
)
nitpick_ignore_regex = [('py:.*', r'(?!gradleak\.).*'), ('py:class', rf'gradleak\.({INTERNAL})\.\w+')]
linkcheck_timeout = 20
