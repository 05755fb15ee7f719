"""Programs that are not here: shell scripts on PATH that record their arguments and give prepared
answers.
"""

import os
from pathlib import Path

# Flags with characters that are special in a shell.
SWEEP = "--config.sweep={'optim.lr': (1e-3, 3e-3)}"
NASTY = (
    '--config=configs/default.py',
    SWEEP,
    '--config.data.source=text:/a b/*.txt',
    '$HOME `id` "quoted" \\ ;|&<> #!',
    "it's",
    'two\nlines  and two blanks',
    '',
)
# A train.py (`conftest.trainer`) that trains until SIGTERM.
UNTIL_SIGTERM = """
import signal, time
def stop(number, frame):
    print('saved'); sys.exit(128 + number)
signal.signal(signal.SIGTERM, stop)
print('begun', flush=True)
while True: time.sleep(0.02)
"""
SEPARATORS = '\x1f', '\x1e'  # of arguments, of calls
STUB = """#!/bin/sh
here={here}
{{ printf '%s\\037' "$@"; printf '\\036'; }} >> "$here/calls"
for key in "$@" any; do [ -e "$here/$key.1" ] && break; done
[ -e "$here/$key.1" ] || exit 0
n=$(cat "$here/$key.n" 2>/dev/null || echo 1)
[ -e "$here/$key.$((n + 1))" ] && echo $((n + 1)) > "$here/$key.n"
. "$here/$key.$n"
"""


class Stub:
    """answers: {'describe': ['echo ACTIVE', ...]} is shell text for each call with that argument,
    in order, the last for all later calls; 'any' is for calls without an answer.
    """

    def __init__(self, monkeypatch, folder: Path, name: str, **answers: list[str]):
        self.folder = folder / f'stub-{name}'
        self.folder.mkdir()
        program = folder / 'bin' / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(STUB.format(here=self.folder))
        program.chmod(0o755)
        for key, texts in answers.items():
            for i, text in enumerate(texts, 1):
                (self.folder / f'{key}.{i}').write_text(text + '\n')
        path = os.environ['PATH']
        if str(program.parent) not in path.split(os.pathsep):
            monkeypatch.setenv('PATH', f'{program.parent}{os.pathsep}{path}')

    @property
    def calls(self) -> list[list[str]]:
        file = self.folder / 'calls'
        records = file.read_text().split(SEPARATORS[1])[:-1] if file.exists() else []
        return [record.split(SEPARATORS[0])[:-1] for record in records]

    def verbs(self, among: str) -> list[str]:
        """Returns the first word of each call that is one of `among`, in order."""
        return [next(word for word in call if word in among.split()) for call in self.calls]
