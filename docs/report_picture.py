"""Makes docs/_static/report.png: the top of the report of a tuned study.

python -m docs.report_picture [PAGE]

Trains the study (two minutes of CPU time) in a temporary folder, or takes the report of one,
PAGE. Needs Chromium. The picture is readable at 400 pixels, so it has large text, few columns and
one chart.
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
NAME = 'optimizers'  # of the study: the heading of its report
SETTINGS = {
    **{'model.d_model': 32, 'model.n_layers': 2, 'model.d_ff': 64},
    **{'data.tokenizer': 'byte', 'data.seq_len': 32, 'optim.warmup_steps': 10},
    **{'train.steps': 120, 'train.eval_every': 120},
    'sweep': "{'optim.name': ('adamw', 'muon', 'lion')}",
    'tune': "{'optim.lr': None}",
}
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
        page = Path(arguments[0]) if arguments else train(Path(folder) / NAME)
        print(draw(page, Path(folder)))


def train(workdir: Path) -> Path:
    """Trains the study; returns the page that its end writes."""
    program = [sys.executable, 'train.py', '--config=configs/studies/small.py']
    flags = [f'--config.{path}={value}' for path, value in SETTINGS.items()]
    subprocess.run([*program, *flags, f'--workdir={workdir}'], cwd=ROOT, check=True)
    return workdir / 'report.html'


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
