"""Tasks of lm-evaluation-harness on files. Reference: sums of log-probabilities by hand."""

import ast
import json
import random
import subprocess
import sys
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from eval.suites.harness import _find_tasks, harness
from lm.data.tokenizers import plan_tokenizer
from tests import ROOT
from tests.eval.suites.checkpoints import make_checkpoint

CHANGES = {'data.seq_len': 32, 'model.n_layers': 1, 'data.batch_size': 8}
TASKS = {
    'pick': """
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    'text': """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question}}"
metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}, {metric: bits_per_byte}]
""",
    'write': """
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{choices[0]}}"
generation_kwargs: {until: ["e"], max_gen_toks: 6, do_sample: false}
metric_list: [{metric: exact_match}]
""",
}
WORDS = ['the', 'cat', 'sat', 'on', 'a', 'mat', 'and', 'the', 'dog', 'ran', 'to', 'it']


def documents(n=8):
    rng = random.Random(0)
    for i in range(n):
        question = ' '.join(rng.choices(WORDS, k=3 + 14 * (i % 4)))  # some longer than a row
        choices = [' '.join(rng.choices(WORDS, k=k)) for k in (1, 2, 3)]
        yield {'question': question, 'choices': choices, 'answer': i % 3}


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    """A folder of three tasks on one file. The library caches elsewhere."""
    root = tmp_path_factory.mktemp('harness')
    (root / 'tasks').mkdir()
    (root / 'docs.jsonl').write_text('\n'.join(map(json.dumps, documents())))
    for name, task_fields in TASKS.items():
        (root / 'tasks' / f'{name}.yaml').write_text(
            f'task: {name}\ndataset_path: json\n'
            f'dataset_kwargs: {{data_files: {{validation: {root}/docs.jsonl}}}}\n'
            f'validation_split: validation\n{task_fields}'
        )
    with pytest.MonkeyPatch.context() as patch:
        import datasets

        patch.setattr(datasets.config, 'HF_DATASETS_CACHE', str(root / 'cache'))
        patch.setattr(datasets.config, 'HF_DATASETS_OFFLINE', True)
        yield root


@pytest.fixture(scope='module')
def tokenizer():
    return plan_tokenizer('bpe:300').build([' '.join(WORDS)] * 4)


def sum_last_tokens(checkpoint, row, count):
    """Returns log p of the last tokens of a row, and whether each is the likeliest."""
    padded = np.zeros((1, 33), np.int32)
    padded[0, : len(row)] = row
    log_p_TV = np.asarray(jax.nn.log_softmax(checkpoint.logits(padded)[0]))
    places = range(len(row) - 1 - count, len(row) - 1)
    log_p = sum(log_p_TV[i, row[i + 1]] for i in places)
    return log_p, all(log_p_TV[i].argmax() == row[i + 1] for i in places)


def by_hand(checkpoint, context, continuation):
    """Returns log p of a continuation after as much context as fits, and whether it is greedy."""
    return sum_last_tokens(
        checkpoint, [checkpoint.tokenizer.bos_id, *context, *continuation][-33:], len(continuation)
    )


@pytest.mark.full
@pytest.mark.parametrize('n_devices', [1, 8])
def test_harness_numbers_by_hand(folder, tokenizer, n_devices):
    checkpoint = make_checkpoint(CHANGES, tokenizer, n_devices)
    by = make_checkpoint(CHANGES, tokenizer)
    suite_result = harness(checkpoint, tasks='pick+text+write', include_path=f'{folder}/tasks')
    right, right_by_length, bits, n_bytes, exact = [], [], 0.0, 0, []
    for document in documents():
        question = document['question']
        context, log_probs = tokenizer.encode(question), []
        for choice in document['choices']:
            whole = tokenizer.encode(f'{question} {choice}')
            log_probs.append(by_hand(by, context, whole[len(context) :])[0])
        lengths = [len(choice) for choice in document['choices']]
        right.append(np.argmax(log_probs) == document['answer'])
        right_by_length.append(np.argmax(np.divide(log_probs, lengths)) == document['answer'])
        for start in range(0, len(context), 32):  # the last of them has as much before as fits
            window = context[start : start + 32]
            stop = start + len(window)
            before = context[max(0, stop - 33) : start]
            row = before if start else [tokenizer.bos_id]
            bits -= sum_last_tokens(by, [*row, *window], len(window))[0]
        n_bytes += len(question)
        row = [tokenizer.bos_id, *context][-(32 - 6) :]
        completions = []
        while len(completions) < 6:
            padded = np.zeros((1, 33), np.int32)
            padded[0, : len(row) + len(completions)] = [*row, *completions]
            likeliest = int(by.logits(padded)[0, len(row) + len(completions) - 1].argmax())
            if likeliest == tokenizer.eos_id:
                break
            completions.append(likeliest)
        exact.append(tokenizer.decode(completions).split('e')[0] == document['choices'][0])
    numbers = suite_result.numbers
    assert numbers['pick/acc'] == pytest.approx(np.mean(right))
    assert numbers['pick/acc_norm'] == pytest.approx(np.mean(right_by_length))
    assert numbers['text/bits_per_byte'] == pytest.approx(bits / n_bytes / np.log(2), rel=1e-5)
    assert numbers['write/exact_match'] == pytest.approx(np.mean(exact))
    assert numbers['pick/acc_stderr'] == pytest.approx(np.std(right, ddof=1) / 8**0.5)
    values = dict(zip(suite_result.items['item'], suite_result.items['value'], strict=True))
    assert [values[f'pick/{i}'] for i in range(8)] == right
    assert [values[f'write/{i}'] for i in range(8)] == exact
    assert len(values) == 24
    table = suite_result.tables['Tasks'].columns
    assert table['task'] == ['pick'] * 2 + ['text'] * 3 + ['write']
    json.dumps([suite_result.numbers, suite_result.items, table])


def request(*args):
    return SimpleNamespace(args=args)


@pytest.fixture(scope='module')
def model(tokenizer):
    from eval.suites.harness_lm import CheckpointLM

    return CheckpointLM(make_checkpoint(CHANGES, tokenizer))


@pytest.mark.full
def test_answers_keep_request_order(model, tokenizer):
    pairs = [('the cat', ' sat'), ('', 'a mat'), ('on ' * 40, ' the'), ('the cat', ' sat on a')]
    checkpoint = make_checkpoint(CHANGES, tokenizer)
    answers = model.loglikelihood([request(*pair) for pair in pairs], disable_tqdm=True)
    for (context, text), (log_p, is_greedy) in zip(pairs, answers, strict=True):
        before = tokenizer.encode(context.rstrip()) if context else []
        tokens = tokenizer.encode(context + text)[len(before) :]
        expected = by_hand(checkpoint, before, tokens)
        assert log_p == pytest.approx(expected[0], rel=1e-5)
        assert is_greedy == expected[1]


@pytest.mark.full
def test_greedy_texts_and_stop_strings(model):
    context = request('the cat', {'until': [], 'max_gen_toks': 5})
    text = model.generate_until([context])[0]
    assert len(text) > 2
    stopped = request('the cat', {'until': [text[2], ''], 'max_gen_toks': 5})
    assert model.generate_until([stopped, context]) == [text.split(text[2])[0], text]


@pytest.mark.full
def test_unsupported_requests_are_refused(model):
    with pytest.raises(ValueError, match=r'at most data\.seq_len = 32 tokens; got \d+: '):
        model.loglikelihood([request('a', ' cat' * 40)], disable_tqdm=True)
    with pytest.raises(ValueError, match=r"'temprature', .* Did you mean 'temperature'"):
        model.generate_until([request('a', {'temprature': 1})])
    with pytest.raises(ValueError, match='this suite has no chat template'):
        model.apply_chat_template([])


@pytest.mark.full
def test_answers_are_cached_by_checkpoint(folder, tokenizer, tmp_path, monkeypatch):
    from eval.suites import harness_lm

    options = {'tasks': 'pick', 'include_path': f'{folder}/tasks', 'cache': str(tmp_path / 'kept')}
    model_a = make_checkpoint(CHANGES, tokenizer)
    first = harness(model_a, **options).numbers
    changed = jax.tree.map(lambda x: x * 1.5, model_a.weights)
    other_numbers = harness(make_checkpoint(CHANGES, tokenizer, weights=changed), **options).numbers
    assert len(list((tmp_path / 'kept').glob('*.db'))) == 2
    monkeypatch.delattr(harness_lm.CheckpointLM, '_score_pairs')  # nothing is scored again
    assert harness(model_a, **options).numbers == first
    assert (
        other_numbers
        == harness(make_checkpoint(CHANGES, tokenizer, weights=changed), **options).numbers
    )


@pytest.mark.full
def test_missing_tasks_and_data_are_refused(folder, tmp_path):
    with pytest.raises(ValueError, match=r"no task 'hellaswagg' .*Did you mean 'hellaswag'"):
        _find_tasks('hellaswagg', '')
    with pytest.raises(ValueError, match='is not a folder'):
        _find_tasks('pick', str(tmp_path / 'no'))
    (tmp_path / 'gone.yaml').write_text(
        'task: gone\ndataset_path: somebody/nothing\noutput_type: multiple_choice\n'
        'validation_split: validation\ndoc_to_text: a\ndoc_to_choice: [a]\ndoc_to_target: 0\n'
    )
    with pytest.raises(
        ValueError, match=r"the task 'gone': .*HF_DATASETS_OFFLINE=1 .*HF_HUB_CACHE"
    ):
        harness(None, tasks='gone', include_path=str(tmp_path))


def test_harness_suite_requires_task_names():
    with pytest.raises(ValueError, match='needs at least one task: --suite=harness:TASK'):
        _find_tasks('', '')


@pytest.mark.full
def test_suites_do_not_import_harness():
    program = 'import eval.suites, sys; print(sorted({m.partition(".")[0] for m in sys.modules}))'
    done = subprocess.run([sys.executable, '-c', program], cwd=ROOT, capture_output=True, text=True)
    assert not {'lm_eval', 'datasets', 'sklearn'} & set(ast.literal_eval(done.stdout))
