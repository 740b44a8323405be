"""`app.http.checksums`: a body that was damaged on the way is not stored."""

import pytest

from app.errors import DigestError
from app.http.checksums import check

BODY = b"123456789"
TOLD = {  # of the catalogue of CRCs, and of OpenSSL
    b"content-md5": b"JfnnlDI7RTiF9RgfG2JNCw==",
    b"x-amz-checksum-crc32": b"y/Q5Jg==",
    b"x-amz-checksum-crc32c": b"4waSgw==",
    b"x-amz-checksum-sha1": b"98O8HYCOBHMq32eZZczDTKeuNEE=",
    b"x-amz-checksum-sha256": b"FeKw08M4keuw8e9gnsQZQgwg4yDOlMZfvIwzEkSOsiU=",
    b"x-amz-content-sha256": b"15e2b0d3c33891ebb0f1ef609ec419420c20e320ce94c65fbc8c3312448eb225",
}


@pytest.mark.parametrize("name", TOLD)
def test_what_is_told_is_checked(name: bytes) -> None:
    """The right checksum passes, and no other body under it."""
    told = {name: TOLD[name]}
    check(BODY, BODY, told)

    with pytest.raises(DigestError, match=name.decode()):
        check(BODY + b"0", BODY + b"0", told)


@pytest.mark.parametrize("value", [b"", b"y/Q5Jg", b"cbf43926", b"y/Q5Jg== x"])
def test_only_the_one_spelling_is_right(value: bytes) -> None:
    """Base64 with its padding."""
    with pytest.raises(DigestError):
        check(BODY, BODY, {b"x-amz-checksum-crc32": value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (b"x-amz-checksum-crc64nvme", b"AAAAAAAAAAA="),
        (b"x-amz-checksum-of-the-future", b"x"),
        (b"x-amz-content-sha256", b"UNSIGNED-PAYLOAD"),
        (b"x-amz-content-sha256", b"STREAMING-UNSIGNED-PAYLOAD-TRAILER"),
    ],
)
def test_what_cannot_be_checked_is_not(name: bytes, value: bytes) -> None:
    """Nor what is no checksum."""
    check(BODY, BODY, {name: value})


def test_signatures_are_of_what_was_sent() -> None:
    """The digest that is signed sums up the body with its frames, all others what is in them."""
    signed, md5 = b"x-amz-content-sha256", b"content-md5"

    check(BODY, b"x", {signed: TOLD[signed]})
    check(b"x", BODY, {md5: TOLD[md5]})
