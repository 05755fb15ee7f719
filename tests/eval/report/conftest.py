"""The sweep that pages are of."""

import pytest

from tests.eval import sweep_fixture as fixture


@pytest.fixture(scope='module')
def sweep(tmp_path_factory):
    """The folder of a sweep whose numbers are known in closed form."""
    folder = tmp_path_factory.mktemp('runs') / 'norms'
    fixture.write_sweep(folder)
    return folder
