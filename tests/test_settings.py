"""`shardgate.settings`: the settings as a value."""

import pytest
from pydantic import ValidationError

from shardgate.configuration import load
from shardgate.settings import Settings


def test_repr_hides_secrets() -> None:
    """The repr, str and JSON of settings contain no secret."""
    settings = load(
        None,
        {
            "SHARDGATE_STORES__LAB__ACCESS_KEY_ID": "me",
            "SHARDGATE_STORES__LAB__SECRET_ACCESS_KEY": "hunter2",
            "SHARDGATE_STORES__LAB__SESSION_TOKEN": "hunter2",
        },
    )

    assert "hunter2" not in f"{settings!r} {settings} {settings.model_dump_json()}"


def test_settings_are_frozen() -> None:
    """Assigning a setting raises ValidationError."""
    with pytest.raises(ValidationError, match="frozen"):
        Settings().server.port = 1  # type: ignore[misc]  # what is tested
