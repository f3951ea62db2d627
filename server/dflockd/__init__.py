"""dflockd: a small lock server with FIFO locks, leases and fences, and its clients.

Programs take locks with `dflockd.sync_client` or `dflockd.client` (asyncio). `dflockd.sharding` spreads
keys over several servers. ``python -m dflockd`` runs the server.

Attributes:
    compiled: whether the modules on the path of a lock request are compiled to machine code in this
        installation.
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    compiled: bool

_ON_THE_PATH = (
    "dflockd.server.handling",
    "dflockd.server.server",
    "dflockd.server.session",
    "dflockd.table.requests",
    "dflockd.table.slots",
    "dflockd.table.table",
    "dflockd.wire.reader",
    "dflockd.wire.replies",
)


def __getattr__(name: str) -> Any:
    if name == "compiled":
        return _is_compiled()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _is_compiled() -> bool:
    # Not at the import: clients need neither these modules nor the answer.
    from importlib import import_module
    from importlib.machinery import EXTENSION_SUFFIXES

    for name in _ON_THE_PATH:
        try:
            module = import_module(name)
        except ModuleNotFoundError:
            continue  # On Windows there is no server: it lacks fcntl.
        if not (module.__file__ or "").endswith(tuple(EXTENSION_SUFFIXES)):
            return False
    return True
