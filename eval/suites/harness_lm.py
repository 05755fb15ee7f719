"""A checkpoint as a model of lm-evaluation-harness: requests are scored or generated.

Imports lm_eval, of the extra `harness`. Only eval.suites.harness imports this file, at run time.
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

CHUNK_ROWS = 1024  # rows that are scored before they are written to the harness's cache
MAX_GEN_TOKS = 256  # default of requests, as in the harness's own models
CHAT = (
    'this suite has no chat template: checkpoints read texts as documents. Choose tasks without a '
    'chat template.'
)
#: Options of `generate_until` requests.
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
    """A loaded checkpoint. Each request is a separate document: BOS, its context, its continuation.

    The beginning of documents longer than data.seq_len is left out.
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
        """BOS, after which a text without a context is scored."""
        return self._bos

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Returns the tokens of a text. BOS is added before contexts later.

        Args:
          string: the text.
          add_special_tokens: ignored.
          **kwargs: ignored.
        """
        del add_special_tokens, kwargs
        return list(self._checkpoint.tokenizer.encode(string)) if string else []

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[tuple[str, str], list[int], list[int]]],
        disable_tqdm: bool = False,
        **kwargs: Any,
    ) -> list[tuple[float, bool]]:
        """Returns (sum of log p of the continuation, whether greedy decoding produces it)."""
        del disable_tqdm, kwargs
        pairs = []
        for (context, continuation), context_tokens, continuation_tokens in requests:
            if len(continuation_tokens) > self.max_length:
                raise ValueError(
                    f'a continuation must have at most data.seq_len = {self.max_length} tokens; '
                    f'got {len(continuation_tokens)}: {continuation[:40]!r}... after '
                    f'{context[-40:]!r}.'
                )
            context_tokens = (
                context_tokens
                if context_tokens[:1] == [self._bos]
                else [self._bos, *context_tokens]
            )
            pairs.append((context_tokens, continuation_tokens))
        texts = [request[0] for request in requests]
        return self._score_pairs(
            pairs, lambda i, score: self._cache_value('loglikelihood', texts[i], score)
        )

    def loglikelihood_rolling(
        self, requests: Sequence[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Returns the sum of log p of each text, with every token once.

        Windows of data.seq_len tokens do not overlap, and the last has as much context as fits.
        """
        del disable_tqdm
        windows, request_of_window = [], []
        for i, request in enumerate(requests):
            tokens = self.tok_encode(request.args[0])
            for window in get_rolling_token_windows(tokens, self._bos, self.max_length, 1):
                windows.append(make_disjoint_window(window))
                request_of_window.append(i)
        scores = self._score_pairs(windows, lambda i, score: None)
        sums = np.bincount(
            request_of_window, [log_p for log_p, _ in scores], len(requests)
        ).tolist()
        for request, total in zip(requests, sums, strict=True):
            self._cache_value('loglikelihood_rolling', request.args, total)
        return sums

    def _score_pairs(self, pairs: Sequence[tuple[list[int], list[int]]], on_score) -> list[tuple]:
        """Returns (sum of log p, whether all are the likeliest) of the second tokens of each pair.

        on_score(i, score) is called for each pair. Longer rows come first, so that rows scored
        together have similar lengths.
        """
        rows = [
            [*context, *continuation][-self.max_length - 1 :] for context, continuation in pairs
        ]
        order = sorted(range(len(rows)), key=lambda i: -len(rows[i]))
        results_by_row = [(0.0, True)] * len(rows)
        for start in range(0, len(order), CHUNK_ROWS):
            group = order[start : start + CHUNK_ROWS]
            scores = self._scorer([rows[i] for i in group])
            for i, row_scores in zip(group, scores, strict=True):
                # Scores begin at the second token of a row.
                continuation = slice(len(rows[i]) - 1 - len(pairs[i][1]), None)
                log_p = float(row_scores['log_p'][continuation].sum(dtype=np.float64))
                results_by_row[i] = (log_p, bool(row_scores['is_likeliest'][continuation].all()))
                on_score(i, results_by_row[i])
        return results_by_row

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """Returns the completion of each context, up to a stop string, EOS or `max_gen_toks`."""
        del disable_tqdm
        engine_requests = [self._engine_request(request) for request in requests]
        rows, stops = [row for row, _ in engine_requests], [stop for _, stop in engine_requests]
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
        """Returns the request for the engine, and the stop strings.

        Raises ValueError for an unknown option, since it would change the text.
        """
        context, options = request.args
        for name in options:
            if name not in GENERATION_OPTIONS:
                raise ValueError(
                    f'generation_kwargs of a task has {name!r}, which is not supported. Supported: '
                    f'{", ".join(GENERATION_OPTIONS)}.{suggest_nearest(name, GENERATION_OPTIONS)}'
                )
        stops = options.get('until') or ()
        stops = (stops,) if isinstance(stops, str) else tuple(stop for stop in stops if stop)
        max_tokens = int(options.get('max_gen_toks', MAX_GEN_TOKS))
        filters = {name: options[name] for name in ('top_k', 'top_p', 'min_p') if name in options}
        sampling = (
            Sampling(options.get('temperature', 1.0), **filters)
            if options.get('do_sample')
            else Sampling(temperature=0.0)
        )
        # Leaves room for the completion, so that no row is read again, but at least half of the
        # length for context.
        max_context = max(self.max_length - max_tokens, self.max_length // 2)
        tokens = [self._bos, *self.tok_encode(context)][-max_context:]
        return Request(tuple(tokens), max_tokens, sampling), stops

    def _cache_value(self, kind: str, arguments: tuple, value: Any) -> None:
        """Writes a value to the harness's cache, if it is enabled."""
        self.cache_hook.add_partial(kind, arguments, value)

    def apply_chat_template(self, chat_history, add_generation_prompt=True) -> str:
        """Raises ValueError: a checkpoint has no chat template."""
        raise ValueError(CHAT)

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Returns None. Raises ValueError if a template is requested."""
        if chat_template:
            raise ValueError(CHAT)
        return None

    @property
    def tokenizer_name(self) -> str:
        """Raises ValueError: it is needed only by chat templates."""
        raise ValueError(CHAT)
