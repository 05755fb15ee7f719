"""The site: `uv run --group docs sphinx-build -W -c docs . docs/_build`.

Its source is the project's folder, so that links between pages hold there as on a forge. README.md
is the front page.
"""

import re
import sys
from pathlib import Path

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
autodoc_member_order = 'bysource'
autodoc_class_signature = 'separated'  # fields are listed with their types
autodoc_preserve_defaults = True
autodoc_typehints_format = 'short'
default_role = 'docstring'  # of docs/roles.py: backticks hold code or an equation
smartquotes_action = 'qe'  # two dashes are a flag's
html_theme = 'sphinx_book_theme'
html_static_path, html_css_files, html_js_files = ['_static'], ['site.css'], ['sort.js']
highlight_language = 'none'  # of what is indented: commands
html_theme_options = {'navbar_persistent': [], 'show_toc_level': 2, 'home_page_in_toc': True}
copybutton_prompt_text = '$ '

CONTENTS = {
    'Tutorials': """
        first_ablation norm_of_your_own collapsing_attention transferred_rate inside_a_checkpoint
        pod_you_do_not_hold own_conversations""",
    'Guide': """
        start config data norms attention reparametrisations models losses_optimizers scaling sweeps
        tuning claims python evaluation suites generation serving trackers diagnostics runs buckets
        devices hosts pods parts change_the_block""",
    'Reference': 'parts/index python/index fields stages commands columns statuses exports',
}
MORE = {
    'Guide': ['docs/coming_from'],
    'Reference': ['docs/files'],
    'What came out': [
        'docs/claims/index',
        'docs/studies',
        'tests/bench/RESULTS',
        'tpu/PLANS',
        'docs/limits',
    ],
    'The project': [
        'docs/design',
        'docs/words',
        'docs/changelog',
        'docs/contributing',
        'docs/cite',
    ],
}
BELOW = {'docs/studies': '/configs/studies/results/*', 'docs/claims/index': '*'}
LINK = re.compile(r'(?<!!)\[([^\]]+)\]\((?!\w+:|#)([^)#\s]+)\)')


def contents() -> str:
    """Returns the table of contents that a forge does not show."""
    trees = []
    for caption in {**CONTENTS, **MORE}:
        names = [f'docs/{caption.lower()}/{name}' for name in CONTENTS.get(caption, '').split()]
        lines = [f':caption: {caption}', ':hidden:', '', *names, *MORE.get(caption, ())]
        trees.append('\n'.join(['```{toctree}', *lines, '```']))
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
        if path.suffix == '.md' or not path.exists():
            return match[0]
        name = f'`{path.relative_to(ROOT)}`'
        return name if text.rstrip('/').replace('\\', '') in name else f'{text} ({name})'

    source[0] = LINK.sub(name_file, source[0])
    if docname == root_doc:
        source[0] += '\n' + contents()
    if below := BELOW.get(docname):
        source[0] += f'\n```{{toctree}}\n:glob:\n:hidden:\n\n{below}\n```\n'


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
    app.connect('build-finished', write_index)
