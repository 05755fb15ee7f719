"""One short run in each of many homes: users, limits, clocks and folders that deny something.

    sudo uv run python -m tests.faults.homes       needs setpriv, and faketime for the clocks

The other user must be able to read the project and its Python. Prints the status and the last line
of each run. A traceback, a signal or a run of more than a minute ends the program with status 1.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.commands import ROOT

USER, MOST_SEC = 12345, 60
SMALL = {
    'train.steps': 6,
    'model.n_layers': 1,
    'model.d_model': 32,
    'model.n_heads': 2,
    'model.n_kv_heads': 1,
    'data.seq_len': 32,
}
AS_USER = f'setpriv --reuid={USER} --regid={USER} --clear-groups'
# {train} is the command, {home} a folder of the other user, {denied} one without its rights.
HOMES = {
    'another user': 'HOME={home} {user} {train} --workdir={home}/run',
    'a workdir without rights': 'HOME={home} {user} {train} --workdir={denied}/run',
    'a home without rights': 'HOME={denied} {user} {train} --workdir={home}/run',
    'a home that does not exist': 'HOME=/nowhere {user} {train} --workdir={home}/run',
    'neither home nor user': 'env -u HOME -u XDG_CACHE_HOME {user} {train} --workdir={home}/run',
    'no temporary folder': 'HOME={home} TMPDIR={denied} {user} {train} --workdir={home}/run',
    'the locale C': 'HOME={home} LC_ALL=C PYTHONUTF8=0 {user} {train} --workdir={home}/run',
    **{
        f'{n} open files': f'HOME={{home}}; ulimit -n {n}; {{train}} --workdir={{home}}/run'
        for n in (64, 32)
    },
    **{
        f'{n} threads': f"HOME={{home}} {{user}} bash -c 'ulimit -u {n}; {{train}} "
        "--workdir={home}/run'"
        for n in (140, 110, 60)
    },
    **{
        f'the year {year}': f'HOME={{home}} faketime {year}-02-01 {{train}} --workdir={{home}}/run'
        for year in (1971, 2038, 2106)
    },
}


def try_home(command: str) -> tuple[int, str]:
    """Returns (exit status, printed text) of a run in a new folder; the status of a wait is -1."""
    overrides = ' '.join(f'--config.{path}={value}' for path, value in SMALL.items())
    train = f'{sys.executable} train.py --config=configs/default.py {overrides}'
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        home, denied = (Path(folder) / name for name in ('home', 'denied'))
        home.mkdir()
        denied.mkdir(mode=0o755)
        os.chown(home, USER, USER)
        line = command.format(train=train, user=AS_USER, home=home, denied=denied)
        try:
            finished = subprocess.run(
                ['bash', '-c', line], cwd=ROOT, capture_output=True, text=True, timeout=MOST_SEC
            )
        except subprocess.TimeoutExpired:
            return -1, f'no end within {MOST_SEC} s'
        return finished.returncode, finished.stderr if finished.returncode else finished.stdout


if __name__ == '__main__':
    if os.getuid():
        sys.exit('only root can change the user')
    is_clear = True
    for name, command in HOMES.items():
        if 'faketime' in command and not shutil.which('faketime'):
            print(f'{name}: not tried, faketime is not installed')
            continue
        status, text = try_home(command)
        lines = text.strip().splitlines() or ['']
        is_clear &= status in (0, 1) and 'Traceback' not in text
        print(f'{name}: status {status}: {lines[-1][:200]}', flush=True)
    sys.exit(not is_clear)
