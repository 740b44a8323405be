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


@pytest.mark.parametrize("name", ["discovery_url", "jwks_url"])
@pytest.mark.parametrize(
    ("url", "is_inner"),
    [
        ("https://login.example/policy/.well-known/openid-configuration?p=b2c_1", True),
        ("http://keycloak:8080/realms/lab", True),
        ("http://keycloak.auth.svc.cluster.local", True),
        ("http://127.0.0.1:8080", True),
        ("http://login.example", False),
        ("http://169.254.169.254", False),
        ("http://2852039166", False),
        ("http://0xa9fea9fe", False),
        ("http://keycloak@login.example", False),
        ("http://a.svc.example", False),
        ("keycloak:8080", False),
    ],
)
def test_inner_url_of_an_issuer_may_be_plain(name: str, url: str, *, is_inner: bool) -> None:
    """What only the service asks of an issuer is encrypted, on this machine, or at a host name that
    has no domain, or is that of a service in Kubernetes.
    """
    table = {"url": "https://login.example", "audience": "a", name: url}
    try:
        Settings.model_validate({"issuers": {"lab": table}})
    except ValidationError:
        assert not is_inner
    else:
        assert is_inner
