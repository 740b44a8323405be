"""Regular expressions of the library's configuration, in time that grows with pattern and text.

They come with a repository, and Python's own could be kept busy for ever by one of them. What is
understood is what people write: no Unicode classes by name, no classes in classes, no flag but i.
"""

from collections.abc import Callable
from typing import Final, NamedTuple

from app.formats.icechunk.pattern_classes import (
    CLASSES,
    CONTROLS,
    POINTS,
    PatternError,
    Test,
    fold,
    parse_class,
)

_MAX_STEPS: Final = 1024
_MAX_DEPTH: Final = 32
_MAX_COUNT: Final = 1000


class _Take(NamedTuple):
    """Goes on past a character."""

    test: Test


class _At(NamedTuple):
    """Goes on at some places of a text."""

    test: Callable[[str, int], bool]


class _Fork(NamedTuple):
    """Goes on at other steps, so far away."""

    ways: tuple[int, ...]


type _Program = list[_Take | _At | _Fork]


class Pattern:
    """A compiled pattern."""

    def __init__(self, pattern: str) -> None:
        """Compile *pattern*.

        Raises: `PatternError`.
        """
        self._program = _Parser(pattern).parse()

    def search(self, text: str) -> bool:
        """Tell whether the pattern matches anywhere in *text*."""
        current: set[int] = set()
        for at in range(len(text) + 1):
            current = self._reach(current | {0}, text, at)
            if len(self._program) in current:
                return True
            if at < len(text):
                current = {step + 1 for step in current if self._takes(step, text[at])}
        return False

    def _takes(self, step: int, character: str) -> bool:
        found = self._program[step]
        return isinstance(found, _Take) and found.test(character)

    def _reach(self, steps: set[int], text: str, at: int) -> set[int]:
        """Find all steps that can be come to without a character."""
        reached, waiting = set(steps), list(steps)
        while waiting:
            step = waiting.pop()
            further: set[int] = set()
            match self._program[step] if step < len(self._program) else None:
                case _Fork(ways):
                    further = {step + way for way in ways}
                case _At(test) if test(text, at):
                    further = {step + 1}
            waiting += further - reached
            reached |= further
        return reached


class _Parser:
    """Makes a program of a pattern."""

    def __init__(self, pattern: str) -> None:
        self._rest = pattern
        self._depth = 0
        self._ignores_case = False

    def parse(self) -> _Program:
        """Read all."""
        program = self._either()
        if self._rest:
            raise PatternError("a group ends that did not begin")
        return program

    def _take(self) -> str:
        if not self._rest:
            raise PatternError("it ends too early")
        first, self._rest = self._rest[0], self._rest[1:]
        return first

    def _takes(self, text: str) -> bool:
        if not self._rest.startswith(text):
            return False
        self._rest = self._rest[len(text) :]
        return True

    def _either(self) -> _Program:
        program = self._sequence()
        while self._takes("|"):
            other = self._sequence()
            program = [_Fork((1, len(program) + 2)), *program, _Fork((len(other) + 1,)), *other]
        return program

    def _sequence(self) -> _Program:
        program: _Program = []
        while self._rest and self._rest[0] not in "|)":
            program += self._repeated()
            if len(program) > _MAX_STEPS:
                raise PatternError("it is too long")
        return program

    def _repeated(self) -> _Program:
        if self._takes("(?i)"):
            self._ignores_case = True
            return []
        program = self._atom()
        while self._rest and self._rest[0] in "*+?{":
            program = _repeat(program, *self._bounds())
            self._takes("?")
        return program

    def _bounds(self) -> tuple[int, int | None]:
        match self._take():
            case "*":
                return 0, None
            case "+":
                return 1, None
            case "?":
                return 0, 1
        inner, _, self._rest = self._rest.partition("}")
        least, comma, most = inner.partition(",")
        if not all(part.isascii() and part.isdigit() for part in (least, most or least)):
            raise PatternError("a count is none")
        if not comma:
            return int(least), int(least)
        return int(least), int(most) if most else None

    def _atom(self) -> _Program:
        match character := self._take():
            case "(":
                return self._group()
            case "[":
                test, self._rest = parse_class(self._rest, ignores_case=self._ignores_case)
                return [_Take(test)]
            case ".":
                return [_Take(lambda found: found != "\n")]
            case "^" | "$":
                return [_At(POINTS[character])]
            case "\\":
                return self._escape()
            case "*" | "+" | "?" | "{":
                raise PatternError("nothing is repeated")
        return [_Take(fold(character.__eq__, ignores_case=self._ignores_case))]

    def _group(self) -> _Program:
        ignores_case = self._ignores_case
        if self._takes("?i:"):
            self._ignores_case = True
        elif self._takes("?P<") or self._takes("?<"):
            name, _, self._rest = self._rest.partition(">")
            if not name.isidentifier():
                raise PatternError("the name of a group is none")
        elif not self._takes("?:") and self._rest.startswith("?"):
            raise PatternError("a group is of no known kind")
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise PatternError("it nests too deep")
        program = self._either()
        self._depth -= 1
        self._ignores_case = ignores_case
        if not self._takes(")"):
            raise PatternError("a group does not end")
        return program

    def _escape(self) -> _Program:
        letter = self._take()
        if letter in POINTS and letter not in "^$":
            return [_At(POINTS[letter])]
        if letter in CLASSES:
            return [_Take(CLASSES[letter])]
        literal = CONTROLS.get(letter, letter)
        if literal.isalnum() or not letter.isascii():
            raise PatternError("a letter behind a backslash means nothing")
        return [_Take(literal.__eq__)]


def _repeat(program: _Program, least: int, most: int | None) -> _Program:
    count = least if most is None else most
    if count < least or count > _MAX_COUNT or len(program) * count > _MAX_STEPS:
        raise PatternError("it repeats too much")
    size = len(program)
    if most is None:
        return [*program * least, _Fork((1, size + 2)), *program, _Fork((-size - 1,))]
    return [*program * least, *[_Fork((1, size + 1)), *program] * (most - least)]
