"""The text of a token: a fence, then a digest, 16 hexadecimal digits each.

The fence is a number that grows with every grant, so that a resource can refuse the late write of a
former holder (Kleppmann, "How to do distributed locking", 2016). It stands in the token because the
format has no field to spare: published clients refuse a grant with more than three fields.
"""

from __future__ import annotations

from binascii import hexlify
from typing import Final

MAX_FENCE: Final = (1 << 64) - 1


def format_token(fence: int, digest: bytes) -> bytes:
    """Return the token of `fence` and an 8-byte `digest`."""
    return hexlify(fence.to_bytes(8, "big") + digest)


def fence_from_token(token: str | bytes) -> int:
    """Return the fence that a token carries.

    Raises:
        ValueError: not 32 hexadecimal digits: the token of a server older than 2.1.
    """
    text = token if isinstance(token, str) else token.decode("ascii", "replace")
    if len(text) != 32 or text.strip("0123456789abcdef"):
        raise ValueError(f"not a token with a fence: {len(text)} characters, 32 hex digits needed")
    return int(text[:16], 16)
