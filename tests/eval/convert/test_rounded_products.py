"""Contract: conversions of runs with products of few bits compare weights, and print the effect of
rounding.
"""

import numpy as np
import pytest

from eval.convert import __main__ as convert
from eval.convert.fold import compute_logits, use_reference_kernels, write_workdir
from lm.data.tokenizers import ByteTokenizer
from lm.model.kernels import rounds_products, select_kernels, widen_products
from modules.kernels import MATMUL_KERNELS, kernels_for
from modules.kernels.matmul.low_precision import LAYERS
from tests.eval.convert.test_commands import checkpoint
from tests.helpers import checked_config

MEDIAN = {'kernels.matmul': 'bitnet', 'kernels.w_scale': 'median'}


def test_products_become_wide_or_keep_their_options():
    """Catches kernels that lose options, so that another model is compared."""
    recipe = checked_config(MEDIAN)
    assert rounds_products(recipe) and not rounds_products(checked_config({}))
    assert use_reference_kernels(recipe).kernels['matmul'].options['w_scale'] == 'median'
    kernels = select_kernels(widen_products(recipe), 'cpu')
    for layers in LAYERS:
        assert kernels.matmul_for(layers) is kernels_for('cpu').matmul


EXACT = ('direct', 'narrow_first', 'einsum', 'wta_crs')


@pytest.mark.parametrize('name', MATMUL_KERNELS)
def test_only_rounded_products_are_widened(name):
    """Catches a row without options that is called like a class."""
    recipe = checked_config({'kernels.matmul': name})
    assert rounds_products(recipe) == (name not in EXACT)
    assert (widen_products(recipe) is recipe) != rounds_products(recipe)


WIDE_END = {'model.pattern': 'softmax|softmax:matmul=auto', 'model.n_layers': 3}


@pytest.mark.full
@pytest.mark.parametrize('changes', [{}, WIDE_END], ids=['all', 'wide_end'])
def test_export_says_how_much_rounding_changes(tmp_path, capsys, changes):
    """The files have the weights of the run; programs that read them do not round. A last block
    that stays wide is another stack of the checkpoint.
    """
    model = checkpoint({'model.activation': 'swiglu'} | MEDIAN | changes)
    meta = {'vocab_size': model.meta['vocab_size'], 'data': None}
    write_workdir(tmp_path / 'run', model.recipe, model.weights, ByteTokenizer(), 3, meta)
    options = {'checkpoint': str(tmp_path / 'run'), 'out': str(tmp_path / 'out')}
    convert.run(['export-hf'], options | {'dtype': 'float32'})
    printed = capsys.readouterr().out
    assert 'differ by at most 0.0e+00' in printed
    line = printed.splitlines()[-1]
    assert line.startswith('NOTE: the run rounds the operands of its products (kernels.matmul=bitn')
    assert 0.01 < float(line.split(' by ')[1].split()[0]) < 2
    arguments = model.meta['vocab_size'], model.variables, 'float32'
    wide = compute_logits(model.recipe, *arguments)
    plain = compute_logits(widen_products(model.recipe), *arguments)
    np.testing.assert_array_equal(wide, plain)
