"""Bugs made by hand, one line each, over all rooms (`python -m tests.bugs`)."""

from tests.bugs.bug import Bug as Bug
from tests.bugs.claims import CLAIMS
from tests.bugs.modules import MODULES
from tests.bugs.pods import PODS
from tests.bugs.runs import RUNS
from tests.bugs.serving import SERVING
from tests.bugs.tuning import TUNING

BUGS = MODULES | RUNS | PODS | TUNING | CLAIMS | SERVING
