"""Peers show that they hold layers; who does not hold them cannot."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch

from dht.errors import PeerError
from dht.messages import codec
from dht.messages.peer import LayerCheck, LayerRows
from dht.transport.interface import LAYERS_PROTOCOL, Stream
from node.engine.engine import Engine, EngineConfig
from node.links.wire_rows import join_rows
from node.stage.layer_check import (
    APART_MAX,
    LAYERS_CHECKED_MAX,
    ROWS,
    CheckConfig,
    LayerChecker,
    LayerCheckServer,
    agree,
    apart,
    rows_for,
)
from node.weights.store import WeightStore
from testing.network import MemoryNetwork
from testing.tiny_families import make
from tests.unit.coordinator.conftest import make_record

BROOK = Path(__file__).resolve().parents[4] / "models" / "brook"
WIDTH = 8
NONCE = bytes(16)
CHECKS = 6
"""Rows that are drawn for each range of layers."""
GOLDEN = [0.034181829541921616, 0.11505188792943954, 0.0009092158870771527]
"""The first rows' numbers at width 3, for the peer "peer"."""


class Layers:
    """Layer number n adds n + 1."""

    hidden = WIDTH

    def __init__(self, start: int, end: int) -> None:
        self.held = range(start, end)
        self.runs = 0

    async def run_rows(self, start: int, end: int, rows: torch.Tensor) -> torch.Tensor | None:
        if not self.held.start <= start < end <= self.held.stop:
            return None
        self.runs += 1
        return rows + sum(range(start + 1, end + 1))


def swarm() -> tuple[MemoryNetwork, LayerChecker]:
    """A network, and a peer that holds layers 0 to 7 and asks others."""
    network = MemoryNetwork(random.Random(1))
    return network, LayerChecker(network.transport(), Layers(0, 8))


async def holder(network: MemoryNetwork, start: int, end: int) -> tuple[Any, Layers]:
    """The record and the engine of a peer that holds what it says."""
    transport, engine = network.transport(), Layers(start, end)
    await LayerCheckServer(transport, engine).start()
    return make_record(transport.peer_id, start, end), engine


async def liar(
    network: MemoryNetwork, serve: Callable[[Stream, LayerCheck], Awaitable[None]]
) -> Any:
    """The record of a peer that says that it holds layers 0 to 7 and answers as ``serve`` does."""
    transport = network.transport()

    async def heard(stream: Stream) -> None:
        await serve(stream, (await codec.read_frame(stream)).message)

    await transport.serve(LAYERS_PROTOCOL, heard)
    return make_record(transport.peer_id, 0, 8)


@pytest.mark.virtual(limit_s=1000)
async def test_who_holds_layers_shows_it_and_is_not_asked_again_at_once():
    network, checker = swarm()
    record, engine = await holder(network, 4, 12)
    for _ in range(3):
        shown = await checker.proven([record], range(8), range(4, 8))
        assert shown == {record.peer_id}
    assert engine.runs == 1
    await asyncio.sleep(100)
    assert await checker.proven([record], range(8), range(4, 8))
    assert engine.runs == 2, "it may have moved since"


@pytest.mark.virtual(limit_s=1000)
async def test_who_is_about_to_leave_shows_nobody_its_layers():
    network, checker = swarm()
    transport, engine = network.transport(), Layers(0, 8)
    leaves = False
    await LayerCheckServer(transport, engine, leaves=lambda: leaves).start()
    record = make_record(transport.peer_id, 0, 8)
    assert await checker.proven([record], range(8), range(8))
    leaves = True
    assert await checker.proven([record], range(8), range(8)), "it is not asked so soon"
    assert not await checker.proven([record], range(8), range(8), again=True)
    assert not await checker.proven([record], range(8), range(8)), "it is believed no more"


@pytest.mark.virtual(limit_s=1000)
async def test_at_the_end_those_show_their_layers_again_that_did_before():
    network, checker = swarm()
    found = [await holder(network, n, n + 1) for n in range(CheckConfig().asked_at_once + 2)]
    records, needed = [record for record, _ in found], range(len(found))
    assert not await checker.proven(records, range(8), needed, again=True)
    assert not any(engine.runs for _, engine in found), "strangers are not asked"
    await checker.proven(records, range(8), needed)
    everybody = {record.peer_id for record in records}
    assert await checker.proven(records, range(8), needed) == everybody
    assert await checker.proven(records, range(8), needed, again=True) == everybody
    assert [engine.runs for _, engine in found] == [2] * len(found)


@pytest.mark.virtual(limit_s=1000)
async def test_only_as_many_are_asked_as_the_layers_need():
    network, checker = swarm()
    found = [await holder(network, 0, 8) for _ in range(10)]
    shown = await checker.proven([record for record, _ in found], range(8), range(2, 4))
    assert len(shown) == sum(engine.runs for _, engine in found) == CheckConfig().asked_at_once
    assert await checker.proven([record for record, _ in found], range(8), range(2, 4)) == shown
    assert sum(engine.runs for _, engine in found) == CheckConfig().asked_at_once


async def _echo(stream: Stream, check: LayerCheck) -> None:
    rows = rows_for(check.nonce, "somebody else", WIDTH)
    await codec.send_frame(stream, LayerRows(), join_rows([rows]))


async def _nothing(stream: Stream, check: LayerCheck) -> None:
    await codec.send_frame(stream, LayerRows())


async def _not_numbers(stream: Stream, check: LayerCheck) -> None:
    rows = torch.full((ROWS, WIDTH), float("nan"))
    await codec.send_frame(stream, LayerRows(), join_rows([rows]))


async def _too_much(stream: Stream, check: LayerCheck) -> None:
    await codec.send_frame(stream, LayerRows(), bytes(1 << 20))


async def _another_message(stream: Stream, check: LayerCheck) -> None:
    await codec.send_frame(stream, check)


async def _silence(stream: Stream, check: LayerCheck) -> None:
    await asyncio.sleep(1000)


@pytest.mark.parametrize(
    "serve", [_echo, _nothing, _not_numbers, _too_much, _another_message, _silence]
)
@pytest.mark.virtual(limit_s=1000)
async def test_who_does_not_hold_them_shows_nothing(serve):
    network, checker = swarm()
    record = await liar(network, serve)
    begun_s = asyncio.get_running_loop().time()
    assert await checker.proven([record], range(8), range(8)) == frozenset()
    assert asyncio.get_running_loop().time() - begun_s <= CheckConfig().answer_s + 1
    honest, _ = await holder(network, 0, 8)
    assert await checker.proven([record, honest], range(8), range(8)) == {honest.peer_id}


@pytest.mark.virtual(limit_s=1000)
async def test_another_peers_rows_show_nothing():
    """A stranger passes the question on to an honest holder, which answers for itself alone."""
    network, checker = swarm()
    honest, engine = await holder(network, 0, 8)
    relay = network.transport()

    async def passed_on(stream: Stream) -> None:
        check = (await codec.read_frame(stream)).message
        further = await relay.open_stream(honest.peer_id, LAYERS_PROTOCOL)
        await codec.send_frame(further, check)
        told = await codec.read_frame(further)
        await codec.send_frame(stream, told.message, told.body)

    await relay.serve(LAYERS_PROTOCOL, passed_on)
    record = make_record(relay.peer_id, 0, 8)
    checker._engine.run_rows = engine.run_rows = _small_steps
    assert await checker.proven([record], range(8), range(8)) == frozenset()
    assert await checker.proven([honest], range(8), range(8)) == {honest.peer_id}


async def _small_steps(start: int, end: int, rows: torch.Tensor) -> torch.Tensor:
    """Rows stay close to what came in, so that those of other rows are far away."""
    return 1.1 * rows


@pytest.mark.virtual(limit_s=1000)
async def test_strangers_cannot_make_a_peer_run_rows_without_end():
    network, _ = swarm()
    record, engine = await holder(network, 0, 8)

    async def asked(times: int) -> None:
        stranger = network.transport()
        for _ in range(times):
            stream = await stranger.open_stream(record.peer_id, LAYERS_PROTOCOL)
            await codec.send_frame(stream, LayerCheck(nonce=NONCE, start=0, end=1))
            await codec.read_frame(stream)
            await stream.close()

    await asked(50)
    assert engine.runs == 4, "one stranger"
    for _ in range(50):
        await asked(2)
    assert engine.runs == 16, "identities cost nothing"


@pytest.mark.parametrize(
    ("start", "end"), [(0, LAYERS_CHECKED_MAX + 1), (2, 2), (3, 1)], ids=["many", "none", "turned"]
)
@pytest.mark.virtual(limit_s=1000)
async def test_a_check_is_of_a_few_layers(start, end):
    network, _ = swarm()
    server = LayerCheckServer(network.transport(), Layers(0, 100))
    near, far = await _streams(network, server)
    await codec.send_frame(near, LayerCheck(nonce=NONCE, start=start, end=end))
    with pytest.raises(PeerError):
        await server._serve(far)


async def _streams(network: MemoryNetwork, server: LayerCheckServer) -> tuple[Stream, Stream]:
    """Both ends of a stream."""
    found: asyncio.Future[Stream] = asyncio.get_running_loop().create_future()
    one, two = network.transport(), network.transport()

    async def taken(stream: Stream) -> None:
        found.set_result(stream)
        await asyncio.sleep(100)

    await two.serve(LAYERS_PROTOCOL, taken)
    near = await one.open_stream(two.peer_id, LAYERS_PROTOCOL)
    return near, await found


@pytest.fixture(scope="module")
def exact() -> Engine:
    return _brook("float32", None)


def _brook(dtype: str, quantize: str | None) -> Engine:
    store = WeightStore.open(str(BROOK))
    engine = Engine(
        EngineConfig(
            store=store, name="brook", dtype=dtype, quantize=quantize, memory_bytes=1 << 28
        )
    )
    engine.load(0, engine.spec.layers)
    return engine


@pytest.mark.parametrize(
    ("dtype", "quantize", "most"),
    [("float32", None, 1e-4), ("bfloat16", None, 0.02), ("float16", None, 0.02),
     ("float32", "int8", 0.1), ("float32", "int4", 0.25), ("bfloat16", "int4", 0.25)],
)  # fmt: skip
def test_precision_does_not_keep_layers_from_being_recognised(exact, dtype, quantize, most):
    other = _brook(dtype, quantize)
    layers = exact.spec.layers
    found = []
    for start in range(layers - LAYERS_CHECKED_MAX + 1):
        end = start + LAYERS_CHECKED_MAX
        for drawn in range(CHECKS):
            given = rows_for(bytes([start, drawn] * 8), "peer", exact._width)
            mine, theirs = exact.run_rows(start, end, given), other.run_rows(start, end, given)
            assert mine is not None
            assert theirs is not None
            found.append(apart(given, mine.float(), theirs.float()))
    assert mean(found) <= most < APART_MAX
    assert max(found) < 0.8 * APART_MAX


def test_other_layers_are_told_apart(exact):
    layers = exact.spec.layers
    given = rows_for(NONCE, "peer", exact._width)
    for start in range(layers - 1):
        mine = exact.run_rows(start, start + 1, given)
        other = exact.run_rows(start + 1, start + 2, given)
        assert mine is not None
        assert other is not None
        assert not agree(given, mine, other)
        assert not agree(given, mine, given)
        assert not agree(given, mine, replace_rows(mine))
    assert exact.run_rows(0, layers + 1, given) is None
    assert exact.kv.free_tokens == exact.kv.tokens


def replace_rows(rows: torch.Tensor) -> torch.Tensor:
    """Rows of the same sizes in other directions."""
    return rows[:, torch.randperm(rows.shape[1], generator=torch.Generator().manual_seed(1))]


def test_rows_are_the_same_everywhere():
    """Peers on other machines and versions must draw the same rows."""
    rows = rows_for(NONCE, "peer", 3)
    assert rows.shape == (ROWS, 3)
    assert rows[0].tolist() == pytest.approx(GOLDEN)
    assert rows_for(NONCE, "reep", 3)[0].tolist() != pytest.approx(GOLDEN)


@pytest.mark.parametrize(
    "family", ["glm_moe_dsa, chosen before", "gemma4, inputs and shared keys", "gemma3n"]
)
def test_layers_are_shown_where_rows_carry_more_than_hidden_states(
    family: str, tmp_path: Path
) -> None:
    make(tmp_path, family)
    store = WeightStore.open(str(tmp_path))
    engine = Engine(EngineConfig(store=store, name="tiny", memory_bytes=64 << 20))
    engine.load(0, engine.spec.layers)
    structure = engine.layout.structure
    assert structure.carried is not None
    given = rows_for(NONCE, "peer", structure.row_width)
    for start in range(engine.spec.layers):
        made = engine.run_rows(start, start + 1, given)
        assert made is not None
        assert made.shape == (ROWS, structure.carried.hidden.width)
        assert agree(given, made, made)
        assert not agree(given, made, given[:, : made.shape[1]])
