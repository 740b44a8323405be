"""Templates of URLs, and references that a pattern generates, in version 1 of reference sets.

Templates are Jinja2 without statements: text, variables, integers and texts, ``+ - * // %`` of
integers, numbers padded by ``'%03d' % i``, and calls of templates with named arguments. These
expressions are spelled as in Python, so `ast` parses them.
"""

import ast
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import lru_cache, partial
from itertools import product
from math import prod
from operator import add, floordiv, mod, mul, sub
from typing import Any, Final, NamedTuple

from shardgate.formats.documents import Json
from shardgate.formats.reading import DecodeError, StepBudget, StepsError

MOST_STEPS: Final = 2**27
"""Steps that any set may take, some 3 s; 100,000 usual generated references take fewer."""
STEPS_PER_BYTE: Final = 32
"""Further steps for each byte of a set: enough to evaluate each of its letters once."""
_LETTER_STEPS: Final = 32
"""Steps for a letter of an expression."""
_NAME_STEPS: Final = 16
"""Steps for a variable."""
_RENDERED_STEPS: Final = 4
"""Steps for a letter of a result, so that a result takes memory in proportion to the steps."""
_GENERATED_STEPS: Final = 192
"""Steps for a generated reference, beside those of its templates."""
_MOST_LENGTH: Final = 4096
"""Characters of a template, and of its result."""
_MOST_INTEGER: Final = 2**61
"""Ranges of more integers have no `len`."""
_COMPILED: Final = 64
"""Templates that are remembered: a long one takes a megabyte."""
_BEGIN: Final = "{{"
_END: Final = "}}"
_STATEMENT: Final = re.compile(r"\{[%#]")
_EXPRESSION: Final = re.compile(
    r"""\{\{(?![-+])((?:[^{}'"\\]|'[^'\\]*'|"[^"\\]*")*)(?<![-+])\}\}"""
)
"""Texts in it have no escapes. Jinja2 would take a sign at its ends for its own."""
_PADDED: Final = re.compile(r"%0?\d{0,2}d")
_WORD: Final = re.compile(r"""'[^']*'|"[^"]*"|\b([^\W\d]\w*)""")
"""A text, or a name."""
_MARK: Final = "_"
"""Before all names while Python parses an expression: its keywords are names like all others."""
_OPERATORS: Final[Mapping[type[ast.operator], Callable[[int, int], int]]] = {
    ast.Add: add,
    ast.Sub: sub,
    ast.Mult: mul,
    ast.FloorDiv: floordiv,
    ast.Mod: mod,
}

type Value = str | int | Callable[[Variables], str]
type Variables = Mapping[str, Value]

_NONE: Final[Variables] = {}


class _Variable(NamedTuple):
    """The value of a variable."""

    name: str


class _TemplateCall(NamedTuple):
    """The text of a template with the values before it as *arguments*."""

    name: str
    arguments: Sequence[str]


type _Operator = Callable[[int, int], int]
type _Operation = str | int | _Variable | _TemplateCall | _Operator
"""A step of an expression in postfix order."""


class _Template(NamedTuple):
    parts: Sequence[str | Sequence[_Operation]]
    """Texts, and what is evaluated between them."""
    steps: int


class Templates:
    """Templates by name, which other templates use as variables or, with parameters, call.

    A template that is called sees its arguments only, so no call leads to a further one.
    """

    def __init__(self, texts: Json, steps: StepBudget | None = None) -> None:
        """Take the member ``templates`` of a set; values that are no short texts are undefined.
        Raises: `DecodeError`.
        """
        if not isinstance(texts, dict | None):
            raise DecodeError("templates: expected an object of texts by name")
        self.steps = steps or StepBudget(MOST_STEPS)
        self._compile = lru_cache(_COMPILED)(self._compile_text)
        self._values: dict[str, Value] = {
            name: partial(self.render, text, is_called=True) if _BEGIN in text else text
            for name, text in (texts or {}).items()
            if isinstance(text, str) and len(text) <= _MOST_LENGTH
        }

    def render(self, text: str, variables: Variables = _NONE, *, is_called: bool = False) -> str:
        """Render *text* with *variables* and, unless it *is_called*, the templates. Raises:
        `DecodeError`.
        """
        if _BEGIN not in text:
            return text
        if len(text) > _MOST_LENGTH:
            raise DecodeError(f"a template of more than {_MOST_LENGTH} characters: {text[:80]!r}…")
        template = self._compile(text, frozenset(variables), is_called)
        self.steps.spend(template.steps)
        others = _NONE if is_called else self._values
        try:
            parts = [
                part if isinstance(part, str) else str(_evaluate(part, variables, others))
                for part in template.parts
            ]
        except ArithmeticError as error:
            raise DecodeError(f"the template {text[:80]!r}: {error}") from None
        if (length := sum(map(len, parts))) > _MOST_LENGTH:
            raise DecodeError(f"the template {text[:80]!r} gives more than {_MOST_LENGTH} letters")
        self.steps.spend(_RENDERED_STEPS * length)
        return "".join(parts)

    def _compile_text(self, text: str, names: AbstractSet[str], is_called: bool) -> _Template:  # noqa: FBT001
        """Split *text* into texts and expressions. What stands between braces is a name, if there
        is a template or variable of that name, whatever it means in an expression.
        """
        parts: list[str | Sequence[_Operation]] = []
        at, steps = 0, 0
        while (start := text.find(_BEGIN, at)) >= 0:
            end = text.find(_END, start)
            name = text[start + len(_BEGIN) : end].strip() if end >= 0 else ""
            parts.append(text[at:start])
            if name in names or (not is_called and name in self._values):
                parts.append([_Variable(name)])
                at = end + len(_END)
                steps += _NAME_STEPS
                continue
            if (found := _EXPRESSION.match(text, start)) is None:
                raise DecodeError(f"the template {text[:80]!r} has a part that is not evaluated")
            parts.append(_parse(found[1]))
            at = found.end()
            steps += _LETTER_STEPS * len(found[1])
        parts.append(text[at:])
        if any(isinstance(part, str) and _STATEMENT.search(part) for part in parts):
            raise DecodeError(f"the template {text[:80]!r} has a part that is not evaluated")
        return _Template(parts, steps)


def _parse(expression: str) -> Sequence[_Operation]:
    """Return *expression* in postfix order, so that its evaluation is a loop."""
    marked = _WORD.sub(lambda found: f"{_MARK if found[1] else ''}{found[0]}", expression.strip())
    try:
        nodes: list[ast.expr] = [ast.parse(marked, mode="eval").body]
    except (SyntaxError, RecursionError, MemoryError):
        raise DecodeError(f"{expression[:80]!r} of a template is not evaluated") from None
    backwards: list[_Operation] = []
    while nodes:
        match nodes.pop():
            case ast.Constant(str() | int() as value):
                backwards.append(value)
            case ast.Name(name):
                backwards.append(_Variable(name.removeprefix(_MARK)))
            case ast.UnaryOp(ast.USub(), operand):
                backwards.append(sub)
                nodes += [ast.Constant(0), operand]
            case ast.BinOp(left, operator, right) if type(operator) in _OPERATORS:
                backwards.append(_OPERATORS[type(operator)])
                nodes += [left, right]
            case ast.Call(ast.Name(name), [], keywords):
                names = [(each.arg or "").removeprefix(_MARK) for each in keywords]
                backwards.append(_TemplateCall(name.removeprefix(_MARK), names))
                nodes += [each.value for each in keywords]
            case _:
                raise DecodeError(f"{expression[:80]!r} of a template is not evaluated")
    return backwards[::-1]


def _evaluate(operations: Sequence[_Operation], variables: Variables, others: Variables) -> Value:
    stack: list[Any] = []
    for operation in operations:
        match operation:
            case str() | int():
                stack.append(operation)
            case _Variable(name):
                stack.append(_look_up(name, variables, others))
                if callable(stack[-1]):
                    raise DecodeError(f"{name!r} is a template with parameters, used without them")
            case _TemplateCall(name, arguments):
                if not callable(template := _look_up(name, variables, others)):
                    raise DecodeError(f"{name!r} is no template with parameters")
                first = len(stack) - len(arguments)
                stack[first:] = [template(dict(zip(arguments, stack[first:], strict=True)))]
            case operator:
                right = stack.pop()
                stack.append(_operate(operator, stack.pop(), right))
    value: Value = stack[0]
    return value


def _operate(operator: _Operator, left: str | int, right: str | int) -> str | int:
    if type(left) is int and type(right) is int:
        return _integer(operator(left, right))
    if operator is mod and _PADDED.fullmatch(str(left)):
        return str(left) % _integer(right)
    raise DecodeError(f"expected integers in a template, found {left!r:.80} and {right!r:.80}")


def _look_up(name: str, variables: Variables, others: Variables) -> Value:
    if (value := variables.get(name, others.get(name))) is None:
        raise DecodeError(f"{name!r} is undefined, or no text of up to {_MOST_LENGTH} letters")
    return value


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
        except StepsError:
            raise
        except DecodeError as error:
            yield Failed(None, f"gen: {error}")


def _generate(pattern: Json, templates: Templates) -> Iterator[Generated | Failed]:
    """Yield the references of one pattern. Raises: `DecodeError` where a key is not known."""
    match pattern:
        case {"key": str(key), "url": str(url), "dimensions": dict(dimensions)} if dimensions:
            names: list[str] = list(dimensions)
            values = list(map(_values, dimensions.values()))
        case _:
            raise DecodeError("expected key, url and dimensions of each pattern")
    steps = _GENERATED_STEPS + _NAME_STEPS * len(names)
    templates.steps.spend(steps * prod(map(len, values)))
    for each in product(*values):
        variables = dict(zip(names, each, strict=True))
        name = templates.render(key, variables)
        try:
            part = _part(pattern, templates, variables)
            yield Generated(name, templates.render(url, variables), part)
        except StepsError:
            raise
        except DecodeError as error:
            yield Failed(name, str(error))


def _part(
    pattern: Mapping[str, Json], templates: Templates, variables: Variables
) -> tuple[int, int] | None:
    """Return offset and length, if the pattern has them. Raises: `DecodeError`."""
    texts = [pattern[name] for name in ("offset", "length") if name in pattern]
    match [_number(templates, text, variables) for text in texts]:
        case []:
            return None
        case [offset, length]:
            return offset, length
    raise DecodeError("gen: expected both offset and length, or neither")


def _values(dimension: Json) -> Sequence[int]:
    if isinstance(dimension, list):
        return [_integer(each) for each in dimension]
    if isinstance(dimension, dict) and "stop" in dimension:
        start = _integer(dimension.get("start", 0))
        step = _integer(dimension.get("step", 1))
        if step:
            return range(start, _integer(dimension["stop"]), step)
    raise DecodeError("expected a dimension of integers, or of start, stop and step")


def _number(templates: Templates, text: Json, variables: Variables) -> int:
    rendered = templates.render(text, variables) if isinstance(text, str) else str(text)
    if not (rendered.isascii() and rendered.isdigit()) or len(rendered) > len(str(_MOST_INTEGER)):
        raise DecodeError(f"gen: expected an offset or a length, found {rendered[:80]!r}")
    return int(rendered)
