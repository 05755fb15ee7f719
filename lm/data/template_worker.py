"""Renders a chat template in a separate process, to contain the effects of a stranger's code.

lm/data/templates.py starts it as a script. It imports only the standard library and Jinja, so
that it starts in tens of milliseconds. It sends OK when it has started. The first message holds the
text of the template; each later message holds a JSON list with the variables of each prompt. An
answer is OK and a JSON list of prompts, FAILED and a reason, or ENDED and a reason. After ENDED the
process ends.
"""

import datetime
import json
import resource
import signal
import sys
from multiprocessing.connection import Connection
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

OK, FAILED, ENDED = b'+', b'-', b'!'
CPU_SEC = 1.0  # to compile, and for each prompt; real templates take milliseconds
MEMORY_BYTES = 3 << 28  # of address space; an interpreter with Jinja takes some 40 MB
MAX_CHARACTERS = 4 << 20  # of a prompt; as many as a request body may have bytes
MAX_REASON_LENGTH = 1000  # characters
MARK_ANSWERS = 'mark_answers'  # the variable that asks for BEGIN and END around answers
# Characters that Unicode reserves for the use within a program; no text has them.
BEGIN, END = '\ufdd0', '\ufdd1'


class GenerationTag(Extension):
    """{% generation %}...{% endgeneration %}, which marks answers in templates for transformers.

    The text between the tags is rendered as if they were absent, between BEGIN and END if the
    variable MARK_ANSWERS is true.
    """

    tags = frozenset({'generation'})  # ty: ignore[invalid-assignment]  # jinja2 only reads it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(('name:endgeneration',), drop_needle=True)
        # As in transformers, variables that the block sets are not visible after it.
        has_marks = nodes.Name(MARK_ANSWERS, 'load')
        call = self.call_method('_render_answer', [has_marks])
        return nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _render_answer(self, has_marks: Any, caller: Any) -> str:
        return f'{BEGIN}{caller()}{END}' if has_marks is True else caller()


def build_environment() -> ImmutableSandboxedEnvironment:
    """Returns a sandbox with the settings, filters and functions of transformers."""

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def strftime_now(form: str) -> str:
        return datetime.datetime.now().strftime(form)

    def to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
    )
    environment.filters['tojson'] = to_json  # Jinja's own escapes HTML
    functions: dict[str, Any] = environment.globals
    functions['raise_exception'] = raise_exception
    functions['strftime_now'] = strftime_now
    return environment


def render(template: jinja2.Template, variables: dict[str, Any]) -> str:
    """Returns a prompt. Raises ValueError if it is longer than MAX_CHARACTERS."""
    pieces, length = [], 0
    # Piece by piece, so that a template that loops is stopped before it fills the memory.
    for piece in template.generate(**variables):
        length += len(piece)
        if length > MAX_CHARACTERS:
            raise ValueError(f'the prompt is longer than {MAX_CHARACTERS:,} characters')
        pieces.append(piece)
    return ''.join(pieces)


def explain(error: BaseException) -> str:
    """Returns the reason for a failure as a single line."""
    if isinstance(error, MemoryError):
        return f'it takes more than {MEMORY_BYTES >> 20} MiB of memory'
    text = ' '.join(str(error).split())[:MAX_REASON_LENGTH]
    expected = jinja2.TemplateError | TypeError | ValueError | LookupError | ArithmeticError
    return text if text and isinstance(error, expected) else f'{type(error).__name__}: {text}'


def main() -> None:
    """Answers messages until the connection is closed or the process has to end."""
    connection = Connection(sys.stdin.fileno())  # a two-way socket, not a pipe
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    template = None
    connection.send_bytes(OK)
    while True:
        try:
            message = connection.recv_bytes()
        except EOFError:  # the server has ended
            return
        # SIGPROF kills the process, even during a function in C.
        signal.setitimer(signal.ITIMER_PROF, CPU_SEC)
        try:
            if template is None:
                template, text = build_environment().from_string(message.decode()), ''
            else:
                prompts = [render(template, variables) for variables in json.loads(message)]
                text = json.dumps(prompts, ensure_ascii=False)
            answer = OK + text.encode()
        except Exception as error:
            # Without a template, memory or stack the process cannot render the next prompt.
            is_spent = template is None or isinstance(error, MemoryError | RecursionError)
            answer = (ENDED if is_spent else FAILED) + explain(error).encode(errors='replace')
        signal.setitimer(signal.ITIMER_PROF, 0)
        connection.send_bytes(answer)
        if answer.startswith(ENDED):
            return


if __name__ == '__main__':
    main()
