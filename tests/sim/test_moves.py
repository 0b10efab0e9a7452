"""Planned moves: a stage that leaves hands its sessions over while they decode."""

import asyncio
from itertools import pairwise
from statistics import median

import pytest

from tests.sim.paper_swarm import PaperPeer, PaperSwarm, answer_of, paper_swarm
from tests.sim.test_sessions import held, owner, until

pytestmark = pytest.mark.sim

PROMPT = tuple(range(200))
NEW = 150
THREE = ((0, 3), (3, 6), (6, 8))


def by_replay(swarm: PaperSwarm) -> None:
    """Links so slow that the few bytes of rows decide against copying KV."""
    for peer in swarm.peers:
        peer.bandwidth = 1e3


async def leave(peer: PaperPeer) -> None:
    peer.engine.serving = False
    await peer.announce()
    peer.stage.move_all()


async def answer_while_leaving(
    swarm: PaperSwarm, stages: tuple[int, ...]
) -> tuple[list[PaperPeer], float, float]:
    """One answer some of whose stages leave: who left, the longest gap since, the usual one."""
    loop = asyncio.get_running_loop()
    async with swarm.client() as client:
        running = client.begin(PROMPT, max_new_tokens=NEW)
        tokens: list[int] = []
        left: list[PaperPeer] = []
        gaps: list[float] = []
        usual_s, last_s = 0.0, 0.0
        async for piece in running:
            now_s = loop.time()
            gaps.append(now_s - last_s)
            last_s = now_s
            tokens += piece.token_ids
            if len(tokens) >= 30 and not left:
                usual_s = sorted(gaps)[len(gaps) // 2]
                gaps.clear()
                left = [owner(swarm, running.route[stage].peer_id) for stage in stages]
                for peer in left:
                    await leave(peer)
            if len(tokens) >= NEW - 30:
                assert not any(peer.engine.kv for peer in left), "freed long before the end"
        assert tuple(tokens) == answer_of(PROMPT, NEW)
        answer = running.answer()
        assert answer.failovers == 0
        assert not {peer.peer_id for peer in left} & {s.peer_id for s in answer.route}
        await until(lambda: held(swarm) == 0)
        return left, max(gaps), usual_s


@pytest.mark.virtual(limit_s=600)
@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("way", ["copy", "replay", "refused"])
async def test_a_hand_over_is_hardly_noticed(stage: int, way: str) -> None:
    async with paper_swarm(*THREE, *THREE) as swarm:
        if way == "replay":
            by_replay(swarm)
        for peer in swarm.peers:
            peer.engine.refuses_kv = way == "refused"
        left, gap_s, usual_s = await answer_while_leaving(swarm, (stage,))
        # Not the prefill of 230 rows, but round trips and the few rows since the copy.
        assert gap_s <= 3 * usual_s
        copied = sum(peer.stage.counters["copied_rows"] for peer in swarm.peers)
        replayed = way != "copy" and stage > 0
        assert (copied > len(PROMPT)) == replayed, "the owner itself feeds a first stage"
        imported = [peer.engine for peer in swarm.peers if peer.engine.kv_imported]
        assert bool(imported) == (way == "copy")
        for engine in imported:
            assert engine.span == left[0].engine.span
            assert engine.kv_imported >= len(PROMPT)
            assert engine.rows_run < NEW, "what was copied is not run"


@pytest.mark.virtual(limit_s=600)
async def test_tokens_come_on_while_records_are_read_for_a_move(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop, reading_s = asyncio.get_running_loop(), 1.0
    async with paper_swarm(*THREE, *THREE) as swarm, swarm.client() as client:
        look = client.reader.look

        async def slowly() -> None:
            await asyncio.sleep(reading_s)
            await look()

        monkeypatch.setattr(client.reader, "look", slowly)
        running = client.begin(PROMPT, max_new_tokens=2 * NEW)
        tokens: list[int] = []
        times: list[float] = []
        left: PaperPeer | None = None
        async for piece in running:
            times.append(loop.time())
            tokens += piece.token_ids
            if len(tokens) >= 30 and left is None:
                left = owner(swarm, running.route[1].peer_id)
                await leave(left)
        assert left is not None
        assert left.peer_id not in {stage.peer_id for stage in running.route}
        apart_s = [after - at for at, after in pairwise(times)]
        assert max(apart_s) < 10 * median(apart_s) < reading_s
        assert tuple(tokens) == answer_of(PROMPT, 2 * NEW)
        assert running.answer().failovers == 0


@pytest.mark.virtual(limit_s=600)
@pytest.mark.parametrize("way", ["copy", "replay"])
@pytest.mark.parametrize("stages", [(0, 1), (1, 2), (0, 2), (0, 1, 2)])
async def test_several_leave_at_once(stages: tuple[int, ...], way: str) -> None:
    async with paper_swarm(*THREE * 3) as swarm:
        if way == "replay":
            by_replay(swarm)
        await answer_while_leaving(swarm, stages)


@pytest.mark.virtual(limit_s=600)
async def test_two_peers_together_take_the_place_of_one() -> None:
    async with paper_swarm((0, 2), (2, 6), (6, 8), (2, 4), (4, 6)) as swarm:
        left, gap_s, usual_s = await answer_while_leaving(swarm, (1,))
        assert left[0].engine.span == (2, 6)
        assert gap_s < 8 * usual_s


@pytest.mark.virtual(limit_s=600)
@pytest.mark.parametrize("copies", [False, True])
async def test_a_log_that_is_too_short_costs_a_replay_unless_kv_is_copied(copies: bool) -> None:
    async with paper_swarm(*THREE, *THREE, log_bytes_max=40) as swarm:
        for peer in swarm.peers:
            peer.engine.refuses_kv = not copies
        _, gap_s, usual_s = await answer_while_leaving(swarm, (1,))
        assert not copies or gap_s <= 3 * usual_s


@pytest.mark.virtual(limit_s=600)
async def test_with_nobody_to_move_to_the_session_stays_where_it_is() -> None:
    async with paper_swarm(*THREE) as swarm, swarm.client() as client:
        running = client.begin(PROMPT, max_new_tokens=NEW)
        tokens: list[int] = []
        async for piece in running:
            tokens += piece.token_ids
            if len(tokens) == 30:
                await leave(swarm.peers[1])
        assert tuple(tokens) == answer_of(PROMPT, NEW)
        assert running.answer().failovers == 0


@pytest.mark.virtual(limit_s=600)
@pytest.mark.parametrize("stage", [1, 2])
async def test_a_move_that_takes_too_long_leaves_nothing_behind(stage: int) -> None:
    async with paper_swarm(*THREE) as swarm, swarm.client() as client:
        running = client.begin(PROMPT, max_new_tokens=NEW)
        tokens: list[int] = []
        new: PaperPeer | None = None
        async for piece in running:
            tokens += piece.token_ids
            if len(tokens) >= 30 and new is None:
                new = await swarm.add(*THREE[stage], step_s=1.0)
                by_replay(swarm)
                assert running._controller is not None
                running._controller.move_s = 0.5
                full = swarm.peers[stage].stage
                full.relieve(dict.fromkeys(full.holding(), new.peer_id))
        assert new is not None
        assert new.stage.counters["move_by_replay"] == 1
        assert running.answer().failovers == 0
        assert running.route == swarm.route[:3], "it stayed where it was"
        # Those that were on their way when it was given up.
        assert new.stage.counters["stale_activations"] <= 3
        assert tuple(tokens) == answer_of(PROMPT, NEW)


@pytest.mark.virtual(limit_s=600)
@pytest.mark.parametrize("way", ["kill", "freeze", "full"])
@pytest.mark.parametrize("after_s", [0.0, 0.02, 0.05, 0.3, 1.0, 2.0])
@pytest.mark.parametrize("who", ["new", "leaving", "upstream"])
@pytest.mark.parametrize("replay", [False, True])
async def test_whoever_is_lost_during_a_move_the_answer_is_right(
    way: str, after_s: float, who: str, replay: bool
) -> None:
    async with paper_swarm(*THREE, *THREE, *THREE) as swarm, swarm.client() as client:
        if replay:
            by_replay(swarm)
        running = client.begin(PROMPT, max_new_tokens=NEW)
        tokens: list[int] = []
        trouble: asyncio.Task[None] | None = None
        victims: list[PaperPeer] = []

        async def strike(route: list[PaperPeer]) -> None:
            await asyncio.sleep(after_s)
            others = [p for p in swarm.peers if p.engine.span == (3, 6) and p not in route]
            taken = [peer for peer in others if peer.engine.kv] or others
            victim = {"new": taken[0], "leaving": route[1], "upstream": route[0]}[who]
            victims.append(victim)
            if way == "full":
                victim.fill()
            else:
                getattr(swarm, way)(victim)

        async for piece in running:
            tokens += piece.token_ids
            if len(tokens) >= 30 and trouble is None:
                route = [owner(swarm, stage.peer_id) for stage in running.route]
                await leave(route[1])
                trouble = asyncio.create_task(strike(route))
        assert trouble is not None
        await trouble
        assert tuple(tokens) == answer_of(PROMPT, NEW)
        living = [p for p in swarm.peers if p not in victims]
        await until(lambda: not any(peer.engine.kv for peer in living))


@pytest.mark.virtual(limit_s=600)
async def test_a_session_that_waits_for_lost_layers_holds_back_no_move_that_brings_them() -> None:
    """The only holder of layers is lost; a peer whose session waits for them is to take them."""
    loop = asyncio.get_running_loop()
    async with paper_swarm(*THREE) as swarm, swarm.client(wait_s=60) as client:
        running = client.begin(PROMPT, max_new_tokens=NEW)
        tokens: list[int] = []
        moving: asyncio.Task[float] | None = None

        async def lose_and_move() -> float:
            lost, mover = swarm.peers[2], swarm.peers[1]
            swarm.kill(lost)
            await until(lambda: mover.stage.counters["paused"] > 0)
            began_s = loop.time()
            await leave(mover)
            assert await mover.stage.wait_idle(20)
            moved_s = loop.time() - began_s
            await swarm.add(3, 8)
            return moved_s

        async for piece in running:
            tokens += piece.token_ids
            if len(tokens) >= 30 and moving is None:
                moving = asyncio.create_task(lose_and_move())
        assert moving is not None
        assert await moving <= 2.0
        assert tuple(tokens) == answer_of(PROMPT, NEW)
