"""Converts checkpoints: import, export, fold, merge, prune, quantise.

    python -m eval.convert import-hf DIR --out=RUN [--reference=FILE.npz]
    python -m eval.convert export-hf --checkpoint=RUN --out=DIR
    python -m eval.convert export-peft --checkpoint=RUN --out=DIR [--base=NAME]
    python -m eval.convert fold --checkpoint=RUN --out=DIR --to=NORM
    python -m eval.convert merge RUN RUN ... --out=DIR
    python -m eval.convert prune --checkpoint=RUN --out=DIR --remove=important
        --share=0.1 --text=SOURCE
    python -m eval.convert quantise --checkpoint=RUN --out=DIR --method=gptq
        --bits=4 [--block=64] [--text=SOURCE]

import-hf: reads a folder of transformers into a workdir. Several hosts run the
  same command, started as for train.py; each reads its part of the weights.
export-hf: writes a folder that transformers loads.
export-peft: writes the factors of model.reparam=lora as a PEFT adapter.
fold: writes norms and reparametrisation into the weights; logits do not change.
merge: averages runs of one architecture. With --basis=P, rebuilds each run as
  DIR/N from --base and P directions per matrix, and stores the directions.
prune: sets a share of the weights in the blocks to 0, chosen by their
  importance for a text.
quantise: rounds the weights in the blocks to few bits, and packs them.
"""

import sys

from lm.launch.before_jax import prepare_process
from lm.launch.supervisor import supervise_if_several

if __name__ == '__main__':
    if 'import-hf' in sys.argv:  # the others run on one host
        supervise_if_several()
    prepare_process()  # before JAX is imported

import functools
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import flags

from eval.convert import export_hf, export_peft, import_hf, merge, prune, quantise, read_back
from eval.convert.fold import TARGETS, fold_checkpoint, write_workdir
from eval.convert.parts import Parts
from eval.convert.scores import PER, REMOVE, SCORES
from eval.load import Checkpoint, define_checkpoint, load
from lm.config.resolve import (
    digest,
    drop_unread_options,
    resolve,
    single_run_config,
    update_recipe,
)
from lm.launch import distributed
from lm.launch.command import DEFAULT, define_config, parse_flags, run_program
from lm.launch.distributed import check_same_everywhere, is_first, is_multiprocess
from lm.launch.exit_status import DONE
from lm.launch.path_flags import define_path
from lm.launch.this_host import child_host
from lm.model.kernels import rounds_products
from lm.record.run import READ_ERRORS
from lm.record.workdir import check_path
from lm.storage.buckets import parse_local_path
from lm.storage.files import expand_home, first_line, open_regular
from lm.storage.filling import check_empty, fill_folder, open_parts
from lm.training.state import Weights

SAVE_HINT = 'Write it with np.savez(FILE, tokens=TOKENS, logits=LOGITS).'
REPEATED = '...'  # in argument_names: the argument before it may be repeated


class Command(NamedTuple):
    """A command of the program.

    argument_names: the positional arguments after the command's name. required_flags: flags that
    must be given. run: the function that executes it. writes_runs: whether it writes workdirs with
    checkpoints.
    """

    argument_names: tuple[str, ...]
    required_flags: tuple[str, ...]
    run: Callable[..., None]
    writes_runs: bool = True

    def accepts(self, arguments: Sequence[str]) -> bool:
        """Whether the number of positional arguments fits the command."""
        if REPEATED in self.argument_names:
            return len(arguments) >= len(self.argument_names) - 1
        return len(arguments) == len(self.argument_names)


def run(arguments: Sequence[str], options: Mapping[str, Any]) -> None:
    """Executes the command that the arguments name.

    Raises ValueError for an unknown command, and if a required flag is missing.
    """
    command_name, positional = ' '.join(arguments[:1]), arguments[1:]
    command = COMMANDS.get(command_name)
    if command is None or not command.accepts(positional):
        usage = ', '.join(' '.join((n, *c.argument_names)) for n, c in COMMANDS.items())
        raise ValueError(
            f'eval.convert needs one command, followed by flags; got '
            f'{" ".join(arguments) or "none"}. Commands: {usage}.'
        )
    if missing := [f'--{flag}' for flag in command.required_flags if options[flag] is None]:
        raise ValueError(f'eval.convert {command_name} also needs {", ".join(missing)}')
    target = parse_local_path(options['out'], '--out')
    if command.writes_runs:
        check_path(target)
    # Before the model is loaded, so that a bad --out costs no time.
    check_empty(target)
    command.run(*map(expand_home, positional), target=target, options=options)


def fold_run(target: Path, options: Mapping[str, Any]) -> None:
    """Folds a checkpoint, and prints by how much its logits changed."""
    checkpoint = load(options['checkpoint'])
    folded = fold_checkpoint(checkpoint, options['to'], options['untie'])
    meta = checkpoint.meta | {'folded_from': str(checkpoint.path)}
    write_workdir(
        target, folded.recipe, folded.weights, checkpoint.tokenizer, checkpoint.step, meta
    )
    differences = ', '.join(
        f'{value:.1e} in {dtype}' for dtype, value in folded.differences.items()
    )
    before, after = checkpoint.recipe.model, folded.recipe.model
    print(f'{target}: model.norm={before.norm} -> {after.norm}')
    if before.reparam != after.reparam:
        print(f'model.reparam={before.reparam} -> {after.reparam}')
    if folded.norm_obstacle:
        print(f'NOTE: the norms are not folded: {folded.norm_obstacle}')
    print(f'largest difference between logits, relative to the largest: {differences}')


def import_folder(folder: str, target: Path, options: Mapping[str, Any]) -> None:
    """Imports a folder and prints its config. With a reference file, also compares logits.

    Args:
      folder: of the model to import.
      target: the workdir to write.
      options: the flags.
    """
    base, source = options['config'].to_dict(), Path(folder)
    join_hosts(source, base, options['reference'])
    reference = read_reference(Path(options['reference'])) if options['reference'] else None
    imported = import_hf.import_folder(source, base, target, import_hf.all_devices_mesh())
    if reference:
        reference.check_model(imported)
    import_hf.write_run(source, target, imported)
    if is_first():
        print(*import_hf.format_flags(imported.recipe, base), sep='\n')
        for note in imported.notes:
            print(f'NOTE: {note}')
    read_mb, total_mb = imported.n_bytes_read / 1e6, imported.file_bytes / 1e6
    if is_multiprocess():
        print(f'host {jax.process_index()} read {read_mb:,.3f} MB of {total_mb:,.3f} MB of weights')
    if is_first():
        print(f'imported to {target}; to fine-tune, set --config.train.init_from={target}')
    if reference:
        # Loaded from the workdir, so that the comparison includes writing and reading.
        logits_BTV = np.asarray(
            load(target).logits(jax.numpy.asarray(reference.tokens_BT, 'int32'))
        )
        difference = import_hf.largest_difference(logits_BTV, reference.logits_BTV)
        print(f'largest difference between logits, relative to the largest: {difference:.1e}')


class Reference(NamedTuple):
    """Logits of another program, to compare."""

    path: Path
    tokens_BT: np.ndarray
    logits_BTV: np.ndarray

    def check_model(self, imported: import_hf.ImportedModel) -> None:
        """Raises ValueError if the model has another vocabulary."""
        if self.logits_BTV.shape[2] != imported.vocab_size:
            raise ValueError(
                f'--reference={self.path} must have logits of the {imported.vocab_size} tokens of '
                f'the model; got {self.logits_BTV.shape[2]}. Compute them with the same model.'
            )


def read_reference(path: Path) -> Reference:
    """Reads the file of --reference.

    Raises:
      ValueError: unless it is an .npz file with tokens [B, T], whole numbers, and finite logits
        [B, T, V] for them.
    """
    rule = f'--reference={path} must be an .npz file with tokens [B, T] and logits [B, T, V]'
    try:
        with open_regular(path) as file:
            arrays = np.load(file)
            if isinstance(arrays, np.ndarray):
                raise ValueError('it has a single array without a name')
            tokens, logits = arrays['tokens'], arrays['logits']
    except (*READ_ERRORS, EOFError, MemoryError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(f'{rule}; got {first_line(error)}. {SAVE_HINT}') from error
    has_shapes = tokens.ndim == 2 and logits.ndim == 3 and logits.shape[:2] == tokens.shape
    if not has_shapes or not logits.size:
        raise ValueError(
            f'{rule}; got tokens {list(tokens.shape)} and logits {list(logits.shape)}. {SAVE_HINT}'
        )
    is_whole, is_real = (
        np.issubdtype(array.dtype, kind)
        for array, kind in ((tokens, np.integer), (logits, np.floating))
    )
    if not is_whole or not is_real:
        raise ValueError(
            f'{rule}: whole and real numbers; got {tokens.dtype} and {logits.dtype}. {SAVE_HINT}'
        )
    if not 0 <= tokens.min() <= tokens.max() < logits.shape[2] or not np.isfinite(logits).all():
        raise ValueError(
            f'{rule}: tokens from 0 to {logits.shape[2] - 1}, and finite logits; got tokens from '
            f'{tokens.min()} to {tokens.max()}. {SAVE_HINT}'
        )
    return Reference(path, tokens, logits)


def join_hosts(folder: Path, base: Mapping[str, Any], reference: str | None) -> None:
    """Joins the other processes of the job, if there are any.

    Args:
      folder: of the model to import, which all hosts must see.
      base: the config of the import.
      reference: file of reference logits, or None.

    Raises:
      ValueError: if the hosts see different files, or if there is a reference on several hosts,
        since a single process compares the logits.
    """
    if child_host() is None:
        return
    if reference:
        raise ValueError(
            '--reference compares logits on a single host; leave it out on several hosts'
        )
    run_config = single_run_config(base)
    # Arrays over several hosts need the same config and the same tensors on each.
    distributed.join(digest(resolve(run_config)))
    check_same_everywhere(f'the content of {folder}', import_hf.digest_folder(folder))


def export_run(target: Path, options: Mapping[str, Any]) -> None:
    """Exports a checkpoint, reads the files back, and prints by how much their logits differ."""
    checkpoint, dtype = load(options['checkpoint']), options['dtype']
    exported = export_hf.export_checkpoint(checkpoint, dtype)
    notes = export_hf.write_folder(target, checkpoint, exported, dtype)
    print(f'{target}: model_type={exported.model_type}, weights in {dtype}')
    for note in notes:
        print(f'NOTE: {note}')
    comparison = read_back.compare_files(target, checkpoint, exported.stored_difference)
    print(comparison.describe(target))
    if rounds_products(checkpoint.recipe):
        difference = read_back.rounding_difference(checkpoint)
        matmul = checkpoint.recipe.kernels['matmul']
        print(
            f'NOTE: the run rounds the operands of its products ({matmul}), and transformers does '
            'not: logits of the run differ from those of the files by '
            f'{difference:.1e} of the largest'
        )


def export_adapter(target: Path, options: Mapping[str, Any]) -> None:
    """Exports the factors of a checkpoint, and prints their modules."""
    checkpoint = load(options['checkpoint'])
    adapter = export_peft.export_adapter(checkpoint, options['base'])
    export_peft.write_folder(target, adapter, checkpoint.tokenizer)
    modules, n = adapter.config['target_modules'], sum(x.size for x in adapter.tensors.values())
    print(f'{target}: {n:,} parameters, r={adapter.config["r"]}, modules {", ".join(modules)}')


def merge_runs(*runs: str, target: Path, options: Mapping[str, Any]) -> None:
    """Merges runs into their mean, or into a basis with rebuilt runs, and prints the errors."""
    keep, p, base = (options[name] for name in ('keep', 'basis', 'base'))
    merge.check_arguments(runs, keep, p, base)
    checkpoints = [load(path) for path in runs]
    if p is None:
        weights = merge.merge_checkpoints(checkpoints, keep)
        sources = [str(checkpoint.path) for checkpoint in checkpoints]
        write_like(checkpoints[0], target, weights, {'merged_from': sources})
        print(f'{target}: mean of {len(runs)} models{", with rescaled matrices" if keep else ""}')
        return
    start = load(base)
    compressed = merge.compress_to_basis(start, checkpoints, p)
    with fill_folder(target):
        merge.write_bases(target / merge.BASIS, compressed.bases)
        for i, (checkpoint, weights) in enumerate(
            zip(checkpoints, compressed.weights, strict=True)
        ):
            write_like(
                checkpoint,
                target / str(i + 1),
                weights,
                {'rebuilt_from': [str(start.path), p]},
            )
            print(f'{target / str(i + 1)}: {runs[i]}, relative error {compressed.errors[i]:.3g}')
    whole = sum(x.nbytes for x in merge.flat_params(start).values())
    print(
        f'{target / merge.BASIS}: {compressed.n_bytes / 1e6:,.3f} MB besides the base, instead of '
        f'{len(runs) * whole / 1e6:,.3f} MB for {len(runs)} models'
    )


def prune_run(target: Path, options: Mapping[str, Any]) -> None:
    """Prunes a checkpoint, and prints how many weights were removed."""
    pruning = prune.Pruning(**{field.name: options[field.name] for field in fields(prune.Pruning)})
    text, general = options['text'], options['general']
    pruning.check_general(general)
    checkpoint = load(options['checkpoint'])
    tokens_BT = prune.read_text_rows(checkpoint, text, '--text')
    general_BT = prune.read_text_rows(checkpoint, general, '--general') if general else None
    pruned = prune.prune_checkpoint(checkpoint, tokens_BT, pruning, general_BT)
    origin = {'pruned_from': str(checkpoint.path), 'removed': asdict(pruning) | {'text': text}}
    origin['removed']['general'] = general
    write_like(checkpoint, target, prune.to_weights(checkpoint, pruned.params), origin)
    print(
        f'{target}: set {pruned.n_removed:,} of {pruned.n_weights:,} weights of the blocks to 0, '
        f'chosen by {tokens_BT.size:,} tokens of {text}'
    )


def quantise_run(target: Path, options: Mapping[str, Any]) -> None:
    """Rounds the weights of a checkpoint, and prints the mean bits and the error."""
    mix = tuple(parse_whole_numbers(options['mix'], '--mix'))
    quantisation = quantise.Quantisation(options['method'], options['bits'], options['block'], mix)
    text = options['text']
    quantisation.check_text(text)
    checkpoint = load(options['checkpoint'])
    tokens_BT = None
    if text:
        tokens_BT = prune.read_text_rows(checkpoint, text, '--text', quantise.ROW_LENGTH)
    parts = Parts(open_parts(target))
    quantised = quantise.Quantiser(checkpoint, tokens_BT).quantise(quantisation, parts)
    if parts.n_found:
        print(f'{parts.n_found} parameters were rounded before, by an interrupted command')
    origin = {'quantised_from': str(checkpoint.path)}
    origin['quantised'] = asdict(quantisation) | {'text': text, 'mean_bits': quantised.mean_bits}
    # An average of the weights would be stored beside them, as large as before.
    recipe = drop_unread_options(update_recipe(checkpoint.recipe, {'optim.average': 'none'}))
    written = replace(checkpoint, recipe=recipe)
    write_like(written, target, prune.to_weights(checkpoint, quantised.params), origin)
    exponent = quantised.exponent
    print(
        f'{target}: rounded {quantised.n_weights:,} weights of the blocks to '
        f'{quantised.mean_bits:.3g} bits, relative error {quantised.error:.3g}'
        + (f', exponent {exponent:.2f}' if exponent is not None else '')
    )
    print(
        f'{quantised.n_bytes / 1e6:,.3f} MB instead of {4 * quantised.n_weights / 1e6:,.3f} MB: '
        f'{8 * quantised.n_bytes / quantised.n_weights:.3g} bits of a weight, with its scales'
    )


def parse_whole_numbers(texts: Sequence[str], flag: str) -> list[int]:
    """Returns whole numbers. Raises ValueError for other text, which names the flag."""
    try:
        return [int(text) for text in texts]
    except ValueError as error:
        raise ValueError(f'{flag} must be whole numbers, such as 2,4,8; got {texts}') from error


def write_like(
    checkpoint: Checkpoint, workdir: Path, weights: Weights, origin: dict[str, Any]
) -> None:
    """Writes a workdir with new weights for the model of a checkpoint, at the same step.

    Args:
      checkpoint: gives the recipe, tokenizer, step and metadata.
      workdir: an empty or new folder.
      weights: the new weights.
      origin: metadata on the source of the weights.
    """
    recipe, meta = merge.standalone_recipe(checkpoint.recipe), checkpoint.meta | origin
    write_workdir(workdir, recipe, weights, checkpoint.tokenizer, checkpoint.step, meta)


COMMANDS = {
    'fold': Command((), ('checkpoint', 'out', 'to'), fold_run),
    'import-hf': Command(('DIR',), ('out',), import_folder),
    'export-hf': Command((), ('checkpoint', 'out'), export_run, writes_runs=False),
    'export-peft': Command((), ('checkpoint', 'out'), export_adapter, writes_runs=False),
    'merge': Command(('RUN', REPEATED), ('out',), merge_runs),
    'prune': Command((), ('checkpoint', 'out', 'remove', 'share', 'text'), prune_run),
    'quantise': Command((), ('checkpoint', 'out', 'method', 'bits'), quantise_run),
}


def main(argv: list[str]) -> None:
    run(argv[1:], flags.FLAGS.flag_values_dict())
    distributed.leave(DONE)


if __name__ == '__main__':  # only here: other programs have flags of these names
    define_checkpoint()
    define_config()
    flags.FLAGS.set_default('config', str(DEFAULT))
    define_path('out', None, 'Folder to write; it must be empty or not exist.')
    text = 'import-hf: .npz file with tokens [B, T] and logits [B, T, V] to compare.'
    define_path('reference', None, text)
    text = 'export-hf: dtype of the exported weights.'
    flags.DEFINE_enum('dtype', 'float32', [*export_hf.DTYPES], text)
    text = 'export-peft: name of the base model; merge: common start of the runs.'
    flags.DEFINE_string('base', '', text)
    flags.DEFINE_string('to', None, f'fold: the new model.norm: {", ".join(TARGETS)}.')
    flags.DEFINE_bool('untie', False, 'fold: store tied embeddings as two matrices.')
    text = 'merge: rescale each mean to the variance of its parts.'
    flags.DEFINE_enum('keep', None, ['variance'], text)
    flags.DEFINE_integer('basis', None, 'merge: directions per matrix to rebuild each run from.')
    flags.DEFINE_enum('remove', None, [*REMOVE], 'prune: weights to remove.')
    flags.DEFINE_float(
        'share', None, 'prune: share of the inputs of each output, or of each matrix, to remove.'
    )
    text = 'prune, quantise: data.source of the text, such as text:GLOB.'
    flags.DEFINE_string('text', None, text)
    flags.DEFINE_enum('score', prune.Pruning.score, [*SCORES], 'prune: the score.')
    text = 'prune: what --share applies to; default: as published.'
    flags.DEFINE_enum('per', None, [*PER], text)
    flags.DEFINE_string('general', None, 'prune: data.source of general text, for dual scores.')
    text = 'prune: weight of the general importance in dual scores.'
    flags.DEFINE_float('strength', prune.Pruning.strength, text)
    flags.DEFINE_integer('seed', 0, 'prune: seed of --remove=random.')
    text = 'quantise: how to round.'
    flags.DEFINE_enum('method', None, [*quantise.METHODS], text)
    text = 'quantise: bits of a weight; their mean with --method=baq or --mix.'
    flags.DEFINE_integer('bits', None, text)
    text = 'quantise: bits to choose from by matrix, such as 2,4,8.'
    flags.DEFINE_list('mix', [], text)
    text = 'quantise: inputs of an output that share a scale; 0: all.'
    flags.DEFINE_integer('block', 0, text)
    distributed.define_flags()  # of several hosts, for import-hf
    run_program(main, functools.partial(parse_flags, has_arguments=True))
