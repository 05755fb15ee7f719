"""Fine-tuning on conversations: what the loss counts, and a run from an imported model."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lm.config.resolve import update_recipe
from lm.devices.shardings import batch_shapes
from lm.model.check import check
from lm.training.state import make_hyper
from lm.training.step import compute_activations, make_eval_step, make_train_step
from tests.helpers import (
    BOS,
    VOCAB,
    assert_trees_close,
    checked_config,
    initial_state,
    tiny_learner,
)
from tests.sweep_helpers import base, cell_config, timeless, write_corpus
from train import DONE, train

CHAT = {'data.source': 'chat:x.jsonl', 'data.mask_documents': True, 'data.seq_len': 12}
LENGTHS, ANSWERS = (5, 8), ((3, 5), (4, 6))  # the last token of the first answer is BOS


def build_chats():
    """Two conversations with BOS within, and their targets."""
    rng = np.random.default_rng(0)
    chats = []
    for length, (start, stop) in zip(LENGTHS, ANSWERS, strict=True):
        tokens = rng.integers(1, VOCAB, length).astype(np.int32)
        tokens[[0, 2]], targets = BOS, np.zeros(length, np.int32)
        targets[start:stop] = 1
        chats.append((tokens, targets))
    chats[0][0][4] = BOS
    return chats


def build_row(chats, width=13):
    tokens, segments, targets = np.zeros((3, width), np.int32)
    used = 0
    for number, (chat_tokens, chat_targets) in enumerate(chats, 1):
        place = slice(used, used + len(chat_tokens))
        tokens[place], segments[place], targets[place] = chat_tokens, number, chat_targets
        used += len(chat_tokens)
    return {'tokens': tokens, 'segments': segments, 'targets': targets}


def build_batch(rows):
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


def evaluate(config, batch):
    learner = tiny_learner(config)
    sums = make_eval_step(learner)(initial_state(config).weights, batch, make_hyper(config))
    return float(sums['ce']), float(sums['tokens'])


def test_reference_answer_loss_by_hand():
    """Summed by hand from the logits: the token before a target predicts it."""
    config = checked_config(CHAT)
    learner, (tokens, targets) = tiny_learner(config), build_chats()[0]
    batch = build_batch([build_row([(tokens, targets)])])
    variables, hyper = learner.variables(initial_state(config).weights), make_hyper(config)
    (x_BTD, readout), _ = compute_activations(learner, variables, batch, (), hyper)
    log_p_TV = jax.nn.log_softmax(readout(x_BTD)[0].astype(jnp.float32))
    by_hand = -(log_p_TV[2, tokens[3]] + log_p_TV[3, tokens[4]])
    loss, count = evaluate(config, batch)
    assert count == 2
    np.testing.assert_allclose(loss, by_hand, rtol=1e-6)


@pytest.mark.full
def test_equivalence_packed_and_alone():
    """A conversation sees nothing of its row, and its targets keep their place."""
    config, chats = checked_config(CHAT), build_chats()
    packed = evaluate(config, build_batch([build_row(chats)]))
    single = [evaluate(config, build_batch([build_row([chat])])) for chat in chats]
    np.testing.assert_allclose(packed, np.sum(single, 0), rtol=1e-6)
    whole = evaluate(
        checked_config(CHAT | {'data.mask_documents': False}), build_batch([build_row(chats)])
    )
    assert abs(whole[0] - packed[0]) > 1e-4


@pytest.mark.full
def test_equivalence_microbatches_with_few_targets():
    """Microbatches have different numbers of targets, and the batch's count divides all."""
    chats = build_chats()
    rows = [build_row(chats), build_row(chats[:1]), build_row(chats[1:]), build_row(chats[:1])]
    rows[3]['targets'][4] = 0
    batch, states = build_batch(rows), []
    for count in (1, 2):
        config = checked_config(CHAT | {'data.batch_size': 4, 'train.microbatches': count})
        step = jax.jit(make_train_step(tiny_learner(config)))
        state, metrics = step(initial_state(config), batch, make_hyper(config))
        states.append((state.params, metrics['loss'], metrics['batch_tokens']))
    assert states[0][2] == 4 + 2 + 2 + 1
    assert_trees_close(*states, 1e-4, 1e-6)


def test_batch_fields_and_refused_objectives():
    """A step compiled without `targets` would learn the questions, too."""
    mixture = "{'a': (1, 'text:x.txt'), 'b': (1, 'chat:x.jsonl')}"
    mixed = checked_config({'data.source': '', 'data.mixture': mixture})
    assert 'targets' in batch_shapes(mixed) and 'targets' in batch_shapes(checked_config(CHAT))
    assert 'targets' not in batch_shapes(checked_config())
    for field in ('data.objective', 'train.eval_objectives'):
        with pytest.raises(ValueError, match=f'chat:x.jsonl.* has conv.*Set {field}=causal'):
            check(update_recipe(mixed, {field: 'infill'}))


def write_chats(folder):
    """Writes 60 conversations, and returns their source."""
    messages = [
        [{'role': 'user', 'content': f'{i}?'}, {'role': 'assistant', 'content': f'{i % 7}'}]
        for i in range(60)
    ]
    lines = [json.dumps({'messages': chat}) + '\n' for chat in messages]
    (folder / 'chats.jsonl').write_text(''.join(lines))
    return f'chat:{folder}/chats.jsonl'


@pytest.mark.full
def test_equivalence_resumed_run_is_the_run(tmp_path):
    """Bitwise, from half way; the loss of answers falls."""
    changes = {
        'data_source': write_chats(tmp_path),
        'data_seq_len': 48,
        'data_mask_documents': True,
    }
    changes |= {'optim_schedule': 'constant', 'optim_warmup_steps': 0, 'data_packing': 'best_fit'}
    config = cell_config(base(write_corpus(tmp_path), **changes), {})
    assert train(config, tmp_path / 'whole') == DONE
    half = update_recipe(config, {'train.steps': config.train.steps // 2})
    assert train(half, tmp_path / 'parts') == DONE
    assert train(config, tmp_path / 'parts', continue_changed=True) == DONE
    whole, parts = timeless(tmp_path / 'whole'), timeless(tmp_path / 'parts')
    assert whole == parts
    losses = [row['loss'] for row in whole if 'loss' in row]
    assert losses[-1] < losses[0] and 0 < whole[0]['target_share'] < 1
