"""The command ``dflockd``: settings, logging, signals around the server."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import gc
import logging
import math
import os
import random
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dflockd import __version__, clock, compiled
from dflockd.address import Address, parse_server
from dflockd.cluster import Member, Node, ParametersError, agree, commands
from dflockd.cluster.front_door import FrontDoor, Tls
from dflockd.cluster.member import SECRET_SIZE
from dflockd.config import SettingError, Settings, load, load_cluster, read_etcd_tls, read_etcd_user
from dflockd.files import SecretFile, read_secret
from dflockd.server import Server, ServerOptions
from dflockd.server.descriptors import Shares, raise_limit, share
from dflockd.server.log import BoundedLog
from dflockd.server.unix import SocketPathError
from dflockd.shards import StoreDeniedError, StoreError, StoreFullError, StoreUnreachableError
from dflockd.storage import StateDir, StateError
from dflockd.table import Identity, LockTable, TokenIssuer

if TYPE_CHECKING:
    from dflockd.http import HttpServer
    from dflockd.shards.etcd import EtcdStore
    from dflockd.storage import Journal

LEAVE_SHARE = 0.75
"""Share of the shutdown timeout in which shards are handed over."""

AGREE_PAUSE = 1.5
"""Seconds, about, between two attempts to join a cluster whose store cannot be used yet."""

AGREE_REMIND = 60.0
"""Seconds after which the log says once more that it cannot."""

COLLECTIONS = (2000, 2, 5000)
"""When Python looks for garbage in cycles: after so many new objects, and how rarely in old ones.

The middle one is small: to look at 4,000 objects takes a millisecond, and at more in proportion.
"""

logger = logging.getLogger("dflockd")

_BUILD = "compiled" if compiled else "pure Python"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a server until SIGTERM or SIGINT; return the exit status.

    0 after a clean stop, 1 if the address cannot be bound, 2 for a bad setting.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    is_server = arguments[:1] not in (["cluster"], ["top"])
    _hold_hangups(is_server)
    if arguments[:1] == ["cluster"]:
        return _command(arguments[1:])
    if arguments[:1] == ["top"]:
        return _top(arguments[1:])
    try:
        settings = load(arguments, os.environ, f"{__version__} ({_BUILD})")
        _check_extra(settings)
    except SettingError as exc:
        print(f"dflockd: {exc}", file=sys.stderr)
        return 2
    except Exception as exc:
        print(f"dflockd: cannot start: {_in_one_line(exc)}", file=sys.stderr)
        return 2
    logging.basicConfig(
        level=settings["log_level"],
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        handlers=[BoundedLog(sys.stderr.fileno())],
    )
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        serve = _serve if settings["cluster"] is None else _serve_shards
        try:
            return runner.run(serve(settings))
        except Exception as exc:
            # A value or a file that nobody has thought of. Where it went wrong is for developers.
            is_told = logger.isEnabledFor(logging.DEBUG)
            logger.critical("stopped: %s", _in_one_line(exc), exc_info=is_told)
            return 1


def _in_one_line(exc: Exception) -> str:
    return f"{type(exc).__name__}: {' '.join(str(exc).split())}"


def _command(arguments: Sequence[str]) -> int:
    """Carry out ``dflockd cluster ...``; return 1 if it failed, 2 if it was not understood."""
    try:
        parsed = commands.parse(arguments)
        where = load_cluster(parsed, os.environ)
        asyncio.run(_run(where, parsed))
        sys.stdout.flush()
    except (commands.UsageError, SettingError) as exc:
        print(f"dflockd cluster: {exc}", file=sys.stderr)
        return 2
    except (commands.CommandError, ImportError) as exc:
        print(f"dflockd cluster: {exc}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        # The reader has seen enough: `| grep -q`, `| head`. The interpreter must not try again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        # What was written stays: shards that are on their way go on.
        print("dflockd cluster: interrupted; see dflockd cluster status", file=sys.stderr)
        return 130
    return 0


def _top(arguments: Sequence[str]) -> int:
    """Carry out ``dflockd top``."""
    try:
        from dflockd.top.command import main as top
    except ModuleNotFoundError as exc:
        print(
            f"dflockd top needs {exc.name}, which is not installed: pip install 'dflockd-py[top]'",
            file=sys.stderr,
        )
        return 1
    return top(arguments)


async def _run(where: Mapping[str, Any], parsed: argparse.Namespace) -> None:
    await commands.run(_etcd(where), where["cluster_prefix"], parsed)


def _etcd(values: Mapping[str, Any] | Settings) -> EtcdStore:
    """Return the store of a cluster.

    Raises:
        ImportError: the extra is not installed.
        SettingError: what TLS needs, or the password, cannot be read.
    """
    # What it tells its log, errors say as well, in words for people.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    from dflockd.shards.etcd import EtcdStore

    return EtcdStore(values["cluster"], tls=read_etcd_tls(values), user=read_etcd_user(values))


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop
    # A collection of everything looks at each hold: over a tenth of a second for 100,000. Nothing of
    # ours ends in a cycle, nor a connection of uvloop, so that the young ones will nearly do.
    gc.set_threshold(*COLLECTIONS)
    gc.freeze()
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


async def _serve(settings: Settings) -> int:
    stopped = _begin(settings)
    limits = settings.limits()
    # Fences also grow over a restart: they start at the time, in nanoseconds.
    fence, secret, state = time.time_ns(), secrets.token_bytes(32), None
    try:
        if settings["state_dir"] is not None:
            state = StateDir(
                settings["state_dir"],
                clock.now(),
                limits,
                recover=settings["state_recover"],
            )
            fence, secret = max(fence, state.fence), state.secret
        table = LockTable(limits, TokenIssuer(secret, fence), kept=state is not None)
        if state is not None:
            state.start(table, clock.now())
    except StateError as exc:
        logger.error("%s", exc)
        return 1
    journal = state.journal if state is not None else None
    server = Server(table, _server_options(settings), journal)
    http = _http(server, settings, journal=journal)
    if state is not None:
        state.keep_synced(server.cannot_write)
    listens = await _listen(server, http, settings, _kept(state))
    if listens:
        await stopped.wait()
    # One that cannot listen ends as cleanly: what is kept is as certain as it was before.
    await server.stop(None if listens else 0)
    if listens and http is not None:
        await http.stop()
    if state is not None:
        try:
            state.close(clock.now())
        except OSError as exc:
            logger.error(
                "--state-dir %s: not everything was written to the disk: %s",
                settings["state_dir"],
                exc,
            )
            return 1
    if not listens:
        return 1
    logger.info("stopped")
    return 0


async def _serve_shards(settings: Settings) -> int:
    """Serve as one of a cluster."""
    try:
        store = _etcd(settings)
    except (ImportError, SettingError) as exc:
        logger.error("--cluster: %s", exc)
        return 1
    stopped = _begin(settings, store)
    node = Node(
        settings["advertise"],
        settings.limits(),
        secrets.token_bytes(SECRET_SIZE),
        settings.parameters(),
        prefix=settings["cluster_prefix"],
        balances=settings["cluster_rebalance"],
        wall=time.time_ns,
    )
    try:
        obstacle = await _agree(node, store, settings)
    except (ParametersError, StoreError) as exc:
        _tell_refusal(exc, settings)
        return 1
    server = Server(node.table, _server_options(settings))
    door = _front_door(node, settings)
    http = _http(server, settings, cluster=node, door=door)
    # Also while the store is away: a probe of whether this process lives must not take it for dead.
    if not await _listen(server, http, settings, f"{node.address} in {settings['cluster_prefix']}"):
        await server.stop(0)
        return 1
    name = f"etcd {', '.join(store.endpoints)}"
    member, refused = Member(node, store, server.carry_out, name=name), asyncio.Event()
    entering = asyncio.create_task(_enter(member, store, door, settings, obstacle, refused))
    await _first((stopped, member.over, refused), entering)
    timeout = settings["shutdown_timeout"] * LEAVE_SHARE or None
    has_left = await member.stop(timeout)
    if not (has_left or member.over.is_set()):
        logger.warning(
            "not every shard was handed over: their next servers wait for holders to renew"
        )
    # Where shards are left nobody can renew or release here any more.
    await server.stop(None if has_left else 0)
    if http is not None:
        await http.stop()
    if refused.is_set():
        return 1
    if member.over.is_set() and not stopped.is_set():
        logger.error("stopped: etcd was wiped, or restored from a backup; start this server again")
        return 1
    logger.info("stopped")
    return 0


def _front_door(node: Node, settings: Settings) -> FrontDoor | None:
    """Return what looks whether clients find this server, if that is wanted."""
    if settings["advertise_check"] == "off":
        return None
    identity = node.table.identity = Identity(secrets.token_bytes(32))
    tls = None
    if settings.tls is not None:
        asks = settings["tls_client_ca"] is not None
        tls = Tls(settings["tls_cert"], settings["tls_key"], asks)
    is_strict = settings["advertise_check"] == "strict"
    return FrontDoor(parse_server(node.address), identity, tls=tls, strict=is_strict)


async def _enter(
    member: Member,
    store: EtcdStore,
    door: FrontDoor | None,
    settings: Settings,
    obstacle: StoreError | None,
    refused: asyncio.Event,
) -> None:
    """Join the cluster, once there is no obstacle any more and clients would find this server there."""
    told: type[StoreError] | None = None
    said_at = 0.0
    while obstacle is not None:
        now = clock.now()
        is_known = type(obstacle) is told and now < said_at + AGREE_REMIND
        if not is_known:
            told, said_at = type(obstacle), now
        level = logging.DEBUG if is_known else logging.WARNING
        logger.log(level, "%s: retrying until it works", obstacle)
        await asyncio.sleep(AGREE_PAUSE * random.uniform(0.75, 1.25))
        try:
            obstacle = await _agree(member.node, store, settings)
        except (ParametersError, StoreError) as exc:
            _tell_refusal(exc, settings)
            refused.set()
            return
    if door is not None:
        await door.open()
    member.start()
    if door is not None:
        await door.watch()


async def _agree(node: Node, store: EtcdStore, settings: Settings) -> StoreError | None:
    """Have a node know the secret of its cluster; return why not, if that is worth trying again."""
    try:
        node.found(await agree(store, settings["cluster_prefix"], node.parameters))
    except (StoreUnreachableError, StoreFullError) as exc:
        node.trouble = str(exc)
        return exc
    return None


def _tell_refusal(exc: ParametersError | StoreError, settings: Settings) -> None:
    if isinstance(exc, StoreDeniedError):
        logger.error("--cluster-user %s: %s", settings["cluster_user"] or "is not set", exc)
    else:
        logger.error("--cluster-prefix %s: %s", settings["cluster_prefix"], exc)


async def _first(ends: Sequence[asyncio.Event], work: asyncio.Task[None]) -> None:
    """Return once something ends the process, the last of them if the work fails."""

    def ended(task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (exc := task.exception()) is not None:
            logger.critical("stopping: unexpected error", exc_info=exc)
            ends[-1].set()

    work.add_done_callback(ended)
    waits = [asyncio.ensure_future(event.wait()) for event in ends]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for task in (*waits, work):
        task.cancel()


def _begin(settings: Settings, store: EtcdStore | None = None) -> asyncio.Event:
    """Return what is set once the process is to stop."""
    stopped = asyncio.Event()
    _on_signals(stopped)
    loop = asyncio.get_running_loop()
    threading.Thread(
        target=_reload_on_hangup, args=(loop, settings, store), name="dflockd-reload", daemon=True
    ).start()
    for warning in settings.warnings:
        logger.warning("%s", warning)
    return stopped


def _share(settings: Settings) -> Shares:
    """Share out the descriptors of this process."""
    return share(
        raise_limit(),
        wanted=settings["max_connections"],
        asks=settings.tls is not None or settings.auth_secret is not None,
        http=settings["http_port"] is not None,
    )


def _server_options(settings: Settings) -> ServerOptions:
    shares = _share(settings)
    return dataclasses.replace(
        settings.server_options(), max_connections=shares.connections, max_pending=shares.pending
    )


def _tell_shares(settings: Settings) -> None:
    shares, wanted = _share(settings), settings["max_connections"]
    if wanted > shares.connections:
        logger.warning(
            "--max-connections %d does not fit into %d open files (ulimit -n): the limit is %d",
            wanted,
            shares.total,
            shares.connections,
        )
    logger.info(
        "%d open files: %d for connections, %d for connections that have not signed in yet, "
        "%d for HTTP, %d in reserve",
        shares.total,
        shares.connections,
        shares.pending,
        shares.http,
        shares.reserve,
    )


def _check_extra(settings: Settings) -> None:
    if settings["http_port"] is None:
        return
    try:
        import dflockd.http  # noqa: F401
    except ModuleNotFoundError as exc:
        raise SettingError(
            f"--http-port needs {exc.name}, which is not installed: pip install 'dflockd-py[http]'"
        ) from None


def _http(
    server: Server,
    settings: Settings,
    *,
    journal: Journal | None = None,
    cluster: Node | None = None,
    door: FrontDoor | None = None,
) -> HttpServer | None:
    """Return what is to show the server over HTTP, if anything is."""
    if settings["http_port"] is None:
        return None
    from dflockd.http import HttpOptions, HttpServer

    options = HttpOptions(
        host=settings["http_host"],
        port=settings["http_port"],
        tls=settings.tls,
        max_connections=_share(settings).http,
        good_until=settings.good_until,
    )
    return HttpServer(server, options, journal=journal, cluster=cluster, door=door)


async def _listen(server: Server, http: HttpServer | None, settings: Settings, what: str) -> bool:
    try:
        await server.start()
    except SocketPathError as exc:
        logger.error("cannot listen on --unix-socket %s: %s", settings["unix_socket"], exc)
        return False
    except (OSError, UnicodeError) as exc:
        where = Address(settings["host"], settings["port"])
        logger.error("cannot listen on %s: %s: choose another --host or --port", where, exc)
        return False
    loop = type(asyncio.get_running_loop()).__module__.partition(".")[0]
    logger.info("dflockd %s, %s, %s: %s", __version__, _BUILD, loop, what)
    for address in server.addresses:
        logger.info("listening on %s", address)
    _tell_shares(settings)
    return http is None or await _show(http, settings)


async def _show(http: HttpServer, settings: Settings) -> bool:
    try:
        await http.start()
    except (OSError, UnicodeError) as exc:
        where = Address(settings["http_host"], settings["http_port"])
        logger.error(
            "cannot listen on %s: %s: choose another --http-host or --http-port", where, exc
        )
        return False
    logger.info("health, metrics and the live page: %s", " ".join(http.urls))
    return True


def _kept(state: StateDir | None) -> str:
    if state is None:
        return "locks are in memory and end with this process (set --state-dir to keep them)"
    number = len(state.holds)
    text = f"{number} lock{'' if number == 1 else 's'} restored"
    if state.recovery:
        text += (
            "; others may have been lost with the machine or the journal: nothing is granted for "
            f"{math.ceil(state.recovery)} s, while clients renew what they hold"
        )
    return text


def _hold_hangups(is_held: bool) -> None:
    """Have SIGHUP wait, or come; many that wait are one."""
    how = signal.SIG_BLOCK if is_held else signal.SIG_UNBLOCK
    signal.pthread_sigmask(how, [signal.SIGHUP])


def _reload_on_hangup(
    loop: asyncio.AbstractEventLoop, settings: Settings, store: EtcdStore | None
) -> None:
    """Reload for each SIGHUP; those that come meanwhile are one.

    Every thread holds them back, and this one takes them: a handler would run once for each, and a
    storm of them would leave the server no time, not even for its end.
    """
    done = threading.Event()

    def reload() -> None:
        try:
            _reload(settings, store)
        finally:
            done.set()

    while True:
        signal.sigwait([signal.SIGHUP])
        done.clear()
        try:
            loop.call_soon_threadsafe(reload)
        except RuntimeError:  # The loop is closed: the process ends.
            return
        done.wait()


def _reload(settings: Settings, store: EtcdStore | None) -> None:
    """Read again what can change while the server runs: every credential."""
    done = []
    try:
        if settings.reload_tls():
            done.append("certificates reloaded")
    except SettingError as exc:
        logger.error("SIGHUP: the certificates stay as they were: %s", exc)
    if isinstance(settings.auth_secret, SecretFile):
        try:
            read_secret(settings.auth_secret.path)
            done.append("the auth token is that of its file")
        except ValueError as exc:
            logger.error("SIGHUP: the auth token stays as it was: its file %s", exc)
    if store is not None:
        try:
            store.renew()
            done.append("etcd is asked anew, with the credentials of now")
        except StoreError as exc:
            logger.error("SIGHUP: the credentials for etcd stay as they were: %s", exc)
    logger.info("SIGHUP: %s", "; ".join(done) or "nothing to reload")


def _on_signals(stopped: asyncio.Event) -> None:
    loop = asyncio.get_running_loop()

    def stop(number: int) -> None:
        name = signal.Signals(number).name
        if stopped.is_set():
            logger.warning("%s again: stopping at once", name)
            logging.shutdown()
            os._exit(128 + number)
        logger.info("%s: draining", name)
        stopped.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop, number)
