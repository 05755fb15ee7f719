"""Equivalence: a row of the engine is the same as in a model that reads it whole.

This holds for any slot, neighbours and length of the cache.
"""

import dataclasses
import functools
import json
import re
from pathlib import Path

import jax
import numpy as np
import pytest

from lm.data.tokenizers import TokenIds
from lm.inference import engine as engine_module
from lm.inference import slots as slots_module
from lm.inference.decoding import init_cache
from lm.inference.engine import Engine, Request, RowUpdate
from lm.inference.load import Checkpoint
from lm.inference.sampling import Sampling, SamplingBatch
from lm.inference.slots import split_layers
from lm.training.state import make_hyper
from tests.helpers import BOS, VOCAB, checked_config, initial_state, tiny_learner

EOS, CAPACITY = 1, 8
ROWS = {
    'default': {'model.n_kv_heads': 1, 'attention.sinks': 'learned'},
    'learned': {'model.position': 'learned', 'model.attention': 'l2'},
    'window': {'attention.window': 3, 'attention.full_every': 2, 'model.scan_layers': False},
    'mix': {'model.placement': 'mix', 'model.mix_fraction': 0.5, 'model.norm': 'batchnorm'},
    'moe': {'model.placement': 'resi_dual', 'model.mlp': 'moe', 'attention.affine_scaled': True},
    'alibi': {'model.position': 'alibi', 'model.placement': 'parallel'},
    'linear': {'model.attention': 'linear', 'model.n_kv_heads': 1},
    'nala': {'model.attention': 'nala', 'model.position': 'none', 'model.reparam': 'sigma'},
    'gla': {'model.attention': 'gla', 'model.n_kv_heads': 1, 'attention.conv_width': 6},
    'gated_delta': {'model.attention': 'gated_delta', 'model.qk_norm': 'none'},
}
FIXED_SIZE = ('linear', 'nala', 'gla', 'gated_delta')  # their caches do not grow with the row
REQUESTS = [
    Request((BOS, 5, 9), 5, Sampling(0.0), top=3),
    Request((BOS,), 7, Sampling(seed=1)),
    Request((BOS, 3, 4, 5, 6, 7), 2, Sampling(top_p=0.8, seed=2), top=1),
    Request((BOS, 8), 4, Sampling(2.0, top_k=5, seed=3)),
    Request((BOS, 8, 2, 2), 4, Sampling(min_p=0.1, seed=4)),
]


@functools.cache
def build_checkpoint(name: str) -> Checkpoint:
    """A tiny model at initialization, in place of a stored one."""
    recipe = checked_config(ROWS[name])
    learner, weights = tiny_learner(recipe), initial_state(recipe).weights
    fields = {'mesh': None, 'hyper': make_hyper(recipe), 'tokenizer': TokenIds(VOCAB, BOS, EOS)}
    return Checkpoint(Path(), recipe, 0, {}, learner, weights=weights, **fields)


@functools.cache
def whole_program(name: str):
    return jax.jit(build_checkpoint(name).learner.model.apply)


def whole_row_log_probs(name: str, row: list[int]) -> np.ndarray:
    """Log-probabilities [T, V] of the token after each, for a row of up to CAPACITY read whole."""
    tokens_BT = np.array([row + [0] * (CAPACITY - len(row))], np.int32)
    logits_BTV = whole_program(name)(build_checkpoint(name).variables, tokens_BT)
    return np.asarray(jax.nn.log_softmax(logits_BTV[0]))


def run(engine: Engine, requests: list[Request]) -> list[RowUpdate]:
    """Returns all tokens of each request with its finish reason; slots are refilled as they become
    free.
    """
    updates = [RowUpdate([], '') for _ in requests]
    waiting, running = list(range(len(requests))), {}
    while waiting or running:
        while waiting and engine.n_free:
            slot = engine.admit(requests[waiting[0]])
            running[slot] = waiting.pop(0)
        for slot, update in engine.step().items():
            i = running.pop(slot) if update.finish_reason else running[slot]
            updates[i] = RowUpdate(updates[i].tokens + update.tokens, update.finish_reason)
    return updates


def ids(update: RowUpdate) -> list[int]:
    return [token.id for token in update.tokens]


@pytest.mark.full
@pytest.mark.parametrize('name', ROWS)
def test_rows_match_whole_row_model(name, monkeypatch):
    """Five requests over two slots: the cache grows, and prompts are read in chunks meanwhile.

    Catches a slot that keeps state of its last row, and a waiting row that others change.
    """
    monkeypatch.setattr(engine_module, 'PREFILL_CHUNK', 2)
    monkeypatch.setattr(engine_module, 'PREFILL_BUDGET', 2)
    monkeypatch.setattr(slots_module, 'SMALL_CACHE_BYTES', 0)
    monkeypatch.setattr(slots_module, 'MIN_CACHE_LENGTH', CAPACITY // 2)
    engine, checkpoint = Engine(build_checkpoint(name), slots=2), build_checkpoint(name)
    cache_shapes = checkpoint.programs.cache_shapes(checkpoint.variables, 2, CAPACITY)
    assert [*cache_shapes] == ([8] if name in FIXED_SIZE else [4, 8])
    updates = run(engine, REQUESTS)
    for request, update in zip(REQUESTS, updates, strict=True):
        decoded = ids(update)
        assert (
            len(decoded) == request.max_tokens
            if update.finish_reason == 'length'
            else EOS not in decoded
        )
        log_p_TV = whole_row_log_probs(name, [*request.tokens, *decoded])[len(request.tokens) - 1 :]
        for token, log_p_V in zip(update.tokens, log_p_TV, strict=False):
            np.testing.assert_allclose(token.log_p, log_p_V[token.id], rtol=1e-4, atol=1e-5)
            best = np.argsort(-log_p_V)[: request.top]
            assert tuple(i for i, _ in token.top) == tuple(best)
            np.testing.assert_allclose([p for _, p in token.top], log_p_V[best], rtol=1e-4)
            assert request.sampling.temperature or token.id == log_p_V.argmax()


def test_decoding_copies_neither_cache_nor_weights():
    """Reads the compiled program: in its loop over tokens, layers are separate arrays that XLA
    writes in place.
    """
    checkpoint, n = build_checkpoint('alibi'), 1
    programs, variables = checkpoint.programs, checkpoint.variables
    layers = split_layers(init_cache(checkpoint.learner, variables, n, CAPACITY).layers)
    row, samplings = np.ones(n, np.int32), SamplingBatch.stack([Sampling(temperature=0)])
    text = (
        programs.decode.lower(
            programs.split_blocks(variables),
            layers,
            CAPACITY,
            row,
            row,
            row,
            row,
            samplings,
            np.array([EOS]),
            0,
        )
        .compile()
        .as_text()
    )
    cached = {print_shape(x) for x in jax.tree.leaves(layers)}
    stacked = {print_shape(x) for x in jax.tree.leaves(variables['params']['layers']) if x.ndim > 2}
    loop = max(re.findall(r' = (\(.*\)) while\(', text), key=len)
    assert cached & {*re.findall(r'f32\[[\d,]*\]', loop)} == cached
    assert not stacked & {*re.findall(r'f32\[[\d,]*\]', loop)}
    assert not cached & {*re.findall(r' = (f32\[[\d,]*\])\S* copy\(', text)}


def print_shape(x: jax.Array) -> str:
    """Returns a float32 array's shape as in the text of XLA's programs."""
    assert x.dtype == np.float32
    return f'f32[{",".join(map(str, x.shape))}]'


@pytest.fixture(scope='module')
def engine():
    """Three slots, shared by the tests below: one program for reading and one for decoding."""
    return Engine(build_checkpoint('default'), slots=3)


@pytest.fixture(scope='module')
def single_updates(engine):
    return [run(engine, [request])[0] for request in REQUESTS]


@pytest.mark.full
def test_rows_do_not_depend_on_neighbours(engine, single_updates):
    """Requests run in another slot, between other neighbours, in another order."""
    assert any(update.finish_reason == 'length' for update in single_updates)
    for order in ([3, 1, 4, 0, 2], [2, 2, 1, 0]):
        together = run(engine, [REQUESTS[i] for i in order])
        for i, update in zip(order, together, strict=True):
            assert (ids(update), update.finish_reason) == (
                ids(single_updates[i]),
                single_updates[i].finish_reason,
            )


def test_random_numbers_depend_on_position(engine, single_updates):
    """A row that is restarted with its own first tokens continues identically."""
    decoded, request = ids(single_updates[1]), REQUESTS[1]
    assert len(decoded) > 3
    for count in (1, 3):
        tokens = (*request.tokens, *decoded[:count])
        (update,) = run(engine, [Request(tokens, len(decoded) - count, request.sampling)])
        assert ids(update) == decoded[count:]


def test_prompt_chunks_interleave_with_decoding(engine, single_updates, monkeypatch):
    """Two tokens at a time; the waiting row gets nothing, and then its usual tokens."""
    monkeypatch.setattr(engine_module, 'PREFILL_CHUNK', 2)
    monkeypatch.setattr(engine_module, 'PREFILL_BUDGET', 2)
    decoding = engine.admit(Request((BOS, 8), 60, Sampling(seed=9)))
    assert not engine.step()[decoding].finish_reason, 'the seed is of a row that goes on'
    waiting = engine.admit(REQUESTS[2])  # five tokens before its last one
    steps = [engine.step() for _ in range(3)]
    assert [*steps[0]] == [decoding]
    assert ids(next(step[waiting] for step in steps if waiting in step)) == ids(single_updates[2])
    engine.release(decoding)
    assert engine.n_free == 3


@pytest.mark.parametrize('name', ['gla', pytest.param('alibi', marks=pytest.mark.full)])
def test_prompts_are_read_together_beside_decoding_rows(name, monkeypatch):
    """Catches a call for several prompts that changes the row beside them, or reads a wrong row.

    The row in slot 0 has state when the call for slots 1 and 2 covers it too.
    """
    engine = Engine(build_checkpoint(name), slots=4)
    monkeypatch.setattr(engine_module, 'PREFILL_ROWS', 3)
    calls, prefill = [], engine._programs.prefill

    def count_rows(*arguments):
        calls.append(arguments[-1].tolist())
        return prefill(*arguments)

    monkeypatch.setattr(engine._programs, 'prefill', count_rows)
    texts, slots = {}, {}

    def admit(i):
        slots[engine.admit(REQUESTS[i])] = i

    def step():
        for slot, update in engine.step().items():
            texts[slots[slot]] = texts.get(slots[slot], []) + update.tokens

    monkeypatch.setattr(engine_module, 'TOKENS_PER_CALL', 2)
    admit(1)
    admit(3)
    step()
    engine.release(1)  # its text is not of interest
    admit(2)
    admit(4)
    while engine.n_free < 4:
        step()
    assert calls == [[1], [0, 5, 3]]
    assert len(texts[1]) > 2, 'the row has ended before its neighbours are read'
    for i in (1, 2, 4):
        row = [*REQUESTS[i].tokens, *(token.id for token in texts[i])]
        log_p_TV = whole_row_log_probs(name, row)[len(REQUESTS[i].tokens) - 1 :]
        expected = [log_p_TV[t, token.id] for t, token in enumerate(texts[i])]
        np.testing.assert_allclose([t.log_p for t in texts[i]], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.full
def test_full_row_drops_first_half(engine):
    """The model continues from the later half alone."""
    request = Request((BOS, 5, 9), 20, Sampling(0.0))
    decoded, window = [], list(request.tokens)
    while len(decoded) < 20:
        decoded.append(int(whole_row_log_probs('default', window)[len(window) - 1].argmax()))
        window.append(decoded[-1])
        if len(window) > CAPACITY:
            window = window[-CAPACITY // 2 :]
    assert EOS not in decoded
    assert ids(run(engine, [request])[0]) == decoded


def test_eos_ends_row_and_is_not_reported(engine, single_updates, monkeypatch):
    decoded, request = next(
        (decoded, request)
        for decoded, request in zip(map(ids, single_updates), REQUESTS, strict=True)
        if len({*decoded}) > 1
    )
    stop = next(token for token in decoded if token != decoded[0])
    monkeypatch.setattr(engine, '_end_ids', np.array([stop], np.int32))
    (update,) = run(engine, [request])
    assert (ids(update), update.finish_reason) == (decoded[: decoded.index(stop)], 'stop')
    assert engine.n_free == 3


@pytest.mark.parametrize(
    ('request_', 'message'),
    [
        (Request((BOS,) * 9, 1), 'a prompt must have 1 to 8 tokens, .* start token; got 9'),
        (Request((), 1), 'a prompt must have 1 to 8 tokens, .* got 0'),
        (Request((BOS, VOCAB), 1), f'token ids must be between 0 and {VOCAB - 1}; got {VOCAB}'),
        (Request((BOS, -1), 1), 'token ids must be between 0 .* got -1'),
        (Request((BOS,), 0), 'max_tokens must be at least 1; got 0'),
        (Request((BOS,), 1, top=21), 'top must be between 0 and 20; got 21'),
    ],
)
def test_impossible_requests_are_refused(engine, request_, message):
    with pytest.raises(ValueError, match=message):
        engine.admit(request_)
    assert engine.n_free == 3


def test_slot_is_not_assigned_twice(engine):
    slots = [engine.admit(REQUESTS[0]) for _ in range(3)]
    assert sorted(slots) == [0, 1, 2]
    with pytest.raises(ValueError, match='all 3 slots are in use'):
        engine.admit(REQUESTS[0])
    for slot in slots:
        engine.release(slot)
    assert engine.n_free == 3 and engine.step() == {}


@pytest.mark.full
def test_capacity_is_limited_by_positions():
    with pytest.raises(ValueError, match='positions; got a cache for 9 tokens'):
        Engine(build_checkpoint('learned'), capacity=9)


def test_listed_end_tokens_end_rows(engine, single_updates, monkeypatch, tmp_path):
    """End tokens of generation_config.json count beside EOS, except ids that the model lacks."""
    (tmp_path / 'tokenizer').mkdir()
    config = tmp_path / 'tokenizer' / 'generation_config.json'
    config.write_text(json.dumps({'eos_token_id': [0, 5, VOCAB, 10**12]}))
    checkpoint = build_checkpoint('default')
    assert checkpoint.end_ids == (EOS,)
    checkpoint = dataclasses.replace(checkpoint, path=tmp_path / 'checkpoints' / '1')
    assert checkpoint.end_ids == (0, EOS, 5)
    decoded = ids(single_updates[1])
    unused = next(i for i in range(VOCAB) if i not in decoded)
    for stop in {*decoded}:
        monkeypatch.setattr(engine, '_end_ids', np.array([unused, stop], np.int32))
        (update,) = run(engine, [REQUESTS[1]])
        assert (ids(update), update.finish_reason) == (decoded[: decoded.index(stop)], 'stop')


class UnusableSampling(Sampling):
    """Sampling options that no array can hold."""

    seed = property(lambda self: None, lambda self, value: None)


@pytest.mark.parametrize('place', ['prompt', 'step'])
def test_error_ends_only_its_row(engine, single_updates, place, monkeypatch):
    """Other rows are bitwise the same, whichever part of a step raises."""
    requests = [REQUESTS[0], REQUESTS[3]]
    failing = Request((BOS, 7, 7, 7), 4, UnusableSampling() if place == 'step' else Sampling())
    if place == 'prompt':
        read_tokens = engine._read_tokens
        monkeypatch.setattr(engine, '_read_tokens', lambda slots, window: (
            read_tokens(slots, window)
            if all(engine._rows[slot].request != failing for slot in slots)
            else 1 / 0
        ))  # fmt: skip
    slots = [engine.admit(request) for request in (requests[0], failing, requests[1])]
    failed, texts = {}, {slot: [] for slot in slots}
    while len(engine._rows) != engine.n_free:
        for slot, update in engine.step(failed.__setitem__).items():
            texts[slot] += update.tokens
    assert [*failed] == [slots[1]] and not texts[slots[1]]
    assert [texts[slots[0]], texts[slots[2]]] == [
        single_updates[0].tokens,
        single_updates[3].tokens,
    ]
    with pytest.raises(TypeError if place == 'step' else ZeroDivisionError):
        run(engine, [failing])
    assert engine.n_free == 3


def test_other_prompts_are_still_read_after_an_error(engine, single_updates, monkeypatch):
    """Catches rows that are decoded without their prompts when a row beside them raises."""
    read_tokens, failing = engine._read_tokens, Request((BOS, 7, 7, 7), 4)
    monkeypatch.setattr(engine, '_read_tokens', lambda slots, window: (
        read_tokens(slots, window)
        if all(engine._rows[slot].request != failing for slot in slots)
        else 1 / 0
    ))  # fmt: skip
    slots = [engine.admit(request) for request in (failing, REQUESTS[0], REQUESTS[3])]
    with pytest.raises(ZeroDivisionError):
        engine.step()
    texts = {slot: [] for slot in slots}
    while engine.n_free < 3:
        for slot, update in engine.step().items():
            texts[slot] += update.tokens
    assert [[token.id for token in texts[slot]] for slot in slots] == [
        [],
        ids(single_updates[0]),
        ids(single_updates[3]),
    ]


@pytest.mark.parametrize('prompt', [(BOS,), (BOS, 4, 5)])
def test_lost_cache_ends_all_rows(prompt):
    """A failed program may have consumed its donated arguments: no row can continue.

    Catches the error of a second program, which finds no cache, in place of the first one.
    """
    engine = Engine(build_checkpoint('default'), slots=2)

    class LosesCache:
        def decode(self, variables, layers, *args):
            if any(layer.is_deleted() for layer in jax.tree.leaves(layers)):
                raise RuntimeError('Array has been deleted')
            for layer in jax.tree.leaves(layers):
                layer.delete()
            raise RuntimeError('out of memory')

        prefill = decode

    engine._programs = LosesCache()
    engine.admit(Request(prompt, 3))
    engine.admit(Request(prompt, 3))
    with pytest.raises(RuntimeError, match='out of memory') as caught:
        engine.step(lambda slot, error: pytest.fail('no row is to blame'))
    assert 'The cache is lost' in caught.value.__notes__[0]
