"""Charts as Altair specifications, with the same style for PNG, SVG and interactive pages.

The same specification serves all three. vl-convert draws PNG and SVG without a browser, and
provides the scripts that draw the chart in a page. A page therefore needs no network.
"""

import contextlib
import datetime
import functools
import hashlib
import json
import os
import shlex
import sys
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import altair as alt
import jinja2
import vl_convert
from markupsafe import Markup

# Okabe and Ito's palette, which the colour-blind can distinguish, without its yellow, which is too
# light on white.
COLOURS = ('#0072B2', '#D55E00', '#009E73', '#CC79A7', '#E69F00', '#56B4E9', '#7A5195')
PASS_COLOUR, FAIL_COLOUR = '#8a929a', '#D55E00'
DIGITS = 6  # of the numbers of a page
PIXELS_PER_INCH = 200  # of a PNG; specifications have 72 pixels per inch
FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif'
SCRIPT = Path(__file__).with_name('charts.js')

LABEL_SPACING = {'labelOverlap': True, 'labelSeparation': 8, 'labelFlush': False}  # of axes

Chart = alt.TopLevelMixin
Spec = dict[str, Any]


def chart_config(ink: str, soft: str, line: str, font: str = 'sans-serif') -> Spec:
    """Returns the style of a chart.

    Args:
      ink: colour of titles.
      soft: colour of numbers.
      line: colour of the grid.
      font: name of the font.
    """
    text_style = {'labelColor': soft, 'titleColor': soft, 'labelFontSize': 11, 'titleFontSize': 11}
    axis = {'gridColor': line, 'domainColor': line, 'tickColor': line, 'titleFontWeight': 'normal'}
    return {
        'background': None,
        'font': font,
        'axis': axis | text_style | LABEL_SPACING,
        'legend': text_style | {'titleFontWeight': 'normal', 'labelLimit': 400, 'symbolOpacity': 1},
        'header': text_style | {'labelColor': ink, 'labelFontSize': 12},
        'title': {'color': ink, 'anchor': 'start', 'fontSize': 12, 'fontWeight': 600},
        'view': {'stroke': None},
        'range': {'category': list(COLOURS)},
        'line': {'strokeWidth': 1.6},
        'rule': {'color': soft},
        'text': {'color': soft},
    }


EXPORTS = 'window.vegaEmbed = vegaEmbed; window.vega = vega;'  # names that pages use
INK = '#22262b'  # turns light in the dark scheme
LIGHT = chart_config(INK, '#646b73', '#e3e6e9')
DARK = chart_config('#e6e8ea', '#a3abb3', '#3a4047')


def chart_spec(chart: Chart) -> Spec:
    """Returns the Vega-Lite specification of a chart, without a limit of rows."""
    # ty: the stub of __exit__ in altair is wrong.
    with alt.data_transformers.enable('default', max_rows=None):  # ty: ignore[invalid-context-manager]
        return chart.to_dict()


def save_chart(chart: Chart, path: Path) -> Path:
    """Writes a chart as .png or .svg, by the suffix of `path`, else raises ValueError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    spec = chart_spec(chart) | {'background': 'white'}
    if path.suffix == '.svg':
        _write(path, vl_convert.vegalite_to_svg(spec, config=LIGHT).encode())
    elif path.suffix == '.png':
        png = vl_convert.vegalite_to_png(spec, config=LIGHT, scale=1.0, ppi=PIXELS_PER_INCH)
        _write(path, png)
    else:
        raise ValueError(f'the file of a figure must end in .png or .svg; got {path}')
    return path


def render_scripts(charts: Mapping[str, Chart]) -> Markup:
    """Returns scripts that draw each chart in the element with the chart's name as its id.

    They follow the colour scheme of the reader's system, and print in light colours.
    """
    specs = {name: chart_spec(chart) for name, chart in charts.items()}
    content = {'specs': specs, 'light': LIGHT | {'font': FONT}, 'dark': DARK | {'font': FONT}}
    return Markup(
        f'<script>{_vega_library()}</script>\n'
        f'<script type="application/json" id="charts">{to_script_json(content)}</script>\n'
        f'<script>{SCRIPT.read_text()}</script>'
    )


def write_page(path: Path, charts: Mapping[str, Chart], **content: Any) -> None:
    """Writes a page of charts above a table of `rows`; the first `failed` rows are failures.

    Args:
      path: the HTML file.
      charts: the charts, keyed by the ids of their elements.
      **content: title, about, verdict, is_bad, notes (a list), rows ({head: cell} each) and failed.
    """
    command = shlex.join(['python', *sys.orig_argv[1:]])
    page = build_environment().get_template('page.html.j2')
    footer = {'made': format_now(), 'command': command, 'scripts': render_scripts(charts)}
    path.parent.mkdir(parents=True, exist_ok=True)
    _write(path, page.render(charts=list(charts), **footer, **content).encode())


def _write(path: Path, content: bytes) -> None:
    """Writes a file completely or not at all, even if the process is killed midway."""
    temporary = path.with_name(f'{path.name}.{os.getpid()}.tmp')
    try:
        temporary.write_bytes(content)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def build_environment(*folders: Path, is_html: bool = True) -> jinja2.Environment:
    """Returns an environment with the templates of the folders, and the frame of all pages."""
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader([*folders, SCRIPT.parent]),
        autoescape=is_html,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def format_now() -> str:
    """Returns the present time as text."""
    return datetime.datetime.now().astimezone().strftime('%Y-%m-%d %H:%M %Z')


def to_script_json(value: Any) -> Markup:
    """Returns JSON for a script element; no text in it can end the element. Numbers have DIGITS."""
    text = json.dumps(_round_floats(value), separators=(',', ':'), allow_nan=False)
    return Markup(text.replace('<', '\\u003c'))


def _round_floats(value: Any) -> Any:
    """Returns the value with all floats rounded to DIGITS significant digits."""
    if isinstance(value, dict):
        return {name: _round_floats(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_round_floats(inner) for inner in value]
    return float(f'{value:.{DIGITS}g}') if isinstance(value, float) else value


@functools.cache
def _vega_library() -> str:
    """Returns Vega as JavaScript. Bundling it takes 1.7 s, so that it is stored for later pages."""
    name = f'vega-{version("vl-convert-python")}-{_digest(EXPORTS)}.js'
    try:
        # The folder of `lm.storage.files.user_cache`, repeated because charts import nothing of lm.
        cache = Path(os.environ.get('XDG_CACHE_HOME') or '~/.cache').expanduser() / 'evenkeel'
    except RuntimeError:  # the user has no home folder
        return vl_convert.javascript_bundle(EXPORTS)
    with contextlib.suppress(OSError, UnicodeDecodeError):  # not stored yet, or damaged
        stored_digest, _, script = (cache / name).read_bytes().decode().partition('\n')
        if stored_digest == f'// {_digest(script)}':
            return script
    script = vl_convert.javascript_bundle(EXPORTS)
    with contextlib.suppress(OSError):  # the next page bundles it again
        cache.mkdir(parents=True, exist_ok=True)
        _write(cache / name, f'// {_digest(script)}\n{script}'.encode())
    return script


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]
