"""The site: `uv run --group docs sphinx-build -W -c docs . docs/_build`.

Its source is the project's folder, so that links between pages hold there as on a forge. README.md
is the front page.
"""

import re
import sys
from pathlib import Path

from docutils import nodes

HERE = Path(__file__).parent
ROOT = HERE.parent
sys.path.insert(0, str(ROOT))

from docs import docstrings, generate, notebooks, roles  # noqa: E402

project = html_title = 'Evenkeel'
author = 'Evenkeel maintainers'
root_doc = 'README'
include_patterns = [
    'README.md',
    'docs/*.md',
    'docs/**/*.md',
    'configs/studies/results/*.md',
    'tests/bench/RESULTS.md',
    'tpu/PLANS.md',
]
exclude_patterns = ['docs/_build', 'docs/reference/other_programs.md']  # which a page includes
extensions = ['myst_parser', 'sphinx.ext.autodoc', 'sphinx.ext.napoleon', 'sphinx_copybutton']
myst_heading_anchors = 3
myst_enable_extensions = ['html_image']
autodoc_member_order = 'bysource'
autodoc_class_signature = 'separated'  # fields are listed with their types
autodoc_preserve_defaults = True
autodoc_typehints_format = 'short'
default_role = 'docstring'  # of docs/roles.py: backticks hold code or an equation
smartquotes_action = 'qe'  # two dashes are a flag's
html_theme = 'sphinx_book_theme'
html_static_path, html_css_files, html_js_files = ['_static'], ['site.css'], ['sort.js']
html_search_scorer = str(HERE / '_static' / 'scorer.js')
highlight_language = 'none'  # of what is indented: commands
html_theme_options = {'navbar_persistent': [], 'show_toc_level': 2, 'home_page_in_toc': True}
copybutton_prompt_text = '$ '

CONTENTS = {  # caption: pages below docs, or with a leading / below the project's folder
    'First steps': 'guide/start guide/notebooks coming_from',
    'Tutorials': """
        tutorials/first_ablation tutorials/norm_of_your_own tutorials/collapsing_attention
        tutorials/transferred_rate tutorials/inside_a_checkpoint tutorials/pod_you_do_not_hold
        tutorials/own_conversations""",
    'Train': 'guide/config guide/data guide/runs guide/diagnostics guide/trackers',
    'Models and optimizers': """
        guide/norms guide/attention guide/reparametrisations guide/losses_optimizers
        guide/precision guide/scaling guide/models""",
    'Compare': 'guide/sweeps guide/tuning guide/loop guide/claims',
    'Use a trained model': """
        guide/python guide/evaluation guide/suites guide/generation guide/serving""",
    'Scale up': 'guide/devices guide/hosts guide/pods guide/buckets',
    'Extend': 'guide/parts guide/change_the_block',
    'Reference': """
        reference/fields reference/parts/index reference/commands reference/python/index files
        reference/stages reference/columns reference/statuses reference/exports""",
    'Results': 'claims/index studies /tests/bench/RESULTS /tpu/PLANS limits',
    'Project': 'design words changelog contributing cite',
}
BELOW = {'docs/studies': '/configs/studies/results/*', 'docs/claims/index': '*'}
PHONE_CHARS = 32  # of code in a line
LINK = re.compile(r'(?<!!)\[([^\]]+)\]\((?!\w+:|#)([^)#\s]+)\)')


def contents() -> str:
    """Returns the table of contents that a forge does not show."""
    trees = []
    for caption, pages in CONTENTS.items():
        names = [page if page.startswith('/') else f'docs/{page}' for page in pages.split()]
        trees.append(
            '\n'.join(['```{toctree}', f':caption: {caption}', ':hidden:', '', *names, '```'])
        )
    return '\n\n'.join(trees)


def replace_file_links(app, docname: str, source: list[str]) -> None:
    """Replaces links to files that are not pages by their names: only a forge can follow them.

    Args:
      app: the Sphinx application.
      docname: the page.
      source: its text, in a list of one element that is changed.
    """
    folder = Path(app.env.doc2path(docname)).parent

    def name_file(match: re.Match) -> str:
        text, path = match[1], (folder / match[2]).resolve()
        if path.suffix in ('.md', '.ipynb') or not path.exists():  # a notebook is downloaded
            return match[0]
        name = f'`{path.relative_to(ROOT)}`'
        return name if text.rstrip('/').replace('\\', '') in name else f'{text} ({name})'

    source[0] = LINK.sub(name_file, source[0])
    if docname == root_doc:
        source[0] += '\n' + contents()
    if below := BELOW.get(docname):
        source[0] += f'\n```{{toctree}}\n:glob:\n:hidden:\n\n{below}\n```\n'


def mark_long_code(app, doctree: nodes.document) -> None:
    """Marks inline code with words that a phone has to break: site.css does."""
    for node in doctree.findall(nodes.literal):
        if any(len(word) > PHONE_CHARS for word in node.astext().split()):
            node['classes'].append('long')


def write_index(app, error: Exception | None) -> None:
    """Writes an index.html that redirects to the front page."""
    if error is None:
        page = '<meta http-equiv="refresh" content="0; url=README.html">'
        (Path(app.outdir) / 'index.html').write_text(page)


def hide_first_line(app, kind: str, name: str, member, options, lines: list[str]) -> None:
    """Keeps napoleon from reading the words before a colon as the type of a field.

    Sphinx calls it for each docstring, by position.

    Args:
      app: the Sphinx application.
      kind: 'attribute', 'property', 'function', ...
      name: the full name of what has the docstring.
      member: the attribute, property or function.
      options: of the directive.
      lines: the docstring, which is changed.
    """
    if kind in ('attribute', 'property'):
        lines[:0] = ['..', '']  # an empty comment: napoleon reads the first line alone


def draw_equations(app, kind: str, name: str, member, options, lines: list[str]) -> None:
    """Makes directives of equations on lines of their own; Sphinx calls it as `hide_first_line`.

    Args:
      app: the Sphinx application.
      kind: 'attribute', 'property', 'function', ...
      name: the full name of what has the docstring.
      member: the attribute, property or function.
      options: of the directive.
      lines: the docstring, which is changed.
    """
    if kind not in ('attribute', 'property') and any(lines):
        lines[:] = [*docstrings.to_rest('\n'.join(lines)).splitlines(), '']


def setup(app) -> None:
    roles.setup(app)
    app.connect('builder-inited', lambda app: generate.write(HERE / 'reference'))
    app.connect('builder-inited', lambda app: notebooks.write(HERE / '_static' / 'notebooks'))
    app.connect('autodoc-process-docstring', hide_first_line, priority=400)  # napoleon has 500
    app.connect('autodoc-process-docstring', draw_equations, priority=300)
    app.connect('source-read', replace_file_links)
    app.connect('doctree-read', mark_long_code)
    app.connect('build-finished', write_index)
