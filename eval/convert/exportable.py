"""Says, before a config is trained, as which family its model can be exported.

The choice is `export_hf.select_family`, for weights of which nothing is known: biases are not 0,
and the stream is not centred.
"""

import numpy as np

from eval.convert.export_hf import SCALE, build_plain_recipe, select_family
from eval.convert.families import FAMILIES
from eval.convert.fold import build_cpu_learner
from eval.convert.import_hf import format_list, param_shapes
from lm.config.recipe import Recipe

VOCAB = 256  # tokens of the shapes that are compared; no family depends on it


def find_export_family(recipe: Recipe) -> str:
    """Returns the model_type as which a model of this recipe is exported.

    Raises ValueError if no family has it: the error names the fields that the nearest one lacks.
    """
    plain = build_plain_recipe(recipe)
    paths = {*param_shapes(build_cpu_learner(plain, VOCAB))}
    # Ones are no zero biases, and have a mean that is not 0.
    name, _, converted = select_family(plain, dict.fromkeys(paths, np.ones(1)))
    without_place = paths - {SCALE} - {*param_shapes(build_cpu_learner(converted, VOCAB))}
    if without_place:
        raise ValueError(
            f'no family of transformers can represent this model; the nearest, {name}, has no '
            f'parameter for {format_list(sorted(without_place))}, except if it stays 0'
        )
    return name


def describe_export(recipe: Recipe) -> str:
    """Returns the class of transformers and its model_type, or why no class has the model."""
    try:
        name = find_export_family(recipe)
    except ValueError as error:
        return str(error).partition(' Families: ')[0].removesuffix('.')
    return f'as {FAMILIES[name].architecture} (model_type {name})'
