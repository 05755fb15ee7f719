"""A run that nothing disturbs, for comparison."""

import pytest


@pytest.fixture(scope='module')
def whole_run(corpus, tmp_path_factory):
    """The rows of an undisturbed run of 240 steps."""
    # Imported here, so that the other cases do not depend on them.
    from tests.commands import OF_240_STEPS, start_run, wait_for_command
    from tests.sweep_helpers import timeless
    from train import DONE

    workdir = tmp_path_factory.mktemp('whole') / 'run'
    code, stdout = wait_for_command(start_run(workdir, corpus, **OF_240_STEPS))
    assert code == DONE, stdout
    return timeless(workdir)
