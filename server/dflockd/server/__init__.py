"""The asyncio server: sockets in front of the lock table."""

from dflockd.server.admission import Admission, Guest
from dflockd.server.listener import Listener, listen
from dflockd.server.log import SparingLog
from dflockd.server.options import ServerOptions
from dflockd.server.server import Server
from dflockd.server.slices import Slices
from dflockd.server.tls import TlsContext

__all__ = [
    "Admission",
    "Guest",
    "Listener",
    "Server",
    "ServerOptions",
    "Slices",
    "SparingLog",
    "TlsContext",
    "listen",
]
