"""Who asks, as far as rules tell callers apart."""

from dataclasses import dataclass
from typing import Final

from app.setting_fields import PUBLIC


@dataclass(frozen=True, slots=True)
class Caller:
    """Somebody whose credentials are good."""

    name: str
    """How logs call them."""
    grants: frozenset[str]
    """The rules that they keep: `public`, the name of a caller, `ISSUER:VALUE`."""


NOBODY: Final = Caller("", frozenset({PUBLIC}))
"""Who shows no credentials."""
