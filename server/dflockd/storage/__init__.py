"""What outlives the process: the state directory and the journal of holds in it.

- `directory`: what a server must know to go on; `state_file`: the few facts that come first.
- `journal` writes; `segment` is one of its files, `records` are what is in them.
- `reading`: what may be believed of what was left, and what is damage.
- `syncing`: the thread that brings it to the disk. `disk`: all that is asked of the system.
"""

from dflockd.storage.directory import StateDir, StateError
from dflockd.storage.journal import SEGMENT, Journal

__all__ = ["SEGMENT", "Journal", "StateDir", "StateError"]
