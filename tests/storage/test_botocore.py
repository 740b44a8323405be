"""Members of botocore and aiobotocore that the service relies on, and that are not documented."""

from inspect import signature

import pytest
from aiobotocore.config import AioConfig
from aiobotocore.session import get_session
from botocore import auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import ReadOnlyCredentials
from botocore.exceptions import EndpointConnectionError
from botocore.loaders import create_loader


def test_signers_have_the_steps_that_are_overridden() -> None:
    """`app.storage.s3_client` replaces the digest, `app.http.credentials.signing` the headers."""
    signer = auth.S3SigV4QueryAuth(ReadOnlyCredentials("id", "", None), "s3", "us-east-1")
    request = AWSRequest("GET", "http://host/key")
    request.context["timestamp"] = "20260101T000000Z"

    assert auth.AUTH_TYPE_MAPS["s3v4"] is auth.S3SigV4Auth
    assert list(signature(auth.S3SigV4Auth.payload).parameters) == ["self", "request"]
    assert list(signature(signer.headers_to_sign).parameters) == ["request"]
    canonical = signer.canonical_request(request)
    assert signer.string_to_sign(request, canonical).splitlines()[:2] == [
        "AWS4-HMAC-SHA256",
        "20260101T000000Z",
    ]


@pytest.mark.parametrize("operation", ["PutObject", "UploadPart"])
async def test_requests_emit_the_events_that_are_listened_to(operation: str) -> None:
    """`app.storage.s3_client` chooses the signer, and replaces the body before it is sent."""
    session = get_session()
    session.register_component("data_loader", create_loader())
    emitted = []
    config = AioConfig(retries={"total_max_attempts": 1}, connect_timeout=1)
    options = {"aws_access_key_id": "id", "aws_secret_access_key": "secret"}
    async with session.create_client(
        "s3", "us-east-1", endpoint_url="http://127.0.0.1:9", config=config, **options
    ) as client:
        for event in "choose-signer", "before-sign", "before-send":

            def hear(event_name: str, **known: object) -> None:
                emitted.append((event_name, set(known)))

            client.meta.events.register_first(f"{event}.s3.{operation}", hear)
        call = client.put_object if operation == "PutObject" else client.upload_part
        more = {} if operation == "PutObject" else {"UploadId": "id", "PartNumber": 1}
        with pytest.raises(EndpointConnectionError):
            await call(Bucket="bucket", Key="key", Body=b"body", **more)

    names = [name for name, _ in emitted]
    assert names == [
        f"{event}.s3.{operation}" for event in ("choose-signer", "before-sign", "before-send")
    ]
    assert "signature_version" in emitted[0][1]
    assert {"request", "signature_version"} <= emitted[1][1]
    assert "request" in emitted[2][1]
