"""An EAGLE-3 head over real engines around a ring: the tokens of plain decoding, always."""

import asyncio
import struct
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from client import GenerationOptions
from dht.messages.session import ActivationItem, Activations, FeaturedActivations
from node.engine.engine import Engine
from node.engine.head_drafts import HeadDrafts
from node.links.wire_rows import feature_bytes
from node.sessions.session import FEATURED_PROMPT_TOKENS
from node.stage import pipeline
from tests.sim.paper_swarm import answer_of, paper_swarm
from tests.sim.test_own_head import NEW, PROMPT, SAMPLED, RealEngine, headed_swarm, rows_of, struck
from tests.sim.test_speculation import counted
from tests.unit.node.engine.eagle import FEATURES, LAYERS, foretold_target, write_head
from tests.unit.node.engine.test_eagle_head import engine_of, heads_of
from tests.unit.node.engine.test_head_drafts import Headed

pytestmark = pytest.mark.sim

WIDTH = 32
SPANS = ((0, 3), (3, 5), (5, 8))


@dataclass
class Eagled(Headed):
    """A tiny model and an EAGLE-3 head beside it, on disk."""

    head: Path

    def engine(self, start: int, end: int) -> Engine:
        return engine_of(self.directory, start, end)

    def heads(self, engine: Engine) -> HeadDrafts:
        return heads_of(engine, self.head)


@pytest.fixture
def right(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the head is mostly right; engines have a model with that head."""
    target = foretold_target(tmp_path / "target")
    head = write_head(tmp_path / "head", target, right=request.param)
    monkeypatch.setattr(RealEngine, "model", Eagled(target, "llama", head), raising=False)
    return bool(request.param)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Activations, int]]]:
    """Frames of rows that stages send, with the lengths of their bodies."""
    seen: list[tuple[Activations, int]] = []
    frame: Callable[..., Any] = pipeline._frame

    def noted(*given: Any) -> Any:
        message, body = frame(*given)
        seen.append((message, len(body)))
        return message, body

    monkeypatch.setattr(pipeline, "_frame", noted)
    return iter([seen]).__next__()


@pytest.mark.parametrize(
    ("right", "options"),
    [(True, {}), (True, SAMPLED), (False, {})],
    ids=["right-greedy", "right-sampled", "wrong-greedy"],
    indirect=["right"],
)
@pytest.mark.virtual(limit_s=2000)
async def test_tokens_are_those_of_plain_decoding_whatever_is_lost(
    right: bool, options: dict[str, float]
) -> None:
    """A head that is right is still wrong at times: what is drawn instead is seen with it, too."""
    plain = GenerationOptions(max_new_tokens=NEW, speculate=False, **options)
    drafted = GenerationOptions(max_new_tokens=NEW, **options)
    async with headed_swarm(*SPANS * 2, (0, 8)) as swarm, swarm.client() as client:
        expected = (await client.generate(PROMPT, plain)).token_ids
        assert len(expected) == NEW
        for stage, way in ((None, ""), (1, "move"), (2, "move"), (2, "kill"), (0, "kill")):
            running = client.begin(PROMPT, drafted)
            pieces = struck(swarm, running, stage, way)
            tokens = [token async for piece in pieces for token in piece.token_ids]
            assert tuple(tokens) == expected
        counts = counted(swarm)
        assert counts["drafted_by_head"] > 0
        assert counts["accepted_by_head"] < counts["drafted_by_head"]
        assert counts["accepted_by_head"] > 0 or not right
        assert counts["engine_errors"] == counts["strange_features"] == 0
        await asyncio.sleep(120)
        assert not rows_of(swarm), "held for nobody"


@pytest.mark.parametrize("right", [True], indirect=True)
@pytest.mark.usefixtures("right")
@pytest.mark.virtual(limit_s=2000)
async def test_rows_carry_what_was_seen_before_and_plain_sessions_nothing(
    sent: list[tuple[Activations, int]],
) -> None:
    prompt = tuple(n % 50 for n in range(110))
    async with headed_swarm(*SPANS) as swarm, swarm.client() as client:
        assert len(prompt) < FEATURED_PROMPT_TOKENS
        for speculate in (False, True):
            sent.clear()
            options = GenerationOptions(max_new_tokens=NEW, speculate=speculate)
            await client.generate(prompt, options)
            vectors: Counter[int] = Counter()
            for message, size in sent:
                rows = sum(item.tokens for item in message.items)
                more = 0
                if isinstance(message, FeaturedActivations):
                    (more,) = message.features
                    vectors[more // rows] += rows
                    assert more % rows == 0
                assert size == rows * WIDTH * 4 + more * feature_bytes(WIDTH)
            # In front of layer 3 the state in front of layer 2, in front of 5 that of 4, too.
            assert set(vectors) == ({1, 2} if speculate else set())
            assert vectors[1] == vectors[2]


@pytest.mark.parametrize("right", [True], indirect=True)
@pytest.mark.usefixtures("right")
@pytest.mark.virtual(limit_s=2000)
async def test_rows_in_8_bits_are_the_same_with_features_beside_them() -> None:
    async with headed_swarm(*SPANS) as swarm, swarm.client() as client:
        for peer in swarm.peers:
            peer.stage.pipeline._config = replace(peer.stage.pipeline._config, int8="all")
        plain, drafted = [
            await client.generate(
                PROMPT, GenerationOptions(max_new_tokens=NEW, speculate=speculate)
            )
            for speculate in (False, True)
        ]
        assert plain.token_ids == drafted.token_ids
        assert counted(swarm)["accepted_by_head"] > 0
        assert counted(swarm)["malformed"] == 0


@pytest.mark.parametrize("right", [True], indirect=True)
@pytest.mark.usefixtures("right")
@pytest.mark.virtual(limit_s=2000)
async def test_a_prompt_that_is_kept_or_long_costs_drafts_and_no_token(
    monkeypatch: pytest.MonkeyPatch, sent: list[tuple[Activations, int]]
) -> None:
    prompt = tuple(n % 50 for n in range(150))
    monkeypatch.setattr("node.sessions.session.FEATURED_PROMPT_TOKENS", 40)
    async with headed_swarm(*SPANS) as swarm, swarm.client() as client:
        plain = GenerationOptions(max_new_tokens=NEW, speculate=False)
        expected = (await client.generate(prompt, plain)).token_ids
        for _ in range(2):  # the second finds the prompt's pages
            sent.clear()
            answer = await client.generate(prompt, GenerationOptions(max_new_tokens=NEW))
            assert answer.token_ids == expected
            assert answer.drafted_tokens > 0
            of_prompt = [
                sum(message.features)
                for message, _ in sent
                if isinstance(message, FeaturedActivations)
                and message.items[0].position < len(prompt)
            ]
            assert sum(of_prompt) <= 3 * 40


@pytest.mark.virtual(limit_s=600)
async def test_what_a_head_is_said_to_look_at_and_cannot_is_not_asked_for() -> None:
    for layers in ((5, 2, 4), (2, 2, 4), (1, 8), (2, 4, 5)):
        async with (
            paper_swarm((0, 4), (4, LAYERS), headed=3) as swarm,
            swarm.client() as client,
        ):
            swarm.peers[1].engine.feature_layers = layers
            await swarm.peers[1].announce()
            answer = await client.generate(PROMPT, max_new_tokens=NEW)
            assert answer.token_ids == answer_of(PROMPT, NEW)
            assert counted(swarm)["accepted_by_head"] > 0


def packed(*numbers: float, scale: float = 0.01) -> bytes:
    """Vectors of one number."""
    return b"".join(struct.pack("<fb", scale, int(each)) for each in numbers)


@pytest.mark.parametrize(
    ("features", "count", "rows"),
    [
        (packed(1), 1, 1),  # of three that the head looks at, two are in front of layer 5
        (packed(1, 1, 1), 3, 1),
        (packed(*[1] * 8), 8, 1),  # of four rows of one
        (packed(1, 1, scale=float("nan")), 2, 1),
        (packed(1, 1, scale=float("inf")), 2, 1),
    ],
)
@pytest.mark.virtual(limit_s=600)
async def test_strange_features_cost_drafts_and_no_token(
    features: bytes, count: int, rows: int
) -> None:
    async with (
        paper_swarm((0, 5), (5, LAYERS), headed=3) as swarm,
        swarm.client() as client,
    ):
        last = swarm.peers[1]
        last.engine.feature_layers = FEATURES
        await last.announce()
        pipeline, take = last.stage.pipeline, last.stage.pipeline.take_activations

        def lied(peer_id: str, message: Activations, body: bytes) -> None:
            (item,) = message.items
            if item.tokens == rows:
                message = FeaturedActivations(
                    items=message.items,
                    dtype=message.dtype,
                    hidden=message.hidden,
                    features=(count,),
                )
                body = bytes(body)[: 4 * rows] + features
            take(peer_id, message, body)

        pipeline.take_activations = lied  # type: ignore[method-assign]
        answer = await client.generate(PROMPT, max_new_tokens=NEW)
        assert answer.token_ids == answer_of(PROMPT, NEW)
        counts = counted(swarm)
        assert counts["strange_features"] > 0
        assert counts["engine_errors"] == counts["malformed"] == 0


@pytest.mark.parametrize(
    ("features", "counts"),
    [(b"", (1,)), (packed(1), (2,)), (packed(1), (0,)), (packed(1), (1, 0)), (packed(1) * 9, (1,))],
)
@pytest.mark.virtual(limit_s=600)
async def test_features_of_another_length_end_their_stream_alone(
    features: bytes, counts: tuple[int, ...]
) -> None:
    from dht.messages import codec
    from dht.transport.interface import HOP_PROTOCOL

    async with paper_swarm((0, 5), (5, LAYERS)) as swarm, swarm.client() as client:
        evil = swarm.network.transport()
        stream = await evil.open_stream(swarm.peers[1].peer_id, HOP_PROTOCOL)
        item = ActivationItem(session="s" * 16, attempt=0, position=0, tokens=1)
        message = FeaturedActivations(items=(item,), dtype="float32", hidden=1, features=counts)
        await codec.send_frame(stream, message, struct.pack("<f", 5.0) + features)
        await asyncio.sleep(1)
        assert swarm.peers[1].stage.counters["malformed"] == 1
        answer = await client.generate(PROMPT, max_new_tokens=NEW)
        assert answer.token_ids == answer_of(PROMPT, NEW)
