"""What does infilling cost a causal model, and how much of it is enough (CodeGen2's mixture)?

Question: at equal tokens, with a share p of causal rows and the rest with holes, how do the causal
          loss and the loss on holes change as p goes from 1 to 0? Is a mixture free, as
          arXiv:2207.14255 finds for prefix-suffix-middle, or does it cost a little, as
          arXiv:2305.02309 finds? What is the effect of a prefix that is read in both directions?
Command:  uv run train.py --config=configs/studies/objectives.py --workdir=runs/objectives
          uv run python -m eval.runs --workdir=runs/objectives "select data_objective,
          count(*) n, avg(ce) ce, avg(infill_ce) infill, avg(span_corruption_ce) spans,
          avg(prefix_ce) prefix, avg(tokens) targets from runs group by 1 order by 1"
Cost:     27 runs of 0.26 million parameters in nine programs, ten minutes on two CPU cores.
Result:   one hole in half of the rows costs no more than the spread of seeds, span corruption costs
          the targets that it lacks, a prefix does not help: configs/studies/results/objectives.md

`ce` is the loss on the unchanged text. The other losses are on the same validation rows with holes
or a prefix: on the contents of the holes, or on the text after the prefix. A model trained only on
causal rows has never seen a special token, so its losses there show how much of the task is the
format. Every vocabulary has the special tokens, used or not. Seeds differ in the initial
parameters; every cell reads the same rows in the same order. `targets` counts the target tokens of
the loss. Divided by step * 8 * 128 it is their share, which is small if the loss is on holes alone.
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
