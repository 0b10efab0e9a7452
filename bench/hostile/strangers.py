"""Attacks of strangers on stage servers and on the DHT: streams, opens, requests for records."""

import asyncio
import contextlib
import os
import struct
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

import msgspec

from bench.hostile.attacker import MODEL, CountedStream, Seen, Sent, Target, chain_of, look
from client import Swarm, SwarmConfig
from client.text.tokenizer import ModelText
from dht.budget import PROBE_BYTES
from dht.checkpoints.model_files import directory_root
from dht.errors import NetworkError, PeerError, SwarmError
from dht.identity.grant import grant
from dht.identity.peer_id import Identity, peer_id_bytes
from dht.messages import codec
from dht.messages.peer import ProbeRequest
from dht.messages.session import (
    FramePart,
    Ping,
    Prompt,
    Sampling,
    SessionAccepted,
    SessionOpen,
    SessionRefused,
)
from dht.messages.types import RouteStage
from dht.records.signed import sign_record
from dht.transport.interface import (
    HOP_PROTOCOL,
    PLAN_PROTOCOL,
    PROBE_PROTOCOL,
    RELAY_PROTOCOL,
    SESSION_PROTOCOL,
    TOKENS_PROTOCOL,
    Transport,
)
from dht.transport.relay_messages import (
    HopType,
    Status,
    connect_message,
    read_message,
)
from dht.transport.relay_reservation import granted_by, reserve
from node.links.probe import PROBE

CROWD_IDENTITIES, CROWD_GRAMMARS = 4, 8
PROBE_IDENTITIES = 4
PINGS = codec.encode_frame(Ping(nonce=1)) * 1000
PART_BYTES = 1 << 15
PARTS_BEGUN, PARTS_IDENTITIES = 8, 4
IDLE_IDENTITIES = 5
IDLE_STREAMS = 256
"""Streams that an identity opens and leaves, as long as it gets more."""
FIND_TIMES = 60
FIND_RECORDS, FIND_RECORD_BYTES = 300, 4000
URGENT_SESSIONS = 64
COSTLY_SESSIONS = 32
DRIP_IDENTITIES, DRIP_SESSIONS = 5, 16
DRIP_TOKENS, DRIP_S = 400, 0.5
"""Tokens of a prompt that comes one by one, and the time between two of them."""


async def unread_pongs(target: Target) -> Sent:
    """Pings over hops, whose answers are never read."""
    transport = await target.enter()

    async def flood(peer_id: str) -> None:
        stream = await target.stream(transport, peer_id, HOP_PROTOCOL)
        try:
            while True:
                stream.write(PINGS)
                target.sent.frames += 1000
                await stream.drain()
        finally:
            await stream.close()

    return await target.at_once([partial(flood, peer) for peer in target.ids for _ in range(4)])


async def unfinished_frames(target: Target) -> Sent:
    """Frames of the largest size in parts of 32 KiB that stop before their last one."""
    identities = [await target.enter() for _ in range(PARTS_IDENTITIES)]
    body, most = os.urandom(PART_BYTES), codec.FRAME_BOUNDS.bytes_max

    async def begin(transport: Transport, peer_id: str) -> None:
        stream = await target.stream(transport, peer_id, HOP_PROTOCOL)
        try:
            for step in range(most // PART_BYTES - 1):
                for number in range(PARTS_BEGUN):
                    offset = step * PART_BYTES
                    part = FramePart(number=number, offset=offset, total_bytes=most, slow=True)
                    await stream.say(part, body)
                    await stream.hear()
            await asyncio.sleep(target.left_s)
        finally:
            await stream.close()

    pairs = [partial(begin, each, peer) for each in identities for peer in target.ids]
    return await target.at_once(pairs)


async def idle_streams(target: Target) -> Sent:
    """As many streams as five identities get, opened and left alone."""
    protocols = (HOP_PROTOCOL, SESSION_PROTOCOL, TOKENS_PROTOCOL, PLAN_PROTOCOL, PROBE_PROTOCOL)
    held: list[CountedStream] = []

    async def fill(transport: Transport, peer_id: str) -> None:
        for number in range(IDLE_STREAMS):
            protocol = protocols[number % len(protocols)]
            held.append(await target.stream(transport, peer_id, protocol))
        await asyncio.sleep(target.left_s)

    identities = [await target.enter() for _ in range(IDLE_IDENTITIES)]
    pairs = [partial(fill, each, peer) for each in identities for peer in target.ids]
    return await target.at_once(pairs)


def open_of(seen: Seen, client: Transport, number: int, **changes: Any) -> SessionOpen:
    """A well-formed open over the targets' chain; ``changes`` are made to it. Not signed."""
    open_ = SessionOpen(
        session=f"{number:08d}{client.peer_id[-12:]}",
        attempt=0,
        client=client.peer_id,
        fingerprint=seen.model.fingerprint,
        route=seen.stages(),
        hop=0,
        prompt_tokens=8,
        max_new_tokens=8,
        sampling=Sampling(),
    )
    return replace(open_, **changes)


async def answer_to(stream: CountedStream, open_: SessionOpen) -> object:
    """What a stage says to an open."""
    await stream.say(open_)
    async with asyncio.timeout(15):
        return await stream.hear()


def note(sent: Sent, reply: object) -> bool:
    """Count a refusal; whether the session was accepted."""
    if isinstance(reply, SessionRefused):
        sent.refused[reply.code] += 1
    return isinstance(reply, SessionAccepted)


async def opens_in_anothers_name(target: Target) -> Sent:
    """Opens over a hop for a client that asked for nothing, unsigned or signed by the attacker."""
    transport = await target.enter()
    seen, numbers = await look(target, transport), count()
    layers = seen.model.layers
    victim = Identity.generate().peer_id

    async def forge(peer_id: str) -> None:
        record = seen.nodes[peer_id]
        first = RouteStage(peer_id=transport.peer_id, start=0, end=max(1, record.start))
        mine = RouteStage(peer_id=peer_id, start=first.end, end=layers)
        stream = await target.stream(transport, peer_id, HOP_PROTOCOL)
        try:
            for number in numbers:
                open_ = open_of(seen, transport, number, route=(first, mine))
                signed = grant(replace(open_, client=victim), transport.sign, transport.now())
                forged = signed if number % 2 else replace(signed, grant=b"")
                taken = await answer_to(stream, replace(forged, hop=1))
                target.sent.gained += note(target.sent, taken)
        finally:
            await stream.close()

    lasts = [peer for peer, record in seen.nodes.items() if record.end == layers]
    return await target.at_once([partial(forge, peer) for peer in lasts])


def with_field(message: object, name: str, value: object) -> bytes:
    """A frame of ``message`` with one field more than it has."""
    kind, version, fields = msgspec.msgpack.decode(codec.encode(message))
    envelope = msgspec.msgpack.encode([kind, version, {**fields, name: value}])
    return struct.pack("<II", 4 + len(envelope), len(envelope)) + envelope


async def dials_on_order(target: Target) -> Sent:
    """Sessions whose second stage is said to be at others' addresses, which the peer then dials."""
    transport = await target.enter()
    seen, numbers = await look(target, transport), count()

    async def dialled(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        target.sent.gained += 1
        writer.close()

    listener = await asyncio.start_server(dialled, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]

    async def order(peer_id: str) -> None:
        stranger, layers = Identity.generate().peer_id, seen.model.layers
        end = min(seen.nodes[peer_id].end, layers - 1)
        first = RouteStage(peer_id=peer_id, start=0, end=end)
        second = RouteStage(peer_id=stranger, start=end, end=layers)
        hosts = ("ip4/127.0.0.1", "dns4/localhost", "ip4/127.0.0.2")
        where = tuple(f"/{host}/tcp/{port}/p2p/{stranger}" for host in hosts)
        open_ = open_of(seen, transport, next(numbers), route=(first, second))
        signed = grant(open_, transport.sign, transport.now())
        stream = await target.stream(transport, peer_id, SESSION_PROTOCOL)
        try:
            target.sent.frames += 1
            stream.write(with_field(signed, "addresses", [[], list(where)]))
            async with asyncio.timeout(15):
                note(target.sent, await stream.hear())
        finally:
            await stream.close()

    firsts = [peer for peer, record in seen.nodes.items() if record.start == 0]
    async with listener:
        return await target.at_once([partial(order, peer) for peer in firsts for _ in range(4)])


async def claims_urgency(target: Target) -> Sent:
    """Sessions that claim an answer has begun, to be let into the room kept for urgent ones."""
    transport = await target.enter()
    seen, numbers = await look(target, transport), count()

    async def hold() -> None:
        changes = {"prompt_tokens": 64, "answered": 1, "max_new_tokens": 64}
        open_ = grant(
            open_of(seen, transport, next(numbers), **changes), transport.sign, transport.now()
        )
        stream = await target.stream(transport, open_.route[0].peer_id, SESSION_PROTOCOL)
        try:
            if note(target.sent, await answer_to(stream, open_)):
                while True:
                    await stream.say(Ping(nonce=1))
                    await asyncio.sleep(10)
            await asyncio.sleep(1)
        finally:
            await stream.close()

    return await target.at_once([hold] * URGENT_SESSIONS)


async def prompts_token_by_token(target: Target) -> Sent:
    """Prompts whose tokens come one by one: no session rests, and none is past its prompt."""
    identities = [await target.enter() for _ in range(DRIP_IDENTITIES)]
    seen, numbers = await look(target, identities[0]), count()
    later = {peer: record for peer, record in seen.nodes.items() if record.start}
    firsts = [record for record in seen.nodes.values() if not record.start]
    from_each = [chain_of({**later, first.peer_id: first}) for first in firsts]
    routes = [replace(seen, route=chain).stages() for chain in from_each if chain]

    async def drip(transport: Transport) -> None:
        number = next(numbers)
        changes = {"prompt_tokens": DRIP_TOKENS, "route": routes[number % len(routes)]}
        open_ = open_of(seen, transport, number, **changes)
        signed = grant(open_, transport.sign, transport.now())
        stream = await target.stream(transport, open_.route[0].peer_id, SESSION_PROTOCOL)
        try:
            accepted = note(target.sent, await answer_to(stream, signed))
            for position in range(DRIP_TOKENS if accepted else 0):
                ids = (position,)
                await stream.say(
                    Prompt(session=open_.session, attempt=0, position=position, token_ids=ids)
                )
                await asyncio.sleep(DRIP_S)
            await asyncio.sleep(DRIP_S)
        finally:
            await stream.close()

    drips = [partial(drip, each) for each in identities for _ in range(DRIP_SESSIONS)]
    return await target.at_once(drips)


async def probes_without_end(target: Target) -> Sent:
    """Probes of the longest kind, on stream after stream, to use up what volunteers lend."""
    identities = [await target.enter() for _ in range(PROBE_IDENTITIES)]
    share_bytes = (PROBE_BYTES.stranger_burst or 0.0) + target.left_s * PROBE_BYTES.per_s
    got_bytes: Counter[tuple[str, str]] = Counter()

    async def draw(transport: Transport, peer_id: str) -> None:
        stream = await target.stream(transport, peer_id, PROBE_PROTOCOL)
        try:
            for size_bytes in (PROBE.bytes_max, PROBE.first_bytes):
                await stream.say(ProbeRequest(size_bytes=size_bytes))
            while True:
                frame = await codec.read_frame(stream)
                got_bytes[transport.peer_id, peer_id] += len(frame.body)
                if not frame.body:
                    raise NetworkError("no more probes")
        finally:
            await stream.close()

    sent = await target.at_once(
        [partial(draw, each, peer) for each in identities for peer in target.ids]
    )
    above_bytes = sum(max(0.0, got - 2 * share_bytes) for got in got_bytes.values())
    sent.gained += int(above_bytes) >> 20
    return sent


async def calls_of_strangers(target: Target) -> Sent:
    """One stranger takes a relay's slot at every peer, and another calls it through them."""
    called, caller = await target.enter(), await target.enter()

    async def pass_on(peer_id: str) -> None:
        target.sent.frames += 1
        await reserve(called, peer_id, target.peers)
        target.sent.gained += 1

    async def call(peer_id: str) -> None:
        stream = await target.stream(caller, peer_id, RELAY_PROTOCOL)
        try:
            target.sent.frames += 1
            stream.write(connect_message(HopType.CONNECT, peer_id_bytes(called.peer_id)))
            await stream.drain()
            if granted_by(await read_message(stream)).status == Status.OK:
                target.sent.gained += 1
            raise NetworkError("passed on to nobody")
        finally:
            await stream.close()

    return await target.at_once(
        [partial(do, peer) for do in (pass_on, call) for peer in target.ids]
    )


async def crowd_of_grammars(target: Target) -> Sent:
    """Opens of four identities, each under a grammar of its own that takes long to read."""
    identities = [await target.enter() for _ in range(CROWD_IDENTITIES)]
    seen, numbers = await look(target, identities[0]), count()

    async def crowd(transport: Transport) -> None:
        number = next(numbers)
        sampling = Sampling(grammar=costly_grammar(number), stop_token_ids=(1,))
        open_ = open_of(seen, transport, number, sampling=sampling)
        signed = grant(open_, transport.sign, transport.now())
        stream = await target.stream(transport, open_.route[0].peer_id, SESSION_PROTOCOL)
        try:
            note(target.sent, await answer_to(stream, signed))
        finally:
            await stream.close()

    return await target.at_once(
        [partial(crowd, each) for each in identities for _ in range(CROWD_GRAMMARS)]
    )


def costly_grammar(number: int) -> bytes:
    """A grammar whose terminal multiplies before any bound counts."""
    terms = " & ".join(f"/.*a.{{{at}}}b.*/" for at in range(5, 40))
    return f'start: X "{number}"\nX: {terms}'.encode()


async def costly_sampling(target: Target) -> Sent:
    """Answers whose sampling sorts the whole vocabulary for every token."""
    transport = await target.enter()
    options = {"temperature": 2.0, "top_p": 0.99, "repetition_penalty": 1.3, "logprobs": 20}

    async with Swarm.over(
        transport, ModelText.load(MODEL.name, MODEL, directory_root(MODEL)), SwarmConfig(), str
    ) as swarm:

        async def ask() -> None:
            target.sent.frames += 1
            try:
                await swarm.generate("Once", max_new_tokens=256, ignore_eos=True, **options)
            except SwarmError as error:
                raise NetworkError(str(error)) from error

        return await target.at_once([ask] * COSTLY_SESSIONS)


async def repeated_finds(target: Target) -> Sent:
    """Made-up records under one key, and requests that name this key sixty times."""
    from hivemind.dht.routing import DHTID
    from hivemind.p2p import PeerID
    from hivemind.proto import dht_pb2

    transport: Any = await target.enter(serves=True)
    protocol, key = transport._node.protocol, f"hostile/{transport.peer_id}/nodes"
    place = DHTID.generate(source=key)
    values = made_up(key, transport.now() + 90, FIND_RECORDS, lambda _: b"x" * FIND_RECORD_BYTES)

    async def store(peer_id: str) -> None:
        for first in range(0, FIND_RECORDS, 100):
            await store_at(target, transport, peer_id, key, values[first : first + 100])

    async def find(peer_id: str) -> None:
        request = dht_pb2.FindRequest(keys=[place.to_bytes()] * FIND_TIMES, peer=protocol.node_info)
        target.sent.frames += 1
        target.sent.bytes += request.ByteSize()
        stub = protocol.get_stub(PeerID.from_base58(peer_id))
        with whatever_hivemind_raises():
            answer = await stub.rpc_find(request, timeout=10)
            target.sent.refused["not found"] += not answer.results

    await asyncio.gather(*(store(peer) for peer in target.ids))
    return await target.at_once([partial(find, peer) for peer in target.ids])


Made = tuple[str, bytes, float]
"""An author's peer id, its signed record, and when that expires."""


def made_up(
    key: str, expires_unix_s: float, number: int, payload: Callable[[Identity], bytes]
) -> list[Made]:
    """Records of as many authors, each of whom is nobody but signs properly."""
    authors = [Identity.generate() for _ in range(number)]
    return [
        (each.peer_id, sign_record(each, key, payload(each), expires_unix_s), expires_unix_s)
        for each in authors
    ]


async def store_at(
    target: Target, transport: Any, peer_id: str, key: str, records: list[Made]
) -> None:
    """Store others' records at one peer, as DHT nodes do for each other."""
    from hivemind.dht.routing import DHTID
    from hivemind.p2p import PeerID
    from hivemind.utils import MSGPackSerializer

    authors, signed, expiries = map(list, zip(*records, strict=True))
    target.sent.records += len(records)
    target.sent.bytes += sum(map(len, signed))
    with whatever_hivemind_raises():
        taken = await transport._node.protocol.call_store(
            PeerID.from_base58(peer_id),
            [DHTID.generate(source=key)] * len(authors),
            [MSGPackSerializer.dumps(each) for each in signed],
            expiries,
            subkeys=authors,
        )
        target.sent.refused["not stored"] += len(records) - sum(taken or ())


@contextlib.contextmanager
def whatever_hivemind_raises() -> Iterator[None]:
    """hivemind's calls fail with errors of many kinds: to an attacker all are a refusal."""
    try:
        yield
    except (NetworkError, PeerError, TimeoutError):
        raise
    except Exception as error:
        raise NetworkError(f"{type(error).__name__}: {error}") from error
