"""The first read of a chunk by the icechunk library, in a process of its own."""

import asyncio
import json
import os
import sys
from pathlib import Path
from time import perf_counter

import icechunk
from icechunk.credentials import LocalFileSystemAccess
from zarr.core.buffer import default_buffer_prototype


def main(root: Path, key: str) -> None:
    """Open the repository, read the chunk *key* of its main branch, and print the seconds."""
    icechunk.set_logs_filter("error")
    prototype = default_buffer_prototype()
    began = perf_counter()
    repository = icechunk.Repository.open(
        icechunk.local_filesystem_storage(str(root / "repository")),
        authorize_virtual_chunk_access={f"{(root / 'files').as_uri()}/": LocalFileSystemAccess},
    )
    found = asyncio.run(repository.readonly_session("main").store.get(key, prototype))
    seconds = perf_counter() - began
    body = found.to_bytes().hex() if found else None
    print(json.dumps({"seconds": seconds, "body": body}), flush=True)
    # One time in six the library crashes while the interpreter ends.
    os.execvp("true", ["true"])  # noqa: S606


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
