"""The common part of blocking and asyncio locks: everything but waiting."""

from __future__ import annotations

import ssl
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Generic, Literal, Never, Self, TypeAlias, TypedDict, TypeVar, Unpack

from dflockd import clock, errors
from dflockd.address import DEFAULT_PORT, ServerLike, parse_servers
from dflockd.client import arguments, operations, process
from dflockd.client import plan as plans
from dflockd.client.arguments import OwnerLike, Reservation
from dflockd.client.connection import Route
from dflockd.client.flow import Flow
from dflockd.client.introduction import ANONYMOUS, Introduction, new
from dflockd.client.lease import DOUBTFUL, HELD, Lease
from dflockd.client.operations import Progress, Target
from dflockd.client.rated import RatedSession
from dflockd.client.routing import shard_map
from dflockd.client.session import Ending, LockSession
from dflockd.rates import RateLike, parse_rate
from dflockd.sharding import ShardingStrategy, stable_hash_shard
from dflockd.wire import ALL, UNLIMITED, FairGroup, Space

L = TypeVar("L", bound="LockBase")

Weight: TypeAlias = "int | Literal['all']"
"""How many of a limit somebody takes."""

DEFAULT_SERVERS: tuple[ServerLike, ...] = (("127.0.0.1", DEFAULT_PORT),)


class Named(TypedDict, total=False):
    """What locks take by name alone, but for a rate; see `LockBase`."""

    auth_token: str | None
    ssl_context: ssl.SSLContext | None
    label: str
    owner: OwnerLike | None
    group: str | None
    group_limit: int | None
    on_lost: Callable[[Any], object] | None


class LockBase:
    """The parameters, checks and state that all locks share.

    Args:
        key: the name of the lock; at most 256 bytes of UTF-8 without white space.
        acquire_timeout_s: seconds to wait for the lock, fractions allowed. 0 tries once, ``None``
            waits forever. A server that does not answer gets two more seconds.
        lease_ttl_s: the lease in whole seconds; ``None`` for the server's default (33 unless
            configured).
        servers: the servers, as ``(host, port)``, ``"host:port"`` or ``"unix:/path"``. For a
            cluster, the text ``"cluster://host:port,..."`` with some of its servers: each knows
            where every key lives, and the lock follows its key when it moves.
        sharding_strategy: a function ``(key, number of servers) -> index`` that says where a key
            lives. Not with a cluster.
        renew_ratio: the share of the lease after which the lock is renewed.
        auth_token: the shared secret of the servers.
        ssl_context: for servers that speak TLS. Give all locks the same object: only locks with
            the same one share connections.
        label: shown to people who ask who holds the lock. One line; cut after 256 bytes.
        owner: the identity of this run: a name of up to 64 printable ASCII characters and the
            number of the attempt. If the same owner holds the key or waits for it with the same or
            a later attempt, the server answers at once, with an `OwnerConflictError`. A later
            attempt queues behind an earlier one. Servers that do not know owners ignore it. A third
            part, for locks alone, is an age: the newest wins; see `DistributedLock.listen`.
        group: the group that this lock belongs to; the rules for keys apply. Groups that wait for
            the same key take turns. Within a group the order is first come, first served; locks
            without a group form one group. A server that does not know groups: `UnsupportedError`.
        group_limit: how many of the group may hold the key at once. The latest request counts.
        rate: how many runs may begin in a window of time: ``"10/m"`` (``s``, ``m`` or ``h``), or
            ``(10, 60)`` for ten in any 60 seconds. The latest request for the key sets its rate. A
            run begins when the lock is granted; see `with_rate`.
        on_lost: a function, called once with this lock if it is lost while held: the lease ended
            without a renewal, or the server no longer knows it. For a blocking lock it runs on the
            thread that renews all locks of the process and must not block. For an asyncio lock it
            runs on the event loop and may be a coroutine function; if that loop is closed, it runs
            on the renewal thread.

    Attributes:
        key: as given; so are `acquire_timeout_s` and `lease_ttl_s`.

    Raises:
        InvalidKeyError: the key cannot be sent.
        InvalidArgumentError: another argument is out of range.
    """

    _space = Space.LOCK
    _limit = 1
    _weight: Weight = 1
    _may_have_async_callback = False

    def __init__(
        self,
        key: str,
        acquire_timeout_s: float | None = 10,
        lease_ttl_s: int | None = None,
        servers: Sequence[ServerLike] | str = DEFAULT_SERVERS,
        sharding_strategy: ShardingStrategy = stable_hash_shard,
        renew_ratio: float = 0.5,
        *,
        auth_token: str | None = None,
        ssl_context: ssl.SSLContext | None = None,
        label: str = "",
        owner: OwnerLike | None = None,
        group: str | None = None,
        group_limit: int | None = None,
        on_lost: Callable[[Any], object] | None = None,
        rate: RateLike | None = None,
    ) -> None:
        if ssl_context is not None:
            arguments.check_tls(ssl_context)
        if on_lost is not None:
            is_async = self._may_have_async_callback
            arguments.check_callback(on_lost, key, may_be_async=is_async)
        given = (
            self._space,
            key,
            self._limit,
            acquire_timeout_s,
            lease_ttl_s,
            parse_servers(servers),
            sharding_strategy,
            renew_ratio,
            auth_token,
        )
        try:
            # Of other strategies, who knows whether they always say the same?
            is_known = sharding_strategy is stable_hash_shard
            plan = plans.known(*given) if is_known else plans.make(*given)
        except TypeError:
            plan = plans.make(*given)
        target, route = plan.target, plan.route
        if label != "" or owner is not None:
            target = Target(*target[:5], _who(label, owner, key))
        if group is not None or group_limit is not None:
            target = target._replace(group=arguments.checked_group(group, group_limit, key))
        if type(self._weight) is not int or self._weight != 1:
            target = _weighed(target, self._weight, key)
        if ssl_context is not None:
            route = Route(route.address, route.auth_secret, ssl_context)
        # What a request says of who asks is not for the next lock with these arguments.
        known = plan if target is plan.target else None
        self._begin(key, plan.sort, target, route, on_lost, known)
        if rate is not None:
            self.with_rate(rate)

    @classmethod
    def maker(
        cls,
        limit: int = 1,
        acquire_timeout_s: float | None = 10,
        lease_ttl_s: int | None = None,
        servers: Sequence[ServerLike] | str = DEFAULT_SERVERS,
        sharding_strategy: ShardingStrategy = stable_hash_shard,
        renew_ratio: float = 0.5,
        auth_token: str | None = None,
        ssl_context: ssl.SSLContext | None = None,
        rate: RateLike | None = None,
        begins: bool = True,
        group_limit: int | None = None,
    ) -> Maker[Self]:
        """Return a function that makes locks which share all these arguments; they are checked once.

        Made for programs that use many keys. For the arguments see the class and, for `begins`,
        `with_rate`. `limit` is for semaphores, `group_limit` for locks with a group.

        Raises:
            InvalidArgumentError: an argument is out of range.
        """
        if ssl_context is not None:
            arguments.check_tls(ssl_context)
        if cls._space is Space.LOCK and (type(limit) is not int or limit != 1):
            raise errors.InvalidArgumentError(
                f"limit is {errors.shown(limit)} for a lock: use a semaphore"
            )
        return Maker(
            cls,
            plans.Sort(
                "any",
                cls._space,
                limit,
                acquire_timeout_s,
                lease_ttl_s,
                parse_servers(servers),
                sharding_strategy,
                renew_ratio,
                auth_token,
                ssl_context,
                None if rate is None else parse_rate(rate),
                begins,
                group_limit,
            ),
        )

    def _begin(
        self,
        key: str,
        sort: plans.Sort,
        target: Target,
        route: Route,
        on_lost: Callable[[Any], object] | None,
        plan: plans.Plan | None = None,
    ) -> None:
        """Be the lock of arguments that have been checked.

        Args:
            key: as given.
            sort: what the other arguments make.
            target: what is asked for, and who asks.
            route: to the server.
            on_lost: as given.
            plan: see `dflockd.client.session.LockSession`.
        """
        shards = None
        if sort.seeds is not None:
            shards = shard_map(sort.seeds, route.auth_secret, route.tls)
        self.key = key
        self.acquire_timeout_s = sort.timeout
        self.lease_ttl_s = sort.lease
        self._session: LockSession = LockSession(
            target,
            route,
            sort.renew_ratio,
            shards,
            process.current,
            # Not the lock itself: it would keep alive one that its owner has forgotten.
            None if on_lost is None else partial(self._callback, weakref.ref(self), on_lost),
            plan,
        )

    def with_rate(self, rate: RateLike, *, begins: bool = True) -> Self:
        """Set how many runs may begin in a window, from the next `acquire` on; return this lock.

        Args:
            rate: as for the class.
            begins: whether a run begins with the grant. If not, it begins when you call `begin`, and
                until then `give_back` undoes its part in the rate too.

        Raises:
            InvalidArgumentError: the rate is malformed.
            AlreadyHeldError: this object holds the lock or waits for it.
        """
        if self.state != "free":
            raise errors.AlreadyHeldError(
                f"lock {self.key!r} is in use: give it a rate before", key=self.key
            )
        self._session = RatedSession(self._session, parse_rate(rate), begins=begins)
        return self

    def cancel(self) -> None:
        """Make an `acquire` or `wait` of this lock, in another thread or task, raise an error.

        That is an `AcquireCancelledError`. It also applies to one that is about to begin, and cannot be
        undone. It takes no mutex and does not wait, so you may call it in a signal handler and in any
        thread.
        """
        self._session.cancel()

    def begin(self) -> None:
        """Say that the run begins for which a rate granted the lock; see `with_rate`.

        It counts for one window after the server has learned of it, which it does soon, or with the
        release. This does not wait. Without a rate, or called again, it does nothing.
        """
        session = self._session
        if isinstance(session, RatedSession):
            session.begin()

    @staticmethod
    def _callback(
        reference: weakref.ref[Any], on_lost: Callable[[Any], object]
    ) -> Callable[[], object]:
        """Return what to call, from any thread, when a lease that begins now is lost."""
        raise NotImplementedError

    @property
    def state(self) -> str:
        """The state of this lock object, as a word.

        ``"free"``; ``"asking"`` during `acquire`; ``"queued"`` after `enqueue`; ``"held"``;
        ``"doubtful"`` after its connection has broken and until it is renewed on another one, since
        the server may have freed the lock; ``"lost"`` until it is released or acquired again.
        """
        return self._session.state

    @property
    def server(self) -> str:
        """The server in charge of the key, as ``host:port``.

        In a cluster, the server known last, or the cluster itself before the first request.
        """
        return self._session.server

    @property
    def group(self) -> str | None:
        """To which group this belongs, as given; ``None`` if to none."""
        group = self._session.target.group
        return None if group is None or not group.name else group.name.decode()

    @property
    def held(self) -> bool:
        """Whether the lock is certainly held: granted, within its lease, not in doubt, not released."""
        lease = self._session.lease
        return lease is not None and lease.is_held_at(clock.now())

    @property
    def token(self) -> str | None:
        """The token of the grant, or ``None`` while the lock is neither held nor in doubt."""
        lease = self._own_lease()
        return None if lease is None else lease.token.decode()

    @property
    def lease(self) -> int:
        """The granted lease in seconds; 0 while the lock is neither held nor in doubt."""
        lease = self._own_lease()
        return 0 if lease is None else lease.lease

    @property
    def fence(self) -> int | None:
        """A number that grows with every grant of the key; a resource refuses smaller ones.

        It stays readable after a loss: then it is the number that the resource will refuse.
        """
        lease = self._session.lease
        return None if lease is None else lease.fence

    @property
    def ticket(self) -> str | None:
        """The ticket of a position that `wait` has reserved; give it to `enqueue` to take it up again.

        ``None`` if there is no such position, or the server keeps none.
        """
        return self._session.ticket

    def __repr__(self) -> str:
        """Without secrets: neither the token nor the auth token."""
        return f"<{type(self).__name__} {self.key!r} on {self.server}, {self.state}>"

    def __reduce_ex__(self, protocol: Any) -> Never:
        """Refuse to be copied or pickled.

        Raises:
            TypeError: always; two objects would hold one lock.
        """
        name = type(self).__name__
        raise TypeError(f"{name} {self.key!r} cannot be copied or pickled: make another object")

    def _own_lease(self) -> Lease | None:
        session = self._session
        return session.lease if session.state in (HELD, DOUBTFUL) else None

    # The flows of what both kinds of locks can do.

    def _waiting(
        self, claim: Ending, timeout_s: float | None, reservation: Reservation | None
    ) -> Flow[bool]:
        arguments.check_timeout(timeout_s, self.key, "timeout_s")
        progress = self._progress(reservation=reservation)
        timeout = self.acquire_timeout_s if timeout_s is None else timeout_s
        return self._session.wait(claim, timeout, progress)

    def _adopting(self, claim: object, token: str) -> Flow[bool]:
        return self._session.adopt(claim, arguments.check_token(token, self.key))

    def _renewing(self, lease_ttl_s: int | None) -> Flow[bool]:
        arguments.check_lease(lease_ttl_s, self.key)
        return self._session.renew(lease_ttl_s)

    def _detaching(self, claim: Ending, lease_ttl_s: int | None) -> Flow[str | None]:
        arguments.check_lease(lease_ttl_s, self.key)
        return self._session.detach(claim, lease_ttl_s)

    def _inspecting(self) -> Flow[dict[str, Any]]:
        return self._session.question(operations.inspect)

    def _evicting(self, fence: int) -> Flow[bool]:
        arguments.check_fence(fence, self.key)
        return self._session.question(lambda target: operations.evict(target, fence))

    def _pausing(self, for_s: float | None, reason: str, by: str | None) -> Flow[None]:
        asked = arguments.checked_pause(self.key, for_s, reason, by)
        return self._session.question(lambda target: operations.pause(target, asked))

    def _resuming(self) -> Flow[bool]:
        return self._session.question(operations.resume)

    def _kept(self, ticket: str | None, reservation: Reservation | None) -> Progress | None:
        """Return what goes along with a request of somebody whose position is or was kept."""
        if ticket is None and reservation is None:
            return None
        return self._progress(ticket, reservation)

    def _progress(
        self, ticket: str | None = None, reservation: Reservation | None = None
    ) -> Progress:
        """Return what goes along with a waiter.

        Raises:
            InvalidArgumentError: an argument cannot be sent.
        """
        key = self.key
        return Progress(
            b""
            if ticket is None
            else arguments.check_name(ticket, key, "ticket", "wait() has left"),
            keep=None if reservation is None else arguments.reservation_request(reservation, key),
        )

    def _timed_out(self) -> errors.LockTimeoutError:
        server = self._session.target.server
        return errors.LockTimeoutError(
            f"lock {self.key!r} on {server} was not granted within {self.acquire_timeout_s} s",
            key=self.key,
            server=server,
        )


class Maker(Generic[L]):
    """Makes locks that differ in their keys and in who asks for them; see `LockBase.maker`.

    Args:
        lock_class: the class of the locks.
        sort: what they have in common.
    """

    __slots__ = ("_checked", "_lock_class", "_sort")

    def __init__(self, lock_class: type[L], sort: plans.Sort) -> None:
        self._lock_class = lock_class
        self._sort = sort
        self._checked: object = None
        """The function of the latest callback that was a method: of many objects it is one."""

    def __call__(
        self,
        key: str,
        *,
        label: str = "",
        owner: OwnerLike | None = None,
        group: str | None = None,
        on_lost: Callable[[L], object] | None = None,
        weight: Weight = 1,
    ) -> L:
        """Make a lock; for the arguments and what is raised see `LockBase` and `SemaphoreBase`."""
        lock_class, sort = self._lock_class, self._sort
        if on_lost is not None:
            function = getattr(on_lost, "__func__", None)
            if function is None or function is not self._checked:
                is_async = lock_class._may_have_async_callback
                arguments.check_callback(on_lost, key, may_be_async=is_async)
                self._checked = function
        who = ANONYMOUS if label == "" and owner is None else _who(label, owner, key)
        target, route = sort.place(key, who)
        if group is not None:
            target = target._replace(group=arguments.checked_group(group, sort.group_limit, key))
        if type(weight) is not int or weight != 1:
            target = _weighed(target, weight, key)
        lock = lock_class.__new__(lock_class)
        lock._begin(key, sort, target, route, on_lost)
        if sort.rate is not None:
            lock._session = RatedSession(lock._session, sort.rate, begins=sort.begins)
        return lock


def _who(label: str, owner: OwnerLike | None, key: str) -> Introduction:
    shown = b"" if label == "" else arguments.checked_label(label, key)
    run = None if owner is None else arguments.checked_owner(owner, key)
    return new(Introduction, (shown, run))


def _weighed(target: Target, weight: Weight, key: str) -> Target:
    """Return what is asked for by a run that takes so many slots."""
    slots = arguments.checked_weight(weight, target.limit, key)
    if slots == 1:
        return target
    group = target.group or FairGroup(b"")
    return target._replace(group=group._replace(weight=slots))


class SemaphoreBase(LockBase):
    """A lock with several holders at once.

    It is the same lock as a `DistributedLock` of its key, for which `limit` is 1: one queue, one set of
    holders. Published servers know semaphores as something else beside locks, and refuse another limit
    while a key is in use.

    Args:
        limit: how many may hold it, from the latest request on. If that is less than before, nobody
            loses the lock, and nobody gets it until there is room.
        weight: how many of the limit this takes, up to all: then nobody else holds the key, whatever
            limit others give. If the first waiter takes more than is free, others do not pass it. A
            rate and the limit of a group count in the same units. A server that does not know
            weights: `UnsupportedError`.
    """

    _space = Space.SEMAPHORE

    @property
    def limit(self) -> int:
        """How many may hold it at once, as given."""
        return self._session.target.limit

    @property
    def weight(self) -> Weight:
        """How many of the limit this takes, as given."""
        group = self._session.target.group
        slots = 1 if group is None else group.weight
        return "all" if slots == ALL else slots

    def __init__(
        self,
        key: str,
        limit: int,
        acquire_timeout_s: float | None = 10,
        lease_ttl_s: int | None = None,
        servers: Sequence[ServerLike] | str = DEFAULT_SERVERS,
        sharding_strategy: ShardingStrategy = stable_hash_shard,
        renew_ratio: float = 0.5,
        *,
        auth_token: str | None = None,
        ssl_context: ssl.SSLContext | None = None,
        label: str = "",
        owner: OwnerLike | None = None,
        group: str | None = None,
        group_limit: int | None = None,
        on_lost: Callable[[Any], object] | None = None,
        rate: RateLike | None = None,
        weight: Weight = 1,
    ) -> None:
        if isinstance(owner, tuple) and len(owner) == 3:
            raise errors.InvalidArgumentError(
                f"owner is {errors.shown(owner)} for semaphore {key!r}: give (name, attempt): "
                "the newest wins at a lock alone",
                key=key,
            )
        self._limit, self._weight = limit, weight
        super().__init__(
            key,
            acquire_timeout_s,
            lease_ttl_s,
            servers,
            sharding_strategy,
            renew_ratio,
            auth_token=auth_token,
            ssl_context=ssl_context,
            label=label,
            owner=owner,
            group=group,
            group_limit=group_limit,
            on_lost=on_lost,
            rate=rate,
        )


class RateLimitBase(SemaphoreBase):
    """A semaphore that only a rate bounds.

    Args:
        rate: see `LockBase`.
    """

    def __init__(
        self,
        key: str,
        rate: RateLike,
        acquire_timeout_s: float | None = 10,
        lease_ttl_s: int | None = None,
        servers: Sequence[ServerLike] | str = DEFAULT_SERVERS,
        sharding_strategy: ShardingStrategy = stable_hash_shard,
        renew_ratio: float = 0.5,
        **named: Unpack[Named],
    ) -> None:
        super().__init__(
            key,
            UNLIMITED,
            acquire_timeout_s,
            lease_ttl_s,
            servers,
            sharding_strategy,
            renew_ratio,
            rate=parse_rate(rate),
            **named,
        )
