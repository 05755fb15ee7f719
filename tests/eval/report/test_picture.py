"""The picture of a report on the front page (docs/report_picture.py)."""

import re
import struct

import pytest

from docs import report_picture
from eval.report.page import write_report
from tests.eval import tuned_fixture as tuned

MOST_BYTES = 300_000  # the front page loads it


def test_picture_is_small_and_has_stated_width():
    content = report_picture.PICTURE.read_bytes()
    width, height = struct.unpack('>II', content[16:24])
    assert len(content) < MOST_BYTES
    assert width == report_picture.WIDTH * report_picture.SCALE < height < 3 * width


@pytest.mark.full
def test_top_has_only_some_columns(tmp_path):
    """Catches a column of the table that is renamed, so that the picture loses it."""
    losses = {'rmsnorm': tuned.bowl(3.0, 0.5, 0.01, 1), 'dyt': tuned.bowl(3.1, -2.0, 0.01, 2)}
    tuned.write_tuned(tmp_path / 'norms', losses, {'optim.lr': None})
    page = report_picture.select_top(write_report(tmp_path / 'norms').read_text())
    table = re.search(r'<table class="[^"]*\barms">.*?</table>', page, re.DOTALL)[0]
    heads = re.findall(r'<button>(.*?)</button>', table)
    hidden = {int(i) - 1 for i in re.findall(r'nth-child\((\d+)\)', page.partition('<body>')[0])}
    visible = [head for i, head in enumerate(heads) if i not in hidden]
    assert visible == list(report_picture.COLUMNS) and 'stacked' not in table
    assert f'"labelFontSize":{report_picture.CHART_FONT}' in page
    for fragment in ('class="findings"', 'id="tuned_losses"', '<h1>norms</h1>'):
        assert fragment in page
