"""What the version before has stored or handed out is read, and what a later one has is refused.

The bytes of the version before were recorded. A change of any of them needs a new format, and
this version of it here.
"""

import hmac
import json
from collections.abc import Awaitable, Callable, Mapping
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, NamedTuple

import jwt
import pytest
import zstandard
from pydantic import SecretStr

from shardgate.auth.access import Datasets
from shardgate.auth.logins import LOGIN_COOKIE, LoginTokens
from shardgate.auth.token_records import TokenRecords
from shardgate.auth.tokens import TokenMint
from shardgate.errors import (
    ConfigurationError,
    DamagedError,
    TokenRecordsError,
    UnauthenticatedError,
)
from shardgate.formats.documents import Json, etag_of_rewritten
from shardgate.formats.icechunk.manifest import InlineChunk, Native
from shardgate.formats.neuroglancer_precomputed.metadata import Info, parse_info
from shardgate.formats.reading import DecodeError
from shardgate.formats.zarr.metadata import Node, parse_node
from shardgate.icechunk.sessions.document import (
    ChangedNode,
    Sealed,
    SessionDocument,
    decode_session,
)
from shardgate.icechunk.sessions.entries import Fragment, Fragmented, JournalEntry, decode_entry
from shardgate.model import ByteRange, ETag, ObjectRef, VirtualKey
from shardgate.settings import IssuerSettings, LoginSettings, Settings, TokenSettings
from shardgate.signing_in import KeptToken, TokenFile
from shardgate.storage.contract import UPLOADS
from shardgate.storage.memory import MemoryStore
from shardgate.storage.swapping import parse_ids
from shardgate.web.login import BegunLogin, ForPages
from shardgate.write.uploads import Upload, Uploads
from tests.support.resolving import ROOT
from tests.support.write.writers import replica

NOW: Final = 1_000_000.0
TOKENS: Final = TokenSettings(secret=SecretStr("a secret that all replicas share"))
RECORDS: Final = ObjectRef("memory://tokens", "")
UPLOAD_ID: Final = "6553f100" + 24 * "0"
FILE_TOKEN: Final = KeptToken("a.b.c", "9999-01-01T00:00:00+00:00")
SESSION: Final = (
    b'{"branch":"main","parent_id":"1CECHNKREP0F1RSTCMT0","inline_nbytes":512,'
    b'"created_at_s":1000000.0,"expires_at_s":1086400.0,"state":{"key":"k","name":"sealed"},'
    b'"attempt":1,"nodes":{"a":["MTIzNDU2Nzg=","e30="],"b":null},"format":1}'
)
RECORD: Final = (
    b'{"token_id":"one","datasets":["em"],"expires_at":"1970-01-12T13:47:40Z",'
    b'"made_at":"1970-01-12T13:46:40Z"}'
)
LINK: Final = (
    b"eyJhbGciOiJIUzI1NiIsInR5cCI6InNoYXJkZ2F0ZStqd3QifQ.eyJpc3MiOiJzaGFyZGdhdGUiLCJzdWIiOiJhZGEi"
    b"LCJqdGkiOiJYM3ZudlFVS1ZKbGMiLCJkYXRhc2V0cyI6WyJlbSJdLCJleHAiOjEwMDAwNjB9.0Q-LvQR0nc8yGzRUPM"
    b"rWNNGiwxzU0jdTfk7OFGEsWt0"
)
VIEWER: Final = (
    b"eyJhbGciOiJIUzI1NiIsInR5cCI6InNoYXJkZ2F0ZS12aWV3ZXIrand0In0.eyJpc3MiOiJzaGFyZGdhdGUiLCJzdWIi"
    b"OiJsYWI6YWRhIiwicnVsZXMiOlsibGFiOmVtIl0sInNpZCI6ImEiLCJleHAiOjEwMDAwNjAsImF1ZCI6Imh0dHBzOi8v"
    b"YS5leGFtcGxlIHNoYXJkZ2F0ZSJ9.niq7B3VvHUCI0no2vI3VTgXehYw68G9ttELZLenAqA8"
)
COOKIE: Final = (
    b"eyJhbGciOiJIUzI1NiIsInR5cCI6InNoYXJkZ2F0ZS1zZXNzaW9uK2p3dCJ9.eyJpc3MiOiJzaGFyZGdhdGUiLCJzdWIi"
    b"OiJsYWI6YWRhIiwicnVsZXMiOlsibGFiOmVtIl0sInNpZCI6ImEiLCJleHAiOjEwMDAwNjAsImF1ZCI6Imh0dHBzOi8v"
    b"YS5leGFtcGxlIHNoYXJkZ2F0ZSJ9.wzD6EjKsGO1EqedybaSjpqDAp8Rwg9yZagnnygpZu1s"
)
ATTEMPT: Final = (
    b"eyJhbGciOiJIUzI1NiIsInR5cCI6InNoYXJkZ2F0ZS1hdHRlbXB0K2p3dCJ9.eyJpc3MiOiJzaGFyZGdhdGUiLCJmb3I"
    b"iOiJzaGFyZGdhdGUtc2Vzc2lvbiIsInByb21wdCI6IiIsInBhZ2UiOiIvZW0vIiwic3RhdGUiOiJzIiwibm9uY2UiOiJ"
    b"uIiwidmVyaWZpZXIiOiJ2IiwiZXhwIjoxMDAwNjAwLCJhdWQiOiJodHRwczovL2EuZXhhbXBsZSBzaGFyZGdhdGUifQ."
    b"vt-Ag2eoLu_k4yU1rb3XD57u1jP4_Pb_CQoruoAcgUA"
)


def later(document: bytes) -> bytes:
    """Return the JSON *document* as a later version might have it, with a member more."""
    return json.dumps({**json.loads(document), "format": 2, "more": [1]}).encode()


def later_token(kind: str, token: bytes) -> bytes:
    """Return *token* as a later version might sign it, with a claim less, by the same key."""
    key = hmac.digest(TOKENS.secret.get_secret_value().encode(), purpose(kind), "sha256")
    claims = jwt.decode(token, options={"verify_signature": False})
    claims = {name: value for name, value in claims.items() if name not in {"datasets", "rules"}}
    return jwt.encode(claims, key, "HS256", {"typ": f"{kind}+jwt", "format": 2}).encode()


def purpose(kind: str) -> bytes:
    """Return what a key of tokens is for."""
    return f"shardgate: key of tokens: {kind}".encode()


def records(store: MemoryStore) -> TokenRecords:
    """Return the records of tokens in *store*."""
    return TokenRecords(store, RECORDS, lambda: NOW, lambda: NOW)


def logins() -> LoginTokens:
    """Return the tokens of people who sign in at an issuer."""
    settings = Settings(
        issuers={"lab": IssuerSettings(url="https://a.example", audience="x")},
        login=LoginSettings(issuer="lab", client_id="shardgate"),
        tokens=TOKENS,
    )
    return LoginTokens(settings, Datasets({}), records(MemoryStore()), lambda: NOW)


async def read_session(data: bytes) -> object:
    """Read the document of a session."""
    return decode_session(zstandard.compress(data), 2**20)


async def read_entry(data: bytes) -> object:
    """Read an entry of a journal."""
    return decode_entry(data)


async def read_record(data: bytes) -> object:
    """List a token by its record."""
    store = MemoryStore()
    folder = f"made/{sha256(b'ada').hexdigest()}"
    store.place(ObjectRef(RECORDS.bucket, f"{folder}/000001000060-one"), data)
    [record] = (await records(store).list("ada")).tokens
    return record.datasets


async def read_link(data: bytes) -> object:
    """Identify the bearer of a link."""
    mint = TokenMint(TOKENS, Datasets({}), records(MemoryStore()), lambda: NOW)
    found = await mint.identify(data.decode())
    return found and found.caller.grants


async def read_viewer(data: bytes) -> object:
    """Identify the bearer of the token of a viewer."""
    found = await logins().identify(data.decode())
    return found and found.caller.name


async def read_cookie(data: bytes) -> object:
    """Find the login of a cookie."""
    found = await logins().login(data.decode())
    return found and found.login_id


async def read_attempt(data: bytes) -> object:
    """Find the purpose of a sign-in that was begun."""
    claims = await logins().verify("shardgate-attempt", data.decode())
    return claims and BegunLogin.of(claims).purpose


async def read_upload(data: bytes) -> object:
    """Upload a part."""
    store = MemoryStore()
    store.place(ROOT.join(f"{UPLOADS}{UPLOAD_ID}.upload"), data)
    own = replica(store)
    uploads = Uploads(store, own.writer, lambda *place: _routed(place), max_nbytes=100)
    upload = Upload(own.reading.dataset, VirtualKey("notes/long"), UPLOAD_ID)
    return await uploads.put_part(upload, 1, b"ab")


async def _routed(place: Any) -> Any:
    return place


async def read_file(data: bytes) -> object:
    """Read the file of `shardgate login`, and keep another token there."""
    return _read_file(data)


def _read_file(data: bytes) -> object:
    with TemporaryDirectory() as folder:
        path = Path(folder, "tokens.json")
        path.write_bytes(data)
        file = TokenFile(path)
        found = file.get("https://a")
        try:
            file.put("https://b", FILE_TOKEN)
        except ConfigurationError:
            assert path.read_bytes() == data
            raise
        assert file.get("https://a") == found
        return found


class Kind(NamedTuple):
    """A kind of what is stored or handed out."""

    before: bytes
    read: Callable[[bytes], Awaitable[object]]
    value: object
    """What is read of *before*."""
    later: bytes
    error: type[Exception] | None
    """Names the format of what is *later*; `None` if that is taken for what has ended."""


UPLOADED: Final = b'{"key":"notes/long","coding":"","content_type":"","metadata":[]}'
KEPT: Final = json.dumps({"https://a": FILE_TOKEN._asdict()}).encode()
READ_SESSION: Final = SessionDocument(
    *("main", "1CECHNKREP0F1RSTCMT0", 512, NOW, NOW + 86_400, Sealed("k"), 1),
    {"a": ChangedNode(b"12345678", b"{}"), "b": None},
)
KINDS: Final[Mapping[str, Kind]] = {
    "session": Kind(SESSION, read_session, READ_SESSION, later(SESSION), DecodeError),
    "record": Kind(RECORD, read_record, ["em"], later(RECORD), TokenRecordsError),
    "link": Kind(
        LINK,
        read_link,
        frozenset({"public", "~", "~em"}),
        later_token("shardgate", LINK),
        UnauthenticatedError,
    ),
    "viewer": Kind(
        VIEWER,
        read_viewer,
        "lab:ada",
        later_token("shardgate-viewer", VIEWER),
        UnauthenticatedError,
    ),
    "cookie": Kind(COOKIE, read_cookie, "a", later_token(LOGIN_COOKIE, COOKIE), None),
    "attempt": Kind(
        ATTEMPT, read_attempt, ForPages("/em/"), later_token("shardgate-attempt", ATTEMPT), None
    ),
    "upload": Kind(
        UPLOADED, read_upload, '"187ef4436122d1cc2f40dc2b92f0eba0"', later(UPLOADED), DamagedError
    ),
    "file": Kind(KEPT, read_file, FILE_TOKEN, later(KEPT), ConfigurationError),
}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
async def test_bytes_of_the_version_before_are_read(kind: Kind) -> None:
    """Bytes that the version before has stored or signed have the same meaning here."""
    assert await kind.read(kind.before) == kind.value


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
async def test_bytes_of_a_later_version_are_refused(kind: Kind) -> None:
    """Bytes of a later version raise an error that names their format, or are as if ended."""
    if kind.error is None:
        assert await kind.read(kind.later) is None
    else:
        with pytest.raises(kind.error, match="format 2, written by a later version"):
            await kind.read(kind.later)


@pytest.mark.parametrize(
    ("before", "entry"),
    [
        (b"-", None),
        (b"iab", InlineChunk(b"ab")),
        (
            b"n123456789012\1\0\0\0\0\0\0\0\t\0\0\0\0\0\0\0",
            Native(b"123456789012", ByteRange(1, 9)),
        ),
        (
            b"f123456789012abcdefghijkl\2\0\0\0\0\0\0\0\b\0\0\0\0\0\0\0\1",
            Fragmented(
                b"123456789012",
                (Fragment(b"abcdefghijkl", ByteRange(2, 8), is_chunk_file=True),),
            ),
        ),
    ],
)
def test_journal_entry_of_the_version_before_is_read(before: bytes, entry: JournalEntry) -> None:
    """Each kind of entry that the version before has stored has the same meaning here."""
    assert decode_entry(before) == entry


def test_journal_entry_of_a_later_kind_is_refused() -> None:
    """An entry that begins with an unknown kind raises DecodeError with the kind."""
    with pytest.raises(DecodeError, match=r"begins with b'z' is damaged, or of a kind"):
        decode_entry(b"z123456789012")


def test_write_ids_beside_unknown_words_are_read() -> None:
    """Ids of writes of the version before are found among words of a later one."""
    assert parse_ids("0123456789abcdef v2:x fedcba9876543210") == (
        "0123456789abcdef",
        "fedcba9876543210",
    )


async def test_record_with_a_later_name_is_kept() -> None:
    """A record whose name has another form is neither read nor removed."""
    store = MemoryStore()
    name = ObjectRef(RECORDS.bucket, "ended/v2-000001000060-one")
    store.place(name, b"{}")
    await records(store).refresh()

    assert await store.get(name) is not None


SHARDING: Final = (
    '[{"name": "sharding_indexed", "configuration": {"chunk_shape": [2, 3], "codecs": '
    '[{"name": "bytes"}], "index_codecs": [{"name": "bytes", "configuration": '
    '{"endian": "little"}}, {"name": "crc32c"}]}}]'
)
ARRAY: Final = (
    '{"zarr_format": 3, "node_type": "array", "shape": [8, 6], "data_type": "uint8", '
    '"chunk_grid": {"name": "regular", "configuration": {"chunk_shape": %s}}, '
    '"chunk_key_encoding": {"name": "default"}, "fill_value": 0, "codecs": %s}'
)
VOLUME: Final = (
    '{"@type": "neuroglancer_multiscale_volume", "type": "image", "data_type": "uint8", '
    '"num_channels": 1, "scales": [{"key": "1", "size": [64, 64, 64], "chunk_sizes": '
    '[[32, 32, 32]], "resolution": [1, 1, 1], "encoding": "raw"%s}]}'
)
SPEC: Final = (
    ', "sharding": {"@type": "neuroglancer_uint64_sharded_v1", "preshift_bits": 1, '
    '"hash": "identity", "minishard_bits": 1, "shard_bits": 1}'
)


@pytest.mark.parametrize(
    ("parse", "stored", "served"),
    [
        (parse_node, ARRAY % ("[4, 6]", SHARDING), ARRAY % ("[2, 3]", '[{"name": "bytes"}]')),
        (parse_info, VOLUME % SPEC, VOLUME % ""),
    ],
)
def test_rewritten_metadata_have_the_form_that_their_etag_says(
    parse: Callable[[Json, bytes], Node | Info | None], stored: str, served: str
) -> None:
    """Metadata are rewritten as in the version before, whose ETags these have, byte by byte."""
    found = parse(json.loads(stored), stored.encode())

    assert etag_of_rewritten(ETag('"abc"')) == '"abc-u1"'
    assert found is not None
    assert found.served == served.encode()
