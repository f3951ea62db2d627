"""How etcd is spoken to in private, and as whom. Apart from the store, whose extra settings do without.

What proves something stays in its file, and is read there for each new connection and each sign-in.
"""

from __future__ import annotations

import ssl
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from dflockd.files import not_after, read_secret, refuse_irregular


class EtcdTls(NamedTuple):
    """How to speak TLS with etcd: the paths of PEM files.

    Attributes:
        ca: the authorities, one of which has signed the certificate of etcd.
        cert: this client's certificate, where etcd wants to see one.
        key: its key.
    """

    ca: str
    cert: str | None = None
    key: str | None = None

    def read(self) -> tuple[bytes | None, ...]:
        """Return what is in the files, in their order.

        Raises:
            ValueError: one cannot be read; the text names it.
        """
        return tuple(None if path is None else _read(path) for path in self)

    def problem(self) -> str:
        """Say what is wrong with what is in the files, if this can be said by looking at them."""
        try:
            self.context()
        except ssl.SSLError as exc:
            return f"{', '.join(filter(None, self))} do not load: {exc.reason or exc}"
        except OSError as exc:
            return f"{exc.filename!r} cannot be read: {exc.strerror}"
        for path in filter(None, (self.cert, self.ca)):
            if 0 < (at := not_after(path)) < time.time():
                return (
                    f"the certificate in {path} has expired, at {datetime.fromtimestamp(at, UTC)}"
                )
        return ""

    def context(self) -> ssl.SSLContext:
        """Return what connects by them, for a look at etcd that says more than gRPC does."""
        refuse_irregular(*self)
        context = ssl.create_default_context(cafile=self.ca)
        if self.cert is not None:
            context.load_cert_chain(self.cert, self.key, password="")
        return context


class EtcdUser(NamedTuple):
    """A user of etcd, where it has some.

    Attributes:
        name: the name of the user.
        password_file: the file whose line is the password.
    """

    name: str
    password_file: str

    def password(self) -> str:
        """Read it.

        Raises:
            ValueError: it cannot be read; the text names the file.
        """
        try:
            return read_secret(self.password_file)
        except ValueError as exc:
            raise ValueError(f"{self.password_file!r} {exc}") from None


def _read(path: str) -> bytes:
    try:
        refuse_irregular(path)
        return Path(path).read_bytes()
    except OSError as exc:
        raise ValueError(f"{path!r} cannot be read: {exc.strerror}") from None
