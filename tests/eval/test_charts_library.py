"""Property: pages share a stored Vega, and need no store."""

from types import SimpleNamespace

import pytest

from eval import charts


@pytest.fixture
def record_bundles(monkeypatch, tmp_path):
    """Returns the list of calls of the bundler. The cache of the user is in `tmp_path`."""
    calls = []

    def bundle(exports):
        calls.append(exports)
        return f'vega; {exports}'

    monkeypatch.setattr(charts, 'vl_convert', SimpleNamespace(javascript_bundle=bundle))
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
    charts._vega_library.cache_clear()
    yield calls
    charts._vega_library.cache_clear()


def read_again() -> str:
    charts._vega_library.cache_clear()
    return charts._vega_library()


def test_library_is_bundled_once_for_each_version(record_bundles, monkeypatch, tmp_path):
    """Catches a stored library that another version of vl-convert would not make."""
    first = charts._vega_library()
    assert first == f'vega; {charts.EXPORTS}' == read_again() and len(record_bundles) == 1
    monkeypatch.setattr(charts, 'version', lambda package: '10')
    assert read_again() == first and len(record_bundles) == 2
    monkeypatch.setattr(charts, 'EXPORTS', 'window.vega = vega;')
    assert read_again() == 'vega; window.vega = vega;' and len(record_bundles) == 3
    assert len(list((tmp_path / 'evenkeel').iterdir())) == 3


@pytest.mark.parametrize('stored', [b'', b'\xff\xfe', b'vega', b'// 00000000\nvega'])
def test_damaged_library_is_bundled_again(record_bundles, tmp_path, stored):
    library = charts._vega_library()
    (path,) = (tmp_path / 'evenkeel').iterdir()
    path.write_bytes(stored)
    assert read_again() == read_again() == library and len(record_bundles) == 2


@pytest.mark.parametrize('home', ['file', None])
def test_library_is_bundled_if_it_cannot_be_stored(record_bundles, monkeypatch, tmp_path, home):
    if home:
        (tmp_path / home).write_text('')
        monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / home))
    else:
        monkeypatch.delenv('XDG_CACHE_HOME')
        monkeypatch.setattr(charts.Path, 'expanduser', raise_no_home)
    assert charts._vega_library() == read_again() == f'vega; {charts.EXPORTS}'
    assert len(record_bundles) == 2


def raise_no_home(path):
    raise RuntimeError(f'no home folder for {path}')
