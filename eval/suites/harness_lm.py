"""A checkpoint as lm-evaluation-harness has models: what a request asks, scored or generated.

Imports lm_eval, of the extra `harness`: only eval.suites.harness imports this file, when it is run.
"""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from eval.load import Checkpoint
from lm.inference.engine import Engine, Request
from lm.inference.sampling import Sampling
from lm.inference.scoring import Scorer
from lm.inference.text import generate_texts
from modules.choices import suggest_nearest

CHUNK_ROWS = 1024  # rows that are scored, then kept in the harness's cache, before others
MAX_GEN_TOKS = 256  # of requests that do not say, as in the harness's own models
CHAT = (
    'the harness asks for a chat template, and a checkpoint has none: texts are read as documents. '
    'Ask for tasks without one.'
)
#: Options of `generate_until` requests, besides those that say how long a text is.
GENERATION_OPTIONS = (
    'until',
    'max_gen_toks',
    'do_sample',
    'temperature',
    'top_k',
    'top_p',
    'min_p',
)


class CheckpointLM(TemplateLM):
    """A loaded checkpoint. Each request is a document of its own: BOS, its context, what is asked.

    Where that is longer than data.seq_len, its beginning is left out.
    """

    def __init__(self, checkpoint: Checkpoint):
        super().__init__()
        self._checkpoint = checkpoint
        self._bos = checkpoint.tokenizer.bos_id
        self.max_length = checkpoint.recipe.data.seq_len
        self._scorer = Scorer(checkpoint)

    @functools.cached_property
    def _engine(self) -> Engine:
        return Engine(self._checkpoint)

    @property
    def eot_token_id(self) -> int:
        return self._checkpoint.tokenizer.eos_id

    @property
    def prefix_token_id(self) -> int:
        """Returns BOS, behind which a text without a context is scored."""
        return self._bos

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Returns the tokens of a text; BOS is put before contexts later."""
        del add_special_tokens, kwargs
        return list(self._checkpoint.tokenizer.encode(string)) if string else []

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[tuple[str, str], list[int], list[int]]],
        disable_tqdm: bool = False,
        **kwargs: Any,
    ) -> list[tuple[float, bool]]:
        """Returns (sum of log p of the continuation, whether it is what greedy decoding gives)."""
        del disable_tqdm, kwargs
        pairs = []
        for (context, continuation), before, asked in requests:
            if len(asked) > self.max_length:
                raise ValueError(
                    f'a continuation has {len(asked)} tokens, and this model scores '
                    f'{self.max_length} (data.seq_len): {continuation[:40]!r}... behind '
                    f'{context[-40:]!r}.'
                )
            before = before if before[:1] == [self._bos] else [self._bos, *before]
            pairs.append((before, asked))
        texts = [request[0] for request in requests]
        return self._score_pairs(
            pairs, lambda i, found: self._cache_value('loglikelihood', texts[i], found)
        )

    def loglikelihood_rolling(
        self, requests: Sequence[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Returns the sum of log p of each text, every token once; windows of data.seq_len tokens
        do not overlap, and the last one has as much context as fits.
        """
        del disable_tqdm
        windows, owners = [], []
        for i, request in enumerate(requests):
            tokens = self.tok_encode(request.args[0])
            for window in get_rolling_token_windows(tokens, self._bos, self.max_length, 1):
                windows.append(make_disjoint_window(window))
                owners.append(i)
        scored = self._score_pairs(windows, lambda i, found: None)
        sums = np.bincount(owners, [log_p for log_p, _ in scored], len(requests)).tolist()
        for request, total in zip(requests, sums, strict=True):
            self._cache_value('loglikelihood_rolling', request.args, total)
        return sums

    def _score_pairs(self, pairs: Sequence[tuple[list[int], list[int]]], on_score) -> list[tuple]:
        """Returns (sum of log p, whether all are the likeliest) of the second tokens of each pair
        given the first; done(i, result) is called when a result is there.

        Longer rows come first, so that those scored together are of about one length.
        """
        rows = [[*before, *asked][-self.max_length - 1 :] for before, asked in pairs]
        order = sorted(range(len(rows)), key=lambda i: -len(rows[i]))
        found = [(0.0, True)] * len(rows)
        for start in range(0, len(order), CHUNK_ROWS):
            group = order[start : start + CHUNK_ROWS]
            scores = self._scorer([rows[i] for i in group])
            for i, own in zip(group, scores, strict=True):
                asked = slice(len(rows[i]) - 1 - len(pairs[i][1]), None)
                log_p = float(own['log_p'][asked].sum(dtype=np.float64))
                found[i] = (log_p, bool(own['is_likeliest'][asked].all()))
                on_score(i, found[i])
        return found

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """Returns how each context goes on, up to a stop string, EOS or `max_gen_toks`."""
        del disable_tqdm
        asked = [self._engine_request(request) for request in requests]
        rows, stops = [row for row, _ in asked], [stop for _, stop in asked]
        longest_first = sorted(range(len(rows)), key=lambda i: len(rows[i].tokens))[::-1]
        tokenizer, texts = self._checkpoint.tokenizer, [''] * len(rows)
        for i, text, has_ended in generate_texts(
            self._engine, tokenizer, rows, stops, longest_first
        ):
            texts[i] += text
            if has_ended:
                self._cache_value('generate_until', requests[i].args, texts[i])
        return texts

    def _engine_request(self, request: Instance) -> tuple[Request, tuple[str, ...]]:
        """Returns what the engine is asked, and the stop strings.

        Raises ValueError for an option that is not known, which another text would follow from.
        """
        context, options = request.args
        for name in options:
            if name not in GENERATION_OPTIONS:
                raise ValueError(
                    f'generation_kwargs of a task has {name!r}; known are {", ".join(GENERATION_OPTIONS)}.'
                    f'{suggest_nearest(name, GENERATION_OPTIONS)}'
                )
        stops = options.get('until') or ()
        stops = (stops,) if isinstance(stops, str) else tuple(stop for stop in stops if stop)
        most = int(options.get('max_gen_toks', MAX_GEN_TOKS))
        filters = {name: options[name] for name in ('top_k', 'top_p', 'min_p') if name in options}
        sampling = (
            Sampling(options.get('temperature', 1.0), **filters)
            if options.get('do_sample')
            else Sampling(temperature=0.0)
        )
        # With room for the text, so that no row is read again; but not at the cost of all context.
        kept = max(self.max_length - most, self.max_length // 2)
        tokens = [self._bos, *self.tok_encode(context)][-kept:]
        return Request(tuple(tokens), most, sampling), stops

    def _cache_value(self, kind: str, arguments: tuple, value: Any) -> None:
        """Writes a result to the harness's cache, where there is one."""
        self.cache_hook.add_partial(kind, arguments, value)

    def apply_chat_template(self, chat_history, add_generation_prompt=True) -> str:
        """Raises ValueError: texts are read as they are."""
        raise ValueError(CHAT)

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Raises ValueError where one is asked for."""
        if chat_template:
            raise ValueError(CHAT)
        return None

    @property
    def tokenizer_name(self) -> str:
        """Raises ValueError: only chat templates ask for it."""
        raise ValueError(CHAT)
