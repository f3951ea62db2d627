"""The ``lock_*`` options of a task, checked when the task is bound to its app."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, TypeAlias, TypedDict, get_args

from celery import Task
from celery.exceptions import ImproperlyConfigured

from celery_dflock import signatures
from celery_dflock.checks import is_number, is_whole
from celery_dflock.config import WAIT, Wait
from celery_dflock.exceptions import LockKeyError, LockNotAcquiredError
from celery_dflock.keys import KeyFunction, KeyTemplate, Parameters, default_key, encode, finish
from celery_dflock.limits import (
    Bounds,
    Limits,
    LimitSource,
    Lock,
    Made,
    RateSource,
    Wanted,
    WeightSource,
    in_order,
    is_made,
    is_template,
    read_value,
)
from celery_dflock.lock_key import LockKey
from dflockd.errors import shown

Ending: TypeAlias = Literal["requeue", "skip", "fail"]
Newest: TypeAlias = Literal["supersede", "newest"]
Conflict: TypeAlias = Ending | Newest | tuple[Newest, Ending]
Lost: TypeAlias = Literal["raise", "warn"]
Unique: TypeAlias = Literal["until_executing", "until_executed", "until_expired"]
Duplicate: TypeAlias = Literal["coalesce", "raise", "skip", "replace"]

CONFLICT: tuple[str, ...] = get_args(Ending)
SUPERSEDE = "supersede"
NEWEST: tuple[str, ...] = get_args(Newest)
"""With these the newest wins: over who waits, and with the first one over who runs, too."""
LOST: tuple[str, ...] = get_args(Lost)
UNIQUE: tuple[str, ...] = get_args(Unique)
DUPLICATE: tuple[str, ...] = get_args(Duplicate)


class Unchosen(int):
    """A number that is there because nobody has chosen one."""


SLOT_TIMEOUT = Unchosen(5)
"""Seconds to wait in a worker slot."""

QUEUE_TIMEOUT = 1500
"""Seconds to wait in the consumer, where nobody has chosen a number.

The message is not acknowledged meanwhile. Redis delivers it again after an hour, RabbitMQ closes the
channel after half an hour, if their own defaults stand.
"""

MAX_SECONDS = 9_223_372_036
"""The longest time that can be said to a lock server; for no end at all there is ``None``."""

ConflictFunction: TypeAlias = Callable[[Task, LockNotAcquiredError], Any]
"""``(task, error) -> result``; see `TaskOptions.lock_conflict`."""

LostFunction: TypeAlias = Callable[[Task, Any], object]
"""``(task, lock)``; see `TaskOptions.lock_lost`."""

OneKey: TypeAlias = str | Callable[..., Any] | Lock
"""A template, a function ``(task, args, kwargs) -> key or keys``, or a `Lock`."""

KeySource: TypeAlias = OneKey | Sequence[OneKey] | None
"""One, or several."""


class RequeueOptions(TypedDict, total=False):
    """What ``lock_requeue`` can contain; times in seconds. See `celery_dflock.options.Backoff`."""

    base: float
    """The longest first pause. It doubles with each attempt. The default is 1."""
    cap: float
    """The longest of all pauses. The default is 30."""
    max_wait: float
    """How long after its first conflict the task fails. The default is 3600. With 0 it never does."""
    max_attempts: int
    """The number of conflicts after which the task fails. The default is 0, and it never does."""
    hold: float | None
    """For how long before and after the end of a pause the lock is reserved if the task's turn comes
    meanwhile. The default is 0. With ``None`` the task keeps no position.
    """


class TaskOptions(TypedDict, total=False):
    """The options of a locked task, for people, type checkers and editors.

    Use it for several tasks, or for one::

        ACCOUNT = TaskOptions(lock_key="account:{account_id}", lock_conflict="skip")

        @app.task(base=LockedTask, **ACCOUNT)
        def sync_account(account_id: int) -> None: ...

    Celery's own decorator accepts any argument, so a type checker cannot see a mistake there. For
    one call: ``headers={"dflock": TaskOptions(lock_timeout=60)}``.

    `lock_limit`, `lock_weight`, `lock_rate` and `lock_group_limit` may also be a function
    ``(task, args, kwargs)`` that returns such a value, or a template that makes one (``"{seats}"``,
    ``"{per_minute}/m"``). If what they make is bad, the task fails and takes no lock. See docs/keys.md.
    """

    # An editor shows the text under an option when somebody points at it in `TaskOptions(...)`.

    lock_key: KeySource
    """The key. The default is the name of the task and all its arguments.

    Give a template over the arguments (``"account:{account_id}"``), a function
    ``(task, args, kwargs) -> key``, or a list of these. The task takes all keys of a list, those that
    the fewest may have first. In a list, a `Lock` is a key with limits of its own, and other keys have
    those of the task. See docs/keys.md.
    """
    lock_limit: LimitSource
    """How many runs may hold the key at once. The default is 1.

    ``None`` is no limit, for tasks with a `lock_rate` or a `lock_group_limit`. The latest request for
    a key sets its limit.
    """
    lock_weight: WeightSource
    """For how many of the limit a run counts. The default is 1.

    Give a whole number up to the limit, or ``"all"``. While a run with ``"all"`` holds the key, no
    other run does, whatever limit that one gives. A task that waits for several is not passed by
    tasks that need fewer. A `lock_rate` and a `lock_group_limit` count in the same units. See
    docs/readers-and-writers.md.
    """
    lock_group: str | KeyFunction | None
    """The group of a call. By default, calls have none.

    Give a template or a function, as in `lock_key` (``"tenant:{tenant_id}"``). Groups that wait for the
    same key take turns. Within a group the order is first come, first served. Calls without a group
    form one group. See docs/groups.md.
    """
    lock_group_limit: LimitSource
    """How many runs of one group may hold the key at once. By default, any number."""
    lock_rate: RateSource
    """How many runs may begin in any window of time, over all workers. By default, any number.

    ``"10/m"`` is 10 runs in a minute (``s``, ``m`` or ``h``), and so is ``(10, 60)``. `lock_limit`
    applies too: with ``None`` any number may run at once. See docs/rates.md.
    """
    lock_ttl: int
    """The lease, in seconds. The default is 30.

    If a worker is cut off from the lock server, its locks are free after this time.
    """
    lock_timeout: float | None
    """How long the task waits for the lock, in seconds. The default is 5 in a slot, 1500 in the
    consumer.

    ``0`` tries once, ``None`` waits without end. The plugin rounds it up to whole seconds in the
    consumer, and wherever the task keeps its position (see `lock_requeue`). If a server does not
    answer within this time and two more seconds, ``dflock_unavailable`` applies.
    """
    lock_wait: Wait | None
    """Where the task waits for the lock. The default is the setting ``dflock_wait``.

    Give ``"slot"``, which that setting has if you do not set it, or ``"consumer"``. A slot is a process
    of the worker's pool, which does nothing else meanwhile. In the consumer hundreds of tasks can wait.
    See docs/waiting.md.
    """
    lock_conflict: Conflict | ConflictFunction
    """What happens if the lock is not granted in time. The default is ``"requeue"``.

    ``"requeue"`` sends the task again after a pause. ``"skip"`` ends it with a `Skipped` result.
    ``"fail"`` fails it with `LockNotAcquiredError`. A function ``(task, error)`` returns one of these
    words or the result of the task, or raises.

    With ``"supersede"`` the newest task wins: the holder is interrupted with `SupersededError`, older
    waiters are skipped, and a task that still gets no lock in time is requeued. Write
    ``("supersede", "skip")`` or ``("supersede", "fail")`` to end it instead. ``"newest"`` does the
    same, but the holder runs to its end: of those that wait only the newest stays. See
    docs/supersede.md.
    """
    lock_requeue: RequeueOptions
    """The pauses of ``"requeue"``, a dict; see `celery_dflock.options.Backoff`.

    The task keeps its position in the queue during a pause, and the lock stays reserved for a while
    if its turn comes before it is back.
    """
    lock_lost: Lost | LostFunction
    """What happens if the lock is lost while the body runs. The default is ``"raise"``.

    ``"raise"`` raises `LockLostError` in the body, ``"warn"`` only logs an error. A function
    ``(task, lock)`` runs on the renewal thread and must not block. Nothing happens while it is in
    doubt whether the lock is lost.
    """
    lock_unique: Unique | None
    """Whether a call sends the task while another one with the same name and `lock_key` is on its way.

    ``None``, the default, always sends it. Otherwise the other one counts until it has the lock and
    begins (``"until_executing"``), until it has ended, retries included (``"until_executed"``), or for
    `lock_unique_ttl` seconds whatever happens to it (``"until_expired"``).

    A call is always sent if no lock server answers, or if its result matters to others: in a chain,
    group or chord, with callbacks, or with a task id that you chose. See docs/unique.md.
    """
    lock_unique_ttl: int
    """Seconds after which a task that has not begun no longer counts, because its message may have
    been purged. The default is 3600. At most the server's ``--max-lease-ttl``.
    """
    lock_duplicate: Duplicate
    """What happens to the second task. The default is ``"coalesce"``.

    ``"coalesce"`` returns the result of the first, ``"raise"`` raises `DuplicateTaskError`, ``"skip"``
    returns a `Skipped` result that is ready, and ``"replace"`` sends the second and revokes the first
    unless it runs. ``"replace"`` cannot be combined with ``"until_expired"``.
    """


OPTIONS = tuple(TaskOptions.__annotations__)
"""Their names."""

OF_LOCK = ("limit", "rate", "group", "group_limit", "weight")
"""Those that a `Lock` has for itself, without ``lock_``."""

BOUNDING = ("lock_key", *(f"lock_{name}" for name in OF_LOCK))
"""Those that say what is locked, how many may have it, and how much of that a run takes."""


@dataclass(frozen=True, slots=True)
class Backoff:
    """The pauses of a requeued task; times in seconds.

    A pause is random ("full jitter"): up to `base` seconds, doubled with each attempt, and at most
    `cap`. (https://aws.amazon.com/blogs/architecture/exponential-backoff-and-jitter) A worker holds
    a message with a countdown unacknowledged, so no pause is longer than half of the time for which
    the broker waits; see docs/brokers.md.

    During the pause the task keeps its position in the queue of its lock, if ``lock_conflict`` is
    the word ``"requeue"`` and there is one key; see docs/waiting.md.
    """

    base: float = 1.0
    cap: float = 30.0
    max_wait: float = 3600.0
    """Seconds since the first conflict after which the task fails; 0 never. Outages do not count.

    By the time of day, which the workers' clocks have to agree on: the message carries it.
    """
    max_attempts: int = 0
    """Number of conflicts after which the task fails; 0 never."""
    hold: float | None = 0.0
    """If the task's turn comes during the pause, the lock is reserved for it from so many seconds
    before the end of the pause until as many after it. ``None`` keeps no position at all."""

    def pause(self, attempt: int, chance: float) -> float:
        """Return the seconds before attempt number `attempt` + 1; `chance` is from 0 to 1."""
        return chance * min(self.cap, self.base * 2.0 ** min(attempt, 32))

    def is_over(self, attempts: int, waited: float) -> bool:
        """Whether it is time to give up."""
        too_many = bool(self.max_attempts) and attempts >= self.max_attempts
        return too_many or bool(self.max_wait and waited >= self.max_wait)


@dataclass(frozen=True, slots=True)
class LockOptions:
    """The options of one task, or of one call of it."""

    keys: tuple[KeyTemplate | KeyFunction, ...] | None
    bounds: tuple[Bounds, ...]
    """Of each of these keys, or of the default one."""
    limits: Limits | None
    """Of all keys of all calls; ``None`` if they have several, or are made of the arguments."""
    group: KeyTemplate | KeyFunction | None
    """What takes turns with others at each key, if `limits` are those of all keys."""
    is_rated: bool
    """Whether calls may have a rate."""
    ttl: int
    timeout: float | None
    """Seconds to wait in a worker slot."""
    queue_timeout: float | None
    """Seconds to wait in the consumer."""
    wait: str | None
    """Where to wait; ``None`` is for the app to say."""
    conflict: str | ConflictFunction
    supersedes: bool
    """Whether the newest wins; what is not granted in time even so is for `conflict` to say."""
    interrupts: bool
    """Whether the newest also interrupts who runs."""
    requeue: Backoff
    lost: str | LostFunction
    unique: str | None
    unique_ttl: int
    duplicate: str
    parameters: Parameters

    @classmethod
    def of(
        cls,
        task: type[Task],
        given: Mapping[str, Any] = MappingProxyType({}),
        usual: LockOptions | None = None,
    ) -> LockOptions:
        """Read the options of a task class, or of a call of it.

        Args:
            task: the class.
            given: the options that the call sets itself, in its message header.
            usual: those of calls that set none, if they are known: the task's function is not examined
                again.

        Raises:
            ImproperlyConfigured: an option is unknown or its value is bad; one line names it.
        """
        for name in given:
            if name not in OPTIONS:
                raise ImproperlyConfigured(
                    f"task {task.name}: a call names the option {name}: give {_one_of(name, OPTIONS)}"
                )
        values = _Values(task, given)
        if usual is None:
            _refuse_unknown(task)
            parameters = Parameters(_signature(task))
        else:
            parameters = usual.parameters
        timeout = _timeout(values)
        if usual is None or any(option in given for option in BOUNDING):
            sources, bounds = _locks(values, parameters.signature)
        else:
            sources, bounds = usual.keys, usual.bounds
        one = bounds[0] if len(set(map(id, bounds))) == 1 and bounds[0].is_fixed else None
        if values["lock_unique"] == "until_expired" and values["lock_duplicate"] == "replace":
            raise values.bad("lock_duplicate", "another with until_expired: each would be sent")
        conflict, newest = _conflict(values, bounds)
        return cls(
            keys=sources,
            bounds=bounds,
            limits=None if one is None else one.limits({}),
            group=None if one is None else one.group,
            is_rated=any(each.source("rate") is not None for each in bounds),
            ttl=values.whole("lock_ttl", MAX_SECONDS),
            timeout=timeout,
            queue_timeout=QUEUE_TIMEOUT if isinstance(timeout, Unchosen) else timeout,
            wait=None if values["lock_wait"] is None else values.word("lock_wait", WAIT),
            conflict=conflict,
            supersedes=newest is not None,
            interrupts=newest == SUPERSEDE,
            requeue=_backoff(values),
            lost=values.choice("lock_lost", LOST),
            unique=None if values["lock_unique"] is None else values.word("lock_unique", UNIQUE),
            unique_ttl=values.whole("lock_unique_ttl", MAX_SECONDS),
            duplicate=values.word("lock_duplicate", DUPLICATE),
            parameters=parameters,
        )

    def keys_of(self, task: Task, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
        """Return the keys of one call, without the app's prefix, as they are named.

        Raises:
            LockKeyError: the arguments make none.
            TypeError: the arguments do not fit the task.
        """
        if self.keys is None:
            return [default_key(task.name, self.parameters.bind(args, kwargs))]
        made = self._make(self.keys[0], task, args, kwargs)
        for source in self.keys[1:]:
            made += self._make(source, task, args, kwargs)
        return made

    def only_key(self) -> Callable[[tuple[Any, ...], dict[str, Any]], str] | None:
        """Return what makes the key of a call, without the app's prefix, where that is one argument.

        That is ``"account:{account_id}"``, as nearly all are. If it raises, call `keys_of`,
        which raises the proper error.
        """
        if self.keys is None or len(self.keys) != 1:
            return None
        [template] = self.keys
        if not isinstance(template, KeyTemplate) or template.only is None:
            return None
        pick, fill = self.parameters.picker(template.only), template.fill
        return lambda args, kwargs: fill(pick(*args, **kwargs))

    def wanted(
        self, task: Task, args: tuple[Any, ...], kwargs: dict[str, Any], prefix: str
    ) -> list[Wanted]:
        """Return the locks of one call, in the order in which they are taken; see `in_order`.

        Args:
            task: the task.
            args: the positional arguments of the call.
            kwargs: its keyword arguments.
            prefix: the prefix of the app's keys.

        Raises:
            ImproperlyConfigured: a limit that the arguments make is bad; one line names it.
            LockKeyError: the arguments make no key, no limit or no group.
            TypeError: the arguments do not fit the task.
        """
        found: dict[LockKey, Wanted] = {}
        made: dict[int, tuple[Limits, LockKey | None]] = {}
        """Of each set of bounds, which several keys may share."""
        for source, bounds in zip(self.keys or (None,), self.bounds, strict=True):
            if id(bounds) not in made:
                made[id(bounds)] = self._limits_and_group(bounds, task, args, kwargs)
            limits, group = made[id(bounds)]
            several = None if source is None else self._make(source, task, args, kwargs)
            for text in several or self.keys_of(task, args, kwargs):
                wanted = Wanted(finish(text, prefix), limits, group)
                if found.setdefault(wanted.key, wanted) != wanted:
                    why = "lock_key gives it twice, and not with the same limits: give it once"
                    raise LockKeyError(wanted.key, why)
        return in_order(found.values())

    def _limits_and_group(
        self, bounds: Bounds, task: Task, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Limits, LockKey | None]:
        def value_of(name: str, source: Made) -> Any:
            if isinstance(source, KeyTemplate):
                return read_value(self._make(source, task, args, kwargs, bounds.named(name))[0])
            return source(task, args, kwargs)

        limits = bounds.limits({name: value_of(name, each) for name, each in bounds.made.items()})
        if bounds.group is None:
            return limits, None
        option = bounds.named("group")
        return limits, self.make_group(bounds.group, task, args, kwargs, option)

    def make_group(
        self,
        source: KeyTemplate | KeyFunction,
        task: Task,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        option: str = "lock_group",
    ) -> LockKey:
        """Return the group of one call.

        Raises:
            LockKeyError: the arguments make none.
            TypeError: the arguments do not fit the task.
        """
        made = self._make(source, task, args, kwargs, option)
        if len(made) != 1:
            raise LockKeyError(task.name, f"{option} returned {shown(made)}, not a text")
        return finish(made[0])

    def _make(
        self,
        source: KeyTemplate | KeyFunction,
        task: Task,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        option: str = "lock_key",
    ) -> list[str]:
        if isinstance(source, KeyTemplate):
            arguments = self.parameters.bind(args, kwargs)
            try:
                return [source.render(arguments)]
            except Exception as exc:  # an argument may have a format of its own
                why = f"{option} does not fit the arguments: {exc!r}"
                raise LockKeyError(task.name, why) from exc
        made = source(task, args, kwargs)
        several = [made] if isinstance(made, str) else made
        if (
            not isinstance(several, list | tuple)
            or not several
            or not all(isinstance(key, str) and key for key in several)
        ):
            raise LockKeyError(
                task.name, f"{option} returned {shown(made)}, not a text or a list of texts"
            )
        return [encode(key) for key in several]


@dataclass(frozen=True, slots=True)
class _Values:
    """Where the values of the options come from: the task, and before it the call."""

    task: type[Task]
    given: Mapping[str, Any]

    def __getitem__(self, option: str) -> Any:
        if option in self.given:
            return self.given[option]
        # Looked up without binding: a function in a class would become a method.
        value = inspect.getattr_static(self.task, option)
        return value.__func__ if isinstance(value, staticmethod) else value

    def whole(self, option: str, most: int) -> int:
        value: int = self[option]
        if not is_whole(value, 1, most):
            what = "whole seconds" if most == MAX_SECONDS else "a whole number"
            raise self.bad(option, f"{what}, 1 or more")
        return value

    def choice(self, option: str, known: tuple[str, ...]) -> Any:
        value = self[option]
        return value if callable(value) else self.word(option, known)

    def word(self, option: str, known: tuple[str, ...]) -> str:
        value: str = self[option]
        if value not in known:
            raise self.bad(option, _one_of(value, known))
        return value

    def bad(self, option: str, wanted: str) -> ImproperlyConfigured:
        return _bad(self.task, option, self[option], wanted)


def _bad(task: type[Task], option: str, value: object, wanted: str) -> ImproperlyConfigured:
    return ImproperlyConfigured(f"task {task.name}: {option} is {shown(value)}: give {wanted}")


def _conflict(
    values: _Values, bounds: Sequence[Bounds]
) -> tuple[str | ConflictFunction, str | None]:
    """Return what happens to a task that gets no lock in time, and by which word the newest wins."""
    given = values["lock_conflict"]
    if given not in NEWEST and not isinstance(given, list | tuple):
        return values.choice("lock_conflict", (*CONFLICT, *NEWEST)), None
    words = (given, "requeue") if given in NEWEST else tuple(given)
    if len(words) != 2 or words[0] not in NEWEST or words[1] not in CONFLICT:
        then = " or ".join(map(repr, CONFLICT))
        known = ", ".join((*CONFLICT, *NEWEST))
        first = " or ".join(map(repr, NEWEST))
        raise values.bad("lock_conflict", f"one of {known}, or a pair: {first}, and {then}")
    since = f"since lock_conflict is {words[0]!r}"
    if len(bounds) > 1:
        raise values.bad("lock_key", f"one key, {since}")
    [one] = bounds
    if one.source("limit") != 1:
        raise one.bad("limit", one.source("limit"), f"1, {since}")
    if one.group is not None:
        raise one.bad("group", one.group, f"None, {since} and only one waits")
    return words[1], words[0]


def _locks(
    values: _Values, signature: inspect.Signature
) -> tuple[tuple[KeyTemplate | KeyFunction, ...] | None, tuple[Bounds, ...]]:
    """Return what makes the keys, and the bounds of each of them: those of the task, or its own."""
    given = values["lock_key"]
    several = given if isinstance(given, list | tuple) else (given,)
    if not several:
        raise values.bad("lock_key", "at least one key, or None for the task's name and arguments")
    usual = Lock("", **{name: values[f"lock_{name}"] for name in OF_LOCK})
    of_task = _bounds(values, signature, usual, "lock_{}", "lock_")
    if all(isinstance(lock, Lock) for lock in several):
        for name in OF_LOCK:
            if getattr(usual, name) not in (None, 1):
                wanted = "it to each Lock of lock_key: they take nothing from the task"
                raise of_task.bad(name, getattr(usual, name), wanted)
    bounds = [
        _bounds(values, signature, lock, f"lock_key: {{}} of Lock({lock.key!r})", "")
        if isinstance(lock, Lock)
        else of_task
        for lock in several
    ]
    if given is None:
        return None, tuple(bounds)
    keys = (lock.key if isinstance(lock, Lock) else lock for lock in several)
    return tuple(_key(values, signature, key) for key in keys), tuple(bounds)


def _bounds(
    values: _Values, signature: inspect.Signature, lock: Lock, name: str, prefix: str
) -> Bounds:
    """Return the bounds that a lock is given, checked as far as they are known before any call.

    Args:
        values: the values of the task.
        signature: the signature of its function.
        lock: the lock that has the bounds.
        name: how errors call an option, with ``{}`` for its short name.
        prefix: what the other names begin with in errors.
    """

    def named(option: str) -> str:
        return name.replace("{}", option, 1)

    def bad(option: str, value: object, wanted: str) -> ImproperlyConfigured:
        return _bad(values.task, named(option), value, wanted.replace("{0}", prefix))

    def source(option: str, value: Any) -> Any:
        if is_template(value):
            return _template(values, signature, value, named(option))
        return value

    names = [name for name in OF_LOCK if name != "group"]
    sources = {name: source(name, getattr(lock, name)) for name in names}
    found = Bounds(
        {name: value for name, value in sources.items() if not is_made(value)},
        {name: value for name, value in sources.items() if is_made(value)},
        None if lock.group is None else _key(values, signature, lock.group, named("group")),
        bad,
        named,
    )
    found.check()
    return found


def _timeout(values: _Values) -> float | None:
    timeout = values["lock_timeout"]
    if timeout is None or (is_number(timeout) and 0 <= timeout <= MAX_SECONDS):
        seconds: float | None = timeout
        return seconds
    raise values.bad("lock_timeout", "seconds, 0 or more, or None to wait without end")


def _signature(task: type[Task]) -> inspect.Signature:
    run, is_bound = _run(task)
    signature = signatures.signature(run)
    parameters = list(signature.parameters.values())
    if is_bound and parameters and parameters[0].kind is not inspect.Parameter.VAR_POSITIONAL:
        del parameters[0]
    return signature.replace(parameters=parameters)


def _run(task: type[Task]) -> tuple[Callable[..., Any], bool]:
    """Return the task's function, and whether it is given the task as its first argument."""
    run = inspect.getattr_static(task, "run")
    return (run.__func__, False) if isinstance(run, staticmethod) else (run, True)


def _key(
    values: _Values, signature: inspect.Signature, key: Any, option: str = "lock_key"
) -> KeyTemplate | KeyFunction:
    if isinstance(key, LockKey):
        return lambda task, args, kwargs: key
    if isinstance(key, str):
        return _template(values, signature, key, option)
    if callable(key):
        function: KeyFunction = key
        return function
    wanted = "a template over the arguments or a function (task, args, kwargs) -> key"
    raise _bad(values.task, option, key, wanted)


def _template(values: _Values, signature: inspect.Signature, text: str, option: str) -> KeyTemplate:
    try:
        template = KeyTemplate(text, signature)
        signatures.refuse_hidden(_run(values.task)[0], template.arguments)
        return template
    except ValueError as exc:
        name = values.task.name
        raise ImproperlyConfigured(f"task {name}: {option} {text!r}: {exc}") from None


def _backoff(values: _Values) -> Backoff:
    given = values["lock_requeue"]
    known = tuple(Backoff.__dataclass_fields__)
    if not isinstance(given, Mapping):
        raise values.bad("lock_requeue", f"a dict of {', '.join(known)}")
    for name, value in given.items():
        if name not in known:
            raise values.bad("lock_requeue", _one_of(name, known))
        if value is None and name == "hold":
            continue
        if not (is_number(value) and 0 <= value <= MAX_SECONDS):
            also = ", or None" if name == "hold" else ""
            raise values.bad("lock_requeue", f"a number, 0 or more{also}, for {name}")
    return Backoff(**given)


def _refuse_unknown(task: type[Task]) -> None:
    # Only near misses: a task may have attributes of its own that begin with lock_.
    for name in dir(task):
        if name.startswith("lock_") and name not in OPTIONS and not _is_ours(task, name):
            near = difflib.get_close_matches(name, OPTIONS, 1, 0.8)
            if near:
                raise ImproperlyConfigured(
                    f"task {task.name}: there is no option {name}: did you mean {near[0]}?"
                )


def _is_ours(task: type[Task], name: str) -> bool:
    """Whether an attribute of a task is a method of `LockedTask`."""
    module = getattr(inspect.getattr_static(task, name), "__module__", "")
    return module == "celery_dflock.task"


def _one_of(value: object, known: tuple[str, ...]) -> str:
    near = difflib.get_close_matches(str(value), known, 1)
    return f"one of {', '.join(known)}" + (f" (did you mean {near[0]}?)" if near else "")
