"""The asyncio server: sockets in front of the lock table."""

from dflockd.server.server import Server, ServerOptions

__all__ = ["Server", "ServerOptions"]
