"""What clients of S3 ask of buckets, which datasets are to them, listings of keys apart."""

from collections.abc import Iterable
from http import HTTPStatus

from app.errors import UnsupportedError
from app.http import s3_answers
from app.http.answer import NO_STORE, Answer
from app.http.s3 import MEDIA_TYPE
from app.resolve.resolver import Dataset


async def list_buckets(answer: Answer, names: Iterable[str]) -> None:
    """Answer ListBuckets."""
    await _send_xml(answer, s3_answers.buckets(names))


async def tell_of_bucket(
    answer: Answer, dataset: Dataset, method: str, names: frozenset[bytes]
) -> None:
    """Answer what S3 clients ask of a bucket, listings apart."""
    if method == "HEAD":
        headers = [(b"content-length", b"0"), (b"x-amz-bucket-region", b"us-east-1"), NO_STORE]
        await answer.send(HTTPStatus.OK, headers)
    elif (document := s3_answers.told_of_bucket(names)) is not None:
        await _send_xml(answer, document)
    else:
        raise UnsupportedError(f"ListObjects is not served: list {dataset.name} with list-type=2")


async def _send_xml(answer: Answer, body: bytes) -> None:
    length = (b"content-length", b"%d" % len(body))
    await answer.send(HTTPStatus.OK, [(b"content-type", MEDIA_TYPE), length, NO_STORE], body)
