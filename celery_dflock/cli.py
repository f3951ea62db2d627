"""``celery -A proj dflock ...``: look at the locks of an app, and release one that is stuck."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import click
from celery.bin.base import CeleryCommand
from celery.exceptions import ImproperlyConfigured

import celery_dflock.worker.inspect  # noqa: F401 - `celery inspect` shall know of its command
from celery_dflock import finding
from celery_dflock.config import Settings, settings, with_remedy
from dflockd import admin
from dflockd.admin import describe_limit, describe_pause, printable
from dflockd.errors import DflockdError
from dflockd.rates import describe_rate
from dflockd.sync_client import DistributedLock

SELDOM = ("changed_limit", "group", "superseded_by", "rate", "paused")
"""What a server says of few locks, and an older one of none."""

as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
with_notes = click.option(
    "--all", "notes", is_flag=True, help="Include the notes that the plugin keeps of finished runs."
)


class _Command(CeleryCommand):
    """A command that says in one line why a server, or a setting, is of no use to it."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except DflockdError as exc:
            raise click.ClickException(with_remedy(exc)) from exc
        except ImproperlyConfigured as exc:
            raise click.ClickException(str(exc)) from exc


@click.group(name="dflock")
def dflock() -> None:
    """Inspect and manage the locks of this app's tasks."""


@dflock.command(cls=_Command)
@as_json
@click.pass_context
def status(ctx: click.Context, as_json: bool) -> None:
    """Show whether each lock server grants locks, what it holds, and which beat leads.

    The exit status is 1 if a server does not answer, or grants nothing.
    """
    from celery_dflock.beat.status import beat_status  # every celery command loads this module
    from celery_dflock.worker.spelling import ignored

    app_settings = _settings(ctx)
    for line in ignored(ctx.obj.app):
        click.echo(f"Warning: {line}", err=True)
    rows = _of_all_servers(app_settings, _status)
    beat = beat_status(ctx.obj.app) if app_settings.enabled else None
    if beat is not None:
        rows.append(beat)
    _show(rows, as_json, _status_line)
    sys.exit(any("error" in row or row.get("status") in _NOT_SERVING for row in rows))


_NOT_SERVING = {
    "recovering": "it waits for holders from before its restart to renew",
    "cut off": "it has no connection to etcd, or has only just joined the cluster",
    "closed": "etcd was wiped or restored, and it ends soon",
}
"""What a server says of itself that grants nothing, and why that is."""


def _of_all_servers(
    app_settings: Settings, row_of: Callable[[Settings, str], dict[str, Any]]
) -> list[dict[str, Any]]:
    """Make a row of what each server says, with the reason as ``error`` where one does not."""
    try:
        servers = _servers(app_settings)
    except DflockdError as exc:
        return [{"server": str(app_settings.servers), "error": with_remedy(exc)}]
    rows = []
    for server in servers:
        try:
            rows.append({"server": server, **row_of(app_settings, server)})
        except DflockdError as exc:
            rows.append({"server": server, "error": with_remedy(exc)})
    return rows


def _status(app_settings: Settings, server: str) -> dict[str, Any]:
    answer = _ping(app_settings, server)
    stats = admin.stats(server, **app_settings.credentials())
    entries = [*stats["locks"], *stats["semaphores"]]
    return {
        **answer,
        "status": stats.get("status", "serving"),  # a published server does not say
        "connections": stats["connections"],
        "keys": len(entries) + stats.get("omitted", 0),
        "waiters": sum(entry["waiters"] for entry in entries),
        "circles": stats.get("circles", []),
    }


def _status_line(row: dict[str, Any]) -> str:
    if "beat" in row:
        from celery_dflock.beat.status import status_line

        return status_line(row)
    if "error" in row:
        return click.style(f"{row['server']}: {row['error']}", fg="red")
    circles = "".join(
        click.style(f"\n  deadlock: {printable(each)}", fg="red") for each in row["circles"]
    )
    why = _NOT_SERVING.get(row["status"], "")
    nothing = click.style(f", grants nothing ({row['status']}): {why}", fg="red") if why else ""
    numbers = ((row["connections"], "connection"), (row["keys"], "key"), (row["waiters"], "waiter"))
    connections, keys, waiters = (f"{n} {word}{'' if n == 1 else 's'}" for n, word in numbers)
    return (
        f"{row['server']}: answers in {row['ping_ms']} ms, {connections}, {keys} held, "
        f"{waiters}{nothing}{circles}"
    )


@dflock.command(cls=_Command)
@as_json
@click.pass_context
def ping(ctx: click.Context, as_json: bool) -> None:
    """Show how long each lock server takes to answer. The exit status is 1 if one does not."""
    rows = _of_all_servers(_settings(ctx), _ping)
    _show(
        rows,
        as_json,
        lambda row: f"{row['server']}: {row.get('error') or str(row['ping_ms']) + ' ms'}",
    )
    sys.exit(any("error" in row for row in rows))


def _ping(app_settings: Settings, server: str) -> dict[str, Any]:
    return {"ping_ms": round(admin.ping(server, **app_settings.credentials()) * 1000, 2)}


@dflock.command(cls=_Command)
@as_json
@click.option(
    "--watch",
    is_flag=False,
    flag_value=2.0,
    type=click.FloatRange(0.2, 3600),
    metavar="[SECONDS]",
    help="Refresh every SECONDS (default 2) until you press q or Ctrl-C; needs the extra `top`.",
)
@with_notes
@click.pass_context
def locks(ctx: click.Context, as_json: bool, watch: float | None, notes: bool) -> None:
    """List the held keys: the holder, for how long, and how many wait."""
    app_settings = _settings(ctx)
    if watch is not None:
        if as_json:
            raise click.UsageError("--json and --watch are both given: choose one")
        _watch(app_settings, watch, notes)
        return
    rows = [
        row
        for server in _servers(app_settings)
        for row in _held(app_settings, server)
        if notes or not admin.is_note(row["key"])
    ]
    _show(
        rows,
        as_json,
        _held_line,
        "no key is held",
    )


def _held_line(row: dict[str, Any]) -> str:
    key, waiting = printable(row["key"]), f"{row['waiters']} waiting"
    if "held_s" not in row:
        return f"{key}  not held{_more(row)}, {waiting}"
    return (
        f"{key}  {_name(row)}{_more(row)}  held {row['held_s']:.0f} s, "
        f"lease ends in {row['lease_expires_in_s']:.0f} s, {waiting}"
    )


def _watch(app_settings: Settings, interval: float, notes: bool) -> None:
    try:
        from dflockd.top import watch
    except ModuleNotFoundError as exc:
        raise click.ClickException(
            f"--watch needs {exc.name}, which is not installed: pip install 'celery-dflock[top]'"
        ) from None
    watch(app_settings.servers, interval, notes=notes, **app_settings.credentials())


def _held(app_settings: Settings, server: str) -> Iterator[dict[str, Any]]:
    stats = admin.stats(server, **app_settings.credentials())
    for kind in ("locks", "semaphores"):
        for entry in stats[kind]:
            if kind == "locks" and "limit" not in entry and not entry.get("paused"):
                fields = ("key", "label", "held_s", "lease_expires_in_s", "waiters")
                row = {"server": server, **{field: entry[field] for field in fields}}
                yield {**row, **_seldom(entry)}
                continue
            report = _inspect(app_settings, server, entry["key"], kind)
            for holder in report["holders"]:
                row = {"server": server, "key": report["key"], **holder, **_seldom(report)}
                yield {**row, "waiters": entry["waiters"]}
            if report.get("paused") and not report["holders"]:
                row = {"server": server, "key": report["key"], "waiters": entry["waiters"]}
                yield {**row, **_seldom(report)}
    if stats.get("omitted"):
        click.echo(f"{server} holds {stats['omitted']} more keys that are not listed", err=True)


@dflock.command(cls=_Command)
@click.argument("key", required=False)
@as_json
@click.pass_context
def waiters(ctx: click.Context, key: str | None, as_json: bool) -> None:
    """List the waiters for KEY, or for all keys, in the order in which they will get the lock.

    KEY is a finished key, as these commands print it: prefix included, nothing is encoded.
    """
    app_settings = _settings(ctx)
    reports = _waited_for(app_settings) if key is None else [_lock(app_settings, key).inspect()]
    rows = [
        {"key": report["key"], "place": place, **waiter, **_seldom(report)}
        for report in reports
        for place, waiter in enumerate(report["waiters"], 1)
    ]
    _show(
        rows,
        as_json,
        lambda row: (
            f"{printable(row['key'])}  {row['place']}. {_name(row)}{_more(row)}  "
            f"for {row['waited_s']:.0f} s{', requeued' if row['away'] else ''}"
        ),
        "nobody waits",
    )


def _waited_for(app_settings: Settings) -> Iterator[dict[str, Any]]:
    for server in _servers(app_settings):
        stats = admin.stats(server, **app_settings.credentials())
        for kind in ("locks", "semaphores"):
            for entry in stats[kind]:
                if entry["waiters"]:
                    yield _inspect(app_settings, server, entry["key"], kind)


@dflock.command(cls=_Command)
@click.argument("text")
@as_json
@with_notes
@click.pass_context
def find(ctx: click.Context, text: str, as_json: bool, notes: bool) -> None:
    """Show what a task holds or waits for, who is ahead of it, and how long the wait may last.

    TEXT is a task id, or a part of a task id, task name, host or key. If the holder waits for
    another lock, that wait is shown too, across all servers. The exit status is 1 if nothing is
    found.
    """
    app_settings = _settings(ctx)
    servers = _servers(app_settings)

    def look(text: str) -> list[dict[str, Any]]:
        return [row for server in servers for row in _found(app_settings, server, text, notes)]

    def in_words(row: dict[str, Any]) -> str:
        waits = () if row["waiter"] is None else finding.chain(row, look)
        further = (click.style(each, fg="red") if is_circle else each for each, is_circle in waits)
        return "\n  ".join([finding.in_words(row), *further])

    rows = look(text)
    _show(rows, as_json, in_words)
    if not rows and not as_json:
        click.echo(f"no holder, waiter or key matches {printable(text)!r}", err=True)
    sys.exit(not rows)


def _found(app_settings: Settings, server: str, text: str, notes: bool) -> Iterator[dict[str, Any]]:
    report = admin.find(server, text, **app_settings.credentials(), notes=notes)
    for row in report["found"]:
        yield {"server": server, **row}
    more = report["matched"] - len(report["found"])
    if more > 0:
        click.echo(f"{server} has {more} more matches: give a longer text", err=True)


@dflock.command(cls=_Command)
@click.argument("key")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@as_json
@click.pass_context
def release(ctx: click.Context, key: str, yes: bool, as_json: bool) -> None:
    """Release KEY in place of its holder. The next waiter gets the lock at once.

    KEY is a finished key, as these commands print it: prefix included, nothing is encoded.
    Do not use this while the holder still works: it goes on for up to half its lease before it
    learns of the release. The exit status is 1 if nobody held the key.
    """
    app_settings, ended = _settings(ctx), []
    lock = _lock(app_settings, key)
    for holder in lock.inspect()["holders"]:
        if not yes:
            text = f"Release {key}, held by {_name(holder)} for {holder['held_s']:.0f} s?"
            click.confirm(text, abort=True, err=True)
        if lock.evict(holder["fence"]):
            ended.append({"key": key, **holder})
    _show(
        ended, as_json, lambda row: f"{key}: released, was held by {_name(row)}", f"{key}: not held"
    )
    sys.exit(not ended)


_time = re.compile(r"([0-9]{1,7})([smhd])").fullmatch


def _seconds(_ctx: click.Context, _param: click.Parameter, value: str | None) -> int | None:
    """Return how many seconds a time such as ``10m`` has."""
    if value is None:
        return None
    found = _time(value)
    if found is None or not int(found[1]):
        raise click.BadParameter(f"{value!r}: give a time such as 90s, 10m, 1h or 2d")
    return int(found[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[found[2]]


@dflock.command(cls=_Command)
@click.argument("key")
@click.option(
    "--for",
    "seconds",
    callback=_seconds,
    metavar="TIME",
    help="End the pause after 90s, 10m, 1h or 2d.",
)
@click.option("--reason", default="", help="Shown to everybody who waits or looks.")
@as_json
@click.pass_context
def pause(ctx: click.Context, key: str, seconds: int | None, reason: str, as_json: bool) -> None:
    """Grant KEY to nobody until you resume it. Its holder goes on, and waiters keep their positions.

    KEY is a finished key, as these commands print it: prefix included, nothing is encoded.
    A second pause replaces the first.
    """
    lock = _lock(_settings(ctx), key)
    lock.pause(seconds, reason)
    paused = lock.inspect()["paused"]
    row = {"key": key, "paused": paused}
    words = describe_pause(paused) if paused else "not paused any more"
    _show([row], as_json, lambda row: f"{printable(key)}: {words}")


@dflock.command(cls=_Command)
@click.argument("key")
@as_json
@click.pass_context
def resume(ctx: click.Context, key: str, as_json: bool) -> None:
    """End the pause of KEY: its waiters get the lock in their order, the first of them at once.

    KEY is a finished key, as these commands print it: prefix included, nothing is encoded.
    The exit status is 1 if it was not paused.
    """
    resumed = [{"key": key}] if _lock(_settings(ctx), key).resume() else []
    name = printable(key)
    _show(resumed, as_json, lambda _row: f"{name}: resumed", f"{name}: not paused")
    sys.exit(not resumed)


@dflock.command(cls=CeleryCommand, context_settings={"ignore_unknown_options": True})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def serve(arguments: tuple[str, ...]) -> None:
    """Run a lock server here. ARGUMENTS are those of the command dflockd."""
    from dflockd.cli import main

    sys.exit(main(list(arguments)))


def _inspect(app_settings: Settings, server: str, key: str, kind: str) -> dict[str, Any]:
    """Return what a server says of a key that is in one of the lists of its `stats`."""
    is_semaphore = kind == "semaphores"
    return admin.inspect(server, key, **app_settings.credentials(), semaphore=is_semaphore)


def _lock(app_settings: Settings, key: str) -> DistributedLock:
    return DistributedLock(key, **app_settings.connection_options())


def _servers(app_settings: Settings) -> list[str]:
    return admin.members(app_settings.servers, **app_settings.credentials())


def _name(row: dict[str, Any]) -> str:
    return printable(row["label"]) or "somebody"


def _more(row: dict[str, Any]) -> str:
    group, newer = row.get("group"), row.get("superseded_by")
    more = f", {describe_limit(row['changed_limit'])}" if row.get("changed_limit") else ""
    more += f", group {printable(group)}" if group else ""
    more += f", weight {row['weight']}" if row.get("weight") else ""
    more += f", superseded by {printable(newer)}" if newer else ""
    more += f", {describe_rate(row['rate'])}" if row.get("rate") else ""
    return more + (f", {describe_pause(row['paused'])}" if row.get("paused") else "")


def _seldom(entry: dict[str, Any]) -> dict[str, Any]:
    return {field: entry[field] for field in SELDOM if entry.get(field)}


def _settings(ctx: click.Context) -> Settings:
    return settings(ctx.obj.app)


def _show(
    rows: Sequence[dict[str, Any]],
    as_json: bool,
    in_words: Callable[[dict[str, Any]], str],
    if_none: str = "",
) -> None:
    """Print what a command has found."""
    if as_json:
        # What is no ASCII is escaped: some of it would move the cursor or turn the text of a terminal.
        click.echo(json.dumps(rows, indent=2))
        return
    for row in rows:
        click.echo(in_words(row))
    if if_none and not rows:
        click.echo(if_none)
