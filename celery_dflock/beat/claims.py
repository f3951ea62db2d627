"""The claim on a firing: taken on the lock server before it is sent, released after."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from contextlib import suppress
from datetime import datetime
from typing import Any
from urllib.parse import unquote

from celery_dflock.beat.firing import Firing
from celery_dflock.config import Settings
from celery_dflock.keys import encode, finish
from celery_dflock.locks import MOMENT, try_once
from dflockd import errors
from dflockd.sync_client import DistributedLock

CLAIM_TTL = 3600
"""Seconds that a claim outlives the beat that made it: for so long a firing is not forgotten."""

_LABEL = re.compile(r"firing (?P<id>\S+) due (?P<due>\S+) of (?P<entry>\S+)")

logger = logging.getLogger("celery_dflock.beat")


class Claims:
    """The claims of the beats of one app. There is one at a time, since a beat sends one at a time.

    A claim is a hold that outlives its connection, so it tells the next leader what the last one
    did not finish.

    Args:
        key: the key of the beats' lock. Of a list of servers the one with this lock has the claims
            as well: a beat that leads needs no other.
        settings: the settings of the app.
    """

    def __init__(self, key: str, settings: Settings) -> None:
        self._key = key
        self._settings = settings
        self._token: str | None = None

    def take(self, firing: Firing) -> None:
        """Claim a firing.

        Raises:
            RemoteError: the server could not be asked.
        """
        claim = self._claim(_label(firing))
        try:
            if not try_once(claim):
                # Our own that could not be confirmed; or that of a beat that does not lead any more.
                self.clear()
                try_once(claim)
            self._token = claim.detach(CLAIM_TTL)
        except errors.RefusedError as exc:
            logger.warning("beat: firing %s is sent without a claim: %s", firing, exc)

    def confirm(self) -> None:
        """Release the claim: its firing has been sent, and the store remembers that."""
        token, self._token = self._token, None
        if token is None:
            return
        claim = self._claim("")
        try:
            if claim.adopt(token):
                claim.release()
        except errors.RemoteError as exc:
            logger.warning("beat: a claim could not be released, its firing may repeat: %s", exc)

    def leave(self) -> None:
        """Leave the claim to the next leader. A later `confirm` is about another firing."""
        self._token = None

    def left(self, names: Iterable[str]) -> Firing | None:
        """Return the claimed firing that the last leader did not finish, if any.

        Args:
            names: the names of the entries that there are.

        Raises:
            RemoteError: the server could not be asked.
        """
        for holder in self._holders():
            firing = self._firing_of(holder["label"], names)
            if firing is not None:
                return firing
            logger.warning("beat: cannot tell whether %r was sent", holder["label"])
        return None

    def clear(self) -> None:
        """End any claim.

        Raises:
            RemoteError: the server could not be asked.
        """
        claim = self._claim("")
        for holder in self._holders():
            claim.evict(holder["fence"])

    def _firing_of(self, label: str, names: Iterable[str]) -> Firing | None:
        found = _LABEL.fullmatch(label)
        if found is None:
            return None
        with suppress(ValueError):  # no time
            due = datetime.fromisoformat(found["due"])
            # A long name was cut to fit into the label: it is one of those that there are.
            for name in (unquote(found["entry"]), *names):
                firing = Firing(self._key, name, due)
                if firing.id == found["id"]:
                    return firing
        return None

    def _holders(self) -> list[dict[str, Any]]:
        holders: list[dict[str, Any]] = self._claim("").inspect()["holders"]
        return holders

    def _claim(self, label: str) -> DistributedLock:
        options = self._settings.connection_options()
        if not self._settings.is_cluster:
            server_of = options["sharding_strategy"]
            options["sharding_strategy"] = lambda _key, servers: server_of(self._key, servers)
        return DistributedLock(finish(f"{self._key}:claim"), 0, MOMENT, label=label, **options)


def _label(firing: Firing) -> str:
    return f"firing {firing.id} due {firing.due.isoformat()} of {encode(firing.entry)}"
