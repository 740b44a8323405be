"""`KeyPart`: a part of the keys below a root, for work that many machines share."""

import re
from dataclasses import dataclass
from hashlib import sha256
from typing import Final, Self

from shardgate.errors import ConfigurationError
from shardgate.model import ObjectRef

_PART: Final = re.compile("(0|[1-9][0-9]{0,5})/([1-9][0-9]{0,5})")


@dataclass(frozen=True, slots=True)
class KeyPart:
    """The keys whose hash modulo *count* is *number*, from 0 to *count* - 1.

    The hash is the big-endian number in the first 8 bytes of SHA-256 (FIPS 180-4) of the key in
    UTF-8, which has no slash at either end. The key of an object is its path below the root of the
    dataset; that of a member is the path of its archive or reference set, a slash, and its name.
    An object elsewhere, which a virtual reference leads to, has its URL.
    """

    number: int = 0
    count: int = 1

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse ``K/N``. Raises: `ConfigurationError`."""
        if (found := _PART.fullmatch(text)) and int(found[1]) < int(found[2]):
            return cls(int(found[1]), int(found[2]))
        expected = "K/N with K from 0 to N - 1 and N up to 999999, such as 0/8"
        raise ConfigurationError(f"--part {text}: expected {expected}")

    def __str__(self) -> str:
        """Return the text that `parse` takes."""
        return f"{self.number}/{self.count}"

    def holds(self, key: str) -> bool:
        """Return whether *key* is of this part."""
        digest = sha256(key.encode(errors="replace")).digest()
        return int.from_bytes(digest[:8]) % self.count == self.number

    def holds_object(self, root: ObjectRef, ref: ObjectRef) -> bool:
        """Return whether the object, or member, *ref* of a dataset at *root* is of this part."""
        return self.holds(str(ref).removeprefix(str(root.prefix)))


ALL_KEYS: Final = KeyPart()
