"""Suites during training (eval.suites): which they are, and their data, read before the first step.

A run hands its present weights over as a checkpoint (`lm.run.suites`).
"""

import functools
from collections.abc import Callable, Mapping

from eval.evaluation.suite_flags import SuiteRequest, parse_value, read_suite, split_suites
from eval.load import Checkpoint
from eval.suites import SUITES
from eval.suites.base import SuiteResult
from lm.config.recipe import Recipe
from lm.config.texts import parse_names
from lm.run.program import Experiment
from lm.run.suites import Evaluate
from modules.choices import choose
from modules.options import declared_options

FIELD, OPTIONS = 'eval.suites', 'eval.suite_options'
EXAMPLE = "{'grammar': 'minimal_pairs:blimp', 'mine': 'minimal_pairs:pairs.jsonl'}"


def check(recipe: Recipe) -> None:
    """Raises ValueError if eval.suites or eval.suite_options is wrong, or names a suite that cannot
    run during training. No data is read.
    """
    for name, request in read_requests(recipe).items():
        reason = request.suite.refusal
        if request.options.get('source'):
            reason = 'its text would be read at each evaluation. Name the text in eval.texts'
        if reason:
            raise ValueError(
                f'{FIELD}, {name}: {request.name} does not run during training: {reason}. To '
                f'evaluate checkpoints, use "python -m eval --checkpoint=WORKDIR '
                f'--suite={request.name} --step=all".'
            )


def read_requests(recipe: Recipe) -> dict[str, SuiteRequest]:
    """Returns the suites of a recipe by their names in records.

    Raises ValueError, with the field, for another form, an unknown suite or option, and a value
    that an option cannot have.
    """
    text = recipe.eval.suites or ''
    if text.strip().startswith('{'):
        pieces = parse_names(FIELD, text, 'a suite', EXAMPLE)
    else:
        listed = split_suites(text)
        pieces = {piece.partition(':')[0]: piece for piece in listed}
        if len(pieces) < len(listed):
            raise ValueError(
                f'{FIELD}={text} has a suite twice. Name each in a dict: --config.{FIELD}='
                f'"{EXAMPLE}".'
            )
    options = _read_options(recipe.eval.suite_options, pieces)
    return {name: _read_request(piece, options.get(name, {})) for name, piece in pieces.items()}


def _read_request(piece: str, options: Mapping[str, str]) -> SuiteRequest:
    suite = choose(SUITES, piece.partition(':')[0], FIELD)
    name, declared, values = piece.partition(':')[0], declared_options(suite.function), {}
    for option, text in options.items():
        choose(declared, option, f'{OPTIONS}, options of {name}')
        path = f'{name}.{option}'
        try:
            values[path] = parse_value(path, text, declared[option])
        except ValueError as error:
            raise ValueError(str(error).replace(f'--{path}', f'{OPTIONS}, {path}')) from error
    try:
        return read_suite(piece, values)
    except ValueError as error:
        raise ValueError(str(error).replace('--suite', FIELD)) from error


def _read_options(text: str | None, names: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Returns {name of a suite: {option: value}} of eval.suite_options.

    Args:
      text: of the field.
      names: the suites by name.
    """
    by_name: dict[str, dict[str, str]] = {}
    for piece in filter(None, (text or '').split(',')):
        path, equals, value = piece.strip().partition('=')
        name, dot, option = path.partition('.')
        if not (equals and dot):
            raise ValueError(
                f'{OPTIONS} must be NAME.OPTION=VALUE, with commas between, such as '
                f'minimal_pairs.limit=100; got {piece!r}.'
            )
        choose(names, name, f'{OPTIONS}, names of {FIELD}')
        by_name.setdefault(name, {})[option] = value
    return by_name


def open_suites(experiment: Experiment) -> dict[str, Evaluate]:
    """Returns a function for each suite of an experiment, by its name in records.

    The data of the suites are read here. Suites of the validation split have that of the run.

    Raises ValueError, with the name, for data that cannot be read.
    """
    check(experiment.recipe)
    functions = {}
    for name, request in read_requests(experiment.recipe).items():
        evaluate: Callable[..., SuiteResult]
        evaluate = functools.partial(request.suite.function, **request.options)
        if request.suite.reader is not None:
            try:
                evaluate = request.suite.reader(
                    experiment.dataset.tokenizer,
                    experiment.recipe.data.seq_len,
                    **request.options,
                )
            except (ValueError, OSError) as error:
                raise ValueError(f'{FIELD}, {name}: {error}') from error
        functions[name] = functools.partial(_compute_numbers, name, evaluate)
    return functions


def _compute_numbers(
    name: str, evaluate: Callable[..., SuiteResult], checkpoint: Checkpoint
) -> Mapping[str, float]:
    """Returns the numbers of a suite. Its ValueError names the suite."""
    try:
        return evaluate(checkpoint).numbers
    except ValueError as error:
        raise ValueError(f'{FIELD}, {name}: {error}') from error
