"""The flag --json, with which a program prints its result as JSON in its last line."""

import json
from collections.abc import Mapping
from typing import Any

from absl import flags

from lm.record.metrics import replace_non_finite

flags.disclaim_key_flags()  # flags that are defined here belong to the program that asks for them


def define_json() -> flags.FlagHolder[bool | None]:
    """Defines --json."""
    return flags.DEFINE_bool('json', False, 'Print the result as a JSON object in the last line.')


def print_json(record: Mapping[str, Any]) -> None:
    """Prints one line of JSON on standard output; numbers that are not finite become null."""
    print(json.dumps(replace_non_finite(dict(record)), allow_nan=False), flush=True)
