"""What does infilling cost a causal model, and how much of it is enough (CodeGen2's mixture)?

Question: at equal tokens, with a share p of causal rows and the rest with holes, how do the causal
          loss and the loss of holes change as p goes from 1 to 0; is a mixture free, as
          arXiv:2207.14255 finds for prefix-suffix-middle, or does it cost a little, as
          arXiv:2305.02309 finds; and what is the effect of a prefix that is read both ways?
Command:  uv run train.py --config=configs/studies/objectives.py --workdir=runs/objectives
          uv run python -m eval.runs --workdir=runs/objectives "select data_objective,
          count(*) n, avg(ce) ce, avg(infill_ce) infill, avg(span_corruption_ce) spans,
          avg(prefix_ce) prefix, avg(tokens) targets from runs group by 1 order by 1"
Cost:     27 runs of 0.26 million parameters in nine programs, ten minutes on two CPU cores.
Result:   half of the rows with one hole costs no more than the spread of seeds, spans cost the
          targets that they lack, a prefix does not pay: configs/studies/results/objectives.md

`ce` is the loss of the unchanged text for all. The other losses are for the same validation rows
with holes, or with a prefix: the loss of the holes' contents, or of the text after the prefix. A
model that was trained on causal rows alone has never seen a special token, so its losses there show
how much of the task is the format. Special tokens are in every vocabulary, used or not, and the
seeds draw other initial parameters: every cell reads the same rows in the same order. `targets`
counts the target tokens of the loss: over step * 8 * 128 it is their share, and small if the loss
is on holes alone.
"""

from ml_collections import ConfigDict

from configs.studies import small

OBJECTIVES = (
    'causal',
    'causal:0.75+span_corruption:0.25',
    'causal:0.5+span_corruption:0.5',
    'causal:0.25+span_corruption:0.75',
    'span_corruption',
    'causal:0.5+infill:0.5',
    'infill',
    'causal:0.5+prefix:0.5',
    'prefix',
)


def get_config() -> ConfigDict:
    config = small.get_config()
    config.data.masks = 8
    config.optim.lr = 1e-2
    config.train.eval_objectives = 'causal+span_corruption+infill+prefix'
    config.train.steps = 500
    config.train.eval_every = 250
    config.train.log_every = 50
    config.sweep = {
        'data.objective': OBJECTIVES,
        'train.seed': (0, 1, 2),
    }
    return config
