"""`shardgate.survey.key_part`: each key is of one part, which other programs can compute."""

import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardgate.errors import ConfigurationError
from shardgate.model import ObjectRef
from shardgate.survey.key_part import KeyPart


@given(st.text(), st.integers(1, 40))
def test_each_key_is_of_one_part(key: str, count: int) -> None:
    """Exactly one part holds a key, however many parts there are."""
    assert [KeyPart(k, count).holds(key) for k in range(count)].count(True) == 1


@pytest.mark.parametrize("key", ["a/c/0/1", "", "é b/c/7"])
def test_part_of_a_key_is_that_of_sha256sum(key: str) -> None:
    """The first 16 digits that `sha256sum` prints for a key tell its part."""
    told = subprocess.run(["sha256sum"], input=key.encode(), capture_output=True, check=True)

    assert KeyPart(int(told.stdout[:16], 16) % 1000, 1000).holds(key)


def test_object_is_named_below_the_root() -> None:
    """The key of an object below the root has no root; that of another one is its URL."""
    root = ObjectRef("s3://bucket", "em.zarr")
    names = {"a/c/0": ObjectRef("s3://bucket", "em.zarr/a/c/0")}
    names["s3://other/x.nc"] = ObjectRef("s3://other", "x.nc")

    for key, ref in names.items():
        parts = [KeyPart(k, 1000) for k in range(1000)]
        assert [p for p in parts if p.holds_object(root, ref)] == [p for p in parts if p.holds(key)]


@given(st.integers(0, 10**6), st.integers(0, 10**6))
def test_part_is_parsed_from_its_numbers(number: int, count: int) -> None:
    """``K/N`` is the part K of N, and refused unless 0 <= K < N < 10**6."""
    if number < count < 10**6:
        assert KeyPart.parse(f"{number}/{count}") == KeyPart(number, count)
    else:
        with pytest.raises(ConfigurationError, match=f"--part {number}/{count}: expected K/N"):
            KeyPart.parse(f"{number}/{count}")


@given(st.text() | st.from_regex("[-+]?[0-9 _]*/[-+]?[0-9٣ _]*"))
def test_part_has_one_spelling(text: str) -> None:
    """Text that is parsed is the spelling of the part; all else is refused."""
    try:
        part = KeyPart.parse(text)
    except ConfigurationError:
        return
    assert text == str(part)
