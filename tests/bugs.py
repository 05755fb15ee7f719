"""Bugs made by hand, one line each, over all rooms: does a test see each of them?

    uv run python -m tests.bugs [NAME ...]

In a copy of the project each line is changed alone and the tests named beside it are run, which
must fail. Prints a table; the exit status is 1 where a bug went unseen, and an error where a line
is no longer there to be changed. Takes about forty minutes on two cores; no test runs it.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.bugs_in_modules import BUGS_IN_MODULES, Bug

ROOT = Path(__file__).parent.parent

BUGS = BUGS_IN_MODULES | {
    # Workdirs in object storage.
    'a mark before what it is the mark of': Bug(
        'lm/whole.py',
        '    each(one, sizes)\n    check()',
        '    check()',
        'tests/lm/record/test_mirror.py',
    ),
    'a checkpoint deleted before its mark': Bug(
        'lm/whole.py',
        "    bucket.delete([f'{folder}/{MARK}'])\n",
        '',
        'tests/lm/record/test_mirror.py',
    ),
    'half a checkpoint is whole': Bug(
        'lm/whole.py',
        'return all(one is not None and',
        'return True or all(one is not None and',
        'tests/lm/record/test_mirror.py -k half',
    ),
    'a folder that is further on is thrown away': Bug(
        'lm/record/mirror.py',
        'self.copy, self.lease.written_by == self.copy.id',
        'self.copy, False',
        'tests/lm/record/test_mirror.py -k further_on',
    ),
    'a folder from before wins': Bug(
        'lm/record/mirror.py',
        'self.copy, self.lease.written_by == self.copy.id',
        'self.copy, True',
        'tests/lm/record/test_mirror.py -k set_aside',
    ),
    'a lease is taken from one that renews it': Bug(
        'lm/record/lease.py',
        "unchanged > record['seconds']",
        'unchanged >= 0',
        'tests/lm/record/test_lease.py -k refused',
    ),
    'a process without its lease goes on': Bug(
        'lm/record/mirror.py',
        'self.lease.check()  # one that',
        '# one that',
        'tests/test_train_bucket.py -k lost_its_lease',
    ),
    # The language model.
    'an own option loses to its section': Bug(
        'lm/config.py',
        'return found | dict(part.inline)',
        'return dict(part.inline) | found',
        'tests/lm/test_model_norms.py -k behind_a_name',
    ),
    'an option that nobody reads passes': Bug(
        'lm/config.py',
        'value is not None and path not in readers',
        'value is not None and path not in readers and False',
        'tests/lm/test_check_fields.py -k no_chosen_part',
    ),
    'defaults are part of the identity': Bug(
        'lm/config.py',
        'if value != options(part.row)[name].default:',
        'if True:',
        'tests/lm/test_config.py',
    ),
    'auxiliary losses without their weight': Bug(
        'lm/step.py',
        "sums['objective'] += weighed * sums['tokens']",
        "sums['objective'] += total * sums['tokens']",
        'tests/contracts/test_choices.py -k every_number',
    ),
    'a skipped step that is not skipped': Bug(
        'lm/step.py',
        'jnp.where(finite, a, b), new, old)',
        'jnp.where(finite, a, a), new, old)',
        'tests/lm/test_step.py -k skipped',
    ),
    'all experts cost FLOPs': Bug(
        'lm/flops.py',
        "shape['expert'] = config.mlp.experts_per_token",
        'pass',
        'tests/lm/test_flops.py',
    ),
    'eps of a parameter the other way': Bug(
        'lm/state.py',
        'lambda g, factor: g / factor',
        'lambda g, factor: g * factor',
        'tests/lm/test_step.py -k factors',
    ),
    # Records, runs, sweeps.
    'a checkpoint of another model': Bug(
        'lm/record/checkpoint.py',
        "lines = [f'missing",
        "wanted = stored\n    lines = [f'missing",
        'tests/test_train_resumed.py -k another_model',
    ),
    'an old share that is read as the other one': Bug(
        'lm/record/upgrade.py',
        "('norm.momentum', 'norm.ema_decay')",
        "('norm.momentum', 'norm.momentum')",
        'tests/lm/record/test_upgrade.py',
    ),
    'runs in one another': Bug(
        'lm/many.py',
        'run = active_first_R[done]\n',
        'run = active_first_R[0]\n',
        'tests/lm/test_many.py',
    ),
    'a rollback that keeps its step in flight': Bug(
        'lm/run/wave.py',
        'self._forget_pending(i)\n        slot.rolled_back',
        'slot.rolled_back',
        'tests/lm/run/test_wave.py -k "roll"',
    ),
    'one program for unlike models': Bug(
        'lm/sweep/cells.py',
        'if path not in RUN_PATHS or value is None\n',
        "if (path not in RUN_PATHS or value is None) and path != 'model.d_ff'\n",
        'tests/lm/sweep/test_cells.py',
    ),
    'a column named after another field': Bug(
        'eval/columns.py',
        "path.replace('.', '_')",
        "path.split('.')[1]",
        'tests/eval/test_runs.py',
    ),
    # What breaks a run from outside.
    'digests that are not compared': Bug(
        'lm/record/digests.py',
        'if one != wanted:',
        'if not one:',
        'tests/faults/test_checkpoints.py tests/lm/record/test_digests.py',
    ),
    'a best checkpoint that a resume forgets': Bug(
        'lm/record/series.py',
        'self._losses |= self._stored_losses()',
        'pass',
        'tests/lm/record/test_series.py',
    ),
    'rows that no checkpoint waits for': Bug(
        'lm/run/journal.py',
        'self.recorder.sync()  #',
        'pass  #',
        'tests/test_train.py -k synced',
    ),
    'rows behind a damaged one dropped': Bug(
        'lm/record/metrics.py',
        '                row = None\n',
        '                return\n',
        'tests/lm/record/test_metrics.py',
    ),
    'a run that starts over unasked': Bug(
        'lm/run/journal.py',
        'if not start_over:',
        'if start_over:',
        'tests/test_train_resumed.py -k nothing_is_written_over',
    ),
    'a failed start that claims its folder': Bug(
        'lm/record/workdir.py',
        '        before = _config_before(path, say)\n',
        '        before = _config_before(path, say)\n        write_config(path, config)\n',
        'tests/lm/record/test_workdir.py',
    ),
    'as many files as there are cells': Bug(
        'lm/sweep/group.py',
        'return max(1, min(MOST_RUNS, allowed - OTHER_FILES))',
        'return allowed',
        'tests/lm/sweep/test_group.py',
    ),
    'a signal that compiling swallows': Bug(
        'lm/run/signals.py',
        'caught.at_once = True',
        'caught.at_once = False',
        'tests/lm/run/test_signals.py',
    ),
    'a token too many for the vocabulary': Bug(
        'lm/data/prepared.py',
        'if tokens.max() >= self.vocab_size:',
        'if tokens.max() > self.vocab_size:',
        'tests/lm/data/test_prepare.py -k vocabulary',
    ),
    'characters cut in two': Bug(
        'lm/data/utf8.py',
        'return len(data) - present if present < needed else len(data)',
        'return len(data)',
        'tests/lm/data/test_streaming.py',
    ),
    'a piece that several encode': Bug(
        'lm/data/pieces.py',
        "path.with_name(f'{path.name}.lock')",
        "path.with_name(f'{path.name}.{time.monotonic_ns()}.lock')",
        'tests/lm/data/test_pieces.py -k several_processes',
    ),
    'a piece that is taken as it is': Bug(
        'lm/data/pieces.py',
        'self._make(i, _damage_of_piece, wait=True)',
        'self._make(i, _none, wait=True)',
        'tests/lm/data/test_resumed.py -k damaged_piece',
    ),
    'tokens of a damaged copy': Bug(
        'lm/data/prepare.py',
        'found.check(piece)',
        'found.pieces',
        'tests/lm/data/test_resumed.py -k damaged',
    ),
    'a tokenizer of a damaged copy': Bug(
        'lm/data/pieces.py',
        'if self.plan.is_trained:',
        'if False:',
        'tests/lm/data/test_resumed.py -k damaged_scan',
    ),
    'a cut in a damaged copy': Bug(
        'lm/data/split.py',
        'found.check(found.pieces[0])',
        'found.pieces',
        'tests/lm/data/test_resumed.py -k one_document',
    ),
    'every piece from the beginning of the text': Bug(
        'lm/data/split.py',
        'at, documents = piece.start, range(piece.first, piece.stop)',
        'at, documents = 0, range(piece.first, piece.stop)',
        'tests/lm/data/test_pieces.py -k by_one',
    ),
    'documents that end where they do in their piece': Bug(
        'lm/data/prepare.py',
        '(ends + self.starts[-1]).tobytes()',
        'ends.tobytes()',
        'tests/lm/data/test_pieces.py -k by_one',
    ),
    'an error that takes what is done with it': Bug(
        'lm/data/pieces.py',
        'if isinstance(error, ValueError):',
        'if True:',
        'tests/lm/data/test_resumed.py -k leaves_what',
    ),
    'an error of the text that leaves its copy': Bug(
        'lm/data/pieces.py',
        'if isinstance(error, ValueError):',
        'if False:',
        'tests/lm/data/test_pieces.py -k leaves_nothing',
    ),
    'pieces that stay': Bug(
        'lm/data/pieces.py',
        "cache.discard(task.path.parent, f'{name}.*')",
        'task.is_removed()',
        'tests/lm/data/test_pieces.py -k "by_one or beside"',
    ),
    'a second folder of a name is an error': Bug(
        'lm/data/cache.py',
        'if error.errno not in OCCUPIED:',
        'if error.errno:',
        'tests/lm/data/test_pieces.py -k first_folder',
    ),
    'hosts that write into one folder': Bug(
        'lm/data/cache.py',
        'own = socket.gethostname() if is_locked',
        "own = 'all' if is_locked",
        'tests/lm/data/test_pieces.py -k locks_write_apart',
    ),
    'a piece is waited for while a source is not begun': Bug(
        'lm/data/pieces.py',
        'if not self.task.wait:',
        'if self.task.wait is None:',
        'tests/lm/data/test_pieces.py -k mixture',
    ),
    'files read for their digests by every process': Bug(
        'lm/data/cache.py',
        "held.enter_context(locked(folder / 'files.lock', waiting='', say=_nothing))",
        'held.close()',
        'tests/lm/data/test_pieces.py -k digests',
    ),
    'verdicts that are not corrected': Bug(
        'eval/stats.py',
        '(len(tests) - rank) * p_values[i]',
        'p_values[i]',
        'tests/eval/test_stats.py',
    ),
    'the gradient of another activation': Bug(
        'lm/activations.py',
        'start = stop',
        'start = 0',
        'tests/lm/test_activations.py',
    ),
    'a warning at every step': Bug(
        'lm/run/warnings.py',
        'self._warned.add((one.kind, one.layer))',
        'pass',
        'tests/lm/run/test_warnings.py',
    ),
    'one learning rate for two optimizers': Bug(
        'lm/state.py',
        'lr if others is None else others',
        'lr',
        'tests/lm/test_optimizers.py -k rate_of_their_own',
    ),
    'programs that hold what is not given': Bug(
        'lm/sweep/cells.py',
        'if path not in RUN_PATHS or value is None',
        'if path not in RUN_PATHS',
        'tests/lm/test_optimizers.py -k in_no_program',
    ),
    # Objectives.
    'the share of holes with their marks': Bug(
        'modules/objectives.py',
        'share * text)',
        'share * room)',
        'tests/modules/test_objectives.py -k uniform',
    ),
    'a hole filled with the suffix': Bug(
        'modules/objectives.py',
        '(kept[last:], is_text)',
        '(kept[first:], is_text)',
        'tests/modules/test_objectives.py -k together',
    ),
    'a document that keeps its wrong end': Bug(
        'modules/objectives.py',
        'return tokens[1 : 1 + count]',
        'return tokens[-count:]',
        'tests/modules/test_objectives.py -k together',
    ),
    'prefixes of two documents in one': Bug(
        'lm/objectives.py',
        "made.prefix * row['segments'][place]",
        'made.prefix',
        'tests/lm/test_objectives.py -k apart',
    ),
    'rows corrupted by their place on a host': Bug(
        'lm/data/loader.py',
        'default_rng((seed, step, i)) for i in mine',
        'default_rng((seed, step, i)) for i in range(len(mine))',
        'tests/lm/test_objectives.py -k hosts',
    ),
    'a mean over sources by their places': Bug(
        'lm/mixture.py',
        'share * values[name] for name, share in shares',
        'share * value for value, (_, share) in zip(values.values(), shares)',
        'tests/lm/test_mixture.py -k by_name',
    ),
    'shares of the nearest floats': Bug(
        'lm/mixture.py',
        'return Fraction(repr(weight))',
        'return Fraction(weight)',
        'tests/lm/test_mixture.py -k decimal',
    ),
    'sources of a mixture in one order': Bug(
        'lm/data/loader.py',
        '_order(len(own), seed, (source,))',
        '_order(len(own), seed)',
        'tests/lm/data/test_mixed.py -k orders_of_their_own',
    ),
    'epochs of a mixture as of one text': Bug(
        'lm/data/loader.py',
        'max(1, *_epochs(rows, n))',
        'max(1, -(-n // len(rows)))',
        'tests/lm/data/test_mixed.py -k repeat',
    ),
    'a tokenizer of a mixture whatever its texts': Bug(
        'lm/data/mixed.py',
        "_digest('tokenizer of', *sorted(alone))",
        "_digest('tokenizer of', str(len(alone)))",
        'tests/lm/data/test_mixed.py -k found_again',
    ),
    'targets counted one too early': Bug(
        'lm/step.py',
        "batch['targets'][:, 1:]",
        "batch['targets'][:, :-1]",
        'tests/lm/test_objectives.py -k "weights or no_target"',
    ),
    'a prefix that reaches one token less': Bug(
        'lm/step.py',
        "batch['prefix'][:, :-1] if",
        "batch['prefix'][:, 1:] if",
        'tests/lm/test_objectives.py -k reaches',
    ),
    'tiles behind the queries left out': Bug(
        'modules/kernels/attention/blocked.py',
        '_over(i + 1, static.tiles,',
        '_over(i + 1, i + 1,',
        'tests/modules/test_kernels.py -k several_tiles',
    ),
}


def seen(bug: Bug, project: Path) -> bool:
    """Whether a test fails with the bug in the copy `project`, which is mended again."""
    path = project / bug.file
    text = path.read_text()
    if text.count(bug.right) != 1:
        raise ValueError(f'{bug.file} has {text.count(bug.right)} times {bug.right!r}; wanted once')
    path.write_text(text.replace(bug.right, bug.wrong))
    command = f'{sys.executable} -m pytest -q -x -n 0 -p no:cacheprovider {bug.tests}'
    done = subprocess.run(command, shell=True, cwd=project, capture_output=True, text=True)
    path.write_text(text)
    if done.returncode not in (0, 1):
        raise RuntimeError(f'{bug.tests}: {(done.stdout + done.stderr)[-2000:]}')
    return done.returncode == 1


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument('names', nargs='*', help=f'Of {", ".join(BUGS)}; default: all.')
    chosen = parser.parse_args().names or list(BUGS)
    missed = 0
    print('| bug | in | seen | seconds |\n|---|---|---|---|')
    with tempfile.TemporaryDirectory() as folder:
        project = Path(folder) / 'project'
        left_out = shutil.ignore_patterns('.git', '.venv', 'runs', '__pycache__', '*.egg-info')
        shutil.copytree(ROOT, project, ignore=left_out)
        for name in chosen:
            start = time.monotonic()
            caught = seen(BUGS[name], project)
            missed += not caught
            took = time.monotonic() - start
            says = 'yes' if caught else 'NO'
            print(f'| {name} | {BUGS[name].file} | {says} | {took:.0f} |', flush=True)
    print(f'\n{len(chosen) - missed} of {len(chosen)} seen')
    return 1 if missed else 0


if __name__ == '__main__':
    sys.exit(main())
