"""What either side of a copy makes of a peer that does not keep to it."""

import asyncio
import random
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any, cast

import pytest

from dht.identity.peer_id import Identity
from dht.messages.kv import KvCopy, KvPages, KvTaken
from dht.messages.session import RefusalCode, SessionRefused
from dht.transport.frame_sender import FrameSender
from node.links.hops import HopTable
from node.sessions.session import StageSession, StageState
from node.sessions.session_table import Live
from node.stage.config import StageConfig, StageEngine
from node.stage.kv_migration import COPY_S_MAX, KvMover
from node.stage.shell import StageShell
from testing.clock import run_virtual
from testing.network import MemoryNetwork
from tests.unit.node.sessions.test_session import make_open, view

ROW_BYTES = 1024
CONFIG = StageConfig(copy_bytes_max=8 * ROW_BYTES, copy_piece_bytes=4 * ROW_BYTES)


class SlowEngine:
    """An engine whose steps take a second; KV is read and written between them."""

    wire_dtype, hidden, view = "float32", 1, view(end=0)
    kv_tokens, page_tokens = 1000, 1

    def __init__(self) -> None:
        self.imported: list[int] = []
        self.ended: list[str] = []
        self._step = asyncio.Lock()

    state_tokens = 0

    def kv_row_bytes(self, start: int, end: int) -> int:
        return ROW_BYTES

    def settle(self, key: str, tokens: int) -> None:
        assert key not in self.ended

    def free(self, key: str) -> None:
        self.ended.append(key)

    async def export_kv(self, key: str, position: int, tokens: int) -> bytes:
        return bytes(tokens * ROW_BYTES)

    async def import_kv(
        self, key: str, layers: tuple[int, int], position: int, tokens: int, body: bytes
    ) -> str | None:
        async with self._step:
            await asyncio.sleep(1)
        self.imported.append(len(body))
        return None


class Sent:
    """A way to another peer that keeps what is sent."""

    def __init__(self) -> None:
        self.messages: list[object] = []

    def admits(self, peer_id: str, client: str) -> bool:
        return True

    def get(self, peer_id: str) -> "Sent":
        return self

    def send(self, message: object, body: bytes = b"", *, traffic: object = None) -> None:
        self.messages.append(message)


class Side:
    """A mover with one session: ``importing`` at the new stage, else at the one that leaves."""

    def __init__(self, *, importing: bool) -> None:
        open_ = replace(make_open(prompt=100, new=100), copy_from="p9" if importing else None)
        self.session = StageSession(open=open_, state=StageState.ACTIVE, importing=importing)
        self.upstream, self.hop, self.engine = Sent(), Sent(), SlowEngine()
        transport = MemoryNetwork(random.Random(1)).transport(Identity(bytes(32)))
        engine, hops = cast(StageEngine, self.engine), cast(HopTable, self.hop)
        self.shell = StageShell(transport, engine, CONFIG, hops)
        self.table, self.counters = self.shell.table, self.shell.counters
        self.table.add(
            Live(session=self.session, upstream=cast(FrameSender, self.upstream), touched_s=0.0)
        )
        self.mover = KvMover(self.shell)

    def take(self, position: int, tokens: int, size: int) -> None:
        """A piece of KV comes."""
        open_ = self.session.open
        pages = KvPages(
            session=open_.session,
            attempt=open_.attempt,
            position=position,
            tokens=tokens,
            dtype="float32",
        )
        self.mover.take("p9", pages, memoryview(bytes(size)), self.hop.messages.append)

    async def copy_out(self, *, every_s: float, grows: bool) -> tuple[str | None, float]:
        """Copy to a stage that answers every ``every_s``: what became of it, and after how long."""
        loop, open_ = asyncio.get_running_loop(), self.session.open
        order = KvCopy(session=open_.session, attempt=open_.attempt + 1, to="p9")

        async def answer() -> None:
            position = 0
            while True:
                await asyncio.sleep(every_s)
                position += grows
                taken = KvTaken(session=order.session, attempt=order.attempt, position=position)
                self.mover.told("p9", taken)

        answering, began_s = asyncio.create_task(answer()), loop.time()
        became = await self.mover.send(order, open_.client)
        answering.cancel()
        assert not self.mover.uses("p9")
        return became, loop.time() - began_s

    def assert_refused(self, reason: str) -> None:
        """Both sides were told, and the session is gone."""
        (up,) = self.upstream.messages
        assert isinstance(up, SessionRefused)
        assert up.code is RefusalCode.NO_COPY
        assert reason in up.reason
        told = self.hop.messages[-1]
        assert isinstance(told, KvTaken)
        assert told.refused == up.reason
        assert self.table.holding == 0
        assert self.engine.ended == [self.session.kv_key]
        assert self.counters["kv_refused"] == 1


def run(scenario: Coroutine[Any, Any, None]) -> None:
    run_virtual(scenario, limit_s=1000)


@pytest.mark.parametrize("size", [ROW_BYTES + 1, 4 << 20])
def test_a_piece_larger_than_its_tokens_is_refused_before_it_is_kept(size: int) -> None:
    async def scenario() -> None:
        side = Side(importing=True)
        side.take(0, 1, size)
        side.assert_refused(f"{size} bytes came as KV of 1 tokens")
        await asyncio.sleep(5)
        assert not side.engine.imported

    run(scenario())


def test_a_piece_for_which_there_is_no_room_ends_the_copy() -> None:
    async def scenario() -> None:
        side = Side(importing=True)
        side.shell.take_kv = lambda key, tokens: False  # type: ignore[method-assign]
        side.take(0, 1, ROW_BYTES)
        side.assert_refused("there is no room for more KV now")

    run(scenario())


def test_a_smaller_piece_is_left_to_the_engine() -> None:
    """Layers may differ in size: a row is measured by the largest."""

    async def scenario() -> None:
        side = Side(importing=True)
        side.take(0, 2, ROW_BYTES)
        await asyncio.sleep(5)
        assert side.engine.imported == [ROW_BYTES]
        assert side.session.done_position == 2

    run(scenario())


@pytest.mark.parametrize("tokens", [1, 2, 4])
def test_no_more_waits_for_the_engine_than_may_be_sent_ahead(tokens: int) -> None:
    async def scenario() -> None:
        side = Side(importing=True)
        for position in range(0, 8, tokens):
            side.take(position, tokens, tokens * ROW_BYTES)
        assert not side.upstream.messages
        await asyncio.sleep(10)  # all is written: as much may come again
        for position in range(8, 16, tokens):
            side.take(position, tokens, tokens * ROW_BYTES)
        assert not side.upstream.messages
        side.take(16, tokens, tokens * ROW_BYTES)
        side.assert_refused("ahead of what is written")

    run(scenario())


def test_one_piece_over_the_window_is_refused() -> None:
    async def scenario() -> None:
        side = Side(importing=True)
        side.take(0, 9, 9 * ROW_BYTES)
        side.assert_refused("ahead of what is written")

    run(scenario())


def test_who_says_the_same_again_takes_no_kv() -> None:
    async def scenario() -> None:
        side = Side(importing=False)
        side.session.done_position = 100
        became, took_s = await side.copy_out(every_s=0.5, grows=False)
        assert became == "no KV was taken for 5 s"
        assert took_s == pytest.approx(5, abs=0.1)

    run(scenario())


def test_a_copy_that_crawls_is_given_up() -> None:
    async def scenario() -> None:
        side = Side(importing=False)
        side.session.done_position = 100
        became, took_s = await side.copy_out(every_s=4.0, grows=True)
        assert became == "the copy has not caught up within 120 s"
        assert COPY_S_MAX <= took_s <= COPY_S_MAX + CONFIG.copy_stalled_s

    run(scenario())


def test_a_copy_that_catches_up_is_warm() -> None:
    async def scenario() -> None:
        side = Side(importing=False)
        side.session.done_position = 100
        became, took_s = await side.copy_out(every_s=1.0, grows=True)
        assert became is None
        assert took_s == pytest.approx(96, abs=1)
        assert side.counters["kv_copied"] == 96

    run(scenario())
