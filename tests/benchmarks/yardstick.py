"""The ceiling, a constant response; a FastAPI route awaiting `get_object`; and obstore's ranges."""

import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any, Final

from aiobotocore.config import AioConfig
from aiobotocore.session import get_session
from fastapi import FastAPI, Header, Request, Response
from obstore.store import S3Store

_BODY: Final = bytes(64 * 1024)
_HEADERS: Final = [(b"content-length", b"%d" % len(_BODY))]


async def bare(scope: Any, receive: Any, send: Any) -> None:
    """Respond to everything with the same 64 KiB."""
    if scope["type"] == "http":
        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        await send({"type": "http.response.body", "body": _BODY})


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncGenerator[None]:
    config = AioConfig(max_pool_connections=64, s3={"addressing_style": "path"})
    options = {"endpoint_url": os.environ["YARDSTICK_STORE"], "region_name": "us-east-1"}
    keys = {"aws_access_key_id": "benchmark", "aws_secret_access_key": "benchmark"}
    async with get_session().create_client("s3", config=config, **options, **keys) as client:
        app.state.s3 = client
        yield


app = FastAPI(lifespan=_lifespan)


@app.get("/{bucket}/{key:path}")
async def read_range(
    request: Request,
    bucket: str,
    key: str,
    range: Annotated[str, Header()],  # noqa: A002
) -> Response:
    """Respond with the bytes of the object that the client names."""
    found = await request.app.state.s3.get_object(Bucket=bucket, Key=key, Range=range)
    async with found["Body"] as body:
        return Response(await body.read(), 206, {"etag": found["ETag"]})


class ObstoreApp:
    """Respond with the range of an object, which obstore reads."""

    def __init__(self) -> None:
        self._stores: dict[str, S3Store] = {}

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a request with a range of the form ``bytes=first-last``."""
        if scope["type"] != "http":
            return
        _, bucket, key = scope["path"].split("/", 2)
        if bucket not in self._stores:
            self._stores[bucket] = _open(bucket)
        spelled = dict(scope["headers"])[b"range"].removeprefix(b"bytes=")
        first, last = map(int, spelled.split(b"-"))
        body = await self._stores[bucket].get_range_async(key, start=first, end=last + 1)
        headers = [(b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 206, "headers": headers})
        await send({"type": "http.response.body", "body": memoryview(body)})


def _open(bucket: str) -> S3Store:
    authority = Path(os.environ["YARDSTICK_AUTHORITY"]).read_bytes()
    return S3Store(
        bucket,
        endpoint=os.environ["YARDSTICK_STORE"],
        region="us-east-1",
        access_key_id="benchmark",
        secret_access_key="benchmark",
        virtual_hosted_style_request=False,
        client_options={"root_certificate": authority},
    )


obstore = ObstoreApp()
