"""Sessions that move to a freer holder of the same layers while they decode."""

import asyncio

import pytest

from client import Swarm
from coordinator.policies.routing.balance import load_of
from tests.sim.paper_swarm import PaperPeer, PaperSwarm, answer_of, paper_swarm
from tests.sim.test_sessions import held, until

pytestmark = pytest.mark.sim

NEW = 200
KV_TOKENS = 5000


def prompt_of(number: int) -> tuple[int, ...]:
    return tuple(range(number, number + 60))


class Answers:
    """Answers that are asked for one after the other and read at the same time."""

    def __init__(self, client: Swarm, new: int = NEW) -> None:
        self._client = client
        self._new = new
        self._tasks: list[asyncio.Task[None]] = []
        self.failovers = 0
        self.tokens = 0

    def ask(self, number: int, *, priority: str = "normal") -> None:
        self._tasks.append(asyncio.create_task(self._read(number, priority)))

    async def _read(self, number: int, priority: str) -> None:
        running = self._client.begin(prompt_of(number), max_new_tokens=self._new, priority=priority)
        tokens: list[int] = []
        async for piece in running:
            tokens += piece.token_ids
            self.tokens += len(piece.token_ids)
        assert tuple(tokens) == answer_of(prompt_of(number), self._new)
        self.failovers += running.answer().failovers

    async def all_right(self) -> None:
        """Every answer came whole, exactly once, and no stage counted as lost."""
        await asyncio.gather(*self._tasks)
        assert self.failovers == 0


def spread(peers: list[PaperPeer]) -> float:
    values = [load_of(peer.record()).freeness for peer in peers]
    return max(values) - min(values)


def moved(swarm: PaperSwarm) -> int:
    return sum(peer.stage.counters["move_by_copy"] for peer in swarm.peers) + sum(
        peer.stage.counters["move_by_replay"] for peer in swarm.peers
    )


async def nothing_is_held(swarm: PaperSwarm) -> None:
    await until(lambda: held(swarm) == 0)
    assert all(peer.engine.kv_free == KV_TOKENS for peer in swarm.peers)
    assert all(peer.stage.shell.log.bytes_held == 0 for peer in swarm.peers)


@pytest.mark.virtual(limit_s=900)
@pytest.mark.parametrize("layers", [(0, 4), (4, 8)])
@pytest.mark.parametrize("way", ["copy", "replay"])
async def test_who_joins_a_full_peer_takes_sessions_over(way: str, layers: tuple[int, int]) -> None:
    async with paper_swarm() as swarm, swarm.client() as client:
        for span in ((0, 4), (4, 8)):
            await swarm.add(*span, kv_tokens=KV_TOKENS)
        full = next(peer for peer in swarm.peers if peer.engine.span == layers)
        answers = Answers(client)
        for number in range(10):
            answers.ask(number)
        await until(lambda: answers.tokens > 100)
        fresh = await swarm.add(*layers, kv_tokens=KV_TOKENS)
        if way == "replay":
            fresh.bandwidth = 1.0
        wide = spread([full, fresh])
        swarm.balance(evens=True)
        await until(lambda: full.stage.sessions <= 6)
        assert full.stage.sessions + fresh.stage.sessions >= 10, "by moves, not by ends"
        assert spread([full, fresh]) < wide / 2
        assert fresh.stage.counters[f"move_by_{way}"] >= 4 or layers[0] == 0
        before = moved(swarm)
        await asyncio.sleep(5.0)
        assert moved(swarm) <= before + 1, "it goes on although both are as full"
        await answers.all_right()
        await nothing_is_held(swarm)


@pytest.mark.virtual(limit_s=900)
async def test_without_another_holder_all_stay() -> None:
    async with paper_swarm() as swarm, swarm.client() as client:
        for span in ((0, 4), (4, 8)):
            await swarm.add(*span, kv_tokens=KV_TOKENS)
        swarm.balance(evens=True)
        answers = Answers(client)
        for number in range(10):
            answers.ask(number)
        await answers.all_right()
        assert moved(swarm) == 0
        await nothing_is_held(swarm)


@pytest.mark.virtual(limit_s=900)
async def test_ordinary_sessions_make_room_around_an_urgent_one() -> None:
    """Three sessions are too few to even out; the headroom of an urgent one is what they are in."""
    async with paper_swarm() as swarm, swarm.client() as client:
        await swarm.add(0, 4, kv_tokens=KV_TOKENS)
        narrow = await swarm.add(4, 8, kv_tokens=1200)  # room for 3 and the headroom
        answers = Answers(client, new=300)
        for number in range(3):
            answers.ask(number)
        await until(lambda: answers.tokens > 30)
        wide = await swarm.add(4, 8, kv_tokens=KV_TOKENS)
        swarm.balance()
        await asyncio.sleep(2.5)
        assert narrow.stage.sessions == 3
        assert moved(swarm) == 0
        wide.engine.serving = False  # the urgent one is to arrive where room is short
        await wide.announce()
        await client.reader.refresh()
        asked = client.begin(prompt_of(9)[:20], max_new_tokens=200, priority="high")
        tokens: list[int] = []
        made_room: list[int] = []
        async for piece in asked:
            tokens += piece.token_ids
            if not wide.engine.serving:
                assert narrow.stage.load.freeness < 0, "headroom is in use"
                wide.engine.serving = True
                await wide.announce()
            elif wide.stage.sessions:
                made_room.append(narrow.stage.sessions)
        assert tuple(tokens) == answer_of(prompt_of(9)[:20], 200)
        assert made_room[-1] < 4, "an ordinary session made room"
        assert narrow.stage.load.freeness >= 0
        assert asked.answer().route[-1].peer_id == narrow.peer_id, "the urgent one stayed"
        await answers.all_right()
        await until(lambda: held(swarm) == 0)
        assert narrow.engine.kv_free == 1200


@pytest.mark.virtual(limit_s=900)
@pytest.mark.parametrize("way", ["full", "refuses", "kill", "freeze", "not serving"])
@pytest.mark.parametrize("after_s", [0.05, 0.6])
async def test_whatever_becomes_of_the_freer_peer_answers_are_right(
    way: str, after_s: float
) -> None:
    async with paper_swarm() as swarm, swarm.client() as client:
        for span in ((0, 4), (4, 8)):
            await swarm.add(*span, kv_tokens=KV_TOKENS)
        answers = Answers(client, new=130)
        for number in range(6):
            answers.ask(number)
        await until(lambda: answers.tokens > 60)
        fresh = await swarm.add(4, 8, kv_tokens=KV_TOKENS)
        swarm.balance(evens=True)
        if way == "refuses":
            fresh.engine.refuses_kv = True
        else:
            await until(lambda: fresh.stage.sessions > 0)
            await asyncio.sleep(after_s)
            match way:
                case "full":
                    fresh.fill()
                case "not serving":
                    fresh.engine.serving = False
                case _:
                    getattr(swarm, way)(fresh)
        if way in {"kill", "freeze"}:
            await asyncio.gather(*answers._tasks)  # who had moved there was lost once
        else:
            await answers.all_right()
        living = [peer for peer in swarm.peers if peer is not fresh or way == "refuses"]
        await until(lambda: not any(peer.engine.kv for peer in living))
