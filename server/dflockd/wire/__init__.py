"""The wire format: bytes in, messages out, and back.

Sans-I/O: nothing here opens a socket, reads a clock, starts a thread or knows asyncio. It is the
only code that knows the format and its limits; the server and both clients stand on it.

A request is three lines (command, key, argument), a reply is one line, and there is exactly one
reply to each request, in order.
"""

from dflockd.wire.messages import (
    MAX_LIMIT,
    MAX_LINE,
    MAX_REF,
    MAX_SECONDS,
    MAX_SECRET,
    Acquire,
    Auth,
    Barrier,
    Enqueue,
    Enqueued,
    Evict,
    Granted,
    Inspect,
    Label,
    Malformed,
    Ping,
    Release,
    Renew,
    Renewed,
    Reply,
    Report,
    Request,
    Space,
    StableRef,
    Stats,
    Status,
    Wait,
)
from dflockd.wire.replies import (
    ReplyReader,
    UnexpectedReplyError,
    encode_reply,
    parse_done,
    parse_enqueued,
    parse_granted,
    parse_renewed,
    parse_report,
)
from dflockd.wire.requests import FrameTooLongError, RequestReader, encode_request, key_problem
from dflockd.wire.tokens import fence_from_token, format_token

__all__ = [
    "MAX_LIMIT",
    "MAX_LINE",
    "MAX_REF",
    "MAX_SECONDS",
    "MAX_SECRET",
    "Acquire",
    "Auth",
    "Barrier",
    "Enqueue",
    "Enqueued",
    "Evict",
    "FrameTooLongError",
    "Granted",
    "Inspect",
    "Label",
    "Malformed",
    "Ping",
    "Release",
    "Renew",
    "Renewed",
    "Reply",
    "ReplyReader",
    "Report",
    "Request",
    "RequestReader",
    "Space",
    "StableRef",
    "Stats",
    "Status",
    "UnexpectedReplyError",
    "Wait",
    "encode_reply",
    "encode_request",
    "fence_from_token",
    "format_token",
    "key_problem",
    "parse_done",
    "parse_enqueued",
    "parse_granted",
    "parse_renewed",
    "parse_report",
]
