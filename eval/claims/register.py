"""The register: the criterion of each claim when it was first read, and the runs ended by then.

claims.json of the workdir has an entry for each claim: the digest of its conditions and studies,
the day, and the number of ended runs on fresh seeds, which decide the verdict. The board reports
conditions that changed later, or that were written after runs had ended.
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
    """Returns the entries of a workdir; {} if there are none."""
    path = workdir / FILE
    return read_json(path) if path.exists() else {}


def add_entries(
    workdir: Path, claims: Sequence[Claim], evidence: Mapping[str, Evidence]
) -> Entries:
    """Adds an entry for each claim without an entry, and returns all entries.

    Args:
      workdir: folder of claims.json.
      claims: claims to register.
      evidence: evidence by study.
    """
    entries, day = read_entries(workdir), datetime.date.today().isoformat()
    added = {
        claim.name: {
            'asked': claim.digest,
            'day': day,
            'fresh_seeds': sum(evidence[study].fresh_runs for study in claim.studies.values()),
        }
        for claim in claims
        if claim.name not in entries
    }
    if added:
        workdir.mkdir(parents=True, exist_ok=True)
        write_json(workdir / FILE, seal_record(entries | added))
    return entries | added


def entry_note(claim: Claim, entries: Entries) -> str:
    """Returns a note if a claim's conditions were recorded late or changed, else ''."""
    entry = entries.get(claim.name)
    if entry is None:
        return 'the criterion was not recorded in advance'
    if entry['asked'] != claim.digest:
        # Boards published before the day was stored have none.
        day = f' on {entry["day"]}' if entry['day'] else ''
        return f'the criterion was changed after it was recorded{day}'
    if entry['fresh_seeds']:
        runs = entry['fresh_seeds']
        return f'the criterion was recorded after {runs} runs on new seeds had ended'
    return ''
