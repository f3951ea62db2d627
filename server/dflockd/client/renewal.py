"""What happens to a lock while its owner is busy: it is renewed, and rescued if its connection breaks.

Flows of the reactor, as those of `dflockd.client.session` are flows of the caller.

A server has a hold belong to the connection on which its latest renewal came, and frees it when that
ends. Where a server says nothing, a second connection is tried; when it goes on, it may read from both,
in any order. So none is closed on which a renewal is still to be answered, as long as the lock is
believed in: its end could be read after the renewals of the other. And once both have been read from,
the one that stays is renewed on again before the other is closed.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import TypeAlias

from dflockd import clock, errors
from dflockd.address import Address
from dflockd.client.connection import Connection
from dflockd.client.conversation import SILENCE, asker, connect
from dflockd.client.flow import Flow, Pause, Ready, Signal
from dflockd.client.lease import DOUBTFUL, FAILED, UNKNOWN, UNRENEWED, Lease, Renewal
from dflockd.client.operations import Grant, TimedReply, read_renewal, renewal_request
from dflockd.client.pool import Pool
from dflockd.client.release import Turn
from dflockd.client.routing import ELSEWHERE, Pursuit, follow
from dflockd.wire import UnexpectedReplyError

OWNER_BUSY = 0.02
"""Seconds between looks at whether the owner still uses the connection."""

ATTEMPT = 1.5
"""Seconds that one attempt to connect may take."""

OWN_ATTEMPT = 3.0
"""Seconds for which one of many finds out for all whether their server is back; then they try, too."""

BOTH = 0.2
"""Seconds between looks at one of two connections while the other is waited for."""

logger = logging.getLogger("dflockd.client")


class _OverError(Exception):
    """Nobody waits for the end of a rescue any more."""


LookAfter: TypeAlias = Callable[[Lease], object]
"""Has a reactor look after a lease, by `keep`, unless that is over."""


def renew_now(lease: Lease, begin: LookAfter) -> None:
    """Renew a lease for those who have asked for it; in the reactor's thread."""
    if lease.task is None:
        begin(lease)
    else:
        lease.poke()


def read_now(lease: Lease, begin: LookAfter, seen: Signal) -> None:
    """Take in what has come on the connection of a lease, and say so; in the reactor's thread."""
    if lease.task is None:
        begin(lease)
    lease.poke(came=True)
    seen.fire()


def keep(lease: Lease, pool: Pool) -> Flow[None]:
    """Renew a lease until it ends."""
    lease.spread()
    keeper = _Keeper(lease, pool)
    try:
        yield from keeper.run()
    except Exception:
        # Nobody renews it any more, or sees its connection break: it is not certain any longer.
        lease.lose(FAILED)
        raise
    finally:
        keeper.close()


class _Keeper:
    """What the reactor knows of a lease."""

    def __init__(self, lease: Lease, pool: Pool) -> None:
        self.lease = lease
        self.pool = pool
        self.sent: dict[Connection, float] = {}
        """When a renewal was sent on connections that owe its answer."""
        self.promised: list[Renewal] = []
        """Renewals that somebody waits for, and that were sent."""
        self.says_begun = False
        """Whether the latest renewal said that the run has begun."""
        self._asked = lease.asked
        """Seconds that the latest renewal has asked for."""
        self._is_plain = False
        """Whether the next one asks for no more than was granted first."""
        self._settles_from = 0.0
        """A renewal that was sent from then on says that it belongs to the first."""

    def run(self) -> Flow[None]:
        lease = self.lease
        while not lease.is_over:
            came = yield Ready(lease.link, False, self._until(lease.link))
            if lease.is_over:
                return
            link = lease.take()
            if link is None:
                if lease.left <= 0:
                    lease.lose(UNRENEWED)
                    return
                yield Pause(OWNER_BUSY)  # its owner renews it, or is about to end it
                continue
            try:
                is_silent = self._step(link, came)
            except (OSError, UnexpectedReplyError, errors.DflockdError) as exc:
                lease.is_away = True
                if not isinstance(exc, ELSEWHERE):
                    lease.doubt()
                yield from _Rescue(self, link, exc).run()
                continue
            if is_silent:
                lease.is_away = True
                yield from _Rescue(self, link, TimeoutError("no answer to a renewal")).run()
            elif not link.closed:  # else it is lost
                lease.put(link)

    def close(self) -> None:
        """Close what nobody else knows."""
        for spare in self.lease.spares:
            spare.close()
        self._fire(self.promised)

    def heed(self, now: float) -> int:
        """Take in what those want who wait for a renewal; return the seconds that it asks for.

        It is about to be sent. One that nobody has asked for never makes the lease shorter: somebody
        may have asked for a longer one before all threads stand still.
        """
        lease = self.lease
        asked = lease.asked if self._is_plain else max(lease.asked, int(lease.deadline - now))
        while (renewal := lease.next_renewal()) is not None:
            renewal.sent = now
            self.promised.append(renewal)
            asked = renewal.seconds or lease.asked
        lease.shorten(asked, now)
        self._asked = asked
        return asked

    def refuses_length(self) -> bool:
        """Whether a server that knows no such hold may mean the seconds that it was asked for.

        Those who have asked for more than was granted first are told so. The next renewal shows whether
        the lock is held.
        """
        if self._asked <= self.lease.asked:
            return False
        self._asked, self._is_plain = self.lease.asked, True
        refused = [each for each in self.promised if (each.seconds or 0) > self.lease.asked]
        self.promised = [each for each in self.promised if each not in refused]
        for each in refused:
            each.is_refused = True
        self._fire(refused)
        return True

    def keep_promises(self, sent: float) -> None:
        """Tell those who wait that a renewal is done which was sent then."""
        promised, self.promised = self.promised, []
        done = [each for each in promised if each.sent <= sent]
        for each in promised:
            if each not in done:
                self.lease.ask(each)  # it says something else
        for each in done:
            each.is_granted = True
        self._fire(done)

    @staticmethod
    def _fire(renewals: list[Renewal]) -> None:
        for each in renewals:
            each.fire()

    def report(self) -> None:
        """Note that the server has learned of the beginning, by a renewal that it answered."""
        if self.says_begun:
            self.lease.report_at = math.inf

    def silent_at(self, sent: float) -> float:
        """Return when a server has said nothing for so long that another connection is tried."""
        return sent + min(SILENCE, (self.lease.deadline - sent) / 2)

    def _until(self, link: Connection) -> float:
        sent = self.sent.get(link)
        if sent is not None:
            until = self.silent_at(sent)
        else:
            until = clock.now() if self.lease.renewals else self.lease.renew_at
        if any(spare.route.address == link.route.address for spare in self.lease.spares):
            until = min(until, clock.now() + BOTH)
        return min(until, self.lease.deadline)

    def _step(self, link: Connection, came: bool) -> bool:
        """Do what is due; return whether the server has been silent for too long.

        Raises:
            OSError: the connection broke.
            UnexpectedReplyError: what came is no reply.
            DflockdError: what the reply says.
        """
        lease = self.lease
        if not link.owes():
            self.sent.pop(link, None)  # its owner has used it meanwhile
        for spare in lease.spares:
            if spare in self.sent:
                self._listen(spare)
        if came and (line := link.receive()) is not None:
            sent = self.sent.pop(link, None)
            if sent is not None:
                self._answered(TimedReply(line, sent, clock.now()))
        now = clock.now()
        if now >= lease.deadline:
            lease.lose(UNRENEWED)
        if lease.is_over:
            return False
        if link in self.sent:
            return now >= self.silent_at(self.sent[link])
        if now >= lease.renew_at or lease.renewals or self._not_needed():
            self.sent[link] = now
            asked = self.heed(now)
            self.says_begun = lease.begun is True
            link.send_now(
                renewal_request(lease.target, lease.token, asked, has_begun=self.says_begun)
            )
        return False

    def _listen(self, spare: Connection) -> None:
        """See whether the second connection still owes its answer."""
        try:
            if spare.receive() is None:
                return
        except (OSError, UnexpectedReplyError):
            self.lease.doubt()  # the hold may have ended with it
            spare.close()
        del self.sent[spare]
        self._settles_from = clock.now()

    def _answered(self, answer: TimedReply) -> None:
        lease = self.lease
        grant = read_renewal(lease.target, lease.token, answer)
        self.report()
        if grant is None:
            if self.refuses_length():
                lease.renew_at = answer.received
            else:
                lease.lose(UNKNOWN)
        elif lease.state == DOUBTFUL and answer.sent < self._settles_from:
            return  # the other connection has ended since
        elif not lease.renewed(grant):
            lease.lose(UNRENEWED)
        else:
            self._settle(answer)

    def _settle(self, answer: TimedReply) -> None:
        """See what follows from a renewal that is done."""
        self._is_plain = False
        self.keep_promises(answer.sent)
        if answer.sent >= self._settles_from:
            for spare in self._not_needed():
                spare.close()
            self.lease.spares = tuple(each for each in self.lease.spares if each in self.sent)

    def _not_needed(self) -> list[Connection]:
        """Return the other connections that have answered: their end only has to follow a renewal."""
        return [spare for spare in self.lease.spares if spare not in self.sent]


class _Rescue:
    """A search for the server of a lease on other connections, wherever that is by now.

    Args:
        keeper: the keeper of the lease.
        stood_on: its connection. The server may have the lock after all, and would free it with that.
        why: what has happened there.
    """

    def __init__(self, keeper: _Keeper, stood_on: Connection, why: BaseException) -> None:
        self._keeper = keeper
        self._lease = keeper.lease
        self._pool = keeper.pool
        self._why = why
        self._route = stood_on.route
        self._ours = [stood_on, *keeper.lease.spares]
        """The connections on which it has been asked, the latest last."""
        self._silent = [spare for spare in keeper.lease.spares if spare in keeper.sent]
        """Those that have owed an answer since an earlier search."""
        self._turn = Turn(keeper.lease, keeper.pool)
        self._waits_since = clock.now()
        self._certain_from = 0.0
        """Renewals that were sent before that may have come before the end of another connection, to
        which the hold belonged."""
        if not isinstance(why, TimeoutError | errors.RefusedError):
            self._certain_from = clock.now()
            stood_on.close()
            self._pool.clear(stood_on.route)  # the other idle ones are most likely dead as well

    def run(self) -> Flow[None]:
        """Renew the lease, or lose it."""
        lease, target = self._lease, self._lease.target
        logger.info("lock %r: connection to %s broke (%s)", target.name, target.server, self._why)
        reason = UNRENEWED
        try:
            pursuit = lease.pursuit(asker(self._pool, self._route), self._why)
            answer = yield from follow(pursuit, self._attempt)
            if answer is None:
                reason = UNKNOWN
            else:
                grant, link = answer
                self._keeper.report()
                lease.target = target.at(link.route.address).knowing(link.features)
                self._end(link)
                if lease.renewed(grant, link):
                    self._keeper.keep_promises(grant.deadline - grant.lease)
                    return
        except (_OverError, errors.RemoteError):
            pass
        except BaseException:
            self._end(None)
            raise
        self._end(None)
        lease.lose(reason)
        lease.is_away = False  # nobody need wait for another connection any more

    def _end(self, link: Connection | None) -> None:
        """Close the connections that are not needed, and let others know whether the server is back."""
        keeper = self._keeper
        spares: list[Connection] = []
        for each in self._ours:
            if each is link or each.closed:
                continue
            # Another server may read what it owes an answer to once the shard is back there.
            if link is not None and (
                each.route.address == link.route.address or each in keeper.sent
            ):
                spares.append(each)
            else:
                each.close()
        keeper.lease.spares = tuple(spares)
        stay = (link, *spares)
        keeper.sent = {each: sent for each, sent in keeper.sent.items() if each in stay}
        self._turn.end(is_back=link is not None)

    def _check(self) -> None:
        if self._lease.is_over or clock.now() >= self._lease.deadline:
            raise _OverError

    def _at(self, server: Address) -> list[Connection]:
        return [each for each in self._ours if each.route.address == server and not each.closed]

    def _attempt(self, server: Address, _: float | None) -> Flow[tuple[Grant, Connection] | None]:
        """Renew at the server that the path has come to; ``None`` if that no longer knows the lock."""
        self._check()
        self._route = self._route.at(server)
        try:
            known = self._at(server)
            if not known:
                yield from self._turn.wait(self._route, OWN_ATTEMPT)
                self._check()
                yield from self._open()
            elif not any(each in self._keeper.sent for each in known):
                self._ask(known[-1])
            return (yield from self._answer(server))
        except errors.RemoteError as exc:
            self._note(exc)
            raise

    def _note(self, exc: errors.RemoteError) -> None:
        # Without an answer nothing has been heard.
        if not isinstance(exc, ELSEWHERE) and not isinstance(exc.__cause__, TimeoutError):
            self._lease.doubt()

    def _open(self) -> Flow[None]:
        """Ask on another connection."""
        until = clock.now() + min(ATTEMPT, self._lease.left / 2)
        link = yield from connect(self._route, until, is_strict=True)
        self._ours.append(link)
        self._check()
        self._ask(link)

    def _ask(self, link: Connection) -> None:
        lease, server = self._lease, link.route.address
        target = lease.target.at(server).knowing(link.features)
        has_begun = self._keeper.says_begun = lease.begun is True
        now = clock.now()
        asked = self._keeper.heed(now)
        request = renewal_request(target, lease.token, asked, has_begun=has_begun, is_new=True)
        self._keeper.sent[link] = now
        try:
            link.send_now(request)
        except OSError as exc:
            self._broke(link)
            raise self._unreachable(server) from exc

    def _answer(self, server: Address) -> Flow[tuple[Grant, Connection] | None]:
        """Wait for an answer there, and ask on a second connection if none comes."""
        keeper, lease = self._keeper, self._lease
        sent = min(keeper.sent[each] for each in self._at(server) if each in keeper.sent)
        second_at = keeper.silent_at(sent)
        look_next = float("inf") if lease.shards is None else second_at
        error: BaseException | None = None
        while True:
            self._check()
            for each in self._at(server):
                try:
                    line = each.receive()
                except (OSError, UnexpectedReplyError) as exc:
                    error = exc
                    self._broke(each)
                    continue
                if line is not None:
                    answer = TimedReply(line, keeper.sent.pop(each), clock.now())
                    # The next request goes out there.
                    self._ours.remove(each)
                    self._ours.append(each)
                    grant = read_renewal(lease.target.at(server), lease.token, answer)
                    if grant is None and not keeper.refuses_length():
                        return None
                    if grant is not None and answer.sent >= self._certain_from:
                        return grant, each
                    self._ask(each)
            known, now = self._at(server), clock.now()
            if not known:
                raise self._unreachable(server) from error
            if now >= second_at:
                second_at = now + (yield from self._ask_again(known))
            elif now >= look_next:
                look_next = now + (yield from self._look())
            else:
                until = min(second_at, look_next, lease.deadline)
                yield Ready(known[-1], False, until if len(known) < 2 else min(until, now + BOTH))

    def _ask_again(self, known: list[Connection]) -> Flow[float]:
        """Ask a silent server on another connection; return after how many seconds to do so again.

        On one more, however long the server is silent. Its flow may vanish as well, later: those that
        have been silent since an earlier search do not count.
        """
        if len([each for each in known if each not in self._silent]) > 1:
            for each in known:
                if each not in self._keeper.sent:
                    self._ask(each)
            return ATTEMPT
        if not self._turn.has_come(self._route) and clock.now() < self._waits_since + OWN_ATTEMPT:
            return min(BOTH, self._lease.left / 4)
        try:
            yield from self._open()
        except errors.RemoteError as exc:
            self._note(exc)
        return ATTEMPT

    def _broke(self, link: Connection) -> None:
        self._lease.doubt()
        self._certain_from = clock.now()
        self._keeper.sent.pop(link, None)
        link.close()

    @staticmethod
    def _unreachable(server: Address) -> errors.UnreachableError:
        return errors.UnreachableError(
            f"the connection to lock server {server} broke", server=str(server)
        )

    def _look(self) -> Flow[float]:
        lease, asks = self._lease, asker(self._pool, self._route)
        pursuit = Pursuit(lease.shards, lease.target.key, None, asks, insists=True)
        # A holder is always answered at once.
        return pursuit.glance(self._route.address, False)
