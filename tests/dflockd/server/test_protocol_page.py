"""What docs/protocol.md says of fields and shows in bytes is what the server does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dflockd.wire import Malformed
from tests.dflockd.raw_server import StartServer
from tests.dflockd.wire.frames import read

PAGE = (Path(__file__).parents[3] / "docs" / "protocol.md").read_text()

EXCHANGE = re.compile(
    r"(\d+) requests?, (\d+) bytes sent, (\d+) received\.\n\n```text\n(.*?)```", re.DOTALL
)

FIELDS = dict(re.findall(r"^\| `([a-z-]+)` \| ([^|]+) \|", PAGE.partition("## Fields")[2], re.M))

VALUES = {"rate": "1/1", "how": "begun", "limit": "2"}

NEEDED = {"acquire": "timeout", "wait": "timeout", "renew": "token", "hello": "version"}

TOGETHER = {
    "attempt": "owner",
    "age": "owner",
    "group-limit": "group",
    "away": "hold",
    "hold": "away",
    "weight": "limit",
}


def test_the_exchanges_are_real(start_server: StartServer) -> None:
    server = start_server("--auth-token", "open sesame")
    found = EXCHANGE.findall(PAGE)
    assert len(found) == 5
    client, holder = server.connect(), server.connect()
    assert holder.ask("auth", "_", "open sesame") == "ok"
    held = holder.lock("busy")
    for number, bytes_sent, bytes_received, text in found:
        known: dict[str, str] = {}
        sent = received = requests = 0
        for line in text.splitlines():
            way, said = line[:3], line[3:]
            if way == "-> ":
                if "ticket=" in said:
                    assert holder.ask("r", "busy", held) == "ok"
                for name, value in known.items():
                    said = said.replace(name, value)
                frame = said.replace("|", "\n") + "\n"
                client.send(frame.encode())
                requests, sent = requests + 1, sent + len(frame)
            else:
                answer = client.line()
                received += len(answer) + 1
                pattern = re.sub("TOKEN|TICKET", r"(?P<\g<0>>[0-9a-f]{32})", re.escape(said))
                matched = re.fullmatch(pattern, answer)
                assert matched is not None, (said, answer)
                known |= matched.groupdict()
        assert (requests, sent, received) == (int(number), int(bytes_sent), int(bytes_received))


@pytest.mark.parametrize("request_", ["acquire", "enqueue", "wait", "renew", "hello"])
def test_the_table_has_the_fields_of_each_request(request_: str) -> None:
    for field, where in FIELDS.items():
        parts = [re.findall(r"\w+", part) for part in where.split(";")]
        of_request = next((words for words in parts if request_ in words), None)
        is_said, names = of_request is not None, [NEEDED.get(request_, ""), field]
        words = of_request or re.findall(r"\w+", where)
        if "with" in words and (not is_said or field in ("away", "hold", "weight")):
            names.append(TOGETHER[field])
            is_said |= request_ in FIELDS[TOGETHER[field]]
        last = sorted({*names} - {""}, key=lambda name: name in ("label", "secret"))
        argument = " ".join(f"{name}={VALUES.get(name, '1')}" for name in last)
        [request], _ = read(f"{request_}\nk\n{argument}\n".encode())
        if request_ == "hello":
            # It passes over what it does not know.
            assert is_said == (field in ("version", "secret"))
            assert not isinstance(request, Malformed)
        else:
            assert isinstance(request, Malformed) is not is_said, (request_, argument)
