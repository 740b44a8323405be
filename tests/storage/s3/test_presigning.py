"""`app.storage.s3.presigning`: the URLs that botocore would give."""

import re
from typing import Any, Final

import pytest
from aiobotocore.config import AioConfig
from aiobotocore.session import get_session
from botocore import UNSIGNED
from botocore.credentials import Credentials

from app.storage.refusals import Method
from app.storage.s3.presigning import Presigner, presign

KEYS = ["key", "a/b c", "ü~+%/$&.bin", "a//b", "/leading", "a?b#c", "x" * 900, "(a)!*'"]
SESSION: Final = get_session()
ENDPOINTS: list[dict[str, Any]] = [
    {"endpoint_url": "http://127.0.0.1:9000", "config": {"s3": {"addressing_style": "path"}}},
    {"region_name": "eu-central-1"},
    {"region_name": "us-east-1", "aws_session_token": "a token/with=signs"},
]


def _client(**options: Any) -> Any:
    config = AioConfig(**{"signature_version": "s3v4", **options.pop("config", {})})
    secrets = {"aws_access_key_id": "AKID", "aws_secret_access_key": "secret"}
    options = {"region_name": "us-east-1", **secrets, **options}
    return SESSION.create_client("s3", config=config, **options)


def _credentials(options: dict[str, Any]) -> Credentials:
    return Credentials("AKID", "secret", options.get("aws_session_token"))


def _moment(url: str) -> str:
    found = re.search(r"X-Amz-Date=(\w+)", url)
    assert found is not None
    return found[1]


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("options", ENDPOINTS, ids=["path", "host", "token"])
@pytest.mark.parametrize("method", ["GET", "HEAD"])
async def test_urls_are_those_of_botocore(
    method: Method, options: dict[str, Any], key: str
) -> None:
    """To the letter, when they are made in the same second."""
    async with _client(**options) as client:
        signer = await Presigner.of(client, method, "my-bucket")
        assert signer is not None
        for _ in range(3):
            theirs = await presign(client, method, "my-bucket", key)
            ours = signer.sign(key, _credentials(options))
            if _moment(ours) == _moment(theirs):
                break

    assert ours == theirs


async def test_nothing_is_signed_without_credentials() -> None:
    """The URL has no query."""
    async with _client(config={"signature_version": UNSIGNED}) as client:
        signer = await Presigner.of(client, "GET", "open-data")
        theirs = await presign(client, "GET", "open-data", "a b")

    assert signer is not None
    assert signer.sign("a b", None) == theirs == "https://open-data.s3.amazonaws.com/a%20b"


@pytest.mark.parametrize(
    "query",
    [
        "X-Amz-Credential=AKID/20261121/us-west-2/s3express/aws4_request&X-Amz-Signature=1",
        "X-Amz-Credential=AKID/20261121/us-west-2/s3/aws4_request&X-Amz-S3session-Token=1",
        "X-Amz-Credential=AKID/20261121/s3/aws4_request&X-Amz-Region-Set=%2A",
        "AWSAccessKeyId=AKID&Signature=1&Expires=1",
    ],
)
async def test_other_ways_to_sign_are_left_to_botocore(query: str) -> None:
    """Those of a bucket with sessions of its own, say."""

    class Client:
        async def generate_presigned_url(self, *_: object, **__: object) -> str:
            return f"https://bucket--usw2-az1--x-s3.example/key?{query}"

    assert await Presigner.of(Client(), "GET", "bucket--usw2-az1--x-s3") is None
