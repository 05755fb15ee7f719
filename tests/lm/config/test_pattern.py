"""The syntax of model.pattern, the recipes of its blocks, and refusals.

Property: other words for the same blocks are the same run.
"""

import pytest

from lm.config.pattern import format_pattern, parse_pattern, tile
from lm.config.resolve import digest, identity, list_unread_options, update_recipe
from lm.devices.check_mesh import check_devices
from lm.devices.mesh import make_mesh
from lm.model.check import check
from lm.model.kernels import kind_kernels, list_attention_kernels, select_kernels
from lm.run.describe import list_config_notes
from tests.helpers import checked_config, tiny_config

PATTERN = 'model.pattern'
HYBRID = {PATTERN: 'linear*3+softmax', 'model.n_layers': 10}


def names(recipe):
    """Returns the rows of each block, in order."""
    return [(k.attention.name, k.mlp.name, k.position.name) for k in recipe.layers]


def test_items_repeat_over_depth():
    """Catches a count for one part of an item, and a rest from the end of the period."""
    recipe = checked_config(
        {PATTERN: 'linear/moe * 2 + softmax:position=none,window=3 | l2', 'model.n_layers': 8}
    )
    linear, softmax = ('linear', 'moe', 'rope'), ('softmax', 'dense', 'none')
    period = [linear, linear, softmax]
    assert names(recipe) == [*period, *period, linear, ('l2', 'dense', 'rope')]
    assert [k.attention.options.get('window') for k in recipe.layers[2:4]] == [3, None]
    period, count, remainder = recipe.tiles
    assert (len(period), count, len(remainder)) == (3, 2, 2)
    assert [part.name for part in recipe.auxiliaries] == ['balance_loss']


def test_first_blocks_are_not_repeated():
    """Catches a period that begins at the first block, and a rest that forgets the first blocks."""
    recipe = checked_config({PATTERN: 'l2*2|linear+softmax|', 'model.n_layers': 7})
    attentions = [kind.attention.name for kind in recipe.layers]
    assert attentions == ['l2', 'l2', 'linear', 'softmax', 'linear', 'softmax', 'linear']
    period, count, remainder = recipe.tiles
    assert (len(recipe.first_layers), len(period), count, len(remainder)) == (2, 2, 2, 1)
    recipe = checked_config({PATTERN: 'l2|linear|softmax', 'model.n_layers': 4})
    assert [k.attention.name for k in recipe.layers] == ['l2', 'linear', 'linear', 'softmax']
    texts = ['linear|softmax', 'l2|linear+softmax|softmax', 'linear*3+softmax']
    digests = {digest(checked_config({PATTERN: text, 'model.n_layers': 4})) for text in texts}
    assert digest(recipe) not in digests and len(digests) == 3


def test_items_have_placements():
    """Of their blocks alone, and part of the identity of a run."""
    text = 'linear:placement=pre+softmax:placement=output'
    recipe = checked_config({PATTERN: text, 'model.placement': 'peri', 'model.n_layers': 4})
    assert [k.placement.name for k in recipe.layers] == ['pre', 'output'] * 2
    assert recipe.placement.name == 'peri'
    plain = checked_config(
        {PATTERN: 'linear+softmax', 'model.placement': 'peri', 'model.n_layers': 4}
    )
    assert digest(recipe) != digest(plain)


def test_items_have_matmuls():
    """The last block stays wide. Part of the identity of a run."""
    changes = {'kernels.matmul': 'mxfp8', 'kernels.x_block': '16', 'model.n_layers': 4}
    recipe = checked_config({PATTERN: 'softmax|softmax:matmul=auto'} | changes)
    kernels = select_kernels(recipe, 'cpu')
    names = [kind_kernels(recipe, k, kernels).kernel_name('matmul') for k in recipe.layers]
    assert names == ['mxfp8'] * 3 + ['narrow_first']
    assert digest(recipe) != digest(checked_config(changes))
    assert digest(checked_config(changes)) != digest(checked_config({'model.n_layers': 4}))


@pytest.mark.parametrize(
    'texts', ['a', 'aab', 'baaa', 'aaabaaabaa', 'abab', 'abcabd', 'bbaaaa', 'abbcbbcb']
)
def test_shortest_pattern_has_the_same_blocks(texts):
    """Catches a count over items that are no neighbours, and a first block that is repeated."""
    names = {'a': 'linear', 'b': 'softmax', 'c': 'l2', 'd': 'nala'}
    expected = [names[letter] for letter in texts]
    text = format_pattern(expected)
    pattern = parse_pattern(text)
    period, count, remainder = tile(
        [p.attention for p in pattern.period], (), len(texts), len(pattern.first)
    )
    assert [p.attention for p in pattern.first] + [*period * count, *remainder] == expected
    longest = {'baaa': 'softmax|linear|', 'aaabaaabaa': 'linear*3+softmax'}
    assert text == longest.get(texts, text)


@pytest.mark.parametrize(
    ('period', 'last', 'length', 'expected'),
    [
        ('aaab', '', 8, ('aaab', 2, '')),
        ('aaab', '', 10, ('aaab', 2, 'aa')),
        ('abab', '', 5, ('ab', 2, 'a')),
        ('aaab', 'b', 10, ('aaab', 2, 'ab')),
        ('aaab', 'b', 8, ('aaab', 2, '')),  # the last block has this kind anyway
        ('aaab', 'a', 8, ('aaab', 1, 'aaaa')),
        ('aa', 'b', 5, ('a', 4, 'b')),
        ('aa', 'a', 5, ('a', 5, '')),
        ('ab', '', 2, ('ab', 1, '')),
    ],
)
def test_period_is_shortest_and_rest_is_prefix(period, last, length, expected):
    shortest, count, remainder = tile(period, last, length)
    assert (''.join(shortest), count, ''.join(remainder)) == expected


@pytest.mark.parametrize(
    'text', ['softmax', 'softmax*3+softmax:window=None', 'softmax/dense|softmax']
)
def test_equal_items_are_no_pattern(text):
    """The recipe is equal, and so are parameters, programs and the name of the run."""
    assert checked_config({PATTERN: text}) == checked_config()
    linear = checked_config({'model.attention': 'linear', 'model.position': 'none'})
    assert checked_config({PATTERN: 'linear:position=none*2'}) == linear


def test_same_blocks_have_the_same_name():
    """Options may be set in their section or behind an item, and a period may be written twice."""
    window = {'attention.window': 3}
    for text, changes in (
        ('linear*3+softmax:window=3', {}),
        ('linear*3+softmax:window=3,sinks=none/dense', {'model.attention': 'l2'}),
        ('linear*3+softmax+linear*3+softmax', window),
        ('linear:position=rope*3+softmax|linear', window),
    ):
        recipe = checked_config(HYBRID | changes | {PATTERN: text})
        assert digest(recipe) == digest(checked_config(HYBRID | window)), text
    differing = [
        checked_config(HYBRID | {PATTERN: text}) for text in ('linear*3+softmax', 'linear*3+l2')
    ]
    differing += [checked_config(HYBRID | window | {PATTERN: 'linear*3+softmax|softmax'})]
    assert len({digest(recipe) for recipe in differing}) == 3
    assert 'model.attention' not in identity(differing[0])


def test_options_are_read_by_items():
    """An option is used if any item reads it, and unused if all items replace it."""
    assert not list_unread_options(checked_config(HYBRID | {'attention.window': 3}))
    text = 'softmax:window=2+softmax:window=4'
    with pytest.raises(ValueError, match=r'attention.window=3 is not used by this config'):
        tiny_config({PATTERN: text, 'attention.window': 3})
    recipe = tiny_config({PATTERN: 'softmax+softmax:window=None', 'attention.window': 3})
    assert [k.attention.options['window'] for k in recipe.layers] == [3, None]
    with pytest.raises(ValueError, match=r'n_experts=3 is not used .*model.pattern=linear\*3'):
        tiny_config(HYBRID | {'mlp.n_experts': 3})
    tiny_config(HYBRID | {PATTERN: 'linear/moe+softmax', 'mlp.n_experts': 3})


REFUSED = [
    ('linaer+softmax', {}, "an attention in model.pattern must be one of .*mean 'linear'"),
    ('softmax/mo+linear', {}, "an MLP in model.pattern must be one of .*'mo'.*Did you mean"),
    ('linear+softmax:position=rop', {}, 'a position in model.pattern must be .*mean .rope'),
    ('softmax:windw=3+linear', {}, 'softmax has no such option.*window'),
    ('softmax:window=0+linear', {}, 'model.pattern=softmax:window must be at least 1; got 0'),
    ('softmax:sinks=learnd+linear', {}, "must be one of learned, none.*mean 'learned'"),
    ('linear:window=3+softmax', {}, 'linear:window: linear has no such option'),
    (
        'softmax:position=none,rope_base=5.0+linear',
        {},
        'an option of position=rope, but its .*none',
    ),
    ('linear*0+softmax', {}, r"'linear\*0' is no item"),
    ('linear**2', {}, 'is no item'),
    ('linear++softmax', {}, "'' is no item"),
    ('', {}, "'' is no item"),
    ('linear/dense/none', {}, 'has two slashes'),
    ('linear|softmax|l2|nala', {}, 'may have two bars'),
    ('(linear, softmax)', {}, 'is one text.*config.sweep'),
    ('linear+softmax:window', {}, 'must have the form NAME:OPTION=VALUE'),
    ('linear*3+softmax', {'model.n_layers': 3}, 'has 4 blocks, but model.n_layers=3'),
    ('linear+softmax|l2', {'model.n_layers': 2}, '2 blocks and 1 last ones, but .*at least 3'),
    ('softmax:full_every=2+linear', {}, 'model.pattern, item softmax:full_every=2: .*window'),
    ('softmax+linear:position=alibi', {}, 'item linear:position=alibi: .*no such logits'),
    ('linear+softmax:position=learned', {}, 'is added to the embeddings, .*only some'),
    ('linear+softmax', {'data.objective': 'prefix'}, 'item linear: data.objective=prefix'),
    ('linear+softmax', {'model.attention_dropout': 0.1}, 'item linear: .*no attention prob'),
    ('linear+softmax', {'model.reparam': 'shared'}, 'stores one matrix for all blocks'),
    ('linear/moe+softmax/moe', {'model.placement': 'wide'}, 'stores one matrix for all blocks'),
    ('linear+softmax', {'model.placement': 'mix', 'model.mix_fraction': 0.5}, 'by depth in groups'),
    ('linear+softmax', {'model.placement': 'hybrid_star'}, 'by depth in groups'),
    ('linear:matmul=mxfp8+softmax', {}, 'a matmul in model.pattern must be one of auto, direct'),
    ('softmax:matmul=auto', {'kernels.matmul': 'mxfp8'}, 'all blocks have another matmul'),
    ('linear+nala', {'kernels.attention': 'blocked'}, 'linear and .*nala uses another kind'),
    ('softmax+l2', {'kernels.linear_attention': 'chunked'}, 'uses another kind of kernel'),
    ('linear+l2', {'kernels.attention': 'splash', 'model.head_dim': 128}, 'item l2: .*splash does'),
    ('linear/moe:n_experts=1+softmax', {}, 'experts_per_token must be at most'),
    ('linear|softmax+l2|nala', {'model.n_layers': 3}, '1 first ones and 1 last .*at least 4'),
    ('linear:placement=per+softmax', {}, 'a placement in model.pattern must be .*mean .peri'),
    ('linear:placement=post+softmax', {}, 'model.placement=post does not. Choose'),
    ('linear:placement=pre+softmax', {'model.placement': 'parallel'}, '=parallel does not. Choose'),
]


@pytest.mark.usefixtures('nothing_is_traced')
@pytest.mark.parametrize(('text', 'changes', 'says'), REFUSED)
def test_refused_before_tracing(text, changes, says):
    with pytest.raises(ValueError, match=says):
        check(tiny_config({'model.n_layers': 4, PATTERN: text} | changes))


def test_common_error_names_no_item():
    """For example a head of odd width: it is no fault of an item."""
    with pytest.raises(ValueError, match=r'^model.position=rope rotates pairs'):
        check(tiny_config({PATTERN: 'softmax:window=3+softmax', 'model.head_dim': 3}))


def test_mesh_is_checked_by_item():
    def check_text(text, axis):
        recipe = tiny_config({PATTERN: text, f'mesh.{axis}': 2, 'mesh.data': 1})
        check_devices(recipe, make_mesh(recipe.mesh))

    with pytest.raises(ValueError, match=r'item linear: mesh.context=2 shards the tokens'):
        check_text('linear+softmax', 'context')
    with pytest.raises(ValueError, match=r'mesh.expert must divide mlp.n_experts; got 2 for 3'):
        check_text('softmax+softmax/moe:n_experts=3', 'expert')
    check_text('softmax/moe+softmax', 'expert')
    with pytest.raises(ValueError, match='has none'):
        check_text('linear+softmax', 'expert')


def test_kernel_is_chosen_for_each_kind():
    """Splash has no distances between queries and keys: catches one kernel for all kinds."""
    recipe = checked_config(
        {PATTERN: 'linear+l2+softmax', 'model.n_layers': 6, 'model.head_dim': 128}
        | {'model.dtype': 'bfloat16', 'data.seq_len': 128}
    )
    kernels = select_kernels(recipe, 'tpu')
    assert list_attention_kernels(recipe, kernels) == {'l2': 'blocked', 'softmax': 'splash'}
    assert (
        kind_kernels(recipe, recipe.kinds['softmax'], kernels).kernel_name('attention') == 'splash'
    )
    uniform = checked_config()
    assert kind_kernels(uniform, *uniform.kinds.values(), kernels) is kernels


def test_rest_is_stated():
    (note,) = [note for note in list_config_notes(checked_config(HYBRID)) if PATTERN in note]
    assert note == 'model.pattern: 2 times 4 blocks, and blocks 9 to 10 are linear+linear'
    even = update_recipe(checked_config(HYBRID), {'model.n_layers': 8})
    assert not any(PATTERN in note for note in list_config_notes(even))


def test_parsing_keeps_items():
    pattern = parse_pattern('linear*2+softmax:window=3,sinks=learned/moe:n_experts=2|l2')
    linear, _, softmax = pattern.period
    assert (linear.attention, linear.mlp, linear.position) == ('linear', None, None)
    assert softmax.options == {'window': 3, 'sinks': 'learned'}
    assert (softmax.mlp, softmax.mlp_options) == ('moe', {'n_experts': 2})
    assert [entry.text for entry in pattern.last] == ['l2']
