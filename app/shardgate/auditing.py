"""What a request changes, noted where it is known; the audit log writes it once it is answered."""

from contextvars import ContextVar
from typing import Any, Final

type AuditedChange = dict[str, Any]
"""Members of a line of the audit log: ``key``, ``before``, ``after``, and others."""

current_changes: Final = ContextVar[list[AuditedChange] | None]("current_changes", default=None)
"""Changes that this task, and the tasks it starts, make for a request; `None` if none is logged."""


def new_change(**members: object) -> AuditedChange | None:
    """Begin another change of the request, a line of its own; `None` if it is not logged."""
    if (changes := current_changes.get()) is None:
        return None
    changes.append(members)
    return members


def note(**members: object) -> None:
    """Add *members* to the last change of the request."""
    if (changes := current_changes.get()) is not None:
        if not changes:
            changes.append({})
        changes[-1] |= members
