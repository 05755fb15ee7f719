"""Contract: an address or a name in place of a source gets the data.source that reads it."""

import pytest

from lm.data.addresses import explain_address, suggest_hub_source
from lm.data.sources import open_source

HUB = 'https://huggingface.co/datasets'
ADDRESSES = {
    f'{HUB}/someone/some': 'hub:someone/some',
    f'{HUB}/someone/some/': 'hub:someone/some',
    f'{HUB}/someone/some#card': 'hub:someone/some',
    f'{HUB}/someone/some/tree/main/data': 'hub:someone/some',
    f'{HUB}/someone/some/tree/v2': 'hub:someone/some@v2',
    f'{HUB}/someone/some/tree/refs%2Fconvert%2Fparquet': 'hub:someone/some@refs/convert/parquet',
    f'{HUB}/someone/some/blob/v2/a/b.parquet?download=1': 'hub:someone/some@v2',
    f'{HUB}/someone/some/viewer': 'hub:someone/some',
    f'{HUB}/someone/some/viewer/default/train': 'hub:someone/some',
    f'{HUB}/someone/some/viewer/default/test': 'hub:someone/some::test',
    f'{HUB}/someone/some/viewer/wiki-2/validation?row=1': 'hub:someone/some:wiki-2:validation',
    f'{HUB}/some': 'hub:some',
    'hf://datasets/someone/some': 'hub:someone/some',
    'hf://datasets/someone/some@v1/a/*.parquet': 'hub:someone/some@v1',
    'https://mirror.example/datasets/someone/some': 'hub:someone/some',
    'https://example.org/a.txt': '',
    'datasets/mine/some.txt': '',
}


@pytest.mark.parametrize('address', ADDRESSES)
def test_reference_hub_addresses(address):
    assert suggest_hub_source(address) == ADDRESSES[address]


@pytest.mark.parametrize('kind', ['', 'text:', 'hub:'])
@pytest.mark.parametrize('address', [a for a, source in ADDRESSES.items() if source])
def test_address_names_the_hub_source(kind, address):
    """Catches a search on the disk, or for a data set named https."""
    with pytest.raises(ValueError, match=r'set data\.source=') as error:
        open_source(f'{kind}{address}', 'text')
    assert f'set data.source={ADDRESSES[address]}.' in str(error.value)


@pytest.mark.parametrize(
    ('source', 'says'),
    [
        ('https://host/a.txt.gz', 'curl -L -o a.txt.gz https://host/a.txt.gz and set '),
        ('text:https://host/a.jsonl?x=1&y', "'https://host/a.jsonl?x=1&y' and set data"),
        ('https://host/corpus.zip', 'set data.source=text:FILE (a .txt, .jsonl, '),
        ('gs://bucket/a/*.txt', 'set data.source=text:gs://bucket/a/*.txt.'),
        ('hf://someone/model', 'the form hf://datasets/OWNER/NAME'),
        ('someone/some', 'If it is a data set of the Hub, set data.source=hub:someone/some.'),
        (f'{HUB}/a/b/blob/main/c/d.txt', 'hf download a/b c/d.txt --repo-type=dataset'),
    ],
)  # fmt: skip
def test_contract_other_addresses(source, says):
    with pytest.raises(ValueError) as error:
        open_source(source, 'text')
    assert says in str(error.value)


def test_local_path_is_no_hub_name(tmp_path, monkeypatch):
    (tmp_path / 'someone' / 'some').mkdir(parents=True)
    (tmp_path / 'someone' / 'some' / 'a.jsonl').write_text('')
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r'set data\.source=text:someone/some'):
        open_source('someone/some', 'text')
    assert explain_address('mine/nowhere.txt') == ''
