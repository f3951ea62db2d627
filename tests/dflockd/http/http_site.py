"""A real lock server with its HTTP side, and what asks it."""

from __future__ import annotations

import base64
import http.client
import json
from collections.abc import Callable
from typing import Any, NamedTuple
from urllib.parse import quote, urlencode, urlsplit

from tests.dflockd.raw_server import PATIENCE, RawClient, ServerProcess

SECRET = "a secret that nobody guesses"


class Answer(NamedTuple):
    status: int
    headers: http.client.HTTPMessage
    body: str

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def bearer(secret: str = SECRET) -> dict[str, str]:
    return {"Authorization": f"Bearer {secret}"}


def basic(name: str, secret: str = SECRET) -> dict[str, str]:
    both = base64.b64encode(f"{name}:{secret}".encode()).decode()
    return {"Authorization": f"Basic {both}"}


class Site:
    """The two ends of one server: the wire, and HTTP."""

    def __init__(self, server: ServerProcess, headers: dict[str, str] | None = None) -> None:
        self.server = server
        self.url = server.wait_for_log("live page: ")
        self.headers = headers or {}

    def ask(self, path: str, method: str = "GET", headers: dict[str, str] | None = None) -> Answer:
        """Send one request exactly as it is said here."""
        where = urlsplit(self.url)
        connection = http.client.HTTPConnection(where.hostname, where.port, timeout=PATIENCE)
        try:
            connection.request(method, path, headers={**self.headers, **(headers or {})})
            answer = connection.getresponse()
            return Answer(answer.status, answer.headers, answer.read().decode())
        finally:
            connection.close()

    def json(self, path: str, **query: object) -> Any:
        answer = self.ask(f"{path}?{urlencode(query)}" if query else path)
        assert answer.status == 200, answer
        return answer.json

    def lock(self, key: str, **query: object) -> Any:
        return self.json(f"/api/locks/{quote(key, safe='')}", **query)

    def metric(self, name: str, **labels: str) -> float:
        """The value of one sample."""
        from prometheus_client.parser import text_string_to_metric_families

        text = self.ask("/metrics").body
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if (sample.name, sample.labels) == (name, labels):
                    return sample.value
        raise AssertionError(f"no {name}{labels} in {text}")


StartSite = Callable[..., Site]


class Named(RawClient):
    """Says who asks, as our own clients do, with each request for a lock."""

    def __init__(self, client: RawClient, label: str, **said: object) -> None:
        super().__init__(client.sock)
        fields = [f"{name}={value}" for name, value in said.items()]
        self._said = " ".join([*fields, f"label={label}"])

    def request(self, command: str, key: str = "_", argument: object = "_") -> None:
        if command in ("l", "e"):
            names = ("timeout", "lease") if command == "l" else ("lease",)
            numbers = zip(names, str(argument).split(), strict=False)
            command = "acquire" if command == "l" else "enqueue"
            argument = " ".join([f"{name}={number}" for name, number in numbers] + [self._said])
        super().request(command, key, argument)


def named(site: Site, label: str, **said: object) -> Named:
    """Return a client of a site, with its secret if it has one."""
    client = site.server.connect()
    if "Authorization" in site.headers:
        assert client.ask("auth", "_", SECRET) == "ok"
    return Named(client, label, **said)
