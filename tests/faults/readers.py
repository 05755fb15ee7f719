"""Files and messages that strangers may write, and the readers that must refuse or accept them.

Contract: one row of READERS for each kind of content.
"""

import base64
import contextlib
import dataclasses
import functools
import json
import math
import sqlite3
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.ipc
import pyarrow.parquet

from configs import default
from eval import runs
from eval.convert import hf_config, safetensors
from eval.convert.import_hf import import_folder
from eval.evaluation import kept
from eval.evaluation.program import summarise_one
from eval.evaluation.suite_flags import SuiteRequest
from eval.evaluation.targets import Evaluation
from eval.serve.requests import ChatBody, CompletionBody, Refusal, parse_body
from eval.suites.base import SuiteResult, Table
from eval.sync import to_mlflow, to_wandb
from lm.data import byte_ranks, columnar, hub, records, tokenizers
from lm.data.chat_template import TEMPLATE_FILE, compile_template, make_variables
from lm.data.folders import select_files
from lm.data.tokenizer_files import CONFIG_FILE, LIBRARY_FILE, SPECIALS_FILE
from lm.record.metrics import FILE, Tail, read_rows
from lm.storage.files import parse_json
from lm.storage.lease import parse_record
from tests import hostile_models
from tests.eval import sweep_fixture
from tests.eval.serve.fakes import Letters, service
from tests.eval.serve.hostile import bodies
from tests.faults import supervisors
from tests.faults.changes import seal_again

SAMPLES = 700  # requests; fewer than the hand-written ones would not do
MOST_LINES, MOST_CHARACTERS = 12, 3000  # of an error: a refusal may list fields
VOCABULARIES = Path(__file__).parents[1] / 'fixtures' / 'vocabularies'


@dataclasses.dataclass(frozen=True)
class Reader:
    """A reader of content.

    Attributes:
      samples: valid content.
      parse: reads content. Raises ValueError or OSError, of few printable lines, to refuse it.
    """

    samples: tuple[bytes, ...]
    parse: Callable[[bytes], Any]

    def accepts(self, content: bytes) -> bool:
        """Returns whether the content is read; False if it is refused with a clear error.

        Raises:
          AssertionError: if the error is not clear.
          Exception: as the reader does, if it neither reads nor refuses.
        """
        try:
            self.parse(content)
        except (ValueError, OSError) as error:
            # Errors of the file system, such as a name that is too long, have a text of their own.
            text = str(error)
            lines = text.splitlines() or ['']
            assert text.strip() and len(lines) <= MOST_LINES and len(text) <= MOST_CHARACTERS, text
            assert all(line.isprintable() for line in lines), repr(text)
            return False
        return True


def encode(record: Any) -> bytes:
    return json.dumps(record).encode()


def read_weights(folder: Path) -> Reader:
    """The header of a safetensors file, and its tensors."""
    arrays = {'a': np.zeros((2, 3), np.float32), 'b.weight': np.ones(4, np.uint8)}
    path = folder / safetensors.ONE_FILE

    def write(names):
        tensors = {n: safetensors.Tensor(x.dtype, x.shape, x.copy) for n, x in names.items()}
        safetensors.write_file(path, tensors)
        return path.read_bytes()

    def parse(content):
        path.write_bytes(content)
        for stored in safetensors.read_folder(folder).values():
            safetensors.map_tensor(stored).copy()

    return Reader((write(arrays), write({'c': np.zeros((0, 5), np.int64)}), write({})), parse)


def read_index(folder: Path) -> Reader:
    """The index of a model in several files."""
    hostile_models.write_model(folder / 'model', 'llama3')
    hostile_models.in_shards(folder / 'model', 'llama3')
    path = folder / 'model' / safetensors.INDEX

    def parse(content):
        path.write_bytes(content)
        safetensors.read_folder(folder / 'model')

    return Reader((path.read_bytes(),), parse)


def read_model_config(folder: Path) -> Reader:
    """config.json of a model of transformers."""
    raw, samples = default.get_config().to_dict(), []
    for family in hostile_models.FAMILIES:
        hostile_models.write_model(folder / family, family)
        samples.append((folder / family / hf_config.FILE).read_bytes())

    def parse(content):
        # A config of another family does not fit the weights, so that it goes to its own.
        try:
            kind = json.loads(content).get('model_type')
        except (ValueError, AttributeError, RecursionError):
            kind = None
        number = next((i for i, s in enumerate(samples) if json.loads(s)['model_type'] == kind), 0)
        model = folder / hostile_models.FAMILIES[number]
        (model / hf_config.FILE).write_bytes(content)
        import_folder(model, raw, folder / 'out')

    return Reader(tuple(samples), parse)


def read_tokenizer_file(folder: Path, name: str) -> Reader:
    """A file of a tokenizer beside the others of a model."""
    hostile_models.write_model(folder / 'model', 'llama3')
    path = folder / 'model' / name
    if name == SPECIALS_FILE:  # which is read for the tokens that the other file lacks
        (folder / 'model' / CONFIG_FILE).write_text('{}')

    def parse(content):
        path.write_bytes(content)
        tokenizer = tokenizers.load_for_model(folder / 'model', 60, None, None)
        tokenizer.decode(tokenizer.encode('w1 w2 w49'))

    return Reader((path.read_bytes(),), parse)


def read_vocabulary(folder: Path, name: str, samples: Sequence[bytes]) -> Reader:
    """The vocabulary of SentencePiece or tekken."""

    def parse(content):
        (folder / name).write_bytes(content)
        tokenizer = tokenizers.plan_tokenizer(f'hf:{folder / name}').build([])
        tokenizer.decode(tokenizer.encode('a b é'))

    return Reader(tuple(samples), parse)


def read_sentencepiece(folder: Path) -> Reader:
    models = ('llama.model', 'unigram.model', 'characters.model')
    samples = [(VOCABULARIES / model).read_bytes() for model in models]
    return read_vocabulary(folder, 'tokenizer.model', samples)


def read_tekken(folder: Path) -> Reader:
    vocabulary = [
        {'rank': byte, 'token_bytes': base64.b64encode(bytes([byte])).decode(), 'token_str': None}
        for byte in range(256)
    ]
    sizes = {'default_num_special_tokens': 30, 'default_vocab_size': 286}
    record = {'config': {'pattern': byte_ranks.O200K_PATTERN} | sizes, 'vocab': vocabulary}
    specials = {'special_tokens': [{'rank': 1, 'token_str': '<s>', 'is_control': True}]}
    return read_vocabulary(folder, 'tekken.json', [encode(record), encode(record | specials)])


def read_ranks(folder: Path) -> Reader:
    """Ranks of tiktoken. Only the public ones have a pattern, so that others get one here."""
    del folder

    def parse(content):
        ranks = byte_ranks.parse_ranks(content)
        byte_ranks.build_tokenizer(ranks, byte_ranks.CL100K_PATTERN, {}).encode('a b é')

    return Reader(((VOCABULARIES / 'ranks.tiktoken').read_bytes(),), parse)


def read_chat_template(folder: Path) -> Reader:
    """A chat template, which is rendered for a conversation."""
    text = (
        '{{ bos_token }}{% for message in messages %}{% if loop.first and message["role"] == '
        '"system" %}{{ message["content"] | trim }}{% else %}<{{ message.role | upper }}>'
        '{% generation %}{{ message["content"] }}{% endgeneration %}{% endif %}{% endfor %}'
        '{% if add_generation_prompt %}{{ raise_exception("x") if false else "<a>" }}{% endif %}'
    )
    messages = [{'role': 'system', 'content': ' a '}, {'role': 'user', 'content': 'b'}]
    variables = make_variables(messages, {'bos_token': '<s>'}, add_generation_prompt=True)
    path = folder / TEMPLATE_FILE

    def parse(content):
        path.write_bytes(content)
        with contextlib.closing(compile_template(content.decode(errors='replace'))) as template:
            template.render(**variables)

    return Reader((text.encode(), b'{{ messages | tojson(indent=2) }}'), parse)


CARDS = (
    b'---\nlicense: mit\nconfigs:\n- config_name: default\n  data_files:\n  - split: train\n'
    b'    path: data/train-*.parquet\n  - split: test\n    path: [data/test.parquet]\n'
    b'- config_name: other\n  default: true\n  data_files: "*.parquet"\n---\n# A card\n',
    b'---\nconfigs:\n- config_name: 2023\n  data_files: {train: "a/**", validation: ["b/?.x"]}\n'
    b'---\n',
    b'# A card without a head\n',
)


def read_card(folder: Path) -> Reader:
    """The card of a data set of the Hub, and the same beside its files on a disk."""
    paths = ['data/train-0.parquet', 'data/test.parquet', 'a/x.parquet', 'b/y.x', 'c.parquet']
    texts = folder / 'texts'
    for path in paths:
        (texts / path).parent.mkdir(parents=True, exist_ok=True)
        (texts / path).with_suffix('.txt').write_text('some text\n')

    def parse(content):
        (texts / hub.CARD).write_bytes(content)
        select_files(texts, 'text')
        card = hub._read_card('a/b', texts / hub.CARD)
        for subset in ('', 'other'):
            hub.select_files('a/b', subset, paths, {} if card is None else card)

    return Reader(CARDS, parse)


def read_hub_answers(folder: Path) -> Reader:
    """The list of files that a hub sends, which may lie."""
    del folder
    answer = {'paths': ['data/train-0.parquet', 'x.parquet'], 'card': {'configs': None}}

    def parse(content):
        try:
            answer = json.loads(content)
            paths = [path for path in answer['paths'] if isinstance(path, str)]
            card, subset = answer['card'], str(answer.get('subset', ''))
        except (LookupError, TypeError, AttributeError, RecursionError):
            return
        hub.select_files('a/b', subset, paths, card)

    configs = [{'config_name': 'x', 'data_files': [{'split': 'train', 'path': ['**/*.parquet']}]}]
    named = answer | {'card': {'configs': configs}, 'subset': 'x'}
    return Reader((encode(answer), encode(named)), parse)


def read_sweep_record(folder: Path, name: str) -> Reader:
    """A record of a sweep, or of one of its cells, with a seal that fits it."""
    axes = {'model.norm': ('rmsnorm', 'layernorm'), 'optim.lr': (0.003,), 'train.seed': (0,)}
    workdir = folder / 'sweep'
    sweep_fixture.write_sweep(workdir, axes, {})
    path = sorted(workdir.rglob(name))[0]

    def parse(content):
        path.write_bytes(seal_again(content))
        runs.overview(runs.gather_all([workdir]))
        runs.query('select * from runs', workdir)

    return Reader((path.read_bytes(),), parse)


def read_evaluation(folder: Path) -> Reader:
    """A stored result of an evaluation, with a seal that fits it."""
    request, meta = SuiteRequest('bytes', 'bytes', {}), {'config': {}, 'step': 5}
    path = kept.result_path(folder, 5, request)
    columns = {'item': ['a', 'b', 'c'], 'bits': [1.0, 2.0, math.nan], 'bytes': [3, 4, 5]}
    table = Table({'domain': ['x', 'y'], 'bits': [1.5, math.inf]}, 'domain', 'bits')
    suite_result = SuiteResult({'loss': 1.5, 'n': 3}, columns, {'By domain': table})
    kept.write_result(path, request, meta, suite_result)

    def parse(content):
        path.write_bytes(seal_again(content))
        if (stored := kept.read_result(path, request, meta)) is not None:
            summarise_one(Evaluation('a', 5, {'optim.lr': 0.1}, {'bytes': stored}))

    return Reader((path.read_bytes(),), parse)


def read_mlflow_database(folder: Path) -> Reader:
    path = folder / 'mlflow.db'
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.execute('create table alembic_version (version_num varchar(32))')
        database.execute('create table experiments (name text)')
        database.commit()

    def parse(content):
        path.write_bytes(content)
        to_mlflow.check_database(f'sqlite:///{path}')

    return Reader((path.read_bytes(),), parse)


def read_wandb_file(folder: Path) -> Reader:
    """A file of W&B: blocks of 32 KiB, and in them records with a checksum, length and type."""
    from wandb.proto.wandb_internal_pb2 import Record  # ty: ignore[missing-module-member]

    path, content = folder / 'run-x.wandb', b':W&B\xdc\x01\x00'
    for step in range(3):
        record = Record()
        record.history.step.num = step
        entry = record.history.item.add()
        entry.key, entry.value_json = 'loss', '1.5'
        message = record.SerializeToString()
        content += bytes(4) + len(message).to_bytes(2, 'little') + b'\1' + message
    path.write_bytes(content)
    assert [step for step, _ in to_wandb.read_points(path)] == [0, 1, 2]

    def parse(content):
        path.write_bytes(content)
        [*to_wandb.read_points(path)]

    return Reader((path.read_bytes(),), parse)


def read_lease(folder: Path) -> Reader:
    del folder
    lease = {'owner': 'a', 'host': 'h', 'pid': 1, 'folder': 'f', 'written_by': None, 'seconds': 60}
    expires = {'renewed': 3, 'expires': '2026-01-01T00:00:00+00:00'}
    return Reader(
        (encode(lease | expires), encode(lease | {'written_by': 'f', 'expires': None})),
        lambda content: parse_record(parse_json(content)),
    )


def read_metrics(folder: Path) -> Reader:
    """metrics.jsonl, at once and as it grows."""
    rows = [{'step': 1, 'loss': 1.5}, {'step': 2, 'loss': None, 'not_finite': {'loss': 'inf'}}]

    def parse(content):
        (folder / FILE).write_bytes(content)
        read_rows(folder / FILE)
        Tail(folder / FILE).read()

    return Reader((b''.join(encode(row) + b'\n' for row in rows),), parse)


def read_text_records(folder: Path, suffix: str, samples: tuple[bytes, ...]) -> Reader:
    read_file = {'json': records.read_json, 'jsonl': records.read_json_lines}.get(
        suffix, records.read_csv
    )

    def parse(content):
        path = folder / f'a.{suffix}'
        path.write_bytes(content)
        [*read_file(path)]

    return Reader(samples, parse)


TEXTS = pa.table({'text': ['some text', 'é', '', None], 'n': [1, 2, 3, 4]})


def read_columns(folder: Path, suffix: str) -> Reader:
    """A parquet or Arrow file of texts."""
    path = folder / f'a.{suffix}'
    samples = []
    for repeated in (False, True):
        if suffix == 'parquet':
            pa.parquet.write_table(TEXTS, path, use_dictionary=repeated)
        else:
            writer = pa.ipc.new_file if repeated else pa.ipc.new_stream
            with writer(str(path), TEXTS.schema) as file:
                file.write_table(TEXTS)
        samples.append(path.read_bytes())

    def parse(content):
        path.write_bytes(content)
        if 'text' in columnar.read_schema(path):
            [*columnar.read_rows(path, ['text'])]

    return Reader(tuple(samples), parse)


def read_requests(folder: Path) -> Reader:
    """Requests to a served checkpoint."""
    del folder
    routes = service(Letters())
    samples = [*bodies(SAMPLES)]

    def parse(content):
        for body_type in (CompletionBody, ChatBody):
            try:
                routes.prepare_generation(body_type.parse(parse_body(content)))
            except Refusal as refusal:
                assert 400 <= refusal.status < 500 and refusal.message, content
            else:
                return
        raise ValueError('refused')

    return Reader(tuple(body for _, body in samples), parse)


def read_supervisor_messages(folder: Path) -> Reader:
    """Messages of a host that knows the secret, to process 0 and to another process."""

    def parse(content):
        supervisors.send_to_coordinator(content, folder)
        supervisors.send_to_member(content, folder)

    return Reader(supervisors.MESSAGES, parse)


JSON_TEXTS = (
    b'{"text": "a", "n": 1}\n{"text": "b"}\n',
    b'[{"text": "a"}, {"text": "b\\u00e9", "n": [1, {}]}]',
    b'{\n "text": "a"\n}\n{\n "text": "b"\n}\n',
)
CSV_TEXTS = (b'text,n\n"a, b",1\n"c\nd",2\n', b'id;text\n1;x\n')
READERS: dict[str, Callable[[Path], Reader]] = {
    'safetensors': read_weights,
    'safetensors-index': read_index,
    'model-config': read_model_config,
    **{
        name: functools.partial(read_tokenizer_file, name=name)
        for name in (LIBRARY_FILE, CONFIG_FILE, SPECIALS_FILE)
    },
    'tokenizer.model': read_sentencepiece,
    'tekken.json': read_tekken,
    'tiktoken': read_ranks,
    'chat-template': read_chat_template,
    'dataset-card': read_card,
    'hub-files': read_hub_answers,
    **{
        name: functools.partial(read_sweep_record, name=name)
        for name in ('sweep.json', 'config.json', 'summary.json')
    },
    'evaluation': read_evaluation,
    'mlflow.db': read_mlflow_database,
    'wandb': read_wandb_file,
    'lease': read_lease,
    'metrics.jsonl': read_metrics,
    'json': functools.partial(read_text_records, suffix='json', samples=JSON_TEXTS),
    'jsonl': functools.partial(read_text_records, suffix='jsonl', samples=JSON_TEXTS[:1]),
    'csv': functools.partial(read_text_records, suffix='csv', samples=CSV_TEXTS),
    'parquet': functools.partial(read_columns, suffix='parquet'),
    'arrow': functools.partial(read_columns, suffix='arrow'),
    'supervisors': read_supervisor_messages,
    'requests': read_requests,
}
