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
            f'{place} is a model saved by transformers. To convert it to a run: '
            f'{_quote_import(place)}'
        )
    if any(name in names or (place / 'default' / name).exists() for name in ORBAX_FILES):
        return (
            f'{place} is an Orbax checkpoint of another program, in a layout that only that '
            'program can read. Export it to a transformers folder there (MaxText: python -m '
            f'maxtext.checkpoint_conversion.to_huggingface), then run {_quote_import("FOLDER")}'
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
        f'{file} is a GGUF file, which cannot be read here. Convert it with transformers: '
        f'{command}; then run {_quote_import(file.stem)}'
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
        f'{file} is a PyTorch pickle, which is not read here because it can run any code. Convert '
        f'it to safetensors with transformers: {command}; then run {_quote_import(target_name)}'
    )


def _explain_pickle(file: Path) -> str:
    return (
        f'{file} is a PyTorch pickle without a {HF_CONFIG} that describes the model. Export it to '
        'a transformers folder with the program that wrote it (save_pretrained), then run '
        f'{_quote_import("FOLDER")}'
    )


def _explain_original(file: Path) -> str:
    return (
        f'{file} has the original layout of Meta or Mistral, which cannot be read here. Most of '
        'these models are on the hub in the transformers layout too. Otherwise convert it with '
        'convert_llama_weights_to_hf.py or convert_mistral_weights_to_hf.py from the source of '
        f'transformers (src/transformers/models). Then run {_quote_import("FOLDER")}'
    )


def _explain_safetensors(file: Path) -> str:
    return (
        f'{file} contains only weights. Put a {HF_CONFIG} beside it, name it {HF_WEIGHTS[0]}, and '
        f'run {_quote_import(file.parent)}'
    )


def _quote_converter(code: str, *arguments: str, packages: tuple[str, ...] = CONVERTER) -> str:
    """Returns the command that runs code in an environment of its own, on shell arguments."""
    wheels = ' '.join(f'--with {package}' for package in packages)
    return f"uv run --no-project {wheels} python -c '{code}' {shlex.join(arguments)}"


def _quote_import(folder: str | Path) -> str:
    return f'python -m eval.convert import-hf {shlex.quote(str(folder))} --out=RUN'
