"""How bad a simulated network and its servers are."""

from __future__ import annotations

from dataclasses import dataclass, fields
from random import Random


class BrokenRuleError(AssertionError):
    """A rule was broken; `rule` says which."""

    def __init__(self, rule: str, text: str) -> None:
        super().__init__(f"{rule}: {text}")
        self.rule = rule


@dataclass
class Weather:
    """How likely it is that something goes wrong."""

    cut_request: float = 0.0
    """A request arrives in part, and the connection ends."""
    cut_reply: float = 0.0
    breaks: float = 0.0
    """Breaks of a connection in a second."""
    mute: float = 0.0
    """A connection swallows everything from some time on."""
    partial: float = 0.0
    """The kernel takes only a part of a request."""
    slow: float = 0.0
    """A reply takes seconds."""
    refuse: float = 0.0
    """A server refuses a request, or answers nonsense."""
    lie: float = 0.0
    """A server says yes without having done it: no belief can be right then."""
    deaf: float = 0.0
    """A server cannot be reached, or lets one wait to be connected."""
    server_stall: float = 0.0
    process_stall: float = 0.0
    restart: float = 0.0
    move: float = 0.0
    evict: float = 0.0


MOST = Weather(0.1, 0.1, 0.05, 0.05, 0.1, 0.1, 0.1, 0.0, 0.1, 0.02, 0.02, 0.02, 0.05, 0.02)


def some_weather(rng: Random) -> Weather:
    """Return weather in which about half of what can go wrong does."""
    weather = Weather()
    for each in fields(Weather):
        if rng.random() < 0.4:
            setattr(weather, each.name, getattr(MOST, each.name) * rng.choice((0.2, 1.0, 2.0)))
    if rng.random() < 0.1:
        weather.lie = 0.2
    return weather
