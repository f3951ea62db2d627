"""What the function of a task can really be called with, its decorators included.

`inspect.signature` takes a wrapper's word for what it wraps, by ``__wrapped__``. A decorator that puts
an argument of its own in front then shifts all others: what the caller gives first would be taken for
the injected one. So a wrapper that takes ``*args`` is read.
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

_NO_MATTER = ("CACHE", "EXTENDED_ARG", "NOP", "PRECALL", "PUSH_NULL", "RESUME")


def outermost(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function that says what a call has to look like: what is around it hands all on."""
    while _hands_on(function):
        function = function.__wrapped__  # type: ignore[attr-defined]
    return function


def signature(function: Callable[..., Any]) -> inspect.Signature:
    """Return the signature of a function as it is called, not as it is wrapped."""
    return inspect.signature(outermost(function), follow_wrapped=False)


def refuse_hidden(function: Callable[..., Any], names: Iterable[str]) -> None:
    """Refuse names of arguments that a wrapper takes as ``*args`` and does not hand on as they are.

    Raises:
        ValueError: what the caller gives for one of them cannot be told; the text says what to do.
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
    """Whether a wrapper calls what it wraps with just what it is called with itself."""
    wrapped = getattr(function, "__wrapped__", None)
    if wrapped is None or "__signature__" in getattr(function, "__dict__", ()):
        return False
    if isinstance(function, functools.partial):
        return False  # it has a signature that counts what it adds
    if type(function) is FunctionType:
        if function.__globals__.get("__name__", "").startswith("celery."):
            return True  # pydantic's arguments are converted, each where it is
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        names = [name for name, cell in cells if _content(cell) is wrapped]
        return _calls(function.__code__, [[("LOAD", name)] for name in names], 0)
    call = type(function).__call__
    if type(call) is not FunctionType or not call.__code__.co_argcount:
        return True  # it is not in Python: take its word
    itself = ("LOAD", call.__code__.co_varnames[0])
    names = [name for name, value in vars(function).items() if value is wrapped]
    return _calls(call.__code__, [[itself, ("LOAD_ATTR", name)] for name in names], 1)


def _calls(code: CodeType, callees: list[list[Instruction]], skipped: int) -> bool:
    """Whether code calls one of these with all its own parameters, but for the first `skipped`.

    What Python makes of such a call is looked up there, for it differs from version to version.
    """
    takes = inspect.getargs(code)
    if code.co_kwonlyargcount or not (takes.varargs or takes.varkw):
        return False
    rest = [f"*{takes.varargs}"] if takes.varargs else []
    rest += [f"**{takes.varkw}"] if takes.varkw else []
    model = f"lambda {', '.join([*takes.args, *rest])}: f({', '.join(takes.args[skipped:] + rest)})"
    [model_code] = compile(model, "model", "eval").co_consts[:1]
    _, *call, _ = _instructions(model_code)  # f, what it is called with, and return
    names = {*takes.args, takes.varargs, takes.varkw}
    for each in _with_inner(code):
        if each is not code and names.intersection(each.co_varnames):
            continue  # these are others of the same name
        found = list(_instructions(each))
        if any(kind == "STORE" and name in names for kind, name in found):
            return False
        if any(_contains(found, [*callee, *call]) for callee in callees):
            return True
    return False


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
