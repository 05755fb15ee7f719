"""The validation split: how many of its batches the devices hold at once."""

import jax

from lm.inference.scoring import MAX_IN_FLIGHT, fetch_pipelined


def test_results_are_fetched_while_few_others_are_dispatched(monkeypatch):
    dispatched, held, get = [], [], jax.device_get

    def step(i):
        dispatched.append(i)
        return jax.numpy.float32(i)

    def device_get(tree):
        held.append(len(dispatched))
        return get(tree)

    monkeypatch.setattr(jax, 'device_get', device_get)
    results = fetch_pipelined(map(step, range(40)))
    assert next(results) == 0 and len(dispatched) == MAX_IN_FLIGHT + 1
    assert list(results) == list(range(1, 40)) and len(dispatched) == 40
    assert held[0] == MAX_IN_FLIGHT + 1
    assert list(fetch_pipelined(map(step, range(3)))) == [0, 1, 2] and not list(fetch_pipelined([]))
