"""How a commit is known again by who asked for it."""

import pytest

from app.errors import BadBodyError
from app.formats.icechunk.repo_writer import WriteId, check_metadata, marked


def test_a_snapshot_tells_who_asked_for_it() -> None:
    """Beside what people tell, and as the library tells of rebases."""
    told = marked({"who": "me"}, WriteId("key-1", "f"), 2)

    assert told == {
        "who": "me",
        "__icechunk": {"rebase_attempts": 2},
        "__shardgate": {"write_id": "key-1", "request": "f"},
    }
    assert marked({}, WriteId("s"), 0) == {"__shardgate": {"write_id": "s"}}


@pytest.mark.parametrize("name", ["__icechunk", "__shardgate"])
def test_some_names_are_for_nobody(name: str) -> None:
    """They would be taken for what they are not."""
    with pytest.raises(BadBodyError, match=name):
        check_metadata({name: 1})
