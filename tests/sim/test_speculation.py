"""Drafts around the ring: the same tokens, several at a time, whatever happens on the way."""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence

import pytest

from client import GenerationOptions, Swarm
from dht.messages.session import SESSION_BOUNDS, ActivationItem, Activations, RingToken
from node.drafting.drafter import Draft
from node.sessions.session import StageSession
from node.stage.server import StageServer
from testing.clock import run_virtual
from testing.network import LinkModel
from tests.sim.paper_swarm import PaperSwarm, answer_of, paper_swarm
from tests.sim.test_sessions import owner

pytestmark = pytest.mark.sim

PROMPT = tuple(range(40))
NEW = 120


def counted(swarm: PaperSwarm) -> Counter[str]:
    return sum((peer.stage.counters for peer in swarm.peers), Counter())


async def times_of(client: Swarm) -> dict[bool, float]:
    """Seconds that an answer took without drafts and with them; each must be right."""
    loop, took_s = asyncio.get_running_loop(), {}
    for speculate in (False, True):
        begun_s = loop.time()
        options = GenerationOptions(max_new_tokens=NEW, speculate=speculate)
        answer = await client.generate(PROMPT, options)
        took_s[speculate] = loop.time() - begun_s
        assert answer.token_ids == answer_of(PROMPT, NEW)
    return took_s


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.virtual(limit_s=600)
async def test_drafts_change_no_token_and_save_rounds(stages: int) -> None:
    spans = [(at, at + 8 // stages) for at in range(0, 8, 8 // stages)][:stages]
    spans[-1] = (spans[-1][0], 8)
    async with paper_swarm(*spans, foretold=True) as swarm, swarm.client() as client:
        loop = asyncio.get_running_loop()
        took_s, drafted = {}, {}
        for speculate in (False, True):
            begun_s = loop.time()
            options = GenerationOptions(max_new_tokens=NEW, speculate=speculate)
            answer = await client.generate(PROMPT, options)
            took_s[speculate] = loop.time() - begun_s
            drafted[speculate] = answer.drafted_tokens
            assert answer.token_ids == answer_of(PROMPT, NEW)
            assert ("drafted" in +counted(swarm)) == speculate
        assert took_s[True] < took_s[False] / 2
        first, *_, last = (peer.stage.counters for peer in (swarm.peers[0], *swarm.peers))
        assert NEW / 2 < first["accepted_drafts"] < first["drafted"]
        assert last["sampled"] == 2 * NEW
        assert drafted == {False: 0, True: last["accepted_drafts"]}
        for peer in swarm.peers:  # of the last round only the last stage knows
            left = last["accepted_drafts"] - peer.stage.counters["accepted_drafts"]
            assert 0 <= left <= SESSION_BOUNDS.draft_tokens_max


@pytest.mark.parametrize("lost_at", [3, 20, 60])
@pytest.mark.parametrize("way", ["kill", "freeze"])
@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.virtual(limit_s=600)
async def test_a_stage_lost_amid_drafts_costs_no_token(stage: int, way: str, lost_at: int) -> None:
    spans = ((0, 3), (3, 6), (6, 8)) * 2
    async with (
        paper_swarm(*spans, seed=lost_at, foretold=True) as swarm,
        swarm.client() as client,
    ):
        for peer in swarm.peers:  # the first stage knows of tokens before the client does
            far = LinkModel(delay_s=0.07)
            swarm.network.set_link(peer.peer_id, client.transport.peer_id, far)
        running = client.begin(PROMPT, GenerationOptions(max_new_tokens=NEW))
        tokens: list[int] = []
        lost = False
        async for piece in running:
            tokens += piece.token_ids
            if not lost and len(tokens) >= lost_at:
                lost = True
                getattr(swarm, way)(owner(swarm, running.route[stage].peer_id))
        assert tuple(tokens) == answer_of(PROMPT, NEW)
        assert running.answer().failovers >= 1


@pytest.mark.parametrize("logged", [True, False])
@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.virtual(limit_s=600)
async def test_a_stage_that_leaves_amid_drafts_costs_no_token(stage: int, logged: bool) -> None:
    spans = ((0, 3), (3, 6), (6, 8)) * 2
    log_bytes_max = 1 << 20 if logged else 16
    async with (
        paper_swarm(*spans, log_bytes_max=log_bytes_max, foretold=True) as swarm,
        swarm.client() as client,
    ):
        running = client.begin(PROMPT, GenerationOptions(max_new_tokens=300))
        tokens: list[int] = []
        async for piece in running:
            if len(tokens) < 10 <= len(tokens) + len(piece.token_ids):
                leaving = owner(swarm, running.route[stage].peer_id)
                leaving.stage.move_all()
            tokens += piece.token_ids
        assert tuple(tokens) == answer_of(PROMPT, 300)
        assert running.answer().failovers == 0
        assert leaving.peer_id not in {each.peer_id for each in running.route}


@pytest.mark.virtual(limit_s=600)
async def test_where_kv_is_full_nothing_is_drafted_and_nobody_gives_way() -> None:
    async with paper_swarm((0, 4), (4, 8), foretold=True) as swarm, swarm.client() as client:
        running = client.begin(PROMPT, GenerationOptions(max_new_tokens=NEW))
        rooms = [peer.stage.kv.room for peer in swarm.peers]
        whole, full = [room.pages for room in rooms], 0
        tokens: list[int] = []
        async for piece in running:
            tokens += piece.token_ids
            for room, pages in zip(rooms, whole, strict=True):  # a token's room and no more
                held = room.capacity_tokens - room.untaken_tokens
                room.pages = pages if len(tokens) >= NEW / 2 else held + 1
            if len(tokens) < NEW / 2:
                full = counted(swarm)["drafted"]
        assert tuple(tokens) == answer_of(PROMPT, NEW)
        counts = counted(swarm)
        assert counts["gave_way"] == counts["waited_for_kv"] == full == 0
        assert counts["drafted"] > 0


class Stranger:
    """Drafts tokens of another vocabulary."""

    known = 1 << 20

    def extend(self, token_ids: Sequence[int]) -> None:
        pass

    def propose(self, most: int) -> Draft:
        return Draft(token_ids=tuple(range(1 << 20, (1 << 20) + most)), grade=3)


@pytest.mark.virtual(limit_s=600)
async def test_drafts_of_another_vocabulary_change_no_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tests.sim.paper_swarm.RiggedDrafter", lambda foretell: Stranger())
    async with paper_swarm((0, 4), (4, 8), foretold=True) as swarm, swarm.client() as client:
        answer = await client.generate(PROMPT, max_new_tokens=NEW)
        assert answer.token_ids == answer_of(PROMPT, NEW)
        counts = counted(swarm)
        assert counts["accepted_drafts"] == 0 < counts["drafted"] < NEW


def lied_to(
    hears: int,
    place: int,
    lie: Callable[[StageServer, StageSession, str], None],
    *spans: tuple[int, int],
) -> None:
    """Have the stage at ``place`` of a route tell peer ``hears`` a lie in mid-answer: that stage is
    replaced, and no token changes."""

    async def scenario() -> None:
        async with paper_swarm(*spans) as swarm, swarm.client() as client:
            running = client.begin(PROMPT, GenerationOptions(max_new_tokens=NEW))
            stage = swarm.peers[hears].stage
            tokens: list[int] = []
            liars: list[str] = []
            async for piece in running:
                tokens += piece.token_ids
                if len(tokens) == 20:
                    liars.append(running.route[place].peer_id)
                    (live,) = stage.shell.table
                    lie(stage, live.session, liars[0])
            assert len(liars) == 1
            assert stage.counters["unsound_drafts"] == 1
            assert running.answer().failovers == 1
            assert running.route[place].peer_id not in liars
            assert tuple(tokens) == answer_of(PROMPT, NEW)

    run_virtual(scenario(), limit_s=600)


@pytest.mark.parametrize("claimed", [(1, 2), (1,) * 16])
def test_a_last_stage_that_claims_more_than_was_drafted_is_named(claimed: tuple[int, ...]) -> None:
    def lie(stage: StageServer, session: StageSession, last: str) -> None:
        token = RingToken(
            session=session.open.session,
            attempt=session.open.attempt,
            position=len(session.inputs),
            token_ids=claimed,
        )
        stage.pipeline.take_ring(last, (token,))

    lied_to(0, -1, lie, (0, 4), (4, 8), (4, 8))


@pytest.mark.parametrize(("rows", "drafts"), [(3, ()), (1, (5,)), (2, (5, 6)), (17, (5,) * 15)])
def test_a_stage_that_sends_other_rows_than_a_decode_has_is_named(
    rows: int, drafts: tuple[int, ...]
) -> None:
    def lie(stage: StageServer, session: StageSession, first: str) -> None:
        item = ActivationItem(
            session=session.open.session,
            attempt=session.open.attempt,
            position=session.next_position,
            tokens=rows,
            drafts=drafts,
        )
        message = Activations(items=(item,), dtype="float32", hidden=1)
        stage.pipeline.take_activations(first, message, bytes(4 * rows))

    lied_to(1, 0, lie, (0, 4), (4, 8), (0, 4))


@pytest.mark.parametrize("token_s", [0.0005, 0.01])
@pytest.mark.virtual(limit_s=600)
async def test_a_draft_model_changes_no_token_and_saves_rounds(token_s: float) -> None:
    async with (
        paper_swarm((0, 3), (3, 6), (6, 8), modelled=True) as swarm,
        swarm.client() as client,
    ):
        for drafts in swarm.drafts.values():
            drafts.token_s = token_s
        took_s = await times_of(client)
        assert took_s[True] < took_s[False] * (0.5 if token_s < 0.01 else 0.8)
        counts = swarm.peers[0].stage.counters
        assert NEW / 4 < counts["accepted_by_model"] < counts["drafted_by_model"]
        assert not any(drafts.rows for drafts in swarm.drafts.values()), "held for nobody"


@pytest.mark.parametrize(("token_s", "fails_at"), [(5.0, None), (0.2, None), (0.0005, 30)])
@pytest.mark.virtual(limit_s=600)
async def test_a_draft_model_that_is_slow_or_broken_costs_nothing(
    token_s: float, fails_at: int | None
) -> None:
    async with (
        paper_swarm((0, 3), (3, 6), (6, 8), modelled=True) as swarm,
        swarm.client() as client,
    ):
        for drafts in swarm.drafts.values():
            drafts.token_s, drafts.fails_at = token_s, fails_at
        took_s = await times_of(client)
        assert took_s[True] <= took_s[False] / 0.97


@pytest.mark.parametrize("stage", [0, 2])
@pytest.mark.virtual(limit_s=600)
async def test_a_stage_lost_amid_a_draft_models_drafts_costs_no_token(stage: int) -> None:
    spans = ((0, 3), (3, 6), (6, 8)) * 2
    async with paper_swarm(*spans, modelled=True) as swarm, swarm.client() as client:
        running = client.begin(PROMPT, GenerationOptions(max_new_tokens=NEW))
        tokens: list[int] = []
        async for piece in running:
            if len(tokens) < 20 <= len(tokens) + len(piece.token_ids):
                swarm.kill(owner(swarm, running.route[stage].peer_id))
            tokens += piece.token_ids
        assert tuple(tokens) == answer_of(PROMPT, NEW)
        assert running.answer().failovers >= 1
        assert counted(swarm)["accepted_by_model"] > 0


@pytest.mark.parametrize("stages", [1, 3])
@pytest.mark.virtual(limit_s=600)
async def test_a_models_own_head_changes_no_token_and_saves_rounds(stages: int) -> None:
    spans = ((0, 8),) if stages == 1 else ((0, 3), (3, 6), (6, 8))
    async with paper_swarm(*spans, headed=3) as swarm, swarm.client() as client:
        took_s = await times_of(client)
        assert took_s[True] < took_s[False] * 0.6
        counts = swarm.peers[0].stage.counters
        assert NEW / 4 < counts["accepted_by_head"] < counts["drafted_by_head"]


@pytest.mark.parametrize("way", ["kill", "move"])
@pytest.mark.parametrize("stage", [0, 2])
@pytest.mark.virtual(limit_s=600)
async def test_a_stage_lost_amid_an_own_heads_drafts_costs_no_token(stage: int, way: str) -> None:
    spans = ((0, 3), (3, 6), (6, 8)) * 2
    async with paper_swarm(*spans, headed=3) as swarm, swarm.client() as client:
        running = client.begin(PROMPT, GenerationOptions(max_new_tokens=NEW))
        tokens: list[int] = []
        async for piece in running:
            if len(tokens) < 20 <= len(tokens) + len(piece.token_ids):
                gone = owner(swarm, running.route[stage].peer_id)
                swarm.kill(gone) if way == "kill" else gone.stage.move_all()
            tokens += piece.token_ids
        assert tuple(tokens) == answer_of(PROMPT, NEW)
        assert running.answer().failovers >= (way == "kill")
        assert counted(swarm)["accepted_by_head"] > 0


@pytest.mark.virtual(limit_s=600)
async def test_a_last_stage_that_foretells_another_vocabulary_or_nonsense_changes_no_token() -> (
    None
):
    for told, strange in (((1 << 24,) * 15, True), ((5,) * 15, False), ((5, 1 << 24), True)):
        async with (
            paper_swarm((0, 4), (4, 8), headed=3) as swarm,
            swarm.client() as client,
        ):
            swarm.peers[1].engine._foretold = lambda _, told=told: told
            answer = await client.generate(PROMPT, max_new_tokens=NEW)
            assert answer.token_ids == answer_of(PROMPT, NEW)
            counts = counted(swarm)
            assert (counts["strange_drafts"] > 0) == strange
            assert counts["drafted_by_head"] < NEW
            assert counts["engine_errors"] == counts["unsound_drafts"] == 0
