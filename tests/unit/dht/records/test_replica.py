"""Reads of followed keys: they share refreshes, and no reader waits without letting others run."""

import asyncio

import pytest

from dht.errors import NetworkError
from dht.messages.peer import PEER_BOUNDS
from dht.records.replica import Replica, ReplicaConfig
from dht.records.signed import RecordGuard
from testing.clock import run_virtual

NODES, LINKS = "net/model/nodes", "net/model/links"
LOOKS_MAX = 1000
"""Looks at the clock within one test; a loop that never yields makes any number of them."""


class Counted(Replica):
    """A replica that counts its looks at the clock, and gives up where there are too many."""

    looks = 0

    def fresh(self, key: str) -> bool:
        Counted.looks += 1
        if Counted.looks > LOOKS_MAX:
            raise RuntimeError("a read goes round without letting others run")
        return super().fresh(key)


class Asked:
    """What is asked of others; each answer waits for ``let_go``."""

    def __init__(self, error: Exception | None = None) -> None:
        Counted.looks = 0
        self.error = error
        self.keys: list[tuple[str, ...]] = []
        self.let_go = asyncio.Event()
        config = ReplicaConfig(fresh_s=0.5)
        self.replica = Counted(RecordGuard(), lambda: 0.0, self.refresh, config)

    async def refresh(self, keys: tuple[str, ...]) -> None:
        self.keys.append(keys)
        await self.let_go.wait()
        if self.error is not None:
            raise self.error


async def _read_as_a_refresh_ends() -> None:
    asked = Asked()

    async def late() -> None:  # runs after the refresh has ended, and before its callbacks
        await asked.let_go.wait()
        await asked.replica.read(LINKS)

    async with asyncio.TaskGroup() as group:
        group.create_task(asked.replica.read(NODES))
        await asyncio.sleep(0.05)
        group.create_task(late())
        await asyncio.sleep(0.05)
        asked.let_go.set()
    assert asked.keys == [(NODES,), (NODES, LINKS)]


def test_a_read_that_comes_as_a_refresh_ends_lets_others_run() -> None:
    run_virtual(_read_as_a_refresh_ends(), limit_s=10)


async def _share() -> None:
    asked = Asked()
    first = asyncio.create_task(asked.replica.read(NODES))
    await asyncio.sleep(0.05)
    others = [asyncio.create_task(asked.replica.read(LINKS)) for _ in range(5)]
    await asyncio.sleep(0.05)
    first.cancel()  # who leaves ends the refresh for nobody
    asked.let_go.set()
    await asyncio.gather(*others)
    assert asked.keys == [(NODES,), (NODES, LINKS)]


def test_readers_share_refreshes() -> None:
    run_virtual(_share(), limit_s=10)


async def _fail() -> None:
    asked = Asked(NetworkError("nobody answers"))
    asked.let_go.set()
    for _ in range(2):  # an error of one read is not the next one's
        with pytest.raises(NetworkError):
            await asked.replica.read(NODES)
    assert len(asked.keys) == 2


def test_who_reads_is_told_that_nobody_could_be_asked() -> None:
    run_virtual(_fail(), limit_s=10)


async def _too_many() -> None:
    """More keys are read at once than one request may name: each is asked for before its read ends,
    or what was not asked for would look as if nobody had it."""
    asked = Asked()
    keys = [f"net/{number}/nodes" for number in range(100)]
    reads = [asyncio.create_task(asked.replica.read(key)) for key in keys]
    await asyncio.sleep(0.05)
    asked.let_go.set()
    await asyncio.gather(*reads)
    most = PEER_BOUNDS.keys_asked_max
    assert {key for some in asked.keys for key in some} == set(keys)
    assert max(map(len, asked.keys)) == most
    assert len(asked.keys) <= 2 + len(keys) / most


def test_reads_of_more_keys_than_a_request_takes_ask_for_all() -> None:
    run_virtual(_too_many(), limit_s=10)
