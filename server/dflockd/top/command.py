"""The command ``dflockd top``."""

from __future__ import annotations

import argparse
import os
import ssl
import sys
from collections.abc import Sequence
from typing import NoReturn

from dflockd.address import CLUSTER_PREFIX, DEFAULT_PORT
from dflockd.config import SettingError, load_token
from dflockd.errors import InvalidArgumentError
from dflockd.files import refuse_irregular
from dflockd.ranking import SORTS
from dflockd.top.screen import watch

SHORTEST, LONGEST = 0.2, 3600.0
"""Bounds of ``--interval`` in seconds."""


def main(arguments: Sequence[str]) -> int:
    """Carry out ``dflockd top``; return the exit status: 0, or 2 if it was not understood."""
    try:
        parsed = _parser().parse_args(arguments)
        watch(
            _servers(parsed.server),
            parsed.interval,
            parsed.sort,
            auth_token=load_token(parsed, os.environ),
            ssl_context=_ssl_context(parsed),
            notes=parsed.all,
        )
    except (SettingError, InvalidArgumentError) as exc:
        print(f"dflockd top: {exc}", file=sys.stderr)
        return 2
    return 0


class _TopParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise SettingError(f"{message} (--help lists the flags)")


def _parser() -> argparse.ArgumentParser:
    parser = _TopParser(
        prog="dflockd top",
        description="Show who holds which key, for how long, and how many wait. Press q to quit.",
        epilog="The auth token comes from the variable DFLOCKD_AUTH_TOKEN or from the file.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--server",
        metavar="HOST:PORT",
        action="append",
        help=f"a lock server; repeat it for several, or give {CLUSTER_PREFIX}host:port,... for a "
        f"cluster; default 127.0.0.1:{DEFAULT_PORT}",
    )
    parser.add_argument(
        "--interval",
        metavar="SECONDS",
        type=_interval,
        default=2.0,
        help="seconds between two updates; default 2",
    )
    parser.add_argument(
        "--sort", choices=[*SORTS], default="waiters", help="order of the keys; default waiters"
    )
    parser.add_argument(
        "--all", action="store_true", help="include keys under which programs keep notes"
    )
    parser.add_argument(
        "--auth-token-file",
        metavar="FILE",
        help="file that contains the shared secret in one line [DFLOCKD_AUTH_TOKEN_FILE]",
    )
    parser.add_argument(
        "--tls", action="store_true", help="speak TLS; trust the authorities of this system"
    )
    parser.add_argument("--tls-ca", metavar="FILE", help="trust these authorities instead (PEM)")
    parser.add_argument("--tls-cert", metavar="FILE", help="client certificate (PEM)")
    parser.add_argument("--tls-key", metavar="FILE", help="private key of --tls-cert (PEM)")
    return parser


def _interval(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not SHORTEST <= seconds <= LONGEST:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number of seconds from {SHORTEST:g} to {LONGEST:g}"
        )
    return seconds


def _servers(given: Sequence[str] | None) -> Sequence[str] | str:
    if not given:
        return [f"127.0.0.1:{DEFAULT_PORT}"]
    return given[0] if len(given) == 1 and given[0].startswith(CLUSTER_PREFIX) else given


def _ssl_context(parsed: argparse.Namespace) -> ssl.SSLContext | None:
    if not (parsed.tls or parsed.tls_ca or parsed.tls_cert or parsed.tls_key):
        return None
    if parsed.tls_key and not parsed.tls_cert:
        raise SettingError("--tls-key is set and --tls-cert is not: set both, or neither")
    try:
        refuse_irregular(parsed.tls_ca, parsed.tls_cert, parsed.tls_key)
        context = ssl.create_default_context(cafile=parsed.tls_ca)
        if parsed.tls_cert:
            # With a password, if a wrong one: without, OpenSSL would ask for it at the terminal.
            context.load_cert_chain(parsed.tls_cert, parsed.tls_key, password="")
    except OSError as exc:
        raise SettingError(
            f"--tls-ca {parsed.tls_ca!r}, --tls-cert {parsed.tls_cert!r}: they do not load: {exc}"
        ) from None
    return context
