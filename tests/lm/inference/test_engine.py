"""Equivalence: a row of the engine is what the model gives that reads it whole, whatever its slot,
its neighbours and the room of the cache.
"""

import dataclasses
import functools
import json
from pathlib import Path

import jax
import numpy as np
import pytest

from lm.data.tokenizers import TokenIds
from lm.inference import engine as engine_module
from lm.inference import slots as slots_module
from lm.inference.engine import Engine, Request, RowUpdate
from lm.inference.load import Checkpoint
from lm.inference.sampling import Sampling
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
}
REQUESTS = [
    Request((BOS, 5, 9), 5, Sampling(0.0), top=3),
    Request((BOS,), 7, Sampling(seed=1)),
    Request((BOS, 3, 4, 5, 6, 7), 2, Sampling(top_p=0.8, seed=2), top=1),
    Request((BOS, 8), 4, Sampling(2.0, top_k=5, seed=3)),
    Request((BOS, 8, 2, 2), 4, Sampling(min_p=0.1, seed=4)),
]


@functools.cache
def checkpoint_of(name: str) -> Checkpoint:
    """A tiny model as it starts, in place of a stored one."""
    recipe = checked_config(ROWS[name])
    learner, weights = tiny_learner(recipe), initial_state(recipe).weights
    rest = {'mesh': None, 'hyper': make_hyper(recipe), 'tokenizer': TokenIds(VOCAB, BOS, EOS)}
    return Checkpoint(Path(), recipe, 0, {}, learner, weights=weights, **rest)


@functools.cache
def whole_program(name: str):
    return jax.jit(checkpoint_of(name).learner.model.apply)


def log_p_of(name: str, row: list[int]) -> np.ndarray:
    """Log-probabilities [T, V] of the token after each of a row of up to CAPACITY, read whole."""
    tokens_BT = np.array([row + [0] * (CAPACITY - len(row))], np.int32)
    logits_BTV = whole_program(name)(checkpoint_of(name).variables, tokens_BT)
    return np.asarray(jax.nn.log_softmax(logits_BTV[0]))


def run(engine: Engine, requests: list[Request]) -> list[RowUpdate]:
    """All tokens of each request, with its end; slots are filled as they get free."""
    found = [RowUpdate([], '') for _ in requests]
    waiting, running = list(range(len(requests))), {}
    while waiting or running:
        while waiting and engine.n_free:
            slot = engine.admit(requests[waiting[0]])
            running[slot] = waiting.pop(0)
        for slot, update in engine.step().items():
            i = running.pop(slot) if update.finish_reason else running[slot]
            found[i] = RowUpdate(found[i].tokens + update.tokens, update.finish_reason)
    return found


def ids(update: RowUpdate) -> list[int]:
    return [token.id for token in update.tokens]


@pytest.mark.full
@pytest.mark.parametrize('name', ROWS)
def test_rows_are_those_of_the_model_that_reads_them_whole(name, monkeypatch):
    """Five over two slots, whose cache grows, and prompts read in parts while others go on. Catches
    a slot that keeps what its last row left, and a row that others change while it waits.
    """
    monkeypatch.setattr(engine_module, 'PREFILL_CHUNK', 2)
    monkeypatch.setattr(engine_module, 'PREFILL_BUDGET', 2)
    monkeypatch.setattr(slots_module, 'SMALL_CACHE_BYTES', 0)
    monkeypatch.setattr(slots_module, 'MIN_CACHE_LENGTH', CAPACITY // 2)
    engine, checkpoint = Engine(checkpoint_of(name), slots=2), checkpoint_of(name)
    rooms = checkpoint.programs.cache_shapes(checkpoint.variables, 2, CAPACITY)
    assert [*rooms] == ([8] if name in ('linear', 'nala') else [4, 8])
    updates = run(engine, REQUESTS)
    for request, update in zip(REQUESTS, updates, strict=True):
        made = ids(update)
        assert (
            len(made) == request.max_tokens if update.finish_reason == 'length' else EOS not in made
        )
        log_p_TV = log_p_of(name, [*request.tokens, *made])[len(request.tokens) - 1 :]
        for token, log_p_V in zip(update.tokens, log_p_TV, strict=False):
            np.testing.assert_allclose(token.log_p, log_p_V[token.id], rtol=1e-4, atol=1e-5)
            best = np.argsort(-log_p_V)[: request.top]
            assert tuple(i for i, _ in token.top) == tuple(best)
            np.testing.assert_allclose([p for _, p in token.top], log_p_V[best], rtol=1e-4)
            assert request.sampling.temperature or token.id == log_p_V.argmax()


@pytest.fixture(scope='module')
def engine():
    """Three slots, that the tests here share: one program each of reading and going on."""
    return Engine(checkpoint_of('default'), slots=3)


@pytest.fixture(scope='module')
def alone(engine):
    return [run(engine, [request])[0] for request in REQUESTS]


def test_rows_are_what_they_are_alone(engine, alone):
    """In another slot, between other neighbours, in another order."""
    assert any(update.finish_reason == 'length' for update in alone)
    for order in ([3, 1, 4, 0, 2], [2, 2, 1, 0]):
        together = run(engine, [REQUESTS[i] for i in order])
        for i, update in zip(order, together, strict=True):
            assert (ids(update), update.finish_reason) == (ids(alone[i]), alone[i].finish_reason)


def test_random_numbers_are_of_the_place_in_the_row(engine, alone):
    """A row that is begun with its own first tokens goes on as it did."""
    made, request = ids(alone[1]), REQUESTS[1]
    assert len(made) > 3
    for count in (1, 3):
        begun = (*request.tokens, *made[:count])
        (update,) = run(engine, [Request(begun, len(made) - count, request.sampling)])
        assert ids(update) == made[count:]


def test_prompts_are_read_in_parts_while_others_go_on(engine, alone, monkeypatch):
    """Two tokens at a time; the row that waits gets nothing, and then what it is to get."""
    monkeypatch.setattr(engine_module, 'PREFILL_CHUNK', 2)
    monkeypatch.setattr(engine_module, 'PREFILL_BUDGET', 2)
    goes_on = engine.admit(Request((BOS, 8), 60, Sampling(seed=9)))
    assert not engine.step()[goes_on].finish_reason, 'the seed is of a row that goes on'
    waits = engine.admit(REQUESTS[2])  # five tokens before its last one
    steps = [engine.step() for _ in range(3)]
    assert [*steps[0]] == [goes_on]
    assert ids(next(step[waits] for step in steps if waits in step)) == ids(alone[2])
    engine.release(goes_on)
    assert engine.n_free == 3


@pytest.mark.full
def test_a_full_row_forgets_its_first_half(engine):
    """The model continues the later half alone, and goes on so."""
    request = Request((BOS, 5, 9), 20, Sampling(0.0))
    made, window = [], list(request.tokens)
    while len(made) < 20:
        made.append(int(log_p_of('default', window)[len(window) - 1].argmax()))
        window.append(made[-1])
        if len(window) > CAPACITY:
            window = window[-CAPACITY // 2 :]
    assert EOS not in made
    assert ids(run(engine, [request])[0]) == made


def test_eos_ends_a_row_and_is_no_token_of_it(engine, alone, monkeypatch):
    made, request = next(
        (made, request)
        for made, request in zip(map(ids, alone), REQUESTS, strict=True)
        if len({*made}) > 1
    )
    stop = next(token for token in made if token != made[0])
    monkeypatch.setattr(engine, '_end_ids', np.array([stop], np.int32))
    (update,) = run(engine, [request])
    assert (ids(update), update.finish_reason) == (made[: made.index(stop)], 'stop')
    assert engine.n_free == 3


@pytest.mark.parametrize(
    ('request_', 'said'),
    [
        (Request((BOS,) * 9, 1), 'a prompt has 1 to 8 tokens, with the one that begins it; got 9'),
        (Request((), 1), 'a prompt has 1 to 8 tokens, .* got 0'),
        (Request((BOS, VOCAB), 1), f'token ids are from 0 to {VOCAB - 1}; got {VOCAB}'),
        (Request((BOS, -1), 1), 'token ids are from 0 .* got -1'),
        (Request((BOS,), 0), 'max_tokens must be at least 1; got 0'),
        (Request((BOS,), 1, top=21), 'top is from 0 to 20; got 21'),
    ],
)
def test_requests_that_never_fit_are_refused(engine, request_, said):
    with pytest.raises(ValueError, match=said):
        engine.admit(request_)
    assert engine.n_free == 3


def test_no_slot_is_given_twice(engine):
    taken = [engine.admit(REQUESTS[0]) for _ in range(3)]
    assert sorted(taken) == [0, 1, 2]
    with pytest.raises(ValueError, match='all 3 slots are in use'):
        engine.admit(REQUESTS[0])
    for slot in taken:
        engine.release(slot)
    assert engine.n_free == 3 and engine.step() == {}


@pytest.mark.full
def test_capacity_is_of_the_models_positions():
    with pytest.raises(ValueError, match='positions; got a cache for 9 tokens'):
        Engine(checkpoint_of('learned'), capacity=9)


def test_any_of_the_listed_tokens_ends_a_row(engine, alone, monkeypatch, tmp_path):
    """Those of a model's generation_config.json beside EOS, but no ids that it lacks."""
    (tmp_path / 'tokenizer').mkdir()
    config = tmp_path / 'tokenizer' / 'generation_config.json'
    config.write_text(json.dumps({'eos_token_id': [0, 5, VOCAB, 10**12]}))
    checkpoint = checkpoint_of('default')
    assert checkpoint.end_ids == (EOS,)
    checkpoint = dataclasses.replace(checkpoint, path=tmp_path / 'checkpoints' / '1')
    assert checkpoint.end_ids == (0, EOS, 5)
    made = ids(alone[1])
    never = next(i for i in range(VOCAB) if i not in made)
    for stop in {*made}:
        monkeypatch.setattr(engine, '_end_ids', np.array([never, stop], np.int32))
        (update,) = run(engine, [REQUESTS[1]])
        assert (ids(update), update.finish_reason) == (made[: made.index(stop)], 'stop')


class Unusable(Sampling):
    """Numbers of sampling that no array can hold."""

    seed = property(lambda self: None, lambda self, value: None)


@pytest.mark.parametrize('place', ['prompt', 'step'])
def test_an_error_at_one_row_ends_that_row_alone(engine, alone, place, monkeypatch):
    """Bitwise, in whatever part of a step it is raised."""
    requests = [REQUESTS[0], REQUESTS[3]]
    fails = Request((BOS, 7, 7, 7), 4, Unusable() if place == 'step' else Sampling())
    if place == 'prompt':
        read = engine._read_tokens
        monkeypatch.setattr(engine, '_read_tokens', lambda slot, start, part: (
            read(slot, start, part) if 7 not in part else 1 / 0
        ))  # fmt: skip
    slots = [engine.admit(one) for one in (requests[0], fails, requests[1])]
    failed, texts = {}, {slot: [] for slot in slots}
    while len(engine._rows) != engine.n_free:
        for slot, update in engine.step(failed.__setitem__).items():
            texts[slot] += update.tokens
    assert [*failed] == [slots[1]] and not texts[slots[1]]
    assert [texts[slots[0]], texts[slots[2]]] == [alone[0].tokens, alone[3].tokens]
    with pytest.raises(TypeError if place == 'step' else ZeroDivisionError):
        run(engine, [fails])
    assert engine.n_free == 3


def test_an_error_that_takes_the_cache_ends_all_rows():
    """A program that fails may have taken what it was given: no row can go on."""
    engine = Engine(checkpoint_of('default'), slots=2)

    class Lost:
        def decode(self, variables, layers, *rest):
            for layer in jax.tree.leaves(layers):
                layer.delete()
            raise RuntimeError('out of memory')

    engine._programs = Lost()
    engine.admit(Request((BOS,), 3))
    engine.admit(Request((BOS,), 3))
    with pytest.raises(RuntimeError, match='out of memory') as caught:
        engine.step(lambda slot, error: pytest.fail('no row is to blame'))
    assert 'The cache is lost' in caught.value.__notes__[0]
