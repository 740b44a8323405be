"""Every decoder of bytes from outside returns a value or raises the error that it documents."""

import ast
import gzip
import json
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, NamedTuple

import msgpack
import numpy as np
import pytest
import zstandard
from flatbuffers import flexbuffers
from hypothesis import given
from hypothesis import strategies as st

import shardgate
from shardgate.api.commit_body import parse_commit, parse_commit_lines
from shardgate.auth.oidc import decode_jwks
from shardgate.errors import RequestError
from shardgate.formats.compression import inflate, inflate_to_array, inflated_nbytes
from shardgate.formats.documents import parse_json
from shardgate.formats.icechunk.apply import read_document, read_grid
from shardgate.formats.icechunk.config import read_config, read_yaml_config
from shardgate.formats.icechunk.flatbuffers import HEADER_NBYTES
from shardgate.formats.icechunk.flexbuffers import decode_flexbuffer
from shardgate.formats.icechunk.ids import decode_id
from shardgate.formats.icechunk.manifest import InlineChunk, ManifestDecoder, Native
from shardgate.formats.icechunk.manifest_writer import copy_payloads
from shardgate.formats.icechunk.metadata_items import decode_messagepack
from shardgate.formats.icechunk.repo_info import RepoInfoDecoder
from shardgate.formats.icechunk.repo_writer import RefUpdate, rewrite_repo
from shardgate.formats.icechunk.repository_files import read_ref_file
from shardgate.formats.icechunk.snapshot import (
    SnapshotDecoder,
    SnapshotHeaderDecoder,
    StoredSnapshotDecoder,
)
from shardgate.formats.icechunk.transaction_log import TransactionLogDecoder
from shardgate.formats.kerchunk.json_set import decode_json_set
from shardgate.formats.kerchunk.parquet_set import decode_catalog, decode_table
from shardgate.formats.neuroglancer_precomputed.index import (
    decode_manifest,
    decode_minishard,
    decode_shard_index,
)
from shardgate.formats.reading import DecodeError
from shardgate.formats.zarr.metadata import parse_sent
from shardgate.formats.zip.directory import EndRecord, decode_directory, decode_tail, parse_end
from shardgate.formats.zip.layout import decode_local_header
from shardgate.gateway.s3_dialect import parse_deletion
from shardgate.gateway.s3_multipart import parse_parts
from shardgate.icechunk.sessions.document import (
    ChangedNode,
    SessionDocument,
    decode_session,
    encode_session,
    read_chunks,
)
from shardgate.icechunk.sessions.entries import Fragment, Fragmented, decode_entry, encode_entry
from shardgate.model import ByteRange
from shardgate.server.body import decode_aws_chunked
from shardgate.storage.http_headers import parse_content_range, parse_unsatisfied
from shardgate.storage.refusals import parse_document
from tests.support import repositories
from tests.support.attacks.mutating import Change, at_random, changes
from tests.support.formats.kerchunk import thrift
from tests.support.formats.neuroglancer_precomputed.shards import encode_minishard
from tests.support.formats.zarr.building import array_metadata, sharding
from tests.support.formats.zip.archives import Entry, archive
from tests.support.payloads import references
from tests.support.processor import processor_time_below
from tests.support.sessions import GROUP, array_document

MOST: Final = 2**20
MOST_S: Final = 2
CHUNK: Final = {"coords": [0], "chunk_id": "0" * 20, "length": 4}
COMMIT: Final = {
    "branch": "main",
    "message": "x",
    "metadata": {"a": [1, None]},
    "changes": [
        {"op": "put_node", "path": "/a", "metadata": array_document((6,), (2,))},
        {"op": "put_chunks", "path": "/a", "chunks": [CHUNK]},
        {"op": "delete_chunks", "path": "/a", "coords": [[1]]},
        {"op": "delete_node", "path": "/b"},
    ],
}
SESSION: Final = SessionDocument(
    branch="main",
    parent_id="1CECHNKREP0F1RSTCMT0",
    inline_nbytes=512,
    created_at_s=1.0,
    expires_at_s=2.0,
    nodes={"a": ChangedNode(bytes(8), GROUP), "b": None},
)
FRAMED: Final = b"4;chunk-signature=" + b"a" * 64 + b"\r\nabcd\r\n0;chunk-signature="
JWK: Final = {"kty": "RSA", "kid": "a", "use": "sig", "alg": "RS256", "n": "AQAB" * 90, "e": "AQAB"}


class Decoder(NamedTuple):
    """A function of bytes and *more*, examples of valid input, and its documented errors."""

    function: Callable[..., Any]
    valid: Sequence[bytes]
    errors: tuple[type[Exception], ...] = ()
    more: tuple[Any, ...] = ()

    def decode(self, data: bytes) -> None:
        """Decode *data*, ignoring documented errors."""
        with suppress(*self.errors):
            self.function(data, *self.more)


def text(document: Any) -> bytes:
    """Encode *document* as JSON."""
    return json.dumps(document).encode()


PART: Final = b"<Part><PartNumber>1</PartNumber><ETag>%b</ETag></Part>" % (b"0" * 32)
PARTS: Final = b"<CompleteMultipartUpload>%b</CompleteMultipartUpload>" % PART
ARRAY: Final = text(array_metadata([8, 8], [4, 4], [sharding([2, 2])]))
GZIPPED: Final = gzip.compress(b"bytes" * 100, mtime=0)
MESH_MANIFEST: Final = bytes(24) + struct.pack("<I16xI12xI", 1, 1, 5)
"""Of one level of detail with one fragment of 5 bytes."""
CONFIG: Final = flexbuffers.Dumps(
    {"inline_chunk_threshold_bytes": 5, "compression": {"level": 3}, "manifest": None}
)
ENTRIES: Final = (
    None,
    InlineChunk(b"abc"),
    Native(bytes(12), ByteRange(0, 4)),
    Fragmented(bytes(12), (Fragment(bytes(12), ByteRange(0, 4), is_chunk_file=False),) * 2),
)
DELETE: Final = b"<Delete><Object><Key>a</Key></Object></Delete>"


ZARRAY: Final = {"zarr_format": 2, "shape": [4], "chunks": [2], "dtype": "<i4"}
REFERENCES: Final = {
    "version": 1,
    "templates": {"u": "s3://b/x", "f": "{{c}}"},
    "gen": [{"key": "k{{i}}", "url": "{{f(c=u)}}", "dimensions": {"i": {"stop": 9}}}],
    "refs": {"t/.zarray": text(ZARRAY).decode(), "t/0": ["{{u}}", 1, 2], "t/1": "base64:AAE="},
}
CATALOG: Final = {
    "metadata": {".zgroup": {"zarr_format": 2}, "t/.zarray": ZARRAY},
    "record_size": 5,
}
ENTRY: Final = Entry(b"a")
RECORD: Final = ENTRY.record(0)
END: Final = EndRecord(99, len(RECORD), 1, 99)
ARCHIVE: Final = archive(ENTRY, end64={}, comment=b"note")
DAMAGED: Final = (DecodeError,)
REFUSED: Final = (RequestError,)
COMMIT_LINES: Final = b"\n".join(
    text(line) for line in ({"message": "x", "metadata": {"a": [1, None]}}, *COMMIT["changes"])
)
DECODERS: Final = {
    f"{each.function.__module__.rpartition('.')[2]}.{each.function.__name__}": each
    for each in (
        Decoder(inflated_nbytes, [GZIPPED], DAMAGED),
        Decoder(inflate, [GZIPPED], DAMAGED, (1000,)),
        Decoder(inflate_to_array, [GZIPPED], DAMAGED, (MOST,)),
        Decoder(parse_json, [ARRAY], (ValueError, RecursionError)),
        Decoder(read_document, [ARRAY], DAMAGED),
        Decoder(read_grid, [ARRAY], DAMAGED),
        Decoder(read_chunks, [ARRAY], DAMAGED),
        Decoder(read_config, [CONFIG], DAMAGED),
        Decoder(decode_flexbuffer, [flexbuffers.Dumps({"a": [1, 2.5, "x", None]})], DAMAGED),
        Decoder(decode_entry, [encode_entry(each) for each in ENTRIES], DAMAGED),
        Decoder(decode_messagepack, [msgpack.packb({"a": [1, None, 2.5, {"b": b"c"}]})], DAMAGED),
        Decoder(read_ref_file, [b'{"snapshot": "VY76P925PRY57WFEK410"}'], DAMAGED),
        Decoder(decode_session, [encode_session(SESSION)], DAMAGED, (MOST,)),
        Decoder(parse_sent, [ARRAY], DAMAGED + REFUSED),
        Decoder(decode_aws_chunked, [FRAMED + b"b" * 64 + b"\r\n\r\n"], REFUSED, (4,)),
        Decoder(parse_commit, [text(COMMIT)], REFUSED),
        Decoder(parse_commit_lines, [COMMIT_LINES], REFUSED),
        Decoder(decode_jwks, [text({"keys": [JWK]})], (ValueError,)),
        Decoder(parse_deletion, [DELETE], REFUSED),
        Decoder(parse_parts, [PARTS], REFUSED),
        Decoder(parse_content_range, [b"bytes 0-9/10", b"bytes 0-9/*"]),
        Decoder(parse_unsatisfied, [b"bytes */10"]),
        Decoder(decode_json_set, [text(REFERENCES)], DAMAGED, (MOST,)),
        Decoder(decode_catalog, [text(CATALOG)], DAMAGED, (MOST,)),
        Decoder(decode_table, [thrift.assemble(*thrift.table())], DAMAGED, (2, MOST)),
        Decoder(decode_shard_index, [bytes(32)], DAMAGED, (32, 0, None)),
        Decoder(decode_minishard, [encode_minishard([(7, 0, 5)])], DAMAGED, ("raw", MOST)),
        Decoder(decode_manifest, [MESH_MANIFEST], DAMAGED, ("raw", MOST)),
        Decoder(parse_end, [ARCHIVE], DAMAGED),
        Decoder(decode_tail, [ARCHIVE], DAMAGED, (MOST,)),
        Decoder(decode_directory, [RECORD], DAMAGED, (END,)),
        Decoder(
            decode_local_header,
            [ENTRY.header()[:31]],
            DAMAGED,
            (decode_directory(RECORD, END).lookup("a"),),
        ),
        Decoder(parse_document, [b"<Error><Code>NoSuchKey</Code><Message>no</Message></Error>"]),
    )
}
WITHIN: Final = {
    *("chunk_tables.read_columns", "config.read_yaml_config"),
    *("s3_dialect.parse_xml", "sigv4.parse_claim", "preview_worker.decode"),
}
"""Decoders that are tested through others, since they take more than bytes, or as `FILES`."""


@pytest.mark.parametrize("examples", [25, pytest.param(20_000, marks=pytest.mark.soak)], ids=str)
@pytest.mark.parametrize("name", DECODERS)
def test_changed_input_is_decoded_or_raises_a_documented_error(name: str, examples: int) -> None:
    """Randomly changed input is decoded or raises a documented error, within 2 s of CPU time."""
    decoder = DECODERS[name]
    for valid in decoder.valid:
        decoder.function(bytes(valid), *decoder.more)

    @at_random(examples)
    @given(st.sampled_from(decoder.valid), st.lists(changes(), max_size=3))
    def check(data: bytes, made: list[Change]) -> None:
        for change in made:
            data = change(data)
        with processor_time_below(MOST_S):
            decoder.decode(bytes(data))

    check()


def read_repo(_: str, data: bytes) -> None:
    """Decode a file `repo`, all of its lazily read parts, and write its successor."""
    info = RepoInfoDecoder(MOST)(data)
    with suppress(DecodeError):
        for snapshot in info.snapshots():
            snapshot.metadata.decode()
            list(info.ancestry(snapshot.snapshot_id) or ())
    for read in (info.updates, info.deleted_tags, info.disabled_feature_flags):
        with suppress(DecodeError):
            list(read())
    rewrite_repo(info, [RefUpdate("tag_deleted", "t")], 2**58, "repo.1.A")


def read_snapshot(name: str, data: bytes) -> None:
    """Decode a snapshot by each of the three decoders."""
    object_id = decode_id(name) or b""
    for decode in (SnapshotDecoder(object_id, MOST), StoredSnapshotDecoder(object_id, MOST)):
        with suppress(DecodeError):
            decode(data)
    SnapshotHeaderDecoder(object_id, MOST)(data).metadata.decode()


def read_manifest(name: str, data: bytes) -> None:
    """Decode a manifest and its references, singly and as copied for a new manifest."""
    manifest = ManifestDecoder(decode_id(name) or b"", MOST)(data)
    for node_id, ndim in manifest.arrays:
        for coords in manifest.coords(node_id, ndim).T.tolist():
            with suppress(DecodeError):
                manifest.lookup(node_id, tuple(coords))
        positions = manifest.positions(node_id, ndim).astype(np.int64)
        with suppress(DecodeError):
            references(copy_payloads(manifest.references, positions))


FILES: Final[dict[str, Callable[[str, bytes], object]]] = {
    "repo": read_repo,
    "overwritten": read_repo,
    "snapshots": read_snapshot,
    "manifests": read_manifest,
    "transactions": lambda name, data: TransactionLogDecoder(decode_id(name) or b"", MOST)(data),
    "config.yaml": lambda _, data: read_yaml_config(data),
}
"""Readers of the files of a repository, by folder or file name."""


@cache
def files(kind: str) -> list[tuple[str, bytes]]:
    """Return the Icechunk library's files of one kind, in both versions of the format."""
    found = []
    for version in (1, 2):
        with TemporaryDirectory() as folder:
            written = repositories.create(Path(folder), spec_version=version)
            written.commit("array", repositories.array("a", (6, 4)), metadata=repositories.METADATA)
            written.commit("group", repositories.group("g"))
            written.repo.create_tag("v1", snapshot_id=written.snapshots[1])
            paths = [*Path(folder).glob(kind), *Path(folder).glob(f"{kind}/*")]
            found += [(path.name, path.read_bytes()) for path in paths if path.is_file()]
    return found


@pytest.mark.parametrize("examples", [25, pytest.param(5_000, marks=pytest.mark.soak)], ids=str)
@pytest.mark.parametrize("kind", FILES)
def test_changed_icechunk_file_is_decoded_or_raises_decode_error(kind: str, examples: int) -> None:
    """A randomly changed Icechunk file is decoded or raises DecodeError, within 2 s of CPU time."""

    @at_random(examples)
    @given(
        st.sampled_from(files(kind)),
        st.lists(changes(), max_size=3),
        st.none() | st.binary(max_size=300),
    )
    def check(file: tuple[str, bytes], made: list[Change], other: bytes | None) -> None:
        name, data = file
        if other is not None and len(other) % 4 == 0:
            data = data[:HEADER_NBYTES] + zstandard.compress(other)
        for change in made:
            data = change(data)
        with processor_time_below(MOST_S), suppress(DecodeError):
            FILES[kind](name, data)

    check()


@pytest.mark.parametrize("part", [b"[", b'{"a":', b"9", b"\xff"])
@pytest.mark.parametrize("name", DECODERS)
def test_deep_or_long_input_is_refused_within_bounded_time(name: str, part: bytes) -> None:
    """Input that is deeply nested or long raises no undocumented error, within 2 s of CPU time."""
    with processor_time_below(MOST_S):
        DECODERS[name].decode(part * 200_000)


def test_table_lists_every_decoder_of_the_package() -> None:
    """The table above lists every decoder of bytes in the package."""
    found = set()
    for path in Path(shardgate.__path__[0]).rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and understands_bytes(node):
                found.add(f"{path.stem}.{node.name}")

    assert found - WITHIN == DECODERS.keys()


def understands_bytes(function: ast.FunctionDef) -> bool:
    """Return whether *function* is a decoder, by its name and the type of its first argument."""
    names = ("decode", "parse", "read_", "inflate")
    if not function.name.startswith(names) or not function.args.args:
        return False
    first = function.args.args[0].annotation
    return isinstance(first, ast.Name) and first.id == "bytes"
