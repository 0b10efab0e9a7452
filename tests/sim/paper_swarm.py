"""A whole swarm in one process under a virtual clock: real sessions, stages, hops and clients over
the in-memory network, with an engine that computes a number instead of hidden states.

The engine's "hidden state" of a token is its id carried along; the last stage folds all of a
session's ids in order into a hash and samples from it. So an answer is right only if every token
of the session reached the last stage exactly once and in order, on whatever route.
"""

import asyncio
import random
import struct
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    asynccontextmanager,
    nullcontext,
)
from dataclasses import dataclass, field

import torch

from client import Swarm, SwarmConfig
from client.text.tokenizer import ModelText
from coordinator.policies.routing.balance import BalanceConfig
from dht.budget import Budget
from dht.messages.session import RouteStage
from dht.messages.types import DeviceSpec, ModelSpec, NodeRecord, NodeState
from dht.records.directory import Directory
from dht.transport.interface import Transport
from node.device.tensors import DTYPES
from node.drafting.chain import DraftChain
from node.drafting.drafter import Draft
from node.drafting.suffix import SuffixDrafter
from node.engine.work_item import WorkItem, WorkResult
from node.kv.page_names import NO_NAMES, PageNames
from node.links.hops import HopConfig
from node.links.probe import ProbeServer
from node.peer.balancer import Balancer
from node.sessions.open_checks import StageView
from node.stage.server import StageConfig, StageServer
from node.stage.streams import StageStreams
from testing.network import MemoryNetwork, MemoryTransport

LAYERS = 8
VOCAB = 1000
CONTEXT = 512
SPEC = ModelSpec(
    name="paper",
    root="paper-weights",
    layers=LAYERS,
    layer_bytes=1,
    embed_bytes=1,
    head_bytes=1,
    kv_bytes_per_token_layer=1,
    activation_bytes=4,
    context_tokens=CONTEXT,
    vocab=VOCAB,
)
NETWORK = "test"
NAME_ALONE = ModelText(name=SPEC.name)


def answer_of(prompt: Sequence[int], tokens: int) -> tuple[int, ...]:
    """What a right swarm answers."""
    state, answer = 7, []
    for token_id in prompt:
        state = fold(state, token_id)
    for _ in range(tokens):
        answer.append(state % VOCAB)
        state = fold(state, answer[-1])
    return tuple(answer)


def fold(state: int, token_id: int) -> int:
    return (state * 1_000_003 + token_id + 1) % (1 << 61)


class PaperEngine:
    """Implements the stage's engine: every request takes ``step_s`` of virtual time."""

    wire_dtype = "float32"
    hidden = 1
    page_tokens = 1

    def __init__(self, peer_id: str, start: int, end: int, *, kv_tokens: int, step_s: float):
        self.span = (start, end)
        self.serving = True
        self.step_s = step_s
        self.kv_tokens = kv_tokens
        self.kv: dict[str, tuple[range, int]] = {}
        """Layers and tokens that each session has taken."""
        self.states: dict[str, list[int]] = {}
        self.settled: dict[str, int] = {}
        """Rows of each session that nothing takes back."""
        self.keeps = True
        self.names: dict[str, PageNames] = {}
        self.kept: dict[tuple[tuple[int, int], bytes], int] = {}
        """What sessions left here, by layers and the name of the page of one token."""
        self.rows_run = 0
        self.kv_imported = 0
        self.refuses_kv = False
        self.free_at_s = 0.0
        self.backlog_tokens = 0
        self.state_tokens = 0
        """What sessions are charged with for a state that cannot be cut; 0: they have none."""
        self.queued: dict[str, deque[tuple[float, asyncio.TimerHandle]]] = {}
        self.foretells = 0
        """Number of tokens that a head drafts at a last stage."""
        self.feature_layers: tuple[int, ...] = ()
        """Layers in front of which that head looks, as the peer says."""
        self.chance = random.Random(7)
        self.known: dict[str, tuple[int, ...]] = {}
        """Positions at which each session's state is known."""

    @property
    def _keeps(self) -> bool:
        return self.keeps and not self.state_tokens

    @property
    def kv_free(self) -> int:
        """KV tokens that are free on the fullest layer."""
        taken = [
            sum(tokens for layers, tokens in self.kv.values() if layer in layers)
            for layer in range(*self.span)
        ]
        return self.kv_tokens - max(taken)

    @property
    def view(self) -> StageView:
        return StageView(
            fingerprint=SPEC.fingerprint,
            layers=LAYERS,
            context_tokens=CONTEXT,
            vocab=VOCAB,
            start=self.span[0],
            end=self.span[1],
            serving=self.serving,
        )

    def open_kv(
        self,
        key: str,
        tokens: int,
        layers: tuple[int, int],
        likely_tokens: int,
        names: PageNames = NO_NAMES,
    ) -> int:
        assert key not in self.kv, "opened twice"
        self.kv[key], self.names[key] = (range(*layers), 0), names
        states = [7]
        for name in names.found(self.page_tokens):
            if (layers, name) not in self.kept:
                break
            states.append(self.kept[layers, name])
        self.states[key], self.settled[key] = states, len(states) - 1
        return len(states) - 1

    def keep_no_more(self, key: str) -> None:
        self.names[key] = NO_NAMES

    def settle(self, key: str, tokens: int) -> None:
        if key in self.states:
            self.settled[key] = max(self.settled[key], min(tokens, len(self.states[key]) - 1))

    def extend_kv(self, key: str, tokens: int) -> bool:
        layers, had = self.kv[key]
        self.kv[key] = layers, max(had, tokens)
        if self.kv_free < 0:
            self.kv[key] = layers, had
            return False
        return True

    def free(self, key: str) -> None:
        self.known.pop(key, None)
        self.queued.pop(key, None)
        layers, _ = self.kv.pop(key, (range(0), 0))
        names = self.names.pop(key, NO_NAMES)
        settled = self.settled.pop(key, 0)
        for index, state in enumerate(self.states.pop(key, [7])[1 : 1 + settled]):
            if (name := names.page(index, self.page_tokens)) is not None and self._keeps:
                self.kept.setdefault(((layers.start, layers.stop), name), state)

    def drop(self, key: str) -> None:
        """What is under way ends, and its result counts for nothing. With states, what waits is
        forgotten, too: it would begin where no state is known."""
        now_s = asyncio.get_running_loop().time() if self.state_tokens else float("inf")
        for begins_s, handle in self.queued.pop(key, ()):
            if begins_s > now_s:
                handle.cancel()

    def resumable(self, key: str, position: int) -> int:
        """With states, those of the newest step's beginning and end, or within what was drafted."""
        if not self.state_tokens:
            return position
        return max((at for at in self.known.get(key, (0,)) if at <= position), default=0)

    def kv_row_bytes(self, start: int, end: int) -> int:
        return 8

    async def export_kv(self, key: str, position: int, tokens: int) -> bytes:
        assert not self.state_tokens, "states are not copied"
        states = self.states[key][1 + position : 1 + position + tokens]
        if not states:
            raise ValueError("nothing is written there")
        await asyncio.sleep(self.step_s / 4)
        return struct.pack(f"<{len(states)}q", *states)

    async def import_kv(
        self, key: str, layers: tuple[int, int], position: int, tokens: int, body: bytes
    ) -> str | None:
        if self.refuses_kv:
            return "this engine takes no KV"
        await asyncio.sleep(self.step_s / 4)
        states = self.states.setdefault(key, [7])
        if key not in self.kv:
            return "no KV is reserved"
        if position != len(states) - 1 or len(body) != 8 * tokens:
            return f"KV at {position} came, {len(states) - 1} comes next"
        self.settled[key] = position
        states += struct.unpack(f"<{tokens}q", body)
        self.kv_imported += tokens
        return None

    async def run_rows(self, start: int, end: int, rows: torch.Tensor) -> torch.Tensor | None:
        if not (self.serving and self.span[0] <= start < end <= self.span[1]):
            return None
        return rows + sum(range(start, end)) + end - start

    def start(self, on_results: Callable[[Sequence[WorkResult]], None]) -> None:
        self.on_results = on_results

    def submit(self, item: WorkItem) -> None:
        loop = asyncio.get_running_loop()
        begins_s = max(self.free_at_s, loop.time())
        self.free_at_s = begins_s + self.step_s
        handle = loop.call_at(self.free_at_s, lambda: self.on_results([self._run(item)]))
        self.queued.setdefault(item.session, deque(maxlen=64)).append((begins_s, handle))

    def together(self) -> AbstractContextManager[object]:
        return nullcontext()

    def _run(self, item: WorkItem) -> WorkResult:
        key = item.session
        if key not in self.kv:
            return WorkResult(item=item, error="no KV is reserved")
        assert item.position + item.tokens <= self.kv[key][1], "KV was not taken"
        ids = item.token_ids
        if ids is None:
            assert item.hidden is not None
            assert item.hidden.dtype is DTYPES[self.wire_dtype]
            if not bool(torch.isfinite(item.hidden).all()):
                return WorkResult(item=item, error="not finite", unsound_input=True)
            ids = tuple(int(n) for n in item.hidden.flatten().tolist())
        self.rows_run += len(ids)
        states = self.states.setdefault(key, [7])
        assert item.position < len(states), "a position was skipped"
        if self.state_tokens:
            assert item.position in (0, *self.known.get(key, ())), "no state is known there"
            end = item.position + len(ids)
            within = range(item.position + 1, end) if item.drafts else ()
            self.known[key] = item.position, *within, end
        del states[item.position + 1 :]
        self.settled[key] = item.position
        for token_id in ids:
            states.append(fold(states[-1], token_id))
        if item.end < LAYERS:
            return WorkResult(
                item=item, hidden=torch.tensor(ids, dtype=DTYPES[self.wire_dtype])[:, None]
            )
        if item.sampling is None:
            return WorkResult(item=item)
        return self._sampled(item, states[len(states) - 1 - len(item.drafts) :])

    def _sampled(self, item: WorkItem, states: Sequence[int]) -> WorkResult:
        """The tokens behind the item's newest row and behind those that were drafted right."""
        run = [states[0] % VOCAB]
        for draft, state in zip(item.drafts, states[1:], strict=True):
            if draft != run[-1]:
                break
            run.append(state % VOCAB)
        foretold = self._foretold(fold(states[len(run) - 1], run[-1])) if item.foretells else ()
        return WorkResult(item=item, token_ids=tuple(run), foretold=foretold)

    def _foretold(self, state: int) -> tuple[int, ...]:
        """What the model's own head drafts behind ``state``; one token in five is wrong."""
        told = []
        for _ in range(self.foretells):
            wrong = self.chance.random() < 0.2
            told.append((state + wrong) % VOCAB)
            state = fold(state, told[-1])
        return tuple(told)


class RiggedDrafter:
    """Knows what comes, and is wrong about one token in five."""

    def __init__(self, foretell: Callable[[Sequence[int], int], Sequence[int]]) -> None:
        """``foretell`` gives a number of tokens behind those so far, as far as it knows them."""
        self._foretell = foretell
        self._tokens: list[int] = []
        self._chance = random.Random(7)

    @property
    def known(self) -> int:
        return len(self._tokens)

    def extend(self, token_ids: Sequence[int]) -> None:
        self._tokens += token_ids

    def propose(self, most: int) -> Draft:
        right = self._foretell(self._tokens, most)
        wrong = (self._chance.random() < 0.2 for _ in right)
        return Draft(token_ids=tuple(n + bad for n, bad in zip(right, wrong, strict=True)), grade=3)


class PaperDrafts:
    """A draft model that takes ``token_s`` for a token, and is wrong about one token in five."""

    def __init__(
        self, foretell: Callable[[Sequence[int], int], Sequence[int]], token_s: float = 0.002
    ) -> None:
        """``foretell`` is as in :class:`RiggedDrafter`."""
        self._foretell = foretell
        self.token_s = token_s
        self.fails_at: int | None = None
        """Number of drawn tokens at which it breaks; None: never."""
        self.rows: dict[str, list[int]] = {}
        """Tokens whose rows were run, by session."""
        self._drawn = 0
        self._chance = random.Random(7)

    def open(self, key: str, tokens: int) -> bool:
        assert key not in self.rows, "opened twice"
        self.rows[key] = []
        return True

    def free(self, key: str) -> None:
        del self.rows[key]

    def draw(self, chain: DraftChain, told: Callable[[], None]) -> None:
        asyncio.get_running_loop().call_later(self.token_s, self._step, chain, told)

    def _step(self, chain: DraftChain, told: Callable[[], None]) -> None:
        if chain.goes_on:
            self._run(chain)
            if chain.goes_on:
                if len(chain.drawn) == chain.wakes_at:
                    told()
                self.draw(chain, told)
                return
        chain.running = False
        told()

    def _run(self, chain: DraftChain) -> None:
        token_ids, draws = chain.rows()
        rows = self.rows[chain.key]
        assert chain.ran <= len(rows), "rows are lacking"
        rows[chain.ran :] = token_ids
        chain.ran += len(token_ids)
        chain.spent_s += self.token_s
        if draws:
            self._drawn += 1
            chain.failed = self._drawn == self.fails_at
            (right,) = self._foretell(rows, 1)
            chain.drawn.append(right + (self._chance.random() < 0.2))


@dataclass(slots=True)
class PaperPeer:
    """One peer: its transport, its engine and its stage server."""

    transport: MemoryTransport
    engine: PaperEngine
    stage: StageServer
    directory: Directory
    joined_unix_s: float
    bandwidth: float | None = None
    """Measured bandwidth from any other peer to this one, in bytes/s."""
    tasks: list["asyncio.Task[None]"] = field(default_factory=list)

    @property
    def peer_id(self) -> str:
        return self.transport.peer_id

    def record(self) -> NodeRecord:
        start, end = self.engine.span
        return NodeRecord(
            peer_id=self.peer_id,
            name="paper",
            software_version="0",
            device=DeviceSpec(kind="cpu", name="paper", memory_bytes=1),
            model=SPEC,
            memory_bytes=1,
            kv_tokens_min=1,
            kv_tokens_free=self.stage.kv_tokens_free,
            kv_tokens_wanted=self.stage.wanted_tokens,
            sessions=self.stage.sessions,
            tokens_per_s=(100.0,) * LAYERS,
            state=NodeState.SERVING if self.engine.serving else NodeState.DRAINING,
            start=start,
            end=end,
            addresses=self.transport.addresses,
            joined_unix_s=self.joined_unix_s,
            foretells=self.engine.foretells > 0,
            feature_layers=self.engine.feature_layers,
        )

    def fill(self) -> None:
        """Leave no room for more than the sessions that are here were let in for."""
        room = self.stage.kv.room
        room.pages = room.charged_tokens // room.page_tokens

    async def announce(self) -> None:
        await self.directory.publish(self.record())

    async def keep_announced(self) -> None:
        while True:
            await self.announce()
            await asyncio.sleep(15)


class PaperSwarm:
    """Peers over given spans of layers."""

    engine_class: type[PaperEngine] = PaperEngine
    state_tokens = 0
    """What each session is charged with for a state that cannot be cut; 0: there is none."""
    foretold = False
    """Whether first stages draft what is mostly right; else they find little that repeats."""

    modelled = False
    """Whether first stages have a draft model."""
    headed = 0
    """Number of tokens that the model's own head drafts at last stages."""

    def foretell(self, tokens: Sequence[int], most: int) -> Sequence[int]:
        """What comes behind ``tokens``; a test may know better."""
        return answer_of(tokens, most)

    def __init__(self, seed: int = 0, budget: Budget | None = None) -> None:
        """``budget`` is what strangers may take of all peers together; else each has its own."""
        self.budget = budget
        self.network = MemoryNetwork(random.Random(seed))
        self.peers: list[PaperPeer] = []
        self.drafts: dict[str, PaperDrafts] = {}
        """The peers' draft models, by peer id."""

    async def transport(self) -> Transport:
        """A transport for one more peer."""
        return self.network.transport()

    @property
    def route(self) -> tuple[RouteStage, ...]:
        """The peers in order."""
        return tuple(
            RouteStage(peer_id=peer.peer_id, start=peer.engine.span[0], end=peer.engine.span[1])
            for peer in self.peers
        )

    async def add(
        self,
        start: int,
        end: int,
        *,
        kv_tokens: int = 10_000,
        step_s: float = 0.01,
        log_bytes_max: int = 1 << 20,
        wire_dtype: str = "float32",
        sessions_per_client_max: int = StageConfig().sessions_per_client_max,
    ) -> PaperPeer:
        transport = await self.transport()
        engine = self.engine_class(
            transport.peer_id, start, end, kv_tokens=kv_tokens, step_s=step_s
        )
        engine.wire_dtype = wire_dtype
        engine.state_tokens, engine.foretells = self.state_tokens, self.headed
        if self.modelled:
            self.drafts[transport.peer_id] = PaperDrafts(self.foretell)
        config = StageConfig(
            draft_model=self.drafts.get(transport.peer_id),
            chunk_tokens=16,
            hops=HopConfig(idle_s=30.0),
            log_bytes_max=log_bytes_max,
            sessions_per_client_max=sessions_per_client_max,
            drafter=(lambda: RiggedDrafter(self.foretell)) if self.foretold else SuffixDrafter,
        )
        directory = Directory(transport, NETWORK, SPEC.key)
        stage = StageServer(
            transport,
            engine,
            config,
            addresses_of=directory.addresses_of,
            budget=self.budget,
            bandwidth_from=lambda _: peer.bandwidth,
        )
        await StageStreams(transport, stage, self.budget).start()
        await ProbeServer(transport).start()
        peer = PaperPeer(
            transport=transport,
            engine=engine,
            stage=stage,
            directory=directory,
            joined_unix_s=transport.now(),
        )
        peer.tasks = [asyncio.create_task(stage.run()), asyncio.create_task(peer.keep_announced())]
        await peer.announce()
        self.peers.append(peer)
        return peer

    def balance(self, *, evens: bool = False) -> None:
        """Let peers ask for relief by freer ones, as real peers do; ``evens``: with room, too."""
        for peer in self.peers:
            balancer = Balancer(peer.directory, peer.stage, peer.record, BalanceConfig(evens=evens))
            peer.tasks.append(asyncio.create_task(balancer.run()))

    def kill(self, peer: PaperPeer) -> None:
        """End a peer as a crash does: its streams break."""
        for task in peer.tasks:
            task.cancel()
        self.network.kill(peer.peer_id)

    def freeze(self, peer: PaperPeer) -> None:
        """Stop a peer without breaking anything: it just never answers again."""
        self.network.freeze(peer.peer_id)

    def stick(self, peer: PaperPeer) -> None:
        """Let a peer's engine never finish another step; it goes on answering."""
        peer.engine.step_s = 1e6

    def cut(self, peer: PaperPeer) -> None:
        """Let everything that a peer sends, or is sent, fall into a black hole."""
        self.network.partition([peer.peer_id])

    def client(
        self,
        *,
        wait_s: float = 60.0,
        pings_always: bool = False,
        on_status: Callable[[str], None] | None = None,
        text: ModelText = NAME_ALONE,
        named: tuple[str, ...] = (),
        fingerprint: str = "",
        transport: Transport | None = None,
    ) -> AbstractAsyncContextManager[Swarm]:
        config = SwarmConfig(
            network=NETWORK,
            wait_s=wait_s,
            pings_always=pings_always,
            fingerprint=fingerprint,
        )
        transport = transport or self.network.transport()
        return Swarm.over(transport, text, config, on_status, named)

    async def close(self) -> None:
        tasks = [task for peer in self.peers for task in peer.tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for peer in self.peers:
            await peer.stage.close("the test ended")
            await peer.transport.close()


@asynccontextmanager
async def paper_swarm(
    *spans: tuple[int, int],
    seed: int = 0,
    log_bytes_max: int = 1 << 20,
    budget: Budget | None = None,
    foretold: bool = False,
    modelled: bool = False,
    headed: int = 0,
    state_tokens: int = 0,
) -> AsyncIterator[PaperSwarm]:
    """A swarm with one peer per span; for the options see :class:`PaperSwarm`."""
    swarm = PaperSwarm(seed, budget)
    swarm.foretold, swarm.modelled, swarm.headed = foretold, modelled, headed
    swarm.state_tokens = state_tokens
    try:
        for start, end in spans:
            await swarm.add(start, end, log_bytes_max=log_bytes_max)
        yield swarm
    finally:
        await swarm.close()
