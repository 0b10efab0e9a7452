"""Keeps a :class:`client.view.view.SwarmView` fresh: reads records and plans, pings who serves."""

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from client.errors import StatusCallback, UnavailableError
from client.view.view import NO_PIN, SwarmView, ViewConfig
from coordinator.plans.catalogue.reading import network_models
from coordinator.plans.catalogue.served import NAMED_MAX
from coordinator.plans.followed import FollowedPlans
from coordinator.policies.failure.pinger import BY_CLIENTS, Pinger
from coordinator.problem.model_pin import ModelPin, other_weights, several
from dht.checkpoints.model_files import directory_fingerprint
from dht.errors import NetworkError, UserError
from dht.messages.types import ModelSpec, NodeState, model_key
from dht.process.supervision import Supervisor, loop_s
from dht.records.directory import DEFAULT_NETWORK, Directory
from dht.transport.interface import Transport

logger = logging.getLogger(__name__)

LOOK_S = 0.25
"""Time between two looks for a first peer."""
FIRST_READ_S = 1.0
"""Maximum time that a client which enters waits for plans and links once it has the records."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderConfig(ViewConfig):
    """How a client looks at the swarm. Times in seconds."""

    network: str = DEFAULT_NETWORK
    links_s: float = 30.0
    """Time between two looks at the links that peers measured."""
    wait_s: float = 60.0
    """Time that an answer waits for missing layers before it gives up; 0 gives up at once."""
    pings_always: bool = False
    """Whether to ping before anything failed, too, so that a dead peer is known before a request
    fails."""


class SwarmReader:
    """Reads what peers announce about one model into :attr:`view`."""

    def __init__(
        self,
        transport: Transport,
        model_name: str,
        config: ReaderConfig,
        on_status: StatusCallback,
        *,
        pin: ModelPin = NO_PIN,
        directory: Path | None = None,
    ) -> None:
        """``pin`` says which of the models under the name is meant; its configuration is in
        ``directory``, if it is known."""
        self._transport = transport
        self._model_name = model_name
        self._directory = directory
        self._config = config
        self._on_status = on_status
        self.parts = Supervisor()
        """Keeps the client's loops running."""
        self._says_which = not pin.root and not pin.fingerprint
        """Whether the user is still to be told whose word says which weights are meant."""
        self._plans_read, self._links_read = asyncio.Event(), asyncio.Event()
        self.waits_for = ""
        """Why the model's description is not known, while that is waited for."""
        self._blind = ""
        """Why the last look showed nothing; empty when it was answered."""
        self._told_clock = False
        self.directory = Directory(transport, config.network, model_key(model_name))
        self._plans = FollowedPlans(transport, self.directory)
        self.view = SwarmView(
            config,
            identity=transport.peer_id,
            pin=pin,
            is_silent=lambda peer_id: self._pinger.state_of(peer_id).silent,
            secret=secrets.token_bytes(32),
        )
        self._pinger = Pinger(transport, BY_CLIENTS, self.view.heard, self.parts)

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[None]:
        """Read now and every ``poll_s``; raises NetworkError when nobody answers at first.

        Plans and links are waited for up to ``FIRST_READ_S``: routes are drawn without them, too.
        """
        await self.refresh()
        try:
            # Parts of their own: holders of plans that do not answer must not keep records from
            # being read.
            works = self._keep_fresh, self._keep_plans, self._keep_links
            async with self.parts.beside(*works, ends_process=False):
                with suppress(TimeoutError):
                    async with asyncio.timeout(FIRST_READ_S):
                        await self._plans_read.wait()
                        await self._links_read.wait()
                yield
        finally:
            self.view.is_left = True
            await self._pinger.close()

    async def _keep_fresh(self) -> None:
        while True:
            await asyncio.sleep(self._config.poll_s)
            await self.look()

    async def _keep_plans(self) -> None:
        """Read the plans that peers follow; who has them may take its time."""
        while True:
            with suppress(NetworkError):  # routes are drawn without
                await self._plans.refresh(self.view.nodes, self.view.trusts)
            self.view.take_plans(self._plans.plans)
            self._plans_read.set()
            await asyncio.sleep(self._config.poll_s)

    async def _keep_links(self) -> None:
        while True:
            with suppress(NetworkError):  # stages are then taken to be equally far apart
                self.view.take_links(await self.directory.links())
            self._links_read.set()
            await asyncio.sleep(self._config.links_s)

    async def look(self) -> None:
        """Read all anew; where nobody answers, the view stays as it is."""
        try:
            await self.refresh()
        except (NetworkError, UserError) as error:
            self._blind = str(error)
            self.view.counters["refresh_failed"] += 1
            logger.info("cannot read who serves what: %s", error)

    async def refresh(self) -> None:
        """Read node records and plan now; raises NetworkError, ClosedError, and UserError where the
        model's own configuration is not understood and must say which peers lie."""
        self.view.check()
        nodes = await self.directory.nodes()
        self.view.take_nodes(nodes)
        self._blind = ""
        if (note := self._transport.clock_note) and not self._told_clock:
            self._told_clock = True
            self._on_status(f"{note}; until then theirs counts")
        pin = self.view.pin
        if len(self.view.models) > 1 and pin.root and self._directory is not None:
            # They differ in their sizes alone, of which somebody lies.
            right = await asyncio.to_thread(directory_fingerprint, pin.root, self._directory)
            self.view.pin = replace(pin, fingerprint=right)
            self.view.take_nodes(nodes)
        if self._says_which and self.view.spec is not None:
            self._says_which = False
            self._on_status(
                f"{self._model_name} is taken at its peers' word, with fingerprint"
                f" {self.view.spec.fingerprint}; --fingerprint, or its files, would hold them to it"
            )
        troubled = self.view.is_troubled(loop_s())
        pings = troubled or self._config.pings_always
        serving = (r for r in self.view.nodes.values() if pings and r.state is NodeState.SERVING)
        self._pinger.watch({record.peer_id: record.addresses for record in serving})

    async def other_models(self) -> str:
        """Which models the network serves, in words; empty where that is none, or this one too."""
        try:
            async with asyncio.timeout(FIRST_READ_S):
                specs = await network_models(self._transport, self._config.network)
        except (NetworkError, TimeoutError):
            return ""
        names = list(dict.fromkeys(spec.name for spec in specs))
        if not names or self._model_name in names:
            return ""
        more = f" and {len(names) - NAMED_MAX} more" if len(names) > NAMED_MAX else ""
        return f"it serves {', '.join(names[:NAMED_MAX])}{more}: name one of these with --model"

    async def ready_spec(self) -> ModelSpec:
        """The model's description; waits for a first peer as long as an answer would.

        Raises UnavailableError when none came. It does so at once where the network serves other
        models alone, and after a second look where the caller must say which weights are meant.
        """
        deadline_s = loop_s() + self._config.wait_s
        self.waits_for, others = "", None
        while (spec := self.view.spec) is None:
            reason = f"nobody in network {self._config.network!r} announces {self._model_name}"
            must_choose = bool(self.view.nodes) and not self._blind
            if len(self.view.models) > 1:
                reason = several(self._model_name, self.view.models)
            elif self.view.nodes:
                reason += other_weights(self.view.pin, self.view.nodes)
            elif not self._blind and others is None:
                others = await self.other_models()
                if others:
                    raise UnavailableError(f"{reason}; {others}")
            if self._blind:  # then nobody said so
                reason = f"cannot read who serves {self._model_name}: {self._blind}"
            if note := self._transport.clock_note:
                reason += f"; {note}"
            was_told = reason == self.waits_for
            if not was_told:
                self.waits_for = reason
                self._on_status(f"waiting: {reason}")
            # The first look may have missed a peer.
            if (must_choose and was_told) or loop_s() >= deadline_s:
                raise UnavailableError(reason)
            await asyncio.sleep(LOOK_S)
            await self.look()
        return spec
