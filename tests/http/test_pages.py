"""`app.http.pages`: lists of links."""

import re
from urllib.parse import unquote, urljoin

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.formats.listing import Name
from app.http.pages import MOST_LINKS, content_type, listing_page
from app.http.target import split_target

NAMES = st.text(st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="/"), min_size=1)


@given(NAMES.filter(lambda name: name not in {".", ".."}), st.booleans())
def test_every_link_leads_to_its_name(name: str, is_prefix: bool) -> None:  # noqa: FBT001
    """Whatever a name has in it, the link resolves to it, and nothing of it becomes markup."""
    slash = "/" * is_prefix
    listed = Name(f"{name}{slash}", None if is_prefix else 3)
    page = listing_page("/em/", [listed]).decode()
    (link,) = re.findall(r'<a href="([^"]*)">', page)

    assert unquote(urljoin("http://host/em/", link)) == f"http://host/em/{name}{slash}"
    assert page.count("<") == 17


@pytest.mark.parametrize("name", ["@branch.a%2Fb", "@tag.100%25", '@tag.é "<%0A', "@branch."])
def test_a_ref_keeps_what_is_encoded_in_it(name: str) -> None:
    """A link to a ref leads to the key that it has in the listing."""
    page = listing_page("/em/", [Name(f"{name}/")]).decode()
    (link,) = re.findall(r'<a href="([^"]*)">', page)
    path = urljoin("http://host/em/", link).removeprefix("http://host")

    assert split_target(path.encode()) == ("em", f"{name}/")
    assert page.count("<") == 17


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("a/zarr.json", b"application/json"),
        ("a/.zattrs", b"application/json"),
        ("c/0/0", b"application/octet-stream"),
        ("page.html", b"application/octet-stream"),
        ("picture.svg", b"application/octet-stream"),
        ("info", b"application/json"),
        ("vol/mesh/info", b"application/json"),
        ("vol/information", b"application/octet-stream"),
        ("a.json/7", b"application/octet-stream"),
        ("notes.txt", b"text/plain; charset=utf-8"),
    ],
)
def test_content_type(key: str, expected: bytes) -> None:
    """Metadata is JSON, and nothing is offered for a browser to run."""
    assert content_type(key) == expected


def test_a_page_has_an_end() -> None:
    """Who wants more names than it has room for is told where they are."""
    page = listing_page("/em/c/", [Name(str(n)) for n in range(MOST_LINKS + 1)])

    assert page.count(b"<a href") == MOST_LINKS
    assert b"list-type=2" in page
    assert b"list-type=2" not in listing_page("/em/c/", [Name("0")])
