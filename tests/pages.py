"""What there is to read of the project: the front page, and the pages of the guide."""

import re

from tests import ROOT

FENCED = re.compile(r'(^```.*?^```$)', re.DOTALL | re.MULTILINE)


def lowered(page: str) -> str:
    """Returns a page with its headings one level lower: it is a section then."""
    parts = FENCED.split(page)
    return ''.join(
        part if part.startswith('```') else re.sub(r'^#', '##', part, flags=re.MULTILINE)
        for part in parts
    )


FRONT_PAGE = (ROOT / 'README.md').read_text()
GUIDE = [path.read_text() for path in sorted((ROOT / 'docs' / 'guide').glob('*.md'))]
TEXT = '\n'.join([FRONT_PAGE, *map(lowered, GUIDE)])
