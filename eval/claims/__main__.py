"""Prints the board of claims: statements of papers and the verdicts of runs, a line each.

    python -m eval.claims [--workdir=runs/claims] [--only=NAME[,NAME]]
    python -m eval.claims --run [--hours=H]     trains open claims, cheapest first; resumes later
    python -m eval.claims --pages=DIR           writes the board, a page a claim, and board.json
    python -m eval.claims --record=docs/claims/board.json      a recorded board, without its runs

The board is computed from records alone. A claim is open if its studies have no records or
unfinished records, stale if a config has changed since, and without verdict if its file has
WITHDRAWN.
"""

from lm.launch.before_jax import prepare_process

if __name__ == '__main__':
    prepare_process()  # before JAX is imported

import sys
from pathlib import Path

from absl import flags

from eval.claims import board, register
from eval.claims.claim import FOLDER, Claim, read_claims
from eval.claims.decide import UNFINISHED, Decision, decide
from eval.claims.evidence import open_evidence
from eval.claims.record import read_record
from eval.claims.train import train_open_claims
from lm.launch.command import run_program
from lm.launch.path_flags import define_path
from lm.study.tables.text import FORMATS, format_table


def read_board(
    claims: list[Claim], workdir: Path, record: Path | None = None
) -> tuple[list[Decision], register.Entries]:
    """Returns the decision on each claim, and the register entries of all claims.

    Args:
      claims: claims to decide, in order.
      workdir: folder with a record of each study and measure.
      record: a board.json, used for claims without records in the workdir.

    Returns:
      (decisions, entries): entries by claim name, as `register.add_entries` returns them.
    """
    names = dict.fromkeys(study for claim in claims for study in claim.studies.values())
    evidence = {name: open_evidence(name, workdir) for name in names}
    # Claims of the record too: their conditions must name arms that exist.
    decisions = {claim.name: decide(claim, evidence) for claim in claims}
    recorded, entries = read_record(record, claims) if record else ({}, {})
    for name in list(recorded):
        # Records in the workdir are newer than board.json, even if they decide less.
        if any(evidence[study].has_records for study in decisions[name].claim.studies.values()):
            del recorded[name]
            entries.pop(name, None)
    missing = [claim for claim in claims if claim.name not in recorded]
    entries |= register.add_entries(workdir, missing, evidence)
    return list((decisions | recorded).values()), entries


def read_unfinished(
    claims: list[Claim], workdir: Path, decisions: list[Decision]
) -> list[Decision]:
    """Returns the decisions on unfinished claims by the workdir alone: a record of a board cannot
    be trained or planned.

    Args:
      claims: all claims.
      workdir: as in `read_board`.
      decisions: on the claims, perhaps of a record.
    """
    unfinished = {decision.claim.name for decision in decisions if decision.verdict in UNFINISHED}
    return read_board([claim for claim in claims if claim.name in unfinished], workdir)[0]


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise ValueError(f'flags begin with --; claims are named by --only={argv[1]}')
    args = flags.FLAGS
    claims, workdir = read_claims(Path(args.claims), args.only), Path(args.workdir)
    record = Path(args.record) if args.record else None
    decisions, entries = read_board(claims, workdir, record)
    if args.run:
        train_open_claims(read_unfinished(claims, workdir, decisions), args.hours)
        decisions, entries = read_board(claims, workdir, record)
    rows = board.table_rows(decisions, entries)
    print(format_table(rows, list(rows[0]), args.format))
    is_text = args.format in ('table', 'markdown')  # programs read the others
    print('\n'.join(board.summary_lines(decisions)), file=sys.stdout if is_text else sys.stderr)
    if args.pages:
        for path in board.write_pages(Path(args.pages), decisions, entries):
            print(path, file=sys.stdout if is_text else sys.stderr)


if __name__ == '__main__':
    define_path('workdir', 'runs/claims', 'Folder of the records, one below it a study.')
    define_path('claims', str(FOLDER), 'Folder of the files of claims.')
    flags.DEFINE_list('only', [], 'Claims, by the names of their files; with commas.')
    flags.DEFINE_bool('run', False, 'Train what is open, the cheapest study first.')
    flags.DEFINE_float('hours', None, 'Hours to train at most; the same command goes on.')
    define_path('pages', None, 'Folder to write the board and a page a claim to.')
    define_path('record', None, 'board.json, for claims that the workdir has no runs of.')
    flags.DEFINE_enum('format', 'table', FORMATS, 'How to print the board.')
    run_program(main)
