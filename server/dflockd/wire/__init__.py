"""The wire format: bytes in, messages out, and back.

Sans-I/O: nothing here opens a socket, reads a clock, starts a thread or knows asyncio. It is the
only code that knows the format and its limits; the server and both clients stand on it.

A request is three lines (command, key, argument), a reply is one line, and there is exactly one
reply to each request, in order.
"""

# What is imported here is what is offered.
# ruff: noqa: F401
# mypy: implicit-reexport

from dflockd.wire.documents import read_json
from dflockd.wire.keys import key_problem
from dflockd.wire.maps import MapReport, decode_map, encode_map
from dflockd.wire.messages import (
    ALL,
    FEATURES,
    MAX_AGE,
    MAX_ATTEMPT,
    MAX_LIMIT,
    MAX_LINE,
    MAX_OWNER,
    MAX_RATE,
    MAX_SECONDS,
    MAX_SECRET,
    UNLIMITED,
    Acquire,
    Aged,
    Auth,
    Barrier,
    DrawAge,
    Enqueue,
    Enqueued,
    Evict,
    FairGroup,
    Find,
    Granted,
    Hello,
    How,
    Identify,
    Inspect,
    Listen,
    Malformed,
    Moved,
    Next,
    Owner,
    OwnerConflict,
    Pass,
    Pause,
    Ping,
    Queued,
    Rate,
    Recovering,
    Refusal,
    Release,
    Renew,
    Renewed,
    Reply,
    Report,
    Request,
    Reserve,
    Resume,
    Shards,
    Space,
    StableRef,
    Stats,
    Status,
    Superseded,
    TimedOut,
    Unbegun,
    Unwelcome,
    Wait,
    Welcome,
    YourTurn,
)
from dflockd.wire.reader import FrameTooLongError, RequestReader
from dflockd.wire.replies import (
    ENQUEUED,
    GRANTED,
    ReplyReader,
    UnexpectedReplyError,
    encode_reply,
    parse_aged,
    parse_done,
    parse_enqueued,
    parse_granted,
    parse_hello,
    parse_map,
    parse_renewed,
    parse_report,
    parse_turn,
    read_grant,
)
from dflockd.wire.requests import encode_release, encode_request
from dflockd.wire.tokens import fence_from_token, format_token
