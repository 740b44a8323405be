"""Which characters, and which places of a text, a regular expression can name."""

from collections.abc import Callable, Mapping
from typing import Final

type Test = Callable[[str], bool]
"""Tells of a character whether it is meant."""


class PatternError(ValueError):
    """It is no pattern, or none that is understood."""


def _is_word(character: str) -> bool:
    return character.isalnum() or character == "_"


def _is_boundary(text: str, at: int) -> bool:
    before, after = text[at - 1 : at] if at else "", text[at : at + 1]
    return (before != "" and _is_word(before)) != (after != "" and _is_word(after))


CLASSES: Final[Mapping[str, Test]] = {
    "d": str.isdecimal,
    "D": lambda character: not character.isdecimal(),
    "s": str.isspace,
    "S": lambda character: not character.isspace(),
    "w": _is_word,
    "W": lambda character: not _is_word(character),
}
"""By the letter behind a backslash."""
CONTROLS: Final = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v", "a": "\a"}
POINTS: Final[Mapping[str, Callable[[str, int], bool]]] = {
    "^": lambda _, at: at == 0,
    "$": lambda text, at: at == len(text),
    "A": lambda _, at: at == 0,
    "z": lambda text, at: at == len(text),
    "b": _is_boundary,
    "B": lambda text, at: not _is_boundary(text, at),
}


def fold(test: Test, *, ignores_case: bool) -> Test:
    """Let *test* find either case, where that is to be."""
    if not ignores_case:
        return test
    return lambda character: test(character.lower()) or test(character.upper())


def parse_class(rest: str, *, ignores_case: bool) -> tuple[Test, str]:
    """Read a class up to its bracket; give what comes after it too.

    Raises: `PatternError`.
    """
    negated = rest.startswith("^")
    at = int(negated)
    tests: list[Test] = []
    start = at
    while at == start or rest[at : at + 1] != "]":
        test, low, at = _member(rest, at)
        if low and rest[at : at + 1] == "-" and rest[at + 1 : at + 2] != "]":
            _, high, at = _member(rest, at + 1)
            if not high or high < low:
                raise PatternError("a range is none")
            test = _between(low, high)
        tests.append(fold(test, ignores_case=ignores_case))
    return (lambda found: any(test(found) for test in tests) != negated), rest[at + 1 :]


def _member(rest: str, at: int) -> tuple[Test, str, int]:
    """Read a character, which can begin a range, or a class; tell where it ends."""
    character = rest[at : at + 1]
    if not character or character == "[" or rest[at : at + 2] in {"&&", "--", "~~"}:
        raise PatternError("a class does not end, or has another in it")
    if character != "\\":
        return character.__eq__, character, at + 1
    letter = rest[at + 1 : at + 2]
    if letter in CLASSES:
        return CLASSES[letter], "", at + 2
    literal = CONTROLS.get(letter, letter)
    if not literal or literal.isalnum() or not letter.isascii():
        raise PatternError("a letter behind a backslash means nothing")
    return literal.__eq__, literal, at + 2


def _between(low: str, high: str) -> Test:
    return lambda character: low <= character <= high
