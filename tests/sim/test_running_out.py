"""Stages let in more than fits if all answers are long: what happens when KV runs out."""

import asyncio

import pytest

from coordinator.policies.admission.config import ADMISSION
from tests.sim.paper_swarm import PaperPeer, PaperSwarm, answer_of, paper_swarm
from tests.sim.test_sessions import held, until

pytestmark = pytest.mark.sim

SPANS = ((0, 4), (4, 8))
KV_TOKENS = 300
EXPECTED = 20


async def optimists(swarm: PaperSwarm, *spans: tuple[int, int]) -> None:
    """Peers that expect short answers."""
    for span in spans:
        learn(await swarm.add(*span, kv_tokens=KV_TOKENS))


def learn(peer: PaperPeer) -> None:
    """Let a peer expect short answers."""
    for _ in range(10_000):
        peer.stage.kv.room.lengths.ended("", EXPECTED)


def prompt_of(number: int) -> tuple[int, ...]:
    return tuple(range(number, number + 20))


async def ask(swarm: PaperSwarm, number: int, tokens: int, wait_s: float = 600.0) -> int:
    """One answer, which must be right; returns how often the swarm had no room for it."""
    async with swarm.client(wait_s=wait_s) as client:
        answer = await client.generate(prompt_of(number), max_new_tokens=tokens)
        assert answer.token_ids == answer_of(prompt_of(number), tokens)
        assert answer.failovers == 0, "nobody was lost"
        return client.view.counters["refused_no_kv"]


def counted(swarm: PaperSwarm, name: str) -> int:
    return sum(peer.stage.counters[name] for peer in swarm.peers)


async def all_is_free(swarm: PaperSwarm) -> None:
    await until(lambda: held(swarm) == 0)
    for peer in swarm.peers:
        assert peer.engine.kv_free == peer.stage.kv.room.free_tokens == KV_TOKENS
        assert peer.stage.kv.room.untaken_tokens == KV_TOKENS
        assert peer.stage.kv.waiting == 0
        assert peer.stage.counters["failed"] == peer.stage.counters["engine_errors"] == 0


@pytest.mark.virtual(limit_s=600)
async def test_answers_that_outgrow_the_pool_pause_and_go_on_without_a_changed_token() -> None:
    async with paper_swarm() as swarm:
        await optimists(swarm, *SPANS)
        await asyncio.gather(*(ask(swarm, n, 100) for n in range(6)))
        assert counted(swarm, "gave_way") > 0
        await all_is_free(swarm)


@pytest.mark.virtual(limit_s=600)
async def test_who_does_not_wait_for_room_still_gets_the_whole_of_an_answer_that_began() -> None:
    async with paper_swarm() as swarm:
        await optimists(swarm, *SPANS)
        await asyncio.gather(*(ask(swarm, n, 100, wait_s=0.0) for n in range(6)))
        assert counted(swarm, "gave_way") > 0
        await all_is_free(swarm)


@pytest.mark.virtual(limit_s=600)
async def test_one_that_fills_the_pool_alone_ends_among_others() -> None:
    async with paper_swarm() as swarm:
        await optimists(swarm, *SPANS)
        long = KV_TOKENS - 20
        await asyncio.gather(*(ask(swarm, n, long) for n in range(4)))
        await all_is_free(swarm)


@pytest.mark.parametrize("way", ["no KV", "slow decodes"])
@pytest.mark.virtual(limit_s=1200)
async def test_a_client_with_all_the_room_leaves_some_to_one_with_none(way: str) -> None:
    """Whatever is full, neither waits for the other's answers to end."""
    slow = way == "slow decodes"
    async with paper_swarm() as swarm:
        for span in SPANS:
            peer = await swarm.add(
                *span,
                kv_tokens=10_000 if slow else KV_TOKENS,
                step_s=2 * ADMISSION.queue_wait_s if slow else 0.01,
            )
            learn(peer)
        async with swarm.client(wait_s=600.0) as crowd:
            asks = [
                asyncio.create_task(crowd.generate(prompt_of(n), max_new_tokens=100))
                for n in range(ADMISSION.queue_sessions_least + 4)
            ]
            waits = swarm.peers[0].stage.shell.decode_waits
            await until(
                lambda: (
                    (waits.p95_s or 0.0) > ADMISSION.queue_wait_s
                    if slow
                    else counted(swarm, "refused_no_kv") > 0
                )
            )
            assert await ask(swarm, 50, EXPECTED, wait_s=0.0) == 0, "it was let in at once"
            assert (counted(swarm, "crowd_gave_way") > 0) != slow
            for n, task in enumerate(asks):
                assert (await task).token_ids == answer_of(prompt_of(n), 100)


@pytest.mark.virtual(limit_s=600)
async def test_a_freer_holder_takes_who_has_to_give_way() -> None:
    async with paper_swarm() as swarm:
        await optimists(swarm, *SPANS)
        swarm.peers[0].engine.kv_tokens *= 4
        swarm.balance()
        tasks = [asyncio.create_task(ask(swarm, n, 150)) for n in range(5)]
        await asyncio.sleep(0.5)
        await optimists(swarm, SPANS[1])
        swarm.balance()
        await asyncio.gather(*tasks)
        assert counted(swarm, "asked_to_make_way") > 0
        assert swarm.peers[-1].engine.kv_imported > 0


@pytest.mark.virtual(limit_s=600)
async def test_strangers_with_long_answers_do_not_pause_a_usual_one() -> None:
    """Each identity opens one session that grows to its maximum: none of them is over its share."""
    async with paper_swarm() as swarm:
        await optimists(swarm, *SPANS)
        crowd = [asyncio.create_task(ask(swarm, n, 250)) for n in range(5)]
        await until(lambda: swarm.peers[1].engine.kv_free <= KV_TOKENS - 5 * 42)
        assert await ask(swarm, 50, EXPECTED) == 0
        contended = counted(swarm, "gave_way") + counted(swarm, "waited_for_kv")
        assert contended > 0, "there was room for all"
        await asyncio.gather(*crowd)
        await all_is_free(swarm)
