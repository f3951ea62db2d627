"""The map of a cluster's shards, as `Shards` is answered: plain, packed, or not at all.

The map is the same at every server, so its version is a digest of it. One server's version means
the same to the others, and to the same one after a restart.
"""

from __future__ import annotations

import json
import re
import zlib
from binascii import a2b_base64, b2a_base64
from collections.abc import Mapping
from typing import Any, NamedTuple

from dflockd.wire.documents import read_json
from dflockd.wire.messages import Report, Shards, Status

LEVEL = 1
"""How much zlib tries. More takes a multiple of the time, for a third of the bytes at best."""

MAX_MAP = 1 << 20
"""Longest map, in bytes of JSON."""

_is_version = re.compile(r"[0-9A-Za-z]{1,64}").fullmatch


class BadMapError(ValueError):
    """What a server says of its shards cannot be read."""


class MapReport(NamedTuple):
    """A map, ready to be sent."""

    version: bytes
    plain: Report
    packed: Report

    def answer(self, request: Shards) -> Report | Status:
        """Return the answer."""
        if request.version == self.version:
            return Status.OK
        return self.packed if request.packed else self.plain


def encode_map(document: Mapping[str, object]) -> MapReport:
    """Return a map as it is sent; `document` has no ``version``."""
    # Clients do without.
    from hashlib import blake2b

    text = json.dumps(document, separators=(",", ":")).encode()
    version = blake2b(text, digest_size=8).hexdigest().encode()
    packed = b2a_base64(zlib.compress(text, LEVEL), newline=False)
    return MapReport(
        version,
        Report(b'{"version":"%b",%b' % (version, text[1:])),
        Report(b'{"version":"%b","zlib":"%b"}' % (version, packed)),
    )


def decode_map(report: Report) -> tuple[dict[str, Any], bytes]:
    """Return a map, whichever way it came, and its version, which is empty if it has none.

    Raises:
        BadMapError: it is no JSON object, or cannot be unpacked.
    """
    document = _object(report.json)
    version = document.get("version")
    if "zlib" in document:
        document = _object(_unpacked(document["zlib"]))
    if isinstance(version, str) and _is_version(version):
        return document, version.encode()
    return document, b""  # it would go into a request, where a line feed begins another one


def _object(text: bytes) -> dict[str, Any]:
    try:
        document = read_json(text)
    except ValueError as exc:
        raise BadMapError(str(exc)) from None
    if not isinstance(document, dict):
        raise BadMapError("no JSON object")
    return document


def _unpacked(text: object) -> bytes:
    unpacking = zlib.decompressobj()
    try:
        found = unpacking.decompress(a2b_base64(text), MAX_MAP)  # type: ignore[arg-type]
    except (zlib.error, ValueError, TypeError) as exc:
        raise BadMapError(str(exc)) from None
    if not unpacking.eof:
        raise BadMapError(f"it is cut off, or over {MAX_MAP} bytes")
    return found
