"""Errors without the frames that they came through.

An error refers to those frames, and a frame to that of its caller. A frame that keeps the error, as
what came in place of a reply or what an earlier attempt died of, closes the circle. The lock object
of a caller is in it: its owner forgets it, and the lock stays held until Python looks for circles.
"""

from __future__ import annotations

from typing import TypeVar

E = TypeVar("E", bound=BaseException)


def without_frames(error: E) -> E:
    """Take the tracebacks from an error and from those that it was raised for; return it."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        link.__traceback__ = None
        link = link.__cause__ or link.__context__
    return error
