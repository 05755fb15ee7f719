"""Everything that the runs of a program share: text, devices, model, compiled steps."""

import dataclasses
import functools
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from lm import data
from lm.config.fields import DataConfig
from lm.config.recipe import Recipe
from lm.config.stages import BatchShape, config_shape, find_stage
from lm.data.in_memory import EncodedText, encode_source, list_text_requests
from lm.devices.blueprint import Blueprint
from lm.devices.mesh import batch_sharding, put_batch, trace_on_mesh
from lm.devices.run_axis import SINGLE, make_layout
from lm.devices.shardings import batch_shapes, jit_init, state_shardings, step_options
from lm.launch.distributed import broadcast_from_first, check_same_everywhere
from lm.model.kernels import list_attention_kernels
from lm.model.objectives import build_training_mixture, count_marks, evaluation_rows
from lm.record.checkpoint import FOLDER, list_steps
from lm.record.machine import device_memory_bytes
from lm.run.ancestry import count_batches
from lm.run.profile import Tracer
from lm.run.suites import SuiteLoader, open_suites
from lm.run.tables import parameter_rows
from lm.storage.files import discard_line, expand_home
from lm.training.diagnostics import make_diagnose_step
from lm.training.flops import flops_by_stage, mean_flops_per_token
from lm.training.peaks import peak_flops
from lm.training.state import Hyper, Learner, build_learner, check_learner, make_hyper
from lm.training.step import make_eval_step, make_train_step
from modules.kernels.attention import check_documents

TOKENIZER = 'tokenizer'  # the folder of a workdir that holds it


def open_text(
    recipe: Recipe, say: Callable[[str], None], workdir: Path | None = None
) -> data.Dataset:
    """Opens the text of config.data as rows of tokens, and prepares it if necessary.

    Args:
      recipe: the config.
      say: prints a line.
      workdir: the folder of a run, which may have a copy of its tokenizer (`locate_data`).

    Raises:
      ValueError: if the text is too short for config.train.steps (with train.seconds, these are
        known and checked later), or processes have other text.
    """
    config = recipe.data if workdir is None else locate_data(recipe, workdir)
    # Processes that share the cache also share the work (`lm.data.prepare`).
    dataset = data.open_dataset(config, say=say)
    check_same_everywhere('the digest of the prepared data', dataset.digest)
    if recipe.train.seconds is None:
        check_run_epochs(recipe, dataset.train, workdir)
    return dataset


def check_run_epochs(recipe: Recipe, rows: Any, workdir: Path | None = None) -> None:
    """Raises ValueError if a run needs more epochs of the rows of its text than data.epochs.

    Args:
      recipe: the config.
      rows: the training rows.
      workdir: the folder of the run, which may be a branch that has begun.
    """
    if recipe.train.stages is None:
        data.check_epochs(recipe.data, count_batches(recipe, workdir), rows)
    else:
        data.check_stage_epochs(recipe.data, rows, recipe.stages)


def open_held_out_texts(
    recipe: Recipe, tokenizer: data.tokenizers.Tokenizer, say: Callable[[str], None]
) -> dict[str, EncodedText]:
    """Returns the texts of eval.texts by name, encoded with the tokenizer of the run.

    Args:
      recipe: the config.
      tokenizer: the tokenizer.
      say: prints a line.

    Raises:
      ValueError: with the name, if one cannot be read or holds nothing, or processes read other
        texts.
    """
    texts, fields = {}, recipe.data
    for name, request in list_text_requests(recipe).items():
        try:
            text = encode_source(request, tokenizer, fields, fields.tokenizer, say)
        except ValueError as error:
            is_named = str(error).startswith(request.flag)
            raise ValueError(f'{"" if is_named else f"{request.flag}: "}{error}') from error
        check_same_everywhere(f'the text {name!r} of eval.texts', text.digest)
        counts = f'{text.rows.n_tokens:,} tokens, {text.rows.n_bytes / 1e6:,.2f} MB'
        say(f'eval.texts, {name}: {counts}')
        texts[name] = text
    return texts


def build_without_text(recipe: Recipe, tokenizer: str, platform: str) -> Learner:
    """Builds the learner of a checked recipe before its text is read; nothing is compiled.

    Args:
      recipe: a recipe that `lm.model.check.check` accepts.
      tokenizer: the value of data.tokenizer; it determines the size of the vocabulary.
      platform: platform of the devices, such as 'cpu'.

    Raises:
      ValueError: if its parameters cannot be described: a reparametrisation that finds no matrix, a
        parametrisation without a rule for one, an optimizer with too many parameters, or a kernel
        that lacks a derivative.
    """
    vocab_size = data.tokenizers.vocab_size(tokenizer) + count_marks(recipe)
    learner = build_learner(recipe, vocab_size, 0, platform)  # no shape depends on bos_id
    check_learner(learner)
    return learner


def list_parameters(recipe: Recipe) -> list[dict[str, str]]:
    """Returns a row for each parameter (`parameter_rows`) on the devices here. No text is read."""
    devices, vocab_size = jax.devices(), data.tokenizers.vocab_size(recipe.data.tokenizer)
    blueprint = Blueprint(
        recipe,
        vocab_size + count_marks(recipe),
        0,  # no shape depends on bos_id
        devices,
        lambda: device_memory_bytes() // (len(devices) if devices[0].platform == 'cpu' else 1),
    )
    return parameter_rows(blueprint.learner, blueprint.mesh)


def locate_data(recipe: Recipe, workdir: Path) -> DataConfig:
    """Returns config.data, with the run's own copy of the tokenizer if the original is gone.

    The copy is used if the run has a checkpoint, and the checkpoint that it began from
    (train.init_from or branch_from) has been moved with its tokenizer.
    """
    kind, _, path = recipe.data.tokenizer.partition(':')
    is_gone = kind == 'hf' and not Path(expand_home(path)).exists()
    has_source = recipe.train.init_from or recipe.train.branch_from
    if not has_source or not is_gone or not list_steps(workdir / FOLDER):
        return recipe.data
    return dataclasses.replace(recipe.data, tokenizer=f'hf:{workdir / TOKENIZER}')


def step_flops(recipe: Recipe, platform: str) -> float:
    """Returns the FLOPs of a step by `flops_per_token`, for devices of `platform`.

    With stages it is the mean over the steps of the run. No text is read, and nothing is compiled.
    """
    learner = build_without_text(recipe, recipe.data.tokenizer, platform)
    return mean_flops_per_token(learner) * recipe.mean_batch_tokens


class Experiment(Blueprint):
    """The model and its text on the available devices.

    `mixture` transforms rows for training. `objective_rows` maps other objectives to their
    validation rows (`lm.model.objectives`). `texts` are the held-out texts of eval.texts, encoded,
    by name. `init` maps (key, hyper) to the state of a run at step 0.

    Args:
      recipe: the config.
      dataset: its text.
      say: prints a line.
      runs: number of runs that will share the experiment.
      suite_loader: opens the suites of eval.suites, which are then `suites`, by name.
    """

    def __init__(
        self,
        recipe: Recipe,
        dataset: data.Dataset,
        say: Callable[[str], None],
        runs: int = 1,
        suite_loader: SuiteLoader | None = None,
    ):
        self.dataset, tokenizer = dataset, dataset.tokenizer
        self.mixture = build_training_mixture(recipe, tokenizer)
        self.objective_rows = evaluation_rows(recipe, tokenizer, dataset.validation)
        self.texts = open_held_out_texts(recipe, tokenizer, say)
        vocab_size = tokenizer.vocab_size + count_marks(recipe)
        devices, bos_id = jax.devices(), tokenizer.bos_id

        def memory() -> int:  # of process 0; the devices of a CPU share the machine's memory
            return broadcast_from_first(
                device_memory_bytes() // (len(devices) if self.platform == 'cpu' else 1)
            )

        super().__init__(recipe, vocab_size, bos_id, devices, memory, say, runs)
        self.stage_flops = flops_by_stage(self.learner)
        self.flops_per_token = mean_flops_per_token(self.learner)
        self.peak, self.peak_source = peak_flops(self.mesh.size, recipe.model.dtype)
        self.init = jit_init(self.learner, self.mesh)
        self.suites = open_suites(self, suite_loader)

    def utilisation(self, flops_per_sec: float) -> float:
        """Returns a speed as a share of the peak.

        A peak that is exceeded was measured on a busy machine, and is measured again. If the new
        peak is exceeded too, it is unknown (NaN) from then on.
        """
        if flops_per_sec > self.peak:
            dtype = self.recipe.model.dtype
            self.peak, source = peak_flops(self.mesh.size, dtype, remeasure=True)
            if flops_per_sec > self.peak:
                source = (
                    f'unknown: a speed of {flops_per_sec:.4g} exceeds {self.peak:.4g}, {source}'
                )
                self.peak = math.nan
            self.peak_source = source
        return flops_per_sec / self.peak


class Program:
    """The step, evaluation and diagnosis of `experiment`, for any number of slots.

    A Blueprint is enough to compile it. `compiled` has the compiled steps by number of slots and
    shape of a stage.

    Args:
      experiment: the model and devices.
      axis_name: SINGLE for one run alone; or a row of `lm.devices.run_axis.RUN_AXES`, with which
        states, hypers, batches and metrics have a leading axis R.
      say: prints a line about each compilation of the step.
    """

    def __init__(
        self,
        experiment: Blueprint,
        axis_name: str = SINGLE,
        say: Callable[[str], None] = discard_line,
    ):
        self.experiment, self.axis_name, self._say = experiment, axis_name, say
        self.compile_sec = 0.0
        self.compiled: dict[tuple[int, BatchShape | None], Any] = {}
        self._seconds: dict[tuple[int, BatchShape | None], float] = {}
        self.tracer = Tracer(experiment.recipe)
        self.shares_memory = experiment.platform == 'cpu'
        learner, mesh = experiment.learner, experiment.mesh
        self.layout = make_layout(axis_name, mesh, state_shardings(learner, mesh))
        states, scalars, batch = (
            self.layout.states_sharding,
            self.layout.scalars_sharding,
            self.layout.batch_sharding,
        )
        self._jit_step = functools.partial(
            jax.jit,
            in_shardings=(scalars, states, batch, scalars),
            out_shardings=(states, scalars),
            # States are updated in place: without donation, parameters and optimizer state would
            # need twice their memory. The caller's old states are invalid after the call.
            donate_argnums=1,
            compiler_options=step_options(mesh),
        )
        self._step = self._jit_step(self._map_step(experiment.recipe.train.microbatches))
        evaluate = make_eval_step(learner)
        self._evaluate = self._jit_on_batch(
            lambda state, batch, hyper: evaluate(
                learner.select_eval_weights(state.weights, state.average, hyper), batch, hyper
            )
        )
        self._diagnose = self._jit_on_batch(make_diagnose_step(learner))
        recipe = experiment.recipe
        attention_kernels = list_attention_kernels(recipe, learner.model.kernels).values()
        self._document_kernels = [*attention_kernels] if recipe.data.mask_documents else []
        self.put, self.take, self.pick = self.layout.put, self.layout.take, self.layout.pick

    def _map_step(self, microbatches: int) -> Callable:
        """Returns the step with batches in so many microbatches, mapped over the runs."""
        step = make_train_step(self.experiment.learner, microbatches)
        return trace_on_mesh(self.experiment.mesh, self.layout.map_runs(step))

    def _jit_on_batch(self, function: Callable) -> Callable:
        """Jits function(state, batch, hyper) as (batch, active, states, hypers), with one batch."""
        mesh, states, scalars = (
            self.experiment.mesh,
            self.layout.states_sharding,
            self.layout.scalars_sharding,
        )
        map_function = self.layout.map_runs(
            lambda batch, state, hyper: function(state, batch, hyper), n_shared=1
        )
        return jax.jit(
            trace_on_mesh(mesh, map_function),
            in_shardings=(batch_sharding(mesh), scalars, states, scalars),
            out_shardings=scalars,
        )

    @functools.cache  # noqa: B019 - one Program lives as long as its group trains
    def compile_step(self, slots: int, shape: BatchShape | None = None) -> Any:
        """Compiles step(active, states, batch, hypers) -> (states, metrics), once per argument.

        Args:
          slots: number of runs.
          shape: the shape of a stage's batches; None: that of the config's own fields.
        """
        start = time.perf_counter()
        compiled = self.lower_step(slots, shape).compile()
        self.compile_sec = seconds = time.perf_counter() - start
        self._seconds[slots, shape] = seconds
        self.compiled[slots, shape] = compiled
        runs = f'{slots} run' + 's' * (slots > 1)
        suffix = '' if self.axis_name == SINGLE else f' for {runs} at a time ({self.axis_name})'
        if shape:
            suffix += f' for batches of {shape.batch_size} rows of {shape.seq_len} tokens'
        self._say(f'compiled in {seconds:.1f} s{suffix}')
        return compiled

    def lower_step(self, slots: int, shape: BatchShape | None = None) -> jax.stages.Lowered:
        """Lowers the step of `compile_step`, with the same arguments, to StableHLO."""
        experiment, shapes = self.experiment, self.layout.shapes
        hyper = jax.eval_shape(lambda: make_hyper(experiment.recipe))
        step, parts = self._step, experiment.recipe.train.microbatches
        if shape is not None and shape.microbatches != parts:
            step = self._jit_step(self._map_step(shape.microbatches))
        return step.lower(
            jax.ShapeDtypeStruct((slots,), bool),
            shapes(experiment.state_shapes, slots),
            shapes(batch_shapes(experiment.recipe, shape=shape), slots),
            shapes(hyper, slots),
        )

    def compile_stages(self, slots: int, step: int = 0) -> dict[BatchShape, Any]:
        """Compiles the steps of all stages that have not ended after `step` steps.

        Args:
          slots: number of runs.
          step: number of steps done.

        Returns:
          {shape: step}, in the order of the stages. Stages of the same shape share a step.
        """
        recipe = self.experiment.recipe
        if recipe.train.stages is None:
            return {config_shape(recipe.config): self.compile_step(slots)}
        stages = recipe.stages[find_stage(recipe.stages, step) :]
        steps = {s: self.compile_step(slots, s) for s in dict.fromkeys(x.shape for x in stages)}
        self.compile_sec = sum(self._seconds[slots, shape] for shape in steps)
        return steps

    def memory_bytes(self, slots: int) -> int:
        """Returns the bytes that one device needs for a step, from the compiler's own report.

        It is the step of the stage that needs most.
        """
        return max(map(_count_bytes, self.compile_stages(slots).values()))

    def make_buffer(self, slots: int) -> Any:
        """Makes the buffer for the states of `slots` runs."""
        return self.layout.make_buffer(self.experiment.state_shapes, slots)

    def stack_hypers(self, recipes: list[Recipe]) -> Hyper:
        """Stacks the hyperparameters of all slots."""
        return self.layout.stack_scalars([make_hyper(recipe) for recipe in recipes])

    def stack_batches(self, batches: list[data.Batch]) -> dict[str, jax.Array]:
        """Stacks the batches of all slots on the devices."""
        batch = self.layout.stack(batches)
        return self._put(batch, self.layout.batch_sharding)

    def _put(self, batch: data.Batch, sharding: Any = None) -> dict[str, jax.Array]:
        # On the host, where segments are known: a kernel can only return NaN for a row with too
        # many documents.
        for name in self._document_kernels:
            check_documents(name, batch['segments'][..., :-1])
        return put_batch(self.experiment.mesh, batch, sharding)

    def evaluate(self, batch: data.Batch, active: np.ndarray, states: Any, hypers: Hyper) -> dict:
        """Sums `lm.training.step.token_sums` of every active slot, all on the same batch.

        Args:
          batch: the batch.
          active: a mask of the slots.
          states: the states of all slots.
          hypers: the hyperparameters of all slots.

        Returns:
          The sums by name.
        """
        return self._evaluate(self._put(batch), active, states, hypers)

    def diagnose(self, batch: data.Batch, active: np.ndarray, states: Any, hypers: Hyper) -> dict:
        """Diagnoses every active slot with `lm.training.diagnostics`, all on the same batch.

        Args:
          batch: the batch.
          active: a mask of the slots.
          states: the states of all slots.
          hypers: the hyperparameters of all slots.

        Returns:
          The diagnostics by name.
        """
        return self._diagnose(self._put(batch), active, states, hypers)


def _count_bytes(compiled: Any) -> int:
    """Returns the bytes that one device needs for a compiled step."""
    report = compiled.memory_analysis()
    # A donated state is both argument and output; its bytes count once.
    arguments = report.argument_size_in_bytes - report.alias_size_in_bytes
    return arguments + report.output_size_in_bytes + report.temp_size_in_bytes


def find_max_runs(
    max_runs: int, multiple: int, limit: float, bytes_for: Callable[[int], float]
) -> int:
    """Returns the largest number of runs that fit in memory.

    As memory grows about linearly, one or two tries are enough.

    Args:
      max_runs: the number of runs to fit.
      multiple: the result is a multiple of this.
      limit: available bytes.
      bytes_for: compiles for a number of runs, and returns their bytes.

    Raises:
      ValueError: if not even `multiple` runs fit.
    """
    # Rounded up, as the run axis of the mesh divides the slots evenly.
    runs = -(-max_runs // multiple) * multiple
    while (needed_bytes := bytes_for(runs)) > limit:
        if runs == multiple:
            subject = '1 run needs' if runs == 1 else f'{runs} runs need'
            raise ValueError(
                f'{subject} {needed_bytes / 1e9:.2f} GB per device, but '
                f'{limit / 1e9:.2f} GB are available. Make the model or data.batch_size smaller, '
                'raise train.microbatches, or set model.remat=full.'
            )
        # Proportional: too many, if anything, as some memory does not depend on `runs`.
        estimate = int(runs * limit / needed_bytes) // multiple * multiple
        runs = max(multiple, min(estimate, runs - multiple))
    return runs
