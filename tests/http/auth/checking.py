"""The service's check of what the tests' client has signed."""

from typing import Final

import pytest
from pydantic import SecretStr

from app.errors import SignatureError
from app.http.auth.sigv4 import Signatures, SignedRequest
from app.settings import CallerSettings
from tests.http.auth.sigv4 import KEY_ID, NOW, SECRET, Scope

CALLERS: Final = {
    "ann": CallerSettings(access_key_id=KEY_ID, secret_access_key=SecretStr(SECRET)),
    "bob": CallerSettings(access_key_id="B0B", secret_access_key=SecretStr("another")),
    "tim": CallerSettings(token_sha256=("0" * 64,)),
}


def check(scope: Scope, *, at: float = NOW) -> SignedRequest | None:
    """Let the service check a request at some time."""
    return Signatures(CALLERS, clock=lambda: at).check(scope)


def who(scope: Scope, *, at: float = NOW) -> str | None:
    """Name who signed."""
    signed = check(scope, at=at)
    return None if signed is None else signed.caller.name


def code_of(scope: Scope, *, at: float = NOW) -> str:
    """Tell S3's name for what is wrong."""
    with pytest.raises(SignatureError) as refused:
        check(scope, at=at)
    return refused.value.code
