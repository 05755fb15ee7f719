"""Property: what lies beside a tokenizer stays with it, byte for byte, on every way of a model."""

import json

import numpy as np
import pytest

from configs import default
from eval.convert import __main__ as convert
from eval.convert import import_hf
from eval.load import load
from lm.config.resolve import resolve, to_dict
from tests.eval.convert.test_hf import WORDS, base, save_case, with_tokenizer
from train import DONE, train

FILES = {
    'special_tokens_map.json': b'{"pad_token": "<unk>"}',
    'added_tokens.json': b'{"<s>":1}',
    'generation_config.json': b'{"eos_token_id": [2, 5], "temperature": 0.6}\n',
    'chat_template.jinja': '{# é #}{{ messages }}\r\n'.encode(),
    'additional_chat_templates/tool_use.jinja': b'{{ tools }}',
}


def save_model(folder):
    """Writes a folder of transformers with all files that may lie beside its tokenizer."""
    with_tokenizer(save_case(folder, 'llama2'))
    config = json.loads((folder / 'tokenizer_config.json').read_text())
    config |= {'chat_template': '{{ bos_token }}', 'model_max_length': 10**30}
    (folder / 'tokenizer_config.json').write_text(json.dumps(config, indent=3))
    (folder / 'additional_chat_templates').mkdir()
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
    return folder


def find_lost(folder, source):
    """Returns the files beside a tokenizer that a folder lacks, or has with another content."""
    names = [*FILES, 'tokenizer_config.json']
    return [
        name
        for name in names
        if not (folder / name).is_file()
        or (folder / name).read_bytes() != (source / name).read_bytes()
    ]


def test_import_and_merge_keep_the_files(tmp_path):
    """A run of token ids has them too: its texts end as generation_config.json says."""
    source = save_model(tmp_path / 'hf')
    for name in ('words', 'ids'):
        run = tmp_path / name
        import_hf.write_run(source, run, import_hf.import_folder(source, base(), run))
        assert find_lost(run / 'tokenizer', source) == []
        assert load(run).end_ids == (2, 5)
        convert.write_like(load(run), tmp_path / f'{name}_like', load(run).weights, {})
        assert find_lost(tmp_path / f'{name}_like' / 'tokenizer', source) == []
        (source / 'tokenizer.json').unlink(missing_ok=True)


@pytest.mark.full
def test_tuned_folded_and_exported_models_keep_the_files(tmp_path):
    source, run = save_model(tmp_path / 'hf'), tmp_path / 'run'
    rng = np.random.default_rng(0)
    texts = [' '.join(rng.choice(WORDS, 40)) for _ in range(40)]
    (tmp_path / 'text.jsonl').write_text('\n'.join(json.dumps({'text': t}) for t in texts))
    config = default.get_config()
    config.data.source, config.data.cache_dir = f'text:{tmp_path}/text.jsonl', str(tmp_path / 'c')
    config.data.validation_fraction, config.data.batch_size = 0.2, 8
    convert.run(['import-hf', str(source)], {'out': str(run), 'config': config, 'reference': None})
    tree = to_dict(load(run).recipe)
    tree['model']['reparam'], tree['train']['trainable'] = 'lora', 'lora'
    tree['train'] |= {'init_from': str(run), 'steps': 2}
    # By the run that it begins from, and by the folder itself.
    for name, spec in (('tuned', f'hf:{run}/tokenizer'), ('direct', f'hf:{source}')):
        tree['data']['tokenizer'] = spec
        if name == 'direct':
            tree['train'] |= {'init_from': '', 'trainable': 'all'}
            tree['model']['reparam'] = 'none'
        assert train(resolve(tree), tmp_path / name) == DONE
        assert find_lost(tmp_path / name / 'tokenizer', source) == []

    def convert_run(command, checkpoint, target, **options):
        options |= {'checkpoint': str(tmp_path / checkpoint), 'out': str(tmp_path / target)}
        convert.run([command], options)
        return tmp_path / target

    folded = convert_run('fold', 'tuned', 'folded', to='none', untie=False)
    assert find_lost(folded / 'tokenizer', source) == []
    merge = {'keep': None, 'basis': None, 'base': '', 'out': str(tmp_path / 'merged')}
    convert.run(['merge', str(folded), str(folded)], merge)
    assert find_lost(tmp_path / 'merged' / 'tokenizer', source) == []
    exported = convert_run('export-hf', 'merged', 'exported', dtype='float32')
    adapter = convert_run('export-peft', 'tuned', 'adapter', base='')
    for folder in (exported, adapter):
        assert find_lost(folder, source) == [] and (folder / 'tokenizer.json').is_file()
