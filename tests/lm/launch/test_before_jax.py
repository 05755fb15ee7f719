"""What a program does before it imports JAX."""

import subprocess
import sys

from tests import ROOT


def test_no_program_has_imported_jax_when_it_prepares_its_process():
    """Catches a package that imports JAX where `python -m PACKAGE` imports it first: the program
    would read the flags too early, and import everything twice.
    """
    programs = [path for path in ROOT.glob('eval/**/*.py') if 'prepare_process' in path.read_text()]
    assert len(programs) > 4
    packages = {'.'.join(path.relative_to(ROOT).parts[:-1]) for path in programs}
    names = ', '.join(sorted(packages))
    code = f'import sys, {names}, lm.launch.before_jax; print("jax" in sys.modules)'
    done = subprocess.run(
        [sys.executable, '-c', code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == 'False\n'
