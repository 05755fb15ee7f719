"""What breaks a run from outside: damaged files, killed processes, full disks, wrong input.

Each test is one case of it, tried once or a few times by the suite and often by the long form:

    uv run python -m tests.faults [pytest's options, such as -k checkpoint]

A case says how often with `@pytest.mark.trials(short=1, long=20)` and takes its number as the
argument `trial`, to seed what it draws; `is_long` is the fixture that says which form runs.
"""
