"""What a store is asked and answers, as etcd's messages."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from dflockd.shards.etcd_endpoint import rpc
from dflockd.shards.store import Compare, Delete, Event, Put, Record, RevisionIs, StoreOperation


def key_range(prefix: str) -> tuple[bytes, bytes]:
    """Return the first key with a prefix, and the first one after them."""
    key = prefix.encode("utf-8")
    return (key, key[:-1] + bytes([key[-1] + 1])) if key else (b"\0", b"\0")


def comparison(compare: Compare) -> Any:
    """Return a condition."""
    key = compare.key.encode("utf-8")
    if isinstance(compare, RevisionIs):
        return rpc.Compare(
            key=key, target=rpc.Compare.MOD, result=rpc.Compare.EQUAL, mod_revision=compare.revision
        )
    return rpc.Compare(
        key=key, target=rpc.Compare.VALUE, result=rpc.Compare.EQUAL, value=compare.value
    )


def request(operation: StoreOperation) -> Any:
    """Return an operation."""
    key = operation.key.encode("utf-8")
    if isinstance(operation, Put):
        put = rpc.PutRequest(key=key, value=operation.value, lease=operation.lease)
        return rpc.RequestOp(request_put=put)
    if isinstance(operation, Delete):
        return rpc.RequestOp(request_delete_range=rpc.DeleteRangeRequest(key=key))
    return rpc.RequestOp(request_range=rpc.RangeRequest(key=key))


def to_record(kv: Any) -> Record:
    """Return a key with its value as a record."""
    return Record(kv.value, kv.mod_revision, kv.lease)


def to_records(kvs: Iterable[Any]) -> dict[str, Record]:
    """Return keys with their values."""
    return {to_text(kv.key): to_record(kv) for kv in kvs}


def to_event(event: Any) -> Event:
    """Return a change."""
    deleted = event.type == rpc.Event.DELETE
    return Event(
        to_text(event.kv.key), event.kv.mod_revision, None if deleted else to_record(event.kv)
    )


def to_text(key: bytes) -> str:
    """Return a key as text."""
    # Keys of others may be anything; they are shown, not lost.
    return key.decode("utf-8", "backslashreplace")
