"""Settings, read as the command reads them."""

from __future__ import annotations

from dflockd.config import Settings, load


def settings(*arguments: str, **environ: str) -> Settings:
    return load(arguments, environ, "1.2.3")
