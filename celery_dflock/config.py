"""The ``dflock_*`` settings of a Celery app.

Read when they are needed, from ``app.conf``, so that they work however the app is configured: as
attributes, from a module, or as ``CELERY_DFLOCK_*`` under a namespace. (`Settings.add_defaults`
would shadow the values of a namespace.)
"""

from __future__ import annotations

import logging
import os
import ssl
import weakref
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass
from functools import cache, partial
from operator import call
from types import ModuleType
from typing import Any, Literal, TypeAlias, get_args

from celery import Celery
from celery.app.defaults import DEFAULTS
from celery.exceptions import ImproperlyConfigured
from celery.utils.collections import DictAttribute
from celery.utils.imports import symbol_by_name

from celery_dflock.checks import is_number, is_whole
from celery_dflock.keys import is_plain
from dflockd.address import CLUSTER_PREFIX, Seeds, Servers, parse_servers
from dflockd.errors import (
    AuthRefusedError,
    DflockdError,
    InvalidArgumentError,
    UnreachableError,
    shown,
)
from dflockd.files import read_secret, refuse_irregular
from dflockd.sharding import ShardingStrategy, stable_hash_shard
from dflockd.sync_client import DistributedLock

NAMES = (
    "dflock_servers",
    "dflock_sharding_strategy",
    "dflock_auth_token",
    "dflock_use_ssl",
    "dflock_key_prefix",
    "dflock_unavailable",
    "dflock_enabled",
    "dflock_wait",
    "dflock_max_waiting",
    "dflock_consumer_timeout",
)
"""The settings; for their meaning see `Settings`."""

VARIABLES = ("DFLOCK_SERVERS", "DFLOCK_AUTH_TOKEN", "DFLOCK_AUTH_TOKEN_FILE")
"""Variables of the environment that stand in for settings."""

UNAVAILABLE = ("requeue", "fail", "run")
"""What happens to a task when no lock server answers; see `Settings.unavailable`."""

SSL_FILES = ("ca_certs", "certfile", "keyfile")
"""What ``dflock_use_ssl`` can name."""

Wait: TypeAlias = Literal["slot", "consumer"]
"""Where a task waits for its lock; see `Settings.wait`."""

WAIT: tuple[str, ...] = get_args(Wait)
"""The same, to look a value up in."""

MAX_WAITING = 500
"""Default of `Settings.max_waiting`: half of the 1024 files that a process can often have open."""

CONSUMER_TIMEOUT = 1800
"""Default of `Settings.consumer_timeout`, and of RabbitMQ: half an hour."""

DEFAULT_SERVER = "127.0.0.1:6388"

switched_off = False
"""Whether no app of this process takes locks; `celery_dflock.testing.dflock_off` sets it."""

_UNSET = object()

logger = logging.getLogger("celery_dflock")


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of one app, checked.

    Attributes:
        servers: ``dflock_servers``, or the variable ``DFLOCK_SERVERS`` (comma-separated); by default
            one server on this host. A list, or text with commas, in the same order everywhere. For
            a cluster, some of its servers: ``cluster://host:port,...``.
        sharding_strategy: ``dflock_sharding_strategy``: a callable or its dotted name. Not with a
            cluster.
        auth_token: ``dflock_auth_token``, or the variable ``DFLOCK_AUTH_TOKEN``, or the one line of
            the file that the variable ``DFLOCK_AUTH_TOKEN_FILE`` names.
        ssl_context: made from ``dflock_use_ssl``: ``True`` for TLS with the certificate authorities
            of the system, or a dict of ``ca_certs``, ``certfile`` and ``keyfile``, paths as in
            Celery's ``broker_use_ssl``. Host names are checked.
        key_prefix: ``dflock_key_prefix``: put in front of every key, to keep applications apart.
        unavailable: ``dflock_unavailable``: ``requeue``, ``fail``, or ``run`` without a lock.
        enabled: ``dflock_enabled``: ``False`` for tests that need no locks.
        wait: ``dflock_wait``: where tasks without a ``lock_wait`` of their own wait: ``slot``, in a
            process of the worker's pool, or ``consumer``; see docs/waiting.md.
        max_waiting: ``dflock_max_waiting``: how many tasks may wait in the consumer of one worker
            beyond its prefetch count. The worker raises that count by one for each of them. Each takes
            memory for its message, and a connection.
        consumer_timeout: ``dflock_consumer_timeout``: the ``consumer_timeout`` of your RabbitMQ in
            seconds, if you have changed it; 0 for none. A task that waits in the consumer is
            requeued before it runs out.
    """

    servers: Servers
    sharding_strategy: ShardingStrategy
    auth_token: str | None
    ssl_context: ssl.SSLContext | None
    key_prefix: str
    unavailable: str
    enabled: bool
    wait: str
    max_waiting: int
    consumer_timeout: float

    def __repr__(self) -> str:
        """Without the token."""
        return f"<dflock settings: {', '.join(map(str, self.servers))}>"

    @property
    def is_cluster(self) -> bool:
        """Whether the servers are a cluster, in which keys move between servers."""
        return isinstance(self.servers, Seeds)

    def connection_options(self) -> dict[str, Any]:
        """Return what every lock object of the app is made with."""
        return {
            "servers": self.servers,
            "sharding_strategy": self.sharding_strategy,
            **self.credentials(),
        }

    def credentials(self) -> dict[str, Any]:
        """Return what every connection to a server is made with."""
        return {"auth_token": self.auth_token, "ssl_context": self.ssl_context}


_cache: weakref.WeakKeyDictionary[Celery, Read] = weakref.WeakKeyDictionary()


def with_remedy(error: DflockdError) -> str:
    """Return an error of the clients as one line that says which setting to look at."""
    match error:
        # Beside what the system says of TLS, "start dflockd there" would lead away from the mistake.
        case UnreachableError(__cause__=ssl.SSLCertVerificationError()):
            return f"{error} (name the authority of its certificate in dflock_use_ssl: ca_certs)"
        case UnreachableError(__cause__=ssl.SSLError()):
            return (
                f"{error} (give the server --tls-cert and --tls-key, or leave out dflock_use_ssl)"
            )
        # Something answered, and ended the connection at the first request.
        case UnreachableError(__cause__=ConnectionResetError()):
            return f"{error} (its log says why; if it has --tls-cert, set dflock_use_ssl)"
        case UnreachableError():
            return f"{error} (start dflockd there, or correct dflock_servers)"
        case AuthRefusedError():
            return f"{error} (dflock_auth_token, or the variable DFLOCK_AUTH_TOKEN_FILE)"
    return str(error)


def settings(app: Celery) -> Settings:
    """Return the settings of an app as they are now.

    Raises:
        ImproperlyConfigured: a value is bad; one line names the setting, the value and a remedy.
    """
    return read(app).settings


def read(app: Celery) -> Read:
    """Return the settings of an app as they are now, and what they were read from.

    Raises:
        ImproperlyConfigured: as for `settings`.
    """
    known = _cache.get(app)
    if known is not None and known.is_current(app.conf):
        return known
    conf = app.conf.finalize()  # until it is asked for something it has read nothing
    found = _cache[app] = Read(conf)
    if not found.settings.enabled:
        logger.warning("locking is switched off: tasks of app %r run without locks", app.main)
    return found


class Read:
    """The settings of an app as they were read, and all that they can come from, set or not.

    To see that nothing has changed takes far less time than to look the settings up: Celery raises
    for each spelling that it does not find in each of its mappings, and most are in none. Of a dict
    that has none of our names one call shows that it still has none.

    Attributes:
        settings: checked.
    """

    def __init__(self, conf: Any) -> None:
        self._switched_off = switched_off
        self._environ = os.environ
        self._maps = conf.maps
        self._number_of_maps = len(self._maps)
        self._absent: list[Callable[[], bool]] = []
        self._found: list[tuple[Callable[[Any, object], object], Any, object]] = []
        names = _spellings(conf.prefix)
        for mapping in self._maps:
            if mapping != DEFAULTS:  # a copy of Celery's own, which nobody writes to
                self._look(*_ways_into(mapping), names)
        # In the dict under `os.environ`: that itself raises inside for what is not there.
        data = getattr(os.environ, "_data", None)
        if data is None:
            self._look(None, os.environ.get, frozenset(VARIABLES))
        else:
            self._look(data, data.get, frozenset(map(os.environ.encodekey, VARIABLES)))
        self.settings = _checked(conf)

    def _look(
        self,
        known: dict[Any, Any] | None,
        get: Callable[[Any, object], object],
        names: frozenset[Any],
    ) -> None:
        if known is not None:
            self._absent.append(partial(known.keys().isdisjoint, names.difference(known)))
            names = names.intersection(known)
        for name in names:
            value = get(name, _UNSET)
            # A copy, for a list that is changed in place stays equal to itself.
            value = copy(value) if isinstance(value, list | dict) else value
            self._found.append((get, name, value))

    def is_current(self, conf: Any) -> bool:
        """Whether nothing has changed since."""
        maps = conf.maps  # another list when Celery has read it anew; longer for more defaults
        if maps is not self._maps or len(maps) != self._number_of_maps:
            return False
        if not all(map(call, self._absent)):
            return False
        for get, name, value in self._found:
            if get(name, _UNSET) != value:
                return False
        return switched_off is self._switched_off and os.environ is self._environ


def _ways_into(mapping: Any) -> tuple[dict[str, Any] | None, Callable[[str, object], object]]:
    """Return the dict that one of Celery's mappings is, or looks into, if it is one; and its `get`."""
    if isinstance(mapping, dict):
        return mapping, mapping.get
    if not isinstance(mapping, DictAttribute):
        return None, mapping.get
    source = mapping.obj  # which an app is configured from: a module, a class, Django's settings
    if type(source) is ModuleType and "__getattr__" not in vars(source):
        return vars(source), vars(source).get
    return None, partial(getattr, source)  # which does not raise inside for what is not there


@cache
def _spellings(namespace: str | None) -> frozenset[str]:
    """Return all names under which Celery may look for a setting, and then some."""
    prefixed = [namespace + name for name in NAMES] if namespace else []
    return frozenset((*NAMES, *map(str.upper, prefixed), *map(str.lower, prefixed)))


def _checked(conf: Mapping[str, Any]) -> Settings:
    servers = _servers(
        _given(conf, "dflock_servers", os.environ.get("DFLOCK_SERVERS") or DEFAULT_SERVER)
    )
    return Settings(
        servers=servers,
        sharding_strategy=_strategy(conf.get("dflock_sharding_strategy"), servers),
        auth_token=_token(conf, servers),
        ssl_context=_ssl_context(conf.get("dflock_use_ssl")),
        key_prefix=good(conf, "dflock_key_prefix", "", _is_prefix, "text without white space"),
        unavailable=_word(conf, "dflock_unavailable", UNAVAILABLE),
        enabled=not switched_off
        and good(conf, "dflock_enabled", True, lambda it: isinstance(it, bool), "True or False"),
        wait=_word(conf, "dflock_wait", WAIT),
        max_waiting=good(
            conf, "dflock_max_waiting", MAX_WAITING, is_whole, "a whole number, 0 or more"
        ),
        consumer_timeout=good(
            *(conf, "dflock_consumer_timeout", CONSUMER_TIMEOUT),
            *(lambda it: is_number(it) and it >= 0, "seconds, or 0 for no limit"),
        ),
    )


def bad_setting(name: str, value: object, wanted: str) -> ImproperlyConfigured:
    """Return the error for a setting with a bad value."""
    return ImproperlyConfigured(f"{name} is {shown(value)}: give {wanted}")


def _given(conf: Mapping[str, Any], name: str, default: Any) -> Any:
    value = conf.get(name)
    return default if value is None else value


def good(
    conf: Mapping[str, Any], name: str, default: Any, is_good: Callable[[Any], bool], wanted: str
) -> Any:
    """Return the value of a setting; the default if there is none.

    Raises:
        ImproperlyConfigured: the value is bad; `wanted` says what to give instead.
    """
    value = _given(conf, name, default)
    if not is_good(value):
        raise bad_setting(name, value, wanted)
    return value


def _word(conf: Mapping[str, Any], name: str, known: tuple[str, ...]) -> str:
    """Return one of these; the first if none is given."""
    value: str = conf.get(name) or known[0]
    if value not in known:
        raise bad_setting(name, value, f"one of {', '.join(known)}")
    return value


def _is_prefix(value: Any) -> bool:
    return isinstance(value, str) and is_plain(value)


def _strategy(given: Any, servers: Servers) -> ShardingStrategy:
    name = "dflock_sharding_strategy"
    try:
        strategy: ShardingStrategy = symbol_by_name(given) if given else stable_hash_shard
    except (ImportError, AttributeError, ValueError) as exc:
        raise ImproperlyConfigured(f"{name} {given!r}: {exc}") from None
    if not callable(strategy):
        raise bad_setting(name, strategy, "a function (key, number of servers) -> index")
    if isinstance(servers, Seeds) and strategy is not stable_hash_shard:
        raise ImproperlyConfigured(
            f"{name} is set with dflock_servers {servers}: remove it, a cluster has its own"
        )
    return strategy


def _token(conf: Mapping[str, Any], servers: Servers) -> str | None:
    token = conf.get("dflock_auth_token") or _token_of_environment()
    try:
        DistributedLock("-", servers=servers, auth_token=token)
    except InvalidArgumentError as exc:
        raise ImproperlyConfigured(f"dflock_auth_token: {exc}") from None
    return token


def _token_of_environment() -> str | None:
    token, path = map(os.environ.get, ("DFLOCK_AUTH_TOKEN", "DFLOCK_AUTH_TOKEN_FILE"))
    if not path:
        return token
    if token:
        raise ImproperlyConfigured(
            "DFLOCK_AUTH_TOKEN and DFLOCK_AUTH_TOKEN_FILE are both set: set one of them"
        )
    try:
        return read_secret(path)
    except ValueError as exc:
        raise ImproperlyConfigured(f"DFLOCK_AUTH_TOKEN_FILE: {path!r} {exc}") from None


def _servers(servers: Any) -> Servers:
    is_cluster = isinstance(servers, str) and servers.strip().startswith(CLUSTER_PREFIX)
    if isinstance(servers, str) and not is_cluster:
        servers = [server.strip() for server in servers.split(",")]
    if not is_cluster and not isinstance(servers, list | tuple):
        raise bad_setting("dflock_servers", servers, "a list of 'host:port'")
    try:
        if is_cluster:
            return parse_servers(servers.strip())
        return parse_servers([tuple(s) if isinstance(s, list) else s for s in servers])
    except InvalidArgumentError as exc:
        raise ImproperlyConfigured(f"dflock_servers: {exc}") from None


def _ssl_context(use_ssl: Any) -> ssl.SSLContext | None:
    if use_ssl is None or use_ssl is False:
        return None
    files: Any = {"ca_certs": None} if use_ssl is True else use_ssl
    # An empty dict could mean either: nobody is to find out later that it meant no TLS.
    if not files or not isinstance(files, Mapping) or set(files) - set(SSL_FILES):
        raise bad_setting("dflock_use_ssl", use_ssl, f"True or a dict of {', '.join(SSL_FILES)}")
    try:
        refuse_irregular(*files.values())
        context = ssl.create_default_context(cafile=files.get("ca_certs"))
        if files.get("certfile"):
            # With a password, if a wrong one: without, OpenSSL would ask for it at the terminal.
            context.load_cert_chain(files["certfile"], files.get("keyfile"), password="")
    except (OSError, TypeError) as exc:
        raise ImproperlyConfigured(f"dflock_use_ssl {dict(files)!r}: {exc}") from None
    return context
