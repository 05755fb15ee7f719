"""Recognises weights that another program wrote, and says how they become a run."""

import shlex
from collections.abc import Callable
from pathlib import Path

from lm.storage.files import expand_home

# Environment in which transformers converts a model; this project needs none of it.
CONVERTER = ('torch', 'transformers==5.24.0', 'accelerate')
HF_CONFIG, HF_WEIGHTS = 'config.json', ('model.safetensors', 'model.safetensors.index.json')
ORBAX_FILES = ('_CHECKPOINT_METADATA', '_METADATA', 'manifest.ocdbt')
SAVE = '.save_pretrained(sys.argv[-1])'
ORIGINAL = 'consolidated.'  # names of Meta and Mistral
PICKLED = ('.bin', '.ckpt', '.pt', '.pth')


def explain_foreign_weights(path: str | Path) -> str:
    """Returns what another program's weights at a path are, and the command that reads them.

    Args:
      path: a file or a folder.

    Returns:
      A line; '' if nothing there is known.
    """
    place = Path(expand_home(str(path)))
    if place.is_file():
        return _explain_file(place)
    if not place.is_dir():
        return ''
    names = sorted(entry.name for entry in place.iterdir())
    if HF_CONFIG in names and not {*HF_WEIGHTS}.isdisjoint(names):
        return (
            f'{place} is a model as transformers saves it: {_quote_import(place)} makes a run of it'
        )
    if any(name in names or (place / 'default' / name).exists() for name in ORBAX_FILES):
        return (
            f'{place} is a checkpoint of Orbax that another program wrote, whose names and layout '
            'that program alone knows. Let it write a folder of transformers (MaxText: python -m '
            f'maxtext.checkpoint_conversion.to_huggingface); {_quote_import("FOLDER")} reads that'
        )
    files = sorted(map(place.joinpath, names), key=lambda file: file.suffix != '.gguf')
    return next(filter(None, map(_explain_file, files)), '')


def _explain_file(file: Path) -> str:
    """Returns the explanation of a file of weights, by its name; '' for another file."""
    is_original = file.name.startswith(ORIGINAL)
    has_config = (file.parent / HF_CONFIG).is_file()
    rules: list[tuple[bool, Callable[[Path], str]]] = [
        (file.suffix == '.gguf', _explain_gguf),
        (is_original and file.suffix in ('.pth', '.safetensors'), _explain_original),
        (file.suffix == '.safetensors', _explain_safetensors),
        (file.suffix in PICKLED and has_config, _explain_pickled_model),
        (file.suffix in PICKLED, _explain_pickle),
    ]
    return next((explain(file) for matches, explain in rules if matches), '')


def _explain_gguf(file: Path) -> str:
    code = (
        'import sys, transformers as t; folder, name = sys.argv[1:3]; '
        't.AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype="float32", '
        f'quantization_config=t.GgufConfig(dequantize=True)){SAVE}; '
        f't.AutoTokenizer.from_pretrained(folder, gguf_file=name){SAVE}'
    )
    arguments = str(file.parent), file.name, file.stem
    command = _quote_converter(code, *arguments, packages=(*CONVERTER, 'gguf'))
    return (
        f'{file} is GGUF, which is not read here. transformers makes a folder of it: {command}; '
        f'then {_quote_import(file.stem)}'
    )


def _explain_pickled_model(file: Path) -> str:
    code = (
        'import sys, transformers as t; '
        f't.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype="auto"){SAVE}; '
        f't.AutoTokenizer.from_pretrained(sys.argv[1]){SAVE}'
    )
    target_name = f'{file.absolute().parent.name}-safetensors'
    command = _quote_converter(code, str(file.parent), target_name)
    return (
        f'{file} is pickled by PyTorch, which is not read here, as it may run any code. '
        f'transformers makes safetensors of it: {command}; then {_quote_import(target_name)}'
    )


def _explain_pickle(file: Path) -> str:
    return (
        f'{file} is pickled by PyTorch, without a {HF_CONFIG} that describes the model. Let the '
        'program that wrote it make a folder of transformers (save_pretrained); '
        f'{_quote_import("FOLDER")} reads that'
    )


def _explain_original(file: Path) -> str:
    return (
        f'{file} is in the layout of its authors, Meta or Mistral, which is not read here. The '
        'hub has most of these models in the layout of transformers too; or '
        'convert_llama_weights_to_hf.py or convert_mistral_weights_to_hf.py of the source of '
        f'transformers (src/transformers/models) makes it; {_quote_import("FOLDER")} reads that'
    )


def _explain_safetensors(file: Path) -> str:
    return (
        f'{file} is a file of weights; with {HF_CONFIG} beside it, and if its name is '
        f'{HF_WEIGHTS[0]}, {_quote_import(file.parent)} makes a run of its folder'
    )


def _quote_converter(code: str, *arguments: str, packages: tuple[str, ...] = CONVERTER) -> str:
    """Returns the command that runs code in an environment of its own, on shell arguments."""
    wheels = ' '.join(f'--with {package}' for package in packages)
    return f"uv run --no-project {wheels} python -c '{code}' {shlex.join(arguments)}"


def _quote_import(folder: str | Path) -> str:
    return f'python -m eval.convert import-hf {shlex.quote(str(folder))} --out=RUN'
