"""Prints the claims board: claims from papers, tested by runs here, with their verdicts.

    python -m eval.claims                                 prints the board of runs/claims
    python -m eval.claims --only=muon,lion                only these claims
    python -m eval.claims --run --hours=2                 trains claims that are not yet tested
    python -m eval.claims --pages=DIR                     writes one page per claim
    python -m eval.claims --record=docs/claims/board.json prints the published board

Verdicts are computed from finished runs. A claim whose runs are missing or unfinished is "not yet
tested"; it is "stale" if its config or code has changed since they ended.
"""

from lm.launch.before_jax import prepare_process

if __name__ == '__main__':
    prepare_process()  # before JAX is imported

import sys
from pathlib import Path

from absl import flags

from eval.claims import board, register
from eval.claims.claim import FOLDER, Claim, read_claims
from eval.claims.decide import Decision, decide
from eval.claims.evidence import open_evidence
from eval.claims.record import merge_decisions, read_record
from eval.claims.train import train_open_claims
from lm.launch.command import run_program
from lm.launch.path_flags import define_path
from lm.study.tables.text import FORMATS, format_table

MAX_HOURS = 1e5  # eleven years; processes wait for at most 292 years


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
    for name, decision in recorded.items():
        # Records in the workdir are newer than board.json, even if they decide less, and the claim
        # may have named a study since.
        newer = [
            study
            for study, config in decision.claim.studies.items()
            if evidence[config].has_records or not decision.evidence[study].command
        ]
        recorded[name] = merge_decisions(decision, decisions[name], newer)
    missing = [claim for claim in claims if claim.name not in recorded]
    # A new workdir would register a criterion as new that was changed since the record.
    entries = register.add_entries(workdir, missing, evidence) | entries
    return list((decisions | recorded).values()), entries


def read_unfinished(
    claims: list[Claim], workdir: Path, decisions: list[Decision]
) -> list[Decision]:
    """Returns the decisions on unfinished claims from the workdir alone.

    Evidence of a board.json has no cost and no plan, so it cannot be trained.

    Args:
      claims: all claims.
      workdir: as in `read_board`.
      decisions: on the claims, perhaps of a record.
    """
    unfinished = {decision.claim.name for decision in decisions if decision.is_unfinished}
    return read_board([claim for claim in claims if claim.name in unfinished], workdir)[0]


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise ValueError(
            f'Flags must begin with --, got {argv[1]}. Select claims with --only={argv[1]}.'
        )
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
    define_path('workdir', 'runs/claims', 'Folder with one subfolder of runs per study.')
    define_path('claims', str(FOLDER), 'Folder with the claim files.')
    flags.DEFINE_list('only', [], 'Names of claims, separated by commas; default: all.')
    flags.DEFINE_bool('run', False, 'Train claims that are not yet tested, cheapest first.')
    text = 'Time limit of --run; the same command resumes.'
    flags.DEFINE_float('hours', None, text, lower_bound=0, upper_bound=MAX_HOURS)
    define_path('pages', None, 'Output folder for the pages and board.json.')
    define_path('record', None, 'board.json to use for claims without runs in --workdir.')
    flags.DEFINE_enum('format', 'table', FORMATS, 'Output format.')
    run_program(main)
