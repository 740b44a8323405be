"""What the claims of an issuer grant."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from app.setting_fields import PUBLIC

_SPACED: Final = frozenset({"scope", "scp"})
"""Claims whose values stand in one text, with spaces between them (RFC 8693 §4.2)."""


def grants(issuer: str, claims: Mapping[str, Any], names: Iterable[str]) -> frozenset[str]:
    """Tell the rules that are kept by whom *issuer* says *claims* of.

    Each begins with the name of the issuer, in which there is no colon, whatever the value is.
    """
    values = {value for name in names for value in _values(claims, name)}
    return frozenset({PUBLIC, *(f"{issuer}:{value}" for value in values)})


def _values(claims: Mapping[str, Any], name: str) -> Iterator[str]:
    match _reach(claims, name):
        case str(text) if name in _SPACED:
            yield from text.split()
        case str(text):
            yield text
        case list(values):
            yield from (value for value in values if isinstance(value, str))


def _reach(claims: Mapping[str, Any], name: str) -> Any:
    """Find the claim *name*: the one that is called so, dots and all, before one within others."""
    if name in claims:
        return claims[name]
    for at, letter in enumerate(name):
        inner = claims.get(name[:at]) if letter == "." else None
        if isinstance(inner, dict) and (found := _reach(inner, name[at + 1 :])) is not None:
            return found
    return None
