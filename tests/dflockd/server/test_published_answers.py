"""What the published requests are answered, word for word: foreign clients compare exactly."""

from __future__ import annotations

import re

import pytest

from tests.dflockd.raw_server import StartServer

# Who asks, the three lines (a dot is an empty one), and the answer. <name> is a token, and
# <fence:name> the number in it.
CONVERSATION = """
a  ping . .                    ok
a  barrier . .                 ok
a  l k 0                       ok <one> 33
b  l k 0                       timeout
b  l k 1                       timeout
a  n k <one>                   ok 33
b  n k <one> 60                ok 60
b  n k <one> 3601              error
b  n k <one> 0                 error
b  n k <one> 1 1               error
b  n k abc                     error
b  r k abc                     error
b  r other <one>               error
b  sr k <one>                  error
b  sn k <one>                  error
b  r k <one>                   ok
b  r k <one>                   error
a  n k <one>                   error
a  l k 0 7                     ok <two> 7
a  r k <two>                   ok
a  l k 0 3600                  ok <two> 3600
a  r k <two>                   ok
a  l k 0 3601                  error
a  l k .                       error
a  l k -1                      error
a  l k +1                      error
a  l k 1.5                     error
a  l k 00000000001             error
a  l k 9223372037              error
a  l k 0 0                     error
a  l k 0 1 1                   error
a  l k 0 10/60000              error
a  l k 0 30 10/60000           error
a  l k timeout=0               error
a  sl k 0                      error
a  sl k 0 0                    error
a  sl k 0 1048577              error
a  sl k 0 3 10/60000           error
a  e k 10/60000                error
a  e k junk                    error
a  se k .                      error
a  w k .                       error
a  w k 0 0                     error
a  r k .                       error
a  x k 0                       error
a  L k 0                       error
a  acquire k .                 error
a  e two .                     acquired <one> 33
a  e two .                     error_already_enqueued
b  e two 20                    queued
b  e two 20                    error_already_enqueued
a  w two 0                     ok <one> 33
a  w two 0                     error_not_enqueued
b  w two 0                     timeout
b  w two 0                     error_not_enqueued
b  e two 20                    queued
a  r two <one>                 ok
b  w two 5                     ok <two> 20
b  evict two 1                 error
b  sevict two <fence:two>      error
b  evict two <fence:two>       ok
b  n two <two>                 error
b  r two <two>                 error
a  sl s 0 2                    ok <one> 33
a  sl s 0 2 9                  ok <two> 9
b  sl s 0 2                    timeout
b  sl s 0 3                    error_limit_mismatch
b  se s 1                      error_limit_mismatch
b  se s 2 8                    queued
b  se s 2                      error_already_enqueued
b  l s 0                       ok <lock> 33
b  sr s <lock>                 error
b  r s <one>                   error
b  sn s <one> 5                ok 5
a  sr s <one>                  ok
b  sw s 5                      ok <three> 8
b  sevict s <fence:three>      ok
b  sr s <three>                error
b  sr s <two>                  ok
b  sl s 0 3                    ok <two> 33
a  auth . secret               error
a  stable-ref . .              error
a  stable-ref me .             ok
a  stable-ref me .             error
a  shards . .                  error
a  identify . abc              error
b  find _ nowhere              ok {"matched": 0, "found": []}
b  find some nowhere           error
"""


def spoken(text: str, tokens: dict[str, str]) -> str:
    """Put what is known of tokens into a line."""
    text = re.sub(r"<fence:(\w+)>", lambda found: str(int(tokens[found[1]][:16], 16)), text)
    return re.sub(r"<(\w+)>", lambda found: tokens[found[1]], text)


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("greets", [False, True])
def test_as_published(start_server: StartServer, end: str, greets: bool) -> None:
    """Who has said hello is answered the same."""
    server = start_server()
    clients = {name: server.connect() for name in "ab"}
    tokens: dict[str, str] = {}
    for client in clients.values():
        assert not greets or client.ask("hello", "me", "version=1").startswith("hello ok ")
    for line in CONVERSATION.strip().splitlines():
        who, command, key, *rest = line[:31].split()
        argument, answer = " ".join(rest), line[31:]
        lines = [command, *("" if each == "." else each for each in (key, argument))]
        clients[who].send(spoken(end.join(lines) + end, tokens).encode())
        said = clients[who].line()
        grant = re.fullmatch(r"(ok|acquired) <(\w+)> (\d+)", answer)
        if grant is None:
            assert said == answer, line
        else:
            found = re.fullmatch(rf"{grant[1]} ([0-9a-f]{{32}}) {grant[3]}", said)
            assert found is not None, (line, said)
            tokens[grant[2]] = found[1]
