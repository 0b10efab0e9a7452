"""A model's own head over real engines around a ring: the tokens of plain decoding, always."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest

from client import GenerationOptions
from client.answer.answer import Piece
from client.swarm.one_answer import Generation
from node.engine.engine import Engine
from node.engine.head_drafts import HeadDrafts
from node.engine.work_item import WorkItem, WorkResult
from node.kv.export import KvBytes, pack_kv
from node.kv.page_names import NO_NAMES, PageNames
from node.sessions.open_checks import StageView
from tests.sim.paper_swarm import LAYERS, SPEC, PaperEngine, PaperSwarm
from tests.sim.test_sessions import owner
from tests.sim.test_speculation import counted
from tests.unit.node.engine.test_head_drafts import Headed, foretelling

pytestmark = pytest.mark.sim

PROMPT = tuple(range(40))
NEW = 40


class RealEngine(PaperEngine):
    """A real engine with the model's own head, whose steps take a paper engine's time."""

    model: ClassVar[Headed]
    hidden = 32
    page_tokens = 16

    def __init__(self, peer_id: str, start: int, end: int, *, kv_tokens: int, step_s: float):
        super().__init__(peer_id, start, end, kv_tokens=kv_tokens, step_s=step_s)
        self.engine: Engine = self.model.engine(start, end)
        self.kv_tokens = self.engine.kv.tokens
        self.heads: HeadDrafts | None = None
        if end == LAYERS:
            self.heads = self.model.heads(self.engine)
            self.feature_layers = self.heads.feature_layers

    @property
    def view(self) -> StageView:
        return StageView(
            fingerprint=SPEC.fingerprint,
            layers=LAYERS,
            context_tokens=self.engine.spec.context_tokens,
            vocab=self.engine.spec.vocab,
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
        if self.heads is not None:
            self.heads.open(key, tokens)
        return self.engine.kv.open(key, tokens, layers, likely_tokens, names)

    def keep_no_more(self, key: str) -> None:
        self.engine.kv.keep_no_more(key)

    def settle(self, key: str, tokens: int) -> None:
        self.engine.kv.settle(key, tokens)

    def extend_kv(self, key: str, tokens: int) -> bool:
        return self.engine.kv.extend(key, tokens)

    def free(self, key: str) -> None:
        self.queued.pop(key, None)
        self.engine.kv.free(key)
        if self.heads is not None:
            self.heads.free(key)

    def resumable(self, key: str, position: int) -> int:
        return self.engine.kv.resumable(key, position)

    def kv_row_bytes(self, start: int, end: int) -> int:
        return self.engine.spec.kv_bytes_per_token_layer * (end - start)

    async def export_kv(self, key: str, position: int, tokens: int) -> bytes:
        return pack_kv(self.engine.kv.take(key, position, tokens))

    async def import_kv(
        self, key: str, layers: tuple[int, int], position: int, tokens: int, body: bytes
    ) -> str | None:
        packed = KvBytes(
            start=layers[0], end=layers[1], position=position, tokens=tokens, body=body
        )
        return self.engine.kv.put(key, packed)

    def _run(self, item: WorkItem) -> WorkResult:
        results = self.engine.step([item])
        return (results if self.heads is None else self.heads.follow(results))[0]


class HeadedSwarm(PaperSwarm):
    engine_class = RealEngine
    headed = 1


@asynccontextmanager
async def headed_swarm(*spans: tuple[int, int]) -> AsyncIterator[PaperSwarm]:
    swarm = HeadedSwarm()
    try:
        for start, end in spans:
            await swarm.add(start, end)
        yield swarm
    finally:
        await swarm.close()


def rows_of(swarm: PaperSwarm) -> list[Any]:
    """What heads know of sessions, over all peers."""
    heads = [peer.engine.heads for peer in swarm.peers if peer.engine.heads is not None]
    return [rows for head in heads for rows in head._rows.values()]


@pytest.fixture(params=["deepseek_v3", "glm4_moe", "qwen3_next"])
def _model(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = foretelling(tmp_path, request.param, LAYERS)
    monkeypatch.setattr(RealEngine, "model", made, raising=False)
    monkeypatch.setattr(HeadedSwarm, "state_tokens", made.engine(0, 1).state_tokens)


async def struck(
    swarm: PaperSwarm, running: Generation, stage: int | None, way: str
) -> AsyncIterator[Piece]:
    """The pieces of an answer. With the one that brings its 20th token, the peer of ``stage`` is
    lost (``way`` is ``kill``) or moves its sessions away."""
    count = 0
    async for piece in running:
        hit = count < 20 <= count + len(piece.token_ids)
        if hit and stage is not None and len(running.route) > stage:
            gone = owner(swarm, running.route[stage].peer_id)
            swarm.kill(gone) if way == "kill" else gone.stage.move_all()
        count += len(piece.token_ids)
        yield piece


SAMPLED = {"temperature": 0.9, "top_p": 0.9, "top_k": 20, "seed": 3}


@pytest.mark.virtual(limit_s=2000)
@pytest.mark.usefixtures("_model")
@pytest.mark.parametrize("options", [{}, SAMPLED], ids=["greedy", "sampled"])
async def test_tokens_are_those_of_plain_decoding_whatever_is_lost(
    options: dict[str, float],
) -> None:
    spans = ((0, 3), (3, 5), (5, 8)) * 2
    plain = GenerationOptions(max_new_tokens=NEW, speculate=False, **options)
    drafted = GenerationOptions(max_new_tokens=NEW, **options)
    async with headed_swarm(*spans, (0, 8)) as swarm, swarm.client() as client:
        expected = (await client.generate(PROMPT, plain)).token_ids
        assert len(expected) == NEW
        for stage, way in ((None, ""), (2, "move"), (2, "kill"), (0, "kill")):
            running = client.begin(PROMPT, drafted)
            tokens: list[int] = []
            begun: set[int] = set()
            async for piece in struck(swarm, running, stage, way):
                tokens += piece.token_ids
                begun |= {rows.first for rows in rows_of(swarm) if rows.next > 0}
            assert tuple(tokens) == expected
            # A client tells its prompt; where KV was copied instead of rows, it is not run.
            assert begun == {0} or way == "move"
        counts = counted(swarm)
        assert 0 < counts["accepted_by_head"] < counts["drafted_by_head"]
        assert counts["engine_errors"] == 0
        await asyncio.sleep(120)
        assert not rows_of(swarm), "held for nobody"
