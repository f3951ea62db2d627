"""The lock server as a container, for test suites built on pytest-celery 1.x.

    # the top-level conftest.py
    pytest_plugins = ["celery_dflock.contrib.pytest_celery"]

    # a test
    def test_transfer(celery_setup, celery_dflockd):
        transfer.delay(7)
        celery_dflockd.wait_until_locked("account:7")

The server runs in the network of pytest-celery's containers, with its state directory on a volume:
a restart loses no lock. ``DFLOCK_SERVERS`` is set in the environment of the workers. You can
override each fixture, as you can those of pytest-celery.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from pytest_celery import CeleryTestContainer, CeleryTestNode
from pytest_docker_tools import container, fxtr, volume

import dflockd
from dflockd import admin, clock

__all__ = [
    "DflockdContainer",
    "DflockdNode",
    "celery_dflockd",
    "default_dflockd",
    "default_dflockd_env",
    "default_dflockd_image",
    "default_dflockd_volume",
    "default_worker_env",
]

PORT = "6388/tcp"
STATE = "/var/lib/dflockd"
POLL = 0.1
TIMEOUT = 60
"""Seconds that the container may take to start, and a key to be locked."""


class DflockdContainer(CeleryTestContainer):
    """A container of the image ``dflockd``."""

    @property
    def ready_prompt(self) -> str:
        """The text in its log once it listens."""
        return "listening on"

    @property
    def address(self) -> str:
        """The address for other containers, and the value for ``DFLOCK_SERVERS``."""
        return f"{self.attrs['Config']['Hostname']}:6388"

    @property
    def host_address(self) -> str:
        """The address for the test itself. A restart may change it."""
        self._wait_port(PORT)
        host, port = self.get_addr(PORT)
        return f"{host}:{port}"

    @property
    def celeryconfig(self) -> dict[str, Any]:
        """Both addresses, named as containers of brokers name theirs."""
        return {"url": self.address, "host_url": self.host_address}


class DflockdNode(CeleryTestNode):
    """The lock server, as a node beside the broker, the backend and the workers."""

    def holders(self, key: str) -> list[str]:
        """Return the holders of the lock: task, id, host and pid of each. The list may be empty.

        Args:
            key: the key, with the prefix of the app if it has one.
        """
        report = admin.inspect(self.container.host_address, key)
        return [entry["label"] for entry in report["holders"]]

    def wait_until_locked(self, key: str, timeout: float = TIMEOUT) -> str:
        """Wait until the lock is held, and return its holders.

        Raises:
            TimeoutError: the lock was free for `timeout` seconds.
        """
        ends = clock.now() + timeout
        while not (holders := self.holders(key)):
            if clock.now() > ends:
                raise TimeoutError(f"nobody has taken the lock {key!r} within {timeout:g} s")
            time.sleep(POLL)
        return holders[0]


@pytest.fixture
def celery_dflockd(default_dflockd: DflockdContainer) -> Iterator[DflockdNode]:
    """The lock server of this test."""
    node = DflockdNode(default_dflockd)
    yield node
    node.teardown()


@pytest.fixture
def default_dflockd_image() -> str:
    """The name of the image. Default: that of the installed version, as in the compose file."""
    return f"dflockd:{dflockd.__version__}"


@pytest.fixture
def default_dflockd_env() -> dict[str, str]:
    """The settings of the server, as environment variables."""
    return {"DFLOCKD_STATE_DIR": STATE}


default_dflockd_volume = volume()

default_dflockd = container(
    image="{default_dflockd_image}",
    environment=fxtr("default_dflockd_env"),
    ports={PORT: None},
    network="{default_pytest_celery_network.name}",
    volumes={"{default_dflockd_volume.name}": {"bind": STATE, "mode": "rw"}},
    read_only=True,
    wrapper_class=DflockdContainer,
    timeout=TIMEOUT,
)


@pytest.fixture
def default_worker_env(
    default_worker_env: dict[str, str], default_dflockd: DflockdContainer
) -> dict[str, str]:
    """The environment of the workers, with the address of the lock server."""
    return {**default_worker_env, "DFLOCK_SERVERS": default_dflockd.address}
