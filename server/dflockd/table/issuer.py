"""New tokens: a fence that only grows, and a digest that cannot be guessed."""

from __future__ import annotations

import hmac
from hashlib import blake2b
from typing import Final

from dflockd.wire import fence_from_token, format_token

_KINDS: Final = (b"\0", b"\1", b"\2", b"\3")
"""What a digest says of the space of a key, and whether its hold is the only one. With a fence of eight
bytes before it and the key behind it, no two holds have the same text digested."""


class TokenIssuer:
    """Makes the tokens of one server.

    Args:
        secret: what the digests are keyed with (at most 64 bytes). It allows anyone to make tokens.
        fence: the last fence that may have been given out: the next is larger.
    """

    def __init__(self, secret: bytes, fence: int) -> None:
        self.rekey(secret)
        self.fence = fence

    def rekey(self, secret: bytes) -> None:
        """Make the tokens of another secret from now on, and know those alone."""
        self._keyed = blake2b(key=secret, digest_size=8)

    def issue(self, space: int, key: bytes, *, is_sole: bool) -> bytes:
        """Return a new token, which carries the new `fence`, and whether its hold is the only one.

        Raises:
            OverflowError: no 64-bit fence is left: it must not start again at 0.
        """
        fence = self.fence + 1
        try:
            token = self.token(space, key, fence, is_sole=is_sole)
        except OverflowError:
            raise OverflowError("no fence is left: start the server with a smaller one") from None
        self.fence = fence
        return token

    def ticket(self, space: int, key: bytes) -> bytes:
        """Return a new name for a position in a queue. It is no token of the key: it proves no hold."""
        return self.issue(space, b"\0" + key, is_sole=False)

    def number(self) -> int:
        """Return a number of its own, larger than all fences and numbers until now."""
        self.fence += 1
        return self.fence

    def beginning(self, fence: int) -> TokenIssuer:
        """Return another issuer of the same secret, for fences after this one."""
        issuer = TokenIssuer(b"", fence)
        issuer._keyed = self._keyed
        return issuer

    def token(self, space: int, key: bytes, fence: int, *, is_sole: bool) -> bytes:
        """Return the token that carries `fence`: the same one every time."""
        digest = self._keyed.copy()
        digest.update(fence.to_bytes(8, "big") + _KINDS[2 * space + is_sole] + key)
        return format_token(fence, digest.digest())

    def verify(self, space: int, key: bytes, token: bytes) -> tuple[int, bool] | None:
        """Return the fence of a token, and whether its hold was granted as the only one.

        ``None`` if it was not made with this secret.
        """
        try:
            fence = fence_from_token(token)
        except ValueError:
            return None
        for is_sole in (True, False):
            if hmac.compare_digest(self.token(space, key, fence, is_sole=is_sole), token):
                return fence, is_sole
        return None
