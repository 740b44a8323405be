"""Mutants: small changes of the package, each of one expression or statement."""

import ast
import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import groupby, islice
from pathlib import Path
from typing import Final

_OPERATORS: Final[dict[type[ast.AST], type[ast.AST]]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult, ast.Mod: ast.FloorDiv, ast.LShift: ast.RShift, ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.BitXor: ast.BitOr,
}  # fmt: skip
_UNCHANGED: Final = (ast.JoinedStr, ast.TypeAlias, ast.Import, ast.ImportFrom)
_UNCHANGED_FIELDS: Final = {"annotation", "returns", "decorator_list", "type_params"}


@dataclass(frozen=True)
class Mutant:
    """A change, identified by the texts around it, so that it survives moves within its file."""

    path: str
    line: str
    before: str
    after: str
    nth: int
    """Counts the changes of a file whose other texts are the same."""

    @property
    def key(self) -> str:
        """Return a short name."""
        return hashlib.sha256(json.dumps(asdict(self)).encode()).hexdigest()[:10]

    @property
    def package(self) -> str:
        """Return the first folder below the package, or the name of the package."""
        names = self.path.split("/")
        return names[1] if len(names) > 2 else names[0]


@dataclass(frozen=True)
class Site:
    """Place of a mutant in a source: bytes to replace, line, and if it runs on import."""

    mutant: Mutant
    start: int
    stop: int
    line: int
    on_import: bool

    def apply(self, source: str) -> str:
        """Return *source* with the change."""
        data = source.encode()
        return (data[: self.start] + self.mutant.after.encode() + data[self.stop :]).decode()


def find_sites(path: str, source: str) -> list[Site]:
    """Find all mutants of *source*, line by line."""
    lines = source.encode().splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    seen: Counter[tuple[str, str, str]] = Counter()
    sites = []
    for node, after, on_import in _changes(ast.parse(source), on_import=True):
        start = starts[node.lineno - 1] + node.col_offset
        stop = starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
        text = lines[node.lineno - 1].decode().strip()
        texts = (text, source.encode()[start:stop].decode(), after)
        mutant = Mutant(path, *texts, nth=seen[texts])
        seen[texts] += 1
        sites.append(Site(mutant, start, stop, node.lineno, on_import))
    return sorted(sites, key=lambda site: site.line)


type _Located = ast.expr | ast.stmt


def _changes(node: ast.AST, *, on_import: bool) -> Iterator[tuple[_Located, str, bool]]:
    for kind in (_operators, _values, _conditions, _statements):
        for changed, after in kind(node):
            yield changed, after, on_import
    if isinstance(node, (*_UNCHANGED, ast.Raise)) or _is_docstring(node):
        return
    is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
    for field, value in ast.iter_fields(node):
        if field not in _UNCHANGED_FIELDS:
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    inner = on_import and not (is_function and field == "body")
                    yield from _changes(child, on_import=inner)


def _is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _operators(node: ast.AST) -> Iterator[tuple[_Located, str]]:
    match node:
        case ast.Compare(left, ops, comparators):
            for i, op in enumerate(ops):
                changed = [*ops[:i], _other(op), *ops[i + 1 :]]
                yield node, _text(ast.Compare(left, changed, comparators))
        case ast.BoolOp(op, values):
            yield node, _text(ast.BoolOp(_other(op), values))
        case ast.BinOp(left, op, right) if type(op) in _OPERATORS:
            yield node, _text(ast.BinOp(left, _other(op), right))
        case ast.UnaryOp(ast.Not() | ast.USub(), operand):
            yield node, _text(operand)


def _values(node: ast.AST) -> Iterator[tuple[_Located, str]]:
    match node:
        case ast.Constant(bool(value)):
            yield node, str(not value)
        case ast.Constant(int(value)):
            yield node, str(value + 1)
        case ast.Constant(str(value) | bytes(value)) if value:
            yield node, repr(value[:0])
        case ast.Slice(ast.expr(), upper, step):
            yield node, ast.unparse(ast.Slice(None, upper, step))
        case ast.Slice(lower, ast.expr(), step):
            yield node, ast.unparse(ast.Slice(lower, None, step))


def _conditions(node: ast.AST) -> Iterator[tuple[_Located, str]]:
    match node:
        case ast.If(test) | ast.IfExp(test):
            tests = [test]
        case ast.comprehension(ifs=tests):
            pass
        case _:
            tests = []
    for test in tests:
        if not isinstance(test, ast.UnaryOp | ast.Compare):  # changed by their operators
            yield test, f"(not {_text(test)})"


def _statements(node: ast.AST) -> Iterator[tuple[_Located, str]]:
    match node:
        case ast.Return(ast.expr() as value) if ast.unparse(value) != "None":
            yield node, "return None"
        case ast.Raise() | ast.AugAssign() | ast.Expr(ast.Call() | ast.Await(ast.Call())):
            yield node, "pass"
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield node, "pass"
        case ast.Continue():
            yield node, "break"
        case ast.Break():
            yield node, "continue"


def _other[T: ast.AST](operator: T) -> T:
    return _OPERATORS[type(operator)]()  # type: ignore[return-value]  # of the same kind


def _text(node: ast.expr) -> str:
    return f"({ast.unparse(node)})"


def draw(
    sources: Mapping[str, str], is_covered: Callable[[Site], bool], *, seed: int, count: int
) -> list[Mutant]:
    """Draw *count* mutants on covered lines, at most one a line, from each package by its lines.

    Their order depends on the seed and on texts alone, so that few others are drawn if some lines
    come or go.
    """

    def turn(site: Site) -> str:
        return hashlib.sha256(f"{seed}:{site.mutant.key}".encode()).hexdigest()

    packages: dict[str, list[Site]] = defaultdict(list)
    for path, source in sources.items():
        for _, sites in groupby(find_sites(path, source), key=lambda site: site.line):
            first = min(sites, key=turn)
            packages[first.mutant.package].append(first)
    lines = sum(map(len, packages.values()))
    return [
        site.mutant
        for _, sites in sorted(packages.items())
        for site in islice(
            filter(is_covered, sorted(sites, key=turn)), max(1, round(len(sites) * count / lines))
        )
    ]


def locate(mutants: Iterable[Mutant], app: Path) -> dict[Mutant, Site]:
    """Find where *mutants* are in the package now; one whose text is gone is left out."""
    wanted = set(mutants)
    return {
        site.mutant: site
        for path in {mutant.path for mutant in wanted}
        if (app / path).exists()
        for site in find_sites(path, (app / path).read_text())
        if site.mutant in wanted
    }
