"""Virtual keys: a ref, then a path in the Zarr hierarchy of its snapshot."""

import re
from typing import Final, NamedTuple
from urllib.parse import unquote

from shardgate.formats.icechunk.ids import decode_id
from shardgate.model import NAMED_REFS, SHARDED, VirtualKey, escape_ref

SESSION: Final = "@session."
DOCUMENT: Final = "zarr.json"
_REF: Final = re.compile(r"(?:^|/)(?=@branch\.|@tag\.|@session\.|@[0-9A-HJKMNP-TV-Z]{20}(?:/|$))")


class Branch(NamedTuple):
    """A branch: commits move it to other snapshots."""

    name: str


class Tag(NamedTuple):
    """A tag: it may be deleted, but never moves to another snapshot."""

    name: str


class SnapshotId(NamedTuple):
    """The id of a snapshot, as its file is named."""

    text: str


type Ref = Branch | Tag | SnapshotId

MAIN: Final = Branch("main")


def find_ref(key: VirtualKey) -> int | None:
    """Return the position of the first segment that names a ref; `None` if none does."""
    found = _REF.search(key)
    return None if found is None else found.end()


def session_prefix(key: str) -> str | None:
    """Return *key* up to and with the session, if that is the first ref that it names."""
    start = find_ref(VirtualKey(key)) if SESSION in key else None
    if start is None or not key.startswith(SESSION, start):
        return None
    return key[:start] + key[start:].partition("/")[0]


def sharded_key(key: str) -> str:
    """Return the key that names *key*, in a ref or not, as it is stored."""
    lead = ""
    if (start := find_ref(VirtualKey(key))) is not None:
        lead = key[:start] + key[start:].partition("/")[0] + "/"
    rest = key[len(lead) :]
    is_sharded = key.startswith(SHARDED) or rest.startswith(SHARDED)
    return key if is_sharded else f"{lead}{SHARDED}{rest}"


def split_ref(key: VirtualKey) -> tuple[Ref | None, str]:
    """Split ``@ref/path``; the ref is `MAIN` where *key* has none, and `None` for a session."""
    head, _, path = key.partition("/")
    branch, tag = NAMED_REFS
    if head.startswith(branch):
        return Branch(unquote(head.removeprefix(branch))), path
    if head.startswith(tag):
        return Tag(unquote(head.removeprefix(tag))), path
    if head.startswith(SESSION):
        return None, path
    if head.startswith("@") and decode_id(head[1:]) is not None:
        return SnapshotId(head[1:]), path
    return MAIN, key


def decoded_twice(ref: Ref) -> Ref | None:
    """Decode a name once more, as some S3 clients encode it twice; `None` if it is unchanged."""
    if isinstance(ref, SnapshotId) or (name := unquote(ref.name)) == ref.name:
        return None
    return ref._replace(name=name)


def spell_ref(ref: Ref) -> str:
    """Return *ref* as the first segment of keys."""
    match ref:
        case Branch(name):
            return f"@branch.{escape_ref(name)}"
        case Tag(name):
            return f"@tag.{escape_ref(name)}"
        case SnapshotId(text):
            return f"@{text}"


def parse_ref(spelled: str) -> list[tuple[Ref, str]]:
    """Return the refs that *spelled* may mean, in the order to try them, with their key segments.
    They are spelled as in keys; without ``@`` it is a branch or else the id of a snapshot.
    """
    refs: list[Ref] = []
    if not spelled.startswith("@"):
        refs = [Branch(spelled)]
        refs += [] if decode_id(spelled) is None else [SnapshotId(spelled)]
    else:
        ref, rest = split_ref(VirtualKey(spelled.replace("/", "%2F")))
        refs = [] if ref is None or rest else [ref]
    return [(ref, spell_ref(ref)) for ref in refs]
