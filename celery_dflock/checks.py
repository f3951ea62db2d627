"""Checks of what users pass: refused at once, in one line that says what to give instead."""

from __future__ import annotations

from math import inf
from typing import Any

from celery import Celery

from dflockd.errors import InvalidArgumentError, shown


def refused(name: str, value: object, wanted: str) -> InvalidArgumentError:
    """Return the error for an argument with a bad value."""
    return InvalidArgumentError(f"{name} is {shown(value)}: give {wanted}")


def check_app(app: object) -> None:
    """Refuse what is no app."""
    if app is not None and not isinstance(app, Celery):
        raise refused("app", app, "a Celery app, or None for the current one")


def check_whole(name: str, value: object, least: int, most: int, unit: str = "number") -> None:
    """Refuse what is no whole number in these bounds."""
    if not is_whole(value, least, most):
        raise refused(name, value, f"a whole {unit} from {least} to {most}")


def check_seconds(name: str, value: Any, most: int) -> None:
    """Refuse what is no time to wait."""
    if not (is_number(value) and 0 <= value <= most):
        raise refused(name, value, f"seconds, from 0 to {most}")


def is_whole(value: Any, least: float = 0, most: float = inf) -> bool:
    """Whether a value is a whole number in these bounds."""
    return isinstance(value, int) and is_number(value) and least <= value <= most


def is_number(value: Any) -> bool:
    """Whether a value is a number: no bool, no NaN."""
    return isinstance(value, int | float) and not isinstance(value, bool) and value == value
