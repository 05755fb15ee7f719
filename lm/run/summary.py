"""Describes the model, the machine and the text of a run for summary.json."""

from typing import Any

from lm.record.machine import device_name, peak_memory_bytes, versions
from lm.run.program import Experiment
from lm.run.tables import optimizer_state_bytes, parameter_count
from lm.training.flops import count_by_use


def describe_model(experiment: Experiment) -> dict[str, Any]:
    """Returns the parameters by use, the operations of a token and the bytes of the optimizer."""
    by_use = count_by_use(experiment.learner)
    return {
        'parameters': parameter_count(experiment.learner),
        **{f'{use}_parameters': n for use, n in by_use.items()},
        'flops_per_token': experiment.flops_per_token,
        'optimizer_state_bytes': optimizer_state_bytes(experiment.state_shapes),
    }


def describe_machine(experiment: Experiment) -> dict[str, Any]:
    """Returns the devices with their memory and peak, and the versions of the packages."""
    return {
        'peak_memory_bytes': peak_memory_bytes(),
        'device': device_name(),
        'mfu_of': f'{experiment.peak:.4g} FLOP/s, {experiment.peak_source}',
        'versions': versions(),
    }


def describe_text(experiment: Experiment) -> dict[str, Any]:
    """Returns the digest and sizes of the text, and of each held-out text if there are any."""
    texts = {
        name: {
            'source': experiment.recipe.texts[name],
            'digest': text.digest,
            'tokens': text.rows.n_tokens,
            'bytes': text.rows.n_bytes,
        }
        for name, text in experiment.texts.items()
    }
    dataset = experiment.dataset
    described = {'data': {'digest': dataset.digest, **dataset.report}}
    return described | ({'held_out_texts': texts} if texts else {})
