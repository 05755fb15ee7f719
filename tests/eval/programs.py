"""Programs as processes of their own."""

import os
import subprocess
import sys

from tests.commands import PATIENCE_SEC, ROOT


def run_module(*arguments: str, **env: str) -> subprocess.CompletedProcess:
    """`python -m` of these words, to its end."""
    command, own = [sys.executable, '-m', *arguments], os.environ | env
    how = {'capture_output': True, 'text': True, 'timeout': PATIENCE_SEC}
    return subprocess.run(command, cwd=ROOT, env=own, check=False, **how)
