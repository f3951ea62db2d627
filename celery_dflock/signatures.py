"""What the function of a task can really be called with, its decorators included.

`inspect.signature` takes a wrapper's word for what it wraps, by ``__wrapped__``. A decorator that puts
an argument of its own in front then shifts all others: what the caller gives first would be taken for
the injected one. So the bytecode of a wrapper that takes ``*args`` is read. What does not call what it
wraps by itself, but has others do so, is taken at its word.

No simpler rule gives both things that matter. To trust ``__wrapped__`` makes keys of shifted arguments,
and two tasks that exclude each other would have two keys. To distrust it refuses every decorator that
passes everything on, as most do.
"""

from __future__ import annotations

import dis
import functools
import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from types import CodeType, FunctionType
from typing import Any, TypeAlias

Instruction: TypeAlias = tuple[str, Any]

_NO_MATTER = ("CACHE", "EXTENDED_ARG", "NOP", "PRECALL", "RESUME")


def outermost(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function that says what a call has to look like: what is around it hands all on."""
    while _hands_on(function):
        function = function.__wrapped__  # type: ignore[attr-defined]
    return function


def signature(function: Callable[..., Any]) -> inspect.Signature:
    """Return the signature of a function as it is called, not as it is wrapped."""
    return inspect.signature(outermost(function), follow_wrapped=False)


def refuse_hidden(function: Callable[..., Any], names: Iterable[str]) -> None:
    """Refuse names of arguments that a wrapper takes as ``*args`` and does not pass on unchanged.

    Raises:
        ValueError: the value of one of them cannot be determined; the text says what to do.
    """
    last = outermost(function)
    own = inspect.signature(last, follow_wrapped=False).parameters.values()
    if not hasattr(last, "__wrapped__") or all(p.kind is not p.VAR_POSITIONAL for p in own):
        return
    for name in names:
        if name not in (p.name for p in own if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)):
            raise ValueError(
                f"{{{name}}} cannot be found among the arguments of a call: the decorator {_name(last)}"
                " takes *args and does not hand them on as they are: name its parameters, or set its"
                " __signature__, or give (task, args, kwargs) -> key"
            )


def _name(wrapper: Any) -> str:
    code = getattr(wrapper, "__code__", None)
    return getattr(code, "co_qualname", None) or type(wrapper).__qualname__


def _hands_on(function: Any) -> bool:
    """Whether a wrapper gives what it wraps the positional arguments that it is given itself."""
    wrapped = getattr(function, "__wrapped__", None)
    if wrapped is None or "__signature__" in getattr(function, "__dict__", ()):
        return False
    if isinstance(function, functools.partial):
        return False  # it has a signature that counts what it adds
    if type(function) is FunctionType:
        code, skipped = function.__code__, 0
        cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
        callees = [[("LOAD", name)] for name, cell in cells if _content(cell) is wrapped]
    else:
        call = type(function).__call__
        if type(call) is not FunctionType or not call.__code__.co_argcount:
            return True  # it is not in Python, or goes by another name as in wrapt
        code, skipped = call.__code__, 1
        itself = ("LOAD", code.co_varnames[0])
        names = [
            name for name, value in getattr(function, "__dict__", {}).items() if value is wrapped
        ]
        callees = [[itself, ("LOAD_ATTR", name)] for name in names]
    if not code.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS):
        return False
    # Pydantic's arguments are converted, each where it is.
    is_of_celery = getattr(function, "__globals__", {}).get("__name__", "").startswith("celery.")
    return is_of_celery or not _calls_otherwise(code, callees, skipped)


def _calls_otherwise(code: CodeType, callees: list[list[Instruction]], skipped: int) -> bool:
    """Whether code calls one of these, and never with all its own parameters but for those `skipped`.

    What Python makes of such a call is looked up there, for it differs from version to version.
    """
    takes = inspect.getargs(code)
    names = takes.args[: code.co_argcount]
    own = {*names, takes.varargs}
    handed = ", ".join([*names[skipped:], *[f"*{takes.varargs}"] * bool(takes.varargs), "**rest_"])
    model = compile(f"lambda called_, {handed}: called_({handed})", "model", "eval")
    example = [each for inner in [*_with_inner(model)][1:] for each in _instructions(inner)]
    example = example[: example.index(("BUILD_MAP", 0))]  # only what is in front of the **kwargs
    is_called = False
    for each in _with_inner(code):
        found = list(_instructions(each))
        may_hand_on = (each is code or not own.intersection(each.co_varnames)) and not any(
            kind == "STORE" and name in own for kind, name in found
        )
        for callee in callees:
            if each is not code and callee[0][1] not in each.co_freevars:
                continue  # another of the same name
            if may_hand_on and _contains(found, _with_callee(example, callee)):
                return False
            is_called |= _contains(found, _with_callee(example[:2], callee))
    return is_called


def _with_callee(example: list[Instruction], callee: list[Instruction]) -> list[Instruction]:
    at = example.index(("LOAD", "called_"))
    return [*example[:at], *callee, *example[at + 1 :]]


def _instructions(code: CodeType) -> Iterator[Instruction]:
    """Yield what matters of each instruction: for variables, whether it is to load or to store."""
    for instruction in dis.get_instructions(code):
        name, value = instruction.opname, instruction.argval
        if re.match(r"(LOAD|STORE)_(FAST|DEREF)", name):
            values = value if isinstance(value, tuple) else (value,)
            yield from zip(re.findall("LOAD|STORE", name), values, strict=True)
        elif name not in _NO_MATTER:
            yield name, value


def _with_inner(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _with_inner(constant)


def _contains(many: list[Instruction], few: list[Instruction]) -> bool:
    return any(many[at : at + len(few)] == few for at in range(len(many)))


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None
