"""Answers for addresses that are given as data.source: the data.source that reads the same text."""

import re
import shlex
import urllib.parse
from pathlib import Path

from lm.config.other_programs import is_hub_name
from lm.data.kinds import KINDS, file_suffix
from lm.storage.buckets import ENDPOINTS

# An address of a data set, as a browser shows it or as huggingface_hub takes it.
HUB_ADDRESS = re.compile(
    r'(?:https?://[^/]+|hf:/)/datasets/'
    r'(?P<name>[\w.-]+(?:/(?!(?:tree|blob|resolve|raw|commits?|viewer)\b)[\w.-]+)?)'
    r'(?:@(?P<revision>[^/]+))?'
    r'(?:/viewer(?:/(?P<subset>[^/?#]+)(?:/(?P<split>[^/?#]+))?)?/?'
    r'|/(?:tree|blob|resolve|raw|commits?)/(?P<commit>refs/convert/[^/?#]+|[^/?#]+)(?:/(?P<file>[^?#]*))?'
    r'|/(?P<path>[^?#]*))?(?:[?#].*)?'
)
WEB = re.compile(r'(?:https?|ftp)://\S+')
# A revision, subset and split that need not be named.
MAIN, DEFAULT, TRAIN = 'main', 'default', 'train'


def suggest_hub_source(address: str) -> str:
    """Returns hub:OWNER/NAME[@REVISION][:SUBSET[:SPLIT]] for the address of a data set, else ''.

    The address is that of a page or a file, or hf://datasets/OWNER/NAME.
    """
    if not (match := HUB_ADDRESS.fullmatch(address)):
        return ''
    revision = urllib.parse.unquote(match['revision'] or match['commit'] or MAIN)
    source = f'hub:{match["name"]}' + ('' if revision == MAIN else f'@{revision}')
    subset = '' if match['subset'] == DEFAULT else match['subset'] or ''
    split = '' if match['split'] == TRAIN else match['split'] or ''
    return source + (f':{subset}:{split}' if split else f':{subset}' if subset else '')


def _explain_hub_file(address: str) -> str:
    """Returns how to read one file of a data set; '' for an address of no file."""
    match = HUB_ADDRESS.fullmatch(address)
    file = '' if match is None else match['file'] or match['path'] or ''
    if match is None or file_suffix(Path(file)) not in KINDS or '*' in file:
        return ''
    return (
        f' To read only this file, fetch it with hf download {match["name"]} {file} '
        '--repo-type=dataset --local-dir=DIR (needs the extra hub) and set '
        f'data.source=text:DIR/{file}.'
    )


def explain_address(source: str) -> str:
    """Returns a sentence with the data.source for an address or a name of the hub, or ''.

    Args:
      source: data.source, or the part of it behind `text:` or `hub:`.
    """
    if hub_source := suggest_hub_source(source):
        return (
            f'{source} belongs to a data set of the Hub: set data.source={hub_source}.'
            f'{_explain_hub_file(source)}'
        )
    if source.startswith('hf://'):
        return (
            f'{source} is not the address of a data set, which has the form '
            'hf://datasets/OWNER/NAME. To read a data set, set data.source=hub:OWNER/NAME.'
        )
    if WEB.fullmatch(source):
        name = Path(re.split('[?#]', source)[0]).name
        has_format = file_suffix(Path(name)) in KINDS
        file = name if has_format else 'FILE'
        return (
            f'{source} is a web address, and text is not read from the web. Fetch it with curl -L '
            f'-o {file} {shlex.quote(source)} and set data.source=text:{file}'
            + ('.' if has_format else f' (a {", ".join(KINDS)} file).')
        )
    scheme = source.partition('://')[0]
    if scheme in ENDPOINTS and '://' in source:
        return f'{source} is in a bucket: set data.source=text:{source}.'
    if is_hub_name(source) and file_suffix(Path(source)) not in KINDS:
        return (
            f'{source} is not a path on this machine. If it is a data set of the Hub, set '
            f'data.source=hub:{source}.'
        )
    return ''
