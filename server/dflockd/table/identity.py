"""How one process is told apart from others that could answer instead."""

from __future__ import annotations

from hashlib import blake2b


class Identity:
    """Answers to nonces that only the process can give that has the key.

    Args:
        key: at most 64 bytes that nobody else knows. It never leaves the process.
    """

    def __init__(self, key: bytes) -> None:
        self._keyed = blake2b(key=key, digest_size=16)

    def prove(self, nonce: bytes) -> bytes:
        """Return the answer to a nonce, in hexadecimal digits."""
        digest = self._keyed.copy()
        digest.update(nonce)
        return digest.hexdigest().encode()
