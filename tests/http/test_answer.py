"""`app.http.answer`: the headers of a request."""

from hypothesis import given
from hypothesis import strategies as st

from app.http.answer import Headers, combined

MANY = 10_000


class Name(bytes):
    """A name that counts how often it is compared."""

    compared = 0
    __hash__ = bytes.__hash__

    def __eq__(self, other: object) -> bool:
        """Compare."""
        Name.compared += 1
        return super().__eq__(other)


@given(st.lists(st.tuples(st.sampled_from([b"a", b"b", b"c"]), st.binary())))
def test_a_header_that_is_repeated_is_a_list(headers: Headers) -> None:
    """Its values keep their order (RFC 9110 §5.3)."""
    assert combined(headers) == {
        name: b", ".join(value for each, value in headers if each == name) for name, _ in headers
    }


def test_many_headers_are_combined_in_one_go() -> None:
    """As many as fit into a head that is refused, one of which is repeated."""
    headers: Headers = [(Name(b"%x" % number), b"") for number in range(MANY)]
    combined([*headers, (Name(b"0"), b"")])

    assert Name.compared < 10 * MANY
