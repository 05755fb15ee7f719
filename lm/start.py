"""The state a run starts from: drawn, or with the weights of a checkpoint (train.init_from)."""

import jax

from lm.checkpoint import check_tree, tree_record
from lm.config import Config
from lm.load import load
from lm.setting import Setting
from lm.state import State, describe_params, hyper_from

PROBE = 'def f(x):\n    return "Evenkeel trains models"\n'


def initial_state(config: Config, setting: Setting) -> State:
    """Step 0, laid out on the mesh.

    With train.init_from, the weights the model uses are those that the checkpoint's model used,
    stored as the present model.reparam has them; what layers carry is taken over where all of it
    fits and fresh otherwise; the optimizer starts anew. Raises ValueError where a parameter has no
    counterpart of its shape, or the tokenizers differ.
    """
    key = jax.random.key(config.train.seed)
    state = setting.draw(key, hyper_from(config))
    if not config.train.init_from:
        return state
    source = load(config.train.init_from)
    if source.tokenizer.encode(PROBE) != setting.dataset.tokenizer.encode(PROBE):
        raise ValueError(
            f'train.init_from={config.train.init_from} was trained with another tokenizer '
            f'({source.config.data.tokenizer}) than data.tokenizer={config.data.tokenizer}'
        )
    described = describe_params(config, setting.model)
    variables = source.variables
    used = variables.pop('params')
    check_tree(tree_record(used), _used_record(described, state), source.path)
    stored, reparam = described.reparam.init(used)
    stats = state.stats
    if tree_record(variables) == tree_record(stats):
        stats = variables
    params, reparam, stats = jax.tree.map(
        lambda new, old: jax.device_put(new, old.sharding),
        (stored, reparam, stats),
        (state.params, state.reparam, state.stats),
    )
    return state.replace(params=params, reparam=reparam, stats=stats)


def _used_record(described, state: State) -> dict[str, str]:
    def use(params, reparam):
        return described.reparam.apply(params, reparam, False)[0]

    return tree_record(jax.eval_shape(use, state.params, state.reparam))
