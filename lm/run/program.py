"""The compiled programs of a group of runs: step, evaluation, and moving runs in and out."""

import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from lm import data
from lm.config.recipe import Recipe
from lm.devices.blueprint import Blueprint
from lm.devices.mesh import batch_sharding, put_batch, traced_on
from lm.devices.run_axis import SINGLE, layout
from lm.devices.shardings import batch_shapes, state_shardings
from lm.run.start import initial_state
from lm.training.diagnostics import make_diagnose
from lm.training.state import Hyper, State, hyper_from
from lm.training.step import make_eval_step, make_train_step


class Program:
    """The step of `experiment`, for any number of slots; each number is compiled once. Of a
    Blueprint it can be compiled, and of an Experiment run.

    how: SINGLE for one run alone, or a row of `lm.devices.run_axis.RUN_AXES`. States, hypers, batches
    and metrics have a leading axis R with a row of these, and none with SINGLE.
    """

    def __init__(self, experiment: Blueprint, how: str = SINGLE):
        self.experiment, self.how = experiment, how
        self.compile_sec = 0.0
        self.shares_memory = experiment.platform == 'cpu'
        learner, mesh = experiment.learner, experiment.mesh
        self.layout = layout(how, mesh, state_shardings(learner, mesh))
        self._step = jax.jit(
            traced_on(mesh, self.layout.over(make_train_step(learner))),
            in_shardings=(
                self.layout.scalars,
                self.layout.states,
                self.layout.batch,
                self.layout.scalars,
            ),
            out_shardings=(self.layout.states, self.layout.scalars),
            donate_argnums=1,
        )
        evaluate = make_eval_step(learner)
        self._evaluate = self._on_one_batch(
            lambda state, batch, hyper: evaluate(
                learner.evaluated(state.weights, state.average, hyper), batch, hyper
            )
        )
        self._diagnose = self._on_one_batch(make_diagnose(learner))
        self.put, self.take, self.pick = self.layout.put, self.layout.take, self.layout.pick

    def _on_one_batch(self, function: Callable) -> Callable:
        """`function(state, batch, hyper)` as jitted(batch, active, states, hypers): all runs have
        the same batch.
        """
        mesh = self.experiment.mesh
        of_runs = self.layout.over(
            lambda batch, state, hyper: function(state, batch, hyper), n_shared=1
        )
        return jax.jit(
            traced_on(mesh, of_runs),
            in_shardings=(
                batch_sharding(mesh),
                self.layout.scalars,
                self.layout.states,
                self.layout.scalars,
            ),
            out_shardings=self.layout.scalars,
        )

    @functools.cache  # noqa: B019 - one Program lives as long as its group trains
    def compiled(self, slots: int) -> Any:
        """step(active, states, batch, hypers) -> (states, metrics)."""
        start = time.perf_counter()
        experiment, shapes = self.experiment, self.layout.shapes
        hyper = jax.eval_shape(lambda: hyper_from(experiment.recipe))
        compiled = self._step.lower(
            jax.ShapeDtypeStruct((slots,), bool),
            shapes(experiment.state_shapes, slots),
            shapes(batch_shapes(experiment.recipe), slots),
            shapes(hyper, slots),
        ).compile()
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

    def initial(self, recipe: Recipe) -> State:
        """The start of a run, exactly as it has it alone."""
        return initial_state(recipe, self.experiment)

    def empty(self, slots: int) -> Any:
        """Room for the states of `slots` runs."""
        return self.layout.empty(self.experiment.state_shapes, slots)

    def hypers(self, recipes: list[Recipe]) -> Hyper:
        """Those of every slot."""
        return self.layout.scalars_of([hyper_from(recipe) for recipe in recipes])

    def batch(self, of_each: list[data.Batch]) -> dict[str, jax.Array]:
        """The batch of every slot, on the devices."""
        batch = self.layout.stack(of_each)
        return put_batch(self.experiment.mesh, batch, self.layout.batch)

    def evaluate(self, batch: data.Batch, active: np.ndarray, states: Any, hypers: Hyper) -> dict:
        """The sums of `lm.training.step.token_sums` of every active slot, all on the same batch."""
        return self._evaluate(put_batch(self.experiment.mesh, batch), active, states, hypers)

    def diagnose(self, batch: data.Batch, active: np.ndarray, states: Any, hypers: Hyper) -> dict:
        """What `lm.training.diagnostics` finds in every active slot, all on the same batch."""
        return self._diagnose(put_batch(self.experiment.mesh, batch), active, states, hypers)


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
