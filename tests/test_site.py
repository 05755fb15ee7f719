"""Contract: the site's search ranks guides first; no page is wider than a phone.

The full tests open the site in docs/_build, which .ci/run builds, in Chromium.
"""

import functools
import html
import http.server
import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import ROOT
from tests.browser import open_page, skip_or_fail

SITE = ROOT / 'docs' / '_build'
BUILD = 'uv run --group docs sphinx-build -c docs . docs/_build'
SCORER = ROOT / 'docs' / '_static' / 'scorer.js'
PHONE_PIXELS = 400
N_FIRST = 3  # results in which the answer must be
QUESTIONS = {  # question: pages that answer it
    'how do I resume a run': ('guide/runs', 'guide/start'),
    'use my own text': ('guide/data',),
    'add a norm': ('tutorials/norm_of_your_own', 'guide/parts'),
    'learning rate sweep': ('guide/sweeps',),
    'compare two optimizers': ('guide/tuning', 'guide/losses_optimizers'),
    'load a checkpoint in python': ('guide/python',),
    'train on TPU pod': ('guide/pods', 'guide/hosts'),
    'out of memory': ('guide/start',),
    'convert to hugging face': ('guide/models',),
    'plot loss in a notebook': ('guide/python',),
    'data parallel devices': ('guide/devices',),
    'muP': ('guide/scaling',),
    'train on several GPUs': ('guide/devices', 'guide/hosts'),
    'how can I use a custom tokenizer': ('guide/data',),
    'fine-tune with LoRA': ('guide/reparametrisations',),
    'log to wandb': ('guide/trackers',),
    'generate text from a checkpoint': ('guide/generation',),
    'which learning rate schedules are there': ('guide/losses_optimizers',),
    'save checkpoints to a bucket': ('guide/buckets',),
    'mixed precision bf16': ('guide/config', 'guide/start'),
    'early stopping': ('coming_from',),
    'write a custom optimizer': ('guide/parts',),
    'change the number of layers': ('guide/config',),
    'sample from the model': ('guide/generation',),
    'metrics_frame': ('reference/python/eval.runs', 'guide/python'),
}
THEME_TEXT = ('Skip to main content', 'Contents', 'System Settings', 'Back to top')

SEARCH = """
const wait = async (ready) => {
  while (!ready()) await new Promise((done) => setTimeout(done, 20));
};
async function look(questions) {
  const results = {};
  for (const question of questions) {
    const frame = document.createElement('iframe');
    frame.src = '/search.html?q=' + encodeURIComponent(question);
    document.body.append(frame);
    const find = (names) => [...(frame.contentDocument?.querySelectorAll(names) ?? [])];
    await wait(() => find('.search-summary').some((e) => e.textContent));
    const items = find('ul.search > li').slice(0, N_FIRST);
    await wait(() => items.every((e) => e.querySelector('.context, span:not(.highlighted)')));
    results[question] = items.map((e) => [
      e.querySelector('a').getAttribute('href'),
      e.querySelector('.context')?.textContent ?? null,
    ]);
    frame.remove();
  }
  return results;
}
""".replace('N_FIRST', str(N_FIRST))

MEASURE = """
async function look(pages) {
  const widths = {};
  for (const page of pages) {
    const frame = document.createElement('iframe');
    frame.style = 'border: 0; height: 800px; width: PHONE_PIXELSpx';
    frame.src = '/' + page;
    document.body.append(frame);
    await new Promise((done) => (frame.onload = done));
    widths[page] = frame.contentDocument.scrollingElement.scrollWidth;
    frame.remove();
  }
  return widths;
}
""".replace('PHONE_PIXELS', str(PHONE_PIXELS))

CHECK = """<!doctype html><body><script>
%s
look(%s).catch((error) => ({threw: error.stack})).then((findings) => {
  const out = document.createElement('pre');
  out.id = 'findings';
  out.textContent = JSON.stringify(findings);
  document.body.replaceChildren(out);
});
</script>"""


def read_weights() -> dict[str, float]:
    """Returns {beginning of a page's name: weight} of the scorer, in its order."""
    (rows,) = re.findall(r'^const PAGE_WEIGHTS = (\[.*?^\]);', SCORER.read_text(), re.S | re.M)
    return dict(json.loads(rows))


def weigh(page: str) -> float:
    return next(weight for path, weight in read_weights().items() if page.startswith(path))


def test_search_page_has_the_scorer():
    conf = (ROOT / 'docs' / 'conf.py').read_text()
    assert "html_search_scorer = str(HERE / '_static' / 'scorer.js')" in conf
    assert re.search(r'^var Scorer = \{\n  score: ', SCORER.read_text(), re.M)


def test_guides_rank_before_reference_and_results():
    pages = ['guide/start', 'tutorials/first_ablation', 'files', 'reference/fields', 'studies']
    pages += ['claims/muon', 'changelog']
    weights = [weigh(f'docs/{page}') for page in pages]
    assert weights == sorted(weights, reverse=True) and len(set(weights)) == len(weights)
    last = ('tests/bench/RESULTS', 'tpu/PLANS', 'configs/studies/results/losses', 'docs/words')
    assert all(weigh(page) < weigh('docs/reference/fields') for page in last)


def test_every_weight_has_a_page():
    """Catches a page that was moved and lost its weight; docs/reference is generated."""
    for path in read_weights():
        assert path == 'docs/reference/' or [*ROOT.glob(f'{path}*')], path


class Site(http.server.SimpleHTTPRequestHandler):
    """Serves the site, and one page that is not in it: check.html."""

    check = ''

    def do_GET(self) -> None:
        if self.path != '/check.html':
            return super().do_GET()
        self.send_response(200)
        self.send_header('Content-Type', 'text/html; charset=utf-8')
        self.end_headers()
        self.wfile.write(self.check.encode())

    def log_message(self, *_) -> None:
        pass


@pytest.fixture(scope='module')
def address() -> Iterator[str]:
    """The address of a server of the site."""
    if not (SITE / 'search.html').exists():
        skip_or_fail(f'{SITE.relative_to(ROOT)} has no site; build it with {BUILD}')
    if SCORER.read_text() not in (SITE / '_static' / 'language_data.js').read_text():
        pytest.fail(f'{SITE.relative_to(ROOT)} is older than the scorer; build it with {BUILD}')
    handler = functools.partial(Site, directory=str(SITE))
    with http.server.ThreadingHTTPServer(('127.0.0.1', 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f'http://127.0.0.1:{server.server_port}'
        server.shutdown()


def look(address: str, script: str, names: list[str], folder: Path) -> dict:
    """Returns the findings of a script about pages or questions."""
    Site.check = CHECK % (script, json.dumps(names))
    flags = ('--virtual-time-budget=600000', '--window-size=1300,900')
    process = open_page(f'{address}/check.html', folder / 'profile', *flags)
    match = re.search(r'<pre id="findings">(.*?)</pre>', process.stdout, re.S)
    assert match, process.stderr
    findings = json.loads(html.unescape(match[1]))
    assert 'threw' not in findings, findings['threw']
    assert findings.keys() == {*names}
    return findings


@pytest.mark.full  # a browser: half a minute
def test_search_answers_questions(address, tmp_path):
    top_links = look(address, SEARCH, [*QUESTIONS], tmp_path)
    wrong = {}
    for question, pages in QUESTIONS.items():
        links = [
            href.partition('.html')[0].removeprefix('docs/') for href, _ in top_links[question]
        ]
        if not {*pages} & {*links}:
            wrong[question] = links
    assert not wrong
    summaries = [text for links in top_links.values() for _, text in links if text is not None]
    assert len(summaries) > 2 * len(QUESTIONS) and all(summaries)
    assert not [text for text in summaries if any(words in text for words in THEME_TEXT)]


@pytest.mark.full  # a browser: half a minute
def test_no_page_is_wider_than_a_phone(address, tmp_path):
    pages = [str(path.relative_to(SITE)) for path in SITE.rglob('*.html')]
    pages = [page for page in pages if not page.startswith('_static') and page != 'index.html']
    widths = look(address, MEASURE, pages, tmp_path)
    assert len(pages) > 150
    assert not {page: width for page, width in widths.items() if width > PHONE_PIXELS}
