"""Runs programs as separate processes."""

import os
import subprocess
import sys

from tests.commands import PATIENCE_SEC, ROOT


def run_module(*arguments: str, **env: str) -> subprocess.CompletedProcess:
    """Runs `python -m` with these arguments, to its end."""
    command, environment = [sys.executable, '-m', *arguments], os.environ | env
    options = {'capture_output': True, 'text': True, 'timeout': PATIENCE_SEC}
    return subprocess.run(command, cwd=ROOT, env=environment, check=False, **options)
