"""dflockd: a small lock server with FIFO locks, leases and fences, and its clients.

`dflockd.sync_client` and `dflockd.client` (asyncio) are for programs that lock, `dflockd.sharding` for
those with several servers, ``python -m dflockd`` is the server.

Attributes:
    compiled: whether the modules that a lock request goes through are compiled to machine code in this
        installation; else they are Python.
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    compiled: bool

_ON_THE_PATH = (
    "dflockd.server.handling",
    "dflockd.server.server",
    "dflockd.server.session",
    "dflockd.table.locking",
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
