"""Makes the key of a lock from a task's name and arguments.

The same call gives the same key in the publisher, in a worker and in eager mode. Arguments are data:
they may contain anything, and become no more than text in the key.
"""

from __future__ import annotations

import hashlib
import inspect
import re
import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from itertools import pairwise
from types import CodeType, FunctionType
from typing import Any, NamedTuple, TypeAlias

from kombu.utils import json

from celery_dflock.checks import refused
from celery_dflock.exceptions import LockKeyError
from celery_dflock.lock_key import LockKey
from dflockd.client.arguments import check_key

MAX_BYTES = 256
"""Longest key that the lock server takes; a longer one is cut and completed with a digest."""

DIGEST_DIGITS = 32

_CUT = re.compile(rb".{220,223}~[0-9a-f]{32}", re.DOTALL)
"""What a cut key looks like. A text that looks so is cut as well: it could be another's key."""

_SHORTEST_CUT = 220 + 1 + DIGEST_DIGITS
"""Bytes of the shortest text that looks so."""

_MISTAKABLE = re.compile("%(?=2[56])")
"""See `join`."""

KeyFunction: TypeAlias = Callable[[Any, tuple[Any, ...], dict[str, Any]], str]
"""``(task, args, kwargs) -> key``."""


class KeyTemplate(string.Formatter):
    """A template such as ``"account:{account_id}"`` over the arguments of a task.

    Values that differ make keys that differ: where a value contains the text that ends its field,
    that text is encoded. ``"{a}:{b}"`` is ``1%3A2:3`` for ("1:2", "3"), and ``1:2:3`` for ("1", "2:3").

    Args:
        text: the template; fields name arguments and may go into them: ``{order.id}``.
        signature: the signature of the task's function.

    Attributes:
        arguments: those that its fields name, in their order.
        only: the argument of which it is made, if it is one by itself.

    Raises:
        ValueError: the template cannot make keys; the text says why.
    """

    def __init__(self, text: str, signature: inspect.Signature) -> None:
        self._text = text
        parameters = signature.parameters.values()
        self._rest = next((p.name for p in parameters if p.kind is p.VAR_KEYWORD), None)
        self._start, self._fields = self._parts(text)
        self.arguments = tuple(re.split(r"[.[]", field.path)[0] for field in self._fields)
        for field, name in zip(self._fields, self.arguments, strict=True):
            is_known = name in signature.parameters or (self._rest and name.isidentifier())
            if not is_known or name == self._rest:
                known = ", ".join(n for n in signature.parameters if n != self._rest) or "none"
                raise ValueError(
                    f"{{{field.path}}} names no argument of the task (it has: {known})"
                )
        for field, following in pairwise(self._fields):
            if field.end[:1] in ("", "%"):
                raise ValueError(
                    f"what of it is {{{field.path}}} and what {{{following.path}}} could not be told:"
                    f" put a text between them{', not %' if field.end else ''}"
                )
        literal = self._start + "".join(field.end for field in self._fields)
        if not text or not is_plain(literal):
            raise ValueError("it is empty or contains white space or control characters")
        if len(literal.encode()) > MAX_BYTES:
            raise ValueError(f"its fixed text alone is over {MAX_BYTES} bytes")
        is_one = len(self._fields) == 1 and self._fields[0].is_name and self._rest is None
        self.only = self.arguments[0] if is_one else None
        self._end = self._fields[-1].end if self._fields else ""

    def __repr__(self) -> str:
        """As it was written."""
        return repr(self._text)

    def _parts(self, text: str) -> tuple[str, tuple[_Field, ...]]:
        """Return the text in front of the first field, and the fields."""
        start, fields = "", list[_Field]()
        for literal, path, spec, conversion in self.parse(text):
            if fields:
                fields[-1] = fields[-1]._replace(end=fields[-1].end + literal)
            else:
                start += literal
            if path is not None:
                is_name = path.isidentifier() and not spec and not conversion
                fields.append(_Field(path, is_name, spec or "", conversion, ""))
        return start, tuple(fields)

    def render(self, arguments: Mapping[str, Any]) -> str:
        """Fill in the arguments of one call, as `Parameters.bind` returns them."""
        if self._rest is not None:
            named = {name: value for name, value in arguments.items() if name != self._rest}
            arguments = {**arguments[self._rest], **named}
        key = self._start
        for field in self._fields:
            # Nearly every one is a name.
            value = _text(arguments[field.path]) if field.is_name else self._value(field, arguments)
            if field is self._fields[-1]:
                # Nothing comes after it but what is always there.
                return key + encode(value) + field.end
            key += _until(field.end, value) + field.end
        return key

    def fill(self, value: Any) -> str:
        """Fill in the argument that is the `only` one."""
        return self._start + encode(_text(value)) + self._end

    def _value(self, field: _Field, arguments: Mapping[str, Any]) -> str:
        conversion: Any = field.conversion
        value, _ = self.get_field(field.path, (), arguments)
        spec = self.vformat(field.spec, (), arguments)  # it may have fields of its own
        return str(self.format_field(self.convert_field(_as_sent(value), conversion), spec))


class _Field(NamedTuple):
    """A field of a template, and the text between it and the next one."""

    path: str
    is_name: bool
    """Whether it is the name of an argument, and no more."""
    spec: str
    conversion: str | None
    end: str


def _text(value: Any) -> str:
    return value if type(value) is str else format(_as_sent(value))


def _as_sent(value: Any) -> Any:
    """Return what a message makes of a value: in the worker that is all there is."""
    if isinstance(value, Enum | tuple | list | dict):
        try:
            return json.loads(json.dumps(value))
        except (TypeError, ValueError):
            pass  # another serializer may send it
    return value


def _until(end: str, value: str) -> str:
    """Encode a value so that the first `end` in what is made of it and `end` is that behind it."""
    text = encode(value)
    if (text + end).find(end) != len(text):
        return encode(value, end[0])
    return text


class Parameters:
    """The parameters of a task."""

    def __init__(self, signature: inspect.Signature) -> None:
        self.signature = signature
        names = ", ".join(f"{name!r}: {name}" for name in signature.parameters)
        self._collect = _with_signature(signature, f"{{{names}}}")

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call by name, defaults included, ``**kwargs`` as one of them.

        Raises:
            TypeError: the call does not fit the signature; the task itself could not be called.
        """
        try:
            arguments: dict[str, Any] = self._collect(*args, **kwargs)
        except TypeError:
            bound = self.signature.bind(*args, **kwargs)  # whose error names the argument
            bound.apply_defaults()
            return dict(bound.arguments)
        return arguments

    def picker(self, name: str) -> Callable[..., Any]:
        """Return a function that returns one argument of a call, or raises TypeError as `bind` does."""
        return _with_signature(self.signature, name)


def _with_signature(signature: inspect.Signature, expression: str) -> Callable[..., Any]:
    """Return a function with this signature that returns an expression of its arguments.

    So Python itself binds them, as it does when it calls the task, and as fast.
    """
    bare = signature.replace(
        parameters=[
            p.replace(default=p.empty if p.default is p.empty else None, annotation=p.empty)
            for p in signature.parameters.values()
        ],
        return_annotation=signature.empty,
    )
    code = compile(f"lambda {str(bare)[1:-1]}: {expression}", "<arguments of a task>", "eval")
    function = next(each for each in code.co_consts if isinstance(each, CodeType))
    collect = FunctionType(function, {})
    defaults = [(p.kind, p) for p in signature.parameters.values() if p.default is not p.empty]
    collect.__defaults__ = tuple(p.default for kind, p in defaults if kind is not p.KEYWORD_ONLY)
    collect.__kwdefaults__ = {p.name: p.default for kind, p in defaults if kind is p.KEYWORD_ONLY}
    return collect


def default_key(task_name: str, arguments: Mapping[str, Any]) -> str:
    """Return the key of a call for a task that names none: its name and a digest of the arguments.

    Raises:
        LockKeyError: the arguments cannot be written as JSON, so they make no stable key.
    """
    try:
        text = json.dumps(_as_sent(dict(arguments)), sort_keys=True)
    except (TypeError, ValueError) as exc:
        raise LockKeyError(
            task_name, f"its arguments cannot be written as JSON ({exc}): set lock_key"
        ) from None
    return f"{encode(task_name)}:{_digest(text)}"


def finished(key: str, prefix: str = "", name: str = "key") -> LockKey:
    """Return the key that somebody names, by a text or as it is.

    Raises:
        InvalidArgumentError: it is neither; `name` is what the error calls it.
        InvalidKeyError: it is no finished key that can be sent.
    """
    if not isinstance(key, str) or not key:
        raise refused(name, key, "a text, or a LockKey")
    if isinstance(key, LockKey):
        check_key(key)
    return finish(encode(key), prefix)


def finish(key: str, prefix: str = "") -> LockKey:
    """Return the key as it is sent: with the prefix, and short enough. A finished one stays."""
    if isinstance(key, LockKey):
        return key
    key = prefix + key
    if len(key) < _SHORTEST_CUT and key.isascii():
        return LockKey(key)  # nearly every one
    data = key.encode("utf-8", "backslashreplace")
    if len(data) <= MAX_BYTES and not _CUT.fullmatch(data):
        return LockKey(data.decode())
    head = data[: MAX_BYTES - DIGEST_DIGITS - 1].decode("utf-8", "ignore")
    return LockKey(f"{head}~{_digest(key)}")


def is_plain(text: str) -> bool:
    """Whether a text can be part of a key as it is: no white space, no control characters."""
    return encode(text) == text.replace("%", "%25")


def join(keys: Iterable[str]) -> str:
    """Return one text for several keys; other keys never give the same text."""
    # What could be mistaken for an encoded "&", or for what is made of that, is encoded as well.
    return "&".join(_MISTAKABLE.sub("%25", key).replace("&", "%26") for key in keys)


def encode(text: str, also: str = "") -> str:
    """Percent-encode white space, control characters, the percent sign and the characters in `also`.

    Different texts stay different. A finished key stays as it is.
    """
    if text.isprintable() and " " not in text and "%" not in text and not also:
        return text
    if isinstance(text, LockKey):
        return text
    return "".join(
        "".join(f"%{byte:02X}" for byte in char.encode("utf-8", "surrogatepass"))
        if char.isspace() or not char.isprintable() or char == "%" or char in also
        else char
        for char in text
    )


def _digest(text: str) -> str:
    data = text.encode("utf-8", "backslashreplace")
    return hashlib.sha256(data).hexdigest()[:DIGEST_DIGITS]
