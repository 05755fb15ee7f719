"""Makes docs/_static/report.png: the top of the report of a tuned study.

python -m docs.report_picture [PAGE]

Trains the study of the front page (two minutes of CPU time) in a temporary folder, or takes its
report, PAGE. Needs Chromium. The picture is readable at 400 pixels, so it has large text, few
columns and one chart.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

from tests import ROOT

PICTURE = ROOT / 'docs' / '_static' / 'report.png'
BROWSER = 'chromium'
WIDTH, SCALE = 560, 2  # CSS pixels, and pixels of the picture for each
CHART_FONT = 15
CONFIG = re.compile(r'^```python\n# configs/(optimizers\.py)\n(.*?)^```$', re.DOTALL | re.MULTILINE)
COLUMNS = ('arm', 'verdict', 'difference', 'tuned loss')

STYLE = """
main > :not(h1, .findings, .scroll:has(.arms), #tuned_losses) { display: none !important; }
.controls, .findings p:last-child { display: none; }
main { padding: 16px; }
main, table { font-size: 17px; }
.small { font-size: 14px; }
"""
MEASURE = """<script>
setInterval(() => {
  if (!views.tuned_losses) return;  // not drawn yet
  const {bottom} = document.querySelector('main').getBoundingClientRect();
  document.body.replaceChildren(Math.ceil(bottom));
  delete views.tuned_losses;
}, 500);
</script>"""


def main(arguments: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        page = Path(arguments[0]) if arguments else train(Path(folder))[0]
        print(draw(page, Path(folder)))


def train(folder: Path) -> tuple[Path, str]:
    """Trains the study of the front page in `folder`; returns its report and its output."""
    name, config = CONFIG.search((ROOT / 'README.md').read_text()).groups()
    (folder / name).write_text(config)
    workdir = folder / Path(name).stem
    command = [sys.executable, 'train.py', f'--config={folder / name}', f'--workdir={workdir}']
    process = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    return workdir / 'report.html', process.stdout


def draw(page: Path, folder: Path) -> Path:
    """Draws the picture of a report; `folder` is for temporary files."""
    text = select_top(page.read_text())
    body, end, tail = text.rpartition('</body>')  # the library of the charts contains others
    measured = run_browser(body + MEASURE + end + tail, folder, '--dump-dom', 2000)
    height = int(re.search(r'<body[^>]*>(\d+)', measured)[1])
    run_browser(text, folder, f'--screenshot={PICTURE}', height)
    return PICTURE


def select_top(page: str) -> str:
    """Returns a page that shows the findings, COLUMNS of the arms and the chart of their losses."""
    table = re.search(r'<table class="(?P<kinds>[^"]*\barms)">.*?</thead>', page, re.DOTALL)
    heads = re.findall(r'<button>(.*?)</button>', table[0])
    hidden = [i + 1 for i, head in enumerate(heads) if head not in COLUMNS]
    columns = ', '.join(f'.arms :is(th, td):nth-child({i})' for i in hidden)
    style = f'<style>{STYLE}{columns} {{ display: none; }}</style>'
    page = page.replace(table['kinds'], table['kinds'].replace('stacked', ''))  # cards are long
    page = re.sub(r'("(?:label|title)FontSize":)\d+', rf'\g<1>{CHART_FONT}', page)
    return page.replace('</head>', f'{style}</head>', 1)


def run_browser(page: str, folder: Path, action: str, height: int) -> str:
    """Opens a page in a window of WIDTH; returns what the browser prints."""
    path = folder / 'page.html'
    path.write_text(page)
    flags = ['--headless', '--no-sandbox', '--disable-gpu', '--hide-scrollbars']
    flags += [f'--force-device-scale-factor={SCALE}', f'--window-size={WIDTH},{height}']
    flags += ['--virtual-time-budget=15000', f'--user-data-dir={folder}/profile', action]
    process = subprocess.run(
        [BROWSER, *flags, f'file://{path}'], capture_output=True, text=True, check=True
    )
    return process.stdout


if __name__ == '__main__':
    main(sys.argv[1:])
