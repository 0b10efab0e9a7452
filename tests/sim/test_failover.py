"""Only what is lost is replaced: who runs which rows again, under a virtual clock."""

import asyncio
from collections.abc import Sequence
from itertools import pairwise

import pytest

from client.session.config import SessionConfig
from client.session.controller import ControllerState, RouteStatus
from tests.sim.paper_swarm import PaperPeer, PaperSwarm, answer_of, paper_swarm
from tests.sim.test_sessions import held, owner, until

pytestmark = pytest.mark.sim

PROMPT = tuple(range(100, 200))
NEW = 60
THREE = ((0, 3), (3, 6), (6, 8))


async def answer_losing(
    swarm: PaperSwarm, stages: Sequence[int], *, way: str = "kill", at: int = 20, gap_s: float = 0
) -> tuple[list[PaperPeer], dict[str, int]]:
    """One answer that loses these stages of its route after ``at`` tokens.

    Returns the lost peers and the rows that each peer ran after the loss.
    """
    async with swarm.client() as client:
        running = client.begin(PROMPT, max_new_tokens=NEW)
        tokens: list[int] = []
        victims: list[PaperPeer] = []
        before: dict[str, int] = {}
        async for piece in running:
            tokens += piece.token_ids
            if len(tokens) >= at and not victims:
                victims = [owner(swarm, running.route[stage].peer_id) for stage in stages]
                before = {peer.peer_id: peer.engine.rows_run for peer in swarm.peers}
                for victim in victims:
                    getattr(swarm, way)(victim)
                    await asyncio.sleep(gap_s)
        assert tuple(tokens) == answer_of(PROMPT, NEW)
        lost = {victim.peer_id for victim in victims}
        assert not lost & {s.peer_id for s in running.answer().route}
        living = [peer for peer in swarm.peers if peer.peer_id not in lost]
        await until(lambda: not any(peer.engine.kv for peer in living))
        assert all(peer.stage.shell.log.bytes_held == 0 for peer in living)
        return victims, {
            peer.peer_id: peer.engine.rows_run - before[peer.peer_id] for peer in living
        }


@pytest.mark.virtual(limit_s=600)
@pytest.mark.parametrize("way", ["kill", "freeze"])
@pytest.mark.parametrize("stages", [(0,), (1,), (2,), (0, 1), (1, 2), (0, 2)])
async def test_survivors_run_nothing_again(way: str, stages: tuple[int, ...]) -> None:
    async with paper_swarm(*THREE, *THREE) as swarm:
        _, ran = await answer_losing(swarm, stages, way=way)
        counts = sorted(ran.values())
        # Some rows were on their way when the stage was lost; a few are run twice.
        rest, slack = NEW - 20, 8
        replayed = [rows for rows in counts if rows >= len(PROMPT) + rest]
        assert len(replayed) == len(stages), counts
        assert all(rows <= rest + slack for rows in counts if rows not in replayed), counts


@pytest.mark.virtual(limit_s=600)
@pytest.mark.parametrize("known", [300, 450])
async def test_a_slow_replay_is_no_stall(known: int) -> None:
    """Who takes a lost stage's place runs all known tokens, for longer than a route that brings
    tokens may bring none, and than a stage keeps a session that makes no progress."""
    prompt = tuple(range(known))
    async with paper_swarm(*THREE) as swarm, swarm.client() as client:
        running = client.begin(prompt, max_new_tokens=5)
        tokens: list[int] = []
        async for piece in running:
            if not tokens:
                await swarm.add(*THREE[0], step_s=2.4)
                swarm.kill(owner(swarm, running.route[0].peer_id))
            tokens += piece.token_ids
        assert tuple(tokens) == answer_of(prompt, 5)
        assert running.answer().failovers == 1


@pytest.mark.virtual(limit_s=600)
async def test_an_engine_that_gets_stuck_right_behind_a_loss_is_found_as_soon_as_any() -> None:
    loop = asyncio.get_running_loop()
    async with paper_swarm(*THREE, *THREE) as swarm, swarm.client() as client:
        prompt = tuple(range(450))
        running = client.begin(prompt, max_new_tokens=5)

        async def strike() -> float:
            await until(lambda: bool(running.route))
            first, middle = (owner(swarm, running.route[stage].peer_id) for stage in (0, 1))
            first.engine.step_s = 2.0
            ran = first.engine.rows_run
            await until(lambda: first.engine.rows_run > ran)
            swarm.stick(first)  # the next chunk is in its engine, and ends
            swarm.kill(middle)
            return loop.time()

        striking = asyncio.create_task(strike())
        tokens = [token_id async for piece in running for token_id in piece.token_ids]
        assert tuple(tokens) == answer_of(prompt, 5)
        assert running.answer().failovers == 2
        assert loop.time() - await striking < SessionConfig().stall_s


@pytest.mark.virtual(limit_s=600)
async def test_who_asks_hears_who_was_lost_and_over_whom_the_answer_goes_on() -> None:
    async with paper_swarm(*THREE, *THREE) as swarm, swarm.client() as client:
        running = client.begin(PROMPT, max_new_tokens=NEW)
        told: list[RouteStatus] = []
        running.on_route = told.append
        victim = ""
        async for _ in running:
            if not victim:
                victim = running.route[1].peer_id
                swarm.kill(owner(swarm, victim))
        drawing, opening, is_open = (
            ControllerState.DRAWING,
            ControllerState.OPENING,
            ControllerState.RUNNING,
        )
        one_by_one = [each.state for each in told]
        assert one_by_one == [drawing, opening, is_open, drawing, opening, is_open]
        assert [each.failovers for each in told] == [0, 0, 0, 1, 1, 1]
        assert [each.lost for each in told] == [set()] * 3 + [{victim}] * 2 + [set()]
        assert told[0].route == ()
        assert told[3].route == told[2].route, "the one that was lost is still shown"
        assert told[5].route == running.answer().route
        assert victim not in {stage.peer_id for stage in told[5].route}


@pytest.mark.virtual(limit_s=600)
async def test_several_peers_together_replace_one() -> None:
    async with paper_swarm((0, 2), (2, 6), (6, 8), (2, 4), (3, 6)) as swarm:
        victims, ran = await answer_losing(swarm, [1])
        assert victims[0].engine.span == (2, 6)
        assert sum(rows >= len(PROMPT) for rows in ran.values()) == 2


@pytest.mark.virtual(limit_s=600)
@pytest.mark.parametrize("stages", [(1,), (2,), (1, 2)])
async def test_without_a_log_the_rows_are_run_again(stages: tuple[int, ...]) -> None:
    """A log too small for one session: the stages before run their rows again, from the ids."""
    async with paper_swarm(*THREE, *THREE, log_bytes_max=40) as swarm:
        await answer_losing(swarm, stages)
        assert sum(peer.stage.counters["rerun_rows"] for peer in swarm.peers) >= len(PROMPT)


@pytest.mark.virtual(limit_s=600)
@pytest.mark.parametrize("at", [1, 2, 59])
@pytest.mark.parametrize("stage", [0, 1, 2])
async def test_the_first_and_the_last_tokens_are_as_safe_as_others(at: int, stage: int) -> None:
    async with paper_swarm(*THREE, *THREE) as swarm:
        await answer_losing(swarm, [stage], at=at)


@pytest.mark.virtual(limit_s=600)
@pytest.mark.parametrize("gap_s", [0.005, 0.02, 0.3, 2.0])
async def test_one_after_the_other(gap_s: float) -> None:
    """The replacement is on its way when the next stage is lost, and the next."""
    async with paper_swarm(*THREE * 3) as swarm:
        await answer_losing(swarm, [1, 2, 0], gap_s=gap_s)


@pytest.mark.virtual(limit_s=600)
async def test_the_answer_goes_on_by_itself_when_a_holder_returns() -> None:
    said: list[str] = []
    async with paper_swarm(*THREE) as swarm, swarm.client(on_status=said.append) as client:
        running = client.begin(PROMPT, max_new_tokens=NEW)
        tokens: list[int] = []
        loop = asyncio.get_running_loop()
        lost_s = 0.0
        back: asyncio.Task[None] | None = None

        async def come_back() -> None:
            await until(lambda: any("layers 3-5 are held by nobody" in text for text in said))
            assert loop.time() - lost_s < 5.0
            await asyncio.sleep(15)
            await swarm.add(3, 6)

        async for piece in running:
            tokens += piece.token_ids
            if len(tokens) >= 20 and back is None:
                swarm.kill(swarm.peers[1])
                lost_s = loop.time()
                first = swarm.peers[0].engine.rows_run
                back = asyncio.create_task(come_back())
        assert back is not None
        await back
        assert tuple(tokens) == answer_of(PROMPT, NEW)
        assert swarm.peers[0].engine.rows_run - first < NEW, "the first stage kept its KV"
        waits = [text.partition(" (")[0] for text in said if text.startswith("waiting")]
        assert all(a != b for a, b in pairwise(waits)), "nothing is told twice"
        living = [swarm.peers[0], *swarm.peers[2:]]
        await until(lambda: not any(peer.engine.kv for peer in living))


@pytest.mark.virtual(limit_s=600)
async def test_nobody_waits_for_ever_for_an_owner_that_is_gone_too() -> None:
    """A stage and the client die together: what is left frees its share by itself."""
    async with paper_swarm(*THREE) as swarm:
        connected = swarm.client()
        client = await connected.__aenter__()
        pieces = aiter(client.begin(PROMPT, max_new_tokens=400))
        await anext(pieces)
        swarm.kill(swarm.peers[1])
        swarm.network.kill(client.transport.peer_id)
        living = [swarm.peers[0], swarm.peers[2]]
        await until(lambda: not any(peer.engine.kv for peer in living), limit_s=35)
        await pieces.aclose()
        await connected.__aexit__(None, None, None)
        assert held(swarm) <= 1  # the dead one's
