"""Rows of tables: the files they come from, and the tests about them.

Almost every file reads every part, through the package with the table of the parts. A change of one
part can break the tests of its rows, besides the files that read its file by name. A test is about
a row if its id or a parameter names the row, if it or one of its helpers names the row, and about
all rows if it iterates over a whole table.
"""

import ast
import dataclasses
import functools
import re
from collections.abc import Iterable, Iterator, Mapping, Set
from pathlib import PurePosixPath

from tests.dependencies import Sources, is_test
from tests.summaries import (
    Mentions,
    arguments,
    assigned_values,
    dotted_name,
    list_strings,
    within,
    words_in,
)

DEFAULT_CONFIG = 'configs/default.py'
# What holds all tables: who goes through it goes through each of them.
OF_TABLES = {'CHOICES', 'FIELDS', 'rows_of'}


@dataclasses.dataclass(frozen=True)
class ChoiceTable:
    """A dict that fields of the config choose from.

    Attributes:
      rows: files that each row comes from, besides the table's file.
      words: strings in each row, such as the names of other rows.
      fields: names of the fields that choose from it.
    """

    name: str
    file: str
    rows: Mapping[str, frozenset[str]]
    words: Mapping[str, frozenset[str]]
    fields: frozenset[str] = frozenset()


Definition = tuple[str, str]  # (file, name in it)


class Tables:
    """The tables in `Choice(TABLE, ...)` of the product with all rows written out."""

    def __init__(self, sources: Sources):
        self.sources = sources
        self.product = [path for path in sources.python if not path.startswith('tests/')]
        fields: dict[tuple[str, str], set[str]] = {}
        for path in self.product:
            if 'Choice(' in sources.text(path):
                for name, origin in self._choosing_fields(path):
                    fields.setdefault(origin, set()).add(name)
        tables = [self._table(*origin, fields[origin]) for origin in sorted(fields) if origin[0]]
        self.all = [table for table in tables if table]

    def _choosing_fields(self, path: str) -> Iterator[tuple[str, Definition]]:
        """Yields (field, table that it chooses from) for the annotations of a file."""
        nodes, imported = self.sources.tree(path).body, self.sources.read_imports(path)
        aliases = assigned_values(nodes)
        for field in within(nodes):
            if isinstance(field, ast.AnnAssign):
                used = {dotted_name(node) for node in within([field.annotation])}
                values = [aliases[name] for name in used & aliases.keys()]
                for node in within([field.annotation, *values]):
                    if isinstance(node, ast.Call) and dotted_name(node.func) == 'Choice':
                        meant = imported.get(dotted_name(node.args[0]), '')
                        yield dotted_name(field.target), self.sources.origin(meant)

    def list_fields(self, name: str) -> set[str]:
        """Returns the fields that choose the row of a name, and the options in its files."""
        tables = [table for table in self.all if name in table.rows]
        files = frozenset().union(*(table.rows[name] for table in tables))
        nodes = [node for file in files for node in self.sources.tree(file).body]
        targets = (node.target for node in within(nodes) if isinstance(node, ast.AnnAssign))
        options = {dotted_name(target) for target in targets} | arguments(nodes)
        return options.union(*(table.fields for table in tables))

    def _table(self, path: str, name: str, fields: Set[str]) -> ChoiceTable | None:
        assigned = assigned_values(self.sources.tree(path).body)
        imported = self.sources.read_imports(path)
        value = assigned.get(name)
        keys = value.keys if isinstance(value, ast.Dict) else [None]
        if not all(isinstance(key, ast.Constant) for key in keys):
            return None
        rows, words = {}, {}
        for key, row in zip(keys, value.values, strict=True):
            used = {node.id for node in within([row]) if isinstance(node, ast.Name)}
            files = {
                self.sources.origin(imported[import_name])[0]
                for import_name in used & imported.keys()
            }
            rows[key.value] = frozenset(files - {'', path})
            words[key.value] = frozenset(
                list_strings(
                    [row, *(assigned[import_name] for import_name in used & assigned.keys())]
                )
            )
        return ChoiceTable(name, path, rows, words, frozenset(fields))

    @functools.cached_property
    def readings(self) -> set[tuple[str, str]]:
        """Returns pairs (file of tables, file that it needs only for rows)."""
        pairs = set()
        for path in {table.file for table in self.all}:
            tables = [table for table in self.all if table.file == path]
            body = self.sources.tree(path).body
            dicts = [assigned_values(body)[table.name] for table in tables]
            inside = {id(node) for node in within(dicts)}
            nodes = [node for node in within(body) if id(node) not in inside]
            used = {node.id for node in nodes if isinstance(node, ast.Name)}
            imported = self.sources.read_imports(path)
            needed = {self.sources.origin(imported[name])[0] for name in used & imported.keys()}
            rows = {file for table in tables for files in table.rows.values() for file in files}
            pairs |= {(path, file) for file in rows - needed}
        return pairs

    @functools.cached_property
    def defaults(self) -> set[str]:
        """Returns the rows of a run without options: in the default config, as a default of a
        field, in place of 'auto', or named by another such row.
        """
        default_words = set(list_strings(self.sources.tree(DEFAULT_CONFIG).body))
        for path in self.product:
            default_words |= self.sources.summary(path).body.defaults
        return self._close_over(
            default_words, lambda name, words: words if name in default_words else ()
        )

    def with_users(self, names: Iterable[str]) -> set[str]:
        """Returns the rows, and the rows that need them."""
        reached = set(names)
        return self._close_over(reached, lambda name, words: [name] if words & reached else ())

    def _close_over(self, closure: set[str], expand) -> set[str]:
        size = -1
        while size < len(closure):
            size = len(closure)
            for table in self.all:
                closure |= {word for item in table.words.items() for word in expand(*item)}
        return closure


@dataclasses.dataclass(frozen=True)
class Said:
    """Names in definitions.

    Attributes:
      words: names in their strings.
      whole: objects that they use other than as `name[...]`, so that they may iterate over them.
      used: all objects that they use.
    """

    words: Set[str]
    whole: frozenset[Definition]
    used: frozenset[Definition]


EMPTY = Said(frozenset(), frozenset(), frozenset())


class Definitions:
    """Names that tests and their helpers mention, for each definition."""

    def __init__(self, sources: Sources):
        self.sources = sources
        self.said = functools.cache(self._summarize)
        self.meant = functools.cache(self._meant)
        self.with_helpers = functools.cache(self._with_helpers)
        self._conftests = functools.cache(self._list_conftests)

    def list_definitions(self, path: str) -> dict[str, Mentions]:
        """Returns {name: what it mentions} of the definitions at the top of a file, without
        decorators; 'Class.test' for methods.
        """
        return self.sources.summary(path).definitions

    def _summarize(self, path: str, name: str) -> Said:
        mentions = self.list_definitions(path).get(name)
        return self.said_by(path, mentions) if mentions else EMPTY

    def said_by(self, path: str, mentions: Mentions) -> Said:
        """Returns the names that some mentions of a file mean."""
        named, subscripts = mentions.names, mentions.subscripts
        used = {origin for name in named for origin in self.meant(path, name)}
        used |= {origin for name in mentions.arguments for origin in self.meant(path, name)}
        whole = (name for name, uses in named.items() if uses > subscripts.get(name, 0))
        return Said(
            mentions.words,
            frozenset(origin for name in whole for origin in self.meant(path, name)),
            frozenset(used),
        )

    def _with_helpers(self, *starts: Definition) -> Said:
        """Returns the names in definitions, and in the test and config definitions they use."""
        visited, frontier = set(), set(starts)
        while frontier:
            visited |= frontier
            frontier = {used for helper in frontier for used in self.said(*helper).used} - visited
            frontier = {
                helper for helper in frontier if helper[0].startswith(('tests/', 'configs/'))
            }
        summaries = [self.said(*helper) for helper in visited]
        return Said(
            frozenset().union(*(summary.words for summary in summaries)),
            frozenset().union(*(summary.whole for summary in summaries)),
            frozenset(visited),
        )

    def _meant(self, path: str, name: str) -> list[Definition]:
        """Returns the definitions that a name in a file may stand for, including fixtures."""
        first, _, attributes = name.partition('.')
        if name in self.list_definitions(path):
            return [(path, name)]
        if first in self.sources.read_imports(path):
            meant = self.sources.read_imports(path)[first]
            origin = self.sources.origin(f'{meant}.{attributes}' if attributes else meant)
            return [origin] if origin[0] else []
        return [
            (file, name) for file in self._conftests(path) if name in self.list_definitions(file)
        ]

    def _list_conftests(self, path: str) -> list[str]:
        above = [f'{folder}/conftest.py' for folder in PurePosixPath(path).parents]
        return [file for file in above if file in self.sources.python_set]

    def may_name(self, path: str, rows: Set[str], tables: Iterable[ChoiceTable]) -> bool:
        """Returns whether the source of a file may name one of the rows."""
        of_body = self.said_by(path, self.sources.summary(path).body)
        of_definitions = self.with_helpers(*((path, name) for name in self.list_definitions(path)))
        names = '.'.join([path, *self.list_definitions(path)])
        return (
            bool(rows & (of_body.words | of_definitions.words))
            or goes_through(tables, of_body.whole | of_definitions.whole)
            or any(in_name(row, names) for row in rows)
        )

    def is_touched(
        self,
        nodeid: str,
        parameter_texts: Iterable[str],
        rows: Set[str],
        tables: Iterable[ChoiceTable],
        fields: Set[str] = frozenset(),
    ) -> bool:
        """Returns whether a test is about one of the rows of these tables.

        Args:
          nodeid: pytest's id of the test.
          parameter_texts: strings in its parameters.
          rows: names of rows in `tables`.
          tables: the tables.
          fields: the fields that the rows are about, if a case about another field is about
            another row: 'eps' excludes a case of optim.lr. Empty: all fields.
        """
        path, _, called = nodeid.partition('::')
        plain, _, parameters = called.partition('[')
        words = {word for text in (parameters, *parameter_texts) for word in words_in(text)}
        if rows & words or any(in_name(row, f'{path}.{plain}') for row in rows):
            return True
        test = (path, plain.replace('::', '.'))
        about = {match[1] for word in words if (match := re.fullmatch(r'[a-z]+\.(\w+)', word))}
        is_other_field = bool(fields and about and not about & fields)
        # of another row
        if is_other_field or words & {row for table in tables for row in table.rows}:
            return bool(rows & self.said(*test).words)
        summary = self.with_helpers(test)
        return bool(rows & summary.words) or goes_through(tables, summary.whole)


def goes_through(tables: Iterable[ChoiceTable], used: Iterable[Definition]) -> bool:
    """Returns whether a table, or the object that holds all tables, is used as a whole."""
    names = {(table.file, table.name) for table in tables}
    return any(
        origin in names or (origin[1] in OF_TABLES and not is_test(origin[0])) for origin in used
    )


def in_name(row: str, name: str) -> bool:
    """Returns whether a row's name is a part of a name: 'sophia' is in test_optim_sophia.py."""
    return f'_{row}_' in f'_{re.sub(r"[^a-zA-Z0-9]", "_", name)}_'
