"""Chromium without a window. Tests that need it are skipped without it, unless
EVENKEEL_BROWSER=required, which lets them fail.
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.commands import PATIENCE_SEC

BROWSERS = ('chromium', 'chromium-browser', 'google-chrome', 'chrome')


def skip_or_fail(reason: str) -> None:
    """Skips a test that lacks a browser or a page to open; fails it if a browser is required."""
    if os.environ.get('EVENKEEL_BROWSER') == 'required':
        pytest.fail(f'EVENKEEL_BROWSER=required, but {reason}')
    pytest.skip(reason)


def open_page(url: str, profile: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """Opens a page until its scripts have ended.

    Args:
      url: the page.
      profile: a folder for the browser's own files.
      flags: of the browser, such as its window size and its budget of virtual time.

    Returns:
      The finished process: its output is the page as scripts have left it.
    """
    browser = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if browser is None:
        skip_or_fail(f'none of {", ".join(BROWSERS)} is on PATH')
    command = [browser, '--headless', '--no-sandbox', '--disable-gpu', '--enable-logging=stderr']
    command += [f'--user-data-dir={profile}', '--dump-dom', *flags, url]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_SEC)
