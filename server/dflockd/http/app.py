"""The HTTP server: what is asked for, answered from the table by way of `view` and `metrics`."""

from __future__ import annotations

import logging
import ssl
import traceback
from collections.abc import Awaitable, Callable, Generator, Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import TypeAlias

from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from dflockd import __version__, clock, compiled
from dflockd.address import Address
from dflockd.http import view
from dflockd.http.answers import AnswerError, Response, of_json, refused, text
from dflockd.http.desk import BusyError, Desk
from dflockd.http.gate import Gate, GateHouse
from dflockd.http.guard import Guard
from dflockd.http.head import HttpRequest
from dflockd.http.health import ClusterHealth, Door, look, probes_of
from dflockd.http.metrics import Exposition, LoopLag, ServerCollector
from dflockd.ranking import SORTS
from dflockd.server import Listener, Server, SparingLog, listen
from dflockd.storage import Journal
from dflockd.table import Entry
from dflockd.wire import MAX_SECONDS, Moved, Pause, Space, Status, key_problem
from dflockd.wire.arguments import MalformedError, label

MAX_ROWS = 500
"""Keys of one answer; more are had one after the other."""

MAX_OFFSET = 10_000
"""Keys that can be skipped: for one beyond there is the search."""

MAX_SEARCHES = 8
"""Searches that wait for the one that is under way. More are told to come back."""

_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}

_KEYS = "/api/locks/"
"""The rest of such a path is a key. One of dots alone cannot stand there: browsers take it for a way
upwards, so there is also ``/api/lock?key=``."""

Handler: TypeAlias = Callable[[HttpRequest], Awaitable[Response]]

logger = logging.getLogger("dflockd.http")


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpOptions:
    """Where it listens."""

    host: str = "127.0.0.1"
    port: int = 0
    """0 lets the system choose."""
    tls: ssl.SSLContext | None = None
    max_connections: int = 100
    """Idle ones make room for others, so that this bounds nothing but open files."""
    good_until: Callable[[], Mapping[str, float]] = dict
    """Returns until when certificates are good, by names of settings: a metric."""


class HttpServer:
    """Shows one lock server over HTTP, in the same event loop.

    Args:
        server: what is shown. Its shared secret, if it has one, is asked for here too.
        options: where.
        journal: where it keeps its holds, if it does.
        cluster: the cluster it is in, if it is.
        door: what looks whether clients find it there.
    """

    def __init__(
        self,
        server: Server,
        options: HttpOptions,
        *,
        journal: Journal | None = None,
        cluster: ClusterHealth | None = None,
        door: Door | None = None,
    ) -> None:
        self._server = server
        self._options = options
        self._probes = probes_of(server, cluster, door)
        self._journal = journal
        self._cluster = cluster

    async def start(self) -> None:
        """Listen. The lock server has been started.

        Raises:
            OSError: the address cannot be bound; nothing is listening then.
        """
        self._started = clock.now()
        loop, secret_size = self._server.loop, self._server.options.secret_size
        self._lag = LoopLag(loop)
        self._searches = Desk(MAX_SEARCHES)
        self._log = SparingLog(loop, logger)
        self._exposition = Exposition(
            ServerCollector(
                self._server,
                self._probes,
                self._lag,
                self._journal,
                self._cluster,
                self._options.good_until,
            ),
            self._server.slices,
        )
        self._guard = Guard(self._server.options.secret, self._options.host, self._log)
        self._routes = self._all_routes()
        self._house = GateHouse(
            self._log, self._serve, most=self._options.max_connections, secret=secret_size
        )
        self._listener: Listener | None = None
        try:
            sockets = await listen(loop, self._options.host, self._options.port)
        except BaseException:
            await self.stop()
            raise
        self._listener = Listener(
            loop, sockets, self._house.admission, self._house.gate, tls=self._options.tls
        )

    @property
    def urls(self) -> list[str]:
        """Where it answers."""
        assert self._listener is not None
        scheme = "https" if self._options.tls else "http"
        names = (Address(*sock.getsockname()[:2]) for sock in self._listener.sockets)
        return [f"{scheme}://{name}/" for name in names]

    async def stop(self) -> None:
        """End, and close what is open."""
        self._lag.stop()
        if self._listener is not None:
            self._listener.close()
        await self._house.stop()

    async def _serve(self, request: HttpRequest, gate: Gate) -> Response:
        """Answer a request, whatever happens."""
        try:
            await self._guard.check(request, gate)
            return await self._handler(request)(request)
        except AnswerError as exc:
            return exc.answer
        except BusyError:
            return refused(503, "too many searches at once: try again in a second", Retry_After="1")
        except Exception as exc:
            # Not its text, and no traceback: they could quote the request.
            self._log.warning("request failed: %s %s", type(exc).__name__, _place(exc))
            return refused(500, "this request failed here: see the log of the server")

    def _handler(self, request: HttpRequest) -> Handler:
        """Return what answers a request; ``HEAD`` is a ``GET`` of which nobody sees the body."""
        path = request.path
        if path.startswith(_KEYS) and len(path) > len(_KEYS):
            request.query["key"], path = path.removeprefix(_KEYS), "/api/lock"
        handlers = self._routes.get(path)
        if handlers is None:
            raise AnswerError(text(404))
        handler = handlers.get("GET" if request.method == "HEAD" else request.method)
        if handler is None:
            methods = [*handlers, *(["HEAD"] if "GET" in handlers else [])]
            raise AnswerError(text(405, Allow=",".join(sorted(methods))))
        return handler

    def _all_routes(self) -> dict[str, dict[str, Handler]]:
        return {
            "/healthz": {"GET": self._health},
            "/readyz": {"GET": self._readiness},
            "/metrics": {"GET": self._metrics},
            "/api/stats": {"GET": self._stats},
            "/api/shards": {"GET": self._shards},
            "/api/locks": {"GET": self._list},
            "/api/lock": {
                "GET": self._show,
                "DELETE": self._change(
                    self._release, "release the locks of others", "key", "space", "fence"
                ),
            },
            "/api/pause": {
                "POST": self._change(
                    self._pause, "pause a key", "key", "space", "for", "reason", "by"
                ),
                "DELETE": self._change(self._resume, "resume a key", "key", "space"),
            },
            **self._page(),
        }

    def _page(self) -> dict[str, dict[str, Handler]]:
        routes = {}
        for file in files("dflockd.http").joinpath("page").iterdir():
            kind = _TYPES[file.name.rpartition(".")[2]]
            path = "/" if file.name == "index.html" else f"/{file.name}"
            routes[path] = {"GET": _static(file.read_bytes(), f"{kind}; charset=utf-8")}
        return routes

    # Health.

    async def _health(self, _request: HttpRequest) -> Response:
        return Response(b"ok\n")

    async def _readiness(self, _request: HttpRequest) -> Response:
        ready, checks = look(self._probes)
        body = {
            "ready": ready,
            "status": self._server.table.status(clock.now()),
            "checks": [check._asdict() for check in checks],
        }
        return of_json(body, 200 if ready else 503)

    # Numbers.

    async def _metrics(self, _request: HttpRequest) -> Response:
        return Response(await self._exposition.text(), CONTENT_TYPE_PLAIN_0_0_4)

    async def _stats(self, _request: HttpRequest) -> Response:
        server, table = self._server, self._server.table
        counts = table.counts
        cluster = self._cluster
        shards = None if cluster is None else await server.slices.seen(_counted(cluster))
        ready, checks = look(self._probes)
        return of_json(
            {
                "version": __version__,
                "compiled": compiled,
                "uptime_s": round(clock.now() - self._started, 3),
                "addresses": server.addresses,
                "ready": ready,
                "status": table.status(clock.now()),
                "checks": [check._asdict() for check in checks],
                "keys": len(table),
                "max_keys": table.limits.max_locks,
                "holds": counts.holding,
                "waiters": counts.waiting,
                "connections": len(server.sessions),
                "blocking": {
                    "chain": server.deadlocks.longest,
                    "circles": server.deadlocks.circles,
                },
                "totals": {
                    "grants": counts.granted,
                    "released": counts.released,
                    "disconnected": counts.parted,
                    "expired": counts.expired,
                    "evicted": counts.evicted,
                    "timeouts": counts.timed_out,
                    "renewed": len(counts.renewed),
                    "unknown_renewals": counts.unknown,
                },
                "can_release": server.options.auth_secret is not None,
                "cluster": cluster and {"address": cluster.address, "shards": shards},
            }
        )

    async def _shards(self, _request: HttpRequest) -> Response:
        if self._cluster is None:
            return refused(404, "this server is in no cluster")
        report = self._cluster.report(clock.now())
        return of_json(report.plain.json.decode())

    # Locks.

    async def _list(self, request: HttpRequest) -> Response:
        query = request.query
        try:
            limit = _number(query.get("limit", "100"), 1, MAX_ROWS)
            offset = _number(query.get("offset", "0"), 0, MAX_OFFSET)
        except ValueError as exc:
            return refused(400, f"limit or offset: {exc}")
        sort = query.get("sort", "waiters")
        if sort not in SORTS:
            return refused(400, f"sort: not one of {', '.join(SORTS)}")
        table, slices = self._server.table, self._server.slices
        async with self._searches:
            text, most = query.get("search", ""), offset + limit
            notes = query.get("all", "") in ("1", "true")
            search = view.search(table, text, sort, most, notes=notes)
            found, matched, left_out = await slices.seen(search)
            rows = await slices.seen(view.rows(found[offset:], clock.now()))
        numbers = f'"total": {len(table)}, "matched": {matched}, "notes": {left_out}'
        return of_json(f'{{{numbers}, "locks": {rows}}}')

    async def _show(self, request: HttpRequest) -> Response:
        space, key = _named(request)
        found = self._server.table.find(space, key)
        if isinstance(found, Moved):
            return refused(404, f"its shard is on {found.server.decode()}")
        if not isinstance(found, Entry | None):  # its shard may be on its way to this server
            why = "this server cannot tell at the moment: try again in a second"
            return refused(503, why, Retry_After="1")
        rate = self._server.table.rate_of(space, key)
        detail = view.detail(space, key, found, rate, clock.now())
        return of_json(await self._server.slices.seen(detail))

    async def _release(self, request: HttpRequest) -> Response:
        space, key = _named(request)
        try:
            fence = _number(request.query.get("fence", ""), 0, (1 << 64) - 1)
        except ValueError as exc:
            return refused(400, f"fence: {exc}: give that of the holder")
        if self._server.evict(space, key, fence, request.who) is not Status.OK:
            return refused(
                409, "not held with this fence, or this server cannot tell at the moment"
            )
        return of_json({"released": str(fence)})

    async def _pause(self, request: HttpRequest) -> Response:
        key, query = _lock_named(request), request.query
        try:
            seconds = query.get("for")
            span = None if seconds is None else _number(seconds, 1, MAX_SECONDS // 1000) * 1000
        except ValueError as exc:
            return refused(400, f"for: {exc}: give seconds, or nothing until it is resumed")
        try:
            by = label(query.get("by", request.who).encode())
            reason = label(query.get("reason", "").encode())
        except MalformedError as exc:
            return refused(400, f"by or reason: {exc}")
        reply = self._server.pause(Pause(key, span, by, reason), request.who)
        if reply is not Status.OK:
            return refused(409, "--max-locks is reached, or this server cannot tell at the moment")
        return of_json({"paused": key.decode()})

    async def _resume(self, request: HttpRequest) -> Response:
        key = _lock_named(request)
        if self._server.resume(key, request.who) is not Status.OK:
            return refused(409, "not paused, or this server cannot tell at the moment")
        return of_json({"resumed": key.decode()})

    def _change(self, handler: Handler, what: str, *parameters: str) -> Handler:
        """Return what carries out a change, for somebody who may, and only as it is meant.

        Args:
            handler: what changes something.
            what: the change, for who may not.
            parameters: those that there are. Without a misspelled one it would be another change.
        """

        async def change(request: HttpRequest) -> Response:
            if self._server.options.auth_secret is None:
                return refused(403, f"set --auth-token-file: without it nobody may {what}")
            if not request.query.keys() <= set(parameters):
                names = ", ".join(parameters)
                return refused(400, f"there is a parameter that is not known here: give {names}")
            return await handler(request)

        return change


def _static(body: bytes, kind: str) -> Handler:
    async def send(_request: HttpRequest) -> Response:
        return Response(body, kind)

    return send


def _named(request: HttpRequest) -> tuple[Space, bytes]:
    """Return which key a request is about: a lock's, unless it says ``space=semaphore``."""
    key = request.query.get("key", "")
    space = view.SPACES.get(request.query.get("space", "lock"))
    if space is None or not key:
        raise AnswerError(refused(400, "give a key, and space=lock or space=semaphore"))
    return space, key.encode()


def _lock_named(request: HttpRequest) -> bytes:
    """Return which lock a request is about."""
    space, key = _named(request)
    if space is not Space.LOCK or key_problem(key):
        raise AnswerError(refused(400, "give the key of a lock"))
    return key


def _counted(cluster: ClusterHealth) -> Generator[None, None, Mapping[str, int]]:
    """Return how many shards there are: to count thousands is a step of its own."""
    yield
    return cluster.counts()


def _number(text: str, lowest: int, highest: int) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 20):
        raise ValueError(f"not a whole number from {lowest} to {highest}")
    if not lowest <= int(text) <= highest:
        raise ValueError(f"{text} is not from {lowest} to {highest}")
    return int(text)


def _place(exc: BaseException) -> str:
    """Return where in the code it was raised."""
    where = "somewhere"
    for frame, line in traceback.walk_tb(exc.__traceback__):
        where = f"in {frame.f_code.co_filename}:{line}"
    return where
