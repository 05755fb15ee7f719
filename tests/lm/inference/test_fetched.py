"""The validation split: how many batches the devices hold at once."""

import jax

from lm.inference.scoring import MAX_IN_FLIGHT, fetch_pipelined


def test_fetching_keeps_few_batches_in_flight(monkeypatch):
    dispatched, dispatched_at_get, original_get = [], [], jax.device_get

    def step(i):
        dispatched.append(i)
        return jax.numpy.float32(i)

    def device_get(tree):
        dispatched_at_get.append(len(dispatched))
        return original_get(tree)

    monkeypatch.setattr(jax, 'device_get', device_get)
    scores = fetch_pipelined(map(step, range(40)))
    assert next(scores) == 0 and len(dispatched) == MAX_IN_FLIGHT + 1
    assert list(scores) == list(range(1, 40)) and len(dispatched) == 40
    assert dispatched_at_get[0] == MAX_IN_FLIGHT + 1
    assert list(fetch_pipelined(map(step, range(3)))) == [0, 1, 2] and not list(fetch_pipelined([]))
