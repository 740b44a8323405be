"""Templates of URLs, and references that a pattern generates, in version 1 of reference sets.

Templates are Jinja2 without statements: text, variables, integers and texts, ``+ - * // %`` of
integers, numbers padded by ``'%03d' % i``, and calls of templates with named arguments.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from math import prod
from typing import Any, Final, NamedTuple

from jinja2 import StrictUndefined, Template, TemplateError, Undefined, nodes
from jinja2.sandbox import SandboxedEnvironment

from shardgate.formats.documents import Json
from shardgate.formats.reading import DecodeError

MOST_GENERATED: Final = 100_000
"""References that the patterns of one set may generate; each takes some 50 µs."""
_MOST_EXPRESSIONS: Final = 10_000
"""Distinct templates with expressions in one set; each is compiled."""
_MOST_LENGTH: Final = 4096
"""Characters of a template, and of its result."""
_MOST_INTEGER: Final = 2**61
"""Ranges up to it have a length."""
_VARIABLE: Final = re.compile(r"\{\{\s*([A-Za-z_]\w*)\s*\}\}", re.ASCII)
_TEMPLATE: Final = re.compile(r"\{[{%#]")
_PADDED: Final = re.compile(r"%0?\d{0,2}d")
_ALLOWED: Final = (
    nodes.Template,
    nodes.Output,
    nodes.TemplateData,
    nodes.Name,
    nodes.Const,
    nodes.Add,
    nodes.Sub,
    nodes.Mul,
    nodes.FloorDiv,
    nodes.Mod,
    nodes.Neg,
    nodes.Call,
    nodes.Keyword,
)

type Value = str | int | Callable[..., str]
type Variables = Mapping[str, Value]


class _Environment(SandboxedEnvironment):
    """Environment whose operators take and return integers of a bounded size."""

    intercepted_binops = frozenset({"+", "-", "*", "//", "%"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if isinstance(left, str) and operator == "%" and _PADDED.fullmatch(left):
            return left % _integer(right)
        return _integer(super().call_binop(context, operator, _integer(left), _integer(right)))


def _is_short(text: Json) -> bool:
    return isinstance(text, str) and len(text) <= _MOST_LENGTH


def _integer(value: Any) -> int:
    if type(value) is not int or abs(value) > _MOST_INTEGER:
        raise DecodeError(f"expected an integer of a template or of gen, found {str(value)[:80]!r}")
    return value


def _finalize(value: Any) -> Any:
    if not isinstance(value, str | int | Undefined):
        raise DecodeError("a template with parameters is used without them")
    return value


class Templates:
    """Templates by name, which other templates use as variables or, with parameters, call."""

    def __init__(self, texts: Json) -> None:
        """Take the member ``templates`` of a set. Raises: `DecodeError`."""
        self._environment = _Environment(undefined=StrictUndefined, finalize=_finalize)
        self._environment.globals.clear()
        self._compiled: dict[str, Template] = {}
        if not isinstance(texts, dict) or not all(map(_is_short, texts.values())):
            raise DecodeError(f"templates: expected texts of up to {_MOST_LENGTH} letters by name")
        self._values: dict[str, Value] = {
            name: self._callable(text) if _TEMPLATE.search(text) else text
            for name, text in texts.items()
        }

    def render(self, text: str, variables: Variables | None = None) -> str:
        """Render *text*, by default with the templates as variables. Raises: `DecodeError`."""
        if not _TEMPLATE.search(text):
            return text
        values = self._values if variables is None else variables
        if len(text) > _MOST_LENGTH:
            raise DecodeError(f"a template of more than {_MOST_LENGTH} characters: {text[:80]!r}…")

        def replace(found: re.Match[str]) -> str:
            value = values.get(found[1])
            return found[0] if value is None or callable(value) else str(value)

        rendered = _VARIABLE.sub(replace, text)
        if _TEMPLATE.search(rendered):
            rendered = self._evaluate(text, values)
        if len(rendered) > _MOST_LENGTH:
            raise DecodeError(f"the template {text[:80]!r} gives more than {_MOST_LENGTH} letters")
        return rendered

    def bind(self, values: Variables) -> Variables:
        """Return the templates and *values* as variables."""
        return {**self._values, **values}

    def _callable(self, text: str) -> Callable[..., str]:
        return lambda **arguments: self.render(text, arguments)

    def _evaluate(self, text: str, variables: Variables) -> str:
        try:
            return self._compile(text).render(variables)
        except DecodeError:
            raise
        except (TemplateError, TypeError, ArithmeticError, RecursionError, MemoryError) as error:
            raise DecodeError(f"the template {text[:80]!r}: {error}") from None

    def _compile(self, text: str) -> Template:
        if (compiled := self._compiled.get(text)) is not None:
            return compiled
        if len(self._compiled) == _MOST_EXPRESSIONS:
            raise DecodeError(f"more than {_MOST_EXPRESSIONS} templates with expressions")
        tree = self._environment.parse(text)
        for node in tree.find_all(nodes.Node):
            is_positional = isinstance(node, nodes.Call) and (
                node.args
                or node.dyn_args
                or node.dyn_kwargs
                or not isinstance(node.node, nodes.Name)
            )
            if not isinstance(node, _ALLOWED) or is_positional:
                kind = type(node).__name__
                raise DecodeError(f"the template {text[:80]!r} has {kind}, which is not evaluated")
        compiled = self._compiled[text] = self._environment.from_string(text)
        return compiled


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
