"""Publishes a peer's node record: on every change, and before the record expires."""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from dht.errors import NetworkError
from dht.messages.types import ModelRecord, NodeRecord, NodeState, PlanVersion, Reach
from dht.records.directory import LIFETIME_S, Directory, RecordKind
from dht.transport.interface import Transport
from dht.transport.relay_reservation import with_circuits
from node.peer.clock_watch import ClockWatch
from node.stage.server import StageServer

logger = logging.getLogger(__name__)

LOOK_S = 1.0
"""Time between two looks at the number of sessions."""
BUSIER = 2
"""A peer with more than this many times the sessions that it announced says so at once: clients
choose it for having little to do."""
RENEW_S = 0.6 * LIFETIME_S[RecordKind.NODES]
"""Maximum age of an unchanged record before it is published again."""
RENEW_MODEL_S = 0.6 * LIFETIME_S[RecordKind.MODELS]
"""Maximum age of an unchanged entry in the directory of models."""


class Announcer:
    """Holds this peer's newest record and keeps it published."""

    def __init__(
        self,
        *,
        transport: Transport,
        directory: Directory,
        stage: StageServer,
        record: NodeRecord,
        every_s: float,
        refined: Callable[[NodeRecord], NodeRecord] = lambda record: record,
        on_jump: Callable[[float], None] = lambda jump_s: None,
    ) -> None:
        """``every_s``: maximum delay to publish a change of load; others are published at once, and
        so is that of a peer with little to do that gets much.

        ``refined`` puts into a record what this peer has come to know better of itself. ``on_jump``
        is called with the seconds by which this machine's clock has jumped.
        """
        self._transport = transport
        self._directory = directory
        self._stage = stage
        self.record = record
        """This peer's present record."""
        self._every_s = every_s
        self._refined = refined
        self._on_jump = on_jump
        self._clock = ClockWatch()
        self._told: NodeRecord | None = None
        self._told_s = 0.0
        self._models = Directory.of_models(transport, directory.network)
        self._told_model: ModelRecord | None = None
        self._told_model_s = 0.0
        self._changed = asyncio.Event()
        self._beside: tuple[str, ...] = ()

    def set(self, state: NodeState, start: int, end: int, version: PlanVersion) -> None:
        """Set the state and layers; published soon."""
        self.record = replace(self.record, state=state, start=start, end=end, plan_version=version)
        self._changed.set()

    def set_moved(self, now_s: float) -> None:
        """Record that this peer gives up its layers for others now, for the anti-flap rules."""
        self.record = replace(self.record, moved_unix_s=now_s)

    def set_reach(self, reach: Reach, beside: tuple[str, ...] = ()) -> None:
        """Set how others reach this peer, as they found; published soon.

        ``beside``: addresses through relays or a router, beside those that it listens on.
        """
        self._beside = beside
        self.record = replace(self.record, reach=reach)
        self._changed.set()

    def again(self) -> None:
        """Publish everything once more, and soon: others may not have what was published."""
        self._told = self._told_model = None
        self._changed.set()

    async def announce(self) -> None:
        """Publish the record now. A failure is logged; the next attempt may succeed."""
        self._note_load()
        record, now_s = self.record, asyncio.get_running_loop().time()
        self._told = None
        try:
            if await self._directory.publish(record):
                self._told, self._told_s = record, now_s
            else:
                logger.info("nobody took this peer's announcement")
            await self._announce_model(record)
        except NetworkError as error:
            logger.info("cannot announce: %s", error)

    async def _announce_model(self, record: NodeRecord) -> None:
        """Keep this peer's entry in the directory of models: it changes with its layers alone."""
        entry = ModelRecord(
            peer_id=record.peer_id,
            model=record.model,
            precision=record.precision,
            start=record.start,
            end=record.end,
        )
        now_s = asyncio.get_running_loop().time()
        if entry == self._told_model and now_s - self._told_model_s < RENEW_MODEL_S:
            return
        if await self._models.publish(entry):
            self._told_model, self._told_model_s = entry, now_s

    async def run(self) -> None:
        """Publish whenever something changed, and before the record expires."""
        loop = asyncio.get_running_loop()
        looked_s = loop.time()
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._changed.wait()
            now_s = loop.time()
            if jump_s := self._clock.look(self._transport.now(), now_s):
                self._on_jump(jump_s)
                self._shift_times(jump_s)
                self.again()
            due = now_s - looked_s >= self._every_s
            busier = self._told and self._stage.sessions > BUSIER * self._told.sessions
            at_once = self._changed.is_set() or busier
            if not due and not at_once:
                continue
            looked_s = now_s
            if not at_once:
                self._note_load()
                fresh = now_s + self._every_s - self._told_s < RENEW_S
                if self.record == self._told and fresh:
                    continue
            self._changed.clear()
            await self.announce()

    def _shift_times(self, jump_s: float) -> None:
        """Keep what the record says of the past as long ago as it was."""
        record = self.record
        joined_s, moved_s = (
            at_s and max(0.0, at_s + jump_s) for at_s in (record.joined_unix_s, record.moved_unix_s)
        )
        self.record = replace(record, joined_unix_s=joined_s, moved_unix_s=moved_s)

    def _note_load(self) -> None:
        self.record = replace(
            self._refined(self.record),
            kv_tokens_free=self._stage.kv_tokens_free,
            kv_tokens_wanted=self._stage.wanted_tokens,
            sessions=self._stage.sessions,
            answers=self._stage.counters["finished"],
            answer_tokens=self._stage.counters["sampled"],
            addresses=with_circuits(self._transport.addresses, self._beside),
        )
