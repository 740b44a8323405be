"""`app.http.cors`: who may read answers."""

from app.http.cors import Cors

ORIGIN = b"access-control-allow-origin"


def test_star_allows_all() -> None:
    """With a star the answer is the same for every page, so caches may share it."""
    cors = Cors(["*"])

    assert cors.headers(b"https://a.example") == cors.headers(None)
    assert dict(cors.headers(None))[ORIGIN] == b"*"


def test_listed_origin_is_echoed() -> None:
    """A listed origin is allowed by name, and caches are told that answers differ."""
    headers = dict(Cors(["https://a.example"]).headers(b"https://a.example"))

    assert headers[ORIGIN] == b"https://a.example"
    assert headers[b"vary"] == b"Origin"


def test_other_origins_are_not_allowed() -> None:
    """A page of another origin gets no leave to read."""
    headers = dict(Cors(["https://a.example"]).headers(b"https://b.example"))

    assert headers == {b"vary": b"Origin"}


def test_what_scripts_need_is_exposed() -> None:
    """Scripts may read the headers they work with."""
    exposed = dict(Cors(["*"]).headers(None))[b"access-control-expose-headers"].decode()

    assert {"ETag", "Content-Range", "Content-Length", "Content-Encoding"} <= set(
        exposed.split(", ")
    )


def test_preflight_allows_what_clients_send() -> None:
    """Each header for which browsers ask first is allowed."""
    allowed = dict(Cors(["*"]).preflight(b"GET"))[b"access-control-allow-headers"].decode()

    assert {"Range", "If-Match", "If-None-Match", "Authorization", "Cache-Control"} <= set(
        allowed.split(", ")
    )
