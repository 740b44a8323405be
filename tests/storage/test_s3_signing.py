"""Signatures of our own beside those of botocore."""

import re
from contextlib import aclosing
from typing import Any, Final
from urllib.parse import unquote

import pytest
from aiobotocore.config import AioConfig
from aiobotocore.session import get_session
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from hypothesis import given
from hypothesis import strategies as st
from pydantic import SecretStr

from shardgate.model import ObjectRef
from shardgate.settings import StoreSettings
from shardgate.storage.refusals import HttpMethod
from shardgate.storage.s3_client import S3Client, agree_to_pay
from shardgate.storage.s3_signing import BucketSigner, S3Signer, presign

KEYS = ["key", "a/b c", "ü~+%/$&.bin", "a//b", "/leading", "a?b#c", "x" * 900, "(a)!*'"]
SESSION: Final = get_session()
UNSIGNED = {"User-Agent", "Expect", "amz-sdk-invocation-id", "amz-sdk-request"}
ENDPOINTS: list[dict[str, Any]] = [
    {"endpoint_url": "http://127.0.0.1:9000", "config": {"s3": {"addressing_style": "path"}}},
    {"region_name": "eu-central-1", "config": {"s3": {"addressing_style": "virtual"}}},
    {"region_name": "us-east-1", "aws_session_token": "a token/with=signs"},
]


def _client(**options: Any) -> Any:
    config = AioConfig(
        signature_version="s3v4",
        request_checksum_calculation="when_required",
        **options.pop("config", {}),
    )
    secrets = {"aws_access_key_id": "AKID", "aws_secret_access_key": "secret"}
    options = {"region_name": "us-east-1", **secrets, **options}
    return SESSION.create_client("s3", config=config, **options)


def _moment(url: str) -> str:
    found = re.search(r"X-Amz-Date=(\w+)", url)
    assert found is not None
    return found[1]


@pytest.mark.parametrize("pays", [False, True])
@pytest.mark.parametrize("options", ENDPOINTS, ids=["path", "host", "token"])
@pytest.mark.parametrize("method", ["GET", "HEAD"])
async def test_urls_are_those_of_botocore(
    method: HttpMethod, options: dict[str, Any], *, pays: bool
) -> None:
    """Presigned URLs equal those of botocore made in the same second."""
    async with _client(**options) as client:
        if pays:
            client.meta.events.register("before-sign.s3", agree_to_pay)
        signer = await BucketSigner.of(client, method, "my-bucket")
        assert signer is not None
        credentials = Credentials("AKID", "secret", options.get("aws_session_token"))
        for key in KEYS:
            ours = theirs = ""
            while not ours or _moment(ours) != _moment(theirs):
                theirs = await presign(client, method, "my-bucket", key)
                ours = signer.presign(key, credentials)
            assert ours == theirs
            assert ("x-amz-request-payer=requester&" in ours) is pays


class _SentError(Exception):
    """A request of botocore that is not sent."""


async def _put_headers(client: Any, **params: Any) -> dict[str, str]:
    """Return the headers that botocore sends with a PUT of ``data``."""
    sent: list[Any] = []

    def keep(request: Any, **_: Any) -> None:
        sent.append(request)
        raise _SentError

    client.meta.events.register("before-send.s3", keep)
    with pytest.raises(_SentError):
        await client.put_object(Bucket="my-bucket", Body=b"data", **params)
    client.meta.events.unregister("before-send.s3", keep)
    headers = sent[0].headers.items()
    return {name: value if isinstance(value, str) else value.decode() for name, value in headers}


@pytest.mark.parametrize("pays", [False, True])
@pytest.mark.parametrize("options", ENDPOINTS, ids=["path", "host", "token"])
async def test_put_has_the_signature_of_botocore(options: dict[str, Any], *, pays: bool) -> None:
    """A PUT has the headers that botocore sends in the same second, but for those of its own."""
    headers = {"Content-Type": "text/plain", "If-Match": '"e"', "x-amz-meta-ids": "one two"}
    params = {"ContentType": "text/plain", "IfMatch": '"e"', "Metadata": {"ids": "one two"}}
    async with _client(**options) as client:
        if pays:
            client.meta.events.register("before-sign.s3", agree_to_pay)
        signer = await BucketSigner.of(client, "PUT", "my-bucket")
        assert signer is not None
        credentials = Credentials("AKID", "secret", options.get("aws_session_token"))
        for key in KEYS:
            ours, theirs = dict[str, str](), dict[str, str]()
            while not ours or ours["X-Amz-Date"] != theirs["X-Amz-Date"]:
                theirs = await _put_headers(client, Key=key, **params)
                _, lines = signer.sign_put(key, headers, b"data", credentials)
                ours = dict(line.split(": ", 1) for line in lines.decode().splitlines())
            assert ours.items() <= theirs.items()
            assert theirs.keys() - ours.keys() <= UNSIGNED


@given(
    key=st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=40),
    metadata=st.dictionaries(
        st.text("abcyz019-", min_size=1, max_size=8),
        st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=12),
        max_size=5,
    ),
    body=st.binary(max_size=40),
    secret=st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=50),
    token=st.none() | st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1),
)
def test_signatures_of_random_puts_are_those_of_botocore(
    key: str, metadata: dict[str, str], body: bytes, secret: str, token: str | None
) -> None:
    """Any PUT, of any key, metadata and body, has the signature that botocore would give it."""
    credentials = Credentials("AKID", secret, token)
    signer = BucketSigner("PUT", "https://my-bucket.s3.eu-west-3.amazonaws.com/", "eu-west-3")
    headers = {f"x-amz-meta-{name}": value for name, value in metadata.items()}

    target, lines = signer.sign_put(key, headers, body, credentials)

    sent = dict(line.split(": ", 1) for line in lines.decode().splitlines())
    authorization = sent.pop("Authorization")
    del sent["Content-Length"]
    theirs = S3SigV4Auth(credentials, "s3", "eu-west-3")
    url = f"https://my-bucket.s3.eu-west-3.amazonaws.com{target.path}"
    request = AWSRequest("PUT", url, sent, body)
    request.context["timestamp"] = sent["X-Amz-Date"]
    text = theirs.string_to_sign(request, theirs.canonical_request(request))
    assert authorization.endswith(f"Signature={theirs.signature(text, request)}")
    assert unquote(target.path) == f"/{key}"


@pytest.mark.parametrize(
    ("bucket", "host"),
    [
        ("my-bucket", "my-bucket.s3.eu-central-1.amazonaws.com"),
        ("my.bucket", "s3.eu-central-1.amazonaws.com"),
    ],
)
async def test_url_of_amazon_names_the_region(bucket: str, host: str) -> None:
    """The URL of a bucket without an endpoint has the host of the bucket's region."""
    keys = {"access_key_id": "AKID", "secret_access_key": SecretStr("secret")}
    async with aclosing(S3Client(StoreSettings(region="eu-central-1", **keys))) as client:
        signer, ref = S3Signer(client), ObjectRef(f"s3://{bucket}", "key")

        assert (await signer.presign("GET", ref)).origin.host == host
        signed = await signer.sign_put(ref, {}, b"data")

    assert signed is not None
    assert signed[0].origin.host == host


@pytest.mark.parametrize("value", ["ü", "two\r\nlines", "\0"])
async def test_put_with_an_irregular_header_is_left_to_botocore(value: str) -> None:
    """A PUT with a header value that is no printable ASCII is not signed by us."""
    settings = StoreSettings(endpoint_url="http://127.0.0.1:1", anonymous=True)
    signer = S3Signer(S3Client(settings))

    assert await signer.sign_put(ObjectRef("s3://bucket", "key"), {"x": value}, b"data") is None


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
    """A bucket with another way to sign, such as sessions, has no signer of ours."""

    class Client:
        async def generate_presigned_url(self, *_: object, **__: object) -> str:
            return f"https://bucket--usw2-az1--x-s3.example/key?{query}"

    assert await BucketSigner.of(Client(), "GET", "bucket--usw2-az1--x-s3") is None
