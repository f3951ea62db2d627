"""etcd with users: the right one, wrong ones, and tokens that end."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from aetcd import rpc
from grpc import StatusCode
from grpc.aio import Metadata

from dflockd import clock
from dflockd.shards import Put, RevisionIs, StoreDeniedError, StoreUnreachableError
from dflockd.shards.credentials import EtcdUser
from dflockd.shards.etcd import SIGN_IN_PAUSE, EtcdStore
from examples.demo.stage import Process
from tests.dflockd.cluster.stage import ClusterServer, free_port
from tests.dflockd.raw_server import PATIENCE
from tests.dflockd.shards.etcd_process import Etcd

_passwords = tempfile.TemporaryDirectory()


def user_with(name: str, password: str) -> EtcdUser:
    file = Path(_passwords.name, f"{name} {password}")
    file.write_text(f"{password}\n")
    return EtcdUser(name, str(file))


ROOT = user_with("root", "root-secret")
USER = user_with("locks", PASSWORD := "locks-secret")


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    # Tokens end after 1 s without use; passwords are cheap to check.
    more = ("--auth-token-ttl", "1", "--bcrypt-cost", "4")
    with Etcd(tmp_path_factory.mktemp("users"), more=more) as process:
        control = process.control
        control("user", "add", "root:root-secret")
        control("user", "grant-role", "root", "root")
        control("user", "add", "locks:locks-secret")
        control("role", "add", "locks")
        control("role", "grant-permission", "--prefix=true", "locks", "readwrite", "/dflockd")
        control("user", "grant-role", "locks", "locks")
        control("auth", "enable")
        yield process


@contextlib.asynccontextmanager
async def store_as(etcd: Etcd, user: EtcdUser | None) -> AsyncIterator[EtcdStore]:
    store = EtcdStore([etcd.endpoint], timeout=10, user=user)
    try:
        yield store
    finally:
        await store.close()


async def test_all_calls_are_made_as_the_user(etcd: Etcd) -> None:
    async with store_as(etcd, USER) as store:
        lease = await store.grant_lease(60)
        put = Put("/dflockd/all-calls/a", b"x", lease.id)
        outcome = await store.txn([RevisionIs(put.key, 0)], [put])
        assert outcome.succeeded
        assert list((await store.get_prefix("/dflockd/all-calls/")).records) == [put.key]
        async with contextlib.aclosing(
            store.watch("/dflockd/all-calls/", outcome.revision)
        ) as changes:
            assert [event.key for event in await anext(changes)] == [put.key]
        await store.keep_alive(lease.id)
        assert await store.size() is not None
        await store.revoke_lease(lease.id)


async def test_a_token_that_has_ended_is_replaced(etcd: Etcd) -> None:
    async with store_as(etcd, USER) as store:
        await store.get_prefix("/dflockd/")
        for _ in range(2):
            # As where etcd has forgotten it.
            store._metadata = (("token", "of.another.life"),)
            assert (await store.txn([], [Put("/dflockd/once", b"x")])).succeeded
        assert (await store.get_prefix("/dflockd/once")).records["/dflockd/once"].revision > 0


async def test_tokens_survive_a_change_of_users_and_a_restart(etcd: Etcd) -> None:
    async with store_as(etcd, USER) as store:
        await store.txn([], [Put("/dflockd/a", b"1")])
        async with store_as(etcd, ROOT) as root:
            await root.txn([], [Put("/else", b"1")])
        etcd.control("--user", "root:root-secret", "user", "add", "other:secret")
        await store.txn([], [Put("/dflockd/a", b"2")])
        etcd.stop()
        etcd.start()
        await store.txn([], [Put("/dflockd/a", b"3")])


@pytest.mark.parametrize(
    ("user", "message"),
    [
        (user_with("locks", "wrong"), "invalid user ID or password"),
        (USER._replace(name="nobody"), "invalid user ID or password"),
        (None, "user name is empty"),
    ],
)
async def test_others_are_denied(etcd: Etcd, user: EtcdUser | None, message: str) -> None:
    async with store_as(etcd, user) as store:
        with pytest.raises(StoreDeniedError, match=message):
            await store.txn([], [Put("/dflockd/a", b"1")])


async def test_what_a_user_may_not_is_denied(etcd: Etcd) -> None:
    async with store_as(etcd, USER) as store:
        with pytest.raises(StoreDeniedError, match="permission denied"):
            await store.txn([], [Put("/else", b"1")])
        assert (await store.txn([], [Put("/dflockd/a", b"1")])).succeeded


async def test_a_user_where_there_are_none(tmp_path: Path) -> None:
    with Etcd(tmp_path) as plain:
        async with store_as(plain, USER) as store:
            with pytest.raises(StoreDeniedError, match="authentication is not enabled"):
                await store.get_prefix("/")


async def test_who_is_turned_away_does_not_sign_in_with_every_call(etcd: Etcd) -> None:
    before = etcd.calls()["Authenticate"]
    async with store_as(etcd, user_with("late", "late-secret")) as store:
        for _ in range(50):
            with pytest.raises(StoreDeniedError, match="invalid user ID or password"):
                await store.get_prefix("/dflockd/")
        assert etcd.calls()["Authenticate"] < before + 10
        options = ("--user", "root:root-secret")
        etcd.control(*options, "user", "add", "late:late-secret")
        etcd.control(*options, "user", "grant-role", "late", "locks")
        async with asyncio.timeout(PATIENCE):
            while True:
                with contextlib.suppress(StoreDeniedError):
                    await store.get_prefix("/dflockd/")
                    return


async def test_a_password_that_was_changed_is_read_from_its_file(etcd: Etcd) -> None:
    options = ("--user", "root:root-secret")
    etcd.control(*options, "user", "add", "moody:first")
    etcd.control(*options, "user", "grant-role", "moody", "locks")
    user = user_with("moody", "first")
    async with store_as(etcd, user) as store, asyncio.timeout(PATIENCE):
        await store.get_prefix("/dflockd/")
        etcd.control(*options, "user", "delete", "moody")  # which ends its tokens
        etcd.control(*options, "user", "add", "moody:second")
        etcd.control(*options, "user", "grant-role", "moody", "locks")
        with pytest.raises(StoreDeniedError, match="what is in the file with the password"):
            await store.get_prefix("/dflockd/")
        file = Path(user.password_file)
        file.unlink()  # noqa: ASYNC240
        await asyncio.sleep(SIGN_IN_PAUSE)
        with pytest.raises(
            StoreUnreachableError, match="moody first' cannot be read: No such file"
        ):
            await store.get_prefix("/dflockd/")
        file.write_text("second\n")  # noqa: ASYNC240
        await store.get_prefix("/dflockd/")


@contextlib.asynccontextmanager
async def nowhere() -> AsyncIterator[tuple[EtcdStore, Any]]:
    """A store as a user, and its only member, at which nobody listens."""
    store = EtcdStore(["127.0.0.1:1"], timeout=PATIENCE, user=USER)
    try:
        store._make_members()
        [member] = store._members
        yield store, member
    finally:
        await store.close()


async def test_the_time_of_a_call_is_for_its_sign_in_as_well() -> None:
    # Each step had all of it: four times as long as the caller could wait.
    class Slow:
        async def Authenticate(self, _request: Any, timeout: float = 0) -> Any:
            await asyncio.sleep(0.1)
            return rpc.AuthenticateResponse(token="a token that has ended")

    class SignedOutError(rpc.AioRpcError):
        def __init__(self) -> None:
            super().__init__(StatusCode.UNAUTHENTICATED, Metadata(), Metadata(), "no such token")

    times = list[float]()

    async def send(_member: Any, left: float) -> Any:
        times.append(left)
        if len(times) == 1:
            raise SignedOutError
        return "done"

    async with nowhere() as (store, member):
        member.auth = Slow()
        began = clock.now()
        assert await store._answer(send, member, began + PATIENCE) == "done"
    assert times[0] < PATIENCE - 0.09
    assert times[1] < PATIENCE - 0.18


async def test_nobody_waits_longer_than_they_can_for_another_to_sign_in() -> None:
    async def send(_member: Any, _left: float) -> Any:
        raise AssertionError

    async with asyncio.timeout(PATIENCE), nowhere() as (store, member), member.signing_in:
        with pytest.raises(StoreUnreachableError, match="no answer in time"):
            await store._answer(send, member, clock.now() + 0.1)
        assert member not in store._members, "the next call goes elsewhere"


# The server and its commands.


def as_user(etcd: Etcd, directory: Path, password: str) -> list[str]:
    file = directory / "password"
    file.write_text(password + "\n")
    return [
        *("--cluster", f"etcd://{etcd.endpoint}", "--cluster-user", USER.name),
        *("--cluster-password-file", str(file)),
    ]


class Command(Process):
    """`dflockd cluster ...`"""

    def __init__(self, directory: Path, *words: str) -> None:
        super().__init__(directory, "command")
        self._words = words

    def _command(self) -> list[str]:
        import sys

        return [sys.executable, "-m", "dflockd", "cluster", *self._words]


def test_a_server_and_the_commands_give_user_and_password(etcd: Etcd, tmp_path: Path) -> None:
    arguments = as_user(etcd, tmp_path, PASSWORD)
    with ClusterServer(tmp_path, *arguments, name="server") as server:
        server.wait_joined()
        with Command(tmp_path, *arguments, "status") as command:
            assert server.address in command.wait_log("leader")


def test_a_wrong_password_refuses_to_start_with_one_line(etcd: Etcd, tmp_path: Path) -> None:
    arguments = as_user(etcd, tmp_path, "wrong")
    server = ClusterServer(tmp_path, *arguments, name="server", port=free_port())
    with pytest.raises(Exception, match="ended before it logged"):
        server.start()
    [line] = server.log_text().splitlines()
    assert "ERROR dflockd: --cluster-user locks: etcd " in line
    assert "invalid user ID or password" in line
    assert "wrong" not in line
    with Command(tmp_path, *arguments, "status") as command:
        assert "invalid user ID or password" in command.wait_log("dflockd cluster: ")


def test_without_a_user_it_says_which_setting_is_missing(etcd: Etcd, tmp_path: Path) -> None:
    url = f"etcd://{etcd.endpoint}"
    server = ClusterServer(tmp_path, "--cluster", url, name="server", port=free_port())
    with pytest.raises(Exception, match="ended before it logged"):
        server.start()
    assert "--cluster-user is not set: etcd " in server.log_text()
