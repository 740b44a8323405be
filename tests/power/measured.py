"""Lines and branches of the package that each test runs."""

import hashlib
import json
import sqlite3
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Final, NamedTuple, Self

from coverage.parser import PythonParser

from tests.power.mutating import Site

_ARCS: Final = """
    SELECT context, path, fromno, tono FROM arc
    JOIN context ON context.id = context_id JOIN file ON file.id = file_id
    WHERE path LIKE '%.py'
"""


class Recorded(NamedTuple):
    """Seconds of a test, on the clock and of processors, and its outcome."""

    wall_s: float
    processor_s: float
    outcome: str


@dataclass
class Measured:
    """A set of lines and branches for each context, as the bits of a number.

    A line is named `path:12`, a branch `path:12>15`, with paths below *app*.
    """

    app: Path
    numbers: dict[str, int] = field(default_factory=dict)
    contexts: dict[str, int] = field(default_factory=dict)
    tests: dict[str, Recorded] = field(default_factory=dict)

    @classmethod
    def load(cls, app: Path, file: Path) -> Self:
        """Read what `save` wrote; nothing is measured if there is no file or *app* has changed."""
        data = json.loads(file.read_bytes()) if file.exists() else {}
        if data.get("digest") != _digest(app):
            return cls(app)
        contexts = {context: int(bits, 16) for context, bits in data["contexts"].items()}
        tests = {name: Recorded(*test) for name, test in data["tests"].items()}
        return cls(app, data["numbers"], contexts, tests)

    def save(self, file: Path) -> None:
        """Write all into *file*."""
        contexts = {context: f"{bits:x}" for context, bits in self.contexts.items()}
        data = {"digest": _digest(self.app), "numbers": self.numbers, "contexts": contexts}
        file.write_text(json.dumps(data | {"tests": self.tests}))

    def forget(self, folders: Sequence[str]) -> None:
        """Drop the tests of *folders*, of which some may be gone."""
        gone = tuple(folders)
        self.contexts = {k: bits for k, bits in self.contexts.items() if not k.startswith(gone)}
        self.tests = {k: test for k, test in self.tests.items() if not k.startswith(gone)}

    def fold(self, parts: Path) -> None:
        """Add what `recording` wrote into *parts*."""
        for file in parts.glob("tests.*.json"):
            tests = json.loads(file.read_bytes())
            self.tests |= {name: Recorded(*test) for name, test in tests.items()}
        folded: dict[str, bytearray] = defaultdict(bytearray)
        for context, names in self._read(parts):
            bits = folded[context]
            for name in names:
                number = self.numbers.setdefault(name, len(self.numbers))
                bits.extend(bytes(max(0, number // 8 + 1 - len(bits))))
                bits[number // 8] |= 1 << number % 8
        self.contexts |= {name: int.from_bytes(bits, "little") for name, bits in folded.items()}

    def _read(self, parts: Path) -> Iterator[tuple[str, Iterable[str]]]:
        """Return the names of lines and branches, arc by arc and context by context."""
        known: dict[tuple[str, int, int], tuple[str, ...]] = {}
        for data in parts.glob("data.*"):
            with closing(sqlite3.connect(data)) as connection:
                for context, *arc in connection.execute(_ARCS):
                    key = tuple(arc)
                    if key not in known:
                        known[key] = tuple(self._name(*arc))
                    yield context, known[key]

    def _name(self, file: str, start: int, stop: int) -> Iterator[str]:
        path = Path(file).relative_to(self.app).as_posix()
        parser = parse(self.app / path)
        first = parser.first_line(start)
        second = parser.first_line(stop)
        yield from (f"{path}:{line}" for line in (first, second) if line > 0)
        if (first, second) in possible_branches(parser):
            yield f"{path}:{first}>{second}"

    @property
    def branches(self) -> int:
        """The set of all branches that are measured."""
        return sum(1 << number for name, number in self.numbers.items() if ">" in name)

    def runs(self, site: Site) -> set[str]:
        """Return the tests that passed and run the statement of *site*.

        One that runs on import counts as run by all tests that run other lines of its module.
        """
        path = site.mutant.path
        line = self.numbers.get(f"{path}:{parse(self.app / path).first_line(site.line)}")
        if line is None:
            return set()
        own = self._running(1 << line)
        if site.on_import or own == {""}:
            numbers = (n for name, n in self.numbers.items() if name.startswith(f"{path}:"))
            own = self._running(sum(1 << n for n in numbers) & ~self.contexts[""])
        passed = (name for name, test in self.tests.items() if test.outcome == "passed")
        return {name for name in passed if not own.isdisjoint(_scopes(name))}

    def _running(self, bits: int) -> set[str]:
        return {context for context, own in self.contexts.items() if own & bits}


def only(groups: Mapping[str, int]) -> dict[str, int]:
    """Return, for each group, the part of its set that is in no other."""
    once = 0
    twice = 0
    for bits in groups.values():
        twice |= once & bits
        once |= bits
    return {name: bits & ~twice for name, bits in groups.items()}


def needed(sets: Mapping[str, int]) -> list[str]:
    """Return names whose sets together have all, those with the most first."""
    had = 0
    kept = []
    for name, bits in sorted(sets.items(), key=lambda item: -item[1].bit_count()):
        if bits & ~had:
            kept.append(name)
            had |= bits
    return kept


@cache
def parse(file: Path) -> PythonParser:
    """Return a parser that knows the statements and branches of *file*."""
    parser = PythonParser(text=file.read_text(), filename=str(file))
    parser.parse_source()
    return parser


@cache
def possible_branches(parser: PythonParser) -> frozenset[tuple[int, int]]:
    """Return the ways out of all statements that have several."""
    exits = parser.exit_counts()
    return frozenset(arc for arc in parser.arcs() if exits.get(arc[0], 0) > 1)


@cache
def _scopes(test: str) -> frozenset[str]:
    """Return the contexts of a test: its own, and those of its class, file and folders."""
    file, *names = test.split("::")
    folders = map(str, PurePosixPath(file).parents)
    return frozenset({test, file, "::".join((file, *names[:1])), *folders})


def _digest(app: Path) -> str:
    files = sorted(app.rglob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
