"""Templates of URLs, and references that a pattern generates, in version 1 of reference sets.

Templates are Jinja2 without statements: text, variables, integers and texts, ``+ - * // %`` of
integers, a number padded in a text as by ``'part-%03d' % i``, and calls of templates with named
arguments. These expressions are spelled as in Python, so `ast` parses them.
"""

import ast
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import lru_cache
from itertools import product
from math import prod
from operator import add, floordiv, mod, mul, sub
from typing import Final, NamedTuple

from shardgate.formats.documents import Json
from shardgate.formats.reading import DecodeError, StepBudget
from shardgate.model import check_integer

MOST_STEPS: Final = 2**27
"""Steps that any set may take, some 3 s; 100,000 usual generated references take fewer."""
STEPS_PER_BYTE: Final = 32
"""Further steps for each byte of a set: enough to evaluate each of its letters once."""
_NAME_STEPS: Final = 16  # for a variable
_MOST_LENGTH: Final = 4096  # characters of a template, and of its result
_MOST_INTEGER: Final = 2**61  # ranges of more integers have no `len`
_BEGIN: Final = "{{"
_END: Final = "}}"
_STATEMENT: Final = re.compile(r"\{[%#]")
_EXPRESSION: Final = re.compile(
    r"""\{\{(?![-+])((?:[^{}'"\\#]|'[^'\\]*'|"[^"\\]*")*)(?<![-+])\}\}"""
)
"""Texts in it have no escapes. Jinja2 would take a sign at its ends for its own."""
_PADDED: Final = re.compile(r"[^%]*%0?\d{0,2}d[^%]*")
_WORD: Final = re.compile(r"""'[^']*'|"[^"]*"|(\s+)|\b([^\W\d]\w*)""")
"""A text, space, or a name."""
_MARK: Final = "_"
"""Before all names while Python parses an expression: its keywords are names like all others."""

type Variables = Mapping[str, str | int]
type _Operator = Callable[[int, int], int]

_NONE: Final[Variables] = {}
_OPERATORS: Final[Mapping[type[ast.AST], _Operator]] = {
    ast.Add: add,
    ast.UAdd: add,
    ast.Sub: sub,
    ast.USub: sub,
    ast.Mult: mul,
    ast.FloorDiv: floordiv,
    ast.Mod: mod,
}


class TemplateError(DecodeError):
    """A template or a pattern is not evaluated; others of its set can be."""


class _Variable(NamedTuple):
    """The value of a variable."""

    name: str


class _TemplateCall(NamedTuple):
    """The text of a template with the values before it as *arguments*."""

    name: str
    arguments: Sequence[str]


type _Operation = str | int | _Variable | _TemplateCall | _Operator
"""A step of an expression in postfix order."""


class _Compiled(NamedTuple):
    parts: Sequence[str | Sequence[_Operation]]
    """Texts, and the expressions between them."""
    steps: int


class Templates:
    """Templates by name, which other templates use as variables or, with parameters, call."""

    def __init__(self, texts: Json, steps: StepBudget) -> None:
        """Take the member ``templates`` of a set; values that are no short texts are undefined.
        Raises: `DecodeError`.
        """
        if not isinstance(texts, dict | None):
            raise DecodeError("templates: expected an object of texts by name")
        self.steps = steps
        self._compile = lru_cache(32)(self._compile_text)  # a long one takes a megabyte
        self._plain: dict[str, str] = {}
        self._parametrised: dict[str, str] = {}
        for name, text in (texts or {}).items():
            if isinstance(text, str) and len(text) <= _MOST_LENGTH:
                known = self._parametrised if _BEGIN in text else self._plain
                known[name] = text
        # A called template sees its arguments only, so no call leads to a further one.
        self._called = Templates(None, self.steps) if self._parametrised else self

    def render(self, text: str, variables: Variables = _NONE) -> str:
        """Render *text*. Raises: `TemplateError`, `StepsError`."""
        if _BEGIN not in text:
            return text
        compiled = self._compile(text, frozenset(variables))
        self.steps.spend(compiled.steps)
        parts = [
            part if isinstance(part, str) else str(self._evaluate(part, variables))
            for part in compiled.parts
        ]
        if (length := sum(map(len, parts))) > _MOST_LENGTH:
            raise _too_long(text)
        self.steps.spend(4 * length)  # so that a result takes memory in proportion to the steps
        return "".join(parts)

    def _compile_text(self, text: str, variables: AbstractSet[str]) -> _Compiled:
        """Split *text* into texts and expressions. What stands between braces is a name, if there
        is a template or variable of that name, whatever it means in an expression.
        """
        if len(text) > _MOST_LENGTH:
            raise _too_long(text)
        parts: list[str | Sequence[_Operation]] = []
        at = 0
        steps = 0
        while (start := text.find(_BEGIN, at)) >= 0:
            parts.append(text[at:start])
            end = text.find(_END, start)
            name = text[start + len(_BEGIN) : end].strip()
            if end >= 0 and (name in variables or name in self._plain):
                parts.append([_Variable(name)])
                at = end + len(_END)
                steps += _NAME_STEPS
            elif found := _EXPRESSION.match(text, start):
                expression = found[1]
                parts.append(_parse(expression))
                at = found.end()
                steps += 32 * len(expression)  # a letter may be an operation
            else:
                raise _not_evaluated(text)
        parts.append(text[at:])
        if any(isinstance(part, str) and _STATEMENT.search(part) for part in parts):
            raise _not_evaluated(text)
        return _Compiled(parts, steps)

    def _evaluate(self, operations: Sequence[_Operation], variables: Variables) -> str | int:
        stack: list[str | int] = []
        for operation in operations:
            match operation:
                case str() | int():
                    stack.append(operation)
                case _Variable(name):
                    stack.append(self._look_up(name, variables))
                case _TemplateCall(name, arguments):
                    first = len(stack) - len(arguments)
                    values = dict(zip(arguments, stack[first:], strict=True))
                    stack[first:] = [self._call(name, values)]
                case operator:
                    right = stack.pop()
                    stack.append(_operate(operator, stack.pop(), right))
        return stack[0]

    def _look_up(self, name: str, variables: Variables) -> str | int:
        if (value := variables.get(name, self._plain.get(name))) is None:
            raise TemplateError(
                f"{name!r} is undefined, or no text of up to {_MOST_LENGTH} letters without "
                "parameters"
            )
        return value

    def _call(self, name: str, arguments: Variables) -> str:
        if (text := self._parametrised.get(name)) is None:
            raise TemplateError(f"{name!r} is no template with parameters")
        return self._called.render(text, arguments)


def _too_long(text: str) -> TemplateError:
    return TemplateError(
        f"the template {text[:80]!r} has or gives more than {_MOST_LENGTH} letters"
    )


def _not_evaluated(text: str) -> TemplateError:
    return TemplateError(f"the template {text[:80]!r} has a part that is not evaluated")


def _parse(expression: str) -> Sequence[_Operation]:
    """Return *expression* in postfix order, so that its evaluation is a loop."""
    python = _WORD.sub(
        lambda found: " " if found[1] else f"{_MARK if found[2] else ''}{found[0]}",
        expression.strip(),
    )
    try:
        nodes: list[ast.expr] = [ast.parse(python, mode="eval").body]
    except (SyntaxError, RecursionError, MemoryError, UnicodeEncodeError):
        raise _not_evaluated(expression) from None
    backwards: list[_Operation] = []
    while nodes:
        match nodes.pop():
            case ast.Constant(str(value)):
                backwards.append(value)
            case ast.Constant(int(value)):
                backwards.append(_integer(value))
            case ast.Name(name):
                backwards.append(_Variable(name.removeprefix(_MARK)))
            case ast.UnaryOp(sign, operand) if type(sign) in _OPERATORS:
                backwards.append(_OPERATORS[type(sign)])
                nodes += [ast.Constant(0), operand]
            case ast.BinOp(left, operator, right) if type(operator) in _OPERATORS:
                backwards.append(_OPERATORS[type(operator)])
                nodes += [left, right]
            case ast.Call(ast.Name(name), [], keywords):
                names = [(each.arg or "").removeprefix(_MARK) for each in keywords]
                backwards.append(_TemplateCall(name.removeprefix(_MARK), names))
                nodes += [each.value for each in keywords]
            case _:
                raise _not_evaluated(expression)
    return backwards[::-1]


def _operate(operator: _Operator, left: str | int, right: str | int) -> str | int:
    if operator is mod and isinstance(left, str) and _PADDED.fullmatch(left):
        return left % _integer(right)
    if type(left) is not int or type(right) is not int:
        raise TemplateError(
            f"expected integers in a template, found {left!r:.80} and {right!r:.80}"
        )
    try:
        return _integer(operator(left, right))
    except ZeroDivisionError as error:
        raise TemplateError(f"{left} and 0 in a template: {error}") from None


def _integer(value: Json) -> int:
    return check_integer(value, "a number", _MOST_INTEGER, TemplateError, -_MOST_INTEGER)


class Generated(NamedTuple):
    """A reference that a pattern generates; to a whole object, where it has no *part*."""

    key: str
    url: str
    part: tuple[int, int] | None
    """Offset and length."""


class Failed(NamedTuple):
    """A reference that a pattern cannot generate."""

    key: str | None
    """`None` where the keys of the pattern are not known either."""
    reason: str


def generate(patterns: Json, templates: Templates) -> Iterator[Generated | Failed]:
    """Yield the references of *patterns*, the member ``gen`` of a set. Raises: `StepsError`."""
    if not isinstance(patterns, list | None):
        yield Failed(None, "gen: expected a list of patterns")
        return
    for pattern in patterns or ():
        try:
            yield from _generate(pattern, templates)
        except TemplateError as error:
            yield Failed(None, f"gen: {error}")


def _generate(pattern: Json, templates: Templates) -> Iterator[Generated | Failed]:
    """Yield the references of one pattern. Raises: `TemplateError` where a key is not known."""
    match pattern:
        case {"key": str(key), "url": str(url), "dimensions": dict(dimensions)} if dimensions:
            values = list(map(_values, dimensions.values()))
        case _:
            raise TemplateError("expected key, url and dimensions of each pattern")
    count = prod(map(len, values))
    # Beside the steps of its templates, which are counted as they are rendered.
    templates.steps.spend(count * (192 + _NAME_STEPS * len(dimensions)))
    if not count:  # `product` would make lists of the other dimensions, of any length
        return
    for each in product(*values):
        variables: dict[str, int] = dict(zip(dimensions, each, strict=True))
        name = templates.render(key, variables)
        try:
            part = _part(pattern, templates, variables)
            yield Generated(name, templates.render(url, variables), part)
        except TemplateError as error:
            yield Failed(name, str(error))


def _values(dimension: Json) -> Sequence[int]:
    match dimension:
        case list():
            return list(map(_integer, dimension))
        case {"stop": stop} if step := _integer(dimension.get("step", 1)):
            return range(_integer(dimension.get("start", 0)), _integer(stop), step)
    raise TemplateError("expected a dimension of integers, or of start, stop and step")


def _part(
    pattern: Mapping[str, Json], templates: Templates, variables: Variables
) -> tuple[int, int] | None:
    """Return offset and length, if the pattern has them. Raises: `TemplateError`."""
    if "offset" not in pattern and "length" not in pattern:
        return None
    if "offset" not in pattern or "length" not in pattern:
        raise TemplateError("gen: expected both offset and length, or neither")
    return (
        _number(templates, pattern["offset"], variables),
        _number(templates, pattern["length"], variables),
    )


def _number(templates: Templates, text: Json, variables: Variables) -> int:
    rendered = templates.render(str(text), variables).strip()
    if not (rendered.isascii() and rendered.isdigit()) or len(rendered) > len(str(_MOST_INTEGER)):
        raise TemplateError(f"gen: expected an offset or a length, found {rendered[:80]!r}")
    return int(rendered)
