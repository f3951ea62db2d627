"""New tokens: a fence that only grows, and a digest that cannot be guessed."""

from __future__ import annotations

from hashlib import blake2b

from dflockd.wire import Space, format_token
from dflockd.wire.tokens import MAX_FENCE


class Mint:
    """Makes the tokens of one server.

    Args:
        secret: what the digests are keyed with (at most 64 bytes). Who knows it can make tokens.
        fence: the last fence that may have been given out: the next is larger.
    """

    def __init__(self, secret: bytes, fence: int) -> None:
        self._keyed = blake2b(key=secret, digest_size=8)
        self.fence = fence

    def mint(self, space: Space, key: bytes) -> tuple[int, bytes]:
        """Return a new fence and the token that carries it.

        Raises:
            OverflowError: no 64-bit fence is left: it must not start again at 0.
        """
        if self.fence >= MAX_FENCE:
            raise OverflowError("no fence is left: start the server with a smaller one")
        self.fence = fence = self.fence + 1
        digest = self._keyed.copy()
        digest.update(b"%d %d %b" % (fence, space, key))
        return fence, format_token(fence, digest.digest())
