"""The compiled programs of a group of runs: step, evaluation, and moving runs in and out."""

import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from lm.config import Config
from lm.diagnostics import make_diagnose
from lm.many import over_mesh, put, take
from lm.mesh import batch_sharding, over_runs, replicated
from lm.run.experiment import Experiment
from lm.run.start import initial_state
from lm.shardings import batch_shapes, state_shardings
from lm.state import Hyper, State, hyper_from
from lm.step import make_eval_step, make_train_step


class Program:
    """The step of `experiment`, for any number of slots; each number is compiled once."""

    def __init__(self, experiment: Experiment, how: str):
        self.experiment, self.how = experiment, how
        self.compile_sec = 0.0
        self.skips_inactive = how == 'loop'
        self.shares_memory = experiment.platform == 'cpu'
        mesh = experiment.mesh
        one = state_shardings(experiment.learner, mesh)
        self._many = jax.tree.map(over_runs, one)
        self._run = over_runs(replicated(mesh))
        self.batch_sharding = over_runs(batch_sharding(mesh))
        self._step = jax.jit(
            over_mesh(how, mesh, make_train_step(experiment.learner)),
            in_shardings=(self._run, self._many, self.batch_sharding, self._run),
            out_shardings=(self._many, self._run),
            donate_argnums=1,
        )
        self.evaluate = self._looking(make_eval_step)
        self.diagnose = self._looking(make_diagnose)
        self.put = jax.jit(put, out_shardings=self._many, donate_argnums=0)
        self.take = jax.jit(take, out_shardings=one)

    def _looking(self, make: Callable) -> Callable:
        """look(batch, active [R], states, hypers) -> [R, ...]: the runs share the batch."""
        mesh = self.experiment.mesh
        look = make(self.experiment.learner)
        return jax.jit(
            over_mesh(
                self.how,
                mesh,
                lambda batch, state, hyper: look(state.weights, batch, hyper),
                n_shared=1,
            ),
            in_shardings=(batch_sharding(mesh), self._run, self._many, self._run),
            out_shardings=self._run,
        )

    @functools.cache  # noqa: B019 - one Program lives as long as its group trains
    def compiled(self, slots: int) -> Any:
        """step(active [R], states, batch [R, B, T+1], hypers) -> (states, metrics [R])."""
        start = time.perf_counter()
        states = stacked_shapes(self.experiment.state_like, slots)
        hypers = stacked_shapes(jax.eval_shape(lambda: hyper_from(self.experiment.config)), slots)
        batch = batch_shapes(self.experiment.config, slots)
        active = jax.ShapeDtypeStruct((slots,), bool)
        compiled = self._step.lower(active, states, batch, hypers).compile()
        self.compile_sec = time.perf_counter() - start
        return compiled

    def memory_bytes(self, slots: int) -> int:
        """What one device needs for a step, from the compiler's own report."""
        report = self.compiled(slots).memory_analysis()
        return (
            report.argument_size_in_bytes
            + report.output_size_in_bytes
            - report.alias_size_in_bytes
            + report.temp_size_in_bytes
        )

    def initial(self, config: Config) -> State:
        """The start of a run, exactly as it has it alone."""
        return initial_state(config, self.experiment)

    def hypers(self, configs: list[Config]) -> Hyper:
        """Stacked along the run axis."""
        stacked = jax.tree.map(lambda *x: jnp.stack(x), *map(hyper_from, configs))
        return jax.device_put(stacked, self._run)

    def empty(self, slots: int) -> State:
        """Room for the states of `slots` runs."""
        shapes = stacked_shapes(self.experiment.state_like, slots)

        def zeros():
            return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)

        return jax.jit(zeros, out_shardings=self._many)()


def stacked_shapes(tree: Any, slots: int) -> Any:
    return jax.tree.map(lambda s: jax.ShapeDtypeStruct((slots, *s.shape), s.dtype), tree)


def runs_that_fit(
    wanted: int, multiple: int, limit: float, bytes_for: Callable[[int], float]
) -> int:
    """The most runs, up to `wanted`, a multiple of `multiple`, that need `limit` bytes at most.

    bytes_for(n) compiles for n runs; as memory grows about linearly, one or two tries are enough.
    ValueError where not even `multiple` runs fit.
    """
    runs = -(-wanted // multiple) * multiple
    while (needed := bytes_for(runs)) > limit:
        if runs == multiple:
            raise ValueError(
                f'{runs} runs need {needed / 1e9:.2f} GB a device, and there are '
                f'{limit / 1e9:.2f} GB. Make the model or data.batch_size smaller, raise '
                'train.microbatches, or set model.remat=full.'
            )
        guess = int(runs * limit / needed) // multiple * multiple
        runs = max(multiple, min(guess, runs - multiple))
    return runs
