"""Contract: pages outside the guide list everything."""

import json
import re
import shutil
import tomllib
from pathlib import Path

import pytest
import yaml

from docs import cards, generate
from eval.evaluation.suite_flags import read_suites
from eval.evaluation.targets import evaluate_all, find_targets
from eval.report.page import write_report
from lm.launch import exit_status
from lm.record.metrics import read_rows
from lm.record.remote.mirror import mirror_workdir
from lm.storage.buckets import open_bucket
from lm.storage.files import read_json
from modules.optim.stages import STAGES
from tests import ROOT
from tests.commands import tiny
from tests.sweep_helpers import base
from train import DONE, train, train_sweep

PLACES = {'STEP': r'\d+', 'CELL': '[0-9a-f]{8}', 'DIGEST': '[0-9a-f]{32}'}
PLACES |= {'NAME': '[a-z_]+', 'OPTIONS': '[0-9a-f]{8}'}


class TestStatuses:
    def test_statuses_are_listed_with_launcher_behaviour(self):
        lines = generate.statuses().splitlines()
        rows = [[cell.strip() for cell in line.split('|')[1:-1]] for line in lines if '`' in line]
        statuses = {name.strip('`'): (number, does) for number, name, _, does, _ in rows[1:]}
        again, final = 'restarts the command', 'stops'
        assert statuses == {
            'DONE': (str(exit_status.DONE), final),
            'BAD_INPUT': (str(exit_status.BAD_INPUT), final),
            'DIVERGED': (str(exit_status.DIVERGED), final),
            'DOES_NOT_FIT': ('3', final),
            'RESUME': (str(exit_status.RESUME), again),
            'SIGNALLED': (f'{exit_status.SIGNALLED} + n', again),
        }

    def test_status_without_description_is_an_error(self, monkeypatch):
        path = 'lm/launch/exit_status.py'
        words = {k: v for k, v in generate.STATUSES[path].items() if k != 'RESUME'}
        monkeypatch.setitem(generate.STATUSES, path, words)
        with pytest.raises(ValueError, match=r'exit_status\.py: .*: RESUME'):
            generate.statuses()


def test_start_lists_every_extra():
    """With what the development tools include, and the version of Python."""
    page = (ROOT / 'docs' / 'guide' / 'start.md').read_text()
    project = tomllib.loads((ROOT / 'pyproject.toml').read_text())
    extras = [*project['project']['optional-dependencies']]
    table = page.split('| extra | for |')[1].split('\n\n')[0]
    listed = re.findall(r'`([\w-]+)`', ' '.join(re.findall(r'^\|([^|]*)\|', table, re.MULTILINE)))
    assert sorted(listed) == sorted(extras)
    assert 'all extras except the first three' in page
    (included,) = re.findall(r"'evenkeel\[(.*?)\]'", str(project['dependency-groups']['dev']))
    assert set(extras) - set(included.split(',')) == set(listed[:3])
    assert f'Python {project["project"]["requires-python"].removeprefix(">=")} or newer' in page


def test_stages_are_listed_in_order():
    sections = generate.stages().split('\n## ')[1:]
    named = {text.split()[0]: re.findall(r'`(optim\.\w+)` \|', text) for text in sections}
    assert list(named) == list(STAGES) and named['optimize'] == []
    assert named['resize'] == [
        'optim.match_rms',
        'optim.match_norm',
        'optim.match_norm_floor',
        'optim.update_clip',
    ]


@pytest.mark.parametrize('patterns', [(), ('modules/test_positions.py',)])
def test_part_without_test_is_an_error(monkeypatch, patterns):
    """A table without files, and files that do not name the row. Catches a file that counts for
    rows it does not have.
    """
    monkeypatch.setitem(cards.TESTS, 'model.norm', patterns)
    with pytest.raises(ValueError, match=r'no file of TESTS .* names model\.norm=dyt'):
        cards.find_tests('model.norm', 'dyt')


def test_conflicts_are_listed_with_check_messages():
    assert cards.find_refusal(('model.norm', 'layernorm')) == ''
    words = cards.find_refusal(('optim.name', 'sophia'), ('model.norm', 'powernorm'))
    assert words.startswith('optim.name=sophia needs a forward-mode derivative of the gradient')


def test_citation_has_this_version():
    project = tomllib.loads((ROOT / 'pyproject.toml').read_text())['project']
    cited = yaml.safe_load((ROOT / 'docs' / 'CITATION.cff').read_text())
    page = (ROOT / 'docs' / 'cite.md').read_text()
    bibtex = dict(re.findall(r'^  (\w+) = \{+(.*?)\}+,?$', page, re.MULTILINE))
    (author,) = cited['authors']
    assert cited['license'] == project['license'] and cited['abstract'] == project['description']
    assert cited['version'] == project['version'] == bibtex['version']
    assert (cited['title'], author['name']) == (bibtex['title'], bibtex['author'])


def section(title: str) -> list[str]:
    """Returns the table lines in a section of the page on files."""
    text = (ROOT / 'docs' / 'files.md').read_text().split(f'\n## {title}\n')[1]
    return [line for line in text.split('\n## ')[0].splitlines() if line.startswith('| ')]


def parse_names(lines: list[str], cell: int) -> set[str]:
    return {name for line in lines for name in re.findall('`([^`]+)`', line.split('|')[cell])}


def find_unlisted(files: list[str], *titles: str) -> tuple[set[str], set[str]]:
    """Returns (files that no table of the sections names, names without a file)."""
    names = {name for title in titles for name in parse_names(section(title), 1)}
    patterns = {}
    for name in names:
        text = re.escape(name) + ('.+' if name.endswith('/') else '')
        for place, digits in PLACES.items():
            text = text.replace(place, digits)
        patterns[name] = re.compile(text)
    files_by_name = {
        name: [f for f in files if pattern.fullmatch(f)] for name, pattern in patterns.items()
    }
    return {*files} - {f for fs in files_by_name.values() for f in fs}, {
        n for n in names if not files_by_name[n]
    }


def files_in(folder: Path) -> list[str]:
    return [str(path.relative_to(folder)) for path in folder.rglob('*') if path.is_file()]


@pytest.mark.full
class TestFiles:
    """The page lists the files that real runs leave."""

    def test_run_files_are_documented(self, whole):
        assert find_unlisted(files_in(whole), 'A run') == (set(), set())

    def test_evaluated_run_files_are_documented(self, whole, tmp_path):
        workdir = shutil.copytree(whole, tmp_path / 'run')
        targets = find_targets([str(workdir)], 'all', print)
        assert list(evaluate_all(targets, read_suites('perplexity:4', {}), False, print))
        assert find_unlisted(files_in(workdir), 'A run', 'Evaluations') == (set(), set())
        (path, *_) = workdir.glob('evaluations/*/*')
        assert read_json(path).keys() | {'sha256'} == parse_names(section('Evaluations'), 3)

    def test_run_columns_and_summary_fields(self, whole):
        columns = parse_names(section('metrics.jsonl'), 2)
        assert columns == {name for row in read_rows(whole / 'metrics.jsonl') for name in row}
        summary = json.loads((whole / 'summary.json').read_text()).keys()
        listed = parse_names(section('summary.json'), 1) - {'metrics.jsonl'}
        assert summary - columns == listed - columns

    def test_sweep_files_are_documented(self, corpus, tmp_path):
        cells = ({'optim.lr': 0.01}, {'optim.lr': 0.003})
        assert train_sweep(base(corpus), cells, tmp_path) == DONE
        write_report([tmp_path])
        assert find_unlisted(files_in(tmp_path), 'A sweep') == (set(), set())

    def test_bucket_files_are_documented(self, corpus, bucket_url):
        with mirror_workdir(bucket_url) as workdir:
            assert train(tiny(corpus), workdir) == DONE
        objects = [*open_bucket(bucket_url).list()]
        assert find_unlisted(objects, 'A run', 'A bucket') == (set(), {'.lock'})

    def test_prepared_data_files_are_documented(self, whole, corpus):
        cache = Path(corpus['data.cache_dir'])
        assert find_unlisted(files_in(cache), 'Prepared data') == (set(), set())
