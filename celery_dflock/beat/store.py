"""Where the beats of an app share the last run of each entry of the schedule."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias
from urllib.parse import unquote

from celery import Celery
from kombu.connection import Connection
from kombu.utils.url import maybe_sanitize_url

from celery_dflock.beat.config import BeatSettings

if TYPE_CHECKING:
    from celery.backends.redis import RedisBackend

logger = logging.getLogger("celery_dflock.beat")

Runs: TypeAlias = dict[str, datetime]
"""The last run of each entry, by its name. The leader writes them, and the next leader reads them."""

Store: TypeAlias = "RedisStore | FileStore"
"""Where they are."""


def store_for(app: Celery, settings: BeatSettings, schedule_filename: str | None) -> Store | None:
    """Return the store of an app, or ``None`` if its scheduler shares the last runs itself.

    The first that exists: the one of the setting, the broker's Redis, the result backend's Redis, a
    file beside the scheduler's own.
    """
    if not settings.needs_store:
        return None
    key = f"{settings.lock_key}:last-runs"
    url = settings.store
    if isinstance(url, str):
        if url.startswith("file:"):
            return FileStore(unquote(url.removeprefix("file:").removeprefix("//")))
        return RedisStore(Connection(url), key)
    broker = app.connection_for_write()
    if broker.transport.driver_type == "redis":
        return RedisStore(broker, key)
    if _is_redis(app.backend):
        return RedisStore(app.backend, key)
    path = f"{schedule_filename or app.conf.beat_schedule_filename}.dflock.json"
    return FileStore(path, is_makeshift=True)


def _is_redis(backend: object) -> bool:
    try:
        from celery.backends.redis import RedisBackend
    except ImportError:  # redis-py is not installed: an app on RabbitMQ does without
        return False
    return isinstance(backend, RedisBackend)


class RedisStore:
    """A hash in Redis.

    Args:
        source: a broker connection or a result backend that can reach the Redis.
        key: the key of the hash.
    """

    def __init__(self, source: Connection | RedisBackend, key: str) -> None:
        self._source = source
        self._key = key
        self._channel: Any = None

    def __str__(self) -> str:
        """For the banner."""
        return f"{maybe_sanitize_url(self._source.as_uri())} {self._key}"

    def load(self) -> Runs:
        """Return them all.

        Raises:
            ValueError: the hash is something else.
        """
        found = self._client().hgetall(self._key)
        try:
            return {_text(name): datetime.fromisoformat(_text(at)) for name, at in found.items()}
        except ValueError as exc:
            raise ValueError(
                f"dflock_beat_store: {self} is not a hash of last runs ({exc}): delete it"
            ) from None

    def save(self, runs: Mapping[str, datetime]) -> None:
        """Store these; others stay as they are."""
        if runs:
            mapping = {name: at.isoformat() for name, at in runs.items()}
            self._client().hset(self._key, mapping=mapping)

    def forget(self, names: set[str]) -> None:
        """Delete these: they are no longer in the schedule."""
        if names:
            self._client().hdel(self._key, *names)

    def close(self) -> None:
        """Close the connection, for good."""
        if self._channel is not None:
            self._channel = None
            self._source.release()

    def _client(self) -> Any:
        if not isinstance(self._source, Connection):
            return self._source.client
        if self._channel is None:
            # As the broker's own transport connects: sentinels, TLS, prefixes and sockets.
            self._channel = self._source.channel()
        return self._channel.client


class FileStore:
    """A file, for the beats of one host.

    Args:
        path: the file; its folder must exist.
        is_makeshift: whether no setting asked for a file, so that a warning is logged.
    """

    def __init__(self, path: str, is_makeshift: bool = False) -> None:
        self._path = Path(path)
        self._is_makeshift = is_makeshift
        self._runs: Runs = {}

    def __str__(self) -> str:
        """For the banner."""
        return f"file {self._path}" + (", for this host only" if self._is_makeshift else "")

    def load(self) -> Runs:
        """Return them all.

        Raises:
            ValueError: the file is something else.
        """
        if self._is_makeshift:
            logger.warning(
                "the last runs are kept in %s, which beats on other hosts cannot read: set "
                "dflock_beat_store to the URL of a Redis",
                self._path,
            )
        try:
            text = self._path.read_text()
        except FileNotFoundError:
            text = "{}"
        try:
            self._runs = {name: datetime.fromisoformat(at) for name, at in json.loads(text).items()}
        except (ValueError, TypeError, AttributeError) as exc:
            raise ValueError(
                f"dflock_beat_store: {self._path} is not a file of last runs ({exc}): remove it"
            ) from None
        return dict(self._runs)

    def save(self, runs: Mapping[str, datetime]) -> None:
        """Store these; others stay as they are."""
        self._runs.update(runs)
        text = json.dumps({name: at.isoformat() for name, at in self._runs.items()}, indent=1)
        beside = self._path.with_name(f"{self._path.name}.{os.getpid()}")
        beside.write_text(text)
        beside.replace(self._path)

    def forget(self, names: set[str]) -> None:
        """Delete these: they are no longer in the schedule."""
        for name in names:
            self._runs.pop(name, None)
        if names:
            self.save({})

    def close(self) -> None:
        """Nothing is open."""


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value
