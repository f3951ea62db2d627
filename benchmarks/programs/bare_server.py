"""A server that answers without looking: the floor under any server in Python on this machine.

It speaks just enough for the load: a request that begins with ``l`` gets a grant, any other ``ok``.
"""

import asyncio
import sys

import uvloop

GRANT = b"ok 00000000000000010000000000000001 33\n"


class Bare(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._write = transport.write  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        self._write(GRANT if data[0] == 108 else b"ok\n")


async def main() -> None:
    server = await asyncio.get_running_loop().create_server(Bare, "127.0.0.1", 0)
    print(f"listening on 127.0.0.1:{server.sockets[0].getsockname()[1]}", file=sys.stderr)
    await server.serve_forever()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
