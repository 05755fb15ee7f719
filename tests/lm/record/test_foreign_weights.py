"""Contract: weights in a form that is not read are answered by the command that converts them."""

import ast
import re
import shlex
from pathlib import Path

import pytest

from eval.convert.import_hf import import_folder
from lm.data import vocabularies
from lm.inference.load import find_checkpoint
from lm.record.foreign_weights import CONVERTER, explain_foreign_weights
from lm.run.start import find_source

NAMES = {
    'gguf': ('my weights/tiny.Q4_1.gguf', '--with gguf .*dequantize=True'),
    'bin': ('model/config.json model/pytorch_model.bin', 'model-safetensors'),
    'index of bin': (
        'model/config.json model/pytorch_model-1-of-2.bin model/pytorch_model.bin.index.json',
        'model-safetensors',
    ),
    'meta': ('model/params.json model/consolidated.00.pth', 'convert_llama_weights_to_hf.py'),
    'mistral': ('model/params.json model/consolidated.safetensors', 'convert_mistral_weights'),
    'ckpt': ('out/ckpt.pt', 'without a config.json'),
    'lightning': ('out/last.ckpt', 'without a config.json'),
    'orbax': ('out/_CHECKPOINT_METADATA out/manifest.ocdbt', 'Orbax .*to_huggingface'),
    'orbax of steps': ('out/default/manifest.ocdbt', 'Orbax .*to_huggingface'),
    'transformers': (
        'model/config.json model/model.safetensors',
        'convert it to a run: .*import-hf ',
    ),
}


def write_files(folder, names):
    """Writes empty files, and a config.json that is none; returns the paths."""
    # A space belongs to a name, unless it stands before a new path of a folder of the list.
    paths = [folder / name for name in re.split(r' (?=model/|out/)', names)]
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text('{"model_type": "llama"}' if path.name == 'config.json' else '')
    return paths


@pytest.mark.parametrize('name', NAMES)
def test_foreign_weights_are_answered_in_a_line(tmp_path, name):
    """The folder and train.init_from get the same answer, which ends in our command. Catches a
    form that is only 'no checkpoint', and a path with a space that a shell would split.
    """
    names, message = NAMES[name]
    *_, last = write_files(tmp_path, names)
    folder = tmp_path / names.split('/')[0]
    explanation = explain_foreign_weights(folder)
    assert re.search(message, explanation) and '\n' not in explanation
    assert re.search(r'python -m eval\.convert import-hf \S+ --out=RUN', explanation)
    for find in (find_checkpoint, find_source):
        with pytest.raises(ValueError, match=re.escape(explanation)):
            find(str(folder))
    if name == 'gguf':
        assert explanation == explain_foreign_weights(last)
        with pytest.raises(ValueError, match=re.escape(explanation)):
            import_folder(last, {}, Path('run'))
    if name != 'transformers':
        with pytest.raises(ValueError, match=re.escape(explanation)):
            import_folder(folder, {}, Path('run'))


@pytest.mark.parametrize('name', ['gguf', 'bin'])
def test_converter_is_a_shell_command(tmp_path, name):
    """The code parses, and its arguments are the folder, the file and a new folder."""
    *_, file = write_files(tmp_path, NAMES[name][0])
    command = re.search(r'uv run .*?(?=; then run python)', explain_foreign_weights(file))
    words = shlex.split(command[0])
    code, *arguments = words[words.index('-c') + 1 :]
    ast.parse(code)
    assert arguments[0] == str(file.parent) and arguments[-1].startswith(('tiny', 'model-'))
    assert arguments[1] == (file.name if name == 'gguf' else 'model-safetensors')


def test_unknown_files_get_no_answer(tmp_path):
    write_files(tmp_path, 'notes.txt')
    assert [explain_foreign_weights(p) for p in (tmp_path, tmp_path / 'absent')] == ['', '']
    assert CONVERTER[1] == vocabularies.CONVERTER[0]  # one version of transformers
