"""Samples text from a checkpoint.

python -m eval.generate --checkpoint=DIR --prompt=TEXT [--prompt=TEXT ...]
    [--tokens=N] [--n=N] [--temperature=T] [--stop=TEXT] [--chat]
python -m eval.generate --checkpoint=DIR --interactive [--chat]
"""

from lm.launch.before_jax import prepare_process

if __name__ == '__main__':
    prepare_process()  # before JAX is imported

import contextlib
import dataclasses
import sys
from collections.abc import Iterator, Sequence

from absl import flags

from eval.load import Checkpoint, define_checkpoint, load
from eval.serve.chat import PlainChat, TemplateChat, build_chat
from eval.serve.refusal import Refusal
from lm.data.tokenizers import Tokenizer
from lm.inference.engine import Engine, Request
from lm.inference.sampling import Sampling
from lm.inference.scoring import next_power_2
from lm.inference.text import generate_texts
from lm.launch.command import parse_flags, run_program

CHECKPOINT = define_checkpoint()
PROMPT = flags.DEFINE_multi_string(
    'prompt', [''], 'Text to continue; empty: begin a document. May be repeated.'
)
TOKENS = flags.DEFINE_integer('tokens', 128, 'Maximum number of new tokens.', lower_bound=1)
N = flags.DEFINE_integer('n', 1, 'Number of samples per prompt.', lower_bound=1)
TEMPERATURE = flags.DEFINE_float(
    'temperature', 0.8, 'Divides the logits; 0: always the most likely token.', lower_bound=0
)
TOP_K = flags.DEFINE_integer(
    'top_k', 0, 'Sample from the K most likely tokens; 0: all.', lower_bound=0
)
TOP_P = flags.DEFINE_float(
    'top_p', 1.0, 'Sample from the fewest tokens with this total probability; 1: all.'
)
MIN_P = flags.DEFINE_float(
    'min_p', 0.0, 'Minimum probability, relative to the most likely token; 0: all.'
)
STOP = flags.DEFINE_multi_string('stop', [], 'Stop string, not printed; may be repeated.')
SEED = flags.DEFINE_integer('seed', 0, 'Seed of the sampling; the i-th text uses seed + i.')
INTERACTIVE = flags.DEFINE_boolean(
    'interactive', False, 'Read prompts line by line, from a terminal or a pipe.'
)
CHAT = flags.DEFINE_boolean('chat', False, "Treat each prompt as a user's message, and answer it.")

SLOTS = 16  # completions that are generated together

Chat = PlainChat | TemplateChat


def generate(
    checkpoint: Checkpoint,
    prompts: Sequence[str],
    tokens: int,
    temperature: float = 0.8,
    top_k: int = 0,
    seed: int = 0,
    *,
    top_p: float = 1.0,
    min_p: float = 0.0,
    stop: Sequence[str] = (),
) -> list[str]:
    """Continues each prompt by up to `tokens` tokens, or to the end of the document.

    Prompts of different length are processed together; a text does not depend on the others. If a
    row reaches data.seq_len tokens, the later half of them is read again from position 0, and the
    earlier tokens are forgotten (`lm.inference.engine`).

    Args:
      checkpoint: as `load` returns it.
      prompts: texts; '' begins a document.
      tokens: maximum number of new tokens for each.
      temperature: divides the logits; 0 takes the likeliest token.
      top_k: samples only from the k likeliest tokens; 0: all.
      seed: the i-th text is sampled with seed + i.
      top_p: samples only from the fewest likeliest tokens with at least this probability in total.
      min_p: samples only from tokens with at least this share of the largest probability.
      stop: strings that end a completion, which excludes them.

    Returns:
      The prompts with their completions.

    Raises:
      ValueError: if a prompt is longer than data.seq_len, or an argument is out of bounds.
    """
    sampling = Sampling(temperature, top_k, top_p, min_p, seed)
    requests = build_requests(checkpoint.tokenizer, prompts, tokens, sampling)
    texts = [checkpoint.tokenizer.decode(request.tokens[1:]) for request in requests]
    for i, piece in stream_texts(build_engine(checkpoint, requests), checkpoint, requests, stop):
        texts[i] += piece
    return texts


def build_requests(
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    tokens: int,
    sampling: Sampling,
    chat: Chat | None = None,
) -> list[Request]:
    """Makes a request for each prompt.

    Args:
      tokenizer: the run's.
      prompts: texts, or a user's messages.
      tokens: maximum number of new tokens for each.
      sampling: options; the i-th request has its seed + i.
      chat: format of messages; None: prompts are texts to continue.

    Raises:
      ValueError: if the model's template refuses a message.
    """
    requests = []
    for i, prompt in enumerate(prompts):
        ids = (
            encode_message(chat, prompt) if chat else [tokenizer.bos_id, *tokenizer.encode(prompt)]
        )
        options = dataclasses.replace(sampling, seed=sampling.seed + i)
        requests.append(Request((*ids,), tokens, options))
    return requests


def encode_message(chat: Chat, message: str) -> list[int]:
    """Returns the tokens of a conversation that begins with a user's message, up to its answer.

    Raises ValueError if the model's template refuses the message.
    """
    try:
        return chat.encode(chat.format_prompt([{'role': 'user', 'content': message}]))
    except Refusal as refusal:
        raise ValueError(refusal.message) from None


def build_engine(checkpoint: Checkpoint, requests: Sequence[Request]) -> Engine:
    """Makes an engine with enough slots and capacity for the requests."""
    longest = max((len(request.tokens) + request.max_tokens for request in requests), default=1)
    capacity = next_power_2(longest)  # few capacities: few programs
    slots = max(1, min(SLOTS, len(requests)))
    return Engine(checkpoint, slots, min(checkpoint.recipe.data.seq_len, capacity))


def stream_texts(
    engine: Engine, checkpoint: Checkpoint, requests: Sequence[Request], stop: Sequence[str]
) -> Iterator[tuple[int, str]]:
    """Yields (index of a request, new text) as the text is generated.

    Args:
      engine: runs the requests.
      checkpoint: the checkpoint of the engine.
      requests: the prompts with their options.
      stop: strings that end a completion, which excludes them.

    Raises:
      ValueError: before any text, if a request cannot be served.
    """
    for request in requests:
        engine.check(request)
    stops = [stop] * len(requests)
    for i, text, _ in generate_texts(engine, checkpoint.tokenizer, requests, stops):
        yield i, text


def print_text(
    engine: Engine, checkpoint: Checkpoint, request: Request, stop: Sequence[str], before: str = ''
) -> None:
    """Prints a completion as it is generated.

    Args:
      engine: runs the request.
      checkpoint: the checkpoint of the engine.
      request: the prompt with its options.
      stop: strings that end the completion, which excludes them.
      before: text to print first.
    """
    engine.check(request)
    print(before, end='', flush=True)
    for _, piece in stream_texts(engine, checkpoint, [request], stop):
        print(piece, end='', flush=True)
    print(flush=True)


def converse(
    checkpoint: Checkpoint,
    tokens: int,
    sampling: Sampling,
    stop: Sequence[str],
    chat: Chat | None = None,
) -> None:
    """Reads prompts line by line, and prints each completion, until Ctrl-C or the last line.

    Each prompt is a separate document: the model does not see previous prompts.

    Args:
      checkpoint: the model to sample from.
      tokens: maximum number of new tokens for each prompt.
      sampling: options.
      stop: strings that end a completion, which excludes them.
      chat: format of messages; None: prompts are texts to continue.
    """
    engine = Engine(checkpoint, slots=1)
    for prompt in read_lines():
        try:
            (request,) = build_requests(checkpoint.tokenizer, [prompt], tokens, sampling, chat)
            print_text(engine, checkpoint, request, stop)
        except ValueError as error:
            print(f'error: {error}', file=sys.stderr)


def read_lines() -> Iterator[str]:
    """Yields lines, typed with history and editing on a terminal, or piped in."""
    if not sys.stdin.isatty():
        yield from (line.rstrip('\n') for line in sys.stdin)
        return
    import readline  # noqa: F401, which gives input() its keys

    while True:
        try:
            yield input('> ')
        except EOFError:
            print()
            return


def main(_) -> None:
    sampling = Sampling(TEMPERATURE.value, TOP_K.value, TOP_P.value, MIN_P.value, SEED.value)
    stop, tokens = STOP.value, TOKENS.value
    if not CHECKPOINT.value:
        raise ValueError('--checkpoint=WORKDIR is required: the workdir of a run')
    if '' in stop:
        raise ValueError('--stop must not be empty: it would end every text. Leave it out.')
    checkpoint = load(CHECKPOINT.value)
    with contextlib.ExitStack() as stack:
        chat = None
        if CHAT.value:
            chat = build_chat(checkpoint.tokenizer, checkpoint.path.parent.parent / 'tokenizer')
            stack.callback(chat.close)
            stop = [*stop, *chat.stops]
        if INTERACTIVE.value:
            with contextlib.suppress(KeyboardInterrupt):
                converse(checkpoint, tokens, sampling, stop, chat)
                return
            print()
            return
        prompts = [prompt for prompt in PROMPT.value for _ in range(N.value)]
        print_texts(checkpoint, prompts, tokens, sampling, stop, chat)


def print_texts(
    checkpoint: Checkpoint,
    prompts: Sequence[str],
    tokens: int,
    sampling: Sampling,
    stop: Sequence[str],
    chat: Chat | None = None,
) -> None:
    """Prints prompts with their completions: a single text as it comes, several at the end.

    Args:
      checkpoint: the model to sample from.
      prompts: texts, or a user's messages.
      tokens: maximum number of new tokens for each prompt.
      sampling: options; the i-th prompt has its seed + i.
      stop: strings that end a completion, which excludes them.
      chat: format of messages; None: prompts are texts to continue.
    """
    requests = build_requests(checkpoint.tokenizer, prompts, tokens, sampling, chat)
    engine = build_engine(checkpoint, requests)
    if chat:
        texts = [f'user: {prompt}\nassistant: ' for prompt in prompts]
    else:
        texts = [checkpoint.tokenizer.decode(request.tokens[1:]) for request in requests]
    if len(requests) == 1:
        print_text(engine, checkpoint, requests[0], stop, before=texts[0])
        return
    for i, piece in stream_texts(engine, checkpoint, requests, stop):
        texts[i] += piece
    print('\n\n'.join(texts))


if __name__ == '__main__':
    run_program(main, parse_flags)
