"""The record of what counted for each claim when it was first read, and what was known then.

claims.json of the workdir has an entry a claim: the digest of its conditions and studies, the day,
and how many fresh seeds of its studies, which verdicts are of, had ended by then. Conditions that
change afterwards, or that were written with the outcome at hand, are told on the board.
"""

import datetime
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eval.claims.claim import Claim
from eval.claims.evidence import Evidence
from lm.storage.files import read_json, seal_record, write_json

FILE = 'claims.json'
Entries = dict[str, dict[str, Any]]


def read_entries(workdir: Path) -> Entries:
    """Returns the entries of a workdir; {} before there are any."""
    path = workdir / FILE
    return read_json(path) if path.exists() else {}


def add_entries(
    workdir: Path, claims: Sequence[Claim], evidence: Mapping[str, Evidence]
) -> Entries:
    """Adds claims that have no entry yet, and returns all entries."""
    entries, day = read_entries(workdir), datetime.date.today().isoformat()
    new = {
        claim.name: {
            'asked': claim.digest,
            'day': day,
            'fresh_seeds': sum(evidence[which].fresh_runs for which in claim.studies.values()),
        }
        for claim in claims
        if claim.name not in entries
    }
    if new:
        workdir.mkdir(parents=True, exist_ok=True)
        write_json(workdir / FILE, seal_record(entries | new))
    return entries | new


def entry_note(claim: Claim, entries: Entries) -> str:
    """Says what a reader has to know of when a claim's conditions were written; '' for nothing."""
    entry = entries.get(claim.name)
    if entry is None:
        return 'what counts was not on record before'
    if entry['asked'] != claim.digest:
        return f'what counts was changed after {entry["day"]}, when it went on record'
    if entry['fresh_seeds']:
        return f'{entry["fresh_seeds"]} fresh runs had ended when what counts went on record'
    return ''
