"""What happens to a lock while its owner is busy: it is renewed, and rescued if its connection breaks.

Flows of the reactor, as those of `dflockd.client.session` are flows of the caller.
"""

from __future__ import annotations

import contextlib
import logging
from typing import Protocol

from dflockd import errors
from dflockd.client import clock
from dflockd.client.flows import Links, look_at, talk, walk
from dflockd.client.lease import SILENCE, Lease
from dflockd.client.operations import (
    Answer,
    Grant,
    kept,
    raised,
    read_renewal,
    release,
    renew,
    renewal_request,
)
from dflockd.client.routing import Ask
from dflockd.client.steps import Flow, Hear, Link, Open, Pause, Probe, Ready, Route
from dflockd.wire import UnexpectedReplyError

BUSY = 0.02
"""Seconds between looks at whether the owner still uses the connection."""

ATTEMPT = 1.5
"""Seconds that one attempt to renew on another connection may take."""

OWN_ATTEMPT = 3.0
"""Seconds for which one of many finds out for all whether their server is back; then they try, too."""

logger = logging.getLogger("dflockd.client")


class Probing(Links, Protocol):
    """The pool, with what its users know of servers that were lost."""

    probes: dict[Route, Probe]


class _OverError(Exception):
    """Nobody waits for the end of a rescue any more."""


def keep(lease: Lease, links: Probing) -> Flow[None]:
    """Renew a lease until it ends."""
    sent = 0.0
    lease.spread()
    while not lease.is_over:
        due = sent + min(SILENCE, lease.left / 2) if sent else lease.renew_at
        came = yield Ready(lease.link, False, min(due, lease.deadline))
        if lease.is_over:
            return
        link = lease.take()
        if link is None:
            if lease.left <= 0:
                lease.lose("its lease ended unrenewed")
                return
            yield Pause(BUSY)  # its owner renews it, or is about to end it
            continue
        is_silent = False
        if not link.owed:
            sent = 0.0  # its owner has used it meanwhile
        try:
            if came and (line := link.receive_now()) is not None:
                if sent:
                    _answered(lease, Answer(line, sent, clock.now()))
                sent = 0.0
            now = clock.now()
            if now >= lease.deadline:
                lease.lose("its lease ended unrenewed")
            if lease.is_over:
                lease.put(link)  # its owner may have ended it, and wait for that
                return
            if not sent and now >= lease.renew_at:
                sent = now
                link.send_now(renewal_request(lease.target, lease.token, lease.asked))
            elif sent and now >= due:
                is_silent = True
        except (OSError, UnexpectedReplyError, errors.DflockdError) as exc:
            why: BaseException = exc
        else:
            if not is_silent:
                lease.put(link)
                continue
            why = TimeoutError("no answer to a renewal")
        lease.is_away = True
        if not is_silent:
            lease.doubt()
        if not (yield from _rescue(lease, links, link, why, sent)):
            return
        sent = 0.0


def _answered(lease: Lease, answer: Answer) -> None:
    grant = read_renewal(lease.target, lease.token, answer)
    if grant is None:
        lease.lose("the server no longer knows it")
    elif not lease.renewed(grant):
        lease.lose("its lease ended unrenewed")


def _rescue(
    lease: Lease, links: Probing, stood_on: Link, why: BaseException, sent: float
) -> Flow[bool]:
    """Renew a lease on another connection, wherever its server is by now; ``False`` if it has ended.

    Args:
        lease: it.
        links: the pool.
        stood_on: its connection. The server may have the lock after all, and would free it with that;
            and its answer may still come.
        why: what has happened there.
        sent: when the renewal was sent there that is not answered.
    """
    target = lease.target
    logger.info("lock %r: connection to %s broke (%s)", target.name, target.server, why)
    rescue = _Rescue(lease, links, stood_on, why, sent)
    path = lease.path_from(why)
    try:
        grant = yield from walk(links, path, stood_on.route, rescue.attempt)
    except (_OverError, errors.RemoteError):
        rescue.end(None)
        lease.lose("its lease ended unrenewed")
        return False
    except BaseException:
        rescue.end(None)
        raise
    link = rescue.link
    if grant is not None and link is not None:
        lease.target = target.at(link.route.address)
        rescue.end(link)
        if lease.renewed(grant, link):
            return True
    rescue.end(None)
    lease.lose("the server no longer knows it" if grant is None else "its lease ended unrenewed")
    return False


class _Rescue:
    """One search for the server of a lease, on other connections."""

    def __init__(
        self, lease: Lease, links: Probing, stood_on: Link, why: BaseException, sent: float
    ) -> None:
        self.link: Link | None = None
        """The connection that was renewed on."""
        self._lease = lease
        self._links = links
        self._stood_on = stood_on
        self._sent = sent
        self._route = stood_on.route
        self._is_silent = isinstance(why, TimeoutError)
        self._probe = Probe()
        if isinstance(why, errors.RecoveringError):
            self.link = stood_on
        elif not self._is_silent:
            stood_on.close()
            links.clear(stood_on.route)  # the other idle ones are most likely dead as well

    def attempt(self, step: Ask) -> Flow[Grant | None]:
        """Renew at the server that the path has come to; ``None`` if that no longer knows the lock."""
        lease, link = self._lease, self.link
        self._check()
        if (answer := self._late_answer()) is not None:
            self.link = self._stood_on
            return read_renewal(lease.target, lease.token, answer)
        if link is not None and (link.closed or link.route.address != step.server):
            self._drop()
            link = None
        try:
            if link is None:
                yield from self._await_turn()
                self._check()
                self._route = self._route.at(step.server)
                until = min(lease.deadline, clock.now() + ATTEMPT)
                self.link = link = yield Open(self._route, until, is_strict=True)
            self._check()
            renewing = renew(lease.target.at(step.server), lease.token, lease.asked)
            # In a cluster one looks meanwhile whether another server is in charge.
            look = None if lease.shards is None else self._look
            until = lease.deadline
            if look is None:
                until = min(until, clock.now() + ATTEMPT)
            told = talk(link, kept(renewing), until, look, is_strict=True)
            grant = raised((yield from told))
        except errors.RemoteError as exc:
            if not isinstance(exc.__cause__, TimeoutError):
                lease.doubt()  # else nothing has been heard
            raise
        link.label = lease.target.label or b""
        return grant

    def end(self, link: Link | None) -> None:
        """Close the connections but for that one, and let others know whether the server is back."""
        for each in (self.link, self._stood_on):
            if each is not None and each is not link:
                each.close()
        if self._links.probes.get(self._route) is self._probe:
            self._links.probes.pop(self._route, None)
        self._probe.is_back = link is not None
        self._probe.fire()

    def _check(self) -> None:
        if self._lease.is_over or clock.now() >= self._lease.deadline:
            raise _OverError

    def _drop(self) -> None:
        link, self.link = self.link, None
        if link is not None and link is not self._stood_on:
            link.close()

    def _late_answer(self) -> Answer | None:
        """Return what has come after all on the connection on which nothing came."""
        link = self._stood_on
        if not self._is_silent or link.closed:
            return None
        try:
            line = link.receive_now()
        except (OSError, UnexpectedReplyError):
            self._lease.doubt()
            link.close()
            return None
        return None if line is None else Answer(line, self._sent, clock.now())

    def _await_turn(self) -> Flow[None]:
        """Let one of many find out for all whether their server is back.

        Not in a cluster, where each lock may have its own server by now.
        """
        if self._lease.shards is not None:
            return
        probes, until = self._links.probes, min(self._lease.deadline, clock.now() + OWN_ATTEMPT)
        while (probe := probes.setdefault(self._route, self._probe)) is not self._probe:
            if not (yield Hear(probe, until)) or probe.is_back:
                return

    def _look(self, is_waiting: bool) -> Flow[float]:
        shard_map = self._lease.shards
        assert shard_map is not None
        return look_at(self._links, shard_map, self._lease.target.key, self._route, is_waiting)


def release_later(lease: Lease, links: Links) -> Flow[None]:
    """Give a lock back once its server can be reached again, unless its lease ends before."""

    def attempt(step: Ask) -> Flow[None]:
        link = yield Open(lease.link.route.at(step.server))
        yield from talk(link, release(lease.target.at(step.server), lease.token))
        links.give(link)

    with contextlib.suppress(errors.RemoteError):  # its lease has ended
        yield from walk(links, lease.path_from(), lease.link.route, attempt)
