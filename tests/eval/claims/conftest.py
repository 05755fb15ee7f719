"""A tuned study on disk, which tests of decisions share."""

import pytest


@pytest.fixture(scope='session')
def study(tmp_path_factory):
    """Returns four arms: one is better by 0.1, one diverges, and one has its best rate far out."""
    # Imported here, so that the tests of measures, which do not need it, do not depend on it.
    from tests.eval.claims.tuned_study import write_study

    return write_study(tmp_path_factory.mktemp('claims') / 'study')
