"""`app.http.start.address`: where the page says that the service is."""

from typing import Any

import pytest
from fastapi import Request

from app.http.neuroglancer import PUBLIC_PAGE
from app.http.start.address import Address, address_of
from app.http.viewer import PAGE


def address(token: str | None = None, *, has_viewer: bool = True, **headers: str) -> Address:
    """Give the address of a request with *headers*."""
    scope: dict[str, Any] = {
        "type": "http",
        "method": "GET",
        "scheme": "http",
        "server": ("10.0.0.7", 8000),
        "path": "/",
        "query_string": b"",
        "headers": [
            (name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()
        ],
    }
    request = Request(scope if token is None else {**scope, "token": token})
    return address_of(request, has_viewer=has_viewer)


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({"host": "lab.example:8000"}, "http://lab.example:8000"),
        ({"host": "[::1]:80"}, "http://[::1]:80"),
        ({"host": "lab.example", "x_forwarded_proto": "https"}, "https://lab.example"),
        ({"host": "lab.example", "x_forwarded_proto": "javascript"}, "http://lab.example"),
        ({"host": 'x"><script>'}, "http://10.0.0.7:8000"),
        ({"host": "lab.example/path"}, "http://10.0.0.7:8000"),
        ({"host": "user@lab.example"}, "http://10.0.0.7:8000"),
        ({}, "http://10.0.0.7:8000"),
    ],
)
def test_base(headers: dict[str, Any], expected: str) -> None:
    """Snippets name the host as the browser does, if that is one."""
    assert address(**headers).base == expected


def test_a_token_stays_in_the_path() -> None:
    """What lies below a token is told below it; the viewer, which needs none, is not."""
    found = address("ab%2Fc", host="lab.example")

    assert found.base == "http://lab.example/~ab%2Fc"
    assert found.viewer == f"../{PAGE}"


@pytest.mark.parametrize(
    ("host", "proto", "expected"),
    [
        ("lab.example", "https", PUBLIC_PAGE),
        ("localhost:8000", "http", PUBLIC_PAGE),
        ("127.0.0.1:8000", "http", PUBLIC_PAGE),
        ("lab.example", "http", None),
        ("127.0.0.1.example", "http", None),
    ],
)
def test_without_a_viewer_of_our_own(host: str, proto: str, expected: str | None) -> None:
    """The public page may read from ``https``, and from the machine that it is shown on."""
    assert address(has_viewer=False, host=host, x_forwarded_proto=proto).viewer == expected
