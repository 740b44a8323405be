"""`app.http.credentials.door`: tokens in paths."""

import pytest

from app.http.credentials.door import split_token, without_token


@pytest.mark.parametrize(
    ("raw_path", "token", "rest"),
    [
        (b"/~abc/em/c/0", "abc", b"/em/c/0"),
        (b"/~abc/", "abc", b"/"),
        (b"/~abc", "abc", b""),
        (b"/~/em", "", b"/em"),
        (b"/~a%2Fb%3D/em/c%2F0", "a%2Fb%3D", b"/em/c%2F0"),
        (b"/%7Eabc/em", "abc", b"/em"),
        (b"/~abc//em", "abc", b"//em"),
    ],
)
def test_a_token_is_the_first_segment(raw_path: bytes, token: str, rest: bytes) -> None:
    """It begins with a tilde, as no dataset does; the rest stays as it was sent."""
    scope = without_token({"raw_path": raw_path, "path": ""})

    assert (scope["token"], scope["raw_path"]) == (token, rest)
    assert split_token(raw_path) == (raw_path.removesuffix(rest), rest)


@pytest.mark.parametrize("raw_path", [b"/em/c/0", b"/", b"/em/~abc/c"])
def test_no_token_is_nothing(raw_path: bytes) -> None:
    """What follows a dataset is a key."""
    assert split_token(raw_path) == (None, raw_path)


def test_what_is_not_ascii_is_taken_apart_as_well() -> None:
    """Some clients send what they should percent-encode."""
    scope = without_token({"raw_path": b"/~a/em/\xc3\xa9%20", "path": "/~a/em/\u00e9 "})

    assert (scope["raw_path"], scope["path"]) == (b"/em/\xc3\xa9%20", "/em/\u00e9 ")
