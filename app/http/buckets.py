"""What clients of S3 ask of buckets, which datasets are to them, listings of keys apart."""

from collections.abc import Iterable
from http import HTTPStatus

from app.http import s3_answers
from app.http.answer import NO_STORE, Answer
from app.http.s3 import MEDIA_TYPE


async def list_buckets(answer: Answer, names: Iterable[str]) -> None:
    """Answer ListBuckets."""
    await send_xml(answer, s3_answers.buckets(names))


async def tell_of_bucket(answer: Answer, method: str, names: frozenset[bytes]) -> None:
    """Answer HeadBucket, GetBucketLocation and GetBucketVersioning."""
    if method == "HEAD":
        headers = [(b"content-length", b"0"), (b"x-amz-bucket-region", b"us-east-1"), NO_STORE]
        await answer.send(HTTPStatus.OK, headers)
    else:
        await send_xml(answer, s3_answers.told_of_bucket(names))


async def send_xml(answer: Answer, body: bytes) -> None:
    """Send a document that nobody should keep."""
    length = (b"content-length", b"%d" % len(body))
    await answer.send(HTTPStatus.OK, [(b"content-type", MEDIA_TYPE), length, NO_STORE], body)
