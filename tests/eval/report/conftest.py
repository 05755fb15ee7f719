"""The sweep of the report tests."""

import pytest

from tests.eval import sweep_fixture as fixture


@pytest.fixture(scope='module')
def sweep(tmp_path_factory):
    """Returns the folder of a sweep with numbers known in closed form."""
    folder = tmp_path_factory.mktemp('runs') / 'norms'
    fixture.write_sweep(folder)
    return folder
