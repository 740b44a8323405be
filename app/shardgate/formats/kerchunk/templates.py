"""Templates of URLs, and references that a pattern generates, in version 1 of reference sets.

Templates are Jinja2 without statements: text, variables, integers and texts, ``+ - * // %`` of
integers, numbers padded by ``'%03d' % i``, and calls of templates with named arguments. These
expressions are spelled as in Python, so `ast` parses them.
"""

import ast
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from itertools import product
from math import prod
from operator import add, floordiv, mod, mul, sub
from typing import Any, Final, NamedTuple

from shardgate.formats.documents import Json
from shardgate.formats.reading import DecodeError

MOST_GENERATED: Final = 100_000
"""References that the patterns of one set may generate; each takes some 20 µs."""
_MOST_LENGTH: Final = 4096
"""Characters of a template, and of its result."""
_MOST_INTEGER: Final = 2**61
"""Ranges of more integers have no `len`."""
_PARSED: Final = 64
"""Expressions that are remembered: a long one takes a megabyte."""
_TEMPLATE: Final = re.compile(r"\{[{%#]")
_EXPRESSION: Final = re.compile(
    r"""\{\{(?![-+])((?:[^{}'"\\]|'[^'\\]*'|"[^"\\]*")*)(?<![-+])\}\}"""
)
"""Texts in it have no escapes. Jinja2 would take a sign at its ends for its own."""
_PADDED: Final = re.compile(r"%0?\d{0,2}d")
_OPERATORS: Final[Mapping[type[ast.operator], Callable[[int, int], int]]] = {
    ast.Add: add,
    ast.Sub: sub,
    ast.Mult: mul,
    ast.FloorDiv: floordiv,
    ast.Mod: mod,
}

type Value = str | int | Callable[[Variables], str]
type Variables = Mapping[str, Value]


class Templates:
    """Templates by name, which other templates use as variables or, with parameters, call."""

    def __init__(self, texts: Json) -> None:
        """Take the member ``templates`` of a set. Raises: `DecodeError`."""
        named = texts.values() if isinstance(texts, dict) else [None]
        if not all(isinstance(text, str) and len(text) <= _MOST_LENGTH for text in named):
            raise DecodeError(f"templates: expected texts of up to {_MOST_LENGTH} letters by name")
        self._parse = lru_cache(_PARSED)(_parse)
        self._values: dict[str, Value] = {
            name: partial(self.render, text) if _TEMPLATE.search(text) else text
            for name, text in texts.items()
        }

    def render(self, text: str, variables: Variables | None = None) -> str:
        """Render *text*, by default with the templates as variables. Raises: `DecodeError`."""
        if not _TEMPLATE.search(text):
            return text
        if len(text) > _MOST_LENGTH:
            raise DecodeError(f"a template of more than {_MOST_LENGTH} characters: {text[:80]!r}…")
        values = self._values if variables is None else variables
        parts = _EXPRESSION.split(text)
        if any(map(_TEMPLATE.search, parts[::2])):
            raise DecodeError(f"the template {text[:80]!r} has a part that is not evaluated")
        try:
            found = [_evaluate(self._parse(expression), values) for expression in parts[1::2]]
        except (SyntaxError, ArithmeticError, RecursionError, MemoryError) as error:
            raise DecodeError(f"the template {text[:80]!r}: {error}") from None
        if any(map(callable, found)):
            raise DecodeError(f"{text[:80]!r} uses a template with parameters without them")
        parts[1::2] = map(str, found)
        rendered = "".join(parts)
        if len(rendered) > _MOST_LENGTH:
            raise DecodeError(f"the template {text[:80]!r} gives more than {_MOST_LENGTH} letters")
        return rendered

    def bind(self, values: Variables) -> Variables:
        """Return the templates and *values* as variables."""
        return {**self._values, **values}


def _parse(expression: str) -> ast.expr:
    return ast.parse(expression.strip(), mode="eval").body


def _evaluate(node: ast.expr, variables: Variables) -> Value:
    match node:
        case ast.Constant(str() | int() as value):
            return value
        case ast.Name(name):
            if name not in variables:
                raise DecodeError(f"{name!r} is undefined in a template")
            return variables[name]
        case ast.UnaryOp(ast.USub(), operand):
            return -_integer(_evaluate(operand, variables))
        case ast.BinOp(left, operator, right) if type(operator) in _OPERATORS:
            first, second = _evaluate(left, variables), _integer(_evaluate(right, variables))
            if isinstance(operator, ast.Mod) and _PADDED.fullmatch(str(first)):
                return str(first) % second
            return _integer(_OPERATORS[type(operator)](_integer(first), second))
        case ast.Call(ast.Name(name), [], keywords) if callable(template := variables.get(name)):
            return template({each.arg or "": _evaluate(each.value, variables) for each in keywords})
    raise DecodeError(f"{ast.unparse(node)[:80]!r} of a template is not evaluated")


def _integer(value: Any) -> int:
    if type(value) is not int or abs(value) > _MOST_INTEGER:
        raise DecodeError(f"expected an integer of a template or of gen, found {str(value)[:80]!r}")
    return value


class Generated(NamedTuple):
    """A reference that a pattern generates; to a whole object, where it has no *part*."""

    key: str
    url: str
    part: tuple[int, int] | None
    """Offset and length."""


def generate(patterns: Json, templates: Templates) -> Iterator[Generated]:
    """Yield the references of *patterns*, the member ``gen`` of a set. Raises: `DecodeError`."""
    if not isinstance(patterns, list):
        raise DecodeError("gen: expected a list of patterns")
    room = MOST_GENERATED
    for pattern in patterns:
        match pattern:
            case {"key": str(key), "url": str(url), "dimensions": dict(dimensions)} if dimensions:
                names: list[str] = list(dimensions)
                values = list(map(_values, dimensions.values()))
            case _:
                raise DecodeError("gen: expected key, url and dimensions of each pattern")
        part = [pattern[name] for name in ("offset", "length") if name in pattern]
        if len(part) == 1:
            raise DecodeError("gen: expected both offset and length, or neither")
        if (room := room - prod(map(len, values))) < 0:
            raise DecodeError(f"gen: it generates more than {MOST_GENERATED} references")
        for each in product(*values):
            variables = templates.bind(dict(zip(names, each, strict=True)))
            numbers = [_number(templates, text, variables) for text in part]
            place = (numbers[0], numbers[1]) if numbers else None
            yield Generated(
                templates.render(key, variables), templates.render(url, variables), place
            )


def _values(dimension: Json) -> Sequence[int]:
    if isinstance(dimension, list):
        return [_integer(each) for each in dimension]
    if isinstance(dimension, dict) and "stop" in dimension:
        start, step = (_integer(dimension.get(*each)) for each in (("start", 0), ("step", 1)))
        if step:
            return range(start, _integer(dimension["stop"]), step)
    raise DecodeError("gen: expected a dimension of integers, or of start, stop and step")


def _number(templates: Templates, text: Json, variables: Variables) -> int:
    rendered = templates.render(text, variables) if isinstance(text, str) else str(text)
    if not (rendered.isascii() and rendered.isdigit()) or len(rendered) > len(str(_MOST_INTEGER)):
        raise DecodeError(f"gen: expected an offset or a length, found {rendered[:80]!r}")
    return int(rendered)
