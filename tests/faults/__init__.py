"""Faults from outside a run: damaged files, killed processes, full disks, wrong input.

Each test is one case. The suite tries it once or a few times, and the long form many times:

    uv run python -m tests.faults [--results=FILE] [pytest's options, such as -k checkpoint]

`@pytest.mark.trials(short=1, long=20)` sets the number of trials of a case, and the argument
`trial` is the number of a trial, which seeds its random choices. The fixture `is_long` tells which
form runs.
"""
